// SPDX-License-Identifier: MIT OR Apache-2.0
//! The kernel's half of the queue.

use super::{NOTHING, Queue};
use crate::host_word::{HostWord, Look};
use crate::order::{self, Order, Sharing};
use crate::status::{Shared, Status, WaitError};
use crate::sys::{Memory, Word};
use gin_abi::Deadline;

/// The end of a queue that posts requests and waits for them. `Copy`: every thread has its own.
#[derive(Clone, Copy, Debug)]
pub struct Producer<M: Memory, const N: usize> {
    /// The queue.
    pub queue: Queue<M, N>,
    /// The aborts and faults that end waits.
    pub status: Status<M>,
}

/// The states of a post besides a [`WaitError`] that ended it: it waits, or it has an empty slot.
const WAITS: u32 = 3;
const ROOM: u32 = 4;

/// Returns whether slot `index` of a queue is empty, given that `consumer_index` slots have been emptied.
///
/// The difference is signed, because an index that was read a while ago may be less than `consumer_index`.
#[inline(always)]
fn is_empty(index: u64, consumer_index: u64, depth_mask: u32) -> bool {
    (index.wrapping_sub(consumer_index) as i64) <= depth_mask as i64
}

impl<M: Memory, const N: usize> Producer<M, N> {
    /// Returns whether slot `index` is empty, given that `consumer_index` slots have been emptied.
    #[inline(always)]
    fn is_empty(&self, index: u64, consumer_index: u64) -> bool {
        is_empty(index, consumer_index, self.queue.depth_mask)
    }

    /// Claims `count` slots if `leads`, with or without room, and returns the index of the first. The caller must fill
    /// all of them.
    #[inline(always)]
    pub fn claim(&self, leads: bool, count: u64, sharing: Sharing) -> u64 {
        order::claim(self.queue.producer_index, leads, count, sharing)
    }

    /// Claims a slot and returns its index, if a look finds room for it behind `ahead` other claims, given that
    /// `consumer_index` slots have been emptied.
    ///
    /// Threads that look at the same time may all find the same room. Then the slot of some of them is not empty yet.
    #[inline(always)]
    pub fn claim_if_room(&self, ahead: u64, consumer_index: u64, sharing: Sharing) -> Option<u64> {
        let room = self.is_empty(self.position().wrapping_add(ahead), consumer_index);
        let index = self.claim(room, 1, sharing);
        room.then_some(index)
    }

    /// Writes one request and returns the index of its slot. Bit 0 of each word is ignored.
    ///
    /// `claimer` gets a number of slots that have been emptied. It returns the index of a slot that it has claimed, if
    /// it has. Otherwise the post waits for room and claims last, so that a timeout leaves the queue as it was.
    ///
    /// The payload of the request must have been released before, at the scope of its reader. A thread that fills
    /// several slots of one claim fills them in ascending order.
    ///
    /// Each thread waits by itself, also a lane of a warp: other lanes may have gone on. It fills its slot before it
    /// leaves the loop, so no slot waits for another thread's wait.
    ///
    /// # Errors
    /// [`WaitError`] if there was no room in time, or if the communicator is aborted or has a fault; with the claimed
    /// index, if there is one. That slot stays a hole that no thread can fill: the caller must report a fault.
    #[inline(always)]
    pub fn post(
        &self,
        words: [u64; N],
        claimer: impl FnOnce(u64) -> Option<u64>,
        deadline: Deadline,
    ) -> Result<u64, (WaitError, Option<u64>)> {
        let Queue { producer_index, near, consumer_index, depth_mask, .. } = self.queue;
        // The post reads over PCIe only if this guess leaves no room. It reads the guess before the claim, so that the
        // two trips to L2 overlap.
        let guess = self.queue.guess().load_relaxed_gpu();
        let claimed = claimer(guess);
        let mut index = claimed.unwrap_or(NOTHING);
        let mut state = if claimed.is_some() & self.is_empty(index, guess) { ROOM } else { WAITS };
        let mut start = 0;
        loop {
            self.store_if(state == ROOM, index, words);
            if state != WAITS {
                break;
            }
            if start == 0 && !deadline.is_none() {
                start = M::clock_ns();
            }
            let Status { host, copy, .. } = self.status;
            (index, state) = outlined::look_for_room::<M>(
                producer_index,
                near,
                consumer_index,
                depth_mask,
                index,
                host,
                copy,
                start,
                deadline,
            );
        }
        if state == ROOM {
            return Ok(index);
        }
        // The first condition spares code. A slot that the wait itself claims has room, so it is filled.
        let stop = if deadline.is_none() | (state == WaitError::Fault as u32) {
            WaitError::Fault
        } else {
            WaitError::Deadline
        };
        Err((stop, claimed))
    }

    #[inline(always)]
    fn store_if(&self, condition: bool, index: u64, words: [u64; N]) {
        let phase = super::phase(index, self.queue.depth_log2);
        let slot = self.queue.slot(index);
        let mut pair = 0;
        while pair < Queue::<M, N>::PAIRS {
            let (low, high) = (words[2 * pair] & !1 | phase, words[2 * pair + 1] & !1 | phase);
            slot.at(2 * pair as u64).store_pair_relaxed_sys_if(condition, low, high);
            pair += 1;
        }
    }

    /// Returns the index of the next claim. All earlier posts have smaller indices.
    #[inline(always)]
    pub fn position(&self) -> u64 {
        self.queue.producer_index.load_relaxed_gpu()
    }

    /// Waits until all requests below `position` are complete.
    ///
    /// Ordering: with [`Order::Acquire`], at system scope, the data of gets is visible, and so is a fault that was
    /// posted for one of the requests. With [`Order::Relaxed`] they are visible only after an acquire fence of the
    /// caller's.
    ///
    /// # Errors
    /// [`WaitError`] if the wait ended early, or if the communicator has a fault when it ends.
    #[inline(always)]
    pub fn wait_all(&self, position: u64, deadline: Deadline, order: Order) -> Result<(), WaitError> {
        let looked = self.wait_past(self.queue.completion_host_word(), position, deadline)?;
        self.finish(looked, order)
    }

    /// Waits until all requests to `peer` below `position` are complete. Requests to other peers do not delay it.
    ///
    /// Ordering as [`wait_all`](Self::wait_all).
    ///
    /// # Errors
    /// As [`wait_all`](Self::wait_all).
    #[inline(always)]
    pub fn wait_peer(&self, peer: u32, position: u64, deadline: Deadline, order: Order) -> Result<(), WaitError> {
        self.wait_oldest(peer, position, deadline)?;
        self.finish(true, order)
    }

    /// Ends a wait whose condition is met: acquires, and checks for a failed request.
    #[inline(always)]
    fn finish(&self, looked: bool, order: Order) -> Result<(), WaitError> {
        if order == Order::Acquire {
            M::fence_acquire_sys();
        }
        self.no_fault(looked)
    }

    /// Checks whether a complete request failed. `looked`: the calling thread has read the host word itself; otherwise
    /// it got the value from another thread, which has announced the fault in GPU memory.
    #[inline(always)]
    fn no_fault(&self, looked: bool) -> Result<(), WaitError> {
        if looked { self.status.check() } else { self.status.check_near() }
    }

    /// Waits for one peer's requests. This thread has read `oldest_incomplete` itself afterwards. Does not fence then.
    #[inline(always)]
    fn wait_oldest(&self, peer: u32, position: u64, deadline: Deadline) -> Result<(), WaitError> {
        let deadline = Shared::start::<M>(deadline);
        let oldest_incomplete = self.queue.oldest_host_word(peer as u64);
        let looked;
        // The consumer stores `oldest_incomplete` before `consumer_index`, so this reads them in the opposite order,
        // with a fence between.
        ordered! {
            "consumer_index read before oldest_incomplete":
            {
                self.wait_past(self.queue.consumer_host_word(), position, deadline.left::<M>())?;
                M::fence_acquire_sys();
            } then {
                looked = self.wait_past(oldest_incomplete, position, deadline.left::<M>())?;
            }
        }
        // Another thread may have read the word before the consumer took the requests, and found `NOTHING` then.
        if !looked {
            let word = oldest_incomplete.word;
            self.status.poll_host_word(deadline.left::<M>(), |_| word.load_relaxed_sys() >= position)?;
        }
        Ok(())
    }

    /// Waits until an index that the consumer publishes has reached `position`. Returns whether this thread has read
    /// the word itself. Does not fence.
    #[inline(always)]
    fn wait_past(&self, host: HostWord<M>, position: u64, deadline: Deadline) -> Result<bool, WaitError> {
        let mut look = Look::new(host);
        self.status.poll_host_word(deadline, |ends| look.is_past(&self.status, position, ends))?;
        Ok(look.is_mine())
    }
}

/// The wait for room, which a kernel has once and calls. Arguments are words, because a structure would be passed on
/// the stack.
mod outlined {
    use super::{ROOM, WAITS, is_empty};
    use crate::host_word::HostWord;
    use crate::queue::NOTHING;
    use crate::status::Status;
    use crate::sys::{Memory, Word};
    use gin_abi::Deadline;

    /// Looks for room once, for slot `index`. If that is [`NOTHING`], claims a slot if there is room. Returns the slot,
    /// if there is one, and the state of the post.
    #[cold]
    #[cfg_attr(target_arch = "nvptx64", inline(never))]
    #[expect(clippy::too_many_arguments, reason = "see above")]
    pub(super) fn look_for_room<M: Memory>(
        producer_index: M::Word,
        near: M::Word,
        consumer_index: M::Word,
        depth_mask: u32,
        index: u64,
        host: M::Word,
        copy: M::Word,
        start: u64,
        deadline: Deadline,
    ) -> (u64, u32) {
        M::pause_at_host_word();
        // A reason to stop counts only if the room found after it is not enough.
        let end = Status::<M> { host, kernel: host, copy }.end(start, deadline);
        let consumer_index = HostWord::<M> { word: consumer_index, near }.glance();
        let index = match index {
            NOTHING => claim_in_room::<M>(producer_index, consumer_index, depth_mask),
            claimed => claimed,
        };
        let state = match end {
            _ if index != NOTHING && is_empty(index, consumer_index, depth_mask) => ROOM,
            None => WAITS,
            Some(end) => end as u32,
        };
        (index, state)
    }

    /// Claims a slot if one is empty. Otherwise returns [`NOTHING`].
    #[inline(always)]
    fn claim_in_room<M: Memory>(producer_index: M::Word, consumer_index: u64, depth_mask: u32) -> u64 {
        let mut next = producer_index.load_relaxed_gpu();
        loop {
            let seen;
            // The claim succeeds only at the index that has room.
            ordered! {
                "room before the claim":
                {
                    if !is_empty(next, consumer_index, depth_mask) {
                        return NOTHING;
                    }
                } then {
                    seen = producer_index.cas_relaxed_gpu(next, next.wrapping_add(1));
                }
            }
            if seen == next {
                return next;
            }
            // Another thread's claim came first.
            next = seen;
        }
    }
}
