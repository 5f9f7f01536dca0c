// SPDX-License-Identifier: MIT OR Apache-2.0

//! Command lines of the nested cargo, and the environment that it may see.

use std::ffi::{OsStr, OsString};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::arch::Arch;
use crate::environment::scrub;
use crate::toolchain::{TARGET, Toolchain};

/// Separator of flags in `CARGO_ENCODED_RUSTFLAGS`. Unlike a space it may not occur in a path.
const FLAG_SEPARATOR: &str = "\u{1f}";

/// Options of LLVM that inline every function of up to some 20,000 instructions, about thirty puts, unless it is
/// `inline(never)`.
///
/// A function that is called has its captured and borrowed values on the stack. LLVM calls a closure of a few puts,
/// because inlining saves a CPU little. The first option is the limit. The other two replace the limits of calls in
/// deep loops and behind several branches. LLVM multiplies them by 11 for this target.
pub(crate) const INLINE_OPTIONS: [&str; 3] =
    ["-inline-threshold=10000", "-locally-hot-callsite-threshold=10000", "-inline-cold-callsite-threshold=10000"];

/// The code generator that turns Rust into PTX.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Backend {
    /// rustc's own LLVM.
    Llvm,
    /// rust-cuda's `librustc_codegen_nvvm.so` at this path. The compiler must be the nightly that it was built for.
    Nvvm(PathBuf),
}

/// A request to build one crate for one architecture: everything that the command line depends on.
#[derive(Clone, Debug)]
pub(crate) struct Request<'a> {
    pub(crate) manifest: &'a Path,
    pub(crate) lib_name: &'a str,
    pub(crate) features: &'a [String],
    pub(crate) default_features: bool,
    pub(crate) target_dir: &'a Path,
    pub(crate) jobs: Option<&'a str>,
    pub(crate) arch: Arch,
    /// Keeps LLVM's bitcode too, if the code generator is LLVM.
    pub(crate) bitcode: bool,
    /// Keeps LLVM's IR as text, if the code generator is LLVM.
    pub(crate) ir: bool,
}

/// A nested cargo command, ready to run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Plan {
    pub(crate) program: PathBuf,
    pub(crate) args: Vec<OsString>,
    pub(crate) env: Vec<(&'static str, OsString)>,
    /// Cargo's folder for this target and profile.
    pub(crate) release: PathBuf,
    /// Path of the PTX.
    pub(crate) ptx: PathBuf,
    /// Path of the bitcode, if there is any.
    pub(crate) bitcode: Option<PathBuf>,
    /// Path of the IR, if there is any.
    pub(crate) ir: Option<PathBuf>,
    /// Path of cargo's list of the sources that the PTX depends on.
    pub(crate) dep_info: PathBuf,
}

impl Plan {
    pub(crate) fn new(toolchain: &Toolchain, backend: &Backend, request: &Request<'_>) -> Plan {
        match backend {
            Backend::Llvm => Self::llvm(toolchain, request),
            Backend::Nvvm(library) => Self::nvvm(toolchain, library, request),
        }
    }

    fn llvm(toolchain: &Toolchain, request: &Request<'_>) -> Plan {
        let arch = request.arch;
        let mut flags = vec![format!("-Ctarget-cpu={arch}")];
        flags.extend(arch.ptx_feature().map(|feature| format!("-Ctarget-feature={feature}")));
        // 1.96 may still duplicate calls of convergent functions into both arms of a branch.
        flags.push("-Zmir-enable-passes=-JumpThreading".to_owned());
        // A panic is a trap without a message, so that no formatting code reaches the PTX.
        flags.push("-Zunstable-options".to_owned());
        flags.push("-Cpanic=immediate-abort".to_owned());

        let release = target_dir(request).join(TARGET).join("release");
        // The path is an argument of the compiler, so cargo compiles again when it changes. It must differ for
        // everything else that distinguishes two builds: a build that cargo considers fresh does not write the file
        // again.
        let mut hasher = DefaultHasher::new();
        (request.manifest, request.features, request.default_features, &flags, &toolchain.version).hash(&mut hasher);
        let inline = format!("-Cllvm-args={}", INLINE_OPTIONS.join(" "));
        inline.hash(&mut hasher);
        if request.bitcode {
            "bitcode".hash(&mut hasher);
        }
        if request.ir {
            "ir".hash(&mut hasher);
        }
        let ptx = release.join(format!("{}-{:016x}.s", request.lib_name, hasher.finish()));

        let mut args = common_args(request, "staticlib", "core");
        let mut emit = OsString::from("--emit=asm=");
        emit.push(&ptx);
        let bitcode = request.bitcode.then(|| ptx.with_extension("bc"));
        if let Some(bitcode) = &bitcode {
            emit.push(",llvm-bc=");
            emit.push(bitcode);
        }
        let ir = request.ir.then(|| ptx.with_extension("ll"));
        if let Some(ir) = &ir {
            emit.push(",llvm-ir=");
            emit.push(ir);
        }
        // LLVM inlines when the last crate is compiled, so that `core` need not know the limit.
        args.extend(["--".into(), emit, inline.into()]);
        // For the places of findings; `Lines` takes the directives out again. They change no instruction. But LLVM
        // fails on them in a module that has lines of another language too.
        args.push(if request.ir { "-Cdebuginfo=none" } else { "-Cdebuginfo=line-directives-only" }.into());
        // A kernel crate then need not name the unstable features that `#[kernel]` expands to, but may.
        args.push("-Zcrate-attr=feature(abi_gpu_kernel,abi_ptx,asm_experimental_arch)".into());
        args.extend(["-Aduplicate-features".into(), "-Aunused-features".into()]);
        Plan {
            program: toolchain.cargo.clone(),
            args,
            env: common_env(toolchain, &flags),
            dep_info: release.join(format!("lib{}.d", request.lib_name)),
            ptx,
            bitcode,
            ir,
            release,
        }
    }

    fn nvvm(toolchain: &Toolchain, library: &Path, request: &Request<'_>) -> Plan {
        let flags = [
            format!("-Zcodegen-backend={}", library.display()),
            "-Zcrate-attr=feature(register_tool)".to_owned(),
            "-Zcrate-attr=register_tool(nvvm_internal)".to_owned(),
            "-Zcrate-attr=no_std".to_owned(),
            "-Zsaturating_float_casts=false".to_owned(),
            "-Zunstable-options".to_owned(),
            "-Cpanic=immediate-abort".to_owned(),
            // This code generator interprets `llvm-args` as options of libNVVM.
            format!("-Cllvm-args=-arch={}", request.arch.compute_name()),
        ];
        let release = target_dir(request).join(TARGET).join("release");
        Plan {
            program: toolchain.cargo.clone(),
            args: common_args(request, "cdylib", "core,alloc"),
            env: common_env(toolchain, &flags),
            // Its linker step writes the whole program as one PTX file under the name of the library.
            ptx: release.join(format!("{}.ptx", request.lib_name)),
            bitcode: None,
            ir: None,
            dep_info: release.join(format!("{}.d", request.lib_name)),
            release,
        }
    }

    /// Returns the files that the compiler writes beside the PTX.
    pub(crate) fn kept(&self) -> impl Iterator<Item = &PathBuf> {
        [&self.bitcode, &self.ir].into_iter().flatten()
    }

    /// Returns the command, without the outer cargo's environment.
    pub(crate) fn command(&self) -> Command {
        let mut command = Command::new(&self.program);
        scrub(&mut command);
        command.args(&self.args).envs(self.env.iter().map(|(name, value)| (name, value)));
        command
    }

    /// Returns the command as a line for a shell, for error messages.
    pub(crate) fn shell_line(&self) -> String {
        let env = self.env.iter().map(|(name, value)| match *name {
            // The same flags in a form that can be typed.
            "CARGO_ENCODED_RUSTFLAGS" => {
                format!("RUSTFLAGS={}", quote(value.to_string_lossy().replace(FLAG_SEPARATOR, " ")))
            }
            _ => format!("{name}={}", quote(value)),
        });
        let args = self.args.iter().map(quote);
        env.chain([quote(&self.program)]).chain(args).collect::<Vec<_>>().join(" ")
    }
}

/// Returns the target folder of an architecture. Cargo keeps one build of `core` per folder, and a change of flags
/// replaces it.
fn target_dir(request: &Request<'_>) -> PathBuf {
    request.target_dir.join(request.arch.name())
}

fn common_args(request: &Request<'_>, crate_type: &str, std: &str) -> Vec<OsString> {
    let mut args: Vec<OsString> = vec!["rustc".into(), "--manifest-path".into(), request.manifest.into()];
    args.extend(["--release".into(), "--lib".into(), "--crate-type".into(), crate_type.into()]);
    args.extend([format!("-Zbuild-std={std}").into(), "--target".into(), TARGET.into()]);
    args.extend(["--target-dir".into(), target_dir(request).into()]);
    if !request.default_features {
        args.push("--no-default-features".into());
    }
    if !request.features.is_empty() {
        args.extend(["--features".into(), request.features.join(",").into()]);
    }
    if let Some(jobs) = request.jobs {
        args.extend(["--jobs".into(), jobs.into()]);
    }
    args
}

fn common_env(toolchain: &Toolchain, flags: &[String]) -> Vec<(&'static str, OsString)> {
    vec![
        ("RUSTC", toolchain.rustc.clone().into()),
        ("RUSTC_BOOTSTRAP", "1".into()),
        ("CARGO_ENCODED_RUSTFLAGS", flags.join(FLAG_SEPARATOR).into()),
        ("CARGO_INCREMENTAL", "0".into()),
        ("CARGO_TERM_COLOR", "never".into()),
        // The profile is set here, so that a kernel crate needs none and cannot have a wrong one.
        ("CARGO_PROFILE_RELEASE_OPT_LEVEL", "3".into()),
        ("CARGO_PROFILE_RELEASE_LTO", "fat".into()),
        ("CARGO_PROFILE_RELEASE_CODEGEN_UNITS", "1".into()),
        ("CARGO_PROFILE_RELEASE_DEBUG", "false".into()),
        ("CARGO_PROFILE_RELEASE_DEBUG_ASSERTIONS", "false".into()),
        ("CARGO_PROFILE_RELEASE_OVERFLOW_CHECKS", "false".into()),
        // The flags above override this. It makes crates of different profiles share one build of `core`.
        ("CARGO_PROFILE_RELEASE_PANIC", "abort".into()),
    ]
}

fn quote(word: impl AsRef<OsStr>) -> String {
    let word = word.as_ref().to_string_lossy();
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_=./,+:".contains(c);
    if !word.is_empty() && word.chars().all(plain) {
        return word.into_owned();
    }
    format!("'{}'", word.replace('\'', "'\\''"))
}

#[cfg(test)]
#[path = "command_tests.rs"]
mod tests;
