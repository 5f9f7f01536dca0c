// SPDX-License-Identifier: MIT OR Apache-2.0
//! The machine code of the kernels. Memory that peers, CPUs and other blocks see is accessed at the intended scope and
//! in the intended order, nothing is on the stack, and no kernel has more instructions or registers than when this was
//! written.
//!
//! The trials report as ignored if there is no compiler or no assembler.

use gin_build::{Arch, Assembly, Built, Code, Disassembly, KernelBuilder, Ptxas, Report, Toolchain};
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
    // It stores values from the mailbox.
    Probe { kernel: "probe_wait_signal", order: &[POLL, ACQUIRE], stores_payload: true },
    Probe {
        kernel: "probe_lsa_put_signal",
        // Weak: the caller has acquired its own memory.
        order: &["LDG.E.128", "STG.E.128", RELEASE, RAISE],
        stores_payload: true,
    },
    Probe { kernel: "probe_lsa_barrier", order: &[RELEASE, EPOCH, POLL, ACQUIRE], stores_payload: false },
];

/// A kernel of primitives: its operations, each with its number, and kinds of operations that it must not have.
///
/// The assembler puts one `BRA` behind the end of each kernel.
struct Primitives {
    kernel: &'static str,
    has: &'static [(&'static str, usize)],
    lacks: &'static [&'static str],
}

/// Accesses that find out at run time which memory they are for, or that are to other memory than shared memory.
const NOT_SHARED: &[&str] = &["LD", "ST", "ATOM", "ATOMG", "RED", "REDG", "LDL", "STL"];

/// Instructions of code that parts the lanes of a warp, or that gathers them for a mask.
const DIVERGENT: &[&str] = &["WARPSYNC", "BSSY", "BSYNC", "BREAK", "BRX", "CALL", "LDL", "STL"];

const PRIMITIVES: [Primitives; 7] = [
    Primitives {
        kernel: "probe_shared_access",
        has: &[
            ("STS.U8", 1),
            ("STS.U16", 1),
            ("STS", 2),
            ("STS.64", 1),
            ("STS.128", 1),
            ("LDS.U8", 1),
            ("LDS.U16", 1),
            ("LDS", 2),
            ("LDS.64", 1),
            ("LDS.128", 1),
        ],
        lacks: NOT_SHARED,
    },
    Primitives {
        kernel: "probe_shared_atomics",
        has: &[
            ("ATOMS.ADD", 1),
            ("ATOMS.MIN", 1),
            ("ATOMS.MAX", 1),
            ("ATOMS.MIN.S32", 1),
            ("ATOMS.MAX.S32", 1),
            ("ATOMS.OR", 1),
            ("ATOMS.AND", 1),
            ("ATOMS.EXCH", 1),
            ("ATOMS.CAS", 1),
            ("ATOMS.EXCH.64", 1),
            ("ATOMS.CAS.64", 1),
            ("ATOMS.CAST.SPIN.64", 7),
        ],
        lacks: NOT_SHARED,
    },
    Primitives {
        kernel: "probe_warp",
        has: &[
            ("SHFL.IDX", 1),
            ("SHFL.UP", 1),
            ("SHFL.DOWN", 1),
            ("SHFL.BFLY", 1),
            ("VOTE.ANY", 2),
            ("VOTE.ALL", 1),
            ("MATCH.ANY", 1),
            ("MATCH.ALL", 1),
            ("REDUX.SUM.S32", 1),
            ("REDUX.MIN", 1),
            ("REDUX.MAX", 1),
            ("REDUX.MIN.S32", 1),
            ("REDUX.MAX.S32", 1),
            ("REDUX", 1),
            ("REDUX.OR", 1),
            ("REDUX.XOR", 1),
            ("BRA", 1),
        ],
        lacks: DIVERGENT,
    },
    Primitives {
        kernel: "probe_arrivals",
        has: &[
            ("LDG.E.CONSTANT", 1),
            ("LDG.E.128.CONSTANT", 1),
            ("STS", 1),
            ("BAR.ARV", 1),
            ("BAR.SYNC.DEFER_BLOCKING", 1),
            ("LDS", 1),
        ],
        lacks: NOT_SHARED,
    },
    Primitives {
        kernel: "probe_warp_wide",
        has: &[("SHFL.BFLY", 2), ("MATCH.ANY.U64", 1), ("MATCH.ALL.U64", 1), ("BRA", 1)],
        lacks: DIVERGENT,
    },
    Primitives {
        kernel: "probe_convert",
        has: &[
            ("F2FP.F16.F32.PACK_AB", 2),
            ("F2FP.BF16.F32.PACK_AB", 2),
            ("F2FP.SATFINITE.E4M3.F32.PACK_AB_MERGE_C", 2),
            ("F2FP.SATFINITE.E5M2.F32.PACK_AB_MERGE_C", 2),
            ("F2FP.F16.E4M3.UNPACK_B", 1),
            ("HADD2.F32", 3),
            ("BRA", 1),
        ],
        lacks: &["F2F", "CALL", "LDL", "STL", "BSSY"],
    },
    // The count of a byte is an atomic without a result.
    Primitives { kernel: "histogram", has: &[("ATOMS.POPC.INC.32", 4)], lacks: &["ATOM", "LDL", "STL"] },
];

/// Returns the faults in the operations of a kernel of primitives.
fn wrong_primitives(operations: &[&str], primitives: &Primitives) -> Vec<String> {
    let mut wrong = Vec::new();
    for (operation, expected) in primitives.has {
        let found = operations.iter().filter(|other| *other == operation).count();
        if found != *expected {
            wrong.push(format!("{operation} is there {found} times instead of {expected}"));
        }
    }
    for operation in operations {
        if primitives.lacks.contains(&operation.split('.').next().unwrap_or_default()) {
            wrong.push(format!("{operation} is there"));
        }
    }
    wrong
}

fn look_at_primitives(primitives: &Primitives) -> Result<Completion, Failed> {
    let code = code(false, primitives.kernel)?;
    let operations: Vec<&str> = code.inlined.iter().map(|instruction| operation(instruction)).collect();
    let wrong = wrong_primitives(&operations, primitives);
    if wrong.is_empty() {
        Ok(Completion::Completed)
    } else {
        Err(format!("{}\n{}", wrong.join("\n"), code.inlined.join("\n")).into())
    }
}

/// Returns the kernels with one back end, or as they ship, if they `choose` their back end at run time.
fn built(choose: bool) -> Result<&'static Built, Failed> {
    static BUILT: [OnceLock<Result<Built, String>>; 2] = [const { OnceLock::new() }; 2];
    let build = || {
        let builder = KernelBuilder::new(HERE).arch(Arch::Sm90);
        let builder = builder.target_dir_of_build_scripts(env!("CARGO_TARGET_TMPDIR"));
        let builder = if choose { builder.features(["gdaki-any"]) } else { builder };
        builder.build().map_err(|error| error.to_string())
    };
    Ok(BUILT[choose as usize].get_or_init(build).as_ref()?)
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

/// The figures of 2026-11-27 by ptxas 13.0, and a few more.
const SIZES: [Size; 18] = [
    Size { kernel: "ring", inlined: 2415, all: 3470, registers: 136 },
    Size { kernel: "halo", inlined: 1850, all: 2830, registers: 92 },
    Size { kernel: "alltoall", inlined: 1700, all: 2900, registers: 94 },
    Size { kernel: "moe_gate", inlined: 230, all: 335, registers: 36 },
    Size { kernel: "moe_experts", inlined: 275, all: 275, registers: 52 },
    Size { kernel: "histogram", inlined: 1140, all: 2105, registers: 68 },
    Size { kernel: "probe_shared_access", inlined: 84, all: 84, registers: 32 },
    Size { kernel: "probe_warp", inlined: 60, all: 60, registers: 16 },
    Size { kernel: "probe_convert", inlined: 68, all: 68, registers: 32 },
    Size { kernel: "probe_put_signal", inlined: 200, all: 430, registers: 44 },
    Size { kernel: "probe_put_report", inlined: 246, all: 610, registers: 44 },
    Size { kernel: "probe_put_value", inlined: 176, all: 406, registers: 48 },
    Size { kernel: "probe_flush", inlined: 126, all: 444, registers: 32 },
    Size { kernel: "probe_wait_signal", inlined: 247, all: 884, registers: 54 },
    Size { kernel: "probe_gdaki_put_signal", inlined: 362, all: 1115, registers: 48 },
    Size { kernel: "probe_gdaki_put_value", inlined: 250, all: 995, registers: 44 },
    Size { kernel: "probe_gdaki_flush", inlined: 745, all: 1380, registers: 68 },
    Size { kernel: "probe_lsa_barrier", inlined: 1030, all: 1220, registers: 80 },
];

/// The same for kernels that choose their back end at run time. By the larger single back end, GDAKI, the first three
/// have 148, 128 and 122 registers.
const CHOOSING_SIZES: [Size; 5] = [
    Size { kernel: "ring", inlined: 2660, all: 5350, registers: 164 },
    Size { kernel: "halo", inlined: 1990, all: 4740, registers: 128 },
    Size { kernel: "alltoall", inlined: 1850, all: 4970, registers: 142 },
    Size { kernel: "histogram", inlined: 1240, all: 3405, registers: 106 },
    Size { kernel: "probe_lsa_barrier", inlined: 1040, all: 1755, registers: 110 },
];

fn measure(size: &Size, choose: bool) -> Result<Completion, Failed> {
    let report = report(choose)?;
    let entry = report.entry(size.kernel).ok_or_else(|| format!("no kernel {}", size.kernel))?;
    let code = code(choose, size.kernel)?;
    let (inlined, all) = (code.inlined.len(), code.inlined.len() + code.called.len());
    let mut wrong = Vec::new();
    if (entry.stack, entry.spill_stores, entry.spill_loads) != (0, 0, 0) {
        wrong.push(format!("{} bytes of stack, {} of them spilled", entry.stack, entry.spill_stores));
    }
    for (what, found, max) in [
        ("instructions inlined", inlined, size.inlined),
        ("instructions", all, size.all),
        ("registers", entry.registers as usize, size.registers as usize),
    ] {
        if found > max {
            wrong.push(format!("{found} {what}, at most {max} are allowed"));
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

/// Returns the first branch that takes one lane's mask for the mask of all lanes that are here.
///
/// `BRA.DIV` asks whether the lanes of a mask in a uniform register are together. The assembler makes `R2UR UR4, R2` of
/// a mask that it takes for one value of all lanes. A mask of lanes that are here together differs where two groups
/// have met: for those the assembler makes `REDUX.OR UR4, R2` and a branch with a predicate.
fn mask_of_one_lane(code: &[String]) -> Option<&str> {
    let register = |word: &str| word.trim_end_matches(',').to_owned();
    let mut of_one_lane = std::collections::HashMap::new();
    code.iter().map(String::as_str).find(|instruction| {
        let words: Vec<&str> = instruction.split_whitespace().skip_while(|word| word.starts_with('@')).collect();
        let [operation, operand, ..] = words[..] else { return false };
        if operation == "BRA.DIV" {
            return !instruction.starts_with('@') && of_one_lane.get(&register(operand)) == Some(&true);
        }
        of_one_lane.insert(register(operand), operation == "R2UR");
        false
    })
}

fn look_at_masks(kernel: &str, choose: bool) -> Result<Completion, Failed> {
    let code = code(choose, kernel)?;
    match mask_of_one_lane(&code.inlined).or_else(|| mask_of_one_lane(&code.called)) {
        Some(branch) => Err(format!("{branch} takes one lane's mask for all").into()),
        None => Ok(Completion::Completed),
    }
}

fn report(choose: bool) -> Result<&'static Report, Failed> {
    match &built(choose)?.modules[0].assembly {
        Assembly::Done(report) => Ok(report),
        Assembly::NotTried(reason) => Err(format!("not assembled: {reason}").into()),
    }
}

/// Returns the machine code of a kernel. Each of the two modules is disassembled once.
fn code(choose: bool, kernel: &str) -> Result<Code, Failed> {
    static MODULES: [OnceLock<Result<Disassembly, String>>; 2] = [const { OnceLock::new() }; 2];
    let disassemble =
        || report(choose).map_err(|error| format!("{error:?}"))?.disassemble().map_err(|error| error.to_string());
    let module = MODULES[choose as usize].get_or_init(disassemble).as_ref()?;
    Ok(module.code(kernel)?)
}

fn look(probe: &Probe) -> Result<Completion, Failed> {
    let code = code(false, probe.kernel)?;
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
    let primitives = Primitives { kernel: "", has: &[("SHFL.UP", 1)], lacks: DIVERGENT };
    if !wrong_primitives(&["SHFL.UP", "VOTE.ANY"], &primitives).is_empty() {
        return Err("correct primitives are reported as wrong".into());
    }
    for code in [&["SHFL.IDX"][..], &["SHFL.UP", "SHFL.UP"], &["SHFL.UP", "WARPSYNC.ALL"], &[]] {
        if wrong_primitives(code, &primitives).is_empty() {
            return Err(format!("{code:?} passes").into());
        }
    }
    for (code, right) in [
        (["R2UR UR4, R2", "BRA.DIV UR4, `(.L_x_1)"], false),
        (["UMOV UR4, 0xffffffff", "BRA.DIV UR4, `(.L_x_1)"], true),
        (["REDUX.OR UR4, R2", "@!P0 BRA.DIV UR4, `(.L_x_1)"], true),
    ] {
        if mask_of_one_lane(&code.map(str::to_owned)).is_none() != right {
            return Err(format!("{code:?} is judged wrongly").into());
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
    for primitives in &PRIMITIVES {
        let name = format!("primitives_are_single_instructions::{}", primitives.kernel);
        trials.push(trial(name, Box::new(|| look_at_primitives(primitives))));
    }
    for size in &SIZES {
        let name = format!("a_kernel_is_no_larger_than_it_was::{}", size.kernel);
        trials.push(trial(name, Box::new(|| measure(size, false))));
        let name = format!("lanes_that_meet_keep_their_masks::{}", size.kernel);
        trials.push(trial(name, Box::new(|| look_at_masks(size.kernel, false))));
    }
    for size in &CHOOSING_SIZES {
        let name = format!("a_choice_of_the_back_end_costs_no_more_than_it_did::{}", size.kernel);
        trials.push(trial(name, Box::new(|| measure(size, true))));
        let name = format!("lanes_that_meet_keep_their_masks_in_a_choice::{}", size.kernel);
        trials.push(trial(name, Box::new(|| look_at_masks(size.kernel, true))));
    }
    trials.push(Trial::ignorable_test("each_rule_finds_what_breaks_it", rules));
    libtest_mimic::run(&Arguments::from_args(), trials).exit();
}
