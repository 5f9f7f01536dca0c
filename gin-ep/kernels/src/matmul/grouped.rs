// SPDX-License-Identifier: MIT OR Apache-2.0
//! Products of the experts' rows: tiles are sent to their tokens' ranks as they are done.

use super::tile::{COLUMNS, Factors, ROWS, multiply};
use crate::arrange::Arranged;
use crate::dispatch::Arena;
use crate::lane::load;
use crate::protocol::slot;
use gin_device::prelude::*;
use gin_device::sys::data::store_weak_pair;

/// The products of all experts of a rank: a parameter of [`grouped_matmul`].
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug, Pod, Zeroable)]
#[bytemuck(crate = "gin_device::bytemuck")]
pub struct Grouped {
    /// The address of a row of `depth` BF16 for each place of the layout: a multiple of 16.
    pub rows: u64,
    /// The address of the experts' weights: for each expert a row of `depth` BF16 for each column; a multiple of 16.
    pub weights: u64,
    /// The address of a row of `columns` BF16 for each place of the layout: a multiple of 16; 0 if the products go to
    /// the ranks of their tokens.
    pub output: u64,
    /// Number of inner elements: a multiple of 8.
    pub depth: u32,
    /// Number of columns: the elements of a row that comes back, a multiple of 8.
    pub columns: u32,
}

/// The rows of an expert that a tile belongs to.
struct Tile {
    expert: u32,
    /// The place of the first row of the expert, and the number of its rows.
    first: u32,
    rows: u32,
    /// The number of the tile among those of the expert.
    index: u32,
}

/// Multiplies the rows of each expert by its weights. All threads of the grid call; blocks have
/// [`THREADS`](super::tile::THREADS) threads. Nothing waits.
///
/// The layout is packed by expert. Without an output, the product of a row goes to where a combine of one row for each
/// id would put it: to the rank of its token. A combine with [`RETURNED`](crate::RETURNED) follows on the stream. A row
/// that had no place returns as zeros.
///
/// # Safety
/// - In the order of the stream, after the kernels of the layout and before the combine. The host made communicator,
///   arena and layout for each other; the group has one row for each id. The addresses of `grouped` are valid.
#[inline(always)]
pub unsafe fn grouped_matmul(comm: &Comm, arena: &Window<u64>, layout: &Arranged, grouped: &Grouped) {
    let Some(arena) = Arena::new(comm, arena) else { return };
    let (received, lane) = (&layout.received, layout.received.lane());
    let (sizes, slot) = (&lane.sizes, slot(received.epoch()));
    let row_bytes = 2 * u64::from(grouped.columns);
    let column_tiles = grouped.columns.div_ceil(COLUMNS);
    let returned = lane.returned(slot, arena.rank());
    // Returns the address at its source of the row that comes back for an id.
    let back = |source: u32, row: u32, k: u32| {
        let meta = arena.here() + lane.meta(slot, source) + u64::from(row) * u64::from(sizes.meta_bytes);
        // A rank may send anything, but nothing is written past its region.
        // Safety: the description of a received row.
        let token = unsafe { load(meta) }.min(sizes.tokens - 1);
        let place = u64::from(token) * u64::from(sizes.back_rows) + u64::from(k);
        arena.there(source) + returned + place * u64::from(sizes.back_bytes)
    };
    let mut number = block_in_grid();
    let mut search = Search::new(layout, column_tiles);
    while let Some(tile) = search.find(layout, column_tiles, number) {
        number += grid_dim().count();
        let row_tiles = tile.rows.div_ceil(ROWS);
        let (row, column) = (tile.index % row_tiles * ROWS, tile.index / row_tiles * COLUMNS);
        let depth_bytes = 2 * u64::from(grouped.depth);
        let weights = u64::from(tile.expert) * u64::from(grouped.columns) + u64::from(column);
        let factors = Factors {
            a: grouped.rows + u64::from(tile.first + row) * depth_bytes,
            b: grouped.weights + weights * depth_bytes,
            rows: tile.rows - row,
            columns: grouped.columns - column,
            depth: grouped.depth,
        };
        let place = |at: u32| {
            let at = tile.first + row + at;
            let to = if grouped.output != 0 {
                grouped.output + u64::from(at) * row_bytes
            } else {
                match layout.origin(at) {
                    Some((source, row, k)) => back(source, row, k),
                    None => return 0,
                }
            };
            to + 2 * u64::from(column)
        };
        // Safety: the caller's promise.
        unsafe { multiply(&factors, &(), place) };
    }
    if grouped.output == 0 && layout.total() > layout.capacity {
        // Safety: the caller's promise.
        unsafe { return_zeros(layout, back) };
    }
}

/// The search for tiles with growing numbers, by a warp. Each lane has one of 32 experts.
struct Search {
    /// The first of the 32 experts, and the number of tiles before it.
    group: u32,
    before: u32,
    /// The place of the first row of the lane's expert, and the number of its rows.
    first: u32,
    rows: u32,
    /// The number of tiles of the 32 experts up to the lane's.
    end: u32,
}

impl Search {
    #[inline(always)]
    fn new(layout: &Arranged, column_tiles: u32) -> Self {
        let mut search = Self { group: 0, before: 0, first: 0, rows: 0, end: 0 };
        search.load(layout, column_tiles);
        search
    }

    /// Loads the numbers of the 32 experts.
    #[inline(always)]
    fn load(&mut self, layout: &Arranged, column_tiles: u32) {
        let lane = gin_device::coop::lane();
        let expert = self.group + lane;
        (self.first, self.rows) = (0, 0);
        if expert < layout.experts {
            self.first = layout.first(expert);
            self.rows = layout.count(expert).min(layout.capacity.saturating_sub(self.first));
        }
        self.end = self.rows.div_ceil(ROWS) * column_tiles;
        let mut by = 1;
        while by < WARP_SIZE {
            let below = Warp.shuffle_up(self.end, by);
            self.end += if lane >= by { below } else { 0 };
            by *= 2;
        }
    }

    /// Returns the tile with a number, if there is one.
    #[inline(always)]
    fn find(&mut self, layout: &Arranged, column_tiles: u32, number: u32) -> Option<Tile> {
        while self.group < layout.experts {
            let index = number - self.before;
            let hit = Warp.ballot(index < self.end);
            if hit != 0 {
                let hit = hit.trailing_zeros();
                let start = Warp.shuffle(self.end - self.rows.div_ceil(ROWS) * column_tiles, hit);
                let (first, rows) = (Warp.shuffle(self.first, hit), Warp.shuffle(self.rows, hit));
                return Some(Tile { expert: self.group + hit, first, rows, index: index - start });
            }
            self.before += Warp.shuffle(self.end, WARP_SIZE - 1);
            self.group += WARP_SIZE;
            self.load(layout, column_tiles);
        }
        None
    }
}

/// Returns zeros for the rows that have no place in the layout.
///
/// # Safety
/// - As [`grouped_matmul`].
#[inline(always)]
unsafe fn return_zeros(layout: &Arranged, back: impl Fn(u32, u32, u32) -> u64) {
    let (received, sizes) = (&layout.received, layout.received.lane().sizes);
    let (step, pairs) = (Block.size() / WARP_SIZE * grid_dim().count(), sizes.back_bytes / 16);
    let mut index = Block.rank() / WARP_SIZE * grid_dim().count() + block_in_grid();
    for source in 0..sizes.ranks {
        let count = received.count(source) * sizes.topk;
        while index < count {
            let (row, k) = (index / sizes.topk, index % sizes.topk);
            index += step;
            let place = u64::from(source) * u64::from(sizes.tokens) + u64::from(row);
            let place = layout.places + 4 * (place * u64::from(sizes.topk) + u64::from(k));
            // Safety: the place of an id of a received row, if the expert is here.
            if received.expert(source, row, k) < 0 || unsafe { load(place) } < layout.capacity {
                continue;
            }
            let to = back(source, row, k);
            let mut pair = gin_device::coop::lane();
            while pair < pairs {
                // Safety: the row's place at its source.
                unsafe { store_weak_pair((to + 16 * u64::from(pair)) as usize as *mut u64, 0, 0) };
                pair += WARP_SIZE;
            }
        }
        index -= count;
    }
}
