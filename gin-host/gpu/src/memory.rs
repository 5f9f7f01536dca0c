// SPDX-License-Identifier: MIT OR Apache-2.0
//! Memory of a device, and host memory that it can reach.

use super::flat::FlatPlace;
use super::{Device, GpuError, SharedFile};
use crate::quarantine::Exposure;
use crate::registry::Key;
use bytemuck::Pod;
use std::fmt;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::{Arc, OnceLock};

/// The kind of memory.
///
/// ```
/// assert_eq!(gin_gpu::MemoryKind::Pinned.to_string(), "pinned host");
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash, derive_more::Display)]
pub enum MemoryKind {
    /// Memory of the device.
    #[display("device")]
    Device,
    /// Pinned memory of the host: device and CPU reach it at the same address.
    #[display("pinned host")]
    Pinned,
}

/// The owner of an allocation. Dropping it frees the memory.
pub trait RawMemory: Send + Sync + fmt::Debug {
    /// Checks that kernels of `device`, which reaches the memory's own device, reach this memory too. Memory that a
    /// device allocates itself is always reached.
    ///
    /// # Errors
    /// [`GpuError::Foreign`] with the reason.
    fn check_reach(&self, _device: &dyn Device) -> Result<(), GpuError> {
        Ok(())
    }

    /// Returns whether the memory lives no longer than this. It is false for memory that the program owns and keeps
    /// by itself.
    fn is_owner(&self) -> bool {
        true
    }
}

/// The allocation of a device. Dropping it frees the memory.
#[derive(Debug)]
pub struct Allocation {
    pub(crate) address: u64,
    file: Option<OwnedFd>,
    owner: Box<dyn RawMemory>,
}

impl Allocation {
    /// Makes an allocation from its parts: the device address of the first byte, which for pinned memory is also that
    /// of the CPU; a file that holds all of the memory, if other processes of the host can map one; and the owner.
    pub fn new(address: u64, file: Option<OwnedFd>, owner: impl RawMemory + 'static) -> Self {
        Self { address, file, owner: Box::new(owner) }
    }

    /// Adds the file that holds all of the memory.
    #[cfg_attr(not(feature = "cuda"), expect(dead_code, reason = "only GPUs export memory that they did not allocate"))]
    pub(crate) fn in_file(self, file: OwnedFd) -> Self {
        Self { file: Some(file), ..self }
    }
}

/// One allocation. It is zeroed at first, and freed when its last owner is dropped. Memory that the program has from
/// elsewhere keeps its content, and this type never frees it.
///
/// ```
/// use gin_gpu::virt::VirtualDevice;
/// use gin_gpu::{Device, GpuError, Memory, MemoryKind};
/// use std::sync::Arc;
///
/// let device: Arc<dyn Device> = VirtualDevice::memory_only(0);
/// let memory = Memory::new(&device, MemoryKind::Device, 16)?;
/// memory.slice(8..16)?.write(0, &[7u64])?;
/// let mut words = [1u64; 2];
/// memory.read(0, &mut words)?;
/// assert_eq!(words, [0, 7]);
/// assert!(matches!(memory.write(9, &[7u64]), Err(GpuError::OutOfRange { .. })));
/// # Ok::<(), GpuError>(())
/// ```
#[derive(Debug)]
pub struct Memory {
    raw: Allocation,
    bytes: u64,
    kind: MemoryKind,
    device: Arc<dyn Device>,
    /// The key by which other ranks find it, once it is published.
    key: OnceLock<Key>,
    /// The communicators whose ranks have its key.
    exposure: Exposure,
}

/// Returns `offset` if an allocation of `length` bytes has `bytes` bytes from there on.
fn within(offset: u64, bytes: u64, length: u64) -> Result<u64, GpuError> {
    let end = offset.saturating_add(bytes);
    if end > length { Err(GpuError::OutOfRange { offset, end, length }) } else { Ok(offset) }
}

impl Memory {
    pub(crate) fn with(raw: Allocation, device: &Arc<dyn Device>, kind: MemoryKind, bytes: u64) -> Arc<Self> {
        Arc::new(Self { raw, bytes, kind, device: device.clone(), key: OnceLock::new(), exposure: Exposure::default() })
    }

    /// Allocates `bytes` bytes, at least one, aligned to 256.
    ///
    /// # Errors
    /// [`GpuError::OutOfMemory`].
    pub fn new(device: &Arc<dyn Device>, kind: MemoryKind, bytes: u64) -> Result<Arc<Self>, GpuError> {
        let raw = device.allocate(kind, bytes.max(1))?;
        Ok(Self::with(raw, device, kind, bytes))
    }

    /// Does the same as [`new`](Self::new), in a file that other processes of the host can map, so that ranks in other
    /// processes reach it. The memory takes a whole number of the device's
    /// [granules](crate::MemorySharing::granularity), or of pages.
    ///
    /// # Errors
    /// [`GpuError::OutOfMemory`], [`GpuError::Unsupported`].
    pub fn shared(device: &Arc<dyn Device>, kind: MemoryKind, bytes: u64) -> Result<Arc<Self>, GpuError> {
        let raw = device.shares("share memory with other processes")?.allocate_shared(kind, bytes.max(1))?;
        Ok(Self::with(raw, device, kind, bytes))
    }

    /// Calls [`shared`](Self::shared) or [`new`](Self::new).
    #[doc(hidden)]
    pub fn for_ranks(
        device: &Arc<dyn Device>,
        kind: MemoryKind,
        bytes: u64,
        shared: bool,
    ) -> Result<Arc<Self>, GpuError> {
        if shared { Self::shared(device, kind, bytes) } else { Self::new(device, kind, bytes) }
    }

    /// Returns whether the memory lives no longer than this value. Otherwise the program owns it and keeps it by
    /// itself, and nothing has to hold this value while a kernel uses the memory.
    pub fn is_owner(&self) -> bool {
        self.raw.owner.is_owner()
    }

    /// Maps memory of another process of the host, at a place or at any address.
    ///
    /// # Errors
    /// An error of the device.
    pub(crate) fn imported(
        device: &Arc<dyn Device>,
        file: SharedFile,
        place: Option<FlatPlace>,
    ) -> Result<Arc<Self>, GpuError> {
        let (kind, bytes) = (file.kind, file.bytes);
        Ok(Self::with(device.shares("map memory of other processes")?.import(file, place)?, device, kind, bytes))
    }

    /// Returns the file that holds it, if one does.
    #[doc(hidden)]
    pub fn file(&self) -> Option<std::io::Result<SharedFile>> {
        let file = self.raw.file.as_ref()?.try_clone();
        Some(file.map(|file| SharedFile { file, bytes: self.bytes, kind: self.kind }))
    }

    /// Returns the communicators whose ranks have its key.
    #[doc(hidden)]
    pub fn exposure(&self) -> &Exposure {
        &self.exposure
    }

    /// Returns the key by which other ranks find it. The first call makes it by `publish`.
    pub(crate) fn key(&self, publish: impl FnOnce() -> Key) -> &Key {
        self.key.get_or_init(publish)
    }

    /// Allocates device memory at a place of its own; `bytes` of it are used. `shared`: in a file that other processes
    /// of the host can map.
    ///
    /// # Errors
    /// [`GpuError::OutOfRange`] if the place is shorter; [`GpuError::Unsupported`] if it is for another kind of device,
    /// or its ends are no multiples of the device's [granularity](crate::MemorySharing::granularity);
    /// [`GpuError::OutOfMemory`], or the device's error.
    #[doc(hidden)]
    pub fn placed(device: &Arc<dyn Device>, place: FlatPlace, bytes: u64, shared: bool) -> Result<Arc<Self>, GpuError> {
        within(0, bytes, place.bytes())?;
        if !place.fits(&**device) {
            let what = "put memory there: it is for other devices, or no multiple of the granularity";
            return Err(GpuError::Unsupported { device: device.name(), what });
        }
        let sharing = device.shares("put memory at an address of the caller's choice")?;
        Ok(Self::with(sharing.allocate_at(place, shared)?, device, MemoryKind::Device, bytes))
    }

    /// Checks that kernels of `device`, which reaches this memory's device, reach this memory too.
    ///
    /// # Errors
    /// [`GpuError::Foreign`] with the reason.
    pub fn check_reach(&self, device: &dyn Device) -> Result<(), GpuError> {
        self.raw.owner.check_reach(device)
    }

    /// Returns the device address of the first byte.
    pub fn address(&self) -> u64 {
        self.raw.address
    }

    /// Returns the length in bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Returns the kind of memory.
    pub fn kind(&self) -> MemoryKind {
        self.kind
    }

    /// Returns the device to which it belongs.
    pub fn device(&self) -> &Arc<dyn Device> {
        &self.device
    }

    /// Copies values to the bytes from `offset` on. No kernel may use those bytes meanwhile.
    ///
    /// # Errors
    /// [`GpuError::OutOfRange`], or an error of the device.
    pub fn write<T: Pod>(&self, offset: u64, values: &[T]) -> Result<(), GpuError> {
        let bytes = bytemuck::cast_slice(values);
        let address = self.address() + within(offset, bytes.len() as u64, self.bytes)?;
        // Safety: the bytes are in the range of an allocation that is alive.
        unsafe { self.device.copy_in(address, bytes) }
    }

    /// Copies values from the bytes from `offset` on.
    ///
    /// # Errors
    /// [`GpuError::OutOfRange`], or an error of the device.
    pub fn read<T: Pod>(&self, offset: u64, values: &mut [T]) -> Result<(), GpuError> {
        let bytes = bytemuck::cast_slice_mut(values);
        let address = self.address() + within(offset, bytes.len() as u64, self.bytes)?;
        // Safety: the bytes are in the range of an allocation that is alive.
        unsafe { self.device.copy_out(bytes, address) }
    }

    /// Returns the bytes `range` of this allocation.
    ///
    /// # Errors
    /// [`GpuError::OutOfRange`].
    pub fn slice(self: &Arc<Self>, range: Range<u64>) -> Result<MemorySlice, GpuError> {
        let bytes = range.end.checked_sub(range.start).unwrap_or(u64::MAX);
        let offset = within(range.start, bytes, self.bytes)?;
        Ok(MemorySlice { memory: self.clone(), offset, bytes })
    }

    /// Returns the whole allocation as a slice.
    pub fn whole(self: &Arc<Self>) -> MemorySlice {
        MemorySlice { memory: self.clone(), offset: 0, bytes: self.bytes }
    }
}

/// Part of an allocation, which it keeps alive.
///
/// ```
/// use gin_gpu::{Device, GpuError, Memory, MemoryKind, virt::VirtualDevice};
/// use std::sync::Arc;
///
/// let device: Arc<dyn Device> = VirtualDevice::memory_only(0);
/// let memory = Memory::new(&device, MemoryKind::Device, 16)?;
/// let half = memory.slice(8..16)?;
/// assert_eq!((half.address(), half.bytes()), (memory.address() + 8, 8));
/// # Ok::<(), GpuError>(())
/// ```
#[derive(Clone, Debug)]
pub struct MemorySlice {
    memory: Arc<Memory>,
    offset: u64,
    bytes: u64,
}

impl MemorySlice {
    /// Returns the allocation.
    pub fn memory(&self) -> &Arc<Memory> {
        &self.memory
    }

    /// Returns the offset of its first byte in the allocation.
    pub fn offset(&self) -> u64 {
        self.offset
    }

    /// Returns the device address of its first byte.
    pub fn address(&self) -> u64 {
        self.memory.address() + self.offset
    }

    /// Returns the length in bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Copies values to the bytes of the slice from `offset` on.
    ///
    /// # Errors
    /// As [`Memory::write`].
    pub fn write<T: Pod>(&self, offset: u64, values: &[T]) -> Result<(), GpuError> {
        self.memory.write(self.offset + within(offset, size_of_val(values) as u64, self.bytes)?, values)
    }

    /// Copies values from the bytes of the slice from `offset` on.
    ///
    /// # Errors
    /// As [`Memory::read`].
    pub fn read<T: Pod>(&self, offset: u64, values: &mut [T]) -> Result<(), GpuError> {
        self.memory.read(self.offset + within(offset, size_of_val(values) as u64, self.bytes)?, values)
    }
}
