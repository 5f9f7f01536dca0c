// SPDX-License-Identifier: MIT OR Apache-2.0
//! The arena: one part on each rank, and how a kernel reaches the parts of others.

use crate::params::{MASKED, SlotParams};
use crate::protocol::Flag;
use crate::status::{self, Code};
use gin_device::internal::status::WaitError;
use gin_device::prelude::*;
use gin_device::sys::{GlobalWord, Word};

/// The place of a row that its rank does not send.
pub(crate) const NO_PLACE: u32 = u32::MAX;

/// The arena of all ranks.
#[derive(Clone, Copy)]
pub(crate) struct Arena<R = Near> {
    window: Window<u64>,
    world: Team,
    pub(crate) route: R,
}

impl Arena {
    /// Returns the arena, if loads and stores reach all ranks. Otherwise reports a fault.
    #[inline(always)]
    pub(crate) fn new(comm: &Comm, window: &Window<u64>) -> Option<Self> {
        let world = comm.world();
        if comm.lsa().size() == world.size() {
            return Some(Self::by(comm, window, Near));
        }
        if Block.elect() && block_in_grid() == 0 {
            comm.report_code(u64::from(comm.lsa().size()));
        }
        None
    }
}

impl<R: Reach> Arena<R> {
    /// Returns the arena, of which `route` reaches all parts.
    #[inline(always)]
    pub(crate) fn by(comm: &Comm, window: &Window<u64>, route: R) -> Self {
        Self { window: *window, world: comm.world(), route }
    }

    /// Returns a rank of the group, which are all ranks of the communicator.
    #[inline(always)]
    fn member(&self, rank: u32) -> Rank {
        // Safety: callers pass ranks of the group.
        unsafe { Rank::new_unchecked(rank) }
    }

    /// Returns the address of this rank's part.
    #[inline(always)]
    pub(crate) fn here(&self) -> u64 {
        self.window.local_ptr().addr() as u64
    }

    /// Returns the address of the part of a rank that loads and stores reach.
    #[inline(always)]
    pub(crate) fn there(&self, rank: u32) -> u64 {
        self.window.peer_ptr(self.member(rank)).map_or(0, |part| part.addr() as u64)
    }

    #[inline(always)]
    pub(crate) fn rank(&self) -> u32 {
        self.world.rank()
    }

    #[inline(always)]
    pub(crate) fn word(&self, offset: u64) -> GlobalWord {
        // Safety: a word of the arena; all accesses to words of state are atomic.
        unsafe { GlobalWord::new(self.here() + offset) }
    }

    #[inline(always)]
    pub(crate) fn word_at(&self, rank: u32, offset: u64) -> GlobalWord {
        // Safety: as above.
        unsafe { GlobalWord::new(self.there(rank) + offset) }
    }
}

/// How a kernel reaches the ranks of a group.
pub(crate) trait Reach: Copy {
    /// A flag that a rank raises here.
    type Flag: Flag + Copy;

    /// Returns the ranks that a dispatch goes on without, as bits.
    fn masked(arena: &Arena<Self>, slot: &SlotParams) -> u64;

    /// Returns whether loads and stores do not reach a rank.
    fn is_remote(&self, rank: u32) -> bool;

    /// Returns the flag that `source` raises after its rows in a buffer. `word` is the flag of a rank that is not
    /// remote.
    fn sent(&self, word: GlobalWord, buffer: u64, source: u32) -> Self::Flag;

    /// Returns the flag that `source` raises after the rows that it returns.
    fn returned(&self, word: GlobalWord, source: u32) -> Self::Flag;

    /// Returns the offsets in this rank's part of the arena where rows for a remote rank and their metadata begin.
    fn staged(&self, buffer: u64, rank: u32) -> (u64, u64);

    /// Returns the offset in this rank's part of the arena where rows that go back to a remote rank begin.
    fn staged_back(&self, rank: u32) -> u64;

    /// Sends the rows of a dispatch to all remote ranks but `masked`, `count` of them to each, and raises their flags.
    /// All lanes of a warp call.
    fn send(arena: &Arena<Self>, slot: &SlotParams, epoch: u64, masked: u64, count: impl Fn(u32) -> u32);

    /// Returns rows to all remote ranks but `masked`, and raises their flags. All lanes of a warp call. The rows are
    /// received ones that the experts have replaced, or were [staged](Self::staged_back).
    fn give_back(arena: &Arena<Self>, slot: &SlotParams, epoch: u64, masked: u64, is_in_place: bool);

    /// Raises the flags for returned rows at all remote ranks but `masked`, without rows. All lanes of a warp call.
    fn give_nothing_back(arena: &Arena<Self>, slot: &SlotParams, epoch: u64, masked: u64);
}

/// Loads and stores reach all ranks.
#[derive(Clone, Copy)]
pub(crate) struct Near;

impl Reach for Near {
    type Flag = GlobalWord;

    #[inline(always)]
    fn masked(arena: &Arena<Self>, slot: &SlotParams) -> u64 {
        arena.word(slot.word(MASKED)).load_relaxed_gpu()
    }

    #[inline(always)]
    fn is_remote(&self, _: u32) -> bool {
        false
    }

    #[inline(always)]
    fn sent(&self, word: GlobalWord, _: u64, _: u32) -> GlobalWord {
        word
    }

    #[inline(always)]
    fn returned(&self, word: GlobalWord, _: u32) -> GlobalWord {
        word
    }

    #[inline(always)]
    fn staged(&self, _: u64, _: u32) -> (u64, u64) {
        (0, 0)
    }

    #[inline(always)]
    fn staged_back(&self, _: u32) -> u64 {
        0
    }

    #[inline(always)]
    fn send(_: &Arena<Self>, _: &SlotParams, _: u64, _: u64, _: impl Fn(u32) -> u32) {}

    #[inline(always)]
    fn give_back(_: &Arena<Self>, _: &SlotParams, _: u64, _: u64, _: bool) {}

    #[inline(always)]
    fn give_nothing_back(_: &Arena<Self>, _: &SlotParams, _: u64, _: u64) {}
}

/// Reports a rank whose flag did not come, and goes on without it.
#[inline(always)]
pub(crate) fn is_silent<R: Reach>(
    arena: &Arena<R>,
    slot: &SlotParams,
    source: u32,
    epoch: u64,
    (stop, seen): (WaitError, u64),
) {
    let code = if stop == WaitError::Deadline { Code::Silent } else { Code::Stopped };
    status::report(arena.here(), slot, code, source, 0, seen, u64::from(epoch as u32));
    arena.word(slot.word(MASKED)).red_or_relaxed_gpu(1 << source);
}

/// Returns the number of the thread in its warp.
#[inline(always)]
pub(crate) fn lane_index() -> u32 {
    gin_device::coop::lane()
}
