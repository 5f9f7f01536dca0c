// SPDX-License-Identifier: MIT OR Apache-2.0
//! Groups of whole warps.

use super::{Coop, WARP_SIZE, imp};
use crate::fault::{Fault, PASSED, pass, passed};

/// All threads of the block. Uses barrier 0 of the hardware and 16 bytes of shared memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Block;

/// Neighbouring whole warps of a block, with a named barrier of their own.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct WarpSpan {
    first: u32,
    warps: u32,
    barrier: u32,
}

/// Number of named barriers of a block: 0 belongs to [`Block`], 1 to 15 are for [`WarpSpan`]s and [`Arrivals`].
const BARRIERS: u32 = 16;

impl WarpSpan {
    /// Returns the warps `first .. first + warps` of the block, which meet at barrier `barrier` (1 to 15).
    ///
    /// Returns `None` if there is no such barrier, if `warps` is 0, or if the block has fewer than `32 * (first +
    /// warps)` threads.
    ///
    /// # Safety
    /// - All threads of these warps, and no others, make the same calls with the same span.
    /// - No other threads use that barrier meanwhile.
    #[inline(always)]
    #[must_use]
    pub unsafe fn new(first: u32, warps: u32, barrier: u32) -> Option<Self> {
        let threads = super::block_dim().count() as u64;
        let last = (first as u64 + warps as u64) * WARP_SIZE as u64;
        (warps != 0 && last <= threads && barrier != 0 && barrier < BARRIERS).then_some(Self { first, warps, barrier })
    }
}

/// A named barrier at which whole warps meet, some of which do not wait: they arrive and go on. After its wait, a warp
/// sees what all of them did before they arrived.
///
/// Two of them make a pipeline of warps that produce and warps that consume, with a slot of shared memory between them:
/// one barrier says that the slot is full, the other that it is empty.
///
/// ```
/// use gin_device::prelude::*;
///
/// /// Passes `rounds` values from the first warp of a block of two to the second one.
/// ///
/// /// # Safety
/// /// - All threads of a block of 64 threads call. No other group uses the barriers 1 and 2, and nobody else the slot.
/// unsafe fn pass(slot: SharedArray<u32>, rounds: u32, take: impl Fn(u32)) {
///     // Safety: two warps arrive or wait at each, once in each round.
///     let (Some(full), Some(empty)) = (unsafe { (Arrivals::new(1, 2), Arrivals::new(2, 2)) }) else { return };
///     for round in 0..rounds {
///         if thread_in_block() < WARP_SIZE {
///             if round > 0 {
///                 empty.wait();
///             }
///             if thread_in_block() == 0 {
///                 slot.write(0, round);
///             }
///             full.arrive();
///         } else {
///             full.wait();
///             take(slot.read(0));
///             if round + 1 < rounds {
///                 empty.arrive();
///             }
///         }
///     }
/// }
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Arrivals {
    barrier: u32,
    threads: u32,
}

impl Arrivals {
    /// Returns the barrier `barrier` (1 to 15) of `warps` warps that arrive or wait. It is complete when this number of
    /// warps has come, and then begins again.
    ///
    /// Returns `None` if there is no such barrier, if `warps` is 0, or if the block has fewer than `32 * warps`
    /// threads.
    ///
    /// # Safety
    /// - All threads of a warp make the same calls. A warp that has arrived comes again only after the barrier was
    ///   complete, which it knows from the warps that waited: by another barrier. At least one warp waits.
    /// - No other threads use that barrier meanwhile.
    #[inline(always)]
    #[must_use]
    pub unsafe fn new(barrier: u32, warps: u32) -> Option<Self> {
        // Safety: the caller's promise.
        let span = unsafe { WarpSpan::new(0, warps, barrier) }?;
        Some(Self { barrier, threads: span.size() })
    }

    /// Arrives, without waiting for the others.
    #[inline(always)]
    #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
    pub fn arrive(&self) {
        imp::arrive_named(self.barrier, self.threads);
    }

    /// Arrives, and waits for the others.
    #[inline(always)]
    #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
    pub fn wait(&self) {
        imp::sync_named(self.barrier, self.threads);
    }
}

/// Words of scratch for each barrier: those of a fault or a value, and one for the writers.
const SCRATCH: usize = PASSED + 1;

crate::shared! {
    /// Room for broadcasts, one set for each barrier.
    static BROADCAST: [u64; SCRATCH * BARRIERS as usize];
}

/// Returns the scratch of a barrier. Only the threads that meet there access it, between its barriers.
#[inline(always)]
fn scratch(barrier: u32) -> *mut u64 {
    // In range, because `barrier` is less than `BARRIERS`.
    BROADCAST.as_mut_ptr().cast::<u64>().wrapping_add(SCRATCH * barrier as usize)
}

#[inline(always)]
#[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
fn broadcast(group: &impl Coop, barrier: u32, value: u64, root: u32) -> u64 {
    let word = scratch(barrier);
    group.sync();
    if group.rank() == root {
        // Safety: the scratch is this group's; the barriers order the one writer and the readers.
        unsafe { word.write_volatile(value) };
    }
    group.sync();
    // Safety: as above. The first barrier of the next broadcast delays its writer until all threads have read.
    unsafe { word.read_volatile() }
}

/// Stores a fault into the scratch. One thread of the group calls, between two barriers.
#[inline(always)]
fn write_fault(barrier: u32, fault: Fault) {
    let scratch = scratch(barrier);
    for (index, word) in pass(fault).into_iter().enumerate() {
        // Safety: the scratch is this group's; its barriers order the one writer and the readers.
        unsafe { scratch.wrapping_add(index).write_volatile(word) };
    }
}

/// Returns the fault in the scratch, in all threads of the group.
#[inline(always)]
#[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
fn read_fault(group: &impl Coop, barrier: u32) -> Fault {
    let scratch = scratch(barrier);
    // Safety: as in `write_fault`.
    let fault = passed(core::array::from_fn(|index| unsafe { scratch.wrapping_add(index).read_volatile() }));
    // Delays the next writer until all threads have read.
    group.sync();
    fault
}

#[inline(always)]
#[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
fn agree_led(group: &impl Coop, barrier: u32, mine: Result<(), Fault>) -> Result<(), Fault> {
    if let Err(fault) = mine {
        write_fault(barrier, fault);
    }
    if group.sync_or(mine.is_err()) { Err(read_fault(group, barrier)) } else { Ok(()) }
}

/// Returns the fault of one thread that brings one, in all threads. They have just met, so none still reads the
/// scratch.
#[inline(always)]
#[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
fn share_fault(group: &impl Coop, barrier: u32, mine: Option<Fault>) -> Fault {
    let owner = scratch(barrier).wrapping_add(PASSED);
    if mine.is_some() {
        // Safety: as in `broadcast`. Each writer writes one word, and any of them may win.
        unsafe { owner.write_volatile(group.rank() as u64) };
    }
    group.sync();
    // Safety: as above.
    if let Some(fault) = mine
        && unsafe { owner.read_volatile() } == group.rank() as u64
    {
        write_fault(barrier, fault);
    }
    group.sync();
    read_fault(group, barrier)
}

impl Coop for Block {
    #[inline(always)]
    fn rank(&self) -> u32 {
        super::thread_in_block()
    }

    #[inline(always)]
    fn size(&self) -> u32 {
        super::block_dim().count()
    }

    #[inline(always)]
    #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
    fn sync(&self) {
        imp::sync_block();
    }

    #[inline(always)]
    #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
    fn sync_or(&self, bit: bool) -> bool {
        imp::sync_block_or(bit)
    }

    #[inline(always)]
    fn broadcast(&self, value: u64, root: u32) -> u64 {
        broadcast(self, 0, value, root)
    }

    #[inline(always)]
    fn elect(&self) -> bool {
        let index = super::thread_index();
        index.x | index.y | index.z == 0
    }

    #[inline(always)]
    fn share_fault(&self, mine: Option<Fault>) -> Fault {
        share_fault(self, 0, mine)
    }

    #[inline(always)]
    fn agree_led(&self, mine: Result<(), Fault>) -> Result<(), Fault> {
        agree_led(self, 0, mine)
    }
}

impl Coop for WarpSpan {
    #[inline(always)]
    fn rank(&self) -> u32 {
        super::thread_in_block() - self.first * WARP_SIZE
    }

    #[inline(always)]
    fn size(&self) -> u32 {
        self.warps * WARP_SIZE
    }

    #[inline(always)]
    #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
    fn sync(&self) {
        imp::sync_named(self.barrier, self.size());
    }

    #[inline(always)]
    #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
    fn sync_or(&self, bit: bool) -> bool {
        imp::sync_named_or(self.barrier, self.size(), bit)
    }

    #[inline(always)]
    fn broadcast(&self, value: u64, root: u32) -> u64 {
        broadcast(self, self.barrier, value, root)
    }

    #[inline(always)]
    fn share_fault(&self, mine: Option<Fault>) -> Fault {
        share_fault(self, self.barrier, mine)
    }

    #[inline(always)]
    fn agree_led(&self, mine: Result<(), Fault>) -> Result<(), Fault> {
        agree_led(self, self.barrier, mine)
    }
}
