// SPDX-License-Identifier: MIT OR Apache-2.0
//! Groups of threads that are known at run time.

use gin_abi::{FaultKind, Operation};
use gin_device::Fault;
use gin_device::prelude::{Block, Coop, Lanes, Thread, Warp, WarpSpan};

/// A group of threads in one word, as C passes it.
///
/// | bits 0 to 7 | group | other bits |
/// | --- | --- | --- |
/// | 0 | the calling thread | - |
/// | 1 | the warp | - |
/// | 2 | the block | - |
/// | 3 | lanes of the warp | 32 to 63: their mask |
/// | 4 | neighbouring warps | 8 to 15: the named barrier, 1 to 15; 32 to 47: the first; 48 to 63: their number |
///
/// Any other word is no group.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct AnyCoop(u64);

impl AnyCoop {
    /// Returns the group of this word.
    ///
    /// # Safety
    /// - The calling threads are the group: each lane of a mask calls, and the warps of a span are in the
    ///   block and alone use their barrier.
    ///
    /// # Errors
    /// [`FaultKind::BadDescriptor`] if the word is no group, or a span is not in the block or has no barrier.
    #[inline(always)]
    pub unsafe fn new(word: u64) -> Result<Self, Fault> {
        let coop = Self(word);
        // Safety: the caller's promise.
        let known = word as u8 <= 3 || (word as u8 == 4 && unsafe { coop.span() }.is_some());
        if known { Ok(coop) } else { Err(Fault::new(FaultKind::BadDescriptor, Operation::None)) }
    }

    /// Returns the span of warps that the word names.
    ///
    /// # Safety
    /// - As [`new`](Self::new).
    #[inline(always)]
    unsafe fn span(self) -> Option<WarpSpan> {
        // Safety: the caller's promise.
        unsafe { WarpSpan::new(self.mask() & 0xffff, self.mask() >> 16, (self.0 >> 8) as u32 & 0xff) }
    }

    #[inline(always)]
    const fn mask(self) -> u32 {
        (self.0 >> 32) as u32
    }
}

/// Calls a method of the group.
macro_rules! each {
    ($coop:expr, $group:ident => $call:expr) => {
        match $coop.0 as u8 {
            1 => {
                let $group = &Warp;
                $call
            }
            2 => {
                let $group = &Block;
                $call
            }
            3 => {
                // Safety: the promise of `AnyCoop::new`.
                let $group = &unsafe { Lanes::new($coop.mask()) };
                $call
            }
            4 => {
                // Safety: as above; `new` has checked that there is one.
                match unsafe { $coop.span() } {
                    Some(span) => {
                        let $group = &span;
                        $call
                    }
                    None => {
                        let $group = &Thread;
                        $call
                    }
                }
            }
            _ => {
                let $group = &Thread;
                $call
            }
        }
    };
}

impl Coop for AnyCoop {
    #[inline(always)]
    fn rank(&self) -> u32 {
        each!(self, group => group.rank())
    }

    #[inline(always)]
    fn size(&self) -> u32 {
        each!(self, group => group.size())
    }

    #[inline(always)]
    fn sync(&self) {
        each!(self, group => group.sync());
    }

    #[inline(always)]
    fn sync_or(&self, bit: bool) -> bool {
        each!(self, group => group.sync_or(bit))
    }

    #[inline(always)]
    fn broadcast(&self, value: u64, root: u32) -> u64 {
        each!(self, group => group.broadcast(value, root))
    }

    #[inline(always)]
    fn share_fault(&self, mine: Option<Fault>) -> Fault {
        each!(self, group => group.share_fault(mine))
    }

    #[inline(always)]
    fn elect(&self) -> bool {
        each!(self, group => group.elect())
    }

    #[inline(always)]
    fn agree(&self, mine: Result<(), Fault>) -> Result<(), Fault> {
        each!(self, group => group.agree(mine))
    }

    #[inline(always)]
    fn agree_led(&self, mine: Result<(), Fault>) -> Result<(), Fault> {
        each!(self, group => group.agree_led(mine))
    }
}
