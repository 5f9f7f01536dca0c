// SPDX-License-Identifier: MIT OR Apache-2.0
//! Round trips and barriers by loads and stores.

use super::lab::{Figure, Lab, Shape};
use super::table::{Goal, Row, Table};
use super::{Bench, end};
use crate::Failure;
use gin_bench_kernels::PING_WORDS;
use gin_host::comm::{CommError, Requirements, WindowFlags};
use gin_host::world::Rank;

/// Threads of a warp.
const WARP: u32 = 32;

/// Combines the figures of all ranks: the times of rank 0, and the wrong results of all ranks.
fn together(all: Vec<Vec<Figure>>) -> Vec<Figure> {
    let mut sums = all.first().cloned().unwrap_or_default();
    for figures in &all[1..] {
        for (sum, figure) in sums.iter_mut().zip(figures) {
            sum.wrong += figure.wrong;
        }
    }
    sums
}

/// The kernels of round trips, their threads, and whether they use gin's signals. The bare kernels use a flag.
const PINGS: [(&str, u32, bool); 5] = [
    ("bench_lsa_ping_thread", WARP, true),
    ("bench_lsa_ping_warp", WARP, true),
    ("bare_ping_payload", 1, false),
    ("bare_ping_copy", WARP, false),
    ("bare_ping_word", 1, false),
];

/// Measures round trips: a put of 64 bytes with a signal, and the same back.
pub(super) fn round_trips(bench: &Bench) -> Result<Vec<Table>, Failure> {
    const RANKS: u32 = 2;
    let rounds = bench.rounds();
    let play = |rank: &Rank| -> Result<Vec<Figure>, CommError> {
        let lab = Lab::new(rank)?;
        let comm = rank.communicator(&Requirements::default().signals(1).counters(0))?;
        let window = comm.alloc_window::<u64>(PING_WORDS, WindowFlags::NONE)?;
        let handle = comm.device()?;
        let (mut signals, mut flags) = (0, 0);
        let figures = PINGS.iter().map(|&(kernel, threads, gins)| {
            let before = if gins { &mut signals } else { &mut flags };
            lab.play(Shape::one(kernel, threads), Some(&comm), &[&handle, &window], &rounds, before, true)
        });
        let figures = figures.collect::<Result<_, _>>()?;
        end(rank, &comm)?;
        Ok(figures)
    };
    let figures = together(bench.on_ranks(bench.world(RANKS)?, play)?);
    let [thread, warp, payload, copy, relaxed] = figures[..] else { return Err("a rank returned no figures".into()) };
    let goal = bench.counts(RANKS).then_some(Goal::AtMost(1.1));
    let row = |what: &str, figure: Figure| {
        Row::new(what, figure.ns / 1e3, "us", Some(figure.wrong))
            .beside("bare: 64 bytes of registers, release, acquire", payload.ns / 1e3, goal, None)
            .beside("bare: the same copied from memory by a warp", copy.ns / 1e3, None, None)
            .beside("bare: 8 bytes, relaxed", relaxed.ns / 1e3, None, None)
    };
    let bare = |what: &str, figure: Figure| Row::new(what, figure.ns / 1e3, "us", Some(figure.wrong));
    let rows = vec![
        row("put of 64 bytes with signal and back, a warp", warp),
        row("the same, a thread", thread),
        bare("bare: 64 bytes of registers, release, acquire", payload),
        bare("bare: the same copied from memory by a warp", copy),
        bare("bare: 8 bytes, relaxed", relaxed),
    ];
    Ok(vec![bench.table("LSA round trip", RANKS, rows)])
}

/// Returns the time of NCCL 2.28.9's LSA barrier in microseconds: H200s of one host, one warp, back to back,
/// acquire-release. The source is `docs/benchmarks.md`.
fn nccl(ranks: u32) -> Option<f64> {
    match ranks {
        2 => Some(1.407),
        4 => Some(1.568),
        _ => None,
    }
}

/// Measures barriers of the LSA team: one warp, back to back.
pub(super) fn barriers(bench: &Bench) -> Result<Vec<Table>, Failure> {
    let most = bench.pick(bench.gpus(8).max(2) as u32, 3);
    let rounds = bench.rounds();
    let mut tables = Vec::new();
    for ranks in 2..=most {
        let play = |rank: &Rank| -> Result<Vec<Figure>, CommError> {
            let lab = Lab::new(rank)?;
            let requirements = Requirements::default().signals(1).counters(0).lsa_barriers(1);
            let comm = rank.communicator(&requirements)?;
            let signalled = comm.alloc_window::<u64>(2 * ranks as usize, WindowFlags::NONE)?;
            let flags = comm.alloc_window::<u64>(ranks as usize, WindowFlags::NONE)?;
            let handle = comm.device()?;
            let (mut barriers, mut bare) = (0, 0);
            let play = |kernel, window, before| {
                lab.play(Shape::one(kernel, WARP), Some(&comm), &[&handle, window], &rounds, before, true)
            };
            let figures =
                vec![play("bench_lsa_barrier", &signalled, &mut barriers)?, play("bare_barrier", &flags, &mut bare)?];
            end(rank, &comm)?;
            Ok(figures)
        };
        let figures = together(bench.on_ranks(bench.world(ranks)?, play)?);
        let [barrier, bare] = figures[..] else { return Err("a rank returned no figures".into()) };
        let mut row = Row::new("LSA barrier, a warp", barrier.ns / 1e3, "us", Some(barrier.wrong));
        if let Some(nccl) = nccl(ranks).filter(|_| bench.counts(ranks)) {
            row = row.beside("NCCL 2.28.9", nccl, Some(Goal::AtMost(1.0)), Some(Goal::AtMost(0.9)));
        }
        let row = row.beside("bare: a store with release to each, polls with acquire", bare.ns / 1e3, None, None);
        tables.push(bench.table("LSA barrier", ranks, vec![row]));
    }
    Ok(tables)
}
