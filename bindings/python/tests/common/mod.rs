// SPDX-License-Identifier: MIT OR Apache-2.0
//! The environment in which tests run Python.

use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

/// The folder of this crate.
pub(crate) const HERE: &str = env!("CARGO_MANIFEST_DIR");

/// Packages of the environment. NumPy 2.1 was the first that writes to tensors of DLPack.
const PACKAGES: [&str; 2] = ["numpy>=2.1,<3", "pytest>=8,<9"];

/// The package of `make test-torch`.
const TORCH: &str = "torch";

/// The package that `GIN_PY_TRITON=1` adds. PyPI's torch brings it, too. 3.6 is the oldest version that was tried.
const TRITON: &str = "triton>=3.6";

/// Runs a command, and returns its output.
///
/// # Errors
/// The command, its exit status and its output, if it fails.
pub(crate) fn run(command: &mut Command) -> Result<Output, String> {
    let shown = format!("{command:?}");
    let output = command.stdin(Stdio::null()).output().map_err(|error| format!("{shown}: {error}"))?;
    if output.status.success() {
        return Ok(output);
    }
    let text = [&output.stdout[..], &output.stderr].concat();
    Err(format!("{shown} ended with {}: {}", output.status, String::from_utf8_lossy(&text)))
}

/// Returns the last line that is not empty.
pub(crate) fn last(text: &str) -> &str {
    text.lines().rfind(|line| !line.trim().is_empty()).unwrap_or(text)
}

/// Makes the environment, unless a run before has made it.
///
/// # Errors
/// The reason why there is none.
pub(crate) fn environment(target: &Path, torch: bool) -> Result<PathBuf, String> {
    let asked = "import sys, venv, ensurepip; sys.version_info >= (3, 10) or sys.exit(f'it is {sys.version_info[:2]}')";
    let found = run(Command::new("python3").args(["-c", asked]));
    found.map_err(|error| format!("no Python 3.10 with venv and pip: {}", last(&error)))?;
    let folder = target.join("gin-py-venv");
    let (python, mark) = (folder.join("bin/python"), folder.join("gin-packages"));
    let has = std::fs::read_to_string(&mark).unwrap_or_default();
    let has = |package: &str| has.split(' ').any(|each| each == package);
    let triton = std::env::var("GIN_PY_TRITON").is_ok_and(|value| value == "1") && !torch && !has(TORCH);
    let wanted: Vec<&str> =
        PACKAGES.into_iter().chain(torch.then_some(TORCH)).chain(triton.then_some(TRITON)).collect();
    // One with more packages serves, too.
    if python.exists() && wanted.iter().all(|package| has(package)) {
        return Ok(python);
    }
    let wanted = wanted.join(" ");
    run(Command::new("python3").args(["-m", "venv", "--clear"]).arg(&folder))
        .map_err(|error| format!("python3 -m venv failed: {}", last(&error)))?;
    // Without a wheel for this Python, pip would compile for minutes.
    let pip = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-input", "--only-binary=:all:"];
    run(Command::new(&python).args(pip).args(wanted.split(' ')))
        .map_err(|error| format!("pip could not install {wanted}: {}", last(&error)))?;
    std::fs::write(&mark, wanted).map_err(|error| error.to_string())?;
    Ok(python)
}

/// Puts the package together: its Python files, and the extension of this build.
pub(crate) fn package(target: &Path) -> Result<PathBuf, String> {
    let program = std::env::current_exe().map_err(|error| error.to_string())?;
    let extension = program.with_file_name("libgin_py.so");
    let folder = target.join("gin-py-package");
    let inner = folder.join("gincomm");
    let copy = || {
        std::fs::create_dir_all(&inner)?;
        for entry in std::fs::read_dir(Path::new(HERE).join("python/gincomm"))?.flatten() {
            if entry.path().is_file() {
                std::fs::copy(entry.path(), inner.join(entry.file_name()))?;
            }
        }
        // A process that still has the old file open keeps it.
        let new = inner.join("_gin.new");
        std::fs::copy(&extension, &new)?;
        std::fs::rename(new, inner.join("_gin.abi3.so"))
    };
    copy()
        .map_err(|error| format!("cannot put {} together from {}: {error}", folder.display(), extension.display()))?;
    Ok(folder)
}

/// Returns the target folder.
pub(crate) fn target() -> PathBuf {
    Path::new(env!("CARGO_TARGET_TMPDIR")).parent().unwrap_or(Path::new("target")).to_path_buf()
}
