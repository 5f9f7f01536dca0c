// SPDX-License-Identifier: MIT OR Apache-2.0

//! Kernels with mistakes that a build finds.

#![no_std]

use core::fmt::Write;
use core::sync::atomic::{AtomicU32, Ordering};

use gin_device::prelude::*;
use gin_device::sys::{GlobalWord, Word};

gin_device::shared! { static PARTS: [u64; 32]; }

/// # Safety
/// - `word` points to a word.
#[kernel]
pub unsafe fn counts_by_core(word: *mut u32) {
    // SAFETY: guaranteed by the caller.
    unsafe { AtomicU32::from_ptr(word) }.fetch_add(1, Ordering::Relaxed);
}

/// # Safety
/// - `which` is less than 32.
#[kernel]
pub unsafe fn takes_shared_for_global(which: usize) {
    // SAFETY: guaranteed by the caller, but the word is not in global memory.
    let word = unsafe { GlobalWord::new(PARTS.as_mut_ptr().cast::<u64>().add(which) as u64) };
    word.red_add_relaxed_gpu(1);
}

/// # Safety
/// - `out` points to enough bytes.
#[kernel]
pub unsafe fn formats(out: *mut u8, number: u32) {
    let _ = write!(Text(out), "number {number}");
}

struct Text(*mut u8);

impl Write for Text {
    fn write_str(&mut self, text: &str) -> core::fmt::Result {
        for byte in text.bytes() {
            // SAFETY: guaranteed by the caller of the kernel.
            unsafe { self.0.write_volatile(byte) };
        }
        Ok(())
    }
}

static SQUARES: [u32; 8] = [0, 1, 4, 9, 16, 25, 36, 49];

/// Reads a constant, which is no mistake.
///
/// # Safety
/// - `out` points to a word.
#[kernel]
pub unsafe fn looks_up(out: *mut u32, which: usize) {
    // SAFETY: guaranteed by the caller.
    unsafe { out.write(SQUARES[which % 8]) };
}

/// # Safety
/// - `out` points to a word; `which` is less than 16.
#[kernel]
pub unsafe fn indexes_by_value(table: [u64; 16], out: *mut u64, which: usize) {
    // SAFETY: guaranteed by the caller.
    unsafe { out.write(table[which]) };
}
