// SPDX-License-Identifier: MIT OR Apache-2.0
//! Products of the experts' rows: tiles are sent to their tokens' ranks as they are done.

use super::ScaleTables;
use super::tile::{COLUMNS, Factors, ROWS, multiply};
use super::warpgroups::{self, Factor, Finder, Output, Outputs, Scaled, Work, rows_of};
use crate::arena::Arena;
use crate::layout::PermutedRows;
use crate::params::load;
use crate::{ReceivedRows, SCALED};
use core::marker::PhantomData;
use gin_device::prelude::*;
use gin_device::sys::data::store_weak_pair;
use gin_device::sys::tensor::{Matrices, TensorMap};

/// The products of all experts of a rank: a parameter of [`grouped_matmul`].
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug, Pod, Zeroable)]
#[bytemuck(crate = "gin_device::bytemuck")]
pub struct Grouped {
    /// The address of a row of `depth` elements, BF16 or E4M3, for each place of the layout: a multiple of 16.
    pub rows: u64,
    /// The address of the experts' weights: for each expert a row of `depth` elements for each column; a multiple of
    /// 16.
    pub weights: u64,
    /// The address of a row of `columns` BF16 for each place of the layout: a multiple of 16; 0 if the products go to
    /// the ranks of their tokens.
    pub output: u64,
    /// The address of [`MAPS_BYTES`](super::warpgroups::MAPS_BYTES) for each block of a kernel by warpgroups: a
    /// multiple of 128. Other kernels do not use it.
    pub maps: u64,
    /// The addresses of the scales of rows and weights of E4M3, multiples of 4. Each expert's weights have separate
    /// scales. With 0, rows have the scales with which they were received.
    pub scales: ScaleTables,
    /// Number of inner elements: a multiple of 8; of E4M3 a multiple of [`SCALED`].
    pub depth: u32,
    /// Number of columns: the elements of a returned row, a multiple of 8.
    pub columns: u32,
}

/// Multiplies the rows of each expert by its weights. All threads of the grid call; blocks have
/// [`THREADS`](super::tile::THREADS) threads. Nothing waits.
///
/// The layout is packed, expert-major. Without an output, the product of a row goes to where a combine of one row for
/// each id would put it: to the rank of its token. A combine with [`RETURNED`](crate::RETURNED) follows on the stream.
/// A row that had no place returns as zeros.
///
/// # Safety
/// - In the order of the stream, after the kernels of the layout and before the combine. The host made communicator,
///   arena and layout for each other; the group has one row for each id. The addresses of `grouped` are valid.
#[inline(always)]
pub unsafe fn grouped_matmul(comm: &Comm, arena: &Window<u64>, layout: &PermutedRows, grouped: &Grouped) {
    let Some(arena) = Arena::new(comm, arena) else { return };
    let work = Groups::<Bf16>::new(&arena, layout, grouped);
    let mut number = block_in_grid();
    let mut search = Search::new(layout.experts, work.tiles());
    while let Some(tile) = search.find(number, work.tiles()) {
        number += grid_dim().count();
        let (row, column) = tile.place();
        let depth_bytes = 2 * u64::from(grouped.depth);
        let weights = u64::from(tile.expert) * u64::from(grouped.columns) + u64::from(column);
        let factors = Factors {
            a: grouped.rows + u64::from(tile.first + row) * depth_bytes,
            b: grouped.weights + weights * depth_bytes,
            rows: tile.rows - row,
            columns: grouped.columns - column,
            depth: grouped.depth,
        };
        // Safety: the caller's promise.
        unsafe { multiply(&factors, &(), |at| work.to(tile.first + row + at, column)) };
    }
    // Safety: the caller's promise.
    unsafe { work.return_rest() };
}

/// Multiplies as [`grouped_matmul`], by [warpgroups](super::warpgroups). Blocks have
/// [`THREADS`](super::warpgroups::THREADS) threads. The bits may differ from those of [`grouped_matmul`].
///
/// # Safety
/// - As [`grouped_matmul`], with memory for the maps.
#[inline(always)]
pub unsafe fn grouped_matmul_by_warpgroups(comm: &Comm, arena: &Window<u64>, layout: &PermutedRows, grouped: &Grouped) {
    // Safety: the caller's promise.
    unsafe { by_warpgroups::<Bf16>(comm, arena, layout, grouped) };
}

/// Multiplies as [`grouped_matmul_by_warpgroups`] rows and weights of E4M3 with scales.
///
/// # Safety
/// - As [`grouped_matmul_by_warpgroups`], with scales.
#[inline(always)]
pub unsafe fn grouped_matmul_e4m3_by_warpgroups(
    comm: &Comm,
    arena: &Window<u64>,
    layout: &PermutedRows,
    grouped: &Grouped,
) {
    // Safety: the caller's promise.
    unsafe { by_warpgroups::<Scaled<2>>(comm, arena, layout, grouped) };
}

/// # Safety
/// - As [`grouped_matmul_by_warpgroups`].
#[inline(always)]
unsafe fn by_warpgroups<F: Factor>(comm: &Comm, arena: &Window<u64>, layout: &PermutedRows, grouped: &Grouped) {
    let Some(arena) = Arena::new(comm, arena) else { return };
    let work = Groups::<F>::new(&arena, layout, grouped);
    // Safety: the caller's promise.
    unsafe {
        warpgroups::multiply(F::pairs(grouped.depth), grouped.maps, &work);
        work.return_rest();
    }
}

/// The products of all experts.
struct Groups<'a, F> {
    back: Back<'a>,
    layout: &'a PermutedRows,
    grouped: &'a Grouped,
    factor: PhantomData<F>,
}

impl<'a, F> Groups<'a, F> {
    #[inline(always)]
    fn new(arena: &'a Arena, layout: &'a PermutedRows, grouped: &'a Grouped) -> Self {
        Self { back: Back::new(arena, &layout.received), layout, grouped, factor: PhantomData }
    }

    /// Returns a function that returns the place of an expert's first row, and the numbers of its rows and tiles.
    #[inline(always)]
    fn tiles(&self) -> impl Fn(u32) -> (u32, u32, u32) + Copy + '_ {
        let (layout, column_tiles) = (self.layout, self.grouped.columns.div_ceil(COLUMNS));
        move |expert: u32| {
            let first = layout.offset(expert);
            let rows = layout.count(expert).min(layout.capacity.saturating_sub(first));
            (first, rows, rows.div_ceil(ROWS) * column_tiles)
        }
    }

    /// Returns where the product of a row goes, from a column on: its place in the layout is `at`. 0 for nowhere.
    #[inline(always)]
    fn to(&self, at: u32, column: u32) -> u64 {
        let to = if self.grouped.output != 0 {
            self.grouped.output + u64::from(at) * 2 * u64::from(self.grouped.columns)
        } else {
            match self.layout.source_info(at) {
                Some((source, row, k)) => self.back.place(source, row, k),
                None => return 0,
            }
        };
        to + 2 * u64::from(column)
    }

    /// Returns zeros for rows that have no place in the layout, if products return.
    ///
    /// # Safety
    /// - As [`grouped_matmul`].
    #[inline(always)]
    unsafe fn return_rest(&self) {
        if self.grouped.output == 0 && self.layout.total() > self.layout.capacity {
            // Safety: the caller's promise.
            unsafe { return_zeros(self.layout, &self.back) };
        }
    }
}

impl<F: Factor> Outputs for Groups<'_, F> {
    type Factor = F;
    const FREES: bool = false;
    const FINDER: Finder = Finder::Warp1;

    #[inline(always)]
    fn place(&self, &Output { numbers: [first, column], .. }: &Output, row: u32) -> u64 {
        self.to(first + row, column)
    }

    #[inline(always)]
    fn row_scales(&self, &Output { numbers: [first, _], .. }: &Output, row: u32) -> u64 {
        let Grouped { scales, depth, .. } = self.grouped;
        if scales.rows != 0 {
            return scales.of_row(*depth, (first + row).into());
        }
        match self.layout.source_info(first + row) {
            Some((source, row, _)) => self.layout.received.scales(source, row).addr() as u64,
            // No row, so any scales.
            None => scales.weights,
        }
    }

    #[inline(always)]
    fn column_scales(&self, &Output { to, numbers: [_, column], .. }: &Output, which: u32) -> u64 {
        let Grouped { scales, columns, depth, .. } = *self.grouped;
        scales.of_columns(depth, to * u64::from(columns.div_ceil(SCALED)) + u64::from(column / SCALED + which))
    }
}

impl<F: Factor> Work for Groups<'_, F> {
    /// The number of the block's next tile, its search, and the maps of the factors.
    type Loading = (u32, Search, [TensorMap; 2]);

    #[inline(always)]
    fn begin(&self, mut make: impl FnMut(Matrices) -> TensorMap) -> Self::Loading {
        let Grouped { rows, weights, depth, columns, .. } = *self.grouped;
        // Boxes may have rows of the next expert, whose products are not stored.
        let maps = [
            make(rows_of(rows, F::pairs(depth), self.layout.capacity.max(1), 1, ROWS)),
            make(rows_of(weights, F::pairs(depth), columns, self.layout.experts, COLUMNS)),
        ];
        (block_in_grid(), Search::new(self.layout.experts, self.tiles()), maps)
    }

    #[inline(always)]
    fn next(&self, (number, search, [left, right]): &mut Self::Loading) -> Option<warpgroups::Tile> {
        let tile = search.find(*number, self.tiles())?;
        *number += grid_dim().count();
        let (row, column) = tile.place();
        let first = tile.first + row;
        let (rows, columns) = (tile.rows - row, self.grouped.columns - column);
        let output = Output { to: tile.expert.into(), rows, columns, numbers: [first, column] };
        Some(warpgroups::Tile { a: (*left, first, 0), b: (*right, column, tile.expert), output })
    }

    #[inline(always)]
    fn aside(&self, _: u32) {}
}

/// The places of products at the ranks of their tokens, where a combine would put them.
pub(super) struct Back<'a> {
    arena: &'a Arena,
    received: &'a ReceivedRows,
    returned: u64,
}

impl<'a> Back<'a> {
    #[inline(always)]
    pub(super) fn new(arena: &'a Arena, received: &'a ReceivedRows) -> Self {
        Self { arena, received, returned: received.slot().returned(arena.rank()) }
    }

    /// Returns the address of the returned row for an id of a received row.
    #[inline(always)]
    pub(super) fn place(&self, source: u32, row: u32, k: u32) -> u64 {
        let sizes = &self.received.slot().sizes;
        // A rank may send anything, but nothing is written past its region.
        // Safety: the metadata of a received row.
        let token = unsafe { load(self.arena.here() + self.received.meta_at(source, row)) }.min(sizes.tokens - 1);
        let place = u64::from(token) * u64::from(sizes.combine_rows) + u64::from(k);
        self.arena.there(source) + self.returned + place * u64::from(sizes.combine_bytes)
    }
}

/// A tile of an expert's products.
pub(super) struct Tile {
    pub(super) expert: u32,
    /// Two numbers of the expert: where its rows begin, and their number.
    pub(super) first: u32,
    pub(super) rows: u32,
    /// The number of the tile among those of the expert.
    pub(super) index: u32,
}

impl Tile {
    /// Returns the first row of the tile among those of the expert, and its first column. Tiles of a column follow each
    /// other.
    #[inline(always)]
    const fn place(&self) -> (u32, u32) {
        let row_tiles = self.rows.div_ceil(ROWS);
        (self.index % row_tiles * ROWS, self.index / row_tiles * COLUMNS)
    }
}

/// The search for tiles with growing numbers, by a warp. Each lane has one of 32 experts.
pub(super) struct Search {
    /// Number of experts.
    experts: u32,
    /// The first of the 32 experts, and the number of tiles before it.
    group: u32,
    before: u32,
    /// The numbers of the lane's expert, as in [`Tile`].
    first: u32,
    rows: u32,
    /// The number of tiles of the 32 experts up to the lane's.
    end: u32,
}

impl Search {
    /// Makes it. `tiles` returns an expert's numbers, as in [`Tile`], and the number of its tiles.
    #[inline(always)]
    pub(super) fn new(experts: u32, tiles: impl Fn(u32) -> (u32, u32, u32)) -> Self {
        let mut search = Self { experts, group: 0, before: 0, first: 0, rows: 0, end: 0 };
        search.load(tiles);
        search
    }

    /// Returns the lane's state without the number of experts.
    #[inline(always)]
    pub(super) fn state(&self) -> [u32; 5] {
        [self.group, self.before, self.first, self.rows, self.end]
    }

    /// Makes it from [`state`](Self::state).
    #[inline(always)]
    pub(super) fn of(experts: u32, [group, before, first, rows, end]: [u32; 5]) -> Self {
        Self { experts, group, before, first, rows, end }
    }

    /// Loads the numbers of the 32 experts.
    #[inline(always)]
    fn load(&mut self, tiles: impl Fn(u32) -> (u32, u32, u32)) {
        let lane = gin_device::coop::lane();
        let expert = self.group + lane;
        (self.first, self.rows, self.end) = if expert < self.experts { tiles(expert) } else { (0, 0, 0) };
        let mut by = 1;
        while by < WARP_SIZE {
            let below = Warp.shuffle_up(self.end, by);
            self.end += if lane >= by { below } else { 0 };
            by *= 2;
        }
    }

    /// Returns the tile with a number, if there is one.
    #[inline(always)]
    pub(super) fn find(&mut self, number: u32, tiles: impl Fn(u32) -> (u32, u32, u32) + Copy) -> Option<Tile> {
        while self.group < self.experts {
            let index = number - self.before;
            let hit = Warp.ballot(index < self.end);
            if hit != 0 {
                let hit = hit.trailing_zeros();
                let before = Warp.shuffle(self.end, hit.saturating_sub(1));
                let start = if hit == 0 { 0 } else { before };
                let (first, rows) = (Warp.shuffle(self.first, hit), Warp.shuffle(self.rows, hit));
                return Some(Tile { expert: self.group + hit, first, rows, index: index - start });
            }
            self.before += Warp.shuffle(self.end, WARP_SIZE - 1);
            self.group += WARP_SIZE;
            self.load(tiles);
        }
        None
    }
}

/// Returns zeros for the rows that have no place in the layout.
///
/// # Safety
/// - As [`grouped_matmul`].
#[inline(always)]
unsafe fn return_zeros(layout: &PermutedRows, back: &Back) {
    let (received, sizes) = (&layout.received, layout.received.slot().sizes);
    let (step, pairs) = (Block.size() / WARP_SIZE * grid_dim().count(), sizes.combine_bytes / 16);
    let mut index = Block.rank() / WARP_SIZE * grid_dim().count() + block_in_grid();
    for source in 0..sizes.ranks {
        let count = received.count(source) * sizes.topk;
        while index < count {
            let (row, k) = (index / sizes.topk, index % sizes.topk);
            index += step;
            let place = u64::from(source) * u64::from(sizes.tokens) + u64::from(row);
            let place = layout.row_map + 4 * (place * u64::from(sizes.topk) + u64::from(k));
            // Safety: the place of an id of a received row, if the expert is here.
            if received.expert(source, row, k) < 0 || unsafe { load(place) } < layout.capacity {
                continue;
            }
            let to = back.place(source, row, k);
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
