// SPDX-License-Identifier: MIT OR Apache-2.0
//! Commands that make objects, and that end queues.

use super::{Answer, Reason, check_reserved, reply_number, room};
use crate::objects::{EVENT_QUEUE, HcaState, Owned, PAGE, RingMemory, Uses, add};
use crate::table::Full;
use gin_abi::mlx5::bits::{Layout, View};
use gin_abi::mlx5::command::{QpState, RQ_TYPE_NONE, Status};
use gin_abi::mlx5::cqe;
use gin_abi::mlx5::doorbell::SEND_OFFSET;
use gin_abi::mlx5::mailbox::{
    AllocUarIn, AllocUarOut, Cqc, CreateCqIn, CreateCqOut, CreateQpIn, CreateQpOut, CreateUmemIn, CreateUmemOut, Mtt,
    Qpc, Umem,
};
use gin_abi::mlx5::wqe::SLOT_BYTES;
use gin_soft_hca::tables::{CompletionQueue, QueuePair};

pub(super) fn create_umem(state: &mut HcaState, device: u32, input: &[u8], output: &mut [u8]) -> Answer<u32> {
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

pub(super) fn allocate_uar(
    state: &mut HcaState,
    device: u32,
    _command: View<'_, AllocUarIn>,
    output: &mut [u8],
) -> Answer<u32> {
    room::<AllocUarOut>(output)?;
    state.check_room(device)?;
    let number = state.add_doorbell(device)?;
    reply_number(output, AllocUarOut::UAR, number);
    Ok(number)
}

/// Where `bytes` bytes at `offset` of a memory for rings lie.
fn ring_place(
    state: &HcaState,
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

fn check_uar(state: &HcaState, device: u32, number: u64) -> Answer<u32> {
    let found = state.uars.get(number as usize).and_then(Option::as_ref).filter(|uar| uar.device == device);
    found.map(|_| number as u32).ok_or(Reason::Uar.refuse(Status::BadResource))
}

pub(super) fn create_completions(
    state: &mut HcaState,
    device: u32,
    command: View<'_, CreateCqIn>,
    output: &mut [u8],
) -> Answer<u32> {
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
        record: if ignored { 0 } else { record },
        produced: 0,
    };
    let uses = Uses { umems: vec![ring_umem, record_umem], uar, completions: Vec::new(), domain: None };
    let number = state.add_completions(queue, uses.clone()).map_err(|Full| Reason::Full.refuse(Status::NoResources))?;
    state.count(&uses, true);
    reply_number(output, CreateCqOut::CQN, number);
    Ok(number)
}

pub(super) fn destroy_completions(state: &mut HcaState, number: u32) -> Answer<()> {
    let (uses, users) = state.completion_uses[number as usize].clone();
    if users > 0 {
        return Err(Reason::InUse.refuse(Status::ResourceBusy));
    }
    state.completions[number as usize].live = false;
    state.count(&uses, false);
    Ok(())
}

pub(super) fn create_queue(
    state: &mut HcaState,
    device: u32,
    command: View<'_, CreateQpIn>,
    output: &mut [u8],
) -> Answer<u32> {
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
    if sends && state.queue_uses.iter().zip(state.queues.iter()).any(|(uses, queue)| queue.live && uses.uar == uar) {
        return Err(Reason::UarShared.refuse(Status::ResourceBusy));
    }
    let mut queue =
        QueuePair { live: true, device, domain, completions, master, state: QpState::Reset, ..QueuePair::default() };
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
    let number = state.add_queue(queue, uses.clone()).map_err(|Full| Reason::Full.refuse(Status::NoResources))?;
    state.count(&uses, true);
    reply_number(output, CreateQpOut::QPN, number);
    Ok(number)
}

pub(super) fn destroy_queue(state: &mut HcaState, number: u32) -> Answer<()> {
    let uses = std::mem::take(&mut state.queue_uses[number as usize]);
    state.queues[number as usize].live = false;
    state.count(&uses, false);
    Ok(())
}
