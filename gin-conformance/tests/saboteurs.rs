// SPDX-License-Identifier: MIT OR Apache-2.0
//! The conformance suite notices mistakes. For each mistake that gin can make on purpose, some case must fail, for the
//! right reason. A run that only makes no progress proves little, so it does not count.
//!
//! There is one trial for each mistake; it prints the cases that caught the mistake.

use gin_conformance::cases;
use gin_conformance::host::{Net, Setup, SetupBackend, judge};
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

fn prove(saboteur: &Saboteur) -> Result<(), Failed> {
    let mut tally = Tally::default();
    for setup in setups() {
        for case in cases::all() {
            saboteur.run(&case, &setup, &mut tally);
        }
    }
    println!("{}", saboteur.verdict(tally)?);
    Ok(())
}

/// Proves a mistake of software NICs, with the cases that must catch it.
fn prove_on_nics(saboteur: &Saboteur) -> Result<(), Failed> {
    let mut tally = Tally::default();
    for setup in setups() {
        let setup = Setup { backend: SetupBackend::Gdaki, ..setup };
        for case in saboteur.cases() {
            saboteur.run(&case, &setup, &mut tally);
        }
    }
    println!("{}", saboteur.verdict(tally)?);
    Ok(())
}

fn main() {
    let mut trials: Vec<Trial> = saboteurs::all()
        .into_iter()
        .map(|saboteur| Trial::test(format!("the_suite_notices/{}", saboteur.name), move || prove(&saboteur)))
        .collect();
    trials.extend(
        saboteurs::of_nics().into_iter().map(|saboteur| {
            Trial::test(format!("the_suite_notices/{}", saboteur.name), move || prove_on_nics(&saboteur))
        }),
    );
    trials.push(Trial::test("without_a_mistake_the_same_runs_find_nothing", || {
        for setup in setups() {
            for case in cases::all() {
                judge(&case, &setup).map_err(|error| format!("{}: {error}", case.name))?;
            }
        }
        Ok(())
    }));
    libtest_mimic::run(&Arguments::from_args(), trials).exit();
}
