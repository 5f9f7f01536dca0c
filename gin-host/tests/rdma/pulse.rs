// SPDX-License-Identifier: MIT OR Apache-2.0
//! A complete rank: a kernel that sends pulses around a ring and waits for them, its proxy, the network `verbs`, and,
//! on request, an independent communicator that must continue whatever happens to the first.
//!
//! The rank is a process, which environment variables describe ([`Plan`]). It reports events in lines that begin with
//! [`MARK`] and the rank. One file makes it stop, and another makes it break a part of its own network.

use super::machines::MARK;
use gin_abi::{Deadline, Fault, FaultKind};
use gin_boot::Bootstrap;
use gin_boot::{Rendezvous, TcpBootstrap, TcpConfig};
use gin_device::prelude::*;
use gin_device::sys::{GlobalWord, Word};
use gin_gpu::LaunchConfig;
use gin_gpu::{Memory, MemoryKind};
use gin_host::comm::Window as HostWindow;
use gin_host::comm::{CommError, Communicator, Requirements, Routes, WindowFlags};
use gin_host::world::{Rank, WorldConfig, join, launch};
use gin_net::verbs::{RdmaDevice, VerbsConfig, VerbsNetwork};
use gin_net::{Capabilities, Event, Key, LocalSignals, LocalWindow, NetError, Network, Request};
use std::env;
use std::error::Error;
use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Elements of a pulse. The first is the number of the last round, or 0 while no rank knows it.
const ELEMENTS: usize = 4096;

/// Words that the kernel and the host share.
const STOP: usize = 0;
const ROUNDS: usize = 1;
const WRONG: usize = 2;
const FAULT: usize = 3;
const WORDS: usize = FAULT + gin_abi::fault::WORDS;

/// Deadline of a wait: a wait that reaches it has missed the fault that should have ended it.
const DEADLINE: Duration = Duration::from_secs(120);

/// Time limit for the independent communicator's next rounds.
const PATIENCE: Duration = Duration::from_secs(60);

/// Passes pulses to the right neighbour and checks the pulses of the left one, until rank 0 stops or an operation
/// fails. With `one_way`, rank 0 sends them to rank 1, which only waits.
///
/// # Safety
/// - One thread. `words` is [`WORDS`] words of pinned memory, 0 at first.
#[kernel]
pub unsafe fn rdma_test_pulse(
    comm: Comm,
    to: gin_device::Window<u64>,
    from: gin_device::Window<u64>,
    words: *mut u64,
    one_way: u64,
    deadline: Deadline,
) {
    // Safety: the caller keeps the kernel's conditions.
    let word = |index: usize| unsafe { GlobalWord::new(words.add(index) as u64) };
    let gin = Gin::new(&comm, ContextId::new(0)).route(Route::Network);
    let world = comm.world();
    let (rank, ranks) = (world.rank(), u64::from(world.size()));
    let (sends, waits) = (one_way == 0 || rank == 0, one_way == 0 || rank == 1);
    let (came, taken, left) = (SignalId::new(0), SignalId::new(1), CounterId::new(0));
    let element = |rank: u32, round: u64, i: usize| round << 32 | u64::from(rank) << 16 | i as u64;
    let mut wrong = 0;
    let mut exchange = || -> Result<(), Fault> {
        let (mut round, mut last) = (0, 0);
        while last == 0 || round < last {
            round += 1;
            if rank == 0 && last == 0 && word(STOP).load_relaxed_sys() != 0 {
                // By this round all ranks know that it is the last.
                last = round + ranks;
            }
            if sends {
                from.write(0, last);
                for i in 1..ELEMENTS {
                    from.write(i, element(rank, round, i));
                }
                if one_way == 0 {
                    gin.wait_signal(&Block, taken, round - 1, deadline)?;
                }
                gin.put(world.right(), to.range(0, ELEMENTS), from.range(0, ELEMENTS))
                    .signal(came.inc())
                    .counter(left)
                    .issue(&Block)?;
                gin.wait_counter(&Block, left, round, deadline)?;
            }
            if waits {
                gin.wait_signal(&Block, came, round, deadline)?;
            }
            if one_way == 0 {
                for i in 1..ELEMENTS {
                    wrong += u64::from(to.read(i) != element(world.left().world(), round, i));
                }
                let heard = to.read(0);
                if heard != 0 {
                    last = heard;
                }
                gin.signal(world.left(), taken.inc()).issue(&Block)?;
            }
            word(WRONG).store_relaxed_sys(wrong);
            word(ROUNDS).store_relaxed_sys(round);
        }
        Ok(())
    };
    if let Err(fault) = exchange() {
        for (index, value) in fault.to_words().into_iter().enumerate() {
            word(FAULT + index).store_relaxed_sys(value);
        }
        comm.report(fault);
    }
}

/// The defect of a rank's network.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Wrong {
    /// No defect.
    Nothing,
    /// It has a wrong remote key of the right neighbour's window.
    Key,
    /// On command, its connection with this rank fails.
    Queue(u32),
    /// On command, it deregisters the window that others put to.
    Early,
}

/// The role of a process.
#[derive(Clone, Debug)]
pub struct Plan {
    pub rank: u32,
    pub ranks: u32,
    pub device: String,
    /// Address on which the process listens.
    pub address: String,
    /// The first rank's id, for the others.
    pub id: String,
    /// Silence after which a rank counts as lost.
    pub silence: Duration,
    /// As [`VerbsConfig::timeout`].
    pub timeout: u8,
    pub wrong: Wrong,
    pub one_way: bool,
    /// Set to run an independent communicator in the same process, on the same device.
    pub bystander: bool,
    /// File whose presence stops rank 0.
    pub stop: PathBuf,
    /// File whose presence triggers the defect.
    pub trigger: PathBuf,
}

impl Plan {
    /// Returns the plan of one of two ranks of this machine, without a defect.
    pub fn new() -> Self {
        Self {
            rank: 0,
            ranks: 2,
            device: String::new(),
            address: "127.0.0.1".to_owned(),
            id: String::new(),
            silence: Duration::from_secs(10),
            timeout: VerbsConfig::default().timeout,
            wrong: Wrong::Nothing,
            one_way: false,
            bystander: false,
            stop: PathBuf::new(),
            trigger: PathBuf::new(),
        }
    }

    /// Returns the plan as environment variables.
    pub fn variables(&self) -> Vec<(&'static str, String)> {
        let wrong = match self.wrong {
            Wrong::Nothing => "nothing".to_owned(),
            Wrong::Key => "key".to_owned(),
            Wrong::Queue(peer) => peer.to_string(),
            Wrong::Early => "early".to_owned(),
        };
        vec![
            ("GIN_PULSE_RANK", self.rank.to_string()),
            ("GIN_PULSE_RANKS", self.ranks.to_string()),
            ("GIN_PULSE_DEVICE", self.device.clone()),
            ("GIN_PULSE_ADDRESS", self.address.clone()),
            ("GIN_PULSE_ID", self.id.clone()),
            ("GIN_PULSE_SILENCE_MS", self.silence.as_millis().to_string()),
            ("GIN_PULSE_TIMEOUT", self.timeout.to_string()),
            ("GIN_PULSE_WRONG", wrong),
            ("GIN_PULSE_ONE_WAY", u8::from(self.one_way).to_string()),
            ("GIN_PULSE_BYSTANDER", u8::from(self.bystander).to_string()),
            ("GIN_PULSE_STOP", self.stop.to_string_lossy().into_owned()),
            ("GIN_PULSE_TRIGGER", self.trigger.to_string_lossy().into_owned()),
        ]
    }

    /// Returns the plan of this process, or `None` if the variables are not set.
    fn of_this_process() -> Result<Option<Self>, Box<dyn Error>> {
        if env::var_os("GIN_PULSE_RANK").is_none() {
            return Ok(None);
        }
        Ok(Some(Self {
            rank: env::var("GIN_PULSE_RANK")?.parse()?,
            ranks: env::var("GIN_PULSE_RANKS")?.parse()?,
            device: env::var("GIN_PULSE_DEVICE")?,
            address: env::var("GIN_PULSE_ADDRESS")?,
            id: env::var("GIN_PULSE_ID")?,
            silence: Duration::from_millis(env::var("GIN_PULSE_SILENCE_MS")?.parse()?),
            timeout: env::var("GIN_PULSE_TIMEOUT")?.parse()?,
            wrong: match env::var("GIN_PULSE_WRONG")?.as_str() {
                "nothing" => Wrong::Nothing,
                "key" => Wrong::Key,
                "early" => Wrong::Early,
                peer => Wrong::Queue(peer.parse()?),
            },
            one_way: env::var("GIN_PULSE_ONE_WAY")? == "1",
            bystander: env::var("GIN_PULSE_BYSTANDER")? == "1",
            stop: env::var("GIN_PULSE_STOP")?.into(),
            trigger: env::var("GIN_PULSE_TRIGGER")?.into(),
        }))
    }
}

/// A network with a defect.
#[derive(Debug)]
struct Breaking {
    inner: VerbsNetwork,
    wrong: Wrong,
    rank: u32,
    right: u32,
    now: Arc<AtomicBool>,
    /// Set once a request has failed.
    failed: bool,
}

impl Network for Breaking {
    fn capabilities(&self) -> Capabilities {
        self.inner.capabilities()
    }

    fn register_signals(&mut self, signals: &LocalSignals) -> Result<Key, NetError> {
        self.inner.register_signals(signals)
    }

    fn connect_signals(&mut self, keys: &[Key]) -> Result<(), NetError> {
        self.inner.connect_signals(keys)
    }

    fn register(&mut self, window: &LocalWindow) -> Result<Key, NetError> {
        self.inner.register(window)
    }

    fn connect(&mut self, window: u32, keys: &[Key]) -> Result<(), NetError> {
        let mut keys = keys.to_vec();
        if self.wrong == Wrong::Key {
            super::pair::spoil(&mut keys[self.right as usize].0);
        }
        self.inner.connect(window, &keys)
    }

    fn deregister(&mut self, window: u32) -> bool {
        self.inner.deregister(window)
    }

    fn post(&mut self, requests: &[Request]) -> usize {
        self.inner.post(requests)
    }

    fn poll(&mut self, events: &mut Vec<Event>) {
        if self.now.load(Ordering::Relaxed) {
            match std::mem::replace(&mut self.wrong, Wrong::Nothing) {
                Wrong::Queue(peer) => self.inner.force_error(0, peer),
                // All ranks register the windows in this order. A window that is in use is released later.
                Wrong::Early => drop(self.inner.deregister(0)),
                Wrong::Nothing | Wrong::Key => {}
            }
        }
        let before = events.len();
        self.inner.poll(events);
        for event in &events[before..] {
            if let Event::Completion { outcome: Err(error), .. } = event
                && !std::mem::replace(&mut self.failed, true)
            {
                say(self.rank, &format!("request failed: {error}"));
            }
        }
    }

    fn make_visible(&mut self) -> Result<(), NetError> {
        self.inner.make_visible()
    }

    fn is_quiet(&self) -> bool {
        self.inner.is_quiet()
    }
}

fn say(rank: u32, text: &str) {
    let mut output = std::io::stdout().lock();
    // Writes the line in one call, as other processes may write to the same output. If it cannot be written, no reader
    // is left.
    let _ = output.write_all(format!("{MARK}{rank} {text}\n").as_bytes());
    let _ = output.flush();
}

/// Words that a kernel and the host share.
struct Words(Arc<Memory>);

impl Words {
    fn new(rank: &Rank) -> Result<Self, CommError> {
        let memory = Memory::new(rank.device(), MemoryKind::Pinned, 8 * WORDS as u64)?;
        memory.write(0, &[0u64; WORDS])?;
        Ok(Self(memory))
    }

    fn word(&self, index: usize) -> GlobalWord {
        // Safety: the index is in range. On a virtual GPU addresses are this process's, and both sides use the word as
        // such.
        unsafe { GlobalWord::new(self.0.address() + 8 * index as u64) }
    }

    fn get(&self, index: usize) -> u64 {
        self.word(index).load_relaxed_sys()
    }

    fn fault(&self) -> Option<Fault> {
        let words = std::array::from_fn(|index| self.get(FAULT + index));
        (words[0] != 0).then(|| Fault::read(words))
    }
}

/// Runs the kernel of one rank. Calls `beside` every few milliseconds meanwhile.
fn pulse(rank: &Rank, comm: &Communicator, one_way: bool, mut beside: impl FnMut(&Words)) -> Result<Words, CommError> {
    let (to, from): (HostWindow<u64>, HostWindow<u64>) =
        (comm.alloc_window(ELEMENTS, WindowFlags::NONE)?, comm.alloc_window(ELEMENTS, WindowFlags::NONE)?);
    let words = Words::new(rank)?;
    let stream = rank.stream()?;
    let (kernel, handle) = (rank.kernel("rdma_test_pulse")?, comm.device()?);
    let (place, deadline) = (words.0.address() as usize as *mut u64, Deadline::after_ms(DEADLINE.as_millis() as u64));
    // Safety: one thread. Communicator, windows and words live until the kernel has ended.
    unsafe {
        stream.launch(
            &kernel,
            LaunchConfig::new(1, 1),
            &[&handle, &to, &from, &place, &u64::from(one_way), &deadline],
        )?;
    }
    while rank.device().running() > 0 {
        beside(&words);
        std::thread::sleep(Duration::from_millis(5));
    }
    stream.synchronize()?;
    Ok(words)
}

fn requirements() -> Requirements {
    Requirements::default().signals(2).counters(1)
}

/// The communicator that must continue: two ranks of this process.
#[derive(Default)]
struct Bystander {
    stop: AtomicBool,
    rounds: std::sync::atomic::AtomicU64,
}

impl Bystander {
    fn run(&self, device: &Arc<RdmaDevice>) -> Result<(), String> {
        let factory = VerbsNetwork::factory(std::slice::from_ref(device));
        let config = WorldConfig::threads(2).routes(Routes::Network).with_comm(|comm| comm.network(factory));
        let wrong = launch(config, |rank| -> Result<u64, CommError> {
            let comm = rank.communicator(&requirements())?;
            let words = pulse(&rank, &comm, false, |words| {
                self.rounds.store(words.get(ROUNDS), Ordering::Relaxed);
                words.word(STOP).store_relaxed_sys(u64::from(self.stop.load(Ordering::Relaxed)));
            })?;
            comm.check("go on")?;
            comm.destroy()?;
            Ok(words.get(WRONG))
        });
        match wrong.map_err(|error| error.to_string())?.iter().sum() {
            0 => Ok(()),
            wrong => Err(format!("{wrong} wrong elements")),
        }
    }

    /// Waits until the communicator has made some more rounds.
    fn continues(&self) -> Result<(), String> {
        let (begin, before) = (Instant::now(), self.rounds.load(Ordering::Relaxed));
        while self.rounds.load(Ordering::Relaxed) < before + 3 {
            if begin.elapsed() > PATIENCE {
                return Err(format!("no round after {before} rounds"));
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(())
    }
}

fn kind(kind: FaultKind) -> u32 {
    kind.code()
}

/// Returns the outcome as `rounds wrong device host`. `device` is the fault that ended the kernel's wait: its kind, its
/// peer, and the kind that was found if another rank found it. `host` is the fault that the host knows: its kind, its
/// peer, and the rank that found it. Each is `-` if there is none.
fn outcome(words: &Words, comm: &Communicator) -> String {
    let device = words.fault();
    let begin = Instant::now();
    // The host learns of a fault no later than kernels do, except for its own kernel's report of a moment ago.
    while device.is_some() && comm.fault().is_none() && begin.elapsed() < Duration::from_secs(5) {
        std::thread::sleep(Duration::from_millis(1));
    }
    let text =
        device.map_or("-".to_owned(), |fault| format!("{}/{}/{}", kind(fault.kind()), fault.peer(), fault.expected()));
    let host = comm.fault().map_or("-".to_owned(), |notice| {
        format!("{}/{}/{}", kind(notice.fault.kind()), notice.fault.peer(), notice.rank)
    });
    format!("{} {} {text} {host}", words.get(ROUNDS), words.get(WRONG))
}

fn rank(plan: &Plan) -> Result<(), Box<dyn Error>> {
    let config = TcpConfig::default()
        .address(Some(plan.address.parse()?))
        .joining(Duration::from_secs(120))
        .collective_timeout(Some(Duration::from_secs(60)))
        .silence(plan.silence);
    let bootstrap = if plan.rank == 0 {
        let first = Rendezvous::new(config)?;
        say(0, &format!("id {}", first.id()));
        first.join(plan.ranks)?
    } else {
        TcpBootstrap::join(&plan.id.parse()?, plan.rank, plan.ranks, config)?
    };
    let bootstrap: Arc<dyn Bootstrap> = Arc::new(bootstrap);
    let verbs = VerbsConfig::default().device(Some(plan.device.clone())).timeout(plan.timeout);
    let device = RdmaDevice::open(&verbs)?;
    let (bystander, now) = (Bystander::default(), Arc::new(AtomicBool::new(false)));
    let network = {
        let (device, wrong, now) = (device.clone(), plan.wrong, now.clone());
        let (rank, right) = (plan.rank, (plan.rank + 1) % plan.ranks);
        move |endpoint: &_| -> Box<dyn Network> {
            let inner = VerbsNetwork::new(std::slice::from_ref(&device), endpoint);
            Box::new(Breaking { inner, wrong, rank, right, now: now.clone(), failed: false })
        }
    };
    let config = WorldConfig::threads(plan.ranks).routes(Routes::Network).network(network);
    let body = |rank: Rank| -> Result<(), CommError> {
        let comm = rank.communicator(&requirements())?;
        let (mut said, mut beside) = (0, 0);
        let words = pulse(&rank, &comm, plan.one_way, |words| {
            let rounds = words.get(ROUNDS);
            if rounds >= 3 && rounds != said {
                say(plan.rank, &if said == 0 { "going".to_owned() } else { format!("round {rounds}") });
                said = rounds;
            }
            let others = bystander.rounds.load(Ordering::Relaxed);
            if others != beside {
                say(plan.rank, &format!("beside {others}"));
                beside = others;
            }
            now.store(plan.trigger.exists(), Ordering::Relaxed);
            words.word(STOP).store_relaxed_sys(u64::from(plan.stop.exists()));
        })?;
        say(plan.rank, &format!("ended {}", outcome(&words, &comm)));
        if plan.bystander {
            match bystander.continues() {
                Ok(()) => say(plan.rank, "others go on"),
                Err(error) => say(plan.rank, &format!("others: {error}")),
            }
        }
        comm.destroy()?;
        say(plan.rank, "destroyed");
        Ok(())
    };
    std::thread::scope(|scope| -> Result<(), Box<dyn Error>> {
        let others = plan.bystander.then(|| scope.spawn(|| bystander.run(&device)));
        let outcome = join(config, bootstrap, body).map_err(|error| error.to_string());
        bystander.stop.store(true, Ordering::Relaxed);
        if let Some(others) = others {
            match others
                .join()
                .map_err(|_| "the independent communicator panicked".to_owned())
                .and_then(|outcome| outcome)
            {
                Ok(()) => say(plan.rank, "others ended well"),
                Err(error) => say(plan.rank, &format!("others: {error}")),
            }
        }
        Ok(outcome?)
    })
}

/// Takes part, if this process was started as a rank.
pub fn serve() -> Option<ExitCode> {
    let outcome = match Plan::of_this_process() {
        Ok(None) => return None,
        // The rank's threads poll, and the process that observes it needs time too.
        Ok(Some(plan)) => rustix::process::nice(10)
            .map_err(Into::into)
            .and_then(|_| rank(&plan))
            .inspect_err(|error| say(plan.rank, &format!("failed {error}"))),
        Err(error) => Err(error),
    };
    Some(match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    })
}
