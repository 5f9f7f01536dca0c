// SPDX-License-Identifier: MIT OR Apache-2.0
//! Two routes to one peer: loads and stores to LSA peers, and the network. Each operation here names its route.

use super::{Case, List, Verdict, expect_bytes, pattern, run_ok};
use crate::host::{Net, Setup, SetupWindows};
use crate::op::{Code, Op, Reduction};
use crate::scenario::{CoopKind, Outcome, Scenario, WindowSpec, fault};
use gin_abi::FaultKind;
use std::boxed::Box;
use std::format;
use std::vec;
use std::vec::Vec;

/// Codes of the routes.
const AUTO: u32 = 1;
const LSA: u32 = 2;
const NETWORK: u32 = 3;

/// Groups whose kernels know both routes.
pub(super) const COOPS: [CoopKind; 6] =
    [CoopKind::Thread, CoopKind::Tile, CoopKind::Warp, CoopKind::Lanes, CoopKind::Span, CoopKind::Block];

/// Networks that delay or reorder.
const NETS: [Net; 4] = [Net::Plain, Net::Reorder, Net::Delay { ns: 20_000 }, Net::Withhold];

/// Adds the cases, each for windows whose parts have a fixed distance and for windows whose parts are at arbitrary
/// addresses.
pub(super) fn add(list: &mut List) {
    let mut own = List::default();
    add_cases(&mut own);
    for Case { run, name, network, weak, nic } in own.0 {
        let run = move |setup: &Setup| {
            [SetupWindows::Allocated, SetupWindows::Registered].into_iter().try_for_each(|windows| {
                run(&setup.with_windows(windows)).map_err(|error| format!("windows {windows:?}: {error}"))
            })
        };
        list.0.push(Case { name, network, weak, nic, run: Box::new(run) });
    }
}

fn add_cases(list: &mut List) {
    for coop in COOPS {
        let kernel = coop.name();
        list.case(&format!("puts_by_loads_and_stores_arrive_before_their_signal_by_{kernel}"), move |setup| {
            stores(setup, coop)
        });
        list.case(&format!("gets_by_loads_and_stores_are_there_at_once_by_{kernel}"), move |setup| gets(setup, coop));
        list.case(&format!("copies_at_every_alignment_touch_nothing_else_by_{kernel}"), move |setup| {
            alignments(setup, coop)
        });
        list.case(&format!("a_route_that_cannot_be_is_refused_in_all_threads_by_{kernel}"), move |setup| {
            refused(setup, coop)
        });
    }
    list.case("a_signal_for_all_routes_covers_puts_of_both_in_every_order", all_routes);
    list.case("a_bulk_put_of_one_thread_is_covered_by_the_signal_of_another_after_a_barrier", by_another);
    list.case("teams_smaller_than_the_world_use_both_routes_at_once", both_at_once);
    list.case("signals_and_counters_are_sums_over_both_routes_and_resets_cover_both", sums);
    list.case("a_barrier_for_all_routes_covers_puts_that_took_the_other_route", barrier_all_routes);
    list.weak_lsa_case("strong_signals_by_loads_and_stores_need_none_of_the_network", without_strong);
    list.case("the_combined_barrier_keeps_everybody_until_all_are_there", combined);
    list.case("a_combined_barrier_that_timed_out_refuses_further_use", combined_broken);
    list.case("lsa_barriers_go_on_while_the_network_stands_still", without_network);
    list.case("an_abort_ends_kernels_whose_waits_are_always_met", aborted_while_running);
    list.case("reductions_of_many_threads_and_ranks_all_count", reductions);
    list.case("windows_of_peers_outside_the_team_are_refused_and_ranges_checked", peer_windows);
}

fn signal_window(ranks: usize) -> WindowSpec {
    WindowSpec { bytes: vec![512; ranks], signals: true, offset: 24 }
}

/// Sizes around the units in which a copy proceeds.
const SIZES: [u64; 12] = [0, 1, 3, 4, 15, 16, 17, 64, 100, 1023, 4096, 5001];

fn stores(setup: &Setup, coop: CoopKind) -> Verdict {
    let (mut sender, mut receiver) = (Vec::new(), Vec::new());
    for (index, bytes) in SIZES.into_iter().enumerate() {
        let (seed, round) = (10 + index as u64, index as u64 + 1);
        sender.extend([
            Op::fill(0, 0, bytes, seed),
            Op::put(1, bytes).signal(0).counter(0).route(LSA),
            // The source may change at once.
            Op::fill(0, 0, bytes, 99),
            Op::read_counter(0),
            Op::put_value(1, 8, seed).to(1, 8192).signal(1).weak().route(LSA),
            Op::raise(1, 2).add(3).route(LSA),
            Op::wait_signal(1, round),
        ]);
        receiver.extend([
            Op::wait_signal(0, round),
            Op::check(1, 0, bytes, seed),
            Op::wait_signal(1, round),
            Op { bytes: 8, ..Op::new(Code::Read) }.to(1, 8192),
            Op::wait_signal(2, 3 * round),
            Op::raise(0, 1).route(LSA),
        ]);
    }
    let scenario = Scenario::new(2).coop(coop).on(0, sender).on(1, receiver);
    let outcome = run_ok(setup, &scenario)?;
    for index in 0..SIZES.len() {
        outcome.check_value(&scenario, 0, 0, 7 * index + 3, index as u64 + 1)?;
        outcome.check_value(&scenario, 1, 0, 6 * index + 3, 10 + index as u64)?;
    }
    Ok(())
}

fn gets(setup: &Setup, coop: CoopKind) -> Verdict {
    let scenario = Scenario::new(2).coop(coop).all(|rank| {
        let peer = 1 - rank;
        let mut program = vec![Op::fill(0, 0, 5001, u64::from(rank)), Op::barrier().route(LSA)];
        for (index, bytes) in SIZES.into_iter().enumerate() {
            program.extend([
                Op::fill(1, 0, bytes, 99),
                Op::get(peer, bytes).counter(3).route(LSA),
                Op::check(1, 0, bytes, u64::from(peer)),
                Op::wait_counter(3, index as u64 + 1),
                Op::flush_async(peer),
                Op::wait_token(),
            ]);
        }
        program.extend([Op::flush(), Op::barrier().route(LSA)]);
        program
    });
    run_ok(setup, &scenario).map(|_| ())
}

/// Puts, gets, and copies to and from a peer's window, with each end at every relevant offset from a multiple of 16
/// bytes.
fn alignments(setup: &Setup, coop: CoopKind) -> Verdict {
    let copy = |code, bytes| Op { peer: 1, bytes, ..Op::new(code) };
    let (mut program, mut expected) = (vec![Op::fill(0, 0, 256, 5)], Vec::new());
    let mut place = 3u64;
    for (number, (from, to)) in [(0, 0), (1, 1), (13, 13), (0, 4), (7, 11), (0, 1), (5, 2), (12, 0)].iter().enumerate()
    {
        for (extra, bytes) in [1u64, 7, 16, 37, 80].into_iter().enumerate() {
            // The pair's distance past a multiple of 16, with space after it.
            place = place.next_multiple_of(16) + to;
            let op = match (number + extra) % 2 {
                0 => Op::put(1, bytes).route(LSA),
                _ => copy(Code::CopyFrom, bytes),
            };
            program.push(op.from(0, *from).to(1, place));
            // And back, to the same offset of the own window.
            let op = match (number + extra) % 3 {
                0 => Op::get(1, bytes).route(LSA),
                _ => copy(Code::CopyTo, bytes),
            };
            program.push(op.from(1, place).to(1, place));
            expected.resize(place as usize, 0);
            expected.extend(pattern(5, from + bytes).skip(*from as usize));
            place += bytes + 1;
        }
    }
    program.push(Op::raise(1, 0).route(LSA));
    let scenario = Scenario::new(2).coop(coop).on(0, program).on(1, vec![Op::wait_signal(0, 1)]);
    let outcome = run_ok(setup, &scenario)?;
    expected.resize(expected.len() + 64, 0);
    for rank in [1, 0] {
        expect_bytes(&outcome, rank, 1, 0, expected.iter().copied())?;
    }
    Ok(())
}

fn refused(setup: &Setup, coop: CoopKind) -> Verdict {
    let mut scenario = Scenario::new(4).window(2, signal_window(4)).coop(coop);
    scenario.lsa_size = Some(2);
    let far = [
        Op::put(2, 8).signal(0),
        Op::put(2, 0),
        Op::put_value(3, 4, 1),
        Op::get(2, 8),
        Op::raise(3, 0),
        Op::raise(2, 0).at_address(2, 8),
    ];
    let wrong = [
        (Op::put(1, 17 << 10), FaultKind::OutOfRange),
        (Op::get(1, 8).from(0, (16 << 10) - 7), FaultKind::OutOfRange),
        (Op::put_value(1, 4, 1).to(1, 2), FaultKind::Misaligned),
        (Op::put(1, 8).signal(8), FaultKind::UnknownSignal),
        (Op::get(1, 8).counter(8), FaultKind::UnknownCounter),
        (Op::put(1, 8).context(1), FaultKind::UnknownContext),
        (Op::raise(1, 0).at_address(1, 8), FaultKind::NoVaSignals),
        (Op::raise(1, 0).at_address(2, 512), FaultKind::OutOfRange),
        (Op::barrier(), FaultKind::NotReachable),
    ];
    let mut program: Vec<Op> = far.into_iter().chain(wrong.map(|(op, _)| op)).map(|op| op.route(LSA)).collect();
    program.extend([
        Op::fill(0, 0, 40, 1),
        Op::put(1, 40).signal(0).counter(0).route(LSA),
        Op::put(2, 40).signal(0).counter(0).route(NETWORK),
        Op::wait_counter(0, 2),
        Op::read_counter(0),
    ]);
    let receiver = || vec![Op::wait_signal(0, 1), Op::check(1, 0, 40, 1), Op::read_signal(0)];
    let scenario = scenario.on(0, program).on(1, receiver()).on(2, receiver());
    let outcome = setup.run(&scenario)?;
    outcome.check_agreement(&scenario)?;
    for index in 0..far.len() {
        outcome.check_fault(&scenario, 0, 0, index, FaultKind::NotReachable)?;
    }
    for (index, (_, kind)) in wrong.iter().enumerate() {
        outcome.check_fault(&scenario, 0, 0, far.len() + index, *kind)?;
    }
    let peer =
        fault(&outcome.entry(&scenario, 0, 0, 0)).map(|fault| (fault.context(), fault.peer(), fault.operation()));
    if peer != Some((0, 2, gin_abi::Operation::Put)) {
        return Err(format!("expected context 0, rank 2 and a put, got {peer:?}"));
    }
    for (index, value) in [0, 0, 0, 0, 2].into_iter().enumerate() {
        outcome.check_value(&scenario, 0, 0, far.len() + wrong.len() + index, value)?;
    }
    for rank in [1, 2] {
        for (index, value) in [0, 0, 1].into_iter().enumerate() {
            outcome.check_value(&scenario, rank, 0, index, value)?;
        }
    }
    Ok(())
}

/// Parts of one payload alternate between the routes, or one route carries the first half and the other the rest.
fn all_routes(setup: &Setup) -> Verdict {
    let orders: [fn(u64) -> u32; 4] = [
        |part| if part < 4 { LSA } else { NETWORK },
        |part| if part < 4 { NETWORK } else { LSA },
        |part| if part % 2 == 0 { LSA } else { NETWORK },
        |part| if part % 2 == 0 { NETWORK } else { AUTO },
    ];
    for net in NETS {
        let setup = setup.with_network(net);
        for coop in [CoopKind::Thread, CoopKind::Block] {
            let (mut sender, mut receiver) = (Vec::new(), Vec::new());
            for (round, order) in (0..).zip(orders) {
                sender.push(Op::fill(0, 0, 800, round));
                sender.extend(
                    (0..8).map(|part| Op::put(1, 100).from(0, 100 * part).to(1, 100 * part).route(order(part))),
                );
                sender.push(Op { code: Code::SignalAllRoutes as u32, ..Op::raise(1, 0) });
                sender.extend([Op::flush(), Op::wait_signal(1, round + 1)]);
                receiver.extend([
                    Op::wait_signal(0, round + 1),
                    Op::check(1, 0, 800, round),
                    Op::raise(0, 1).route(if round % 2 == 0 { LSA } else { NETWORK }),
                ]);
            }
            run_ok(&setup, &Scenario::new(2).coop(coop).on(0, sender).on(1, receiver))?;
        }
    }
    Ok(())
}

/// Each thread puts; after a barrier of the block another one signals for all.
fn by_another(setup: &Setup) -> Verdict {
    let (threads, rounds, bytes) = (40u32, 3u64, 96u64);
    for route in [LSA, AUTO] {
        let mut scenario = Scenario::new(2).shape(1, threads);
        for thread in 0..threads {
            let place = bytes * u64::from(thread);
            let mut program = Vec::new();
            for round in 0..rounds {
                let seed = 100 * round + u64::from(thread);
                program.extend([
                    Op::fill(0, place, bytes, seed),
                    Op::put(1, bytes).from(0, place).to(1, place).route(route),
                    Op::block_sync(),
                    if u64::from(thread) == 7 * round { Op::raise(1, 0).route(route) } else { Op::nop() },
                    if thread == 0 { Op::wait_signal(1, round + 1) } else { Op::nop() },
                    Op::block_sync(),
                ]);
            }
            scenario = scenario.on_group(0, thread, program);
        }
        for thread in 0..threads {
            let place = bytes * u64::from(thread);
            let mut program = Vec::new();
            for round in 0..rounds {
                program.extend([
                    if thread == 5 { Op::wait_signal(0, round + 1) } else { Op::nop() },
                    Op::block_sync(),
                    // The payload for which another thread has waited.
                    Op::check(1, place, bytes, 100 * round + u64::from(thread)),
                    Op::block_sync(),
                    if thread == 9 { Op::raise(0, 1).route(route) } else { Op::nop() },
                ]);
            }
            scenario = scenario.on_group(1, thread, program);
        }
        run_ok(setup, &scenario)?;
    }
    Ok(())
}

/// Ranks 0 and 1, and 2 and 3, are teams. All ranks put to all, get from all, signal and count.
fn both_at_once(setup: &Setup) -> Verdict {
    let ranks = 4u32;
    for coop in [CoopKind::Thread, CoopKind::Warp, CoopKind::Block] {
        let mut scenario = Scenario::new(ranks).coop(coop).window(2, signal_window(4));
        scenario.lsa_size = Some(2);
        let scenario = scenario.all(|rank| {
            let mut program = Vec::new();
            for round in 0..3u64 {
                let seed = |rank: u32| 10 * round + u64::from(rank);
                program.push(Op::fill(0, 0, 300, seed(rank)));
                for peer in 0..ranks {
                    let place = 300 * u64::from(rank);
                    program.push(Op::put(peer, 300).to(1, place).signal(0).counter(0).route(AUTO));
                    program.push(Op::raise(peer, 0).at_address(2, 16).route(AUTO));
                }
                program.extend([
                    Op::wait_signal(0, 4 * (round + 1)),
                    Op::wait_signal(0, 4 * (round + 1)).at_address(2, 16),
                ]);
                program.extend((0..ranks).map(|peer| Op::check(1, 300 * u64::from(peer), 300, seed(peer))));
                for peer in 0..ranks {
                    program.push(Op::get(peer, 300).to(1, 2000 + 300 * u64::from(peer)).counter(1).route(AUTO));
                }
                program.push(Op::wait_counter(1, 4 * (round + 1)));
                program.extend((0..ranks).map(|peer| Op::check(1, 2000 + 300 * u64::from(peer), 300, seed(peer))));
                program.extend([Op::wait_counter(0, 4 * (round + 1)), Op::barrier().fence(3).route(AUTO)]);
            }
            program.extend([Op::read_signal(0), Op::read_signal(0).at_address(2, 16), Op::read_counter(0)]);
            program
        });
        let outcome = run_ok(setup, &scenario)?;
        for rank in 0..ranks {
            let last = scenario.program(rank, 0).len() - 3;
            for index in 0..3 {
                outcome.check_value(&scenario, rank, 0, last + index, 12)?;
            }
        }
    }
    Ok(())
}

fn sums(setup: &Setup) -> Verdict {
    let reset_counter = Op { counter: 2, ..Op::new(Code::ResetCounter) };
    for coop in [CoopKind::Thread, CoopKind::Block] {
        let scenario = Scenario::new(2).coop(coop).window(2, signal_window(2)).all(|rank| {
            let peer = 1 - rank;
            let mut program = Vec::new();
            for round in 1..5 {
                program.extend([
                    Op::put(peer, 64).signal(4).add(round).counter(2).route(LSA),
                    Op::put(peer, 64).signal(4).add(10 * round).counter(2).route(NETWORK),
                    Op::put_value(peer, 4, 1).at_address(2, 40).add(round).counter(2).route(LSA),
                    Op::raise(peer, 0).at_address(2, 40).add(10 * round).counter(2).route(NETWORK),
                    Op::raise(peer, 4).weak().counter(2).route(LSA),
                    Op::wait_signal(4, 11 * round + 1),
                    Op::wait_signal(0, 11 * round).at_address(2, 40),
                    Op::wait_counter(2, 5),
                    Op::read_signal(4),
                    Op::read_signal(0).at_address(2, 40),
                    Op::read_counter(2),
                    Op::barrier(),
                    Op::reset_signal(4),
                    Op::reset_signal(0).at_address(2, 40),
                    reset_counter,
                    Op::read_signal(4),
                    Op::read_signal(0).at_address(2, 40),
                    Op::read_counter(2),
                    Op::barrier(),
                ]);
            }
            program
        });
        let outcome = run_ok(setup, &scenario)?;
        for rank in 0..2 {
            for round in 1..5 {
                let first = 19 * (round as usize - 1);
                for (index, value) in [(8, 11 * round + 1), (9, 11 * round), (10, 5), (15, 0), (16, 0), (17, 0)] {
                    outcome.check_value(&scenario, rank, 0, first + index, value)?;
                }
            }
        }
    }
    Ok(())
}

fn barrier_all_routes(setup: &Setup) -> Verdict {
    for net in NETS {
        let setup = setup.with_network(net);
        let scenario =
            Scenario::new(3).coop(CoopKind::Warp).require(|requirements| requirements.world_barriers = 2).all(|rank| {
                let mut program = Vec::new();
                for round in 0..4u64 {
                    let seed = |rank: u32| 10 * round + u64::from(rank);
                    program.push(Op::fill(0, 0, 200, seed(rank)));
                    for peer in 0..3 {
                        let route = if (u64::from(rank + peer) + round) % 2 == 0 { LSA } else { NETWORK };
                        program.push(Op::put(peer, 200).to(1, 200 * u64::from(rank)).route(route));
                    }
                    program.push(Op::barrier().fence(9).route(AUTO));
                    program.extend((0..3).map(|peer| Op::check(1, 200 * u64::from(peer), 200, seed(peer))));
                    // A barrier with another number, as its arrivals take another route.
                    program.extend([Op::flush(), Op { value: 1, ..Op::barrier() }.fence(0).route(AUTO)]);
                }
                program
            });
        run_ok(&setup, &scenario)?;
    }
    Ok(())
}

fn without_strong(setup: &Setup) -> Verdict {
    let setup = setup.with_network(Net::WeakOnly);
    let scenario = Scenario::new(2)
        .window(2, signal_window(2))
        .on(
            0,
            vec![
                Op::raise(1, 0).route(NETWORK),
                Op { code: Code::SignalAllRoutes as u32, ..Op::raise(1, 0) },
                Op::fill(0, 0, 100, 3),
                Op::put(1, 100).route(LSA),
                Op::raise(1, 0).route(LSA),
                Op::raise(1, 0).at_address(2, 0).route(LSA),
                Op::barrier().route(LSA),
                Op::barrier().route(NETWORK),
            ],
        )
        .on(
            1,
            vec![
                Op::wait_signal(0, 1),
                Op::check(1, 0, 100, 3),
                Op::wait_signal(0, 1).at_address(2, 0),
                Op::barrier().route(LSA),
            ],
        );
    let outcome = setup.run(&scenario)?;
    for index in [0, 1, 7] {
        outcome.check_fault(&scenario, 0, 0, index, FaultKind::NoStrongSignals)?;
    }
    for (rank, indices) in [(0, 2..7), (1, 0..4)] {
        for index in indices {
            outcome.check_value(&scenario, rank, 0, index, 0)?;
        }
    }
    Ok(())
}

/// A rank's writes into another rank's window before the barrier are visible after it, for every pair of ranks.
fn combined(setup: &Setup) -> Verdict {
    let ranks = 4u32;
    for (lsa_size, coop) in [(2, CoopKind::Thread), (2, CoopKind::Block), (4, CoopKind::Warp), (1, CoopKind::Thread)] {
        let mut scenario = Scenario::new(ranks).coop(coop).require(|requirements| requirements.contexts = 2);
        scenario.lsa_size = Some(lsa_size);
        let meet = |fence| Op { fence, ..Op::new(Code::CombinedBarrier) }.route(AUTO);
        let scenario = scenario.all(|rank| {
            let mut program = Vec::new();
            for round in 0..4u64 {
                let seed = |rank: u32| 10 * round + u64::from(rank);
                program.extend([Op::pause(u64::from(rank) * 900), Op::fill(0, 0, 100, seed(rank))]);
                // Own memory, which the other ranks get.
                program.push(meet(if round % 2 == 0 { 0 } else { 2 }));
                for peer in 0..ranks {
                    program.push(Op::get(peer, 100).to(1, 100 * u64::from(peer)).context(1).route(AUTO));
                }
                program.push(meet(6));
                program.extend((0..ranks).map(|peer| Op::check(1, 100 * u64::from(peer), 100, seed(peer))));
                for peer in 0..ranks {
                    program.push(Op::put(peer, 100).to(1, 1000 + 100 * u64::from(rank)).route(AUTO));
                }
                program.push(meet(1));
                program.extend((0..ranks).map(|peer| Op::check(1, 1000 + 100 * u64::from(peer), 100, seed(peer))));
                program.extend([Op::flush(), meet(3)]);
            }
            program
        });
        run_ok(setup, &scenario).map_err(|error| format!("LSA teams of {lsa_size}: {error}"))?;
    }
    Ok(())
}

fn combined_broken(setup: &Setup) -> Verdict {
    for coop in [CoopKind::Thread, CoopKind::Block] {
        let meet = Op { fence: 0, ..Op::new(Code::CombinedBarrier) }.route(AUTO);
        let mut scenario = Scenario::new(4).coop(coop);
        scenario.lsa_size = Some(2);
        let scenario = scenario
            // Rank 1 does not arrive. Ranks 2 and 3 pass their part and then miss the others.
            .on(0, vec![meet.deadline_us(20), meet, Op::raise(1, 0), Op { value: 1, ..meet }])
            .on(1, vec![Op::wait_signal(0, 1)])
            .on(2, vec![meet.deadline_us(setup.scaled(500))])
            .on(3, vec![meet.deadline_us(setup.scaled(500))]);
        let outcome = setup.run(&scenario)?;
        outcome.check_agreement(&scenario)?;
        outcome.each(&scenario, 0, 0, 0, |entry| match fault(entry) {
            Some(fault) if (fault.kind(), fault.peer()) == (FaultKind::Timeout, 1) => Ok(()),
            _ => Err("expected a timeout that names rank 1".into()),
        })?;
        outcome.check_fault(&scenario, 0, 0, 1, FaultKind::BarrierBroken)?;
        outcome.check_value(&scenario, 0, 0, 2, 0)?;
        outcome.check_fault(&scenario, 0, 0, 3, FaultKind::UnknownBarrier)?;
        outcome.check_value(&scenario, 1, 0, 0, 0)?;
        outcome.check_fault(&scenario, 2, 0, 0, FaultKind::Timeout)?;
        if setup.seed.is_some() {
            // With enough time for its own team.
            outcome.each(&scenario, 2, 0, 0, |entry| match fault(entry) {
                Some(fault) if fault.peer() == 0 => Ok(()),
                _ => Err("expected a timeout that names rank 0".into()),
            })?;
        }
    }
    Ok(())
}

/// Requests over the network never complete.
fn without_network(setup: &Setup) -> Verdict {
    let slow = Net::SlowPeer { rank: 1, ns: super::completion::FOREVER };
    let setup = setup.with_network(slow);
    let meet = Op { team: 1, ..Op::barrier() }.route(AUTO);
    let scenario = Scenario::new(2)
        .coop(CoopKind::Warp)
        .on(
            0,
            vec![
                Op::put_value(1, 8, 9).to(1, 64).route(NETWORK),
                Op::fill(0, 0, 48, 1),
                Op::put(1, 48).route(AUTO),
                meet,
                meet.fence(0),
                Op::wait_signal(0, 1),
                Op::flush().deadline_us(10),
                Op::report(5),
            ],
        )
        .on(1, vec![meet, Op::check(1, 0, 48, 1), meet.fence(0), Op::raise(0, 0).route(LSA)]);
    let outcome = setup.run(&scenario)?;
    for (rank, indices) in [(0, 0..6), (1, 0..4)] {
        for index in indices {
            outcome.check_value(&scenario, rank, 0, index, 0)?;
        }
    }
    outcome.check_fault(&scenario, 0, 0, 6, FaultKind::Timeout)
}

/// Two ranks synchronize by loads and stores, again and again; none of their waits involves the host.
fn aborted_while_running(setup: &Setup) -> Verdict {
    if setup.seed.is_none() {
        // On a real clock the abort may arrive after the kernel's end.
        return Ok(());
    }
    let rounds = 2000;
    for by_signals in [false, true] {
        let scenario = Scenario::new(2).all(|rank| {
            let meet = Op { team: 1, fence: 0, ..Op::barrier() }.route(LSA);
            let pass = |round| [Op::raise(1 - rank, 0).route(LSA), Op::wait_signal(0, round)];
            if by_signals { (1..=rounds).flat_map(pass).collect() } else { vec![meet; rounds as usize] }
        });
        let scenario = Scenario { stop_at_error: true, ..scenario }.during(|control| {
            if control.rank == 0 {
                // The abort is refused only if the communicator has ended; the logs will show that.
                let _ = control.comm.abort();
            }
        });
        let outcome = setup.run(&scenario)?;
        for rank in 0..2 {
            let log = &outcome.logs[rank as usize][0];
            let last = log.iter().rev().find(|entry| entry.outcome != 0).and_then(fault);
            if last.is_none_or(|fault| fault.kind() != FaultKind::Aborted) {
                return Err(format!("rank {rank} finished all rounds: {last:?}"));
            }
        }
    }
    Ok(())
}

fn reduce(reduction: Reduction, bytes: u64, offset: u64, value: u64) -> Op {
    Op { bytes, value, amount: reduction as u64, ..Op::new(Code::Reduce) }.to(1, offset)
}

/// Every thread of every rank reduces into words of rank 0.
fn reductions(setup: &Setup) -> Verdict {
    let (ranks, threads) = (3u32, 20u32);
    let start = [0xff_u64, u64::MAX, 7];
    let mut scenario = Scenario::new(ranks).shape(1, threads);
    for rank in 0..ranks {
        for thread in 0..threads {
            let number = u64::from(rank * threads + thread);
            let mut program = Vec::new();
            if (rank, thread) == (0, 0) {
                for bytes in [4, 8] {
                    for (index, value) in start.into_iter().enumerate() {
                        program
                            .push(Op::put_value(0, bytes, value).to(1, 16 * bytes + bytes * index as u64).route(LSA));
                    }
                }
                program.push(Op::raise(0, 0).route(LSA));
            }
            program.push(Op::wait_signal(0, 1));
            if (rank, thread) == (0, 0) {
                program.extend((1..ranks).map(|peer| Op::raise(peer, 0).route(LSA)));
            }
            for bytes in [4, 8] {
                let place = |index: u64| 16 * bytes + bytes * index;
                program.extend([
                    reduce(Reduction::And, bytes, place(0), !(1 << (number % 4))),
                    reduce(Reduction::Min, bytes, place(1), 1000 + number),
                    reduce(Reduction::Max, bytes, place(2), 1000 + number),
                    reduce(Reduction::Or, bytes, place(3), 1 << (number % 30)),
                    reduce(Reduction::Add, bytes, place(4), number),
                ]);
            }
            program.push(reduce(Reduction::AddFloat, 4, 256, u64::from(0.5f32.to_bits())));
            program.push(Op::raise(0, 1).route(LSA));
            if (rank, thread) == (0, 0) {
                program.push(Op::wait_signal(1, u64::from(ranks * threads)));
            }
            scenario = scenario.on_group(rank, thread, program);
        }
    }
    let outcome = run_ok(setup, &scenario)?;
    let count = u64::from(ranks * threads);
    let expected = [0xf0, 1000, 1000 + count - 1, (1 << 30) - 1, count * (count - 1) / 2];
    let narrow = expected.into_iter().flat_map(|value| (value as u32).to_le_bytes());
    expect_bytes(&outcome, 0, 1, 64, narrow)?;
    expect_bytes(&outcome, 0, 1, 128, expected.into_iter().flat_map(u64::to_le_bytes))?;
    expect_bytes(&outcome, 0, 1, 256, (0.5 * count as f32).to_le_bytes())
}

fn peer_windows(setup: &Setup) -> Verdict {
    let copy = |code, peer, bytes| Op { peer, bytes, ..Op::new(code) };
    let mut scenario = Scenario::new(4).window(1, super::transfer::window(&[64, 128, 64, 64]));
    scenario.lsa_size = Some(2);
    let scenario = scenario.coop(CoopKind::Warp).on(
        0,
        vec![
            copy(Code::CopyFrom, 1, 128).to(1, 0),
            copy(Code::CopyFrom, 0, 64).to(1, 0),
            copy(Code::CopyFrom, 1, 128).to(1, 1),
            copy(Code::CopyFrom, 0, 65).to(1, 0),
            copy(Code::CopyFrom, 1, 8).to(1, u64::MAX),
            copy(Code::CopyTo, 1, 65).from(1, 0).to(1, 0),
            copy(Code::CopyTo, 1, 64).from(1, 65).to(1, 0),
            copy(Code::CopyFrom, 2, 8).to(1, 0),
            copy(Code::CopyTo, 3, 8).to(1, 0),
            copy(Code::CopyTo, 1, 64).from(1, 64).to(1, 0),
        ],
    );
    let outcome: Outcome = setup.run(&scenario)?;
    outcome.check_agreement(&scenario)?;
    for index in [0, 1, 9] {
        outcome.check_value(&scenario, 0, 0, index, 0)?;
    }
    for index in 2..7 {
        outcome.check_fault(&scenario, 0, 0, index, FaultKind::OutOfRange)?;
    }
    for index in [7, 8] {
        outcome.check_fault(&scenario, 0, 0, index, FaultKind::NotReachable)?;
    }
    Ok(())
}
