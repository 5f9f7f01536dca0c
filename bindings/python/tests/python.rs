// SPDX-License-Identifier: MIT OR Apache-2.0
//! The suite of the Python package: each test of pytest in this folder is a trial here.
//!
//! The first run installs NumPy and pytest with pip in an environment below the target folder, `gin-py-venv`. The
//! tests import the extension of this build. If Python 3.10, its `venv` or pip's index is missing, the suite is one
//! trial, which is reported as ignored with the reason. With `GIN_PY_TORCH=1` (`make test-torch`) the environment has
//! torch, too, and with `GIN_PY_TRITON=1` Triton, which compiles kernels without a GPU.

mod common;

use common::{HERE, environment, package, run, target};
use libtest_mimic::{Arguments, Completion, Failed, Trial};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::sync::{Arc, OnceLock};

/// The outcome of a test of pytest: "passed", "failed" or "skipped", and a text.
type Outcome = (String, String);

/// The environment and the package that tests import.
struct Suite {
    python: PathBuf,
    package: PathBuf,
    results: PathBuf,
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
/// most of it is compiled already. Its two ranks put.
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
    let code = "import gincomm, runpy, sys; print(gincomm.__file__); runpy.run_path(sys.argv[1])";
    let program = Path::new(HERE).join("../../examples/python/hello_put.py");
    let mut program_of_a_user = Command::new(&python);
    program_of_a_user.args(["-c", code]).arg(program).env("PYTHONPATH", &folder).current_dir(&target);
    let output = run(&mut program_of_a_user)?;
    let expected = format!("{}/gincomm/__init__.py\n['hello from rank 1', 'hello from rank 0']\n", folder.display());
    match String::from_utf8_lossy(&output.stdout) {
        found if found == expected => Ok(Completion::Completed),
        found => Err(Failed::from(format!("expected {expected:?}, found {found:?}"))),
    }
}

/// Libraries that auditwheel's rule takes as given, as far as the extension may need them.
const GIVEN: [&str; 5] = ["libc.so.6", "libm.so.6", "libgcc_s.so.1", "ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1"];

/// Applies auditwheel's rule for the tag of a release's wheel to the extension: no symbol of a newer glibc than the tag
/// names, and no library that the rule does not take as given.
fn the_extension_keeps_the_rule_of_the_wheels_tag() -> Result<Completion, Failed> {
    let release = std::fs::read_to_string(Path::new(HERE).join("../../scripts/release.sh"))?;
    let (_, tag) = release.split_once("manylinux_2_").ok_or("scripts/release.sh names no tag")?;
    let tag: u32 = tag.split(|c: char| !c.is_ascii_digit()).next().unwrap_or_default().parse()?;
    let here = run(Command::new("getconf").arg("GNU_LIBC_VERSION"))?;
    let here = String::from_utf8_lossy(&here.stdout).trim().to_owned();
    if here.strip_prefix("glibc 2.").and_then(|minor| minor.parse::<u32>().ok()).is_none_or(|minor| minor > 36) {
        return Ok(Completion::ignored_with(format!("a release is built with glibc 2.36 or earlier, here is {here}")));
    }
    let extension = package(&target())?.join("gincomm/_gin.abi3.so");
    let output = run(Command::new("readelf").args(["--wide", "--dynamic", "--version-info"]).arg(extension))?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let needed = || text.lines().filter_map(|line| line.split_once("Shared library: [")?.1.strip_suffix(']'));
    let versions = || text.split_whitespace().filter_map(|word| word.strip_prefix("GLIBC_2."));
    let minor = |version: &str| version.split('.').next().and_then(|minor| minor.parse::<u32>().ok());
    if needed().count() == 0 || versions().count() == 0 {
        return Err(Failed::from(format!("readelf printed neither libraries nor versions: {text}")));
    }
    if let Some(library) = needed().find(|library| !GIVEN.contains(library)) {
        return Err(Failed::from(format!("the extension needs {library}")));
    }
    match versions().find(|version| minor(version).is_none_or(|minor| minor > tag)) {
        Some(version) => Err(Failed::from(format!("a symbol of GLIBC_2.{version} is newer than manylinux_2_{tag}"))),
        None => Ok(Completion::Completed),
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
    let name = "the_extension_keeps_the_rule_of_the_wheels_tag";
    trials.push(Trial::ignorable_test(name, the_extension_keeps_the_rule_of_the_wheels_tag));
    libtest_mimic::run(&arguments, trials).exit_code()
}
