// SPDX-License-Identifier: MIT OR Apache-2.0
//! Libraries in C that stand in for others.

use std::path::{Path, PathBuf};
use std::process::Command;

/// The names of the providers of [`libfabric_double`]: three whose hardware is rare, and one that promises nothing.
pub const PROVIDERS: [&str; 4] = ["efa", "cxi", "opx", "strange"];

/// The names of its providers that reach memory of GPUs. All windows are in GPUs there.
pub const PROVIDERS_FOR_GPUS: [&str; 3] = ["efa-gpu", "cxi-gpu", "opx-gpu"];

/// Compiles a libfabric whose providers keep no more than their documentation promises (`libfabric/double.c`) into
/// `folder`. Returns its path.
///
/// # Errors
/// There is no C compiler, or no header of libfabric: which.
///
/// # Panics
/// If the compiler refuses the source.
pub fn libfabric_double(folder: &Path) -> Result<PathBuf, String> {
    if !Path::new("/usr/include/rdma/fabric.h").is_file() {
        return Err("no rdma/fabric.h (Debian: libfabric-dev)".to_owned());
    }
    let sources = ["libfabric/double.c", "libfabric/offers.c"];
    compile(&sources, None, &folder.join(format!("libfabric-double-{}.so", std::process::id())))
}

/// Compiles a NCCL whose ranks are threads (`nccl/stand_in.c`) into `folder`. `version` is NCCL's number, such as 23007
/// for 2.30.7. Returns its path.
///
/// # Errors
/// There is no C compiler.
///
/// # Panics
/// If the compiler refuses the source.
pub fn nccl_stand_in(folder: &Path, version: u32) -> Result<PathBuf, String> {
    let file = folder.join(format!("libnccl-{version}-{}.so", std::process::id()));
    compile(&["nccl/stand_in.c"], Some(format!("-DVERSION={version}")), &file)
}

fn compile(sources: &[&str], option: Option<String>, file: &Path) -> Result<PathBuf, String> {
    let mut compile = Command::new("cc");
    compile.args(["-std=gnu11", "-O1", "-Wall", "-Wextra", "-Werror", "-Wno-missing-field-initializers"]);
    let sources = sources.iter().map(|source| Path::new(env!("CARGO_MANIFEST_DIR")).join(source));
    let output = compile.args(option).args(["-shared", "-fPIC", "-o"]).arg(file).args(sources).output();
    let output = output.map_err(|error| format!("cc: {error}"))?;
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    Ok(file.to_owned())
}
