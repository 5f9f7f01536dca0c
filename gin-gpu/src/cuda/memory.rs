// SPDX-License-Identifier: MIT OR Apache-2.0
//! Allocations.

use super::context::Context;
use super::deferred::{Deferred, Resource};
use super::driver::written;
use super::lane::{Lane, host_alloc};
use super::launches::free_deferred;
use crate::error::out_of_memory;
use crate::{Allocation, GpuError, MemoryKind, lock};
use cudarc::driver::sys;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

/// The pinned memory that is used here: start and length.
static PINNED: Mutex<BTreeMap<u64, u64>> = Mutex::new(BTreeMap::new());

/// Returns whether all bytes are in pinned memory that is known here. Copies of other memory go through a pinned
/// buffer.
pub(super) fn is_pinned(address: u64, bytes: u64) -> bool {
    let pinned = lock(&PINNED);
    let before = pinned.range(..=address).next_back();
    before.is_some_and(|(start, length)| address - start <= *length && bytes <= length - (address - start))
}

/// Notes that these bytes are pinned.
pub(super) fn know_pinned(address: u64, bytes: u64) {
    lock(&PINNED).insert(address, bytes);
}

/// Notes that the bytes that start here may not be pinned any more.
pub(super) fn forget_pinned(address: u64) {
    lock(&PINNED).remove(&address);
}

/// Allocates zeroed memory, which is freed when no kernel runs.
pub(super) fn allocate(context: &Arc<Context>, kind: MemoryKind, bytes: u64) -> Result<Allocation, GpuError> {
    free_deferred();
    context.enter()?;
    let refuse = out_of_memory(kind, bytes);
    let owned = |address, resource| Allocation::new(address, None, Deferred::new(context, resource));
    match kind {
        MemoryKind::Pinned => {
            let address = host_alloc(bytes).map_err(refuse)?;
            // Safety: these bytes were just allocated.
            unsafe { std::ptr::write_bytes(address as usize as *mut u8, 0, bytes as usize) };
            know_pinned(address, bytes);
            Ok(owned(address, Resource::Pinned(address)))
        }
        MemoryKind::Device => {
            // Safety: writes one integer.
            let allocate = |address| unsafe { sys::cuMemAlloc_v2(address, bytes as usize) };
            let address = written("allocate device memory", 0, allocate).map_err(refuse)?;
            let memory = owned(address, Resource::Device(address));
            // Safety: these bytes were just allocated.
            Lane::with(context, |lane| unsafe { lane.zero(address, bytes) })?;
            Ok(memory)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_is_pinned_if_one_allocation_holds_all_of_it() {
        let start = u64::MAX - (1 << 20);
        lock(&PINNED).insert(start, 64);
        for (address, bytes, expected) in [
            (start, 64, true),
            (start + 8, 56, true),
            (start + 64, 0, true),
            (start, 65, false),
            (start + 60, 5, false),
            (start - 1, 2, false),
            (start + 65, 0, false),
            (start + 8, u64::MAX, false),
        ] {
            assert_eq!(is_pinned(address, bytes), expected, "{bytes} bytes at {address:#x}");
        }
        lock(&PINNED).remove(&start);
    }
}
