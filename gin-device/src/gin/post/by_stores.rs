// SPDX-License-Identifier: MIT OR Apache-2.0
//! Posts by loads and stores.

use super::options::Options;
use crate::context::Core;
use crate::coop::Coop;
use crate::lsa::{copy, publish};
use crate::order::Scope;
use crate::signal::{CounterId, Signal};
use crate::sys::{self, Global, GlobalWord};
use crate::team::Rank;
use gin_abi::{Fault, WindowData};

/// The word of the peer's signal that GPUs raise, of a post that is right.
#[inline(always)]
fn peer_word(core: &Core, peer: Rank, signal: Signal) -> GlobalWord {
    // Safety: the context and the signal were checked, and that loads and stores reach the peer; then there are words
    // for GPUs, at every peer that they reach, and tables of them.
    unsafe {
        match signal {
            Signal::Id(id) => GlobalWord::new(sys::read_word(core.peer_signals(peer)) + 8 * id as u64),
            Signal::Va(va) => {
                let window = va.window.data as usize as *const WindowData;
                let planes = sys::read_word(&raw const (*window).peer_va_gpu) as usize as *const u64;
                GlobalWord::new(sys::read_word(planes.wrapping_add(peer.world() as usize)) + va.offset)
            }
        }
    }
}

/// The words that a post by loads and stores raises.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Raises {
    signal: Option<(GlobalWord, u64)>,
    counter: Option<GlobalWord>,
}

impl Raises {
    /// Looks up the words, of a post that is right.
    ///
    /// A trip to L2 each, as a wait that acquired has emptied the L1. So this stands before what the post waits for
    /// anyway, and in all threads: behind a branch the trip would come on top.
    #[inline(always)]
    pub(super) fn of(core: &Core, peer: Rank, options: &Options) -> Self {
        let counter = |counter: CounterId| {
            // Safety: the counter was checked; where there are words for GPUs, counters have some too.
            unsafe { GlobalWord::new(sys::read_word(&raw const (*core.data()).counters_gpu) + 8 * counter.0 as u64) }
        };
        Self {
            signal: options.signal.map(|action| (peer_word(core, peer, action.signal), action.amount)),
            counter: options.counter.map(counter),
        }
    }

    /// Raises them; one thread does. `given`: how far what they cover was released.
    #[inline(always)]
    pub(crate) fn publish(self, given: Scope) {
        publish::<Global>(given, self.signal, self.counter);
    }
}

/// Carries out a put or get by loads and stores, if it was found right; all threads of `coop` call. `places`: addresses
/// to and from, number of bytes.
///
/// # Safety
/// - If it is right the places are valid. What overlaps or races gives unknown bytes.
#[inline(always)]
pub(super) unsafe fn move_bytes(
    core: &Core,
    peer: Rank,
    options: &Options,
    coop: &impl Coop,
    checked: Result<(), Fault>,
    places: impl FnOnce() -> (u64, u64, u64),
) -> Result<(), Fault> {
    let raises = if checked.is_ok() { Some(Raises::of(core, peer, options)) } else { None };
    coop.sync();
    if checked.is_ok() {
        let (to, from, bytes) = places();
        // Safety: the caller's promise.
        unsafe { copy(coop, to, from, bytes) };
    }
    // All have stored before one raises, and before any of them reads.
    coop.agree(checked)?;
    if let (true, Some(raises)) = (coop.elect(), raises) {
        raises.publish(Scope::Thread);
    }
    Ok(())
}
