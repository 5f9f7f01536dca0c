// SPDX-License-Identifier: MIT OR Apache-2.0
//! Runs of the workloads: results, figures, seeds, deadlines.

use super::*;
use std::os::unix::fs::PermissionsExt;

#[test]
fn every_workload_is_verified_in_the_seeded_and_in_the_threads_mode() {
    for workload in ["ring", "alltoall", "halo", "moe"] {
        verified(&format!("run {workload} {SMALL} --bytes 1KiB --mode seeded"));
        verified(&format!("run {workload} {SMALL} --bytes 1KiB --mode threads"));
    }
}

#[test]
fn the_workloads_have_no_data_races_in_any_way_of_their_requests() {
    let options = "--device virtual --mode seeded --ranks 3 --iters 5 --repeats 2 --contexts 2";
    let ways = ["--bytes 1KiB --route network", "--bytes 1KiB --route lsa", "--bytes 1KiB --backend gdaki"];
    for workload in ["ring", "alltoall", "halo", "moe"] {
        for way in ways {
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
    let small = SMALL.replace("--blocks 2", "--blocks 1 -w 0");
    let [report] = json(&format!("run alltoall {small} --bytes 100 --contexts 1 --stats")).try_into().unwrap();
    let stats = report["stats"].as_array().unwrap();
    let pairs = [(0, 1), (0, 2), (1, 0), (1, 2), (2, 0), (2, 1)];
    assert_eq!(stats.len(), pairs.len(), "{stats:?}");
    for ((rank, peer), row) in pairs.into_iter().zip(stats) {
        assert_eq!((&row["rank"], &row["peer"]), (&Value::from(rank), &Value::from(peer)), "{row}");
        for (name, value) in [("puts", 3), ("put_bytes", 300), ("signals", 3), ("finished", 3), ("failed", 0)] {
            assert_eq!(row[name], value, "{name} of {row}");
        }
    }
    let text = succeeds(&format!("run alltoall {small} --bytes 100 --stats"));
    let sums = text.lines().find(|line| line.starts_with("all ")).unwrap();
    assert!(sums.contains(" 1800 "), "the sum of all bytes: {text}");
    let [report] = json(&format!("run alltoall {SMALL} --backend gdaki --stats")).try_into().unwrap();
    let entries: Vec<_> = report["stats"].as_array().unwrap().iter().map(|row| row["accepted"].as_u64()).collect();
    assert!(entries.len() == 6 && entries.iter().all(|entries| *entries > Some(0)), "{entries:?}");
    let [report] = json(&format!("run alltoall {SMALL}")).try_into().unwrap();
    assert_eq!(report["stats"], Value::Null);
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
fn the_demo_runs_the_workloads_by_their_routes_into_one_table_or_eight_objects() {
    let options = "--ranks 2 --threads 32 --iters 2 --repeats 1 --bytes 512";
    let runs = json(&format!("demo {options}"));
    let workloads: Vec<&Value> = runs.iter().map(|run| &run["workload"]).collect();
    let each = ["ring", "alltoall", "halo", "moe"];
    assert_eq!(workloads, [each, each].concat());
    let routes: Vec<&Value> = runs.iter().map(|run| &run["route"]).collect();
    assert_eq!(routes, [["network"; 4], ["lsa"; 4]].concat());
    assert_eq!(json(&format!("demo {options} --route auto")).len(), 4);
    assert_eq!(json(&format!("demo {options} --route network")).len(), 4);

    let table = succeeds(&format!("demo {options}"));
    let lines: Vec<&str> = table.lines().collect();
    for heading in ["workload", "device", "back end", "route", "ranks", "bytes", "time", "operations/s", "#wrong"] {
        assert!(lines[0].contains(heading), "{table}");
    }
    for (line, workload) in lines[1..9].iter().zip(&workloads) {
        let workload = workload.as_str().unwrap();
        assert!(line.starts_with(workload) && line.contains("512B") && line.ends_with(" 0"), "{table}");
    }
}

#[test]
fn loads_and_stores_give_the_same_results_as_the_network() {
    for workload in ["ring", "alltoall", "halo", "moe"] {
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
fn options_of_nccl_tests_mean_the_same() {
    let options = "--device virtual --threads 32 --repeats 1 --bytes 1KiB -g 3 -n 4";
    for workload in ["ring", "alltoall", "halo", "moe"] {
        for warmup in [0, 1, 3] {
            let [report] = json(&format!("run {workload} {options} -w {warmup}")).try_into().unwrap();
            let expected = (&Value::from(3), &Value::from(4), &Value::from(true));
            assert_eq!((&report["ranks"], &report["iters"], &report["verified"]), expected, "{report}");
        }
        let [report] = json(&format!("run {workload} {options} -c 0")).try_into().unwrap();
        assert_eq!((&report["verified"], &report["errors"]), (&Value::Null, &Value::from(0)), "{report}");
        assert!(succeeds(&format!("run {workload} {options} -c 0")).contains(" N/A"));
    }
}

#[test]
fn halo_takes_a_single_cell_and_a_prime_number_of_cells() {
    for cells in [1, 2, 17, 101] {
        verified(&format!("run halo {SMALL} --bytes {}", 4 * cells));
    }
    refused("run halo --bytes 7", &["--bytes 7", "multiple of 4"]);
}

#[test]
fn moe_takes_a_single_short_row_and_many_tokens_and_refuses_what_it_cannot_use() {
    for bytes in ["16", "1008", "1KiB", "37KiB"] {
        verified(&format!("run moe {SMALL} --bytes {bytes}"));
    }
    // A block of one rank at a time is enough, and results are compared after some of the iterations.
    verified("run moe --ranks 2 --bytes 2KiB --iters 70 --repeats 2 --resident-blocks 1");
    refused("run moe --bytes 8", &["--bytes 8", "a multiple of 16"]);
    refused("run moe --bytes 1040", &["--bytes 1040", "a multiple of 1024"]);
    refused("run moe -b 16 -e 64MiB -f 1024 --threads 1024", &["--threads 1024", "at most 512"]);
    refused("run moe --ranks 65", &["--ranks 65", "at most 64"]);
    refused("run moe --threads 512", &["--threads 512", "at most 256 if loads and stores do not reach"]);
    verified("run moe --threads 512 --route lsa --iters 2 --repeats 1");
    let output = gin("run moe --device virtual --ranks 2 --deadline-ms 0 --repeats 1");
    assert_eq!(output.status.code(), Some(3));
    assert!(err(&output).contains("`moe`") && err(&output).contains("in time"), "{}", err(&output));
}

#[test]
fn one_rank_is_enough_for_every_workload() {
    for workload in ["ring", "alltoall", "halo", "moe"] {
        for mode in ["seeded", "threads"] {
            verified(&format!(
                "run {workload} --ranks 1 --threads 32 --iters 2 --repeats 1 --bytes 1008 --mode {mode}"
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
fn a_wait_that_passes_its_deadline_fails_the_run_and_says_which() {
    let output = gin("run ring --ranks 2 --threads 32 --deadline-ms 0 --repeats 1");
    assert_eq!(output.status.code(), Some(3));
    assert_eq!(out(&output), "");
    let text = err(&output);
    assert!(
        text.starts_with("gin: ") && text.contains("deadline passed in ") && text.contains(", context 0"),
        "{text}"
    );
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
fn gin_bench_becomes_the_command_beside_it_or_says_how_to_build_that() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let (program, bench) = (folder.path().join("gin"), folder.path().join("gin-bench"));
    std::fs::hard_link(env!("CARGO_BIN_EXE_gin"), &program).unwrap();
    let run =
        || Command::new(&program).args(["bench", "lsa", "--all", "--help"]).env("PATH", "/none").output().unwrap();
    let output = run();
    assert_eq!(output.status.code(), Some(2), "{}", err(&output));
    assert!(err(&output).contains("cargo build --release -p gin-bench"), "{}", err(&output));

    std::fs::write(&bench, "#!/bin/sh\necho \"$@\"\nexit 3\n").unwrap();
    std::fs::set_permissions(&bench, std::fs::Permissions::from_mode(0o755)).unwrap();
    let output = run();
    assert_eq!((output.status.code(), out(&output).as_str()), (Some(3), "lsa --all --help\n"), "{}", err(&output));
}

#[test]
fn a_workload_runs_over_libfabric_or_says_what_to_install() {
    let arguments = format!("run alltoall {SMALL} --bytes 1KiB --network fabric");
    let [info] = json("info").try_into().unwrap_or_else(|all| panic!("{all:?}"));
    if info["fabric"]["library"]["Ok"].is_null() {
        refused(&arguments, &["--network fabric", "the package libfabric1"]);
        return;
    }
    let [report] = json(&arguments).try_into().unwrap_or_else(|all| panic!("{all:?}"));
    assert_eq!(
        (&report["verified"], &report["network"], &report["mode"]),
        (&true.into(), &"fabric".into(), &"threads".into())
    );
    let run = |variable, value, parts: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_gin"));
        let output = command.args(arguments.split_whitespace()).env(variable, value).output().unwrap();
        let text = err(&output);
        assert_eq!(output.status.code(), Some(2), "{variable}={value}: {text}");
        assert!(parts.iter().all(|part| text.contains(part)), "{variable}={value}: {text}");
    };
    run(
        "GIN_FABRIC_LIBRARY",
        "libfabric-of-nobody.so",
        &["libfabric-of-nobody.so cannot be opened", "the package libfabric1"],
    );
    run("GIN_FABRIC_PROVIDER", "carrier-pigeon", &["no provider `carrier-pigeon`", "fi_info"]);
}

#[test]
fn a_model_has_a_row_for_each_number_of_ranks_and_the_same_figures_each_time() {
    let folder = tempfile::tempdir().unwrap();
    let plot = folder.path().join("scale.svg");
    let rows = json(&format!("model alltoall --bytes 4KiB --plot {}", plot.display()));
    let ranks: Vec<_> = rows.iter().map(|row| row["figures"]["ranks"].as_u64().unwrap()).collect();
    assert_eq!(ranks, [8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096]);
    assert_eq!(rows, json("model alltoall --bytes 4KiB"));
    let svg = std::fs::read_to_string(&plot).unwrap();
    for words in ["Time by ranks: alltoall of 4KiB", "Memory by ranks", "\nranks\n", "\n4096\n", "GDAKI"] {
        assert!(svg.contains(words), "{words}");
    }
    // The command takes the parameters that it prints.
    let file = folder.path().join("parameters.json");
    std::fs::write(&file, succeeds("model --print-parameters")).unwrap();
    assert_eq!(json(&format!("model alltoall --bytes 4KiB --parameters {}", file.display())), rows);
    let text = std::fs::read_to_string(&file).unwrap().replace("\"value\": 50,", "\"value\": 100,");
    std::fs::write(&file, text).unwrap();
    assert_ne!(json(&format!("model dispatch --parameters {}", file.display())), json("model dispatch"));
    assert!(json("model --measured").len() > 30);
}

#[test]
fn a_model_refuses_bad_files_and_nodes_that_do_not_divide_the_ranks() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("parameters.json");
    std::fs::write(&file, succeeds("model --print-parameters").replace("\"value\": 50,", "\"value\": -50,")).unwrap();
    refused(&format!("model --parameters {}", file.display()), &["parameters.json, line 11", "nic_gb_s is -50"]);
    refused("model --parameters /no/such/file.json", &["--parameters: /no/such/file.json"]);
    refused("model --bench /no/such/file.json", &["--bench: /no/such/file.json"]);
    refused("model --node 3", &["--node 3", "use 1, 2, 4 or 8"]);
}
