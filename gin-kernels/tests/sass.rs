// SPDX-License-Identifier: MIT OR Apache-2.0
//! The machine code of the kernels. Memory that peers, CPUs and other blocks see is accessed at the intended scope and
//! in the intended order, nothing is on the stack, and no kernel has more instructions or registers than when this was
//! written.
//!
//! The trials report as ignored if there is no compiler or no assembler.

use gin_build::{Arch, Assembly, Built, KernelBuilder, Ptxas, Report, Toolchain};
use libtest_mimic::{Arguments, Completion, Failed, Trial};
use std::path::Path;
use std::sync::OnceLock;

const HERE: &str = env!("CARGO_MANIFEST_DIR");

/// A kernel, and the accesses of its path without waits and errors, in this order among others.
struct Probe {
    kernel: &'static str,
    order: &'static [&'static str],
    /// Payload is stored weakly. The release before the signal covers it.
    stores_payload: bool,
}

const RELEASE: &str = "MEMBAR.ALL.SYS";
const ACQUIRE: &str = "CCTL.IVALL";
const CLAIM: &str = "ATOMG.E.ADD.64.STRONG.GPU";
const RAISE: &str = "REDG.E.ADD.64.STRONG.SYS";
/// A store of a barrier's epoch at a peer.
const EPOCH: &str = "STG.E.64.STRONG.SYS";
/// A load of a word in host memory, or of one that a peer raises.
const POLL: &str = "LDG.E.64.STRONG.SYS";
/// A call: of the function that polls a word in host memory, if no other precedes it.
const CALL: &str = "CALL.REL.NOINC";
/// A store of a quarter of a descriptor.
const FILL: &str = "STG.E.128.STRONG.SYS";

/// The accesses of a put: release the payload, claim a slot, fill it.
const POST: &[&str] = &[RELEASE, CLAIM, FILL, FILL, FILL, FILL];

const PROBES: [Probe; 6] = [
    Probe { kernel: "probe_put_signal", order: POST, stores_payload: false },
    Probe { kernel: "probe_put_value", order: POST, stores_payload: false },
    Probe { kernel: "probe_flush", order: &[CALL, ACQUIRE, POLL], stores_payload: false },
    Probe { kernel: "probe_wait_signal", order: &[POLL, ACQUIRE], stores_payload: false },
    Probe {
        kernel: "probe_lsa_put_signal",
        // Weak: the caller has acquired its own memory.
        order: &["LDG.E.128", "STG.E.128", RELEASE, RAISE],
        stores_payload: true,
    },
    Probe { kernel: "probe_lsa_barrier", order: &[RELEASE, EPOCH, POLL, ACQUIRE], stores_payload: false },
];

fn built() -> Result<&'static Built, Failed> {
    static BUILT: OnceLock<Result<Built, String>> = OnceLock::new();
    let build = || {
        let builder = KernelBuilder::new(HERE).arch(Arch::Sm90);
        let builder = builder.target_dir_of_build_scripts(env!("CARGO_TARGET_TMPDIR"));
        builder.build().map_err(|error| error.to_string())
    };
    Ok(BUILT.get_or_init(build).as_ref()?)
}

/// Returns the operation of an instruction, without its predicate.
fn operation(instruction: &str) -> &str {
    instruction.split_whitespace().find(|word| !word.starts_with('@')).unwrap_or_default()
}

/// The size of a kernel for sm_90.
struct Size {
    kernel: &'static str,
    /// Largest number of instructions of the kernel itself. The rest is in functions, which a kernel has once.
    inlined: usize,
    /// Largest number of instructions of both.
    all: usize,
    /// Largest number of registers.
    registers: u32,
}

/// The figures of 2026-11-23 by ptxas 13.0, and a few more.
const SIZES: [Size; 12] = [
    Size { kernel: "ring", inlined: 2500, all: 3050, registers: 136 },
    Size { kernel: "halo", inlined: 2000, all: 2460, registers: 104 },
    Size { kernel: "alltoall", inlined: 1760, all: 2230, registers: 112 },
    Size { kernel: "probe_put_signal", inlined: 232, all: 470, registers: 40 },
    Size { kernel: "probe_put_report", inlined: 290, all: 670, registers: 48 },
    Size { kernel: "probe_put_value", inlined: 220, all: 460, registers: 40 },
    Size { kernel: "probe_flush", inlined: 150, all: 430, registers: 32 },
    Size { kernel: "probe_wait_signal", inlined: 210, all: 480, registers: 48 },
    Size { kernel: "probe_gdaki_put_signal", inlined: 545, all: 1390, registers: 96 },
    Size { kernel: "probe_gdaki_put_value", inlined: 400, all: 1245, registers: 64 },
    Size { kernel: "probe_gdaki_flush", inlined: 860, all: 1565, registers: 88 },
    Size { kernel: "probe_lsa_barrier", inlined: 1030, all: 1230, registers: 96 },
];

fn measure(size: &Size) -> Result<Completion, Failed> {
    let report = report()?;
    let entry = report.entry(size.kernel).ok_or_else(|| format!("no kernel {}", size.kernel))?;
    let code = report.code(size.kernel)?;
    let (inlined, all) = (code.inlined.len(), code.inlined.len() + code.called.len());
    let mut wrong = Vec::new();
    if (entry.stack, entry.spill_stores, entry.spill_loads) != (0, 0, 0) {
        wrong.push(format!("{} bytes of stack, {} of them spilled", entry.stack, entry.spill_stores));
    }
    for (what, found, most) in [
        ("instructions inlined", inlined, size.inlined),
        ("instructions", all, size.all),
        ("registers", entry.registers as usize, size.registers as usize),
    ] {
        if found > most {
            wrong.push(format!("{found} {what}, at most {most} are allowed"));
        }
    }
    if wrong.is_empty() { Ok(Completion::Completed) } else { Err(wrong.join("\n").into()) }
}

/// Returns the faults in the accesses of a kernel.
fn wrong(operations: &[&str], probe: &Probe) -> Vec<String> {
    let mut wrong = Vec::new();
    for operation in operations {
        let kind = operation.split('.').next().unwrap_or_default();
        let strong = operation.contains(".STRONG.GPU") || operation.contains(".STRONG.SYS");
        match kind {
            "ATOM" | "ATOMG" | "RED" | "REDG" if !strong => {
                wrong.push(format!("{operation} has no scope that peers share"))
            }
            "ST" | "STG" if !strong && !probe.stores_payload => wrong.push(format!("{operation} is a weak store")),
            "LD" | "LDG" if operation.contains("CONSTANT") => wrong.push(format!("{operation} never sees changes")),
            "LDL" | "STL" => wrong.push(format!("{operation} is on the stack")),
            _ => {}
        }
    }
    let mut left = operations.iter();
    for step in probe.order {
        if !left.any(|operation| operation == step) {
            wrong.push(format!("{step} does not follow in {:?}", probe.order));
        }
    }
    wrong
}

fn report() -> Result<&'static Report, Failed> {
    match &built()?.modules[0].assembly {
        Assembly::Done(report) => Ok(report),
        Assembly::NotTried(reason) => Err(format!("not assembled: {reason}").into()),
    }
}

fn look(probe: &Probe) -> Result<Completion, Failed> {
    let code = report()?.code(probe.kernel)?;
    let operations: Vec<&str> =
        code.inlined.iter().chain(&code.called).map(|instruction| operation(instruction)).collect();
    let wrong = wrong(&operations, probe);
    if wrong.is_empty() { Ok(Completion::Completed) } else { Err(wrong.join("\n").into()) }
}

/// Checks that each rule finds code that breaks it.
fn rules() -> Result<Completion, Failed> {
    let right = ["MEMBAR.ALL.SYS", "LDG.E.64", CLAIM, FILL, FILL, "LDC.64", FILL, FILL, "EXIT"];
    let probe = Probe { kernel: "", order: POST, stores_payload: false };
    if !wrong(&right, &probe).is_empty() {
        return Err("correct code is reported as wrong".into());
    }
    for (index, other) in [
        (0, "MEMBAR.ALL.GPU"),
        (1, "LDG.E.64.CONSTANT"),
        (2, "ATOMG.E.ADD.64.STRONG.SM"),
        (3, "STG.E.128"),
        (4, "STG.E.128.STRONG.GPU"),
        (5, "LDL.64"),
        (8, "REDG.E.ADD.64"),
    ] {
        let mut code = right;
        code[index] = other;
        if wrong(&code, &probe).is_empty() {
            return Err(format!("{other} passes").into());
        }
    }
    Ok(Completion::Completed)
}

fn main() {
    let missing = Toolchain::find()
        .map_err(|error| error.to_string().replace('\n', " "))
        .err()
        .or_else(|| Ptxas::find(Path::new(HERE)).err());
    let trial = |name: String, test: Box<dyn FnOnce() -> Result<Completion, Failed> + Send>| {
        let missing = missing.clone();
        Trial::ignorable_test(name, move || match missing {
            Some(reason) => Ok(Completion::ignored_with(reason)),
            None => test(),
        })
    };
    let mut trials: Vec<Trial> = Vec::new();
    for probe in &PROBES {
        let name = format!("accesses_have_their_scope_and_order::{}", probe.kernel);
        trials.push(trial(name, Box::new(|| look(probe))));
    }
    for size in &SIZES {
        let name = format!("a_kernel_is_no_larger_than_it_was::{}", size.kernel);
        trials.push(trial(name, Box::new(|| measure(size))));
    }
    trials.push(Trial::ignorable_test("each_rule_finds_what_breaks_it", rules));
    libtest_mimic::run(&Arguments::from_args(), trials).exit();
}
