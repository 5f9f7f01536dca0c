// SPDX-License-Identifier: MIT OR Apache-2.0
//! The position of a thread of the virtual GPU, and the accesses to memory of code that inlines, for kernels in C and
//! C++.

use crate::AnyCoop;
use core::ffi::{CStr, c_char};
use gin_device::prelude::{Coop, block_dim, block_index, grid_dim, thread_index};
use gin_device::sys::data::{
    load_relaxed_sys_u8, load_relaxed_sys_u32, load_relaxed_sys_u64, store_weak_u8, store_weak_u16, store_weak_u32,
    store_weak_u64,
};
use gin_device::sys::{Global, GlobalWord, Memory, Word};

/// The indices and extents of a thread, as CUDA's built-in variables.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Position {
    /// `threadIdx`.
    pub thread_index: [u32; 3],
    /// `blockDim`.
    pub block_dim: [u32; 3],
    /// `blockIdx`.
    pub block_index: [u32; 3],
    /// `gridDim`.
    pub grid_dim: [u32; 3],
}

/// Returns the position of the calling thread of a kernel on the virtual GPU.
#[unsafe(no_mangle)]
pub extern "C-unwind" fn gin_virtual_position() -> Position {
    let [thread_index, block_dim, block_index, grid_dim] =
        [thread_index(), block_dim(), block_index(), grid_dim()].map(|dim| [dim.x, dim.y, dim.z]);
    Position { thread_index, block_dim, block_index, grid_dim }
}

/// Waits for all threads of a coop, and returns 1 in all of them if one of them brings a `bit` that is not 0, else 0.
/// Returns 1 at once if the word is no group.
///
/// # Safety
/// - As the module's docs say of `coop`.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn gin_virtual_any(coop: u64, bit: u32) -> u32 {
    // Safety: the caller's promise.
    unsafe { AnyCoop::new(coop) }.map_or(1, |coop| coop.sync_or(bit != 0).into())
}

/// Ends the calling kernel with an error that has this text.
///
/// # Safety
/// - `text` ends with a zero.
///
/// # Panics
/// Always: that is how a thread of the virtual GPU ends its grid.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn gin_virtual_fail(text: *const c_char) -> ! {
    // Safety: the caller's promise.
    let text = unsafe { CStr::from_ptr(text) };
    panic!("exception: {}", text.to_str().unwrap_or("its text is not UTF-8"));
}

/// Makes the access with this number in the list of `gin_inline.cuh`, and returns what it loads, else 0.
///
/// # Safety
/// - Except for a fence and the cycles, `address` is valid for the access, and a multiple of its size.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn gin_virtual_access(access: u32, address: u64, value: u64) -> u64 {
    let at = address as usize;
    // Safety: the caller's promise, here and below.
    let word = || unsafe { GlobalWord::new(address) };
    unsafe {
        match access {
            0 => return word().load_relaxed_sys(),
            1 => return word().load_relaxed_gpu(),
            2 => word().red_add_relaxed_sys(value),
            3 => word().red_add_relaxed_gpu(value),
            4 => return word().add_relaxed_cta(value),
            5 => Global::fence_acquire_sys(),
            6 => Global::fence_release_sys(),
            7 => Global::fence_release_gpu(),
            8 => return load_relaxed_sys_u8(at as *const u8).into(),
            9 => return load_relaxed_sys_u32(at as *const u32).into(),
            10 => return load_relaxed_sys_u64(at as *const u64),
            11 => store_weak_u8(at as *mut u8, value as u8),
            12 => store_weak_u16(at as *mut u16, value as u16),
            13 => store_weak_u32(at as *mut u32, value as u32),
            14 => store_weak_u64(at as *mut u64, value),
            15 => return gin_device::sys::cycles(),
            _ => gin_device::sys::trap(),
        }
    }
    0
}
