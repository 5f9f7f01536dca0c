// SPDX-License-Identifier: MIT OR Apache-2.0
//! The same bytes by three promises: one strong signal behind many puts, a weak signal with each, and a get.
//!
//! ```text
//!   rank r                              rank r + 1
//!   part 0 ---- put ---------------->   part 0      strong: the signal is seen after all parts
//!   part 1 ---- put ---------------->   part 1
//!   signal 0 - - - - - - - - - - - ->   waits for 1
//!
//!   part 0 ---- put, weak signal 1 ->   part 0      weak: each signal is seen after its own part
//!   part 1 ---- put, weak signal 1 ->   part 1      waits for 2
//!
//!   parts  <--- get -----------------   parts       get: the caller's flush waits
//! ```

use gin_device::prelude::*;

// ANCHOR: strong
/// Puts `parts` parts of `from` to the right neighbour, without a signal each, and raises one signal behind them.
fn strong(gin: &Gin, to: Window<u32>, from: Window<u32>, parts: usize, deadline: Deadline) -> Result<(), Fault> {
    let (right, arrived) = (gin.comm().world().right(), SignalId::new(0));
    let len = from.len() / parts;
    for part in 0..parts {
        gin.put(right, to.range(part * len, len), from.range(part * len, len)).issue(&Block)?;
    }
    gin.signal(right, arrived.inc()).issue(&Block)?;
    gin.wait_signal(&Block, arrived, 1, deadline) // all parts of the left neighbour are here
}
// ANCHOR_END: strong

// ANCHOR: weak
/// Puts the parts with a weak signal each. They may arrive in any order.
fn weak(gin: &Gin, to: Window<u32>, from: Window<u32>, parts: usize, deadline: Deadline) -> Result<(), Fault> {
    let (right, arrived) = (gin.comm().world().right(), SignalId::new(1));
    let len = from.len() / parts;
    for part in 0..parts {
        gin.put(right, to.range(part * len, len), from.range(part * len, len))
            .signal(arrived.inc().weak())
            .issue(&Block)?;
    }
    // One signal says that some part is here; only all of them together say that all parts are.
    gin.wait_signal(&Block, arrived, parts as u64, deadline)
}
// ANCHOR_END: weak

// ANCHOR: get
/// Gets the right neighbour's `from`. It does not change while this kernel runs.
fn get(gin: &Gin, to: Window<u32>, from: Window<u32>, deadline: Deadline) -> Result<(), Fault> {
    let len = from.len();
    gin.get(gin.comm().world().right(), to.range(0, len), from.range(0, len)).issue(&Block)?;
    gin.flush(&Block, deadline) // the data of all gets of this context is visible
}
// ANCHOR_END: get

/// Moves `from` in each way: `way` 0 and 1 to the right neighbour, 2 from it.
///
/// # Safety
/// - One block, launched once for each way, on every rank of a communicator with two signals. `from` has a multiple of
///   `parts` elements, and `to` has the same length.
#[kernel]
pub unsafe fn ordering(comm: Comm, to: Window<u32>, from: Window<u32>, parts: usize, way: u32, deadline: Deadline) {
    let gin = Gin::new(&comm, ContextId::new(0));
    let outcome = match way {
        0 => strong(&gin, to, from, parts, deadline),
        1 => weak(&gin, to, from, parts, deadline),
        _ => get(&gin, to, from, deadline),
    };
    if let Err(fault) = outcome {
        comm.report(fault);
    }
}
