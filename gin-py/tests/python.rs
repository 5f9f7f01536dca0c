// SPDX-License-Identifier: MIT OR Apache-2.0
//! The suite of the Python package: each test of pytest in this folder is a trial here.
//!
//! The first run installs NumPy and pytest with pip in an environment below the target folder, `gin-py-venv`. The
//! tests import the extension of this build. If Python 3.10, its `venv` or pip's index is missing, the suite is one
//! trial, which is reported as ignored with the reason. With `GIN_PY_TORCH=1` (`make test-torch`) the environment has
//! torch, too.

use libtest_mimic::{Arguments, Completion, Failed, Trial};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Output, Stdio};
use std::sync::{Arc, OnceLock};

const HERE: &str = env!("CARGO_MANIFEST_DIR");

/// Packages of the environment. NumPy 2.1 was the first that writes to tensors of DLPack.
const PACKAGES: [&str; 2] = ["numpy>=2.1,<3", "pytest>=8,<9"];

/// The package of `make test-torch`.
const TORCH: &str = "torch";

/// The outcome of a test of pytest: "passed", "failed" or "skipped", and a text.
type Outcome = (String, String);

/// The environment and the package that tests import.
struct Suite {
    python: PathBuf,
    package: PathBuf,
    results: PathBuf,
}

fn run(command: &mut Command) -> Result<Output, String> {
    let shown = format!("{command:?}");
    let output = command.stdin(Stdio::null()).output().map_err(|error| format!("{shown}: {error}"))?;
    if output.status.success() {
        return Ok(output);
    }
    let text = [&output.stdout[..], &output.stderr].concat();
    Err(format!("{shown} ended with {}: {}", output.status, String::from_utf8_lossy(&text)))
}

/// Returns the last line that is not empty.
fn last(text: &str) -> &str {
    text.lines().rfind(|line| !line.trim().is_empty()).unwrap_or(text)
}

/// Makes the environment, unless a run before has made it.
///
/// # Errors
/// The reason why there is none.
fn environment(target: &Path, torch: bool) -> Result<PathBuf, String> {
    let asked = "import sys, venv, ensurepip; sys.version_info >= (3, 10) or sys.exit(f'it is {sys.version_info[:2]}')";
    let found = run(Command::new("python3").args(["-c", asked]));
    found.map_err(|error| format!("no Python 3.10 with venv and pip: {}", last(&error)))?;
    let folder = target.join("gin-py-venv");
    let wanted = PACKAGES.iter().copied().chain(torch.then_some(TORCH)).collect::<Vec<_>>().join(" ");
    let (python, mark) = (folder.join("bin/python"), folder.join("gin-packages"));
    let has = std::fs::read_to_string(&mark).unwrap_or_default();
    // One with torch serves both.
    if python.exists() && has.starts_with(&wanted) {
        return Ok(python);
    }
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
fn package(target: &Path) -> Result<PathBuf, String> {
    let program = std::env::current_exe().map_err(|error| error.to_string())?;
    let extension = program.with_file_name("libgin_py.so");
    let folder = target.join("gin-py-package");
    let inner = folder.join("gin");
    let copy = || {
        std::fs::create_dir_all(&inner)?;
        for entry in std::fs::read_dir(Path::new(HERE).join("python/gin"))?.flatten() {
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

impl Suite {
    fn pytest(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(&self.python);
        command
            .args(["-m", "pytest", "-q", "-p", "no:cacheprovider"])
            .args(arguments)
            .arg(Path::new(HERE).join("tests"));
        command.env("PYTHONPATH", &self.package).env("PYTHONDONTWRITEBYTECODE", "1").current_dir(HERE);
        command
    }

    /// Returns the names of all tests.
    fn names(&self) -> Result<Vec<String>, String> {
        let output = run(&mut self.pytest(&["--collect-only"]))?;
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        Ok(text.lines().filter(|line| line.contains("::")).map(str::to_owned).collect())
    }

    /// Runs all tests. Returns their outcomes by name.
    fn outcomes(&self) -> Result<BTreeMap<String, Outcome>, String> {
        let _ = std::fs::remove_file(&self.results);
        let status = run(self.pytest(&[]).env("GIN_PY_RESULTS", &self.results));
        let text = std::fs::read_to_string(&self.results).unwrap_or_default();
        let mut all = BTreeMap::new();
        for line in text.lines() {
            let fields: Vec<String> = serde_json::from_str(line).map_err(|error| format!("{line}: {error}"))?;
            let [name, outcome, text] = fields.try_into().map_err(|fields| format!("{fields:?}"))?;
            // The end of a test that has passed may fail.
            let worse = |old: &Outcome| old.0 == "passed";
            if all.get(&name).is_none_or(worse) {
                all.insert(name, (outcome, text));
            }
        }
        // A crash leaves tests without an outcome.
        match status {
            Err(error) if all.values().all(|(outcome, _)| outcome != "failed") => Err(error),
            _ => Ok(all),
        }
    }
}

/// Returns the target folder.
fn target() -> PathBuf {
    Path::new(env!("CARGO_TARGET_TMPDIR")).parent().unwrap_or(Path::new("target")).to_path_buf()
}

fn with_torch() -> bool {
    std::env::var("GIN_PY_TORCH").is_ok_and(|value| value == "1")
}

fn suite() -> Result<(Suite, Vec<String>), String> {
    let target = target();
    let python = environment(&target, with_torch())?;
    let suite = Suite { python, package: package(&target)?, results: target.join("gin-py-results") };
    let names = suite.names()?;
    Ok((suite, names))
}

/// Installs the package by pip from its folder, as a user does, but as this profile and with these features, so that
/// most of it is compiled already.
fn pip_installs_the_package() -> Result<Completion, Failed> {
    if !with_torch() {
        // pip builds the package without the features that other crates of the workspace need, which takes minutes.
        return Ok(Completion::ignored_with("make test-torch runs it"));
    }
    let target = target();
    let python = environment(&target, true)?;
    let folder = target.join("gin-py-installed");
    let features = if cfg!(feature = "cuda") { "" } else { "--no-default-features " };
    let profile = if cfg!(debug_assertions) { "dev" } else { "release" };
    let mut pip = Command::new(&python);
    pip.args(["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", "--upgrade", "--target"]);
    pip.arg(&folder).arg(HERE).arg(format!("--config-settings=build-args={features}--profile {profile}"));
    run(&mut pip)?;
    let code = "import gin; print(gin.__file__, gin.launch(2, lambda rank: rank.rank, device='virtual'))";
    let output = run(Command::new(&python).args(["-c", code]).env("PYTHONPATH", &folder).current_dir(&target))?;
    let expected = format!("{}/gin/__init__.py [0, 1]\n", folder.display());
    match String::from_utf8_lossy(&output.stdout) {
        found if found == expected => Ok(Completion::Completed),
        found => Err(Failed::from(format!("expected {expected:?}, found {found:?}"))),
    }
}

fn main() -> ExitCode {
    let arguments = Arguments::from_args();
    let mut trials = match suite() {
        Err(reason) if reason.starts_with("no Python") || reason.starts_with("pip could not") => {
            vec![Trial::ignorable_test("python", move || Ok(Completion::ignored_with(reason)))]
        }
        Err(reason) => vec![Trial::test("python", move || Err(Failed::from(reason)))],
        Ok((suite, names)) => {
            let shared = Arc::new((suite, OnceLock::new()));
            let trial = |name: String| {
                let (shared, key) = (shared.clone(), name.clone());
                Trial::ignorable_test(name, move || {
                    let (suite, outcomes) = &*shared;
                    let all = outcomes.get_or_init(|| suite.outcomes());
                    match all.as_ref().map_err(Failed::from)?.get(&key) {
                        Some((outcome, _)) if outcome == "passed" => Ok(Completion::Completed),
                        Some((outcome, text)) if outcome == "skipped" => Ok(Completion::ignored_with(text)),
                        Some((_, text)) => Err(Failed::from(text)),
                        None => Err(Failed::from("pytest has not run it")),
                    }
                })
            };
            names.into_iter().map(trial).collect()
        }
    };
    trials.push(Trial::ignorable_test("pip_installs_the_package", pip_installs_the_package));
    libtest_mimic::run(&arguments, trials).exit_code()
}
