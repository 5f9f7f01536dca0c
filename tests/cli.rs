// SPDX-License-Identifier: MIT OR Apache-2.0
//! The command as a user runs it.

use serde_json::Value;
use std::process::{Command, Output, Stdio};

/// Runs the command without a visible GPU: its behaviour on virtual GPUs is the same on every machine.
fn gin(arguments: &str) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_gin"));
    command.env("CUDA_VISIBLE_DEVICES", "").env_remove("GIN_PROXY_CPUS");
    command.args(arguments.split_whitespace()).stdin(Stdio::null());
    command.output().unwrap_or_else(|error| panic!("gin {arguments}: {error}"))
}

fn out(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).unwrap()
}

fn err(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).unwrap()
}

/// Runs the command and expects success, with nothing on standard error.
fn succeeds(arguments: &str) -> String {
    let output = gin(arguments);
    assert!(output.status.success(), "gin {arguments}: {}\n{}{}", output.status, out(&output), err(&output));
    assert_eq!(err(&output), "", "gin {arguments}");
    out(&output)
}

/// Runs the command with JSON output and returns the objects.
fn json(arguments: &str) -> Vec<Value> {
    let text = succeeds(&format!("{arguments} --format json"));
    text.lines().map(|line| serde_json::from_str(line).unwrap_or_else(|error| panic!("{line}: {error}"))).collect()
}

/// Expects one verified run with these figures.
fn verified(arguments: &str) {
    let [report] = json(arguments).try_into().unwrap_or_else(|all| panic!("{all:?}"));
    assert_eq!(report["verified"], true, "gin {arguments}: {report}");
    assert_eq!(report["errors"], 0);
    assert_eq!(report["first_difference"], Value::Null);
    assert!(report["time_us_median"].as_f64().is_some_and(|time| time > 0.0), "{report}");
}

/// Expects that the arguments are refused, with all of `words` in the reason and nothing printed as a result.
fn refused(arguments: &str, words: &[&str]) {
    let output = gin(arguments);
    let text = err(&output);
    assert_eq!(output.status.code(), Some(2), "gin {arguments}: {text}");
    assert_eq!(out(&output), "", "gin {arguments}");
    for word in words {
        assert!(text.contains(word), "gin {arguments}: expected {word:?} in {text:?}");
    }
    assert!(!text.contains("panicked"), "{text}");
}

/// Small and quick, in both modes.
const SMALL: &str = "--device virtual --ranks 3 --blocks 2 --threads 32 --iters 3 --repeats 1";

#[test]
fn every_workload_is_verified_in_the_seeded_and_in_the_threads_mode() {
    for workload in ["ring", "alltoall", "halo"] {
        verified(&format!("run {workload} {SMALL} --bytes 1KiB --mode seeded"));
        verified(&format!("run {workload} {SMALL} --bytes 1KiB --mode threads"));
    }
}

#[test]
fn the_workloads_have_no_data_races_in_any_way_of_their_requests() {
    let options = "--device virtual --mode seeded --ranks 3 --bytes 1KiB --iters 5 --repeats 2 --contexts 2";
    for workload in ["ring", "alltoall", "halo"] {
        for way in ["--route network", "--route lsa", "--backend gdaki"] {
            for seed in 1..=4 {
                let arguments = format!("run {workload} {options} {way} --seed {seed}");
                let mut command = Command::new(env!("CARGO_BIN_EXE_gin"));
                command.env("CUDA_VISIBLE_DEVICES", "").env("GIN_RACES", "1").stdin(Stdio::null());
                let output = command.args(arguments.split(' ')).output().unwrap();
                assert!(output.status.success(), "gin {arguments}: {}", err(&output));
            }
        }
    }
}

#[test]
fn statistics_count_the_requests_of_each_rank_to_each_peer() {
    let [report] = json(&format!("run alltoall {SMALL} --bytes 100 --contexts 1 --stats")).try_into().unwrap();
    let stats = report["stats"].as_array().unwrap();
    assert_eq!(stats.len(), 9, "{stats:?}");
    for (place, row) in stats.iter().enumerate() {
        assert_eq!((&row["rank"], &row["peer"]), (&Value::from(place / 3), &Value::from(place % 3)), "{row}");
        for (name, value) in [("puts", 3), ("put_bytes", 300), ("signals", 3), ("finished", 3), ("failed", 0)] {
            assert_eq!(row[name], value, "{name} of {row}");
        }
    }
    let text = succeeds(&format!("run alltoall {SMALL} --bytes 100 --stats"));
    let sums = text.lines().find(|line| line.starts_with("all ")).unwrap();
    assert!(sums.contains(" 2700 "), "the sum of all bytes: {text}");
    let [report] = json(&format!("run alltoall {SMALL} --backend gdaki --stats")).try_into().unwrap();
    let entries: Vec<_> = report["stats"].as_array().unwrap().iter().map(|row| row["accepted"].as_u64()).collect();
    assert!(entries.len() == 9 && entries.iter().all(|entries| *entries > Some(0)), "{entries:?}");
    let [report] = json(&format!("run alltoall {SMALL}")).try_into().unwrap();
    assert_eq!(report["stats"], Value::Null);
}

#[test]
fn logs_are_written_if_asked_for_and_an_unknown_level_is_refused() {
    let with = |level: &str| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_gin"));
        command.env("CUDA_VISIBLE_DEVICES", "").env("GIN_LOG", level).stdin(Stdio::null());
        command.args(format!("run ring {SMALL} --format json").split_whitespace()).output().unwrap()
    };
    let log = with("gin_host::comm=debug");
    let text = err(&log);
    for words in ["communicator is up", "backend=Proxy", "call=\"destroy\" rank=2", "close"] {
        assert!(text.contains(words), "expected {words:?} in {text}");
    }
    assert_eq!(out(&log).lines().count(), 1, "standard output has the result only");
    assert_eq!(err(&with("warn")), "");
    let refused = with("loud=very");
    assert_eq!(refused.status.code(), Some(2));
    assert!(err(&refused).contains("GIN_LOG=loud=very") && err(&refused).contains("debug"), "{}", err(&refused));
}

#[test]
fn a_run_in_json_is_one_object_on_one_line_with_the_promised_keys() {
    let [report] = json(&format!("run halo {SMALL} --bytes 64")).try_into().unwrap();
    let expected = [
        ("workload", Value::from("halo")),
        ("device", "virtual".into()),
        ("backend", "proxy".into()),
        ("ranks", 3.into()),
        ("bytes", 64.into()),
        ("iters", 3.into()),
        ("verified", true.into()),
        ("errors", 0.into()),
    ];
    for (key, value) in expected {
        assert_eq!(report[key], value, "{key}");
    }
    assert!(report["time_us_median"].is_f64());
}

#[test]
fn a_run_shows_times_and_the_bandwidth_of_nccl_tests() {
    let [report] = json(&format!("run alltoall {SMALL} --bytes 1000")).try_into().unwrap();
    let figure = |name: &str| report[name].as_f64().unwrap_or_else(|| panic!("{name}: {report}"));
    let [min, median, p99] = ["time_us_min", "time_us_median", "time_us_p99"].map(figure);
    assert!(min > 0.0 && min <= median && median <= p99, "{report}");
    // Three blocks of 1000 bytes, of which two leave the rank.
    let algorithm = 3000.0 / median * 1e-3;
    assert!((figure("algorithm_gb_s") / algorithm - 1.0).abs() < 1e-9, "{report}");
    assert!((figure("bus_gb_s") / figure("algorithm_gb_s") - 2.0 / 3.0).abs() < 1e-9, "{report}");
    let table = succeeds(&format!("run alltoall {SMALL} --bytes 1000"));
    for heading in ["time/iteration", "min", "p99", "algbw GB/s", "busbw GB/s"] {
        assert!(table.contains(heading), "{table}");
    }
}

#[test]
fn a_sweep_has_a_row_for_each_size_and_a_plot_of_times_and_bandwidth() {
    let folder = tempfile::tempdir().unwrap();
    let plot = folder.path().join("sweep.svg");
    let options = "--device virtual --ranks 2 --threads 32 --iters 2 --repeats 1";
    let rows = json(&format!("run alltoall {options} -b 8 -e 600 -f 4 --plot {}", plot.display()));
    let sizes: Vec<u64> = rows.iter().filter_map(|row| row["bytes"].as_u64()).collect();
    assert_eq!(sizes, [8, 32, 128, 512]);
    let svg = std::fs::read_to_string(&plot).unwrap();
    let words = ["Latency by size: alltoall, 2 ranks, virtual, network", "Bandwidth by size", "99th percentile", "bus"];
    for word in words {
        assert!(svg.contains(word), "{word}: {svg}");
    }
    let table = succeeds(&format!("run ring {options} --min-bytes 4 --max-bytes 16"));
    assert_eq!(table.lines().filter(|line| line.starts_with("ring ")).count(), 3, "{table}");

    // Nothing runs if one of the sizes is wrong.
    refused("run ring -b 6 -e 12", &["--bytes 6", "multiple of 4"]);
    refused("run ring -b 8 -e 4", &["-b 8 -e 4"]);
    refused("run ring -b 0 -e 4", &["-b 0"]);
    refused("run ring -b 8 -e 8 --plot x.svg", &["--plot", "one size"]);
    refused("run ring -b 8", &["--max-bytes"]);
    refused("run ring --plot x.svg", &["--max-bytes"]);
    refused("run ring -f 2", &["--max-bytes"]);
    refused("run ring -b 8 -e 16 -f 1", &["1 is not in 2..=1024"]);
    refused("run ring -b 8 -e 16 --bytes 8", &["--bytes"]);
    refused("run ring -b 8 -e 16 --kill-rank 1", &["--kill-rank"]);
}

#[test]
fn a_plot_that_cannot_be_written_fails_the_run_after_its_table() {
    let output = gin("run ring --ranks 2 --threads 32 --iters 1 --repeats 1 -b 4 -e 8 --plot /no/such/folder/x.svg");
    assert_eq!(output.status.code(), Some(3));
    assert!(
        out(&output).starts_with("workload ") && err(&output).contains("/no/such/folder/x.svg"),
        "{}",
        err(&output)
    );
}

#[test]
fn loads_and_stores_alone_are_a_route_which_makes_other_options_ineffective() {
    let [report] = json(&format!("run ring {SMALL} --bytes 64 --route lsa")).try_into().unwrap();
    assert_eq!((&report["route"], &report["verified"]), (&Value::from("lsa"), &Value::from(true)));
    refused("run ring --device virtual --route lsa --network peer", &["--network peer", "--route lsa"]);
    refused("run ring --device virtual --route lsa --backend gdaki", &["--backend gdaki", "--route lsa"]);
    refused("run ring --device virtual --route lsa --ranks 1", &["no peer"]);
    refused("run ring --device virtual --backend gdaki --network peer", &["--network peer", "--backend gdaki"]);
}

#[test]
fn each_cause_has_the_exit_status_of_the_list_in_every_help() {
    let code = |arguments: &str| gin(arguments).status.code();
    assert_eq!(code(&format!("run ring {SMALL} --bytes 64")), Some(0));
    assert_eq!(code("nic-check --soft --deadline-ms 60000 --fault-at 2"), Some(1));
    assert_eq!(code("run ring --bytes 6"), Some(2));
    assert_eq!(code("run ring --no-such-option"), Some(2));
    assert_eq!(code("run ring --ranks 2 --threads 32 --deadline-ms 0 --repeats 1"), Some(3));
    assert_eq!(code("launch -n 1 -- /no/such/program"), Some(127));
    assert_eq!(code("launch -n 1 -- /dev/null"), Some(126));
    assert_eq!(code("launch -n 1 --may-lose 1 -- true"), Some(2));
    for help in ["--help", "run --help", "launch --help", "bench --help"] {
        let text = succeeds(help);
        for line in ["Exit status:", "  0    all results", "  3    the run failed", "  127  gin launch"] {
            assert!(text.contains(line), "{help}: {text}");
        }
    }
}

#[test]
fn quiet_runs_print_no_notes_and_verbose_ones_events_and_progress() {
    let options = "--ranks 1 --threads 32 --iters 1 --repeats 1 --bytes 64";
    let noted = succeeds(&format!("run halo {options} --device auto"));
    assert!(noted.contains("--device auto took"), "{noted}");
    let quiet = succeeds(&format!("run halo {options} --device auto -q"));
    assert!(!quiet.contains("--device auto took") && quiet.contains("halo "), "{quiet}");
    let events = |flag: &str| err(&gin(&format!("run halo {options} --device virtual {flag}")));
    assert_eq!(events("-v"), "", "a short run has no progress");
    assert!(events("-vv").contains("communicator is up"), "{}", events("-vv"));
    refused(&format!("run halo {options} -v -q"), &["--verbose", "--quiet"]);
    refused("info -v", &["-v"]);
    let launched = err(&gin("launch -n 2 -v -- true"));
    assert!(launched.contains("gin: rank 1 is process "), "{launched}");
}

#[test]
fn a_run_of_more_than_two_seconds_shows_its_progress_and_an_estimate() {
    // As many launches as take some seconds on any machine.
    let arguments = "run ring --device virtual --ranks 2 --threads 32 --iters 50 --repeats 100000 -v";
    let mut command = Command::new(env!("CARGO_BIN_EXE_gin"));
    command.args(arguments.split(' ')).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
    let mut child = command.env("CUDA_VISIBLE_DEVICES", "").spawn().unwrap();
    let mut line = String::new();
    std::io::BufRead::read_line(&mut std::io::BufReader::new(child.stderr.take().unwrap()), &mut line).unwrap();
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(line.starts_with("gin: ring, virtual: ") && line.contains(" of 100000 launches, "), "{line}");
    assert!(line.contains("about ") && line.ends_with(" left\n"), "{line}");
}

#[test]
fn metrics_are_served_while_a_run_lasts_by_default_on_the_loopback() {
    use std::io::{BufRead, BufReader, Read, Write};
    let arguments = "run ring --device virtual --ranks 2 --threads 32 --iters 50 --repeats 100000 --metrics 0";
    let mut command = Command::new(env!("CARGO_BIN_EXE_gin"));
    command.args(arguments.split(' ')).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
    let mut child = command.env("CUDA_VISIBLE_DEVICES", "").spawn().unwrap();
    let mut line = String::new();
    BufReader::new(child.stderr.take().unwrap()).read_line(&mut line).unwrap();
    let address =
        line.trim_end().strip_prefix("gin: metrics at http://127.0.0.1:").and_then(|at| at.strip_suffix("/metrics"));
    let port: u16 = address.unwrap_or_else(|| panic!("{line}")).parse().unwrap();
    let get = || {
        let mut stream = std::net::TcpStream::connect(("127.0.0.1", port)).unwrap();
        stream.write_all(b"GET /metrics HTTP/1.1\r\n\r\n").unwrap();
        let mut text = String::new();
        stream.read_to_string(&mut text).unwrap();
        text
    };
    let value = |text: &str, name: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(name));
        line.and_then(|value| value.trim().parse::<u64>().ok())
    };
    let puts = "gin_proxy_puts_total{rank=\"1\",context=\"0\",peer=\"0\"}";
    // It answers at once, and the figures grow until the run has counted several launches.
    let (mut last, mut texts) = (0, Vec::new());
    while texts.len() < 10_000 {
        let text = get();
        let now = value(&text, puts).unwrap_or(0);
        assert!(now >= last, "{now} after {last}: {text}");
        last = now;
        let launches = value(&text, "gin_launches_total").unwrap();
        texts.push(text);
        if launches >= 3 && now > 0 {
            break;
        }
    }
    child.kill().unwrap();
    child.wait().unwrap();
    let text = texts.last().unwrap();
    assert!(last > 0 && text.starts_with("HTTP/1.1 200 OK") && text.ends_with("# EOF\n"), "{text}");
    for line in ["# TYPE gin_proxy_puts counter", "# TYPE gin_proxy_deepest gauge", "gin_proxy_failed_total"] {
        assert!(text.contains(line), "{line}: {text}");
    }
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let taken = taken.local_addr().unwrap().to_string();
    refused(&format!("run ring --device virtual --metrics {taken}"), &["--metrics", &taken, "in use"]);
    refused("run ring --device virtual --metrics here", &["here", "0.0.0.0:9464"]);
    refused("run ring --device virtual --metrics 0 -q", &["--metrics", "-q"]);
    refused("demo --metrics 0", &["--metrics"]);
}

/// Returns the spans of a trace with this category, by rank.
fn spans<'a>(trace: &'a Value, category: &str, rank: u32) -> Vec<&'a Value> {
    let events = trace["traceEvents"].as_array().unwrap().iter();
    events.filter(|event| event["ph"] == "X" && event["cat"] == category && event["pid"] == rank).collect()
}

#[test]
fn a_trace_has_each_request_by_rank_context_and_peer_the_steps_that_worked_and_the_kernels() {
    let folder = tempfile::tempdir().unwrap();
    let traced = |name: &str, arguments: &str| {
        let path = folder.path().join(name);
        let output = gin(&format!("trace --output {} run {arguments}", path.display()));
        (output.status.code(), err(&output), std::fs::read_to_string(path).unwrap_or_default())
    };
    let run = format!("alltoall {SMALL} --bytes 100 --contexts 2 --mode seeded");
    let (code, words, text) = traced("a.json", &run);
    assert_eq!(code, Some(0), "{words}");
    assert!(words.contains("gin: wrote ") && words.contains("a.json: ") && words.contains("perfetto"), "{words}");
    let trace: Value = serde_json::from_str(&text).unwrap();
    for rank in 0..3 {
        let requests = spans(&trace, "request", rank);
        for peer in 0..3 {
            let to: Vec<_> = requests.iter().filter(|span| span["args"]["peer"] == peer).collect();
            assert_eq!(to.len(), 3, "one request for each iteration: {to:?}");
            // The block of an odd peer uses the other context.
            assert!(
                to.iter().all(|span| span["args"]["context"] == peer % 2 && span["args"]["bytes"] == 100),
                "{to:?}"
            );
            assert!(
                to.iter().all(|span| span["name"] == "put and signal" && span["dur"].as_f64() > Some(0.0)),
                "{to:?}"
            );
        }
        let [kernel] = spans(&trace, "kernel", rank)[..] else { panic!("{text}") };
        assert_eq!(kernel["name"], "alltoall");
        let end = |span: &Value| span["ts"].as_f64().unwrap() + span["dur"].as_f64().unwrap();
        assert!(requests.iter().all(|span| span["ts"].as_f64() >= kernel["ts"].as_f64()), "{text}");
        assert!(requests.iter().any(|span| end(span) <= end(kernel)), "{text}");
        let steps = spans(&trace, "proxy", rank);
        assert!(!steps.is_empty());
        // A request begins when the kernel posts it, though the proxy does something else then.
        let at = |time: f64, span: &Value| span["ts"].as_f64() <= Some(time) && time <= end(span);
        let idle = |span: &&Value| !steps.iter().any(|step| at(span["ts"].as_f64().unwrap(), step));
        assert!(requests.iter().any(idle), "{text}");
    }
    // The trace has virtual time and does not disturb the run, so a seed repeats it.
    assert_eq!(traced("b.json", &run).2, text);
    assert_ne!(traced("c.json", &format!("{run} --seed 8")).2, text);
    // Loads and stores leave the kernels alone, and quiet runs say nothing.
    let (_, words, text) = traced("d.json", &format!("ring {SMALL} --bytes 64 --route lsa -q"));
    let trace: Value = serde_json::from_str(&text).unwrap();
    assert_eq!((&*words, spans(&trace, "kernel", 1).len(), spans(&trace, "request", 1).len()), ("", 1, 0));
    // A sweep is one trace.
    let sweep = "ring --device virtual --ranks 2 --threads 32 --iters 1 --repeats 2 -b 4 -e 8 -q";
    let trace: Value = serde_json::from_str(&traced("e.json", sweep).2).unwrap();
    let kernels = spans(&trace, "kernel", 0);
    let starts: Vec<f64> = kernels.iter().map(|span| span["ts"].as_f64().unwrap()).collect();
    assert!(starts.len() == 4 && starts.is_sorted(), "{starts:?}");
    // A run that fails has a trace, whose requests and kernels failed.
    let (code, _, text) = traced("f.json", "ring --ranks 2 --threads 32 --deadline-ms 0 --repeats 1 --device virtual");
    assert_eq!(code, Some(3));
    let trace: Value = serde_json::from_str(&text).unwrap();
    assert!(!spans(&trace, "kernel", 0).is_empty());
    let (code, words, _) = traced("no/such/folder.json", &run);
    assert!(code == Some(3) && words.contains("cannot write the trace"), "{words}");
    refused("trace ring", &["ring"]);
    refused("trace run ring --bytes 6", &["--bytes 6"]);
}

/// Returns both ends of a new terminal: the user's and the program's.
fn terminal() -> (std::fs::File, std::fs::File) {
    use std::os::fd::FromRawFd;
    let (mut user, mut program) = (-1, -1);
    let (name, settings) = (std::ptr::null_mut(), std::ptr::null());
    let size = libc::winsize { ws_row: 24, ws_col: 120, ws_xpixel: 0, ws_ypixel: 0 };
    // Safety: the call writes two descriptors, which nothing else owns; no name, the default settings, and a size.
    unsafe {
        let opened = libc::openpty(&raw mut user, &raw mut program, name, settings, &raw const size);
        assert_eq!(opened, 0, "{}", std::io::Error::last_os_error());
        (std::fs::File::from_raw_fd(user), std::fs::File::from_raw_fd(program))
    }
}

#[test]
fn a_long_run_on_a_terminal_shows_a_bar_and_a_short_one_nothing() {
    use std::io::Read;
    let run = |repeats: u32| {
        let (mut user, program) = terminal();
        let arguments = format!("run ring --device virtual --ranks 2 --threads 32 --iters 50 --repeats {repeats}");
        let mut command = Command::new(env!("CARGO_BIN_EXE_gin"));
        command.args(arguments.split(' ')).stdin(Stdio::null()).stdout(Stdio::null()).stderr(program);
        let mut child = command.env("CUDA_VISIBLE_DEVICES", "").env("TERM", "xterm").spawn().unwrap();
        let process = rustix::process::Pid::from_child(&child);
        // A run without a bar takes much longer than the test may.
        let (ended, end) = std::sync::mpsc::channel::<()>();
        let limit = std::thread::spawn(move || {
            if end.recv_timeout(std::time::Duration::from_secs(60)) == Err(std::sync::mpsc::RecvTimeoutError::Timeout) {
                let _ = rustix::process::kill_process(process, rustix::process::Signal::KILL);
            }
        });
        // The program's end closes once the child has it alone.
        drop(command);
        let (mut shown, mut bytes) = (String::new(), [0; 4096]);
        while !shown.contains(" left") {
            // Reading fails once the child has ended.
            match user.read(&mut bytes) {
                Ok(count @ 1..) => shown.push_str(&String::from_utf8_lossy(&bytes[..count])),
                _ => break,
            }
        }
        if shown.contains(" left") {
            child.kill().unwrap();
        }
        let code = child.wait().unwrap().code();
        drop(ended);
        limit.join().unwrap();
        (code, shown)
    };
    assert_eq!(run(1), (Some(0), String::new()));
    let (_, shown) = run(100_000);
    assert!(shown.contains("ring, virtual: ") && shown.contains(" of 100000 launches, "), "{shown:?}");
}

#[test]
fn completions_and_man_pages_have_the_subcommands_and_options() {
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let text = succeeds(&format!("completions {shell}"));
        assert!(text.contains("nic-check") && text.contains("resident-blocks"), "{shell}");
    }
    assert!(succeeds("completions bash").contains("virtual cuda auto"));
    refused("completions tcsh", &["tcsh", "bash"]);
    let page = succeeds("man");
    assert!(page.contains(".TH gin") && page.contains("nic\\-check") && page.contains("Exit status"), "{page}");
    let page = succeeds("man run");
    assert!(page.contains("gin\\-run") && page.contains("resident\\-blocks"), "{page}");
    refused("man fly", &["gin man fly", "nic-check"]);
}

#[test]
fn info_in_json_is_one_object_with_what_the_text_has() {
    let [info] = json("info").try_into().unwrap();
    assert_eq!(info["version"], env!("CARGO_PKG_VERSION"));
    let text = succeeds("info");
    for limit in info["limits"].as_array().unwrap() {
        assert!(text.contains(&format!("{}: {}", limit["what"].as_str().unwrap(), limit["limit"])), "{limit}");
    }
    for kernel in info["kernels"].as_array().unwrap() {
        assert!(text.contains(kernel.as_str().unwrap()));
    }
    assert_eq!(info["back_ends"][1]["name"], "proxy");
    assert_eq!(info["back_ends"][1]["refusal"], Value::Null);
    let reason = info["cuda"]["none"].as_str().unwrap();
    assert!(text.contains(&format!("cuda: none: {reason}")), "{text}");
    assert!(info["rdma"]["devices"].is_array(), "{info}");
}

#[test]
fn the_demo_runs_the_three_workloads_by_both_routes_into_one_table_or_six_objects() {
    let options = "--ranks 2 --threads 32 --iters 2 --repeats 1 --bytes 512";
    let runs = json(&format!("demo {options}"));
    let workloads: Vec<&Value> = runs.iter().map(|run| &run["workload"]).collect();
    assert_eq!(workloads, ["ring", "alltoall", "halo", "ring", "alltoall", "halo"]);
    let routes: Vec<&Value> = runs.iter().map(|run| &run["route"]).collect();
    assert_eq!(routes, ["network", "network", "network", "lsa", "lsa", "lsa"]);
    assert_eq!(json(&format!("demo {options} --route auto")).len(), 3);

    let table = succeeds(&format!("demo {options}"));
    let lines: Vec<&str> = table.lines().collect();
    for heading in ["workload", "device", "back end", "route", "ranks", "bytes", "time", "operations/s", "verified"] {
        assert!(lines[0].contains(heading), "{table}");
    }
    for (line, workload) in lines[1..7].iter().zip(["ring", "alltoall", "halo"].iter().cycle()) {
        assert!(line.starts_with(workload) && line.contains("512B") && line.ends_with("yes"), "{table}");
    }
}

#[test]
fn loads_and_stores_give_the_same_results_as_the_network() {
    for workload in ["ring", "alltoall", "halo"] {
        for mode in ["seeded", "threads"] {
            let [report] = json(&format!("run {workload} {SMALL} --bytes 1KiB --route auto --mode {mode}"))
                .try_into()
                .unwrap_or_else(|all| panic!("{all:?}"));
            assert_eq!((&report["verified"], &report["route"]), (&Value::from(true), &Value::from("lsa")), "{report}");
        }
    }
    // A single rank has no peer.
    let [report] = json("run ring --ranks 1 --iters 1 --repeats 1 --bytes 64 --route auto").try_into().unwrap();
    assert_eq!(report["route"], "network");
}

#[test]
fn alltoall_takes_any_number_of_bytes_from_one() {
    for bytes in [1, 3, 13, 257] {
        verified(&format!("run alltoall {SMALL} --bytes {bytes}"));
    }
    refused("run alltoall --bytes 0", &["--bytes 0", "1 byte"]);
}

#[test]
fn ring_takes_fewer_elements_than_ranks_and_sizes_that_the_ranks_do_not_divide() {
    for bytes in [4, 12, 1004] {
        verified(&format!("run ring --ranks 5 --blocks 2 --threads 32 --iters 3 --repeats 1 --bytes {bytes}"));
    }
    refused("run ring --bytes 6", &["--bytes 6", "multiple of 4"]);
    refused("run ring --bytes 0", &["--bytes 0", "multiple of 4"]);
}

#[test]
fn halo_takes_a_single_cell_and_a_prime_number_of_cells() {
    for cells in [1, 2, 17, 101] {
        verified(&format!("run halo {SMALL} --bytes {}", 4 * cells));
    }
    refused("run halo --bytes 7", &["--bytes 7", "multiple of 4"]);
}

#[test]
fn one_rank_is_enough_for_every_workload() {
    for workload in ["ring", "alltoall", "halo"] {
        for mode in ["seeded", "threads"] {
            verified(&format!(
                "run {workload} --ranks 1 --threads 32 --iters 2 --repeats 1 --bytes 1000 --mode {mode}"
            ));
        }
    }
}

#[test]
fn many_contexts_blocks_and_threads_give_the_same_results() {
    verified("run alltoall --ranks 3 --contexts 64 --blocks 5 --threads 96 --iters 2 --repeats 1 --bytes 100");
    verified("run ring --ranks 2 --contexts 256 --blocks 7 --threads 33 --iters 2 --repeats 1 --bytes 2000");
    verified("run halo --ranks 2 --contexts 3 --blocks 4 --threads 1 --iters 2 --repeats 1 --bytes 400");
    verified("run ring --ranks 2 --blocks 1 --threads 1024 --iters 1 --repeats 1 --bytes 8KiB");
}

#[test]
fn several_launches_in_one_run_all_count() {
    verified(&format!("run ring {SMALL} --bytes 64 --repeats 4").replace("--repeats 1 ", ""));
}

#[test]
fn a_grid_that_does_not_fit_as_a_whole_is_refused_with_both_figures() {
    refused("run ring --blocks 4 --resident-blocks 3", &["--blocks 4", "holds 3", "--resident-blocks"]);
    verified("run ring --blocks 4 --resident-blocks 4 --ranks 2 --threads 32 --iters 1 --repeats 1 --bytes 64");
}

#[test]
fn limits_of_launches_are_those_of_a_gpu_and_each_refusal_names_value_and_limit() {
    let limits = [
        ("ranks", "16777216"),
        ("threads", "1024"),
        ("blocks", "2147483647"),
        ("contexts", "256"),
        ("iters", "4294967295"),
        ("repeats", "100000"),
        ("resident-blocks", "2147483647"),
    ];
    for (option, most) in limits {
        for value in ["0", "-1", "99999999999"] {
            let range = format!("{value} is not in 1..={most}");
            refused(&format!("run ring --{option} {value}"), &[&format!("--{option}"), &range]);
        }
    }
}

#[test]
fn runs_too_large_for_this_machine_are_refused_before_they_take_its_memory() {
    refused("run ring --ranks 100000", &["--ranks 100000", "256", "seeded"]);
    refused("run ring --ranks 1000 --mode threads", &["--ranks 1000", "64", "threads"]);
    let many = "run ring --ranks 256 --blocks 100000 --resident-blocks 100000 --threads 1024";
    refused(many, &["--ranks 256", "memory"]);
    // If the system does not report the size of its memory, only sizes that no machine has are refused.
    for workload in ["ring", "alltoall", "halo"] {
        refused(&format!("run {workload} --bytes 9999999999GiB"), &["--bytes 10737418238926258176", "memory"]);
        refused(&format!("run {workload} --bytes 18446744073709551612"), &["memory"]);
    }
    refused("run ring --bytes 99999999999GiB", &["2^64"]);
}

#[test]
fn arguments_that_make_no_sense_are_refused_with_the_reason() {
    refused("run abacus", &["abacus", "ring, alltoall, halo"]);
    refused("run", &["<WORKLOAD>"]);
    refused("jump", &["jump"]);
    refused("run ring --bytes 12parsecs", &["parsecs", "KiB"]);
    refused("run ring --bytes 1.5KiB", &["1.5KiB"]);
    refused("run ring --bytes -1", &["--bytes", "a size is not negative"]);
    refused("run ring --bytes -1KiB", &["`-1KiB`", "negative"]);
    refused("run ring --seed one", &["--seed", "one", "whole number"]);
    refused("run ring --mode slow", &["slow", "seeded"]);
    refused("run ring --format xml", &["xml", "json"]);
    refused("run ring --ranks 99999999999", &["--ranks"]);
}

#[test]
fn features_that_are_missing_are_refused_with_the_reason() {
    refused("run ring --device cuda", &["--device cuda: ", no_gpu(), "use --device virtual"]);
    refused("run ring --device cuda:0,2", &["--device cuda: ", no_gpu(), "use --device virtual"]);
    refused("run ring --device cuda:0,0", &["GPU 0 occurs twice"]);
    refused("run ring --device cuda:x", &["`x`", "cuda:0,2"]);
    refused("demo --device cuda", &["--device cuda: ", no_gpu(), "use --device virtual"]);
    verified(&format!("run halo {SMALL} --bytes 64 --backend proxy"));
}

/// Returns part of the command's message about the GPUs that these tests hide.
fn no_gpu() -> &'static str {
    if cfg!(feature = "cuda") {
        "CUDA_VISIBLE_DEVICES is ``, which hides all GPUs"
    } else {
        "built without the feature `cuda`"
    }
}

#[test]
fn options_of_the_virtual_gpu_choose_it_and_real_ones_refuse_them() {
    let options = "--ranks 1 --threads 32 --iters 1 --repeats 1 --bytes 64";
    for option in ["--mode threads", "--seed 3", "--resident-blocks 4"] {
        let name = option.split(' ').next().unwrap();
        let table = succeeds(&format!("run halo {options} {option}"));
        assert!(table.contains(&format!("only that has {name}")), "{table}");
        refused(&format!("run halo {options} {option} --device cuda"), &[name, "--device virtual"]);
    }
}

#[test]
fn kernels_drive_software_nics_on_virtual_gpus() {
    for (workload, bytes) in [("ring", 4096), ("alltoall", 999), ("halo", 64)] {
        for mode in ["seeded", "threads"] {
            let run = format!("run {workload} {SMALL} --bytes {bytes} --mode {mode} --backend gdaki");
            verified(&run);
            let [report] = json(&run).try_into().unwrap();
            assert_eq!(report["backend"], "gdaki");
            assert_eq!(report["nics"], serde_json::json!(["soft_0", "soft_1", "soft_2"]));
        }
    }
}

#[test]
fn progress_threads_run_where_the_variable_says_and_an_invalid_value_is_refused() {
    let run = |value: &str| {
        let arguments =
            "run halo --device virtual --mode threads --ranks 1 --threads 32 --iters 1 --repeats 1 --bytes 64";
        let mut command = Command::new(env!("CARGO_BIN_EXE_gin"));
        command.args(arguments.split(' ')).env("GIN_PROXY_CPUS", value).stdin(Stdio::null());
        command.output().unwrap()
    };
    for value in ["any", "auto", "0-1023"] {
        assert!(run(value).status.success(), "{value}: {}", err(&run(value)));
    }
    for value in ["near", "3-1"] {
        let output = run(value);
        assert_eq!(output.status.code(), Some(2));
        assert!(err(&output).contains(&format!("GIN_PROXY_CPUS={value}: it is `auto`")), "{}", err(&output));
    }
}

#[test]
fn an_automatic_device_names_its_choice() {
    let options = "--ranks 1 --threads 32 --iters 1 --repeats 1 --bytes 64";
    let table = succeeds(&format!("run halo {options} --device auto"));
    assert!(table.contains("--device auto took the virtual GPU") && table.contains(no_gpu()), "{table}");
    let table = succeeds(&format!("run halo {options} --device virtual"));
    assert!(!table.contains("auto"), "{table}");
}

#[test]
fn a_wait_that_passes_its_deadline_fails_the_run_and_says_which() {
    let output = gin("run ring --ranks 2 --threads 32 --deadline-ms 0 --repeats 1");
    assert_eq!(output.status.code(), Some(3));
    assert_eq!(out(&output), "");
    let text = err(&output);
    assert!(text.starts_with("gin: ") && text.contains("deadline passed in wait_signal, context 0"), "{text}");
}

#[test]
fn a_seed_gives_the_same_run_but_for_its_times() {
    let without_times = |arguments: &str| {
        let output = gin(arguments);
        let mut report: Value = serde_json::from_str(&out(&output)).unwrap();
        let times = ["time_us_min", "time_us_median", "time_us_p99", "algorithm_gb_s", "bus_gb_s"];
        for key in times.into_iter().chain(["operations_per_second"]) {
            assert!(report.as_object_mut().unwrap().remove(key).is_some(), "{report}");
        }
        report
    };
    let arguments = |seed: u32| format!("run alltoall {SMALL} --bytes 999 --format json --seed {seed}");
    let (first, again, other) =
        (without_times(&arguments(7)), without_times(&arguments(7)), without_times(&arguments(8)));
    assert_eq!(first, again);
    assert_eq!(first["seed"], 7);
    assert_eq!(other["seed"], 8);
}

#[test]
fn info_lists_devices_back_ends_kernels_and_limits() {
    let text = succeeds("info");
    // It asks the driver also if the GPUs are hidden.
    let reason = if cfg!(feature = "cuda") { "CUDA driver" } else { no_gpu() };
    for word in ["virtual:", "cuda: none: ", reason, "gdaki: ", "proxy: available", "ring", "threads a block: 1024"] {
        assert!(text.contains(word), "expected {word:?} in {text}");
    }
    // Devices that are up, or the reason why none can be used.
    let rdma: Vec<&str> = text.lines().skip_while(|line| !line.starts_with("RDMA ")).skip(1).collect();
    let named = |line: &&str| line.contains("no RDMA device") || line.contains("virtual GPU: rank 0 uses ");
    assert!(rdma.iter().take_while(|line| line.starts_with("  ")).any(named), "{text}");
    let doorbells = text.lines().find(|line| line.contains("doorbells of GPUs: "));
    assert!(doorbells.is_some_and(|line| line.contains("by the host (relay)")), "{text}");
    #[cfg(feature = "cuda")]
    assert!(text.contains("PTX for sm_90"), "{text}");
    #[cfg(not(feature = "cuda"))]
    assert!(text.contains("no PTX"), "{text}");
}

/// Checks of `gin nic-check`.
const NIC_CHECKS: [&str; 12] = [
    "bring-up",
    "nop",
    "write",
    "inline write",
    "read and dump",
    "fetch-and-add",
    "signal after data",
    "completion interval",
    "index past 2^16",
    "wrong remote key",
    "release",
    "rules",
];

#[test]
fn nic_check_of_a_software_nic_says_that_it_is_one_and_passes_every_check() {
    for (option, link) in [("--soft", "Ethernet"), ("--soft=ethernet", "Ethernet"), ("--soft=infiniband", "InfiniBand")]
    {
        let text = succeeds(&format!("nic-check {option} --deadline-ms 60000"));
        let head = ["gin 0", "SOFTWARE NIC", "no hardware", "soft_0", "GID ", "up to 32768 slots"];
        for word in head.into_iter().chain([&*format!("1: {link}"), "MTU 4096"]) {
            assert!(text.contains(word), "expected {word:?} in {text}");
        }
        for name in NIC_CHECKS {
            let line = text.lines().find(|line| line.trim_start().starts_with(&format!("{name}  ")));
            assert!(line.is_some_and(|line| line.contains(" ok ") && line.contains(" ms ")), "{name}: {text}");
        }
        assert!(text.ends_with("12 of 12 checks passed by a software NIC\n"), "{text}");
    }
}

/// Returns the exit status and the report of a check of a software NIC.
fn nic_report(arguments: &str) -> (Option<i32>, Value) {
    let output = gin(&format!("nic-check --soft --format json --deadline-ms 60000 {arguments}"));
    let text = out(&output);
    let report = serde_json::from_str(&text).unwrap_or_else(|error| panic!("{text}: {error}: {}", err(&output)));
    (output.status.code(), report)
}

#[test]
fn nic_check_in_json_is_one_object_with_nic_port_capabilities_and_checks() {
    let (code, report) = nic_report("");
    assert_eq!(code, Some(0), "{report}");
    let expected = [
        ("software", Value::from(true)),
        ("nic", "soft_0".into()),
        ("port", 1.into()),
        ("link", "Ethernet".into()),
        ("mtu", 4096.into()),
        ("gid", "::ffff:10.0.0.0".into()),
        ("passed", true.into()),
        ("not_tried", Value::Array(Vec::new())),
    ];
    for (key, value) in expected {
        assert_eq!(report[key], value, "{key}");
    }
    assert_eq!(report["capabilities"]["send_queue_slots"], 32768);
    let checks = report["checks"].as_array().unwrap();
    assert!(checks.iter().map(|check| check["name"].as_str().unwrap()).eq(NIC_CHECKS), "{report}");
    assert!(checks.iter().all(|check| check["passed"] == true && check["took_ms"].is_f64()), "{report}");
}

#[test]
fn nic_check_fails_if_one_request_does_and_shows_what_was_expected_and_seen() {
    let (code, report) = nic_report("--fault-at 2");
    assert_eq!((code, &report["passed"]), (Some(1), &false.into()), "{report}");
    let checks = report["checks"].as_array().unwrap();
    let wrong: Vec<&Value> = checks.iter().filter(|check| check["passed"] == false).collect();
    assert_eq!((wrong.len(), &wrong[0]["name"]), (1, &"write".into()), "{report}");
    assert!(wrong[0]["expected"].as_str().unwrap().contains("completion of entry 2"), "{report}");
    assert!(wrong[0]["seen"].as_str().unwrap().contains("syndrome 0x14"), "{report}");

    let output = gin("nic-check --soft --deadline-ms 60000 --fault-at 2");
    let text = out(&output);
    assert_eq!(output.status.code(), Some(1), "{text}");
    let line = text.lines().find(|line| line.contains(" FAILED ")).unwrap_or_else(|| panic!("{text}"));
    assert!(line.contains("write") && line.contains("expected ") && line.contains("; saw "), "{line}");
    assert!(text.ends_with("11 of 12 checks passed by a software NIC: FAILED\n"), "{text}");
}

/// Expects that no NIC is checked, for this reason.
fn no_nic(arguments: &str, reason: &str) {
    let output = gin(&format!("nic-check {arguments}"));
    assert_eq!((output.status.code(), &*out(&output)), (Some(2), ""), "{arguments}");
    assert!(err(&output).starts_with(&format!("gin: {reason}")), "{arguments}: {}", err(&output));
}

#[test]
fn nic_check_says_why_there_is_no_nic_to_check() {
    no_nic("--nic no-such-nic", "no mlx5 device");
    no_nic("--nic no-such-nic --format json", "no mlx5 device");
    no_nic("--soft --port 2", "soft_0: asking for the port: there is no port 2; there are 1 to 1");
    no_nic("--soft --gid 2", "soft_0: port 1: GID 2 is not of RoCE v2");
    // Without a device, `info` gives the same reason.
    let info = succeeds("info");
    if let Some(reason) = info.lines().find_map(|line| line.trim_start().strip_prefix("gdaki: no mlx5 device")) {
        no_nic("", &format!("no mlx5 device{reason}"));
    }
}

#[test]
fn nic_check_refuses_unknown_arguments() {
    refused("nic-check --soft --nic mlx5_0", &["--soft", "--nic"]);
    refused("nic-check --soft=token-ring", &["token-ring", "ethernet"]);
    refused("nic-check --port 0", &["--port", "0"]);
    refused("nic-check --deadline-ms 0", &["--deadline-ms", "0"]);
    refused("nic-check --fault-at 1", &["--soft"]);
}

#[test]
fn bench_sass_counts_instructions_or_says_what_is_missing() {
    let output = gin("bench sass");
    let (table, reason) = (out(&output), err(&output));
    if output.status.success() {
        let line = table.lines().find(|line| line.starts_with("put with signal")).unwrap_or_else(|| panic!("{table}"));
        let figures: Vec<u32> = line.split_whitespace().filter_map(|word| word.parse().ok()).collect();
        assert!(figures.len() >= 4 && figures[0] > 10 && figures[1] > 8, "{line}");
    } else {
        assert!(reason.contains("make setup") || reason.contains("feature `cuda`"), "{reason}");
    }
}

/// Returns the tables of a benchmark on virtual GPUs.
fn tables(arguments: &str) -> Vec<Value> {
    let text = succeeds(&format!("bench {arguments} --device virtual --repeats 2 --deadline-ms 60000 --format json"));
    text.lines().map(|line| serde_json::from_str(line).unwrap_or_else(|error| panic!("{line}: {error}"))).collect()
}

/// Returns the comparisons of each row whose name begins with `start`.
fn beside(table: &Value, start: &str) -> Vec<String> {
    let rows = table["rows"].as_array().unwrap().iter().filter(|row| row["what"].as_str().unwrap().starts_with(start));
    rows.flat_map(|row| {
        assert!(row["value"].as_f64().is_some_and(|value| value > 0.0), "{row}");
        let all = row["beside"].as_array().unwrap();
        all.iter()
            .map(|other| {
                assert!(other["ratio"].as_f64().is_some_and(|ratio| ratio > 0.0), "{row}");
                // No goal is judged by figures of virtual GPUs.
                assert_eq!(other["goals"], Value::Array(Vec::new()), "{row}");
                other["what"].as_str().unwrap().to_owned()
            })
            .collect::<Vec<_>>()
    })
    .collect()
}

/// Checks that no row has a wrong result, and that each table says that its times do not measure speed.
fn all_right(tables: &[Value]) {
    for table in tables {
        assert_eq!(table["device"], "virtual");
        assert!(table["notes"].to_string().contains("nothing about speed"), "{table}");
        for row in table["rows"].as_array().unwrap() {
            assert!(row["wrong"] == 0 || row["wrong"].is_null(), "{row}");
        }
    }
}

#[test]
fn bench_lsa_measures_round_trips_barriers_and_puts_beside_bare_ones() {
    let tables = tables("lsa");
    let titles: Vec<&str> = tables.iter().map(|table| table["title"].as_str().unwrap()).collect();
    let expected = [
        "LSA round trip",
        "LSA barrier",
        "LSA barrier",
        "LSA round trip by size",
        "LSA put by size",
        "LSA put by blocks",
        "LSA put both ways",
    ];
    assert_eq!(titles, expected);
    all_right(&tables);
    let [trip, two, three, sizes, puts, blocks, both] = &tables[..] else { panic!("{titles:?}") };
    let floors = beside(trip, "put of 64B");
    assert_eq!(floors.len(), 8);
    assert!(floors[0].contains("relaxed poll") && floors[2].contains("flag in the data"), "{floors:?}");
    assert_eq!((&two["ranks"], &three["ranks"]), (&2.into(), &3.into()));
    let floors = beside(two, "barrier");
    assert!(floors.len() == 4 && floors[0].starts_with("bare: NCCL") && floors[1].contains("relaxed"), "{floors:?}");
    assert_eq!(beside(sizes, "put of 64B"), ["bare: copy by a block, release, flag"]);
    // Each size is checked and compared with the best of the bare loops.
    for size in ["64B", "1KiB", "4KiB"] {
        for row in
            [format!("put of {size}, each with a signal"), format!("prepared puts of {size}, one signal at the end")]
        {
            assert_eq!(beside(puts, &row), ["best bare copy loop, released once"], "{puts}");
        }
    }
    assert!(beside(blocks, "put of 4KiB").len().is_multiple_of(5), "{blocks}");
    let compared =
        ["best bare copy loop, both ways", "bare copy loop, a part for each block", "puts of 64KiB in turns"];
    assert_eq!(beside(both, "put of 4KiB"), compared);
    for table in [puts, both] {
        assert!(table["rows"].as_array().unwrap().iter().all(|row| row["wrong"] == 0), "{table}");
    }
    // Figures have noise, and those of rounds have percentiles.
    let row = &trip["rows"][0];
    assert!(row["repeats"] == 2 && row["noise"].is_f64() && row["p50"].is_f64() && row["p99"].is_f64(), "{row}");
}

#[test]
fn bench_proxy_measures_round_trips_beside_trips_of_a_cpu_thread_and_puts_by_size() {
    let tables = tables("proxy");
    assert_eq!(tables.len(), 2);
    all_right(&tables);
    let floors = beside(&tables[0], "put_value with signal and back, host memory");
    assert_eq!(floors.len(), 2);
    assert!(floors[0].contains("trip: nothing") && floors[1].contains("8 bytes in pinned"), "{floors:?}");
    let floors = beside(&tables[0], "put_value with signal and back, GPU memory");
    assert!(floors.len() == 1 && floors[0].contains("which the receiver stores"), "{floors:?}");
    assert!(tables[0]["rows"].as_array().unwrap().iter().all(|row| row["wrong"] == 0));
    let puts = tables[1]["rows"].as_array().unwrap();
    let names: Vec<&str> = puts.iter().map(|row| row["what"].as_str().unwrap()).collect();
    let of = |size| [format!("put of {size}, time of the progress thread"), format!("put of {size}, bandwidth")];
    assert_eq!(names, [of("64B"), of("1KiB")].concat());
    assert!(puts.iter().all(|row| row["wrong"] == 0), "{puts:?}");
}

#[test]
fn bench_post_measures_puts_by_all_crowds_beside_bare_ones_and_none_is_lost() {
    let tables = tables("post");
    assert_eq!(tables.len(), 4);
    all_right(&tables);
    for (table, before) in tables.iter().zip(["nothing to release", "not released", "to the GPU", "to the system"]) {
        assert!(table["title"].as_str().unwrap().contains(before), "{table}");
        let [bare, far, near] =
            ["bare", "NCCL's operations, index in host memory", "NCCL's operations, index in GPU memory"];
        assert_eq!(beside(table, "put, "), [bare, far, near].repeat(6));
        for row in table["rows"].as_array().unwrap() {
            assert!(row["wrong"] == 0 && row["median_thread"].is_f64(), "{row}");
        }
    }
}

#[test]
fn bench_gdaki_measures_puts_by_all_crowds_and_round_trips_and_checks_each_entry() {
    let tables = tables("gdaki");
    all_right(&tables);
    for table in &tables[..2] {
        let floors = beside(table, "put, ");
        assert_eq!(floors[..4], ["NCCL's operations", "bare", "NCCL's operations", "bare, nobody rings"]);
        assert!(table["rows"][0]["median_thread"].is_f64(), "{table}");
    }
    for (table, (rows, title)) in tables.iter().zip([(6, "to the system"), (6, "to the GPU"), (1, "round trip")]) {
        assert_eq!(table["rows"].as_array().unwrap().len(), rows, "{table}");
        assert!(table["rows"].as_array().unwrap().iter().all(|row| row["wrong"] == 0), "{table}");
        assert!(table["title"].as_str().unwrap().contains(title), "{table}");
    }
    assert_eq!(tables.len(), 3);
}

#[test]
fn bench_measures_everything_by_default_and_prints_one_table_that_fits_a_screen() {
    let text = succeeds("bench --device virtual --repeats 1 --deadline-ms 60000");
    for words in
        ["LSA round trip: 2 ranks, virtual", "LSA put by size", "Proxy round trip", "Issue of a proxy put", "ratio"]
    {
        assert!(text.contains(words), "expected {words:?} in {text}");
    }
    let rows = text.lines().filter(|line| line.starts_with("  ")).count();
    // The heading is indented, too.
    assert!((25..=41).contains(&rows) && text.lines().all(|line| line.len() <= 100), "{rows} rows: {text}");
    assert_eq!(text.matches("nothing about speed").count(), 1, "{text}");
    let all = succeeds("bench post --all --device virtual --repeats 1 --deadline-ms 60000");
    assert!(all.contains("median thread") && all.contains("put, 32 threads, 8 peers"), "{all}");
}

#[test]
fn bench_compares_with_an_earlier_run_and_plots_by_size() {
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    let (old, plot) = (file("old.json"), file("plot.svg"));
    let options = "--device virtual --repeats 2 --deadline-ms 60000";
    std::fs::write(&old, succeeds(&format!("bench lsa {options} --format json"))).unwrap();
    let text = succeeds(&format!("bench lsa {options} --compare {old} --plot {plot}"));
    assert!(text.contains("earlier") && text.contains("differs") && !text.contains("not in file"), "{text}");
    let rows = json(&format!("bench lsa {options} --compare {old}"));
    let compared = &rows[0]["rows"][0]["compared"];
    assert!(compared["old"].is_f64() && compared["ratio"].is_f64() && compared["differs"].is_boolean(), "{compared}");
    let svg = std::fs::read_to_string(&plot).unwrap();
    for words in ["Latency by size: 2 ranks, virtual", "Bandwidth by size", "puts, one signal", "1KiB"] {
        assert!(svg.contains(words), "{words}: {svg}");
    }
    refused(&format!("bench lsa --device virtual --compare {}", file("none")), &["--compare", "cannot read", "none"]);
    std::fs::write(&old, "{\"workload\": \"ring\"}\n").unwrap();
    let refusal = ["--compare", "line 1", "`title`", "gin bench --format json"];
    refused(&format!("bench lsa --device virtual --compare {old}"), &refusal);
}

#[test]
fn bench_capi_says_that_its_kernels_or_a_gpu_are_missing() {
    refused("bench capi --device virtual", &["capi", "missing", "--module", "make gpu-bundle"]);
    refused("bench capi --device virtual --module /no/such.cubin", &["--module", "/no/such.cubin", "make gpu-bundle"]);
    refused("bench capi --device virtual --module Cargo.toml", &["capi", "NVIDIA GPUs", "virtual"]);
}

#[test]
fn bench_refuses_unknown_arguments() {
    refused("bench speed", &["speed", "proxy"]);
    refused("bench lsa --repeats 0", &["--repeats", "0"]);
    refused("bench lsa --device cuda", &["--device cuda", no_gpu(), "--device virtual"]);
    for option in ["--all", "--compare old.json", "--device virtual", "--repeats 3", "--deadline-ms 9"] {
        let name = option.split(' ').next().unwrap();
        refused(&format!("bench sass {option}"), &[name, "lsa, proxy"]);
        refused(&format!("bench bootstrap {option}"), &[name, "lsa, proxy"]);
    }
    for option in ["--plot plot.svg", "--most-bytes 4KiB"] {
        let name = option.split(' ').next().unwrap();
        refused(&format!("bench proxy {option}"), &[name, "only lsa and all"]);
    }
    refused("bench lsa --most-ranks 9", &["--most-ranks", "only bootstrap has"]);
    refused("bench sass --format json", &["--format json", "measurements of time"]);
    refused("bench lsa --all --format json", &["--all", "--format json"]);
    refused("bench lsa --repeats -1", &["-1 is not in 1..=1000"]);
}

#[test]
fn help_and_version_succeed_and_no_command_shows_the_help() {
    assert!(succeeds("--version").starts_with("gin "));
    let help = succeeds("run --help");
    for option in ["--device", "--ranks", "--bytes", "--backend", "--contexts", "--blocks", "--threads", "--iters"] {
        assert!(help.contains(option), "{option}");
    }
    assert!(help.contains("--seed") && help.contains("--resident-blocks") && help.contains("--format"));
    assert_eq!(gin("").status.code(), Some(2));
}

#[test]
fn output_that_is_not_read_is_not_an_error() {
    let mut child = Command::new(env!("CARGO_BIN_EXE_gin"))
        .args("run halo --ranks 1 --threads 32 --iters 1 --repeats 1 --bytes 64 --format json".split(' '))
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    drop(child.stdout.take());
    let output = child.wait_with_output().unwrap();
    assert_eq!(err(&output), "");
}

#[test]
fn simulated_jobs_report_the_cost_of_the_bootstrap_as_ranks_increase() {
    let rows = json("bench bootstrap --most-ranks 20");
    let ranks: Vec<u64> = rows.iter().filter_map(|row| row["ranks"].as_u64()).collect();
    assert_eq!(ranks, [2, 16]);
    for row in rows {
        for figure in ["join_ms", "barrier_ms", "gather_ms", "join_bytes_rank_0", "gather_bytes_most"] {
            assert!(row[figure].as_f64().is_some_and(|figure| figure > 0.0), "{row}");
        }
    }
    assert!(succeeds("bench bootstrap --most-ranks 2").contains("rank 0 B"));
    refused("bench bootstrap --most-ranks 1", &["--most-ranks", "2..=16384"]);
}
