// SPDX-License-Identifier: MIT OR Apache-2.0
//! Promised orders hold on networks that delay and reorder, and flushes cover what they must.

use super::{List, Verdict, run_ok};
use crate::host::{Net, Setup};
use crate::op::{Code, Op};
use crate::scenario::{CoopKind, Scenario};
use std::vec;
use std::vec::Vec;

pub(super) fn add(list: &mut List) {
    for (name, net) in [
        ("delays", Net::Delay { ns: 30_000 }),
        ("reorders", Net::Reorder),
        ("withholds_payload", Net::Withhold),
        ("withholds_payload_and_is_late", Net::WithholdLate),
    ] {
        list.case(&std::format!("a_strong_signal_covers_all_earlier_puts_on_a_network_that_{name}"), move |setup| {
            strong(&setup.with_network(net))
        });
        list.case(&std::format!("a_strong_signal_covers_all_earlier_signals_on_a_network_that_{name}"), move |setup| {
            signals(&setup.with_network(net))
        });
        list.case(&std::format!("a_weak_signal_covers_its_own_put_on_a_network_that_{name}"), move |setup| {
            weak(&setup.with_network(net))
        });
        list.case(
            &std::format!("strong_signals_of_many_threads_stay_behind_their_blocks_puts_on_a_network_that_{name}"),
            move |setup| after_a_barrier(&setup.with_network(net)),
        );
        list.case(&std::format!("gets_and_flushes_hold_on_a_network_that_{name}"), move |setup| {
            gets(&setup.with_network(net))
        });
        list.case(&std::format!("barriers_with_fences_hold_on_a_network_that_{name}"), move |setup| {
            barriers(&setup.with_network(net))
        });
        list.case(&std::format!("counters_count_finished_reads_only_on_a_network_that_{name}"), move |setup| {
            counters(&setup.with_network(net))
        });
    }
    list.weak_case("without_strong_signals_strong_ones_are_refused_and_weak_ones_work", weak_only);
}

/// Many puts, then one strong signal. In one round the signal is part of the last put, in the next it is alone.
fn strong(setup: &Setup) -> Verdict {
    for coop in [CoopKind::Thread, CoopKind::Block] {
        let (rounds, puts, bytes) = (6u64, 8u64, 200u64);
        let (mut sender, mut receiver) = (Vec::new(), Vec::new());
        for round in 0..rounds {
            sender.push(Op::fill(0, 0, puts * bytes, round + 1));
            for put in 0..puts {
                let op = Op::put(1, bytes).from(0, put * bytes).to(1, put * bytes);
                sender.push(if round % 2 == 0 && put == puts - 1 { op.signal(0) } else { op });
            }
            if round % 2 == 1 {
                sender.push(Op::raise(1, 0));
            }
            sender.extend([Op::wait_signal(1, round + 1), Op::flush()]);
            receiver.extend([Op::wait_signal(0, round + 1), Op::check(1, 0, puts * bytes, round + 1), Op::raise(0, 1)]);
        }
        run_ok(setup, &Scenario::new(2).coop(coop).on(0, sender).on(1, receiver))?;
    }
    Ok(())
}

/// Signals with and without a put, strong and weak, then a strong one, part of a put or alone. The receiver waits for
/// the last one, and reads the others at once.
fn signals(setup: &Setup) -> Verdict {
    for coop in [CoopKind::Thread, CoopKind::Block] {
        let rounds = 6u64;
        let (mut sender, mut receiver) = (Vec::new(), Vec::new());
        for round in 0..rounds {
            let put = Op::put(1, 200).to(1, 0);
            sender.extend([Op::raise(1, 2).weak(), put.signal(3).weak(), put.to(1, 200).signal(4), Op::raise(1, 5)]);
            sender.push(if round % 2 == 0 { Op::put(1, 8).to(1, 400).signal(0) } else { Op::raise(1, 0) });
            sender.extend([Op::wait_signal(1, round + 1), Op::flush()]);
            receiver.push(Op::wait_signal(0, round + 1));
            receiver.extend([2, 3, 4, 5].map(Op::read_signal));
            receiver.push(Op::raise(0, 1));
        }
        let scenario = Scenario::new(2).coop(coop).on(0, sender).on(1, receiver);
        let outcome = run_ok(setup, &scenario)?;
        for round in 0..rounds as usize {
            for index in 1..5 {
                outcome.check_value(&scenario, 1, 0, 6 * round + index, round as u64 + 1)?;
            }
        }
    }
    Ok(())
}

fn weak(setup: &Setup) -> Verdict {
    let puts = 8;
    let mut sender = vec![Op::fill(0, 0, 1600, 5)];
    let mut receiver = Vec::new();
    for put in 0..puts {
        let place = 200 * u64::from(put);
        sender.push(Op::put(1, 200).from(0, place).to(1, place).signal(put).weak());
    }
    // Waits in the reverse order of sending.
    for put in (0..puts).rev() {
        receiver.push(Op::wait_signal(put, 1));
    }
    receiver.push(Op::check(1, 0, 1600, 5));
    run_ok(setup, &Scenario::new(2).on(0, sender).on(1, receiver))?;
    // One put after another, each compared at once.
    let (mut sender, mut receiver) = (Vec::new(), Vec::new());
    for round in 0..8 {
        sender.extend([Op::fill(0, 0, 600, round), Op::put(1, 600).signal(0).weak(), Op::wait_signal(1, round + 1)]);
        receiver.extend([Op::wait_signal(0, round + 1), Op::check(1, 0, 600, round), Op::raise(0, 1).weak()]);
    }
    run_ok(setup, &Scenario::new(2).on(0, sender).on(1, receiver)).map(|_| ())
}

/// All threads put; after a barrier of the block one thread signals for all.
fn after_a_barrier(setup: &Setup) -> Verdict {
    let threads = 40u32;
    let block_sync = Op::new(Code::BlockSync);
    let mut scenario = Scenario::new(2).shape(1, threads);
    for thread in 0..threads {
        let mut program = Vec::new();
        for round in 0..3u64 {
            let value = u64::from(thread) * 7 + round;
            program.push(Op::put_value(1, 8, value).to(1, 8 * (round * u64::from(threads) + u64::from(thread))));
            program.push(block_sync);
            program.push(if thread == 17 { Op::raise(1, 0) } else { Op::new(Code::Nop) });
        }
        scenario = scenario.on_group(0, thread, program);
    }
    // Rank 1's other threads are idle.
    let outcome = run_ok(setup, &scenario.on(1, vec![Op::wait_signal(0, 3)]))?;
    for round in 0..3u64 {
        let expected = (0..u64::from(threads)).flat_map(|thread| (thread * 7 + round).to_le_bytes());
        super::expect_bytes(&outcome, 1, 1, (8 * round * u64::from(threads)) as usize, expected)?;
    }
    Ok(())
}

fn gets(setup: &Setup) -> Verdict {
    let scenario = Scenario::new(3).all(|rank| {
        let mut program = vec![Op::fill(0, 0, 1500, u64::from(rank)), Op::barrier()];
        for round in 0..4 {
            for peer in 0..3u32 {
                program.push(Op::fill(1, 1500 * u64::from(peer), 1500, 90 + round));
                program.push(Op::get(peer, 1500).to(1, 1500 * u64::from(peer)).counter(peer));
            }
            if round % 2 == 0 {
                program.push(Op::flush());
            } else {
                program.extend((0..3).map(|peer| Op::wait_counter(peer, round + 1)));
            }
            for peer in 0..3u32 {
                program.push(Op::check(1, 1500 * u64::from(peer), 1500, u64::from(peer)));
            }
        }
        program.push(Op::barrier());
        program
    });
    run_ok(setup, &scenario).map(|_| ())
}

fn barriers(setup: &Setup) -> Verdict {
    let ranks = 3;
    let all_contexts = Op { fence: 5, ..Op::new(Code::Barrier) };
    let with_gets = Op { fence: 3, ..Op::new(Code::Barrier) };
    let scenario = Scenario::new(ranks).require(|requirements| requirements.contexts = 2).all(|rank| {
        let mut program = Vec::new();
        for round in 0..4u64 {
            let seed = 10 * round + u64::from(rank);
            program.push(Op::fill(0, 0, 300, seed));
            for peer in 0..ranks {
                let context = if round % 2 == 0 { 0 } else { peer % 2 };
                program.push(Op::put(peer, 300).to(1, 300 * u64::from(rank)).context(context));
            }
            program.push(if round % 2 == 0 { Op::barrier() } else { all_contexts });
            for peer in 0..ranks {
                program.push(Op::check(1, 300 * u64::from(peer), 300, 10 * round + u64::from(peer)));
            }
            // No rank may overwrite before all have compared, and sources must be free: own gets and puts are complete.
            program.push(Op::get((rank + 1) % ranks, 300).to(1, 2000));
            program.push(Op { context: 0, ..with_gets });
            program.push(Op::check(1, 2000, 300, 10 * round + u64::from((rank + 1) % ranks)));
            program.extend([Op::flush().context(1), Op::barrier()]);
        }
        program
    });
    run_ok(setup, &scenario).map(|_| ())
}

/// The counter rises only after the source was read, however late that is.
fn counters(setup: &Setup) -> Verdict {
    let rounds = 8;
    let (mut sender, mut receiver) = (Vec::new(), vec![Op::wait_signal(0, rounds)]);
    for round in 0..rounds {
        sender.extend([
            Op::fill(0, 0, 500, round),
            Op::put(1, 500).to(1, 500 * round).signal(0).counter(0),
            Op::wait_counter(0, round + 1),
        ]);
        receiver.push(Op::check(1, 500 * round, 500, round));
    }
    sender.push(Op::fill(0, 0, 500, 99));
    run_ok(setup, &Scenario::new(2).on(0, sender).on(1, receiver)).map(|_| ())
}

fn weak_only(setup: &Setup) -> Verdict {
    let setup = setup.with_network(Net::WeakOnly);
    let fence_none = Op { fence: 0, ..Op::new(Code::Barrier) };
    let scenario = Scenario::new(2)
        .window(2, crate::scenario::WindowSpec { bytes: vec![64, 64], signals: true, offset: 0 })
        .on(
            0,
            vec![
                Op::raise(1, 0),
                Op::put(1, 8).signal(0),
                Op::barrier(),
                Op::fill(0, 0, 64, 1),
                Op::put(1, 64).signal(0).weak(),
                Op::raise(1, 0).at_address(2, 0).weak(),
                fence_none,
            ],
        )
        .on(1, vec![Op::wait_signal(0, 1), Op::check(1, 0, 64, 1), fence_none]);
    let outcome = setup.run(&scenario)?;
    for index in [0, 1, 2] {
        outcome.check_fault(&scenario, 0, 0, index, gin_abi::FaultKind::NoStrongSignals)?;
    }
    outcome.check_fault(&scenario, 0, 0, 5, gin_abi::FaultKind::NoVaSignals)?;
    for (rank, index) in [(0, 4), (0, 6), (1, 0), (1, 1), (1, 2)] {
        outcome.check_value(&scenario, rank, 0, index, 0)?;
    }
    Ok(())
}
