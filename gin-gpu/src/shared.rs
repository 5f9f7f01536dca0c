// SPDX-License-Identifier: MIT OR Apache-2.0
//! Memory as a file that another process of the host can map.

use super::error::out_of_memory;
use super::mapped::{page, pointer};
use super::{GpuError, MemoryKind, RawMemory};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, fstat, ftruncate, memfd_create};
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use std::io;
use std::os::fd::OwnedFd;

/// A file that contains all of an allocation.
#[derive(Debug)]
pub struct SharedFile {
    /// The file.
    pub file: OwnedFd,
    /// The bytes of the allocation; the file may be longer.
    pub bytes: u64,
    /// The kind of memory.
    pub kind: MemoryKind,
}

/// The seals of memory files. No process can shorten a file that others have mapped, or remove the seals.
const SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW).union(SealFlags::SEAL);

/// Memory of the host in a file that has no name.
#[derive(Debug)]
pub(super) struct HostFile {
    /// `None` once a file of another process is mapped: such files are closed, as there may be many.
    file: Option<OwnedFd>,
    length: u64,
    /// The file belongs to another process, which shares it.
    foreign: bool,
}

impl HostFile {
    /// Makes a file of `length` zero bytes, a whole number of pages.
    pub(super) fn new(length: u64) -> Result<Self, Errno> {
        let file = memfd_create("gin", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        ftruncate(&file, length)?;
        fcntl_add_seals(&file, SEALS)?;
        Ok(Self { file: Some(file), length, foreign: false })
    }

    /// Takes a file of another process, for a mapping of `bytes` bytes.
    ///
    /// # Errors
    /// The reason for which it cannot be mapped, in words: it could be shortened, or it is too short.
    pub(super) fn of_other(file: OwnedFd, bytes: u64) -> Result<Self, String> {
        let text = |error: Errno| format!("its file cannot be examined: {error}");
        if !fcntl_get_seals(&file).map_err(text)?.contains(SealFlags::SHRINK) {
            return Err("its file could be shortened while it is mapped".to_owned());
        }
        let length = bytes.max(1).checked_next_multiple_of(page()).ok_or("its length makes no sense")?;
        let there = u64::try_from(fstat(&file).map_err(text)?.st_size).unwrap_or(0);
        if there < length {
            return Err(format!("its file has {there} bytes, not {length}"));
        }
        Ok(Self { file: Some(file), length, foreign: true })
    }

    pub(super) fn length(&self) -> u64 {
        self.length
    }

    /// Returns the file once more, if it is of this process.
    pub(super) fn again(&self) -> Option<io::Result<OwnedFd>> {
        self.file.as_ref().filter(|_| !self.foreign).map(OwnedFd::try_clone)
    }

    /// Maps the whole file, at `address` or where the kernel chooses.
    ///
    /// # Safety
    /// - If there is an `address`, the caller owns the bytes of the file's length from there on, and may map over them.
    unsafe fn map(&mut self, address: Option<u64>) -> Result<u64, Errno> {
        let (hint, fixed) = match address {
            Some(address) => (pointer(address), MapFlags::FIXED),
            None => (std::ptr::null_mut(), MapFlags::empty()),
        };
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        let file = self.file.as_ref().ok_or(Errno::BADF)?;
        // Safety: the caller's promise, or the kernel chooses addresses that nobody uses.
        let start = unsafe { mmap(hint, self.length as usize, protection, MapFlags::SHARED | fixed, file, 0) }?;
        self.file.take_if(|_| self.foreign);
        Ok(start.expose_provenance() as u64)
    }

    /// Maps the whole file over addresses of the caller.
    ///
    /// # Safety
    /// - The caller owns the bytes of the file's length from `address` on, and may map over them.
    pub(super) unsafe fn map_at(&mut self, address: u64) -> Result<(), Errno> {
        // Safety: the caller's promise.
        unsafe { self.map(Some(address)) }.map(drop)
    }
}

/// Memory of the host in a file, mapped where the kernel chose.
#[derive(Debug)]
pub(super) struct HostPages {
    file: HostFile,
    start: u64,
}

impl HostPages {
    /// Maps a file.
    pub(super) fn new(mut file: HostFile) -> Result<Self, Errno> {
        // Safety: no address is requested.
        let start = unsafe { file.map(None) }?;
        Ok(Self { file, start })
    }

    /// Makes zeroed pages for `bytes` bytes, in a new file.
    pub(super) fn allocate(kind: MemoryKind, bytes: u64) -> Result<Self, GpuError> {
        let refuse = out_of_memory(kind, bytes);
        let length = bytes.max(1).checked_next_multiple_of(page());
        let length = length.ok_or_else(|| refuse("it is more than an address space".to_owned()))?;
        let pages = HostFile::new(length).and_then(Self::new);
        pages.map_err(|error| refuse(error.to_string()))
    }

    #[cfg(feature = "cuda")]
    pub(super) fn length(&self) -> u64 {
        self.file.length
    }
}

impl RawMemory for HostPages {
    fn address(&self) -> u64 {
        self.start
    }

    fn file(&self) -> Option<io::Result<OwnedFd>> {
        self.file.again()
    }
}

impl Drop for HostPages {
    fn drop(&mut self) {
        // Safety: the pages were mapped with this length and are not used any more. It fails only for addresses that
        // were never mapped.
        let _ = unsafe { munmap(pointer(self.start), self.file.length as usize) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_could_become_shorter_or_is_too_short_is_refused() {
        let page = super::page();
        let file = HostFile::new(2 * page).unwrap();
        assert_eq!(ftruncate(file.file.as_ref().unwrap(), 0), Err(Errno::PERM));
        assert_eq!(ftruncate(file.file.as_ref().unwrap(), 3 * page), Err(Errno::PERM));
        assert!(HostFile::of_other(file.again().unwrap().unwrap(), 2 * page).is_ok());
        assert!(HostFile::of_other(file.again().unwrap().unwrap(), 0).is_ok());
        let reason = HostFile::of_other(file.again().unwrap().unwrap(), 2 * page + 1).unwrap_err();
        assert_eq!(reason, format!("its file has {} bytes, not {}", 2 * page, 3 * page));
        assert!(HostFile::of_other(file.again().unwrap().unwrap(), u64::MAX).is_err());
        let open = memfd_create("open", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
        ftruncate(&open, page).unwrap();
        assert!(HostFile::of_other(open, page).unwrap_err().contains("shortened"));
    }

    #[test]
    fn two_mappings_of_a_file_show_the_same_bytes() {
        let pages = HostPages::allocate(MemoryKind::Device, 10).unwrap();
        let other = HostPages::new(HostFile::of_other(pages.file().unwrap().unwrap(), 10).unwrap()).unwrap();
        assert_ne!(pages.address(), other.address());
        assert!(other.file().is_none(), "it is for its owner to give");
        let word = |address: u64| std::ptr::with_exposed_provenance_mut::<u64>(address as usize);
        // Safety: both mappings are a page long.
        unsafe {
            assert_eq!(word(other.address()).read_volatile(), 0);
            word(pages.address()).write_volatile(7);
            assert_eq!(word(other.address()).read_volatile(), 7);
        }
        drop(pages);
        // Safety: the file lives as long as one of them.
        assert_eq!(unsafe { word(other.address()).read_volatile() }, 7);
    }
}
