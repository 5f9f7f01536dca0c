// SPDX-License-Identifier: MIT OR Apache-2.0
//! The kernel's half of the queue.

use super::Queue;
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

/// The threads that post to a queue together: one thread, or lanes of a warp.
///
/// They stay together, because one may wait for a slot that another has yet to fill. Either all of them have claimed or
/// none has. Each calls [`ahead`](Self::ahead) and [`any`](Self::any) as often as the others.
pub trait Posters {
    /// Claims a slot for each thread of the group at once and returns the caller's index. Returns `None` if each thread
    /// claims for itself once it finds room.
    fn claim(&self) -> Option<u64>;

    /// Returns how many threads that claim in this queue before the caller bring `true`.
    fn ahead(&self, bit: bool) -> u64;

    /// Returns whether any thread of the group brings `true`.
    fn any(&self, bit: bool) -> bool;
}

/// A thread that posts alone.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct OneThread {
    /// The slot that it has claimed. If `None`, it claims once it finds room.
    pub claimed: Option<u64>,
}

impl Posters for OneThread {
    #[inline(always)]
    fn claim(&self) -> Option<u64> {
        self.claimed
    }

    #[inline(always)]
    fn ahead(&self, _: bool) -> u64 {
        0
    }

    #[inline(always)]
    fn any(&self, bit: bool) -> bool {
        bit
    }
}

impl<M: Memory, const N: usize> Producer<M, N> {
    /// Returns whether slot `index` is empty, given that `consumer_index` slots have been emptied.
    ///
    /// The difference is signed, because an index that was read a while ago may be less than `consumer_index`.
    #[inline(always)]
    fn is_empty(&self, index: u64, consumer_index: u64) -> bool {
        (index.wrapping_sub(consumer_index) as i64) <= self.queue.depth_mask as i64
    }

    /// Claims `count` slots if `leads`, with or without room, and returns the index of the first. The caller must fill
    /// all of them.
    #[inline(always)]
    pub fn claim(&self, leads: bool, count: u64, sharing: Sharing) -> u64 {
        order::claim(self.queue.producer_index, leads, count, sharing)
    }

    /// Writes one request and returns the index of its slot. Bit 0 of each word is ignored. All threads of `posters`
    /// call.
    ///
    /// If a slot is claimed already, waits until it is empty. Otherwise waits for room and claims last, so that a
    /// timeout leaves the queue as it was.
    ///
    /// The payload of the request must have been released before, at the scope of its reader. A thread that fills
    /// several slots of one claim fills them in ascending order.
    ///
    /// A thread fills its slot as soon as it finds it empty, before it asks the others, so no slot waits for another
    /// thread's wait. A thread claims only if there is room behind all threads that are ahead of it. In the next round
    /// it sees how many are left, so more threads than the queue has slots get through.
    ///
    /// # Errors
    /// [`WaitError`] if there was no room in time, or if the communicator is aborted or has a fault; with the claimed
    /// index, if there is one. That slot stays a hole that no thread can fill: the caller must report a fault.
    #[inline(always)]
    pub fn post(
        &self,
        words: [u64; N],
        posters: &impl Posters,
        sharing: Sharing,
        deadline: Deadline,
    ) -> Result<u64, (WaitError, Option<u64>)> {
        let start = if deadline.is_none() { 0 } else { M::clock_ns() };
        let mut look = Look::new(self.queue.consumer_host_word());
        // The post reads over PCIe only if this guess leaves no room. It reads the guess before the claim, so that the
        // two trips to L2 overlap.
        let mut consumer_index = self.queue.guess().load_relaxed_gpu();
        let claimed = posters.claim();
        let (mut has, mut index) = (claimed.is_some(), claimed.unwrap_or(0));
        let (mut waiting, mut stop, mut failed) = (true, None, None);
        loop {
            if claimed.is_none() {
                let wants = waiting & !has;
                let ahead = posters.ahead(wants);
                if wants && self.is_empty(self.position().wrapping_add(ahead), consumer_index) {
                    (has, index) = (true, self.claim(true, 1, sharing));
                }
            }
            let filling = waiting & has & self.is_empty(index, consumer_index);
            self.store_if(filling, index, words);
            waiting &= !filling;
            // A stop counts only if the room found together with it was not enough.
            if waiting & stop.is_some() {
                (waiting, failed) = (false, stop);
            }
            if !posters.any(waiting) {
                break;
            }
            // All threads do the rest, so that they stay together.
            let stopped;
            (consumer_index, stopped) = self.look_again(&mut look, consumer_index);
            let over = !deadline.is_none() && M::clock_ns().wrapping_sub(start) >= deadline.ns();
            stop = match (stopped, over) {
                (true, _) => Some(WaitError::Fault),
                (false, true) => Some(WaitError::Deadline),
                (false, false) => None,
            };
        }
        look.end();
        match failed {
            None => Ok(index),
            Some(stop) => Err((stop, has.then_some(index))),
        }
    }

    /// Returns the number of slots emptied, if this thread or another has read it. Only here a post reads over PCIe.
    #[inline(always)]
    fn look(&self, look: &mut Look<M>) -> Option<u64> {
        let consumer_index = look.now(None)?;
        if look.is_mine() {
            self.queue.guess().store_relaxed_gpu(consumer_index);
        }
        Some(consumer_index)
    }

    /// Pauses, then returns the number of slots emptied, at least the known `consumer_index`, and whether the
    /// communicator has a fault.
    #[inline(always)]
    fn look_again(&self, look: &mut Look<M>, consumer_index: u64) -> (u64, bool) {
        M::pause_at_host_word();
        let stopped = self.status.is_stopped();
        (self.look(look).unwrap_or(consumer_index), stopped)
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
            self.status.poll_host_word(deadline.left::<M>(), || word.load_relaxed_sys() >= position)?;
        }
        Ok(())
    }

    /// Waits until an index that the consumer publishes has reached `position`. Returns whether this thread has read
    /// the word itself. Does not fence.
    #[inline(always)]
    fn wait_past(&self, host: HostWord<M>, position: u64, deadline: Deadline) -> Result<bool, WaitError> {
        let mut look = Look::new(host);
        let outcome =
            self.status.poll_host_word(deadline, || look.now(Some(&self.status)).is_some_and(|now| now >= position));
        let looked = look.is_mine();
        look.end();
        outcome.map(|()| looked)
    }
}
