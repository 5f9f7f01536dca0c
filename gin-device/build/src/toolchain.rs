// SPDX-License-Identifier: MIT OR Apache-2.0

//! The search for a compiler that can build `core` for `nvptx64-nvidia-cuda`.
//!
//! It needs the sources of `core` beside the compiler, an LLVM with the NVPTX target, and a rustc that marks every
//! function of a GPU target `convergent`. rustc does so since 1.96. An older rustc compiles the same kernels without a
//! message and lets LLVM move barriers and shuffles into divergent code.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::arch::Arch;
use crate::error::{BuildError, Rejected};

/// The target that kernels are compiled for.
pub const TARGET: &str = "nvptx64-nvidia-cuda";

/// Oldest minor version of rustc 1.x that marks all GPU functions convergent.
const MIN_MINOR: u32 = 96;

/// Programs of Debian's packages `rustc-web` and `cargo-web`.
const DEBIAN: (&str, &str) = ("/usr/bin/rustc", "/usr/bin/cargo");

/// The variables and folders that the search reads. Tests construct their own.
#[derive(Clone, Debug, Default)]
pub(crate) struct Environment {
    pub(crate) vars: BTreeMap<OsString, OsString>,
    /// Compiler and cargo of the distribution; `None` excludes them.
    pub(crate) distribution: Option<(PathBuf, PathBuf)>,
    /// The folder with CUDA's folders.
    pub(crate) local: Option<PathBuf>,
    /// The checkout of gin that this crate was built from.
    pub(crate) checkout: Option<PathBuf>,
}

impl Environment {
    pub(crate) fn of_this_process() -> Self {
        Environment {
            vars: std::env::vars_os().collect(),
            distribution: Some((DEBIAN.0.into(), DEBIAN.1.into())),
            local: Some("/usr/local".into()),
            checkout: Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).map(Path::to_owned),
        }
    }

    pub(crate) fn var(&self, name: &str) -> Option<&OsStr> {
        self.vars.get(OsStr::new(name)).map(OsString::as_os_str).filter(|value| !value.is_empty())
    }

    fn path_var(&self, name: &str) -> Option<PathBuf> {
        self.var(name).map(PathBuf::from)
    }

    pub(crate) fn toolchains_dir(&self) -> Option<PathBuf> {
        let home = self.path_var("RUSTUP_HOME").or_else(|| Some(self.path_var("HOME")?.join(".rustup")))?;
        Some(home.join("toolchains"))
    }
}

/// A compiler that can build kernels, with its cargo.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Toolchain {
    /// The compiler.
    pub rustc: PathBuf,
    /// The cargo that runs the compiler.
    pub cargo: PathBuf,
    /// First line of `rustc -vV`, such as `rustc 1.96.0 (ac68faa20 2026-05-25)`.
    pub version: String,
    /// GPU architectures that the compiler's LLVM supports, as `rustc --print target-cpus` names them.
    pub target_cpus: Vec<String>,
}

impl Toolchain {
    /// Finds a compiler: `GIN_RUSTC`/`GIN_CARGO`, then a rustup toolchain with `rust-src`, then Debian's.
    ///
    /// Among rustup's toolchains the newest release comes first, and nightlies come after all releases. A release was
    /// tested as such, and `RUSTC_BOOTSTRAP=1` enables the unstable features that the kernels need.
    ///
    /// # Errors
    /// Fails with [`BuildError::NoCompiler`], which gives the fault of each compiler found. Fails with
    /// [`BuildError::BadVariable`] if a variable names an unusable compiler. A compiler named by a variable may be
    /// older than 1.96; all other requirements hold.
    pub fn find() -> Result<Self, BuildError> {
        Self::find_in(&Environment::of_this_process())
    }

    pub(crate) fn find_in(environment: &Environment) -> Result<Self, BuildError> {
        if let Some(chosen) = Self::from_variables(environment)? {
            return Ok(chosen);
        }
        let mut rejected = Vec::new();
        let mut candidates: Vec<(Candidate, Version)> = Vec::new();
        for candidate in rustup_candidates(environment).into_iter().chain(distribution_candidate(environment)) {
            match candidate.version() {
                Ok(version) => candidates.push((candidate, version)),
                Err(reason) => rejected.push(Rejected { path: candidate.rustc, reason }),
            }
        }
        candidates.sort_by_key(|(candidate, version)| {
            (candidate.distribution, version.unreleased, std::cmp::Reverse((version.minor, version.patch)))
        });
        for (candidate, version) in candidates {
            match candidate.examine(&version, false) {
                Ok(toolchain) => return Ok(toolchain),
                Err(reason) => rejected.push(Rejected { path: candidate.rustc, reason }),
            }
        }
        Err(BuildError::NoCompiler { rejected })
    }

    fn from_variables(environment: &Environment) -> Result<Option<Self>, BuildError> {
        let (rustc, cargo) = (environment.path_var("GIN_RUSTC"), environment.path_var("GIN_CARGO"));
        let (variable, value) = match (&rustc, &cargo) {
            (Some(rustc), _) => ("GIN_RUSTC", rustc.clone()),
            (None, Some(cargo)) => ("GIN_CARGO", cargo.clone()),
            (None, None) => return Ok(None),
        };
        let bad = |reason: String| BuildError::BadVariable { variable, value: value.clone(), reason };
        let candidate = Candidate {
            rustc: rustc.unwrap_or_else(|| value.with_file_name("rustc")),
            cargo: cargo.unwrap_or_else(|| value.with_file_name("cargo")),
            distribution: false,
        };
        let version = candidate.version().map_err(bad)?;
        candidate.examine(&version, true).map(Some).map_err(bad)
    }

    /// Fails if the compiler's LLVM lacks an architecture.
    pub(crate) fn require(&self, arch: Arch) -> Result<(), BuildError> {
        if self.target_cpus.iter().any(|cpu| cpu == arch.name()) {
            return Ok(());
        }
        Err(BuildError::ArchUnknownToCompiler { arch, rustc: self.rustc.clone() })
    }
}

impl fmt::Display for Toolchain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} at {}", self.version, self.rustc.display())
    }
}

struct Candidate {
    rustc: PathBuf,
    cargo: PathBuf,
    distribution: bool,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Version {
    line: String,
    minor: u32,
    patch: u32,
    unreleased: bool,
}

impl Candidate {
    fn version(&self) -> Result<Version, String> {
        for program in [&self.rustc, &self.cargo] {
            if !program.is_file() {
                return Err(format!("{} does not exist", program.display()));
            }
        }
        let said = self.ask(&["-vV"])?;
        parse_version(&said).ok_or_else(|| format!("`rustc -vV` printed no known version: {}", said.trim()))
    }

    fn examine(&self, version: &Version, trusted: bool) -> Result<Toolchain, String> {
        if version.minor < MIN_MINOR && !trusted {
            return Err(format!(
                "{} is older than 1.{MIN_MINOR}, the first that marks GPU functions convergent; without that LLVM may \
                 move barriers and shuffles into divergent code",
                version.line
            ));
        }
        let sysroot = PathBuf::from(self.ask(&["--print", "sysroot"])?.trim());
        let core = sysroot.join("lib/rustlib/src/rust/library/core");
        if !core.join("src/lib.rs").is_file() {
            return Err(format!("{} has no sources of `core` (rust-src) at {}", version.line, core.display()));
        }
        let cpus = self
            .ask(&["--print", "target-cpus", "--target", TARGET])
            .map_err(|reason| format!("it cannot compile for {TARGET}: {reason}"))?;
        let target_cpus = parse_target_cpus(&cpus);
        if target_cpus.is_empty() {
            return Err(format!("its LLVM has no NVPTX target; `rustc --print target-cpus` gives: {}", cpus.trim()));
        }
        Ok(Toolchain {
            rustc: self.rustc.clone(),
            cargo: self.cargo.clone(),
            version: version.line.clone(),
            target_cpus,
        })
    }

    fn ask(&self, args: &[&str]) -> Result<String, String> {
        let mut command = Command::new(&self.rustc);
        crate::environment::scrub(&mut command);
        let output = command
            .args(args)
            .env("RUSTC_BOOTSTRAP", "1")
            .output()
            .map_err(|error| format!("cannot run {}: {error}", self.rustc.display()))?;
        if !output.status.success() {
            return Err(String::from_utf8_lossy(&output.stderr).trim().to_owned());
        }
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }
}

/// Returns the toolchains that rustup has installed.
fn rustup_candidates(environment: &Environment) -> Vec<Candidate> {
    let Some(dir) = environment.toolchains_dir() else {
        return Vec::new();
    };
    let Ok(entries) = fs::read_dir(dir) else {
        return Vec::new();
    };
    let mut roots: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).filter(|path| path.is_dir()).collect();
    roots.sort();
    roots.into_iter().map(|root| candidate_at(&root)).collect()
}

fn candidate_at(root: &Path) -> Candidate {
    Candidate { rustc: root.join("bin/rustc"), cargo: root.join("bin/cargo"), distribution: false }
}

fn distribution_candidate(environment: &Environment) -> Option<Candidate> {
    let (rustc, cargo) = environment.distribution.clone()?;
    // If neither package is installed, there is nothing to report.
    rustc.is_file().then_some(Candidate { rustc, cargo, distribution: true })
}

fn parse_version(said: &str) -> Option<Version> {
    let line = said.lines().next()?.trim().to_owned();
    let release = said.lines().find_map(|line| line.strip_prefix("release: "))?.trim();
    let (number, channel) = release.split_once('-').unwrap_or((release, ""));
    let mut parts = number.split('.').map(|part| part.parse::<u32>().ok());
    let (major, minor, patch) = (parts.next()??, parts.next()??, parts.next().flatten().unwrap_or(0));
    (major == 1).then_some(Version { line, minor, patch, unreleased: !channel.is_empty() })
}

fn parse_target_cpus(said: &str) -> Vec<String> {
    said.lines()
        .filter_map(|line| line.split_whitespace().next())
        .filter(|word| word.starts_with("sm_"))
        .map(str::to_owned)
        .collect()
}

#[cfg(test)]
#[path = "toolchain_tests.rs"]
mod tests;
