// SPDX-License-Identifier: MIT OR Apache-2.0
//! A seed repeats every case's run byte for byte; another seed gives another run. `GIN_ROTATION=n` runs a third
//! ([`in_rotation`]).

use gin_conformance::cases::{self, Case};
use gin_conformance::host::{Logs, Net, Setup};
use gin_conformance::op::pattern;
use gin_testkit::in_rotation;
use std::sync::PoisonError;

/// Returns the logs of all runs of a case.
fn logs(case: &Case, setup: &Setup) -> Vec<Vec<u8>> {
    let logs = Logs::default();
    let setup = Setup { logs: Some(logs.clone()), ..setup.clone() };
    if let Err(error) = case.judge(&setup) {
        panic!("{}: {error}", case.name);
    }
    let logs = logs.lock().unwrap_or_else(PoisonError::into_inner);
    logs.iter().map(|log| log.to_bytes()).collect()
}

fn compare(net: Net, seed: u64) {
    let mut others = 0;
    let cases = cases::all().into_iter().enumerate().filter(|(number, _)| in_rotation(seed as usize, *number));
    let all: Vec<Case> = cases.map(|(_, case)| case).collect();
    for case in &all {
        let setup = Setup { net, ..Setup::seeded(seed) };
        let first = logs(case, &setup);
        assert!(!first.is_empty() && first.iter().all(|log| !log.is_empty()), "{}: no log entries", case.name);
        assert!(first == logs(case, &setup), "{}: two runs with seed {seed} differ", case.name);
        others += usize::from(first != logs(case, &Setup { seed: Some(seed + 1), ..setup }));
    }
    // A case of one thread that never waits may have only one schedule.
    assert!(others > all.len() * 9 / 10, "only {others} of {} cases run differently with another seed", all.len());
}

#[test]
fn every_case_runs_the_same_way_twice_with_one_seed() {
    compare(Net::Plain, 11);
}

#[test]
fn every_case_runs_the_same_way_twice_on_a_network_that_chooses_from_the_seed() {
    compare(Net::Worst, 12);
}

#[test]
fn patterns_of_different_seeds_differ_early() {
    for seed in 0..100 {
        let of = |seed| (0..8).map(|index| pattern(seed, index)).collect::<Vec<u8>>();
        assert_ne!(of(seed), of(seed + 1));
    }
}
