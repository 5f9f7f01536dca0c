// SPDX-License-Identifier: MIT OR Apache-2.0
//! Device-driven NIC queue pairs, as a kernel sees them.
//!
//! There is one [`QueuePairData`] per context and peer, in GPU memory, in a table indexed by context and world rank.
//! Its first cache line holds addresses and limits and does not change. The words behind it change and start at 0. The
//! completion ring starts filled with [`INVALID_BYTE`](crate::mlx5::cqe::INVALID_BYTE).

use bytemuck::{Pod, Zeroable};

/// A device-driven queue pair. Kernels read its first line two words at a time.
#[repr(C, align(128))]
#[derive(Clone, Copy, Pod, Zeroable, Debug, PartialEq, Eq)]
pub struct QueuePairData {
    /// Address of the send queue: `1 << depth_log2` slots of [`SLOT_BYTES`](crate::mlx5::wqe::SLOT_BYTES). 0 if this
    /// peer has no connection: see [`unconnected`](QueuePairData::unconnected).
    pub ring: u64,
    /// Address of the copy of the communicator's [`CommHandle`](crate::CommHandle), in GPU memory.
    pub comm: u64,
    /// Address of one word per slot, in GPU memory, 0 at first: the counter that the entry raises.
    pub tags: u64,
    /// Address of the completion queue, a ring of `1 << depth_log2` completions. It holds as many completions as
    /// entries can be outstanding, so it cannot overrun.
    pub completions: u64,
    /// Address of the doorbell record, 8 bytes.
    pub record: u64,
    /// Address that the doorbell is stored to.
    pub doorbell: u64,
    /// Number of the queue pair, in the memory form of [`QueueNumber`](crate::mlx5::wqe::QueueNumber).
    pub number: u32,
    /// log2 of the number of slots, [`MIN_DEPTH_LOG2`] to [`MAX_DEPTH_LOG2`].
    pub depth_log2: u32,
    /// log2 of the completion interval, less than `depth_log2`: entry i asks for a completion if i + 1 is a multiple of
    /// `1 << interval_log2`.
    pub interval_log2: u16,
    /// Scope to which entries and payload are released before the doorbell: [`DOORBELL_SYSTEM`] or [`DOORBELL_GPU`].
    pub doorbell_scope: u16,
    /// Largest number of bytes that one entry moves, at least 1.
    pub max_bytes: u32,
    /// Remote key of the peer's signal words, big-endian, as entries hold it.
    pub signal_key: u32,
    /// Local key of 8 bytes at address 0 that no code reads, big-endian. Atomics return their old value there.
    pub sink_key: u32,
    /// Address of the context's first signal word, in the region of `signal_key`.
    pub signals: u64,
    /// Address of the word in GPU memory that holds the peer's marks, which say whether entries may be outstanding.
    pub busy: u64,
    /// Marks of the peer in that word: [`busy_marks`] of the peer.
    pub marks: u64,
    /// Address of the context's counter words, in GPU memory; 0 if it has no counters.
    pub counters: u64,
    /// Number of counters.
    pub counter_count: u64,
    /// Number of the context.
    pub context: u32,
    /// World rank of the peer.
    pub peer: u32,
    /// Zero.
    pub reserved: u64,
    /// The entries claimed and published, and the right to ring: see [`claimed`].
    pub claims: u64,
    /// Zero. Words with different writers are on different lines.
    pub rest_of_claim: [u64; 15],
    /// Completion index: all entries below it are complete, and the GPU has done the work that their completions ask
    /// for.
    pub completion_index: u64,
    /// Number of completions consumed.
    pub cq_consumer_index: u64,
    /// 1 while a thread consumes completions, else 0.
    pub taking: u64,
    /// Zero.
    pub rest_of_done: [u64; 13],
    /// Index past the last entry announced to the NIC.
    pub rung: u64,
    /// Index past the last READ.
    pub got: u64,
    /// Index past the last DUMP. Once that DUMP is complete, data of all earlier READs is visible.
    pub dumped: u64,
    /// Index past the last entry that asked for a completion on behalf of a waiting thread.
    pub covered: u64,
    /// 1 while a thread posts such an entry, else 0.
    pub covering: u64,
    /// Index past the last entry that raises a counter.
    pub tagged: u64,
    /// Index past the entries that were last held back.
    pub held: u64,
    /// Zero.
    pub rest_of_rung: [u64; 9],
}

impl QueuePairData {
    /// Returns the queue pair of a peer without a connection.
    ///
    /// Only the queue pair's own words may be used. A thread that claims entries finds that there is no room, because
    /// all slots seem to be in use. It learns so at the point where it has to wait anyway.
    ///
    /// ```
    /// let pair = gin_abi::gdaki::QueuePairData::unconnected();
    /// assert_eq!(pair.ring, 0);
    /// ```
    pub fn unconnected() -> Self {
        // The completion index is far behind the producer index, even by the lower 32 bits of both.
        Self { completion_index: (1u64 << 30).wrapping_neg(), ..Self::zeroed() }
    }

    /// Returns the producer index, the index of the next entry to claim.
    ///
    /// ```
    /// # use bytemuck::Zeroable;
    /// use gin_abi::gdaki::{CLAIM_SHIFT, QueuePairData};
    ///
    /// let pair = QueuePairData { completion_index: 5, claims: 7 << CLAIM_SHIFT | 2, ..QueuePairData::zeroed() };
    /// assert_eq!(pair.producer_index(), 7); // and entries 5 and 6 are not published yet
    /// ```
    pub const fn producer_index(&self) -> u64 {
        claimed(self.claims, self.completion_index)
    }
}

/// Number of bits by which the producer index is shifted in [`QueuePairData::claims`].
///
/// | bits | hold |
/// | --- | --- |
/// | 0 to 22 | the number of claimed entries that are not published yet |
/// | 23 | [`RINGING`] |
/// | 24 to 63 | the lower 40 bits of the producer index |
pub const CLAIM_SHIFT: u32 = 24;

/// In [`QueuePairData::claims`]: a thread rings the doorbell.
pub const RINGING: u64 = 1 << (CLAIM_SHIFT - 1);

/// Returns the producer index of a value of [`QueuePairData::claims`], given a completion index less than 2^39 away.
///
/// ```
/// use gin_abi::gdaki::{CLAIM_SHIFT, RINGING, claimed};
///
/// assert_eq!(claimed(3 << CLAIM_SHIFT | RINGING, 1), 3);
/// assert_eq!(claimed(3 << CLAIM_SHIFT, (1 << 40) - 1), (1 << 40) + 3);
/// assert_eq!(claimed(3 << CLAIM_SHIFT, 4), 3);
/// ```
#[inline(always)]
pub const fn claimed(claims: u64, completion_index: u64) -> u64 {
    let ahead = ((claims >> CLAIM_SHIFT).wrapping_sub(completion_index) << CLAIM_SHIFT) as i64 >> CLAIM_SHIFT;
    completion_index.wrapping_add(ahead as u64)
}

/// Number of ranks whose marks one word holds.
pub const BUSY_RANKS: u32 = 32;

/// Returns the marks of a rank in word `rank / BUSY_RANKS`.
///
/// The lower half has a bit that is set while entries may be outstanding. The upper half has a bit that every post sets
/// beside it.
///
/// ```
/// assert_eq!(gin_abi::gdaki::busy_marks(33), 1 << 1 | 1 << 33);
/// ```
pub const fn busy_marks(rank: u32) -> u64 {
    let bit = 1 << (rank % BUSY_RANKS);
    bit | bit << 32
}

/// Entries and payload are released to the system before the doorbell.
pub const DOORBELL_SYSTEM: u16 = 0;
/// Entries and payload are released to the GPU before the doorbell: the NIC reads them through this GPU's L2 cache.
pub const DOORBELL_GPU: u16 = 1;

/// log2 of the fewest slots. A put with its signal takes two entries. Twice that many slots ensure that the outstanding
/// entries include one that asks for a completion.
pub const MIN_DEPTH_LOG2: u32 = 2;
/// log2 of the maximum number of slots: completions name entries by 16 bits.
pub const MAX_DEPTH_LOG2: u32 = 15;

const _: () = {
    use core::mem::offset_of;
    assert!(size_of::<QueuePairData>() == 512);
    assert!(offset_of!(QueuePairData, claims) == 128 && offset_of!(QueuePairData, completion_index) == 256);
    assert!(offset_of!(QueuePairData, rung) == 384);
    // The first word of each pair is 16-byte aligned.
    assert!(offset_of!(QueuePairData, ring).is_multiple_of(16) && offset_of!(QueuePairData, tags).is_multiple_of(16));
    assert!(offset_of!(QueuePairData, record).is_multiple_of(16));
    assert!(offset_of!(QueuePairData, number).is_multiple_of(16));
    assert!(offset_of!(QueuePairData, signal_key).is_multiple_of(16));
    assert!(offset_of!(QueuePairData, busy).is_multiple_of(16));
    assert!(offset_of!(QueuePairData, counters).is_multiple_of(16));
};
