// SPDX-License-Identifier: MIT OR Apache-2.0
//! Random programs on 2 to 4 ranks match a simple model in every byte, signal and counter.
//!
//! A failure is shrunk and printed with its programs; `GIN_SEED` repeats it. `GIN_PROGRAMS` sets the number of
//! programs, 100 by default. The same programs with a mistake in the proxy must fail, which shows that the model
//! notices it.

mod model;
mod plan;

use gin_conformance::host::{Mistake, Setup, SetupBackend, seed_from_env};
use gin_conformance::scenario::{WRONG_BYTES, WRONG_VALUE};
use gin_testkit::{Sabotage, number_from_env};
use model::Compiled;
use plan::Plan;
use proptest::strategy::{Strategy, ValueTree};
use proptest::test_runner::{Config, RngAlgorithm, TestCaseError, TestError, TestRng, TestRunner};

/// Runs a plan on real threads, or on the schedule of its seed.
fn run(plan: &Plan, threads: bool, mistake: Mistake) -> Result<(), String> {
    let base = if threads { Setup::threads() } else { Setup::seeded(plan.seed) };
    let backend = if let Mistake::Proxy(_) = mistake { SetupBackend::Proxy } else { plan.backend };
    // Ends a run that hangs early. A run without a mistake stays far below this.
    let stall_steps = if mistake == Mistake::None { 5_000_000 } else { 300_000 };
    let setup = Setup { net: plan.net, backend, mistake, stall_steps, ..base };
    let compiled = Compiled::new(plan);
    let verdict = setup.run(&compiled.scenario).and_then(|outcome| compiled.check(&outcome));
    verdict.map_err(|error| format!("{error}\n  on: {}\n{}", setup.name(), compiled.listing()))
}

fn runner(seed: u64, cases: u32) -> TestRunner {
    let mut bytes = [0; 32];
    bytes[..8].copy_from_slice(&seed.to_le_bytes());
    let config = Config {
        cases,
        failure_persistence: None,
        max_shrink_iters: 2000,
        max_shrink_time: 60_000,
        ..Config::default()
    };
    TestRunner::new_with_rng(config, TestRng::from_seed(RngAlgorithm::ChaCha, &bytes))
}

/// Returns the number of programs of a test: that many hundredths of `GIN_PROGRAMS`, which is 100 by default.
fn programs(hundredths: u32) -> u32 {
    let programs = number_from_env("GIN_PROGRAMS").unwrap_or(100) * u64::from(hundredths) / 100;
    u32::try_from(programs).unwrap_or(u32::MAX).max(1)
}

/// Runs random plans. If one fails, returns the finding for the shrunk plan and the number of its operations.
fn explore(
    plans: impl Strategy<Value = Plan>,
    seed: u64,
    cases: u32,
    threads: bool,
    mistake: Mistake,
) -> Result<(), (String, usize)> {
    let outcome = runner(seed, cases).run(&plans, |plan| run(&plan, threads, mistake).map_err(TestCaseError::fail));
    match outcome {
        Ok(()) => Ok(()),
        Err(TestError::Abort(reason)) => Err((reason.to_string(), 0)),
        Err(TestError::Fail(reason, plan)) => {
            let text = format!(
                "{reason}\nthe smallest plan that fails: {plan:#?}\n  repeat: GIN_SEED={seed} cargo test -p \
                 gin-conformance --test random_programs"
            );
            Err((text, plan.rounds.iter().map(|round| round.posts.len()).sum()))
        }
    }
}

/// Runs random plans. Panics if one fails.
fn hold(plans: impl Strategy<Value = Plan>, programs: u32, threads: bool) {
    if let Err((text, _)) = explore(plans, seed_from_env(), programs, threads, Mistake::None) {
        panic!("{text}");
    }
}

#[test]
fn random_programs_do_what_the_model_says() {
    hold(plan::plans(), programs(120), false);
}

#[test]
fn random_programs_of_many_groups_do_what_the_model_says() {
    hold(plan::crowds(), programs(12), false);
}

#[test]
fn random_programs_do_what_the_model_says_on_real_threads() {
    hold(plan::plans(), programs(10), true);
}

#[test]
fn random_programs_of_many_groups_do_what_the_model_says_on_real_threads() {
    hold(plan::crowds(), programs(4), true);
}

/// Runs the first plans of a fixed seed with this mistake until one fails with wrong bytes or values. Without the
/// mistake that plan must pass. Returns the number of plans tried.
fn noticed(sabotage: Sabotage) -> u32 {
    const MAX: u32 = 240;
    let mut runner = runner(7, MAX);
    for tried in 1..=MAX {
        let plan = plan::plans().new_tree(&mut runner).expect("every draw is a plan").current();
        match run(&plan, false, Mistake::Proxy(sabotage)) {
            Err(text) if text.starts_with(WRONG_BYTES) || text.starts_with(WRONG_VALUE) => {
                if let Err(text) = run(&plan, false, Mistake::None) {
                    panic!("without {sabotage:?}: {text}");
                }
                return tried;
            }
            _ => {}
        }
    }
    panic!("{MAX} programs ran with {sabotage:?} without a wrong byte or value");
}

#[test]
fn every_mistake_of_the_proxy_is_noticed() {
    for sabotage in Sabotage::ALL {
        println!("{sabotage:?} is noticed by program {}", noticed(sabotage));
    }
}

#[test]
fn a_failure_is_shrunk_and_says_how_to_repeat_it() {
    let mistake = Mistake::Proxy(Sabotage::LosePut);
    let Err((text, posts)) = explore(plan::plans(), 7, 20, false, mistake) else { panic!("no put was lost") };
    // Every third put is lost, and a plan begins with up to 72 operations.
    assert!((1..10).contains(&posts), "{posts} operations: {text}");
    for part in [WRONG_BYTES, "rank 0, group 0:", "seed: ", "GIN_SEED=7 "] {
        assert!(text.contains(part), "expected {part:?} in {text}");
    }
}
