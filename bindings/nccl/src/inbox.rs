// SPDX-License-Identifier: MIT OR Apache-2.0
//! Signals between processes.
//!
//! A sender cannot write the words of signals itself: NCCL allocates a table of signals in no file, and words of
//! windows may change by kernels of the receiver. So a signal is a message in the receiver's inbox, a ring in shared
//! memory, and the receiver's thread of NCCL has a lane add to the word.
//!
//! Claim: a signal is seen after all earlier puts and signals of its sender. Because:
//! 1. Each lane of the sender that has transfers in flight before a signal counts up in the inbox, behind their bytes.
//!    The signal's message has the counts of all lanes.
//! 2. The receiver takes messages in order, and one lane writes all their words in order. Before a write the GPU waits
//!    until the inbox has the message's counts.
//!
//! A sender places a message in the ring after the work before it has its place in a lane. So a lane waits only for
//! work that was placed earlier, on any GPU, and waits form no circle.
//!
//! A small value with a signal that follows nothing is part of the message. The receiver's lane writes both at once.

use crate::failure::Failure;
use crate::page::Page;
use gin_gpu::GpuError;
use gin_gpu::copier::Ticket;
use gin_gpu::lane::{Lane, Mark, Value};
use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};

/// The lanes of a pair: on the rank's GPU and on the peer's GPU in turn. For a peer in another process all are on the
/// rank's GPU.
///
/// Large transfers take turns, so that one copy engine copies while another one is between two copies. With two lanes
/// puts of 4 MiB between two H100s reached 0.87 of the link, with four 0.94.
pub(crate) const LANES: usize = 4;

/// The words of a cache line.
const LINE: u64 = 8;

/// The words of a message, in whole lines.
const MESSAGE: u64 = 2 * LINE;

/// The messages of an inbox.
const SLOTS: u64 = 128;

/// The words of an inbox: a line for each of `published`, `consumed` and the counts of lanes, and the messages.
pub(crate) const WORDS: u64 = (2 + LANES as u64) * LINE + SLOTS * MESSAGE;

/// The maximum number of signals in flight on a lane. Thousands would fill the driver's queue, and a call of the driver
/// would wait for them.
const IN_FLIGHT: u64 = 64;

/// A signal for a rank of another process, and the value before it. The regions are numbers on the receiver.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Message {
    pub(crate) region: u64,
    pub(crate) offset: u64,
    pub(crate) amount: u64,
    /// The counts of the sender's lanes before the signal.
    pub(crate) counts: [u64; LANES],
    /// The place of the value.
    pub(crate) to: (u64, u64),
    /// The bytes of the value, at most 8; 0 without one.
    pub(crate) bytes: usize,
    pub(crate) value: [u8; 8],
}

impl Message {
    fn words(self) -> [u64; MESSAGE as usize] {
        let (region, offset) = self.to;
        let value = u64::from_le_bytes(self.value);
        let mut words = [0; MESSAGE as usize];
        words[..6].copy_from_slice(&[
            self.region,
            self.offset,
            self.amount,
            region << 8 | self.bytes as u64,
            offset,
            value,
        ]);
        words[6..][..LANES].copy_from_slice(&self.counts);
        words
    }

    fn read(words: [u64; MESSAGE as usize]) -> Self {
        let [region, offset, amount, to, to_offset, value, ..] = words;
        Self {
            region,
            offset,
            amount,
            counts: std::array::from_fn(|lane| words[6 + lane]),
            to: (to >> 8, to_offset),
            bytes: (to as u8).min(8).into(),
            value: value.to_le_bytes(),
        }
    }
}

/// The ring of messages of one sender, in the board of the receiver. The sender writes `published` and the counts, the
/// receiver `consumed`. Both are numbers of messages.
#[derive(Debug)]
pub(crate) struct Ring {
    page: Page,
    start: u64,
}

impl Ring {
    pub(crate) fn new(page: &Page, first: u64, sender: usize) -> Self {
        Self { page: page.clone(), start: first + sender as u64 * WORDS }
    }

    fn published(&self) -> &AtomicU64 {
        self.page.word(self.start)
    }

    fn consumed(&self) -> &AtomicU64 {
        self.page.word(self.start + LINE)
    }

    /// Returns the number of the word with the count of a lane.
    fn count(&self, lane: usize) -> u64 {
        self.start + (2 + lane as u64) * LINE
    }

    fn slot(&self, number: u64) -> [&AtomicU64; MESSAGE as usize] {
        let first = self.start + (2 + LANES as u64) * LINE + number % SLOTS * MESSAGE;
        std::array::from_fn(|index| self.page.word(first + index as u64))
    }
}

/// The sender's end of an inbox.
#[derive(Debug)]
pub(crate) struct Post {
    ring: Ring,
    /// The count of each lane, and the end with which the lane has written it.
    counts: [u64; LANES],
    ends: [Ticket; LANES],
    /// The messages in the ring so far.
    published: u64,
    /// The messages that the receiver has consumed, when the ring was last full.
    consumed: u64,
    /// The messages for which the ring has no room.
    backlog: VecDeque<Message>,
}

impl Post {
    pub(crate) fn new(ring: Ring) -> Self {
        let backlog = VecDeque::with_capacity(SLOTS as usize);
        Self { ring, counts: [0; LANES], ends: [0; LANES], published: 0, consumed: 0, backlog }
    }

    /// Returns the write by which a lane counts up.
    pub(crate) fn count(&self, lane: usize) -> Value {
        Value::Word { to: self.ring.page.address(self.ring.count(lane)), value: self.counts[lane] + 1 }
    }

    /// Notes the end of a lane that has counted up.
    pub(crate) fn counted(&mut self, lane: usize, end: Ticket) {
        self.counts[lane] += 1;
        self.ends[lane] = end;
    }

    /// Returns whether a lane has started work since it has counted up.
    pub(crate) fn is_behind(&self, lane: usize, end: Ticket) -> bool {
        self.ends[lane] != end
    }

    /// Sends a message. Returns whether it has to wait for room.
    pub(crate) fn send(&mut self, message: Message) -> bool {
        self.backlog.push_back(Message { counts: self.counts, ..message });
        self.drain()
    }

    /// Moves messages to the ring while it has room. Returns whether some are left.
    pub(crate) fn drain(&mut self) -> bool {
        while let Some(message) = self.backlog.front() {
            if self.published - self.consumed == SLOTS {
                self.consumed = self.ring.consumed().load(Ordering::Acquire);
                if self.published - self.consumed == SLOTS {
                    return true;
                }
            }
            for (slot, word) in self.ring.slot(self.published).into_iter().zip(message.words()) {
                slot.store(word, Ordering::Relaxed);
            }
            self.published += 1;
            self.ring.published().store(self.published, Ordering::Release);
            self.backlog.pop_front();
        }
        false
    }
}

/// The receiver's end of an inbox, and the lane that writes the words of its signals.
#[derive(Debug)]
pub(crate) struct Inbound {
    pub(crate) sender: usize,
    ring: Ring,
    counts: [Mark; LANES],
    consumed: u64,
    pub(crate) lane: Box<dyn Lane>,
    /// The last end of the lane.
    pub(crate) end: Ticket,
    is_broken: bool,
}

impl Inbound {
    pub(crate) fn new(sender: usize, ring: Ring, lane: Box<dyn Lane>) -> Self {
        // Safety: the page has the word, the sender writes larger numbers only, and all accesses are atomic.
        let count = |lane| unsafe { Mark::new(ring.page.address(ring.count(lane)), ring.page.keep()) };
        Self { sender, counts: std::array::from_fn(count), ring, consumed: 0, lane, end: 0, is_broken: false }
    }

    fn is_in_flight(&self) -> bool {
        !self.lane.mark().has_reached(self.end)
    }

    /// Lets the lane go on if it waits for a sender that has ended.
    pub(crate) fn release(&self, has_ended: impl FnOnce() -> bool) {
        if self.is_in_flight() && has_ended() {
            // The largest number: GPUs compare the sign of a difference.
            (0..LANES).for_each(|lane| self.ring.page.store(self.ring.count(lane), i64::MAX.cast_unsigned()));
        }
    }

    /// Checks that no write in flight has failed.
    pub(crate) fn check(&self) -> Result<(), GpuError> {
        if self.is_in_flight() { self.lane.check() } else { Ok(()) }
    }

    /// Raises the signals in the inbox by `raise`, which returns the end of the last write if there was one.
    pub(crate) fn take(
        &mut self,
        mut raise: impl FnMut(&mut dyn Lane, Message) -> Result<Option<Ticket>, Failure>,
    ) -> Result<(), Failure> {
        let published = self.ring.published().load(Ordering::Acquire);
        while self.consumed < published && !self.is_broken {
            if self.end >= self.lane.mark().reached() + IN_FLIGHT {
                break;
            }
            let message = Message::read(self.ring.slot(self.consumed).map(|word| word.load(Ordering::Relaxed)));
            let mut late = self.counts.iter().zip(message.counts).filter(|(mark, count)| !mark.has_reached(*count));
            let waited = late.try_for_each(|(mark, count)| self.lane.wait(mark, count)).map_err(Failure::cuda);
            let raised = waited.and_then(|()| raise(&mut *self.lane, message));
            self.is_broken = raised.is_err();
            if let Some(end) = raised? {
                self.end = end;
            }
            self.consumed += 1;
            self.ring.consumed().store(self.consumed, Ordering::Release);
        }
        Ok(())
    }
}
