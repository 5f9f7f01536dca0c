// SPDX-License-Identifier: MIT OR Apache-2.0
//! Tiles whose left factor has rows anywhere: four warps gather them by copies of 16 bytes.

use super::{
    EMPTY, FREE, FULL, Factor, MAPS_BYTES, OTHERS, Output, Outputs, PLACES, Place, STAGES, Stages, TILES, announce,
    begin, divide_registers, multiply_tiles, phase,
};
use crate::matmul::tile::{ROWS, steps};
use gin_device::prelude::*;
use gin_device::sys::bulk::fence_proxy_async_shared;
use gin_device::sys::matrix::{await_copies, commit_copies, copy_async};
use gin_device::sys::tensor::{BOX_ELEMENTS, Matrices, ROW_BYTES, TensorMap, copy_box_to_shared};

/// Rows that the threads copy at a time: each copies 16 bytes.
const COPIED_ROWS: u32 = WARP_SIZE * OTHERS / 8;
/// Steps until a copy of rows must be complete.
const LAG: u32 = 2;

shared! {
    /// The addresses of a tile's rows.
    static ADDRESSES: [u64; ROWS as usize];
}

/// A tile of gathered rows.
#[derive(Clone, Copy, Debug)]
pub(crate) struct GatheredTile {
    /// First row and matrix of the tile's box of the right factor.
    pub(crate) b: (u32, u32),
    /// The tile's part of the result.
    pub(crate) output: Output,
}

/// The work of a kernel on tiles of gathered rows.
pub(crate) trait Gathers: Outputs {
    /// The state of the loading warps.
    type Loading;

    /// Begins to load. The loading warps call, as `group`; `None` if there is nothing to do.
    fn begin(&self, group: WarpSpan) -> Option<Self::Loading>;

    /// Takes the next tile, if there is one. The loading warps call.
    fn next(&self, group: WarpSpan, loading: &mut Self::Loading) -> Option<GatheredTile>;

    /// Returns the address of a row of the tile, and of the first column of its product.
    fn row(&self, tile: &GatheredTile, row: u32) -> (u64, u64);
}

/// Multiplies the tiles of `work`, over `depth` pairs of bytes of inner elements, as [`multiply`](super::multiply), but
/// the threads have not met when it returns. `right` describes the right factor.
///
/// # Safety
/// - As [`multiply`](super::multiply). All rows of a tile are there when it is taken, at multiples of 16.
#[inline(always)]
pub(crate) unsafe fn multiply_gathered<W: Gathers>(depth: u32, maps: u64, right: &Matrices, work: &W) {
    begin::<W>(1 + OTHERS);
    let (warp, stages) = (Block.rank() / WARP_SIZE, Stages::of_block());
    // Safety: the caller's promise; barrier 1 is the loading warps'.
    unsafe {
        if warp >= OTHERS {
            divide_registers::<W>(true);
            multiply_tiles(depth, stages, work, warp - OTHERS);
        } else {
            divide_registers::<W>(false);
            if let Some(group) = WarpSpan::new(0, OTHERS, 1) {
                load_tiles(depth, stages, (maps, right), work, group);
            }
        }
    }
}

/// Copies the factors of all tiles. The loading warps call.
///
/// # Safety
/// - As [`multiply_gathered`].
#[inline(always)]
unsafe fn load_tiles<W: Gathers>(
    depth: u32,
    stages: Stages,
    (maps, right): (u64, &Matrices),
    work: &W,
    group: WarpSpan,
) {
    let (thread, steps) = (group.rank(), steps(depth));
    let (chunk, first) = (thread % 8, thread / 8);
    let to_row = first * ROW_BYTES + ((chunk ^ (first % 8)) << 4);
    let map = maps + u64::from(block_in_grid() * MAPS_BYTES);
    // One warp makes the map and uses it. No warp stores sums yet.
    // Safety: the caller's promise.
    let map = if thread < WARP_SIZE { Some(unsafe { TensorMap::make(map, stages.sums(0), right) }) } else { None };
    let mut loading = work.begin(group);
    let (mut stage, mut entry) = (Place(0), Place(0));
    loop {
        let tile = loading.as_mut().and_then(|loading| work.next(group, loading));
        phase(FREE + entry.index(TILES)).wait(entry.parity(TILES) ^ 1);
        let mut addresses = [0; 8];
        if let Some(tile) = &tile {
            let (address, place) = if thread < tile.output.rows { work.row(tile, thread) } else { (0, 0) };
            ADDRESSES.array().write(thread as usize, address);
            PLACES.array().write((entry.index(TILES) * ROWS + thread) as usize, place);
            // All threads have stored addresses and places. They meet again before they store others.
            group.sync();
            each!(I in [0 1 2 3 4 5 6 7] {
                addresses[I] = ADDRESSES.array().read(first as usize + I * COPIED_ROWS as usize);
            });
        }
        if thread == 0 {
            announce(entry, tile.map(|tile| tile.output));
        }
        entry.advance();
        let Some(GatheredTile { b, output }) = tile else { return };
        let complete = |stage: Place| {
            // The warp's copies are complete, for the tensor cores too.
            fence_proxy_async_shared();
            Warp.sync();
            if lane() == 0 {
                // Safety: one arrival of each warp.
                unsafe { phase(FULL + stage.index(STAGES)).arrive() };
            }
        };
        for step in 0..steps {
            let (full, to) = (phase(FULL + stage.index(STAGES)), stages.at(stage));
            phase(EMPTY + stage.index(STAGES)).wait(stage.parity(STAGES) ^ 1);
            // Safety: the caller's promise; all warps have read the stage.
            unsafe {
                if let Some(map) = map
                    && thread == 0
                {
                    full.arrive_expect_tx(W::Factor::COLUMNS * ROW_BYTES);
                    copy_box_to_shared(to.at(ROWS * ROW_BYTES), map, (step * BOX_ELEMENTS, b.0, b.1), full);
                }
                let inside = step * BOX_ELEMENTS + 8 * chunk < depth;
                each!(I in [0 1 2 3 4 5 6 7] {
                    let row = I as u32 * COPIED_ROWS;
                    let bytes = if inside && first + row < output.rows { 16 } else { 0 };
                    let from = addresses[I] + u64::from(step * ROW_BYTES + 16 * chunk);
                    copy_async(to.at(row * ROW_BYTES + to_row), from, bytes);
                });
            }
            commit_copies();
            if step >= LAG {
                await_copies::<LAG>();
                complete(stage.before(LAG));
            }
            stage.advance();
        }
        await_copies::<0>();
        for before in (1..=steps.min(LAG)).rev() {
            complete(stage.before(before));
        }
    }
}
