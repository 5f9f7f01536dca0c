// SPDX-License-Identifier: MIT OR Apache-2.0
//! Memory and handles that are freed later, when no kernel runs.
//!
//! The driver waits for running kernels when memory is freed or a module is unloaded. Such a kernel may wait for the
//! caller. So these calls are deferred, and a progress thread never makes them: it only adds to the list.

use super::context::Context;
use super::driver::check;
use super::lane::Lane;
use super::pages;
use crate::flat::FlatPlace;
use crate::mapped::pointer;
use crate::shared::HostPages;
use crate::{GpuError, RawMemory};
use cudarc::driver::sys::{self, CUevent, CUmodule, CUstream};
use std::any::Any;
use std::sync::Arc;

/// A resource to free once no kernel runs.
#[derive(Debug)]
pub(super) enum Resource {
    /// Device memory.
    Device(u64),
    /// Pinned memory.
    Pinned(u64),
    /// A stream.
    Stream(CUstream),
    /// An event.
    Event(CUevent),
    /// A module.
    Module(CUmodule),
    /// A lane that may still copy.
    Lane(Lane),
    /// Memory that is mapped at a place.
    Placed(FlatPlace),
    /// Memory that is mapped at addresses of its own: the first byte, and the number of bytes.
    Alone(u64, u64),
    /// Pinned memory in a file.
    PinnedFile(HostPages),
    /// Addresses at which nothing is mapped any more: the first, and their number.
    Addresses(u64, u64),
    /// A page of I/O memory, by its address in this process.
    Pages(u64),
}

/// A resource to free in a context.
#[derive(Debug)]
pub(super) struct DeferredFree {
    pub(super) context: Arc<Context>,
    pub(super) resource: Resource,
}

// Safety: handles of the driver, which any thread may use.
unsafe impl Send for DeferredFree {}

/// Frees the resource. Returns the rest, which the caller drops without the lock, because dropping may defer more.
pub(super) fn free(DeferredFree { context, resource }: DeferredFree) -> Result<Option<Box<dyn Any>>, GpuError> {
    let entered = match resource {
        Resource::Lane(lane) => {
            lane.give_back();
            return Ok(None);
        }
        Resource::Pages(first) => return context.enter().and_then(|()| pages::end(first)),
        _ => context.enter(),
    };
    // Safety: each handle came from the driver and is deferred once, and no code uses it any more.
    let freed = entered.and_then(|()| unsafe {
        match &resource {
            Resource::Device(address) => check("free device memory", sys::cuMemFree_v2(*address)),
            Resource::Pinned(address) => check("free pinned memory", sys::cuMemFreeHost(pointer(*address))),
            Resource::Stream(stream) => check("end a stream", sys::cuStreamDestroy_v2(*stream)),
            Resource::Event(event) => check("end an event", sys::cuEventDestroy_v2(*event)),
            Resource::Module(module) => check("unload a module", sys::cuModuleUnload(*module)),
            Resource::Placed(place) => unmap(place.address(), place.bytes()),
            Resource::Alone(start, bytes) => unmap(*start, *bytes).and_then(|()| release(*start, *bytes)),
            Resource::PinnedFile(pages) => {
                check("give back pinned memory", sys::cuMemHostUnregister(pointer(pages.address())))
            }
            Resource::Addresses(start, bytes) => release(*start, *bytes),
            Resource::Lane(_) | Resource::Pages(_) => Ok(()),
        }
    });
    match (resource, freed) {
        (Resource::Placed(place), Ok(())) => return Ok(Some(Box::new(place))),
        (Resource::Placed(place), Err(error)) => {
            // The memory is still mapped, so this place stays taken.
            place.leak();
            Err(error)
        }
        (Resource::PinnedFile(pages), Err(error)) => {
            // GPUs may still reach the pages, so they stay mapped.
            std::mem::forget(pages);
            Err(error)
        }
        (_, freed) => freed,
    }
    .map(|()| None)
}

/// Unmaps device memory.
///
/// # Safety
/// - It was mapped at these addresses, and no code uses it any more.
unsafe fn unmap(start: u64, bytes: u64) -> Result<(), GpuError> {
    // Safety: the caller's promise.
    check("unmap device memory", unsafe { sys::cuMemUnmap(start, bytes as usize) })
}

/// Releases addresses.
///
/// # Safety
/// - The driver has reserved them, and nothing is mapped there.
unsafe fn release(start: u64, bytes: u64) -> Result<(), GpuError> {
    // Safety: the caller's promise.
    check("give back addresses", unsafe { sys::cuMemAddressFree(start, bytes as usize) })
}
