// SPDX-License-Identifier: MIT OR Apache-2.0
//! Ranks that are processes: the others learn that one is killed, stopped, or ends without a word, and they lose no
//! rank that is only late.

use gin_boot::{Bootstrap, BootstrapError, LossCause};
use gin_boot::{Rendezvous, TcpBootstrap, TcpConfig, UniqueId};
use libtest_mimic::{Arguments, Trial};
use rustix::process::{Pid, Signal, WaitOptions, kill_process, setpriority_process, waitpid};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use std::env;
use std::fs;
use std::io::{BufRead, BufReader, Lines, Write};
use std::net::Ipv4Addr;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

const RANK: &str = "GIN_TEST_RANK";
const RANKS: &str = "GIN_TEST_RANKS";
const ID: &str = "GIN_TEST_ID";
const SILENCE_MS: &str = "GIN_TEST_SILENCE_MS";
const QUIT: &str = "GIN_TEST_QUIT";
/// Each rank listens at an address of its own, so no rank takes another one's word about its process.
const APART: &str = "GIN_TEST_APART";

fn number(name: &str) -> Option<u64> {
    env::var(name).ok()?.parse().ok()
}

/// Rank 0 shall end the job.
static ENOUGH: AtomicBool = AtomicBool::new(false);

/// One rank: joins, says so, and meets until rank 0 says that it is enough, or that fails; then says what it learned.
fn rank(rank: u32) -> Result<(), BootstrapError> {
    let ranks = number(RANKS).unwrap() as u32;
    let config = TcpConfig::default()
        .address(Some(Ipv4Addr::new(127, 0, 0, if number(APART).is_some() { 1 + rank as u8 } else { 1 }).into()))
        .joining(Duration::from_secs(60))
        .collective_timeout(Some(Duration::from_secs(60)))
        .silence(Duration::from_millis(number(SILENCE_MS).unwrap()));
    let bootstrap = match env::var(ID) {
        Ok(id) => TcpBootstrap::join(&id.parse::<UniqueId>().unwrap(), rank, ranks, config)?,
        Err(_) => {
            let rendezvous = Rendezvous::new(config)?;
            println!("{}", rendezvous.id());
            rendezvous.join(ranks)?
        }
    };
    let channel = bootstrap.channel(1);
    bootstrap.barrier()?;
    if number(QUIT).is_some() {
        // No destructor runs: no rank hears of it.
        std::process::exit(0);
    }
    println!("ready");
    thread::spawn(|| {
        let line = std::io::stdin().lines().next();
        ENOUGH.store(line.is_some_and(|line| line.is_ok()), Ordering::Relaxed);
    });
    let error = loop {
        match bootstrap.all_gather(&[u8::from(ENOUGH.load(Ordering::Relaxed))]) {
            Ok(all) if all[0] == [1] => {
                println!("whole");
                return Ok(());
            }
            Ok(_) => {}
            Err(error) => break error,
        }
        thread::sleep(Duration::from_millis(5));
    };
    let fault = channel.board().of(rank).map(|notice| (notice.fault.kind(), notice.fault.peer(), notice.fault.seen()));
    let cause = channel.board().cause(rank).unwrap_or_default();
    println!("{error} {fault:?} {cause}");
    Ok(())
}

struct Process {
    child: Child,
    lines: Lines<BufReader<ChildStdout>>,
}

impl Process {
    fn start(rank: u32, ranks: u32, settings: &[(&str, String)]) -> Self {
        let mut command = Command::new(env::current_exe().unwrap());
        command.env(RANK, rank.to_string()).env(RANKS, ranks.to_string()).envs(settings.iter().cloned());
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        Self { child, lines }
    }

    fn line(&mut self) -> String {
        self.lines.next().unwrap_or_else(|| panic!("it ended: {:?}", self.child.wait())).unwrap()
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }

    /// Stops it, and waits until all its threads are.
    fn stop(&self) {
        self.signal(Signal::STOP);
        let (_, status) = waitpid(Some(Pid::from_child(&self.child)), WaitOptions::UNTRACED).unwrap().unwrap();
        assert!(status.stopped());
    }

    /// Its threads, and how long each has waited for a CPU.
    fn waits(&self) -> Vec<(Pid, Duration)> {
        let tasks = fs::read_dir(format!("/proc/{}/task", self.child.id())).unwrap();
        let wait = |path: std::path::PathBuf| {
            let told = fs::read_to_string(path.join("schedstat")).ok()?;
            let thread = path.file_name()?.to_str()?.parse().ok()?;
            Some((Pid::from_raw(thread)?, Duration::from_nanos(told.split(' ').nth(1)?.parse().ok()?)))
        };
        tasks.filter_map(|task| wait(task.unwrap().path())).collect()
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn job(ranks: u32, silence_ms: u64, more: &[(&'static str, String)]) -> Vec<Process> {
    let mut settings = vec![(SILENCE_MS, silence_ms.to_string())];
    settings.extend_from_slice(more);
    let mut first = Process::start(0, ranks, &settings);
    settings.push((ID, first.line()));
    let others: Vec<_> = (1..ranks).map(|rank| Process::start(rank, ranks, &settings)).collect();
    std::iter::once(first).chain(others).collect()
}

/// Has a job end, which is whole.
fn ends_whole(mut job: Vec<Process>) {
    // One that has ended says why below.
    let _ = writeln!(job[0].child.stdin.as_ref().unwrap(), "enough");
    for (rank, process) in job.iter_mut().enumerate() {
        assert_eq!(process.line(), "whole", "rank {rank}");
        assert!(process.child.wait().unwrap().success());
    }
}

/// Returns the text of ranks about a lost one: its rank, host and cause.
fn named(lost: u32, cause: &LossCause) -> String {
    let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
    format!("rank {lost} on host {host} {cause} Some((PeerLost, {lost}, {})) {cause}", cause.code())
}

fn a_killed_rank_is_named_to_all_at_once() {
    for killed in [0, 1, 4] {
        // Silence would be noticed after an hour: it is the connection that tells.
        let mut job = job(5, 3_600_000, &[]);
        for process in &mut job {
            assert_eq!(process.line(), "ready");
        }
        job[killed].signal(Signal::KILL);
        for (rank, process) in job.iter_mut().enumerate().filter(|(rank, _)| *rank != killed) {
            assert_eq!(process.line(), named(killed as u32, &LossCause::Closed), "rank {rank}");
            assert!(process.child.wait().unwrap().success());
        }
    }
}

fn a_stopped_rank_is_named_to_all_after_the_silence_and_learns_so_when_it_goes_on() {
    let silent = LossCause::Silent { ms: 2000 };
    for stopped in [1, 2] {
        let mut job = job(4, 2000, &[]);
        for process in &mut job {
            assert_eq!(process.line(), "ready");
        }
        job[stopped].signal(Signal::STOP);
        for (rank, process) in job.iter_mut().enumerate().filter(|(rank, _)| *rank != stopped) {
            assert_eq!(process.line(), named(stopped as u32, &silent), "rank {rank}");
        }
        job[stopped].signal(Signal::CONT);
        assert_eq!(job[stopped].line(), named(stopped as u32, &silent));
    }
}

fn time_in_which_all_ranks_stood_still_is_nobodys_silence() {
    const SILENCE_MS: u64 = 2000;
    // Ranks may see each other's processes, or not, as those of other hosts.
    for settings in [&[][..], &[(APART, "1".to_owned())]] {
        for order in [[0, 1, 2, 3], [3, 2, 1, 0]] {
            let mut job = job(4, SILENCE_MS, settings);
            for process in &mut job {
                assert_eq!(process.line(), "ready");
            }
            job.iter().for_each(Process::stop);
            thread::sleep(Duration::from_millis(SILENCE_MS + 500));
            // One goes on after the other, as when all of them wait for a CPU.
            for rank in order {
                job[rank].signal(Signal::CONT);
                thread::sleep(Duration::from_millis(SILENCE_MS / 8));
            }
            thread::sleep(Duration::from_millis(SILENCE_MS / 2));
            ends_whole(job);
        }
    }
}

fn a_rank_that_waits_for_a_processor_is_not_lost() {
    const SILENCE_MS: u64 = 500;
    /// Of as many threads that want the same CPU, all of them before the rank.
    const BUSY: usize = 100;
    let all = sched_getaffinity(None).unwrap();
    let mut one = CpuSet::new();
    one.set((0..CpuSet::MAX_CPU).find(|&cpu| all.is_set(cpu)).unwrap());
    for late in [0, 1, 2] {
        let mut job = job(3, SILENCE_MS, &[]);
        for process in &mut job {
            assert_eq!(process.line(), "ready");
        }
        let waited = || job[late].waits().into_iter().map(|(_, wait)| wait).max().unwrap();
        let over = AtomicBool::new(false);
        thread::scope(|scope| {
            for _ in 0..BUSY {
                scope.spawn(|| {
                    sched_setaffinity(None, &one).unwrap();
                    while !over.load(Ordering::Relaxed) {
                        std::hint::spin_loop();
                    }
                });
            }
            for (thread, _) in job[late].waits() {
                sched_setaffinity(Some(thread), &one).unwrap();
                setpriority_process(Some(thread), 19).unwrap();
            }
            let (before, begun) = (waited(), Instant::now());
            // Long enough to be taken for silent, had nobody looked at its process.
            while waited() < before + 6 * Duration::from_millis(SILENCE_MS) {
                assert!(begun.elapsed() < Duration::from_secs(60), "rank {late} gets a CPU all the same");
                thread::sleep(Duration::from_millis(20));
            }
            over.store(true, Ordering::Relaxed);
        });
        ends_whole(job);
    }
}

fn a_process_that_exits_after_the_last_collective_does_not_spoil_it() {
    for _ in 0..10 {
        for mut process in job(6, 3_600_000, &[(QUIT, "1".into())]) {
            assert!(process.child.wait().unwrap().success());
        }
    }
}

fn main() {
    if let Some(own) = number(RANK) {
        return rank(own as u32).unwrap();
    }
    let trial = |name: &str, run: fn()| {
        Trial::test(name, move || {
            run();
            Ok(())
        })
    };
    let trials = vec![
        trial(
            "time_in_which_all_ranks_stood_still_is_nobodys_silence",
            time_in_which_all_ranks_stood_still_is_nobodys_silence,
        ),
        trial("a_rank_that_waits_for_a_processor_is_not_lost", a_rank_that_waits_for_a_processor_is_not_lost),
        trial("a_killed_rank_is_named_to_all_at_once", a_killed_rank_is_named_to_all_at_once),
        trial(
            "a_stopped_rank_is_named_to_all_after_the_silence_and_learns_so_when_it_goes_on",
            a_stopped_rank_is_named_to_all_after_the_silence_and_learns_so_when_it_goes_on,
        ),
        trial(
            "a_process_that_exits_after_the_last_collective_does_not_spoil_it",
            a_process_that_exits_after_the_last_collective_does_not_spoil_it,
        ),
    ];
    libtest_mimic::run(&Arguments::from_args(), trials).exit();
}
