// SPDX-License-Identifier: MIT OR Apache-2.0
//! Corner cases: empty transfers, the rank itself as peer, many windows, sharing modes in turn, conditions that hold
//! already.

use super::{List, Verdict, expect_bytes, pattern, run_ok};
use crate::host::{Net, Setup};
use crate::op::{Code, Op};
use crate::scenario::{CoopKind, Scenario, WindowSpec};
use gin_abi::FaultKind;
use std::vec;
use std::vec::Vec;

pub(super) fn add(list: &mut List) {
    list.per_coop("empty_transfers_signal_and_count_like_others", empty);
    list.per_coop("a_rank_is_its_own_peer_in_every_operation", to_itself);
    list.per_coop("a_wait_whose_condition_holds_succeeds_with_a_deadline_of_0", met_already);
    list.case("the_strong_signal_of_an_empty_put_covers_earlier_puts", empty_covers);
    list.case("a_window_is_source_and_destination_at_different_offsets", one_window);
    list.case("64_windows_are_distinct", windows);
    list.case("signals_at_addresses_are_checked_against_the_length_of_the_addressed_rank", address_lengths);
    list.case("sharing_modes_may_follow_each_other_on_one_context", sharing_in_turn);
    list.network_case("queues_of_1_and_2_slots_fill_up_in_every_sharing_mode", sharing_full);
    list.case("threads_of_one_warp_post_to_different_contexts_at_once", contexts_of_a_warp);
    list.network_case("threads_of_one_warp_post_with_and_without_deadlines_at_once", deadlines_of_a_warp);
    list.case("every_scope_of_release_carries_the_payload", scopes);
}

fn signal_window(ranks: usize) -> WindowSpec {
    WindowSpec { bytes: vec![128; ranks], signals: true, offset: 8 }
}

fn empty(setup: &Setup, coop: CoopKind) -> Verdict {
    let end = 16 << 10;
    let scenario = Scenario::new(2)
        .coop(coop)
        .window(2, signal_window(2))
        .on(
            0,
            vec![
                Op::put(1, 0).signal(0).counter(0),
                Op::put(1, 0).to(1, end).from(0, end).signal(1).add(5).weak().counter(0),
                Op::put(1, 0).at_address(2, 24).add(9).counter(0),
                Op::put(1, 0).counter(0),
                Op::get(1, 0).from(0, end).to(1, end).counter(0),
                Op::put(1, 0),
                Op::get(1, 0),
                Op::wait_counter(0, 5),
                Op::flush(),
                Op::read_counter(0),
                Op::put(1, 0).to(1, end + 1),
            ],
        )
        .on(
            1,
            vec![
                Op::wait_signal(0, 1),
                Op::wait_signal(1, 5),
                Op::wait_signal(0, 9).at_address(2, 24),
                Op::read_signal(0),
                Op::read_signal(1),
                Op::read_signal(0).at_address(2, 24),
            ],
        );
    let outcome = setup.run(&scenario)?;
    outcome.check_agreement(&scenario)?;
    for (index, value) in [0, 0, 0, 0, 0, 0, 0, 0, 0, 5].into_iter().enumerate() {
        outcome.check_value(&scenario, 0, 0, index, value)?;
    }
    outcome.check_fault(&scenario, 0, 0, 10, FaultKind::OutOfRange)?;
    for (index, value) in [0, 0, 0, 1, 5, 9].into_iter().enumerate() {
        outcome.check_value(&scenario, 1, 0, index, value)?;
    }
    expect_bytes(&outcome, 1, 1, 0, [0; 64])
}

fn empty_covers(setup: &Setup) -> Verdict {
    for net in [Net::Reorder, Net::Delay { ns: 20_000 }, Net::Withhold] {
        let setup = setup.with_network(net);
        let (mut sender, mut receiver) = (Vec::new(), Vec::new());
        for round in 0..5u64 {
            sender.push(Op::fill(0, 0, 800, round));
            sender.extend((0..8).map(|part| Op::put(1, 100).from(0, 100 * part).to(1, 100 * part)));
            sender.extend([Op::put(1, 0).signal(0), Op::flush(), Op::wait_signal(1, round + 1)]);
            receiver.extend([Op::wait_signal(0, round + 1), Op::check(1, 0, 800, round), Op::put(0, 0).signal(1)]);
        }
        run_ok(&setup, &Scenario::new(2).on(0, sender).on(1, receiver))?;
    }
    Ok(())
}

fn to_itself(setup: &Setup, coop: CoopKind) -> Verdict {
    let scenario = Scenario::new(2).coop(coop).window(2, signal_window(2)).all(|me| {
        vec![
            Op::fill(0, 0, 600, u64::from(me)),
            Op::put(me, 600).signal(0).counter(0),
            Op::put_value(me, 4, 77).to(1, 1000).signal(0).weak().counter(0),
            Op::raise(me, 0).add(3),
            Op::raise(me, 0).at_address(2, 16).add(4),
            Op::wait_counter(0, 2),
            Op::wait_signal(0, 5),
            Op::read_signal(0),
            Op::check(1, 0, 600, u64::from(me)),
            Op::wait_signal(0, 4).at_address(2, 16),
            Op::get(me, 600).from(1, 0).to(1, 2000).counter(1),
            Op::flush_async(me),
            Op::wait_token(),
            Op::check(1, 2000, 600, u64::from(me)),
            Op::read_counter(1),
            Op { signal: 0, value: 5, ..Op::new(Code::IncreaseShadow) },
            Op { signal: 0, ..Op::new(Code::MeetShadow) },
            Op::flush(),
            Op::barrier(),
            Op::reset_signal(0),
            Op::read_signal(0),
        ]
    });
    let outcome = run_ok(setup, &scenario)?;
    for rank in 0..2 {
        for (index, value) in [(7, 5), (14, 1), (20, 0)] {
            outcome.check_value(&scenario, rank, 0, index, value)?;
        }
        expect_bytes(&outcome, rank, 1, 1000, [77, 0, 0, 0])?;
    }
    Ok(())
}

fn met_already(setup: &Setup, coop: CoopKind) -> Verdict {
    let now = |op: Op| op.deadline_us(0);
    let scenario = Scenario::new(2).coop(coop).window(2, signal_window(2)).all(|rank| {
        let peer = 1 - rank;
        vec![
            Op::put(peer, 100).signal(0).counter(0),
            Op::raise(peer, 0).at_address(2, 0),
            Op::wait_signal(0, 1),
            Op::wait_signal(0, 1).at_address(2, 0),
            Op::flush(),
            now(Op::wait_signal(0, 1)),
            now(Op::wait_signal(0, 0)),
            now(Op::wait_signal(0, 1).bits(5)),
            now(Op::wait_signal(0, 1).at_address(2, 0)),
            now(Op::wait_counter(0, 1)),
            now(Op { signal: 0, ..Op::new(Code::MeetShadow) }),
            now(Op { signal: 0, value: 1, ..Op::new(Code::FollowShadow) }),
            now(Op::flush()),
            now(Op::put(peer, 1)),
            Op::flush_async(peer),
            Op::flush(),
            now(Op::wait_token()),
            Op::barrier(),
        ]
    });
    run_ok(setup, &scenario).map(|_| ())
}

/// Both ranks write to each other's window, each where the other does not read.
fn one_window(setup: &Setup) -> Verdict {
    let scenario = Scenario::new(2).all(|rank| {
        let peer = 1 - rank;
        vec![
            Op::fill(0, 0, 1000, u64::from(rank)),
            Op::barrier(),
            Op::put(peer, 990).to(0, 2003).from(0, 5).signal(0),
            Op::get(peer, 990).to(0, 4001).from(0, 7),
            Op::flush(),
            Op::wait_signal(0, 1),
            Op::check_from(0, 2003, 990, u64::from(peer), 5),
            Op::check_from(0, 4001, 990, u64::from(peer), 7),
            Op::check(0, 0, 1000, u64::from(rank)),
            Op::barrier(),
        ]
    });
    run_ok(setup, &scenario).map(|_| ())
}

fn windows(setup: &Setup) -> Verdict {
    let count = 64;
    let mut scenario = Scenario::new(2);
    for index in 0..count {
        let bytes = 64 + 8 * index as u64;
        scenario = scenario.window(index, WindowSpec { bytes: vec![bytes; 2], signals: false, offset: 0 });
    }
    let scenario = scenario.all(|rank| {
        let mut program = Vec::new();
        for index in 0..count as u32 / 2 {
            let seed = u64::from(1000 * rank + index);
            program.push(Op::fill(index, 0, 64, seed));
            program.push(Op::put(1 - rank, 64).from(index, 0).to(count as u32 - 1 - index, 8 * u64::from(index % 3)));
        }
        program.push(Op::barrier());
        program
    });
    let outcome = run_ok(setup, &scenario)?;
    for rank in 0..2u32 {
        for index in 0..count / 2 {
            let offset = 8 * (index % 3);
            expect_bytes(
                &outcome,
                rank,
                count - 1 - index,
                offset,
                pattern(u64::from(1000 * (1 - rank)) + index as u64, 64),
            )?;
            expect_bytes(&outcome, rank, count - 1 - index, offset + 64, vec![0; 8])?;
        }
    }
    Ok(())
}

fn address_lengths(setup: &Setup) -> Verdict {
    let at = |peer, offset| Op::raise(peer, 0).at_address(2, offset);
    let scenario = Scenario::new(3)
        .window(2, WindowSpec { bytes: vec![64, 8, 512], signals: true, offset: 16 })
        .on(
            0,
            vec![
                at(1, 0),
                at(2, 504),
                at(0, 56),
                at(1, 8),
                at(2, 512),
                at(0, 64),
                Op::put(1, 8).at_address(2, 16),
                Op::read_signal(0).at_address(2, 64),
                Op::wait_signal(0, 1).at_address(2, 504),
                Op::wait_signal(0, 1).at_address(2, 56),
            ],
        )
        .on(1, vec![Op::wait_signal(0, 1).at_address(2, 0), Op::read_signal(0).at_address(2, 8)])
        .on(2, vec![Op::wait_signal(0, 1).at_address(2, 504), Op::read_signal(0).at_address(2, 56)]);
    let outcome = setup.run(&scenario)?;
    for index in [0, 1, 2, 9] {
        outcome.check_value(&scenario, 0, 0, index, 0)?;
    }
    for (rank, index) in [(0, 3), (0, 4), (0, 5), (0, 6), (0, 7), (0, 8), (1, 1)] {
        outcome.check_fault(&scenario, rank, 0, index, FaultKind::OutOfRange)?;
    }
    for (rank, index) in [(1, 0), (2, 0), (2, 1)] {
        outcome.check_value(&scenario, rank, 0, index, 0)?;
    }
    Ok(())
}

/// Thread 0 alone, then the block, then every thread, then thread 0 again, with a barrier of the block between them.
fn sharing_in_turn(setup: &Setup) -> Verdict {
    let threads = 24;
    let turns = [2u32, 1, 0, 2, 0, 1];
    let mut scenario = Scenario::new(2).shape(1, threads).require(|requirements| requirements.queue_depth = 4);
    for thread in 0..threads {
        let mut program = Vec::new();
        for (turn, sharing) in turns.into_iter().enumerate() {
            let place = 8 * u64::from(threads * turn as u32 + thread);
            let put = Op::put_value(1, 8, place + 1).to(1, place).signal(0).sharing(sharing);
            program.push(if sharing == 2 && thread != 0 { Op::nop() } else { put });
            program.push(Op::block_sync());
        }
        scenario = scenario.on_group(0, thread, program);
    }
    let posted = |turn: usize, thread: u32| turns[turn] != 2 || thread == 0;
    let slots: Vec<(u64, bool)> = (0..turns.len())
        .flat_map(|turn| {
            (0..threads).map(move |thread| (u64::from(threads * turn as u32 + thread), posted(turn, thread)))
        })
        .collect();
    let total = slots.iter().filter(|(_, posted)| *posted).count() as u64;
    let scenario = scenario.on(1, vec![Op::wait_signal(0, total), Op::read_signal(0)]);
    let outcome = run_ok(setup, &scenario)?;
    outcome.check_value(&scenario, 1, 0, 1, total)?;
    let expected = slots.into_iter().flat_map(|(slot, posted)| if posted { 8 * slot + 1 } else { 0 }.to_le_bytes());
    expect_bytes(&outcome, 1, 1, 0, expected)
}

fn sharing_full(setup: &Setup) -> Verdict {
    for (depth, sharing) in [(1, 0), (2, 0), (1, 1), (2, 1), (1, 2), (2, 2)] {
        let (threads, each) = (if sharing == 2 { 1 } else { 40 }, 6);
        let mut scenario = Scenario::new(2).shape(1, threads).require(|requirements| {
            requirements.queue_depth = depth;
            requirements.max_outstanding_per_peer = 2;
        });
        for thread in 0..threads {
            let slots = (0..each).map(|index| 8 * u64::from(thread * each + index));
            let puts =
                slots.map(|place| Op::put_value(1, 8, place ^ 5).to(1, place).signal(0).counter(0).sharing(sharing));
            scenario =
                scenario.on_group(0, thread, puts.chain([Op::flush().sharing(sharing), Op::block_sync()]).collect());
        }
        let total = u64::from(threads * each);
        scenario.programs[0][0].1.push(Op::read_counter(0));
        let scenario = scenario.on(1, vec![Op::wait_signal(0, total)]);
        let outcome = run_ok(setup, &scenario)?;
        outcome.check_value(&scenario, 0, 0, each as usize + 2, total)?;
        expect_bytes(&outcome, 1, 1, 0, (0..total).flat_map(|slot| ((8 * slot) ^ 5).to_le_bytes()))?;
    }
    Ok(())
}

/// Neighbouring threads claim slots in different queues.
fn contexts_of_a_warp(setup: &Setup) -> Verdict {
    let (contexts, threads, each) = (5, 64, 4);
    for sharing in [0, 1] {
        let mut scenario = Scenario::new(2).shape(1, threads).require(|requirements| {
            requirements.contexts = contexts;
            requirements.queue_depth = 4;
        });
        for thread in 0..threads {
            let mut program = Vec::new();
            for index in 0..each {
                let slot = u64::from(thread * each + index);
                let put = Op::put_value(1, 8, slot + 7).to(1, 8 * slot).signal(0).counter(1);
                program.push(put.context((thread + index) % contexts).sharing(sharing));
            }
            program.extend([Op::block_sync(), Op::flush().context(thread % contexts), Op::block_sync()]);
            scenario = scenario.on_group(0, thread, program);
        }
        let posts = |context| {
            (0..threads * each).filter(|post| (post / each + post % each) % contexts == context).count() as u64
        };
        scenario.programs[0][0].1.extend((0..contexts).map(|context| Op::read_counter(1).context(context)));
        let waits = (0..contexts).map(|context| Op::wait_signal(0, posts(context)).context(context)).collect();
        let scenario = scenario.on(1, waits);
        let outcome = run_ok(setup, &scenario)?;
        for context in 0..contexts {
            outcome.check_value(&scenario, 0, 0, (each + 3 + context) as usize, posts(context))?;
        }
        let expected = (0..u64::from(threads * each)).flat_map(|slot| (slot + 7).to_le_bytes());
        expect_bytes(&outcome, 1, 1, 0, expected)?;
    }
    Ok(())
}

/// The queue stays full: threads with a deadline get a timeout and leave no hole, the others wait.
fn deadlines_of_a_warp(setup: &Setup) -> Verdict {
    let setup = setup.with_network(Net::SlowPeer { rank: 1, ns: super::completion::FOREVER });
    let (threads, room) = (32, setup.small_room());
    for with in [0, 1] {
        let mut scenario = Scenario::new(2).shape(1, threads).require(|requirements| {
            requirements.queue_depth = 2;
            requirements.max_outstanding_per_peer = 1;
        });
        for thread in 0..threads {
            let put = Op::put_value(1, 8, 1).to(1, 8 * u64::from(thread));
            let mine = if thread % 2 == with { put.deadline_us(setup.scaled(20)) } else { put };
            // The last thread to time out ends the others.
            let end = if thread < 2 && thread == with { Op::report(12) } else { Op::nop() };
            let first = vec![if thread == 0 { put } else { Op::nop() }; room];
            let after = [Op::block_sync(), mine, Op::pause(setup.scaled(1_000_000)), end];
            scenario = scenario.on_group(0, thread, [&first[..], &after].concat());
        }
        let outcome = setup.run(&scenario)?;
        for thread in 0..threads {
            let kind = if thread % 2 == with { FaultKind::Timeout } else { FaultKind::Reported };
            outcome.check_fault(&scenario, 0, thread, room + 1, kind)?;
        }
    }
    Ok(())
}

/// The barrier at the start of a block's call has released memory to the block; values depend on no memory.
fn scopes(setup: &Setup) -> Verdict {
    let scoped = |op: Op, given, required| Op { given, required, ..op };
    let (mut sender, mut receiver) = (Vec::new(), Vec::new());
    let mut round = 0;
    for given in [0, 1] {
        for required in [0, 1] {
            round += 1;
            sender.extend([
                Op::fill(0, 0, 900, round),
                scoped(Op::put(1, 900).signal(0), given, required),
                Op::flush(),
                Op::wait_signal(1, round),
            ]);
            receiver.extend([
                Op::wait_signal(0, round),
                Op::check(1, 0, 900, round),
                scoped(Op::raise(0, 1), given, required),
            ]);
        }
    }
    for given in 0..4 {
        sender.push(scoped(Op::put_value(1, 8, 42).to(1, 1000 + 8 * u64::from(given)).signal(2), given, 0));
    }
    receiver.push(Op::wait_signal(2, 4));
    let outcome = run_ok(setup, &Scenario::new(2).coop(CoopKind::Block).on(0, sender).on(1, receiver))?;
    expect_bytes(&outcome, 1, 1, 1000, [42u64; 4].into_iter().flat_map(u64::to_le_bytes))
}
