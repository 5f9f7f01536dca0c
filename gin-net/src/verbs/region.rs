// SPDX-License-Identifier: MIT OR Apache-2.0
//! Memory that NICs reach: windows and signal words, and what the network itself has.

use super::objects::{Domain, local, made, shown, system};
use crate::NetError;
use gin_gpu::{DeviceKind, MemoryKind, MemorySlice};
use gin_verbs::verbs::{self as ffi, ACCESS, Piece};
use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};
use std::ffi::{c_int, c_void};
use std::fmt;
use std::ptr::{self, NonNull};
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

shown! { Region Buffer }

/// How a NIC reaches memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Way {
    /// Memory of the host, by its address.
    Host,
    /// A GPU's, as a file that drivers share.
    DmaBuf,
    /// A GPU's, by its address, through a module of the GPU's driver.
    PeerMemory,
}

impl fmt::Display for Way {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Host => "by its address",
            Self::DmaBuf => "as a DMA-BUF file",
            Self::PeerMemory => "by its address (peer memory)",
        })
    }
}

/// Memory that the NIC reaches.
pub(super) struct Region {
    domain: Arc<Domain>,
    region: NonNull<ffi::MemoryRegion>,
    way: Way,
    /// What requests of this rank call it.
    pub(super) local_key: u32,
    /// What requests of other ranks call it.
    pub(super) remote_key: u32,
}

/// Whether memory lies in a GPU, not in a host.
pub(super) fn is_in_gpu(slice: &MemorySlice) -> bool {
    let memory = slice.memory();
    memory.device().kind() == DeviceKind::Cuda && memory.kind() == MemoryKind::Device
}

/// Whether peers may write and read a region.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Reach {
    /// This rank's own requests only.
    Own,
    /// Peers too.
    Peers,
    /// Peers too, who may also add to words.
    PeersAdd,
}

impl Reach {
    fn flags(self) -> u32 {
        let [local_write, remote_write, remote_read, remote_atomic, _] = ACCESS;
        match self {
            Self::Own => local_write,
            Self::Peers => local_write | remote_write | remote_read,
            Self::PeersAdd => local_write | remote_write | remote_read | remote_atomic,
        }
    }
}

impl Region {
    /// Memory of this process.
    ///
    /// # Safety
    /// - It is there as long as the region.
    unsafe fn by_address(
        domain: &Arc<Domain>,
        (address, bytes): (u64, u64),
        reach: Reach,
        way: Way,
    ) -> Result<Self, NetError> {
        let first = address as usize as *mut c_void;
        // Safety: the domain is there; the rest is the caller's promise.
        let region = unsafe {
            (domain.functions().ibv_reg_mr)(domain.domain.as_ptr(), first, bytes as usize, reach.flags() as c_int)
        };
        Ok(Self::of(domain, made("registering memory", region)?, way))
    }

    fn of(domain: &Arc<Domain>, region: NonNull<ffi::MemoryRegion>, way: Way) -> Self {
        // Safety: the library just made it.
        let ffi::MemoryRegion { lkey, rkey, .. } = unsafe { region.as_ref() };
        Self { domain: domain.clone(), region, way, local_key: *lkey, remote_key: *rkey }
    }

    /// How the NIC reaches it.
    pub(super) fn way(&self) -> Way {
        self.way
    }

    /// Part of a window: its addresses are those that it has on its device.
    ///
    /// # Safety
    /// - It is there as long as the region.
    pub(super) unsafe fn of_slice(domain: &Arc<Domain>, slice: &MemorySlice, reach: Reach) -> Result<Self, NetError> {
        let (memory, address, bytes) = (slice.memory(), slice.address(), slice.bytes());
        if !is_in_gpu(slice) {
            // Safety: the caller's promise.
            return unsafe { Self::by_address(domain, (address, bytes), reach, Way::Host) };
        }
        // A GPU's memory: as a file that drivers share, else by its address, which needs the GPU driver's peer-memory module.
        // Safety: the caller's promise.
        let by_file = match unsafe { Self::of_device(domain, slice, reach) } {
            Ok(region) => return Ok(region),
            Err(reason) => reason,
        };
        // Safety: the caller's promise.
        let by_address = unsafe { Self::by_address(domain, (address, bytes), reach, Way::PeerMemory) };
        by_address.map_err(|by_address| {
            let device = memory.device().name();
            let reason = format!(
                "device memory of {device}: as a file (DMA-BUF): {by_file}; by its address (peer memory): {by_address}"
            );
            local("registering memory", reason)
        })
    }

    /// # Safety
    /// - As [`of_slice`](Self::of_slice).
    unsafe fn of_device(domain: &Arc<Domain>, slice: &MemorySlice, reach: Reach) -> Result<Self, String> {
        let register = domain.functions().ibv_reg_dmabuf_mr.ok_or("libibverbs is too old")?;
        let (address, bytes) = (slice.address(), slice.bytes());
        let file = slice.memory().device().export(address, bytes).map_err(|error| error.to_string())?;
        let flags = reach.flags() as c_int;
        // Safety: the domain is there, the file holds these bytes; the rest is the caller's promise.
        let region =
            unsafe { register(domain.domain.as_ptr(), file.offset(), bytes as usize, address, file.number(), flags) };
        let region = made("registering a file", region).map_err(|error| error.to_string())?;
        Ok(Self::of(domain, region, Way::DmaBuf))
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // Safety: it came from the library. Requests that use it from now on fail; its owner waits for its own.
        unsafe { (self.domain.functions().ibv_dereg_mr)(self.region.as_ptr()) };
    }
}

/// Memory of this network: what NICs write while this process reads.
pub(super) struct Buffer {
    /// By the port that it is reached over.
    regions: Vec<Region>,
    first: NonNull<u8>,
    bytes: usize,
}

impl Buffer {
    /// So many bytes, all zero.
    pub(super) fn new(domains: &[Arc<Domain>], bytes: usize, reach: Reach) -> Result<Self, NetError> {
        const WHAT: &str = "allocating memory";
        let bytes = bytes.max(1);
        // Safety: a new mapping of no place in particular.
        let first =
            unsafe { mmap_anonymous(ptr::null_mut(), bytes, ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE) };
        let first = first.map_err(|error| system(WHAT, error.raw_os_error()))?;
        let first = NonNull::new(first.cast::<u8>()).ok_or_else(|| local(WHAT, "it would begin at 0"))?;
        let mut buffer = Self { regions: Vec::new(), first, bytes };
        let address = buffer.address(0);
        for domain in domains {
            // Safety: `drop` unmaps it once NICs are done with it.
            buffer.regions.push(unsafe { Region::by_address(domain, (address, bytes as u64), reach, Way::Host) }?);
        }
        Ok(buffer)
    }

    pub(super) fn address(&self, at: usize) -> u64 {
        self.first.as_ptr().expose_provenance() as u64 + at as u64
    }

    /// What requests of other ranks call it, by port.
    pub(super) fn remote_keys(&self) -> impl Iterator<Item = u32> {
        self.regions.iter().map(|region| region.remote_key)
    }

    /// Part of it, for a request of this rank over a port.
    pub(super) fn piece(&self, at: usize, bytes: usize, rail: usize) -> Piece {
        let lkey = self.regions.get(rail).map_or(0, |region| region.local_key);
        Piece { addr: self.address(at), length: bytes as u32, lkey }
    }

    /// The 8 bytes at `at`, which the NIC may be writing.
    pub(super) fn word(&self, at: usize) -> u64 {
        let [0, ..] = [at % 8] else { return 0 };
        if at.checked_add(8).is_none_or(|end| end > self.bytes) {
            return 0;
        }
        // Safety: in range and aligned, since mappings begin at a page.
        let word = unsafe { self.first.as_ptr().add(at).cast::<u64>().read_volatile() };
        fence(Ordering::Acquire);
        word
    }

    /// Copies `N` bytes from `at`, which the NIC has written; zeros if there are no such bytes.
    pub(super) fn read<const N: usize>(&self, at: usize) -> [u8; N] {
        if at.checked_add(N).is_none_or(|end| end > self.bytes) {
            return [0; N];
        }
        // Safety: in range; bytes have no alignment.
        unsafe { self.first.as_ptr().add(at).cast::<[u8; N]>().read_volatile() }
    }

    /// Stores bytes at `at`, where the NIC reads nothing now. What is past the end is left out.
    pub(super) fn write(&mut self, at: usize, bytes: &[u8]) {
        if at.checked_add(bytes.len()).is_none_or(|end| end > self.bytes) {
            return;
        }
        // Safety: in range; nobody else writes there.
        unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), self.first.as_ptr().add(at), bytes.len()) };
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // Regions first, so that no NIC reaches what is mapped there next.
        self.regions.clear();
        // Safety: mapped by `new`; nobody has references into it.
        let _ = unsafe { munmap(self.first.as_ptr().cast(), self.bytes) };
    }
}
