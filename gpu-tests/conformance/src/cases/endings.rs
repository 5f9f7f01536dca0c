// SPDX-License-Identifier: MIT OR Apache-2.0
//! Each wait ends by its own deadline, by abort and by a fault, in whichever thread sees it first. A wait that does not
//! end delays no other work.

use super::completion::FOREVER;
use super::{List, Verdict};
use crate::host::{Failure, How, Net, Setup, SetupBackend};
use crate::op::{Code, Op};
use crate::scenario::{CoopKind, Scenario, WindowSpec, fault};
use gin_abi::fault::NONE;
use gin_abi::{FaultKind, Operation};
use std::format;
use std::vec;
use std::vec::Vec;

pub(super) fn add(list: &mut List) {
    list.network_per_coop("abort_ends_a_wait_of_each_kind", aborted);
    list.network_per_coop("a_fault_of_another_rank_ends_a_wait_of_each_kind", elsewhere);
    list.network_per_coop("a_deadline_of_each_kind_of_wait_says_where_it_was", timed_out);
    for coop in [CoopKind::Tile, CoopKind::Warp, CoopKind::Lanes, CoopKind::Span, CoopKind::Block, CoopKind::BlockNamed]
    {
        let name = coop.name();
        list.network_case(
            &format!("a_fault_that_one_thread_finds_in_a_barrier_reaches_all_threads_by_{name}"),
            move |setup| one_finder(setup, coop),
        );
    }
    list.case("threads_whose_waits_end_at_different_times_meet_afterwards", different_times);
    list.network_case("threads_in_every_kind_of_wait_get_a_fault_and_meet_afterwards", all_kinds_at_once);
    list.network_case("a_lost_peer_is_named", lost);
    list.network_case("a_full_queue_of_one_context_holds_up_no_other", other_context);
}

/// A call that waits for ever, the operations before it, and the names in its fault.
struct Wait {
    before: Vec<Op>,
    op: Op,
    operation: Operation,
    peer: u32,
}

/// Returns every kind of wait. Requests to rank 1 never complete.
fn waits(setup: &Setup) -> Vec<Wait> {
    let wait = |before: &[Op], op, operation, peer| Wait { before: before.to_vec(), op, operation, peer };
    let signal = 6;
    let put = Op::put_value(1, 8, 1);
    let shadow = Op { signal, value: 1, ..Op::new(Code::IncreaseShadow) };
    let full = vec![put; setup.small_room()];
    vec![
        wait(&[], Op::wait_signal(signal, 1), Operation::WaitSignal, NONE),
        wait(&[], Op::wait_signal(0, 1).at_address(2, 16), Operation::WaitSignal, NONE),
        wait(&[], Op { signal, value: 1, ..Op::new(Code::FollowShadow) }, Operation::WaitSignal, NONE),
        wait(&[shadow], Op { signal, ..Op::new(Code::MeetShadow) }, Operation::WaitSignal, NONE),
        wait(&[put.counter(5)], Op::wait_counter(5, 1), Operation::WaitCounter, NONE),
        wait(&[], Op::barrier(), Operation::Barrier, 1),
        wait(&[put], Op::flush(), Operation::Flush, NONE),
        wait(&[put, Op::flush_async(1)], Op::wait_token(), Operation::Flush, 1),
        wait(&full, put, Operation::PutValue, 1),
        wait(&full, Op::get(1, 8), Operation::Get, 1),
        wait(&full, Op::raise(1, 0), Operation::Signal, 1),
    ]
}

fn scenario(coop: CoopKind) -> Scenario {
    Scenario::new(2).coop(coop).window(2, WindowSpec { bytes: vec![64; 2], signals: true, offset: 0 }).require(
        |requirements| {
            requirements.queue_depth = 2;
            requirements.max_outstanding_per_peer = 1;
        },
    )
}

/// Time in nanoseconds that suffices to reach a wait under any schedule. On a real clock it may pass earlier.
const SOON: u64 = 1_000_000;

/// Returns whether the wait may succeed if it begins after the end: a post then finds room, as the proxy discards the
/// queue's requests.
fn may_be_late(setup: &Setup, wait: &Wait) -> bool {
    setup.seed.is_none() && wait.before.len() == setup.small_room()
}

fn slow(setup: &Setup) -> Setup {
    setup.with_network(Net::SlowPeer { rank: 1, ns: FOREVER })
}

fn aborted(setup: &Setup, coop: CoopKind) -> Verdict {
    for (number, wait) in waits(setup).into_iter().enumerate() {
        // The ranks' hosts abort in turn.
        let by = number as u32 % 2;
        let (last, op, late) = (wait.before.len(), wait.op, may_be_late(setup, &wait));
        let scenario = scenario(coop)
            .on(0, [wait.before, vec![wait.op]].concat())
            .on(1, vec![Op::wait_signal(5, 1)])
            .during(move |control| {
                if control.rank == by {
                    let start = gin_boot::rt::clock_ns();
                    gin_boot::rt::wait_until(move || gin_boot::rt::clock_ns() - start > SOON);
                    // The abort is refused only if the communicator has ended; the logs will show that.
                    let _ = control.comm.abort();
                }
            });
        let outcome = slow(setup).run(&scenario).map_err(|error| format!("{op:?}: {error}"))?;
        outcome.check_agreement(&scenario)?;
        if !late {
            outcome
                .check_fault(&scenario, 0, 0, last, FaultKind::Aborted)
                .map_err(|error| format!("{op:?}: {error}"))?;
        }
        outcome.check_fault(&scenario, 1, 0, 0, FaultKind::Aborted)?;
    }
    Ok(())
}

fn elsewhere(setup: &Setup, coop: CoopKind) -> Verdict {
    for wait in waits(setup) {
        let (last, op, late) = (wait.before.len(), wait.op, may_be_late(setup, &wait));
        let scenario =
            scenario(coop).on(0, [wait.before, vec![wait.op]].concat()).on(1, vec![Op::pause(SOON), Op::report(31)]);
        let outcome = slow(setup).run(&scenario).map_err(|error| format!("{op:?}: {error}"))?;
        outcome.check_agreement(&scenario)?;
        outcome.each(&scenario, 0, 0, last, |entry| match fault(entry) {
            Some(fault) if (fault.kind(), fault.peer(), fault.seen()) == (FaultKind::Elsewhere, 1, 31) => Ok(()),
            None if late && entry.outcome == 1 => Ok(()),
            _ => Err(format!("{op:?}: expected the fault that rank 1 reported")),
        })?;
    }
    Ok(())
}

fn timed_out(setup: &Setup, coop: CoopKind) -> Verdict {
    for wait in waits(setup) {
        let (last, op) = (wait.before.len(), wait.op);
        // With device-driven queue pairs a rank's own arrival at a barrier also travels to the NIC and back.
        let patience = if setup.backend == SetupBackend::Gdaki { 300 } else { 30 };
        let program = [wait.before, vec![op.deadline_us(patience), Op::report(1)]].concat();
        let scenario = scenario(coop).on(0, program).on(1, vec![Op::wait_signal(5, 1)]);
        let outcome = slow(setup).run(&scenario).map_err(|error| format!("{op:?}: {error}"))?;
        outcome.check_agreement(&scenario)?;
        outcome.each(&scenario, 0, 0, last, |entry| match fault(entry) {
            Some(fault)
                if (fault.kind(), fault.operation(), fault.context(), fault.peer())
                    == (FaultKind::Timeout, wait.operation, 0, wait.peer) =>
            {
                Ok(())
            }
            // On a real clock this rank itself may be late.
            Some(fault)
                if setup.seed.is_none()
                    && (fault.kind(), fault.operation()) == (FaultKind::Timeout, Operation::Barrier) =>
            {
                Ok(())
            }
            _ => Err(format!("{op:?}: expected a timeout of {:?} in context 0, peer {:#x}", wait.operation, wait.peer)),
        })?;
        // A deadline concerns only its caller.
        outcome.check_fault(&scenario, 1, 0, 0, FaultKind::Elsewhere)?;
    }
    Ok(())
}

/// In a barrier over many contexts each thread waits for one rank in one context. A request of rank 1 delays its
/// arrival in one context, so exactly one thread of rank 0 misses it.
fn one_finder(setup: &Setup, coop: CoopKind) -> Verdict {
    // A kernel's own requests to one peer never delay its requests to another.
    let (net, hindered) = match setup.backend {
        SetupBackend::Proxy => (Net::SlowPeer { rank: 2, ns: FOREVER }, Op::put_value(2, 8, 1)),
        SetupBackend::Gdaki => (Net::Fail(Failure { from: 1, number: 0, how: How::Stuck }), Op::put_value(0, 8, 1)),
    };
    let setup = setup.with_network(net);
    let ranks = 3;
    let threads = if coop == CoopKind::Lanes { 16 } else { coop.threads() };
    let contexts = threads / ranks;
    let barrier = Op::barrier().fence(5);
    // Some schedules let a rank wait for long. Virtual time passes with choices, and a run may have few of them.
    let between = if setup.seed.is_some() && setup.stall_steps > 1_000_000 { 20 * SOON } else { 5 * SOON };
    let split = Op { source_offset: between, ..Op::new(Code::BarrierSplit) }.fence(5).deadline_us(100);
    for late in [0, 1, contexts / 2, contexts - 1] {
        let hindered = hindered.context(late);
        let scenario = Scenario::new(ranks)
            .coop(coop)
            .require(|requirements| {
                requirements.contexts = contexts;
                requirements.queue_depth = 8;
                requirements.max_outstanding_per_peer = 1;
            })
            // The pause between arriving and waiting gives all other ranks time to arrive.
            .on(0, vec![split, barrier, Op::raise(1, 0), Op::report(2)])
            .on(1, vec![hindered, hindered, barrier])
            .on(2, vec![barrier]);
        let outcome = setup.run(&scenario)?;
        outcome.check_agreement(&scenario)?;
        outcome.check_fault(&scenario, 0, 0, 1, FaultKind::BarrierBroken)?;
        outcome.check_value(&scenario, 0, 0, 2, 0)?;
        outcome.each(&scenario, 0, 0, 0, |entry| match fault(entry) {
            // On a real clock other ranks may be late too.
            Some(fault) if fault.kind() == FaultKind::Timeout && setup.seed.is_none() => Ok(()),
            Some(fault) if (fault.kind(), fault.context(), fault.peer()) == (FaultKind::Timeout, late, 1) => Ok(()),
            _ => Err(format!("rank 1 is late in context {late}")),
        })?;
    }
    Ok(())
}

fn different_times(setup: &Setup) -> Verdict {
    let threads = 64;
    let mut scenario = Scenario::new(2).shape(1, threads);
    for thread in 0..threads {
        // An order that no schedule would produce by itself.
        let late = u64::from(thread * 37 % threads);
        let wait = match thread % 3 {
            0 => Op::wait_signal(6, 1),
            1 => Op::wait_counter(6, 1),
            _ => Op { signal: 5, value: 1, ..Op::new(Code::FollowShadow) },
        };
        let put = Op::put_value(1, 8, 1).to(1, 8 * u64::from(thread)).signal(0);
        scenario = scenario.on_group(0, thread, vec![wait.deadline_us(late), Op::block_sync(), put, Op::flush()]);
    }
    let scenario = scenario.on(1, vec![Op::wait_signal(0, u64::from(threads))]);
    let outcome = setup.run(&scenario)?;
    for thread in 0..threads {
        outcome.check_fault(&scenario, 0, thread, 0, FaultKind::Timeout)?;
        for index in 1..4 {
            outcome.check_value(&scenario, 0, thread, index, 0)?;
        }
    }
    outcome.check_value(&scenario, 1, 0, 0, 0)
}

fn all_kinds_at_once(setup: &Setup) -> Verdict {
    // A barrier belongs to one group. Threads that wait for room all need the same room.
    let kinds: Vec<Wait> = waits(setup).into_iter().filter(|wait| wait.operation != Operation::Barrier).collect();
    for by_kernel in [false, true] {
        let (threads, room) = (44, setup.small_room());
        let mut scenario = scenario(CoopKind::Thread).shape(1, threads);
        for thread in 0..threads {
            let wait = &kinds[thread as usize % kinds.len()];
            let fill = vec![Op::nop(); room - wait.before.len()];
            let program = [&fill[..], &wait.before, &[wait.op, Op::block_sync(), Op::new(Code::Fault)]].concat();
            scenario = scenario.on_group(0, thread, program);
        }
        scenario = if by_kernel {
            scenario.on(1, vec![Op::pause(SOON), Op::report(8)])
        } else {
            scenario.during(|control| {
                if control.rank == 1 {
                    let start = gin_boot::rt::clock_ns();
                    gin_boot::rt::wait_until(move || gin_boot::rt::clock_ns() - start > SOON);
                    // As above.
                    let _ = control.comm.abort();
                }
            })
        };
        let outcome = slow(setup).run(&scenario)?;
        let kind = if by_kernel { FaultKind::Elsewhere } else { FaultKind::Aborted };
        for thread in 0..threads {
            outcome.check_fault(&scenario, 0, thread, room + 2, kind)?;
            if !may_be_late(setup, &kinds[thread as usize % kinds.len()]) {
                outcome.check_fault(&scenario, 0, thread, room, kind)?;
            }
            outcome.check_value(&scenario, 0, thread, room + 1, 0)?;
        }
    }
    Ok(())
}

fn lost(setup: &Setup) -> Verdict {
    let setup = setup.with_network(Net::Fail(Failure { from: 0, number: 1, how: How::Lost }));
    let scenario = Scenario::new(3)
        .on(
            0,
            vec![
                Op::put(1, 16).signal(0),
                Op::wait_signal(1, 1),
                Op::put(2, 16).signal(0),
                Op::flush(),
                Op::wait_signal(0, 1),
            ],
        )
        .on(1, vec![Op::wait_signal(0, 1), Op::raise(0, 1), Op::wait_signal(0, 2)])
        .on(2, vec![Op::wait_signal(0, 1)]);
    let outcome = setup.run(&scenario)?;
    for (rank, index) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
        outcome.check_value(&scenario, rank, 0, index, 0)?;
    }
    for index in [3, 4] {
        outcome.each(&scenario, 0, 0, index, |entry| match fault(entry) {
            Some(fault)
                if (fault.kind(), fault.peer(), fault.operation()) == (FaultKind::PeerLost, 2, Operation::Put) =>
            {
                Ok(())
            }
            _ => Err("expected the loss of rank 2 in a put".into()),
        })?;
    }
    // All ranks but rank 2 itself lose it.
    outcome.check_fault(&scenario, 1, 0, 2, FaultKind::PeerLost)?;
    outcome.check_fault(&scenario, 2, 0, 0, FaultKind::Elsewhere)?;
    for fault in &outcome.faults {
        match fault {
            Some((0, fault)) if fault.kind() == FaultKind::PeerLost && fault.peer() == 2 => {}
            other => return Err(format!("expected each host to know that rank 0 lost rank 2; one has {other:?}")),
        }
    }
    Ok(())
}

fn other_context(setup: &Setup) -> Verdict {
    let put = Op::put_value(1, 8, 1);
    let room = setup.small_room();
    let answered = Op::put(2, 300).signal(0).counter(0).context(1);
    let scenario = Scenario::new(3)
        .require(|requirements| {
            requirements.contexts = 2;
            requirements.queue_depth = 2;
            requirements.max_outstanding_per_peer = 1;
        })
        .on(
            0,
            [
                vec![put; room],
                vec![
                    put.deadline_us(10),
                    Op::fill(0, 0, 300, 9),
                    answered,
                    Op::wait_counter(0, 1).context(1),
                    Op::flush().context(1),
                    Op::wait_signal(1, 1).context(1),
                    Op::get(2, 300).to(1, 0).context(1),
                    Op::flush().context(1),
                    put.deadline_us(10),
                    Op::report(3),
                ],
            ]
            .concat(),
        )
        .on(2, vec![Op::wait_signal(0, 1).context(1), Op::check(1, 0, 300, 9), Op::raise(0, 1).context(1)]);
    let outcome = slow(setup).run(&scenario)?;
    for index in [room, room + 8] {
        outcome.check_fault(&scenario, 0, 0, index, FaultKind::Timeout)?;
    }
    for index in (0..room + 10).filter(|index| ![room, room + 8].contains(index)) {
        outcome.check_value(&scenario, 0, 0, index, 0)?;
    }
    for index in 0..3 {
        outcome.check_value(&scenario, 2, 0, index, 0)?;
    }
    Ok(())
}
