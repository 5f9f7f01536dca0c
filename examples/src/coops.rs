// SPDX-License-Identifier: MIT OR Apache-2.0
//! Puts by a block, by warps with a context each, and prepared puts. The kernel's docs have a picture.

use crate::expect;
use crate::ordering::input;
use gin_examples_kernels::coops::coops;
use gin_host::comm::Deadline;
use gin_host::prelude::*;
use std::error::Error;

const WARPS: u32 = 4;

/// Sends each rank's elements to the right in three ways.
pub fn run(config: WorldConfig) -> Result<String, Box<dyn Error>> {
    let ranks = config.ranks;
    let found = launch(config, |rank| -> Result<Vec<Vec<u32>>, CommError> {
        let own = input(rank.rank());
        let comm = rank.communicator(&Requirements::default().contexts(WARPS).signals(3))?;
        let to = comm.alloc_window::<u32>(own.len(), WindowFlags::NONE)?;
        let from = comm.alloc_window::<u32>(own.len(), WindowFlags::NONE)?;
        from.write(0, &own)?;
        let (stream, handle) = (rank.stream()?, comm.device()?);
        let (shape, limit) = (LaunchConfig::new(1, 32 * WARPS).cooperative(), Deadline::after_ms(1000));
        let mut found = Vec::new();
        for way in 0..3u32 {
            to.fill(0)?;
            // No rank sends before all have cleared their memory.
            rank.barrier()?;
            // Safety: one block of whole warps on every rank, each way once; the windows live until the stream is done.
            unsafe { coops::launch(&stream, shape, &handle, &to, &from, way, limit)? };
            stream.synchronize()?;
            comm.check("send")?;
            found.push(to.read_all()?);
        }
        comm.destroy()?;
        Ok(found)
    })?;
    for (rank, found) in (0..).zip(&found) {
        let left = input((rank + ranks - 1) % ranks);
        expect(&format!("what rank {rank} has"), found, &vec![left; 3])?;
    }
    Ok(format!("{ranks} ranks, {WARPS} warps, 3 ways"))
}
