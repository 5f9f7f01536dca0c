// SPDX-License-Identifier: MIT OR Apache-2.0
//! Addresses for memory at fixed distances, through the driver's virtual-memory calls.
//!
//! A place has its own memory, which is mapped only there ([`MappedMemory`](super::shared::MappedMemory)). Every GPU of
//! the process that can reach the memory's own GPU reaches it, also GPUs outside the LSA team, because copies between
//! GPUs read and write it too.

use super::context::Context;
use super::deferred::Resource;
use super::driver::describe;
use super::launches::{defer, free_deferred};
use crate::flat::RawAddresses;
use crate::{DeviceKind, GpuError};
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
        defer(&self.context, Resource::Addresses(self.start, self.bytes));
    }
}
