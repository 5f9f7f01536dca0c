// SPDX-License-Identifier: MIT OR Apache-2.0
//! Memory and threads of another library of the process, such as NCCL: the GPU of an address, access for more GPUs, and
//! the context that the library has made current.

use super::CudaDevice;
use super::context::Context;
use super::driver::{describe, start, written};
use super::import::{Facts, GRANULE};
use super::info;
use super::launches::free_deferred;
use crate::GpuError;
use cudarc::driver::result::DriverError;
use cudarc::driver::sys::{self, CUcontext, CUmemAccess_flags, CUmemorytype, CUresult};

/// The place of memory, as the driver knows it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Holder {
    /// The GPU with this number.
    Gpu(usize),
    /// The host, in memory that GPUs can reach.
    Host,
    /// The driver does not know it: ordinary memory of the host.
    Unknown,
}

impl Holder {
    /// Asks the driver.
    ///
    /// # Errors
    /// [`GpuError::Foreign`] for managed memory, or an error of the driver.
    pub fn of(address: u64) -> Result<Self, GpuError> {
        start()?;
        let refuse = |reason| GpuError::Foreign { address, bytes: 1, device: "any GPU".to_owned(), reason };
        let facts = match Facts::of(address) {
            Ok(facts) => facts,
            Err(DriverError(CUresult::CUDA_ERROR_INVALID_VALUE)) => return Ok(Self::Unknown),
            Err(failure) => return Err(refuse(format!("cuPointerGetAttributes says {}", describe(failure)))),
        };
        if facts.managed != 0 {
            return Err(refuse("it is managed memory, which moves between host and GPU".to_owned()));
        }
        let is = |kind: CUmemorytype| facts.memory_type == kind as u64;
        Ok(if is(CUmemorytype::CU_MEMORYTYPE_DEVICE) {
            // The number fills the low bytes.
            Self::Gpu(facts.ordinal as u32 as usize)
        } else if is(CUmemorytype::CU_MEMORYTYPE_HOST) {
            Self::Host
        } else {
            Self::Unknown
        })
    }
}

/// Returns the number of the GPU whose context is current on this thread, if one is.
///
/// # Errors
/// An error of the driver.
pub fn current_gpu() -> Result<Option<usize>, GpuError> {
    start()?;
    if current()?.is_null() {
        return Ok(None);
    }
    // Safety: writes one integer.
    let device = written("ask for the current GPU", 0, |device| unsafe { sys::cuCtxGetDevice(device) })?;
    Ok((0..).map_while(|ordinal| info::device(ordinal).ok()).position(|known| known == device))
}

fn current() -> Result<CUcontext, GpuError> {
    // Safety: writes one pointer.
    written("ask for the current context", std::ptr::null_mut(), |context| unsafe { sys::cuCtxGetCurrent(context) })
}

/// The context that was current on this thread when this was made. It is current again when this is dropped, so that
/// calls of gin do not change the GPU of their caller.
#[derive(Debug)]
pub struct KeepContext(CUcontext);

impl KeepContext {
    /// Notes the current context.
    ///
    /// # Errors
    /// An error of the driver.
    pub fn new() -> Result<Self, GpuError> {
        start()?;
        current().map(Self)
    }
}

impl Drop for KeepContext {
    fn drop(&mut self) {
        // Safety: it was current before, and its owner destroys it after the call of gin at the earliest.
        let _ = unsafe { sys::cuCtxSetCurrent(self.0) };
    }
}

impl CudaDevice {
    /// Lets this GPU read and write memory that another library has allocated: memory of `cuMemMap` by
    /// `cuMemSetAccess`, where the GPU has no access yet. Other memory is only checked.
    ///
    /// # Safety
    /// - The memory is allocated, and the library does not change its mapping meanwhile.
    ///
    /// # Errors
    /// [`GpuError::Foreign`] with the reason.
    pub unsafe fn reach(&self, address: u64, bytes: u64) -> Result<(), GpuError> {
        let refuse = |reason| GpuError::Foreign { address, bytes, device: self.context.full_name(), reason };
        // Safety: the caller's promise.
        unsafe { reach(&self.context, address, bytes) }.map_err(refuse)
    }
}

/// Returns whether a GPU may read and write mapped memory.
fn has_access(context: &Context, address: u64) -> Result<bool, DriverError> {
    let (mut flags, location) = (0, context.location());
    // Safety: writes one integer.
    unsafe { sys::cuMemGetAccess(&raw mut flags, &raw const location, address) }.result()?;
    Ok(flags == CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE as u64)
}

/// # Safety
/// - As [`CudaDevice::reach`].
unsafe fn reach(context: &Context, address: u64, bytes: u64) -> Result<(), String> {
    let says = |call: &'static str| move |failure| format!("{call} says {}", describe(failure));
    let end = address.checked_add(bytes).filter(|end| *end > address).ok_or("it has no bytes")?;
    let pointer = std::ptr::with_exposed_provenance_mut(address as usize);
    let mut handle = 0;
    // Safety: writes an integer.
    if unsafe { sys::cuMemRetainAllocationHandle(&raw mut handle, pointer) } == CUresult::CUDA_SUCCESS {
        // Safety: retained just now.
        unsafe { sys::cuMemRelease(handle) }.result().map_err(says("cuMemRelease"))?;
        let mut at = address;
        while at < end {
            // The driver may refuse the question for a GPU that has no access at all.
            if has_access(context, at) != Ok(true) {
                // The driver finds the mapping only in a context that has access.
                if let Some(other) = Context::all().into_iter().find(|other| has_access(other, at) == Ok(true)) {
                    other.enter().map_err(|error| error.to_string())?;
                }
                let (mut start, mut length) = (0, 0);
                // Safety: writes two integers.
                let asked = unsafe { sys::cuMemGetAddressRange_v2(&raw mut start, &raw mut length, at) }.result();
                asked.map_err(says("cuMemGetAddressRange"))?;
                let access = context.own_access();
                // Safety: one description, for a whole mapping.
                let allowed = unsafe { sys::cuMemSetAccess(start, length, &raw const access, 1) }.result();
                allowed.map_err(says("cuMemSetAccess"))?;
                if has_access(context, at) != Ok(true) {
                    return Err(format!("it has no access to {at:#x}"));
                }
            }
            at = (at + 1).next_multiple_of(GRANULE);
        }
        return Ok(());
    }
    match Holder::of(address).map_err(|error| error.to_string())? {
        Holder::Gpu(ordinal) => {
            let owner = Context::get(ordinal).map_err(|error| error.to_string())?;
            if context.copies_reach(&owner) {
                return Ok(());
            }
            Err(format!("it has no peer access to {}", owner.full_name()))
        }
        Holder::Host => {
            context.enter().map_err(|error| error.to_string())?;
            let mut seen = 0;
            // Safety: writes one integer.
            let asked = unsafe { sys::cuMemHostGetDevicePointer_v2(&raw mut seen, pointer, 0) }.result();
            asked.map_err(says("cuMemHostGetDevicePointer"))?;
            if seen == address { Ok(()) } else { Err(format!("it sees it at {seen:#x}")) }
        }
        Holder::Unknown => Err("the driver does not know it".to_owned()),
    }
}

/// Frees memory and streams of gin that were dropped, if no kernel of gin runs. Memory of another process stays
/// allocated as long as it is mapped here.
pub fn free_dropped() {
    free_deferred();
}

/// Returns whether copies between two GPUs take the direct way.
///
/// # Errors
/// [`GpuError::NoSuchDevice`], or an error of the driver.
pub fn copies_reach(from: usize, to: usize) -> Result<bool, GpuError> {
    Ok(Context::get(from)?.copies_reach(&*Context::get(to)?))
}
