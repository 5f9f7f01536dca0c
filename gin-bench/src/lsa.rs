// SPDX-License-Identifier: MIT OR Apache-2.0
//! Round trips and barriers by loads and stores.

use super::lab::{Figure, Lab, Shape};
use super::table::{Goal, Row, Table};
use super::{Bench, end};
use crate::Failure;
use gin_bench_kernels::PING_WORDS;
use gin_gpu::KernelArg;
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
            let (mut barriers, mut released, mut bare) = (0, 0, 0);
            let play = |kernel, arguments: &[&dyn KernelArg], before| {
                lab.play(Shape::one(kernel, WARP), Some(&comm), arguments, &rounds, before, true)
            };
            let figures = vec![
                play("bench_lsa_barrier", &[&handle, &signalled, &0u32], &mut barriers)?,
                play("bench_lsa_barrier", &[&handle, &signalled, &1u32], &mut released)?,
                play("bare_barrier", &[&handle, &flags], &mut bare)?,
            ];
            end(rank, &comm)?;
            Ok(figures)
        };
        let figures = together(bench.on_ranks(bench.world(ranks)?, play)?);
        let [barrier, released, bare] = figures[..] else { return Err("a rank returned no figures".into()) };
        let row = |what: &str, figure: Figure, must: f64, wish: Option<f64>| {
            let goal = |ratio| bench.counts(ranks).then_some(Goal::AtMost(ratio));
            Row::new(what, figure.ns / 1e3, "us", Some(figure.wrong)).beside(
                "bare: NCCL 2.28.9's algorithm",
                bare.ns / 1e3,
                goal(must),
                wish.and_then(goal),
            )
        };
        let rows = vec![
            row("LSA barrier, a warp", barrier, 1.1, Some(1.0)),
            row("LSA barrier, a warp that has released to the system", released, 0.6, None),
            Row::new("bare: NCCL 2.28.9's algorithm", bare.ns / 1e3, "us", Some(bare.wrong)),
        ];
        tables.push(bench.table("LSA barrier", ranks, rows));
    }
    Ok(tables)
}
