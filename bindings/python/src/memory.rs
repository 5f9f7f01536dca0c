// SPDX-License-Identifier: MIT OR Apache-2.0
//! Memory of gin in tensors, which ranks in other processes can map: of windows, and what torch's pluggable allocator
//! gets from gin.

use gin_boot::lock;
use gin_gpu::{Device, Memory, MemorySlice};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, Weak};

/// The memory that was given to the program, by address.
pub(crate) static GIVEN: Mutex<BTreeMap<u64, Arc<Memory>>> = Mutex::new(BTreeMap::new());

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
