// SPDX-License-Identifier: MIT OR Apache-2.0
//! A 2-D stencil whose kernel exchanges its borders each step.
//!
//! Each rank owns `rows` rows of `columns` cells. The ranks' parts are below each other and close to a torus. A cell
//! becomes the mean of its four neighbours. There are two buffers with a border row above and below. In each step a
//! rank computes into the other buffer, then puts its first and last row into its neighbours' borders of that buffer.
//!
//! Signal 0 counts rows that arrived from above, signal 1 those from below; counter 0 counts rows that have left.

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

/// Computes `steps` steps. The result is in buffer `steps % 2` of `grid`, rows 1 to `rows`.
///
/// Needs two signals and a counter in context 0. `grid` has [`window_len`] elements. `barrier_word` is the word of the
/// grid's barrier, 0 at the launch.
///
/// # Safety
/// - `barrier_word` is valid, in this device's memory.
/// - The whole grid of threads is resident, on every rank.
#[kernel]
pub unsafe fn halo(
    comm: Comm,
    grid: Window<f32>,
    rows: usize,
    columns: usize,
    barrier_word: *mut u64,
    steps: u64,
    deadline: Deadline,
) {
    // Safety: guaranteed by the kernel's caller.
    let barrier = unsafe { GridBarrier::new(&comm, barrier_word) };
    if let Err(fault) = run(&comm, grid, rows, columns, barrier, steps, deadline) {
        comm.report(fault);
    }
}

#[inline(always)]
fn run(
    comm: &Comm,
    grid: Window<f32>,
    rows: usize,
    columns: usize,
    mut barrier: GridBarrier<'_>,
    steps: u64,
    deadline: Deadline,
) -> Result<(), Fault> {
    let gin = Gin::new(comm, ContextId::new(0));
    let world = comm.world();
    let (block, blocks) = (block_in_grid() as usize, grid_dim().count() as usize);
    let threads = Block.size() as usize;
    let cells = rows * columns;
    let mine = (block * threads + Block.rank() as usize..cells).step_by(blocks * threads);

    // Round 0 creates the input. One loop serves both it and the steps, so that the code of the exchange exists once.
    for round in 0..steps + 1 {
        let (now, next) = ((round as usize + 1) % 2, round as usize % 2);
        for cell in mine.clone() {
            let (row, column) = (cell / columns + 1, cell % columns);
            let value = if round == 0 {
                input(world.rank(), cell)
            } else {
                let at = |row, column| grid.read(row_start(now, row, rows, columns) + column);
                let left = if column == 0 { columns - 1 } else { column - 1 };
                let right = if column + 1 == columns { 0 } else { column + 1 };
                stencil(at(row - 1, column), at(row + 1, column), at(row, left), at(row, right))
            };
            grid.write(row_start(next, row, rows, columns) + column, value);
        }
        barrier.sync(deadline)?;
        if block == 0 {
            exchange(&gin, &world, grid, rows, columns, next, round + 1, deadline)?;
        }
        barrier.sync(deadline)?;
    }
    Ok(())
}

/// Puts the first and the last row into the neighbours' borders and waits for theirs. `round` counts from 1.
#[inline(always)]
#[expect(clippy::too_many_arguments, reason = "the state of the kernel, passed on once")]
fn exchange(
    gin: &Gin,
    world: &Team,
    grid: Window<f32>,
    rows: usize,
    columns: usize,
    buffer: usize,
    round: u64,
    deadline: Deadline,
) -> Result<(), Fault> {
    let left_us = CounterId::new(0);
    let row = |row| grid.range(row_start(buffer, row, rows, columns), columns);
    // Loops, so that the code of a put and of a wait exists once; over numbers, since an array would be on the stack.
    for direction in 0..2 {
        let down = direction == 1;
        // This rank's first row is the border below the part above it, and its last row the border above the part
        // below.
        let (peer, there, here, signal) =
            if down { (world.right(), 0, rows, FROM_ABOVE) } else { (world.left(), rows + 1, 1, FROM_BELOW) };
        let put = gin.put(peer, row(there), row(here)).signal(SignalId::new(signal).inc()).counter(left_us);
        let put = if down { put } else { put.more() };
        put.issue(&Block)?;
    }
    for signal in FROM_ABOVE..=FROM_BELOW {
        gin.wait_signal(&Block, SignalId::new(signal), round, deadline)?;
    }
    gin.wait_counter(&Block, left_us, 2 * round, deadline)
}
