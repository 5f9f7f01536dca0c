// SPDX-License-Identifier: MIT OR Apache-2.0
//! The machine code of the kernels: their threads fit, nothing is on the stack, no register is spilled, and no fence is
//! there twice.
//!
//! The trial reports as ignored if the kernels were not compiled for GPUs, or if there is no assembler.

use gin_build::{Arch, Assembly, Disassembly, Ptxas};
use gin_ep_kernels::matmul::{tile, warpgroups};
use libtest_mimic::{Arguments, Completion, Failed, Trial};
use std::path::Path;
use std::process::ExitCode;

/// Registers of a multiprocessor.
const REGISTERS: u32 = 65_536;

fn main() -> ExitCode {
    let name = "the_kernels_have_no_stack_spill_no_register_no_fence_twice_and_all_their_threads_fit";
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
    // The table has machine code, too, if the build found an assembler.
    for (arch, text) in gin_ep::PTX.iter().filter(|(_, image)| !image.starts_with(b"\x7fELF")) {
        // The build has assembled the same text, and the assembler's report is still there.
        let ptx = Path::new(env!("OUT_DIR")).join(format!("ptx/gin-ep-kernels.{arch}.ptx"));
        let report = match ptxas.assemble(arch.parse::<Arch>()?, &ptx, &ptx.with_extension("cubin"))? {
            Assembly::Done(report) => report,
            Assembly::NotTried(reason) => return Ok(Completion::ignored_with(reason)),
        };
        let module = report.disassemble()?;
        let mut kernels = 0;
        for entry in report.entries.iter().filter(|entry| entry.name.starts_with("ep_")) {
            kernels += 1;
            let multiplies = entry.name.contains("matmul");
            if multiplies && *arch == "sm_80" {
                // No block of it fits there: a GPU of compute capability 8 has less shared memory.
                continue;
            }
            let posts = entry.name.ends_with("_proxy")
                || entry.name.ends_with("_gdaki")
                || entry.name.contains("_send_")
                || entry.name.contains("_into")
                || entry.name.contains("_shared")
                || entry.name.contains("_arriving");
            let threads = match (multiplies, posts) {
                (true, _) if entry.name.ends_with("_wgmma") => warpgroups::THREADS,
                (true, _) => tile::THREADS,
                (false, true) => gin_ep_kernels::MAX_NETWORK_THREADS,
                (false, false) => gin_ep_kernels::MAX_THREADS,
            };
            println!("{arch} {}: {} registers", entry.name, entry.registers);
            let spilled = entry.spill_stores + entry.spill_loads;
            if entry.name.ends_with("_wgmma") {
                steps(&module, &entry.name)?;
            }
            if entry.stack + spilled > 0 || entry.registers * threads > REGISTERS {
                return Err(format!("{arch} {}: {entry:?}", entry.name).into());
            }
        }
        // Only this architecture has the products by warpgroups.
        let expected = if *arch == "sm_90a" { 48 } else { 41 };
        if kernels != expected {
            return Err(format!("{arch} has {kernels} kernels, not {expected}").into());
        }
        if *arch == "sm_90" {
            fences(std::str::from_utf8(text)?, &module)?;
        }
    }
    Ok(Completion::Completed)
}

/// Requires that a step of a product by warpgroups is four instructions with one wait behind them: the assembler waits
/// after each of them if it finds another use of the sums. A step of E4M3 has four for each 128
/// columns.
fn steps(module: &Disassembly, kernel: &str) -> Result<(), Failed> {
    let code = module.code(kernel)?;
    let count = |name: &str| code.inlined.iter().filter(|line| line.contains(name)).count();
    let (product, expected) = if kernel.contains("_e4m3_") {
        ("QGMMA.64x128x32.F32.E4M3.E4M3", if kernel.contains("overlapped") { [4, 1] } else { [8, 2] })
    } else {
        ("HGMMA.64x256x16.F32.BF16", [4, 1])
    };
    let found = [count(product), count("WARPGROUP.DEPBAR")];
    if found == expected {
        Ok(())
    } else {
        Err(format!("{kernel}: {found:?} products and waits, not {expected:?}").into())
    }
}

/// Requires that a block releases once for all that it stored, and once for each peer whose flag it raises, and
/// acquires once for each source.
fn fences(text: &str, module: &Disassembly) -> Result<(), Failed> {
    // Releases to the GPU and to the system; acquires from them.
    for (kernel, releases, acquires) in [
        // The block that was counted, and a flag. Besides, where a released dispatch had the same buffer, a flag that
        // its rows are given up, before the first row is sent.
        ("ep_dispatch", [1, 2], [1, 2]),
        ("ep_dispatch_e4m3", [1, 2], [1, 2]),
        // Besides, the last block releases its decision, and others acquire the flags or the decision.
        ("ep_dispatch_into", [2, 2], [2, 3]),
        ("ep_dispatch_into_e4m3", [2, 2], [2, 3]),
        ("ep_send_metadata", [1, 2], [1, 2]),
        // They do not receive.
        ("ep_send_rows", [1, 1], [1, 0]),
        ("ep_send_rows_e4m3", [1, 1], [1, 0]),
        ("ep_permute_arriving", [0, 0], [0, 1]),
        // The same; flags of rows in place are raised elsewhere.
        ("ep_combine_bf16", [1, 2], [1, 1]),
        ("ep_combine_f16", [1, 2], [1, 1]),
        ("ep_combine_f32", [1, 2], [1, 1]),
        ("ep_combine_wide", [1, 2], [1, 1]),
    ] {
        let rest = text.split(".entry ").find(|rest| rest.starts_with(&format!("{kernel}(")));
        // Functions may follow.
        let body = rest.and_then(|rest| rest.split("\n}").next()).ok_or_else(|| format!("no kernel {kernel}"))?;
        let count = |fence: &str| ["gpu", "sys"].map(|scope| body.matches(&format!("fence.{fence}.{scope}")).count());
        let found = (count("release"), count("acquire"));
        let all: usize = found.0.iter().chain(&found.1).sum();
        if found != (releases, acquires) || body.matches("fence.").count() != all {
            return Err(format!("{kernel}: releases and acquires {found:?}, not {:?}", (releases, acquires)).into());
        }
        // A report of a fault has a fence of its own, and reports release to the GPU.
        let code = module.code(kernel)?;
        let found = code.inlined.iter().chain(&code.called).filter(|line| line.contains("MEMBAR.ALL.SYS")).count();
        if found != releases[1] + 1 {
            return Err(
                format!("{kernel}: {found} fences of the system in machine code, not {}", releases[1] + 1).into()
            );
        }
    }
    Ok(())
}
