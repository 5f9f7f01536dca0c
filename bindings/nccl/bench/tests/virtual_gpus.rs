// SPDX-License-Identifier: MIT OR Apache-2.0

//! The measurement of gin's side, on virtual GPUs.

use gin_host::world::WorldConfig;
use gin_nccl_bench::{Barrier, Plan, RANKS, over_gin};
use gin_testkit::Sabotage;
use std::time::Duration;

const PLAN: Plan =
    Plan { repeats: 2, warm: 1, timed: 3, checked: 4, puts: 6, slots: 4, words: 64, limit: Duration::from_secs(60) };

#[test]
fn each_figure_has_a_value_for_each_repeat_and_no_word_is_wrong() {
    let figures = over_gin(WorldConfig::threads(RANKS), PLAN).unwrap();
    assert_eq!(figures.wrong, 0);
    for figure in [&figures.signal_us, &figures.put_us, &figures.puts_gbs] {
        assert_eq!(figure.len(), PLAN.repeats);
        assert!(figure.iter().all(|value| value.is_finite() && *value > 0.0), "{figures:?}");
    }
}

#[test]
fn words_that_a_network_loses_are_found() {
    let figures = over_gin(Sabotage::LosePut.apply(WorldConfig::threads(RANKS)), PLAN).unwrap();
    assert_ne!(figures.wrong, 0);
}

#[test]
fn a_rank_that_waits_for_an_absent_one_ends_with_an_error() {
    let barrier = Barrier::new(Duration::from_millis(20));
    assert!(barrier.wait().unwrap_err().to_string().contains("20ms"));
}

#[test]
fn a_plan_for_gpus_uses_every_place() {
    let plan = Plan::new(9, Duration::from_secs(10));
    assert!(plan.puts >= plan.slots && PLAN.puts >= PLAN.slots);
    assert_eq!((plan.window(), 8 * plan.words), (1 << 22, 4 << 20));
}
