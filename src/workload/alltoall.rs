// SPDX-License-Identifier: MIT OR Apache-2.0
//! The workload all-to-all.

use super::{Check, Job, Launched, Plan, Refused, Traffic, Watched, limits, reference, words_at};
use gin_host::comm::CommError;
use gin_host::comm::{Requirements, WindowFlags};
use gin_host::world::Rank;
use gin_kernels::alltoall::{BUFFERS, payload};

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
    // Outbox, inbox, and a copy of the last round for the check.
    let buffers = (2 + BUFFERS as u128) * u128::from(plan.ranks) * u128::from(bytes);
    limits::check_memory(plan, 2 * plan.ranks, buffers)?;
    usize::try_from(bytes).map_err(|error| Refused(format!("--bytes {bytes}: {error}")))
}

impl Job for Alltoall<'_> {
    fn requirements(&self) -> Requirements {
        Requirements::default().contexts(self.plan.sizes.contexts).signals(self.plan.ranks).counters(self.plan.ranks)
    }

    fn operations(&self) -> f64 {
        f64::from(self.plan.ranks) * self.plan.sizes.iters as f64
    }

    fn traffic(&self) -> Traffic {
        let ranks = f64::from(self.plan.ranks);
        Traffic { bytes: ranks * self.bytes as f64, factor: (ranks - 1.0) / ranks }
    }

    fn launch(&self, rank: &Rank, comm: &Watched<'_>) -> Result<Launched, CommError> {
        let plan = self.plan;
        let ranks = plan.ranks as usize;
        let outbox = comm.alloc_window::<u8>(ranks * self.bytes, WindowFlags::NONE)?;
        let inbox = comm.alloc_window::<u8>(BUFFERS * ranks * self.bytes, WindowFlags::NONE)?;
        let words = (plan.sizes.blocks * plan.sizes.threads) as usize;
        let sums = plan.words(rank, words)?;
        let handle = comm.device()?;
        let time = plan.time(
            rank,
            comm,
            &[&handle, &outbox, &inbox, &self.bytes, &words_at(&sums), &plan.sizes.iters, &plan.deadline],
        )?;

        let mut check = Check::default();
        let mut parts = vec![0u64; words];
        sums.read(0, &mut parts)?;
        let sum = parts.iter().fold(0u64, |sum, part| sum.wrapping_add(*part));
        let expected = reference::alltoall_checksum(rank.rank(), plan.ranks, self.bytes, plan.sizes.iters);
        if sum != expected {
            check.wrong(|| format!("rank {}: checksum {sum} of all rounds, expected {expected}", rank.rank()));
        }
        // The inbox still holds the blocks of the last round.
        let round = plan.sizes.iters - 1;
        let start = (round % BUFFERS as u64) as usize * ranks * self.bytes;
        let arrived = inbox.read_range(start..start + ranks * self.bytes)?;
        for (position, byte) in arrived.into_iter().enumerate() {
            let (from, index) = (position / self.bytes, position % self.bytes);
            let expected = payload(from as u32, rank.rank(), round, index);
            if byte != expected {
                check.wrong(|| {
                    format!(
                        "rank {}, byte {index} from rank {from}: {byte:#04x}, expected {expected:#04x}",
                        rank.rank()
                    )
                });
            }
        }
        Ok(Launched { time, check })
    }
}
