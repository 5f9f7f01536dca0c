// SPDX-License-Identifier: MIT OR Apache-2.0
//! Dispatch: every row once to every rank that has one of its experts.

use crate::arena::{Arena, NO_PLACE, Near, Reach, is_silent, lane_index};
use crate::combine::{announce, returned};
use crate::format::{Format, Metadata, RowsAlone};
use crate::network::{Network, Routed};
use crate::params::{
    COMBINE, DISPATCH, EPOCH, Eight, LAST_USE, MASKED, SECTION, SECTIONS, SINCE, Sizes, SlotParams, TokenParams, load,
};
use crate::protocol::{self, Launch, PUSHED, Sent, is_occupied, last_use, raise};
use crate::reserve::reserve_within;
use crate::routes::Routes;
use crate::status;
#[cfg(doc)]
use crate::status::Code;
use gin_device::prelude::*;
use gin_device::sys::data::{store_weak_u8, store_weak_u32};
use gin_device::sys::{Global, Memory, Word, stay, stay_word};

/// Phase of [`dispatch`]: send the rows.
pub const SEND: u32 = 1;
/// Phase of [`dispatch`]: wait for the rows of all ranks.
pub const RECEIVE: u32 = 2;

/// Sends the rows of `tokens`, if `phases` has [`SEND`], and waits for those of all ranks, if it has [`RECEIVE`]. All
/// threads of the grid call.
///
/// Afterwards, in the order of the stream, [`ReceivedRows`](crate::ReceivedRows) has the rows. The launch has dynamic
/// shared memory of [`Sizes::shared_bytes`](crate::Sizes::shared_bytes).
///
/// Errors are reported to the slot's status, and the communicator goes on:
///
/// | code | what happens |
/// | --- | --- |
/// | [`Code::UnknownExpert`] | the token goes nowhere |
/// | [`Code::TooManyTokens`] | the tokens past the limit go nowhere |
/// | [`Code::Silent`] | the rank counts as one without tokens, in this dispatch and later ones, and gets no rows |
///
/// # Safety
/// - The host made communicator, arena and slot for each other. The addresses of `tokens` are valid, for as many tokens
///   as it says, and the plan is one of the same ids. If sources share a region, there is a plan, and an earlier kernel
///   has [reserved](crate::reserve()) places for it.
/// - The slot's dispatches and combines follow each other on one stream, or by events, with the same phases on all
///   ranks.
#[inline(always)]
pub unsafe fn dispatch<F: Format>(
    comm: &Comm,
    arena: &Window<u64>,
    slot: &SlotParams,
    tokens: &TokenParams,
    phases: u32,
) {
    let Some(arena) = Arena::new(comm, arena) else { return };
    // Safety: the caller's promise.
    unsafe { dispatch_by::<F, Near>(comm, &arena, slot, tokens, phases) };
}

/// Sends and waits as [`dispatch`]. Rows for ranks that loads and stores do not reach go by puts and signals of the
/// back end `B`, which the last block posts.
///
/// It reports [`Code::Unsent`] besides: rows for a rank could not be posted, and the group goes on without it.
///
/// # Safety
/// - As [`dispatch`]. The host made `signals` and `network` for the slot.
#[inline(always)]
pub unsafe fn dispatch_over<F: Format, B: Backend>(
    comm: &Comm,
    arena: &Window<u64>,
    slot: &SlotParams,
    tokens: &TokenParams,
    phases: u32,
    (signals, network): (&Window<u64>, &Network),
) {
    let arena = Arena::by(comm, arena, Routed::<B>::new(comm, signals, network));
    // Safety: the caller's promise.
    unsafe { dispatch_by::<F, _>(comm, &arena, slot, tokens, phases) };
}

/// Sends and waits as [`dispatch`] with [`SEND`], in a group whose sources share a region. It does what
/// [`reserve`](crate::reserve()) does itself, so no kernel comes before it, and the tokens need no plan.
///
/// # Safety
/// - As [`dispatch`], but for the reserved places. Sources share a region, and the groups of all tokens fit into shared
///   memory at a time.
#[inline(always)]
pub unsafe fn dispatch_shared<F: Format>(
    comm: &Comm,
    arena: &Window<u64>,
    slot: &SlotParams,
    tokens: &TokenParams,
    phases: u32,
) {
    let Some(arena) = Arena::new(comm, arena) else { return };
    let begun = Routes::new(arena.here(), slot, tokens, true);
    let epoch = arena.word(slot.word(EPOCH)).load_relaxed_gpu().wrapping_add(1);
    let launch = Launch::<Global>::new(arena.word(slot.word(DISPATCH + 3 * protocol::launch_words(epoch))));
    let started = if Block.elect() { launch.start() } else { 0 };
    let masked = Near::masked(&arena, slot);
    let since = arena.word(slot.word(SINCE)).load_relaxed_gpu();
    let reserve = |routes: &mut Routes| reserve_within(comm, &arena, slot, routes, (epoch, started), (masked, since));
    // Safety: the caller's promise.
    let (sent, _) = unsafe { send::<F, Near, false>(&arena, slot, tokens, begun, epoch, reserve) };
    if phases & RECEIVE != 0 && sent.is_last && Block.rank() < WARP_SIZE {
        receive::<F, Near>(comm, &arena, slot, epoch, Near::masked(&arena, slot));
    }
}

/// Sends the metadata of the rows alone, and waits for those of all ranks. Afterwards, in the order of the stream,
/// [`ReceivedRows`](crate::ReceivedRows) has the rows' tokens and ids; [`send_rows`] sends the rows.
///
/// # Safety
/// - As [`dispatch`]. All ranks send metadata and rows apart.
#[inline(always)]
pub unsafe fn send_metadata(comm: &Comm, arena: &Window<u64>, slot: &SlotParams, tokens: &TokenParams) {
    let Some(arena) = Arena::new(comm, arena) else { return };
    // Safety: the caller's promise.
    unsafe { dispatch_by::<Metadata, Near>(comm, &arena, slot, tokens, SEND | RECEIVE) };
}

/// Sends the rows whose metadata was sent before. A receiver waits for a section of them by its flag. The next
/// kernel on the stream may do so too, as a dependent one, if the caller lets these start.
///
/// # Safety
/// - As [`dispatch`]. The last dispatch of the slot was [`send_metadata`], with these tokens. All calls on the slot
///   have as many blocks.
#[inline(always)]
pub unsafe fn send_rows<F: Format>(comm: &Comm, arena: &Window<u64>, slot: &SlotParams, tokens: &TokenParams) {
    let Some(arena) = Arena::new(comm, arena) else { return };
    let begun = Routes::new(arena.here(), slot, tokens, false);
    let epoch = arena.word(slot.word(EPOCH)).load_relaxed_gpu();
    let masked = arena.word(slot.word(MASKED)).load_relaxed_gpu();
    // Safety: the caller's promise.
    unsafe { send::<RowsAlone<F>, Near, false>(&arena, slot, tokens, begun, epoch, |_| masked) };
}

/// Sends and waits.
///
/// # Safety
/// - As [`dispatch`].
#[inline(always)]
unsafe fn dispatch_by<F: Format, R: Reach>(
    comm: &Comm,
    arena: &Arena<R>,
    slot: &SlotParams,
    tokens: &TokenParams,
    phases: u32,
) {
    // Only the first warp needs the epoch, and a dispatch takes longer if each warp loads it. But the condition takes a
    // register, and a dispatch that makes scales has none left.
    let loads_epoch = F::MAKES_SCALES || Block.rank() < WARP_SIZE;
    let epoch = || if loads_epoch { arena.word(slot.word(EPOCH)).load_relaxed_gpu() } else { 0 };
    let state = || (epoch(), R::masked(arena, slot));
    let (is_receiver, epoch, masked) = if phases & SEND != 0 {
        let begun = Routes::new(arena.here(), slot, tokens, true);
        let last = arena.word(slot.word(LAST_USE)).load_relaxed_gpu();
        let (before, mut masked) = state();
        let epoch = before.wrapping_add(1);
        let release = |_: &mut Routes| {
            masked = await_release(comm, arena, slot, (epoch, last), masked);
            masked
        };
        // Safety: the caller's promise.
        let (sent, _) = unsafe { send::<F, R, false>(arena, slot, tokens, begun, epoch, release) };
        (sent.is_last, epoch, masked)
    } else {
        let (epoch, masked) = state();
        (block_in_grid() == 0, epoch, masked)
    };
    if phases & RECEIVE != 0 && is_receiver && Block.rank() < WARP_SIZE {
        receive::<F, R>(comm, arena, slot, epoch, masked);
    }
}

/// Waits until no rank reads older rows in the buffer of this dispatch, if [one may](is_occupied). `epoch` is its
/// number, and `last` the word of [`last_use`]. Returns the ranks that get no rows: `masked`, and ranks that were
/// silent. All threads of the block call; the result is the same in all blocks.
///
/// The last dispatch had the same buffer, and no combine. So its combine is made up for, without rows: all ranks, which
/// do the same, raise the flags of returned rows after the kernels that read the received ones, by the order of their
/// streams. The block that starts first raises them before it waits, so one resident block is enough.
#[inline(always)]
pub(crate) fn await_release<R: Reach>(
    comm: &Comm,
    arena: &Arena<R>,
    slot: &SlotParams,
    (epoch, last): (u64, u64),
    masked: u64,
) -> u64 {
    // Sources that share a region hear from all ranks before each dispatch.
    if !is_occupied(last, slot.buffer) || slot.sizes.is_shared() {
        return masked;
    }
    let (before, launch) = (epoch.wrapping_sub(1), Launch::<Global>::new(arena.word(slot.word(COMBINE))));
    let started = if Block.elect() { launch.start() } else { 1 };
    if Block.rank() < WARP_SIZE && Warp.any(started == 0) {
        announce(arena, slot, before, masked, PUSHED);
        R::give_nothing_back(arena, slot, before, masked);
    }
    let since = arena.word(slot.word(SINCE)).load_relaxed_gpu();
    let back = returned(comm, arena, slot, (before, since, masked), false);
    masked | !back.present & u64::MAX >> (64 - slot.sizes.ranks)
}

/// Sends, after [`Routes::new`]. Returns, in the first warp, whether the block was the last one, and, if blocks stay,
/// whether it may wait and a time before the block was counted. `masked` returns the ranks that get no rows, when the
/// block has counted the first tokens, and no rank reads rows of older dispatches in the buffer any more:
/// [`await_release`] has the argument. For a region that sources share, [`reserve`](crate::reserve()) has it.
///
/// # Safety
/// - As [`dispatch`].
#[inline(always)]
pub(crate) unsafe fn send<F: Format, R: Reach, const STAYS: bool>(
    arena: &Arena<R>,
    slot: &SlotParams,
    tokens: &TokenParams,
    (mut routes, ids): (Routes, Eight),
    epoch: u64,
    masked: impl FnOnce(&mut Routes) -> u64,
) -> (Sent, u64) {
    let (sizes, words, blocks) = (&slot.sizes, protocol::launch_words(epoch), grid_dim().count() as u64);
    // No register has the address until then.
    let launch = |words: u64| Launch::<Global>::new(arena.word(stay_word(slot.word(DISPATCH + 3 * words))));
    let (warp, warps) = (Block.rank() / WARP_SIZE, Block.size() / WARP_SIZE);
    let units = F::units(sizes).by();
    if STAYS && Block.elect() {
        launch(words).start();
    }
    let (mut unit, step) = (warp * blocks as u32 + block_in_grid(), warps * blocks as u32);
    let number = routes.tokens;
    // Safety: the caller's promise.
    let load = |unit: u32| unsafe { Unit::load::<F>(slot, tokens, number, unit) };
    // The first unit is on its way while the block counts tokens.
    let mut next = load(unit);
    // By the last threads, because the first ones count tokens if these are few.
    let mut rank = Block.size() - 1 - Block.rank();
    while rank < sizes.ranks {
        routes.set_part(rank, if arena.route.is_remote(rank) { arena.here() } else { arena.there(rank) });
        rank += Block.size();
    }
    let mut section = 0;
    let (mut first, mut end) = routes.advance(arena.here(), slot, tokens, Some(ids));
    let masked = masked(&mut routes);
    while first != end {
        loop {
            let section_end = if F::HAS_METADATA { end } else { end_of_section(routes.tokens, section) };
            let until = end.min(section_end);
            while unit < until * units {
                let this = next;
                // The next one is on its way while this one is sent, but not while the block counts more tokens, for
                // which it would take registers.
                if unit + step < until * units {
                    next = load(unit + step);
                }
                routes.pass(part_of::<F>(sizes, unit).0 / 32);
                // Safety: the caller's promise.
                unsafe { send_unit::<F, R>(arena, slot, tokens, &routes, masked, (unit, &this)) };
                unit += step;
            }
            if !F::HAS_METADATA && until == section_end {
                end_section(arena, slot, section, until, masked);
                section += 1;
            }
            if until == end {
                break;
            }
            next = load(unit);
        }
        (first, end) = routes.advance(arena.here(), slot, tokens, None);
        if first != end {
            next = load(unit);
        }
    }
    let mut sent = Sent { is_last: false, may_wait: false };
    if !F::HAS_METADATA {
        return (sent, 0);
    }
    if Block.rank() < WARP_SIZE {
        routes.close(arena.here(), slot);
    }
    let since = if STAYS { Global::clock_ns() } else { 0 };
    F::meet();
    // A receiver that has seen the flag sees the rows of all blocks: the threads of a block have met, so the one that
    // counts it releases what all of them stored; the block that is counted last acquires what the others released,
    // and `raise` releases that again before the flag.
    if Block.rank() < WARP_SIZE {
        if Block.elect() {
            if STAYS {
                sent = launch(words).finish(blocks);
            } else {
                sent.is_last = launch(words).finish_without_wait(blocks);
            }
        }
        sent = Sent { is_last: Warp.any(sent.is_last), may_wait: STAYS && Warp.any(sent.may_wait) };
        if sent.is_last {
            // Each lane tells what the first one has acquired.
            Warp.sync();
            let mut to = lane_index();
            while to < sizes.ranks {
                if masked >> to & 1 == 0 && !arena.route.is_remote(to) {
                    let flag = arena.word_at(to, F::flag(slot, arena.rank()));
                    raise::<Global>(flag, epoch, routes.count(to));
                }
                to += WARP_SIZE;
            }
            R::send(arena, slot, epoch, masked, |to| routes.count(to));
            if Block.elect() {
                // Nobody uses these words before the next launch on the slot.
                launch(words ^ 1).clear();
                Launch::<Global>::new(arena.word(slot.word(COMBINE))).clear();
                arena.word(slot.word(SINCE)).store_relaxed_gpu(Global::clock_ns());
                arena.word(slot.word(LAST_USE)).store_relaxed_gpu(last_use(slot.buffer, false));
                arena.word(slot.word(EPOCH)).store_relaxed_gpu(epoch);
            }
        }
    }
    (sent, since)
}

/// Returns the token after the last one of a section.
#[inline(always)]
fn end_of_section(tokens: u32, section: u32) -> u32 {
    tokens.min((section + 1) * tokens.div_ceil(SECTIONS))
}

/// Raises the flag of a section at all ranks, if this block is the last one that has sent it. All threads of the block
/// call.
///
/// A warp that has acquired the flag sees all rows up to `tokens`: blocks are counted for a section as for a dispatch.
/// A later number is never overwritten by an earlier one, though one word has the flags of all sections, because the
/// block that raises one is counted for the next only afterwards.
#[inline(always)]
fn end_section<R: Reach>(arena: &Arena<R>, slot: &SlotParams, section: u32, tokens: u32, masked: u64) {
    Block.sync();
    let counter = arena.word(slot.word(SECTION + u64::from(section)));
    if Block.rank() < WARP_SIZE
        && Warp.any(Block.elect() && protocol::count::<Global>(counter, 1, grid_dim().count().into()))
    {
        // Each lane tells what the first one has acquired.
        Warp.sync();
        let epoch = arena.word(slot.word(EPOCH)).load_relaxed_gpu();
        let mut to = lane_index();
        while to < slot.sizes.ranks {
            if masked >> to & 1 == 0 {
                raise::<Global>(arena.word_at(to, slot.section_flag(arena.rank())), epoch, tokens);
            }
            to += WARP_SIZE;
        }
    }
}

/// A unit of a token's row, as a warp loads it. If it is the row's first, each lane also has an id and its weight.
#[derive(Clone, Copy)]
struct Unit<D> {
    id: i32,
    weight: f32,
    data: D,
}

impl<D> Unit<D> {
    /// Loads a unit of the first `number` tokens. Past the last one nothing is loaded.
    ///
    /// # Safety
    /// - As [`dispatch`].
    #[inline(always)]
    unsafe fn load<F: Format<Loaded = D>>(slot: &SlotParams, tokens: &TokenParams, number: u32, unit: u32) -> Self {
        let (sizes, k) = (&slot.sizes, lane_index());
        let (token, part) = part_of::<F>(sizes, unit);
        let pairs = if token < number { sizes.row_bytes / 16 } else { 0 };
        let row = tokens.rows + u64::from(token) * u64::from(F::SOURCE * sizes.row_bytes);
        let index = u64::from(token) * u64::from(sizes.topk) + u64::from(k);
        let (mut id, mut weight) = (-1, 0.0);
        if F::HAS_METADATA && token < number && part == 0 && k < sizes.topk {
            (id, weight) = (tokens.id(index), tokens.weight(index));
        }
        // Safety: the caller's promise.
        let data = unsafe { F::load(row, part * F::UNIT + k, pairs) };
        Self { id, weight, data }
    }
}

/// Returns the token of a unit, and which part of its row the unit is.
#[inline(always)]
fn part_of<F: Format>(sizes: &Sizes, unit: u32) -> (u32, u32) {
    let units = F::units(sizes);
    let token = units.of(unit);
    (token, unit - token * units.by())
}

/// Sends a unit of a token's row to all its ranks, by one warp.
///
/// # Safety
/// - As [`dispatch`].
#[inline(always)]
unsafe fn send_unit<F: Format, R: Reach>(
    arena: &Arena<R>,
    slot: &SlotParams,
    tokens: &TokenParams,
    routes: &Routes,
    masked: u64,
    (unit, loaded): (u32, &Unit<F::Loaded>),
) {
    let (sizes, me, pairs) = (&slot.sizes, arena.rank(), slot.sizes.row_bytes / 16);
    let (token, part) = part_of::<F>(sizes, unit);
    let &Unit { id, weight, .. } = loaded;
    let pair = part * F::UNIT + lane_index();
    let data = F::convert(&loaded.data, tokens.flags);
    // The rank of this lane's id, and the number of the expert there, only where a part has metadata: otherwise they
    // would take instructions for each part, and registers. A token with an id past the last goes nowhere, so its rank
    // does not matter.
    let (mut owner, mut expert) = (u32::MAX, u32::MAX);
    if F::HAS_METADATA && part == 0 {
        let id = stay(id as u32);
        let of = sizes.owner.of(id);
        owner = if id as i32 >= 0 { of } else { u32::MAX };
        expert = id.wrapping_sub(of.wrapping_mul(sizes.local()));
    }
    let mut first = 0;
    while first < sizes.ranks {
        // Each lane looks for one rank.
        let mine = first + lane_index();
        let is_there = mine < sizes.ranks && masked >> mine & 1 == 0;
        let place = if is_there { routes.place(token, mine, sizes.max_rows) } else { None };
        let mut goes = Warp.ballot(place.is_some());
        let place = place.unwrap_or(NO_PLACE);
        while goes != 0 {
            // From the next rank on, so that not all ranks store to the same one at once. Its own rank comes last: rows
            // for others take longer.
            let next = me.wrapping_add(1);
            let index = goes.rotate_right(next % 32).trailing_zeros().wrapping_add(next) % 32;
            goes &= !(1 << index);
            let (to, place) = (first + index, Warp.shuffle(place, index));
            let is_remote = arena.route.is_remote(to);
            let there = routes.part(to);
            let rows = if is_remote { arena.route.staged(slot.buffer, to).0 } else { slot.rows(me) };
            let row = there + rows + u64::from(place) * u64::from(sizes.pitch);
            let meta = |me: u32| {
                let metas = if is_remote { arena.route.staged(slot.buffer, to).1 } else { slot.meta(me) };
                there + metas + u64::from(place) * u64::from(sizes.meta_bytes)
            };
            // Safety: the place is in this rank's region, which has room for all tokens, or was granted and is before
            // the end of the region that it shares.
            unsafe {
                F::store(&data, row, meta(me) + u64::from(sizes.scales_at()), pair, pairs, tokens.flags);
                if F::HAS_METADATA && part == 0 {
                    // Here, so that the address takes no registers for other parts.
                    let meta = meta(stay(me));
                    store_metadata(sizes.topk, token, if owner == to { Some((expert, weight)) } else { None }, meta);
                    if !F::MAKES_SCALES && tokens.scales != 0 {
                        copy_scales(tokens.scales, sizes.scale_bytes, token, meta + u64::from(sizes.scales_at()));
                    }
                }
            }
        }
        if F::HAS_METADATA && part == 0 {
            let at = Warp.shuffle(place, owner.wrapping_sub(first) % WARP_SIZE);
            if owner.wrapping_sub(first) < WARP_SIZE {
                let index = u64::from(token) * u64::from(sizes.topk) + u64::from(lane_index());
                let to = arena.here() + stay_word(slot.row_map()) + 4 * index;
                // Safety: the place of an id of a token, in the arena.
                unsafe { store_weak_u32(to as usize as *mut u32, at) };
            }
        }
        first += WARP_SIZE;
    }
}

/// Stores the metadata of a row, by one warp, whose lanes have an expert there and its weight each.
///
/// # Safety
/// - `meta` is the place of the metadata.
#[inline(always)]
unsafe fn store_metadata(topk: u32, token: u32, chosen: Option<(u32, f32)>, meta: u64) {
    let k = lane_index();
    // Safety: the caller's promise.
    let store =
        |word: u32, value: u32| unsafe { store_weak_u32((meta + 4 * u64::from(word)) as usize as *mut u32, value) };
    if k == 0 {
        store(0, token);
    }
    if k < topk {
        let (expert, weight) = chosen.unwrap_or((u32::MAX, 0.0));
        store(1 + k, expert);
        store(1 + topk + k, weight.to_bits());
    }
}

/// Copies the scales of a row, by one warp.
///
/// # Safety
/// - `scales` has `bytes` for each token, and `to` is their place, a multiple of 16.
#[inline(always)]
unsafe fn copy_scales(scales: u64, bytes: u32, token: u32, to: u64) {
    let from = scales + u64::from(token) * u64::from(bytes);
    let mut at = 4 * lane_index();
    while at < bytes {
        // Safety: the caller's promise.
        unsafe {
            let from = from + u64::from(at);
            if from.is_multiple_of(4) && at + 4 <= bytes {
                store_weak_u32((to + u64::from(at)) as usize as *mut u32, load(from));
            } else {
                for byte in 0..(bytes - at).min(4) {
                    let value =
                        gin_device::sys::data::load_relaxed_sys_u8((from + u64::from(byte)) as usize as *const u8);
                    store_weak_u8((to + u64::from(at + byte)) as usize as *mut u8, value);
                }
            }
        }
        at += 4 * WARP_SIZE;
    }
}

/// Returns the number of rows from a source of which each has a place, if its flag has this number.
#[inline(always)]
pub(crate) fn rows_within(arena: u64, slot: &SlotParams, source: u32, seen: u32) -> u32 {
    let room = slot.sizes.max_rows.saturating_sub(slot.offset_of(arena, source));
    seen.min(slot.sizes.tokens).min(room)
}

/// Waits for the rows of all ranks but `silent`, by one warp.
#[inline(always)]
pub(crate) fn receive<F: Format, R: Reach>(comm: &Comm, arena: &Arena<R>, slot: &SlotParams, epoch: u64, silent: u64) {
    let mut source = lane_index();
    while source < slot.sizes.ranks {
        let mut rows = 0;
        if silent >> source & 1 == 0 {
            let flag = arena.route.sent(arena.word(F::flag(slot, source)), slot.buffer, source);
            match protocol::wait::<Global>(&status::of(comm), slot.patience(), flag, epoch) {
                Ok(seen) => rows = rows_within(arena.here(), slot, source, seen),
                Err(error) => is_silent(arena, slot, source, epoch, error),
            }
        }
        arena.word(slot.got(source)).store_relaxed_gpu(rows.into());
        source += WARP_SIZE;
    }
}
