// SPDX-License-Identifier: MIT OR Apache-2.0
//! One NIC, with the interface that the bring-up uses.

use super::config::SoftPort;
use super::objects::{self, HcaState, Kind, Object};
use super::{SoftFabric, firmware};
use gin_abi::mlx5::bits::{Layout, Mailbox};
use gin_abi::mlx5::command::opcode;
use gin_abi::mlx5::mailbox::{
    AllocUarIn, AllocUarOut, CommandIn, CommandOut, CreateUmemIn, CreateUmemOut, Mtt, Umem as UmemLayout,
};
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
        let object = match object {
            None => None,
            Some(handle) => Some(state.find(handle, self.device)?),
        };
        firmware::execute(&mut state, self.device, object, input, output)
    }

    /// Sends a command that destroys an object.
    fn end(&self, handle: Handle, kind: Kind, code: u64) -> Result<(), HcaError> {
        let mut state = self.fabric.lock();
        let object = state.find(handle, self.device)?;
        if object.kind != kind {
            return Err(HcaError::NoObject(handle));
        }
        let mut command = Mailbox::<CommandIn>::new();
        command.set(CommandIn::OPCODE, code).set(CommandIn::NUMBER, object.number.into());
        let mut answer = [0; CommandOut::LENGTH];
        firmware::execute(&mut state, self.device, Some(object), command.bytes()?, &mut answer)?;
        state.objects.remove(&handle.0);
        Ok(())
    }

    fn port_of(&self, state: &HcaState, port: u8) -> Result<SoftPort, HcaError> {
        let ports = &state.devices[self.device as usize].ports;
        let found = ports.get(usize::from(port).wrapping_sub(1)).cloned();
        found.ok_or(HcaError::NoPort { port, ports: ports.len() as u8 })
    }
}

impl Hca for SoftHca {
    fn name(&self) -> String {
        self.fabric.lock().devices[self.device as usize].name.clone()
    }

    fn shares_doorbells(&self) -> bool {
        false
    }

    fn reaches(&self, gpu: &dyn Device) -> bool {
        self.fabric.lock_as_it_is().reaches(gpu)
    }

    fn doorbells_are_memory(&self) -> bool {
        true
    }

    fn ring_memory(&self) -> MemoryKind {
        self.fabric.lock_as_it_is().ring_memory()
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
        let kind = self.fabric.lock().find(object, self.device)?.kind;
        let code = match kind {
            Kind::Queue => opcode::DESTROY_QP,
            Kind::Completions => opcode::DESTROY_CQ,
            _ => return Err(HcaError::NoObject(object)),
        };
        self.end(object, kind, code)
    }

    fn allocate_domain(&self) -> Result<Domain, HcaError> {
        let mut state = self.fabric.lock();
        let number = state.add_domain(self.device)?;
        let handle = state.keep(Object { kind: Kind::Domain, device: self.device, number });
        Ok(Domain { handle, number })
    }

    fn free_domain(&self, domain: Handle) -> Result<(), HcaError> {
        let mut state = self.fabric.lock();
        let object = state.find(domain, self.device)?;
        state.remove_domain(object)?;
        state.objects.remove(&domain.0);
        Ok(())
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
        let owner = state.find(domain.handle, self.device)?;
        let key = state.add_region(owner, memory, start, access)?;
        let handle = state.keep(Object { kind: Kind::Region, device: self.device, number: key >> 8 });
        Ok(Region { handle, local_key: key, remote_key: key })
    }

    fn deregister_region(&self, region: Handle) -> Result<(), HcaError> {
        let mut state = self.fabric.lock();
        let object = state.find(region, self.device)?;
        state.remove_region(object)?;
        state.objects.remove(&region.0);
        Ok(())
    }

    unsafe fn register_umem(&self, memory: &Extent, access: Access) -> Result<Umem, HcaError> {
        let mut state = self.fabric.lock();
        self.check_memory(&state, memory)?;
        // The Linux driver passes a list of pages to the firmware, too.
        let offset = memory.address % objects::PAGE;
        let pages = (offset + memory.bytes).div_ceil(objects::PAGE);
        let part = CreateUmemIn::UMEM;
        let mut command = Mailbox::<CreateUmemIn>::new();
        command
            .set(CreateUmemIn::OPCODE, opcode::CREATE_UMEM)
            .set(part.field(UmemLayout::PAGE_OFFSET), offset)
            .set(part.field(UmemLayout::NUM_OF_MTT), pages);
        let mut input = command.bytes()?.to_vec();
        for page in 0..pages {
            let address = memory.address - offset + page * objects::PAGE;
            let mut entry = Mailbox::<Mtt>::new();
            entry
                .set(Mtt::PTAG_63_32, address >> 32)
                .set(Mtt::PTAG_31_8, (address & 0xffff_ffff) >> 8)
                .set(Mtt::RD_EN, 1)
                .set(Mtt::WR_EN, access.local_write.into());
            input.extend_from_slice(entry.bytes()?);
        }
        let mut answer = Mailbox::<CreateUmemOut>::new();
        let handle = firmware::execute(&mut state, self.device, None, &input, answer.bytes_mut())?;
        let number = answer.get(CreateUmemOut::UMEM_ID) as u32;
        // The list of pages has no length in bytes, but the driver knows it.
        state.trim_umem(number, memory.bytes);
        let handle = handle.ok_or(HcaError::NoObject(Handle(0)))?;
        Ok(Umem { handle, number })
    }

    fn deregister_umem(&self, umem: Handle) -> Result<(), HcaError> {
        self.end(umem, Kind::Umem, opcode::DESTROY_UMEM)
    }

    fn allocate_uar(&self) -> Result<Uar, HcaError> {
        let mut state = self.fabric.lock();
        let mut command = Mailbox::<AllocUarIn>::new();
        command.set(AllocUarIn::OPCODE, opcode::ALLOC_UAR);
        let mut answer = Mailbox::<AllocUarOut>::new();
        let handle = firmware::execute(&mut state, self.device, None, command.bytes()?, answer.bytes_mut())?;
        let number = answer.get(AllocUarOut::UAR) as u32;
        let doorbell = state.doorbell(number).ok_or(HcaError::NoObject(Handle(0)))?;
        Ok(Uar { handle: handle.ok_or(HcaError::NoObject(Handle(0)))?, number, doorbell })
    }

    fn free_uar(&self, uar: Handle) -> Result<(), HcaError> {
        self.end(uar, Kind::Uar, opcode::DEALLOC_UAR)
    }

    fn event_queue(&self) -> Result<u32, HcaError> {
        Ok(objects::EVENT_QUEUE)
    }

    fn port(&self, port: u8) -> Result<Port, HcaError> {
        let state = self.fabric.lock();
        let link = state.devices[self.device as usize].link;
        let SoftPort { active, mtu, lid, gids, .. } = self.port_of(&state, port)?;
        Ok(Port { active, link, mtu, lid, gids: gids.len() as u32 })
    }

    fn gid(&self, port: u8, index: u32) -> Result<[u8; 16], HcaError> {
        let state = self.fabric.lock();
        let gids = self.port_of(&state, port)?.gids;
        let found = gids.get(index as usize).map(|entry| entry.gid);
        found.ok_or(HcaError::System { call: "asking for a GID", errno: 22 })
    }

    fn next_hop(&self, domain: &Domain, port: u8, gid_index: u32, gid: [u8; 16]) -> Result<[u8; 6], HcaError> {
        self.gid(port, gid_index)?;
        let state = self.fabric.lock();
        state.find(domain.handle, self.device)?;
        let ports =
            state.devices.iter().filter(|device| device.link == Link::Ethernet).flat_map(|device| &device.ports);
        let found = ports.into_iter().find(|port| port.gids.iter().any(|entry| entry.gid == gid));
        found.map(|port| port.mac).ok_or(HcaError::System { call: "resolving a GID", errno: 113 })
    }
}

impl SoftHca {
    fn check_memory(&self, state: &HcaState, memory: &Extent) -> Result<(), HcaError> {
        if memory.dma_buf.is_some() && !state.devices[self.device as usize].dma_buf {
            let reason = format!("{} has no DMA-BUF support", state.devices[self.device as usize].name);
            return Err(HcaError::Unsupported { what: "memory of a device", reason });
        }
        if memory.bytes == 0 || memory.address.checked_add(memory.bytes).is_none() {
            return Err(HcaError::System { call: "registering memory", errno: 22 });
        }
        Ok(())
    }
}
