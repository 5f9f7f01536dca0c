// SPDX-License-Identifier: MIT OR Apache-2.0
//! All-gather of parts of different lengths. The kernel's docs have a picture.

use crate::expect;
use gin_examples_kernels::all_gather_v::all_gather_v;
use gin_host::comm::Deadline;
use gin_host::prelude::*;
use std::error::Error;

/// Returns the part of a rank. That of rank 0 is empty.
pub(crate) fn part(rank: u32) -> Vec<u32> {
    (0..rank * 97 % 256).map(|i| rank * 1000 + i).collect()
}

/// Gathers the parts of all ranks on each.
pub fn run(config: WorldConfig) -> Result<String, Box<dyn Error>> {
    let ranks = config.ranks;
    let expected: Vec<u32> = (0..ranks).flat_map(part).collect();
    let found = launch(config, |rank| -> Result<Vec<u32>, CommError> {
        let comm = rank.communicator(&Requirements::default().signals(1))?;
        let own = part(rank.rank());
        // A window may have another length on each rank.
        let mine = comm.alloc_window::<u32>(own.len(), WindowFlags::NONE)?;
        let all = comm.alloc_window::<u32>(expected.len(), WindowFlags::NONE)?;
        mine.write(0, &own)?;
        let stream = rank.stream()?;
        let (shape, limit) = (LaunchConfig::new(1, 128).cooperative(), Deadline::after_ms(1000));
        // Safety: one block on every rank; the windows live until the stream is done.
        unsafe { all_gather_v::launch(&stream, shape, &comm.device()?, &mine, &all, limit)? };
        stream.synchronize()?;
        comm.check("gather")?;
        let all = all.read_all()?;
        comm.destroy()?;
        Ok(all)
    })?;
    for (rank, found) in found.iter().enumerate() {
        expect(&format!("the parts on rank {rank}"), found, &expected)?;
    }
    Ok(format!("{} elements on each of {ranks} ranks", expected.len()))
}
