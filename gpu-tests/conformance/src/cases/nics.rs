// SPDX-License-Identifier: MIT OR Apache-2.0
//! Cases about device-driven NIC queue pairs.

use super::{List, Verdict, run_ok};
use crate::host::{Failure, How, Net, Setup};
use crate::op::Op;
use crate::scenario::{Scenario, fault};
use gin_abi::mlx5::cqe::Syndrome;
use gin_abi::{FaultKind, Operation};
use std::format;
use std::vec;

pub(super) fn add(list: &mut List) {
    list.nic_case("an_atomic_whose_answer_is_lost_ends_the_sender_though_it_took_effect", unanswered);
    list.nic_case("a_put_in_many_segments_is_whole_and_signals_and_counts_once", segments);
}

/// The receiver's word has changed, and the sender learns that it got no answer.
fn unanswered(setup: &Setup) -> Verdict {
    let setup = setup.with_network(Net::Fail(Failure { from: 0, number: 0, how: How::Unanswered }));
    let scenario = Scenario::new(2)
        .on(0, vec![Op::raise(1, 0), Op::flush(), Op::wait_signal(0, 1)])
        .on(1, vec![Op::wait_signal(0, 1), Op::read_signal(0), Op::wait_signal(1, 1)]);
    let outcome = setup.run(&scenario)?;
    for index in [1, 2] {
        outcome.each(&scenario, 0, 0, index, |entry| match fault(entry) {
            Some(fault)
                if (fault.kind(), fault.operation(), fault.peer()) == (FaultKind::PeerLost, Operation::Signal, 1)
                    && fault.seen() == u64::from(Syndrome::RetryExceeded.code()) =>
            {
                Ok(())
            }
            _ => Err("expected a signal to rank 1 without an answer".into()),
        })?;
    }
    // The wait may find the fault first.
    outcome.check_value(&scenario, 1, 0, 1, 1)?;
    outcome.check_fault(&scenario, 1, 0, 2, FaultKind::Elsewhere)
}

fn segments(setup: &Setup) -> Verdict {
    for max in [1, 7, 64] {
        let scenario = Scenario::new(2)
            .require(|requirements| {
                requirements.max_message = max;
                requirements.queue_depth = 4;
            })
            .on(
                0,
                vec![
                    Op::fill(0, 0, 100, 4),
                    Op::put(1, 100).signal(0).counter(1),
                    Op::wait_counter(1, 1),
                    Op::fill(0, 0, 100, 9),
                    Op::wait_signal(1, 1),
                    Op::get(1, 100).to(1, 200).counter(1),
                    Op::wait_counter(1, 2),
                    Op::check(1, 200, 100, 6),
                    Op::read_counter(1),
                ],
            )
            .on(
                1,
                vec![
                    Op::fill(0, 0, 100, 6),
                    Op::wait_signal(0, 1),
                    Op::check(1, 0, 100, 4),
                    Op::read_signal(0),
                    Op::raise(0, 1),
                ],
            );
        let outcome = run_ok(setup, &scenario).map_err(|error| format!("segments of {max} bytes: {error}"))?;
        outcome.check_value(&scenario, 0, 0, 8, 2)?;
        outcome.check_value(&scenario, 1, 0, 3, 1)?;
    }
    Ok(())
}
