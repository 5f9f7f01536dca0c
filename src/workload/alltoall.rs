// SPDX-License-Identifier: MIT OR Apache-2.0
//! The workload all-to-all.

use super::{Check, Job, Launched, Plan, Refused, Traffic, Watched, Words, limits};
use crate::cli::Sizes;
use gin_gpu::{KernelArg, Stream};
use gin_host::comm::CommError;
use gin_host::comm::{DeviceComm, Requirements, Window, WindowFlags};
use gin_host::world::Rank;
use gin_kernels::alltoall::{BUFFERS, payload, stride};
use std::sync::Arc;

pub(super) struct Alltoall<'a> {
    plan: &'a Plan,
    bytes: usize,
}

impl<'a> Alltoall<'a> {
    /// Prepares the workload.
    ///
    /// # Errors
    /// As [`check`].
    pub(super) fn new(plan: &'a Plan) -> Result<Self, Refused> {
        Ok(Self { plan, bytes: check(plan)? })
    }
}

/// Returns the bytes of a block.
///
/// # Errors
/// Refuses 0 bytes, and sizes beyond the memory of this machine.
pub(super) fn check(plan: &Plan) -> Result<usize, Refused> {
    let bytes = plan.sizes.bytes;
    if bytes == 0 {
        return Err(Refused("--bytes 0: alltoall needs 1 byte per peer or more".into()));
    }
    // Outbox, inbox, and a copy of a buffer to find what is wrong.
    let buffers = (2 + BUFFERS as u128) * u128::from(plan.ranks) * u128::from(bytes).next_multiple_of(16);
    limits::check_memory(plan, plan.ranks, buffers)?;
    usize::try_from(bytes).map_err(|error| Refused(format!("--bytes {bytes}: {error}")))
}

impl Alltoall<'_> {
    /// Compares the blocks in a buffer of the inbox with the data set `set`: counts the right ones on the device, and
    /// looks for the first wrong one on the host if some are.
    fn compare(&self, run: &Running<'_>, buffer: u32, set: u64, check: &mut Check) -> Result<(), CommError> {
        let (plan, rank, bytes) = (self.plan, run.rank.rank(), self.bytes);
        let right = Words::of_threads(run.rank, &plan.sizes)?;
        plan.launch(
            run.rank,
            &*run.stream,
            "alltoall_check",
            &[&run.handle, &run.inbox, &bytes, &buffer, &set, &right.at(0)],
        )?;
        run.stream.synchronize()?;
        let (ranks, units) = (plan.ranks as usize, stride(bytes) / 16);
        let wrong = (ranks * units) as u64 - right.sum()?;
        if wrong == 0 {
            return Ok(());
        }
        let start = buffer as usize * ranks * stride(bytes);
        let arrived = run.inbox.read_range(start..start + ranks * stride(bytes))?;
        let expected = |from: usize, unit| payload(from as u32, rank, set, unit).to_le_bytes();
        let first = arrived.iter().enumerate().find_map(|(position, &byte)| {
            let (from, index) = (position / stride(bytes), position % stride(bytes));
            let expected = expected(from, index / 16)[index % 16];
            (index < bytes && byte != expected).then_some((from, index, byte, expected))
        });
        check.wrong(wrong, || match first {
            Some((from, index, byte, expected)) => {
                format!("rank {rank}, byte {index} from rank {from}: {byte:#04x}, expected {expected:#04x}")
            }
            None => {
                format!("rank {rank}: {wrong} units of 16 bytes were wrong when the kernel ended, and are right now")
            }
        });
        Ok(())
    }
}

/// Memory and handles that the kernels of a launch use.
struct Running<'l> {
    rank: &'l Rank,
    stream: Arc<dyn Stream>,
    handle: DeviceComm,
    outbox: Window<u8>,
    inbox: Window<u8>,
}

impl Job for Alltoall<'_> {
    fn requirements(&self) -> Requirements {
        Requirements::default().contexts(self.plan.sizes.contexts).signals(self.plan.ranks)
    }

    fn operations(&self) -> f64 {
        f64::from(self.plan.ranks - 1) * f64::from(self.plan.sizes.blocks)
    }

    fn traffic(&self) -> Traffic {
        let ranks = f64::from(self.plan.ranks);
        Traffic { bytes: ranks * self.bytes as f64, factor: (ranks - 1.0) / ranks }
    }

    fn launch(&self, rank: &Rank, comm: &Watched<'_>) -> Result<Launched, CommError> {
        let (plan, bytes) = (self.plan, self.bytes);
        let window =
            |buffers| comm.alloc_window::<u8>(buffers * plan.ranks as usize * stride(bytes), WindowFlags::NONE);
        let (outbox, inbox) = (window(1)?, window(BUFFERS)?);
        let run = Running { rank, stream: rank.stream()?, handle: comm.device()?, outbox, inbox };
        let fill =
            |set: u64| plan.launch(rank, &*run.stream, "alltoall_fill", &[&run.handle, &run.outbox, &bytes, &set]);
        let exchange = |first: u64, rounds: u64| {
            let arguments: [&dyn KernelArg; 7] =
                [&run.handle, &run.outbox, &run.inbox, &bytes, &first, &rounds, &plan.deadline];
            plan.launch(rank, &*run.stream, "alltoall", &arguments)
        };
        let mut check = Check::default();
        let Sizes { warmup, iters, .. } = plan.sizes;
        for round in 0..warmup {
            fill(round)?;
            exchange(round, 1)?;
            if plan.sizes.check {
                self.compare(&run, (round % BUFFERS as u64) as u32, round, &mut check)?;
            }
        }
        fill(warmup)?;
        run.stream.synchronize()?;
        let time = plan.timed(rank, comm, &run.stream, || exchange(warmup, iters))?;
        // All rounds sent the same data, and none that any buffer had before.
        for round in (warmup..warmup + iters).rev().take(BUFFERS).filter(|_| plan.sizes.check) {
            self.compare(&run, (round % BUFFERS as u64) as u32, warmup, &mut check)?;
        }
        Ok(Launched { time, check, nccl: None })
    }
}
