// SPDX-License-Identifier: MIT OR Apache-2.0
//! A histogram of bytes over all ranks: counted in shared memory, added up in global memory, exchanged.
//!
//! Each block counts its share in shared memory, where threads that meet at a bin do not go to L2. Then it adds its
//! bins to the rank's row of the table, by one atomic for each bin. When all blocks have, block 0 puts the row to every
//! other rank, so that every rank has the rows of all.

use gin_device::prelude::*;
use gin_device::sys::{GlobalWord, Word};

/// Number of bins: one for each value of a byte.
pub const BINS: usize = 256;

shared! {
    /// The block's own bins.
    static COUNTS: [u32; BINS];
}

/// Returns byte `index` of a rank's data.
#[inline(always)]
#[must_use]
pub const fn input(rank: u32, index: usize) -> u8 {
    // Uneven on purpose: small values are frequent, and a rank leaves some out.
    let mixed = (index as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
    ((mixed & mixed >> 8) as u8).wrapping_add(rank as u8)
}

/// Counts the bytes of `data`, four in each word. Afterwards row `r` of `table` has the counts of rank `r`.
///
/// Needs a signal in context 0. `table` has [`BINS`] words for each rank, all 0 at the launch. `barrier_word` is the
/// word of the grid's barrier, 0 at the launch. A rank has fewer than 2^32 bytes for each block.
///
/// # Safety
/// - `barrier_word` is valid, in this device's memory.
/// - The whole grid is resident, on every rank, and nothing else uses the table meanwhile.
#[kernel]
pub unsafe fn histogram(comm: Comm, data: Window<u32>, table: Window<u64>, barrier_word: *mut u64, deadline: Deadline) {
    count(&data);
    let row = comm.world().rank() as usize * BINS;
    add_to(&table, row);
    // Safety: guaranteed by the kernel's caller.
    let barrier = unsafe { GridBarrier::new(&comm, barrier_word) };
    if let Err(fault) = exchange(&comm, table, row, barrier, deadline) {
        comm.report(fault);
    }
}

/// Counts the block's share of the bytes in shared memory.
#[inline(always)]
fn count(data: &Window<u32>) {
    let counts = COUNTS.array();
    for bin in Block.stripe(BINS) {
        counts.write(bin, 0);
    }
    Block.sync();
    let (threads, blocks) = (Block.size() as usize, grid_dim().count() as usize);
    let mut index = block_in_grid() as usize * threads + Block.rank() as usize;
    while index < data.len() {
        let word = data.read(index);
        for byte in 0..4 {
            counts.add((word >> (8 * byte)) as usize % BINS, 1);
        }
        index += threads * blocks;
    }
    Block.sync();
}

/// Adds the block's counts to the row that begins at `row`.
#[inline(always)]
fn add_to(table: &Window<u64>, row: usize) {
    if row + BINS > table.len() {
        gin_device::sys::trap();
    }
    let counts = COUNTS.array();
    for bin in Block.stripe(BINS) {
        let count = counts.read(bin);
        if count != 0 {
            // Safety: the row is in the table, which is a multiple of 8; during the count its accesses are atomic.
            let word = unsafe { GlobalWord::new(table.local_ptr().add(row + bin) as usize as u64) };
            word.red_add_relaxed_gpu(count as u64);
        }
    }
}

/// Waits for all blocks of the rank. Then block 0 puts the row to every other rank and waits for theirs.
#[inline(always)]
fn exchange(
    comm: &Comm,
    table: Window<u64>,
    row: usize,
    mut barrier: GridBarrier<'_>,
    deadline: Deadline,
) -> Result<(), Fault> {
    barrier.sync(deadline)?;
    if block_in_grid() != 0 {
        return Ok(());
    }
    let (gin, world, arrived) = (Gin::new(comm, ContextId::new(0)), comm.world(), SignalId::new(0));
    let own = table.range(row, BINS);
    for distance in 1..world.size() {
        gin.put(world.after(distance), own, own).signal(arrived.inc()).issue(&Block)?;
    }
    gin.wait_signal(&Block, arrived, (world.size() - 1) as u64, deadline)
}
