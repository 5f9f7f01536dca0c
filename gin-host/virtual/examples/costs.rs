// SPDX-License-Identifier: MIT OR Apache-2.0
//! Prints costs of the virtual GPU on this machine: threads per second, switches per second, bytes per thread.

use std::time::{Duration, Instant};

use gin_device::coop::{Block, Coop};
use gin_device::exec;
use gin_virtual::{DeviceConfig, Grid, LaunchError, Schedule, SeededConfig, StreamId, World};

/// Runs a grid in its own world and returns the time taken.
fn time(
    schedule: Schedule,
    blocks: u32,
    threads: u32,
    body: impl Fn() + Send + Sync + 'static,
) -> Result<Duration, Box<dyn std::error::Error>> {
    let world = World::seeded(SeededConfig::new(1).schedule(schedule));
    let gpu = world.device(DeviceConfig::default());
    let grid = Grid::new("costs", blocks, threads, body);
    let started = Instant::now();
    let host = || -> Result<(), LaunchError> { gpu.launch(StreamId(0), grid)?.wait() };
    let results = world.run(vec![host])?;
    results.into_iter().collect::<Result<Vec<()>, LaunchError>>()?;
    Ok(started.elapsed())
}

/// Returns the resident memory of this process in bytes, if the system reports it.
fn resident() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find(|line| line.starts_with("VmRSS:"))?;
    Some(line.split_whitespace().nth(1)?.parse::<u64>().ok()? << 10)
}

fn rate(count: u64, time: Duration) -> String {
    let per_second = count as f64 / time.as_secs_f64();
    format!("{:.2} million a second, {:.0} ns each", per_second / 1e6, 1e9 / per_second)
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let before = resident();
    let first = time(Schedule::RoundRobin, 16, 512, || Block.sync())?;
    if let (Some(before), Some(after)) = (before, resident()) {
        println!("memory of a thread: {} bytes", (after - before) / 8192);
    }
    println!("threads, stacks new:    {}", rate(8192, first));
    println!("threads, stacks reused: {}", rate(8192, time(Schedule::RoundRobin, 16, 512, || ())?));

    for (blocks, threads) in [(1, 32), (8, 128), (32, 512)] {
        let total = u64::from(blocks * threads);
        let each = (4_000_000 / total).max(100);
        let empty = time(Schedule::Random, blocks, threads, || ())?;
        for schedule in Schedule::PLAIN {
            let switching = time(schedule, blocks, threads, move || (0..each).for_each(|_| gin_virtual::yield_now()))?;
            let spent = switching.saturating_sub(empty);
            println!("switches, {total} threads, {schedule:?}: {}", rate(total * each, spent));
        }
    }
    let accesses = 20_000_000;
    let spent = time(Schedule::Random, 1, 1, move || (0..accesses).for_each(|_| exec::switch_point()))?;
    println!("switch points, mostly not taken: {}", rate(accesses, spent));
    let rounds = 500;
    let spent = time(Schedule::Random, 8, 256, move || (0..rounds).for_each(|_| Block.sync()))?;
    println!("barrier arrivals, 8 blocks of 256: {}", rate(8 * 256 * rounds, spent));
    let spent = time(Schedule::Random, 1, 256, move || {
        for _ in 0..rounds {
            gin_device::coop::Warp.sync();
        }
    })?;
    println!("lanes in exchanges, 8 warps: {}", rate(256 * rounds, spent));
    Ok(())
}
