// SPDX-License-Identifier: MIT OR Apache-2.0
//! Round trips and copies between GPUs without gin: lower bounds for gin's operations.

use crate::{
    END, FLAG, FLAGGED, LATE, Limit, Marks, PAYLOAD, PAYLOAD_WORDS, Plan, SOURCE, START, Transfers, WRONG, payload,
    word,
};
use gin_device::prelude::*;
use gin_device::sys::data::{
    load_relaxed_sys_pair, load_relaxed_sys_u32, load_relaxed_sys_u64, load_weak_pair, store_weak_pair, store_weak_u32,
};
use gin_device::sys::{self, Global, GlobalWord, Memory, Word};

/// Addresses of a round trip: this rank's part of the window, and the peer's.
#[derive(Clone, Copy)]
struct Sides {
    here: *mut u64,
    there: *mut u64,
    first: bool,
}

impl Sides {
    /// Returns the addresses of the two ranks. Reports a fault if the peer cannot be reached.
    #[inline(always)]
    fn new(comm: &Comm, window: Window<u64>) -> Option<Self> {
        match window.peer_ptr(comm.world().right()) {
            Ok(there) => Some(Self { here: window.local_ptr(), there, first: comm.world().rank() == 0 }),
            Err(fault) => {
                comm.report(fault);
                None
            }
        }
    }

    #[inline(always)]
    fn flag(side: *mut u64) -> GlobalWord {
        // Safety: guaranteed by the kernels' callers: a word of the window, used only as a flag.
        unsafe { word(side.wrapping_add(FLAG)) }
    }

    /// Counts the payload words that are not those of the round.
    #[inline(always)]
    fn check(self, round: u64, marks: Marks) {
        let (mut index, mut wrong) = (0, 0);
        while index < PAYLOAD_WORDS {
            // Safety: within the window.
            let found = unsafe { load_relaxed_sys_u64(self.here.wrapping_add(PAYLOAD + index)) };
            wrong += u64::from(found != payload(round, index as u64));
            index += 1;
        }
        marks.count(WRONG, wrong);
    }
}

/// Stores a word to the peer and polls for the answer, repeatedly, all relaxed, by one thread; ranks 0 and 1.
///
/// # Safety
/// - Both ranks launch it with the same numbers, one thread each, resident. `window` has
///   [`PING_WORDS`](crate::PING_WORDS) words, 0 at first, and `out` has [`MARKS`](crate::MARKS).
#[kernel]
pub unsafe fn bare_ping_word(comm: Comm, window: Window<u64>, plan: Plan, out: *mut u64) {
    let Some(sides) = Sides::new(&comm, window) else { return };
    // Safety: guaranteed by the kernel's caller.
    let (marks, limit) = (unsafe { Marks::new(out) }, Limit::new(plan.limit_ns));
    let (here, there) = (Sides::flag(sides.here), Sides::flag(sides.there));
    plan.play(
        sides.first,
        true,
        marks,
        |round| {
            there.store_relaxed_sys(round);
            true
        },
        |round| {
            let there = limit.reached(here, round);
            marks.count(LATE, u64::from(!there));
            if plan.verifies() {
                marks.count(WRONG, u64::from(here.load_relaxed_sys() != round));
            }
            there
        },
    );
}

impl Sides {
    /// Raises the peer's flag to `round`, after all earlier writes.
    #[inline(always)]
    fn raise(self, round: u64) {
        Global::fence_release_sys();
        Self::flag(self.there).store_relaxed_sys(round);
    }

    /// Waits until the own flag has reached `round`, and acquires what was written before. Returns false if the limit
    /// passed first.
    #[inline(always)]
    fn reached(self, round: u64, limit: Limit, marks: Marks) -> bool {
        let there = limit.reached(Self::flag(self.here), round);
        marks.count(LATE, u64::from(!there));
        Global::fence_acquire_sys();
        there
    }
}

/// Stores 64 bytes from registers to the peer, a release fence, then a flag; polls relaxed for the answer, then an
/// acquire fence. Otherwise the same as [`bare_ping_word`].
///
/// # Safety
/// - The same as for [`bare_ping_word`].
#[kernel]
pub unsafe fn bare_ping_payload(comm: Comm, window: Window<u64>, plan: Plan, out: *mut u64) {
    let Some(sides) = Sides::new(&comm, window) else { return };
    // Safety: guaranteed by the kernel's caller.
    let (marks, limit) = (unsafe { Marks::new(out) }, Limit::new(plan.limit_ns));
    plan.play(
        sides.first,
        true,
        marks,
        |round| {
            let mut index = 0;
            while index < PAYLOAD_WORDS {
                let (low, high) = (payload(round, index as u64), payload(round, index as u64 + 1));
                // Safety: within the peer's window.
                unsafe { store_weak_pair(sides.there.wrapping_add(PAYLOAD + index), low, high) };
                index += 2;
            }
            sides.raise(round);
            true
        },
        |round| {
            let there = sides.reached(round, limit, marks);
            if plan.verifies() && there {
                sides.check(round, marks);
            }
            there
        },
    );
}

/// The steps of a prepared put and wait of gin that [`bare_ping_payload`] lacks, in the order in which `ping_steps`
/// adds them.
pub const STEPS: [&str; 5] = [
    "bytes from memory",
    "flag raised by an atomic",
    "three words loaded before the polls",
    "clock read after the polls",
    "polls of two words, one after the other",
];

/// Index of three words, in another sector than the flag, that stay 0.
const NEAR: usize = FLAG + 8;

/// Does the same as [`bare_ping_payload`] with the first `COUNT` of the [`STEPS`].
///
/// # Safety
/// - The same as for [`bare_ping_word`].
#[inline(always)]
unsafe fn ping_steps<const COUNT: usize>(comm: &Comm, window: Window<u64>, plan: Plan, marks: Marks) {
    let Some(sides) = Sides::new(comm, window) else { return };
    let limit = Limit::new(plan.limit_ns);
    let (flag, there) = (Sides::flag(sides.here), Sides::flag(sides.there));
    // Safety: words of the window, used only here.
    let near = unsafe { word(sides.here.wrapping_add(NEAR)) };
    plan.play(
        sides.first,
        true,
        marks,
        |round| {
            let from = sides.here.wrapping_add(SOURCE);
            // Safety: within both windows.
            unsafe {
                if plan.verifies() {
                    let mut index = 0;
                    while index < PAYLOAD_WORDS {
                        let (low, high) = (payload(round, index as u64), payload(round, index as u64 + 1));
                        store_weak_pair(from.wrapping_add(index), low, high);
                        index += 2;
                    }
                }
                let pair = |index| load_weak_pair(from.wrapping_add(index));
                let held = (pair(0), pair(2), pair(4), pair(6));
                let to = sides.there.wrapping_add(PAYLOAD);
                store_weak_pair(to, held.0.0, held.0.1);
                store_weak_pair(to.wrapping_add(2), held.1.0, held.1.1);
                store_weak_pair(to.wrapping_add(4), held.2.0, held.2.1);
                store_weak_pair(to.wrapping_add(6), held.3.0, held.3.1);
            }
            Global::fence_release_sys();
            if COUNT >= 2 {
                there.red_add_relaxed_sys(1);
            } else {
                there.store_relaxed_sys(round);
            }
            true
        },
        |round| {
            let mut least = round;
            if COUNT >= 3 {
                let words = (near.load_relaxed_gpu(), near.at(1).load_relaxed_gpu(), near.at(2).load_relaxed_gpu());
                least = least.wrapping_add(words.0).wrapping_add(words.1 | words.2);
            }
            let reached = if COUNT >= 5 {
                limit.wait(|| {
                    let mut polls = 0;
                    loop {
                        let seen = flag.load_relaxed_sys();
                        // The second load depends on the first.
                        let seen = seen.wrapping_add(near.at(seen >> 63).load_relaxed_gpu());
                        polls += 1;
                        let reached = seen.wrapping_sub(least) as i64 >= 0;
                        if reached || polls == 8 {
                            return reached;
                        }
                    }
                })
            } else {
                limit.reached(flag, least)
            };
            marks.count(LATE, u64::from(!reached));
            Global::fence_acquire_sys();
            if COUNT >= 4 && sys::cycles() == u64::MAX {
                return false;
            }
            if plan.verifies() && reached {
                sides.check(round, marks);
            }
            reached
        },
    );
}

macro_rules! steps {
    ($($name:ident $count:literal;)*) => { $(
        #[doc = concat!("Does the same as [`bare_ping_payload`] with the first ", $count, " of the [`STEPS`].")]
        ///
        /// # Safety
        /// - The same as for [`bare_ping_word`].
        #[kernel]
        pub unsafe fn $name(comm: Comm, window: Window<u64>, plan: Plan, out: *mut u64) {
            // Safety: guaranteed by the kernel's caller.
            unsafe { ping_steps::<$count>(&comm, window, plan, Marks::new(out)) };
        }
    )* };
}

steps! {
    bare_ping_steps_1 1;
    bare_ping_steps_2 2;
    bare_ping_steps_3 3;
    bare_ping_steps_4 4;
    bare_ping_steps_5 5;
}

/// Copies 64 bytes from this rank's memory to the peer by the lanes of a warp. Then one lane raises a flag after a
/// release fence, and polls relaxed for the answer. Otherwise the same as [`bare_ping_payload`].
///
/// # Safety
/// - The same as for [`bare_ping_word`], with a block of one warp.
#[kernel]
pub unsafe fn bare_ping_copy(comm: Comm, window: Window<u64>, plan: Plan, out: *mut u64) {
    let Some(sides) = Sides::new(&comm, window) else { return };
    // Safety: guaranteed by the kernel's caller.
    let (marks, limit) = (unsafe { Marks::new(out) }, Limit::new(plan.limit_ns));
    let lane = Tile::<32>.rank() as usize;
    let leads = lane == 0;
    let mine = sides.here.wrapping_add(SOURCE + 2 * lane);
    plan.play(
        sides.first,
        leads,
        marks,
        |round| {
            if lane < PAYLOAD_WORDS / 2 {
                let index = 2 * lane as u64;
                // Safety: within both windows; each lane has separate words.
                unsafe {
                    if plan.verifies() {
                        store_weak_pair(mine, payload(round, index), payload(round, index + 1));
                    }
                    let (low, high) = load_weak_pair(mine);
                    store_weak_pair(sides.there.wrapping_add(PAYLOAD + 2 * lane), low, high);
                }
            }
            Tile::<32>.sync();
            if leads {
                sides.raise(round);
            }
            true
        },
        |round| {
            let mut late = false;
            if leads {
                late = !sides.reached(round, limit, marks);
                if plan.verifies() && !late {
                    sides.check(round, marks);
                }
            }
            !Tile::<32>.sync_or(late)
        },
    );
}

/// Sends 64 bytes of this rank's memory with the flag in the data, by 16 lanes: each stores a word of 4 bytes of data
/// and the low half of the round's number. The same lanes of the peer poll these words and copy the data to its window.
/// No fence comes before the words. Otherwise the same as [`bare_ping_copy`].
///
/// # Safety
/// - The same as for [`bare_ping_copy`].
#[kernel]
pub unsafe fn bare_ping_flagged(comm: Comm, window: Window<u64>, plan: Plan, out: *mut u64) {
    let Some(sides) = Sides::new(&comm, window) else { return };
    // Safety: guaranteed by the kernel's caller.
    let (marks, limit) = (unsafe { Marks::new(out) }, Limit::new(plan.limit_ns));
    let lane = Tile::<32>.rank() as usize;
    let half = |start: usize| sides.here.wrapping_add(start).cast::<u32>().wrapping_add(lane);
    // Safety: words of the windows, used only here; lanes without one do not access it.
    let (here, there) =
        unsafe { (word(sides.here.wrapping_add(FLAGGED + lane)), word(sides.there.wrapping_add(FLAGGED + lane))) };
    let sends = lane < 2 * PAYLOAD_WORDS;
    plan.play(
        sides.first,
        lane == 0,
        marks,
        |round| {
            if sends {
                // Safety: within the window; each lane has separate halves of words.
                let data = unsafe {
                    if plan.verifies() {
                        store_weak_u32(half(SOURCE), (payload(round, lane as u64 / 2) >> (lane % 2 * 32)) as u32);
                    }
                    load_relaxed_sys_u32(half(SOURCE))
                };
                there.store_relaxed_sys(u64::from(data) | round << 32);
            }
            true
        },
        |round| {
            let mut late = false;
            if sends {
                let mut word = 0;
                // Several polls for each look at the clock.
                late = !limit.wait(|| {
                    let mut polls = 0;
                    loop {
                        word = here.load_relaxed_sys();
                        polls += 1;
                        let there = word >> 32 == round & 0xffff_ffff;
                        if there || polls == 8 {
                            return there;
                        }
                    }
                });
                // Safety: within the window; each lane has separate halves of words.
                unsafe { store_weak_u32(half(PAYLOAD), word as u32) };
            }
            let late = Tile::<32>.sync_or(late);
            Global::fence_acquire_sys();
            if lane == 0 {
                marks.count(LATE, u64::from(late));
                if plan.verifies() && !late {
                    sides.check(round, marks);
                }
            }
            !late
        },
    );
}

/// Copies `len` words to the peer by all threads of a block. Then one thread raises a flag after a release fence, and
/// polls relaxed for the answer. Otherwise the same as [`bare_ping_word`].
///
/// # Safety
/// - The same as for [`bare_ping_word`], with one block of any size. `to` and `from` have `len` words, an even number.
#[kernel]
pub unsafe fn bare_ping_block(
    comm: Comm,
    window: Window<u64>,
    to: Window<u64>,
    from: Window<u64>,
    len: usize,
    plan: Plan,
    out: *mut u64,
) {
    let Some(sides) = Sides::new(&comm, window) else { return };
    let there = match to.peer_ptr(comm.world().right()) {
        Ok(there) => there,
        Err(fault) => return comm.report(fault),
    };
    // Safety: guaranteed by the kernel's caller.
    let (marks, limit) = (unsafe { Marks::new(out) }, Limit::new(plan.limit_ns));
    let leads = Block.elect();
    plan.play(
        sides.first,
        leads,
        marks,
        |round| {
            if plan.verifies() {
                // Safety: guaranteed by the kernel's caller.
                unsafe { crate::data::write(from.local_ptr(), len, round) };
            }
            let mut unit = Block.rank() as usize;
            while unit < len / 2 {
                // Safety: in range.
                unsafe {
                    let (low, high) = load_weak_pair(from.local_ptr().wrapping_add(2 * unit));
                    store_weak_pair(there.wrapping_add(2 * unit), low, high);
                }
                unit += Block.size() as usize;
            }
            Block.sync();
            if leads {
                sides.raise(round);
            }
            true
        },
        |round| {
            let late = Block.sync_or(leads && !sides.reached(round, limit, marks));
            if plan.verifies() && !late {
                // Safety: guaranteed by the kernel's caller.
                marks.count(WRONG, unsafe { crate::data::differing(to.local_ptr(), len, round) });
                Block.sync();
            }
            !late
        },
    );
}

/// Copies words to the peer. All threads of the grid stride together, or with `PARTS` those of each block over a part
/// of its own; each has `UNROLL` units of 16 bytes in flight. With `FAN` they store each unit also behind the first
/// half of the caller's part of `to`.
///
/// # Safety
/// - `load` loads 16 bytes of a valid address. Both windows have as many words, aligned to 16 bytes.
#[inline(always)]
unsafe fn copy<const UNROLL: usize, const PARTS: bool, const FAN: bool>(
    comm: &Comm,
    (to, from): (Window<u64>, Window<u64>),
    flags: Window<u64>,
    transfers: Transfers,
    marks: Marks,
    load: impl Fn(*const u64) -> (u64, u64),
) {
    let (len, times) = (transfers.len as usize, transfers.times);
    let own = to.local_ptr().wrapping_add(len);
    let to = match to.peer_ptr(comm.world().right()) {
        Ok(there) => there,
        Err(fault) => return comm.report(fault),
    };
    let from = from.local_ptr();
    let store = |unit: usize, (low, high): (u64, u64)| {
        // Safety: the callers pass units in range.
        unsafe {
            store_weak_pair(to.wrapping_add(2 * unit), low, high);
            if FAN {
                store_weak_pair(own.wrapping_add(2 * unit), low, high);
            }
        }
    };
    let (threads, blocks) = (Block.size() as usize, grid_dim().count() as usize);
    let (block, rank, units) = (block_in_grid() as usize, Block.rank() as usize, len / 2);
    let (first, step, units) = if PARTS {
        // The same parts as those of `bench_lsa_put`.
        (units * block / blocks + rank, threads, units * (block + 1) / blocks)
    } else {
        (block * threads + rank, threads * blocks, units)
    };
    if !transfers.begin(comm, flags, marks) {
        return;
    }
    Block.sync();
    if Block.elect() {
        marks.now(START);
    }
    let mut time = 0;
    while time < times {
        let mut unit = first;
        while unit + (UNROLL - 1) * step < units {
            let mut held = [(0, 0); UNROLL];
            let mut number = 0;
            while number < UNROLL {
                held[number] = load(from.wrapping_add(2 * (unit + number * step)));
                number += 1;
            }
            number = 0;
            while number < UNROLL {
                store(unit + number * step, held[number]);
                number += 1;
            }
            unit += UNROLL * step;
        }
        while unit < units {
            store(unit, load(from.wrapping_add(2 * unit)));
            unit += step;
        }
        time += 1;
    }
    // All data has arrived before the end time is taken.
    Global::fence_release_sys();
    Block.sync();
    if Block.elect() {
        marks.now(END);
    }
}

macro_rules! copies {
    ($($name:ident $unroll:literal $parts:literal $fan:literal $threads:literal $load:ident $doc:literal;)*) => { $(
        #[doc = concat!("Copies words to the next rank, ", $doc, ".")]
        ///
        /// # Safety
        /// - Both windows have the words of the transfers, aligned to 16 bytes, with no other users meanwhile; for
        ///   `bare_fan_4`, `to` has twice as many. `out` has [`MARKS`](crate::MARKS) words for each block. `flags` has
        ///   [`FLAG_WORDS`](crate::FLAG_WORDS); if the kernels begin together, all blocks are resident.
        #[kernel(launch_bounds($threads))]
        pub unsafe fn $name(
            comm: Comm,
            to: Window<u64>,
            from: Window<u64>,
            flags: Window<u64>,
            transfers: Transfers,
            out: *mut u64,
        ) {
            // Safety: guaranteed by the kernel's caller.
            unsafe {
                let marks = Marks::new(out);
                copy::<$unroll, $parts, $fan>(&comm, (to, from), flags, transfers, marks, |unit| $load(unit));
            }
        }
    )* };
}

copies! {
    bare_copy_1 1 false false 1024 load_weak_pair "one unit of 16 bytes under way in each thread";
    bare_copy_2 2 false false 1024 load_weak_pair "two units of 16 bytes under way in each thread";
    bare_copy_4 4 false false 1024 load_weak_pair "four units of 16 bytes under way in each thread";
    bare_copy_8 8 false false 512 load_weak_pair "eight units of 16 bytes under way in each thread";
    bare_copy_4_parts 4 true false 1024 load_weak_pair "four units of 16 bytes under way in each thread, a part for each block";
    bare_fan_4 4 false true 1024 load_weak_pair "four units of 16 bytes under way in each thread, and to itself";
    bare_copy_4_strong 4 false false 1024 load_relaxed_sys_pair "four units of 16 bytes under way in each thread, by strong loads";
}
