// SPDX-License-Identifier: MIT OR Apache-2.0
//! Threads that post to one peer, get from it and flush at once, through queues that become full.

use super::{List, Verdict, run_ok};
use crate::host::Setup;
use crate::op::{Op, pattern};
use crate::scenario::{CoopKind, Scenario};
use std::format;
use std::vec;
use std::vec::Vec;

pub(super) fn add(list: &mut List) {
    list.network_case("warps_with_and_without_signals_and_more_post_through_short_queues", mixed_warps);
    list.network_case("lanes_that_post_with_more_do_not_hold_back_the_lane_that_posts_without", one_without);
    list.case("lanes_that_wait_each_for_itself_for_other_values_all_end", other_values);
    list.network_case("lanes_that_flush_each_for_itself_to_other_positions_all_end", other_positions);
    list.case("posts_with_more_are_sent_by_one_without_and_by_every_wait_of_their_context", held_back);
    list.network_case("gets_have_arrived_after_a_flush_while_other_threads_post", getters);
    list.network_case("sources_may_change_after_a_flush_while_other_threads_flush", sources);
}

/// Seed of the pattern that a case's values form together.
const VALUES: u64 = 31;

/// Puts eight bytes of the pattern to their offset in it.
fn value(slot: u64) -> Op {
    let bytes = core::array::from_fn(|index| pattern(VALUES, 8 * slot + index as u64));
    Op::put_value(1, 8, u64::from_le_bytes(bytes)).to(1, 8 * slot)
}

/// Lanes of a warp differ in signals and in the hint that more follows. A later post of the context sends a post that
/// is held back. At the end the post of each block's first thread does.
fn mixed_warps(setup: &Setup) -> Verdict {
    let (blocks, threads, each) = (2, 64, 6);
    let depths = [8, 16, 32, 64];
    // One depth takes seconds on some schedules.
    let mine = setup.seed.map(|seed| depths[(seed % 4) as usize]);
    for depth in depths.into_iter().filter(|depth| mine.is_none_or(|mine| mine == *depth)) {
        let mut scenario =
            Scenario::new(2).shape(blocks, threads).require(|requirements| requirements.queue_depth = depth);
        let mut raised = u64::from(blocks);
        for thread in 0..blocks * threads {
            let mut program = Vec::new();
            for index in 0..each {
                let mixed = pattern(7, u64::from(thread * each + index));
                let post = value(u64::from(thread * each + index));
                let post = if mixed & 1 == 0 { post } else { post.more() };
                raised += u64::from(mixed >> 1 & 1);
                program.push(if mixed & 2 == 0 { post } else { post.signal(0) });
            }
            program.push(Op::block_sync());
            if thread % threads == 0 {
                program.push(Op::raise(1, 0));
            }
            scenario = scenario.on_group(0, thread, program);
        }
        let bytes = u64::from(8 * blocks * threads * each);
        let receiver = vec![Op::wait_signal(0, raised), Op::check(1, 0, bytes, VALUES), Op::read_signal(0)];
        let scenario = scenario.on(1, receiver);
        let named = |error| format!("depth {depth}: {error}");
        run_ok(setup, &scenario).map_err(named)?.check_value(&scenario, 1, 0, 2, raised).map_err(named)?;
    }
    Ok(())
}

/// The peer answers the single lane in another context, whose wait sends nothing of this context.
fn one_without(setup: &Setup) -> Verdict {
    let lanes = 32;
    let without = [31, 31, 0, 17, 31];
    let mut scenario = Scenario::new(2).shape(1, lanes).require(|requirements| requirements.contexts = 2);
    let mut receiver = Vec::new();
    let mut programs = vec![Vec::new(); lanes as usize];
    for (round, only) in without.into_iter().enumerate() {
        let round = round as u64;
        for (lane, program) in programs.iter_mut().enumerate() {
            let slot = u64::from(lanes) * round + lane as u64;
            program.push(if lane == only { value(slot).signal(0) } else { value(slot).more() });
            program.push(if lane == 0 { Op::wait_signal(0, round + 1).context(1) } else { Op::nop() });
            program.push(Op::block_sync());
        }
        let place = 8 * (u64::from(lanes) * round + only as u64);
        receiver.extend([
            Op::wait_signal(0, round + 1),
            Op::check_from(1, place, 8, VALUES, place),
            Op::raise(0, 0).context(1),
        ]);
    }
    // Sends the posts that are held back, and covers them.
    programs[0].push(Op::raise(1, 1));
    receiver.extend([Op::wait_signal(1, 1), Op::check(1, 0, 8 * u64::from(lanes) * without.len() as u64, VALUES)]);
    for (lane, program) in programs.into_iter().enumerate() {
        scenario = scenario.on_group(0, lane as u32, program);
    }
    run_ok(setup, &scenario.on(1, receiver)).map(|_| ())
}

/// Time in which a wait ends if no lane keeps another one from reading.
const PATIENCE_US: u64 = 5_000_000;

/// Lanes of a warp wait for a signal, and for a counter, each for another value. Another warp's thread lets the next
/// raise come once a value is there. On a GPU a lane whose wait has ended may stay until the others leave the loop.
fn other_values(setup: &Setup) -> Verdict {
    let lanes = 32;
    let mut scenario = Scenario::new(2).shape(1, lanes + 1);
    for lane in 0..lanes {
        let (value, counter) = (u64::from(lane) + 1, Op::wait_counter(3, u64::from(lane) + 1));
        scenario = scenario.on_group(0, lane, vec![counter.deadline_us(PATIENCE_US)]);
        scenario = scenario.on_group(1, lane, vec![Op::wait_signal(0, value).deadline_us(PATIENCE_US)]);
    }
    let values = || 1..=u64::from(lanes);
    let sender = values().flat_map(|value| {
        let put = Op::put(1, 8).to(1, 8 * value).signal(0).counter(3);
        [put, Op::wait_counter(3, value).deadline_us(PATIENCE_US), Op::wait_signal(1, value).deadline_us(PATIENCE_US)]
    });
    let receiver = values().flat_map(|value| [Op::wait_signal(0, value).deadline_us(PATIENCE_US), Op::raise(0, 1)]);
    let scenario = scenario.on_group(0, lanes, sender.collect()).on_group(1, lanes, receiver.collect());
    run_ok(setup, &scenario).map(|_| ())
}

/// Lanes of a warp take tokens one after the other, each behind a long put, and then flush together, once to all peers.
fn other_positions(setup: &Setup) -> Verdict {
    let (lanes, bytes) = (32, 16 << 10);
    let mut scenario = Scenario::new(2).shape(1, lanes);
    for lane in 0..lanes {
        let mut program = vec![Op::nop(); 2 * lanes as usize];
        program[2 * lane as usize] = Op::put(1, bytes).to(1, 0);
        program[2 * lane as usize + 1] = Op::flush_async(1);
        program.extend([
            Op::wait_token().deadline_us(PATIENCE_US),
            Op::put(1, bytes),
            Op::flush().deadline_us(PATIENCE_US),
        ]);
        scenario = scenario.on_group(0, lane, program);
    }
    run_ok(setup, &scenario).map(|_| ())
}

fn held_back(setup: &Setup) -> Verdict {
    let more = Op::raise(1, 0).more();
    let sender = [
        vec![more, Op::flush()],
        vec![more, Op::wait_signal(1, 2)],
        vec![Op::put(1, 8).to(1, 64).counter(3).more(), Op::wait_counter(3, 1)],
        vec![Op::get(1, 8).to(1, 64).counter(3).context(1).more(), Op::wait_counter(3, 1).context(1)],
        vec![more, Op::flush_async(1), Op::wait_token()],
        vec![more, Op::barrier()],
        vec![value(0).more(), Op::get(1, 8).to(1, 64).more(), value(1).more(), value(2).signal(0)],
    ]
    .concat();
    let receiver = vec![
        Op::wait_signal(0, 1),
        Op::raise(0, 1),
        Op::wait_signal(0, 2),
        Op::raise(0, 1),
        Op::wait_signal(0, 3),
        Op::barrier(),
        Op::wait_signal(0, 5),
        Op::check(1, 0, 24, VALUES),
    ];
    for coop in [CoopKind::Thread, CoopKind::Warp, CoopKind::Block] {
        let scenario = Scenario::new(2).coop(coop).require(|requirements| requirements.contexts = 2);
        run_ok(setup, &scenario.on(0, sender.clone()).on(1, receiver.clone()))?;
    }
    Ok(())
}

/// Threads of a warp, and threads alone in theirs, wait by flush, by token and by counter at once.
fn getters(setup: &Setup) -> Verdict {
    getters_of(setup, 16, 1, 40)?;
    each_schedule(setup, |setup| getters_of(setup, 64, 12, 1))
}

fn getters_of(setup: &Setup, depth: u32, blocks: u32, threads: u32) -> Verdict {
    let (rounds, bytes) = (8, 56);
    let mut scenario = Scenario::new(2).shape(blocks, threads).require(|requirements| {
        requirements.queue_depth = depth;
        requirements.counters = blocks * threads;
    });
    for thread in 0..blocks * threads {
        let (mut program, place) = (vec![Op::wait_signal(1, 1)], 64 * u64::from(thread));
        for round in 0..rounds {
            let from = 64 * round + u64::from(thread);
            let get = Op::get(1, bytes).from(0, from).to(1, place);
            let ends = match thread % 6 {
                0 => vec![get, Op::flush()],
                1 => vec![get, Op::flush_async(1), Op::wait_token()],
                2..5 => vec![get.counter(thread), Op::wait_counter(thread, round + 1)],
                _ => {
                    program.extend([value(round), value(round).signal(0)]);
                    // The host reads the window at the end.
                    program.extend((round + 1 == rounds).then_some(Op::flush()));
                    continue;
                }
            };
            program.push(Op::fill(1, place, bytes, 99));
            program.extend(ends);
            program.push(Op::check_from(1, place, bytes, 4, from));
        }
        scenario = scenario.on_group(0, thread, program);
    }
    let scenario = scenario.on(1, vec![Op::fill(0, 0, 1024, 4), Op::raise(0, 1)]);
    run_ok(setup, &scenario).map(|_| ()).map_err(|error| format!("{blocks} blocks of {threads}: {error}"))
}

/// Runs a case that depends on the threads' timing: under many schedules, if the setup chooses schedules.
fn each_schedule(setup: &Setup, run: impl Fn(&Setup) -> Verdict) -> Verdict {
    let schedules = if setup.seed.is_some() { 24 } else { 1 };
    (0..schedules).try_for_each(|number: u64| {
        let seed = setup.seed.map(|seed| seed.wrapping_add(number << 32));
        run(&Setup { seed, ..setup.clone() })
    })
}

/// One thread puts and flushes while others flush. The receiver compares at the end, so a source that was read too late
/// is noticed.
fn sources(setup: &Setup) -> Verdict {
    each_schedule(setup, sources_once)
}

fn sources_once(setup: &Setup) -> Verdict {
    let (blocks, rounds, bytes) = (6, 60, 16);
    let (mut putter, mut receiver) = (Vec::new(), vec![Op::wait_signal(0, 1)]);
    for round in 0..rounds {
        let put = Op::put(1, bytes).to(1, bytes * round);
        putter.extend([Op::fill(0, 0, bytes, round), put, Op::flush()]);
        receiver.push(Op::check(1, bytes * round, bytes, round));
    }
    putter.extend([Op::fill(0, 0, bytes, rounds), Op::raise(1, 0)]);
    let mut scenario = Scenario::new(2).shape(blocks, 1).on(0, putter).on(1, receiver);
    for block in 1..blocks {
        scenario = scenario.on_group(0, block, vec![Op::flush(); 16 * rounds as usize]);
    }
    run_ok(setup, &scenario).map(|_| ())
}
