// SPDX-License-Identifier: MIT OR Apache-2.0
//! The conditions of a post, checked before anything is posted or stored.

use super::options::Options;
use super::request::Request;
use crate::context::Core;
use crate::signal::{Signal, VaSignal};
use crate::team::Rank;
use crate::window::bytes_on;
use gin_abi::handle::{CAP_STRONG_SIGNALS, CAP_VA_SIGNALS, WINDOW_SIGNALS};
use gin_abi::{Fault, FaultKind, Operation};

/// A visitor of a post's conditions, so that they are written once.
///
/// [`AllMet`] joins them without branches: a correct post passes one branch. [`FirstUnmet`] then finds the fault of an
/// incorrect one.
pub trait Judge {
    /// Visits one condition. `fault` makes the fault to report if `met` is false.
    fn condition(&mut self, met: bool, fault: impl FnOnce() -> Fault);
}

/// True if all conditions visited so far are met.
struct AllMet(bool);

impl Judge for AllMet {
    #[inline(always)]
    fn condition(&mut self, met: bool, _: impl FnOnce() -> Fault) {
        self.0 &= met;
    }
}

/// The fault of the first unmet condition.
struct FirstUnmet(Option<Fault>);

impl Judge for FirstUnmet {
    #[inline(always)]
    fn condition(&mut self, met: bool, fault: impl FnOnce() -> Fault) {
        if !met && self.0.is_none() {
            self.0 = Some(fault());
        }
    }
}

/// The target and the options of a post.
#[derive(Clone, Copy, Debug)]
pub struct Posted<'a> {
    pub(super) core: &'a Core,
    pub(super) peer: Rank,
    pub(super) options: &'a Options,
    pub(super) operation: Operation,
    /// The post takes loads and stores.
    pub(super) lsa: bool,
}

impl Posted<'_> {
    /// Returns a fault of this post.
    #[inline(always)]
    pub(super) fn fault(&self, kind: FaultKind) -> Fault {
        self.core.fault(kind, self.operation).peer(self.peer.world())
    }

    /// Returns the fault of the first unmet condition: those of the post first, then those of `request`.
    #[inline(always)]
    pub(super) fn check(&self, request: &impl Request) -> Result<(), Fault> {
        let mut all = AllMet(true);
        self.judge(&mut all);
        request.judge(self, &mut all);
        if all.0 {
            return Ok(());
        }
        let mut first = FirstUnmet(None);
        self.judge(&mut first);
        request.judge(self, &mut first);
        // The second visit finds no fault only if the host changed a table in between.
        Err(first.0.unwrap_or(self.fault(FaultKind::BadDescriptor)))
    }

    /// Passes the conditions of target and options to `judge`.
    #[inline(always)]
    fn judge(&self, judge: &mut impl Judge) {
        let Self { core, peer, options, lsa, .. } = *self;
        let (comm, fault) = (core.comm(), |kind| self.fault(kind));
        judge.condition(core.usable(), || core.unusable(self.operation));
        judge.condition(!lsa || comm.lsa_reaches(peer), || fault(FaultKind::NotReachable));
        if let Some(action) = options.signal {
            // Loads and stores have strong signals on every network.
            let strong = action.strong & !lsa;
            let has_strong = || comm.capabilities() & CAP_STRONG_SIGNALS != 0;
            match action.signal {
                Signal::Id(_) if options.internal => {}
                // A context has as many strong signals as signals, or none.
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

/// Returns whether the post's route can raise a signal at a window address.
#[inline(always)]
fn takes_va_signals(core: &Core, va: &VaSignal, lsa: bool) -> bool {
    (lsa | (core.comm().capabilities() & CAP_VA_SIGNALS != 0)) & (va.window.flags & WINDOW_SIGNALS != 0)
}
