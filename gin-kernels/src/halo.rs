// SPDX-License-Identifier: MIT OR Apache-2.0
//! A 2-D stencil whose kernel exchanges its borders each step.
//!
//! Each rank owns `rows` rows of `columns` cells. The ranks' parts are below each other and close to a torus. A cell
//! becomes the mean of its four neighbours. There are two buffers with a border row above and below. In each step a
//! rank computes into the other buffer. The blocks take the rows in turns; the block of the first or the last row puts
//! it into a neighbour's border of that buffer as soon as it has computed it, while the others compute.
//!
//! Signal 0 counts rows that arrived from above, signal 1 those from below.

use crate::{element, unit};
use gin_device::prelude::*;

/// Numbers of the signals.
const FROM_ABOVE: u32 = 0;
const FROM_BELOW: u32 = 1;

/// Returns the initial value of cell `index` of rank `rank`'s part.
#[inline(always)]
#[must_use]
pub const fn input(rank: u32, index: usize) -> f32 {
    ((rank as u64 * 59 + index as u64 * 11) % 256) as f32
}

/// Returns the new value of a cell with these neighbours. The order of the sums is part of the definition.
#[inline(always)]
#[must_use]
pub const fn stencil(above: f32, below: f32, left: f32, right: f32) -> f32 {
    0.25 * ((above + below) + (left + right))
}

/// Returns the number of elements that the window needs: two buffers of `rows + 2` rows.
#[must_use]
pub const fn window_len(rows: usize, columns: usize) -> usize {
    2 * (rows + 2) * columns
}

/// Returns the start of row `row` (0 is the border above) of buffer `buffer`.
#[inline(always)]
#[must_use]
pub const fn row_start(buffer: usize, row: usize, rows: usize, columns: usize) -> usize {
    (buffer * (rows + 2) + row) * columns
}

/// Computes the steps `first .. first + steps`. Step `k` reads buffer `k % 2` and its borders, and writes the other.
///
/// Needs two signals in context 0. `grid` has [`window_len`] elements and is aligned to 16 bytes. Before step 0 the
/// host has stored the rows and both borders of buffer 0. `barrier_word` is the word of the grid's barrier, 0 at the
/// launch. The first launch on a communicator has `first` 0, a later one continues.
///
/// # Safety
/// - `barrier_word` is valid, in this device's memory.
/// - The whole grid of threads is resident, on every rank.
#[kernel]
#[expect(clippy::too_many_arguments, reason = "what a launch gives")]
pub unsafe fn halo(
    comm: Comm,
    grid: Window<f32>,
    rows: usize,
    columns: usize,
    barrier_word: *mut u64,
    first: u64,
    steps: u64,
    deadline: Deadline,
) {
    // Safety: guaranteed by the kernel's caller.
    let barrier = unsafe { GridBarrier::new(&comm, barrier_word) };
    if let Err(fault) = run(&comm, grid, (rows, columns), barrier, first..first + steps, deadline) {
        comm.report(fault);
    }
}

#[inline(always)]
fn run(
    comm: &Comm,
    grid: Window<f32>,
    (rows, columns): (usize, usize),
    mut barrier: GridBarrier<'_>,
    steps: core::ops::Range<u64>,
    deadline: Deadline,
) -> Result<(), Fault> {
    let (gin, world) = (Gin::new(comm, ContextId::new(0)), comm.world());
    // Safety: the same memory, which gin aligns to more than 16 bytes.
    let units: Window<u128> = unsafe { Window::from_handle(*grid.handle()) };
    // Loops over the two borders, so that the code of a put and of a wait exists once; over numbers, since an array
    // would be on the stack.
    for step in steps.start..=steps.end {
        let (now, next) = (step as usize % 2, (step as usize + 1) % 2);
        let at = |buffer, row| row_start(buffer, row, rows, columns);
        let mut row = block_in_grid() as usize + 1;
        while row <= rows {
            // Before the first step the borders are there.
            for signal in FROM_ABOVE..=FROM_BELOW {
                if row == if signal == FROM_ABOVE { 1 } else { rows } {
                    gin.wait_signal(&Block, SignalId::new(signal), step, deadline)?;
                }
            }
            // After the last step only the borders are waited for.
            if step == steps.end {
                row += grid_dim().count() as usize;
                continue;
            }
            let (above, here, below) = (at(now, row - 1), at(now, row), at(now, row + 1));
            // Four cells at a time if rows have whole units of 16 bytes, else one.
            let width = if columns.is_multiple_of(4) { 4 } else { 1 };
            for column in Block.stripe(columns / width) {
                let column = column * width;
                let left = grid.read(here + if column == 0 { columns } else { column } - 1);
                let right = grid.read(here + if column + width == columns { 0 } else { column + width });
                if width == 1 {
                    let (above, below) = (grid.read(above + column), grid.read(below + column));
                    grid.write(at(next, row) + column, stencil(above, below, left, right));
                    continue;
                }
                let [above, here, below] = [above, here, below].map(|start| units.read((start + column) / 4));
                let cell = |i| match i {
                    0 => left,
                    5 => right,
                    _ => element(here, i - 1),
                };
                let value = unit(|i| stencil(element(above, i), element(below, i), cell(i), cell(i + 2)));
                units.write((at(next, row) + column) / 4, value);
            }
            // This rank's first row is the border below the part above it, and its last row the border above the part
            // below.
            for signal in FROM_ABOVE..=FROM_BELOW {
                let down = signal == FROM_ABOVE;
                let (mine, peer, there) = if down { (rows, world.right(), 0) } else { (1, world.left(), rows + 1) };
                if row == mine {
                    let (there, here) = (grid.range(at(next, there), columns), grid.range(at(next, row), columns));
                    gin.put(peer, there, here).signal(SignalId::new(signal).inc()).issue(&Block)?;
                    // The step after the next one overwrites the row.
                    gin.flush(&Block, deadline)?;
                }
            }
            row += grid_dim().count() as usize;
        }
        barrier.sync(deadline)?;
    }
    Ok(())
}
