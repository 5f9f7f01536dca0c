// SPDX-License-Identifier: MIT OR Apache-2.0
//! A lane whose work the calling thread does at once.

use super::VirtualDevice;
use crate::copier::Ticket;
use crate::copy::copy_shared;
use crate::lane::{Lane, Mark, Value};
use crate::{Device, GpuError};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

#[derive(Debug)]
pub(super) struct VirtualLane {
    mark: Arc<Mark>,
    word: Arc<AtomicU64>,
    device: String,
}

impl VirtualLane {
    pub(super) fn new(device: &VirtualDevice) -> Self {
        let word = Arc::new(AtomicU64::new(0));
        let address = word.as_ptr().expose_provenance() as u64;
        // Safety: the word is in the value that keeps it, and this lane only adds to it.
        let mark = Arc::new(unsafe { Mark::new(address, word.clone()) });
        Self { mark, word, device: device.name() }
    }
}

/// Returns the atomic word at an address.
///
/// # Safety
/// - The word exists and is aligned, for as long as the result is used.
unsafe fn word<'a>(address: u64) -> &'a AtomicU64 {
    // Safety: the caller's promise.
    unsafe { AtomicU64::from_ptr(std::ptr::with_exposed_provenance_mut(address as usize)) }
}

impl Lane for VirtualLane {
    fn mark(&self) -> &Arc<Mark> {
        &self.mark
    }

    unsafe fn copy(&mut self, to: u64, from: u64, bytes: u64) -> Result<(), GpuError> {
        // Safety: the caller's promise.
        unsafe { copy_shared(to, from, bytes) };
        Ok(())
    }

    unsafe fn store(&mut self, to: u64, bytes: &[u8]) -> Result<(), GpuError> {
        // Safety: the caller's promise.
        unsafe { self.copy(to, bytes.as_ptr().expose_provenance() as u64, bytes.len() as u64) }
    }

    unsafe fn add(&mut self, to: u64, amount: u64) -> Result<(), GpuError> {
        // Safety: the caller's promise.
        unsafe { word(to) }.fetch_add(amount, Ordering::Release);
        Ok(())
    }

    fn wait(&mut self, mark: &Mark, ticket: Ticket) -> Result<(), GpuError> {
        // A lane that works at once has reached every end that it has started.
        if mark.has_reached(ticket) {
            return Ok(());
        }
        Err(GpuError::Unsupported { device: self.device.clone(), what: "wait for a lane of another kind of device" })
    }

    unsafe fn finish(&mut self, values: &[Value]) -> Result<Ticket, GpuError> {
        for value in values {
            // Safety: the caller's promise.
            unsafe {
                match *value {
                    Value::Small { to, value } => {
                        AtomicU32::from_ptr(std::ptr::with_exposed_provenance_mut(to as usize))
                            .store(value, Ordering::Release);
                    }
                    Value::Word { to, value } => word(to).store(value, Ordering::Release),
                }
            }
        }
        Ok(self.word.fetch_add(1, Ordering::Release) + 1)
    }

    fn check(&self) -> Result<(), GpuError> {
        Ok(())
    }
}
