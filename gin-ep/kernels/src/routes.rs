// SPDX-License-Identifier: MIT OR Apache-2.0
//! Which tokens go to which ranks, and the places of their rows there.

use crate::lane::{Eight, Lane, PLAN_BITS, Tokens, load};
use crate::status::{self, Code};
use gin_device::prelude::*;
use gin_device::sys::data::store_weak_u32;
use gin_device::sys::{GlobalWord, Word};

/// Reports tokens past the limit, by one thread.
#[inline(always)]
pub(crate) fn check_number(arena: u64, lane: &Lane, tokens: &Tokens) {
    let (given, most) = (tokens.given(), lane.sizes.tokens);
    if given > most && block_in_grid() == 0 && Block.elect() {
        status::report(arena, lane, Code::TooManyTokens, 0, 0, given.into(), most.into());
    }
}

/// Loads ids of a warp's lanes' tokens, from number `k` on: token `32 * group + lane`.
#[inline(always)]
fn ids_of(lane: &Lane, tokens: &Tokens, number: u32, group: u32, k: u32) -> Eight {
    let token = 32 * group + gin_device::coop::lane();
    let topk = lane.sizes.topk;
    if token < number {
        tokens.eight_ids(u64::from(token) * u64::from(topk), k, topk)
    } else {
        ((-1, -1, -1, -1), (-1, -1, -1, -1))
    }
}

/// Returns the ranks to which these tokens go, as bits. All lanes call, with the first of `ids_of`. An id that does not
/// exist drops its token; `reports` says whether to report that.
#[inline(always)]
fn ranks_of(arena: u64, lane: &Lane, tokens: &Tokens, number: u32, group: u32, mut ids: Eight, reports: bool) -> u64 {
    let (sizes, token) = (&lane.sizes, 32 * group + gin_device::coop::lane());
    let (mut ranks, mut unknown) = (0u64, -1);
    let mut add = |id: i32| {
        let is_there = (id as u32) < sizes.experts;
        ranks |= if is_there { 1 << sizes.owner.of(id as u32) } else { 0 };
        unknown = if is_there { unknown } else { unknown.max(id) };
    };
    let mut k = 8;
    loop {
        let ((a, b, c, d), (e, f, g, h)) = ids;
        add(a);
        add(b);
        add(c);
        add(d);
        add(e);
        add(f);
        add(g);
        add(h);
        if k >= sizes.topk {
            break;
        }
        ids = ids_of(lane, tokens, number, group, k);
        k += 8;
    }
    if unknown < 0 {
        return ranks;
    }
    if reports {
        let experts = sizes.experts.into();
        status::report(arena, lane, Code::UnknownExpert, 0, unknown as u32, token.into(), experts);
    }
    0
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
pub unsafe fn plan(arena: &Window<u64>, lane: &Lane, tokens: &Tokens, plan: u64) {
    let arena = arena.local_ptr().addr() as u64;
    check_number(arena, lane, tokens);
    let number = tokens.given().min(lane.sizes.tokens);
    // Safety: the caller's promise, here and below.
    let store = |offset: u64, value: u32| unsafe { store_weak_u32((plan + offset) as usize as *mut u32, value) };
    if block_in_grid() == 0 && Block.elect() {
        store(0, number);
    }
    let mut group = block_in_grid() * (Block.size() / WARP_SIZE) + Block.rank() / WARP_SIZE;
    while group < number.div_ceil(32) {
        let first = u64::from(group) * u64::from(lane.sizes.ranks);
        let ids = ids_of(lane, tokens, number, group, 0);
        words_of(ranks_of(arena, lane, tokens, number, group, ids, true), lane.sizes.ranks, |rank, bits| {
            store(PLAN_BITS + 4 * (first + u64::from(rank)), bits);
        });
        group += grid_dim().count() as u32 * (Block.size() / WARP_SIZE);
    }
}

/// Returns the number that this rank's first row has at a rank, in the region that it shares with other sources; 0 if
/// it has one of its own.
#[inline(always)]
fn first_at(arena: u64, lane: &Lane, rank: u32) -> u32 {
    if !lane.sizes.is_shared() {
        return 0;
    }
    // Safety: a word of the arena; all accesses to words of state are atomic.
    unsafe { GlobalWord::new(arena + lane.granted(rank)) }.load_relaxed_gpu() as u32
}

/// Returns the number of tokens of a plan that go to a rank. All lanes of a warp call.
///
/// # Safety
/// - `plan` is the address of a plan, which an earlier kernel of the stream made.
#[inline(always)]
pub(crate) unsafe fn planned(lane: &Lane, plan: u64, rank: u32) -> u32 {
    let (ranks, mut group, mut sum) = (u64::from(lane.sizes.ranks), gin_device::coop::lane(), 0);
    // Safety: the caller's promise.
    unsafe {
        let groups = load(plan).min(lane.sizes.tokens).div_ceil(32);
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

/// The routing of some groups of 32 tokens, in the block's dynamic shared memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Routes {
    /// For each group a word for each rank, with a bit for each token that goes there.
    bits: SharedArray<u32>,
    /// For each group and rank the number of tokens of all groups before it, and the same after the last: more by the
    /// number of the first row there, if all sources share a region.
    before: SharedArray<u32>,
    ranks: u32,
    /// Number of tokens that take part.
    pub(crate) tokens: u32,
    /// The first group.
    first: u32,
    /// Number of groups.
    groups: u32,
    /// The first ids of the tokens that this warp counts first.
    ahead: Eight,
}

impl Routes {
    /// Makes them without groups.
    #[inline(always)]
    pub(crate) fn new(lane: &Lane, tokens: &Tokens) -> Self {
        let (ranks, most) = (lane.sizes.ranks, lane.sizes.groups);
        let number = tokens.number(&lane.sizes);
        // They are on their way meanwhile.
        let warp = if tokens.plan == 0 { Block.rank() / WARP_SIZE } else { u32::MAX / 32 };
        let ahead = ids_of(lane, tokens, number, warp, 0);
        let words = (ranks * most) as usize;
        let bits = shared::dynamic_array::<u32>(0, words);
        let before = shared::dynamic_array::<u32>(4 * words, words + ranks as usize);
        Self { bits, before, ranks, tokens: number, first: 0, groups: 0, ahead }
    }

    /// Goes on to the next groups. Returns the first token of them and the one after the last, which are the same if
    /// there are no more. All threads of the block call.
    #[inline(always)]
    pub(crate) fn advance(&mut self, arena: u64, lane: &Lane, tokens: &Tokens) -> (u32, u32) {
        let is_first = self.groups == 0;
        let (warp, warps) = (Block.rank() / WARP_SIZE, Block.size() / WARP_SIZE);
        let old = self.groups;
        self.first += self.groups;
        let left = self.tokens.div_ceil(32) - self.first;
        if left == 0 && !is_first {
            return (self.tokens, self.tokens);
        }
        self.groups = left.min(lane.sizes.groups);
        if !is_first {
            // The threads have finished with the old groups.
            Block.sync();
        }
        if tokens.plan == 0 {
            let mut group = warp;
            while group < self.groups {
                let (reports, all) = (block_in_grid() == 0, self.first + group);
                let ids = if all == warp { self.ahead } else { ids_of(lane, tokens, self.tokens, all, 0) };
                let to = ranks_of(arena, lane, tokens, self.tokens, all, ids, reports);
                words_of(to, self.ranks, |rank, bits| {
                    self.bits.write((group * self.ranks + rank) as usize, bits);
                });
                group += warps;
            }
        } else {
            let first = tokens.plan + PLAN_BITS + 4 * u64::from(self.first) * u64::from(self.ranks);
            for word in Block.stripe((self.groups * self.ranks) as usize) {
                // Safety: the kernel's caller promised a plan.
                self.bits.write(word, unsafe { load(first + 4 * word as u64) });
            }
        }
        Block.sync();
        let mut rank = warp;
        while rank < self.ranks {
            let base = match is_first {
                true => first_at(arena, lane, rank),
                false => self.before.read((old * self.ranks + rank) as usize),
            };
            Warp.sync();
            self.add_up(rank, base);
            rank += warps;
        }
        Block.sync();
        (32 * self.first, self.tokens.min(32 * (self.first + self.groups)))
    }

    /// Counts the tokens before each group for a rank, by one warp.
    #[inline(always)]
    fn add_up(&self, rank: u32, mut base: u32) {
        let lane = gin_device::coop::lane();
        let place = |group: u32| (group * self.ranks + rank) as usize;
        let mut first = 0;
        while first < self.groups {
            let group = first + lane;
            let is_there = group < self.groups;
            let count = if is_there { self.bits.read(place(group)).count_ones() } else { 0 };
            let mut sum = count;
            let mut by = 1;
            while by < WARP_SIZE.min(self.groups) {
                let below = Warp.shuffle_up(sum, by);
                sum += if lane >= by { below } else { 0 };
                by *= 2;
            }
            if is_there {
                self.before.write(place(group), base + sum - count);
            }
            base += Warp.shuffle(sum, (self.groups - first).min(WARP_SIZE) - 1);
            first += WARP_SIZE;
        }
        if lane == 0 {
            self.before.write(place(self.groups), base);
        }
    }

    /// Returns the place of a token's row at a rank; `None` if it does not go there, or if there is no place before
    /// `end`.
    #[inline(always)]
    pub(crate) fn place(&self, token: u32, rank: u32, end: u32) -> Option<u32> {
        let word = ((token / 32 - self.first) * self.ranks + rank) as usize;
        let bits = self.bits.read(word);
        let before = self.before.read(word) + (bits & ((1 << (token % 32)) - 1)).count_ones();
        if bits >> (token % 32) & 1 != 0 && before < end { Some(before) } else { None }
    }

    /// Returns the number of tokens that go to a rank, of those up to the last group.
    #[inline(always)]
    pub(crate) fn count(&self, arena: u64, lane: &Lane, rank: u32) -> u32 {
        self.before.read((self.groups * self.ranks + rank) as usize) - first_at(arena, lane, rank)
    }
}
