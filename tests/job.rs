// SPDX-License-Identifier: MIT OR Apache-2.0
//! `gin run` and `gin bench` as one rank of a job: processes that find each other by environment variables.

use serde_json::Value;
use std::net::TcpListener;
use std::process::{Child, Command, Output, Stdio};

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
    let run_of = "run alltoall --device virtual --threads 32 --bytes 64 --iters 2 --repeats 1 --metrics 0";
    let outputs = run(2, &format!("trace --output {} {run_of}", file.display()), &[]);
    for (rank, output) in outputs.iter().enumerate() {
        let err = text(&output.stderr);
        assert!(output.status.success(), "rank {rank}: {err}");
        assert!(err.contains("gin: metrics at http://127.0.0.1:") && err.contains(&format!("a.{rank}.json")), "{err}");
        let trace = std::fs::read(folder.path().join(format!("a.{rank}.json"))).unwrap();
        let trace: Value = serde_json::from_slice(&trace).unwrap();
        let spans = trace["traceEvents"].as_array().unwrap().iter().filter(|event| event["ph"] == "X");
        let requests: Vec<&Value> = spans.filter(|event| event["cat"] == "request").collect();
        assert!(requests.len() == 4 && requests.iter().all(|span| span["pid"] == rank), "{requests:?}");
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
fn the_benchmark_runs_across_processes_and_the_first_prints() {
    let options = "--device virtual --repeats 1 --deadline-ms 60000 --format json";
    for (ranks, what, titles) in [
        (2, "proxy", &["Proxy round trip"][..]),
        (2, "all", &["LSA round trip", "LSA barrier", "LSA round trip by size", "LSA put by size"]),
        (3, "lsa", &["LSA barrier"]),
    ] {
        let outputs = run(ranks, &format!("bench {what} {options}"), &[]);
        for output in &outputs {
            assert!(output.status.success(), "{what}: {}", text(&output.stderr));
        }
        assert!(outputs[1..].iter().all(|output| output.stdout.is_empty()), "{what}");
        let tables = text(&outputs[0].stdout);
        let tables: Vec<Value> = tables.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        for title in titles {
            let table = tables.iter().find(|table| table["title"] == *title).unwrap_or_else(|| panic!("{title}"));
            assert!(table["processes"] == true && table["ranks"] == ranks, "{table}");
            assert!(table["rows"].as_array().unwrap().iter().all(|row| row["wrong"] == 0), "{table}");
        }
    }
    for output in run(2, &format!("bench post {options}"), &[]) {
        assert_eq!(output.status.code(), Some(2));
        assert!(text(&output.stderr).contains("post: measured in one process only"), "{}", text(&output.stderr));
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
