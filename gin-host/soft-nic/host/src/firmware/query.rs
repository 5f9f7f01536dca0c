// SPDX-License-Identifier: MIT OR Apache-2.0
//! Commands that query.

use super::port_of;
use crate::SoftConfig;
use crate::objects::PAGE;
use crate::reason::{Answer, Reason};
use gin_abi::mlx5::bits::{Mailbox, View};
use gin_abi::mlx5::command::{PORT_TYPE_ETHERNET, capability, roce_version};
use gin_abi::mlx5::mailbox::{
    AtomicCap, Cqc, HcaCap, Qpc, QueryCqOut, QueryHcaCapIn, QueryHcaCapOut, QueryQpOut, QueryRoceAddressIn,
    QueryRoceAddressOut, RoceAddress, RoceCap,
};
use gin_abi::mlx5::wqe::SLOT_BYTES;
use gin_nic::hca::Link;
use gin_soft_nic::tables::{CompletionQueue, QueuePair};

pub(super) fn capabilities(
    config: &SoftConfig,
    command: View<'_, QueryHcaCapIn>,
    answer: &mut Mailbox<QueryHcaCapOut>,
) -> Answer<()> {
    let ethernet = config.link == Link::Ethernet;
    match command.get(QueryHcaCapIn::OP_MOD) {
        capability::GENERAL => {
            let table = QueryHcaCapOut::GENERAL;
            answer
                .set(table.field(HcaCap::HCA_CAP_2), 1)
                .set(table.field(HcaCap::LOG_MAX_QP_SZ), config.log_max_queue.into())
                .set(table.field(HcaCap::LOG_MAX_QP), 18)
                .set(table.field(HcaCap::LOG_MAX_CQ_SZ), config.log_max_completions.into())
                .set(table.field(HcaCap::LOG_MAX_CQ), 18)
                .set(table.field(HcaCap::RELAXED_ORDERING_WRITE), 1)
                .set(table.field(HcaCap::LOG_MAX_RA_REQ_QP), config.log_max_reads.into())
                .set(table.field(HcaCap::LOG_MAX_RA_RES_QP), config.log_max_reads.into())
                .set(table.field(HcaCap::PORT_TYPE), if ethernet { PORT_TYPE_ETHERNET } else { 0 })
                .set(table.field(HcaCap::NUM_PORTS), config.ports.len() as u64)
                .set(table.field(HcaCap::LOG_MAX_MSG), 30)
                .set(table.field(HcaCap::ROCE), ethernet.into())
                .set(table.field(HcaCap::ATOMIC), config.atomics.into())
                .set(table.field(HcaCap::CQ_OI), config.ignore_overrun.into())
                .set(table.field(HcaCap::CD), config.core_direct.into())
                .set(table.field(HcaCap::RC), config.reliable.into())
                .set(table.field(HcaCap::LOG_PG_SZ), PAGE.ilog2().into())
                .set(table.field(HcaCap::MAX_WQE_SZ_SQ), SLOT_BYTES)
                .set(table.field(HcaCap::LOG_MAX_UMEM), 16);
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
        _ => return Err(Reason::Variant),
    }
    Ok(())
}

pub(super) fn address(
    config: &SoftConfig,
    command: View<'_, QueryRoceAddressIn>,
    answer: &mut Mailbox<QueryRoceAddressOut>,
) -> Answer<()> {
    Reason::Operation.refuse_if(config.link != Link::Ethernet)?;
    let port = port_of(config, command.get(QueryRoceAddressIn::VHCA_PORT_NUM))?;
    let index = command.get(QueryRoceAddressIn::ROCE_ADDRESS_INDEX) as usize;
    let entry = port.gids.get(index).ok_or(Reason::GidIndex)?;
    let mapped = entry.gid[..12] == [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff];
    let table = QueryRoceAddressOut::ROCE_ADDRESS;
    answer
        .set_bytes(table.bytes(RoceAddress::SOURCE_L3_ADDRESS), entry.gid)
        .set(table.field(RoceAddress::SOURCE_MAC_47_32), port.mac_number() >> 32)
        .set(table.field(RoceAddress::SOURCE_MAC_31_0), port.mac_number() & 0xffff_ffff)
        .set(table.field(RoceAddress::ROCE_L3_TYPE), u64::from(!mapped))
        .set(table.field(RoceAddress::ROCE_VERSION), entry.version);
    Ok(())
}

pub(super) fn queue(queue: &QueuePair, answer: &mut Mailbox<QueryQpOut>) -> Answer<()> {
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
    Ok(())
}

pub(super) fn completions(queue: &CompletionQueue, answer: &mut Mailbox<QueryCqOut>) -> Answer<()> {
    let context = QueryCqOut::CQ_CONTEXT;
    answer
        .set(context.field(Cqc::LOG_CQ_SIZE), queue.log_size.into())
        .set(context.field(Cqc::PRODUCER_COUNTER), queue.produced & 0xff_ffff);
    Ok(())
}
