// SPDX-License-Identifier: MIT OR Apache-2.0
//! Exports memory of a GPU as a file that drivers share (DMA-BUF).

use super::context::Context;
use super::driver::written;
use crate::{GpuError, MemoryFile, whole_pages};
use cudarc::driver::sys::{self, CUmemRangeHandleType};
use std::os::fd::{FromRawFd, OwnedFd};

/// Exports `bytes` bytes from `address` on. The driver exports whole pages of the host only. Its allocations consist of
/// larger pages, so all exported pages belong to the same allocation.
pub(super) fn export(context: &Context, address: u64, bytes: u64) -> Result<MemoryFile, GpuError> {
    if !context.dma_buf {
        return Err(
            context.unsupported("give its memory as a DMA-BUF file: GPU, driver or kernel has no support for it")
        );
    }
    let pages = whole_pages(address, bytes.max(1), rustix::param::page_size() as u64);
    let (first, length, offset) = pages.ok_or_else(|| context.unsupported("give memory past the last address"))?;
    context.enter()?;
    let kind = CUmemRangeHandleType::CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD;
    // Safety: writes one integer, the number of a file.
    let make =
        |file: *mut i32| unsafe { sys::cuMemGetHandleForAddressRange(file.cast(), first, length as usize, kind, 0) };
    let file = written("make a DMA-BUF file of device memory", -1, make)?;
    // Safety: the driver has just opened it for the caller.
    Ok(MemoryFile::new(unsafe { OwnedFd::from_raw_fd(file) }, offset))
}
