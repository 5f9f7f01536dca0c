// SPDX-License-Identifier: MIT OR Apache-2.0
//! Kernels that `gin bench` times: operations of gin, and bare loops that do the least work for the same effect, as
//! lower bounds. They form a separate crate, so that no workload loads them.
//!
//! | module | holds |
//! | --- | --- |
//! | [`bare`] | round trips and copies without gin |
//! | [`bulk`] | copies by bulk copies through shared memory |
//! | [`lsa`] | put with signal, puts of many bytes and barriers by loads and stores |
//! | [`nccl`] | posts by NCCL's memory operations |
//! | [`parts`] | round trips over the proxy by the steps of gin's kernels, one more in each |
//! | [`proxy`] | round trips over the network: by the proxy, and by device-driven NIC queue pairs |
//! | [`capi`] | operations in a row, which C++ has too |
//! | [`post`] | posts without waiting for completion |
//! | [`step`] | one of many kernels in a row |
//! | [`data`] | the data of transfers, and checks of its arrival |
//!
//! Each kernel writes [`MARKS`] words for each of its blocks: the start and the end of the timed part, in nanoseconds
//! of one clock, and the numbers of errors. Every wait has a limit.

#![no_std]
#![cfg_attr(target_arch = "nvptx64", feature(abi_ptx, asm_experimental_arch))]
#![warn(unreachable_pub)]

pub mod bare;
pub mod bulk;
pub mod capi;
pub mod data;
pub mod ep;
pub mod lsa;
pub mod nccl;
pub mod parts;
pub mod post;
pub mod proxy;
pub mod step;

use bytemuck::{Pod, Zeroable};
use gin_device::prelude::*;
use gin_device::sys::{self, GlobalWord, Word};

/// Number of words that a block writes: [`START`], [`END`], [`WRONG`], [`LATE`].
pub const MARKS: usize = 4;
/// Index of the time at which the block began the timed part, in nanoseconds.
pub const START: usize = 0;
/// Index of the time at which it ended the timed part.
pub const END: usize = 1;
/// Index of the number of wrong values.
pub const WRONG: usize = 2;
/// Index of the number of waits that ended at their limit.
pub const LATE: usize = 3;

/// Index of the flag in the window of round trips. The payload is on another cache line.
pub const FLAG: usize = 0;
/// Index of the first word of the arriving payload.
pub const PAYLOAD: usize = 16;
/// Number of words of a round trip's payload: 64 bytes.
pub const PAYLOAD_WORDS: usize = 8;
/// Index of the first word of the payload to send.
pub const SOURCE: usize = 32;
/// Index of the first word in which half a payload word arrives beside the number of the round.
pub const FLAGGED: usize = 48;
/// Number of words of the window of round trips.
pub const PING_WORDS: usize = FLAGGED + 2 * PAYLOAD_WORDS;

/// Number of words of the window whose [`FLAG`] tells that the other rank's kernel has begun.
pub const FLAG_WORDS: usize = 2;

/// Returns word `index` of the payload of round `round`.
#[inline(always)]
#[must_use]
pub const fn payload(round: u64, index: u64) -> u64 {
    round.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ index
}

/// The calling block's words for the host.
#[derive(Clone, Copy)]
struct Marks(*mut u64);

impl Marks {
    /// # Safety
    /// - `table` has [`MARKS`] words for each block of the grid, with no other users meanwhile.
    #[inline(always)]
    unsafe fn new(table: *mut u64) -> Self {
        Self(table.wrapping_add(MARKS * block_in_grid() as usize))
    }

    #[inline(always)]
    fn word(self, which: usize) -> GlobalWord {
        // Safety: one of the block's words, guaranteed by the caller of `new`.
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

/// Returns a word of a window or table.
///
/// # Safety
/// - The word is valid, aligned, and only accessed by atomics.
#[inline(always)]
unsafe fn word(pointer: *mut u64) -> GlobalWord {
    // Safety: guaranteed by the caller.
    unsafe { GlobalWord::new(pointer.addr() as u64) }
}

/// The time limit of a kernel.
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

    /// Polls until `test` holds. Returns `false` if the limit passed first.
    ///
    /// The assembler reads the clock at every poll, which takes tens of cycles: for floors there is
    /// [`reached`](Self::reached).
    #[inline(always)]
    fn wait(self, mut test: impl FnMut() -> bool) -> bool {
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

    /// Polls until `word`, which counts rounds, has reached `round`. Returns `false` if the limit passed first.
    #[inline(always)]
    fn reached(self, word: GlobalWord, round: u64) -> bool {
        loop {
            if word.spin(word.load_relaxed_sys(), round, POLLS) as i64 >= 0 {
                return true;
            }
            if sys::clock_ns().wrapping_sub(self.start) >= self.ns {
                return false;
            }
        }
    }
}

/// Number of polls between two looks at the clock.
const POLLS: u32 = 64;

/// Transfers of the same words.
#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable, Debug)]
pub struct Transfers {
    /// Number of words.
    pub len: u64,
    /// Number of transfers.
    pub times: u64,
    /// Not 0 if each put has a signal; otherwise the last one has.
    pub each: u64,
    /// Number of the launch, from 1, if the kernels of both ranks begin their timed parts together, for transfers in
    /// both directions at once; otherwise 0.
    pub together: u64,
    /// Nanoseconds after which the wait for the other kernel gives up.
    pub limit_ns: u64,
}

impl Transfers {
    /// Waits until the other rank's kernel has begun, by all threads of the grid. Returns false if it did not, and
    /// reports a fault if `flags` has no such peer.
    #[inline(always)]
    fn begin(&self, comm: &Comm, flags: Window<u64>, marks: Marks) -> bool {
        if self.together == 0 {
            return true;
        }
        let mut late = false;
        if Block.elect() {
            match flags.peer_ptr(comm.world().right()) {
                Ok(there) => {
                    // Safety: words of the windows, used only here.
                    let (here, there) = unsafe { (word(flags.local_ptr()), word(there)) };
                    if block_in_grid() == 0 {
                        there.at(FLAG as u64).store_relaxed_sys(self.together);
                    }
                    let limit = Limit::new(self.limit_ns);
                    late = !limit.reached(here.at(FLAG as u64), self.together);
                }
                Err(fault) => {
                    comm.report(fault);
                    late = true;
                }
            }
            marks.count(LATE, u64::from(late));
        }
        !Block.sync_or(late)
    }
}

/// The rounds of a round trip or of barriers.
///
/// Kernels require that `stamps` is 0 or the address of `timed + 1` words.
#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable, Debug)]
pub struct Plan {
    /// Number of rounds of earlier launches. Round numbers, words and signals continue from here.
    pub before: u64,
    /// Number of rounds that are not timed.
    pub warm: u64,
    /// Number of timed rounds.
    pub timed: u64,
    /// Not 0 if each round's data is new and checked.
    pub verify: u64,
    /// Nanoseconds after which a wait gives up.
    pub limit_ns: u64,
    /// Address of a word for the number of cycles at the start of each timed round and one for the end of the last; 0
    /// if rounds are not stamped.
    pub stamps: u64,
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

    /// Stamps the start of timed round `number`, or the end of the last one.
    #[inline(always)]
    fn stamp(&self, number: u64) {
        if self.stamps != 0 {
            // Safety: guaranteed by the kernels' callers.
            unsafe { GlobalWord::new(self.stamps) }.at(number).store_relaxed_gpu(sys::cycles());
        }
    }

    /// Calls `step` with the number of each round, until it returns false. The calling thread takes the times if
    /// `leads`.
    #[inline(always)]
    fn each(&self, leads: bool, marks: Marks, mut step: impl FnMut(u64) -> bool) {
        let (first, last) = (self.before + self.warm, self.before + self.warm + self.timed);
        let mut round = self.before;
        while round < last {
            if leads && round == first {
                marks.now(START);
            }
            if leads && round >= first {
                self.stamp(round - first);
            }
            round += 1;
            if !step(round) {
                return;
            }
        }
        if leads {
            self.stamp(self.timed);
            marks.now(END);
        }
    }

    /// Plays ping-pong: the first rank sends and waits, the other one waits and sends. `send` and `wait` receive the
    /// number of the round and return false to stop. Each has one call site, so that both are inlined.
    #[inline(always)]
    fn play(
        &self,
        first: bool,
        leads: bool,
        marks: Marks,
        mut send: impl FnMut(u64) -> bool,
        mut wait: impl FnMut(u64) -> bool,
    ) {
        let (start, last) = (2 * self.warm, 2 * (self.warm + self.timed));
        let (mut half, mut sends) = (0, first);
        while half < last {
            if leads && half == start {
                marks.now(START);
            }
            if leads && half >= start && half % 2 == 0 {
                self.stamp((half - start) / 2);
            }
            let round = self.before + half / 2 + 1;
            if !(if sends { send(round) } else { wait(round) }) {
                return;
            }
            sends = !sends;
            half += 1;
        }
        if leads {
            self.stamp(self.timed);
            marks.now(END);
        }
    }
}

/// Reports a fault, if there is one. Returns true if there is none.
#[inline(always)]
fn succeeded(comm: &Comm, outcome: Result<(), Fault>) -> bool {
    match outcome {
        Ok(()) => true,
        Err(fault) => {
            comm.report(fault);
            false
        }
    }
}
