// SPDX-License-Identifier: MIT OR Apache-2.0
//! What can be chosen.

use gin_abi::mlx5::command::Mtu;
use std::fmt;
use std::str::FromStr;
use std::time::Duration;

/// Who raises signals when they arrive.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum SignalsBy {
    /// The NIC, where the rank's device is a GPU, all its ports have atomics, and the GPU's memory can be registered for
    /// them; else the proxy.
    #[default]
    Automatic,
    /// The proxy.
    Proxy,
    /// The NIC, or nobody: a communicator fails to come up if it cannot. Also in memory of a host, where it need not be in
    /// order behind data: it is where a NIC in software runs on x86.
    Nic,
}

impl FromStr for SignalsBy {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        match text {
            "auto" => Ok(Self::Automatic),
            "proxy" => Ok(Self::Proxy),
            "nic" => Ok(Self::Nic),
            _ => Err(()),
        }
    }
}

/// How NICs reach memory of GPUs.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum GpuMemory {
    /// As DMA-BUF files, else by peer memory, else it goes through pinned host memory: what a probe finds out.
    #[default]
    Automatic,
    /// As DMA-BUF files or by peer memory; where they do not, a communicator fails to come up.
    Nic,
    /// All memory of devices goes through pinned host memory, that of virtual GPUs too.
    Host,
}

impl FromStr for GpuMemory {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        match text {
            "auto" => Ok(Self::Automatic),
            "nic" => Ok(Self::Nic),
            "host" => Ok(Self::Host),
            _ => Err(()),
        }
    }
}

/// A port, or all ports of a device: `mlx5_0:1`, `mlx5_0`.
#[derive(Clone, PartialEq, Eq, Debug)]
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
            Some((device, port)) => (device, Some(port)),
            None => (text, None),
        };
        let port = port.map(|port| port.parse::<u8>().ok().filter(|port| *port > 0).ok_or_else(refuse)).transpose()?;
        let is_name = |byte: u8| byte.is_ascii_graphic() && byte != b'/' && byte != b',';
        if device.is_empty() || !device.bytes().all(is_name) {
            return Err(refuse());
        }
        Ok(Self { device: device.to_owned(), port })
    }
}

impl fmt::Display for PortName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.device)?;
        self.port.map_or(Ok(()), |port| write!(f, ":{port}"))
    }
}

/// A text that names no port.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error(
    "`{text}` is no port of an RDMA device: that is its name, and perhaps a colon and a number from 1 to 255, as in mlx5_0:1"
)]
pub struct NotAPort {
    /// The text.
    pub text: String,
}

/// What can be chosen of a device and its connections. Both ends of a connection should use the same times and depths.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct VerbsConfig {
    /// libibverbs: a path, or a name that the loader looks for. `libibverbs.so.1`.
    pub library: String,
    /// The ports that [`Ports::open`](super::Ports::open) opens, all of which must be up; by default all that are.
    pub ports: Vec<PortName>,
    /// Most ports that a rank uses at a time; its contexts take them in turn. At least 1. 4.
    pub most_ports: usize,
    /// Name of the device that [`RdmaDevice::open`](super::RdmaDevice::open) opens; by default the first that has a port which is
    /// up.
    pub device: Option<String>,
    /// Number of its port, from 1; by default the first that is up.
    pub port: Option<u8>,
    /// Index of the port's address; by default, on Ethernet, that of RoCE v2 with an IPv4 address if there is one, then any
    /// of RoCE v2, then the first; on InfiniBand 0.
    pub gid_index: Option<u32>,
    /// Largest packet; never more than the smaller of what both ports have now, which is the default.
    pub mtu: Option<Mtu>,
    /// Traffic class of packets on Ethernet: the IP header's DSCP and ECN bits. 0.
    pub traffic_class: u8,
    /// Service level, 0 to 15. 0.
    pub service_level: u8,
    /// How often packets may be forwarded. 64.
    pub hop_limit: u8,
    /// How long to wait for an acknowledgement before a packet is sent again: 4.096 us times 2 to this power, 1 to 31. 16,
    /// that is 268 ms. Hardware may wait up to four times as long.
    pub timeout: u8,
    /// How often a packet is sent again before the peer is taken for lost, 0 to 7. 6: with the default of `timeout` that
    /// is after 1.9 s, by hardware after up to 7.5 s. Soft-RoCE takes 7 for ever and never loses a peer then.
    pub retries: u8,
    /// Entries of the send queue of a connection, at least 4; a request takes one, and one more if it brings data and a
    /// signal. Fewer if the device has not room for so many. 128.
    pub send_depth: u32,
    /// Signals that can be on their way over a connection before the peer's proxy has dealt with them, at least 2. Fewer if
    /// the device has not room for so many. 64.
    pub signal_depth: u32,
    /// Every so many entries one asks for a completion, as does the last of a batch; at least 1. 16.
    pub completion_every: u32,
    /// Requests of a connection that are taken while its send queue is full, so that others can go on. 1,024.
    pub backlog: usize,
    /// Bytes that entries should hold themselves, so that the NIC need not fetch them: signals have 32, values up to 8. Where
    /// the device refuses, they are fetched. 32.
    pub inline: u32,
    /// RDMA reads under way at a time on a connection, in each direction. Fewer if the device allows less. 16.
    pub reads: u8,
    /// Most bytes of one message; fewer if the port allows less. 1 GiB.
    pub max_message: u64,
    /// How long a connection may wait for the peer's proxy without anything under way until the peer's NIC is asked whether
    /// it is there. 1 s.
    pub ask_after: Duration,
    /// Who raises signals of this rank, and whether it has NICs of others raise theirs. [`SignalsBy::Automatic`].
    pub signals: SignalsBy,
    /// How NICs reach memory of this rank's GPU. [`GpuMemory::Automatic`].
    pub gpu_memory: GpuMemory,
    /// Makes what arrives visible by a read over the loop-back connection also where memory is not a GPU's, which needs
    /// none; so tests can run it without one. False.
    pub always_read_back: bool,
}

impl Default for VerbsConfig {
    fn default() -> Self {
        Self {
            library: gin_verbs::verbs::LIBRARY.to_owned(),
            ports: Vec::new(),
            most_ports: 4,
            device: None,
            port: None,
            gid_index: None,
            mtu: None,
            traffic_class: 0,
            service_level: 0,
            hop_limit: 64,
            timeout: 16,
            retries: 6,
            send_depth: 128,
            signal_depth: 64,
            completion_every: 16,
            backlog: 1024,
            inline: 32,
            reads: 16,
            max_message: 1 << 30,
            ask_after: Duration::from_secs(1),
            signals: SignalsBy::Automatic,
            gpu_memory: GpuMemory::Automatic,
            always_read_back: false,
        }
    }
}

impl VerbsConfig {
    /// After how long without an answer a peer is lost; hardware may wait up to four times as long.
    pub fn lost_after(&self) -> Duration {
        let unanswered = Duration::from_nanos(4096 << self.timeout.min(31));
        unanswered * (u32::from(self.retries) + 1)
    }

    /// The number that is out of its range: its name, itself, and the range.
    pub(super) fn wrong(&self) -> Option<(&'static str, u64, &'static str)> {
        let numbers = [
            ("port", u64::from(self.port.unwrap_or(1)), 1, 255, "1 to 255"),
            ("number of ports", self.most_ports as u64, 1, u64::MAX, "1 or more"),
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
        let wrong = numbers.into_iter().find(|(_, number, least, most, _)| number < least || number > most);
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
    fn names_of_ports_are_read_as_they_are_shown() {
        for text in ["mlx5_0", "mlx5_0:1", "rocep24s0f1:255"] {
            assert_eq!(text.parse::<PortName>().unwrap().to_string(), text);
        }
        for text in ["", ":1", "mlx5_0:", "mlx5_0:0", "mlx5_0:256", "mlx5_0:1:2", "mlx5 0", "../mlx5_0", "a,b"] {
            let error = text.parse::<PortName>().unwrap_err().to_string();
            assert!(error.starts_with(&format!("`{text}` is no port")) && error.contains("mlx5_0:1"), "{error}");
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
