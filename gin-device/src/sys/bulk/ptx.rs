// SPDX-License-Identifier: MIT OR Apache-2.0
//! The operations as PTX. No block here has `nomem`: each stops the compiler's own reordering.

use super::Mbarrier;
use crate::sys::shared::Address;
use core::arch::asm;

/// # Safety
/// - As [`Mbarrier::init`].
#[inline(always)]
pub(super) unsafe fn init(address: Address, arrivals: u32) {
    // Safety: the caller's promise.
    unsafe { asm!(bulk_statement!(init), a = in(reg32) address.bits(), n = in(reg32) arrivals, options(nostack)) }
}

/// # Safety
/// - As [`Mbarrier::arrive`].
#[inline(always)]
pub(super) unsafe fn arrive(address: Address) {
    // Safety: the caller's promise.
    unsafe { asm!(bulk_statement!(arrive), a = in(reg32) address.bits(), options(nostack)) }
}

/// # Safety
/// - As [`Mbarrier::arrive_expect_tx`].
#[inline(always)]
pub(super) unsafe fn arrive_expect_tx(address: Address, bytes: u32) {
    // Safety: the caller's promise.
    unsafe {
        asm!(bulk_statement!(arrive_expect_tx), a = in(reg32) address.bits(), n = in(reg32) bytes, options(nostack))
    }
}

#[inline(always)]
pub(super) fn test_wait(address: Address, parity: u32) -> bool {
    let complete: u32;
    // Safety: reads a word of shared memory.
    unsafe {
        asm!(
            bulk_statement!(test_wait),
            s = out(reg32) complete, a = in(reg32) address.bits(), n = in(reg32) parity, options(nostack),
        );
    }
    complete != 0
}

#[inline(always)]
pub(super) fn try_wait(address: Address, parity: u32) -> bool {
    let complete: u32;
    // Safety: reads a word of shared memory.
    unsafe {
        asm!(
            bulk_statement!(try_wait),
            s = out(reg32) complete, a = in(reg32) address.bits(), n = in(reg32) parity, options(nostack),
        );
    }
    complete != 0
}

/// # Safety
/// - As [`Mbarrier::invalidate`].
#[inline(always)]
pub(super) unsafe fn invalidate(address: Address) {
    // Safety: the caller's promise.
    unsafe { asm!(bulk_statement!(invalidate), a = in(reg32) address.bits(), options(nostack)) }
}

#[inline(always)]
pub(super) fn fence_mbarrier_init() {
    // Safety: a fence touches no memory of its own.
    unsafe { asm!(bulk_statement!(fence_mbarrier_init), options(nostack)) }
}

/// Starts a copy from global to shared memory. Once its bytes are written, `barrier` counts them as complete.
///
/// # Safety
/// - Both addresses and `bytes` are multiples of 16, `bytes` is not 0. The block has the bytes of shared memory at
///   `to`, and `from` is valid for reading them, in global memory.
/// - `barrier` is initialised, and its present phase expects the bytes, or will before it could be complete without
///   them.
/// - Until that phase is complete nothing accesses the bytes at `to`, and nothing writes those at `from`. Before, what
///   the [module](super#order) requires.
#[inline(always)]
pub unsafe fn copy_to_shared(to: Address, from: u64, bytes: u32, barrier: Mbarrier) {
    // Safety: the caller's promise.
    unsafe {
        asm!(
            bulk_statement!(copy_to_shared),
            a = in(reg32) to.bits(), p = in(reg64) from, n = in(reg32) bytes, w = in(reg32) barrier.0.bits(),
            options(nostack),
        );
    }
}

/// Starts a copy from shared to global memory, in the calling thread's open group.
///
/// # Safety
/// - Both addresses and `bytes` are multiples of 16, `bytes` is not 0. The block has the bytes of shared memory at
///   `from`, and `to` is valid for writing them, in global memory.
/// - Nothing writes the bytes at `from` until [`wait_group_read`] or [`wait_group`] has returned for the group, and
///   nothing accesses those at `to` until [`wait_group`] has. Before, what the [module](super#order) requires.
#[inline(always)]
pub unsafe fn copy_to_global(to: u64, from: Address, bytes: u32) {
    // Safety: the caller's promise.
    unsafe {
        asm!(
            bulk_statement!(copy_to_global),
            p = in(reg64) to, a = in(reg32) from.bits(), n = in(reg32) bytes, options(nostack),
        );
    }
}

/// Ends the open group of copies to global memory of the calling thread, and opens the next one.
#[inline(always)]
pub fn commit_group() {
    // Safety: touches no memory of its own.
    unsafe { asm!(bulk_statement!(commit_group), options(nostack)) }
}

/// Waits until at most the last `LEFT` ended groups of the calling thread are incomplete. The bytes of the others have
/// been written.
#[inline(always)]
pub fn wait_group<const LEFT: u32>() {
    // Safety: waits for copies of this thread.
    unsafe { asm!("cp.async.bulk.wait_group {n};", n = const LEFT, options(nostack)) }
}

/// Waits until at most the last `LEFT` ended groups of the calling thread have not read all their sources. The others
/// may not have written yet.
#[inline(always)]
pub fn wait_group_read<const LEFT: u32>() {
    // Safety: waits for copies of this thread.
    unsafe { asm!("cp.async.bulk.wait_group.read {n};", n = const LEFT, options(nostack)) }
}

/// Orders the calling thread's accesses to shared memory before later ones of the engine, and the other way round.
#[inline(always)]
pub fn fence_proxy_async_shared() {
    // Safety: a fence touches no memory of its own.
    unsafe { asm!(bulk_statement!(fence_proxy_async_shared), options(nostack)) }
}

/// Orders accesses to global memory that the calling thread made or has acquired before later ones of the engine, and
/// the other way round.
#[inline(always)]
pub fn fence_proxy_async_global() {
    // Safety: a fence touches no memory of its own.
    unsafe { asm!(bulk_statement!(fence_proxy_async_global), options(nostack)) }
}
