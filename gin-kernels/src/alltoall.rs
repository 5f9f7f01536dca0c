// SPDX-License-Identifier: MIT OR Apache-2.0
//! All-to-all: every rank puts a block of bytes to every rank, itself included, and folds the arrivals into a checksum.
//!
//! Block `b` of the grid serves the peers `p` with `p % blocks == b`: it sends to them and receives from them. Signal
//! `p` counts arrivals from rank `p`; counter `p` counts puts that have left for it. Arrivals are double-buffered, and
//! no other flow control is needed: a rank that has sent round `k + 1` has read the arrivals of round `k`.

use gin_device::prelude::*;

/// Number of buffers for arrivals.
pub const BUFFERS: usize = 2;

/// Returns byte `index` of the data that `from` sends to `to` in round `round`.
#[inline(always)]
#[must_use]
pub const fn payload(from: u32, to: u32, round: u64, index: usize) -> u8 {
    (from as u64 * 37 + to as u64 * 101 + round * 17 + index as u64 * 3 + (index as u64 >> 8)) as u8
}

/// Returns the contribution of byte `byte`, at `index` of a block from rank `from`, to the checksum of a round.
#[inline(always)]
#[must_use]
pub const fn checksum(byte: u8, from: u32, round: u64, index: usize) -> u64 {
    (byte as u64 + 1).wrapping_mul(index as u64 % 251 + 1).wrapping_mul(from as u64 + round + 1)
}

/// Exchanges `bytes` bytes with every rank, `rounds` times.
///
/// Needs as many signals and counters as there are ranks, in `contexts` contexts (data for rank `p` uses context `p %
/// blocks % contexts`). `outbox` has `ranks * bytes` bytes, `inbox` [`BUFFERS`] times that. `sums` has one word for
/// each thread of the grid: `sums[block * threads + thread]` is that thread's part of the checksum of all rounds.
///
/// # Safety
/// - `sums` has that length and is in memory that this device can write.
/// - The whole grid is resident, on every rank; all ranks launch the same shape.
#[kernel]
pub unsafe fn alltoall(
    comm: Comm,
    outbox: Window<u8>,
    inbox: Window<u8>,
    bytes: usize,
    sums: *mut u64,
    rounds: u64,
    deadline: Deadline,
) {
    match run(&comm, outbox, inbox, bytes, rounds, deadline) {
        Ok(sum) => {
            let place = block_in_grid() as usize * Block.size() as usize + Block.rank() as usize;
            // Safety: guaranteed by the kernel's caller.
            unsafe { sums.add(place).write(sum) };
        }
        Err(fault) => comm.report(fault),
    }
}

#[inline(always)]
fn run(
    comm: &Comm,
    outbox: Window<u8>,
    inbox: Window<u8>,
    bytes: usize,
    rounds: u64,
    deadline: Deadline,
) -> Result<u64, Fault> {
    let (block, blocks) = (block_in_grid(), grid_dim().count());
    let world = comm.world();
    let (ranks, rank) = (world.size(), world.rank());
    let mine = SignalId::new(rank);
    let context = |to: u32| ContextId::new(to % blocks % comm.contexts());
    let to_me = Gin::new(comm, context(rank));
    let mut sum = 0u64;
    for round in 0..rounds {
        let buffer = round as usize % BUFFERS * ranks as usize;
        // Start with the right neighbour, so that not all ranks send to the same rank first.
        for distance in 1..=ranks {
            let peer = world.after(distance);
            let to = peer.world();
            if to % blocks != block {
                continue;
            }
            let (gin, counter) = (Gin::new(comm, context(to)), CounterId::new(to));
            // The puts of the last round must have left before their source is overwritten.
            gin.wait_counter(&Block, counter, round, deadline)?;
            let start = to as usize * bytes;
            for i in Block.stripe(bytes) {
                outbox.write(start + i, payload(rank, to, round, i));
            }
            let there = (buffer + rank as usize) * bytes;
            gin.put(peer, inbox.range(there, bytes), outbox.range(start, bytes))
                .signal(mine.inc())
                .counter(counter)
                .issue(&Block)?;
        }
        for distance in 0..ranks {
            let from = world.after(distance).world();
            if from % blocks != block {
                continue;
            }
            to_me.wait_signal(&Block, SignalId::new(from), round + 1, deadline)?;
            let start = (buffer + from as usize) * bytes;
            for i in Block.stripe(bytes) {
                sum = sum.wrapping_add(checksum(inbox.read(start + i), from, round, i));
            }
        }
        // All threads have read this round's arrivals before the next round's put tells a peer so.
        Block.sync();
    }
    Ok(sum)
}
