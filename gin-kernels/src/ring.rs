// SPDX-License-Identifier: MIT OR Apache-2.0
//! Ring all-reduce of a vector of `f32`.
//!
//! Each block of the grid reduces a slice of the vector of its own, with two signals of its own, so blocks never wait
//! for each other. The slice is cut into one part for each rank. In the first half of the steps a part goes round the
//! ring and each rank adds its own values; in the second half the finished parts go round.
//!
//! Signal `2 * block` counts what came from the left neighbour, signal `2 * block + 1` the credits that came back from
//! the right one. Counter `block` counts puts whose source may be reused.

use gin_device::coop::{block_in_grid, grid_dim};
use gin_device::prelude::*;

/// Places for parts on their way in, per block; one is filled while the other is read.
pub const SLOTS: usize = 2;

/// Element `index` of rank `rank`'s vector in iteration `iteration`.
///
/// A small whole number, so that sums of up to 16,384 ranks are exact.
#[inline(always)]
#[must_use]
pub const fn input(rank: u32, index: usize, iteration: u64) -> f32 {
    ((rank as u64 * 31 + index as u64 * 7 + iteration * 13) % 1024) as f32
}

/// What element `index` with value `value` adds to the checksum of an iteration.
#[inline(always)]
#[must_use]
pub const fn checksum(value: f32, index: usize) -> u64 {
    (value as u64).wrapping_mul(index as u64 % 257 + 1)
}

/// The run of elements that is piece `piece` of `pieces` of `len` elements: start and length. Lengths differ by at most
/// one and may be 0.
#[inline(always)]
#[must_use]
pub const fn piece(len: usize, pieces: usize, piece: usize) -> (usize, usize) {
    let (base, longer) = (len / pieces, len % pieces);
    let start = piece * base + if piece < longer { piece } else { longer };
    (start, base + (piece < longer) as usize)
}

/// Elements that the window `inbox` needs for vectors of `len` elements.
#[must_use]
pub const fn inbox_len(len: usize, blocks: usize, ranks: usize) -> usize {
    // The first pieces are the longest.
    SLOTS * blocks * slot_len(len, blocks, ranks)
}

const fn slot_len(len: usize, blocks: usize, ranks: usize) -> usize {
    piece(piece(len, blocks, 0).1, ranks, 0).1
}

/// All-reduces `iterations` vectors, one after the other, in place in `data`.
///
/// Needs two signals and one counter for each block of the grid, in `contexts` contexts (block `b` uses context
/// `b % contexts`). `inbox` has [`inbox_len`] elements. `sums` has one word for each thread of the grid and iteration:
/// `sums[(iteration * blocks + block) * threads + thread]` is that thread's part of the iteration's checksum.
///
/// # Safety
/// - `sums` is that long and in memory that this device can write.
/// - The grid is resident as a whole, on every rank; all ranks launch the same shape.
#[kernel]
pub unsafe fn ring(
    comm: Comm,
    data: Window<f32>,
    inbox: Window<f32>,
    sums: *mut u64,
    iterations: u64,
    deadline: Deadline,
) {
    // Safety: as the kernel's own.
    if let Err(fault) = unsafe { run(&comm, data, inbox, sums, iterations, deadline) } {
        comm.report(fault);
    }
}

#[inline(always)]
unsafe fn run(
    comm: &Comm,
    data: Window<f32>,
    inbox: Window<f32>,
    sums: *mut u64,
    iterations: u64,
    deadline: Deadline,
) -> Result<(), Fault> {
    let (block, blocks) = (block_in_grid(), grid_dim().count());
    let gin = Gin::new(comm, ContextId::new(block % comm.contexts()));
    let (arrived, credit, counter) = (SignalId::new(2 * block), SignalId::new(2 * block + 1), CounterId::new(block));
    let world = comm.world();
    let (ranks, rank) = (world.size() as usize, world.rank() as usize);
    let (left, right) = (world.left(), world.right());

    let (slice, slice_len) = piece(data.len(), blocks as usize, block as usize);
    let slot_len = slot_len(data.len(), blocks as usize, ranks);
    let slot = |number: u64| (block as usize * SLOTS + number as usize % SLOTS) * slot_len;
    let part = |index: usize| {
        let (start, len) = piece(slice_len, ranks, index % ranks);
        (slice + start, len)
    };

    // Parts sent to the right, parts received from the left, and of these those that went through the inbox.
    let (mut sent, mut received, mut through) = (0u64, 0u64, 0u64);
    for iteration in 0..iterations {
        for i in Block.stripe(slice_len) {
            data.write(slice + i, input(rank as u32, slice + i, iteration));
        }
        // First add what came and pass it on: after these steps this rank holds the whole sum of part `rank + 1`. Then the
        // finished parts go round, stored where they belong. One loop for both, so that the code of a put is there once.
        for step in 0..2 * (ranks - 1) {
            let adds = step < ranks - 1;
            let (start, len) = part(rank + 2 * ranks - step);
            let (mine, place) = (data.range(start, len), slot(through));
            if adds {
                // The right neighbour must have emptied the slot that this part goes into.
                let used = through.saturating_sub(SLOTS as u64 - 1);
                gin.wait_signal(&Block, credit, used, deadline)?;
            }
            let there = if adds { inbox.range(place, len) } else { mine };
            gin.put(right, there, mine).signal(arrived.inc()).counter(counter).issue(&Block)?;
            sent += 1;
            received += 1;
            gin.wait_signal(&Block, arrived, received, deadline)?;
            if adds {
                let (start, len) = part(rank + 2 * ranks - step - 1);
                for i in Block.stripe(len) {
                    data.add(start + i, inbox.read(place + i));
                }
                through += 1;
                gin.signal(left, credit.inc()).issue(&Block)?;
            }
        }
        let mut sum = 0u64;
        for i in Block.stripe(slice_len) {
            sum = sum.wrapping_add(checksum(data.read(slice + i), slice + i));
        }
        let place = (iteration as usize * blocks as usize + block as usize) * Block.size() as usize;
        // Safety: the kernel's promise.
        unsafe { sums.add(place + Block.rank() as usize).write(sum) };
        // The next iteration writes into `data`, from which puts may still be reading.
        gin.wait_counter(&Block, counter, sent, deadline)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_cover_everything_once_and_none_is_longer_than_the_first() {
        for len in [0, 1, 2, 3, 7, 64, 1000] {
            for pieces in 1..=9 {
                let mut next = 0;
                for index in 0..pieces {
                    let (start, run) = piece(len, pieces, index);
                    assert_eq!(start, next);
                    assert!(run <= piece(len, pieces, 0).1);
                    next += run;
                }
                assert_eq!(next, len);
            }
        }
    }
}
