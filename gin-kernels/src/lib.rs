// SPDX-License-Identifier: MIT OR Apache-2.0
//! Kernels that ship with gin.
//!
//! | module | holds |
//! | --- | --- |
//! | [`ring`] | fused ring all-reduce: adds the arrivals and passes them on |
//! | [`alltoall`] | all-to-all: every rank puts a block to every other and folds the arrivals into a checksum |
//! | [`halo`] | a 2-D stencil that exchanges its borders each step |
//! | [`moe`] | gate and experts of a mixture of experts, beside dispatch and combine of `gin-ep` |
//! | [`histogram`] | counts bytes in shared memory, and exchanges the counts |
//! | [`probe`] | single operations, to inspect the compiled code |
//! | [`primitives`] | the same for shared memory, warp operations and conversions |
//!
//! The workloads run all their steps in one launch; an iteration of `moe` is several launches. The functions that
//! define their data ([`ring::input`] and so on) are plain Rust, so the host uses them to check the results.
#![no_std]
#![cfg_attr(target_arch = "nvptx64", feature(abi_ptx, asm_experimental_arch))]
#![warn(unreachable_pub)]

pub mod alltoall;
pub mod halo;
pub mod histogram;
pub mod moe;
pub mod primitives;
pub mod probe;
pub mod ring;
