// SPDX-License-Identifier: MIT OR Apache-2.0
//! Halo exchange: heat spreads along a ring that is cut into one part for each rank.
//!
//! ```text
//!   rank r - 1              rank r                             rank r + 1
//!                 +---+-----+--  ...  --+-----+---+
//!     last cell ->| g |first|           |last | g |<- first cell
//!                 +---+-----+--  ...  --+-----+---+
//!         ghost <- - -'   signals 0 and 1     '- - -> ghost
//! ```
//!
//! There are two buffers. A step reads one and writes the other one, then puts the new first and last cell into the
//! neighbours' ghosts of that buffer. No rank overwrites a ghost that is still read: to send step `t + 2`, a neighbour
//! needs this rank's cells of step `t + 1`, which it sends after it has read the ghosts of step `t`.

use gin_device::prelude::*;

/// Returns the new value of a cell between these neighbours.
#[must_use]
pub const fn stencil(left: f32, cell: f32, right: f32) -> f32 {
    0.5 * cell + 0.25 * (left + right)
}

// ANCHOR: kernel
/// Computes `steps` steps. `cells` has two buffers of `len` cells between two ghosts; the first buffer has the initial
/// values, ghosts included. The result is in buffer `steps % 2`.
///
/// # Safety
/// - One block, launched once on every rank of a communicator with two signals.
#[kernel]
pub unsafe fn halo(comm: Comm, cells: Window<f32>, len: usize, steps: usize, deadline: Deadline) {
    let gin = Gin::new(&comm, ContextId::new(0));
    let (world, from_left, from_right) = (comm.world(), SignalId::new(0), SignalId::new(1));
    let run = || -> Result<(), Fault> {
        for step in 1..=steps {
            let (old, new) = ((step - 1) % 2 * (len + 2), step % 2 * (len + 2));
            for i in Block.stripe(len) {
                let at = |i| cells.read(old + i);
                cells.write(new + i + 1, stencil(at(i), at(i + 1), at(i + 2)));
            }
            // My first cell is the right ghost of my left neighbour, my last cell the left ghost of my right one.
            gin.put(world.left(), cells.at(new + len + 1), cells.at(new + 1)).signal(from_right.inc()).issue(&Block)?;
            gin.put(world.right(), cells.at(new), cells.at(new + len)).signal(from_left.inc()).issue(&Block)?;
            gin.wait_signal(&Block, from_left, step as u64, deadline)?;
            gin.wait_signal(&Block, from_right, step as u64, deadline)?;
        }
        Ok(())
    };
    if let Err(fault) = run() {
        comm.report(fault);
    }
}
// ANCHOR_END: kernel
