// SPDX-License-Identifier: MIT OR Apache-2.0
//! The operations as PTX.

use super::{BOX_ELEMENTS, Matrices, TensorMap};
use crate::coop::{Coop, Warp, lane};
use crate::sys::bulk::Mbarrier;
use crate::sys::shared::{Address, store_weak_u64};
use core::arch::asm;

/// # Safety
/// - As [`TensorMap::make`].
#[inline(always)]
pub(super) unsafe fn make(to: u64, shared: Address, matrices: &Matrices) {
    let Matrices { address, columns, rows, number, row_bytes, matrix_bytes, box_rows } = *matrices;
    if lane() < 16 {
        // Safety: the caller's promise.
        unsafe { store_weak_u64(shared.at(8 * lane()), 0) };
    }
    Warp.sync();
    if lane() == 0 {
        // Every field of a map is set, so zeros are a valid start. The rank is stored less 1; type 10 is BF16, swizzle
        // 3 that of 128 bytes (PTX ISA, "tensormap.replace").
        // Safety: the caller's promise.
        unsafe {
            asm!(
                "tensormap.replace.tile.global_address.shared::cta.b1024.b64 [{a}], {p};",
                "tensormap.replace.tile.rank.shared::cta.b1024.b32 [{a}], 2;",
                "tensormap.replace.tile.box_dim.shared::cta.b1024.b32 [{a}], 0, {n};",
                "tensormap.replace.tile.box_dim.shared::cta.b1024.b32 [{a}], 1, {box_rows};",
                "tensormap.replace.tile.box_dim.shared::cta.b1024.b32 [{a}], 2, 1;",
                "tensormap.replace.tile.global_dim.shared::cta.b1024.b32 [{a}], 0, {columns};",
                "tensormap.replace.tile.global_dim.shared::cta.b1024.b32 [{a}], 1, {rows};",
                "tensormap.replace.tile.global_dim.shared::cta.b1024.b32 [{a}], 2, {number};",
                "tensormap.replace.tile.global_stride.shared::cta.b1024.b64 [{a}], 0, {row_bytes};",
                "tensormap.replace.tile.global_stride.shared::cta.b1024.b64 [{a}], 1, {matrix_bytes};",
                "tensormap.replace.tile.element_stride.shared::cta.b1024.b32 [{a}], 0, 1;",
                "tensormap.replace.tile.element_stride.shared::cta.b1024.b32 [{a}], 1, 1;",
                "tensormap.replace.tile.element_stride.shared::cta.b1024.b32 [{a}], 2, 1;",
                "tensormap.replace.tile.elemtype.shared::cta.b1024.b32 [{a}], 10;",
                "tensormap.replace.tile.interleave_layout.shared::cta.b1024.b32 [{a}], 0;",
                "tensormap.replace.tile.swizzle_mode.shared::cta.b1024.b32 [{a}], 3;",
                "tensormap.replace.tile.fill_mode.shared::cta.b1024.b32 [{a}], 0;",
                a = in(reg32) shared.bits(), p = in(reg64) address, n = const BOX_ELEMENTS,
                box_rows = in(reg32) box_rows, columns = in(reg32) columns, rows = in(reg32) rows,
                number = in(reg32) number, row_bytes = in(reg64) row_bytes, matrix_bytes = in(reg64) matrix_bytes,
                options(nostack),
            );
        }
    }
    Warp.sync();
    // Safety: the caller's promise.
    unsafe {
        asm!(
            "tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned [{p}], [{a}], 128;",
            "fence.proxy.tensormap::generic.acquire.gpu [{p}], 128;",
            p = in(reg64) to, a = in(reg32) shared.bits(), options(nostack),
        );
    }
}

/// Starts a copy of a box from global to shared memory, from element `column` of row `row` of matrix `number` on. Once
/// its bytes are written, `barrier` counts them as complete: [`ROW_BYTES`](super::ROW_BYTES) for each row.
///
/// # Safety
/// - The block has the bytes of shared memory at `to`, which is a multiple of 1024. The map was made, for memory that
///   is valid.
/// - For `barrier` and the bytes, what [`copy_to_shared`](crate::sys::bulk::copy_to_shared) requires.
#[inline(always)]
pub unsafe fn copy_box_to_shared(
    to: Address,
    map: TensorMap,
    (column, row, number): (u32, u32, u32),
    barrier: Mbarrier,
) {
    // Safety: the caller's promise.
    unsafe {
        asm!(
            "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [{a}], [{p}, {{{x}, {y}, {z}}}], [{w}];",
            a = in(reg32) to.bits(), p = in(reg64) map.0, x = in(reg32) column, y = in(reg32) row,
            z = in(reg32) number, w = in(reg32) barrier.bits(), options(nostack),
        );
    }
}
