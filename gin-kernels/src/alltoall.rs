// SPDX-License-Identifier: MIT OR Apache-2.0
//! All-to-all: every rank puts a block of bytes to every rank, itself included.
//!
//! All blocks of the grid share each block of bytes. Signal `p` of a context counts the raises of rank `p`: one of each
//! grid block that uses the context, in each round. Arrivals are double-buffered, and no other flow control is needed:
//! a block that has sent its shares of round `k + 1` has waited for those of round `k`.

use crate::{each, send};
use gin_device::prelude::*;

/// Number of buffers for arrivals.
pub const BUFFERS: usize = 2;

/// Returns the distance in bytes between the blocks of two ranks: whole units of 16 bytes.
#[inline(always)]
#[must_use]
pub const fn stride(bytes: usize) -> usize {
    bytes.next_multiple_of(16)
}

/// Returns unit `unit`, of 16 bytes, of the data that `from` sends to `to` in the data set `set`.
#[inline(always)]
#[must_use]
pub const fn payload(from: u32, to: u32, set: u64, unit: usize) -> u128 {
    let key = (from as u64) << 44 ^ (to as u64) << 24 ^ set;
    // Fibonacci hashing: each number changes both halves.
    let low = (key + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ (unit as u64 + 1).wrapping_mul(0xd1b5_4a32_d192_ed03);
    (low.wrapping_mul(0x9e37_79b9_7f4a_7c15) as u128) << 64 | low as u128
}

/// Returns the same window in units of 16 bytes.
#[inline(always)]
fn in_units(window: Window<u8>) -> Window<u128> {
    // Safety: the same memory. Windows that gin allocates are aligned to more than 16 bytes.
    unsafe { Window::from_handle(*window.handle()) }
}

/// Writes the data set `set` to the outbox.
///
/// # Safety
/// - The outbox is as [`alltoall`] needs it, and nothing else uses it meanwhile.
#[kernel]
pub unsafe fn alltoall_fill(comm: Comm, outbox: Window<u8>, bytes: usize, set: u64) {
    let (outbox, rank, units) = (in_units(outbox), comm.world().rank(), stride(bytes) / 16);
    for to in 0..comm.world().size() {
        for unit in each(units) {
            outbox.write(to as usize * units + unit, payload(rank, to, set, unit));
        }
    }
}

/// Exchanges `bytes` bytes with every rank, in the rounds `first .. first + rounds`. The arrivals of round `k` are in
/// buffer `k % BUFFERS` of the inbox.
///
/// Needs as many signals as there are ranks. Block `b` of the grid uses context `b % contexts`. The outbox has
/// [`stride`] bytes for each rank, the inbox [`BUFFERS`] times that, both aligned to 16 bytes. The first launch on a
/// communicator has `first` 0, a later one continues.
///
/// # Safety
/// - The whole grid is resident, on every rank; all ranks launch the same shape.
#[kernel]
pub unsafe fn alltoall(
    comm: Comm,
    outbox: Window<u8>,
    inbox: Window<u8>,
    bytes: usize,
    first: u64,
    rounds: u64,
    deadline: Deadline,
) {
    if let Err(fault) = run(&comm, outbox, inbox, bytes, first..first + rounds, deadline) {
        comm.report(fault);
    }
}

#[inline(always)]
fn run(
    comm: &Comm,
    outbox: Window<u8>,
    inbox: Window<u8>,
    bytes: usize,
    rounds: core::ops::Range<u64>,
    deadline: Deadline,
) -> Result<(), Fault> {
    let (world, contexts) = (comm.world(), comm.contexts());
    let (ranks, rank) = (world.size(), world.rank());
    let context = block_in_grid() % contexts;
    let gin = Gin::new(comm, ContextId::new(context));
    // Blocks of a peer's grid that raise signals of this context.
    let raises = (grid_dim().count() - context).div_ceil(contexts) as u64;
    // A rank is the last of those after it.
    let last = if comm.lsa_reaches(world.after(0)) { ranks } else { ranks - 1 };
    for round in rounds {
        let buffer = round as usize % BUFFERS * ranks as usize;
        let there = (buffer + rank as usize) * stride(bytes);
        // Start with the right neighbour, so that not all ranks send to the same rank first.
        for distance in 1..=last {
            let peer = world.after(distance);
            let here = peer.world() as usize * stride(bytes);
            send(&gin, peer, (inbox, there), (outbox, here), bytes, SignalId::new(rank))?;
        }
        // The rank's own block stays here, if it would otherwise take the network.
        if last < ranks {
            let own = rank as usize * stride(bytes);
            for unit in each(stride(bytes) / 16) {
                in_units(inbox).write(there / 16 + unit, in_units(outbox).read(own / 16 + unit));
            }
        }
        for distance in 1..=last {
            let from = SignalId::new(world.after(distance).world());
            gin.wait_signal(&Block, from, (round + 1) * raises, deadline)?;
        }
    }
    // The outbox may be overwritten after the launch.
    gin.flush(&Block, deadline)
}

/// Counts the units that have arrived in `buffer` as the data set `set` has them: `right[block * threads + thread]` is
/// that thread's part of the count.
///
/// # Safety
/// - The inbox is as [`alltoall`] needs it. `right` has a word for each thread of the grid, in
///   memory that this device can write.
#[kernel]
pub unsafe fn alltoall_check(comm: Comm, inbox: Window<u8>, bytes: usize, buffer: u32, set: u64, right: *mut u64) {
    let (inbox, world, units) = (in_units(inbox), comm.world(), stride(bytes) / 16);
    // Bytes past the end of a block are not sent.
    let last = u128::MAX >> (8 * (stride(bytes) - bytes));
    let mut count = 0;
    for from in 0..world.size() {
        let start = (buffer as usize * world.size() as usize + from as usize) * units;
        for unit in each(units) {
            let mask = if unit + 1 == units { last } else { u128::MAX };
            let apart = inbox.read(start + unit) ^ payload(from, world.rank(), set, unit);
            count += (apart & mask == 0) as u64;
        }
    }
    // Safety: guaranteed by the kernel's caller.
    unsafe { right.add(block_in_grid() as usize * Block.size() as usize + Block.rank() as usize).write(count) };
}
