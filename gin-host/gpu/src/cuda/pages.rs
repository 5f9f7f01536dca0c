// SPDX-License-Identifier: MIT OR Apache-2.0
//! Pages of I/O memory to which kernels store: the doorbell pages of NICs.
//!
//! The driver registers a page once for all GPUs, and a NIC may give the same page to several users. So users are
//! counted here. A page is unregistered when it has no users and no kernel runs. Until then it stays mapped in this
//! process.

use super::driver::check;
use crate::shared::pointer;
use crate::{GpuError, Keep, lock};
use cudarc::driver::sys;
use std::collections::BTreeMap;
use std::sync::Mutex;

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

/// Adds a user of a page: [`Table::enter`]. The caller drops the result when it holds no lock.
pub(super) fn enter<E>(first: u64, register: impl FnOnce() -> Result<(), E>) -> Result<Option<Keep>, E> {
    lock(&PAGES).enter(first, register)
}

/// Removes a user of a page: [`Table::leave`].
pub(super) fn leave(first: u64, keep: Keep) -> Option<Keep> {
    lock(&PAGES).leave(first, keep)
}

/// Unregisters a page without users. The caller drops the result when it holds no lock.
pub(super) fn end(first: u64) -> Result<Option<Keep>, GpuError> {
    // Safety: registered by its first user, and no kernel runs.
    let unregister = || check("take a doorbell page from GPUs", unsafe { sys::cuMemHostUnregister(pointer(first)) });
    lock(&PAGES).end(first, unregister)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

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
