// SPDX-License-Identifier: MIT OR Apache-2.0
//! Places in the arena and the tokens, which a dispatch and its combine share.

use gin_device::prelude::*;

/// The sizes that all ranks of a group agree on.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug, Pod, Zeroable)]
#[bytemuck(crate = "gin_device::bytemuck")]
pub struct Sizes {
    /// Bytes of a row: a multiple of 16.
    pub row_bytes: u32,
    /// The most tokens of a rank.
    pub tokens: u32,
    /// Number of ids of a token: 1 to 32.
    pub topk: u32,
    /// Number of experts of all ranks.
    pub experts: u32,
    /// Number of ranks: 1 to 64.
    pub ranks: u32,
    /// Must be 0.
    pub reserved: u32,
}

impl Sizes {
    /// Returns the number of experts of a rank; the last ranks may have fewer.
    #[inline(always)]
    #[must_use]
    pub const fn local(&self) -> u32 {
        self.experts.div_ceil(self.ranks)
    }

    /// Returns the bytes of a row's description: its token, then the ids and the weights.
    #[inline(always)]
    #[must_use]
    pub const fn meta_bytes(&self) -> u32 {
        (4 + 8 * self.topk).next_multiple_of(16)
    }

    /// Returns the number of words of state of a lane, a multiple of 2.
    #[must_use]
    pub const fn words(&self) -> u64 {
        (STATE + 8 * self.ranks as u64).next_multiple_of(2)
    }

    /// Returns the number of rows that a rank has room for in a slot.
    #[inline(always)]
    #[must_use]
    pub const fn room(&self) -> u64 {
        self.ranks as u64 * self.tokens as u64
    }

    /// Returns the bytes of a lane in the arena of each rank.
    #[must_use]
    pub const fn lane_bytes(&self) -> u64 {
        2 * self.room() * (2 * self.row_bytes as u64 + self.meta_bytes() as u64) + 8 * self.words()
    }
}

/// Words of state before the words by rank.
pub(crate) const STATE: u64 = 16;
/// Indices of these words.
pub(crate) const EPOCH: u64 = 0;
pub(crate) const MASKED: u64 = 1;
pub(crate) const CLAIMED: u64 = 2;
/// Three words of the combine; six of the dispatch, three for each slot.
pub(crate) const COMBINE: u64 = 4;
pub(crate) const DISPATCH: u64 = 8;

/// A lane of a group: a parameter of the kernels, which the host makes. It has room for one dispatch at a time.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug, Pod, Zeroable)]
#[bytemuck(crate = "gin_device::bytemuck")]
pub struct Lane {
    /// The sizes.
    pub sizes: Sizes,
    /// The lane's first byte in the arena: a multiple of 16.
    pub first: u64,
    /// The address of the status block, in memory of the host: [`STATUS_WORDS`](crate::STATUS_WORDS) words.
    pub status: u64,
    /// How long a rank waits for another.
    pub deadline: Deadline,
}

impl Lane {
    /// Returns the offset of the rows that the slot has from `source`.
    #[inline(always)]
    pub(crate) fn rows(&self, slot: u64, source: u32) -> u64 {
        let region = slot * self.sizes.room() + u64::from(source) * u64::from(self.sizes.tokens);
        self.first + 8 * self.sizes.words() + region * u64::from(self.sizes.row_bytes)
    }

    /// Returns the offset of the rows that the slot has back from `source`.
    #[inline(always)]
    pub(crate) fn returned(&self, slot: u64, source: u32) -> u64 {
        self.rows(slot, source) + 2 * self.sizes.room() * u64::from(self.sizes.row_bytes)
    }

    /// Returns the offset of the descriptions of the rows that the slot has from `source`.
    #[inline(always)]
    pub(crate) fn meta(&self, slot: u64, source: u32) -> u64 {
        let region = slot * self.sizes.room() + u64::from(source) * u64::from(self.sizes.tokens);
        let after = 4 * self.sizes.room() * u64::from(self.sizes.row_bytes);
        self.first + 8 * self.sizes.words() + after + region * u64::from(self.sizes.meta_bytes())
    }

    /// Returns the offset of a word of state.
    #[inline(always)]
    pub(crate) fn word(&self, index: u64) -> u64 {
        self.first + 8 * index
    }

    /// Returns the offset of the number of rows that `source` sent in a slot. That rank stores it.
    #[inline(always)]
    pub(crate) fn count(&self, slot: u64, source: u32) -> u64 {
        self.by_rank(slot, source)
    }

    /// Returns the offset of the number of rows that the slot has from `source`: the one above, or 0 if that rank was
    /// silent.
    #[inline(always)]
    pub(crate) fn got(&self, slot: u64, source: u32) -> u64 {
        self.by_rank(2 + slot, source)
    }

    /// Returns the offset of the flag that `source` raises after its rows.
    #[inline(always)]
    pub(crate) fn sent_flag(&self, source: u32) -> u64 {
        self.by_rank(4, source)
    }

    /// Returns the offset of the flag that `source` raises after the rows that it returns.
    #[inline(always)]
    pub(crate) fn returned_flag(&self, source: u32) -> u64 {
        self.by_rank(5, source)
    }

    /// Returns the offset of the word in which the blocks agree whether `source` returned its rows.
    #[inline(always)]
    pub(crate) fn verdict(&self, source: u32) -> u64 {
        self.by_rank(6, source)
    }

    #[inline(always)]
    fn by_rank(&self, row: u64, rank: u32) -> u64 {
        self.word(STATE + row * u64::from(self.sizes.ranks) + u64::from(rank))
    }
}

/// Words of a lane that the host reads or writes: the number of dispatches; the ranks that it goes on without; whether
/// the status block has a report.
pub const EPOCH_WORD: u64 = EPOCH;
/// See [`EPOCH_WORD`].
pub const MASKED_WORD: u64 = MASKED;
/// See [`EPOCH_WORD`].
pub const CLAIMED_WORD: u64 = CLAIMED;

/// Sets the words of state of a lane to those after `epoch` dispatches, all received. For the host, while no kernel of
/// the lane runs on any rank.
pub fn reset(sizes: &Sizes, words: &mut [u64], epoch: u64) {
    words.fill(0);
    words[EPOCH as usize] = epoch;
    let by_rank = |row: u64| (STATE + row * u64::from(sizes.ranks)) as usize;
    // Both flags, and the verdict, whose epoch is one that nobody asks about again.
    words[by_rank(4)..by_rank(6)].fill(epoch);
    words[by_rank(6)..by_rank(7)].fill(epoch << 1);
}

/// Where the last dispatch of a lane is in the arena: offsets in bytes.
#[derive(Clone, Copy, Debug)]
pub struct Places {
    lane: Lane,
    slot: u64,
}

impl Places {
    /// Returns the places of the rows of dispatch `epoch`.
    #[must_use]
    pub const fn new(lane: &Lane, epoch: u64) -> Self {
        Self { lane: *lane, slot: epoch & 1 }
    }

    /// Returns the offset of the number of rows from `source`, a word.
    #[must_use]
    pub fn got(&self, source: u32) -> u64 {
        self.lane.got(self.slot, source)
    }

    /// Returns the offset of the first row from `source`.
    #[must_use]
    pub fn rows(&self, source: u32) -> u64 {
        self.lane.rows(self.slot, source)
    }

    /// Returns the offset of the description of the first row from `source`: token, ids, weights.
    #[must_use]
    pub fn meta(&self, source: u32) -> u64 {
        self.lane.meta(self.slot, source)
    }
}

/// [`Tokens::flags`]: ids have 64 bits.
pub const WIDE_IDS: u32 = 1;

/// The tokens of a rank: a parameter of the kernels.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug, Pod, Zeroable)]
#[bytemuck(crate = "gin_device::bytemuck")]
pub struct Tokens {
    /// The address of the rows: a multiple of 16.
    pub rows: u64,
    /// The address of the ids: signed integers of 32 bits, or of 64 with [`WIDE_IDS`]. A negative id is none.
    pub ids: u64,
    /// The address of the weights: `f32`; 0 if all are 1.
    pub weights: u64,
    /// The address of the number of tokens, a `u32` that may change between launches; 0 if [`count`](Self::count) is
    /// the number.
    pub count_at: u64,
    /// The number of tokens, unless `count_at` is set.
    pub count: u32,
    /// 0 or [`WIDE_IDS`].
    pub flags: u32,
}

impl Tokens {
    /// Returns the number of tokens, which may be more than there is room for.
    #[inline(always)]
    pub(crate) fn number(&self) -> u32 {
        if self.count_at == 0 {
            return self.count;
        }
        // Safety: the kernel's caller promised that it is a word.
        unsafe { load(self.count_at) }
    }

    /// Returns an id of a token; negative if it is none, `i32::MAX` if it is past that.
    #[inline(always)]
    pub(crate) fn id(&self, index: usize) -> i32 {
        // Safety: the kernel's caller promised that the ids are there.
        unsafe {
            if self.flags & WIDE_IDS == 0 {
                return load(self.ids + 4 * index as u64) as i32;
            }
            let (low, high): (u32, u32) = (load(self.ids + 8 * index as u64), load(self.ids + 8 * index as u64 + 4));
            match high as i32 {
                0 => low.min(i32::MAX as u32) as i32,
                high if high < 0 => -1,
                _ => i32::MAX,
            }
        }
    }

    /// Returns a weight of a token.
    #[inline(always)]
    pub(crate) fn weight(&self, index: usize) -> f32 {
        if self.weights == 0 {
            return 1.0;
        }
        // Safety: as above.
        f32::from_bits(unsafe { load(self.weights + 4 * index as u64) })
    }
}

/// Loads 4 bytes that earlier work of the stream wrote, or that were acquired.
///
/// # Safety
/// - `address` is valid and a multiple of 4.
#[inline(always)]
pub(crate) unsafe fn load(address: u64) -> u32 {
    // Safety: the caller's promise.
    unsafe { gin_device::sys::data::load_relaxed_sys_u32(address as usize as *const u32) }
}
