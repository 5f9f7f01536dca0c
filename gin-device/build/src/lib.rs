// SPDX-License-Identifier: MIT OR Apache-2.0

//! Compiles a Rust kernel crate to PTX, from a build script or a test.
//!
//! ```no_run
//! use gin_build::{Arch, KernelBuilder};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let out = std::path::PathBuf::from(std::env::var("OUT_DIR")?);
//! let built = KernelBuilder::new("../my-kernels").archs([Arch::Sm80, Arch::Sm90, Arch::Sm100]).copy_to(&out).build()?;
//! built.write_table(&out.join("ptx.rs"))?; // pub static PTX: &[(&str, &[u8])]
//! # Ok(())
//! # }
//! ```
//!
//! The kernel crate is an ordinary `no_std` library in any workspace. It needs no profile, no linker and no settings. A
//! nested cargo compiles it with `core` from source: fat LTO, one codegen unit, `opt-level = 3`, panics that only trap.
//! Functions are inlined unless they are long or `#[inline(never)]`, so that kernels need no stack. Each architecture
//! has a separate target folder, and the nested cargo sees nothing of the outer cargo's environment. So neither cargo
//! waits for the other's lock or inherits its flags.
//!
//! # Device functions for CUDA C++
//!
//! [`Built::write_device_library`] writes the functions that a crate exports as PTX, relocatable machine code, a fat
//! binary and a static library, which `nvcc -rdc=true` and nvJitLink link.
//!
//! # The compiler
//!
//! [`Toolchain::find`] looks for a compiler that can build `core` for `nvptx64-nvidia-cuda`, version 1.96 or later.
//! Nightly is not required: `RUSTC_BOOTSTRAP=1` is set for the nested build alone.
//!
//! # Variables
//!
//! | variable | meaning |
//! | --- | --- |
//! | `GIN_RUSTC`, `GIN_CARGO` | compiler and cargo to use instead of searching; if only one is given, the other must be in the same folder; may be older than 1.96 |
//! | `GIN_ARCHS` | architectures of [`KernelBuilder::embed`], such as `sm_80,sm_90` |
//! | `GIN_PTXAS` | `ptxas` to check the PTX with, instead of [searching](Ptxas::find) |
//! | `GIN_NCCL_DEVICE` | NCCL's `libnccl_device.bc` for [`KernelBuilder::nccl`], instead of searching; its `nccl.h` is beside it or in `../include` |
//! | `GIN_LLVM_BIN` | folder with `llvm-link`, `opt` and `llc` for the same, instead of searching |
//! | `GIN_LINE_INFO` | `1` keeps source lines in the PTX, as [`KernelBuilder::line_info`] does |
//! | `GIN_PROJECT` | folder of the project whose `Cargo.lock` and configuration hold for kernel crates from a registry; needed only if the target folder is not below the project |
//! | `GIN_CODEGEN_BACKEND` | path of rust-cuda's `librustc_codegen_nvvm.so`; `GIN_RUSTC` must then name the nightly that it was built for |
//!
//! # Findings and figures
//!
//! In a build script, [`KernelBuilder::build`] prints a [report](Built::report) as warnings of cargo. It names mistakes
//! that compile but go wrong on a GPU, with source file, line and kernel as far as they are known:
//!
//! ```text
//! warning: my-program@0.1.0: kernels/src/lib.rs:17: in `count`: an atomic without ordering and scope
//! (core::sync::atomic): `atom.global.add.u32 %r1, [%rd2], 1;`; LLVM drops its ordering: use signals, barriers, or the
//! words of gin_device::sys
//! ```
//!
//! It gives the registers, stack, spills and shared memory of each kernel too, or says that there is no `ptxas` and
//! nothing was assembled. [`KernelBuilder::figures`] turns these lines off.
//!
//! # Markers
//!
//! rustc has no syntax for launch bounds. A kernel crate requests them by a comment that its module-level assembly
//! carries into the PTX. This crate turns it into `.maxntid` and `.minnctapersm` of the named kernel:
//!
//! ```text
//! core::arch::global_asm!("// gin.launch_bounds KERNEL MAX_THREADS MIN_BLOCKS");
//! ```
//!
//! `MIN_BLOCKS` is 0 for no minimum. Shared memory is declared by `global_asm!` too, in any crate, and read through
//! `cvta.shared`. LLVM passes both on unchanged:
//!
//! ```text
//! core::arch::global_asm!(".extern .shared .align 16 .b8 gin_dynamic_shared[];");
//! core::arch::global_asm!(".shared .align 16 .b8 tile[1024];");
//! asm!("{{ .reg .u64 t; mov.u64 t, tile; cvta.shared.u64 {0}, t; }}", out(reg64) address, options(nostack, nomem));
//! ```

#![warn(unreachable_pub)]

mod arch;
mod builder;
mod built;
mod check;
mod command;
mod device_library;
mod environment;
mod error;
#[cfg(test)]
mod fakes;
mod folders;
mod ir;
mod lines;
mod manifest;
mod nccl;
mod origins;
mod package;
pub mod ptx;
mod ptxas;
mod report;
mod sass;
mod sources;
mod toolchain;

pub use arch::{Arch, MAX_PTX_VERSION, UnknownArch};
pub use builder::KernelBuilder;
pub use built::{Built, Module};
pub use check::{Finding, Limits, Rule, check};
pub use command::Backend;
pub use device_library::DeviceLibrary;
pub use error::{BuildError, INSTALL_COMMANDS, Rejected};
pub use ptxas::{Assembly, EntryReport, Ptxas, Report, UsePtxas, parse_report};
pub use report::BuildReport;
pub use sass::{Code, Disassembly};
pub use toolchain::{TARGET, Toolchain};
