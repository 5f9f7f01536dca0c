// SPDX-License-Identifier: MIT OR Apache-2.0
//! Memory that other processes of the host map: GPU memory as files of the driver, pinned memory as files of the
//! kernel.

use super::context::Context;
use super::deferred::Resource;
use super::driver::{check, describe, written};
use super::info;
use super::lane::{Lane, address_of_host};
use super::launches::{defer, free_deferred};
use super::memory::{forget_pinned, know_pinned};
use crate::error::out_of_memory;
use crate::flat::FlatPlace;
use crate::mapped::pointer;
use crate::shared::{HostFile, HostPages};
use crate::{GpuError, MemoryKind, RawMemory, SharedFile};
use cudarc::driver::sys::{
    self, CUdevice_P2PAttribute as P2P, CUmemAccessDesc, CUmemAllocationHandleType, CUresult, CUuuid,
};
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::Arc;

/// The form in which memory of a GPU is exported to other processes.
const FILE: CUmemAllocationHandleType = CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;

/// Returns the bytes that identify a GPU to other processes, independent of their device numbers.
pub(super) fn identity(context: &Context) -> Vec<u8> {
    uuid(context.device()).map_or_else(|_| Vec::new(), Vec::from)
}

fn uuid(device: sys::CUdevice) -> Result<[u8; 16], GpuError> {
    let zero = CUuuid { bytes: [0; 16] };
    // Safety: writes 16 bytes.
    let uuid = written("ask for a GPU's identity", zero, |uuid| unsafe { sys::cuDeviceGetUuid_v2(uuid, device) })?;
    Ok(uuid.bytes.map(|byte| byte as u8))
}

/// Returns whether kernels of this GPU reach memory of the GPU with this identity, with atomics. They do not reach a
/// GPU that this process does not see.
pub(super) fn reaches(context: &Context, other: &[u8]) -> bool {
    let mut devices = (0..).map_while(|ordinal| info::device(ordinal).ok());
    let Some(device) = devices.find(|&device| uuid(device).is_ok_and(|uuid| uuid[..] == *other)) else { return false };
    if device == context.device() {
        return true;
    }
    let (mut can, mut atomics) = (0, 0);
    let which = P2P::CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED;
    // Safety: each writes one integer.
    let asked = unsafe {
        let can = sys::cuDeviceCanAccessPeer(&raw mut can, context.device(), device);
        (can, sys::cuDeviceGetP2PAttribute(&raw mut atomics, which, context.device(), device))
    };
    asked == (CUresult::CUDA_SUCCESS, CUresult::CUDA_SUCCESS) && can != 0 && atomics != 0
}

/// The addresses at which GPU memory is mapped.
#[derive(Debug)]
enum Mapped {
    /// At a place of a range.
    At(FlatPlace),
    /// At addresses of its own, of this many bytes.
    Alone(u64),
}

/// GPU memory that the driver has mapped at given addresses; unmapped when no kernel runs.
///
/// A mapping keeps its memory, so the memory's handle is released at once.
#[derive(Debug)]
pub(super) struct MappedMemory {
    context: Arc<Context>,
    /// `None` only in `drop`.
    mapped: Option<Mapped>,
    address: u64,
    /// The file, if other processes can map the memory and it is of this process. Files of other processes are closed,
    /// as there may be many.
    file: Option<OwnedFd>,
}

impl MappedMemory {
    /// Allocates zeroed memory, at a place or at any address. If it is `shared`, it is in a file, and only this GPU
    /// reaches it by this mapping. Otherwise every GPU of the process that can reach this one reaches it.
    pub(super) fn new(
        context: &Arc<Context>,
        bytes: u64,
        place: Option<FlatPlace>,
        shared: bool,
    ) -> Result<Self, GpuError> {
        free_deferred();
        context.enter()?;
        let length = length(context, bytes, place.as_ref())?;
        let mut properties = context.memory_properties();
        if shared {
            properties.requestedHandleTypes = FILE;
        }
        // Safety: writes one integer.
        let create = |handle| unsafe { sys::cuMemCreate(handle, length as usize, &raw const properties, 0) };
        let handle = written("make device memory", 0, create);
        let handle = Handle(handle.map_err(out_of_memory(MemoryKind::Device, bytes))?);
        // Safety: writes one integer, the number of a file.
        let export = |file: *mut i32| unsafe { sys::cuMemExportToShareableHandle(file.cast(), handle.0, FILE, 0) };
        let file = shared.then(|| written("make a file of device memory", -1, export)).transpose()?;
        // Safety: the driver has just opened it for the caller.
        let file = file.map(|file| unsafe { OwnedFd::from_raw_fd(file) });
        let access = if shared { vec![context.own_access()] } else { context.access() };
        let memory = Self::map(context, &handle, length, place, file, &access)?;
        // Safety: these bytes were just mapped.
        Lane::with(context, |lane| unsafe { lane.zero(memory.address, length) })?;
        Ok(memory)
    }

    /// Maps memory of a GPU of another process.
    fn import(context: &Arc<Context>, file: OwnedFd, bytes: u64, place: Option<FlatPlace>) -> Result<Self, GpuError> {
        free_deferred();
        context.enter()?;
        let length = length(context, bytes, place.as_ref())?;
        let number = std::ptr::without_provenance_mut(file.as_raw_fd() as usize);
        // Safety: reads the number of a file, which is passed by value, and writes one integer.
        let import = |handle| unsafe { sys::cuMemImportFromShareableHandle(handle, number, FILE) };
        let handle = Handle(written("take in device memory of another process", 0, import)?);
        Self::map(context, &handle, length, place, None, &[context.own_access()])
    }

    fn map(
        context: &Arc<Context>,
        handle: &Handle,
        length: u64,
        place: Option<FlatPlace>,
        file: Option<OwnedFd>,
        access: &[CUmemAccessDesc],
    ) -> Result<Self, GpuError> {
        let (address, mapped) = match place {
            Some(place) => (place.address(), Mapped::At(place)),
            None => {
                let align = context.granularity.unwrap_or(0) as usize;
                // Safety: writes one integer.
                let reserve = |start| unsafe { sys::cuMemAddressReserve(start, length as usize, align, 0, 0) };
                (written("reserve addresses", 0, reserve)?, Mapped::Alone(length))
            }
        };
        // Safety: the addresses are reserved, and nothing is mapped there. The memory is as long, or the driver reports
        // an error.
        let code = unsafe { sys::cuMemMap(address, length as usize, 0, handle.0, 0) };
        if let Err(error) = check("map device memory", code) {
            if let Mapped::Alone(bytes) = mapped {
                defer(context, Resource::Addresses(address, bytes));
            }
            return Err(out_of_memory(MemoryKind::Device, length)(error));
        }
        // From here on the memory is unmapped later, also after an error.
        let memory = Self { context: context.clone(), mapped: Some(mapped), address, file };
        // Safety: the number of descriptions is right, and they are for a whole mapping.
        let code = unsafe { sys::cuMemSetAccess(address, length as usize, access.as_ptr(), access.len()) };
        check("let GPUs reach device memory", code)?;
        Ok(memory)
    }
}

/// Returns the bytes that are mapped for an allocation of `bytes`.
fn length(context: &Context, bytes: u64, place: Option<&FlatPlace>) -> Result<u64, GpuError> {
    let cannot = || context.unsupported("map memory at given addresses, or share it with other processes");
    let granularity = context.granularity.ok_or_else(cannot)?;
    let length = bytes.max(1).checked_next_multiple_of(granularity).ok_or_else(cannot)?;
    match place {
        Some(place) if place.bytes() != length => {
            Err(GpuError::OutOfRange { offset: 0, end: length, length: place.bytes() })
        }
        _ => Ok(length),
    }
}

/// A handle of the driver's memory. A mapping keeps the memory after the handle is released.
struct Handle(u64);

impl Drop for Handle {
    fn drop(&mut self) {
        // Safety: made or imported once. It fails only for handles that never existed.
        let _ = unsafe { sys::cuMemRelease(self.0) };
    }
}

impl RawMemory for MappedMemory {
    fn address(&self) -> u64 {
        self.address
    }

    fn file(&self) -> Option<io::Result<OwnedFd>> {
        self.file.as_ref().map(OwnedFd::try_clone)
    }
}

impl Drop for MappedMemory {
    fn drop(&mut self) {
        match self.mapped.take() {
            Some(Mapped::At(place)) => defer(&self.context, Resource::Placed(place)),
            Some(Mapped::Alone(bytes)) => defer(&self.context, Resource::Alone(self.address, bytes)),
            None => {}
        }
    }
}

/// Pinned memory in a file; unregistered when no kernel runs.
#[derive(Debug)]
pub(super) struct PinnedFile {
    context: Arc<Context>,
    /// `None` only in `drop`.
    pages: Option<HostPages>,
    start: u64,
}

impl PinnedFile {
    /// Allocates zeroed memory.
    pub(super) fn new(context: &Arc<Context>, bytes: u64) -> Result<Self, GpuError> {
        Self::pin(context, HostPages::allocate(MemoryKind::Pinned, bytes)?, bytes)
    }

    fn pin(context: &Arc<Context>, pages: HostPages, bytes: u64) -> Result<Self, GpuError> {
        free_deferred();
        context.enter()?;
        let (start, length) = (pages.address(), pages.length());
        let flags = sys::CU_MEMHOSTREGISTER_PORTABLE | sys::CU_MEMHOSTREGISTER_DEVICEMAP;
        // Safety: the pages stay mapped until they are unregistered.
        match unsafe { sys::cuMemHostRegister_v2(pointer(start), length as usize, flags) } {
            CUresult::CUDA_SUCCESS => {}
            code => {
                let refuse = out_of_memory(MemoryKind::Pinned, bytes);
                return Err(refuse(format!("cuMemHostRegister says {}", describe(code))));
            }
        }
        know_pinned(start, length);
        // From here on the memory is unregistered later, also after an error.
        let memory = Self { context: context.clone(), pages: Some(pages), start };
        if address_of_host("find pinned memory in a GPU", start)? != start {
            return Err(context.unsupported("share pinned memory: it sees it at another address than the CPU"));
        }
        Ok(memory)
    }
}

impl RawMemory for PinnedFile {
    fn address(&self) -> u64 {
        self.start
    }

    fn file(&self) -> Option<io::Result<OwnedFd>> {
        self.pages.as_ref()?.file()
    }
}

impl Drop for PinnedFile {
    fn drop(&mut self) {
        if let Some(pages) = self.pages.take() {
            forget_pinned(self.start);
            defer(&self.context, Resource::PinnedFile(pages));
        }
    }
}

/// Maps memory of another process so that this GPU reaches it.
pub(super) fn import(
    context: &Arc<Context>,
    shared: SharedFile,
    place: Option<FlatPlace>,
) -> Result<Box<dyn RawMemory>, GpuError> {
    let SharedFile { file, bytes, kind } = shared;
    if kind == MemoryKind::Device {
        return Ok(Box::new(MappedMemory::import(context, file, bytes, place)?));
    }
    let refuse = |reason| GpuError::Foreign { address: 0, bytes, device: context.full_name(), reason };
    let file = HostFile::of_other(file, bytes).map_err(refuse)?;
    let pages = HostPages::new(file).map_err(|error| refuse(error.to_string()))?;
    Ok(Box::new(PinnedFile::pin(context, pages, bytes)?))
}
