// SPDX-License-Identifier: MIT OR Apache-2.0
//! Memory of gin in tensors, which ranks in other processes can map: of windows, and what torch's pluggable allocator
//! gets from gin.

use crate::process::device;
use gin_boot::lock;
use gin_gpu::{Device, Memory, MemoryKind, MemorySlice};
use std::collections::BTreeMap;
use std::ffi::{c_int, c_void};
use std::sync::{Arc, Mutex, Weak};

/// The memory that was given to the program, by address.
static GIVEN: Mutex<BTreeMap<u64, Arc<Memory>>> = Mutex::new(BTreeMap::new());

/// Other memory that tensors have, by address.
static NOTED: Mutex<BTreeMap<u64, Weak<Memory>>> = Mutex::new(BTreeMap::new());

/// Has [`given`] find memory, as long as it exists.
pub(crate) fn note(memory: &Arc<Memory>) {
    let mut noted = lock(&NOTED);
    noted.retain(|_, memory| memory.strong_count() > 0);
    noted.insert(memory.address(), Arc::downgrade(memory));
}

/// Returns the part of gin's memory at an address, if it is of this device.
pub(crate) fn given(device: &Arc<dyn Device>, address: u64, bytes: u64) -> Option<MemorySlice> {
    let part = |memory: &Arc<Memory>| {
        let offset = address - memory.address();
        let part = memory.slice(offset..offset.checked_add(bytes)?).ok()?;
        Arc::ptr_eq(memory.device(), device).then_some(part)
    };
    let given = lock(&GIVEN).range(..=address).next_back().and_then(|(_, memory)| part(memory));
    given.or_else(|| part(&lock(&NOTED).range(..=address).rev().find_map(|(_, memory)| memory.upgrade())?))
}

fn give(bytes: isize, ordinal: c_int) -> Result<u64, String> {
    let bytes = u64::try_from(bytes).map_err(|_| "a length is not negative".to_owned())?;
    let device = device().ok_or("gincomm.init() makes the rank whose memory it is: call it before")?;
    let (_, own) = crate::tensor::dlpack_device(&*device);
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
    if crate::guard::check_process().is_err() {
        std::mem::forget(memory);
    }
}
