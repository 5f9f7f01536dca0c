// SPDX-License-Identifier: MIT OR Apache-2.0
//! All-to-all with different lengths. The kernel's docs have a picture.

use crate::expect;
use gin_examples_kernels::all_to_all_v::all_to_all_v;
use gin_host::comm::Deadline;
use gin_host::prelude::*;
use std::error::Error;

/// Returns the elements that `from` sends to `to`; some ranks send nothing to some.
fn part(from: u32, to: u32) -> Vec<u32> {
    (0..(from * 5 + to * 3) % 8 * 10).map(|i| from * 10_000 + to * 1000 + i).collect()
}

/// Exchanges the parts of all ranks.
pub fn run(config: WorldConfig) -> Result<String, Box<dyn Error>> {
    let ranks = config.ranks;
    // No rank knows the lengths of others, so each has room for the longest parts: 70 elements.
    let room = 70 * ranks as usize;
    let found = launch(config, |rank| -> Result<Vec<u32>, CommError> {
        let comm = rank.communicator(&Requirements::default().signals(2))?;
        let row = comm.alloc_window::<u32>(ranks as usize, WindowFlags::NONE)?;
        let matrix = comm.alloc_window::<u32>((ranks * ranks) as usize, WindowFlags::NONE)?;
        let outbox = comm.alloc_window::<u32>(room, WindowFlags::NONE)?;
        let inbox = comm.alloc_window::<u32>(room, WindowFlags::NONE)?;
        let parts: Vec<Vec<u32>> = (0..ranks).map(|to| part(rank.rank(), to)).collect();
        row.write(0, &parts.iter().map(|part| part.len() as u32).collect::<Vec<_>>())?;
        outbox.write(0, &parts.concat())?;
        let (stream, handle) = (rank.stream()?, comm.device()?);
        let (shape, limit) = (LaunchConfig::new(1, 64).cooperative(), Deadline::after_ms(1000));
        // Safety: one block on every rank; the windows live until the stream is done.
        unsafe { all_to_all_v::launch(&stream, shape, &handle, &row, &matrix, &outbox, &inbox, limit)? };
        stream.synchronize()?;
        comm.check("exchange")?;
        // The matrix says how much arrived.
        let counts = matrix.read_all()?;
        let arrived: u32 = counts.iter().skip(rank.rank() as usize).step_by(ranks as usize).sum();
        let inbox = inbox.read_range(0..arrived as usize)?;
        comm.destroy()?;
        Ok(inbox)
    })?;
    let expected: Vec<Vec<u32>> = (0..ranks).map(|to| (0..ranks).flat_map(|from| part(from, to)).collect()).collect();
    expect("inboxes by rank", &found, &expected)?;
    Ok(format!("{} elements between {ranks} ranks", expected.concat().len()))
}
