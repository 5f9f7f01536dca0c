// SPDX-License-Identifier: MIT OR Apache-2.0
//! The project that `gin new` writes, whose manifests `docs/kernels.md` shows, can be built, tested and run.
#![cfg(feature = "cuda")]

use gin_build::{Arch, KernelBuilder, Limits, check};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

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

/// Runs `gin new` with these arguments in `folder`.
fn gin_new(folder: &Path, arguments: &[&str]) -> Output {
    fs::create_dir_all(folder).unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_gin"));
    command.arg("new").args(arguments).current_dir(folder).stdin(Stdio::null()).output().unwrap()
}

/// Writes the project `name` into the same folder each time, so that a second run compiles less.
fn new_project(name: &str, options: &[&str]) -> PathBuf {
    let above = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let folder = above.join(name);
    if folder.exists() {
        fs::remove_dir_all(&folder).unwrap();
    }
    let output = gin_new(above, &[options, &[name]].concat());
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    // Uses the versions with which this workspace was tested, which are downloaded already.
    fs::copy(Path::new(env!("CARGO_MANIFEST_DIR")).join("Cargo.lock"), folder.join("Cargo.lock")).unwrap();
    folder
}

/// Runs cargo in a project. Returns whether it succeeded, and its two outputs.
fn cargo(folder: &Path, command: &str, arguments: &[&str]) -> (bool, String, String) {
    // Uses the target folder of this build, which contains the kernels' `core` and the dependencies of build scripts.
    let target = Path::new(env!("CARGO_TARGET_TMPDIR")).parent().unwrap();
    let output = Command::new(env!("CARGO"))
        .args([command, "--offline"])
        .args(arguments)
        .current_dir(folder)
        .env("CARGO_TARGET_DIR", target)
        .env_remove("RUSTFLAGS")
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let (out, err) = (text(&output.stdout), text(&output.stderr));
    (output.status.success(), out, err)
}

#[test]
fn a_new_project_builds_with_its_kernels_runs_and_passes_its_test() {
    let folder = new_project("first-hour", &[]);
    let (succeeded, out, err) = cargo(&folder, "run", &[]);
    assert!(succeeded, "{out}{err}");
    assert!(out.starts_with("on ") && out.ends_with("sums: [3000, 1000, 2000]\n"), "{out}");
    // The build script says what the kernels need, or that nothing was assembled.
    let figures = ["warning: first-hour@0.1.0: sm_90: `sum_of_left`: ", "sm_90: nothing was assembled: no ptxas found"];
    assert!(figures.iter().any(|figures| err.contains(figures)), "{err}");
    let (succeeded, out, err) = cargo(&folder, "test", &[]);
    assert!(succeeded, "{out}{err}");
    for test in
        ["every_seed_adds_up_the_elements_of_the_left_neighbour", "each_gpu_adds_up_the_elements_of_its_left_neighbour"]
    {
        assert!(out.contains(&format!("{test} ... ok")), "{test}: {out}");
    }
}

#[test]
fn a_new_project_for_nccl_passes_its_test_or_says_what_to_install() {
    let folder = new_project("first-nccl", &["--nccl"]);
    let (succeeded, out, err) = cargo(&folder, "test", &[]);
    if succeeded {
        assert!(out.contains("every_seed_adds_the_elements_of_the_left_neighbour ... ok"), "{out}");
        return;
    }
    assert!(err.contains("cannot link NCCL's device functions: found no "), "{out}{err}");
    let remedies = ["pip install nvidia-nccl-cu13==2.30.7", "rustup component add llvm-tools"];
    assert!(remedies.iter().any(|remedy| err.contains(remedy)), "{err}");
}

#[test]
fn the_docs_show_the_project_that_the_command_writes() {
    let template = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/new/template");
    let shown = files(include_str!("../docs/kernels.md"));
    let paths: Vec<&str> = shown.iter().map(|(path, _)| *path).collect();
    assert_eq!(paths, ["kernels/Cargo.toml", "Cargo.toml", "build.rs"]);
    for (path, text) in shown {
        assert_eq!(
            text,
            fs::read_to_string(template.join(path.replace("Cargo.toml", "Cargo.toml.in"))).unwrap(),
            "{path}: copy the template's file"
        );
    }
}

#[test]
fn bad_names_used_folders_and_checkouts_that_are_none_are_refused_with_the_reason() {
    let folder = tempfile::tempdir().unwrap();
    fs::create_dir_all(folder.path().join("used/inner")).unwrap();
    fs::write(folder.path().join("file"), "").unwrap();
    let cases: [(&[&str], &str); 6] = [
        (&["Two"], "`Two` cannot be a project's name: use a lower-case letter"),
        (&["inner/.."], "`` cannot be a project's name"),
        (&["used"], "used is not empty: choose another one"),
        (&["file"], "cannot be the project's folder"),
        (&["other", "--path", "used"], "used has no gin-device/Cargo.toml; --path takes"),
        (&["other", "--path", ".", "--git", "https://example.org/gin"], "cannot be used with"),
    ];
    for (arguments, reason) in cases {
        let output = gin_new(folder.path(), arguments);
        let text = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.code() == Some(2) && text.contains(reason), "{arguments:?}: {text}");
    }
    assert!(!folder.path().join("other").exists());

    // An empty folder is fine.
    fs::create_dir(folder.path().join("used/empty")).unwrap();
    let output = gin_new(folder.path(), &["used/empty", "--git", "https://example.org/gin"]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let manifest = fs::read_to_string(folder.path().join("used/empty/kernels/Cargo.toml")).unwrap();
    assert!(manifest.contains(r#"gin-device = { git = "https://example.org/gin" }"#), "{manifest}");
}

#[test]
fn kernels_with_large_frames_run_without_optimisation_and_one_that_overflows_its_stack_is_named() {
    let folder = new_project("plain-profile", &[]);
    let here = |text: &str| text.replace("my_kernels", "plain_profile_kernels");
    for (path, text) in [
        ("kernels/src/lib.rs", include_str!("plain_profile/kernels.rs")),
        ("src/main.rs", include_str!("plain_profile/program.rs")),
        ("build.rs", "fn main() {}\n"),
    ] {
        fs::write(folder.join(path), here(text)).unwrap();
    }
    let (succeeded, out, err) = cargo(&folder, "run", &[]);
    assert!(succeeded && out == "ok\n", "{out}{err}");
    assert!(err.contains("`dev` profile [unoptimized"), "{err}");

    let (succeeded, _, err) = cargo(&folder, "run", &["--", "overflow"]);
    let expected = "grid `too_deep` (launch 1), block 0, thread 0 overflowed its stack of 1048576 bytes";
    assert!(!succeeded && err.contains(expected) && err.contains("stack_bytes"), "{err}");
}

#[test]
fn the_kernels_in_the_docs_and_in_the_readme_become_ptx_that_keeps_the_rules() {
    let folder = new_project("documented-kernels", &[]).join("kernels");
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
