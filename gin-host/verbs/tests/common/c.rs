// SPDX-License-Identifier: MIT OR Apache-2.0
//! Compiles C against installed headers while tests run.

use std::path::Path;
use std::process::Command;

const TARGET: &str = "x86_64-unknown-linux-gnu";

fn compiler(folder: &Path) -> Result<Command, String> {
    // Tests run without the variables that cargo sets for build scripts.
    let mut build = cc::Build::new();
    build.target(TARGET).host(TARGET).opt_level(1).out_dir(folder).cargo_metadata(false).warnings(false);
    build.try_get_compiler().map(|tool| tool.to_command()).map_err(|error| format!("no C compiler: {error}"))
}

pub(crate) fn compile(source: &Path, out: &Path, arguments: &[&str]) -> Result<(), String> {
    let mut command = compiler(out.parent().ok_or("no folder")?)?;
    let output = command.args(arguments).arg(source).arg("-o").arg(out).output().map_err(|error| error.to_string())?;
    if output.status.success() { Ok(()) } else { Err(String::from_utf8_lossy(&output.stderr).into_owned()) }
}
