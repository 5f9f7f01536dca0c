// SPDX-License-Identifier: MIT OR Apache-2.0
//! The command `gin-bench` as a user runs it.

use serde_json::Value;
use std::net::TcpListener;
use std::process::{Command, Output, Stdio};

/// Returns the command without a visible GPU: its behaviour on virtual GPUs is the same on every machine.
fn command(arguments: &str) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_gin-bench"));
    command.env("CUDA_VISIBLE_DEVICES", "").env_remove("GIN_PROXY_CPUS");
    command.args(arguments.split_whitespace()).stdin(Stdio::null());
    command
}

fn bench(arguments: &str) -> Output {
    command(arguments).output().unwrap_or_else(|error| panic!("gin-bench {arguments}: {error}"))
}

fn out(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).unwrap()
}

fn err(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).unwrap()
}

/// Runs the command and expects success, with nothing on standard error.
fn succeeds(arguments: &str) -> String {
    let output = bench(arguments);
    assert!(output.status.success(), "gin-bench {arguments}: {}\n{}{}", output.status, out(&output), err(&output));
    assert_eq!(err(&output), "", "gin-bench {arguments}");
    out(&output)
}

/// Expects that the arguments are refused, with all of `words` in the reason and nothing printed as a result.
fn refused(arguments: &str, words: &[&str]) {
    let output = bench(arguments);
    let text = err(&output);
    assert_eq!(output.status.code(), Some(2), "gin-bench {arguments}: {text}");
    assert_eq!(out(&output), "", "gin-bench {arguments}");
    for word in words {
        assert!(text.contains(word), "gin-bench {arguments}: expected {word:?} in {text:?}");
    }
    assert!(!text.contains("panicked"), "{text}");
}

/// Runs the command on all ranks of a job, and returns their outputs.
fn job(ranks: u32, arguments: &str) -> Vec<Output> {
    // A port that was free a moment ago.
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let start = |rank: u32| {
        let (rank, ranks) = (rank.to_string(), ranks.to_string());
        let mut command = command(arguments);
        command.envs([
            ("GIN_RANK", &rank),
            ("GIN_LOCAL_RANK", &rank),
            ("GIN_RANKS", &ranks),
            ("GIN_LOCAL_RANKS", &ranks),
        ]);
        command.env("GIN_ADDR", "127.0.0.1").env("GIN_PORT", port.to_string());
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    };
    let children: Vec<_> = (0..ranks).map(start).collect();
    children.into_iter().map(|child| child.wait_with_output().unwrap()).collect()
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
fn the_help_names_the_command_the_measurements_and_the_exit_statuses() {
    let text = succeeds("--help");
    for words in ["Usage: gin bench", "bootstrap", "--compare", "Exit status:"] {
        assert!(text.contains(words), "{words}: {text}");
    }
}

#[test]
fn bench_sass_counts_instructions_or_says_what_is_missing() {
    let output = bench("sass");
    let (table, reason) = (out(&output), err(&output));
    if output.status.success() {
        let line = table.lines().find(|line| line.starts_with("put with signal")).unwrap_or_else(|| panic!("{table}"));
        let figures: Vec<u32> = line.split_whitespace().filter_map(|word| word.parse().ok()).collect();
        assert!(figures.len() >= 4 && figures[0] > 10 && figures[1] > 8, "{line}");
    } else {
        assert!(reason.contains("make setup") || reason.contains("feature `cuda`"), "{reason}");
    }
}

/// Runs the command with JSON output and returns the objects.
fn json(arguments: &str) -> Vec<Value> {
    let text = succeeds(&format!("{arguments} --format json"));
    text.lines().map(|line| serde_json::from_str(line).unwrap_or_else(|error| panic!("{line}: {error}"))).collect()
}

/// Returns the tables of a benchmark on virtual GPUs.
fn tables(arguments: &str) -> Vec<Value> {
    json(&format!("{arguments} --device virtual --repeats 2 --deadline-ms 60000"))
}

/// Returns the rows of a table whose names begin with `start`.
fn rows<'a>(table: &'a Value, start: &str) -> Vec<&'a Value> {
    let all = table["rows"].as_array().unwrap().iter();
    all.filter(|row| row["what"].as_str().unwrap().starts_with(start)).collect()
}

/// Returns what each row whose name begins with `start` is compared with.
fn compared<'a>(table: &'a Value, start: &str) -> Vec<&'a str> {
    let all = rows(table, start).into_iter().flat_map(|row| row["beside"].as_array().unwrap());
    all.map(|other| other["what"].as_str().unwrap()).collect()
}

/// Returns the same for rows of measured times. For a difference of times use [`compared`]: on a busy machine it is
/// lost in the noise, and may be below zero.
fn beside<'a>(table: &'a Value, start: &str) -> Vec<&'a str> {
    for row in rows(table, start) {
        assert!(row["value"].as_f64().is_some_and(|value| value > 0.0), "{row}");
        for other in row["beside"].as_array().unwrap() {
            assert!(other["ratio"].as_f64().is_some_and(|ratio| ratio > 0.0), "{row}");
            // No goal is judged by figures of virtual GPUs.
            assert_eq!(other["goals"], Value::Array(Vec::new()), "{row}");
        }
    }
    compared(table, start)
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
        "LSA bulk copies both ways",
    ];
    assert_eq!(titles, expected);
    all_right(&tables);
    let [trip, two, three, sizes, puts, blocks, both, bulk] = &tables[..] else { panic!("{titles:?}") };
    let floors = beside(trip, "put of 64B");
    assert_eq!(floors.len(), 8);
    assert!(floors[0].contains("relaxed poll") && floors[2].contains("flag in the data"), "{floors:?}");
    let steps =
        trip["rows"].as_array().unwrap().iter().filter(|row| row["what"].to_string().contains("of gin's steps"));
    assert_eq!(steps.count(), 5);
    assert_eq!(beside(trip, "bare: 64B with 4 of gin's steps"), [floors[0]]);
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
    assert_eq!(beside(puts, "put of 4KiB in chunks that blocks take in turns"), ["best bare copy loop, released once"]);
    let parts = ["puts, a part for each block", "bare copy loop, a part for each block"];
    assert_eq!(beside(both, "put of 4KiB"), [&["best bare copy loop, both ways"], &parts[..]].concat());
    assert_eq!(beside(bulk, "bulk copy of 4KiB, 2 blocks"), ["best bare copy loop of as many blocks"]);
    assert_eq!(beside(bulk, "bulk fan-out of 4KiB, 2 blocks"), ["bare loop that stores twice, as many blocks"]);
    for table in [puts, both, bulk] {
        assert!(table["rows"].as_array().unwrap().iter().all(|row| row["wrong"] == 0), "{table}");
    }
    // Figures have noise, and those of rounds have percentiles.
    let row = &trip["rows"][0];
    assert!(row["repeats"] == 2 && row["noise"].is_f64() && row["p50"].is_f64() && row["p99"].is_f64(), "{row}");
}

#[test]
fn bench_proxy_measures_round_trips_beside_trips_of_a_cpu_thread_and_puts_by_size() {
    let tables = tables("proxy");
    assert_eq!(tables.len(), 4);
    all_right(&tables);
    let floors = beside(&tables[0], "put_value with signal and back, host memory");
    assert_eq!(floors.len(), 2);
    assert!(floors[0].contains("trip: nothing") && floors[1].contains("8 bytes in pinned"), "{floors:?}");
    let floors = beside(&tables[0], "put_value with signal and back, GPU memory");
    assert!(floors.len() == 1 && floors[0].contains("which the receiver stores"), "{floors:?}");
    assert!(tables[0]["rows"].as_array().unwrap().iter().all(|row| row["wrong"] == 0));
    let waits = tables[1]["rows"].as_array().unwrap();
    assert!(waits.len() == 3 && waits.iter().all(|row| row["wrong"] == 0), "{waits:?}");
    assert_eq!(beside(&tables[1], "put_value and quiet"), ["put_value and flush"]);
    let parts = tables[2]["rows"].as_array().unwrap();
    assert!(tables[2]["title"].as_str().unwrap().contains("in parts") && parts.len() == 13, "{}", tables[2]);
    assert!(parts.iter().all(|row| row["wrong"] == 0), "{parts:?}");
    let puts = tables[3]["rows"].as_array().unwrap();
    let names: Vec<&str> = puts.iter().map(|row| row["what"].as_str().unwrap()).collect();
    let of = |size| {
        ["time of one", "CPU time of the progress thread", "rate", "bandwidth"]
            .map(|what| format!("put of {size}, {what}"))
    };
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
        assert_eq!(floors[2..6], ["NCCL's operations", "bare", "NCCL's operations", "bare, nobody rings"]);
        assert!(table["rows"][0]["median_thread"].is_f64(), "{table}");
    }
    for (table, (rows, title)) in tables.iter().zip([(7, "to the system"), (7, "to the GPU"), (1, "round trip")]) {
        assert_eq!(table["rows"].as_array().unwrap().len(), rows, "{table}");
        assert!(table["rows"].as_array().unwrap().iter().all(|row| row["wrong"] == 0), "{table}");
        assert!(table["title"].as_str().unwrap().contains(title), "{table}");
    }
    assert_eq!(tables.len(), 3);
}

#[test]
fn bench_measures_everything_by_default_and_prints_one_table_that_fits_a_screen() {
    let text = succeeds("--device virtual --repeats 1 --deadline-ms 60000");
    for words in
        ["LSA round trip: 2 ranks, virtual", "LSA put by size", "Proxy round trip", "Issue of a proxy put", "ratio"]
    {
        assert!(text.contains(words), "expected {words:?} in {text}");
    }
    let rows = text.lines().filter(|line| line.starts_with("  ")).count();
    // The heading is indented, too.
    assert!((25..=44).contains(&rows) && text.lines().all(|line| line.len() <= 100), "{rows} rows: {text}");
    assert_eq!(text.matches("nothing about speed").count(), 1, "{text}");
    let all = succeeds("post --all --device virtual --repeats 1 --deadline-ms 60000");
    assert!(all.contains("median thread") && all.contains("put, 32 threads, 8 peers"), "{all}");
}

#[test]
fn bench_compares_with_an_earlier_run_and_plots_by_size() {
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    let (old, plot) = (file("old.json"), file("plot.svg"));
    let options = "--device virtual --repeats 2 --deadline-ms 60000";
    std::fs::write(&old, succeeds(&format!("lsa {options} --format json"))).unwrap();
    let text = succeeds(&format!("lsa {options} --compare {old} --plot {plot}"));
    assert!(text.contains("earlier") && text.contains("differs") && !text.contains("not in file"), "{text}");
    let rows = json(&format!("lsa {options} --compare {old}"));
    let compared = &rows[0]["rows"][0]["compared"];
    assert!(compared["old"].is_f64() && compared["ratio"].is_f64() && compared["differs"].is_boolean(), "{compared}");
    let svg = std::fs::read_to_string(&plot).unwrap();
    for words in ["Latency by size: 2 ranks, virtual", "Bandwidth by size", "puts, one signal", "1KiB"] {
        assert!(svg.contains(words), "{words}: {svg}");
    }
    refused(&format!("lsa --device virtual --compare {}", file("none")), &["--compare", "cannot read", "none"]);
    std::fs::write(&old, "{\"workload\": \"ring\"}\n").unwrap();
    let refusal = ["--compare", "line 1", "`title`", "gin bench --format json"];
    refused(&format!("lsa --device virtual --compare {old}"), &refusal);
}

#[test]
fn bench_ep_measures_each_layout_beside_its_floors_and_plots_by_size() {
    let folder = tempfile::tempdir().unwrap();
    let plot = folder.path().join("plot.svg");
    let tables = tables(&format!("ep --plot {}", plot.to_str().unwrap()));
    all_right(&tables);
    let [table] = &tables[..] else { panic!("{tables:?}") };
    assert_eq!(beside(table, "dispatch, 1 tokens"), ["exchange"]);
    let met = "each begun when all ranks have met";
    assert_eq!(compared(table, "dispatch and combine in a chain, 8 tokens"), ["exchange", met]);
    assert_eq!(beside(table, "dispatch with max_rows, 8 tokens"), ["exchange"]);
    let packed = "dispatch expert-major packed with max_rows, 8 tokens";
    let later = "permuted when all rows are there";
    assert_eq!(compared(table, packed), ["the larger of exchange and expand", later]);
    assert_eq!(compared(table, "combine, 8 tokens, 1 SMs"), ["all SMs"]);
    let svg = std::fs::read_to_string(&plot).unwrap();
    for words in ["Latency by size: 2 ranks, virtual", "dispatch", "combine", "exchange"] {
        assert!(svg.contains(words), "{words}: {svg}");
    }
}

#[test]
fn bench_capi_says_that_its_kernels_or_a_gpu_are_missing() {
    refused("capi --device virtual", &["capi", "missing", "--module", "make gpu-bundle"]);
    refused("capi --device virtual --module /no/such.cubin", &["--module", "/no/such.cubin", "make gpu-bundle"]);
    refused("capi --device virtual --module Cargo.toml", &["capi", "NVIDIA GPUs", "virtual"]);
}

#[test]
fn bench_nccl_says_that_it_needs_gpus() {
    refused("nccl --device virtual", &["nccl", "NVIDIA GPUs", "virtual"]);
    refused("nccl --max-bytes 4KiB", &["--max-bytes", "only lsa and all"]);
}

#[test]
fn bench_refuses_unknown_arguments() {
    refused("speed", &["speed", "proxy"]);
    refused("lsa --repeats 0", &["--repeats", "0"]);
    refused("lsa --device cuda", &["--device cuda", no_gpu(), "--device virtual"]);
    for option in ["--all", "--compare old.json", "--device virtual", "--repeats 3", "--deadline-ms 9"] {
        let name = option.split(' ').next().unwrap();
        refused(&format!("sass {option}"), &[name, "lsa, proxy"]);
        refused(&format!("bootstrap {option}"), &[name, "lsa, proxy"]);
    }
    refused("proxy --plot plot.svg", &["--plot", "only lsa, ep and all"]);
    refused("ep --max-bytes 4KiB", &["--max-bytes", "only lsa and all"]);
    refused("lsa --max-ranks 9", &["--max-ranks", "only bootstrap has"]);
    refused("sass --format json", &["--format json", "measurements of time"]);
    refused("lsa --all --format json", &["--all", "--format json"]);
    refused("lsa --repeats -1", &["-1 is not in 1..=1000"]);
}

#[test]
fn simulated_jobs_report_the_cost_of_the_bootstrap_as_ranks_increase() {
    let rows = json("bootstrap --max-ranks 20");
    let ranks: Vec<u64> = rows.iter().filter_map(|row| row["ranks"].as_u64()).collect();
    assert_eq!(ranks, [2, 16]);
    for row in rows {
        for figure in ["join_ms", "barrier_ms", "gather_ms", "door_ms", "join_bytes_rank_0", "gather_bytes_max"] {
            assert!(row[figure].as_f64().is_some_and(|figure| figure > 0.0), "{row}");
        }
    }
    assert!(succeeds("bootstrap --max-ranks 2").contains("rank 0 B"));
    refused("bootstrap --max-ranks 1", &["--max-ranks", "2..=16384"]);
}

#[test]
fn the_benchmark_runs_across_processes_and_the_first_prints() {
    let options = "--device virtual --repeats 1 --deadline-ms 60000 --format json";
    for (ranks, what, titles) in [
        (2, "proxy", &["Proxy round trip"][..]),
        (2, "all", &["LSA round trip", "LSA barrier", "LSA round trip by size", "LSA put by size"]),
        (3, "lsa", &["LSA barrier"]),
    ] {
        let outputs = job(ranks, &format!("{what} {options}"));
        for output in &outputs {
            assert!(output.status.success(), "{what}: {}", err(output));
        }
        assert!(outputs[1..].iter().all(|output| output.stdout.is_empty()), "{what}");
        let tables = out(&outputs[0]);
        let tables: Vec<Value> = tables.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        for title in titles {
            let table = tables.iter().find(|table| table["title"] == *title).unwrap_or_else(|| panic!("{title}"));
            assert!(table["processes"] == true && table["ranks"] == ranks, "{table}");
            assert!(table["rows"].as_array().unwrap().iter().all(|row| row["wrong"] == 0), "{table}");
        }
    }
    for output in job(2, &format!("post {options}")) {
        assert_eq!(output.status.code(), Some(2));
        assert!(err(&output).contains("post: measured in one process only"), "{}", err(&output));
    }
}
