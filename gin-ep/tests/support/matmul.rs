// SPDX-License-Identifier: MIT OR Apache-2.0
//! Products that send and receive, against the oracle: on virtual GPUs here and on real ones in `gpu-tests`.

use gin_ep::{
    Arrangement, Code, Combine, EpError, Experts, Group, GroupConfig, GroupedMatmul, Ids, Layout, Matmul, MatmulConfig,
    Operands, Part, Products, Rows, Tokens,
};
use gin_ep_oracle::{Routing, Shape, batch, factor, narrow, product, sum, widen};
use gin_gpu::{Memory, MemoryKind, MemorySlice};
use gin_host::comm::Communicator;
use gin_host::world::Rank;

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

/// Runs experts that multiply, on a rank: products that return as they are done, and products before a combine.
/// Compares both with the oracle. With fewer rows of the layout than arrive, compares them with each other.
pub fn experts(
    rank: &Rank,
    comm: &Communicator,
    config: &GroupConfig,
    shape: &Shape,
    tokens: usize,
    (layout_rows, blocks): (u32, Option<u32>),
) -> Result<(), EpError> {
    let (me, Shape { topk, hidden, .. }, local) = (rank.rank() as usize, *shape, shape.local());
    let group = Group::new(comm, &config.at_source())?;
    let grouped = GroupedMatmul::new(&group, hidden as u32, blocks)?;
    let arrangement = Arrangement::new(&group, Layout::Packed { align: 1 }, layout_rows)?;
    let row_bytes = 2 * hidden as u64;
    let memory = |bytes: u64| Ok::<_, EpError>(Memory::new(rank.device(), MemoryKind::Device, bytes)?.whole());
    let (x, ids, scales) =
        (memory(tokens as u64 * row_bytes)?, memory(4 * (tokens * topk) as u64)?, memory(4 * (tokens * topk) as u64)?);
    let (outputs, products) = (
        [memory(tokens as u64 * row_bytes)?, memory(tokens as u64 * row_bytes)?],
        memory(u64::from(layout_rows) * row_bytes)?,
    );
    let weights = memory((local * hidden) as u64 * row_bytes)?;
    let elements = |key: u64, row: usize| -> Vec<u16> { (0..hidden).map(|at| factor(key, row, at)).collect() };
    let all = (0..local * hidden).flat_map(|row| elements(1, me * local * hidden + row)).collect::<Vec<_>>();
    weights.write(0, &all)?;
    let (stream, mut lane) = (rank.stream()?, group.lane(0)?);
    for (number, routing) in [Routing::Uniform, Routing::Holes, Routing::Repeats].into_iter().enumerate() {
        let mine = batch(&Shape { hidden: 1, ..*shape }, routing, number as u64, me, tokens);
        let row = |token: usize| elements(2 + number as u64, me * tokens + token);
        x.write(0, &(0..tokens).flat_map(row).collect::<Vec<_>>())?;
        ids.write(0, &mine.experts)?;
        scales.write(0, &mine.weights)?;
        for (output, returns) in outputs.iter().zip([true, false]) {
            output.write(0, &vec![0x7fffu16; tokens * hidden])?;
            let input = Tokens::new(&x, Ids::I32(&ids), tokens as u32);
            let mut received = lane.exchange(&stream, &input)?;
            received.arrange(&stream, &arrangement)?;
            let rows = arrangement.rows().expect("rows");
            let factors = Experts::new(&arrangement, rows, &weights);
            let sums = Combine::weighted(&scales).into(output);
            if returns {
                received.multiply(&stream, &grouped, &factors, Products::Return)?;
                received.combine(&stream, Rows::Returned, &sums)?;
            } else {
                received.multiply(&stream, &grouped, &factors, Products::At(&products))?;
                received.combine(&stream, Rows::ArrangedAt(&arrangement, &products), &sums)?;
            }
        }
        stream.synchronize()?;
        comm.check("experts")?;
        let found = |output: &MemorySlice| -> Result<Vec<u16>, EpError> {
            let mut found = vec![0u16; tokens * hidden];
            output.read(0, &mut found)?;
            Ok(found)
        };
        let (returned, combined) = (found(&outputs[0])?, found(&outputs[1])?);
        assert!(returned == combined, "{routing:?}: the output of rank {me} depends on the way");
        if let Some(report) = group.status()? {
            assert_eq!(report.code, Code::TooManyRows);
        }
        // Other ranks may have left out rows of this one.
        if (layout_rows as usize) < shape.ranks * tokens * topk {
            continue;
        }
        for token in 0..tokens {
            let left = row(token);
            for column in 0..hidden {
                let expected = (0..topk).fold(0f32, |sum, k| {
                    let id = mine.experts[token * topk + k];
                    if id < 0 {
                        return sum;
                    }
                    let right = elements(1, id as usize * hidden + column);
                    mine.weights[token * topk + k].mul_add(widen(product(&left, &right)), sum)
                });
                assert_eq!(
                    narrow(expected),
                    returned[token * hidden + column],
                    "{routing:?}: token {token}, column {column} of rank {me}"
                );
            }
        }
    }
    drop(lane);
    group.destroy()
}
