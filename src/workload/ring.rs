// SPDX-License-Identifier: MIT OR Apache-2.0
//! The workload ring: an all-reduce.

use super::{Check, Job, Launched, Plan, Refused, Traffic, Watched, limits, reference, words_at};
use gin_host::comm::CommError;
use gin_host::comm::{Requirements, WindowFlags};
use gin_host::world::Rank;
use gin_kernels::ring::{chunk, inbox_len};

pub(super) struct Ring<'a> {
    plan: &'a Plan,
    len: usize,
}

impl<'a> Ring<'a> {
    /// Prepares the workload.
    ///
    /// # Errors
    /// As [`check`].
    pub(super) fn new(plan: &'a Plan) -> Result<Self, Refused> {
        Ok(Self { plan, len: check(plan)? })
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
    // The vector, its inbox (at most two vectors and a few elements), a copy for the check, and twice the checksums of
    // all threads in all iterations.
    let sums = u128::from(plan.sizes.iters) * u128::from(plan.sizes.blocks) * u128::from(plan.sizes.threads) * 8;
    limits::check_memory(plan, 3 * plan.sizes.blocks, 4 * u128::from(bytes) + 2 * sums)?;
    usize::try_from(bytes / 4).map_err(|error| Refused(format!("--bytes {bytes}: {error}")))
}

impl Job for Ring<'_> {
    fn requirements(&self) -> Requirements {
        Requirements::default()
            .contexts(self.plan.sizes.contexts)
            .signals(2 * self.plan.sizes.blocks)
            .counters(self.plan.sizes.blocks)
    }

    fn operations(&self) -> f64 {
        // Each step of the first half posts a put and a credit, each step of the second half a put.
        3.0 * f64::from(self.plan.ranks - 1) * f64::from(self.plan.sizes.blocks) * self.plan.sizes.iters as f64
    }

    fn traffic(&self) -> Traffic {
        let ranks = f64::from(self.plan.ranks);
        Traffic { bytes: self.plan.sizes.bytes as f64, factor: 2.0 * (ranks - 1.0) / ranks }
    }

    fn launch(&self, rank: &Rank, comm: &Watched<'_>) -> Result<Launched, CommError> {
        let plan = self.plan;
        let (blocks, threads) = (plan.sizes.blocks as usize, plan.sizes.threads as usize);
        let data = comm.alloc_window::<f32>(self.len, WindowFlags::NONE)?;
        let inbox = comm.alloc_window::<f32>(inbox_len(self.len, blocks, plan.ranks as usize), WindowFlags::NONE)?;
        let words = plan.sizes.iters as usize * blocks * threads;
        let sums = plan.words(rank, words)?;
        let handle = comm.device()?;
        let time =
            plan.time(rank, comm, &[&handle, &data, &inbox, &words_at(&sums), &plan.sizes.iters, &plan.deadline])?;

        let mut check = Check::default();
        let mut parts = vec![0u64; words];
        sums.read(0, &mut parts)?;
        for (number, parts) in parts.chunks(threads).enumerate() {
            let (iteration, block) = ((number / blocks) as u64, number % blocks);
            let sum = parts.iter().fold(0u64, |sum, part| sum.wrapping_add(*part));
            let (start, len) = chunk(self.len, blocks, block);
            let expected = reference::ring_checksum(plan.ranks, start, len, iteration);
            if sum != expected {
                check.wrong(|| {
                    format!(
                        "rank {}, iteration {iteration}, elements {start} to {}: checksum {sum}, expected {expected}",
                        rank.rank(),
                        start + len
                    )
                });
            }
        }
        for (index, value) in data.read_all()?.into_iter().enumerate() {
            let expected = reference::ring_element(plan.ranks, index, plan.sizes.iters - 1);
            if value.to_bits() != expected.to_bits() {
                check.wrong(|| format!("rank {}, element {index}: {value}, expected {expected}", rank.rank()));
            }
        }
        Ok(Launched { time, check })
    }
}
