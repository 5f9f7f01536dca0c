// SPDX-License-Identifier: MIT OR Apache-2.0
//! Combine: one row back for every row received, and their sums.

use crate::arena::{Arena, NO_PLACE, Near, Reach, is_silent, lane_index};
use crate::element::Element;
use crate::format::{Pairs, load_unit, store_unit};
use crate::network::{Network, Routed};
use crate::params::{COMBINE, Divisor, EPOCH, LAST_USE, MASKED, SINCE, Sizes, SlotParams, TokenParams, load};
use crate::protocol::{self, IN_PLACE, Launch, PUSHED, last_use, raise};
use crate::status;
use crate::{LARGE_UNIT, UNIT};
use gin_device::prelude::*;
use gin_device::sys::data::{load_weak_u64, store_weak_pair, store_weak_u64};
use gin_device::sys::{Global, Word};

/// [`Sums::flags`]: the sums start from the output's elements.
pub const ACCUMULATE: u32 = 1;
/// [`Sums::flags`]: the rows are at their sources; an earlier kernel of the stream has stored them there.
pub const RETURNED: u32 = 2;

/// The returned rows, and where their sums go: a parameter of the kernels.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug, Pod, Zeroable)]
#[bytemuck(crate = "gin_device::bytemuck")]
pub struct Sums {
    /// The address of the rows, in the places of the received ones: [`Sizes::combine_rows`](crate::Sizes::combine_rows)
    /// for each. 0 stands for the received rows themselves, which the experts have overwritten: their sources load them
    /// from there.
    pub rows: u64,
    /// The address of a row for each token.
    pub output: u64,
    /// The address of a row for each token, from which its sum starts; 0 if there is none.
    pub bias: u64,
    /// The address of the weights, an `f32` for each id; 0 if all are 1. One row for each rank has none.
    pub weights: u64,
    /// The address of a word for each returned row: its place in `rows`; 0 if that is the place of the received row.
    pub row_map: u64,
    /// The number of places; rows past it are zero.
    pub capacity: u32,
    /// [`ACCUMULATE`], [`RETURNED`], both, or 0.
    pub flags: u32,
}

impl Sums {
    /// Returns whether rows of this rank's own tokens are where the experts left them.
    #[inline(always)]
    const fn keeps_own(&self, sizes: &Sizes) -> bool {
        self.rows != 0 && self.flags & RETURNED == 0 && !sizes.is_shared()
    }

    /// Returns the address of the row of a place; 0 if the row is zero.
    ///
    /// # Safety
    /// - It is one of the places that [`rows`](Self::rows) or [`row_map`](Self::row_map) has.
    #[inline(always)]
    unsafe fn row(&self, sizes: &Sizes, mut place: u64) -> u64 {
        if self.row_map != 0 {
            // Safety: the caller's promise.
            let permuted = unsafe { load(self.row_map + 4 * place) };
            if permuted >= self.capacity {
                return 0;
            }
            place = permuted.into();
        }
        self.rows + place * u64::from(sizes.combine_bytes)
    }
}

/// Returns rows for every row that this rank received, and adds up the rows that it gets back, in FP32, rounded once.
/// All threads of the grid call.
///
/// With one row for each rank, the sum is in the order in which a token's ids name the ranks first. With one for each
/// id it is in the order of the ids, and each row is multiplied by its weight, by `fma`. Bias, then the output's old
/// row, come first. A token without experts gets zeros, or those.
///
/// A rank that is silent takes no part: its terms are missing, which is reported once.
///
/// # Safety
/// - As [`dispatch`](crate::dispatch()), whose tokens these are, with the same ids. The addresses of `sums` are valid
///   and multiples of 16, that of the weights of 4.
#[inline(always)]
pub unsafe fn combine<E: Element>(
    comm: &Comm,
    arena: &Window<u64>,
    slot: &SlotParams,
    tokens: &TokenParams,
    sums: &Sums,
) {
    let Some(arena) = Arena::new(comm, arena) else { return };
    // Safety: the caller's promise.
    unsafe { combine_by::<E, Near>(comm, &arena, slot, tokens, sums) };
}

/// Returns rows and adds them up as [`combine`]. Rows of ranks that loads and stores do not reach go back by puts and
/// signals of the back end `B`. They lie at their source in the order in which it sent them. The sums have
/// no [`RETURNED`].
///
/// # Safety
/// - As [`combine`], after a [`dispatch_over`](crate::dispatch_over) with the same `signals` and `network`.
#[inline(always)]
pub unsafe fn combine_over<E: Element, B: Backend>(
    comm: &Comm,
    arena: &Window<u64>,
    slot: &SlotParams,
    tokens: &TokenParams,
    sums: &Sums,
    (signals, network): (&Window<u64>, &Network),
) {
    let arena = Arena::by(comm, arena, Routed::<B>::new(comm, signals, network));
    // Safety: the caller's promise.
    unsafe { combine_by::<E, _>(comm, &arena, slot, tokens, sums) };
}

/// Returns rows and adds them up.
///
/// # Safety
/// - As [`combine`].
#[inline(always)]
unsafe fn combine_by<E: Element, R: Reach>(
    comm: &Comm,
    arena: &Arena<R>,
    slot: &SlotParams,
    tokens: &TokenParams,
    sums: &Sums,
) {
    let blocks = grid_dim().count() as u64;
    let launch = Launch::<Global>::new(arena.word(slot.word(COMBINE)));
    let before = if Block.elect() { launch.start() } else { 1 };
    // Only the first warp needs them. If each warp loads them, a combine of 512 tokens takes a fifth longer on an H200.
    let state = |word: u64| if Block.rank() < WARP_SIZE { arena.word(slot.word(word)).load_relaxed_gpu() } else { 0 };
    let (epoch, since, masked) = (state(EPOCH), state(SINCE), state(MASKED));
    let is_returned = sums.flags & RETURNED != 0;
    let is_in_place = sums.rows == 0 && !is_returned;
    // The warp sends rows back to remote ranks.
    let mut gives = false;
    if is_in_place {
        // Earlier kernels of the stream, or a barrier of the grid, have made the rows. Other ranks wait for this flag
        // alone, so a block that waits needs no other one of its grid.
        if Block.rank() < WARP_SIZE && Warp.any(before == 0) {
            announce(arena, slot, epoch, masked, IN_PLACE);
            gives = true;
        }
    } else {
        if !is_returned {
            // Safety: the caller's promise.
            unsafe { give_back(arena, slot, sums, blocks as u32) };
        }
        E::meet();
        let mut may_wait = false;
        if Block.rank() < WARP_SIZE {
            let sent =
                if Block.elect() { launch.finish(blocks) } else { protocol::Sent { is_last: false, may_wait: false } };
            if Warp.any(sent.is_last) {
                // Each lane announces what the first lane has acquired.
                Warp.sync();
                let how = if slot.sizes.is_shared() { IN_PLACE } else { PUSHED };
                announce(arena, slot, epoch, masked, how);
                gives = true;
            }
            may_wait = Warp.any(sent.may_wait);
        }
        if !Block.sync_or(may_wait) {
            return;
        }
    }
    if gives {
        R::give_back(arena, slot, epoch, masked, is_in_place);
    }
    // The flags are on their way meanwhile.
    let number = tokens.number(&slot.sizes);
    let mut shares = Shares::new(&launch, &slot.sizes, number, blocks as u32, is_in_place);
    // Safety: the caller's promise.
    let first = unsafe { Work::new(arena, slot, tokens, sums, &shares) };
    shares.go_on(&launch);
    let back = returned(comm, arena, slot, (epoch, since, masked), is_in_place);
    if gives && Warp.elect() {
        // The next dispatch follows this kernel, which ends when all ranks have returned their rows.
        arena.word(slot.word(LAST_USE)).store_relaxed_gpu(last_use(slot.buffer, true));
    }
    // Safety: the caller's promise.
    unsafe { add_up::<E, R>(arena, slot, tokens, sums, (&launch, shares), back, first) };
}

/// Raises the flags for returned rows at all ranks but `masked` and remote ones, by one warp.
#[inline(always)]
pub(crate) fn announce<R: Reach>(arena: &Arena<R>, slot: &SlotParams, epoch: u64, masked: u64, how: u32) {
    let mut to = lane_index();
    while to < slot.sizes.ranks {
        if masked >> to & 1 == 0 && !arena.route.is_remote(to) {
            raise::<Global>(arena.word_at(to, slot.returned_flag(arena.rank())), epoch, how);
        }
        to += WARP_SIZE;
    }
}

/// Stores the rows of the block's share into the memory of their sources, or, for remote ranks, to where they are sent
/// from, or, if sources share a region, in place of the received rows. Rows of this rank's own tokens stay where they
/// are, except in such a region.
///
/// # Safety
/// - As [`combine`].
#[inline(always)]
unsafe fn give_back<R: Reach>(arena: &Arena<R>, slot: &SlotParams, sums: &Sums, blocks: u32) {
    let (sizes, me) = (&slot.sizes, arena.rank());
    let (pairs, each, bytes) = (sizes.combine_bytes / 16, sizes.combine_rows, u64::from(sizes.combine_bytes));
    let units = pairs.div_ceil(UNIT);
    let warps = Block.size() / WARP_SIZE;
    let step = warps * blocks;
    let mut unit = Block.rank() / WARP_SIZE * blocks + block_in_grid();
    // Each lane loads the numbers of two sources, so that all are on their way together.
    let got = |source: u32| {
        if source < sizes.ranks { arena.word(slot.got(source)).load_relaxed_gpu() as u32 } else { 0 }
    };
    let (low, high) = (got(lane_index()), got(lane_index() + WARP_SIZE));
    for distance in 1..=sizes.ranks {
        let sum = me + distance;
        let source = if sum >= sizes.ranks { sum - sizes.ranks } else { sum };
        let count = Warp.shuffle(if source < WARP_SIZE { low } else { high }, source % WARP_SIZE);
        if source == me && !sizes.is_shared() {
            continue;
        }
        let is_remote = arena.route.is_remote(source);
        let (is_shared, first) = (sizes.is_shared(), slot.offset_of(arena.here(), source));
        let there = if is_remote {
            arena.here() + arena.route.staged_back(source)
        } else if is_shared {
            // Their source loads them from there.
            arena.here() + slot.rows(source)
        } else {
            arena.there(source) + slot.returned(me)
        };
        while unit < count * each * units {
            let (index, part) = (unit / units, unit % units);
            let (row, k) = (index / each, index % each);
            let pair = part * UNIT + lane_index();
            let place = u64::from(slot.index(source, first, row));
            let meta = arena.here() + slot.meta(source) + u64::from(first + row) * u64::from(sizes.meta_bytes);
            unit += step;
            // Safety: the caller's promise.
            unsafe {
                let place = place * u64::from(each) + u64::from(k);
                // These loads do not wait for each other.
                let id = if each > 1 { load(meta + 4 + 4 * u64::from(k)) as i32 } else { 0 };
                let (from, token) = (sums.row(sizes, place), load(meta));
                if id < 0 {
                    continue;
                }
                let data = load_unit(from, pair, if from == 0 { 0 } else { pairs });
                // A rank may send anything, but nothing is written past its region.
                let token = token.min(sizes.tokens - 1);
                let back = u64::from(if is_remote { row } else { token }) * u64::from(each) + u64::from(k);
                let back = if is_shared { u64::from(first + row) * u64::from(sizes.pitch) } else { back * bytes };
                store_unit(there + back, pair, pairs, &data);
            }
        }
        unit -= count * each * units;
    }
}

shared! { static BACK: [u64; 2]; }

/// The ranks that have returned their rows, as bits, and those of them that have left the rows in place.
#[derive(Clone, Copy)]
pub(crate) struct Back {
    pub(crate) present: u64,
    in_place: u64,
}

/// Waits until all ranks but `silent` have returned their rows. All threads of the block call. The result is the same
/// in all blocks.
#[inline(always)]
pub(crate) fn returned<R: Reach>(
    comm: &Comm,
    arena: &Arena<R>,
    slot: &SlotParams,
    (epoch, since, silent): (u64, u64, u64),
    is_in_place: bool,
) -> Back {
    let mut back = Back { present: 0, in_place: 0 };
    if Block.rank() < WARP_SIZE {
        let mut first = 0;
        while first < slot.sizes.ranks {
            let source = first + lane_index();
            let mut how = None;
            if source == arena.rank() && is_in_place {
                // They are its own, by the order of the stream.
                how = Some(IN_PLACE);
            } else if source < slot.sizes.ranks && silent >> source & 1 == 0 {
                let (flag, verdict) = (arena.word(slot.returned_flag(source)), arena.word(slot.verdict(source)));
                let flag = arena.route.returned(flag, source);
                let status = status::of(comm);
                match protocol::wait_together::<Global>(&status, slot.patience(), flag, verdict, epoch, since) {
                    Ok(seen) => how = Some(seen),
                    Err(error) => is_silent(arena, slot, source, epoch, error),
                }
            }
            back.present |= u64::from(Warp.ballot(how.is_some())) << first;
            back.in_place |= u64::from(Warp.ballot(how == Some(IN_PLACE))) << first;
            first += WARP_SIZE;
        }
    }
    if Block.elect() {
        BACK.array().write(0, back.present);
        BACK.array().write(1, back.in_place);
    }
    // A block waits once in a launch, so these words are written once, and one barrier is enough.
    Block.sync();
    Back { present: BACK.array().read(0), in_place: BACK.array().read(1) }
}

/// The units of sums that a warp takes.
#[derive(Clone, Copy)]
struct Shares {
    /// The next one, in the first lane.
    unit: u32,
    /// Number of all.
    total: u32,
    /// Number of warps of the grid, if each takes its share; 0 if the warps that are there share all.
    step: u32,
    /// Number of units of a row.
    parts: Divisor,
    /// A unit has [`LARGE_UNIT`] pairs, not [`UNIT`].
    is_large: bool,
}

impl Shares {
    /// Returns the number of pairs of a unit.
    #[inline(always)]
    const fn pairs(&self) -> u32 {
        if self.is_large { LARGE_UNIT } else { UNIT }
    }
}

impl Shares {
    #[inline(always)]
    fn new(launch: &Launch<Global>, sizes: &Sizes, number: u32, blocks: u32, is_in_place: bool) -> Self {
        let warps = Block.size() / WARP_SIZE;
        let step = if is_in_place { warps * blocks } else { 0 };
        let [small, large] = sizes.sums;
        // Large units have more loads on their way, small ones are enough for all warps.
        let is_large = number * small.by() > warps * blocks;
        let parts = if is_large { large } else { small };
        let mut shares = Self { unit: 0, total: number * parts.by(), step, parts, is_large };
        if step == 0 {
            shares.go_on(launch);
        } else {
            shares.unit = Block.rank() / WARP_SIZE * blocks + block_in_grid();
        }
        shares
    }

    /// Takes the next one. It is on its way while the warp works.
    #[inline(always)]
    fn go_on(&mut self, launch: &Launch<Global>) {
        if self.step != 0 {
            self.unit += self.step;
        } else if lane_index() == 0 {
            self.unit = launch.take() as u32;
        }
    }
}

/// The sums of four pairs. Separate variables: LLVM would put an array in a loop on the stack.
pub(crate) struct Unit<E: Element> {
    first: E::Sums,
    second: E::Sums,
    third: E::Sums,
    fourth: E::Sums,
}

impl<E: Element> Unit<E> {
    #[inline(always)]
    pub(crate) fn new() -> Self {
        Self {
            first: E::Sums::default(),
            second: E::Sums::default(),
            third: E::Sums::default(),
            fourth: E::Sums::default(),
        }
    }

    #[inline(always)]
    pub(crate) fn add(&mut self, weight: f32, data: &Pairs) {
        E::add(&mut self.first, weight, data.0);
        E::add(&mut self.second, weight, data.1);
        E::add(&mut self.third, weight, data.2);
        E::add(&mut self.fourth, weight, data.3);
    }

    #[inline(always)]
    pub(crate) fn add_local(&mut self, weight: f32, data: &Pairs) {
        E::add_local(&mut self.first, weight, data.0);
        E::add_local(&mut self.second, weight, data.1);
        E::add_local(&mut self.third, weight, data.2);
        E::add_local(&mut self.fourth, weight, data.3);
    }

    #[inline(always)]
    pub(crate) fn round(&self) -> Pairs {
        (E::round(&self.first), E::round(&self.second), E::round(&self.third), E::round(&self.fourth))
    }

    #[inline(always)]
    fn round_local(&self) -> Pairs {
        let (first, second) = (E::round_local(&self.first), E::round_local(&self.second));
        (first, second, E::round_local(&self.third), E::round_local(&self.fourth))
    }
}

/// Loads a warp's unit of a local row, by the numbers of pairs of a returned row.
///
/// # Safety
/// - As [`load_unit`].
#[inline(always)]
pub(crate) unsafe fn load_local<E: Element>(row: u64, pair: u32, pairs: u32) -> Pairs {
    if E::LOCAL == 16 {
        // Safety: the caller's promise, here and below.
        return unsafe { load_unit(row, pair, pairs) };
    }
    let load = |ahead: u32| {
        let pair = pair + 32 * ahead;
        let at = (row + 8 * u64::from(pair)) as usize as *const u64;
        (if pair < pairs { unsafe { load_weak_u64(at) } } else { 0 }, 0)
    };
    (load(0), load(1), load(2), load(3))
}

/// Stores a warp's unit of a local row.
///
/// # Safety
/// - As [`store_unit`].
#[inline(always)]
unsafe fn store_local<E: Element>(row: u64, pair: u32, pairs: u32, unit: &Pairs) {
    let store = |ahead: u32, words: (u64, u64)| {
        if pair + 32 * ahead < pairs {
            // Safety: the caller's promise.
            unsafe { store_words::<E>(row, pair + 32 * ahead, words) };
        }
    };
    store(0, unit.0);
    store(1, unit.1);
    store(2, unit.2);
    store(3, unit.3);
}

/// Stores the sums of a pair to a local row.
///
/// # Safety
/// - The pair is one of the row.
#[inline(always)]
unsafe fn store_words<E: Element>(row: u64, pair: u32, (low, high): (u64, u64)) {
    let to = (row + u64::from(E::LOCAL) * u64::from(pair)) as usize as *mut u64;
    // Safety: the caller's promise.
    unsafe { if E::LOCAL == 16 { store_weak_pair(to, low, high) } else { store_weak_u64(to, low) } };
}

/// A unit of a token, with an id, its weight and the place of its row at the experts' rank in each lane of the warp.
#[derive(Clone, Copy)]
struct Work {
    is_there: bool,
    token: u32,
    part: u32,
    id: i32,
    weight: f32,
    place: u32,
}

impl Work {
    /// Loads what belongs to the next unit, if there is one.
    ///
    /// # Safety
    /// - As [`combine`].
    #[inline(always)]
    unsafe fn new<R: Reach>(
        arena: &Arena<R>,
        slot: &SlotParams,
        tokens: &TokenParams,
        sums: &Sums,
        shares: &Shares,
    ) -> Self {
        let sizes = &slot.sizes;
        let unit = Warp.shuffle(shares.unit, 0);
        let (is_there, token) = (unit < shares.total, shares.parts.of(unit));
        let part = unit.wrapping_sub(token.wrapping_mul(shares.parts.by()));
        let mut work = Self { is_there, token, part, id: -1, weight: 1.0, place: 0 };
        if is_there && lane_index() < sizes.topk {
            let index = u64::from(token) * u64::from(sizes.topk) + u64::from(lane_index());
            work.id = tokens.id(index);
            // Safety: the dispatch stored it in the arena, and the caller's promise.
            unsafe {
                work.place = load(arena.here() + slot.row_map() + 4 * index);
                if sums.weights != 0 {
                    work.weight = f32::from_bits(load(sums.weights + 4 * index));
                }
            }
        }
        work
    }

    /// Returns the address of the row of each lane's id, and the lanes whose rows are terms of the sum, in its order.
    #[inline(always)]
    fn terms<R: Reach>(&self, arena: &Arena<R>, slot: &SlotParams, sums: &Sums, back: Back) -> (u64, u32) {
        let (sizes, k) = (&slot.sizes, lane_index());
        let is_dropped = Warp.any(self.id >= 0 && self.id as u32 >= sizes.experts);
        let owner = if self.id < 0 || is_dropped { u32::MAX } else { sizes.owner.of(self.id as u32) };
        let is_one_of_several = sizes.combine_rows > 1;
        // One row for each rank counts where an id names the rank first.
        let is_first = is_one_of_several || Warp.match_any(owner).trailing_zeros() == k;
        let is_sent = self.place != NO_PLACE;
        let is_term = owner < sizes.ranks && back.present >> owner & 1 != 0 && is_first && is_sent;
        let mut row = 0;
        if is_term {
            row = if back.in_place >> owner & 1 != 0 {
                let place = u64::from(self.place) * u64::from(sizes.pitch);
                arena.there(owner) + slot.rows(arena.rank()) + place
            } else if owner == arena.rank() && sums.keeps_own(sizes) {
                let place = u64::from(slot.index(owner, 0, self.place)) * u64::from(sizes.combine_rows);
                // Safety: the place of a row that this rank received from itself.
                unsafe { sums.row(sizes, place + u64::from(if is_one_of_several { k } else { 0 })) }
            } else {
                let row = if arena.route.is_remote(owner) { self.place } else { self.token };
                let place = u64::from(row) * u64::from(sizes.combine_rows);
                let place = place + u64::from(if is_one_of_several { k } else { 0 });
                arena.here() + slot.returned(owner) + place * u64::from(sizes.combine_bytes)
            };
        }
        (row, Warp.ballot(is_term))
    }
}

/// A row of a sum and its weight.
type Term = (u64, f32);

/// Adds up units of tokens, until all are taken. `work` is the first one, and the shares have the second.
///
/// # Safety
/// - As [`combine`].
#[inline(always)]
unsafe fn add_up<E: Element, R: Reach>(
    arena: &Arena<R>,
    slot: &SlotParams,
    tokens: &TokenParams,
    sums: &Sums,
    (launch, mut shares): (&Launch<Global>, Shares),
    back: Back,
    mut work: Work,
) {
    let bytes = u64::from(slot.sizes.combine_bytes / 16 * E::LOCAL);
    while work.is_there {
        // The ids of the next one are on their way meanwhile.
        // Safety: the caller's promise.
        let next = unsafe { Work::new(arena, slot, tokens, sums, &shares) };
        shares.go_on(launch);
        let (row, lanes) = work.terms(arena, slot, sums, back);
        let term = |k: u32| -> Term { (Warp.shuffle(row, k), Warp.shuffle(work.weight, k)) };
        let first = work.part * shares.pairs();
        let end = (first + shares.pairs()).min(slot.sizes.combine_bytes / 16);
        let pair = first + lane_index();
        let offset = u64::from(work.token) * bytes;
        let start = |pair: u32| {
            let mut sum = Unit::<E>::new();
            // Safety: the caller's promise.
            unsafe {
                if sums.bias != 0 {
                    sum.add_local(1.0, &load_local::<E>(sums.bias + offset, pair, end));
                }
                if sums.flags & ACCUMULATE != 0 {
                    sum.add_local(1.0, &load_local::<E>(sums.output + offset, pair, end));
                }
            }
            sum
        };
        let store = |pair: u32, sum: &Unit<E>| {
            // Safety: the caller's promise.
            unsafe { store_local::<E>(sums.output + offset, pair, end, &sum.round_local()) };
        };
        let load = |term: Term, pair: u32| {
            // Safety: a row that its rank has returned, or an address that is not used with an end of 0.
            unsafe { load_unit(term.0, pair, if term.0 == 0 { 0 } else { end }) }
        };
        let count = lanes.count_ones();
        let next_of = |lanes: u32| -> (Term, u32) {
            // A term of zeros times -0, which leaves every sum as it is.
            if lanes == 0 { ((0, -0.0), 0) } else { (term(lanes.trailing_zeros()), lanes & (lanes - 1)) }
        };
        if count <= 2 && sums.bias == 0 && sums.flags & ACCUMULATE == 0 {
            // All loads are on their way together.
            let (a, rest) = next_of(lanes);
            let (b, _) = next_of(rest);
            let low = (load(a, pair), load(b, pair));
            let high = (load(a, pair + UNIT), load(b, pair + UNIT));
            // Pair by pair, so that few sums take registers.
            let add = |ahead: u32, first: (u64, u64), second: (u64, u64)| {
                let mut sum = E::Sums::default();
                E::add(&mut sum, a.1, first);
                E::add(&mut sum, b.1, second);
                let (words, pair) = (E::round_local(&sum), pair + ahead);
                if pair < end {
                    // Safety: the caller's promise.
                    unsafe { store_words::<E>(sums.output + offset, pair, words) };
                }
            };
            add(0, low.0.0, low.1.0);
            add(32, low.0.1, low.1.1);
            add(64, low.0.2, low.1.2);
            add(96, low.0.3, low.1.3);
            add(UNIT, high.0.0, high.1.0);
            add(UNIT + 32, high.0.1, high.1.1);
            add(UNIT + 64, high.0.2, high.1.2);
        } else {
            let mut pair = pair;
            while pair - lane_index() < end {
                let (mut sum, mut rest) = (start(pair), lanes);
                while rest != 0 {
                    let (a, after) = next_of(rest);
                    let (b, after) = next_of(after);
                    let data = (load(a, pair), load(b, pair));
                    sum.add(a.1, &data.0);
                    sum.add(b.1, &data.1);
                    rest = after;
                }
                store(pair, &sum);
                pair += UNIT;
            }
        }
        work = next;
    }
}
