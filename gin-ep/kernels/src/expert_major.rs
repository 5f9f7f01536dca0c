// SPDX-License-Identifier: MIT OR Apache-2.0
//! The places of received rows in expert-major layouts.
//!
//! The rows of each source are divided into parts. A block counts the rows of each expert in a part. The prefix
//! sums of all counts are the numbers of the first rows of parts, which get their places in order.

use crate::layout::{EXPERT_MAJOR_PACKED, EXPERT_MAJOR_PADDED, NONE, PermutedRows, prefix_sum, total_of};
use crate::params::{Sizes, load};
use crate::received::Source;
use gin_device::prelude::*;
use gin_device::sys::data::store_weak_pair;

/// The maximum number of experts that a block has in shared memory at a time.
pub(crate) const WINDOW: u32 = 1024;

/// The maximum numbers of parts of all sources and of counts, so that their memory stays small.
const MAX_PARTS: u32 = 128;
const MAX_COUNTS: u32 = 1 << 18;

// For experts of a window the number of their rows, the first place of their zone, and the next place that a row gets.
shared! { pub(crate) static TOTALS: [u32; WINDOW as usize]; }
shared! { pub(crate) static OFFSETS: [u32; WINDOW as usize]; }
shared! { pub(crate) static NEXT: [u32; WINDOW as usize]; }

/// Returns the number of parts of the rows of a source.
#[inline(always)]
const fn parts(sizes: &Sizes) -> u32 {
    let (max, groups) = (MAX_COUNTS / sizes.local(), sizes.tokens.div_ceil(32));
    let parts = if max < MAX_PARTS { max } else { MAX_PARTS } / sizes.ranks;
    let parts = if parts < groups { parts } else { groups };
    if parts == 0 { 1 } else { parts }
}

/// Returns the number of counts of parts of an expert-major layout.
#[must_use]
pub const fn part_counts(sizes: &Sizes) -> u64 {
    (parts(sizes) * sizes.ranks) as u64 * sizes.local() as u64
}

/// A part of the rows of a source.
pub(crate) struct Part<'a> {
    pub(crate) to: &'a PermutedRows,
    pub(crate) number: u32,
    pub(crate) source: u32,
    pub(crate) rows: Source,
    /// The first row of the part, and the one after the last.
    pub(crate) first: u32,
    pub(crate) end: u32,
}

impl<'a> Part<'a> {
    // Not an `Option`, whose null pointer would put the layout on the stack.
    #[inline(always)]
    fn new(to: &'a PermutedRows, number: u32) -> Self {
        let sizes = &to.received.slot().sizes;
        let source = number / parts(sizes);
        let rows = to.received.source(source);
        let length = rows.count.div_ceil(parts(sizes));
        let first = rows.count.min(number % parts(sizes) * length);
        Self { to, number, source, rows, first, end: rows.count.min(first + length) }
    }

    /// Returns the number of ids.
    #[inline(always)]
    fn ids(&self) -> u32 {
        (self.end - self.first) * self.to.received.topk()
    }

    /// Returns the row and the position of an id.
    #[inline(always)]
    fn place(&self, index: u32) -> (u32, u32) {
        let topk = self.to.received.topk();
        (self.first + index / topk, index % topk)
    }

    /// Returns an id; `u32::MAX` past the last one.
    #[inline(always)]
    fn id(&self, index: u32) -> u32 {
        if index >= self.ids() {
            return u32::MAX;
        }
        let (row, k) = self.place(index);
        // Safety: an id of a received row.
        unsafe { load(self.rows.meta(self.to.received.slot(), row) + 4 + 4 * u64::from(k)) }
    }

    /// Returns the address of the count of an expert in a part.
    #[inline(always)]
    fn count_at(&self, part: u32, expert: u32) -> u64 {
        count_at(self.to, part, expert)
    }

    /// Calls with each window of experts: its first one, and their number.
    #[inline(always)]
    fn windows(&self, mut visit: impl FnMut(u32, u32)) {
        let mut window = 0;
        while window < self.to.experts {
            visit(window, WINDOW.min(self.to.experts - window));
            // The threads have finished with the shared memory.
            Block.sync();
            window += WINDOW;
        }
    }

    /// Adds the rows of each expert of a window to counters. All threads of the block call.
    #[inline(always)]
    pub(crate) fn count_ids(&self, counters: SharedArray<u32>, window: u32, number: u32) {
        let step = Block.size();
        let mut index = Block.rank();
        while index < self.ids() {
            // These loads do not wait for each other.
            let id = |ahead: u32| self.id(index + ahead * step).wrapping_sub(window);
            let (a, b, c, d) = (id(0), id(1), id(2), id(3));
            let add = |expert: u32| {
                if expert < number {
                    counters.add(expert as usize, 1);
                }
            };
            add(a);
            add(b);
            add(c);
            add(d);
            index += 4 * step;
        }
    }

    /// Counts the rows of each expert.
    #[inline(always)]
    fn count(&self) {
        let totals = TOTALS.array();
        self.windows(|window, number| {
            for expert in Block.stripe(number as usize) {
                totals.write(expert, 0);
            }
            Block.sync();
            self.count_ids(totals, window, number);
            Block.sync();
            for expert in Block.stripe(number as usize) {
                self.to.store(self.count_at(self.number, window + expert as u32), totals.read(expert));
            }
        });
    }

    /// Finds for each expert of a window the number of its rows, and of those before the part: of all sources, or, if
    /// the layout is padded, of this one.
    #[inline(always)]
    fn sum(&self, window: u32, number: u32) {
        let (totals, next, sizes) = (TOTALS.array(), NEXT.array(), &self.to.received.slot().sizes);
        for expert in Block.stripe(number as usize) {
            totals.write(expert, 0);
            next.write(expert, 0);
        }
        Block.sync();
        let (from, end) = match self.to.kind {
            EXPERT_MAJOR_PADDED => (self.source * parts(sizes), (self.source + 1) * parts(sizes)),
            _ => (0, sizes.ranks * parts(sizes)),
        };
        // Several threads share the parts of an expert, if there are as many.
        let threads = (Block.size() / number).max(1);
        for index in Block.stripe((number * threads) as usize) {
            let expert = index as u32 % number;
            let (mut other, mut all, mut earlier) = (from + index as u32 / number, 0, 0);
            while other < end {
                // Safety: a count, which an earlier kernel stored.
                let count = |ahead: u32| {
                    let part = other + ahead * threads;
                    if part < end { unsafe { load(self.count_at(part, window + expert)) } } else { 0 }
                };
                // These loads do not wait for each other.
                let first = (count(0), count(1), count(2), count(3));
                let second = (count(4), count(5), count(6), count(7));
                let mut add = |ahead: u32, count: u32| {
                    all += count;
                    earlier += if other + ahead * threads < self.number { count } else { 0 };
                };
                add(0, first.0);
                add(1, first.1);
                add(2, first.2);
                add(3, first.3);
                add(4, second.0);
                add(5, second.1);
                add(6, second.2);
                add(7, second.3);
                other += 8 * threads;
            }
            totals.add(expert as usize, all);
            next.add(expert as usize, earlier);
        }
        Block.sync();
    }

    /// Gives the rows their places.
    #[inline(always)]
    fn assign(&self) {
        let (totals, offsets, next) = (TOTALS.array(), OFFSETS.array(), NEXT.array());
        let (to, sizes) = (self.to, &self.to.received.slot().sizes);
        let (mut end, is_packed) = (0, to.kind == EXPERT_MAJOR_PACKED);
        self.windows(|window, number| {
            self.sum(window, number);
            // Each thread has some experts in a row.
            let each = number.div_ceil(Block.size());
            let mine = (Block.rank() * each).min(number)..((Block.rank() + 1) * each).min(number);
            let padded = |expert: u32| totals.read(expert as usize).next_multiple_of(to.align);
            let (earlier, all) = prefix_sum(Block, mine.clone().map(padded).sum());
            let mut first = end + earlier;
            end += all;
            for expert in mine {
                let (number, rows) = (window + expert, totals.read(expert as usize));
                let zone = if is_packed { first } else { to.zone_of(number, self.source) };
                first += padded(expert);
                offsets.write(expert as usize, zone);
                next.add(expert as usize, zone);
                // The first part of a source, or of all, stores the numbers.
                let by_source = to.kind == EXPERT_MAJOR_PADDED;
                if self.number != if by_source { self.source * parts(sizes) } else { 0 } {
                    continue;
                }
                if by_source {
                    to.store(to.word(1 + number * sizes.ranks + self.source), rows);
                } else {
                    to.store(to.word(1 + number), rows);
                    to.store(to.word(1 + to.experts + number), zone);
                }
                if to.zone != 0 && rows > to.zone {
                    to.report_full(self.source, number, rows);
                }
            }
            Block.sync();
            if is_packed {
                let all = sizes.ranks * parts(sizes);
                let mut expert = (self.number + all - window % all) % all;
                while expert < number {
                    fill(to, offsets.read(expert as usize), totals.read(expert as usize));
                    expert += all;
                }
            }
            if Block.rank() < WARP_SIZE {
                self.put(window, number, |_, _| {});
            }
        });
        if is_packed && self.number == 0 {
            total_of(to, end);
        }
    }

    /// Gives the ids of a window of experts their places in order, by one warp. Calls `visit` with the number of each
    /// id and its place. Ids of other experts have none.
    #[inline(always)]
    pub(crate) fn put(&self, window: u32, number: u32, visit: impl Fn(u32, u32)) {
        let (offsets, next, lane) = (OFFSETS.array(), NEXT.array(), gin_device::coop::lane());
        let to = self.to;
        let put = |index: u32, id: u32| {
            let expert = id.wrapping_sub(window);
            let is_here = expert < number;
            let same = Warp.match_any(if is_here { expert } else { NONE });
            let earlier = (same & ((1 << lane) - 1)).count_ones();
            let mut place = NONE;
            if is_here {
                place = next.read(expert as usize) + earlier;
            }
            // All lanes have read, and then all see what is next.
            Warp.sync();
            if is_here && earlier == 0 {
                next.write(expert as usize, place + same.count_ones());
            }
            Warp.sync();
            if is_here {
                if to.zone != 0 && place - offsets.read(expert as usize) >= to.zone {
                    place = NONE;
                }
                let (row, k) = self.place(index);
                to.put(self.rows.index, (self.source, row, k), place);
            }
            if index < self.ids() {
                visit(index, place);
            }
        };
        let mut index = lane;
        while index - lane < self.ids() {
            // These loads do not wait for each other.
            let id = |ahead: u32| self.id(index + ahead * WARP_SIZE);
            let (a, b, c, d) = (id(0), id(1), id(2), id(3));
            put(index, a);
            put(index + WARP_SIZE, b);
            put(index + 2 * WARP_SIZE, c);
            put(index + 3 * WARP_SIZE, d);
            index += 4 * WARP_SIZE;
        }
    }
}

#[inline(always)]
fn count_at(to: &PermutedRows, part: u32, expert: u32) -> u64 {
    to.parts + 4 * u64::from(part * to.experts + expert)
}

/// Returns the number of rows of an expert from a source.
///
/// # Safety
/// - As [`count`], after it.
#[inline(always)]
pub(crate) unsafe fn rows_from(to: &PermutedRows, expert: u32, source: u32) -> u32 {
    let parts = parts(&to.received.slot().sizes);
    let mut rows = 0;
    for part in source * parts..(source + 1) * parts {
        // Safety: a count, which an earlier kernel stored.
        rows += unsafe { load(count_at(to, part, expert)) };
    }
    rows
}

/// Fills the gap behind the rows of a zone with zeros. All threads of the block call.
#[inline(always)]
pub(crate) fn fill(to: &PermutedRows, first: u32, rows: u32) {
    let pairs = to.received.slot().sizes.row_bytes / 16;
    let (mut row, end) = (first + rows, first + rows.next_multiple_of(to.align));
    while row < end.min(to.capacity) {
        if Block.elect() {
            to.store(to.source_info + 4 * u64::from(row), NONE);
        }
        if to.rows != 0 {
            for pair in Block.stripe(pairs as usize) {
                // Safety: a row of the layout.
                unsafe { store_weak_pair(to.row(row).cast::<u64>().add(2 * pair), 0, 0) };
            }
        }
        row += 1;
    }
}

/// Calls with each part of this block.
#[inline(always)]
fn each(to: &PermutedRows, visit: impl Fn(&Part)) {
    let sizes = &to.received.slot().sizes;
    let mut number = block_in_grid();
    while number < sizes.ranks * parts(sizes) {
        visit(&Part::new(to, number));
        number += grid_dim().count() as u32;
    }
}

/// Counts the rows of experts, for an expert-major layout. All threads of the grid call; blocks have whole warps, at
/// most 16.
///
/// # Safety
/// - In the order of the stream, between a receive and the combine. The host made `to`, and no other kernel uses it.
#[inline(always)]
pub unsafe fn count(to: &PermutedRows) {
    each(to, |part| part.count());
}

/// Gives rows their places in an expert-major layout, and reports if there are too few. As [`count`], after it.
///
/// # Safety
/// - As [`count`].
#[inline(always)]
pub(crate) unsafe fn assign(to: &PermutedRows) {
    each(to, |part| part.assign());
}
