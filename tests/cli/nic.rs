// SPDX-License-Identifier: MIT OR Apache-2.0
//! `gin nic-check`.

use super::*;

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
