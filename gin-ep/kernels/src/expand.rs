// SPDX-License-Identifier: MIT OR Apache-2.0
//! A dispatch into an expert-major layout by one kernel, for small batches.
//!
//! A row crosses the link once for each rank, as in every dispatch. When the flags of all sources have come, the blocks
//! copy the rows to the zones of their experts, in chunks that they take by a counter. A block finds the places of its
//! chunk without the others: it counts the ids of all earlier rows in shared memory. So a row has the place that
//! [`assign`](crate::permute::assign) gives it, in every grid and whichever blocks stay.

use crate::PermutedRows;
use crate::arena::{Arena, Near, Reach, lane_index};
use crate::dispatch::{await_release, receive, rows_within, send};
use crate::expert_major::{NEXT, OFFSETS, Part, TOTALS, WINDOW, fill};
use crate::format::{Format, load_unit, store_unit};
use crate::layout::{EXPERT_MAJOR_PACKED, EXPERT_MAJOR_PADDED, NONE, prefix_sum, total_of};
use crate::params::{DECIDED, DISPATCH, EPOCH, LAST_USE, Sizes, TokenParams};
use crate::permute::store_details;
use crate::protocol::{self, Launch, Sent};
use crate::routes::Routes;
use crate::status;
use crate::{SlotParams, UNIT};
use gin_device::prelude::*;
use gin_device::sys::{Global, Word};

/// The maximum number of rows of a chunk.
const CHUNK: u32 = 64;
/// The maximum number of rows that a rank has room for, if a dispatch into a layout is one kernel.
const ROWS: u64 = 4096;

// The number of rows from each source; the place of each id of a chunk.
shared! { static ROWS_OF: [u32; 64]; }
shared! { static PLACES: [u32; 32 * CHUNK as usize]; }

/// Returns whether a dispatch into a layout is one kernel, which all ranks of a group decide alike. A block counts the
/// ids of all received rows, so with more rows it takes longer than a kernel that counts them once.
#[must_use]
pub const fn expands(sizes: &Sizes) -> bool {
    sizes.room() <= ROWS && sizes.local() <= WINDOW
}

/// Sends the rows of `tokens`, waits until the rows of all ranks have arrived, and copies them into the expert-major
/// layout `to`. All threads of the grid call. Ranks that call [`dispatch`](crate::dispatch()) with both phases take
/// part alike.
///
/// Afterwards, in the order of the stream, `to` and the received rows are as after a dispatch and the kernels of the
/// layout. The launch has dynamic shared memory of [`Sizes::shared_bytes`].
///
/// Errors are reported as by these kernels. Rows of a rank that is silent have no places.
///
/// # Safety
/// - As [`dispatch`](crate::dispatch()), on the slot of `to`. The sizes are such that a dispatch [`expands`] rows.
///   Blocks have whole warps, at most 16.
#[inline(always)]
pub unsafe fn dispatch_into<F: Format>(comm: &Comm, arena: &Window<u64>, tokens: &TokenParams, to: &PermutedRows) {
    let Some(arena) = Arena::new(comm, arena) else { return };
    let slot = to.received.slot();
    let begun = Routes::new(arena.here(), slot, tokens, true);
    let epoch = arena.word(slot.word(EPOCH)).load_relaxed_gpu().wrapping_add(1);
    let (last, masked) = (arena.word(slot.word(LAST_USE)).load_relaxed_gpu(), || Near::masked(&arena, slot));
    let wait = |_: &mut Routes| await_release(comm, &arena, slot, (epoch, last), masked());
    // Safety: the caller's promise.
    let (sent, since) = unsafe { send::<F, Near, true>(&arena, slot, tokens, begun, epoch, wait) };
    // A block that has not started may need the place of this one. The last one stays.
    if !Block.sync_or(sent.may_wait) {
        return;
    }
    let launch = Launch::<Global>::new(arena.word(slot.word(DISPATCH + 3 * protocol::launch_words(epoch))));
    let take = || if Block.elect() { launch.take() } else { 0 };
    // The number is on its way while the block waits.
    let first = take();
    // They now include the ranks that the last block has found silent.
    arrive::<F>(comm, &arena, slot, (epoch, masked()), sent, since);
    let expansion = Expansion::new(to);
    expansion.find_zones();
    let mut taken = first;
    loop {
        let number = Block.broadcast(taken, 0) as u32;
        taken = take();
        // Safety: the caller's promise.
        if !unsafe { expansion.step(number) } {
            return;
        }
    }
}

/// Waits for the rows of all ranks but `masked`, and has their numbers in shared memory. All threads of the block call.
#[inline(always)]
fn arrive<F: Format>(
    comm: &Comm,
    arena: &Arena,
    slot: &SlotParams,
    (epoch, masked): (u64, u64),
    sent: Sent,
    since: u64,
) {
    if Block.rank() < WARP_SIZE {
        let decided = arena.word(slot.word(DECIDED));
        if sent.is_last {
            receive::<F, Near>(comm, arena, slot, epoch, masked);
            // The first lane tells what all lanes have stored and acquired.
            Warp.sync();
            if Warp.elect() {
                protocol::decide::<Global>(decided, epoch);
            }
        }
        let mut source = lane_index();
        while source < slot.sizes.ranks {
            let rows = arena.word(slot.got(source));
            let rows = if sent.is_last {
                rows.load_relaxed_gpu() as u32
            } else if masked >> source & 1 != 0 {
                0
            } else {
                let flag = arena.word(F::flag(slot, source));
                let (status, deadline) = (status::of(comm), slot.patience());
                let seen = protocol::wait_or_follow::<Global>(&status, deadline, flag, (decided, rows), epoch, since);
                rows_within(arena.here(), slot, source, seen)
            };
            ROWS_OF.array().write(source as usize, rows);
            source += WARP_SIZE;
        }
    }
    // All threads see what the lanes have acquired.
    Block.sync();
}

/// Copies the rows that have arrived into a layout.
struct Expansion<'a> {
    to: &'a PermutedRows,
    /// Number of rows of a chunk.
    chunk: u32,
    /// Number of chunks.
    chunks: u32,
}

impl<'a> Expansion<'a> {
    #[inline(always)]
    fn new(to: &'a PermutedRows) -> Self {
        let (counts, ranks) = (ROWS_OF.array(), to.received.ranks());
        let mut rows = 0;
        for source in 0..ranks {
            rows += counts.read(source as usize);
        }
        let chunk = rows.div_ceil(grid_dim().count() as u32).clamp(1, CHUNK);
        let mut expansion = Self { to, chunk, chunks: 0 };
        for source in 0..ranks {
            expansion.chunks += expansion.chunks_of(source);
        }
        expansion
    }

    /// Returns the number of chunks of a source: at least one, whose block stores the counts.
    #[inline(always)]
    fn chunks_of(&self, source: u32) -> u32 {
        ROWS_OF.array().read(source as usize).div_ceil(self.chunk).max(1)
    }

    #[inline(always)]
    const fn is_packed(&self) -> bool {
        self.to.kind == EXPERT_MAJOR_PACKED
    }

    /// Returns rows of a source.
    #[inline(always)]
    fn part(&self, source: u32, first: u32, end: u32) -> Part<'a> {
        let rows = self.to.received.rows_of(source, ROWS_OF.array().read(source as usize));
        let end = end.min(rows.count);
        Part { to: self.to, number: 0, source, rows, first: first.min(end), end }
    }

    /// Finds the zones of a packed layout, in shared memory. All threads of the block call.
    #[inline(always)]
    fn find_zones(&self) {
        if !self.is_packed() {
            return;
        }
        let (totals, offsets, experts) = (TOTALS.array(), OFFSETS.array(), self.to.experts);
        for expert in Block.stripe(experts as usize) {
            totals.write(expert, 0);
        }
        Block.sync();
        for source in 0..self.to.received.ranks() {
            self.part(source, 0, u32::MAX).count_ids(totals, 0, experts);
        }
        Block.sync();
        // Each thread has some experts in a row.
        let each = experts.div_ceil(Block.size());
        let mine = (Block.rank() * each).min(experts)..((Block.rank() + 1) * each).min(experts);
        let length = |expert: u32| totals.read(expert as usize).next_multiple_of(self.to.align);
        let (mut first, _) = prefix_sum(Block, mine.clone().map(length).sum());
        for expert in mine {
            offsets.write(expert as usize, first);
            first += length(expert);
        }
        Block.sync();
    }

    /// Copies the chunk of this number, or fills the gap behind an expert's rows. Returns `false` if there is no such
    /// number. All threads of the block call.
    ///
    /// # Safety
    /// - As [`dispatch_into`].
    #[inline(always)]
    unsafe fn step(&self, number: u32) -> bool {
        let to = self.to;
        if number >= self.chunks {
            let (expert, has_gaps) = (number - self.chunks, self.is_packed() && to.align > 1);
            if !has_gaps || expert >= to.experts {
                return false;
            }
            fill(to, OFFSETS.array().read(expert as usize), TOTALS.array().read(expert as usize));
            return true;
        }
        let (mut source, mut chunk) = (0, number);
        while chunk >= self.chunks_of(source) {
            chunk -= self.chunks_of(source);
            source += 1;
        }
        let part = self.part(source, chunk * self.chunk, (chunk + 1) * self.chunk);
        let is_last = chunk + 1 == self.chunks_of(source);
        self.find_places(&part, is_last);
        if number == 0 {
            self.store_zones();
        }
        if !self.is_packed() && is_last {
            self.store_counts(source);
        }
        // Safety: the caller's promise.
        unsafe { self.copy(&part) };
        if to.has_details() {
            self.copy_details(&part);
        }
        true
    }

    /// Gives the rows of a chunk their places. If the chunk is the last one of its source and the layout is fixed,
    /// `TOTALS` has for each expert the rows of earlier sources. All threads of the block call.
    #[inline(always)]
    fn find_places(&self, part: &Part<'_>, is_last: bool) {
        let (next, offsets, to) = (NEXT.array(), OFFSETS.array(), self.to);
        for expert in Block.stripe(to.experts as usize) {
            if !self.is_packed() {
                offsets.write(expert, to.zone_of(expert as u32, part.source));
            }
            next.write(expert, offsets.read(expert));
        }
        Block.sync();
        let mut source = if to.kind == EXPERT_MAJOR_PADDED { part.source } else { 0 };
        while source < part.source {
            self.part(source, 0, u32::MAX).count_ids(next, 0, to.experts);
            source += 1;
        }
        if to.is_fixed() && is_last {
            Block.sync();
            for expert in Block.stripe(to.experts as usize) {
                TOTALS.array().write(expert, next.read(expert) - offsets.read(expert));
            }
            // All have read the counters before they go on.
            Block.sync();
        }
        self.part(source, 0, part.first).count_ids(next, 0, to.experts);
        Block.sync();
        if Block.rank() < WARP_SIZE {
            part.put(0, to.experts, |id, place| PLACES.array().write(id as usize, place));
        }
        Block.sync();
    }

    /// Stores the number of rows, and the zones of a packed layout. All threads of one block call.
    #[inline(always)]
    fn store_zones(&self) {
        let (to, sizes) = (self.to, &self.to.received.slot().sizes);
        if !self.is_packed() {
            let zones = if to.is_fixed() { to.experts } else { to.experts * sizes.ranks };
            return total_of(to, zones * to.zone);
        }
        let (totals, offsets) = (TOTALS.array(), OFFSETS.array());
        for expert in Block.stripe(to.experts as usize) {
            to.store(to.word(1 + expert as u32), totals.read(expert));
            to.store(to.word(1 + to.experts + expert as u32), offsets.read(expert));
        }
        let last = to.experts as usize - 1;
        total_of(to, offsets.read(last) + totals.read(last).next_multiple_of(to.align));
    }

    /// Stores the numbers of a source's rows in a padded or fixed layout, after the places of the last chunk. All
    /// threads of one block call.
    #[inline(always)]
    fn store_counts(&self, source: u32) {
        let (to, ranks) = (self.to, self.to.received.ranks());
        for index in Block.stripe(to.experts as usize) {
            let (expert, rows) = (index as u32, NEXT.array().read(index) - OFFSETS.array().read(index));
            let mut word = 1 + expert * ranks + source;
            if to.is_fixed() {
                let first = TOTALS.array().read(index);
                to.store_range((expert, source), first, rows - first);
                if source + 1 < ranks {
                    continue;
                }
                word = 1 + expert;
                to.store(to.word(1 + to.experts + expert), expert * to.zone);
            }
            to.store(to.word(word), rows);
            // Tokens that name an expert twice may fill more than its zone.
            if rows > to.zone {
                to.report_full(source, expert, rows);
            }
        }
    }

    /// Copies the rows of a chunk to their places. All threads of the block call.
    ///
    /// # Safety
    /// - As [`dispatch_into`].
    #[inline(always)]
    unsafe fn copy(&self, part: &Part<'_>) {
        let (to, slot, k) = (self.to, self.to.received.slot(), lane_index());
        let (topk, pairs) = (slot.sizes.topk, if to.has_rows() { slot.sizes.row_bytes / 16 } else { 0 });
        let units = pairs.div_ceil(UNIT);
        let end = (part.end - part.first) * units;
        let at = |unit: u32| (unit / units, unit % units * UNIT + k);
        let load = |unit: u32| {
            let (row, pair) = if unit < end { at(unit) } else { (0, pairs) };
            // Safety: a received row; past the end nothing is loaded.
            unsafe { load_unit(part.rows.row(slot, part.first + row), pair, pairs) }
        };
        let mut unit = Block.rank() / WARP_SIZE;
        let mut next = load(unit);
        while unit < end {
            let (data, (row, pair)) = (next, at(unit));
            // The next unit is on its way while this one is stored.
            unit += Block.size() / WARP_SIZE;
            next = load(unit);
            let place = if k < topk { PLACES.array().read((row * topk + k) as usize) } else { NONE };
            let mut lanes = Warp.ballot(place < to.capacity);
            while lanes != 0 {
                let place = Warp.shuffle(place, lanes.trailing_zeros());
                lanes &= lanes - 1;
                // Safety: a row of the layout.
                unsafe { store_unit(to.row(place).addr() as u64, pair, pairs, &data) };
            }
        }
    }

    /// Stores the tokens and the scales of a chunk's rows at their places. All threads of the block call.
    #[inline(always)]
    fn copy_details(&self, part: &Part<'_>) {
        let (to, k) = (self.to, lane_index());
        let (slot, topk) = (to.received.slot(), to.received.topk());
        let mut row = Block.rank() / WARP_SIZE;
        while row < part.end - part.first {
            let place = if k < topk { PLACES.array().read((row * topk + k) as usize) } else { NONE };
            // Safety: the metadata of a received row.
            unsafe { store_details(to, part.rows.meta(slot, part.first + row), place, true) };
            row += Block.size() / WARP_SIZE;
        }
    }
}
