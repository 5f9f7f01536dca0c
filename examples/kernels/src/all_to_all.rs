// SPDX-License-Identifier: MIT OR Apache-2.0
//! Every rank puts a block of bytes to every rank, again and again: in each launch, and in each replay of a CUDA graph.
//! The program is `examples/python/all_to_all.py`.
//!
//! ```text
//!   rank 0: outbox | for 0 | for 1 |          rank 1: outbox | for 0 | for 1 |
//!                     |       '-------------------. .------------'       |
//!                     v                           | |                    v
//!   rank 0: inbox  | of 0  | of 1  | <------------+-'      inbox  | of 0  | of 1  |
//!                                                 '------------------^
//! ```

use gin_device::prelude::*;

// ANCHOR: kernel
/// Puts block `p` of `outbox` into block `rank` of rank `p`'s `inbox`, and waits for the blocks of all ranks.
///
/// No argument differs from launch to launch: the shadow of signal 0 counts the blocks that have arrived before.
///
/// # Safety
/// - One block, launched once after another on every rank of a communicator with a signal and a world barrier. Both
///   windows have as many blocks of equal length as there are ranks.
#[kernel]
pub unsafe fn all_to_all(comm: Comm, inbox: Window<u8>, outbox: Window<u8>, deadline: Deadline) {
    let gin = Gin::new(&comm, ContextId::new(0));
    let (world, arrived) = (comm.world(), SignalId::new(0));
    let len = outbox.len() / world.size() as usize;
    let exchange = || -> Result<(), Fault> {
        // All ranks are done with the blocks of the last launch.
        BarrierSession::new(&gin, BarrierTeam::World, 0)?.sync(&Block, Fence::None, deadline)?;
        // The right neighbour first, the own rank last.
        for distance in 1..=world.size() {
            let peer = world.after(distance);
            let (to, from) = (world.rank() as usize * len, peer.world() as usize * len);
            gin.put(peer, inbox.range(to, len), outbox.range(from, len)).signal(arrived.inc()).issue(&Block)?;
        }
        gin.wait_signal_follow_shadow(&Block, arrived, u64::from(world.size()), deadline)?;
        // The puts have left: later work may change the outbox.
        gin.flush(&Block, deadline)
    };
    if let Err(fault) = exchange() {
        comm.report(fault);
    }
}
// ANCHOR_END: kernel
