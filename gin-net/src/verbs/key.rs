// SPDX-License-Identifier: MIT OR Apache-2.0
//! Keys that ranks exchange: one for queue pairs and signal words, and one for each window.
//!
//! Every rank receives all keys, so a rank's first key holds a queue pair for every context and every rank: 8 bytes
//! each.

use crate::{Key, NetError};
use gin_abi::mlx5::command::Mtu;
use gin_verbs::Link;

const HELLO: u32 = u32::from_le_bytes(*b"gvh3");
const WINDOW: u32 = u32::from_le_bytes(*b"gvw3");
/// Bytes before the ports.
const HELLO_BYTES: usize = 56;
const PORT_BYTES: usize = 32;
/// Bytes before the keys.
const WINDOW_BYTES: usize = 32;
/// Maximum number of ports in a key, more than any rank uses.
const MOST_PORTS: usize = 256;

/// One end of a connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct End {
    /// Number of the queue pair, 24 bits.
    pub(super) queue: u32,
    /// Packet sequence number of its first packet, 24 bits.
    pub(super) initial_psn: u32,
}

/// A port, as its rank publishes it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Port {
    pub(super) link: Link,
    pub(super) mtu: Mtu,
    /// Outstanding reads that each of its queue pairs answers.
    pub(super) reads: u8,
    pub(super) lid: u16,
    pub(super) gid: [u8; 16],
    /// Remote key of the words for credits over this port.
    pub(super) credits_key: u32,
    /// Remote key of the signal words that the NIC raises, over this port.
    pub(super) words_key: u32,
}

/// A rank's queue pairs and signal words.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Hello {
    /// Number of signals per context.
    pub(super) per_context: u32,
    /// Number of receive buffers of each connection.
    pub(super) signal_depth: u32,
    /// Address of the words for credits, one for each context and rank.
    pub(super) credits: u64,
    /// Address of the signal words that the NIC raises, one context after the other; 0 if the proxy raises all.
    pub(super) words: u64,
    /// These words are in a GPU.
    pub(super) words_in_gpu: bool,
    /// Ports, which contexts use in turn.
    pub(super) ports: Vec<Port>,
    /// Ends of connections, by context, then by rank.
    pub(super) ends: Vec<End>,
}

impl Hello {
    /// Returns the index of the port that a context uses.
    pub(super) fn port_index(&self, context: u32) -> usize {
        context as usize % self.ports.len().max(1)
    }
}

/// A rank's part of a window, as it publishes it.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(super) struct Part {
    pub(super) address: u64,
    pub(super) bytes: u64,
    /// Remote keys, by port of the rank.
    pub(super) keys: Vec<u32>,
    /// It accepts signals at its addresses.
    pub(super) signals: bool,
    /// The NIC may raise them there.
    pub(super) nic: bool,
    /// It is in a GPU.
    pub(super) in_gpu: bool,
}

/// Reads the fields of a key.
struct Reader<'a>(&'a [u8]);

impl Reader<'_> {
    fn take<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (first, rest) = self.0.split_first_chunk::<N>()?;
        self.0 = rest;
        Some(*first)
    }

    fn u32(&mut self) -> Option<u32> {
        self.take().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Option<u64> {
        self.take().map(u64::from_le_bytes)
    }
}

fn refuse(rank: u32, reason: impl Into<String>) -> NetError {
    NetError::Key { rank, reason: reason.into() }
}

impl Port {
    fn write(&self, bytes: &mut Vec<u8>) {
        let link = match self.link {
            Link::InfiniBand => 1,
            Link::Ethernet => 2,
        };
        bytes.extend([link, self.mtu.code() as u8, self.reads, 0]);
        bytes.extend(u32::from(self.lid).to_le_bytes());
        bytes.extend(self.credits_key.to_le_bytes());
        bytes.extend(self.gid);
        bytes.extend(self.words_key.to_le_bytes());
    }

    fn read(rank: u32, reader: &mut Reader<'_>) -> Result<Self, NetError> {
        let short = || refuse(rank, "it is too short");
        let [link, mtu, reads, _] = reader.take().ok_or_else(short)?;
        let link = match link {
            1 => Link::InfiniBand,
            2 => Link::Ethernet,
            _ => return Err(refuse(rank, "its link layer is unknown")),
        };
        let mtu = Mtu::from_code(mtu.into()).ok_or_else(|| refuse(rank, "its MTU is unknown"))?;
        let lid = reader.u32().ok_or_else(short)?;
        let lid = u16::try_from(lid).map_err(|_| refuse(rank, "its LID has more than 16 bits"))?;
        let (credits_key, gid) = (reader.u32().ok_or_else(short)?, reader.take().ok_or_else(short)?);
        let words_key = reader.u32().ok_or_else(short)?;
        if reads == 0 {
            return Err(refuse(rank, "a port answers no reads"));
        }
        Ok(Self { link, mtu, reads, lid, gid, credits_key, words_key })
    }
}

impl Hello {
    /// Encodes the key of `rank` of `ranks`.
    pub(super) fn to_key(&self, rank: u32, ranks: u32) -> Key {
        let mut bytes = Vec::with_capacity(HELLO_BYTES + PORT_BYTES * self.ports.len() + 8 * self.ends.len());
        for number in [HELLO, rank, ranks, self.per_context, self.signal_depth, self.ports.len() as u32] {
            bytes.extend(number.to_le_bytes());
        }
        bytes.extend(self.credits.to_le_bytes());
        bytes.extend(self.words.to_le_bytes());
        bytes.extend(u64::from(self.words_in_gpu).to_le_bytes());
        bytes.extend((self.ends.len() as u64).to_le_bytes());
        for port in &self.ports {
            port.write(&mut bytes);
        }
        for end in &self.ends {
            bytes.extend(end.queue.to_le_bytes());
            bytes.extend(end.initial_psn.to_le_bytes());
        }
        Key(bytes)
    }

    /// Decodes the key of `rank` of `ranks`, which must have `ends` queue pairs.
    pub(super) fn from_key(rank: u32, ranks: u32, ends: usize, key: &Key) -> Result<Self, NetError> {
        let short = || refuse(rank, "it is too short");
        let mut reader = Reader(&key.0);
        let mut number = || reader.u32().ok_or_else(short);
        if number()? != HELLO {
            return Err(refuse(rank, "this version of the network `verbs` did not make it"));
        }
        if (number()?, number()?) != (rank, ranks) {
            return Err(refuse(rank, "it belongs to another rank or world size"));
        }
        let (per_context, signal_depth, ports) = (number()?, number()?, number()? as usize);
        let mut word = || reader.u64().ok_or_else(short);
        let (credits, words, words_in_gpu, count) = (word()?, word()?, word()?, word()?);
        // Ensures that no address of a word overflows.
        if words > u64::MAX >> 1 || words_in_gpu > 1 {
            return Err(refuse(rank, "the address of its signal words is invalid"));
        }
        if signal_depth == 0 || !(1..=MOST_PORTS).contains(&ports) {
            return Err(refuse(rank, format!("its {signal_depth} receive buffers or {ports} ports are out of range")));
        }
        if count != ends as u64 || reader.0.len() != ports * PORT_BYTES + ends * 8 {
            return Err(refuse(rank, format!("it has {count} queue pairs instead of {ends}")));
        }
        let ports = (0..ports).map(|_| Port::read(rank, &mut reader)).collect::<Result<_, _>>()?;
        let mut list = Vec::with_capacity(ends);
        while let (Some(queue), Some(initial_psn)) = (reader.u32(), reader.u32()) {
            if queue == 0 || queue >> 24 != 0 || initial_psn >> 24 != 0 {
                return Err(refuse(rank, "a queue pair or packet sequence number is out of range"));
            }
            list.push(End { queue, initial_psn });
        }
        let words_in_gpu = words_in_gpu == 1;
        Ok(Self { per_context, signal_depth, credits, words, words_in_gpu, ports, ends: list })
    }
}

impl Part {
    /// Encodes the key.
    pub(super) fn to_key(&self) -> Key {
        let mut bytes = Vec::with_capacity(WINDOW_BYTES + 4 * self.keys.len());
        let flags = u32::from(self.signals) | u32::from(self.nic) << 1 | u32::from(self.in_gpu) << 2;
        for number in [WINDOW, self.keys.len() as u32, flags, 0] {
            bytes.extend(number.to_le_bytes());
        }
        bytes.extend(self.address.to_le_bytes());
        bytes.extend(self.bytes.to_le_bytes());
        for key in &self.keys {
            bytes.extend(key.to_le_bytes());
        }
        Key(bytes)
    }

    /// Decodes the key of `rank`, which uses `ports` ports.
    pub(super) fn from_key(rank: u32, ports: usize, key: &Key) -> Result<Self, NetError> {
        let read = || {
            let mut reader = Reader(&key.0);
            let numbers = (reader.u32()?, reader.u32()?, reader.u32()?, reader.u32()?);
            Some((numbers, reader.u64()?, reader.u64()?, reader.0))
        };
        let (numbers, address, bytes, rest) = read().ok_or_else(|| refuse(rank, "it has the wrong length"))?;
        let (WINDOW, count, flags @ 0..=7, 0) = numbers else {
            return Err(refuse(rank, "this version of the network `verbs` did not make it"));
        };
        if count as usize != ports || rest.len() != 4 * ports {
            return Err(refuse(rank, format!("it is for {count} ports instead of {ports}")));
        }
        // Ensures that the sum of an address in it and a length does not overflow.
        if address.checked_add(bytes).is_none() {
            return Err(refuse(rank, "its memory reaches past the last address"));
        }
        let (keys, _) = rest.as_chunks::<4>();
        let keys = keys.iter().map(|key| u32::from_le_bytes(*key)).collect();
        let flag = |bit: u32| flags >> bit & 1 == 1;
        Ok(Self { address, bytes, keys, signals: flag(0), nic: flag(1), in_gpu: flag(2) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn port() -> impl Strategy<Value = Port> {
        let numbers = (any::<bool>(), 0..Mtu::ALL.len(), 1u8.., any::<u16>(), any::<[u8; 16]>(), any::<[u32; 2]>());
        numbers.prop_map(|(ethernet, mtu, reads, lid, gid, [credits_key, words_key])| {
            let link = if ethernet { Link::Ethernet } else { Link::InfiniBand };
            Port { link, mtu: Mtu::ALL[mtu], reads, lid, gid, credits_key, words_key }
        })
    }

    fn hello() -> impl Strategy<Value = Hello> {
        let end = (1u32..1 << 24, 0u32..1 << 24).prop_map(|(queue, initial_psn)| End { queue, initial_psn });
        let lists = (proptest::collection::vec(port(), 1..4), proptest::collection::vec(end, 0..20));
        let numbers = (any::<u32>(), 1u32.., any::<u64>(), 0..u64::MAX >> 1, any::<bool>());
        (numbers, lists).prop_map(|((per_context, signal_depth, credits, words, words_in_gpu), (ports, ends))| Hello {
            per_context,
            signal_depth,
            credits,
            words,
            words_in_gpu,
            ports,
            ends,
        })
    }

    fn is_refused<T>(read: &Result<T, NetError>, of: u32) -> bool {
        matches!(read, Err(NetError::Key { rank, .. }) if *rank == of)
    }

    proptest! {
        #[test]
        fn a_decoded_hello_equals_the_sent_one(hello in hello(), rank: u32, ranks: u32) {
            let key = hello.to_key(rank, ranks);
            prop_assert_eq!(key.0.len(), HELLO_BYTES + PORT_BYTES * hello.ports.len() + 8 * hello.ends.len());
            prop_assert_eq!(Hello::from_key(rank, ranks, hello.ends.len(), &key), Ok(hello.clone()));
            let more = Hello::from_key(rank, ranks, hello.ends.len() + 1, &key);
            prop_assert!(is_refused(&more, rank));
            let other = Hello::from_key(rank.wrapping_add(1), ranks, hello.ends.len(), &key);
            prop_assert!(is_refused(&other, rank.wrapping_add(1)));
        }

        #[test]
        fn a_decoded_part_equals_the_sent_one(
            address: u64, bytes: u64, keys in proptest::collection::vec(any::<u32>(), 1..5), flags: [bool; 3],
        ) {
            let ports = keys.len();
            let [signals, nic, in_gpu] = flags;
            let part = Part { address, bytes, keys, signals, nic, in_gpu };
            let read = Part::from_key(3, ports, &part.to_key());
            prop_assert!(is_refused(&Part::from_key(3, ports + 1, &part.to_key()), 3));
            match address.checked_add(bytes) {
                Some(_) => prop_assert_eq!(read, Ok(part)),
                None => prop_assert!(is_refused(&read, 3)),
            }
        }

        #[test]
        fn no_bytes_make_decoding_panic(bytes in proptest::collection::vec(any::<u8>(), 0..120), ends in 0usize..6) {
            let mut bytes = bytes;
            let key = Key(bytes.clone());
            let _ = (Part::from_key(0, 1, &key), Hello::from_key(0, 1, ends, &key));
            for (kind, rest) in [(HELLO, [0u32, 1]), (WINDOW, [1, 1])] {
                if bytes.len() >= 12 {
                    bytes[..4].copy_from_slice(&kind.to_le_bytes());
                    bytes[4..8].copy_from_slice(&rest[0].to_le_bytes());
                    bytes[8..12].copy_from_slice(&rest[1].to_le_bytes());
                }
                let key = Key(bytes.clone());
                if let Ok(hello) = Hello::from_key(0, 1, ends, &key) {
                    prop_assert_eq!(hello.ends.len(), ends);
                }
                if let Ok(part) = Part::from_key(0, 1, &key) {
                    prop_assert!(part.address.checked_add(part.bytes).is_some());
                }
            }
        }

        #[test]
        fn a_key_that_was_cut_is_refused(hello in hello(), cut in 1usize..80) {
            let mut key = hello.to_key(0, 4);
            key.0.truncate(key.0.len().saturating_sub(cut));
            let read = Hello::from_key(0, 4, hello.ends.len(), &key);
            prop_assert!(is_refused(&read, 0));
        }
    }

    #[test]
    fn a_key_of_another_network_is_refused_with_the_reason() {
        let reason = |error| match error {
            NetError::Key { rank: 2, reason } => reason,
            other => panic!("{other:?}"),
        };
        let error = reason(Hello::from_key(2, 4, 0, &Key(vec![0; 72])).unwrap_err());
        assert_eq!(error, "this version of the network `verbs` did not make it");
        let error = reason(Part::from_key(2, 1, &Key(vec![0; 32])).unwrap_err());
        assert_eq!(error, "this version of the network `verbs` did not make it");
        assert_eq!(reason(Part::from_key(2, 1, &Key(vec![0; 31])).unwrap_err()), "it has the wrong length");
    }
}
