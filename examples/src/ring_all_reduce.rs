// SPDX-License-Identifier: MIT OR Apache-2.0
//! All-reduce round a ring. The kernel's docs have a picture.

use crate::expect;
use gin_examples_kernels::ring_all_reduce::ring_all_reduce;
use gin_host::comm::Deadline;
use gin_host::prelude::*;
use std::error::Error;

/// Elements of a chunk.
pub(crate) const CHUNK: usize = 250;

/// Returns an element of a rank's vector: a small whole number, so that sums are exact.
pub(crate) fn input(rank: u32, index: usize) -> f32 {
    (rank as usize * 31 + index % 100) as f32
}

/// Returns the sums over all ranks.
pub(crate) fn expected(ranks: u32) -> Vec<f32> {
    (0..ranks as usize * CHUNK).map(|index| (0..ranks).map(|rank| input(rank, index)).sum()).collect()
}

/// Adds up the vectors of all ranks on each.
pub fn run(config: WorldConfig) -> Result<String, Box<dyn Error>> {
    let ranks = config.ranks;
    let len = ranks as usize * CHUNK;
    let found = launch(config, |rank| -> Result<Vec<f32>, CommError> {
        let comm = rank.communicator(&Requirements::default().signals(1))?;
        let data = comm.alloc_window::<f32>(len, WindowFlags::NONE)?;
        let inbox = comm.alloc_window::<f32>(len - CHUNK, WindowFlags::NONE)?;
        data.write(0, &(0..len).map(|index| input(rank.rank(), index)).collect::<Vec<_>>())?;
        let stream = rank.stream()?;
        let (shape, limit) = (LaunchConfig::new(1, 256).cooperative(), Deadline::after_ms(1000));
        // Safety: one block on every rank; the windows live until the stream is done.
        unsafe { ring_all_reduce::launch(&stream, shape, &comm.device()?, &data, &inbox, limit)? };
        stream.synchronize()?;
        comm.check("reduce")?;
        let sums = data.read_all()?;
        comm.destroy()?;
        Ok(sums)
    })?;
    for (rank, found) in found.iter().enumerate() {
        expect(&format!("the sums on rank {rank}"), found, &expected(ranks))?;
    }
    Ok(format!("{len} sums on each of {ranks} ranks"))
}
