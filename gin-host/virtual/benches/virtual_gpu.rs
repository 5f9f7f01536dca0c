// SPDX-License-Identifier: MIT OR Apache-2.0
//! Costs of threads, switches, barriers and exchanges of the virtual GPU.

use std::time::{Duration, Instant};

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use gin_device::coop::{Block, Coop, Warp};
use gin_virtual::{DeviceConfig, Grid, Schedule, SeededConfig, StreamId, World, executor, yield_now};

/// Measures a grid in a seeded world, from its launch to its end, in which each thread calls `body` `times` times.
fn time(schedule: Schedule, blocks: u32, threads: u32, times: u64, body: fn()) -> Duration {
    let world = World::seeded(SeededConfig::new(1).schedule(schedule));
    let gpu = world.device(DeviceConfig::default());
    let grid = Grid::new("bench", blocks, threads, move || (0..times).for_each(|_| body()));
    let host = || {
        let started = Instant::now();
        gpu.launch(StreamId(0), grid).and_then(|ticket| ticket.wait()).expect("the grid ends well");
        started.elapsed()
    };
    world.run(vec![host]).expect("the world ends well")[0]
}

fn costs(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("virtual GPU");
    group.sample_size(10);

    group.throughput(Throughput::Elements(2048));
    group.bench_function("threads begin and end, 8 x 256", |bencher| {
        bencher.iter_custom(|runs| (0..runs).map(|_| time(Schedule::Random, 8, 256, 1, || ())).sum());
    });
    for schedule in Schedule::PLAIN {
        group.bench_function(format!("switches of 8 x 256 threads, {schedule:?}"), |bencher| {
            bencher.iter_custom(|times| time(schedule, 8, 256, times, yield_now));
        });
    }
    group.bench_function("barriers of 8 x 256 threads", |bencher| {
        bencher.iter_custom(|times| time(Schedule::Random, 8, 256, times, || Block.sync()));
    });
    group.throughput(Throughput::Elements(256));
    group.bench_function("warp barriers of 256 threads", |bencher| {
        bencher.iter_custom(|times| time(Schedule::Random, 1, 256, times, || Warp.sync()));
    });
    group.throughput(Throughput::Elements(1));
    group.bench_function("switch points of one thread", |bencher| {
        bencher.iter_custom(|times| time(Schedule::Random, 1, 1, times, executor().switch_point));
    });
    group.finish();
}

criterion_group!(benches, costs);
criterion_main!(benches);
