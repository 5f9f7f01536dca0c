// SPDX-License-Identifier: MIT OR Apache-2.0
//! Allocations.

use super::context::Context;
use super::copy_stream::{CopyStream, host_alloc};
use super::deferred::{Deferred, Resource};
use super::driver::{BesideCaptures, written};
use super::launches::free_deferred;
use super::pinned::know_pinned;
use crate::error::out_of_memory;
use crate::{Allocation, GpuError, MemoryKind};
use cudarc::driver::sys;
use std::sync::Arc;

/// Allocates zeroed memory, which is freed when no kernel runs.
pub(super) fn allocate(context: &Arc<Context>, kind: MemoryKind, bytes: u64) -> Result<Allocation, GpuError> {
    free_deferred();
    let _beside = BesideCaptures::begin();
    context.enter()?;
    let refuse = out_of_memory(kind, bytes);
    let owned = |address, resource| Allocation::new(address, None, Deferred::new(context, resource));
    match kind {
        MemoryKind::Pinned => {
            let address = host_alloc(bytes).map_err(refuse)?;
            // Safety: these bytes were just allocated.
            unsafe { std::ptr::write_bytes(address as usize as *mut u8, 0, bytes as usize) };
            know_pinned(address, bytes);
            Ok(owned(address, Resource::Pinned(address, bytes)))
        }
        MemoryKind::Device => {
            // Safety: writes one integer.
            let allocate = |address| unsafe { sys::cuMemAlloc_v2(address, bytes as usize) };
            let address = written("allocate device memory", 0, allocate).map_err(refuse)?;
            let memory = owned(address, Resource::Device(address));
            // Safety: these bytes were just allocated.
            CopyStream::with(context, |copies| unsafe { copies.zero(address, bytes) })?;
            Ok(memory)
        }
    }
}
