// SPDX-License-Identifier: MIT OR Apache-2.0
//! Shared memory of a block.
//!
//! | kind | made by | length |
//! | --- | --- | --- |
//! | static | [`shared!`](crate::shared!) at module level; one copy per block | that of the declaration |
//! | dynamic | the launch; see [`dynamic_array`] and [`dynamic`] | as the launch asked |
//!
//! A GPU initialises neither.
//!
//! A [`SharedArray`] has loads, stores and atomics by index. They name the shared state space, so they take one
//! instruction each (`LDS`, `STS`, `ATOMS`). Threads order loads and stores with barriers; the atomics are relaxed, at
//! block scope.
//!
//! ```
//! use gin_device::prelude::*;
//!
//! shared! { static BINS: [u32; 256]; }
//!
//! /// Counts bytes by all threads of the block.
//! fn count(bytes: Window<u8>) {
//!     let bins = BINS.array();
//!     for i in Block.stripe(bins.len()) {
//!         bins.write(i, 0);
//!     }
//!     Block.sync();
//!     for i in Block.stripe(bytes.len()) {
//!         bins.add(bytes.read(i) as usize, 1);
//!     }
//!     Block.sync();
//! }
//! ```
//!
//! A declaration also has a plain pointer. Accesses through it are generic loads and stores.
//!
//! ```
//! gin_device::shared! { static TILE: [f32; 256]; }
//!
//! /// Returns the first element of the block's tile.
//! fn tile() -> *mut f32 {
//!     TILE.as_mut_ptr().cast()
//! }
//! ```

use crate::sys::shared::{self as access, Address};
use bytemuck::Pod;
#[cfg(target_arch = "nvptx64")]
use core::arch::{asm, global_asm};
use core::marker::PhantomData;

#[cfg(target_arch = "nvptx64")]
global_asm!(".extern .shared .align 16 .b8 gin_dynamic_shared[];");

/// An array in the block's shared memory: [`shared!`](crate::shared!) and [`dynamic_array`] make it.
///
/// An element has 1, 2, 4, 8 or 16 bytes and is aligned to its size; others do not compile. An index out of range ends
/// the grid. No access is undefined behaviour, but without a barrier a load may see an earlier value than a store of
/// another thread, or, for elements of 16 bytes, one half of each.
///
/// ```compile_fail
/// use gin_device::prelude::*;
/// // A GPU cannot load 12 bytes at once.
/// shared! { static POINTS: [[f32; 3]; 8]; }
/// let first = POINTS.array().read(0);
/// ```
#[derive(Debug)]
pub struct SharedArray<T> {
    base: Address,
    len: usize,
    element: PhantomData<*mut T>,
}

impl<T> Clone for SharedArray<T> {
    #[inline(always)]
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for SharedArray<T> {}

impl<T: Pod> SharedArray<T> {
    const SIZE: usize = {
        assert!(
            matches!(size_of::<T>(), 1 | 2 | 4 | 8 | 16) && align_of::<T>() == size_of::<T>(),
            "an element of shared memory has 1, 2, 4, 8 or 16 bytes and is aligned to its size"
        );
        size_of::<T>()
    };

    /// Wraps `len` elements at `base`.
    ///
    /// # Safety
    /// - The block's shared memory has them there, as long as the value is used, and `base` is a multiple of the
    ///   element's size.
    #[inline(always)]
    #[must_use]
    pub const unsafe fn new(base: Address, len: usize) -> Self {
        Self { base, len, element: PhantomData }
    }

    /// Returns the number of elements.
    #[inline(always)]
    #[must_use]
    pub const fn len(&self) -> usize {
        self.len
    }

    /// Returns whether there are no elements.
    #[inline(always)]
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the address of the first element, for the accesses of [`crate::sys::shared`].
    #[inline(always)]
    #[must_use]
    pub const fn address(&self) -> Address {
        self.base
    }

    /// Returns the address of element `index`. An index out of range ends the grid.
    #[inline(always)]
    #[must_use]
    #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
    pub fn address_of(&self, index: usize) -> Address {
        self.checked(index)
    }

    #[inline(always)]
    #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
    fn checked(&self, index: usize) -> Address {
        if index >= self.len {
            #[cfg(not(target_arch = "nvptx64"))]
            panic!("index {index} is past the end of shared memory, which has {} elements here", self.len);
            #[cfg(target_arch = "nvptx64")]
            crate::sys::trap();
        }
        self.base.at((index * Self::SIZE) as u32)
    }

    /// Loads element `index`; weak.
    #[inline(always)]
    #[must_use]
    #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
    pub fn read(&self, index: usize) -> T {
        let address = self.checked(index);
        // Safety: the element is in the array and aligned to its size. Types of one size with any bits are converted.
        unsafe {
            match Self::SIZE {
                1 => core::mem::transmute_copy(&access::load_weak_u8(address)),
                2 => core::mem::transmute_copy(&access::load_weak_u16(address)),
                4 => core::mem::transmute_copy(&access::load_weak_u32(address)),
                8 => core::mem::transmute_copy(&access::load_weak_u64(address)),
                _ => {
                    let (low, high) = access::load_weak_pair(address);
                    core::mem::transmute_copy(&[low, high])
                }
            }
        }
    }

    /// Stores element `index`; weak.
    #[inline(always)]
    #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
    pub fn write(&self, index: usize, value: T) {
        let address = self.checked(index);
        // Safety: as above.
        unsafe {
            match Self::SIZE {
                1 => access::store_weak_u8(address, core::mem::transmute_copy(&value)),
                2 => access::store_weak_u16(address, core::mem::transmute_copy(&value)),
                4 => access::store_weak_u32(address, core::mem::transmute_copy(&value)),
                8 => access::store_weak_u64(address, core::mem::transmute_copy(&value)),
                _ => {
                    let [low, high]: [u64; 2] = core::mem::transmute_copy(&value);
                    access::store_weak_pair(address, low, high);
                }
            }
        }
    }
}

/// An integer that shared memory has atomics for: `u32`, `i32`, `u64`, `i64`.
///
/// On a GPU those of 64 bits are loops, except `exchange` and `compare_exchange`.
pub trait SharedInteger: Pod + sealed::Sealed {
    #[doc(hidden)]
    unsafe fn add(address: Address, value: Self) -> Self;
    #[doc(hidden)]
    unsafe fn min(address: Address, value: Self) -> Self;
    #[doc(hidden)]
    unsafe fn max(address: Address, value: Self) -> Self;
    #[doc(hidden)]
    unsafe fn or(address: Address, value: Self) -> Self;
    #[doc(hidden)]
    unsafe fn and(address: Address, value: Self) -> Self;
    #[doc(hidden)]
    unsafe fn exchange(address: Address, value: Self) -> Self;
    #[doc(hidden)]
    unsafe fn compare_exchange(address: Address, expected: Self, new: Self) -> Self;
}

mod sealed {
    pub trait Sealed {}
}

macro_rules! shared_integer {
    ($ty:ident $bits:ident: $add:ident $min:ident $max:ident $or:ident $and:ident $exchange:ident $cas:ident) => {
        impl sealed::Sealed for $ty {}

        impl SharedInteger for $ty {
            shared_integer! { @one $ty $bits: add $add, or $or, and $and, exchange $exchange }
            shared_integer! { @one $ty $ty: min $min, max $max }

            #[inline(always)]
            unsafe fn compare_exchange(address: Address, expected: Self, new: Self) -> Self {
                // Safety: the caller's promise.
                unsafe { access::$cas(address, expected as $bits, new as $bits) as $ty }
            }
        }
    };
    (@one $ty:ident $bits:ident: $($name:ident $access:ident),*) => {
        $(
            #[inline(always)]
            unsafe fn $name(address: Address, value: Self) -> Self {
                // Safety: the caller's promise.
                unsafe { access::$access(address, value as $bits) as $ty }
            }
        )*
    };
}

shared_integer! { u32 u32: add_relaxed_cta_u32 min_relaxed_cta_u32 max_relaxed_cta_u32 or_relaxed_cta_u32
and_relaxed_cta_u32 exchange_relaxed_cta_u32 cas_relaxed_cta_u32 }
shared_integer! { i32 u32: add_relaxed_cta_u32 min_relaxed_cta_i32 max_relaxed_cta_i32 or_relaxed_cta_u32
and_relaxed_cta_u32 exchange_relaxed_cta_u32 cas_relaxed_cta_u32 }
shared_integer! { u64 u64: add_relaxed_cta_u64 min_relaxed_cta_u64 max_relaxed_cta_u64 or_relaxed_cta_u64
and_relaxed_cta_u64 exchange_relaxed_cta_u64 cas_relaxed_cta_u64 }
shared_integer! { i64 u64: add_relaxed_cta_u64 min_relaxed_cta_i64 max_relaxed_cta_i64 or_relaxed_cta_u64
and_relaxed_cta_u64 exchange_relaxed_cta_u64 cas_relaxed_cta_u64 }

/// Atomic read-modify-writes. They are relaxed, at block scope: they order no other access.
impl<T: SharedInteger> SharedArray<T> {
    /// Adds to element `index`, modulo the type's range. Returns the value before.
    #[inline(always)]
    #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
    pub fn add(&self, index: usize, value: T) -> T {
        called!(here);
        // Safety: the element is in the array and aligned to its size, here and below.
        unsafe { T::add(self.checked(index), value) }
    }

    /// Stores `value` into element `index` if it is less. Returns the value before.
    #[inline(always)]
    #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
    pub fn min(&self, index: usize, value: T) -> T {
        called!(here);
        unsafe { T::min(self.checked(index), value) }
    }

    /// Stores `value` into element `index` if it is greater. Returns the value before.
    #[inline(always)]
    #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
    pub fn max(&self, index: usize, value: T) -> T {
        called!(here);
        unsafe { T::max(self.checked(index), value) }
    }

    /// Sets the bits of element `index` that are 1 in `value`. Returns the value before.
    #[inline(always)]
    #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
    pub fn or(&self, index: usize, value: T) -> T {
        called!(here);
        unsafe { T::or(self.checked(index), value) }
    }

    /// Clears the bits of element `index` that are 0 in `value`. Returns the value before.
    #[inline(always)]
    #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
    pub fn and(&self, index: usize, value: T) -> T {
        called!(here);
        unsafe { T::and(self.checked(index), value) }
    }

    /// Stores `value` into element `index`. Returns the value before.
    #[inline(always)]
    #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
    pub fn exchange(&self, index: usize, value: T) -> T {
        called!(here);
        unsafe { T::exchange(self.checked(index), value) }
    }

    /// Stores `new` into element `index` if `expected` is there. Returns the value before, which is `expected` if and
    /// only if it stored.
    #[inline(always)]
    #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
    pub fn compare_exchange(&self, index: usize, expected: T, new: T) -> T {
        called!(here);
        unsafe { T::compare_exchange(self.checked(index), expected, new) }
    }
}

/// A declaration by `shared!`.
#[doc(hidden)]
pub trait Declaration: Copy {
    /// The declared type.
    type Value;
}

/// Returns `len` elements of the block's dynamic shared memory from byte `offset` on.
///
/// An offset that is not a multiple of the element's size, or an end past [`dynamic_bytes`], ends the grid. Arrays may
/// overlap.
#[inline(always)]
#[must_use]
#[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
pub fn dynamic_array<T: Pod>(offset: usize, len: usize) -> SharedArray<T> {
    let size = SharedArray::<T>::SIZE;
    let (bytes, all) = (len.wrapping_mul(size), dynamic_bytes());
    // A length of more than 2^32 elements would overflow; no GPU has as many bytes.
    if !offset.is_multiple_of(size) || len > u32::MAX as usize || offset > all || bytes > all - offset {
        #[cfg(not(target_arch = "nvptx64"))]
        panic!("{len} elements of {size} bytes do not fit at byte {offset} of dynamic shared memory of {all} bytes");
        #[cfg(target_arch = "nvptx64")]
        crate::sys::trap();
    }
    // Safety: the bytes are in the dynamic shared memory, which is aligned to 16 bytes.
    unsafe { SharedArray::new(dynamic_address().at(offset as u32), len) }
}

#[inline(always)]
fn dynamic_address() -> Address {
    #[cfg(target_arch = "nvptx64")]
    {
        let address: u32;
        // Safety: takes the address of a variable.
        unsafe {
            asm!(
                "mov.u32 {a}, gin_dynamic_shared;",
                a = out(reg32) address, options(pure, nomem, nostack, preserves_flags),
            );
        }
        Address::new(address)
    }
    #[cfg(not(target_arch = "nvptx64"))]
    Address::new(dynamic())
}

/// Returns the address of the block's dynamic shared memory: [`dynamic_bytes`] bytes, aligned to 16.
#[inline(always)]
pub fn dynamic() -> *mut u8 {
    #[cfg(target_arch = "nvptx64")]
    {
        let address: u64;
        // Safety: takes the address of a variable.
        unsafe {
            asm!(
                "{{ .reg .u64 gin_t; mov.u64 gin_t, gin_dynamic_shared; cvta.shared.u64 {p}, gin_t; }}",
                p = out(reg64) address, options(nomem, nostack, preserves_flags),
            );
        }
        address as usize as *mut u8
    }
    #[cfg(not(target_arch = "nvptx64"))]
    match crate::exec::executor() {
        Some(executor) => (executor.dynamic_shared)().0,
        None => core::ptr::NonNull::<u128>::dangling().as_ptr().cast(),
    }
}

/// Returns the size of the block's dynamic shared memory in bytes.
#[inline(always)]
pub fn dynamic_bytes() -> usize {
    #[cfg(target_arch = "nvptx64")]
    {
        let bytes: u32;
        // Safety: reads a special register.
        unsafe {
            asm!(
                "mov.u32 {b}, %dynamic_smem_size;",
                b = out(reg32) bytes, options(nomem, nostack, preserves_flags),
            );
        }
        bytes as usize
    }
    #[cfg(not(target_arch = "nvptx64"))]
    crate::exec::executor().map_or(0, |executor| (executor.dynamic_shared)().1)
}

/// Returns the block's copy of a declaration by `shared!`, on a CPU. `key` is unique to the declaration.
#[cfg(not(target_arch = "nvptx64"))]
#[doc(hidden)]
pub fn cpu(key: usize, bytes: usize, align: usize) -> *mut u8 {
    match crate::exec::executor() {
        Some(executor) => (executor.shared)(crate::exec::SharedKey { key, bytes, align }),
        None => panic!("shared memory needs an executor: launch the kernel on the virtual GPU"),
    }
}
