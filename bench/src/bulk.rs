// SPDX-License-Identifier: MIT OR Apache-2.0
//! Bulk copies to the other rank by the number of blocks, beside loops of loads and stores.

use super::bandwidth::{RANKS, Side, Way, rate};
use super::driver::capability;
use super::figure::Figure;
use super::lab::Shape;
use super::table::{Kind, Row, Table};
use super::{Bench, end};
use crate::Failure;
use gin_bench_kernels::bulk::STAGES;
use gin_cli::size;
use gin_host::comm::{CommError, Requirements};
use gin_host::world::Rank;
use serde::{Deserialize, Serialize};

/// A kernel by bulk copies, what it does, the loops beside it, and what they are.
type Contest = (&'static str, &'static str, &'static [&'static str], &'static str);

/// The contests. The last kernels store to the other rank and to their own.
const CONTESTS: [Contest; 2] = [
    ("bench_bulk_copy", "bulk copy", &["bare_copy_4", "bare_copy_4_parts"], "best bare copy loop of as many blocks"),
    ("bench_bulk_fan", "bulk fan-out", &["bare_fan_4"], "bare loop that stores twice, as many blocks"),
];

/// Bytes of a stage: a power of two, and a row of 7168 numbers of 16 bits.
const CHUNKS: [u32; 2] = [8 << 10, 14 << 10];

/// The times of one size at one rank.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Timed {
    /// Nanoseconds by way and repeat.
    ways: Vec<Vec<f64>>,
    /// Number of wrong words by contest.
    wrong: [u64; CONTESTS.len()],
}

/// Returns the numbers of blocks.
fn counts(side: &Side<'_>) -> Vec<u32> {
    // The ranks' grids are resident together.
    let sharing = RANKS as usize > side.bench.gpus(RANKS);
    let max = if sharing { side.max / 2 } else { side.max };
    let mut counts: Vec<u32> = side.bench.pick(vec![4, 8, 16], vec![1]).into_iter().filter(|&few| few < max).collect();
    counts.push(side.bench.pick(max, 2));
    counts
}

/// Returns the ways of a contest with this number of blocks: those by bulk copies, and the loops.
fn ways(bench: &Bench, contest: Contest, blocks: u32) -> [Vec<Way>; 2] {
    let (kernel, _, loops, _) = contest;
    let way =
        |kernel, threads, shared| Way { shape: Shape { kernel, blocks, threads, waits: true, shared }, signals: false };
    let chunks = bench.pick(CHUNKS.to_vec(), vec![64]);
    let bulk = chunks.into_iter().map(|bytes| way(kernel, 32, STAGES as u32 * bytes));
    let threads: &[u32] = bench.pick(&[512, 1024], &[32]);
    let loops = loops.iter().flat_map(|kernel| threads.iter().map(move |&threads| way(*kernel, threads, 0)));
    [bulk.collect(), loops.collect()]
}

/// Measures and checks one size.
fn measure(side: &mut Side<'_>, bytes: u64) -> Result<Timed, CommError> {
    let (words, times, counts) = (bytes / 8, side.times(bytes), counts(side));
    let (own, other) = (u64::from(side.lab.rank.rank()), u64::from(1 - side.lab.rank.rank()));
    let mut wrong = [0; CONTESTS.len()];
    let mut seed = bytes;
    for (contest, wrong) in CONTESTS.into_iter().zip(&mut wrong) {
        let fans = contest.0 != CONTESTS[0].0;
        // All ways of the largest grid.
        for way in counts.last().map_or(Default::default(), |&max| ways(side.bench, contest, max)).concat() {
            seed += 1 << 40;
            side.fill(&side.from, words, seed + own)?;
            // Other values, so that missing words show.
            side.fill(&side.to, 2 * words, !(seed + other))?;
            side.lab.rank.barrier()?;
            side.move_by(way, bytes, 2)?;
            side.lab.rank.barrier()?;
            *wrong += side.wrong(0, words, seed + other)?;
            if fans {
                *wrong += side.wrong(words, words, seed + own)?;
            }
        }
    }
    let all = CONTESTS.into_iter().flat_map(|contest| counts.iter().map(move |&blocks| (contest, blocks)));
    let all: Vec<Way> = all.flat_map(|(contest, blocks)| ways(side.bench, contest, blocks).concat()).collect();
    let mut timed = Timed { ways: vec![Vec::new(); all.len()], wrong };
    for _ in 0..side.repeats() {
        for (&way, repeats) in all.iter().zip(&mut timed.ways) {
            side.lab.rank.barrier()?;
            repeats.push(side.move_by(way, bytes, times)?);
        }
    }
    side.lab.rank.barrier()?;
    Ok(timed)
}

/// Measures bulk copies by the number of blocks, in both directions at once.
pub(super) fn copies(bench: &Bench) -> Result<Vec<Table>, Failure> {
    let sizes: &[u64] = bench.pick(&[4 << 20, 64 << 20], &[1 << 12]);
    let sizes: Vec<u64> = sizes.iter().copied().filter(|&bytes| bytes <= bench.max_bytes).collect();
    let Some(&largest) = sizes.last() else { return Ok(Vec::new()) };
    type Measured = (Vec<Timed>, Vec<u32>);
    let body = |rank: &Rank| -> Result<Option<Measured>, CommError> {
        let able = capability(&**rank.device()).is_none_or(|capability| capability >= 90);
        if rank.bootstrap().all_gather(&[u8::from(able)])?.concat().contains(&0) {
            return Ok(None);
        }
        let comm = rank.communicator(&Requirements::default().signals(1).counters(0))?;
        let words = (largest / 8) as usize;
        let mut side = Side::new(bench, rank, &comm, (2 * words, words))?;
        // All ranks have loaded their kernels before any kernel waits.
        rank.barrier()?;
        let measured = sizes.iter().map(|&bytes| measure(&mut side, bytes)).collect::<Result<Vec<_>, _>>()?;
        let counts = counts(&side);
        end(rank, &comm)?;
        Ok(Some((measured, counts)))
    };
    let ranks = bench.on_ranks(bench.world(RANKS)?, body)?;
    let mut rows = Vec::new();
    if let [Some((first, counts)), Some((second, _))] = &ranks[..] {
        for (&bytes, (one, other)) in sizes.iter().zip(first.iter().zip(second)) {
            rows.extend(compared(bench, bytes, counts, one, other));
        }
    }
    let mut table = bench.table("LSA bulk copies both ways", RANKS, rows);
    if table.rows.is_empty() {
        table.notes.push("GPUs before sm_90 have no bulk copies".to_owned());
    }
    Ok(vec![table])
}

/// Returns the rows of one size. A transfer in both directions has ended when the slower one has.
fn compared(bench: &Bench, bytes: u64, counts: &[u32], one: &Timed, other: &Timed) -> Vec<Row> {
    let mut times = one
        .ways
        .iter()
        .zip(&other.ways)
        .map(|(one, other)| -> Vec<f64> { one.iter().zip(other).map(|(one, other)| one.max(*other)).collect() });
    let mut rows = Vec::new();
    for (index, contest) in CONTESTS.into_iter().enumerate() {
        let wrong = one.wrong[index] + other.wrong[index];
        for &blocks in counts {
            let mut best = ways(bench, contest, blocks).map(|ways| {
                let figures = ways.into_iter().zip(&mut times).map(|(way, ns)| (way.shape, rate(2 * bytes, &ns)));
                figures.max_by(|(_, one), (_, other)| one.value.total_cmp(&other.value))
            });
            let [Some((shape, bulk)), Some((loops, bare))] = &mut best else { continue };
            let what = format!("{} of {}, {blocks} blocks", contest.1, size::show(bytes));
            let row = Row::new(what, Figure { wrong: Some(wrong), ..*bulk }, "GB/s")
                .detail(format!("{STAGES} stages of {}", size::show(u64::from(shape.shared) / STAGES as u64)))
                .beside(Kind::Other, contest.3, *bare, None, None)
                .by(format!("{}, {} threads", loops.kernel, loops.threads));
            rows.push(row);
        }
    }
    rows
}
