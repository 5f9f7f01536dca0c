// SPDX-License-Identifier: MIT OR Apache-2.0
//! Keys that ranks exchange: one for queue pairs and signal words, and one for each window.
//!
//! Every rank receives all keys, and a rank's first key holds a queue pair for every context and every rank.

use crate::{Key, KeyError, NetError};
use gin_abi::mlx5::command::Mtu;
use gin_gpu::wire::{decode, encode};
use gin_verbs::Link;
use serde::{Deserialize, Serialize};

/// First bytes of the key for queue pairs. They name the version.
const HELLO: [u8; 4] = *b"gvh4";
/// First bytes of a window's key.
const WINDOW: [u8; 4] = *b"gvw4";
/// Maximum number of ports in a key, more than any rank uses.
const MAX_PORTS: usize = 256;

/// One end of a connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(super) struct End {
    /// Number of the queue pair, 24 bits.
    pub(super) queue: u32,
    /// Packet sequence number of its first packet, 24 bits.
    pub(super) initial_psn: u32,
}

/// A port, as its rank publishes it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(super) struct PublishedPort {
    pub(super) link: Link,
    /// Code of the largest packet's size.
    pub(super) mtu: u64,
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
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
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
    pub(super) ports: Vec<PublishedPort>,
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
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(super) struct PublishedPart {
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

fn refuse(rank: u32, reason: impl Into<String>) -> NetError {
    KeyError { rank, reason: reason.into() }.into()
}

/// Checks the first bytes of a key of `rank`.
fn check_kind(rank: u32, kind: [u8; 4], key: &Key) -> Result<(), NetError> {
    let known = key.0.starts_with(&kind);
    if known { Ok(()) } else { Err(refuse(rank, "this version of the network `verbs` did not make it")) }
}

impl Hello {
    /// Encodes the key of `rank` of `ranks`.
    pub(super) fn to_key(&self, rank: u32, ranks: u32) -> Key {
        Key(encode(&(HELLO, rank, ranks, self)))
    }

    /// Decodes the key of `rank` of `ranks`, which must have `ends` queue pairs.
    pub(super) fn from_key(rank: u32, ranks: u32, ends: usize, key: &Key) -> Result<Self, NetError> {
        check_kind(rank, HELLO, key)?;
        let sent: Option<([u8; 4], u32, u32, Self)> = decode(&key.0);
        let (_, own, world, hello) = sent.ok_or_else(|| refuse(rank, "it is garbled"))?;
        if (own, world) != (rank, ranks) {
            return Err(refuse(rank, "it belongs to another rank or world size"));
        }
        // Ensures that no address of a word overflows.
        if hello.words > u64::MAX >> 1 {
            return Err(refuse(rank, "the address of its signal words is invalid"));
        }
        let (signal_depth, ports) = (hello.signal_depth, hello.ports.len());
        if signal_depth == 0 || !(1..=MAX_PORTS).contains(&ports) {
            return Err(refuse(rank, format!("its {signal_depth} receive buffers or {ports} ports are out of range")));
        }
        if hello.ends.len() != ends {
            return Err(refuse(rank, format!("it has {} queue pairs instead of {ends}", hello.ends.len())));
        }
        if hello.ends.iter().any(|&End { queue, initial_psn }| queue == 0 || queue >> 24 != 0 || initial_psn >> 24 != 0)
        {
            return Err(refuse(rank, "a queue pair or packet sequence number is out of range"));
        }
        if hello.ports.iter().any(|port| Mtu::from_code(port.mtu).is_none()) {
            return Err(refuse(rank, "its MTU is unknown"));
        }
        if hello.ports.iter().any(|port| port.reads == 0) {
            return Err(refuse(rank, "a port answers no reads"));
        }
        Ok(hello)
    }
}

impl PublishedPart {
    /// Encodes the key.
    pub(super) fn to_key(&self) -> Key {
        Key(encode(&(WINDOW, self)))
    }

    /// Decodes the key of `rank`, which uses `ports` ports.
    pub(super) fn from_key(rank: u32, ports: usize, key: &Key) -> Result<Self, NetError> {
        check_kind(rank, WINDOW, key)?;
        let sent: Option<([u8; 4], Self)> = decode(&key.0);
        let (_, part) = sent.ok_or_else(|| refuse(rank, "it is garbled"))?;
        if part.keys.len() != ports {
            return Err(refuse(rank, format!("it is for {} ports instead of {ports}", part.keys.len())));
        }
        // Ensures that the sum of an address in it and a length does not overflow.
        if part.address.checked_add(part.bytes).is_none() {
            return Err(refuse(rank, "its memory reaches past the last address"));
        }
        Ok(part)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn port() -> impl Strategy<Value = PublishedPort> {
        let numbers = (any::<bool>(), 0..Mtu::ALL.len(), 1u8.., any::<u16>(), any::<[u8; 16]>(), any::<[u32; 2]>());
        numbers.prop_map(|(ethernet, mtu, reads, lid, gid, [credits_key, words_key])| {
            let link = if ethernet { Link::Ethernet } else { Link::InfiniBand };
            PublishedPort { link, mtu: Mtu::ALL[mtu].code(), reads, lid, gid, credits_key, words_key }
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
        matches!(read, Err(NetError::Key(KeyError { rank, .. })) if *rank == of)
    }

    proptest! {
        #[test]
        fn a_decoded_hello_equals_the_sent_one(hello in hello(), rank: u32, ranks: u32) {
            let key = hello.to_key(rank, ranks);
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
            let part = PublishedPart { address, bytes, keys, signals, nic, in_gpu };
            let read = PublishedPart::from_key(3, ports, &part.to_key());
            prop_assert!(is_refused(&PublishedPart::from_key(3, ports + 1, &part.to_key()), 3));
            match address.checked_add(bytes) {
                Some(_) => prop_assert_eq!(read, Ok(part)),
                None => prop_assert!(is_refused(&read, 3)),
            }
        }

        #[test]
        fn no_bytes_make_decoding_panic(
            bytes in proptest::collection::vec(any::<u8>(), 0..120), small in any::<bool>(), ends in 0usize..6,
        ) {
            // Small numbers take one byte each, so that more of the key is decoded.
            let bytes = bytes.into_iter().map(|byte| if small { byte % 4 } else { byte });
            let bytes: Vec<u8> = bytes.collect();
            for kind in [&[][..], &HELLO, &WINDOW, &[&HELLO[..], &[0, 1]].concat()] {
                let key = Key([kind, &bytes].concat());
                if let Ok(hello) = Hello::from_key(0, 1, ends, &key) {
                    prop_assert_eq!(hello.ends.len(), ends);
                }
                if let Ok(part) = PublishedPart::from_key(0, 1, &key) {
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
            NetError::Key(KeyError { rank: 2, reason }) => reason,
            other => panic!("{other:?}"),
        };
        let error = reason(Hello::from_key(2, 4, 0, &Key(vec![0; 72])).unwrap_err());
        assert_eq!(error, "this version of the network `verbs` did not make it");
        let error = reason(PublishedPart::from_key(2, 1, &Key(vec![0; 32])).unwrap_err());
        assert_eq!(error, "this version of the network `verbs` did not make it");
        let cut = Key(WINDOW.to_vec());
        assert_eq!(reason(PublishedPart::from_key(2, 1, &cut).unwrap_err()), "it is garbled");
    }
}
