// SPDX-License-Identifier: MIT OR Apache-2.0
//! A rank that does not call, a process that is stopped or killed, in each phase of a pair: the others return in time,
//! go on without it, and let it take part again.

#[expect(dead_code, reason = "other tests use the rest")]
mod support;

use gin_abi::Deadline;
use gin_boot::rt::clock_ns;
use gin_boot::{Bootstrap, Rendezvous, TcpBootstrap, TcpConfig};
use gin_ep::{Code, Combine, EpError, Group, GroupConfig, Rows};
use gin_ep_oracle::{Batch, Experts, Routing, Shape, batch, per_rank};
use gin_gpu::{Memory, MemoryKind, MemorySlice, Stream};
use gin_host::comm::{CommError, Communicator, Requirements, WindowFlags};
use gin_host::world::{self, Rank, SoftNics, WorldConfig, launch};
use gin_net::peer::PeerNetwork;
use gin_soft_nic::Options;
use gin_testkit::{Reorder, Withhold, rotation};
use rustix::process::{Pid, Signal, WaitOptions, kill_process, waitpid};
use std::io::{BufRead, BufReader, Write};
use std::net::Ipv4Addr;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};
use support::{Input, copied, experts};

const SHAPE: Shape = Shape { ranks: 3, experts: 6, topk: 2, hidden: 8 };
const TOKENS: usize = 8;
/// The deadline of a wait, by the world's clock.
const LIMIT_NS: u64 = 20_000_000;
/// The deadline of a wait for another process, by the clock of the machine. On a busy one a process may not run for
/// two seconds.
const PROCESS_DEADLINE: Deadline = Deadline::after_ms(5000);
/// The rank that is silent.
const SILENT: usize = 2;

/// The first step of a pair that the silent rank does not take.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Debug)]
enum Phase {
    Dispatch,
    Receive,
    Combine,
}

const PHASES: [Phase; 3] = [Phase::Dispatch, Phase::Receive, Phase::Combine];

/// Returns the configuration of a group whose ranks wait this long.
fn waiting(limit: Deadline) -> GroupConfig {
    let config = GroupConfig::new(SHAPE.experts as u32, SHAPE.hidden as u32, SHAPE.topk as u32);
    config.tokens(TOKENS as u32).sms(2).threads(32).deadline(limit)
}

/// A rank with its group and its tokens.
struct Bed<'a> {
    rank: &'a Rank,
    group: Group,
    input: Input,
    stream: Arc<dyn Stream>,
    mine: Batch,
    /// Rows are returned from memory of their own.
    is_stored: bool,
    /// The nanoseconds for which the ranks wait at most for a silent one.
    patience: Option<u64>,
}

impl<'a> Bed<'a> {
    fn new(rank: &'a Rank, comm: &Communicator, config: &GroupConfig, is_stored: bool) -> Result<Self, EpError> {
        let (group, input) = (Group::new(comm, config)?, Input::new(rank, &SHAPE, TOKENS)?);
        let mine = batch(&SHAPE, Routing::Uniform, 9, rank.rank() as usize, TOKENS);
        input.write(&mine, false)?;
        Ok(Self { rank, group, input, stream: rank.stream()?, mine, is_stored, patience: None })
    }

    /// Runs a pair, and waits before this step until `step` returns.
    fn pair(&self, before: Phase, mut step: impl FnMut() -> Result<(), EpError>) -> Result<(), EpError> {
        let mut at = |phase: Phase| if phase == before { step() } else { Ok(()) };
        let mut slot = self.group.slot(0)?;
        at(Phase::Dispatch)?;
        let sent = slot.dispatch(&self.stream, &self.input.tokens(TOKENS, false))?;
        if before > Phase::Dispatch {
            self.stream.synchronize()?;
        }
        at(Phase::Receive)?;
        let received = sent.receive(&self.stream)?;
        experts(self.rank, &self.stream, &SHAPE, &received)?;
        if before > Phase::Receive {
            self.stream.synchronize()?;
        }
        at(Phase::Combine)?;
        let rows: Option<MemorySlice> =
            if self.is_stored { Some(copied(self.rank, &self.stream, &received, &SHAPE, TOKENS)?) } else { None };
        let sums = Combine::reduced().into(&self.input.output);
        received.combine(&self.stream, rows.as_ref().map_or(Rows::InPlace, Rows::At), &sums)?;
        Ok(self.stream.synchronize()?)
    }

    /// Compares the output with the sums without these ranks, and the report and the masked ranks with them.
    fn check(&self, silent: &[usize], is_reported: bool) -> Result<(), EpError> {
        let expected = per_rank(&SHAPE, &self.mine, silent, Experts);
        self.input.compare(&expected, format_args!("without {silent:?}"))?;
        self.input.output.write(0, &vec![0x7fffu16; expected.len()])?;
        let report = self.group.status()?.map(|report| (report.code, silent.contains(&(report.rank as usize))));
        assert_eq!(report, is_reported.then_some((Code::Silent, true)));
        let masked = silent.iter().fold(0, |masked, rank| masked | 1 << rank);
        assert_eq!(self.group.masked(0)?, masked);
        Ok(())
    }

    /// Runs pairs in which all take part.
    fn whole(&self, pairs: usize) -> Result<(), EpError> {
        (0..pairs).try_for_each(|_| {
            self.pair(Phase::Dispatch, || Ok(()))?;
            self.check(&[], false)
        })
    }

    /// Runs what the others do while one is silent: a pair that reports it, and pairs without it.
    fn without(&self) -> Result<(), EpError> {
        let start = clock_ns();
        self.pair(Phase::Dispatch, || Ok(()))?;
        let first = clock_ns() - start;
        self.check(&[SILENT], true)?;
        let start = clock_ns();
        for _ in 0..3 {
            self.pair(Phase::Dispatch, || Ok(()))?;
            self.check(&[SILENT], false)?;
        }
        let later = clock_ns() - start;
        if let Some(patience) = self.patience {
            // The rest is for the work of all ranks and their network.
            let max = patience + LIMIT_NS / 2;
            assert!(first < max, "the pair that reports the silent rank took {first} ns, the limit is {max}");
            assert!(later < LIMIT_NS, "three pairs without it took {later} ns: they wait for it");
        }
        Ok(())
    }

    /// Runs pairs while a rank is lost. They end, until the job has found the loss and later.
    fn lost(&self, comm: &Communicator) -> Result<(), EpError> {
        loop {
            self.pair(Phase::Dispatch, || Ok(()))?;
            let code = self.group.status()?.map(|report| report.code);
            assert!(matches!(code, None | Some(Code::Silent | Code::Stopped)), "{code:?}");
            comm.check("the test")?;
        }
    }

    /// Runs the pair of the silent rank, which goes on after `step`, when the others have given it up.
    fn late(&self, phase: Phase, step: impl FnMut() -> Result<(), EpError>) -> Result<(), EpError> {
        self.pair(phase, step)?;
        // Ranks that received its rows returned theirs, before they knew that it is silent. Others did not.
        if phase == Phase::Dispatch { self.check(&[0, 1], true) } else { self.check(&[], false) }
    }
}

#[test]
fn ranks_go_on_without_one_that_does_not_take_a_step_and_readmit_it() {
    for seed in 0..3 {
        let config = waiting(Deadline::after_ms(LIMIT_NS / 1_000_000));
        without_one(&format!("seed {seed}"), &config, 1, || WorldConfig::seeded(3, seed));
        // Rows are awaited for three deadlines.
        let shared = config.max_rows((SHAPE.ranks * TOKENS) as u32);
        without_one(&format!("a shared region, seed {seed}"), &shared, 3, || WorldConfig::seeded(3, seed));
    }
}

#[test]
fn ranks_go_on_without_one_that_does_not_take_a_step_over_a_network_and_readmit_it() {
    let (limit, world) = (&waiting(Deadline::after_ms(LIMIT_NS / 1_000_000)), || WorldConfig::seeded(3, 4).lsa_size(1));
    without_one("proxy", limit, 1, world);
    without_one("a network that delays and reorders what it may", limit, 1, || {
        world().network(|endpoint| {
            Box::new(Reorder::new(Withhold::new(PeerNetwork::new(endpoint), endpoint.rank), endpoint))
        })
    });
    without_one("NICs", limit, 1, || {
        world().soft_nics(&SoftNics::new(Options { delay: 3, seed: 4, ..Options::default() }))
    });
}

/// Runs pairs without one rank, in a seeded world that `world` makes, then pairs with it. The others wait for it for
/// at most this number of deadlines, by the world's clock.
fn without_one(name: &str, config: &GroupConfig, deadlines: u64, world: impl Fn() -> WorldConfig) {
    for phase in PHASES {
        for is_stored in [false, true] {
            let outcome = launch(world(), |rank| -> Result<(), EpError> {
                let comm = rank.communicator(&Requirements::default())?;
                let mut bed = Bed::new(&rank, &comm, config, is_stored)?;
                // A rank that does not come at all costs one.
                bed.patience = Some(if phase == Phase::Dispatch { 1 } else { deadlines } * LIMIT_NS);
                bed.whole(2)?;
                if rank.rank() as usize == SILENT {
                    bed.late(phase, || Ok(rank.barrier()?))?;
                } else {
                    bed.without()?;
                    rank.barrier()?;
                }
                bed.group.readmit()?;
                bed.whole(3)?;
                bed.group.destroy()?;
                Ok(comm.destroy()?)
            });
            outcome.unwrap_or_else(|error| panic!("{phase:?}, stored: {is_stored}, {name}: {error}"));
        }
    }
}

/// Variables of a process: its rank, the phase, the way, and the id of the job. The way is `in place` or `stored`, or
/// `killed` if the rank is not replaced, [`REPLACED`] or [`NEW`]. It ends with [`NETWORK`] if rows go over a
/// network.
const VARIABLES: [&str; 4] = ["GIN_EP_FAULTS_RANK", "GIN_EP_FAULTS_PHASE", "GIN_EP_FAULTS_WAY", "GIN_EP_FAULTS_ID"];
/// End of a way: loads and stores reach no other rank.
const NETWORK: &str = " over a network";
/// A way: a new process takes the place of the killed rank.
const REPLACED: &str = "replaced";
/// The way of that process.
const NEW: &str = "new";
/// Prefix of a line for the parent.
const MARK: &str = "@@ ";
/// How long the job waits for a word of a process, in the test of a stopped one: longer than the test takes.
const PATIENCE: Duration = Duration::from_secs(120);

fn say(line: &str) {
    // A line of the test's harness may have been begun.
    println!("\n{MARK}{line}");
}

/// Waits for a line of the parent.
fn told() {
    let mut line = String::new();
    // The parent has ended if there is none.
    if std::io::stdin().read_line(&mut line).map_or(true, |bytes| bytes == 0) {
        std::process::exit(1);
    }
}

/// Runs a rank, in a process that a test below starts. Without one it does nothing.
#[test]
fn process() {
    let [Ok(number), Ok(phase), Ok(way), id] = VARIABLES.map(std::env::var) else { return };
    // A process that hangs fails the test.
    std::thread::spawn(|| {
        std::thread::sleep(PATIENCE);
        eprintln!("a rank does not end");
        std::process::exit(1);
    });
    let (number, phase) = (number.parse::<u32>().unwrap(), PHASES[phase.parse::<usize>().unwrap()]);
    let config = TcpConfig::default().address(Some(Ipv4Addr::LOCALHOST.into())).joining(PATIENCE).silence(PATIENCE);
    let bootstrap: Arc<dyn Bootstrap> = Arc::new(match id {
        Ok(id) if way.starts_with(NEW) => TcpBootstrap::join_running(&id.parse().unwrap(), number, 3, config).unwrap(),
        Ok(id) => TcpBootstrap::join(&id.parse().unwrap(), number, 3, config).unwrap(),
        Err(_) => {
            let first = Rendezvous::new(config).unwrap();
            say(&format!("id {}", first.id()));
            first.join(3).unwrap()
        }
    });
    let world = WorldConfig::threads(3);
    let (way, mut world) = match way.strip_suffix(NETWORK) {
        Some(way) => (way, world.lsa_size(1)),
        None => (&*way, world),
    };
    world.comm.survive_losses = way == REPLACED;
    let outcome = world::join(world, bootstrap.clone(), |rank| -> Result<(), EpError> {
        if way == NEW {
            let (comm, bed) = next_group(&rank, &bootstrap)?;
            // It served none of the pairs at the end of which the others move.
            bootstrap.all_gather(&[0; 8]).map_err(CommError::from)?;
            bed.whole(3)?;
            let own = Memory::shared(rank.device(), MemoryKind::Device, 64).map_err(CommError::from)?.whole();
            comm.register::<u8>(&own, WindowFlags::NONE).map(drop).unwrap_err();
            comm.register::<u8>(&own, WindowFlags::NONE)?;
            bed.group.destroy()?;
            return Ok(comm.destroy()?);
        }
        let comm = rank.communicator(&Requirements::default())?;
        let kept = comm.alloc_window::<u8>(64, WindowFlags::NONE)?;
        let bed = Bed::new(&rank, &comm, &waiting(PROCESS_DEADLINE), way == "stored")?;
        bed.whole(2)?;
        if number as usize == SILENT {
            bed.late(phase, || {
                say("here");
                told();
                Ok(())
            })?;
        } else {
            say("here");
            told();
            if way == "killed" {
                return bed.lost(&comm);
            }
            if way == REPLACED {
                return move_on(bed, &comm, kept.memory(), &bootstrap);
            }
            bed.without()?;
        }
        say("done");
        told();
        bed.group.readmit()?;
        bed.whole(3)?;
        bed.group.destroy()?;
        Ok(comm.destroy()?)
    });
    match outcome {
        Ok(()) => say("end"),
        Err(error) => say(&format!("error {error}")),
    }
}

/// Makes the group of a job in which a new process has the place of the lost rank.
fn next_group<'a>(rank: &'a Rank, job: &Arc<dyn Bootstrap>) -> Result<(Communicator, Bed<'a>), EpError> {
    let comm = Communicator::new(job.clone(), rank.device().clone(), rank.comm_config().clone());
    comm.initialise(&Requirements::default())?;
    let bed = Bed::new(rank, &comm, &waiting(PROCESS_DEADLINE), false)?;
    Ok((comm, bed))
}

/// The pair before which the ranks move to another group. No pair begins while they agree on it.
#[derive(Default)]
struct Move {
    state: Mutex<Moving>,
    changed: Condvar,
}

#[derive(Default)]
struct Moving {
    begun: u64,
    agrees: bool,
    at: Option<u64>,
}

impl Move {
    /// Begins the next pair, unless the ranks move before it.
    fn begin(&self) -> bool {
        let waits = |state: &mut Moving| state.agrees && state.at.is_none();
        let mut state = self.changed.wait_while(self.state.lock().unwrap(), waits).unwrap();
        let begins = state.at.is_none_or(|at| state.begun < at);
        state.begun += u64::from(begins);
        begins
    }

    /// Lets the ranks move before the first pair that none of them has begun.
    fn agree(&self, job: &Arc<dyn Bootstrap>) -> Result<(), EpError> {
        let begun = {
            let mut state = self.state.lock().unwrap();
            state.agrees = true;
            state.begun
        };
        let all = job.all_gather(&begun.to_le_bytes()).map_err(CommError::from)?;
        self.at(all.iter().map(|begun| u64::from_le_bytes(begun[..].try_into().unwrap())).max().unwrap());
        Ok(())
    }

    fn at(&self, at: u64) {
        self.state.lock().unwrap().at = Some(at);
        self.changed.notify_all();
    }
}

/// Runs pairs without the killed rank while, on another thread, the job grows and the next group is made. Then moves
/// there with the other ranks.
fn move_on(bed: Bed<'_>, comm: &Communicator, kept: &MemorySlice, job: &Arc<dyn Bootstrap>) -> Result<(), EpError> {
    let (rank, moves) = (bed.rank, &Move::default());
    let next = std::thread::scope(|scope| {
        let growing = scope.spawn(|| {
            let grow = || {
                let next = job.grow(&[SILENT as u32], PATIENCE).map_err(CommError::from)?;
                let made = next_group(rank, &next)?;
                moves.agree(&next)?;
                Ok::<_, EpError>(made)
            };
            // After an error the pairs end, too.
            grow().inspect_err(|_| moves.at(0))
        });
        bed.without()?;
        say("serves");
        let mut served = 0;
        while moves.begin() {
            bed.pair(Phase::Dispatch, || Ok(()))?;
            bed.check(&[SILENT], false)?;
            comm.check("serve")?;
            served += 1;
        }
        say(&format!("moves {served}"));
        growing.join().unwrap()
    });
    let (other, next) = next?;
    next.whole(3)?;
    // The lost rank may still write to it, by the old communicator.
    let refused = other.register::<u8>(kept, WindowFlags::NONE).map(drop);
    assert!(matches!(&refused, Err(error) if error.to_string().contains("destroy that first")), "{refused:?}");
    // All ranks have moved: nobody waits in the old communicator.
    drop(bed);
    comm.destroy()?;
    other.register::<u8>(kept, WindowFlags::NONE)?;
    next.group.destroy()?;
    Ok(other.destroy()?)
}

#[test]
fn a_graph_replays_while_its_job_grows_and_beside_the_communicator_of_the_next_job() {
    /// Replays before the new rank comes, and as many afterwards.
    const REPLAYS: usize = 20;
    let config = &TcpConfig::default().address(Some(Ipv4Addr::LOCALHOST.into())).joining(PATIENCE).silence(PATIENCE);
    let rendezvous = Rendezvous::new(config.clone()).unwrap();
    let (id, replayed) = (&rendezvous.id().clone(), &AtomicUsize::new(0));
    let mut first = Some(rendezvous);
    // Threads of one process cannot have their windows at the distances that loads and stores need.
    let world = |ranks| WorldConfig::threads(ranks).lsa_size(1);
    let next_job = |rank: &Rank, job| -> Result<Communicator, EpError> {
        let comm = Communicator::new(job, rank.device().clone(), rank.comm_config().clone());
        comm.initialise(&Requirements::default())?;
        Ok(comm)
    };
    let old = |rank: &Rank, job: &Arc<dyn Bootstrap>| -> Result<(), EpError> {
        let comm = rank.communicator(&Requirements::default())?;
        let bed = Bed::new(rank, &comm, &waiting(Deadline::after_ms(20_000)), false)?;
        let mut slot = bed.group.slot(0)?;
        let graph = bed.stream.capture(|| -> Result<(), EpError> {
            let received = slot.exchange(&bed.stream, &bed.input.tokens(TOKENS, false))?;
            experts(rank, &bed.stream, &SHAPE, &received)?;
            received.combine(&bed.stream, Rows::InPlace, &Combine::reduced().into(&bed.input.output))
        })?;
        let replay = |count| {
            (0..count).try_for_each(|_| -> Result<(), EpError> {
                // Safety: memory and group outlive the graph, and all ranks replay theirs.
                unsafe { bed.stream.replay(&*graph)? };
                bed.stream.synchronize()?;
                bed.check(&[], false)
            })
        };
        let next = std::thread::scope(|scope| {
            let growing = scope.spawn(|| job.grow(&[3], PATIENCE));
            replay(REPLAYS)?;
            assert!(!growing.is_finished(), "the job grew without its new rank");
            replayed.fetch_add(1, Ordering::Relaxed);
            replay(REPLAYS)?;
            Ok::<_, EpError>(growing.join().unwrap().map_err(CommError::from)?)
        })?;
        let other = next_job(rank, next)?;
        replay(REPLAYS)?;
        other.destroy()?;
        replay(1)?;
        drop((graph, slot));
        bed.group.destroy()?;
        Ok(comm.destroy()?)
    };
    std::thread::scope(|scope| {
        for number in 0..3 {
            let first = first.take();
            scope.spawn(move || {
                let job =
                    first.map_or_else(|| TcpBootstrap::join(id, number, 3, config.clone()), |first| first.join(3));
                let job: Arc<dyn Bootstrap> = Arc::new(job.unwrap());
                world::join(world(3), job.clone(), |rank| old(&rank, &job)).unwrap();
            });
        }
        scope.spawn(|| {
            let begun = Instant::now();
            while replayed.load(Ordering::Relaxed) < 3 && begun.elapsed() < PATIENCE {
                std::thread::sleep(Duration::from_millis(1));
            }
            let job: Arc<dyn Bootstrap> = Arc::new(TcpBootstrap::join_running(id, 3, 4, config.clone()).unwrap());
            let new = |rank: Rank| Ok::<_, EpError>(next_job(&rank, job.clone())?.destroy()?);
            world::join(world(4), job.clone(), new).unwrap();
        });
    });
}

/// A process of this program.
struct Process {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Process {
    fn start(number: usize, phase: Phase, way: &str, id: Option<&str>) -> Self {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["process", "--exact", "--nocapture", "--test-threads=1"]);
        command.envs([(VARIABLES[0], number.to_string()), (VARIABLES[1], (phase as usize).to_string())]);
        command.env(VARIABLES[2], way).stdin(Stdio::piped()).stdout(Stdio::piped());
        if let Some(id) = id {
            command.env(VARIABLES[3], id);
        }
        let mut child = command.spawn().unwrap();
        let (input, output) = (child.stdin.take().unwrap(), BufReader::new(child.stdout.take().unwrap()));
        Self { child, input, output }
    }

    fn tell(&mut self) {
        writeln!(self.input, "go").unwrap();
    }

    /// Returns the next line, which must begin with `word`. All that a process waits for ends by itself.
    fn hear(&mut self, word: &str) -> String {
        let mut line = String::new();
        loop {
            line.clear();
            assert!(self.output.read_line(&mut line).unwrap() > 0, "the process ended before `{word}`");
            if let Some(said) = line.trim_end().strip_prefix(MARK) {
                assert!(said.starts_with(word), "expected `{word}`, heard `{said}`");
                return said.to_owned();
            }
        }
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // It may have ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Starts the ranks of a job. The silent one goes on to the phase, and the others wait until then, or until they are
/// needed for that. Also returns the id of the job.
fn job(phase: Phase, way: &str) -> (Vec<Process>, String) {
    let mut all = vec![Process::start(0, phase, way, None)];
    let id = all[0].hear("id").split_off(3);
    all.extend((1..3).map(|number| Process::start(number, phase, way, Some(&id))));
    all[..SILENT].iter_mut().for_each(|process| drop(process.hear("here")));
    if phase == Phase::Combine {
        // It receives their rows first.
        all[..SILENT].iter_mut().for_each(Process::tell);
    }
    all[SILENT].hear("here");
    (all, id)
}

/// Lets the others go on.
fn go_on(phase: Phase, all: &mut [Process]) {
    if phase != Phase::Combine {
        all[..SILENT].iter_mut().for_each(Process::tell);
    }
}

#[test]
fn processes_go_on_without_a_stopped_one_and_readmit_it() {
    let ways = PHASES.into_iter().flat_map(|phase| [(phase, "in place"), (phase, "stored")]);
    for (phase, way) in rotation(0, ways.chain([(Phase::Combine, "in place over a network")])) {
        let (mut all, _) = job(phase, way);
        all[SILENT].signal(Signal::STOP);
        let stopped = waitpid(Some(Pid::from_child(&all[SILENT].child)), WaitOptions::UNTRACED).unwrap();
        assert!(stopped.is_some_and(|(_, status)| status.stopped()));
        go_on(phase, &mut all);
        all[..SILENT].iter_mut().for_each(|process| drop(process.hear("done")));
        all[SILENT].signal(Signal::CONT);
        all[SILENT].tell();
        all[SILENT].hear("done");
        all.iter_mut().for_each(Process::tell);
        all.iter_mut().for_each(|process| drop(process.hear("end")));
    }
}

#[test]
fn processes_end_with_an_error_if_one_is_killed() {
    let ways = PHASES.into_iter().map(|phase| (phase, "killed"));
    for (phase, way) in ways.chain([(Phase::Receive, "killed over a network")]) {
        let (mut all, _) = job(phase, way);
        all[SILENT].signal(Signal::KILL);
        all[SILENT].child.wait().unwrap();
        go_on(phase, &mut all);
        for process in &mut all[..SILENT] {
            let said = process.hear("error");
            assert!(said.contains("rank 2"), "{phase:?}: {said}");
        }
    }
}

#[test]
fn a_new_process_takes_the_place_of_a_killed_one_while_the_others_go_on_serving() {
    for (phase, over) in PHASES.map(|phase| (phase, "")).into_iter().chain([(Phase::Receive, NETWORK)]) {
        let (mut all, id) = job(phase, &format!("{REPLACED}{over}"));
        all[SILENT].signal(Signal::KILL);
        all[SILENT].child.wait().unwrap();
        go_on(phase, &mut all);
        all[..SILENT].iter_mut().for_each(|process| drop(process.hear("serves")));
        let begun = Instant::now();
        all[SILENT] = Process::start(SILENT, phase, &format!("{NEW}{over}"), Some(&id));
        let served: Vec<_> = all[..SILENT].iter_mut().map(|process| process.hear("moves").split_off(6)).collect();
        println!("pairs without the killed rank while the job grew: {}, {:?}", served[0], begun.elapsed());
        assert!(served[0].parse::<u64>().unwrap() > 0 && served[0] == served[1], "{served:?}");
        all.iter_mut().for_each(|process| drop(process.hear("end")));
    }
}
