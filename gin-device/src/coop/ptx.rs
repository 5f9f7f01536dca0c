// SPDX-License-Identifier: MIT OR Apache-2.0
//! Indices and collectives on a GPU.
//!
//! Collectives are LLVM's intrinsics, not `asm!`, because the intrinsics are convergent. LLVM merges two equal `asm!`
//! blocks from the arms of a divergent branch into one. The exception is [`active_mask`]. The names are those of LLVM
//! 22; only this list has them.

use super::Dim;
use core::arch::{asm, nvptx};

unsafe extern "C" {
    #[link_name = "llvm.nvvm.bar.warp.sync"]
    fn llvm_bar_warp_sync(mask: u32);
    #[link_name = "llvm.nvvm.vote.ballot.sync"]
    fn llvm_vote_ballot_sync(mask: u32, bit: bool) -> u32;
    #[link_name = "llvm.nvvm.vote.any.sync"]
    fn llvm_vote_any_sync(mask: u32, bit: bool) -> bool;
    #[link_name = "llvm.nvvm.match.any.sync.i64"]
    fn llvm_match_any_sync(mask: u32, value: u64) -> u32;
    #[link_name = "llvm.nvvm.shfl.sync.idx.i32"]
    fn llvm_shfl_sync_idx(mask: u32, value: u32, lane: u32, clamp: u32) -> u32;
    #[link_name = "llvm.nvvm.barrier.cta.sync.aligned.all"]
    fn llvm_barrier_sync(id: u32);
    #[link_name = "llvm.nvvm.barrier.cta.sync.aligned.count"]
    fn llvm_barrier_sync_count(id: u32, threads: u32);
    #[link_name = "llvm.nvvm.barrier.cta.red.or.aligned.all"]
    fn llvm_barrier_or(id: u32, bit: bool) -> bool;
    #[link_name = "llvm.nvvm.barrier.cta.red.or.aligned.count"]
    fn llvm_barrier_or_count(id: u32, threads: u32, bit: bool) -> bool;
}

/// Returns the index of the calling thread in its block.
#[inline(always)]
pub fn thread_index() -> Dim {
    // Safety: this reads special registers, here and below.
    unsafe {
        Dim { x: nvptx::_thread_idx_x() as u32, y: nvptx::_thread_idx_y() as u32, z: nvptx::_thread_idx_z() as u32 }
    }
}

/// Returns the number of threads per block, in each dimension.
#[inline(always)]
pub fn block_dim() -> Dim {
    unsafe { Dim { x: nvptx::_block_dim_x() as u32, y: nvptx::_block_dim_y() as u32, z: nvptx::_block_dim_z() as u32 } }
}

/// Returns the index of the calling thread's block in the grid.
#[inline(always)]
pub fn block_index() -> Dim {
    unsafe { Dim { x: nvptx::_block_idx_x() as u32, y: nvptx::_block_idx_y() as u32, z: nvptx::_block_idx_z() as u32 } }
}

/// Returns the number of blocks per grid, in each dimension.
#[inline(always)]
pub fn grid_dim() -> Dim {
    unsafe { Dim { x: nvptx::_grid_dim_x() as u32, y: nvptx::_grid_dim_y() as u32, z: nvptx::_grid_dim_z() as u32 } }
}

#[inline(always)]
pub(super) fn lane() -> u32 {
    let lane: u32;
    // Safety: reads a special register.
    unsafe { asm!("mov.u32 {l}, %laneid;", l = out(reg32) lane, options(pure, nomem, nostack, preserves_flags)) }
    lane
}

/// Returns the lanes of the warp below the calling thread's lane.
#[inline(always)]
pub(crate) fn lanes_below() -> u32 {
    let mask: u32;
    // Safety: reads a special register.
    unsafe { asm!("mov.u32 {m}, %lanemask_lt;", m = out(reg32) mask, options(pure, nomem, nostack, preserves_flags)) }
    mask
}

/// Returns the lanes of the warp up to the calling thread's lane.
#[inline(always)]
pub(crate) fn lanes_until() -> u32 {
    let mask: u32;
    // Safety: reads a special register.
    unsafe { asm!("mov.u32 {m}, %lanemask_le;", m = out(reg32) mask, options(pure, nomem, nostack, preserves_flags)) }
    mask
}

#[inline(always)]
pub(super) fn sync_lanes(mask: u32) {
    // Safety: the caller's group promised that all lanes of the mask call, here and below.
    unsafe { llvm_bar_warp_sync(mask) }
}

#[inline(always)]
pub(super) fn vote_any(mask: u32, bit: bool) -> bool {
    // A vote alone does not order memory among the lanes.
    sync_lanes(mask);
    unsafe { llvm_vote_any_sync(mask, bit) }
}

#[inline(always)]
pub(super) fn ballot(mask: u32, bit: bool) -> u32 {
    sync_lanes(mask);
    unsafe { llvm_vote_ballot_sync(mask, bit) }
}

#[inline(always)]
pub(super) fn shuffle(mask: u32, value: u64, from: u32) -> u64 {
    sync_lanes(mask);
    leader_shuffle(mask, value, from)
}

#[inline(always)]
pub(super) fn sync_block() {
    unsafe { llvm_barrier_sync(0) }
}

#[inline(always)]
pub(super) fn sync_block_or(bit: bool) -> bool {
    unsafe { llvm_barrier_or(0, bit) }
}

#[inline(always)]
pub(super) fn sync_named(id: u32, threads: u32) {
    unsafe { llvm_barrier_sync_count(id, threads) }
}

#[inline(always)]
pub(super) fn sync_named_or(id: u32, threads: u32, bit: bool) -> bool {
    unsafe { llvm_barrier_or_count(id, threads, bit) }
}

/// Returns lanes that are here together, the caller's among them. Each call site has a `SITE` of its own.
///
/// It is not LLVM's intrinsic. If both arms of a branch begin with the intrinsic, LLVM moves it to before the branch,
/// where it gathers lanes that then part.
#[inline(always)]
pub(crate) fn active_mask<const SITE: u32>() -> u32 {
    let mask: u32;
    // Safety: this reads a register. It is not `pure`, so that it stays in its place.
    unsafe {
        asm!("activemask.b32 {mask}; // {site}", mask = out(reg32) mask, site = const SITE, options(nostack, preserves_flags))
    }
    mask
}

/// Returns whether any of the lanes of `mask`, which are here together, brings `true`. Does not order memory.
#[inline(always)]
pub(crate) fn any_here(mask: u32, bit: bool) -> bool {
    // Safety: all lanes of the mask are here.
    unsafe { llvm_vote_any_sync(mask, bit) }
}

/// Returns the lanes of `mask`, which are here together, that bring `true`. Does not order memory.
#[inline(always)]
pub(crate) fn ballot_here(mask: u32, bit: bool) -> u32 {
    // Safety: all lanes of the mask are here.
    unsafe { llvm_vote_ballot_sync(mask, bit) }
}

/// Returns the lanes of `mask`, which are here together, that bring the caller's `value`. Does not order memory.
#[inline(always)]
pub(crate) fn alike(mask: u32, value: u64) -> u32 {
    // Safety: all lanes of the mask are here.
    unsafe { llvm_match_any_sync(mask, value) }
}

/// Returns the value of lane `from` of the lanes of `mask`, which are here together. Does not order memory.
#[inline(always)]
pub(crate) fn leader_shuffle(mask: u32, value: u64, from: u32) -> u64 {
    // Safety: all lanes of the mask are here.
    unsafe {
        let low = llvm_shfl_sync_idx(mask, value as u32, from, 31);
        let high = llvm_shfl_sync_idx(mask, (value >> 32) as u32, from, 31);
        let whole: u64;
        // Not shifts: LLVM would combine them with later additions.
        asm!(
            "mov.b64 {w}, {{{l}, {h}}};",
            w = out(reg64) whole, l = in(reg32) low, h = in(reg32) high,
            options(pure, nomem, nostack, preserves_flags),
        );
        whole
    }
}

/// Waits for the lanes of `mask`, which are here together. Orders memory among them.
#[inline(always)]
pub(crate) fn sync_here(mask: u32) {
    sync_lanes(mask);
}
