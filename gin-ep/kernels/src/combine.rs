// SPDX-License-Identifier: MIT OR Apache-2.0
//! Combine: one row back for every row received, and their sums.

use crate::UNIT;
use crate::dispatch::{Arena, Pairs, arrives, lane_index, load_unit, store_unit};
use crate::lane::{COMBINE, EPOCH, Lane, MASKED, Tokens, load};
use crate::protocol::{Launch, agree, raise};
use gin_device::prelude::*;
use gin_device::sys::{Global, Memory, Word};

/// Returns a row for every row that this rank received, and adds up the rows that it gets back, in FP32, in the order
/// in which a token's ids name the ranks first. Elements are BF16. All threads of the grid call.
///
/// `rows` is the address of the rows, in the places of the received ones: `tokens` of the group's most for each rank.
/// 0 stands for the received rows themselves, which the experts have overwritten. `output` is the address of a row for
/// each token. A token without experts gets zeros.
///
/// A rank that is silent takes no part: its terms are missing, which is reported once.
///
/// # Safety
/// - As [`dispatch`](crate::dispatch), whose tokens these are, with the same ids. `rows` and `output` are valid and
///   multiples of 16.
#[inline(always)]
pub unsafe fn combine(comm: &Comm, arena: &Window<u64>, lane: &Lane, tokens: &Tokens, rows: u64, output: u64) {
    let Some(arena) = Arena::new(comm, arena) else { return };
    let blocks = grid_dim().count() as u64;
    let launch = Launch::<Global>::new(arena.word(lane.word(COMBINE)));
    if Block.elect() {
        launch.start();
    }
    let epoch = arena.word(lane.word(EPOCH)).load_relaxed_gpu();
    let rows = if rows == 0 { arena.here() + lane.rows(epoch & 1, 0) } else { rows };
    // Safety: the caller's promise.
    unsafe { give_back(&arena, lane, epoch, rows, blocks as u32) };
    Block.sync();
    let mut may_wait = false;
    if Block.rank() < WARP_SIZE {
        let sent = if Block.elect() {
            launch.finish(blocks)
        } else {
            crate::protocol::Sent { is_last: false, may_wait: false }
        };
        if Warp.any(sent.is_last) {
            let mut to = lane_index();
            while to < lane.sizes.ranks {
                raise::<Global>(arena.word_at(to, lane.returned_flag(arena.rank())), epoch);
                to += WARP_SIZE;
            }
        }
        may_wait = Warp.any(sent.may_wait);
    }
    if !Block.sync_or(may_wait) {
        return;
    }
    let present = present(comm, &arena, lane, epoch);
    // Safety: the caller's promise.
    unsafe { add_up(&arena, lane, tokens, &launch, epoch, present, output) };
}

/// Stores the rows of the block's share into the memory of their sources.
///
/// # Safety
/// - As [`combine`].
#[inline(always)]
unsafe fn give_back(arena: &Arena, lane: &Lane, epoch: u64, rows: u64, blocks: u32) {
    let (sizes, slot, me) = (&lane.sizes, epoch & 1, arena.rank());
    let pairs = sizes.row_bytes / 16;
    let units = pairs.div_ceil(UNIT);
    let warps = Block.size() / WARP_SIZE;
    let step = warps * blocks;
    let mut unit = Block.rank() / WARP_SIZE * blocks + block_in_grid();
    for distance in 1..=sizes.ranks {
        let sum = me + distance;
        let source = if sum >= sizes.ranks { sum - sizes.ranks } else { sum };
        let count = arena.word(lane.got(slot, source)).load_relaxed_gpu() as u32;
        let there = arena.there(source) + lane.returned(slot, me);
        while unit < count * units {
            let (row, part) = (unit / units, unit % units);
            let pair = part * UNIT + lane_index();
            let place = u64::from(source) * u64::from(sizes.tokens) + u64::from(row);
            // Safety: the caller's promise.
            unsafe {
                let data = load_unit(rows + place * u64::from(sizes.row_bytes), pair, pairs);
                let meta = arena.here() + lane.meta(slot, source) + u64::from(row) * u64::from(sizes.meta_bytes());
                // A rank may send anything, but nothing is written past its region.
                let token = load(meta).min(sizes.tokens - 1);
                store_unit(there + u64::from(token) * u64::from(sizes.row_bytes), pair, pairs, &data);
            }
            unit += step;
        }
        unit -= count * units;
    }
}

/// Waits until all ranks have returned their rows. Returns the ranks that have, as bits; the same in all blocks.
#[inline(always)]
fn present(comm: &Comm, arena: &Arena, lane: &Lane, epoch: u64) -> u64 {
    let masked = arena.word(lane.word(MASKED));
    let silent = masked.load_relaxed_gpu();
    let mut present = 0u64;
    if Block.rank() < WARP_SIZE {
        let mut first = 0;
        while first < lane.sizes.ranks {
            let source = first + lane_index();
            let mut took_part = false;
            if source < lane.sizes.ranks && silent >> source & 1 == 0 {
                let start = Global::clock_ns();
                took_part = arrives(comm, arena, lane, arena.word(lane.returned_flag(source)), epoch, source);
                // The blocks began to wait at about the same time. So if one of them gave up, a block that saw the flag
                // has waited for long, too, and asks.
                let waited = Global::clock_ns().wrapping_sub(start);
                if !took_part || lane.deadline.is_over(waited.saturating_mul(4)) {
                    took_part = agree::<Global>(arena.word(lane.verdict(source)), epoch, took_part);
                }
                if !took_part {
                    masked.red_or_relaxed_gpu(1 << source);
                }
            }
            present |= u64::from(Warp.ballot(took_part)) << first;
            first += WARP_SIZE;
        }
        Global::fence_acquire_sys();
    }
    Block.broadcast(present, 0)
}

/// The sums of the eight elements of a pair. Not an array in a loop, which LLVM would put on the stack.
#[derive(Clone, Copy, Default)]
struct Sums([f32; 8]);

impl Sums {
    /// Adds the eight BF16 of a pair.
    #[inline(always)]
    fn add(&mut self, (low, high): (u64, u64)) {
        let value = |word: u64, place: u32| f32::from_bits(((word >> (16 * place)) as u32) << 16);
        let sums = &mut self.0;
        sums[0] += value(low, 0);
        sums[1] += value(low, 1);
        sums[2] += value(low, 2);
        sums[3] += value(low, 3);
        sums[4] += value(high, 0);
        sums[5] += value(high, 1);
        sums[6] += value(high, 2);
        sums[7] += value(high, 3);
    }

    /// Rounds to eight BF16.
    #[inline(always)]
    fn pair(&self) -> (u64, u64) {
        let sums = &self.0;
        let word = |a, b, c, d| u64::from(Bf16::pack([a, b])) | u64::from(Bf16::pack([c, d])) << 32;
        (word(sums[0], sums[1], sums[2], sums[3]), word(sums[4], sums[5], sums[6], sums[7]))
    }
}

/// Adds up units of tokens, until all are taken.
///
/// # Safety
/// - As [`combine`].
#[inline(always)]
unsafe fn add_up(
    arena: &Arena,
    lane: &Lane,
    tokens: &Tokens,
    launch: &Launch<Global>,
    epoch: u64,
    present: u64,
    output: u64,
) {
    let (sizes, slot) = (&lane.sizes, epoch & 1);
    let number = tokens.number().min(sizes.tokens);
    let pairs = sizes.row_bytes / 16;
    let units = pairs.div_ceil(UNIT);
    let (topk, local) = (sizes.topk, sizes.local());
    loop {
        let taken = if lane_index() == 0 { launch.take() } else { 0 };
        let unit = Warp.shuffle(taken, 0);
        if unit >= u64::from(number) * u64::from(units) {
            return;
        }
        let (token, part) = (unit as u32 / units, unit as u32 % units);
        let pair = part * UNIT + lane_index();
        let id = if lane_index() < topk { tokens.id((token * topk + lane_index()) as usize) } else { -1 };
        let is_dropped = Warp.any(id >= 0 && id as u32 >= sizes.experts);
        let owner = if id < 0 || is_dropped { u32::MAX } else { id as u32 / local };
        let (mut first, mut second, mut third, mut fourth) =
            (Sums::default(), Sums::default(), Sums::default(), Sums::default());
        let mut added = !present;
        for k in 0..topk {
            let source = Warp.shuffle(owner, k);
            if source >= sizes.ranks || added >> source & 1 != 0 {
                continue;
            }
            added |= 1 << source;
            let row = arena.here() + lane.returned(slot, source) + u64::from(token) * u64::from(sizes.row_bytes);
            // Safety: a place of the arena, and the rank has returned its rows.
            let data = unsafe { load_unit(row, pair, pairs) };
            first.add(data.0);
            second.add(data.1);
            third.add(data.2);
            fourth.add(data.3);
        }
        let data: Pairs = (first.pair(), second.pair(), third.pair(), fourth.pair());
        let row = output + u64::from(token) * u64::from(sizes.row_bytes);
        // Safety: the caller's promise.
        unsafe { store_unit(row, pair, pairs, &data) };
    }
}
