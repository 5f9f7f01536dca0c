// SPDX-License-Identifier: MIT OR Apache-2.0
//! The kernel's half of the queue.

use super::Queue;
use crate::far::{Far, Look};
use crate::gin::Sharing;
use crate::status::{Shared, Status, Stop};
use crate::sys::{Memory, Word};
use gin_abi::Deadline;

/// Posts requests and waits for them. `Copy`: every thread has its own.
#[derive(Clone, Copy, Debug)]
pub struct Producer<M: Memory, const N: usize> {
    /// The queue.
    pub queue: Queue<M, N>,
    /// What ends waits.
    pub status: Status<M>,
}

/// Slots that a thread, or a group of lanes, may fill: `first .. first + count`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Claim {
    /// Index of the first slot.
    pub first: u64,
    /// Number of slots.
    pub count: u64,
}

impl<M: Memory, const N: usize> Producer<M, N> {
    /// Whether slot `index` is empty when `taken` slots are known to have been emptied.
    ///
    /// Signed, because an index that was read a while ago may lie behind `taken`.
    #[inline(always)]
    fn is_empty(&self, index: u64, taken: u64) -> bool {
        (index.wrapping_sub(taken) as i64) <= self.queue.depth_mask as i64
    }

    /// Waits until slot `index()` is empty.
    #[inline(always)]
    fn wait_empty(&self, index: impl Fn() -> u64, deadline: Deadline) -> Result<(), Stop> {
        if self.is_empty(index(), self.queue.guess().load_relaxed_gpu()) {
            return Ok(());
        }
        // Only here is something read over PCIe.
        let mut look = Look::new(self.queue.far_taken());
        let outcome =
            self.status.poll_far(deadline, || self.look(&mut look).is_some_and(|taken| self.is_empty(index(), taken)));
        look.end();
        outcome
    }

    /// Claims `count` slots.
    ///
    /// With a deadline, the claim is made only once there is room for all of them (or for a queueful, if they are
    /// more), so that a post that times out here leaves the queue as it was.
    ///
    /// # Errors
    /// [`Stop`] if there was no room in time, or the communicator is aborted or has a fault. Nothing is claimed then.
    #[inline(always)]
    pub fn claim(&self, count: u64, deadline: Deadline) -> Result<Claim, Stop> {
        if !deadline.is_none() {
            let ahead = count.min(self.queue.depth()) - 1;
            self.wait_empty(|| self.position().wrapping_add(ahead), deadline)?;
        }
        Ok(Claim { first: self.add_if(true, count, Sharing::Gpu), count })
    }

    /// Claims `count` slots if `leads`; gives the first one's index then.
    #[inline(always)]
    pub(crate) fn add_if(&self, leads: bool, count: u64, sharing: Sharing) -> u64 {
        let claim = self.queue.claim;
        match sharing {
            Sharing::Gpu => claim.add_relaxed_gpu_if(leads, count),
            Sharing::Block if leads => claim.add_relaxed_cta(count),
            Sharing::Thread if leads => {
                let first = claim.load_relaxed_gpu();
                claim.store_relaxed_gpu(first.wrapping_add(count));
                first
            }
            Sharing::Block | Sharing::Thread => 0,
        }
    }

    /// Waits until the claimed slot `index` is empty and stores a request into it. Bit 0 of each word is ignored.
    ///
    /// Whoever filled several slots of one claim goes on in ascending order. The payload that the request refers to
    /// must have been released before, at the scope of its reader.
    ///
    /// # Errors
    /// [`Stop`] if the wait for the slot ended early. The claimed slot stays a hole then that nobody can fill: the
    /// caller must report a fault.
    #[inline(always)]
    pub fn fill(&self, index: u64, words: [u64; N], deadline: Deadline) -> Result<(), Stop> {
        self.wait_empty(|| index, deadline)?;
        self.store_if(true, index, words);
        Ok(())
    }

    /// As [`fill`](Self::fill) without a deadline, by threads of which one may wait for a slot that another has yet to
    /// fill.
    ///
    /// `any` says whether any of them brings `true`; all call it equally often. A slot is filled as soon as it is found
    /// empty, and before the others are asked, so nobody's slot waits for somebody's wait.
    ///
    /// # Errors
    /// As [`fill`](Self::fill).
    #[inline(always)]
    pub fn fill_together(&self, index: u64, words: [u64; N], any: impl Fn(bool) -> bool) -> Result<(), Stop> {
        let mut look = Look::new(self.queue.far_taken());
        let mut taken = self.queue.guess().load_relaxed_gpu();
        let (mut waiting, mut outcome) = (true, Ok(()));
        loop {
            let filling = waiting & self.is_empty(index, taken);
            self.store_if(filling, index, words);
            waiting &= !filling;
            if !any(waiting) {
                break;
            }
            // All do the rest, so that they stay together.
            let stopped;
            (taken, stopped) = self.look_again(&mut look, taken);
            // Each must have seen for itself what stops it.
            if !any(waiting & !stopped) {
                if waiting {
                    outcome = Err(Stop::Fault);
                }
                break;
            }
        }
        look.end();
        outcome
    }

    /// Claims a slot once there is room, and fills it; for threads that do so together, as in
    /// [`fill_together`](Self::fill_together).
    ///
    /// `ahead` says how many of those that claim in this queue, come before the caller, and bring `true`; like `any`, all
    /// call it equally often. Each claims only if there is room behind all of them, and sees in the next round how many
    /// are left, so more threads than the queue has slots get through it.
    ///
    /// # Errors
    /// [`Stop`] if there was no room in time, or the communicator is aborted or has a fault. With the index that was
    /// claimed, if one was, which stays a hole: the caller must report a fault then.
    #[inline(always)]
    pub fn post_in_time(
        &self,
        words: [u64; N],
        sharing: Sharing,
        deadline: Deadline,
        ahead: impl Fn(bool) -> u64,
        any: impl Fn(bool) -> bool,
    ) -> Result<(), (Stop, Option<u64>)> {
        let start = M::clock_ns();
        let mut look = Look::new(self.queue.far_taken());
        let mut taken = self.queue.guess().load_relaxed_gpu();
        let (mut index, mut waiting, mut outcome) = (None, true, Ok(()));
        loop {
            let wants = waiting && index.is_none();
            let ahead = ahead(wants);
            if wants && self.is_empty(self.position().wrapping_add(ahead), taken) {
                index = Some(self.add_if(true, 1, sharing));
            }
            if let Some(index) = index {
                let filling = waiting & self.is_empty(index, taken);
                self.store_if(filling, index, words);
                waiting &= !filling;
            }
            if !any(waiting) {
                look.end();
                return outcome;
            }
            let stopped;
            (taken, stopped) = self.look_again(&mut look, taken);
            let over = M::clock_ns().wrapping_sub(start) >= deadline.ns();
            if waiting & (stopped | over) {
                outcome = Err((if stopped { Stop::Fault } else { Stop::Deadline }, index));
                waiting = false;
            }
        }
    }

    /// The number of slots emptied, if somebody knows. Only here is something read over PCIe for a post.
    #[inline(always)]
    fn look(&self, look: &mut Look<M>) -> Option<u64> {
        let taken = look.now(None)?;
        if look.is_mine() {
            self.queue.guess().store_relaxed_gpu(taken);
        }
        Some(taken)
    }

    /// The same, where `taken` was known before; whether the communicator has a fault.
    #[inline(always)]
    fn look_again(&self, look: &mut Look<M>, taken: u64) -> (u64, bool) {
        M::pause_far();
        let stopped = self.status.is_stopped();
        (self.look(look).unwrap_or(taken), stopped)
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

    /// The index that the next claim will get: everything posted before has a smaller one.
    #[inline(always)]
    pub fn position(&self) -> u64 {
        self.queue.claim.load_relaxed_gpu()
    }

    /// Waits until all requests below `position` are finished.
    ///
    /// Ordering: acquire, at system scope: what gets brought is visible, and a fault that was posted for one of the
    /// requests can be seen.
    ///
    /// # Errors
    /// [`Stop`] if the wait ended early, or if the communicator has a fault when it ends.
    #[inline(always)]
    pub fn wait_done(&self, position: u64, deadline: Deadline) -> Result<(), Stop> {
        let looked = self.wait_past(self.queue.far_done(), position, deadline)?;
        M::fence_acquire_sys();
        self.no_fault(looked)
    }

    /// As [`wait_done`](Self::wait_done), but what gets brought, and the fault of one of the requests, may be seen only
    /// after an acquire fence of the caller's.
    ///
    /// # Errors
    /// As [`wait_done`](Self::wait_done).
    #[inline(always)]
    pub fn wait_done_relaxed(&self, position: u64, deadline: Deadline) -> Result<(), Stop> {
        let looked = self.wait_past(self.queue.far_done(), position, deadline)?;
        self.no_fault(looked)
    }

    /// Waits until all requests to `peer` below `position` are finished, whatever becomes of those to others.
    ///
    /// Ordering and errors as [`wait_done`](Self::wait_done).
    ///
    /// # Errors
    /// As [`wait_done`](Self::wait_done).
    #[inline(always)]
    pub fn wait_peer(&self, peer: u32, position: u64, deadline: Deadline) -> Result<(), Stop> {
        let looked = self.wait_oldest(peer, position, deadline)?;
        M::fence_acquire_sys();
        self.no_fault(looked)
    }

    /// As [`wait_peer`](Self::wait_peer), with the order of [`wait_done_relaxed`](Self::wait_done_relaxed).
    ///
    /// # Errors
    /// As [`wait_done`](Self::wait_done).
    #[inline(always)]
    pub fn wait_peer_relaxed(&self, peer: u32, position: u64, deadline: Deadline) -> Result<(), Stop> {
        let looked = self.wait_oldest(peer, position, deadline)?;
        self.no_fault(looked)
    }

    /// Whether a request that is finished failed, for who looked at the word that says so or had it from another thread.
    #[inline(always)]
    fn no_fault(&self, looked: bool) -> Result<(), Stop> {
        if looked { self.status.check() } else { self.status.check_near() }
    }

    /// The waits for one peer; says what [`wait_past`](Self::wait_past) says of the last. Does not fence after it.
    #[inline(always)]
    fn wait_oldest(&self, peer: u32, position: u64, deadline: Deadline) -> Result<bool, Stop> {
        let deadline = Shared::start::<M>(deadline);
        let oldest = self.queue.far_oldest(peer as u64);
        let looked;
        // The consumer stores `oldest` before `taken`, so they are read the other way round, with a fence between.
        ordered! {
            "taken read before oldest":
            {
                self.wait_past(self.queue.far_taken(), position, deadline.left::<M>())?;
                M::fence_acquire_sys();
            } then {
                looked = self.wait_past(oldest, position, deadline.left::<M>())?;
            }
        }
        Ok(looked)
    }

    /// Waits until an index that the consumer publishes has reached `position`; says whether this thread has looked at the
    /// word itself. Does not fence.
    #[inline(always)]
    fn wait_past(&self, far: Far<M>, position: u64, deadline: Deadline) -> Result<bool, Stop> {
        let mut look = Look::new(far);
        let outcome =
            self.status.poll_far(deadline, || look.now(Some(&self.status)).is_some_and(|now| now >= position));
        let looked = look.is_mine();
        look.end();
        outcome.map(|()| looked)
    }
}
