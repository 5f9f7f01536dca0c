// SPDX-License-Identifier: MIT OR Apache-2.0
//! All-to-all with different lengths: each rank sends some elements to each rank, and only the sender knows how many.
//!
//! ```text
//!   1. counts: every rank puts its row to all        2. data: every rank puts to where the rows say
//!
//!      rank 0: to 0, to 1, to 2 --.                     outbox of rank 1     inbox of rank 2
//!      rank 1: to 0, to 1, to 2 --+--> matrix,          +----+---+-----+     +---+-----+--+
//!      rank 2: to 0, to 1, to 2 --'    on every rank    |to 0|to1|to 2 |---->|f 0|fr 1 |f2|
//!                                                       +----+---+-----+     +---+-----+--+
//!          signal 0                                         signal 1         ^ the elements for rank 2
//!                                                                              of the ranks before 1
//! ```

use gin_device::prelude::*;

// ANCHOR: kernel
/// Sends `row[p]` elements of `outbox`, one destination behind the other, to each rank `p`. `inbox` gets the elements
/// of all ranks, one source behind the other.
///
/// # Safety
/// - One block, launched once on every rank of a communicator with two signals. `row` has an element for each rank,
///   `matrix` a row for each rank; `outbox` and `inbox` have room.
#[kernel]
pub unsafe fn all_to_all_v(
    comm: Comm,
    row: Window<u32>,
    matrix: Window<u32>,
    outbox: Window<u32>,
    inbox: Window<u32>,
    deadline: Deadline,
) {
    let gin = Gin::new(&comm, ContextId::new(0));
    let (world, counted, arrived) = (comm.world(), SignalId::new(0), SignalId::new(1));
    let (rank, ranks) = (world.rank() as usize, world.size() as usize);
    let exchange = || -> Result<(), Fault> {
        for distance in 1..=world.size() {
            gin.put(world.after(distance), matrix.range(rank * ranks, ranks), row.range(0, ranks))
                .signal(counted.inc())
                .issue(&Block)?;
        }
        gin.wait_signal(&Block, counted, ranks as u64, deadline)?;
        let count = |from: usize, to: usize| matrix.read(from * ranks + to) as usize;
        for distance in 1..=world.size() {
            let peer = world.after(distance);
            let to = peer.world() as usize;
            let source: usize = (0..to).map(|other| count(rank, other)).sum();
            let place: usize = (0..rank).map(|from| count(from, to)).sum();
            let len = count(rank, to);
            // A length of 0 is fine, and raises the signal all the same.
            gin.put(peer, inbox.range(place, len), outbox.range(source, len)).signal(arrived.inc()).issue(&Block)?;
        }
        gin.wait_signal(&Block, arrived, ranks as u64, deadline)
    };
    if let Err(fault) = exchange() {
        comm.report(fault);
    }
}
// ANCHOR_END: kernel
