// SPDX-License-Identifier: MIT OR Apache-2.0
//! Memory that a GPU shares with a NIC: pages of I/O memory to which kernels store, which are doorbell pages, and its
//! own memory as a file.
//!
//! The driver registers a page once for all GPUs, and a NIC may give the same page to several users. So users are
//! counted here. A page is unregistered when it has no users and no kernel runs. Until then it stays mapped in this
//! process.

use super::CudaDevice;
use super::context::Context;
use super::copy_stream::address_of_host;
use super::deferred::Resource;
use super::driver::{check, describe, written};
use super::launches::{defer, free_deferred};
use crate::shared::{page, pointer};
use crate::{GpuError, Keep, MappedPages, MemoryFile, NicAccess, lock, whole_pages};
use cudarc::driver::sys::{self, CUmemRangeHandleType};
use std::collections::BTreeMap;
use std::os::fd::{FromRawFd, OwnedFd};
use std::sync::{Arc, Mutex};

/// A registered page.
#[derive(Default)]
struct Page {
    users: usize,
    /// Keeps the page mapped while it has no users and is still registered.
    keep: Option<Keep>,
}

/// Pages by their addresses in this process.
#[derive(Default)]
struct Table(BTreeMap<u64, Page>);

static PAGES: Mutex<Table> = Mutex::new(Table(BTreeMap::new()));

impl Table {
    /// Adds a user of a page, which `register` registers if it is not registered yet. Returns the value that kept the
    /// page mapped without users, which is not needed any more.
    fn enter<E>(&mut self, first: u64, register: impl FnOnce() -> Result<(), E>) -> Result<Option<Keep>, E> {
        if !self.0.contains_key(&first) {
            register()?;
        }
        let page = self.0.entry(first).or_default();
        page.users += 1;
        Ok(page.keep.take())
    }

    /// Removes a user. Returns the user's keeper of the page if there are other users; else the page will be
    /// unregistered later.
    fn leave(&mut self, first: u64, keep: Keep) -> Option<Keep> {
        // A user has entered, so the page is in the table.
        let page = self.0.entry(first).or_default();
        page.users = page.users.saturating_sub(1);
        if page.users > 0 {
            return Some(keep);
        }
        page.keep = Some(keep);
        None
    }

    /// Has `unregister` unregister a page, unless it has users again or is already gone. Returns the value that kept it
    /// mapped.
    fn end<E>(&mut self, first: u64, unregister: impl FnOnce() -> Result<(), E>) -> Result<Option<Keep>, E> {
        if self.0.get(&first).is_none_or(|page| page.users > 0) {
            return Ok(None);
        }
        // On an error the page stays registered and mapped.
        unregister()?;
        Ok(self.0.remove(&first).and_then(|page| page.keep))
    }
}

/// Unregisters a page without users. The caller drops the result when it holds no lock.
pub(super) fn end(first: u64) -> Result<Option<Keep>, GpuError> {
    // Safety: registered by `map_pages`, and no kernel runs.
    let unregister = || check("take a doorbell page from GPUs", unsafe { sys::cuMemHostUnregister(pointer(first)) });
    lock(&PAGES).end(first, unregister)
}

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
        let before = lock(&PAGES).enter(first, register)?;
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
}

impl Drop for CudaPages {
    fn drop(&mut self) {
        let Some(keep) = self.keep.take() else { return };
        // In a statement of its own, so the lock is released.
        let left = lock(&PAGES).leave(self.first, keep);
        if left.is_none() {
            defer(&self.context, Resource::Pages(self.first));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn keep() -> (Keep, std::sync::Weak<u32>) {
        let keep = Arc::new(7u32);
        (keep.clone(), Arc::downgrade(&keep))
    }

    const GOOD: fn() -> Result<(), u32> = || Ok(());
    const NEVER: fn() -> Result<(), u32> = || panic!("the driver is not to be called");

    #[test]
    fn a_page_is_registered_for_its_first_user_and_unregistered_after_its_last() {
        let mut table = Table::default();
        let ((first, first_there), (second, second_there)) = (keep(), keep());
        assert!(table.enter(8, GOOD).unwrap().is_none());
        assert!(table.enter(8, NEVER).unwrap().is_none());
        drop(table.leave(8, first));
        assert!(first_there.upgrade().is_none(), "the other user keeps the page");
        assert!(table.end(8, NEVER).unwrap().is_none(), "it is in use");
        assert!(table.leave(8, second).is_none());
        assert!(second_there.upgrade().is_some(), "it is registered still");
        drop(table.end(8, GOOD).unwrap());
        assert!(second_there.upgrade().is_none());
        assert!(table.end(8, NEVER).unwrap().is_none(), "it is gone");
        assert!(table.0.is_empty());
    }

    #[test]
    fn a_page_that_is_used_again_before_it_was_unregistered_stays() {
        let mut table = Table::default();
        let ((first, first_there), (second, _there)) = (keep(), keep());
        table.enter(8, GOOD).unwrap();
        assert!(table.leave(8, first).is_none());
        drop(table.enter(8, NEVER).unwrap());
        assert!(first_there.upgrade().is_none(), "the new user keeps it");
        assert!(table.end(8, NEVER).unwrap().is_none());
        assert!(table.leave(8, second).is_none());
        assert!(table.end(8, GOOD).unwrap().is_some());
    }

    #[test]
    fn what_the_driver_refuses_changes_nothing() {
        let mut table = Table::default();
        assert_eq!(table.enter(8, || Err(1)).err(), Some(1));
        assert!(table.0.is_empty());
        table.enter(8, GOOD).unwrap();
        let (keep, there) = keep();
        assert!(table.leave(8, keep).is_none());
        assert_eq!(table.end(8, || Err(2)).err(), Some(2));
        assert!(there.upgrade().is_some(), "it is mapped as long as it is registered");
        table.enter(8, NEVER).unwrap();
    }
}
