// SPDX-License-Identifier: MIT OR Apache-2.0
//! The requests and messages of a context with a peer, in their order.

use crate::message::{self, Message};
use crate::{NetError, Request};
use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// Bytes of a message between endpoints: context and sender, a number, the receiver's token, and the message.
pub(super) const BYTES: usize = 24 + message::BYTES;

/// A message between endpoints.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Envelope {
    pub(super) context: u32,
    /// Rank of the sender.
    pub(super) from: u32,
    /// Number of earlier messages of the context from this sender to this receiver.
    pub(super) number: u64,
    /// Random number from the receiver's key, which no stranger knows.
    pub(super) token: u64,
    pub(super) message: [u8; message::BYTES],
}

impl Envelope {
    pub(super) fn to_bytes(self) -> [u8; BYTES] {
        let mut bytes = [0; BYTES];
        bytes[..4].copy_from_slice(&self.context.to_le_bytes());
        bytes[4..8].copy_from_slice(&self.from.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.number.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.token.to_le_bytes());
        bytes[24..].copy_from_slice(&self.message);
        bytes
    }

    /// Parses a message; `None` if it is not as long as one.
    pub(super) fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let bytes: &[u8; BYTES] = bytes.try_into().ok()?;
        let word = |at: usize| bytes[at..].first_chunk().map(|word| u64::from_le_bytes(*word));
        let first = word(0)?;
        let (context, from) = (first as u32, (first >> 32) as u32);
        Some(Self { context, from, number: word(8)?, token: word(16)?, message: *bytes[24..].first_chunk()? })
    }
}

/// The requests of a context to a peer, and the messages from it.
#[derive(Default, Debug)]
pub(super) struct Connection {
    pub(super) context: u32,
    pub(super) peer: u32,
    /// Requests that are not posted whole.
    pub(super) backlog: VecDeque<Request>,
    /// The data of the first request of the backlog is posted, but not its message.
    pub(super) moved: bool,
    pub(super) order: Order,
    /// Number of messages sent.
    pub(super) sent: u64,
    /// The window that the last put went to, if it is in a GPU of the peer.
    pub(super) put_to: Option<u32>,
    /// It is in the list of busy connections.
    pub(super) listed: bool,
    pub(super) arrivals: Arrivals,
}

/// The order of a connection's operations. A request with a message completes only after all earlier transfers, and
/// fails if one of them has failed. So no signal that is reported as raised covers data that did not arrive.
#[derive(Default, Debug)]
pub(super) struct Order {
    /// Number of the next operation.
    next: u64,
    /// Numbers of outstanding writes and reads.
    transfers: BTreeSet<u64>,
    /// Number of the first operation that failed.
    broken: Option<u64>,
    /// Errors of transfers whose request has a message, by request.
    errors: Vec<(u64, NetError)>,
    /// Messages that the provider has taken: number and request.
    taken: Vec<(u64, u64)>,
}

impl Order {
    /// Returns the number of an operation that has been posted.
    pub(super) fn post(&mut self, is_transfer: bool) -> u64 {
        let number = self.next;
        self.next += 1;
        if is_transfer {
            self.transfers.insert(number);
        }
        number
    }

    /// Returns whether a later message would cover an operation that failed.
    pub(super) fn is_broken(&self) -> bool {
        self.broken.is_some()
    }

    /// Returns whether transfers are outstanding.
    pub(super) fn is_moving(&self) -> bool {
        !self.transfers.is_empty()
    }

    /// Ends a transfer.
    pub(super) fn transferred(&mut self, number: u64) {
        self.transfers.remove(&number);
    }

    /// Records that an operation failed.
    pub(super) fn fail(&mut self, number: u64) {
        self.broken = Some(self.broken.map_or(number, |broken| broken.min(number)));
    }

    /// Records the error of a transfer whose request has a message.
    pub(super) fn keep(&mut self, id: u64, error: NetError) {
        self.errors.push((id, error));
    }

    /// Returns the error of the transfer of a request, if it failed.
    pub(super) fn error(&mut self, id: u64) -> Option<NetError> {
        let place = self.errors.iter().position(|(other, _)| *other == id)?;
        Some(self.errors.swap_remove(place).1)
    }

    /// Records that the provider has taken a request's message.
    pub(super) fn take(&mut self, number: u64, id: u64) {
        self.taken.push((number, id));
    }

    /// Ends the requests whose messages have been taken and whose earlier transfers have all ended.
    pub(super) fn release(&mut self, peer: u32, mut end: impl FnMut(u64, Result<(), NetError>)) {
        let first = self.transfers.first().copied().unwrap_or(u64::MAX);
        let (free, taken) = std::mem::take(&mut self.taken).into_iter().partition(|(number, _)| *number < first);
        self.taken = taken;
        let free: Vec<(u64, u64)> = free;
        for (number, id) in free {
            let behind = || self.broken.is_some_and(|broken| broken < number).then(|| NetError::behind(peer));
            let behind = behind();
            end(id, self.error(id).or(behind).map_or(Ok(()), Err));
        }
    }

    /// Forgets all operations. Returns the requests whose messages have been taken.
    pub(super) fn lose(&mut self) -> impl Iterator<Item = u64> {
        let taken = std::mem::take(&mut self.taken);
        *self = Self { next: self.next, broken: Some(0), ..Self::default() };
        taken.into_iter().map(|(_, id)| id)
    }
}

/// The messages that arrive, which a provider may reorder.
#[derive(Default, Debug)]
pub(super) struct Arrivals {
    /// Number of messages taken.
    taken: u64,
    /// Messages that arrived before an earlier one, by number.
    early: BTreeMap<u64, Message>,
}

impl Arrivals {
    /// Adds a message. Returns false if the sender broke the protocol: it has sent the number already.
    pub(super) fn add(&mut self, number: u64, message: Message) -> bool {
        number >= self.taken && self.early.insert(number, message).is_none()
    }

    /// Takes the next message in the order of sending, if it has arrived.
    pub(super) fn next(&mut self) -> Option<Message> {
        let message = self.early.remove(&self.taken)?;
        self.taken += 1;
        Some(message)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use gin_abi::SignalTarget;
    use proptest::prelude::*;

    #[test]
    fn a_request_with_a_message_ends_after_earlier_transfers_and_fails_with_one_of_them() {
        let mut order = Order::default();
        let [first, second] = [order.post(true), order.post(true)];
        let message = order.post(false);
        let later = order.post(true);
        let mut ended = Vec::new();
        order.take(message, 7);
        order.transferred(second);
        order.release(1, |id, outcome| ended.push((id, outcome)));
        assert_eq!(ended, [], "the first transfer is outstanding");
        order.transferred(first);
        order.fail(later);
        order.release(1, |id, outcome| ended.push((id, outcome)));
        assert_eq!(ended, [(7, Ok(()))], "the failed transfer is a later one");
        ended.clear();
        order.transferred(later);
        let behind = order.post(false);
        order.take(behind, 8);
        order.release(1, |id, outcome| ended.push((id, outcome)));
        assert_eq!(ended, [(8, Err(NetError::behind(1)))]);
    }

    proptest! {
        #[test]
        fn a_parsed_envelope_equals_the_sent_one(
            context: u32, from: u32, number: u64, token: u64, message: [u8; message::BYTES],
        ) {
            let envelope = Envelope { context, from, number, token, message };
            let bytes = envelope.to_bytes();
            prop_assert_eq!(Envelope::from_bytes(&bytes), Some(envelope));
            prop_assert_eq!(Envelope::from_bytes(&bytes[1..]), None);
        }

        #[test]
        fn messages_are_taken_in_the_order_of_sending_however_they_arrive(order in Just((0..20u64).collect::<Vec<_>>()).prop_shuffle()) {
            let mut arrivals = Arrivals::default();
            let mut taken = Vec::new();
            for &number in &order {
                prop_assert!(arrivals.add(number, Message::Signal(SignalTarget::Id(0), number)));
                prop_assert!(!arrivals.add(number, Message::Signal(SignalTarget::Id(0), number)));
                taken.extend(std::iter::from_fn(|| arrivals.next()));
            }
            let expected: Vec<_> = (0..20).map(|number| Message::Signal(SignalTarget::Id(0), number)).collect();
            prop_assert_eq!(taken, expected);
            prop_assert!(!arrivals.add(3, Message::Signal(SignalTarget::Id(0), 3)));
        }
    }
}
