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
    refused("run ring --threads 2048", &["--threads 2048", "1024"]);
    refused("run ring --blocks 4294967295", &["--blocks 4294967295", "2147483647"]);
    refused("run ring --contexts 1000", &["--contexts 1000", "256"]);
    for option in ["ranks", "threads", "blocks", "contexts", "iters", "repeats", "resident-blocks"] {
        refused(&format!("run ring --{option} 0"), &[&format!("--{option}"), "0 is not in 1.."]);
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
    refused("run ring --bytes -1", &["-1"]);
    refused("run ring --seed one", &["--seed", "one"]);
    refused("run ring --mode slow", &["slow", "seeded"]);
    refused("run ring --format xml", &["xml", "json"]);
    refused("run ring --ranks 99999999999", &["--ranks"]);
}

#[test]
fn features_that_are_missing_are_refused_with_the_reason() {
    refused("run ring --device cuda", &["--device cuda: ", no_gpu(), "use --device virtual"]);
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
        assert_eq!(output.status.code(), Some(1));
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
    assert_eq!(output.status.code(), Some(1));
    assert_eq!(out(&output), "");
    let text = err(&output);
    assert!(text.starts_with("gin: ") && text.contains("deadline passed in wait_signal, context 0"), "{text}");
}

#[test]
fn a_seed_gives_the_same_run_but_for_its_times() {
    let without_times = |arguments: &str| {
        let output = gin(arguments);
        let mut report: Value = serde_json::from_str(&out(&output)).unwrap();
        for key in ["time_us_median", "operations_per_second"] {
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
    let output = gin(&format!("nic-check --soft --json --deadline-ms 60000 {arguments}"));
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
    assert_eq!((output.status.code(), &*out(&output)), (Some(1), ""), "{arguments}");
    assert!(err(&output).starts_with(&format!("gin: {reason}")), "{arguments}: {}", err(&output));
}

#[test]
fn nic_check_says_why_there_is_no_nic_to_check() {
    no_nic("--nic no-such-nic", "no mlx5 device");
    no_nic("--nic no-such-nic --json", "no mlx5 device");
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
    let text = succeeds(&format!("bench {arguments} --device virtual --repeats 2 --deadline-ms 60000 --json"));
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
    assert_eq!(beside(both, "put of 4KiB"), ["best bare copy loop, both ways"]);
    for table in [puts, both] {
        assert!(table["rows"].as_array().unwrap().iter().all(|row| row["wrong"] == 0), "{table}");
    }
    // Figures have noise, and those of rounds have percentiles.
    let row = &trip["rows"][0];
    assert!(row["repeats"] == 2 && row["noise"].is_f64() && row["p50"].is_f64() && row["p99"].is_f64(), "{row}");
}

#[test]
fn bench_proxy_measures_round_trips_beside_trips_of_a_cpu_thread() {
    let tables = tables("proxy");
    assert_eq!(tables.len(), 1);
    all_right(&tables);
    let floors = beside(&tables[0], "put_value with signal and back, host memory");
    assert_eq!(floors.len(), 2);
    assert!(floors[0].contains("trip: nothing") && floors[1].contains("8 bytes in pinned"), "{floors:?}");
    let floors = beside(&tables[0], "put_value with signal and back, GPU memory");
    assert!(floors.len() == 1 && floors[0].contains("which the receiver stores"), "{floors:?}");
    assert!(tables[0]["rows"].as_array().unwrap().iter().all(|row| row["wrong"] == 0));
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
    std::fs::write(&old, succeeds(&format!("bench lsa {options} --json"))).unwrap();
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
    let refusal = ["--compare", "line 1", "`title`", "gin bench --json"];
    refused(&format!("bench lsa --device virtual --compare {old}"), &refusal);
}

#[test]
fn bench_refuses_unknown_arguments() {
    refused("bench speed", &["speed", "proxy"]);
    refused("bench lsa --repeats 0", &["--repeats", "0"]);
    refused("bench lsa --device cuda", &["--device cuda", no_gpu(), "--device virtual"]);
    refused("bench lsa --json --format table", &["--json", "--format"]);
    for option in ["--all", "--compare old.json", "--plot plot.svg"] {
        let name = option.split(' ').next().unwrap();
        refused(&format!("bench sass {option}"), &[name, "lsa, proxy"]);
        refused(&format!("bench bootstrap {option}"), &[name, "lsa, proxy"]);
    }
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
