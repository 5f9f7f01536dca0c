// SPDX-License-Identifier: MIT OR Apache-2.0
//! A tile of a product of matrices of BF16, by eight warps, with `mma.sync`.
//!
//! The product is `a * transposed(b)`: both factors have the inner index along their rows, as activations and the
//! weights of a linear layer have it.
//!
//! ```text
//!   global memory --cp.async--> stage of shared memory --ldmatrix--> registers --mma.sync--> sums in registers
//!                               128 + 256 rows of 64 elements, four stages                  64 x 64 for a warp
//! ```
//!
//! In a stage the 16 bytes with number `c` of row `r` lie at place `c ^ (r % 8)` of the row, so that eight rows of one
//! column lie in different banks.

use gin_device::prelude::*;
use gin_device::shared::dynamic_array;
use gin_device::sys::data::store_weak_pair;
use gin_device::sys::matrix::{await_copies, commit_copies, copy_async, load_matrices, multiply_add};
use gin_device::sys::shared::{Address, load_weak_pair, store_weak_u32};

/// Rows of a tile.
pub const ROWS: u32 = 128;
/// Columns of a tile.
pub const COLUMNS: u32 = 256;
/// Threads of a block that multiplies.
pub const THREADS: u32 = 32 * WARPS;
/// Bytes of dynamic shared memory of a block that multiplies.
pub const SHARED_BYTES: u32 = STAGES * STAGE_BYTES;

const WARPS: u32 = 8;
/// Inner elements of a stage.
const DEPTH: u32 = 64;
const STAGES: u32 = 4;
/// Bytes of a row of a stage, and of a row of a warp's sums.
const ROW_BYTES: u32 = 2 * DEPTH;
const STAGE_BYTES: u32 = (ROWS + COLUMNS) * ROW_BYTES;
/// Rows that all threads copy at a time: each copies 16 bytes.
pub const COPIED_ROWS: u32 = 32 * WARPS / 8;

shared! {
    /// The address of each row of the tile in the result.
    static PLACES: [u64; ROWS as usize];
}

/// The rows of a tile's left factor: the address of the first one, if the others follow it without a gap; or rows
/// anywhere.
pub trait Left: Copy {
    /// The rows that a thread copies: every [`COPIED_ROWS`]th, four of them.
    type Rows: Copy;

    /// Returns the rows `first`, `first + COPIED_ROWS` and so on, of `row_bytes` bytes each, from byte `at` on. Some
    /// may be past the last row.
    fn rows(&self, first: u32, at: u32, row_bytes: u64) -> Self::Rows;

    /// Returns the address of byte `along` of row `index` of the four, after the threads of the block have met. Nothing
    /// is read of rows past the last one.
    fn address(&self, rows: &Self::Rows, index: usize, along: u32, row_bytes: u64) -> u64;
}

impl Left for u64 {
    type Rows = u64;

    #[inline(always)]
    fn rows(&self, first: u32, at: u32, row_bytes: u64) -> u64 {
        self + u64::from(first) * row_bytes + u64::from(at)
    }

    #[inline(always)]
    fn address(&self, rows: &u64, index: usize, along: u32, row_bytes: u64) -> u64 {
        // Offsets in a tile are less than 2^32.
        rows + u64::from(index as u32 * COPIED_ROWS * row_bytes as u32 + along)
    }
}

/// The factors of a tile.
#[derive(Clone, Copy, Debug)]
pub struct Factors<A = u64> {
    /// The rows of the left factor: the address of the first one, a multiple of 16, or where they are.
    pub a: A,
    /// The address of the first row of the right factor, as its transpose: a multiple of 16.
    pub b: u64,
    /// Number of rows of the left factor from there on; a tile has at most [`ROWS`].
    pub rows: u32,
    /// Number of rows of the right factor from there on; a tile has at most [`COLUMNS`].
    pub columns: u32,
    /// Number of elements of a row: a multiple of 8.
    pub depth: u32,
}

/// Repeats a block with a constant, so that arrays that it indexes stay in registers.
macro_rules! each {
    ($name:ident in [$($value:literal)*] $body:block) => { $({ const $name: usize = $value; $body })* };
}

/// Work of other kind that threads do while the products run: a load and a store in each of [`steps`] steps.
pub trait Aside {
    /// Loads what the step stores.
    fn load(&self, step: u32) -> (u64, u64);
    /// Stores what it has loaded.
    fn store(&self, step: u32, data: (u64, u64));
}

/// No such work.
impl Aside for () {
    #[inline(always)]
    fn load(&self, _: u32) -> (u64, u64) {
        (0, 0)
    }

    #[inline(always)]
    fn store(&self, _: u32, _: (u64, u64)) {}
}

/// Returns the number of steps of a tile with `depth` inner elements.
#[inline(always)]
#[must_use]
pub const fn steps(depth: u32) -> u32 {
    depth.div_ceil(DEPTH)
}

/// Multiplies a tile, in FP32, and stores it as BF16, rounded once. `place` returns the address of the first column of
/// the tile in a row of it, or 0 if the row goes nowhere. All threads of the block, [`THREADS`] of them, call.
///
/// # Safety
/// - The addresses of `factors` are valid, and those of `place` too, for the columns that there are, a multiple of 8;
///   they are multiples of 16. No thread writes the factors meanwhile; other blocks' writes were acquired.
/// - The block has [`SHARED_BYTES`] of dynamic shared memory, for nothing else.
#[inline(always)]
pub unsafe fn multiply<A: Left>(factors: &Factors<A>, aside: &impl Aside, place: impl Fn(u32) -> u64) {
    let (thread, lane) = (Block.rank(), gin_device::coop::lane());
    let warp = thread / WARP_SIZE;
    let shared = dynamic_array::<u64>(0, SHARED_BYTES as usize / 8).address();
    let steps = steps(factors.depth);

    // The copies of this thread: 16 bytes of every 32nd row.
    let (chunk, row) = (thread % 8, thread / 8);
    let to = row * ROW_BYTES + ((chunk ^ (row % 8)) << 4);
    let stride = 2 * u64::from(factors.depth);
    let a = factors.a.rows(row, 16 * chunk, stride);
    let b = factors.b + u64::from(row) * stride + 16 * u64::from(chunk);
    // Offsets in a tile are less than 2^32.
    let further = COPIED_ROWS * stride as u32;
    // Bit `i` is set if the thread's row `i` is there.
    let there = |rows: u32, max: u32| {
        let number = (rows.min(max) + COPIED_ROWS - 1).saturating_sub(row) / COPIED_ROWS;
        (1u32 << number) - 1
    };
    let (a_there, b_there) = (there(factors.rows, ROWS), there(factors.columns, COLUMNS));
    let start = |step: u32| {
        let inside = step * DEPTH + 8 * chunk < factors.depth;
        let (a_there, b_there) = if inside { (a_there, b_there) } else { (0, 0) };
        let stage = shared.at(step % STAGES * STAGE_BYTES + to);
        let along = step * ROW_BYTES;
        each!(I in [0 1 2 3] {
            let bytes = (a_there >> I & 1) << 4;
            let from = factors.a.address(&a, I, along, stride);
            // Safety: the caller's promise; nothing is read past the end.
            unsafe { copy_async(stage.at(I as u32 * COPIED_ROWS * ROW_BYTES), from, bytes) };
        });
        each!(I in [0 1 2 3 4 5 6 7] {
            let (at, bytes) = (ROWS + I as u32 * COPIED_ROWS, (b_there >> I & 1) << 4);
            // Safety: as above.
            unsafe { copy_async(stage.at(at * ROW_BYTES), b + u64::from(I as u32 * further + along), bytes) };
        });
    };

    // The fragments of this lane: a row of a matrix, whose 16 bytes have the number `chunk ^ 2 * part`.
    let (a_row, b_row) = (warp / 4 * 64 + lane % 16, warp % 4 * 64 + lane % 8 + lane / 16 * 8);
    let a_at = (a_row * ROW_BYTES, ((lane / 16) ^ (lane % 8)) << 4);
    let b_at = ((ROWS + b_row) * ROW_BYTES, ((lane / 8 % 2) ^ (lane % 8)) << 4);
    let load = |stage: Address, at: (u32, u32), part: usize, index: usize| {
        let row = stage.at(at.0 + (at.1 ^ (part as u32) << 5) + index as u32 * 16 * ROW_BYTES);
        // Safety: called for complete stages; 16 rows follow each other at a distance of a matrix.
        unsafe { load_matrices(row) }
    };

    let next = |step: u32| {
        if step + STAGES - 1 < steps {
            start(step + STAGES - 1);
        }
        commit_copies();
    };
    // All threads' copies of the next stage are complete, and all threads have read the stage before it.
    let await_next = || {
        await_copies::<{ STAGES - 2 }>();
        Block.sync();
    };

    // No thread still reads the last tile.
    Block.sync();
    let mut sums = [[0f32; 4]; 32];
    each!(STEP in [0 1 2] {
        if (STEP as u32) < steps {
            start(STEP as u32);
        }
        commit_copies();
    });
    // `place` may load from global memory. The copies, which were started before, run meanwhile.
    if thread < ROWS {
        PLACES.array().write(thread as usize, if thread < factors.rows { place(thread) } else { 0 });
    }
    await_next();
    let mut step = 0;
    if warp / 4 * 64 < factors.rows && warp % 4 * 64 < factors.columns {
        // Fragments are loaded while the products of those before run, also across the end of a stage. What is loaded
        // past the last stage is not used.
        let mut a = [[0u32; 4]; 4];
        each!(I in [0 1 2 3] { a[I] = load(shared, a_at, 0, I) });
        let mut b = load(shared, b_at, 0, 0);
        while step < steps {
            let stage = shared.at(step % STAGES * STAGE_BYTES);
            let data = aside.load(step);
            each!(PART in [0 1 2 3] {
                let mut later = [[0u32; 4]; 4];
                each!(J in [0 1 2 3] {
                    let b_later = match (PART, J) {
                        (_, 0..3) => load(stage, b_at, PART, J + 1),
                        (0..3, _) => load(stage, b_at, PART + 1, 0),
                        _ => {
                            await_next();
                            let stage = shared.at((step + 1) % STAGES * STAGE_BYTES);
                            each!(I in [0 1 2 3] { later[I] = load(stage, a_at, 0, I) });
                            load(stage, b_at, 0, 0)
                        }
                    };
                    if PART < 3 {
                        later[J] = load(stage, a_at, PART + 1, J);
                    }
                    each!(I in [0 1 2 3] {
                        multiply_add(&mut sums[8 * I + 2 * J], a[I], [b[0], b[1]]);
                        multiply_add(&mut sums[8 * I + 2 * J + 1], a[I], [b[2], b[3]]);
                    });
                    b = b_later;
                });
                a = later;
                if PART == 0 {
                    next(step);
                }
            });
            aside.store(step, data);
            step += 1;
        }
    } else {
        // The warp's part of the tile is empty. It copies.
        while step < steps {
            let data = aside.load(step);
            next(step);
            await_next();
            aside.store(step, data);
            step += 1;
        }
    }
    await_copies::<0>();
    Block.sync();

    // Each warp turns its sums into rows, in shared memory of its own.
    let own = shared.at(warp * 64 * ROW_BYTES);
    let (row, column) = (lane / 4, lane % 4);
    each!(I in [0 1 2 3] {
        each!(J in [0 1 2 3 4 5 6 7] {
            let [a, b, c, d] = sums[8 * I + J];
            let at = (16 * I as u32 + row) * ROW_BYTES + ((J as u32 ^ row) << 4) + 4 * column;
            // Safety: the warp's own part.
            unsafe {
                store_weak_u32(own.at(at), Bf16::pack([a, b]));
                store_weak_u32(own.at(at + 8 * ROW_BYTES), Bf16::pack([c, d]));
            }
        });
    });
    Warp.sync();
    let (first_row, chunk) = (warp / 4 * 64, lane % 8);
    let column = warp % 4 * 64 + 8 * chunk;
    let mut row = lane / 8;
    while row < 64 {
        // Safety: the warp's own part; a row and columns that are there.
        unsafe {
            let (low, high) = load_weak_pair(own.at(row * ROW_BYTES + ((chunk ^ (row % 8)) << 4)));
            let to = PLACES.array().read((first_row + row) as usize);
            if to != 0 && column < factors.columns {
                store_weak_pair((to + 2 * u64::from(column)) as usize as *mut u64, low, high);
            }
        }
        row += 4;
    }
}
