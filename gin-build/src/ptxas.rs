// SPDX-License-Identifier: MIT OR Apache-2.0

//! Assembling PTX with `ptxas`, and what it says about each kernel.

use std::fmt;
use std::fs;
use std::hash::{DefaultHasher, Hasher};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::UNIX_EPOCH;

use crate::arch::Arch;
use crate::error::BuildError;
use crate::sources;
use crate::toolchain::Surroundings;

/// Folder of the CUDA tools below a project's `target`, as `scripts/setup.sh` fills it.
const TOOLS_BELOW_TARGET: &str = "cuda-tools/nvidia/cu13/bin";

/// What one kernel takes, from `ptxas -v`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EntryReport {
    /// Name of the kernel.
    pub name: String,
    /// Registers a thread.
    pub registers: u32,
    /// Bytes of stack a thread.
    pub stack: u32,
    /// Bytes of registers spilled to memory by stores, a thread.
    pub spill_stores: u32,
    /// Bytes of registers brought back by loads, a thread.
    pub spill_loads: u32,
    /// Bytes of static shared memory a block.
    pub shared: u32,
    /// Barriers that it uses.
    pub barriers: u32,
}

/// What `ptxas` made of a module.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Report {
    /// The assembler that was run.
    pub tool: PathBuf,
    /// The kernels, in the order of the assembler's messages.
    pub entries: Vec<EntryReport>,
    /// The machine code.
    pub cubin: PathBuf,
    /// Everything that the assembler said.
    pub output: String,
}

impl Report {
    /// The kernel of that name.
    pub fn entry(&self, name: &str) -> Option<&EntryReport> {
        self.entries.iter().find(|entry| entry.name == name)
    }
}

/// Whether a module was assembled.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Assembly {
    /// `ptxas` took it.
    Done(Report),
    /// It was not tried, for this reason.
    NotTried(String),
}

impl Assembly {
    /// The report, if the module was assembled.
    pub fn report(&self) -> Option<&Report> {
        match self {
            Assembly::Done(report) => Some(report),
            Assembly::NotTried(_) => None,
        }
    }
}

/// Whether a build runs `ptxas`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum UsePtxas {
    /// When there is one.
    #[default]
    IfFound,
    /// Always; a build without one fails.
    Required,
    /// Never.
    No,
}

/// An assembler.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ptxas {
    path: PathBuf,
}

impl Ptxas {
    /// Finds `ptxas`: `GIN_PTXAS`, then `target/cuda-tools` of the folders around `start`, `PATH`, `/usr/local/cuda`.
    ///
    /// # Errors
    /// Where it was looked for, as text.
    pub fn find(start: &Path) -> Result<Ptxas, String> {
        Self::find_in(&Surroundings::of_this_process(), start)
    }

    pub(crate) fn find_in(around: &Surroundings, start: &Path) -> Result<Ptxas, String> {
        if let Some(named) = around.var("GIN_PTXAS") {
            let path = PathBuf::from(named);
            return if path.is_file() {
                Ok(Ptxas { path })
            } else {
                Err(format!("GIN_PTXAS names {}, which is no file", path.display()))
            };
        }
        let tools = start.ancestors().map(|dir| dir.join("target").join(TOOLS_BELOW_TARGET));
        let path_var = around.var("PATH").map(|path| std::env::split_paths(path).collect()).unwrap_or_default();
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

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// What it is asked, on one line: which assembler it is, and the text.
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
    /// An assembler that is too old for the architecture or the PTX version gives [`Assembly::NotTried`]. What it said is kept
    /// beside `cubin`, ending in `.ptxas`: with the same text and the same assembler it is not run again, which for a large
    /// text saves minutes.
    ///
    /// # Errors
    /// [`BuildError::Assemble`] if the text is refused, [`BuildError::Io`] if `ptxas` cannot be run.
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
                // Without it the assembler runs again.
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

/// What an assembler said when it was asked the same and made this `cubin`.
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

/// The complaint of an assembler that knows neither the architecture nor the PTX version.
fn too_old(said: &str) -> Option<&str> {
    let complaint =
        |line: &&str| line.contains("is not defined for option 'gpu-name'") || line.contains("Unsupported .version");
    said.lines().find(complaint).map(str::trim)
}

/// Reads the messages of `ptxas -v`.
pub fn parse_report(said: &str) -> Vec<EntryReport> {
    let mut entries: Vec<EntryReport> = Vec::new();
    // Properties of device functions come in the same form; only those of the kernel at hand count.
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
