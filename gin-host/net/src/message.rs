// SPDX-License-Identifier: MIT OR Apache-2.0
//! Messages behind the data that they cover: signals, which the receiver's proxy raises, and notices.

use crate::{Notice, Request};
use gin_abi::{RemoteSignal, SignalTarget};

/// Bytes of a message: its kind, a number of 4 bytes, and three of 8.
pub(crate) const BYTES: usize = 32;

const ID: u32 = 1;
const ADDRESS: u32 = 2;
const ARRIVED: u32 = 3;
const WANTED: u32 = 4;
const READY: u32 = 5;
const ALIVE: u32 = 6;

/// A message.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Message {
    /// Adds an amount to a signal.
    Signal(SignalTarget, u64),
    /// Notifies the peer's endpoint.
    Notice(Notice),
}

/// Returns the message of a request's signal or notice.
pub(crate) fn of(request: &Request) -> [u8; BYTES] {
    match (&request.signal, &request.notice) {
        (Some(RemoteSignal { target, amount, .. }), _) => Message::Signal(*target, *amount).to_bytes(),
        (None, Some(notice)) => Message::Notice(*notice).to_bytes(),
        (None, None) => [0; BYTES],
    }
}

impl Message {
    fn to_bytes(self) -> [u8; BYTES] {
        let (kind, number, words) = match self {
            Self::Signal(SignalTarget::Id(id), amount) => (ID, id, [0, amount, 0]),
            Self::Signal(SignalTarget::Address { window, offset }, amount) => (ADDRESS, window, [offset, amount, 0]),
            Self::Notice(Notice::Arrived { window, offset, bytes, tag }) => (ARRIVED, window, [offset, bytes, tag]),
            Self::Notice(Notice::Wanted { window, offset, bytes, tag }) => (WANTED, window, [offset, bytes, tag]),
            Self::Notice(Notice::Ready { tag, found }) => (READY, u32::from(found), [0, 0, tag]),
            Self::Notice(Notice::Alive) => (ALIVE, 0, [0; 3]),
        };
        let mut bytes = [0; BYTES];
        bytes[..4].copy_from_slice(&kind.to_le_bytes());
        bytes[4..8].copy_from_slice(&number.to_le_bytes());
        for (place, word) in bytes[8..].chunks_exact_mut(8).zip(words) {
            place.copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }

    /// Parses a message; `None` if the bytes are not one.
    pub(crate) fn from_bytes(bytes: &[u8; BYTES]) -> Option<Self> {
        let word = |at: usize| bytes[at..].first_chunk().map(|word| u64::from_le_bytes(*word));
        let (first, words) = (word(0)?, [word(8)?, word(16)?, word(24)?]);
        let (kind, number) = (first as u32, (first >> 32) as u32);
        Some(match (kind, number, words) {
            (ID, id, [0, amount, 0]) => Self::Signal(SignalTarget::Id(id), amount),
            (ADDRESS, window, [offset, amount, 0]) => Self::Signal(SignalTarget::Address { window, offset }, amount),
            (ARRIVED, window, [offset, bytes, tag]) => Self::Notice(Notice::Arrived { window, offset, bytes, tag }),
            (WANTED, window, [offset, bytes, tag]) => Self::Notice(Notice::Wanted { window, offset, bytes, tag }),
            (READY, found @ (0 | 1), [0, 0, tag]) => Self::Notice(Notice::Ready { tag, found: found == 1 }),
            (ALIVE, 0, [0, 0, 0]) => Self::Notice(Notice::Alive),
            _ => return None,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn any_message() -> impl Strategy<Value = Message> {
        let notice = prop_oneof![
            any::<(u32, u64, u64, u64)>().prop_map(|(window, offset, bytes, tag)| Notice::Arrived {
                window,
                offset,
                bytes,
                tag
            }),
            any::<(u32, u64, u64, u64)>().prop_map(|(window, offset, bytes, tag)| Notice::Wanted {
                window,
                offset,
                bytes,
                tag
            }),
            any::<(u64, bool)>().prop_map(|(tag, found)| Notice::Ready { tag, found }),
            Just(Notice::Alive),
        ];
        prop_oneof![
            any::<(u32, u64)>().prop_map(|(id, amount)| Message::Signal(SignalTarget::Id(id), amount)),
            any::<(u32, u64, u64)>().prop_map(|(window, offset, amount)| {
                Message::Signal(SignalTarget::Address { window, offset }, amount)
            }),
            notice.prop_map(Message::Notice),
        ]
    }

    proptest! {
        #[test]
        fn a_parsed_message_equals_the_sent_one(message in any_message()) {
            prop_assert_eq!(Message::from_bytes(&message.to_bytes()), Some(message));
        }

        #[test]
        fn other_bytes_are_no_message_or_the_same_one(bytes: [u8; BYTES], kind in 0u32..8, zeros in 0usize..25) {
            let mut bytes = bytes;
            bytes[..4].copy_from_slice(&kind.to_le_bytes());
            bytes[BYTES - zeros..].fill(0);
            if let Some(message) = Message::from_bytes(&bytes) {
                prop_assert_eq!(message.to_bytes(), bytes);
            }
        }
    }
}
