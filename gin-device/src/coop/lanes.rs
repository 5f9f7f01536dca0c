// SPDX-License-Identifier: MIT OR Apache-2.0
//! Groups of lanes of one warp.

use super::value::{Fold, LaneInteger, LaneValue, Source};
use super::{Coop, WARP_SIZE, imp};
use crate::fault::{Fault, PASSED, pass, passed};

/// A group of lanes of one warp, which adds votes, shuffles, matches and reductions to [`Coop`].
///
/// | call | PTX | SASS on sm_90, by [`Warp`] |
/// | --- | --- | --- |
/// | `ballot` | `vote.sync.ballot.b32` | `VOTE.ANY` |
/// | `any`, `all` | `vote.sync.any.pred`, `vote.sync.all.pred` | `VOTE.ANY`, `VOTE.ALL` |
/// | `shuffle` | `shfl.sync.idx.b32` | `SHFL.IDX` |
/// | `shuffle_up`, `shuffle_down` | `shfl.sync.up.b32`, `shfl.sync.down.b32` | `SHFL.UP`, `SHFL.DOWN` |
/// | `shuffle_xor` | `shfl.sync.bfly.b32` | `SHFL.BFLY` |
/// | `match_any` | `match.any.sync` | `MATCH.ANY` |
/// | `match_all` | `match.all.sync` | `MATCH.ALL` |
/// | `reduce_add` and the other reductions | `redux.sync` | `REDUX` |
///
/// A shuffle of 64 bits is two. `Warp` and `Tile<32>` name all lanes by a constant; other groups compute their mask.
/// [`Lanes`] finds lanes by rank, which takes a loop over the bits of its mask.
///
/// Each call waits for the lanes of the group, and orders no memory: [`sync`](Coop::sync) does.
pub trait LaneCoop: Coop {
    /// Returns the lanes of the group, as bits of the warp.
    fn mask(&self) -> u32;

    /// Returns the lane of the thread with this rank in the group.
    fn lane_of(&self, rank: u32) -> u32;

    /// Returns one bit per lane of the warp, set for each lane of the group that brings `true`.
    #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
    #[inline(always)]
    fn ballot(&self, bit: bool) -> u32 {
        imp::ballot_here(self.mask(), bit)
    }

    /// Returns whether any thread of the group brings `true`.
    #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
    #[inline(always)]
    fn any(&self, bit: bool) -> bool {
        imp::any_here(self.mask(), bit)
    }

    /// Returns whether all threads of the group bring `true`.
    #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
    #[inline(always)]
    fn all(&self, bit: bool) -> bool {
        imp::all_here(self.mask(), bit)
    }

    /// Returns the `value` of the thread with rank `from`, which may differ from thread to thread.
    ///
    /// For a rank outside the group, returns the caller's own value. In a warp with fewer than 32 threads, the value of
    /// a rank from their number to 31 is unspecified.
    #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
    fn shuffle<T: LaneValue>(&self, value: T, from: u32) -> T;

    /// Returns the value of the thread whose rank differs from the caller's in the bits of `with`, as
    /// [`shuffle`](Self::shuffle) does.
    #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
    #[inline(always)]
    fn shuffle_xor<T: LaneValue>(&self, value: T, with: u32) -> T {
        self.shuffle(value, self.rank() ^ with)
    }

    /// Returns the value of the thread `by` ranks below; the caller's own if there is none.
    #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
    #[inline(always)]
    fn shuffle_up<T: LaneValue>(&self, value: T, by: u32) -> T {
        self.shuffle(value, if by <= self.rank() { self.rank() - by } else { self.rank() })
    }

    /// Returns the value of the thread `by` ranks above; the caller's own if there is none. In a warp with fewer than
    /// 32 threads, see [`shuffle`](Self::shuffle).
    #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
    #[inline(always)]
    fn shuffle_down<T: LaneValue>(&self, value: T, by: u32) -> T {
        self.shuffle(value, self.rank().saturating_add(by))
    }

    /// Returns the lanes of the group that bring the caller's value, as bits of the warp. Compares bits.
    #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
    #[inline(always)]
    fn match_any<T: LaneValue>(&self, value: T) -> u32 {
        imp::match_any(self.mask(), value.to_lane_bits(), T::WIDE)
    }

    /// Returns whether all threads of the group bring the same value. Compares bits.
    #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
    #[inline(always)]
    fn match_all<T: LaneValue>(&self, value: T) -> bool {
        imp::match_all(self.mask(), value.to_lane_bits(), T::WIDE)
    }

    /// Returns the sum of the group's values modulo 2^32, in all threads.
    #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
    #[inline(always)]
    fn reduce_add<T: LaneInteger>(&self, value: T) -> T {
        self.reduce(Fold::Add, value)
    }

    /// Returns the least of the group's values, in all threads.
    #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
    #[inline(always)]
    fn reduce_min<T: LaneInteger>(&self, value: T) -> T {
        self.reduce(Fold::Min, value)
    }

    /// Returns the greatest of the group's values, in all threads.
    #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
    #[inline(always)]
    fn reduce_max<T: LaneInteger>(&self, value: T) -> T {
        self.reduce(Fold::Max, value)
    }

    /// Returns the bits that are 1 in all of the group's values, in all threads.
    #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
    #[inline(always)]
    fn reduce_and<T: LaneInteger>(&self, value: T) -> T {
        self.reduce(Fold::And, value)
    }

    /// Returns the bits that are 1 in any of the group's values, in all threads.
    #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
    #[inline(always)]
    fn reduce_or<T: LaneInteger>(&self, value: T) -> T {
        self.reduce(Fold::Or, value)
    }

    /// Returns the bits that are 1 in an odd number of the group's values, in all threads.
    #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
    #[inline(always)]
    fn reduce_xor<T: LaneInteger>(&self, value: T) -> T {
        self.reduce(Fold::Xor, value)
    }

    #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
    #[doc(hidden)]
    #[inline(always)]
    fn reduce<T: LaneInteger>(&self, fold: Fold, value: T) -> T {
        let word = value.to_lane_bits() as u32;
        T::from_lane_bits(u64::from(imp::reduce(self.mask(), fold, T::SIGNED, word)))
    }
}

/// The calling thread alone.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Thread;

/// `N` neighbouring lanes of a warp; the first lane is a multiple of `N`.
///
/// `N` is 2, 4, 8, 16 or 32; other numbers do not compile. All lanes must be threads of the block: a block whose size
/// is not a multiple of `N` has no full tile at its end.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Tile<const N: u32>;

/// The lanes of the calling thread's warp that are threads of the block: 32, or fewer in the last warp.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Warp;

/// A set of lanes of the calling thread's warp. Each of them must make the same calls with the same set.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Lanes(u32);

impl Lanes {
    /// Returns the lanes whose bits are set.
    ///
    /// # Safety
    /// - The caller's own lane is among them.
    /// - Each of them is a thread of the block and makes the same calls with the same set.
    #[inline(always)]
    #[must_use]
    pub const unsafe fn new(mask: u32) -> Self {
        Self(mask)
    }
}

impl Coop for Thread {
    const ALONE: bool = true;

    #[inline(always)]
    fn rank(&self) -> u32 {
        0
    }

    #[inline(always)]
    fn size(&self) -> u32 {
        1
    }

    #[inline(always)]
    fn sync(&self) {
        #[cfg(not(target_arch = "nvptx64"))]
        imp::note_place();
    }

    #[inline(always)]
    fn sync_or(&self, bit: bool) -> bool {
        bit
    }

    #[inline(always)]
    fn broadcast(&self, value: u64, _: u32) -> u64 {
        value
    }

    #[inline(always)]
    fn share_fault(&self, mine: Option<Fault>) -> Fault {
        // The contract of the trait: at least one thread brings a fault.
        mine.unwrap_or(Fault::new(gin_abi::FaultKind::Reported, gin_abi::Operation::None))
    }

    #[inline(always)]
    fn agree(&self, mine: Result<(), Fault>) -> Result<(), Fault> {
        mine
    }
}

impl LaneCoop for Thread {
    #[inline(always)]
    fn mask(&self) -> u32 {
        1 << imp::lane()
    }

    #[inline(always)]
    fn lane_of(&self, _: u32) -> u32 {
        imp::lane()
    }

    #[inline(always)]
    fn ballot(&self, bit: bool) -> u32 {
        (bit as u32) << imp::lane()
    }

    #[inline(always)]
    fn any(&self, bit: bool) -> bool {
        bit
    }

    #[inline(always)]
    fn all(&self, bit: bool) -> bool {
        bit
    }

    #[inline(always)]
    fn shuffle<T: LaneValue>(&self, value: T, _: u32) -> T {
        value
    }

    #[inline(always)]
    fn match_any<T: LaneValue>(&self, _: T) -> u32 {
        self.mask()
    }

    #[inline(always)]
    fn match_all<T: LaneValue>(&self, _: T) -> bool {
        true
    }

    #[inline(always)]
    fn reduce<T: LaneInteger>(&self, _: Fold, value: T) -> T {
        value
    }
}

/// Returns the rank of the calling lane among the lanes of `mask`.
#[inline(always)]
fn rank_in(mask: u32) -> u32 {
    (mask & imp::lanes_below()).count_ones()
}

/// Returns the lane of the set bit number `rank` of `mask`, which has more than `rank` set bits.
#[inline(always)]
fn nth_lane(mask: u32, rank: u32) -> u32 {
    let mut rest = mask;
    let mut left = rank;
    while left > 0 {
        rest &= rest.wrapping_sub(1);
        left -= 1;
    }
    rest.trailing_zeros()
}

/// Returns the fault of lane `from`, which has one, in all lanes of `mask`.
#[inline(always)]
#[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
fn share_from(mask: u32, mine: Option<Fault>, from: u32) -> Fault {
    let mut words = mine.map_or([0; PASSED], pass);
    for word in &mut words {
        *word = imp::shuffle(mask, *word, from);
    }
    passed(words)
}

/// Returns the value of a lane in the caller's segment of `width` lanes; the caller's own if `by` leads out of it.
#[inline(always)]
#[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
fn shuffle_in<T: LaneValue>(mask: u32, width: u32, value: T, source: Source, by: u32) -> T {
    // The instruction takes five bits of `by`.
    let by = match source {
        Source::Lane => {
            if by < width {
                by
            } else {
                imp::lane()
            }
        }
        // A distance of 0 gives the own value, as one of 32 must.
        Source::Up | Source::Down => by.min(WARP_SIZE),
        Source::Xor => {
            if by < width {
                by
            } else {
                0
            }
        }
    };
    T::from_lane_bits(imp::shuffle_from(mask, value.to_lane_bits(), T::WIDE, source, by, width))
}

macro_rules! lane_coop {
    ([$($generics:tt)*] $group:ty, $mask:expr, $rank:expr, $size:expr, $lane_of:expr, $($width:expr)?) => {
        impl<$($generics)*> Coop for $group {
            #[inline(always)]
            fn rank(&self) -> u32 {
                let group = self;
                $rank(group)
            }

            #[inline(always)]
            fn size(&self) -> u32 {
                let group = self;
                $size(group)
            }

            #[inline(always)]
            fn sync(&self) {
                imp::sync_lanes(self.mask());
            }

            #[inline(always)]
            fn sync_or(&self, bit: bool) -> bool {
                imp::vote_any(self.mask(), bit)
            }

            #[inline(always)]
            fn broadcast(&self, value: u64, root: u32) -> u64 {
                imp::shuffle(self.mask(), value, self.lane_of(root))
            }

            #[inline(always)]
            fn share_fault(&self, mine: Option<Fault>) -> Fault {
                let from = self.ballot(mine.is_some()).trailing_zeros();
                share_from(self.mask(), mine, from)
            }

            #[inline(always)]
            fn agree_led(&self, mine: Result<(), Fault>) -> Result<(), Fault> {
                if self.sync_or(mine.is_err()) {
                    Err(share_from(self.mask(), mine.err(), self.lane_of(0)))
                } else {
                    Ok(())
                }
            }
        }

        impl<$($generics)*> LaneCoop for $group {
            #[inline(always)]
            fn mask(&self) -> u32 {
                let group = self;
                $mask(group)
            }

            #[inline(always)]
            fn lane_of(&self, rank: u32) -> u32 {
                let group = self;
                $lane_of(group, rank)
            }

            lane_coop! { @shuffles $($width)? }
        }
    };
    (@shuffles) => {
        #[inline(always)]
        fn shuffle<T: LaneValue>(&self, value: T, from: u32) -> T {
            let lane = if from < self.size() { self.lane_of(from) } else { imp::lane() };
            shuffle_in(self.mask(), WARP_SIZE, value, Source::Lane, lane)
        }
    };
    (@shuffles $width:expr) => {
        #[inline(always)]
        fn shuffle<T: LaneValue>(&self, value: T, from: u32) -> T {
            shuffle_in(self.mask(), $width, value, Source::Lane, from)
        }

        #[inline(always)]
        fn shuffle_xor<T: LaneValue>(&self, value: T, with: u32) -> T {
            shuffle_in(self.mask(), $width, value, Source::Xor, with)
        }

        #[inline(always)]
        fn shuffle_up<T: LaneValue>(&self, value: T, by: u32) -> T {
            shuffle_in(self.mask(), $width, value, Source::Up, by)
        }

        #[inline(always)]
        fn shuffle_down<T: LaneValue>(&self, value: T, by: u32) -> T {
            shuffle_in(self.mask(), $width, value, Source::Down, by)
        }
    };
}

impl<const N: u32> Tile<N> {
    const MASK: u32 = {
        assert!(N.is_power_of_two() && N >= 2 && N <= WARP_SIZE, "a tile has 2, 4, 8, 16 or 32 lanes");
        u32::MAX >> (WARP_SIZE - N)
    };

    #[inline(always)]
    fn first(self) -> u32 {
        if N == WARP_SIZE { 0 } else { imp::lane() & !(N - 1) }
    }
}

lane_coop!(
    [const N: u32] Tile<N>,
    |tile: &Self| Self::MASK << tile.first(),
    |_: &Self| imp::lane() & (N - 1),
    |_: &Self| N,
    |tile: &Self, rank: u32| tile.first() + rank,
    N
);

/// Returns the number of lanes of the calling thread's warp that are threads of the block.
#[inline(always)]
fn lanes_in_warp() -> u32 {
    let first = super::thread_in_block() & !(WARP_SIZE - 1);
    (super::block_dim().count() - first).min(WARP_SIZE)
}

/// Returns the lanes of a whole warp. On a GPU these are all 32, also in a block's last warp: lanes that do not exist
/// count as lanes that have ended, which no barrier waits for and which vote for nothing. A mask that is known when the
/// kernel is compiled takes one instruction where another takes three.
#[inline(always)]
fn whole_warp() -> u32 {
    if cfg!(target_arch = "nvptx64") { u32::MAX } else { u32::MAX >> (WARP_SIZE - lanes_in_warp()) }
}

lane_coop!(
    [] Warp,
    |_: &Self| whole_warp(),
    |_: &Self| imp::lane(),
    |_: &Self| lanes_in_warp(),
    |_: &Self, rank: u32| rank,
    WARP_SIZE
);

lane_coop!(
    [] Lanes,
    |lanes: &Self| lanes.0,
    |lanes: &Self| rank_in(lanes.0),
    |lanes: &Self| lanes.0.count_ones(),
    |lanes: &Self, rank: u32| nth_lane(lanes.0, rank),
);
