// SPDX-License-Identifier: MIT OR Apache-2.0
//! Memory of this process, for the engine.

use crate::copy::copy_quietly;
use gin_soft_hca::Memory;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};

/// Memory of this process, by its addresses. Whoever registered the ranges that the tables name has promised that they
/// are there.
#[derive(Debug)]
pub(super) struct ProcessMemory;

impl Memory for ProcessMemory {
    fn load_u32(&mut self, address: u64) -> u32 {
        // Safety: within a registered range, and aligned: the tables name no other.
        unsafe { AtomicU32::from_ptr(address as usize as *mut u32) }.load(Ordering::Relaxed)
    }

    fn load_u64(&mut self, address: u64) -> u64 {
        // Safety: as above.
        unsafe { AtomicU64::from_ptr(address as usize as *mut u64) }.load(Ordering::Relaxed)
    }

    fn store_u64(&mut self, address: u64, value: u64) {
        // Safety: as above.
        unsafe { AtomicU64::from_ptr(address as usize as *mut u64) }.store(value, Ordering::Relaxed);
    }

    fn fence_acquire(&mut self) {
        fence(Ordering::Acquire);
    }

    fn fence_release(&mut self) {
        fence(Ordering::Release);
    }

    fn copy(&mut self, to: u64, from: u64, bytes: u64) {
        // Safety: both within registered ranges, or the staging area.
        unsafe { copy_quietly(to, from, bytes) };
    }

    fn store_words(&mut self, to: u64, words: [u32; 7], bytes: u32) {
        // Safety: to is within a registered range; `words` has 28 bytes, and no more are asked for.
        unsafe { copy_quietly(to, words.as_ptr() as u64, u64::from(bytes.min(28))) };
    }

    fn fetch_add(&mut self, address: u64, amount: u64) -> u64 {
        // Safety: within a registered range, and aligned.
        unsafe { AtomicU64::from_ptr(address as usize as *mut u64) }.fetch_add(amount, Ordering::Relaxed)
    }
}
