// SPDX-License-Identifier: MIT OR Apache-2.0
//! Puts by one progress thread: how many it moves in a second, and their bandwidth.

use super::driver::{Engine, ordinal};
use super::figure::Figure;
use super::lab::{Lab, Shape};
use super::table::{Goal, Kind, Row, Table};
use super::{Bench, end};
use crate::Failure;
use gin_abi::Deadline;
use gin_cli::size;
use gin_gpu::{GpuError, KernelArg};
use gin_host::comm::{CommError, Requirements, Routes, Window, WindowFlags};
use gin_host::world::Rank;
use std::time::{Duration, Instant};

const RANKS: u32 = 2;

/// The sizes of puts, in bytes.
const SIZES: [u64; 5] = [64, 1 << 10, 16 << 10, 256 << 10, 1 << 20];

/// Number of places that the puts take in turn, and of copies in one call of the driver.
const SLOTS: u64 = 64;

/// The goal for puts of 1 KiB: 400,000 of them in a second.
const GOAL_NS: f64 = 2500.0;

/// The memory of one rank.
struct Windows {
    to: Window<u64>,
    from: Window<u64>,
}

/// The figures of one size, in nanoseconds for one put: gin's time; the CPU time of its progress thread, `None` if
/// rank 0 has no thread of its own; those of the driver by a call for each copy and by one call for all, `None`
/// without a driver.
type Measured = (Figure, Option<Figure>, [Option<Figure>; 2]);

/// Returns the clock of the CPU time of the thread of this process that is named `name`.
///
/// Linux gives thread `id` the clock `!id << 3 | 6`: bit 2 for a thread, 2 for its time on a CPU
/// (`CLOCK_THREAD_CPUTIME_ID` for other threads than the caller).
fn cpu_clock(name: &str) -> Option<libc::clockid_t> {
    let mut tasks = std::fs::read_dir("/proc/self/task").ok()?.filter_map(|task| Some(task.ok()?.path()));
    let is_it =
        |task: &std::path::Path| std::fs::read_to_string(task.join("comm")).is_ok_and(|comm| comm.trim_end() == name);
    let task = tasks.find(|task| is_it(task))?;
    let id: libc::clockid_t = task.file_name()?.to_str()?.parse().ok()?;
    Some(!id << 3 | 6)
}

/// Returns the nanoseconds of a clock.
fn read_clock(clock: libc::clockid_t) -> Option<f64> {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // Safety: the call writes to `time`.
    (unsafe { libc::clock_gettime(clock, &mut time) } == 0).then_some(time.tv_sec as f64 * 1e9 + time.tv_nsec as f64)
}

/// Returns word `index` of the source in repeat `repeat`.
fn payload(repeat: usize, index: u64) -> u64 {
    gin_bench_kernels::payload(repeat as u64 + 1, index)
}

/// Measures the driver: copies of `bytes` bytes, `SLOTS` of them at a time, started and awaited by this thread.
fn copies(engine: &Engine, to: u64, from: u64, bytes: u64, at_once: bool, limit: Duration) -> Result<f64, GpuError> {
    let places = |start: u64| (0..SLOTS).map(|slot| start + slot * bytes).collect::<Vec<u64>>();
    engine.enter()?;
    let start = Instant::now();
    // Safety: the ranks keep both windows until the copies are complete.
    unsafe { engine.copies(&mut places(to), &mut places(from), bytes as usize, at_once)? };
    engine.finish(limit)?;
    Ok(start.elapsed().as_nanos() as f64 / SLOTS as f64)
}

/// Measures puts of one size from rank 0 to rank 1. Collective.
fn measure(bench: &Bench, rank: &Rank, bytes: u64, puts: u64) -> Result<Option<Measured>, CommError> {
    let comm = rank.communicator(&Requirements::default().signals(1).counters(0).windows(2))?;
    let words = (SLOTS * bytes / 8) as usize;
    let window = || comm.alloc_window::<u64>(words, WindowFlags::NONE);
    let windows = Windows { to: window()?, from: window()? };
    let there = rank.bootstrap().all_gather(&windows.to.memory().address().to_le_bytes())?;
    let (lab, mut wrong) = (Lab::new(rank)?, 0);
    let (mut gin, mut cpu, mut driver) = (Vec::new(), Vec::new(), [Vec::new(), Vec::new()]);
    let clock = cpu_clock(&format!("gin-proxy-{}", rank.rank()));
    let spent = || clock.and_then(read_clock);
    let engine =
        if rank.rank() == 0 && ordinal(&**rank.device()).is_some() { Engine::of(&**rank.device())? } else { None };
    let limit = Duration::from_nanos(bench.limit_ns());
    // The first repeat warms up.
    for repeat in 0..=bench.launches.min(bench.pick(5, 1)) {
        let data: Vec<u64> = (0..words as u64).map(|index| payload(repeat, index)).collect();
        if rank.rank() == 0 {
            windows.from.memory().write(0, &data)?;
            let (handle, deadline) = (comm.device()?, Deadline::after_ns(bench.limit_ns()));
            let arguments: [&dyn KernelArg; 6] = [&handle, &windows.to, &windows.from, &SLOTS, &puts, &deadline];
            let before = spent();
            let launched = lab.timed(Shape::one("bench_proxy_puts", 32), Some(&comm), &arguments)?;
            if repeat > 0 {
                gin.push(launched.ns / puts as f64);
                cpu.extend(spent().zip(before).map(|(after, before)| (after - before) / puts as f64));
            }
        }
        rank.barrier()?;
        if rank.rank() == 1 {
            let mut found = vec![0u64; words];
            windows.to.memory().read(0, &mut found)?;
            wrong += found.iter().zip(&data).filter(|(found, data)| found != data).count() as u64;
        }
        rank.barrier()?;
        for (at_once, times) in [false, true].into_iter().zip(&mut driver) {
            let Some(engine) = &engine else { continue };
            let to = u64::from_le_bytes(there[1].as_slice().try_into().unwrap_or_default());
            let time = copies(engine, to, windows.from.memory().address(), bytes, at_once, limit)?;
            if repeat > 0 {
                times.push(time);
            }
        }
        rank.barrier()?;
    }
    // Rank 1 has checked.
    let all = rank.bootstrap().all_gather(&wrong.to_le_bytes())?;
    let wrong = all.iter().map(|one| u64::from_le_bytes(one.as_slice().try_into().unwrap_or([1; 8]))).sum();
    drop((windows, engine));
    end(rank, &comm)?;
    Ok((rank.rank() == 0).then(|| {
        let driver = driver.map(|times| (!times.is_empty()).then(|| Figure::new(&times, None)));
        (Figure::new(&gin, Some(wrong)), (!cpu.is_empty()).then(|| Figure::new(&cpu, Some(wrong))), driver)
    }))
}

/// Measures puts by size.
pub(super) fn puts(bench: &Bench) -> Result<Vec<Table>, Failure> {
    let mut config = bench.world(RANKS)?;
    config.comm.routes = Routes::Network;
    let sizes: Vec<u64> = SIZES.into_iter().filter(|&bytes| bytes <= bench.pick(bench.max_bytes, 1024)).collect();
    let number = |bytes: u64| bench.pick((256 << 20) / bytes, 128).clamp(128, 16_384);
    let run = |rank: &Rank| {
        sizes.iter().map(|&bytes| measure(bench, rank, bytes, number(bytes))).collect::<Result<Vec<_>, CommError>>()
    };
    let ranks = bench.on_ranks(config, run)?;
    let Some(figures) = ranks.into_iter().next() else { return Err("no rank returned figures".into()) };
    let mut rows = Vec::new();
    for (&bytes, measured) in sizes.iter().zip(figures) {
        let Some((gin, cpu, [each, batch])) = measured else { return Err("rank 0 returned no figures".into()) };
        let named = |what: &str| format!("put of {}, {what}", size::show(bytes));
        // The inverse has the same noise, as a fraction.
        let inverse = |figure: Figure, scale: f64| {
            let value = scale / figure.value;
            Figure { value, noise: figure.relative_noise().map(|noise| noise * value), ..figure }
        };
        let mut time = Row::new(named("time of one"), gin, "ns").main(bytes == 1 << 10);
        if let Some(batch) = batch {
            let least = (bench.counts(RANKS) && bytes == 1 << 10).then(|| Goal::AtMost(GOAL_NS / batch.value));
            let what = format!("cuMemcpyBatchAsync of {SLOTS}");
            time = time.beside(Kind::Floor, what, batch, least, None);
        }
        if let Some(each) = each {
            time = time.beside(Kind::Other, "cuMemcpyAsync for each", each, None, None);
        }
        rows.push(time);
        rows.extend(cpu.map(|cpu| Row::new(named("CPU time of the progress thread"), cpu, "ns")));
        rows.push(Row::new(named("rate"), inverse(gin, 1e9), "/s"));
        rows.push(Row::new(named("bandwidth"), inverse(gin, bytes as f64), "GB/s").point("puts over the proxy", bytes));
    }
    let mut table = bench.table("Puts by one progress thread", RANKS, rows);
    table.notes.push("The progress thread polls, so its CPU time has the polls from launch to end, too".to_owned());
    Ok(vec![table])
}
