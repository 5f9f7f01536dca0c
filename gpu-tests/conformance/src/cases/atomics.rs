// SPDX-License-Identifier: MIT OR Apache-2.0
//! Atomics of GPUs on words of LSA peers return the values before.

use super::{List, Verdict, expect_bytes, run_ok};
use crate::host::Setup;
use crate::op::{Code, Op};
use crate::scenario::{Outcome, Scenario};
use gin_abi::FaultKind;
use std::collections::BTreeSet;
use std::format;
use std::vec;
use std::vec::Vec;

pub(super) fn add(list: &mut List) {
    list.case("each_fetching_addition_of_many_threads_and_ranks_sees_another_value", additions);
    list.case("of_many_threads_and_ranks_that_swap_one_word_exactly_one_succeeds", swaps);
    list.case("a_fetching_atomic_at_a_peer_outside_the_team_is_refused", refused);
}

const RANKS: u32 = 3;
const THREADS: u32 = 20;

/// Runs one operation in each thread of each rank, on the first word of window 1 of rank 0. Returns the outcome, and
/// the values before.
fn run(setup: &Setup, op: impl Fn(u64) -> Op) -> Result<(Outcome, Vec<u64>), std::string::String> {
    let mut scenario = Scenario::new(RANKS).shape(1, THREADS);
    for (rank, thread) in (0..RANKS).flat_map(|rank| (0..THREADS).map(move |thread| (rank, thread))) {
        scenario = scenario.on_group(rank, thread, vec![op(u64::from(rank * THREADS + thread)).to(1, 0)]);
    }
    let outcome = run_ok(setup, &scenario)?;
    let values = outcome.logs.iter().flatten().map(|log| log[0].value).collect();
    Ok((outcome, values))
}

fn additions(setup: &Setup) -> Verdict {
    let (outcome, values) = run(setup, |_| Op { value: 3, ..Op::new(Code::FetchAdd) })?;
    let count = u64::from(RANKS * THREADS);
    let seen: BTreeSet<u64> = values.iter().copied().collect();
    let expected: BTreeSet<u64> = (0..count).map(|number| 3 * number).collect();
    if seen != expected {
        return Err(format!("the additions saw {values:?}"));
    }
    expect_bytes(&outcome, 0, 1, 0, (3 * count).to_le_bytes())
}

fn swaps(setup: &Setup) -> Verdict {
    let (outcome, values) = run(setup, |number| Op { amount: 0, value: number + 1, ..Op::new(Code::CompareSwap) })?;
    let winners: Vec<u64> = (1..).zip(&values).filter(|(_, before)| **before == 0).map(|(new, _)| new).collect();
    let &[winner] = &winners[..] else { return Err(format!("{winners:?} succeeded: {values:?}")) };
    if values.iter().any(|&before| before != 0 && before != winner) {
        return Err(format!("{winner} succeeded, and the others saw {values:?}"));
    }
    expect_bytes(&outcome, 0, 1, 0, winner.to_le_bytes())
}

fn refused(setup: &Setup) -> Verdict {
    let mut scenario = Scenario::new(4);
    scenario.lsa_size = Some(2);
    let to = |code, peer| Op { peer, ..Op::new(code) }.to(1, 0);
    let program = vec![to(Code::FetchAdd, 1), to(Code::FetchAdd, 2), to(Code::CompareSwap, 3)];
    let scenario = scenario.on(0, program);
    let outcome = setup.run(&scenario)?;
    outcome.check_value(&scenario, 0, 0, 0, 0)?;
    [1, 2].into_iter().try_for_each(|index| outcome.check_fault(&scenario, 0, 0, index, FaultKind::NotReachable))
}
