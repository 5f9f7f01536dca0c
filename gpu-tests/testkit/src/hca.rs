// SPDX-License-Identifier: MIT OR Apache-2.0
//! A NIC that fails on demand.

use gin_gpu::{Device, MemoryKind};
use gin_nic::hca::{Access, Domain, Extent, Handle, Hca, HcaError, Port, Region, Uar, Umem};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// A NIC over any other, of which one call fails.
#[derive(Debug)]
pub struct FailingHca {
    inner: Arc<dyn Hca>,
    /// The number of calls of each kind before the failing one.
    calls: AtomicU64,
    ends: AtomicU64,
    /// Doorbells that are not rung yet.
    deaf: AtomicU64,
    failed: AtomicBool,
}

impl FailingHca {
    /// Makes a NIC over `inner` whose call number `call` fails, counted from 0. Calls that destroy objects do not
    /// count.
    pub fn new(inner: Arc<dyn Hca>, call: u64) -> Self {
        Self::of(inner, call, u64::MAX)
    }

    /// Makes a NIC over `inner` of whose calls that destroy objects number `end` fails, counted from 0. The object
    /// stays.
    pub fn at_end(inner: Arc<dyn Hca>, end: u64) -> Self {
        Self::of(inner, u64::MAX, end)
    }

    /// Makes a NIC over `inner` whose first `times` doorbells cannot be rung.
    pub fn at_doorbells(inner: Arc<dyn Hca>, times: u64) -> Self {
        Self { deaf: AtomicU64::new(times), ..Self::of(inner, u64::MAX, u64::MAX) }
    }

    fn of(inner: Arc<dyn Hca>, call: u64, end: u64) -> Self {
        let (calls, ends, deaf) = (AtomicU64::new(call), AtomicU64::new(end), AtomicU64::new(0));
        Self { inner, calls, ends, deaf, failed: AtomicBool::new(false) }
    }

    /// Returns whether the failing call has been made.
    pub fn has_failed(&self) -> bool {
        self.failed.load(Ordering::Relaxed)
    }

    fn check(&self) -> Result<(), HcaError> {
        self.count(&self.calls)
    }

    fn check_end(&self) -> Result<(), HcaError> {
        self.count(&self.ends)
    }

    fn count(&self, left: &AtomicU64) -> Result<(), HcaError> {
        let before = left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| match left {
            u64::MAX => None,
            0 => Some(u64::MAX),
            left => Some(left - 1),
        });
        if before != Ok(0) {
            return Ok(());
        }
        self.failed.store(true, Ordering::Relaxed);
        // 5 is EIO.
        Err(HcaError::System { call: "a call that was to fail", errno: 5 })
    }
}

impl Hca for FailingHca {
    fn name(&self) -> String {
        self.inner.name()
    }

    fn shares_doorbells(&self) -> bool {
        self.inner.shares_doorbells()
    }

    fn reaches(&self, gpu: &dyn Device) -> bool {
        self.inner.reaches(gpu)
    }

    fn doorbells_are_memory(&self) -> bool {
        self.inner.doorbells_are_memory()
    }

    fn ring_memory(&self) -> MemoryKind {
        self.inner.ring_memory()
    }

    unsafe fn ring(&self, doorbell: u64, word: u64) -> Result<(), HcaError> {
        let deaf = self.deaf.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1));
        if deaf.is_ok() {
            self.failed.store(true, Ordering::Relaxed);
            return Err(HcaError::Engine { reason: "it was not to be rung".to_owned() });
        }
        // Safety: the caller's promise.
        unsafe { self.inner.ring(doorbell, word) }
    }

    fn command(&self, input: &[u8], output: &mut [u8]) -> Result<(), HcaError> {
        self.check()?;
        self.inner.command(input, output)
    }

    fn create(&self, input: &[u8], output: &mut [u8]) -> Result<Handle, HcaError> {
        self.check()?;
        self.inner.create(input, output)
    }

    fn modify(&self, object: Handle, input: &[u8], output: &mut [u8]) -> Result<(), HcaError> {
        self.check()?;
        self.inner.modify(object, input, output)
    }

    fn query(&self, object: Handle, input: &[u8], output: &mut [u8]) -> Result<(), HcaError> {
        self.check()?;
        self.inner.query(object, input, output)
    }

    fn destroy(&self, object: Handle) -> Result<(), HcaError> {
        self.check_end()?;
        self.inner.destroy(object)
    }

    fn allocate_domain(&self) -> Result<Domain, HcaError> {
        self.check()?;
        self.inner.allocate_domain()
    }

    fn free_domain(&self, domain: Handle) -> Result<(), HcaError> {
        self.check_end()?;
        self.inner.free_domain(domain)
    }

    unsafe fn register_region(
        &self,
        domain: &Domain,
        memory: &Extent,
        start: u64,
        access: Access,
    ) -> Result<Region, HcaError> {
        self.check()?;
        // Safety: the caller's promise.
        unsafe { self.inner.register_region(domain, memory, start, access) }
    }

    fn deregister_region(&self, region: Handle) -> Result<(), HcaError> {
        self.check_end()?;
        self.inner.deregister_region(region)
    }

    unsafe fn register_umem(&self, memory: &Extent, access: Access) -> Result<Umem, HcaError> {
        self.check()?;
        // Safety: the caller's promise.
        unsafe { self.inner.register_umem(memory, access) }
    }

    fn deregister_umem(&self, umem: Handle) -> Result<(), HcaError> {
        self.check_end()?;
        self.inner.deregister_umem(umem)
    }

    fn allocate_uar(&self) -> Result<Uar, HcaError> {
        self.check()?;
        self.inner.allocate_uar()
    }

    fn free_uar(&self, uar: Handle) -> Result<(), HcaError> {
        self.check_end()?;
        self.inner.free_uar(uar)
    }

    fn event_queue(&self) -> Result<u32, HcaError> {
        self.check()?;
        self.inner.event_queue()
    }

    fn port(&self, port: u8) -> Result<Port, HcaError> {
        self.check()?;
        self.inner.port(port)
    }

    fn gid(&self, port: u8, index: u32) -> Result<[u8; 16], HcaError> {
        self.check()?;
        self.inner.gid(port, index)
    }

    fn next_hop(&self, domain: &Domain, port: u8, gid_index: u32, gid: [u8; 16]) -> Result<[u8; 6], HcaError> {
        self.check()?;
        self.inner.next_hop(domain, port, gid_index, gid)
    }
}
