// SPDX-License-Identifier: MIT OR Apache-2.0

//! The same source on gin's back ends: the kernels run on virtual GPUs and compare every word themselves.

use gin_host::comm::Deadline;
use gin_host::prelude::*;
use gin_nccl_kernels::{all_to_all, fetch, ring};

const DEADLINE: Deadline = Deadline::after_ms(1000);
const WORDS: usize = 100;

/// Runs the kernels on each rank.
fn run(config: WorldConfig) -> Result<(), Box<dyn std::error::Error>> {
    let ranks = config.ranks as usize;
    launch(config, |rank| -> Result<(), CommError> {
        let comm = rank.communicator(&Requirements::default().signals(2).counters(1).world_barriers(1))?;
        let send = comm.alloc_window::<u64>(WORDS, WindowFlags::NONE)?;
        let receive = comm.alloc_window::<u64>(WORDS, WindowFlags::NONE)?;
        let words = comm.alloc_window::<u64>(2 * ranks, WindowFlags::NONE)?;
        let (stream, shape) = (rank.stream()?, LaunchConfig::new(1, 64).cooperative());
        let device = comm.device()?;
        // Safety: one block on every rank; the windows live until the stream is done.
        unsafe {
            ring::launch(&stream, shape, &device, &receive, &send, WORDS, 5, DEADLINE)?;
            fetch::launch(&stream, shape, &device, &receive, &send, WORDS, 5, DEADLINE)?;
            all_to_all::launch(&stream, shape, &device, &words, 5, DEADLINE)?;
        }
        stream.synchronize()?;
        comm.check("run the kernels")?;
        comm.destroy()
    })?;
    Ok(())
}

#[test]
fn the_kernels_pass_over_loads_and_stores_and_over_the_network() {
    for seed in 0..4 {
        run(WorldConfig::seeded(3, seed)).unwrap();
        run(WorldConfig::seeded(4, seed).lsa_size(2)).unwrap();
    }
}

#[test]
fn the_kernels_pass_on_a_network_that_reorders_all_it_may() {
    for seed in 0..8 {
        run(WorldConfig::seeded(3, seed).worst_network()).unwrap();
    }
}
