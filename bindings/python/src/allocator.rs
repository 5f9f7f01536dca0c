// SPDX-License-Identifier: MIT OR Apache-2.0
//! The functions of torch's pluggable allocator.

use crate::dlpack::dlpack_device;
use crate::guard::check_process;
use crate::memory::GIVEN;
use crate::rank::device as rank_device;
use gin_boot::lock;
use gin_gpu::{Memory, MemoryKind};
use std::ffi::{c_int, c_void};

fn give(bytes: isize, ordinal: c_int) -> Result<u64, String> {
    let bytes = u64::try_from(bytes).map_err(|_| "a length is not negative".to_owned())?;
    let device = rank_device().ok_or("gincomm.init() makes the rank whose memory it is: call it before")?;
    let (_, own) = dlpack_device(&*device);
    if own != ordinal {
        return Err(format!("the rank of this process is on device {own}"));
    }
    let memory = Memory::shared(&device, MemoryKind::Device, bytes).map_err(|error| error.to_string())?;
    let address = memory.address();
    lock(&GIVEN).insert(address, memory);
    Ok(address)
}

/// Allocates zeroed memory on the device of this process's rank: the function that torch's `CUDAPluggableAllocator`
/// takes. Returns null if there is none, and writes the reason to standard error, since torch asks for no other.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn gin_torch_alloc(bytes: isize, ordinal: c_int, _stream: *mut c_void) -> *mut c_void {
    match give(bytes, ordinal) {
        Ok(address) => std::ptr::with_exposed_provenance_mut(address as usize),
        Err(reason) => {
            eprintln!("gin_torch_alloc: no {bytes} bytes on device {ordinal}: {reason}");
            std::ptr::null_mut()
        }
    }
}

/// Frees memory of [`gin_torch_alloc`] when no window has it any more.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn gin_torch_free(address: *mut c_void, _bytes: isize, _ordinal: c_int, _stream: *mut c_void) {
    let memory = lock(&GIVEN).remove(&(address.expose_provenance() as u64));
    if check_process().is_err() {
        std::mem::forget(memory);
    }
}
