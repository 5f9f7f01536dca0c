// SPDX-License-Identifier: MIT OR Apache-2.0
//! The machine code of the probe kernels. Memory that peers, CPUs and other blocks see is accessed at the intended
//! scope and in the intended order, and nothing is on the stack.
//!
//! The trials report as ignored if there is no compiler or no assembler.

use gin_build::{Arch, Assembly, Built, KernelBuilder, Ptxas, Toolchain};
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
const RAISE: &str = "ATOMG.E.ADD.64.STRONG.SYS";
/// The same operation without a result.
const RAISE_ONLY: &str = "REDG.E.ADD.64.STRONG.SYS";
/// A load of a word in host memory, or of one that a peer raises.
const POLL: &str = "LDG.E.64.STRONG.SYS";
/// A store of a quarter of a descriptor.
const FILL: &str = "STG.E.128.STRONG.SYS";

/// The accesses of a put: release the payload, claim a slot, fill it.
const POST: &[&str] = &[RELEASE, CLAIM, FILL, FILL, FILL, FILL];

const PROBES: [Probe; 6] = [
    Probe { kernel: "probe_put_signal", order: POST, stores_payload: false },
    Probe { kernel: "probe_put_value", order: POST, stores_payload: false },
    Probe { kernel: "probe_flush", order: &[POLL, ACQUIRE], stores_payload: false },
    Probe { kernel: "probe_wait_signal", order: &[POLL, ACQUIRE], stores_payload: false },
    Probe {
        kernel: "probe_lsa_put_signal",
        order: &["LDG.E.128.STRONG.SYS", "STG.E.128", RELEASE, RAISE_ONLY],
        stores_payload: true,
    },
    Probe { kernel: "probe_lsa_barrier", order: &[RELEASE, RAISE, POLL, ACQUIRE], stores_payload: false },
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

fn look(probe: &Probe) -> Result<Completion, Failed> {
    let report = match &built()?.modules[0].assembly {
        Assembly::Done(report) => report,
        Assembly::NotTried(reason) => return Err(format!("not assembled: {reason}").into()),
    };
    let entry = report.entry(probe.kernel).ok_or_else(|| format!("no kernel {}", probe.kernel))?;
    let instructions = report.instructions(probe.kernel)?;
    let operations: Vec<&str> = instructions.iter().map(|instruction| operation(instruction)).collect();
    let mut wrong = wrong(&operations, probe);
    if (entry.stack, entry.spill_stores, entry.spill_loads) != (0, 0, 0) {
        wrong.push(format!("{} bytes of stack, {} of them spilled", entry.stack, entry.spill_stores));
    }
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
    let mut trials: Vec<Trial> = PROBES
        .iter()
        .map(|probe| {
            let missing = missing.clone();
            Trial::ignorable_test(format!("accesses_have_their_scope_and_order::{}", probe.kernel), move || {
                match missing {
                    Some(reason) => Ok(Completion::ignored_with(reason)),
                    None => look(probe),
                }
            })
        })
        .collect();
    trials.push(Trial::ignorable_test("each_rule_finds_what_breaks_it", rules));
    libtest_mimic::run(&Arguments::from_args(), trials).exit();
}
