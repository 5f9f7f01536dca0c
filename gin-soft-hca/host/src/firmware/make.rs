// SPDX-License-Identifier: MIT OR Apache-2.0
//! Commands that create objects, and commands that destroy queues.

use super::{Answer, Reason, check_reserved, reply_number, room};
use crate::objects::{EVENT_QUEUE, HcaState, Owned, PAGE, RingMemory, Uses, add};
use gin_abi::mlx5::bits::{Layout, View};
use gin_abi::mlx5::command::{QpState, RQ_TYPE_NONE};
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
    let command = View::<CreateUmemIn>::new(input).ok_or(Reason::InputLength)?;
    check_reserved::<CreateUmemIn>(input)?;
    let umem = command.part(CreateUmemIn::UMEM);
    let (list, count) = (&input[CreateUmemIn::LENGTH..], umem.get(Umem::NUM_OF_MTT));
    let listed = count.checked_mul(Mtt::LENGTH as u64) == Some(list.len() as u64);
    Reason::InputLength.refuse_if(count == 0 || !listed)?;
    let page = PAGE << umem.get(Umem::LOG_PAGE_SIZE);
    let offset = umem.get(Umem::PAGE_OFFSET);
    Reason::PageOffset.refuse_if(offset >= page)?;
    let mut pages = list.chunks_exact(Mtt::LENGTH).filter_map(View::<Mtt>::new).map(|entry| {
        let address = entry.get(Mtt::PTAG_63_32) << 32 | entry.get(Mtt::PTAG_31_8) << 8;
        (address, entry.get(Mtt::RD_EN) == 1, entry.get(Mtt::WR_EN) == 1)
    });
    let (first, readable, written) = pages.next().ok_or(Reason::InputLength)?;
    Reason::Access.refuse_if(!readable)?;
    // The engine needs memory in one range.
    let follows = |(number, found): (usize, (u64, bool, bool))| {
        found == (first.wrapping_add((number as u64 + 1) * page), readable, written)
    };
    Reason::Pages.refuse_if(!pages.enumerate().all(follows))?;
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

/// Returns the address of `bytes` bytes at `offset` in registered ring memory, and the number of that memory.
fn ring_place(
    state: &HcaState,
    device: u32,
    (valid, number): (u64, u64),
    offset: u64,
    bytes: u64,
    align: u64,
) -> Answer<(u64, u32)> {
    Reason::UmemMissing.refuse_if(valid == 0)?;
    let found = state.umems.get(number as usize).and_then(Option::as_ref).filter(|umem| umem.device == device);
    let umem = &found.ok_or(Reason::UmemUnknown)?.what;
    Reason::UmemReadOnly.refuse_if(!umem.written)?;
    Reason::UmemRange.refuse_if(offset > umem.bytes || bytes > umem.bytes - offset)?;
    let place = umem.address + offset;
    if place.is_multiple_of(align) { Ok((place, number as u32)) } else { Err(Reason::Alignment) }
}

fn check_uar(state: &HcaState, device: u32, number: u64) -> Answer<u32> {
    let found = state.uars.get(number as usize).and_then(Option::as_ref).filter(|uar| uar.device == device);
    found.map(|_| number as u32).ok_or(Reason::Uar)
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
    Reason::EntrySize.refuse_if(context.get(Cqc::CQE_SZ) != 0 || context.get(Cqc::LOG_PAGE_SIZE) != 0)?;
    Reason::QueueSize.refuse_if(log_size > state.config(device).log_max_completions)?;
    Reason::EventQueue.refuse_if(context.get(Cqc::C_EQN) != u64::from(EVENT_QUEUE))?;
    let ignored = context.get(Cqc::OI) == 1;
    Reason::Overrun.refuse_if(ignored && !state.config(device).ignore_overrun)?;
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
    let number = state.add_completions(queue, uses.clone())?;
    state.count(&uses, true);
    reply_number(output, CreateCqOut::CQN, number);
    Ok(number)
}

pub(super) fn destroy_completions(state: &mut HcaState, number: u32) -> Answer<()> {
    let (uses, users) = state.completion_uses[number as usize].clone();
    Reason::InUse.refuse_if(users > 0)?;
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
    Reason::Service.refuse_if(!state.config(device).reliable || context.get(Qpc::ST) != 0)?;
    let receives = context.get(Qpc::LOG_RQ_SIZE) != 0 || context.get(Qpc::LOG_RQ_STRIDE) != 0;
    Reason::ReceiveQueue.refuse_if(receives || context.get(Qpc::RQ_TYPE) != RQ_TYPE_NONE)?;
    Reason::DoorbellMode.refuse_if(context.get(Qpc::SEND_DBR_MODE) != 0)?;
    Reason::EntrySize.refuse_if(context.get(Qpc::LOG_PAGE_SIZE) != 0)?;
    let domain = context.get(Qpc::PD) as u32;
    let known = state.domains.get(domain as usize).and_then(Option::as_ref);
    Reason::Domain.refuse_if(known.is_none_or(|known| known.device != device))?;
    let master = context.get(Qpc::CD_MASTER) == 1;
    let slave = context.get(Qpc::CD_SLAVE_SEND) == 1 || context.get(Qpc::CD_SLAVE_RECEIVE) == 1;
    Reason::CoreDirect.refuse_if(slave || (master && !state.config(device).core_direct))?;
    let completions = context.get(Qpc::CQN_SND) as u32;
    let known = state.completions.get(completions as usize);
    Reason::CompletionQueue.refuse_if(known.is_none_or(|known| !known.live || known.device != device))?;
    let uar = check_uar(state, device, context.get(Qpc::UAR_PAGE))?;
    let sends = context.get(Qpc::NO_SQ) == 0;
    let taken = state.queue_uses.iter().zip(state.queues.iter()).any(|(uses, queue)| queue.live && uses.uar == uar);
    Reason::UarShared.refuse_if(sends && taken)?;
    let mut queue =
        QueuePair { live: true, device, domain, completions, master, state: QpState::Reset, ..QueuePair::default() };
    // A responder has neither ring nor record, and rings no doorbell.
    let mut uses = Uses { umems: Vec::new(), uar: 0, completions: vec![completions], domain: Some(domain) };
    if sends {
        queue.log_size = context.get(Qpc::LOG_SQ_SIZE) as u32;
        Reason::QueueSize.refuse_if(queue.log_size > state.config(device).log_max_queue)?;
        let ring_memory = (command.get(CreateQpIn::WQ_UMEM_VALID), command.get(CreateQpIn::WQ_UMEM_ID));
        let offset = command.get(CreateQpIn::WQ_UMEM_OFFSET);
        let (ring, ring_umem) =
            ring_place(state, device, ring_memory, offset, SLOT_BYTES << queue.log_size, SLOT_BYTES)?;
        let record_memory = (context.get(Qpc::DBR_UMEM_VALID), context.get(Qpc::DBR_UMEM_ID));
        let (record, record_umem) = ring_place(state, device, record_memory, context.get(Qpc::DBR_ADDR), 8, 8)?;
        (queue.ring, queue.record) = (ring, record + SEND_OFFSET);
        (uses.umems, uses.uar) = (vec![ring_umem, record_umem], uar);
    }
    let number = state.add_queue(queue, uses.clone())?;
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
