// SPDX-License-Identifier: MIT OR Apache-2.0
//! Dispatch and combine of expert parallelism beside the same bytes without routing.
//!
//! Graphs of calls follow each other on a stream without pauses, and two events tell the time of all. The time of a
//! combine is that of a pair less that of a dispatch.

use super::figure::Figure;
use super::table::{Goal, Kind, Row, Table};
use super::{Bench, Failure, end};
use gin_abi::Deadline;
use gin_bench_kernels::ep::{EXCHANGE_WORDS, Job};
use gin_ep::{EpError, Group, GroupConfig, Ids, Rows, Tokens};
use gin_ep_oracle::{Batch, Routing, Shape, batch, rank_major};
use gin_gpu::{GpuError, KernelArg, LaunchConfig, Memory, MemoryKind, MemorySlice, Stream};
use gin_host::comm::{CommError, Requirements, WindowFlags};
use gin_host::world::Rank;
use std::sync::Arc;
use std::time::Instant;

/// Experts, ids of a token, elements of a row, as in DeepSeek-V3.
const MODEL: (usize, usize, usize) = (256, 8, 7168);

/// Launches whose host time is measured; the queue of a stream has room for them.
const LAUNCHES: u32 = 100;

/// Figures for one number of tokens.
#[derive(serde::Serialize, serde::Deserialize)]
struct Times {
    dispatch: Vec<f64>,
    pair: Vec<f64>,
    /// The least work of a dispatch and of a combine.
    there: Vec<f64>,
    back: Vec<f64>,
    /// Rows that this rank sends.
    rows: usize,
    wrong: u64,
    blocks: u64,
    /// Host time of a launch.
    launch: Vec<f64>,
}

/// Returns an error of gin-ep as one of the communicator.
fn comm_error(error: EpError) -> CommError {
    match error {
        EpError::Comm(error) => error,
        EpError::Gpu(error) => error.into(),
        other => GpuError::Kernel { kernel: "gin-ep".to_owned(), reason: other.to_string() }.into(),
    }
}

/// Measures dispatch and combine with one, two and more ranks.
pub(super) fn pairs(bench: &Bench) -> Result<Vec<Table>, Failure> {
    let ranks: &[u32] = if bench.job.is_some() { &[] } else { bench.pick(&[1, 2][..], &[2]) };
    let mut tables = Vec::new();
    for &ranks in ranks {
        tables.push(measure(bench, ranks)?);
    }
    let most = bench.gpus.as_ref().map_or(0, |gpus| gpus.names.len() as u32);
    if let Some(job) = &bench.job {
        tables.push(measure(bench, job.ranks())?);
    } else if most > 2 {
        tables.push(measure(bench, most)?);
    }
    Ok(tables)
}

fn measure(bench: &Bench, ranks: u32) -> Result<Table, Failure> {
    let (experts, topk, hidden) = bench.pick(MODEL, (16, 4, 64));
    let shape = Shape { ranks: ranks as usize, experts, topk, hidden };
    let sizes = bench.pick(&[1, 8, 32, 128, 512][..], &[1, 8]);
    let all = bench.on_ranks(bench.world(ranks)?, |rank| {
        sizes
            .iter()
            .map(|&tokens| times(bench, rank, &shape, tokens).map_err(comm_error))
            .collect::<Result<Vec<_>, _>>()
    })?;
    let mut rows = Vec::new();
    let mut blocks = 0;
    for (index, &tokens) in sizes.iter().enumerate() {
        let of: Vec<&Times> = all.iter().map(|times| &times[index]).collect();
        let wrong = of.iter().map(|times| times.wrong).sum();
        blocks = of[0].blocks;
        // A call is done when the last rank is.
        let slowest = |get: &dyn Fn(&Times) -> &Vec<f64>| -> Vec<f64> {
            let repeats = of.iter().map(|times| get(times).len()).min().unwrap_or(0);
            (0..repeats).map(|repeat| of.iter().map(|times| get(times)[repeat]).fold(0.0, f64::max)).collect()
        };
        let (dispatch, pair) = (slowest(&|times| &times.dispatch), slowest(&|times| &times.pair));
        let combine: Vec<f64> = pair.iter().zip(&dispatch).map(|(pair, dispatch)| pair - dispatch).collect();
        let figure = |repeats: &[f64], wrong| Figure::new(repeats, wrong);
        let (there, back) = (slowest(&|times| &times.there), slowest(&|times| &times.back));
        let bytes = of.iter().map(|times| times.rows).max().unwrap_or(0) * 2 * hidden;
        let goal = (bench.counts(ranks) && tokens == 128).then_some(Goal::AtMost(1.25));
        let row = |what: &str, repeats: &[f64], floor: &[f64]| {
            let name = format!("{what}, {tokens} tokens");
            Row::new(name, figure(repeats, Some(wrong)), "us").main(true).point(what, bytes as u64).beside(
                Kind::Floor,
                "bare: the same rows to known places, one flag a rank",
                figure(floor, None),
                goal,
                None,
            )
        };
        rows.push(row("dispatch", &dispatch, &there));
        rows.push(row("combine", &combine, &back));
        let floor: Vec<f64> = there.iter().zip(&back).map(|(there, back)| there + back).collect();
        rows.push(row("dispatch and combine", &pair, &floor));
    }
    let launch: Vec<f64> = all[0][0].launch.clone();
    rows.push(Row::new("host time of a launch", Figure::new(&launch, None), "us").main(true));
    let mut table = bench.table("Expert parallelism, low latency", ranks, rows);
    table.notes.push(format!(
        "{experts} experts, {topk} of them for a token, rows of {hidden} BF16; {blocks} blocks of 512 threads"
    ));
    Ok(table)
}

/// Returns the time of a call in microseconds. Graphs of `calls` calls follow each other.
fn chain(
    rank: &Rank,
    stream: &Arc<dyn Stream>,
    calls: usize,
    replays: usize,
    mut call: impl FnMut() -> Result<(), EpError>,
) -> Result<f64, EpError> {
    let graph = stream.capture(|| (0..calls).try_for_each(|_| call()))?;
    // Safety: memory and group outlive the graph, and all ranks launch theirs as often.
    let replay = || unsafe { stream.replay(&*graph) };
    replay()?;
    stream.synchronize()?;
    rank.barrier()?;
    replay()?;
    let start = stream.record()?;
    for _ in 0..replays {
        replay()?;
    }
    let stop = stream.record()?;
    stream.synchronize()?;
    Ok(stop.since(&*start).map_or(0.0, |ns| ns as f64 / 1e3 / (calls * replays) as f64))
}

/// Measures a number of tokens on a rank.
fn times(bench: &Bench, rank: &Rank, shape: &Shape, tokens: usize) -> Result<Times, EpError> {
    let (calls, replays) = (bench.pick(20, 1), bench.pick(10, 1));
    let repeats = bench.launches.min(bench.pick(9, 1));
    let me = rank.rank() as usize;
    let comm = rank.communicator(&Requirements::default())?;
    let limit = Deadline::after_ns(bench.limit_ns());
    let config = GroupConfig::new(shape.experts as u32, shape.hidden as u32, shape.topk as u32)
        .tokens(tokens as u32)
        .deadline(limit);
    let config = if bench.is_real() { config } else { config.sms(1).threads(64) };
    let group = Group::new(&comm, &config)?;
    let batches: Vec<Batch> = (0..shape.ranks).map(|rank| batch(shape, Routing::Uniform, 1, rank, tokens)).collect();
    let row_bytes = 2 * shape.hidden;
    let memory = |bytes: usize| -> Result<MemorySlice, EpError> {
        Ok(Memory::new(rank.device(), MemoryKind::Device, bytes as u64)?.whole())
    };
    let (rows, ids) = (memory(tokens * row_bytes)?, memory(4 * tokens * shape.topk)?);
    let output = memory(tokens * row_bytes)?;
    rows.write(0, &batches[me].rows)?;
    ids.write(0, &batches[me].experts)?;
    let stream = rank.stream()?;
    let input = Tokens::new(&rows, Ids::I32(&ids), tokens as u32);
    let mut lane = group.lane(0)?;

    // One checked pair: without experts, each row comes back once from each of its ranks.
    let received = lane.exchange(&stream, &input)?;
    received.combine(&stream, Rows::InPlace, &output)?;
    stream.synchronize()?;
    let mut sums = vec![0u16; tokens * shape.hidden];
    output.read(0, &mut sums)?;
    let number_of_ranks = |token: usize| {
        let mut ranks: Vec<usize> = batches[me].places(shape, token).into_iter().map(|(_, rank, ..)| rank).collect();
        ranks.sort_unstable();
        ranks.dedup();
        ranks.len()
    };
    let mut wrong = u64::from(group.status()?.is_some());
    for token in 0..tokens {
        let times = number_of_ranks(token) as f32;
        let expected =
            batches[me].row(shape, token).iter().map(|&x| gin_ep_oracle::narrow(times * gin_ep_oracle::widen(x)));
        wrong += u64::from(!expected.eq(sums[token * shape.hidden..][..shape.hidden].iter().copied()));
    }

    // The same rows without routing: the ones that this rank sends, and the ones that it returns.
    let jobs = |back: bool| -> Vec<Job> {
        let mut jobs = Vec::new();
        for (other, _) in batches.iter().enumerate() {
            let (receiver, source) = if back { (me, other) } else { (other, me) };
            for (place, row) in rank_major(shape, &batches, receiver)[source].iter().enumerate() {
                let there = (me * tokens + if back { row.token } else { place }) as u32;
                let from = if back { place % tokens } else { row.token } as u32;
                jobs.push(Job { from, rank: other as u32, to: there, reserved: 0 });
            }
        }
        jobs
    };
    let words = EXCHANGE_WORDS + shape.ranks * tokens * row_bytes / 8;
    let window = comm.alloc_window::<u64>(words, WindowFlags::NONE)?;
    let kernel = rank.kernel("bare_exchange")?;
    let threads = bench.pick(512, 64);
    let blocks = group.blocks() as u32;
    let (handle, pairs) = (comm.device()?, (row_bytes / 16) as u32);
    let from = std::ptr::without_provenance::<u64>(rows.address() as usize);
    let list = |back: bool| -> Result<(MemorySlice, u32), EpError> {
        let jobs = jobs(back);
        let list = memory((16 * jobs.len()).max(16))?;
        list.write(0, &jobs)?;
        Ok((list, jobs.len() as u32))
    };
    let floor = |(list, number): &(MemorySlice, u32)| -> Result<(), EpError> {
        let list = std::ptr::without_provenance::<Job>(list.address() as usize);
        let (shape, arguments): (_, [&dyn KernelArg; 7]) =
            (LaunchConfig::new(blocks, threads), [&handle, &window, &from, &list, number, &pairs, &limit]);
        // Safety: the memory is valid, the window has the words and rows, and the blocks are as many as the group's.
        unsafe { stream.launch(&kernel, shape, &arguments)? };
        Ok(())
    };
    let (there, back) = (list(false)?, list(true)?);
    let mut times = Times {
        dispatch: Vec::new(),
        pair: Vec::new(),
        there: Vec::new(),
        back: Vec::new(),
        rows: there.1 as usize,
        wrong,
        blocks: group.blocks(),
        launch: Vec::new(),
    };
    for _ in 0..repeats {
        times.dispatch.push(chain(rank, &stream, calls, replays, || {
            lane.exchange(&stream, &input)?.release();
            Ok(())
        })?);
        times.pair.push(chain(rank, &stream, calls, replays, || {
            lane.exchange(&stream, &input)?.combine(&stream, Rows::InPlace, &output)
        })?);
        times.there.push(chain(rank, &stream, calls, replays, || floor(&there))?);
        let start = Instant::now();
        for _ in 0..LAUNCHES {
            floor(&there)?;
        }
        times.launch.push(start.elapsed().as_secs_f64() * 1e6 / f64::from(LAUNCHES));
        stream.synchronize()?;
        times.back.push(chain(rank, &stream, calls, replays, || floor(&back))?);
    }
    times.wrong += u64::from(group.status()?.is_some());
    comm.check("bench")?;
    drop(lane);
    group.destroy()?;
    end(rank, &comm)?;
    Ok(times)
}
