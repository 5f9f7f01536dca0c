// SPDX-License-Identifier: MIT OR Apache-2.0
//! Thread groups.
//!
//! A call that several threads make together takes a *coop*: the group that makes it. All threads of the group call,
//! one acts, and all get the same result.
//!
//! | group | threads | barrier |
//! | --- | --- | --- |
//! | [`Thread`] | the calling thread | none |
//! | [`Tile<N>`](Tile) | `N` neighbouring lanes of a warp, aligned; `N` = 2, 4, 8, 16 or 32 | warp barrier over their mask |
//! | [`Warp`] | the lanes of a warp that the block has (32, fewer in the last warp) | warp barrier |
//! | [`Lanes`] | any set of lanes of a warp | warp barrier over their mask |
//! | [`WarpSpan`] | neighbouring whole warps of a block | a named barrier, 1 to 15 |
//! | [`Block`] | all threads of the block | the block's barrier |
//!
//! [`Arrivals`] is a named barrier at which some warps arrive without waiting.
//!
//! A thread's number in its block is `x + dim.x * (y + dim.y * z)`; warps are 32 threads of consecutive numbers. A
//! group of lanes uses its own mask for every vote and shuffle, so other lanes may be elsewhere. As in CUDA, all
//! threads of a group must make the same calls in the same order.

/// Evaluates an expression in the elected thread of a coop and gives its result to all threads. Syncs before and after.
///
/// It is [`Coop::lead`] for large expressions. LLVM makes a function of a large closure with several callers, and a
/// call needs a stack.
macro_rules! lead {
    ($coop:expr, $act:expr) => {{
        let coop = $coop;
        coop.sync();
        let mine = if coop.elect() { $act } else { Ok(()) };
        $crate::fault::here(coop.agree_led(mine))
    }};
}
pub(crate) use lead;

mod lanes;
mod span;
mod value;

#[cfg(not(target_arch = "nvptx64"))]
mod cpu;
#[cfg(target_arch = "nvptx64")]
mod ptx;

#[cfg(not(target_arch = "nvptx64"))]
use cpu as imp;
#[cfg(target_arch = "nvptx64")]
use ptx as imp;

pub use imp::{block_dim, block_index, grid_dim, thread_index};
pub use lanes::{LaneCoop, Lanes, Thread, Tile, Warp};
pub use span::{Arrivals, Block, WarpSpan};
#[doc(hidden)]
pub use value::Fold;
pub use value::{LaneInteger, LaneValue};

pub(crate) use imp::{
    active_mask, alike, any_here, ballot_here, lanes_below, lanes_until, leader_shuffle, leader_shuffle_narrow,
    own_lane, sync_here,
};

use crate::fault::Fault;

/// Threads in a warp.
pub const WARP_SIZE: u32 = 32;

/// Three extents or indices, as CUDA counts them.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Dim {
    /// Fastest.
    pub x: u32,
    /// Middle.
    pub y: u32,
    /// Slowest.
    pub z: u32,
}

impl Dim {
    /// Returns the product of the three.
    #[inline(always)]
    #[must_use]
    pub const fn count(self) -> u32 {
        self.x * self.y * self.z
    }
}

/// Returns the number of the calling thread in its block.
#[inline(always)]
pub fn thread_in_block() -> u32 {
    let (index, dim) = (thread_index(), block_dim());
    index.x + dim.x * (index.y + dim.y * index.z)
}

/// Returns the number of the calling thread's block in the grid.
#[inline(always)]
pub fn block_in_grid() -> u32 {
    let (index, dim) = (block_index(), grid_dim());
    index.x + dim.x * (index.y + dim.y * index.z)
}

/// Returns the lane of the calling thread in its warp, 0 to 31.
#[inline(always)]
pub fn lane() -> u32 {
    imp::lane()
}

/// A group of threads that call together.
///
/// Ordering: [`sync`](Self::sync), and each call that implies a sync, orders memory among the threads of the group, at
/// block scope. Earlier writes of one thread are visible to the others afterwards.
pub trait Coop: Copy {
    /// The group is one thread.
    #[doc(hidden)]
    const ALONE: bool = false;

    /// Returns the rank of the calling thread in the group, from 0.
    fn rank(&self) -> u32;

    /// Returns the number of threads in the group.
    fn size(&self) -> u32;

    /// Waits for all threads of the group.
    #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
    fn sync(&self);

    /// Waits for all threads of the group and returns whether any of them brought `true`.
    #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
    fn sync_or(&self, bit: bool) -> bool;

    /// Returns the `value` of the thread with rank `root`, in all threads. Implies a sync.
    #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
    fn broadcast(&self, value: u64, root: u32) -> u64;

    /// Returns the fault of one of the threads that bring `Some`, in all threads. At least one must bring it. Slow,
    /// because faults are rare.
    #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
    #[doc(hidden)]
    fn share_fault(&self, mine: Option<Fault>) -> Fault;

    /// Returns whether the calling thread acts for the group: rank 0.
    #[inline(always)]
    fn elect(&self) -> bool {
        self.rank() == 0
    }

    /// Returns the thread's share of `len` items: the indices `rank, rank + size, rank + 2 * size, ...` below `len`.
    /// Neighbouring threads access neighbouring items.
    ///
    /// ```
    /// # use gin_device::prelude::*;
    /// // A group of one thread has all items.
    /// assert!(Thread.stripe(3).eq([0, 1, 2]));
    /// ```
    #[inline(always)]
    fn stripe(&self, len: usize) -> Stripe {
        Stripe { next: self.rank() as usize, step: self.size() as usize, len }
    }

    /// Ends a call of the group. If any thread brings an error, all threads get the same error. Implies a sync.
    ///
    /// The fault travels with the barrier that ends the call; only when there is one, more barriers follow to share it.
    ///
    /// # Errors
    /// The fault of one of the threads that brought one.
    #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
    #[inline(always)]
    fn agree(&self, mine: Result<(), Fault>) -> Result<(), Fault> {
        if self.sync_or(mine.is_err()) { Err(self.share_fault(mine.err())) } else { Ok(()) }
    }

    /// Ends a call as [`agree`](Self::agree). Only the elected thread may bring a fault, and the group has met since
    /// its last call that gave a value to all.
    #[doc(hidden)]
    #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
    #[inline(always)]
    fn agree_led(&self, mine: Result<(), Fault>) -> Result<(), Fault> {
        self.agree(mine)
    }

    /// Lets the elected thread act and gives its result to all threads. Implies a sync before and after.
    ///
    /// # Errors
    /// The fault of the elected thread.
    #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
    #[inline(always)]
    fn lead(&self, act: impl FnOnce() -> Result<(), Fault>) -> Result<(), Fault> {
        lead!(self, act())
    }

    /// Lets the elected thread act as [`lead`](Self::lead) and gives its value to all threads, by one more exchange.
    ///
    /// # Errors
    /// The fault of the elected thread.
    #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
    #[inline(always)]
    fn lead_value(&self, act: impl FnOnce() -> Result<u64, Fault>) -> Result<u64, Fault> {
        let mut value = 0;
        self.lead(|| {
            value = act()?;
            Ok(())
        })?;
        Ok(self.broadcast(value, 0))
    }
}

/// A thread's share of a number of items; see [`Coop::stripe`].
#[derive(Clone, Copy, Debug)]
pub struct Stripe {
    next: usize,
    step: usize,
    len: usize,
}

impl Iterator for Stripe {
    type Item = usize;

    #[inline(always)]
    fn next(&mut self) -> Option<usize> {
        let index = self.next;
        if index < self.len {
            // Past `usize::MAX` there are no items.
            self.next = index.saturating_add(self.step);
            Some(index)
        } else {
            None
        }
    }
}
