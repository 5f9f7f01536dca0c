// SPDX-License-Identifier: MIT OR Apache-2.0
//! Products of matrices that send and receive while they multiply.
//!
//! | function | does |
//! | --- | --- |
//! | [`all_gather_matmul`] | multiplies the rows of all ranks, which arrive meanwhile |
//! | [`matmul_reduce_scatter`] | sends each finished tile to the rank that adds it up |
//! | [`grouped_matmul`] | multiplies the rows of each expert by its weights; sends each finished tile to the ranks of its tokens |
//! | [`overlapped_matmul`] | the same of received rows, from when the first of them are there |
//! | the same names with `_by_warpgroups` | multiply by the tensor cores of Hopper GPUs, in a build for sm_90a |
//! | names with `_e4m3_by_warpgroups` | multiply E4M3 with scales of 128 inner elements; `matmul_` on one rank |
//! | [`tile::multiply`] | multiplies one tile |
//!
//! Elements are BF16 unless said, sums FP32, rounded once to BF16. `docs/matmul.md` describes use, protocol and limits.

mod gather;
mod grouped;
#[cfg(feature = "kernels")]
mod kernels;
mod overlapped;
mod scatter;
pub mod tile;
pub(crate) mod tile_scheduler;
pub mod warpgroups;

pub use gather::{all_gather_matmul, all_gather_matmul_by_warpgroups, matmul_e4m3_by_warpgroups};
pub use grouped::{Grouped, grouped_matmul, grouped_matmul_by_warpgroups, grouped_matmul_e4m3_by_warpgroups};
#[cfg(all(feature = "kernels", any(not(target_arch = "nvptx64"), target_feature = "sm_90a")))]
pub use kernels::warpgroups::{
    ep_all_gather_matmul_wgmma, ep_grouped_matmul_e4m3_wgmma, ep_grouped_matmul_wgmma, ep_matmul_e4m3_wgmma,
    ep_matmul_reduce_scatter_wgmma, ep_overlapped_matmul_e4m3_wgmma, ep_overlapped_matmul_wgmma,
};
#[cfg(feature = "kernels")]
pub use kernels::{ep_all_gather_matmul, ep_grouped_matmul, ep_matmul_reduce_scatter, ep_overlapped_matmul};
pub use overlapped::{
    Overlapped, overlapped_matmul, overlapped_matmul_by_warpgroups, overlapped_matmul_e4m3_by_warpgroups,
};
pub use scatter::{matmul_reduce_scatter, matmul_reduce_scatter_by_warpgroups};

use crate::SCALED;
use crate::arena::Arena;
use crate::protocol::{raise, wait};
use crate::status;
use gin_device::prelude::*;
use gin_device::sys::Global;
use tile_scheduler::TileScheduler;

/// Rows that a block sends during the product of a tile: 16 bytes for each thread in a step.
const SENT_ROWS: u32 = 32;
/// Rows that a block sends at a time, without a product.
const SENT_ROWS_ALONE: u32 = 8;

/// [`Product::parts`]: send rows, or tiles, and wait for those of other ranks.
pub const EXCHANGE: u32 = 1;
/// [`Product::parts`]: multiply.
pub const MULTIPLY: u32 = 2;

/// The parameter of the kernels. All ranks have the same sizes.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug, Pod, Zeroable)]
#[bytemuck(crate = "gin_device::bytemuck")]
pub struct Product {
    /// The address of the left factor: a multiple of 16.
    pub a: u64,
    /// The address of the right factor as its transpose, `columns` rows of `depth` elements: a multiple of 16.
    pub b: u64,
    /// The address of the result: a multiple of 16.
    pub c: u64,
    /// The address of the products of this rank, before they are sent: a multiple of 16. Only
    /// [`matmul_reduce_scatter`] in parts uses it.
    pub partial: u64,
    /// The address of [`MAPS_BYTES`](warpgroups::MAPS_BYTES) for each block of a kernel by warpgroups, a multiple of
    /// 128. Other kernels do not use it.
    pub maps: u64,
    /// The addresses of the scales of both factors, multiples of 4. Factors of BF16 have no scales.
    pub scales: ScaleTables,
    /// Number of rows of a rank.
    pub rows: u32,
    /// Number of columns: a multiple of 8.
    pub columns: u32,
    /// Number of inner elements: a multiple of 8; of E4M3 a multiple of [`SCALED`].
    pub depth: u32,
    /// [`EXCHANGE`], [`MULTIPLY`], or both, which is the fused product. In two launches the exchange comes first for
    /// [`all_gather_matmul`], and last for [`matmul_reduce_scatter`].
    pub parts: u32,
    /// How long a rank waits for another.
    pub deadline: Deadline,
}

/// The addresses of the scales of factors of E4M3, as FP32.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug, Pod, Zeroable)]
#[bytemuck(crate = "gin_device::bytemuck")]
pub struct ScaleTables {
    /// A row of scales for each row of the left factor: one for each 128 inner elements.
    pub rows: u64,
    /// For each 128 rows of the right factor, as its transpose, such a row of scales.
    pub weights: u64,
}

impl ScaleTables {
    /// Returns the address of the scales of a row of the left factor, which has `depth` elements.
    #[inline(always)]
    pub(crate) const fn of_row(&self, depth: u32, row: u64) -> u64 {
        self.rows + row * Self::row_bytes(depth)
    }

    /// Returns the address of the scales of 128 rows of the right factor, by their number.
    #[inline(always)]
    pub(crate) const fn of_columns(&self, depth: u32, block: u64) -> u64 {
        self.weights + block * Self::row_bytes(depth)
    }

    /// Returns the bytes of the scales of `depth` inner elements.
    #[inline(always)]
    #[must_use]
    pub const fn row_bytes(depth: u32) -> u64 {
        4 * (depth / SCALED) as u64
    }
}

impl Product {
    /// Returns the number of tiles of a rank's rows, from top to bottom.
    #[inline(always)]
    #[must_use]
    pub const fn row_tiles(&self) -> u32 {
        self.rows.div_ceil(tile::ROWS)
    }

    /// Returns the number of tiles from left to right.
    #[inline(always)]
    #[must_use]
    pub const fn column_tiles(&self) -> u32 {
        self.columns.div_ceil(tile::COLUMNS)
    }

    /// Returns the number of words of state for `ranks` ranks: those of the scheduler, counters, flags; a multiple of
    /// 2.
    #[must_use]
    pub const fn words(&self, ranks: u32) -> u64 {
        let (rows, columns) = (self.row_tiles() as u64, self.column_tiles() as u64);
        (tile_scheduler::WORDS + rows + ranks as u64 * rows * columns).next_multiple_of(2)
    }

    /// Returns the bytes of the window of a rank: words, and for two epochs rows of `row_bytes` from each rank.
    #[must_use]
    pub const fn window_bytes(&self, ranks: u32, row_bytes: u64) -> u64 {
        8 * self.words(ranks) + 2 * ranks as u64 * self.rows as u64 * row_bytes
    }
}

/// Returns the window of all ranks, unless loads and stores do not reach all, which is reported, or the communicator
/// has a fault.
///
/// A rank that gave another one up has such a fault, of its kernel, in GPU memory. It sends nothing more, because the
/// other may still read. Nothing here reads host memory: a GPU loads one host address a million times a second only.
#[inline(always)]
fn usable(comm: &Comm, window: &Window<u64>) -> Option<Arena> {
    let arena = Arena::new(comm, window)?;
    // All threads of a block stay, or none: a fault may come between their looks.
    let is_stopped = Block.sync_or(status::of(comm).check_near().is_err());
    (!is_stopped).then_some(arena)
}

/// The window of all ranks, in a call.
struct Board<'a> {
    comm: &'a Comm,
    arena: Arena,
    product: &'a Product,
    ranks: u32,
    epoch: u64,
    scheduler: TileScheduler<Global>,
}

impl<'a> Board<'a> {
    #[inline(always)]
    fn new(comm: &'a Comm, arena: Arena, product: &'a Product) -> Self {
        let scheduler = TileScheduler::new(arena.word(0));
        // A launch that only multiplies uses what the launch before has received.
        let epoch = scheduler.ended().wrapping_add(u64::from(product.parts & EXCHANGE != 0));
        Self { comm, arena, product, ranks: comm.world().size(), epoch, scheduler }
    }

    /// Ends a block's part of the launch. All its threads call.
    #[inline(always)]
    fn leave(&self) {
        Block.sync();
        if Block.elect() {
            self.scheduler.leave(grid_dim().count().into(), self.epoch, || ());
        }
    }

    /// Returns the rank at a distance of at most the number of ranks.
    #[inline(always)]
    fn after(&self, distance: u32) -> u32 {
        let sum = self.arena.rank() + distance;
        if sum >= self.ranks { sum - self.ranks } else { sum }
    }

    /// Returns the offset of the counter of a rank's sent rows.
    #[inline(always)]
    fn counter(&self, row_tile: u32) -> u64 {
        8 * (tile_scheduler::WORDS + u64::from(row_tile))
    }

    /// Returns the offset of the flag of a tile from `source`.
    #[inline(always)]
    fn flag(&self, source: u32, row_tile: u32, column_tile: u32) -> u64 {
        let (rows, columns) = (self.product.row_tiles(), self.product.column_tiles());
        let index = (u64::from(source) * u64::from(rows) + u64::from(row_tile)) * u64::from(columns);
        self.counter(rows) + 8 * (index + u64::from(column_tile))
    }

    /// Returns the offset of the rows from `source`, of `row_bytes` each.
    #[inline(always)]
    fn rows(&self, source: u32, row_bytes: u64) -> u64 {
        let region = (self.epoch & 1) * u64::from(self.ranks) + u64::from(source);
        8 * self.product.words(self.ranks) + region * u64::from(self.product.rows) * row_bytes
    }

    /// Raises a flag of this rank at another one.
    #[inline(always)]
    fn raise(&self, to: u32, row_tile: u32, column_tile: u32) {
        raise::<Global>(self.arena.word_at(to, self.flag(self.arena.rank(), row_tile, column_tile)), self.epoch, 0);
    }

    /// Waits for a flag, by one thread. Returns whether it came; otherwise the fault is the communicator's.
    #[inline(always)]
    fn arrives(&self, source: u32, row_tile: u32, column_tile: u32) -> bool {
        let (status, deadline) = (status::of(self.comm), self.product.deadline);
        let word = self.arena.word(self.flag(source, row_tile, column_tile));
        match wait::<Global>(&status, deadline, word, self.epoch) {
            Ok(_) => true,
            Err((stop, seen)) => {
                let timeout = Fault::new(FaultKind::Timeout, Operation::Receive).with_peer(source);
                let expected = u64::from(self.epoch as u32);
                self.comm.report(status.explain(stop, timeout, FaultSubject::None, deadline, expected, seen));
                false
            }
        }
    }
}

/// Rows of tiles whose tiles are neighbours in time, so that they share columns in the L2 cache.
const GROUP: u32 = 8;

/// Returns row and column of a tile in the order of work: columns of tiles within [`GROUP`] rows.
#[inline(always)]
fn order(tile: u32, rows: u32, columns: u32) -> (u32, u32) {
    let first = tile / (GROUP * columns) * GROUP;
    let (height, rest) = ((rows - first).min(GROUP), tile % (GROUP * columns));
    (first + rest % height, rest / height)
}
