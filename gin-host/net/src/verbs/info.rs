// SPDX-License-Identifier: MIT OR Apache-2.0
//! Attributes of RDMA devices and their ports, and why none can be used.

use super::config::VerbsConfig;
use super::topology::PciPlace;
use gin_abi::mlx5::command::Mtu;
use gin_verbs::{Link, LoadError};

/// Why no RDMA device can be used.
///
/// ```
/// assert_eq!(gin_net::verbs::NoRdmaDevice::None.to_string(), "no RDMA device: the kernel has none");
/// ```
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum NoRdmaDevice {
    /// A number of the configuration is out of its range.
    #[error("no RDMA device: {what} {number} is out of range; use {range}")]
    Config {
        /// Name of the number.
        what: &'static str,
        /// The number.
        number: u64,
        /// The range.
        range: &'static str,
    },
    /// libibverbs cannot be used.
    #[error("no RDMA device: {0}")]
    Library(#[from] LoadError),
    /// The kernel has no RDMA support, or its `ib_uverbs` module is not loaded.
    #[error("no RDMA device: asking the kernel for devices failed: {}", gin_verbs::explain(*errno))]
    Kernel {
        /// Error number of the operating system.
        errno: i32,
    },
    /// The kernel has no RDMA devices.
    #[error("no RDMA device: the kernel has none")]
    None,
    /// No device has this name.
    #[error("no RDMA device {name}; there are: {}", known.join(", "))]
    Unknown {
        /// The name.
        name: String,
        /// Names of the devices.
        known: Vec<String>,
    },
    /// No port is up.
    #[error("no RDMA device with a port that is up{}; there are: {}", wanted(*port), known.join(", "))]
    NoPort {
        /// The port that the configuration names.
        port: Option<u8>,
        /// Names of the devices that were searched.
        known: Vec<String>,
    },
    /// A port has no GID of this index.
    #[error("port {port} of RDMA device {name} has no GID of index {index}")]
    NoAddress {
        /// The device.
        name: String,
        /// The port.
        port: u8,
        /// The index.
        index: u32,
    },
    /// A call of libibverbs failed.
    #[error("RDMA device {name}: {call} failed: {}", gin_verbs::explain(*errno))]
    Failed {
        /// The device.
        name: String,
        /// The function.
        call: &'static str,
        /// Error number of the operating system. 13 (permission denied): this process may not open `/dev/infiniband`.
        errno: i32,
    },
}

fn wanted(port: Option<u8>) -> String {
    port.map_or_else(String::new, |port| format!(" and has number {port}"))
}

/// Kind of a GID.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum GidKind {
    /// InfiniBand or RoCE v1: IP does not route packets.
    InfiniBand,
    /// RoCE v2: packets are UDP.
    RoceV2,
    /// The kernel does not report it.
    Unknown,
}

/// A GID: an address of a port.
#[derive(Clone, Copy, PartialEq, Eq, Debug, derive_more::Display)]
#[display("{}", std::net::Ipv6Addr::from(*bytes))]
pub struct Gid {
    /// Its index in the port's table.
    pub index: u32,
    /// The address.
    pub bytes: [u8; 16],
    /// Its kind.
    pub kind: GidKind,
}

impl Gid {
    /// Returns its order of preference: less is better.
    fn rank(&self) -> u32 {
        let is_ipv4 = self.bytes[..10] == [0; 10] && self.bytes[10..12] == [0xff; 2];
        let is_link_local = self.bytes[..2] == [0xfe, 0x80];
        match self.kind {
            GidKind::RoceV2 if is_ipv4 => 0,
            GidKind::RoceV2 if !is_link_local => 1,
            GidKind::RoceV2 => 2,
            GidKind::Unknown | GidKind::InfiniBand => 3,
        }
    }
}

/// A port of a device.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PortInfo {
    /// Its number, from 1.
    pub number: u8,
    /// The port is up.
    pub is_up: bool,
    /// Link layer.
    pub link: Link,
    /// Size of the largest packet now; `None` if gin does not know the code that the device reports.
    pub mtu: Option<Mtu>,
    /// Maximum length of a message in bytes.
    pub max_message: u64,
    /// Rate in bits per microsecond; 0 if the kernel does not report it.
    pub rate: u64,
    /// Local identifier, on InfiniBand.
    pub lid: u16,
    /// GIDs.
    pub gids: Vec<Gid>,
}

impl PortInfo {
    /// Returns the GID that connections use under this configuration, if the port has it.
    pub fn address(&self, config: &VerbsConfig) -> Option<Gid> {
        let gid = match (config.gid_index, self.link) {
            (Some(index), _) => self.gids.iter().find(|gid| gid.index == index),
            (None, Link::InfiniBand) => self.gids.first(),
            // The first of the most preferred kind.
            (None, Link::Ethernet) => self.gids.iter().filter(|gid| gid.index <= 255).min_by_key(|gid| gid.rank()),
        };
        gid.copied()
    }
}

/// A device.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct DeviceInfo {
    /// Its name.
    pub name: String,
    /// Its ports.
    pub ports: Vec<PortInfo>,
    /// Maximum number of entries of a send or receive queue.
    pub max_entries: u32,
    /// Maximum number of entries of a completion queue.
    pub max_completions: u32,
    /// Outstanding reads that a queue pair answers.
    pub reads_answered: u8,
    /// Outstanding reads that a queue pair initiates.
    pub reads_asked: u8,
    /// The device has atomics. They may be atomic only with respect to each other, so no other engine may add to the
    /// same words.
    pub has_atomics: bool,
    /// Location, if the system reports it.
    pub place: Option<PciPlace>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gids_of_roce_v2_and_ipv4_are_preferred() {
        let gid = |bytes, kind| Gid { index: 0, bytes, kind };
        let ipv4 = std::net::Ipv4Addr::new(10, 7, 0, 1).to_ipv6_mapped().octets();
        let global = [0x20, 1, 13, 0xb8, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1];
        let mut local = global;
        local[..2].copy_from_slice(&[0xfe, 0x80]);
        let order = [
            gid(ipv4, GidKind::RoceV2),
            gid(global, GidKind::RoceV2),
            gid(local, GidKind::RoceV2),
            gid(ipv4, GidKind::InfiniBand),
        ];
        assert!(order.is_sorted_by(|better, worse| better.rank() < worse.rank()));
        assert_eq!(order[0].to_string(), "::ffff:10.7.0.1");
    }
}
