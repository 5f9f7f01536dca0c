// SPDX-License-Identifier: MIT OR Apache-2.0
//! Indices and collectives on a GPU.
//!
//! Collectives are LLVM's intrinsics, not `asm!`, because the intrinsics are convergent. LLVM merges two equal `asm!`
//! blocks from the arms of a divergent branch into one. The exception is [`active_mask`]. The names are those of LLVM
//! 22; only this list has them.

use super::value::{Fold, Source};
use super::{Dim, WARP_SIZE};
use core::arch::{asm, nvptx};

unsafe extern "C" {
    #[link_name = "llvm.nvvm.bar.warp.sync"]
    fn llvm_bar_warp_sync(mask: u32);
    #[link_name = "llvm.nvvm.vote.ballot.sync"]
    fn llvm_vote_ballot_sync(mask: u32, bit: bool) -> u32;
    #[link_name = "llvm.nvvm.vote.any.sync"]
    fn llvm_vote_any_sync(mask: u32, bit: bool) -> bool;
    #[link_name = "llvm.nvvm.vote.all.sync"]
    fn llvm_vote_all_sync(mask: u32, bit: bool) -> bool;
    #[link_name = "llvm.nvvm.match.any.sync.i32"]
    fn llvm_match_any_sync_32(mask: u32, value: u32) -> u32;
    #[link_name = "llvm.nvvm.match.any.sync.i64"]
    fn llvm_match_any_sync(mask: u32, value: u64) -> u32;
    #[link_name = "llvm.nvvm.shfl.sync.idx.i32"]
    fn llvm_shfl_sync_idx(mask: u32, value: u32, lane: u32, clamp: u32) -> u32;
    #[link_name = "llvm.nvvm.shfl.sync.up.i32"]
    fn llvm_shfl_sync_up(mask: u32, value: u32, by: u32, clamp: u32) -> u32;
    #[link_name = "llvm.nvvm.shfl.sync.down.i32"]
    fn llvm_shfl_sync_down(mask: u32, value: u32, by: u32, clamp: u32) -> u32;
    #[link_name = "llvm.nvvm.shfl.sync.bfly.i32"]
    fn llvm_shfl_sync_bfly(mask: u32, value: u32, with: u32, clamp: u32) -> u32;
    #[link_name = "llvm.nvvm.redux.sync.add"]
    fn llvm_redux_sync_add(value: u32, mask: u32) -> u32;
    #[link_name = "llvm.nvvm.redux.sync.umin"]
    fn llvm_redux_sync_umin(value: u32, mask: u32) -> u32;
    #[link_name = "llvm.nvvm.redux.sync.umax"]
    fn llvm_redux_sync_umax(value: u32, mask: u32) -> u32;
    #[link_name = "llvm.nvvm.redux.sync.min"]
    fn llvm_redux_sync_min(value: u32, mask: u32) -> u32;
    #[link_name = "llvm.nvvm.redux.sync.max"]
    fn llvm_redux_sync_max(value: u32, mask: u32) -> u32;
    #[link_name = "llvm.nvvm.redux.sync.and"]
    fn llvm_redux_sync_and(value: u32, mask: u32) -> u32;
    #[link_name = "llvm.nvvm.redux.sync.or"]
    fn llvm_redux_sync_or(value: u32, mask: u32) -> u32;
    #[link_name = "llvm.nvvm.redux.sync.xor"]
    fn llvm_redux_sync_xor(value: u32, mask: u32) -> u32;
    #[link_name = "llvm.nvvm.barrier.cta.sync.aligned.all"]
    fn llvm_barrier_sync(id: u32);
    #[link_name = "llvm.nvvm.barrier.cta.sync.aligned.count"]
    fn llvm_barrier_sync_count(id: u32, threads: u32);
    #[link_name = "llvm.nvvm.barrier.cta.arrive.aligned.count"]
    fn llvm_barrier_arrive_count(id: u32, threads: u32);
    #[link_name = "llvm.nvvm.barrier.cta.red.or.aligned.all"]
    fn llvm_barrier_or(id: u32, bit: bool) -> bool;
    #[link_name = "llvm.nvvm.barrier.cta.red.or.aligned.count"]
    fn llvm_barrier_or_count(id: u32, threads: u32, bit: bool) -> bool;
}

// An ABI that returns a pair in registers, as these intrinsics do. No function of C is called, so types need no layout
// of C.
#[allow(improper_ctypes)]
unsafe extern "unadjusted" {
    #[link_name = "llvm.nvvm.match.all.sync.i32p"]
    fn llvm_match_all_sync_32(mask: u32, value: u32) -> (u32, bool);
    #[link_name = "llvm.nvvm.match.all.sync.i64p"]
    fn llvm_match_all_sync(mask: u32, value: u64) -> (u32, bool);
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

/// Returns the bit of the calling thread's lane.
#[inline(always)]
pub(crate) fn own_lane() -> u32 {
    let mask: u32;
    // Safety: reads a special register.
    unsafe { asm!("mov.u32 {m}, %lanemask_eq;", m = out(reg32) mask, options(pure, nomem, nostack, preserves_flags)) }
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
pub(super) fn arrive_named(id: u32, threads: u32) {
    unsafe { llvm_barrier_arrive_count(id, threads) }
}

#[inline(always)]
pub(super) fn sync_named_or(id: u32, threads: u32, bit: bool) -> bool {
    unsafe { llvm_barrier_or_count(id, threads, bit) }
}

/// Returns lanes that are here together, the caller's among them. Each call site has a `SITE` of its own.
///
/// It is not LLVM's intrinsic. If both arms of a branch begin with the intrinsic, LLVM moves it to before the branch,
/// where it gathers lanes that then part.
///
/// The mask has the caller's own lane anyway. Its addition keeps `ptxas` 13.0 from taking the masks of two call sites
/// for one value of all lanes. Where groups with different masks come together, it would take the mask of one lane for
/// all of them, and an H100 then waits for ever.
#[inline(always)]
pub(crate) fn active_mask<const SITE: u32>() -> u32 {
    let mask: u32;
    // Safety: this reads a register. It is not `pure`, so that it stays in its place.
    unsafe {
        asm!("activemask.b32 {mask}; // {site}", mask = out(reg32) mask, site = const SITE, options(nostack, preserves_flags))
    }
    mask | own_lane()
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
        join(low, llvm_shfl_sync_idx(mask, (value >> 32) as u32, from, 31))
    }
}

/// Does the same for 32 bits.
#[inline(always)]
pub(crate) fn leader_shuffle_narrow(mask: u32, value: u32, from: u32) -> u32 {
    // Safety: all lanes of the mask are here.
    unsafe { llvm_shfl_sync_idx(mask, value, from, 31) }
}

/// Returns the 64 bits of two halves.
#[inline(always)]
fn join(low: u32, high: u32) -> u64 {
    let whole: u64;
    // Safety: this copies registers. Not shifts: LLVM would combine them with later additions.
    unsafe {
        asm!(
            "mov.b64 {w}, {{{l}, {h}}};",
            w = out(reg64) whole, l = in(reg32) low, h = in(reg32) high,
            options(pure, nomem, nostack, preserves_flags),
        );
    }
    whole
}

/// Returns the value of a lane in the caller's segment of `width` lanes: that of `source` and `by`, which has five
/// bits. Does not order memory.
#[inline(always)]
pub(super) fn shuffle_from(mask: u32, bits: u64, wide: bool, source: Source, by: u32, width: u32) -> u64 {
    let segment = (WARP_SIZE - width) << 8;
    let one = |word: u32| {
        // Safety: all lanes of the mask call.
        unsafe {
            match source {
                Source::Lane => llvm_shfl_sync_idx(mask, word, by, segment | 31),
                Source::Up => llvm_shfl_sync_up(mask, word, by, segment),
                Source::Down => llvm_shfl_sync_down(mask, word, by, segment | 31),
                Source::Xor => llvm_shfl_sync_bfly(mask, word, by, segment | 31),
            }
        }
    };
    let low = one(bits as u32);
    if wide { join(low, one((bits >> 32) as u32)) } else { u64::from(low) }
}

/// Returns whether all of the lanes of `mask` bring `true`. Does not order memory.
#[inline(always)]
pub(super) fn all_here(mask: u32, bit: bool) -> bool {
    // Safety: all lanes of the mask call, here and below.
    unsafe { llvm_vote_all_sync(mask, bit) }
}

/// Returns the lanes of `mask` that bring the caller's value. Does not order memory.
#[inline(always)]
pub(super) fn match_any(mask: u32, bits: u64, wide: bool) -> u32 {
    unsafe { if wide { llvm_match_any_sync(mask, bits) } else { llvm_match_any_sync_32(mask, bits as u32) } }
}

/// Returns whether the lanes of `mask` bring the same value. Does not order memory.
#[inline(always)]
pub(super) fn match_all(mask: u32, bits: u64, wide: bool) -> bool {
    unsafe { if wide { llvm_match_all_sync(mask, bits).1 } else { llvm_match_all_sync_32(mask, bits as u32).1 } }
}

/// Returns the reduction of the values of the lanes of `mask`. Does not order memory.
#[inline(always)]
pub(super) fn reduce(mask: u32, fold: Fold, signed: bool, word: u32) -> u32 {
    unsafe {
        match (fold, signed) {
            (Fold::Add, _) => llvm_redux_sync_add(word, mask),
            (Fold::Min, false) => llvm_redux_sync_umin(word, mask),
            (Fold::Max, false) => llvm_redux_sync_umax(word, mask),
            (Fold::Min, true) => llvm_redux_sync_min(word, mask),
            (Fold::Max, true) => llvm_redux_sync_max(word, mask),
            (Fold::And, _) => llvm_redux_sync_and(word, mask),
            (Fold::Or, _) => llvm_redux_sync_or(word, mask),
            (Fold::Xor, _) => llvm_redux_sync_xor(word, mask),
        }
    }
}

/// Waits for the lanes of `mask`, which are here together. Orders memory among them.
#[inline(always)]
pub(crate) fn sync_here(mask: u32) {
    sync_lanes(mask);
}
