// SPDX-License-Identifier: MIT OR Apache-2.0
//! The conditions of a post.

use super::options::Options;
use crate::context::Core;
use crate::signal::{Signal, VaSignal};
use crate::team::Rank;
use crate::window::{WindowRange, bytes_on};
use bytemuck::Pod;
use gin_abi::handle::{CAP_STRONG_SIGNALS, CAP_VA_SIGNALS, WINDOW_SIGNALS};
use gin_abi::{Fault, FaultKind, Operation};

/// Looks at the conditions of a post, which are written down once: [`Right`] joins them without branches, so that a
/// post that is right passes one; [`Found`] says what is wrong.
pub(super) trait Judge {
    /// `fault` says what is wrong if `met` is false.
    fn condition(&mut self, met: bool, fault: impl FnOnce() -> Fault);
}

/// True while all conditions are met.
struct Right(bool);

impl Judge for Right {
    #[inline(always)]
    fn condition(&mut self, met: bool, _: impl FnOnce() -> Fault) {
        self.0 &= met;
    }
}

/// The first condition that is not met.
struct Found(Option<Fault>);

impl Judge for Found {
    #[inline(always)]
    fn condition(&mut self, met: bool, fault: impl FnOnce() -> Fault) {
        if !met && self.0.is_none() {
            self.0 = Some(fault());
        }
    }
}

/// The target and the options of a post: context, route, signal and counter.
#[derive(Clone, Copy)]
pub(super) struct Posted<'a> {
    pub(super) core: &'a Core,
    pub(super) peer: Rank,
    pub(super) options: &'a Options,
    pub(super) operation: Operation,
    pub(super) lsa: bool,
}

impl Posted<'_> {
    #[inline(always)]
    fn fault(&self, kind: FaultKind) -> Fault {
        self.core.fault(kind, self.operation).peer(self.peer.world())
    }

    /// Returns the first violation of the post, or else of `ranges`.
    #[inline(always)]
    pub(super) fn check(&self, ranges: &impl Ranges) -> Result<(), Fault> {
        let mut right = Right(true);
        self.judge(&mut right);
        ranges.judge(self, &mut right);
        if right.0 {
            return Ok(());
        }
        let mut found = Found(None);
        self.judge(&mut found);
        ranges.judge(self, &mut found);
        // Nothing is found only if a table of the host's changed in between.
        Err(found.0.unwrap_or(self.fault(FaultKind::BadDescriptor)))
    }

    #[inline(always)]
    fn judge(&self, judge: &mut impl Judge) {
        let Self { core, peer, options, lsa, .. } = *self;
        let (comm, fault) = (core.comm(), |kind| self.fault(kind));
        judge.condition(core.usable(), || core.unusable(self.operation));
        judge.condition(!lsa || comm.lsa_reaches(peer), || fault(FaultKind::NotReachable));
        if let Some(action) = options.signal {
            // Loads and stores have strong signals, whatever the network has.
            let strong = action.strong & !lsa;
            let has_strong = || comm.capabilities() & CAP_STRONG_SIGNALS != 0;
            match action.signal {
                Signal::Id(_) if options.internal => {}
                // There are as many strong signals as signals, or none.
                Signal::Id(id) => {
                    judge.condition(id < if strong { comm.strong_signals() } else { comm.signals() }, || {
                        if strong && !has_strong() {
                            fault(FaultKind::NoStrongSignals)
                        } else {
                            fault(FaultKind::UnknownSignal).values(comm.signals() as u64, id as u64)
                        }
                    });
                }
                Signal::Va(va) => {
                    judge.condition(!strong | has_strong(), || fault(FaultKind::NoStrongSignals));
                    judge.condition(takes_va_signals(core, &va, lsa), || fault(FaultKind::NoVaSignals));
                    judge.condition(va.offset.is_multiple_of(8), || fault(FaultKind::Misaligned).values(8, va.offset));
                    judge.condition(va.fits_on(peer), || {
                        fault(FaultKind::OutOfRange).values(bytes_on(&va.window, peer), va.end())
                    });
                }
            }
        }
        if let Some(counter) = options.counter {
            judge.condition(counter.0 < comm.counters(), || {
                fault(FaultKind::UnknownCounter).values(comm.counters() as u64, counter.0 as u64)
            });
        }
    }
}

#[inline(always)]
fn takes_va_signals(core: &Core, va: &VaSignal, lsa: bool) -> bool {
    (lsa | (core.comm().capabilities() & CAP_VA_SIGNALS != 0)) & (va.window.flags & WINDOW_SIGNALS != 0)
}

/// The ranges of a post.
pub(super) trait Ranges {
    fn judge(&self, posted: &Posted<'_>, judge: &mut impl Judge);
}

/// A post without ranges.
pub(super) struct NoRanges;

impl Ranges for NoRanges {
    #[inline(always)]
    fn judge(&self, _: &Posted<'_>, _: &mut impl Judge) {}
}

/// The ranges of a transfer, at the peer and in the caller's own part.
pub(super) struct Both<'a, T> {
    pub(super) there: &'a WindowRange<T>,
    pub(super) here: &'a WindowRange<T>,
}

impl<T: Pod> Ranges for Both<'_, T> {
    #[inline(always)]
    fn judge(&self, posted: &Posted<'_>, judge: &mut impl Judge) {
        let (Self { there, here }, peer, fault) = (self, posted.peer, |kind| posted.fault(kind));
        judge.condition(there.place().1 == here.place().1, || {
            fault(FaultKind::LengthMismatch).values(there.bytes(), here.bytes())
        });
        judge
            .condition(there.fits_on(peer), || fault(FaultKind::OutOfRange).values(there.length_on(peer), there.end()));
        judge.condition(here.fits_own(), || fault(FaultKind::OutOfRange).values(here.own_length(), here.end()));
    }
}

/// Where a value of this many bytes goes.
pub(super) struct One<'a> {
    pub(super) there: &'a WindowRange<u8>,
    pub(super) width: u64,
}

impl Ranges for One<'_> {
    #[inline(always)]
    fn judge(&self, posted: &Posted<'_>, judge: &mut impl Judge) {
        let (&Self { there, width }, fault) = (self, |kind| posted.fault(kind));
        let (offset, bytes) = there.place();
        judge.condition(bytes == width, || fault(FaultKind::LengthMismatch).values(width, there.bytes()));
        judge.condition(offset.is_multiple_of(width), || fault(FaultKind::Misaligned).values(width, there.offset()));
        judge.condition(there.fits_on(posted.peer), || {
            fault(FaultKind::OutOfRange).values(there.length_on(posted.peer), there.end())
        });
    }
}
