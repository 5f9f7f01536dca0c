// SPDX-License-Identifier: MIT OR Apache-2.0
//! The conditions of a post, checked before anything is posted or stored.

use super::options::Options;
use crate::context::Core;
use crate::fault::{Judge, Unmet};
use crate::signal::{Signal, VaSignal};
use crate::team::Rank;
use crate::window::bytes_on;
use gin_abi::handle::{CAP_STRONG_SIGNALS, CAP_VA_SIGNALS, WINDOW_SIGNALS};
use gin_abi::{FaultKind, FaultSubject};

/// The target and the options of a post.
#[derive(Clone, Copy, Debug)]
pub struct Posted<'a> {
    pub(super) core: &'a Core,
    pub(super) peer: Rank,
    pub(super) options: &'a Options,
    /// The post takes loads and stores.
    pub(super) lsa: bool,
}

impl Posted<'_> {
    /// Passes the conditions of target and options to `judge`.
    #[inline(always)]
    pub(super) fn judge(&self, judge: &mut Judge) {
        let Self { core, peer, options, lsa, .. } = *self;
        let comm = core.comm();
        core.judge(judge);
        judge.condition(!lsa || comm.lsa_reaches(peer), || Unmet::new(FaultKind::NotReachable));
        if let Some(action) = options.signal {
            // Loads and stores have strong signals on every network.
            let strong = action.strong & !lsa;
            let has_strong = || comm.capabilities() & CAP_STRONG_SIGNALS != 0;
            match action.signal {
                Signal::Id(_) if options.internal => {}
                // A context has as many strong signals as signals, or none.
                Signal::Id(id) => {
                    judge.condition(id < if strong { comm.strong_signals() } else { comm.signals() }, || {
                        let unmet = if strong && !has_strong() {
                            Unmet::new(FaultKind::NoStrongSignals)
                        } else {
                            Unmet::new(FaultKind::UnknownSignal).values(comm.signals() as u64, id as u64)
                        };
                        unmet.of(FaultSubject::Signal(id))
                    });
                }
                Signal::Va(va) => {
                    let unmet = |kind| Unmet::new(kind).of(va.subject());
                    judge.condition(!strong | has_strong(), || unmet(FaultKind::NoStrongSignals));
                    judge.condition(takes_va_signals(core, &va, lsa), || unmet(FaultKind::NoVaSignals));
                    judge.condition(va.offset.is_multiple_of(8), || unmet(FaultKind::Misaligned).values(8, va.offset));
                    judge.condition(va.fits_on(peer), || {
                        unmet(FaultKind::OutOfRange).values(bytes_on(&va.window, peer), va.end())
                    });
                }
            }
        }
        if let Some(counter) = options.counter {
            judge.condition(counter.0 < comm.counters(), || {
                let unmet = Unmet::new(FaultKind::UnknownCounter).of(FaultSubject::Counter(counter.0));
                unmet.values(comm.counters() as u64, counter.0 as u64)
            });
        }
    }
}

/// Returns whether the post's route can raise a signal at a window address.
#[inline(always)]
fn takes_va_signals(core: &Core, va: &VaSignal, lsa: bool) -> bool {
    (lsa | (core.comm().capabilities() & CAP_VA_SIGNALS != 0)) & (va.window.flags & WINDOW_SIGNALS != 0)
}
