// SPDX-License-Identifier: MIT OR Apache-2.0
//! The conformance suite notices mistakes. For each mistake that gin can make on purpose, some case must fail, for the
//! right reason. A run that only makes no progress proves little, so it does not count.
//!
//! There is one trial for each mistake. It runs the cases that must notice it, and prints the ones that did.

use gin_conformance::host::{Net, Setup, SetupBackend};
use gin_conformance::saboteurs::{self, Saboteur, Tally};
use libtest_mimic::{Arguments, Failed, Trial};

/// Ends a run that hangs early. Without a mistake, a rank that pauses for 5 ms lets up to 350,000 choices pass.
const STALL_STEPS: u64 = 700_000;

fn setups() -> [Setup; 2] {
    [(1, Net::Plain), (2, Net::Delay { ns: 20_000 })].map(|(seed, net)| Setup {
        net,
        stall_steps: STALL_STEPS,
        ..Setup::seeded(seed)
    })
}

/// Runs the cases that must catch a mistake, with it and without.
fn prove(saboteur: &Saboteur, backend: SetupBackend) -> Result<(), Failed> {
    let mut tally = Tally::default();
    for setup in setups() {
        let setup = Setup { backend, ..setup };
        for case in saboteur.cases() {
            saboteur.run(&case, &setup, &mut tally);
            case.judge(&setup).map_err(|error| format!("{} without a mistake: {error}", case.name))?;
        }
    }
    println!("{}", saboteur.verdict(tally)?);
    Ok(())
}

fn main() {
    let lists = [(SetupBackend::Proxy, saboteurs::all()), (SetupBackend::Gdaki, saboteurs::of_nics())];
    let trials = lists.into_iter().flat_map(|(backend, list)| {
        list.into_iter().map(move |saboteur| {
            Trial::test(format!("the_suite_notices/{}", saboteur.name), move || prove(&saboteur, backend))
        })
    });
    libtest_mimic::run(&Arguments::from_args(), trials.collect()).exit();
}
