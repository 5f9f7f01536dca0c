// SPDX-License-Identifier: MIT OR Apache-2.0
//! Arguments that are refused, and choices of devices and CPUs.

use super::*;

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
    for (option, max) in limits {
        for value in ["0", "-1", "99999999999"] {
            let range = format!("{value} is not in 1..={max}");
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
    refused("run moe --bytes 9999999999GiB", &["--bytes 10737418238926258176", "at most 65536"]);
    refused("run ring --bytes 99999999999GiB", &["2^64"]);
}

#[test]
fn arguments_that_make_no_sense_are_refused_with_the_reason() {
    refused("run abacus", &["abacus", "ring, alltoall, halo, moe"]);
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
    refused("run ring --device virtual --beside nccl", &["--beside nccl", "NCCL needs GPUs"]);
    refused("run halo --device virtual --beside nccl", &["--beside nccl", "ring and alltoall"]);
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
