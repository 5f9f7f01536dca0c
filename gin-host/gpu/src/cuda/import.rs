// SPDX-License-Identifier: MIT OR Apache-2.0
//! Memory that the program has from elsewhere. gin checks and uses it, and never frees it.

use super::CudaDevice;
use super::context::Context;
use super::driver::describe;
use super::pinned::{forget_pinned, know_pinned};
use crate::{Allocation, Device, GpuError, Keep, MemoryKind, RawMemory};
use cudarc::driver::result::DriverError;
use cudarc::driver::sys::{
    self, CUcontext, CUmemAccess_flags, CUmemoryPool, CUmemorytype, CUpointer_attribute as Attribute, CUresult,
};
use std::sync::Arc;

/// The fewest bytes that the driver's virtual-memory calls map and protect together.
pub(super) const GRANULE: u64 = 2 << 20;

/// The allocator of memory. It decides how to find out which GPUs reach the memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Origin {
    /// `cuMemAlloc`: each GPU with peer access reaches it.
    Alloc,
    /// `cuMemAllocAsync`: the pool decides which GPUs reach it.
    Pool(CUmemoryPool),
    /// `cuMemMap`: the access of its pages decides which GPUs reach it.
    Map,
    /// Pinned host memory: all GPUs reach it, each at an address of its own.
    Host,
}

/// The driver's facts about an address. A word is zero if the driver does not write it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct Facts {
    pub(super) memory_type: u64,
    pub(super) ordinal: u64,
    pub(super) managed: u64,
    context: u64,
    pool: u64,
    buffer: u64,
    start: u64,
    size: u64,
}

impl Facts {
    pub(super) fn of(address: u64) -> Result<Self, DriverError> {
        let mut facts = Self::default();
        let (mut attributes, mut places): (Vec<_>, Vec<_>) = [
            (Attribute::CU_POINTER_ATTRIBUTE_MEMORY_TYPE, &raw mut facts.memory_type),
            (Attribute::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, &raw mut facts.ordinal),
            (Attribute::CU_POINTER_ATTRIBUTE_IS_MANAGED, &raw mut facts.managed),
            (Attribute::CU_POINTER_ATTRIBUTE_CONTEXT, &raw mut facts.context),
            (Attribute::CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE, &raw mut facts.pool),
            (Attribute::CU_POINTER_ATTRIBUTE_BUFFER_ID, &raw mut facts.buffer),
            (Attribute::CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, &raw mut facts.start),
            (Attribute::CU_POINTER_ATTRIBUTE_RANGE_SIZE, &raw mut facts.size),
        ]
        .map(|(attribute, place)| (attribute, place.cast::<core::ffi::c_void>()))
        .into_iter()
        .unzip();
        let count = attributes.len() as u32;
        // Safety: a place of 8 bytes for each attribute, and none is longer; shorter ones fill the low bytes.
        let code = unsafe { sys::cuPointerGetAttributes(count, attributes.as_mut_ptr(), places.as_mut_ptr(), address) };
        code.result().map(|()| facts)
    }

    /// Returns the reason for which `context` on GPU `ordinal` cannot use memory with these facts.
    fn refusal(&self, ordinal: usize, context: CUcontext) -> Option<String> {
        let is = |kind: CUmemorytype| self.memory_type == kind as u64;
        if self.managed != 0 {
            return Some("it is managed memory, which moves between host and GPU".to_owned());
        }
        if is(CUmemorytype::CU_MEMORYTYPE_HOST) {
            return None;
        }
        if !is(CUmemorytype::CU_MEMORYTYPE_DEVICE) {
            let reason = "the driver does not know it: host memory must be pinned (cuMemHostRegister, cuMemHostAlloc)";
            return Some(reason.to_owned());
        }
        // The number fills the low bytes.
        let there = self.ordinal as u32;
        if there as usize != ordinal {
            return Some(format!("it is in GPU {there}"));
        }
        if self.context != 0 && self.context != context.expose_provenance() as u64 {
            let reason = "it was allocated in another context than the GPU's primary one (cuDevicePrimaryCtxRetain)";
            return Some(reason.to_owned());
        }
        None
    }
}

/// Returns a function that makes the reason for a refusal of the driver.
fn refused(call: &'static str) -> impl Fn(DriverError) -> String {
    move |failure| format!("{call} says {}", describe(failure))
}

/// Finds out the allocator of the memory, and checks that all of it is there.
fn examine(context: &Context, address: u64, bytes: u64) -> Result<Origin, String> {
    if bytes == 0 || address == 0 {
        return Err("it has no bytes".to_owned());
    }
    let end = address.checked_add(bytes).ok_or("it ends past the last address")?;
    context.enter().map_err(|error| error.to_string())?;
    let facts = |address| Facts::of(address).map_err(refused("cuPointerGetAttributes"));
    let (first, last) = (facts(address)?, facts(end - 1)?);
    if let Some(reason) = [first, last].iter().find_map(|facts| facts.refusal(context.ordinal, context.raw)) {
        return Err(reason);
    }
    if first.memory_type != last.memory_type {
        return Err("it begins in one kind of memory and ends in another".to_owned());
    }
    let part = |start: u64, size: u64| {
        let past = start.saturating_add(size);
        if start <= address && end <= past {
            return Ok(());
        }
        Err(format!("it is not all in one allocation: bytes {start:#x} to {past:#x} are one"))
    };
    if first.memory_type == CUmemorytype::CU_MEMORYTYPE_HOST as u64 {
        if first.buffer != last.buffer {
            return Err("it is not all in one allocation".to_owned());
        }
        if first.size != 0 {
            part(first.start, first.size)?;
        }
        return Ok(Origin::Host);
    }
    let mut handle = 0;
    let pointer = std::ptr::with_exposed_provenance_mut(address as usize);
    let pool = std::ptr::with_exposed_provenance_mut::<sys::CUmemPoolHandle_st>(first.pool as usize);
    // Safety: writes an integer.
    if pool.is_null() && unsafe { sys::cuMemRetainAllocationHandle(&raw mut handle, pointer) } == CUresult::CUDA_SUCCESS
    {
        // Safety: retained just now.
        unsafe { sys::cuMemRelease(handle) }.result().map_err(refused("cuMemRelease"))?;
        // The mapping may consist of several parts; the driver is asked page by page.
        return Ok(Origin::Map);
    }
    let (mut start, mut size) = (0, 0);
    // Safety: writes two integers.
    match unsafe { sys::cuMemGetAddressRange_v2(&raw mut start, &raw mut size, address) } {
        CUresult::CUDA_SUCCESS => part(start, size as u64)?,
        // It may know only the usual kind of allocation.
        _ if first.size != 0 => part(first.start, first.size)?,
        code => code.result().map_err(refused("cuMemGetAddressRange"))?,
    }
    Ok(if pool.is_null() { Origin::Alloc } else { Origin::Pool(pool) })
}

/// Memory of the program.
#[derive(derive_more::Debug)]
struct ForeignMemory {
    owner: Arc<Context>,
    /// `None` if the driver has not been asked yet.
    origin: Option<Origin>,
    address: u64,
    bytes: u64,
    /// Its owner, if the program has passed one.
    #[debug(skip)]
    _keep: Option<Keep>,
}

// Safety: addresses and a handle of the driver, which any thread may use.
unsafe impl Send for ForeignMemory {}
// Safety: as above.
unsafe impl Sync for ForeignMemory {}

impl ForeignMemory {
    /// Checks that `context`'s GPU can read and write all of it at its address.
    fn check(&self, context: &Context) -> Result<(), String> {
        let origin = self.origin.map_or_else(|| examine(&self.owner, self.address, self.bytes), Ok)?;
        let mut location = context.location();
        let full = CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
        match origin {
            Origin::Alloc if context.copies_reach(&self.owner) => Ok(()),
            Origin::Alloc => Err(format!("{} has no peer access to {}", context.full_name(), self.owner.full_name())),
            Origin::Pool(pool) => {
                let mut flags = CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_NONE;
                // Safety: writes one integer of the enumeration; the caller of `import_memory` keeps the pool alive.
                let asked = unsafe { sys::cuMemPoolGetAccess(&raw mut flags, pool, &raw mut location) };
                asked.result().map_err(refused("cuMemPoolGetAccess"))?;
                if flags != full {
                    return Err(format!("{} has no access to its pool (cuMemPoolSetAccess)", context.full_name()));
                }
                Ok(())
            }
            Origin::Map => {
                let mut at = self.address;
                while at < self.address + self.bytes {
                    let mut flags = 0;
                    // Safety: writes one integer.
                    let asked = unsafe { sys::cuMemGetAccess(&raw mut flags, &raw const location, at) }.result();
                    asked.map_err(refused("cuMemGetAccess")).map_err(|reason| format!("{at:#x}: {reason}"))?;
                    if flags != full as u64 {
                        return Err(format!("{} has no access to {at:#x} (cuMemSetAccess)", context.full_name()));
                    }
                    at = (at + 1).next_multiple_of(GRANULE);
                }
                Ok(())
            }
            Origin::Host => {
                context.enter().map_err(|error| error.to_string())?;
                let mut seen = 0;
                let pointer = std::ptr::with_exposed_provenance_mut(self.address as usize);
                // Safety: writes one integer.
                let asked = unsafe { sys::cuMemHostGetDevicePointer_v2(&raw mut seen, pointer, 0) };
                asked.result().map_err(refused("cuMemHostGetDevicePointer"))?;
                if seen != self.address {
                    return Err(format!("{} sees it at {seen:#x}", context.full_name()));
                }
                Ok(())
            }
        }
    }

    fn refuse(&self, reason: String) -> GpuError {
        GpuError::Foreign { address: self.address, bytes: self.bytes, device: self.owner.full_name(), reason }
    }
}

impl RawMemory for ForeignMemory {
    fn check_reach(&self, device: &dyn Device) -> Result<(), GpuError> {
        match device.downcast::<CudaDevice>() {
            Some(device) => self.check(&device.context).map_err(|reason| self.refuse(reason)),
            None => Err(self.refuse("another kind of device is to reach it".to_owned())),
        }
    }

    fn is_owner(&self) -> bool {
        self._keep.is_some() || self.origin == Some(Origin::Host)
    }
}

impl Drop for ForeignMemory {
    fn drop(&mut self) {
        if self.origin == Some(Origin::Host) {
            forget_pinned(self.address, self.bytes);
        }
    }
}

/// Returns memory of the program, if kernels of this GPU can use it. The allocation keeps `keep`.
pub(super) fn import(
    context: &Arc<Context>,
    address: u64,
    bytes: u64,
    keep: Option<Keep>,
) -> Result<(Allocation, MemoryKind), GpuError> {
    let refuse = |reason| GpuError::Foreign { address, bytes, device: context.full_name(), reason };
    let origin = examine(context, address, bytes).map_err(refuse)?;
    let kind = if origin == Origin::Host { MemoryKind::Pinned } else { MemoryKind::Device };
    if kind == MemoryKind::Pinned {
        know_pinned(address, bytes);
    }
    let memory = ForeignMemory { owner: context.clone(), origin: Some(origin), address, bytes, _keep: keep };
    memory.check(context).map_err(refuse)?;
    Ok((Allocation::new(address, None, memory), kind))
}

/// Returns device memory of the program. The driver is asked only when other GPUs are to reach it.
pub(super) fn assume(context: &Arc<Context>, address: u64, bytes: u64) -> Allocation {
    let memory = ForeignMemory { owner: context.clone(), origin: None, address, bytes, _keep: None };
    Allocation::new(address, None, memory)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_that_a_gpu_cannot_use_is_refused_with_the_reason() {
        let (own, other) = (std::ptr::without_provenance_mut(16), 32);
        let device = Facts { memory_type: CUmemorytype::CU_MEMORYTYPE_DEVICE as u64, ordinal: 3, ..Facts::default() };
        let host = Facts { memory_type: CUmemorytype::CU_MEMORYTYPE_HOST as u64, ..device };
        for usable in [device, host, Facts { context: 16, ..device }, Facts { context: other, ..host }] {
            assert_eq!(usable.refusal(3, own), None, "{usable:?}");
        }
        for (facts, reason) in [
            (Facts { managed: 1, ..device }, "managed"),
            (Facts { managed: 1, ..host }, "managed"),
            (Facts { ordinal: 2, ..device }, "in GPU 2"),
            (Facts { context: other, ..device }, "another context"),
            (Facts { memory_type: 0, ..device }, "pinned"),
            (Facts { memory_type: CUmemorytype::CU_MEMORYTYPE_ARRAY as u64, ..device }, "does not know"),
        ] {
            let refusal = facts.refusal(3, own).unwrap_or_default();
            assert!(refusal.contains(reason), "{facts:?}: {refusal}");
        }
    }
}
