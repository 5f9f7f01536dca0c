// SPDX-License-Identifier: MIT OR Apache-2.0
//! Commands that create objects.

use crate::objects::{EVENT_QUEUE, HcaState, Kind, Name, Object, put};
use crate::reason::{Answer, Reason};
use gin_abi::mlx5::bits::View;
use gin_abi::mlx5::command::{QpState, RQ_TYPE_NONE};
use gin_abi::mlx5::cqe;
use gin_abi::mlx5::doorbell::SEND_OFFSET;
use gin_abi::mlx5::mailbox::{Cqc, CreateCqIn, CreateQpIn, Qpc};
use gin_abi::mlx5::wqe::SLOT_BYTES;
use gin_soft_nic::tables::{CompletionQueue, QueuePair};

/// Returns the address of `bytes` bytes in registered ring memory, and the name of that memory. Three fields of a
/// command select it: whether it is valid, its number, and the offset.
fn ring_place(
    state: &HcaState,
    device: u32,
    [valid, number, offset]: [u64; 3],
    bytes: u64,
    align: u64,
) -> Answer<(u64, Name)> {
    Reason::UmemMissing.refuse_if(valid == 0)?;
    let name = (Kind::Umem, number as u32);
    let known = state.umems.get(number as usize).and_then(Option::as_ref).filter(|_| state.has(device, name));
    let umem = known.ok_or(Reason::UmemUnknown)?;
    Reason::UmemReadOnly.refuse_if(!umem.written)?;
    Reason::UmemRange.refuse_if(offset > umem.bytes || bytes > umem.bytes - offset)?;
    let place = umem.address + offset;
    Reason::Alignment.refuse_if(!place.is_multiple_of(align))?;
    Ok((place, name))
}

pub(super) fn create_completions(state: &mut HcaState, device: u32, command: View<'_, CreateCqIn>) -> Answer<Object> {
    state.check_room(device)?;
    let config = state.config(device);
    let context = command.part(CreateCqIn::CQ_CONTEXT);
    let log_size = context.get(Cqc::LOG_CQ_SIZE) as u32;
    Reason::EntrySize.refuse_if(context.get(Cqc::CQE_SZ) != 0 || context.get(Cqc::LOG_PAGE_SIZE) != 0)?;
    Reason::QueueSize.refuse_if(log_size > config.log_max_completions)?;
    Reason::EventQueue.refuse_if(context.get(Cqc::C_EQN) != u64::from(EVENT_QUEUE))?;
    let ignored = context.get(Cqc::OI) == 1;
    Reason::Overrun.refuse_if(ignored && !config.ignore_overrun)?;
    let uar = (Kind::Uar, context.get(Cqc::UAR_PAGE) as u32);
    Reason::Uar.refuse_if(!state.has(device, uar))?;
    let fields = [CreateCqIn::CQ_UMEM_VALID, CreateCqIn::CQ_UMEM_ID, CreateCqIn::CQ_UMEM_OFFSET];
    let in_memory = fields.map(|field| command.get(field));
    let (ring, ring_umem) = ring_place(state, device, in_memory, cqe::BYTES << log_size, cqe::BYTES)?;
    let in_memory = [Cqc::DBR_UMEM_VALID, Cqc::DBR_UMEM_ID, Cqc::DBR_ADDR].map(|field| context.get(field));
    let (record, record_umem) = ring_place(state, device, in_memory, 8, 8)?;
    let queue = CompletionQueue {
        live: true,
        device,
        ring,
        log_size,
        collapsed: context.get(Cqc::CC) == 1,
        record: if ignored { 0 } else { record },
        produced: 0,
    };
    let number = put(&mut state.completions, |queue| !queue.live, queue)?;
    Ok(Object { name: (Kind::Completions, number), device, uses: vec![ring_umem, record_umem, uar] })
}

pub(super) fn create_queue(state: &mut HcaState, device: u32, command: View<'_, CreateQpIn>) -> Answer<Object> {
    state.check_room(device)?;
    let config = state.config(device);
    let context = command.part(CreateQpIn::QPC);
    Reason::Service.refuse_if(!config.reliable || context.get(Qpc::ST) != 0)?;
    let receives = context.get(Qpc::LOG_RQ_SIZE) != 0 || context.get(Qpc::LOG_RQ_STRIDE) != 0;
    Reason::ReceiveQueue.refuse_if(receives || context.get(Qpc::RQ_TYPE) != RQ_TYPE_NONE)?;
    Reason::DoorbellMode.refuse_if(context.get(Qpc::SEND_DBR_MODE) != 0)?;
    Reason::EntrySize.refuse_if(context.get(Qpc::LOG_PAGE_SIZE) != 0)?;
    let domain = context.get(Qpc::PD) as u32;
    Reason::Domain.refuse_if(!state.has(device, (Kind::Domain, domain)))?;
    let master = context.get(Qpc::CD_MASTER) == 1;
    let slave = context.get(Qpc::CD_SLAVE_SEND) == 1 || context.get(Qpc::CD_SLAVE_RECEIVE) == 1;
    Reason::CoreDirect.refuse_if(slave || (master && !config.core_direct))?;
    let completions = context.get(Qpc::CQN_SND) as u32;
    Reason::CompletionQueue.refuse_if(!state.has(device, (Kind::Completions, completions)))?;
    let uar = (Kind::Uar, context.get(Qpc::UAR_PAGE) as u32);
    Reason::Uar.refuse_if(!state.has(device, uar))?;
    let mut queue =
        QueuePair { live: true, device, domain, completions, master, state: QpState::Reset, ..QueuePair::default() };
    let mut uses = vec![(Kind::Domain, domain), (Kind::Completions, completions)];
    // A responder has neither ring nor record, and rings no doorbell.
    if context.get(Qpc::NO_SQ) == 0 {
        let rings = |other: &Object| other.name.0 == Kind::Queue && other.uses.contains(&uar);
        Reason::UarShared.refuse_if(state.objects.values().any(rings))?;
        queue.log_size = context.get(Qpc::LOG_SQ_SIZE) as u32;
        Reason::QueueSize.refuse_if(queue.log_size > config.log_max_queue)?;
        let fields = [CreateQpIn::WQ_UMEM_VALID, CreateQpIn::WQ_UMEM_ID, CreateQpIn::WQ_UMEM_OFFSET];
        let in_memory = fields.map(|field| command.get(field));
        let (ring, ring_umem) = ring_place(state, device, in_memory, SLOT_BYTES << queue.log_size, SLOT_BYTES)?;
        let in_memory = [Qpc::DBR_UMEM_VALID, Qpc::DBR_UMEM_ID, Qpc::DBR_ADDR].map(|field| context.get(field));
        let (record, record_umem) = ring_place(state, device, in_memory, 8, 8)?;
        (queue.ring, queue.record) = (ring, record + SEND_OFFSET);
        uses.extend([ring_umem, record_umem, uar]);
    }
    let number = state.add_queue(queue)?;
    Ok(Object { name: (Kind::Queue, number), device, uses })
}
