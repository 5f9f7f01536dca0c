// SPDX-License-Identifier: MIT OR Apache-2.0
//! Counters, flushes and tokens keep their promises, and need no other operation.

use super::{List, Verdict, expect_bytes, run_ok};
use crate::host::{Failure, How, Net, Setup};
use crate::op::{Code, Op};
use crate::scenario::{CoopKind, Scenario};
use gin_abi::FaultKind;
use std::vec;
use std::vec::Vec;

pub(super) fn add(list: &mut List) {
    list.per_coop("a_source_may_change_after_its_counter", counter_frees_source);
    list.per_coop("a_source_may_change_after_a_flush", flush_frees_source);
    list.per_coop("a_token_waits_for_what_came_before_it", tokens);
    list.case("a_flush_waits_for_every_peer_and_every_thread", flush_all);
    list.network_case("a_token_does_not_wait_for_a_slow_peer", slow_peer);
    list.network_case("a_token_does_not_wait_for_what_came_after_it", later_request);
    list.case("a_token_may_be_used_long_after_it_was_noted", old_tokens);
    list.case("a_flush_with_nothing_outstanding_returns_at_once", idle_flush);
    list.case("counters_count_each_operation_once", counts);
    list.case("a_counter_can_be_reset_between_phases", reset_counter);
    list.case("a_signal_with_a_counter_counts_too", signal_counter);
}

/// The receiver compares all rounds only at the end, so a source that was read too late is noticed.
fn frees_source(setup: &Setup, coop: CoopKind, wait: impl Fn(u64) -> Op) -> Verdict {
    let rounds = 6;
    let mut sender = Vec::new();
    for round in 0..rounds {
        sender.extend([
            Op::fill(0, 0, 700, round),
            Op::put(1, 700).to(1, 700 * round).signal(0).counter(0),
            wait(round + 1),
        ]);
    }
    sender.push(Op::fill(0, 0, 700, 77));
    let mut receiver = vec![Op::wait_signal(0, rounds)];
    receiver.extend((0..rounds).map(|round| Op::check(1, 700 * round, 700, round)));
    run_ok(setup, &Scenario::new(2).coop(coop).on(0, sender).on(1, receiver)).map(|_| ())
}

fn counter_frees_source(setup: &Setup, coop: CoopKind) -> Verdict {
    frees_source(setup, coop, |round| Op::wait_counter(0, round))
}

fn flush_frees_source(setup: &Setup, coop: CoopKind) -> Verdict {
    frees_source(setup, coop, |_| Op::flush())
}

fn tokens(setup: &Setup, coop: CoopKind) -> Verdict {
    let scenario = Scenario::new(2).coop(coop).all(|rank| {
        let peer = 1 - rank;
        vec![
            Op::fill(0, 0, 900, u64::from(rank) + 1),
            Op::barrier(),
            Op::get(peer, 900),
            Op::flush_async(peer),
            // Posted after the token: it may or may not have arrived.
            Op::get(peer, 900).to(1, 1000),
            Op::wait_token(),
            Op::check(1, 0, 900, u64::from(peer) + 1),
            Op::flush(),
            Op::check(1, 1000, 900, u64::from(peer) + 1),
            Op::barrier(),
        ]
    });
    run_ok(setup, &scenario).map(|_| ())
}

/// Each thread gets from each rank. Then, after a barrier of the block, thread 0 alone flushes.
fn flush_all(setup: &Setup) -> Verdict {
    let (ranks, threads) = (3, 16);
    let block_sync = Op::block_sync();
    let mut scenario = Scenario::new(ranks).shape(1, threads);
    for rank in 0..ranks {
        for thread in 0..threads {
            let mut program = Vec::new();
            if thread == 0 {
                program.extend([Op::fill(0, 0, 1024, u64::from(rank)), Op::barrier()]);
            } else {
                program.extend([Op::nop(), Op::nop()]);
            }
            program.push(block_sync);
            for peer in 0..ranks {
                let place = u64::from(peer * threads + thread) * 64;
                program.push(Op::get(peer, 64).from(0, u64::from(thread) * 64).to(1, place));
            }
            program.push(block_sync);
            program.push(if thread == 0 { Op::flush() } else { Op::nop() });
            program.push(block_sync);
            if thread == 0 {
                program.push(Op::barrier());
            }
            scenario = scenario.on_group(rank, thread, program);
        }
    }
    let outcome = run_ok(setup, &scenario)?;
    for rank in 0..ranks {
        for peer in 0..ranks {
            let expected = super::pattern(u64::from(peer), u64::from(threads) * 64);
            expect_bytes(&outcome, rank, 1, (peer * threads * 64) as usize, expected)?;
        }
    }
    Ok(())
}

/// A delay in nanoseconds that is longer than any run.
pub(super) const FOREVER: u64 = 1_000_000_000_000;

/// Puts to rank 2 never arrive; a token for rank 1 does not wait for them.
fn slow_peer(setup: &Setup) -> Verdict {
    let setup = setup.with_network(Net::SlowPeer { rank: 2, ns: FOREVER });
    let scenario = Scenario::new(3)
        .on(
            0,
            vec![
                Op::fill(0, 0, 64, 3),
                Op::put(2, 64),
                Op::put(1, 64).signal(0),
                Op::flush_async(1),
                Op::wait_token(),
                Op::flush_async(2),
                Op::wait_token().deadline_us(10),
                Op::flush().deadline_us(10),
                Op::wait_signal(0, 1),
                Op::report(1),
            ],
        )
        .on(1, vec![Op::wait_signal(0, 1), Op::raise(0, 0)]);
    let outcome = setup.run(&scenario)?;
    for index in [6, 7] {
        outcome.check_fault(&scenario, 0, 0, index, FaultKind::Timeout)?;
    }
    for index in [0, 1, 2, 3, 4, 5, 8, 9] {
        outcome.check_value(&scenario, 0, 0, index, 0)?;
    }
    outcome.check_value(&scenario, 1, 0, 0, 0)
}

/// The request after the token never completes; the token waits only for the one before it.
fn later_request(setup: &Setup) -> Verdict {
    let failure = Failure { from: 0, number: 1, how: How::Silent };
    let setup = setup.with_network(Net::Fail(failure));
    let scenario = Scenario::new(2).on(
        0,
        vec![
            Op::put(1, 64),
            Op::flush_async(1),
            Op::put(1, 64).to(1, 64),
            Op::wait_token(),
            Op::wait_token().deadline_us(0),
            Op::flush_async(1),
            Op::wait_token().deadline_us(10),
            Op::report(1),
        ],
    );
    let outcome = setup.run(&scenario)?;
    for index in 0..6 {
        outcome.check_value(&scenario, 0, 0, index, 0)?;
    }
    outcome.check_fault(&scenario, 0, 0, 6, FaultKind::Timeout)
}

/// The queue wraps many times between the token and its wait.
fn old_tokens(setup: &Setup) -> Verdict {
    for first_index in [0, (1 << 32) - 3, (1 << 63) - 3] {
        let mut program = vec![Op::get(1, 64), Op::flush_async(1)];
        program.extend((0..40).map(|slot| Op::put_value(1, 8, slot).to(1, 8 * slot)));
        program.extend([Op::wait_token(), Op::check(1, 0, 64, 6), Op::flush(), Op::wait_token(), Op::barrier()]);
        let ready = [Op::fill(0, 0, 64, 6), Op::barrier()];
        let scenario = Scenario::new(2)
            .require(|requirements| {
                requirements.queue_depth = 4;
                requirements.first_index = first_index;
            })
            .on(0, [&ready[..], &program].concat())
            .on(1, [&ready[..], &[Op::barrier()]].concat());
        run_ok(setup, &scenario)?;
    }
    Ok(())
}

fn idle_flush(setup: &Setup) -> Verdict {
    let flush = Op::flush().deadline_us(1_000_000);
    let scenario = Scenario::new(2)
        .require(|requirements| requirements.contexts = 2)
        .all(|_| vec![flush, flush.context(1), flush]);
    run_ok(setup, &scenario).map(|_| ())
}

fn counts(setup: &Setup) -> Verdict {
    let mut program: Vec<Op> = (0..20).map(|index| Op::put(1, 8).counter(index % 4)).collect();
    program.push(Op::flush());
    program.extend((0..5).map(Op::read_counter));
    let scenario = Scenario::new(2).on(0, program);
    let outcome = run_ok(setup, &scenario)?;
    for counter in 0..4 {
        outcome.check_value(&scenario, 0, 0, 21 + counter, 5)?;
    }
    outcome.check_value(&scenario, 0, 0, 25, 0)
}

fn reset_counter(setup: &Setup) -> Verdict {
    let reset = Op { counter: 1, ..Op::new(Code::ResetCounter) };
    let phase =
        [Op::put(1, 8).counter(1), Op::put(1, 8).counter(1), Op::wait_counter(1, 2), reset, Op::read_counter(1)];
    let scenario = Scenario::new(2).on(0, [phase, phase, phase].concat());
    let outcome = run_ok(setup, &scenario)?;
    for index in [4, 9, 14] {
        outcome.check_value(&scenario, 0, 0, index, 0)?;
    }
    Ok(())
}

fn signal_counter(setup: &Setup) -> Verdict {
    let scenario = Scenario::new(2)
        .on(0, vec![Op::raise(1, 0).counter(2), Op::put_value(1, 4, 9).signal(1).counter(2), Op::wait_counter(2, 2)])
        .on(1, vec![Op::wait_signal(0, 1), Op::wait_signal(1, 1)]);
    run_ok(setup, &scenario).map(|_| ())
}
