// SPDX-License-Identifier: MIT OR Apache-2.0
//! A barrier over all blocks of a grid.
//!
//! All blocks of the grid must be resident (a cooperative launch). Otherwise running blocks wait for blocks that never
//! start.

use crate::comm::Comm;
use crate::coop::{Block, Coop, block_in_grid, grid_dim, lead};
use crate::fault::Fault;
use crate::status::{Status, WaitError};
use crate::sys::{GlobalWord, Memory, Word};
use gin_abi::{Deadline, FaultKind, Operation, Subject};

/// Arrives at `word` and waits until it counts `expected` arrivals.
#[doc(hidden)]
#[inline(always)]
pub fn meet<M: Memory>(word: M::Word, status: &Status<M>, expected: u64, deadline: Deadline) -> Result<(), WaitError> {
    M::fence_release_gpu();
    word.red_add_relaxed_gpu(1);
    status.poll(deadline, || word.load_relaxed_gpu() >= expected)?;
    M::fence_acquire_gpu();
    Ok(())
}

/// A barrier over the blocks of one grid, at a word in GPU memory that is 0 at first.
///
/// Every block makes its own value of this type and passes the same number of barriers.
#[derive(Debug)]
pub struct GridBarrier<'a> {
    comm: &'a Comm,
    word: GlobalWord,
    epoch: u64,
}

impl<'a> GridBarrier<'a> {
    /// Returns the barrier at `word`.
    ///
    /// # Safety
    /// - `word` is valid, aligned and in this GPU's memory.
    /// - It was 0 when the grid was launched, and only barriers of this grid use it.
    #[inline(always)]
    #[must_use]
    pub unsafe fn new(comm: &'a Comm, word: *mut u64) -> Self {
        // Safety: the caller's promise.
        Self { comm, word: unsafe { GlobalWord::new(word as usize as u64) }, epoch: 0 }
    }

    /// Waits for all threads of all blocks. All threads of the block call.
    ///
    /// Ordering: earlier writes of every thread of the grid are visible to all threads afterwards, at GPU scope.
    ///
    /// # Errors
    /// The same in all threads of a block: [`FaultKind::Timeout`] with the number of blocks expected and arrived;
    /// the fault or abort that ended the wait.
    #[inline(always)]
    #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
    pub fn sync(&mut self, deadline: Deadline) -> Result<(), Fault> {
        let blocks = grid_dim().count() as u64;
        self.epoch += 1;
        let expected = self.epoch * blocks;
        lead!(Block, self.meet_here(expected, blocks, deadline))
    }

    #[inline(always)]
    #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
    fn meet_here(&self, expected: u64, blocks: u64, deadline: Deadline) -> Result<(), Fault> {
        let status = self.comm.status();
        meet(self.word, &status, expected, deadline).map_err(|stop| {
            let seen = self.word.load_relaxed_gpu() + blocks - expected;
            let timeout = Fault::new(FaultKind::Timeout, Operation::Barrier);
            status.explain(stop, timeout, Subject::None, deadline, blocks, seen)
        })
    }

    /// Returns the number of the calling thread's block, for dividing work.
    #[inline(always)]
    #[must_use]
    pub fn block(&self) -> u32 {
        block_in_grid()
    }
}
