// SPDX-License-Identifier: MIT OR Apache-2.0
//! Which tokens go to which ranks, and the places of their rows there.

use crate::params::{Eight, PLAN_BITS, SlotParams, TokenParams, load};
use crate::status::{self, Code};
use gin_device::prelude::*;
use gin_device::sys::data::store_weak_u32;
use gin_device::sys::{GlobalWord, Word};

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
    if token < number {
        tokens.eight_ids(u64::from(token) * u64::from(topk), k, topk)
    } else {
        ((-1, -1, -1, -1), (-1, -1, -1, -1))
    }
}

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

/// The routing of some groups of 32 tokens, in the block's dynamic shared memory. Each warp counts tokens in its own
/// registers: the threads meet once for the groups.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Routes {
    /// For each group a word for each rank, with a bit for each token that goes there.
    bits: SharedArray<u32>,
    /// For each rank the value of `before` after the last group.
    all: SharedArray<u32>,
    ranks: u32,
    /// Number of tokens that take part.
    pub(crate) tokens: u32,
    /// The first group.
    first: u32,
    /// Number of groups.
    groups: u32,
    /// The first ids of the tokens that this warp counts next.
    ahead: Eight,
    /// For the rank of this lane's number, and for that 32 further, the number of tokens of all groups that are passed:
    /// more by the number of the first row there, if all sources share a region.
    before: (u32, u32),
    /// Number of groups that are passed, from the first one of all.
    passed: u32,
}

impl Routes {
    /// Makes them without groups.
    #[inline(always)]
    pub(crate) fn new(arena: u64, slot: &SlotParams, tokens: &TokenParams) -> Self {
        let (ranks, max) = (slot.sizes.ranks, slot.sizes.groups);
        let number = tokens.number(&slot.sizes);
        // They are on their way meanwhile.
        let warp = if tokens.plan == 0 { Block.rank() / WARP_SIZE } else { u32::MAX / 32 };
        let ahead = ids_of(slot, tokens, number, warp, 0);
        let first = |rank: u32| if rank < ranks { offset_at(arena, slot, rank) } else { 0 };
        let mine = gin_device::coop::lane();
        let before = (first(mine), first(mine + WARP_SIZE));
        let words = (ranks * max) as usize;
        let bits = shared::dynamic_array::<u32>(0, words);
        let all = shared::dynamic_array::<u32>(4 * words, ranks as usize);
        Self { bits, all, ranks, tokens: number, first: 0, groups: 0, ahead, before, passed: 0 }
    }

    /// Goes on to the next groups. Returns the first token of them and the one after the last, which are the same if
    /// there are no more. All threads of the block call.
    #[inline(always)]
    pub(crate) fn advance(&mut self, arena: u64, slot: &SlotParams, tokens: &TokenParams) -> (u32, u32) {
        let is_first = self.groups == 0;
        let (warp, warps) = (Block.rank() / WARP_SIZE, Block.size() / WARP_SIZE);
        let next = self.first + self.groups;
        let left = self.tokens.div_ceil(32) - next;
        if !is_first {
            // The first warp needs the numbers of all.
            if left > 0 || warp == 0 {
                self.pass(next);
            }
            if left == 0 {
                return (self.tokens, self.tokens);
            }
            // The threads have finished with the old groups.
            Block.sync();
        }
        (self.first, self.groups) = (next, left.min(slot.sizes.groups));
        if tokens.plan == 0 {
            let (mut group, mut k, mut to) = (warp, 0, To::NONE);
            while group < self.groups {
                let (of, ids) = (group, self.ahead);
                k += 8;
                let is_last = k >= slot.sizes.topk;
                if is_last {
                    k = 0;
                    group += warps;
                }
                // The next ones are on their way, after the last group those of the next round.
                let ahead = if group < self.groups { group } else { self.groups + warp };
                self.ahead = ids_of(slot, tokens, self.tokens, self.first + ahead, k);
                to.add(slot, ids);
                if is_last {
                    let ranks = to.ranks(arena, slot, tokens, self.first + of, block_in_grid() == 0);
                    words_of(ranks, self.ranks, |rank, bits| {
                        self.bits.write((of * self.ranks + rank) as usize, bits);
                    });
                    to = To::NONE;
                }
            }
        } else {
            let first = tokens.plan + PLAN_BITS + 4 * u64::from(self.first) * u64::from(self.ranks);
            for word in Block.stripe((self.groups * self.ranks) as usize) {
                // Safety: the kernel's caller promised a plan.
                self.bits.write(word, unsafe { load(first + 4 * word as u64) });
            }
        }
        Block.sync();
        (32 * self.first, self.tokens.min(32 * (self.first + self.groups)))
    }

    /// Returns the number of tokens of these groups that go to a rank, if there is such a rank.
    #[inline(always)]
    pub(crate) fn total(&self, rank: u32) -> u32 {
        self.sum(self.first, self.first + self.groups, rank)
    }

    /// Begins at the first rows that receivers have granted since, by each warp before it passes a group.
    #[inline(always)]
    pub(crate) fn begin(&mut self, arena: u64, slot: &SlotParams) {
        let first = |rank: u32| if rank < self.ranks { offset_at(arena, slot, rank) } else { 0 };
        let mine = gin_device::coop::lane();
        self.before = (first(mine), first(mine + WARP_SIZE));
    }

    /// Counts the tokens of all groups before `group`, by one warp. It is one of the groups, or the one after the last,
    /// and no earlier one than at the last call.
    #[inline(always)]
    pub(crate) fn pass(&mut self, group: u32) {
        let lane = gin_device::coop::lane();
        self.before.0 += self.sum(self.passed, group, lane);
        if self.ranks > WARP_SIZE {
            self.before.1 += self.sum(self.passed, group, lane + WARP_SIZE);
        }
        self.passed = group;
    }

    /// Returns the number of tokens of some groups that go to a rank, if there is such a rank. A few loads are on their
    /// way together.
    #[inline(always)]
    fn sum(&self, mut from: u32, to: u32, rank: u32) -> u32 {
        let rank = rank.min(self.ranks - 1);
        let count = |group: u32| self.bits.read(((group - self.first) * self.ranks + rank) as usize).count_ones();
        let mut sum = 0;
        while from + 4 <= to {
            sum += count(from) + count(from + 1) + (count(from + 2) + count(from + 3));
            from += 4;
        }
        if from < to {
            let last = to - 1;
            let (a, b, c) = (count(from), count(last.min(from + 1)), count(last));
            sum += a + if from < last { c } else { 0 } + if from + 1 < last { b } else { 0 };
        }
        sum
    }

    /// Returns the place of a token's row at a rank; `None` if it does not go there, or if there is no place before
    /// `end`. The token is of the group that the warp has passed up to, and the rank is one of this lane.
    #[inline(always)]
    pub(crate) fn place(&self, token: u32, rank: u32, end: u32) -> Option<u32> {
        let bits = self.bits.read(((token / 32 - self.first) * self.ranks + rank) as usize);
        let before = if rank < WARP_SIZE { self.before.0 } else { self.before.1 };
        let place = before + (bits & ((1 << (token % 32)) - 1)).count_ones();
        if bits >> (token % 32) & 1 != 0 && place < end { Some(place) } else { None }
    }

    /// Stores the numbers of all tokens, by the first warp after the last round, for calls of [`count`](Self::count).
    #[inline(always)]
    pub(crate) fn close(&self, arena: u64, slot: &SlotParams) {
        let lane = gin_device::coop::lane();
        // A masked rank may grant meanwhile.
        let counted = |before: u32, rank: u32| before.wrapping_sub(offset_at(arena, slot, rank));
        if lane < self.ranks {
            self.all.write(lane as usize, counted(self.before.0, lane));
        }
        if lane + WARP_SIZE < self.ranks {
            self.all.write((lane + WARP_SIZE) as usize, counted(self.before.1, lane + WARP_SIZE));
        }
        Warp.sync();
    }

    /// Returns the number of tokens that go to a rank, in the first warp.
    #[inline(always)]
    pub(crate) fn count(&self, rank: u32) -> u32 {
        self.all.read(rank as usize)
    }
}
