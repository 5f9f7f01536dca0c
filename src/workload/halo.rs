// SPDX-License-Identifier: MIT OR Apache-2.0
//! The workload halo: a stencil that exchanges its borders.

use super::{Check, Job, Launched, Plan, Refused, Traffic, Watched, Words, limits, reference};
use crate::cli::Sizes;
use gin_gpu::KernelArg;
use gin_host::comm::CommError;
use gin_host::comm::{Requirements, WindowFlags};
use gin_host::world::Rank;
use gin_kernels::halo::{input, row_start, window_len};
use std::ops::Range;

pub(super) struct Halo<'a> {
    plan: &'a Plan,
    rows: usize,
    columns: usize,
    /// The expected cells of all ranks; none without a check.
    expected: Vec<f32>,
}

impl<'a> Halo<'a> {
    /// Prepares the workload.
    ///
    /// # Errors
    /// As [`check`].
    pub(super) fn new(plan: &'a Plan) -> Result<Self, Refused> {
        let (rows, columns) = reference::halo_shape(check(plan)?);
        let Sizes { warmup, iters, check, .. } = plan.sizes;
        let steps = warmup + iters;
        let expected = if check { reference::halo_cells(plan.ranks, rows, columns, steps) } else { Vec::new() };
        Ok(Self { plan, rows, columns, expected })
    }
}

/// Returns the number of cells of a rank.
///
/// # Errors
/// Refuses sizes that are not a whole number of cells, and sizes beyond the memory of this machine.
pub(super) fn check(plan: &Plan) -> Result<usize, Refused> {
    let bytes = plan.sizes.bytes;
    if !bytes.is_multiple_of(4) || bytes == 0 {
        return Err(Refused(format!(
            "--bytes {bytes}: halo has a grid of f32 per rank; use a multiple of 4, at least 4"
        )));
    }
    // Per rank: two buffers, each at most three times the grid with its border rows; two grids of the computation on
    // the host; a copy for the check.
    limits::check_memory(plan, 3, 9 * u128::from(bytes))?;
    usize::try_from(bytes / 4).map_err(|error| Refused(format!("--bytes {bytes}: {error}")))
}

impl Job for Halo<'_> {
    fn requirements(&self) -> Requirements {
        Requirements::default().contexts(self.plan.sizes.contexts).signals(2)
    }

    fn operations(&self) -> f64 {
        2.0
    }

    fn traffic(&self) -> Traffic {
        // A rank sends its first and its last row.
        Traffic { bytes: (2 * self.columns * size_of::<f32>()) as f64, factor: 1.0 }
    }

    fn launch(&self, rank: &Rank, comm: &Watched<'_>) -> Result<Launched, CommError> {
        let (plan, rows, columns) = (self.plan, self.rows, self.columns);
        let (me, ranks) = (rank.rank(), plan.ranks);
        let grid = comm.alloc_window::<f32>(window_len(rows, columns), WindowFlags::NONE)?;
        // The grid with its borders: the last row of the part above it, and the first of the part below.
        let cells =
            |rank: u32, rows: Range<usize>| (rows.start * columns..rows.end * columns).map(move |i| input(rank, i));
        let start = cells((me + ranks - 1) % ranks, rows - 1..rows)
            .chain(cells(me, 0..rows))
            .chain(cells((me + 1) % ranks, 0..1))
            .collect::<Vec<_>>();
        grid.write(row_start(0, 0, rows, columns), &start)?;
        // A word for the barrier of each launch.
        let words = Words::new(rank, 2)?;
        let (handle, stream) = (comm.device()?, rank.stream()?);
        let compute = |first: u64, steps: u64, word| {
            let arguments: [&dyn KernelArg; 8] =
                [&handle, &grid, &rows, &columns, &words.at(word), &first, &steps, &plan.deadline];
            plan.launch(rank, &*stream, "halo", &arguments)
        };
        // No rank puts into the borders of one that has not stored them.
        rank.barrier()?;
        let Sizes { warmup, iters, .. } = plan.sizes;
        compute(0, warmup, 0)?;
        stream.synchronize()?;
        let time = plan.timed(rank, comm, &stream, || compute(warmup, iters, 1))?;

        let mut check = Check::default();
        let start = row_start(((warmup + iters) % 2) as usize, 1, rows, columns);
        let cells = grid.read_range(start..start + rows * columns)?;
        let expected = self.expected.iter().skip(rank.rank() as usize * rows * columns);
        for (index, (value, expected)) in cells.into_iter().zip(expected).enumerate() {
            if value.to_bits() != expected.to_bits() {
                let (row, column) = (index / columns, index % columns);
                check.wrong(1, || format!("rank {me}, row {row}, column {column}: {value}, expected {expected}"));
            }
        }
        Ok(Launched { time, check, nccl: None })
    }
}
