// SPDX-License-Identifier: MIT OR Apache-2.0
//! All-gather and product: tiles are multiplied as their rows arrive.

use super::tile::{Aside, COLUMNS, Factors, ROWS, multiply};
use super::warpgroups::{self, Factor, Finder, Output, Outputs, Scaled, Work, rows_of};
use super::{Board, EXCHANGE, MULTIPLY, Product, SENT_ROWS, SENT_ROWS_ALONE, usable};
use crate::SCALED;
use crate::arena::Arena;
use core::marker::PhantomData;
use gin_device::prelude::*;
use gin_device::sys::Global;
use gin_device::sys::bulk::fence_proxy_async_global;
use gin_device::sys::data::{load_weak_pair, store_weak_pair};
use gin_device::sys::tensor::{Matrices, TensorMap};

/// Multiplies the rows of all ranks, `ranks * rows` of them in the order of ranks, by this rank's columns. All threads
/// of the grid call; blocks have [`THREADS`](super::tile::THREADS) threads.
///
/// Blocks multiply this rank's own rows first, then those of the next ranks, as they arrive. In the first products
/// each block also sends a part of this rank's rows to all others, 16 bytes of each thread in a step.
///
/// A rank that does not come in time ends the communicator with a fault, and the result is incomplete.
///
/// # Safety
/// - The host made communicator, window and product for each other. The addresses are valid: `a` for `rows` rows, `c`
///   for `ranks * rows` rows. Launches on the window follow each other, and all ranks make the same.
#[inline(always)]
pub unsafe fn all_gather_matmul(comm: &Comm, window: &Window<u64>, product: &Product) {
    let Some(arena) = usable(comm, window) else { return };
    let board = Board::new(comm, arena, product);
    // Safety: the caller's promise.
    unsafe { work(&board) };
    board.leave();
}

/// A part of this rank's rows on its way to all others, by a group of threads.
#[derive(Clone, Copy)]
struct Part<'a, G> {
    board: &'a Board<'a>,
    group: G,
    /// The number of the tile of rows, and the addresses of the part's first row here and in the window.
    row_tile: u32,
    from: u64,
    to: u64,
    /// Number of 16 bytes; 0 if there is nothing to send.
    pairs: u32,
    /// Number of rows that count, also past the last one.
    counts: u32,
    is_there: bool,
}

impl<'a, G: Coop> Part<'a, G> {
    /// Takes the next part, of `counts` rows, if there is one. All threads of the group call.
    #[inline(always)]
    fn take(board: &'a Board<'a>, group: G, counts: u32) -> Self {
        let product = board.product;
        let mine = if group.elect() { board.scheduler.take_part() } else { 0 };
        let all = product.row_tiles() * ROWS;
        let row = (group.broadcast(mine, 0) * u64::from(counts)).min(all.into()) as u32;
        let row_bytes = 2 * u64::from(product.depth);
        // The last tile may have fewer rows; all its parts count.
        let rows = product.rows.saturating_sub(row).min(counts);
        let first = u64::from(row) * row_bytes;
        let (from, to) = (product.a + first, board.rows(board.arena.rank(), row_bytes) + first);
        let pairs = rows * (product.depth / 8);
        Self { board, group, row_tile: row / ROWS, from, to, pairs, counts, is_there: row < all }
    }

    /// Returns a part without rows.
    #[inline(always)]
    fn none(board: &'a Board<'a>, group: G) -> Self {
        Self { board, group, row_tile: 0, from: 0, to: 0, pairs: 0, counts: 0, is_there: false }
    }

    /// Counts the part after all its rows were stored, and raises the flags of a tile that is complete. All threads of
    /// the group call.
    #[inline(always)]
    fn end(&self) {
        let board = self.board;
        self.group.sync();
        if self.is_there
            && self.group.elect()
            && crate::protocol::count::<Global>(
                board.arena.word(board.counter(self.row_tile)),
                self.counts.into(),
                ROWS.into(),
            )
        {
            for distance in 1..board.ranks {
                board.raise(board.after(distance), self.row_tile, 0);
            }
        }
    }
}

impl<G: Coop> Aside for Part<'_, G> {
    #[inline(always)]
    fn load(&self, step: u32) -> (u64, u64) {
        let pair = step * self.group.size() + self.group.rank();
        // Safety: the caller's promise of `all_gather_matmul`: past the end nothing is loaded.
        unsafe {
            if pair < self.pairs {
                load_weak_pair((self.from + 16 * u64::from(pair)) as usize as *const u64)
            } else {
                (0, 0)
            }
        }
    }

    #[inline(always)]
    fn store(&self, step: u32, (low, high): (u64, u64)) {
        let pair = step * self.group.size() + self.group.rank();
        if pair < self.pairs {
            let at = self.to + 16 * u64::from(pair);
            for distance in 1..self.board.ranks {
                let there = self.board.arena.there(self.board.after(distance));
                // Safety: this rank's place in the window, which nobody reads now.
                unsafe { store_weak_pair((there + at) as usize as *mut u64, low, high) };
            }
        }
    }
}

/// Sends parts of `counts` rows until all are taken. All threads of the group call.
#[inline(always)]
fn send_rest<G: Coop>(board: &Board, group: G, counts: u32) {
    loop {
        let part = Part::take(board, group, counts);
        if !part.is_there {
            return;
        }
        let mut step = 0;
        while step * group.size() < part.pairs {
            let data = (part.load(step), part.load(step + 1), part.load(step + 2), part.load(step + 3));
            part.store(step, data.0);
            part.store(step + 1, data.1);
            part.store(step + 2, data.2);
            part.store(step + 3, data.3);
            step += 4;
        }
        part.end();
    }
}

/// Multiplies tiles until all are taken.
///
/// # Safety
/// - As [`all_gather_matmul`].
#[inline(always)]
unsafe fn work(board: &Board) {
    let (product, me) = (board.product, board.arena.rank());
    let row_bytes = 2 * u64::from(product.depth);
    let (rows, columns) = (product.row_tiles(), product.column_tiles());
    let each = rows * columns;
    let counts = if product.parts & MULTIPLY != 0 { SENT_ROWS } else { SENT_ROWS_ALONE };
    let mut sends = product.parts & EXCHANGE != 0 && board.ranks > 1;
    loop {
        let mine = if Block.elect() { board.scheduler.take_tile() } else { 0 };
        let tile = Block.broadcast(mine, 0);
        let is_there = tile < u64::from(each) * u64::from(board.ranks);
        let (distance, tile) = (tile as u32 / each, tile as u32 % each);
        // A block waits for others, or ends, only after all parts were taken.
        if sends && (!is_there || distance > 0 || product.parts & MULTIPLY == 0) {
            send_rest(board, Block, counts);
            sends = false;
        }
        if !is_there {
            return;
        }
        let source = board.after(distance);
        let (row_tile, column_tile) = super::order(tile, rows, columns);
        if source != me && product.parts & EXCHANGE != 0 {
            let came = !Block.elect() || board.arrives(source, row_tile, 0);
            if Block.sync_or(!came) {
                return;
            }
        }
        if product.parts & MULTIPLY == 0 {
            continue;
        }
        let all = if source == me { product.a } else { board.arena.here() + board.rows(source, row_bytes) };
        let (row, column) = (row_tile * ROWS, column_tile * COLUMNS);
        let factors = Factors {
            a: all + u64::from(row) * row_bytes,
            b: product.b + u64::from(column) * row_bytes,
            rows: product.rows - row,
            columns: product.columns - column,
            depth: product.depth,
        };
        let first = u64::from(source) * u64::from(product.rows) + u64::from(row);
        let to = product.c + 2 * u64::from(column);
        let part = if sends { Part::take(board, Block, counts) } else { Part::none(board, Block) };
        sends &= part.is_there;
        // Safety: the caller's promise; the flag of these rows was acquired.
        unsafe { multiply(&factors, &part, |row| to + 2 * (first + u64::from(row)) * u64::from(product.columns)) };
        if part.is_there {
            part.end();
        }
    }
}

/// Multiplies as [`all_gather_matmul`], by [warpgroups](super::warpgroups). Blocks have
/// [`THREADS`](super::warpgroups::THREADS) threads. `product` multiplies.
///
/// A warp takes tiles and waits for their rows; three others send. The bits may differ from those of
/// [`all_gather_matmul`], and are the same for each number of blocks, and in one launch or two.
///
/// # Safety
/// - As [`all_gather_matmul`], with memory for the maps.
#[inline(always)]
pub unsafe fn all_gather_matmul_by_warpgroups(comm: &Comm, window: &Window<u64>, product: &Product) {
    let Some(arena) = usable(comm, window) else { return };
    // Safety: the caller's promise.
    unsafe { gather::<Bf16, true>(comm, arena, product) };
}

/// Multiplies factors of E4M3 with scales, by [warpgroups](super::warpgroups), on one rank. Blocks have
/// [`THREADS`](super::warpgroups::THREADS) threads.
///
/// # Safety
/// - As [`all_gather_matmul_by_warpgroups`]. The communicator has one rank, and the scales are valid.
#[inline(always)]
pub unsafe fn matmul_e4m3_by_warpgroups(comm: &Comm, window: &Window<u64>, product: &Product) {
    let Some(arena) = usable(comm, window) else { return };
    // Safety: the caller's promise.
    unsafe { gather::<Scaled<2>, false>(comm, arena, product) };
}

/// Multiplies rows of all ranks if it `GATHERS`, or of one rank.
///
/// # Safety
/// - As [`all_gather_matmul_by_warpgroups`].
#[inline(always)]
unsafe fn gather<F: Factor, const GATHERS: bool>(comm: &Comm, arena: Arena, product: &Product) {
    // Each warp makes a board of its own: warps that multiply have no registers for one.
    let board = || Board::new(comm, arena, product);
    // Safety: the caller's promise.
    unsafe {
        warpgroups::multiply(F::pairs(product.depth), product.maps, &Gather::<_, F, GATHERS>::new(product, board))
    };
    board().leave();
}

/// The tiles of an all-gather and product, or of a product alone.
struct Gather<'a, B, F, const GATHERS: bool> {
    product: &'a Product,
    board: B,
    factor: PhantomData<F>,
}

impl<'a, B, F, const GATHERS: bool> Gather<'a, B, F, GATHERS> {
    #[inline(always)]
    const fn new(product: &'a Product, board: B) -> Self {
        Self { product, board, factor: PhantomData }
    }
}

impl<'a, B: Fn() -> Board<'a>, F: Factor, const GATHERS: bool> Outputs for Gather<'a, B, F, GATHERS> {
    type Factor = F;
    const FREES: bool = false;
    const FINDER: Finder = Finder::Stores;

    #[inline(always)]
    fn place(&self, output: &Output, row: u32) -> u64 {
        output.to + 2 * u64::from(row) * u64::from(self.product.columns)
    }

    #[inline(always)]
    fn row_scales(&self, &Output { numbers: [first, _], .. }: &Output, row: u32) -> u64 {
        self.product.scales.of_row(self.product.depth, (first + row).into())
    }

    #[inline(always)]
    fn column_scales(&self, &Output { numbers: [_, column], .. }: &Output, which: u32) -> u64 {
        self.product.scales.of_columns(self.product.depth, (column / SCALED + which).into())
    }
}

impl<'a, B: Fn() -> Board<'a>, F: Factor, const GATHERS: bool> Work for Gather<'a, B, F, GATHERS> {
    /// The board, and the maps of this rank's rows, of received rows, and of the right factor.
    type Loading = (Board<'a>, [TensorMap; 3]);

    #[inline(always)]
    fn begin(&self, mut make: impl FnMut(Matrices) -> TensorMap) -> Self::Loading {
        let (board, product) = ((self.board)(), self.product);
        let received = board.arena.here() + board.rows(0, 2 * u64::from(product.depth));
        let pairs = F::pairs(product.depth);
        let maps = [
            make(rows_of(product.a, pairs, product.rows, 1, ROWS)),
            make(rows_of(received, pairs, product.rows, board.ranks, ROWS)),
            make(rows_of(product.b, pairs, product.columns, 1, COLUMNS)),
        ];
        (board, maps)
    }

    #[inline(always)]
    fn next(&self, (board, [own, received, right]): &mut Self::Loading) -> Option<warpgroups::Tile> {
        let (product, rows, columns) = (self.product, self.product.row_tiles(), self.product.column_tiles());
        let each = rows * columns;
        let mine = if Warp.elect() { board.scheduler.take_tile() } else { 0 };
        let tile = Warp.broadcast(mine, 0);
        if tile >= u64::from(each) * u64::from(board.ranks) {
            return None;
        }
        let (distance, tile) = (tile as u32 / each, tile as u32 % each);
        let source = board.after(distance);
        let (row_tile, column_tile) = super::order(tile, rows, columns);
        if GATHERS && distance > 0 && product.parts & EXCHANGE != 0 {
            let came = !Warp.elect() || board.arrives(source, row_tile, 0);
            // The copies read rows that other ranks have stored.
            fence_proxy_async_global();
            if Warp.any(!came) {
                return None;
            }
        }
        let (row, column) = (row_tile * ROWS, column_tile * COLUMNS);
        let first = u64::from(source) * u64::from(product.rows) + u64::from(row);
        let output = Output {
            to: product.c + 2 * (first * u64::from(product.columns) + u64::from(column)),
            rows: product.rows - row,
            columns: product.columns - column,
            numbers: [row, column],
        };
        let a = if distance == 0 { (*own, row, 0) } else { (*received, row, source) };
        Some(warpgroups::Tile { a, b: (*right, column, 0), output })
    }

    #[inline(always)]
    fn aside(&self, _: u32) {
        if !GATHERS {
            return;
        }
        let board = (self.board)();
        if self.product.parts & EXCHANGE != 0 && board.ranks > 1 {
            send_rest(&board, Warp, SENT_ROWS_ALONE);
        }
    }
}
