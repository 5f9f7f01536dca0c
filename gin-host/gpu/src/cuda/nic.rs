// SPDX-License-Identifier: MIT OR Apache-2.0
//! Memory that a GPU shares with a NIC: [pages](super::pages) to which kernels store, and its own memory as a file.

use super::CudaDevice;
use super::context::Context;
use super::copy_stream::address_of_host;
use super::deferred::{Resource, defer};
use super::driver::{describe, written};
use super::launches::free_deferred;
use super::pages;
use crate::shared::{page, pointer};
use crate::{GpuError, Keep, MappedPages, MemoryFile, NicAccess, whole_pages};
use cudarc::driver::sys::{self, CUmemRangeHandleType};
use std::os::fd::{FromRawFd, OwnedFd};
use std::sync::Arc;

/// The pages of one user.
struct CudaPages {
    context: Arc<Context>,
    first: u64,
    /// `None` only in `drop`.
    keep: Option<Keep>,
}

impl NicAccess for CudaDevice {
    unsafe fn map_pages(&self, first: u64, bytes: u64, keep: Keep) -> Result<MappedPages, GpuError> {
        free_deferred();
        self.context.enter()?;
        let flags =
            sys::CU_MEMHOSTREGISTER_PORTABLE | sys::CU_MEMHOSTREGISTER_DEVICEMAP | sys::CU_MEMHOSTREGISTER_IOMEMORY;
        let refuse = |failure| {
            let hint = "some drivers map I/O memory only with their module's option PeerMappingOverride";
            let reason = format!("{}; {hint}", describe(failure));
            GpuError::Driver { context: "let a GPU store to a doorbell page", reason }
        };
        let register = || {
            // Safety: the pages are mapped until they are unregistered.
            unsafe { sys::cuMemHostRegister_v2(pointer(first), bytes as usize, flags) }.result().map_err(refuse)
        };
        let before = pages::enter(first, register)?;
        drop(before);
        // From here on the pages are unregistered later, also after an error.
        let pages = CudaPages { context: self.context.clone(), first, keep: Some(keep) };
        Ok(MappedPages::new(address_of_host("find a doorbell page in a GPU", first)?, pages))
    }

    // The driver exports whole pages of the host only. Its allocations consist of larger pages, so all exported pages
    // belong to the same allocation.
    fn export(&self, address: u64, bytes: u64) -> Result<MemoryFile, GpuError> {
        let context = &self.context;
        if !context.dma_buf {
            return Err(
                context.unsupported("give its memory as a DMA-BUF file: GPU, driver or kernel has no support for it")
            );
        }
        let pages = whole_pages(address, bytes.max(1), page());
        let (first, length, offset) = pages.ok_or_else(|| context.unsupported("give memory past the last address"))?;
        context.enter()?;
        let kind = CUmemRangeHandleType::CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD;
        // Safety: writes one integer, the number of a file.
        let make = |file: *mut i32| unsafe {
            sys::cuMemGetHandleForAddressRange(file.cast(), first, length as usize, kind, 0)
        };
        let file = written("make a DMA-BUF file of device memory", -1, make)?;
        // Safety: the driver has just opened it for the caller.
        Ok(MemoryFile::new(unsafe { OwnedFd::from_raw_fd(file) }, offset))
    }

    fn enter_cuda(&self) -> Result<Option<i32>, GpuError> {
        self.context.enter()?;
        Ok(Some(self.context.device))
    }
}

impl Drop for CudaPages {
    fn drop(&mut self) {
        let Some(keep) = self.keep.take() else { return };
        let left = pages::leave(self.first, keep);
        if left.is_none() {
            defer(&self.context, Resource::Pages(self.first));
        }
    }
}
