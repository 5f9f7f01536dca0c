// SPDX-License-Identifier: MIT OR Apache-2.0
//! Experts of a rank, between dispatch and combine: each row is multiplied in place.
//!
//! ```text
//!   rank 0: tokens --.            .--> rows of rank 0 and 1, times a factor --.            .--> sums
//!                     > dispatch <                                            > combine <
//!   rank 1: tokens --'            '--> rows of rank 0 and 1, times a factor --'            '--> sums
//! ```

use gin_device::prelude::*;
use gin_ep_kernels::{
    Bytes, PermutedRows, RECEIVE, ReceivedRows, SEND, SlotParams, Sums, TokenParams, combine, dispatch,
};

/// Multiplies a row by all threads of the block.
///
/// # Safety
/// - The row has `hidden` FP32 and belongs to this block.
#[inline(always)]
unsafe fn scale(row: *mut u8, hidden: u32, factor: f32) {
    for column in Block.stripe(hidden as usize) {
        // Safety: an element of the row, which this thread has for itself.
        let element = unsafe { row.cast::<f32>().add(column) };
        // Safety: as above.
        unsafe { element.write(element.read() * factor) };
    }
}

/// Multiplies all received rows of `hidden` FP32.
///
/// # Safety
/// - In the order of the stream, between the receive and the combine of a slot.
#[kernel]
pub unsafe fn scale_received(received: ReceivedRows, hidden: u32, factor: f32) {
    // Safety: the caller's promise.
    unsafe { scale_all(&received, hidden, factor) };
}

/// Multiplies all received rows by all threads of the grid.
///
/// # Safety
/// - As [`scale_received`].
#[inline(always)]
unsafe fn scale_all(received: &ReceivedRows, hidden: u32, factor: f32) {
    for source in 0..received.ranks() {
        let mut row = block_in_grid();
        while row < received.count(source) {
            // Safety: a received row, which this block has for itself.
            unsafe { scale(received.row(source, row), hidden, factor) };
            row += grid_dim().count() as u32;
        }
    }
}

/// Multiplies all rows of a layout that has rows: not of indices alone.
///
/// # Safety
/// - As [`scale_received`], after the rows were permuted.
#[kernel]
pub unsafe fn scale_permuted(permuted: PermutedRows, hidden: u32, factor: f32) {
    if !permuted.has_rows() {
        return;
    }
    let mut row = block_in_grid();
    while row < permuted.total().min(permuted.capacity()) {
        // Safety: a row of the layout, which this block has for itself.
        unsafe { scale(permuted.row(row), hidden, factor) };
        row += grid_dim().count() as u32;
    }
}

/// Sends tokens to their experts, multiplies the received rows of `hidden` FP32, and adds up what comes back.
///
/// # Safety
/// - One block, on every rank. The host made the parameters by `gin_ep::Slot::fuse`.
#[kernel(launch_bounds(256))]
pub unsafe fn exchange_scaled(
    comm: Comm,
    arena: Window<u64>,
    slot: SlotParams,
    tokens: TokenParams,
    sums: Sums,
    hidden: u32,
    factor: f32,
) {
    // Safety: the caller's promise, here and below.
    unsafe { dispatch::<Bytes>(&comm, &arena, &slot, &tokens, SEND | RECEIVE) };
    // One warp has received.
    Block.sync();
    unsafe { scale_all(&ReceivedRows::new(slot, arena.local_ptr().addr() as u64), hidden, factor) };
    Block.sync();
    unsafe { combine::<f32>(&comm, &arena, &slot, &tokens, &sums) };
}
