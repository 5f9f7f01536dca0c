// SPDX-License-Identifier: MIT OR Apache-2.0
//! `gin bench sass`: instruction counts of the probe kernels.

use gin_cli::Failure;
use std::io::Write;

/// Prints the instructions and registers of the probe kernels beside NCCL's.
///
/// # Errors
/// Returns an error that names a missing compiler or assembler and how to install it.
#[cfg(feature = "cuda")]
pub(crate) fn print(out: &mut impl Write) -> Result<(), Failure> {
    sass(out)
}

/// Fails: this build has no kernels to count.
///
/// # Errors
/// Always returns an error.
#[cfg(not(feature = "cuda"))]
pub(crate) fn print(_: &mut impl Write) -> Result<(), Failure> {
    Err("this build has no kernels for GPUs: build with the feature `cuda`".into())
}

/// Name and title of each probe kernel, and the figures of NCCL's equivalent kernel: instructions in 2.28.9 and 2.32.3,
/// then registers in both.
///
/// The source of NCCL's figures is the SASS for sm_90 of the kernels in its PyPI wheels, with one back end compiled in,
/// read on 2026-11-20. NOPs are not counted. An unknown figure is 0.
#[cfg(feature = "cuda")]
const PROBES: [(&str, &str, [u32; 4]); 15] = [
    ("probe_put_signal", "put with signal, one thread", [106, 271, 28, 40]),
    ("probe_put_report", "the same, faults reported", [0, 0, 0, 0]),
    ("probe_put_value", "put_value, one thread", [0, 0, 0, 0]),
    ("probe_flush", "flush, a block", [38, 216, 0, 0]),
    ("probe_wait_signal", "wait_signal, a block", [25, 49, 0, 0]),
    ("probe_gdaki_put_signal", "GDAKI put with signal", [370, 596, 0, 0]),
    ("probe_gdaki_put_value", "GDAKI put_value", [0, 0, 0, 0]),
    ("probe_gdaki_flush", "GDAKI flush, a block", [107, 816, 0, 0]),
    ("probe_lsa_put_signal", "put by stores, one thread", [0, 0, 0, 0]),
    ("probe_lsa_barrier", "LSA barrier, a warp", [0, 0, 0, 0]),
    ("ring", "the workload ring", [0, 0, 0, 0]),
    ("halo", "the workload halo", [0, 0, 0, 0]),
    ("alltoall", "the workload alltoall", [0, 0, 0, 0]),
    ("moe_gate", "the gate of moe", [0, 0, 0, 0]),
    ("moe_experts", "the experts of moe", [0, 0, 0, 0]),
];

#[cfg(feature = "cuda")]
fn sass(out: &mut impl Write) -> Result<(), Failure> {
    use gin_build::{Arch, Assembly};
    let ptxas = find_ptxas()?;
    let folder = Folder::new()?;
    let is_text = |(arch, image): &&(&str, &[u8])| *arch == "sm_90" && !image.starts_with(b"\x7fELF");
    let text = gin_cli::ptx::PTX.iter().find(is_text).ok_or("no PTX for sm_90 in this build")?.1;
    let (ptx, cubin) = (folder.0.join("kernels.ptx"), folder.0.join("kernels.cubin"));
    std::fs::write(&ptx, text)?;
    let Assembly::Done(report) = ptxas.assemble(Arch::Sm90, &ptx, &cubin)? else {
        return Err("ptxas did not run".into());
    };
    writeln!(
        out,
        "{:28} {:>12} {:>6} {:>9} {:>6} {:>6}   NCCL 2.28.9 and 2.32.3: instructions, registers",
        "sm_90", "instructions", "called", "registers", "stack", "spills"
    )?;
    let module = report.disassemble()?;
    for (kernel, what, nccl) in PROBES {
        let entry = report.entry(kernel).ok_or_else(|| format!("no kernel {kernel}"))?;
        let code = module.code(kernel)?;
        let known = |figure: u32| if figure == 0 { "-".to_string() } else { figure.to_string() };
        let [old, new, old_registers, new_registers] = nccl.map(known);
        let beside = if nccl == [0; 4] {
            String::new()
        } else {
            format!("   {old} and {new}, {old_registers} and {new_registers}")
        };
        writeln!(
            out,
            "{what:28} {:>12} {:>6} {:>9} {:>6} {:>6}{beside}",
            code.inlined.len(),
            code.called.len(),
            entry.registers,
            entry.stack,
            entry.spill_stores,
        )?;
    }
    writeln!(
        out,
        "\nNOPs are not counted. The column \"called\" has the instructions of functions for rare cases, which a kernel \
         has once.\nUnless its row says that faults are reported, a fault ends the grid."
    )?;
    Ok(())
}

/// Finds ptxas, starting from the current folder, then from the folder of this program. The program often is in the
/// `target` folder of its workspace.
#[cfg(feature = "cuda")]
fn find_ptxas() -> Result<gin_build::Ptxas, Failure> {
    let program = std::env::current_exe()?;
    gin_build::Ptxas::find(&std::env::current_dir()?)
        .or_else(|reason| gin_build::Ptxas::find(&program).map_err(|_| reason))
        .map_err(|reason| format!("{reason}; `make setup` fetches one").into())
}

/// A temporary folder for the files of this run. Its drop removes it.
#[cfg(feature = "cuda")]
struct Folder(std::path::PathBuf);

#[cfg(feature = "cuda")]
impl Folder {
    fn new() -> std::io::Result<Self> {
        let path = std::env::temp_dir().join(format!("gin-sass-{}", std::process::id()));
        std::fs::create_dir_all(&path)?;
        Ok(Self(path))
    }
}

#[cfg(feature = "cuda")]
impl Drop for Folder {
    fn drop(&mut self) {
        // If this fails, the system cleans up its temporary folder.
        let _ = std::fs::remove_dir_all(&self.0);
    }
}
