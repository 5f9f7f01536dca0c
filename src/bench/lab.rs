// SPDX-License-Identifier: MIT OR Apache-2.0
//! Launches of kernels that are timed.

use gin_bench_kernels::{END, LATE, MARKS, Plan, START, WRONG};
use gin_gpu::{GpuError, LaunchConfig};
use gin_gpu::{KernelArg, Memory, MemoryKind, Plain, Stream};
use gin_host::comm::{CommError, Communicator};
use gin_host::world::Rank;
use std::sync::Arc;

/// The middle of some figures, of which there is at least one.
pub(super) fn median(mut figures: Vec<f64>) -> f64 {
    figures.sort_by(f64::total_cmp);
    figures[figures.len() / 2]
}

/// The tools by which one rank measures.
pub(super) struct Lab<'a> {
    pub(super) rank: &'a Rank,
    pub(super) stream: Arc<dyn Stream>,
    marks: Arc<Memory>,
}

/// Most blocks of a kernel that is timed.
const MOST_BLOCKS: u32 = 1024;

/// The result of a launch, or of several.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Figure {
    /// Nanoseconds: from the first block that began to the last that was done, or of one round.
    pub(super) ns: f64,
    /// Results that were wrong.
    pub(super) wrong: u64,
}

/// Rounds of a kernel that plays some.
#[derive(Clone, Copy, Debug)]
pub(super) struct Rounds {
    pub(super) launches: usize,
    pub(super) warm: u64,
    pub(super) timed: u64,
    /// Rounds that are checked, in a launch of their own.
    pub(super) checked: u64,
    pub(super) limit_ns: u64,
}

/// A kernel and its shape.
#[derive(Clone, Copy, Debug)]
pub(super) struct Shape {
    pub(super) kernel: &'static str,
    pub(super) blocks: u32,
    pub(super) threads: u32,
    /// Its blocks wait for others.
    pub(super) waits: bool,
}

impl Shape {
    /// One block that waits for others.
    pub(super) fn one(kernel: &'static str, threads: u32) -> Self {
        Self { kernel, blocks: 1, threads, waits: true }
    }
}

impl<'a> Lab<'a> {
    /// Loads the kernels too, so that nobody does beside a kernel that waits.
    pub(super) fn new(rank: &'a Rank) -> Result<Self, CommError> {
        rank.kernel("bench_flush")?;
        let marks = Memory::new(rank.device(), MemoryKind::Device, 8 * MARKS as u64 * u64::from(MOST_BLOCKS))?;
        Ok(Self { rank, stream: rank.stream()?, marks })
    }

    /// Memory of the device, zeroed.
    pub(super) fn memory(&self, kind: MemoryKind, words: u64) -> Result<Arc<Memory>, CommError> {
        Ok(Memory::new(self.rank.device(), kind, 8 * words.max(1))?)
    }

    /// Launches a kernel and waits for its end.
    ///
    /// # Errors
    /// A fault that it reported, or what the device reports.
    pub(super) fn launch(
        &self,
        shape: Shape,
        comm: Option<&Communicator>,
        arguments: &[&dyn KernelArg],
    ) -> Result<(), CommError> {
        let function = self.rank.kernel(shape.kernel)?;
        let config = LaunchConfig::new(shape.blocks, shape.threads);
        let config = if shape.waits { config.cooperative() } else { config };
        // Safety: the callers pass the arguments that the kernels' docs ask for, in memory that lives until the kernels
        // have ended; kernels that wait are resident or refused.
        unsafe { self.stream.launch(&function, config, arguments)? };
        self.stream.synchronize()?;
        comm.map_or(Ok(()), |comm| comm.check("bench"))
    }

    /// As [`launch`](Self::launch), of a kernel whose last parameter is its marks, which it adds.
    ///
    /// # Errors
    /// As there, and if a wait ended at its limit.
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
            let reason = "what it waits for did not come in time".to_owned();
            return Err(GpuError::Kernel { kernel: shape.kernel.to_owned(), reason }.into());
        }
        let start = marks.iter().map(|marks| marks[START]).min().unwrap_or(0);
        let end = marks.iter().map(|marks| marks[END]).max().unwrap_or(0);
        let wrong = marks.iter().map(|marks| marks[WRONG]).sum();
        Ok(Figure { ns: end.saturating_sub(start) as f64, wrong })
    }

    /// Plays rounds, checked ones first. `arguments` makes those of the kernel before its plan and its marks; `before`
    /// counts the rounds. `meet`: other ranks play too.
    ///
    /// # Errors
    /// As [`timed`](Self::timed).
    pub(super) fn play(
        &self,
        shape: Shape,
        comm: Option<&Communicator>,
        arguments: &[&dyn KernelArg],
        rounds: &Rounds,
        before: &mut u64,
        meet: bool,
    ) -> Result<Figure, CommError> {
        let mut launch = |warm, timed, verify| {
            let plan = Plan { before: *before, warm, timed, verify, limit_ns: rounds.limit_ns };
            *before += warm + timed;
            if meet {
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
