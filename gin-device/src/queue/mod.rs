// SPDX-License-Identifier: MIT OR Apache-2.0
//! The queue between a kernel and the proxy: one per context, many producers on a GPU, one consumer on a CPU.
//!
//! This module has both halves of the protocol, [`Producer`] and [`Consumer`]. They are generic over the [`Memory`] and
//! over the number of words in a slot, so that a model checker can run them against each other.
//!
//! # Slots and phases
//! Indices are 64 bits wide and never wrap in practice. Index `i` uses slot `i & (depth - 1)`. Bit 0 of each word is
//! its phase, `1 ^ ((i >> log2 depth) & 1)`, which flips from one round to the next. A word with the expected phase is
//! a word of this round. So the consumer recognises a whole request without a fence between its words, and no thread
//! clears a slot. At creation each slot holds the complement of the phase of the next index that will use it
//! ([`initial_word`]).
//!
//! # Words
//! | word | memory | written by | meaning |
//! | --- | --- | --- | --- |
//! | `producer_index` | GPU memory | producers, by `add` | the next index to claim |
//! | `near` | GPU memory | producers | a recent `consumer_index`; the turns to poll host words, and the values seen |
//! | `consumer_index` | pinned host memory | consumer | all slots below are empty again |
//! | `oldest_incomplete[peer]` | pinned host memory | consumer | the oldest incomplete request to this peer, or [`NOTHING`] |
//! | `completion_index` | pinned host memory | consumer | all requests below are complete |
//!
//! # Why it is right
//! *A request is read whole.* Its words are stored relaxed and read relaxed. Each carries its phase, so the consumer
//! notices each word of another round. The producer releases the payload before it writes the slot. The consumer
//! acquires it by one fence after it saw all words. The chain is: release fence, relaxed store, relaxed load, acquire
//! fence.
//!
//! *A slot is not overwritten too early.* A producer stores into slot `i` only after it read `consumer_index > i -
//! depth`, and the consumer stores `consumer_index` with release after it read the slot. The producer's read needs no
//! acquire, because its stores depend on the branch that the read decides, and hardware does not store speculatively.
//! For the same reason its stores follow the stores of the round before in the modification order of the words, though
//! no language guarantees it: the old content of the slot had reached the consumer before `consumer_index` moved, and a
//! store issued after that read takes effect later. (The model checker assumes this: `sys::loom`.)
//!
//! *The guess at `consumer_index` may be stale.* It is always a value that `consumer_index` had, so it errs towards "no
//! room". Then one thread at a time reads the real word for all: see [`host_word`].
//!
//! *A timeout leaves the queue as it was.* A thread that waits for room has no slot. It claims one by an exchange that
//! succeeds only at the index that it found empty, so no slot is claimed that is not empty.
//!
//! *A flush of one peer sees every earlier request.* The consumer stores `oldest_incomplete[peer] = i` before it stores
//! `consumer_index = i + 1`. The flush reads `consumer_index >= s` with acquire before it reads
//! `oldest_incomplete[peer]`. So for each request `i < s` to that peer it sees `oldest_incomplete[peer]` as it was set
//! for `i` or later. A value that reports them complete was stored with release after they were, also if that value is
//! the index of a later request. Unlike the other words, this one may fall, from [`NOTHING`] to an index. So a value
//! that another thread has read for all may be too old: the flush reads the word itself in the end.
//!
//! *A flush sees failures.* The consumer posts the fault before it moves `oldest_incomplete` and `completion_index`.
//! The flush reads the fault after its acquire. A thread that polls a host word for others reads the fault after that
//! word, and announces it before the value.

mod consumer;
mod producer;

pub use consumer::{Consumer, Finished};
pub use producer::Producer;

use crate::host_word::{self, HostWord};
use crate::sys::{Memory, Word};

/// The value of `oldest_incomplete[peer]` if all requests to the peer are complete: larger than any index.
pub const NOTHING: u64 = u64::MAX;

/// The words of one queue.
#[derive(Clone, Copy, Debug)]
pub struct Queue<M: Memory, const N: usize> {
    /// First word of slot 0. Slots are adjacent, `N` words each, aligned to 16 bytes.
    pub slots: M::Word,
    /// The next index to claim.
    pub producer_index: M::Word,
    /// The near words of `consumer_index`, of `completion_index`, and of each `oldest_incomplete`, in this order:
    /// [`host_word::WORDS`] each.
    pub near: M::Word,
    /// Number of slots emptied.
    pub consumer_index: M::Word,
    /// All requests below are complete.
    pub completion_index: M::Word,
    /// First word of the table of oldest incomplete requests, one per world rank.
    pub oldest_incomplete: M::Word,
    /// log2 of the number of slots, at most 31.
    pub depth_log2: u32,
    /// Number of slots, less one.
    pub depth_mask: u32,
}

/// Returns the phase of the words of request `index`, 0 or 1.
#[inline(always)]
#[must_use]
pub const fn phase(index: u64, depth_log2: u32) -> u64 {
    1 ^ ((index >> depth_log2) & 1)
}

/// Returns the first value of each word of slot `slot` in a new queue whose first index will be `first`.
#[must_use]
pub const fn initial_word(slot: u64, first: u64, depth_log2: u32) -> u64 {
    let mask = (1 << depth_log2) - 1;
    // The first index at or after `first` that uses this slot.
    let next = first.wrapping_add(slot.wrapping_sub(first) & mask);
    1 ^ phase(next, depth_log2)
}

impl<M: Memory, const N: usize> Queue<M, N> {
    const PAIRS: usize = {
        assert!(N.is_multiple_of(2) && N > 0, "slots are stored in pairs of words");
        N / 2
    };

    /// Returns the number of slots.
    #[inline(always)]
    pub fn depth(&self) -> u64 {
        self.depth_mask as u64 + 1
    }

    /// Returns `consumer_index` as a word that many threads wait for.
    #[inline(always)]
    fn consumer_host_word(&self) -> HostWord<M> {
        HostWord { word: self.consumer_index, near: self.near }
    }

    /// Returns the word with a value that `consumer_index` had. The word may go backwards.
    #[inline(always)]
    pub fn guess(&self) -> M::Word {
        self.near.at(host_word::SPARE)
    }

    /// Returns `completion_index` as a word that many threads wait for.
    #[inline(always)]
    fn completion_host_word(&self) -> HostWord<M> {
        HostWord { word: self.completion_index, near: self.near.at(host_word::WORDS) }
    }

    /// Returns `oldest_incomplete` of a peer as a word that many threads wait for.
    #[inline(always)]
    fn oldest_host_word(&self, peer: u64) -> HostWord<M> {
        HostWord { word: self.oldest_incomplete.at(peer), near: self.near.at((2 + peer) * host_word::WORDS) }
    }

    #[inline(always)]
    fn slot(&self, index: u64) -> M::Word {
        let slot = index as u32 & self.depth_mask;
        self.slots.at(slot as u64 * N as u64)
    }

    /// Fills the words of a new queue whose first index is `first`. No other thread may use the queue yet.
    pub fn initialise(&self, first: u64, ranks: u64) {
        for slot in 0..self.depth() {
            for word in 0..N as u64 {
                let value = initial_word(slot, first, self.depth_log2);
                self.slots.at(slot * N as u64 + word).store_relaxed_sys(value);
            }
        }
        for word in [self.producer_index, self.consumer_index, self.completion_index] {
            word.store_relaxed_sys(first);
        }
        for word in 0..(2 + ranks) * host_word::WORDS {
            self.near.at(word).store_relaxed_sys(0);
        }
        self.guess().store_relaxed_sys(first);
        for rank in 0..ranks {
            self.oldest_incomplete.at(rank).store_relaxed_sys(NOTHING);
        }
    }
}
