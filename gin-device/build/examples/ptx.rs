// SPDX-License-Identifier: MIT OR Apache-2.0

//! Compiles a kernel crate and prints the resources of each kernel:
//! `ptx [--check] [--nccl] [--to OUT] [--features A,B] FOLDER [ARCH ...]`, sm_90 by default. `--nccl` links NCCL's
//! device functions; `--to` names the folder of the PTX and the machine code.
//!
//! With `--check` the exit status is 1 if a module breaks a rule or was not assembled, or if a kernel has a stack or
//! spills.

use std::process::ExitCode;
use std::time::Instant;

use gin_build::{Arch, Assembly, KernelBuilder, Limits, Module, Rule, check};

/// Largest allowed module of the shipped kernels, in bytes: somewhat more than those of `gin bench`.
const MAX_BYTES: usize = 5 << 18;

/// Bytes of stack that NCCL's functions may take: its get keeps a word of an atomic maximum there.
const STACK_OF_NCCL: u32 = 8;

fn main() -> ExitCode {
    match run() {
        Ok(faults) if faults.is_empty() => ExitCode::SUCCESS,
        Ok(faults) => {
            for fault in faults {
                eprintln!("{fault}");
            }
            ExitCode::FAILURE
        }
        Err(error) => {
            eprintln!("{error}");
            ExitCode::from(2)
        }
    }
}

/// Prints the modules. Returns the faults if `--check` is given.
fn run() -> Result<Vec<String>, Box<dyn std::error::Error>> {
    let mut args = std::env::args().skip(1).peekable();
    let must_hold = args.next_if_eq("--check").is_some();
    let nccl = args.next_if_eq("--nccl").is_some();
    let usage = "usage: ptx [--check] [--nccl] [--to OUT] [--features A,B] FOLDER [ARCH ...]";
    let to = match args.next_if_eq("--to") {
        Some(_) => Some(args.next().ok_or(usage)?),
        None => None,
    };
    let features = match args.next_if_eq("--features") {
        Some(_) => args.next().ok_or(usage)?,
        None => String::new(),
    };
    let folder = args.next().ok_or(usage)?;
    let mut archs = args.map(|name| name.parse()).collect::<Result<Vec<Arch>, _>>()?;
    if archs.is_empty() {
        archs.push(Arch::Sm90);
    }
    let start = Instant::now();
    let mut builder = KernelBuilder::new(folder).archs(archs).features(features.split_terminator(',')).nccl(nccl);
    if let Some(to) = to {
        builder = builder.copy_to(to);
    }
    let built = builder.build()?;
    println!("{} by {} in {:.1?}", built.crate_name, built.toolchain, start.elapsed());
    let faults: Vec<String> = built.modules.iter().flat_map(|module| show(module, nccl)).collect();
    Ok(if must_hold { faults } else { Vec::new() })
}

/// Prints a module and returns its faults. Code of NCCL may load through the read-only cache.
fn show(module: &Module, nccl: bool) -> Vec<String> {
    let arch = module.arch;
    println!("{arch} {} ({} bytes)", module.path.display(), module.text.len());
    let mut faults = Vec::new();
    match &module.assembly {
        Assembly::NotTried(reason) => faults.push(format!("{arch}: not assembled: {reason}")),
        Assembly::Done(report) => {
            for entry in &report.entries {
                println!(
                    "  {:32} {:3} registers {:4} stack {:4} spilled {:6} shared",
                    entry.name, entry.registers, entry.stack, entry.spill_stores, entry.shared
                );
                let stack = if nccl { STACK_OF_NCCL } else { 0 };
                if entry.stack > stack || entry.spill_stores + entry.spill_loads > 0 {
                    faults.push(format!("{arch}: {} has a stack or spills", entry.name));
                }
            }
        }
    }
    let mut findings = check(&module.text, &Limits::default().max_bytes(MAX_BYTES));
    if nccl {
        findings.retain(|finding| finding.rule != Rule::NonCoherentLoad);
        findings.extend(module.findings.iter().filter(|finding| finding.rule == Rule::NonCoherentLoad).cloned());
    }
    faults.extend(findings.iter().map(|finding| format!("{arch}: {finding}")));
    for fault in &faults {
        println!("  {fault}");
    }
    faults
}
