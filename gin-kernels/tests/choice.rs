// SPDX-License-Identifier: MIT OR Apache-2.0
//! The registers that a choice of the back end at run time costs: the workloads as they ship beside the same with the
//! proxy alone and with GDAKI alone.
//!
//! The trials report as ignored if there is no compiler or no assembler.

use gin_build::{Arch, Assembly, KernelBuilder, Ptxas, Toolchain};
use libtest_mimic::{Arguments, Completion, Failed, Trial};
use std::path::Path;
use std::sync::OnceLock;

const HERE: &str = env!("CARGO_MANIFEST_DIR");

const WORKLOADS: [&str; 3] = ["ring", "halo", "alltoall"];

/// The features of the kernels as they ship, with the proxy alone, and with GDAKI alone.
const FORMS: [&[&str]; 3] = [&["gdaki-any"], &[], &["gdaki-alone"]];

/// Maximum number of registers that a choice may cost over the larger single back end.
const MAX_MORE: u32 = 20;

/// Returns the registers of the workloads in one form.
fn registers(features: &[&str]) -> Result<[u32; 3], String> {
    let builder = KernelBuilder::new(HERE).arch(Arch::Sm90).features(features.iter().copied());
    let built = builder.target_dir_of_build_scripts(env!("CARGO_TARGET_TMPDIR")).build();
    let built = built.map_err(|error| error.to_string())?;
    let report = match &built.modules[0].assembly {
        Assembly::Done(report) => report,
        Assembly::NotTried(reason) => return Err(format!("not assembled: {reason}")),
    };
    let mut found = [0; 3];
    for (found, kernel) in found.iter_mut().zip(WORKLOADS) {
        *found = report.entry(kernel).ok_or_else(|| format!("no kernel {kernel}"))?.registers;
    }
    Ok(found)
}

fn compare(workload: usize) -> Result<Completion, Failed> {
    static FOUND: OnceLock<Result<Vec<[u32; 3]>, String>> = OnceLock::new();
    let found = FOUND.get_or_init(|| FORMS.into_iter().map(registers).collect()).as_ref()?;
    let [shipped, proxy, gdaki] = [0, 1, 2].map(|form: usize| found[form][workload]);
    if shipped <= proxy.max(gdaki) + MAX_MORE {
        println!("{}: {shipped} registers, proxy alone {proxy}, GDAKI alone {gdaki}", WORKLOADS[workload]);
        Ok(Completion::Completed)
    } else {
        let max = format!("at most {MAX_MORE} more than the larger one are allowed");
        Err(format!("{shipped} registers, proxy alone {proxy}, GDAKI alone {gdaki}; {max}").into())
    }
}

fn main() {
    let missing = Toolchain::find()
        .map_err(|error| error.to_string().replace('\n', " "))
        .err()
        .or_else(|| Ptxas::find(Path::new(HERE)).err());
    let trials = WORKLOADS.iter().enumerate().map(|(workload, kernel)| {
        let missing = missing.clone();
        Trial::ignorable_test(format!("a_choice_costs_at_most_20_registers::{kernel}"), move || match missing {
            Some(reason) => Ok(Completion::ignored_with(reason)),
            None => compare(workload),
        })
    });
    libtest_mimic::run(&Arguments::from_args(), trials.collect()).exit();
}
