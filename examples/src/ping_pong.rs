// SPDX-License-Identifier: MIT OR Apache-2.0
//! Two ranks put a number to each other in turn. The kernel's docs have a picture.

use crate::expect;
use gin_examples_kernels::ping_pong::ping_pong;
use gin_host::comm::Deadline;
use gin_host::prelude::*;
use std::error::Error;

const ROUNDS: u64 = 20;

/// Plays on each pair of ranks.
pub fn run(config: WorldConfig) -> Result<String, Box<dyn Error>> {
    let ranks = config.ranks;
    if !ranks.is_multiple_of(2) {
        return Err(format!("{ranks} ranks do not make pairs: use an even number").into());
    }
    let balls = launch(config, |rank| -> Result<u64, CommError> {
        let comm = rank.communicator(&Requirements::default().signals(1))?;
        let ball = comm.alloc_window::<u64>(1, WindowFlags::NONE)?;
        let stream = rank.stream()?;
        let (shape, limit) = (LaunchConfig::new(1, 32).cooperative(), Deadline::after_ms(1000));
        // Safety: one block on every rank; the window is 0 and lives until the stream is done.
        unsafe { ping_pong::launch(&stream, shape, &comm.device()?, &ball, ROUNDS, limit)? };
        stream.synchronize()?;
        comm.check("play")?;
        let hits = ball.read_all()?[0];
        comm.destroy()?;
        Ok(hits)
    })?;
    // The last hit is that of the odd rank, and arrives at the even one.
    let expected: Vec<u64> = (0..ranks).map(|_| 2 * ROUNDS).collect();
    expect("hits by rank", &balls, &expected)?;
    Ok(format!("{} pairs, {} hits each", ranks / 2, 2 * ROUNDS))
}
