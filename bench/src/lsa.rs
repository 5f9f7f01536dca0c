// SPDX-License-Identifier: MIT OR Apache-2.0
//! Round trips and barriers by loads and stores.

use super::figure::Figure;
use super::lab::{Lab, Play, Shape};
use super::table::{Goal, Kind, Row, Table};
use super::{Bench, end};
use crate::Failure;
use gin_bench_kernels::bare::STEPS;
use gin_bench_kernels::{PAYLOAD_WORDS, PING_WORDS};
use gin_cli::size;
use gin_device::inbox::words;
use gin_gpu::KernelArg;
use gin_host::comm::{CommError, Requirements, WindowFlags};
use gin_host::world::Rank;
use std::cell::Cell;

/// Threads of a warp.
const WARP: u32 = 32;

/// Combines the figures of all ranks: the times of rank 0, and the wrong results of all ranks.
pub(super) fn together(all: Vec<Vec<Figure>>) -> Vec<Figure> {
    let mut sums = all.first().cloned().unwrap_or_default();
    for figures in &all[1..] {
        for (sum, figure) in sums.iter_mut().zip(figures) {
            sum.wrong = sum.wrong.zip(figure.wrong).map(|(one, other)| one + other);
        }
    }
    sums
}

/// The kernels of round trips, their threads, and whether they use gin's signals, a flag, flags in the data, or
/// messages.
const PINGS: [(&str, u32, usize); 9 + STEPS.len()] = [
    ("bench_lsa_ping_thread", WARP, 0),
    ("bench_lsa_ping_warp", WARP, 0),
    ("bench_lsa_ping_prepared_thread", WARP, 0),
    ("bench_lsa_ping_prepared_warp", WARP, 0),
    ("bench_lsa_ping_inbox", WARP, MESSAGES),
    ("bare_ping_payload", 1, 1),
    ("bare_ping_copy", WARP, 1),
    ("bare_ping_flagged", WARP, 2),
    ("bare_ping_word", 1, 1),
    ("bare_ping_steps_1", 1, 1),
    ("bare_ping_steps_2", 1, 1),
    ("bare_ping_steps_3", 1, 1),
    ("bare_ping_steps_4", 1, 1),
    ("bare_ping_steps_5", 1, 1),
];

/// The last number of [`PINGS`]: messages.
const MESSAGES: usize = 3;

/// Measures round trips: a put of 64 bytes with a signal, and the same back.
pub(super) fn round_trips(bench: &Bench) -> Result<Vec<Table>, Failure> {
    const RANKS: u32 = 2;
    let rounds = bench.rounds();
    let play = |rank: &Rank| -> Result<Vec<Figure>, CommError> {
        let lab = Lab::new(rank)?;
        let comm = rank.communicator(&Requirements::default().signals(1).counters(0))?;
        let window = comm.alloc_window::<u64>(PING_WORDS, WindowFlags::NONE)?;
        let handle = comm.device()?;
        let befores = [const { Cell::new(0) }; MESSAGES + 1];
        let mail = comm.alloc_window::<u64>(words::<[u64; PAYLOAD_WORDS]>(RANKS), WindowFlags::NONE)?;
        let (arguments, messages): ([&dyn KernelArg; 2], [&dyn KernelArg; 3]) =
            ([&handle, &window], [&handle, &window, &mail]);
        let plays = PINGS.map(|(kernel, threads, before)| Play {
            shape: Shape::one(kernel, threads),
            comm: Some(&comm),
            arguments: if before == MESSAGES { &messages[..] } else { &arguments },
            before: &befores[before],
            module: None,
        });
        let figures = lab.play(&plays, &rounds, true)?;
        end(rank, &comm)?;
        Ok(figures)
    };
    let figures = together(bench.on_ranks(bench.world(RANKS)?, play)?);
    let figures: Vec<Figure> = figures.into_iter().map(|figure| figure.times(1e-3)).collect();
    let [thread, warp, prepared, prepared_warp, inbox, payload, copy, flagged, relaxed, ref steps @ ..] = figures[..]
    else {
        return Err("a rank returned no figures".into());
    };
    let bare = [
        (Kind::Floor, "bare: 64B of registers, release, relaxed poll, acquire", payload),
        (Kind::Other, "bare: the same copied from memory by a warp", copy),
        (Kind::Other, "bare: 64B of memory with the flag in the data", flagged),
        (Kind::Other, "bare: 8 bytes, relaxed", relaxed),
    ];
    let row = |what: &str, figure: Figure, max: f64| {
        let row = Row::new(what, figure, "us").main(true);
        bare.iter().fold(row, |row, &(kind, what, figure)| {
            let goal = (bench.counts(RANKS) && kind == Kind::Floor).then_some(Goal::AtMost(max));
            row.beside(kind, what, figure, goal, None)
        })
    };
    let mut rows = vec![
        row("put of 64B with signal and back, a thread", thread, 1.2),
        row("put of 64B with signal and back, a warp", warp, 1.2),
        row("prepared put of 64B with signal and back, a thread", prepared, 1.1),
        row("prepared put of 64B with signal and back, a warp", prepared_warp, 1.1),
    ];
    let goal = bench.counts(RANKS).then_some(Goal::AtMost(1.12));
    let message = Row::new("message of 64B and back, a warp", inbox, "us").main(true);
    rows.push(message.beside(Kind::Floor, bare[2].1, flagged, goal, None));
    rows.extend(bare.map(|(_, what, figure)| Row::new(what, figure, "us")));
    rows.extend((1..).zip(STEPS).zip(steps).map(|((number, step), &figure)| {
        let row = Row::new(format!("bare: 64B with {number} of gin's steps, the last: {step}"), figure, "us");
        row.beside(Kind::Floor, bare[0].1, payload, None, None)
    }));
    Ok(vec![bench.table("LSA round trip", RANKS, rows)])
}

/// Measures round trips of puts with a signal by size, by a block.
pub(super) fn sizes(bench: &Bench) -> Result<Vec<Table>, Failure> {
    const RANKS: u32 = 2;
    let powers = bench.pick(6..=16, 6..=8);
    let sizes: Vec<u64> = powers.step_by(2).map(|power| 1 << power).collect();
    let Some(&largest) = sizes.last() else { return Ok(Vec::new()) };
    let mut rounds = bench.long_rounds();
    rounds.launches = bench.launches;
    let play = |rank: &Rank| -> Result<Vec<Figure>, CommError> {
        let lab = Lab::new(rank)?;
        let comm = rank.communicator(&Requirements::default().signals(1).counters(0))?;
        let handle = comm.device()?;
        let flags = comm.alloc_window::<u64>(PING_WORDS, WindowFlags::NONE)?;
        let to = comm.alloc_window::<u64>((largest / 8) as usize, WindowFlags::NONE)?;
        let from = comm.alloc_window::<u64>((largest / 8) as usize, WindowFlags::NONE)?;
        let (signals, raised) = (Cell::new(0), Cell::new(0));
        let mut figures = Vec::new();
        for &bytes in &sizes {
            let len = (bytes / 8) as usize;
            // At most 32 bytes for each thread, so that no thread waits for its own loads.
            let threads = (bytes / 32).clamp(u64::from(WARP), bench.pick(512, 64)) as u32;
            let (put, bare): ([&dyn KernelArg; 4], [&dyn KernelArg; 5]) =
                ([&handle, &to, &from, &len], [&handle, &flags, &to, &from, &len]);
            let play = |kernel, arguments, before| Play {
                shape: Shape::one(kernel, threads),
                comm: Some(&comm),
                arguments,
                before,
                module: None,
            };
            let plays = [play("bench_lsa_ping_block", &put, &signals), play("bare_ping_block", &bare, &raised)];
            figures.extend(lab.play(&plays, &rounds, true)?);
        }
        end(rank, &comm)?;
        Ok(figures)
    };
    let figures = together(bench.on_ranks(bench.world(RANKS)?, play)?);
    let row = |(&bytes, figures): (&u64, &[Figure])| {
        let [put, bare] = [0, 1].map(|index| figures[index].times(1e-3));
        Row::new(format!("put of {} with signal and back, a block", size::show(bytes)), put, "us")
            .main(bytes == 4 << 10)
            .point("put with signal and back, a block", bytes)
            .beside(Kind::Floor, "bare: copy by a block, release, flag", bare, None, None)
    };
    let rows = sizes.iter().zip(figures.chunks(2)).map(row).collect();
    Ok(vec![bench.table("LSA round trip by size", RANKS, rows)])
}

/// The names of the bare barriers.
const NCCL: &str = "bare: NCCL 2.28.9's algorithm";
const BARE: &str = "bare: release, store, relaxed poll, acquire";

/// Measures barriers of the LSA team: one warp, back to back.
pub(super) fn barriers(bench: &Bench) -> Result<Vec<Table>, Failure> {
    let max = bench.pick(bench.gpus(8).max(2) as u32, 3);
    let all = match &bench.job {
        Some(job) => job.ranks()..=job.ranks(),
        None => 2..=max,
    };
    let rounds = bench.rounds();
    let mut tables = Vec::new();
    for ranks in all.clone() {
        let play = |rank: &Rank| -> Result<Vec<Figure>, CommError> {
            let lab = Lab::new(rank)?;
            let requirements = Requirements::default().signals(1).counters(0).lsa_barriers(1);
            let comm = rank.communicator(&requirements)?;
            let signalled = comm.alloc_window::<u64>(2 * ranks as usize, WindowFlags::NONE)?;
            let flags = comm.alloc_window::<u64>(ranks as usize, WindowFlags::NONE)?;
            let handle = comm.device()?;
            // The bare barriers share their words.
            let befores = [const { Cell::new(0) }; 3];
            let barrier: [&dyn KernelArg; 2] = [&handle, &signalled];
            let nccl: [&dyn KernelArg; 3] = [&handle, &flags, &0u32];
            let bare: [&dyn KernelArg; 3] = [&handle, &flags, &1u32];
            let play = |kernel, arguments, before: usize| Play {
                shape: Shape::one(kernel, WARP),
                comm: Some(&comm),
                arguments,
                before: &befores[before],
                module: None,
            };
            let plays = [
                play("bench_lsa_barrier", &barrier[..], 0),
                play("bench_lsa_barrier_released", &barrier[..], 1),
                play("bare_barrier", &nccl[..], 2),
                play("bare_barrier", &bare[..], 2),
            ];
            let figures = lab.play(&plays, &rounds, true)?;
            end(rank, &comm)?;
            Ok(figures)
        };
        let figures = together(bench.on_ranks(bench.world(ranks)?, play)?);
        let figures: Vec<Figure> = figures.into_iter().map(|figure| figure.times(1e-3)).collect();
        let [barrier, released, nccl, bare] = figures[..] else { return Err("a rank returned no figures".into()) };
        let row = |what: &str, figure: Figure, must: f64, wish: Option<f64>| {
            let goal = |ratio| bench.counts(ranks).then_some(Goal::AtMost(ratio));
            Row::new(what, figure, "us")
                .main(ranks == 2 || ranks == *all.end())
                .beside(Kind::Nccl, NCCL, nccl, goal(must), wish.and_then(goal))
                .beside(Kind::Floor, BARE, bare, None, None)
        };
        let rows = vec![
            row("barrier, a warp", barrier, 1.1, Some(1.0)),
            row("barrier, a warp that has released", released, 0.6, None),
            Row::new(NCCL, nccl, "us"),
            Row::new(BARE, bare, "us"),
        ];
        tables.push(bench.table("LSA barrier", ranks, rows));
    }
    Ok(tables)
}
