// SPDX-License-Identifier: MIT OR Apache-2.0
//! Products of small matrices by a warp, and copies into shared memory that run meanwhile.
//!
//! | name | PTX | SASS on sm_90 |
//! | --- | --- | --- |
//! | `copy_async` | `cp.async.cg.shared.global` | `LDGSTS.E.BYPASS.128` |
//! | `commit_copies` | `cp.async.commit_group` | `LDGDEPBAR` |
//! | `await_copies` | `cp.async.wait_group` | `DEPBAR.LE` |
//! | `load_matrices` | `ldmatrix.sync.aligned.m8n8.x4.shared.b16` | `LDSM.16.M88.4` |
//! | `multiply_add` | `mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32` | `HMMA.16816.F32.BF16` |
//!
//! A matrix is spread over the lanes of a warp as these instructions spread it. Lane `l` has, of matrices of 16-bit
//! elements:
//!
//! | matrix | register | elements |
//! | --- | --- | --- |
//! | 8 x 8 | one | row `l / 4`, columns `l % 4 * 2` and the next |
//! | left factor, 16 x 16 | `i` of four | those of its quarter: upper left, lower left, upper right, lower right |
//! | right factor, 16 x 8, as its transpose | `i` of two | those of its half of 8 columns |
//! | sum, 16 x 8 of `f32` | two for the upper half, two for the lower | row `l / 4`, columns `l % 4 * 2` and the next |
//!
//! On a CPU the functions do the same by exchanges among the lanes. `multiply_add` adds products in the order of the
//! inner index there, and rounds after each. A GPU states no order. So both agree to the bit if the sums are exact. A
//! copy is complete at once on a CPU, so a missing wait shows on a GPU only.

#[cfg(not(target_arch = "nvptx64"))]
mod cpu;
#[cfg(target_arch = "nvptx64")]
mod ptx;

#[cfg(not(target_arch = "nvptx64"))]
pub use cpu::*;
#[cfg(target_arch = "nvptx64")]
pub use ptx::*;
