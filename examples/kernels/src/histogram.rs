// SPDX-License-Identifier: MIT OR Apache-2.0
//! A histogram over the keys of all ranks. Each rank counts its keys; then each owns some bins and adds them up.
//!
//! ```text
//!            keys          counts                  parts: one row from each rank      totals
//!   rank 0   3 0 7 ...     bins of 0 | bins of 1          +---------+
//!                              |           |              | from 0  |  -- add -->  bins of 0
//!                              |           '--- put --.   | from 1  |
//!   rank 1   5 5 2 ...     bins of 0 | bins of 1      |   +---------+
//!                              |           |          |   +---------+
//!                              |           |          '-> | from 0  |  -- add -->  bins of 1
//!                              '--> rank 0 '--- put ----> | from 1  |
//!                                                         +---------+
//! ```

use gin_device::prelude::*;
use gin_device::sys::{GlobalWord, Word};

/// Counts the keys in `counts`, one word for each bin, all 0 at first. All threads of the block call.
///
/// This is the only place that counts, by atomic additions to memory of the GPU.
fn count(keys: Window<u32>, counts: Window<u64>) {
    for i in Block.stripe(keys.len()) {
        let bin = keys.read(i) as usize % counts.len();
        let address = counts.local_ptr().wrapping_add(bin) as usize as u64;
        // Safety: a word of the window; until the barrier below, the block accesses it by these additions only.
        unsafe { GlobalWord::new(address) }.red_add_relaxed_gpu(1);
    }
    Block.sync();
}

// ANCHOR: kernel
/// Counts keys of all ranks. Rank `r` gets the totals of the bins from `r * totals.len()` on.
///
/// # Safety
/// - One block, launched once on every rank of a communicator with a signal. `counts` has a word for each bin, all 0,
///   `totals` those of this rank, and `parts` a row of that length for each rank.
#[kernel]
pub unsafe fn histogram(
    comm: Comm,
    keys: Window<u32>,
    counts: Window<u64>,
    parts: Window<u64>,
    totals: Window<u64>,
    deadline: Deadline,
) {
    let gin = Gin::new(&comm, ContextId::new(0));
    let (world, arrived, share) = (comm.world(), SignalId::new(0), totals.len());
    let exchange = || -> Result<(), Fault> {
        count(keys, counts);
        let row = world.rank() as usize * share;
        for distance in 1..=world.size() {
            // The last one is this rank itself: a put to oneself is as good as any other.
            let owner = world.after(distance);
            let bins = counts.range(owner.world() as usize * share, share);
            gin.put(owner, parts.range(row, share), bins).signal(arrived.inc()).issue(&Block)?;
        }
        gin.wait_signal(&Block, arrived, u64::from(world.size()), deadline)?;
        for bin in Block.stripe(share) {
            totals.write(bin, (0..world.size() as usize).map(|rank| parts.read(rank * share + bin)).sum());
        }
        Ok(())
    };
    if let Err(fault) = exchange() {
        comm.report(fault);
    }
}
// ANCHOR_END: kernel
