// SPDX-License-Identifier: MIT OR Apache-2.0
//! The access to memory of an engine that runs on a CPU.

use gin_device::exec::watch::{self, Access, Event};
use gin_gpu::copy::copy_quietly;
use gin_gpu::{Device, GpuError};
use gin_soft_nic::Memory;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};

/// The bytes of one copy from memory of a device to memory of a device.
const CHUNK: u64 = 64 << 10;

/// Memory of this process, by its addresses, and memory of devices, through one of them. The code that registered
/// ranges in the tables has promised that they are valid.
#[derive(Debug, Default)]
pub(super) struct HostMemory {
    /// Copies memory that the CPU does not reach. `None` if all registered memory is in this process.
    pub(super) device: Option<Arc<dyn Device>>,
    /// The first copy that failed.
    pub(super) failure: Option<GpuError>,
}

impl HostMemory {
    fn note<T>(&mut self, done: Result<T, GpuError>) {
        if let Err(error) = done {
            self.failure.get_or_insert(error);
        }
    }
}

impl Memory for HostMemory {
    fn load_u32(&mut self, address: u64) -> u32 {
        // Safety: the CPU reaches rings and records. The address is aligned and within a registered range, because the
        // tables contain no other.
        let value = unsafe { AtomicU32::from_ptr(address as usize as *mut u32) }.load(Ordering::Relaxed);
        watch::word((address & !7) as *const u64, Access::Load, Ordering::Relaxed);
        value
    }

    fn load_u64(&mut self, address: u64) -> u64 {
        // Safety: as above.
        let value = unsafe { AtomicU64::from_ptr(address as usize as *mut u64) }.load(Ordering::Relaxed);
        watch::word(address as *const u64, Access::Load, Ordering::Relaxed);
        value
    }

    fn store_u64(&mut self, address: u64, value: u64) {
        // Safety: as above.
        unsafe { AtomicU64::from_ptr(address as usize as *mut u64) }.store(value, Ordering::Relaxed);
        watch::word(address as *const u64, Access::Store, Ordering::Relaxed);
    }

    fn fence_acquire(&mut self) {
        fence(Ordering::Acquire);
        watch::fence(Ordering::Acquire);
    }

    fn fence_release(&mut self) {
        fence(Ordering::Release);
        watch::fence(Ordering::Release);
    }

    fn copy(&mut self, to: u64, from: u64, bytes: u64) {
        let Some(device) = self.device.clone() else {
            watch::event(Event::Copy { to, from, bytes });
            // Safety: both are within registered ranges, or the staging area.
            return unsafe { copy_quietly(to, from, bytes) };
        };
        let mut buffer = vec![0; bytes.min(CHUNK) as usize];
        for at in (0..bytes).step_by(CHUNK as usize) {
            let chunk = &mut buffer[..(bytes - at).min(CHUNK) as usize];
            // Safety: as above. Other code that uses these bytes expects a NIC's accesses.
            let done = unsafe { device.copy_out(chunk, from + at).and_then(|()| device.copy_in(to + at, chunk)) };
            self.note(done);
        }
    }

    fn store_words(&mut self, to: u64, words: [u32; 7], bytes: u32) {
        let bytes = u64::from(bytes.min(28));
        match &self.device {
            // Safety: `to` is within a registered range, and `words` has the requested bytes, at most 28.
            None => {
                let value = u64::from(words[0]) | u64::from(words[1]) << 32;
                watch::event(Event::Store { to, value, bytes });
                unsafe { copy_quietly(to, words.as_ptr() as u64, bytes) }
            }
            Some(device) => {
                // Safety: as above.
                let done = unsafe { device.copy_in(to, &bytemuck::bytes_of(&words)[..bytes as usize]) };
                self.note(done);
            }
        }
    }

    fn fetch_add(&mut self, address: u64, amount: u64) -> u64 {
        let Some(device) = self.device.clone() else {
            // Safety: within a registered range, and aligned.
            let old = unsafe { AtomicU64::from_ptr(address as usize as *mut u64) }.fetch_add(amount, Ordering::Relaxed);
            watch::word(address as *const u64, Access::Change(amount), Ordering::Relaxed);
            return old;
        };
        // Only this engine raises the word, as with a NIC whose atomics are atomic only among themselves.
        let mut old = [0; 8];
        // Safety: as above.
        let done = unsafe {
            device
                .copy_out(&mut old, address)
                .and_then(|()| device.copy_in(address, &u64::from_le_bytes(old).wrapping_add(amount).to_le_bytes()))
        };
        self.note(done);
        u64::from_le_bytes(old)
    }
}
