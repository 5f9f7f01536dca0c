// SPDX-License-Identifier: MIT OR Apache-2.0
//! The crate in `docs/kernels.md` can be built and run.
#![cfg(feature = "cuda")]

use gin::build::{Arch, KernelBuilder, Limits, check};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Returns the files that the document shows. Each is a line with the path in backquotes and a colon, then a block with
/// the text.
fn files(document: &str) -> Vec<(&str, &str)> {
    let mut found = Vec::new();
    for (start, _) in document.match_indices("```") {
        let (before, block) = document.split_at(start);
        let Some(path) = before.trim_end().lines().last().and_then(|line| line.strip_prefix('`')?.strip_suffix("`:"))
        else {
            continue;
        };
        let (_, text) = block.split_once('\n').expect("a block has several lines");
        found.push((path, text.split_once("```").expect("a block ends").0));
    }
    found
}

/// Writes the files to this test's own folder, which is kept so that a second run compiles less. `others` are paths of
/// files that have another text here.
fn written(name: &str, others: &[(&str, &str)]) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    let files = files(include_str!("../docs/kernels.md"));
    let paths: Vec<&str> = files.iter().map(|(path, _)| *path).collect();
    assert_eq!(paths, ["kernels/Cargo.toml", "kernels/src/lib.rs", "Cargo.toml", "build.rs", "src/main.rs"]);
    for (path, text) in files {
        let text = others.iter().find(|(other, _)| *other == path).map_or(text, |(_, other)| other);
        let path = folder.join(path);
        // Packages of one name would replace each other in the target folder.
        let text = text.replace("my-", &format!("{name}-")).replace("my_", &format!("{}_", name.replace('-', "_")));
        let text = text.replace("path/to/gin", env!("CARGO_MANIFEST_DIR"));
        fs::create_dir_all(path.parent().expect("in the folder")).unwrap();
        if !fs::read_to_string(&path).is_ok_and(|there| there == text) {
            fs::write(&path, text).unwrap();
        }
    }
    // Uses the versions with which this workspace was tested, which are downloaded already.
    fs::copy(Path::new(env!("CARGO_MANIFEST_DIR")).join("Cargo.lock"), folder.join("Cargo.lock")).unwrap();
    folder
}

/// Returns a command that builds the program in this folder, and runs it.
fn cargo_run(folder: &Path) -> Command {
    // Uses the target folder of this build, which contains the kernels' `core` and the dependencies of build scripts.
    let target = Path::new(env!("CARGO_TARGET_TMPDIR")).parent().unwrap();
    let mut command = Command::new(env!("CARGO"));
    command.args(["run", "--offline"]).current_dir(folder).env("CARGO_TARGET_DIR", target);
    command.env_remove("RUSTFLAGS").stdin(Stdio::null());
    command
}

#[test]
fn the_program_in_the_docs_builds_with_its_kernels_and_runs() {
    let output = cargo_run(&written("documented", &[])).output().unwrap();
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{out}{err}");
    assert!(out.starts_with("ok, and ") && out.contains("PTX for sm_90"), "{out}");
    // The build script says what the kernels need, or that nothing was assembled.
    let figures =
        ["warning: documented-program@0.1.0: sm_90: `sum_of_left`: ", "sm_90: nothing was assembled: no ptxas found"];
    assert!(figures.iter().any(|figures| err.contains(figures)), "{err}");
}

#[test]
fn kernels_with_large_frames_run_without_optimisation_and_one_that_overflows_its_stack_is_named() {
    let others = [
        ("kernels/src/lib.rs", include_str!("plain_profile/kernels.rs")),
        ("src/main.rs", include_str!("plain_profile/program.rs")),
        ("build.rs", "fn main() {}\n"),
    ];
    let folder = written("plain-profile", &others);
    let output = cargo_run(&folder).output().unwrap();
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success() && out == "ok\n", "{out}{err}");
    assert!(err.contains("`dev` profile [unoptimized"), "{err}");

    let output = cargo_run(&folder).args(["--", "overflow"]).output().unwrap();
    let err = String::from_utf8_lossy(&output.stderr);
    let expected = "grid `too_deep` (launch 1), block 0, thread 0 overflowed its stack of 1048576 bytes";
    assert!(!output.status.success() && err.contains(expected) && err.contains("stack_bytes"), "{err}");
}

#[test]
fn the_kernels_in_the_docs_and_in_the_readme_become_ptx_that_keeps_the_rules() {
    let folder = written("documented-ptx", &[]).join("kernels");
    let (_, below) = include_str!("../README.md").split_once("## A kernel").unwrap();
    let (_, code) = below.split_once("```rust\n").unwrap();
    fs::write(folder.join("src/readme.rs"), code.split_once("```").unwrap().0).unwrap();
    let library = folder.join("src/lib.rs");
    let text = fs::read_to_string(&library).unwrap();
    fs::write(&library, format!("{text}\nmod readme;\n")).unwrap();

    let built = KernelBuilder::new(&folder).arch(Arch::Sm90).build().unwrap();
    let text = &built.module(Arch::Sm90).unwrap().text;
    for entry in [".entry sum_of_left(", ".entry ring_round("] {
        assert!(text.contains(entry), "expected {entry} in the PTX");
    }
    assert!(text.contains(".maxntid 256"), "expected launch bounds in the PTX");
    assert_eq!(check(text, &Limits::default()), []);
}
