// SPDX-License-Identifier: MIT OR Apache-2.0
//! The builder: what to compile, and the steps of a build.

use crate::command::{Backend, Plan, Request};
use crate::folders::default_target_dir;
use crate::lines::Lines;
use crate::manifest::Manifest;
use crate::nccl::{self, Nccl};
use crate::package::{self, Package};
use crate::toolchain::{Environment, Toolchain};
use crate::{
    Arch, Assembly, BuildError, Built, Limits, MAX_PTX_VERSION, Module, Ptxas, UnknownArch, UsePtxas, check, ir, ptx,
    sources,
};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::thread;

/// Variables whose change makes a build script run again.
const VARIABLES: [&str; 12] = [
    "GIN_ARCHS",
    "GIN_RUSTC",
    "GIN_CARGO",
    "GIN_PTXAS",
    "GIN_LINE_INFO",
    nccl::LIBRARY,
    nccl::TOOLS,
    "GIN_CODEGEN_BACKEND",
    package::PROJECT,
    "CUDA_HOME",
    "CUDA_PATH",
    "VIRTUAL_ENV",
];

/// The architectures of [`KernelBuilder::embed`] without `GIN_ARCHS`. For any other GPU, the driver compiles the PTX of
/// the nearest lower architecture.
const SHIPPED: [Arch; 3] = [Arch::Sm80, Arch::Sm90, Arch::Sm100];

/// The kernel crate of a builder.
#[derive(Clone, Debug)]
enum Kernels {
    Folder(PathBuf),
    /// The dependency with this `links` name.
    Dependency(String),
}

/// A builder that compiles one kernel crate to PTX.
#[derive(Clone, Debug)]
pub struct KernelBuilder {
    kernels: Kernels,
    archs: Vec<Arch>,
    features: Vec<String>,
    default_features: bool,
    copy_to: Option<PathBuf>,
    target_dir: Option<PathBuf>,
    backend: Option<Backend>,
    ptxas: UsePtxas,
    figures: bool,
    /// Architectures with instructions of their own; see [`also`](Self::also).
    also: Vec<Arch>,
    line_info: Option<bool>,
    bitcode: bool,
    ir: bool,
    nccl: bool,
    quiet: bool,
}

impl KernelBuilder {
    /// Creates a builder for the kernel crate in a folder, the one that holds its `Cargo.toml`.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self::of(Kernels::Folder(path.into()))
    }

    /// Creates a builder for a kernel crate that is a dependency of the build script's package, such as one from
    /// crates.io.
    ///
    /// The manifest of the kernel crate has `links = "my_kernels"`, and its build script prints
    /// `cargo::metadata=folder=FOLDER` with the value of `CARGO_MANIFEST_DIR`. The package lists the kernel crate in
    /// its `[dependencies]`, because cargo passes metadata on to direct dependents only.
    ///
    /// A crate from a registry is compiled with the versions in the project's `Cargo.lock`. The project is the one that
    /// `GIN_PROJECT` names, or that contains the target folder. Without either, the lock file in the package counts. A
    /// `[patch]` of the project holds for such a crate only in `.cargo/config.toml`.
    pub fn dependency(links: impl Into<String>) -> Self {
        Self::of(Kernels::Dependency(links.into()))
    }

    fn of(kernels: Kernels) -> Self {
        KernelBuilder {
            kernels,
            archs: Vec::new(),
            features: Vec::new(),
            default_features: true,
            copy_to: None,
            target_dir: None,
            backend: None,
            ptxas: UsePtxas::default(),
            figures: true,
            also: Vec::new(),
            line_info: None,
            bitcode: false,
            ir: false,
            nccl: false,
            quiet: false,
        }
    }

    /// Adds an architecture.
    #[must_use]
    pub fn arch(self, arch: Arch) -> Self {
        self.archs([arch])
    }

    /// Adds architectures. Duplicates are compiled once.
    #[must_use]
    pub fn archs(mut self, archs: impl IntoIterator<Item = Arch>) -> Self {
        for arch in archs {
            if !self.archs.contains(&arch) {
                self.archs.push(arch);
            }
        }
        self
    }

    /// Adds an architecture with instructions that only one GPU has, such as sm_90a, in [`embed`](Self::embed): if the
    /// crate is compiled for sm_90, it is compiled for sm_90a, too. The host loads these kernels on that GPU.
    #[must_use]
    pub fn also(mut self, arch: Arch) -> Self {
        self.also.push(arch);
        self
    }

    /// Adds cargo features of the kernel crate.
    #[must_use]
    pub fn features<S: Into<String>>(mut self, features: impl IntoIterator<Item = S>) -> Self {
        self.features.extend(features.into_iter().map(Into::into));
        self
    }

    /// Sets whether the default features of the kernel crate are on. They are on by default.
    #[must_use]
    pub fn default_features(mut self, on: bool) -> Self {
        self.default_features = on;
        self
    }

    /// Copies the PTX to `path`.
    ///
    /// A path that ends in `.ptx` names a file and requires a single architecture. Any other path is a folder, which
    /// receives `CRATE.ARCH.ptx` for each architecture.
    #[must_use]
    pub fn copy_to(mut self, path: impl Into<PathBuf>) -> Self {
        self.copy_to = Some(path.into());
        self
    }

    /// Sets the folder of the nested builds.
    ///
    /// In a build script the default is `gin-build` in the target folder that contains `OUT_DIR`, so that all profiles
    /// share it. If no target folder can be found, it is in `OUT_DIR` itself. Outside build scripts the default is in
    /// `CARGO_TARGET_DIR`, in the target folder of the workspace, or in `target` of the kernel crate.
    #[must_use]
    pub fn target_dir(mut self, path: impl Into<PathBuf>) -> Self {
        self.target_dir = Some(path.into());
        self
    }

    /// Sets the folder of the nested builds to the default of build scripts. Tests use it so that they share the build
    /// of `core` with build scripts. `tests` is `env!("CARGO_TARGET_TMPDIR")`, a folder of the target folder.
    #[must_use]
    pub fn target_dir_of_build_scripts(self, tests: &str) -> Self {
        match Path::new(tests).parent() {
            Some(target) => self.target_dir(target.join("gin-build")),
            None => self,
        }
    }

    /// Sets the code generator. Without this call `GIN_CODEGEN_BACKEND` selects it.
    #[must_use]
    pub fn backend(mut self, backend: Backend) -> Self {
        self.backend = Some(backend);
        self
    }

    /// Sets whether `ptxas` assembles the result. By default it does if it is installed.
    #[must_use]
    pub fn ptxas(mut self, ptxas: UsePtxas) -> Self {
        self.ptxas = ptxas;
        self
    }

    /// Sets whether a build script prints the figures of each kernel as warnings of cargo. By default it does.
    #[must_use]
    pub fn figures(mut self, on: bool) -> Self {
        self.figures = on;
        self
    }

    /// Sets whether the PTX keeps the lines of its sources, for `cuda-gdb`, `ncu` and `compute-sanitizer`. Without this
    /// call it does if `GIN_LINE_INFO` is `1`. Lines change no instruction.
    #[must_use]
    pub fn line_info(mut self, on: bool) -> Self {
        self.line_info = Some(on);
        self
    }

    /// Sets whether the build keeps LLVM's bitcode beside the PTX, for clang as a compiler of CUDA C++. rust-cuda's
    /// code generator makes none.
    #[must_use]
    pub fn bitcode(mut self, on: bool) -> Self {
        self.bitcode = on;
        self
    }

    /// Sets whether the build keeps LLVM's IR as text, which Triton's LLVM reads too, and embeds the IR instead of the
    /// PTX. The crate exports functions. rust-cuda's code generator makes no IR.
    #[must_use]
    pub fn ir(mut self, on: bool) -> Self {
        self.ir = on;
        self
    }

    /// Sets whether the build links NCCL's device functions, for kernels of `gin-nccl-device`.
    ///
    /// It needs `libnccl_device.bc` of NCCL 2.30.7, which NVIDIA's Python package has, and LLVM's programs, which
    /// rustup's component `llvm-tools` has. The [variables](crate#variables) name other places. The architecture is
    /// sm_90 or later. rust-cuda's code generator cannot.
    ///
    /// # Errors
    /// [`build`](Self::build) fails with [`BuildError::Nccl`], which says what to install.
    #[must_use]
    pub fn nccl(mut self, on: bool) -> Self {
        self.nccl = on;
        self
    }

    /// Suppresses the `cargo::rerun-if-changed` lines, for a build script that prints its own.
    #[must_use]
    pub fn quiet(mut self) -> Self {
        self.quiet = true;
        self
    }

    /// Compiles the crate in a build script, and writes the table `NAME.rs` to `OUT_DIR`, its files to `OUT_DIR/NAME`.
    ///
    /// A builder without an architecture takes the variable `GIN_ARCHS`, or else sm_80, sm_90 and sm_100. If the build
    /// fails, cargo reports the error and stops.
    ///
    /// ```no_run
    /// gin_build::KernelBuilder::new("kernels").embed("ptx");
    /// ```
    pub fn embed(self, name: &str) {
        let Err(error) = self.embed_in(&Environment::of_this_process(), name) else { return };
        // Cargo shows each line of output as a separate message.
        for line in error.to_string().lines().filter(|line| !line.is_empty()) {
            println!("cargo::error={line}");
        }
        if std::env::var_os("CARGO_FEATURE_CUDA").is_some() {
            println!(
                "cargo::error=only real GPUs need these kernels; build with --no-default-features for virtual GPUs"
            );
        }
    }

    fn embed_in(self, environment: &Environment, name: &str) -> Result<(), BuildError> {
        let mut archs = if self.archs.is_empty() { archs_of(environment)? } else { self.archs.clone() };
        let base = |arch: &Arch| archs.iter().any(|base| arch.name().strip_suffix('a') == Some(base.name()));
        let also: Vec<Arch> = self.also.iter().copied().filter(base).collect();
        archs.extend(also);
        let Some(out) = environment.var("OUT_DIR") else {
            let reason = "only build scripts have it".to_owned();
            return Err(BuildError::BadVariable { variable: "OUT_DIR", value: PathBuf::new(), reason });
        };
        let folder = Path::new(out).join(name);
        fs::create_dir_all(&folder).map_err(BuildError::io("create", &folder))?;
        self.archs(archs).copy_to(&folder).build()?.write_table(&folder.with_extension("rs"))
    }

    /// Compiles the crate for every architecture.
    ///
    /// In a build script it also prints the dependencies of the result: the sources of the kernel crate and of its path
    /// dependencies, their manifests, the lock file, the compiler and the variables above. As warnings of cargo it
    /// prints the [report](Built::report).
    ///
    /// # Errors
    /// Fails with a [`BuildError`], one variant for each cause. If there is no compiler, the error says how to install
    /// one. If the kernel crate has an error or `ptxas` refuses the PTX, it holds the tool's output.
    pub fn build(&self) -> Result<Built, BuildError> {
        let environment = Environment::of_this_process();
        let in_build_script = !self.quiet && environment.var("CARGO_CFG_TARGET_ARCH").is_some();
        let outcome = self.build_in(&environment, in_build_script);
        // If the crate has an error, cargo would show these lines above it. It runs a script that failed again anyway.
        if in_build_script && !matches!(outcome, Err(BuildError::Compile { .. })) {
            for variable in VARIABLES {
                println!("cargo::rerun-if-env-changed={variable}");
            }
        }
        outcome
    }

    fn build_in(&self, environment: &Environment, in_build_script: bool) -> Result<Built, BuildError> {
        if self.archs.is_empty() {
            return Err(BuildError::NoArch);
        }
        let one_file = self.copy_to.as_ref().filter(|path| path.extension().is_some_and(|end| end == "ptx"));
        if let Some(path) = one_file.filter(|_| self.archs.len() > 1) {
            return Err(BuildError::OneFileForMany { path: path.clone(), archs: self.archs.len() });
        }
        let folder = match &self.kernels {
            Kernels::Folder(folder) => folder.clone(),
            Kernels::Dependency(links) => package::folder_of(environment, links)?,
        };
        let nested = |dir: &Path| self.target_dir.clone().unwrap_or_else(|| default_target_dir(environment, dir));
        let package = package::copied(environment, &folder, || nested(&folder))?;
        let manifest = Manifest::read(package.as_ref().map_or(&folder, |package| &package.dir))?;
        let toolchain = Toolchain::find_in(environment)?;
        for &arch in &self.archs {
            toolchain.require(arch)?;
        }
        let backend = self.backend.clone().unwrap_or_else(|| backend_of(environment));
        let target_dir = nested(&manifest.dir);
        let ptxas = self.find_ptxas(environment, &manifest)?;
        let nccl = self.find_nccl(environment, &manifest.dir, &toolchain, &backend)?;
        let line_info = self.line_info.unwrap_or_else(|| environment.var("GIN_LINE_INFO").is_some_and(|on| on == "1"));

        let compile = |arch: Arch| {
            let request = Request {
                manifest: &manifest.path,
                lib_name: &manifest.lib_name,
                features: &self.features,
                default_features: self.default_features,
                target_dir: &target_dir,
                jobs: environment.var("NUM_JOBS").and_then(|jobs| jobs.to_str()),
                arch,
                bitcode: self.bitcode || nccl.is_some(),
                ir: self.ir,
            };
            let plan = Plan::new(&toolchain, &backend, &request);
            self.compile(&plan, arch, &manifest, package.as_ref(), &ptxas, nccl.as_ref(), line_info)
        };
        let mut modules = Vec::new();
        let mut sources = Vec::new();
        for result in in_parallel(&self.archs, compile) {
            let (module, of_module) = result?;
            modules.push(module);
            sources.extend(of_module);
        }
        sources.sort();
        sources.dedup();
        if in_build_script {
            for source in sources.iter().chain([&toolchain.rustc]).chain(nccl.iter().map(|nccl| &nccl.library)) {
                println!("cargo::rerun-if-changed={}", source.display());
            }
        }
        let built = Built { crate_name: manifest.package, modules, sources, toolchain };
        if in_build_script {
            let report = built.report();
            for line in report.findings.iter().chain(report.figures.iter().filter(|_| self.figures)) {
                println!("cargo::warning={line}");
            }
        }
        Ok(built)
    }

    fn find_nccl(
        &self,
        environment: &Environment,
        start: &Path,
        toolchain: &Toolchain,
        backend: &Backend,
    ) -> Result<Option<Nccl>, BuildError> {
        if !self.nccl {
            return Ok(None);
        }
        nccl::check_archs(&self.archs)?;
        if *backend != Backend::Llvm {
            let reason = "rust-cuda's code generator keeps no bitcode of LLVM; unset GIN_CODEGEN_BACKEND".to_owned();
            return Err(BuildError::Nccl { reason });
        }
        Nccl::find_in(environment, start, toolchain).map(Some)
    }

    fn find_ptxas(&self, environment: &Environment, manifest: &Manifest) -> Result<Result<Ptxas, String>, BuildError> {
        match self.ptxas {
            UsePtxas::No => Ok(Err(String::new())),
            UsePtxas::IfFound => Ok(Ptxas::find_in(environment, &manifest.dir)),
            UsePtxas::Required => {
                Ptxas::find_in(environment, &manifest.dir).map(Ok).map_err(|reason| BuildError::NoPtxas { reason })
            }
        }
    }

    #[expect(clippy::too_many_arguments, reason = "the parts of one build, which its architectures share")]
    fn compile(
        &self,
        plan: &Plan,
        arch: Arch,
        manifest: &Manifest,
        package: Option<&Package>,
        ptxas: &Result<Ptxas, String>,
        nccl: Option<&Nccl>,
        line_info: bool,
    ) -> Result<(Module, Vec<PathBuf>), BuildError> {
        let mut attempts = 0;
        let (raw, log) = loop {
            let mut command = plan.command();
            if let Some(package) = package {
                command.current_dir(&package.runs_in);
            }
            let output = command.output().map_err(BuildError::io("run", &plan.program))?;
            let log = String::from_utf8_lossy(&output.stderr).into_owned();
            if !output.status.success() {
                return Err(BuildError::Compile { arch, command: plan.shell_line(), output: log });
            }
            match fs::read_to_string(&plan.ptx) {
                Ok(raw) if plan.kept().all(|path| path.is_file()) => break (raw, log),
                // The file was deleted. Cargo does not know of it and found nothing to do.
                _ if attempts == 0 => sources::forget(&plan.release, &plan.ptx)?,
                _ => {
                    return Err(BuildError::NoPtx { arch, path: plan.ptx.clone() });
                }
            }
            attempts += 1;
        };
        let (raw, mut findings) = match nccl.zip(plan.bitcode.as_ref()) {
            Some((nccl, bitcode)) => {
                let (own, lines) = Lines::take(&raw, &manifest.dir);
                (
                    nccl.link(bitcode, &raw, arch)?,
                    nccl::findings_of_crate(check::check_with(&own, &Limits::default(), &lines)),
                )
            }
            None => (raw, Vec::new()),
        };
        let bounded = ptx::apply_launch_bounds(&raw).map_err(|error| BuildError::Marker { arch, error })?;
        let (text, lines) = Lines::take(&bounded, &manifest.dir);
        let version = ptx::Module::parse(&text).version;
        if version.is_none_or(|version| version > MAX_PTX_VERSION) {
            return Err(BuildError::PtxVersion { arch, found: version });
        }

        let of_text = check::check_with(&text, &Limits::default(), &lines);
        findings.extend(of_text.into_iter().filter(|finding| nccl.is_none() || !nccl::is_of_library(finding)));
        let text = if line_info { bounded } else { text };
        let path = self.destination(plan, arch, manifest);
        if let Some(dir) = path.parent() {
            fs::create_dir_all(dir).map_err(BuildError::io("create", dir))?;
        }
        sources::replace(&path, &text)?;
        let assembly = match ptxas {
            Err(reason) => Assembly::NotTried(reason.clone()),
            Ok(ptxas) => ptxas.assemble(arch, &path, &path.with_extension("cubin"))?,
        };
        if let (UsePtxas::Required, Assembly::NotTried(reason)) = (self.ptxas, &assembly) {
            return Err(BuildError::NoPtxas { reason: reason.clone() });
        }
        let ir = plan.ir.as_ref().map(|from| ir::write(from, path.with_extension("ll"))).transpose()?;
        let of_module = match package {
            // Its files never change, but cargo shortens the lock file of the copy.
            Some(package) => package.lock.iter().cloned().collect(),
            None => {
                let mut files = sources::of_dep_info(&plan.dep_info)?;
                files.push(manifest.path.clone());
                files.extend(manifest.lock());
                files
            }
        };
        Ok((Module { arch, path, text, bitcode: plan.bitcode.clone(), ir, findings, assembly, log }, of_module))
    }

    fn destination(&self, plan: &Plan, arch: Arch, manifest: &Manifest) -> PathBuf {
        match &self.copy_to {
            Some(path) if path.extension().is_some_and(|end| end == "ptx") => path.clone(),
            Some(dir) => dir.join(format!("{}.{arch}.ptx", manifest.package)),
            // Beside the compiler's output, under a name that cargo and rustc do not use.
            None => plan.ptx.with_extension("bounded.ptx"),
        }
    }
}

fn backend_of(environment: &Environment) -> Backend {
    environment.var("GIN_CODEGEN_BACKEND").map_or(Backend::Llvm, |library| Backend::Nvvm(library.into()))
}

/// Returns the architectures of `GIN_ARCHS`, or the default ones.
fn archs_of(environment: &Environment) -> Result<Vec<Arch>, BuildError> {
    let Some(names) = environment.var("GIN_ARCHS") else { return Ok(SHIPPED.to_vec()) };
    let bad = |reason: String| BuildError::BadVariable { variable: "GIN_ARCHS", value: names.into(), reason };
    let text = names.to_str().ok_or_else(|| bad("is not UTF-8".to_owned()))?;
    text.split(',').map(|name| name.trim().parse().map_err(|error: UnknownArch| bad(error.to_string()))).collect()
}

/// Runs `work` for each architecture, as many at a time as there are CPUs.
///
/// Most of a first build is `core`, a single crate in a single codegen unit, so one build keeps one CPU busy.
fn in_parallel<T: Send>(archs: &[Arch], work: impl Fn(Arch) -> T + Sync) -> Vec<T> {
    let cpus = thread::available_parallelism().map_or(1, |count| count.get());
    let queue = Mutex::new(archs.iter().copied().enumerate());
    let next = || queue.lock().ok()?.next();
    let mut results: Vec<(usize, T)> = thread::scope(|scope| {
        let worker = || {
            let mut done = Vec::new();
            while let Some((index, arch)) = next() {
                done.push((index, work(arch)));
            }
            done
        };
        let workers: Vec<_> = (0..archs.len().min(cpus)).map(|_| scope.spawn(worker)).collect();
        let join = |worker: thread::ScopedJoinHandle<'_, _>| match worker.join() {
            Ok(done) => done,
            Err(panic) => std::panic::resume_unwind(panic),
        };
        workers.into_iter().flat_map(join).collect()
    });
    results.sort_by_key(|(index, _)| *index);
    results.into_iter().map(|(_, result)| result).collect()
}

#[cfg(test)]
#[path = "builder_tests.rs"]
mod tests;
