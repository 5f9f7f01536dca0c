// SPDX-License-Identifier: MIT OR Apache-2.0
//! Ring all-reduce of a vector of `f32`, in units of four.
//!
//! The vector is cut into one part for each rank. In the first half of the steps a part travels round the ring, and
//! each rank adds its values. In the second half the finished parts travel round. All blocks of the grid share a part,
//! block `b` the same elements on every rank; blocks never wait for each other. Odd blocks go round the other way, so
//! that links in both directions are in use.
//!
//! For an LSA peer a block adds and stores at the peer in one pass. Otherwise it puts the sums.
//!
//! Signal `block` counts arrivals from the neighbour before. No credits go back: two iterations in turn have slots of
//! their own, and a block that has finished iteration `k + 1` has sums of every rank, each of which had emptied its
//! slots of iteration `k` before it began.

use crate::{each, element, send, share, unit};
use gin_device::prelude::*;

/// Number of elements of a unit.
pub const UNIT: usize = 4;

/// Returns element `index` of rank `rank`'s vector in the data set `set`.
///
/// It is a small whole number, so that sums of up to 16,384 ranks are exact.
#[inline(always)]
#[must_use]
pub const fn input(rank: u32, index: usize, set: u64) -> f32 {
    ((rank as u64 * 31 + index as u64 * 7 + set * 13) % 1024) as f32
}

/// Returns the sum over all ranks of element `index`.
#[inline(always)]
#[must_use]
pub const fn sum(ranks: u32, index: usize, set: u64) -> f32 {
    let (mut sum, mut rank) = (0.0, 0);
    while rank < ranks {
        sum += input(rank, index, set);
        rank += 1;
    }
    sum
}

/// Returns start and length of part `part` of `parts` of `len` units. Lengths differ by at most one and may be 0.
#[inline(always)]
#[must_use]
pub const fn part(len: usize, parts: usize, part: usize) -> (usize, usize) {
    let (base, longer) = (len / parts, len % parts);
    let start = part * base + if part < longer { part } else { longer };
    (start, base + (part < longer) as usize)
}

/// Returns the number of units that the window needs for vectors of `len` units: the vector, its sum, and two slots for
/// each part that passes through this rank in an iteration.
#[must_use]
pub const fn window_len(len: usize, ranks: usize) -> usize {
    // The first parts are the longest.
    2 * len + 2 * (ranks - 1) * part(len, ranks, 0).1
}

/// Writes the data set `set` to the vector of `len` units.
///
/// # Safety
/// - The window is as [`ring`] needs it, and nothing else uses it meanwhile.
#[kernel]
pub unsafe fn ring_fill(comm: Comm, data: Window<u128>, len: usize, set: u64) {
    let rank = comm.world().rank();
    for at in each(len) {
        data.write(at, unit(|i| input(rank, UNIT * at + i, set)));
    }
}

/// All-reduces a vector of `len` units, in the iterations `first .. first + iterations`.
///
/// Needs a signal for each block of the grid. Block `b` uses context `b % contexts`. `data` has [`window_len`] units:
/// first the vector, then its sum, then the slots. The first launch on a communicator has `first` 0, a later one
/// continues.
///
/// # Safety
/// - The whole grid is resident, on every rank; all ranks launch the same shape.
#[kernel]
pub unsafe fn ring(comm: Comm, data: Window<u128>, len: usize, first: u64, iterations: u64, deadline: Deadline) {
    for iteration in first..first + iterations {
        if let Err(fault) = reduce(&comm, data, len, iteration, deadline) {
            return comm.report(fault);
        }
    }
}

#[inline(always)]
fn reduce(comm: &Comm, data: Window<u128>, all: usize, iteration: u64, deadline: Deadline) -> Result<(), Fault> {
    let (block, world) = (block_in_grid(), comm.world());
    let gin = Gin::new(comm, ContextId::new(block % comm.contexts()));
    let arrived = SignalId::new(block);
    let (ranks, rank) = (world.size() as usize, world.rank() as usize);
    let even = block.is_multiple_of(2);
    let next = if even { world.right() } else { world.left() };
    let place = if even { rank } else { ranks - rank };
    // Steps of an iteration, and of them those whose part passes through a slot.
    let (steps, passes) = (2 * (ranks - 1), ranks - 1);
    let slot = |step| 2 * all + (iteration as usize % 2 * passes + step) * part(all, ranks, 0).1;
    let near = comm.lsa_reaches(next);
    // The code of a wait and of a put exists once, which takes fewer registers.
    for step in 0..=steps {
        if step > 0 {
            gin.wait_signal(&Block, arrived, iteration * steps as u64 + step as u64, deadline)?;
        }
        if step == steps {
            break;
        }
        let (adds, finished) = ((1..ranks).contains(&step), step >= passes);
        let (start, mut len) = part(all, ranks, (place + 2 * ranks - step) % ranks);
        let (sum_at, there) = (all + start, if finished { all + start } else { slot(step) });
        if adds {
            let (from, peer) = (slot(step - 1), if near { Some(data.peer(next)?) } else { None });
            for (at, count) in share::<u128>(len, near) {
                for i in Block.stripe(count) {
                    let (arrival, own) = (data.read(from + at + i), data.read(start + at + i));
                    let sum = unit(|e| element(arrival, e) + element(own, e));
                    if let Some(peer) = &peer {
                        peer.write(there + at + i, sum);
                    }
                    if finished || !near {
                        data.write(sum_at + at + i, sum);
                    }
                }
            }
            // The peer has the sums: only the signal is raised.
            len = if near { 0 } else { len };
        }
        send(&gin, next, (data, there), (data, if step == 0 { start } else { sum_at }), len, arrived)?;
    }
    if steps == 0 {
        each(all).for_each(|i| data.write(all + i, data.read(i)));
    }
    if near {
        return Ok(());
    }
    // The next iteration writes sums, which puts may still be reading.
    gin.flush(&Block, deadline)
}

/// Counts the units of the sum that are right for the data set `set`: `right[block * threads + thread]` is that
/// thread's part of the count.
///
/// # Safety
/// - The window is as [`ring`] needs it. `right` has a word for each thread of the grid, in memory that this device can
///   write.
#[kernel]
pub unsafe fn ring_check(comm: Comm, data: Window<u128>, len: usize, set: u64, right: *mut u64) {
    let ranks = comm.world().size();
    let is_right = |at: &usize| data.read(len + *at) == unit(|i| sum(ranks, UNIT * at + i, set));
    let count = each(len).filter(is_right).count() as u64;
    // Safety: guaranteed by the kernel's caller.
    unsafe { right.add(block_in_grid() as usize * Block.size() as usize + Block.rank() as usize).write(count) };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_cover_everything_once_and_none_is_longer_than_the_first() {
        for len in [0, 1, 2, 3, 7, 64, 1000] {
            for parts in 1..=9 {
                let mut next = 0;
                for index in 0..parts {
                    let (start, run) = part(len, parts, index);
                    assert_eq!(start, next);
                    assert!(run <= part(len, parts, 0).1);
                    next += run;
                }
                assert_eq!(next, len);
            }
        }
    }
}
