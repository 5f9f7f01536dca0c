// SPDX-License-Identifier: MIT OR Apache-2.0

//! The target folder of the nested builds.

use std::path::{Path, PathBuf};

use crate::toolchain::Environment;

/// Returns the folder that the nested builds share: `gin-build` in the caller's target folder.
pub(crate) fn default_target_dir(environment: &Environment, kernels: &Path) -> PathBuf {
    let target = if let Some(out) = environment.var("OUT_DIR") {
        target_above(Path::new(out))
    } else if let Some(target) = environment.var("CARGO_TARGET_DIR") {
        PathBuf::from(target)
    } else {
        let targets: Vec<PathBuf> = kernels.ancestors().map(|dir| dir.join("target")).collect();
        let first = || targets[0].clone();
        targets.iter().map(PathBuf::as_path).find(|dir| is_target(dir)).map_or_else(first, Path::to_owned)
    };
    target.join("gin-build")
}

/// Returns true if cargo marked this folder as its target folder. Cargo marks a folder that it creates.
fn is_target(dir: &Path) -> bool {
    dir.join("CACHEDIR.TAG").is_file()
}

/// Returns the target folder that contains a build script's output folder, or the output folder itself if there is
/// none.
pub(crate) fn target_above(out: &Path) -> PathBuf {
    // The folder has no mark if cargo did not create it. The path below it is PROFILE/build/PACKAGE/out.
    let by_layout =
        || out.ancestors().nth(4).filter(|_| out.ancestors().nth(2).is_some_and(|dir| dir.ends_with("build")));
    out.ancestors().find(|dir| is_target(dir)).or_else(by_layout).unwrap_or(out).to_owned()
}
