// SPDX-License-Identifier: MIT OR Apache-2.0
//! Creates queue pairs, and connects each to its peer.
//!
//! No step sends a packet, so a NIC need not reach its own host. No step waits for a peer: between
//! [`DeviceQueues::new`] and [`DeviceQueues::connect`], ranks exchange [`Address`]es by other means.

use super::address::Address;
use super::doorbells::DoorbellPage;
use super::error::{DeviceQueueError, NicError, NicPeer, Step};
use super::hca::{Access, Extent, Handle, Hca, HcaError, Link, Uar, Umem};
use super::layout::{Layout, PAGE, QueuePlace, QueueSpec, Role, UNUSED_COMPLETIONS};
use super::open::{Nic, failed};
use super::owned::Stack;
use gin_abi::mlx5::bits::{Layout as Structure, Mailbox};
use gin_abi::mlx5::command::{AtomicMode, PM_MIGRATED, QpState, RQ_TYPE_NONE, opcode};
use gin_abi::mlx5::cqe::INVALID_BYTE;
use gin_abi::mlx5::mailbox::{
    Ads, Cqc, CreateCqIn, CreateCqOut, CreateQpIn, CreateQpOut, ModifyQpIn, ModifyQpOut, Qpc, QueryQpIn, QueryQpOut,
};
use gin_gpu::registry::initial_psn;
use gin_gpu::{Device, Memory, MemorySlice};
use std::sync::Arc;

/// log2 of the longest message in bytes. Devices split longer ones.
const LOG_MESSAGE: u64 = 30;
/// The time that a peer waits if this end is not ready: code 12 stands for 0.64 ms.
const NOT_READY_TIMER: u64 = 12;
/// The number of retries after not-ready answers: unlimited. Without receive queues there are no such answers.
const NOT_READY_RETRIES: u64 = 7;

/// A function that returns whether the deadline of a bring-up has passed.
pub type Expired<'a> = &'a dyn Fn() -> bool;

/// The data of a queue pair that kernels need.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct QueueInfo {
    /// The purpose.
    pub role: Role,
    /// The number.
    pub queue: u32,
    /// The number of its completion queue.
    pub completion_queue: u32,
    /// log2 of the slots of its send queue; 0 for a responder.
    pub log_depth: u32,
    /// log2 of the slots of its completion queue; 0 for a responder.
    pub log_completions: u32,
    /// The offsets of its rings in the slab; `None` for a responder.
    pub place: Option<QueuePlace>,
    /// The address of its doorbell in this process; 0 for a responder.
    pub doorbell: u64,
}

#[derive(Debug)]
struct Made {
    info: QueueInfo,
    handle: Handle,
    /// The packet sequence number of the first packet that it sends.
    initial_psn: u32,
}

/// Queue pairs to which kernels of a device post. They share a slab of memory of the device, or of pinned memory if the
/// NIC requires that. A drop destroys them.
#[derive(Debug)]
pub struct DeviceQueues {
    queues: Vec<Made>,
    /// The memory with the rings.
    pub slab: MemorySlice,
    // Dropped before the NIC's protection domain.
    _objects: Stack,
    /// The doorbell pages, each once.
    pub(super) pages: Vec<DoorbellPage>,
    pub(super) nic: Arc<Nic>,
}

impl DeviceQueues {
    /// Allocates and fills the slab, creates the queue pairs and moves them to the state init.
    ///
    /// # Errors
    /// An error of the device or of the NIC, the exceeded limit, or [`NicError::Deadline`]. Then no object remains.
    pub fn new(
        nic: &Arc<Nic>,
        device: &Arc<dyn Device>,
        specs: &[QueueSpec],
        expired: Expired<'_>,
    ) -> Result<Self, DeviceQueueError> {
        let kind = nic.owner.hca.ring_memory();
        nic.check_reach(&**device, kind)?;
        let layout = Layout::of(specs)?;
        for spec in specs.iter().filter(|spec| spec.role != Role::Responder) {
            nic.check(spec)?;
        }
        let memory = Memory::new(device, kind, layout.allocation())?;
        let first = memory.address().next_multiple_of(PAGE) - memory.address();
        let slab = memory.slice(first..first + layout.bytes)?;
        for ring in &layout.completion_rings {
            slab.write(ring.start, &vec![INVALID_BYTE; (ring.end - ring.start) as usize])?;
        }
        let objects = Stack::new(&nic.owner, slab.clone());
        let mut maker = Maker { nic, objects, pages: Vec::new(), expired };
        maker.begin(Step::Rings)?;
        // Safety: the objects keep the memory, and only the owner of the queue pairs writes to it.
        let take = |extent: &Extent| unsafe { nic.owner.hca.register_umem(extent, Access::RINGS) };
        let umem = nic.take_memory(Step::Rings, &slab, take)?;
        maker.objects.push(nic.owner.own(umem.handle, Hca::deregister_umem));
        let queues = maker.queues(&umem, &layout, specs)?;
        Ok(Self { queues, slab, _objects: maker.objects, pages: maker.pages, nic: Arc::clone(nic) })
    }

    /// Returns the queue pairs, in the order of their specs.
    pub fn infos(&self) -> impl Iterator<Item = &QueueInfo> {
        self.queues.iter().map(|made| &made.info)
    }

    /// Returns the address of the queue pair with this index, for a peer; `None` if there is no such queue pair.
    pub fn address(&self, index: usize) -> Option<Address> {
        let Made { info, initial_psn, .. } = self.queues.get(index)?;
        let nic = &self.nic;
        Some(Address {
            link: nic.port.link,
            mtu: nic.mtu(),
            queue: info.queue,
            initial_psn: *initial_psn,
            lid: nic.port.lid,
            gid: nic.gid.gid,
        })
    }

    /// Connects the queue pair with this index, and makes it ready to receive and, unless it is a responder, to send.
    ///
    /// # Errors
    /// An error of the NIC, a mismatch, or [`NicError::Deadline`]. The error names the peer.
    ///
    /// # Panics
    /// If there is no queue pair with this index.
    pub fn connect(
        &self,
        index: usize,
        peer: &NicPeer,
        address: &Address,
        expired: Expired<'_>,
    ) -> Result<(), NicError> {
        let nic = &self.nic;
        let made = &self.queues[index];
        if address.link != nic.port.link {
            return Err(NicError::Link { peer: peer.clone(), theirs: address.link, own: nic.port.link });
        }
        let begin = |step| nic.begin(step, Some(peer), expired);
        let path = self.path(made.info.queue, peer, address, expired)?;
        begin(Step::ReadyToReceive)?;
        let context = ModifyQpIn::QPC;
        let mtu = nic.mtu().min(address.mtu);
        let mut command = modify(opcode::INIT2RTR_QP, made.info.queue);
        command
            .set_part(context.part(Qpc::PRIMARY_ADDRESS_PATH), &path)
            .set(context.field(Qpc::MTU), mtu.code())
            .set(context.field(Qpc::LOG_MSG_MAX), LOG_MESSAGE.min(nic.capabilities.log_message.into()))
            .set(context.field(Qpc::REMOTE_QPN), address.queue.into())
            .set(context.field(Qpc::NEXT_RCV_PSN), address.initial_psn.into())
            .set(context.field(Qpc::LOG_RRA_MAX), log_reads(nic.capabilities.log_answers))
            .set(context.field(Qpc::MIN_RNR_NAK), NOT_READY_TIMER);
        nic.change(made.handle, &command, Step::ReadyToReceive, Some(peer))?;
        if made.info.role == Role::Responder {
            return Ok(());
        }
        begin(Step::ReadyToSend)?;
        let path = context.part(Qpc::PRIMARY_ADDRESS_PATH);
        let mut command = modify(opcode::RTR2RTS_QP, made.info.queue);
        command
            .set(path.field(Ads::ACK_TIMEOUT), nic.config.ack_timeout.into())
            .set(context.field(Qpc::RETRY_COUNT), nic.config.retries.into())
            .set(context.field(Qpc::RNR_RETRY), NOT_READY_RETRIES)
            .set(context.field(Qpc::NEXT_SEND_PSN), made.initial_psn.into())
            .set(context.field(Qpc::LOG_SRA_MAX), log_reads(nic.capabilities.log_reads));
        nic.change(made.handle, &command, Step::ReadyToSend, Some(peer))
    }

    /// Returns the state of the queue pair with this index.
    ///
    /// # Errors
    /// An error of the NIC.
    ///
    /// # Panics
    /// If there is no queue pair with this index.
    pub fn state(&self, index: usize) -> Result<QpState, NicError> {
        let made = &self.queues[index];
        let ask = || {
            let mut command = Mailbox::<QueryQpIn>::new();
            command.set(QueryQpIn::OPCODE, opcode::QUERY_QP).set(QueryQpIn::QPN, made.info.queue.into());
            let mut answer = Mailbox::<QueryQpOut>::new();
            self.nic.owner.hca.query(made.handle, command.bytes()?, answer.bytes_mut())?;
            let code = answer.get(QueryQpOut::QPC.field(Qpc::STATE));
            QpState::from_code(code).ok_or_else(|| HcaError::Unsupported {
                what: "state of the queue pair",
                reason: format!("its code is {code}"),
            })
        };
        ask().map_err(failed(&self.nic.name, Step::State, None))
    }

    /// Returns the path to a peer.
    #[doc(hidden)]
    pub fn path(
        &self,
        queue: u32,
        peer: &NicPeer,
        address: &Address,
        expired: Expired<'_>,
    ) -> Result<Mailbox<Ads>, NicError> {
        let nic = &self.nic;
        let config = &nic.config;
        let mut path = Mailbox::<Ads>::new();
        path.set(Ads::VHCA_PORT_NUM, config.port.into()).set(Ads::PKEY_INDEX, config.partition_key.into());
        match nic.port.link {
            Link::InfiniBand => {
                path.set(Ads::RLID, address.lid.into()).set(Ads::SL, config.service_level.into());
                // A different prefix means another subnet.
                if config.global_header || address.gid[..8] != nic.gid.gid[..8] {
                    path.set(Ads::GRH, 1)
                        .set(Ads::SRC_ADDR_INDEX, nic.gid.index.into())
                        .set(Ads::HOP_LIMIT, 255)
                        .set(Ads::TCLASS, config.traffic_class.into())
                        .set_bytes(Ads::RGID_RIP, address.gid);
                }
            }
            Link::Ethernet => {
                nic.begin(Step::NextHop, Some(peer), expired)?;
                let hop = nic.owner.hca.next_hop(&nic.domain, config.port, nic.gid.index, address.gid);
                let [a, b, c, d, e, f] = hop.map_err(failed(&nic.name, Step::NextHop, Some(peer)))?.map(u64::from);
                path.set(Ads::SRC_ADDR_INDEX, nic.gid.index.into())
                    .set(Ads::HOP_LIMIT, 255)
                    .set(Ads::DSCP, u64::from(config.traffic_class) >> 2)
                    .set(Ads::UDP_SPORT, nic.udp_port(queue, address.queue).into())
                    .set(Ads::ETH_PRIO, u64::from(config.service_level) & 7)
                    .set_bytes(Ads::RGID_RIP, address.gid)
                    .set(Ads::RMAC_47_32, a << 8 | b)
                    .set(Ads::RMAC_31_0, c << 24 | d << 16 | e << 8 | f);
            }
        }
        Ok(path)
    }
}

/// Returns log2 of a number of reads as its field of 3 bits holds it.
fn log_reads(log: u32) -> u64 {
    log.min(7).into()
}

fn modify(code: u64, queue: u32) -> Mailbox<ModifyQpIn> {
    let mut command = Mailbox::new();
    command.set(ModifyQpIn::OPCODE, code).set(ModifyQpIn::QPN, queue.into());
    command
}

impl Nic {
    /// Checks that the deadline has not passed before a step.
    fn begin(&self, step: Step, peer: Option<&NicPeer>, expired: Expired<'_>) -> Result<(), NicError> {
        if !expired() {
            return Ok(());
        }
        Err(NicError::Deadline { nic: self.name.clone(), step, peer: peer.cloned() })
    }

    fn check(&self, spec: &QueueSpec) -> Result<(), NicError> {
        let limits = [
            ("slots of a send queue", spec.depth, self.capabilities.max_depth),
            ("slots of a completion queue", spec.completions, self.capabilities.max_completions),
        ];
        for (what, asked, limit) in limits {
            if u64::from(asked) > limit {
                return Err(NicError::Limit { nic: self.name.clone(), what, asked: asked.into(), limit });
            }
        }
        if spec.role == Role::Master && !self.capabilities.core_direct {
            let what = "entries that wait for completion queues";
            return Err(NicError::NotCapable { nic: self.name.clone(), what });
        }
        Ok(())
    }

    fn change(
        &self,
        queue: Handle,
        command: &Mailbox<ModifyQpIn>,
        step: Step,
        peer: Option<&NicPeer>,
    ) -> Result<(), NicError> {
        let mut answer = Mailbox::<ModifyQpOut>::new();
        let mut send = || self.owner.hca.modify(queue, command.bytes()?, answer.bytes_mut());
        send().map_err(failed(&self.name, step, peer))
    }

    /// Returns the UDP source port of a connection. Switches choose a path by it, so it differs between queue pairs.
    #[doc(hidden)]
    pub fn udp_port(&self, own: u32, other: u32) -> u16 {
        let ports = &self.capabilities.udp_ports;
        let count = u64::from(ports.end() - ports.start()) + 1;
        // Knuth's multiplicative hash: the top bits depend on all others.
        let mixed = (u64::from(own) << 24 | u64::from(other)).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
        ports.start() + (mixed % count) as u16
    }
}

/// Creates the objects of a set, and destroys them if one fails.
struct Maker<'a> {
    nic: &'a Arc<Nic>,
    objects: Stack,
    pages: Vec<DoorbellPage>,
    expired: Expired<'a>,
}

/// The offsets in the slab that a queue needs.
#[derive(Clone, Copy)]
struct Ring {
    umem: u32,
    uar: u32,
    offset: u64,
    record: u64,
    log_size: u32,
}

impl Maker<'_> {
    fn begin(&self, step: Step) -> Result<(), NicError> {
        self.nic.begin(step, None, self.expired)
    }

    fn queues(&mut self, umem: &Umem, layout: &Layout, specs: &[QueueSpec]) -> Result<Vec<Made>, NicError> {
        let shared = self.nic.owner.hca.shares_doorbells();
        let mut page = None;
        let mut unused = None;
        let mut queues = Vec::with_capacity(specs.len());
        for (spec, place) in specs.iter().zip(&layout.places) {
            let uar = match page {
                // A responder rings no doorbell, so any page will do.
                Some(uar) if shared || place.is_none() => uar,
                _ => *page.insert(self.doorbell_page()?),
            };
            let ring =
                |(offset, record), log_size| Ring { umem: umem.number, uar: uar.number, offset, record, log_size };
            let (ring, completion_queue, log_completions) = match place {
                Some(place) => {
                    let log_completions = spec.completions.ilog2();
                    let completions = ring((place.completions, place.completion_record), log_completions);
                    let completion_queue = self.completion_queue(completions, spec.collapsed)?;
                    (Some(ring((place.ring, place.record), spec.depth.ilog2())), completion_queue, log_completions)
                }
                None => {
                    let completion_queue = match (unused, layout.unused) {
                        (Some(number), _) => number,
                        (None, Some(place)) => {
                            *unused.insert(self.completion_queue(ring(place, UNUSED_COMPLETIONS.ilog2()), false)?)
                        }
                        // The layout has one if there are responders.
                        (None, None) => 0,
                    };
                    (None, completion_queue, 0)
                }
            };
            let (queue, handle) = self.queue_pair(spec.role, ring, uar.number, completion_queue)?;
            let info = QueueInfo {
                role: spec.role,
                queue,
                completion_queue,
                log_depth: ring.map_or(0, |ring| ring.log_size),
                log_completions,
                place: *place,
                doorbell: if place.is_some() { uar.doorbell } else { 0 },
            };
            let made = Made { info, handle, initial_psn: initial_psn() };
            self.to_init(&made)?;
            queues.push(made);
        }
        Ok(queues)
    }

    fn doorbell_page(&mut self) -> Result<Uar, NicError> {
        self.begin(Step::DoorbellPage)?;
        let (uar, page) = self.nic.doorbell_page()?;
        self.objects.push(page.object.clone());
        self.pages.push(page);
        Ok(uar)
    }

    fn completion_queue(&mut self, ring: Ring, collapsed: bool) -> Result<u32, NicError> {
        let context = CreateCqIn::CQ_CONTEXT;
        let mut command = Mailbox::<CreateCqIn>::new();
        command
            .set(CreateCqIn::OPCODE, opcode::CREATE_CQ)
            .set(CreateCqIn::CQ_UMEM_VALID, 1)
            .set(CreateCqIn::CQ_UMEM_ID, ring.umem.into())
            .set(CreateCqIn::CQ_UMEM_OFFSET, ring.offset)
            .set(context.field(Cqc::CC), collapsed.into())
            .set(context.field(Cqc::OI), 1)
            .set(context.field(Cqc::LOG_CQ_SIZE), ring.log_size.into())
            .set(context.field(Cqc::UAR_PAGE), ring.uar.into())
            .set(context.field(Cqc::C_EQN), self.nic.event_queue.into())
            .set(context.field(Cqc::DBR_UMEM_VALID), 1)
            .set(context.field(Cqc::DBR_UMEM_ID), ring.umem.into())
            .set(context.field(Cqc::DBR_ADDR), ring.record);
        let (answer, _) = self.create::<_, CreateCqOut>(Step::CompletionQueue, &command)?;
        Ok(answer.get(CreateCqOut::CQN) as u32)
    }

    /// Creates a queue pair or a completion queue, which the set destroys.
    fn create<In: Structure, Out: Structure>(
        &mut self,
        step: Step,
        command: &Mailbox<In>,
    ) -> Result<(Mailbox<Out>, Handle), NicError> {
        self.begin(step)?;
        let mut answer = Mailbox::new();
        let mut create = || self.nic.owner.hca.create(command.bytes()?, answer.bytes_mut());
        let handle = create().map_err(failed(&self.nic.name, step, None))?;
        self.objects.push(self.nic.owner.own(handle, Hca::destroy));
        Ok((answer, handle))
    }

    fn queue_pair(
        &mut self,
        role: Role,
        ring: Option<Ring>,
        uar: u32,
        completions: u32,
    ) -> Result<(u32, Handle), NicError> {
        let context = CreateQpIn::QPC;
        let mut command = Mailbox::<CreateQpIn>::new();
        command
            .set(CreateQpIn::OPCODE, opcode::CREATE_QP)
            .set(context.field(Qpc::PM_STATE), PM_MIGRATED)
            .set(context.field(Qpc::PD), self.nic.domain.number.into())
            .set(context.field(Qpc::UAR_PAGE), uar.into())
            .set(context.field(Qpc::CQN_SND), completions.into())
            .set(context.field(Qpc::RQ_TYPE), RQ_TYPE_NONE)
            .set(context.field(Qpc::CD_MASTER), (role == Role::Master).into());
        match ring {
            Some(ring) => command
                .set(CreateQpIn::WQ_UMEM_VALID, 1)
                .set(CreateQpIn::WQ_UMEM_ID, ring.umem.into())
                .set(CreateQpIn::WQ_UMEM_OFFSET, ring.offset)
                .set(context.field(Qpc::LOG_SQ_SIZE), ring.log_size.into())
                .set(context.field(Qpc::DBR_UMEM_VALID), 1)
                .set(context.field(Qpc::DBR_UMEM_ID), ring.umem.into())
                .set(context.field(Qpc::DBR_ADDR), ring.record),
            None => command.set(context.field(Qpc::NO_SQ), 1),
        };
        let (answer, handle) = self.create::<_, CreateQpOut>(Step::QueuePair, &command)?;
        Ok((answer.get(CreateQpOut::QPN) as u32, handle))
    }

    fn to_init(&self, made: &Made) -> Result<(), NicError> {
        self.begin(Step::Init)?;
        // Sets the peer's permissions in this step, where they take effect without a mask of optional fields.
        let context = ModifyQpIn::QPC;
        let path = context.part(Qpc::PRIMARY_ADDRESS_PATH);
        let mut command = modify(opcode::RST2INIT_QP, made.info.queue);
        command
            .set(context.field(Qpc::PM_STATE), PM_MIGRATED)
            .set(path.field(Ads::VHCA_PORT_NUM), self.nic.config.port.into())
            .set(path.field(Ads::PKEY_INDEX), self.nic.config.partition_key.into())
            .set(context.field(Qpc::RRE), 1)
            .set(context.field(Qpc::RWE), 1)
            .set(context.field(Qpc::RAE), 1)
            .set(context.field(Qpc::ATOMIC_MODE), AtomicMode::Specification.code());
        self.nic.change(made.handle, &command, Step::Init, None)
    }
}
