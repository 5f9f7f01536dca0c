// SPDX-License-Identifier: MIT OR Apache-2.0
//! Ranks that are processes, and what the others learn when one is killed, stopped, or ends without a word.

use gin_host::boot::{Rendezvous, TcpBootstrap, TcpConfig, UniqueId};
use gin_host::comm::{Bootstrap, BootstrapError, LossCause};
use libtest_mimic::{Arguments, Trial};
use rustix::process::{Pid, Signal, kill_process};
use std::env;
use std::io::{BufRead, BufReader, Lines};
use std::net::Ipv4Addr;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::Duration;

const RANK: &str = "GIN_TEST_RANK";
const RANKS: &str = "GIN_TEST_RANKS";
const ID: &str = "GIN_TEST_ID";
const SILENCE_MS: &str = "GIN_TEST_SILENCE_MS";
const QUIT: &str = "GIN_TEST_QUIT";

fn number(name: &str) -> Option<u64> {
    env::var(name).ok()?.parse().ok()
}

/// One rank: joins, says so, and meets until that fails; then says what it learned.
fn rank(rank: u32) -> Result<(), BootstrapError> {
    let ranks = number(RANKS).unwrap() as u32;
    let config = TcpConfig {
        address: Some(Ipv4Addr::LOCALHOST.into()),
        joining: Duration::from_secs(60),
        meeting: Some(Duration::from_secs(60)),
        silence: Duration::from_millis(number(SILENCE_MS).unwrap()),
        ..TcpConfig::default()
    };
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
        // No destructor runs: nobody is told.
        std::process::exit(0);
    }
    println!("ready");
    let error = loop {
        if let Err(error) = bootstrap.barrier() {
            break error;
        }
        std::thread::sleep(Duration::from_millis(5));
    };
    let fault = channel.board().of(rank).map(|notice| (notice.fault.kind, notice.fault.peer, notice.fault.seen));
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
        let mut child = command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        Self { child, lines }
    }

    fn line(&mut self) -> String {
        self.lines.next().unwrap_or_else(|| panic!("it ended: {:?}", self.child.wait())).unwrap()
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
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

/// What ranks say of one that is lost: who, where, why.
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

fn a_stopped_rank_is_named_to_all_after_the_silence_and_told_so_when_it_goes_on() {
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

fn a_process_that_exits_after_the_last_meeting_does_not_spoil_it() {
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
        trial("a_killed_rank_is_named_to_all_at_once", a_killed_rank_is_named_to_all_at_once),
        trial(
            "a_stopped_rank_is_named_to_all_after_the_silence_and_told_so_when_it_goes_on",
            a_stopped_rank_is_named_to_all_after_the_silence_and_told_so_when_it_goes_on,
        ),
        trial(
            "a_process_that_exits_after_the_last_meeting_does_not_spoil_it",
            a_process_that_exits_after_the_last_meeting_does_not_spoil_it,
        ),
    ];
    libtest_mimic::run(&Arguments::from_args(), trials).exit();
}
