// SPDX-License-Identifier: MIT OR Apache-2.0
//! Jobs: one function per rank, each with a device and a bootstrap.
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

#[cfg(feature = "gpu")]
mod cuda;
mod nics;

pub use gin_virtual::Schedule;
pub use nics::SoftNics;

use crate::comm::{AbortHandle, Backend, CommConfig, CommError, Communicator, Requirements, Routes};
use crate::proxy::Turn;
use crate::proxy::progress::{Pool, Progress, Running, Work};
use gin_boot::{Bootstrap, BootstrapError, InProcess, lock};
use gin_gpu::placement::{ChosenCpus, Placement, PlacementError, started_on};
use gin_gpu::virt::VirtualDevice;
use gin_gpu::{Device, Devices, EmbeddedModules, Function, GpuError, ModuleSource, Stream};
use gin_net::{Endpoint, Network};
use gin_virtual::{DeviceConfig, EventLog, SeededConfig, ServiceStep, ThreadsConfig, World};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// The engine that runs the ranks.
///
/// ```
/// use gin_host::world::{WorldMode, WorldConfig};
///
/// assert!(matches!(WorldConfig::seeded(2, 7).mode, WorldMode::Seeded(_)));
/// assert!(matches!(WorldConfig::threads(2).mode, WorldMode::Threads(_)));
/// ```
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum WorldMode {
    /// One scheduler on one thread with a virtual clock. Every decision follows from a seed, so a run can be repeated.
    Seeded(SeededConfig),
    /// Threads, in real time.
    Threads(ThreadsConfig),
}

/// The configuration of a job of several ranks in this process.
///
/// ```
/// use gin_host::comm::Backend;
/// use gin_host::world::WorldConfig;
///
/// let config = WorldConfig::seeded(4, 7).backend(Backend::Proxy).lsa_size(2);
/// assert_eq!((config.ranks, config.comm.lsa_size), (4, Some(2)));
/// ```
#[derive(Clone, derive_more::Debug)]
#[debug("WorldConfig {{ ranks: {ranks}, mode: {mode:?}, .. }}")]
#[non_exhaustive]
pub struct WorldConfig {
    /// The number of ranks.
    pub ranks: u32,
    /// The engine that runs them.
    pub mode: WorldMode,
    /// The virtual GPU of each rank.
    pub device: DeviceConfig,
    /// Devices instead of virtual GPUs, for ranks that are threads.
    pub devices: Option<Devices>,
    /// The configuration of the ranks' communicators. The world sets each rank's progress threads and seed.
    pub comm: CommConfig,
    /// Software NICs of the ranks, for the back end GDAKI, in place of the NIC in `comm`.
    pub nics: Option<SoftNics>,
    /// The number of progress threads that all ranks share; by default each rank has one. A seeded world has none.
    pub progress_threads: Option<usize>,
    /// The CPUs of progress threads. A thread that serves several ranks runs on the CPUs of all these
    /// ranks. A seeded world ignores it.
    pub placement: Placement,
    /// The time limit of a collective call; none by default.
    pub collective_timeout: Option<Duration>,
    /// The devices that [`auto`](Self::auto) took, and why, for people; empty if the program chose them.
    pub choice: String,
}

impl WorldConfig {
    fn new(ranks: u32, mode: WorldMode) -> Self {
        Self {
            ranks,
            mode,
            device: DeviceConfig::default(),
            devices: None,
            comm: CommConfig::default(),
            nics: None,
            progress_threads: None,
            placement: Placement::Automatic,
            collective_timeout: None,
            choice: String::new(),
        }
    }

    /// Makes a job of `ranks` ranks on the GPUs of this machine. If it has none, the job runs on virtual GPUs in a
    /// seeded world, with seed 1. `kernels` are the tables that the build script wrote: the PTX for real GPUs.
    /// [`choice`](Self::choice) says which devices it took, and why.
    ///
    /// ```
    /// use gin_host::world::{WorldMode, WorldConfig};
    ///
    /// // Without kernels it serves programs that only move memory.
    /// let config = WorldConfig::auto(2, &[])?;
    /// println!("on {}", config.choice);
    /// assert_eq!(matches!(config.mode, WorldMode::Seeded(_)), config.devices.is_none());
    /// # Ok::<(), gin_gpu::GpuError>(())
    /// ```
    ///
    /// # Errors
    /// As [`available`](gin_gpu::available): GPUs that cannot be used are an error, not a reason for virtual GPUs. An
    /// error of the driver.
    pub fn auto(ranks: u32, kernels: &[EmbeddedModules]) -> Result<Self, GpuError> {
        let found = gin_gpu::available(kernels)?;
        #[cfg(feature = "gpu")]
        if !found.names.is_empty() {
            let gpus: Vec<usize> = (0..found.names.len().min(ranks as usize)).collect();
            return Ok(Self { choice: found.text, ..Self::cuda(&gpus, ranks, kernels)? });
        }
        Ok(Self { choice: format!("virtual GPUs: {}", found.text), ..Self::seeded(ranks, 1) })
    }

    /// Makes a job of `ranks` ranks in a seeded world. With `GIN_NETWORK=worst` in the environment it has the
    /// [worst network](Self::worst_network), unless later calls choose others.
    pub fn seeded(ranks: u32, seed: u64) -> Self {
        let config = Self::new(ranks, WorldMode::Seeded(SeededConfig::new(seed)));
        let is_worst = std::env::var_os("GIN_NETWORK").is_some_and(|value| value == "worst");
        if is_worst { config.worst_network() } else { config }
    }

    /// Makes a job of `ranks` ranks that are threads.
    pub fn threads(ranks: u32) -> Self {
        Self::new(ranks, WorldMode::Threads(ThreadsConfig::default()))
    }

    /// Sets the schedule of virtual GPUs.
    #[must_use]
    pub fn schedule(mut self, schedule: Schedule) -> Self {
        match &mut self.mode {
            WorldMode::Seeded(config) => config.schedule = schedule,
            WorldMode::Threads(config) => config.schedule = schedule,
        }
        self
    }

    /// Sets whether a seeded world looks for data races. By default it does if the environment has `GIN_RACES=1`. A
    /// world of threads looks for none.
    #[must_use]
    pub fn races(mut self, races: bool) -> Self {
        if let WorldMode::Seeded(config) = &mut self.mode {
            config.races = races;
        }
        self
    }

    /// Sets whether a seeded world that fails prints its seed and schedule on standard error. By default it does. A
    /// loop that expects failures, and prints the seed of the one that it looks for, turns it off.
    #[must_use]
    pub fn print_seed(mut self, print: bool) -> Self {
        if let WorldMode::Seeded(config) = &mut self.mode {
            config.print_seed = print;
        }
        self
    }

    /// Sets the size of LSA teams.
    #[must_use]
    pub fn lsa_size(self, size: u32) -> Self {
        self.with_comm(|comm| comm.lsa_size(Some(size)))
    }

    /// Sets the routes of operations.
    #[must_use]
    pub fn routes(self, routes: Routes) -> Self {
        self.with_comm(|comm| comm.routes(routes))
    }

    /// Changes the configuration of communicators.
    #[must_use]
    pub fn with_comm(mut self, change: impl FnOnce(CommConfig) -> CommConfig) -> Self {
        self.comm = change(self.comm);
        self
    }

    /// Sets the back end.
    #[must_use]
    pub fn backend(self, backend: Backend) -> Self {
        self.with_comm(|comm| comm.backend(backend))
    }

    /// Sets the maximum number of resident blocks of a virtual GPU.
    #[must_use]
    pub fn resident_blocks(mut self, blocks: u32) -> Self {
        self.device.resident_blocks = blocks;
        self
    }

    /// Sets the network of the proxies.
    #[must_use]
    pub fn network(self, make: impl Fn(&Endpoint) -> Box<dyn Network> + Send + Sync + 'static) -> Self {
        self.with_comm(|comm| comm.network(Arc::new(make)))
    }

    /// Sends everything over a network that delays, reorders and withholds all that the contract does not promise, by
    /// choices that follow from the seed ([`gin_net::worst`]). For tests of kernels on virtual GPUs, with the proxy.
    ///
    /// It sets [`lsa_size`](Self::lsa_size) to 1, because loads and stores order more than is promised. So a kernel
    /// that needs loads and stores to peers cannot run so.
    ///
    /// ```
    /// use gin_host::comm::{CommError, Requirements};
    /// use gin_host::world::{WorldConfig, launch};
    ///
    /// let withheld = launch(WorldConfig::seeded(2, 7).worst_network(), |rank| -> Result<bool, CommError> {
    ///     let comm = rank.communicator(&Requirements::default())?;
    ///     let withheld = comm.network()?.needs_make_visible;
    ///     comm.destroy()?;
    ///     Ok(withheld)
    /// });
    /// assert_eq!(withheld.unwrap(), [true, true]);
    /// ```
    #[must_use]
    pub fn worst_network(self) -> Self {
        self.lsa_size(1).network(gin_net::worst::network)
    }

    /// Sets the back end GDAKI with these software NICs.
    #[must_use]
    pub fn soft_nics(mut self, nics: &SoftNics) -> Self {
        (self.comm.backend, self.nics) = (Backend::Gdaki, Some(nics.clone()));
        self
    }

    fn seed(&self) -> u64 {
        match &self.mode {
            WorldMode::Seeded(config) => config.seed,
            WorldMode::Threads(config) => config.seed,
        }
    }
}

/// The failure of a job.
///
/// ```
/// use gin_host::world::{LaunchError, WorldConfig, launch};
///
/// let outcome = launch(WorldConfig::seeded(2, 7), |rank| if rank.rank() == 1 { Err("no data") } else { Ok(()) });
/// assert!(matches!(outcome, Err(LaunchError::Rank { rank: 1, error: "no data" })));
/// ```
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum LaunchError<E> {
    /// The function of this rank returned an error: the first one, or the cause of it, if the rank had ended the last
    /// communicator of the rank that returned first. The other ranks were aborted.
    #[error("rank {rank}: {error}")]
    Rank {
        /// The rank.
        rank: u32,
        /// Its error.
        error: E,
    },
    /// The configuration does not fit ranks that are processes.
    #[error("{reason}")]
    Processes {
        /// The reason.
        reason: String,
    },
    /// The bootstrap failed.
    #[error(transparent)]
    Bootstrap(#[from] BootstrapError),
    /// The virtual world failed, for example by a deadlock. The error names each waiting thread and the line where it
    /// waits.
    #[error(transparent)]
    World(#[from] gin_virtual::WorldError),
    /// A rank's device is not available.
    #[error("rank {rank}: {error}")]
    Device {
        /// The rank.
        rank: u32,
        /// The reason.
        error: GpuError,
    },
    /// Progress threads cannot run on the requested CPUs.
    #[error(transparent)]
    Placement(#[from] PlacementError),
    /// The system refuses progress threads.
    #[error("no progress threads: {0}")]
    Threads(std::io::Error),
}

gin_abi::debug_as_display!(LaunchError<E>);

/// One rank of a job, the argument of its function.
///
/// The examples of [`launch`] use it.
#[derive(Debug)]
pub struct Rank {
    bootstrap: Arc<dyn Bootstrap>,
    device: Arc<dyn Device>,
    config: CommConfig,
    /// Its last communicator.
    last: Arc<Mutex<Option<AbortHandle>>>,
}

impl Rank {
    /// Makes a rank outside of [`launch`] and [`join`], for a program that cannot pass its own code to them, such as
    /// one behind an interpreter. Its progress threads run on the CPUs of `placement`.
    ///
    /// ```
    /// use gin_boot::InProcess;
    /// use gin_gpu::placement::Placement;
    /// use gin_gpu::virt::VirtualDevice;
    /// use gin_host::comm::{CommConfig, Requirements};
    /// use gin_host::world::Rank;
    /// use std::sync::Arc;
    ///
    /// let bootstrap = Arc::new(InProcess::job(1)?.remove(0));
    /// let device = VirtualDevice::memory_only(0);
    /// let rank = Rank::outside(bootstrap, device, CommConfig::default(), &Placement::Automatic)?;
    /// rank.communicator(&Requirements::default())?.destroy()?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// [`PlacementError`].
    pub fn outside(
        bootstrap: Arc<dyn Bootstrap>,
        device: Arc<dyn Device>,
        config: CommConfig,
        placement: &Placement,
    ) -> Result<Self, PlacementError> {
        let config = match placement.choose(&device.locality())?.cpus {
            Some(cpus) => {
                let inner = config.progress.clone();
                config.progress(Arc::new(Placed { inner, cpus }))
            }
            None => config,
        };
        Ok(Self { bootstrap, device, config, last: Arc::default() })
    }

    /// Returns the world rank.
    pub fn rank(&self) -> u32 {
        self.bootstrap.rank()
    }

    /// Returns the number of ranks.
    pub fn ranks(&self) -> u32 {
        self.bootstrap.ranks()
    }

    /// Returns the rank's device.
    pub fn device(&self) -> &Arc<dyn Device> {
        &self.device
    }

    /// Returns the bootstrap, which exchanges messages with the other ranks.
    pub fn bootstrap(&self) -> &Arc<dyn Bootstrap> {
        &self.bootstrap
    }

    /// Returns the configuration of the rank's communicators.
    pub fn comm_config(&self) -> &CommConfig {
        &self.config
    }

    /// Waits for all ranks. Collective.
    ///
    /// # Errors
    /// [`CommError::Bootstrap`].
    pub fn barrier(&self) -> Result<(), CommError> {
        Ok(self.bootstrap.barrier()?)
    }

    /// Creates and initialises a communicator of all ranks. Collective.
    ///
    /// # Errors
    /// As [`Communicator::initialise`].
    pub fn communicator(&self, requirements: &Requirements) -> Result<Communicator, CommError> {
        let comm = self.uninitialised();
        comm.initialise(requirements)?;
        Ok(comm)
    }

    /// Creates a communicator of all ranks that is not initialised.
    pub fn uninitialised(&self) -> Communicator {
        let comm = Communicator::new(self.bootstrap.clone(), self.device.clone(), self.config.clone());
        *lock(&self.last) = Some(comm.abort_handle());
        comm
    }

    /// Returns the kernel with this name among the kernels that are linked into the program.
    ///
    /// # Errors
    /// As [`Module::function`](gin_gpu::Module::function).
    pub fn kernel(&self, name: &str) -> Result<Function, GpuError> {
        self.device.load(ModuleSource::Linked)?.function(name)
    }

    /// Makes a stream of the rank's device. [`stream_with_priority`](Device::stream_with_priority) of
    /// [`device`](Self::device) makes one that goes before others.
    ///
    /// # Errors
    /// An error of the device.
    pub fn stream(&self) -> Result<Arc<dyn Stream>, GpuError> {
        self.device.stream()
    }
}

/// Steps proxies as services of a seeded world.
#[derive(Debug)]
struct Services(World);

impl Progress for Services {
    fn start(&self, name: &str, mut work: Work) -> std::io::Result<Running> {
        // The world reports a panic.
        let service = self.0.spawn_service(name, move || match work.step() {
            Turn::Worked => ServiceStep::Busy,
            Turn::Idle => ServiceStep::Idle,
            Turn::Finished => ServiceStep::Stop,
        });
        Ok(Running::new(move || service.is_finished()))
    }
}

/// Starts progress threads on the chosen CPUs.
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

/// Returns the union of the CPUs; `None` if one of the choices allows all.
fn together(places: &[ChosenCpus]) -> Option<Vec<usize>> {
    let mut all = Vec::new();
    for place in places {
        all.extend(place.cpus.as_ref()?);
    }
    all.sort_unstable();
    all.dedup();
    (!all.is_empty()).then_some(all)
}

/// Runs `body` once for each rank. Returns the results by rank.
///
/// If one rank returns an error, the collective calls of the other ranks end, and the communicators that it drops are
/// aborted.
///
/// ```
/// use gin_boot::{Bootstrap, BootstrapError};
/// use gin_host::world::{WorldConfig, launch};
///
/// let sums = launch(WorldConfig::seeded(3, 7), |rank| -> Result<u8, BootstrapError> {
///     let all = rank.bootstrap().all_gather(&[rank.rank() as u8 + 1])?;
///     Ok(all.iter().map(|bytes| bytes[0]).sum())
/// });
/// assert_eq!(sums.unwrap(), [6, 6, 6]);
/// ```
///
/// # Errors
/// [`LaunchError`].
///
/// # Panics
/// With the panic of the first rank that panicked, after the others were ended.
pub fn launch<T: Send, E: Send>(
    config: WorldConfig,
    body: impl Fn(Rank) -> Result<T, E> + Sync,
) -> Result<Vec<T>, LaunchError<E>> {
    launch_logged(config, body).0
}

/// Does the same as [`launch`], and returns the log of a seeded world too, if its configuration requests one.
pub fn launch_logged<T: Send, E: Send>(
    config: WorldConfig,
    body: impl Fn(Rank) -> Result<T, E> + Sync,
) -> (Result<Vec<T>, LaunchError<E>>, EventLog) {
    let world = match &config.mode {
        WorldMode::Seeded(seeded) => World::seeded(seeded.clone()),
        WorldMode::Threads(threads) => World::threads(threads.clone()),
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

/// Runs `body` as one rank of a job whose other ranks are other processes. The bootstrap determines the rank and the
/// time limit of collective calls; `config` determines the device.
///
/// If `body` returns an error, the collective calls of all ranks end.
///
/// ```
/// use gin_boot::{BootstrapError, Rendezvous, TcpConfig};
/// use gin_host::comm::{CommError, Requirements};
/// use gin_host::world::{WorldConfig, join};
/// use std::sync::Arc;
///
/// // A job of one process: others would join with the id of the rendezvous.
/// let bootstrap = Rendezvous::new(TcpConfig::default().address(Some([127, 0, 0, 1].into())))?.join(1)?;
/// let ranks = join(WorldConfig::threads(1), Arc::new(bootstrap), |rank| -> Result<u32, CommError> {
///     let comm = rank.communicator(&Requirements::default())?;
///     comm.destroy()?;
///     Ok(comm.ranks())
/// });
/// assert_eq!(ranks.unwrap(), 1);
/// # Ok::<(), BootstrapError>(())
/// ```
///
/// # Errors
/// [`LaunchError`]; [`LaunchError::Processes`] for a seeded world, or another number of ranks.
///
/// # Panics
/// With the panic of `body`.
pub fn join<T: Send, E: Send>(
    config: WorldConfig,
    bootstrap: Arc<dyn Bootstrap>,
    body: impl Fn(Rank) -> Result<T, E> + Sync,
) -> Result<T, LaunchError<E>> {
    let refuse = |reason| LaunchError::Processes { reason };
    let WorldMode::Threads(threads) = &config.mode else {
        return Err(refuse("processes cannot take turns in a seeded world: use threads".to_owned()));
    };
    if bootstrap.ranks() != config.ranks {
        return Err(refuse(format!("the job has {} ranks, not {}", bootstrap.ranks(), config.ranks)));
    }
    let world = World::threads(threads.clone());
    let rank = bootstrap.rank();
    let mut results = run(&config, &world, vec![bootstrap], &body)?;
    results.pop().ok_or_else(|| refuse(format!("rank {rank} brought nothing")))
}

/// Runs the ranks of `job`: all ranks of `config` or one of them.
fn run<T: Send, E: Send>(
    config: &WorldConfig,
    world: &World,
    job: Vec<Arc<dyn Bootstrap>>,
    body: &(impl Fn(Rank) -> Result<T, E> + Sync),
) -> Result<Vec<T>, LaunchError<E>> {
    // In the order of their returns: each rank with its error, and the rank that ended its last communicator.
    let failed: Mutex<Vec<(u32, E, Option<u32>)>> = Mutex::default();
    let device = |rank| -> Result<Arc<dyn Device>, LaunchError<E>> {
        match (&config.mode, &config.devices) {
            (WorldMode::Threads(_), Some(devices)) => {
                devices.device(rank, config.ranks).map_err(|error| LaunchError::Device { rank, error })
            }
            _ => Ok(VirtualDevice::new(world.device(config.device.clone()))),
        }
    };
    let devices = job.iter().map(|bootstrap| device(bootstrap.rank())).collect::<Result<Vec<_>, _>>()?;
    let places = match config.mode {
        WorldMode::Threads(_) => devices
            .iter()
            .map(|device| config.placement.choose(&device.locality()))
            .collect::<Result<Vec<_>, PlacementError>>()?,
        // All ranks and services take turns on one thread.
        WorldMode::Seeded(_) => Vec::new(),
    };
    let progress: Arc<dyn Progress> = match (&config.mode, config.progress_threads) {
        (WorldMode::Threads(_), Some(threads)) => {
            let pool = started_on(together(&places).as_deref(), || Pool::new(threads)).and_then(|pool| pool);
            Arc::new(pool.map_err(LaunchError::Threads)?)
        }
        _ => Arc::new(Services(world.clone())),
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
                nic: config.nics.as_ref().map_or(config.comm.nic.clone(), |nics| nics.of(bootstrap.rank())),
                progress,
                seed: config.seed(),
                ..config.comm.clone()
            },
            last: Arc::default(),
        };
        let (failed, last) = (&failed, rank.last.clone());
        move || match body(rank) {
            Ok(value) => Some(value),
            Err(error) => {
                let rank = bootstrap.rank();
                let ended_by = lock(&last).as_ref().and_then(AbortHandle::ended_by);
                lock(failed).push((rank, error, ended_by));
                // All ranks learn that a rank is lost. That says more than that one of them gave up because of it.
                if bootstrap.lost().is_empty() {
                    bootstrap.abort();
                }
                None
            }
        }
    });
    let hosts: Vec<_> = hosts.collect();
    if let Some(nics) = &config.nics {
        nics.serve(world);
    }
    let results = world.run(hosts);
    // A rank's own error says more than its consequences. A rank that drops its communicator aborts the others before
    // its function returns, so they may return first.
    let mut failed = std::mem::take(&mut *lock(&failed));
    if let Some((_, _, ended_by)) = failed.first() {
        let cause = failed.iter().position(|(rank, ..)| Some(*rank) == *ended_by).unwrap_or(0);
        let (rank, error, _) = failed.swap_remove(cause);
        return Err(LaunchError::Rank { rank, error });
    }
    Ok(results?.into_iter().flatten().collect())
}
