// SPDX-License-Identifier: MIT OR Apache-2.0
//! One function per rank, each with a device and a way to meet the others.
//!
//! ```
//! use gin_host::comm::{CommError, Requirements, WindowFlags};
//! use gin_host::world::{WorldConfig, launch};
//!
//! let lengths = launch(WorldConfig::seeded(2, 7), |rank| -> Result<usize, CommError> {
//!     let comm = rank.communicator(&Requirements::default())?;
//!     let window = comm.alloc_window::<f32>(64, WindowFlags::NONE)?;
//!     comm.destroy()?;
//!     Ok(window.len())
//! });
//! assert_eq!(lengths.unwrap(), [64, 64]);
//! ```

#[cfg(feature = "cuda")]
mod cuda;
mod nics;

pub use nics::{Nics, SoftNics};

use crate::comm::{Backend, CommConfig, CommError, Communicator, Requirements, Routes};
use crate::proxy::Turn;
use crate::proxy::progress::{Pool, Progress, Running, Work};
use gin_boot::{Bootstrap, BootstrapError, InProcess};
use gin_gpu::placement::{ChosenCpus, Placement, PlacementError, started_on};
use gin_gpu::virt::VirtualDevice;
use gin_gpu::{Device, Devices, Function, GpuError, ModuleSource, Stream};
use gin_net::{Endpoint, Network};
use gin_virtual::{DeviceConfig, EventLog, Policy, SeededConfig, ServiceStep, ThreadsConfig, World};
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// The engine that runs the ranks.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Mode {
    /// One scheduler on one thread, every decision from a seed, on a virtual clock: a run can be repeated.
    Seeded(SeededConfig),
    /// Threads, in real time.
    Threads(ThreadsConfig),
}

/// A job of several ranks in this process.
#[derive(Clone)]
#[non_exhaustive]
pub struct WorldConfig {
    /// Number of ranks.
    pub ranks: u32,
    /// The engine that runs them.
    pub mode: Mode,
    /// The virtual GPU of each rank.
    pub device: DeviceConfig,
    /// Other devices in their place, for ranks as threads.
    pub devices: Option<Devices>,
    /// The ranks' communicators. Each rank's NIC, progress threads and seed come from this world.
    pub comm: CommConfig,
    /// The NICs of the ranks, where the back end is GDAKI.
    pub nics: Nics,
    /// Progress threads for all ranks together; one for each by default. In a seeded world there are none.
    pub progress_threads: Option<usize>,
    /// Which processors progress threads run on. Threads that serve several ranks run on the processors of all these
    /// ranks. In a seeded world it means nothing.
    pub placement: Placement,
    /// How long ranks wait for each other when they meet; for ever by default.
    pub collective_timeout: Option<Duration>,
}

impl WorldConfig {
    fn new(ranks: u32, mode: Mode) -> Self {
        Self {
            ranks,
            mode,
            device: DeviceConfig::default(),
            devices: None,
            comm: CommConfig::default(),
            nics: Nics::default(),
            progress_threads: None,
            placement: Placement::Automatic,
            collective_timeout: None,
        }
    }

    /// `ranks` ranks in a seeded world.
    pub fn seeded(ranks: u32, seed: u64) -> Self {
        Self::new(ranks, Mode::Seeded(SeededConfig::new(seed)))
    }

    /// `ranks` ranks as threads.
    pub fn threads(ranks: u32) -> Self {
        Self::new(ranks, Mode::Threads(ThreadsConfig::default()))
    }

    /// The same with this schedule.
    #[must_use]
    pub fn policy(mut self, policy: Policy) -> Self {
        match &mut self.mode {
            Mode::Seeded(config) => config.policy = policy,
            Mode::Threads(config) => config.policy = policy,
        }
        self
    }

    /// The same with LSA teams of this size.
    #[must_use]
    pub fn lsa_size(mut self, size: u32) -> Self {
        self.comm.lsa_size = Some(size);
        self
    }

    /// The same with these ways for operations.
    #[must_use]
    pub fn routes(mut self, routes: Routes) -> Self {
        self.comm.routes = routes;
        self
    }

    /// The same with communicators as `change` makes them.
    #[must_use]
    pub fn with_comm(mut self, change: impl FnOnce(CommConfig) -> CommConfig) -> Self {
        self.comm = change(self.comm);
        self
    }

    /// The same with this back end.
    #[must_use]
    pub fn backend(mut self, backend: Backend) -> Self {
        self.comm.backend = backend;
        self
    }

    /// Returns the same with devices that hold at most `blocks` blocks at a time.
    #[must_use]
    pub fn resident_blocks(mut self, blocks: u32) -> Self {
        self.device.resident_blocks = blocks;
        self
    }

    /// The same with another network.
    #[must_use]
    pub fn network(mut self, make: impl Fn(&Endpoint) -> Box<dyn Network> + Send + Sync + 'static) -> Self {
        self.comm.network = Arc::new(make);
        self
    }

    /// The same with kernels that drive these software NICs.
    #[must_use]
    pub fn soft_nics(mut self, nics: &SoftNics) -> Self {
        (self.comm.backend, self.nics) = (Backend::Gdaki, Nics::Soft(nics.clone()));
        self
    }

    /// The same with proxies that store 0 to the words of signals that a kernel resets: a mistake, for tests.
    #[cfg(feature = "reset-by-store")]
    #[doc(hidden)]
    #[must_use]
    pub fn reset_by_store(mut self) -> Self {
        self.comm.resets_by_store = true;
        self
    }

    fn seed(&self) -> u64 {
        match &self.mode {
            Mode::Seeded(config) => config.seed,
            Mode::Threads(config) => config.seed,
        }
    }
}

impl fmt::Debug for WorldConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WorldConfig").field("ranks", &self.ranks).field("mode", &self.mode).finish_non_exhaustive()
    }
}

/// How a job failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LaunchError<E> {
    /// A rank's function returned an error, the first in time. The other ranks were aborted.
    #[error("rank {rank}: {error}")]
    Rank {
        /// The rank.
        rank: u32,
        /// Its error.
        error: E,
    },
    /// Ranks cannot be processes like this.
    #[error("{reason}")]
    Processes {
        /// Why not.
        reason: String,
    },
    /// The ranks cannot meet.
    #[error(transparent)]
    Bootstrap(#[from] BootstrapError),
    /// The world ended badly, in a deadlock for example; the error names each waiting thread and its place.
    #[error(transparent)]
    World(#[from] gin_virtual::WorldError),
    /// A rank's device cannot be had.
    #[error("rank {rank}: {error}")]
    Device {
        /// The rank.
        rank: u32,
        /// Why.
        error: GpuError,
    },
    /// Progress threads cannot be where they were asked to be.
    #[error(transparent)]
    Placement(#[from] PlacementError),
    /// There are no progress threads.
    #[error("no progress threads: {0}")]
    Threads(std::io::Error),
}

/// A rank, as its function gets it.
#[derive(Debug)]
pub struct Rank {
    bootstrap: Arc<dyn Bootstrap>,
    device: Arc<dyn Device>,
    config: CommConfig,
}

impl Rank {
    /// World rank.
    pub fn rank(&self) -> u32 {
        self.bootstrap.rank()
    }

    /// Number of ranks.
    pub fn ranks(&self) -> u32 {
        self.bootstrap.ranks()
    }

    /// Its device.
    pub fn device(&self) -> &Arc<dyn Device> {
        &self.device
    }

    /// Its way to the other ranks.
    pub fn bootstrap(&self) -> &Arc<dyn Bootstrap> {
        &self.bootstrap
    }

    /// How its communicators work.
    pub fn comm_config(&self) -> &CommConfig {
        &self.config
    }

    /// Waits for all ranks.
    ///
    /// # Errors
    /// [`CommError::Bootstrap`].
    pub fn barrier(&self) -> Result<(), CommError> {
        Ok(self.bootstrap.barrier()?)
    }

    /// A new communicator of all ranks, active. Collective.
    ///
    /// # Errors
    /// As [`Communicator::initialise`].
    pub fn communicator(&self, requirements: &Requirements) -> Result<Communicator, CommError> {
        let comm = self.uninitialised();
        comm.initialise(requirements)?;
        Ok(comm)
    }

    /// A new communicator of all ranks, not initialised.
    pub fn uninitialised(&self) -> Communicator {
        Communicator::new(self.bootstrap.clone(), self.device.clone(), self.config.clone())
    }

    /// Returns the kernel with this name among the kernels that are linked into the program.
    ///
    /// # Errors
    /// As [`Module::function`](gin_gpu::Module::function).
    pub fn kernel(&self, name: &str) -> Result<Function, GpuError> {
        self.device.load(ModuleSource::Linked)?.function(name)
    }

    /// A new stream of its device.
    ///
    /// # Errors
    /// An error of the device.
    pub fn stream(&self) -> Result<Arc<dyn Stream>, GpuError> {
        self.device.stream()
    }
}

/// Drives proxies as services of a world.
#[derive(Debug)]
struct Services(World);

impl Progress for Services {
    fn start(&self, name: &str, mut work: Work) -> std::io::Result<Running> {
        // A panic is the world's to tell.
        let service = self.0.spawn_service(name, move || match work.step() {
            Turn::Worked => ServiceStep::Busy,
            Turn::Idle => ServiceStep::Idle,
            Turn::Finished => ServiceStep::Stop,
        });
        Ok(Running::new(move || service.is_finished()))
    }
}

/// Has progress threads started where they belong.
#[derive(Debug)]
struct Placed {
    inner: Arc<dyn Progress>,
    cpus: Vec<usize>,
}

impl Progress for Placed {
    fn start(&self, name: &str, work: Work) -> std::io::Result<Running> {
        started_on(Some(&self.cpus), || self.inner.start(name, work))?
    }
}

/// Processors of all of them together; `None` if one may be anywhere.
fn together(places: &[ChosenCpus]) -> Option<Vec<usize>> {
    let mut all = Vec::new();
    for place in places {
        all.extend(place.cpus.as_ref()?);
    }
    all.sort_unstable();
    all.dedup();
    (!all.is_empty()).then_some(all)
}

/// Runs `body` once for each rank and gives what they returned, by rank.
///
/// When one returns an error, collective calls of the others end, and communicators that it drops are aborted.
///
/// # Errors
/// [`LaunchError`].
///
/// # Panics
/// With the panic of the first rank that panicked, after the others were ended.
pub fn launch<T, E>(config: WorldConfig, body: impl Fn(Rank) -> Result<T, E> + Sync) -> Result<Vec<T>, LaunchError<E>>
where
    T: Send,
    E: Send,
{
    launch_logged(config, body).0
}

/// As [`launch`], and gives the log of a seeded world too, if its configuration asks for one.
pub fn launch_logged<T, E>(
    config: WorldConfig,
    body: impl Fn(Rank) -> Result<T, E> + Sync,
) -> (Result<Vec<T>, LaunchError<E>>, EventLog)
where
    T: Send,
    E: Send,
{
    let world = match &config.mode {
        Mode::Seeded(seeded) => World::seeded(seeded.clone()),
        Mode::Threads(threads) => World::threads(threads.clone()),
    };
    let job = InProcess::job(config.ranks).map(|job| {
        let limited = |bootstrap: InProcess| match config.collective_timeout {
            Some(limit) => bootstrap.with_timeout(limit),
            None => bootstrap,
        };
        job.into_iter().map(|bootstrap| Arc::new(limited(bootstrap)) as Arc<dyn Bootstrap>).collect()
    });
    let results = job.map_err(LaunchError::from).and_then(|job| run(&config, &world, job, &body));
    (results, world.event_log())
}

/// Runs `body` as one rank of a job whose other ranks are other processes: the one that `bootstrap` says. Its device is
/// the one that `config` has for that rank; how long ranks wait for each other is the bootstrap's.
///
/// If it returns an error, collective calls of all ranks end.
///
/// # Errors
/// [`LaunchError`]; [`LaunchError::Processes`] for a seeded world, or another number of ranks.
///
/// # Panics
/// With the panic of `body`.
pub fn join<T, E>(
    config: WorldConfig,
    bootstrap: Arc<dyn Bootstrap>,
    body: impl Fn(Rank) -> Result<T, E> + Sync,
) -> Result<T, LaunchError<E>>
where
    T: Send,
    E: Send,
{
    let threads = match &config.mode {
        Mode::Threads(threads) if bootstrap.ranks() == config.ranks => threads.clone(),
        Mode::Threads(_) => {
            let reason = format!("the job has {} ranks, not {}", bootstrap.ranks(), config.ranks);
            return Err(LaunchError::Processes { reason });
        }
        Mode::Seeded(_) => {
            let reason = "processes cannot take turns in a seeded world: use threads".to_owned();
            return Err(LaunchError::Processes { reason });
        }
    };
    let world = World::threads(threads);
    let rank = bootstrap.rank();
    let mut results = run(&config, &world, vec![bootstrap], &body)?;
    results.pop().ok_or_else(|| LaunchError::Processes { reason: format!("rank {rank} brought nothing") })
}

/// Runs the ranks of `job`, which are all or one of those of `config`.
fn run<T, E>(
    config: &WorldConfig,
    world: &World,
    job: Vec<Arc<dyn Bootstrap>>,
    body: &(impl Fn(Rank) -> Result<T, E> + Sync),
) -> Result<Vec<T>, LaunchError<E>>
where
    T: Send,
    E: Send,
{
    let failed: Mutex<Option<(u32, E)>> = Mutex::new(None);
    let device = |rank| -> Result<Arc<dyn Device>, LaunchError<E>> {
        match (&config.mode, &config.devices) {
            (Mode::Threads(_), Some(devices)) => {
                devices.device(rank, config.ranks).map_err(|error| LaunchError::Device { rank, error })
            }
            _ => Ok(VirtualDevice::new(world.device(config.device.clone()))),
        }
    };
    let devices = job.iter().map(|bootstrap| device(bootstrap.rank())).collect::<Result<Vec<_>, _>>()?;
    let places = match config.mode {
        Mode::Threads(_) => devices
            .iter()
            .map(|device| config.placement.choose(&device.locality()))
            .collect::<Result<Vec<_>, PlacementError>>()?,
        // All of it takes turns on one thread.
        Mode::Seeded(_) => Vec::new(),
    };
    let pool = match (&config.mode, config.progress_threads) {
        (Mode::Threads(_), Some(threads)) => {
            let start = || Pool::new(threads);
            Some(started_on(together(&places).as_deref(), start).and_then(|pool| pool).map_err(LaunchError::Threads)?)
        }
        _ => None,
    };
    let progress: Arc<dyn Progress> = match pool {
        Some(pool) => Arc::new(pool),
        None => Arc::new(Services(world.clone())),
    };
    let hosts = job.into_iter().zip(devices).enumerate().map(|(index, (bootstrap, device))| {
        let cpus = places.get(index).and_then(|place| place.cpus.clone());
        let progress: Arc<dyn Progress> = match (cpus, config.progress_threads) {
            (Some(cpus), None) => Arc::new(Placed { inner: progress.clone(), cpus }),
            _ => progress.clone(),
        };
        let rank = Rank {
            bootstrap: bootstrap.clone(),
            device,
            config: CommConfig {
                nic: config.nics.of(bootstrap.rank()),
                progress,
                seed: config.seed(),
                ..config.comm.clone()
            },
        };
        let failed = &failed;
        move || match body(rank) {
            Ok(value) => Some(value),
            Err(error) => {
                let rank = bootstrap.rank();
                failed.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert((rank, error));
                // All hear of a rank that is lost, which says more than that one gave up because of it.
                if bootstrap.lost().is_empty() {
                    bootstrap.abort();
                }
                None
            }
        }
    });
    let hosts: Vec<_> = hosts.collect();
    if let Nics::Soft(nics) = &config.nics {
        nics.serve(world);
    }
    let results = world.run(hosts);
    // A rank's own error says more than what came of it.
    if let Some((rank, error)) = failed.into_inner().unwrap_or_else(PoisonError::into_inner) {
        return Err(LaunchError::Rank { rank, error });
    }
    Ok(results?.into_iter().flatten().collect())
}
