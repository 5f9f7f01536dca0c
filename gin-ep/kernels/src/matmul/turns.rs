// SPDX-License-Identifier: MIT OR Apache-2.0
//! The words by which the blocks of a launch share work, generic over the memory. `docs/matmul.md` has the argument.

use gin_device::sys::{Memory, Word};

/// Number of words.
pub const WORDS: u64 = 4;

/// The words of the launches on one window, which follow each other.
#[derive(Clone, Copy, Debug)]
pub struct Turns<M: Memory> {
    /// The epoch of the last launch that has ended.
    ended: M::Word,
    /// Number of parts to send that were taken.
    parts: M::Word,
    /// Number of tiles that were taken.
    tiles: M::Word,
    /// Number of blocks that have ended.
    left: M::Word,
}

impl<M: Memory> Turns<M> {
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

    /// Takes the next tile.
    #[inline(always)]
    pub fn take_tile(&self) -> u64 {
        self.tiles.add_relaxed_gpu(1)
    }

    /// Ends a block. The caller has met its threads, and none of them takes more. The last block sets the words for
    /// the next launch.
    #[inline(always)]
    pub fn leave(&self, blocks: u64, epoch: u64) {
        M::fence_release_gpu();
        if self.left.add_relaxed_gpu(1) == blocks - 1 {
            M::fence_acquire_gpu();
            self.parts.store_relaxed_gpu(0);
            self.tiles.store_relaxed_gpu(0);
            self.left.store_relaxed_gpu(0);
            self.ended.store_relaxed_gpu(epoch);
        }
    }
}

/// Counts `number` of the `of` rows of a tile, which a block has sent and whose threads have met the caller. Returns
/// whether they were the last ones of this launch; then the caller may raise their flag. The counter was 0 at first.
///
/// Ordering: release, at system scope; for the last rows also acquire, at GPU scope.
#[inline(always)]
pub fn count<M: Memory>(counter: M::Word, number: u64, of: u64) -> bool {
    M::fence_release_sys();
    let is_last = counter.add_relaxed_gpu(number).wrapping_add(number).is_multiple_of(of);
    if is_last {
        M::fence_acquire_gpu();
    }
    is_last
}
