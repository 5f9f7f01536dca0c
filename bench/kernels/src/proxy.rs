// SPDX-License-Identifier: MIT OR Apache-2.0
//! Round trips over the network.

use crate::{END, LATE, Limit, Marks, Plan, START, WRONG, payload, succeeded, word};
use gin_device::prelude::*;
use gin_device::sys::data::load_relaxed_sys_pair;
use gin_device::sys::{Global, Memory, Word};

macro_rules! ping {
    ($(#[$doc:meta])* $name:ident, $backend:ty) => {
        $(#[$doc])*
        ///
        /// # Safety
        /// - Both ranks launch it with the same numbers, one thread each, resident. `window` has a word, `out` has
        ///   [`MARKS`](crate::MARKS) words.
        #[kernel]
        pub unsafe fn $name(comm: Comm, window: Window<u64>, plan: Plan, out: *mut u64) {
            // Safety: guaranteed by the kernel's caller.
            let marks = unsafe { Marks::new(out) };
            let gin = Gin::<$backend>::with_backend(&comm, ContextId::new(0));
            let (peer, first) = (comm.world().right(), comm.world().rank() == 0);
            let signal = SignalId::new(0);
            // Safety: the window's word, which only the network and this thread use.
            let here = unsafe { word(window.local_ptr()) };
            plan.play(
                first,
                true,
                marks,
                |round| {
                    let put = gin.put_value(peer, window.at(0), payload(round, 0));
                    succeeded(&comm, put.signal(signal.inc()).issue(&Thread))
                },
                |round| {
                    if !succeeded(&comm, gin.wait_signal(&Thread, signal, round, plan.deadline())) {
                        return false;
                    }
                    if plan.verifies() {
                        marks.count(WRONG, u64::from(here.load_relaxed_sys() != payload(round, 0)));
                    }
                    true
                },
            );
        }
    };
}

ping! {
    /// Puts 8 bytes with a signal and waits for the answer, repeatedly, by one thread; ranks 0 and 1. With
    /// `plan.verify` the arrivals are checked each time.
    bench_proxy_ping, Proxy
}

ping! {
    /// Does the same as [`bench_proxy_ping`] by device-driven NIC queue pairs.
    bench_gdaki_ping, Gdaki
}

macro_rules! completion {
    ($(#[$doc:meta])* $name:ident, |$comm:ident, $gin:ident, $plan:ident| $complete:expr) => {
        $(#[$doc])*
        ///
        /// # Safety
        /// - Both ranks launch it with the same numbers, one thread each. `window` has a word, `out` has
        ///   [`MARKS`](crate::MARKS) words.
        #[kernel]
        pub unsafe fn $name($comm: Comm, window: Window<u64>, $plan: Plan, out: *mut u64) {
            // Safety: guaranteed by the kernel's caller.
            let marks = unsafe { Marks::new(out) };
            let $gin = Gin::<Proxy>::with_backend(&$comm, ContextId::new(0));
            let peer = $comm.world().right();
            $plan.each(true, marks, |round| {
                let put = $gin.put_value(peer, window.at(0), payload(round, 0));
                succeeded(&$comm, put.issue(&Thread)) && succeeded(&$comm, $complete)
            });
        }
    };
}

completion! {
    /// Puts 8 bytes and waits by a flush, repeatedly, by one thread.
    bench_proxy_flush, |comm, gin, plan| gin.flush(&Thread, plan.deadline())
}

completion! {
    /// Puts 8 bytes and waits by a quiet, repeatedly, by one thread.
    bench_proxy_quiet, |comm, gin, plan| gin.quiet(&Thread, comm.world().right(), plan.deadline())
}

completion! {
    /// Puts 8 bytes and raises a signal of all contexts from the last context, repeatedly, by one thread.
    bench_proxy_all_contexts, |comm, gin, plan| {
        let last = Gin::<Proxy>::with_backend(&comm, ContextId::new(comm.contexts() - 1));
        last.signal_all_contexts(&Thread, comm.world().right(), SignalId::new(0).inc(), plan.deadline())
    }
}

/// Puts `puts` times to the next rank, each time from and to the next of `slots` equal parts of the windows, by one
/// warp, and waits until all are complete.
///
/// # Safety
/// - Both windows have as many words, with no other users meanwhile. `out` has [`MARKS`](crate::MARKS) words.
#[kernel]
pub unsafe fn bench_proxy_puts(
    comm: Comm,
    to: Window<u64>,
    from: Window<u64>,
    slots: u64,
    puts: u64,
    deadline: Deadline,
    out: *mut u64,
) {
    // Safety: guaranteed by the kernel's caller.
    let marks = unsafe { Marks::new(out) };
    let gin = Gin::<Proxy>::with_backend(&comm, ContextId::new(0));
    let (peer, words) = (comm.world().right(), to.len() / slots as usize);
    if Block.elect() {
        marks.now(START);
    }
    let mut put = u64::from(Block.rank());
    while put < puts {
        let place = (put % slots) as usize * words;
        if !succeeded(&comm, gin.put(peer, to.range(place, words), from.range(place, words)).issue(&Thread)) {
            return;
        }
        put += u64::from(Block.size());
    }
    if succeeded(&comm, gin.flush(&Block, deadline)) && Block.elect() {
        marks.now(END);
    }
}

/// Asks a CPU thread for an answer at the other rank and waits for the one that the other rank asked for, repeatedly,
/// by one thread: stores the number of the round to `ask`, and polls `answer` until it has that number. Ranks 0 and 1;
/// the first one asks first. With a `payload`, acquires what was written before the answer, or, if `mailbox` is not 0,
/// takes it from the word after the answer and stores it. With `plan.verify`, checks that it is the number of the
/// round.
///
/// # Safety
/// - `ask`, `answer` and, unless it is null, `payload` are valid words. CPU threads access them by atomics and copies.
///   A mailbox has two words, aligned to 16 bytes. `out` has [`MARKS`](crate::MARKS) words.
#[kernel]
pub unsafe fn bare_trips(
    ask: *mut u64,
    answer: *mut u64,
    payload: *mut u64,
    mailbox: u32,
    first: u32,
    plan: Plan,
    out: *mut u64,
) {
    // Safety: guaranteed by the kernel's caller.
    let (marks, ask, answer_word) = unsafe { (Marks::new(out), word(ask), word(answer)) };
    let limit = Limit::new(plan.limit_ns);
    plan.play(
        first != 0,
        true,
        marks,
        |round| {
            ask.store_relaxed_sys(round);
            true
        },
        |round| {
            let mut carried = 0;
            let there = if mailbox == 0 {
                limit.reached(answer_word, round)
            } else {
                limit.wait(|| {
                    // Safety: guaranteed by the kernel's caller.
                    let (number, value) = unsafe { load_relaxed_sys_pair(answer) };
                    carried = value;
                    number >= round && value >= round
                })
            };
            if !there {
                marks.count(LATE, 1);
                return false;
            }
            if !payload.is_null() {
                // Safety: guaranteed by the kernel's caller.
                let payload = unsafe { word(payload) };
                if mailbox != 0 {
                    payload.store_relaxed_sys(carried);
                }
                Global::fence_acquire_sys();
                if plan.verifies() {
                    marks.count(WRONG, u64::from(payload.load_relaxed_sys() != round));
                }
            }
            true
        },
    );
}
