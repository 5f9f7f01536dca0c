// SPDX-License-Identifier: MIT OR Apache-2.0
//! The workload ring: an all-reduce.

use super::{Check, Job, Launched, Plan, Refused, Traffic, Watched, Words, limits};
use crate::cli::Sizes;
use gin_gpu::{KernelArg, Stream};
use gin_host::comm::CommError;
use gin_host::comm::{DeviceComm, Requirements, Window, WindowFlags};
use gin_host::world::Rank;
use gin_kernels::element;
use gin_kernels::ring::{UNIT, sum, window_len};

pub(super) struct Ring<'a> {
    plan: &'a Plan,
    /// Number of units of a rank's vector. Elements past the end of the last one are reduced, too.
    units: usize,
}

impl<'a> Ring<'a> {
    /// Prepares the workload.
    ///
    /// # Errors
    /// As [`check`].
    pub(super) fn new(plan: &'a Plan) -> Result<Self, Refused> {
        Ok(Self { plan, units: check(plan)?.div_ceil(UNIT) })
    }
}

/// Returns the number of elements of a rank.
///
/// # Errors
/// Refuses sizes that are not a whole number of elements, and sizes beyond the memory of this machine.
pub(super) fn check(plan: &Plan) -> Result<usize, Refused> {
    let bytes = plan.sizes.bytes;
    if !bytes.is_multiple_of(4) || bytes == 0 {
        return Err(Refused(format!(
            "--bytes {bytes}: ring reduces a vector of f32 per rank; use a multiple of 4, at least 4"
        )));
    }
    // The vector, its sum, the inbox (at most two vectors), and a copy to find what is wrong.
    limits::check_memory(plan, plan.sizes.blocks, 5 * u128::from(bytes).next_multiple_of(16))?;
    usize::try_from(bytes / 4).map_err(|error| Refused(format!("--bytes {bytes}: {error}")))
}

impl Ring<'_> {
    /// Compares the result with the sum of the data set `set`, as [`alltoall`](super::alltoall) compares.
    fn compare(
        &self,
        (rank, stream): (&Rank, &dyn Stream),
        handle: &DeviceComm,
        data: &Window<u128>,
        set: u64,
        check: &mut Check,
    ) -> Result<(), CommError> {
        let plan = self.plan;
        let right = Words::of_threads(rank, &plan.sizes)?;
        plan.launch(rank, stream, "ring_check", &[handle, data, &self.units, &set, &right.at(0)])?;
        stream.synchronize()?;
        let wrong = self.units as u64 - right.sum()?;
        if wrong == 0 {
            return Ok(());
        }
        let values = data.read_range(self.units..2 * self.units)?;
        let values = values.into_iter().flat_map(|unit| (0..UNIT).map(move |i| element(unit, i)));
        let mut values = values.enumerate().map(|(index, value)| (index, value, sum(plan.ranks, index, set)));
        let first = values.find(|(_, value, expected)| value.to_bits() != expected.to_bits());
        let rank = rank.rank();
        check.wrong(wrong, || match first {
            Some((index, value, expected)) => format!("rank {rank}, element {index}: {value}, expected {expected}"),
            None => {
                format!("rank {rank}: {wrong} units of 16 bytes were wrong when the kernel ended, and are right now")
            }
        });
        Ok(())
    }
}

impl Job for Ring<'_> {
    fn requirements(&self) -> Requirements {
        Requirements::default().contexts(self.plan.sizes.contexts).signals(self.plan.sizes.blocks)
    }

    fn operations(&self) -> f64 {
        2.0 * f64::from(self.plan.ranks - 1) * f64::from(self.plan.sizes.blocks)
    }

    fn traffic(&self) -> Traffic {
        let ranks = f64::from(self.plan.ranks);
        Traffic { bytes: self.plan.sizes.bytes as f64, factor: 2.0 * (ranks - 1.0) / ranks }
    }

    fn launch(&self, rank: &Rank, comm: &Watched<'_>) -> Result<Launched, CommError> {
        let plan = self.plan;
        let data = comm.alloc_window::<u128>(window_len(self.units, plan.ranks as usize), WindowFlags::NONE)?;
        let (handle, stream) = (comm.device()?, rank.stream()?);
        let fill = |set: u64| plan.launch(rank, &*stream, "ring_fill", &[&handle, &data, &self.units, &set]);
        let reduce = |first: u64, iterations: u64| {
            let arguments: [&dyn KernelArg; 6] = [&handle, &data, &self.units, &first, &iterations, &plan.deadline];
            plan.launch(rank, &*stream, "ring", &arguments)
        };
        let mut check = Check::default();
        let Sizes { warmup, iters, .. } = plan.sizes;
        for iteration in 0..warmup {
            fill(iteration)?;
            reduce(iteration, 1)?;
            if plan.sizes.check {
                self.compare((rank, &*stream), &handle, &data, iteration, &mut check)?;
            }
        }
        fill(warmup)?;
        stream.synchronize()?;
        let time = plan.timed(rank, comm, &stream, || reduce(warmup, iters))?;
        if plan.sizes.check {
            self.compare((rank, &*stream), &handle, &data, warmup, &mut check)?;
        }
        Ok(Launched { time, check, nccl: None })
    }
}
