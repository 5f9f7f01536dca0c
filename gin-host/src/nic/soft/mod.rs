// SPDX-License-Identifier: MIT OR Apache-2.0
//! A software NIC: the command side, over the engine of [`gin_soft_hca`].
//!
//! A [`SoftFabric`] joins the NICs of the ranks of one process. Each [`SoftHca`] parses the mailboxes that a real NIC's
//! firmware would, refuses what that would refuse, with status and syndrome ([`reason`] says in words what a syndrome
//! stands for), and owns its objects. Entries are executed when somebody calls [`SoftFabric::step`]: a scheduler, or a
//! thread ([`SoftFabric::serve`]).
//!
//! # Beside the commands
//! - Doorbells are words of the pages that [`Hca::allocate_uar`] gives; a step looks at all of them. A page holds one
//!   word, so queue pairs do not share pages ([`Hca::shares_doorbells`]).
//! - Reserved bits of a command that are not zero are refused, which firmware may not do.
//! - Packet numbers are not looked at.

mod firmware;
mod memory;
mod objects;

pub use firmware::reason;

use self::memory::ProcessMemory;
use self::objects::{DOORBELL_WORD, Kind, Object, State};
use super::hca::{Access, Domain, Extent, Handle, Hca, HcaError, Link, Port, Region, Uar, Umem};
use gin_abi::mlx5::bits::{Layout, Mailbox};
use gin_abi::mlx5::command::{Mtu, opcode};
use gin_abi::mlx5::mailbox::{
    AllocUarIn, AllocUarOut, CommandIn, CommandOut, CreateUmemIn, CreateUmemOut, Mtt, Umem as UmemLayout,
};
use gin_soft_hca::tables::{CompletionQueue, Queue};
use gin_soft_hca::{Fault, Options, Progress, Violation};
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

/// How long a thread that serves a fabric naps when nothing is to do: a doorbell cannot wake it.
const NAP: Duration = Duration::from_micros(20);

/// A GID of a software NIC.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SoftGid {
    /// The GID.
    pub gid: [u8; 16],
    /// Of [`roce_version`](gin_abi::mlx5::command::roce_version).
    pub version: u64,
}

/// A port of a software NIC.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SoftPort {
    /// It is up.
    pub active: bool,
    /// Most bytes of payload in a packet.
    pub mtu: Mtu,
    /// Local identifier, on InfiniBand.
    pub lid: u16,
    /// Hardware address, on Ethernet.
    pub mac: [u8; 6],
    /// Its GIDs; one of zeros only is an empty place.
    pub gids: Vec<SoftGid>,
}

/// What a software NIC is like.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SoftConfig {
    /// Its name.
    pub name: String,
    /// What its ports are part of.
    pub link: Link,
    /// Its ports, at least one.
    pub ports: Vec<SoftPort>,
    /// log2 of the most slots of a send queue.
    pub log_max_queue: u32,
    /// log2 of the most slots of a completion queue.
    pub log_max_completions: u32,
    /// log2 of the most reads and atomics under way.
    pub log_max_reads: u32,
    /// It has reliable connections.
    pub reliable: bool,
    /// It has atomics.
    pub atomics: bool,
    /// Its entries may wait for completion queues.
    pub core_direct: bool,
    /// Its completion queues may ignore overruns.
    pub ignore_overrun: bool,
    /// It takes memory by DMA-BUF.
    pub dma_buf: bool,
    /// UDP source ports that it takes, both ends included.
    pub udp_ports: (u16, u16),
    /// Most objects, of all kinds together.
    pub objects: usize,
}

impl SoftConfig {
    fn new(number: u16, link: Link) -> Self {
        let [high, low] = number.to_be_bytes();
        let mapped = [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 10, 0, high, low];
        let local = [0xfe, 0x80, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, high, low];
        let gids = match link {
            Link::InfiniBand => vec![SoftGid { gid: local, version: 0 }],
            // As Linux fills its table: each address in both versions.
            Link::Ethernet => vec![
                SoftGid { gid: local, version: 0 },
                SoftGid { gid: local, version: 2 },
                SoftGid { gid: mapped, version: 0 },
                SoftGid { gid: mapped, version: 2 },
            ],
        };
        let port = SoftPort {
            active: true,
            mtu: Mtu::B4096,
            lid: if link == Link::InfiniBand { number + 1 } else { 0 },
            mac: [2, 0, 0, 0, high, low],
            gids,
        };
        Self {
            name: format!("soft_{number}"),
            link,
            ports: vec![port],
            log_max_queue: 15,
            log_max_completions: 22,
            log_max_reads: 4,
            reliable: true,
            atomics: true,
            core_direct: true,
            ignore_overrun: true,
            dma_buf: false,
            udp_ports: (0xc000, 0xffff),
            objects: 1 << 20,
        }
    }

    /// A NIC with one port on Ethernet; `number` makes its addresses.
    pub fn ethernet(number: u16) -> Self {
        Self::new(number, Link::Ethernet)
    }

    /// A NIC with one port on InfiniBand; `number` makes its addresses.
    pub fn infiniband(number: u16) -> Self {
        Self::new(number, Link::InfiniBand)
    }
}

/// The network that software NICs of this process are part of, and the engine of them all.
#[derive(Clone)]
pub struct SoftFabric {
    state: Arc<Mutex<State>>,
}

impl fmt::Debug for SoftFabric {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SoftFabric").field("objects", &self.objects()).finish_non_exhaustive()
    }
}

impl Default for SoftFabric {
    fn default() -> Self {
        Self::new(Options::default())
    }
}

impl SoftFabric {
    /// With no NIC yet.
    pub fn new(options: Options) -> Self {
        Self { state: Arc::new(Mutex::new(State::new(options))) }
    }

    /// Adds a NIC.
    pub fn add(&self, config: SoftConfig) -> SoftHca {
        let mut state = self.lock();
        state.devices.push(config);
        SoftHca { fabric: self.clone(), device: state.devices.len() as u32 - 1 }
    }

    /// Looks at the doorbells and does one thing.
    pub fn step(&self) -> Progress {
        let mut state = self.lock();
        let rang = state.look_at_doorbells();
        match state.step() {
            Progress::Idle if rang => Progress::Moved,
            progress => progress,
        }
    }

    /// Steps until nothing is to do.
    pub fn settle(&self) {
        while self.step() != Progress::Idle {}
    }

    /// Steps on a thread of its own, until what is returned is dropped.
    ///
    /// # Errors
    /// What the operating system says when there can be no thread.
    pub fn serve(&self) -> Result<Server, std::io::Error> {
        let stop = Arc::new(AtomicBool::new(false));
        let (fabric, stopped) = (self.clone(), Arc::clone(&stop));
        let thread = std::thread::Builder::new().name("gin-soft-hca".to_owned()).spawn(move || {
            while !stopped.load(Ordering::Relaxed) {
                if fabric.step() == Progress::Idle {
                    std::thread::sleep(NAP);
                }
            }
        })?;
        Ok(Server { stop, thread: Some(thread) })
    }

    /// Makes something go wrong once.
    pub fn inject(&self, fault: Fault) {
        self.lock().faults.push(Some(fault));
    }

    /// The first thing that a user of the NICs did wrong, and how many there were.
    pub fn violations(&self) -> (Option<Violation>, u64) {
        self.lock().engine.violations()
    }

    /// Number of objects of all NICs.
    pub fn objects(&self) -> usize {
        self.lock().objects.len()
    }

    /// Changes a NIC: a port goes down, a limit falls. What was made before stays as it is.
    ///
    /// # Panics
    /// If `hca` is of another fabric.
    pub fn change(&self, hca: &SoftHca, change: impl FnOnce(&mut SoftConfig)) {
        assert!(Arc::ptr_eq(&self.state, &hca.fabric.state), "a NIC of another fabric");
        change(&mut self.lock().devices[hca.device as usize]);
    }

    /// A queue pair as it is now, by its number.
    pub fn queue(&self, number: u32) -> Option<Queue> {
        self.lock().queues.get(number as usize).copied().filter(|queue| queue.live)
    }

    /// A completion queue as it is now, by its number.
    pub fn completion_queue(&self, number: u32) -> Option<CompletionQueue> {
        self.lock().completions.get(number as usize).copied().filter(|queue| queue.live)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // A test that failed with the lock held says more than a second panic.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Steps a [`SoftFabric`] until it is dropped.
#[derive(Debug)]
pub struct Server {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            // A panic of the engine was printed when it happened.
            let _ = thread.join();
        }
    }
}

/// A software NIC.
#[derive(Clone, Debug)]
pub struct SoftHca {
    fabric: SoftFabric,
    device: u32,
}

impl SoftHca {
    /// Its network.
    pub fn fabric(&self) -> &SoftFabric {
        &self.fabric
    }

    /// Sends a command about the object, or about none.
    fn send(&self, object: Option<Handle>, input: &[u8], output: &mut [u8]) -> Result<Option<Handle>, HcaError> {
        let mut state = self.fabric.lock();
        let object = match object {
            None => None,
            Some(handle) => Some(state.find(handle, self.device)?),
        };
        firmware::execute(&mut state, self.device, object, input, output)
    }

    /// Sends a command that ends an object.
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

    fn port_of(&self, state: &State, port: u8) -> Result<SoftPort, HcaError> {
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
        let number = state.add_domain(self.device).map_err(|refusal| refusal.error())?;
        let handle = state.keep(Object { kind: Kind::Domain, device: self.device, number });
        Ok(Domain { handle, number })
    }

    fn free_domain(&self, domain: Handle) -> Result<(), HcaError> {
        let mut state = self.fabric.lock();
        let object = state.find(domain, self.device)?;
        state.remove_domain(object).map_err(|refusal| refusal.error())?;
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
        let key = state.add_region(owner, memory, start, access).map_err(|refusal| refusal.error())?;
        let handle = state.keep(Object { kind: Kind::Region, device: self.device, number: key >> 8 });
        Ok(Region { handle, local_key: key, remote_key: key })
    }

    fn deregister_region(&self, region: Handle) -> Result<(), HcaError> {
        let mut state = self.fabric.lock();
        let object = state.find(region, self.device)?;
        state.remove_region(object).map_err(|refusal| refusal.error())?;
        state.objects.remove(&region.0);
        Ok(())
    }

    unsafe fn register_umem(&self, memory: &Extent, access: Access) -> Result<Umem, HcaError> {
        let mut state = self.fabric.lock();
        self.check_memory(&state, memory)?;
        // As the kernel's driver asks the firmware: a list of pages.
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
        // The driver knows the length to the byte, the list of pages does not.
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
        let page = state.page(number).ok_or(HcaError::NoObject(Handle(0)))?;
        let doorbell = (&raw const page.0[DOORBELL_WORD]) as u64;
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
    fn check_memory(&self, state: &State, memory: &Extent) -> Result<(), HcaError> {
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

#[cfg(test)]
mod tests;
