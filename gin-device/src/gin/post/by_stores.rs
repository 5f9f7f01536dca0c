// SPDX-License-Identifier: MIT OR Apache-2.0
//! Posts by loads and stores: the calling threads move the bytes and raise the words themselves.

use super::options::Options;
use crate::context::Core;
use crate::coop::Coop;
#[cfg(not(target_arch = "nvptx64"))]
use crate::exec::watch::{self, Event, Way};
use crate::fault::{self, Fault};
use crate::lsa::{copy, publish};
use crate::order::Scope;
use crate::signal::{CounterId, Signal};
use crate::sys::{self, Global, GlobalWord};
use crate::team::Rank;
use gin_abi::WindowData;

/// Returns the word that GPUs raise for a peer's signal. The post was checked.
#[inline(always)]
pub(super) fn peer_word(core: &Core, peer: Rank, signal: Signal) -> GlobalWord {
    // Safety: the check found the context, the signal, and that loads and stores reach the peer. The host keeps words
    // for GPUs, and tables of them, at every peer that loads and stores reach.
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

/// The words to raise for a post by loads and stores.
#[derive(Clone, Copy, Debug)]
pub(super) struct Raises {
    signal: Option<(GlobalWord, u64)>,
    counter: Option<GlobalWord>,
}

impl Raises {
    /// Looks up the words of a post that was checked.
    ///
    /// Each look takes a trip to L2, because a wait that acquired has emptied the L1. Callers therefore look up before
    /// the post waits for anything, and in all threads, so that the trips overlap the wait. Behind a branch they would
    /// add to it.
    #[inline(always)]
    pub(super) fn of(core: &Core, peer: Rank, options: &Options) -> Self {
        let counter = |counter: CounterId| {
            // Safety: the check found the counter. Where signals have words for GPUs, counters have them too.
            unsafe { GlobalWord::new(sys::read_word(&raw const (*core.data()).counters_gpu) + 8 * counter.0 as u64) }
        };
        Self {
            signal: options.signal.map(|action| (peer_word(core, peer, action.signal), action.amount)),
            counter: options.counter.map(counter),
        }
    }

    /// Returns the same for a post that is refused. Nothing may be raised.
    #[inline(always)]
    pub(super) fn none(options: &Options) -> Self {
        // Safety: nobody accesses the word.
        let word = unsafe { GlobalWord::new(0) };
        Self { signal: options.signal.map(|_| (word, 0)), counter: options.counter.map(|_| word) }
    }

    /// Raises the words, in one thread, for a coop. `given` is the scope to which the covered memory is released
    /// already.
    #[inline(always)]
    pub(super) fn publish<C: Coop>(mut self, _: &C, given: Scope) {
        if C::ALONE {
            self.signal = self.signal.map(|(word, amount)| (word, sys::of_lane(amount)));
        }
        publish::<Global>(given, self.signal, self.counter);
    }
}

/// Reports to an executor that the calling thread stores the data of a put, and raises its signal's word.
#[cfg(not(target_arch = "nvptx64"))]
pub(super) fn told(way: Way, options: &Options, put: Option<(u64, u64)>, words: Option<Raises>) {
    let strong = options.signal.is_some_and(|signal| signal.strong);
    if let Some((address, bytes)) = put {
        watch::event(Event::Stores { way, address, bytes, weak: options.signal.is_some() && !strong });
    }
    if let Some((word, _)) = words.and_then(|words| words.signal) {
        watch::event(Event::Raise { way, word: word.address(), strong, put: put.unwrap_or_default() });
    }
}

/// Carries out a put or get by loads and stores if `checked` is `Ok`. All threads of `coop` call. `addresses` returns
/// the addresses to copy to and from, and the number of bytes. `OWN` as for [`copy`].
///
/// Ranges that overlap, or that others write meanwhile, give unknown bytes.
///
/// # Safety
/// - If `checked` is `Ok`, the addresses are valid for that many bytes.
#[inline(always)]
#[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
pub(super) unsafe fn move_bytes<const OWN: bool>(
    core: &Core,
    peer: Rank,
    options: &Options,
    coop: &impl Coop,
    checked: Result<(), Fault>,
    addresses: impl FnOnce() -> (u64, u64, u64),
) -> Result<(), Fault> {
    // Not an `Option`: registers without a value would stay live round the loops of a kernel.
    let raises = if checked.is_ok() { Raises::of(core, peer, options) } else { Raises::none(options) };
    coop.sync();
    if checked.is_ok() {
        let (to, from, bytes) = addresses();
        #[cfg(not(target_arch = "nvptx64"))]
        told(core.way(peer), options, OWN.then_some((to, bytes)), coop.elect().then_some(raises));
        // Safety: the caller's promise.
        unsafe { copy::<OWN>(coop, to, from, bytes) };
    }
    // All threads have stored before one of them raises, and before any of them reads.
    fault::here(coop.agree(checked))?;
    if coop.elect() {
        raises.publish(coop, Scope::Thread);
    }
    Ok(())
}
