// SPDX-License-Identifier: MIT OR Apache-2.0
//! Grids: positions, streams, limits, residency.

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::SeqCst};

use common::*;
use gin_abi::{Fault, FaultKind, FaultSubject, Operation};
use gin_virtual::*;

#[test]
fn no_thread_passes_a_block_barrier_before_all_have_come() {
    everywhere(|| {
        let come = Arc::new(AtomicU64::new(0));
        Grid::new("count", 1, 96, move || {
            for round in 1..=3 {
                come.fetch_add(1, SeqCst);
                sync();
                assert_eq!(come.load(SeqCst), 96 * round);
                sync();
            }
        })
    });
}

#[test]
fn every_thread_of_a_three_dimensional_grid_runs_once_at_its_own_position() {
    for world in worlds() {
        let seen = Arc::new(List::default());
        let list = seen.clone();
        let mut grid = Grid::new("places", 1, 1, move || list.push((executor().position)()));
        grid.grid_dim = Dim3 { x: 2, y: 3, z: 2 };
        grid.block_dim = Dim3 { x: 4, y: 2, z: 3 };
        run_grid(&world, DeviceConfig::default(), &grid).unwrap();
        let mut places: Vec<_> = seen
            .get()
            .into_iter()
            .map(|place| {
                assert_eq!((place.grid_dim, place.block_dim), (grid.grid_dim, grid.block_dim));
                let [b, t] = [place.block, place.thread];
                [b.z, b.y, b.x, t.z, t.y, t.x]
            })
            .collect();
        places.sort_unstable();
        let mut expected = Vec::new();
        for [bz, by, bx] in extents(grid.grid_dim) {
            for [tz, ty, tx] in extents(grid.block_dim) {
                expected.push([bz, by, bx, tz, ty, tx]);
            }
        }
        assert_eq!(places, expected);
    }
}

fn extents(dim: Dim3) -> Vec<[u32; 3]> {
    let rows = (0..dim.z).flat_map(|z| (0..dim.y).map(move |y| [z, y]));
    rows.flat_map(|[z, y]| (0..dim.x).map(move |x| [z, y, x])).collect()
}

#[test]
fn grids_of_one_stream_run_one_after_the_other() {
    for world in worlds() {
        let gpu = world.device(DeviceConfig::default());
        let running = Arc::new(AtomicU32::new(0));
        let order = Arc::new(List::default());
        let host = || {
            let tickets: Vec<_> = (0..4)
                .map(|number| {
                    let (running, order) = (running.clone(), order.clone());
                    let grid = Grid::new("one", 1, 33, move || {
                        if thread() == 0 {
                            assert_eq!(running.swap(1, SeqCst), 0);
                        }
                        sync();
                        pause(100);
                        sync();
                        if thread() == 0 {
                            order.push(number);
                            running.store(0, SeqCst);
                        }
                    });
                    gpu.launch(StreamId(3), grid).unwrap()
                })
                .collect();
            for ticket in tickets {
                ticket.wait().unwrap();
            }
        };
        world.run(vec![host]).unwrap();
        assert_eq!(order.get(), [0, 1, 2, 3]);
    }
}

#[test]
fn grids_of_different_streams_meet() {
    for world in worlds() {
        let gpu = world.device(DeviceConfig::default());
        let here = Arc::new(AtomicU32::new(0));
        let host = || {
            let tickets = [0, 1, 2].map(|stream| {
                let here = here.clone();
                let grid = Grid::new("meet", 1, 1, move || {
                    here.fetch_add(1, SeqCst);
                    while here.load(SeqCst) < 3 {
                        pause(50);
                    }
                });
                gpu.launch(StreamId(stream), grid).unwrap()
            });
            for ticket in tickets {
                ticket.wait().unwrap();
            }
        };
        world.run(vec![host]).unwrap();
    }
}

#[test]
fn no_more_blocks_than_the_residency_limit_are_resident() {
    for world in worlds() {
        let (now, max) = (Arc::new(AtomicU32::new(0)), Arc::new(AtomicU32::new(0)));
        let (n, m) = (now.clone(), max.clone());
        let grid = Grid::new("rooms", 11, 32, move || {
            if thread() == 0 {
                m.fetch_max(n.fetch_add(1, SeqCst) + 1, SeqCst);
            }
            for _ in 0..5 {
                pause(100);
            }
            sync();
            if thread() == 0 {
                n.fetch_sub(1, SeqCst);
            }
        });
        run_grid(&world, DeviceConfig::resident(3), &grid).unwrap();
        assert_eq!(now.load(SeqCst), 0);
        assert!((2..=3).contains(&max.load(SeqCst)), "{max:?}");
    }
}

#[test]
fn a_grid_that_needs_more_blocks_than_fit_is_reported_with_the_block_that_never_began() {
    for schedule in Schedule::PLAIN {
        let config = SeededConfig { stall_steps: 20_000, ..SeededConfig::new(5).schedule(schedule) };
        let world = World::seeded(config);
        let gpu = world.device(DeviceConfig::resident(4));
        let here = Arc::new(AtomicU32::new(0));
        let grid = Grid::new("all meet", 7, 32, move || {
            here.fetch_add(1, SeqCst);
            while here.load(SeqCst) < 7 * 32 {
                pause(100);
            }
        });
        let host = || drop(gpu.launch(StreamId(0), grid).unwrap().wait());
        let error = world.run(vec![host]).unwrap_err();
        let WorldError::NoProgress { report, .. } = &error else { panic!("{error}") };
        assert_eq!(report.not_started.len(), 1);
        assert_eq!((report.not_started[0].first_block, report.not_started[0].blocks), (4, 7));
        assert_eq!(report.waiters.len(), 1 + 4 * 32);
        let text = error.to_string();
        assert!(text.contains("grid `all meet`: blocks 4 to 6 of 7 not started: residency limit 4"), "{text}");
        assert!(text.contains("blocks 0 to 3, thread 0 to 31: pausing in a polling loop"), "{text}");
        assert!(text.contains("host of rank 0: waiting for a condition at gin-host/virtual/tests/basics.rs"), "{text}");
    }
}

#[test]
fn every_waiter_is_reported_with_the_value_that_it_saw_last_in_its_present_wait() {
    const SIGNAL: Fault = Fault::new(FaultKind::Timeout, Operation::WaitSignal);
    for schedule in Schedule::PLAIN {
        let config = SeededConfig { stall_steps: 20_000, ..SeededConfig::new(5).schedule(schedule) };
        let world = World::seeded(config);
        let gpu = world.device(DeviceConfig::default());
        let grid = Grid::new("unmet", 1, 4, || {
            let executor = executor();
            let own = u64::from(thread());
            (executor.wait_begins)(Some(SIGNAL.with_values(FaultSubject::Signal(3), 9, 0)));
            (executor.sees)(50 + own);
            if own == 2 {
                // The value that it saw belongs to a wait that ends here.
                (executor.wait_ends)();
                (executor.wait_begins)(Some(SIGNAL.with_values(FaultSubject::Signal(4), 8, 7)));
            }
            loop {
                pause(100);
                if own < 2 {
                    (executor.sees)(60 + own);
                }
            }
        });
        let host = || drop(gpu.launch(StreamId(0), grid).unwrap().wait());
        let text = world.run(vec![host]).unwrap_err().to_string();
        for values in
            ["3: it is 60 and should reach 9", "3: it is 61 and", "4: it is 7 and should reach 8", "3: it is 53 and"]
        {
            assert!(text.contains(&format!("waiting in wait_signal, signal {values}")), "no {values} in\n{text}");
        }
    }
}

#[test]
fn a_cooperative_grid_that_cannot_be_resident_is_refused_with_both_figures() {
    for world in worlds() {
        let gpu = world.device(DeviceConfig::resident(8));
        let stop = Arc::new(AtomicBool::new(false));
        let host = || {
            let grid = |name, blocks| Grid::new(name, blocks, 1, || ()).cooperative();
            let error = gpu.launch(StreamId(0), grid("big", 9)).unwrap_err();
            assert!(matches!(error, LaunchError::NotResident { blocks: 9, free: 8, limit: 8, .. }), "{error}");
            let stop_it = stop.clone();
            let engine = Grid::new("engine", 3, 1, move || {
                while !stop_it.load(SeqCst) {
                    pause(1000);
                }
            });
            let engine = gpu.launch(StreamId(1), engine).unwrap();
            let error = gpu.launch(StreamId(0), grid("six", 6)).unwrap_err();
            assert_eq!(
                error.to_string(),
                "cooperative grid `six` of 6 blocks cannot be resident: 5 of 8 blocks are free on rank 0"
            );
            gpu.launch(StreamId(0), grid("five", 5)).unwrap().wait().unwrap();
            stop.store(true, SeqCst);
            engine.wait().unwrap();
            gpu.launch(StreamId(0), grid("eight", 8)).unwrap().wait().unwrap();
        };
        world.run(vec![host]).unwrap();
    }
}

#[test]
fn a_cooperative_grid_begins_only_when_all_its_blocks_have_room() {
    for world in worlds() {
        let gpu = world.device(DeviceConfig::resident(4));
        let host = || {
            let before = Grid::new("before", 4, 1, || (0..4).for_each(|_| pause(200)));
            let here = Arc::new(AtomicU32::new(0));
            let together = Grid::new("together", 4, 1, move || {
                here.fetch_add(1, SeqCst);
                while here.load(SeqCst) < 4 {
                    pause(100);
                }
            });
            let after = Grid::new("after", 9, 1, || pause(300));
            let first = gpu.launch(StreamId(0), before).unwrap();
            let second = gpu.launch(StreamId(0), together.cooperative()).unwrap();
            let third = gpu.launch(StreamId(1), after).unwrap();
            for ticket in [first, second, third] {
                ticket.wait().unwrap();
            }
        };
        world.run(vec![host]).unwrap();
    }
}

#[test]
fn limits_of_a_launch_are_checked_as_on_a_gpu() {
    let grid = |grid: [u32; 3], block: [u32; 3], shared| {
        let [x, y, z] = grid;
        let [bx, by, bz] = block;
        let mut grid = Grid::new("limits", 1, 1, || ()).dynamic_shared(shared);
        grid.grid_dim = Dim3 { x, y, z };
        grid.block_dim = Dim3 { x: bx, y: by, z: bz };
        grid.check().map_err(|error| error.to_string())
    };
    let one = [1, 1, 1];
    assert_eq!(grid([0x7fff_ffff, 65_535, 65_535], [1024, 1, 1], 227 << 10), Ok(()));
    assert_eq!(grid(one, [16, 1, 64], 0), Ok(()));
    let wrong = |message: &str| Err(message.to_owned());
    assert_eq!(grid([1, 0, 1], one, 0), wrong("grid of 1x0x1 has an extent of zero"));
    assert_eq!(grid(one, [32, 1, 0], 0), wrong("block of 32x1x0 has an extent of zero"));
    assert_eq!(grid(one, [513, 2, 1], 0), wrong("block of 1026 threads exceeds the limit of 1024"));
    assert_eq!(grid(one, [1025, 1, 1], 0), wrong("block extent x is 1025, the limit is 1024"));
    assert_eq!(grid(one, [1, 1, 65], 0), wrong("block extent z is 65, the limit is 64"));
    assert_eq!(grid([1, 65_536, 1], one, 0), wrong("grid extent y is 65536, the limit is 65535"));
    assert_eq!(grid([1 << 31, 1, 1], one, 0), wrong("grid extent x is 2147483648, the limit is 2147483647"));
    let shared = "232449 bytes of dynamic shared memory per block, the limit is 232448";
    assert_eq!(grid(one, one, (227 << 10) + 1), wrong(shared));
}

#[test]
fn a_launch_checks_its_limits_before_it_counts() {
    let world = World::seeded(SeededConfig::default());
    let gpu = world.device(DeviceConfig::default());
    assert!(gpu.launch(StreamId(0), Grid::new("none", 0, 1, || ())).is_err());
    assert!(gpu.is_idle());
}
