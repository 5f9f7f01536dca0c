// SPDX-License-Identifier: MIT OR Apache-2.0
//! Small messages by loads and stores, with the flag in the data.

use super::routes::COOPS;
use super::{List, Verdict, run_ok};
use crate::host::Setup;
use crate::op::{Code, Op};
use crate::scenario::{CoopKind, Outcome, Scenario, WindowSpec, fault};
use crate::script::Message;
use gin_abi::{FaultKind, FaultSubject, Operation};
use gin_device::inbox::{SLOTS, words};
use std::format;
use std::vec;
use std::vec::Vec;

/// Size of a message in bytes.
const BYTES: u64 = size_of::<Message>() as u64;

pub(super) fn add(list: &mut List) {
    for coop in COOPS {
        let name = coop.name();
        list.case(&format!("messages_arrive_whole_and_in_order_by_{name}"), move |setup| in_order(setup, coop));
        list.case(&format!("messages_without_room_or_sender_end_by_their_deadline_by_{name}"), move |setup| {
            ended(setup, coop)
        });
    }
    list.case("wrong_messages_are_refused_and_nothing_is_sent", refused);
    list.case("an_abort_ends_the_wait_for_a_message", aborted);
}

/// A scenario whose window 2 is for messages.
fn scenario(ranks: u32, coop: CoopKind) -> Scenario {
    let bytes = vec![8 * words::<Message>(ranks) as u64; ranks as usize];
    Scenario::new(ranks).coop(coop).window(2, WindowSpec { bytes, signals: false, offset: 0 })
}

/// Sends the message at `offset` of window 0 to `peer`.
fn send(peer: u32, offset: u64) -> Op {
    Op { peer, ..Op::new(Code::Send) }.to(2, 0).from(0, offset)
}

/// Receives a message from `peer` at `offset` of window 1.
fn receive(peer: u32, offset: u64) -> Op {
    Op { peer, ..Op::new(Code::Receive) }.to(2, 0).from(1, offset)
}

/// Each rank sends to every rank, itself too. The first rounds have room; in the others a send may wait.
fn in_order(setup: &Setup, coop: CoopKind) -> Verdict {
    let (ranks, rounds) = (3, 2 * SLOTS + 3);
    let seed = |from: u32, to: u32, round: u64| 1000 * (u64::from(from) + 1) + 100 * u64::from(to) + round;
    let scenario = scenario(ranks, coop).all(|rank| {
        let mut program = Vec::new();
        // A receive follows some rounds behind, less than a send may be ahead.
        let behind = SLOTS / 2 - 1;
        for round in 0..rounds + behind {
            if round < rounds {
                for peer in 0..ranks {
                    program.push(Op::fill(0, 8, BYTES, seed(rank, peer, round)));
                    program.push(send(peer, 8));
                }
            }
            if let Some(round) = round.checked_sub(behind) {
                for peer in 0..ranks {
                    program.push(receive(peer, 16));
                    program.push(Op::check(1, 16, BYTES, seed(peer, rank, round)));
                }
            }
        }
        program
    });
    run_ok(setup, &scenario).map(|_| ())
}

/// An operation that ended by its deadline succeeds when it is repeated.
fn ended(setup: &Setup, coop: CoopKind) -> Verdict {
    const SOON_US: u64 = 50;
    let mut sender = vec![Op::wait_signal(0, 1)];
    for number in 0..SLOTS {
        sender.extend([Op::fill(0, 0, BYTES, number), send(1, 0)]);
    }
    sender.extend([Op::fill(0, 0, BYTES, SLOTS), send(1, 0).deadline_us(SOON_US), Op::raise(1, 0), send(1, 0)]);
    let refused = 1 + 2 * SLOTS as usize + 1;
    let mut receiver = vec![receive(0, 0).deadline_us(SOON_US), Op::raise(0, 0), Op::wait_signal(0, 1)];
    for number in 0..=SLOTS {
        receiver.extend([receive(0, 0), Op::check(1, 0, BYTES, number)]);
    }
    let scenario = scenario(2, coop).on(0, sender).on(1, receiver);
    let outcome = setup.run(&scenario)?;
    outcome.check_agreement(&scenario)?;
    // Rank 0 waits at its block for rank 1, and rank 1 at its first block.
    let block = 4 * words::<Message>(2) as u64;
    let (sent, received) = ((Operation::Send, 1, block, SLOTS + 1, 0), (Operation::Receive, 0, 0, 1, 0));
    for (rank, index, expected) in [(0, refused, sent), (1, 0, received)] {
        outcome.check_fault(&scenario, rank, 0, index, FaultKind::Timeout)?;
        outcome.each(&scenario, rank, 0, index, |entry| match fault(entry) {
            Some(fault) => match fault.subject() {
                FaultSubject::Window { offset, .. }
                    if (fault.operation(), fault.peer(), offset, fault.expected(), fault.seen()) == expected =>
                {
                    Ok(())
                }
                _ => Err(format!("{expected:?} expected")),
            },
            None => Err(format!("{expected:?} expected")),
        })?;
    }
    others_ok(&outcome, &scenario, &[(0, refused), (1, 0)])
}

/// Checks that all operations but these succeeded, each a rank and an index.
fn others_ok(outcome: &Outcome, scenario: &Scenario, others: &[(u32, usize)]) -> Verdict {
    for rank in 0..scenario.ranks {
        for (index, op) in scenario.program(rank, 0).iter().enumerate() {
            if !others.contains(&(rank, index)) {
                outcome.check_value(scenario, rank, 0, index, 0).map_err(|error| format!("{op:?}: {error}"))?;
            }
        }
    }
    Ok(())
}

fn refused(setup: &Setup) -> Verdict {
    let end = 16 << 10;
    let two = Op { bytes: 2, ..send(1, 0) };
    let mistakes = [
        (send(1, end - BYTES + 8), FaultKind::OutOfRange),
        (receive(1, end - BYTES + 8), FaultKind::OutOfRange),
        (two, FaultKind::LengthMismatch),
        (Op { bytes: 2, ..receive(1, 0) }, FaultKind::LengthMismatch),
        (send(1, 0).to(3, 0), FaultKind::OutOfRange),
        (receive(1, 0).to(3, 0), FaultKind::OutOfRange),
    ];
    let mut program: Vec<Op> = mistakes.iter().map(|(op, _)| *op).collect();
    program.extend([Op::fill(0, 0, BYTES, 5), send(1, 0)]);
    // At rank 1 window 3 is too short.
    let short = WindowSpec { bytes: vec![8 * words::<Message>(2) as u64, 64], signals: false, offset: 0 };
    let scenario = scenario(2, CoopKind::Warp)
        .window(3, short)
        .on(0, program)
        .on(1, vec![receive(0, 0), Op::check(1, 0, BYTES, 5)]);
    let outcome = setup.run(&scenario)?;
    outcome.check_agreement(&scenario)?;
    for (index, (op, kind)) in mistakes.iter().enumerate() {
        outcome.check_fault(&scenario, 0, 0, index, *kind).map_err(|error| format!("{op:?}: {error}"))?;
    }
    let wrong: Vec<_> = (0..mistakes.len()).map(|index| (0, index)).collect();
    others_ok(&outcome, &scenario, &wrong)
}

fn aborted(setup: &Setup) -> Verdict {
    let full = (0..=SLOTS).map(|_| send(1, 0)).collect::<Vec<_>>();
    let scenario = scenario(2, CoopKind::Block).on(0, full).on(1, vec![receive(1, 0)]).during(|control| {
        if control.rank == 0 {
            let start = gin_boot::rt::clock_ns();
            gin_boot::rt::wait_until(move || gin_boot::rt::clock_ns() - start > 1_000_000);
            // The abort is refused only if the communicator has ended; the logs will show that.
            let _ = control.comm.abort();
        }
    });
    let outcome = setup.run(&scenario)?;
    outcome.check_agreement(&scenario)?;
    outcome.check_fault(&scenario, 0, 0, SLOTS as usize, FaultKind::Aborted)?;
    outcome.check_fault(&scenario, 1, 0, 0, FaultKind::Aborted)
}
