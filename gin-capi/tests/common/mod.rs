// SPDX-License-Identifier: MIT OR Apache-2.0
//! Programs in C and C++ that tests compile and run.
#![allow(dead_code, reason = "each test program uses some of it")]

use std::path::{Path, PathBuf};
use std::process::Command;

/// The folder of this crate.
pub(crate) const HERE: &str = env!("CARGO_MANIFEST_DIR");

/// Returns a file that cargo built of this crate's library, beside this test program.
pub(crate) fn library(name: &str) -> PathBuf {
    let program = std::env::current_exe().expect("the path of this program");
    let folder = program.parent().expect("it is in a folder");
    let found = folder.join(name);
    assert!(found.is_file(), "{} does not exist", found.display());
    found
}

/// Runs a command, and returns its output.
///
/// # Errors
/// The command, its exit status and its output, if it fails.
pub(crate) fn try_run(command: &mut Command) -> Result<String, String> {
    let output = command.output().map_err(|error| format!("{command:?}: {error}"))?;
    let said = [output.stdout, output.stderr].concat();
    let said = String::from_utf8_lossy(&said);
    if output.status.success() { Ok(said.into_owned()) } else { Err(format!("{command:?}: {}\n{said}", output.status)) }
}

/// Runs a command that succeeds, and returns its output.
pub(crate) fn run(command: &mut Command) -> String {
    try_run(command).unwrap_or_else(|error| panic!("{error}"))
}

/// Returns the C or C++ compiler of this machine.
pub(crate) fn compiler(cpp: bool) -> Command {
    let mut build = cc::Build::new();
    // gin runs on Linux.
    let host = format!("{}-unknown-linux-gnu", std::env::consts::ARCH);
    build.cpp(cpp).opt_level(1).host(&host).target(&host).cargo_metadata(false).warnings(false);
    let mut command = build.get_compiler().to_command();
    let standard = if cpp { "-std=c++17" } else { "-std=c11" };
    command.args([standard, "-Wall", "-Wextra", "-Werror", "-pedantic", "-g0"]);
    command.arg(format!("-I{HERE}/include"));
    command
}

/// Compiles a program of this crate's folder, links it with a shared library, and returns its path.
pub(crate) fn program_with(source: &str, library: &Path, to: &Path) -> PathBuf {
    let source = Path::new(HERE).join(source);
    let program = to.join(source.file_stem().expect("a source has a name"));
    let mut command = compiler(source.extension().is_some_and(|end| end == "cpp"));
    run(command.arg(&source).arg("-o").arg(&program).arg(library).args(["-pthread", "-lm"]));
    program
}

/// Does the same with this crate's library.
pub(crate) fn program(source: &str, to: &Path) -> PathBuf {
    program_with(source, &library("libgin_capi.so"), to)
}
