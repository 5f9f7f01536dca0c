// SPDX-License-Identifier: MIT OR Apache-2.0
//! Runs scenarios: creates ranks, windows and tables, launches the script, and collects logs, memory and faults.

use crate::op::{Entry, Op};
use crate::processes::{Collected, NOT_HERE, Processes};
pub use crate::scenario::SetupBackend;
use crate::scenario::{Control, NO_END, Outcome, Scenario, WindowSpec};
use crate::script::{RESET_BY_STORE, ROUTE_LSA, ROUTE_NETWORK, STOP_AT_ERROR, Script};
use bytemuck::Zeroable;
use gin_abi::WindowHandle;
use gin_abi::mlx5::cqe::Syndrome;
use gin_gpu::Devices;
use gin_gpu::LaunchConfig;
use gin_gpu::{Memory, MemoryKind, Plain};
use gin_host::comm::Window;
use gin_host::comm::{CommError, WindowFlags};
use gin_host::world::{LaunchError, Rank, SoftNics, WorldConfig, WorldMode, join, launch_logged};
use gin_net::peer::PeerNetwork;
use gin_net::staged::{Staged, Staging};
use gin_net::{Endpoint, Network, NetworkFactory};
use gin_nic::DoorbellRelease;
use gin_soft_nic::engine::Slow;
use gin_soft_nic::{Fault, FaultKind};
use gin_soft_nic_host::{SoftEngine, SoftFabric};
use gin_testkit::{
    Delay, FailOnDemand, FailSwitch, LateCopies, Reorder, Sabotage, SlowPeer, Trickle, WeakOnly, Withhold,
    number_from_env,
};
use gin_virtual::{EventLog, LogMode, Schedule, SeededConfig};
use std::boxed::Box;
use std::fmt;
use std::format;
use std::string::{String, ToString};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use std::vec;
use std::vec::Vec;

/// Way in which a request fails.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum How {
    /// The network reports an error.
    Error,
    /// The peer is lost.
    Lost,
    /// The request never completes.
    Silent,
    /// The request never begins, nor does any later request to the same peer in the same context. Only for
    /// device-driven NIC queue pairs.
    Stuck,
    /// The request takes effect at the peer, and its answer is lost. Only for device-driven NIC queue pairs.
    Unanswered,
}

/// The request that fails, and how.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Failure {
    /// Rank that posts the request.
    pub from: u32,
    /// Number of requests that this rank posts before it.
    pub number: u64,
    /// Way in which it fails.
    pub how: How,
}

/// Behaviour of the network between the ranks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Net {
    /// The network is unchanged.
    Plain,
    /// Every request is delayed by up to `ns` nanoseconds.
    Delay {
        /// Longest delay in nanoseconds.
        ns: u64,
    },
    /// Requests that the contract does not order are reordered.
    Reorder,
    /// Payload stays out of view until it is made visible.
    Withhold,
    /// As `Withhold`, and every request is delayed.
    WithholdLate,
    /// As `WithholdLate`, also reordered, and the network accepts few requests at a time.
    Worst,
    /// Device memory is staged through host memory over the worst network; requests to the staging layer are reordered
    /// too.
    Staged,
    /// One request fails.
    Fail(Failure),
    /// Requests to one rank are delayed.
    SlowPeer {
        /// The rank.
        rank: u32,
        /// Delay in nanoseconds.
        ns: u64,
    },
    /// The network has no strong signals and no signals at addresses.
    WeakOnly,
}

/// The network that carries all requests; [`Net`] adds its behaviour on top.
#[derive(Clone)]
pub struct Carrier {
    name: &'static str,
    make: NetworkFactory,
    by_proxy: NetworkFactory,
}

impl Carrier {
    /// Creates a carrier whose networks `make` builds, one for each rank. `name` appears in reports. On a network that
    /// withholds data the receiver's proxy raises signals, so `by_proxy` builds one whose NIC raises none.
    #[must_use]
    pub fn new(name: &'static str, make: NetworkFactory, by_proxy: NetworkFactory) -> Self {
        Self { name, make, by_proxy }
    }

    /// Creates the carrier of GPUs, for virtual ones: copies end late, and small values go to mailboxes.
    #[must_use]
    pub fn late() -> Self {
        let make: NetworkFactory =
            Arc::new(|endpoint| Box::new(PeerNetwork::with_copier(endpoint, Box::new(LateCopies::new(endpoint)))));
        Self::new("late copies and mailboxes", make.clone(), make)
    }
}

impl Default for Carrier {
    fn default() -> Self {
        let make: NetworkFactory = Arc::new(|endpoint| Box::new(PeerNetwork::new(endpoint)));
        Self::new("peer", make.clone(), make)
    }
}

impl fmt::Debug for Carrier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Carrier").field(&self.name).finish()
    }
}

impl Net {
    /// Returns whether ranks exchange information past the network, which works within one process only.
    fn is_of_one_process(self) -> bool {
        matches!(self, Self::Withhold | Self::WithholdLate | Self::Worst | Self::Staged)
    }

    fn wrap(self, endpoint: &Endpoint, carrier: &Carrier) -> Box<dyn Network> {
        // All that withhold data exchange information past the network, and no others do.
        let make = if self.is_of_one_process() { &carrier.by_proxy } else { &carrier.make };
        let peer = make(endpoint);
        match self {
            Self::Plain => peer,
            Self::Delay { ns } => Box::new(Delay::new(peer, endpoint, Duration::from_nanos(ns))),
            Self::Reorder => Box::new(Reorder::new(peer, endpoint)),
            Self::Withhold => Box::new(Withhold::new(peer, endpoint.rank)),
            Self::WithholdLate => {
                let late = Delay::new(peer, endpoint, Duration::from_micros(30));
                Box::new(Withhold::new(late, endpoint.rank))
            }
            Self::Worst => {
                let below = Trickle::new(Delay::new(peer, endpoint, Duration::from_micros(5)), 3);
                Box::new(Reorder::new(Withhold::new(below, endpoint.rank), endpoint))
            }
            Self::Staged => {
                let below = Trickle::new(Delay::new(peer, endpoint, Duration::from_micros(5)), 3);
                let below = Reorder::new(Withhold::new(below, endpoint.rank), endpoint);
                let staged = Staged::new(below, endpoint.rank, Staging::Always("a test requires it"));
                Box::new(Reorder::new(staged, endpoint))
            }
            Self::Fail(failure) => {
                let switch = FailSwitch::new();
                if endpoint.rank == failure.from {
                    let how = match failure.how {
                        How::Error => gin_testkit::Failure::Status(5),
                        How::Lost => gin_testkit::Failure::PeerLost,
                        How::Silent | How::Stuck | How::Unanswered => gin_testkit::Failure::Silence,
                    };
                    switch.fail_after(failure.number, how);
                }
                Box::new(FailOnDemand::new(peer, switch))
            }
            Self::SlowPeer { rank, ns } => Box::new(SlowPeer::new(peer, rank, Duration::from_nanos(ns))),
            Self::WeakOnly => Box::new(WeakOnly::new(peer, false, false)),
        }
    }
}

impl Net {
    /// Creates software NICs with this behaviour for `ranks` ranks. The error says why that is impossible.
    fn nics(self, setup: &Setup, ranks: u32) -> Result<SoftNics, String> {
        let Setup { seed, mistake, engine, .. } = *setup;
        // NICs measure time in steps; a step of another rank's kernel takes some tens of nanoseconds on the virtual
        // clock.
        let (delay, mixed) = match self {
            Self::Delay { ns } => (ns / 100, true),
            Self::WithholdLate => (300, true),
            Self::Worst => (50, true),
            Self::Reorder => (10, true),
            _ => (0, false),
        };
        let seed = if mixed { seed.unwrap_or(0) | 1 } else { 0 };
        let slow = match self {
            Self::SlowPeer { rank, ns } => Some(Slow { device: rank, late: ns }),
            _ => None,
        };
        let mistake = match mistake {
            Mistake::Nic(mistake) => mistake,
            _ => gin_soft_nic::Mistake::None,
        };
        let options = gin_soft_nic::Options { delay, seed, slow, mistake, ..Default::default() };
        let nics = match &setup.devices {
            None => SoftNics::new(options),
            Some(devices) => {
                let device = devices.device(0, ranks).map_err(|error| error.to_string())?;
                SoftNics::placed(options, engine, &device).map_err(|error| error.to_string())?
            }
        };
        // Creates the NICs in this order, so that their numbers are the ranks.
        (0..ranks).for_each(|rank| drop(nics.hca(rank)));
        if let Self::Fail(failure) = self {
            let kind = match failure.how {
                How::Error => FaultKind::Fail(Syndrome::LocalLength),
                How::Lost => FaultKind::Drop,
                How::Silent => FaultKind::Delay(u64::MAX),
                How::Stuck => FaultKind::Stall,
                How::Unanswered => FaultKind::LoseAnswer,
            };
            let fault = Fault { device: Some(failure.from), queue: None, entry: failure.number, kind };
            nics.fabric().inject(fault).map_err(|error| error.to_string())?;
        }
        Ok(nics)
    }
}

/// A mistake that gin makes on purpose, to prove that the suite notices it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Mistake {
    /// No mistake.
    None,
    /// A mistake of the proxies.
    Proxy(Sabotage),
    /// Kernels reset a signal by storing 0 in its words.
    ResetByStore,
    /// A mistake of the software NICs behind device-driven queue pairs.
    Nic(gin_soft_nic::Mistake),
}

/// Route of operations that name none.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SetupRoute {
    /// The network.
    Network,
    /// Loads and stores to LSA peers, the network to others.
    Auto,
    /// Loads and stores, in scenarios with one LSA team of several ranks; otherwise as `Auto`.
    Lsa,
}

/// Origin of windows that start at their allocation. Other windows are always part of registered memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SetupWindows {
    /// The communicator allocates them: the parts of LSA peers have a fixed distance.
    Allocated,
    /// The user registers memory: the parts are at arbitrary addresses.
    Registered,
}

/// Logs of seeded runs, in the order of the runs.
pub type Logs = Arc<Mutex<Vec<EventLog>>>;

/// Place and manner of running scenarios.
#[derive(Clone, Debug)]
pub struct Setup {
    /// Seed of the schedule and of the networks' choices; `None` to use real threads.
    pub seed: Option<u64>,
    /// Schedule that chooses the next thread.
    pub schedule: Schedule,
    /// Number of choices without progress after which a seeded run ends.
    pub stall_steps: u64,
    /// Largest number of resident blocks. A cooperative scenario with more blocks gets its own number.
    pub resident_blocks: Option<u32>,
    /// Behaviour of the network, unless a case sets another.
    pub net: Net,
    /// Network below it, where a CPU thread executes network operations.
    pub carrier: Carrier,
    /// Back end that executes network operations.
    pub backend: SetupBackend,
    /// Engine of software NICs, where kernels drive NICs on devices other than the virtual GPU.
    pub engine: SoftEngine,
    /// Scope to which kernels release memory before they ring a NIC's doorbell.
    pub release: DoorbellRelease,
    /// Route of operations that name none.
    pub route: SetupRoute,
    /// Origin of windows.
    pub windows: SetupWindows,
    /// Factor by which times on a real clock are longer than on a virtual one, because other programs use the
    /// CPUs too.
    pub patience: u64,
    /// Devices other than the virtual GPU, for real threads.
    pub devices: Option<Devices>,
    /// Processes that run the ranks of a scenario, one in each; `None` to use threads of this process.
    pub processes: Option<Processes>,
    /// Set if each process has its own host, so that loads and stores reach no other rank.
    pub apart: bool,
    /// Set to use kernels with only one back end compiled in, where they exist.
    pub named_backend: bool,
    /// Mistake that gin makes on purpose.
    pub mistake: Mistake,
    /// Command that repeats a run of this setup.
    pub repeat: Option<String>,
    /// Destination of the logs of seeded runs.
    pub logs: Option<Logs>,
}

/// Real time after which the runtime ends a grid on which others still wait.
const GRID_LIMIT: Duration = Duration::from_secs(120);

impl Setup {
    /// Returns a setup of the virtual GPU with a seeded schedule.
    #[must_use]
    pub fn seeded(seed: u64) -> Self {
        Self {
            seed: Some(seed),
            schedule: Schedule::Mixed,
            stall_steps: SeededConfig::default().stall_steps,
            resident_blocks: None,
            net: Net::Plain,
            carrier: Carrier::default(),
            backend: SetupBackend::Proxy,
            engine: SoftEngine::Process,
            release: DoorbellRelease::System,
            route: SetupRoute::Network,
            windows: SetupWindows::Allocated,
            patience: 20,
            devices: None,
            processes: None,
            apart: false,
            named_backend: false,
            mistake: Mistake::None,
            repeat: None,
            logs: None,
        }
    }

    /// Returns a setup of the virtual GPU on real threads.
    #[must_use]
    pub fn threads() -> Self {
        Self { seed: None, schedule: Schedule::Random, ..Self::seeded(0) }
    }

    /// Returns this setup with another network behaviour.
    #[must_use]
    pub fn with_network(&self, net: Net) -> Self {
        Self { net, ..self.clone() }
    }

    /// Returns this setup with windows of another origin.
    #[must_use]
    pub fn with_windows(&self, windows: SetupWindows) -> Self {
        Self { windows, ..self.clone() }
    }

    /// Returns `ns` on a virtual clock, and `ns` times [`patience`](Self::patience) on a real one.
    #[must_use]
    pub fn scaled(&self, ns: u64) -> u64 {
        if self.seed.is_some() { ns } else { ns * self.patience }
    }

    /// Returns how many values a rank can post to one peer when no value arrives. This holds for scenarios that ask for
    /// queues of 2 slots and one request to a peer at a time. With a proxy, one value is under way and two are in the
    /// queue. A NIC has no queue shorter than four entries.
    #[must_use]
    pub fn small_room(&self) -> usize {
        match self.backend {
            SetupBackend::Proxy => 3,
            SetupBackend::Gdaki => 4,
        }
    }

    /// Returns the setup's name for reports.
    #[must_use]
    pub fn name(&self) -> String {
        let mut name = match (self.seed, &self.devices) {
            (Some(seed), _) => {
                format!("virtual GPU, seed {seed}, schedule {:?}, network {:?}", self.schedule, self.net)
            }
            (None, Some(devices)) => format!("{}, network {:?}", devices.name(), self.net),
            (None, None) => format!("virtual GPU, threads, network {:?}", self.net),
        };
        if self.backend == SetupBackend::Proxy && self.carrier.name != "peer" {
            name.push_str(&format!(" over {}", self.carrier.name));
        }
        if let Some(blocks) = self.resident_blocks {
            name.push_str(&format!(", {blocks} resident blocks"));
        }
        match self.route {
            SetupRoute::Network => {}
            SetupRoute::Auto => name.push_str(", route automatic"),
            SetupRoute::Lsa => name.push_str(", route LSA"),
        }
        if self.backend == SetupBackend::Gdaki {
            name.push_str(", GDAKI");
        }
        if self.release == DoorbellRelease::Gpu {
            name.push_str(", release to the GPU");
        }
        if self.windows == SetupWindows::Registered {
            name.push_str(", registered memory");
        }
        if self.processes.is_some() {
            name.push_str(", ranks in processes");
        }
        if self.named_backend {
            name.push_str(", one back end compiled in");
        }
        if self.mistake != Mistake::None {
            name.push_str(&format!(", {:?}", self.mistake));
        }
        name
    }

    fn config(&self, scenario: &Scenario) -> WorldConfig {
        let mut config = match self.seed {
            Some(seed) => WorldConfig::seeded(scenario.ranks, seed),
            None => WorldConfig::threads(scenario.ranks),
        };
        match &mut config.mode {
            WorldMode::Seeded(seeded) => {
                seeded.stall_steps = self.stall_steps;
                // A mistake must show in what a case checks.
                seeded.races &= matches!(self.mistake, Mistake::None);
                seeded.log = if self.logs.is_some() { LogMode::Full } else { LogMode::Off };
            }
            WorldMode::Threads(threads) => {
                threads.grid_limit = Some(GRID_LIMIT);
                // Lasts as long as by default, times this machine's patience.
                threads.watchdog = Some(Duration::from_millis(500 * self.patience));
            }
        }
        config = config.schedule(self.schedule);
        config.devices = self.devices.clone();
        config.comm.release = self.release;
        if let Some(size) = scenario.lsa_size {
            config = config.lsa_size(size);
        }
        if let Some(blocks) = self.resident_blocks {
            let least = if scenario.cooperative { scenario.blocks } else { 1 };
            config = config.resident_blocks(blocks.max(least));
        }
        let (net, carrier) = (self.net, self.carrier.clone());
        let config = config.network(move |endpoint| net.wrap(endpoint, &carrier));
        match self.mistake {
            Mistake::Proxy(sabotage) => sabotage.apply(config),
            Mistake::None | Mistake::ResetByStore | Mistake::Nic(_) => config,
        }
    }

    /// Runs a scenario.
    ///
    /// # Errors
    /// Returns a description of the failure. It starts with [`NO_END`] if the run made no progress.
    pub fn run(&self, scenario: &Scenario) -> Result<Outcome, String> {
        self.run_in(self.config(scenario), scenario)
    }

    /// Runs a scenario on devices with room for exactly `blocks` resident blocks.
    ///
    /// # Errors
    /// As [`run`](Self::run).
    pub fn run_resident(&self, scenario: &Scenario, blocks: u32) -> Result<Outcome, String> {
        self.run_in(self.config(scenario).resident_blocks(blocks), scenario)
    }

    fn run_in(&self, config: WorldConfig, scenario: &Scenario) -> Result<Outcome, String> {
        let nics = match self.backend {
            SetupBackend::Proxy => None,
            SetupBackend::Gdaki => Some(self.net.nics(self, scenario.ranks)?),
        };
        let config = match &nics {
            Some(nics) => config.soft_nics(nics),
            None => config,
        };
        let fabric = nics.as_ref().map(SoftNics::fabric);
        let body = |rank: Rank| run_rank(&rank, scenario, self, fabric);
        let ranks = match &self.processes {
            None => {
                let (results, log) = launch_logged(config, body);
                if let Some(logs) = &self.logs {
                    logs.lock().unwrap_or_else(PoisonError::into_inner).push(log);
                }
                results.map_err(in_words)?
            }
            Some(_) if self.net.is_of_one_process() => {
                return Err(format!(
                    "{NOT_HERE}: network {:?} tracks withheld payload within one process only",
                    self.net
                ));
            }
            Some(_) if self.apart && scenario.loads_and_stores() => {
                return Err(format!("{NOT_HERE}: loads and stores do not reach another host"));
            }
            Some(processes) => {
                let own = processes.job(scenario.ranks)?.map(|job| join(config, job, body).map_err(in_words));
                processes.gather(own)?
            }
        };
        if let Some(failure) = fabric.and_then(SoftFabric::failure) {
            return Err(format!("the NIC's engine failed: {failure}"));
        }
        if let Some((Some(violation), count)) = fabric.map(SoftFabric::violations) {
            return Err(format!("the NIC was used wrongly {count} times, first: {violation:?}"));
        }
        let mut outcome = Outcome { logs: Vec::new(), windows: Vec::new(), faults: Vec::new() };
        for (log, windows, fault) in ranks {
            outcome.logs.push(log);
            outcome.windows.push(windows);
            outcome.faults.push(fault);
        }
        Ok(outcome)
    }
}

/// Describes how a job failed; the text starts with [`NO_END`] if the job made no progress.
fn in_words(error: LaunchError<CommError>) -> String {
    let (stuck, text) = (matches!(error, LaunchError::World(_)), error.to_string());
    // On real threads the time limit ends a grid, and its rank reports that.
    if stuck || text.contains("has not ended") { format!("{NO_END}: {text}") } else { text }
}

fn run_rank(
    rank: &Rank,
    scenario: &Scenario,
    setup: &Setup,
    fabric: Option<&SoftFabric>,
) -> Result<Collected, CommError> {
    let me = rank.rank();
    let comm = rank.communicator(&scenario.requirements)?;
    let mut windows: Vec<Window<u8>> = Vec::new();
    for spec in &scenario.windows {
        let bytes = spec.bytes[me as usize];
        let flags = if spec.signals { WindowFlags::SIGNALS } else { WindowFlags::NONE };
        if setup.windows == SetupWindows::Allocated && spec.offset == 0 {
            windows.push(comm.alloc_window(bytes as usize, flags)?);
            continue;
        }
        let bytes_there = (spec.offset + bytes).max(1);
        let memory = if rank.bootstrap().is_across_processes() {
            Memory::shared(rank.device(), MemoryKind::Device, bytes_there)?
        } else {
            Memory::new(rank.device(), MemoryKind::Device, bytes_there)?
        };
        windows.push(comm.register(&memory.slice(spec.offset..spec.offset + bytes)?, flags)?);
    }

    let (mut operations, mut programs) = (Vec::<Op>::new(), Vec::<u64>::new());
    for group in 0..scenario.groups() {
        let program = scenario.program(me, group);
        programs.extend([operations.len() as u64, program.len() as u64]);
        operations.extend_from_slice(program);
    }
    operations.push(Op::zeroed());
    let handles: Vec<WindowHandle> = windows.iter().map(Window::handle).collect();
    let (threads, stride) = ((scenario.blocks * scenario.threads) as usize, scenario.longest().max(1));
    let flag = |on, bit| if on { bit } else { 0 };
    let table = |bytes: usize| Memory::new(rank.device(), MemoryKind::Device, bytes.max(8) as u64);
    let handle_table = table(size_of_val(handles.as_slice()))?;
    handle_table.write(0, &handles)?;
    let operation_table = table(size_of_val(operations.as_slice()))?;
    operation_table.write(0, &operations)?;
    let program_table = table(size_of_val(programs.as_slice()))?;
    program_table.write(0, &programs)?;
    let log = table(threads * stride * size_of::<Entry>())?;
    let script = Script {
        windows: handle_table.address(),
        operations: operation_table.address(),
        programs: program_table.address(),
        log: log.address(),
        stride: stride as u64,
        window_count: windows.len() as u32,
        flags: flag(scenario.stop_at_error, STOP_AT_ERROR)
            | flag(setup.mistake == Mistake::ResetByStore, RESET_BY_STORE)
            | match setup.route {
                SetupRoute::Network => ROUTE_NETWORK,
                SetupRoute::Lsa if scenario.ranks > 1 && scenario.lsa_size.is_none() => ROUTE_LSA,
                SetupRoute::Auto | SetupRoute::Lsa => 0,
            },
    };

    let named = setup.named_backend && setup.route == SetupRoute::Network && !scenario.names_routes();
    let coop = if named { scenario.coop.with_named_backend() } else { scenario.coop };
    let kernel = rank.kernel(coop.kernel(setup.backend))?;
    let stream = rank.stream()?;
    let mut shape = LaunchConfig::new(scenario.blocks, scenario.threads);
    shape.cooperative = scenario.cooperative;
    rank.barrier()?;
    // Safety: the tables are as the kernel expects. Tables, communicator and windows outlive the kernel.
    unsafe { stream.launch(&kernel, shape, &[&comm.device()?, &Plain(script)])? };
    if let Some(act) = &scenario.during {
        act(&Control { rank: me, comm: &comm });
    }
    stream.synchronize()?;
    // Puts of other ranks may still be on their way to this rank.
    rank.barrier()?;
    if let Some(fabric) = fabric {
        fabric.deliver();
    }

    let mut entries = vec![Entry::zeroed(); threads * stride];
    log.read(0, &mut entries)?;
    let logs = entries.chunks(stride).map(<[Entry]>::to_vec).collect();
    let read = || -> Result<Vec<Vec<u8>>, CommError> {
        let read = |(window, spec): (&Window<u8>, &WindowSpec)| {
            let mut memory = vec![0u8; spec.bytes[me as usize] as usize];
            window.memory().read(0, &mut memory)?;
            Ok(memory)
        };
        windows.iter().zip(&scenario.windows).map(read).collect()
    };
    // The query announces this kernel's own fault to the other ranks if its proxy has not done so yet.
    let early = if comm.fault().is_none() { Some(read()?) } else { None };
    rank.barrier()?;
    let fault = comm.fault().map(|notice| (notice.rank, notice.fault));
    rank.barrier()?;
    comm.destroy()?;
    // After a fault, puts may arrive until the communicators of all ranks have ended.
    rank.barrier()?;
    let bytes = early.map_or_else(read, Ok)?;
    Ok((logs, bytes, fault))
}

/// Returns the seed in `GIN_SEED`, or a new one.
///
/// # Panics
/// If the variable's value is not a number.
#[must_use]
pub fn seed_from_env() -> u64 {
    let now = || SystemTime::now().duration_since(UNIX_EPOCH).map_or(1, |now| now.as_nanos() as u64);
    number_from_env("GIN_SEED").unwrap_or_else(now)
}
