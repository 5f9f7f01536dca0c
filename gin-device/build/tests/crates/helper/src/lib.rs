// SPDX-License-Identifier: MIT OR Apache-2.0

//! A library of device code: shared memory declared outside the crate that holds the kernels.

#![no_std]
#![feature(asm_experimental_arch)]

use core::arch::{asm, global_asm};

global_asm!(".extern .shared .align 16 .b8 helper_dynamic[];");
global_asm!(".shared .align 16 .b8 helper_static[256];");

/// Returns the start of the shared memory that the launch requested.
#[inline(always)]
pub fn dynamic() -> *mut u32 {
    let address: u64;
    // SAFETY: takes the address of a variable.
    unsafe {
        asm!("{{ .reg .u64 t; mov.u64 t, helper_dynamic; cvta.shared.u64 {0}, t; }}", out(reg64) address,
            options(nostack, nomem, preserves_flags));
    }
    address as *mut u32
}

/// Returns the start of this crate's 256 bytes.
#[inline(always)]
pub fn fixed() -> *mut u32 {
    let address: u64;
    // SAFETY: takes the address of a variable.
    unsafe {
        asm!("{{ .reg .u64 t; mov.u64 t, helper_static; cvta.shared.u64 {0}, t; }}", out(reg64) address,
            options(nostack, nomem, preserves_flags));
    }
    address as *mut u32
}

#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    loop {}
}
