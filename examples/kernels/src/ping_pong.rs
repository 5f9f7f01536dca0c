// SPDX-License-Identifier: MIT OR Apache-2.0
//! Two ranks put a number to each other in turn, and each adds one.
//!
//! ```text
//!   rank 0 (serves)                 rank 1
//!   ball = 1   ------- put ------>  ball = 1
//!              ----- signal 0 --->  waits, adds one
//!   waits      <------ put -------  ball = 2
//!   adds one   <---- signal 0 ----
//!   ball = 3   ------- put ------>  ...
//! ```
//!
//! With four ranks, 2 and 3 play beside 0 and 1.

use gin_device::prelude::*;

// ANCHOR: kernel
/// Plays `rounds` rounds, two hits each. Afterwards the ball is `2 * rounds` at the even ranks.
///
/// # Safety
/// - One block, launched once on every rank of a communicator with a signal and an even number of ranks; `ball` is 0.
#[kernel]
pub unsafe fn ping_pong(comm: Comm, ball: Window<u64>, rounds: u64, deadline: Deadline) {
    let gin = Gin::new(&comm, ContextId::new(0));
    let (world, hit) = (comm.world(), SignalId::new(0));
    let serves = world.rank() % 2 == 0;
    let play = || -> Result<(), Fault> {
        let peer = world.member(world.rank() ^ 1)?;
        for round in 1..=rounds {
            if !serves {
                gin.wait_signal(&Block, hit, round, deadline)?;
            }
            if Block.elect() {
                ball.add(0, 1);
            }
            // `issue` begins with a barrier of the block, so it sends what the elected thread wrote. The ball may be
            // overwritten by the answer: the peer sends it only after this put has arrived.
            gin.put(peer, ball.at(0), ball.at(0)).signal(hit.inc()).issue(&Block)?;
            if serves {
                gin.wait_signal(&Block, hit, round, deadline)?;
            }
        }
        Ok(())
    };
    if let Err(fault) = play() {
        comm.report(fault);
    }
}
// ANCHOR_END: kernel
