// SPDX-License-Identifier: MIT OR Apache-2.0
//! Bytes arrive: puts, values and gets of every size, by every kind of group.

use super::{List, Verdict, expect_bytes, run_ok};
use crate::host::Setup;
use crate::op::Op;
use crate::scenario::{CoopKind, Scenario, WindowSpec};
use std::vec;
use std::vec::Vec;

/// Sizes with and without a tail, one of them more than a page.
const SIZES: [u64; 8] = [0, 1, 3, 8, 12, 28, 4096, 5001];

pub(super) fn add(list: &mut List) {
    list.per_coop("a_put_of_every_size_arrives_before_its_signal", put_sizes);
    list.per_coop("a_value_of_each_width_arrives_and_touches_nothing_else", put_values);
    list.per_coop("a_get_of_every_size_is_visible_after_a_flush", get_sizes);
    list.per_coop("prepared_posts_and_waits_do_what_others_do", prepared);
    list.case("offsets_apply_to_both_ends_of_a_transfer", offsets);
    list.network_case("a_put_past_the_message_limit_is_whole_when_its_weak_signal_or_counter_says_so", chunks);
    list.case("a_rank_puts_to_itself", to_itself);
    list.network_case("many_threads_put_to_one_peer_through_queues_of_depth_2_and_4", many_to_one);
    list.case("one_thread_puts_to_many_peers", one_to_many);
    list.case("all_sharing_modes_carry_puts", sharing);
    list.case("contexts_up_to_64_carry_puts_independently", contexts);
    list.case("blocks_of_many_threads_post_together", blocks);
}

fn put_sizes(setup: &Setup, coop: CoopKind) -> Verdict {
    let mut sender = Vec::new();
    let mut receiver = Vec::new();
    for (index, bytes) in SIZES.into_iter().enumerate() {
        let seed = 10 + index as u64;
        sender.extend([
            Op::wait_signal(1, index as u64),
            Op::fill(0, 0, bytes, seed),
            Op::put(1, bytes).signal(0).counter(0),
            Op::wait_counter(0, index as u64 + 1),
        ]);
        receiver.extend([Op::wait_signal(0, index as u64 + 1), Op::check(1, 0, bytes, seed), Op::raise(0, 1)]);
    }
    run_ok(setup, &Scenario::new(2).coop(coop).on(0, sender).on(1, receiver)).map(|_| ())
}

/// Each prepared put without a signal is issued twice.
fn prepared(setup: &Setup, coop: CoopKind) -> Verdict {
    let (mut sender, mut receiver) = (Vec::new(), Vec::new());
    for (index, bytes) in SIZES.into_iter().enumerate() {
        let (seed, round) = (30 + index as u64, index as u64 + 1);
        sender.extend([
            Op::wait_signal(1, round - 1).prepared(),
            Op::fill(0, 0, bytes, seed),
            Op::put(1, bytes).prepared(),
            Op::put_value(1, 8, seed).to(1, 6000).prepared(),
            Op::raise(1, 0).prepared(),
            Op::put_value(1, 4, seed).to(1, 6008).signal(2).counter(0).prepared(),
            Op::put(1, bytes).to(1, 7000).signal(2).counter(0).prepared(),
            Op::wait_counter(0, 2 * round),
        ]);
        receiver.extend([
            Op::wait_signal(0, round).prepared(),
            Op::check(1, 0, bytes, seed),
            Op::wait_signal(2, 2 * round).bits(32).prepared(),
            Op::check(1, 7000, bytes, seed),
            Op::get(0, bytes).to(0, 0).prepared(),
            Op::flush(),
            Op::check(0, 0, bytes, seed),
            Op::raise(0, 1).prepared(),
        ]);
    }
    let outcome = run_ok(setup, &Scenario::new(2).coop(coop).on(0, sender).on(1, receiver))?;
    let last = 29 + SIZES.len() as u64;
    expect_bytes(&outcome, 1, 1, 6000, last.to_le_bytes())?;
    expect_bytes(&outcome, 1, 1, 6008, (last as u32).to_le_bytes())
}

fn put_values(setup: &Setup, coop: CoopKind) -> Verdict {
    let value = 0xf1e2_d3c4_b5a6_9788;
    let mut sender = Vec::new();
    for (index, width) in [1, 2, 4, 8].into_iter().enumerate() {
        sender.push(Op::put_value(1, width, value).to(1, 16 * index as u64 + 8).signal(0));
    }
    let receiver = vec![Op::wait_signal(0, 4)];
    let scenario = Scenario::new(2).coop(coop).on(0, sender).on(1, receiver);
    let outcome = run_ok(setup, &scenario)?;
    for (index, width) in [1usize, 2, 4, 8].into_iter().enumerate() {
        let mut expected = [0; 16];
        expected[8..8 + width].copy_from_slice(&value.to_le_bytes()[..width]);
        expect_bytes(&outcome, 1, 1, 16 * index, expected)?;
    }
    Ok(())
}

fn get_sizes(setup: &Setup, coop: CoopKind) -> Verdict {
    let scenario = Scenario::new(2).coop(coop).all(|rank| {
        let mut program = vec![Op::fill(0, 0, 5001, 3 + u64::from(rank)), Op::barrier()];
        for (index, bytes) in SIZES.into_iter().enumerate() {
            program.extend([
                Op::fill(1, 0, bytes, 99),
                Op::get(1 - rank, bytes),
                Op::flush(),
                Op::check(1, 0, bytes, 4 - u64::from(rank)),
                // Again by counter.
                Op::fill(1, 0, bytes, 98),
                Op::get(1 - rank, bytes).counter(0),
                Op::wait_counter(0, index as u64 + 1),
                Op::check(1, 0, bytes, 4 - u64::from(rank)),
            ]);
        }
        program.push(Op::barrier());
        program
    });
    run_ok(setup, &scenario).map(|_| ())
}

fn offsets(setup: &Setup) -> Verdict {
    let scenario = Scenario::new(2)
        .on(0, vec![Op::fill(0, 100, 50, 7), Op::put(1, 50).from(0, 100).to(1, 333).signal(0)])
        .on(1, vec![Op::wait_signal(0, 1), Op::check(1, 333, 50, 7)]);
    let outcome = run_ok(setup, &scenario)?;
    expect_bytes(&outcome, 1, 1, 0, [0; 333])?;
    expect_bytes(&outcome, 1, 1, 383, [0; 100])
}

fn chunks(setup: &Setup) -> Verdict {
    let scenario = Scenario::new(2)
        .require(|requirements| requirements.max_message = 64)
        .on(
            0,
            vec![
                Op::fill(0, 0, 4000, 5),
                Op::put(1, 4000).signal(0).weak().counter(0),
                Op::wait_counter(0, 1),
                // The source may change now; the bytes that arrive must not.
                Op::fill(0, 0, 4000, 6),
                Op::raise(1, 1),
                Op::wait_signal(2, 1),
                Op::get(1, 4000).to(0, 0).from(1, 0),
                Op::flush(),
                Op::check(0, 0, 4000, 5),
            ],
        )
        .on(1, vec![Op::wait_signal(0, 1), Op::check(1, 0, 4000, 5), Op::wait_signal(1, 1), Op::raise(0, 2)]);
    run_ok(setup, &scenario).map(|_| ())
}

fn to_itself(setup: &Setup) -> Verdict {
    let scenario = Scenario::new(1).on(
        0,
        vec![
            Op::fill(0, 0, 500, 8),
            Op::put(0, 500).signal(0),
            Op::wait_signal(0, 1),
            Op::check(1, 0, 500, 8),
            Op::get(0, 500).to(1, 600),
            Op::flush(),
            Op::check(1, 600, 500, 8),
            Op::barrier(),
        ],
    );
    run_ok(setup, &scenario).map(|_| ())
}

/// Every thread of rank 0 puts values into its own slots; with depths 2 and 4 all of them wait for room.
fn many_to_one(setup: &Setup) -> Verdict {
    for depth in [1, 2, 4] {
        let (threads, each) = (64, 4);
        let mut scenario = Scenario::new(2).shape(1, threads).require(|requirements| {
            requirements.queue_depth = depth;
            requirements.max_outstanding_per_peer = 3;
        });
        for thread in 0..threads {
            let program = (0..each).map(|index| {
                let slot = u64::from(thread * each + index);
                Op::put_value(1, 8, 1000 + slot).to(1, 8 * slot).signal(0)
            });
            scenario = scenario.on_group(0, thread, program.collect());
        }
        let total = u64::from(threads * each);
        let scenario = scenario.on(1, vec![Op::wait_signal(0, total), Op::read_signal(0)]);
        let outcome = run_ok(setup, &scenario)?;
        outcome.check_value(&scenario, 1, 0, 1, total)?;
        expect_bytes(&outcome, 1, 1, 0, (0..total).flat_map(|slot| (1000 + slot).to_le_bytes()))?;
    }
    Ok(())
}

fn one_to_many(setup: &Setup) -> Verdict {
    let ranks = 4;
    let mut program = vec![Op::fill(0, 0, 256, 1)];
    for round in 0..8 {
        for peer in 0..ranks {
            program.push(Op::put(peer, 32).from(0, 32 * round).to(1, 32 * round).signal(0));
        }
    }
    program.push(Op::flush());
    let scenario = Scenario::new(ranks)
        .on(0, [program, vec![Op::wait_signal(0, 8), Op::check(1, 0, 256, 1)]].concat())
        .require(|requirements| requirements.queue_depth = 4);
    let scenario = (1..ranks)
        .fold(scenario, |scenario, rank| scenario.on(rank, vec![Op::wait_signal(0, 8), Op::check(1, 0, 256, 1)]));
    run_ok(setup, &scenario).map(|_| ())
}

fn sharing(setup: &Setup) -> Verdict {
    for sharing in 0..3 {
        // Thread: each thread has its own context.
        let threads = 8;
        let mut scenario = Scenario::new(2).shape(1, threads).require(|requirements| requirements.contexts = threads);
        for thread in 0..threads {
            let context = if sharing == 2 { thread } else { 0 };
            let slot = u64::from(thread);
            let program = (0..3).map(|round| {
                Op::put_value(1, 8, slot * 10 + round)
                    .to(1, 8 * (3 * slot + round))
                    .signal(0)
                    .sharing(sharing)
                    .context(context)
            });
            let wait = Op::flush().context(context).sharing(sharing);
            scenario = scenario.on_group(0, thread, program.chain([wait]).collect());
        }
        let waits = if sharing == 2 {
            (0..threads).map(|context| Op::wait_signal(0, 3).context(context)).collect()
        } else {
            vec![Op::wait_signal(0, 3 * u64::from(threads))]
        };
        let outcome = run_ok(setup, &scenario.on(1, waits))?;
        let expected = (0..u64::from(threads)).flat_map(|slot| (0..3).map(move |round| slot * 10 + round));
        expect_bytes(&outcome, 1, 1, 0, expected.flat_map(u64::to_le_bytes))?;
    }
    Ok(())
}

fn contexts(setup: &Setup) -> Verdict {
    let contexts = 64;
    let scenario = Scenario::new(2)
        .require(|requirements| {
            requirements.contexts = contexts;
            requirements.queue_depth = 2;
        })
        .on(
            0,
            (0..contexts)
                .map(|context| {
                    let value = u64::from(context);
                    Op::put_value(1, 8, value).to(1, 8 * value).signal(0).add(value + 1).context(context)
                })
                .collect(),
        )
        .on(
            1,
            (0..contexts)
                .flat_map(|context| {
                    [Op::wait_signal(0, u64::from(context) + 1).context(context), Op::read_signal(0).context(context)]
                })
                .collect(),
        );
    let outcome = run_ok(setup, &scenario)?;
    for context in 0..contexts {
        outcome.check_value(&scenario, 1, 0, 2 * context as usize + 1, u64::from(context) + 1)?;
    }
    expect_bytes(&outcome, 1, 1, 0, (0..u64::from(contexts)).flat_map(u64::to_le_bytes))
}

fn blocks(setup: &Setup) -> Verdict {
    let (blocks, threads) = (3, 40);
    let mut scenario = Scenario::new(2).shape(blocks, threads).require(|requirements| requirements.queue_depth = 8);
    for thread in 0..blocks * threads {
        let slot = u64::from(thread);
        let program = vec![Op::put_value(1, 8, slot ^ 0xabcd).to(1, 8 * slot).signal(0).counter(0), Op::flush()];
        scenario = scenario.on_group(0, thread, program);
    }
    let total = u64::from(blocks * threads);
    let outcome = run_ok(setup, &scenario.on(1, vec![Op::wait_signal(0, total)]))?;
    expect_bytes(&outcome, 1, 1, 0, (0..total).flat_map(|slot| (slot ^ 0xabcd).to_le_bytes()))
}

/// Returns a window with the given length on each rank, also for the other lists.
pub(super) fn window(bytes: &[u64]) -> WindowSpec {
    WindowSpec { bytes: bytes.to_vec(), signals: false, offset: 0 }
}
