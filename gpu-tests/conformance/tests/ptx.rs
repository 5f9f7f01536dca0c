// SPDX-License-Identifier: MIT OR Apache-2.0
//! The suite's kernels compile to PTX that keeps the rules of device code and, with `GIN_ALL_WAYS` set, that `ptxas`
//! accepts, which takes a minute.
//!
//! Trials are reported as ignored if there is no compiler for PTX.

use gin_build::{Arch, Assembly, Built, KernelBuilder, Limits, Ptxas, Toolchain, UsePtxas, check};
use gin_conformance::host::SetupBackend;
use gin_conformance::scenario::CoopKind;
use libtest_mimic::{Arguments, Completion, Failed, Trial};
use std::path::Path;
use std::sync::OnceLock;

/// Size limit of the text: each kernel contains every operation.
const MAX_BYTES: usize = 8 << 20;

/// The variable that also has `ptxas` assemble the kernels.
const ALL: &str = "GIN_ALL_WAYS";

const HERE: &str = env!("CARGO_MANIFEST_DIR");

fn built() -> Result<&'static Built, Failed> {
    static BUILT: OnceLock<Result<Built, String>> = OnceLock::new();
    let build = || {
        let ptxas = if std::env::var_os(ALL).is_some() { UsePtxas::IfFound } else { UsePtxas::No };
        let builder = KernelBuilder::new(HERE).arch(Arch::Sm90).ptxas(ptxas);
        let builder = builder.target_dir_of_build_scripts(env!("CARGO_TARGET_TMPDIR"));
        builder.build().map_err(|error| error.to_string())
    };
    Ok(BUILT.get_or_init(build).as_ref()?)
}

fn rules() -> Result<Completion, Failed> {
    let module = &built()?.modules[0];
    let mut kernels = CoopKind::ALL.iter().map(|coop| coop.kernel(SetupBackend::Proxy));
    let missing = kernels.find(|kernel| !module.text.contains(&format!(".entry {kernel}(")));
    if let Some(kernel) = missing {
        return Err(format!("the module has no kernel {kernel}").into());
    }
    let findings = check(&module.text, &Limits::default().max_bytes(MAX_BYTES));
    let lines: Vec<String> = findings.iter().take(20).map(ToString::to_string).collect();
    if lines.is_empty() { Ok(Completion::Completed) } else { Err(lines.join("\n").into()) }
}

/// Lanes that post to the proxy with a deadline and lanes that post without one gather at separate places: the compiler
/// keeps both. To a NIC, lanes with a deadline post alone.
fn gathered() -> Result<Completion, Failed> {
    let text = &built()?.modules[0].text;
    // By back end, the proxy first: sites without a deadline and with one.
    let gathers = [[0, 1], [2, 3]].map(|sites| {
        sites.map(|site| {
            let ends = format!("// {site}");
            text.lines().filter(|line| line.contains("activemask.b32") && line.trim_end().ends_with(&ends)).count()
        })
    });
    let [proxy, gdaki] = gathers;
    let apart = proxy[0] > 0 && proxy[0] == proxy[1] && gdaki[0] > 0 && gdaki[1] == 0;
    if !apart || text.matches("activemask.b32").count() != gathers.as_flattened().iter().sum::<usize>() {
        return Err(format!("sites that gather lanes without and with a deadline, by back end: {gathers:?}").into());
    }
    Ok(Completion::Completed)
}

fn assembled() -> Result<Completion, Failed> {
    match &built()?.modules[0].assembly {
        Assembly::Done(report) if report.entries.len() == CoopKind::ALL.len() => Ok(Completion::Completed),
        Assembly::Done(report) => Err(format!("ptxas assembled {} kernels", report.entries.len()).into()),
        Assembly::NotTried(reason) => Err(format!("not assembled: {reason}").into()),
    }
}

fn main() {
    let compiler = Toolchain::find().map_err(|error| error.to_string().replace('\n', " "));
    let asked = std::env::var_os(ALL).map(drop).ok_or_else(|| format!("takes a minute; set {ALL}=1"));
    let ptxas = asked.and_then(|()| Ptxas::find(Path::new(HERE)));
    let trial = |name: &str, missing: Option<String>, run: fn() -> Result<Completion, Failed>| {
        Trial::ignorable_test(name, move || match missing {
            Some(reason) => Ok(Completion::ignored_with(reason)),
            None => run(),
        })
    };
    let trials = vec![
        trial("the_kernels_of_the_suite_keep_the_rules_of_device_code::sm_90", compiler.clone().err(), rules),
        trial("lanes_with_and_without_a_deadline_gather_apart::sm_90", compiler.clone().err(), gathered),
        trial("ptxas_takes_the_kernels_of_the_suite::sm_90", compiler.err().or(ptxas.err()), assembled),
    ];
    libtest_mimic::run(&Arguments::from_args(), trials).exit();
}
