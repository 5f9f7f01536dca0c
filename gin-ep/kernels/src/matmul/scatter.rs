// SPDX-License-Identifier: MIT OR Apache-2.0
//! Product and reduce-scatter: tiles are sent as they are done.

use super::tile::{Aside, COLUMNS, Factors, ROWS, multiply, steps};
use super::warpgroups::{self, Entries, Finder, Kept, Output, Outputs, Work, rows_of};
use super::{Board, EXCHANGE, MULTIPLY, Product, usable};
use crate::protocol::raise;
use gin_device::internal::stay;
use gin_device::prelude::*;
use gin_device::sys::data::{load_weak_pair, store_weak_pair};
use gin_device::sys::tensor::{Matrices, TensorMap};
use gin_device::sys::{Global, GlobalWord};

/// Multiplies this rank's part of the inner index, and adds up the products of all ranks for this rank's rows. All
/// threads of the grid call; blocks have [`THREADS`](super::tile::THREADS) threads.
///
/// Each rank has `ranks * rows` rows of the left factor. Tiles go to the rank that has their rows: first those of the
/// next ranks, this rank's own at last. Then blocks add up tiles as they arrive: in FP32, in the order of ranks, of
/// products that were rounded to BF16.
///
/// A rank that does not come in time ends the communicator with a fault, and the result is incomplete.
///
/// # Safety
/// - As [`all_gather_matmul`](super::all_gather_matmul), with `ranks * rows` rows of `a` and `rows` rows of `c`.
#[inline(always)]
pub unsafe fn matmul_reduce_scatter(comm: &Comm, window: &Window<u64>, product: &Product) {
    let Some(arena) = usable(comm, window) else { return };
    let board = Board::new(comm, arena, product);
    // Safety: the caller's promise.
    unsafe { work(&board) };
    board.leave();
}

/// Multiplies tiles until all are taken, then adds up.
///
/// # Safety
/// - As [`matmul_reduce_scatter`].
#[inline(always)]
unsafe fn work(board: &Board) {
    let (product, me) = (board.product, board.arena.rank());
    let depth_bytes = 2 * u64::from(product.depth);
    let row_bytes = 2 * u64::from(product.columns);
    let (rows, columns) = (product.row_tiles(), product.column_tiles());
    let each = rows * columns;
    let mut sent = Sent { flag: None, epoch: board.epoch, at: (steps(product.depth) - 1).min(RAISED_AT) };
    loop {
        let mine = if Block.elect() { board.scheduler.take_tile() } else { 0 };
        let tile = Block.broadcast(mine, 0);
        // A block waits for others, or ends, only after it has raised all its flags.
        if tile >= u64::from(each) * u64::from(board.ranks) {
            sent.raise();
        }
        if tile >= u64::from(each) * u64::from(board.ranks + 1) {
            return;
        }
        let (distance, tile) = (tile as u32 / each + 1, tile as u32 % each);
        let (row_tile, column_tile) = super::order(tile, rows, columns);
        let (row, column) = (row_tile * ROWS, column_tile * COLUMNS);
        if distance > board.ranks {
            // Safety: the caller's promise.
            if product.parts & EXCHANGE == 0 || !unsafe { add_up(board, row_tile, column_tile) } {
                return;
            }
            continue;
        }
        let owner = board.after(distance);
        let first = u64::from(owner) * u64::from(product.rows) + u64::from(row);
        let partial = product.partial + first * row_bytes + 2 * u64::from(column);
        let to = board.rows(me, row_bytes) + u64::from(row) * row_bytes + 2 * u64::from(column);
        let to = if product.parts & EXCHANGE != 0 { board.arena.there(owner) + to } else { partial };
        let (height, width) = (product.rows - row, product.columns - column);
        if product.parts & MULTIPLY != 0 {
            let factors = Factors {
                a: product.a + first * depth_bytes,
                b: product.b + u64::from(column) * depth_bytes,
                rows: height,
                columns: width,
                depth: product.depth,
            };
            // Safety: the caller's promise; the place is this rank's.
            unsafe { multiply(&factors, &sent, |row| to + u64::from(row) * row_bytes) };
        } else {
            sent.raise();
            // Safety: as above.
            unsafe { copy(partial, to, row_bytes, height.min(ROWS), width.min(COLUMNS) / 8) };
        }
        if product.parts & EXCHANGE != 0 {
            sent.flag = Some(board.arena.word_at(owner, board.flag(me, row_tile, column_tile)));
        }
    }
}

/// Multiplies as [`matmul_reduce_scatter`], by [warpgroups](super::warpgroups). Blocks have
/// [`THREADS`](super::warpgroups::THREADS) threads. `product` multiplies.
///
/// Blocks take tiles of other ranks and of this rank in turn. A warp raises the flag of a sent tile while the next tile
/// is multiplied. Another warp waits for the other ranks' terms of an own tile, and the warps that store add them.
/// Results may have other bits than by [`matmul_reduce_scatter`]. They do not depend on the number of blocks, or on
/// whether product and exchange are one launch or two.
///
/// # Safety
/// - As [`matmul_reduce_scatter`], with memory for the maps.
#[inline(always)]
pub unsafe fn matmul_reduce_scatter_by_warpgroups(comm: &Comm, window: &Window<u64>, product: &Product) {
    let Some(arena) = usable(comm, window) else { return };
    let board = || Board::new(comm, arena, product);
    // Safety: the caller's promise.
    unsafe { warpgroups::multiply(product.depth, product.maps, &Scatter { comm, product, board }) };
    board().leave();
}

shared! {
    /// The distance from the place of a sum to that of its first term, the product of rank 0; and from there to the
    /// next term.
    static TERMS: [u64; 2];
}

/// The tiles of a product and reduce-scatter.
struct Scatter<'a, B> {
    comm: &'a Comm,
    product: &'a Product,
    board: B,
}

impl<B> Scatter<'_, B> {
    /// Returns whether other ranks' products are added to a tile.
    #[inline(always)]
    fn adds(&self, output: &Output) -> bool {
        self.product.parts & EXCHANGE != 0 && output.numbers[0] == self.comm.world().rank()
    }
}

impl<'a, B: Fn() -> Board<'a>> Outputs for Scatter<'a, B> {
    type Factor = Bf16;
    /// After it has raised the tile's flag.
    const FREES: bool = true;
    const FINDER: Finder = Finder::Stores;
    const PREPARES: bool = true;
    /// The warps that multiply also add.
    const KEPT: Kept = Kept::Of72;

    #[inline(always)]
    fn place(&self, output: &Output, row: u32) -> u64 {
        output.to + 2 * u64::from(row) * u64::from(self.product.columns)
    }

    #[inline(always)]
    unsafe fn add(&self, output: &Output, to: [u64; 4], products: [(u64, u64); 4]) -> [(u64, u64); 4] {
        if !self.adds(output) {
            return products;
        }
        let (me, at) = (output.numbers[0], stay(0) as usize);
        let (mut terms, further) = (TERMS.array().read(at), TERMS.array().read(at + 1));
        let mut sums = [[0f32; 8]; 4];
        for source in 0..self.comm.world().size() {
            let load = |index: usize| {
                let from = to[index].wrapping_add(terms);
                // Safety: a tile of the window, whose flag was acquired unless the rank did not come; nothing is loaded
                // for rows that go nowhere.
                let term = || unsafe { load_weak_pair(from as usize as *const u64) };
                if source == me || to[index] == 0 { products[index] } else { term() }
            };
            let (first, second, third, fourth) = (load(0), load(1), load(2), load(3));
            sums[0] = add(sums[0], first);
            sums[1] = add(sums[1], second);
            sums[2] = add(sums[2], third);
            sums[3] = add(sums[3], fourth);
            terms = terms.wrapping_add(further);
        }
        [pack(sums[0]), pack(sums[1]), pack(sums[2]), pack(sums[3])]
    }
}

impl<'a, B: Fn() -> Board<'a>> Work for Scatter<'a, B> {
    /// The board, and the maps of the factors.
    type Loading = (Board<'a>, [TensorMap; 2]);

    #[inline(always)]
    fn begin(&self, mut make: impl FnMut(Matrices) -> TensorMap) -> Self::Loading {
        let (board, product) = ((self.board)(), self.product);
        let maps = [
            make(rows_of(product.a, product.depth, product.rows, board.ranks, ROWS)),
            make(rows_of(product.b, product.depth, product.columns, 1, COLUMNS)),
        ];
        (board, maps)
    }

    #[inline(always)]
    fn next(&self, (board, [left, right]): &mut Self::Loading) -> Option<warpgroups::Tile> {
        let (product, rows, columns) = (self.product, self.product.row_tiles(), self.product.column_tiles());
        let each = rows * columns;
        let mine = if Warp.elect() { board.scheduler.take_tile() } else { 0 };
        let tile = Warp.broadcast(mine, 0);
        if tile >= u64::from(each) * u64::from(board.ranks) {
            return None;
        }
        let (distance, tile) = mixed(tile as u32, each, board.ranks, grid_dim().count() as u32 / 2);
        let owner = board.after(distance);
        let (row_tile, column_tile) = super::order(tile, rows, columns);
        let (row, column) = (row_tile * ROWS, column_tile * COLUMNS);
        let row_bytes = 2 * u64::from(product.columns);
        let rows_at = if product.parts & EXCHANGE == 0 {
            product.partial + u64::from(owner) * u64::from(product.rows) * row_bytes
        } else if owner == board.arena.rank() {
            product.c
        } else {
            board.arena.there(owner) + board.rows(board.arena.rank(), row_bytes)
        };
        let to = rows_at + u64::from(row) * row_bytes + 2 * u64::from(column);
        let (rows, columns) = (product.rows - row, product.columns - column);
        let output = Output { to, rows, columns, numbers: [owner, tile] };
        Some(warpgroups::Tile { a: (*left, row, owner), b: (*right, column, 0), output })
    }

    /// Raises the flags of tiles of other ranks, by warp 1, and waits for tiles from them, by warp 2.
    #[inline(always)]
    fn aside(&self, warp: u32) {
        let (rows, columns) = (self.product.row_tiles(), self.product.column_tiles());
        let (board, mut entries) = ((self.board)(), Entries::new());
        if warp == 1 && Warp.elect() {
            while let Some(output) = entries.await_stored() {
                if self.product.parts & EXCHANGE != 0 && !self.adds(&output) {
                    let [owner, tile] = output.numbers;
                    let (row_tile, column_tile) = super::order(tile, rows, columns);
                    board.raise(owner, row_tile, column_tile);
                }
                entries.free();
            }
        } else if warp == 2 {
            let row_bytes = 2 * u64::from(self.product.columns);
            if Warp.elect() {
                let first = board.arena.here() + board.rows(0, row_bytes);
                TERMS.array().write(0, first.wrapping_sub(self.product.c));
                TERMS.array().write(1, u64::from(self.product.rows) * row_bytes);
            }
            while let Some(output) = entries.await_announced() {
                let (row_tile, column_tile) = super::order(output.numbers[1], rows, columns);
                let mut source = if self.adds(&output) { lane() } else { board.ranks };
                while source < board.ranks {
                    // A rank that does not come is the communicator's fault, and the result is incomplete.
                    let _ = source == board.arena.rank() || board.arrives(source, row_tile, column_tile);
                    source += WARP_SIZE;
                }
                Warp.sync();
                if Warp.elect() {
                    entries.prepare();
                }
                entries.advance();
            }
        }
    }
}

/// Returns the owner and the number of the tile at place `index` of the order of work. The owner is given by its
/// distance from this rank; the distance `ranks` is this rank itself. An owner has `each` tiles.
///
/// The order: `lead` tiles of other ranks; then, in turn, one tile of each other rank and one own tile; own tiles when
/// the others are sent. So links have work during more of the product, and terms of an own tile arrive before it is
/// stored. An own tile comes after the other ranks' tiles with its number, so that ranks do not wait for each other in
/// a circle (docs/matmul.md, Protocol).
#[inline(always)]
fn mixed(index: u32, each: u32, ranks: u32, lead: u32) -> (u32, u32) {
    let sent = (ranks - 1) * each;
    let own_before = |index: u32| (index.saturating_sub(lead) / ranks).max(index.saturating_sub(sent));
    let own = own_before(index);
    if own_before(index + 1) > own {
        return (ranks, own);
    }
    // A rank alone has own tiles only.
    let (other, others) = (index - own, (ranks - 1).max(1));
    (1 + other % others, other / others)
}

/// A tile whose stores are on their way to its owner. Its flag is raised during the next product, when they have
/// arrived, because the release would wait for them.
#[derive(Clone, Copy)]
struct Sent {
    /// The flag; `None` if there is nothing to raise.
    flag: Option<GlobalWord>,
    epoch: u64,
    /// The step of the next product.
    at: u32,
}

impl Sent {
    /// Raises the flag now. All threads of the block call.
    #[inline(always)]
    fn raise(&mut self) {
        if let Some(flag) = self.flag.take() {
            Block.sync();
            if Block.elect() {
                raise::<Global>(flag, self.epoch, 0);
            }
        }
    }
}

impl Aside for Sent {
    #[inline(always)]
    fn load(&self, step: u32) -> (u64, u64) {
        // The threads have met since the stores.
        if let Some(flag) = self.flag
            && step == self.at
            && Block.elect()
        {
            raise::<Global>(flag, self.epoch, 0);
        }
        (0, 0)
    }

    #[inline(always)]
    fn store(&self, _: u32, _: (u64, u64)) {}
}

/// The step of the next product in which a tile's flag is raised.
const RAISED_AT: u32 = 6;

/// Copies a tile.
///
/// # Safety
/// - Both addresses are valid for `rows` rows of `pairs` times 16 bytes, at a distance of `row_bytes`.
#[inline(always)]
unsafe fn copy(from: u64, to: u64, row_bytes: u64, rows: u32, pairs: u32) {
    let pair = Block.rank() % 32;
    let further = Block.size() / 32;
    let mut row = Block.rank() / 32;
    let at = |row: u32| u64::from(row) * row_bytes + 16 * u64::from(pair);
    while row < rows && pair < pairs {
        // Safety: the caller's promise; past the end nothing is loaded or stored.
        unsafe {
            let load = |ahead: u32| {
                let row = row + ahead * further;
                if row < rows { load_weak_pair((from + at(row)) as usize as *const u64) } else { (0, 0) }
            };
            let store = |ahead: u32, (low, high): (u64, u64)| {
                let row = row + ahead * further;
                if row < rows {
                    store_weak_pair((to + at(row)) as usize as *mut u64, low, high);
                }
            };
            let (first, second, third, fourth) = (load(0), load(1), load(2), load(3));
            store(0, first);
            store(1, second);
            store(2, third);
            store(3, fourth);
        }
        row += 4 * further;
    }
}

/// Waits for a tile of all ranks and adds them up. Returns whether all came.
///
/// # Safety
/// - As [`matmul_reduce_scatter`].
#[inline(always)]
unsafe fn add_up(board: &Board, row_tile: u32, column_tile: u32) -> bool {
    let (product, row_bytes) = (board.product, 2 * u64::from(board.product.columns));
    let mut came = true;
    let mut source = Block.rank();
    while source < board.ranks {
        came &= board.arrives(source, row_tile, column_tile);
        source += Block.size();
    }
    if Block.sync_or(!came) {
        return false;
    }
    let (row, column) = (row_tile * ROWS, column_tile * COLUMNS);
    let (rows, pairs) = ((product.rows - row).min(ROWS), (product.columns - column).min(COLUMNS) / 8);
    let first = u64::from(row) * row_bytes + 2 * u64::from(column);
    let here = board.arena.here() + board.rows(0, row_bytes) + first;
    let further = u64::from(product.rows) * row_bytes;
    let pair = Block.rank() % 32;
    let step = Block.size() / 32;
    let mut row = Block.rank() / 32;
    while row < rows && pair < pairs {
        let at = |ahead: u32| u64::from(row + ahead * step) * row_bytes + 16 * u64::from(pair);
        let mut sums = [[0f32; 8]; 4];
        for source in 0..board.ranks {
            let load = |ahead: u32| {
                let from = here + u64::from(source) * further + at(ahead);
                // Safety: a tile of the window, whose flag was acquired; past the end nothing is loaded.
                if row + ahead * step < rows { unsafe { load_weak_pair(from as usize as *const u64) } } else { (0, 0) }
            };
            let (first, second, third, fourth) = (load(0), load(1), load(2), load(3));
            sums[0] = add(sums[0], first);
            sums[1] = add(sums[1], second);
            sums[2] = add(sums[2], third);
            sums[3] = add(sums[3], fourth);
        }
        let store = |ahead: u32, sums: [f32; 8]| {
            if row + ahead * step < rows {
                let (low, high) = pack(sums);
                // Safety: the caller's promise.
                unsafe { store_weak_pair((product.c + first + at(ahead)) as usize as *mut u64, low, high) };
            }
        };
        store(0, sums[0]);
        store(1, sums[1]);
        store(2, sums[2]);
        store(3, sums[3]);
        row += 4 * step;
    }
    true
}

/// Adds eight BF16.
#[inline(always)]
fn add([s, t, u, v, w, x, y, z]: [f32; 8], (low, high): (u64, u64)) -> [f32; 8] {
    let [a, b] = Bf16::unpack(low as u32);
    let [c, d] = Bf16::unpack((low >> 32) as u32);
    let [e, f] = Bf16::unpack(high as u32);
    let [g, h] = Bf16::unpack((high >> 32) as u32);
    [s + a, t + b, u + c, v + d, w + e, x + f, y + g, z + h]
}

/// Rounds eight numbers to BF16.
#[inline(always)]
fn pack([a, b, c, d, e, f, g, h]: [f32; 8]) -> (u64, u64) {
    let four = |low: [f32; 2], high: [f32; 2]| u64::from(Bf16::pack(high)) << 32 | u64::from(Bf16::pack(low));
    (four([a, b], [c, d]), four([e, f], [g, h]))
}
