// SPDX-License-Identifier: MIT OR Apache-2.0
//! The operations on a CPU. An executor carries out the copies; without one they are complete at once.

use super::{BOX_ELEMENTS, Matrices, ROW_BYTES, TensorMap};
use crate::coop::{Coop, Warp, lane};
use crate::exec::{BulkCall, switch_point, watch};
use crate::sys::bulk::Mbarrier;
use crate::sys::data::{load_weak_u64, store_weak_u64};
use crate::sys::shared::Address;

/// A box of a matrix.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TensorBox {
    /// The address of its first element.
    pub address: u64,
    /// Number of its 16 bytes in a row that are in the matrix: at most 8.
    pub units: u32,
    /// Number of its rows.
    pub rows: u32,
    /// Number of its rows that are in the matrix.
    pub rows_inside: u32,
    /// Bytes from one row of the matrix to the next.
    pub row_bytes: u64,
}

/// The first word of a map.
const MARK: u64 = 0x6d61_7020_6f66_2067;

/// # Safety
/// - As [`TensorMap::make`].
#[track_caller]
pub(super) unsafe fn make(to: u64, shared: Address, matrices: &Matrices) {
    let Matrices { address, columns, rows, number, row_bytes, matrix_bytes, box_rows } = *matrices;
    assert!(
        (to | shared.bits()).is_multiple_of(super::MAP_BYTES.into())
            && (address | row_bytes | matrix_bytes).is_multiple_of(16)
            && (row_bytes | matrix_bytes) >> 40 == 0
            && columns.min(rows).min(number) > 0
            && columns.is_multiple_of(8)
            && (8..=256).contains(&box_rows)
            && box_rows.is_multiple_of(8),
        "a tensor map at {to:#x}, made at {:#x}, of {matrices:x?}",
        shared.bits()
    );
    let two = |low: u32, high: u32| u64::from(high) << 32 | u64::from(low);
    let words = [MARK, address, two(columns, rows), two(number, box_rows), row_bytes, matrix_bytes];
    if let Some(&word) = words.get(lane() as usize) {
        // Safety: the caller's promise.
        unsafe { store_weak_u64((to + 8 * u64::from(lane())) as usize as *mut u64, word) };
    }
    Warp.sync();
}

/// Starts a copy of a box from global to shared memory, from element `column` of row `row` of matrix `number` on. Once
/// its bytes are written, `barrier` counts them as complete: [`ROW_BYTES`](super::ROW_BYTES) for each row.
///
/// # Safety
/// - The block has the bytes of shared memory at `to`, which is a multiple of 1024. The map was made, for memory that
///   is valid.
/// - For `barrier` and the bytes, what [`copy_to_shared`](crate::sys::bulk::copy_to_shared) requires.
#[track_caller]
pub unsafe fn copy_box_to_shared(
    to: Address,
    map: TensorMap,
    (column, row, number): (u32, u32, u32),
    barrier: Mbarrier,
) {
    // Safety: the caller's promise.
    let words: [u64; 6] =
        core::array::from_fn(|index| unsafe { load_weak_u64((map.0 + 8 * index as u64) as usize as *const u64) });
    let [mark, address, columns_rows, number_box, row_bytes, matrix_bytes] = words;
    assert!(
        mark == MARK && to.bits().is_multiple_of(1024),
        "a copy of a box to {:#x}, which must be a multiple of 1024, by a map at {:#x} that was made",
        to.bits(),
        map.0
    );
    let (columns, rows) = (columns_rows as u32, (columns_rows >> 32) as u32);
    let (numbers, box_rows) = (number_box as u32, (number_box >> 32) as u32);
    let inside = columns.saturating_sub(column).min(BOX_ELEMENTS);
    let is_inside = number < numbers && inside > 0;
    let from = TensorBox {
        address: address + u64::from(number) * matrix_bytes + u64::from(row) * row_bytes + 2 * u64::from(column),
        units: inside / 8,
        rows: box_rows,
        rows_inside: if is_inside { rows.saturating_sub(row).min(box_rows) } else { 0 },
        row_bytes,
    };
    switch_point();
    // As for other bulk copies, the starting thread makes the accesses.
    for row in 0..from.rows_inside {
        let address = from.address + u64::from(row) * row_bytes;
        watch::event(watch::Event::Data { address, bytes: 2 * u64::from(inside), writes: false });
    }
    watch::event(watch::Event::Data { address: to.bits(), bytes: (ROW_BYTES * box_rows).into(), writes: true });
    let copy = BulkCall::BoxToShared { to: to.bits(), from, barrier: barrier.bits() };
    crate::sys::bulk::start(copy, barrier);
}

/// Copies a box to shared memory, or to memory of the executor, in the layout of shared memory.
///
/// # Safety
/// - The elements of the box that are in the matrix are valid, and `to` is valid for writing the bytes of the box. It
///   is a multiple of 16.
#[doc(hidden)]
pub unsafe fn copy_box(to: u64, from: &TensorBox) {
    let zeros = 0u128;
    let outside = (&raw const zeros).expose_provenance() as u64;
    for (row, unit) in (0..from.rows).flat_map(|row| (0..8).map(move |unit| (row, unit))) {
        let is_inside = row < from.rows_inside && unit < from.units;
        let address = from.address + u64::from(row) * from.row_bytes + 16 * u64::from(unit);
        let place = u64::from(ROW_BYTES * row + 16 * (unit ^ (row % 8)));
        // Safety: the caller's promise.
        unsafe { crate::sys::bulk::copy(to + place, if is_inside { address } else { outside }, 16) };
    }
}
