// SPDX-License-Identifier: MIT OR Apache-2.0
//! Queue pairs, completion queues and memory regions, as the engine sees them.
//!
//! Number and slot are the same for queues; a region's slot is its key without the low 8 bits. Slot 0 is never used. An
//! entry whose `live` is false is free.
//!
//! Everything here has the layout of C, as a host and a kernel hand it to each other, which two compilers have built.

use gin_abi::mlx5::command::QpState;
use gin_abi::mlx5::cqe::Syndrome;
use gin_abi::mlx5::wqe::Local;

/// Operations of one queue pair that may be under way at a time.
pub const WINDOW: usize = 16;

/// What a peer, or the NIC itself, may do to a region or by a queue pair.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Rights {
    /// The NIC may write what it reads elsewhere.
    pub local_write: bool,
    /// A peer may read.
    pub remote_read: bool,
    /// A peer may write.
    pub remote_write: bool,
    /// A peer may add.
    pub remote_atomic: bool,
}

/// A memory region.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Region {
    /// It is there.
    pub live: bool,
    /// Its key, for local and remote access alike.
    pub key: u32,
    /// The NIC that it is registered with.
    pub device: u32,
    /// Its protection domain.
    pub domain: u32,
    /// Address that entries use for its first byte.
    pub start: u64,
    /// Where that byte lies.
    pub memory: u64,
    /// Length in bytes.
    pub bytes: u64,
    /// What may be done to it.
    pub rights: Rights,
    /// Writes to it may come into view in any order.
    pub relaxed: bool,
}

/// A completion queue.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct CompletionQueue {
    /// It is there.
    pub live: bool,
    /// Its NIC.
    pub device: u32,
    /// Where the ring lies.
    pub ring: u64,
    /// log2 of the number of slots.
    pub log_size: u32,
    /// All completions go to slot 0.
    pub collapsed: bool,
    /// Where the consumer index lies; 0 if overruns are ignored.
    pub record: u64,
    /// Completions written so far.
    pub produced: u64,
}

/// Stage of an operation that was begun.
#[repr(C, u32)]
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) enum Stage {
    /// The answer is to come at this step; `u64::MAX` for never.
    Pending { due: u64, answer: Answer },
    /// It is done, with so many bytes brought.
    Done { bytes: u32 },
    /// It failed.
    Failed { syndrome: Syndrome, vendor: u8 },
    /// It was given up, since an earlier one failed.
    #[default]
    Flushed,
}

/// What an answer brings.
#[repr(C, u32)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Answer {
    /// That a write has arrived.
    Acknowledged,
    /// What a read asked for, which is taken only now.
    Data { from: gin_abi::mlx5::wqe::Remote, to: Local, bytes: u64 },
    /// The old value of an atomic.
    Old { to: Local, value: u64 },
    /// An error.
    Refused { syndrome: Syndrome, vendor: u8 },
}

/// An operation that was begun.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct Flight {
    pub(crate) operation: u32,
    pub(crate) completion: bool,
    pub(crate) stage: Stage,
}

/// Operations of a queue pair that were begun and are not complete.
#[repr(transparent)]
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Flights([Flight; WINDOW]);

/// A queue pair.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Queue {
    /// It is there.
    pub live: bool,
    /// Its NIC.
    pub device: u32,
    /// Its protection domain.
    pub domain: u32,
    /// Its state; the engine changes it to [`QpState::Error`].
    pub state: QpState,
    /// Its completion queue.
    pub completions: u32,
    /// Where its ring lies.
    pub ring: u64,
    /// log2 of the number of slots; 0 to 15.
    pub log_size: u32,
    /// Where the send half of its doorbell record lies.
    pub record: u64,
    /// What its peer may do.
    pub rights: Rights,
    /// Its entries may wait for completion queues.
    pub master: bool,
    /// The NIC of its peer.
    pub peer_device: u32,
    /// Its peer, once it is ready to receive.
    pub peer: u32,
    /// Number of the first packet that it sends.
    pub first_sent: u32,
    /// Number of the first packet that it expects; a peer that begins with another is not understood.
    pub first_expected: u32,
    /// Most bytes of payload in a packet; peers that differ do not understand each other.
    pub mtu: u32,
    /// log2 of the longest message in bytes.
    pub log_message: u32,
    /// Whether an answer is ever given up: 0 stands for an endless time-out.
    pub ack_timeout: u32,
    /// Reads and atomics that may be under way.
    pub reads: u32,
    /// Index past the last entry that a doorbell announced.
    pub posted: u64,
    /// Index of the next entry to begin.
    pub started: u64,
    /// Index of the oldest entry that is not complete.
    pub finished: u64,
    /// Index past the last entry that the doorbell record was seen to have.
    pub recorded: u64,
    /// No entry begins any more: a fault switch said so.
    pub stalled: bool,
    /// When the doorbell rang that found nothing else to do.
    pub rung_at: u64,
    /// What was begun and is not complete.
    pub flights: Flights,
}

impl Default for Queue {
    fn default() -> Self {
        Self {
            live: false,
            device: 0,
            domain: 0,
            state: QpState::Reset,
            completions: 0,
            ring: 0,
            log_size: 0,
            record: 0,
            rights: Rights::default(),
            master: false,
            peer_device: 0,
            peer: 0,
            first_sent: 0,
            first_expected: 0,
            mtu: 0,
            log_message: 0,
            ack_timeout: 0,
            reads: 1,
            posted: 0,
            started: 0,
            finished: 0,
            recorded: 0,
            stalled: false,
            rung_at: 0,
            flights: Flights::default(),
        }
    }
}

impl Queue {
    /// Forgets what was posted, as a change to reset does. Its ring begins at index 0 again.
    pub fn reset(&mut self) {
        (self.posted, self.started, self.finished, self.recorded) = (0, 0, 0, 0);
        self.flights = Flights::default();
        self.state = QpState::Reset;
    }

    /// Whether it answers its peer.
    pub(crate) fn answers(&self) -> bool {
        self.live && matches!(self.state, QpState::ReadyToReceive | QpState::ReadyToSend)
    }

    pub(crate) fn flight(&mut self, index: u64) -> &mut Flight {
        // The remainder is within the array.
        &mut self.flights.0[index as usize % WINDOW]
    }
}

impl Region {
    /// Where `bytes` bytes at `address` lie, if the region has them.
    pub(crate) fn place(&self, address: u64, bytes: u64) -> Option<u64> {
        let offset = address.checked_sub(self.start)?;
        (offset <= self.bytes && bytes <= self.bytes - offset).then(|| self.memory.wrapping_add(offset))
    }
}
