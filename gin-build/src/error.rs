// SPDX-License-Identifier: MIT OR Apache-2.0

//! What can go wrong between a kernel crate and its PTX.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

use crate::arch::{Arch, MAX_PTX_VERSION};
use crate::ptx::MarkerError;

/// Commands that install a usable compiler, as the errors print them.
pub const INSTALL_COMMANDS: [&str; 2] =
    ["rustup toolchain install nightly --component rust-src", "apt-get install rustc-web rust-web-src cargo-web"];

/// A compiler that was looked at and not taken.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rejected {
    /// The `rustc`, or the folder where one was expected.
    pub path: PathBuf,
    /// What it lacks.
    pub reason: String,
}

/// Why no PTX was produced.
#[derive(Debug)]
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
        /// Its value.
        value: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// There is no readable `Cargo.toml` in the folder of the kernel crate.
    NoManifest {
        /// The manifest that was expected.
        path: PathBuf,
    },
    /// No architecture was asked for.
    NoArch,
    /// A single `.ptx` file was named as the destination of several architectures.
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
        /// Architecture that was being compiled for.
        arch: Arch,
        /// The command, as a line for a shell.
        command: String,
        /// Everything cargo and the compiler said.
        output: String,
    },
    /// The nested cargo succeeded and left no PTX.
    NoPtx {
        /// Architecture that was being compiled for.
        arch: Arch,
        /// Where the PTX was expected.
        path: PathBuf,
    },
    /// The PTX is newer than [`MAX_PTX_VERSION`], or its version cannot be read.
    PtxVersion {
        /// Architecture of the module.
        arch: Arch,
        /// The version found.
        found: Option<(u32, u32)>,
    },
    /// A launch-bounds marker cannot be carried out.
    Marker {
        /// Architecture of the module.
        arch: Arch,
        /// What is wrong with the marker.
        error: MarkerError,
    },
    /// `ptxas` refused the PTX.
    Assemble {
        /// Architecture of the module.
        arch: Arch,
        /// The PTX file.
        ptx: PathBuf,
        /// What `ptxas` said.
        output: String,
    },
    /// `cuobjdump` did not disassemble a kernel.
    Disassemble {
        /// The kernel.
        kernel: String,
        /// What `cuobjdump` said.
        output: String,
    },
    /// `ptxas` was required and there is none that can be used.
    NoPtxas {
        /// Why not.
        reason: String,
    },
    /// A file or a process could not be handled.
    Io {
        /// What was being done.
        action: &'static str,
        /// To which file.
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
                writeln!(f, "no Rust compiler here can build `core` for nvptx64-nvidia-cuda. Install one with")?;
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
                write!(f, "no kernel crate there: cannot read {}", path.display())
            }
            BuildError::NoArch => write!(f, "no GPU architecture was asked for; call `arch` or `archs`"),
            BuildError::OneFileForMany { path, archs } => {
                write!(f, "{} is one file, but {archs} architectures were asked for; name a folder", path.display())
            }
            BuildError::ArchUnknownToCompiler { arch, rustc } => {
                write!(f, "{} does not know {arch}; a newer compiler is needed", rustc.display())
            }
            BuildError::Compile { arch, command, output } => {
                write!(f, "compiling the kernels for {arch} failed.\n  {command}\n{output}")
            }
            BuildError::NoPtx { arch, path } => {
                write!(f, "the compiler left no PTX for {arch} at {}", path.display())
            }
            BuildError::PtxVersion { arch, found: Some((major, minor)) } => write!(
                f,
                "the PTX for {arch} has version {major}.{minor}; drivers are only sure to take up to {}.{}",
                MAX_PTX_VERSION.0, MAX_PTX_VERSION.1
            ),
            BuildError::PtxVersion { arch, found: None } => {
                write!(f, "the output for {arch} has no `.version` line, so it is not PTX")
            }
            BuildError::Marker { arch, error } => write!(f, "in the PTX for {arch}: {error}"),
            BuildError::Assemble { arch, ptx, output } => {
                write!(f, "ptxas refused the PTX for {arch}, {}:\n{output}", ptx.display())
            }
            BuildError::Disassemble { kernel, output } => write!(f, "cuobjdump shows no code of {kernel}:\n{output}"),
            BuildError::NoPtxas { reason } => {
                write!(f, "no ptxas to check the PTX with: {reason}; name one with GIN_PTXAS")
            }
            BuildError::Io { action, path, source } => write!(f, "cannot {action} {}: {source}", path.display()),
        }
    }
}

impl std::error::Error for BuildError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            BuildError::Io { source, .. } => Some(source),
            BuildError::Marker { error, .. } => Some(error),
            _ => None,
        }
    }
}
