// SPDX-License-Identifier: MIT OR Apache-2.0
//! Runs scenarios: brings up ranks, windows and tables, launches the script, and collects what came of it.

use crate::cases::Case;
use crate::op::{Entry, Op};
use crate::processes::{Collected, NOT_HERE, Processes};
use crate::scenario::{Control, NO_END, Outcome, Scenario};
use crate::script::{RESET_BY_STORE, ROUTE_LSA, ROUTE_NETWORK, STOP_AT_ERROR, Script};
use bytemuck::Zeroable;
use gin_abi::WindowHandle;
use gin_abi::mlx5::cqe::Syndrome;
use gin_gpu::Devices;
use gin_gpu::LaunchConfig;
use gin_gpu::{Memory, MemoryKind, Plain};
use gin_host::Window;
use gin_host::comm::{CommError, WindowFlags};
use gin_host::world::{LaunchError, Mode, Rank, SoftNics, WorldConfig, join, launch_logged};
use gin_net::peer::Peer;
use gin_net::staged::{Staged, Staging};
use gin_net::{Endpoint, Network, NetworkFactory};
use gin_nic::DoorbellRelease;
use gin_soft_hca::engine::Slow;
use gin_soft_hca::{Fault, FaultKind};
use gin_soft_hca_host::{SoftEngine, SoftFabric};
use gin_testkit::Sabotage;
use gin_testkit::{Delay, FailOnDemand, FailSwitch, Reorder, SlowPeer, Trickle, WeakOnly, Withhold};
use gin_virtual::{EventLog, LogMode, Policy, SeededConfig};
use std::boxed::Box;
use std::fmt;
use std::format;
use std::string::{String, ToString};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use std::vec;
use std::vec::Vec;

/// How a request fails.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum How {
    /// The network reports an error.
    Error,
    /// The peer is lost.
    Lost,
    /// It is never complete.
    Silent,
    /// It never begins, nor does what comes behind it to the same peer in the same context; for NICs that kernels
    /// drive.
    Stuck,
    /// It takes effect at the peer, and the answer is lost; for NICs that kernels drive.
    Unanswered,
}

/// Which request fails.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Failure {
    /// Whose.
    pub from: u32,
    /// Requests of that rank before it.
    pub number: u64,
    /// How.
    pub how: How,
}

/// What is between the ranks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Net {
    /// The network as it is.
    Plain,
    /// Every request is late by up to so many nanoseconds.
    Delay {
        /// The most.
        ns: u64,
    },
    /// Whatever the contract does not order is reordered.
    Reorder,
    /// Payload is out of view until it is made visible.
    Withhold,
    /// That, and every request is late.
    WithholdLate,
    /// All of that, and few requests are taken at a time.
    Worst,
    /// Memory of devices goes through host memory, over the worst network; what is handed to it is reordered too.
    Staged,
    /// One request fails.
    Fail(Failure),
    /// Requests to one rank are late.
    SlowPeer {
        /// The rank.
        rank: u32,
        /// By how many nanoseconds.
        ns: u64,
    },
    /// There are no strong signals and none at addresses.
    WeakOnly,
}

/// The network that carries everything, below what [`Net`] adds.
#[derive(Clone)]
pub struct Carrier {
    name: &'static str,
    make: NetworkFactory,
}

impl Carrier {
    /// The network that `make` makes for each rank; `name` is for people.
    #[must_use]
    pub fn new(name: &'static str, make: NetworkFactory) -> Self {
        Self { name, make }
    }
}

impl Default for Carrier {
    fn default() -> Self {
        Self::new("peer", Arc::new(|endpoint| Box::new(Peer::new(endpoint))))
    }
}

impl fmt::Debug for Carrier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Carrier").field(&self.name).finish()
    }
}

impl Net {
    /// Whether ranks tell each other something past the network, within a process.
    fn is_of_one_process(self) -> bool {
        matches!(self, Self::Withhold | Self::WithholdLate | Self::Worst | Self::Staged)
    }

    fn wrap(self, endpoint: &Endpoint, carrier: &Carrier) -> Box<dyn Network> {
        let peer = (carrier.make)(endpoint);
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
                let staged = Staged::new(below, endpoint.rank, Staging::Always("a test wants it"));
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
    /// Software NICs that behave like this, for so many ranks; in words why there can be none.
    fn nics(self, setup: &Setup, ranks: u32) -> Result<SoftNics, String> {
        let Setup { seed, mistake, engine, .. } = *setup;
        // A NIC's time is steps; a step of another rank's kernel takes some tens of nanoseconds on the virtual clock.
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
            _ => gin_soft_hca::Mistake::None,
        };
        let options = gin_soft_hca::Options { delay, seed, slow, mistake, ..Default::default() };
        let nics = match &setup.devices {
            None => SoftNics::new(options),
            Some(devices) => {
                let device = devices.device(0, ranks).map_err(|error| error.to_string())?;
                SoftNics::placed(options, engine, &device).map_err(|error| error.to_string())?
            }
        };
        // Their numbers are the ranks.
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

/// A mistake for gin to make, for proving that the suite notices it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Mistake {
    /// None.
    None,
    /// One of the proxies.
    Proxy(Sabotage),
    /// Kernels reset a signal by storing 0 to its words.
    ResetByStore,
    /// One of the software NICs, where kernels drive them.
    Nic(gin_soft_hca::Mistake),
}

/// The route of operations that name none.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SetupRoute {
    /// The network.
    Network,
    /// Loads and stores to LSA peers, the network to others.
    Auto,
    /// Loads and stores, in scenarios of one LSA team of several ranks; else as `Auto`.
    Lsa,
}

/// Who carries out what goes over the network.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SetupBackend {
    /// A CPU thread.
    Proxy,
    /// The kernel, with a software NIC.
    Gdaki,
}

/// Where windows come from that start their allocation; the others are part of memory that was registered.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SetupWindows {
    /// The communicator allocates them: the parts of LSA peers lie at a fixed distance.
    Allocated,
    /// The user registers memory: the parts lie anywhere.
    Registered,
}

/// Logs of seeded runs, in the order of the runs.
pub type Logs = Arc<Mutex<Vec<EventLog>>>;

/// Where and how scenarios run.
#[derive(Clone, Debug)]
pub struct Setup {
    /// Seed of the schedule and of the networks' choices; `None` for real threads.
    pub seed: Option<u64>,
    /// Who runs next.
    pub policy: Policy,
    /// Choices without progress after which a seeded run is ended.
    pub stall_steps: u64,
    /// Most blocks that are resident at a time; a scenario's own number of blocks if it has more and is cooperative.
    pub resident_blocks: Option<u32>,
    /// The network, unless a case needs another.
    pub net: Net,
    /// What carries it, where a CPU thread carries out what goes over the network.
    pub carrier: Carrier,
    /// Who carries out what goes over it.
    pub backend: SetupBackend,
    /// What runs the NICs' engine, where kernels drive NICs on other devices than the virtual GPU.
    pub engine: SoftEngine,
    /// How far kernels that drive NICs release before they ring.
    pub release: DoorbellRelease,
    /// The route of operations that name none.
    pub route: SetupRoute,
    /// Where windows come from.
    pub windows: SetupWindows,
    /// How many times longer times are on a real clock than on a virtual one, since other programs use the processors
    /// too.
    pub patience: u64,
    /// Other devices than the virtual GPU, for real threads.
    pub devices: Option<Devices>,
    /// The processes whose ranks run scenarios, one in each; threads of this one otherwise.
    pub processes: Option<Processes>,
    /// These are on hosts of their own, where loads and stores reach no other.
    pub apart: bool,
    /// Kernels with the back end compiled in alone, where there are any.
    pub named_backend: bool,
    /// A mistake to make.
    pub mistake: Mistake,
    /// The command that repeats what runs on this setup.
    pub repeat: Option<String>,
    /// Where the logs of seeded runs go.
    pub logs: Option<Logs>,
}

/// Real time after which a grid is ended that others wait for in vain.
const GRID_LIMIT: Duration = Duration::from_secs(120);

impl Setup {
    /// The virtual GPU with a seeded schedule.
    #[must_use]
    pub fn seeded(seed: u64) -> Self {
        Self {
            seed: Some(seed),
            policy: Policy::Mixed,
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

    /// The virtual GPU on real threads.
    #[must_use]
    pub fn threads() -> Self {
        Self { seed: None, policy: Policy::Random, ..Self::seeded(0) }
    }

    /// The same with another network.
    #[must_use]
    pub fn with_network(&self, net: Net) -> Self {
        Self { net, ..self.clone() }
    }

    /// The same with windows from elsewhere.
    #[must_use]
    pub fn with_windows(&self, windows: SetupWindows) -> Self {
        Self { windows, ..self.clone() }
    }

    /// So many nanoseconds of a virtual clock; on a real one more.
    #[must_use]
    pub fn scaled(&self, ns: u64) -> u64 {
        if self.seed.is_some() { ns } else { ns * self.patience }
    }

    /// How many values can be put to one peer, when none of them gets there, in scenarios that ask for queues of 2 and
    /// one request to a peer at a time: one is under way and two are in the queue of a proxy; four are entries of a
    /// NIC, which has no shorter queues.
    #[must_use]
    pub fn small_room(&self) -> usize {
        match self.backend {
            SetupBackend::Proxy => 3,
            SetupBackend::Gdaki => 4,
        }
    }

    /// Whether GPUs can raise words of their LSA peers.
    #[must_use]
    pub fn gpu_raises(&self) -> bool {
        true
    }

    /// Its name, for reports.
    #[must_use]
    pub fn name(&self) -> String {
        let mut name = match (self.seed, &self.devices) {
            (Some(seed), _) => format!("virtual GPU, seed {seed}, schedule {:?}, network {:?}", self.policy, self.net),
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
            name.push_str(", released to the GPU");
        }
        if self.windows == SetupWindows::Registered {
            name.push_str(", memory of the user");
        }
        if self.processes.is_some() {
            name.push_str(", ranks in processes");
        }
        if self.named_backend {
            name.push_str(", back end named");
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
            Mode::Seeded(seeded) => {
                seeded.stall_steps = self.stall_steps;
                seeded.log = if self.logs.is_some() { LogMode::Full } else { LogMode::Off };
            }
            Mode::Threads(threads) => {
                threads.grid_limit = Some(GRID_LIMIT);
                // With the patience of this machine as long as by default.
                threads.watchdog = Some(Duration::from_millis(500 * self.patience));
            }
        }
        config = config.policy(self.policy);
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
    /// What kept it from running to its end, in words; with [`NO_END`] first if it got no further.
    pub fn run(&self, scenario: &Scenario) -> Result<Outcome, String> {
        self.run_in(self.config(scenario), scenario)
    }

    /// Runs a scenario on devices that hold just so many blocks at a time.
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
                return Err(format!("{NOT_HERE}: what network {:?} withholds is known in one process", self.net));
            }
            Some(_) if self.apart && scenario.loads_and_stores() => {
                return Err(format!("{NOT_HERE}: hosts are not reached by loads and stores"));
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

/// How a job failed, in words; with [`NO_END`] first if it got no further.
fn in_words(error: LaunchError<CommError>) -> String {
    let (stuck, text) = (matches!(error, LaunchError::World(_)), error.to_string());
    // On threads a grid is ended by its limit, which its rank reports.
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
    // Safety: the tables are as the kernel wants them and live until it has ended; so do communicator and windows.
    unsafe { stream.launch(&kernel, shape, &[&comm.device()?, &Plain(script)])? };
    if let Some(act) = &scenario.during {
        act(&Control { rank: me, comm: &comm });
    }
    stream.synchronize()?;
    // Puts of others may still be on their way to this rank.
    rank.barrier()?;
    if let Some(fabric) = fabric {
        fabric.deliver();
    }

    let mut entries = vec![Entry::zeroed(); threads * stride];
    log.read(0, &mut entries)?;
    let logs = entries.chunks(stride).map(<[Entry]>::to_vec).collect();
    let mut bytes = Vec::new();
    for (window, spec) in windows.iter().zip(&scenario.windows) {
        let mut memory = vec![0u8; spec.bytes[me as usize] as usize];
        window.memory().read(0, &mut memory)?;
        bytes.push(memory);
    }
    // Whoever asks tells the others what its own kernel has reported, if its proxy has not done so yet.
    comm.fault();
    rank.barrier()?;
    let fault = comm.fault().map(|notice| (notice.rank, notice.fault));
    rank.barrier()?;
    comm.destroy()?;
    Ok((logs, bytes, fault))
}

/// Runs a case and says how to run it again if it fails.
///
/// # Errors
/// What it found, with the setup.
pub fn judge(case: &Case, setup: &Setup) -> Result<(), String> {
    (case.run)(setup).map_err(|error| {
        let repeat = setup.repeat.as_ref().map_or(String::new(), |command| format!("\n  again: {command}"));
        format!("{error}\n  on: {}{repeat}", setup.name())
    })
}
