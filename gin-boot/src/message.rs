// SPDX-License-Identifier: MIT OR Apache-2.0
//! What ranks say to each other, as bytes.
//!
//! Numbers are base 128, low groups first, with the top bit set on all bytes but the last. Texts and lists begin with
//! their length. A reader believes no length: it takes what is there.

use super::beat::Seat;
use crate::LossCause;
use gin_abi::Fault;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

/// The version of all of this. Ranks of different versions do not talk.
pub(super) const VERSION: u8 = 3;

/// Most bytes of a frame before it is encrypted: what one message of Noise carries (65535 with a tag of 16).
pub(super) const FRAME: usize = 65_535 - 16;

/// Most bytes of a part's piece: with its head it fits into a frame.
pub(super) const PIECE: usize = 32 << 10;

/// Most ranks that a message lists.
pub(super) const LISTED: usize = 1024;

/// Most bytes of a text.
const TEXT: usize = 512;

/// Appends to a message.
#[derive(Debug, Default)]
struct Writer(Vec<u8>);

impl Writer {
    fn number(&mut self, mut value: u64) -> &mut Self {
        while value >= 0x80 {
            // The low seven bits.
            self.0.push(value as u8 | 0x80);
            value >>= 7;
        }
        self.0.push(value as u8);
        self
    }

    fn bytes(&mut self, bytes: &[u8]) -> &mut Self {
        self.number(bytes.len() as u64).0.extend_from_slice(bytes);
        self
    }

    fn address(&mut self, address: &SocketAddr) -> &mut Self {
        match address.ip() {
            IpAddr::V4(ip) => self.bytes(&ip.octets()),
            IpAddr::V6(ip) => self.bytes(&ip.octets()),
        };
        self.number(u64::from(address.port()))
    }

    fn seat(&mut self, seat: &Seat) -> &mut Self {
        self.number(seat.namespace).number(u64::from(seat.thread)).number(seat.began)
    }

    fn ranks(&mut self, ranks: &[u32]) -> &mut Self {
        let listed = &ranks[..ranks.len().min(LISTED)];
        self.number(listed.len() as u64);
        for rank in listed {
            self.number(u64::from(*rank));
        }
        self
    }

    fn text(&mut self, text: &str) -> &mut Self {
        let end = (0..=text.len().min(TEXT)).rev().find(|&end| text.is_char_boundary(end)).unwrap_or(0);
        self.bytes(&text.as_bytes()[..end])
    }
}

/// Reads messages; what is not there, or makes no sense, gives `None`.
#[derive(Clone, Debug)]
pub(super) struct Reader<'a>(pub(super) &'a [u8]);

impl<'a> Reader<'a> {
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    fn byte(&mut self) -> Option<u8> {
        let (byte, rest) = self.0.split_first()?;
        self.0 = rest;
        Some(*byte)
    }

    fn number(&mut self) -> Option<u64> {
        let mut value = 0;
        for group in 0..10 {
            let byte = self.byte()?;
            let bits = u64::from(byte & 0x7f);
            // The tenth group has one bit; and each number has one form.
            if (group == 9 && bits > 1) || (group > 0 && byte == 0) {
                return None;
            }
            value |= bits << (7 * group);
            if byte & 0x80 == 0 {
                return Some(value);
            }
        }
        None
    }

    fn small(&mut self) -> Option<u32> {
        self.number()?.try_into().ok()
    }

    fn bytes(&mut self) -> Option<&'a [u8]> {
        let length = usize::try_from(self.number()?).ok()?;
        let (bytes, rest) = self.0.split_at_checked(length)?;
        self.0 = rest;
        Some(bytes)
    }

    fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        self.bytes()?.try_into().ok()
    }

    fn address(&mut self) -> Option<SocketAddr> {
        let octets = self.bytes()?;
        let ip = match octets.len() {
            4 => IpAddr::from(<[u8; 4]>::try_from(octets).ok()?),
            _ => IpAddr::from(<[u8; 16]>::try_from(octets).ok()?),
        };
        let port = u16::try_from(self.number()?).ok().filter(|&port| port != 0)?;
        Some(SocketAddr::new(ip, port))
    }

    fn seat(&mut self) -> Option<Seat> {
        Some(Seat { namespace: self.number()?, thread: self.small()?, began: self.number()? })
    }

    fn ranks(&mut self) -> Option<Vec<u32>> {
        let count = self.number().filter(|&count| count <= LISTED as u64)?;
        (0..count).map(|_| self.small()).collect()
    }

    fn text(&mut self) -> Option<String> {
        let bytes = self.bytes().filter(|bytes| bytes.len() <= TEXT)?;
        String::from_utf8(bytes.to_vec()).ok()
    }
}

/// A message that is a whole frame of its own.
pub(super) trait Whole: Sized {
    /// As bytes.
    fn to_bytes(&self) -> Vec<u8>;

    /// From what `to_bytes` made; `None` for anything else.
    fn from_bytes(bytes: &[u8]) -> Option<Self>;
}

/// What whoever connects says first.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Hello {
    /// To rank 0: a rank is there.
    Register(Registration),
    /// To a child, from its parent: this is our edge.
    Edge { from: u32, to: u32, ranks: u32, instance: [u8; 16], seat: Seat },
    /// To rank 0, when it takes long: who is missing? With what this rank has trouble with, if anything.
    Status { rank: u32, trouble: String },
}

/// A rank that is there.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Registration {
    pub(super) rank: u32,
    pub(super) ranks: u32,
    /// Random: another process of the same rank has another one.
    pub(super) instance: [u8; 16],
    /// Where it listens.
    pub(super) address: SocketAddr,
}

impl Registration {
    fn write(&self, to: &mut Writer) {
        to.number(u64::from(self.rank)).number(u64::from(self.ranks)).bytes(&self.instance).address(&self.address);
    }

    fn read(from: &mut Reader<'_>) -> Option<Self> {
        let (rank, ranks) = (from.small()?, from.small()?);
        Some(Self { rank, ranks, instance: from.array()?, address: from.address()? })
    }
}

impl Whole for Hello {
    fn to_bytes(&self) -> Vec<u8> {
        let mut to = Writer::default();
        match self {
            Self::Register(registration) => registration.write(to.number(0)),
            Self::Edge { from, to: child, ranks, instance, seat } => {
                to.number(1).number(u64::from(*from)).number(u64::from(*child)).number(u64::from(*ranks));
                to.bytes(instance).seat(seat);
            }
            Self::Status { rank, trouble } => {
                to.number(2).number(u64::from(*rank)).text(trouble);
            }
        }
        to.0
    }

    fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let mut from = Reader(bytes);
        let hello = match from.byte()? {
            0 => Self::Register(Registration::read(&mut from)?),
            1 => {
                let (rank, to, ranks) = (from.small()?, from.small()?, from.small()?);
                Self::Edge { from: rank, to, ranks, instance: from.array()?, seat: from.seat()? }
            }
            2 => Self::Status { rank: from.small()?, trouble: from.text()? },
            _ => return None,
        };
        from.0.is_empty().then_some(hello)
    }
}

/// The answer to a [`Hello`].
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Answer {
    /// The rank is registered.
    Welcome,
    /// The edge is there.
    Edge(Seat),
    /// Another process has this rank already.
    Duplicate,
    /// The job has this many ranks.
    Ranks(u32),
    /// Nothing that this rank was waiting for.
    Unexpected,
    /// Who has not registered yet: the first of them, and how many; and what somebody has trouble with.
    Status { missing: Vec<u32>, count: u32, failed: bool, trouble: String },
}

impl Whole for Answer {
    fn to_bytes(&self) -> Vec<u8> {
        let mut to = Writer::default();
        match self {
            Self::Welcome => to.number(0),
            Self::Duplicate => to.number(1),
            Self::Ranks(ranks) => to.number(2).number(u64::from(*ranks)),
            Self::Unexpected => to.number(3),
            Self::Status { missing, count, failed, trouble } => {
                to.number(4).ranks(missing).number(u64::from(*count)).number(u64::from(*failed)).text(trouble)
            }
            Self::Edge(seat) => to.number(5).seat(seat),
        };
        to.0
    }

    fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let mut from = Reader(bytes);
        let answer = match from.byte()? {
            0 => Self::Welcome,
            1 => Self::Duplicate,
            2 => Self::Ranks(from.small()?),
            3 => Self::Unexpected,
            4 => {
                let (missing, count) = (from.ranks()?, from.small()?);
                let failed = from.number().filter(|&failed| failed < 2)? == 1;
                Self::Status { missing, count, failed, trouble: from.text()? }
            }
            5 => Self::Edge(from.seat()?),
            _ => return None,
        };
        from.0.is_empty().then_some(answer)
    }
}

/// What a rank gives to all, at the meeting with this number on this channel.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(super) struct Round {
    pub(super) channel: u64,
    pub(super) number: u64,
}

/// What goes along an edge. Several of them may be in one frame.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Message {
    /// Nothing: somebody is there.
    Ping,
    /// The next piece of what `rank` gives.
    Part { round: Round, rank: u32, last: bool, bytes: Arc<[u8]> },
    /// `rank` posted a fault on the board of a channel, with what it knows of the cause.
    Fault { channel: u64, rank: u32, fault: Fault, cause: String },
    /// `rank` has left, or was lost, which `by` noticed.
    Gone { rank: u32, by: u32, cause: LossCause },
    /// `rank` ended all meetings.
    Abort { rank: u32 },
    /// Down the tree: a rank below is there.
    Registered(Registration),
    /// While all join: a rank gives up, as these, and so many in all, did not come.
    Missing { ranks: Vec<u32>, count: u32, trouble: String },
}

impl Message {
    /// Appends it. It has at most [`PIECE`] bytes and a bit.
    pub(super) fn write(&self, bytes: &mut Vec<u8>) {
        let mut to = Writer(std::mem::take(bytes));
        match self {
            Self::Ping => {
                to.number(0);
            }
            Self::Part { round, rank, last, bytes } => {
                to.number(1 + u64::from(*last)).number(round.channel).number(round.number);
                to.number(u64::from(*rank)).bytes(bytes);
            }
            Self::Fault { channel, rank, fault, cause } => {
                to.number(3).number(*channel).number(u64::from(*rank));
                for word in fault.to_words() {
                    to.number(word);
                }
                to.text(cause);
            }
            Self::Gone { rank, by, cause } => {
                to.number(4).number(u64::from(*rank)).number(u64::from(*by)).number(cause.code());
                match cause {
                    LossCause::Left | LossCause::Closed => {}
                    LossCause::Silent { ms } => drop(to.number(*ms)),
                    LossCause::Failed { reason } => drop(to.text(reason)),
                }
            }
            Self::Abort { rank } => {
                to.number(6).number(u64::from(*rank));
            }
            Self::Registered(registration) => registration.write(to.number(7)),
            Self::Missing { ranks, count, trouble } => {
                to.number(8).ranks(ranks).number(u64::from(*count)).text(trouble);
            }
        }
        *bytes = to.0;
    }

    /// Whether a frame has nothing but a [`Ping`](Self::Ping).
    pub(super) fn is_ping(frame: &[u8]) -> bool {
        frame == [0]
    }

    /// The next of a frame; `None` if it is malformed.
    pub(super) fn read(from: &mut Reader<'_>) -> Option<Self> {
        Some(match from.byte()? {
            0 => Self::Ping,
            tag @ (1 | 2) => {
                let round = Round { channel: from.number()?, number: from.number()? };
                let (rank, bytes) = (from.small()?, from.bytes().filter(|bytes| bytes.len() <= PIECE)?);
                Self::Part { round, rank, last: tag == 2, bytes: bytes.into() }
            }
            3 => {
                let (channel, rank) = (from.number()?, from.small()?);
                let words = [from.number()?, from.number()?, from.number()?, from.number()?];
                Self::Fault { channel, rank, fault: Fault::read(words), cause: from.text()? }
            }
            4 => {
                let (rank, by) = (from.small()?, from.small()?);
                let cause = match from.number()? {
                    LossCause::LEFT => LossCause::Left,
                    LossCause::CLOSED => LossCause::Closed,
                    LossCause::SILENT => LossCause::Silent { ms: from.number()? },
                    LossCause::FAILED => LossCause::Failed { reason: from.text()? },
                    _ => return None,
                };
                Self::Gone { rank, by, cause }
            }
            6 => Self::Abort { rank: from.small()? },
            7 => Self::Registered(Registration::read(from)?),
            8 => Self::Missing { ranks: from.ranks()?, count: from.small()?, trouble: from.text()? },
            _ => return None,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use gin_abi::{FaultKind, Operation};
    use proptest::prelude::*;

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
        ]
    }

    fn answer() -> impl Strategy<Value = Answer> {
        prop_oneof![
            Just(Answer::Welcome),
            seat().prop_map(Answer::Edge),
            Just(Answer::Duplicate),
            Just(Answer::Unexpected),
            any::<u32>().prop_map(Answer::Ranks),
            (prop::collection::vec(any::<u32>(), 0..50), any::<(u32, bool)>(), ".{0,40}")
                .prop_map(|(missing, (count, failed), trouble)| Answer::Status { missing, count, failed, trouble }),
        ]
    }

    fn fault() -> impl Strategy<Value = Fault> {
        let kind = prop::sample::select(FaultKind::ALL);
        let operation = prop::sample::select(Operation::ALL);
        (kind, operation, any::<(u32, u32, u64, u64)>()).prop_map(
            |(kind, operation, (context, peer, expected, seen))| {
                Fault::new(kind, operation).context(context).peer(peer).values(expected, seen)
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

    fn message() -> impl Strategy<Value = Message> {
        prop_oneof![
            Just(Message::Ping),
            (any::<(u64, u64, u32, bool)>(), prop::collection::vec(any::<u8>(), 0..300)).prop_map(
                |((channel, number, rank, last), bytes)| Message::Part {
                    round: Round { channel, number },
                    rank,
                    last,
                    bytes: bytes.into()
                }
            ),
            (any::<(u64, u32)>(), fault(), ".{0,40}").prop_map(|((channel, rank), fault, cause)| Message::Fault {
                channel,
                rank,
                fault,
                cause
            }),
            (any::<(u32, u32)>(), cause()).prop_map(|((rank, by), cause)| Message::Gone { rank, by, cause }),
            any::<u32>().prop_map(|rank| Message::Abort { rank }),
            registration().prop_map(Message::Registered),
            (prop::collection::vec(any::<u32>(), 0..50), any::<u32>(), ".{0,40}")
                .prop_map(|(ranks, count, trouble)| Message::Missing { ranks, count, trouble }),
        ]
    }

    /// Reads a frame as the reader of an edge does.
    fn frame(bytes: &[u8]) -> Option<Vec<Message>> {
        let mut reader = Reader(bytes);
        let mut all = Vec::new();
        while !reader.0.is_empty() {
            all.push(Message::read(&mut reader)?);
        }
        Some(all)
    }

    proptest! {
        #[test]
        fn greetings_and_answers_survive_being_sent(hello in hello(), answer in answer()) {
            prop_assert_eq!(Hello::from_bytes(&hello.to_bytes()), Some(hello));
            prop_assert_eq!(Answer::from_bytes(&answer.to_bytes()), Some(answer));
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
                if let Some(hello) = Hello::from_bytes(&bytes) {
                    prop_assert!(hello.to_bytes().len() <= bytes.len());
                }
                if let Some(answer) = Answer::from_bytes(&bytes) {
                    prop_assert!(answer.to_bytes().len() <= bytes.len());
                }
                let held = |message: &Message| match message {
                    Message::Part { bytes, .. } => bytes.len(),
                    Message::Missing { ranks, trouble, .. } => ranks.len() + trouble.len(),
                    Message::Fault { cause, .. } => cause.len(),
                    Message::Gone { cause: LossCause::Failed { reason }, .. } => reason.len(),
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
                // A fault's code that is not known is read as another fault: the only two forms of one value.
                if !matches!(message, Message::Fault { .. }) {
                    prop_assert_ne!(frame(&bytes), Some(vec![message]));
                }
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
    fn lengths_that_are_not_there_allocate_nothing() {
        let huge = [0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x01];
        assert_eq!(Reader(&huge).number(), Some(u64::MAX));
        assert_eq!(Reader(&huge).bytes(), None);
        assert_eq!(Reader(&huge).ranks(), None);
        assert_eq!(Message::read(&mut Reader(&[&[1, 0, 0, 0][..], &huge].concat())), None);
        // Longer than any number, and a number in a longer form than it needs.
        assert_eq!(Reader(&[0xff; 11]).number(), None);
        assert_eq!(Reader(&[0x80, 0x00]).number(), None);
    }

    #[test]
    fn a_piece_with_its_head_fits_into_a_frame_and_long_lists_are_cut() {
        let round = Round { channel: u64::MAX, number: u64::MAX };
        let mut bytes = Vec::new();
        Message::Part { round, rank: u32::MAX, last: true, bytes: vec![0; PIECE].into() }.write(&mut bytes);
        assert!(bytes.len() <= FRAME);
        bytes.clear();
        let ranks = vec![u32::MAX; 100_000];
        Message::Missing { ranks, count: 100_000, trouble: "é".repeat(1000) }.write(&mut bytes);
        assert!(bytes.len() <= FRAME);
        let read = frame(&bytes).unwrap();
        assert!(matches!(&read[..], [Message::Missing { ranks, count: 100_000, .. }] if ranks.len() == LISTED));
    }
}
