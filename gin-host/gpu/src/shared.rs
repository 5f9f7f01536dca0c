// SPDX-License-Identifier: MIT OR Apache-2.0
//! Memory of the host: pages, reserved addresses, and files that another process of the host can map.

use super::error::{CallError, check_memory_cgroup, out_of_host_memory, out_of_memory};
use super::flat::FlatPlace;
use super::{GpuError, MemoryKind, RawMemory};
use gin_device::exec::watch;
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, fstat, ftruncate, memfd_create};
use rustix::mm::{MapFlags, MprotectFlags, ProtFlags, mmap, mmap_anonymous, mprotect, munmap};
use std::ffi::c_void;
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

/// The mapping of addresses at which no access is permitted.
const RESERVED: MapFlags = MapFlags::PRIVATE.union(MapFlags::NORESERVE);

/// Returns the bytes of a page.
pub(super) fn page() -> u64 {
    rustix::param::page_size() as u64
}

/// Returns an address of the host as a pointer.
pub(super) fn pointer(address: u64) -> *mut c_void {
    std::ptr::with_exposed_provenance_mut(address as usize)
}

/// Makes a file of `length` zero bytes, a whole number of pages. It has no name.
pub(super) fn new_file(length: u64) -> Result<OwnedFd, CallError> {
    let file = memfd_create("gin", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING);
    let file = file.map_err(CallError::of("memfd_create"))?;
    ftruncate(&file, length).map_err(CallError::of("ftruncate"))?;
    fcntl_add_seals(&file, SEALS).map_err(CallError::of("fcntl F_ADD_SEALS"))?;
    Ok(file)
}

/// Checks a file of another process, for a mapping of `bytes` bytes. Returns the length of that mapping.
///
/// # Errors
/// The reason for which it cannot be mapped, in words: it could be shortened, or it is too short.
pub(super) fn check_file(file: &OwnedFd, bytes: u64) -> Result<u64, String> {
    let text = |call| move |errno| format!("its file cannot be examined: {}", CallError { call, errno }.explain(0));
    if !fcntl_get_seals(file).map_err(text("fcntl F_GET_SEALS"))?.contains(SealFlags::SHRINK) {
        return Err("its file could be shortened while it is mapped".to_owned());
    }
    let length = bytes.max(1).checked_next_multiple_of(page()).ok_or("its length makes no sense")?;
    let there = u64::try_from(fstat(file).map_err(text("fstat"))?.st_size).unwrap_or(0);
    if there < length {
        return Err(format!("its file has {there} bytes, not {length}"));
    }
    Ok(length)
}

/// Pages of the host. Dropping them unmaps them.
#[derive(Debug)]
pub(super) struct HostPages {
    /// The first address.
    pub(super) start: u64,
    /// The bytes from there on.
    pub(super) length: u64,
    /// The place at which they are mapped; `None` if the kernel chose the addresses.
    place: Option<FlatPlace>,
}

impl HostPages {
    /// Reserves addresses at which no access is permitted.
    pub(super) fn reserve(length: u64) -> Result<Self, CallError> {
        // Safety: the kernel chooses unused addresses.
        let start = unsafe { mmap_anonymous(std::ptr::null_mut(), length as usize, ProtFlags::empty(), RESERVED) };
        let start = start.map_err(CallError::of("mmap"))?;
        Ok(Self { start: start.expose_provenance() as u64, length, place: None })
    }

    /// Maps the first `length` bytes of a file.
    pub(super) fn of_file(file: &OwnedFd, length: u64) -> Result<Self, CallError> {
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // Safety: the kernel chooses unused addresses.
        let start = unsafe { mmap(std::ptr::null_mut(), length as usize, protection, MapFlags::SHARED, file, 0) };
        let start = start.map_err(CallError::of("mmap"))?;
        Ok(Self { start: start.expose_provenance() as u64, length, place: None })
    }

    /// Makes zeroed pages for `bytes` bytes, in a new file.
    pub(super) fn allocate(kind: MemoryKind, bytes: u64) -> Result<(Self, OwnedFd), GpuError> {
        let refuse = out_of_memory(kind, bytes);
        let length = bytes.max(1).checked_next_multiple_of(page());
        let length = length.ok_or_else(|| refuse("it is more than an address space"))?;
        check_memory_cgroup(kind, length)?;
        let made = new_file(length).and_then(|file| Ok((Self::of_file(&file, length)?, file)));
        made.map_err(out_of_host_memory(kind, length))
    }

    /// Maps zeroed pages, or a file that is at least as long, at a place whose ends are multiples of pages.
    pub(super) fn at(place: FlatPlace, file: Option<&OwnedFd>) -> Result<Self, GpuError> {
        let (start, length) = (place.address(), place.bytes());
        let (address, bytes) = (pointer(start), length as usize);
        let opened = match file {
            Some(file) => {
                let (protection, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED | MapFlags::FIXED);
                // Safety: the place is in reserved addresses of this kind, has no other owner, and consists of whole
                // pages.
                unsafe { mmap(address, bytes, protection, flags, file, 0) }.map(drop).map_err(CallError::of("mmap"))
            }
            // Safety: as above.
            None => unsafe { mprotect(address, bytes, MprotectFlags::READ | MprotectFlags::WRITE) }
                .map_err(CallError::of("mprotect")),
        };
        opened.map_err(out_of_host_memory(MemoryKind::Device, length))?;
        Ok(Self { start, length, place: Some(place) })
    }
}

impl RawMemory for HostPages {}

impl Drop for HostPages {
    fn drop(&mut self) {
        watch::event(watch::Event::Forget { address: self.start, bytes: self.length });
        let (start, bytes) = (pointer(self.start), self.length as usize);
        let Some(place) = self.place.take() else {
            // Safety: the pages were mapped with this length and are not used any more; if they were reserved, every
            // place in them is gone. It fails only for addresses that were never mapped.
            let _ = unsafe { munmap(start, bytes) };
            return;
        };
        // Safety: the present mapping is not used any more, and the addresses stay reserved. Later pages at this place
        // are zero.
        if unsafe { mmap_anonymous(start, bytes, ProtFlags::empty(), RESERVED | MapFlags::FIXED) }.is_err() {
            // The bytes, or the file, may still be there, so this place stays taken.
            std::mem::forget(place);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::io::Errno;

    /// Forbids a call to this thread from now on, as seccomp filters of containers do.
    fn forbid(call: libc::c_long) {
        let bpf = |code: u32, value: u32, equal: u8, other: u8| libc::sock_filter {
            code: code as u16,
            jt: equal,
            jf: other,
            k: value,
        };
        let mut filter = [
            bpf(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0, 0),
            bpf(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, call as u32, 0, 1),
            bpf(libc::BPF_RET | libc::BPF_K, libc::SECCOMP_RET_ERRNO | libc::EPERM as u32, 0, 0),
            bpf(libc::BPF_RET | libc::BPF_K, libc::SECCOMP_RET_ALLOW, 0, 0),
        ];
        let program = libc::sock_fprog { len: filter.len() as u16, filter: filter.as_mut_ptr() };
        // Safety: the program is valid, and concerns this thread only.
        unsafe {
            assert_eq!(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
            assert_eq!(libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const program), 0);
        }
    }

    #[test]
    fn a_call_that_is_forbidden_is_named_with_what_usually_forbids_it() {
        let error = |call| {
            let thread = std::thread::spawn(move || {
                forbid(call);
                HostPages::allocate(MemoryKind::Pinned, 4096).map(drop).unwrap_err().to_string()
            });
            thread.join().unwrap()
        };
        for (call, name) in [(libc::SYS_memfd_create, "memfd_create"), (libc::SYS_ftruncate, "ftruncate")] {
            let error = error(call);
            let start = format!("cannot allocate 4096 bytes of pinned host memory: {name}: Operation not permitted");
            assert!(error.starts_with(&start) && error.contains("seccomp"), "{error}");
        }
    }

    #[test]
    fn a_file_that_could_become_shorter_or_is_too_short_is_refused() {
        let page = super::page();
        let file = new_file(2 * page).unwrap();
        assert_eq!(ftruncate(&file, 0), Err(Errno::PERM));
        assert_eq!(ftruncate(&file, 3 * page), Err(Errno::PERM));
        assert_eq!(check_file(&file, 2 * page), Ok(2 * page));
        assert_eq!(check_file(&file, 0), Ok(page));
        let reason = check_file(&file, 2 * page + 1).unwrap_err();
        assert_eq!(reason, format!("its file has {} bytes, not {}", 2 * page, 3 * page));
        assert!(check_file(&file, u64::MAX).is_err());
        let open = memfd_create("open", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
        ftruncate(&open, page).unwrap();
        assert!(check_file(&open, page).unwrap_err().contains("shortened"));
    }

    #[test]
    fn two_mappings_of_a_file_show_the_same_bytes() {
        let (pages, file) = HostPages::allocate(MemoryKind::Device, 10).unwrap();
        let other = HostPages::of_file(&file, check_file(&file, 10).unwrap()).unwrap();
        assert_ne!(pages.start, other.start);
        let word = |address: u64| std::ptr::with_exposed_provenance_mut::<u64>(address as usize);
        // Safety: both mappings are a page long.
        unsafe {
            assert_eq!(word(other.start).read_volatile(), 0);
            word(pages.start).write_volatile(7);
            assert_eq!(word(other.start).read_volatile(), 7);
        }
        drop((pages, file));
        // Safety: the file lives as long as one of them.
        assert_eq!(unsafe { word(other.start).read_volatile() }, 7);
    }

    #[test]
    fn mapped_memory_of_another_process_is_for_its_owner_to_give() {
        let device: std::sync::Arc<dyn crate::Device> = crate::virt::VirtualDevice::memory_only(0);
        let memory = crate::Memory::shared(&device, MemoryKind::Device, 10).unwrap();
        let file = memory.file().unwrap().unwrap();
        assert!(crate::Memory::imported(&device, file, None).unwrap().file().is_none());
    }
}
