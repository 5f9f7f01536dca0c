// SPDX-License-Identifier: MIT OR Apache-2.0
//! Memory at fixed distances, through the driver's virtual-memory calls.
//!
//! A place has its own memory, which is mapped only there. The handle is released at once, because the mapping keeps
//! the memory. Every GPU of the process that can reach the memory's own GPU reaches it, also GPUs outside the LSA team,
//! because copies between GPUs read and write it too.

use super::context::Context;
use super::deferred::DeferredFree;
use super::driver::{check, describe, written};
use super::lane::Lane;
use super::launches::{defer, free_deferred};
use crate::error::out_of_memory;
use crate::flat::{FlatPlace, RawAddresses};
use crate::{DeviceKind, GpuError, MemoryKind, RawMemory};
use cudarc::driver::sys::{self, CUresult};
use std::sync::Arc;

/// The bytes of a slot that are tried first. They are several times the memory of a GPU, so that places are found
/// although windows are freed in any order. 16 such slots are an eighth of the addresses of a process.
const LARGEST: u64 = 1 << 40;

/// The fewest bytes of a slot.
const SMALLEST: u64 = 1 << 32;

/// Addresses that the driver has reserved.
#[derive(Debug)]
pub(super) struct Addresses {
    context: Arc<Context>,
    start: u64,
    stride: u64,
    bytes: u64,
}

impl Addresses {
    /// Reserves addresses for `slots` slots of memory of that `granularity`.
    pub(super) fn reserve(context: &Arc<Context>, granularity: u64, slots: u32) -> Result<Self, GpuError> {
        free_deferred();
        context.enter()?;
        let mut stride = LARGEST;
        loop {
            let bytes = u64::from(slots.max(1)).saturating_mul(stride);
            let mut start = 0;
            // Safety: writes one integer.
            let code = unsafe { sys::cuMemAddressReserve(&raw mut start, bytes as usize, granularity as usize, 0, 0) };
            match code {
                CUresult::CUDA_SUCCESS => return Ok(Self { context: context.clone(), start, stride, bytes }),
                CUresult::CUDA_ERROR_OUT_OF_MEMORY | CUresult::CUDA_ERROR_INVALID_VALUE if stride > SMALLEST => {
                    stride /= 2;
                }
                code => return Err(GpuError::Addresses { slots, least: SMALLEST, reason: describe(code) }),
            }
        }
    }
}

impl RawAddresses for Addresses {
    fn kind(&self) -> DeviceKind {
        DeviceKind::Cuda
    }

    fn start(&self) -> u64 {
        self.start
    }

    fn stride(&self) -> u64 {
        self.stride
    }
}

impl Drop for Addresses {
    fn drop(&mut self) {
        defer(DeferredFree::Addresses(self.context.clone(), self.start, self.bytes));
    }
}

/// Memory at a place; unmapped when no kernel runs.
#[derive(Debug)]
pub(super) struct PlacedMemory {
    context: Arc<Context>,
    /// `None` only in `drop`.
    place: Option<FlatPlace>,
    address: u64,
}

impl PlacedMemory {
    /// Maps zeroed memory.
    pub(super) fn new(context: &Arc<Context>, place: FlatPlace) -> Result<Self, GpuError> {
        free_deferred();
        context.enter()?;
        let (address, bytes) = (place.address(), place.bytes());
        let refuse = out_of_memory(MemoryKind::Device, bytes);
        // Safety: writes one integer.
        let create = |handle| unsafe { sys::cuMemCreate(handle, bytes as usize, &context.memory_properties(), 0) };
        let handle = written("make device memory", 0, create).map_err(&refuse)?;
        // Safety: the place is in reserved addresses, nothing is mapped there, and the memory is as long.
        let mapped = check("map device memory", unsafe { sys::cuMemMap(address, bytes as usize, 0, handle, 0) });
        // Safety: made above. The mapping keeps the memory until it is unmapped.
        let released = check("let go of device memory", unsafe { sys::cuMemRelease(handle) });
        mapped.map_err(refuse)?;
        // From here on the memory is unmapped later, also after an error.
        let memory = Self { context: context.clone(), place: Some(place), address };
        released?;
        let access = context.access();
        // Safety: the number of descriptions is right, and they are for a whole mapping.
        let code = unsafe { sys::cuMemSetAccess(address, bytes as usize, access.as_ptr(), access.len()) };
        check("let GPUs reach device memory", code)?;
        // Safety: these bytes were just mapped.
        Lane::with(context, |lane| unsafe { lane.zero(address, bytes) })?;
        Ok(memory)
    }
}

impl RawMemory for PlacedMemory {
    fn address(&self) -> u64 {
        self.address
    }
}

impl Drop for PlacedMemory {
    fn drop(&mut self) {
        if let Some(place) = self.place.take() {
            defer(DeferredFree::Placed(self.context.clone(), place));
        }
    }
}
