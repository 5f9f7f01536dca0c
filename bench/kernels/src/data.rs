// SPDX-License-Identifier: MIT OR Apache-2.0
//! The data of transfers, and checks of its arrival.

use crate::{MARKS, Marks, WRONG};
use gin_device::prelude::*;
use gin_device::sys::data::{load_relaxed_sys_u64, store_weak_u64};

/// Returns word `index` of the data with this seed. All bits change from word to word and from seed to seed.
#[inline(always)]
#[must_use]
pub const fn value(seed: u64, index: u64) -> u64 {
    let mixed = (index ^ seed.rotate_left(40)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (mixed ^ (mixed >> 29)).wrapping_mul(0xbf58_476d_1ce4_e5b9)
}

/// Returns the calling thread's words among `len`, which all threads of the grid share.
#[inline(always)]
fn mine(len: usize) -> impl Iterator<Item = usize> {
    let (threads, blocks) = (Block.size() as usize, grid_dim().count() as usize);
    (block_in_grid() as usize * threads + Block.rank() as usize..len).step_by(threads * blocks)
}

/// Writes the data of a seed to `len` words, by all threads of the grid.
///
/// # Safety
/// - `to` has `len` words, with no other users meanwhile.
#[inline(always)]
pub(crate) unsafe fn write(to: *mut u64, len: usize, seed: u64) {
    for index in mine(len) {
        // Safety: guaranteed by the caller.
        unsafe { store_weak_u64(to.wrapping_add(index), value(seed, index as u64)) };
    }
    Block.sync();
}

/// Returns how many of the calling thread's words differ from the data of a seed.
///
/// # Safety
/// - `from` has `len` words, with no writers meanwhile.
#[inline(always)]
pub(crate) unsafe fn differing(from: *const u64, len: usize, seed: u64) -> u64 {
    let mut wrong = 0;
    for index in mine(len) {
        // Safety: guaranteed by the caller.
        let found = unsafe { load_relaxed_sys_u64(from.wrapping_add(index)) };
        wrong += u64::from(found != value(seed, index as u64));
    }
    wrong
}

/// Writes the data of a seed to `len` words.
///
/// # Safety
/// - `to` has `len` words, with no other users meanwhile.
#[kernel]
pub unsafe fn bench_fill(to: *mut u64, len: usize, seed: u64) {
    // Safety: guaranteed by the kernel's caller.
    unsafe { write(to, len, seed) };
}

/// Counts the words that differ from the data of a seed, in the marks of each block.
///
/// # Safety
/// - `from` has `len` words, with no writers meanwhile. `out` has [`MARKS`] words for each block.
#[kernel]
pub unsafe fn bench_check(from: *const u64, len: usize, seed: u64, out: *mut u64) {
    const { assert!(MARKS > WRONG) };
    // Safety: guaranteed by the kernel's caller.
    let marks = unsafe { Marks::new(out) };
    // Safety: guaranteed by the kernel's caller.
    let wrong = unsafe { differing(from, len, seed) };
    marks.count(WRONG, wrong);
}

/// Writes the value of signal 0 of context 0 to the first word of `out`, by one thread.
///
/// # Safety
/// - `out` has a word.
#[kernel]
pub unsafe fn bench_signal(comm: Comm, out: *mut u64) {
    let gin = Gin::new(&comm, ContextId::new(0));
    match gin.read_signal(SignalId::new(0)) {
        // Safety: guaranteed by the kernel's caller.
        Ok(value) => unsafe { store_weak_u64(out, value) },
        Err(fault) => comm.report(fault),
    }
}

/// Waits until all posts in context 0 are complete, by one thread.
///
/// # Safety
/// - The handle is valid.
#[kernel]
pub unsafe fn bench_flush(comm: Comm, deadline: Deadline) {
    let gin = Gin::<Proxy>::with_backend(&comm, ContextId::new(0));
    if let Err(fault) = gin.flush(&Thread, deadline) {
        comm.report(fault);
    }
}
