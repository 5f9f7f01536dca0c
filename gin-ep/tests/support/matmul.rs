// SPDX-License-Identifier: MIT OR Apache-2.0
//! Products that send and receive, against the oracle: on virtual GPUs here and on real ones in `gpu-tests`.

use gin_ep::{
    Code, Combine, Element, EpError, Experts, Group, GroupConfig, GroupedMatmul, Ids, Instructions, Layout, Matmul,
    MatmulConfig, Operands, OverlappedMatmul, Part, Permuted, Products, Received, Rows, Scales, Tokens, Weights,
};
use gin_ep_oracle::{
    Batch, Routing, SCALED, Scaled, Shape, batch, factor, narrow, product, quantized, scaled_factor, scaled_product,
    sum, widen,
};
use gin_gpu::{LaunchConfig, Memory, MemoryKind, MemorySlice};
use gin_host::comm::Communicator;
use gin_host::world::Rank;
use gpu_tests_kernels::hardware_spin;
use std::collections::HashMap;

/// A product and how often it runs.
#[derive(Clone, Copy, Debug)]
pub struct Case {
    pub scatters: bool,
    /// Rows of a rank, columns, inner elements.
    pub sizes: (usize, usize, usize),
    /// Runs, each with other elements.
    pub runs: u64,
    /// Rows that are compared: one of this many.
    pub every: usize,
}

/// Returns memory of the device with rows of a factor.
fn rows(
    rank: &Rank,
    key: u64,
    first: usize,
    number: usize,
    depth: std::ops::Range<usize>,
) -> Result<MemorySlice, EpError> {
    let elements: Vec<u16> =
        (first..first + number).flat_map(|row| depth.clone().map(move |at| factor(key, row, at))).collect();
    let memory = Memory::new(rank.device(), MemoryKind::Device, 2 * elements.len() as u64)?.whole();
    memory.write(0, &elements)?;
    Ok(memory)
}

/// Runs a product on a rank, fused and in two launches, and compares both with the oracle.
pub fn compare(rank: &Rank, comm: &Communicator, config: &MatmulConfig, case: &Case) -> Result<(), EpError> {
    let (me, ranks, Case { scatters, sizes: (number, columns, depth), .. }) =
        (rank.rank() as usize, comm.ranks() as usize, *case);
    let make = if scatters { Matmul::reduce_scatter } else { Matmul::all_gather };
    let (matmul, stream) = (make(comm, config)?, rank.stream()?);
    let all = ranks * number;
    // This rank's inner elements, of those of all ranks; or its rows, and other columns on each rank.
    let inner = if scatters { me * depth..(me + 1) * depth } else { 0..depth };
    let column = |rank: usize, column: usize| if scatters { column } else { rank * columns + column };
    let (first, a_rows, c_rows) = if scatters { (0, all, number) } else { (me * number, number, all) };
    let memory = |rows: usize| {
        Ok::<_, EpError>(Memory::new(rank.device(), MemoryKind::Device, 2 * (rows * columns) as u64)?.whole())
    };
    let (c, partial) = (memory(c_rows)?, memory(all)?);
    for run in 0..case.runs {
        let a = rows(rank, 2 * run, first, a_rows, inner.clone())?;
        let b = rows(rank, 2 * run + 1, column(me, 0), columns, inner.clone())?;
        let operands = Operands::new(&a, &b, &c).partial(&partial);
        let parts = match (run % 2, scatters) {
            (0, _) => &[Part::Fused][..],
            (_, false) => &[Part::Exchange, Part::Multiply],
            (_, true) => &[Part::Multiply, Part::Exchange],
        };
        // Elements that no kernel writes show.
        c.write(0, &vec![0x7fffu16; c_rows * columns])?;
        // A rank that runs ahead would show that rows are overwritten too early.
        for _ in 0..2 {
            for &part in parts {
                matmul.run(&stream, part, &operands)?;
            }
        }
        stream.synchronize()?;
        comm.check("matmul")?;
        let mut found = vec![0u16; c_rows * columns];
        c.read(0, &mut found)?;
        let elements = |key: u64, row: usize, part: usize| -> Vec<u16> {
            let inner = if scatters { part * depth..(part + 1) * depth } else { 0..depth };
            inner.map(|at| factor(key, row, at)).collect()
        };
        let parts = if scatters { ranks } else { 1 };
        let rights: Vec<Vec<Vec<u16>>> = (0..columns)
            .map(|at| (0..parts).map(|part| elements(2 * run + 1, column(me, at), part)).collect())
            .collect();
        for row in (0..c_rows).filter(|row| row % case.every == run as usize % case.every || row + 1 == c_rows) {
            let in_all = if scatters { me * number + row } else { row };
            let lefts: Vec<Vec<u16>> = (0..parts).map(|part| elements(2 * run, in_all, part)).collect();
            for (at, right) in rights.iter().enumerate() {
                let mut products = lefts.iter().zip(right).map(|(left, right)| product(left, right));
                let expected = if scatters { sum(products) } else { products.next().unwrap_or(0) };
                let found = found[row * columns + at];
                assert_eq!(expected, found, "{case:?}, run {run}: row {row}, column {at} of rank {me}");
            }
        }
    }
    matmul.destroy()
}

/// Returns memory of the device with these elements.
fn filled<T: bytemuck::Pod>(rank: &Rank, elements: &[T]) -> Result<MemorySlice, EpError> {
    let memory = Memory::new(rank.device(), MemoryKind::Device, size_of_val(elements) as u64)?.whole();
    memory.write(0, elements)?;
    Ok(memory)
}

/// Returns memory with the elements of rows, and memory with the scales of each `sharing` of them.
fn scaled(rank: &Rank, rows: &[Scaled], sharing: usize) -> Result<[MemorySlice; 2], EpError> {
    let elements: Vec<u8> = rows.iter().flat_map(|row| row.0.iter().copied()).collect();
    let scales: Vec<f32> = rows.iter().step_by(sharing).flat_map(|row| row.1.iter().copied()).collect();
    Ok([filled(rank, &elements)?, filled(rank, &scales)?])
}

/// Runs a product of E4M3 on one rank, and compares one of `every` rows with the oracle.
pub fn compare_e4m3(
    rank: &Rank,
    comm: &Communicator,
    config: &MatmulConfig,
    (rows, columns, depth): (usize, usize, usize),
    every: usize,
) -> Result<(), EpError> {
    let (matmul, stream) = (Matmul::all_gather(comm, &config.e4m3())?, rank.stream()?);
    for run in 0..2 {
        let lefts: Vec<Scaled> = (0..rows).map(|row| scaled_factor(2 * run, row, depth, 1)).collect();
        let rights: Vec<Scaled> = (0..columns).map(|row| scaled_factor(2 * run + 1, row, depth, SCALED)).collect();
        let ([a, a_scales], [b, b_scales]) = (scaled(rank, &lefts, 1)?, scaled(rank, &rights, SCALED)?);
        let c = filled(rank, &vec![0x7fffu16; rows * columns])?;
        matmul.run(&stream, Part::Fused, &Operands::new(&a, &b, &c).scales(&a_scales, &b_scales))?;
        stream.synchronize()?;
        comm.check("matmul")?;
        let mut found = vec![0u16; rows * columns];
        c.read(0, &mut found)?;
        for row in (0..rows).filter(|row| row % every == run as usize % every || row + 1 == rows) {
            for (at, right) in rights.iter().enumerate() {
                let expected = scaled_product(&lefts[row], right);
                assert_eq!(expected, found[row * columns + at], "run {run}: row {row}, column {at}");
            }
        }
    }
    matmul.destroy()
}

/// Returns elements of a row of a factor.
pub fn elements(shape: &Shape, key: u64, row: usize) -> Vec<u16> {
    (0..shape.hidden).map(|at| factor(key, row, at)).collect()
}

/// Returns a token's row: with scales of E4M3, of blocks with different magnitudes.
fn sent_row(shape: &Shape, e4m3: Option<Scales>, key: u64, row: usize) -> Vec<u16> {
    let by = |at: usize| if e4m3.is_some() { f32::exp2(((row + at / SCALED) % 4) as f32) } else { 1.0 };
    elements(shape, key, row).into_iter().enumerate().map(|(at, element)| narrow(widen(element) * by(at))).collect()
}

/// Returns memory with the weights of a rank's experts, and with their scales if they are E4M3.
fn weights(rank: &Rank, shape: &Shape, is_e4m3: bool) -> Result<(MemorySlice, Option<MemorySlice>), EpError> {
    let columns = shape.local() * shape.hidden;
    let all = rank.rank() as usize * columns..(rank.rank() as usize + 1) * columns;
    if is_e4m3 {
        let rows: Vec<Scaled> = all.map(|row| scaled_factor(1, row, shape.hidden, SCALED)).collect();
        let [elements, scales] = scaled(rank, &rows, SCALED)?;
        return Ok((elements, Some(scales)));
    }
    Ok((filled(rank, &all.flat_map(|row| elements(shape, 1, row)).collect::<Vec<_>>())?, None))
}

/// Compares the output of experts that multiply with the oracle. `row` returns a token's row. With scales, experts
/// multiply E4M3.
pub fn check(
    shape: &Shape,
    (routing, e4m3): (Routing, Option<Scales>),
    me: usize,
    mine: &Batch,
    row: impl Fn(usize) -> Vec<u16>,
    found: &[u16],
) {
    let Shape { topk, hidden, .. } = *shape;
    let (mut rights, mut scaled_rights) = (HashMap::<usize, Vec<u16>>::new(), HashMap::<usize, Scaled>::new());
    for token in 0..mine.experts.len() / topk {
        let left = row(token);
        let scaled_left = e4m3.map(|scales| quantized(&left, scales == Scales::F32Powers));
        for column in 0..hidden {
            let expected = (0..topk).fold(0f32, |sum, k| {
                let id = mine.experts[token * topk + k];
                if id < 0 {
                    return sum;
                }
                let at = id as usize * hidden + column;
                let product = match &scaled_left {
                    Some(left) => {
                        let right = scaled_rights.entry(at).or_insert_with(|| scaled_factor(1, at, hidden, SCALED));
                        scaled_product(left, right)
                    }
                    None => product(&left, rights.entry(at).or_insert_with(|| elements(shape, 1, at))),
                };
                mine.weights[token * topk + k].mul_add(widen(product), sum)
            });
            let found = found[token * hidden + column];
            assert_eq!(narrow(expected), found, "{routing:?}: token {token}, column {column} of rank {me}");
        }
    }
}

/// Runs experts that multiply, on a rank: products that return as they are done, and products before a combine.
/// Compares both with the oracle. With fewer rows of the layout than arrive, compares them with each other.
pub fn experts(
    rank: &Rank,
    comm: &Communicator,
    config: &GroupConfig,
    shape: &Shape,
    tokens: usize,
    (layout_rows, blocks, instructions): (u32, Option<u32>, Instructions),
) -> Result<(), EpError> {
    experts_of(rank, comm, config, shape, tokens, (layout_rows, blocks, instructions, None))
}

/// Runs the same experts with rows and weights of E4M3: with the scales of received rows, and with a copy of them.
pub fn experts_e4m3(
    rank: &Rank,
    comm: &Communicator,
    config: &GroupConfig,
    shape: &Shape,
    tokens: usize,
    (layout_rows, blocks, scales): (u32, Option<u32>, Scales),
) -> Result<(), EpError> {
    experts_of(rank, comm, config, shape, tokens, (layout_rows, blocks, Instructions::Warpgroups, Some(scales)))
}

/// Prepares a group whose dispatch makes E4M3 with these scales, or BF16, and products.
fn prepared(
    comm: &Communicator,
    config: &GroupConfig,
    shape: &Shape,
    (instructions, e4m3, blocks): (Instructions, Option<Scales>, Option<u32>),
) -> Result<(Group, GroupedMatmul), EpError> {
    let config = e4m3.map_or(*config, |scales| config.element(Element::E4m3(scales)));
    let group = Group::new(comm, &config.combine_at_source())?;
    let depth = shape.hidden as u32;
    let grouped = match e4m3 {
        Some(_) => GroupedMatmul::e4m3(&group, depth, blocks)?,
        None => GroupedMatmul::by(instructions, &group, depth, blocks)?,
    };
    Ok((group, grouped))
}

/// Returns the scales of the rows in the places of a layout, as each was received.
fn copied_scales(received: &Received<'_>, permuted: &Permuted, blocks: usize) -> Result<Vec<f32>, EpError> {
    let mut places = vec![0u32; permuted.capacity() as usize];
    permuted.source_info().read(0, &mut places)?;
    let rows = received.fetch()?;
    let scales = places.iter().flat_map(|&word| {
        let row = rows.get(word as usize >> 21).and_then(|rows| rows.get(word as usize >> 5 & 0xffff));
        row.map_or(vec![0.0; blocks], |row| bytemuck::pod_collect_to_vec(&row.scales))
    });
    Ok(scales.collect())
}

fn experts_of(
    rank: &Rank,
    comm: &Communicator,
    config: &GroupConfig,
    shape: &Shape,
    tokens: usize,
    (layout_rows, blocks, instructions, e4m3): (u32, Option<u32>, Instructions, Option<Scales>),
) -> Result<(), EpError> {
    let (me, Shape { topk, hidden, .. }) = (rank.rank() as usize, *shape);
    let (group, grouped) = prepared(comm, config, shape, (instructions, e4m3, blocks))?;
    let permuted = Permuted::new(&group, Layout::ExpertMajorPacked { align: 1 }, layout_rows)?;
    let row_bytes = 2 * hidden as u64;
    let memory = |bytes: u64| Ok::<_, EpError>(Memory::new(rank.device(), MemoryKind::Device, bytes)?.whole());
    let (x, ids, scales) =
        (memory(tokens as u64 * row_bytes)?, memory(4 * (tokens * topk) as u64)?, memory(4 * (tokens * topk) as u64)?);
    let (outputs, products) = (
        [memory(tokens as u64 * row_bytes)?, memory(tokens as u64 * row_bytes)?],
        memory(u64::from(layout_rows) * row_bytes)?,
    );
    let (weights, weight_scales) = weights(rank, shape, e4m3.is_some())?;
    let row_scales = memory(u64::from(layout_rows) * (4 * hidden / SCALED).max(4) as u64)?;
    let (stream, mut slot) = (rank.stream()?, group.slot(0)?);
    for (number, routing) in [Routing::Uniform, Routing::Holes, Routing::Repeats].into_iter().enumerate() {
        let mine = batch(&Shape { hidden: 1, ..*shape }, routing, number as u64, me, tokens);
        let row = |token: usize| sent_row(shape, e4m3, 2 + number as u64, me * tokens + token);
        x.write(0, &(0..tokens).flat_map(row).collect::<Vec<_>>())?;
        ids.write(0, &mine.experts)?;
        scales.write(0, &mine.weights)?;
        for (output, returns) in outputs.iter().zip([true, false]) {
            output.write(0, &vec![0x7fffu16; tokens * hidden])?;
            let input = Tokens::new(&x, Ids::I32(&ids), tokens as u32);
            let mut received = slot.exchange(&stream, &input)?;
            received.permute(&stream, &permuted)?;
            let rows = permuted.rows().expect("rows");
            let mut factors = Experts::new(&permuted, rows, &weights);
            if let Some(weight_scales) = &weight_scales {
                if !returns {
                    stream.synchronize()?;
                    row_scales.write(0, &copied_scales(&received, &permuted, hidden / SCALED)?)?;
                }
                factors = factors.scales((!returns).then_some(&row_scales), weight_scales);
            }
            let sums = Combine::weighted(&scales).into(output);
            if returns {
                received.multiply(&stream, &grouped, &factors, Products::Return)?;
                received.combine(&stream, Rows::Returned, &sums)?;
            } else {
                received.multiply(&stream, &grouped, &factors, Products::At(&products))?;
                received.combine(&stream, Rows::PermutedAt(&permuted, &products), &sums)?;
            }
            stream.synchronize()?;
            // A report that nobody has read would be the error of the next exchange.
            if let Some(report) = group.status()? {
                assert_eq!(report.code, Code::TooManyRows);
            }
        }
        comm.check("experts")?;
        let found = |output: &MemorySlice| -> Result<Vec<u16>, EpError> {
            let mut found = vec![0u16; tokens * hidden];
            output.read(0, &mut found)?;
            Ok(found)
        };
        let (returned, combined) = (found(&outputs[0])?, found(&outputs[1])?);
        assert!(returned == combined, "{routing:?}: the output of rank {me} depends on the way");
        // Other ranks may have left out rows of this one.
        if (layout_rows as usize) < shape.ranks * tokens * topk {
            continue;
        }
        check(shape, (routing, e4m3), me, &mine, row, &returned);
    }
    drop(slot);
    group.destroy()
}

/// Experts that multiply received rows.
#[derive(Clone, Copy, Debug)]
pub struct Arriving<'a> {
    /// Tokens of the ranks, round and round.
    pub tokens: &'a [usize],
    pub routings: &'a [Routing],
    /// The maximum number of blocks of the products.
    pub blocks: Option<u32>,
    /// The number of blocks of the products that arrive, also of more than can run.
    pub grid: Option<u32>,
    /// A rank that dispatches this many nanoseconds later than others.
    pub late: Option<(usize, u64)>,
    /// Pairs of dispatch and combine with one routing.
    pub pairs: usize,
    /// The instructions of the products.
    pub instructions: Instructions,
    /// The dispatch makes E4M3 with these scales, which experts multiply.
    pub e4m3: Option<Scales>,
}

impl Arriving<'_> {
    /// A pair with each of these routings.
    pub const fn of<'a>(tokens: &'a [usize], routings: &'a [Routing]) -> Arriving<'a> {
        let instructions = Instructions::Warpgroups;
        Arriving { tokens, routings, blocks: None, grid: None, late: None, pairs: 1, instructions, e4m3: None }
    }
}

/// Runs experts that multiply received rows, on a rank, as they arrive and one step after the other. Compares both with
/// the oracle. Returns the number of tiles that were taken before all rows were there.
pub fn arriving(
    rank: &Rank,
    comm: &Communicator,
    config: &GroupConfig,
    shape: &Shape,
    case: &Arriving<'_>,
) -> Result<u32, EpError> {
    let (me, Shape { topk, hidden, ranks, .. }) = (rank.rank() as usize, *shape);
    let (tokens, max) = (case.tokens[me % case.tokens.len()], case.tokens.iter().max().copied().unwrap_or(0));
    let (group, grouped) = prepared(comm, config, shape, (case.instructions, case.e4m3, case.blocks))?;
    let early = OverlappedMatmul::by(case.instructions, &group, case.blocks)?;
    let early = if let Some(grid) = case.grid { early.grid(grid)? } else { early };
    let places = ranks * max * topk;
    let permuted = Permuted::new(&group, Layout::ExpertMajorPacked { align: 1 }, places as u32)?;
    let row_bytes = 2 * hidden;
    let memory = |bytes: usize| Ok::<_, EpError>(Memory::new(rank.device(), MemoryKind::Device, bytes as u64)?.whole());
    let (x, output) = (memory(max * row_bytes)?, memory(max * row_bytes)?);
    let (ids, scales) = (memory(4 * max * topk)?, memory(4 * max * topk)?);
    let (products, words) = (memory(places * row_bytes)?, memory(16)?);
    let (weights, weight_scales) = weights(rank, shape, case.e4m3.is_some())?;
    let early_weights = weight_scales.as_ref().map_or((&weights).into(), |scales| Weights::e4m3(&weights, scales));
    let (stream, mut slot, mut taken) = (rank.stream()?, group.slot(0)?, 0);
    for (number, &routing) in case.routings.iter().enumerate() {
        let mine = batch(&Shape { hidden: 1, ..*shape }, routing, number as u64, me, tokens);
        let row = |token: usize| sent_row(shape, case.e4m3, 2 + number as u64, me * max + token);
        x.write(0, &(0..tokens).flat_map(row).collect::<Vec<_>>())?;
        ids.write(0, &mine.experts)?;
        scales.write(0, &mine.weights)?;
        let input = Tokens::new(&x, Ids::I32(&ids), tokens as u32);
        let sums = Combine::weighted(&scales).into(&output);
        let mut outputs = Vec::new();
        for is_early in [true, false] {
            output.write(0, &vec![0x7fffu16; max * hidden])?;
            for _ in 0..case.pairs {
                if let Some((late, ns)) = case.late
                    && late == me
                {
                    let word = |offset: u64| (words.address() + offset) as usize as *mut u64;
                    // Safety: two words of device memory.
                    unsafe { hardware_spin::launch(&stream, LaunchConfig::new(1, 32), word(0), word(8), ns)? };
                }
                let sent = slot.dispatch(&stream, &input)?;
                if is_early {
                    sent.multiply(&stream, &early, early_weights)?.combine(&stream, Rows::Returned, &sums)?;
                    continue;
                }
                let mut received = sent.receive(&stream)?;
                received.permute(&stream, &permuted)?;
                let mut factors = Experts::new(&permuted, permuted.rows().expect("rows"), &weights);
                if let Some(scales) = &weight_scales {
                    factors = factors.scales(None, scales);
                }
                received.multiply(&stream, &grouped, &factors, Products::At(&products))?;
                received.combine(&stream, Rows::PermutedAt(&permuted, &products), &sums)?;
            }
            stream.synchronize()?;
            comm.check("experts")?;
            assert_eq!(group.status()?, None);
            let mut found = vec![0u16; tokens * hidden];
            output.read(0, &mut found)?;
            outputs.push(found);
            taken += if is_early { early.overlapped_tiles(0)? } else { 0 };
        }
        assert!(outputs[0] == outputs[1], "{case:?}: {routing:?}: the output of rank {me} depends on the way");
        check(shape, (routing, case.e4m3), me, &mine, row, &outputs[0]);
    }
    drop(slot);
    group.destroy()?;
    Ok(taken)
}
