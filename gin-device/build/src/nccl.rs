// SPDX-License-Identifier: MIT OR Apache-2.0

//! Links a kernel crate with NCCL's device library, as LLVM bitcode.
//!
//! The compiler keeps the bitcode of the crate. `llvm-link` joins it with `shims.ll` and NCCL's `libnccl_device.bc`,
//! `opt` inlines, and `llc` makes the PTX. nvJitLink would leave each operation a call, and compiles the whole library
//! for each program.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::arch::Arch;
use crate::check::{Finding, Rule};
use crate::command::INLINE_OPTIONS;
use crate::error::BuildError;
use crate::ptx::Module;
use crate::ptxas::{newest_first, python_packages, site_packages};
use crate::sources;
use crate::toolchain::{Environment, Toolchain};

/// The functions that kernels call, with scalar arguments.
const SHIMS: &str = include_str!("nccl/shims.ll");

/// Variables of this search.
pub(crate) const LIBRARY: &str = "GIN_NCCL_DEVICE";
pub(crate) const TOOLS: &str = "GIN_LLVM_BIN";

/// The bitcode below a folder of Python packages.
const IN_PACKAGES: &str = "nvidia/nccl/lib/libnccl_device.bc";

/// The version of NCCL whose bitcode the functions were tested with, as its `NCCL_VERSION_CODE`.
pub(crate) const TESTED: u32 = 23007;

/// LLVM's programs in the order of their use.
const PROGRAMS: [&str; 3] = ["llvm-link", "opt", "llc"];

/// NCCL's device library and the programs that link it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Nccl {
    pub(crate) library: PathBuf,
    pub(crate) tools: PathBuf,
}

impl Nccl {
    /// Finds the library: `GIN_NCCL_DEVICE`, `target/nccl-device` of `start` and the folders above it and of gin's
    /// checkout, then NVIDIA's Python packages. Finds the programs: `GIN_LLVM_BIN`, the compiler's own folder, rustup's
    /// other toolchains, then the distribution's.
    ///
    /// # Errors
    /// [`BuildError::Nccl`] names what is missing and how to install it, or both versions if the library's is wrong.
    pub(crate) fn find_in(environment: &Environment, start: &Path, toolchain: &Toolchain) -> Result<Self, BuildError> {
        let library = library(environment, start).map_err(|reason| BuildError::Nccl { reason })?;
        check_version(&library).map_err(|reason| BuildError::Nccl { reason })?;
        let tools = tools(environment, toolchain).map_err(|reason| BuildError::Nccl { reason })?;
        Ok(Self { library, tools })
    }

    /// Links the bitcode of a kernel crate, whose own PTX is `ptx`, and returns the PTX of the whole.
    ///
    /// # Errors
    /// [`BuildError::Link`] with the output of the program that failed; [`BuildError::Io`].
    pub(crate) fn link(&self, bitcode: &Path, ptx: &str, arch: Arch) -> Result<String, BuildError> {
        let file = |end: &str| bitcode.with_extension(end);
        let (shims, linked, optimised, assembly) =
            (file("shims.ll"), file("linked.ll"), file("nccl.bc"), file("nccl.s"));
        sources::replace(&shims, &shims_with_version())?;
        let mut link = vec!["-S".into(), "-o".into(), linked.clone().into()];
        link.extend([bitcode, &shims, &self.library].map(|path| path.as_os_str().to_owned()));
        self.run(PROGRAMS[0], link)?;
        let text = fs::read_to_string(&linked).map_err(BuildError::io("read", &linked))?;
        let text = inlinable(&text).map_err(|part| {
            let reason = format!("{} has no {part}; it is not NVIDIA's file", self.library.display());
            BuildError::Nccl { reason }
        })?;
        sources::replace(&linked, &text)?;
        let mut passes = String::from("-passes=internalize<");
        for name in exported(ptx).into_iter().chain([VERSION_SYMBOL.to_owned()]) {
            passes.push_str(&format!("preserve-gv={name};"));
        }
        passes.pop();
        passes.push_str(">,default<O3>");
        let target = format!("-mcpu={arch}");
        let mut optimise = vec![passes.into(), format!("-mtriple={}", crate::TARGET).into(), target.clone().into()];
        optimise.extend(INLINE_OPTIONS.map(Into::into));
        optimise.extend([linked.into(), "-o".into(), optimised.clone().into()]);
        self.run(PROGRAMS[1], optimise)?;
        let mut compile = vec!["-O3".into(), target.into()];
        compile.extend(arch.ptx_feature().map(|feature| format!("-mattr={feature}").into()));
        compile.extend([optimised.into(), "-o".into(), assembly.clone().into()]);
        self.run(PROGRAMS[2], compile)?;
        fs::read_to_string(&assembly).map_err(BuildError::io("read", &assembly))
    }

    fn run(&self, program: &str, arguments: impl IntoIterator<Item = std::ffi::OsString>) -> Result<(), BuildError> {
        let tool = self.tools.join(program);
        let mut command = Command::new(&tool);
        crate::environment::scrub(&mut command);
        let output = command.args(arguments).output().map_err(BuildError::io("run", &tool))?;
        if output.status.success() {
            return Ok(());
        }
        Err(BuildError::Link { tool, output: String::from_utf8_lossy(&output.stderr).into_owned() })
    }
}

/// The variable of a module with the version of NCCL that it was linked with.
const VERSION_SYMBOL: &str = "gin_nccl_version";

/// Returns the functions, and the variable with the version.
fn shims_with_version() -> String {
    format!("{SHIMS}\n@{VERSION_SYMBOL} = addrspace(1) constant i32 {TESTED}\n")
}

/// Returns the text of a linked module in a form that LLVM can inline without a call.
///
/// NCCL's functions take a group of threads as a structure with a table of functions. LLVM does not find the table
/// behind copies of the structure and accesses that might write to it. The shims, which alone call these functions,
/// pass single threads. So each load of the table becomes the address of the table that `ncclCoopAnyInitThread` stores.
/// And NCCL's file forbids unrolling its loops, also the one over the words of a request, which would put the request
/// on the stack.
///
/// # Errors
/// The part of NCCL's file that is missing.
fn inlinable(text: &str) -> Result<String, &'static str> {
    const COOP: &str = "its type ncclCoopAny";
    let node_of = |line: &str, rest: &str| -> Option<String> {
        let (node, value) = line.split_once(" = ")?;
        value.starts_with(rest).then(|| node.to_owned())
    };
    let coop = text.lines().find_map(|line| node_of(line, "!{!\"_ZTS11ncclCoopAny\"")).ok_or(COOP)?;
    let field = format!("!{{{coop}, ");
    let of_table = |line: &str| node_of(line, &field).filter(|_| line.ends_with(&format!(", i64 {COOP_TABLE}}}")));
    let mark = format!("!tbaa {}", text.lines().find_map(of_table).ok_or(COOP)?);
    let is_marked = |rest: &str| rest.is_empty() || rest.starts_with(',');
    // The value that a load of the table gives.
    let loaded = |line: &str| -> Option<String> {
        let (value, load) = line.split_once(" = load ptr, ")?;
        load.split_once(&mark).filter(|(_, rest)| is_marked(rest)).map(|_| value.to_owned())
    };
    let threads = threads_of(text).ok_or("ncclCoopAnyInitThread, which stores a table")?;
    let mut out = String::with_capacity(text.len() + text.len() / 64);
    let (mut loads, mut loops) = (0, 0);
    for line in text.lines() {
        if line.ends_with("!{!\"llvm.loop.unroll.disable\"}") {
            out.push_str(&line.replace("llvm.loop.unroll.disable", NO_PROPERTY));
            loops += 1;
        } else if let Some(value) = loaded(line) {
            out.push_str(&format!("{value} = getelementptr i8, ptr {threads}, i64 0"));
            loads += 1;
        } else {
            out.push_str(line);
        }
        out.push('\n');
    }
    match (loads, loops) {
        (0, _) => Err("load of a table of ncclCoopAny"),
        (_, 0) => Err("loop that is not to be unrolled"),
        _ => Ok(out),
    }
}

/// Returns the address of the table of functions of single threads, as LLVM writes it.
fn threads_of(text: &str) -> Option<&str> {
    let start = |line: &&str| line.starts_with("define ") && line.contains("@ncclCoopAnyInitThread(");
    let body = text.lines().skip_while(|line| !start(line)).take_while(|line| *line != "}");
    body.filter_map(|line| Some(line.split_once("store ptr ")?.1.split_once(", ptr %")?.0)).next()
}

/// A property of loops that LLVM does not know, and so ignores.
const NO_PROPERTY: &str = "gin.loop";

/// Offset of the table of functions in `ncclCoopAny`, in bytes.
const COOP_TABLE: u32 = 16;

/// Returns the names that a module exports: its kernels, public functions and public variables.
fn exported(ptx: &str) -> Vec<String> {
    let module = Module::parse(ptx);
    let variables =
        ptx.lines().filter(|line| line.starts_with(".visible .global") || line.starts_with(".visible .const"));
    let name = |line: &str| -> Option<String> {
        Some(line.split(['[', '=', ';']).next()?.split_whitespace().next_back()?.to_owned())
    };
    let functions = module.functions.into_iter().filter(|function| function.visible && !function.external);
    let names = module.entries.into_iter().map(|entry| entry.name).chain(functions.map(|function| function.name));
    names.chain(variables.filter_map(name)).collect()
}

/// Checks that NCCL's bitcode, which is code for sm_90, serves all architectures.
///
/// # Errors
/// [`BuildError::Nccl`] names the first that it does not.
pub(crate) fn check_archs(archs: &[Arch]) -> Result<(), BuildError> {
    match archs.iter().find(|arch| matches!(arch, Arch::Sm80 | Arch::Sm86 | Arch::Sm89)) {
        None => Ok(()),
        Some(arch) => {
            let reason = format!("its bitcode is for sm_90 and later, not for {arch}; set `archs` or GIN_ARCHS");
            Err(BuildError::Nccl { reason })
        }
    }
}

/// Returns whether NCCL's own code may be the cause of a finding: it loads its handles, which nobody writes, through
/// the read-only cache.
pub(crate) fn is_of_library(finding: &Finding) -> bool {
    finding.rule == Rule::NonCoherentLoad
}

/// Keeps the findings of a kernel crate before the link that its module after the link does not tell.
pub(crate) fn findings_of_crate(mut findings: Vec<Finding>) -> Vec<Finding> {
    findings.retain(is_of_library);
    findings
}

fn library(environment: &Environment, start: &Path) -> Result<PathBuf, String> {
    if let Some(named) = environment.var(LIBRARY) {
        let path = PathBuf::from(named);
        if path.is_file() {
            return Ok(path);
        }
        return Err(format!("{LIBRARY}={} is not a file; it names a libnccl_device.bc", path.display()));
    }
    let folder = |name: &str| environment.var(name).map(PathBuf::from);
    let path_dirs: Vec<PathBuf> = folder("PATH").iter().flat_map(std::env::split_paths).collect();
    let checkouts = start.ancestors().chain(environment.checkout.as_deref());
    let known = checkouts
        .map(|dir| dir.join("target/nccl-device"))
        .chain(folder("VIRTUAL_ENV").into_iter().flat_map(|root| site_packages(&root.join("lib"))));
    let is_library = |packages: PathBuf| Some(packages.join(IN_PACKAGES)).filter(|path| path.is_file());
    let found = known.filter_map(is_library).next();
    found.or_else(|| python_packages(&path_dirs).into_iter().find_map(is_library)).ok_or_else(|| {
        format!(
            "found no libnccl_device.bc; searched {LIBRARY}, target/nccl-device of {} and above it, VIRTUAL_ENV and the \
             packages of python3; install it with: python3 -m pip install nvidia-nccl-cu13=={}",
            start.display(),
            version_text(TESTED)
        )
    })
}

/// Checks the version in the header that NCCL ships beside the library.
fn check_version(library: &Path) -> Result<(), String> {
    let folder = library.parent().unwrap_or(Path::new(""));
    let headers = [folder.join("../include/nccl.h"), folder.join("nccl.h")];
    let Some(header) = headers.iter().find(|path| path.is_file()) else {
        return Err(format!(
            "the version of {} is unknown: there is no ../include/nccl.h and no nccl.h beside it; put NCCL's header of \
             the same version there",
            library.display()
        ));
    };
    let text = fs::read_to_string(header).map_err(|error| format!("cannot read {}: {error}", header.display()))?;
    match version_in(&text) {
        Some(TESTED) => Ok(()),
        Some(other) => Err(format!(
            "{} is of NCCL {}, and gin's functions for kernels were tested with {tested}; install it with: python3 -m \
             pip install nvidia-nccl-cu13=={tested}; the kernels also run on later versions of libnccl.so, which \
             gin-nccl-host checks",
            library.display(),
            version_text(other),
            tested = version_text(TESTED),
        )),
        None => Err(format!("{} has no line `#define NCCL_VERSION_CODE` with a number", header.display())),
    }
}

fn version_in(header: &str) -> Option<u32> {
    header.lines().find_map(|line| line.trim().strip_prefix("#define NCCL_VERSION_CODE")?.trim().parse().ok())
}

/// Returns a version as NCCL prints it, such as 2.30.7.
fn version_text(code: u32) -> String {
    format!("{}.{}.{}", code / 10000, code / 100 % 100, code % 100)
}

fn tools(environment: &Environment, toolchain: &Toolchain) -> Result<PathBuf, String> {
    let complete = |dir: &Path| PROGRAMS.iter().all(|program| dir.join(program).is_file());
    if let Some(named) = environment.var(TOOLS) {
        let dir = PathBuf::from(named);
        if !complete(&dir) {
            return Err(format!("{TOOLS}={} has not all of {}", dir.display(), PROGRAMS.join(", ")));
        }
        return usable(&dir, toolchain).map(|()| dir);
    }
    let of_root = |root: &Path| -> Vec<PathBuf> {
        let hosts = fs::read_dir(root.join("lib/rustlib")).into_iter().flatten().flatten();
        hosts.map(|host| host.path().join("bin")).collect()
    };
    let own = toolchain.rustc.ancestors().nth(2).map(of_root).unwrap_or_default();
    let others = environment.toolchains_dir().map(|dir| newest_first(&dir, "")).unwrap_or_default();
    let distribution = environment.distribution.iter().flat_map(|_| newest_first(Path::new("/usr/lib"), "llvm-"));
    let known = own
        .into_iter()
        .chain(others.iter().flat_map(|root| of_root(root)))
        .chain(distribution.map(|llvm| llvm.join("bin")));
    let mut refused = String::new();
    for dir in known.filter(|dir| complete(dir)) {
        match usable(&dir, toolchain) {
            Ok(()) => return Ok(dir),
            Err(reason) => refused.push_str(&format!("\nNot usable: {reason}")),
        }
    }
    Err(format!(
        "found no LLVM programs ({}) that read the bitcode of {}; install them with: rustup component add llvm-tools; or \
         name their folder with {TOOLS}{refused}",
        PROGRAMS.join(", "),
        toolchain.version
    ))
}

/// Checks that programs are not older than the compiler's LLVM, and that they can make PTX.
fn usable(dir: &Path, toolchain: &Toolchain) -> Result<(), String> {
    let said = |program: &Path, argument: &str| -> Result<String, String> {
        let mut command = Command::new(program);
        crate::environment::scrub(&mut command);
        let output = command.arg(argument).output().map_err(|error| format!("{}: {error}", program.display()))?;
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    };
    let llc = dir.join("llc");
    let of_tools = said(&llc, "--version")?;
    let compiler = said(&toolchain.rustc, "-vV")?;
    let (has, needs) = (llvm_major(&of_tools), llvm_major(&compiler));
    if has.is_none() || has < needs {
        let number = |major: Option<u32>| major.map_or("unknown".to_owned(), |major| major.to_string());
        return Err(format!("{} is of LLVM {}, the compiler of {}", llc.display(), number(has), number(needs)));
    }
    if !of_tools.contains("nvptx64") {
        return Err(format!("{} cannot make PTX", llc.display()));
    }
    Ok(())
}

/// Reads `LLVM version 22.1.2-rust-1.95.0` of a program, or `LLVM version: 22.1.8` of rustc.
fn llvm_major(said: &str) -> Option<u32> {
    let (_, rest) = said.split_once("LLVM version")?;
    rest.trim_start_matches([':', ' ']).split('.').next()?.parse().ok()
}

#[cfg(test)]
#[path = "nccl_tests.rs"]
mod tests;
