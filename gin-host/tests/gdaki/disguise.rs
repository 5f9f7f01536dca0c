// SPDX-License-Identifier: MIT OR Apache-2.0
//! A device that claims to be a GPU, and a NIC that claims to reach it. Both consist of memory of this process.

use gin_gpu::virt::VirtualDevice;
use gin_gpu::{
    Allocation, Device, DeviceKind, Function, GpuError, Keep, LaunchConfig, Limits, MappedPages, MemoryFile,
    MemoryKind, Module, ModuleSource, NicAccess, Stream, whole_pages,
};
use gin_nic::hca::{Access, Domain, Extent, Handle, Port, Region, Uar, Umem};
use gin_nic::{Hca, HcaError};
use gin_soft_nic_host::SoftHca;
use std::fmt;
use std::io::{ErrorKind, Read};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

const PAGE: u64 = 4096;

/// The driver of a device that claims to be a GPU: its answers, and a record of the requests.
#[derive(Default)]
pub struct Driver {
    /// Distance of mapped doorbell pages from the host's address; `None` to refuse mapping.
    pub shift: Option<u64>,
    /// Number of pages after which the driver refuses more.
    pub max_pages: usize,
    /// Set if the driver exports memory as files.
    pub exports: bool,
    /// Number of calls that ask for pages.
    pub asked: usize,
    /// Addresses of the pages that are mapped now.
    pub mapped: Vec<u64>,
    /// Keepers of pages that are no longer mapped, until the pages are unregistered.
    pub deferred: Vec<Keep>,
    /// The other ends of exported files: address and length of the memory, and its start.
    pub files: Vec<(UnixStream, u64, u64)>,
}

/// A driver that several owners observe.
#[derive(Clone, Default)]
pub struct Shared(Arc<Mutex<Driver>>);

impl fmt::Debug for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Shared").finish_non_exhaustive()
    }
}

impl Shared {
    pub fn new(driver: Driver) -> Self {
        Self(Arc::new(Mutex::new(driver)))
    }

    /// Returns a driver that maps pages at the host's addresses.
    pub fn mapping() -> Self {
        Self::new(Driver { shift: Some(0), max_pages: usize::MAX, ..Driver::default() })
    }

    pub fn lock(&self) -> MutexGuard<'_, Driver> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns whether every file is closed on the receiving side.
    pub fn files_are_closed(&self) -> bool {
        self.lock().files.iter_mut().all(|(end, ..)| {
            end.set_nonblocking(true).unwrap();
            match end.read(&mut [0]) {
                Ok(count) => count == 0,
                Err(error) => {
                    assert_eq!(error.kind(), ErrorKind::WouldBlock);
                    false
                }
            }
        })
    }
}

struct Mapped {
    driver: Shared,
    page: u64,
    keep: Option<Keep>,
}

impl Drop for Mapped {
    fn drop(&mut self) {
        let mut driver = self.driver.lock();
        driver.mapped.retain(|page| *page != self.page);
        driver.deferred.extend(self.keep.take());
    }
}

/// A virtual GPU that claims to be a real one.
#[derive(Debug)]
pub struct Disguised {
    device: Arc<VirtualDevice>,
    driver: Shared,
}

impl Disguised {
    /// Returns a device whose driver maps no pages and exports no files.
    pub fn new(index: u32) -> Self {
        Self::with(index, &Shared::default())
    }

    pub fn with(index: u32, driver: &Shared) -> Self {
        Self { device: VirtualDevice::memory_only(index), driver: driver.clone() }
    }
}

impl Device for Disguised {
    fn name(&self) -> String {
        "a GPU".to_owned()
    }

    fn kind(&self) -> DeviceKind {
        DeviceKind::Cuda
    }

    fn limits(&self) -> Limits {
        self.device.limits()
    }

    fn allocate(&self, kind: MemoryKind, bytes: u64) -> Result<Allocation, GpuError> {
        self.device.allocate(kind, bytes)
    }

    unsafe fn copy_in(&self, destination: u64, source: &[u8]) -> Result<(), GpuError> {
        // Safety: the caller keeps the conditions.
        unsafe { self.device.copy_in(destination, source) }
    }

    unsafe fn copy_out(&self, destination: &mut [u8], source: u64) -> Result<(), GpuError> {
        // Safety: the caller keeps the conditions.
        unsafe { self.device.copy_out(destination, source) }
    }

    fn nic_access(&self) -> Option<&dyn NicAccess> {
        Some(self)
    }

    fn load(&self, source: ModuleSource<'_>) -> Result<Box<dyn Module>, GpuError> {
        self.device.load(source)
    }

    fn stream(&self) -> Result<Arc<dyn Stream>, GpuError> {
        self.device.stream()
    }

    fn stream_with_priority(&self, priority: i32) -> Result<Arc<dyn Stream>, GpuError> {
        self.device.stream_with_priority(priority)
    }

    fn reaches(&self, other: &dyn Device) -> bool {
        other.downcast::<Self>().is_some_and(|other| std::ptr::eq(self, other))
    }

    fn allows_dependent(&self, function: &Function) -> bool {
        self.device.allows_dependent(function)
    }

    fn resident_blocks(&self, function: &Function, config: &LaunchConfig) -> Result<u64, GpuError> {
        self.device.resident_blocks(function, config)
    }

    fn running(&self) -> usize {
        0
    }
}

impl NicAccess for Disguised {
    unsafe fn map_pages(&self, first: u64, bytes: u64, keep: Keep) -> Result<MappedPages, GpuError> {
        assert!(first.is_multiple_of(PAGE) && bytes == PAGE, "whole pages only");
        let mut driver = self.driver.lock();
        driver.asked += 1;
        let Some(shift) = driver.shift.filter(|_| driver.mapped.len() < driver.max_pages) else {
            return Err(GpuError::Driver { context: "map a page", reason: "not permitted".to_owned() });
        };
        assert!(!driver.mapped.contains(&first), "a page is mapped twice");
        driver.mapped.push(first);
        Ok(MappedPages::new(first + shift, Mapped { driver: self.driver.clone(), page: first, keep: Some(keep) }))
    }

    fn export(&self, address: u64, bytes: u64) -> Result<MemoryFile, GpuError> {
        let mut driver = self.driver.lock();
        if !driver.exports {
            return Err(GpuError::Unsupported { device: self.name(), what: "give files" });
        }
        let (_, _, offset) = whole_pages(address, bytes, PAGE).unwrap();
        let (own, given) = UnixStream::pair().unwrap();
        driver.files.push((own, address, bytes));
        Ok(MemoryFile::new(OwnedFd::from(given), offset))
    }
}

/// The way in which a NIC registered memory of a GPU.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Registration {
    /// As a file, from this byte on.
    File { offset: u64 },
    /// By its address.
    Address,
}

/// Memory that a NIC registered.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Part {
    pub registration: Registration,
    pub address: u64,
    pub bytes: u64,
}

/// A software NIC that claims to reach memory of GPUs. Like a real driver it accepts memory only under an address with
/// the memory's own offset in a page.
#[derive(Debug)]
pub struct Reaching {
    inner: SoftHca,
    /// Set if the NIC accepts memory of GPUs by its address.
    pub by_address: bool,
    /// Set if its doorbells need no mapping.
    pub in_memory: bool,
    /// Address of all its doorbells, which then cannot be rung.
    pub doorbell: Option<u64>,
    /// Memory that the NIC registered: regions, and memory for rings.
    registered: Mutex<Vec<Part>>,
}

impl Reaching {
    pub fn new(inner: SoftHca) -> Self {
        Self { inner, by_address: true, in_memory: false, doorbell: None, registered: Mutex::default() }
    }

    pub fn registered(&self) -> Vec<Part> {
        self.registered.lock().unwrap().clone()
    }

    /// Accepts memory, or refuses it as a driver does that cannot pin it.
    fn take(&self, memory: &Extent) -> Done {
        let registration = match memory.dma_buf {
            Some(file) => {
                assert_eq!(file.offset % PAGE, memory.address % PAGE);
                Registration::File { offset: file.offset }
            }
            None if self.by_address => Registration::Address,
            // 14 is EFAULT.
            None => return Err(HcaError::System { call: "taking memory by its address", errno: 14 }),
        };
        self.registered.lock().unwrap().push(Part { registration, address: memory.address, bytes: memory.bytes });
        Ok(())
    }
}

type Done<T = ()> = Result<T, HcaError>;

impl Hca for Reaching {
    fn name(&self) -> String {
        self.inner.name()
    }

    fn shares_doorbells(&self) -> bool {
        self.inner.shares_doorbells()
    }

    fn reaches(&self, _: &dyn Device) -> bool {
        true
    }

    fn doorbells_are_memory(&self) -> bool {
        self.in_memory
    }

    fn command(&self, input: &[u8], output: &mut [u8]) -> Done {
        self.inner.command(input, output)
    }

    fn create(&self, input: &[u8], output: &mut [u8]) -> Done<Handle> {
        self.inner.create(input, output)
    }

    fn modify(&self, object: Handle, input: &[u8], output: &mut [u8]) -> Done {
        self.inner.modify(object, input, output)
    }

    fn query(&self, object: Handle, input: &[u8], output: &mut [u8]) -> Done {
        self.inner.query(object, input, output)
    }

    fn destroy(&self, object: Handle) -> Done {
        self.inner.destroy(object)
    }

    fn allocate_domain(&self) -> Done<Domain> {
        self.inner.allocate_domain()
    }

    fn free_domain(&self, domain: Handle) -> Done {
        self.inner.free_domain(domain)
    }

    unsafe fn register_region(&self, domain: &Domain, memory: &Extent, start: u64, access: Access) -> Done<Region> {
        if start % PAGE != memory.address % PAGE {
            // 22 is EINVAL.
            return Err(HcaError::System { call: "taking memory under another address", errno: 22 });
        }
        // Safety: the caller keeps the conditions, and a device disguised as a GPU has memory of this process.
        let region = unsafe { self.inner.register_region(domain, memory, start, access) }?;
        self.take(memory).inspect_err(|_| self.inner.deregister_region(region.handle).unwrap())?;
        Ok(region)
    }

    fn deregister_region(&self, region: Handle) -> Done {
        self.inner.deregister_region(region)
    }

    unsafe fn register_umem(&self, memory: &Extent, access: Access) -> Done<Umem> {
        // Safety: as above.
        let umem = unsafe { self.inner.register_umem(memory, access) }?;
        self.take(memory).inspect_err(|_| self.inner.deregister_umem(umem.handle).unwrap())?;
        Ok(umem)
    }

    fn deregister_umem(&self, umem: Handle) -> Done {
        self.inner.deregister_umem(umem)
    }

    fn allocate_uar(&self) -> Done<Uar> {
        let uar = self.inner.allocate_uar()?;
        Ok(Uar { doorbell: self.doorbell.unwrap_or(uar.doorbell), ..uar })
    }

    fn free_uar(&self, uar: Handle) -> Done {
        self.inner.free_uar(uar)
    }

    fn event_queue(&self) -> Done<u32> {
        self.inner.event_queue()
    }

    fn port(&self, port: u8) -> Done<Port> {
        self.inner.port(port)
    }

    fn gid(&self, port: u8, index: u32) -> Done<[u8; 16]> {
        self.inner.gid(port, index)
    }

    fn next_hop(&self, domain: &Domain, port: u8, gid_index: u32, gid: [u8; 16]) -> Done<[u8; 6]> {
        self.inner.next_hop(domain, port, gid_index, gid)
    }
}
