// SPDX-License-Identifier: MIT OR Apache-2.0
//! A kernel with a mistake on purpose, for the chapter on seeds: it overwrites its source before the put has read it.
//!
//! ```text
//!   rank r                                        rank r + 1
//!   outbox = round  ---- put, signal 0 ------->   inbox
//!   waits for signal 0 of its own left neighbour
//!   outbox = round + 1
//!        ^ too early, unless the counter says that the put has read the outbox
//! ```

use gin_device::prelude::*;

// ANCHOR: kernel
/// Sends the numbers 1, 2 and so on to the right neighbour, each to an element of its own. Without `careful` it
/// overwrites the outbox while a put may still read it.
///
/// # Safety
/// - One block, launched once on every rank of a communicator with a signal and a counter.
#[kernel]
pub unsafe fn seeds(comm: Comm, outbox: Window<u64>, inbox: Window<u64>, careful: bool, deadline: Deadline) {
    let gin = Gin::new(&comm, ContextId::new(0)).route(Route::Network);
    let (arrived, left) = (SignalId::new(0), CounterId::new(0));
    let rounds = inbox.len() as u64;
    let send = || -> Result<(), Fault> {
        for round in 1..=rounds {
            if careful {
                gin.wait_counter(&Block, left, round - 1, deadline)?;
            }
            if Block.elect() {
                outbox.write(0, round);
            }
            gin.put(comm.world().right(), inbox.at(round as usize - 1), outbox.at(0))
                .signal(arrived.inc())
                .counter(left)
                .issue(&Block)?;
            // The left neighbour's number is here. That says nothing about mine.
            gin.wait_signal(&Block, arrived, round, deadline)?;
        }
        Ok(())
    };
    if let Err(fault) = send() {
        comm.report(fault);
    }
}
// ANCHOR_END: kernel
