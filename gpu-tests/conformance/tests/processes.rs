// SPDX-License-Identifier: MIT OR Apache-2.0
//! The conformance suite on virtual GPUs with each rank in its own process: 2, 3 and 4 processes.
//!
//! With 2 and 3 processes, scenarios that need more are skipped; 4 suffice for all. The tests of GPUs run 2 and 3
//! processes on one GPU in the same ways. `GIN_ROTATION=n` runs a third ([`in_rotation`]).

use gin_conformance::cases;
use gin_conformance::host::{Net, Setup, SetupBackend, SetupRoute, SetupWindows};
use gin_conformance::processes::{Group, Processes, Verdict};
use gin_conformance::serve::serve;
use gin_testkit::in_rotation;
use libtest_mimic::{Arguments, Completion, Trial};
use std::collections::BTreeMap;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

/// Time limit of a case. A case that does not hang takes far less.
const LIMIT: Duration = Duration::from_secs(120);

/// Number of processes, name of a way to run the suite, and its network, route and windows.
const WAYS: [(u32, &str, Net, SetupRoute, SetupWindows); 7] = [
    (2, "plain", Net::Plain, SetupRoute::Network, SetupWindows::Allocated),
    (2, "lsa", Net::Plain, SetupRoute::Lsa, SetupWindows::Registered),
    (3, "plain", Net::Plain, SetupRoute::Network, SetupWindows::Allocated),
    (3, "lsa", Net::Plain, SetupRoute::Lsa, SetupWindows::Allocated),
    (4, "auto", Net::Plain, SetupRoute::Auto, SetupWindows::Registered),
    (4, "lsa", Net::Plain, SetupRoute::Lsa, SetupWindows::Allocated),
    (4, "reorder", Net::Reorder, SetupRoute::Network, SetupWindows::Registered),
];

/// Returns the setup of a way by its name, which begins with the number of processes.
fn setup(way: &str, processes: Processes) -> Option<Setup> {
    let named = |(ranks, name, ..): &&(u32, &str, Net, SetupRoute, SetupWindows)| format!("{ranks}_{name}") == way;
    let &(_, _, net, route, windows) = WAYS.iter().find(named)?;
    Some(Setup { net, route, windows, processes: Some(processes), ..Setup::threads() })
}

fn main() -> ExitCode {
    if let Some(code) = serve(setup) {
        return code;
    }
    let mut trials = Vec::new();
    let mut groups = BTreeMap::new();
    for (index, (ranks, name, _, route, _)) in WAYS.into_iter().enumerate() {
        let group = groups.entry(ranks).or_insert_with(|| Arc::new(Group::new(ranks, LIMIT)));
        let way = format!("{ranks}_{name}");
        for (number, case) in cases::for_setup(SetupBackend::Proxy, route).into_iter().enumerate() {
            if !in_rotation(index, number) {
                continue;
            }
            let (group, way) = (group.clone(), way.clone());
            trials.push(Trial::ignorable_test(format!("processes/{way}/{}", case.name), move || {
                match group.run(&way, case.name.as_ref()) {
                    Verdict::Passed => Ok(Completion::Completed),
                    Verdict::Skipped(reason) => Ok(Completion::ignored_with(reason)),
                    Verdict::Failed(text) => Err(text.into()),
                }
            }));
        }
    }
    let mut arguments = Arguments::from_args();
    // Each case already has one process per rank.
    arguments.test_threads.get_or_insert(1);
    libtest_mimic::run(&arguments, trials).exit_code()
}
