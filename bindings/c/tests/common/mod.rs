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
    build.cpp(cpp).opt_level(1).host(&host).target(&host).cargo_metadata(false);
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

/// Installs the libraries of this build below a folder, by scripts/install.sh, with the device functions in the folder
/// `device-lib` of `target`, if it has them. Returns the prefix.
pub(crate) fn installed(root: &Path, target: &Path) -> PathBuf {
    let libraries = library("libgin_capi.so").parent().expect("it is in a folder").to_owned();
    let mut install = Command::new(format!("{HERE}/../../scripts/install.sh"));
    install.env("LIBRARIES", libraries).env("CARGO_TARGET_DIR", target);
    run(install.env("DESTDIR", root).env("PREFIX", "/opt/gin"));
    root.join("opt/gin")
}

/// Returns CMake: that of this machine, else that of scripts/setup.sh.
///
/// # Errors
/// The reason why there is none.
pub(crate) fn cmake() -> Result<PathBuf, String> {
    let fetched = Path::new(HERE).join("../../target/build-tools/cmake/data/bin/cmake");
    for program in [PathBuf::from("cmake"), fetched] {
        if Command::new(&program).arg("--version").output().is_ok_and(|output| output.status.success()) {
            return Ok(program);
        }
    }
    Err("there is no cmake, neither on this machine nor in target/build-tools; scripts/setup.sh fetches one".to_owned())
}

/// Configures the example in CUDA C++ against an installed package, and builds it. Returns the folder of the programs.
pub(crate) fn by_cmake(cmake: &Path, prefix: &Path, options: &[&str]) -> PathBuf {
    let build = prefix.join("build");
    let mut configure = Command::new(cmake);
    configure.args(["-S", &format!("{HERE}/../../examples/cuda-cpp"), "-B"]).arg(&build);
    run(configure.arg(format!("-DCMAKE_PREFIX_PATH={}", prefix.display())).args(options));
    run(Command::new(cmake).arg("--build").arg(&build));
    build
}
