// SPDX-License-Identifier: MIT OR Apache-2.0
//! The environment of compilers that a build script starts.

use std::ffi::OsStr;
use std::path::Path;
use std::process::Command;

/// Removes the environment of an outer cargo from a command.
///
/// A user's settings for all of cargo (its home, network and registries) stay.
pub(crate) fn scrub(command: &mut Command) {
    for (name, value) in std::env::vars_os() {
        if name == "LD_LIBRARY_PATH" {
            // An outer cargo adds its own compiler's libraries here, which another compiler must not load.
            let kept = std::env::split_paths(&value).filter(|path| !is_of_a_toolchain(path));
            match std::env::join_paths(kept) {
                Ok(paths) if !paths.is_empty() => command.env(&name, paths),
                _ => command.env_remove(&name),
            };
        } else if is_of_an_outer_cargo(&name) {
            command.env_remove(&name);
        }
    }
}

fn is_of_a_toolchain(path: &Path) -> bool {
    path.components().any(|part| matches!(part.as_os_str().to_str(), Some("toolchains" | "rustlib")))
}

pub(crate) fn is_of_an_outer_cargo(name: &OsStr) -> bool {
    const EXACT: [&str; 19] = [
        "CARGO",
        "DEBUG",
        "HOST",
        "MAKEFLAGS",
        "MFLAGS",
        "NUM_JOBS",
        "OPT_LEVEL",
        "OUT_DIR",
        "PROFILE",
        "RUSTC",
        "RUSTC_BOOTSTRAP",
        "RUSTC_LINKER",
        "RUSTC_WORKSPACE_WRAPPER",
        "RUSTC_WRAPPER",
        "RUSTDOC",
        "RUSTDOCFLAGS",
        "RUSTFLAGS",
        "RUSTUP_TOOLCHAIN",
        "TARGET",
    ];
    const KEPT: [&str; 7] = [
        "CARGO_CACHE_",
        "CARGO_HOME",
        "CARGO_HTTP_",
        "CARGO_NET_",
        "CARGO_REGISTRIES_",
        "CARGO_REGISTRY_",
        "CARGO_SOURCE_",
    ];
    let Some(name) = name.to_str() else {
        return false;
    };
    EXACT.contains(&name)
        || name == "RUST_RECURSION_COUNT"
        || name.starts_with("DEP_")
        || name.starts_with("__CARGO")
        || (name.starts_with("CARGO_") && !KEPT.iter().any(|kept| name.starts_with(kept)))
}
