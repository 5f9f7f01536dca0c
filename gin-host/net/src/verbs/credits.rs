// SPDX-License-Identifier: MIT OR Apache-2.0
//! Credits limit how many signals may be outstanding, so that a receive buffer waits for each.
//!
//! The receiver has `depth` buffers for a connection. The sender counts the signals that it sends. The receiver counts
//! the signals that it has handled, with their buffers posted again. Whenever at least half of the buffers are not
//! returned yet, the receiver writes its count into a word of the sender's memory. That is an RDMA write, which needs
//! no buffer there. Both counts wrap.
//!
//! No rank waits for ever as long as both NICs and both proxies work:
//! - A sender without credit has `depth` signals whose credits were not returned. They all arrive, because a buffer
//!   waits for each.
//! - The receiver handles them whether or not it has credit itself. Then at least half of the credits are due for
//!   return.
//! - The write that returns them needs room in the receiver's send queue. NICs alone complete the entries there,
//!   because none of them waits for a buffer.
//!
//! The NIC may not write 8 bytes at once (Soft-RoCE copies them). So the word holds the count and its complement, and
//! is valid only if they match.

/// The sender's side.
#[derive(Clone, Copy, Debug)]
pub(super) struct Credits {
    depth: u32,
    sent: u32,
    returned: u32,
}

impl Credits {
    /// Creates credits for a receiver with `depth` buffers.
    pub(super) fn new(depth: u32) -> Self {
        Self { depth, sent: 0, returned: 0 }
    }

    /// Returns whether a signal may be sent.
    pub(super) fn is_there(&self) -> bool {
        self.sent.wrapping_sub(self.returned) < self.depth
    }

    /// Counts a signal that is sent.
    pub(super) fn take(&mut self) {
        self.sent = self.sent.wrapping_add(1);
    }

    /// Reads the word. Ignores an impossible value until the next look.
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
    published: u32,
}

impl Returns {
    /// Creates the count for `depth` buffers, at least two.
    pub(super) fn new(depth: u32) -> Self {
        Self { depth, received: 0, published: 0 }
    }

    /// Counts a signal that was handled, with its buffer posted again.
    pub(super) fn receive(&mut self) {
        self.received = self.received.wrapping_add(1);
    }

    /// Returns whether the credits are due for return.
    pub(super) fn is_due(&self) -> bool {
        self.received.wrapping_sub(self.published) >= self.depth / 2
    }

    /// Returns the word to write to the sender, and takes it as published.
    pub(super) fn publish(&mut self) -> u64 {
        self.published = self.received;
        word(self.received)
    }
}

/// Returns the word for a number of signals.
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
            let mut returns = Returns { depth, received: start, published: start };
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
                    2 if on_wire.is_none() && returns.is_due() => on_wire = Some(returns.publish()),
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
            // From any state, fair turns let the sender send more and more.
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
