// SPDX-License-Identifier: MIT OR Apache-2.0
//! Ring all-reduce: every rank ends with the sums of all ranks' vectors.
//!
//! ```text
//!   1. Each chunk travels round the ring; each rank adds its own values. Here chunk c of 4 ranks:
//!
//!      rank c        rank c + 1      rank c + 2      rank c + 3
//!      data ------>  inbox[0]        inbox[1]        inbox[2]
//!                    + data ------>  + data ------>  + data = the whole sum
//!
//!   2. The sum travels on, straight into place:
//!
//!      rank c + 3    rank c          rank c + 1      rank c + 2
//!      data ------>  data -------->  data -------->  data
//! ```
//!
//! In each step every rank sends one chunk to the right and receives another one from the left. Each step of the first
//! half has its own slot of the inbox, so nobody waits for room.

use gin_device::prelude::*;

// ANCHOR: kernel
/// Adds up `data`, a chunk for each rank, over all ranks. `inbox` has a chunk less.
///
/// # Safety
/// - One block, launched once on every rank of a communicator with a signal; all ranks have the same lengths.
#[kernel]
pub unsafe fn ring_all_reduce(comm: Comm, data: Window<f32>, inbox: Window<f32>, deadline: Deadline) {
    let gin = Gin::new(&comm, ContextId::new(0));
    let (world, arrived) = (comm.world(), SignalId::new(0));
    let (rank, ranks) = (world.rank() as usize, world.size() as usize);
    let len = data.len() / ranks;
    let reduce = || -> Result<(), Fault> {
        for step in 0..2 * (ranks - 1) {
            // The chunk that this step sends; the one that it receives is the one before.
            let chunk = |step: usize| (rank + 2 * ranks - step) % ranks * len;
            let (sent, received) = (data.range(chunk(step), len), chunk(step + 1));
            let adds = step < ranks - 1;
            let place = if adds { inbox.range(step * len, len) } else { sent };
            gin.put(world.right(), place, sent).signal(arrived.inc()).issue(&Block)?;
            gin.wait_signal(&Block, arrived, step as u64 + 1, deadline)?;
            if adds {
                for i in Block.stripe(len) {
                    data.add(received + i, inbox.read(step * len + i));
                }
            }
        }
        Ok(())
    };
    if let Err(fault) = reduce() {
        comm.report(fault);
    }
}
// ANCHOR_END: kernel
