// SPDX-License-Identifier: MIT OR Apache-2.0

//! Programs in C and C++ that use the library, on virtual GPUs.

mod common;

use common::{program, run};
use std::process::Command;

/// Compiles a program and runs it; it ends with `passed`.
fn passes(source: &str) {
    let folder = tempfile::tempdir().expect("make a folder");
    let said = run(&mut Command::new(program(source, folder.path())));
    assert!(said.contains("passed"), "{source}: {said}");
}

#[test]
fn two_ranks_of_a_c_program_put_and_check() {
    passes("tests/c/put.c");
}

#[test]
fn kernels_in_cpp_run_on_the_virtual_gpu() {
    let folder = tempfile::tempdir().expect("make a folder");
    let program = program("../examples/cuda-cpp/virtual.cpp", folder.path());
    for arguments in [&["4"][..], &["3", "network"], &["1"]] {
        let said = run(Command::new(&program).args(arguments));
        assert!(said.contains("passed"), "{arguments:?}: {said}");
    }
}
