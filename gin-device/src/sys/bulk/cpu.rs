// SPDX-License-Identifier: MIT OR Apache-2.0
//! The operations on a CPU. An executor carries out the copies; without one they are complete at once.

use super::{MAX_COUNTED, Mbarrier};
use crate::exec::watch::{self, Access};
use crate::exec::{BulkCall, executor, switch_point};
use crate::sys::shared::Address;
use crate::sys::tensor::{ROW_BYTES, copy_box};
use core::panic::Location;
use core::sync::atomic::{AtomicU64, Ordering};

/// The parts of the word of an mbarrier.
#[derive(Clone, Copy)]
struct Phase {
    /// The parity of the present phase.
    parity: u64,
    /// Arrivals that the present phase lacks.
    pending: u32,
    /// Arrivals of a phase.
    expected: u32,
    /// Bytes that the present phase lacks.
    bytes: i64,
}

impl Phase {
    fn read(word: u64) -> Self {
        let count = |at: u32| (word >> at) as u32 & MAX_COUNTED;
        Self { parity: word >> 63, pending: count(0), expected: count(20), bytes: ((word << 1) as i64) >> 41 }
    }

    fn word(self) -> u64 {
        let bytes = (self.bytes as u64) << 41 >> 1;
        self.parity << 63 | bytes | u64::from(self.expected) << 20 | u64::from(self.pending)
    }

    /// Returns the word after arrivals, and after a change of the number of bytes.
    fn after(mut self, arrivals: u32, bytes: i64) -> Result<Self, &'static str> {
        if self.expected == 0 {
            return Err("an mbarrier is used that is not initialised");
        }
        if arrivals > self.pending {
            return Err("a phase of an mbarrier has more arrivals than `init` said");
        }
        self.pending -= arrivals;
        self.bytes += bytes;
        if self.bytes.unsigned_abs() > u64::from(MAX_COUNTED) {
            return Err("a phase of an mbarrier counts 2^20 bytes or more");
        }
        if self.pending == 0 && self.bytes == 0 {
            (self.parity, self.pending) = (1 - self.parity, self.expected);
        }
        Ok(self)
    }
}

fn word<'a>(address: Address) -> &'a AtomicU64 {
    // Safety: `Mbarrier::at` checked that the block has the word.
    unsafe { AtomicU64::from_ptr(address.pointer().cast()) }
}

fn change(word: &AtomicU64, arrivals: u32, bytes: i64) -> Result<(), &'static str> {
    let mut old = word.load(Ordering::Relaxed);
    loop {
        let new = Phase::read(old).after(arrivals, bytes)?.word();
        match word.compare_exchange_weak(old, new, Ordering::AcqRel, Ordering::Relaxed) {
            Ok(_) => return Ok(()),
            Err(seen) => old = seen,
        }
    }
}

#[track_caller]
fn arrives(address: Address, bytes: i64) {
    switch_point();
    if let Err(message) = change(word(address), 1, bytes) {
        panic!("{message}");
    }
    watch::word(address.pointer().cast::<u64>(), Access::Reduce(0), Ordering::Release);
}

/// # Safety
/// - As [`Mbarrier::init`].
#[inline(always)]
#[track_caller]
pub(super) unsafe fn init(address: Address, arrivals: u32) {
    assert!((1..=MAX_COUNTED).contains(&arrivals), "an mbarrier of {arrivals} arrivals; it counts 1 to {MAX_COUNTED}");
    switch_point();
    let first = Phase { parity: 0, pending: arrivals, expected: arrivals, bytes: 0 };
    word(address).store(first.word(), Ordering::Relaxed);
    watch::word(address.pointer().cast::<u64>(), Access::Store, Ordering::Relaxed);
}

/// # Safety
/// - As [`Mbarrier::arrive`].
#[inline(always)]
#[track_caller]
pub(super) unsafe fn arrive(address: Address) {
    arrives(address, 0);
}

/// # Safety
/// - As [`Mbarrier::arrive_expect_tx`].
#[inline(always)]
#[track_caller]
pub(super) unsafe fn arrive_expect_tx(address: Address, bytes: u32) {
    arrives(address, bytes.into());
}

#[inline(always)]
#[track_caller]
pub(super) fn test_wait(address: Address, parity: u32) -> bool {
    switch_point();
    let complete = Phase::read(word(address).load(Ordering::Acquire)).parity != u64::from(parity & 1);
    let order = if complete { Ordering::Acquire } else { Ordering::Relaxed };
    watch::word(address.pointer().cast::<u64>(), Access::Load, order);
    complete
}

#[inline(always)]
#[track_caller]
pub(super) fn try_wait(address: Address, parity: u32) -> bool {
    test_wait(address, parity)
}

/// # Safety
/// - As [`Mbarrier::invalidate`].
#[inline(always)]
#[track_caller]
pub(super) unsafe fn invalidate(address: Address) {
    switch_point();
    word(address).store(0, Ordering::Relaxed);
    watch::word(address.pointer().cast::<u64>(), Access::Store, Ordering::Relaxed);
}

#[inline(always)]
pub(super) fn fence_mbarrier_init() {}

/// Hands a step to the executor.
#[track_caller]
fn call(step: BulkCall) {
    match executor() {
        Some(executor) => (executor.bulk)(step, Location::caller()),
        None => carry_out(step),
    }
}

/// Hands a copy that `barrier` counts to the executor. For the detector of races, a thread that waits for the phase
/// knows of the accesses of the starting thread.
#[track_caller]
pub(in crate::sys) fn start(copy: BulkCall, barrier: Mbarrier) {
    watch::word(barrier.word_pointer(), Access::Reduce(0), Ordering::Release);
    call(copy);
}

/// Does a step of bulk copies at once.
///
/// # Panics
/// If the mbarrier of a copy cannot count it.
#[doc(hidden)]
pub fn carry_out(step: BulkCall) {
    match step {
        BulkCall::ToShared { to, from, bytes, barrier } => {
            // Safety: guaranteed by the caller of `copy_to_shared`.
            unsafe {
                copy(to, from, bytes);
                if let Err(message) = complete(barrier, bytes) {
                    panic!("{message}");
                }
            }
        }
        BulkCall::BoxToShared { to, from, barrier } => {
            // Safety: guaranteed by the caller of `copy_box_to_shared`.
            unsafe {
                copy_box(to, &from);
                if let Err(message) = complete(barrier, ROW_BYTES * from.rows) {
                    panic!("{message}");
                }
            }
        }
        // Safety: guaranteed by the caller of `copy_to_global`.
        BulkCall::ToGlobal { to, from, bytes } => unsafe { copy(to, from, bytes) },
        BulkCall::Commit | BulkCall::Wait { .. } | BulkCall::Fence => {}
    }
}

/// Copies words as the engine does: threads of this process may access others nearby meanwhile.
///
/// # Safety
/// - Both addresses are multiples of 16, and valid for `bytes` bytes, a multiple of 16.
#[doc(hidden)]
pub unsafe fn copy(to: u64, from: u64, bytes: u32) {
    let word = |start: u64, at: u64| {
        let pointer = core::ptr::with_exposed_provenance_mut((start + at) as usize);
        // Safety: the caller's promise.
        unsafe { AtomicU64::from_ptr(pointer) }
    };
    for at in (0..u64::from(bytes)).step_by(8) {
        word(to, at).store(word(from, at).load(Ordering::Relaxed), Ordering::Relaxed);
    }
}

/// Tells an mbarrier that bytes have been written.
///
/// # Errors
/// The reason why it cannot count them.
///
/// # Safety
/// - `barrier` is the address of a word of shared memory, used as mbarrier.
#[doc(hidden)]
pub unsafe fn complete(barrier: u64, bytes: u32) -> Result<(), &'static str> {
    change(word(Address::from_bits(barrier)), 0, -i64::from(bytes))
}

#[track_caller]
fn check(to: u64, from: u64, bytes: u32) {
    // A GPU ends the kernel, or moves other bytes.
    assert!(
        (to | from | u64::from(bytes)).is_multiple_of(16) && bytes > 0,
        "a bulk copy of {bytes} bytes from {from:#x} to {to:#x}: addresses and size must be multiples of 16, and the \
         size not 0"
    );
}

/// Starts a copy from global to shared memory. Once its bytes are written, `barrier` counts them as complete.
///
/// # Safety
/// - Both addresses and `bytes` are multiples of 16, `bytes` is not 0. The block has the bytes of shared memory at
///   `to`, and `from` is valid for reading them, in global memory.
/// - `barrier` is initialised, and its present phase expects the bytes, or will before it could be complete without
///   them.
/// - Until that phase is complete nothing accesses the bytes at `to`, and nothing writes those at `from`. Before, what
///   the [module](super#order) requires.
#[inline(always)]
#[track_caller]
pub unsafe fn copy_to_shared(to: Address, from: u64, bytes: u32, barrier: Mbarrier) {
    check(to.bits(), from, bytes);
    switch_point();
    // For the detector of races the starting thread makes the accesses.
    watch::event(watch::Event::Data { address: from, bytes: bytes.into(), writes: false });
    watch::event(watch::Event::Data { address: to.bits(), bytes: bytes.into(), writes: true });
    start(BulkCall::ToShared { to: to.bits(), from, bytes, barrier: barrier.bits() }, barrier);
}

/// Starts a copy from shared to global memory, in the calling thread's open group.
///
/// # Safety
/// - Both addresses and `bytes` are multiples of 16, `bytes` is not 0. The block has the bytes of shared memory at
///   `from`, and `to` is valid for writing them, in global memory.
/// - Nothing writes the bytes at `from` until [`wait_group_read`] or [`wait_group`] has returned for the group, and
///   nothing accesses those at `to` until [`wait_group`] has. Before, what the [module](super#order) requires.
#[inline(always)]
#[track_caller]
pub unsafe fn copy_to_global(to: u64, from: Address, bytes: u32) {
    check(to, from.bits(), bytes);
    switch_point();
    watch::event(watch::Event::Data { address: from.bits(), bytes: bytes.into(), writes: false });
    watch::event(watch::Event::Data { address: to, bytes: bytes.into(), writes: true });
    call(BulkCall::ToGlobal { to, from: from.bits(), bytes });
}

/// Ends the open group of copies to global memory of the calling thread, and opens the next one.
#[inline(always)]
#[track_caller]
pub fn commit_group() {
    call(BulkCall::Commit);
}

/// Waits until at most the last `LEFT` ended groups of the calling thread are incomplete. The bytes of the others have
/// been written.
#[inline(always)]
#[track_caller]
pub fn wait_group<const LEFT: u32>() {
    call(BulkCall::Wait { left: LEFT, sources: false });
}

/// Waits until at most the last `LEFT` ended groups of the calling thread have not read all their sources. The others
/// may not have written yet.
#[inline(always)]
#[track_caller]
pub fn wait_group_read<const LEFT: u32>() {
    call(BulkCall::Wait { left: LEFT, sources: true });
}

/// Orders the calling thread's accesses to shared memory before later ones of the engine, and the other way round.
#[inline(always)]
#[track_caller]
pub fn fence_proxy_async_shared() {
    call(BulkCall::Fence);
}

/// Orders accesses to global memory that the calling thread made or has acquired before later ones of the engine, and
/// the other way round.
#[inline(always)]
pub fn fence_proxy_async_global() {}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shared::SharedArray;

    /// Returns the mbarrier at a local word.
    fn barrier(word: &mut u64) -> Mbarrier {
        // Safety: the word lives as long as the tests use it.
        Mbarrier::at(&unsafe { SharedArray::new(Address::new(core::ptr::from_mut(word).cast()), 1) }, 0)
    }

    #[test]
    fn a_phase_is_complete_when_all_have_arrived_and_all_bytes_are_there() {
        let mut memory = 0;
        let at = (&raw mut memory) as u64;
        let barrier = barrier(&mut memory);
        // Safety: initialised; two arrivals for each phase.
        unsafe {
            barrier.init(2);
            assert_eq!([0, 1].map(|parity| barrier.test_wait(parity)), [false, true]);
            barrier.arrive_expect_tx(MAX_COUNTED & !15);
            barrier.arrive();
            assert!(!barrier.try_wait(0));
            complete(at, 16).unwrap();
            complete(at, (MAX_COUNTED & !15) - 16).unwrap();
            assert_eq!([0, 1].map(|parity| barrier.test_wait(parity)), [true, false]);
            // Bytes may come before they are expected.
            complete(at, 32).unwrap();
            barrier.arrive();
            assert!(!barrier.test_wait(1));
            barrier.arrive_expect_tx(32);
            assert_eq!([0, 1].map(|parity| barrier.test_wait(parity)), [false, true]);
            assert!(complete(at, MAX_COUNTED + 1).is_err());
            barrier.invalidate();
        }
        assert_eq!(memory, 0);
    }

    #[test]
    #[should_panic(expected = "not initialised")]
    fn an_arrival_at_a_word_that_is_not_initialised_is_refused() {
        let mut memory = 0;
        // Safety: the arrival is refused.
        unsafe { barrier(&mut memory).arrive() };
    }

    #[test]
    #[should_panic(expected = "a bulk copy of 24 bytes")]
    fn a_size_that_is_not_a_multiple_of_16_is_refused() {
        let mut memory = [0u128; 4];
        let first = Address::new((&raw mut memory).cast());
        // Safety: the copy is refused.
        unsafe { copy_to_global(first.at(32).bits(), first, 24) };
    }

    #[test]
    fn without_an_executor_copies_are_complete_at_once() {
        let mut memory = [1u128, 2, 0, 0];
        let mut phase = 0;
        let (first, barrier) = (Address::new((&raw mut memory).cast()), barrier(&mut phase));
        // Safety: the two halves of the memory.
        unsafe {
            barrier.init(1);
            barrier.arrive_expect_tx(16);
            copy_to_shared(first.at(32), first.bits(), 16, barrier);
            assert!(barrier.test_wait(0));
            copy_to_global(first.at(48).bits(), first.at(16), 16);
            commit_group();
            wait_group_read::<0>();
            wait_group::<0>();
        }
        assert_eq!(memory, [1, 2, 1, 2]);
    }
}
