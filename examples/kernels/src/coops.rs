// SPDX-License-Identifier: MIT OR Apache-2.0
//! Calls by a block, by warps with a context each, and by warps that prepare their puts once.
//!
//! ```text
//!   rank r, one block                        rank r + 1
//!   block   [ all elements ] -- context 0 -> [ all elements ]
//!
//!   warp 0  [ its share ] ----- context 0 -> [ share 0 ]   each warp has its own queue and signal:
//!   warp 1  [ its share ] ----- context 1 -> [ share 1 ]   no warp waits for another one
//! ```

use gin_device::prelude::*;

// ANCHOR: block
/// The block sends its elements, and all of its threads know when the neighbour's are here.
fn by_block(comm: &Comm, to: Window<u32>, from: Window<u32>, deadline: Deadline) -> Result<(), Fault> {
    let gin = Gin::new(comm, ContextId::new(0));
    let (len, arrived) = (from.len(), SignalId::new(0));
    gin.put(comm.world().right(), to.range(0, len), from.range(0, len)).signal(arrived.inc()).issue(&Block)?;
    gin.wait_signal(&Block, arrived, 1, deadline)
}
// ANCHOR_END: block

// ANCHOR: warp
/// Each warp sends its share in a context of its own. No other thread uses that context, so claims of its queue are
/// cheaper: `Sharing::Block`.
fn by_warp(comm: &Comm, to: Window<u32>, from: Window<u32>, deadline: Deadline) -> Result<(), Fault> {
    let (warp, warps) = (thread_in_block() / WARP_SIZE, block_dim().count() / WARP_SIZE);
    let gin = Gin::new(comm, ContextId::new(warp)).shared_by(Sharing::Block);
    let (len, arrived) = (from.len() / warps as usize, SignalId::new(1));
    let start = warp as usize * len;
    gin.put(comm.world().right(), to.range(start, len), from.range(start, len)).signal(arrived.inc()).issue(&Warp)?;
    gin.wait_signal(&Warp, arrived, 1, deadline)
}
// ANCHOR_END: warp

// ANCHOR: prepared
/// Each warp sends its share element by element: prepared once, issued often, and one signal behind them.
fn prepared(comm: &Comm, to: Window<u32>, from: Window<u32>, deadline: Deadline) -> Result<(), Fault> {
    let (warp, warps) = (thread_in_block() / WARP_SIZE, block_dim().count() / WARP_SIZE);
    let gin = Gin::new(comm, ContextId::new(warp)).shared_by(Sharing::Block);
    let (right, len, arrived) = (comm.world().right(), from.len() / warps as usize, SignalId::new(2));
    let arrival = gin.prepare_wait(arrived)?;
    let start = warp as usize * len;
    let share = gin.put(right, to.range(start, len), from.range(start, len)).prepare()?;
    for _ in 0..ROUNDS {
        share.issue(&Warp)?; // without a fence: the signal behind all of them releases
    }
    gin.signal(right, arrived.inc()).issue(&Warp)?;
    arrival.wait(&Warp, 1, deadline)
}
// ANCHOR_END: prepared

/// The number of times that `prepared` sends its share.
const ROUNDS: u32 = 3;

/// Sends `from` to the right neighbour's `to`: `way` 0 by the block, 1 by warps, 2 by warps with prepared puts.
///
/// # Safety
/// - One block of whole warps, launched once for each way, on every rank of a communicator with a context for each warp
///   and three signals. `from` has a multiple of as many elements as there are warps, and `to` has the same length.
#[kernel]
pub unsafe fn coops(comm: Comm, to: Window<u32>, from: Window<u32>, way: u32, deadline: Deadline) {
    let outcome = match way {
        0 => by_block(&comm, to, from, deadline),
        1 => by_warp(&comm, to, from, deadline),
        _ => prepared(&comm, to, from, deadline),
    };
    if let Err(fault) = outcome {
        comm.report(fault);
    }
}
