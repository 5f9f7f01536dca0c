// SPDX-License-Identifier: MIT OR Apache-2.0

//! Helpers of the nested builds: crates written to disk, trials that can be ignored, the CUDA tools.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use gin_build::{Arch, KernelBuilder, Ptxas, Report, Toolchain};
use libtest_mimic::{Completion, Failed, Trial};

/// This crate's folder.
pub(crate) const HERE: &str = env!("CARGO_MANIFEST_DIR");

/// Returns the architectures to build for, which `GIN_ARCHS` limits as it limits builds. Each takes half a minute of
/// CPU time for `core`.
pub(crate) fn archs() -> Vec<Arch> {
    match std::env::var("GIN_ARCHS") {
        Ok(names) => names.split(',').map(|name| name.parse().expect("GIN_ARCHS lists architectures")).collect(),
        Err(_) => vec![Arch::Sm80, Arch::Sm90, Arch::Sm100],
    }
}

/// Sets the variables that an outer cargo may set, all to wrong values. Every build here then shows that none is passed
/// on.
pub(crate) fn spoil_environment() {
    for (name, value) in [
        ("RUSTFLAGS", "--no-such-flag"),
        ("CARGO_ENCODED_RUSTFLAGS", "--no-such-flag"),
        ("RUSTC", "/nowhere/rustc"),
        ("RUSTC_WRAPPER", "/nowhere/wrapper"),
        ("RUSTUP_TOOLCHAIN", "no-such-toolchain"),
        ("CARGO_TARGET_DIR", "/nowhere/target"),
        ("CARGO_BUILD_TARGET", "no-such-target"),
        ("CARGO_PROFILE_RELEASE_LTO", "no-such-kind"),
        ("CARGO_MAKEFLAGS", "--jobserver-auth=98,99"),
    ] {
        // SAFETY: called first in `main`, before there is a second thread.
        unsafe { std::env::set_var(name, value) };
    }
}

/// Names this project's `ptxas`, because the crates built here are wherever cargo's target folder is.
pub(crate) fn name_ptxas() {
    if let Ok(ptxas) = Ptxas::find(Path::new(HERE)) {
        // SAFETY: called in `main`, before there is a second thread.
        unsafe { std::env::set_var("GIN_PTXAS", ptxas.path()) };
    }
}

/// Returns a builder whose nested builds share their `core` with those of this project's build script.
pub(crate) fn builder(path: &Path) -> KernelBuilder {
    KernelBuilder::new(path).target_dir_of_build_scripts(env!("CARGO_TARGET_TMPDIR"))
}

/// A workspace outside this project, with crates copied from `tests/crates`.
///
/// It is in cargo's folder for temporary files under a fixed name, so that a second run finds its builds again.
pub(crate) struct Workspace {
    dir: PathBuf,
}

impl Workspace {
    pub(crate) fn new(name: &str) -> Workspace {
        let dir = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
        let workspace = Workspace { dir };
        for name in ["bare", "helper", "mistakes", "user"] {
            workspace.add(name);
        }
        workspace
    }

    fn add(&self, name: &str) {
        let from = Path::new(HERE).join("tests/crates").join(name);
        let root = Path::new(HERE).ancestors().nth(2).expect("the crate is in the project");
        let manifest = read(&from.join("Cargo.toml.in")).replace("GIN/", &format!("{}/", root.display()));
        write(&self.dir.join(name).join("Cargo.toml"), &manifest);
        write(&self.dir.join(name).join("src/lib.rs"), &read(&from.join("src/lib.rs")));
    }

    pub(crate) fn path(&self) -> &Path {
        &self.dir
    }

    pub(crate) fn bare(&self) -> PathBuf {
        self.dir.join("bare")
    }

    pub(crate) fn mistakes(&self) -> PathBuf {
        self.dir.join("mistakes")
    }

    pub(crate) fn user(&self) -> PathBuf {
        self.dir.join("user")
    }

    /// Replaces text in a file. Panics if the text is missing.
    pub(crate) fn edit(&self, file: &str, from: &str, to: &str) {
        let path = self.dir.join(file);
        let text = read(&path);
        assert!(text.contains(from), "{from} is not in {}", path.display());
        write(&path, &text.replace(from, to));
    }
}

fn read(path: &Path) -> String {
    fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// Writes a file. Leaves a file that has the text already alone, so that cargo does not consider it changed.
fn write(path: &Path, text: &str) {
    if fs::read_to_string(path).is_ok_and(|old| old == text) {
        return;
    }
    let parent = path.parent().expect("a file is in a folder");
    fs::create_dir_all(parent).and_then(|()| fs::write(path, text)).unwrap_or_else(|error| panic!("{error}"));
}

pub(crate) fn ensure(holds: bool, otherwise: String) -> Result<(), Failed> {
    if holds { Ok(()) } else { Err(otherwise.into()) }
}

pub(crate) fn contains(text: &str, part: &str) -> Result<(), Failed> {
    ensure(text.contains(part), format!("`{part}` is not in:\n{text}"))
}

type Missing = fn() -> Option<String>;

fn needs(
    name: impl Into<String>,
    missing: &'static [Missing],
    run: impl FnOnce() -> Result<(), Failed> + Send + 'static,
) -> Trial {
    Trial::ignorable_test(name, move || match missing.iter().find_map(|missing| missing()) {
        Some(reason) => Ok(Completion::ignored_with(reason)),
        None => run().map(|()| Completion::Completed),
    })
}

pub(crate) fn needs_compiler(
    name: impl Into<String>,
    run: impl FnOnce() -> Result<(), Failed> + Send + 'static,
) -> Trial {
    needs(name, &[no_compiler], run)
}

pub(crate) fn needs_ptxas(name: impl Into<String>, run: impl FnOnce() -> Result<(), Failed> + Send + 'static) -> Trial {
    needs(name, &[no_compiler, no_ptxas], run)
}

pub(crate) fn needs_nvcc(name: impl Into<String>, run: impl FnOnce() -> Result<(), Failed> + Send + 'static) -> Trial {
    needs(name, &[no_compiler, no_nvcc], run)
}

fn no_compiler() -> Option<String> {
    static REASON: OnceLock<Option<String>> = OnceLock::new();
    let find = || Toolchain::find().err().map(|error| error.to_string().replace('\n', " "));
    REASON.get_or_init(find).clone()
}

fn no_ptxas() -> Option<String> {
    Ptxas::find(Path::new(HERE)).err()
}

fn no_nvcc() -> Option<String> {
    Cuda::find().err()
}

/// The CUDA tools, in the folder of the first `ptxas`.
struct Cuda {
    root: PathBuf,
}

impl Cuda {
    fn find() -> Result<Cuda, String> {
        let ptxas = Ptxas::find(Path::new(HERE))?;
        let root = ptxas.path().ancestors().nth(2).ok_or("ptxas is not in the folder bin")?.to_path_buf();
        let nvcc = root.join("bin/nvcc");
        if nvcc.is_file() { Ok(Cuda { root }) } else { Err(format!("{} does not exist", nvcc.display())) }
    }

    fn run(&self, tool: &str, args: &[&str]) -> Result<String, Failed> {
        let output = Command::new(self.root.join("bin").join(tool)).args(args).output()?;
        let said = format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        if output.status.success() { Ok(said) } else { Err(format!("{tool} {}:\n{said}", args.join(" ")).into()) }
    }
}

/// Links `tests/link/main.cu`, and the device code of a PTX file if there is one, into a program.
pub(crate) fn link(dir: &Path, ptx: Option<&Path>) -> Result<PathBuf, Failed> {
    let cuda = Cuda::find()?;
    let source = Path::new(HERE).join("tests/link/main.cu");
    let (caller, device, program) = (dir.join("main.o"), dir.join("device.o"), dir.join("program"));
    let _ = fs::remove_file(&program);
    let common = ["-arch=sm_90", "-rdc=true"];
    let nvcc = |args: &[&str]| cuda.run("nvcc", &[&common[..], args].concat());
    nvcc(&["-std=c++17", "-dc", text(&source)?, "-o", text(&caller)?])?;
    let mut objects = vec![text(&caller)?];
    if let Some(ptx) = ptx {
        // A relocatable object: assembled, and wrapped so that the host linker includes it.
        nvcc(&["-dc", text(ptx)?, "-o", text(&device)?])?;
        objects.push(text(&device)?);
    }
    // An installation has the folder lib64, where nvcc looks.
    let library = format!("-L{}", cuda.root.join("lib").display());
    nvcc(&[&objects[..], &[&library, "-o", text(&program)?]].concat())?;
    ensure(program.is_file(), "nvcc left no program".to_owned())?;
    Ok(program)
}

pub(crate) fn disassemble(program: &Path) -> Result<String, Failed> {
    Cuda::find()?.run("cuobjdump", &["-sass", text(program)?])
}

/// Returns the machine code of a module with its source lines, by the `nvdisasm` beside the assembler.
pub(crate) fn disassemble_with_lines(report: &Report) -> Result<String, Failed> {
    let output = Command::new(report.tool.with_file_name("nvdisasm")).arg("-g").arg(&report.cubin).output()?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure(output.status.success(), format!("nvdisasm -g: {said}"))?;
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

fn text(path: &Path) -> Result<&str, Failed> {
    path.to_str().ok_or_else(|| format!("{} is not UTF-8", path.display()).into())
}
