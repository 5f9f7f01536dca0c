// SPDX-License-Identifier: MIT OR Apache-2.0
//! Numbers that wrap: queue indices, signals near 2^64, counters near 2^56.

use super::{List, Verdict, run_ok};
use crate::host::Setup;
use crate::op::{Code, Op};
use crate::scenario::Scenario;
use std::vec;
use std::vec::Vec;

pub(super) fn add(list: &mut List) {
    list.network_case("queues_work_from_every_start_offset_at_depths_1_2_4_and_8", offsets);
    list.network_case("queue_indices_pass_two_to_the_32_and_two_to_the_63", indices);
    list.case("signals_pass_two_to_the_64", signals);
    list.case("counters_pass_two_to_the_56", counters);
}

/// Runs puts with signals, counters, tokens and flushes, more than the queue holds.
fn exercise(setup: &Setup, first_index: u64, depth: u32) -> Verdict {
    let rounds = u64::from(depth) * 2 + 3;
    let scenario = Scenario::new(2)
        .require(|requirements| {
            requirements.first_index = first_index;
            requirements.queue_depth = depth;
        })
        .all(|rank| {
            let peer = 1 - rank;
            let mut program = Vec::new();
            for round in 0..rounds {
                program.push(Op::put_value(peer, 8, 7 * round).to(1, 8 * round).signal(0).counter(0));
                if round % 3 == 1 {
                    program.extend([Op { peer, ..Op::new(Code::FlushAsync) }, Op::new(Code::WaitToken)]);
                }
            }
            program.extend([Op::flush(), Op::wait_counter(0, rounds), Op::wait_signal(0, rounds), Op::read_signal(0)]);
            program
        });
    let outcome = run_ok(setup, &scenario)?;
    for rank in 0..2 {
        super::expect_bytes(&outcome, rank, 1, 0, (0..rounds).flat_map(|round| (7 * round).to_le_bytes()))?;
    }
    Ok(())
}

fn offsets(setup: &Setup) -> Verdict {
    for depth in [1, 2, 4, 8] {
        for first in 0..2 * u64::from(depth) {
            exercise(setup, first, depth).map_err(|error| std::format!("depth {depth}, start {first}: {error}"))?;
        }
    }
    Ok(())
}

fn indices(setup: &Setup) -> Verdict {
    for near in [1u64 << 32, 1 << 63] {
        for before in [1, 3, 5] {
            for depth in [2, 8] {
                exercise(setup, near - before, depth)
                    .map_err(|error| std::format!("depth {depth}, start {near} - {before}: {error}"))?;
            }
        }
    }
    Ok(())
}

/// Words that start above 0 make the value start there, so that it wraps.
fn signals(setup: &Setup) -> Verdict {
    for before in [0, 1, 3, 7] {
        let first = 0u64.wrapping_sub(before);
        let scenario = Scenario::new(2).require(|requirements| requirements.first_signal = first).all(|rank| {
            let mut program = Vec::new();
            for round in 1..6 {
                program.extend([
                    Op::put(1 - rank, 24).signal(2),
                    Op::wait_signal(2, first.wrapping_add(round)),
                    Op::read_signal(2),
                    Op::barrier(),
                ]);
            }
            program.extend([Op::reset_signal(2), Op::read_signal(2)]);
            program
        });
        let outcome = run_ok(setup, &scenario)?;
        for round in 1..6 {
            outcome.check_value(&scenario, 0, 0, 4 * (round - 1) + 2, first.wrapping_add(round as u64))?;
        }
        outcome.check_value(&scenario, 0, 0, 21, 0)?;
    }
    Ok(())
}

fn counters(setup: &Setup) -> Verdict {
    let mask = gin_abi::mask(gin_abi::COUNTER_BITS);
    for before in [0, 1, 3, 7] {
        let first = (1u64 << gin_abi::COUNTER_BITS).wrapping_sub(before);
        let value = |round: u64| first.wrapping_add(round) & mask;
        let last = value(5) % 4;
        let scenario = Scenario::new(2).require(|requirements| requirements.first_counter = first).on(
            0,
            (1..6)
                .flat_map(|round| [Op::put(1, 24).counter(2), Op::wait_counter(2, value(round)), Op::read_counter(2)])
                .chain(vec![Op::read_counter(2).bits(2)])
                .collect(),
        );
        let outcome = run_ok(setup, &scenario)?;
        for round in 1..6 {
            outcome.check_value(&scenario, 0, 0, 3 * (round - 1) + 2, value(round as u64))?;
        }
        outcome.check_value(&scenario, 0, 0, 15, last)?;
    }
    Ok(())
}
