// SPDX-License-Identifier: MIT OR Apache-2.0
//! Parameters of the kernels: sizes, offsets in the arena, and the tokens, which a dispatch and its combine share.

use crate::protocol::flag;
use crate::routes::table_rows;
use gin_device::prelude::*;
use gin_device::sys::data::load_weak_pair;
use gin_device::sys::{GlobalWord, Word};

/// A divisor with its reciprocal, because a division takes a kernel long.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug, Pod, Zeroable)]
#[bytemuck(crate = "gin_device::bytemuck")]
pub struct Divisor {
    by: u32,
    /// 2^32 divided by it, rounded up; 0 for 1.
    reciprocal: u32,
}

impl Divisor {
    /// Makes the divisor of numbers of which each, times `by`, is at most 2^32. `by` is not 0.
    #[must_use]
    pub const fn new(by: u32) -> Self {
        Self { by, reciprocal: (1u64 << 32).div_ceil(by as u64) as u32 }
    }

    /// Returns a number divided by it, rounded down.
    // The reciprocal is too large by less than by / 2^32, so the quotient by less than 1 / by.
    #[inline(always)]
    #[must_use]
    pub const fn of(&self, number: u32) -> u32 {
        let quotient = ((number as u64 * self.reciprocal as u64) >> 32) as u32;
        if self.by == 1 { number } else { quotient }
    }

    /// Returns the divisor.
    #[inline(always)]
    #[must_use]
    pub const fn by(&self) -> u32 {
        self.by
    }
}

/// The sizes that all ranks of a group agree on.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug, Pod, Zeroable)]
#[bytemuck(crate = "gin_device::bytemuck")]
pub struct Sizes {
    /// Bytes of a row on its way to the experts: a multiple of 16.
    pub row_bytes: u32,
    /// Bytes of a row on its way back: a multiple of 16.
    pub combine_bytes: u32,
    /// Number of returned rows for a row: 1, or `topk`.
    pub combine_rows: u32,
    /// Bytes of the scales of a row: any number.
    pub scale_bytes: u32,
    /// The maximum number of tokens of a rank.
    pub tokens: u32,
    /// Number of ids of a token: 1 to 32.
    pub topk: u32,
    /// Number of experts of all ranks.
    pub experts: u32,
    /// Number of ranks: 1 to 64.
    pub ranks: u32,
    /// Number of experts of a rank; the last ranks may have fewer.
    pub owner: Divisor,
    /// Number of units of a row on its way to the experts: of [`Format::UNIT`](crate::Format) pairs.
    pub units: Divisor,
    /// Number of units of a sum: of [`UNIT`](crate::UNIT) pairs, and of [`LARGE_UNIT`](crate::LARGE_UNIT).
    pub sums: [Divisor; 2],
    /// Number of groups of 32 tokens whose routing a block has in shared memory at a time:
    /// [`groups_of`](Self::groups_of).
    pub groups: u32,
    /// Bytes of a row's metadata: [`meta_bytes_of`](Self::meta_bytes_of).
    pub meta_bytes: u32,
    /// The maximum number of rows that a rank receives from all ranks together, in one region; [`u32::MAX`] if each
    /// source has its own.
    pub max_rows: u32,
    /// Bytes from a received row to the next one, and from a returned one to the next where rows come back in place of
    /// the received ones.
    pub pitch: u32,
}

impl Sizes {
    /// Returns the number of experts of a rank; the last ranks may have fewer.
    #[inline(always)]
    #[must_use]
    pub const fn local(&self) -> u32 {
        self.owner.by()
    }

    /// Returns the offset of the scales in a row's metadata, behind its token, the ids and the weights.
    #[inline(always)]
    #[must_use]
    pub const fn scales_at(&self) -> u32 {
        scales_at(self.topk)
    }

    /// Returns the bytes of the metadata of a row with `topk` ids and `scale_bytes` bytes of scales.
    #[must_use]
    pub const fn meta_bytes_of(topk: u32, scale_bytes: u32) -> u32 {
        scales_at(topk) + scale_bytes.next_multiple_of(16)
    }

    /// Returns whether all sources share one region of a receiver. Then a dispatch begins when the ranks have agreed
    /// where their rows go: [`reserve`](crate::reserve()).
    #[inline(always)]
    #[must_use]
    pub const fn is_shared(&self) -> bool {
        self.max_rows != u32::MAX
    }

    /// Returns whether a dispatch reserves places in a shared region itself, so that no kernel comes before it.
    #[must_use]
    pub const fn reserves(&self) -> bool {
        self.is_shared() && self.tokens <= COUNT_IN_DISPATCH && self.tokens.div_ceil(32) <= self.groups
    }

    /// Returns the number of words of state of a slot, a multiple of 2.
    #[must_use]
    pub const fn words(&self) -> u64 {
        let by_rank = if self.is_shared() { 13 } else { 11 };
        (STATE + by_rank * self.ranks as u64).next_multiple_of(2)
    }

    /// Returns the number of rows that a rank has room for in a buffer.
    #[inline(always)]
    #[must_use]
    pub const fn room(&self) -> u64 {
        if self.is_shared() { self.max_rows as u64 } else { self.ranks as u64 * self.tokens as u64 }
    }

    /// Returns the number of returned rows that a rank has room for in a buffer.
    #[inline(always)]
    #[must_use]
    pub const fn combine_room(&self) -> u64 {
        self.room() * self.combine_rows as u64
    }

    /// Returns the bytes of a slot in the arena of each rank.
    #[must_use]
    pub const fn slot_bytes(&self) -> u64 {
        let there = self.room() * (self.pitch as u64 + self.meta_bytes as u64);
        if self.is_shared() {
            return there + 8 * self.words() + self.row_map_bytes();
        }
        2 * (there + self.combine_room() * self.combine_bytes as u64) + 8 * self.words() + self.row_map_bytes()
    }

    /// Returns the bytes of the places that a source keeps.
    const fn row_map_bytes(&self) -> u64 {
        (4 * self.tokens as u64 * self.topk as u64).next_multiple_of(16)
    }

    /// Returns the number of groups of 32 tokens whose routing a block has in shared memory at a time.
    #[must_use]
    pub const fn groups_of(tokens: u32, ranks: u32) -> u32 {
        let (all, max) = (tokens.div_ceil(32), MAX_SHARED / (8 * ranks) - table_rows(0));
        if all < max { all } else { max }
    }

    /// Returns the bytes of shared memory of a block of a dispatch: the table of its routes.
    #[must_use]
    pub const fn shared_bytes(&self) -> u32 {
        8 * self.ranks * table_rows(self.groups)
    }

    /// Returns the bytes of a plan: the number of tokens, and a word of bits for each 32 tokens and each rank.
    #[must_use]
    pub const fn plan_bytes(&self) -> u64 {
        PLAN_BITS + 4 * self.ranks as u64 * self.tokens.div_ceil(32) as u64
    }
}

/// Returns the offset of the scales in the metadata of a row with `topk` ids.
#[inline(always)]
const fn scales_at(topk: u32) -> u32 {
    (4 + 8 * topk).next_multiple_of(16)
}

/// Groups with room for more tokens count tokens in a kernel of its own, before each dispatch. Up to here no warp
/// counts twice.
pub const COUNT_IN_DISPATCH: u32 = 512;
/// The maximum number of bytes of shared memory for the routing that a block has at a time.
const MAX_SHARED: u32 = 40 << 10;
/// Offset of the bits in a plan.
pub(crate) const PLAN_BITS: u64 = 16;

/// Words of state before the words by rank.
pub(crate) const STATE: u64 = 25;
/// Indices of these words.
pub(crate) const EPOCH: u64 = 0;
pub(crate) const MASKED: u64 = 1;
pub(crate) const CLAIMED: u64 = 2;
/// The time before which no block of the combine waits.
pub(crate) const SINCE: u64 = 3;
/// Three words of the combine; six of the dispatch, two sets of three.
pub(crate) const COMBINE: u64 = 4;
/// The ranks to which a combine could post nothing. The next dispatch goes on without them. The combine itself does
/// not: its blocks start at different times, and would not agree.
pub(crate) const UNSENT: u64 = 7;
pub(crate) const DISPATCH: u64 = 8;
/// The last dispatch into a layout whose receive has ended.
pub(crate) const DECIDED: u64 = 14;
/// The last dispatch for which the ranks have agreed on places, where the dispatch itself does that.
pub(crate) const RESERVED: u64 = 15;
/// For each section of a dispatch the number of blocks that have sent it.
pub(crate) const SECTION: u64 = 16;
/// The maximum number of sections of a dispatch.
pub(crate) const SECTIONS: u32 = 8;
/// The buffer of the last dispatch, and whether it was combined: [`last_use`](crate::protocol::last_use).
pub(crate) const LAST_USE: u64 = 24;

/// A region of the arena for each buffer and rank.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug, Pod, Zeroable)]
#[bytemuck(crate = "gin_device::bytemuck")]
pub(crate) struct Regions {
    first: u64,
    /// Bytes of a region.
    bytes: u64,
    /// Bytes of a buffer.
    buffer: u64,
}

impl Regions {
    const fn new(sizes: &Sizes, first: u64, bytes_of_token: u64) -> Self {
        Self::of(sizes, sizes.ranks, first, bytes_of_token)
    }

    /// Makes the regions of this many ranks.
    pub(crate) const fn of(sizes: &Sizes, ranks: u32, first: u64, bytes_of_token: u64) -> Self {
        let bytes = sizes.tokens as u64 * bytes_of_token;
        Self { first, bytes, buffer: ranks as u64 * bytes }
    }

    /// Returns the offset of a region.
    #[inline(always)]
    pub(crate) const fn at(&self, buffer: u64, rank: u32) -> u64 {
        self.first + (if buffer == 0 { 0 } else { self.buffer }) + rank as u64 * self.bytes
    }

    pub(crate) const fn end(&self) -> u64 {
        self.first + 2 * self.buffer
    }

    /// Makes one region for all buffers and ranks.
    const fn one(first: u64) -> Self {
        Self { first, bytes: 0, buffer: 0 }
    }
}

/// A slot of a group: a parameter of the kernels, which the host makes. It has room for one dispatch at a time.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug, Pod, Zeroable)]
#[bytemuck(crate = "gin_device::bytemuck")]
pub struct SlotParams {
    /// The sizes.
    pub sizes: Sizes,
    /// The slot's first byte in the arena: a multiple of 16.
    pub first: u64,
    /// The address of the status block, in memory of the host: [`STATUS_WORDS`](crate::STATUS_WORDS) words.
    pub status: u64,
    /// How long a rank waits for another.
    pub deadline: Deadline,
    /// The buffer that has the rows of the dispatch, 0 or 1. It is the same on all ranks.
    pub(crate) buffer: u64,
    rows: Regions,
    returned: Regions,
    meta: Regions,
}

impl SlotParams {
    /// Makes the parameter for buffer 0; the fields have these names.
    #[must_use]
    pub const fn new(sizes: Sizes, first: u64, status: u64, deadline: Deadline) -> Self {
        let rows = first + 8 * sizes.words();
        if sizes.is_shared() {
            // Rows come back in place of the received ones.
            let meta = Regions::one(rows + sizes.room() * sizes.pitch as u64);
            let (rows, returned) = (Regions::one(rows), Regions::one(rows));
            return Self { sizes, first, status, deadline, buffer: 0, rows, returned, meta };
        }
        let rows = Regions::new(&sizes, rows, sizes.row_bytes as u64);
        let returned = Regions::new(&sizes, rows.end(), sizes.combine_rows as u64 * sizes.combine_bytes as u64);
        let meta = Regions::new(&sizes, returned.end(), sizes.meta_bytes as u64);
        Self { sizes, first, status, deadline, buffer: 0, rows, returned, meta }
    }

    /// Returns the parameter for a dispatch in a buffer, 0 or 1. Its kernels all get the same.
    #[must_use]
    pub const fn in_buffer(self, buffer: u64) -> Self {
        Self { buffer: buffer & 1, ..self }
    }

    /// Returns how long a rank waits for rows of another. If sources share a region, one that is silent while the ranks
    /// agree delays some of them by two deadlines more than others.
    #[inline(always)]
    pub(crate) const fn patience(&self) -> Deadline {
        if self.sizes.is_shared() { self.deadlines(3) } else { self.deadline }
    }

    /// Returns several deadlines in a row.
    #[inline(always)]
    pub(crate) const fn deadlines(&self, number: u64) -> Deadline {
        Deadline::after_ns(self.deadline.ns().saturating_mul(number))
    }

    /// Returns the offset of the rows that the buffer has from `source`.
    #[inline(always)]
    pub(crate) const fn rows(&self, source: u32) -> u64 {
        self.rows.at(self.buffer, source)
    }

    /// Returns the offset of the rows that the buffer has back from `source`.
    #[inline(always)]
    pub(crate) const fn returned(&self, source: u32) -> u64 {
        self.returned.at(self.buffer, source)
    }

    /// Returns the offset of the metadata of the rows that the buffer has from `source`.
    #[inline(always)]
    pub(crate) const fn meta(&self, source: u32) -> u64 {
        self.meta.at(self.buffer, source)
    }

    /// Returns the offset of the places of this rank's rows in their regions at other ranks, by token and id.
    #[inline(always)]
    pub(crate) const fn row_map(&self) -> u64 {
        if self.sizes.is_shared() {
            return self.meta.first + self.sizes.room() * self.sizes.meta_bytes as u64;
        }
        self.meta.end()
    }

    /// Returns the offset of a word of state.
    #[inline(always)]
    pub(crate) fn word(&self, index: u64) -> u64 {
        self.first + 8 * index
    }

    /// Returns the offset of the flag that `source` raises after its rows in the buffer.
    #[inline(always)]
    pub(crate) fn sent_flag(&self, source: u32) -> u64 {
        self.by_rank(self.buffer, source)
    }

    /// Returns the offset of the number of rows that the buffer has from `source`: that of its flag, or 0 if the rank
    /// was silent.
    #[inline(always)]
    pub(crate) fn got(&self, source: u32) -> u64 {
        self.by_rank(2 + self.buffer, source)
    }

    /// Returns the offset of the flag that `source` raises after the rows that it returns.
    #[inline(always)]
    pub(crate) fn returned_flag(&self, source: u32) -> u64 {
        self.by_rank(4, source)
    }

    /// Returns the offset of the word in which the blocks agree whether `source` returned its rows.
    #[inline(always)]
    pub(crate) fn verdict(&self, source: u32) -> u64 {
        self.by_rank(5, source)
    }

    /// Returns the offset of the flag by which `source` announces how many rows of the next dispatch it has for this
    /// rank.
    #[inline(always)]
    pub(crate) fn announced(&self, source: u32) -> u64 {
        self.by_rank(6, source)
    }

    /// Returns the offset of the flag by which `receiver` announces the number that this rank's first row has there.
    #[inline(always)]
    pub(crate) fn granted(&self, receiver: u32) -> u64 {
        self.by_rank(7, receiver)
    }

    /// Returns the offset of the flag that `source` raises after the metadata of its rows in the buffer, where it
    /// is sent before the rows.
    #[inline(always)]
    pub(crate) fn metadata_flag(&self, source: u32) -> u64 {
        self.by_rank(9 + self.buffer, source)
    }

    /// Returns the offset of the flag that `source` raises after each section of its rows: it has the number of tokens
    /// up to the section's end.
    #[inline(always)]
    pub(crate) fn section_flag(&self, source: u32) -> u64 {
        self.by_rank(8, source)
    }

    /// Returns the offset of a word like a flag: the last dispatch in which `source` was granted rows here, and the
    /// number of its first row.
    #[inline(always)]
    pub(crate) fn reserved(&self, source: u32) -> u64 {
        self.by_rank(11, source)
    }

    /// Returns the offset of the number of rows that `source` had then.
    #[inline(always)]
    pub(crate) fn offered(&self, source: u32) -> u64 {
        self.by_rank(12, source)
    }

    /// Returns the number of the first row from a source among those in its region. `arena` is the address of this
    /// rank's part.
    #[inline(always)]
    pub(crate) fn offset_of(&self, arena: u64, source: u32) -> u32 {
        if !self.sizes.is_shared() {
            return 0;
        }
        // Safety: a word of the arena; all accesses to words of state are atomic.
        unsafe { GlobalWord::new(arena + self.reserved(source)) }.load_relaxed_gpu() as u32
    }

    /// Returns the number of a received row among all places of rows, if `first` is that of the first row of its
    /// source.
    #[inline(always)]
    pub(crate) const fn index(&self, source: u32, first: u32, row: u32) -> u32 {
        if self.sizes.is_shared() { first + row } else { source * self.sizes.tokens + row }
    }

    #[inline(always)]
    fn by_rank(&self, row: u64, rank: u32) -> u64 {
        self.word(STATE + row * u64::from(self.sizes.ranks) + u64::from(rank))
    }
}

/// Words of a slot that the host reads or writes: the number of dispatches; the ranks that it goes on without; whether
/// the status block has a report.
pub const EPOCH_WORD: u64 = EPOCH;
/// See [`EPOCH_WORD`].
pub const MASKED_WORD: u64 = MASKED;
/// See [`EPOCH_WORD`]: the ranks that it goes on without from the next dispatch on.
pub const UNSENT_WORD: u64 = UNSENT;
/// See [`EPOCH_WORD`].
pub const CLAIMED_WORD: u64 = CLAIMED;

/// Sets the words of state of a slot to those after `epoch` dispatches, all received. For the host, while no kernel of
/// the slot runs on any rank.
pub fn reset(sizes: &Sizes, words: &mut [u64], epoch: u64) {
    words.fill(0);
    words[EPOCH as usize] = epoch;
    words[DECIDED as usize] = epoch;
    words[RESERVED as usize] = epoch;
    let by_rank = |row: u64| (STATE + row * u64::from(sizes.ranks)) as usize;
    // All flags, and the verdict, whose epoch is one that nobody asks about again.
    words[by_rank(0)..by_rank(2)].fill(flag(epoch, 0));
    words[by_rank(4)..by_rank(5)].fill(flag(epoch, 0));
    words[by_rank(5)..by_rank(6)].fill(epoch << 1);
    words[by_rank(6)..by_rank(11)].fill(flag(epoch, 0));
    if sizes.is_shared() {
        words[by_rank(11)..by_rank(12)].fill(flag(epoch, 0));
    }
}

/// The offsets, in bytes of the arena, of what belongs to a dispatch of a slot.
#[derive(Clone, Copy, Debug)]
pub struct SlotOffsets(SlotParams);

impl SlotOffsets {
    /// Returns the places of the rows of a dispatch, of which this is the parameter.
    #[must_use]
    pub const fn new(slot: &SlotParams) -> Self {
        Self(*slot)
    }

    /// Returns the places of a dispatch in a buffer, 0 or 1.
    #[must_use]
    pub const fn in_buffer(&self, buffer: u64) -> Self {
        Self(self.0.in_buffer(buffer))
    }

    /// Returns the offset of a word whose lowest bit is the buffer of the last dispatch.
    #[must_use]
    pub fn last_use(&self) -> u64 {
        self.0.word(LAST_USE)
    }

    /// Returns the offset of the number of rows from `source`, a word.
    #[must_use]
    pub fn got(&self, source: u32) -> u64 {
        self.0.got(source)
    }

    /// Returns the offset of a word whose lower half is the number of the first row from `source`, if all sources share
    /// a region.
    #[must_use]
    pub fn offset(&self, source: u32) -> Option<u64> {
        if self.0.sizes.is_shared() { Some(self.0.reserved(source)) } else { None }
    }

    /// Returns the offset of the rows from `source`, of the first one or of [`offset`](Self::offset) 0.
    #[must_use]
    pub fn rows(&self, source: u32) -> u64 {
        self.0.rows(source)
    }

    /// Returns the offset of the metadata of these rows: token, ids, weights.
    #[must_use]
    pub fn meta(&self, source: u32) -> u64 {
        self.0.meta(source)
    }
}

/// [`TokenParams::flags`]: ids have 64 bits.
pub const WIDE_IDS: u32 = 1;
/// [`TokenParams::flags`]: scales are powers of two, where the dispatch makes them.
pub const POWERS: u32 = 2;
/// [`TokenParams::flags`], with [`POWERS`]: scales are [`Ue8m0`], where the dispatch makes them. Otherwise they are
/// FP32.
pub const EXPONENTS: u32 = 4;

/// The tokens of a rank: a parameter of the kernels.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug, Pod, Zeroable)]
#[bytemuck(crate = "gin_device::bytemuck")]
pub struct TokenParams {
    /// The address of the rows: a multiple of 16.
    pub rows: u64,
    /// The address of the scales, [`Sizes::scale_bytes`] for each row; 0 if there are none, or if the dispatch makes
    /// them.
    pub scales: u64,
    /// The address of the ids: signed integers of 32 bits, or of 64 with [`WIDE_IDS`]. A negative id is none.
    pub ids: u64,
    /// The address of the weights: `f32`; 0 if all are 1.
    pub weights: u64,
    /// The address of the number of tokens, a `u32` that may change between launches; 0 if [`count`](Self::count) is
    /// the number. A word past `i32::MAX`, a negative number for programs that store an `i32`, counts as 0.
    pub count_at: u64,
    /// The address of a plan of these tokens, whose first word is then their number; 0 if there is none.
    pub plan: u64,
    /// The number of tokens, unless `count_at` is set.
    pub count: u32,
    /// The sum of [`WIDE_IDS`], [`POWERS`] and [`EXPONENTS`], or of some of them.
    pub flags: u32,
}

impl TokenParams {
    /// Returns the number of tokens, which may be more than there is room for.
    #[inline(always)]
    pub(crate) fn given(&self) -> u32 {
        if self.count_at == 0 {
            return self.count;
        }
        // Safety: the kernel's caller promised that it is a word.
        unsafe { load(self.count_at) }
    }

    /// Returns the given number of tokens as far as there is room for them; 0 if it is negative.
    #[inline(always)]
    pub(crate) fn clamped(&self, sizes: &Sizes) -> u32 {
        let given = self.given();
        if (given as i32) < 0 { 0 } else { given.min(sizes.tokens) }
    }

    /// Returns the number of tokens that take part.
    #[inline(always)]
    pub(crate) fn number(&self, sizes: &Sizes) -> u32 {
        if self.plan == 0 {
            return self.clamped(sizes);
        }
        // Safety: the kernel's caller promised a plan.
        unsafe { load(self.plan) }.min(sizes.tokens)
    }

    /// Returns the greatest id of a token as it was given, for a report. It is not negative.
    #[inline(always)]
    pub(crate) fn greatest_id(&self, token: u32, topk: u32) -> u64 {
        let first = u64::from(token) * u64::from(topk);
        // Safety: the kernel's caller promised that the ids are there.
        unsafe { greatest_id(self.ids, self.flags & WIDE_IDS != 0, first, topk) }
    }

    /// Returns an id of a token; negative if it is none, `i32::MAX` if it is past that.
    #[inline(always)]
    pub(crate) fn id(&self, index: u64) -> i32 {
        // Safety: the kernel's caller promised that the ids are there.
        unsafe {
            if self.flags & WIDE_IDS == 0 {
                return load(self.ids + 4 * index) as i32;
            }
            narrowed(load(self.ids + 8 * index), load(self.ids + 8 * index + 4))
        }
    }

    /// Returns ids from `first` on as [`id`](Self::id) does, from number `k` to `k + 7` of `count`. In place of ids
    /// past the last one it returns others of them again. The loads are on their way together.
    #[inline(always)]
    pub(crate) fn eight_ids(&self, first: u64, k: u32, count: u32) -> Eight {
        let at = |ahead: u32| first + u64::from((k + ahead).min(count - 1));
        // Safety: the kernel's caller promised that the ids are there.
        unsafe {
            if self.flags & WIDE_IDS == 0 && (count | (self.ids as u32 >> 2)).is_multiple_of(4) {
                let four = |ahead: u32| {
                    let at = first + u64::from((k + ahead).min(count - 4));
                    let (low, high) = load_weak_pair((self.ids + 4 * at) as usize as *const u64);
                    (low as i32, (low >> 32) as i32, high as i32, (high >> 32) as i32)
                };
                return (four(0), four(4));
            }
            if self.flags & WIDE_IDS == 0 {
                let id = |ahead: u32| load(self.ids + 4 * at(ahead)) as i32;
                return ((id(0), id(1), id(2), id(3)), (id(4), id(5), id(6), id(7)));
            }
            let words = |ahead: u32| (load(self.ids + 8 * at(ahead)), load(self.ids + 8 * at(ahead) + 4));
            let (a, b, c, d) = (words(0), words(1), words(2), words(3));
            let (e, f, g, h) = (words(4), words(5), words(6), words(7));
            let id = |(low, high)| narrowed(low, high);
            ((id(a), id(b), id(c), id(d)), (id(e), id(f), id(g), id(h)))
        }
    }

    /// Returns a weight of a token.
    #[inline(always)]
    pub(crate) fn weight(&self, index: u64) -> f32 {
        if self.weights == 0 {
            return 1.0;
        }
        // Safety: as above.
        f32::from_bits(unsafe { load(self.weights + 4 * index) })
    }
}

/// Returns the greatest of `number` ids from `first` on, or 0. Not inlined: its addresses would take four registers
/// from the loop that never calls it.
///
/// # Safety
/// - The ids are there.
#[cold]
#[inline(never)]
unsafe fn greatest_id(ids: u64, is_wide: bool, first: u64, number: u32) -> u64 {
    let mut greatest = 0;
    for index in first..first + u64::from(number) {
        // Safety: the caller's promise.
        let id = unsafe {
            if is_wide {
                (u64::from(load(ids + 8 * index + 4)) << 32 | u64::from(load(ids + 8 * index))) as i64
            } else {
                i64::from(load(ids + 4 * index) as i32)
            }
        };
        greatest = greatest.max(id);
    }
    greatest as u64
}

/// Eight ids. Not an array, which LLVM would put on the stack.
pub(crate) type Eight = ((i32, i32, i32, i32), (i32, i32, i32, i32));

/// Returns an id of 64 bits as one of 32.
#[inline(always)]
const fn narrowed(low: u32, high: u32) -> i32 {
    let max = i32::MAX as u32;
    if high == 0 {
        (if low < max { low } else { max }) as i32
    } else if (high as i32) < 0 {
        -1
    } else {
        i32::MAX
    }
}

/// Loads 4 bytes that earlier work of the stream wrote, or that were acquired.
///
/// # Safety
/// - `address` is valid and a multiple of 4.
#[inline(always)]
pub(crate) unsafe fn load(address: u64) -> u32 {
    // Neighbours of a word that one load fetches are in the L1 cache for the next.
    // Safety: the caller's promise.
    unsafe { gin_device::sys::data::load_weak_u32(address as usize as *const u32) }
}
