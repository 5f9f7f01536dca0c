// SPDX-License-Identifier: MIT OR Apache-2.0
//! Kernels that ship with gin.
//!
//! | module | holds |
//! | --- | --- |
//! | [`ring`] | ring all-reduce, fused: add what came, pass it on |
//! | [`alltoall`] | every rank puts a block to every other and folds what arrives into a checksum |
//! | [`halo`] | a 2-D stencil that exchanges its borders each step |
//! | [`probe`] | single operations, to look at what the compiler makes of them |
//!
//! The workloads run all their steps in one launch. The functions that say what they compute ([`ring::input`] and so
//! on) are plain Rust that the host uses to check the results.
#![no_std]
#![cfg_attr(target_arch = "nvptx64", feature(abi_ptx, asm_experimental_arch))]
#![warn(missing_docs, unreachable_pub)]

pub mod alltoall;
pub mod halo;
pub mod probe;
pub mod ring;
