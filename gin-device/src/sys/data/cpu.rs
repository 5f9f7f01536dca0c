// SPDX-License-Identifier: MIT OR Apache-2.0
//! The accesses to bulk data on a CPU.

use crate::exec::{switch_point, watch};
use core::sync::atomic::{AtomicU8, AtomicU16, AtomicU32, AtomicU64, Ordering::Relaxed};

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
}

macro_rules! operations {
    ($(
        $shape:ident $name:ident $ty:ident ($class:ident $register:ident) $ptx:literal $operands:literal $op:ident
        $doc:literal;
    )*) => { $(operation! { $shape $name $ty $op $doc })* };
}

macro_rules! operation {
    (load $name:ident $ty:ident load $doc:literal) => {
        #[doc = $doc]
        ///
        /// # Safety
        /// - `address` is valid for reading, in global memory, and a multiple of the size.
        #[inline(always)]
        #[track_caller]
        pub unsafe fn $name(address: *const $ty) -> $ty {
            switch_point();
            watch::read(address);
            // Safety: the caller's promise.
            unsafe { <atomic!($ty)>::from_ptr(address.cast_mut()) }.load(Relaxed)
        }
    };
    (@ store $address:ident) => {
        watch::write($address)
    };
    (@ $op:ident $address:ident) => {
        watch::reduction($address)
    };
    (store $name:ident $ty:ident $op:ident $doc:literal) => {
        #[doc = $doc]
        ///
        /// # Safety
        /// - `address` is valid for writing, in global memory, and a multiple of the size.
        #[inline(always)]
        #[track_caller]
        pub unsafe fn $name(address: *mut $ty, value: $ty) {
            switch_point();
            operation!(@ $op address);
            // Safety: the caller's promise.
            unsafe { <atomic!($ty)>::from_ptr(address) }.$op(value, Relaxed);
        }
    };
}

data_operations!(operations);

/// Loads 16 bytes, relaxed, at system scope; as two words of 8 bytes, each read whole.
///
/// # Safety
/// - `address` is valid for reading, in global memory, and a multiple of 16.
#[inline(always)]
#[track_caller]
pub unsafe fn load_relaxed_sys_pair(address: *const u64) -> (u64, u64) {
    // Safety: the caller's promise.
    unsafe { (load_relaxed_sys_u64(address), load_relaxed_sys_u64(address.wrapping_add(1))) }
}

/// Loads 16 bytes; weak: no thread may write them meanwhile, and earlier writes must have been acquired.
///
/// # Safety
/// - `address` is valid for reading, in global memory, and a multiple of 16.
#[inline(always)]
#[track_caller]
pub unsafe fn load_weak_pair(address: *const u64) -> (u64, u64) {
    // Safety: the caller's promise.
    unsafe { load_relaxed_sys_pair(address) }
}

/// Loads 4 bytes of memory that nobody writes while the grid runs: no thread, peer, NIC or CPU.
///
/// # Safety
/// - `address` is valid for reading, in global memory, and a multiple of 4.
#[inline(always)]
#[track_caller]
pub unsafe fn load_constant_u32(address: *const u32) -> u32 {
    // Safety: the caller's promise.
    unsafe { load_relaxed_sys_u32(address) }
}

/// Loads 16 bytes of memory that nobody writes while the grid runs: no thread, peer, NIC or CPU.
///
/// # Safety
/// - `address` is valid for reading, in global memory, and a multiple of 16.
#[inline(always)]
#[track_caller]
pub unsafe fn load_constant_pair(address: *const u64) -> (u64, u64) {
    // Safety: the caller's promise.
    unsafe { load_relaxed_sys_pair(address) }
}

/// Stores 16 bytes; weak.
///
/// # Safety
/// - `address` is valid for writing, in global memory, and a multiple of 16.
#[inline(always)]
#[track_caller]
pub unsafe fn store_weak_pair(address: *mut u64, low: u64, high: u64) {
    // Safety: the caller's promise.
    unsafe {
        store_weak_u64(address, low);
        store_weak_u64(address.wrapping_add(1), high);
    }
}

/// Adds, rounding to nearest, relaxed, at system scope.
///
/// # Safety
/// - `address` is valid for writing, in global memory, and a multiple of 4.
#[inline(always)]
#[track_caller]
pub unsafe fn red_add_relaxed_sys_f32(address: *mut f32, value: f32) {
    switch_point();
    watch::reduction(address);
    // Safety: the caller's promise.
    let word = unsafe { AtomicU32::from_ptr(address.cast()) };
    let mut old = word.load(Relaxed);
    while let Err(seen) = word.compare_exchange_weak(old, (f32::from_bits(old) + value).to_bits(), Relaxed, Relaxed) {
        old = seen;
    }
}
