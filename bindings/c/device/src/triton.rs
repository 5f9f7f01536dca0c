// SPDX-License-Identifier: MIT OR Apache-2.0
//! Functions for kernels of Triton, which `gincomm.triton` calls.
//!
//! A program instance of Triton is a block. A call that is no function of elements runs in all of its threads, so each
//! function here is a call of the whole block, and its result is the same in all threads: Triton takes a scalar for
//! uniform, and branches around barriers by it.
//!
//! Each function returns one word, because Triton has no functions that return structures.

use crate::ops::comm_at;
use crate::word;
use gin_device::Fault;
use gin_device::prelude::{Block, Coop};

/// The word of [`AnyCoop`](crate::AnyCoop) for the block.
const BLOCK: u64 = 2;

/// Writes `bytes` bytes of an own window to a window of the peer.
///
/// # Safety
/// - As the module's docs say.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn gin_triton_put(
    comm: u64,
    context: u32,
    options: u32,
    peer: u32,
    counter: u32,
    to: u64,
    to_offset: u64,
    from: u64,
    from_offset: u64,
    bytes: u64,
    signal: u64,
    amount: u64,
    deadline: u64,
) -> u64 {
    // Safety: the caller's promise, here and below.
    unsafe {
        crate::gin_put(
            comm,
            context,
            options,
            BLOCK,
            peer,
            counter,
            to,
            to_offset,
            from,
            from_offset,
            bytes,
            0,
            signal,
            amount,
            deadline,
        )
    }
}

/// Writes a value of 1, 2, 4 or 8 bytes to a window of the peer.
///
/// # Safety
/// - As the module's docs say.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn gin_triton_put_value(
    comm: u64,
    context: u32,
    options: u32,
    peer: u32,
    bytes: u32,
    to: u64,
    to_offset: u64,
    value: u64,
    signal: u64,
    amount: u64,
    deadline: u64,
) -> u64 {
    unsafe {
        crate::gin_put_value(
            comm, context, options, BLOCK, peer, bytes, to, to_offset, value, 0, signal, amount, deadline,
        )
    }
}

/// Reads `bytes` bytes of a window of the peer into an own window.
///
/// # Safety
/// - As the module's docs say.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn gin_triton_get(
    comm: u64,
    context: u32,
    options: u32,
    peer: u32,
    from: u64,
    from_offset: u64,
    to: u64,
    to_offset: u64,
    bytes: u64,
    deadline: u64,
) -> u64 {
    unsafe { crate::gin_get(comm, context, options, BLOCK, peer, from, from_offset, to, to_offset, bytes, deadline) }
}

/// Raises a signal of the peer.
///
/// # Safety
/// - As the module's docs say.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn gin_triton_signal(
    comm: u64,
    context: u32,
    options: u32,
    peer: u32,
    signal: u64,
    amount: u64,
    deadline: u64,
) -> u64 {
    unsafe { crate::gin_signal(comm, context, options, BLOCK, peer, 0, signal, amount, deadline) }
}

/// Waits until a signal is at or past `least`.
///
/// # Safety
/// - As the module's docs say.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn gin_triton_wait_signal(
    comm: u64,
    context: u32,
    options: u32,
    signal: u64,
    least: u64,
    deadline: u64,
) -> u64 {
    unsafe { crate::gin_wait_signal(comm, context, options, BLOCK, 0, signal, least, gin_abi::SIGNAL_BITS, deadline) }
}

/// Waits until a counter is at or past `least`.
///
/// # Safety
/// - As the module's docs say.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn gin_triton_wait_counter(
    comm: u64,
    context: u32,
    options: u32,
    counter: u32,
    least: u64,
    deadline: u64,
) -> u64 {
    unsafe { crate::gin_wait_counter(comm, context, options, BLOCK, counter, least, gin_abi::COUNTER_BITS, deadline) }
}

/// Waits until all earlier operations of the context are complete.
///
/// # Safety
/// - As the module's docs say.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn gin_triton_flush(comm: u64, context: u32, options: u32, deadline: u64) -> u64 {
    unsafe { crate::gin_flush(comm, context, options, BLOCK, deadline) }
}

/// Meets the ranks of a team (0 world, 1 rail, 2 LSA) in barrier `index`; see [`gin_barrier`](crate::gin_barrier).
///
/// # Safety
/// - As the module's docs say.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn gin_triton_barrier(
    comm: u64,
    context: u32,
    options: u32,
    team: u32,
    index: u32,
    fence: u32,
    deadline: u64,
) -> u64 {
    unsafe { crate::gin_barrier(comm, context, options, BLOCK, team, index, fence, deadline) }
}

/// Lets one thread of the block read a word, because two threads may read different values. Returns the word in all
/// threads, after their barrier: what the one thread acquired is visible to all.
///
/// # Safety
/// - As the module's docs say.
#[inline(always)]
unsafe fn read(comm: u64, read: impl FnOnce() -> crate::Value) -> u64 {
    let mut value = 0;
    let led = Block.lead(|| {
        let read = read();
        value = read.value;
        if read.fault == 0 { Ok(()) } else { Err(word::fault(read.fault)) }
    });
    match led {
        Ok(()) => Block.broadcast(value, 0),
        Err(fault) => {
            unsafe { report(comm, fault) };
            0
        }
    }
}

/// Reports the fault that all threads of the block have.
#[inline(always)]
unsafe fn report(comm: u64, fault: Fault) {
    if Block.elect() {
        unsafe { comm_at(comm) }.report(fault);
    }
}

/// Returns the value of a signal. Reports a fault, and returns 0 then.
///
/// # Safety
/// - As the module's docs say.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn gin_triton_read_signal(comm: u64, context: u32, options: u32, signal: u64) -> u64 {
    unsafe { read(comm, || crate::gin_read_signal(comm, context, options, 0, signal, gin_abi::SIGNAL_BITS)) }
}

/// Returns the value of a counter. Reports a fault, and returns 0 then.
///
/// # Safety
/// - As the module's docs say.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn gin_triton_read_counter(comm: u64, context: u32, options: u32, counter: u32) -> u64 {
    unsafe { read(comm, || crate::gin_read_counter(comm, context, options, counter, gin_abi::COUNTER_BITS)) }
}

/// Returns the address at which this rank's kernels load and store the byte at `offset` of a peer's window; 0 if they
/// do not reach it.
///
/// # Safety
/// - As the module's docs say.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn gin_triton_peer_pointer(comm: u64, window: u64, offset: u64, peer: u32) -> u64 {
    // No thread of the device changes the table, so all threads get the same address.
    unsafe { crate::gin_peer_pointer(comm, window, offset, peer) }.value
}

/// Reports a fault to the host, if there is one. It ends every wait of the communicator, on all ranks. Returns the
/// fault.
///
/// # Safety
/// - As the module's docs say; `fault` is a fault of this kernel, the same in all threads.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn gin_triton_report(comm: u64, fault: u64) -> u64 {
    if fault != 0 {
        unsafe { report(comm, word::fault(fault)) };
    }
    fault
}
