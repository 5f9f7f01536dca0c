// SPDX-License-Identifier: MIT OR Apache-2.0
//! The command as a user runs it.

mod nic;
mod output;
mod refusals;
mod runs;

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

/// Returns part of the command's message about the GPUs that these tests hide.
fn no_gpu() -> &'static str {
    if cfg!(feature = "cuda") {
        "CUDA_VISIBLE_DEVICES is ``, which hides all GPUs"
    } else {
        "built without the feature `cuda`"
    }
}
