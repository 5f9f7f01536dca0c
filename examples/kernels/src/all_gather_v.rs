// SPDX-License-Identifier: MIT OR Apache-2.0
//! All-gather of parts of different lengths: every rank ends with the parts of all, one behind the other.
//!
//! ```text
//!            mine                       all, on every rank
//!   rank 0   +---+                      +---+-------+-+-----+
//!            | 0 |  -- put to all -->   | 0 |   1   |2|  3  |
//!   rank 1   +---+---+                  +---+-------+-+-----+
//!            |   1   | ------------->       ^       ^ ^
//!   rank 2   +-+-----+                      each rank's start: the lengths of the ranks before it,
//!            |2|  ... signal 0 each         which the window `mine` knows
//! ```

use gin_device::prelude::*;

// ANCHOR: kernel
/// Gathers the parts `mine` of all ranks into `all`, by rank.
///
/// # Safety
/// - One block, launched once on every rank of a communicator with a signal; `all` is as long as all parts together.
#[kernel]
pub unsafe fn all_gather_v(comm: Comm, mine: Window<u32>, all: Window<u32>, deadline: Deadline) {
    let gin = Gin::new(&comm, ContextId::new(0));
    let (world, arrived, len) = (comm.world(), SignalId::new(0), mine.len());
    let gather = || -> Result<(), Fault> {
        let mut start = 0;
        for rank in 0..world.rank() {
            start += mine.len_on(world.member(rank)?);
        }
        // The right neighbour first, so that not all ranks send to the same one at a time.
        for distance in 1..world.size() {
            gin.put(world.after(distance), all.range(start, len), mine.range(0, len))
                .signal(arrived.inc())
                .issue(&Block)?;
        }
        for i in Block.stripe(len) {
            all.write(start + i, mine.read(i));
        }
        gin.wait_signal(&Block, arrived, u64::from(world.size() - 1), deadline)
    };
    if let Err(fault) = gather() {
        comm.report(fault);
    }
}
// ANCHOR_END: kernel
