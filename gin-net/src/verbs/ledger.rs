// SPDX-License-Identifier: MIT OR Apache-2.0
//! What is in a send queue, and what becomes of it when completions come.
//!
//! Entries of a reliable connection are carried out and end in order, so a completion is also one of every entry before
//! it that asked for none. The first that fails puts the queue pair into error: the NIC carries nothing more out, and every
//! entry behind it ends as flushed, each with a completion of its own. Only then is its memory let go.

use crate::NetError;
use std::collections::VecDeque;

/// An entry of a send queue.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct Entry {
    /// The request that is complete with it; the last of a request's entries has it.
    pub(super) request: Option<u64>,
    /// The window of this rank that it reads or writes.
    pub(super) window: Option<u32>,
    /// The next entry belongs to the same request.
    pub(super) part: bool,
}

/// What a completion says.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Outcome {
    /// It was carried out.
    Done,
    /// It failed.
    Failed(NetError),
    /// It was not carried out, as the queue pair was in error; this is what to say if nobody knows why.
    Flushed(NetError),
}

/// What has ended with a completion.
#[derive(Debug, Default)]
pub(super) struct Ended {
    /// Requests, in the order of posting.
    pub(super) requests: Vec<(u64, Result<(), NetError>)>,
    /// Windows of this rank, one for each entry that used one.
    pub(super) windows: Vec<u32>,
}

/// What is in a send queue.
#[derive(Debug)]
pub(super) struct Ledger {
    peer: u32,
    depth: u32,
    /// Number of the first entry; they wrap.
    first: u32,
    entries: VecDeque<Entry>,
    /// What the entry before has failed with that belongs to the same request.
    failing: Option<NetError>,
    broken: Option<NetError>,
    /// `broken` is what failed first, and not only that something did.
    known: bool,
}

impl Ledger {
    pub(super) fn new(peer: u32, depth: u32) -> Self {
        Self { peer, depth, first: 0, entries: VecDeque::new(), failing: None, broken: None, known: false }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Whether it has room for so many more.
    pub(super) fn has_room(&self, count: u32) -> bool {
        self.entries.len() as u32 + count <= self.depth
    }

    /// Number of the next entry.
    pub(super) fn next(&self) -> u32 {
        self.first.wrapping_add(self.entries.len() as u32)
    }

    /// Adds an entry.
    pub(super) fn push(&mut self, entry: Entry) {
        self.entries.push_back(entry);
    }

    /// Why nothing more can be posted.
    pub(super) fn broken(&self) -> Option<NetError> {
        match &self.broken {
            Some(NetError::PeerLost { peer, reason }) => {
                Some(NetError::PeerLost { peer: *peer, reason: reason.clone() })
            }
            Some(_) => Some(NetError::behind(self.peer)),
            None => None,
        }
    }

    /// What a request is told that cannot be posted any more; nothing if it can.
    pub(super) fn refusal(&mut self) -> Option<NetError> {
        // What is under way may have failed for another reason, which is to be told then.
        if self.entries.is_empty() && !self.known && self.broken.is_some() {
            self.known = true;
            return self.broken.clone();
        }
        self.broken()
    }

    /// The queue pair is in error, for this reason unless another comes to be known.
    pub(super) fn end(&mut self, error: NetError) {
        self.broken.get_or_insert(error);
    }

    /// A completion has come of the entry of this number.
    pub(super) fn complete(&mut self, number: u32, outcome: Outcome, ended: &mut Ended) {
        let before = number.wrapping_sub(self.first);
        // None that was posted: nothing can be said of any.
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
            // Nothing failed before: the queue pair was put into error, and the first request behind that says so.
            Outcome::Flushed(error) if !self.known => {
                self.known = true;
                Err(self.broken.get_or_insert(error).clone())
            }
            // Nothing is carried out behind what failed; whoever says so is not believed.
            _ => self.broken().map_or(Ok(()), Err),
        };
        self.pop(outcome, ended);
    }

    /// The last entries, so many, were not posted after all.
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
    fn one_completion_is_that_of_all_before_it() {
        let mut ledger = Ledger::new(3, 8);
        for entry in [end(10), PUT, end(11), Entry::default(), end(12), end(13)] {
            ledger.push(entry);
        }
        let mut ended = Ended::default();
        ledger.complete(4, Outcome::Done, &mut ended);
        assert_eq!(ended.requests, [(10, Ok(())), (11, Ok(())), (12, Ok(()))]);
        assert_eq!(ended.windows, [1]);
        assert!(!ledger.is_empty() && ledger.broken().is_none());
    }

    #[test]
    fn the_first_failure_is_that_of_its_request_and_all_behind_are_behind() {
        let mut ledger = Ledger::new(3, 8);
        for entry in [end(10), PUT, end(11), end(12)] {
            ledger.push(entry);
        }
        let mut ended = Ended::default();
        ledger.complete(1, Outcome::Failed(failure(10)), &mut ended);
        assert_eq!(ended.requests, [(10, Ok(()))], "what was carried out before is complete");
        for number in 2..4 {
            ledger.complete(number, Outcome::Flushed(failure(5)), &mut ended);
        }
        let behind = NetError::behind(3);
        assert_eq!(ended.requests[1..], [(11, Err(failure(10))), (12, Err(behind.clone()))]);
        assert_eq!(ledger.broken(), Some(behind));
    }

    #[test]
    fn requests_behind_a_lost_peer_say_so_too() {
        let lost = NetError::PeerLost { peer: 3, reason: "no answer".to_owned() };
        let mut ledger = Ledger::new(3, 8);
        ledger.push(end(1));
        ledger.push(end(2));
        let mut ended = Ended::default();
        ledger.complete(0, Outcome::Failed(lost.clone()), &mut ended);
        ledger.complete(1, Outcome::Flushed(failure(5)), &mut ended);
        assert_eq!(ended.requests, [(1, Err(lost.clone())), (2, Err(lost.clone()))]);
        ledger.end(failure(1));
        assert_eq!(ledger.broken(), Some(lost), "the first reason stays");
    }

    #[test]
    fn a_failed_entry_of_the_network_itself_is_nobodys() {
        let mut ledger = Ledger::new(3, 8);
        ledger.push(Entry::default());
        ledger.push(end(1));
        let mut ended = Ended::default();
        ledger.complete(0, Outcome::Failed(failure(12)), &mut ended);
        ledger.complete(1, Outcome::Flushed(failure(5)), &mut ended);
        assert_eq!(ended.requests, [(1, Err(NetError::behind(3)))]);
    }

    #[test]
    fn what_failed_is_told_though_the_queue_pair_was_seen_in_error_before() {
        let mut ledger = Ledger::new(3, 8);
        ledger.push(end(1));
        ledger.push(end(2));
        ledger.end(failure(5));
        let mut ended = Ended::default();
        ledger.complete(0, Outcome::Failed(failure(10)), &mut ended);
        ledger.complete(1, Outcome::Flushed(failure(5)), &mut ended);
        assert_eq!(ended.requests, [(1, Err(failure(10))), (2, Err(NetError::behind(3)))]);
    }

    #[test]
    fn the_first_request_behind_a_queue_pair_in_error_says_so() {
        let behind = NetError::behind(3);
        let mut ended = Ended::default();
        let mut ledger = Ledger::new(3, 8);
        ledger.push(end(1));
        ledger.push(end(2));
        ledger.end(failure(5));
        assert_eq!(ledger.refusal(), Some(behind.clone()), "what is under way comes first");
        ledger.complete(0, Outcome::Flushed(failure(6)), &mut ended);
        ledger.complete(1, Outcome::Flushed(failure(6)), &mut ended);
        assert_eq!(ended.requests, [(1, Err(failure(5))), (2, Err(behind.clone()))]);
        assert_eq!(ledger.refusal(), Some(behind.clone()));

        let mut quiet = Ledger::new(3, 8);
        assert_eq!(quiet.refusal(), None);
        quiet.end(failure(5));
        assert_eq!([quiet.refusal(), quiet.refusal()], [Some(failure(5)), Some(behind)]);
    }

    #[test]
    fn completions_of_nothing_are_left_alone() {
        let mut ledger = Ledger::new(3, 8);
        let mut ended = Ended::default();
        ledger.complete(0, Outcome::Done, &mut ended);
        ledger.push(end(1));
        ledger.complete(1, Outcome::Done, &mut ended);
        ledger.complete(u32::MAX, Outcome::Flushed(failure(5)), &mut ended);
        assert!(ended.requests.is_empty() && ledger.broken().is_none());
    }

    #[test]
    fn what_was_not_posted_fails_and_its_window_is_let_go() {
        let mut ledger = Ledger::new(3, 8);
        for entry in [end(1), PUT, end(2)] {
            ledger.push(entry);
        }
        let mut ended = Ended::default();
        ledger.abandon(2, &failure(7), &mut ended);
        assert_eq!((ended.requests.as_slice(), ended.windows.as_slice()), (&[(2, Err(failure(7)))][..], &[1][..]));
        assert_eq!(ledger.next(), 1);
        assert!(ledger.broken().is_some());
    }

    proptest! {
        #[test]
        fn every_request_ends_once_and_in_order_also_where_numbers_wrap(
            start in prop_oneof![Just(0u32), Just(u32::MAX - 7)], two in proptest::collection::vec(any::<bool>(), 1..60),
            every in 1u32..5, fails_at in proptest::option::of(0u32..60),
        ) {
            let mut ledger = Ledger { first: start, ..Ledger::new(3, 4) };
            let (mut ended, mut windows, mut posted) = (Ended::default(), 0, 0u32);
            for (id, two) in (0..).zip(&two) {
                let entries = 1 + u32::from(*two);
                while !ledger.has_room(entries) {
                    // Every so many, and the last one before the room ended, asked for a completion.
                    let done = ledger.first;
                    let last = ledger.next().wrapping_sub(1);
                    let next = done.wrapping_add(every - 1);
                    let number = if last.wrapping_sub(done) < every - 1 { last } else { next };
                    let fails = fails_at.is_some_and(|at| number.wrapping_sub(start) >= at);
                    ledger.complete(number, if fails { Outcome::Failed(failure(9)) } else { Outcome::Done }, &mut ended);
                }
                if *two {
                    ledger.push(PUT);
                    windows += 1;
                }
                ledger.push(end(id));
                posted += entries;
                prop_assert!(ledger.entries.len() <= 4);
            }
            let last = start.wrapping_add(posted - 1);
            ledger.complete(last, Outcome::Done, &mut ended);
            prop_assert!(ledger.is_empty());
            prop_assert_eq!(ended.windows.len(), windows);
            let ids: Vec<u64> = ended.requests.iter().map(|(id, _)| *id).collect();
            prop_assert_eq!(ids, (0..two.len() as u64).collect::<Vec<_>>());
            // Nothing succeeds behind a failure.
            let first_failed = ended.requests.iter().position(|(_, outcome)| outcome.is_err());
            prop_assert!(first_failed.is_none_or(|at| ended.requests[at..].iter().all(|(_, outcome)| outcome.is_err())));
        }
    }
}
