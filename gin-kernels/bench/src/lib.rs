// SPDX-License-Identifier: MIT OR Apache-2.0
//! Kernels that `gin bench` times: operations of gin, and beside them bare loops that do the least that the same thing
//! takes, as floors. A crate of their own, so that no workload loads them.
//!
//! | module | holds |
//! | --- | --- |
//! | [`bare`] | round trips, copies, barriers and posts without gin |
//! | [`lsa`] | put with signal, puts of many bytes and barriers by loads and stores |
//! | [`proxy`] | round trips over the network: the proxy's, and those of kernels that drive NICs |
//! | [`post`] | posts of which nobody waits for the end |
//! | [`data`] | what is moved, and checks that it arrived |
//!
//! Each kernel writes [`MARKS`] words for each of its blocks: when it began and when it ended what is timed, in
//! nanoseconds of one clock, and what went wrong. Every wait has a limit.

#![no_std]
#![cfg_attr(target_arch = "nvptx64", feature(abi_ptx, asm_experimental_arch))]
#![warn(missing_docs, unreachable_pub)]

pub mod bare;
pub mod data;
pub mod lsa;
pub mod post;
pub mod proxy;

use bytemuck::{Pod, Zeroable};
use gin_device::coop::block_in_grid;
use gin_device::prelude::*;
use gin_device::sys::{self, GlobalWord, Word};

/// Words that a block writes: [`START`], [`END`], [`WRONG`], [`LATE`].
pub const MARKS: usize = 4;
/// When the block began what is timed, in nanoseconds.
pub const START: usize = 0;
/// When it had done it.
pub const END: usize = 1;
/// Values that were not what they should be.
pub const WRONG: usize = 2;
/// Waits that ended at their limit.
pub const LATE: usize = 3;

/// Index of the flag in the window that round trips use. Their payload is on another line of the cache.
pub const FLAG: usize = 0;
/// Index of the first word of the payload that arrives.
pub const PAYLOAD: usize = 16;
/// Words of the payload of a round trip: 64 bytes.
pub const PAYLOAD_WORDS: usize = 8;
/// Index of the first word of the payload that is sent.
pub const SOURCE: usize = 32;
/// Words of the window that round trips use.
pub const PING_WORDS: usize = 48;

/// Word `index` of what is sent in round `round`.
#[inline(always)]
#[must_use]
pub const fn payload(round: u64, index: u64) -> u64 {
    round.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ index
}

/// What the calling block writes for the host.
#[derive(Clone, Copy)]
struct Marks(*mut u64);

impl Marks {
    /// # Safety
    /// - `table` has [`MARKS`] words for each block of the grid, which nobody else uses meanwhile.
    #[inline(always)]
    unsafe fn new(table: *mut u64) -> Self {
        Self(table.wrapping_add(MARKS * block_in_grid() as usize))
    }

    #[inline(always)]
    fn word(self, which: usize) -> GlobalWord {
        // Safety: one of the block's words, by the promise of `new`.
        unsafe { GlobalWord::new(self.0.wrapping_add(which).addr() as u64) }
    }

    #[inline(always)]
    fn now(self, which: usize) {
        self.word(which).store_relaxed_gpu(sys::clock_ns());
    }

    #[inline(always)]
    fn count(self, which: usize, by: u64) {
        if by != 0 {
            self.word(which).add_relaxed_gpu(by);
        }
    }
}

/// A word of a window or table.
///
/// # Safety
/// - Valid, aligned, and used by atomic accesses only.
#[inline(always)]
unsafe fn word(pointer: *mut u64) -> GlobalWord {
    // Safety: the caller's promise.
    unsafe { GlobalWord::new(pointer.addr() as u64) }
}

/// When a kernel gives up.
#[derive(Clone, Copy)]
struct Limit {
    start: u64,
    ns: u64,
}

impl Limit {
    #[inline(always)]
    fn new(ns: u64) -> Self {
        Self { start: sys::clock_ns(), ns }
    }

    /// Looks until `test` holds; `false` if the limit came first.
    #[inline(always)]
    fn wait(self, test: impl Fn() -> bool) -> bool {
        let mut looks = 0u32;
        loop {
            if test() {
                return true;
            }
            looks = looks.wrapping_add(1);
            if looks.is_multiple_of(1024) && sys::clock_ns().wrapping_sub(self.start) >= self.ns {
                return false;
            }
        }
    }
}

/// Rounds of a round trip or of barriers.
#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable, Debug)]
pub struct Plan {
    /// Rounds of earlier launches: numbers go on from here, as words and signals do.
    pub before: u64,
    /// Rounds that are not timed.
    pub warm: u64,
    /// Rounds that are.
    pub timed: u64,
    /// Not 0: what arrives is new in each round, and checked.
    pub verify: u64,
    /// Nanoseconds after which a wait gives up.
    pub limit_ns: u64,
}

impl Plan {
    #[inline(always)]
    fn verifies(&self) -> bool {
        self.verify != 0
    }

    #[inline(always)]
    fn deadline(&self) -> Deadline {
        Deadline::after_ns(self.limit_ns)
    }

    /// Does `step` with the number of each round; it says whether to go on. `leads`: the calling thread takes the times.
    #[inline(always)]
    fn each(&self, leads: bool, marks: Marks, mut step: impl FnMut(u64) -> bool) {
        let (first, last) = (self.before + self.warm, self.before + self.warm + self.timed);
        let mut round = self.before;
        while round < last {
            if leads && round == first {
                marks.now(START);
            }
            round += 1;
            if !step(round) {
                return;
            }
        }
        if leads {
            marks.now(END);
        }
    }

    /// Plays ping-pong: who is first sends and waits, the other one waits and sends. Both get the number of the round and
    /// say whether to go on. Each stands in the code once, so that both are inlined.
    #[inline(always)]
    fn play(&self, first: bool, leads: bool, marks: Marks, send: impl Fn(u64) -> bool, wait: impl Fn(u64) -> bool) {
        let (start, last) = (2 * self.warm, 2 * (self.warm + self.timed));
        let (mut half, mut sends) = (0, first);
        while half < last {
            if leads && half == start {
                marks.now(START);
            }
            let round = self.before + half / 2 + 1;
            if !(if sends { send(round) } else { wait(round) }) {
                return;
            }
            sends = !sends;
            half += 1;
        }
        if leads {
            marks.now(END);
        }
    }
}

/// Reports a fault, if there is one; whether there is none.
#[inline(always)]
fn went(comm: &Comm, outcome: Result<(), Fault>) -> bool {
    match outcome {
        Ok(()) => true,
        Err(fault) => {
            comm.report(fault);
            false
        }
    }
}
