// SPDX-License-Identifier: MIT OR Apache-2.0
//! Places of rows in a region that all sources share.
//!
//! Before a dispatch each source announces to each receiver how many rows it has for it. A receiver that knows all
//! numbers reserves places for each source, one after the other, and answers with the first. A source stores when it
//! has its places at all receivers. So rows lie by source and token. One region is enough, because a receiver reserves
//! places when all ranks have announced their numbers, which they do after the combine before.

use crate::arena::{Arena, Near, is_silent, lane_index};
use crate::params::{EPOCH, MASKED, RESERVED, SlotParams};
use crate::protocol::{self, flag, raise};
use crate::routes::{Routes, planned};
use crate::status::{self, Code};
use gin_device::prelude::*;
use gin_device::sys::{Global, Word};

shared! { static COUNTS: [u32; 64]; }

/// Agrees with all ranks where the rows of the next dispatch go. One block calls, and one of its warps waits.
///
/// Errors are reported to the slot's status, and the communicator goes on:
///
/// | code | what happens |
/// | --- | --- |
/// | [`Code::Silent`] | the rank counts as one without tokens, and gets no rows |
/// | [`Code::Full`] | the rows past the end of a receiver's region are not sent |
///
/// # Safety
/// - As [`dispatch`](crate::dispatch()). `plan` is that of the tokens of the next dispatch, which follows. Sources
///   share a region.
#[inline(always)]
pub unsafe fn reserve(comm: &Comm, arena: &Window<u64>, slot: &SlotParams, plan: u64) {
    let Some(arena) = Arena::new(comm, arena) else { return };
    let (counts, ranks) = (COUNTS.array(), slot.sizes.ranks);
    let mut rank = Block.rank() / WARP_SIZE;
    while rank < ranks {
        // Safety: the caller's promise.
        let count = unsafe { planned(slot, plan, rank) };
        if lane_index() == 0 {
            counts.write(rank as usize, count);
        }
        rank += Block.size() / WARP_SIZE;
    }
    Block.sync();
    if block_in_grid() != 0 || Block.rank() >= WARP_SIZE {
        return;
    }
    let epoch = arena.word(slot.word(EPOCH)).load_relaxed_gpu().wrapping_add(1);
    let masked = arena.word(slot.word(MASKED)).load_relaxed_gpu();
    agree(comm, &arena, slot, (epoch, masked));
}

/// Reserves places as [`reserve()`] in a dispatch, of which `epoch` is the number. `started` is the number of blocks
/// that had started before this one, in its first thread; `masked` and `since` are the words of the slot's state when
/// the block began. Returns the ranks that get no rows. All threads of the block call, and `routes` has all tokens.
///
/// The block that starts first agrees with other ranks. It waits for them alone, so one resident block is enough. The
/// others wait for the answers of the same ranks, or for the end of its wait if a rank may be silent: it begins to wait
/// after the dispatch before has ended, and gives up no earlier than a deadline later. A rank announces its number
/// before it answers, so that block will see both in time, if another has seen the answer.
#[inline(always)]
pub(crate) fn reserve_within(
    comm: &Comm,
    arena: &Arena<Near>,
    slot: &SlotParams,
    routes: &mut Routes,
    (epoch, started): (u64, u64),
    (masked, since): (u64, u64),
) -> u64 {
    let (is_first, ranks) = (Block.broadcast(started, 0) == 0, slot.sizes.ranks);
    if Block.rank() < WARP_SIZE {
        let decided = arena.word(slot.word(RESERVED));
        if is_first {
            each(ranks, |rank| COUNTS.array().write(rank as usize, routes.total(rank)));
            Warp.sync();
            agree(comm, arena, slot, (epoch, masked));
            // The first lane tells what all lanes have stored and acquired.
            Warp.sync();
            if Warp.elect() {
                protocol::decide::<Global>(decided, epoch);
            }
        } else {
            each(ranks, |to| {
                if masked >> to & 1 == 0 {
                    let (status, granted) = (status::of(comm), arena.word(slot.granted(to)));
                    let words = (decided, granted);
                    protocol::wait_or_follow::<Global>(&status, slot.deadline, granted, words, epoch, since);
                }
            });
        }
    }
    // All threads see what the lanes have acquired.
    Block.sync();
    let masked = arena.word(slot.word(MASKED)).load_relaxed_gpu();
    routes.begin(arena.here(), slot);
    masked
}

/// Agrees with all ranks, by one warp. The block has the numbers of rows in shared memory.
#[inline(always)]
fn agree(comm: &Comm, arena: &Arena<Near>, slot: &SlotParams, (epoch, masked): (u64, u64)) {
    let (counts, ranks, me) = (COUNTS.array(), slot.sizes.ranks, arena.rank());
    each(ranks, |to| {
        if masked >> to & 1 == 0 {
            raise::<Global>(arena.word_at(to, slot.announced(me)), epoch, counts.read(to as usize));
        }
    });
    let (present, numbers) =
        wait_all(comm, arena, slot, (epoch, masked), slot.deadline, |source| slot.announced(source));
    grant(arena, slot, (epoch, present), numbers);
    // A receiver waits for a silent rank first, up to a deadline longer than this one.
    let (silent, deadline) = (!present, slot.deadlines(2));
    let (granting, first) = wait_all(comm, arena, slot, (epoch, silent), deadline, |to| slot.granted(to));
    each(ranks, |to| {
        let end = (if to < WARP_SIZE { first.0 } else { first.1 }) + counts.read(to as usize);
        if granting >> to & 1 != 0 && counts.read(to as usize) != 0 && end > slot.sizes.max_rows {
            status::report(arena.here(), slot, Code::Full, to, 0, end.into(), slot.sizes.max_rows.into());
        }
    });
}

/// Calls with all ranks, each by one lane of a warp.
#[inline(always)]
fn each(ranks: u32, visit: impl Fn(u32)) {
    let mut rank = lane_index();
    while rank < ranks {
        visit(rank);
        rank += WARP_SIZE;
    }
}

/// Waits for a flag of each rank but `silent`, by a warp. Returns the ranks whose flags came, as bits, and the numbers
/// of the one or two ranks of this lane.
#[inline(always)]
fn wait_all(
    comm: &Comm,
    arena: &Arena<Near>,
    slot: &SlotParams,
    (epoch, silent): (u64, u64),
    deadline: Deadline,
    flag: impl Fn(u32) -> u64,
) -> (u64, (u32, u32)) {
    let (mut first, mut present, mut numbers) = (0, 0, (0, 0));
    while first < slot.sizes.ranks {
        let (rank, mut number) = (first + lane_index(), None);
        if rank < slot.sizes.ranks && silent >> rank & 1 == 0 {
            match protocol::wait::<Global>(&status::of(comm), deadline, arena.word(flag(rank)), epoch) {
                Ok(seen) => number = Some(seen),
                Err(error) => is_silent(arena, slot, rank, epoch, error),
            }
        }
        present |= u64::from(Warp.ballot(number.is_some())) << first;
        let number = number.unwrap_or(0);
        numbers = if first == 0 { (number, 0) } else { (numbers.0, number) };
        first += WARP_SIZE;
    }
    (present, numbers)
}

/// Gives each present source its places, one after the other, by a warp whose lanes have the numbers of their rows.
#[inline(always)]
fn grant(arena: &Arena<Near>, slot: &SlotParams, (epoch, present): (u64, u64), (low, high): (u32, u32)) {
    let (ranks, me) = (slot.sizes.ranks, arena.rank());
    // Rows that a silent rank may still store, or load as what came back: first row and end.
    let kept = |rank: u32| -> (u32, u32) {
        if rank >= ranks || present >> rank & 1 != 0 {
            return (0, 0);
        }
        let last = arena.word(slot.reserved(rank)).load_relaxed_gpu();
        if protocol::is_over::<Global>(arena.word(slot.announced(rank)), last >> 32) {
            return (0, 0);
        }
        (last as u32, last as u32 + arena.word(slot.offered(rank)).load_relaxed_gpu() as u32)
    };
    let (kept_low, kept_high) = (kept(lane_index()), kept(lane_index() + WARP_SIZE));
    let is_kept = Warp.any(kept_low.1 != 0 || kept_high.1 != 0);
    let (mut end, mut first) = (0, (0, 0));
    for source in 0..ranks {
        let count = Warp.shuffle(if source < WARP_SIZE { low } else { high }, source % WARP_SIZE);
        // The end of kept places that the rows would lie in; 0 if there are none.
        let in_the_way = |end: u32| {
            let after = |(first, last): (u32, u32)| if first < end + count && end < last { last } else { 0 };
            let after = if count == 0 { 0 } else { after(kept_low).max(after(kept_high)) };
            let lanes = Warp.ballot(after != 0);
            if lanes == 0 { 0 } else { Warp.shuffle(after, lanes.trailing_zeros()) }
        };
        let mut after = if is_kept { in_the_way(end) } else { 0 };
        while after != 0 {
            end = after;
            after = in_the_way(end);
        }
        if lane_index() == source % WARP_SIZE {
            first = if source < WARP_SIZE { (end, first.1) } else { (first.0, end) };
        }
        end += count;
    }
    if lane_index() == 0 && end > slot.sizes.max_rows {
        status::report(arena.here(), slot, Code::Full, me, 0, end.into(), slot.sizes.max_rows.into());
    }
    // Each lane grants places after all that any lane has acquired: the numbers of all ranks but silent ones. A rank
    // announced its number after its combine or release of the dispatch before, so no rank reads or writes rows of that
    // one in this region any more, and one buffer is enough.
    Warp.sync();
    each(ranks, |source| {
        if present >> source & 1 != 0 {
            let (first, count) = if source < WARP_SIZE { (first.0, low) } else { (first.1, high) };
            arena.word(slot.reserved(source)).store_relaxed_gpu(flag(epoch, first));
            arena.word(slot.offered(source)).store_relaxed_gpu(count.into());
            raise::<Global>(arena.word_at(source, slot.granted(me)), epoch, first);
        }
    });
}
