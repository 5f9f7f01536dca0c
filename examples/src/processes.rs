// SPDX-License-Identifier: MIT OR Apache-2.0
//! Ranks that are processes, under `gin launch`. The kernel is that of `all_gather_v`.
//!
//! ```text
//!   gin launch -n 2 -- gin-examples processes
//!        |
//!        +-- process of rank 0: GPU 0 --.
//!        |                              | TCP: find each other, exchange keys of windows, report faults
//!        +-- process of rank 1: GPU 1 --'
//!                  |  ^
//!                  '--' puts and signals go from GPU to GPU, or through a proxy of each process
//! ```

use crate::all_gather_v::part;
use crate::{Skipped, expect};
use gin_examples_kernels::all_gather_v::all_gather_v;
use gin_host::boot::{TcpBootstrap, TcpConfig};
use gin_host::comm::Deadline;
use gin_host::launch::join;
use gin_host::prelude::*;
use std::error::Error;
use std::sync::Arc;

// ANCHOR: program
/// Returns the device of this process: the GPU with its number on this host, or a virtual GPU.
fn device(job: &TcpBootstrap) -> Result<WorldConfig, Box<dyn Error>> {
    #[cfg(feature = "cuda")]
    if let Ok(gpus) = gin_host::device::cuda::device_count() {
        let processes = job.local_ranks() as usize;
        if gpus < processes {
            return Err(Skipped(format!("{processes} processes need a GPU each; this host has {gpus}")).into());
        }
        let own = job.local_rank() as usize;
        return Ok(crate::loaded(WorldConfig::cuda(&[own], job.ranks(), &[crate::PTX])?)?);
    }
    // Processes cannot take turns in a seeded world.
    Ok(WorldConfig::threads(job.ranks()))
}

/// Gathers as `all_gather_v`, as one rank of a job that a launcher started.
pub fn run(_: WorldConfig) -> Result<String, Box<dyn Error>> {
    let Some(job) = Job::from_env()? else {
        let advice = "no launcher started it: gin launch -n 2 -- gin-examples processes";
        return Err(Skipped(advice.to_owned()).into());
    };
    let job = Arc::new(job.bootstrap(TcpConfig::default())?);
    let expected: Vec<u32> = (0..job.ranks()).flat_map(part).collect();
    let found = join(device(&job)?, job.clone(), |rank| -> Result<Vec<u32>, CommError> {
        // From here on all is as with ranks that are threads.
        let comm = rank.communicator(&Requirements::default().signals(1))?;
        let own = part(rank.rank());
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
    expect("the gathered parts", &found, &expected)?;
    Ok(format!("rank {} of {} has {} elements", job.rank(), job.ranks(), found.len()))
}
// ANCHOR_END: program
