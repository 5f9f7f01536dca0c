// SPDX-License-Identifier: MIT OR Apache-2.0
//! Shared memory of a block.
//!
//! | kind | made by | length |
//! | --- | --- | --- |
//! | static | [`shared!`](crate::shared!) at module level; one copy per block | that of the declaration |
//! | dynamic | the launch; see [`dynamic`] | as the launch asked |
//!
//! Both are plain memory: threads order their accesses with barriers. A GPU initialises neither.
//!
//! ```
//! gin_device::shared! { static TILE: [f32; 256]; }
//!
//! /// Returns the first element of the block's tile.
//! fn tile() -> *mut f32 {
//!     TILE.as_mut_ptr().cast()
//! }
//! ```

#[cfg(target_arch = "nvptx64")]
use core::arch::{asm, global_asm};

#[cfg(target_arch = "nvptx64")]
global_asm!(".extern .shared .align 16 .b8 gin_dynamic_shared[];");

/// Returns the address of the block's dynamic shared memory: [`dynamic_bytes`] bytes, aligned to 16.
#[inline(always)]
pub fn dynamic() -> *mut u8 {
    #[cfg(target_arch = "nvptx64")]
    {
        let address: u64;
        // Safety: takes the address of a variable.
        unsafe {
            asm!(
                "{{ .reg .u64 gin_t; mov.u64 gin_t, gin_dynamic_shared; cvta.shared.u64 {p}, gin_t; }}",
                p = out(reg64) address, options(nomem, nostack, preserves_flags),
            );
        }
        address as usize as *mut u8
    }
    #[cfg(not(target_arch = "nvptx64"))]
    match crate::exec::executor() {
        Some(executor) => (executor.dynamic_shared)().0,
        None => core::ptr::NonNull::<u128>::dangling().as_ptr().cast(),
    }
}

/// Returns the size of the block's dynamic shared memory in bytes.
#[inline(always)]
pub fn dynamic_bytes() -> usize {
    #[cfg(target_arch = "nvptx64")]
    {
        let bytes: u32;
        // Safety: reads a special register.
        unsafe {
            asm!(
                "mov.u32 {b}, %dynamic_smem_size;",
                b = out(reg32) bytes, options(nomem, nostack, preserves_flags),
            );
        }
        bytes as usize
    }
    #[cfg(not(target_arch = "nvptx64"))]
    crate::exec::executor().map_or(0, |executor| (executor.dynamic_shared)().1)
}

/// Returns the block's copy of a declaration by `shared!`, on a CPU. `key` is unique to the declaration.
#[cfg(not(target_arch = "nvptx64"))]
#[doc(hidden)]
pub fn cpu(key: usize, bytes: usize, align: usize) -> *mut u8 {
    match crate::exec::executor() {
        Some(executor) => (executor.shared)(crate::exec::SharedKey { key, bytes, align }),
        None => panic!("shared memory needs an executor: launch the kernel on the virtual GPU"),
    }
}
