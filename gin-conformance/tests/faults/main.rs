// SPDX-License-Identifier: MIT OR Apache-2.0
//! Processes that are killed, stopped, aborted or failed at random while they communicate: nothing that was signalled
//! is missing, everyone learns of it and says who, where and why, nobody hangs, those that are left go on, and so does
//! a communicator that the lost rank had no part in.
//!
//! `GIN_SEED` repeats the choices, though not their timing. `GIN_STRESS_SECONDS` has random faults, and random jobs on
//! a busy machine, go on for longer; `GIN_SOAK_SECONDS` runs the soak instead: operations without faults, while memory,
//! descriptors and threads stay flat.

mod rank;
mod soak;
mod waits;
mod work;

use libtest_mimic::{Arguments, Trial};
use rank::{MARK, mixed};
use rustix::process::{Pid, Signal, WaitOptions, kill_process, setpriority_process, waitpid};
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, Command, ExitCode, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use work::rng;

/// Set for processes that this program starts.
const CHILD: &str = "GIN_FAULTS_CHILD";
/// Ranks of a job.
const RANKS: usize = 4;
/// After so long without a word a rank is lost; longer than a busy machine leaves a process without a processor.
const SILENCE: Duration = Duration::from_millis(2500);
/// Who has not said by then what it should hangs.
const LIMIT: Duration = Duration::from_secs(90);
/// How often a wait looks at what came of it. Waits are as long as their looks: time in which this process did not run
/// does not count.
const LOOK: Duration = Duration::from_millis(100);

/// After [`SILENCE`] every wait for a rank that says nothing has ended; for a machine that is busy with other things,
/// and has many ranks' threads to run, so much later.
const MARGIN: Duration = Duration::from_secs(20);

/// Busy threads beside a job, for each processor.
const BUSY: usize = 4;
/// Niceness of its ranks, which get a processor after those.
const NICE: i32 = 10;
/// Silence of such a job. Without a look at who waits for a processor that would be too short.
const SHORT: Duration = Duration::from_millis(500);
/// How long such jobs go on in the ordinary tests.
const SHORTLY: Duration = Duration::from_secs(20);

/// What went wrong, for people.
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
        let input = child.stdin.take().expect("it was asked for");
        let output = child.stdout.take().expect("it was asked for");
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
        // One that has ended is noticed when it is heard.
        let _ = writeln!(self.input, "{line}").and_then(|()| self.input.flush());
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).expect("it has not been waited for");
    }

    /// Stops it, and waits until all its threads are.
    fn stop(&self) -> Result<(), Failure> {
        self.signal(Signal::STOP);
        let stopped = waitpid(Some(Pid::from_child(&self.child)), WaitOptions::UNTRACED);
        match stopped {
            Ok(Some((_, status))) if status.stopped() => Ok(()),
            other => Err(format!("process {} does not stop: {other:?}", self.child.id())),
        }
    }

    /// Its next line, if that comes within [`LIMIT`].
    fn line(&self) -> Result<String, RecvTimeoutError> {
        let looks = LIMIT.as_millis() / LOOK.as_millis();
        let mut came = (0..looks).map(|_| self.lines.recv_timeout(LOOK));
        came.find(|line| *line != Err(RecvTimeoutError::Timeout)).unwrap_or(Err(RecvTimeoutError::Timeout))
    }

    /// The rest of its next line, which is to begin with this word.
    fn hear(&self, word: &str) -> Result<String, Failure> {
        let pid = self.child.id();
        let line = self.line().map_err(|error| format!("process {pid} does not say `{word}`: {error}"))?;
        let (first, rest) = line.split_once(' ').unwrap_or((&line, ""));
        if first == word {
            Ok(rest.to_owned())
        } else {
            Err(format!("process {pid} was to say `{word}`, said: {line}"))
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Processes that form one job after the other.
struct Group(Vec<Process>);

impl Group {
    fn start() -> Result<Self, Failure> {
        let all: Vec<Process> = (0..RANKS).map(|_| Process::start()).collect();
        all.iter().try_for_each(|process| process.hear("ready").map(drop))?;
        Ok(Self(all))
    }

    /// Has them form a job and work. `way`: network, route, and whether what is kept is looked after.
    fn job(&mut self, seed: u64, silence: Duration, way: &str) -> Result<(), Failure> {
        self.begin(seed, silence, way)?;
        self.hear("going", &[]).map(drop)
    }

    /// The same, without waiting until they work.
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

    /// What all but some say next.
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
    /// Stopped, and continued before that is noticed.
    Paused,
    /// Stopped until all others have gone on.
    Stopped,
    Aborted,
    /// A request fails.
    Failed,
    /// The network says that a peer is lost.
    Lost,
}

const FAULTS: [Fault; 7] =
    [Fault::Killed, Fault::Aborted, Fault::Paused, Fault::Failed, Fault::Stopped, Fault::Lost, Fault::None];

fn host() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}

/// What was learned has all of these in it.
fn says(texts: &[String], words: &[&str]) -> Result<(), Failure> {
    for text in texts {
        if let Some(word) = words.iter().find(|word| !text.contains(**word)) {
            return Err(format!("`{word}` is not in: {text}"));
        }
    }
    Ok(())
}

/// One job in which this happens at a random time, and what follows from it.
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
                println!("this process was late itself: the pause was too long, and nothing follows from it");
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
            let cause = if fault == Fault::Failed { "status 12" } else { "so a test wants it" };
            let learned = group.hear("learned", &[])?;
            // Others may be in a call on the job when it happens, which says that rank's words.
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

fn variable(name: &str) -> Option<u64> {
    std::env::var(name).ok()?.parse().ok()
}

/// Another one each time, or that of `GIN_SEED`.
fn seed() -> u64 {
    let now = || SystemTime::now().duration_since(UNIX_EPOCH).map_or(1, |now| now.as_nanos() as u64);
    variable("GIN_SEED").unwrap_or_else(now)
}

fn random_faults_lose_nothing_and_nobody_hangs() -> Result<(), Failure> {
    let (seed, begun) = (seed(), Instant::now());
    let least = Duration::from_secs(variable("GIN_STRESS_SECONDS").unwrap_or(0));
    println!("GIN_SEED={seed}");
    let mut group = Group::start()?;
    let mut number = 0;
    // Each at least once, and then at random.
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

/// One job in which nothing is wrong.
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
    let (seed, begun) = (seed(), Instant::now());
    let least = variable("GIN_STRESS_SECONDS").map_or(SHORTLY, Duration::from_secs);
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
                // Their other threads come from this one. If all of this is nicer already, so are the busy threads.
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
    group.job(seed(), SILENCE, "plain auto guarded")?;
    group.0[STOPPED].signal(Signal::STOP);
    let out = format!("rank {STOPPED} on host {}", host());
    says(&group.hear("learned", &[STOPPED])?, &[&out, "nothing was heard"])?;
    // A communicator that it has no part in goes on.
    group.0[..2].iter().try_for_each(|process| process.hear("pair").map(drop))?;
    // Memory that it has mapped is in no window of the new job: not before the old communicator is gone, and not after.
    says(&group.hear("before", &[STOPPED])?, &["destroy that first"])?;
    let process = format!("process {}", group.0[STOPPED].child.id());
    says(&group.hear("after", &[STOPPED])?, &["rank 2 of an earlier", &process, "not known to have ended"])?;
    group.hear("going", &[STOPPED])?;
    // It goes on where it was, and writes to all that it has, while the others compare every byte that they get.
    group.0[STOPPED].signal(Signal::CONT);
    group.0[STOPPED].hear("learned")?;
    let error = group.0[STOPPED].hear("out")?;
    says(&[error], &[&out])?;
    group.0[STOPPED].hear("idle")?;
    group.0[0].tell("enough");
    group.hear("done", &[STOPPED])?;
    // It did write, or all of this would prove nothing.
    says(&group.hear("scribbled", &[STOPPED])?, &["true"])?;
    group.0[STOPPED].signal(Signal::KILL);
    let _ = group.0[STOPPED].child.wait();
    for process in &mut group.0 {
        process.tell("go on");
    }
    says(&group.hear("later", &[STOPPED])?, &["registered"])?;
    group.hear("idle", &[STOPPED]).map(drop)
}

/// A rank is stopped while all others are inside every wait of a task at once, and a communicator of two of them works.
fn each_wait_ends(task: &str) -> Result<(), Failure> {
    const STOPPED: usize = waits::STOPPED as usize;
    let mut group = Group::start()?;
    group.begin(seed(), SILENCE, &format!("plain auto {task}"))?;
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
            let told = format!("told by rank {rank} {host}");
            let comm = ["proxy over peer", &told];
            let words =
                [name, &lost, "nothing was heard of it for"].into_iter().chain(comm.into_iter().filter(|_| has_comm));
            says(&[end], &words.collect::<Vec<_>>())?;
        }
    }
    let took = LOOK * looks.load(Ordering::Relaxed);
    println!("all have ended {:.1} s after the rank was stopped", took.as_secs_f64());
    if took > SILENCE + MARGIN {
        return Err(format!("the waits took {took:?} to end, {SILENCE:?} after which a rank is lost included"));
    }
    for process in &group.0[..2] {
        let launches = process.hear("beside")?;
        println!("{launches} launches beside");
        if launches == "0" {
            return Err("the bystander did nothing meanwhile".to_owned());
        }
    }
    // They let go of everything without it.
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
    // What the job comes to differs from rank to rank, but those that miss bytes say so.
    group.begin(seed(), SILENCE, "lose-put network plain")?;
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
    if let Some(seconds) = variable("GIN_SOAK_SECONDS") {
        return soak::run(Duration::from_secs(seconds), seed());
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
            "a_put_that_is_lost_though_it_was_signalled_is_noticed",
            a_put_that_is_lost_though_it_was_signalled_is_noticed,
        ),
    ];
    let mut arguments = Arguments::from_args();
    // Each has as many processes as there are ranks already.
    arguments.test_threads.get_or_insert(1);
    libtest_mimic::run(&arguments, trials).exit_code()
}
