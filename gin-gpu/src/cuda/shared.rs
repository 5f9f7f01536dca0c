// SPDX-License-Identifier: MIT OR Apache-2.0
//! Memory that other processes of the host or other drivers map: GPU memory as files of the driver, pinned memory as
//! files of the kernel.

use super::context::Context;
use super::deferred::{Deferred, Resource};
use super::driver::{check, describe, error, written};
use super::info;
use super::lane::{Lane, address_of_host};
use super::launches::{defer, free_deferred};
use super::memory::know_pinned;
use crate::error::out_of_memory;
use crate::flat::{FlatPlace, RawAddresses};
use crate::shared::{HostPages, check_file, page, pointer};
use crate::{Allocation, DeviceKind, GpuError, MemoryFile, MemoryKind, SharedFile, whole_pages};
use cudarc::driver::result::DriverError;
use cudarc::driver::sys::{
    self, CUdevice_P2PAttribute as P2P, CUmemAccessDesc, CUmemAllocationHandleType, CUmemRangeHandleType, CUresult,
    CUuuid,
};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::Arc;

/// The form in which memory of a GPU is exported to other processes.
const FILE: CUmemAllocationHandleType = CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;

/// Returns the bytes that identify a GPU to other processes, independent of their device numbers.
pub(super) fn identity(context: &Context) -> Vec<u8> {
    uuid(context.device).map_or_else(|_| Vec::new(), Vec::from)
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
    if device == context.device {
        return true;
    }
    let (mut can, mut atomics) = (0, 0);
    let which = P2P::CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED;
    // Safety: each writes one integer.
    let asked = unsafe {
        let can = sys::cuDeviceCanAccessPeer(&raw mut can, context.device, device);
        (can, sys::cuDeviceGetP2PAttribute(&raw mut atomics, which, context.device, device))
    };
    asked == (CUresult::CUDA_SUCCESS, CUresult::CUDA_SUCCESS) && can != 0 && atomics != 0
}

/// The bytes of a slot of reserved addresses that are tried first. They are several times the memory of a GPU, so that
/// places are found although windows are freed in any order. 16 such slots are an eighth of the addresses of a process.
const LARGEST: u64 = 1 << 40;

/// Reserves addresses for memory of `slots` ranks at a fixed distance; `None` if the GPU has ordinary memory only.
///
/// A place has its own memory, which is mapped only there. Every GPU of the process that can reach the memory's own GPU
/// reaches it, also GPUs outside the LSA team, because copies between GPUs read and write it too.
pub(super) fn reserve_slots(context: &Arc<Context>, slots: u32) -> Result<Option<RawAddresses>, GpuError> {
    if context.granularity.is_none() {
        return Ok(None);
    }
    free_deferred();
    context.enter()?;
    let reserve = |bytes| {
        let start = reserve(context, bytes).map_err(describe)?;
        Ok((start, Deferred::new(context, Resource::Addresses(start, bytes))))
    };
    RawAddresses::reserve(DeviceKind::Cuda, slots, LARGEST, reserve).map(Some)
}

/// Reserves addresses. Returns the first one.
fn reserve(context: &Context, bytes: u64) -> Result<u64, DriverError> {
    let align = context.granularity.unwrap_or(0) as usize;
    let mut start = 0;
    // Safety: writes one integer.
    unsafe { sys::cuMemAddressReserve(&raw mut start, bytes as usize, align, 0, 0) }.result()?;
    Ok(start)
}

/// Allocates zeroed GPU memory, at a place or at any address; it is unmapped when no kernel runs. If it is `shared`, it
/// is in a file, and only this GPU reaches it by this mapping. Otherwise every GPU of the process that can reach this
/// one reaches it.
pub(super) fn allocate(
    context: &Arc<Context>,
    bytes: u64,
    place: Option<FlatPlace>,
    shared: bool,
) -> Result<Allocation, GpuError> {
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
    let memory = map(context, &handle, length, place, file, &access)?;
    // Safety: these bytes were just mapped.
    Lane::with(context, |lane| unsafe { lane.zero(memory.address, length) })?;
    Ok(memory)
}

/// Maps memory of a GPU of another process.
fn import_device(
    context: &Arc<Context>,
    file: OwnedFd,
    bytes: u64,
    place: Option<FlatPlace>,
) -> Result<Allocation, GpuError> {
    free_deferred();
    context.enter()?;
    let length = length(context, bytes, place.as_ref())?;
    let number = std::ptr::without_provenance_mut(file.as_raw_fd() as usize);
    // Safety: reads the number of a file, which is passed by value, and writes one integer.
    let import = |handle| unsafe { sys::cuMemImportFromShareableHandle(handle, number, FILE) };
    let handle = Handle(written("take in device memory of another process", 0, import)?);
    map(context, &handle, length, place, None, &[context.own_access()])
}

/// Maps memory. The mapping keeps it, so that its handle can be released at once.
fn map(
    context: &Arc<Context>,
    handle: &Handle,
    length: u64,
    place: Option<FlatPlace>,
    file: Option<OwnedFd>,
    access: &[CUmemAccessDesc],
) -> Result<Allocation, GpuError> {
    let (address, resource) = match place {
        Some(place) => (place.address(), Resource::Placed(place)),
        None => {
            let start = reserve(context, length).map_err(|failure| error("reserve addresses", failure))?;
            (start, Resource::Alone(start, length))
        }
    };
    // Safety: the addresses are reserved, and nothing is mapped there. The memory is as long, or the driver reports an
    // error.
    let code = unsafe { sys::cuMemMap(address, length as usize, 0, handle.0, 0) };
    if let Err(error) = check("map device memory", code) {
        if let Resource::Alone(start, bytes) = resource {
            defer(context, Resource::Addresses(start, bytes));
        }
        return Err(out_of_memory(MemoryKind::Device, length)(error));
    }
    // From here on the memory is unmapped later, also after an error.
    let memory = Allocation::new(address, file, Deferred::new(context, resource));
    // Safety: the number of descriptions is right, and they are for a whole mapping.
    let code = unsafe { sys::cuMemSetAccess(address, length as usize, access.as_ptr(), access.len()) };
    check("let GPUs reach device memory", code)?;
    Ok(memory)
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

/// Allocates zeroed pinned memory in a file; it is unregistered when no kernel runs.
pub(super) fn allocate_pinned(context: &Arc<Context>, bytes: u64) -> Result<Allocation, GpuError> {
    let (pages, file) = HostPages::allocate(MemoryKind::Pinned, bytes)?;
    pin(context, pages, Some(file), bytes)
}

fn pin(context: &Arc<Context>, pages: HostPages, file: Option<OwnedFd>, bytes: u64) -> Result<Allocation, GpuError> {
    free_deferred();
    context.enter()?;
    let (start, length) = (pages.start(), pages.length());
    let flags = sys::CU_MEMHOSTREGISTER_PORTABLE | sys::CU_MEMHOSTREGISTER_DEVICEMAP;
    // Safety: the pages stay mapped until they are unregistered.
    let registered = unsafe { sys::cuMemHostRegister_v2(pointer(start), length as usize, flags) }.result();
    let says = |failure| format!("cuMemHostRegister says {}", describe(failure));
    registered.map_err(says).map_err(out_of_memory(MemoryKind::Pinned, bytes))?;
    know_pinned(start, length);
    // From here on the memory is unregistered later, also after an error.
    let memory = Allocation::new(start, file, Deferred::new(context, Resource::PinnedFile(pages)));
    if address_of_host("find pinned memory in a GPU", start)? != start {
        return Err(context.unsupported("share pinned memory: it sees it at another address than the CPU"));
    }
    Ok(memory)
}

/// Maps memory of another process so that this GPU reaches it.
pub(super) fn import(
    context: &Arc<Context>,
    shared: SharedFile,
    place: Option<FlatPlace>,
) -> Result<Allocation, GpuError> {
    let SharedFile { file, bytes, kind } = shared;
    if kind == MemoryKind::Device {
        return import_device(context, file, bytes, place);
    }
    let refuse = |reason| GpuError::Foreign { address: 0, bytes, device: context.full_name(), reason };
    let length = check_file(&file, bytes).map_err(refuse)?;
    let pages = HostPages::of_file(&file, length).map_err(|error| refuse(error.to_string()))?;
    // The file is closed, as there may be many, and is for its owner to give.
    pin(context, pages, None, bytes)
}

/// Exports `bytes` bytes of GPU memory from `address` on as a file that drivers share (DMA-BUF). The driver exports whole
/// pages of the host only. Its allocations consist of larger pages, so all exported pages belong to the same allocation.
pub(super) fn export(context: &Context, address: u64, bytes: u64) -> Result<MemoryFile, GpuError> {
    if !context.dma_buf {
        return Err(
            context.unsupported("give its memory as a DMA-BUF file: GPU, driver or kernel has no support for it")
        );
    }
    let pages = whole_pages(address, bytes.max(1), page());
    let (first, length, offset) = pages.ok_or_else(|| context.unsupported("give memory past the last address"))?;
    context.enter()?;
    let kind = CUmemRangeHandleType::CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD;
    // Safety: writes one integer, the number of a file.
    let make =
        |file: *mut i32| unsafe { sys::cuMemGetHandleForAddressRange(file.cast(), first, length as usize, kind, 0) };
    let file = written("make a DMA-BUF file of device memory", -1, make)?;
    // Safety: the driver has just opened it for the caller.
    Ok(MemoryFile::new(unsafe { OwnedFd::from_raw_fd(file) }, offset))
}
