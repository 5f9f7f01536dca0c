// SPDX-License-Identifier: MIT OR Apache-2.0
//! Loads and stores to memory of LSA peers.
//!
//! Ranks of one LSA team reach each other's windows by plain loads and stores, over NVLink or in the same GPU.
//! [`Window::peer`] returns a peer's part, for single elements, copies by a coop, and reductions. The front end's
//! [`put`](crate::gin::Gin::put) and [`get`](crate::gin::Gin::get) use the same copies, and add signals, counters and
//! the contract of [`gin`](crate::gin).
//!
//! ```
//! # use gin_device::prelude::*;
//! # fn copy(gin: &Gin, comm: &Comm, window: Window<f32>) -> Result<(), Fault> {
//! let there = window.peer(comm.lsa().right())?;
//! there.copy_from(&Block, 0, window.range(0, 1024))?;
//! gin.signal(comm.lsa().right(), SignalId::new(0).inc()).issue(&Block)?;
//! # Ok(())
//! # }
//! ```
//!
//! # Order
//! Nothing here is ordered by itself. Order needs a signal: one of the coop's threads raises it after the stores, by
//! the LSA route, or by any route if the post releases to the system (the default). At the peer, the stores are visible
//! to a thread that has waited for that signal. The signal also covers stores of other threads that happen before the
//! raise, by a barrier for example, because a release is cumulative. [`publish`] has the argument.
//!
//! `bindings/c/include/gin_inline.cuh` has [`copy`] and [`publish`] in C++: change both.
//!
//! # Lifetime
//! A peer's memory stays mapped until no kernel of this rank uses the communicator any more, even if the peer's own
//! host has destroyed its communicator after a fault.

use crate::coop::Coop;
use crate::fault::{self, Fault};
use crate::order::{Scope, release};
#[cfg(target_arch = "nvptx64")]
use crate::sys;
use crate::sys::data::{
    load_relaxed_sys_pair, load_weak_pair, red_add_relaxed_sys_f32, red_add_relaxed_sys_u32, red_add_relaxed_sys_u64,
    red_and_relaxed_sys_u32, red_and_relaxed_sys_u64, red_max_relaxed_sys_u32, red_max_relaxed_sys_u64,
    red_min_relaxed_sys_u32, red_min_relaxed_sys_u64, red_or_relaxed_sys_u32, red_or_relaxed_sys_u64, store_weak_pair,
};
use crate::sys::{GlobalWord, Memory, Word, narrow, rolled};
use crate::team::Rank;
use crate::window::{Window, WindowRange};
use bytemuck::Pod;
use core::marker::PhantomData;
use gin_abi::{FaultKind, FaultSubject, Operation};

/// Raises words of GPUs after earlier stores: a signal at the peer, then a counter of the caller.
///
/// `given` is the scope to which the covered memory is released already.
///
/// Ordering: release, at system scope if there is a signal, else at GPU scope.
///
/// # Why it covers the stores of a whole coop
/// All threads of the coop store; they meet (at a barrier of the block, or of lanes); one calls this. The barrier
/// orders each thread's stores before the fence here. A release is cumulative. So once the waiter has seen the raise,
/// its acquire comes after all accesses before the fence, by any thread. The same holds for stores of other threads of
/// the GPU that the caller has synchronised with at GPU scope. Later raises of the word by others continue this release
/// sequence, because every raise is a read-modify-write. On hardware, the fence waits until all stores that the thread
/// has observed are performed at the peer.
#[inline(always)]
pub fn publish<M: Memory>(given: Scope, signal: Option<(M::Word, u64)>, counter: Option<M::Word>) {
    if signal.is_some() {
        release::<M>(given, Scope::System);
    } else if counter.is_some() {
        release::<M>(given, Scope::Gpu);
    }
    if let Some((word, amount)) = signal {
        word.red_add_relaxed_sys(amount);
    }
    if let Some(word) = counter {
        word.red_add_relaxed_gpu(1);
    }
}

/// Copies bytes with all threads of `coop`, in units of 16 bytes if both addresses allow it, else of 4 or 1. The
/// threads do not meet.
///
/// A thread has four units of 16 bytes under way at a time, so that few threads, on few SMs, hide the latency of
/// memory. More units would take registers from the surrounding kernel.
///
/// `OWN` says that the source is the caller's own memory. Then units of 16 bytes may come from the L1 cache: the
/// caller has acquired what others wrote to the source, and an acquire empties that cache. So small puts of the same
/// bytes, one after the other, need no trip to L2. A peer's memory is read afresh, for callers that look at it again.
///
/// # Safety
/// - Both ranges are valid and in global memory, and they do not overlap.
/// - No other thread writes them meanwhile, or reads the destination.
/// - All threads of the coop bring the same arguments.
/// - The GPU reaches the memory: it is its own, pinned, or a peer's.
#[inline(always)]
pub unsafe fn copy<const OWN: bool>(coop: &impl Coop, destination: u64, source: u64, bytes: u64) {
    // Safety: the caller's promise.
    unsafe { copy_max::<_, OWN, 31>(coop, destination, source, bytes) };
}

/// Does [`copy`]. A rare part copies what is past the first `2^LOG2` units of 16 bytes: so `LOG2` is at most 31, and
/// numbers of units have 32 bits, which take half the instructions.
///
/// # Safety
/// - As [`copy`].
#[inline(always)]
unsafe fn copy_max<C: Coop, const OWN: bool, const LOG2: u32>(coop: &C, destination: u64, source: u64, bytes: u64) {
    // Safety: of the callers below.
    let pair = |from| unsafe { if OWN { load_weak_pair(from) } else { load_relaxed_sys_pair(from) } };
    // LLVM unrolls a loop with a step that it knows.
    let (rank, step) = (coop.rank(), narrow(coop.size()));
    let (mut destination, mut source, mut units) = (destination, source, (bytes / 16) as u32);
    if ((destination | source | bytes) & 15) | (bytes >> (LOG2 + 4)) != 0 {
        // Safety: the caller's promise.
        let head = unsafe { outlined::copy_rest(destination, source, bytes, rank, step, LOG2) };
        let whole = ((bytes - head) / 16).min(1 << LOG2);
        (destination, source, units) = (destination + head, source + head, whole as u32);
    }
    if !C::ALONE & (units <= step) {
        // Most small puts. No loop, so that the lanes of a warp need not part.
        if rank < units {
            // Safety: as above.
            unsafe {
                let (low, high) = pair(at(source, 16 * u64::from(rank)));
                store_weak_pair(at(destination, 16 * u64::from(rank)), low, high);
            }
        }
        return;
    }
    let (stride, mut unit) = (16 * u64::from(step), rank);
    while unit + 3 * step < units {
        rolled();
        let (from, to) = (source + 16 * u64::from(unit), destination + 16 * u64::from(unit));
        // Safety: as above.
        unsafe {
            let first = pair(at(from, 0));
            let second = pair(at(from, stride));
            let third = pair(at(from, 2 * stride));
            let fourth = pair(at(from, 3 * stride));
            store_weak_pair(at(to, 0), first.0, first.1);
            store_weak_pair(at(to, stride), second.0, second.1);
            store_weak_pair(at(to, 2 * stride), third.0, third.1);
            store_weak_pair(at(to, 3 * stride), fourth.0, fourth.1);
        }
        unit += 4 * step;
    }
    while unit < units {
        rolled();
        // Safety: as above.
        unsafe {
            let (low, high) = pair(at(source, 16 * u64::from(unit)));
            store_weak_pair(at(destination, 16 * u64::from(unit)), low, high);
        }
        unit += step;
    }
}

/// The rare part of a copy, which a kernel has once and calls.
mod outlined {
    use super::at;
    use crate::sys::data::{load_relaxed_sys_u8, load_relaxed_sys_u32, store_weak_u8, store_weak_u32};

    /// Copies the bytes that are no part of the first `2^max` whole, aligned units of 16 bytes. Returns the number of
    /// bytes before these units, or all bytes if the addresses allow no such units.
    ///
    /// # Safety
    /// - As [`copy`](super::copy); `rank` and `step` are number and count of the threads.
    #[cold]
    #[cfg_attr(target_arch = "nvptx64", inline(never))]
    pub(super) unsafe fn copy_rest(destination: u64, source: u64, bytes: u64, rank: u32, step: u32, max: u32) -> u64 {
        let (rank, step) = (u64::from(rank), u64::from(step));
        // log2 of the width of a unit.
        let log2 = match destination ^ source {
            apart if apart & 15 == 0 => 4,
            apart if apart & 3 == 0 => 2,
            _ => 0,
        };
        // The head is the bytes before the first whole unit. If units are bytes, the first loop copies all of them.
        let head = (destination.wrapping_neg() & ((1 << log2) - 1)).min(bytes);
        let units = if log2 == 0 { 0 } else { (bytes - head) >> log2 };
        let body = units << log2;
        let mut index = rank;
        while index < bytes - body {
            let offset = if index < head { index } else { index + body };
            // Safety: in range.
            unsafe { store_weak_u8(at(destination, offset), load_relaxed_sys_u8(at(source, offset))) };
            index += step;
        }
        // Of units of 16 bytes, those past the first. Such copies are rare, so units of 4 bytes do.
        let (units, first, copied) = if log2 == 4 { (body >> 2, 4 << max, head) } else { (units, 0, bytes) };
        let mut unit = first + rank;
        while unit < units {
            let offset = head + 4 * unit;
            // Safety: in range, and aligned, because both addresses have the same remainder.
            unsafe { store_weak_u32(at(destination, offset), load_relaxed_sys_u32(at(source, offset))) };
            unit += step;
        }
        copied
    }
}

#[inline(always)]
fn at<T>(address: u64, offset: u64) -> *mut T {
    (address + offset) as usize as *mut T
}

/// An LSA peer's part of a window, from [`Window::peer`].
#[derive(Debug)]
pub struct PeerWindow<T> {
    address: u64,
    bytes: u64,
    rank: Rank,
    element: PhantomData<*mut T>,
}

impl<T> Clone for PeerWindow<T> {
    #[inline(always)]
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for PeerWindow<T> {}

// Safety: it is an address and a length. Its accesses do not depend on the thread.
unsafe impl<T> Send for PeerWindow<T> {}
// Safety: as above.
unsafe impl<T> Sync for PeerWindow<T> {}

impl<T: Pod> Window<T> {
    /// Returns the part of `rank`, which may be the caller, for loads and stores.
    ///
    /// # Errors
    /// [`FaultKind::NotReachable`] if the rank is outside the LSA team.
    #[inline(always)]
    #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
    pub fn peer(&self, rank: Rank) -> Result<PeerWindow<T>, Fault> {
        let address = self.peer_ptr(rank)?.addr() as u64;
        Ok(PeerWindow { address, bytes: crate::window::bytes_on(self.handle(), rank), rank, element: PhantomData })
    }
}

impl<T: Pod> PeerWindow<T> {
    /// Returns the number of elements.
    #[inline(always)]
    #[must_use]
    pub fn len(&self) -> usize {
        (self.bytes / size_of::<T>() as u64) as usize
    }

    /// Returns whether it has no elements.
    #[inline(always)]
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the address of the first element.
    #[inline(always)]
    #[must_use]
    pub fn ptr(&self) -> *mut T {
        self.address as usize as *mut T
    }

    #[inline(always)]
    #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
    fn checked(&self, index: usize) -> *mut T {
        if index >= self.len() {
            #[cfg(not(target_arch = "nvptx64"))]
            {
                let (rank, length) = (self.rank.world(), self.len());
                panic!("index {index} is past the end of rank {rank}'s part of a window, which has {length} elements");
            }
            #[cfg(target_arch = "nvptx64")]
            sys::trap();
        }
        self.ptr().wrapping_add(index)
    }

    /// Loads element `index` by a plain load; its value must have been acquired. An index out of range ends the grid.
    #[inline(always)]
    #[must_use]
    #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
    pub fn read(&self, index: usize) -> T {
        let element = self.checked(index);
        watch!(read(element));
        // Safety: the peer's memory is valid for its length.
        unsafe { element.read() }
    }

    /// Stores element `index` by a plain store, which a later release makes visible. An index out of range ends the
    /// grid.
    #[inline(always)]
    #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
    pub fn write(&self, index: usize, value: T) {
        let element = self.checked(index);
        watch!(write(element));
        // Safety: as above.
        unsafe { element.write(value) }
    }

    /// Loads element `index` without a check.
    ///
    /// # Safety
    /// - `index < self.len()`.
    #[inline(always)]
    #[must_use]
    #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
    pub unsafe fn read_unchecked(&self, index: usize) -> T {
        watch!(read(self.ptr().wrapping_add(index)));
        // Safety: the caller's promise.
        unsafe { self.ptr().add(index).read() }
    }

    /// Stores element `index` without a check.
    ///
    /// # Safety
    /// - `index < self.len()`.
    #[inline(always)]
    #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
    pub unsafe fn write_unchecked(&self, index: usize, value: T) {
        watch!(write(self.ptr().wrapping_add(index)));
        // Safety: the caller's promise.
        unsafe { self.ptr().add(index).write(value) }
    }

    /// Returns the addresses of the elements from `start` on and of `own`, if both ranges are within bounds. They have
    /// the same length.
    #[inline(always)]
    #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
    fn both(&self, start: usize, own: &WindowRange<T>) -> Result<(u64, u64), Fault> {
        own.check_own()?;
        let offset = (start as u64).checked_mul(size_of::<T>() as u64);
        match offset.map(|offset| (offset, offset.saturating_add(own.bytes()))) {
            Some((offset, end)) if end <= self.bytes => Ok((self.address + offset, own.address())),
            past => {
                let fault = fault::new(FaultKind::OutOfRange, Operation::Address).with_peer(self.rank.world());
                let (offset, end) = past.unwrap_or((u64::MAX, u64::MAX));
                Err(fault.with_values(FaultSubject::Window { id: own.window_id(), offset }, self.bytes, end))
            }
        }
    }

    /// Copies a range of the caller's own part of a window to the elements from `start` on. All threads of `coop` call,
    /// with the same arguments. The two ranges do not overlap.
    ///
    /// Ordering: the copy reads earlier writes of the coop's threads. When the call returns, all of them have stored.
    ///
    /// # Errors
    /// The same in all threads: [`FaultKind::OutOfRange`].
    #[inline(always)]
    #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
    pub fn copy_from(&self, coop: &impl Coop, start: usize, source: WindowRange<T>) -> Result<(), Fault> {
        called!(here);
        let (there, here) = self.both(start, &source)?;
        coop.sync();
        // Safety: both ranges are within bounds; if they overlap, the copied bytes are unknown.
        unsafe { copy::<true>(coop, there, here, source.bytes()) };
        coop.sync();
        Ok(())
    }

    /// Copies the elements from `start` on to a range of the caller's own part of a window. All threads of `coop` call,
    /// with the same arguments. The two ranges do not overlap.
    ///
    /// Ordering: when the call returns, the threads of the coop see the copied elements.
    ///
    /// # Errors
    /// The same in all threads: [`FaultKind::OutOfRange`].
    #[inline(always)]
    #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
    pub fn copy_to(&self, coop: &impl Coop, start: usize, destination: WindowRange<T>) -> Result<(), Fault> {
        called!(here);
        let (there, here) = self.both(start, &destination)?;
        coop.sync();
        // Safety: as above.
        unsafe { copy::<false>(coop, here, there, destination.bytes()) };
        coop.sync();
        Ok(())
    }
}

impl PeerWindow<u64> {
    /// Adds to element `index`, modulo 2^64, and returns the value before.
    ///
    /// Takes a trip to the peer, for which [`red_add_relaxed_sys`](Self::red_add_relaxed_sys) does not wait. Atomic
    /// with reductions and with atomics of GPUs, not with NICs and CPUs; relaxed, at system scope. An index out of
    /// range ends the grid.
    #[inline(always)]
    #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
    pub fn fetch_add_relaxed_sys(&self, index: usize, value: u64) -> u64 {
        self.word(index).add_relaxed_sys(value)
    }

    /// Stores `new` in element `index` if its value is `expected`. Returns the value before.
    ///
    /// Cost, atomicity and order as [`fetch_add_relaxed_sys`](Self::fetch_add_relaxed_sys). An index out of range ends
    /// the grid.
    #[inline(always)]
    #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
    pub fn compare_swap_relaxed_sys(&self, index: usize, expected: u64, new: u64) -> u64 {
        self.word(index).cas_relaxed_sys(expected, new)
    }

    #[inline(always)]
    #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
    fn word(&self, index: usize) -> GlobalWord {
        // Safety: in range of valid memory.
        unsafe { GlobalWord::new(self.checked(index).addr() as u64) }
    }
}

macro_rules! reductions {
    ($ty:ty: $($name:ident $red:ident $doc:literal;)*) => {
        impl PeerWindow<$ty> {
            $(
                #[doc = $doc]
                ///
                /// Atomic with the other reductions and with atomics of GPUs; relaxed, at system scope. An index out of
                /// range ends the grid.
                #[inline(always)]
                #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
                pub fn $name(&self, index: usize, value: $ty) {
                    // Safety: in range of valid memory.
                    unsafe { $red(self.checked(index), value) }
                }
            )*
        }
    };
}

reductions! { u32:
    red_add_relaxed_sys red_add_relaxed_sys_u32 "Adds to element `index`, modulo 2^32.";
    red_and_relaxed_sys red_and_relaxed_sys_u32 "Clears the bits of element `index` that are 0 in `value`.";
    red_or_relaxed_sys red_or_relaxed_sys_u32 "Sets the bits of element `index` that are 1 in `value`.";
    red_min_relaxed_sys red_min_relaxed_sys_u32 "Sets element `index` to the lesser of itself and `value`.";
    red_max_relaxed_sys red_max_relaxed_sys_u32 "Sets element `index` to the greater of itself and `value`.";
}

reductions! { u64:
    red_add_relaxed_sys red_add_relaxed_sys_u64 "Adds to element `index`, modulo 2^64.";
    red_and_relaxed_sys red_and_relaxed_sys_u64 "Clears the bits of element `index` that are 0 in `value`.";
    red_or_relaxed_sys red_or_relaxed_sys_u64 "Sets the bits of element `index` that are 1 in `value`.";
    red_min_relaxed_sys red_min_relaxed_sys_u64 "Sets element `index` to the lesser of itself and `value`.";
    red_max_relaxed_sys red_max_relaxed_sys_u64 "Sets element `index` to the greater of itself and `value`.";
}

reductions! { f32:
    red_add_relaxed_sys red_add_relaxed_sys_f32 "Adds to element `index`, rounding to nearest.";
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::coop::Thread;
    use std::vec::Vec;

    /// One of several threads that share a copy.
    #[derive(Clone, Copy)]
    struct Member {
        rank: u32,
        size: u32,
    }

    impl Coop for Member {
        fn rank(&self) -> u32 {
            self.rank
        }

        fn size(&self) -> u32 {
            self.size
        }

        fn sync(&self) {}

        fn sync_or(&self, bit: bool) -> bool {
            bit
        }

        fn broadcast(&self, value: u64, _: u32) -> u64 {
            value
        }

        fn share_fault(&self, mine: Option<Fault>) -> Fault {
            mine.unwrap_or(Fault::new(FaultKind::Reported, Operation::None))
        }
    }

    #[test]
    fn a_copy_moves_every_byte_and_no_other_whatever_the_ends_and_however_many_threads() {
        #[repr(align(16))]
        struct Aligned([u8; 512]);
        let mut source = Aligned([0; 512]);
        for (index, byte) in source.0.iter_mut().enumerate() {
            *byte = (index * 37 + index / 256) as u8 | 1;
        }
        let copied = |from: usize, to: usize, bytes: usize, coops: &[Member], past: bool| {
            let mut destination = Aligned([0; 512]);
            let (at, source) = (destination.0.as_mut_ptr() as u64 + to as u64, source.0.as_ptr() as u64 + from as u64);
            for coop in coops {
                // Safety: both in range.
                unsafe {
                    if past {
                        copy_max::<_, true, 2>(coop, at, source, bytes as u64);
                    } else {
                        copy::<true>(coop, at, source, bytes as u64);
                    }
                }
            }
            destination.0
        };
        for size in [1, 2, 3, 32] {
            let coops: Vec<Member> = (0..size).map(|rank| Member { rank, size }).collect();
            for (from, to) in [(0, 0), (1, 1), (15, 15), (4, 8), (3, 7), (1, 2)] {
                for bytes in [0, 1, 15, 16, 17, 31, 63, 64, 65, 128, 240, 300, 480] {
                    for past in [false, true] {
                        let arrived = copied(from, to, bytes, &coops, past);
                        let expected = |index: usize| match index.checked_sub(to) {
                            Some(place) if place < bytes => source.0[from + place],
                            _ => 0,
                        };
                        let wrong = (0..512).find(|&index| arrived[index] != expected(index));
                        assert_eq!(wrong, None, "{bytes} bytes from {from} to {to} by {size}, past 4 units: {past}");
                    }
                }
            }
        }
        let mut one = Aligned([0; 512]);
        // Safety: both in range.
        unsafe { copy::<false>(&Thread, one.0.as_mut_ptr() as u64, source.0.as_ptr() as u64, 512) };
        assert_eq!(one.0, source.0);
    }
}
