// SPDX-License-Identifier: MIT OR Apache-2.0
//! The accesses to shared memory on a CPU.

use crate::exec::{switch_point, watch};
use core::sync::atomic::{AtomicI32, AtomicI64, AtomicU8, AtomicU16, AtomicU32, AtomicU64, Ordering::Relaxed};

/// An address in the block's shared memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Address(*mut u8);

impl Address {
    /// Wraps the address of a byte of shared memory.
    #[inline(always)]
    #[must_use]
    pub const fn new(address: *mut u8) -> Self {
        Self(address)
    }

    /// Returns the address `bytes` bytes further on.
    #[inline(always)]
    #[must_use]
    pub const fn at(self, bytes: u32) -> Self {
        Self(self.0.wrapping_add(bytes as usize))
    }

    /// Returns the first address from there on that is a multiple of `bytes`, a power of 2.
    #[inline(always)]
    #[must_use]
    pub fn next_multiple_of(self, bytes: u32) -> Self {
        self.at(self.bits().wrapping_neg() as u32 & (bytes - 1))
    }

    pub(in crate::sys) const fn pointer(self) -> *mut u8 {
        self.0
    }

    pub(in crate::sys) fn bits(self) -> u64 {
        self.0.expose_provenance() as u64
    }

    pub(in crate::sys) fn from_bits(bits: u64) -> Self {
        Self(core::ptr::with_exposed_provenance_mut(bits as usize))
    }
}

macro_rules! atomic {
    (u8) => {
        AtomicU8
    };
    (u16) => {
        AtomicU16
    };
    (u32) => {
        AtomicU32
    };
    (u64) => {
        AtomicU64
    };
    (i32) => {
        AtomicI32
    };
    (i64) => {
        AtomicI64
    };
}

macro_rules! operations {
    ($(
        $shape:ident $name:ident $ty:ident ($class:ident $register:ident) $ptx:literal $operands:literal $op:ident
        $doc:literal;
    )*) => { $(operation! { $shape $name $ty $op $doc })* };
}

macro_rules! operation {
    (load $name:ident $ty:ident $op:ident $doc:literal) => {
        #[doc = $doc]
        ///
        /// # Safety
        /// - The block has shared memory there, and `address` is a multiple of the size.
        #[inline(always)]
        #[track_caller]
        pub unsafe fn $name(address: Address) -> $ty {
            switch_point();
            watch::read(address.0.cast::<$ty>());
            // Safety: the caller's promise.
            unsafe { <atomic!($ty)>::from_ptr(address.0.cast()) }.$op(Relaxed)
        }
    };
    (store $name:ident $ty:ident $op:ident $doc:literal) => {
        #[doc = $doc]
        ///
        /// # Safety
        /// - The block has shared memory there, and `address` is a multiple of the size.
        #[inline(always)]
        #[track_caller]
        pub unsafe fn $name(address: Address, value: $ty) {
            switch_point();
            watch::write(address.0.cast::<$ty>());
            // Safety: the caller's promise.
            unsafe { <atomic!($ty)>::from_ptr(address.0.cast()) }.$op(value, Relaxed)
        }
    };
    (rmw $name:ident $ty:ident $op:ident $doc:literal) => {
        #[doc = $doc]
        ///
        /// # Safety
        /// - The block has shared memory there, and `address` is a multiple of the size.
        #[inline(always)]
        #[track_caller]
        pub unsafe fn $name(address: Address, value: $ty) -> $ty {
            switch_point();
            watch::reduction(address.0.cast::<$ty>());
            // Safety: the caller's promise.
            unsafe { <atomic!($ty)>::from_ptr(address.0.cast()) }.$op(value, Relaxed)
        }
    };
    (cas $name:ident $ty:ident $op:ident $doc:literal) => {
        #[doc = $doc]
        ///
        /// # Safety
        /// - The block has shared memory there, and `address` is a multiple of the size.
        #[inline(always)]
        #[track_caller]
        pub unsafe fn $name(address: Address, expected: $ty, new: $ty) -> $ty {
            switch_point();
            watch::reduction(address.0.cast::<$ty>());
            // Safety: the caller's promise.
            match unsafe { <atomic!($ty)>::from_ptr(address.0.cast()) }.$op(expected, new, Relaxed, Relaxed) {
                Ok(seen) | Err(seen) => seen,
            }
        }
    };
}

shared_operations!(operations);

/// Loads 16 bytes; weak.
///
/// # Safety
/// - The block has shared memory there, and `address` is a multiple of 16.
#[inline(always)]
#[track_caller]
pub unsafe fn load_weak_pair(address: Address) -> (u64, u64) {
    // Safety: the caller's promise.
    unsafe { (load_weak_u64(address), load_weak_u64(address.at(8))) }
}

/// Stores 16 bytes; weak.
///
/// # Safety
/// - The block has shared memory there, and `address` is a multiple of 16.
#[inline(always)]
#[track_caller]
pub unsafe fn store_weak_pair(address: Address, low: u64, high: u64) {
    // Safety: the caller's promise.
    unsafe {
        store_weak_u64(address, low);
        store_weak_u64(address.at(8), high);
    }
}
