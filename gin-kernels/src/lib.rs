// SPDX-License-Identifier: MIT OR Apache-2.0
//! Kernels that ship with gin.
//!
//! | module | holds |
//! | --- | --- |
//! | [`ring`] | fused ring all-reduce: adds the arrivals and passes them on |
//! | [`alltoall`] | all-to-all: every rank puts a block to every rank |
//! | [`halo`] | a 2-D stencil that exchanges its borders each step |
//! | [`moe`] | gate and experts of a mixture of experts, beside dispatch and combine of `gin-ep` |
//! | [`histogram`] | counts bytes in shared memory, and exchanges the counts |
//! | [`probe`] | single operations, to inspect the compiled code |
//! | [`primitives`] | the same for shared memory, warp operations and conversions |
//!
//! The workloads run all their steps in one launch; an iteration of `moe` is several launches. Other kernels make their
//! data before it and check the results after it. The functions that define data ([`ring::input`] and so on) are plain
//! Rust, so the host uses them, too.
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

use gin_device::grid::{CHUNK_BYTES, Chunks};
use gin_device::prelude::*;

/// Makes a unit of 16 bytes of what `element` returns for each of its four elements.
#[inline(always)]
fn unit(element: impl Fn(usize) -> f32) -> u128 {
    let word = |i| element(i).to_bits() as u128;
    word(0) | word(1) << 32 | word(2) << 64 | word(3) << 96
}

/// Returns element `i` of a unit.
#[inline(always)]
#[must_use]
pub fn element(unit: u128, i: usize) -> f32 {
    f32::from_bits((unit >> (32 * i)) as u32)
}

/// Returns the number of the calling thread in the grid, and the number of all threads.
#[inline(always)]
fn threads() -> (usize, usize) {
    let threads = Block.size() as usize;
    (block_in_grid() as usize * threads + Block.rank() as usize, grid_dim().count() as usize * threads)
}

/// Returns the indices below `len` that belong to the calling thread, if all threads of the grid share them.
#[inline(always)]
fn each(len: usize) -> core::iter::StepBy<core::ops::Range<usize>> {
    let (thread, threads) = threads();
    (thread.min(len)..len).step_by(threads)
}

/// Returns the block's share of `len` elements for a peer. Loads and stores are fastest in chunks that blocks take in
/// turns. Over the network each chunk is a request, so a block has one.
#[inline(always)]
fn share<T>(len: usize, near: bool) -> Chunks {
    Block.chunks_of::<T>(len, if near { CHUNK_BYTES / size_of::<T>() } else { usize::MAX })
}

/// Puts `len` elements from a place of one window to a place of another, with all blocks of the grid. Each block raises
/// `signal` once, after its share, which may be empty.
#[inline(always)]
fn send<T: Pod>(
    gin: &Gin,
    peer: Rank,
    (to, there): (Window<T>, usize),
    (from, here): (Window<T>, usize),
    len: usize,
    signal: SignalId,
) -> Result<(), Fault> {
    let mut chunks = share::<T>(len, gin.comm().lsa_reaches(peer));
    let mut chunk = chunks.next();
    loop {
        let (start, len) = chunk.unwrap_or((0, 0));
        chunk = chunks.next();
        let put = gin.put(peer, to.range(there + start, len), from.range(here + start, len));
        let put = if chunk.is_none() { put.signal(signal.inc()) } else { put };
        put.issue(&Block)?;
        if chunk.is_none() {
            return Ok(());
        }
    }
}
