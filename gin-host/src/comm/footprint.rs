// SPDX-License-Identifier: MIT OR Apache-2.0
//! The memory that a communicator allocates on each rank.

use super::gdaki::{keys_bytes, ring_depth};
use super::resources::{Resources, when};
use super::{CommError, Requirements};
use gin_abi::handle::{ENGINE_CPU, ENGINE_GPU, ENGINE_NIC};
use gin_nic::{DoorbellRelease, Shape};

/// The bytes that a communicator allocates on each rank for queues, tables and words, without windows. Both numbers
/// come from the code that allocates.
///
/// ```
/// use gin_host::comm::{Footprint, Requirements};
///
/// let requirements = Requirements::default();
/// let (few, many) = (Footprint::proxy(&requirements, 8, 8)?, Footprint::proxy(&requirements, 4096, 8)?);
/// assert!(many.device > few.device && many.pinned > few.pinned);
/// # Ok::<(), gin_host::comm::CommError>(())
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct Footprint {
    /// Bytes of pinned host memory.
    pub pinned: u64,
    /// Bytes of device memory.
    pub device: u64,
}

impl Footprint {
    /// Returns the bytes with the back end proxy, over a network whose signals CPU threads raise. The network's own
    /// memory is not included; nor is the mailbox of the network of copies.
    ///
    /// # Errors
    /// [`CommError::LsaSize`] if `ranks` is no multiple of `lsa_size`; [`CommError::Limit`] for requirements past a
    /// limit.
    pub fn proxy(requirements: &Requirements, ranks: u32, lsa_size: u32) -> Result<Self, CommError> {
        Self::of(requirements, (ranks, lsa_size), ENGINE_CPU)
    }

    /// Returns the bytes with the back end GDAKI. The NIC's own memory is not included.
    ///
    /// # Errors
    /// As [`proxy`](Self::proxy).
    pub fn gdaki(requirements: &Requirements, ranks: u32, lsa_size: u32) -> Result<Self, CommError> {
        let words = Self::of(requirements, (ranks, lsa_size), ENGINE_NIC)?;
        let (step, depth) = (requirements.connections.step(lsa_size), ring_depth(requirements)?);
        let release = DoorbellRelease::default();
        let shape = Shape { contexts: requirements.contexts, ranks, rank: 0, step, depth, release };
        let queues = shape.bytes().map_err(|error| CommError::Nic(error.into()))?;
        Ok(Self { device: words.device + queues + keys_bytes(requirements, ranks), ..words })
    }

    fn of(requirements: &Requirements, (ranks, lsa_size): (u32, u32), engine: u32) -> Result<Self, CommError> {
        requirements.check(ranks, lsa_size)?;
        let engines = engine | when(lsa_size > 1, ENGINE_GPU);
        let sizes = Resources::sizes(requirements, (ranks, lsa_size), engines, false);
        let of = |raises: u32, bytes: u64| if engines & raises != 0 { bytes } else { 0 };
        Ok(Self {
            pinned: sizes.pinned + of(ENGINE_CPU, sizes.pinned_signals),
            device: sizes.device + of(ENGINE_GPU, sizes.signals) + of(ENGINE_NIC, sizes.signals),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::comm::ConnectionType;
    use gin_gpu::{Device, MemoryKind};
    use std::sync::Arc;

    #[test]
    fn the_words_of_a_communicator_take_the_bytes_that_the_footprint_says() {
        let device: Arc<dyn Device> = gin_gpu::virt::VirtualDevice::memory_only(0);
        for (ranks, lsa_size) in [(1, 1), (2, 1), (8, 8), (64, 8)] {
            for (contexts, barriers) in [(1, 0), (3, 2)] {
                let requirements = Requirements::default().contexts(contexts).world_barriers(barriers).signals(5);
                let footprint = Footprint::proxy(&requirements, ranks, lsa_size).unwrap();
                let engines = ENGINE_CPU | when(lsa_size > 1, ENGINE_GPU);
                let made = Resources::new(&device, &requirements, (ranks, lsa_size), engines, false, false).unwrap();
                let of = |kind| made.memory().filter(move |memory| memory.kind() == kind).map(|memory| memory.bytes());
                assert_eq!(of(MemoryKind::Pinned).sum::<u64>(), footprint.pinned, "{ranks} ranks");
                assert_eq!(of(MemoryKind::Device).sum::<u64>(), footprint.device, "{ranks} ranks");
            }
        }
    }

    #[test]
    fn memory_grows_by_a_fixed_amount_for_each_rank_and_rails_need_less() {
        let requirements = Requirements::default();
        let proxy = |ranks| Footprint::proxy(&requirements, ranks, 8).unwrap();
        let per_rank = proxy(1024).device - proxy(512).device;
        assert_eq!(proxy(4096).device - proxy(2048).device, 4 * per_rank);
        let all = Footprint::gdaki(&requirements, 512, 8).unwrap();
        let rails = Footprint::gdaki(&requirements.connections(ConnectionType::Rail), 512, 8).unwrap();
        assert!(rails.device < all.device / 4, "{rails:?} {all:?}");
        assert!(Footprint::proxy(&requirements, 12, 8).is_err());
    }
}
