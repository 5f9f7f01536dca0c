// SPDX-License-Identifier: MIT OR Apache-2.0
//! Many ids, no ids, and windows that start inside their allocation.

use super::{List, Verdict, expect_bytes, run_ok};
use crate::host::Setup;
use crate::op::Op;
use crate::scenario::{CoopKind, Scenario, WindowSpec};
use std::vec;

pub(super) fn add(list: &mut List) {
    list.case("counter_and_signal_ids_past_16_bits_are_their_own", wide_ids);
    list.per_coop("gets_and_flushes_need_neither_signals_nor_counters", no_ids);
    list.case("puts_and_gets_reach_windows_inside_their_allocations", inside);
}

fn wide_ids(setup: &Setup) -> Verdict {
    let (ids, last) = (70_000, 69_999);
    // The low 16 bits of the id.
    let cut = last & 0xffff;
    let scenario = Scenario::new(2)
        .require(|requirements| (requirements.signals, requirements.counters) = (ids, ids))
        .on(
            0,
            vec![
                Op::fill(0, 0, 100, 3),
                Op::put(1, 100).signal(last).add(7).counter(last),
                Op::get(1, 100).from(0, 0).to(1, 0).counter(last),
                Op::wait_counter(last, 2),
                Op::read_counter(last),
                Op::read_counter(cut),
                Op::read_counter(1 << 16),
                Op::put(1, 1).counter(ids),
            ],
        )
        .on(
            1,
            vec![
                Op::wait_signal(last, 7),
                Op::check(1, 0, 100, 3),
                Op::read_signal(last),
                Op::read_signal(cut),
                Op::read_signal(1 << 16),
            ],
        );
    let outcome = setup.run(&scenario)?;
    for (rank, index, value) in [(0, 4, 2), (0, 5, 0), (0, 6, 0), (1, 1, 0), (1, 2, 7), (1, 3, 0), (1, 4, 0)] {
        outcome.check_value(&scenario, rank, 0, index, value)?;
    }
    outcome.check_fault(&scenario, 0, 0, 7, gin_abi::FaultKind::UnknownCounter)
}

/// No signals exist, not even for barriers: each rank gets memory that no rank writes, and a word of a window counts
/// arrivals.
fn no_ids(setup: &Setup, coop: CoopKind) -> Verdict {
    let scenario = Scenario::new(2)
        .coop(coop)
        .window(2, WindowSpec { bytes: vec![64; 2], signals: true, offset: 8 })
        .require(|requirements| {
            (requirements.signals, requirements.counters) = (0, 0);
            (requirements.world_barriers, requirements.rail_barriers, requirements.lsa_barriers) = (0, 0, 0);
        })
        .all(|rank| {
            let peer = 1 - rank;
            vec![
                Op::fill(0, 0, 900, u64::from(rank)),
                Op::fill(1, 0, 2000, 9),
                Op::get(rank, 900),
                Op::get(peer, 900).from(0, 5000).to(1, 1000),
                Op::flush(),
                Op::check(1, 0, 900, u64::from(rank)),
                Op::check_from(1, 900, 100, 9, 900),
                Op::put(peer, 300).to(1, 4000),
                Op::put_value(peer, 8, 1).to(1, 4304).at_address(2, 8),
                Op::flush_async(peer),
                Op::wait_token(),
                Op::wait_signal(0, 1).at_address(2, 8),
            ]
        });
    let outcome = run_ok(setup, &scenario)?;
    for rank in 0..2 {
        // The part of the peer's window that nobody wrote.
        expect_bytes(&outcome, rank, 1, 1000, [0; 900])?;
        expect_bytes(&outcome, rank, 1, 4000, super::pattern(u64::from(1 - rank), 300))?;
        expect_bytes(&outcome, rank, 1, 4304, [1, 0, 0, 0, 0, 0, 0, 0])?;
    }
    Ok(())
}

fn inside(setup: &Setup) -> Verdict {
    let spec = |offset| WindowSpec { bytes: vec![2048; 2], signals: false, offset };
    let scenario = Scenario::new(2).window(0, spec(264)).window(1, spec(4096 + 8)).all(|rank| {
        let peer = 1 - rank;
        vec![
            Op::fill(0, 0, 2048, u64::from(rank)),
            Op::barrier(),
            Op::put(peer, 1000).from(0, 0).to(1, 0).signal(0),
            Op::get(peer, 1001).from(0, 1047).to(1, 1047).counter(0),
            Op::wait_counter(0, 1),
            Op::wait_signal(0, 1),
            Op::check(1, 0, 1000, u64::from(peer)),
            Op::check_from(1, 1047, 1001, u64::from(peer), 1047),
            Op::check(0, 0, 2048, u64::from(rank)),
            Op::barrier(),
        ]
    });
    let outcome = run_ok(setup, &scenario)?;
    for rank in 0..2 {
        expect_bytes(&outcome, rank, 1, 1000, [0; 47])?;
    }
    Ok(())
}
