// SPDX-License-Identifier: MIT OR Apache-2.0
//! What can be chosen.

use crate::ibverbs;
use gin_abi::mlx5::command::Mtu;
use std::time::Duration;

/// What can be chosen of a device and its connections. Both ends of a connection should use the same times and depths.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct VerbsConfig {
    /// libibverbs: a path, or a name that the loader looks for. `libibverbs.so.1`.
    pub library: String,
    /// Name of the device; by default the first that has a port which is up.
    pub device: Option<String>,
    /// Number of the port, from 1; by default the first that is up.
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
    /// Makes what arrives visible by a read over the loop-back connection also where memory is not a GPU's, which needs
    /// none; so tests can run it without one. False.
    pub always_read_back: bool,
}

impl Default for VerbsConfig {
    fn default() -> Self {
        Self {
            library: ibverbs::LIBRARY.to_owned(),
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
