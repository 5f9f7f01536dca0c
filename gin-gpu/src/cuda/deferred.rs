// SPDX-License-Identifier: MIT OR Apache-2.0
//! Memory and handles that are freed later, when no kernel runs.
//!
//! The driver waits for running kernels when memory is freed or a module is unloaded. Such a kernel may wait for the
//! caller. So these calls are deferred, and a progress thread never makes them: it only adds to the list.

use super::context::Context;
use super::driver::check;
use super::lane::Lane;
use super::pages;
use crate::GpuError;
use crate::flat::FlatPlace;
use crate::shared::HostPages;
use cudarc::driver::sys::{self, CUevent, CUmodule, CUstream};
use std::any::Any;
use std::sync::Arc;

/// A resource to free once no kernel runs.
#[derive(Debug)]
pub(super) enum DeferredFree {
    /// Device memory.
    Device(Arc<Context>, u64),
    /// Pinned memory.
    Pinned(Arc<Context>, u64),
    /// A stream.
    Stream(Arc<Context>, CUstream),
    /// An event.
    Event(Arc<Context>, CUevent),
    /// A module.
    Module(Arc<Context>, CUmodule),
    /// A lane that may still copy.
    Lane(Lane),
    /// Memory that is mapped at a place.
    Placed(Arc<Context>, FlatPlace),
    /// Memory that is mapped at addresses of its own: the first byte, and the number of bytes.
    Alone(Arc<Context>, u64, u64),
    /// Pinned memory in a file.
    PinnedFile(Arc<Context>, HostPages),
    /// Addresses at which nothing is mapped any more: the first, and their number.
    Addresses(Arc<Context>, u64, u64),
    /// A page of I/O memory, by its address in this process.
    Pages(Arc<Context>, u64),
}

// Safety: handles of the driver, which any thread may use.
unsafe impl Send for DeferredFree {}

/// Frees the resource. Returns the rest, which the caller drops without the lock, because dropping may defer more.
pub(super) fn free(deferred: DeferredFree) -> Result<Option<Box<dyn Any>>, GpuError> {
    let (DeferredFree::Device(context, _)
    | DeferredFree::Pinned(context, _)
    | DeferredFree::Stream(context, _)
    | DeferredFree::Event(context, _)
    | DeferredFree::Module(context, _)
    | DeferredFree::Placed(context, _)
    | DeferredFree::Alone(context, ..)
    | DeferredFree::PinnedFile(context, _)
    | DeferredFree::Addresses(context, ..)
    | DeferredFree::Pages(context, _)) = &deferred
    else {
        if let DeferredFree::Lane(lane) = deferred {
            lane.give_back();
        }
        return Ok(None);
    };
    let entered = context.enter();
    if let DeferredFree::Pages(_, first) = &deferred {
        return entered.and_then(|()| pages::end(*first));
    }
    // Safety: each handle came from the driver and is deferred once, and no code uses it any more.
    let freed = entered.and_then(|()| unsafe {
        match &deferred {
            DeferredFree::Device(_, address) => check("free device memory", sys::cuMemFree_v2(*address)),
            DeferredFree::Pinned(_, address) => {
                check("free pinned memory", sys::cuMemFreeHost(*address as usize as *mut core::ffi::c_void))
            }
            DeferredFree::Stream(_, stream) => check("end a stream", sys::cuStreamDestroy_v2(*stream)),
            DeferredFree::Event(_, event) => check("end an event", sys::cuEventDestroy_v2(*event)),
            DeferredFree::Module(_, module) => check("unload a module", sys::cuModuleUnload(*module)),
            DeferredFree::Placed(_, place) => {
                check("unmap device memory", sys::cuMemUnmap(place.address(), place.bytes() as usize))
            }
            DeferredFree::Alone(_, start, bytes) => {
                check("unmap device memory", sys::cuMemUnmap(*start, *bytes as usize))
                    .and_then(|()| check("give back addresses", sys::cuMemAddressFree(*start, *bytes as usize)))
            }
            DeferredFree::PinnedFile(_, pages) => {
                let start = std::ptr::with_exposed_provenance_mut(pages.start() as usize);
                check("give back pinned memory", sys::cuMemHostUnregister(start))
            }
            DeferredFree::Addresses(_, start, bytes) => {
                check("give back addresses", sys::cuMemAddressFree(*start, *bytes as usize))
            }
            DeferredFree::Lane(_) | DeferredFree::Pages(..) => Ok(()),
        }
    });
    match (deferred, freed) {
        (DeferredFree::Placed(_, place), Ok(())) => Ok(Some(Box::new(place))),
        (DeferredFree::Placed(_, place), Err(error)) => {
            // The memory is still mapped, so this place stays taken.
            place.leak();
            Err(error)
        }
        (DeferredFree::PinnedFile(_, pages), Err(error)) => {
            // GPUs may still reach the pages, so they stay mapped.
            std::mem::forget(pages);
            Err(error)
        }
        (_, freed) => freed.map(|()| None),
    }
}
