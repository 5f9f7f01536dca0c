// SPDX-License-Identifier: MIT OR Apache-2.0
//! Posts of the only thread that uses a queue pair ([`Sharing::Thread`](crate::order::Sharing::Thread)).
//!
//! # What it leaves out
//! | step of a post | why one thread needs it not |
//! | --- | --- |
//! | the claim by an atomic | No other thread changes the claims word, so it loads and stores it. |
//! | counts of unpublished entries, the bit of the thread that rings | They order threads that publish and ring. Here each post ends before the next begins, so nothing is unpublished between two posts. |
//! | the release before publishing, the acquires before ringing | No other thread has entries that this one announces, or announces entries of this one. |
//! | the release after the doorbell | It orders doorbells of two threads. Stores of one thread to one address keep their order, and so do those to the record. |
//! | help for others in a full queue | Room comes from the NIC alone. The thread rings for what it holds back, and takes completions. |
//!
//! Words that only this thread changes are loaded weakly, so from the L1 cache. Another thread may use the queue pair
//! later if it synchronises with this one. By that, all stores here come before its own, and its L1 cache has no older
//! values. Then every form of a post may follow: the claims word is as `post` leaves it.
//!
//! # What is left
//! One fence, in [`ring`](QueuePair::ring), between the record and the doorbell. It releases the payload, the entries
//! and the record to the NIC, which acquires them when it reads the doorbell. Without it the NIC may find an old entry
//! or old payload. The wait for room needs none: see *A slot is not overwritten too early* in [`pair`](super).

use super::{Ended, QueuePair, near, place, word};
use crate::sys::{Memory, Word};
use gin_abi::gdaki::CLAIM_SHIFT;

impl<M: Memory> QueuePair<M> {
    /// Does what [`claim_slots`](Self::claim_slots) does, for the only thread that uses the queue pair. `wait` does
    /// [`wait_for_room`](Self::wait_for_room) for `count` wanted entries, and returns this queue pair, read again.
    /// `then` gets the lower 32 bits of the first index.
    ///
    /// # Errors
    /// The error of the wait. The queue is then as it was, whatever the error.
    #[inline(always)]
    pub fn claim_alone(
        &self,
        count: u32,
        wait: impl FnOnce() -> (Result<u64, Ended>, Self),
        then: impl FnOnce(&Self, u32),
    ) -> Result<(), Ended> {
        let mut pair = *self;
        let index = place(self.claims().load_own());
        let completion_index = self.words.at(word::COMPLETION_INDEX).load_own();
        if !pair.fits(index.wrapping_add(count), completion_index) {
            let waited;
            (waited, pair) = wait();
            // `publish_alone` replaces the claims word.
            waited?;
        }
        then(&pair, index);
        Ok(())
    }

    /// Does what [`publish`](Self::publish) does, after [`claim_alone`](Self::claim_alone).
    #[inline(always)]
    pub fn publish_alone(&self, index: u32, count: u32, more: bool) {
        let end = index.wrapping_add(count);
        self.claims().store_relaxed_gpu(near(end, self.words.at(word::COMPLETION_INDEX).load_own()) << CLAIM_SHIFT);
        self.busy.red_or_relaxed_gpu(self.marks);
        if !more {
            self.ring(end);
        }
    }
}
