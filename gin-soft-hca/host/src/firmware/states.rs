// SPDX-License-Identifier: MIT OR Apache-2.0
//! Changes of the state of a queue pair.

use super::{Answer, Reason, port_of};
use crate::objects::HcaState;
use crate::{SoftConfig, SoftPort};
use gin_abi::mlx5::bits::View;
use gin_abi::mlx5::command::{AtomicMode, Mtu, PM_MIGRATED, QpState, opcode, opt_param, roce_version};
use gin_abi::mlx5::mailbox::{Ads, ModifyQpIn, Qpc, StopQpIn};
use gin_nic::hca::Link;
use gin_soft_hca::tables::{QueuePair, Rights};

/// Returns the queue pair if it is in this state.
fn in_state(state: &mut HcaState, number: u32, expected: QpState) -> Answer<&mut QueuePair> {
    let queue = &mut state.queues[number as usize];
    if queue.state == expected { Ok(queue) } else { Err(Reason::State) }
}

/// Returns the permissions of a peer, from the fields whose bits are in the mask.
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
        Reason::Atomics.refuse_if(rights.remote_atomic && (mode.is_none() || !config.atomics))?;
    }
    Ok(rights)
}

fn check_optional(mask: u64, allowed: u64) -> Answer<()> {
    Reason::Optional.refuse_if(mask & !allowed != 0)
}

pub(super) fn to_init(state: &mut HcaState, number: u32, command: View<'_, ModifyQpIn>) -> Answer<()> {
    in_state(state, number, QpState::Reset)?;
    let context = command.part(ModifyQpIn::QPC);
    let device = state.queues[number as usize].device;
    let config = state.config(device);
    check_optional(command.get(ModifyQpIn::OPT_PARAM_MASK), 0)?;
    let path = context.part(Qpc::PRIMARY_ADDRESS_PATH);
    port_of(config, path.get(Ads::VHCA_PORT_NUM))?;
    Reason::Path.refuse_if(context.get(Qpc::PM_STATE) != PM_MIGRATED)?;
    Reason::PartitionKey.refuse_if(path.get(Ads::PKEY_INDEX) != 0)?;
    let all = opt_param::RRE | opt_param::RWE | opt_param::RAE;
    let rights = rights(config, context, Rights::default(), all)?;
    let queue = in_state(state, number, QpState::Reset)?;
    (queue.rights, queue.state) = (rights, QpState::Init);
    Ok(())
}

pub(super) fn to_ready_to_receive(state: &mut HcaState, number: u32, command: View<'_, ModifyQpIn>) -> Answer<()> {
    let queue = *in_state(state, number, QpState::Init)?;
    let context = command.part(ModifyQpIn::QPC);
    let config = state.config(queue.device);
    let mask = command.get(ModifyQpIn::OPT_PARAM_MASK);
    let rights_bits = opt_param::RRE | opt_param::RWE | opt_param::RAE;
    check_optional(mask, rights_bits | opt_param::PKEY_INDEX)?;
    let mtu = Mtu::from_code(context.get(Qpc::MTU)).ok_or(Reason::Mtu)?;
    let log_message = context.get(Qpc::LOG_MSG_MAX);
    Reason::Message.refuse_if(log_message > 30)?;
    Reason::Reads.refuse_if(context.get(Qpc::LOG_RRA_MAX) > config.log_max_reads.into())?;
    let path = context.part(Qpc::PRIMARY_ADDRESS_PATH);
    Reason::PartitionKey.refuse_if(mask & opt_param::PKEY_INDEX != 0 && path.get(Ads::PKEY_INDEX) != 0)?;
    let (port, peer_device) = resolve(state, config, path)?;
    let rights = rights(config, context, queue.rights, mask)?;
    // Packets that are longer than the port's MTU never arrive.
    let fits = mtu <= port.mtu;
    let changed = &mut state.queues[number as usize];
    changed.rights = rights;
    changed.mtu = if fits { mtu.bytes() } else { 0 };
    changed.log_message = log_message as u32;
    changed.peer = context.get(Qpc::REMOTE_QPN) as u32;
    changed.initial_receive_psn = context.get(Qpc::NEXT_RCV_PSN) as u32;
    changed.peer_device = peer_device.unwrap_or(u32::MAX);
    changed.state = QpState::ReadyToReceive;
    Ok(())
}

/// Returns the own port of a path, and the NIC at its other end, if there is one.
fn resolve<'s>(state: &HcaState, config: &'s SoftConfig, path: View<'_, Ads>) -> Answer<(&'s SoftPort, Option<u32>)> {
    let port = port_of(config, path.get(Ads::VHCA_PORT_NUM))?;
    let gid = path.get_bytes(Ads::RGID_RIP);
    let has = |port: &SoftPort, gid: [u8; 16]| port.gids.iter().any(|entry| entry.gid == gid);
    let numbered = || state.devices.iter().enumerate();
    let mac = path.get(Ads::RMAC_47_32) << 32 | path.get(Ads::RMAC_31_0);
    let found = match config.link {
        Link::InfiniBand => {
            let lid = path.get(Ads::RLID) as u16;
            Reason::Lid.refuse_if(lid == 0)?;
            let global = path.get(Ads::GRH) == 1;
            Reason::Hops.refuse_if(global && path.get(Ads::HOP_LIMIT) == 0)?;
            numbered().find(|(_, device)| {
                let there = |port: &SoftPort| port.active && port.lid == lid && (!global || has(port, gid));
                device.link == Link::InfiniBand && device.ports.iter().any(there)
            })
        }
        Link::Ethernet => {
            Reason::Header.refuse_if(path.get(Ads::GRH) == 1 || path.get(Ads::RLID) != 0)?;
            let own = port.gids.get(path.get(Ads::SRC_ADDR_INDEX) as usize);
            let own = own.filter(|entry| entry.gid != [0; 16]).ok_or(Reason::GidIndex)?;
            if own.version == roce_version::V2 {
                let udp = path.get(Ads::UDP_SPORT) as u16;
                Reason::UdpPort.refuse_if(!(config.udp_ports.0..=config.udp_ports.1).contains(&udp))?;
            }
            Reason::Hops.refuse_if(path.get(Ads::HOP_LIMIT) == 0)?;
            numbered().find(|(_, device)| {
                let address = |port: &SoftPort| port.mac.iter().fold(0, |all, &byte| all << 8 | u64::from(byte));
                let there = |port: &SoftPort| port.active && has(port, gid) && address(port) == mac;
                device.link == Link::Ethernet && device.ports.iter().any(there)
            })
        }
    };
    Ok((port, found.map(|(number, _)| number as u32).filter(|_| port.active)))
}

pub(super) fn to_ready_to_send(state: &mut HcaState, number: u32, command: View<'_, ModifyQpIn>) -> Answer<()> {
    let queue = *in_state(state, number, QpState::ReadyToReceive)?;
    let context = command.part(ModifyQpIn::QPC);
    let config = state.config(queue.device);
    let mask = command.get(ModifyQpIn::OPT_PARAM_MASK);
    let rights_bits = opt_param::RRE | opt_param::RWE | opt_param::RAE;
    check_optional(mask, rights_bits | opt_param::RNR_TIMEOUT)?;
    let reads = context.get(Qpc::LOG_SRA_MAX);
    Reason::Reads.refuse_if(reads > config.log_max_reads.into())?;
    let rights = rights(config, context, queue.rights, mask)?;
    let changed = &mut state.queues[number as usize];
    changed.rights = rights;
    changed.reads = 1 << reads;
    changed.initial_send_psn = context.get(Qpc::NEXT_SEND_PSN) as u32;
    changed.ack_timeout = context.part(Qpc::PRIMARY_ADDRESS_PATH).get(Ads::ACK_TIMEOUT) as u32;
    changed.state = QpState::ReadyToSend;
    Ok(())
}

pub(super) fn stop(state: &mut HcaState, number: u32, command: View<'_, StopQpIn>) -> Answer<()> {
    let queue = &mut state.queues[number as usize];
    if command.get(StopQpIn::OPCODE) == opcode::TO_RST_QP {
        queue.reset();
    } else if queue.state == QpState::Reset {
        return Err(Reason::State);
    } else {
        queue.state = QpState::Error;
    }
    Ok(())
}
