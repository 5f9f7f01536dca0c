// SPDX-License-Identifier: MIT OR Apache-2.0
//! The board on which the ranks of a communicator report faults.
//!
//! Each rank has one slot, and the first fault that a rank posts stays. No call waits, so proxies post and look.

use gin_abi::{Fault, FaultKind};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

/// A fault, and the rank that found it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Notice {
    /// The world rank.
    pub rank: u32,
    /// The fault of that rank.
    pub fault: Fault,
}

impl Notice {
    /// Returns the fault that the kernels of `rank` see. An abort, and the loss of a third rank, stay as they are.
    /// Another fault of another rank becomes [`FaultKind::Elsewhere`], with that rank as peer, the code of its kind as
    /// the expected value, and that rank's seen value.
    pub fn for_rank(&self, rank: u32) -> Fault {
        let lost = self.fault.kind() == FaultKind::PeerLost && self.fault.peer() != rank;
        if rank == self.rank || self.fault.kind() == FaultKind::Aborted || lost {
            return self.fault;
        }
        let (subject, kind) = (self.fault.subject(), u64::from(self.fault.kind().code()));
        let fault = self.fault.with_kind(FaultKind::Elsewhere).with_peer(self.rank);
        fault.with_values(subject, kind, self.fault.seen())
    }
}

/// The post of one rank.
#[derive(Debug, Default)]
struct Slot {
    /// Set by the first thread that posts. So only that thread writes `post`, and it never waits.
    claimed: AtomicBool,
    /// The fault and its cause.
    post: OnceLock<(Fault, Box<str>)>,
}

/// A function that the posting thread calls after every post.
type Watch = Box<dyn Fn() + Send + Sync>;

/// The faults that the ranks of one communicator have found.
///
/// ```
/// use gin_abi::{Fault, FaultKind, Operation};
/// use gin_boot::board::{Board, Notice};
///
/// let board = Board::new(2);
/// let fault = Fault::new(FaultKind::Network, Operation::Put);
/// board.post(1, fault);
/// assert_eq!(board.first(), Some(Notice { rank: 1, fault }));
/// ```
#[derive(derive_more::Debug)]
#[debug("Board {{ count: {}, first: {:?}, .. }}", self.count(), self.first())]
pub struct Board {
    slots: Vec<Slot>,
    watch: Option<Watch>,
    /// 1 + the rank that posted first; 0 before the first post.
    first: AtomicU32,
    count: AtomicU32,
    /// Losses of ranks are not posted, and whether there was one.
    survives: AtomicBool,
    survived: AtomicBool,
}

impl Board {
    /// Makes a board for this many ranks.
    pub fn new(ranks: u32) -> Self {
        let slots = (0..ranks).map(|_| Slot::default()).collect();
        let (first, count) = (AtomicU32::new(0), AtomicU32::new(0));
        Self { slots, watch: None, first, count, survives: AtomicBool::new(false), survived: AtomicBool::new(false) }
    }

    /// Makes a board whose posting threads call `watch` after each post that stays. `watch` must neither wait nor post.
    pub fn watched(ranks: u32, watch: impl Fn() + Send + Sync + 'static) -> Self {
        Self { watch: Some(Box::new(watch)), ..Self::new(ranks) }
    }

    /// Posts a fault that `rank` found. The first fault of a rank stays; later ones are ignored.
    pub fn post(&self, rank: u32, fault: Fault) {
        self.post_because(rank, fault, "");
    }

    /// Does the same as [`post`](Self::post), with the known cause in words for people.
    pub fn post_because(&self, rank: u32, fault: Fault, cause: &str) {
        let slot = &self.slots[rank as usize];
        if slot.claimed.swap(true, Ordering::Relaxed) {
            return;
        }
        let _ = slot.post.set((fault, cause.into()));
        let _ = self.first.compare_exchange(0, rank + 1, Ordering::Release, Ordering::Relaxed);
        self.count.fetch_add(1, Ordering::Release);
        if let Some(watch) = &self.watch {
            watch();
        }
    }

    /// Posts a fault as [`post`](Self::post), and returns the first post of all ranks. Another thread may have begun to
    /// post for `rank`, and no post is visible yet: then it returns this fault.
    pub fn post_and_look(&self, rank: u32, fault: Fault) -> Notice {
        self.post(rank, fault);
        self.first().unwrap_or(Notice { rank, fault })
    }

    /// Returns the number of ranks that have posted. It changes with every post that stays.
    pub fn count(&self) -> u32 {
        self.count.load(Ordering::Acquire)
    }

    /// Keeps the bootstrap from posting losses of ranks here from now on.
    pub fn survive_losses(&self) {
        self.survives.store(true, Ordering::Release);
    }

    /// Returns whether a loss is not posted. If so, notes that there was one.
    pub(crate) fn survives_loss(&self) -> bool {
        let survives = self.survives.load(Ordering::Acquire);
        self.survived.fetch_or(survives, Ordering::Release);
        survives
    }

    /// Returns whether all ranks take part: none has posted a fault, and none is known to be lost.
    pub fn is_whole(&self) -> bool {
        self.count() == 0 && !self.survived.load(Ordering::Acquire)
    }

    /// Returns the first post of all ranks.
    pub fn first(&self) -> Option<Notice> {
        self.of(self.first.load(Ordering::Acquire).checked_sub(1)?)
    }

    /// Returns the cause that `rank` gave with its post; `None` without a post or a cause.
    pub fn cause(&self, rank: u32) -> Option<&str> {
        let (_, cause) = self.slots.get(rank as usize)?.post.get()?;
        Some(&**cause).filter(|cause| !cause.is_empty())
    }

    /// Returns the post of `rank`; `None` if it has not posted, or there is no such rank.
    pub fn of(&self, rank: u32) -> Option<Notice> {
        let (fault, _) = self.slots.get(rank as usize)?.post.get()?;
        Some(Notice { rank, fault: *fault })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use gin_abi::FaultSubject;
    use gin_abi::Operation;

    #[test]
    fn the_first_fault_of_each_rank_and_the_first_of_all_stay() {
        let board = Board::new(3);
        assert_eq!(board.first(), None);
        let fault =
            |seen| Fault::new(FaultKind::Network, Operation::Put).with_peer(7).with_values(FaultSubject::None, 0, seen);
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
    fn a_rank_knows_its_fault_while_another_thread_posts_it() {
        let board = Board::new(2);
        let fault = Fault::new(FaultKind::Timeout, Operation::None);
        // The other thread has come this far.
        board.slots[1].claimed.store(true, Ordering::Relaxed);
        assert_eq!(board.post_and_look(1, fault), Notice { rank: 1, fault });
        board.post(0, fault);
        assert_eq!(board.post_and_look(1, fault), Notice { rank: 0, fault });
    }

    #[test]
    fn other_ranks_learn_the_failed_rank_and_an_abort_as_such() {
        let fault = Fault::new(FaultKind::OutOfRange, Operation::Put).with_context(3).with_peer(1).with_values(
            FaultSubject::None,
            64,
            65,
        );
        let notice = Notice { rank: 2, fault };
        assert_eq!(notice.for_rank(2), fault);
        let seen = notice.for_rank(0);
        assert_eq!((seen.kind(), seen.peer(), seen.context()), (FaultKind::Elsewhere, 2, 3));
        assert_eq!((seen.expected(), seen.seen()), (u64::from(FaultKind::OutOfRange.code()), 65));
        let abort = Notice { rank: 2, fault: Fault::new(FaultKind::Aborted, Operation::None) };
        assert_eq!(abort.for_rank(0), abort.fault);
    }
}
