// SPDX-License-Identifier: MIT OR Apache-2.0
//! Queue pairs and registrations in memory of a device, which they keep alive.

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
    /// The device failed.
    #[error("memory of the rings: {0}")]
    Gpu(#[from] GpuError),
    /// The NIC failed, or something does not fit.
    #[error(transparent)]
    Nic(#[from] NicError),
}

impl Nic {
    /// Where rings have to lie that a device fills.
    pub(super) fn ring_memory(&self) -> MemoryKind {
        self.owner.hca.ring_memory()
    }

    /// See [`Hca::ring`](super::hca::Hca::ring).
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

/// Queue pairs whose rings lie in memory of a device, or in pinned memory if the NIC demands that, for kernels of the
/// device to post to. They are a [`QueueSet`] that keeps its slab alive.
#[derive(Debug)]
pub struct DeviceQueues {
    // Ends before its memory is freed.
    set: QueueSet,
    slab: MemorySlice,
}

impl DeviceQueues {
    /// Allocates the slab, fills it, makes the queue pairs and moves them to init.
    ///
    /// # Errors
    /// [`DeviceQueueError`]; nothing is left behind.
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
        // Safety: laid out and filled for these specs; the set is dropped before the slab.
        let set = unsafe { QueueSet::in_device(nic, &slab, specs, expired) }?;
        Ok(Self { set, slab })
    }

    /// The memory with the rings.
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

/// Memory of a device that entries can name.
#[derive(Debug)]
pub struct RegisteredSlice {
    // Ends before its memory is freed.
    region: RegisteredMemory,
    slice: MemorySlice,
    start: u64,
}

/// The place of an address in its page of the host.
fn start(address: u64) -> u64 {
    address % rustix::param::page_size() as u64
}

impl RegisteredSlice {
    /// Registers memory; in entries its first byte has the address [`start`](Self::start).
    ///
    /// # Errors
    /// An error of the NIC; [`NicError::Memory`], [`NicError::Unreached`].
    pub fn new(nic: &Arc<Nic>, slice: MemorySlice, access: Access) -> Result<Self, NicError> {
        let start = start(slice.address());
        nic.check_reach(&**slice.memory().device(), slice.memory().kind())?;
        // Safety: the slice keeps the memory alive; a program that allocates memory for communication expects peers to
        // use it.
        let take = |extent: &Extent| unsafe { nic.owner.hca.register_region(&nic.domain, extent, start, access) };
        let region = nic.keep(nic.take_memory(Step::Region, &slice, take)?);
        Ok(Self { region, slice, start })
    }

    /// Returns the address of its first byte in entries. It is less than a page of the host, because kernels register
    /// memory only under an address with the memory's own place in a page.
    pub fn start(&self) -> u64 {
        self.start
    }

    /// Key for local access.
    pub fn local_key(&self) -> u32 {
        self.region.local_key
    }

    /// Key for remote access.
    pub fn remote_key(&self) -> u32 {
        self.region.remote_key
    }

    /// The memory.
    pub fn slice(&self) -> &MemorySlice {
        &self.slice
    }
}
