// SPDX-License-Identifier: MIT OR Apache-2.0
//! Work in order that needs no SM, and whose end the CPU finds in its own memory.
//!
//! A [`Lane`] copies, and then writes values that announce the copies. Both are in one order on the device, so no CPU
//! thread waits between them. Each [`finish`](Lane::finish) ends with a [`Mark`]: a word of host memory to which the
//! lane writes a number. The CPU reads it without a call of the driver, and other lanes wait for it on their devices.

use super::GpuError;
use crate::Keep;
use crate::copier::Ticket;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};

/// The word of host memory to which a lane writes the number of each end.
pub struct Mark {
    address: u64,
    _keep: Keep,
}

impl fmt::Debug for Mark {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Mark").field("address", &self.address).field("reached", &self.reached()).finish()
    }
}

impl Mark {
    /// Makes a mark of a word that exists as long as `keep`.
    ///
    /// # Safety
    /// - `address` is a multiple of 8, of a word that devices and CPU access atomically and that only grows.
    pub unsafe fn new(address: u64, keep: Keep) -> Self {
        Self { address, _keep: keep }
    }

    /// Returns the address of the word.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Returns the number of the last end that was reached.
    pub fn reached(&self) -> Ticket {
        let word = std::ptr::with_exposed_provenance_mut(self.address as usize);
        // Safety: the promise of `new`.
        unsafe { AtomicU64::from_ptr(word) }.load(Ordering::Acquire)
    }

    /// Returns whether an end was reached: the work before it is done, and its writes are visible to all devices.
    pub fn has_reached(&self, ticket: Ticket) -> bool {
        self.reached() >= ticket
    }
}

/// A value that a lane writes. A thread that acquires it sees all earlier work of the lane.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Value {
    /// 4 bytes, at an address that is a multiple of 4.
    Small {
        /// The address.
        to: u64,
        /// The value.
        value: u32,
    },
    /// 8 bytes, at an address that is a multiple of 8.
    Word {
        /// The address.
        to: u64,
        /// The value.
        value: u64,
    },
}

/// The maximum number of values of one [`Lane::finish`].
pub const MAX_VALUES: usize = 3;

/// Work of a device in the order of the calls. No call waits for a kernel or for a copy, and none allocates.
///
/// ```
/// use gin_gpu::lane::Value;
/// use gin_gpu::{Device, GpuError, Memory, MemoryKind, virt::VirtualDevice};
/// use std::sync::Arc;
///
/// let device: Arc<dyn Device> = VirtualDevice::memory_only(0);
/// let memory = Memory::new(&device, MemoryKind::Device, 24)?;
/// memory.write(0, &[7u64])?;
/// let (from, mut lane) = (memory.address(), device.lane()?);
/// // Safety: the memory exists until the end is reached.
/// let end = unsafe {
///     lane.copy(from + 8, from, 8)?;
///     lane.finish(&[Value::Word { to: from + 16, value: 1 }])?
/// };
/// while !lane.mark().has_reached(end) {}
/// let mut words = [0u64; 3];
/// memory.read(0, &mut words)?;
/// assert_eq!(words, [7, 7, 1]);
/// # Ok::<(), GpuError>(())
/// ```
pub trait Lane: Send + fmt::Debug {
    /// Returns the mark, which other threads and lanes may read.
    fn mark(&self) -> &std::sync::Arc<Mark>;

    /// Copies between devices, or between a device and pinned memory. A copy within a GPU waits for room on an SM.
    ///
    /// # Safety
    /// - Both ranges exist until an end behind the copy is reached, and the device reaches both.
    ///
    /// # Errors
    /// An error of the driver.
    unsafe fn copy(&mut self, to: u64, from: u64, bytes: u64) -> Result<(), GpuError>;

    /// Writes a few bytes, at most 8, which may change once the call has returned.
    ///
    /// # Safety
    /// - As [`copy`](Self::copy), for the destination.
    ///
    /// # Errors
    /// An error of the driver.
    unsafe fn store(&mut self, to: u64, bytes: &[u8]) -> Result<(), GpuError>;

    /// Adds to a word of 8 bytes, atomically to all devices. A thread that acquires the sum sees all earlier work of
    /// the lane. On a GPU this is a kernel of one thread: it waits for room on an SM.
    ///
    /// # Safety
    /// - As [`copy`](Self::copy), for the word, whose address is a multiple of 8.
    ///
    /// # Errors
    /// An error of the driver.
    unsafe fn add(&mut self, word: u64, amount: u64) -> Result<(), GpuError>;

    /// Holds back later work until another lane of the process has reached an end that it has started already.
    ///
    /// # Errors
    /// An error of the driver.
    fn wait(&mut self, mark: &Mark, ticket: Ticket) -> Result<(), GpuError>;

    /// Writes values in order, at most [`MAX_VALUES`], and then the number of this end, which it returns.
    ///
    /// # Safety
    /// - As [`copy`](Self::copy), for the destinations.
    ///
    /// # Errors
    /// An error of the driver.
    unsafe fn finish(&mut self, values: &[Value]) -> Result<Ticket, GpuError>;

    /// Checks that work under way has not failed.
    ///
    /// # Errors
    /// The error of the work; then no later end is reached.
    fn check(&self) -> Result<(), GpuError>;
}
