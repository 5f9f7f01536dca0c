// SPDX-License-Identifier: MIT OR Apache-2.0
//! Commands, as firmware takes them.

use super::objects::{EVENT_QUEUE, Kind, Object, Owned, PAGE, Page, RingMemory, State, Uses, add, remove};
use super::{SoftConfig, SoftPort};
use crate::nic::hca::{Handle, HcaError, Link};
use gin_abi::mlx5::bits::{Field, Layout, Mailbox, RowKind, View};
use gin_abi::mlx5::command::{
    AtomicMode, Mtu, PM_MIGRATED, PORT_TYPE_ETHERNET, QpState, RQ_TYPE_NONE, Status, capability, opcode, opt_param,
    roce_version,
};
use gin_abi::mlx5::cqe;
use gin_abi::mlx5::doorbell::SEND_OFFSET;
use gin_abi::mlx5::mailbox::{
    Ads, AllocUarIn, AllocUarOut, AtomicCap, CommandIn, CommandOut, Cqc, CreateCqIn, CreateCqOut, CreateQpIn,
    CreateQpOut, CreateUmemIn, CreateUmemOut, HcaCap, ModifyQpIn, Mtt, Qpc, QueryCqIn, QueryCqOut, QueryHcaCapIn,
    QueryHcaCapOut, QueryQpIn, QueryQpOut, QueryRoceAddressIn, QueryRoceAddressOut, RoceAddress, RoceCap, StopQpIn,
    TABLES, Umem,
};
use gin_abi::mlx5::wqe::SLOT_BYTES;
use gin_soft_hca::tables::{CompletionQueue, Queue, Rights};
use std::sync::atomic::AtomicU64;

/// Added to the number of a [`Reason`]; the syndromes of a real NIC look different.
const SYNDROMES: u32 = 0x50f7_0000;

macro_rules! reasons {
    ($($(#[$doc:meta])* $variant:ident = $text:literal,)*) => {
        /// Why a command is refused.
        #[derive(Clone, Copy, PartialEq, Eq, Debug)]
        pub(super) enum Reason { $($variant,)* }

        const REASONS: &[(Reason, &str)] = &[$((Reason::$variant, $text),)*];
    };
}

reasons! {
    Operation = "no such command, or not here",
    Variant = "no such variant of the command",
    InputLength = "wrong length of the command",
    OutputLength = "too little room for the answer",
    Reserved = "a reserved bit is set",
    Full = "too many objects",
    WrongObject = "no such object, or of another kind",
    InUse = "object is in use",
    Access = "rights that do not go together",
    Pages = "pages that do not follow each other",
    PageOffset = "offset past the first page",
    UmemMissing = "no memory named for the ring or the record",
    UmemUnknown = "no such memory",
    UmemReadOnly = "memory that the NIC may not write",
    UmemRange = "ring or record reaches past its memory",
    Alignment = "ring or record is not aligned",
    EntrySize = "size of entries",
    QueueSize = "size of the queue",
    Uar = "no such doorbell page",
    UarShared = "doorbell page serves another queue pair",
    EventQueue = "no such event queue",
    Overrun = "overruns cannot be ignored",
    Service = "kind of service",
    ReceiveQueue = "receive queues are not there",
    DoorbellMode = "send queues need doorbell records",
    Domain = "no such protection domain",
    CompletionQueue = "no such completion queue",
    CoreDirect = "entries cannot wait for completion queues",
    State = "queue pair is in another state",
    Port = "no such port",
    Path = "state of path migration",
    PartitionKey = "no such partition key",
    Atomics = "atomics that the NIC does not have",
    Mtu = "no such MTU",
    Message = "longest message",
    Reads = "reads and atomics under way",
    GidIndex = "no such GID",
    UdpPort = "UDP source port out of range",
    Hops = "no hops",
    Lid = "no such local identifier",
    Header = "global route header on Ethernet",
    Optional = "optional fields that this change does not take",
}

/// What a syndrome of a software NIC stands for.
pub fn reason(syndrome: u32) -> Option<&'static str> {
    let number = syndrome.checked_sub(SYNDROMES)?;
    REASONS.get(number as usize).map(|(_, text)| *text)
}

impl Reason {
    pub(super) fn refuse(self, status: Status) -> Refusal {
        Refusal { status, syndrome: SYNDROMES + self as u32 }
    }

    fn parameter(self) -> Refusal {
        self.refuse(Status::BadParameter)
    }
}

/// What is answered instead.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Refusal {
    status: Status,
    syndrome: u32,
}

impl Refusal {
    pub(super) fn error(self) -> HcaError {
        HcaError::Refused { status: self.status as u8, syndrome: self.syndrome }
    }
}

type Answer<T> = Result<T, Refusal>;

/// Executes a command about the object, or about none. Gives the handle of what it made.
pub(super) fn execute(
    state: &mut State,
    device: u32,
    object: Option<Object>,
    input: &[u8],
    output: &mut [u8],
) -> Result<Option<Handle>, HcaError> {
    output.fill(0);
    let done = dispatch(state, device, object, input, output);
    done.map(|made| made.map(|made| state.keep(made))).map_err(|refusal| {
        if let Some(head) = output.get_mut(..CommandOut::LENGTH) {
            let mut answer = Mailbox::<CommandOut>::new();
            answer.set(CommandOut::STATUS, refusal.status.code()).set(CommandOut::SYNDROME, refusal.syndrome.into());
            head.copy_from_slice(answer.view().bytes());
        }
        refusal.error()
    })
}

fn dispatch(
    state: &mut State,
    device: u32,
    object: Option<Object>,
    input: &[u8],
    output: &mut [u8],
) -> Answer<Option<Object>> {
    let head = View::<CommandIn>::new(input).ok_or(Reason::InputLength.refuse(Status::BadInputLength))?;
    if output.len() < CommandOut::LENGTH {
        return Err(Reason::OutputLength.refuse(Status::BadOutputLength));
    }
    let code = head.get(CommandIn::OPCODE);
    let made = |kind, number| Ok(Some(Object { kind, device, number }));
    let about = |kind| match object {
        Some(object) if object.kind == kind => Ok(object.number),
        _ => Err(Reason::WrongObject.refuse(Status::BadResource)),
    };
    if object.is_none() {
        return match code {
            opcode::QUERY_HCA_CAP => query_capabilities(state.config(device), parse(input)?, output).map(|()| None),
            opcode::QUERY_ROCE_ADDRESS => query_address(state.config(device), parse(input)?, output).map(|()| None),
            opcode::CREATE_CQ => made(Kind::Completions, create_completions(state, device, parse(input)?, output)?),
            opcode::CREATE_QP => made(Kind::Queue, create_queue(state, device, parse(input)?, output)?),
            opcode::CREATE_UMEM => made(Kind::Umem, create_umem(state, device, input, output)?),
            opcode::ALLOC_UAR => made(Kind::Uar, allocate_uar(state, device, parse(input)?, output)?),
            _ => Err(Reason::Operation.refuse(Status::BadOperation)),
        };
    }
    let number = head.get(CommandIn::NUMBER) as u32;
    if object.is_some_and(|object| object.number != number) {
        return Err(Reason::WrongObject.refuse(Status::BadResource));
    }
    match code {
        opcode::RST2INIT_QP => to_init(state, about(Kind::Queue)?, parse(input)?),
        opcode::INIT2RTR_QP => to_ready_to_receive(state, about(Kind::Queue)?, parse(input)?),
        opcode::RTR2RTS_QP => to_ready_to_send(state, about(Kind::Queue)?, parse(input)?),
        opcode::TO_ERR_QP | opcode::TO_RST_QP => stop(state, about(Kind::Queue)?, parse(input)?),
        opcode::QUERY_QP => query_queue(state, about(Kind::Queue)?, parse(input)?, output),
        opcode::QUERY_CQ => query_completions(state, about(Kind::Completions)?, parse(input)?, output),
        opcode::DESTROY_QP => destroy_queue(state, about(Kind::Queue)?),
        opcode::DESTROY_CQ => destroy_completions(state, about(Kind::Completions)?),
        opcode::DESTROY_UMEM => remove(&mut state.umems, about(Kind::Umem)?),
        opcode::DEALLOC_UAR => remove(&mut state.uars, about(Kind::Uar)?),
        _ => Err(Reason::Operation.refuse(Status::BadOperation)),
    }
    .map(|()| None)
}

/// A command of the one length that it has, with nothing but known fields.
fn parse<L: Layout>(input: &[u8]) -> Answer<View<'_, L>> {
    if input.len() != L::LENGTH {
        return Err(Reason::InputLength.refuse(Status::BadInputLength));
    }
    let view = View::new(input).ok_or(Reason::InputLength.refuse(Status::BadInputLength))?;
    check_reserved::<L>(input)?;
    // The variant is in the same place everywhere.
    let head = View::<CommandIn>::new(input).map_or(0, |head| head.get(CommandIn::OP_MOD));
    if head != 0 && L::NAME != QueryHcaCapIn::NAME {
        return Err(Reason::Variant.refuse(Status::BadOperation));
    }
    Ok(view)
}

fn check_reserved<L: Layout>(input: &[u8]) -> Answer<()> {
    let mut left = input[..L::LENGTH].to_vec();
    clear(L::NAME, &mut left);
    if left.iter().all(|&byte| byte == 0) { Ok(()) } else { Err(Reason::Reserved.parameter()) }
}

/// Clears the fields that a table knows.
fn clear(table: &str, bytes: &mut [u8]) {
    for row in TABLES.iter().filter(|known| known.name == table).flat_map(|table| table.rows) {
        let place = row.offset as usize / 8;
        let within = place..place + row.width as usize / 8;
        match row.kind {
            RowKind::Number => row.set(bytes, 0),
            RowKind::Bytes => bytes[within].fill(0),
            RowKind::Part(part) => clear(part, &mut bytes[within]),
        }
    }
}

fn room<L: Layout>(output: &[u8]) -> Answer<()> {
    if output.len() < L::LENGTH { Err(Reason::OutputLength.refuse(Status::BadOutputLength)) } else { Ok(()) }
}

fn reply<L: Layout>(output: &mut [u8], answer: &Mailbox<L>) {
    output[..L::LENGTH].copy_from_slice(answer.view().bytes());
}

fn reply_number<L: Layout>(output: &mut [u8], field: Field<L>, number: u32) {
    let mut answer = Mailbox::<L>::new();
    answer.set(field, number.into());
    reply(output, &answer);
}

fn query_capabilities(config: &SoftConfig, command: View<'_, QueryHcaCapIn>, output: &mut [u8]) -> Answer<()> {
    room::<QueryHcaCapOut>(output)?;
    let mut answer = Mailbox::<QueryHcaCapOut>::new();
    let ethernet = config.link == Link::Ethernet;
    match command.get(QueryHcaCapIn::OP_MOD) {
        capability::GENERAL => {
            let table = QueryHcaCapOut::GENERAL;
            let mut set = |field, value: u64| {
                answer.set(table.field(field), value);
            };
            set(HcaCap::HCA_CAP_2, 1);
            set(HcaCap::LOG_MAX_QP_SZ, config.log_max_queue.into());
            set(HcaCap::LOG_MAX_QP, 18);
            set(HcaCap::LOG_MAX_CQ_SZ, config.log_max_completions.into());
            set(HcaCap::LOG_MAX_CQ, 18);
            set(HcaCap::RELAXED_ORDERING_WRITE, 1);
            set(HcaCap::LOG_MAX_RA_REQ_QP, config.log_max_reads.into());
            set(HcaCap::LOG_MAX_RA_RES_QP, config.log_max_reads.into());
            set(HcaCap::PORT_TYPE, if ethernet { PORT_TYPE_ETHERNET } else { 0 });
            set(HcaCap::NUM_PORTS, config.ports.len() as u64);
            set(HcaCap::LOG_MAX_MSG, 30);
            set(HcaCap::ROCE, ethernet.into());
            set(HcaCap::ATOMIC, config.atomics.into());
            set(HcaCap::CQ_OI, config.ignore_overrun.into());
            set(HcaCap::CD, config.core_direct.into());
            set(HcaCap::RC, config.reliable.into());
            set(HcaCap::LOG_PG_SZ, PAGE.ilog2().into());
            set(HcaCap::MAX_WQE_SZ_SQ, SLOT_BYTES);
            set(HcaCap::LOG_MAX_UMEM, 16);
        }
        capability::GENERAL_2 => {}
        capability::ROCE if ethernet => {
            let table = QueryHcaCapOut::ROCE;
            let gids = config.ports.iter().map(|port| port.gids.len()).max().unwrap_or(0);
            answer
                .set(table.field(RoceCap::ROCE_VERSION), 1 << roce_version::V1 | 1 << roce_version::V2)
                .set(table.field(RoceCap::R_ROCE_MIN_SRC_UDP_PORT), config.udp_ports.0.into())
                .set(table.field(RoceCap::R_ROCE_MAX_SRC_UDP_PORT), config.udp_ports.1.into())
                .set(table.field(RoceCap::ROCE_ADDRESS_TABLE_SIZE), gids as u64);
        }
        capability::ATOMIC if config.atomics => {
            let table = QueryHcaCapOut::ATOMIC;
            answer
                .set(table.field(AtomicCap::ENDIANNESS_MODE), 1)
                .set(table.field(AtomicCap::OPERATIONS), 1 << 1)
                .set(table.field(AtomicCap::SIZE_QP), 1 << 3);
        }
        _ => return Err(Reason::Variant.refuse(Status::BadOperation)),
    }
    reply(output, &answer);
    Ok(())
}

fn port_of(config: &SoftConfig, port: u64) -> Answer<&SoftPort> {
    let found = usize::try_from(port).ok().and_then(|port| config.ports.get(port.wrapping_sub(1)));
    found.ok_or(Reason::Port.parameter())
}

fn query_address(config: &SoftConfig, command: View<'_, QueryRoceAddressIn>, output: &mut [u8]) -> Answer<()> {
    room::<QueryRoceAddressOut>(output)?;
    if config.link != Link::Ethernet {
        return Err(Reason::Operation.refuse(Status::BadOperation));
    }
    let port = port_of(config, command.get(QueryRoceAddressIn::VHCA_PORT_NUM))?;
    let index = command.get(QueryRoceAddressIn::ROCE_ADDRESS_INDEX) as usize;
    let entry = port.gids.get(index).ok_or(Reason::GidIndex.refuse(Status::Index))?;
    let table = QueryRoceAddressOut::ROCE_ADDRESS;
    let [a, b, c, d, e, f] = port.mac.map(u64::from);
    let mapped = entry.gid[..12] == [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff];
    let mut answer = Mailbox::<QueryRoceAddressOut>::new();
    answer
        .set_bytes(table.bytes(RoceAddress::SOURCE_L3_ADDRESS), entry.gid)
        .set(table.field(RoceAddress::SOURCE_MAC_47_32), a << 8 | b)
        .set(table.field(RoceAddress::SOURCE_MAC_31_0), c << 24 | d << 16 | e << 8 | f)
        .set(table.field(RoceAddress::ROCE_L3_TYPE), u64::from(!mapped))
        .set(table.field(RoceAddress::ROCE_VERSION), entry.version);
    reply(output, &answer);
    Ok(())
}

fn create_umem(state: &mut State, device: u32, input: &[u8], output: &mut [u8]) -> Answer<u32> {
    room::<CreateUmemOut>(output)?;
    state.check_room(device)?;
    let length = || Reason::InputLength.refuse(Status::BadInputLength);
    let command = View::<CreateUmemIn>::new(input).ok_or_else(length)?;
    check_reserved::<CreateUmemIn>(input)?;
    let umem = command.part(CreateUmemIn::UMEM);
    let (list, count) = (&input[CreateUmemIn::LENGTH..], umem.get(Umem::NUM_OF_MTT));
    if count == 0 || count.checked_mul(Mtt::LENGTH as u64) != Some(list.len() as u64) {
        return Err(length());
    }
    let page = PAGE << umem.get(Umem::LOG_PAGE_SIZE);
    let offset = umem.get(Umem::PAGE_OFFSET);
    if offset >= page {
        return Err(Reason::PageOffset.parameter());
    }
    let mut pages = list.chunks_exact(Mtt::LENGTH).filter_map(View::<Mtt>::new).map(|entry| {
        let address = entry.get(Mtt::PTAG_63_32) << 32 | entry.get(Mtt::PTAG_31_8) << 8;
        (address, entry.get(Mtt::RD_EN) == 1, entry.get(Mtt::WR_EN) == 1)
    });
    let (first, readable, written) = pages.next().ok_or_else(length)?;
    if !readable {
        return Err(Reason::Access.parameter());
    }
    // The engine takes memory as one range.
    let follows = |(number, found): (usize, (u64, bool, bool))| {
        found == (first.wrapping_add((number as u64 + 1) * page), readable, written)
    };
    if !pages.enumerate().all(follows) {
        return Err(Reason::Pages.parameter());
    }
    let memory = RingMemory { address: first + offset, bytes: count * page - offset, written };
    let number = add(&mut state.umems, Owned { device, users: 0, what: memory });
    reply_number(output, CreateUmemOut::UMEM_ID, number);
    Ok(number)
}

fn allocate_uar(state: &mut State, device: u32, _command: View<'_, AllocUarIn>, output: &mut [u8]) -> Answer<u32> {
    room::<AllocUarOut>(output)?;
    state.check_room(device)?;
    let page = Box::new(Page([const { AtomicU64::new(0) }; PAGE as usize / 8]));
    let number = add(&mut state.uars, Owned { device, users: 0, what: page });
    reply_number(output, AllocUarOut::UAR, number);
    Ok(number)
}

/// Where `bytes` bytes at `offset` of a memory for rings lie.
fn ring_place(
    state: &State,
    device: u32,
    (valid, number): (u64, u64),
    offset: u64,
    bytes: u64,
    align: u64,
) -> Answer<(u64, u32)> {
    if valid == 0 {
        return Err(Reason::UmemMissing.parameter());
    }
    let found = state.umems.get(number as usize).and_then(Option::as_ref).filter(|umem| umem.device == device);
    let umem = &found.ok_or(Reason::UmemUnknown.refuse(Status::BadResource))?.what;
    if !umem.written {
        return Err(Reason::UmemReadOnly.parameter());
    }
    if offset > umem.bytes || bytes > umem.bytes - offset {
        return Err(Reason::UmemRange.parameter());
    }
    let place = umem.address + offset;
    if place.is_multiple_of(align) { Ok((place, number as u32)) } else { Err(Reason::Alignment.parameter()) }
}

fn check_uar(state: &State, device: u32, number: u64) -> Answer<u32> {
    let found = state.uars.get(number as usize).and_then(Option::as_ref).filter(|uar| uar.device == device);
    found.map(|_| number as u32).ok_or(Reason::Uar.refuse(Status::BadResource))
}

fn create_completions(state: &mut State, device: u32, command: View<'_, CreateCqIn>, output: &mut [u8]) -> Answer<u32> {
    room::<CreateCqOut>(output)?;
    state.check_room(device)?;
    let context = command.part(CreateCqIn::CQ_CONTEXT);
    let log_size = context.get(Cqc::LOG_CQ_SIZE) as u32;
    if context.get(Cqc::CQE_SZ) != 0 || context.get(Cqc::LOG_PAGE_SIZE) != 0 {
        return Err(Reason::EntrySize.parameter());
    }
    if log_size > state.config(device).log_max_completions {
        return Err(Reason::QueueSize.refuse(Status::Limit));
    }
    if context.get(Cqc::C_EQN) != u64::from(EVENT_QUEUE) {
        return Err(Reason::EventQueue.refuse(Status::BadResource));
    }
    let ignored = context.get(Cqc::OI) == 1;
    if ignored && !state.config(device).ignore_overrun {
        return Err(Reason::Overrun.parameter());
    }
    let uar = check_uar(state, device, context.get(Cqc::UAR_PAGE))?;
    let ring_memory = (command.get(CreateCqIn::CQ_UMEM_VALID), command.get(CreateCqIn::CQ_UMEM_ID));
    let offset = command.get(CreateCqIn::CQ_UMEM_OFFSET);
    let (ring, ring_umem) = ring_place(state, device, ring_memory, offset, cqe::BYTES << log_size, cqe::BYTES)?;
    let record_memory = (context.get(Cqc::DBR_UMEM_VALID), context.get(Cqc::DBR_UMEM_ID));
    let (record, record_umem) = ring_place(state, device, record_memory, context.get(Cqc::DBR_ADDR), 8, 8)?;
    let queue = CompletionQueue {
        live: true,
        device,
        ring,
        log_size,
        collapsed: context.get(Cqc::CC) == 1,
        record: (!ignored).then_some(record),
        produced: 0,
    };
    let uses = Uses { umems: vec![ring_umem, record_umem], uar, completions: Vec::new(), domain: None };
    state.count(&uses, true);
    let number = match state.completions.iter().skip(1).position(|queue| !queue.live) {
        Some(free) => free + 1,
        None => {
            state.completions.push(CompletionQueue::default());
            state.completion_uses.push(Default::default());
            state.completions.len() - 1
        }
    };
    state.completions[number] = queue;
    state.completion_uses[number] = (uses, 0);
    reply_number(output, CreateCqOut::CQN, number as u32);
    Ok(number as u32)
}

fn destroy_completions(state: &mut State, number: u32) -> Answer<()> {
    let (uses, users) = state.completion_uses[number as usize].clone();
    if users > 0 {
        return Err(Reason::InUse.refuse(Status::ResourceBusy));
    }
    state.completions[number as usize].live = false;
    state.count(&uses, false);
    Ok(())
}

fn create_queue(state: &mut State, device: u32, command: View<'_, CreateQpIn>, output: &mut [u8]) -> Answer<u32> {
    room::<CreateQpOut>(output)?;
    state.check_room(device)?;
    let context = command.part(CreateQpIn::QPC);
    if !state.config(device).reliable || context.get(Qpc::ST) != 0 {
        return Err(Reason::Service.parameter());
    }
    let receives = context.get(Qpc::LOG_RQ_SIZE) != 0 || context.get(Qpc::LOG_RQ_STRIDE) != 0;
    if receives || context.get(Qpc::RQ_TYPE) != RQ_TYPE_NONE {
        return Err(Reason::ReceiveQueue.parameter());
    }
    if context.get(Qpc::SEND_DBR_MODE) != 0 {
        return Err(Reason::DoorbellMode.parameter());
    }
    if context.get(Qpc::LOG_PAGE_SIZE) != 0 {
        return Err(Reason::EntrySize.parameter());
    }
    let domain = context.get(Qpc::PD) as u32;
    let known = state.domains.get(domain as usize).and_then(Option::as_ref);
    if known.is_none_or(|known| known.device != device) {
        return Err(Reason::Domain.refuse(Status::BadResource));
    }
    let master = context.get(Qpc::CD_MASTER) == 1;
    let slave = context.get(Qpc::CD_SLAVE_SEND) == 1 || context.get(Qpc::CD_SLAVE_RECEIVE) == 1;
    if slave || (master && !state.config(device).core_direct) {
        return Err(Reason::CoreDirect.parameter());
    }
    let completions = context.get(Qpc::CQN_SND) as u32;
    let known = state.completions.get(completions as usize);
    if known.is_none_or(|known| !known.live || known.device != device) {
        return Err(Reason::CompletionQueue.refuse(Status::BadResource));
    }
    let uar = check_uar(state, device, context.get(Qpc::UAR_PAGE))?;
    let sends = context.get(Qpc::NO_SQ) == 0;
    if sends && state.queue_uses.iter().zip(&state.queues).any(|(uses, queue)| queue.live && uses.uar == uar) {
        return Err(Reason::UarShared.refuse(Status::ResourceBusy));
    }
    let mut queue =
        Queue { live: true, device, domain, completions, master, state: QpState::Reset, ..Queue::default() };
    // A queue pair that only answers has neither ring nor record, and rings no doorbell.
    let mut uses = Uses { umems: Vec::new(), uar: 0, completions: vec![completions], domain: Some(domain) };
    if sends {
        queue.log_size = context.get(Qpc::LOG_SQ_SIZE) as u32;
        if queue.log_size > state.config(device).log_max_queue {
            return Err(Reason::QueueSize.refuse(Status::Limit));
        }
        let ring_memory = (command.get(CreateQpIn::WQ_UMEM_VALID), command.get(CreateQpIn::WQ_UMEM_ID));
        let offset = command.get(CreateQpIn::WQ_UMEM_OFFSET);
        let (ring, ring_umem) =
            ring_place(state, device, ring_memory, offset, SLOT_BYTES << queue.log_size, SLOT_BYTES)?;
        let record_memory = (context.get(Qpc::DBR_UMEM_VALID), context.get(Qpc::DBR_UMEM_ID));
        let (record, record_umem) = ring_place(state, device, record_memory, context.get(Qpc::DBR_ADDR), 8, 8)?;
        (queue.ring, queue.record) = (ring, record + SEND_OFFSET);
        (uses.umems, uses.uar) = (vec![ring_umem, record_umem], uar);
    }
    state.count(&uses, true);
    let number = match state.queues.iter().skip(1).position(|queue| !queue.live) {
        Some(free) => free + 1,
        None => {
            state.queues.push(Queue::default());
            state.queue_uses.push(Uses::default());
            state.queues.len() - 1
        }
    };
    state.queues[number] = queue;
    state.queue_uses[number] = uses;
    reply_number(output, CreateQpOut::QPN, number as u32);
    Ok(number as u32)
}

fn destroy_queue(state: &mut State, number: u32) -> Answer<()> {
    let uses = std::mem::take(&mut state.queue_uses[number as usize]);
    state.queues[number as usize].live = false;
    state.count(&uses, false);
    Ok(())
}

/// The queue pair, if it is in this state.
fn in_state(state: &mut State, number: u32, expected: QpState) -> Answer<&mut Queue> {
    let queue = &mut state.queues[number as usize];
    if queue.state == expected { Ok(queue) } else { Err(Reason::State.refuse(Status::BadQpState)) }
}

/// What a peer may do, of the fields whose bits are in the mask.
fn rights(config: &SoftConfig, context: View<'_, Qpc>, before: Rights, mask: u64) -> Answer<Rights> {
    let mut rights = before;
    if mask & opt_param::RRE != 0 {
        rights.remote_read = context.get(Qpc::RRE) == 1;
    }
    if mask & opt_param::RWE != 0 {
        rights.remote_write = context.get(Qpc::RWE) == 1;
    }
    if mask & opt_param::RAE != 0 {
        rights.remote_atomic = context.get(Qpc::RAE) == 1;
        let mode = AtomicMode::from_code(context.get(Qpc::ATOMIC_MODE));
        if rights.remote_atomic && (mode.is_none() || !config.atomics) {
            return Err(Reason::Atomics.parameter());
        }
    }
    Ok(rights)
}

fn check_optional(mask: u64, allowed: u64) -> Answer<()> {
    if mask & !allowed == 0 { Ok(()) } else { Err(Reason::Optional.parameter()) }
}

fn to_init(state: &mut State, number: u32, command: View<'_, ModifyQpIn>) -> Answer<()> {
    in_state(state, number, QpState::Reset)?;
    let context = command.part(ModifyQpIn::QPC);
    let device = state.queues[number as usize].device;
    let config = state.config(device);
    check_optional(command.get(ModifyQpIn::OPT_PARAM_MASK), 0)?;
    let path = context.part(Qpc::PRIMARY_ADDRESS_PATH);
    port_of(config, path.get(Ads::VHCA_PORT_NUM))?;
    if context.get(Qpc::PM_STATE) != PM_MIGRATED {
        return Err(Reason::Path.parameter());
    }
    if path.get(Ads::PKEY_INDEX) != 0 {
        return Err(Reason::PartitionKey.refuse(Status::Index));
    }
    let all = opt_param::RRE | opt_param::RWE | opt_param::RAE;
    let rights = rights(config, context, Rights::default(), all)?;
    let queue = in_state(state, number, QpState::Reset)?;
    (queue.rights, queue.state) = (rights, QpState::Init);
    Ok(())
}

fn to_ready_to_receive(state: &mut State, number: u32, command: View<'_, ModifyQpIn>) -> Answer<()> {
    let queue = *in_state(state, number, QpState::Init)?;
    let context = command.part(ModifyQpIn::QPC);
    let config = state.config(queue.device);
    let mask = command.get(ModifyQpIn::OPT_PARAM_MASK);
    let rights_bits = opt_param::RRE | opt_param::RWE | opt_param::RAE;
    check_optional(mask, rights_bits | opt_param::PKEY_INDEX)?;
    let mtu = Mtu::from_code(context.get(Qpc::MTU)).ok_or(Reason::Mtu.parameter())?;
    let log_message = context.get(Qpc::LOG_MSG_MAX);
    if log_message > 30 {
        return Err(Reason::Message.parameter());
    }
    if context.get(Qpc::LOG_RRA_MAX) > config.log_max_reads.into() {
        return Err(Reason::Reads.refuse(Status::Limit));
    }
    let path = context.part(Qpc::PRIMARY_ADDRESS_PATH);
    if mask & opt_param::PKEY_INDEX != 0 && path.get(Ads::PKEY_INDEX) != 0 {
        return Err(Reason::PartitionKey.refuse(Status::Index));
    }
    let (port, peer_device) = resolve(state, config, path)?;
    let rights = rights(config, context, queue.rights, mask)?;
    // Packets that are longer than the port takes never arrive.
    let fits = mtu <= port.mtu;
    let changed = &mut state.queues[number as usize];
    changed.rights = rights;
    changed.mtu = if fits { mtu.bytes() } else { 0 };
    changed.log_message = log_message as u32;
    changed.peer = context.get(Qpc::REMOTE_QPN) as u32;
    changed.peer_device = peer_device.unwrap_or(u32::MAX);
    changed.state = QpState::ReadyToReceive;
    Ok(())
}

/// The own port of a path, and the NIC at its other end, if there is one.
fn resolve<'s>(state: &State, config: &'s SoftConfig, path: View<'_, Ads>) -> Answer<(&'s SoftPort, Option<u32>)> {
    let port = port_of(config, path.get(Ads::VHCA_PORT_NUM))?;
    let gid = path.get_bytes(Ads::RGID_RIP);
    let has = |port: &SoftPort, gid: [u8; 16]| port.gids.iter().any(|entry| entry.gid == gid);
    let numbered = || state.devices.iter().enumerate();
    let mac = path.get(Ads::RMAC_47_32) << 32 | path.get(Ads::RMAC_31_0);
    let found = match config.link {
        Link::InfiniBand => {
            let lid = path.get(Ads::RLID) as u16;
            if lid == 0 {
                return Err(Reason::Lid.parameter());
            }
            let global = path.get(Ads::GRH) == 1;
            if global && path.get(Ads::HOP_LIMIT) == 0 {
                return Err(Reason::Hops.parameter());
            }
            numbered().find(|(_, device)| {
                let there = |port: &SoftPort| port.active && port.lid == lid && (!global || has(port, gid));
                device.link == Link::InfiniBand && device.ports.iter().any(there)
            })
        }
        Link::Ethernet => {
            if path.get(Ads::GRH) == 1 || path.get(Ads::RLID) != 0 {
                return Err(Reason::Header.parameter());
            }
            let own = port.gids.get(path.get(Ads::SRC_ADDR_INDEX) as usize);
            let own = own.filter(|entry| entry.gid != [0; 16]).ok_or(Reason::GidIndex.refuse(Status::Index))?;
            if own.version == roce_version::V2 {
                let udp = path.get(Ads::UDP_SPORT) as u16;
                if !(config.udp_ports.0..=config.udp_ports.1).contains(&udp) {
                    return Err(Reason::UdpPort.parameter());
                }
            }
            if path.get(Ads::HOP_LIMIT) == 0 {
                return Err(Reason::Hops.parameter());
            }
            numbered().find(|(_, device)| {
                let address = |port: &SoftPort| port.mac.iter().fold(0, |all, &byte| all << 8 | u64::from(byte));
                let there = |port: &SoftPort| port.active && has(port, gid) && address(port) == mac;
                device.link == Link::Ethernet && device.ports.iter().any(there)
            })
        }
    };
    Ok((port, found.map(|(number, _)| number as u32).filter(|_| port.active)))
}

fn to_ready_to_send(state: &mut State, number: u32, command: View<'_, ModifyQpIn>) -> Answer<()> {
    let queue = *in_state(state, number, QpState::ReadyToReceive)?;
    let context = command.part(ModifyQpIn::QPC);
    let config = state.config(queue.device);
    let mask = command.get(ModifyQpIn::OPT_PARAM_MASK);
    let rights_bits = opt_param::RRE | opt_param::RWE | opt_param::RAE;
    check_optional(mask, rights_bits | opt_param::RNR_TIMEOUT)?;
    let reads = context.get(Qpc::LOG_SRA_MAX);
    if reads > config.log_max_reads.into() {
        return Err(Reason::Reads.refuse(Status::Limit));
    }
    let rights = rights(config, context, queue.rights, mask)?;
    let changed = &mut state.queues[number as usize];
    changed.rights = rights;
    changed.reads = 1 << reads;
    changed.ack_timeout = context.part(Qpc::PRIMARY_ADDRESS_PATH).get(Ads::ACK_TIMEOUT) as u32;
    changed.state = QpState::ReadyToSend;
    Ok(())
}

fn stop(state: &mut State, number: u32, command: View<'_, StopQpIn>) -> Answer<()> {
    let queue = &mut state.queues[number as usize];
    if command.get(StopQpIn::OPCODE) == opcode::TO_RST_QP {
        queue.reset();
    } else if queue.state == QpState::Reset {
        return Err(Reason::State.refuse(Status::BadQpState));
    } else {
        queue.state = QpState::Error;
    }
    Ok(())
}

fn query_queue(state: &mut State, number: u32, _command: View<'_, QueryQpIn>, output: &mut [u8]) -> Answer<()> {
    room::<QueryQpOut>(output)?;
    let queue = &state.queues[number as usize];
    let mut answer = Mailbox::<QueryQpOut>::new();
    let context = QueryQpOut::QPC;
    answer
        .set(context.field(Qpc::STATE), queue.state.code())
        .set(context.field(Qpc::PD), queue.domain.into())
        .set(context.field(Qpc::CQN_SND), queue.completions.into())
        .set(context.field(Qpc::LOG_SQ_SIZE), queue.log_size.into())
        .set(context.field(Qpc::REMOTE_QPN), queue.peer.into())
        .set(context.field(Qpc::CD_MASTER), queue.master.into())
        .set(context.field(Qpc::HW_SQ_WQEBB_COUNTER), queue.started & 0xffff)
        .set(context.field(Qpc::SW_SQ_WQEBB_COUNTER), queue.posted & 0xffff);
    reply(output, &answer);
    Ok(())
}

fn query_completions(state: &mut State, number: u32, _command: View<'_, QueryCqIn>, output: &mut [u8]) -> Answer<()> {
    room::<QueryCqOut>(output)?;
    let queue = &state.completions[number as usize];
    let mut answer = Mailbox::<QueryCqOut>::new();
    let context = QueryCqOut::CQ_CONTEXT;
    answer
        .set(context.field(Cqc::LOG_CQ_SIZE), queue.log_size.into())
        .set(context.field(Cqc::PRODUCER_COUNTER), queue.produced & 0xff_ffff);
    reply(output, &answer);
    Ok(())
}
