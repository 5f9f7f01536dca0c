// SPDX-License-Identifier: MIT OR Apache-2.0
//! Signals: raises of every kind, bit widths, resets, shadows, words at addresses, several engines.

use super::{List, Verdict, run_ok};
use crate::host::Setup;
use crate::op::{Code, Op};
use crate::scenario::{CoopKind, Scenario, WindowSpec};
use std::vec;
use std::vec::Vec;

pub(super) fn add(list: &mut List) {
    list.per_coop("increments_and_additions_strong_and_weak_sum_up", sums);
    list.per_coop("signals_at_addresses_work_in_windows_inside_their_allocation", at_addresses);
    list.per_coop("shadows_count_what_is_expected", shadows);
    list.case("signals_of_different_ids_and_contexts_do_not_touch", apart);
    list.case("signals_can_be_reset_between_phases", resets);
    list.case("signals_at_addresses_can_be_reset_between_phases", address_resets);
    list.case("every_width_in_bits_compares_on_its_own_circle", widths);
    list.case("two_engines_raise_one_signal_and_resets_cover_both", two_engines);
    list.case("an_engine_may_keep_the_sum_of_its_raises_itself_across_resets", kept_sums);
    list.case("a_raise_after_a_reset_counts_and_is_not_undone", raised_after_reset);
    list.case("raises_from_many_ranks_and_threads_all_count", many_raisers);
    list.case("a_shadow_follows_its_signal", follow);
    list.per_coop("relaxed_waits_and_one_that_acquires_show_what_all_of_them_cover", relaxed);
}

fn sums(setup: &Setup, coop: CoopKind) -> Verdict {
    let amounts = [1, 5, 1000, 1 << 40];
    let mut sender = Vec::new();
    for amount in amounts {
        sender.extend([
            Op::raise(1, 3).add(amount),
            Op::raise(1, 3).add(amount).weak(),
            Op::put(1, 16).signal(3).add(amount),
        ]);
        sender.push(Op::put_value(1, 8, 5).signal(3).add(amount).weak());
    }
    let total = 4 * amounts.iter().sum::<u64>();
    let scenario = Scenario::new(2).coop(coop).on(0, sender).on(1, vec![Op::wait_signal(3, total), Op::read_signal(3)]);
    let outcome = run_ok(setup, &scenario)?;
    outcome.check_value(&scenario, 1, 0, 1, total)
}

/// Adds the last window, whose words are signals, with 24 bytes of its allocation before it.
fn with_signal_window(scenario: Scenario) -> Scenario {
    let bytes = vec![512; scenario.ranks as usize];
    scenario.window(2, WindowSpec { bytes, signals: true, offset: 24 })
}

fn at_addresses(setup: &Setup, coop: CoopKind) -> Verdict {
    let read = |offset| Op { signal: 0, ..Op::new(Code::ReadSignal) }.at_address(2, offset);
    let wait = |offset, least| Op::wait_signal(0, least).at_address(2, offset);
    let scenario = with_signal_window(Scenario::new(2))
        .coop(coop)
        .on(
            0,
            vec![
                Op::fill(0, 0, 300, 4),
                Op::put(1, 300).at_address(2, 8),
                Op::put(1, 300).at_address(2, 8).add(6).weak(),
                Op::put_value(1, 4, 1).at_address(2, 504),
                Op::raise(1, 0).at_address(2, 0).add(40),
            ],
        )
        .on(1, vec![wait(8, 7), wait(504, 1), wait(0, 40), read(8), read(16)]);
    let outcome = run_ok(setup, &scenario)?;
    outcome.check_value(&scenario, 1, 0, 3, 7)?;
    outcome.check_value(&scenario, 1, 0, 4, 0)?;
    super::expect_bytes(&outcome, 1, 1, 4, super::pattern(4, 300).skip(4))
}

fn shadows(setup: &Setup, coop: CoopKind) -> Verdict {
    let shadow = |value| Op { signal: 2, value, ..Op::new(Code::IncreaseShadow) };
    let meet = Op { signal: 2, ..Op::new(Code::MeetShadow) };
    let read = Op { signal: 2, ..Op::new(Code::ReadShadow) };
    let scenario = Scenario::new(2).coop(coop).all(|rank| {
        let peer = 1 - rank;
        vec![
            Op::put(peer, 8).signal(2).add(3),
            shadow(3),
            meet,
            read,
            Op::put(peer, 8).signal(2),
            shadow(1),
            meet,
            read,
            Op::barrier(),
            Op::reset_signal(2),
            read,
            meet,
        ]
    });
    let outcome = run_ok(setup, &scenario)?;
    for rank in 0..2 {
        for (index, value) in [(3, 3), (7, 4), (10, 0)] {
            outcome.check_value(&scenario, rank, 0, index, value)?;
        }
    }
    Ok(())
}

fn follow(setup: &Setup) -> Verdict {
    for coop in [CoopKind::Thread, CoopKind::Tile, CoopKind::Lanes, CoopKind::Span, CoopKind::Block] {
        let follow = |delta| Op { signal: 1, value: delta, ..Op::new(Code::FollowShadow) };
        let scenario = Scenario::new(2)
            .coop(coop)
            .on(0, vec![Op::raise(1, 1).add(10), Op::wait_signal(0, 1), Op::raise(1, 1).add(7)])
            .on(
                1,
                vec![
                    follow(4),
                    Op { signal: 1, ..Op::new(Code::ReadShadow) },
                    Op::raise(0, 0),
                    follow(1),
                    // The shadow is 17 now; no further raise follows.
                    follow(1).deadline_us(50),
                    Op { signal: 1, ..Op::new(Code::ReadShadow) },
                ],
            );
        let outcome = setup.run(&scenario)?;
        outcome.check_agreement(&scenario)?;
        outcome.each(&scenario, 1, 0, 0, |entry| {
            if (entry.value, entry.second) == (0, 10) { Ok(()) } else { Err("expected before 0 and delta 10".into()) }
        })?;
        outcome.check_value(&scenario, 1, 0, 1, 10)?;
        outcome.each(&scenario, 1, 0, 3, |entry| {
            if (entry.value, entry.second) == (10, 7) { Ok(()) } else { Err("expected before 10 and delta 7".into()) }
        })?;
        outcome.check_fault(&scenario, 1, 0, 4, gin_abi::FaultKind::Timeout)?;
        outcome.check_value(&scenario, 1, 0, 5, 17)?;
    }
    Ok(())
}

fn apart(setup: &Setup) -> Verdict {
    let (contexts, signals) = (3, 8);
    let amount = |context: u32, signal: u32| u64::from(context * 100 + signal + 1);
    let mut sender = Vec::new();
    let mut receiver = Vec::new();
    for context in 0..contexts {
        for signal in 0..signals {
            sender.push(Op::raise(1, signal).add(amount(context, signal)).context(context));
            receiver.push(Op::wait_signal(signal, 1).context(context));
            receiver.push(Op::read_signal(signal).context(context));
        }
    }
    let scenario =
        Scenario::new(2).require(|requirements| requirements.contexts = contexts).on(0, sender).on(1, receiver);
    let outcome = run_ok(setup, &scenario)?;
    for context in 0..contexts {
        for signal in 0..signals {
            let index = 2 * (context * signals + signal) as usize + 1;
            outcome.check_value(&scenario, 1, 0, index, amount(context, signal))?;
        }
    }
    Ok(())
}

fn resets(setup: &Setup) -> Verdict {
    let scenario = Scenario::new(2).all(|rank| {
        let mut program = Vec::new();
        for round in 0..5 {
            program.extend([
                Op::put(1 - rank, 32).signal(4).add(round + 2),
                Op::wait_signal(4, round + 2),
                Op::read_signal(4),
                Op::barrier(),
                Op::reset_signal(4),
                Op::read_signal(4),
                Op::barrier(),
            ]);
        }
        program
    });
    let outcome = run_ok(setup, &scenario)?;
    for rank in 0..2 {
        for round in 0..5 {
            outcome.check_value(&scenario, rank, 0, 7 * round + 2, round as u64 + 2)?;
            outcome.check_value(&scenario, rank, 0, 7 * round + 5, 0)?;
        }
    }
    Ok(())
}

fn address_resets(setup: &Setup) -> Verdict {
    let at = |op: Op| op.at_address(2, 40);
    let scenario = with_signal_window(Scenario::new(2)).all(|rank| {
        let mut program = Vec::new();
        for round in 1..5 {
            program.extend([
                at(Op::put(1 - rank, 32)).add(round),
                at(Op::wait_signal(0, round)),
                at(Op::read_signal(0)),
                Op::barrier(),
                at(Op::reset_signal(0)),
                at(Op::read_signal(0)),
                Op::barrier(),
            ]);
        }
        program
    });
    let outcome = run_ok(setup, &scenario)?;
    for round in 1..5 {
        outcome.check_value(&scenario, 0, 0, 7 * (round - 1) + 2, round as u64)?;
        outcome.check_value(&scenario, 0, 0, 7 * (round - 1) + 5, 0)?;
    }
    Ok(())
}

/// For each width: raises in steps of a third of the circle, so that the value passes the whole circle more than once.
fn widths(setup: &Setup) -> Verdict {
    for bits in [1, 2, 3, 8, 16, 23, 32, 56, 63, 64] {
        let mask = gin_abi::mask(bits);
        // A waiter may be at most half a circle behind.
        let step = (mask / 3).max(1);
        let (mut sender, mut receiver) = (Vec::new(), Vec::new());
        for round in 1..8u64 {
            let value = round.wrapping_mul(step) & mask;
            sender.extend([Op::raise(1, 0).add(step), Op::wait_signal(7, round)]);
            receiver.extend([Op::wait_signal(0, value).bits(bits), Op::read_signal(0).bits(bits), Op::raise(0, 7)]);
        }
        let scenario = Scenario::new(2).on(0, sender).on(1, receiver);
        let outcome = run_ok(setup, &scenario)?;
        for round in 1..8u64 {
            let index = 3 * (round as usize - 1) + 1;
            outcome.check_value(&scenario, 1, 0, index, round.wrapping_mul(step) & mask)?;
        }
    }
    Ok(())
}

fn two_engines(setup: &Setup) -> Verdict {
    let by_gpu = |peer, amount| Op { peer, signal: 1, amount, ..Op::new(Code::RaiseByGpu) };
    let scenario = Scenario::new(2).all(|rank| {
        let peer = 1 - rank;
        let mut program = Vec::new();
        for round in 1..6 {
            program.extend([
                by_gpu(peer, round),
                Op::raise(peer, 1).add(10 * round),
                by_gpu(peer, round),
                Op::wait_signal(1, 12 * round),
                Op::read_signal(1),
                Op::barrier(),
                Op::reset_signal(1),
                Op::read_signal(1),
                Op::barrier(),
            ]);
        }
        program
    });
    let outcome = run_ok(setup, &scenario)?;
    for round in 1..6 {
        outcome.check_value(&scenario, 0, 0, 9 * (round - 1) + 4, 12 * round as u64)?;
        outcome.check_value(&scenario, 1, 0, 9 * (round - 1) + 7, 0)?;
    }
    Ok(())
}

/// Two puts, each with a signal, and a get: the last of the waits acquires for all.
fn relaxed(setup: &Setup, coop: CoopKind) -> Verdict {
    let len = 700;
    let scenario = Scenario::new(3).coop(coop).all(|rank| {
        let (left, right) = ((rank + 2) % 3, (rank + 1) % 3);
        let own = u64::from(rank);
        vec![
            Op::fill(0, 0, len, 50 + own),
            Op::barrier().fence(1),
            Op::put(left, len).to(1, 0).signal(0).counter(0),
            Op::put(right, len).to(1, len).signal(1).counter(1),
            Op::get(left, len).to(1, 2 * len),
            Op::wait_signal(0, 1).relaxed(),
            Op::wait_counter(0, 1).relaxed(),
            Op::wait_counter(1, 1).relaxed(),
            Op::read_signal(0).relaxed(),
            Op::read_counter(0).relaxed(),
            Op::flush().relaxed(),
            Op::wait_signal(1, 1),
            Op::check(1, 0, len, 50 + u64::from(right)),
            Op::check(1, len, len, 50 + u64::from(left)),
            Op::check(1, 2 * len, len, 50 + u64::from(left)),
        ]
    });
    let outcome = run_ok(setup, &scenario)?;
    for rank in 0..3 {
        outcome.check_value(&scenario, rank, 0, 8, 1)?;
        outcome.check_value(&scenario, rank, 0, 9, 1)?;
    }
    Ok(())
}

/// A reset that reached the word late would undo later raises.
fn raised_after_reset(setup: &Setup) -> Verdict {
    let rounds = 4;
    // Long after the raise, also on a real clock.
    let patience = if setup.seed.is_some() { 1_000_000 } else { 10_000_000_000 };
    let (mut raiser, mut waiter) = (Vec::new(), Vec::new());
    for round in 1..=rounds {
        raiser.extend([Op::raise(1, 0), Op::wait_signal(1, 2 * round - 1), Op::raise(1, 0).add(round)]);
        raiser.push(Op::wait_signal(1, 2 * round));
        waiter.extend([
            Op::wait_signal(0, 1),
            Op::reset_signal(0),
            Op::raise(0, 1),
            Op { deadline: patience, ..Op::wait_signal(0, round) },
            Op::pause(20_000),
            Op::read_signal(0),
            Op::reset_signal(0),
            Op::raise(0, 1),
        ]);
    }
    let scenario = Scenario::new(2).on(0, raiser).on(1, waiter);
    let outcome = setup.run(&scenario)?;
    for round in 1..=rounds {
        outcome.check_value(&scenario, 1, 0, 8 * (round as usize - 1) + 5, round)?;
    }
    outcome.check_ok(&scenario)
}

/// Only its own engine stores to a word, so an engine may write the sum of its raises, which only grows.
fn kept_sums(setup: &Setup) -> Verdict {
    let scenario = Scenario::new(2).all(|rank| {
        let peer = 1 - rank;
        let (mut program, mut total) = (Vec::new(), 0);
        for round in 1..6 {
            total += 3 * round;
            program.extend([
                Op { peer, signal: 1, value: total, ..Op::new(Code::WriteTotal) },
                Op::raise(peer, 1).add(10 * round).route(3),
                Op::wait_signal(1, 13 * round),
                Op::read_signal(1),
                Op::barrier(),
                Op::reset_signal(1),
                Op::read_signal(1),
                Op::barrier(),
            ]);
        }
        program
    });
    let outcome = run_ok(setup, &scenario)?;
    for rank in 0..2 {
        for round in 1..6 {
            outcome.check_value(&scenario, rank, 0, 8 * (round - 1) + 3, 13 * round as u64)?;
            outcome.check_value(&scenario, rank, 0, 8 * (round - 1) + 6, 0)?;
        }
    }
    Ok(())
}

fn many_raisers(setup: &Setup) -> Verdict {
    let (ranks, threads) = (4, 24);
    let mut scenario = Scenario::new(ranks).shape(1, threads);
    for rank in 0..ranks {
        for thread in 0..threads {
            let put = Op { offset: u64::from(rank * threads + thread), ..Op::put_value(0, 1, 1) };
            scenario = scenario.on_group(rank, thread, vec![Op::raise(0, 5), put.signal(5).add(2)]);
        }
    }
    let total = u64::from(3 * ranks * threads);
    // A superfluous raise may arrive later.
    let after = Op::pause(setup.scaled(50_000));
    scenario.programs[0][0].1.extend([Op::wait_signal(5, total), after, Op::read_signal(5)]);
    let outcome = run_ok(setup, &scenario)?;
    outcome.check_value(&scenario, 0, 0, 4, total)
}
