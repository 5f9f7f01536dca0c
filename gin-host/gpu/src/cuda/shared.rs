// SPDX-License-Identifier: MIT OR Apache-2.0
//! Memory that other processes of the host map: GPU memory as files of the driver, pinned memory as files of the
//! kernel.

use super::CudaDevice;
use super::context::Context;
use super::copy_stream::{CopyStream, address_of_host};
use super::deferred::{Deferred, Resource, defer};
use super::driver::{BesideCaptures, check, describe, error, written};
use super::import::import as import_foreign;
use super::info;
use super::launches::free_deferred;
use super::pinned::know_pinned;
use crate::error::out_of_memory;
use crate::flat::{FlatPlace, RawAddresses};
use crate::shared::{HostPages, check_file, pointer};
use crate::{
    Allocation, Device, DeviceKind, GpuError, Keep, Memory, MemoryKind, MemorySharing, MemorySlice, RawMemory,
    SharedFile,
};
use cudarc::driver::result::DriverError;
use cudarc::driver::sys::{self, CUmemAccessDesc, CUmemAllocationHandleType, CUuuid};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::Arc;

/// The form in which memory of a GPU is exported to other processes.
const FILE: CUmemAllocationHandleType = CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;

fn uuid(device: sys::CUdevice) -> Result<[u8; 16], GpuError> {
    let zero = CUuuid { bytes: [0; 16] };
    // Safety: writes 16 bytes.
    let uuid = written("ask for a GPU's identity", zero, |uuid| unsafe { sys::cuDeviceGetUuid_v2(uuid, device) })?;
    Ok(uuid.bytes.map(|byte| byte as u8))
}

/// The bytes of a slot of reserved addresses that are tried first. They are several times the memory of a GPU, so that
/// places are found although windows are freed in any order. 16 such slots are an eighth of the addresses of a process.
const LARGEST: u64 = 1 << 40;

impl MemorySharing for CudaDevice {
    // A place has its own memory, which is mapped only there. Every GPU of the process that can reach the memory's own
    // GPU reaches it, also GPUs outside the LSA team, because copies between GPUs read and write it too.
    fn reserve_addresses(&self, slots: u32) -> Result<Option<RawAddresses>, GpuError> {
        let context = &self.context;
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

    fn granularity(&self) -> u64 {
        self.context.granularity.unwrap_or(1)
    }

    fn allocate_at(&self, place: FlatPlace, shared: bool) -> Result<Allocation, GpuError> {
        let _beside = BesideCaptures::begin();
        allocate(&self.context, place.bytes(), Some(place), shared)
    }

    fn allocate_shared(&self, kind: MemoryKind, bytes: u64) -> Result<Allocation, GpuError> {
        let _beside = BesideCaptures::begin();
        if kind == MemoryKind::Device {
            return allocate(&self.context, bytes, None, true);
        }
        let (pages, file) = HostPages::allocate(kind, bytes)?;
        pin(&self.context, pages, Some(file), bytes)
    }

    fn import(&self, file: SharedFile, place: Option<FlatPlace>) -> Result<Allocation, GpuError> {
        let _beside = BesideCaptures::begin();
        let SharedFile { file, bytes, kind } = file;
        if kind == MemoryKind::Device {
            return import(&self.context, file, bytes, place);
        }
        let refuse = |reason| GpuError::Foreign { address: 0, bytes, device: self.name(), reason };
        let length = check_file(&file, bytes).map_err(refuse)?;
        let pages = HostPages::of_file(&file, length).map_err(|error| refuse(error.explain(bytes)))?;
        // The file is closed, as there may be many, and is for its owner to give.
        pin(&self.context, pages, None, bytes)
    }

    // The bytes do not depend on the device numbers of the processes.
    fn identity(&self) -> Vec<u8> {
        uuid(self.context.device).map_or_else(|_| Vec::new(), Vec::from)
    }

    // Kernels do not reach a GPU that this process does not see, or on whose memory they have no atomics.
    fn reaches_elsewhere(&self, kind: DeviceKind, identity: &[u8]) -> bool {
        if kind != DeviceKind::Cuda {
            return false;
        }
        let own = self.context.device;
        let mut devices = (0..).map_while(|ordinal| info::device(ordinal).ok());
        let is_it = |device: &_| uuid(*device).is_ok_and(|uuid| uuid[..] == *identity);
        let Some(device) = devices.find(is_it) else { return false };
        let yes = |answer| answer == Ok(true);
        device == own || (yes(info::reaches(own, device)) && yes(info::has_atomics(own, device)))
    }
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
fn allocate(
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
    let file = shared.then(|| handle.file()).transpose()?;
    let access = if shared { vec![context.own_access()] } else { context.access() };
    let memory = map(context, &handle, length, place, file, &access)?;
    // Safety: these bytes were just mapped.
    CopyStream::with(context, |copies| unsafe { copies.zero(memory.address, length) })?;
    Ok(memory)
}

/// Maps memory of a GPU of another process.
fn import(context: &Arc<Context>, file: OwnedFd, bytes: u64, place: Option<FlatPlace>) -> Result<Allocation, GpuError> {
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

impl Handle {
    /// Exports the memory as a file.
    fn file(&self) -> Result<OwnedFd, GpuError> {
        // Safety: writes one integer, the number of a file.
        let export = |file: *mut i32| unsafe { sys::cuMemExportToShareableHandle(file.cast(), self.0, FILE, 0) };
        // Safety: the driver has just opened it for the caller.
        written("make a file of device memory", -1, export).map(|file| unsafe { OwnedFd::from_raw_fd(file) })
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        // Safety: made or imported once. It fails only for handles that never existed.
        let _ = unsafe { sys::cuMemRelease(self.0) };
    }
}

/// Memory that another library frees.
#[derive(Debug)]
struct Unowned;

impl RawMemory for Unowned {}

impl CudaDevice {
    /// Exports memory of another library, so that other processes can map it: each allocation that has some of the
    /// bytes from `address` on as a file, in the order of addresses.
    ///
    /// # Safety
    /// - The memory is allocated while the results exist, and this GPU reaches it.
    ///
    /// # Errors
    /// [`GpuError::Foreign`] for memory that `cuMemCreate` has not allocated, or allocated without files.
    pub unsafe fn files(&self, address: u64, bytes: u64) -> Result<Vec<Arc<Memory>>, GpuError> {
        let context = &self.context;
        let refuse = |at: u64, reason: String| {
            let reason = format!("no other process can map {at:#x}: {reason}; allocate it by ncclMemAlloc");
            GpuError::Foreign { address, bytes, device: context.full_name(), reason }
        };
        context.enter()?;
        let device: Arc<dyn Device> = self.shared()?;
        let (mut at, mut files) = (address, Vec::new());
        while at < address.saturating_add(bytes) {
            let (start, length, file) = file_at(at).map_err(|reason| refuse(at, reason))?;
            files.push(Memory::with(Allocation::new(start, Some(file), Unowned), &device, MemoryKind::Device, length));
            at = start + length;
        }
        Ok(files)
    }

    /// Uses memory of the program like [`import_memory`](Self::import_memory), and lets other processes map it: device
    /// memory of one allocation that `cuMemCreate` made with POSIX file descriptors, as `ncclMemAlloc` does. Returns
    /// the bytes as a slice of the allocation, which other processes map whole.
    ///
    /// # Safety
    /// - As for [`import_memory`](Self::import_memory), for the whole allocation. With `keep`, it stays as long as
    ///   `keep` exists.
    ///
    /// # Errors
    /// [`GpuError::Foreign`] with the reason: as there, or the memory is not of that kind. Then `keep` is dropped.
    pub unsafe fn import_shared(&self, address: u64, bytes: u64, keep: Option<Keep>) -> Result<MemorySlice, GpuError> {
        let context = &self.context;
        let refuse = |reason| GpuError::Foreign { address, bytes, device: context.full_name(), reason };
        context.enter()?;
        let (start, length, file) = file_at(address)
            .map_err(|reason| refuse(format!("no other process can map it: {reason}; allocate it by ncclMemAlloc")))?;
        let offset = address - start;
        let end = offset.saturating_add(bytes);
        if bytes == 0 || end > length {
            let reason = format!("it is not all in one allocation: {length} bytes from {start:#x} on are one");
            return Err(refuse(reason));
        }
        let (raw, kind) = import_foreign(context, start, length, keep)?;
        let device: Arc<dyn Device> = self.shared()?;
        Memory::with(raw.in_file(file), &device, kind, length).slice(offset..end)
    }
}

impl CudaDevice {
    /// Uses memory of the program for a window: as [`import_shared`](Self::import_shared) if ranks are `across`
    /// processes and can map it, else as [`import_memory`](Self::import_memory). Ranks of the host that cannot map it
    /// refuse the window, and ranks of other hosts reach it over a NIC.
    ///
    /// # Safety
    /// - As there.
    ///
    /// # Errors
    /// As [`import_memory`](Self::import_memory).
    pub unsafe fn import_for_ranks(
        &self,
        address: u64,
        bytes: u64,
        keep: Option<Keep>,
        across: bool,
    ) -> Result<MemorySlice, GpuError> {
        // Safety: the caller's promise.
        let shared = across.then(|| unsafe { self.import_shared(address, bytes, keep.clone()) });
        match (shared, keep) {
            (Some(Ok(shared)), _) => Ok(shared),
            // Safety of both: the caller's promise.
            (_, Some(keep)) => Ok(unsafe { self.import_kept(address, bytes, keep)? }.whole()),
            (_, None) => Ok(unsafe { self.import_memory(address, bytes)? }.whole()),
        }
    }
}

/// Exports the allocation that has the byte at an address. Returns its first address, its length and the file.
fn file_at(at: u64) -> Result<(u64, u64, OwnedFd), String> {
    let (mut handle, mut start, mut length) = (0, 0, 0);
    // Safety of both: they write integers.
    unsafe { sys::cuMemRetainAllocationHandle(&raw mut handle, pointer(at)) }.result().map_err(describe)?;
    let handle = Handle(handle);
    unsafe { sys::cuMemGetAddressRange_v2(&raw mut start, &raw mut length, at) }.result().map_err(describe)?;
    let file = handle.file().map_err(|error| error.to_string())?;
    let length = length as u64;
    match start.checked_add(length) {
        Some(end) if start <= at && at < end => Ok((start, length, file)),
        _ => Err("the driver knows no end of it".to_owned()),
    }
}

/// Pins pages. They are unregistered when no kernel runs.
fn pin(context: &Arc<Context>, pages: HostPages, file: Option<OwnedFd>, bytes: u64) -> Result<Allocation, GpuError> {
    free_deferred();
    context.enter()?;
    let (start, length) = (pages.start, pages.length);
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
