// SPDX-License-Identifier: MIT OR Apache-2.0
//! Configuration of the network.

use gin_abi::mlx5::command::Mtu;
use std::num::NonZeroU8;
use std::str::FromStr;
use std::time::Duration;

/// Engine that raises arriving signals.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum SignalsBy {
    /// The NIC if the rank's device is a GPU, all its ports have atomics and the GPU's memory can be registered for
    /// them; else the proxy.
    #[default]
    Automatic,
    /// The proxy.
    Proxy,
    /// The NIC. A communicator fails to start if the NIC cannot raise signals. Also applies to host memory, where
    /// signals need not be ordered behind data; they are with a software NIC on x86.
    Nic,
}

/// How NICs reach GPU memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum GpuMemory {
    /// A probe chooses the first that works: DMA-BUF files, peer memory, pinned host memory.
    #[default]
    Automatic,
    /// DMA-BUF files or peer memory. A communicator fails to start if neither works.
    Nic,
    /// All device memory is sent through pinned host memory, also that of virtual GPUs.
    Host,
}

/// Name of a port, or of all ports of a device: `mlx5_0:1`, `mlx5_0`.
///
/// ```
/// use gin_net::verbs::PortName;
///
/// let name: PortName = "mlx5_0:1".parse()?;
/// assert_eq!((name.device.as_str(), name.port), ("mlx5_0", Some(1)));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, PartialEq, Eq, Debug, derive_more::Display)]
#[display("{device}{}", port.map_or_else(String::new, |port| format!(":{port}")))]
pub struct PortName {
    /// Name of the device.
    pub device: String,
    /// Number of the port, from 1; `None` for all of them.
    pub port: Option<u8>,
}

impl FromStr for PortName {
    type Err = NotAPort;

    fn from_str(text: &str) -> Result<Self, NotAPort> {
        let refuse = || NotAPort { text: text.to_owned() };
        let (device, port) = match text.split_once(':') {
            Some((device, port)) => (device, Some(port.parse::<NonZeroU8>().map_err(|_| refuse())?.get())),
            None => (text, None),
        };
        let is_name = |byte: u8| byte.is_ascii_graphic() && byte != b'/' && byte != b',';
        if device.is_empty() || !device.bytes().all(is_name) {
            return Err(refuse());
        }
        Ok(Self { device: device.to_owned(), port })
    }
}

/// A text that does not name a port.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error(
    "`{text}` does not name a port; write the device's name, and if needed a colon and a number from 1 to 255, as in mlx5_0:1"
)]
pub struct NotAPort {
    /// The text.
    pub text: String,
}

gin_gpu::config! {
    /// Configuration of devices and connections. Both ends of a connection should use the same times and depths.
    ///
    /// ```
    /// use gin_net::verbs::VerbsConfig;
    ///
    /// let config = VerbsConfig::default().ports(vec!["mlx5_0:1".parse()?]).retries(7);
    /// assert_eq!((config.ports.len(), config.max_ports), (1, 4));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[derive(Clone, PartialEq, Eq, Debug)]
    pub struct VerbsConfig {
        /// Path of libibverbs, or a name that the loader searches for. Default: `libibverbs.so.1`.
        pub library: String = gin_verbs::verbs::LIBRARY.to_owned(),
        /// Ports that [`Ports::open`](super::Ports::open) opens; all must be up. Default: all ports that are up.
        pub ports: Vec<PortName> = Vec::new(),
        /// Maximum number of ports that a rank uses, at least 1; its contexts use them in turn. Default: 4.
        pub max_ports: usize = 4,
        /// Name of the device that [`RdmaDevice::open`](super::RdmaDevice::open) opens. Default: the first with a port
        /// that is up.
        pub device: Option<String> = None,
        /// Number of its port, from 1. Default: the first that is up.
        pub port: Option<u8> = None,
        /// Index of the port's GID. Default on Ethernet: the first of RoCE v2 with an IPv4 address, else of RoCE v2,
        /// else of any kind. Default on InfiniBand: 0.
        pub gid_index: Option<u32> = None,
        /// Largest packet; limited by the smaller of both ports' current MTUs, which is the default.
        pub mtu: Option<Mtu> = None,
        /// Traffic class of packets on Ethernet: the IP header's DSCP and ECN bits. Default: 0.
        pub traffic_class: u8 = 0,
        /// Service level, 0 to 15. Default: 0.
        pub service_level: u8 = 0,
        /// The maximum number of routers that a packet may pass. Default: 64.
        pub hop_limit: u8 = 64,
        /// Code, 1 to 31, of the time after which the NIC repeats an unacknowledged packet: 4.096 us times 2 to this
        /// power. Default: 16, that is 268 ms. Hardware may wait up to four times as long.
        pub timeout: u8 = 16,
        /// The number of times that the NIC repeats a packet before the peer counts as lost, 0 to 7. Default: 6. With
        /// the default `timeout` a peer is lost after 1.9 s, with hardware after up to 7.5 s. Soft-RoCE takes 7 as for
        /// ever, and then loses no peer.
        pub retries: u8 = 6,
        /// Entries of a connection's send queue, at least 4; reduced if the device has less room. A request takes one,
        /// and one more if it has data and a signal. Default: 128.
        pub send_depth: u32 = 128,
        /// Signals that may be outstanding on a connection before the peer's proxy has handled them, at least 2;
        /// reduced if the device has less room. Default: 64.
        pub signal_depth: u32 = 64,
        /// Number of entries, at least 1, of which one asks for a completion. The last of a batch does so too. Default:
        /// 16.
        pub completion_every: u32 = 16,
        /// Requests that a connection accepts while its send queue is full, so that others can proceed. Default: 1,024.
        pub backlog: usize = 1024,
        /// Bytes that an entry should hold itself, so that the NIC need not fetch them: signals have 32, values up to
        /// 8. If the device refuses, the NIC fetches them. Default: 32.
        pub inline: u32 = 32,
        /// Outstanding RDMA reads on a connection, in each direction; reduced to the device's limit. Default: 16.
        pub reads: u8 = 16,
        /// Maximum length of a message in bytes; reduced to the port's limit. Default: 1 GiB.
        pub max_message: u64 = 1 << 30,
        /// How long a connection without outstanding entries waits for the peer's proxy before it checks that the
        /// peer's NIC answers. Default: 1 s.
        pub ask_after: Duration = Duration::from_secs(1),
        /// Engine that raises this rank's signals; also decides whether this rank has NICs of peers raise theirs.
        /// Default: [`SignalsBy::Automatic`].
        pub signals: SignalsBy = SignalsBy::Automatic,
        /// How NICs reach memory of this rank's GPU. Default: [`GpuMemory::Automatic`].
        pub gpu_memory: GpuMemory = GpuMemory::Automatic,
        /// Makes arrivals visible by a read over the loop-back connection also in host memory, which does not need it.
        /// So tests run the read without a GPU. Default: false.
        pub always_read_back: bool = false,
    }
}

impl VerbsConfig {
    /// Returns the time without an answer after which a peer is lost. Hardware may wait up to four times as long.
    pub fn lost_after(&self) -> Duration {
        let unanswered = Duration::from_nanos(4096 << self.timeout.min(31));
        unanswered * (u32::from(self.retries) + 1)
    }

    /// Returns the first number that is out of range: its name, its value and its range.
    pub(super) fn wrong(&self) -> Option<(&'static str, u64, &'static str)> {
        let numbers = [
            ("port", u64::from(self.port.unwrap_or(1)), 1, 255, "1 to 255"),
            ("number of ports", self.max_ports as u64, 1, u64::MAX, "1 or more"),
            ("GID index", u64::from(self.gid_index.unwrap_or(0)), 0, 255, "0 to 255"),
            ("service level", u64::from(self.service_level), 0, 15, "0 to 15"),
            ("timeout", u64::from(self.timeout), 1, 31, "1 to 31"),
            ("number of retries", u64::from(self.retries), 0, 7, "0 to 7"),
            ("send depth", u64::from(self.send_depth), 4, 1 << 15, "4 to 32768"),
            ("signal depth", u64::from(self.signal_depth), 2, 1 << 15, "2 to 32768"),
            ("interval of completions", u64::from(self.completion_every), 1, u64::from(u32::MAX), "1 or more"),
            ("backlog", self.backlog as u64, 1, u64::MAX, "1 or more"),
            ("number of reads", u64::from(self.reads), 1, 255, "1 to 255"),
            ("length of messages", self.max_message, 8, 1 << 30, "8 to 2^30"),
        ];
        let wrong = numbers.into_iter().find(|(_, number, least, max, _)| number < least || number > max);
        wrong.map(|(name, number, .., range)| (name, number, range))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_defaults_are_in_range_and_lose_a_peer_within_ten_seconds() {
        let config = VerbsConfig::default();
        assert_eq!(config.wrong(), None);
        assert_eq!(config.lost_after(), Duration::from_nanos(4096 * 65536 * 7));
        assert!(config.lost_after() * 4 < Duration::from_secs(10));
    }

    #[test]
    fn port_names_are_parsed_as_they_are_shown() {
        for text in ["mlx5_0", "mlx5_0:1", "rocep24s0f1:255"] {
            assert_eq!(text.parse::<PortName>().unwrap().to_string(), text);
        }
        for text in ["", ":1", "mlx5_0:", "mlx5_0:0", "mlx5_0:256", "mlx5_0:1:2", "mlx5 0", "../mlx5_0", "a,b"] {
            let error = text.parse::<PortName>().unwrap_err().to_string();
            assert!(
                error.starts_with(&format!("`{text}` does not name a port")) && error.contains("mlx5_0:1"),
                "{error}"
            );
        }
    }

    #[test]
    fn a_number_out_of_its_range_is_named() {
        let wrong = |change: fn(&mut VerbsConfig)| {
            let mut config = VerbsConfig::default();
            change(&mut config);
            config.wrong()
        };
        assert_eq!(wrong(|config| config.timeout = 0), Some(("timeout", 0, "1 to 31")), "0 is for ever");
        assert_eq!(wrong(|config| config.retries = 8), Some(("number of retries", 8, "0 to 7")));
        assert_eq!(wrong(|config| config.signal_depth = 1), Some(("signal depth", 1, "2 to 32768")));
        assert_eq!(wrong(|config| config.gid_index = Some(256)), Some(("GID index", 256, "0 to 255")));
        assert_eq!(wrong(|config| config.max_message = 7), Some(("length of messages", 7, "8 to 2^30")), "a value");
    }
}
