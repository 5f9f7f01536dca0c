// SPDX-License-Identifier: MIT OR Apache-2.0
//! Dispatch and combine of expert parallelism beside the same bytes without routing.
//!
//! Graphs of calls follow each other on a stream without pauses, and two events tell the time of all. The time of a
//! combine is that of a pair less that of a dispatch.

mod bed;
mod layouts;

pub(super) use bed::chain;
pub(super) use layouts::layouts;

use super::figure::{Figure, median};
use super::table::{Goal, Kind, Row, Table};
use super::{Bench, Failure, end};
use bed::{Bed, Calls, Combines};
use gin_ep::{Combine, Element, EpError, Group, Rows, Scales};
use gin_ep_oracle::Shape;
use gin_gpu::GpuError;
use gin_host::comm::{CommError, Requirements};
use gin_host::world::Rank;
use std::time::Instant;

/// Experts, ids of a token, elements of a row, as in DeepSeek-V3.
const MODEL: (usize, usize, usize) = (256, 8, 7168);

/// Launches whose host time is measured; the queue of a stream has room for them.
const LAUNCHES: u32 = 100;

/// A batch of this size or more is one of a prefill or a training.
const LARGE: usize = 4096;

/// Figures for one number of tokens.
#[derive(serde::Serialize, serde::Deserialize)]
struct Times {
    /// All SMs.
    all: Calls,
    /// With fewer SMs.
    fewer: Vec<(u32, Calls)>,
    /// FP8 that the dispatch makes, and rows of as many bytes that have scales. Their pairs are not measured.
    fp8: Option<[Calls; 2]>,
    /// Sources share a region.
    shared: Option<Calls>,
    /// The shapes of the floors.
    shapes: [String; 2],
    /// The rows that the rank sends, by the driver; the rows that it received, copied within its memory; the same, one
    /// for each id.
    copy: Vec<f64>,
    expand: Vec<f64>,
    expand_ids: Vec<f64>,
    /// Rows that this rank sends.
    rows: usize,
    /// Host time of a launch.
    launch: Vec<f64>,
}

/// Returns an error of gin-ep as one of the communicator.
pub(super) fn comm_error(error: EpError) -> CommError {
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
    let max = bench.gpus.as_ref().map_or(0, |gpus| gpus.names.len() as u32);
    if let Some(job) = &bench.job {
        tables.push(measure(bench, job.ranks())?);
    } else if max > 2 {
        tables.push(measure(bench, max)?);
    }
    Ok(tables)
}

/// Returns the goals of a dispatch and of a combine: maximum and stretch, as ratios to the floor.
fn goals(tokens: usize, floor: f64) -> [(Goal, Goal); 2] {
    let ratio = |max: f64| Goal::AtMost((max * 100.0).round() / 100.0);
    // For few tokens the goals are microseconds.
    let more = |us: f64| ratio(1.0 + us / floor);
    match tokens {
        LARGE.. => [(ratio(1.1), ratio(1.0)), (ratio(1.2), ratio(1.05))],
        33.. => [(ratio(1.25), ratio(1.05)), (ratio(1.25), ratio(1.0))],
        _ => [(more(3.0), more(1.0)), (more(3.0), more(1.0))],
    }
}

fn measure(bench: &Bench, ranks: u32) -> Result<Table, Failure> {
    let (experts, topk, hidden) = bench.pick(MODEL, (16, 4, 128));
    let shape = Shape { ranks: ranks as usize, experts, topk, hidden };
    let sizes = bench.pick(&[1, 8, 32, 128, 512, LARGE][..], &[1, 8]);
    let all = bench.on_ranks(bench.world(ranks)?, |rank| {
        let measure = |&tokens: &usize| times(bench, rank, &shape, tokens).map_err(comm_error);
        sizes.iter().map(measure).collect::<Result<Vec<_>, _>>()
    })?;
    let mut rows = Vec::new();
    for (index, &tokens) in sizes.iter().enumerate() {
        let of: Vec<&Times> = all.iter().map(|times| &times[index]).collect();
        rows.extend(lines(bench, &shape, tokens, &of));
    }
    let launch: Vec<f64> = all[0][0].launch.clone();
    rows.push(Row::new("host time of a launch", Figure::new(&launch, None), "us").main(true));
    let mut table = bench.table("Expert parallelism, rank-major", ranks, rows);
    table.notes.push(format!("{experts} experts, {topk} of them for a token, rows of {hidden} BF16"));
    table.notes.push("floor: the same rows to known places, one flag a rank, in the best of its shapes".to_owned());
    Ok(table)
}

/// Returns the rows of a table for one number of tokens. `of` has the figures of all ranks.
fn lines(bench: &Bench, shape: &Shape, tokens: usize, of: &[&Times]) -> Vec<Row> {
    // A call is done when the last rank is.
    let slowest = |get: &dyn Fn(&Times) -> &Vec<f64>| -> Vec<f64> {
        let repeats = of.iter().map(|times| get(times).len()).min().unwrap_or(0);
        (0..repeats).map(|repeat| of.iter().map(|times| get(times)[repeat]).fold(0.0, f64::max)).collect()
    };
    let less = |pair: &[f64], dispatch: &[f64]| -> Vec<f64> { pair.iter().zip(dispatch).map(|(a, b)| a - b).collect() };
    let wrong = |get: &dyn Fn(&Times) -> u64| Some(of.iter().map(|times| get(times)).sum());
    let counts = bench.counts(shape.ranks as u32);
    let logical = (tokens * shape.topk * 2 * shape.hidden) as u64;
    let moved = (of.iter().map(|times| times.rows).max().unwrap_or(0) * 2 * shape.hidden) as u64;
    let (dispatch, pair) = (slowest(&|times| &times.all.dispatch), slowest(&|times| &times.all.pair));
    let combine = less(&pair, &dispatch);
    let (there, back) = (slowest(&|times| &times.all.beside[0]), slowest(&|times| &times.all.beside[1]));
    let blocks = of[0].all.blocks;
    let spread = |get: &dyn Fn(&Times) -> &Vec<f64>| {
        let ranks: Vec<f64> = of.iter().map(|times| median(get(times))).collect();
        let (least, max) = (ranks.iter().copied().fold(f64::MAX, f64::min), ranks.iter().copied().fold(0.0, f64::max));
        format!("with the dispatch {least:.2} to {max:.2} us by rank")
    };
    let spreads = [spread(&|times| &times.all.dispatch), spread(&|times| &times.all.pair)];
    let spread_of = |what: &str| &spreads[usize::from(what != "dispatch")];
    let detail = |what: &str| format!("{blocks} blocks; {moved} bytes, {logical} logical; {}", spread_of(what));
    let main = |what: &str, repeats: &[f64], floor: &[f64], shape: &str, goal: Option<(Goal, Goal)>| {
        let (goal, stretch) = goal.filter(|_| counts).unzip();
        Row::new(format!("{what}, {tokens} tokens"), Figure::new(repeats, wrong(&|times| times.all.wrong)), "us")
            // Virtual GPUs only show that the benchmark works, and the table must fit a screen.
            .main(bench.pick(true, tokens > 1))
            .detail(detail(what))
            .point(what, moved)
            .beside(Kind::Floor, "exchange", Figure::new(floor, None), goal, stretch)
            .by(shape)
    };
    let [there_goal, back_goal] = goals(tokens, median(&there));
    let [there_shape, back_shape] = &of[0].shapes;
    let mut rows = vec![main("dispatch", &dispatch, &there, there_shape, Some(there_goal))];
    let mut back_row = main("combine", &combine, &back, back_shape, Some(back_goal));
    if tokens >= 512 {
        let (copy, expand) = (slowest(&|times| &times.copy), slowest(&|times| &times.expand));
        for (what, times) in [("copies by the driver, all ranks at once", copy), ("expand: rows within a GPU", expand)]
        {
            if !times.is_empty() {
                rows[0] = rows[0].clone().beside(Kind::Other, what, Figure::new(&times, None), None, None);
                back_row = back_row.beside(Kind::Other, what, Figure::new(&times, None), None, None);
            }
        }
    }
    rows.push(back_row);
    let stored = less(&slowest(&|times| &times.all.stored), &dispatch);
    rows.push(main("combine of rows in other memory", &stored, &back, back_shape, None).main(false));
    let floor: Vec<f64> = there.iter().zip(&back).map(|(there, back)| there + back).collect();
    // The sum of the first two rows.
    let chained = main("dispatch and combine in a chain", &pair, &floor, "both", None).main(false);
    let apart = Figure::new(&slowest(&|times| &times.all.apart), None);
    let (goal, stretch) = (counts.then_some(Goal::AtMost(1.1)), counts.then_some(Goal::AtMost(1.0)));
    rows.push(chained.beside(Kind::Other, "each begun when all ranks have met", apart, goal, stretch));
    if of[0].fp8.is_some() {
        static NONE: Vec<f64> = Vec::new();
        for (which, what) in ["dispatch that makes FP8", "dispatch of FP8 with scales"].into_iter().enumerate() {
            let of_fp8 = |times: &Times| times.fp8.as_ref().map_or(0, |calls| calls[which].wrong);
            let repeats = slowest(&|times| times.fp8.as_ref().map_or(&NONE, |calls| &calls[which].dispatch));
            let floor = slowest(&|times| times.fp8.as_ref().map_or(&NONE, |calls| &calls[which].beside[0]));
            let max = |us: f64| Goal::AtMost(((1.0 + us / median(&floor)) * 100.0).round() / 100.0);
            let goal = if tokens >= LARGE { (Goal::AtMost(1.1), Goal::AtMost(1.0)) } else { (max(4.0), max(1.0)) };
            let (goal, stretch) = Some(goal).filter(|_| counts).unzip();
            let figure = Figure::new(&repeats, wrong(&of_fp8));
            let row = Row::new(format!("{what}, {tokens} tokens"), figure, "us").main(which == 0);
            let floor = Figure::new(&floor, None);
            rows.push(row.beside(Kind::Floor, "exchange of FP8", floor, goal, stretch).by(there_shape));
        }
    }
    if of[0].shared.is_some() {
        static NONE: Vec<f64> = Vec::new();
        let of_shared = |times: &Times| times.shared.as_ref().map_or(0, |calls| calls.wrong);
        let there_of = slowest(&|times| times.shared.as_ref().map_or(&NONE, |calls| &calls.dispatch));
        let back_of = less(&slowest(&|times| times.shared.as_ref().map_or(&NONE, |calls| &calls.pair)), &there_of);
        let beside = |which: usize| slowest(&|times| times.shared.as_ref().map_or(&NONE, |calls| &calls.beside[which]));
        let (there, back) = (beside(0), beside(1));
        let packed = slowest(&|times| times.shared.as_ref().map_or(&NONE, |calls| &calls.packed));
        let expand = slowest(&|times| &times.expand_ids);
        let larger: Vec<f64> = there.iter().zip(&expand).map(|(there, expand)| there.max(*expand)).collect();
        let packed_goal = (Goal::AtMost(1.4), Goal::AtMost(1.2));
        for (what, repeats, floor, shape, goal) in [
            ("dispatch", &there_of, &there, there_shape, there_goal),
            ("combine", &back_of, &back, back_shape, back_goal),
            ("dispatch expert-major packed", &packed, &larger, there_shape, packed_goal),
        ] {
            let (goal, stretch) = Some(goal).filter(|_| counts && tokens >= LARGE).unzip();
            let name = format!("{what} with max_rows, {tokens} tokens");
            let row = Row::new(name, Figure::new(repeats, wrong(&of_shared)), "us");
            let beside = if what.ends_with("packed") { "the larger of exchange and expand" } else { "exchange" };
            let mut row = row.beside(Kind::Floor, beside, Figure::new(floor, None), goal, stretch).by(shape);
            if what.ends_with("packed") {
                let later = slowest(&|times| times.shared.as_ref().map_or(&NONE, |calls| &calls.packed_later));
                row =
                    row.beside(Kind::Other, "permuted when all rows are there", Figure::new(&later, None), None, None);
            }
            rows.push(row);
        }
    }
    for (index, &(sms, _)) in of[0].fewer.iter().enumerate() {
        let few = slowest(&|times| &times.fewer[index].1.dispatch);
        let few_combine = less(&slowest(&|times| &times.fewer[index].1.pair), &few);
        let all = |which: usize| slowest(&|times| &times.fewer[index].1.beside[which]);
        let (dispatch, combine) = (all(0), less(&all(1), &all(0)));
        let goal = |goal: f64| (counts && sms == 16 && tokens >= LARGE).then_some(Goal::AtMost(goal));
        let of_few = |times: &Times| times.fewer[index].1.wrong;
        for (what, repeats, all) in [("dispatch", &few, &dispatch), ("combine", &few_combine, &combine)] {
            let row =
                Row::new(format!("{what}, {tokens} tokens, {sms} SMs"), Figure::new(repeats, wrong(&of_few)), "us");
            // 0.85 and 0.9 of the rate.
            rows.push(row.beside(Kind::Other, "all SMs", Figure::new(all, None), goal(1.18), goal(1.11)));
        }
    }
    rows
}

/// Measures a number of tokens on a rank.
fn times(bench: &Bench, rank: &Rank, shape: &Shape, tokens: usize) -> Result<Times, EpError> {
    let comm = rank.communicator(&Requirements::default())?;
    let bed = Bed::new(bench, rank, &comm, shape, tokens)?;
    let (there, back, within) = (bed.jobs(false, false)?, bed.jobs(true, false)?, bed.jobs(false, true)?);
    let (there_shape, back_shape) = (bed.best(&there)?, bed.best(&back)?);
    let text = |(blocks, threads): (u32, u32)| format!("{blocks} x {threads} threads");
    let row_bytes = 2 * shape.hidden;
    let within_ids = bed.jobs_of_ids()?;
    let exchange = |jobs, bytes, shape| chain(rank, &bed.stream, bed.length(), || bed.floor(jobs, bytes, shape));
    let both = || Ok([exchange(&there, row_bytes, there_shape)?, exchange(&back, row_bytes, back_shape)?]);
    let copies = bench.pick(tokens >= 512, tokens == 8);
    let (mut launch, mut copy, mut expand, mut expand_ids) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    let all = bed.calls(&bed.config(), Combines::All, || {
        let beside = both()?;
        if copies {
            copy.extend(bed.copy()?);
            expand.push(exchange(&within, row_bytes, there_shape)?);
        }
        let start = Instant::now();
        for _ in 0..LAUNCHES {
            bed.floor(&there, row_bytes, there_shape)?;
        }
        launch.push(start.elapsed().as_secs_f64() * 1e6 / f64::from(LAUNCHES));
        bed.stream.synchronize()?;
        Ok(beside)
    })?;
    let mut fp8 = None;
    if bench.pick(tokens == 128 || tokens >= LARGE, tokens == 8) {
        let (row_bytes, scale_bytes) = (shape.hidden as u32, shape.hidden as u32 / 32);
        let of = |element, combines| {
            let floor = || Ok([exchange(&there, shape.hidden, there_shape)?, 0.0]);
            bed.calls(&bed.config().element(element), combines, floor)
        };
        let made = of(Element::E4m3(Scales::F32), Combines::None)?;
        fp8 = Some([made, of(Element::Opaque { row_bytes, scale_bytes }, Combines::NoneOfOpaque)?]);
    }
    let mut shared = None;
    if copies {
        let config = bed.config().max_rows((shape.ranks * tokens) as u32);
        shared = Some(bed.calls(&config, Combines::Layouts, || {
            expand_ids.push(exchange(&within_ids, row_bytes, there_shape)?);
            both()
        })?);
    }
    let mut fewer = Vec::new();
    if bench.pick(tokens >= 128, tokens == 8) {
        let group = Group::new(&comm, &bed.config())?;
        let mut slot = group.slot(0)?;
        let (input, combine) = (bed.input(), Combine::reduced().into(&bed.output));
        for sms in bench.pick(&[4, 8, 16, 32][..], &[1]) {
            let calls = bed.calls(&bed.config().sms(*sms), Combines::InPlace, || {
                let dispatch = chain(rank, &bed.stream, bed.length(), || {
                    slot.exchange(&bed.stream, &input)?.release();
                    Ok(())
                })?;
                let pair = chain(rank, &bed.stream, bed.length(), || {
                    slot.exchange(&bed.stream, &input)?.combine(&bed.stream, Rows::InPlace, &combine)
                })?;
                Ok([dispatch, pair])
            })?;
            fewer.push((*sms, calls));
        }
        drop(slot);
        group.destroy()?;
    }
    comm.check("bench")?;
    let rows = there.1 as usize;
    drop(bed);
    end(rank, &comm)?;
    let shapes = [text(there_shape), text(back_shape)];
    Ok(Times { all, fewer, fp8, shared, shapes, copy, expand, expand_ids, rows, launch })
}
