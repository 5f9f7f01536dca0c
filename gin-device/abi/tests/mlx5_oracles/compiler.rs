// SPDX-License-Identifier: MIT OR Apache-2.0
//! Compiles C while the tests run.

use std::path::{Path, PathBuf};
use std::process::Command;

const TARGET: &str = "x86_64-unknown-linux-gnu";

/// Returns a command that runs the C compiler.
fn compiler(out: &Path) -> Result<Command, String> {
    // Cargo's variables for build scripts are not set while tests run.
    let tool = cc::Build::new()
        .target(TARGET)
        .host(TARGET)
        .opt_level(1)
        .out_dir(out)
        .cargo_metadata(false)
        .warnings(false)
        .try_get_compiler()
        .map_err(|error| format!("no C compiler: {error}"))?;
    Ok(tool.to_command())
}

/// Returns the reason why C cannot be compiled against `header` here, if there is one.
pub(crate) fn missing(header: &str) -> Option<String> {
    if !cfg!(all(target_arch = "x86_64", target_os = "linux")) {
        return Some("the oracles are compiled on x86-64 Linux only".to_owned());
    }
    let probe = || -> Result<(), String> {
        let folder = tempfile::tempdir().map_err(|error| error.to_string())?;
        let source = folder.path().join("probe.c");
        std::fs::write(&source, format!("#include <{header}>\n")).map_err(|error| error.to_string())?;
        let mut command = compiler(folder.path())?;
        let output = command.arg("-fsyntax-only").arg(&source).output();
        let output = output.map_err(|error| format!("the C compiler does not run: {error}"))?;
        if output.status.success() { Ok(()) } else { Err(format!("{header} is not installed: run scripts/setup.sh")) }
    };
    probe().err()
}

/// Compiles `source` into `out` with additional arguments.
pub(crate) fn compile(source: &Path, out: &Path, arguments: &[&str]) -> Result<PathBuf, String> {
    let folder = out.parent().ok_or("no folder")?;
    let output = compiler(folder)?.args(["-Wall", "-Werror"]).args(arguments).arg(source).arg("-o").arg(out).output();
    let output = output.map_err(|error| error.to_string())?;
    if output.status.success() {
        Ok(out.to_owned())
    } else {
        Err(format!("{} does not compile:\n{}", source.display(), String::from_utf8_lossy(&output.stderr)))
    }
}
