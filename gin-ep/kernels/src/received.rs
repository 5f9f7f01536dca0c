// SPDX-License-Identifier: MIT OR Apache-2.0
//! The rows that a rank has received, for the kernels of its experts.

use crate::lane::{EPOCH, Lane, load};
use crate::protocol::slot;
use gin_device::prelude::*;
use gin_device::sys::{GlobalWord, Word};

/// The rows that a rank has received in a dispatch: a parameter of kernels that run between dispatch and combine.
///
/// ```
/// use gin_device::prelude::*;
/// use gin_ep_kernels::Received;
///
/// /// Returns how many rows chose an expert of this rank, by one thread.
/// fn rows_of(received: &Received, expert: i32) -> u32 {
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
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug, Pod, Zeroable)]
#[bytemuck(crate = "gin_device::bytemuck")]
pub struct Received {
    lane: Lane,
    arena: u64,
}

impl Received {
    /// Makes it from a lane and the address of this rank's part of the arena.
    ///
    /// # Safety
    /// - The host made the lane for that arena, and this rank has received a dispatch in it.
    #[inline(always)]
    #[must_use]
    pub const unsafe fn new(lane: Lane, arena: u64) -> Self {
        Self { lane, arena }
    }

    /// Returns the number of the dispatch.
    #[inline(always)]
    pub(crate) fn epoch(&self) -> u64 {
        // Safety: a word of the arena.
        unsafe { GlobalWord::new(self.arena + self.lane.word(EPOCH)) }.load_relaxed_gpu()
    }

    #[inline(always)]
    fn slot(&self) -> u64 {
        slot(self.epoch())
    }

    #[inline(always)]
    pub(crate) const fn lane(&self) -> &Lane {
        &self.lane
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
        self.lane.sizes.ranks
    }

    /// Returns the number of ids of a token.
    #[inline(always)]
    #[must_use]
    pub const fn topk(&self) -> u32 {
        self.lane.sizes.topk
    }

    /// Returns the number of rows that rank `source` sent; 0 if there is no such rank.
    #[inline(always)]
    #[must_use]
    pub fn count(&self, source: u32) -> u32 {
        if source >= self.ranks() {
            return 0;
        }
        // Safety: a word of the arena.
        unsafe { GlobalWord::new(self.arena + self.lane.got(self.slot(), source)) }.load_relaxed_gpu() as u32
    }

    /// Returns the address of a row, or of its place if `row` is not less than [`count`](Self::count). A row is
    /// aligned to 16 bytes, and the kernels of this rank may overwrite it until the combine, up to that count.
    #[inline(always)]
    #[must_use]
    pub fn row(&self, source: u32, row: u32) -> *mut u8 {
        let offset = u64::from(row) * u64::from(self.lane.sizes.row_bytes);
        (self.arena + self.lane.rows(self.slot(), source) + offset) as usize as *mut u8
    }

    /// Returns the address of the scales of a row, or of their place as [`row`](Self::row) does: a multiple of 16.
    #[inline(always)]
    #[must_use]
    pub fn scales(&self, source: u32, row: u32) -> *mut u8 {
        let offset = u64::from(row) * u64::from(self.lane.sizes.meta_bytes) + u64::from(self.lane.sizes.scales_at());
        (self.arena + self.lane.meta(self.slot(), source) + offset) as usize as *mut u8
    }

    /// Returns the offset of the description of a row.
    #[inline(always)]
    pub(crate) fn meta_at(&self, source: u32, row: u32) -> u64 {
        self.lane.meta(self.slot(), source) + u64::from(row) * u64::from(self.lane.sizes.meta_bytes)
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
