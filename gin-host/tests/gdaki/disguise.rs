// SPDX-License-Identifier: MIT OR Apache-2.0
//! What looks like a GPU and a NIC that reaches it, and is memory of this process.

use gin_host::gpu::virt::VirtualDevice;
use gin_host::gpu::{
    Device, DeviceKind, Function, GpuError, LaunchConfig, Limits, MemoryKind, Module, ModuleSource, RawMemory, Stream,
};
use gin_host::nic::hca::{Access, Domain, Extent, Handle, Port, Region, Uar, Umem};
use gin_host::nic::{Hca, HcaError, SoftHca};
use std::any::Any;
use std::sync::Arc;

/// A virtual GPU that says it is a real one.
#[derive(Debug)]
pub struct Disguised(pub Arc<VirtualDevice>);

impl Device for Disguised {
    fn name(&self) -> String {
        "a GPU".to_owned()
    }

    fn kind(&self) -> DeviceKind {
        DeviceKind::Cuda
    }

    fn limits(&self) -> Limits {
        self.0.limits()
    }

    fn allocate(&self, kind: MemoryKind, bytes: u64) -> Result<Box<dyn RawMemory>, GpuError> {
        self.0.allocate(kind, bytes)
    }

    unsafe fn copy_in(&self, destination: u64, source: &[u8]) -> Result<(), GpuError> {
        // Safety: the caller's promise.
        unsafe { self.0.copy_in(destination, source) }
    }

    unsafe fn copy_out(&self, destination: &mut [u8], source: u64) -> Result<(), GpuError> {
        // Safety: the caller's promise.
        unsafe { self.0.copy_out(destination, source) }
    }

    fn load(&self, source: ModuleSource<'_>) -> Result<Box<dyn Module>, GpuError> {
        self.0.load(source)
    }

    fn stream(&self) -> Result<Arc<dyn Stream>, GpuError> {
        self.0.stream()
    }

    fn reaches(&self, _other: &dyn Device) -> bool {
        false
    }

    fn resident_blocks(&self, function: &Function, config: &LaunchConfig) -> Result<u64, GpuError> {
        self.0.resident_blocks(function, config)
    }

    fn running(&self) -> usize {
        0
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

/// A software NIC that says it reaches memory of GPUs.
#[derive(Debug)]
pub struct Reaching(pub SoftHca);

type Done<T = ()> = Result<T, HcaError>;

impl Hca for Reaching {
    fn name(&self) -> String {
        self.0.name()
    }

    fn shares_doorbells(&self) -> bool {
        self.0.shares_doorbells()
    }

    fn reaches_gpus(&self) -> bool {
        true
    }

    fn command(&self, input: &[u8], output: &mut [u8]) -> Done {
        self.0.command(input, output)
    }

    fn create(&self, input: &[u8], output: &mut [u8]) -> Done<Handle> {
        self.0.create(input, output)
    }

    fn modify(&self, object: Handle, input: &[u8], output: &mut [u8]) -> Done {
        self.0.modify(object, input, output)
    }

    fn query(&self, object: Handle, input: &[u8], output: &mut [u8]) -> Done {
        self.0.query(object, input, output)
    }

    fn destroy(&self, object: Handle) -> Done {
        self.0.destroy(object)
    }

    fn allocate_domain(&self) -> Done<Domain> {
        self.0.allocate_domain()
    }

    fn free_domain(&self, domain: Handle) -> Done {
        self.0.free_domain(domain)
    }

    unsafe fn register_region(&self, domain: &Domain, memory: &Extent, start: u64, access: Access) -> Done<Region> {
        // Safety: the caller's promise; what is disguised as a GPU has memory of this process.
        unsafe { self.0.register_region(domain, memory, start, access) }
    }

    fn deregister_region(&self, region: Handle) -> Done {
        self.0.deregister_region(region)
    }

    unsafe fn register_umem(&self, memory: &Extent, access: Access) -> Done<Umem> {
        // Safety: as above.
        unsafe { self.0.register_umem(memory, access) }
    }

    fn deregister_umem(&self, umem: Handle) -> Done {
        self.0.deregister_umem(umem)
    }

    fn allocate_uar(&self) -> Done<Uar> {
        self.0.allocate_uar()
    }

    fn free_uar(&self, uar: Handle) -> Done {
        self.0.free_uar(uar)
    }

    fn event_queue(&self) -> Done<u32> {
        self.0.event_queue()
    }

    fn port(&self, port: u8) -> Done<Port> {
        self.0.port(port)
    }

    fn gid(&self, port: u8, index: u32) -> Done<[u8; 16]> {
        self.0.gid(port, index)
    }

    fn next_hop(&self, domain: &Domain, port: u8, gid_index: u32, gid: [u8; 16]) -> Done<[u8; 6]> {
        self.0.next_hop(domain, port, gid_index, gid)
    }
}
