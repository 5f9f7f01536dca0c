// SPDX-License-Identifier: MIT OR Apache-2.0
//! Bulk copies of boxes of matrices into shared memory, of Hopper GPUs (sm_90a).
//!
//! A [`TensorMap`] describes matrices in global memory. One thread starts a copy of a box of rows and columns. An
//! engine computes the addresses, and stores zeros for elements outside of the matrix.
//!
//! | name | PTX |
//! | --- | --- |
//! | `TensorMap::make` | `tensormap.replace.tile`, `tensormap.cp_fenceproxy`, `fence.proxy.tensormap::generic.acquire.gpu` |
//! | `copy_box_to_shared` | `cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes` |
//!
//! # Layout
//! A box has 64 elements of 16 bits of each of its rows: 128 bytes. Row `r` of the box starts at byte `128 * r`. Its
//! 16 bytes with number `c` are stored at place `c ^ (r % 8)` of the row. This is the layout that
//! [`warpgroup`](crate::sys::warpgroup) multiplies; PTX calls it the 128-byte swizzle.
//!
//! # Order
//! Copies obey the rules of [`copy_to_shared`](crate::sys::bulk::copy_to_shared). A phase of the
//! [`Mbarrier`](crate::sys::bulk::Mbarrier) counts all bytes of the box, also of its elements outside of the matrix.
//!
//! # On a CPU
//! The executor carries out the copies as it does other bulk copies. A map is a list of the sizes.

#[cfg(not(target_arch = "nvptx64"))]
mod cpu;
#[cfg(target_arch = "nvptx64")]
mod ptx;

#[cfg(not(target_arch = "nvptx64"))]
use cpu as imp;
#[cfg(target_arch = "nvptx64")]
use ptx as imp;

#[cfg(not(target_arch = "nvptx64"))]
pub use cpu::{TensorBox, copy_box};
pub use imp::copy_box_to_shared;

use crate::sys::shared::Address;

/// Elements of 16 bits of a row of a box.
pub const BOX_ELEMENTS: u32 = 64;
/// Bytes of a row of a box.
pub const ROW_BYTES: u32 = 2 * BOX_ELEMENTS;
/// Bytes of a [`TensorMap`] in global memory, and of shared memory while it is made. Also their alignment.
pub const MAP_BYTES: u32 = 128;

/// Matrices of 16-bit elements in global memory. Their copies have boxes of one size.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Matrices {
    /// The address of the first element: a multiple of 16.
    pub address: u64,
    /// Number of elements of a row: a multiple of 8, at least 8.
    pub columns: u32,
    /// Number of rows of a matrix: at least 1.
    pub rows: u32,
    /// Number of matrices: at least 1.
    pub number: u32,
    /// Bytes from one row to the next: a multiple of 16, less than 2^40.
    pub row_bytes: u64,
    /// Bytes from one matrix to the next: a multiple of 16, less than 2^40.
    pub matrix_bytes: u64,
    /// Number of rows of a box: 8 to 256, a multiple of 8.
    pub box_rows: u32,
}

/// A description of [`Matrices`] in global memory, which the copy engine reads.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TensorMap(u64);

impl TensorMap {
    /// Writes the map of `matrices` to global memory at `to`. The whole warp calls. Afterwards these threads start
    /// copies with it, and threads that have met them at a barrier of the block.
    ///
    /// # Safety
    /// - `to` is valid for [`MAP_BYTES`] bytes of global memory, and the block has as many bytes of shared memory at
    ///   `shared`. Both addresses are multiples of [`MAP_BYTES`]. Nothing else accesses the two until the call returns,
    ///   nor the bytes at `to` as long as copies use the map.
    /// - `matrices` keeps the limits of its fields, and its elements are in global memory.
    #[inline(always)]
    #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
    pub unsafe fn make(to: u64, shared: Address, matrices: &Matrices) -> Self {
        // Safety: the caller's promise.
        unsafe { imp::make(to, shared, matrices) };
        Self(to)
    }
}
