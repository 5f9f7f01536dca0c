// SPDX-License-Identifier: MIT OR Apache-2.0
//! Communicators whose kernels drive software NICs: they initialise, their tables are right, and they leave no objects
//! behind.

#[path = "../common/mod.rs"]
mod common;
mod disguise;
mod full;
mod hand;
mod kernel;
mod rails;
mod reach;
mod refusals;

use gin_abi::gdaki::busy_marks;
use gin_abi::handle::{CAP_STRONG_SIGNALS, CAP_VA_SIGNALS, ENGINE_GPU, ENGINE_NIC};
use gin_abi::{BackendKind, FaultKind, Operation};
use gin_gpu::{Memory, MemoryKind};
use gin_host::comm::{Requirements, WindowFlags};
use gin_host::prelude::{CommError, Communicator, WorldConfig};
use gin_host::world::{Rank, SoftNics, launch, launch_logged};
use gin_nic::{DoorbellSource, Doorbells};
use gin_soft_nic::{Fault, FaultKind as NicFault, Options};
use gin_virtual::LogMode;
use hand::{Hand, word};
use std::sync::atomic::Ordering;
use std::time::Duration;

fn nics() -> SoftNics {
    SoftNics::new(Options { delay: 3, seed: 5, ..Options::default() })
}

/// Returns a seeded world and one of threads, each with its own NICs.
fn worlds(ranks: u32) -> Vec<(SoftNics, WorldConfig)> {
    let (first, second) = (nics(), nics());
    let worlds = [WorldConfig::seeded(ranks, 7).soft_nics(&first), WorldConfig::threads(ranks).soft_nics(&second)];
    [first, second].into_iter().zip(worlds).collect()
}

/// Returns the world for entries that ranks write by hand. The race detector does not see these stores, so it cannot
/// know what comes before an entry.
fn by_hand(config: WorldConfig) -> WorldConfig {
    config.races(false)
}

/// Runs `body` on each rank. Checks afterwards that the NICs have no objects and that no rule was broken.
fn run<T: Send>(nics: &SoftNics, config: WorldConfig, body: impl Fn(Rank) -> Result<T, CommError> + Sync) -> Vec<T> {
    let results = launch(config, body).unwrap();
    assert_eq!(nics.fabric().objects(), 0);
    assert_eq!(nics.fabric().violations(), (None, 0));
    results
}

fn requirements() -> Requirements {
    Requirements::default().contexts(2).queue_depth(16)
}

#[test]
fn communicators_come_up_register_windows_and_leave_nothing_behind() {
    for ranks in 1..=3 {
        for (nics, config) in worlds(ranks) {
            run(&nics, config, |rank| {
                for _ in 0..2 {
                    let comm = rank.communicator(&requirements())?;
                    check_handle(&comm, &rank);
                    let first = comm.alloc_window::<u32>(100, WindowFlags::NONE)?;
                    let second = comm.alloc_window::<u64>(10, WindowFlags::SIGNALS)?;
                    assert_ne!(first.id(), second.id());
                    comm.deregister(&first)?;
                    comm.destroy()?;
                }
                Ok(())
            });
        }
    }
}

fn check_handle(comm: &Communicator, rank: &Rank) {
    let hand = Hand::new(comm);
    let handle = hand.handle;
    let (ranks, lsa) = (rank.ranks(), if rank.ranks() > 1 { ENGINE_GPU } else { 0 });
    assert_eq!((comm.backend(), handle.backend), (Ok(BackendKind::Gdaki), BackendKind::Gdaki as u32));
    assert_eq!((handle.gdaki_contexts, handle.proxy_contexts, handle.engines), (2, 0, ENGINE_NIC | lsa));
    assert_eq!(handle.capabilities, CAP_STRONG_SIGNALS | CAP_VA_SIGNALS);
    assert_eq!(handle.strong_signals, handle.signals);
    let nic = comm.nic().unwrap().expect("a communicator whose kernels drive a NIC");
    assert_eq!((nic.name.as_str(), nic.config.port), (format!("soft_{}", rank.rank()).as_str(), 1));
    let mut doorbells = Vec::new();
    for context in 0..2 {
        let data = hand.context(context);
        assert_eq!((data.signal_cpu, data.signal_gpu != 0), (0, ranks > 1));
        assert!(data.signal_nic != 0 && data.counters_gpu != 0 && data.busy != 0);
        for peer in 0..ranks {
            let pair = hand.pair(context, peer);
            assert_eq!((pair.depth_log2, pair.interval_log2, pair.max_bytes), (4, 3, 1 << 30));
            assert_eq!((pair.busy, pair.marks), (data.busy, busy_marks(peer)));
            assert_eq!((pair.counters, pair.counter_count), (data.counters_gpu, 16));
            assert_eq!((pair.claims, pair.completion_index, pair.rung), (0, 0, 0));
            assert_eq!((pair.comm, pair.context, pair.peer), (hand.handle.copy, context, peer));
            assert_eq!(word(pair.completions).load(Ordering::Relaxed), u64::from_le_bytes([0xf1; 8]));
            doorbells.push(pair.doorbell);
        }
    }
    doorbells.sort_unstable();
    doorbells.dedup();
    assert_eq!(doorbells.len() as u32, 2 * ranks, "each queue pair has its own doorbell");
}

/// Every rank puts its own row to every rank, including itself, by both contexts, each followed by a signal.
fn exchange(rank: &Rank, comm: &Communicator) -> Result<(), CommError> {
    let (me, ranks) = (rank.rank(), rank.ranks());
    let source = comm.alloc_window::<u64>(8, WindowFlags::NONE)?;
    let target = comm.alloc_window::<u64>(2 * ranks as usize, WindowFlags::NONE)?;
    source.write(0, &[100 + u64::from(me), 200 + u64::from(me)])?;
    let hand = Hand::new(comm);
    for peer in 0..ranks {
        for context in 0..2 {
            let to = (&target.handle(), 8 * u64::from(2 * me + context));
            hand.put((context, peer), to, (&source.handle(), 8 * u64::from(context)), 8, None);
            hand.signal(context, peer, 3, 1 + u64::from(context));
            hand.ring(context, peer);
        }
    }
    for context in 0..2 {
        hand.wait(context, 3, u64::from(ranks * (1 + context)));
    }
    let expected: Vec<u64> = (0..u64::from(ranks)).flat_map(|rank| [100 + rank, 200 + rank]).collect();
    assert_eq!(target.read_all()?, expected);
    let others: u64 = (0..2)
        .flat_map(|context| (0..16).map(move |id| (context, id)))
        .filter(|pair| pair.1 != 3)
        .map(|(context, id)| hand.raised(context, id))
        .sum();
    assert_eq!(others, 0, "no other signal was raised");
    comm.destroy()
}

#[test]
fn entries_written_by_hand_reach_every_rank_by_every_context() {
    for ranks in 1..=3 {
        for (nics, config) in worlds(ranks) {
            run(&nics, by_hand(config), |rank| exchange(&rank, &rank.communicator(&requirements())?));
        }
    }
}

#[test]
fn doorbells_that_the_host_passes_on_reach_every_rank_too() {
    for (nics, config) in worlds(2) {
        let config = config.with_comm(|comm| comm.doorbells(Doorbells::Host));
        run(&nics, by_hand(config), |rank| {
            let comm = rank.communicator(&requirements())?;
            assert_eq!(comm.doorbell_source(), Ok(Some(DoorbellSource::Host(None))));
            exchange(&rank, &comm)
        });
    }
}

#[test]
fn signals_and_counters_begin_at_the_required_values() {
    let requirements = requirements().first_signal(1 << 40).first_counter(77);
    for (nics, config) in worlds(2) {
        run(&nics, config, |rank| {
            let comm = rank.communicator(&requirements)?;
            let hand = Hand::new(&comm);
            hand.signal(1, 1 - rank.rank(), 15, 5);
            hand.ring(1, 1 - rank.rank());
            hand.wait(1, 15, (1 << 40) + 5);
            let others = (0..2).flat_map(|context| (0..16).map(move |id| (context, id)));
            assert!(others.filter(|pair| *pair != (1, 15)).all(|(context, id)| hand.raised(context, id) == 1 << 40));
            assert!((0..16).all(|id| hand.counter(0, id) == 77));
            assert_eq!(word(hand.context(0).counters).load(Ordering::Relaxed), 0, "no CPU raises counters");
            comm.destroy()
        });
    }
}

#[test]
fn signals_at_addresses_are_raised_in_the_window_and_begin_at_0() {
    for (nics, config) in worlds(2) {
        run(&nics, config, |rank| {
            let comm = rank.communicator(&requirements())?;
            let memory = Memory::new(rank.device(), MemoryKind::Device, 256)?;
            memory.write(0, &[9u64; 32])?;
            let window = comm.register::<u64>(&memory.slice(64..128)?, WindowFlags::SIGNALS)?;
            let (hand, handle) = (Hand::new(&comm), window.handle());
            assert!((0..8).all(|index| hand.value_at(&handle, 8 * index) == 0));
            rank.barrier()?;
            hand.signal_at(0, 1 - rank.rank(), &handle, 56, 4);
            hand.ring(0, 1 - rank.rank());
            gin_boot::rt::wait_until(|| hand.value_at(&handle, 56) == 4);
            assert_eq!(window.read_all()?, [9, 9, 9, 9, 9, 9, 9, 13]);
            comm.destroy()
        });
    }
}

#[test]
fn parts_without_bytes_have_no_key_and_ended_windows_none_either() {
    for (nics, config) in worlds(2) {
        run(&nics, config, |rank| {
            let comm = rank.communicator(&requirements())?;
            let window = comm.alloc_window::<u32>(rank.rank() as usize * 3, WindowFlags::NONE)?;
            let (hand, handle) = (Hand::new(&comm), window.handle());
            assert_eq!(hand.remote_key(&handle, 0), 0);
            assert_ne!(hand.remote_key(&handle, 1), 0);
            assert_eq!(hand.local_key(&handle) != 0, rank.rank() == 1);
            comm.deregister(&window)?;
            assert_eq!([hand.remote_key(&handle, 0), hand.remote_key(&handle, 1), hand.local_key(&handle)], [0; 3]);
            comm.destroy()
        });
    }
}

#[test]
fn entries_never_announced_complete_before_a_window_ends_and_raise_counters() {
    for (nics, config) in worlds(3) {
        run(&nics, by_hand(config), |rank| {
            let (me, right) = (rank.rank(), (rank.rank() + 1) % 3);
            let comm = rank.communicator(&requirements())?;
            let source = comm.alloc_window::<u64>(20, WindowFlags::NONE)?;
            let target = comm.alloc_window::<u64>(20, WindowFlags::SIGNALS)?;
            source.fill(u64::from(me))?;
            let hand = Hand::new(&comm);
            for round in 1..=3 {
                // The last round fills the ring.
                for index in 0..[5, 10, 16][round as usize - 1] {
                    hand.put((1, right), (&target.handle(), 8 * index), (&source.handle(), 0), 8, Some(index % 2));
                }
                hand.put((0, me), (&target.handle(), 152), (&source.handle(), 0), 8, Some(7));
                comm.deregister(&comm.alloc_window::<u8>(1, WindowFlags::NONE)?)?;
                let pair = hand.pair(1, right);
                assert_eq!((pair.completion_index, pair.rung), (pair.producer_index(), pair.producer_index()));
                assert_eq!(hand.counter(0, 7), round);
            }
            assert_eq!([hand.counter(1, 0), hand.counter(1, 1)], [16, 15]);
            assert_eq!(target.read_range(0..16)?, [u64::from((me + 2) % 3); 16]);
            comm.destroy()
        });
    }
}

#[test]
fn an_entry_that_fails_unseen_ends_the_communicator_when_a_window_ends() {
    for (nics, config) in worlds(2) {
        run(&nics, config, |rank| {
            let comm = rank.communicator(&requirements())?;
            let window = comm.alloc_window::<u64>(4, WindowFlags::NONE)?;
            if rank.rank() == 1 {
                // Past the end of rank 0's part.
                Hand::new(&comm).put((1, 0), (&window.handle(), 32), (&window.handle(), 0), 8, None);
            }
            let CommError::Ended { rank: 1, fault, .. } = comm.deregister(&window).unwrap_err() else {
                panic!("expected another error")
            };
            assert_eq!((fault.kind(), fault.operation()), (FaultKind::Network, Operation::Put));
            assert_eq!((fault.context(), fault.peer()), (1, 0));
            let syndrome = gin_abi::mlx5::cqe::Syndrome::RemoteAccess.code();
            assert_eq!((fault.expected(), fault.seen()), (0, u64::from(syndrome)));
            comm.destroy()
        });
    }
}

#[test]
fn entries_that_do_not_end_in_time_keep_the_window_and_are_counted() {
    for (nics, config) in worlds(2) {
        nics.fabric().inject(Fault { device: None, queue: None, entry: 0, kind: NicFault::Delay(1 << 50) }).unwrap();
        let config = config.with_comm(|comm| comm.drain(Duration::from_millis(5)));
        run(&nics, config, |rank| {
            let comm = rank.communicator(&requirements())?;
            let window = comm.alloc_window::<u64>(4, WindowFlags::NONE)?;
            if rank.rank() == 0 {
                Hand::new(&comm).put((0, 1), (&window.handle(), 0), (&window.handle(), 8), 8, None);
            }
            match comm.deregister(&window).unwrap_err() {
                CommError::InFlight { rank: 0, requests: 2, waited_ms: 5, .. } => assert_eq!(rank.rank(), 0),
                CommError::OtherRank { rank: 0, .. } => assert_eq!(rank.rank(), 1),
                other => panic!("{other}"),
            }
            assert_ne!(Hand::new(&comm).remote_key(&window.handle(), 1), 0);
            rank.barrier()?;
            comm.abort()?;
            comm.destroy()
        });
    }
}

#[test]
fn a_communicator_that_is_dropped_leaves_nothing_behind() {
    for (nics, config) in worlds(2) {
        run(&nics, config, |rank| {
            let comm = rank.communicator(&requirements())?;
            let window = comm.alloc_window::<u64>(4, WindowFlags::NONE)?;
            let hand = Hand::new(&comm);
            hand.put((0, 1 - rank.rank()), (&window.handle(), 0), (&window.handle(), 8), 8, None);
            hand.ring(0, 1 - rank.rank());
            Ok(window)
        });
    }
}

#[test]
fn the_same_seed_gives_the_same_run() {
    let log = |seed: u64| {
        let nics = SoftNics::new(Options { delay: 3, seed, ..Options::default() });
        let mut config = by_hand(WorldConfig::seeded(2, seed).soft_nics(&nics));
        if let gin_host::world::WorldMode::Seeded(seeded) = &mut config.mode {
            seeded.log = LogMode::Full;
        }
        let (results, log) = launch_logged(config, |rank| exchange(&rank, &rank.communicator(&requirements())?));
        results.unwrap();
        log
    };
    assert_eq!(log(3), log(3));
    assert_ne!(log(3), log(4));
}
