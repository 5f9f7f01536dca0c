// SPDX-License-Identifier: MIT OR Apache-2.0
//! The README's kernel as a whole program: ranks in a ring, several rounds. The kernel's docs have a picture.

use crate::expect;
use gin_examples_kernels::ring_round::ring_round;
use gin_host::comm::Deadline;
use gin_host::prelude::*;
use std::error::Error;

const ROUNDS: u64 = 5;
const LEN: usize = 1000;

/// Returns a rank's initial value.
fn input(rank: u32, index: usize) -> f32 {
    (rank as usize * 100 + index % 100) as f32
}

/// Returns the values of all ranks after the rounds.
fn expected(ranks: u32) -> Vec<Vec<f32>> {
    let mut now: Vec<Vec<f32>> = (0..ranks).map(|rank| (0..LEN).map(|index| input(rank, index)).collect()).collect();
    for _ in 0..ROUNDS {
        let before = now.clone();
        for (rank, values) in now.iter_mut().enumerate() {
            let left = &before[(rank + ranks as usize - 1) % ranks as usize];
            values.iter_mut().zip(left).for_each(|(value, sent)| *value += sent);
        }
    }
    now
}

/// Runs the ring, one launch for each round.
pub fn run(config: WorldConfig) -> Result<String, Box<dyn Error>> {
    let ranks = config.ranks;
    let found = launch(config, |rank| -> Result<Vec<f32>, CommError> {
        let comm = rank.communicator(&Requirements::default().signals(2).counters(1))?;
        let recv = comm.alloc_window::<f32>(LEN, WindowFlags::NONE)?;
        let send = comm.alloc_window::<f32>(LEN, WindowFlags::NONE)?;
        send.write(0, &(0..LEN).map(|index| input(rank.rank(), index)).collect::<Vec<_>>())?;

        let (stream, handle) = (rank.stream()?, comm.device()?);
        let (shape, limit) = (LaunchConfig::new(1, 128).cooperative(), Deadline::after_ms(1000));
        for round in 1..=ROUNDS {
            // Safety: one block on every rank, all rounds in order. The windows live until the stream is done.
            unsafe { ring_round::launch(&stream, shape, &handle, &recv, &send, LEN, round, limit)? };
        }
        stream.synchronize()?;
        comm.check("run the ring")?;
        let values = send.read_all()?;
        comm.destroy()?;
        Ok(values)
    })?;
    expect("values by rank", &found, &expected(ranks))?;
    Ok(format!("{ranks} ranks, {ROUNDS} rounds of {LEN} elements"))
}
