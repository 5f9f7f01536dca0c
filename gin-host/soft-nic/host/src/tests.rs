// SPDX-License-Identifier: MIT OR Apache-2.0
//! Commands are refused as firmware refuses them, with status and reason.

use super::*;
use gin_abi::mlx5::bits::{Field, Mailbox};
use gin_abi::mlx5::command::{
    AtomicMode, Mtu, PM_MIGRATED, QpState, RQ_TYPE_NONE, Status, capability, opcode, opt_param,
};
use gin_abi::mlx5::mailbox::{
    Ads, CommandIn, CommandOut, Cqc, CreateCqIn, CreateQpIn, HcaCap, ModifyQpIn, ModifyQpOut, Qpc, QueryCqIn,
    QueryCqOut, QueryHcaCapIn, QueryHcaCapOut, QueryQpIn, QueryQpOut, QueryRoceAddressIn, QueryRoceAddressOut,
    RoceAddress, StopQpIn,
};
use gin_nic::hca::{Access, Domain, Extent, Handle, Hca, HcaError, Uar, Umem};

/// A NIC with everything that a queue pair needs.
struct Bench {
    fabric: SoftFabric,
    hca: SoftHca,
    domain: Domain,
    umem: Umem,
    uar: Uar,
    _memory: Vec<u64>,
}

/// Bytes of the memory for rings; it begins in the middle of a page.
const BYTES: u64 = 0x8000;

impl Bench {
    fn new(config: SoftConfig) -> Self {
        let fabric = SoftFabric::default();
        let hca = fabric.add(config);
        let memory = vec![0u64; BYTES as usize / 8 + 8];
        let address = (memory.as_ptr() as u64).next_multiple_of(64);
        let extent = Extent { address, bytes: BYTES, dma_buf: None };
        // Safety: dropped after the objects.
        let umem = unsafe { hca.register_umem(&extent, Access::RINGS) }.unwrap();
        let (domain, uar) = (hca.allocate_domain().unwrap(), hca.allocate_uar().unwrap());
        Self { fabric, hca, domain, umem, uar, _memory: memory }
    }

    fn completion_command(&self) -> Mailbox<CreateCqIn> {
        let context = CreateCqIn::CQ_CONTEXT;
        let mut command = Mailbox::new();
        command
            .set(CreateCqIn::OPCODE, opcode::CREATE_CQ)
            .set(CreateCqIn::CQ_UMEM_VALID, 1)
            .set(CreateCqIn::CQ_UMEM_ID, self.umem.number.into())
            .set(context.field(Cqc::OI), 1)
            .set(context.field(Cqc::LOG_CQ_SIZE), 4)
            .set(context.field(Cqc::UAR_PAGE), self.uar.number.into())
            .set(context.field(Cqc::C_EQN), self.hca.event_queue().unwrap().into())
            .set(context.field(Cqc::DBR_UMEM_VALID), 1)
            .set(context.field(Cqc::DBR_UMEM_ID), self.umem.number.into())
            .set(context.field(Cqc::DBR_ADDR), 0x7000);
        command
    }

    fn completion_queue(&self) -> (Handle, u32) {
        let mut answer = Mailbox::<CommandOut>::new();
        let command = self.completion_command();
        let handle = self.hca.create(command.bytes().unwrap(), answer.bytes_mut()).unwrap();
        (handle, answer.get(CommandOut::NUMBER) as u32)
    }

    fn queue_command(&self, completions: u32) -> Mailbox<CreateQpIn> {
        let context = CreateQpIn::QPC;
        let mut command = Mailbox::new();
        command
            .set(CreateQpIn::OPCODE, opcode::CREATE_QP)
            .set(CreateQpIn::WQ_UMEM_VALID, 1)
            .set(CreateQpIn::WQ_UMEM_ID, self.umem.number.into())
            .set(CreateQpIn::WQ_UMEM_OFFSET, 0x1000)
            .set(context.field(Qpc::PD), self.domain.number.into())
            .set(context.field(Qpc::LOG_SQ_SIZE), 4)
            .set(context.field(Qpc::UAR_PAGE), self.uar.number.into())
            .set(context.field(Qpc::CQN_SND), completions.into())
            .set(context.field(Qpc::RQ_TYPE), RQ_TYPE_NONE)
            .set(context.field(Qpc::DBR_UMEM_VALID), 1)
            .set(context.field(Qpc::DBR_UMEM_ID), self.umem.number.into())
            .set(context.field(Qpc::DBR_ADDR), 0x7040);
        command
    }

    fn queue(&self, completions: u32) -> (Handle, u32) {
        let mut answer = Mailbox::<CommandOut>::new();
        let command = self.queue_command(completions);
        let handle = self.hca.create(command.bytes().unwrap(), answer.bytes_mut()).unwrap();
        (handle, answer.get(CommandOut::NUMBER) as u32)
    }

    fn modify(&self, queue: Handle, command: &Mailbox<ModifyQpIn>) -> Result<(), HcaError> {
        self.hca.modify(queue, command.bytes().unwrap(), Mailbox::<ModifyQpOut>::new().bytes_mut())
    }

    fn state(&self, (handle, number): (Handle, u32)) -> Option<QpState> {
        let mut command = Mailbox::<QueryQpIn>::new();
        command.set(QueryQpIn::OPCODE, opcode::QUERY_QP).set(QueryQpIn::QPN, number.into());
        let mut answer = Mailbox::<QueryQpOut>::new();
        self.hca.query(handle, command.bytes().unwrap(), answer.bytes_mut()).unwrap();
        QpState::from_code(answer.get(QueryQpOut::QPC.field(Qpc::STATE)))
    }
}

/// Status and reason of a refusal.
fn refusal<T: fmt::Debug>(result: Result<T, HcaError>) -> (Status, &'static str) {
    match result {
        Err(HcaError::Refused { status, syndrome }) => {
            (Status::from_code(status.into()).expect("a status"), reason(syndrome).expect("a reason"))
        }
        other => panic!("{other:?}"),
    }
}

fn init(number: u32) -> Mailbox<ModifyQpIn> {
    let context = ModifyQpIn::QPC;
    let mut command = Mailbox::new();
    command
        .set(ModifyQpIn::OPCODE, opcode::RST2INIT_QP)
        .set(ModifyQpIn::QPN, number.into())
        .set(context.part(Qpc::PRIMARY_ADDRESS_PATH).field(Ads::VHCA_PORT_NUM), 1)
        .set(context.field(Qpc::PM_STATE), PM_MIGRATED)
        .set(context.field(Qpc::RAE), 1)
        .set(context.field(Qpc::ATOMIC_MODE), AtomicMode::Specification.code());
    command
}

fn ready_to_receive(number: u32) -> Mailbox<ModifyQpIn> {
    let context = ModifyQpIn::QPC;
    let path = context.part(Qpc::PRIMARY_ADDRESS_PATH);
    let mut command = Mailbox::new();
    command
        .set(ModifyQpIn::OPCODE, opcode::INIT2RTR_QP)
        .set(ModifyQpIn::QPN, number.into())
        .set(context.field(Qpc::MTU), Mtu::B4096.code())
        .set(context.field(Qpc::LOG_MSG_MAX), 30)
        .set(context.field(Qpc::REMOTE_QPN), 1)
        .set(path.field(Ads::VHCA_PORT_NUM), 1)
        .set(path.field(Ads::SRC_ADDR_INDEX), 3)
        .set(path.field(Ads::HOP_LIMIT), 64)
        .set(path.field(Ads::UDP_SPORT), 0xc000);
    command
}

fn ready_to_send(number: u32) -> Mailbox<ModifyQpIn> {
    let mut command = Mailbox::new();
    command.set(ModifyQpIn::OPCODE, opcode::RTR2RTS_QP).set(ModifyQpIn::QPN, number.into());
    command
}

#[test]
fn a_completion_queue_needs_all_that_it_names() {
    let bench = Bench::new(SoftConfig::ethernet(0));
    let context = CreateCqIn::CQ_CONTEXT;
    let before = bench.fabric.objects();
    let with = |field: Field<CreateCqIn>, value: u64| {
        let mut command = bench.completion_command();
        command.set(field, value);
        let found = refusal(bench.hca.create(command.bytes().unwrap(), &mut [0; 16]));
        assert_eq!(bench.fabric.objects(), before);
        found
    };
    let (bad, missing) = (Status::BadParameter, Status::BadResource);
    assert_eq!(with(context.field(Cqc::CQE_SZ), 1), (bad, "size of entries"));
    assert_eq!(with(context.field(Cqc::LOG_CQ_SIZE), 23), (Status::Limit, "size of the queue"));
    assert_eq!(with(context.field(Cqc::C_EQN), 1), (missing, "no such event queue"));
    assert_eq!(with(context.field(Cqc::UAR_PAGE), 9), (missing, "no such doorbell page"));
    assert_eq!(with(CreateCqIn::CQ_UMEM_VALID, 0), (bad, "no memory named for the ring or the record"));
    assert_eq!(with(CreateCqIn::CQ_UMEM_ID, 9), (missing, "no such memory"));
    assert_eq!(with(CreateCqIn::CQ_UMEM_OFFSET, BYTES), (bad, "ring or record reaches past its memory"));
    assert_eq!(with(CreateCqIn::CQ_UMEM_OFFSET, BYTES - 512), (bad, "ring or record reaches past its memory"));
    assert_eq!(with(CreateCqIn::CQ_UMEM_OFFSET, u64::MAX), (bad, "ring or record reaches past its memory"));
    assert_eq!(with(CreateCqIn::CQ_UMEM_OFFSET, 32), (bad, "ring or record is not aligned"));
    assert_eq!(with(context.field(Cqc::DBR_UMEM_VALID), 0), (bad, "no memory named for the ring or the record"));
    assert_eq!(with(context.field(Cqc::DBR_ADDR), BYTES - 4), (bad, "ring or record reaches past its memory"));
    assert_eq!(with(context.field(Cqc::DBR_ADDR), 4), (bad, "ring or record is not aligned"));
    assert_eq!(with(CreateCqIn::OP_MOD, 1), (Status::BadOperation, "no such variant of the command"));
    assert_eq!(with(CreateCqIn::OPCODE, 0x4ff), (Status::BadOperation, "no such command, or not here"));
}

#[test]
fn a_queue_pair_needs_all_that_it_names() {
    let bench = Bench::new(SoftConfig::ethernet(0));
    let (_, completions) = bench.completion_queue();
    let context = CreateQpIn::QPC;
    let before = bench.fabric.objects();
    let with = |field: Field<CreateQpIn>, value: u64| {
        let mut command = bench.queue_command(completions);
        command.set(field, value);
        let found = refusal(bench.hca.create(command.bytes().unwrap(), &mut [0; 16]));
        assert_eq!(bench.fabric.objects(), before);
        found
    };
    let (bad, missing) = (Status::BadParameter, Status::BadResource);
    assert_eq!(with(context.field(Qpc::ST), 3), (bad, "kind of service"));
    assert_eq!(with(context.field(Qpc::RQ_TYPE), 0), (bad, "receive queues are not there"));
    assert_eq!(with(context.field(Qpc::LOG_RQ_SIZE), 1), (bad, "receive queues are not there"));
    assert_eq!(with(context.field(Qpc::SEND_DBR_MODE), 1), (bad, "send queues need doorbell records"));
    assert_eq!(with(context.field(Qpc::PD), 9), (missing, "no such protection domain"));
    assert_eq!(with(context.field(Qpc::CQN_SND), 9), (missing, "no such completion queue"));
    assert_eq!(with(context.field(Qpc::CQN_SND), 0), (missing, "no such completion queue"));
    assert_eq!(with(context.field(Qpc::UAR_PAGE), 9), (missing, "no such doorbell page"));
    assert_eq!(with(context.field(Qpc::LOG_SQ_SIZE), 15), (bad, "ring or record reaches past its memory"));
    assert_eq!(with(CreateQpIn::WQ_UMEM_VALID, 0), (bad, "no memory named for the ring or the record"));
    assert_eq!(with(CreateQpIn::WQ_UMEM_ID, 7), (missing, "no such memory"));
    assert_eq!(with(context.field(Qpc::DBR_UMEM_VALID), 0), (bad, "no memory named for the ring or the record"));
    assert_eq!(with(context.field(Qpc::CD_SLAVE_SEND), 1), (bad, "entries cannot wait for completion queues"));
    // A page holds one doorbell.
    bench.queue(completions);
    let command = bench.queue_command(completions);
    let found = refusal(bench.hca.create(command.bytes().unwrap(), &mut [0; 16]));
    assert_eq!(found, (Status::ResourceBusy, "doorbell page serves another queue pair"));
}

#[test]
fn lengths_and_reserved_bits_are_checked() {
    let bench = Bench::new(SoftConfig::ethernet(0));
    let command = bench.completion_command();
    let good = command.bytes().unwrap();
    let short = refusal(bench.hca.create(&good[..264], &mut [0; 16]));
    assert_eq!(short, (Status::BadInputLength, "wrong length of the command"));
    let long = [good, &[0; 8]].concat();
    assert_eq!(refusal(bench.hca.create(&long, &mut [0; 16])).0, Status::BadInputLength);
    assert_eq!(refusal(bench.hca.create(&[4], &mut [0; 16])).0, Status::BadInputLength);
    let cramped = refusal(bench.hca.create(good, &mut [0; 8]));
    assert_eq!(cramped, (Status::BadOutputLength, "too little room for the answer"));
    let mut answer = Mailbox::<CommandOut>::new();
    for bit in [32, 64, 132, 737, 2000] {
        let mut bytes = good.to_vec();
        bytes[bit / 8] |= 0x80 >> (bit % 8);
        let found = refusal(bench.hca.create(&bytes, answer.bytes_mut()));
        assert_eq!(found, (Status::BadParameter, "a reserved bit is set"), "bit {bit}");
    }
    // The answer says it as well.
    assert_eq!(answer.get(CommandOut::STATUS), Status::BadParameter.code());
    assert_eq!(reason(answer.get(CommandOut::SYNDROME) as u32), Some("a reserved bit is set"));
    assert_eq!(reason(0), None);
}

#[test]
fn states_follow_one_another_and_each_change_is_checked() {
    let bench = Bench::new(SoftConfig::ethernet(0));
    let (_, completions) = bench.completion_queue();
    let queue = bench.queue(completions);
    let (handle, number) = queue;
    let context = ModifyQpIn::QPC;
    let path = context.part(Qpc::PRIMARY_ADDRESS_PATH);
    let with = |good: &Mailbox<ModifyQpIn>, field: Field<ModifyQpIn>, value: u64| {
        let before = bench.state(queue);
        let mut command = *good;
        command.set(field, value);
        let found = refusal(bench.modify(handle, &command));
        assert_eq!(bench.state(queue), before);
        found
    };
    let wrong = (Status::BadQpState, "queue pair is in another state");
    let bad = Status::BadParameter;
    assert_eq!(refusal(bench.modify(handle, &ready_to_receive(number))), wrong);
    assert_eq!(refusal(bench.modify(handle, &ready_to_send(number))), wrong);

    let good = init(number);
    assert_eq!(with(&good, ModifyQpIn::QPN, 77).0, Status::BadResource);
    assert_eq!(with(&good, path.field(Ads::VHCA_PORT_NUM), 0), (bad, "no such port"));
    assert_eq!(with(&good, path.field(Ads::VHCA_PORT_NUM), 2), (bad, "no such port"));
    assert_eq!(with(&good, context.field(Qpc::PM_STATE), 0), (bad, "state of path migration"));
    assert_eq!(with(&good, path.field(Ads::PKEY_INDEX), 1), (Status::Index, "no such partition key"));
    assert_eq!(with(&good, context.field(Qpc::ATOMIC_MODE), 0), (bad, "atomics that the NIC does not have"));
    let optional = (bad, "optional fields that this change does not take");
    assert_eq!(with(&good, ModifyQpIn::OPT_PARAM_MASK, opt_param::RRE), optional);
    bench.modify(handle, &good).unwrap();
    assert_eq!(bench.state(queue), Some(QpState::Init));
    assert_eq!(refusal(bench.modify(handle, &good)), wrong);

    let good = ready_to_receive(number);
    assert_eq!(with(&good, context.field(Qpc::MTU), 0), (bad, "no such MTU"));
    assert_eq!(with(&good, context.field(Qpc::LOG_MSG_MAX), 31), (bad, "longest message"));
    assert_eq!(with(&good, context.field(Qpc::LOG_RRA_MAX), 5), (Status::Limit, "reads and atomics under way"));
    assert_eq!(with(&good, path.field(Ads::SRC_ADDR_INDEX), 4), (Status::Index, "no such GID"));
    assert_eq!(with(&good, path.field(Ads::UDP_SPORT), 0xbfff), (bad, "UDP source port out of range"));
    assert_eq!(with(&good, path.field(Ads::HOP_LIMIT), 0), (bad, "no hops"));
    assert_eq!(with(&good, path.field(Ads::GRH), 1), (bad, "global route header on Ethernet"));
    assert_eq!(with(&good, ModifyQpIn::OPT_PARAM_MASK, opt_param::RNR_TIMEOUT), optional);
    bench.modify(handle, &good).unwrap();
    assert_eq!(bench.state(queue), Some(QpState::ReadyToReceive));

    let good = ready_to_send(number);
    assert_eq!(with(&good, context.field(Qpc::LOG_SRA_MAX), 5), (Status::Limit, "reads and atomics under way"));
    bench.modify(handle, &good).unwrap();
    assert_eq!(bench.state(queue), Some(QpState::ReadyToSend));

    for (code, state) in [(opcode::TO_ERR_QP, QpState::Error), (opcode::TO_RST_QP, QpState::Reset)] {
        let mut command = Mailbox::<StopQpIn>::new();
        command.set(StopQpIn::OPCODE, code).set(StopQpIn::QPN, number.into());
        bench.hca.modify(handle, command.bytes().unwrap(), &mut [0; 16]).unwrap();
        assert_eq!(bench.state(queue), Some(state));
    }
}

#[test]
fn on_infiniband_a_path_needs_a_local_identifier() {
    let bench = Bench::new(SoftConfig::infiniband(0));
    let (_, completions) = bench.completion_queue();
    let (handle, number) = bench.queue(completions);
    bench.modify(handle, &init(number)).unwrap();
    let path = ModifyQpIn::QPC.part(Qpc::PRIMARY_ADDRESS_PATH);
    let mut command = ready_to_receive(number);
    assert_eq!(refusal(bench.modify(handle, &command)), (Status::BadParameter, "no such local identifier"));
    command.set(path.field(Ads::RLID), 1).set(path.field(Ads::GRH), 1).set(path.field(Ads::HOP_LIMIT), 0);
    assert_eq!(refusal(bench.modify(handle, &command)), (Status::BadParameter, "no hops"));
}

#[test]
fn what_is_used_cannot_end_and_what_ended_is_gone() {
    let bench = Bench::new(SoftConfig::ethernet(0));
    let (completions, number) = bench.completion_queue();
    let (queue, _) = bench.queue(number);
    let busy = (Status::ResourceBusy, "object is in use");
    assert_eq!(refusal(bench.hca.destroy(completions)), busy);
    assert_eq!(refusal(bench.hca.deregister_umem(bench.umem.handle)), busy);
    assert_eq!(refusal(bench.hca.free_uar(bench.uar.handle)), busy);
    assert_eq!(refusal(bench.hca.free_domain(bench.domain.handle)), busy);
    bench.hca.destroy(queue).unwrap();
    bench.hca.destroy(completions).unwrap();
    assert_eq!(bench.hca.destroy(queue), Err(HcaError::NoObject(queue)));
    bench.hca.deregister_umem(bench.umem.handle).unwrap();
    bench.hca.free_uar(bench.uar.handle).unwrap();
    // Safety: there is no queue pair that could reach it.
    let region = unsafe {
        let extent = Extent { address: bench._memory.as_ptr() as u64, bytes: 8, dma_buf: None };
        bench.hca.register_region(&bench.domain, &extent, 0, Access::SIGNALS).unwrap()
    };
    assert_eq!(refusal(bench.hca.free_domain(bench.domain.handle)), busy);
    assert_eq!(bench.hca.destroy(region.handle), Err(HcaError::NoObject(region.handle)));
    bench.hca.deregister_region(region.handle).unwrap();
    bench.hca.free_domain(bench.domain.handle).unwrap();
    assert_eq!(bench.fabric.objects(), 0);
}

#[test]
fn a_destroy_command_ends_the_object_and_its_handle_by_whatever_call_it_comes() {
    let bench = Bench::new(SoftConfig::ethernet(0));
    let (completions, number) = bench.completion_queue();
    let (queue, queue_number) = bench.queue(number);
    let mut command = Mailbox::<CommandIn>::new();
    command.set(CommandIn::OPCODE, opcode::DESTROY_QP).set(CommandIn::NUMBER, queue_number.into());
    bench.hca.modify(queue, command.bytes().unwrap(), &mut [0; 16]).unwrap();
    assert!(bench.fabric.queue(queue_number).is_none());
    assert_eq!(bench.hca.destroy(queue), Err(HcaError::NoObject(queue)));
    bench.hca.destroy(completions).unwrap();
}

#[test]
fn objects_of_another_nic_are_not_there() {
    let bench = Bench::new(SoftConfig::ethernet(0));
    let other = bench.fabric.add(SoftConfig::ethernet(1));
    let (completions, number) = bench.completion_queue();
    assert_eq!(other.destroy(completions), Err(HcaError::NoObject(completions)));
    let command = bench.queue_command(number);
    assert_eq!(refusal(other.create(command.bytes().unwrap(), &mut [0; 16])).0, Status::BadResource);
}

#[test]
fn memory_that_cannot_be_registered_is_refused() {
    let bench = Bench::new(SoftConfig::ethernet(0));
    let extent = |address, bytes| Extent { address, bytes, dma_buf: None };
    let there = bench._memory.as_ptr() as u64;
    for memory in [extent(there, 0), extent(u64::MAX - 8, 64)] {
        // Safety: refused.
        let refused = unsafe { bench.hca.register_umem(&memory, Access::RINGS) };
        assert!(matches!(refused, Err(HcaError::System { errno: 22, .. })), "{refused:?}");
    }
    let access = Access::PAYLOAD - Access::LOCAL_WRITE;
    // Safety: refused.
    let refused = unsafe { bench.hca.register_region(&bench.domain, &extent(there, 8), 0, access) };
    assert_eq!(refusal(refused), (Status::BadParameter, "rights that do not go together"));
    // Rings in memory that the NIC may not write.
    let read_only = Access::RINGS - Access::LOCAL_WRITE;
    // Safety: no ring is made in it.
    let umem = unsafe { bench.hca.register_umem(&extent(there, 4096), read_only) }.unwrap();
    let mut command = bench.completion_command();
    command.set(CreateCqIn::CQ_UMEM_ID, umem.number.into());
    let found = refusal(bench.hca.create(command.bytes().unwrap(), &mut [0; 16]));
    assert_eq!(found, (Status::BadParameter, "memory that the NIC may not write"));
}

#[test]
fn a_stale_key_is_not_that_of_a_new_region_in_its_place() {
    let bench = Bench::new(SoftConfig::ethernet(0));
    let extent = Extent { address: bench._memory.as_ptr() as u64, bytes: 64, dma_buf: None };
    // Safety: no queue pair reaches it.
    let register = || unsafe { bench.hca.register_region(&bench.domain, &extent, 0, Access::PAYLOAD) }.unwrap();
    let first = register();
    bench.hca.deregister_region(first.handle).unwrap();
    let second = register();
    assert_eq!(first.local_key >> 8, second.local_key >> 8, "the same place");
    assert_ne!(first.local_key, second.local_key);
}

#[test]
fn capabilities_and_addresses_are_those_of_the_configuration() {
    let bench = Bench::new(SoftConfig { log_max_queue: 9, ..SoftConfig::ethernet(0x0102) });
    let mut command = Mailbox::<QueryHcaCapIn>::new();
    command.set(QueryHcaCapIn::OPCODE, opcode::QUERY_HCA_CAP).set(QueryHcaCapIn::OP_MOD, capability::GENERAL);
    let mut answer = Mailbox::<QueryHcaCapOut>::new();
    bench.hca.command(command.bytes().unwrap(), answer.bytes_mut()).unwrap();
    assert_eq!(answer.get(QueryHcaCapOut::GENERAL.field(HcaCap::LOG_MAX_QP_SZ)), 9);
    command.set(QueryHcaCapIn::OP_MOD, 0x3f);
    let found = refusal(bench.hca.command(command.bytes().unwrap(), answer.bytes_mut()));
    assert_eq!(found, (Status::BadOperation, "no such variant of the command"));
    let found = refusal(bench.hca.command(command.bytes().unwrap(), &mut [0; 64]));
    assert_eq!(found.0, Status::BadOutputLength);

    let mut command = Mailbox::<QueryRoceAddressIn>::new();
    command
        .set(QueryRoceAddressIn::OPCODE, opcode::QUERY_ROCE_ADDRESS)
        .set(QueryRoceAddressIn::ROCE_ADDRESS_INDEX, 3)
        .set(QueryRoceAddressIn::VHCA_PORT_NUM, 1);
    let mut answer = Mailbox::<QueryRoceAddressOut>::new();
    bench.hca.command(command.bytes().unwrap(), answer.bytes_mut()).unwrap();
    let entry = answer.view().part(QueryRoceAddressOut::ROCE_ADDRESS);
    assert_eq!(entry.get_bytes(RoceAddress::SOURCE_L3_ADDRESS)[10..], [0xff, 0xff, 10, 0, 1, 2]);
    assert_eq!(entry.get(RoceAddress::SOURCE_MAC_31_0), 0x0102);
    assert_eq!((entry.get(RoceAddress::ROCE_VERSION), entry.get(RoceAddress::ROCE_L3_TYPE)), (2, 0));
    command.set(QueryRoceAddressIn::ROCE_ADDRESS_INDEX, 4);
    let found = refusal(bench.hca.command(command.bytes().unwrap(), answer.bytes_mut()));
    assert_eq!(found, (Status::Index, "no such GID"));
}

#[test]
fn a_completion_queue_counts_what_it_was_given() {
    let bench = Bench::new(SoftConfig::ethernet(0));
    let (handle, number) = bench.completion_queue();
    let mut command = Mailbox::<QueryCqIn>::new();
    command.set(QueryCqIn::OPCODE, opcode::QUERY_CQ).set(QueryCqIn::CQN, number.into());
    let mut answer = Mailbox::<QueryCqOut>::new();
    bench.hca.query(handle, command.bytes().unwrap(), answer.bytes_mut()).unwrap();
    let context = QueryCqOut::CQ_CONTEXT;
    let seen = [Cqc::LOG_CQ_SIZE, Cqc::PRODUCER_COUNTER].map(|field| answer.get(context.field(field)));
    assert_eq!(seen, [4, 0]);
}

#[test]
fn optional_fields_count_only_by_their_bits_and_a_long_packet_is_no_error_of_the_command() {
    let mut config = SoftConfig::ethernet(0);
    config.ports[0].mtu = Mtu::B1024;
    let bench = Bench::new(config);
    let (_, completions) = bench.completion_queue();
    let (handle, number) = bench.queue(completions);
    bench.modify(handle, &init(number)).unwrap();
    let context = ModifyQpIn::QPC;
    let mut command = ready_to_receive(number);
    command
        .set(ModifyQpIn::OPT_PARAM_MASK, opt_param::RWE | opt_param::RAE)
        .set(context.field(Qpc::RWE), 1)
        .set(context.field(Qpc::RRE), 1);
    bench.modify(handle, &command).unwrap();
    let queue = bench.fabric.queue(number).unwrap();
    let rights = [queue.rights.remote_write, queue.rights.remote_read, queue.rights.remote_atomic];
    assert_eq!(rights, [true, false, false]);
    // 4,096 bytes do not go through this port, so no peer agrees with it.
    assert_eq!(queue.mtu, 0);
}
