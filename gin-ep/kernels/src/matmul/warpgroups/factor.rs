// SPDX-License-Identifier: MIT OR Apache-2.0
//! The elements of the factors: BF16, or E4M3 with scales.

use super::{Output, Outputs};
use crate::SCALED;
use crate::element::fma;
use crate::matmul::tile;
use crate::params::load;
use gin_device::prelude::*;
use gin_device::sys::shared::Address;
use gin_device::sys::tensor::ROW_BYTES;
use gin_device::sys::warpgroup::{
    E4M3_COLUMNS, PartialSums, Sums, decrease_registers, increase_registers, multiply_add, multiply_e4m3,
};

/// The elements of the factors. A step of the product has 128 bytes of each row.
pub(crate) trait Factor {
    /// Columns of a tile.
    const COLUMNS: u32;
    /// Registers that a thread keeps whose warp does not multiply; the other threads take the rest.
    const KEPT: Kept = Kept::All;

    /// Sums of a step that are not scaled yet.
    type Partial: Zeroable;
    /// The address of a lane's next scale, or nothing if the factors have no scales.
    type Tile;
    /// A lane's scale in a step.
    type Scale;

    /// Returns the number of pairs of bytes of this many inner elements.
    fn pairs(depth: u32) -> u32;

    /// Begins a tile. The two warpgroups call, with the number of the warp.
    fn begin(work: &impl Outputs, output: impl Fn() -> Output, warp: u32) -> Self::Tile;

    /// Loads the lane's scale of the next step.
    ///
    /// # Safety
    /// - The addresses of scales are valid.
    unsafe fn scale(tile: &mut Self::Tile) -> Self::Scale;

    /// Adds the product of a step to the sums. The first one of a tile replaces them: then `adds` is false. The whole
    /// warpgroup calls.
    ///
    /// # Safety
    /// - As [`warpgroup::multiply_add`](multiply_add).
    unsafe fn multiply_add(
        sums: (&mut Sums, &mut Self::Partial),
        factors: (Address, Address),
        adds: bool,
        scale: &Self::Scale,
    );
}

impl Factor for Bf16 {
    const COLUMNS: u32 = tile::COLUMNS;

    type Partial = ();
    type Tile = ();
    type Scale = ();

    #[inline(always)]
    fn pairs(depth: u32) -> u32 {
        depth
    }

    #[inline(always)]
    fn begin(_: &impl Outputs, _: impl Fn() -> Output, _: u32) {}

    #[inline(always)]
    unsafe fn scale((): &mut ()) {}

    #[inline(always)]
    unsafe fn multiply_add((sums, ()): (&mut Sums, &mut ()), (left, right): (Address, Address), adds: bool, (): &()) {
        // Safety: the caller's promise.
        unsafe { multiply_add(sums, left, right, adds) }
    }
}

/// E4M3 with scales of 128 inner elements, in tiles of `HALVES` times 128 columns: 1 or 2.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Scaled<const HALVES: u32>;

/// The registers that a thread keeps whose warp does not multiply.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Kept {
    /// All 168. A thread that multiplies has as many.
    All,
    /// 72. A thread that multiplies has 216.
    Of72,
    /// 56. A thread that multiplies has 224.
    Of56,
}

/// Divides the registers of the block as its kernel [does](Outputs::KEPT). All warps call, with whether they multiply.
#[inline(always)]
pub(crate) fn divide_registers<W: Outputs>(multiplies: bool) {
    // Safety: the whole warpgroup calls; the two that multiply take no more than the third one gives up.
    unsafe {
        match (W::KEPT, multiplies) {
            (Kept::All, _) => {}
            (Kept::Of72, true) => increase_registers::<216>(),
            (Kept::Of72, false) => decrease_registers::<72>(),
            (Kept::Of56, true) => increase_registers::<224>(),
            (Kept::Of56, false) => decrease_registers::<56>(),
        }
    }
}

impl<const HALVES: u32> Factor for Scaled<HALVES> {
    const COLUMNS: u32 = HALVES * E4M3_COLUMNS;
    /// A thread that multiplies has 128 sums, and 64 partial ones before they are scaled.
    const KEPT: Kept = if HALVES == 2 { Kept::Of56 } else { Kept::All };

    type Partial = PartialSums;
    /// The address of the lane's next scale: of a row of the warp's 16 in lanes 0 to 15, of each 128 columns in lanes
    /// 16 and 17. Other lanes, and lanes whose row or columns do not exist, have the address of lane 16.
    type Tile = u64;
    type Scale = f32;

    #[inline(always)]
    fn pairs(depth: u32) -> u32 {
        depth / 2
    }

    #[inline(always)]
    fn begin(work: &impl Outputs, output: impl Fn() -> Output, warp: u32) -> u64 {
        let output = &output();
        let row = warp * 16 + lane();
        if lane() < 16 && row < output.rows {
            work.row_scales(output, row)
        } else {
            work.column_scales(output, u32::from(lane() == 17 && HALVES == 2 && output.columns > SCALED))
        }
    }

    #[inline(always)]
    unsafe fn scale(at: &mut u64) -> f32 {
        // Safety: the caller's promise.
        let scale = f32::from_bits(unsafe { load(*at) });
        *at += 4;
        scale
    }

    #[inline(always)]
    unsafe fn multiply_add(
        (sums, partial): (&mut Sums, &mut PartialSums),
        (left, right): (Address, Address),
        _: bool,
        &scale: &f32,
    ) {
        each!(HALF in [0 1] {
            if HALF as u32 >= HALVES {
                return;
            }
            // Safety: the caller's promise; the right factor has twice as many rows.
            unsafe { multiply_e4m3(partial, left, right.at(HALF as u32 * E4M3_COLUMNS * ROW_BYTES)) };
            let columns = Warp.shuffle(scale, 16 + HALF as u32);
            let [upper, lower] = [0, 8].map(|further| Warp.shuffle(scale, lane() / 4 + further) * columns);
            each!(J in [0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15] {
                each!(I in [0 1] {
                    const FROM: usize = 4 * J + I;
                    const TO: usize = 64 * HALF + FROM;
                    sums[TO] = fma(partial[FROM], upper, sums[TO]);
                    sums[TO + 2] = fma(partial[FROM + 2], lower, sums[TO + 2]);
                });
            });
        });
    }
}
