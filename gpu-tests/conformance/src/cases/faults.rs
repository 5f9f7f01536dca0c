// SPDX-License-Identifier: MIT OR Apache-2.0
//! No wait hangs: deadlines, abort and faults end every wait, for all threads of a group alike.

use super::{List, Verdict};
use crate::host::{Failure, How, Net, Setup, SetupBackend};
use crate::op::{Code, Op};
use crate::scenario::{CoopKind, Outcome, Scenario, fault};
use gin_abi::FaultKind;
use std::format;
use std::string::String;
use std::vec;
use std::vec::Vec;

pub(super) fn add(list: &mut List) {
    list.per_coop("every_wait_ends_at_its_deadline_and_work_goes_on", deadlines);
    list.per_coop("abort_ends_every_wait_on_every_rank", abort);
    list.per_coop("a_fault_reported_by_a_kernel_ends_every_wait_on_every_rank", reported);
    list.network_per_coop("a_failed_request_ends_every_wait_and_counts_nothing", failed);
    list.network_per_coop("after_a_relaxed_flush_the_next_call_that_acquires_has_the_fault", failed_relaxed);
    list.network_case("a_deadline_before_a_claim_leaves_the_queue_usable", before_claim);
    list.network_case("a_deadline_after_a_claim_gives_the_fault_to_everybody", after_claim);
    list.network_case("a_full_queue_waits_and_loses_nothing", full);
    list.network_case("abort_ends_waits_for_room_in_the_queue", abort_full);
    list.network_case("faults_of_every_kind_of_request_reach_the_host", kinds);
}

/// Returns every call that can wait. Each rank has its own barrier, at which no other rank arrives.
fn waits(rank: u32) -> Vec<Op> {
    let signal = 6;
    vec![
        Op::wait_signal(signal, 1),
        Op::wait_signal(signal, 3).bits(16),
        Op::wait_counter(5, 1),
        Op { signal, value: 1, ..Op::new(Code::FollowShadow) },
        Op::wait_signal(0, 1).at_address(2, 16),
        Op { value: u64::from(rank), ..Op::barrier() },
    ]
}

fn with_signals(ranks: u32) -> Scenario {
    let spec = crate::scenario::WindowSpec { bytes: vec![64; ranks as usize], signals: true, offset: 0 };
    Scenario::new(ranks).window(2, spec).require(|requirements| requirements.world_barriers = ranks)
}

fn deadlines(setup: &Setup, coop: CoopKind) -> Verdict {
    let waits = waits(0);
    let mut program: Vec<Op> = waits.iter().map(|op| op.deadline_us(8)).collect();
    program.extend([Op::put(1, 16).signal(0), Op::flush()]);
    let scenario = with_signals(2).coop(coop).on(0, program).on(1, vec![Op::wait_signal(0, 1)]);
    let outcome = setup.run(&scenario)?;
    outcome.check_agreement(&scenario)?;
    for index in 0..waits.len() {
        outcome.check_fault(&scenario, 0, 0, index, FaultKind::Timeout)?;
    }
    for (rank, index) in [(0, waits.len()), (0, waits.len() + 1), (1, 0)] {
        outcome.check_value(&scenario, rank, 0, index, 0)?;
    }
    Ok(())
}

/// Checks that all operations from `first` on ended with a fault of one of these kinds, alike in all threads of their
/// group.
fn all_ended(
    outcome: &Outcome,
    scenario: &Scenario,
    rank: u32,
    group: u32,
    first: usize,
    kinds: &[FaultKind],
) -> Verdict {
    outcome.check_agreement(scenario)?;
    for index in first..scenario.program(rank, group).len() {
        outcome.each(scenario, rank, group, index, |entry| match fault(entry) {
            Some(fault) if kinds.contains(&fault.kind()) => Ok(()),
            _ => Err(format!("expected one of {kinds:?}")),
        })?;
    }
    Ok(())
}

/// The waits have no deadline; the abort ends each in turn.
fn abort(setup: &Setup, coop: CoopKind) -> Verdict {
    let put = |rank| Op { offset: 8 * u64::from(rank), ..Op::put(1, 8) };
    let program = |rank| [waits(rank), vec![put(rank), Op::new(Code::Fault)]].concat();
    let scenario = with_signals(3).coop(coop).all(program).during(|control| {
        if control.rank == 2 {
            gin_boot::rt::wait_until({
                let start = gin_boot::rt::clock_ns();
                move || gin_boot::rt::clock_ns() - start > 100_000
            });
            // The abort is refused only if the communicator has ended; the logs will show that.
            let _ = control.comm.abort();
        }
    });
    let outcome = setup.run(&scenario)?;
    for rank in 0..3 {
        for index in [0, 1, 2, 3, 4, 5, 7] {
            outcome.check_fault(&scenario, rank, 0, index, FaultKind::Aborted)?;
        }
    }
    outcome.check_agreement(&scenario)?;
    match outcome.faults[0] {
        Some((2, fault)) if fault.kind() == FaultKind::Aborted => Ok(()),
        other => Err(format!("expected the host of rank 0 to know that rank 2 aborted; it has {other:?}")),
    }
}

fn reported(setup: &Setup, coop: CoopKind) -> Verdict {
    let mut reporter = vec![Op::pause(50_000), Op { value: 4711, ..Op::new(Code::Report) }];
    reporter.extend(waits(1));
    let scenario = with_signals(3).coop(coop).on(0, waits(0)).on(1, reporter).on(2, waits(2));
    let outcome = setup.run(&scenario)?;
    let elsewhere = [FaultKind::Reported, FaultKind::Elsewhere];
    all_ended(&outcome, &scenario, 0, 0, 0, &elsewhere)?;
    all_ended(&outcome, &scenario, 1, 0, 2, &[FaultKind::Reported])?;
    all_ended(&outcome, &scenario, 2, 0, 0, &elsewhere)?;
    match outcome.faults[2] {
        Some((1, fault)) if fault.kind() == FaultKind::Reported && fault.seen() == 4711 => Ok(()),
        other => Err(format!("expected the host of rank 2 to know the fault that rank 1 reported; it has {other:?}")),
    }
}

fn failed(setup: &Setup, coop: CoopKind) -> Verdict {
    let setup = setup.with_network(Net::Fail(Failure { from: 0, number: 3, how: How::Error }));
    let put = Op::put(1, 32).signal(0).counter(0);
    let scenario = with_signals(2)
        .coop(coop)
        .on(0, vec![put, put, put, put, Op::flush(), Op::wait_counter(0, 4), Op::read_counter(0)])
        .on(1, vec![Op::wait_signal(0, 4), Op::read_signal(0)]);
    let outcome = setup.run(&scenario)?;
    outcome.check_agreement(&scenario)?;
    outcome.check_fault(&scenario, 0, 0, 4, FaultKind::Network)?;
    outcome.check_fault(&scenario, 0, 0, 5, FaultKind::Network)?;
    outcome.each(&scenario, 0, 0, 6, |entry| {
        if entry.value <= 3 { Ok(()) } else { Err("expected a count of at most 3".into()) }
    })?;
    let kinds = [FaultKind::Network, FaultKind::Elsewhere];
    outcome.each(&scenario, 1, 0, 0, |entry| match fault(entry) {
        Some(fault) if kinds.contains(&fault.kind()) => Ok(()),
        _ => Err(format!("expected one of {kinds:?}")),
    })?;
    outcome.each(&scenario, 1, 0, 1, |entry| {
        if entry.value <= 3 { Ok(()) } else { Err("expected at most 3 raises".into()) }
    })?;
    match outcome.faults[1] {
        Some((0, fault)) if fault.kind() == FaultKind::Network && fault.peer() == 1 && fault.context() == 0 => Ok(()),
        other => Err(format!(
            "expected the host of rank 1 to know rank 0's network fault in context 0, peer 1; it has {other:?}"
        )),
    }
}

/// The relaxed flush may have the fault already.
fn failed_relaxed(setup: &Setup, coop: CoopKind) -> Verdict {
    let reads = [Op::flush(), Op::wait_signal(6, 1), Op::wait_counter(5, 1), Op::barrier()];
    for read in reads {
        let setup = setup.with_network(Net::Fail(Failure { from: 0, number: 1, how: How::Error }));
        let put = Op::put(1, 32).counter(0);
        let scenario = Scenario::new(2).coop(coop).on(0, vec![put, put, Op::flush().relaxed(), read]);
        let outcome = setup.run(&scenario)?;
        outcome.check_agreement(&scenario)?;
        outcome.check_fault(&scenario, 0, 0, 3, FaultKind::Network)?;
    }
    Ok(())
}

/// Limits the proxy to one request to a peer, and makes the network take `ns` for it, so that a queue of depth 2
/// becomes full.
fn slow(setup: &Setup, ns: u64) -> Setup {
    setup.with_network(Net::SlowPeer { rank: 1, ns: setup.scaled(ns) })
}

fn small(ranks: u32) -> Scenario {
    Scenario::new(ranks).require(|requirements| {
        requirements.queue_depth = 2;
        requirements.max_outstanding_per_peer = 1;
    })
}

/// The posts without a deadline fill the queue and do not wait. A post that waited would be posted while the network
/// carries out those before it. A slow NIC would then begin it without a delay.
fn before_claim(setup: &Setup) -> Verdict {
    let room = setup.small_room();
    for coop in [CoopKind::Thread, CoopKind::Warp, CoopKind::Block] {
        let put = |slot: usize| Op::put_value(1, 8, slot as u64 + 1).to(1, 8 * slot as u64);
        let mut program: Vec<Op> = (0..room).map(put).collect();
        program.extend([
            put(room).deadline_us(20),
            put(room + 1).deadline_us(20),
            Op::flush(),
            put(room + 2).signal(0).deadline_us(1_000_000),
            Op::flush(),
        ]);
        let late = [room, room + 1];
        let receiver = vec![Op::wait_signal(0, 1), Op::read_signal(0)];
        let scenario = small(2).coop(coop).on(0, program).on(1, receiver);
        let mut ns = 3_000_000;
        let outcome = loop {
            let outcome = slow(setup, ns).run(&scenario)?;
            let had_room = late.iter().any(|&index| fault(&outcome.entry(&scenario, 0, 0, index)).is_none());
            // On a real clock a kernel may be delayed for longer than requests take.
            if !had_room || setup.seed.is_some() || ns > 100_000_000 {
                break outcome;
            }
            ns *= 2;
        };
        outcome.check_agreement(&scenario)?;
        for index in late {
            outcome.check_fault(&scenario, 0, 0, index, FaultKind::Timeout)?;
        }
        for index in (0..room).chain(room + 2..room + 5) {
            outcome.check_value(&scenario, 0, 0, index, 0)?;
        }
        outcome.check_value(&scenario, 1, 0, 1, 1)?;
        let expected = (0..room as u64).map(|slot| slot + 1).chain([0, 0, room as u64 + 3]);
        super::expect_bytes(&outcome, 1, 1, 0, expected.flat_map(u64::to_le_bytes))?;
    }
    Ok(())
}

/// Threads of many warps see room at once and claim slots, so some claim a slot that is not free in time. That depends
/// on the schedule, so the case tries many.
fn after_claim(setup: &Setup) -> Verdict {
    let mut seen = false;
    for attempt in 0..400 {
        let mut setup = setup.with_network(Net::SlowPeer { rank: 1, ns: super::completion::FOREVER });
        setup.seed = setup.seed.map(|seed| seed.wrapping_add(attempt));
        if attempt > 0 {
            setup.schedule = gin_virtual::Schedule::Random;
        }
        seen |= race_for_room(&setup)?;
        if setup.backend == SetupBackend::Gdaki {
            // A thread that claims a slot with a deadline has room.
            return if seen { Err("a post timed out after it claimed a slot".into()) } else { Ok(()) };
        }
        // On a real clock no schedule may show it.
        if seen || setup.seed.is_none() {
            return Ok(());
        }
    }
    Err("no post timed out after it claimed a slot".into())
}

/// Runs the race once. Returns whether a queue broke, after checking that every rank received that fault.
fn race_for_room(setup: &Setup) -> Result<bool, String> {
    // Lanes of one warp see each other and never claim more slots than are free.
    let threads = 16;
    let mut scenario = small(2).shape(threads, 1);
    let patience = setup.scaled(100_000);
    for thread in 0..threads {
        let put = Op { deadline: patience, ..Op::put_value(1, 8, 1).to(1, 8 * u64::from(thread)) };
        let end = if thread == 0 { [Op::pause(5 * patience), Op::report(9)] } else { [Op::nop(); 2] };
        scenario = scenario.on_group(0, thread, [&[put, put][..], &end, &[Op::wait_signal(0, 1)]].concat());
    }
    let scenario = scenario.on(1, vec![Op::wait_signal(0, 1)]);
    let outcome = setup.run(&scenario)?;
    let kinds = |thread| (0..2).map(move |index| (thread, index));
    let posts: Vec<_> =
        (0..threads).flat_map(kinds).map(|(thread, index)| outcome.entry(&scenario, 0, thread, index)).collect();
    let broken = posts.iter().any(|entry| fault(entry).is_some_and(|fault| fault.kind() == FaultKind::QueueBroken));
    // The fault that was reported first stays.
    let kind = if broken { FaultKind::QueueBroken } else { FaultKind::Reported };
    for thread in 0..threads {
        outcome.check_fault(&scenario, 0, thread, 4, kind)?;
    }
    outcome.check_fault(&scenario, 1, 0, 0, FaultKind::Elsewhere)?;
    match outcome.faults[1] {
        Some((0, fault)) if fault.kind() == kind => Ok(broken),
        other => Err(format!("expected the host of rank 1 to know {kind:?} on rank 0; it has {other:?}")),
    }
}

fn full(setup: &Setup) -> Verdict {
    let setup = setup.with_network(Net::SlowPeer { rank: 1, ns: 20_000 });
    let mut program: Vec<Op> = (0..20).map(|slot| Op::put_value(1, 8, slot + 1).to(1, 8 * slot).signal(0)).collect();
    program.push(Op::flush());
    let scenario = small(2).on(0, program).on(1, vec![Op::wait_signal(0, 20)]);
    let outcome = super::run_ok(&setup, &scenario)?;
    super::expect_bytes(&outcome, 1, 1, 0, (1..21u64).flat_map(u64::to_le_bytes))
}

fn abort_full(setup: &Setup) -> Verdict {
    let setup = setup.with_network(Net::SlowPeer { rank: 1, ns: 10_000_000_000 });
    let program: Vec<Op> = (0..8).map(|slot| Op::put_value(1, 8, 1).to(1, 8 * slot)).collect();
    // The kernel must be in its wait: after an abort there is room, because requests complete with the abort's fault.
    let pause = setup.scaled(200_000);
    let scenario = small(2).on(0, program).during(move |control| {
        if control.rank == 0 {
            let start = gin_boot::rt::clock_ns();
            gin_boot::rt::wait_until(move || gin_boot::rt::clock_ns() - start > pause);
            // As in `abort`.
            let _ = control.comm.abort();
        }
    });
    let outcome = setup.run(&scenario)?;
    outcome.check_fault(&scenario, 0, 0, 7, FaultKind::Aborted)
}

fn kinds(setup: &Setup) -> Verdict {
    let requests = [
        (Op::put(1, 16), gin_abi::Operation::Put),
        (Op::put_value(1, 4, 2), gin_abi::Operation::PutValue),
        (Op::get(1, 16), gin_abi::Operation::Get),
        (Op::raise(1, 0), gin_abi::Operation::Signal),
    ];
    for (request, operation) in requests {
        let setup = setup.with_network(Net::Fail(Failure { from: 0, number: 0, how: How::Error }));
        let scenario = Scenario::new(2).on(0, vec![request, Op::flush()]);
        let outcome = setup.run(&scenario)?;
        outcome.each(&scenario, 0, 0, 1, |entry| match fault(entry) {
            Some(fault)
                if fault.kind() == FaultKind::Network && fault.operation() == operation && fault.peer() == 1 =>
            {
                Ok(())
            }
            _ => Err(format!("expected a network fault of {operation:?} to rank 1")),
        })?;
        if outcome.faults.iter().any(Option::is_none) {
            return Err(format!("a host does not know the failed {operation:?}"));
        }
    }
    Ok(())
}
