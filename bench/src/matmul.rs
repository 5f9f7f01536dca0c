// SPDX-License-Identifier: MIT OR Apache-2.0
//! Products of matrices that send and receive while they multiply, beside the same kernels one after the other.

use super::ep::{chain, comm_error};
use super::figure::Figure;
use super::table::{Goal, Kind, Row, Table};
use super::{Bench, Failure, end};
use gin_abi::Deadline;
use gin_ep::{
    Combine, EpError, Experts, Group, GroupConfig, GroupedMatmul, Ids, Layout, Matmul, MatmulConfig, Operands,
    OverlappedMatmul, Part, Permuted, Products, Rows, Tokens,
};
use gin_ep_oracle::{Routing, Scaled, Shape, batch, factor, product, scaled_factor, scaled_product, sum};
use gin_gpu::{Memory, MemoryKind, MemorySlice};
use gin_host::comm::Requirements;
use gin_host::world::Rank;

/// A product that is measured.
#[derive(Clone, Copy)]
struct Case {
    what: &'static str,
    scatters: bool,
    /// Rows of all ranks, columns, inner elements.
    sizes: (usize, usize, usize),
}

/// Rows of the left factor whose elements differ; so factors are made quickly.
const PERIOD: usize = 61;

/// Figures of one product.
#[derive(serde::Serialize, serde::Deserialize)]
struct Times {
    fused: Vec<f64>,
    in_sequence: Vec<f64>,
    multiply: Vec<f64>,
    exchange: Vec<f64>,
    /// Only of products of received rows: the same in the kernels that begin when all rows are there.
    when_all: Vec<f64>,
    wrong: u64,
    blocks: u64,
}

impl Times {
    /// Makes them without figures, of kernels with `blocks` blocks that gave `wrong` wrong elements.
    fn new(wrong: u64, blocks: u64) -> Self {
        let [fused, in_sequence, multiply, exchange, when_all] = [const { Vec::new() }; 5];
        Self { fused, in_sequence, multiply, exchange, when_all, wrong, blocks }
    }
}

/// Returns the number of elements that differ between two results, one more if all are zero.
fn differences(outputs: &[MemorySlice; 2], elements: usize) -> Result<u64, EpError> {
    let mut found = [vec![0u16; elements], vec![0x7fffu16; elements]];
    for (output, found) in outputs.iter().zip(&mut found) {
        output.read(0, found)?;
    }
    let wrong = found[0].iter().zip(&found[1]).filter(|(a, b)| a != b).count() as u64;
    Ok(wrong + u64::from(found[0].iter().all(|&element| element == 0)))
}

/// Measures products of one, two and more ranks.
pub(super) fn products(bench: &Bench) -> Result<Vec<Table>, Failure> {
    let max = bench.gpus.as_ref().map_or(0, |gpus| gpus.names.len() as u32);
    let ranks = match &bench.job {
        Some(job) => vec![job.ranks()],
        None if max > 2 => vec![1, 2, max],
        None => bench.pick(vec![1, 2], vec![2]),
    };
    ranks.into_iter().map(|ranks| measure(bench, ranks)).collect()
}

fn measure(bench: &Bench, ranks: u32) -> Result<Table, Failure> {
    let case = |what, scatters, real, virtual_gpus| Case { what, scatters, sizes: bench.pick(real, virtual_gpus) };
    let alone = [case("product", false, (4096, 4096, 4096), (16, 16, 64))];
    let spread = [
        case("all-gather and product", false, (4096, 4096, 7168), (16, 16, 64)),
        case("product and reduce-scatter", true, (4096, 7168, 2048), (16, 16, 64)),
    ];
    let cases = if ranks == 1 { &alone[..] } else { &spread[..] };
    // Other GPUs have no products of E4M3.
    let e4m3 = (ranks == 1 && has_wgmma(bench)).then(|| case("product of E4M3", false, E4M3.0, E4M3.1));
    let all = bench.on_ranks(bench.world(ranks)?, |rank| {
        let mut all = Vec::new();
        for case in cases {
            all.push(times(bench, rank, case).map_err(comm_error)?);
        }
        if ranks > 1 {
            all.push(experts(bench, rank).map_err(comm_error)?);
            all.push(arriving(bench, rank).map_err(comm_error)?);
        } else if e4m3.is_some() {
            all.push(times_e4m3(bench, rank).map_err(comm_error)?);
        }
        Ok(all)
    })?;
    let mut rows = Vec::new();
    let (number, topk, hidden, depth, tokens) = bench.pick(MODEL, (8, 2, 16, 64, 4));
    let grouped =
        Case { what: "product of experts and combine", scatters: false, sizes: (tokens * topk, hidden, depth) };
    let (experts_of_all, ids, elements, sent) = bench.pick(ARRIVING, (8, 2, 16, 4));
    let early = Case { what: "experts, early", scatters: false, sizes: (sent * ids, elements, elements) };
    let of_experts = if ranks > 1 { vec![grouped, early] } else { Vec::new() };
    for (index, case) in cases.iter().chain(&of_experts).chain(&e4m3).enumerate() {
        let of: Vec<&Times> = all.iter().map(|times| &times[index]).collect();
        rows.extend(lines(bench, ranks, case, &of));
    }
    let mut table = bench.table("Products of matrices", ranks, rows);
    if ranks > 1 {
        table.notes.push(format!("{number} experts, {topk} of them for a token, {tokens} tokens of a rank"));
        table.notes.push(format!(
            "early: {experts_of_all} experts, {ids} for a token, {sent} tokens of a rank; from dispatch to sums"
        ));
    }
    table.notes.push(
        "BF16 unless said, sums in FP32; sequence: exchange and product in two launches of the same kernel".to_owned(),
    );
    Ok(table)
}

/// Returns the rows of a table for a product. `of` has the figures of all ranks.
fn lines(bench: &Bench, ranks: u32, case: &Case, of: &[&Times]) -> Vec<Row> {
    // A product is done when the last rank is.
    let slowest = |get: &dyn Fn(&Times) -> &Vec<f64>| -> Vec<f64> {
        let repeats = of.iter().map(|times| get(times).len()).min().unwrap_or(0);
        (0..repeats).map(|repeat| of.iter().map(|times| get(times)[repeat]).fold(0.0, f64::max)).collect()
    };
    let (rows, columns, depth) = case.sizes;
    let work = 2.0 * (rows * columns * depth) as f64;
    let multiply = Figure::new(&slowest(&|times| &times.multiply), Some(of.iter().map(|times| times.wrong).sum()));
    let detail = format!(
        "{} blocks; {rows} rows, {columns} columns, {depth} inner; {:.0} TFLOP/s",
        of[0].blocks,
        work / multiply.value / 1e6
    );
    if ranks == 1 {
        return vec![Row::new(case.what, multiply, "us").main(true).detail(detail)];
    }
    // The product of experts must be 1.15 times as fast.
    let goal = bench.counts(ranks).then_some(Goal::AtMost(if case.what.contains("experts") { 0.87 } else { 0.95 }));
    let figure = |get: &dyn Fn(&Times) -> &Vec<f64>| Figure::new(&slowest(get), None);
    let fused = Figure { wrong: multiply.wrong, ..figure(&|times| &times.fused) };
    // The short table has room for one row of experts.
    let row = Row::new(case.what, fused, "us")
        .main(of[0].when_all.is_empty())
        .detail(detail)
        .beside(Kind::Floor, "in sequence", figure(&|times| &times.in_sequence), goal, None)
        .beside(Kind::Other, "product alone", multiply, None, None)
        .beside(Kind::Other, "exchange alone", figure(&|times| &times.exchange), None, None);
    if of[0].when_all.is_empty() {
        return vec![row];
    }
    vec![row.beside(Kind::Other, "begun when all rows are there", figure(&|times| &times.when_all), None, None)]
}

/// Measures a product.
fn times(bench: &Bench, rank: &Rank, case: &Case) -> Result<Times, EpError> {
    let comm = rank.communicator(&Requirements::default())?;
    let (me, ranks, (all, columns, depth)) = (rank.rank() as usize, comm.ranks() as usize, case.sizes);
    let number = all / ranks;
    let config = MatmulConfig::new(number as u32, columns as u32, depth as u32);
    let config = config.deadline(Deadline::after_ns(bench.limit_ns())).blocks(bench.pick(u32::MAX, 1));
    let make = if case.scatters { Matmul::reduce_scatter } else { Matmul::all_gather };
    let matmul = make(&comm, &config)?;
    let memory = |rows: usize, elements: usize| -> Result<MemorySlice, EpError> {
        Ok(Memory::new(rank.device(), MemoryKind::Device, (2 * rows * elements) as u64)?.whole())
    };
    // A row is one of few, whose elements differ from rank to rank if the ranks have parts of the inner index.
    let row = |of: usize, key: u64, row: usize| -> Vec<u16> {
        let part = if case.scatters { of as u64 } else { 0 };
        (0..depth).map(|at| factor(key + 2 * part, row % PERIOD, at)).collect()
    };
    let filled = |first: usize, rows: usize, key: u64| -> Result<MemorySlice, EpError> {
        let slice = memory(rows, depth)?;
        let few: Vec<Vec<u16>> = (0..PERIOD).map(|index| row(me, key, index)).collect();
        let elements: Vec<u16> = (first..first + rows).flat_map(|row| few[row % PERIOD].iter().copied()).collect();
        slice.write(0, &elements)?;
        Ok(slice)
    };
    let (first, a_rows, c_rows) = if case.scatters { (0, all, number) } else { (me * number, number, all) };
    let (a, b, c) = (filled(first, a_rows, 0)?, filled(0, columns, 1)?, memory(c_rows, columns)?);
    let partial = memory(if case.scatters { all } else { 1 }, columns)?;
    let (operands, stream) = (Operands::new(&a, &b, &c).partial(&partial), rank.stream()?);
    let run = |parts: &[Part]| parts.iter().try_for_each(|&part| matmul.run(&stream, part, &operands));
    let sequence = if case.scatters { [Part::Multiply, Part::Exchange] } else { [Part::Exchange, Part::Multiply] };

    let mut wrong = 0;
    for parts in [&[Part::Fused][..], &sequence] {
        c.write(0, &vec![0x7fffu16; c_rows * columns])?;
        run(parts)?;
        stream.synchronize()?;
        comm.check("bench")?;
        let mut found = vec![0u16; c_rows * columns];
        c.read(0, &mut found)?;
        for (sample, index) in (0..c_rows).step_by((c_rows / 64).max(1)).enumerate() {
            let left = if case.scatters { me * number + index } else { index };
            for at in (sample % 7..columns).step_by(13) {
                let of_rank = |of: usize| product(&row(of, 0, left), &row(of, 1, at));
                let expected = if case.scatters { sum((0..ranks).map(of_rank)) } else { of_rank(me) };
                wrong += u64::from(found[index * columns + at] != expected);
            }
        }
    }
    let length = bench.pick((5, 4), (1, 1));
    let mut times = Times::new(wrong, matmul.blocks());
    for _ in 0..bench.launches.min(bench.pick(9, 1)) {
        let time = |parts: &[Part]| chain(rank, &stream, length, || run(parts));
        times.fused.push(time(&[Part::Fused])?);
        times.in_sequence.push(time(&sequence)?);
        times.multiply.push(time(&[Part::Multiply])?);
        times.exchange.push(time(&[Part::Exchange])?);
    }
    comm.check("bench")?;
    matmul.destroy()?;
    end(rank, &comm)?;
    Ok(times)
}

/// Rows, columns, inner elements of a product of E4M3: on real and on virtual GPUs.
const E4M3: ((usize, usize, usize), (usize, usize, usize)) = ((4096, 4096, 4096), (16, 16, 128));

/// Returns whether the first GPU multiplies by warpgroups, as an H100 and an H200 do. Virtual GPUs do.
fn has_wgmma(bench: &Bench) -> bool {
    bench
        .gpus
        .as_ref()
        .is_none_or(|gpus| gpus.names.first().is_some_and(|name| name.contains("H100") || name.contains("H200")))
}

/// Measures a product of E4M3 with scales.
fn times_e4m3(bench: &Bench, rank: &Rank) -> Result<Times, EpError> {
    let comm = rank.communicator(&Requirements::default())?;
    let (rows, columns, depth) = bench.pick(E4M3.0, E4M3.1);
    let config = MatmulConfig::new(rows as u32, columns as u32, depth as u32).e4m3().blocks(bench.pick(u32::MAX, 1));
    let matmul = Matmul::all_gather(&comm, &config)?;
    let memory = |bytes: usize| -> Result<MemorySlice, EpError> {
        Ok(Memory::new(rank.device(), MemoryKind::Device, bytes as u64)?.whole())
    };
    let row = |key: u64, row: usize, sharing: usize| -> Scaled {
        let (elements, _) = scaled_factor(key, row % PERIOD, depth, 1);
        (elements, scaled_factor(key, row, depth, sharing).1)
    };
    let filled = |key: u64, rows: usize, sharing: usize| -> Result<[MemorySlice; 2], EpError> {
        let few: Vec<Vec<u8>> = (0..PERIOD).map(|index| row(key, index, 1).0).collect();
        let elements: Vec<u8> = (0..rows).flat_map(|index| few[index % PERIOD].iter().copied()).collect();
        let scales: Vec<f32> = (0..rows).step_by(sharing).flat_map(|index| row(key, index, sharing).1).collect();
        let slices = [memory(elements.len())?, memory(4 * scales.len())?];
        slices[0].write(0, &elements)?;
        slices[1].write(0, &scales)?;
        Ok(slices)
    };
    let ([a, a_scales], [b, b_scales]) = (filled(0, rows, 1)?, filled(1, columns, 128)?);
    let (c, stream) = (memory(2 * rows * columns)?, rank.stream()?);
    c.write(0, &vec![0x7fffu16; rows * columns])?;
    let operands = Operands::new(&a, &b, &c).scales(&a_scales, &b_scales);
    let run = || matmul.run(&stream, Part::Fused, &operands);
    run()?;
    stream.synchronize()?;
    comm.check("bench")?;
    let mut found = vec![0u16; rows * columns];
    c.read(0, &mut found)?;
    let mut wrong = 0;
    for (sample, index) in (0..rows).step_by((rows / 64).max(1)).enumerate() {
        let left = row(0, index, 1);
        for at in (sample % 7..columns).step_by(61) {
            wrong += u64::from(found[index * columns + at] != scaled_product(&left, &row(1, at, 128)));
        }
    }
    let mut times = Times::new(wrong, matmul.blocks());
    for _ in 0..bench.launches.min(bench.pick(9, 1)) {
        times.multiply.push(chain(rank, &stream, bench.pick((5, 4), (1, 1)), run)?);
    }
    comm.check("bench")?;
    matmul.destroy()?;
    end(rank, &comm)?;
    Ok(times)
}

/// Experts, ids of a token, elements of a returned row, inner elements, tokens of a rank; as in DeepSeek-V3.
const MODEL: (usize, usize, usize, usize, usize) = (256, 8, 7168, 2048, 4096);

/// Measures products of experts whose rows return to their sources, beside product and combine one after the other.
///
/// Each call follows a dispatch, whose time is taken off.
fn experts(bench: &Bench, rank: &Rank) -> Result<Times, EpError> {
    let (number, topk, hidden, depth, tokens) = bench.pick(MODEL, (8, 2, 16, 64, 4));
    let comm = rank.communicator(&Requirements::default())?;
    let (me, ranks) = (rank.rank() as usize, comm.ranks() as usize);
    let shape = Shape { ranks, experts: number, topk, hidden: 1 };
    let config = GroupConfig::new(number as u32, hidden as u32, topk as u32).tokens(tokens as u32).combine_at_source();
    let config = config.deadline(Deadline::after_ns(bench.limit_ns()));
    let config = bench.pick(config, config.sms(1).threads(64));
    let group = Group::new(&comm, &config)?;
    let grouped = GroupedMatmul::new(&group, depth as u32, bench.pick(None, Some(1)))?;
    let memory = |elements: usize| -> Result<MemorySlice, EpError> {
        Ok(Memory::new(rank.device(), MemoryKind::Device, 2 * elements as u64)?.whole())
    };
    let mine = batch(&shape, Routing::Uniform, 1, me, tokens);
    let (x, ids, scales) = (memory(tokens * hidden)?, memory(2 * tokens * topk)?, memory(2 * tokens * topk)?);
    x.write(0, &vec![0x3f80u16; tokens * hidden])?;
    ids.write(0, &mine.experts)?;
    scales.write(0, &mine.weights)?;
    let capacity = tokens * topk * 5 / 4 * if ranks == 1 { 1 } else { 2 } + 64 * number;
    let permuted = Permuted::new(&group, Layout::ExpertMajorIndices, capacity as u32)?;
    let row = |key: u64, row: usize| -> Vec<u16> { (0..depth).map(|at| factor(key, row, at)).collect() };
    let few = |key: u64, rows: usize| -> Vec<u16> {
        let few: Vec<Vec<u16>> = (0..PERIOD).map(|index| row(key, index)).collect();
        (0..rows).flat_map(|row| few[row % PERIOD].iter().copied()).collect()
    };
    let (rows, weights) = (memory(capacity * depth)?, memory(shape.local() * hidden * depth)?);
    rows.write(0, &few(me as u64, capacity))?;
    for (expert, one) in
        (0..shape.local()).zip((0..5).map(|key| few(8 + key, hidden)).collect::<Vec<_>>().iter().cycle())
    {
        weights.write((2 * expert * hidden * depth) as u64, one)?;
    }
    let (products, outputs) = (memory(capacity * hidden)?, [memory(tokens * hidden)?, memory(tokens * hidden)?]);
    let (stream, mut slot) = (rank.stream()?, group.slot(0)?);
    let input = Tokens::new(&x, Ids::I32(&ids), tokens as u32);
    let factors = Experts::new(&permuted, &rows, &weights);
    // All dispatches have the same ids, so the layout holds for all.
    let mut received = slot.exchange(&stream, &input)?;
    received.permute(&stream, &permuted)?;
    received.release();

    let mut call = |returns: bool, multiplies: bool, combines: bool| -> Result<(), EpError> {
        let mut received = slot.exchange(&stream, &input)?;
        if multiplies {
            let to = if returns { Products::Return } else { Products::At(&products) };
            received.multiply(&stream, &grouped, &factors, to)?;
        }
        if combines {
            let from = if returns { Rows::Returned } else { Rows::PermutedAt(&permuted, &products) };
            let to = Combine::weighted(&scales).into(&outputs[usize::from(returns)]);
            return received.combine(&stream, from, &to);
        }
        received.release();
        Ok(())
    };
    call(true, true, true)?;
    call(false, true, true)?;
    stream.synchronize()?;
    let mut times = Times::new(differences(&outputs, tokens * hidden)?, group.blocks());
    for _ in 0..bench.launches.min(bench.pick(9, 1)) {
        let mut time = |returns, multiplies, combines| {
            chain(rank, &stream, bench.pick((3, 3), (1, 1)), || call(returns, multiplies, combines))
        };
        let dispatch = time(false, false, false)?;
        times.fused.push(time(true, true, true)? - dispatch);
        times.in_sequence.push(time(false, true, true)? - dispatch);
        times.multiply.push(time(false, true, false)? - dispatch);
        times.exchange.push(time(false, false, true)? - dispatch);
    }
    comm.check("bench")?;
    times.wrong += u64::from(group.status()?.is_some());
    drop(slot);
    group.destroy()?;
    end(rank, &comm)?;
    Ok(times)
}

/// Experts, ids of a token, elements of a row, tokens of a rank; as in Qwen3-235B-A22B.
const ARRIVING: (usize, usize, usize, usize) = (128, 8, 4096, 4096);

/// Measures products of received rows that begin before all rows are there, from the dispatch to the sums: beside
/// dispatch, permute, product and combine one after the other, and beside products that return their rows as they
/// are done, but begin when all rows are there.
fn arriving(bench: &Bench, rank: &Rank) -> Result<Times, EpError> {
    let (number, topk, hidden, tokens) = bench.pick(ARRIVING, (8, 2, 16, 4));
    let comm = rank.communicator(&Requirements::default())?;
    let (me, ranks) = (rank.rank() as usize, comm.ranks() as usize);
    let shape = Shape { ranks, experts: number, topk, hidden: 1 };
    let config = GroupConfig::new(number as u32, hidden as u32, topk as u32).tokens(tokens as u32).combine_at_source();
    let config = config.deadline(Deadline::after_ns(bench.limit_ns()));
    let config = bench.pick(config, config.sms(1).threads(64));
    let group = Group::new(&comm, &config)?;
    let blocks = bench.pick(None, Some(1));
    let (early, grouped) = (OverlappedMatmul::new(&group, blocks)?, GroupedMatmul::new(&group, hidden as u32, blocks)?);
    let memory = |elements: usize| -> Result<MemorySlice, EpError> {
        Ok(Memory::new(rank.device(), MemoryKind::Device, 2 * elements as u64)?.whole())
    };
    let few = |key: u64, rows: usize| -> Vec<u16> {
        let few: Vec<Vec<u16>> = (0..PERIOD).map(|row| (0..hidden).map(|at| factor(key, row, at)).collect()).collect();
        (0..rows).flat_map(|row| few[row % PERIOD].iter().copied()).collect()
    };
    let mine = batch(&shape, Routing::Uniform, 1, me, tokens);
    let (x, ids, scales) = (memory(tokens * hidden)?, memory(2 * tokens * topk)?, memory(2 * tokens * topk)?);
    x.write(0, &few(me as u64, tokens))?;
    ids.write(0, &mine.experts)?;
    scales.write(0, &mine.weights)?;
    let weights = memory(shape.local() * hidden * hidden)?;
    let parts = (0..5).map(|key| few(8 + key, hidden)).collect::<Vec<_>>();
    for (expert, one) in (0..shape.local()).zip(parts.iter().cycle()) {
        weights.write((2 * expert * hidden * hidden) as u64, one)?;
    }
    let capacity = tokens * topk * 5 / 4 * 2 + 64 * number;
    let permuted = Permuted::new(&group, Layout::ExpertMajorPacked { align: 1 }, capacity as u32)?;
    let (products, outputs) = (memory(capacity * hidden)?, [memory(tokens * hidden)?, memory(tokens * hidden)?]);
    let (stream, mut slot) = (rank.stream()?, group.slot(0)?);
    let input = Tokens::new(&x, Ids::I32(&ids), tokens as u32);
    let Some(rows) = permuted.rows() else {
        return Err(EpError::Unsuited { what: "a layout without rows", remedy: "use `Layout::ExpertMajorPacked`" });
    };
    let factors = Experts::new(&permuted, rows, &weights);

    let mut call = |way: Way| -> Result<(), EpError> {
        let to = Combine::weighted(&scales).into(&outputs[usize::from(way == Way::Early)]);
        if way == Way::Early {
            let received = slot.dispatch(&stream, &input)?.multiply(&stream, &early, &weights)?;
            return received.combine(&stream, Rows::Returned, &to);
        }
        let mut received = slot.exchange(&stream, &input)?;
        if way != Way::Exchange {
            received.permute(&stream, &permuted)?;
        }
        let returns = way == Way::WhenAll;
        if way != Way::Exchange && way != Way::Permute {
            let to = if returns { Products::Return } else { Products::At(&products) };
            received.multiply(&stream, &grouped, &factors, to)?;
        }
        if way == Way::Permute || way == Way::Multiply {
            received.release();
            return Ok(());
        }
        let from = if returns { Rows::Returned } else { Rows::PermutedAt(&permuted, &products) };
        received.combine(&stream, from, &to)
    };
    call(Way::Early)?;
    call(Way::Sequence)?;
    stream.synchronize()?;
    let mut times = Times::new(differences(&outputs, tokens * hidden)?, early.blocks());
    for _ in 0..bench.launches.min(bench.pick(9, 1)) {
        let mut time = |way| chain(rank, &stream, bench.pick((3, 3), (1, 1)), || call(way));
        times.fused.push(time(Way::Early)?);
        times.in_sequence.push(time(Way::Sequence)?);
        times.when_all.push(time(Way::WhenAll)?);
        let permuted = time(Way::Permute)?;
        times.multiply.push(time(Way::Multiply)? - permuted);
        times.exchange.push(time(Way::Exchange)?);
    }
    comm.check("bench")?;
    times.wrong += u64::from(group.status()?.is_some());
    drop(slot);
    group.destroy()?;
    end(rank, &comm)?;
    Ok(times)
}

/// The steps of a call.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Way {
    /// Dispatch, products that begin early and return, combine.
    Early,
    /// Dispatch, permute, products, combine.
    Sequence,
    /// Dispatch, permute, products that return, combine.
    WhenAll,
    /// Dispatch and permute.
    Permute,
    /// Dispatch, permute, products.
    Multiply,
    /// Dispatch and combine.
    Exchange,
}
