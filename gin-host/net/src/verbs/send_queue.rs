// SPDX-License-Identifier: MIT OR Apache-2.0
//! Outstanding entries of a send queue, and the outcomes that completions give their requests.
//!
//! A reliable connection carries out its entries in order, and they complete in order. So a completion also covers
//! every earlier entry that asked for none. The first entry that fails puts the queue pair into error: the NIC carries
//! out nothing more, and every later entry is flushed, each with its own completion. Only then is its memory released.

use crate::NetError;
use std::collections::VecDeque;

/// An entry of a send queue.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct Entry {
    /// The request that completes with the entry: set in the last of a request's entries.
    pub(super) request: Option<u64>,
    /// The window of this rank that the entry reads or writes.
    pub(super) window: Option<u32>,
    /// The next entry belongs to the same request.
    pub(super) part: bool,
}

/// Outcome of an entry, as its completion reports it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Outcome {
    /// The NIC carried it out.
    Done,
    /// It failed.
    Failed(NetError),
    /// The NIC did not carry it out, because the queue pair was in error. Holds the error to report if the cause stays
    /// unknown.
    Flushed(NetError),
}

/// Requests and uses of windows that have ended.
#[derive(Debug, Default)]
pub(super) struct Ended {
    /// Requests with their outcomes, in the order of posting.
    pub(super) requests: Vec<(u64, Result<(), NetError>)>,
    /// Windows of this rank, one for each entry that used one.
    pub(super) windows: Vec<u32>,
}

/// A send queue.
#[derive(Debug)]
pub(super) struct SendQueue {
    peer: u32,
    depth: u32,
    /// Number of the first outstanding entry; numbers wrap.
    first: u32,
    /// The outstanding entries.
    pub(super) entries: VecDeque<Entry>,
    /// Error of the previous entry, if the next one belongs to the same request.
    failing: Option<NetError>,
    broken: Option<NetError>,
    /// `broken` is the first failure, and not only a sign of it.
    known: bool,
}

impl SendQueue {
    pub(super) fn new(peer: u32, depth: u32) -> Self {
        Self { peer, depth, first: 0, entries: VecDeque::new(), failing: None, broken: None, known: false }
    }

    /// Returns whether there is room for `count` more entries.
    pub(super) fn has_room(&self, count: u32) -> bool {
        self.entries.len() as u32 + count <= self.depth
    }

    /// Returns the number of the next entry.
    pub(super) fn next(&self) -> u32 {
        self.first.wrapping_add(self.entries.len() as u32)
    }

    /// Returns why nothing more can be posted, if so.
    pub(super) fn broken(&self) -> Option<NetError> {
        match &self.broken {
            Some(lost @ NetError::PeerLost { .. }) => Some(lost.clone()),
            Some(_) => Some(NetError::behind(self.peer)),
            None => None,
        }
    }

    /// Returns the error of a request that can no longer be posted; `None` if it can.
    pub(super) fn refusal(&mut self) -> Option<NetError> {
        // While entries are outstanding, one of their completions may still carry the cause.
        if self.entries.is_empty() && !self.known && self.broken.is_some() {
            self.known = true;
            return self.broken.clone();
        }
        self.broken()
    }

    /// Marks the queue pair failed for this reason, unless a completion carries the cause.
    pub(super) fn end(&mut self, error: NetError) {
        self.broken.get_or_insert(error);
    }

    /// Handles the completion of the entry of this number.
    pub(super) fn complete(&mut self, number: u32, outcome: Outcome, ended: &mut Ended) {
        let before = number.wrapping_sub(self.first);
        // Ignores a number that was not posted.
        if before as usize >= self.entries.len() {
            return;
        }
        for _ in 0..before {
            let outcome = self.broken().map_or(Ok(()), Err);
            self.pop(outcome, ended);
        }
        let outcome = match outcome {
            Outcome::Failed(error) if !self.known => {
                self.known = true;
                self.broken = Some(error.clone());
                Err(error)
            }
            // No entry failed before: the queue pair was put into error, and the first flushed request reports it.
            Outcome::Flushed(error) if !self.known => {
                self.known = true;
                Err(self.broken.get_or_insert(error).clone())
            }
            // The NIC carries out nothing after a failure; a completion that claims otherwise is not believed.
            _ => self.broken().map_or(Ok(()), Err),
        };
        self.pop(outcome, ended);
    }

    /// Removes the last `count` entries, which were not posted after all.
    pub(super) fn abandon(&mut self, count: usize, error: &NetError, ended: &mut Ended) {
        self.end(error.clone());
        for entry in self.entries.split_off(self.entries.len().saturating_sub(count)) {
            ended.windows.extend(entry.window);
            ended.requests.extend(entry.request.map(|id| (id, Err(error.clone()))));
        }
    }

    fn pop(&mut self, outcome: Result<(), NetError>, ended: &mut Ended) {
        let Some(entry) = self.entries.pop_front() else { return };
        self.first = self.first.wrapping_add(1);
        ended.windows.extend(entry.window);
        let outcome = self.failing.take().map_or(outcome, Err);
        match entry.request {
            Some(id) => ended.requests.push((id, outcome)),
            None => self.failing = outcome.err().filter(|_| entry.part),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const PUT: Entry = Entry { request: None, window: Some(1), part: true };

    fn end(request: u64) -> Entry {
        Entry { request: Some(request), ..Entry::default() }
    }

    fn failure(status: u64) -> NetError {
        NetError::Failed { context: "test", peer: 3, status }
    }

    #[test]
    fn a_completion_covers_all_earlier_entries() {
        let mut queue = SendQueue::new(3, 8);
        for entry in [end(10), PUT, end(11), Entry::default(), end(12), end(13)] {
            queue.entries.push_back(entry);
        }
        let mut ended = Ended::default();
        queue.complete(4, Outcome::Done, &mut ended);
        assert_eq!(ended.requests, [(10, Ok(())), (11, Ok(())), (12, Ok(()))]);
        assert_eq!(ended.windows, [1]);
        assert!(!queue.entries.is_empty() && queue.broken().is_none());
    }

    #[test]
    fn the_first_failure_belongs_to_its_request_and_later_ones_fail_behind_it() {
        let mut queue = SendQueue::new(3, 8);
        for entry in [end(10), PUT, end(11), end(12)] {
            queue.entries.push_back(entry);
        }
        let mut ended = Ended::default();
        queue.complete(1, Outcome::Failed(failure(10)), &mut ended);
        assert_eq!(ended.requests, [(10, Ok(()))], "earlier entries were carried out");
        for number in 2..4 {
            queue.complete(number, Outcome::Flushed(failure(5)), &mut ended);
        }
        let behind = NetError::behind(3);
        assert_eq!(ended.requests[1..], [(11, Err(failure(10))), (12, Err(behind.clone()))]);
        assert_eq!(queue.broken(), Some(behind));
    }

    #[test]
    fn requests_behind_a_lost_peer_report_the_loss_too() {
        let lost = NetError::PeerLost { peer: 3, reason: "no answer".to_owned() };
        let mut queue = SendQueue::new(3, 8);
        queue.entries.push_back(end(1));
        queue.entries.push_back(end(2));
        let mut ended = Ended::default();
        queue.complete(0, Outcome::Failed(lost.clone()), &mut ended);
        queue.complete(1, Outcome::Flushed(failure(5)), &mut ended);
        assert_eq!(ended.requests, [(1, Err(lost.clone())), (2, Err(lost.clone()))]);
        queue.end(failure(1));
        assert_eq!(queue.broken(), Some(lost), "the first reason stays");
    }

    #[test]
    fn a_failed_entry_of_the_network_itself_belongs_to_no_request() {
        let mut queue = SendQueue::new(3, 8);
        queue.entries.push_back(Entry::default());
        queue.entries.push_back(end(1));
        let mut ended = Ended::default();
        queue.complete(0, Outcome::Failed(failure(12)), &mut ended);
        queue.complete(1, Outcome::Flushed(failure(5)), &mut ended);
        assert_eq!(ended.requests, [(1, Err(NetError::behind(3)))]);
    }

    #[test]
    fn the_cause_is_reported_though_the_queue_pair_was_seen_in_error_before() {
        let mut queue = SendQueue::new(3, 8);
        queue.entries.push_back(end(1));
        queue.entries.push_back(end(2));
        queue.end(failure(5));
        let mut ended = Ended::default();
        queue.complete(0, Outcome::Failed(failure(10)), &mut ended);
        queue.complete(1, Outcome::Flushed(failure(5)), &mut ended);
        assert_eq!(ended.requests, [(1, Err(failure(10))), (2, Err(NetError::behind(3)))]);
    }

    #[test]
    fn the_first_request_behind_a_queue_pair_in_error_reports_it() {
        let behind = NetError::behind(3);
        let mut ended = Ended::default();
        let mut queue = SendQueue::new(3, 8);
        queue.entries.push_back(end(1));
        queue.entries.push_back(end(2));
        queue.end(failure(5));
        assert_eq!(queue.refusal(), Some(behind.clone()), "outstanding entries come first");
        queue.complete(0, Outcome::Flushed(failure(6)), &mut ended);
        queue.complete(1, Outcome::Flushed(failure(6)), &mut ended);
        assert_eq!(ended.requests, [(1, Err(failure(5))), (2, Err(behind.clone()))]);
        assert_eq!(queue.refusal(), Some(behind.clone()));

        let mut quiet = SendQueue::new(3, 8);
        assert_eq!(quiet.refusal(), None);
        quiet.end(failure(5));
        assert_eq!([quiet.refusal(), quiet.refusal()], [Some(failure(5)), Some(behind)]);
    }

    #[test]
    fn completions_of_unknown_entries_are_ignored() {
        let mut queue = SendQueue::new(3, 8);
        let mut ended = Ended::default();
        queue.complete(0, Outcome::Done, &mut ended);
        queue.entries.push_back(end(1));
        queue.complete(1, Outcome::Done, &mut ended);
        queue.complete(u32::MAX, Outcome::Flushed(failure(5)), &mut ended);
        assert!(ended.requests.is_empty() && queue.broken().is_none());
    }

    #[test]
    fn entries_that_were_not_posted_fail_and_release_their_windows() {
        let mut queue = SendQueue::new(3, 8);
        for entry in [end(1), PUT, end(2)] {
            queue.entries.push_back(entry);
        }
        let mut ended = Ended::default();
        queue.abandon(2, &failure(7), &mut ended);
        assert_eq!((ended.requests.as_slice(), ended.windows.as_slice()), (&[(2, Err(failure(7)))][..], &[1][..]));
        assert_eq!(queue.next(), 1);
        assert!(queue.broken().is_some());
    }

    proptest! {
        #[test]
        fn every_request_ends_once_and_in_order_also_where_numbers_wrap(
            start in prop_oneof![Just(0u32), Just(u32::MAX - 7)], two in proptest::collection::vec(any::<bool>(), 1..60),
            every in 1u32..5, fails_at in proptest::option::of(0u32..60),
        ) {
            let mut queue = SendQueue { first: start, ..SendQueue::new(3, 4) };
            let (mut ended, mut windows, mut posted) = (Ended::default(), 0, 0u32);
            for (id, two) in (0..).zip(&two) {
                let entries = 1 + u32::from(*two);
                while !queue.has_room(entries) {
                    // Every `every`th entry, and the last one before the room ended, asked for a completion.
                    let done = queue.first;
                    let last = queue.next().wrapping_sub(1);
                    let next = done.wrapping_add(every - 1);
                    let number = if last.wrapping_sub(done) < every - 1 { last } else { next };
                    let fails = fails_at.is_some_and(|at| number.wrapping_sub(start) >= at);
                    queue.complete(number, if fails { Outcome::Failed(failure(9)) } else { Outcome::Done }, &mut ended);
                }
                if *two {
                    queue.entries.push_back(PUT);
                    windows += 1;
                }
                queue.entries.push_back(end(id));
                posted += entries;
                prop_assert!(queue.entries.len() <= 4);
            }
            let last = start.wrapping_add(posted - 1);
            queue.complete(last, Outcome::Done, &mut ended);
            prop_assert!(queue.entries.is_empty());
            prop_assert_eq!(ended.windows.len(), windows);
            let ids: Vec<u64> = ended.requests.iter().map(|(id, _)| *id).collect();
            prop_assert_eq!(ids, (0..two.len() as u64).collect::<Vec<_>>());
            // Nothing succeeds after a failure.
            let first_failed = ended.requests.iter().position(|(_, outcome)| outcome.is_err());
            prop_assert!(first_failed.is_none_or(|at| ended.requests[at..].iter().all(|(_, outcome)| outcome.is_err())));
        }
    }
}
