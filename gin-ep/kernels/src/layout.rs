// SPDX-License-Identifier: MIT OR Apache-2.0
//! Layouts of received rows: their memory, and where in it a row is.

use crate::ReceivedRows;
use crate::params::load;
use crate::status::{self, Code};
use gin_device::prelude::*;
use gin_device::sys::data::{store_weak_u32, store_weak_u64};

/// [`LayoutMemory::kind`]: one row for each received one, without gaps; or in zones of the sources.
pub const FLAT: u32 = 0;
/// [`LayoutMemory::kind`]: `[expert][source][token]`, one row for each id. A zone of an expert and a source has room
/// for as many rows as a rank may have tokens.
pub const EXPERT_MAJOR_PADDED: u32 = 1;
/// [`LayoutMemory::kind`]: zones of experts, one row for each id. Their lengths are multiples of
/// [`LayoutMemory::align`]; zeros fill them up.
pub const EXPERT_MAJOR_PACKED: u32 = 2;
/// [`LayoutMemory::kind`]: `[expert][row]`, one row for each id, without gaps between the rows of a zone. A zone of an
/// expert has room for as many rows as a rank may receive.
pub const EXPERT_MAJOR_FIXED: u32 = 3;

/// The place of no row.
pub(crate) const NONE: u32 = u32::MAX;

shared! { static TOTALS: [u32; 16]; }

/// The memory of a layout of received rows.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LayoutMemory {
    /// The address of the rows: a multiple of 16; 0 if the layout has indices alone.
    pub rows: u64,
    /// The address of a word for each row: its source, received row and position of the id.
    pub source_info: u64,
    /// The address of a word for each received row, and each id if the layout is expert-major: its place.
    pub row_map: u64,
    /// The address of words: the number of rows with gaps; for each expert the number of its rows, from each source if
    /// the layout is padded; and, if it is packed or fixed, for each expert its first row. If it is fixed, pairs of
    /// words follow at a multiple of 8: for each expert and source the number of its rows, and its first row in the
    /// zone. With zones of the sources: the number of places, then for each source the number of its rows.
    pub counts: u64,
    /// The address of words for the counts of parts of an expert-major layout: [`part_counts`](crate::part_counts).
    pub parts: u64,
    /// The address of the scales of a fixed layout with rows: `[expert][word][row]`; 0 if they are not copied.
    pub scales: u64,
    /// The address of a word for each row of a fixed layout with rows, the number of its token at the source; 0 if
    /// there is none.
    pub tokens: u64,
    /// The maximum number of rows.
    pub capacity: u32,
    /// Number of rows of which the length of a zone is a multiple.
    pub align: u32,
    /// Number of rows from a zone to the next one: of an expert if the layout is fixed, of an expert and a source if it
    /// is padded, of a source if it is flat; 0 if it has no zones of the same size.
    pub zone: u32,
    /// [`FLAT`], [`EXPERT_MAJOR_PADDED`], [`EXPERT_MAJOR_PACKED`] or [`EXPERT_MAJOR_FIXED`].
    pub kind: u32,
    /// Number of experts of this rank that the layout has.
    pub experts: u32,
}

/// Received rows in another layout: a parameter of kernels. As for [`ReceivedRows`], only the host makes it:
///
/// ```compile_fail,E0277
/// let permuted: gin_ep_kernels::PermutedRows = gin_device::bytemuck::Zeroable::zeroed();
/// ```
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PermutedRows {
    pub(crate) received: ReceivedRows,
    pub(crate) rows: u64,
    pub(crate) source_info: u64,
    pub(crate) row_map: u64,
    pub(crate) counts: u64,
    pub(crate) parts: u64,
    pub(crate) scales: u64,
    pub(crate) tokens: u64,
    pub(crate) capacity: u32,
    pub(crate) align: u32,
    pub(crate) zone: u32,
    pub(crate) kind: u32,
    pub(crate) experts: u32,
}

impl PermutedRows {
    /// Makes it of received rows and the memory of their layout.
    ///
    /// # Safety
    /// - The memory is that of permuted rows of the group whose rows these are.
    #[must_use]
    pub const unsafe fn new(received: ReceivedRows, layout: LayoutMemory) -> Self {
        let LayoutMemory { rows, source_info, row_map, counts, parts, scales, tokens, .. } = layout;
        let LayoutMemory { capacity, align, zone, kind, experts, .. } = layout;
        Self {
            received,
            rows,
            source_info,
            row_map,
            counts,
            parts,
            scales,
            tokens,
            capacity,
            align,
            zone,
            kind,
            experts,
        }
    }

    /// Returns the received rows.
    #[inline(always)]
    #[must_use]
    pub const fn received(&self) -> &ReceivedRows {
        &self.received
    }

    /// Returns the maximum number of rows.
    #[inline(always)]
    #[must_use]
    pub const fn capacity(&self) -> u32 {
        self.capacity
    }

    /// Returns [`FLAT`], [`EXPERT_MAJOR_PADDED`], [`EXPERT_MAJOR_PACKED`] or [`EXPERT_MAJOR_FIXED`].
    #[inline(always)]
    #[must_use]
    pub const fn kind(&self) -> u32 {
        self.kind
    }

    /// Returns the number of rows from a zone to the next one: [`LayoutMemory::zone`]. A [`FLAT`] layout has zones of
    /// the sources if it is not 0.
    #[inline(always)]
    #[must_use]
    pub const fn zone(&self) -> u32 {
        self.zone
    }

    #[inline(always)]
    pub(crate) fn word(&self, index: u32) -> u64 {
        self.counts + 4 * u64::from(index)
    }

    /// Returns the number of rows with gaps, also if there are more than [`capacity`](Self::capacity).
    #[inline(always)]
    #[must_use]
    pub fn total(&self) -> u32 {
        // Safety: the words of a layout, here and below.
        unsafe { load(self.word(0)) }
    }

    /// Returns the number of rows of an expert of this rank, in a packed or fixed layout; 0 if there is no such expert.
    #[inline(always)]
    #[must_use]
    pub fn count(&self, expert: u32) -> u32 {
        if self.has_zones() && expert < self.experts { unsafe { load(self.word(1 + expert)) } } else { 0 }
    }

    /// Returns the number of rows of an expert from a source, in a padded or fixed layout; 0 if there is no such expert
    /// or source.
    #[inline(always)]
    #[must_use]
    pub fn count_from(&self, expert: u32, source: u32) -> u32 {
        let ranks = self.received.ranks();
        if expert >= self.experts || source >= ranks {
            return 0;
        }
        match self.kind {
            EXPERT_MAJOR_PADDED => unsafe { load(self.word(1 + expert * ranks + source)) },
            EXPERT_MAJOR_FIXED => unsafe { load(self.range_at(expert, source)) },
            _ => 0,
        }
    }

    /// Returns the first row of an expert, in a packed or fixed layout. The expert after the last one has the total.
    #[inline(always)]
    #[must_use]
    pub fn offset(&self, expert: u32) -> u32 {
        if !self.has_zones() || expert >= self.experts {
            return self.total();
        }
        unsafe { load(self.word(1 + self.experts + expert)) }
    }

    /// Returns whether an expert has one zone for the rows of all sources.
    #[inline(always)]
    pub(crate) const fn has_zones(&self) -> bool {
        const { assert!(EXPERT_MAJOR_FIXED == EXPERT_MAJOR_PACKED + 1) };
        self.kind >= EXPERT_MAJOR_PACKED
    }

    #[inline(always)]
    pub(crate) const fn is_fixed(&self) -> bool {
        self.kind == EXPERT_MAJOR_FIXED
    }

    /// Returns whether tokens or scales are stored with the rows.
    #[inline(always)]
    pub(crate) const fn has_details(&self) -> bool {
        self.tokens != 0 || self.scales != 0
    }

    /// Returns the first row of the zone of an expert, or of an expert and a source. The layout is not packed.
    #[inline(always)]
    pub(crate) fn zone_of(&self, expert: u32, source: u32) -> u32 {
        let zone = if self.is_fixed() { expert } else { expert * self.received.ranks() + source };
        zone * self.zone
    }

    /// Returns the address of the number of an expert's rows from a source, and of its first row, in a fixed layout.
    #[inline(always)]
    pub(crate) fn range_at(&self, expert: u32, source: u32) -> u64 {
        self.word(2 + 2 * self.experts) + 8 * (u64::from(expert) * u64::from(self.received.ranks()) + u64::from(source))
    }

    /// Stores the first row in an expert's zone and the number of rows from a source, in a fixed layout.
    #[inline(always)]
    pub(crate) fn store_range(&self, (expert, source): (u32, u32), first: u32, rows: u32) {
        let range = u64::from(first) << 32 | u64::from(rows);
        // Safety: a pair of words of the layout.
        unsafe { store_weak_u64(self.range_at(expert, source) as usize as *mut u64, range) };
    }

    /// Reports a zone that has no room for its rows.
    #[inline(always)]
    pub(crate) fn report_full(&self, source: u32, expert: u32, rows: u32) {
        let (received, limit) = (&self.received, self.zone.into());
        let (arena, slot, code) = (received.arena(), received.slot(), Code::TooManyRows);
        status::report(arena, slot, code, source, expert.into(), rows.into(), limit);
    }

    /// Returns whether the layout has rows. With indices alone nothing is copied.
    #[inline(always)]
    #[must_use]
    pub const fn has_rows(&self) -> bool {
        self.rows != 0
    }

    /// Returns the address of a row: aligned to 16 bytes.
    #[inline(always)]
    #[must_use]
    pub fn row(&self, row: u32) -> *mut u8 {
        let sizes = &self.received.slot().sizes;
        let bytes = if self.is_in_place() { sizes.pitch } else { sizes.row_bytes };
        (self.rows + u64::from(row) * u64::from(bytes)) as usize as *mut u8
    }

    /// Returns whether the rows are the received ones, which lie in this layout.
    #[inline(always)]
    pub(crate) const fn is_in_place(&self) -> bool {
        self.kind == FLAT && self.zone == 0 && self.received.slot().sizes.is_shared()
    }

    /// Returns source, received row and position of the id of a row; `None` if it is a gap. In a layout with
    /// zones of the same size only rows below the counts have them.
    #[inline(always)]
    #[must_use]
    pub fn source_info(&self, row: u32) -> Option<(u32, u32, u32)> {
        if row >= self.capacity {
            return None;
        }
        let word = unsafe { load(self.source_info + 4 * u64::from(row)) };
        if word == NONE { None } else { Some((word >> 21, word >> 5 & 0xffff, word & 31)) }
    }

    /// Returns the number of places of a received row.
    #[inline(always)]
    pub(crate) fn each(&self) -> u32 {
        if self.kind == FLAT { 1 } else { self.received.topk() }
    }

    #[inline(always)]
    pub(crate) fn store(&self, address: u64, value: u32) {
        // Safety: the promise of the kernels' caller: a word of the layout.
        unsafe { store_weak_u32(address as usize as *mut u32, value) };
    }

    /// Gives a received row, or one of its ids, a place. `index` is the number of the source's first row among all.
    #[inline(always)]
    pub(crate) fn put(&self, index: u32, (source, row, k): (u32, u32, u32), place: u32) {
        self.store(self.row_map_of(index + row) + 4 * u64::from(k), place);
        if place < self.capacity {
            self.store(self.source_info + 4 * u64::from(place), source << 21 | row << 5 | k);
        }
    }

    /// Returns the address of the first place of a received row, of which `index` is the number among all.
    #[inline(always)]
    pub(crate) fn row_map_of(&self, index: u32) -> u64 {
        self.row_map + 4 * u64::from(index) * u64::from(self.each())
    }
}

/// Returns the exclusive prefix sum of the threads' values, and the sum of all. All threads of the group call. It has
/// whole warps, and no other group of the block calls.
#[inline(always)]
pub(crate) fn prefix_sum(group: impl Coop, value: u32) -> (u32, u32) {
    let (lane, warp, totals) = (gin_device::coop::lane(), group.rank() / WARP_SIZE, TOTALS.array());
    let mut sum = value;
    let mut by = 1;
    while by < WARP_SIZE {
        let below = Warp.shuffle_up(sum, by);
        sum += if lane >= by { below } else { 0 };
        by *= 2;
    }
    // The threads have read the totals before.
    group.sync();
    if lane == WARP_SIZE - 1 {
        totals.write(warp as usize, sum);
    }
    group.sync();
    let (mut earlier, mut all) = (0, 0);
    for other in 0..group.size() / WARP_SIZE {
        let total = totals.read(other as usize);
        earlier += if other < warp { total } else { 0 };
        all += total;
    }
    (earlier + sum - value, all)
}

/// Stores the number of rows, by the calling block.
#[inline(always)]
pub(crate) fn total_of(to: &PermutedRows, rows: u32) {
    if Block.elect() {
        to.store(to.word(0), rows);
        if rows > to.capacity {
            let (received, limit) = (&to.received, to.capacity.into());
            status::report(received.arena(), received.slot(), Code::TooManyRows, 0, 0, rows.into(), limit);
        }
    }
}
