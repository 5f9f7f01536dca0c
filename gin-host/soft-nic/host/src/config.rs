// SPDX-License-Identifier: MIT OR Apache-2.0
//! The properties of a software NIC.

use gin_abi::mlx5::command::Mtu;
use gin_nic::hca::Link;

/// A GID of a software NIC.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SoftGid {
    /// The GID.
    pub gid: [u8; 16],
    /// The version, one of [`roce_version`](gin_abi::mlx5::command::roce_version).
    pub version: u64,
}

/// A port of a software NIC.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SoftPort {
    /// The port is up.
    pub active: bool,
    /// The maximum number of bytes of payload in a packet.
    pub mtu: Mtu,
    /// The local identifier, on InfiniBand.
    pub lid: u16,
    /// The hardware address, on Ethernet.
    pub mac: [u8; 6],
    /// The GIDs. A GID of zeros is an empty entry.
    pub gids: Vec<SoftGid>,
}

impl SoftPort {
    pub(crate) fn has(&self, gid: [u8; 16]) -> bool {
        self.gids.iter().any(|entry| entry.gid == gid)
    }

    /// Returns the hardware address as a number.
    pub(crate) fn mac_number(&self) -> u64 {
        self.mac.iter().fold(0, |all, &byte| all << 8 | u64::from(byte))
    }
}

/// The properties of a software NIC.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SoftConfig {
    /// The name.
    pub name: String,
    /// The kind of network of its ports.
    pub link: Link,
    /// The ports, at least one.
    pub ports: Vec<SoftPort>,
    /// log2 of the maximum number of slots of a send queue.
    pub log_max_queue: u32,
    /// log2 of the maximum number of slots of a completion queue.
    pub log_max_completions: u32,
    /// log2 of the maximum number of outstanding reads and atomics.
    pub log_max_reads: u32,
    /// The NIC has reliable connections.
    pub reliable: bool,
    /// The NIC has atomics.
    pub atomics: bool,
    /// Entries may wait for completion queues.
    pub core_direct: bool,
    /// Completion queues may ignore overruns.
    pub ignore_overrun: bool,
    /// The NIC registers DMA-BUF files.
    pub dma_buf: bool,
    /// The supported UDP source ports, both ends included.
    pub udp_ports: (u16, u16),
    /// The maximum number of objects, of all kinds together.
    pub objects: usize,
}

impl SoftConfig {
    fn new(number: u16, link: Link) -> Self {
        let [high, low] = number.to_be_bytes();
        let mapped = [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 10, 0, high, low];
        let local = [0xfe, 0x80, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, high, low];
        let gids = match link {
            Link::InfiniBand => vec![SoftGid { gid: local, version: 0 }],
            // Linux lists each address in both versions, too.
            Link::Ethernet => vec![
                SoftGid { gid: local, version: 0 },
                SoftGid { gid: local, version: 2 },
                SoftGid { gid: mapped, version: 0 },
                SoftGid { gid: mapped, version: 2 },
            ],
        };
        let port = SoftPort {
            active: true,
            mtu: Mtu::B4096,
            lid: if link == Link::InfiniBand { number + 1 } else { 0 },
            mac: [2, 0, 0, 0, high, low],
            gids,
        };
        Self {
            name: format!("soft_{number}"),
            link,
            ports: vec![port],
            log_max_queue: 15,
            log_max_completions: 22,
            log_max_reads: 4,
            reliable: true,
            atomics: true,
            core_direct: true,
            ignore_overrun: true,
            dma_buf: false,
            udp_ports: (0xc000, 0xffff),
            objects: 1 << 20,
        }
    }

    /// Returns the port with this number, from 1.
    pub(crate) fn port(&self, number: u64) -> Option<&SoftPort> {
        self.ports.get(usize::try_from(number).ok()?.checked_sub(1)?)
    }

    /// Describes a NIC with one Ethernet port. `number` determines its addresses.
    pub fn ethernet(number: u16) -> Self {
        Self::new(number, Link::Ethernet)
    }

    /// Describes a NIC with one InfiniBand port. `number` determines its addresses.
    pub fn infiniband(number: u16) -> Self {
        Self::new(number, Link::InfiniBand)
    }
}
