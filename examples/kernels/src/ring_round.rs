// SPDX-License-Identifier: MIT OR Apache-2.0
//! The kernel of the README: one round of a ring in which each rank passes on what it has and adds what arrives.
//!
//! ```text
//!   left neighbour          this rank                        right neighbour
//!   send ---- put ------->  recv -- add --> send -- put -->  recv
//!        - - signal 0 - ->                       - signal 0 ->
//!        <- - signal 1 - -  (credit)       (credit) <- - - - -
//! ```

use gin_device::prelude::*;

/// One round of a ring: pass mine on, add what the left neighbour sent.
///
/// `round` counts from 1; a neighbour may overwrite `recv` again only after its credit (signal 1) has come back.
///
/// # Safety
/// - One block, on every rank, in the same rounds; the communicator has two signals and a counter.
#[kernel]
pub unsafe fn ring_round(comm: Comm, recv: Window<f32>, send: Window<f32>, len: usize, round: u64, deadline: Deadline) {
    let gin = Gin::new(&comm, ContextId::new(0));
    let world = comm.world();

    let exchange = || -> Result<(), Fault> {
        gin.wait_signal(&Block, SignalId::new(1), round - 1, deadline)?; // right neighbour has used its last block
        gin.put(world.right(), recv.range(0, len), send.range(0, len))
            .signal(SignalId::new(0).inc())
            .counter(CounterId::new(0))
            .issue(&Block)?;
        gin.wait_signal(&Block, SignalId::new(0), round, deadline)?; // left neighbour's block is here
        gin.wait_counter(&Block, CounterId::new(0), round, deadline) // mine has left, `send` may change
    };
    if let Err(fault) = exchange() {
        return comm.report(fault);
    }
    for i in Block.stripe(len) {
        send.add(i, recv.read(i));
    }
    if let Err(fault) = gin.signal(world.left(), SignalId::new(1).inc()).issue(&Block) {
        comm.report(fault);
    }
}
