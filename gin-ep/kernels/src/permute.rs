// SPDX-License-Identifier: MIT OR Apache-2.0
//! Received rows in other layouts: flat, and expert-major. Three kernels in a row; four for a fixed layout.
//!
//! The first counts the rows of each expert, the second gives each row its places, the third copies, also while rows
//! arrive whose metadata has arrived. A place is the number of earlier rows, by source, token and position of the id,
//! so it is the same in every grid.

use crate::UNIT;
use crate::arena::{Arena, is_silent};
pub use crate::expert_major::count;
use crate::expert_major::{assign as expert_major, rows_from};
use crate::format::{load_unit, store_unit};
pub use crate::layout::{
    EXPERT_MAJOR_FIXED, EXPERT_MAJOR_PACKED, EXPERT_MAJOR_PADDED, FLAT, LayoutMemory, PermutedRows,
};
use crate::layout::{NONE, total_of};
use crate::params::{DISPATCH, load};
use crate::protocol::{Launch, launch_words, wait_for};
use crate::received::Source;
use crate::status;
use gin_device::prelude::*;
use gin_device::sys::Global;

/// More tokens than a rank has.
const LOST: u32 = u32::MAX;

/// Gives rows their places, and reports if there are too few. As [`count`], after it.
///
/// # Safety
/// - As [`count`].
#[inline(always)]
pub unsafe fn assign(to: &PermutedRows) {
    let sizes = to.received.slot().sizes;
    if to.kind == FLAT && to.zone != 0 {
        return by_source(to);
    }
    if to.kind == FLAT {
        let (mut end, step) = (0, grid_dim().count() as u32 * Block.size());
        let thread = block_in_grid() * Block.size() + Block.rank();
        for source in 0..sizes.ranks {
            let Source { count, index, .. } = to.received.source(source);
            let first = if to.is_in_place() && count > 0 { index } else { end };
            // Places that are kept for a silent rank have no rows.
            let mut gap = end + thread;
            while gap < first.min(to.capacity) {
                to.store(to.source_info + 4 * u64::from(gap), NONE);
                gap += step;
            }
            let mut row = thread;
            while row < count {
                to.put(index, (source, row, 0), first + row);
                row += step;
            }
            end = first + count;
        }
        return total(to, end);
    }
    // Safety: the caller's promise.
    unsafe { expert_major(to) };
    if to.kind == EXPERT_MAJOR_PADDED {
        total(to, to.experts * sizes.ranks * sizes.tokens);
    }
    if to.is_fixed() {
        total(to, to.experts * to.zone);
    }
}

/// Gives rows their places in the zones of their sources.
#[inline(always)]
fn by_source(to: &PermutedRows) {
    let (received, ranks) = (&to.received, to.received.ranks());
    let step = grid_dim().count() as u32 * Block.size();
    let thread = block_in_grid() * Block.size() + Block.rank();
    for number in 0..ranks {
        let Source { count, index, .. } = received.source(number);
        let mut row = thread;
        while row < count {
            to.put(index, (number, row, 0), to.zone_of(0, number) + row);
            row += step;
        }
        if thread == number % step {
            to.store(to.word(1 + number), count);
        }
    }
    total(to, ranks * to.zone);
}

/// Stores the number of rows, by the first block.
#[inline(always)]
fn total(to: &PermutedRows, rows: u32) {
    if block_in_grid() == 0 {
        total_of(to, rows);
    }
}

/// Copies rows to their places. As [`count`], after [`assign`].
///
/// # Safety
/// - As [`count`].
#[inline(always)]
pub unsafe fn copy(to: &PermutedRows) {
    let step = Block.size() / WARP_SIZE * grid_dim().count() as u32;
    let mut unit = (Block.rank() / WARP_SIZE * grid_dim().count() as u32 + block_in_grid()).wrapping_sub(step);
    let next = || {
        unit = unit.wrapping_add(step);
        unit
    };
    // Safety: the caller's promise.
    unsafe { copy_when(to, next, |_, _| true) };
}

/// Copies rows to their places as they arrive, section by section. Rows of a rank whose sections do not come are zeros,
/// and the rank is reported to the slot's status as by a [`dispatch`](crate::dispatch()).
///
/// # Safety
/// - As [`count`]. The kernel before on the stream was [`send_rows`](crate::send_rows); this one may depend on it. The
///   host made communicator, arena and layout for each other.
#[inline(always)]
pub unsafe fn copy_arriving(comm: &Comm, arena: &Window<u64>, to: &PermutedRows) {
    if let Some(arena) = Arena::new(comm, arena) {
        let (slot, epoch, mine) = (to.received.slot(), to.received.epoch(), gin_device::coop::lane());
        // For the sources of this lane's number and 32 further the number of tokens that have come; `LOST` if their
        // rank is silent.
        let mut covered = (0, 0);
        let is_there = |source: u32, token: u32| {
            let known = Warp.shuffle(if source < WARP_SIZE { covered.0 } else { covered.1 }, source % WARP_SIZE);
            if token < known {
                return known != LOST;
            }
            let mut seen = 0;
            if mine == source % WARP_SIZE {
                let flag = arena.word(slot.section_flag(source));
                let waited = wait_for::<Global>(&status::of(comm), slot.patience(), flag, epoch, token + 1);
                seen = match waited {
                    Ok(tokens) => tokens.max(token + 1),
                    Err(error) => {
                        is_silent(&arena, slot, source, epoch, error);
                        LOST
                    }
                };
                covered = if source < WARP_SIZE { (seen, covered.1) } else { (covered.0, seen) };
            }
            // The other lanes read what this one has acquired: the flag covers all rows of the source up to its number,
            // and the lanes meet after the acquire. The vote would order no memory.
            Warp.sync();
            Warp.all(seen != LOST)
        };
        // Warps take some units at a time, because blocks on the SMs of senders may start late. Copying blocks wait,
        // and hold up no sender: they start when all sending blocks of their rank have started, and those never wait.
        let launch = Launch::<Global>::new(arena.word(slot.word(DISPATCH + 3 * launch_words(epoch))));
        let warps = grid_dim().count() as u32 * (Block.size() / WARP_SIZE);
        let mine = (slot.sizes.tokens * slot.sizes.ranks / warps).clamp(1, 8);
        let mut unit = mine - 1;
        let next = || {
            unit += 1;
            if unit.is_multiple_of(mine) {
                unit = mine * Warp.broadcast(if Warp.elect() { launch.take() } else { 0 }, 0) as u32;
            }
            unit
        };
        // Safety: the caller's promise.
        unsafe { copy_when(to, next, is_there) };
    }
    gin_device::sys::wait_for_predecessor();
}

/// Stores the token and the scales of a row at the places of its ids in a fixed layout, by one warp, whose lanes have a
/// place each, or none. Scales are zeros if the row is not there.
///
/// # Safety
/// - `meta` is the address of a received row's metadata.
#[inline(always)]
pub(crate) unsafe fn store_details(to: &PermutedRows, meta: u64, place: u32, is_there: bool) {
    let (sizes, lane) = (&to.received.slot().sizes, gin_device::coop::lane());
    // Safety of all loads: the caller's promise.
    let word = |offset: u32| unsafe { load(meta + u64::from(offset)) };
    if to.tokens != 0 && place < to.capacity {
        to.store(to.tokens + 4 * u64::from(place), word(0));
    }
    let (words, zone) = (sizes.scale_bytes / 4, u64::from(to.zone));
    if to.scales == 0 {
        return;
    }
    let (mut lanes, mut first) = (Warp.ballot(place < to.capacity), 0);
    if place < to.capacity {
        // A lane with a place has an id here, whose expert is in the metadata.
        first = u64::from(place) + u64::from(word(4 + 4 * lane)) * u64::from(words - 1) * zone;
    }
    while lanes != 0 {
        let first = Warp.shuffle(first, lanes.trailing_zeros());
        lanes &= lanes - 1;
        let mut index = lane;
        while index < words {
            let scale = if is_there { word(sizes.scales_at() + 4 * index) } else { 0 };
            // The words of a row are as far from each other as zones have rows.
            to.store(to.scales + 4 * (first + u64::from(index) * zone), scale);
            index += WARP_SIZE;
        }
    }
}

/// Copies rows to their places. Sources take turns. `next` returns the warp's next unit. `is_there` waits for a row of
/// a source, whose token it gets; without the row its places get zeros. All lanes of a warp call them.
///
/// # Safety
/// - As [`count`].
#[inline(always)]
unsafe fn copy_when(to: &PermutedRows, mut next: impl FnMut() -> u32, mut is_there: impl FnMut(u32, u32) -> bool) {
    let (received, sizes) = (&to.received, to.received.slot().sizes);
    let is_copied = to.rows != 0 && !to.is_in_place();
    let (pairs, each) = if is_copied { (sizes.row_bytes / 16, to.each()) } else { (0, 0) };
    let units = pairs.div_ceil(UNIT).max(1);
    let slot = received.slot();
    let max = (0..sizes.ranks).map(|source| received.source(source).count).max().unwrap_or(0);
    loop {
        let unit = next();
        if unit >= max * sizes.ranks * units {
            break;
        }
        let (at, pair) = (unit / units, unit % units * UNIT + gin_device::coop::lane());
        let (row, number) = (at / sizes.ranks, at % sizes.ranks);
        let source = received.source(number);
        if row >= source.count {
            continue;
        }
        let (meta, places) = (source.meta(slot, row), to.row_map_of(source.index + row));
        // Safety: a received row, its metadata, and rows of the layout.
        unsafe {
            let data = if is_there(number, load(meta)) {
                load_unit(source.row(slot, row), pair, pairs)
            } else {
                ((0, 0), (0, 0), (0, 0), (0, 0))
            };
            for k in 0..each {
                if to.kind != FLAT && (load(meta + 4 + 4 * u64::from(k)) as i32) < 0 {
                    continue;
                }
                let place = load(places + 4 * u64::from(k));
                if place < to.capacity {
                    store_unit(to.row(place).addr() as u64, pair, pairs, &data);
                }
            }
        }
    }
}

/// Stores what a fixed layout has more than rows: for each expert and source the number of rows and the first one, and
/// the tokens and the scales of the rows, if there is memory for them. As [`count`], after the rows were copied.
///
/// # Safety
/// - As [`count`].
#[inline(always)]
pub unsafe fn details(to: &PermutedRows) {
    let blocks = grid_dim().count() as u32;
    let mut expert = Block.rank() * blocks + block_in_grid();
    while expert < to.experts {
        let mut first = 0;
        for source in 0..to.received.ranks() {
            // Safety: the caller's promise.
            let rows = unsafe { rows_from(to, expert, source) };
            to.store_range((expert, source), first, rows);
            first += rows;
        }
        expert += Block.size() * blocks;
    }
    if !to.has_details() {
        return;
    }
    let (received, slot, k) = (&to.received, to.received.slot(), gin_device::coop::lane());
    let silent = received.masked();
    for number in 0..received.ranks() {
        let source = received.source(number);
        let mut row = Block.rank() / WARP_SIZE * blocks + block_in_grid();
        while row < source.count {
            let (meta, places) = (source.meta(slot, row), to.row_map_of(source.index + row));
            // Safety: the metadata of a received row, and the places of its ids. Only an id here has one.
            unsafe {
                let is_here = k < to.each() && load(meta + 4 + 4 * u64::from(k)) as i32 >= 0;
                let place = if is_here { load(places + 4 * u64::from(k)) } else { NONE };
                // The rows of a rank that was silent are zeros.
                store_details(to, meta, place, silent >> number & 1 == 0);
            }
            row += Block.size() / WARP_SIZE * blocks;
        }
    }
}
