// SPDX-License-Identifier: MIT OR Apache-2.0
//! Operations in a row, without waiting between them. `capi.cu` beside this crate's manifest has the same kernels in
//! C++, and those of round trips.

use crate::{Marks, PAYLOAD, PAYLOAD_WORDS, Plan, SOURCE, WRONG, payload, succeeded};
use gin_device::prelude::*;
use gin_device::sys::data::{load_relaxed_sys_u64, store_weak_u64};

const SIGNAL: SignalId = SignalId::new(0);

/// The signal that a rank raises at itself.
const FOLLOWED: SignalId = SignalId::new(1);

/// Makes one operation in each round. Afterwards, outside of the timed part, waits for the peer's operations, and
/// checks the `words` words that arrived.
///
/// # Safety
/// - The same as for the kernels.
#[inline(always)]
unsafe fn raise<B: Backend, C: Coop>(
    coop: &C,
    (comm, window, plan, out): (&Comm, Window<u64>, Plan, *mut u64),
    words: usize,
    issue: impl Fn(&Gin<B>, Rank, u64) -> Result<(), Fault>,
) {
    // Safety: guaranteed by the kernel's caller.
    let marks = unsafe { Marks::new(out) };
    let gin = Gin::<B>::with_backend(comm, ContextId::new(0));
    let (own, peer) = (window.local_ptr(), comm.world().right());
    let last = plan.before + plan.warm + plan.timed;
    for index in coop.stripe(words) {
        // Safety: within the window; the puts of earlier launches are complete.
        unsafe { store_weak_u64(own.wrapping_add(SOURCE + index), payload(last, index as u64)) };
    }
    coop.sync();
    plan.each(coop.elect(), marks, |_| succeeded(comm, issue(&gin, peer, payload(last, 0))));
    let done = gin.wait_signal(coop, SIGNAL, last, plan.deadline()).and_then(|()| gin.flush(coop, plan.deadline()));
    if succeeded(comm, done) {
        for index in coop.stripe(words) {
            // Safety: within the window; the signal covers it.
            let found = unsafe { load_relaxed_sys_u64(own.wrapping_add(PAYLOAD + index)) };
            marks.count(WRONG, u64::from(found != payload(last, index as u64)));
        }
    }
}

/// Reads in each round, and compares the value with the first one. Nobody raises meanwhile.
///
/// # Safety
/// - The same as for the kernels.
#[inline(always)]
unsafe fn read(comm: &Comm, plan: Plan, out: *mut u64, read: impl Fn(&Gin) -> Result<u64, Fault>) {
    // Safety: guaranteed by the kernel's caller.
    let marks = unsafe { Marks::new(out) };
    let gin = Gin::new(comm, ContextId::new(0));
    let (first, mut wrong) = (read(&gin).unwrap_or(0), 0);
    plan.each(true, marks, |_| match read(&gin) {
        Ok(value) => {
            wrong += u64::from(value != first);
            true
        }
        Err(fault) => succeeded(comm, Err(fault)),
    });
    marks.count(WRONG, wrong);
}

macro_rules! raises {
    ($($name:ident: $backend:ty, $coop:expr, $words:expr, |$gin:ident, $peer:ident, $window:ident, $value:ident|
        $post:expr, $doc:literal;)*) => { $(
        #[doc = concat!($doc, ", with a signal each time.")]
        ///
        /// # Safety
        /// - Two ranks launch it with the same numbers, one resident block of the coop's threads each. `window` has
        ///   [`PING_WORDS`](crate::PING_WORDS) words, `out` has [`MARKS`](crate::MARKS) words.
        #[kernel]
        pub unsafe fn $name(comm: Comm, $window: Window<u64>, plan: Plan, out: *mut u64) {
            let issue = |$gin: &Gin<$backend>, $peer, $value: u64| {
                let _ = $value;
                $post.issue(&$coop)
            };
            // Safety: guaranteed by the kernel's caller.
            unsafe { raise(&$coop, (&comm, $window, plan, out), $words, issue) }
        }
    )* };
}

raises! {
    bench_issue_put_thread: Any, Thread, PAYLOAD_WORDS, |gin, peer, window, value|
        gin.put(peer, window.range(PAYLOAD, PAYLOAD_WORDS), window.range(SOURCE, PAYLOAD_WORDS)).signal(SIGNAL.inc()),
        "Puts 64 bytes by one thread";
    bench_issue_put_warp: Any, Warp, PAYLOAD_WORDS, |gin, peer, window, value|
        gin.put(peer, window.range(PAYLOAD, PAYLOAD_WORDS), window.range(SOURCE, PAYLOAD_WORDS)).signal(SIGNAL.inc()),
        "Puts 64 bytes by a warp";
    bench_issue_value: Any, Thread, 1, |gin, peer, window, value|
        gin.put_value(peer, window.at(PAYLOAD), value).signal(SIGNAL.inc()),
        "Puts a value of 8 bytes by one thread";
    bench_issue_signal: Any, Thread, 0, |gin, peer, window, value| gin.signal(peer, SIGNAL.inc()),
        "Puts nothing by one thread";
    bench_issue_proxy: Proxy, Thread, PAYLOAD_WORDS, |gin, peer, window, value|
        gin.put(peer, window.range(PAYLOAD, PAYLOAD_WORDS), window.range(SOURCE, PAYLOAD_WORDS)).signal(SIGNAL.inc()),
        "Puts 64 bytes over the proxy, by one thread";
}

macro_rules! calls {
    ($($name:ident: |$gin:ident, $comm:ident, $window:ident, $deadline:ident| $call:expr, $doc:literal;)*) => { $(
        #[doc = concat!($doc, " repeatedly, by one thread.")]
        ///
        /// # Safety
        /// - Two ranks launch it with the same numbers, one block of one thread each. `window` has
        ///   [`PING_WORDS`](crate::PING_WORDS) words, `out` has [`MARKS`](crate::MARKS) words. The communicator has two
        ///   signals, a counter and a barrier of all ranks.
        #[kernel]
        pub unsafe fn $name(comm: Comm, window: Window<u64>, plan: Plan, out: *mut u64) {
            let ($comm, $window, $deadline) = (&comm, window, plan.deadline());
            let _ = ($window, $deadline);
            // Safety: guaranteed by the kernel's caller.
            let marks = unsafe { Marks::new(out) };
            let $gin = &Gin::new($comm, ContextId::new(0));
            plan.each(true, marks, |_| succeeded($comm, ($call).map(|_| ())));
        }
    )* };
}

calls! {
    bench_call_get: |gin, comm, window, deadline|
        gin.get(comm.world().right(), window.range(SOURCE, PAYLOAD_WORDS), window.range(PAYLOAD, PAYLOAD_WORDS))
            .issue(&Thread),
        "Gets 64 bytes";
    bench_call_flush: |gin, comm, window, deadline| gin.flush(&Thread, deadline), "Flushes with nothing under way";
    bench_call_follow: |gin, comm, window, deadline|
        gin.signal(comm.world().me(), FOLLOWED.inc()).issue(&Thread)
            .and_then(|()| gin.wait_signal_follow_shadow(&Thread, FOLLOWED, 1, deadline)),
        "Raises an own signal, and moves its shadow to it";
    bench_call_reset: |gin, comm, window, deadline| gin.reset_counter(CounterId::new(0)), "Resets a counter";
    bench_call_barrier: |gin, comm, window, deadline|
        BarrierSession::new(gin, BarrierTeam::World, 0)
            .and_then(|mut session| session.sync(&Thread, Fence::None, deadline)),
        "Meets the other rank in a barrier";
}

/// Reads a signal repeatedly, by one thread.
///
/// # Safety
/// - `out` has [`MARKS`](crate::MARKS) words.
#[kernel]
pub unsafe fn bench_read_signal(comm: Comm, _window: Window<u64>, plan: Plan, out: *mut u64) {
    // Safety: guaranteed by the kernel's caller.
    unsafe { read(&comm, plan, out, |gin| gin.read_signal(SIGNAL)) }
}

/// Reads a counter repeatedly, by one thread.
///
/// # Safety
/// - `out` has [`MARKS`](crate::MARKS) words.
#[kernel]
pub unsafe fn bench_read_counter(comm: Comm, _window: Window<u64>, plan: Plan, out: *mut u64) {
    // Safety: guaranteed by the kernel's caller.
    unsafe { read(&comm, plan, out, |gin| gin.read_counter(CounterId::new(0))) }
}
