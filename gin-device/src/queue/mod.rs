// SPDX-License-Identifier: MIT OR Apache-2.0
//! The queue between a kernel and the proxy: one per context, many producers on a GPU, one consumer on a CPU.
//!
//! Both halves of the protocol stand here, [`Producer`] and [`Consumer`], generic over the [`Memory`] and over the
//! number of words in a slot, so that a model checker can run them against each other.
//!
//! # Slots and phases
//! Indices are 64 bits wide and never wrap in practice; slot `i` is `i & (depth - 1)`. Bit 0 of each word is its
//! phase, `1 ^ ((i >> log2 depth) & 1)`, which flips from one round to the next. A word of the expected phase is a word
//! of this round, so the consumer sees a whole request without any fence between its words, and nobody clears a slot.
//! At creation each slot holds the complement of the phase of the next index that will use it ([`initial_word`]).
//!
//! # Words
//! | word | lies in | written by | says |
//! | --- | --- | --- | --- |
//! | `producer_index` | GPU memory | producers, `add` | the next index to claim |
//! | `near` | GPU memory | producers | a recent `consumer_index`; the turns to look at host words, and the values seen |
//! | `consumer_index` | pinned host memory | consumer | all slots below are empty again |
//! | `oldest_incomplete[peer]` | pinned host memory | consumer | the oldest unfinished request to this peer, or [`NOTHING`] |
//! | `completion_index` | pinned host memory | consumer | all requests below are finished |
//!
//! # Why it is right
//! *A request is read whole.* Its words are stored relaxed and read relaxed; each carries its phase, so mixing two
//! rounds is noticed word by word. What the request refers to (the payload) is released before the slot is written and
//! acquired by the consumer's one fence after it saw all words: release fence, relaxed store, relaxed load, acquire
//! fence.
//!
//! *A slot is not overwritten too early.* A producer stores into slot `i` only after it read `consumer_index > i -
//! depth`, and the consumer stores `consumer_index` with release after it read the slot. The producer's read needs no
//! acquire: its stores depend on the branch that the read decides, and stores are not done speculatively. For the same
//! reason they come after the stores of the round before in the order of the words' values, though no language says so:
//! the old content of the slot had reached the consumer before `consumer_index` moved, and a store that is issued after
//! that read lands later. (The model checker assumes this: `sys::loom`.)
//!
//! *The guess at `consumer_index` may be stale.* It is only ever a value that `consumer_index` had, so it errs towards
//! "no room", and then one thread looks at the real word for all: see [`host_word`].
//!
//! *A flush of one peer sees every earlier request.* The consumer stores `oldest_incomplete[peer] = i` before it stores
//! `consumer_index = i + 1`. The flush reads `consumer_index >= s` with acquire before it reads
//! `oldest_incomplete[peer]`. So for each request `i < s` to that peer it sees `oldest_incomplete[peer]` as it was set
//! for `i` or later. A value that says that they are finished was stored with release after they were, also when it is
//! the index of a later request.
//!
//! *A flush knows of failures.* The fault is posted before `oldest_incomplete` and `completion_index` move; the flush
//! reads it after its acquire. A thread that looks for others reads it in between and announces it first.

mod consumer;
mod producer;

pub use consumer::{Consumer, Finished};
pub use producer::{OneThread, Posters, Producer};

use crate::host_word::{self, HostWord};
use crate::sys::{Memory, Word};

/// The value of `oldest_incomplete[peer]` when there is no unfinished request: larger than any index.
pub const NOTHING: u64 = u64::MAX;

/// The words of one queue.
#[derive(Clone, Copy, Debug)]
pub struct Queue<M: Memory, const N: usize> {
    /// First word of slot 0; slots follow each other, `N` words each, aligned to 16 bytes.
    pub slots: M::Word,
    /// Next index to claim.
    pub producer_index: M::Word,
    /// The words beside `consumer_index`, then those beside `completion_index`, then those beside each
    /// `oldest_incomplete`: [`host_word::WORDS`] each.
    pub near: M::Word,
    /// Number of slots emptied.
    pub consumer_index: M::Word,
    /// All requests below are finished.
    pub completion_index: M::Word,
    /// First word of the table of oldest unfinished requests, one per world rank.
    pub oldest_incomplete: M::Word,
    /// log2 of the number of slots, at most 31.
    pub depth_log2: u32,
    /// Number of slots, less one.
    pub depth_mask: u32,
}

/// Phase of the words of request `index`, 0 or 1.
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

    /// Number of slots.
    #[inline(always)]
    pub fn depth(&self) -> u64 {
        self.depth_mask as u64 + 1
    }

    /// `consumer_index`, for many threads.
    #[inline(always)]
    fn consumer_host_word(&self) -> HostWord<M> {
        HostWord { word: self.consumer_index, near: self.near }
    }

    /// A value that `consumer_index` had; may go backwards.
    #[inline(always)]
    pub fn guess(&self) -> M::Word {
        self.near.at(host_word::SPARE)
    }

    /// `completion_index`, for many threads.
    #[inline(always)]
    fn completion_host_word(&self) -> HostWord<M> {
        HostWord { word: self.completion_index, near: self.near.at(host_word::WORDS) }
    }

    /// `oldest_incomplete` of a peer, for many threads.
    #[inline(always)]
    fn oldest_host_word(&self, peer: u64) -> HostWord<M> {
        HostWord { word: self.oldest_incomplete.at(peer), near: self.near.at((2 + peer) * host_word::WORDS) }
    }

    #[inline(always)]
    fn slot(&self, index: u64) -> M::Word {
        let slot = index as u32 & self.depth_mask;
        self.slots.at(slot as u64 * N as u64)
    }

    /// Fills a new queue's words for a first index of `first`. Nobody else may use the queue yet.
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
