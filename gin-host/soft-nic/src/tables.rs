// SPDX-License-Identifier: MIT OR Apache-2.0
//! Queue pairs, completion queues and memory regions, as the engine sees them.
//!
//! The number of a queue is its slot. A region's slot is its key without the low 8 bits. Slot 0 is never used. An
//! element whose `live` is false is free.
//!
//! All types have the layout of C: a host and a kernel exchange them, and two compilers built these.

use gin_abi::mlx5::command::QpState;
use gin_abi::mlx5::cqe::Syndrome;
use gin_abi::mlx5::wqe::Local;

/// Largest number of operations of one queue pair that may be outstanding.
pub const WINDOW: usize = 16;

/// Permissions of a region or a queue pair.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Rights {
    /// The NIC may write data that it reads elsewhere.
    pub local_write: bool,
    /// A peer may read.
    pub remote_read: bool,
    /// A peer may write.
    pub remote_write: bool,
    /// A peer may execute atomics.
    pub remote_atomic: bool,
}

/// A memory region.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Region {
    /// True if the slot is in use.
    pub live: bool,
    /// Key for both local and remote access.
    pub key: u32,
    /// NIC that the region is registered with.
    pub device: u32,
    /// Protection domain.
    pub domain: u32,
    /// Address that entries use for its first byte.
    pub start: u64,
    /// Address of that byte in memory.
    pub memory: u64,
    /// Length in bytes.
    pub bytes: u64,
    /// Permissions.
    pub rights: Rights,
    /// True if writes may become visible in any order.
    pub relaxed: bool,
}

/// A completion queue.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct CompletionQueue {
    /// True if the slot is in use.
    pub live: bool,
    /// NIC of the queue.
    pub device: u32,
    /// Address of the ring.
    pub ring: u64,
    /// log2 of the number of slots.
    pub log_size: u32,
    /// True if all completions go to slot 0.
    pub collapsed: bool,
    /// Address of the consumer index; 0 if overruns are ignored.
    pub record: u64,
    /// Number of completions written.
    pub produced: u64,
}

/// The stage of an operation that has begun.
#[repr(C, u32)]
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) enum Stage {
    /// The answer arrives at this step; `u64::MAX` for never.
    Pending { due: u64, answer: Answer },
    /// The operation is done and returned this many bytes.
    Done { bytes: u32 },
    /// The operation failed.
    Failed { syndrome: Syndrome, vendor: u8 },
    /// The operation was flushed, since an earlier one failed.
    #[default]
    Flushed,
}

/// The answer to a request.
#[repr(C, u32)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Answer {
    /// A write has arrived.
    Acknowledged,
    /// The data of a read, which is copied only now.
    Data { from: gin_abi::mlx5::wqe::Remote, to: Local, bytes: u64 },
    /// The old value of an atomic.
    Old { to: Local, value: u64 },
    /// An error.
    Refused { syndrome: Syndrome, vendor: u8 },
}

/// An operation that has begun.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct Flight {
    pub(crate) operation: u32,
    pub(crate) completion: bool,
    pub(crate) stage: Stage,
}

/// The operations of a queue pair that have begun and are not complete.
#[repr(transparent)]
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Flights([Flight; WINDOW]);

/// A queue pair.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct QueuePair {
    /// True if the slot is in use.
    pub live: bool,
    /// NIC of the queue pair.
    pub device: u32,
    /// Protection domain.
    pub domain: u32,
    /// State; the engine changes it to [`QpState::Error`].
    pub state: QpState,
    /// Number of the completion queue.
    pub completions: u32,
    /// Address of the ring.
    pub ring: u64,
    /// log2 of the number of slots; 0 to 15.
    pub log_size: u32,
    /// Address of the send half of the doorbell record.
    pub record: u64,
    /// Permissions of the peer.
    pub rights: Rights,
    /// True if entries may wait for completion queues.
    pub master: bool,
    /// NIC of the peer.
    pub peer_device: u32,
    /// Queue pair of the peer, once this one is ready to receive.
    pub peer: u32,
    /// Initial packet sequence number of packets sent.
    pub initial_send_psn: u32,
    /// Initial packet sequence number of packets expected. A peer that begins with another receives no answer.
    pub initial_receive_psn: u32,
    /// Largest payload of a packet in bytes. Peers with different values do not communicate.
    pub mtu: u32,
    /// log2 of the longest message in bytes.
    pub log_message: u32,
    /// Time-out of answers; 0 for none, otherwise an unanswered request fails.
    pub ack_timeout: u32,
    /// Largest number of outstanding reads and atomics.
    pub reads: u32,
    /// Index past the last entry that a doorbell announced.
    pub posted: u64,
    /// Index of the next entry to begin.
    pub started: u64,
    /// Index of the oldest entry that is not complete.
    pub finished: u64,
    /// Index past the last entry seen in the doorbell record.
    pub recorded: u64,
    /// Index past the last entry of a doorbell that waits for its record; 0 if none waits.
    pub early: u64,
    /// True if no further entry begins, because of a fault switch.
    pub stalled: bool,
    /// Time of the doorbell that found the queue pair without work.
    pub rung_at: u64,
    /// Operations that have begun and are not complete.
    pub flights: Flights,
}

impl Default for QueuePair {
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
            initial_send_psn: 0,
            initial_receive_psn: 0,
            mtu: 0,
            log_message: 0,
            ack_timeout: 0,
            reads: 1,
            posted: 0,
            started: 0,
            finished: 0,
            recorded: 0,
            early: 0,
            stalled: false,
            rung_at: 0,
            flights: Flights::default(),
        }
    }
}

impl QueuePair {
    /// Drops all posted entries, as a change to the reset state does. The ring begins at index 0 again.
    pub fn reset(&mut self) {
        (self.posted, self.started, self.finished, self.recorded, self.early) = (0, 0, 0, 0, 0);
        self.flights = Flights::default();
        self.state = QpState::Reset;
    }

    /// Returns true if the queue pair answers its peer.
    pub(crate) fn answers(&self) -> bool {
        self.live && matches!(self.state, QpState::ReadyToReceive | QpState::ReadyToSend)
    }

    pub(crate) fn flight(&mut self, index: u64) -> &mut Flight {
        // The remainder is within the array.
        &mut self.flights.0[index as usize % WINDOW]
    }
}

impl Region {
    /// Returns the place in memory of `bytes` bytes at `address`, if the region contains them.
    pub(crate) fn place(&self, address: u64, bytes: u64) -> Option<u64> {
        let offset = address.checked_sub(self.start)?;
        (offset <= self.bytes && bytes <= self.bytes - offset).then(|| self.memory.wrapping_add(offset))
    }
}
