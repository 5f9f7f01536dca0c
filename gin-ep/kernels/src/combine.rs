// SPDX-License-Identifier: MIT OR Apache-2.0
//! Combine: one row back for every row received, and their sums.

use crate::UNIT;
use crate::dispatch::{Arena, arrives, lane_index};
use crate::element::Element;
use crate::format::{Pairs, load_unit, store_unit};
use crate::lane::{COMBINE, EPOCH, Lane, MASKED, SINCE, Tokens, load};
use crate::protocol::{self, Launch, agree, must_agree, raise};
use gin_device::prelude::*;
use gin_device::sys::{Global, Word};

/// [`Sums::flags`]: the sums start from the output's elements.
pub const ACCUMULATE: u32 = 1;
/// [`Sums::flags`]: the rows are at their sources; an earlier kernel of the stream has stored them there.
pub const RETURNED: u32 = 2;

/// The rows that come back, and where their sums go: a parameter of the kernels.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug, Pod, Zeroable)]
#[bytemuck(crate = "gin_device::bytemuck")]
pub struct Sums {
    /// The address of the rows, in the places of the received ones: [`Sizes::back_rows`](crate::Sizes::back_rows) for
    /// each. 0 stands for the received rows themselves, which the experts have overwritten.
    pub rows: u64,
    /// The address of a row for each token.
    pub output: u64,
    /// The address of a row for each token, from which its sum starts; 0 if there is none.
    pub bias: u64,
    /// The address of the weights, an `f32` for each id; 0 if all are 1. One row for each rank has none.
    pub weights: u64,
    /// The address of a word for each returned row: its place in `rows`; 0 if that is the place of the received row.
    pub places: u64,
    /// The number of places; rows past it are zero.
    pub capacity: u32,
    /// [`ACCUMULATE`], [`RETURNED`], both, or 0.
    pub flags: u32,
}

/// Returns rows for every row that this rank received, and adds up the rows that it gets back, in FP32, rounded once.
/// All threads of the grid call.
///
/// With one row for each rank, the sum is in the order in which a token's ids name the ranks first. With one for each
/// id it is in the order of the ids, and each row is multiplied by its weight, by `fma`. Bias, then the output's old
/// row, come first. A token without experts gets zeros, or those.
///
/// A rank that is silent takes no part: its terms are missing, which is reported once.
///
/// # Safety
/// - As [`dispatch`](crate::dispatch()), whose tokens these are, with the same ids. The addresses of `sums` are valid
///   and multiples of 16, that of the weights of 4.
#[inline(always)]
pub unsafe fn combine<E: Element>(comm: &Comm, arena: &Window<u64>, lane: &Lane, tokens: &Tokens, sums: &Sums) {
    let Some(arena) = Arena::new(comm, arena) else { return };
    let blocks = grid_dim().count() as u64;
    let launch = Launch::<Global>::new(arena.word(lane.word(COMBINE)));
    if Block.elect() {
        launch.start();
    }
    let epoch = arena.word(lane.word(EPOCH)).load_relaxed_gpu();
    let since = arena.word(lane.word(SINCE)).load_relaxed_gpu();
    let masked = arena.word(lane.word(MASKED)).load_relaxed_gpu();
    let rows = if sums.rows == 0 { arena.here() + lane.rows(protocol::slot(epoch), 0) } else { sums.rows };
    if sums.flags & RETURNED == 0 {
        // Safety: the caller's promise.
        unsafe { give_back(&arena, lane, epoch, rows, sums, blocks as u32) };
    }
    Block.sync();
    let mut may_wait = false;
    if Block.rank() < WARP_SIZE {
        let sent =
            if Block.elect() { launch.finish(blocks) } else { protocol::Sent { is_last: false, may_wait: false } };
        if Warp.any(sent.is_last) {
            let mut to = lane_index();
            while to < lane.sizes.ranks {
                if masked >> to & 1 == 0 {
                    raise::<Global>(arena.word_at(to, lane.returned_flag(arena.rank())), epoch, 0);
                }
                to += WARP_SIZE;
            }
        }
        may_wait = Warp.any(sent.may_wait);
    }
    if !Block.sync_or(may_wait) {
        return;
    }
    // The flags are on their way meanwhile.
    let first = if lane_index() == 0 { launch.take() } else { 0 };
    let number = tokens.number(&lane.sizes);
    // Safety: the caller's promise.
    let first = unsafe { Work::new(lane, tokens, sums, number, Warp.shuffle(first, 0)) };
    let present = present(comm, &arena, lane, epoch, since, masked);
    // Safety: the caller's promise.
    unsafe { add_up::<E>(&arena, lane, tokens, sums, number, &launch, epoch, present, first) };
}

/// Stores the rows of the block's share into the memory of their sources.
///
/// # Safety
/// - As [`combine`].
#[inline(always)]
unsafe fn give_back(arena: &Arena, lane: &Lane, epoch: u64, rows: u64, sums: &Sums, blocks: u32) {
    let (sizes, slot, me) = (&lane.sizes, protocol::slot(epoch), arena.rank());
    let (pairs, each, bytes) = (sizes.back_bytes / 16, sizes.back_rows, u64::from(sizes.back_bytes));
    let units = pairs.div_ceil(UNIT);
    let warps = Block.size() / WARP_SIZE;
    let step = warps * blocks;
    let mut unit = Block.rank() / WARP_SIZE * blocks + block_in_grid();
    // Each lane loads the numbers of two sources, so that all are on their way together.
    let got = |source: u32| {
        if source < sizes.ranks { arena.word(lane.got(slot, source)).load_relaxed_gpu() as u32 } else { 0 }
    };
    let (low, high) = (got(lane_index()), got(lane_index() + WARP_SIZE));
    for distance in 1..=sizes.ranks {
        let sum = me + distance;
        let source = if sum >= sizes.ranks { sum - sizes.ranks } else { sum };
        let count = Warp.shuffle(if source < WARP_SIZE { low } else { high }, source % WARP_SIZE);
        let there = arena.there(source) + lane.returned(slot, me);
        while unit < count * each * units {
            let (index, part) = (unit / units, unit % units);
            let (row, k) = (index / each, index % each);
            let pair = part * UNIT + lane_index();
            let place = u64::from(source) * u64::from(sizes.tokens) + u64::from(row);
            let meta = arena.here() + lane.meta(slot, source) + u64::from(row) * u64::from(sizes.meta_bytes());
            unit += step;
            // Safety: the caller's promise.
            unsafe {
                if each > 1 && (load(meta + 4 + 4 * u64::from(k)) as i32) < 0 {
                    continue;
                }
                let mut place = place * u64::from(each) + u64::from(k);
                let mut loaded = pairs;
                if sums.places != 0 {
                    let arranged = load(sums.places + 4 * place);
                    // Nothing is loaded past the end.
                    (place, loaded) = (arranged.into(), if arranged < sums.capacity { pairs } else { 0 });
                }
                let data = load_unit(rows + place * bytes, pair, loaded);
                // A rank may send anything, but nothing is written past its region.
                let token = load(meta).min(sizes.tokens - 1);
                let back = u64::from(token) * u64::from(each) + u64::from(k);
                store_unit(there + back * bytes, pair, pairs, &data);
            }
        }
        unit -= count * each * units;
    }
}

/// Waits until all ranks but `silent` have returned their rows. Returns the ranks that have, as bits; the same
/// in all blocks.
#[inline(always)]
fn present(comm: &Comm, arena: &Arena, lane: &Lane, epoch: u64, since: u64, silent: u64) -> u64 {
    let mut present = 0u64;
    if Block.rank() < WARP_SIZE {
        let mut first = 0;
        while first < lane.sizes.ranks {
            let source = first + lane_index();
            let mut took_part = false;
            if source < lane.sizes.ranks && silent >> source & 1 == 0 {
                took_part = arrives(comm, arena, lane, lane.returned_flag(source), epoch, source).is_some();
                if !took_part || must_agree::<Global>(since, lane.deadline) {
                    took_part = agree::<Global>(arena.word(lane.verdict(source)), epoch, took_part);
                }
                if !took_part {
                    arena.word(lane.word(MASKED)).red_or_relaxed_gpu(1 << source);
                }
            }
            present |= u64::from(Warp.ballot(took_part)) << first;
            first += WARP_SIZE;
        }
    }
    Block.broadcast(present, 0)
}

/// The sums of four pairs. Separate variables: LLVM would put an array in a loop on the stack.
struct Unit<E: Element> {
    first: E::Sums,
    second: E::Sums,
    third: E::Sums,
    fourth: E::Sums,
}

impl<E: Element> Unit<E> {
    #[inline(always)]
    fn new() -> Self {
        Self {
            first: E::Sums::default(),
            second: E::Sums::default(),
            third: E::Sums::default(),
            fourth: E::Sums::default(),
        }
    }

    #[inline(always)]
    fn add(&mut self, weight: f32, data: &Pairs) {
        E::add(&mut self.first, weight, data.0);
        E::add(&mut self.second, weight, data.1);
        E::add(&mut self.third, weight, data.2);
        E::add(&mut self.fourth, weight, data.3);
    }

    #[inline(always)]
    fn round(&self) -> Pairs {
        (E::round(&self.first), E::round(&self.second), E::round(&self.third), E::round(&self.fourth))
    }
}

/// A unit of a token, with an id and its weight in each lane of the warp.
#[derive(Clone, Copy)]
struct Work {
    token: u32,
    part: u32,
    id: i32,
    weight: f32,
    is_there: bool,
}

impl Work {
    /// Loads ids and weights of a unit, if there is such a one. `number` is the number of tokens.
    ///
    /// # Safety
    /// - As [`combine`].
    #[inline(always)]
    unsafe fn new(lane: &Lane, tokens: &Tokens, sums: &Sums, number: u32, unit: u64) -> Self {
        let (sizes, units) = (&lane.sizes, (lane.sizes.back_bytes / 16).div_ceil(UNIT));
        if unit >= u64::from(number) * u64::from(units) {
            return Self { token: 0, part: 0, id: -1, weight: 1.0, is_there: false };
        }
        let (token, part) = (unit as u32 / units, unit as u32 % units);
        let index = u64::from(token) * u64::from(sizes.topk) + u64::from(lane_index());
        let is_mine = lane_index() < sizes.topk;
        let id = if is_mine { tokens.id(index) } else { -1 };
        let weight = if is_mine && sums.weights != 0 {
            // Safety: the caller's promise.
            f32::from_bits(unsafe { load(sums.weights + 4 * index) })
        } else {
            1.0
        };
        Self { token, part, id, weight, is_there: true }
    }
}

/// Adds up units of tokens, until all are taken. `work` is the first one.
///
/// # Safety
/// - As [`combine`].
#[inline(always)]
#[expect(clippy::too_many_arguments, reason = "it is a part of `combine`")]
unsafe fn add_up<E: Element>(
    arena: &Arena,
    lane: &Lane,
    tokens: &Tokens,
    sums: &Sums,
    number: u32,
    launch: &Launch<Global>,
    epoch: u64,
    present: u64,
    mut work: Work,
) {
    let (sizes, slot) = (&lane.sizes, protocol::slot(epoch));
    let (pairs, each, bytes) = (sizes.back_bytes / 16, sizes.back_rows, u64::from(sizes.back_bytes));
    let (topk, local) = (sizes.topk, sizes.local());
    while work.is_there {
        // The next one is on its way meanwhile.
        let next = if lane_index() == 0 { launch.take() } else { 0 };
        let Work { token, part, id, weight, .. } = work;
        let pair = part * UNIT + lane_index();
        let is_dropped = Warp.any(id >= 0 && id as u32 >= sizes.experts);
        let owner = if id < 0 || is_dropped { u32::MAX } else { id as u32 / local };
        let output = sums.output + u64::from(token) * bytes;
        let mut sum = Unit::<E>::new();
        // Safety: the caller's promise.
        unsafe {
            if sums.bias != 0 {
                sum.add(1.0, &load_unit(sums.bias + u64::from(token) * bytes, pair, pairs));
            }
            if sums.flags & ACCUMULATE != 0 {
                sum.add(1.0, &load_unit(output, pair, pairs));
            }
        }
        let mut added = !present;
        for k in 0..topk {
            let (source, weight) = (Warp.shuffle(owner, k), Warp.shuffle(weight, k));
            if source >= sizes.ranks || added >> source & 1 != 0 {
                continue;
            }
            let place = if each > 1 { k } else { 0 };
            added |= if each > 1 { 0 } else { 1 << source };
            let back = u64::from(token) * u64::from(each) + u64::from(place);
            // Safety: a place of the arena, and the rank has returned its rows.
            let data = unsafe { load_unit(arena.here() + lane.returned(slot, source) + back * bytes, pair, pairs) };
            sum.add(weight, &data);
        }
        // Safety: the caller's promise.
        unsafe {
            store_unit(output, pair, pairs, &sum.round());
            work = Work::new(lane, tokens, sums, number, Warp.shuffle(next, 0));
        }
    }
}
