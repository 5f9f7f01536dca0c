// SPDX-License-Identifier: MIT OR Apache-2.0
//! Where the ranks of a communicator tell each other of faults.
//!
//! Each rank has one place; the first fault that a rank posts stays. Nothing here waits, so proxies post and look.

use gin_abi::{Fault, FaultKind, Operation};
use std::fmt;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// A fault, and the rank that found it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Notice {
    /// World rank.
    pub rank: u32,
    /// The fault of that rank.
    pub fault: Fault,
}

impl Notice {
    /// Returns the fault that the kernels of `rank` see. An abort, and the loss of a third rank, stay as they are.
    /// Another fault of another rank becomes [`FaultKind::Elsewhere`], with that rank as peer, the code of its kind as
    /// the expected value, and that rank's seen value.
    pub fn for_rank(&self, rank: u32) -> Fault {
        let lost = self.fault.kind == FaultKind::PeerLost && self.fault.peer != rank;
        if rank == self.rank || self.fault.kind == FaultKind::Aborted || lost {
            return self.fault;
        }
        Fault { kind: FaultKind::Elsewhere, peer: self.rank, expected: u64::from(self.fault.kind.code()), ..self.fault }
    }
}

#[derive(Debug, Default)]
struct Place {
    state: AtomicU32,
    words: [AtomicU64; 4],
    cause: OnceLock<Box<str>>,
}

const WRITING: u32 = 1;
const WRITTEN: u32 = 2;

/// Called after every post.
type Watch = Box<dyn Fn() + Send + Sync>;

/// The places of all ranks of one communicator.
pub struct Board {
    places: Vec<Place>,
    watch: Option<Watch>,
    /// 1 + the rank that posted first; 0 while nobody did.
    first: AtomicU32,
    count: AtomicU32,
}

impl Board {
    /// A board for this many ranks.
    pub fn new(ranks: u32) -> Self {
        let places = (0..ranks).map(|_| Place::default()).collect();
        Self { places, watch: None, first: AtomicU32::new(0), count: AtomicU32::new(0) }
    }

    /// A board as by [`new`](Self::new); the posting thread calls `watch` after each post that stays. `watch` must
    /// neither wait nor post.
    pub fn watched(ranks: u32, watch: impl Fn() + Send + Sync + 'static) -> Self {
        Self { watch: Some(Box::new(watch)), ..Self::new(ranks) }
    }

    /// Posts a fault that `rank` found. Its first one stays.
    pub fn post(&self, rank: u32, fault: Fault) {
        self.post_because(rank, fault, "");
    }

    /// The same, with what is known of the cause, in words for people.
    pub fn post_because(&self, rank: u32, fault: Fault, cause: &str) {
        let place = &self.places[rank as usize];
        if place.state.compare_exchange(0, WRITING, Ordering::Relaxed, Ordering::Relaxed).is_err() {
            return;
        }
        for (word, value) in place.words.iter().zip(fault.to_words()) {
            word.store(value, Ordering::Relaxed);
        }
        if !cause.is_empty() {
            // Nobody else writes to this place.
            let _ = place.cause.set(cause.into());
        }
        place.state.store(WRITTEN, Ordering::Release);
        let _ = self.first.compare_exchange(0, rank + 1, Ordering::Release, Ordering::Relaxed);
        self.count.fetch_add(1, Ordering::Release);
        if let Some(watch) = &self.watch {
            watch();
        }
    }

    /// Number of ranks that posted; changes with every post.
    pub fn count(&self) -> u32 {
        self.count.load(Ordering::Acquire)
    }

    /// Returns the first post of all.
    pub fn first(&self) -> Option<Notice> {
        self.of(self.first.load(Ordering::Acquire).checked_sub(1)?)
    }

    /// Returns the cause that `rank` knew of its post.
    pub fn cause(&self, rank: u32) -> Option<&str> {
        self.of(rank)?;
        self.places.get(rank as usize)?.cause.get().map(|cause| &**cause)
    }

    /// Returns the post of `rank`.
    pub fn of(&self, rank: u32) -> Option<Notice> {
        let place = self.places.get(rank as usize)?;
        if place.state.load(Ordering::Acquire) != WRITTEN {
            return None;
        }
        let words = [0, 1, 2, 3].map(|index: usize| place.words[index].load(Ordering::Relaxed));
        let fault = Fault::from_words(words).unwrap_or(Fault::new(FaultKind::AbiMismatch, Operation::None));
        Some(Notice { rank, fault })
    }
}

impl fmt::Debug for Board {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Board").field("count", &self.count()).field("first", &self.first()).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_fault_of_each_rank_and_the_first_of_all_stay() {
        let board = Board::new(3);
        assert_eq!(board.first(), None);
        let fault = |seen| Fault::new(FaultKind::Network, Operation::Put).peer(7).values(0, seen);
        board.post(2, fault(1));
        board.post(2, fault(2));
        board.post(0, fault(3));
        assert_eq!(board.count(), 2);
        assert_eq!(board.first(), Some(Notice { rank: 2, fault: fault(1) }));
        assert_eq!(board.of(0), Some(Notice { rank: 0, fault: fault(3) }));
        assert_eq!(board.of(1), None);
        assert_eq!(board.of(9), None);
    }

    #[test]
    fn other_ranks_learn_the_failed_rank_and_an_abort_as_such() {
        let fault = Fault::new(FaultKind::OutOfRange, Operation::Put).context(3).peer(1).values(64, 65);
        let notice = Notice { rank: 2, fault };
        assert_eq!(notice.for_rank(2), fault);
        let told = notice.for_rank(0);
        assert_eq!((told.kind, told.peer, told.context), (FaultKind::Elsewhere, 2, 3));
        assert_eq!((told.expected, told.seen), (u64::from(FaultKind::OutOfRange.code()), 65));
        let abort = Notice { rank: 2, fault: Fault::new(FaultKind::Aborted, Operation::None) };
        assert_eq!(abort.for_rank(0), abort.fault);
    }
}
