// SPDX-License-Identifier: MIT OR Apache-2.0
//! Kernels of one operation, whose instructions and registers tests and tables read.

use gin_nccl_device::prelude::*;

/// # Safety
/// - As for `ring`; only compiled.
#[kernel]
pub unsafe fn probe_put_signal(comm: Comm, to: Window<u64>, from: Window<u64>, peer: u32, len: usize) {
    let gin = Gin::<Proxy>::with_backend(&comm, ContextId::new(0));
    // Safety: the caller's promise.
    let peer = unsafe { Rank::new_unchecked(peer) };
    let put = gin.put(peer, to.range(0, len), from.range(0, len)).signal(SignalId::new(0).inc());
    if let Err(fault) = put.issue(&Thread) {
        comm.report(fault);
    }
}

/// # Safety
/// - As above.
#[kernel]
pub unsafe fn probe_put_signal_gdaki(comm: Comm, to: Window<u64>, from: Window<u64>, peer: u32, len: usize) {
    let gin = Gin::<Gdaki>::with_backend(&comm, ContextId::new(0));
    // Safety: the caller's promise.
    let peer = unsafe { Rank::new_unchecked(peer) };
    let put = gin.put(peer, to.range(0, len), from.range(0, len)).signal(SignalId::new(0).inc());
    if let Err(fault) = put.issue(&Thread) {
        comm.report(fault);
    }
}

/// # Safety
/// - As above.
#[kernel]
pub unsafe fn probe_wait_signal(comm: Comm, least: u64, deadline: Deadline) {
    let gin = Gin::<Proxy>::with_backend(&comm, ContextId::new(0));
    if let Err(fault) = gin.wait_signal(&Thread, SignalId::new(0), least, deadline) {
        comm.report(fault);
    }
}

/// # Safety
/// - As above.
#[kernel]
pub unsafe fn probe_get(comm: Comm, to: Window<u64>, from: Window<u64>, peer: u32, len: usize) {
    let gin = Gin::<Proxy>::with_backend(&comm, ContextId::new(0));
    // Safety: the caller's promise.
    let peer = unsafe { Rank::new_unchecked(peer) };
    if let Err(fault) = gin.get(peer, to.range(0, len), from.range(0, len)).issue(&Thread) {
        comm.report(fault);
    }
}

/// # Safety
/// - As above.
#[kernel]
pub unsafe fn probe_all(comm: Comm, words: Window<u64>, peer: u32, deadline: Deadline) {
    let gin = Gin::new(&comm, ContextId::new(0));
    // Safety: the caller's promise.
    let peer = unsafe { Rank::new_unchecked(peer) };
    let (signal, counter) = (SignalId::new(0), CounterId::new(0));
    let calls = || -> Result<(), Fault> {
        gin.put_value(peer, words.at(0), 1).signal(signal.add(2)).issue(&Warp)?;
        gin.flush(&Warp)?;
        let seen = gin.read_signal(signal)? + gin.read_counter(counter.bits(32))?;
        gin.wait_counter(&Warp, counter, seen, deadline)?;
        gin.reset_signal(signal)?;
        gin.reset_counter(counter)?;
        // Safety: the caller's promise.
        unsafe { words.peer_ptr(peer)?.write(seen) };
        Ok(())
    };
    if let Err(fault) = calls() {
        comm.report(fault);
    }
}
