// SPDX-License-Identifier: MIT OR Apache-2.0

//! A user's kernel: only the device crate and its attribute, no feature and no panic handler.

#![no_std]

use gin_device::prelude::*;

gin_device::shared! { static SCRATCH: [u32; 32]; }

/// Keeps a word in shared memory, puts `len` elements to the right neighbour and raises signal 0 there.
///
/// # Safety
/// - The handles are valid.
#[kernel(launch_bounds(128, 4))]
pub unsafe fn pass_on(comm: Comm, to: Window<u32>, from: Window<u32>, len: usize) {
    let scratch = SCRATCH.as_mut_ptr().cast::<u32>();
    // SAFETY: the first of 32 words.
    unsafe { scratch.write_volatile(1) };
    let gin = Gin::<Proxy>::with_backend(&comm, ContextId::new(0));
    let put = gin.put(comm.world().right(), to.range(0, len), from.range(0, len));
    if let Err(fault) = put.signal(SignalId::new(0).inc()).issue(&Thread) {
        comm.report(fault);
    }
}
