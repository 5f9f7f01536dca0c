// SPDX-License-Identifier: MIT OR Apache-2.0
//! Work of all blocks of a grid: a barrier, and the chunks of a range that they move together.
//!
//! All blocks that pass a barrier must be resident (a cooperative launch). Otherwise running blocks wait for blocks
//! that never start.

use crate::comm::Comm;
use crate::coop::{Block, Coop, block_in_grid, grid_dim, lead};
use crate::fault::Fault;
use crate::status::{Status, WaitError};
use crate::sys::{GlobalWord, Memory, Word};
use gin_abi::{Deadline, FaultKind, FaultSubject, Operation};

/// Largest size in bytes of the chunks of [`Block::chunks`], if elements are not larger.
///
/// On 2 x H200 (driver 580.159.04, 2026-11-25, `docs/log`) puts of 256 MiB, both ways at once, moved 733 GB/s in chunks
/// of 64 KiB that blocks took in turns, and 689 GB/s with one contiguous part for each block.
pub const CHUNK_BYTES: usize = 64 << 10;

/// Bytes of a cache line: chunks begin at multiples of it from the start of the range.
const LINE: usize = 128;

impl Block {
    /// Returns the block's share of a range of `len` elements that all blocks of the grid move together: start and
    /// length of chunks that the blocks take in turns. It synchronises nothing.
    ///
    /// All chunks of the grid cover the range once. They have the same size, except the last: whole cache lines, at
    /// most [`CHUNK_BYTES`], and no more than it takes for all blocks to have equally many. If the range has less than
    /// a line for each block, some blocks have no chunk.
    ///
    /// Over NVLink, blocks that put chunks in turns are faster than blocks that each put one contiguous part. Over the
    /// network each chunk is a request.
    ///
    /// ```
    /// # use gin_device::prelude::*;
    /// # fn send(gin: &Gin, peer: Rank, to: Window<f32>, from: Window<f32>, len: usize) -> Result<(), Fault> {
    /// for (start, part) in Block.chunks::<f32>(len) {
    ///     gin.put(peer, to.range(start, part), from.range(start, part)).issue(&Block)?;
    /// }
    /// // The peer waits for a raise of every block.
    /// gin.signal(peer, SignalId::new(0).inc()).issue(&Block)?;
    /// # Ok(())
    /// # }
    /// ```
    #[inline(always)]
    #[must_use]
    pub fn chunks<T>(&self, len: usize) -> Chunks {
        Chunks::of(len, const { Shape::of(size_of::<T>(), CHUNK_BYTES) }, block_in_grid(), grid_dim().count())
    }

    /// Returns the same share in chunks of at most `max` elements, in place of [`CHUNK_BYTES`]. With `usize::MAX` a
    /// block has at most one: a large request over the network.
    #[inline(always)]
    #[must_use]
    pub fn chunks_of<T>(&self, len: usize, max: usize) -> Chunks {
        let bytes = max.saturating_mul(size_of::<T>());
        Chunks::of(len, Shape::of(size_of::<T>(), bytes), block_in_grid(), grid_dim().count())
    }
}

/// The limits of chunks, in elements.
#[derive(Clone, Copy, Debug)]
struct Shape {
    /// Chunks have a multiple of it, except the last of a range.
    unit: usize,
    /// Largest number of elements of a chunk, a multiple of `unit`.
    max: usize,
}

impl Shape {
    /// Returns the limits for elements of `size` bytes in chunks of at most `bytes` bytes.
    #[inline(always)]
    const fn of(size: usize, bytes: usize) -> Self {
        let size = if size == 0 { 1 } else { size };
        // The fewest elements that make whole lines, unless they are too many for a chunk.
        let apart = size.trailing_zeros();
        let lines = if apart < LINE.trailing_zeros() { LINE >> apart } else { 1 };
        let unit = if lines * size <= bytes { lines } else { 1 };
        let max = bytes / size / unit * unit;
        Self { unit, max: if max == 0 { unit } else { max } }
    }
}

/// A block's share of a range, from [`Block::chunks`]: start and length of each of its chunks.
#[derive(Clone, Copy, Debug)]
pub struct Chunks {
    next: usize,
    step: usize,
    chunk: usize,
    len: usize,
}

impl Chunks {
    #[inline(always)]
    fn of(len: usize, Shape { unit, max }: Shape, block: u32, blocks: u32) -> Self {
        let (block, blocks) = (block as usize, blocks as usize);
        // Chunks of each block, and the length with which they suffice. No divisor is 0, which `max` tells the
        // compiler.
        let turns = len.div_ceil(blocks.saturating_mul(max).max(1));
        let chunk = len.div_ceil((blocks * turns).max(1)).next_multiple_of(unit);
        Self { next: block.saturating_mul(chunk), step: blocks.saturating_mul(chunk), chunk, len }
    }
}

impl Iterator for Chunks {
    type Item = (usize, usize);

    #[inline(always)]
    fn next(&mut self) -> Option<(usize, usize)> {
        let (start, left) = (self.next, self.len.saturating_sub(self.next));
        if left == 0 {
            return None;
        }
        // Past `usize::MAX` there are no elements.
        self.next = start.saturating_add(self.step);
        Some((start, if left < self.chunk { left } else { self.chunk }))
    }
}

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
            status.explain(stop, timeout, FaultSubject::None, deadline, blocks, seen)
        })
    }

    /// Returns the number of the calling thread's block, for dividing work.
    #[inline(always)]
    #[must_use]
    pub fn block(&self) -> u32 {
        block_in_grid()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::vec::Vec;

    #[test]
    fn chunks_cover_a_range_once_and_every_block_has_equally_many() {
        for size in [1, 2, 3, 4, 8, 12, 16, 24, 128, 384, 1000, 1001, CHUNK_BYTES, CHUNK_BYTES + 1] {
            let shape = Shape::of(size, CHUNK_BYTES);
            let Shape { unit, max } = shape;
            assert!(max.is_multiple_of(unit), "elements of {size} bytes");
            if size <= CHUNK_BYTES {
                assert!(max * size <= CHUNK_BYTES && max * size > CHUNK_BYTES / 2, "elements of {size} bytes");
            }
            if size <= CHUNK_BYTES / LINE {
                assert!((unit * size).is_multiple_of(LINE), "elements of {size} bytes");
            }
            for blocks in [1u32, 2, 3, 7, 132] {
                let whole = blocks as usize * max;
                let ends = [0, unit, max, whole, 2 * whole, 5 * whole + max / 3];
                let near = ends.into_iter().flat_map(|end| [end.saturating_sub(1), end, end + 1]);
                for len in (0..3 * unit.min(200)).chain(near) {
                    let shares: Vec<Vec<_>> =
                        (0..blocks).map(|block| Chunks::of(len, shape, block, blocks).collect()).collect();
                    let turns = len.div_ceil(whole);
                    let mut all: Vec<(usize, usize)> = shares.concat();
                    all.sort_unstable();
                    let mut end = 0;
                    for &(start, part) in &all {
                        assert_eq!(start, end, "{len} elements of {size} bytes by {blocks}");
                        assert!(part > 0 && part <= max && start.is_multiple_of(unit));
                        end += part;
                    }
                    assert_eq!(end, len, "{len} elements of {size} bytes by {blocks}");
                    // Neighbours in the range are neighbours in the grid.
                    for (index, chunk) in all.iter().enumerate() {
                        assert_eq!(shares[index % blocks as usize][index / blocks as usize], *chunk);
                    }
                    assert!(shares.iter().all(|share| share.len() <= turns));
                    // With less in a chunk, blocks would need one more turn.
                    let chunk = all.first().map_or(unit, |(_, part)| part.next_multiple_of(unit));
                    assert!(len == 0 || (chunk - unit) * blocks as usize * turns < len);
                }
            }
        }
    }

    #[test]
    fn without_a_limit_a_block_has_at_most_one_chunk() {
        for (len, blocks) in [(0, 3), (1, 3), (1 << 30, 1), ((1 << 30) + 5, 7), (usize::MAX >> 8, 132)] {
            let share = |block| Chunks::of(len, Shape::of(16, usize::MAX), block, blocks);
            let mut end = 0;
            for (start, part) in (0..blocks).flat_map(share) {
                assert!(start == end && start.is_multiple_of(8), "{len} by {blocks}");
                end += part;
            }
            assert!(end == len && (0..blocks).all(|block| share(block).count() <= 1), "{len} by {blocks}");
        }
    }

    #[test]
    fn chunks_of_the_longest_ranges_do_not_overflow() {
        for (block, blocks) in [(0, 1), (u32::MAX - 1, u32::MAX), (7, 132)] {
            let chunks = Chunks::of(usize::MAX, Shape::of(1, CHUNK_BYTES), block, blocks);
            assert_eq!(chunks.clone().next().map(|(start, _)| start), Some(block as usize * chunks.chunk));
            let last = Chunks { next: usize::MAX - 5, ..chunks };
            assert_eq!(last.collect::<Vec<_>>(), [(usize::MAX - 5, 5)]);
        }
    }
}
