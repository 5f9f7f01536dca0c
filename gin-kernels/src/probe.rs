// SPDX-License-Identifier: MIT OR Apache-2.0
//! Single operations of each back end and by loads and stores, to look at what the compiler makes of them.
//!
//! Their shapes are those that NCCL's figures are known for: put and put_value by one thread, flush and wait by a
//! block, one back end compiled in, bounds checks on.

use gin_device::prelude::*;
use gin_device::sys;

/// One thread puts `bytes` bytes to world rank `peer` and raises signal 0; ends the grid if that fails.
///
/// # Safety
/// - The communicator has a rank `peer`.
#[kernel]
pub unsafe fn probe_put_signal(comm: Comm, peer: u32, to: Window<u8>, from: Window<u8>, bytes: usize) {
    let gin = Gin::<Proxy>::with_backend(&comm, ContextId::new(0));
    // Safety: the kernel's promise.
    let peer = unsafe { Rank::new_unchecked(peer) };
    let put = gin.put(peer, to.range(0, bytes), from.range(0, bytes));
    if put.signal(SignalId::new(0).inc()).issue(&Thread).is_err() {
        sys::trap();
    }
}

/// One thread puts `len` elements and raises signal 0.
///
/// # Safety
/// - None beyond the handles being right.
#[kernel]
pub unsafe fn probe_put_report(comm: Comm, to: Window<u32>, from: Window<u32>, len: usize) {
    let gin = Gin::<Proxy>::with_backend(&comm, ContextId::new(0));
    let put = gin.put(comm.world().right(), to.range(0, len), from.range(0, len));
    if let Err(fault) = put.signal(SignalId::new(0).inc()).issue(&Thread) {
        comm.report(fault);
    }
}

/// One thread puts a value to world rank `peer`; ends the grid if that fails.
///
/// # Safety
/// - The communicator has a rank `peer`.
#[kernel]
pub unsafe fn probe_put_value(comm: Comm, peer: u32, to: Window<u64>, index: usize, value: u64) {
    let gin = Gin::<Proxy>::with_backend(&comm, ContextId::new(0));
    // Safety: the kernel's promise.
    let peer = unsafe { Rank::new_unchecked(peer) };
    if gin.put_value(peer, to.at(index), value).issue(&Thread).is_err() {
        sys::trap();
    }
}

/// A block flushes.
///
/// # Safety
/// - None beyond the handles being right.
#[kernel]
pub unsafe fn probe_flush(comm: Comm, deadline: Deadline) {
    let gin = Gin::<Proxy>::with_backend(&comm, ContextId::new(0));
    if gin.flush(&Block, deadline).is_err() {
        sys::trap();
    }
}

/// A block waits for signal 0.
///
/// # Safety
/// - None beyond the handles being right.
#[kernel]
pub unsafe fn probe_wait_signal(comm: Comm, least: u64, deadline: Deadline) {
    let gin = Gin::<Proxy>::with_backend(&comm, ContextId::new(0));
    if gin.wait_signal(&Block, SignalId::new(0), least, deadline).is_err() {
        sys::trap();
    }
}

/// One thread puts `bytes` bytes to world rank `peer` by loads and stores and raises signal 0; ends the grid if that fails.
///
/// # Safety
/// - The communicator has a rank `peer`.
#[kernel]
pub unsafe fn probe_lsa_put_signal(comm: Comm, peer: u32, to: Window<u8>, from: Window<u8>, bytes: usize) {
    let gin = Gin::new(&comm, ContextId::new(0)).route(Route::Lsa);
    // Safety: the kernel's promise.
    let peer = unsafe { Rank::new_unchecked(peer) };
    let put = gin.put(peer, to.range(0, bytes), from.range(0, bytes));
    if put.signal(SignalId::new(0).inc()).issue(&Thread).is_err() {
        sys::trap();
    }
}

/// A warp meets the LSA team at barrier 0, with loads and stores.
///
/// # Safety
/// - None beyond the handles being right.
#[kernel]
pub unsafe fn probe_lsa_barrier(comm: Comm, deadline: Deadline) {
    let gin = Gin::new(&comm, ContextId::new(0)).route(Route::Lsa);
    let outcome = BarrierSession::new(&gin, BarrierTeam::Lsa, 0)
        .and_then(|mut barrier| barrier.sync(&Warp, Fence::Put, deadline));
    if outcome.is_err() {
        sys::trap();
    }
}

/// As [`probe_put_signal`], where the kernel drives the NIC.
///
/// # Safety
/// - The communicator has a rank `peer`.
#[kernel]
pub unsafe fn probe_gdaki_put_signal(comm: Comm, peer: u32, to: Window<u8>, from: Window<u8>, bytes: usize) {
    let gin = Gin::<Gdaki>::with_backend(&comm, ContextId::new(0));
    // Safety: the kernel's promise.
    let peer = unsafe { Rank::new_unchecked(peer) };
    let put = gin.put(peer, to.range(0, bytes), from.range(0, bytes));
    if put.signal(SignalId::new(0).inc()).issue(&Thread).is_err() {
        sys::trap();
    }
}

/// As [`probe_put_value`], where the kernel drives the NIC.
///
/// # Safety
/// - The communicator has a rank `peer`.
#[kernel]
pub unsafe fn probe_gdaki_put_value(comm: Comm, peer: u32, to: Window<u64>, index: usize, value: u64) {
    let gin = Gin::<Gdaki>::with_backend(&comm, ContextId::new(0));
    // Safety: the kernel's promise.
    let peer = unsafe { Rank::new_unchecked(peer) };
    if gin.put_value(peer, to.at(index), value).issue(&Thread).is_err() {
        sys::trap();
    }
}

/// As [`probe_flush`], where the kernel drives the NIC.
///
/// # Safety
/// - None beyond the handles being right.
#[kernel]
pub unsafe fn probe_gdaki_flush(comm: Comm, deadline: Deadline) {
    let gin = Gin::<Gdaki>::with_backend(&comm, ContextId::new(0));
    if gin.flush(&Block, deadline).is_err() {
        sys::trap();
    }
}
