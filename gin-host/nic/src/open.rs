// SPDX-License-Identifier: MIT OR Apache-2.0
//! Opens a NIC: queries its capabilities, and checks that they suffice.

use super::error::{NicError, NicPeer, Step};
use super::hca::{Domain, Hca, HcaError, Link, Port};
use super::owned::{Owned, Owner};
use gin_abi::mlx5::bits::{Field, Mailbox};
use gin_abi::mlx5::command::{Mtu, PORT_TYPE_ETHERNET, capability, opcode, roce_version};
use gin_abi::mlx5::mailbox::{
    AtomicCap, HcaCap, QueryHcaCapIn, QueryHcaCapOut, QueryRoceAddressIn, QueryRoceAddressOut, RoceAddress, RoceCap,
};
use std::ops::RangeInclusive;
use std::sync::Arc;

gin_gpu::config! {
    /// The configuration of connections.
    ///
    /// ```
    /// let config = gin_nic::NicConfig::default().port(2).retries(7);
    /// assert_eq!((config.port, config.retries), (2, 7));
    /// ```
    #[derive(Clone, PartialEq, Eq, Debug)]
    pub struct NicConfig {
        /// The port, counted from 1.
        pub port: u8 = 1,
        /// The index of the GID on Ethernet. By default the first GID of RoCE v2 that stands for an IPv4 address, else
        /// the first of RoCE v2.
        pub gid_index: Option<u32> = None,
        /// The index in the table of partition keys.
        pub partition_key: u16 = 0,
        /// The traffic class.
        pub traffic_class: u8 = 0,
        /// The service level, 0 to 15.
        pub service_level: u8 = 0,
        /// The exponent n of the time that the NIC waits for an answer, 4.096 us * 2^n; 1 to 31.
        // About 4 s, with the retries half a minute: as NCCL does.
        pub ack_timeout: u8 = 20,
        /// The number of times that the NIC repeats a request without an answer, 0 to 7.
        pub retries: u8 = 7,
        /// The largest MTU to use. By default the port's MTU.
        pub mtu: Option<Mtu> = None,
        /// Uses a global route header also between ports of one InfiniBand subnet.
        pub global_header: bool = false,
    }
}

/// The features of a NIC that matter here.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct NicCapabilities {
    /// The maximum number of slots of a send queue.
    pub max_depth: u64,
    /// The maximum number of slots of a completion queue.
    pub max_completions: u64,
    /// log2 of the maximum number of outstanding reads and atomics of a queue pair.
    pub log_reads: u32,
    /// log2 of the maximum number of reads and atomics that a queue pair answers at a time.
    pub log_answers: u32,
    /// log2 of the longest message in bytes.
    pub log_message: u32,
    /// Entries may wait for completion queues.
    pub core_direct: bool,
    /// The UDP source ports that it supports, on Ethernet.
    pub udp_ports: RangeInclusive<u16>,
}

/// The GID of the own port.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct OwnGid {
    /// The index in the port's table.
    pub index: u32,
    /// The GID.
    pub gid: [u8; 16],
}

/// A NIC that can serve GPUs, with a protection domain.
#[derive(Debug)]
pub struct Nic {
    /// The name.
    pub name: String,
    /// The configuration of connections.
    pub config: NicConfig,
    /// The capabilities.
    pub capabilities: NicCapabilities,
    /// The state of the port at the time when the NIC was opened.
    pub port: Port,
    /// The GID of the port. An InfiniBand port has one too, used or not.
    pub gid: OwnGid,
    pub(super) owner: Owner,
    pub(super) event_queue: u32,
    pub(super) domain: Domain,
    _domain: Owned,
}

/// Adds the step to an error.
pub(super) fn failed(nic: &str, step: Step, peer: Option<&NicPeer>) -> impl FnOnce(HcaError) -> NicError {
    let (nic, peer) = (nic.to_owned(), peer.cloned());
    move |source| NicError::Step { nic, step, peer, source }
}

impl Nic {
    /// Returns the number of objects that the NIC did not destroy.
    #[doc(hidden)]
    pub fn failures(&self) -> usize {
        self.owner.failures()
    }

    /// Opens a NIC.
    ///
    /// # Errors
    /// An error with the name of the NIC: an error of the NIC, or the missing capability.
    pub fn open(hca: Arc<dyn Hca>, config: NicConfig) -> Result<Arc<Self>, NicError> {
        let name = hca.name();
        let port = hca.port(config.port).map_err(failed(&name, Step::Port, None))?;
        if !port.active {
            return Err(NicError::PortDown { nic: name, port: config.port });
        }
        let capabilities = capabilities(&*hca, &name, port.link)?;
        let gid = own_gid(&*hca, &name, &config, &port)?;
        let event_queue = hca.event_queue().map_err(failed(&name, Step::EventQueue, None))?;
        let owner = Owner::new(hca);
        let domain = owner.hca.allocate_domain().map_err(failed(&name, Step::Domain, None))?;
        let owned = owner.own(domain.handle, Hca::free_domain);
        Ok(Arc::new(Self { owner, config, capabilities, port, gid, event_queue, domain, name, _domain: owned }))
    }

    /// Returns the largest MTU that this end accepts.
    pub fn mtu(&self) -> Mtu {
        self.config.mtu.map_or(self.port.mtu, |limit| limit.min(self.port.mtu))
    }

    /// Returns the NIC's errors for objects that it did not destroy, and clears the list.
    pub fn take_failures(&self) -> Vec<HcaError> {
        self.owner.take_failures()
    }
}

/// Returns a table of the NIC's capabilities.
pub(super) fn table(hca: &dyn Hca, which: u64) -> Result<Mailbox<QueryHcaCapOut>, HcaError> {
    let mut command = Mailbox::<QueryHcaCapIn>::new();
    command.set(QueryHcaCapIn::OPCODE, opcode::QUERY_HCA_CAP).set(QueryHcaCapIn::OP_MOD, which);
    let mut answer = Mailbox::<QueryHcaCapOut>::new();
    hca.command(command.bytes()?, answer.bytes_mut())?;
    Ok(answer)
}

fn capabilities(hca: &dyn Hca, name: &str, link: Link) -> Result<NicCapabilities, NicError> {
    let ask = |which| table(hca, which).map_err(failed(name, Step::Capabilities, None));
    let need = |has: bool, what| {
        if has { Ok(()) } else { Err(NicError::NotCapable { nic: name.to_owned(), what }) }
    };
    let answer = ask(capability::GENERAL)?;
    let general = |field: Field<HcaCap>| answer.get(QueryHcaCapOut::GENERAL.field(field));
    need(general(HcaCap::RC) != 0, "reliable connections")?;
    need(general(HcaCap::CQ_OI) != 0, "completion queues that ignore overruns")?;
    need(general(HcaCap::ATOMIC) != 0, "atomics")?;
    let atomics = ask(capability::ATOMIC)?;
    let atomic = |field: Field<AtomicCap>| atomics.get(QueryHcaCapOut::ATOMIC.field(field));
    let adds_words = atomic(AtomicCap::OPERATIONS) >> 1 & 1 != 0 && atomic(AtomicCap::SIZE_QP) >> 3 & 1 != 0;
    need(adds_words, "fetch-and-add of 8 bytes")?;
    need(atomic(AtomicCap::ENDIANNESS_MODE) == 1, "atomics in the byte order of the host")?;
    let ethernet = general(HcaCap::PORT_TYPE) == PORT_TYPE_ETHERNET;
    need(ethernet == (link == Link::Ethernet), "port of the kind that its capabilities name")?;
    let udp_ports = if ethernet {
        let roce = ask(capability::ROCE)?;
        let get = |field: Field<RoceCap>| roce.get(QueryHcaCapOut::ROCE.field(field));
        need(get(RoceCap::ROCE_VERSION) >> roce_version::V2 & 1 != 0, "RoCE v2")?;
        let (least, max) = (get(RoceCap::R_ROCE_MIN_SRC_UDP_PORT), get(RoceCap::R_ROCE_MAX_SRC_UDP_PORT));
        let ports = least as u16..=max as u16;
        need(!ports.is_empty(), "UDP source ports")?;
        ports
    } else {
        0..=0
    };
    Ok(NicCapabilities {
        max_depth: 1 << general(HcaCap::LOG_MAX_QP_SZ).min(31),
        max_completions: 1 << general(HcaCap::LOG_MAX_CQ_SZ).min(31),
        log_reads: general(HcaCap::LOG_MAX_RA_REQ_QP) as u32,
        log_answers: general(HcaCap::LOG_MAX_RA_RES_QP) as u32,
        log_message: general(HcaCap::LOG_MAX_MSG) as u32,
        core_direct: general(HcaCap::CD) == 1,
        udp_ports,
    })
}

fn own_gid(hca: &dyn Hca, name: &str, config: &NicConfig, port: &Port) -> Result<OwnGid, NicError> {
    let none = |reason: String| NicError::NoGid { nic: name.to_owned(), port: config.port, reason };
    let exists = |index: u32| {
        if index < port.gids { Ok(index) } else { Err(none(format!("there is no GID {index}, only {}", port.gids))) }
    };
    if port.link == Link::InfiniBand {
        if port.lid == 0 {
            return Err(none("it has no local identifier: is there a subnet manager?".to_owned()));
        }
        let index = exists(config.gid_index.unwrap_or(0))?;
        let gid = hca.gid(config.port, index).map_err(failed(name, Step::Gids, None))?;
        return Ok(OwnGid { index, gid });
    }
    let ask = |index| roce_address(hca, config.port, index).map_err(failed(name, Step::Gids, None));
    if let Some(index) = config.gid_index {
        let (gid, version) = ask(exists(index)?)?;
        return match (gid.gid == [0; 16], version == roce_version::V2) {
            (true, _) => Err(none(format!("GID {index} is not set"))),
            (false, false) => Err(none(format!("GID {index} is not of RoCE v2"))),
            (false, true) => Ok(gid),
        };
    }
    let mut other = None;
    for index in 0..port.gids {
        let (gid, version) = ask(index)?;
        if gid.gid == [0; 16] || version != roce_version::V2 {
            continue;
        }
        if gid.gid[..12] == [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff] {
            return Ok(gid);
        }
        other = other.or(Some(gid));
    }
    other.ok_or_else(|| none("it has no GID of RoCE v2: has it an address?".to_owned()))
}

/// Returns an entry of the table of GIDs, with its version of RoCE.
fn roce_address(hca: &dyn Hca, port: u8, index: u32) -> Result<(OwnGid, u64), HcaError> {
    let mut command = Mailbox::<QueryRoceAddressIn>::new();
    command
        .set(QueryRoceAddressIn::OPCODE, opcode::QUERY_ROCE_ADDRESS)
        .set(QueryRoceAddressIn::ROCE_ADDRESS_INDEX, index.into())
        .set(QueryRoceAddressIn::VHCA_PORT_NUM, port.into());
    let mut answer = Mailbox::<QueryRoceAddressOut>::new();
    hca.command(command.bytes()?, answer.bytes_mut())?;
    let entry = answer.view().part(QueryRoceAddressOut::ROCE_ADDRESS);
    let gid = OwnGid { index, gid: entry.get_bytes(RoceAddress::SOURCE_L3_ADDRESS) };
    Ok((gid, entry.get(RoceAddress::ROCE_VERSION)))
}
