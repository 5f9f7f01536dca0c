// SPDX-License-Identifier: MIT OR Apache-2.0
//! Timed kernel launches.

use gin_bench_kernels::{END, LATE, MARKS, Plan, START, WRONG};
use gin_gpu::{GpuError, LaunchConfig};
use gin_gpu::{KernelArg, Memory, MemoryKind, Plain, Stream};
use gin_host::comm::{CommError, Communicator};
use gin_host::world::Rank;
use std::sync::Arc;

/// Returns the median of one or more figures.
pub(super) fn median(mut figures: Vec<f64>) -> f64 {
    figures.sort_by(f64::total_cmp);
    figures[figures.len() / 2]
}

/// The measuring tools of one rank: its stream, and the memory for the marks of its kernels.
pub(super) struct Lab<'a> {
    pub(super) rank: &'a Rank,
    pub(super) stream: Arc<dyn Stream>,
    marks: Arc<Memory>,
}

/// Maximum number of blocks of a timed kernel.
const MOST_BLOCKS: u32 = 1024;

/// The result of one or several launches.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Figure {
    /// Time in nanoseconds: from the start of the first block to the end of the last, or of one round.
    pub(super) ns: f64,
    /// Number of wrong results.
    pub(super) wrong: u64,
}

/// The rounds of a kernel.
#[derive(Clone, Copy, Debug)]
pub(super) struct Rounds {
    /// Number of timed launches.
    pub(super) launches: usize,
    /// Rounds before the timed ones in each launch.
    pub(super) warm: u64,
    /// Timed rounds in each launch.
    pub(super) timed: u64,
    /// Checked rounds, in a separate launch.
    pub(super) checked: u64,
    /// Time limit of a wait, in nanoseconds.
    pub(super) limit_ns: u64,
}

/// A kernel and its shape.
#[derive(Clone, Copy, Debug)]
pub(super) struct Shape {
    pub(super) kernel: &'static str,
    pub(super) blocks: u32,
    pub(super) threads: u32,
    /// Its blocks wait for other blocks or ranks.
    pub(super) waits: bool,
}

impl Shape {
    /// Returns the shape of one block that waits.
    pub(super) fn one(kernel: &'static str, threads: u32) -> Self {
        Self { kernel, blocks: 1, threads, waits: true }
    }
}

impl<'a> Lab<'a> {
    /// Prepares the tools and loads the kernels, so that no rank loads them while a kernel waits.
    pub(super) fn new(rank: &'a Rank) -> Result<Self, CommError> {
        rank.kernel("bench_flush")?;
        let marks = Memory::new(rank.device(), MemoryKind::Device, 8 * MARKS as u64 * u64::from(MOST_BLOCKS))?;
        Ok(Self { rank, stream: rank.stream()?, marks })
    }

    /// Allocates zeroed memory for `words` words.
    pub(super) fn memory(&self, kind: MemoryKind, words: u64) -> Result<Arc<Memory>, CommError> {
        Ok(Memory::new(self.rank.device(), kind, 8 * words.max(1))?)
    }

    /// Launches a kernel and waits for its end.
    ///
    /// # Errors
    /// Returns a fault that the kernel reported, or the error of the device.
    pub(super) fn launch(
        &self,
        shape: Shape,
        comm: Option<&Communicator>,
        arguments: &[&dyn KernelArg],
    ) -> Result<(), CommError> {
        let function = self.rank.kernel(shape.kernel)?;
        let config = LaunchConfig::new(shape.blocks, shape.threads);
        let config = if shape.waits { config.cooperative() } else { config };
        // Safety: the callers pass the arguments that the kernels' docs require, in memory that lives until the kernels
        // have ended; the device makes all blocks of a waiting kernel resident or refuses it.
        unsafe { self.stream.launch(&function, config, arguments)? };
        self.stream.synchronize()?;
        comm.map_or(Ok(()), |comm| comm.check("bench"))
    }

    /// Launches a kernel as [`launch`](Self::launch) does, adds the address of its marks as last argument, and returns
    /// its figure.
    ///
    /// # Errors
    /// Returns the errors of [`launch`](Self::launch), and an error if a wait passed its limit.
    pub(super) fn timed(
        &self,
        shape: Shape,
        comm: Option<&Communicator>,
        arguments: &[&dyn KernelArg],
    ) -> Result<Figure, CommError> {
        let mut marks = vec![[0u64; MARKS]; shape.blocks.min(MOST_BLOCKS) as usize];
        self.marks.write(0, &marks)?;
        let address = self.marks.address();
        let out = std::ptr::without_provenance_mut::<u64>(address as usize);
        let with_marks: Vec<&dyn KernelArg> = arguments.iter().copied().chain([&out as &dyn KernelArg]).collect();
        self.launch(shape, comm, &with_marks)?;
        self.marks.read(0, &mut marks)?;
        if marks.iter().any(|marks| marks[LATE] != 0) {
            let reason = "a wait passed its time limit".to_owned();
            return Err(GpuError::Kernel { kernel: shape.kernel.to_owned(), reason }.into());
        }
        let start = marks.iter().map(|marks| marks[START]).min().unwrap_or(0);
        let end = marks.iter().map(|marks| marks[END]).max().unwrap_or(0);
        let wrong = marks.iter().map(|marks| marks[WRONG]).sum();
        Ok(Figure { ns: end.saturating_sub(start) as f64, wrong })
    }

    /// Runs the rounds of a kernel: first a checked launch, then the timed ones. `arguments` are the kernel's arguments
    /// before its plan and its marks. `before` counts the rounds so far. If `with_others`, other ranks run the same
    /// rounds, and a barrier precedes each launch.
    ///
    /// # Errors
    /// Returns the errors of [`timed`](Self::timed).
    pub(super) fn play(
        &self,
        shape: Shape,
        comm: Option<&Communicator>,
        arguments: &[&dyn KernelArg],
        rounds: &Rounds,
        before: &mut u64,
        with_others: bool,
    ) -> Result<Figure, CommError> {
        let mut launch = |warm, timed, verify| {
            let plan = Plan { before: *before, warm, timed, verify, limit_ns: rounds.limit_ns };
            *before += warm + timed;
            if with_others {
                self.rank.barrier()?;
            }
            let plan = Plain(plan);
            let all: Vec<&dyn KernelArg> = arguments.iter().copied().chain([&plan as &dyn KernelArg]).collect();
            self.timed(shape, comm, &all)
        };
        let wrong = launch(0, rounds.checked, 1)?.wrong;
        let mut times = Vec::new();
        for _ in 0..rounds.launches {
            times.push(launch(rounds.warm, rounds.timed, 0)?.ns / rounds.timed as f64);
        }
        Ok(Figure { ns: median(times), wrong })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_is_the_middle_figure() {
        assert_eq!(median(vec![3.0, 100.0, 1.0]), 3.0);
        assert_eq!(median(vec![2.0]), 2.0);
    }
}
