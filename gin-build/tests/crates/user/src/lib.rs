// SPDX-License-Identifier: MIT OR Apache-2.0

//! A user's kernels: only the device crate and its attribute, no feature and no panic handler.

#![no_std]

use gin_device::prelude::*;

/// A parameter and an element of a type of the crate.
#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
#[bytemuck(crate = "gin_device::bytemuck")]
pub struct Range {
    start: u32,
    len: u32,
}

shared! { static SCRATCH: [u32; 32]; }

/// Passes the barrier of the grid, then copies a range that `ranges` holds for each block.
///
/// # Safety
/// - The handles are valid; `word` is 0.
#[kernel]
pub unsafe fn copy_ranges(comm: Comm, ranges: Window<Range>, whole: Range, word: *mut u64, deadline: Deadline) {
    // SAFETY: guaranteed by the caller.
    let mut barrier = unsafe { GridBarrier::new(&comm, word) };
    if let Err(fault) = barrier.sync(deadline) {
        return comm.report(fault);
    }
    let mine = ranges.read((block_in_grid() % grid_dim().count()) as usize);
    if thread_in_block() < mine.len.min(whole.len) && lane() < WARP_SIZE {
        ranges.write(block_index().x as usize, Range { start: block_dim().x + thread_index().y, ..mine });
    }
}

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

/// Prints a line of each kind of value.
///
/// # Safety
/// - The handles are valid.
#[kernel]
pub unsafe fn prints(comm: Comm, words: Window<u32>) {
    gin_println!(comm, "{} {:#x} {} {}", words.len(), words.read(0), 0.5_f32, "a text");
}
