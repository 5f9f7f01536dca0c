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
    /// `ptxas` did not run on it, for this reason; empty if the build did not request it.
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
    /// Finds `ptxas`, in this order:
    ///
    /// 1. `GIN_PTXAS`
    /// 2. what `make setup` installed: `target/cuda-tools` of `start` and the folders above it, and of gin's checkout
    /// 3. `PATH`, `CUDA_HOME`, `CUDA_PATH`
    /// 4. NVIDIA's Python packages (`nvidia-cuda-nvcc`) in the environment that `VIRTUAL_ENV` names
    /// 5. `/usr/local/cuda`, then the newest `/usr/local/cuda-*`
    /// 6. NVIDIA's Python packages where `python3` finds them
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
        let folder = |name: &str| environment.var(name).map(PathBuf::from);
        let path_dirs: Vec<PathBuf> = folder("PATH").iter().flat_map(std::env::split_paths).collect();
        let cuda = |root: PathBuf| root.join("bin");
        let checkouts = start.ancestors().chain(environment.checkout.as_deref());
        let known = checkouts
            .map(|dir| dir.join("target").join(TOOLS_BELOW_TARGET))
            .chain(path_dirs.iter().cloned())
            .chain(["CUDA_HOME", "CUDA_PATH"].into_iter().filter_map(folder).map(cuda))
            .chain(folder("VIRTUAL_ENV").into_iter().flat_map(|root| wheels(&site_packages(&root.join("lib")))))
            .chain(environment.local.iter().flat_map(|local| newest_first(local, "cuda")).map(cuda));
        let is_tool = |dir: PathBuf| Some(dir.join("ptxas")).filter(|path| path.is_file());
        known
            .filter_map(is_tool)
            .next()
            .or_else(|| wheels(&python_packages(&path_dirs)).into_iter().find_map(is_tool))
            .map(|path| Ptxas { path })
            .ok_or_else(|| {
                format!(
                    "no ptxas found; searched GIN_PTXAS, target/cuda-tools of {} and above it, PATH, CUDA_HOME, \
                     CUDA_PATH, VIRTUAL_ENV, /usr/local/cuda* and the packages of python3; install one with: python3 -m \
                     pip install nvidia-cuda-nvcc",
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
    /// A text that has the lines of its sources passes them on to the machine code.
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
        let text = fs::read_to_string(ptx).map_err(BuildError::io("read", ptx))?;
        let output = Command::new(&self.path)
            .arg("-v")
            .args(crate::lines::are_in(&text).then_some("-lineinfo"))
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

/// Returns the subfolders whose names begin with `prefix`. That name itself comes first, then the highest versions.
pub(crate) fn newest_first(dir: &Path, prefix: &str) -> Vec<PathBuf> {
    let version = |path: &PathBuf| -> Vec<u32> {
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        name.split(|c: char| !c.is_ascii_digit()).filter_map(|number| number.parse().ok()).collect()
    };
    let begins = |path: &PathBuf| path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(prefix));
    let mut found: Vec<PathBuf> =
        fs::read_dir(dir).into_iter().flatten().flatten().map(|entry| entry.path()).filter(begins).collect();
    found.sort_by_key(|path| (path.file_name() != Some(prefix.as_ref()), std::cmp::Reverse(version(path))));
    found
}

/// Returns the folders of packages in the library folder of a Python environment.
pub(crate) fn site_packages(lib: &Path) -> Vec<PathBuf> {
    newest_first(lib, "python").into_iter().map(|python| python.join("site-packages")).collect()
}

/// Returns the folders in which `python3` looks for packages. Nothing if there is no `python3`.
pub(crate) fn python_packages(path_dirs: &[PathBuf]) -> Vec<PathBuf> {
    const ASK: &str = "import site; print('\\n'.join([*site.getsitepackages(), site.getusersitepackages()]))";
    let Some(python) = path_dirs.iter().map(|dir| dir.join("python3")).find(|path| path.is_file()) else {
        return Vec::new();
    };
    let said = Command::new(python).args(["-c", ASK]).output();
    said.map(|said| String::from_utf8_lossy(&said.stdout).lines().map(PathBuf::from).collect()).unwrap_or_default()
}

/// Returns the folders of programs of NVIDIA's packages: `nvidia/cuda_nvcc/bin`, `nvidia/cu13/bin` and the like.
fn wheels(packages: &[PathBuf]) -> Vec<PathBuf> {
    packages.iter().flat_map(|dir| newest_first(&dir.join("nvidia"), "cu")).map(|package| package.join("bin")).collect()
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
