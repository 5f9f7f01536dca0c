// SPDX-License-Identifier: MIT OR Apache-2.0
//! The workload all-to-all.

use super::{Check, Job, Launched, Options, Refused, RunDevice, Shape, limits, reference};
use gin_host::CommError;
use gin_host::comm::{Communicator, Requirements, WindowFlags};
use gin_host::world::Rank;
use gin_kernels::alltoall::{BUFFERS, payload};

pub(super) struct Alltoall {
    shape: Shape,
    bytes: usize,
}

impl Alltoall {
    /// Prepares the workload.
    ///
    /// # Errors
    /// Refuses 0 bytes, and sizes beyond the memory of this machine.
    pub(super) fn new(device: &RunDevice, options: &Options) -> Result<Self, Refused> {
        let bytes = options.bytes;
        if bytes == 0 {
            return Err(Refused("--bytes 0: alltoall needs 1 byte per peer or more".into()));
        }
        let shape = Shape::new(options);
        // Outbox, inbox, and a copy of the last round for the check.
        let buffers = (2 + BUFFERS as u128) * u128::from(shape.ranks) * u128::from(bytes);
        limits::check_memory(device, options, 2 * shape.ranks, buffers)?;
        let bytes = usize::try_from(bytes).map_err(|error| Refused(format!("--bytes {bytes}: {error}")))?;
        Ok(Self { shape, bytes })
    }
}

impl Job for Alltoall {
    fn requirements(&self) -> Requirements {
        Requirements::default().contexts(self.shape.contexts).signals(self.shape.ranks).counters(self.shape.ranks)
    }

    fn operations(&self) -> f64 {
        f64::from(self.shape.ranks) * self.shape.iters as f64
    }

    fn launch(&self, rank: &Rank, comm: &Communicator) -> Result<Launched, CommError> {
        let shape = &self.shape;
        let ranks = shape.ranks as usize;
        let outbox = comm.alloc_window::<u8>(ranks * self.bytes, WindowFlags::NONE)?;
        let inbox = comm.alloc_window::<u8>(BUFFERS * ranks * self.bytes, WindowFlags::NONE)?;
        let words = (shape.blocks * shape.threads) as usize;
        let sums = shape.words(rank, words)?;
        let handle = comm.device()?;
        let time = shape.run(
            rank,
            "alltoall",
            &[&handle, &outbox, &inbox, &self.bytes, &sums.address(), &shape.iters, &shape.deadline],
        )?;

        let mut check = Check::default();
        let mut parts = vec![0u64; words];
        sums.read(0, &mut parts)?;
        let sum = parts.iter().fold(0u64, |sum, part| sum.wrapping_add(*part));
        let expected = reference::alltoall_checksum(rank.rank(), shape.ranks, self.bytes, shape.iters);
        if sum != expected {
            check.wrong(|| format!("rank {}: checksum {sum} of all rounds, expected {expected}", rank.rank()));
        }
        // The inbox still holds the blocks of the last round.
        let round = shape.iters - 1;
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
