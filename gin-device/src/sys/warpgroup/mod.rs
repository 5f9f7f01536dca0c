// SPDX-License-Identifier: MIT OR Apache-2.0
//! Products of matrices by a warpgroup, from shared memory, of Hopper GPUs (sm_90a).
//!
//! | name | PTX |
//! | --- | --- |
//! | `multiply_add` | `wgmma.fence`, four `wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16`, `wgmma.commit_group`, `wgmma.wait_group 0` |
//! | `multiply_e4m3` | the same with four `wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3` |
//! | `increase_registers` | `setmaxnreg.inc.sync.aligned.u32` |
//! | `decrease_registers` | `setmaxnreg.dec.sync.aligned.u32` |
//!
//! A warpgroup is four warps; the number of the first one is a multiple of 4. It multiplies 64 rows of the left factor
//! by rows of the right factor's transpose: 256 rows of 64 BF16, or 128 rows of 128 E4M3. Both factors are in shared
//! memory, as [`tensor`](crate::sys::tensor) stores boxes. A row of either has 128 bytes. Sums are FP32, spread over
//! the threads:
//!
//! | element of [`Sums`] or [`PartialSums`] | row | column |
//! | --- | --- | --- |
//! | `4 * j`, `4 * j + 1` | `16 * w + l / 4` | `8 * j + l % 4 * 2` and the next |
//! | `4 * j + 2`, `4 * j + 3` | 8 rows further down | the same |
//!
//! `w` is the number of the warp in its warpgroup, `l` the lane.
//!
//! # Order
//! The tensor cores read shared memory by the async proxy. They have read the factors when [`multiply_add`] returns.
//! Threads that store a factor call [`fence_proxy_async_shared`](crate::sys::bulk::fence_proxy_async_shared), and then
//! meet the threads that multiply. A copy of an engine needs no fence: the threads wait for its phase.
//!
//! The products of one call are complete when it returns. Two warpgroups that take turns keep the tensor cores busy: on
//! an H100 a product of 4096 x 4096 x 4096 took as long as with one call's products in flight during the next call.
//!
//! # On a CPU
//! The executor multiplies at a moment that it chooses, from the bytes that the async proxy sees. It adds products in
//! the order of the inner index, and rounds to FP32. A GPU states no order, and adds products of E4M3 with fewer bits
//! than FP32 has. So both agree to the bit if the sums are exact; for E4M3 the tests keep them below 2^13.

#[cfg(not(target_arch = "nvptx64"))]
mod cpu;
#[cfg(target_arch = "nvptx64")]
mod ptx;

#[cfg(not(target_arch = "nvptx64"))]
pub use cpu::*;
#[cfg(target_arch = "nvptx64")]
pub use ptx::*;

/// The kernel has these products and [tensor maps](crate::sys::tensor): it is compiled for sm_90a, or for a CPU.
pub const SUPPORTED: bool = cfg!(any(not(target_arch = "nvptx64"), target_feature = "sm_90a"));

/// Rows of the left factor of a product.
pub const ROWS: u32 = 64;
/// Rows of the right factor of BF16, as its transpose.
pub const COLUMNS: u32 = 256;
/// Rows of the right factor of E4M3, as its transpose.
pub const E4M3_COLUMNS: u32 = 128;

/// A thread's part of the sums of 64 rows and 256 columns.
pub type Sums = [f32; 128];
/// A thread's part of the sums of 64 rows and 128 columns.
pub type PartialSums = [f32; 64];
