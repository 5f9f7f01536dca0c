// SPDX-License-Identifier: MIT OR Apache-2.0
//! One NIC, with the interface that the bring-up uses.

use super::config::SoftPort;
use super::objects::{self, HcaState, Kind, Object, RingMemory};
use super::{SoftFabric, firmware};
use gin_abi::mlx5::bits::{Layout, Mailbox};
use gin_abi::mlx5::command::opcode;
use gin_abi::mlx5::mailbox::{CommandIn, CommandOut};
use gin_gpu::{Device, MemoryKind};
use gin_nic::hca::{Access, Domain, Extent, Handle, Hca, HcaError, Link, Port, Region, Uar, Umem};

/// A software NIC.
#[derive(Clone, Debug)]
pub struct SoftHca {
    pub(super) fabric: SoftFabric,
    pub(super) device: u32,
}

impl SoftHca {
    /// Returns the network of the NIC.
    pub fn fabric(&self) -> &SoftFabric {
        &self.fabric
    }

    /// Sends a command about the object, or about none.
    fn send(&self, object: Option<Handle>, input: &[u8], output: &mut [u8]) -> Result<Option<Handle>, HcaError> {
        let mut state = self.fabric.lock();
        // A failed engine still accepts commands that destroy objects.
        if let Some(reason) = state.broken() {
            return Err(HcaError::Engine { reason });
        }
        firmware::execute(&mut state, self.device, object, input, output)
    }

    /// Sends the command that destroys an object of one of these kinds.
    fn end(&self, handle: Handle, commands: &[(Kind, u64)]) -> Result<(), HcaError> {
        let mut state = self.fabric.lock();
        let (kind, number) = state.find(handle, self.device)?.name;
        let found = commands.iter().find(|command| command.0 == kind);
        let &(_, code) = found.ok_or(HcaError::NoObject(handle))?;
        let mut command = Mailbox::<CommandIn>::new();
        command.set(CommandIn::OPCODE, code).set(CommandIn::NUMBER, number.into());
        let mut answer = [0; CommandOut::LENGTH];
        firmware::execute(&mut state, self.device, Some(handle), command.bytes()?, &mut answer).map(|_| ())
    }

    /// Destroys an object of a kind that has no command.
    fn end_directly(&self, handle: Handle, kind: Kind) -> Result<(), HcaError> {
        let mut state = self.fabric.lock();
        state.find(handle, self.device)?;
        Ok(state.end(handle, kind)?)
    }

    fn port_of<'s>(&self, state: &'s HcaState, port: u8) -> Result<&'s SoftPort, HcaError> {
        let config = state.config(self.device);
        config.port(port.into()).ok_or(HcaError::NoPort { port, ports: config.ports.len() as u8 })
    }

    fn check_memory(&self, state: &HcaState, memory: &Extent) -> Result<(), HcaError> {
        let config = state.config(self.device);
        if memory.dma_buf.is_some() && !config.dma_buf {
            let reason = format!("{} has no DMA-BUF support", config.name);
            return Err(HcaError::Unsupported { what: "memory of a device", reason });
        }
        if memory.bytes == 0 || memory.address.checked_add(memory.bytes).is_none() {
            return Err(HcaError::System { call: "registering memory", errno: 22 });
        }
        Ok(())
    }
}

impl Hca for SoftHca {
    fn name(&self) -> String {
        self.fabric.lock().config(self.device).name.clone()
    }

    fn shares_doorbells(&self) -> bool {
        false
    }

    fn reaches(&self, gpu: &dyn Device) -> bool {
        let state = self.fabric.lock_as_it_is();
        state.memory.device.as_ref().is_some_and(|device| device.reaches(gpu))
    }

    fn doorbells_are_memory(&self) -> bool {
        true
    }

    fn ring_memory(&self) -> MemoryKind {
        // That of the doorbell words.
        let state = self.fabric.lock_as_it_is();
        state.doorbells.as_ref().map_or(MemoryKind::Device, |doorbells| doorbells.kind())
    }

    unsafe fn ring(&self, doorbell: u64, word: u64) -> Result<(), HcaError> {
        self.fabric.lock_as_it_is().store_doorbell(doorbell, word)
    }

    fn command(&self, input: &[u8], output: &mut [u8]) -> Result<(), HcaError> {
        self.send(None, input, output).map(|_| ())
    }

    fn create(&self, input: &[u8], output: &mut [u8]) -> Result<Handle, HcaError> {
        let made = self.send(None, input, output)?;
        made.ok_or(HcaError::Unsupported { what: "this command", reason: "it makes no object".to_owned() })
    }

    fn modify(&self, object: Handle, input: &[u8], output: &mut [u8]) -> Result<(), HcaError> {
        self.send(Some(object), input, output).map(|_| ())
    }

    fn query(&self, object: Handle, input: &[u8], output: &mut [u8]) -> Result<(), HcaError> {
        self.send(Some(object), input, output).map(|_| ())
    }

    fn destroy(&self, object: Handle) -> Result<(), HcaError> {
        self.end(object, &[(Kind::Queue, opcode::DESTROY_QP), (Kind::Completions, opcode::DESTROY_CQ)])
    }

    fn allocate_domain(&self) -> Result<Domain, HcaError> {
        let mut state = self.fabric.lock();
        state.check_room(self.device)?;
        let number = objects::add(&mut state.domains, ());
        let handle = state.keep(Object { name: (Kind::Domain, number), device: self.device, uses: Vec::new() });
        Ok(Domain { handle, number })
    }

    fn free_domain(&self, domain: Handle) -> Result<(), HcaError> {
        self.end_directly(domain, Kind::Domain)
    }

    unsafe fn register_region(
        &self,
        domain: &Domain,
        memory: &Extent,
        start: u64,
        access: Access,
    ) -> Result<Region, HcaError> {
        let mut state = self.fabric.lock();
        self.check_memory(&state, memory)?;
        let domain = state.find(domain.handle, self.device)?.name;
        let key = state.add_region(self.device, domain, memory, start, access)?;
        let region = Object { name: (Kind::Region, key >> 8), device: self.device, uses: vec![domain] };
        Ok(Region { handle: state.keep(region), local_key: key, remote_key: key })
    }

    fn deregister_region(&self, region: Handle) -> Result<(), HcaError> {
        self.end_directly(region, Kind::Region)
    }

    unsafe fn register_umem(&self, memory: &Extent, access: Access) -> Result<Umem, HcaError> {
        let mut state = self.fabric.lock();
        self.check_memory(&state, memory)?;
        state.check_room(self.device)?;
        let written = access.contains(Access::LOCAL_WRITE);
        let rings = RingMemory { address: memory.address, bytes: memory.bytes, written };
        let number = objects::add(&mut state.umems, rings);
        let handle = state.keep(Object { name: (Kind::Umem, number), device: self.device, uses: Vec::new() });
        Ok(Umem { handle, number })
    }

    fn deregister_umem(&self, umem: Handle) -> Result<(), HcaError> {
        self.end(umem, &[(Kind::Umem, opcode::DESTROY_UMEM)])
    }

    fn allocate_uar(&self) -> Result<Uar, HcaError> {
        let mut state = self.fabric.lock();
        state.check_room(self.device)?;
        let (number, doorbell) = state.add_doorbell(self.device)?;
        let handle = state.keep(Object { name: (Kind::Uar, number), device: self.device, uses: Vec::new() });
        Ok(Uar { handle, number, doorbell })
    }

    fn free_uar(&self, uar: Handle) -> Result<(), HcaError> {
        self.end(uar, &[(Kind::Uar, opcode::DEALLOC_UAR)])
    }

    fn event_queue(&self) -> Result<u32, HcaError> {
        Ok(objects::EVENT_QUEUE)
    }

    fn port(&self, port: u8) -> Result<Port, HcaError> {
        let state = self.fabric.lock();
        let (link, port) = (state.config(self.device).link, self.port_of(&state, port)?);
        Ok(Port { active: port.active, link, mtu: port.mtu, lid: port.lid, gids: port.gids.len() as u32 })
    }

    fn gid(&self, port: u8, index: u32) -> Result<[u8; 16], HcaError> {
        let state = self.fabric.lock();
        let found = self.port_of(&state, port)?.gids.get(index as usize);
        found.map(|entry| entry.gid).ok_or(HcaError::System { call: "asking for a GID", errno: 22 })
    }

    fn next_hop(&self, domain: &Domain, port: u8, gid_index: u32, gid: [u8; 16]) -> Result<[u8; 6], HcaError> {
        self.gid(port, gid_index)?;
        let state = self.fabric.lock();
        state.find(domain.handle, self.device)?;
        let on_ethernet = state.devices.iter().filter(|device| device.link == Link::Ethernet);
        let found = on_ethernet.flat_map(|device| &device.ports).find(|port| port.has(gid));
        found.map(|port| port.mac).ok_or(HcaError::System { call: "resolving a GID", errno: 113 })
    }
}
