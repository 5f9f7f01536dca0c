// SPDX-License-Identifier: MIT OR Apache-2.0
//! The workload halo: a stencil that exchanges its borders.

use super::{Check, Job, Launched, Plan, Refused, Traffic, Watched, limits, reference, words_at};
use gin_host::comm::CommError;
use gin_host::comm::{Requirements, WindowFlags};
use gin_host::world::Rank;
use gin_kernels::halo::{row_start, window_len};

pub(super) struct Halo<'a> {
    plan: &'a Plan,
    rows: usize,
    columns: usize,
    /// The expected cells of all ranks.
    expected: Vec<f32>,
}

impl<'a> Halo<'a> {
    /// Prepares the workload.
    ///
    /// # Errors
    /// As [`check`].
    pub(super) fn new(plan: &'a Plan) -> Result<Self, Refused> {
        let (rows, columns) = reference::halo_shape(check(plan)?);
        let expected = reference::halo_cells(plan.ranks, rows, columns, plan.sizes.iters);
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
        Requirements::default().contexts(self.plan.sizes.contexts).signals(2).counters(1)
    }

    fn operations(&self) -> f64 {
        2.0 * (self.plan.sizes.iters as f64 + 1.0)
    }

    fn traffic(&self) -> Traffic {
        // A rank sends its first and its last row.
        Traffic { bytes: (2 * self.columns * size_of::<f32>()) as f64, factor: 1.0 }
    }

    fn launch(&self, rank: &Rank, comm: &Watched<'_>) -> Result<Launched, CommError> {
        let (plan, rows, columns) = (self.plan, self.rows, self.columns);
        let grid = comm.alloc_window::<f32>(window_len(rows, columns), WindowFlags::NONE)?;
        let barrier = plan.words(rank, 1)?;
        let handle = comm.device()?;
        let time = plan.time(
            rank,
            comm,
            &[&handle, &grid, &rows, &columns, &words_at(&barrier), &plan.sizes.iters, &plan.deadline],
        )?;

        let mut check = Check::default();
        let start = row_start((plan.sizes.iters % 2) as usize, 1, rows, columns);
        let cells = grid.read_range(start..start + rows * columns)?;
        let expected = &self.expected[rank.rank() as usize * rows * columns..];
        for (index, (value, expected)) in cells.into_iter().zip(expected).enumerate() {
            if value.to_bits() != expected.to_bits() {
                let (row, column) = (index / columns, index % columns);
                check.wrong(|| {
                    format!("rank {}, row {row}, column {column}: {value}, expected {expected}", rank.rank())
                });
            }
        }
        Ok(Launched { time, check })
    }
}
