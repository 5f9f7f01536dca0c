// SPDX-License-Identifier: MIT OR Apache-2.0
//! `gin run` as a job of two hosts. The command runs in two virtual machines and is started as a user starts it, with
//! variables and a secret. Only if `GIN_RDMA_HOSTS` is set, because the machines take a while to boot
//! (`scripts/soft-roce.sh`).

#[path = "../gin-host/tests/common/machines.rs"]
mod machines;

use libtest_mimic::{Arguments, Completion, Failed, Trial};
use machines::{MARK, Machines, run_trials};
use serde_json::Value;
use std::path::Path;
use std::process::ExitCode;
use std::time::{Duration, Instant};

/// Time limit of a job. A job that does not hang takes far less.
const LIMIT: Duration = Duration::from_secs(180);

/// Common arguments of all commands: little work, as the machines are slow.
const COMMON: &str = "--device virtual --threads 32 --repeats 2 --iters 5 --bytes 4KiB --format json";

type Body = fn(&mut Hosts) -> Result<(), Failed>;

const TRIALS: &[(&str, Body)] = &[
    ("hosts/every_workload_runs_and_the_first_rank_prints", every_workload),
    ("hosts/with_several_ranks_on_each_those_of_a_host_take_loads_and_stores", both_routes),
    ("hosts/a_job_continues_without_a_rank_that_was_killed", shrink),
    ("hosts/a_network_that_does_not_reach_is_refused_by_every_rank", no_peer),
    ("hosts/ranks_of_one_host_take_nics_if_asked_to", one_host),
    ("hosts/a_rank_without_a_device_says_what_to_do_and_the_others_do_not_wait", no_device),
];

/// Two machines, each with one RDMA device.
struct Hosts {
    machines: Machines,
    jobs: u16,
}

/// Output and exit status of a rank's command.
#[derive(Default, Debug)]
struct Output {
    code: i32,
    out: Vec<String>,
    err: Vec<String>,
}

impl Output {
    /// Parses the reports that the rank printed.
    fn reports(&self) -> Result<Vec<Value>, Failed> {
        self.out
            .iter()
            .map(|line| serde_json::from_str(line).map_err(|error| format!("{error}: {line}").into()))
            .collect()
    }
}

impl Hosts {
    fn boot() -> Result<Self, Failed> {
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("scripts/soft-roce.sh");
        let options = ["--with", env!("CARGO_BIN_EXE_gin")];
        let mut machines = Machines::boot(&script, &options, Duration::from_secs(1500))?;
        // Leaves one device, as on a host with one NIC.
        machines.tell_both("for device in rxe0 rxe1 rxe2; do rdma link delete $device; done")?;
        machines.tell_both("umask 077; echo 0123456789abcdef0123456789abcdef > /secret")?;
        Ok(Self { machines, jobs: 0 })
    }

    /// Runs the same command as ranks on these machines, and returns the output of each.
    fn run(&mut self, places: &[usize], arguments: &str) -> Result<Vec<Output>, Failed> {
        self.jobs += 1;
        let (ranks, port) = (places.len(), 4242 + self.jobs);
        let mut lines = Vec::new();
        for (rank, &machine) in places.iter().enumerate() {
            lines.push(self.machines.listen(machine, rank as u32));
            let variables =
                format!("GIN_RANK={rank} GIN_RANKS={ranks} GIN_ADDR=10.8.0.1 GIN_PORT={port} GIN_SECRET_FILE=/secret");
            self.machines.tell(machine, &reported(rank, &format!("{variables} /bin/gin {arguments}")))?;
        }
        lines.iter().enumerate().map(|(rank, lines)| outcome(rank, lines)).collect()
    }

    /// Runs a command on the first machine.
    fn run_here(&mut self, command: &str) -> Result<Output, Failed> {
        let lines = self.machines.listen(0, 0);
        self.machines.tell(0, &reported(0, command))?;
        outcome(0, &lines)
    }
}

/// Returns a shell command that runs `command` in the background and reports its output and status under a number.
fn reported(number: usize, command: &str) -> String {
    let (out, err) = (format!("/tmp/out{number}"), format!("/tmp/err{number}"));
    format!(
        "({command} >{out} 2>{err}; code=$?; sed 's/^/{MARK}{number} out /' {out}; sed 's/^/{MARK}{number} err /' {err}; \
         echo \"{MARK}{number} code $code\") &"
    )
}

fn outcome(rank: usize, lines: &machines::Lines) -> Result<Output, Failed> {
    let (mut output, until) = (Output::default(), Instant::now() + LIMIT);
    loop {
        let left = until.saturating_duration_since(Instant::now());
        let (_, line) = lines.recv_timeout(left).map_err(|_| format!("rank {rank} has not ended: {output:?}"))?;
        match line.split_once(' ').unwrap_or((&line, "")) {
            ("out", text) => output.out.push(text.to_owned()),
            ("err", text) => output.err.push(text.to_owned()),
            ("code", code) => {
                output.code = code.parse()?;
                return Ok(output);
            }
            _ => {}
        }
    }
}

fn ensure(holds: bool, why: impl FnOnce() -> String) -> Result<(), Failed> {
    if holds { Ok(()) } else { Err(why().into()) }
}

/// Returns the reports of a job in which every rank succeeded. Only the first rank prints them.
fn verified(outputs: &[Output], route: &str) -> Result<Vec<Value>, Failed> {
    for (rank, output) in outputs.iter().enumerate() {
        ensure(output.code == 0, || format!("rank {rank}: {output:?}"))?;
        ensure(rank == 0 || output.out.is_empty(), || format!("rank {rank}: {output:?}"))?;
    }
    let reports = outputs[0].reports()?;
    for report in &reports {
        let right = report["verified"] == true && report["network"] == "verbs" && report["route"] == route;
        ensure(right, || report.to_string())?;
        println!("{report}");
    }
    Ok(reports)
}

fn every_workload(hosts: &mut Hosts) -> Result<(), Failed> {
    for workload in ["ring", "alltoall", "halo", "moe"] {
        let outputs = hosts.run(&[0, 1], &format!("run {workload} {COMMON}"))?;
        let reports = verified(&outputs, "network")?;
        ensure(reports.len() == 1 && reports[0]["ranks"] == 2, || format!("{reports:?}"))?;
    }
    Ok(())
}

fn both_routes(hosts: &mut Hosts) -> Result<(), Failed> {
    for workload in ["ring", "alltoall", "moe"] {
        let outputs = hosts.run(&[0, 0, 1, 1], &format!("run {workload} --route auto {COMMON}"))?;
        let reports = verified(&outputs, "both")?;
        ensure(reports.len() == 1 && reports[0]["ranks"] == 4, || format!("{reports:?}"))?;
    }
    Ok(())
}

fn shrink(hosts: &mut Hosts) -> Result<(), Failed> {
    // The killed rank is the first on its host, so its neighbour's local rank changes. The remaining ranks are on two
    // hosts.
    let outputs = hosts.run(&[0, 1, 1], &format!("run alltoall --kill-rank 1 --shrink {COMMON}"))?;
    ensure(outputs[1].code == 137, || format!("{:?}", outputs[1]))?;
    let left = outputs.into_iter().enumerate().filter(|(rank, _)| *rank != 1).map(|(_, output)| output);
    let left: Vec<Output> = left.collect();
    for output in &left {
        ensure(output.err.iter().any(|line| line.contains("learned after")), || format!("{output:?}"))?;
    }
    let ranks: Vec<Value> = verified(&left, "network")?.iter().map(|report| report["ranks"].clone()).collect();
    ensure(ranks == [3, 2], || format!("{ranks:?}"))
}

fn no_peer(hosts: &mut Hosts) -> Result<(), Failed> {
    for output in hosts.run(&[0, 1], &format!("run ring --network peer {COMMON}"))? {
        let named = output.err.iter().any(|line| line.contains("--network verbs"));
        ensure(output.code == 2 && named, || format!("{output:?}"))?;
    }
    Ok(())
}

fn one_host(hosts: &mut Hosts) -> Result<(), Failed> {
    let output = hosts.run_here(&format!("/bin/gin launch -n 2 -- /bin/gin run ring --network verbs {COMMON}"))?;
    verified(&[output], "network")?;
    let output = hosts.run_here(&format!("/bin/gin run alltoall --ranks 2 --network verbs {COMMON}"))?;
    let reports = verified(&[output], "network")?;
    ensure(reports[0]["mode"] == "threads", || format!("{reports:?}"))
}

fn no_device(hosts: &mut Hosts) -> Result<(), Failed> {
    hosts.machines.tell(1, "rdma link delete rxe3")?;
    let outputs = hosts.run(&[0, 1], &format!("run ring {COMMON}"))?;
    hosts.machines.tell(1, "rdma link add rxe3 type rxe netdev eth0")?;
    let named = outputs[1].err.iter().any(|line| line.contains("no RDMA device") && line.contains("--network"));
    ensure(outputs[1].code == 2 && named, || format!("{outputs:?}"))?;
    let named = outputs[0].err.iter().any(|line| line.contains("rank 1"));
    ensure(outputs[0].code == 3 && named, || format!("{outputs:?}"))
}

fn main() -> ExitCode {
    let arguments = Arguments { test_threads: Some(1), ..Arguments::from_args() };
    if std::env::var_os("GIN_RDMA_HOSTS").is_none() {
        let ignored = || Ok(Completion::ignored_with("GIN_RDMA_HOSTS is not set"));
        return libtest_mimic::run(&arguments, vec![Trial::ignorable_test("rdma", ignored)]).exit_code();
    }
    run_trials(&arguments, Hosts::boot, TRIALS)
}
