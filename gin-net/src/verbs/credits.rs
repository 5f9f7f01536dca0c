// SPDX-License-Identifier: MIT OR Apache-2.0
//! How many signals may be on their way, so that a receive buffer waits for each.
//!
//! The receiver has `depth` buffers for a connection. The sender counts what it sends; the receiver counts what it has
//! dealt with, buffers posted again, and writes that number into a word of the sender's memory (an RDMA write, which
//! needs no buffer there) whenever half of the buffers, or more, have not been told of. Both numbers wrap.
//!
//! Nobody waits for ever as long as both NICs and both proxies work. A sender without credit has `depth` signals that it
//! has not been told of. They all arrive, since a buffer waits for each. The receiver deals with them whether or not it
//! has credit itself, and then there are at least half of them to tell of. The write that tells needs room in the
//! receiver's send queue; what is in there is ended by NICs alone, as none of it waits for a buffer.
//!
//! The NIC may not write 8 bytes at once (Soft-RoCE copies them), so the word holds the number and its complement, and
//! counts only where they match.

/// The sender's side.
#[derive(Clone, Copy, Debug)]
pub(super) struct Credits {
    depth: u32,
    sent: u32,
    returned: u32,
}

impl Credits {
    /// The receiver has so many buffers.
    pub(super) fn new(depth: u32) -> Self {
        Self { depth, sent: 0, returned: 0 }
    }

    /// Whether a signal may be sent.
    pub(super) fn is_there(&self) -> bool {
        self.sent.wrapping_sub(self.returned) < self.depth
    }

    /// A signal is sent.
    pub(super) fn take(&mut self) {
        self.sent = self.sent.wrapping_add(1);
    }

    /// Takes the word as it is now. What cannot be right is left for the next look.
    pub(super) fn look(&mut self, word: u64) {
        let (number, complement) = (word as u32, (word >> 32) as u32);
        let outstanding = self.sent.wrapping_sub(self.returned);
        if number == !complement && number.wrapping_sub(self.returned) <= outstanding {
            self.returned = number;
        }
    }
}

/// The receiver's side.
#[derive(Clone, Copy, Debug)]
pub(super) struct Returns {
    depth: u32,
    received: u32,
    told: u32,
}

impl Returns {
    /// There are so many buffers, at least two.
    pub(super) fn new(depth: u32) -> Self {
        Self { depth, received: 0, told: 0 }
    }

    /// A signal was dealt with, and its buffer posted again.
    pub(super) fn receive(&mut self) {
        self.received = self.received.wrapping_add(1);
    }

    /// Whether the sender should be told.
    pub(super) fn is_due(&self) -> bool {
        self.received.wrapping_sub(self.told) >= self.depth / 2
    }

    /// The word to be written at the sender, which has then been told.
    pub(super) fn tell(&mut self) -> u64 {
        self.told = self.received;
        word(self.received)
    }
}

/// What the word is for a number of signals.
pub(super) fn word(number: u32) -> u64 {
    u64::from(!number) << 32 | u64::from(number)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn no_signal_is_without_a_buffer_and_the_sender_always_goes_on(
            depth in 2u32..9, start in prop_oneof![Just(0u32), Just(u32::MAX - 5)],
            choices in proptest::collection::vec(0u8..4, 1..300),
        ) {
            let mut credits = Credits { depth, sent: start, returned: start };
            let mut returns = Returns { depth, received: start, told: start };
            let (mut memory, mut under_way, mut on_wire) = (word(start), 0u32, None);
            let mut sent = 0;
            let mut step = |choice: u8| {
                match choice {
                    0 if credits.is_there() => {
                        credits.take();
                        under_way += 1;
                        sent += 1;
                    }
                    1 if under_way > 0 => {
                        under_way -= 1;
                        returns.receive();
                    }
                    2 if on_wire.is_none() && returns.is_due() => on_wire = Some(returns.tell()),
                    3 => {
                        memory = on_wire.take().unwrap_or(memory);
                        credits.look(memory);
                    }
                    _ => {}
                }
                (under_way, sent)
            };
            for choice in choices {
                let (under_way, _) = step(choice);
                prop_assert!(under_way <= depth, "{under_way} signals for {depth} buffers");
            }
            // However it stands now, fair turns let more and more be sent.
            let (_, before) = step(3);
            let mut after = before;
            for _ in 0..4 * depth {
                for choice in 0..4 {
                    after = step(choice).1;
                }
            }
            prop_assert!(after >= before + depth, "{} more", after - before);
        }

        #[test]
        fn half_written_words_change_nothing(old: u32, more in 0u32..1000, bytes in 1usize..8, sent in 0u32..1000) {
            let new = old.wrapping_add(more);
            let (from, to) = (word(old).to_le_bytes(), word(new).to_le_bytes());
            let mut torn = from;
            torn[..bytes].copy_from_slice(&to[..bytes]);
            let mut torn_at_end = to;
            torn_at_end[..bytes].copy_from_slice(&from[..bytes]);
            for torn in [torn, torn_at_end] {
                let mut credits = Credits { depth: 1000, sent: old.wrapping_add(sent.max(more)), returned: old };
                credits.look(u64::from_le_bytes(torn));
                prop_assert!(credits.returned == old || credits.returned == new);
            }
        }

        #[test]
        fn a_peer_cannot_give_more_than_was_sent(depth in 2u32..100, sent in 0u32..100, said: u32) {
            let mut credits = Credits { depth, sent, returned: 0 };
            credits.look(word(said));
            prop_assert!(credits.returned <= sent);
        }
    }
}
