// SPDX-License-Identifier: MIT OR Apache-2.0
//! The rows that a rank has received, for the kernels of its experts.

use crate::params::{EPOCH, MASKED, SlotParams, load};
use gin_device::sys::{GlobalWord, Word};

/// The rows that a rank has received in a dispatch: a parameter of kernels that run between dispatch and combine.
///
/// ```
/// use gin_ep_kernels::ReceivedRows;
///
/// /// Returns how many rows chose an expert of this rank, by one thread.
/// fn rows_of(received: &ReceivedRows, expert: i32) -> u32 {
///     let mut rows = 0;
///     for source in 0..received.ranks() {
///         for row in 0..received.count(source) {
///             for k in 0..received.topk() {
///                 rows += u32::from(received.expert(source, row, k) == expert);
///             }
///         }
///     }
///     rows
/// }
/// ```
///
/// Only the host makes it, because its functions follow the addresses in it:
///
/// ```compile_fail,E0277
/// let received: gin_ep_kernels::ReceivedRows = gin_device::bytemuck::Zeroable::zeroed();
/// ```
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ReceivedRows {
    slot: SlotParams,
    arena: u64,
}

impl ReceivedRows {
    /// Makes it from a slot and the address of this rank's part of the arena.
    ///
    /// # Safety
    /// - The host made the slot for that arena, and this rank has received a dispatch in it.
    #[inline(always)]
    #[must_use]
    pub const unsafe fn new(slot: SlotParams, arena: u64) -> Self {
        Self { slot, arena }
    }

    /// Returns the number of the dispatch.
    #[inline(always)]
    pub(crate) fn epoch(&self) -> u64 {
        // Safety: a word of the arena.
        unsafe { GlobalWord::new(self.arena + self.slot.word(EPOCH)) }.load_relaxed_gpu()
    }

    /// Returns the ranks that were silent, as bits.
    #[inline(always)]
    pub(crate) fn masked(&self) -> u64 {
        // Safety: a word of the arena.
        unsafe { GlobalWord::new(self.arena + self.slot.word(MASKED)) }.load_relaxed_gpu()
    }

    /// Returns the rows from a source.
    #[inline(always)]
    pub(crate) fn source(&self, source: u32) -> Source {
        // Safety: a word of the arena.
        let count = unsafe { GlobalWord::new(self.arena + self.slot.got(source)) }.load_relaxed_gpu() as u32;
        self.rows_of(source, count)
    }

    /// Returns the rows from a source of which this number has arrived.
    #[inline(always)]
    pub(crate) fn rows_of(&self, source: u32, count: u32) -> Source {
        let (slot, arena) = (&self.slot, self.arena);
        let first = slot.offset_of(arena, source);
        Source {
            count,
            index: slot.index(source, first, 0),
            rows: arena + slot.rows(source) + u64::from(first) * u64::from(slot.sizes.pitch),
            metas: arena + slot.meta(source) + u64::from(first) * u64::from(slot.sizes.meta_bytes),
        }
    }

    #[inline(always)]
    pub(crate) const fn slot(&self) -> &SlotParams {
        &self.slot
    }

    /// Returns the address of this rank's part of the arena.
    #[inline(always)]
    pub(crate) const fn arena(&self) -> u64 {
        self.arena
    }

    /// Returns the number of ranks.
    #[inline(always)]
    #[must_use]
    pub const fn ranks(&self) -> u32 {
        self.slot.sizes.ranks
    }

    /// Returns the number of ids of a token.
    #[inline(always)]
    #[must_use]
    pub const fn topk(&self) -> u32 {
        self.slot.sizes.topk
    }

    /// Returns the number of rows that rank `source` sent; 0 if there is no such rank.
    #[inline(always)]
    #[must_use]
    pub fn count(&self, source: u32) -> u32 {
        if source >= self.ranks() {
            return 0;
        }
        // Safety: a word of the arena.
        unsafe { GlobalWord::new(self.arena + self.slot.got(source)) }.load_relaxed_gpu() as u32
    }

    /// Returns the number of rows that rank `source` had for this rank: more than [`count`](Self::count) if they do not
    /// fit into the region that all sources share; 0 if there is no such rank.
    #[inline(always)]
    #[must_use]
    pub fn offered(&self, source: u32) -> u32 {
        if source >= self.ranks() || !self.slot.sizes.is_shared() {
            return self.count(source);
        }
        // Safety: a word of the arena.
        let word = |offset: u64| unsafe { GlobalWord::new(self.arena + offset) }.load_relaxed_gpu();
        // A silent rank was granted nothing in this dispatch.
        let is_granted = word(self.slot.reserved(source)) >> 32 == self.epoch() & u64::from(u32::MAX);
        if is_granted { word(self.slot.offered(source)) as u32 } else { 0 }
    }

    /// Returns the number of the first row of rank `source` in the region that all sources share: rows lie there by
    /// source and token. 0 if each source has a region of its own.
    #[inline(always)]
    #[must_use]
    pub fn offset(&self, source: u32) -> u32 {
        if source >= self.ranks() { 0 } else { self.slot.offset_of(self.arena, source) }
    }

    /// Returns the bytes from a row to the next one of its region.
    #[inline(always)]
    #[must_use]
    pub const fn pitch(&self) -> u32 {
        self.slot.sizes.pitch
    }

    /// Returns the address of a row, or of its place if `row` is not less than [`count`](Self::count). A row is
    /// aligned to 16 bytes, and the kernels of this rank may overwrite it until the combine, up to that count.
    #[inline(always)]
    #[must_use]
    pub fn row(&self, source: u32, row: u32) -> *mut u8 {
        let offset = u64::from(self.offset(source) + row) * u64::from(self.slot.sizes.pitch);
        (self.arena + self.slot.rows(source) + offset) as usize as *mut u8
    }

    /// Returns the address of the scales of a row, or of their place as [`row`](Self::row) does: a multiple of 16.
    #[inline(always)]
    #[must_use]
    pub fn scales(&self, source: u32, row: u32) -> *mut u8 {
        let offset = self.meta_at(source, row) + u64::from(self.slot.sizes.scales_at());
        (self.arena + offset) as usize as *mut u8
    }

    /// Returns the offset of the metadata of a row.
    #[inline(always)]
    pub(crate) fn meta_at(&self, source: u32, row: u32) -> u64 {
        let row = u64::from(self.offset(source) + row);
        self.slot.meta(source) + row * u64::from(self.slot.sizes.meta_bytes)
    }

    #[inline(always)]
    fn meta(&self, source: u32, row: u32, word: u32) -> u32 {
        if row >= self.count(source) {
            return u32::MAX;
        }
        // Safety: the row is in the arena.
        unsafe { load(self.arena + self.meta_at(source, row) + 4 * u64::from(word)) }
    }

    /// Returns the number of a row's token at its source; `u32::MAX` if there is no such row.
    #[inline(always)]
    #[must_use]
    pub fn token(&self, source: u32, row: u32) -> u32 {
        self.meta(source, row, 0)
    }

    /// Returns the number on this rank of the expert of id `k`; -1 if it is on another rank, or none, or if there is no
    /// such row or id.
    #[inline(always)]
    #[must_use]
    pub fn expert(&self, source: u32, row: u32, k: u32) -> i32 {
        if k < self.topk() { self.meta(source, row, 1 + k) as i32 } else { -1 }
    }

    /// Returns the weight of id `k`; 0 where [`expert`](Self::expert) is -1.
    #[inline(always)]
    #[must_use]
    pub fn weight(&self, source: u32, row: u32, k: u32) -> f32 {
        if self.expert(source, row, k) < 0 { 0.0 } else { f32::from_bits(self.meta(source, row, 1 + self.topk() + k)) }
    }
}

/// The rows from a source. Each function of [`ReceivedRows`] loads words of the arena anew, which takes longer than to
/// copy a part of a row.
#[derive(Clone, Copy)]
pub(crate) struct Source {
    /// Number of rows.
    pub(crate) count: u32,
    /// The number of the first one among all places of rows.
    pub(crate) index: u32,
    /// Their address, and that of their metadata.
    rows: u64,
    metas: u64,
}

impl Source {
    /// Returns the address of a row.
    #[inline(always)]
    pub(crate) const fn row(&self, slot: &SlotParams, row: u32) -> u64 {
        self.rows + row as u64 * slot.sizes.pitch as u64
    }

    /// Returns the address of the metadata of a row.
    #[inline(always)]
    pub(crate) const fn meta(&self, slot: &SlotParams, row: u32) -> u64 {
        self.metas + row as u64 * slot.sizes.meta_bytes as u64
    }
}
