// SPDX-License-Identifier: MIT OR Apache-2.0

//! Checks of the PTX that this project ships.

use std::path::Path;
use std::sync::OnceLock;

use gin_build::{Arch, Built, Limits, Module, check};
use libtest_mimic::{Failed, Trial};

use crate::support::{self, archs, builder, ensure, needs_compiler, needs_ptxas};

/// Largest total text of a crate's kernels, in bytes, for one architecture.
const MAX_BYTES: usize = 5 << 18;

/// Folders of the crates that the command embeds.
const CRATES: [&str; 2] = ["gin-kernels", "bench/kernels"];

pub(crate) fn trials() -> Vec<Trial> {
    let mut trials = Vec::new();
    for arch in archs() {
        for folder in CRATES {
            let name =
                format!("the_kernels_of_{}_keep_the_rules_of_device_code::{arch}", folder.replace(['-', '/'], "_"));
            trials.push(needs_compiler(name, move || {
                let findings = check(&shipped(folder, arch)?.text, &Limits::default().max_bytes(MAX_BYTES));
                let lines: Vec<String> = findings.iter().map(ToString::to_string).collect();
                ensure(lines.is_empty(), lines.join("\n"))
            }));
        }
        trials.push(needs_ptxas(format!("the_probe_kernels_have_neither_stack_nor_spills::{arch}"), move || {
            let module = shipped(CRATES[0], arch)?;
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

fn shipped(folder: &str, arch: Arch) -> Result<&'static Module, Failed> {
    static BUILT: [OnceLock<Result<Built, String>>; CRATES.len()] = [const { OnceLock::new() }; CRATES.len()];
    let build = || {
        let kernels = Path::new(support::HERE).join("../..").join(folder);
        builder(&kernels).archs(archs()).build().map_err(|error| error.to_string())
    };
    let index = CRATES.iter().position(|&known| known == folder).unwrap_or(0);
    let built = BUILT[index].get_or_init(build).as_ref()?;
    built.module(arch).ok_or_else(|| format!("no module for {arch}").into())
}
