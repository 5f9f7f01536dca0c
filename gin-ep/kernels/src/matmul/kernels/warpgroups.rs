// SPDX-License-Identifier: MIT OR Apache-2.0
//! The kernels by warpgroups.

use crate::ReceivedRows;
use crate::layout::PermutedRows;
use crate::matmul::{
    Grouped, Overlapped, Product, all_gather_matmul_by_warpgroups, grouped_matmul_by_warpgroups,
    grouped_matmul_e4m3_by_warpgroups, matmul_e4m3_by_warpgroups, matmul_reduce_scatter_by_warpgroups,
    overlapped_matmul_by_warpgroups, overlapped_matmul_e4m3_by_warpgroups,
};
use gin_device::prelude::*;

/// Runs [`all_gather_matmul_by_warpgroups`].
///
/// # Safety
/// - As that.
#[kernel(launch_bounds(384, 1))]
pub unsafe fn ep_all_gather_matmul_wgmma(comm: Comm, window: Window<u64>, product: Product) {
    // Safety: the caller's promise.
    unsafe { all_gather_matmul_by_warpgroups(&comm, &window, &product) }
}

/// Runs [`matmul_e4m3_by_warpgroups`].
///
/// # Safety
/// - As that.
#[kernel(launch_bounds(384, 1))]
pub unsafe fn ep_matmul_e4m3_wgmma(comm: Comm, window: Window<u64>, product: Product) {
    // Safety: the caller's promise.
    unsafe { matmul_e4m3_by_warpgroups(&comm, &window, &product) }
}

/// Runs [`matmul_reduce_scatter_by_warpgroups`].
///
/// # Safety
/// - As that.
#[kernel(launch_bounds(384, 1))]
pub unsafe fn ep_matmul_reduce_scatter_wgmma(comm: Comm, window: Window<u64>, product: Product) {
    // Safety: the caller's promise.
    unsafe { matmul_reduce_scatter_by_warpgroups(&comm, &window, &product) }
}

/// Runs [`grouped_matmul_by_warpgroups`].
///
/// # Safety
/// - As that.
#[kernel(launch_bounds(384, 1))]
pub unsafe fn ep_grouped_matmul_wgmma(comm: Comm, arena: Window<u64>, layout: PermutedRows, grouped: Grouped) {
    // Safety: the caller's promise.
    unsafe { grouped_matmul_by_warpgroups(&comm, &arena, &layout, &grouped) }
}

/// Runs [`overlapped_matmul_by_warpgroups`].
///
/// # Safety
/// - As that.
#[kernel(launch_bounds(384, 1))]
pub unsafe fn ep_overlapped_matmul_wgmma(comm: Comm, arena: Window<u64>, received: ReceivedRows, early: Overlapped) {
    // Safety: the caller's promise.
    unsafe { overlapped_matmul_by_warpgroups(&comm, &arena, &received, &early) }
}

/// Runs [`grouped_matmul_e4m3_by_warpgroups`].
///
/// # Safety
/// - As that.
#[kernel(launch_bounds(384, 1))]
pub unsafe fn ep_grouped_matmul_e4m3_wgmma(comm: Comm, arena: Window<u64>, layout: PermutedRows, grouped: Grouped) {
    // Safety: the caller's promise.
    unsafe { grouped_matmul_e4m3_by_warpgroups(&comm, &arena, &layout, &grouped) }
}

/// Runs [`overlapped_matmul_e4m3_by_warpgroups`].
///
/// # Safety
/// - As that.
#[kernel(launch_bounds(384, 1))]
pub unsafe fn ep_overlapped_matmul_e4m3_wgmma(
    comm: Comm,
    arena: Window<u64>,
    received: ReceivedRows,
    early: Overlapped,
) {
    // Safety: the caller's promise.
    unsafe { overlapped_matmul_e4m3_by_warpgroups(&comm, &arena, &received, &early) }
}
