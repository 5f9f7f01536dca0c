// SPDX-License-Identifier: MIT OR Apache-2.0
//! Windows: memory that every rank registers, addressed by rank and index.
//!
//! A window may have another length on each rank. When an operation is issued, it checks the range against the length
//! that the *addressed* rank registered. If all ranks registered the same length, the handle has that length and the
//! check reads no memory.

use crate::fault::{self, Fault};
use crate::sys;
use crate::team::Rank;
use bytemuck::Pod;
use core::marker::PhantomData;
use gin_abi::handle::{STRIDE_SHIFT, WINDOW_SIGNALS};
use gin_abi::{FaultKind, FaultSubject, Operation, WindowData, WindowHandle};

/// A window of elements of type `T`: a kernel parameter that the host makes.
///
/// Indices and lengths count elements. `read`, `write` and `add` access the caller's own part and check the index as a
/// slice does: an index out of range ends the grid. On the virtual GPU the error names index, length and source line.
/// They are plain accesses: signals, counters and barriers order them, and no other thread may write the element
/// meanwhile.
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

/// Returns the length in bytes of a window on `rank`. The host made the handle.
#[inline(always)]
pub(crate) fn bytes_on(handle: &WindowHandle, rank: Rank) -> u64 {
    let data = handle.data as usize as *const WindowData;
    // Safety: a handle's table entry is valid while the window is registered. Its table of lengths has an entry for
    // each rank. Both are constant.
    unsafe {
        let lengths = sys::read_word(&raw const (*data).lengths);
        sys::read_word((lengths as usize as *const u64).wrapping_add(rank.world() as usize))
    }
}

/// Returns the address of `rank`'s part of a window from the table; 0 if loads and stores do not reach it. The host
/// made the handle.
#[inline(always)]
fn peer_entry(handle: &WindowHandle, rank: Rank) -> u64 {
    let data = handle.data as usize as *const WindowData;
    // Safety: as above. The table of peers, if there is one, has an entry for each rank too.
    unsafe {
        match sys::read_word(&raw const (*data).peers) {
            0 => 0,
            peers => sys::read_word((peers as usize as *const u64).wrapping_add(rank.world() as usize)),
        }
    }
}

/// Returns the address of `rank`'s part of a window whose parts have a fixed distance.
#[inline(always)]
fn peer_place(handle: &WindowHandle, rank: Rank) -> u64 {
    let distance = rank.world().wrapping_sub(sys::narrow(handle.rank)).wrapping_mul(sys::narrow(handle.stride));
    handle.base.wrapping_add(u64::from(distance) << STRIDE_SHIFT)
}

/// Returns the address of `rank`'s part of a window. Loads and stores reach `rank`.
#[inline(always)]
fn peer_address(handle: &WindowHandle, rank: Rank) -> u64 {
    if sys::narrow(handle.stride) != 0 { peer_place(handle, rank) } else { peer_entry(handle, rank) }
}

/// Returns whether a range that ends at byte `end` is in `rank`'s part of a window. The host made the handle.
#[inline(always)]
pub(crate) fn reaches(handle: &WindowHandle, rank: Rank, end: u64) -> bool {
    end <= handle.least_length || end <= bytes_on(handle, rank)
}

impl<T: Pod> Window<T> {
    const SIZE: u64 = {
        assert!(size_of::<T>() != 0, "a window's elements have a size");
        size_of::<T>() as u64
    };

    /// Wraps a handle that the host made.
    ///
    /// # Safety
    /// - The host library made the handle, for this rank and for elements of type `T`. The window stays registered as
    ///   long as the value is used.
    #[inline(always)]
    #[must_use]
    pub const unsafe fn from_handle(handle: WindowHandle) -> Self {
        Self { handle, element: PhantomData }
    }

    /// Returns the handle.
    #[inline(always)]
    #[must_use]
    pub const fn handle(&self) -> &WindowHandle {
        &self.handle
    }

    /// Returns the length of the caller's own part in bytes.
    #[inline(always)]
    fn own_bytes(&self) -> u64 {
        self.handle.own_length
    }

    /// Returns the length on `rank` in bytes.
    #[inline(always)]
    fn bytes_on(&self, rank: Rank) -> u64 {
        bytes_on(&self.handle, rank)
    }

    /// Returns the number of elements of the caller's own part.
    #[inline(always)]
    #[must_use]
    pub fn len(&self) -> usize {
        (self.own_bytes() / Self::SIZE) as usize
    }

    /// Returns whether the caller's own part has no elements.
    #[inline(always)]
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the number of elements that `rank` registered.
    #[inline(always)]
    #[must_use]
    pub fn len_on(&self, rank: Rank) -> usize {
        (self.bytes_on(rank) / Self::SIZE) as usize
    }

    /// Returns the size of `elements` elements in bytes, and whether it overflows.
    #[inline(always)]
    fn bytes(elements: usize) -> (u64, bool) {
        let elements = elements as u64;
        let max = const { u64::MAX / Self::SIZE };
        // Most sizes are powers of two; then the upper half of the number decides.
        let overflows = if const { Self::SIZE.is_power_of_two() && Self::SIZE <= 1 << 32 } {
            sys::narrow((elements >> 32) as u32) > (max >> 32) as u32
        } else {
            elements > max
        };
        (elements.wrapping_mul(Self::SIZE), overflows)
    }

    /// Returns the elements `start .. start + len`, on the rank that an operation addresses.
    ///
    /// The operation checks the range. If `start + len` overflows, the range counts as past the end.
    #[inline(always)]
    #[must_use]
    pub fn range(&self, start: usize, len: usize) -> WindowRange<T> {
        let (offset, offset_too_large) = Self::bytes(start);
        let (bytes, bytes_too_large) = Self::bytes(len);
        WindowRange { window: *self, offset, bytes, overflowed: offset_too_large | bytes_too_large }
    }

    /// Returns element `index`, on the rank that an operation addresses.
    #[inline(always)]
    #[must_use]
    pub fn at(&self, index: usize) -> WindowRange<T> {
        self.range(index, 1)
    }

    /// Returns a pointer to element `index`, which names the same place on every rank.
    #[inline(always)]
    #[must_use]
    pub fn symmetric(&self, index: usize) -> SymPtr<T> {
        SymPtr { window: *self, index: index as u64 }
    }

    /// Returns `len` elements of another type from byte `offset` on.
    ///
    /// # Errors
    /// [`FaultKind::Misaligned`] if `offset` is not a multiple of the other type's alignment, or the memory is not
    /// aligned for it; [`FaultKind::OutOfRange`] if `offset` is past the end of the caller's own part.
    #[inline(always)]
    #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
    pub fn range_as<U: Pod>(&self, offset: u64, len: usize) -> Result<WindowRange<U>, Fault> {
        let align = align_of::<U>() as u64;
        if !offset.is_multiple_of(align) || !self.handle.base.is_multiple_of(align) {
            let fault = fault::new(FaultKind::Misaligned, Operation::Address);
            return Err(fault.with_values(FaultSubject::Window { id: self.handle.id, offset }, align, offset));
        }
        let window = Window::<U> { handle: self.handle, element: PhantomData };
        let (bytes, too_large) = Window::<U>::bytes(len);
        Ok(WindowRange { window, offset, bytes, overflowed: too_large })
    }

    /// Returns whether signals can raise words of the window.
    #[inline(always)]
    #[must_use]
    pub fn takes_signals(&self) -> bool {
        self.handle.flags & WINDOW_SIGNALS != 0
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
    #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
    pub fn peer_ptr(&self, rank: Rank) -> Result<*mut T, Fault> {
        // `lsa_reach` is 0 unless parts have a fixed distance. The table has no address for a rank outside the team.
        let near = rank.world().wrapping_sub(sys::narrow(self.handle.lsa_first)) < sys::narrow(self.handle.lsa_reach);
        let address = if near { peer_place(&self.handle, rank) } else { peer_entry(&self.handle, rank) };
        if address == 0 {
            return Err(fault::new(FaultKind::NotReachable, Operation::Address).with_peer(rank.world()));
        }
        Ok(address as usize as *mut T)
    }

    #[inline(always)]
    #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
    fn checked(&self, index: usize) -> *mut T {
        if index >= self.len() {
            #[cfg(not(target_arch = "nvptx64"))]
            panic!(
                "index {index} is past the end of window {}, which has {} elements here",
                self.handle.id,
                self.len()
            );
            #[cfg(target_arch = "nvptx64")]
            sys::trap();
        }
        self.local_ptr().wrapping_add(index)
    }

    /// Reads element `index` of the caller's own part. An index out of range ends the grid.
    #[inline(always)]
    #[must_use]
    #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
    pub fn read(&self, index: usize) -> T {
        let element = self.checked(index);
        watch!(read(element));
        // Safety: the window's memory is valid for its length.
        unsafe { element.read() }
    }

    /// Stores element `index` of the caller's own part. An index out of range ends the grid.
    #[inline(always)]
    #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
    pub fn write(&self, index: usize, value: T) {
        let element = self.checked(index);
        watch!(write(element));
        // Safety: as above.
        unsafe { element.write(value) }
    }

    /// Adds to element `index` of the caller's own part; not atomic. An index out of range ends the grid.
    #[inline(always)]
    #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
    pub fn add(&self, index: usize, value: T)
    where
        T: core::ops::Add<Output = T>,
    {
        let element = self.checked(index);
        watch!(read(element));
        watch!(write(element));
        // Safety: as above.
        unsafe { element.write(element.read() + value) }
    }

    /// Reads element `index` of the caller's own part without a check.
    ///
    /// # Safety
    /// - `index < self.len()`.
    #[inline(always)]
    #[must_use]
    #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
    pub unsafe fn read_unchecked(&self, index: usize) -> T {
        watch!(read(self.local_ptr().wrapping_add(index)));
        // Safety: the caller's promise.
        unsafe { self.local_ptr().add(index).read() }
    }

    /// Stores element `index` of the caller's own part without a check.
    ///
    /// # Safety
    /// - `index < self.len()`.
    #[inline(always)]
    #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
    pub unsafe fn write_unchecked(&self, index: usize, value: T) {
        watch!(write(self.local_ptr().wrapping_add(index)));
        // Safety: the caller's promise.
        unsafe { self.local_ptr().add(index).write(value) }
    }
}

/// Neighbouring elements of a window, on the rank that an operation addresses.
#[derive(Debug)]
pub struct WindowRange<T> {
    window: Window<T>,
    offset: u64,
    bytes: u64,
    /// Offset or length overflowed.
    overflowed: bool,
}

impl<T> Clone for WindowRange<T> {
    #[inline(always)]
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for WindowRange<T> {}

impl<T: Pod> WindowRange<T> {
    /// Returns the offset in bytes; `u64::MAX` if offset or length overflowed.
    #[inline(always)]
    #[must_use]
    pub const fn offset(&self) -> u64 {
        if self.overflowed { u64::MAX } else { self.offset }
    }

    /// Returns the length in bytes; `u64::MAX` if offset or length overflowed.
    #[inline(always)]
    #[must_use]
    pub const fn bytes(&self) -> u64 {
        if self.overflowed { u64::MAX } else { self.bytes }
    }

    /// Returns the same memory as bytes.
    #[inline(always)]
    pub(crate) const fn as_bytes(self) -> WindowRange<u8> {
        let window = Window { handle: self.window.handle, element: PhantomData };
        WindowRange { window, offset: self.offset, bytes: self.bytes, overflowed: self.overflowed }
    }

    /// Returns offset and length in bytes of a range that was checked.
    #[inline(always)]
    pub(crate) const fn place(&self) -> (u64, u64) {
        (self.offset, self.bytes)
    }

    /// Returns the address in the caller's own part of a range that was checked.
    #[inline(always)]
    pub(crate) const fn address(&self) -> u64 {
        self.window.handle.base + self.offset
    }

    /// Returns the address in `rank`'s part of a range that was checked. Loads and stores reach `rank`.
    #[inline(always)]
    pub(crate) fn address_on(&self, rank: Rank) -> u64 {
        peer_address(&self.window.handle, rank).wrapping_add(self.offset)
    }

    #[inline(always)]
    pub(crate) fn window_id(&self) -> u32 {
        sys::narrow(self.window.handle.id)
    }

    /// Returns whether the range is in `rank`'s part.
    #[inline(always)]
    pub(crate) fn fits_on(&self, rank: Rank) -> bool {
        let (end, overflows) = self.offset.overflowing_add(self.bytes);
        !(self.overflowed | overflows) & reaches(&self.window.handle, rank, end)
    }

    /// Returns whether the range is in the caller's own part.
    #[inline(always)]
    pub(crate) fn fits_own(&self) -> bool {
        let (end, overflows) = self.offset.overflowing_add(self.bytes);
        !(self.overflowed | overflows) & (end <= self.window.own_bytes())
    }

    /// Returns the offset of the first byte past the range; `u64::MAX` if it overflows.
    #[inline(always)]
    pub(crate) fn end(&self) -> u64 {
        let (end, overflows) = self.offset.overflowing_add(self.bytes);
        if self.overflowed | overflows { u64::MAX } else { end }
    }

    /// Returns the length of the caller's own part in bytes.
    #[inline(always)]
    pub(crate) fn own_length(&self) -> u64 {
        self.window.own_bytes()
    }

    /// Returns the length of the window on `rank` in bytes.
    #[inline(always)]
    pub(crate) fn length_on(&self, rank: Rank) -> u64 {
        self.window.bytes_on(rank)
    }

    /// Returns what a fault of the range concerns.
    #[inline(always)]
    pub(crate) fn subject(&self) -> FaultSubject {
        FaultSubject::Window { id: self.window_id(), offset: self.offset() }
    }

    /// Checks the range against the length that the caller registered.
    ///
    /// # Errors
    /// [`FaultKind::OutOfRange`] with the length in bytes and the end of the range.
    #[inline(always)]
    #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
    pub fn check_own(&self) -> Result<(), Fault> {
        if self.fits_own() {
            return Ok(());
        }
        let fault = fault::new(FaultKind::OutOfRange, Operation::Address);
        Err(fault.with_values(self.subject(), self.own_length(), self.end()))
    }

    /// Checks the range against the length that `rank` registered.
    ///
    /// # Errors
    /// [`FaultKind::OutOfRange`] with the length in bytes and the end of the range.
    #[inline(always)]
    #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
    pub fn check_on(&self, rank: Rank) -> Result<(), Fault> {
        if self.fits_on(rank) {
            return Ok(());
        }
        let fault = fault::new(FaultKind::OutOfRange, Operation::Address).with_peer(rank.world());
        Err(fault.with_values(self.subject(), self.length_on(rank), self.end()))
    }
}

/// A pointer that names the same place of a window on every rank.
///
/// Arithmetic counts elements; uses of the pointer check the result. Two pointers are equal if they name the same
/// element of the same window.
///
/// ```
/// # use bytemuck::Zeroable;
/// # use gin_abi::WindowHandle;
/// # use gin_device::prelude::*;
/// # let handle = WindowHandle { base: 0x1000, own_length: 64, ..WindowHandle::zeroed() };
/// # // Safety: no access is made through the window.
/// # let window: Window<u32> = unsafe { Window::from_handle(handle) };
/// // A window of 16 elements.
/// let pointer = window.symmetric(5);
/// assert_eq!(pointer, window.symmetric(2) + 3);
/// assert_eq!(pointer.range(2).offset(), 20);
/// assert_eq!((pointer + 11).local_ptr().unwrap_err().kind(), FaultKind::OutOfRange);
/// ```
#[derive(Debug)]
pub struct SymPtr<T> {
    window: Window<T>,
    index: u64,
}

impl<T> Clone for SymPtr<T> {
    #[inline(always)]
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for SymPtr<T> {}

impl<T> PartialEq for SymPtr<T> {
    #[inline(always)]
    fn eq(&self, other: &Self) -> bool {
        self.window.handle.id == other.window.handle.id && self.index == other.index
    }
}

impl<T> Eq for SymPtr<T> {}

impl<T> core::ops::Add<usize> for SymPtr<T> {
    type Output = Self;

    #[inline(always)]
    fn add(self, elements: usize) -> Self {
        Self { window: self.window, index: self.index.saturating_add(elements as u64) }
    }
}

impl<T> core::ops::Sub<usize> for SymPtr<T> {
    type Output = Self;

    /// Returns an index that no window has if the result would be before the start of the window.
    #[inline(always)]
    fn sub(self, elements: usize) -> Self {
        let index = if elements as u64 <= self.index { self.index - elements as u64 } else { u64::MAX };
        Self { window: self.window, index }
    }
}

impl<T: Pod> SymPtr<T> {
    /// Returns the window that it points into.
    #[inline(always)]
    #[must_use]
    pub const fn window(&self) -> Window<T> {
        self.window
    }

    /// Returns the index of the element that it points to.
    #[inline(always)]
    #[must_use]
    pub const fn index(&self) -> u64 {
        self.index
    }

    /// Returns the `len` elements from this one on.
    #[inline(always)]
    #[must_use]
    pub fn range(&self, len: usize) -> WindowRange<T> {
        self.window.range(self.index as usize, len)
    }

    /// Returns its address in the caller's own part.
    ///
    /// # Errors
    /// [`FaultKind::OutOfRange`] if it points past the end.
    #[inline(always)]
    #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
    pub fn local_ptr(&self) -> Result<*mut T, Fault> {
        self.range(1).check_own()?;
        Ok(self.window.local_ptr().wrapping_add(self.index as usize))
    }

    /// Returns its address in `rank`'s part.
    ///
    /// # Errors
    /// [`FaultKind::OutOfRange`] if it points past the end there, [`FaultKind::NotReachable`] if the rank is outside
    /// the LSA team.
    #[inline(always)]
    #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
    pub fn peer_ptr(&self, rank: Rank) -> Result<*mut T, Fault> {
        self.range(1).check_on(rank)?;
        Ok(self.window.peer_ptr(rank)?.wrapping_add(self.index as usize))
    }
}
