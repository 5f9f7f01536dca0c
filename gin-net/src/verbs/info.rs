// SPDX-License-Identifier: MIT OR Apache-2.0
//! What devices and their ports are, and why there is none.

use super::config::VerbsConfig;
use super::topology::PciPlace;
use gin_abi::mlx5::command::Mtu;
use gin_verbs::{Link, LoadError};
use std::{fmt, io};

/// Why there is no device to be used.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum NoDevice {
    /// A number of the configuration is out of its range.
    #[error("no RDMA device: a {what} of {number} cannot be; it is {range}")]
    Config {
        /// Which number.
        what: &'static str,
        /// The number.
        number: u64,
        /// What it can be.
        range: &'static str,
    },
    /// libibverbs cannot be opened.
    #[error("no RDMA device: {library} cannot be opened ({reason}); it is part of rdma-core")]
    NoLibrary {
        /// The library.
        library: String,
        /// What the loader says.
        reason: String,
    },
    /// libibverbs is too old.
    #[error("no RDMA device: {library} has no function {name}; it is too old")]
    NoFunction {
        /// The library.
        library: String,
        /// What it lacks.
        name: String,
    },
    /// The kernel has no RDMA devices, or its driver for programs is not loaded.
    #[error("no RDMA device: asking the kernel for devices failed: {}", io::Error::from_raw_os_error(*errno))]
    Kernel {
        /// The error of the operating system.
        errno: i32,
    },
    /// There are no RDMA devices.
    #[error("no RDMA device: the kernel has none")]
    None,
    /// There is no device of this name.
    #[error("no RDMA device {name}; there are: {}", known.join(", "))]
    Unknown {
        /// The name.
        name: String,
        /// The names that there are.
        known: Vec<String>,
    },
    /// No port can be used.
    #[error("no RDMA device with a port that is up{}; there are: {}", wanted(*port), known.join(", "))]
    NoPort {
        /// The port that was asked for.
        port: Option<u8>,
        /// The devices that were looked at.
        known: Vec<String>,
    },
    /// A port has no such address.
    #[error("port {port} of RDMA device {name} has no address of index {index}")]
    NoAddress {
        /// The device.
        name: String,
        /// The port.
        port: u8,
        /// The index.
        index: u32,
    },
    /// A device does not do what it should.
    #[error("RDMA device {name}: {call} failed: {}", io::Error::from_raw_os_error(*errno))]
    Failed {
        /// The device.
        name: String,
        /// The function.
        call: &'static str,
        /// The error of the operating system: 13 (permission denied) is a matter of `/dev/infiniband`.
        errno: i32,
    },
}

fn wanted(port: Option<u8>) -> String {
    port.map_or_else(String::new, |port| format!(" and has number {port}"))
}

impl From<LoadError> for NoDevice {
    fn from(error: LoadError) -> Self {
        match error {
            LoadError::NoLibrary { library, reason } => Self::NoLibrary { library, reason },
            LoadError::NoFunction { library, name } => Self::NoFunction { library, name },
        }
    }
}

/// What an address of a port is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum GidKind {
    /// Of InfiniBand, or of RoCE v1: packets are not routed by IP.
    InfiniBand,
    /// Of RoCE v2: packets are UDP.
    RoceV2,
    /// The kernel does not say.
    Unknown,
}

/// An address of a port.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Gid {
    /// Its index in the port's table.
    pub index: u32,
    /// The address.
    pub bytes: [u8; 16],
    /// What it is.
    pub kind: GidKind,
}

impl Gid {
    /// How well it serves: less is better.
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

impl fmt::Display for Gid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", std::net::Ipv6Addr::from(self.bytes))
    }
}

/// A port of a device.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PortInfo {
    /// Its number, from 1.
    pub number: u8,
    /// Whether it is up.
    pub is_up: bool,
    /// What it is part of.
    pub link: Link,
    /// Largest packet now; `None` if the device says what is not known here.
    pub mtu: Option<Mtu>,
    /// Most bytes of one message.
    pub max_message: u64,
    /// Bits in a microsecond, as the kernel says it; 0 if it does not.
    pub rate: u64,
    /// Local identifier, on InfiniBand.
    pub lid: u16,
    /// Its addresses.
    pub gids: Vec<Gid>,
}

impl PortInfo {
    /// The address that connections use by this configuration, if there is such a one.
    pub fn address(&self, config: &VerbsConfig) -> Option<Gid> {
        let gid = match (config.gid_index, self.link) {
            (Some(index), _) => self.gids.iter().find(|gid| gid.index == index),
            (None, Link::InfiniBand) => self.gids.first(),
            // The first of the best.
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
    /// Most entries of a send or receive queue.
    pub max_entries: u32,
    /// Most entries of a completion queue.
    pub max_completions: u32,
    /// Reads at a time that a queue pair answers.
    pub reads_answered: u8,
    /// Reads at a time that a queue pair asks for.
    pub reads_asked: u8,
    /// It adds to words in memory, at once as far as its own adding goes; other engines may add elsewhere only.
    pub has_atomics: bool,
    /// Where it is, if the system says.
    pub place: Option<PciPlace>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_of_roce_v2_and_ipv4_serve_best() {
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
