// SPDX-License-Identifier: MIT OR Apache-2.0
//! The virtual GPU's memory at fixed distances: reserved addresses of the process, where pages are mapped and unmapped.

use super::error::out_of_memory;
use super::flat::{FlatPlace, RawAddresses};
use super::shared::{HostFile, HostPages};
use super::{DeviceKind, GpuError, MemoryKind, RawMemory};
use rustix::mm::{Advice, MapFlags, MprotectFlags, ProtFlags, madvise, mmap_anonymous, mprotect, munmap};
use std::ffi::c_void;
use std::os::fd::OwnedFd;

/// The bytes of a slot that are tried first. Many communicators fit into 128 TiB of addresses, and no machine has as
/// much memory as a slot.
const LARGEST: u64 = 64 << 30;

/// The fewest bytes of a slot.
const SMALLEST: u64 = 4 << 30;

/// Returns the bytes of a page.
pub(super) fn page() -> u64 {
    rustix::param::page_size() as u64
}

/// Returns an address of the host as a pointer.
pub(super) fn pointer(address: u64) -> *mut c_void {
    std::ptr::with_exposed_provenance_mut(address as usize)
}

/// Addresses at which no access is permitted.
#[derive(Debug)]
pub(super) struct Pages {
    start: u64,
    stride: u64,
    bytes: usize,
}

impl Pages {
    /// Reserves addresses for `slots` slots.
    pub(super) fn reserve(slots: u32) -> Result<Self, GpuError> {
        let mut stride = LARGEST;
        loop {
            let reserved = usize::try_from(u64::from(slots.max(1)) * stride).ok().map(|bytes| {
                let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
                // Safety: the kernel chooses unused addresses.
                let start = unsafe { mmap_anonymous(std::ptr::null_mut(), bytes, ProtFlags::empty(), flags) };
                start.map(|start| Self { start: start.expose_provenance() as u64, stride, bytes })
            });
            match reserved {
                Some(Ok(pages)) => return Ok(pages),
                _ if stride > SMALLEST => stride /= 2,
                outcome => {
                    let reason = outcome.and_then(Result::err).map_or("too many".to_owned(), |error| error.to_string());
                    return Err(GpuError::Addresses { slots, least: SMALLEST, reason });
                }
            }
        }
    }
}

impl RawAddresses for Pages {
    fn kind(&self) -> DeviceKind {
        DeviceKind::Virtual
    }

    fn start(&self) -> u64 {
        self.start
    }

    fn stride(&self) -> u64 {
        self.stride
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        // Safety: the addresses were reserved with this length, and every place in them is gone. It fails only for
        // addresses that were never mapped.
        let _ = unsafe { munmap(pointer(self.start), self.bytes) };
    }
}

/// A file mapped at a place, which other processes of the host can map too.
#[derive(Debug)]
pub(super) struct PlacedFile {
    /// `None` only in `drop`.
    place: Option<FlatPlace>,
    address: u64,
    file: HostFile,
}

impl PlacedFile {
    /// Maps the file at a place of the same length.
    pub(super) fn new(place: FlatPlace, mut file: HostFile) -> Result<Self, GpuError> {
        let (address, bytes) = (place.address(), place.bytes());
        if file.length() != bytes {
            return Err(GpuError::OutOfRange { offset: 0, end: file.length(), length: bytes });
        }
        // Safety: the place is in reserved addresses of this kind, has no other owner, and is as long as the file.
        let mapped = unsafe { file.map_at(address) };
        mapped.map_err(out_of_memory(MemoryKind::Device, bytes))?;
        Ok(Self { place: Some(place), address, file })
    }
}

impl RawMemory for PlacedFile {
    fn address(&self) -> u64 {
        self.address
    }

    fn file(&self) -> Option<std::io::Result<OwnedFd>> {
        self.file.again()
    }
}

impl Drop for PlacedFile {
    fn drop(&mut self) {
        let Some(place) = self.place.take() else { return };
        let (start, bytes) = (pointer(self.address), self.file.length() as usize);
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE | MapFlags::FIXED;
        // Safety: the present mapping is not used any more, and the addresses stay reserved.
        if unsafe { mmap_anonymous(start, bytes, ProtFlags::empty(), flags) }.is_err() {
            // The file may still be mapped, so this place stays taken.
            place.leak();
        }
    }
}

/// Memory of the host in a file, which other processes of the host can map too.
#[derive(Debug)]
pub(super) struct FileMemory(pub(super) HostPages);

impl RawMemory for FileMemory {
    fn address(&self) -> u64 {
        self.0.start()
    }

    fn file(&self) -> Option<std::io::Result<OwnedFd>> {
        self.0.file().again()
    }
}

/// Pages at a place.
#[derive(Debug)]
pub(super) struct MappedMemory {
    /// `None` only in `drop`.
    place: Option<FlatPlace>,
    address: u64,
}

impl MappedMemory {
    /// Makes zeroed pages at a place whose ends are multiples of pages.
    pub(super) fn new(place: FlatPlace) -> Result<Self, GpuError> {
        let (address, bytes) = (place.address(), place.bytes());
        // Safety: the place is in reserved addresses of this kind, has no other owner, and consists of whole pages.
        let opened = unsafe { mprotect(pointer(address), bytes as usize, MprotectFlags::READ | MprotectFlags::WRITE) };
        opened.map_err(out_of_memory(MemoryKind::Device, bytes))?;
        Ok(Self { place: Some(place), address })
    }
}

impl RawMemory for MappedMemory {
    fn address(&self) -> u64 {
        self.address
    }
}

impl Drop for MappedMemory {
    fn drop(&mut self) {
        let Some(place) = self.place.take() else { return };
        let (start, bytes) = (pointer(self.address), place.bytes() as usize);
        // Safety: as above, and the present mapping is not used any more. Later pages at this place are zero.
        let emptied = unsafe {
            madvise(start, bytes, Advice::LinuxDontNeed).and_then(|()| mprotect(start, bytes, MprotectFlags::empty()))
        };
        if emptied.is_err() {
            // Bytes may still be there, so this place stays taken.
            place.leak();
        }
    }
}
