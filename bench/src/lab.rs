// SPDX-License-Identifier: MIT OR Apache-2.0
//! Timed kernel launches.

use super::figure::Figure;
use gin_bench_kernels::{END, LATE, MARKS, Plan, START, WRONG};
use gin_gpu::{GpuError, LaunchConfig, Module};
use gin_gpu::{KernelArg, Memory, MemoryKind, Plain, Stream};
use gin_host::comm::{CommError, Communicator};
use gin_host::world::Rank;
use std::cell::Cell;
use std::sync::Arc;

/// The measuring tools of one rank: its stream, and the memory for the marks of its kernels.
pub(super) struct Lab<'a> {
    pub(super) rank: &'a Rank,
    pub(super) stream: Arc<dyn Stream>,
    marks: Arc<Memory>,
}

/// Maximum number of blocks of a timed kernel.
const MAX_BLOCKS: u32 = 1024;

/// The result of one launch.
#[derive(Clone, Copy, Debug)]
pub(super) struct Launched {
    /// Time from the start of the first block to the end of the last, in nanoseconds.
    pub(super) ns: f64,
    /// Number of wrong results.
    pub(super) wrong: u64,
}

/// The rounds of a kernel.
#[derive(Clone, Copy, Debug)]
pub(super) struct Rounds {
    /// Number of repeats: timed launches.
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
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Shape {
    pub(super) kernel: &'static str,
    pub(super) blocks: u32,
    pub(super) threads: u32,
    /// Its blocks wait for other blocks or ranks.
    pub(super) waits: bool,
    /// Bytes of dynamic shared memory of a block.
    pub(super) shared: u32,
}

impl Shape {
    /// Returns the shape of one block that waits.
    pub(super) fn one(kernel: &'static str, threads: u32) -> Self {
        Self { kernel, blocks: 1, threads, waits: true, shared: 0 }
    }
}

/// A kernel of rounds and its arguments before its plan and its marks.
pub(super) struct Play<'a> {
    pub(super) shape: Shape,
    pub(super) comm: Option<&'a Communicator>,
    pub(super) arguments: &'a [&'a dyn KernelArg],
    /// Number of rounds so far of all kernels that use the same words and signals.
    pub(super) before: &'a Cell<u64>,
    /// The module that has the kernel; `None` if it is linked into this program.
    pub(super) module: Option<&'a dyn Module>,
}

impl<'a> Lab<'a> {
    /// Prepares the tools and loads the kernels, so that no rank loads them while a kernel waits.
    pub(super) fn new(rank: &'a Rank) -> Result<Self, CommError> {
        rank.kernel("bench_flush")?;
        let marks = Memory::new(rank.device(), MemoryKind::Device, 8 * MARKS as u64 * u64::from(MAX_BLOCKS))?;
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
        self.launch_of(None, shape, comm, arguments)
    }

    /// Launches a kernel of a module.
    fn launch_of(
        &self,
        module: Option<&dyn Module>,
        shape: Shape,
        comm: Option<&Communicator>,
        arguments: &[&dyn KernelArg],
    ) -> Result<(), CommError> {
        let function = match module {
            Some(module) => module.function(shape.kernel)?,
            None => self.rank.kernel(shape.kernel)?,
        };
        let config = LaunchConfig::new(shape.blocks, shape.threads).dynamic_shared(shape.shared);
        let config = if shape.waits { config.cooperative() } else { config };
        // Safety: the callers pass the arguments that the kernels' docs require, in memory that lives until the kernels
        // have ended; the device makes all blocks of a waiting kernel resident or refuses it.
        unsafe { self.stream.launch(&function, config, arguments)? };
        self.stream.synchronize()?;
        comm.map_or(Ok(()), |comm| comm.check("bench"))
    }

    /// Launches a kernel as [`launch`](Self::launch) does, with the address of its marks as last argument.
    ///
    /// # Errors
    /// Returns the errors of [`launch`](Self::launch), and an error if a wait passed its limit.
    pub(super) fn timed(
        &self,
        shape: Shape,
        comm: Option<&Communicator>,
        arguments: &[&dyn KernelArg],
    ) -> Result<Launched, CommError> {
        self.timed_of(None, shape, comm, arguments)
    }

    /// Launches a kernel of a module, in the same way.
    fn timed_of(
        &self,
        module: Option<&dyn Module>,
        shape: Shape,
        comm: Option<&Communicator>,
        arguments: &[&dyn KernelArg],
    ) -> Result<Launched, CommError> {
        let mut marks = vec![[0u64; MARKS]; shape.blocks.min(MAX_BLOCKS) as usize];
        self.marks.write(0, &marks)?;
        let address = self.marks.address();
        let out = std::ptr::without_provenance_mut::<u64>(address as usize);
        let with_marks: Vec<&dyn KernelArg> = arguments.iter().copied().chain([&out as &dyn KernelArg]).collect();
        self.launch_of(module, shape, comm, &with_marks)?;
        self.marks.read(0, &mut marks)?;
        if marks.iter().any(|marks| marks[LATE] != 0) {
            let reason = "a wait passed its time limit".to_owned();
            return Err(GpuError::Kernel { kernel: shape.kernel.to_owned(), reason }.into());
        }
        let start = marks.iter().map(|marks| marks[START]).min().unwrap_or(0);
        let end = marks.iter().map(|marks| marks[END]).max().unwrap_or(0);
        let wrong = marks.iter().map(|marks| marks[WRONG]).sum();
        Ok(Launched { ns: end.saturating_sub(start) as f64, wrong })
    }

    /// Launches the kernel for some of its rounds. If `with_others`, other ranks launch the same rounds, and a barrier
    /// comes first.
    fn rounds(&self, play: &Play<'_>, mut plan: Plan, with_others: bool) -> Result<Launched, CommError> {
        plan.before = play.before.get();
        play.before.set(plan.before + plan.warm + plan.timed);
        if with_others {
            self.rank.barrier()?;
        }
        let plan = Plain(plan);
        let all: Vec<&dyn KernelArg> = play.arguments.iter().copied().chain([&plan as &dyn KernelArg]).collect();
        self.timed_of(play.module, play.shape, play.comm, &all)
    }

    /// Measures kernels of rounds: a checked launch of each, then the repeats, in each of which the kernels take turns,
    /// then a launch of each that stamps every operation. Returns the time of a round in nanoseconds for each kernel.
    ///
    /// # Errors
    /// Returns the errors of [`timed`](Self::timed).
    pub(super) fn play(
        &self,
        plays: &[Play<'_>],
        rounds: &Rounds,
        with_others: bool,
    ) -> Result<Vec<Figure>, CommError> {
        let plan =
            |warm, timed, verify, stamps| Plan { before: 0, warm, timed, verify, limit_ns: rounds.limit_ns, stamps };
        let wrong = plays.iter().map(|play| Ok(self.rounds(play, plan(0, rounds.checked, 1, 0), with_others)?.wrong));
        let wrong = wrong.collect::<Result<Vec<_>, CommError>>()?;
        let mut repeats = vec![Vec::new(); plays.len()];
        for _ in 0..rounds.launches {
            for (play, repeats) in plays.iter().zip(&mut repeats) {
                let launched = self.rounds(play, plan(rounds.warm, rounds.timed, 0, 0), with_others)?;
                repeats.push(launched.ns / rounds.timed as f64);
            }
        }
        let stamps = self.memory(MemoryKind::Device, rounds.timed + 1)?;
        let mut figures = Vec::new();
        for (play, (repeats, wrong)) in plays.iter().zip(repeats.iter().zip(wrong)) {
            let launched = self.rounds(play, plan(rounds.warm, rounds.timed, 0, stamps.address()), with_others)?;
            let mut cycles = vec![0u64; rounds.timed as usize + 1];
            stamps.read(0, &mut cycles)?;
            figures.push(Figure::new(repeats, Some(wrong)).with_operations(&operations(launched.ns, &cycles)));
        }
        Ok(figures)
    }
}

/// Returns the times of operations in nanoseconds from the numbers of cycles at their ends. All of them together took
/// `ns` nanoseconds. Returns none if the device does not count cycles.
fn operations(ns: f64, cycles: &[u64]) -> Vec<f64> {
    let all = match cycles {
        [first, .., last] if last > first => (last - first) as f64,
        _ => return Vec::new(),
    };
    cycles.windows(2).map(|two| two[1].saturating_sub(two[0]) as f64 * ns / all).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cycles_become_nanoseconds_by_the_time_of_all_operations() {
        assert_eq!(operations(100.0, &[50, 60, 70, 100]), [20.0, 20.0, 60.0]);
        assert!(operations(100.0, &[7, 7, 7]).is_empty() && operations(100.0, &[7]).is_empty());
    }
}
