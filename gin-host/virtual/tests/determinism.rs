// SPDX-License-Identifier: MIT OR Apache-2.0
//! A seed gives the same run, byte for byte; another seed gives another run.

mod common;

use std::panic::Location;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};

use common::*;
use gin_virtual::*;

/// Runs four ranks that pass a token through a service, with kernels that use everything that can switch. Returns the
/// values that the host functions saw, and the log.
fn busy_world(seed: u64, schedule: Schedule, log: LogMode) -> (Vec<u64>, EventLog) {
    let world = World::seeded(SeededConfig::new(seed).schedule(schedule).log(log));
    // Memory whose addresses differ from run to run.
    let _noise: Vec<Box<u64>> = (0..std::process::id() % 97).map(|value| Box::new(value.into())).collect();
    let mail: Arc<[AtomicU64; 5]> = Arc::default();
    let hosts = (0..4).map(|rank: usize| {
        let gpu = world.device(DeviceConfig::resident(2));
        let (world, mail) = (world.clone(), mail.clone());
        move || {
            let carried = mail.clone();
            let carrier =
                world.spawn_service(&format!("carrier {rank}"), move || match carried[rank].swap(0, SeqCst) {
                    0 => ServiceStep::Idle,
                    token => {
                        carried[(rank + 1) % 4].fetch_add(token, SeqCst);
                        ServiceStep::Busy
                    }
                });
            let kernel_mail = mail.clone();
            let order = Arc::new(AtomicU64::new(1));
            let seen = order.clone();
            let grid = Grid::new("busy", 3, 48, move || {
                for _ in 0..3 {
                    (executor().switch_point)();
                    let mask = (executor().active_mask)(Location::caller());
                    let number = exchange(mask, u64::from(thread()));
                    (executor().switch_point)();
                    // Depends on the order of all threads.
                    let now = (executor().clock_ns)();
                    let mixed = order.load(SeqCst).wrapping_mul(31) ^ u64::from(thread()) ^ u64::from(mask) ^ now;
                    order.store(mixed, SeqCst);
                    assert_eq!(number[thread() as usize % 32], u64::from(thread()));
                    pause(thread() % 7 * 50);
                    sync();
                }
                if thread() == 0 {
                    kernel_mail[rank].fetch_add(1, SeqCst);
                }
            });
            gpu.launch(StreamId(0), grid).unwrap().wait().unwrap();
            sleep_ns(1000);
            carrier.stop_and_wait();
            seen.load(SeqCst) ^ clock_ns()
        }
    });
    let seen = world.run(hosts.collect()).unwrap();
    (seen, world.event_log())
}

#[test]
fn the_same_seed_gives_the_same_log_byte_for_byte_under_every_policy() {
    for schedule in Schedule::PLAIN.into_iter().chain([Schedule::Mixed]) {
        for seed in [0, 1, u64::MAX] {
            let (first, second) =
                (busy_world(seed, schedule, LogMode::Full), busy_world(seed, schedule, LogMode::Full));
            assert!(first.1.count() > 1000);
            assert_eq!(first.1.to_bytes(), second.1.to_bytes(), "seed {seed}, {schedule:?}");
            assert_eq!(first.0, second.0);
        }
    }
}

#[test]
fn the_log_does_not_depend_on_the_os_thread_or_on_other_worlds_of_the_process() {
    let first = busy_world(9, Schedule::Mixed, LogMode::Full);
    let others: Vec<_> = (0..2)
        .map(|_| {
            std::thread::spawn(|| {
                busy_world(3, Schedule::Random, LogMode::Off);
                busy_world(9, Schedule::Mixed, LogMode::Full)
            })
        })
        .collect();
    for other in others {
        assert!(other.join().unwrap() == first);
    }
}

#[test]
fn another_seed_gives_another_run() {
    for schedule in [Schedule::Random, Schedule::Starve, Schedule::WarpAhead] {
        let runs: Vec<_> = (0..8).map(|seed| busy_world(seed, schedule, LogMode::Hash)).collect();
        for (at, run) in runs.iter().enumerate() {
            assert!(run.1.to_bytes().is_empty());
            for other in &runs[..at] {
                assert_ne!(run.1.hash(), other.1.hash());
                assert_ne!(run.0, other.0);
            }
        }
    }
}

#[test]
fn the_hash_of_a_log_is_the_same_whether_events_are_kept_or_not() {
    let (full, hash) =
        (busy_world(4, Schedule::Random, LogMode::Full).1, busy_world(4, Schedule::Random, LogMode::Hash).1);
    assert_eq!((full.hash(), full.count()), (hash.hash(), hash.count()));
    assert_eq!(full.to_bytes().len() as u64, 24 * full.count());
}

#[test]
fn a_log_prints_one_line_an_event_with_logical_names() {
    let text = busy_world(0, Schedule::RoundRobin, LogMode::Full).1.to_string();
    for part in ["host 3: resume", "service 0: resume", "rank 2 launch 1 block 1 thread 47: thread ends", "clock jumps"]
    {
        assert!(text.contains(part), "no {part:?}");
    }
}

#[test]
fn later_runs_of_a_world_go_on_from_its_clock_and_repeat_too() {
    let twice = || {
        let world = World::seeded(SeededConfig::new(2).log(LogMode::Full));
        let clocks: Vec<u64> = (0..3)
            .flat_map(|_| {
                let host = || {
                    sleep_ns(500);
                    clock_ns()
                };
                world.run(vec![host, host]).unwrap()
            })
            .collect();
        assert!(clocks[2] >= 1000 && clocks[4] >= 1500, "{clocks:?}");
        (clocks, world.event_log().to_bytes())
    };
    assert_eq!(twice(), twice());
}
