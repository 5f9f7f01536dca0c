// SPDX-License-Identifier: MIT OR Apache-2.0
//! Output beside results: logs, exit statuses, progress, metrics, traces, help.

use super::*;

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
    for help in ["--help", "run --help", "launch --help"] {
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

/// Starts a sweep whose last size takes minutes, and returns its first lines.
fn first_lines(format: &str, lines: usize) -> (std::process::Child, Vec<String>) {
    let arguments = "run ring --device virtual --ranks 2 --threads 32 --iters 1 --repeats 1 -b 64 -e 64MiB -f 1024";
    let mut command = Command::new(env!("CARGO_BIN_EXE_gin"));
    command.args(arguments.split(' ')).args(["--format", format]).env("CUDA_VISIBLE_DEVICES", "");
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
    let mut child = command.spawn().unwrap();
    let out = std::io::BufReader::new(child.stdout.take().unwrap());
    (child, std::io::BufRead::lines(out).take(lines).map(Result::unwrap).collect())
}

#[test]
fn a_sweep_prints_each_row_when_its_size_is_measured() {
    let (mut child, lines) = first_lines("table", 3);
    // Ctrl-C loses nothing that is printed.
    rustix::process::kill_process(rustix::process::Pid::from_child(&child), rustix::process::Signal::INT).unwrap();
    child.wait().unwrap();
    assert!(
        lines[0].starts_with("workload") && lines[1].contains(" 64B ") && lines[2].contains(" 64KiB "),
        "{lines:?}"
    );
    let (mut child, lines) = first_lines("json", 2);
    child.kill().unwrap();
    child.wait().unwrap();
    let sizes = lines.iter().map(|line| serde_json::from_str::<Value>(line).unwrap()["bytes"].clone());
    assert_eq!(sizes.collect::<Vec<_>>(), [64, 64 << 10]);
}

/// Starts a run that takes some seconds on any machine. Returns it, and the first line of its standard error.
fn long_run(option: &str) -> (std::process::Child, String) {
    let arguments = "run ring --device virtual --ranks 2 --threads 32 --iters 50 --repeats 100000";
    let mut command = Command::new(env!("CARGO_BIN_EXE_gin"));
    command.args(arguments.split(' ')).args(option.split(' ')).env("CUDA_VISIBLE_DEVICES", "");
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let mut line = String::new();
    std::io::BufRead::read_line(&mut std::io::BufReader::new(child.stderr.take().unwrap()), &mut line).unwrap();
    (child, line)
}

#[test]
fn a_run_of_more_than_two_seconds_shows_its_progress_and_an_estimate() {
    let (mut child, line) = long_run("-v");
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(line.starts_with("gin: ring, virtual: ") && line.contains(" of 100000 launches in "), "{line}");
    assert!(line.contains("%, about ") && line.contains(" left, "), "{line}");
}

#[test]
fn metrics_are_served_while_a_run_lasts_by_default_on_the_loopback() {
    use std::io::{Read, Write};
    let (mut child, line) = long_run("--metrics 0");
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

#[test]
fn a_trace_that_cannot_be_written_ends_the_command_before_the_run() {
    let folder = tempfile::tempdir().unwrap();
    let missing = folder.path().join("no/trace.json");
    let output = gin(&format!("trace --output {} run ring {SMALL}", missing.display()));
    assert_eq!((output.status.code(), out(&output).as_str()), (Some(3), ""), "nothing ran");
    assert!(err(&output).contains("cannot write the trace"), "{}", err(&output));
    // A command that is refused leaves no file, and an old one as it is.
    let path = folder.path().join("trace.json");
    let refused = format!("trace --output {} run ring --bytes 6", path.display());
    assert_eq!(gin(&refused).status.code(), Some(2));
    assert!(!path.exists());
    std::fs::write(&path, "old").unwrap();
    assert_eq!(gin(&refused).status.code(), Some(2));
    assert_eq!(std::fs::read(&path).unwrap(), b"old");
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
    let run = format!("alltoall {SMALL} --bytes 100 --contexts 2 --mode seeded -w 0");
    let (code, words, text) = traced("a.json", &run);
    assert_eq!(code, Some(0), "{words}");
    assert!(words.contains("gin: wrote ") && words.contains("a.json: ") && words.contains("perfetto"), "{words}");
    let trace: Value = serde_json::from_str(&text).unwrap();
    for rank in 0..3 {
        let requests = spans(&trace, "request", rank);
        for (peer, context) in (0..3).filter(|&peer| peer != rank).flat_map(|peer| [(peer, 0), (peer, 1)]) {
            let asked = |span: &&&Value| span["args"]["peer"] == peer && span["args"]["context"] == context;
            let to: Vec<_> = requests.iter().filter(asked).collect();
            assert_eq!(to.len(), 3, "one request for each iteration: {to:?}");
            // The first block of the grid has the whole share, and each block has a context.
            let bytes = if context == 0 { 100 } else { 0 };
            assert!(to.iter().all(|span| span["args"]["bytes"] == bytes), "{to:?}");
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
    let size = libc::winsize { ws_row: 24, ws_col: 70, ws_xpixel: 0, ws_ypixel: 0 };
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
        let mut child =
            command.env("CUDA_VISIBLE_DEVICES", "").env("TERM", "xterm").env("LC_ALL", "C").spawn().unwrap();
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
        while !shown.contains(" launches in ") {
            // Reading fails once the child has ended.
            match user.read(&mut bytes) {
                Ok(count @ 1..) => shown.push_str(&String::from_utf8_lossy(&bytes[..count])),
                _ => break,
            }
        }
        if shown.contains(" launches in ") {
            child.kill().unwrap();
        }
        let code = child.wait().unwrap().code();
        drop(ended);
        limit.join().unwrap();
        (code, shown)
    };
    assert_eq!(run(1), (Some(0), String::new()));
    let (_, shown) = run(100_000);
    // The estimate comes first, and the bar has what columns are left.
    assert!(shown.contains("ring, virtual: 0%, about ") && shown.contains(" of 100000 launches in "), "{shown:?}");
    assert!(shown.is_ascii(), "the locale has no UTF-8: {shown:?}");
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
    match info["fabric"]["library"]["Ok"].as_str() {
        Some(library) => {
            assert!(text.contains(&format!("libfabric: {library}")), "{text}");
            let used = &info["fabric"]["used"]["Ok"];
            let way = used["gpu_memory"].as_str().unwrap();
            assert!(text.contains(&format!("memory of GPUs: {way}")), "{text}");
            assert_eq!(way == "staged", used["staged"].is_string(), "{used}");
        }
        None => assert!(text.contains(info["fabric"]["library"]["Err"].as_str().unwrap()), "{text}"),
    }
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
    // The longest list is the last one.
    let kernels: Vec<&str> = text.lines().skip_while(|line| !line.ends_with("linked for the virtual GPU:")).collect();
    assert!(kernels.len() > 10 && kernels.iter().all(|line| line.len() <= 100 && !line.contains(": ")), "{text}");
    #[cfg(feature = "cuda")]
    assert!(text.contains("PTX for sm_90"), "{text}");
    #[cfg(not(feature = "cuda"))]
    assert!(text.contains("no PTX"), "{text}");
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
