// SPDX-License-Identifier: MIT OR Apache-2.0
//! The words by which blocks and ranks agree, generic over the memory.

use gin_device::sys::{Memory, Word};

/// The words of one launch.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Launch<M: Memory> {
    /// Number of blocks that have started.
    pub(crate) started: M::Word,
    /// Number of blocks that have sent.
    pub(crate) sent: M::Word,
    /// Number of units of the rest that were taken.
    pub(crate) taken: M::Word,
}

/// The state of a block after it has sent.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Sent {
    /// All blocks have sent, and the caller sees what they did.
    pub(crate) is_last: bool,
    /// All blocks have started, so the block may wait.
    pub(crate) may_wait: bool,
}

impl<M: Memory> Launch<M> {
    /// Returns the words from `first` on.
    #[inline(always)]
    pub(crate) fn new(first: M::Word) -> Self {
        Self { started: first, sent: first.at(1), taken: first.at(2) }
    }

    /// Stores 0 to all words. No block uses them.
    #[inline(always)]
    pub(crate) fn clear(&self) {
        self.started.store_relaxed_gpu(0);
        self.sent.store_relaxed_gpu(0);
        self.taken.store_relaxed_gpu(0);
    }

    /// Counts a block that starts.
    #[inline(always)]
    pub(crate) fn start(&self) {
        self.started.red_add_relaxed_gpu(1);
    }

    /// Counts a block that has sent. Its threads have met the caller.
    ///
    /// Ordering: release, at system scope; for the last block also acquire, at GPU scope.
    #[inline(always)]
    pub(crate) fn finish(&self, blocks: u64) -> Sent {
        M::fence_release_sys();
        let may_wait = self.started.load_relaxed_gpu() == blocks;
        let is_last = self.sent.add_relaxed_gpu(1) == blocks - 1;
        if is_last {
            M::fence_acquire_gpu();
        }
        // All blocks have started if all have sent, though the load may be older than that.
        Sent { is_last, may_wait: may_wait | is_last }
    }

    /// Takes the next unit of the rest.
    #[inline(always)]
    pub(crate) fn take(&self) -> u64 {
        self.taken.add_relaxed_gpu(1)
    }
}

/// Raises a flag after everything that the caller has seen.
#[inline(always)]
pub(crate) fn raise<M: Memory>(flag: M::Word, epoch: u64) {
    M::fence_release_sys();
    flag.store_relaxed_sys(epoch);
}

/// Returns whether a flag is at or past an epoch, on the circle of 2^64 values.
#[inline(always)]
pub(crate) fn reached(flag: u64, epoch: u64) -> bool {
    flag.wrapping_sub(epoch) < 1 << 63
}

/// Makes all blocks agree whether a rank took part in an epoch. The first that asks decides.
#[inline(always)]
pub(crate) fn agree<M: Memory>(verdict: M::Word, epoch: u64, took_part: bool) -> bool {
    let mine = epoch << 1 | u64::from(took_part);
    let mut seen = verdict.load_relaxed_gpu();
    while seen >> 1 != epoch << 1 >> 1 {
        let before = verdict.cas_relaxed_gpu(seen, mine);
        if before == seen {
            return took_part;
        }
        seen = before;
    }
    seen & 1 != 0
}
