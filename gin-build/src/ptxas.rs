// SPDX-License-Identifier: MIT OR Apache-2.0

//! Assembly of PTX with `ptxas`, and its figures for each kernel.

use std::fmt;
use std::fs;
use std::hash::{DefaultHasher, Hasher};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::UNIX_EPOCH;

use crate::arch::Arch;
use crate::error::BuildError;
use crate::sources;
use crate::toolchain::Environment;

/// Folder of the CUDA tools below a project's `target`, where `scripts/setup.sh` installs them.
const TOOLS_BELOW_TARGET: &str = "cuda-tools/nvidia/cu13/bin";

/// Resources that one kernel uses, from `ptxas -v`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EntryReport {
    /// Name of the kernel.
    pub name: String,
    /// Registers per thread.
    pub registers: u32,
    /// Bytes of stack per thread.
    pub stack: u32,
    /// Bytes of registers spilled to memory by stores, per thread.
    pub spill_stores: u32,
    /// Bytes of registers restored by loads, per thread.
    pub spill_loads: u32,
    /// Bytes of static shared memory per block.
    pub shared: u32,
    /// Number of barriers used.
    pub barriers: u32,
}

/// Result of assembling a module.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Report {
    /// The assembler used.
    pub tool: PathBuf,
    /// The kernels, in the order of the assembler's messages.
    pub entries: Vec<EntryReport>,
    /// The file with the machine code.
    pub cubin: PathBuf,
    /// The assembler's output.
    pub output: String,
}

impl Report {
    /// Returns the kernel of that name.
    pub fn entry(&self, name: &str) -> Option<&EntryReport> {
        self.entries.iter().find(|entry| entry.name == name)
    }
}

/// Outcome of assembling a module.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Assembly {
    /// `ptxas` accepted it.
    Done(Report),
    /// `ptxas` did not run on it, for this reason.
    NotTried(String),
}

impl Assembly {
    /// Returns the report, if the module was assembled.
    pub fn report(&self) -> Option<&Report> {
        match self {
            Assembly::Done(report) => Some(report),
            Assembly::NotTried(_) => None,
        }
    }
}

/// Choice of the builds that run `ptxas`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum UsePtxas {
    /// If it is found.
    #[default]
    IfFound,
    /// Always; a build without `ptxas` fails.
    Required,
    /// Never.
    No,
}

/// A `ptxas` program.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ptxas {
    path: PathBuf,
}

impl Ptxas {
    /// Finds `ptxas`: `GIN_PTXAS`, then `target/cuda-tools` of `start` and the folders above it, `PATH`,
    /// `/usr/local/cuda`.
    ///
    /// # Errors
    /// Fails with a text that names the places searched.
    pub fn find(start: &Path) -> Result<Ptxas, String> {
        Self::find_in(&Environment::of_this_process(), start)
    }

    pub(crate) fn find_in(environment: &Environment, start: &Path) -> Result<Ptxas, String> {
        if let Some(named) = environment.var("GIN_PTXAS") {
            let path = PathBuf::from(named);
            return if path.is_file() {
                Ok(Ptxas { path })
            } else {
                Err(format!("GIN_PTXAS={} is not a file", path.display()))
            };
        }
        let tools = start.ancestors().map(|dir| dir.join("target").join(TOOLS_BELOW_TARGET));
        let path_var = environment.var("PATH").map(|path| std::env::split_paths(path).collect()).unwrap_or_default();
        let path_dirs: Vec<PathBuf> = path_var;
        tools
            .chain(path_dirs)
            .chain([PathBuf::from("/usr/local/cuda/bin")])
            .map(|dir| dir.join("ptxas"))
            .find(|path| path.is_file())
            .map(|path| Ptxas { path })
            .ok_or_else(|| {
                format!(
                    "no ptxas in GIN_PTXAS, target/cuda-tools of {} or a folder above it, PATH, or /usr/local/cuda",
                    start.display()
                )
            })
    }

    /// Returns the path of the program.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Describes a run on one line: the assembler and a hash of the text.
    fn asked(&self, arch: Arch, ptx: &Path) -> Option<String> {
        let tool = fs::metadata(&self.path).ok()?;
        let changed = tool.modified().ok()?.duration_since(UNIX_EPOCH).ok()?.as_nanos();
        let mut text = DefaultHasher::new();
        text.write(&fs::read(ptx).ok()?);
        let (text, length) = (text.finish(), tool.len());
        Some(format!("{arch}, text {text:016x}, {} of {length} bytes, {changed}", self.path.display()))
    }

    /// Assembles a PTX file into `cubin`.
    ///
    /// An assembler that is too old for the architecture or the PTX version gives [`Assembly::NotTried`]. The output is
    /// kept beside `cubin`, in a file ending in `.ptxas`. With the same text and the same assembler it does not run
    /// again, which saves minutes for a large text.
    ///
    /// # Errors
    /// Fails with [`BuildError::Assemble`] if `ptxas` refuses the text, and with [`BuildError::Io`] if it cannot run.
    pub fn assemble(&self, arch: Arch, ptx: &Path, cubin: &Path) -> Result<Assembly, BuildError> {
        let (kept, asked) = (cubin.with_extension("ptxas"), self.asked(arch, ptx));
        let done = |said: String| {
            let (tool, entries, cubin) = (self.path.clone(), parse_report(&said), cubin.to_owned());
            Ok(Assembly::Done(Report { tool, entries, cubin, output: said }))
        };
        if let Some(said) = asked.as_ref().and_then(|asked| said_before(&kept, asked, cubin)) {
            return done(said);
        }
        let output = Command::new(&self.path)
            .arg("-v")
            .arg(format!("-arch={arch}"))
            .arg(ptx)
            .arg("-o")
            .arg(cubin)
            .output()
            .map_err(BuildError::io("run", &self.path))?;
        let said = format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        if output.status.success() {
            if let Some(note) = asked.zip(size(cubin)).map(|(asked, size)| format!("{asked}, {size}\n{said}")) {
                // Without this file the assembler runs again.
                let _ = sources::replace(&kept, &note);
            }
            return done(said);
        }
        match too_old(&said) {
            Some(line) => Ok(Assembly::NotTried(format!("{} is too old: {line}", self.path.display()))),
            None => Err(BuildError::Assemble { arch, ptx: ptx.to_owned(), output: said }),
        }
    }
}

/// Returns the output of an earlier run with the same input that produced this `cubin`.
fn said_before(kept: &Path, asked: &str, cubin: &Path) -> Option<String> {
    let note = fs::read_to_string(kept).ok()?;
    let (head, said) = note.split_once('\n')?;
    (head == format!("{asked}, {}", size(cubin)?)).then(|| said.to_owned())
}

fn size(file: &Path) -> Option<u64> {
    fs::metadata(file).ok().map(|found| found.len())
}

impl fmt::Display for Ptxas {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.path.display())
    }
}

/// Returns the message of an assembler that lacks the architecture or the PTX version.
fn too_old(said: &str) -> Option<&str> {
    let complaint =
        |line: &&str| line.contains("is not defined for option 'gpu-name'") || line.contains("Unsupported .version");
    said.lines().find(complaint).map(str::trim)
}

/// Reads the messages of `ptxas -v`.
///
/// ```
/// let said = "ptxas info    : Compiling entry function 'k' for 'sm_90'\n\
///             ptxas info    : Used 8 registers, used 1 barriers";
/// let report = gin_build::parse_report(said);
/// assert_eq!((report[0].name.as_str(), report[0].registers, report[0].barriers), ("k", 8, 1));
/// ```
pub fn parse_report(said: &str) -> Vec<EntryReport> {
    let mut entries: Vec<EntryReport> = Vec::new();
    // Properties of device functions have the same form. Only those of the current kernel count.
    let mut of_entry = false;
    for line in said.lines() {
        if let Some((_, rest)) = line.split_once("Compiling entry function '") {
            let name = rest.split('\'').next().unwrap_or_default().to_owned();
            entries.push(EntryReport { name, ..EntryReport::default() });
            of_entry = true;
        } else if let Some((_, name)) = line.split_once("Function properties for ") {
            of_entry = entries.last().is_some_and(|entry| entry.name == name.trim());
        } else if let (Some(entry), true) = (entries.last_mut(), of_entry)
            && line.contains("bytes stack frame")
        {
            entry.stack = number_before(line, " bytes stack frame");
            entry.spill_stores = number_before(line, " bytes spill stores");
            entry.spill_loads = number_before(line, " bytes spill loads");
        }
        if let (Some(entry), true) = (entries.last_mut(), line.contains(": Used ")) {
            entry.registers = number_before(line, " registers");
            entry.barriers = number_before(line, " barriers");
            entry.shared = number_before(line, " bytes smem");
        }
    }
    entries
}

fn number_before(line: &str, words: &str) -> u32 {
    let Some((before, _)) = line.split_once(words) else {
        return 0;
    };
    before.rsplit(|c: char| !c.is_ascii_digit()).next().and_then(|digits| digits.parse().ok()).unwrap_or(0)
}

#[cfg(test)]
#[path = "ptxas_tests.rs"]
mod tests;
