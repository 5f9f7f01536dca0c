// SPDX-License-Identifier: MIT OR Apache-2.0
//! A histogram over the keys of all ranks. The kernel's docs have a picture.

use crate::expect;
use gin_examples_kernels::histogram::histogram;
use gin_host::comm::Deadline;
use gin_host::prelude::*;
use std::error::Error;

const KEYS: u32 = 3000;
/// The bins of each rank.
const SHARE: usize = 16;

/// Returns the keys of a rank, some of them more often than others.
fn keys(rank: u32) -> impl Iterator<Item = u32> {
    (0..KEYS).map(move |i| (i * i + 7 * rank) % 1009)
}

/// Counts the keys of all ranks.
pub fn run(config: WorldConfig) -> Result<String, Box<dyn Error>> {
    let ranks = config.ranks as usize;
    let bins = ranks * SHARE;
    let totals = launch(config, |rank| -> Result<Vec<u64>, CommError> {
        let comm = rank.communicator(&Requirements::default().signals(1))?;
        let own = comm.alloc_window::<u32>(KEYS as usize, WindowFlags::NONE)?;
        // Memory of `alloc_window` is 0 at first.
        let counts = comm.alloc_window::<u64>(bins, WindowFlags::NONE)?;
        let parts = comm.alloc_window::<u64>(bins, WindowFlags::NONE)?;
        let totals = comm.alloc_window::<u64>(SHARE, WindowFlags::NONE)?;
        own.write(0, &keys(rank.rank()).collect::<Vec<_>>())?;
        let (stream, handle) = (rank.stream()?, comm.device()?);
        let (shape, limit) = (LaunchConfig::new(1, 128).cooperative(), Deadline::after_ms(1000));
        // Safety: one block on every rank; the windows live until the stream is done.
        unsafe { histogram::launch(&stream, shape, &handle, &own, &counts, &parts, &totals, limit)? };
        stream.synchronize()?;
        comm.check("count")?;
        let totals = totals.read_all()?;
        comm.destroy()?;
        Ok(totals)
    })?;
    let mut expected = vec![0; bins];
    (0..ranks as u32).flat_map(keys).for_each(|key| expected[key as usize % bins] += 1);
    expect("totals", &totals.concat(), &expected)?;
    Ok(format!("{} keys in {bins} bins on {ranks} ranks", ranks * KEYS as usize))
}
