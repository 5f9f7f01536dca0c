// SPDX-License-Identifier: MIT OR Apache-2.0
//! Thousands of threads are practical.

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};

use common::*;
use gin_virtual::*;

/// Runs four ranks, each with 8 blocks of 256 threads that meet at their block's barrier ten times.
fn four_ranks(world: &World) {
    let hosts = (0..4).map(|_| {
        let gpu = world.device(DeviceConfig::default());
        move || {
            let sums: Arc<[AtomicU64; 8]> = Arc::default();
            let grid = Grid::new("many", 8, 256, move || {
                let sum = &sums[block() as usize];
                for round in 1..=5 {
                    sum.fetch_add(1, SeqCst);
                    sync();
                    assert_eq!(sum.load(SeqCst), 256 * round);
                    sync();
                }
            });
            gpu.launch(StreamId(0), grid).unwrap().wait().unwrap();
        }
    });
    world.run(hosts.collect()).unwrap();
}

#[test]
fn four_ranks_of_eight_blocks_of_256_threads_pass_block_barriers_in_a_seeded_world() {
    for schedule in Schedule::PLAIN {
        four_ranks(&World::seeded(SeededConfig::new(1).schedule(schedule)));
    }
}

#[test]
fn four_ranks_of_eight_blocks_of_256_threads_pass_block_barriers_in_a_threaded_world() {
    four_ranks(&World::threads(ThreadsConfig::default()));
}

#[test]
fn a_grid_of_full_blocks_many_times_over_the_residency_limit_runs() {
    let world = World::seeded(SeededConfig::new(1));
    let count = Arc::new(AtomicU64::new(0));
    let counter = count.clone();
    let grid = Grid::new("wide", 100, 1024, move || {
        counter.fetch_add(1, SeqCst);
        sync();
    });
    run_grid(&world, DeviceConfig::resident(4), &grid).unwrap();
    assert_eq!(count.load(SeqCst), 102_400);
}

#[test]
fn thirty_thousand_threads_of_a_mebibyte_of_stack_are_resident_together() {
    let world = World::seeded(SeededConfig::new(1));
    let count = Arc::new(AtomicU64::new(0));
    let counter = count.clone();
    let grid = Grid::new("wide", 30, 1000, move || {
        counter.fetch_add(1, SeqCst);
        // Every thread waits for the last one.
        while counter.load(SeqCst) < 30_000 {
            pause(1000);
        }
    });
    run_grid(&world, DeviceConfig { stack_bytes: 1 << 20, ..DeviceConfig::default() }, &grid.cooperative()).unwrap();
    assert_eq!(count.load(SeqCst), 30_000);
}

#[test]
fn stacks_that_the_machine_does_not_have_are_an_error_of_the_grid_or_of_the_run() {
    for world in [World::seeded(SeededConfig::default()), World::threads(ThreadsConfig::default())] {
        for stack_bytes in [1 << 50, usize::MAX] {
            let gpu = world.device(DeviceConfig { stack_bytes, ..DeviceConfig::resident(1) });
            let host = || [1, 2].map(|_| gpu.launch(StreamId(0), Grid::new("huge", 1, 33, || ())).unwrap().wait());
            // Twice, because the first one must leave the room of its block free.
            for result in world.run(vec![host]).unwrap().remove(0) {
                let text = result.unwrap_err().to_string();
                assert!(text.starts_with("no stacks for block 0 of grid `huge` (33 threads): "), "{text}");
            }
        }
    }
    let world = World::seeded(SeededConfig { host_stack_bytes: 1 << 50, ..SeededConfig::default() });
    let error = world.run(vec![|| ()]).unwrap_err();
    assert!(error.to_string().starts_with("cannot start host of rank 0: "), "{error}");
}

#[test]
fn stacks_of_another_size_are_given_when_asked_for() {
    fn deep(levels: u32) -> u64 {
        let room = std::hint::black_box([u64::from(levels); 128]);
        if levels == 0 { 0 } else { deep(levels - 1) + room[levels as usize % 128] }
    }
    let world = World::seeded(SeededConfig::default());
    let config = DeviceConfig { stack_bytes: 1 << 20, ..DeviceConfig::default() };
    // About 600 KiB.
    run_grid(&world, config, &Grid::new("deep", 1, 2, || assert_eq!(deep(500), 125_250))).unwrap();
}
