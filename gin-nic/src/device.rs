// SPDX-License-Identifier: MIT OR Apache-2.0
//! Queue pairs in memory of a device, and registrations of memory. Both keep the memory alive.

use super::error::{NicError, Step};
use super::hca::{Access, Extent, HcaError};
use super::layout::{Layout, PAGE, QueueSpec};
use super::open::{Nic, RegisteredMemory};
use super::queues::{Expired, QueueSet};
use gin_abi::mlx5::cqe::INVALID_BYTE;
use gin_gpu::{Device, GpuError, Memory, MemoryKind, MemorySlice};
use std::ops::Deref;
use std::sync::Arc;

/// An error of queue pairs in memory of a device.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum DeviceQueueError {
    /// An error of the device.
    #[error("memory of the rings: {0}")]
    Gpu(#[from] GpuError),
    /// An error of the NIC, or an exceeded limit.
    #[error(transparent)]
    Nic(#[from] NicError),
}

impl Nic {
    /// Returns the kind of memory for rings that a device fills.
    pub(super) fn ring_memory(&self) -> MemoryKind {
        self.owner.hca.ring_memory()
    }

    /// Rings a doorbell: see [`Hca::ring`](super::hca::Hca::ring).
    ///
    /// # Safety
    /// - As there.
    ///
    /// # Errors
    /// As there.
    pub(super) unsafe fn ring(&self, doorbell: u64, word: u64) -> Result<(), HcaError> {
        // Safety: the caller's promise.
        unsafe { self.owner.hca.ring(doorbell, word) }
    }
}

/// Queue pairs to which kernels of a device post. Their rings are in memory of the device, or in pinned memory if the
/// NIC requires that. They are a [`QueueSet`] that keeps its slab alive.
#[derive(Debug)]
pub struct DeviceQueues {
    set: QueueSet,
    slab: MemorySlice,
}

impl DeviceQueues {
    /// Allocates and fills the slab, creates the queue pairs and moves them to the state init.
    ///
    /// # Errors
    /// [`DeviceQueueError`]. Then no object remains.
    pub fn new(
        nic: &Arc<Nic>,
        device: &Arc<dyn Device>,
        specs: &[QueueSpec],
        expired: Expired<'_>,
    ) -> Result<Self, DeviceQueueError> {
        let kind = nic.ring_memory();
        nic.check_reach(&**device, kind)?;
        let layout = Layout::of(specs)?;
        // Allocations begin at a multiple of 256.
        let memory = Memory::new(device, kind, layout.bytes + PAGE)?;
        let first = memory.address().next_multiple_of(PAGE) - memory.address();
        let slab = memory.slice(first..first + layout.bytes)?;
        for ring in layout.completion_rings() {
            slab.write(ring.start, &vec![INVALID_BYTE; (ring.end - ring.start) as usize])?;
        }
        // Safety: laid out and filled for these specs.
        let set = unsafe { QueueSet::in_device(nic, &slab, specs, expired) }?;
        Ok(Self { set, slab })
    }

    /// Returns the memory with the rings.
    pub fn slab(&self) -> &MemorySlice {
        &self.slab
    }
}

impl Deref for DeviceQueues {
    type Target = QueueSet;

    fn deref(&self) -> &QueueSet {
        &self.set
    }
}

/// Registered memory of a device, which work-queue entries can name.
#[derive(Debug)]
pub struct RegisteredSlice {
    region: RegisteredMemory,
    slice: MemorySlice,
    start: u64,
}

/// Returns the offset of an address in its page of the host.
fn start(address: u64) -> u64 {
    address % rustix::param::page_size() as u64
}

impl RegisteredSlice {
    /// Registers memory. In work-queue entries its first byte has the address [`start`](Self::start).
    ///
    /// # Errors
    /// An error of the NIC; [`NicError::Memory`], [`NicError::Unreached`].
    pub fn new(nic: &Arc<Nic>, slice: MemorySlice, access: Access) -> Result<Self, NicError> {
        let start = start(slice.address());
        nic.check_reach(&**slice.memory().device(), slice.memory().kind())?;
        // Safety: the slice keeps the memory alive. A program that allocates memory for communication expects that
        // peers access it.
        let take = |extent: &Extent| unsafe { nic.owner.hca.register_region(&nic.domain, extent, start, access) };
        let region = nic.keep(nic.take_memory(Step::Region, &slice, take)?, Some(slice.clone()));
        Ok(Self { region, slice, start })
    }

    /// Returns the address of its first byte in work-queue entries. It is less than a page of the host, because the
    /// Linux driver registers memory only under an address with the same offset in a page.
    pub fn start(&self) -> u64 {
        self.start
    }

    /// Returns the key for local access.
    pub fn local_key(&self) -> u32 {
        self.region.local_key
    }

    /// Returns the key for remote access.
    pub fn remote_key(&self) -> u32 {
        self.region.remote_key
    }

    /// Returns the memory.
    pub fn slice(&self) -> &MemorySlice {
        &self.slice
    }
}
