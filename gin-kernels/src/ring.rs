// SPDX-License-Identifier: MIT OR Apache-2.0
//! Ring all-reduce of a vector of `f32`.
//!
//! Each block of the grid reduces a separate slice of the vector, with two separate signals, so blocks never wait for
//! each other. The slice is cut into one part for each rank. In the first half of the steps a part travels round the
//! ring and each rank adds its values. In the second half the finished parts travel round.
//!
//! Signal `2 * block` counts arrivals from the left neighbour. Signal `2 * block + 1` counts credits that the right
//! neighbour returned. Counter `block` counts puts whose source may be reused.

use gin_device::prelude::*;

/// Number of slots for arriving parts, per block. One is filled while the other is read.
pub const SLOTS: usize = 2;

/// Returns element `index` of rank `rank`'s vector in iteration `iteration`.
///
/// It is a small whole number, so that sums of up to 16,384 ranks are exact.
#[inline(always)]
#[must_use]
pub const fn input(rank: u32, index: usize, iteration: u64) -> f32 {
    ((rank as u64 * 31 + index as u64 * 7 + iteration * 13) % 1024) as f32
}

/// Returns the contribution of element `index` with value `value` to the checksum of an iteration.
#[inline(always)]
#[must_use]
pub const fn checksum(value: f32, index: usize) -> u64 {
    (value as u64).wrapping_mul(index as u64 % 257 + 1)
}

/// Returns start and length of chunk `chunk` of `chunks` of `len` elements. Lengths differ by at most one and may be 0.
#[inline(always)]
#[must_use]
pub const fn chunk(len: usize, chunks: usize, chunk: usize) -> (usize, usize) {
    let (base, longer) = (len / chunks, len % chunks);
    let start = chunk * base + if chunk < longer { chunk } else { longer };
    (start, base + (chunk < longer) as usize)
}

/// Returns the number of elements that the window `inbox` needs for vectors of `len` elements.
#[must_use]
pub const fn inbox_len(len: usize, blocks: usize, ranks: usize) -> usize {
    // The first chunks are the longest.
    SLOTS * blocks * slot_len(len, blocks, ranks)
}

const fn slot_len(len: usize, blocks: usize, ranks: usize) -> usize {
    chunk(chunk(len, blocks, 0).1, ranks, 0).1
}

/// All-reduces `iterations` vectors, one after the other, in place in `data`.
///
/// Needs two signals and one counter for each block of the grid, in `contexts` contexts (block `b` uses context `b %
/// contexts`). `inbox` has [`inbox_len`] elements. `sums` has one word for each thread of the grid and iteration:
/// `sums[(iteration * blocks + block) * threads + thread]` is that thread's part of the iteration's checksum.
///
/// # Safety
/// - `sums` has that length and is in memory that this device can write.
/// - The whole grid is resident, on every rank; all ranks launch the same shape.
#[kernel]
pub unsafe fn ring(
    comm: Comm,
    data: Window<f32>,
    inbox: Window<f32>,
    sums: *mut u64,
    iterations: u64,
    deadline: Deadline,
) {
    // Safety: guaranteed by the kernel's caller.
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

    let (slice, slice_len) = chunk(data.len(), blocks as usize, block as usize);
    let slot_len = slot_len(data.len(), blocks as usize, ranks);
    let slot = |number: u64| (block as usize * SLOTS + number as usize % SLOTS) * slot_len;
    let part = |index: usize| {
        let (start, len) = chunk(slice_len, ranks, index % ranks);
        (slice + start, len)
    };

    // Parts sent to the right, parts received from the left, and the received parts that used the inbox.
    let (mut sent, mut received, mut through) = (0u64, 0u64, 0u64);
    for iteration in 0..iterations {
        for i in Block.stripe(slice_len) {
            data.write(slice + i, input(rank as u32, slice + i, iteration));
        }
        // First add the arrivals and pass them on: after these steps this rank holds the whole sum of part `rank + 1`.
        // Then the finished parts travel round and are stored in place. One loop serves both, so that the code of a put
        // exists once.
        for step in 0..2 * (ranks - 1) {
            let adds = step < ranks - 1;
            let (start, len) = part(rank + 2 * ranks - step);
            let (mine, place) = (data.range(start, len), slot(through));
            if adds {
                // The right neighbour must have emptied the destination slot.
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
        // Safety: guaranteed by the kernel's caller.
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
    fn chunks_cover_everything_once_and_none_is_longer_than_the_first() {
        for len in [0, 1, 2, 3, 7, 64, 1000] {
            for chunks in 1..=9 {
                let mut next = 0;
                for index in 0..chunks {
                    let (start, run) = chunk(len, chunks, index);
                    assert_eq!(start, next);
                    assert!(run <= chunk(len, chunks, 0).1);
                    next += run;
                }
                assert_eq!(next, len);
            }
        }
    }
}
