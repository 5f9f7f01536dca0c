// SPDX-License-Identifier: MIT OR Apache-2.0
//! The messages of the bootstrap, and their encoding.
//!
//! `postcard` encodes them. A decoded message is never longer than its frame. Texts, lists and chunks also have limits
//! of their own.

use crate::id::Secret;
use crate::seat::Seat;
use crate::{LossCause, wire};
use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::net::SocketAddr;
use std::sync::Arc;

/// The reason for which a neighbour must not send a message.
pub(super) type Violation = &'static str;

/// The version of all messages. Ranks with different versions refuse each other.
pub(super) const VERSION: u8 = 8;

/// The maximum number of bytes of a frame before encryption: one message of Noise (65535) without its tag of 16.
pub(super) const FRAME: usize = 65_535 - 16;

/// The maximum number of bytes of a chunk. A chunk and its head fit into a frame.
pub(super) const CHUNK: usize = 32 << 10;

/// The maximum number of entries in the list of a message.
pub(super) const LISTED: usize = 1024;

/// The maximum number of bytes of a text.
const TEXT: usize = 512;

/// Texts of at most [`TEXT`] bytes. The sender cuts longer ones, and the receiver refuses them.
pub(super) mod text {
    use super::*;

    pub(crate) fn serialize<S: Serializer>(text: &str, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_str(&text[..text.floor_char_boundary(TEXT)])
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<String, D::Error> {
        let text = <&str>::deserialize(from)?;
        if text.len() > TEXT { Err(D::Error::custom("a text is too long")) } else { Ok(text.to_owned()) }
    }
}

/// Lists of at most [`LISTED`] entries. The sender cuts longer ones, and the receiver refuses them.
mod list {
    use super::*;

    pub(super) fn serialize<T: Serialize, S: Serializer>(list: &[T], to: S) -> Result<S::Ok, S::Error> {
        list[..list.len().min(LISTED)].serialize(to)
    }

    pub(super) fn deserialize<'de, T: Deserialize<'de>, D: Deserializer<'de>>(from: D) -> Result<Vec<T>, D::Error> {
        let list = Vec::deserialize(from)?;
        if list.len() > LISTED { Err(D::Error::custom("a list is too long")) } else { Ok(list) }
    }
}

/// Chunks of at most [`CHUNK`] bytes.
mod chunk {
    use super::*;

    pub(super) fn serialize<S: Serializer>(bytes: &[u8], to: S) -> Result<S::Ok, S::Error> {
        to.serialize_bytes(bytes)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Arc<[u8]>, D::Error> {
        let bytes = <&[u8]>::deserialize(from)?;
        if bytes.len() > CHUNK { Err(D::Error::custom("a chunk is too long")) } else { Ok(bytes.into()) }
    }
}

/// Reads an address at which a rank can listen: its port is not 0.
fn listening<'de, D: Deserializer<'de>>(from: D) -> Result<SocketAddr, D::Error> {
    let address = SocketAddr::deserialize(from)?;
    if address.port() == 0 { Err(D::Error::custom("a port is 0")) } else { Ok(address) }
}

/// The first message on a connection.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(super) enum Hello {
    /// To rank 0. Registers the sender.
    Register(Registration),
    /// From a parent to its child. Opens the edge between them.
    Edge { from: u32, to: u32, ranks: u32, instance: [u8; 16], seat: Seat },
    /// To rank 0, when joining takes long. Asks which ranks are missing, and reports the sender's trouble, if it has
    /// any.
    Status {
        rank: u32,
        #[serde(with = "text")]
        trouble: String,
    },
    /// To a [door](crate::door). Asks for a place in the next job.
    Knock(Knock),
}

/// A process that wants to be a rank of the job that follows a running one.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(super) struct Knock {
    /// Its number in the next job.
    pub(super) rank: u32,
    /// The number of ranks of the next job.
    pub(super) ranks: u32,
    /// Random. It distinguishes processes that claim the same rank.
    pub(super) instance: [u8; 16],
    /// The plan of a rank of the running job; `None` for a process that joins.
    pub(super) plan: Option<[u8; 32]>,
    /// The address at which a process listens that joins as rank 0.
    pub(super) listens: Option<SocketAddr>,
}

/// A rank that wants to join.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(super) struct Registration {
    pub(super) rank: u32,
    pub(super) ranks: u32,
    /// Random. It distinguishes processes that claim the same rank.
    pub(super) instance: [u8; 16],
    /// The address at which it listens.
    #[serde(deserialize_with = "listening")]
    pub(super) address: SocketAddr,
}

/// The answer to a [`Hello`].
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(super) enum Answer {
    /// The rank is registered.
    Welcome,
    /// The edge is open.
    Edge(Seat),
    /// Another process has this rank already.
    Duplicate,
    /// The job has this number of ranks.
    Ranks(u32),
    /// This rank did not expect the [`Hello`].
    Unexpected,
    /// To a knock: no call is under way that has a place for this process.
    NotNow,
    /// To a knock: the rank at this door admits to the next job.
    Elsewhere(SocketAddr),
    /// To a knock: there is a place, but these ranks of the next job have not knocked yet. The first of them, and the
    /// number of all.
    Pending {
        #[serde(with = "list")]
        missing: Vec<u32>,
        count: u32,
    },
    /// To a knock: all ranks have knocked. The secret of the next job, and the address of its rank 0.
    Meet { secret: Secret, address: SocketAddr },
    /// The first ranks that have not registered, the number of all that have not, and the trouble of a rank.
    Status {
        #[serde(with = "list")]
        missing: Vec<u32>,
        count: u32,
        failed: bool,
        #[serde(with = "text")]
        trouble: String,
    },
}

/// A collective: its channel, and its number on that channel.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub(super) struct CollectiveId {
    pub(super) channel: u64,
    pub(super) number: u64,
}

/// A message along an edge. A frame holds one or more.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(super) enum Message {
    /// The sender is alive.
    Ping,
    /// To the parent. The next chunk of the bytes that the sender's subtree gives.
    Up {
        id: CollectiveId,
        last: bool,
        #[serde(with = "chunk")]
        bytes: Arc<[u8]>,
    },
    /// `rank` posted a fault, as words, on the board of a channel, with this cause.
    Fault {
        channel: u64,
        rank: u32,
        fault: [u64; gin_abi::fault::WORDS],
        #[serde(with = "text")]
        cause: String,
    },
    /// `rank` has left or was lost; `by` noticed. `given`: collectives under way for which the subtree of `rank` had
    /// given all bytes by then.
    Gone {
        rank: u32,
        by: u32,
        cause: LossCause,
        #[serde(with = "list")]
        given: Vec<CollectiveId>,
    },
    /// `rank` ended all collectives.
    Abort { rank: u32 },
    /// Down the tree. A rank below has registered.
    Registered(Registration),
    /// While ranks join. A rank gives up because these ranks have not joined; `count` is the number of all that have
    /// not.
    Missing {
        #[serde(with = "list")]
        ranks: Vec<u32>,
        count: u32,
        #[serde(with = "text")]
        trouble: String,
    },
    /// To a child. The next chunk of the bytes that all ranks give.
    Down {
        id: CollectiveId,
        last: bool,
        #[serde(with = "chunk")]
        bytes: Arc<[u8]>,
    },
    /// `rank` has given its bytes and has waited for a while.
    Waits { id: CollectiveId, rank: u32 },
}

impl Message {
    /// Appends the message: at most [`CHUNK`] bytes and a head.
    pub(super) fn write(&self, bytes: &mut Vec<u8>) {
        *bytes = wire::append(self, std::mem::take(bytes));
    }

    /// Returns whether a frame holds a [`Ping`](Self::Ping) and nothing else.
    pub(super) fn is_ping(frame: &[u8]) -> bool {
        frame == [0]
    }

    /// Removes the next message from a frame; `None` if it is malformed.
    pub(super) fn read(frame: &mut &[u8]) -> Option<Self> {
        let message;
        (message, *frame) = postcard::take_from_bytes(frame).ok()?;
        Some(message)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::{decode, encode};
    use gin_abi::{Fault, FaultKind, FaultSubject, Operation};
    use proptest::prelude::*;
    use std::net::IpAddr;

    fn address() -> impl Strategy<Value = SocketAddr> {
        let ip = prop_oneof![any::<[u8; 4]>().prop_map(IpAddr::from), any::<[u16; 8]>().prop_map(IpAddr::from)];
        (ip, 1..=u16::MAX).prop_map(SocketAddr::from)
    }

    fn registration() -> impl Strategy<Value = Registration> {
        (any::<u32>(), any::<u32>(), any::<[u8; 16]>(), address())
            .prop_map(|(rank, ranks, instance, address)| Registration { rank, ranks, instance, address })
    }

    fn seat() -> impl Strategy<Value = Seat> {
        any::<(u64, u32, u64)>().prop_map(|(namespace, thread, began)| Seat { namespace, thread, began })
    }

    fn hello() -> impl Strategy<Value = Hello> {
        prop_oneof![
            registration().prop_map(Hello::Register),
            (any::<(u32, u32, u32, [u8; 16])>(), seat()).prop_map(|((from, to, ranks, instance), seat)| Hello::Edge {
                from,
                to,
                ranks,
                instance,
                seat
            }),
            (any::<u32>(), ".{0,40}").prop_map(|(rank, trouble)| Hello::Status { rank, trouble }),
            (any::<(u32, u32, [u8; 16], Option<[u8; 32]>)>(), prop::option::of(address())).prop_map(
                |((rank, ranks, instance, plan), listens)| Hello::Knock(Knock { rank, ranks, instance, plan, listens })
            ),
        ]
    }

    fn answer() -> impl Strategy<Value = Answer> {
        prop_oneof![
            Just(Answer::Welcome),
            seat().prop_map(Answer::Edge),
            Just(Answer::Duplicate),
            Just(Answer::Unexpected),
            any::<u32>().prop_map(Answer::Ranks),
            Just(Answer::NotNow),
            address().prop_map(Answer::Elsewhere),
            (prop::collection::vec(any::<u32>(), 0..50), any::<u32>())
                .prop_map(|(missing, count)| Answer::Pending { missing, count }),
            (any::<[u8; 32]>(), address())
                .prop_map(|(secret, address)| Answer::Meet { secret: Secret(secret), address }),
            (prop::collection::vec(any::<u32>(), 0..50), any::<(u32, bool)>(), ".{0,40}")
                .prop_map(|(missing, (count, failed), trouble)| Answer::Status { missing, count, failed, trouble }),
        ]
    }

    fn fault() -> impl Strategy<Value = Fault> {
        let kind = prop::sample::select(FaultKind::ALL);
        let operation = prop::sample::select(Operation::ALL);
        (kind, operation, any::<(u32, u32, u64, u64)>()).prop_map(
            |(kind, operation, (context, peer, expected, seen))| {
                let fault = Fault::new(kind, operation).with_context(context).with_peer(peer);
                fault.with_values(FaultSubject::Window { id: context, offset: seen }, expected, seen)
            },
        )
    }

    fn cause() -> impl Strategy<Value = LossCause> {
        prop_oneof![
            Just(LossCause::Left),
            Just(LossCause::Closed),
            any::<u64>().prop_map(|ms| LossCause::Silent { ms }),
            ".{0,40}".prop_map(|reason| LossCause::Failed { reason }),
        ]
    }

    fn collective() -> impl Strategy<Value = CollectiveId> {
        any::<(u64, u64)>().prop_map(|(channel, number)| CollectiveId { channel, number })
    }

    fn message() -> impl Strategy<Value = Message> {
        prop_oneof![
            Just(Message::Ping),
            (collective(), any::<(bool, bool)>(), prop::collection::vec(any::<u8>(), 0..300)).prop_map(
                |(id, (up, last), bytes)| {
                    let bytes = bytes.into();
                    if up { Message::Up { id, last, bytes } } else { Message::Down { id, last, bytes } }
                }
            ),
            (collective(), any::<u32>()).prop_map(|(id, rank)| Message::Waits { id, rank }),
            (any::<(u64, u32)>(), fault(), ".{0,40}").prop_map(|((channel, rank), fault, cause)| Message::Fault {
                channel,
                rank,
                fault: fault.to_words(),
                cause
            }),
            (any::<(u32, u32)>(), cause(), prop::collection::vec(collective(), 0..20))
                .prop_map(|((rank, by), cause, given)| Message::Gone { rank, by, cause, given }),
            any::<u32>().prop_map(|rank| Message::Abort { rank }),
            registration().prop_map(Message::Registered),
            (prop::collection::vec(any::<u32>(), 0..50), any::<u32>(), ".{0,40}")
                .prop_map(|(ranks, count, trouble)| Message::Missing { ranks, count, trouble }),
        ]
    }

    /// Reads a frame as the reader of an edge does.
    fn frame(bytes: &[u8]) -> Option<Vec<Message>> {
        let mut frame = bytes;
        let mut all = Vec::new();
        while !frame.is_empty() {
            all.push(Message::read(&mut frame)?);
        }
        Some(all)
    }

    proptest! {
        #[test]
        fn greetings_and_answers_survive_being_sent(hello in hello(), answer in answer()) {
            prop_assert_eq!(decode(&encode(&hello)), Some(hello));
            prop_assert_eq!(decode(&encode(&answer)), Some(answer));
        }

        #[test]
        fn frames_of_several_messages_survive_being_sent(messages in prop::collection::vec(message(), 0..8)) {
            let mut bytes = Vec::new();
            for message in &messages {
                message.write(&mut bytes);
            }
            prop_assert_eq!(frame(&bytes), Some(messages));
        }

        #[test]
        fn any_bytes_are_read_or_refused_and_what_is_read_is_no_longer_than_they_are(
            bytes in prop::collection::vec(any::<u8>(), 0..300),
            tag in 0_u8..10,
        ) {
            for bytes in [bytes.clone(), [&[tag][..], &bytes].concat()] {
                if let Some(hello) = decode::<Hello>(&bytes) {
                    prop_assert!(encode(&hello).len() <= bytes.len());
                }
                if let Some(answer) = decode::<Answer>(&bytes) {
                    prop_assert!(encode(&answer).len() <= bytes.len());
                }
                let held = |message: &Message| match message {
                    Message::Up { bytes, .. } | Message::Down { bytes, .. } => bytes.len(),
                    Message::Missing { ranks, trouble, .. } => ranks.len() + trouble.len(),
                    Message::Fault { cause, .. } => cause.len(),
                    Message::Gone { cause: LossCause::Failed { reason }, given, .. } => reason.len() + given.len(),
                    Message::Gone { given, .. } => given.len(),
                    _ => 0,
                };
                if let Some(messages) = frame(&bytes) {
                    prop_assert!(messages.iter().map(held).sum::<usize>() <= bytes.len());
                }
            }
        }

        #[test]
        fn a_message_that_was_cut_or_changed_is_refused_or_another_one(
            message in message(),
            cut: prop::sample::Index,
            change: (prop::sample::Index, u8),
        ) {
            let mut bytes = Vec::new();
            message.write(&mut bytes);
            let at = cut.index(bytes.len());
            prop_assert_ne!(frame(&bytes[..at]), Some(vec![message.clone()]));
            let at = change.0.index(bytes.len());
            if change.1 != 0 {
                bytes[at] ^= change.1;
                prop_assert_ne!(frame(&bytes), Some(vec![message]));
            }
        }
    }

    #[test]
    fn a_frame_is_a_ping_if_it_has_nothing_else() {
        let mut bytes = Vec::new();
        Message::Ping.write(&mut bytes);
        assert!(Message::is_ping(&bytes));
        Message::Abort { rank: 0 }.write(&mut bytes);
        assert!(!Message::is_ping(&bytes));
    }

    #[test]
    fn lengths_that_are_not_there_and_past_the_limits_are_refused() {
        let huge = [0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x01];
        let refused = |bytes: Vec<u8>| Message::read(&mut &bytes[..]).is_none();
        // Bytes that go up, and missing ranks.
        assert!(refused([&[1, 0, 0, 1][..], &huge].concat()));
        assert!(refused([&[6][..], &huge].concat()));
        // Longer than any number.
        assert!(refused([&[4][..], &[0xff; 11]].concat()));
        let longer = |head: &[u8], length: usize, rest: &[u8]| {
            let mut bytes = head.to_vec();
            bytes = postcard::to_extend(&length, bytes).unwrap();
            bytes.extend(vec![1; length]);
            bytes.extend_from_slice(rest);
            bytes
        };
        assert!(!refused(longer(&[1, 0, 0, 1], CHUNK, &[])));
        assert!(refused(longer(&[1, 0, 0, 1], CHUNK + 1, &[])));
        assert!(!refused(longer(&[6], LISTED, &[5, 0])));
        assert!(refused(longer(&[6], LISTED + 1, &[5, 0])));
        assert!(!refused(longer(&[6, 0, 5], TEXT, &[])));
        assert!(refused(longer(&[6, 0, 5], TEXT + 1, &[])));
    }

    #[test]
    fn a_chunk_with_its_head_fits_into_a_frame_and_long_lists_are_cut() {
        let id = CollectiveId { channel: u64::MAX, number: u64::MAX };
        let mut bytes = Vec::new();
        Message::Up { id, last: true, bytes: vec![0; CHUNK].into() }.write(&mut bytes);
        assert!(bytes.len() <= FRAME);
        bytes.clear();
        let ranks = vec![u32::MAX; 100_000];
        Message::Missing { ranks, count: 100_000, trouble: "é".repeat(1000) }.write(&mut bytes);
        assert!(bytes.len() <= FRAME);
        let read = frame(&bytes).unwrap();
        assert!(matches!(&read[..], [Message::Missing { ranks, count: 100_000, .. }] if ranks.len() == LISTED));
        bytes.clear();
        Message::Gone { rank: 0, by: 1, cause: LossCause::Left, given: vec![id; 100_000] }.write(&mut bytes);
        assert!(bytes.len() <= CHUNK);
        assert!(matches!(&frame(&bytes).unwrap()[..], [Message::Gone { given, .. }] if given.len() == LISTED));
    }
}
