// SPDX-License-Identifier: MIT OR Apache-2.0
//! Takes completions, and raises the counters of the entries that they complete.

use super::{QueuePair, SLOT_WORDS, TAG_SHIFT, TAKE, near, word};
use crate::sys::{self, Memory, Word};
use gin_abi::mlx5::cqe::{SYNDROME_WORD, TAIL_WORD, Tail, opcode};

impl<M: Memory> QueuePair<M> {
    /// Takes completions, unless another thread does. Returns false if an entry has [failed](Self::failure).
    #[inline(always)]
    pub fn take(&self) -> bool {
        if !self.begin_taking() {
            return true;
        }
        let first = self.words.at(word::CQ_CONSUMER_INDEX).load_relaxed_gpu();
        let completion_index = self.completion_index();
        let (mut consumed, mut end) = (first as u32, completion_index as u32);
        let mut succeeds = true;
        loop {
            if consumed.wrapping_sub(first as u32) >= TAKE {
                break;
            }
            // With `stay` below, LLVM does not unroll it either.
            sys::rolled();
            let tail = Tail(self.completion(consumed).at(TAIL_WORD as u64).load_relaxed_sys());
            if !tail.is_in_place(consumed as u64, self.depth_log2) {
                break;
            }
            if tail.opcode() != opcode::REQUEST {
                succeeds = false;
                break;
            }
            // 16 bits are enough, because fewer than 2^16 entries are under way.
            end = end.wrapping_add(1 + tail.index().wrapping_sub(end as u16) as u32);
            consumed = sys::stay(consumed.wrapping_add(1));
        }
        if end != completion_index as u32 {
            // Acquires the NIC's writes before these completions.
            M::fence_acquire_sys();
            let end = near(end, completion_index);
            self.raise_counters(completion_index, end);
            self.words.at(word::CQ_CONSUMER_INDEX).store_relaxed_gpu(near(consumed, first));
            self.words.at(word::COMPLETION_INDEX).store_release_gpu(end);
        }
        self.end_taking();
        succeeds
    }

    /// Returns the completion of the failed entry: its tail, and the word with the syndromes. Nobody takes it.
    #[inline(always)]
    pub fn failure(&self) -> (Tail, u64) {
        let at = self.completion(self.words.at(word::CQ_CONSUMER_INDEX).load_relaxed_gpu() as u32);
        let tail = Tail(at.at(TAIL_WORD as u64).load_relaxed_sys());
        M::fence_acquire_sys();
        (tail, at.at(SYNDROME_WORD as u64).load_relaxed_sys())
    }

    #[inline(always)]
    fn completion(&self, index: u32) -> M::Word {
        self.completions.at((index & self.mask()) as u64 * SLOT_WORDS)
    }

    /// Tries to become the one thread that takes completions and clears marks. Returns false if another thread is that
    /// one.
    #[inline(always)]
    pub(super) fn begin_taking(&self) -> bool {
        let taking = self.words.at(word::TAKING);
        if taking.load_relaxed_gpu() != 0 || taking.cas_relaxed_gpu(0, 1) != 0 {
            return false;
        }
        // Acquires the stores of the previous such thread.
        M::fence_acquire_gpu();
        true
    }

    #[inline(always)]
    pub(super) fn end_taking(&self) {
        self.words.at(word::TAKING).store_release_gpu(0);
    }

    /// Raises the counters of entries that are complete.
    #[inline(always)]
    fn raise_counters(&self, first: u64, end: u64) {
        let tagged = self.words.at(word::TAGGED).load_relaxed_gpu();
        if tagged <= first {
            return;
        }
        // Releases the data of the entries first.
        M::fence_release_gpu();
        let mut index = first;
        loop {
            if index == end {
                break;
            }
            sys::rolled();
            let tag = self.tags.at((index as u32 & self.mask()) as u64).load_relaxed_gpu();
            if tag >> TAG_SHIFT == (index + 1) & (u64::MAX >> TAG_SHIFT) {
                self.counters.at(tag & ((1 << TAG_SHIFT) - 1)).red_add_relaxed_gpu(1);
            }
            index = sys::stay_word(index + 1);
        }
    }
}
