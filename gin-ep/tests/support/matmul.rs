// SPDX-License-Identifier: MIT OR Apache-2.0
//! Products that send and receive, against the oracle: on virtual GPUs here and on real ones in `gpu-tests`.

use gin_ep::{EpError, Matmul, MatmulConfig, Operands, Part};
use gin_ep_oracle::{factor, product, sum};
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
