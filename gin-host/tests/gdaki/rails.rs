// SPDX-License-Identifier: MIT OR Apache-2.0
//! Connections along rails only: fewer objects, a fault for a post to another peer, and otherwise no difference.
//!
//! Four ranks in LSA teams of two. Rank r has a connection along its rail to r + 2, reaches r ^ 1 by loads and stores,
//! and cannot reach r ^ 3.

use crate::common::errors;
use crate::{Hand, by_hand, nics, run, worlds};
use gin_abi::{FaultKind, Operation};
use gin_device::prelude::*;
use gin_gpu::LaunchConfig;
use gin_host::comm::{CommError, Communicator, ConnectionType, Requirements, Routes, WindowFlags};
use gin_host::world::{Rank as HostRank, WorldConfig, launch};

const RANKS: u32 = 4;
const LSA: u32 = 2;
/// Threads of the block: a warp, and one more.
const THREADS: u32 = 33;
/// Number of outcomes that a kernel notes.
const NOTES: usize = 12;

fn requirements(connections: ConnectionType) -> Requirements {
    Requirements::default().connections(connections).contexts(2).queue_depth(16).rail_barriers(1).lsa_barriers(1)
}

/// Returns a fault in one word: kind, operation, and peer; 0 for none.
fn code(outcome: Result<(), Fault>) -> u64 {
    outcome.map_or_else(
        |fault| {
            u64::from(fault.kind().code()) | u64::from(fault.operation().code()) << 16 | u64::from(fault.peer()) << 32
        },
        |()| 0,
    )
}

/// Posts to a rank without a connection and to the one along the rail, flushes, and passes a barrier. Notes the result
/// of each call. At the end each thread posts by itself, every other thread to the rank without a connection.
///
/// # Safety
/// - One block, resident. `notes` is [`NOTES`] words of device memory, `alone` one for each thread.
#[kernel]
pub unsafe fn rails_test(
    comm: Comm,
    window: gin_device::Window<u64>,
    notes: *mut u64,
    alone: *mut u64,
    stranger: u32,
    deadline: Deadline,
) {
    let gin = Gin::<Gdaki>::with_backend(&comm, ContextId::new(1));
    let (me, friend) = (comm.world().rank(), comm.rail().right());
    let mut number = 0;
    let mut note = |outcome: Result<(), Fault>| {
        // Safety: the caller keeps the kernel's conditions. All threads store the same value.
        unsafe { notes.add(number).write(code(outcome)) };
        number += 1;
    };
    let mut run = || -> Result<(), Fault> {
        let stranger = comm.world().member(stranger)?;
        let (to, from, signal) = (window.range(1, 1), window.range(0, 1), SignalId::new(0));
        for i in Block.stripe(1) {
            window.write(i, 100 + u64::from(me));
        }
        note(gin.put(stranger, to, from).issue(&Block));
        note(gin.put(stranger, to, from).signal(signal.inc()).counter(CounterId::new(0)).issue(&Block));
        note(gin.put(stranger, to, from).deadline(deadline).issue(&Block));
        note(gin.put(stranger, to, from).more().issue(&Block));
        note(gin.put_value(stranger, to, 5).issue(&Block));
        note(gin.get(stranger, to, from).issue(&Block));
        note(gin.signal(stranger, signal.inc()).issue(&Block));
        let token = gin.flush_async(stranger)?;
        note(gin.wait(&Block, token, deadline));
        note(gin.put(friend, to, from).signal(signal.inc()).counter(CounterId::new(0)).issue(&Block));
        note(gin.flush(&Block, deadline));
        note(gin.wait_signal(&Block, signal, 1, deadline));
        let mut rail = BarrierSession::new(&gin, BarrierTeam::Rail, 0)?;
        note(rail.sync(&Block, Fence::PutGet, deadline));
        let mine = Block.rank() as usize;
        let peer = if mine.is_multiple_of(2) { stranger } else { friend };
        let posted = gin.put_value(peer, window.range(2 + mine, 1), 7 + mine as u64).issue(&Thread);
        // Safety: the caller keeps the kernel's conditions.
        unsafe { alone.add(mine).write(code(posted)) };
        rail.sync(&Block, Fence::PutGet, deadline)
    };
    if let Err(fault) = run() {
        comm.report(fault);
    }
}

/// Puts to the LSA peer by the automatic route, passes a barrier with it, and then raises its signal over the network.
/// Notes the last result.
///
/// # Safety
/// - One block, resident. `notes` is a word of device memory.
#[kernel]
pub unsafe fn rails_test_near(comm: Comm, window: gin_device::Window<u64>, notes: *mut u64, deadline: Deadline) {
    let gin = Gin::new(&comm, ContextId::new(0));
    let near = comm.lsa().right();
    let run = || -> Result<(), Fault> {
        for i in Block.stripe(1) {
            window.write(i, 100 + u64::from(comm.world().rank()));
        }
        gin.put(near, window.range(1, 1), window.range(0, 1)).signal(SignalId::new(1).inc()).issue(&Block)?;
        gin.wait_signal(&Block, SignalId::new(1), 1, deadline)?;
        BarrierSession::new(&gin, BarrierTeam::Lsa, 0)?.sync(&Block, Fence::PutGet, deadline)?;
        let outcome = gin.signal_all_routes(near, SignalId::new(1).inc()).issue(&Block);
        // Safety: the caller keeps the kernel's conditions. All threads store the same value.
        unsafe { notes.write(code(outcome)) };
        Ok(())
    };
    if let Err(fault) = run() {
        comm.report(fault);
    }
}

const LONG: Deadline = Deadline::after_ms(20_000);

/// Runs `kernel` on one block. Any fault that it reports is a failure.
fn play(rank: &HostRank, comm: &Communicator, kernel: &str, arguments: &[&dyn gin_gpu::KernelArg]) {
    let (stream, kernel) = (rank.stream().unwrap(), rank.kernel(kernel).unwrap());
    // Safety: one block. Communicator, windows and words live until the kernel has ended.
    unsafe { stream.launch(&kernel, LaunchConfig::new(1, THREADS), arguments) }.unwrap();
    stream.synchronize().unwrap();
    assert_eq!(comm.fault(), None);
}

fn refusal(operation: Operation, peer: u32) -> u64 {
    code(Err(Fault::new(FaultKind::NotConnected, operation).with_peer(peer)))
}

#[test]
fn a_post_to_a_peer_without_a_connection_is_refused_with_its_rank_and_rails_work_as_ever() {
    for (nics, config) in worlds(RANKS) {
        run(&nics, config.lsa_size(LSA), |rank| {
            let (me, rail) = (rank.rank(), (rank.rank() + LSA) % RANKS);
            for stranger in [me ^ 1, me ^ 3] {
                let comm = rank.communicator(&requirements(ConnectionType::Rail))?;
                let window = comm.alloc_window::<u64>(2 + THREADS as usize, WindowFlags::NONE)?;
                let notes = comm.alloc_window::<u64>(NOTES, WindowFlags::NONE)?;
                let alone = comm.alloc_window::<u64>(THREADS as usize, WindowFlags::NONE)?;
                let word = |window: &gin_host::comm::Window<u64>| window.memory().address() as usize as *mut u64;
                let (handle, at, each) = (comm.device()?, word(&notes), word(&alone));
                play(&rank, &comm, "rails_test", &[&handle, &window, &at, &each, &stranger, &LONG]);

                let refused = |operation| refusal(operation, stranger);
                let put = refused(Operation::Put);
                let values = [refused(Operation::PutValue), refused(Operation::Get), refused(Operation::Signal)];
                assert_eq!(notes.read_all()?, [&[put; 4][..], &values, &[0; 5]].concat());
                let seen = window.read_all()?;
                assert_eq!(seen[1], 100 + u64::from(rail), "the value that arrived along the rail");
                for (index, outcome) in alone.read_all()?.into_iter().enumerate() {
                    let (expected, value) = match index % 2 {
                        0 => (refused(Operation::PutValue), 0),
                        _ => (0, 7 + index as u64),
                    };
                    assert_eq!((outcome, seen[2 + index]), (expected, value), "thread {index}");
                }
                let hand = Hand::new(&comm);
                assert_eq!((hand.counter(1, 0), hand.pair(1, stranger).ring), (1, 0));
                comm.destroy()?;
            }
            Ok(())
        });
    }
}

#[test]
fn peers_of_the_lsa_team_are_reached_by_loads_and_stores_but_not_over_the_network() {
    for (nics, config) in worlds(RANKS) {
        run(&nics, config.lsa_size(LSA), |rank| {
            let near = rank.rank() ^ 1;
            let comm = rank.communicator(&requirements(ConnectionType::Rail))?;
            let window = comm.alloc_window::<u64>(2, WindowFlags::NONE)?;
            let notes = comm.alloc_window::<u64>(1, WindowFlags::NONE)?;
            let at = notes.memory().address() as usize as *mut u64;
            play(&rank, &comm, "rails_test_near", &[&comm.device()?, &window, &at, &LONG]);
            assert_eq!(window.read_all()?[1], 100 + u64::from(near));
            assert_eq!(notes.read_all()?, [refusal(Operation::Signal, near)]);
            comm.destroy()
        });
    }
}

/// Returns the number of objects of all NICs while communicators exist; checks that none remain after their end.
fn objects(connections: ConnectionType, lsa_size: u32) -> usize {
    let nics = nics();
    let config = WorldConfig::seeded(RANKS, 3).soft_nics(&nics).lsa_size(lsa_size);
    let up = run(&nics, config, |rank| {
        let comm = rank.communicator(&Requirements::default().contexts(2).connections(connections))?;
        rank.barrier()?;
        let up = nics.fabric().objects();
        rank.barrier()?;
        comm.destroy()?;
        Ok(up)
    });
    up[0]
}

#[test]
fn rails_need_queue_pairs_to_their_own_ranks_only() {
    // For each rank: a protection domain and two regions. For each of its contexts: memory for rings, a completion
    // queue and a queue pair that answers. For each peer: a doorbell page, a completion queue and a queue pair.
    let expected = |peers: usize| RANKS as usize * (1 + 2 + 2 * (1 + 2 + 3 * peers));
    assert_eq!(objects(ConnectionType::All, 2), expected(4));
    assert_eq!(objects(ConnectionType::Rail, 2), expected(2));
    assert_eq!(objects(ConnectionType::Rail, 1), expected(4), "each rank is an LSA team");
    assert_eq!(objects(ConnectionType::Rail, 4), expected(1), "only itself");
}

#[test]
fn entries_never_announced_along_a_rail_complete() {
    for (nics, config) in worlds(RANKS) {
        run(&nics, by_hand(config.lsa_size(LSA)), |rank| {
            let rail = (rank.rank() + LSA) % RANKS;
            let comm = rank.communicator(&requirements(ConnectionType::Rail))?;
            // Visible at once, as no request has a signal.
            let window = comm.alloc_window::<u64>(4, WindowFlags::SIGNALS)?;
            window.write(0, &[7 + u64::from(rank.rank())])?;
            let (hand, handle) = (Hand::new(&comm), window.handle());
            for peer in [rank.rank(), rail] {
                hand.put((1, peer), (&handle, 8 + 8 * u64::from(peer == rail)), (&handle, 0), 8, Some(3));
            }
            comm.deregister(&comm.alloc_window::<u8>(1, WindowFlags::NONE)?)?;
            assert_eq!(window.read_all()?[1..3], [7 + u64::from(rank.rank()), 7 + u64::from(rail)]);
            assert_eq!(hand.counter(1, 3), 2);
            comm.destroy()
        });
    }
}

#[test]
fn ranks_that_want_other_connections_learn_so() {
    let nics = nics();
    let config = WorldConfig::seeded(RANKS, 3).soft_nics(&nics).lsa_size(LSA);
    let results = launch(config, |rank| -> Result<Result<(), CommError>, CommError> {
        let connections = if rank.rank() == 2 { ConnectionType::Rail } else { ConnectionType::All };
        Ok(rank.communicator(&requirements(connections)).map(|_| ()))
    });
    for (rank, error) in (0..).zip(errors(results.unwrap())) {
        let CommError::Disagreement { what, rank: other, .. } = error else { panic!("rank {rank}: {error}") };
        assert_eq!((what, other), ("connections", if rank == 2 { 0 } else { 2 }));
    }
    assert_eq!(nics.fabric().objects(), 0);
}

#[test]
fn barriers_that_cannot_meet_along_rails_are_refused_on_every_back_end() {
    let refused = |change: fn(&mut Requirements), lsa_size: u32, routes: Routes| {
        let config = WorldConfig::seeded(RANKS, 3).lsa_size(lsa_size).routes(routes);
        let results = launch(config, |rank| -> Result<Option<CommError>, CommError> {
            let mut asked = Requirements::default().connections(ConnectionType::Rail);
            change(&mut asked);
            match rank.communicator(&asked) {
                Ok(comm) => comm.destroy().map(|()| None),
                Err(error) => Ok(Some(error)),
            }
        });
        results.unwrap().remove(0)
    };
    let [world, rail, lsa]: [fn(&mut Requirements); 3] =
        [|asked| asked.world_barriers = 1, |asked| asked.rail_barriers = 1, |asked| asked.lsa_barriers = 1];
    let error = |what, needed, reached| Some(CommError::NotConnected { what, needed, reached });
    assert_eq!(refused(world, 2, Routes::Automatic), error("world", 4, 3));
    assert_eq!(refused(world, 4, Routes::Automatic), None);
    assert_eq!(refused(world, 1, Routes::Automatic), None);
    assert_eq!(refused(world, 4, Routes::Network), error("world", 4, 1));
    assert_eq!(refused(world, 1, Routes::Network), None);
    assert_eq!(refused(lsa, 2, Routes::Automatic), None);
    assert_eq!(refused(lsa, 2, Routes::Network), error("LSA", 2, 1));
    assert_eq!(refused(rail, 2, Routes::Network), None);
}
