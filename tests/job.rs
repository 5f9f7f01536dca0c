// SPDX-License-Identifier: MIT OR Apache-2.0
//! `gin run` as one rank of a job: processes that find each other by environment variables.

use gin_boot::{Job, TcpConfig};
use gin_device::prelude::*;
use gin_gpu::LaunchConfig;
use gin_host::comm::{CommError, Requirements, Routes};
use gin_host::world::{self, WorldConfig};
use rustix::process::{Pid, Signal, kill_process, kill_process_group};
use serde_json::Value;
use std::io::{BufRead, BufReader};
use std::net::TcpListener;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, Output, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Returns a port that was free a moment ago.
fn port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

/// Starts one rank without a visible GPU.
fn start(arguments: &str, variables: &[(&str, String)]) -> Child {
    let mut command = Command::new(env!("CARGO_BIN_EXE_gin"));
    command.env("CUDA_VISIBLE_DEVICES", "").env_remove("GIN_PROXY_CPUS");
    command.envs(variables.iter().map(|(name, value)| (name, value)));
    command.args(arguments.split_whitespace()).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command.spawn().unwrap_or_else(|error| panic!("gin {arguments}: {error}"))
}

/// Runs the same command on all ranks of a job, and returns their outputs.
fn run(ranks: u32, arguments: &str, more: &[(&str, &str)]) -> Vec<Output> {
    let port = port();
    let children: Vec<Child> = (0..ranks)
        .map(|rank| {
            let mut variables = vec![
                ("GIN_RANK", rank.to_string()),
                ("GIN_RANKS", ranks.to_string()),
                ("GIN_LOCAL_RANK", rank.to_string()),
                ("GIN_LOCAL_RANKS", ranks.to_string()),
                ("GIN_ADDR", "127.0.0.1".to_owned()),
                ("GIN_PORT", port.to_string()),
            ];
            variables.extend(more.iter().map(|(name, value)| (*name, (*value).to_owned())));
            start(arguments, &variables)
        })
        .collect();
    children.into_iter().map(|child| child.wait_with_output().unwrap()).collect()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[test]
fn every_workload_runs_across_processes_and_the_first_prints() {
    for (workload, route) in [("ring", "auto"), ("alltoall", "network"), ("halo", "auto"), ("moe", "auto")] {
        let arguments = format!(
            "run {workload} --device virtual --route {route} --threads 32 --bytes 1KiB --iters 3 --repeats 2 --format json"
        );
        let outputs = run(3, &arguments, &[]);
        for (rank, output) in outputs.iter().enumerate() {
            assert!(output.status.success(), "rank {rank} of {workload}: {}\n{}", output.status, text(&output.stderr));
            assert_eq!(text(&output.stderr), "", "rank {rank} of {workload}");
            assert_eq!(output.stdout.is_empty(), rank > 0, "rank {rank} of {workload}");
        }
        let report: Value = serde_json::from_slice(&outputs[0].stdout).unwrap();
        let expected = if route == "auto" { "lsa" } else { "network" };
        assert_eq!((&report["ranks"], &report["verified"]), (&Value::from(3), &Value::from(true)), "{report}");
        assert_eq!((&report["route"], &report["mode"]), (&Value::from(expected), &Value::from("threads")), "{report}");
    }
}

#[test]
fn each_process_writes_a_trace_of_its_own_and_serves_metrics_at_a_port_of_its_own() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("a.json");
    // The system chooses ports that are free; a fixed one and the next may be in use.
    let run_of = "run alltoall --device virtual --blocks 1 -w 0 --bytes 64 --iters 2 --repeats 1 --metrics 0";
    let outputs = run(2, &format!("trace --output {} {run_of}", file.display()), &[]);
    for (rank, output) in outputs.iter().enumerate() {
        let err = text(&output.stderr);
        assert!(output.status.success(), "rank {rank}: {err}");
        assert!(err.contains("gin: metrics at http://127.0.0.1:") && err.contains(&format!("a.{rank}.json")), "{err}");
        let trace = std::fs::read(folder.path().join(format!("a.{rank}.json"))).unwrap();
        let trace: Value = serde_json::from_slice(&trace).unwrap();
        let spans = trace["traceEvents"].as_array().unwrap().iter().filter(|event| event["ph"] == "X");
        let requests: Vec<&Value> = spans.filter(|event| event["cat"] == "request").collect();
        assert!(requests.len() == 2 && requests.iter().all(|span| span["pid"] == rank), "{requests:?}");
    }
}

#[test]
fn options_that_a_job_cannot_have_are_refused_by_every_rank() {
    for (options, word) in [("--ranks 5", "has 2"), ("--mode seeded", "processes"), ("--backend gdaki", "processes")] {
        let outputs = run(2, &format!("run ring --device virtual {options}"), &[]);
        for output in outputs {
            assert_eq!(output.status.code(), Some(2), "{options}: {}", text(&output.stderr));
            assert!(text(&output.stderr).contains(word), "{options}: {}", text(&output.stderr));
        }
    }
}

#[test]
fn invalid_variables_are_named() {
    let child = start("run ring --device virtual", &[("GIN_RANK", "2".to_owned()), ("GIN_RANKS", "2".to_owned())]);
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    assert!(text(&output.stderr).contains("GIN_RANK"), "{}", text(&output.stderr));
}

#[test]
fn a_job_continues_without_a_rank_that_was_killed() {
    let options = "--device virtual --threads 32 --bytes 4KiB --iters 5 --repeats 1 --format json";
    for (workload, route) in [("alltoall", "network"), ("ring", "auto"), ("moe", "auto")] {
        let arguments = format!("run {workload} --ranks 4 --kill-rank 2 --shrink --route {route} {options}");
        let output = start(&arguments, &[]).wait_with_output().unwrap();
        let (out, err) = (text(&output.stdout), text(&output.stderr));
        assert!(output.status.success(), "{}\n{out}{err}", output.status);
        let reports: Vec<Value> = out.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        let ranks: Vec<_> = reports.iter().map(|report| (&report["ranks"], &report["verified"])).collect();
        let (four, three, yes) = (Value::from(4), Value::from(3), Value::from(true));
        assert_eq!(ranks, [(&four, &yes), (&three, &yes)], "{out}");
        assert!(err.contains("rank 2 ended by signal 9"), "{err}");
        let lost = " is lost: its connection was closed, as when a process ends (found by rank ";
        let lost = err.lines().find(|line| line.contains("WARN gin_boot::io: rank 2 on host ") && line.contains(lost));
        assert!(lost.is_some_and(|line| line.ends_with("; the output of rank 2 may have the reason")), "{err}");
        for rank in [0, 1, 3] {
            let line = err.lines().find(|line| line.contains(&format!("gin: rank {rank} learned")));
            assert!(line.is_some_and(|line| line.contains("rank 2")), "{err}");
        }
    }
    let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
    let arguments = format!("run alltoall --ranks 4 --stop-rank 2 --shrink --route network {options}");
    let output = start(&arguments, &[("GIN_SILENCE_MS", "2000".to_owned())]).wait_with_output().unwrap();
    let (out, err) = (text(&output.stdout), text(&output.stderr));
    assert!(output.status.success(), "{}\n{out}{err}", output.status);
    assert_eq!(out.lines().count(), 2, "{out}");
    // The stopped rank learns of the fault too, and its last line reaches the reader.
    for rank in 0..4 {
        let line = err.lines().find(|line| line.contains(&format!("gin: rank {rank} learned")));
        let lost = format!("rank 2 on host {host}");
        assert!(line.is_some_and(|line| line.contains(&lost) && line.contains("for 2000 ms")), "{err}");
    }
    assert!(err.contains("rank 2 ended with status 3; the others go on"), "{err}");
    let output = start(&format!("run ring --ranks 3 --kill-rank 1 {options}"), &[]).wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(3), "{}", text(&output.stderr));
    assert!(text(&output.stderr).contains("--shrink"), "{}", text(&output.stderr));
    for arguments in ["--ranks 3 --kill-rank 3", "--ranks 1 --kill-rank 0", "--ranks 3 --stop-rank 3", "--shrink"] {
        let output = start(&format!("run ring {arguments}"), &[]).wait_with_output().unwrap();
        assert_eq!(output.status.code(), Some(2), "{}", text(&output.stderr));
    }
}

#[test]
fn a_job_continues_with_a_new_process_in_the_place_of_a_rank_that_was_killed() {
    let options = "--device virtual --threads 32 --bytes 4KiB --iters 5 --repeats 1 --format json";
    for (workload, route) in [("alltoall", "network"), ("moe", "auto")] {
        let arguments = format!("run {workload} --ranks 4 --kill-rank 2 --replace --route {route} {options}");
        let output = start(&arguments, &[("GIN_JOIN", "1".to_owned())]).wait_with_output().unwrap();
        let (out, err) = (text(&output.stdout), text(&output.stderr));
        assert!(output.status.success(), "{}\n{out}{err}", output.status);
        let reports: Vec<Value> = out.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        let ranks: Vec<_> = reports.iter().map(|report| (&report["ranks"], &report["verified"])).collect();
        let all = (&Value::from(4), &Value::from(true));
        assert_eq!(ranks, [all, all], "{out}");
        assert!(err.contains("gin: rank 2 ended by signal 9; a new process takes its place"), "{err}");
        assert!([0, 1, 3].iter().all(|rank| err.contains(&format!("gin: rank {rank} learned"))), "{err}");
    }
    // A new process is not replaced again.
    let program = "launch -n 2 --may-lose 1 --replace -- sh -c";
    let mut command = Command::new(env!("CARGO_BIN_EXE_gin"));
    let output = command.args(program.split(' ')).arg("exit $((GIN_RANK * (5 + GIN_JOIN)))").output().unwrap();
    let err = text(&output.stderr);
    assert_eq!(output.status.code(), Some(6), "{err}");
    assert_eq!(err.matches("rank 1 ended with status").count(), 2, "{err}");
    for arguments in [
        "run ring --ranks 3 --kill-rank 0 --replace",
        "run ring --ranks 3 --stop-rank 1 --replace",
        "run ring --ranks 3 --kill-rank 1 --shrink --replace",
        "launch -n 2 --may-lose 0 --replace -- true",
        "launch -n 2 --replace -- true",
    ] {
        let output = start(arguments, &[]).wait_with_output().unwrap();
        assert_eq!(output.status.code(), Some(2), "{arguments}: {}", text(&output.stderr));
        assert!(text(&output.stderr).contains("--replace"), "{arguments}: {}", text(&output.stderr));
    }
}

/// Variables of a process of this program: how it ends, and the routes of its communicator.
const WAY: &str = "GIN_JOB_TEST_WAY";
const ROUTES: &str = "GIN_JOB_TEST_ROUTES";

/// Ways in which a process ends while its kernel runs, with the status or the signal that its parent sees.
const WAYS: [(&str, Result<i32, i32>); 6] = [
    ("returns", Ok(0)),
    ("exits", Ok(7)),
    ("exits by another thread", Ok(7)),
    ("exits at once", Ok(7)),
    ("aborts", Err(libc::SIGABRT)),
    ("panics", Ok(101)),
];

/// Waits for a signal that nobody raises.
///
/// # Safety
/// - None.
#[kernel]
pub unsafe fn job_test_wait(comm: Comm) {
    let gin = Gin::new(&comm, ContextId::new(0));
    if let Err(fault) = gin.wait_signal(&Block, SignalId::new(0), 1, Deadline::NONE) {
        comm.report(fault);
    }
}

/// Runs a rank that ends as its variables say, in a process that a test below starts. Without them it does nothing.
#[test]
fn process() {
    let [Ok(way), Ok(routes)] = [WAY, ROUTES].map(std::env::var) else { return };
    let job = Job::from_env().unwrap().unwrap();
    let bootstrap = Arc::new(job.bootstrap(TcpConfig::default()).unwrap());
    let routes = if routes == "network" { Routes::Network } else { Routes::Automatic };
    let world = WorldConfig::threads(job.ranks()).routes(routes);
    let outcome = world::join(world, bootstrap, |rank| -> Result<(), CommError> {
        let comm = rank.communicator(&Requirements::default())?;
        let (stream, device) = (rank.stream()?, comm.device()?);
        // Safety: the kernel has no conditions, and a communicator that is dropped ends it.
        unsafe { job_test_wait::launch(&*stream, LaunchConfig::new(2, 64), &device)? };
        // A line of the test's harness may have been begun.
        println!("\nruns {}", std::process::id());
        match &*way {
            "waits" => stream.synchronize()?,
            "exits" => std::process::exit(7),
            "exits by another thread" => drop(std::thread::spawn(|| std::process::exit(7)).join()),
            // Safety: ends the process without destructors.
            "exits at once" => unsafe { libc::_exit(7) },
            "aborts" => std::process::abort(),
            "panics" => panic!("requested by a test"),
            "one fails" if job.rank() == 2 => eprintln!("Error: no row for expert 9"),
            "one fails" => {
                stream.synchronize()?;
                comm.check("wait")?;
            }
            _ => {}
        }
        Ok(())
    });
    outcome.unwrap();
    if way == "one fails" {
        // The other ranks end before this one.
        std::thread::sleep(Duration::from_secs(600));
    }
}

/// Returns the arguments by which this program is a rank.
fn rank_program() -> [String; 4] {
    let program = std::env::current_exe().unwrap().to_str().unwrap().to_owned();
    [program, "process".to_owned(), "--exact".to_owned(), "--nocapture".to_owned()]
}

#[test]
fn a_process_may_end_in_any_way_while_its_kernel_runs() {
    for (way, expected) in WAYS {
        for routes in ["automatic", "network"] {
            for _ in 0..3 {
                let [program, arguments @ ..] = rank_program();
                let mut command = Command::new(program);
                command.args(arguments).env(WAY, way).env(ROUTES, routes).stdin(Stdio::null());
                let port = port().to_string();
                let variables =
                    [("GIN_RANK", "0"), ("GIN_RANKS", "1"), ("GIN_LOCAL_RANK", "0"), ("GIN_LOCAL_RANKS", "1")];
                command.envs(variables).env("GIN_PORT", &port);
                let output = command.output().unwrap();
                let (out, err) = (text(&output.stdout), text(&output.stderr));
                let seen = output.status.code().ok_or(output.status.signal().unwrap_or_default());
                assert_eq!(seen, expected, "{way}, {routes}: {out}{err}");
                assert!(out.contains("\nruns "), "{way}, {routes}: {out}{err}");
                assert_eq!(err.contains("panicked"), way == "panics", "{way}, {routes}: {err}");
            }
        }
    }
}

/// Returns whether a process has ended. One that was not yet waited for has.
fn has_ended(process: i32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{process}/stat"));
    stat.map_or(true, |stat| stat.contains(") Z ") || stat.contains(") X "))
}

#[test]
fn ctrl_c_and_a_killed_launcher_end_ranks_whose_kernels_run() {
    for is_killed in [false, true] {
        for routes in ["automatic", "network"] {
            let mut command = Command::new(env!("CARGO_BIN_EXE_gin"));
            command.args(["launch", "-n", "3", "--"]).args(rank_program()).env(WAY, "waits").env(ROUTES, routes);
            // As a shell does for a job in the foreground.
            command.process_group(0).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
            let mut launcher = command.spawn().unwrap();
            let lines = BufReader::new(launcher.stdout.take().unwrap()).lines().map_while(Result::ok);
            let ranks = lines.filter_map(|line| line.split_once("] runs ").map(|(_, number)| number.parse().unwrap()));
            let ranks: Vec<i32> = ranks.take(3).collect();
            assert_eq!(ranks.len(), 3, "{routes}");
            if is_killed {
                kill_process(Pid::from_child(&launcher), Signal::KILL).unwrap();
            } else {
                kill_process_group(Pid::from_child(&launcher), Signal::INT).unwrap();
            }
            let status = launcher.wait().unwrap();
            assert_eq!((status.code(), status.signal()), if is_killed { (None, Some(9)) } else { (Some(130), None) });
            let start = Instant::now();
            while !ranks.iter().copied().all(has_ended) {
                assert!(start.elapsed() < Duration::from_secs(60), "{routes}, killed: {is_killed}: a rank stays");
                std::thread::sleep(Duration::from_millis(5));
            }
        }
    }
}

#[test]
fn the_launcher_names_the_rank_whose_failure_ended_the_others() {
    let mut command = Command::new(env!("CARGO_BIN_EXE_gin"));
    command.args(["launch", "-n", "3", "--"]).args(rank_program()).env(WAY, "one fails").env(ROUTES, "automatic");
    let output = command.stdin(Stdio::null()).output().unwrap();
    let err = text(&output.stderr);
    assert_eq!(output.status.code(), Some(101), "{err}");
    let last = err.lines().last().unwrap();
    let (first, cause) = last.split_once(" ended because of ").unwrap_or_else(|| panic!("{err}"));
    assert!(["gin: rank 0", "gin: rank 1"].contains(&first), "{err}");
    let expected = "rank 2, which ended by signal 15 when gin asked it to end: Error: no row for expert 9";
    assert_eq!(cause, expected, "{err}");
}

/// Forbids the calls by which a process looks into another one.
fn forbid_looks_into_processes() -> std::io::Result<()> {
    let load = libc::BPF_LD | libc::BPF_W | libc::BPF_ABS;
    let [equals, returns] = [libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, libc::BPF_RET | libc::BPF_K];
    let instruction = |code: u32, jt: u8, jf: u8, k: u32| libc::sock_filter { code: code as u16, jt, jf, k };
    let calls = [
        libc::SYS_ptrace,
        libc::SYS_pidfd_open,
        libc::SYS_pidfd_getfd,
        libc::SYS_pidfd_send_signal,
        libc::SYS_process_vm_readv,
        libc::SYS_process_vm_writev,
    ];
    let mut filter = vec![instruction(load, 0, 0, 0)];
    filter.extend(
        calls.iter().zip((1..=calls.len() as u8).rev()).map(|(&call, left)| instruction(equals, left, 0, call as u32)),
    );
    filter.push(instruction(returns, 0, 0, libc::SECCOMP_RET_ALLOW));
    filter.push(instruction(returns, 0, 0, libc::SECCOMP_RET_ERRNO | libc::EPERM as u32));
    let program = libc::sock_fprog { len: filter.len() as u16, filter: filter.as_mut_ptr() };
    // Safety: the program is one for the length of the calls.
    let is_forbidden = unsafe {
        libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
            && libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const program) == 0
            && libc::syscall(libc::SYS_pidfd_open, libc::getpid(), 0) == -1
    };
    let error = std::io::Error::last_os_error();
    if is_forbidden && error.raw_os_error() == Some(libc::EPERM) { Ok(()) } else { Err(error) }
}

#[test]
fn a_job_runs_where_the_system_grants_little() {
    let gin = env!("CARGO_BIN_EXE_gin");
    let few = "ulimit -n 64; umask 077; unset HOME TMPDIR; exec \"$@\"";
    // Nobody writes to a file system that is mounted for reading only.
    let elsewhere = "echo elsewhere >/proc/sys/kernel/hostname && mount -t tmpfs -o ro none /dev/shm && exec \"$@\"";
    let namespaces = ["unshare", "--user", "--map-root-user", "--mount", "--uts"];
    let tried = Command::new(namespaces[0]).args(&namespaces[1..]).args(["sh", "-c", elsewhere, "sh", "true"]).output();
    let has_namespaces = tried.as_ref().is_ok_and(|tried| tried.status.success());
    if !has_namespaces {
        println!("skipped: no other host name, no /dev/shm: {tried:?}");
    }
    let shell = |script: &'static str| ["sh", "-c", script, "sh"];
    for (what, before) in [
        ("64 descriptors, no HOME, no TMPDIR, umask 077", shell(few).to_vec()),
        ("another host name, no /dev/shm", [&namespaces[..], &shell(elsewhere)].concat()),
        ("pidfd and ptrace forbidden", Vec::new()),
    ] {
        if before.len() > 4 && !has_namespaces {
            continue;
        }
        for route in ["auto", "network"] {
            let mut words = before.clone();
            words.extend([gin, "launch", "-n", "3", "--", gin, "run", "alltoall", "--device", "virtual", "--route"]);
            words.extend([route, "--threads", "32", "--bytes", "1KiB", "--iters", "3", "--repeats", "1"]);
            words.extend(["--format", "json"]);
            let mut command = Command::new(words[0]);
            command.args(&words[1..]).env("CUDA_VISIBLE_DEVICES", "").stdin(Stdio::null());
            if before.is_empty() {
                // Safety: the function makes system calls alone, but for the memory of its list.
                unsafe { command.pre_exec(forbid_looks_into_processes) };
            }
            let output = command.output().unwrap();
            let (out, err) = (text(&output.stdout), text(&output.stderr));
            assert!(output.status.success(), "{what}, {route}: {}\n{out}{err}", output.status);
            let report: Value =
                serde_json::from_str(&out).unwrap_or_else(|error| panic!("{what}: {error}: {out}{err}"));
            assert_eq!((&report["ranks"], &report["verified"]), (&Value::from(3), &Value::from(true)), "{what}");
        }
    }
}
