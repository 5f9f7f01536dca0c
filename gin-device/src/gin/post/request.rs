// SPDX-License-Identifier: MIT OR Apache-2.0
//! The kinds of request: a move of bytes, a value, a raise.

use super::Post;
use super::by_stores::move_bytes;
use super::check::Posted;
use super::value::Value;
use crate::backend::Backend;
use crate::coop::{Coop, lead};
use crate::fault::{Fault, Judge, Unmet};
use crate::lsa::copy;
use crate::order::Scope;
use crate::sys::data::{store_weak_u8, store_weak_u16, store_weak_u32, store_weak_u64};
use crate::team::Rank;
use crate::window::WindowRange;
use bytemuck::Pod;
use gin_abi::{FaultKind, Operation, Transfer, WindowOffset};

/// A kind of request.
pub trait Request: Copy {
    /// Returns the operation that faults name.
    fn operation(&self) -> Operation;

    /// Passes the conditions of the request's ranges to `judge`.
    fn judge(&self, posted: &Posted<'_>, judge: &mut Judge);

    /// Returns the transfer of a request that was checked.
    fn transfer(&self) -> Transfer;

    /// Returns the address of the range in the caller's own part of a window, or the value.
    #[cfg(not(target_arch = "nvptx64"))]
    fn own(&self) -> u64;

    /// By loads and stores, all threads of a coop share the request.
    const BY_ALL: bool;

    /// By loads and stores, the request stores data.
    const STORES: bool;

    /// Returns where the data goes, where it comes from, and the number of bytes. The request was checked for loads and
    /// stores.
    fn ways(&self, peer: Rank) -> (u64, u64, u64);

    /// Stores the data. All threads of `coop` call.
    ///
    /// # Safety
    /// - `ways` is from [`ways`](Self::ways).
    unsafe fn store(&self, coop: &impl Coop, ways: (u64, u64, u64));

    /// Carries out `post`; all threads of `coop` call.
    ///
    /// # Errors
    /// See [`Post::issue`].
    #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
    fn issue<B: Backend>(post: &Post<'_, B, Self>, coop: &impl Coop) -> Result<(), Fault>;
}

/// A request whose bytes arrive at the peer, so that a signal can follow them.
pub trait Arrives: Request {}

/// A move of bytes between a range at the peer and a range of the caller's own part of a window: a put if `PUTS`, else
/// a get.
#[derive(Debug)]
pub struct Move<T, const PUTS: bool> {
    /// The range at the peer.
    pub(super) there: WindowRange<T>,
    /// The caller's own range.
    pub(super) here: WindowRange<T>,
}

impl<T, const PUTS: bool> Clone for Move<T, PUTS> {
    #[inline(always)]
    fn clone(&self) -> Self {
        *self
    }
}

impl<T, const PUTS: bool> Copy for Move<T, PUTS> {}

/// Returns where a range that was checked begins.
#[inline(always)]
fn begin<T: Pod>(range: &WindowRange<T>) -> WindowOffset {
    WindowOffset { window: range.window_id(), offset: range.place().0 }
}

impl<T: Pod, const PUTS: bool> Request for Move<T, PUTS> {
    #[inline(always)]
    fn operation(&self) -> Operation {
        if PUTS { Operation::Put } else { Operation::Get }
    }

    #[inline(always)]
    fn judge(&self, posted: &Posted<'_>, judge: &mut Judge) {
        let (Self { there, here }, peer) = (self, posted.peer);
        let unmet = |kind, range: &WindowRange<T>| Unmet::new(kind).of(range.subject());
        judge.condition(there.place().1 == here.place().1, || {
            unmet(FaultKind::LengthMismatch, there).values(there.bytes(), here.bytes())
        });
        judge.condition(there.fits_on(peer), || {
            unmet(FaultKind::OutOfRange, there).values(there.length_on(peer), there.end())
        });
        judge.last_condition(here.fits_own(), || {
            unmet(FaultKind::OutOfRange, here).values(here.own_length(), here.end())
        });
    }

    #[inline(always)]
    fn transfer(&self) -> Transfer {
        let (there, here) = (begin(&self.there), begin(&self.here));
        if PUTS {
            Transfer::Put { source: here, destination: there, bytes: self.here.place().1 }
        } else {
            Transfer::Get { source: there, destination: here, bytes: self.there.place().1 }
        }
    }

    #[cfg(not(target_arch = "nvptx64"))]
    fn own(&self) -> u64 {
        self.here.address()
    }

    const BY_ALL: bool = true;
    const STORES: bool = true;

    #[inline(always)]
    fn ways(&self, peer: Rank) -> (u64, u64, u64) {
        let (there, here) = (self.there.address_on(peer), self.here.address());
        if PUTS { (there, here, self.here.place().1) } else { (here, there, self.there.place().1) }
    }

    #[inline(always)]
    unsafe fn store(&self, coop: &impl Coop, (to, from, bytes): (u64, u64, u64)) {
        // Safety: the caller's promise.
        unsafe { copy::<PUTS>(coop, to, from, bytes) };
    }

    #[inline(always)]
    fn issue<B: Backend>(post: &Post<'_, B, Self>, coop: &impl Coop) -> Result<(), Fault> {
        if post.takes_lsa() {
            let Post { gin, peer, options, request } = post;
            let addresses = || request.ways(*peer);
            // Safety: the check finds both ranges in range, and the peer reached.
            return unsafe { move_bytes::<PUTS>(gin.core(), *peer, options, coop, post.check(true), addresses) };
        }
        lead!(coop, post.over_network())
    }
}

impl<T: Pod> Arrives for Move<T, true> {}

/// A value of 1, 2, 4 or 8 bytes for one element at the peer.
#[derive(Clone, Copy, Debug)]
pub struct OneValue {
    pub(super) there: WindowRange<u8>,
    pub(super) value: u64,
    pub(super) width_log2: u32,
}

impl OneValue {
    #[inline(always)]
    pub(super) fn new<T: Value>(there: WindowRange<T>, value: T) -> Self {
        Self { there: there.as_bytes(), value: value.to_word(), width_log2: const { width_log2::<T>() } }
    }

    #[inline(always)]
    fn width(&self) -> u64 {
        1 << self.width_log2
    }
}

/// Returns log2 of the size of a value.
pub(super) const fn width_log2<T>() -> u32 {
    size_of::<T>().trailing_zeros()
}

impl Request for OneValue {
    #[inline(always)]
    fn operation(&self) -> Operation {
        Operation::PutValue
    }

    #[inline(always)]
    fn judge(&self, posted: &Posted<'_>, judge: &mut Judge) {
        let (there, width, unmet) = (&self.there, self.width(), |kind| Unmet::new(kind).of(self.there.subject()));
        let (offset, bytes) = there.place();
        judge.condition(bytes == width, || unmet(FaultKind::LengthMismatch).values(width, there.bytes()));
        judge.condition(offset.is_multiple_of(width), || unmet(FaultKind::Misaligned).values(width, there.offset()));
        judge.last_condition(there.fits_on(posted.peer), || {
            unmet(FaultKind::OutOfRange).values(there.length_on(posted.peer), there.end())
        });
    }

    #[inline(always)]
    fn transfer(&self) -> Transfer {
        Transfer::PutValue { value: self.value, width_log2: self.width_log2, destination: begin(&self.there) }
    }

    #[cfg(not(target_arch = "nvptx64"))]
    fn own(&self) -> u64 {
        self.value
    }

    const BY_ALL: bool = false;
    const STORES: bool = true;

    #[inline(always)]
    fn ways(&self, peer: Rank) -> (u64, u64, u64) {
        (self.there.address_on(peer), 0, 0)
    }

    #[inline(always)]
    unsafe fn store(&self, _: &impl Coop, (to, ..): (u64, u64, u64)) {
        let (to, value) = (to as usize, self.value);
        // Safety: in range, aligned, and the peer is reached.
        unsafe {
            match self.width() {
                1 => store_weak_u8(to as *mut u8, value as u8),
                2 => store_weak_u16(to as *mut u16, value as u16),
                4 => store_weak_u32(to as *mut u32, value as u32),
                _ => store_weak_u64(to as *mut u64, value),
            }
        }
    }

    #[inline(always)]
    fn issue<B: Backend>(post: &Post<'_, B, Self>, coop: &impl Coop) -> Result<(), Fault> {
        let store = || {
            // Safety: `by_one_thread` has checked the request for this route.
            unsafe { post.request.store(coop, post.request.ways(post.peer)) };
            Scope::Thread
        };
        lead!(coop, post.by_one_thread(coop, store))
    }
}

impl Arrives for OneValue {}

/// No transfer: the options name the signal to raise.
#[derive(Clone, Copy, Debug)]
pub struct Raise {
    /// The operation that raises it.
    pub(super) operation: Operation,
}

impl Request for Raise {
    #[inline(always)]
    fn operation(&self) -> Operation {
        self.operation
    }

    #[inline(always)]
    fn judge(&self, _: &Posted<'_>, _: &mut Judge) {}

    #[inline(always)]
    fn transfer(&self) -> Transfer {
        Transfer::Nothing
    }

    #[cfg(not(target_arch = "nvptx64"))]
    fn own(&self) -> u64 {
        0
    }

    const BY_ALL: bool = false;
    const STORES: bool = false;

    #[inline(always)]
    fn ways(&self, _: Rank) -> (u64, u64, u64) {
        (0, 0, 0)
    }

    #[inline(always)]
    unsafe fn store(&self, _: &impl Coop, _: (u64, u64, u64)) {}

    #[inline(always)]
    fn issue<B: Backend>(post: &Post<'_, B, Self>, coop: &impl Coop) -> Result<(), Fault> {
        lead!(coop, post.by_one_thread(coop, || post.options.given))
    }
}
