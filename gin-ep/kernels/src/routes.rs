// SPDX-License-Identifier: MIT OR Apache-2.0
//! Which tokens go to which ranks, and the places of their rows there.

use crate::params::{Eight, PLAN_BITS, SlotParams, TokenParams, load};
use crate::status::{self, Code};
use gin_device::prelude::*;
use gin_device::sys::data::store_weak_u32;
use gin_device::sys::{GlobalWord, Word, stay};

/// Reports tokens past the limit, or a negative number of them, by one thread.
#[inline(always)]
pub(crate) fn check_number(arena: u64, slot: &SlotParams, tokens: &TokenParams) {
    let (given, max) = (tokens.given(), slot.sizes.tokens);
    if given > max && block_in_grid() == 0 && Block.elect() {
        status::report(arena, slot, Code::TooManyTokens, 0, 0, given.into(), max.into());
    }
}

/// Loads ids of a warp's lanes' tokens, from number `k` on: token `32 * group + lane`.
#[inline(always)]
fn ids_of(slot: &SlotParams, tokens: &TokenParams, number: u32, group: u32, k: u32) -> Eight {
    let token = 32 * group + gin_device::coop::lane();
    let topk = slot.sizes.topk;
    if token < number { tokens.eight_ids(u64::from(token) * u64::from(topk), k, topk) } else { NO_IDS }
}

const NO_IDS: Eight = ((-1, -1, -1, -1), (-1, -1, -1, -1));

/// The ranks to which a token goes, as bits, and the greatest of its ids.
#[derive(Clone, Copy, Debug)]
struct To {
    low: u32,
    high: u32,
    max: i32,
}

impl To {
    const NONE: Self = Self { low: 0, high: 0, max: -1 };

    /// Adds ids. There is no branch, because the lanes would go different ways for each id. The quotient of a negative
    /// id, as of a number of 32 bits, is past all ranks.
    #[inline(always)]
    fn add(&mut self, slot: &SlotParams, ids: Eight) {
        let sizes = &slot.sizes;
        self.low |= bits_of(ids, |id| bit(sizes.owner.of(id as u32)));
        if sizes.ranks > 32 {
            self.high |= bits_of(ids, |id| bit(sizes.owner.of(id as u32).wrapping_sub(32)));
        }
        let ((a, b, c, d), (e, f, g, h)) = ids;
        self.max = self.max.max(a.max(b).max(c.max(d))).max(e.max(f).max(g.max(h)));
    }

    /// Returns the ranks. An id that does not exist drops its token; `reports` says whether to report that.
    #[inline(always)]
    fn ranks(&self, arena: u64, slot: &SlotParams, tokens: &TokenParams, group: u32, reports: bool) -> u64 {
        // Fewer experts than 2^31 fit into any memory.
        if self.max < slot.sizes.experts as i32 {
            return u64::from(self.high) << 32 | u64::from(self.low);
        }
        if reports {
            let (token, experts) = (32 * group + gin_device::coop::lane(), slot.sizes.experts);
            let expert = tokens.greatest_id(token, slot.sizes.topk);
            status::report(arena, slot, Code::UnknownExpert, 0, expert, token.into(), experts.into());
        }
        0
    }
}

#[inline(always)]
fn bits_of(ids: Eight, bit: impl Fn(i32) -> u32) -> u32 {
    let ((a, b, c, d), (e, f, g, h)) = ids;
    bit(a) | bit(b) | bit(c) | bit(d) | bit(e) | bit(f) | bit(g) | bit(h)
}

/// Returns the bit of a rank below 32; 0 for others.
#[inline(always)]
fn bit(rank: u32) -> u32 {
    1u32.checked_shl(rank).unwrap_or(0)
}

/// Calls `word` with the bits of a group of 32 tokens for each rank, each by one lane. All lanes call.
#[inline(always)]
fn words_of(ranks: u64, number: u32, word: impl Fn(u32, u32)) {
    for rank in 0..number {
        let bits = Warp.ballot(ranks >> rank & 1 != 0);
        if gin_device::coop::lane() == rank % WARP_SIZE {
            word(rank, bits);
        }
    }
}

/// Counts the tokens for ranks once, for dispatches with this plan. All threads of the grid call.
///
/// # Safety
/// - As [`dispatch`](crate::dispatch()). `plan` is the address of [`Sizes::plan_bytes`](crate::Sizes::plan_bytes)
///   bytes, a multiple of 16, which no other kernel uses.
#[inline(always)]
pub unsafe fn plan(arena: &Window<u64>, slot: &SlotParams, tokens: &TokenParams, plan: u64) {
    let arena = arena.local_ptr().addr() as u64;
    check_number(arena, slot, tokens);
    let number = tokens.clamped(&slot.sizes);
    // Safety: the caller's promise, here and below.
    let store = |offset: u64, value: u32| unsafe { store_weak_u32((plan + offset) as usize as *mut u32, value) };
    if block_in_grid() == 0 && Block.elect() {
        store(0, number);
    }
    let mut group = block_in_grid() * (Block.size() / WARP_SIZE) + Block.rank() / WARP_SIZE;
    while group < number.div_ceil(32) {
        let first = u64::from(group) * u64::from(slot.sizes.ranks);
        let (mut to, mut k) = (To::NONE, 0);
        while k < slot.sizes.topk {
            to.add(slot, ids_of(slot, tokens, number, group, k));
            k += 8;
        }
        words_of(to.ranks(arena, slot, tokens, group, true), slot.sizes.ranks, |rank, bits| {
            store(PLAN_BITS + 4 * (first + u64::from(rank)), bits);
        });
        group += grid_dim().count() as u32 * (Block.size() / WARP_SIZE);
    }
}

/// Returns the number that this rank's first row has at a rank, in the region that it shares with other sources; 0 if
/// it has one of its own.
#[inline(always)]
fn offset_at(arena: u64, slot: &SlotParams, rank: u32) -> u32 {
    if !slot.sizes.is_shared() {
        return 0;
    }
    // Safety: a word of the arena; all accesses to words of state are atomic.
    unsafe { GlobalWord::new(arena + slot.granted(rank)) }.load_relaxed_gpu() as u32
}

/// Returns the number of tokens of a plan that go to a rank. All lanes of a warp call.
///
/// # Safety
/// - `plan` is the address of a plan, which an earlier kernel of the stream made.
#[inline(always)]
pub(crate) unsafe fn planned(slot: &SlotParams, plan: u64, rank: u32) -> u32 {
    let (ranks, mut group, mut sum) = (u64::from(slot.sizes.ranks), gin_device::coop::lane(), 0);
    // Safety: the caller's promise.
    unsafe {
        let groups = load(plan).min(slot.sizes.tokens).div_ceil(32);
        while group < groups {
            sum += load(plan + PLAN_BITS + 4 * (u64::from(group) * ranks + u64::from(rank))).count_ones();
            group += WARP_SIZE;
        }
    }
    let mut by = WARP_SIZE / 2;
    while by > 0 {
        sum += Warp.shuffle_xor(sum, by);
        by /= 2;
    }
    sum
}

/// The row of the table of [`Routes`] with the address of each rank's part of the arena.
const PART: u32 = 0;
/// The row with the number of all tokens for each rank.
const COUNT: u32 = 1;
/// The first row of the spans: the number of tokens of a span for each rank.
const SPANS: u32 = 2;
/// The first row of the groups. The lower half of a word has a bit for each token that goes to the rank. The upper half
/// is the number of such tokens in earlier groups of the span.
const GROUPS: u32 = SPANS + MAX_SPANS;

/// Returns the rows of the table of [`Routes`] with `groups` groups of 32 tokens.
pub(crate) const fn table_rows(groups: u32) -> u32 {
    GROUPS + groups
}

/// The maximum number of spans.
const MAX_SPANS: u32 = 16;

/// The routing of some groups of 32 tokens, in the block's dynamic shared memory. The warps count tokens together, and
/// then each adds up in its own registers: the threads meet once for the groups, or twice for many.
///
/// A warp passes many groups between two units that it sends. So groups are counted in *spans*, of which a block has at
/// most one for each warp: a place is the sum of earlier spans, of earlier groups of the span, and of earlier tokens of
/// the group.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Routes {
    /// Rows of a word for each rank: [`PART`], [`COUNT`], those from [`SPANS`] on, and those from [`GROUPS`] on.
    table: SharedArray<u64>,
    ranks: u32,
    /// Number of tokens that take part.
    pub(crate) tokens: u32,
    /// The first group.
    first: u32,
    /// Number of groups.
    groups: u32,
    /// The binary logarithm of the number of groups of a span.
    shift: u32,
    /// For the rank of this lane's number, and for that 32 further, the number of tokens of all spans that are passed:
    /// more by the number of the first row there, if all sources share a region.
    before: (u32, u32),
    /// Number of spans of these groups that are passed.
    passed: u32,
}

impl Routes {
    /// Makes them without groups. Returns also the first ids of the tokens that this warp counts first. `reports` says
    /// whether to report tokens past the limit.
    ///
    /// A dispatch calls it before it loads anything else: a load of the number would wait for all loads before it.
    #[inline(always)]
    pub(crate) fn new(arena: u64, slot: &SlotParams, tokens: &TokenParams, reports: bool) -> (Self, Eight) {
        let ranks = slot.sizes.ranks;
        let number = tokens.number(&slot.sizes);
        if reports && tokens.plan == 0 {
            check_number(arena, slot, tokens);
        }
        // They are on their way meanwhile.
        let warp = if tokens.plan == 0 { Block.rank() / WARP_SIZE } else { u32::MAX / 32 };
        let ids = ids_of(slot, tokens, number, warp, 0);
        let table = shared::dynamic_array::<u64>(0, (slot.sizes.shared_bytes() / 8) as usize);
        let (before, passed) = ((0, 0), 0);
        let mut routes = Self { table, ranks, tokens: number, first: 0, groups: 0, shift: 0, before, passed };
        routes.begin(arena, slot);
        (routes, ids)
    }

    /// Goes on to the next groups. Returns the first token of them and the one after the last, which are the same if
    /// there are no more. All threads of the block call, the first time with the ids of [`new`](Self::new), which would
    /// take registers from the rows later.
    #[inline(always)]
    pub(crate) fn advance(
        &mut self,
        arena: u64,
        slot: &SlotParams,
        tokens: &TokenParams,
        ids: Option<Eight>,
    ) -> (u32, u32) {
        let (warp, warps) = (Block.rank() / WARP_SIZE, Block.size() / WARP_SIZE);
        let (next, ranks) = (self.first + self.groups, self.ranks);
        let left = stay(self.tokens).div_ceil(32) - next;
        if ids.is_none() {
            // The first warp needs the numbers of all.
            if left > 0 || warp == 0 {
                self.pass_spans(self.spans());
            }
            if left == 0 {
                return (self.tokens, self.tokens);
            }
            // The threads have finished with the old groups.
            Block.sync();
        }
        (self.first, self.groups, self.passed) = (next, left.min(slot.sizes.groups), 0);
        // Without a division, which small calls would wait for.
        let spans = 31 - warps.min(MAX_SPANS).leading_zeros();
        self.shift = 32 - (self.groups.saturating_sub(1) >> spans).leading_zeros();
        let has_spans = self.shift != 0;
        let write = |at: u32, bits: u32| {
            self.table.write((GROUPS * ranks + at) as usize, bits.into());
            if !has_spans {
                self.table.write((SPANS * ranks + at) as usize, bits.count_ones().into());
            }
        };
        if tokens.plan == 0 {
            let (mut group, mut k, mut to) = (warp, 0, To::NONE);
            let mut ahead = ids.unwrap_or_else(|| ids_of(slot, tokens, self.tokens, self.first + warp, 0));
            while group < self.groups {
                let (of, ids) = (group, ahead);
                k += 8;
                let is_last = k >= slot.sizes.topk;
                if is_last {
                    k = 0;
                    group += warps;
                }
                // The next ones are on their way.
                let number = if group < self.groups { self.tokens } else { 0 };
                ahead = ids_of(slot, tokens, number, self.first + group, k);
                to.add(slot, ids);
                if is_last {
                    let bits = to.ranks(arena, slot, tokens, self.first + of, block_in_grid() == 0);
                    words_of(bits, ranks, |rank, bits| write(of * ranks + rank, bits));
                    to = To::NONE;
                }
            }
        } else {
            let first = tokens.plan + PLAN_BITS + 4 * u64::from(self.first) * u64::from(ranks);
            for word in Block.stripe((self.groups * ranks) as usize) {
                // Safety: the kernel's caller promised a plan.
                write(word as u32, unsafe { load(first + 4 * word as u64) });
            }
        }
        Block.sync();
        if has_spans {
            self.add_up(warp);
            Block.sync();
        }
        (32 * self.first, self.tokens.min(32 * (self.first + self.groups)))
    }

    /// Stores the address of a rank's part of the arena, before the first [`advance`](Self::advance).
    ///
    /// It is in shared memory because the assembler lets loads share counters. A load from the window's table would
    /// also wait for the rows that the warp has begun to load.
    #[inline(always)]
    pub(crate) fn set_part(&self, rank: u32, address: u64) {
        self.set(PART, rank, address);
    }

    /// Returns the address of a rank's part of the arena.
    #[inline(always)]
    pub(crate) fn part(&self, rank: u32) -> u64 {
        self.word(PART, rank)
    }

    #[inline(always)]
    fn word(&self, row: u32, rank: u32) -> u64 {
        self.table.read((row * self.ranks + rank) as usize)
    }

    #[inline(always)]
    fn set(&self, row: u32, rank: u32, word: u64) {
        self.table.write((row * self.ranks + rank) as usize, word);
    }

    /// Returns the number of spans of these groups: at most one for each warp.
    #[inline(always)]
    const fn spans(&self) -> u32 {
        (self.groups + (1 << self.shift) - 1) >> self.shift
    }

    /// Adds up the groups of a span, by one warp, each rank by a lane.
    #[inline(always)]
    fn add_up(&self, span: u32) {
        let (from, end) = (span << self.shift, self.groups.min((span + 1) << self.shift));
        let mut rank = stay(gin_device::coop::lane());
        while from < end && rank < self.ranks {
            let mut earlier = 0;
            for group in from..end {
                let bits = self.word(GROUPS + group, rank) as u32;
                self.set(GROUPS + group, rank, u64::from(earlier) << 32 | u64::from(bits));
                earlier += bits.count_ones();
            }
            self.set(SPANS + span, rank, earlier.into());
            rank += WARP_SIZE;
        }
    }

    /// Returns the number of tokens of these groups that go to a rank.
    #[inline(always)]
    pub(crate) fn total(&self, rank: u32) -> u32 {
        self.sum(0, self.spans(), rank)
    }

    /// Begins at the first rows that receivers have granted since, by each warp before it passes a group.
    #[inline(always)]
    pub(crate) fn begin(&mut self, arena: u64, slot: &SlotParams) {
        let first = |rank: u32| if rank < self.ranks { offset_at(arena, slot, rank) } else { 0 };
        let mine = gin_device::coop::lane();
        self.before = (first(mine), first(mine + WARP_SIZE));
    }

    /// Counts the tokens of all spans before that of `group`, by one warp. It is one of the groups, and no earlier one
    /// than at the last call.
    #[inline(always)]
    pub(crate) fn pass(&mut self, group: u32) {
        self.pass_spans((group - self.first) >> self.shift);
    }

    #[inline(always)]
    fn pass_spans(&mut self, end: u32) {
        let mut first = 0;
        while self.passed < end && first < self.ranks {
            let sum = self.sum(self.passed, end, first + gin_device::coop::lane());
            if first == 0 {
                self.before.0 += sum;
            } else {
                self.before.1 += sum;
            }
            // One copy of the code is enough.
            first = stay(first + WARP_SIZE);
        }
        self.passed = end;
    }

    /// Returns the number of tokens of some spans that go to a rank, if there is such a rank. A few loads are on their
    /// way together.
    #[inline(always)]
    fn sum(&self, mut from: u32, end: u32, rank: u32) -> u32 {
        let rank = rank.min(self.ranks - 1);
        let mut sum = 0;
        while from < end {
            let of = |span: u32| {
                let tokens = self.word(SPANS + span.min(end - 1), rank) as u32;
                if span < end { tokens } else { 0 }
            };
            let (a, b, c, d) = (of(from), of(from + 1), of(from + 2), of(from + 3));
            sum += a + b + (c + d);
            from += 4;
        }
        sum
    }

    /// Returns the place of a token's row at a rank; `None` if it does not go there, or if there is no place before
    /// `end`. The token is of the group that the warp has passed up to, and the rank is one of this lane.
    #[inline(always)]
    pub(crate) fn place(&self, token: u32, rank: u32, end: u32) -> Option<u32> {
        let word = self.word(GROUPS + token / 32 - self.first, rank);
        let (bits, earlier) = (word as u32, (word >> 32) as u32);
        let before = if rank < WARP_SIZE { self.before.0 } else { self.before.1 };
        let place = before + earlier + (bits & ((1 << (token % 32)) - 1)).count_ones();
        if bits >> (token % 32) & 1 != 0 && place < end { Some(place) } else { None }
    }

    /// Stores the numbers of all tokens, by the first warp after the last round, for calls of [`count`](Self::count).
    #[inline(always)]
    pub(crate) fn close(&self, arena: u64, slot: &SlotParams) {
        let lane = stay(gin_device::coop::lane());
        // A masked rank may grant meanwhile.
        let counted = |before: u32, rank: u32| before.wrapping_sub(offset_at(arena, slot, rank));
        if lane < self.ranks {
            self.set(COUNT, lane, counted(self.before.0, lane).into());
        }
        if lane + WARP_SIZE < self.ranks {
            self.set(COUNT, lane + WARP_SIZE, counted(self.before.1, lane + WARP_SIZE).into());
        }
        Warp.sync();
    }

    /// Returns the number of tokens that go to a rank, in the first warp.
    #[inline(always)]
    pub(crate) fn count(&self, rank: u32) -> u32 {
        self.word(COUNT, rank) as u32
    }
}
