// SPDX-License-Identifier: MIT OR Apache-2.0
//! The result of a build.

use crate::{Arch, Assembly, BuildError, Finding, Toolchain, sources};
#[cfg(doc)]
use crate::{KernelBuilder, Limits};
use std::fs;
use std::path::{Path, PathBuf};

/// The PTX of one architecture.
#[derive(Clone, Debug)]
pub struct Module {
    /// The architecture.
    pub arch: Arch,
    /// The PTX file.
    pub path: PathBuf,
    /// The PTX text.
    pub text: String,
    /// The file of LLVM's bitcode, if [`KernelBuilder::bitcode`] asked for it.
    pub bitcode: Option<PathBuf>,
    /// The file of LLVM's IR, if [`KernelBuilder::ir`] asked for it.
    pub ir: Option<PathBuf>,
    /// The lines that break a rule, with the default [`Limits`]. Their numbers count the text without the lines that
    /// name its sources.
    pub findings: Vec<Finding>,
    /// The result of `ptxas`.
    pub assembly: Assembly,
    /// The compiler's output, including warnings.
    pub log: String,
}

/// The result of a build.
#[derive(Clone, Debug)]
pub struct Built {
    /// Name of the kernel crate.
    pub crate_name: String,
    /// One module for each architecture, in the order of the request.
    pub modules: Vec<Module>,
    /// Every file that the PTX depends on.
    pub sources: Vec<PathBuf>,
    /// The compiler used.
    pub toolchain: Toolchain,
}

impl Built {
    /// Returns the module of that architecture.
    pub fn module(&self, arch: Arch) -> Option<&Module> {
        self.modules.iter().find(|module| module.arch == arch)
    }

    /// Writes Rust source that embeds all modules: `pub static PTX: &[(&str, &[u8])]`, pairs of architecture and PTX
    /// text, or machine code if there was a `ptxas`. A GPU that has machine code of its own needs no compiler. With
    /// [`KernelBuilder::ir`] it embeds the IR instead: `pub static IR`.
    ///
    /// # Errors
    /// Fails with [`BuildError::Io`] if the file cannot be written.
    pub fn write_table(&self, path: &Path) -> Result<(), BuildError> {
        let (what, name) = match self.modules.iter().all(|module| module.ir.is_none()) {
            true => ("The kernels: pairs of architecture and PTX or machine code, oldest first.", "PTX"),
            false => ("The functions: pairs of architecture and LLVM IR, oldest first.", "IR"),
        };
        let mut table = format!("/// {what}\npub static {name}: &[(&str, &[u8])] = &[\n");
        let mut modules: Vec<&Module> = self.modules.iter().collect();
        modules.sort_by_key(|module| module.arch);
        for module in modules {
            let images = [Some(&module.path), module.assembly.report().map(|report| &report.cubin)];
            for path in if module.ir.is_some() { [module.ir.as_ref(), None] } else { images }.into_iter().flatten() {
                let file = fs::canonicalize(path).map_err(BuildError::io("find", path))?;
                table.push_str(&format!("    ({:?}, include_bytes!({file:?})),\n", module.arch.name()));
            }
        }
        table.push_str("];\n");
        sources::replace(path, &table)
    }
}
