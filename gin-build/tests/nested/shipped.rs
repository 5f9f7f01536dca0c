// SPDX-License-Identifier: MIT OR Apache-2.0

//! Checks of the PTX that this project ships.

use std::path::Path;
use std::sync::OnceLock;

use gin_build::{Arch, Built, Limits, Module, check};
use libtest_mimic::{Failed, Trial};

use crate::support::{self, builder, ensure, needs_compiler, needs_ptxas};

const ARCHS: [Arch; 3] = [Arch::Sm80, Arch::Sm90, Arch::Sm100];
/// Largest text of all shipped kernels together, for one architecture.
const MAX_BYTES: usize = 512 << 10;

pub(crate) fn trials() -> Vec<Trial> {
    let mut trials = Vec::new();
    for arch in ARCHS {
        trials.push(needs_compiler(format!("the_shipped_kernels_keep_the_rules_of_device_code::{arch}"), move || {
            let findings = check(&shipped(arch)?.text, &Limits::default().max_bytes(MAX_BYTES));
            let lines: Vec<String> = findings.iter().map(ToString::to_string).collect();
            ensure(lines.is_empty(), lines.join("\n"))
        }));
        trials.push(needs_ptxas(format!("the_probe_kernels_have_neither_stack_nor_spills::{arch}"), move || {
            let module = shipped(arch)?;
            let report = module.assembly.report().ok_or_else(|| format!("{:?}", module.assembly))?;
            let probes: Vec<_> = report.entries.iter().filter(|entry| entry.name.starts_with("probe_")).collect();
            ensure(!probes.is_empty(), "there are no probe kernels".to_owned())?;
            for probe in probes {
                ensure(probe.stack + probe.spill_stores + probe.spill_loads == 0, format!("{probe:?}"))?;
            }
            Ok(())
        }));
    }
    trials
}

fn shipped(arch: Arch) -> Result<&'static Module, Failed> {
    static BUILT: OnceLock<Result<Built, String>> = OnceLock::new();
    let build = || {
        let kernels = Path::new(support::HERE).join("../gin-kernels");
        builder(&kernels).archs(ARCHS).build().map_err(|error| error.to_string())
    };
    let built = BUILT.get_or_init(build).as_ref()?;
    built.module(arch).ok_or_else(|| format!("there is no module for {arch}").into())
}
