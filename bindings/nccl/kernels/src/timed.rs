// SPDX-License-Identifier: MIT OR Apache-2.0
//! Kernels that `gin bench nccl` times, over gin and over NCCL. One thread of each of two ranks runs them.

use crate::word;
use bytemuck::{Pod, Zeroable};
use gin_device::sys;

#[cfg(not(feature = "nccl"))]
use gin_device::prelude::*;
#[cfg(feature = "nccl")]
use gin_nccl_device::prelude::*;

/// Number of words that a kernel writes for the host.
pub const MARKS: usize = 3;
/// Index of the time at which the kernel began the timed rounds, in nanoseconds.
pub const START: usize = 0;
/// Index of the time at which it ended them.
pub const END: usize = 1;
/// Index of the number of wrong words.
pub const WRONG: usize = 2;

/// Number of signals of the communicator.
pub const SIGNALS: u32 = 3;
/// The signal of round trips, raised once in each round.
const TRIP: SignalId = SignalId::new(0);
/// The signal of the puts of [`puts_then_answer`].
const ARRIVED: SignalId = SignalId::new(1);
/// The signal that answers all of these puts.
const ANSWER: SignalId = SignalId::new(2);

/// The rounds of round trips.
#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable, Debug)]
pub struct Trips {
    /// Number of rounds of all earlier launches.
    pub before: u64,
    /// Number of rounds that are not timed.
    pub warm: u64,
    /// Number of timed rounds.
    pub timed: u64,
    /// Number of words of a put.
    pub len: u64,
    /// Not 0 if the words are new in each round, and the receiver counts wrong ones.
    pub checks: u64,
    /// Nanoseconds after which a wait ends.
    pub limit_ns: u64,
}

/// Puts in a row.
#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable, Debug)]
pub struct Puts {
    /// Number of puts.
    pub puts: u64,
    /// Number of words of a put.
    pub len: u64,
    /// Number of places that the puts take in turn.
    pub slots: u64,
    /// Number of earlier launches.
    pub launches: u64,
    /// Number of puts of earlier launches.
    pub before: u64,
    /// Nanoseconds after which a wait ends.
    pub limit_ns: u64,
}

/// # Safety
/// - `out` has [`MARKS`] words.
#[inline(always)]
unsafe fn mark(out: *mut u64, index: usize, value: u64) {
    // Safety: the caller's promise.
    unsafe { out.wrapping_add(index).write_volatile(value) };
}

/// Sends and waits in turns. Rank 0 sends first. Reports the first fault.
///
/// # Safety
/// - `out` has [`MARKS`] words.
#[inline(always)]
unsafe fn play(
    comm: &Comm,
    trips: &Trips,
    out: *mut u64,
    mut send: impl FnMut(u64) -> Result<(), Fault>,
    mut wait: impl FnMut(u64) -> Result<(), Fault>,
) {
    let (mut half, mut sends) = (0, comm.world().rank() == 0);
    while half < 2 * (trips.warm + trips.timed) {
        if half == 2 * trips.warm {
            // Safety: the caller's promise.
            unsafe { mark(out, START, sys::clock_ns()) };
        }
        let round = trips.before + half / 2 + 1;
        // Each has one call site, so that both are inlined.
        let done = if sends { send(round) } else { wait(round) };
        if let Err(fault) = done {
            return comm.report(fault);
        }
        sends = !sends;
        half += 1;
    }
    // Safety: as above.
    unsafe { mark(out, END, sys::clock_ns()) };
}

/// Raises a signal at the other rank, which raises one here, in each round.
///
/// # Safety
/// - One thread, launched with the same numbers on both ranks of a communicator with [`SIGNALS`] signals. Only
///   this kernel and [`put_and_back`] were launched on it before. `out` has [`MARKS`] words.
#[kernel]
pub unsafe fn signal_and_back(comm: Comm, trips: Trips, out: *mut u64) {
    let gin = Gin::new(&comm, ContextId::new(0));
    let (peer, deadline) = (comm.world().right(), Deadline::after_ns(trips.limit_ns));
    let send = |_| gin.signal(peer, TRIP.inc()).issue(&Thread);
    let wait = |round| gin.wait_signal(&Thread, TRIP, round, deadline);
    // Safety: the caller's promise.
    unsafe { play(&comm, &trips, out, send, wait) };
}

/// Puts words with a signal to the other rank, which puts as many back, in each round.
///
/// # Safety
/// - As for [`signal_and_back`]. Both windows have `trips.len` words.
#[kernel]
pub unsafe fn put_and_back(comm: Comm, to: Window<u64>, from: Window<u64>, trips: Trips, out: *mut u64) {
    let gin = Gin::new(&comm, ContextId::new(0));
    let (own, peer, deadline) = (comm.world().rank(), comm.world().right(), Deadline::after_ns(trips.limit_ns));
    let len = trips.len as usize;
    let checked = if trips.checks != 0 { len } else { 0 };
    let mut wrong = 0;
    let send = |round| {
        let mut index = 0;
        // The other rank's answer shows that the words of the round before have left.
        while index < checked {
            from.write(index, word(own, round, index));
            index += 1;
        }
        gin.put(peer, to.range(0, len), from.range(0, len)).signal(TRIP.inc()).issue(&Thread)
    };
    let wait = |round| {
        gin.wait_signal(&Thread, TRIP, round, deadline)?;
        let mut index = 0;
        while index < checked {
            wrong += u64::from(to.read(index) != word(peer.world(), round, index));
            index += 1;
        }
        Ok(())
    };
    // Safety: the caller's promise.
    unsafe {
        play(&comm, &trips, out, send, wait);
        mark(out, WRONG, wrong);
    }
}

/// Puts words from rank 0 to rank 1, each time with a signal, from and to some places in turn, without a wait in
/// between. Rank 1 waits for all of them and answers by one signal, which ends rank 0's time.
///
/// # Safety
/// - As for [`signal_and_back`], but only this kernel was launched before. Both windows have `puts.slots * puts.len`
///   words.
#[kernel]
pub unsafe fn puts_then_answer(comm: Comm, to: Window<u64>, from: Window<u64>, puts: Puts, out: *mut u64) {
    let gin = Gin::new(&comm, ContextId::new(0));
    let (peer, deadline) = (comm.world().right(), Deadline::after_ns(puts.limit_ns));
    // Safety: the caller's promise.
    unsafe { mark(out, START, sys::clock_ns()) };
    let exchange = || -> Result<(), Fault> {
        if comm.world().rank() != 0 {
            gin.wait_signal(&Thread, ARRIVED, puts.before + puts.puts, deadline)?;
            return gin.signal(peer, ANSWER.inc()).issue(&Thread);
        }
        let (mut put, len) = (0, puts.len as usize);
        while put < puts.puts {
            let place = (put % puts.slots) as usize * len;
            gin.put(peer, to.range(place, len), from.range(place, len)).signal(ARRIVED.inc()).issue(&Thread)?;
            put += 1;
        }
        gin.wait_signal(&Thread, ANSWER, puts.launches + 1, deadline)
    };
    if let Err(fault) = exchange() {
        return comm.report(fault);
    }
    // Safety: as above.
    unsafe { mark(out, END, sys::clock_ns()) };
}
