// SPDX-License-Identifier: MIT OR Apache-2.0
//! Posts of the only thread that uses a queue pair ([`Sharing::Thread`](crate::order::Sharing::Thread)).
//!
//! # What it leaves out
//! | step of [`post`](QueuePair::post) | why one thread needs it not |
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

use super::{Entries, Posting, QueuePair, word};
use crate::status::WaitError;
use crate::sys::{Memory, Word};
use gin_abi::Deadline;
use gin_abi::gdaki::{CLAIM_SHIFT, claimed};

impl<M: Memory> QueuePair<M> {
    /// Does what [`post`](Self::post) does, for the only thread that uses the queue pair. `wait` does
    /// [`wait_for_room`](Self::wait_for_room), up to its argument, and returns this queue pair, read again.
    ///
    /// # Errors
    /// As `post`. The queue is then as it was, whatever the error.
    #[inline(always)]
    pub fn post_alone(
        &self,
        posting: Posting,
        fill: impl Fn(&Self, u64),
        wait: impl Fn(u64) -> (Option<WaitError>, Self),
    ) -> Result<(), WaitError> {
        let Posting { count, more, .. } = posting;
        let claims = self.claims().load_own();
        let completion_index = self.words.at(word::COMPLETION_INDEX).load_own();
        let index = claimed(claims, completion_index);
        let mut pair = *self;
        if !pair.fits(index + count, completion_index) {
            let stop;
            (stop, pair) = wait(index + count);
            if let Some(stop) = stop {
                return Err(stop);
            }
        }
        fill(&pair, index);
        pair.claims().store_relaxed_gpu(claims + (count << CLAIM_SHIFT));
        pair.busy.red_or_relaxed_gpu(pair.marks);
        if !more {
            pair.ring(index + count);
        }
        Ok(())
    }

    /// Waits until all entries below `end` have slots of their own. Returns why it gave up, if it did. `help` does what
    /// the argument of [`post`](Self::post) does, for no entries.
    #[inline(always)]
    pub fn wait_for_room(
        &self,
        end: u64,
        deadline: Deadline,
        help: impl Fn(Entries, u64) -> Option<WaitError>,
    ) -> Option<WaitError> {
        let start = if deadline.is_none() { 0 } else { M::clock_ns() };
        loop {
            let stop = help(Entries::NONE, start);
            // A stop counts only if the room found together with it was not enough.
            if self.fits(end, self.completion_index()) {
                return None;
            }
            if stop.is_some() {
                return stop;
            }
        }
    }
}
