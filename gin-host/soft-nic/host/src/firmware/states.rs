// SPDX-License-Identifier: MIT OR Apache-2.0
//! Changes of the state of a queue pair.

use super::port_of;
use crate::objects::HcaState;
use crate::reason::{Answer, Reason};
use crate::{SoftConfig, SoftPort};
use gin_abi::mlx5::bits::View;
use gin_abi::mlx5::command::{AtomicMode, Mtu, PM_MIGRATED, QpState, opcode, opt_param, roce_version};
use gin_abi::mlx5::mailbox::{Ads, ModifyQpIn, Qpc, StopQpIn};
use gin_nic::hca::Link;
use gin_soft_nic::tables::{QueuePair, Rights};

/// The bits of the fields with a peer's permissions.
const RIGHTS: u64 = opt_param::RRE | opt_param::RWE | opt_param::RAE;

/// Checks and makes a change from one of these states. The last argument but one has the bits of the valid fields.
type Change = fn(&HcaState, View<'_, Qpc>, u64, &mut QueuePair) -> Answer<()>;

/// Changes the state of a queue pair towards ready to send.
pub(super) fn change(state: &mut HcaState, number: usize, command: View<'_, ModifyQpIn>) -> Answer<()> {
    let (from, required, optional, change): (_, _, _, Change) = match command.get(ModifyQpIn::OPCODE) {
        opcode::RST2INIT_QP => (QpState::Reset, RIGHTS | opt_param::PKEY_INDEX, 0, to_init),
        opcode::INIT2RTR_QP => (QpState::Init, 0, RIGHTS | opt_param::PKEY_INDEX, to_ready_to_receive),
        _ => (QpState::ReadyToReceive, 0, RIGHTS | opt_param::RNR_TIMEOUT, to_ready_to_send),
    };
    let mut queue = state.queues[number];
    Reason::State.refuse_if(queue.state != from)?;
    let mask = command.get(ModifyQpIn::OPT_PARAM_MASK);
    Reason::Optional.refuse_if(mask & !optional != 0)?;
    let (context, valid) = (command.part(ModifyQpIn::QPC), required | mask);
    change(state, context, valid, &mut queue)?;
    set_rights(state.config(queue.device), context, valid, &mut queue.rights)?;
    state.queues[number] = queue;
    Ok(())
}

/// Sets the permissions of a peer from the valid fields.
fn set_rights(config: &SoftConfig, context: View<'_, Qpc>, valid: u64, rights: &mut Rights) -> Answer<()> {
    if valid & opt_param::RRE != 0 {
        rights.remote_read = context.get(Qpc::RRE) == 1;
    }
    if valid & opt_param::RWE != 0 {
        rights.remote_write = context.get(Qpc::RWE) == 1;
    }
    if valid & opt_param::RAE != 0 {
        rights.remote_atomic = context.get(Qpc::RAE) == 1;
        let mode = AtomicMode::from_code(context.get(Qpc::ATOMIC_MODE));
        Reason::Atomics.refuse_if(rights.remote_atomic && (mode.is_none() || !config.atomics))?;
    }
    Ok(())
}

fn check_partition(path: View<'_, Ads>, valid: u64) -> Answer<()> {
    Reason::PartitionKey.refuse_if(valid & opt_param::PKEY_INDEX != 0 && path.get(Ads::PKEY_INDEX) != 0)
}

fn to_init(state: &HcaState, context: View<'_, Qpc>, valid: u64, queue: &mut QueuePair) -> Answer<()> {
    let path = context.part(Qpc::PRIMARY_ADDRESS_PATH);
    port_of(state.config(queue.device), path.get(Ads::VHCA_PORT_NUM))?;
    Reason::Path.refuse_if(context.get(Qpc::PM_STATE) != PM_MIGRATED)?;
    check_partition(path, valid)?;
    queue.state = QpState::Init;
    Ok(())
}

fn to_ready_to_receive(state: &HcaState, context: View<'_, Qpc>, valid: u64, queue: &mut QueuePair) -> Answer<()> {
    let config = state.config(queue.device);
    let mtu = Mtu::from_code(context.get(Qpc::MTU)).ok_or(Reason::Mtu)?;
    let log_message = context.get(Qpc::LOG_MSG_MAX);
    Reason::Message.refuse_if(log_message > 30)?;
    Reason::Reads.refuse_if(context.get(Qpc::LOG_RRA_MAX) > config.log_max_reads.into())?;
    let path = context.part(Qpc::PRIMARY_ADDRESS_PATH);
    check_partition(path, valid)?;
    let (port, peer_device) = resolve(state, config, path)?;
    // Packets that are longer than the port's MTU never arrive.
    queue.mtu = if mtu <= port.mtu { mtu.bytes() } else { 0 };
    queue.log_message = log_message as u32;
    queue.peer = context.get(Qpc::REMOTE_QPN) as u32;
    queue.initial_receive_psn = context.get(Qpc::NEXT_RCV_PSN) as u32;
    queue.peer_device = peer_device.unwrap_or(u32::MAX);
    queue.state = QpState::ReadyToReceive;
    Ok(())
}

/// Returns the own port of a path, and the NIC at its other end, if there is one.
fn resolve<'s>(state: &HcaState, config: &'s SoftConfig, path: View<'_, Ads>) -> Answer<(&'s SoftPort, Option<u32>)> {
    let port = port_of(config, path.get(Ads::VHCA_PORT_NUM))?;
    let (gid, lid, global) = (path.get_bytes(Ads::RGID_RIP), path.get(Ads::RLID), path.get(Ads::GRH) == 1);
    let mac = path.get(Ads::RMAC_47_32) << 32 | path.get(Ads::RMAC_31_0);
    let no_hops = path.get(Ads::HOP_LIMIT) == 0;
    match config.link {
        Link::InfiniBand => {
            Reason::Lid.refuse_if(lid == 0)?;
            Reason::Hops.refuse_if(global && no_hops)?;
        }
        Link::Ethernet => {
            Reason::Header.refuse_if(global || lid != 0)?;
            let own = port.gids.get(path.get(Ads::SRC_ADDR_INDEX) as usize);
            let own = own.filter(|entry| entry.gid != [0; 16]).ok_or(Reason::GidIndex)?;
            let (first, last) = config.udp_ports;
            let in_range = (first..=last).contains(&(path.get(Ads::UDP_SPORT) as u16));
            Reason::UdpPort.refuse_if(own.version == roce_version::V2 && !in_range)?;
            Reason::Hops.refuse_if(no_hops)?;
        }
    }
    let there = |other: &SoftPort| match config.link {
        Link::InfiniBand => u64::from(other.lid) == lid && (!global || other.has(gid)),
        Link::Ethernet => other.mac_number() == mac && other.has(gid),
    };
    let reached =
        |other: &SoftConfig| other.link == config.link && other.ports.iter().any(|port| port.active && there(port));
    let found = state.devices.iter().position(reached);
    Ok((port, found.map(|number| number as u32).filter(|_| port.active)))
}

fn to_ready_to_send(state: &HcaState, context: View<'_, Qpc>, _valid: u64, queue: &mut QueuePair) -> Answer<()> {
    let reads = context.get(Qpc::LOG_SRA_MAX);
    Reason::Reads.refuse_if(reads > state.config(queue.device).log_max_reads.into())?;
    queue.reads = 1 << reads;
    queue.initial_send_psn = context.get(Qpc::NEXT_SEND_PSN) as u32;
    queue.ack_timeout = context.part(Qpc::PRIMARY_ADDRESS_PATH).get(Ads::ACK_TIMEOUT) as u32;
    queue.state = QpState::ReadyToSend;
    Ok(())
}

pub(super) fn stop(queue: &mut QueuePair, command: View<'_, StopQpIn>) -> Answer<()> {
    if command.get(StopQpIn::OPCODE) == opcode::TO_RST_QP {
        queue.reset();
    } else {
        Reason::State.refuse_if(queue.state == QpState::Reset)?;
        queue.state = QpState::Error;
    }
    Ok(())
}
