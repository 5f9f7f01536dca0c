// SPDX-License-Identifier: MIT OR Apache-2.0
//! Single operations of each back end and by loads and stores, to inspect the compiled code.
//!
//! Their shapes are those of NCCL's published figures: put and put_value by one thread, flush and wait by a block, one
//! back end compiled in, bounds checks on.

use gin_device::prelude::*;
use gin_device::sys;

/// Puts `bytes` bytes to world rank `peer` by one thread and raises signal 0. Ends the grid if that fails.
///
/// # Safety
/// - The communicator has a rank `peer`.
#[kernel]
pub unsafe fn probe_put_signal(comm: Comm, peer: u32, to: Window<u8>, from: Window<u8>, bytes: usize) {
    let gin = Gin::<Proxy>::with_backend(&comm, ContextId::new(0));
    // Safety: guaranteed by the kernel's caller.
    let peer = unsafe { Rank::new_unchecked(peer) };
    let put = gin.put(peer, to.range(0, bytes), from.range(0, bytes));
    if put.signal(SignalId::new(0).inc()).issue(&Thread).is_err() {
        sys::trap();
    }
}

/// Puts `len` elements by one thread and raises signal 0.
///
/// # Safety
/// - The handles are valid.
#[kernel]
pub unsafe fn probe_put_report(comm: Comm, to: Window<u32>, from: Window<u32>, len: usize) {
    let gin = Gin::<Proxy>::with_backend(&comm, ContextId::new(0));
    let put = gin.put(comm.world().right(), to.range(0, len), from.range(0, len));
    if let Err(fault) = put.signal(SignalId::new(0).inc()).issue(&Thread) {
        comm.report(fault);
    }
}

/// Puts a value to world rank `peer` by one thread. Ends the grid if that fails.
///
/// # Safety
/// - The communicator has a rank `peer`.
#[kernel]
pub unsafe fn probe_put_value(comm: Comm, peer: u32, to: Window<u64>, index: usize, value: u64) {
    let gin = Gin::<Proxy>::with_backend(&comm, ContextId::new(0));
    // Safety: guaranteed by the kernel's caller.
    let peer = unsafe { Rank::new_unchecked(peer) };
    if gin.put_value(peer, to.at(index), value).issue(&Thread).is_err() {
        sys::trap();
    }
}

/// Flushes by a block.
///
/// # Safety
/// - The handles are valid.
#[kernel]
pub unsafe fn probe_flush(comm: Comm, deadline: Deadline) {
    let gin = Gin::<Proxy>::with_backend(&comm, ContextId::new(0));
    if gin.flush(&Block, deadline).is_err() {
        sys::trap();
    }
}

/// Waits for signal 0 by a block.
///
/// # Safety
/// - The handles are valid.
#[kernel]
pub unsafe fn probe_wait_signal(comm: Comm, least: u64, deadline: Deadline) {
    let gin = Gin::<Proxy>::with_backend(&comm, ContextId::new(0));
    if gin.wait_signal(&Block, SignalId::new(0), least, deadline).is_err() {
        sys::trap();
    }
}

/// Puts `bytes` bytes to world rank `peer` by one thread's loads and stores and raises signal 0. Ends the grid if that
/// fails.
///
/// # Safety
/// - The communicator has a rank `peer`.
#[kernel]
pub unsafe fn probe_lsa_put_signal(comm: Comm, peer: u32, to: Window<u8>, from: Window<u8>, bytes: usize) {
    let gin = Gin::new(&comm, ContextId::new(0)).route(Route::Lsa);
    // Safety: guaranteed by the kernel's caller.
    let peer = unsafe { Rank::new_unchecked(peer) };
    let put = gin.put(peer, to.range(0, bytes), from.range(0, bytes));
    if put.signal(SignalId::new(0).inc()).issue(&Thread).is_err() {
        sys::trap();
    }
}

/// Synchronises a warp with the LSA team at barrier 0, by loads and stores.
///
/// # Safety
/// - The handles are valid.
#[kernel]
pub unsafe fn probe_lsa_barrier(comm: Comm, deadline: Deadline) {
    let gin = Gin::new(&comm, ContextId::new(0)).route(Route::Lsa);
    let outcome = BarrierSession::new(&gin, BarrierTeam::Lsa, 0)
        .and_then(|mut barrier| barrier.sync(&Warp, Fence::Put, deadline));
    if outcome.is_err() {
        sys::trap();
    }
}

/// Does the same as [`probe_put_signal`] by device-driven NIC queue pairs.
///
/// # Safety
/// - The communicator has a rank `peer`.
#[kernel]
pub unsafe fn probe_gdaki_put_signal(comm: Comm, peer: u32, to: Window<u8>, from: Window<u8>, bytes: usize) {
    let gin = Gin::<Gdaki>::with_backend(&comm, ContextId::new(0));
    // Safety: guaranteed by the kernel's caller.
    let peer = unsafe { Rank::new_unchecked(peer) };
    let put = gin.put(peer, to.range(0, bytes), from.range(0, bytes));
    if put.signal(SignalId::new(0).inc()).issue(&Thread).is_err() {
        sys::trap();
    }
}

/// Does the same as [`probe_put_value`] by device-driven NIC queue pairs.
///
/// # Safety
/// - The communicator has a rank `peer`.
#[kernel]
pub unsafe fn probe_gdaki_put_value(comm: Comm, peer: u32, to: Window<u64>, index: usize, value: u64) {
    let gin = Gin::<Gdaki>::with_backend(&comm, ContextId::new(0));
    // Safety: guaranteed by the kernel's caller.
    let peer = unsafe { Rank::new_unchecked(peer) };
    if gin.put_value(peer, to.at(index), value).issue(&Thread).is_err() {
        sys::trap();
    }
}

/// Does the same as [`probe_flush`] by device-driven NIC queue pairs.
///
/// # Safety
/// - The handles are valid.
#[kernel]
pub unsafe fn probe_gdaki_flush(comm: Comm, deadline: Deadline) {
    let gin = Gin::<Gdaki>::with_backend(&comm, ContextId::new(0));
    if gin.flush(&Block, deadline).is_err() {
        sys::trap();
    }
}
