// SPDX-License-Identifier: MIT OR Apache-2.0
//! Hosts, services, clocks, and the ends of worlds.

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::SeqCst};
use std::time::{Duration, Instant};

use common::*;
use gin_virtual::*;

#[test]
fn results_come_in_the_order_of_the_hosts_and_hosts_may_borrow() {
    for world in worlds() {
        let names = [String::from("a"), String::from("b"), String::from("c")];
        let hosts: Vec<_> = (0..3).map(|at: usize| (at, &names[at])).collect();
        let results = world.run(
            hosts
                .into_iter()
                .map(|(at, name)| {
                    move || {
                        sleep_ns(10_000 * (3 - at as u64));
                        format!("{name}{at}")
                    }
                })
                .collect(),
        );
        assert_eq!(results.unwrap(), ["a0", "b1", "c2"]);
    }
}

#[test]
fn hosts_wait_for_each_other_with_block_on() {
    for world in worlds() {
        let turn = AtomicU32::new(0);
        let hosts = (0..4).map(|rank| {
            let turn = &turn;
            move || {
                for round in 0..5 {
                    assert!(block_on(|| turn.load(SeqCst) == round * 4 + rank));
                    turn.fetch_add(1, SeqCst);
                }
            }
        });
        world.run(hosts.collect()).unwrap();
        assert_eq!(turn.load(SeqCst), 20);
    }
}

#[test]
fn the_virtual_clock_jumps_when_all_nap_and_no_real_time_passes() {
    let world = World::seeded(SeededConfig::new(1));
    let started = Instant::now();
    let clocks = world.run(vec![|| {
        let before = clock_ns();
        sleep_ns(3_000_000_000_000);
        clock_ns() - before
    }]);
    let slept = clocks.unwrap()[0];
    assert!((3_000_000_000_000..3_000_000_001_000).contains(&slept), "{slept}");
    assert!(started.elapsed() < Duration::from_secs(60));
}

#[test]
fn sleepers_wake_in_the_order_of_their_times() {
    for world in seeded_worlds(3) {
        let order = List::default();
        let hosts = [300, 100, 200].map(|us: u64| {
            let order = &order;
            move || {
                sleep_ns(us * 1000);
                order.push(us);
            }
        });
        world.run(hosts.into()).unwrap();
        assert_eq!(order.get(), [100, 200, 300]);
    }
}

#[test]
fn a_loop_that_only_reads_the_clock_ends_at_its_deadline() {
    everywhere(|| {
        Grid::new("clock", 1, 32, || {
            let start = (executor().clock_ns)();
            while (executor().clock_ns)() < start + 20_000 {}
            assert!((executor().cycles)() > 0);
        })
    });
}

#[test]
fn a_loop_of_switch_points_lets_others_run_and_the_clock_advance() {
    everywhere(|| {
        let flag = Arc::new(AtomicBool::new(false));
        Grid::new("spin", 1, 64, move || {
            if thread() == 63 {
                flag.store(true, SeqCst);
            }
            while !flag.load(SeqCst) {
                (executor().switch_point)();
            }
        })
    });
}

#[test]
fn services_run_beside_the_hosts_until_they_are_stopped() {
    for world in worlds() {
        let (asked, answered) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
        let (a, b) = (asked.clone(), answered.clone());
        // Spawned before the run.
        let echo = world.spawn_service("echo", move || {
            let asked = a.load(SeqCst);
            if b.swap(asked, SeqCst) == asked { ServiceStep::Idle } else { ServiceStep::Busy }
        });
        let host = || {
            let count = Arc::new(AtomicU32::new(0));
            let counter = count.clone();
            // Spawned during the run; ends by itself.
            let finite = world.spawn_service("finite", move || match counter.fetch_add(1, SeqCst) {
                9 => ServiceStep::Stop,
                even if even % 2 == 0 => ServiceStep::Busy,
                _ => ServiceStep::IdleFor(1000),
            });
            for round in 1..=5 {
                asked.store(round, SeqCst);
                block_on(|| answered.load(SeqCst) == round);
            }
            block_on(|| finite.is_finished());
            assert_eq!(count.load(SeqCst), 10);
            assert!(!echo.is_finished());
            echo.stop_and_wait();
            assert!(echo.is_finished());
        };
        world.run(vec![host]).unwrap();
    }
}

#[test]
fn the_end_of_a_run_ends_its_services_and_drops_them() {
    for world in worlds() {
        let held = Arc::new(());
        let mine = held.clone();
        let service = world.spawn_service("holder", move || {
            let _ = &mine;
            ServiceStep::Idle
        });
        world.run(vec![|| sleep_ns(100_000)]).unwrap();
        assert!(service.is_finished());
        assert_eq!(Arc::strong_count(&held), 1);
    }
}

#[test]
fn a_run_ends_only_when_all_grids_have_ended() {
    for world in worlds() {
        let gpu = world.device(DeviceConfig::default());
        let done = Arc::new(AtomicBool::new(false));
        let flag = done.clone();
        let grid = Grid::new("slow", 1, 1, move || {
            (0..50).for_each(|_| pause(10_000));
            flag.store(true, SeqCst);
        });
        world.run(vec![|| drop(gpu.launch(StreamId(0), grid).unwrap())]).unwrap();
        assert!(done.load(SeqCst));
    }
}

#[test]
fn a_panic_in_a_host_ends_all_others_and_goes_on_in_the_caller() {
    struct Dropped<'a>(&'a AtomicU32);
    impl Drop for Dropped<'_> {
        fn drop(&mut self) {
            self.0.fetch_add(1, SeqCst);
        }
    }
    for world in worlds() {
        let gpu = world.device(DeviceConfig::default());
        let dropped = AtomicU32::new(0);
        let begun = AtomicU32::new(0);
        let hosts = (0..3).map(|rank| {
            let (gpu, dropped, begun) = (gpu.clone(), &dropped, &begun);
            move || {
                let _guard = Dropped(dropped);
                begun.fetch_add(1, SeqCst);
                if rank == 1 {
                    block_on(|| begun.load(SeqCst) == 3);
                    panic!("rank one has had enough");
                }
                let endless = Grid::new("endless", 1, 4, || {
                    loop {
                        pause(100);
                    }
                });
                gpu.launch(StreamId(rank), endless).unwrap().wait().unwrap();
            }
        });
        let run = std::panic::AssertUnwindSafe(|| world.run(hosts.collect()));
        let payload = std::panic::catch_unwind(run).unwrap_err();
        assert_eq!(payload.downcast_ref::<&str>(), Some(&"rank one has had enough"));
        assert_eq!(dropped.load(SeqCst), 3);
        assert!(gpu.is_idle());
        // The world can be used again.
        world.run(vec![|| gpu.launch(StreamId(0), Grid::new("again", 1, 32, sync)).unwrap().wait().unwrap()]).unwrap();
    }
}

#[test]
fn a_panic_in_a_service_ends_the_run_with_its_name() {
    for world in worlds() {
        world.spawn_service("fragile", || panic!("service {}", 7));
        let error = world.run(vec![|| block_on(|| false)]).unwrap_err();
        assert_eq!(error.to_string(), "service `fragile` panicked: service 7");
    }
}

#[test]
fn hosts_that_wait_for_each_other_for_ever_are_reported_with_their_places() {
    for schedule in Schedule::PLAIN {
        let world = World::seeded(SeededConfig { stall_steps: 5_000, ..SeededConfig::new(1).schedule(schedule) });
        world.spawn_service("idler", || ServiceStep::Idle);
        let error = world.run(vec![|| block_on(|| false), || block_on(|| false)]).unwrap_err();
        let text = error.to_string();
        assert!(text.starts_with("no progress: 5000 choices passed without progress\n"), "{text}");
        let line = line!() - 3;
        assert!(
            text.contains(&format!(
                "host of rank 0: waiting for a condition at gin-host/virtual/tests/worlds.rs:{line}"
            )),
            "{text}"
        );
        assert!(text.contains("host of rank 1: waiting"), "{text}");
        assert!(text.contains("service `idler`: pausing"), "{text}");
    }
}

#[test]
fn a_run_ends_at_its_limits_of_choices_and_of_virtual_time() {
    let endless = || {
        Grid::new("barriers for ever", 1, 32, || {
            loop {
                sync();
            }
        })
    };
    let limits = [
        (SeededConfig { max_steps: 10_000, ..SeededConfig::new(1) }, "the limit of 10000 choices was reached"),
        (
            SeededConfig { max_virtual_ns: 30_000, ..SeededConfig::new(1) },
            "the limit of 30000 ns of virtual time was reached",
        ),
    ];
    for (config, reason) in limits {
        let world = World::seeded(config);
        let gpu = world.device(DeviceConfig::default());
        let error = world.run(vec![|| drop(gpu.launch(StreamId(0), endless()).unwrap().wait())]).unwrap_err();
        let text = error.to_string();
        assert!(text.contains(reason) && text.contains("grid `barriers for ever`"), "{text}");
    }
}

#[test]
fn a_grid_beyond_the_limit_of_a_threaded_world_is_reported() {
    let world =
        World::threads(ThreadsConfig { grid_limit: Some(Duration::from_millis(200)), ..ThreadsConfig::default() });
    let grid = Grid::new("poller", 5, 32, || {
        loop {
            pause(1000);
        }
    });
    let error = run_grid(&world, DeviceConfig::resident(2), &grid).unwrap_err();
    let text = error.to_string();
    assert!(text.starts_with("rank 0, grid `poller`: has not ended after 200000000 ns"), "{text}");
    assert!(text.contains("blocks 0 to 1, thread 0 to 31: pausing in a polling loop"), "{text}");
    assert!(text.contains("blocks 2 to 4 of 5 not started: residency limit 2"), "{text}");
}

#[test]
fn a_run_inside_of_a_run_is_refused() {
    for world in worlds() {
        let inner = world.clone();
        let results = world.run(vec![move || inner.run(vec![|| ()])]).unwrap();
        assert_eq!(results, [Err(WorldError::Nested)]);
    }
}

#[test]
fn devices_of_a_threaded_world_work_without_a_run() {
    let world = World::threads(ThreadsConfig::default());
    let gpus = [world.device(DeviceConfig::default()), world.device(DeviceConfig::default())];
    assert_eq!(world.devices().len(), 2);
    let here = Arc::new(AtomicU32::new(0));
    let tickets: Vec<_> = gpus
        .iter()
        .map(|gpu| {
            let here = here.clone();
            let grid = Grid::new("meet", 2, 32, move || {
                here.fetch_add(1, SeqCst);
                while here.load(SeqCst) < 128 {
                    pause(100);
                }
                assert!(!is_simulated());
            });
            gpu.launch(StreamId(0), grid).unwrap()
        })
        .collect();
    assert!(tickets.iter().all(|ticket| ticket.wait().is_ok()));
    gpus[0].synchronize();
}

#[test]
fn a_threaded_world_that_is_dropped_ends_its_endless_grids_and_services() {
    let world = World::threads(ThreadsConfig::default());
    let gpu = world.device(DeviceConfig::default());
    let held = Arc::new(());
    let (kernel_holds, service_holds) = (held.clone(), held.clone());
    let grid = Grid::new("endless", 1, 32, move || {
        loop {
            let _ = &kernel_holds;
            pause(100);
        }
    });
    let ticket = gpu.launch(StreamId(0), grid).unwrap();
    let service = world.spawn_service("endless", move || {
        let _ = &service_holds;
        ServiceStep::Idle
    });
    drop((gpu, world));
    assert!(matches!(ticket.wait(), Err(LaunchError::WorldEnded { .. })));
    assert!(service.is_finished());
    drop(ticket);
    assert_eq!(Arc::strong_count(&held), 1);
}

#[test]
fn code_of_a_seeded_world_knows_that_it_is_simulated() {
    let world = World::seeded(SeededConfig::default());
    assert!(!is_simulated());
    assert_eq!(world.run(vec![is_simulated]).unwrap(), [true]);
}

/// Waits as the waits of the device API do, until `test` returns true.
fn wait(mut test: impl FnMut() -> bool) {
    (executor().wait_begins)(None);
    while !test() {
        for _ in 0..64 {
            (executor().switch_point)();
        }
        pause(64);
    }
    (executor().wait_ends)();
}

#[test]
fn a_deadline_of_seconds_in_a_world_where_all_wait_passes_in_few_choices_and_is_not_late() {
    const SECONDS: u64 = 5_000_000_000;
    for schedule in Schedule::PLAIN {
        // By polls alone it would take seven million naps.
        let world = World::seeded(SeededConfig { max_steps: 200_000, ..SeededConfig::new(1).schedule(schedule) });
        let late = Arc::new(AtomicU64::new(0));
        let seen = late.clone();
        let grid = Grid::new("waits", 1, 2, move || {
            let start = clock_ns();
            wait(|| clock_ns() - start >= SECONDS);
            seen.fetch_max(clock_ns() - start - SECONDS, SeqCst);
        });
        run_grid(&world, DeviceConfig::default(), &grid).unwrap();
        assert!(late.load(SeqCst) < SECONDS / 50, "{schedule:?}: {} ns", late.load(SeqCst));
    }
}

#[test]
fn a_thread_that_waits_in_a_quiet_world_notices_a_change_at_once() {
    for schedule in Schedule::PLAIN {
        let world = World::seeded(SeededConfig::new(2).schedule(schedule));
        let (flag, seen_at) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let (raised, seen) = (flag.clone(), seen_at.clone());
        let grid = Grid::new("waits", 1, 1, move || {
            wait(|| raised.load(SeqCst));
            seen.store(clock_ns(), SeqCst);
        });
        let gpu = world.device(DeviceConfig::default());
        let set_at = world.run(vec![|| {
            let launch = gpu.launch(StreamId(0), grid.clone()).unwrap();
            sleep_ns(1_000_000_000);
            let now = clock_ns();
            flag.store(true, SeqCst);
            launch.wait().unwrap();
            now
        }]);
        // A stretched nap lasts 15 ms by then.
        let late = seen_at.load(SeqCst) - set_at.unwrap()[0];
        assert!(late < 500_000, "{schedule:?}: {late} ns");
    }
}

#[test]
fn a_loop_that_no_wait_encloses_keeps_a_world_from_being_quiet() {
    // 300 threads hand a word on, each after a nap. The last one has it as soon as if the world were busy.
    let world = World::seeded(SeededConfig::new(3));
    let word = Arc::new(AtomicU64::new(0));
    let grid = Grid::new("hand on", 1, 301, move || {
        let number = u64::from(thread());
        if number == 300 {
            return wait(|| word.load(SeqCst) == 600);
        }
        for round in [0, 300] {
            while word.load(SeqCst) != round + number {
                pause(1000);
            }
            pause(20_000);
            word.fetch_add(1, SeqCst);
        }
    });
    let gpu = world.device(DeviceConfig::default());
    let took = world.run(vec![|| {
        let start = clock_ns();
        gpu.launch(StreamId(0), grid.clone()).unwrap().wait().unwrap();
        clock_ns() - start
    }]);
    let took = took.unwrap()[0];
    assert!(took < 600 * 40_000, "{took} ns");
}
