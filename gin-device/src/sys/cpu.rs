// SPDX-License-Identifier: MIT OR Apache-2.0
//! The word operations on a CPU: standard atomics. Each access is a switch point of the executor.
//!
//! There are no scopes here: every operation has the scope of the process. So a run on a CPU does not find a scope that
//! is too narrow; only a look at the PTX or a run on hardware does.

use crate::exec::watch::{self, Access};
use crate::exec::{executor, switch_point};
use core::panic::Location;
use core::sync::atomic::{AtomicU64, Ordering, fence};

#[inline(always)]
fn word<'a>(address: *mut u64) -> &'a AtomicU64 {
    // Safety: `GlobalWord::new` made its caller promise a valid, aligned word with atomic accesses only.
    unsafe { AtomicU64::from_ptr(address) }
}

macro_rules! operations {
    ($(
        $shape:ident $name:ident $ptx:literal $($fallback:literal)? $ordering:ident $($op:ident)? $doc:literal;
    )*) => { $(operation! { $shape $name $ordering $($op)? })* };
}

macro_rules! operation {
    (load $name:ident $ordering:ident) => {
        #[inline(always)]
        #[track_caller]
        pub(crate) fn $name(address: *mut u64) -> u64 {
            switch_point();
            let value = word(address).load(Ordering::$ordering);
            watch::word(address, Access::Load, Ordering::$ordering);
            value
        }
    };
    (store $name:ident $ordering:ident) => {
        #[inline(always)]
        #[track_caller]
        pub(crate) fn $name(address: *mut u64, value: u64) {
            switch_point();
            word(address).store(value, Ordering::$ordering);
            watch::word(address, Access::Store, Ordering::$ordering);
        }
    };
    (rmw $name:ident $ordering:ident $op:ident) => {
        #[inline(always)]
        #[track_caller]
        pub(crate) fn $name(address: *mut u64, value: u64) -> u64 {
            switch_point();
            let before = word(address).$op(value, Ordering::$ordering);
            watch::word(address, Access::Change(value), Ordering::$ordering);
            before
        }
    };
    (red $name:ident $ordering:ident $op:ident) => {
        #[inline(always)]
        #[track_caller]
        pub(crate) fn $name(address: *mut u64, value: u64) {
            switch_point();
            word(address).$op(value, Ordering::$ordering);
            watch::word(address, Access::Reduce(value), Ordering::$ordering);
        }
    };
    (cas $name:ident $ordering:ident) => {
        #[inline(always)]
        #[track_caller]
        pub(crate) fn $name(address: *mut u64, expected: u64, new: u64) -> u64 {
            switch_point();
            let outcome = word(address).compare_exchange(expected, new, Ordering::$ordering, Ordering::Relaxed);
            let access = if outcome.is_ok() { Access::Change(0) } else { Access::Load };
            watch::word(address, access, Ordering::$ordering);
            match outcome {
                Ok(seen) | Err(seen) => seen,
            }
        }
    };
    (fence $name:ident $ordering:ident) => {
        #[inline(always)]
        #[track_caller]
        pub(crate) fn $name() {
            fence(Ordering::$ordering);
            watch::fence(Ordering::$ordering);
        }
    };
}

word_operations!(operations);

#[inline(always)]
#[track_caller]
pub(crate) fn store_pair_relaxed_sys(address: *mut u64, low: u64, high: u64) {
    // A GPU ends the kernel.
    assert!(address.addr().is_multiple_of(16), "a pair of words is stored at an address that is no multiple of 16");
    for (word_at, value) in [(address, low), (address.wrapping_add(1), high)] {
        switch_point();
        word(word_at).store(value, Ordering::Relaxed);
        watch::word(word_at, Access::Store, Ordering::Relaxed);
    }
}

/// Returns its argument.
#[inline(always)]
pub(crate) fn narrow(value: u32) -> u32 {
    value
}

/// Returns its argument.
#[inline(always)]
pub fn stay(value: u32) -> u32 {
    value
}

/// Returns its argument.
#[inline(always)]
pub fn stay_word(value: u64) -> u64 {
    value
}

/// Returns its argument.
#[inline(always)]
pub(crate) fn of_lane(value: u64) -> u64 {
    value
}

/// Does nothing.
#[inline(always)]
pub(crate) fn rolled() {}

/// Reads a word of a table that is constant while kernels may read it.
///
/// # Safety
/// - `address` is valid, a multiple of 8, and the word does not change while the kernel runs.
#[inline(always)]
pub unsafe fn read_word(address: *const u64) -> u64 {
    // Safety: the caller's promise.
    unsafe { address.read() }
}

/// Reads two neighbouring words of a table; see [`read_word`].
///
/// # Safety
/// - As for [`read_word`], for both words; `address` is a multiple of 16.
#[inline(always)]
pub unsafe fn read_pair(address: *const u64) -> (u64, u64) {
    // A GPU ends the kernel.
    assert!(address.addr().is_multiple_of(16), "a pair of words is read at an address that is no multiple of 16");
    // Safety: the caller's promise.
    unsafe { (address.read(), address.wrapping_add(1).read()) }
}

/// Pauses for about `ns` nanoseconds: sleeps, or lets other threads run.
#[inline(always)]
pub fn pause(ns: u32) {
    match executor() {
        Some(executor) => (executor.pause)(ns),
        None => core::hint::spin_loop(),
    }
}

/// Returns nanoseconds on the clock of deadlines (`%globaltimer` on a GPU). Its zero is arbitrary.
///
/// Without an executor a CPU has no clock. Then this returns 0, and deadlines do not pass.
#[inline(always)]
pub fn clock_ns() -> u64 {
    executor().map_or(0, |executor| (executor.clock_ns)())
}

/// Returns the same as [`clock_ns`], and gives no other thread a turn: a trace that asks for the time leaves a seeded
/// run as it is.
#[inline(always)]
pub fn peek_clock_ns() -> u64 {
    executor().map_or(0, |executor| (executor.peek_clock_ns)())
}

/// Returns cycles on a clock for short times within one thread (`%clock64` on a GPU).
#[inline(always)]
pub fn cycles() -> u64 {
    executor().map_or(0, |executor| (executor.cycles)())
}

/// Waits until the kernel before this one on its stream has ended and its writes are visible to this kernel.
///
/// A kernel that is launched as a dependent one (CUDA: programmatic dependent launch) may start before that. Each of
/// its threads calls this before it reads memory that the earlier kernel writes, or writes memory that it uses. A
/// thread without such accesses calls it before it ends, so that the end of this kernel implies that of the earlier
/// one. In any other kernel the call returns at once.
#[inline(always)]
#[track_caller]
pub fn wait_for_predecessor() {
    if let Some(executor) = executor() {
        (executor.wait_for_predecessor)(Location::caller());
    }
}

/// Lets the next kernel on the stream start before this one has ended, if that is launched as a dependent one. It may
/// start when a thread of each block has called this or the block has ended. It sees the writes of this kernel, also
/// the earlier ones, after its own [`wait_for_predecessor`].
///
/// Waits first as `wait_for_predecessor` does, so at most two kernels of a stream run at a time.
#[inline(always)]
#[track_caller]
pub fn let_dependents_start() {
    wait_for_predecessor();
    if let Some(executor) = executor() {
        (executor.let_dependents_start)();
    }
}

/// Ends the grid with an error.
///
/// # Panics
/// On a CPU without an executor.
#[inline]
pub fn trap() -> ! {
    match executor() {
        Some(executor) => (executor.trap)("trap"),
        None => panic!("trap"),
    }
}
