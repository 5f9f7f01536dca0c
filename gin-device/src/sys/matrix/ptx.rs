// SPDX-License-Identifier: MIT OR Apache-2.0
//! The operations as PTX.

use crate::sys::shared::Address;
use core::arch::asm;

/// Starts a copy of 16 bytes into shared memory; of none if `bytes` is 0, which stores zeros.
///
/// # Safety
/// - Both addresses are multiples of 16; the block has shared memory at `to`. If `bytes` is 16, `from` is valid for
///   reading, in global memory, and no thread writes it meanwhile. `bytes` is 0 or 16.
#[inline(always)]
pub unsafe fn copy_async(to: Address, from: u64, bytes: u32) {
    // Safety: the caller's promise.
    unsafe {
        asm!(
            "cp.async.cg.shared.global [{a}], [{p}], 16, {n};",
            a = in(reg32) to.bits(), p = in(reg64) from, n = in(reg32) bytes, options(nostack),
        );
    }
}

/// Ends a group of copies of the calling thread.
#[inline(always)]
pub fn commit_copies() {
    // Safety: orders copies of this thread.
    unsafe { asm!("cp.async.commit_group;", options(nostack)) }
}

/// Waits until at most the last `LEFT` groups of copies of the calling thread are incomplete.
#[inline(always)]
pub fn await_copies<const LEFT: u32>() {
    // Safety: waits for copies of this thread.
    unsafe { asm!("cp.async.wait_group {n};", n = const LEFT, options(nostack)) }
}

/// Loads four matrices of 8 x 8 elements. Lanes `8 * i` to `8 * i + 7` name the rows of matrix `i`. The whole warp
/// calls.
///
/// # Safety
/// - The block has 16 bytes of shared memory there, and the address is a multiple of 16.
#[inline(always)]
pub unsafe fn load_matrices(row: Address) -> [u32; 4] {
    let (first, second, third, fourth): (u32, u32, u32, u32);
    // Safety: the caller's promise.
    unsafe {
        asm!(
            "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{{0}, {1}, {2}, {3}}}, [{a}];",
            out(reg32) first, out(reg32) second, out(reg32) third, out(reg32) fourth,
            a = in(reg32) row.bits(), options(nostack),
        );
    }
    [first, second, third, fourth]
}

/// Adds the product of two matrices of BF16 to a sum. The whole warp calls.
#[inline(always)]
pub fn multiply_add(sum: &mut [f32; 4], left: [u32; 4], right: [u32; 2]) {
    // Safety: computes with registers.
    unsafe {
        asm!(
            "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {{{0}, {1}, {2}, {3}}}, {{{4}, {5}, {6}, {7}}}, {{{8}, {9}}}, {{{0}, {1}, {2}, {3}}};",
            inout(reg32) sum[0], inout(reg32) sum[1], inout(reg32) sum[2], inout(reg32) sum[3],
            in(reg32) left[0], in(reg32) left[1], in(reg32) left[2], in(reg32) left[3],
            in(reg32) right[0], in(reg32) right[1], options(pure, nomem, nostack, preserves_flags),
        );
    }
}
