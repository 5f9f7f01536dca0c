// SPDX-License-Identifier: MIT OR Apache-2.0
//! Device code accesses shared words through `sys` alone, and uses every operation of `sys`.

use gin_device::sys::OPERATIONS;
use std::fs;
use std::path::{Path, PathBuf};

/// Sources that become device code, relative to the workspace.
const DEVICE_CODE: [&str; 6] = [
    "gin-device/abi/src",
    "gin-device/src",
    "gin-kernels/src",
    "bench/kernels/src",
    "gpu-tests/conformance/src/op.rs",
    "gpu-tests/conformance/src/script.rs",
];

/// The files of these that use the language's atomics, each with the file and the line that keep it out of PTX.
const NOT_ON_A_GPU: [(&str, &str, &str); 6] = [
    ("gin-device/src/sys/cpu.rs", "gin-device/src/sys/mod.rs", "#[cfg(not(target_arch = \"nvptx64\"))]\nmod cpu;"),
    (
        "gin-device/src/sys/bulk/cpu.rs",
        "gin-device/src/sys/bulk/mod.rs",
        "#[cfg(not(target_arch = \"nvptx64\"))]\nmod cpu;",
    ),
    (
        "gin-device/src/sys/data/cpu.rs",
        "gin-device/src/sys/data/mod.rs",
        "#[cfg(not(target_arch = \"nvptx64\"))]\nmod cpu;",
    ),
    (
        "gin-device/src/sys/shared/cpu.rs",
        "gin-device/src/sys/shared/mod.rs",
        "#[cfg(not(target_arch = \"nvptx64\"))]\nmod cpu;",
    ),
    ("gin-device/src/sys/loom.rs", "gin-device/src/sys/mod.rs", "#[cfg(feature = \"loom\")]\npub mod loom;"),
    // The pointer to the executor of a virtual GPU.
    (
        "gin-device/src/exec.rs",
        "gin-device/src/lib.rs",
        "#[cfg(not(target_arch = \"nvptx64\"))]\n#[doc(hidden)]\npub mod exec;",
    ),
];

fn workspace() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// Returns the Rust files at or below `path`, relative to the workspace, and their texts.
fn files(path: &str) -> Vec<(String, String)> {
    let full = workspace().join(path);
    if full.is_dir() {
        let entries = fs::read_dir(&full).unwrap_or_else(|error| panic!("{path}: {error}"));
        let names = entries.map(|entry| entry.expect("an entry").file_name().into_string().expect("an ASCII name"));
        return names.flat_map(|name| files(&format!("{path}/{name}"))).collect();
    }
    if !path.ends_with(".rs") {
        return Vec::new();
    }
    vec![(path.to_owned(), fs::read_to_string(&full).unwrap_or_else(|error| panic!("{path}: {error}")))]
}

/// Returns the numbered lines without their comments.
fn code(text: &str) -> impl Iterator<Item = (usize, &str)> {
    (1..).zip(text.lines()).map(|(number, line)| (number, line.split("//").next().unwrap_or_default()))
}

/// Returns whether a line of code names the language's atomics, by any path.
fn names_atomics(line: &str) -> bool {
    line.contains("sync::atomic") || line.contains("intrinsics::atomic") || {
        let mut words = line.split(|c: char| !(c.is_alphanumeric() || c == '_'));
        words.any(|word| word.strip_prefix("Atomic").is_some_and(|rest| rest.starts_with(['U', 'I', 'P', 'B'])))
    }
}

#[test]
fn device_code_uses_no_atomics_of_the_language() {
    let mut seen = 0;
    for (path, text) in DEVICE_CODE.iter().flat_map(|path| files(path)) {
        seen += 1;
        if NOT_ON_A_GPU.iter().any(|(allowed, ..)| *allowed == path) {
            continue;
        }
        let found = code(&text).find(|(_, line)| names_atomics(line));
        assert!(found.is_none(), "{path}:{}: {}", found.unwrap().0, found.unwrap().1);
    }
    assert!(seen > 40, "only {seen} files were read");
}

#[test]
fn files_that_may_use_atomics_do_and_are_not_compiled_for_a_gpu() {
    for (path, parent, line) in NOT_ON_A_GPU {
        let (own, parent_text) = (files(path), files(parent));
        assert!(code(&own[0].1).any(|(_, line)| names_atomics(line)), "{path} needs no exception");
        assert!(parent_text[0].1.contains(line), "{parent} has no {line:?}");
    }
}

#[test]
fn atomics_are_found_however_they_are_named() {
    for line in ["use core::sync::atomic::fence;", "static X: AtomicU32 = y;", "let a = &AtomicPtr::new(b);"] {
        assert!(names_atomics(line), "{line}");
    }
    for line in ["an Atomic word", "AtomicX", "sync", "use gin_device::sys;"] {
        assert!(!names_atomics(line), "{line}");
    }
    assert!(code("x // sync::atomic").all(|(_, line)| !names_atomics(line)));
}

#[test]
fn every_operation_of_sys_is_used() {
    let folders =
        ["gin-device/src", "gin-device/tests", "gpu-tests/conformance/src", "gin-host/src", "gin-host/virtual/tests"];
    let all: Vec<_> = folders.iter().flat_map(|path| files(path)).collect();
    let used = |name: &str| {
        let texts = all.iter().filter(|(path, _)| !path.starts_with("gin-device/src/sys/"));
        texts.into_iter().any(|(_, text)| {
            // A call: the name, a generic argument perhaps, and a parenthesis.
            code(text).any(|(_, line)| line.contains(&format!("{name}(")) && !line.contains(&format!("fn {name}(")))
        })
    };
    for row in OPERATIONS {
        assert!(used(row.name), "{} is not used", row.name);
    }
    assert!(!used("swap_relaxed_cta"), "a name that does not exist");
}
