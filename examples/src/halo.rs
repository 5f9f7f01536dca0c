// SPDX-License-Identifier: MIT OR Apache-2.0
//! A stencil with ghost cells. The kernel's docs have a picture.

use crate::expect;
use gin_examples_kernels::halo::{halo, stencil};
use gin_host::comm::Deadline;
use gin_host::prelude::*;
use std::error::Error;

/// Cells of each rank.
const LEN: usize = 100;
const STEPS: usize = 30;

/// Returns the initial value of a cell.
fn input(cell: usize) -> f32 {
    (cell * 37 % 101) as f32
}

/// Returns the cells of all ranks after all steps.
fn expected(cells: usize) -> Vec<f32> {
    let mut now: Vec<f32> = (0..cells).map(input).collect();
    for _ in 0..STEPS {
        now = (0..cells).map(|i| stencil(now[(i + cells - 1) % cells], now[i], now[(i + 1) % cells])).collect();
    }
    now
}

/// Computes all steps in one launch.
pub fn run(config: WorldConfig) -> Result<String, Box<dyn Error>> {
    let ranks = config.ranks as usize;
    let cells = ranks * LEN;
    let found = launch(config, |rank| -> Result<Vec<f32>, CommError> {
        let comm = rank.communicator(&Requirements::default().signals(2))?;
        // Two buffers, each with a ghost at both ends.
        let window = comm.alloc_window::<f32>(2 * (LEN + 2), WindowFlags::NONE)?;
        let first = rank.rank() as usize * LEN + cells - 1;
        window.write(0, &(0..LEN + 2).map(|i| input((first + i) % cells)).collect::<Vec<_>>())?;
        let stream = rank.stream()?;
        let (shape, limit) = (LaunchConfig::new(1, 64).cooperative(), Deadline::after_ms(1000));
        // Safety: one block on every rank; the window lives until the stream is done.
        unsafe { halo::launch(&stream, shape, &comm.device()?, &window, LEN, STEPS, limit)? };
        stream.synchronize()?;
        comm.check("exchange")?;
        let start = STEPS % 2 * (LEN + 2) + 1;
        let part = window.read_range(start..start + LEN)?;
        comm.destroy()?;
        Ok(part)
    })?;
    expect("cells", &found.concat(), &expected(cells))?;
    Ok(format!("{cells} cells on {ranks} ranks after {STEPS} steps"))
}
