// SPDX-License-Identifier: MIT OR Apache-2.0
//! Registrations of memory of a device, which they keep alive.

use super::error::{NicError, Step};
use super::hca::{Access, Extent, Hca, Region};
use super::open::{Nic, failed};
use super::owned::{Owned, Stack};
use gin_abi::mlx5::be::Be32;
use gin_abi::mlx5::wqe::{Local, Remote};
use gin_gpu::MemorySlice;
use std::sync::Arc;

/// Registered memory of a device, which work-queue entries can name.
#[derive(Debug)]
pub struct RegisteredSlice {
    /// The memory.
    pub slice: MemorySlice,
    /// The address of its first byte in work-queue entries. It is less than a page of the host, because the Linux
    /// driver registers memory only under an address with the same offset in a page.
    pub start: u64,
    /// The key for local access.
    pub local_key: u32,
    /// The key for remote access.
    pub remote_key: u32,
    _objects: Stack,
    // Its protection domain outlives the region.
    _nic: Arc<Nic>,
}

impl RegisteredSlice {
    /// Registers memory.
    ///
    /// # Errors
    /// An error of the NIC; [`NicError::Memory`], [`NicError::Unreached`].
    pub fn new(nic: &Arc<Nic>, slice: MemorySlice, access: Access) -> Result<Self, NicError> {
        let start = slice.address() % rustix::param::page_size() as u64;
        nic.check_reach(&**slice.memory().device(), slice.memory().kind())?;
        let mut objects = Stack::new(&nic.owner, slice.clone());
        // Safety: the objects keep the memory. A program that allocates memory for communication expects that peers
        // access it.
        let take = |extent: &Extent| unsafe { nic.owner.hca.register_region(&nic.domain, extent, start, access) };
        let Region { handle, local_key, remote_key } = nic.take_memory(Step::Region, &slice, take)?;
        objects.push(nic.owner.own(handle, Hca::deregister_region));
        Ok(Self { slice, start, local_key, remote_key, _objects: objects, _nic: Arc::clone(nic) })
    }

    /// Returns the operand of an entry of a peer that names the bytes from `offset` on.
    pub fn remote(&self, offset: u64) -> Remote {
        Remote { address: self.start + offset, key: Be32::new(self.remote_key) }
    }

    /// Returns the operand of an own entry that names `bytes` bytes from `offset` on.
    pub fn local(&self, offset: u64, bytes: u64) -> Local {
        Local { address: self.start + offset, key: Be32::new(self.local_key), bytes: bytes as u32 }
    }
}

/// Memory that another library has allocated, registered with a NIC. A drop deregisters it.
#[derive(Debug)]
pub struct RegisteredExtent {
    /// The key for local access.
    pub local_key: u32,
    /// The key for remote access.
    pub remote_key: u32,
    _region: Owned,
    // Its protection domain outlives the region.
    _nic: Arc<Nic>,
}

impl RegisteredExtent {
    /// Registers memory, whose first byte has the address `start` in work-queue entries.
    ///
    /// # Errors
    /// An error of the NIC.
    ///
    /// # Safety
    /// - The memory is valid until the result is dropped, and other code that uses it expects the NIC's accesses.
    pub unsafe fn new(nic: &Arc<Nic>, memory: &Extent, start: u64, access: Access) -> Result<Self, NicError> {
        // Safety: the caller's promise.
        let region = unsafe { nic.owner.hca.register_region(&nic.domain, memory, start, access) };
        let Region { handle, local_key, remote_key } = region.map_err(failed(&nic.name, Step::Region, None))?;
        let owned = nic.owner.own(handle, Hca::deregister_region);
        Ok(Self { local_key, remote_key, _region: owned, _nic: Arc::clone(nic) })
    }
}
