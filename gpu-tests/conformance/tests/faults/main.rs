// SPDX-License-Identifier: MIT OR Apache-2.0
//! Processes that are killed, stopped, aborted or failed at random while they communicate. Everything that was
//! signalled has arrived. Every rank learns of the fault and says which rank, where and why. No rank hangs. The
//! remaining ranks continue, and so does a communicator without the lost rank.
//!
//! `GIN_SEED` repeats the choices, though not their timing. `GIN_STRESS_SECONDS` extends the random faults, and the
//! random jobs on a busy machine. `GIN_SOAK_SECONDS` runs the soak instead: operations without faults, while memory,
//! descriptors and threads must not grow.

mod rank;
mod replace;
mod soak;
mod waits;
mod work;

use gin_conformance::host::seed_from_env;
use gin_testkit::number_from_env;
use libtest_mimic::{Arguments, Trial};
use rank::{MARK, mixed};
use rustix::process::{Pid, Signal, WaitOptions, kill_process, setpriority_process, waitpid};
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, Command, ExitCode, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};
use work::rng;

/// Set for processes that this program starts.
const CHILD: &str = "GIN_FAULTS_CHILD";
/// Ranks of a job.
const RANKS: usize = 4;
/// Silence after which a rank is lost. It is longer than a busy machine leaves a process without a CPU.
const SILENCE: Duration = Duration::from_millis(2500);
/// Time limit for an expected line; a process that exceeds it hangs.
const LIMIT: Duration = Duration::from_secs(90);
/// Interval at which a wait checks its condition. Waits are counted in these checks, so time in which this process did
/// not run does not count.
const LOOK: Duration = Duration::from_millis(100);

/// Margin after [`SILENCE`] for the end of every wait for a silent rank, on a machine that is busy with other work and
/// has many ranks' threads to run.
const MARGIN: Duration = Duration::from_secs(20);

/// Busy threads beside a job, for each CPU.
const BUSY: usize = 4;
/// Niceness of the job's ranks, which get a CPU after the busy threads.
const NICE: i32 = 10;
/// Silence limit of such a job. It would be too short if gin did not check which threads wait for a CPU.
const SHORT: Duration = Duration::from_millis(500);
/// Duration of such jobs in the ordinary tests.
const SHORTLY: Duration = Duration::from_secs(20);

/// Description of a failure.
type Failure = String;

/// A process of this program.
struct Process {
    child: Child,
    input: ChildStdin,
    lines: Receiver<String>,
}

impl Process {
    fn start() -> Self {
        let mut command = Command::new(std::env::current_exe().expect("this program has a path"));
        command.env(CHILD, "1").stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().expect("this program can be started");
        let input = child.stdin.take().expect("standard input is piped");
        let output = child.stdout.take().expect("standard output is piped");
        let (to, lines) = mpsc::channel();
        thread::spawn(move || {
            for line in BufReader::new(output).lines().map_while(Result::ok) {
                match line.strip_prefix(MARK) {
                    Some(line) if to.send(line.to_owned()).is_err() => break,
                    Some(_) => {}
                    None => println!("{line}"),
                }
            }
        });
        Self { child, input, lines }
    }

    fn tell(&mut self, line: &str) {
        // A process that has ended is noticed when its output is read.
        let _ = writeln!(self.input, "{line}").and_then(|()| self.input.flush());
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).expect("it has not been waited for");
    }

    /// Stops the process, and waits until all its threads have stopped.
    fn stop(&self) -> Result<(), Failure> {
        self.signal(Signal::STOP);
        let stopped = waitpid(Some(Pid::from_child(&self.child)), WaitOptions::UNTRACED);
        match stopped {
            Ok(Some((_, status))) if status.stopped() => Ok(()),
            other => Err(format!("process {} does not stop: {other:?}", self.child.id())),
        }
    }

    /// Returns the process's next line, if it arrives within [`LIMIT`].
    fn line(&self) -> Result<String, RecvTimeoutError> {
        let looks = LIMIT.as_millis() / LOOK.as_millis();
        let mut lines = (0..looks).map(|_| self.lines.recv_timeout(LOOK));
        lines.find(|line| *line != Err(RecvTimeoutError::Timeout)).unwrap_or(Err(RecvTimeoutError::Timeout))
    }

    /// Returns the rest of the process's next line, which must begin with `word`.
    fn hear(&self, word: &str) -> Result<String, Failure> {
        let pid = self.child.id();
        let line = self.line().map_err(|error| format!("process {pid} does not print `{word}`: {error}"))?;
        let (first, rest) = line.split_once(' ').unwrap_or((&line, ""));
        if first == word {
            Ok(rest.to_owned())
        } else {
            Err(format!("expected `{word}` of process {pid}, got: {line}"))
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // The process may have ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Processes that form one job after another.
struct Group(Vec<Process>);

impl Group {
    fn start() -> Result<Self, Failure> {
        let all: Vec<Process> = (0..RANKS).map(|_| Process::start()).collect();
        all.iter().try_for_each(|process| process.hear("ready").map(drop))?;
        Ok(Self(all))
    }

    /// Makes the processes form a job and work. `way` names the network, the route and the task.
    fn job(&mut self, seed: u64, silence: Duration, way: &str) -> Result<(), Failure> {
        self.begin(seed, silence, way)?;
        self.hear("going", &[]).map(drop)
    }

    /// As `job`, without waiting until the ranks work.
    fn begin(&mut self, seed: u64, silence: Duration, way: &str) -> Result<(), Failure> {
        let mut id = String::new();
        for rank in 0..RANKS {
            let line = format!("job {rank} {RANKS} {seed} {} {way} {id}", silence.as_millis());
            self.0[rank].tell(line.trim_end());
            if rank == 0 {
                id = self.0[0].hear("id")?;
            }
        }
        Ok(())
    }

    /// Returns the next line of all processes except `but`.
    fn hear(&self, word: &str, but: &[usize]) -> Result<Vec<String>, Failure> {
        let all = self.0.iter().enumerate().filter(|(rank, _)| !but.contains(rank));
        all.map(|(_, process)| process.hear(word)).collect()
    }

    fn replace(&mut self, rank: usize) -> Result<(), Failure> {
        self.0[rank] = Process::start();
        self.0[rank].hear("ready").map(drop)
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Fault {
    None,
    Killed,
    /// The rank is stopped, and continued before the others notice.
    Paused,
    /// The rank is stopped until all others have continued.
    Stopped,
    Aborted,
    /// A request fails.
    Failed,
    /// The network reports a peer as lost.
    Lost,
}

const FAULTS: [Fault; 7] =
    [Fault::Killed, Fault::Aborted, Fault::Paused, Fault::Failed, Fault::Stopped, Fault::Lost, Fault::None];

fn host() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}

/// Checks that each text contains all of these words.
fn says(texts: &[String], words: &[&str]) -> Result<(), Failure> {
    for text in texts {
        if let Some(word) = words.iter().find(|word| !text.contains(**word)) {
            return Err(format!("expected `{word}` in: {text}"));
        }
    }
    Ok(())
}

/// Runs one job in which this fault happens at a random time, and checks its results.
fn epoch(group: &mut Group, fault: Fault, seed: u64) -> Result<(), Failure> {
    let mut random = rng(seed);
    let victim = random.rand_range(0..RANKS as u64) as usize;
    let network = ["plain", "delay", "reorder"][random.rand_range(0..3) as usize];
    let by_network = matches!(fault, Fault::Failed | Fault::Lost) || random.rand_range(0..2) == 0;
    let route = if by_network { "network" } else { "auto" };
    println!("{fault:?}, rank {victim}, network {network}, route {route}, seed {seed}");
    group.job(seed, SILENCE, &format!("{network} {route} plain"))?;
    thread::sleep(Duration::from_micros(random.rand_range(0..400_000)));
    let lost = format!("rank {victim} on host {}", host());
    let gone = [victim];
    match fault {
        Fault::None => group.0[0].tell("enough"),
        Fault::Paused => {
            let begun = Instant::now();
            group.0[victim].signal(Signal::STOP);
            thread::sleep(SILENCE / 10);
            group.0[victim].signal(Signal::CONT);
            if begun.elapsed() >= SILENCE / 2 {
                println!("this process itself was late: the pause was too long to prove anything");
                *group = Group::start()?;
                return Ok(());
            }
            group.0[0].tell("enough");
        }
        Fault::Killed | Fault::Stopped => {
            let (signal, cause) = match fault {
                Fault::Killed => (Signal::KILL, "connection was closed"),
                _ => (Signal::STOP, "nothing was heard of it for"),
            };
            group.0[victim].signal(signal);
            says(&group.hear("learned", &gone)?, &[&lost, cause])?;
        }
        Fault::Aborted => {
            group.0[victim].tell("abort");
            group.hear("learned", &[])?;
        }
        Fault::Failed | Fault::Lost => {
            group.0[victim].tell(if fault == Fault::Failed { "fail" } else { "lose" });
            let cause = if fault == Fault::Failed { "status 12" } else { "a test requested it" };
            let learned = group.hear("learned", &[])?;
            // Other ranks may be in a call on the job at that moment, whose error quotes that rank.
            says(&learned[victim..=victim], &[cause, "proxy over peer", &host()])?;
        }
    }
    let but: &[usize] = if matches!(fault, Fault::Killed | Fault::Stopped) { &gone } else { &[] };
    group.hear("done", but)?;
    group.hear("idle", but)?;
    match fault {
        Fault::Killed => group.replace(victim),
        Fault::Stopped => {
            group.0[victim].signal(Signal::CONT);
            says(&[group.0[victim].hear("learned")?], &["rank"])?;
            group.0[victim].hear("out")?;
            group.0[victim].hear("idle").map(drop)
        }
        _ => Ok(()),
    }
}

fn random_faults_lose_nothing_and_nobody_hangs() -> Result<(), Failure> {
    let (seed, begun) = (seed_from_env(), Instant::now());
    let least = Duration::from_secs(number_from_env("GIN_STRESS_SECONDS").unwrap_or(0));
    println!("GIN_SEED={seed}");
    let mut group = Group::start()?;
    let mut number = 0;
    // Each fault at least once, and then at random.
    while number < FAULTS.len() as u64 || begun.elapsed() < least {
        let own = mixed(seed, number);
        let fault = FAULTS[if number < FAULTS.len() as u64 { number } else { own % FAULTS.len() as u64 } as usize];
        epoch(&mut group, fault, own)
            .map_err(|error| format!("{fault:?}, number {number} of GIN_SEED={seed}: {error}"))?;
        number += 1;
    }
    println!("{number} faults in {:.1} s", begun.elapsed().as_secs_f64());
    Ok(())
}

/// Runs one job without a fault.
fn healthy(group: &mut Group, seed: u64) -> Result<(), Failure> {
    let mut random = rng(seed);
    let way = ["plain auto", "plain network", "delay network", "reorder network"][random.rand_range(0..4) as usize];
    println!("{way}, seed {seed}");
    group.job(seed, SHORT, &format!("{way} plain"))?;
    thread::sleep(SHORT * random.rand_range(2..8) as u32);
    group.0[0].tell("enough");
    group.hear("done", &[])?;
    group.hear("idle", &[]).map(drop)
}

fn random_jobs_on_a_busy_machine_lose_nobody() -> Result<(), Failure> {
    let (seed, begun) = (seed_from_env(), Instant::now());
    let least = number_from_env("GIN_STRESS_SECONDS").map_or(SHORTLY, Duration::from_secs);
    let busy = BUSY * thread::available_parallelism().map_or(1, usize::from);
    println!("GIN_SEED={seed}, {busy} busy threads");
    let (over, mut number) = (AtomicBool::new(false), 0);
    thread::scope(|scope| {
        for _ in 0..busy {
            scope.spawn(|| {
                while !over.load(Ordering::Relaxed) {
                    std::hint::spin_loop();
                }
            });
        }
        let mut jobs = || -> Result<(), Failure> {
            let mut group = Group::start()?;
            for process in &group.0 {
                // The process's other threads are created by this one. If the whole program is nicer already, so are
                // the busy threads.
                let _ = setpriority_process(Some(Pid::from_child(&process.child)), NICE);
            }
            while begun.elapsed() < least {
                healthy(&mut group, mixed(seed, number))
                    .map_err(|error| format!("number {number} of GIN_SEED={seed}: {error}"))?;
                number += 1;
            }
            Ok(())
        };
        let outcome = jobs();
        over.store(true, Ordering::Relaxed);
        outcome
    })?;
    println!("{number} jobs in {:.1} s", begun.elapsed().as_secs_f64());
    Ok(())
}

fn a_stopped_rank_is_left_out_and_writes_nothing_to_the_job_that_goes_on() -> Result<(), Failure> {
    const STOPPED: usize = 2;
    let mut group = Group::start()?;
    group.job(seed_from_env(), SILENCE, "plain auto guarded")?;
    group.0[STOPPED].signal(Signal::STOP);
    let out = format!("rank {STOPPED} on host {}", host());
    says(&group.hear("learned", &[STOPPED])?, &[&out, "nothing was heard"])?;
    // A communicator without the stopped rank continues.
    group.0[..2].iter().try_for_each(|process| process.hear("pair").map(drop))?;
    // No window of the new job contains memory that the stopped rank has mapped: neither before the old communicator is
    // destroyed nor after.
    says(&group.hear("before", &[STOPPED])?, &["destroy that first"])?;
    let process = format!("process {}", group.0[STOPPED].child.id());
    says(&group.hear("after", &[STOPPED])?, &["rank 2 of an earlier", &process, "not known to have ended"])?;
    group.hear("going", &[STOPPED])?;
    // The stopped rank continues where it was, and writes to all windows that it has mapped. Meanwhile the others
    // compare every byte that they receive.
    group.0[STOPPED].signal(Signal::CONT);
    group.0[STOPPED].hear("learned")?;
    let error = group.0[STOPPED].hear("out")?;
    says(&[error], &[&out])?;
    group.0[STOPPED].hear("idle")?;
    group.0[0].tell("enough");
    group.hear("done", &[STOPPED])?;
    // The stopped rank did write; otherwise this test would prove nothing.
    says(&group.hear("scribbled", &[STOPPED])?, &["true"])?;
    group.0[STOPPED].signal(Signal::KILL);
    let _ = group.0[STOPPED].child.wait();
    for process in &mut group.0 {
        process.tell("continue");
    }
    says(&group.hear("later", &[STOPPED])?, &["registered"])?;
    group.hear("idle", &[STOPPED]).map(drop)
}

/// Stops a rank while all others are inside every wait of a task at once, and a communicator of two of them works.
fn each_wait_ends(task: &str) -> Result<(), Failure> {
    const STOPPED: usize = waits::STOPPED as usize;
    let mut group = Group::start()?;
    group.begin(seed_from_env(), SILENCE, &format!("plain auto {task}"))?;
    group.hear("waiting", &[])?;
    group.0[STOPPED].stop()?;
    let looks = Arc::new(AtomicU32::new(0));
    let clock = Arc::downgrade(&looks);
    thread::spawn(move || {
        while let Some(looks) = clock.upgrade() {
            thread::sleep(LOOK);
            looks.fetch_add(1, Ordering::Relaxed);
        }
    });
    for (_, process) in group.0.iter_mut().enumerate().filter(|(rank, _)| *rank != STOPPED) {
        process.tell("it is stopped");
    }
    let (lost, host) = (format!("rank {STOPPED} on host {}", host()), format!("on host {}", host()));
    for (rank, process) in group.0.iter().enumerate().filter(|(rank, _)| *rank != STOPPED) {
        for (name, has_comm) in waits::names(task) {
            let end = process.hear("ended")?;
            let origin = format!("reported by rank {rank} {host}");
            let comm = ["proxy over peer", &origin];
            let words =
                [name, &lost, "nothing was heard of it for"].into_iter().chain(comm.into_iter().filter(|_| has_comm));
            says(&[end], &words.collect::<Vec<_>>())?;
        }
    }
    let took = LOOK * looks.load(Ordering::Relaxed);
    println!("all waits ended {:.1} s after the rank was stopped", took.as_secs_f64());
    if took > SILENCE + MARGIN {
        return Err(format!(
            "the waits took {took:?} to end, including the silence of {SILENCE:?} after which a rank is lost"
        ));
    }
    for process in &group.0[..2] {
        let launches = process.hear("beside")?;
        println!("{launches} launches beside");
        if launches == "0" {
            return Err("the bystander made no launch meanwhile".to_owned());
        }
    }
    // The remaining ranks release everything without the stopped one.
    group.hear("idle", &[STOPPED]).map(drop)
}

fn every_kind_of_wait_of_a_kernel_ends_when_a_rank_is_stopped() -> Result<(), Failure> {
    each_wait_ends(waits::KERNELS)
}

fn every_kind_of_wait_of_a_host_ends_when_a_rank_is_stopped() -> Result<(), Failure> {
    each_wait_ends(waits::CALLS)
}

fn a_put_that_is_lost_though_it_was_signalled_is_noticed() -> Result<(), Failure> {
    let mut group = Group::start()?;
    // Results differ from rank to rank, but each rank that misses bytes reports that.
    group.begin(seed_from_env(), SILENCE, "lose-put network plain")?;
    let last = |process: &Process| -> Result<String, Failure> {
        loop {
            let line = process.line().map_err(|error| error.to_string())?;
            if let Some(error) = line.strip_prefix("failed ") {
                return Ok(error.to_owned());
            }
        }
    };
    let errors = group.0.iter().map(last).collect::<Result<Vec<_>, _>>()?;
    if errors.iter().any(|error| error.contains("wrong bytes")) { Ok(()) } else { Err(errors.join("; ")) }
}

fn main() -> ExitCode {
    if std::env::var_os(CHILD).is_some() {
        return rank::serve();
    }
    if let Some(code) = replace::serve() {
        return code;
    }
    if let Some(seconds) = number_from_env("GIN_SOAK_SECONDS") {
        return soak::run(Duration::from_secs(seconds), seed_from_env());
    }
    let trial = |name: &str, run: fn() -> Result<(), Failure>| Trial::test(name, move || run().map_err(Into::into));
    let trials = vec![
        trial("random_faults_lose_nothing_and_nobody_hangs", random_faults_lose_nothing_and_nobody_hangs),
        trial("random_jobs_on_a_busy_machine_lose_nobody", random_jobs_on_a_busy_machine_lose_nobody),
        trial(
            "a_stopped_rank_is_left_out_and_writes_nothing_to_the_job_that_goes_on",
            a_stopped_rank_is_left_out_and_writes_nothing_to_the_job_that_goes_on,
        ),
        trial(
            "every_kind_of_wait_of_a_kernel_ends_when_a_rank_is_stopped",
            every_kind_of_wait_of_a_kernel_ends_when_a_rank_is_stopped,
        ),
        trial(
            "every_kind_of_wait_of_a_host_ends_when_a_rank_is_stopped",
            every_kind_of_wait_of_a_host_ends_when_a_rank_is_stopped,
        ),
        trial(
            "ranks_that_are_killed_during_traffic_are_replaced_and_the_others_keep_their_memory",
            replace::ranks_that_are_killed_during_traffic_are_replaced_and_the_others_keep_their_memory,
        ),
        trial(
            "a_put_that_is_lost_though_it_was_signalled_is_noticed",
            a_put_that_is_lost_though_it_was_signalled_is_noticed,
        ),
    ];
    let mut arguments = Arguments::from_args();
    // Each test already has one process per rank.
    arguments.test_threads.get_or_insert(1);
    libtest_mimic::run(&arguments, trials).exit_code()
}
