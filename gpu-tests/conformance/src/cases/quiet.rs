// SPDX-License-Identifier: MIT OR Apache-2.0
//! Puts have arrived when a quiet returns, and a signal of all contexts covers the puts of all contexts.
//!
//! The receiver learns of a quiet by a raise of GPUs, or by a signal of another context. The raise tells its proxy
//! nothing, so a payload that a network withholds stays out of view if the quiet has not brought it there.

use super::completion::FOREVER;
use super::{List, Verdict, run_ok};
use crate::host::{Failure, How, Net, Setup};
use crate::op::{Code, Op};
use crate::scenario::{CoopKind, Scenario};
use gin_abi::FaultKind;
use std::vec;
use std::vec::Vec;

pub(super) fn add(list: &mut List) {
    for (name, net) in [
        ("delays", Net::Delay { ns: 30_000 }),
        ("reorders", Net::Reorder),
        ("withholds_payload", Net::Withhold),
        ("withholds_payload_and_is_late", Net::WithholdLate),
        ("does_its_worst", Net::Worst),
        ("stages", Net::Staged),
    ] {
        list.case(&std::format!("puts_have_arrived_after_a_quiet_on_a_network_that_{name}"), move |setup| {
            arrived(&setup.with_network(net), true)
        });
        list.case(&std::format!("puts_to_all_have_arrived_after_a_quiet_on_a_network_that_{name}"), move |setup| {
            all_arrived(&setup.with_network(net))
        });
        list.case(&std::format!("a_signal_of_all_contexts_covers_all_on_a_network_that_{name}"), move |setup| {
            all_contexts(&setup.with_network(net))
        });
    }
    list.case("after_a_quiet_a_signal_of_another_context_covers_the_puts", |setup| arrived(setup, false));
    list.case("after_a_barrier_of_the_block_a_quiet_covers_the_puts_of_its_threads", puts_of_many_threads);
    list.case("a_quiet_with_nothing_outstanding_returns_at_once_and_needs_no_signals", idle);
    list.network_case("a_quiet_waits_for_its_peer_only_and_ends_at_its_deadline", slow_peer);
    list.network_case("a_quiet_reports_the_fault_of_a_failed_put", failed);
    list.case("a_quiet_of_an_unknown_context_is_refused", unknown_context);
}

/// The route by loads and stores, and that over the network.
const LSA: u32 = 2;
const NETWORK: u32 = 3;

/// Puts of several kinds to rank 1 at offset 0 of window 1: 1000 bytes of the pattern that window 0 has, by route.
fn puts(route: u32) -> Vec<Op> {
    vec![
        Op::put(1, 600).route(route),
        Op::put(1, 300).from(0, 600).to(1, 600).route(route).more(),
        Op::put(1, 100).from(0, 900).to(1, 900).signal(7).weak().route(route),
        Op::put(1, 0).route(route),
    ]
}

/// Compares many rounds, each at once. `lsa`: the receiver learns by a raise of GPUs; otherwise by another context.
fn arrived(setup: &Setup, lsa: bool) -> Verdict {
    for coop in [CoopKind::Thread, CoopKind::Block] {
        let (mut sender, mut receiver) = (Vec::new(), Vec::new());
        for round in 0..6 {
            let route = match (lsa, round % 3) {
                (true, 2) => LSA,
                (true, _) => NETWORK,
                (false, _) => 0,
            };
            sender.push(Op::fill(0, 0, 1000, round));
            sender.extend(puts(route));
            sender.push(Op::quiet(1).route(route));
            // The source may be reused, too.
            sender.push(Op::fill(0, 0, 1000, 99));
            sender.push(if lsa { Op::raise(1, 0).route(LSA) } else { Op::raise(1, 0).weak().context(1) });
            sender.push(Op::wait_signal(1, round + 1));
            let heard = Op::wait_signal(0, round + 1);
            receiver.push(if lsa { heard } else { heard.context(1) });
            receiver.extend([Op::check(1, 0, 1000, round), Op::raise(0, 1)]);
        }
        let scenario = Scenario::new(2).coop(coop).require(|requirements| requirements.contexts = 2);
        run_ok(setup, &scenario.on(0, sender).on(1, receiver))?;
    }
    Ok(())
}

fn all_arrived(setup: &Setup) -> Verdict {
    let ranks = 3;
    let scenario = Scenario::new(ranks).all(|rank| {
        let mut program = Vec::new();
        for round in 0..4 {
            let place = 400 * u64::from(rank);
            program.push(Op::fill(0, 0, 400, 10 * round + u64::from(rank)));
            program.extend((0..ranks).map(|peer| Op::put(peer, 400).to(1, place).route(NETWORK)));
            program.push(Op::quiet_all());
            program.extend((0..ranks).map(|peer| Op::raise(peer, 0).route(LSA)));
            program.push(Op::wait_signal(0, u64::from(ranks) * (round + 1)));
            for peer in 0..ranks {
                program.push(Op::check(1, 400 * u64::from(peer), 400, 10 * round + u64::from(peer)));
            }
            program.push(Op::barrier());
        }
        program
    });
    run_ok(setup, &scenario).map(|_| ())
}

/// Puts in each of three contexts, by both routes, and a signal in each context in turn.
fn all_contexts(setup: &Setup) -> Verdict {
    let contexts = 3u32;
    for coop in [CoopKind::Thread, CoopKind::Block] {
        let (mut sender, mut receiver) = (Vec::new(), Vec::new());
        for round in 0..6u64 {
            let own = (round % 3) as u32;
            sender.push(Op::fill(0, 0, 900, round));
            for context in 0..contexts {
                let place = 300 * u64::from(context);
                let put = Op::put(1, 150).from(0, place).to(1, place).context(context);
                sender.push(put.route(NETWORK));
                sender.push(put.from(0, place + 150).to(1, place + 150).route(if context == 1 {
                    LSA
                } else {
                    NETWORK
                }));
            }
            sender.push(Op::signal_all_contexts(1, 0).context(own));
            sender.push(Op::wait_signal(1, round + 1));
            sender.extend((0..contexts).map(|context| Op::flush().context(context)));
            receiver.push(Op::wait_signal(0, round / 3 + 1).context(own));
            receiver.extend([Op::check(1, 0, 900, round), Op::raise(0, 1)]);
        }
        let scenario = Scenario::new(2).coop(coop).require(|requirements| requirements.contexts = 3);
        run_ok(setup, &scenario.on(0, sender).on(1, receiver))?;
    }
    Ok(())
}

fn puts_of_many_threads(setup: &Setup) -> Verdict {
    let threads = 40u32;
    let mut scenario = Scenario::new(2).shape(1, threads);
    for thread in 0..threads {
        let value = u64::from(thread) * 9 + 1;
        let mut program =
            vec![Op::put_value(1, 8, value).to(1, 8 * u64::from(thread)).route(NETWORK), Op::block_sync()];
        program.extend(match thread {
            21 => [Op::quiet(1), Op::raise(1, 0).route(LSA)],
            _ => [Op::nop(); 2],
        });
        scenario = scenario.on_group(0, thread, program);
    }
    // Compares in the kernel: the host would see bytes that arrive later.
    let mut receiver = vec![Op::wait_signal(0, 1)];
    let read = Op { bytes: 8, ..Op::new(Code::Read) };
    receiver.extend((0..threads).map(|thread| read.to(1, 8 * u64::from(thread))));
    let scenario = scenario.on(1, receiver);
    let outcome = run_ok(setup, &scenario)?;
    for thread in 0..threads as usize {
        outcome.check_value(&scenario, 1, 0, 1 + thread, thread as u64 * 9 + 1)?;
    }
    Ok(())
}

fn idle(setup: &Setup) -> Verdict {
    let at_once = |op: Op| op.deadline_us(1_000_000);
    let scenario = Scenario::new(2)
        .require(|requirements| {
            requirements.contexts = 2;
            requirements.signals = 0;
            requirements.world_barriers = 0;
            requirements.rail_barriers = 0;
            requirements.lsa_barriers = 0;
        })
        .all(|rank| {
            let quiets = [Op::quiet(1 - rank), Op::quiet_all(), Op::quiet(rank).context(1), Op::quiet_all()];
            quiets.map(at_once).to_vec()
        });
    run_ok(setup, &scenario).map(|_| ())
}

/// Puts to rank 2 never arrive; a quiet of rank 1 does not wait for them.
fn slow_peer(setup: &Setup) -> Verdict {
    let setup = setup.with_network(Net::SlowPeer { rank: 2, ns: FOREVER });
    let program = vec![
        Op::fill(0, 0, 64, 3),
        Op::put(2, 64),
        Op::put(1, 64),
        Op::quiet(1),
        Op::quiet(2).deadline_us(10),
        Op::quiet_all().deadline_us(10),
        Op::signal_all_contexts(2, 0).context(1).deadline_us(10),
        Op::report(1),
    ];
    let scenario = Scenario::new(3).require(|requirements| requirements.contexts = 2).on(0, program);
    let outcome = setup.run(&scenario)?;
    for index in [4, 5, 6] {
        outcome.check_fault(&scenario, 0, 0, index, FaultKind::Timeout)?;
    }
    for index in [0, 1, 2, 3, 7] {
        outcome.check_value(&scenario, 0, 0, index, 0)?;
    }
    Ok(())
}

fn failed(setup: &Setup) -> Verdict {
    let setup = setup.with_network(Net::Fail(Failure { from: 0, number: 1, how: How::Error }));
    for quiet in [Op::quiet(1), Op::quiet_all(), Op::signal_all_contexts(1, 0).context(1)] {
        let program = vec![Op::put(1, 64), Op::put(1, 64).to(1, 64), quiet];
        let scenario = Scenario::new(2).require(|requirements| requirements.contexts = 2).on(0, program);
        let outcome = setup.run(&scenario)?;
        outcome.check_fault(&scenario, 0, 0, 2, FaultKind::Network)?;
    }
    Ok(())
}

fn unknown_context(setup: &Setup) -> Verdict {
    let of = |op: Op| op.context(5);
    let program = vec![of(Op::quiet(1)), of(Op::quiet_all()), of(Op::signal_all_contexts(1, 0))];
    let scenario = Scenario::new(2).on(0, program);
    let outcome = setup.run(&scenario)?;
    (0..3).try_for_each(|index| outcome.check_fault(&scenario, 0, 0, index, FaultKind::UnknownContext))
}
