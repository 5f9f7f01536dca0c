// SPDX-License-Identifier: MIT OR Apache-2.0
//! The workloads: runs each on its ranks and checks the results against a plain computation on the host.

mod alltoall;
mod gpus;
mod halo;
pub(crate) mod limits;
mod moe;
#[cfg(feature = "cuda")]
mod nccl;
#[cfg(not(feature = "cuda"))]
#[path = "no_nccl.rs"]
mod nccl;
mod network;
mod plan;
mod reference;
mod ring;
mod run_device;
mod shape;
mod watch;
#[cfg(test)]
mod wrong;

use nccl::{Nccl, Rival};

pub use gpus::Gpus;
pub use plan::Process;
pub(crate) use plan::{Plan, Plans};
pub use run_device::{RunDevice, choose_one};
pub(crate) use watch::Watch;

use crate::cli::{Failure, Figures, Mode, Refused, Report, Sizes, Workload};
use gin_boot::Bootstrap;
use gin_gpu::LaunchConfig;
use gin_gpu::{KernelArg, Memory, MemoryKind, Stream};
use gin_host::comm::CommError;
use gin_host::comm::{Communicator, Requirements, Stats};
use gin_host::proxy::trace::TARGET;
use gin_host::world::{LaunchError, Rank, SoftNics, WorldConfig, join, launch};
use gin_soft_nic_host::{Options as NicOptions, SoftEngine};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::ops::Deref;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Maximum number of steps until a software NIC answers.
const SOFT_DELAY: u64 = 4;

/// The errors that one rank found.
#[derive(Debug, Default, Serialize, Deserialize)]
struct Check {
    errors: u64,
    first: Option<String>,
}

impl Check {
    /// Records `count` wrong results, the first of which is `what`.
    fn wrong(&mut self, count: u64, what: impl FnOnce() -> String) {
        self.errors += count;
        self.first.get_or_insert_with(what);
    }
}

/// One launch of one rank.
#[derive(Serialize, Deserialize)]
struct Launched {
    time: Duration,
    check: Check,
    /// The time of the same collective by NCCL, if it ran in turns.
    nccl: Option<Duration>,
}

/// The results of one rank. Ranks in separate processes exchange them.
#[derive(Default, Serialize, Deserialize)]
struct Ran {
    launches: Vec<Launched>,
    backend: String,
    /// The network of the rank's proxy.
    network: String,
    /// Number of ranks that loads and stores reach.
    reach: u32,
    /// The NIC that the rank's kernels drove.
    nic: Option<String>,
    /// The engine that rang the NIC's doorbells.
    doorbell_source: Option<String>,
    /// The statistics, if requested.
    figures: Vec<Figures>,
}

/// The traffic of one iteration, in the terms of nccl-tests.
#[derive(Clone, Copy, PartialEq, Debug)]
struct Traffic {
    /// Bytes of a rank's data. Divided by the time they are the algorithm bandwidth.
    bytes: f64,
    /// Factor from algorithm bandwidth to bus bandwidth, which does not depend on the number of ranks where the slowest
    /// link limits all.
    factor: f64,
}

/// A workload, as one rank runs it.
trait Job: Sync {
    /// Returns the requirements of the communicator.
    fn requirements(&self) -> Requirements;

    /// Returns the number of puts and signals that one rank posts in one iteration.
    fn operations(&self) -> f64;

    /// Returns the traffic of one iteration, by which bandwidth is computed.
    fn traffic(&self) -> Traffic;

    /// Allocates windows, launches the kernel for the iterations before the timed ones and once for these, and checks
    /// the results.
    fn launch(&self, rank: &Rank, comm: &Watched<'_>) -> Result<Launched, CommError>;
}

/// The communicator of a launch, which other threads observe while its kernel runs.
struct Watched<'a> {
    comm: Arc<Communicator>,
    watch: &'a Watch,
}

impl Deref for Watched<'_> {
    type Target = Communicator;

    fn deref(&self) -> &Communicator {
        &self.comm
    }
}

impl Plan {
    /// Launches a kernel of the workload with its grid.
    fn launch(
        &self,
        rank: &Rank,
        stream: &dyn Stream,
        kernel: &str,
        arguments: &[&dyn KernelArg],
    ) -> Result<(), CommError> {
        let config = LaunchConfig::new(self.sizes.blocks, self.sizes.threads).cooperative();
        // Safety: the workloads pass the arguments that the kernels' docs require; the device makes all blocks of a
        // cooperative launch resident or refuses it.
        Ok(unsafe { stream.launch(&rank.kernel(kernel)?, config, arguments) }?)
    }

    /// Launches kernels on a stream, waits for them, and returns their time: on a GPU by its events, else the time of
    /// launch and wait. All ranks begin together.
    fn timed(
        &self,
        rank: &Rank,
        comm: &Watched<'_>,
        stream: &Arc<dyn Stream>,
        launch: impl FnOnce() -> Result<(), CommError>,
    ) -> Result<Duration, CommError> {
        rank.barrier()?;
        comm.watch.start(rank.rank(), &comm.comm);
        let kernel = self.workload.name();
        tracing::trace!(name: "kernel begins", target: TARGET, rank = rank.rank(), kernel);
        let (start, first) = (Instant::now(), stream.record()?);
        let outcome = launch().and_then(|()| {
            let last = stream.record()?;
            stream.synchronize()?;
            Ok(last)
        });
        let time = start.elapsed();
        tracing::trace!(name: "kernel ends", target: TARGET, rank = rank.rank(), failed = outcome.is_err());
        comm.watch.end(rank.rank());
        let last = outcome?;
        rank.barrier()?;
        let measured = match self.device {
            RunDevice::Virtual => None,
            RunDevice::Cuda(_) => last.since(&*first).map(Duration::from_nanos),
        };
        Ok(measured.unwrap_or(time))
    }
}

/// Zeroed words in device memory.
struct Words(Arc<Memory>);

impl Words {
    /// Allocates `words` words.
    fn new(rank: &Rank, words: usize) -> Result<Self, CommError> {
        Ok(Self(Memory::new(rank.device(), MemoryKind::Device, 8 * words.max(1) as u64)?))
    }

    /// Allocates a word for each thread of the workload's grid.
    fn of_threads(rank: &Rank, sizes: &Sizes) -> Result<Self, CommError> {
        Self::new(rank, sizes.blocks as usize * sizes.threads as usize)
    }

    /// Returns the address of a word as kernels take it.
    fn at(&self, word: usize) -> *mut u64 {
        std::ptr::with_exposed_provenance_mut::<u64>(self.0.address() as usize).wrapping_add(word)
    }

    /// Returns the sum of all words.
    fn sum(&self) -> Result<u64, CommError> {
        let mut words = vec![0u64; self.0.bytes() as usize / 8];
        self.0.read(0, &mut words)?;
        Ok(words.iter().sum())
    }
}

fn world(plan: &Plan) -> Result<WorldConfig, Failure> {
    let mut config = match (&plan.device, plan.mode) {
        (RunDevice::Cuda(gpus), _) => gpus::world(gpus, plan)?,
        (RunDevice::Virtual, Mode::Threads) => WorldConfig::threads(plan.ranks),
        (RunDevice::Virtual, Mode::Seeded) => WorldConfig::seeded(plan.ranks, plan.seed),
    };
    if let gin_host::world::WorldMode::Threads(threads) = &mut config.mode {
        threads.seed = plan.seed;
    }
    if plan.software_nics {
        let options = NicOptions { seed: plan.seed, ..NicOptions::default() };
        let nics = match &config.devices {
            None => SoftNics::new(NicOptions { delay: SOFT_DELAY, ..options }),
            Some(devices) => {
                let placed = SoftNics::placed(options, SoftEngine::Thread, &devices.device(0, plan.ranks)?);
                placed.map_err(|error| error.to_string())?
            }
        };
        config = config.soft_nics(&nics);
    }
    config.comm.backend = plan.backend;
    config.comm.routes = plan.routes;
    if let Some(network) = &plan.network {
        config.comm.network = network.clone();
    }
    Ok(match plan.resident_blocks {
        Some(blocks) => config.resident_blocks(blocks),
        None => config,
    })
}

/// Returns the engines that rang doorbells, without repetitions; `None` if proxies served the ranks.
fn doorbell_sources(results: &[Ran]) -> Option<Vec<String>> {
    let mut doorbell_sources: Vec<String> =
        results.iter().map(|ran| ran.doorbell_source.clone()).collect::<Option<_>>()?;
    doorbell_sources.sort_unstable();
    doorbell_sources.dedup();
    Some(doorbell_sources)
}

/// Returns the error of a job. CPUs that progress threads cannot run on come from a variable, so it is refused.
fn failure(error: LaunchError<CommError>) -> Failure {
    match error {
        LaunchError::Placement(error) => Refused(error.to_string()).into(),
        error => error.to_string().into(),
    }
}

/// Exchanges the results between all processes of a job and returns them by rank.
fn gather(job: &Arc<dyn Bootstrap>, own: &Ran) -> Result<Vec<Ran>, Failure> {
    let all = job.all_gather(&serde_json::to_vec(own)?)?;
    let read = |(rank, ran): (usize, &Vec<u8>)| {
        serde_json::from_slice(ran).map_err(|error| format!("cannot parse the results of rank {rank}: {error}").into())
    };
    all.iter().enumerate().map(read).collect()
}

/// Checks a plan without running it.
///
/// # Errors
/// Refuses sizes and numbers that the workload, the devices or this machine do not support.
pub(crate) fn check(plan: &Plan) -> Result<(), Refused> {
    limits::check(plan)?;
    if plan.beside.is_some() {
        Nccl::open(plan)?;
    }
    match plan.workload {
        Workload::Ring => ring::check(plan).map(drop),
        Workload::Alltoall => alltoall::check(plan).map(drop),
        Workload::Halo => halo::check(plan).map(drop),
        Workload::Moe => moe::check(plan).map(drop),
    }
}

/// Returns the refusal of loads and stores that do not reach all peers of each rank.
fn check_reach(plan: &Plan, results: &[Ran]) -> Result<(), Refused> {
    let short = |ran: &&Ran| ran.reach < plan.ranks;
    match results.iter().filter(|_| plan.lsa_only).find(short) {
        Some(ran) => Err(Refused(format!(
            "--route lsa: loads and stores of a rank reach {} of {} ranks; use --route auto, which takes the network to the \
             others",
            ran.reach, plan.ranks
        ))),
        None => Ok(()),
    }
}

/// Runs a plan. With a `job` this process is one rank of it.
///
/// # Errors
/// Returns the error of the run. A wrong result is no error; the report records it.
pub(crate) fn run(plan: &Plan, job: Option<&Arc<dyn Bootstrap>>, watch: &Watch) -> Result<Report, Failure> {
    limits::check(plan)?;
    let plan = &fitted(plan, job)?;
    let work: Box<dyn Job> = match plan.workload {
        Workload::Ring => Box::new(ring::Ring::new(plan)?),
        Workload::Alltoall => Box::new(alltoall::Alltoall::new(plan)?),
        Workload::Halo => Box::new(halo::Halo::new(plan)?),
        Workload::Moe => Box::new(moe::Moe::new(plan)?),
    };
    watch.begin(work.operations() * (plan.sizes.iters + plan.sizes.warmup) as f64);
    let nccl = plan.beside.map(|_| Nccl::open(plan)).transpose()?;
    let body = |rank: Rank| run_rank(plan, (&*work, nccl), &rank, watch);
    let world = world(plan)?;
    let results = match job {
        None => launch(world, body).map_err(failure)?,
        Some(job) => gather(job, &join(world, job.clone(), body).map_err(failure)?)?,
    };
    check_reach(plan, &results)?;
    Ok(report(plan, work.operations(), work.traffic(), nccl.map(Nccl::version), &results))
}

/// Returns the plan with no more blocks than the GPUs hold, if their number is a default: the same on all ranks.
///
/// # Errors
/// Refuses a number that the arguments give and the GPUs do not hold.
fn fitted(plan: &Plan, job: Option<&Arc<dyn Bootstrap>>) -> Result<Plan, Failure> {
    let mut plan = plan.clone();
    if let RunDevice::Cuda(gpus) = &plan.device {
        let blocks = gpus::check(gpus, &plan)?;
        let all = job.map(|job| job.all_gather(&blocks.to_le_bytes())).transpose()?.unwrap_or_default();
        let all = all.iter().filter_map(|bytes| Some(u32::from_le_bytes(bytes.as_slice().try_into().ok()?)));
        plan.sizes.blocks = all.min().unwrap_or(blocks);
    }
    Ok(plan)
}

/// Runs all launches of one rank.
fn run_rank(
    plan: &Plan,
    (work, nccl): (&dyn Job, Option<&'static Nccl>),
    rank: &Rank,
    watch: &Watch,
) -> Result<Ran, CommError> {
    let requirements = work.requirements();
    let mut ran = Ran::default();
    let mut counted: BTreeMap<(u32, u32), Stats> = BTreeMap::new();
    let mut rival = None;
    for _ in 0..plan.sizes.repeats {
        // Each launch has a new communicator, so that its signals and counters start at 0.
        let comm = Watched { comm: Arc::new(rank.communicator(&requirements)?), watch };
        ran.backend = format!("{:?}", comm.backend()?).to_lowercase();
        ran.network = comm.network()?.name.to_owned();
        ran.reach = comm.device()?.handle().lsa_reach;
        ran.nic = comm.nic()?.map(|nic| nic.name.clone());
        ran.doorbell_source = comm.doorbell_source()?.map(|doorbell_source| doorbell_source.to_string());
        if plan.lsa_only {
            // All ranks leave together, so that none waits for another one.
            let reached = rank.bootstrap().all_gather(&ran.reach.to_le_bytes())?;
            if reached.iter().any(|reach| *reach != plan.ranks.to_le_bytes()) {
                comm.destroy()?;
                return Ok(ran);
            }
        }
        let mut launched = work.launch(rank, &comm)?;
        if let (Some(nccl), None) = (nccl, &rival) {
            rival = Some(Rival::new(nccl, plan, rank)?);
        }
        launched.nccl = rival.as_ref().map(|rival| rival.time(rank, &comm)).transpose()?;
        ran.launches.push(launched);
        comm.check("run")?;
        let rows = comm.peer_stats()?;
        watch.count(rank.rank(), &rows);
        for row in rows.iter().filter(|_| plan.stats) {
            let sum = counted.entry((row.context, row.peer)).or_default();
            *sum = *sum + row.stats;
        }
        comm.destroy()?;
        if rank.rank() == 0 || plan.processes {
            watch.launched();
        }
    }
    ran.figures.extend(counted.into_iter().map(|((context, peer), stats)| {
        let named = stats.named().into_iter().map(|(name, value)| (name.to_owned(), value));
        Figures { rank: rank.rank(), context, peer, figures: named.collect() }
    }));
    Ok(ran)
}

/// Returns the value that `percent` percent of one or more sorted values do not exceed.
fn percentile(sorted: &[f64], percent: usize) -> f64 {
    sorted[(sorted.len() * percent).div_ceil(100).max(1) - 1]
}

/// Returns the report on the results of all ranks, of which each posted `operations` in an iteration.
fn report(plan: &Plan, operations: f64, traffic: Traffic, nccl: Option<&str>, results: &[Ran]) -> Report {
    let Sizes { bytes, contexts, blocks, threads, iters, repeats, check, .. } = plan.sizes;
    // The times of an iteration of the slowest rank, sorted.
    let times = |time: &dyn Fn(&Launched) -> Duration| {
        let slowest = |repeat: usize| results.iter().map(|ran| time(&ran.launches[repeat])).max().unwrap_or_default();
        let us = |repeat| slowest(repeat).as_secs_f64() * 1e6 / iters as f64;
        let mut times: Vec<f64> = (0..repeats as usize).map(us).collect();
        times.sort_by(f64::total_cmp);
        times
    };
    let all = times(&|launched| launched.time);
    let median = all[all.len() / 2];
    let nccl_times = nccl.map(|_| times(&|launched| launched.nccl.unwrap_or_default()));
    // Bytes in a microsecond are MB/s.
    let algorithm = traffic.bytes / median * 1e-3;
    let checks = || results.iter().flat_map(|ran| &ran.launches).map(|launched| &launched.check);
    let errors = checks().map(|check| check.errors).sum();
    let (simulated, device_name, gpus) = match &plan.device {
        RunDevice::Virtual => (true, None, None),
        RunDevice::Cuda(gpus) => (false, gpus.name(plan.ranks), Some(gpus.used(plan.ranks))),
    };
    Report {
        workload: plan.workload.name(),
        device: plan.device.name(),
        device_name,
        gpus,
        backend: results.first().map(|ran| ran.backend.clone()).unwrap_or_default(),
        network: results.first().filter(|ran| ran.nic.is_none()).map(|ran| ran.network.clone()),
        nics: results.iter().map(|ran| ran.nic.clone()).collect(),
        doorbells: doorbell_sources(results),
        route: match results.first().map_or(0, |ran| ran.reach) {
            0 => "network",
            reach if reach == plan.ranks => "lsa",
            _ => "both",
        },
        ranks: plan.ranks,
        bytes,
        iters,
        blocks,
        threads,
        contexts,
        mode: simulated.then_some(match plan.mode {
            Mode::Seeded => "seeded",
            Mode::Threads => "threads",
        }),
        seed: simulated.then_some(plan.seed),
        stats: plan.stats.then(|| results.iter().flat_map(|ran| ran.figures.clone()).collect()),
        verified: check.then_some(errors == 0),
        errors,
        first_difference: checks().find_map(|check| check.first.clone()),
        time_us_min: all[0],
        time_us_median: median,
        time_us_p99: percentile(&all, 99),
        nccl: nccl.map(str::to_owned),
        nccl_time_us_median: nccl_times.map(|times| times[times.len() / 2]),
        algorithm_gb_s: algorithm,
        bus_gb_s: algorithm * traffic.factor,
        operations_per_second: operations * f64::from(plan.ranks) / (median * 1e-6),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use plan::default_plan;

    /// Returns the report on launches of these milliseconds, each with 10 iterations.
    fn reported(milliseconds: &[u64], traffic: Traffic) -> Report {
        let mut plan = default_plan();
        (plan.sizes.iters, plan.sizes.repeats) = (10, milliseconds.len() as u32);
        let launched = |&ms: &u64| Launched { time: Duration::from_millis(ms), check: Check::default(), nccl: None };
        let ran = |part: u64| Ran {
            launches: milliseconds.iter().map(|ms| launched(&(ms / part))).collect(),
            ..Ran::default()
        };
        // The slowest rank counts.
        report(&plan, 10.0, traffic, None, &[ran(2), ran(1), ran(4), ran(1)])
    }

    #[test]
    fn times_are_those_of_the_slowest_rank_per_iteration_and_bandwidth_is_bytes_by_the_median() {
        let all: Vec<u64> = (1..=200).rev().collect();
        let report = reported(&all, Traffic { bytes: 1e6, factor: 0.75 });
        assert_eq!((report.time_us_min, report.time_us_median, report.time_us_p99), (100.0, 10_100.0, 19_800.0));
        let close = |value: f64, expected: f64| (value / expected - 1.0).abs() < 1e-9;
        assert!(close(report.algorithm_gb_s, 1e6 / 10.1e-3 / 1e9), "{report:?}");
        assert!(close(report.bus_gb_s, 0.75 * report.algorithm_gb_s), "{report:?}");
        assert!(close(report.operations_per_second, 40.0 / 0.0101), "{report:?}");
        let one = reported(&[8], Traffic { bytes: 1.0, factor: 1.0 });
        assert_eq!((one.time_us_min, one.time_us_median, one.time_us_p99), (800.0, 800.0, 800.0));
    }

    #[test]
    fn bus_bandwidth_has_the_factors_of_nccl_tests() {
        let mut plan = Plan { ranks: 4, ..default_plan() };
        plan.sizes.bytes = 1 << 20;
        let bytes = plan.sizes.bytes as f64;
        assert_eq!(ring::Ring::new(&plan).unwrap().traffic(), Traffic { bytes, factor: 1.5 });
        assert_eq!(alltoall::Alltoall::new(&plan).unwrap().traffic(), Traffic { bytes: 4.0 * bytes, factor: 0.75 });
        // 1 MiB is a square of 512 x 512 cells.
        assert_eq!(halo::Halo::new(&plan).unwrap().traffic(), Traffic { bytes: 4096.0, factor: 1.0 });
        let alone = Plan { ranks: 1, ..plan };
        assert_eq!(ring::Ring::new(&alone).unwrap().traffic().factor, 0.0);
    }
}
