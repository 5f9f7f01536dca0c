// SPDX-License-Identifier: MIT OR Apache-2.0
//! The workloads: brought up on ranks, launched, and checked against a plain computation on the host.

mod alltoall;
mod halo;
pub(crate) mod limits;
mod reference;
mod ring;

use crate::cli::{self, Device, Failure, Mode, Options, Refused, Report, Workload};
use gin_host::comm::{Backend, Communicator, Requirements};
use gin_host::gpu::{KernelArg, Memory, MemoryKind};
use gin_host::world::{Rank, WorldConfig, launch};
use gin_host::{CommError, LaunchConfig};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Why no NVIDIA GPU is used.
pub(crate) const NO_CUDA: &str = "this command does not launch kernels on NVIDIA GPUs yet";

/// What one rank found wrong.
#[derive(Debug, Default)]
struct Check {
    errors: u64,
    first: Option<String>,
}

impl Check {
    /// Notes a wrong result.
    fn wrong(&mut self, what: impl FnOnce() -> String) {
        self.errors += 1;
        self.first.get_or_insert_with(what);
    }
}

/// One launch of one rank.
struct Launched {
    time: Duration,
    check: Check,
}

/// A workload, as one rank runs it.
trait Job: Sync {
    /// What the communicator must have.
    fn requirements(&self) -> Requirements;

    /// Puts and signals that one rank posts in one launch.
    fn operations(&self) -> f64;

    /// Sets up, launches once and checks.
    fn launch(&self, rank: &Rank, comm: &Communicator) -> Result<Launched, CommError>;
}

/// Shape and limits that all jobs share.
#[derive(Clone, Debug)]
struct Shape {
    ranks: u32,
    blocks: u32,
    threads: u32,
    contexts: u32,
    iters: u64,
    deadline: gin_abi::Deadline,
}

impl Shape {
    fn new(options: &Options) -> Self {
        Self {
            ranks: options.ranks,
            blocks: options.blocks,
            threads: options.threads,
            contexts: options.contexts,
            iters: options.iters,
            deadline: gin_abi::Deadline::after_ms(options.deadline_ms),
        }
    }

    /// Runs `kernel` on this shape and says how long it took.
    fn run(&self, rank: &Rank, kernel: &str, arguments: &[&dyn KernelArg]) -> Result<Duration, CommError> {
        let function = rank.kernel(kernel)?;
        let stream = rank.stream()?;
        let config = LaunchConfig::new(self.blocks, self.threads).cooperative();
        rank.barrier()?;
        let start = Instant::now();
        // Safety: the jobs pass what the kernels' docs ask for; a cooperative launch is resident or refused.
        unsafe { stream.launch(&function, config, arguments)? };
        stream.synchronize()?;
        let time = start.elapsed();
        rank.barrier()?;
        Ok(time)
    }

    /// A table of `words` words in device memory, 0 at first.
    fn words(&self, rank: &Rank, words: usize) -> Result<Arc<Memory>, CommError> {
        Ok(Memory::new(rank.device(), MemoryKind::Device, 8 * words.max(1) as u64)?)
    }
}

/// The back end that was asked for.
fn backend(options: &Options) -> Backend {
    match options.backend {
        cli::Backend::Auto => Backend::Auto,
        cli::Backend::Proxy => Backend::Proxy,
        cli::Backend::Gdaki => Backend::Gdaki,
    }
}

fn world(options: &Options) -> WorldConfig {
    let mut config = match options.mode {
        Mode::Threads => WorldConfig::threads(options.ranks),
        Mode::Seeded => WorldConfig::seeded(options.ranks, options.seed),
    };
    if let gin_host::world::Mode::Threads(threads) = &mut config.mode {
        threads.seed = options.seed;
    }
    config.backend = backend(options);
    if let Some(blocks) = options.resident_blocks {
        config = config.resident_blocks(blocks);
    }
    config.sabotage(options.sabotage)
}

/// What `--device` comes to, and a sentence on why.
pub(crate) fn choose_device(device: Device) -> (&'static str, Option<String>) {
    let reason = format!("--device auto took the virtual GPU: {NO_CUDA}");
    ("virtual", (device == Device::Auto).then_some(reason))
}

/// Runs a workload; `launched` is called after each launch.
///
/// # Errors
/// What kept it from running. A wrong result is no error: the report says so.
pub(crate) fn run(workload: Workload, options: &Options, launched: &(dyn Fn() + Sync)) -> Result<Report, Failure> {
    limits::check(options)?;
    let job: Box<dyn Job> = match workload {
        Workload::Ring => Box::new(ring::Ring::new(options)?),
        Workload::Alltoall => Box::new(alltoall::Alltoall::new(options)?),
        Workload::Halo => Box::new(halo::Halo::new(options)?),
    };
    let requirements = job.requirements();
    let results = launch(world(options), |rank| -> Result<(Vec<Launched>, String), CommError> {
        let mut launches = Vec::new();
        let mut backend = String::new();
        for _ in 0..options.repeats {
            // Signals and counters start at 0 in each launch.
            let comm = rank.communicator(&requirements)?;
            backend = format!("{:?}", comm.backend()?).to_lowercase();
            launches.push(job.launch(&rank, &comm)?);
            if let Some(notice) = comm.fault() {
                return Err(CommError::Ended { call: "run", rank: notice.rank, fault: notice.fault });
            }
            comm.destroy()?;
            if rank.rank() == 0 {
                launched();
            }
        }
        Ok((launches, backend))
    })
    .map_err(|error| error.to_string())?;

    let mut times: Vec<f64> = (0..options.repeats as usize)
        .map(|repeat| {
            let slowest = results.iter().map(|(launches, _)| launches[repeat].time).max().unwrap_or_default();
            slowest.as_secs_f64() * 1e6
        })
        .collect();
    times.sort_by(f64::total_cmp);
    let median = times[times.len() / 2];
    let checks = || results.iter().flat_map(|(launches, _)| launches).map(|launched| &launched.check);
    let errors = checks().map(|check| check.errors).sum();
    Ok(Report {
        workload: workload.name(),
        device: choose_device(options.device).0.into(),
        backend: results.first().map(|(_, backend)| backend.clone()).unwrap_or_default(),
        ranks: options.ranks,
        bytes: options.bytes,
        iters: options.iters,
        blocks: options.blocks,
        threads: options.threads,
        contexts: options.contexts,
        mode: match options.mode {
            Mode::Seeded => "seeded",
            Mode::Threads => "threads",
        },
        seed: options.seed,
        verified: errors == 0,
        errors,
        first_difference: checks().find_map(|check| check.first.clone()),
        time_us_median: median / options.iters as f64,
        operations_per_second: job.operations() * f64::from(options.ranks) / (median * 1e-6),
    })
}
