// SPDX-License-Identifier: MIT OR Apache-2.0
//! Every kind of wait, of kernels and of hosts, for a rank that is stopped meanwhile, in two tables. Each remaining
//! rank is inside all waits of a table at once, reports that, and reports for each of them how it ended.

use crate::LOOK;
use crate::rank::{AFTER, JobOrder, beside, next, pair_site, say};
use crate::work::{LaunchEnd, Site};
use gin_abi::{Fault, FaultKind, WindowHandle};
use gin_boot::{Bootstrap, BootstrapError, Channel, LossCause};
use gin_conformance::host::SetupBackend;
use gin_conformance::op::{Code, Entry, Op};
use gin_conformance::scenario::{CoopKind, fault, show};
use gin_conformance::script::{ROUTE_NETWORK, STOP_AT_ERROR, Script};
use gin_gpu::{GpuError, LaunchConfig};
use gin_gpu::{Memory, MemoryKind, Plain, Stream};
use gin_host::comm::{CommError, Communicator};
use gin_host::comm::{Requirements, Window, WindowFlags};
use gin_host::world::{self, Rank, WorldConfig};
use gin_net::peer::PeerNetwork;
use gin_net::{Endpoint, Network};
use gin_testkit::SlowPeer;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

/// The task of [`kernels`].
pub const KERNELS: &str = "kernels";
/// The task of [`calls`].
pub const CALLS: &str = "calls";
/// The rank that the parent stops.
pub const STOPPED: u32 = 2;
/// Time limit for every expected event. It is shorter than the parent's limit, so that the parent learns which wait
/// does not end.
const HANGS: Duration = Duration::from_secs(60);
/// For events that never happen in a test.
const FOREVER: Duration = Duration::from_secs(3600);
/// Slots of a queue, and unfinished requests to a peer that a proxy keeps. Together they bound the posts that find
/// room.
const DEPTH: u32 = 4;
const OUTSTANDING: u32 = 1;

/// Returns a network on which requests to the stopped rank never arrive. Memory of a stopped process could be written
/// like any other.
fn slow(endpoint: &Endpoint) -> Box<dyn Network> {
    Box::new(SlowPeer::new(PeerNetwork::new(endpoint), STOPPED, FOREVER))
}

/// A wait of a kernel, and the operations that lead to it.
pub struct Wait {
    pub name: &'static str,
    before: Vec<Op>,
    op: Op,
}

/// A communicator, and a kernel that is inside all of these waits at once. Each wait has its own context and thread
/// group, so that the end of one does not end another.
struct Way {
    coop: CoopKind,
    threads: u32,
    flags: u32,
    lsa_size: Option<u32>,
    waits: Vec<Wait>,
}

/// Returns the waits of kernels: over the network, with each rank an LSA team, and by loads and stores.
fn ways() -> [Way; 2] {
    let wait = |name, before: &[Op], op| Wait { name, before: before.to_vec(), op };
    let (signal, address) = (Op::wait_signal(6, 1), Op::wait_signal(0, 1).at_address(2, 16));
    let (put, get) = (Op::put_value(STOPPED, 8, 1), Op::get(STOPPED, 8));
    let shadow = Op { signal: 7, value: 1, ..Op::new(Code::IncreaseShadow) };
    let meet = Op { signal: 7, ..Op::new(Code::MeetShadow) };
    let follow = Op { signal: 8, value: 1, ..Op::new(Code::FollowShadow) };
    let full = vec![put; (DEPTH + OUTSTANDING) as usize];
    let barrier = |team, number| Op { team, value: number, ..Op::barrier() };
    // Without a fence for puts the barrier consists of two barriers, one after the other.
    let combined = Op { value: 1, ..Op::new(Code::CombinedBarrier) };
    let network = vec![
        wait("signal", &[], signal),
        wait("signal, low 16 bits", &[], signal.bits(16)),
        wait("signal at an address", &[], address),
        wait("signal to meet its shadow", &[shadow], meet),
        wait("signal to pass its shadow", &[], follow),
        wait("counter of a put", &[put.counter(5)], Op::wait_counter(5, 1)),
        wait("counter of a get", &[get.counter(6)], Op::wait_counter(6, 1)),
        wait("flush of a put", &[put], Op::flush()),
        wait("flush of a get", &[get], Op::flush()),
        wait("token of a put", &[put, Op::flush_async(STOPPED)], Op::wait_token()),
        wait("token of a get", &[get, Op::flush_async(STOPPED)], Op::wait_token()),
        wait("room for a put", &full, Op::put(STOPPED, 8)),
        wait("room for a value", &full, put),
        wait("room for a get", &full, get),
        wait("room for a signal", &full, Op::raise(STOPPED, 0)),
        wait("room for a value to another rank", &full, Op::put_value(3, 8, 1)),
        wait("world barrier", &[], barrier(0, 0)),
        wait("rail barrier", &[], barrier(2, 0)),
        wait("combined barrier, the rail", &[], combined),
    ];
    let near = vec![
        wait("signal of an LSA peer", &[], signal),
        wait("signal of an LSA peer at an address", &[], address),
        wait("signal of an LSA peer to meet its shadow", &[shadow], meet),
        wait("signal of an LSA peer to pass its shadow", &[], follow),
        wait("LSA barrier", &[], barrier(1, 0)),
        wait("world barrier by loads and stores", &[], barrier(0, 0)),
        wait("world barrier of all contexts", &[], Op { fence: 3 | 4, ..barrier(0, 2) }),
        wait("combined barrier, the LSA team", &[], combined),
    ];
    let one = Some(1);
    [
        Way { coop: CoopKind::Thread, threads: 1, flags: ROUTE_NETWORK, lsa_size: one, waits: network },
        Way { coop: CoopKind::Block, threads: 8, flags: 0, lsa_size: None, waits: near },
    ]
}

/// A communicator whose kernel waits.
struct Waiting {
    comm: Arc<Communicator>,
    windows: Vec<WindowHandle>,
    _windows: (Vec<Window<u8>>, Window<u64>),
    way: Way,
}

/// A running kernel, and the memory that it reads and writes.
struct Running {
    stream: Arc<dyn Stream>,
    log: Arc<Memory>,
    stride: usize,
    _tables: [Arc<Memory>; 3],
}

impl Waiting {
    fn new(rank: &Rank, job: &Arc<dyn Bootstrap>, way: Way) -> Result<Self, CommError> {
        let config = rank.comm_config().clone().lsa_size(way.lsa_size).network(Arc::new(slow));
        let comm = Arc::new(Communicator::new(job.clone(), rank.device().clone(), config));
        comm.initialise(
            &Requirements::default()
                .contexts(way.waits.len() as u32)
                .queue_depth(DEPTH)
                .max_outstanding_per_peer(OUTSTANDING)
                .world_barriers(3)
                .rail_barriers(2)
                .lsa_barriers(2),
        )?;
        let plain = (0..2).map(|_| comm.alloc_window::<u8>(64, WindowFlags::NONE)).collect::<Result<Vec<_>, _>>()?;
        let signals = comm.alloc_window::<u64>(8, WindowFlags::SIGNALS)?;
        let windows = plain.iter().map(Window::handle).chain([signals.handle()]).collect();
        Ok(Self { comm, windows, _windows: (plain, signals), way })
    }

    /// Starts the kernel.
    fn start(&self, rank: &Rank) -> Result<Running, CommError> {
        let Way { coop, threads, flags, waits, .. } = &self.way;
        let (mut operations, mut programs, mut stride) = (Vec::new(), Vec::new(), 0);
        for (context, Wait { before, op, .. }) in (0..).zip(waits) {
            // The log entry of the `Nop` shows that every operation before the wait has completed.
            let program = before.iter().copied().chain([Op::nop(), *op]).map(|op| op.context(context));
            programs.extend([operations.len() as u64, before.len() as u64 + 2]);
            operations.extend(program);
            stride = stride.max(before.len() + 2);
        }
        let table = |bytes: &[u8]| -> Result<Arc<Memory>, CommError> {
            let memory = Memory::new(rank.device(), MemoryKind::Device, bytes.len() as u64)?;
            memory.write(0, bytes)?;
            Ok(memory)
        };
        let (windows, operations) =
            (table(bytemuck::cast_slice(&self.windows))?, table(bytemuck::cast_slice(&operations))?);
        let programs = table(bytemuck::cast_slice(&programs))?;
        let empty = vec![<Entry as bytemuck::Zeroable>::zeroed(); waits.len() * *threads as usize * stride];
        let log = Memory::new(rank.device(), MemoryKind::Pinned, size_of_val(&*empty) as u64)?;
        log.write(0, &empty)?;
        let script = Script {
            windows: windows.address(),
            operations: operations.address(),
            programs: programs.address(),
            log: log.address(),
            stride: stride as u64,
            window_count: self.windows.len() as u32,
            flags: STOP_AT_ERROR | flags,
        };
        let (kernel, stream) = (rank.kernel(coop.kernel(SetupBackend::Proxy))?, rank.stream()?);
        let shape = LaunchConfig::new(waits.len() as u32, *threads);
        // Safety: the tables are as the kernel expects. Tables, communicator and windows outlive the kernel, or the
        // process ends.
        unsafe { stream.launch(&kernel, shape, &[&self.comm.device()?, &Plain(script)])? };
        Ok(Running { stream, log, stride, _tables: [windows, operations, programs] })
    }

    /// Returns the position in the log of a thread's entry for the operation `before_end` places before the end of a
    /// wait's program.
    fn entry(&self, running: &Running, wait: usize, thread: u32, before_end: usize) -> usize {
        let row = wait * self.way.threads as usize + thread as usize;
        row * running.stride + self.way.waits[wait].before.len() + 1 - before_end
    }

    /// Returns the waits that some thread of the group has not reached, or has left already.
    fn not_inside(&self, running: &Running) -> Vec<&'static str> {
        let outcome = |entry: usize| {
            let address = running.log.address() as usize + entry * size_of::<Entry>();
            // Safety: the address is that of the first word of a log entry in pinned memory, which is still allocated.
            // A thread that writes it meanwhile writes the whole word at once.
            unsafe { (*(address as *const AtomicU64)).load(Ordering::Acquire) }
        };
        let is_inside = |wait: usize| {
            (0..self.way.threads).all(|thread| {
                outcome(self.entry(running, wait, thread, 1)) == 1 && outcome(self.entry(running, wait, thread, 0)) == 0
            })
        };
        let waits = self.way.waits.iter().enumerate();
        waits.filter(|(index, _)| !is_inside(*index)).map(|(_, wait)| wait.name).collect()
    }

    /// Returns the fault of each wait. All threads must have the same fault, which names the lost rank and the cause.
    fn ends(&self, running: &Running, silence: Duration) -> Result<Vec<Fault>, String> {
        let waits = &self.way.waits;
        let mut log =
            vec![<Entry as bytemuck::Zeroable>::zeroed(); waits.len() * self.way.threads as usize * running.stride];
        running.log.read(0, &mut log).map_err(|error| error.to_string())?;
        let ms = silence.as_millis() as u64;
        let end = |(index, wait): (usize, &Wait)| {
            let mut ended = None;
            for thread in 0..self.way.threads {
                let entry = &log[self.entry(running, index, thread, 0)];
                match fault(entry) {
                    Some(fault)
                        if (fault.kind(), fault.peer()) == (FaultKind::PeerLost, STOPPED)
                            && (fault.expected(), fault.seen()) == (ms, LossCause::Silent { ms }.code())
                            && ended.is_none_or(|before| before == fault) =>
                    {
                        ended = Some(fault);
                    }
                    _ => return Err(format!("{}, thread {thread}: {}", wait.name, show(entry))),
                }
            }
            ended.ok_or_else(|| format!("{}: no threads", wait.name))
        };
        waits.iter().enumerate().map(end).collect()
    }
}

/// Reports a hang and ends this process: it cannot wait for threads and kernels that hang.
fn hangs(text: &str) -> ! {
    say(&format!("failed {text}"));
    std::process::exit(1)
}

/// Waits until `missing` returns nothing.
fn until_none(what: &str, missing: impl Fn() -> Vec<&'static str>) {
    let mut looks = HANGS.as_millis();
    while !missing().is_empty() {
        // Time in which this process did not run does not count.
        looks -= 1;
        if looks == 0 {
            hangs(&format!("{what}: {}", missing().join(", ")));
        }
        thread::sleep(Duration::from_millis(1));
    }
}

/// Returns the results of all, in order of index; `name` names a missing one.
fn all_ends<T>(from: &Receiver<(usize, T)>, count: usize, name: impl Fn(usize) -> String) -> Vec<T> {
    let mut ends: Vec<Option<T>> = (0..count).map(|_| None).collect();
    let mut looks = HANGS.as_millis() / LOOK.as_millis();
    while ends.iter().any(Option::is_none) {
        match from.recv_timeout(LOOK) {
            Ok((index, end)) => ends[index] = Some(end),
            Err(RecvTimeoutError::Timeout) if looks > 0 => looks -= 1,
            Err(_) => {
                let left = ends.iter().enumerate().filter(|(_, end)| end.is_none());
                let left: Vec<String> = left.map(|(index, _)| name(index)).collect();
                hangs(&format!("does not end: {}", left.join("; ")));
            }
        }
    }
    ends.into_iter().flatten().collect()
}

/// Progress of the bystander, a communicator of only the first two ranks.
#[derive(Default)]
struct Bystander {
    launches: AtomicU64,
    /// Set when this rank's waits have ended.
    over: AtomicBool,
}

impl Bystander {
    /// Makes both ranks launch until the waits of both have ended, and some more times.
    fn go_on(&self, rank: &Rank, pair: &Arc<dyn Bootstrap>, site: &mut Site) -> Result<(), String> {
        let mut after = 0;
        while after < AFTER {
            if site.launch(rank)? == LaunchEnd::Fault {
                return Err(format!("the bystander's communicator has ended: {:?}", site.comm.fault_report()));
            }
            self.launches.fetch_add(1, Ordering::Relaxed);
            let votes = pair.all_gather(&[u8::from(self.over.load(Ordering::Acquire))]);
            let votes = votes.map_err(|error| format!("the bystander's all-gather failed: {error}"))?;
            // Both ranks see the same votes, so both stop at the same launch.
            after += u64::from(votes.iter().all(|vote| vote == &[1]));
        }
        site.comm.destroy().map_err(|error| format!("the bystander: {error}"))
    }
}

fn text(error: &dyn std::fmt::Display) -> String {
    error.to_string()
}

/// Runs the task in which kernels wait.
pub fn kernels(
    rank: &Rank,
    order: &JobOrder,
    job: &Arc<dyn Bootstrap>,
    lines: &Mutex<Receiver<String>>,
) -> Result<(), String> {
    let pair = beside(order, job, 2).map_err(|error| text(&error))?;
    // The bystander uses the device of the waits that end.
    let site = pair.as_ref().map(|pair| pair_site(rank, pair)).transpose().map_err(|error| text(&error))?;
    let waiting = ways().into_iter().map(|way| Waiting::new(rank, job, way)).collect::<Result<Vec<_>, _>>();
    let waiting = waiting.map_err(|error| text(&error))?;
    if rank.rank() == STOPPED {
        say("waiting");
        // The parent stops this process here, for good.
        next(lines);
        return Ok(());
    }
    let running = waiting.iter().map(|waiting| waiting.start(rank)).collect::<Result<Vec<_>, _>>();
    let running = running.map_err(|error| text(&error))?;
    let bystander = Bystander::default();
    let not_inside = |way: usize| waiting[way].not_inside(&running[way]);
    thread::scope(|scope| {
        let beside = pair.zip(site).map(|(pair, mut site)| {
            let bystander = &bystander;
            scope.spawn(move || bystander.go_on(rank, &pair, &mut site))
        });
        let (to, from) = mpsc::channel();
        for (index, running) in running.iter().enumerate() {
            let (stream, to) = (running.stream.clone(), to.clone());
            thread::spawn(move || to.send((index, stream.synchronize())));
        }
        until_none("does not begin", || [not_inside(0), not_inside(1)].concat());
        let begun = bystander.launches.load(Ordering::Relaxed);
        say("waiting");
        next(lines);
        let ends: Vec<Result<(), GpuError>> = all_ends(&from, running.len(), |way| {
            // Waits that have ended are no longer inside.
            let left = not_inside(way);
            let all = waiting[way].way.waits.iter().map(|wait| wait.name);
            let stay: Vec<_> = all.filter(|name| !left.contains(name)).collect();
            format!("a kernel's wait for: {}", stay.join(", "))
        });
        let launches = bystander.launches.load(Ordering::Relaxed) - begun;
        bystander.over.store(true, Ordering::Release);
        for ((waiting, running), end) in waiting.iter().zip(&running).zip(ends) {
            end.map_err(|error| text(&error))?;
            let faults = waiting.ends(running, order.silence)?;
            let Err(error) = waiting.comm.check("go on") else { return Err("the host knows of no fault".to_owned()) };
            for (wait, fault) in waiting.way.waits.iter().zip(faults) {
                say(&format!("ended {}: {fault}; the host: {error}", wait.name));
            }
        }
        if let Some(beside) = beside {
            beside.join().map_err(|_| "the bystander panicked")??;
            say(&format!("beside {launches}"));
        }
        Ok::<(), String>(())
    })?;
    waiting.iter().try_for_each(|waiting| waiting.comm.destroy()).map_err(|error| text(&error))
}

/// Counts of a job's collectives, and a collective after which its callers are held.
#[derive(Debug, Default)]
struct Collectives {
    begun: AtomicU64,
    ended: AtomicU64,
    /// Number of that collective, from 1; 0 for none.
    hold: Mutex<u64>,
    released: Condvar,
}

impl Collectives {
    fn count<T>(&self, collective: impl FnOnce() -> T) -> T {
        self.begun.fetch_add(1, Ordering::AcqRel);
        let outcome = collective();
        let number = 1 + self.ended.fetch_add(1, Ordering::AcqRel);
        let hold = self.hold.lock().unwrap_or_else(PoisonError::into_inner);
        drop(self.released.wait_while(hold, |hold| *hold == number));
        outcome
    }

    /// Holds callers after this collective; 0 releases them.
    fn hold(&self, number: u64) {
        *self.hold.lock().unwrap_or_else(PoisonError::into_inner) = number;
        self.released.notify_all();
    }
}

/// A job that records which collective a call is inside.
#[derive(Debug)]
struct Watched {
    job: Arc<dyn Bootstrap>,
    collectives: Arc<Collectives>,
}

impl Watched {
    fn new(job: &Arc<dyn Bootstrap>) -> Arc<Self> {
        Arc::new(Self { job: job.clone(), collectives: Arc::default() })
    }
}

impl Bootstrap for Watched {
    fn rank(&self) -> u32 {
        self.job.rank()
    }

    fn ranks(&self) -> u32 {
        self.job.ranks()
    }

    fn is_across_processes(&self) -> bool {
        self.job.is_across_processes()
    }

    fn host(&self, rank: u32) -> String {
        self.job.host(rank)
    }

    fn all_gather(&self, bytes: &[u8]) -> Result<Vec<Vec<u8>>, BootstrapError> {
        self.collectives.count(|| self.job.all_gather(bytes))
    }

    fn channel(&self, communicator: u64) -> Arc<dyn Channel> {
        Arc::new(WatchedChannel { channel: self.job.channel(communicator), collectives: self.collectives.clone() })
    }

    fn abort(&self) {
        self.job.abort();
    }

    fn lost(&self) -> Vec<u32> {
        self.job.lost()
    }
}

/// A channel of a watched job.
#[derive(Debug)]
struct WatchedChannel {
    channel: Arc<dyn Channel>,
    collectives: Arc<Collectives>,
}

impl Channel for WatchedChannel {
    fn board(&self) -> &Arc<gin_boot::board::Board> {
        self.channel.board()
    }

    fn all_gather(&self, bytes: &[u8]) -> Result<Vec<Vec<u8>>, BootstrapError> {
        self.collectives.count(|| self.channel.all_gather(bytes))
    }
}

/// The place in which a call waits.
#[derive(Clone, Copy, PartialEq, Eq)]
enum CallWait {
    /// A collective at which the stopped rank does not arrive.
    Collective,
    /// The drain of requests to the stopped rank, which is itself in the next collective.
    Drain,
    /// The request to the stopped rank's process for its memory, which it announced in the previous collective.
    MemoryRequest,
}

/// A call of the host that waits.
struct Call {
    name: &'static str,
    wait: CallWait,
    /// Collectives of the call before it waits.
    past: u64,
    /// Collectives before the call.
    before: u64,
    collectives: Arc<Collectives>,
    comm: Option<Arc<Communicator>>,
    run: Box<dyn FnOnce() -> Result<(), CommError> + Send>,
}

impl Call {
    fn is_inside(&self, stopped: bool) -> bool {
        let (ended, begun) =
            (self.collectives.ended.load(Ordering::Acquire), self.collectives.begun.load(Ordering::Acquire));
        let past = self.before + self.past;
        (ended, begun) == (past, past + u64::from(stopped || self.wait == CallWait::Collective))
    }
}

/// Names of the hosts' waits. The flag is set if a communicator, with a back end, ends as well.
pub const HOST_WAITS: [(&str, bool); 11] = [
    ("initialise", false),
    ("initialise; requesting memory", false),
    ("barrier of the job", false),
    ("all-gather of the job", false),
    ("register", true),
    ("allocate a window", true),
    ("deregister", true),
    ("destroy", true),
    ("deregister; draining", true),
    ("destroy; draining", true),
    ("register; requesting memory", true),
];

/// Returns all of these calls, ready to run. `jobs` has one job for each call that uses a job directly, and one for the
/// rest.
fn host_waits(rank: &Rank, jobs: [&Arc<dyn Bootstrap>; 4]) -> Result<Vec<Call>, CommError> {
    let config = rank.comm_config().clone().network(Arc::new(slow)).drain(FOREVER);
    let new =
        |watched: &Arc<Watched>| Arc::new(Communicator::new(watched.clone(), rank.device().clone(), config.clone()));
    let site = |watched: &Arc<Watched>| Site::new(new(watched), 9, true);
    let mut calls = Vec::new();
    for (name, _) in HOST_WAITS {
        let watched = Watched::new(match name {
            "barrier of the job" => jobs[1],
            "all-gather of the job" => jobs[2],
            "initialise; requesting memory" => jobs[3],
            _ => jobs[0],
        });
        let draining = name.ends_with("draining");
        let mut comm = None;
        let run: Box<dyn FnOnce() -> Result<(), CommError> + Send> = match name {
            "initialise" | "initialise; requesting memory" => {
                let comm = new(&watched);
                Box::new(move || comm.initialise(&Requirements::default()))
            }
            "barrier of the job" => {
                let job = watched.clone();
                Box::new(move || Ok(job.barrier()?))
            }
            "all-gather of the job" => {
                let job = watched.clone();
                Box::new(move || Ok(job.all_gather(&[1]).map(drop)?))
            }
            _ => {
                let site = site(&watched)?;
                if draining && rank.rank() != STOPPED {
                    site.run(rank, &[Op::put_value(STOPPED, 8, 1)])?;
                }
                comm = Some(site.comm.clone());
                let memory = Memory::shared(rank.device(), MemoryKind::Device, 4096)?;
                Box::new(move || match name {
                    "register" | "register; requesting memory" => {
                        site.comm.register::<u8>(&memory.whole(), WindowFlags::NONE).map(drop)
                    }
                    "allocate a window" => site.comm.alloc_window::<u8>(64, WindowFlags::NONE).map(drop),
                    "destroy" | "destroy; draining" => site.comm.destroy(),
                    _ => site.comm.deregister(&site.windows[0]),
                })
            }
        };
        let (wait, past) = match name {
            "deregister; draining" => (CallWait::Drain, 2),
            "destroy; draining" => (CallWait::Drain, 1),
            // Capabilities are gathered first, then memory.
            "initialise; requesting memory" => (CallWait::MemoryRequest, 2),
            "register; requesting memory" => (CallWait::MemoryRequest, 1),
            _ => (CallWait::Collective, 0),
        };
        let (before, collectives) = (watched.collectives.ended.load(Ordering::Acquire), watched.collectives.clone());
        if wait == CallWait::MemoryRequest && rank.rank() != STOPPED {
            collectives.hold(before + past);
        }
        calls.push(Call { name, wait, past, before, collectives, comm, run });
    }
    Ok(calls)
}

/// Runs the task in which hosts wait.
pub fn calls(
    rank: &Rank,
    order: &JobOrder,
    job: &Arc<dyn Bootstrap>,
    lines: &Mutex<Receiver<String>>,
) -> Result<(), String> {
    let beside = |ranks| beside(order, job, ranks).map_err(|error| text(&error));
    let pair = beside(2)?;
    let of_all = || beside(rank.ranks())?.ok_or_else(|| "all ranks are in these jobs".to_owned());
    let (second, third, fourth) = (of_all()?, of_all()?, of_all()?);
    let calls = host_waits(rank, [job, &second, &third, &fourth]).map_err(|error| text(&error))?;
    let stopped = rank.rank() == STOPPED;
    // Calls that do not run are kept, because a communicator that is dropped ends.
    let (calls, _kept): (Vec<_>, Vec<_>) =
        calls.into_iter().partition(|call| !stopped || call.wait != CallWait::Collective);
    let bystander = Bystander::default();
    let (to, from) = mpsc::channel();
    let mut waits = Vec::new();
    for (index, call) in calls.into_iter().enumerate() {
        let Call { name, wait, past, before, collectives, comm, run } = call;
        let (to, of) = (to.clone(), comm.clone());
        thread::spawn(move || {
            let end = match (run(), of.as_ref().and_then(|comm| comm.fault_report())) {
                (Err(error), _) => Ok(error.to_string()),
                // A communicator that has ended can be destroyed without the other ranks.
                (Ok(()), Some(report)) if name.starts_with("destroy") => Ok(report.to_string()),
                (Ok(()), _) => Err(format!("{name}: succeeded without rank {STOPPED}")),
            };
            to.send((index, end))
        });
        waits.push(Call { name, wait, past, before, collectives, comm, run: Box::new(|| Ok(())) });
    }
    let missing = || waits.iter().filter(|call| !call.is_inside(stopped)).map(|call| call.name).collect();
    thread::scope(|scope| {
        let beside = pair.map(|pair| {
            let bystander = &bystander;
            // The bystander has its own device, as windows are not deregistered while kernels run on their device.
            scope.spawn(move || {
                let config = WorldConfig::threads(2);
                let body = |rank: Rank| {
                    let mut site = pair_site(&rank, &pair).map_err(|error| text(&error))?;
                    bystander.go_on(&rank, &pair, &mut site)
                };
                world::join(config, pair.clone(), body).map_err(|error| text(&error))
            })
        });
        until_none("does not begin", missing);
        let begun = bystander.launches.load(Ordering::Relaxed);
        say("waiting");
        // The parent reports that the rank is stopped; the stopped rank itself never reads that.
        next(lines);
        waits.iter().for_each(|call| call.collectives.hold(0));
        let ends = all_ends(&from, waits.len(), |index| waits[index].name.to_owned());
        let launches = bystander.launches.load(Ordering::Relaxed) - begun;
        bystander.over.store(true, Ordering::Release);
        for (call, end) in waits.iter().zip(ends) {
            say(&format!("ended {}: {}", call.name, end?));
        }
        if let Some(beside) = beside {
            beside.join().map_err(|_| "the bystander panicked")??;
            say(&format!("beside {launches}"));
        }
        Ok::<(), String>(())
    })?;
    for comm in waits.iter().filter_map(|call| call.comm.as_ref()) {
        match comm.destroy() {
            Ok(()) | Err(CommError::State { .. }) => {}
            Err(error) => return Err(text(&error)),
        }
    }
    Ok(())
}

/// Returns the names of a task's waits, in the order in which ranks report them. The flag is set if a communicator ends
/// as well.
pub fn names(task: &str) -> Vec<(&'static str, bool)> {
    if task == CALLS {
        return HOST_WAITS.to_vec();
    }
    ways().iter().flat_map(|way| &way.waits).map(|wait| (wait.name, true)).collect()
}
