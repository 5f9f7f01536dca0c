// SPDX-License-Identifier: MIT OR Apache-2.0
//! Memory and handles that are freed later, when no kernel runs.
//!
//! The driver waits for running kernels when memory is freed or a module is unloaded. Such a kernel may wait for the
//! caller. So these calls are deferred, and a progress thread never makes them: it only adds to the list.

use super::context::Context;
use super::copy_stream::CopyStream;
use super::driver::check;
use super::pages;
use super::pinned::forget_pinned;
use crate::flat::FlatPlace;
use crate::shared::{HostPages, pointer};
use crate::{GpuError, RawMemory, lock};
use cudarc::driver::sys::{self, CUevent, CUgraphExec, CUmodule, CUstream};
use std::any::Any;
use std::sync::{Arc, Mutex};

/// The maximum number of failures of frees that are kept.
const MAX_FAILURES: usize = 16;

/// A resource to free once no kernel runs.
#[derive(Debug)]
pub(super) enum Resource {
    /// Device memory.
    Device(u64),
    /// Pinned memory, and its bytes.
    Pinned(u64, u64),
    /// A stream.
    Stream(CUstream),
    /// An event.
    Event(CUevent),
    /// A graph.
    Graph(CUgraphExec),
    /// A module.
    Module(CUmodule),
    /// A copy stream that may still copy.
    CopyStream(CopyStream),
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

// Safety: handles of the driver, which any thread may use.
unsafe impl Send for Resource {}
// Safety: as above.
unsafe impl Sync for Resource {}

/// The owner of a resource, which is freed after this is dropped, when no kernel runs.
#[derive(Debug)]
pub(super) struct Deferred {
    context: Arc<Context>,
    /// `None` only in `drop`.
    resource: Option<Resource>,
}

impl Deferred {
    pub(super) fn new(context: &Arc<Context>, resource: Resource) -> Self {
        Self { context: context.clone(), resource: Some(resource) }
    }

    /// Frees the resource now: an event that was seen to have happened, for which the driver waits for nothing.
    pub(super) fn free_now(&mut self) {
        if let Some(resource) = self.resource.take() {
            // An error would be that of an earlier kernel, which its stream reports.
            let _ = free(&self.context, resource);
        }
    }
}

impl RawMemory for Deferred {}

impl Drop for Deferred {
    fn drop(&mut self) {
        if let Some(resource) = self.resource.take() {
            defer(&self.context, resource);
        }
    }
}

/// Frees the resource. Returns the rest, which the caller drops without the lock, because dropping may defer more.
pub(super) fn free(context: &Context, resource: Resource) -> Result<Box<dyn Any>, GpuError> {
    match resource {
        Resource::CopyStream(copies) => {
            copies.give_back();
            return Ok(Box::new(()));
        }
        Resource::Pages(first) => {
            context.enter()?;
            return Ok(Box::new(pages::end(first)?));
        }
        _ => {}
    }
    // Safety: each handle came from the driver and is deferred once, and no code uses it any more.
    let freed = context.enter().and_then(|()| unsafe {
        match &resource {
            Resource::Device(address) => check("free device memory", sys::cuMemFree_v2(*address)),
            Resource::Pinned(address, bytes) => {
                forget_pinned(*address, *bytes);
                check("free pinned memory", sys::cuMemFreeHost(pointer(*address)))
            }
            Resource::Stream(stream) => check("end a stream", sys::cuStreamDestroy_v2(*stream)),
            Resource::Event(event) => check("end an event", sys::cuEventDestroy_v2(*event)),
            Resource::Graph(graph) => check("end a graph", sys::cuGraphExecDestroy(*graph)),
            Resource::Module(module) => check("unload a module", sys::cuModuleUnload(*module)),
            Resource::Placed(place) => unmap(place.address(), place.bytes()),
            Resource::Alone(start, bytes) => unmap(*start, *bytes).and_then(|()| release(*start, *bytes)),
            Resource::PinnedFile(pages) => {
                forget_pinned(pages.start, pages.length);
                check("give back pinned memory", sys::cuMemHostUnregister(pointer(pages.start)))
            }
            Resource::Addresses(start, bytes) => release(*start, *bytes),
            Resource::CopyStream(_) | Resource::Pages(_) => Ok(()),
        }
    });
    match freed {
        Ok(()) => Ok(Box::new(resource)),
        Err(error) => {
            // Memory may still be mapped, and GPUs may still reach it. So its place stays taken, and its pages mapped.
            std::mem::forget(resource);
            Err(error)
        }
    }
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

/// The frees that wait until no kernel runs on any GPU, and their errors.
#[derive(Debug)]
struct Waiting {
    resources: Vec<(Arc<Context>, Resource)>,
    failures: Vec<GpuError>,
}

/// Locked after the states of the launches.
static WAITING: Mutex<Waiting> = Mutex::new(Waiting { resources: Vec::new(), failures: Vec::new() });

/// Defers a free until no kernel runs.
pub(super) fn defer(context: &Arc<Context>, resource: Resource) {
    lock(&WAITING).resources.push((context.clone(), resource));
}

/// Returns whether no free waits.
pub(super) fn is_empty() -> bool {
    lock(&WAITING).resources.is_empty()
}

/// Carries out all deferred frees, unless a copy runs that may use memory whose free is deferred. The
/// caller ensures that no kernel runs or is launched. Returns what [`free`] returns for each.
pub(super) fn free_all() -> Vec<Box<dyn Any>> {
    let mut waiting = lock(&WAITING);
    let is_copying = waiting.resources.iter().any(|(_, resource)| match resource {
        Resource::CopyStream(copies) => copies.is_idle() == Ok(false),
        _ => false,
    });
    if is_copying {
        return Vec::new();
    }
    let resources = std::mem::take(&mut waiting.resources);
    drop(waiting);
    let keep = |error| {
        let failures = &mut lock(&WAITING).failures;
        if failures.len() < MAX_FAILURES {
            failures.push(error);
        }
    };
    resources.into_iter().filter_map(|(context, resource)| free(&context, resource).map_err(keep).ok()).collect()
}

/// Returns the errors of freeing memory, streams and modules since the last call.
pub fn take_failures() -> Vec<GpuError> {
    std::mem::take(&mut lock(&WAITING).failures)
}
