// SPDX-License-Identifier: MIT OR Apache-2.0
//! A stream for copies, with a pinned buffer.
//!
//! Kernels that wait for each other may fill the GPU. Copies between host and device run beside them on copy engines.
//! Copies within a GPU and memsets need a free SM and might never start. So all copies here go through pinned
//! memory, also those from a device to itself.

use super::context::Context;
use super::driver::{BesideCaptures, check, handle, is_done, written};
use crate::shared::pointer;
use crate::{GpuError, lock};
use cudarc::driver::sys::{self, CUstream};
use std::sync::{Arc, Mutex};
use std::time::Instant;

/// The bytes of a buffer: as many as the longest message of the network between ranks.
pub(super) const BUFFER: u64 = 1 << 20;

/// The bytes after the buffer, for values.
pub(super) const VALUES: u64 = 64 << 10;

/// A stream that waits for no other stream, and its buffer.
#[derive(Debug)]
pub(super) struct CopyStream {
    context: Arc<Context>,
    pub(super) stream: CUstream,
    /// The address of the buffer, on host and device. The values are behind it.
    pub(super) buffer: u64,
}

// Safety: a stream may be used from any thread.
unsafe impl Send for CopyStream {}
// Safety: all methods that start something take `&mut self`.
unsafe impl Sync for CopyStream {}

/// The unused copy streams of all GPUs.
static UNUSED: Mutex<Vec<CopyStream>> = Mutex::new(Vec::new());

impl CopyStream {
    /// Returns an unused stream, or a new one.
    pub(super) fn take(context: &Arc<Context>) -> Result<Self, GpuError> {
        {
            let mut unused = lock(&UNUSED);
            if let Some(index) = unused.iter().position(|copies| copies.context.ordinal == context.ordinal) {
                return Ok(unused.swap_remove(index));
            }
        }
        context.enter()?;
        Ok(Self { context: context.clone(), stream: new_stream(0)?, buffer: host_alloc(BUFFER + VALUES)? })
    }

    /// Runs `work` with a copy stream. A stream whose work has failed is not used again.
    pub(super) fn with(
        context: &Arc<Context>,
        work: impl FnOnce(&mut Self) -> Result<(), GpuError>,
    ) -> Result<(), GpuError> {
        let mut copies = Self::take(context)?;
        work(&mut copies)?;
        copies.give_back();
        Ok(())
    }

    /// Keeps the copy stream for the next user. All its copies must be done.
    pub(super) fn give_back(self) {
        lock(&UNUSED).push(self);
    }

    /// Starts a copy between the host's pinned memory and the device.
    ///
    /// # Safety
    /// - Both ranges are alive until the copy is done.
    pub(super) unsafe fn start(&mut self, to: u64, from: u64, bytes: u64) -> Result<(), GpuError> {
        // Safety: the caller's promise.
        let code = unsafe { sys::cuMemcpyAsync(to, from, bytes as usize, self.stream) };
        check("copy between host and GPU", code)
    }

    /// Returns whether all copies are done.
    pub(super) fn is_idle(&self) -> Result<bool, GpuError> {
        self.context.enter()?;
        let _beside = BesideCaptures::begin();
        // Safety: the stream is alive.
        is_done("ask for the end of a copy", unsafe { sys::cuStreamQuery(self.stream) })
    }

    /// Waits until all copies are done. It queries repeatedly, because a driver call that waits could delay other
    /// threads.
    fn finish(&self) -> Result<(), GpuError> {
        let start = Instant::now();
        while !self.is_idle()? {
            if start.elapsed().as_micros() < 50 {
                std::hint::spin_loop();
            } else {
                std::thread::yield_now();
            }
        }
        Ok(())
    }

    /// Copies from the program to the device.
    ///
    /// # Safety
    /// - The destination is alive, and no other code uses it meanwhile.
    pub(super) unsafe fn write(&mut self, to: u64, from: &[u8]) -> Result<(), GpuError> {
        self.context.enter()?;
        let mut at = to;
        for chunk in from.chunks(BUFFER as usize) {
            // Safety: the buffer is as long as the longest chunk, and no copy uses it.
            unsafe { std::ptr::copy_nonoverlapping(chunk.as_ptr(), self.buffer as usize as *mut u8, chunk.len()) };
            // Safety: the caller's promise.
            unsafe { self.start(at, self.buffer, chunk.len() as u64)? };
            self.finish()?;
            at += chunk.len() as u64;
        }
        Ok(())
    }

    /// Copies from the device to the program.
    ///
    /// # Safety
    /// - The source is alive.
    pub(super) unsafe fn read(&mut self, to: &mut [u8], from: u64) -> Result<(), GpuError> {
        self.context.enter()?;
        let mut at = from;
        for chunk in to.chunks_mut(BUFFER as usize) {
            // Safety: the caller's promise.
            unsafe { self.start(self.buffer, at, chunk.len() as u64)? };
            self.finish()?;
            // Safety: the buffer is as long as the longest chunk, and no copy uses it.
            unsafe {
                std::ptr::copy_nonoverlapping(self.buffer as usize as *const u8, chunk.as_mut_ptr(), chunk.len())
            };
            at += chunk.len() as u64;
        }
        Ok(())
    }

    /// Writes zeros to the device.
    ///
    /// # Safety
    /// - The range is alive, and no other code uses it meanwhile.
    pub(super) unsafe fn zero(&mut self, to: u64, bytes: u64) -> Result<(), GpuError> {
        self.context.enter()?;
        // Safety: the buffer is as long, and no copy uses it.
        unsafe { std::ptr::write_bytes(self.buffer as usize as *mut u8, 0, BUFFER.min(bytes) as usize) };
        for at in (0..bytes).step_by(BUFFER as usize) {
            let chunk = BUFFER.min(bytes - at);
            // Safety: the caller's promise.
            unsafe { self.start(to + at, self.buffer, chunk)? };
        }
        self.finish()
    }
}

/// Makes a stream that does not wait for the default one. The context must be current. The driver takes the nearest
/// priority that the GPU has.
pub(super) fn new_stream(priority: i32) -> Result<CUstream, GpuError> {
    let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
    // Safety: writes one pointer.
    handle("make a stream", |stream| unsafe { sys::cuStreamCreateWithPriority(stream, flags, priority) })
}

/// Allocates pinned memory that every GPU reaches at the CPU's address. The context must be current.
pub(super) fn host_alloc(bytes: u64) -> Result<u64, GpuError> {
    const CALL: &str = "allocate pinned memory";
    let flags = sys::CU_MEMHOSTALLOC_PORTABLE | sys::CU_MEMHOSTALLOC_DEVICEMAP;
    // Safety: writes one pointer.
    let start = handle(CALL, |start| unsafe { sys::cuMemHostAlloc(start, bytes as usize, flags) })?;
    let start = start.expose_provenance() as u64;
    let address = address_of_host(CALL, start)?;
    if address != start {
        let reason = format!("the GPU sees {address:#x} where the CPU sees {start:#x}");
        return Err(GpuError::Driver { context: CALL, reason });
    }
    Ok(start)
}

/// Returns the address at which the current context's GPU finds registered memory of the host.
pub(super) fn address_of_host(context: &'static str, start: u64) -> Result<u64, GpuError> {
    // Safety: writes one integer.
    written(context, 0, |seen| unsafe { sys::cuMemHostGetDevicePointer_v2(seen, pointer(start), 0) })
}
