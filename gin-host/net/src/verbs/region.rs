// SPDX-License-Identifier: MIT OR Apache-2.0
//! Memory regions: windows, signal words and the network's own buffers.

use super::device::RdmaDevice;
use super::objects::{Domain, local};
use crate::NetError;
use gin_gpu::{DeviceKind, MemoryKind, MemorySlice};
use gin_verbs::verbs::{MemoryRegion, ScatterGatherEntry};
use gin_verbs::{Access, CallError, non_null};
use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};
use std::ffi::{c_int, c_void};
use std::ptr::{self, NonNull};
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

/// How a NIC reaches memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug, derive_more::Display)]
pub enum Way {
    /// Host memory, by its address.
    #[display("by its address")]
    Host,
    /// GPU memory, as a DMA-BUF file.
    #[display("as a DMA-BUF file")]
    DmaBuf,
    /// GPU memory, by its address, through the GPU driver's peer-memory module.
    #[display("by its address (peer memory)")]
    PeerMemory,
}

/// A registered memory region.
#[derive(Debug)]
pub(super) struct Region {
    domain: Arc<Domain>,
    region: NonNull<MemoryRegion>,
    /// How the NIC reaches the memory.
    pub(super) way: Way,
    /// Key for requests of this rank.
    pub(super) local_key: u32,
    /// Key for requests of peers.
    pub(super) remote_key: u32,
}

/// Returns whether memory is a GPU's, not a host's.
pub(super) fn is_in_gpu(slice: &MemorySlice) -> bool {
    let memory = slice.memory();
    memory.device().kind() == DeviceKind::Cuda && memory.kind() == MemoryKind::Device
}

// Safety: libibverbs locks what threads share, and one thread at a time uses the region.
unsafe impl Send for Region {}

impl Region {
    /// Registers memory at an address of this process.
    ///
    /// # Safety
    /// - The memory stays as long as the region.
    unsafe fn by_address(
        domain: &Arc<Domain>,
        (address, bytes): (u64, u64),
        access: Access,
        way: Way,
    ) -> Result<Self, NetError> {
        let first = address as usize as *mut c_void;
        // Safety: the domain exists; the rest is the caller's promise.
        let region = unsafe {
            (domain.verbs().ibv_reg_mr)(domain.domain.as_ptr(), first, bytes as usize, access.bits() as c_int)
        };
        Ok(Self::of(domain, non_null("registering memory", region)?, way))
    }

    fn of(domain: &Arc<Domain>, region: NonNull<MemoryRegion>, way: Way) -> Self {
        // Safety: the library just created it.
        let MemoryRegion { lkey, rkey, .. } = unsafe { region.as_ref() };
        Self { domain: domain.clone(), region, way, local_key: *lkey, remote_key: *rkey }
    }

    /// Registers a slice of memory under the addresses that it has on its device.
    ///
    /// # Safety
    /// - The memory stays as long as the region.
    pub(super) unsafe fn of_slice(domain: &Arc<Domain>, slice: &MemorySlice, access: Access) -> Result<Self, NetError> {
        let (memory, address, bytes) = (slice.memory(), slice.address(), slice.bytes());
        if !is_in_gpu(slice) {
            // Safety: the caller's promise.
            return unsafe { Self::by_address(domain, (address, bytes), access, Way::Host) };
        }
        // Tries a DMA-BUF file first, then the address, which needs the GPU driver's peer-memory module.
        // Safety: the caller's promise.
        let by_file = match unsafe { Self::of_device(domain, slice, access) } {
            Ok(region) => return Ok(region),
            Err(reason) => reason,
        };
        // Safety: the caller's promise.
        let by_address = unsafe { Self::by_address(domain, (address, bytes), access, Way::PeerMemory) };
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
    unsafe fn of_device(domain: &Arc<Domain>, slice: &MemorySlice, access: Access) -> Result<Self, String> {
        let register = domain.verbs().ibv_reg_dmabuf_mr.ok_or("libibverbs is too old")?;
        let (address, bytes) = (slice.address(), slice.bytes());
        let file = slice.memory().device().export(address, bytes).map_err(|error| error.to_string())?;
        let flags = access.bits() as c_int;
        // Safety: the domain exists, and the file holds these bytes; the rest is the caller's promise.
        let region =
            unsafe { register(domain.domain.as_ptr(), file.offset(), bytes as usize, address, file.number(), flags) };
        let region = non_null("registering a file", region).map_err(|error| NetError::from(error).to_string())?;
        Ok(Self::of(domain, region, Way::DmaBuf))
    }
}

impl RdmaDevice {
    /// Registers memory and releases it again. Returns how the NIC reaches the memory, and whether it can add to words
    /// there.
    ///
    /// # Errors
    /// [`NetError::Local`], with the reason why the NIC does not reach the memory.
    pub fn reach(self: &Arc<Self>, memory: &MemorySlice) -> Result<(Way, bool), NetError> {
        let domain = Domain::new(self)?;
        // Safety: the region is gone before this returns.
        let register = |reach| unsafe { Region::of_slice(&domain, memory, reach) }.map(|region| region.way);
        match register(Access::SIGNALS) {
            Ok(way) if self.info.has_atomics => Ok((way, true)),
            _ => register(Access::PEERS).map(|way| (way, false)),
        }
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // Safety: it came from the library. Its owner has waited for its own requests; later ones of peers fail.
        unsafe { (self.domain.verbs().ibv_dereg_mr)(self.region.as_ptr()) };
    }
}

/// Memory of the network itself, which NICs write while this process reads.
#[derive(Debug)]
pub(super) struct Buffer {
    /// By port.
    regions: Vec<Region>,
    first: NonNull<u8>,
    bytes: usize,
}

// Safety: the mapping belongs to no thread, and one thread at a time uses the buffer.
unsafe impl Send for Buffer {}

impl Buffer {
    /// Maps `bytes` bytes, all zero, and registers them with each port.
    pub(super) fn new(domains: &[Arc<Domain>], bytes: usize, access: Access) -> Result<Self, NetError> {
        const WHAT: &str = "allocating memory";
        let bytes = bytes.max(1);
        // Safety: a new mapping at an address that the kernel chooses.
        let first =
            unsafe { mmap_anonymous(ptr::null_mut(), bytes, ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE) };
        let first = first.map_err(|error| CallError { call: WHAT, errno: error.raw_os_error() })?;
        let first = NonNull::new(first.cast::<u8>()).ok_or_else(|| local(WHAT, "the kernel mapped it at address 0"))?;
        let mut buffer = Self { regions: Vec::new(), first, bytes };
        let address = buffer.address(0);
        for domain in domains {
            // Safety: `drop` unmaps the memory after its regions are gone.
            buffer.regions.push(unsafe { Region::by_address(domain, (address, bytes as u64), access, Way::Host) }?);
        }
        Ok(buffer)
    }

    pub(super) fn address(&self, at: usize) -> u64 {
        self.first.as_ptr().expose_provenance() as u64 + at as u64
    }

    /// Returns the keys for requests of peers, by port.
    pub(super) fn remote_keys(&self) -> impl Iterator<Item = u32> {
        self.regions.iter().map(|region| region.remote_key)
    }

    /// Returns a scatter-gather entry of `bytes` bytes at offset `at`, for a request over a port.
    pub(super) fn sge(&self, at: usize, bytes: usize, port: usize) -> ScatterGatherEntry {
        let lkey = self.regions.get(port).map_or(0, |region| region.local_key);
        ScatterGatherEntry { addr: self.address(at), length: bytes as u32, lkey }
    }

    /// Returns the aligned word at offset `at`, which the NIC may be writing; 0 if there is no such word.
    pub(super) fn word(&self, at: usize) -> u64 {
        if !at.is_multiple_of(8) || at.checked_add(8).is_none_or(|end| end > self.bytes) {
            return 0;
        }
        // Safety: in range, and aligned because mappings begin at a page.
        let word = unsafe { self.first.as_ptr().add(at).cast::<u64>().read_volatile() };
        fence(Ordering::Acquire);
        word
    }

    /// Copies `N` bytes from offset `at`, which the NIC has written; zeros if they are out of range.
    pub(super) fn read<const N: usize>(&self, at: usize) -> [u8; N] {
        if at.checked_add(N).is_none_or(|end| end > self.bytes) {
            return [0; N];
        }
        // Safety: in range; bytes have no alignment.
        unsafe { self.first.as_ptr().add(at).cast::<[u8; N]>().read_volatile() }
    }

    /// Stores bytes at offset `at`, where the NIC reads nothing now. Stores nothing if they are out of range.
    pub(super) fn write(&mut self, at: usize, bytes: &[u8]) {
        if at.checked_add(bytes.len()).is_none_or(|end| end > self.bytes) {
            return;
        }
        // Safety: in range; no other thread writes there.
        unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), self.first.as_ptr().add(at), bytes.len()) };
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // Regions first, so that no NIC reaches a later mapping at these addresses.
        self.regions.clear();
        // Safety: mapped by `new`; no references into it are left.
        let _ = unsafe { munmap(self.first.as_ptr().cast(), self.bytes) };
    }
}
