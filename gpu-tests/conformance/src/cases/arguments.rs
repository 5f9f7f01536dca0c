// SPDX-License-Identifier: MIT OR Apache-2.0
//! Wrong arguments are refused at the call, with the value and the limit, and lose nothing.

use super::transfer::window;
use super::{List, Verdict};
use crate::host::Setup;
use crate::op::{Code, NONE, Op};
use crate::scenario::{CoopKind, Scenario, WindowSpec, fault};
use gin_abi::FaultKind;
use std::vec;
use std::vec::Vec;

pub(super) fn add(list: &mut List) {
    list.per_coop("wrong_arguments_give_the_same_fault_to_all_threads_and_lose_nothing", wrong);
    list.per_coop("wrong_arguments_are_found_when_a_post_or_a_wait_is_prepared", wrong_prepared);
    list.case("ranges_are_checked_against_the_length_of_the_addressed_rank", lengths);
    list.case("an_unknown_pointer_is_in_no_window_and_a_known_one_is_found", find);
    list.case("faults_name_the_request_and_the_limit", figures);
}

/// Returns wrong operations, each with its expected fault.
fn mistakes() -> Vec<(Op, FaultKind)> {
    let size = 16 << 10;
    let va = |op: Op, offset| op.at_address(2, offset);
    vec![
        (Op::put(1, size + 1), FaultKind::OutOfRange),
        (Op::put(1, 8).to(1, size), FaultKind::OutOfRange),
        (Op::put(1, 8).from(0, size - 7), FaultKind::OutOfRange),
        (Op::put(1, 8).to(1, u64::MAX - 3), FaultKind::OutOfRange),
        (Op::put(1, u64::MAX), FaultKind::OutOfRange),
        (Op::get(1, 8).from(0, size - 7), FaultKind::OutOfRange),
        (Op::get(1, 8).to(1, size - 7), FaultKind::OutOfRange),
        (Op::put_value(1, 8, 1).to(1, size), FaultKind::OutOfRange),
        (Op::put_value(1, 8, 1).to(1, 4), FaultKind::Misaligned),
        (Op::put_value(1, 2, 1).to(1, 3), FaultKind::Misaligned),
        (Op::put(2, 8), FaultKind::UnknownRank),
        (Op::raise(u32::MAX, 0), FaultKind::UnknownRank),
        (Op::put(1, 8).signal(8), FaultKind::UnknownSignal),
        (Op::raise(1, NONE - 1), FaultKind::UnknownSignal),
        (Op::put(1, 8).counter(8), FaultKind::UnknownCounter),
        (Op::get(1, 8).counter(NONE - 1), FaultKind::UnknownCounter),
        (Op::put(1, 8).context(1), FaultKind::UnknownContext),
        (Op::flush().context(u32::MAX), FaultKind::UnknownContext),
        (Op { context: 7, ..Op::new(Code::FlushAsync) }, FaultKind::UnknownContext),
        (Op::wait_signal(8, 1), FaultKind::UnknownSignal),
        (Op::wait_signal(0, 1).context(1), FaultKind::UnknownContext),
        (Op::wait_signal(0, 1).bits(65), FaultKind::BadWidth),
        (Op::read_signal(0).bits(99), FaultKind::BadWidth),
        (Op::reset_signal(8), FaultKind::UnknownSignal),
        (Op::wait_counter(8, 1), FaultKind::UnknownCounter),
        (Op::wait_counter(0, 1).bits(57), FaultKind::BadWidth),
        (Op::read_counter(8), FaultKind::UnknownCounter),
        (Op { counter: 8, ..Op::new(Code::ResetCounter) }, FaultKind::UnknownCounter),
        (Op { signal: 8, ..Op::new(Code::ReadShadow) }, FaultKind::UnknownSignal),
        (Op { signal: 8, ..Op::new(Code::IncreaseShadow) }, FaultKind::UnknownSignal),
        (va(Op { ..Op::new(Code::MeetShadow) }, 0), FaultKind::UnknownSignal),
        (va(Op::raise(1, 0), 4), FaultKind::Misaligned),
        (va(Op::raise(1, 0), 64), FaultKind::OutOfRange),
        (va(Op::read_signal(0), u64::MAX - 7), FaultKind::OutOfRange),
        (Op::raise(1, 0).at_address(1, 0), FaultKind::NoVaSignals),
        (Op::read_signal(0).at_address(0, 0), FaultKind::NoVaSignals),
        (Op { value: 1, ..Op::barrier() }, FaultKind::UnknownBarrier),
        (Op { team: 2, value: 9, ..Op::barrier() }, FaultKind::UnknownBarrier),
        (Op { peer: 5, ..Op::new(Code::LoadPeer) }, FaultKind::UnknownRank),
    ]
}

fn wrong(setup: &Setup, coop: CoopKind) -> Verdict {
    refused(setup, coop, mistakes())
}

fn wrong_prepared(setup: &Setup, coop: CoopKind) -> Verdict {
    let posts_and_waits = |op: &Op| {
        let codes = [Code::Put, Code::PutValue, Code::Get, Code::Signal, Code::WaitSignal];
        codes.iter().any(|&code| op.code == code as u32)
    };
    let mistakes = mistakes().into_iter().filter(|(op, _)| posts_and_waits(op));
    refused(setup, coop, mistakes.map(|(op, kind)| (op.prepared(), kind)).collect())
}

fn refused(setup: &Setup, coop: CoopKind, mistakes: Vec<(Op, FaultKind)>) -> Verdict {
    let mut program: Vec<Op> = mistakes.iter().map(|(op, _)| *op).collect();
    // Nothing was posted, and later operations work.
    program.extend([
        Op::read_counter(0),
        Op::fill(0, 0, 77, 3),
        Op::put(1, 77).signal(0).counter(0),
        Op::wait_counter(0, 1),
    ]);
    let scenario = Scenario::new(2)
        .coop(coop)
        .window(2, WindowSpec { bytes: vec![64, 64], signals: true, offset: 0 })
        .on(0, program)
        .on(1, vec![Op::wait_signal(0, 1), Op::read_signal(0), Op::check(1, 0, 77, 3)]);
    let outcome = setup.run(&scenario)?;
    outcome.check_agreement(&scenario)?;
    for (index, (op, kind)) in mistakes.iter().enumerate() {
        outcome.check_fault(&scenario, 0, 0, index, *kind).map_err(|error| std::format!("{op:?}: {error}"))?;
    }
    for index in mistakes.len()..mistakes.len() + 4 {
        outcome.check_value(&scenario, 0, 0, index, 0)?;
    }
    for (index, value) in [(0, 0), (1, 1), (2, 0)] {
        outcome.check_value(&scenario, 1, 0, index, value)?;
    }
    match outcome.faults.iter().flatten().next() {
        Some((rank, fault)) => Err(std::format!("rank {rank} has a fault: {fault}")),
        None => Ok(()),
    }
}

fn lengths(setup: &Setup) -> Verdict {
    let scenario = Scenario::new(3)
        .window(0, window(&[512, 64, 4096]))
        .window(1, window(&[128, 1024, 0]))
        .on(
            0,
            vec![
                Op::fill(0, 0, 512, 4),
                Op::put(1, 512).signal(0),  // within the part of rank 1, not of rank 0
                Op::put(1, 512).from(0, 1), // past its own source
                Op::put(1, 512).to(1, 513), // past the peer's window
                Op::put(2, 1).signal(0),    // rank 2's part is empty
                Op::put(2, 0).signal(0),    // an empty put fits it
                Op::get(2, 128).from(0, 4096 - 128).to(1, 0), // within rank 2's part, past all others
                Op::get(1, 65).from(0, 0).to(1, 0), // rank 1's part has 64 bytes
                Op::put(0, 129),            // past its own part as destination
                Op::flush(),
            ],
        )
        .on(1, vec![Op::wait_signal(0, 1), Op::check(1, 0, 512, 4)])
        .on(2, vec![Op::wait_signal(0, 1)]);
    let outcome = setup.run(&scenario)?;
    for index in [0, 1, 5, 6, 9] {
        outcome.check_value(&scenario, 0, 0, index, 0)?;
    }
    for index in [2, 3, 4, 7, 8] {
        outcome.check_fault(&scenario, 0, 0, index, FaultKind::OutOfRange)?;
    }
    outcome.check_value(&scenario, 1, 0, 1, 0)
}

fn find(setup: &Setup) -> Verdict {
    let find = |window, offset| Op { window, offset, ..Op::new(Code::FindWindow) };
    let scenario = Scenario::new(1)
        .window(1, WindowSpec { bytes: vec![256], signals: false, offset: 512 })
        .on(0, vec![find(0, 0), find(0, 100), find(1, 255), find(1, 1 << 40)]);
    let outcome = setup.run(&scenario)?;
    let ids: Vec<u64> = (0..3).map(|index| outcome.entry(&scenario, 0, 0, index).value).collect();
    if ids[0] != ids[1] || ids[1] == ids[2] {
        return Err(std::format!("expected windows 0, 0 and 1, found {ids:?}"));
    }
    for (index, offset) in [(0, 0), (1, 100), (2, 255)] {
        outcome.each(&scenario, 0, 0, index, |entry| {
            if entry.outcome == 1 && entry.second == offset { Ok(()) } else { Err(std::format!("offset {offset}")) }
        })?;
    }
    outcome.check_fault(&scenario, 0, 0, 3, FaultKind::UnknownWindow)
}

fn figures(setup: &Setup) -> Verdict {
    let scenario = Scenario::new(2).on(
        0,
        vec![
            Op::put(1, 100).to(1, (16 << 10) - 50),
            Op::raise(1, 12),
            Op::wait_counter(9, 1),
            Op::wait_signal(0, 5).deadline_us(5),
            Op::flush().context(3),
        ],
    );
    let outcome = setup.run(&scenario)?;
    let expected = [(16 << 10, (16 << 10) + 50), (8, 12), (8, 9), (5, 0), (1, 3)];
    for (index, values) in expected.into_iter().enumerate() {
        outcome.each(&scenario, 0, 0, index, |entry| match fault(entry) {
            Some(fault) if (fault.expected(), fault.seen()) == values => Ok(()),
            _ => Err(std::format!("expected and actual values: {values:?}")),
        })?;
    }
    let peer =
        fault(&outcome.entry(&scenario, 0, 0, 0)).map(|fault| (fault.context(), fault.peer(), fault.operation()));
    if peer == Some((0, 1, gin_abi::Operation::Put)) {
        Ok(())
    } else {
        Err(std::format!("expected context 0, rank 1 and a put, got {peer:?}"))
    }
}
