// SPDX-License-Identifier: MIT OR Apache-2.0
//! A strong signal behind many puts, weak signals, and a get with a flush. The kernel's docs have a picture.

use crate::expect;
use gin_examples_kernels::ordering::ordering;
use gin_host::comm::Deadline;
use gin_host::prelude::*;
use std::error::Error;

const LEN: usize = 120;
const PARTS: usize = 6;

/// Returns the elements of a rank.
pub(crate) fn input(rank: u32) -> Vec<u32> {
    (0..LEN as u32).map(|i| rank * 1000 + i).collect()
}

/// Moves each rank's elements to the right in two ways, and to the left in a third one.
pub fn run(config: WorldConfig) -> Result<String, Box<dyn Error>> {
    let ranks = config.ranks;
    let found = launch(config, |rank| -> Result<Vec<Vec<u32>>, CommError> {
        let comm = rank.communicator(&Requirements::default().signals(2))?;
        let to = comm.alloc_window::<u32>(LEN, WindowFlags::NONE)?;
        let from = comm.alloc_window::<u32>(LEN, WindowFlags::NONE)?;
        from.write(0, &input(rank.rank()))?;
        let (stream, handle) = (rank.stream()?, comm.device()?);
        let (shape, limit) = (LaunchConfig::new(1, 64).cooperative(), Deadline::after_ms(1000));
        let mut found = Vec::new();
        for way in 0..3u32 {
            to.fill(0)?;
            // No rank sends before all have cleared their memory.
            rank.barrier()?;
            // Safety: one block on every rank, each way once; the windows live until the stream is done.
            unsafe { ordering::launch(&stream, shape, &handle, &to, &from, PARTS, way, limit)? };
            stream.synchronize()?;
            comm.check("move")?;
            found.push(to.read_all()?);
            // No rank clears what a neighbour still reads.
            rank.barrier()?;
        }
        comm.destroy()?;
        Ok(found)
    })?;
    for (rank, found) in (0..).zip(&found) {
        let (left, right) = (input((rank + ranks - 1) % ranks), input((rank + 1) % ranks));
        expect(&format!("what rank {rank} has"), found, &vec![left.clone(), left, right])?;
    }
    Ok(format!("{ranks} ranks, {PARTS} parts, 3 ways"))
}
