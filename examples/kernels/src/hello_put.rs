// SPDX-License-Identifier: MIT OR Apache-2.0
//! Every rank puts a text into its right neighbour's memory.
//!
//! ```text
//!       rank 0              rank 1              rank 2
//!   +-----------+       +-----------+       +-----------+
//!   | mine      |--.    | mine      |--.    | mine      |--> inbox of rank 0
//!   +-----------+  |put +-----------+  |put +-----------+
//!   | inbox     |  '--->| inbox     |  '--->| inbox     |
//!   | signal 0  | - - ->| signal 0  | - - ->| signal 0  |
//!   +-----------+       +-----------+       +-----------+
//! ```

use gin_device::prelude::*;

// ANCHOR: kernel
/// Puts `mine` into the right neighbour's `inbox`, and waits for the text of the left neighbour.
///
/// # Safety
/// - One block, launched once on every rank of a communicator with a signal.
#[kernel]
pub unsafe fn hello_put(comm: Comm, mine: Window<u8>, inbox: Window<u8>, deadline: Deadline) {
    let gin = Gin::new(&comm, ContextId::new(0));
    let (len, arrived) = (mine.len(), SignalId::new(0));
    let exchange = || -> Result<(), Fault> {
        // Every thread of the block calls; one of them posts, or all of them copy.
        gin.put(comm.world().right(), inbox.range(0, len), mine.range(0, len)).signal(arrived.inc()).issue(&Block)?;
        // Returns when the left neighbour's signal is here, and so its text.
        gin.wait_signal(&Block, arrived, 1, deadline)
    };
    if let Err(fault) = exchange() {
        comm.report(fault);
    }
}
// ANCHOR_END: kernel
