// SPDX-License-Identifier: MIT OR Apache-2.0
//! The workload halo: a stencil that exchanges its borders.

use super::{Check, Job, Launched, Options, Refused, RunDevice, Shape, limits, reference};
use gin_host::CommError;
use gin_host::comm::{Communicator, Requirements, WindowFlags};
use gin_host::world::Rank;
use gin_kernels::halo::{row_start, window_len};

pub(super) struct Halo {
    shape: Shape,
    rows: usize,
    columns: usize,
    /// The expected cells of all ranks.
    expected: Vec<f32>,
}

impl Halo {
    /// Prepares the workload.
    ///
    /// # Errors
    /// Refuses sizes that are not a whole number of cells, and sizes beyond the memory of this machine.
    pub(super) fn new(device: &RunDevice, options: &Options) -> Result<Self, Refused> {
        let bytes = options.bytes;
        if !bytes.is_multiple_of(4) || bytes == 0 {
            return Err(Refused(format!(
                "--bytes {bytes}: halo has a grid of f32 per rank; use a multiple of 4, at least 4"
            )));
        }
        let shape = Shape::new(options);
        // Per rank: two buffers, each at most three times the grid with its border rows; two grids of the computation
        // on the host; a copy for the check.
        limits::check_memory(device, options, 3, 9 * u128::from(bytes))?;
        let cells = usize::try_from(bytes / 4).map_err(|error| Refused(format!("--bytes {bytes}: {error}")))?;
        let (rows, columns) = reference::halo_shape(cells);
        let expected = reference::halo_cells(shape.ranks, rows, columns, shape.iters);
        Ok(Self { shape, rows, columns, expected })
    }
}

impl Job for Halo {
    fn requirements(&self) -> Requirements {
        Requirements::default().contexts(self.shape.contexts).signals(2).counters(1)
    }

    fn operations(&self) -> f64 {
        2.0 * (self.shape.iters as f64 + 1.0)
    }

    fn launch(&self, rank: &Rank, comm: &Communicator) -> Result<Launched, CommError> {
        let (shape, rows, columns) = (&self.shape, self.rows, self.columns);
        let grid = comm.alloc_window::<f32>(window_len(rows, columns), WindowFlags::NONE)?;
        let barrier = shape.words(rank, 1)?;
        let handle = comm.device()?;
        let time = shape.run(
            rank,
            "halo",
            &[&handle, &grid, &rows, &columns, &barrier.address(), &shape.iters, &shape.deadline],
        )?;

        let mut check = Check::default();
        let start = row_start((shape.iters % 2) as usize, 1, rows, columns);
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
