// SPDX-License-Identifier: MIT OR Apache-2.0
//! Finds a mistake on purpose by its seed, on virtual GPUs. The kernel's docs have a picture.

use crate::expect;
use gin_examples_kernels::seeds::seeds;
use gin_host::comm::Deadline;
use gin_host::launch::LaunchError;
use gin_host::prelude::*;
use std::error::Error;

const ROUNDS: usize = 3;
const SEEDS: u64 = 50;

// ANCHOR: run
/// Runs the kernel once. Returns the numbers that each rank received.
fn received(config: WorldConfig, careful: bool) -> Result<Vec<Vec<u64>>, LaunchError<CommError>> {
    launch(config, |rank| {
        let comm = rank.communicator(&Requirements::default().signals(1).counters(1))?;
        let outbox = comm.alloc_window::<u64>(1, WindowFlags::NONE)?;
        let inbox = comm.alloc_window::<u64>(ROUNDS, WindowFlags::NONE)?;
        let stream = rank.stream()?;
        let (shape, limit) = (LaunchConfig::new(1, 32).cooperative(), Deadline::after_ms(1000));
        // Safety: one block on every rank; the windows live until the stream is done.
        unsafe { seeds::launch(&stream, shape, &comm.device()?, &outbox, &inbox, careful, limit)? };
        stream.synchronize()?;
        comm.check("send numbers")?;
        let numbers = inbox.read_all()?;
        comm.destroy()?;
        Ok(numbers)
    })
}
// ANCHOR_END: run

// ANCHOR: search
/// Searches for a seed that shows the mistake, and repeats it.
pub fn run(config: WorldConfig) -> Result<String, Box<dyn Error>> {
    let ranks = config.ranks;
    let right = vec![vec![1, 2, 3]; ranks as usize];
    let mut wrong = Vec::new();
    let seeded = |seed| WorldConfig::seeded(ranks, seed).races(false);
    for seed in 1..=SEEDS {
        let found = received(seeded(seed), false)?;
        if found != right {
            wrong.push((seed, found));
        }
        // With the wait for the counter, every seed is right.
        expect(&format!("numbers with seed {seed}"), &received(seeded(seed), true)?, &right)?;
    }
    let Some((seed, found)) = wrong.first() else {
        return Err(format!("no seed up to {SEEDS} shows the mistake").into());
    };
    // The seed repeats the run: the same threads in the same order, so the same wrong numbers.
    expect("the repeated run", &received(seeded(*seed), false)?, found)?;
    // The detector of data races names both accesses and their lines, also if the numbers are right.
    let race = match received(WorldConfig::seeded(ranks, 1).races(true), false) {
        Err(LaunchError::World(error)) => error.to_string(),
        other => return Err(format!("expected a data race, but the run gave {other:?}").into()),
    };
    Ok(format!(
        "{} of {SEEDS} seeds show the mistake on virtual GPUs; seed {seed} gives {found:?}\n{race}",
        wrong.len()
    ))
}
// ANCHOR_END: search
