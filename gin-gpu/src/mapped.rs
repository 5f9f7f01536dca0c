// SPDX-License-Identifier: MIT OR Apache-2.0
//! The virtual GPU's memory at fixed distances: reserved addresses of the process, where pages are mapped and unmapped.

use super::error::out_of_memory;
use super::flat::{FlatPlace, RawAddresses};
use super::shared::HostFile;
use super::{DeviceKind, GpuError, MemoryKind, RawMemory};
use rustix::mm::{MapFlags, MprotectFlags, ProtFlags, mmap_anonymous, mprotect, munmap};
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

/// Pages at a place: zeroed memory of this process, or a file that other processes of the host can map too.
#[derive(Debug)]
pub(super) struct PlacedPages {
    /// `None` only in `drop`.
    place: Option<FlatPlace>,
    address: u64,
    file: Option<HostFile>,
}

impl PlacedPages {
    /// Maps zeroed pages, or a file of the same length, at a place whose ends are multiples of pages.
    pub(super) fn new(place: FlatPlace, mut file: Option<HostFile>) -> Result<Self, GpuError> {
        let (address, bytes) = (place.address(), place.bytes());
        let opened = match &mut file {
            Some(file) if file.length() != bytes => {
                return Err(GpuError::OutOfRange { offset: 0, end: file.length(), length: bytes });
            }
            // Safety: the place is in reserved addresses of this kind, has no other owner, and is as long as the file.
            Some(file) => unsafe { file.map_at(address) },
            // Safety: the place is in reserved addresses of this kind, has no other owner, and consists of whole pages.
            None => unsafe { mprotect(pointer(address), bytes as usize, MprotectFlags::READ | MprotectFlags::WRITE) },
        };
        opened.map_err(out_of_memory(MemoryKind::Device, bytes))?;
        Ok(Self { place: Some(place), address, file })
    }
}

impl RawMemory for PlacedPages {
    fn address(&self) -> u64 {
        self.address
    }

    fn file(&self) -> Option<std::io::Result<OwnedFd>> {
        self.file.as_ref()?.again()
    }
}

impl Drop for PlacedPages {
    fn drop(&mut self) {
        let Some(place) = self.place.take() else { return };
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE | MapFlags::FIXED;
        let (start, bytes) = (pointer(self.address), place.bytes() as usize);
        // Safety: the present mapping is not used any more, and the addresses stay reserved. Later pages at this place
        // are zero.
        if unsafe { mmap_anonymous(start, bytes, ProtFlags::empty(), flags) }.is_err() {
            // The bytes, or the file, may still be there, so this place stays taken.
            place.leak();
        }
    }
}
