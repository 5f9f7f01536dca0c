// SPDX-License-Identifier: MIT OR Apache-2.0
//! The words by which the blocks of a launch share work, generic over the memory. `docs/matmul.md` has the argument.

use crate::protocol::{Flag, count, raise, reached};
use gin_device::sys::{Memory, Word};

/// Number of words.
pub const WORDS: u64 = 4;
/// The word of [`Lists`] that is the flag of all units.
pub(crate) const ALL_READY: u64 = 4;
/// The difference in the number of parts when no more may be taken.
const CLOSED: u64 = 1 << 32;

/// The words of the launches on one window, which follow each other.
#[derive(Clone, Copy, Debug)]
pub struct TileScheduler<M: Memory> {
    /// The epoch of the last launch that has ended.
    ended: M::Word,
    /// Number of parts to send that were taken.
    parts: M::Word,
    /// Number of tiles that were taken.
    tiles: M::Word,
    /// Number of blocks that have ended.
    left: M::Word,
}

impl<M: Memory> TileScheduler<M> {
    /// Returns the words from `first` on, which were 0 at first.
    #[inline(always)]
    pub fn new(first: M::Word) -> Self {
        Self { ended: first, parts: first.at(1), tiles: first.at(2), left: first.at(3) }
    }

    /// Returns the epoch of the last launch that has ended; 0 before the first.
    #[inline(always)]
    pub fn ended(&self) -> u64 {
        self.ended.load_relaxed_gpu()
    }

    /// Takes the next part to send.
    #[inline(always)]
    pub fn take_part(&self) -> u64 {
        self.parts.add_relaxed_gpu(1)
    }

    /// Takes the next part, unless they are [closed](Self::close).
    #[inline(always)]
    pub fn take_open_part(&self) -> Option<u32> {
        let part = self.parts.add_relaxed_gpu(1);
        if part < CLOSED { Some(part as u32) } else { None }
    }

    /// Lets nobody take more parts. Returns how many were taken. The caller alone calls.
    #[inline(always)]
    pub fn close(&self) -> u32 {
        self.parts.add_relaxed_gpu(CLOSED) as u32
    }

    /// Takes the next tile.
    #[inline(always)]
    pub fn take_tile(&self) -> u64 {
        self.tiles.add_relaxed_gpu(1)
    }

    /// Ends a block. The caller has met its threads, and none of them takes more. The last block sets the words for
    /// the next launch, and calls `clear`.
    #[inline(always)]
    pub fn leave(&self, blocks: u64, epoch: u64, clear: impl FnOnce()) {
        M::fence_release_gpu();
        if self.left.add_relaxed_gpu(1) == blocks - 1 {
            M::fence_acquire_gpu();
            self.parts.store_relaxed_gpu(0);
            self.tiles.store_relaxed_gpu(0);
            self.left.store_relaxed_gpu(0);
            clear();
            self.ended.store_relaxed_gpu(epoch);
        }
    }
}

/// The words by which the blocks of a launch hear the sources of rows, and list these by expert. A unit of work is a
/// source and an expert.
#[derive(Clone, Copy, Debug)]
pub struct Lists<M: Memory> {
    /// Number of blocks that would hear the sources.
    hearers: M::Word,
    /// Number of units that are listed: those of this rank's rows, and all.
    own: M::Word,
    all: M::Word,
    /// The flag of this rank's units, and that of all.
    pub own_ready: M::Word,
    /// See `own_ready`. It has the number of parts that were taken before.
    pub all_ready: M::Word,
    sources: M::Word,
}

impl<M: Memory> Lists<M> {
    /// Returns the words from `first` on, which were 0 at first.
    #[inline(always)]
    pub fn new(first: M::Word) -> Self {
        let (own_ready, all_ready) = (first.at(3), first.at(ALL_READY));
        Self { hearers: first, own: first.at(1), all: first.at(2), own_ready, all_ready, sources: first.at(5) }
    }

    /// Returns the number of words for `ranks` sources.
    pub const fn words(ranks: u64) -> u64 {
        5 + 3 * ranks
    }

    /// Returns the flag that the block that hears the sources raises when a source's rows are there, or will not be.
    #[inline(always)]
    pub fn heard(&self, source: u32) -> M::Word {
        self.sources.at(3 * u64::from(source))
    }

    /// Returns the number of units of a source that were taken.
    #[inline(always)]
    fn units(&self, source: u32) -> M::Word {
        self.sources.at(3 * u64::from(source) + 1)
    }

    /// Returns the number of places in the list of a source's rows that were taken.
    #[inline(always)]
    fn places(&self, source: u32) -> M::Word {
        self.sources.at(3 * u64::from(source) + 2)
    }

    /// Returns whether the calling block hears the sources. Exactly one does.
    #[inline(always)]
    pub fn hears(&self) -> bool {
        self.hearers.add_relaxed_gpu(1) == 0
    }

    /// Takes the next unit of a source.
    #[inline(always)]
    pub fn take(&self, source: u32) -> u64 {
        self.units(source).add_relaxed_gpu(1)
    }

    /// Takes `number` places in the list of a source's rows. Returns the first.
    #[inline(always)]
    pub fn reserve(&self, source: u32, number: u32) -> u64 {
        self.places(source).add_relaxed_gpu(number.into())
    }

    /// Counts a unit that the block has listed, whose threads have met the caller; there are `of` units of a source.
    /// With the last one of this rank's rows, and of all `ranks`, it raises their flags. With the last one of all it
    /// closes the parts.
    #[inline(always)]
    pub fn finish(&self, is_own: bool, of: u64, ranks: u64, scheduler: &TileScheduler<M>, launch: u64) {
        if is_own && count::<M>(self.own, 1, of) {
            raise::<M>(self.own_ready, launch, 0);
        }
        if count::<M>(self.all, 1, of * ranks) {
            raise::<M>(self.all_ready, launch, scheduler.close());
        }
    }

    /// Sets the words for the next launch, in which flags have a greater number. No block uses them.
    #[inline(always)]
    pub fn clear(&self, ranks: u32) {
        self.hearers.store_relaxed_gpu(0);
        self.own.store_relaxed_gpu(0);
        self.all.store_relaxed_gpu(0);
        for source in 0..ranks {
            self.units(source).store_relaxed_gpu(0);
            self.places(source).store_relaxed_gpu(0);
        }
    }
}

/// Looks at a flag. Returns its number of rows if it is raised.
///
/// Ordering: acquire, at system scope, if it is raised.
#[inline(always)]
pub fn look<M: Memory>(flag: impl Flag, epoch: u64) -> Option<u32> {
    let seen = flag.look();
    if !reached(seen, epoch) {
        return None;
    }
    M::fence_acquire_sys();
    Some(seen as u32)
}
