// SPDX-License-Identifier: MIT OR Apache-2.0
//! A registered window on the host.

use super::CommError;
use bytemuck::Pod;
use gin_abi::WindowHandle;
use gin_abi::handle::STRIDE_SHIFT;
use gin_gpu::{Argument, KernelArg, Memory, MemorySlice};
use std::marker::PhantomData;
use std::ops::Range;
use std::sync::Arc;

/// How a window is registered.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct WindowFlags {
    /// Signals may be raised at words of the window; they begin at 0, whatever the words hold. It gets words beside it,
    /// 72 to 80 bytes for each 8 bytes of the window. Where a NIC raises signals, it raises the words of the window
    /// itself, so nothing else may write words that are used for signals; else the window's memory is not touched by
    /// that.
    pub signals: bool,
}

impl WindowFlags {
    /// No flags.
    pub const NONE: Self = Self { signals: false };
    /// Signals may be raised at words of the window.
    pub const SIGNALS: Self = Self { signals: true };

    pub(crate) fn bits(self) -> u32 {
        if self.signals { gin_abi::handle::WINDOW_SIGNALS } else { 0 }
    }
}

/// The parts of a window, kept by the communicator and by every [`Window`].
#[derive(Debug)]
pub(crate) struct Registered {
    pub(crate) handle: WindowHandle,
    /// Unique in this process, unlike the id, which is used again.
    pub(crate) serial: u64,
    pub(crate) memory: MemorySlice,
    /// Bytes, by world rank.
    pub(crate) lengths: Vec<u64>,
    /// Planes and tables, and the parts of LSA peers.
    pub(crate) _beside: Vec<Arc<Memory>>,
}

/// A window of elements of type `T`, which kernels get as `gin_device::Window<T>`.
///
/// Copies share it; it lasts until the communicator deregisters it or ends. What `read` and `write` touch is this
/// rank's own memory; no kernel may use it meanwhile.
#[derive(Debug)]
pub struct Window<T> {
    pub(crate) inner: Arc<Registered>,
    element: PhantomData<fn() -> T>,
}

impl<T> Clone for Window<T> {
    fn clone(&self) -> Self {
        Self { inner: self.inner.clone(), element: PhantomData }
    }
}

impl<T: Pod> Window<T> {
    pub(crate) fn new(inner: Arc<Registered>) -> Self {
        Self { inner, element: PhantomData }
    }

    /// Returns the window for kernels.
    pub fn handle(&self) -> WindowHandle {
        self.inner.handle
    }

    /// Its number, the same on all ranks.
    pub fn id(&self) -> u32 {
        self.inner.handle.id
    }

    /// Elements of this rank's own part.
    pub fn len(&self) -> usize {
        (self.inner.memory.bytes() / size_of::<T>() as u64) as usize
    }

    /// Returns whether this rank's own part has no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Elements that a rank registered; `None` if there is no such rank.
    pub fn len_on(&self, rank: u32) -> Option<usize> {
        let bytes = self.inner.lengths.get(rank as usize)?;
        Some((bytes / size_of::<T>() as u64) as usize)
    }

    /// Bytes from the part of one rank of the LSA team to that of the next, if they lie at a fixed distance: then a
    /// kernel finds a peer's part without a table. `None` for registered memory, and for devices that cannot do that.
    pub fn stride(&self) -> Option<u64> {
        let stride = u64::from(self.inner.handle.stride) << STRIDE_SHIFT;
        (stride != 0).then_some(stride)
    }

    /// Its memory.
    pub fn memory(&self) -> &MemorySlice {
        &self.inner.memory
    }

    fn check(&self, start: usize, count: usize) -> Result<u64, CommError> {
        let end = start.saturating_add(count);
        if end > self.len() {
            return Err(CommError::OutOfRange { start: start as u64, end: end as u64, length: self.len() as u64 });
        }
        Ok((start * size_of::<T>()) as u64)
    }

    /// Copies `values` to the elements from `start` on.
    ///
    /// # Errors
    /// [`CommError::OutOfRange`], or what the device reports.
    pub fn write(&self, start: usize, values: &[T]) -> Result<(), CommError> {
        let offset = self.check(start, values.len())?;
        Ok(self.inner.memory.write(offset, values)?)
    }

    /// Copies the elements from `start` on to `values`.
    ///
    /// # Errors
    /// [`CommError::OutOfRange`], or what the device reports.
    pub fn read(&self, start: usize, values: &mut [T]) -> Result<(), CommError> {
        let offset = self.check(start, values.len())?;
        Ok(self.inner.memory.read(offset, values)?)
    }

    /// The elements `range`.
    ///
    /// # Errors
    /// [`CommError::OutOfRange`], or what the device reports.
    pub fn read_range(&self, range: Range<usize>) -> Result<Vec<T>, CommError> {
        let count = range.end.saturating_sub(range.start);
        self.check(range.start, count)?;
        let mut values = vec![T::zeroed(); count];
        self.read(range.start, &mut values)?;
        Ok(values)
    }

    /// All elements of this rank's own part.
    ///
    /// # Errors
    /// An error of the device.
    pub fn read_all(&self) -> Result<Vec<T>, CommError> {
        self.read_range(0..self.len())
    }

    /// Stores `value` to all elements of this rank's own part.
    ///
    /// # Errors
    /// An error of the device.
    pub fn fill(&self, value: T) -> Result<(), CommError> {
        self.write(0, &vec![value; self.len()])
    }
}

impl<T: Pod> KernelArg for Window<T> {
    fn argument(&self) -> Argument {
        Argument::plain(self.inner.handle, std::any::type_name::<Self>())
    }
}
