// SPDX-License-Identifier: MIT OR Apache-2.0
//! What a kernel knows of a queue pair that it drives itself.
//!
//! One [`QueuePairData`] per context and peer, in GPU memory, in a table by context and world rank. Its first line says
//! where things are and does not change; the words behind it change and start at 0, but for the completions' ring, which is
//! filled with [`INVALID_BYTE`](crate::mlx5::cqe::INVALID_BYTE).

use bytemuck::{Pod, Zeroable};

/// A queue pair. Kernels read its first line two words at a time.
#[repr(C, align(128))]
#[derive(Clone, Copy, Pod, Zeroable, Debug, PartialEq, Eq)]
pub struct QueuePairData {
    /// The send queue: `1 << depth_log2` slots of [`SLOT_BYTES`](crate::mlx5::wqe::SLOT_BYTES). 0 if there is no connection
    /// to this peer: see [`unconnected`](QueuePairData::unconnected).
    pub ring: u64,
    /// One word for each slot, in GPU memory, 0 at first but for the first one, which is 1: the token that
    /// `gin_device::backend::gdaki` passes along.
    pub tokens: u64,
    /// One word for each slot, in GPU memory, 0 at first: which counter the entry raises.
    pub tags: u64,
    /// The completion queue, a ring of `1 << depth_log2` completions: as many as entries can be under way, so it cannot
    /// overrun.
    pub completions: u64,
    /// Address of the doorbell record, 8 bytes.
    pub record: u64,
    /// Where its doorbell is stored.
    pub doorbell: u64,
    /// Number of the queue pair, as [`QueueNumber`](crate::mlx5::wqe::QueueNumber) has it in memory.
    pub number: u32,
    /// log2 of the number of slots, [`LEAST_DEPTH_LOG2`] to [`MOST_DEPTH_LOG2`].
    pub depth_log2: u32,
    /// Entry i asks for a completion if i + 1 is a multiple of 2 to this; less than `depth_log2`.
    pub interval_log2: u16,
    /// How far entries and payload are released before the doorbell: [`DOORBELL_SYSTEM`] or [`DOORBELL_GPU`].
    pub doorbell_scope: u16,
    /// Most bytes that one entry moves, at least 1.
    pub most_bytes: u32,
    /// Key of the peer's signal words, big-endian, as it lies in entries.
    pub signal_key: u32,
    /// Local key of 8 bytes at address 0 that nobody reads, big-endian: what atomics bring goes there.
    pub sink_key: u32,
    /// Address, in the region of `signal_key`, of the context's first signal word.
    pub signals: u64,
    /// The word of GPU memory with the peer's marks, which say whether entries may be under way.
    pub busy: u64,
    /// These: [`busy_marks`] of the peer.
    pub marks: u64,
    /// Counter words of the context, in GPU memory; 0 if it has no counters.
    pub counters: u64,
    /// The counters' number.
    pub counter_count: u64,
    /// Zero.
    pub reserved: [u64; 2],
    /// Index of the next entry to claim.
    pub claim: u64,
    /// Zero: words that are written apart are on lines apart.
    pub rest_of_claim: [u64; 15],
    /// All entries below are complete, and what their completions ask of the GPU is done.
    pub done: u64,
    /// Number of completions taken.
    pub taken: u64,
    /// 1 while a thread takes completions, else 0.
    pub taking: u64,
    /// Zero.
    pub rest_of_done: [u64; 13],
    /// All entries below have been announced to the NIC.
    pub rung: u64,
    /// Index past the last READ.
    pub got: u64,
    /// Index past the last DUMP: what READs before it bring is in view once it is complete.
    pub dumped: u64,
    /// Index past the last entry that asked for a completion because somebody waited.
    pub covered: u64,
    /// 1 while a thread posts such an entry, else 0.
    pub covering: u64,
    /// Index past the last entry that raises a counter.
    pub tagged: u64,
    /// Zero.
    pub rest_of_rung: [u64; 10],
}

impl QueuePairData {
    /// Where there is no connection to a peer. Nothing but its own words may be used; whoever claims entries finds that there
    /// is no room, as all slots seem to be taken, and so learns it where it has to wait anyway.
    pub fn unconnected() -> Self {
        // As far ahead of the claims as numbers go.
        Self { done: (1u64 << 62).wrapping_neg(), ..Self::zeroed() }
    }
}

/// Ranks whose marks one word holds.
pub const BUSY_RANKS: u32 = 32;

/// The marks of a rank in word `rank / BUSY_RANKS`: in the lower half a bit that is set while entries may be under way, in
/// the upper half one that every post sets beside it.
pub const fn busy_marks(rank: u32) -> u64 {
    let bit = 1 << (rank % BUSY_RANKS);
    bit | bit << 32
}

/// Entries and payload are released to the system before the doorbell.
pub const DOORBELL_SYSTEM: u16 = 0;
/// Entries and payload are released to the GPU before the doorbell: the NIC reads them through this GPU's L2 cache.
pub const DOORBELL_GPU: u16 = 1;

/// log2 of the fewest slots: two entries for a put with its signal, and as many again so that an entry that asks for a
/// completion is among those under way.
pub const LEAST_DEPTH_LOG2: u32 = 2;
/// log2 of the most slots: completions name entries by 16 bits.
pub const MOST_DEPTH_LOG2: u32 = 15;

const _: () = {
    use core::mem::offset_of;
    assert!(size_of::<QueuePairData>() == 512);
    assert!(offset_of!(QueuePairData, claim) == 128 && offset_of!(QueuePairData, done) == 256);
    assert!(offset_of!(QueuePairData, rung) == 384);
    // The first words of the pairs.
    assert!(offset_of!(QueuePairData, ring).is_multiple_of(16) && offset_of!(QueuePairData, tags).is_multiple_of(16));
    assert!(offset_of!(QueuePairData, record).is_multiple_of(16));
    assert!(offset_of!(QueuePairData, number).is_multiple_of(16));
    assert!(offset_of!(QueuePairData, signal_key).is_multiple_of(16));
    assert!(offset_of!(QueuePairData, busy).is_multiple_of(16));
    assert!(offset_of!(QueuePairData, counters).is_multiple_of(16));
};
