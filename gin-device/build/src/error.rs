// SPDX-License-Identifier: MIT OR Apache-2.0

//! Errors between a kernel crate and its PTX.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

use crate::arch::{Arch, MAX_PTX_VERSION, UnknownArch};
use crate::ptx::MarkerError;

/// Commands that install a usable compiler. The errors print them.
pub const INSTALL_COMMANDS: [&str; 2] =
    ["rustup toolchain install nightly --component rust-src", "apt-get install rustc-web rust-web-src cargo-web"];

/// A compiler that was found and rejected.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rejected {
    /// The `rustc`, or the folder where one was expected.
    pub path: PathBuf,
    /// The missing requirement.
    pub reason: String,
}

/// The reason why no PTX was produced.
///
/// `Debug` shows what `Display` shows, so that an error that leaves a build script by `?` can be read.
#[non_exhaustive]
pub enum BuildError {
    /// No compiler on this machine can build `core` for `nvptx64-nvidia-cuda`.
    NoCompiler {
        /// Every compiler that was found, with its fault.
        rejected: Vec<Rejected>,
    },
    /// The compiler named by a variable cannot be used.
    BadVariable {
        /// Name of the variable.
        variable: &'static str,
        /// Value of the variable.
        value: PathBuf,
        /// The reason.
        reason: String,
    },
    /// The folder of the kernel crate has no readable `Cargo.toml`.
    NoManifest {
        /// Path of the expected manifest.
        path: PathBuf,
    },
    /// The kernel crate is not a dependency that names its folder.
    NoDependency {
        /// The `links` name of the kernel crate.
        links: String,
        /// The variable that would name the folder.
        variable: String,
    },
    /// No architecture was requested.
    NoArch,
    /// A single `.ptx` file was given as the destination of several architectures.
    OneFileForMany {
        /// The destination.
        path: PathBuf,
        /// Number of architectures.
        archs: usize,
    },
    /// The compiler does not know the architecture.
    ArchUnknownToCompiler {
        /// The architecture.
        arch: Arch,
        /// The compiler's `rustc`.
        rustc: PathBuf,
    },
    /// The nested cargo failed.
    Compile {
        /// Architecture of the build.
        arch: Arch,
        /// The command, as a line for a shell.
        command: String,
        /// Output of cargo and the compiler.
        output: String,
    },
    /// The nested cargo succeeded but left no PTX.
    NoPtx {
        /// Architecture of the build.
        arch: Arch,
        /// Expected path of the PTX.
        path: PathBuf,
    },
    /// The PTX is newer than [`MAX_PTX_VERSION`], or its version cannot be read.
    PtxVersion {
        /// Architecture of the module.
        arch: Arch,
        /// The version found.
        found: Option<(u32, u32)>,
    },
    /// A launch-bounds marker cannot be applied.
    Marker {
        /// Architecture of the module.
        arch: Arch,
        /// The fault of the marker.
        error: MarkerError,
    },
    /// `ptxas` refused the PTX.
    Assemble {
        /// Architecture of the module.
        arch: Arch,
        /// The PTX file.
        ptx: PathBuf,
        /// Output of `ptxas`.
        output: String,
    },
    /// A tool that makes a library of device functions failed.
    Link {
        /// The tool.
        tool: PathBuf,
        /// Its output.
        output: String,
    },
    /// NCCL's device library cannot be linked: it or a program is missing, or its version is not the tested one.
    Nccl {
        /// The reason, and what to install.
        reason: String,
    },
    /// The IR has a name that some versions of LLVM do not know.
    Ir {
        /// The file of the IR.
        path: PathBuf,
        /// The line with the name.
        name: String,
    },
    /// `nvdisasm` did not disassemble a module.
    Disassemble {
        /// The file with the machine code.
        cubin: PathBuf,
        /// Output of `nvdisasm`.
        output: String,
    },
    /// A module has no kernel of this name.
    NoKernel {
        /// The kernel.
        kernel: String,
    },
    /// `ptxas` was required, but no usable one was found.
    NoPtxas {
        /// The reason.
        reason: String,
    },
    /// A file or process operation failed.
    Io {
        /// The operation.
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// The error of the operating system.
        source: io::Error,
    },
}

impl BuildError {
    pub(crate) fn io(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> BuildError {
        let path = path.to_owned();
        move |source| BuildError::Io { action, path, source }
    }
}

impl fmt::Display for BuildError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            BuildError::NoCompiler { rejected } => {
                writeln!(f, "found no Rust compiler that can build `core` for nvptx64-nvidia-cuda. Install one with")?;
                for (i, command) in INSTALL_COMMANDS.iter().enumerate() {
                    writeln!(f, "{}    {command}", if i == 0 { "" } else { "or, on Debian,\n" })?;
                }
                write!(f, "or name one with GIN_RUSTC and GIN_CARGO.")?;
                for Rejected { path, reason } in rejected {
                    write!(f, "\nNot usable: {}: {reason}.", path.display())?;
                }
                Ok(())
            }
            BuildError::BadVariable { variable, value, reason } => {
                write!(f, "{variable}={} cannot be used: {reason}", value.display())
            }
            BuildError::NoManifest { path } => {
                write!(f, "found no kernel crate: cannot read {}", path.display())
            }
            BuildError::NoDependency { links, variable } => write!(
                f,
                "cargo passes no {variable}: list the kernel crate in [dependencies]; its manifest needs \
                 `links = \"{links}\"`, and its build script prints `cargo::metadata=folder=` and the crate's folder"
            ),
            BuildError::NoArch => write!(f, "no GPU architecture was requested; call `arch` or `archs`"),
            BuildError::OneFileForMany { path, archs } => {
                write!(f, "{} is one file, but {archs} architectures were requested; name a folder", path.display())
            }
            BuildError::ArchUnknownToCompiler { arch, rustc } => {
                write!(f, "{} does not know {arch}; use a newer compiler", rustc.display())
            }
            BuildError::Compile { arch, command, output } => {
                let output = errors_of(output);
                write!(f, "compiling the kernels for {arch} failed. The command was\n  {command}\n\n{output}")
            }
            BuildError::NoPtx { arch, path } => {
                write!(f, "the compiler left no PTX for {arch} at {}", path.display())
            }
            BuildError::PtxVersion { arch, found: Some((major, minor)) } => write!(
                f,
                "the PTX for {arch} has version {major}.{minor}; drivers may refuse versions above {}.{}",
                MAX_PTX_VERSION.0, MAX_PTX_VERSION.1
            ),
            BuildError::PtxVersion { arch, found: None } => {
                write!(f, "the output for {arch} has no `.version` line, so it is not PTX")
            }
            BuildError::Marker { arch, error } => write!(f, "in the PTX for {arch}: {error}"),
            BuildError::Assemble { arch, ptx, output } => {
                write!(f, "ptxas refused the PTX for {arch}, {}:\n{output}", ptx.display())
            }
            BuildError::Link { tool, output } => write!(f, "{} failed:\n{output}", tool.display()),
            BuildError::Nccl { reason } => write!(f, "cannot link NCCL's device functions: {reason}"),
            BuildError::Ir { path, name } => write!(
                f,
                "other versions of LLVM do not read {}: no replacement is known for `{name}`; build without `ir`, or have the \
                 functions vote at the block's barrier only",
                path.display()
            ),
            BuildError::Disassemble { cubin, output } => {
                write!(f, "nvdisasm refused {}:\n{output}", cubin.display())
            }
            BuildError::NoKernel { kernel } => write!(f, "the module has no kernel `{kernel}`"),
            BuildError::NoPtxas { reason } => {
                write!(f, "the build requires ptxas: {reason}")
            }
            BuildError::Io { action, path, source } => write!(f, "cannot {action} {}: {source}", path.display()),
        }
    }
}

/// Returns the errors in a compiler's output; all diagnostics if none begins as one. Lines about progress are left out.
///
/// A diagnostic ends at an empty line or where the next one begins.
fn errors_of(output: &str) -> String {
    let is_progress = |line: &str| {
        let word = line.trim_start().split(' ').next().unwrap_or_default();
        line.starts_with("   ") && PROGRESS.contains(&word)
    };
    let begins = |line: &str| line.starts_with("error") || line.starts_with("warning");
    let mut diagnostics = vec![String::new()];
    for line in output.lines().filter(|line| !is_progress(line)) {
        if line.trim().is_empty() || begins(line) {
            diagnostics.push(String::new());
        }
        if let Some(last) = diagnostics.last_mut().filter(|_| !line.trim().is_empty()) {
            last.push_str(&format!("{}{line}", if last.is_empty() { "" } else { "\n" }));
        }
    }
    let is_count = |text: &str| text.starts_with("warning: `") && text.contains(" generated ");
    diagnostics.retain(|text| !text.is_empty() && !text.contains(OWN_WARNING) && !is_count(text));
    let is_error = |text: &String| text.starts_with("error");
    if diagnostics.iter().any(is_error) {
        diagnostics.retain(is_error);
    }
    diagnostics.join("\n\n")
}

/// Part of a warning about a flag that gin sets.
const OWN_WARNING: &str = "unstable feature specified for `-Ctarget-feature`";

/// Words with which cargo begins a line about its progress, after spaces.
const PROGRESS: [&str; 10] = [
    "Adding",
    "Blocking",
    "Compiling",
    "Downloaded",
    "Downloading",
    "Finished",
    "Fresh",
    "Locking",
    "Running",
    "Updating",
];

macro_rules! debug_as_display {
    ($($error:ty),*) => { $(
        impl fmt::Debug for $error {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Display::fmt(self, f)
            }
        }
    )* };
}

debug_as_display!(BuildError, MarkerError, UnknownArch);

impl std::error::Error for BuildError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            BuildError::Io { source, .. } => Some(source),
            BuildError::Marker { error, .. } => Some(error),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OUTPUT: &str = "   Compiling core v0.0.0 (/rust/library/core)
   Compiling kernels v0.1.0 (/k)
warning: unused variable: `x`
 --> src/lib.rs:3:9

warning: `helper` (lib) generated 1 warning
error[E0308]: mismatched types
 --> src/lib.rs:9:5
  |
9 |     1
  |     ^ expected `()`, found integer

warning: `kernels` (lib) generated 1 warning
error: could not compile `kernels` (lib) due to 1 previous error; 1 warning emitted
";

    #[test]
    fn the_compilers_errors_come_last_and_without_its_warnings() {
        let (command, output) = ("cargo rustc --lib".to_owned(), OUTPUT.to_owned());
        let text = BuildError::Compile { arch: Arch::Sm90, command, output }.to_string();
        let command = "compiling the kernels for sm_90 failed. The command was\n  cargo rustc --lib\n\n";
        let errors = text.strip_prefix(command).unwrap_or_else(|| panic!("{text}"));
        assert!(errors.starts_with("error[E0308]: mismatched types\n"), "{text}");
        assert!(errors.contains("found integer"), "{text}");
        assert!(!errors.contains("warning: unused") && !errors.contains("Compiling"), "{text}");
    }

    #[test]
    fn an_error_that_leaves_main_shows_its_text_with_that_of_its_source() {
        let missing = BuildError::io("read", Path::new("/k/Cargo.toml"))(io::Error::other("no such disk"));
        assert_eq!(format!("{missing:?}"), "cannot read /k/Cargo.toml: no such disk");
        let unknown = "sm_42".parse::<Arch>().unwrap_err();
        assert_eq!(format!("{unknown:?}"), unknown.to_string());
    }
}
