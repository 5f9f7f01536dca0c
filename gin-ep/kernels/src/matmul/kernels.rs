// SPDX-License-Identifier: MIT OR Apache-2.0
//! The kernels.

use super::{
    Grouped, Overlapped, Product, all_gather_matmul, grouped_matmul, matmul_reduce_scatter, overlapped_matmul,
};

/// Kernels of the same products by warpgroups, for GPUs that have them.
#[cfg(any(not(target_arch = "nvptx64"), target_feature = "sm_90a"))]
pub(super) mod warpgroups;

use crate::ReceivedRows;
use crate::layout::PermutedRows;
use gin_device::prelude::*;

/// Runs [`all_gather_matmul`].
///
/// # Safety
/// - As that.
#[kernel(launch_bounds(256))]
pub unsafe fn ep_all_gather_matmul(comm: Comm, window: Window<u64>, product: Product) {
    // Safety: the caller's promise.
    unsafe { all_gather_matmul(&comm, &window, &product) }
}

/// Runs [`matmul_reduce_scatter`].
///
/// # Safety
/// - As that.
#[kernel(launch_bounds(256))]
pub unsafe fn ep_matmul_reduce_scatter(comm: Comm, window: Window<u64>, product: Product) {
    // Safety: the caller's promise.
    unsafe { matmul_reduce_scatter(&comm, &window, &product) }
}

/// Runs [`grouped_matmul`].
///
/// # Safety
/// - As that.
#[kernel(launch_bounds(256))]
pub unsafe fn ep_grouped_matmul(comm: Comm, arena: Window<u64>, layout: PermutedRows, grouped: Grouped) {
    // Safety: the caller's promise.
    unsafe { grouped_matmul(&comm, &arena, &layout, &grouped) }
}

/// Runs [`overlapped_matmul`].
///
/// # Safety
/// - As that.
#[kernel(launch_bounds(256))]
pub unsafe fn ep_overlapped_matmul(comm: Comm, arena: Window<u64>, received: ReceivedRows, early: Overlapped) {
    // Safety: the caller's promise.
    unsafe { overlapped_matmul(&comm, &arena, &received, &early) }
}
