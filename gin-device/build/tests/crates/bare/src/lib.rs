// SPDX-License-Identifier: MIT OR Apache-2.0

//! Kernels that use nothing of gin, written as `#[kernel]` would expand.

#![no_std]

use core::arch::{asm, global_asm};

global_asm!("// gin.launch_bounds scale 256 2");
global_asm!(".shared .align 16 .b8 bare_static[512];");

#[inline(always)]
fn fixed() -> *mut u32 {
    let address: u64;
    // SAFETY: takes the address of a variable.
    unsafe {
        asm!("{{ .reg .u64 t; mov.u64 t, bare_static; cvta.shared.u64 {0}, t; }}", out(reg64) address,
            options(nostack, nomem, preserves_flags));
    }
    address as *mut u32
}

/// # Safety
/// `value` points to one word.
#[unsafe(no_mangle)]
pub unsafe extern "gpu-kernel" fn scale(value: *mut u32, factor: u32) {
    let (a, b, c) = (helper::dynamic(), helper::fixed(), fixed());
    // SAFETY: each points to shared memory of at least a word.
    unsafe {
        a.write_volatile(*value);
        b.write_volatile(factor);
        c.write_volatile(1);
        *value = a.read_volatile() * b.read_volatile() + c.read_volatile();
    }
}

/// # Safety
/// `values` points to `count` words.
#[unsafe(no_mangle)]
pub unsafe extern "gpu-kernel" fn plain(values: *mut u32, count: usize) {
    // SAFETY: guaranteed by the caller. The bounds check must leave no message behind.
    let values = unsafe { core::slice::from_raw_parts_mut(values, count) };
    values[3] = 2;
}

#[cfg(feature = "more")]
#[unsafe(no_mangle)]
pub unsafe extern "gpu-kernel" fn more() {}

/// A device function for other modules.
///
/// # Safety
/// `word` points to one word.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bare_add(value: u64, word: *mut u64) -> u64 {
    // SAFETY: guaranteed by the caller.
    unsafe {
        *word += value;
        *word * 3
    }
}
