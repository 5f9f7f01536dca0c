// SPDX-License-Identifier: MIT OR Apache-2.0

//! The kernels, linked with NCCL's device functions: their instructions and registers. `make nccl-device` fetches what
//! the link needs.

use gin_build::{Arch, BuildError, Built, KernelBuilder, Rule, UsePtxas};
use libtest_mimic::{Arguments, Completion, Failed, Trial};
use std::sync::Arc;

type Outcome = Result<Completion, Failed>;

fn main() {
    let arguments = Arguments::from_args();
    // The build takes seconds.
    let built = if arguments.list { Err("not built for a list".to_owned()) } else { build() };
    let built = Arc::new(built);
    let trial = |name: &str, test: fn(&Built) -> Outcome| {
        let built = built.clone();
        Trial::ignorable_test(name, move || match &*built {
            Ok(built) => test(built),
            Err(reason) => Ok(Completion::ignored_with(reason.clone())),
        })
    };
    let trials = vec![
        trial("no_call_stack_or_spill_is_left", nothing_is_left),
        trial("puts_and_gets_over_the_proxy_are_nccls_own_instructions", posts_of_nccl),
        trial("the_module_has_the_versions", versions),
    ];
    libtest_mimic::run(&arguments, trials).exit();
}

/// Builds the kernels, or returns what this machine lacks.
fn build() -> Result<Built, String> {
    let builder = KernelBuilder::new(env!("CARGO_MANIFEST_DIR")).features(["nccl"]).arch(Arch::Sm90).nccl(true);
    let builder = builder.ptxas(UsePtxas::Required).target_dir_of_build_scripts(env!("CARGO_TARGET_TMPDIR"));
    match builder.build() {
        Ok(built) => Ok(built),
        Err(error @ (BuildError::Nccl { .. } | BuildError::NoPtxas { .. } | BuildError::NoCompiler { .. })) => {
            Err(error.to_string().replace('\n', " "))
        }
        Err(error) => panic!("{error}"),
    }
}

fn nothing_is_left(built: &Built) -> Outcome {
    let module = &built.modules[0];
    let findings = module.findings.iter().filter(|finding| finding.rule != Rule::Size);
    let findings: Vec<String> = findings.map(ToString::to_string).collect();
    if !findings.is_empty() {
        return Err(findings.join("\n").into());
    }
    let report = module.assembly.report().ok_or("not assembled")?;
    // Measured with rustc 1.96.0 and ptxas 13.0.88: 48, 44, 30, 44, 127, 112. NCCL's C++ by nvcc 13.0: 48, 48, 16.
    let limits = [
        ("probe_put_signal", 56),
        ("probe_put_signal_gdaki", 56),
        ("probe_wait_signal", 40),
        ("probe_get", 64),
        ("ring", 128),
        ("all_to_all", 128),
        ("signal_and_back", 64),
        ("put_and_back", 96),
        ("puts_then_answer", 96),
    ];
    for (name, registers) in limits {
        let entry = report.entry(name).ok_or_else(|| format!("no kernel {name}"))?;
        if entry.registers > registers {
            return Err(format!("{name} takes {} registers, more than {registers}", entry.registers).into());
        }
    }
    // LLVM makes a trap of a call whose function it takes for undefined.
    for name in ["probe_put_signal", "probe_put_signal_gdaki", "probe_wait_signal", "probe_get", "probe_all"] {
        if kernel(built, name).contains("\ttrap;") {
            return Err(format!("{name} has a trap").into());
        }
    }
    // NCCL's get keeps a word of an atomic maximum on the stack.
    let stack = |name: &str| if matches!(name, "probe_get" | "fetch") { 8 } else { 0 };
    let bad = report
        .entries
        .iter()
        .find(|entry| entry.stack > stack(&entry.name) || entry.spill_stores + entry.spill_loads > 0);
    bad.map_or(Ok(Completion::Completed), |entry| Err(format!("{entry:?}").into()))
}

/// Returns the text of a kernel.
fn kernel<'a>(built: &'a Built, name: &str) -> &'a str {
    let text = &built.modules[0].text;
    let start = text.find(&format!(".entry {name}(")).expect("the kernel exists");
    let end = text[start..].find("\n}").map_or(text.len(), |end| start + end);
    &text[start..end]
}

fn posts_of_nccl(built: &Built) -> Outcome {
    let (claim, store) = (("atom.add.relaxed.sys.u32", 1), ("st.global.wt.v4.u32", 8));
    // A put of more than 1 GiB is posted in parts by a loop, so the code has two posts.
    let put = [claim, store, ("fence.acq_rel.sys", 1)];
    // NCCL counts the last get of each peer for `flush`, which asks the network for it.
    let get = [claim, store, ("fence.release.sys", 1), ("atom.cas.release.gpu.b32", 1)];
    for (name, parts) in [("probe_put_signal", &put[..]), ("probe_get", &get)] {
        let text = kernel(built, name);
        for &(part, least) in parts {
            let count = text.matches(part).count();
            if count < least {
                return Err(format!("{name}: {count} of {part}, expected {least}").into());
            }
        }
    }
    Ok(Completion::Completed)
}

fn versions(built: &Built) -> Outcome {
    let text = &built.modules[0].text;
    for variable in ["gin_nccl_version = 23007", "gin_nccl_layout[4] = {1}", "gin_abi_version["] {
        if !text.lines().any(|line| line.starts_with(".visible .global") && line.contains(variable)) {
            return Err(format!("no {variable}").into());
        }
    }
    Ok(Completion::Completed)
}
