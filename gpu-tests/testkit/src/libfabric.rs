// SPDX-License-Identifier: MIT OR Apache-2.0
//! A libfabric whose providers keep no more than their documentation promises (`libfabric/double.c`).

use std::path::{Path, PathBuf};
use std::process::Command;

/// The names of its providers: three whose hardware is rare, and one that promises nothing.
pub const PROVIDERS: [&str; 4] = ["efa", "cxi", "opx", "strange"];

/// Compiles the library into `folder`. Returns its path.
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
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("libfabric/double.c");
    let file = folder.join(format!("libfabric-double-{}.so", std::process::id()));
    let mut compile = Command::new("cc");
    compile.args(["-std=gnu11", "-O1", "-Wall", "-Wextra", "-Werror", "-Wno-missing-field-initializers"]);
    let output = compile.args(["-shared", "-fPIC", "-o"]).arg(&file).arg(source).output();
    let output = output.map_err(|error| format!("cc: {error}"))?;
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    Ok(file)
}
