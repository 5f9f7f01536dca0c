// SPDX-License-Identifier: MIT OR Apache-2.0
//! The machine code of the kernels: their threads fit, nothing is on the stack, and no register is spilled.
//!
//! The trial reports as ignored if the kernels were not compiled for GPUs, or if there is no assembler.

use gin_build::{Arch, Assembly, Ptxas};
use gin_ep_kernels::matmul::tile;
use libtest_mimic::{Arguments, Completion, Failed, Trial};
use std::path::Path;
use std::process::ExitCode;

/// Registers of a multiprocessor.
const REGISTERS: u32 = 65_536;

fn main() -> ExitCode {
    let name = "the_kernels_have_no_stack_spill_no_register_and_all_their_threads_fit";
    libtest_mimic::run(&Arguments::from_args(), vec![Trial::ignorable_test(name, assembled)]).exit_code()
}

fn assembled() -> Result<Completion, Failed> {
    if gin_ep::PTX.is_empty() {
        return Ok(Completion::ignored_with("built without the feature `cuda`"));
    }
    let ptxas = match Ptxas::find(Path::new(env!("CARGO_MANIFEST_DIR"))) {
        Ok(ptxas) => ptxas,
        Err(reason) => return Ok(Completion::ignored_with(reason)),
    };
    let folder = tempfile::tempdir()?;
    // The table has machine code, too, if the build found an assembler.
    for (arch, text) in gin_ep::PTX.iter().filter(|(_, image)| !image.starts_with(b"\x7fELF")) {
        let (ptx, cubin) = (folder.path().join(format!("{arch}.ptx")), folder.path().join(format!("{arch}.cubin")));
        std::fs::write(&ptx, text)?;
        let report = match ptxas.assemble(arch.parse::<Arch>()?, &ptx, &cubin)? {
            Assembly::Done(report) => report,
            Assembly::NotTried(reason) => return Ok(Completion::ignored_with(reason)),
        };
        let mut kernels = 0;
        for entry in report.entries.iter().filter(|entry| entry.name.starts_with("ep_")) {
            kernels += 1;
            let multiplies = entry.name.contains("matmul");
            if multiplies && *arch == "sm_80" {
                // No block of it fits there: a GPU of compute capability 8 has less shared memory.
                continue;
            }
            let posts = entry.name.ends_with("_proxy") || entry.name.ends_with("_gdaki");
            let threads = match (multiplies, posts) {
                (true, _) => tile::THREADS,
                (false, true) => gin_ep_kernels::MOST_NETWORK_THREADS,
                (false, false) => gin_ep_kernels::MOST_THREADS,
            };
            println!("{arch} {}: {} registers", entry.name, entry.registers);
            let spilled = entry.spill_stores + entry.spill_loads;
            if entry.stack + spilled > 0 || entry.registers * threads > REGISTERS {
                return Err(format!("{arch} {}: {entry:?}", entry.name).into());
            }
        }
        if kernels != 27 {
            return Err(format!("{arch} has {kernels} kernels, not 27").into());
        }
    }
    Ok(Completion::Completed)
}
