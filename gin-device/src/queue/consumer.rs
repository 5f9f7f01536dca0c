// SPDX-License-Identifier: MIT OR Apache-2.0
//! The proxy's half of the queue.

use super::{NOTHING, Queue};
use crate::fault::Fault;
use crate::signal_words::raise;
use crate::status::Status;
use crate::sys::{Memory, Word};

/// The end of a queue that takes requests in order and publishes their completion. A queue has one.
#[derive(Debug)]
pub struct Consumer<M: Memory, const N: usize> {
    queue: Queue<M, N>,
    head: u64,
    completion_index: u64,
}

impl<M: Memory, const N: usize> Consumer<M, N> {
    /// Returns the consumer of a new queue whose first index is `first`.
    ///
    /// # Safety
    /// - The queue was initialised for `first` and has no other consumer.
    pub unsafe fn new(queue: Queue<M, N>, first: u64) -> Self {
        Self { queue, head: first, completion_index: first }
    }

    /// Returns the index of the next request.
    pub fn head(&self) -> u64 {
        self.head
    }

    /// Returns the index below which all requests are complete.
    pub fn completion_index(&self) -> u64 {
        self.completion_index
    }

    /// Returns the next request if all of its words have arrived, with their phase bits. Does not take it: see
    /// [`take`](Self::take).
    ///
    /// Ordering: acquire, at system scope: the payload that the producer released is visible.
    pub fn peek(&self) -> Option<[u64; N]> {
        let phase = super::phase(self.head, self.queue.depth_log2);
        let slot = self.queue.slot(self.head);
        let mut words = [0; N];
        for (index, word) in words.iter_mut().enumerate() {
            *word = slot.at(index as u64).load_relaxed_sys();
            if *word & 1 != phase {
                return None;
            }
        }
        M::fence_acquire_sys();
        Some(words)
    }

    /// Takes the request that [`peek`](Self::peek) returned and empties its slot. Returns its index.
    ///
    /// `first_of` names the peer if this is the only incomplete request to it.
    pub fn take(&mut self, first_of: Option<u32>) -> u64 {
        let index = self.head;
        // Before `consumer_index`: a flush that sees the slot emptied must see this request as incomplete.
        ordered! {
            "oldest_incomplete before consumer_index":
            {
                if let Some(peer) = first_of {
                    // Release: a flush of earlier requests may see this value instead of the previous one, which
                    // reported them complete.
                    self.queue.oldest_incomplete.at(peer as u64).store_release_sys(index);
                }
            } then {
                self.queue.consumer_index.store_release_sys(index.wrapping_add(1));
            }
        }
        self.head = index.wrapping_add(1);
        index
    }

    /// Publishes that one request, or several, are complete.
    ///
    /// The order is: the fault, the counter, `oldest_incomplete`, `completion_index`. The data of a get must be visible
    /// before. A thread that sees one of the last three sees all that precede it.
    pub fn finish(&mut self, finished: Finished<'_, M>) {
        ordered! {
            "fault before completion_index":
            {
                if let Some((status, fault)) = finished.fault {
                    status.post(fault);
                }
            } then {
                if let Some(counter) = finished.counter {
                    raise(counter, 1);
                }
                self.queue.oldest_incomplete.at(finished.peer as u64).store_release_sys(finished.oldest_incomplete.unwrap_or(NOTHING));
                if finished.completion_index != self.completion_index {
                    self.completion_index = finished.completion_index;
                    self.queue.completion_index.store_release_sys(finished.completion_index);
                }
            }
        }
    }
}

/// The completion of one request, for [`Consumer::finish`].
#[derive(Clone, Copy, Debug)]
pub struct Finished<'a, M: Memory> {
    /// The fault to post and the status to post it to, if the request failed.
    pub fault: Option<(&'a Status<M>, Fault)>,
    /// The word of the counter to raise by one.
    pub counter: Option<M::Word>,
    /// The request's peer.
    pub peer: u32,
    /// Index of the oldest request to that peer that is still incomplete.
    pub oldest_incomplete: Option<u64>,
    /// All requests below are complete.
    pub completion_index: u64,
}
