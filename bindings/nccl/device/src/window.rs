// SPDX-License-Identifier: MIT OR Apache-2.0
//! Windows of NCCL: memory that every rank registers, addressed by rank and index.

use crate::handle::WindowHandle;
use crate::shims;
use bytemuck::Pod;
use core::ffi::c_void;
use core::marker::PhantomData;
use gin_device::team::Rank;
use gin_device::{Fault, FaultKind, Operation, sys};

/// A window of elements of type `T`: a kernel parameter that `gin-nccl-host` makes.
///
/// Indices and lengths count elements. `read`, `write` and `add` access the caller's own part; an index out of range
/// ends the grid. They are plain accesses: signals, counters and barriers order them.
#[repr(transparent)]
#[derive(Debug)]
pub struct Window<T> {
    handle: WindowHandle,
    element: PhantomData<*mut T>,
}

impl<T> Clone for Window<T> {
    #[inline(always)]
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Window<T> {}

// Safety: a window is addresses and lengths. Its accesses do not depend on the thread.
unsafe impl<T> Send for Window<T> {}
// Safety: as above.
unsafe impl<T> Sync for Window<T> {}

impl<T: Pod> Window<T> {
    const SIZE: u64 = {
        assert!(size_of::<T>() != 0, "a window's elements have a size");
        size_of::<T>() as u64
    };

    /// Wraps a handle that the host made.
    ///
    /// # Safety
    /// - `gin-nccl-host` made the handle, for this rank and for elements of type `T`. The window stays registered as
    ///   long as the value is used.
    #[inline(always)]
    #[must_use]
    pub const unsafe fn from_handle(handle: WindowHandle) -> Self {
        Self { handle, element: PhantomData }
    }

    /// Returns the number of elements of each rank's part.
    #[inline(always)]
    #[must_use]
    pub fn len(&self) -> usize {
        (self.handle.bytes / Self::SIZE) as usize
    }

    /// Returns whether the window has no elements.
    #[inline(always)]
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the number of elements that `rank` registered.
    #[inline(always)]
    #[must_use]
    pub fn len_on(&self, _rank: Rank) -> usize {
        self.len()
    }

    /// Returns the elements `start .. start + len`, on the rank that an operation addresses.
    ///
    /// The operation checks the range. If `start + len` overflows, the range counts as past the end.
    #[inline(always)]
    #[must_use]
    pub fn range(&self, start: usize, len: usize) -> WindowRange<T> {
        let fits = start <= self.len() && len <= self.len().wrapping_sub(start);
        let (offset, bytes) = ((start as u64).wrapping_mul(Self::SIZE), (len as u64).wrapping_mul(Self::SIZE));
        WindowRange { window: *self, offset, bytes, fits }
    }

    /// Returns element `index`, on the rank that an operation addresses.
    #[inline(always)]
    #[must_use]
    pub fn at(&self, index: usize) -> WindowRange<T> {
        self.range(index, 1)
    }

    /// Returns the address of the caller's own part.
    #[inline(always)]
    #[must_use]
    pub fn local_ptr(&self) -> *mut T {
        self.handle.base as usize as *mut T
    }

    /// Returns the address of `rank`'s part, for loads and stores.
    ///
    /// # Errors
    /// [`FaultKind::NotReachable`] if the rank is outside the LSA team.
    #[inline(always)]
    pub fn peer_ptr(&self, rank: Rank) -> Result<*mut T, Fault> {
        let place = rank.world().wrapping_sub(self.handle.lsa_first);
        if place >= self.handle.lsa_size {
            return Err(Fault::new(FaultKind::NotReachable, Operation::Address).with_peer(rank.world()));
        }
        // Safety: the host made the handle; the rank is in the LSA team.
        Ok(unsafe { shims::lsa_pointer(self.nccl(), 0, place) }.cast())
    }

    #[inline(always)]
    pub(crate) fn nccl(&self) -> *const c_void {
        self.handle.window as usize as *const c_void
    }

    #[inline(always)]
    fn checked(&self, index: usize) -> *mut T {
        if index >= self.len() {
            sys::trap();
        }
        self.local_ptr().wrapping_add(index)
    }

    /// Reads element `index` of the caller's own part. An index out of range ends the grid.
    #[inline(always)]
    #[must_use]
    pub fn read(&self, index: usize) -> T {
        // Safety: the window's memory is valid for its length.
        unsafe { self.checked(index).read() }
    }

    /// Stores element `index` of the caller's own part. An index out of range ends the grid.
    #[inline(always)]
    pub fn write(&self, index: usize, value: T) {
        // Safety: as above.
        unsafe { self.checked(index).write(value) }
    }

    /// Adds to element `index` of the caller's own part; not atomic. An index out of range ends the grid.
    #[inline(always)]
    pub fn add(&self, index: usize, value: T)
    where
        T: core::ops::Add<Output = T>,
    {
        let element = self.checked(index);
        // Safety: as above.
        unsafe { element.write(element.read() + value) }
    }
}

/// Neighbouring elements of a window, on the rank that an operation addresses.
#[derive(Debug)]
pub struct WindowRange<T> {
    pub(crate) window: Window<T>,
    pub(crate) offset: u64,
    pub(crate) bytes: u64,
    /// The range is in the window.
    pub(crate) fits: bool,
}

impl<T> Clone for WindowRange<T> {
    #[inline(always)]
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for WindowRange<T> {}

impl<T: Pod> WindowRange<T> {
    /// Returns the length of the window in bytes.
    #[inline(always)]
    pub(crate) fn limit(&self) -> u64 {
        self.window.handle.bytes
    }

    /// Returns the offset of the first byte past the range; `u64::MAX` if that overflows.
    #[inline(always)]
    pub(crate) fn end(&self) -> u64 {
        self.offset.saturating_add(self.bytes)
    }
}
