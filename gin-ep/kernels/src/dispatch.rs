// SPDX-License-Identifier: MIT OR Apache-2.0
//! Dispatch: every row once to every rank that has one of its experts.

use crate::UNIT;
use crate::lane::{COMBINE, DISPATCH, EPOCH, Lane, MASKED, Tokens};
use crate::protocol::{Launch, raise, reached};
use crate::routes::Routes;
use crate::status::{self, Code};
use gin_device::internal::status::WaitError;
use gin_device::prelude::*;
use gin_device::sys::data::{load_weak_pair, store_weak_pair, store_weak_u32};
use gin_device::sys::{Global, GlobalWord, Memory, Word};

/// Phase of [`dispatch`]: send the rows.
pub const SEND: u32 = 1;
/// Phase of [`dispatch`]: wait for the rows of all ranks.
pub const RECEIVE: u32 = 2;

/// Four pairs of words of a row, for one lane of a warp.
pub(crate) type Pairs = ((u64, u64), (u64, u64), (u64, u64), (u64, u64));

/// Loads a warp's unit of a row: this lane's pairs from `pair` on, 32 apart.
///
/// # Safety
/// - The row has `pairs` pairs at `row`.
#[inline(always)]
pub(crate) unsafe fn load_unit(row: u64, pair: u32, pairs: u32) -> Pairs {
    // Safety: the caller's promise; a pair past the end is not loaded.
    let load = |ahead: u32| unsafe {
        let pair = pair + 32 * ahead;
        if pair < pairs { load_weak_pair((row + 16 * u64::from(pair)) as usize as *const u64) } else { (0, 0) }
    };
    (load(0), load(1), load(2), load(3))
}

/// Stores a warp's unit of a row.
///
/// # Safety
/// - As [`load_unit`], and nothing else uses the row.
#[inline(always)]
pub(crate) unsafe fn store_unit(row: u64, pair: u32, pairs: u32, unit: &Pairs) {
    let store = |ahead: u32, value: (u64, u64)| {
        let pair = pair + 32 * ahead;
        if pair < pairs {
            // Safety: the caller's promise.
            unsafe { store_weak_pair((row + 16 * u64::from(pair)) as usize as *mut u64, value.0, value.1) };
        }
    };
    store(0, unit.0);
    store(1, unit.1);
    store(2, unit.2);
    store(3, unit.3);
}

/// The arena of all ranks.
#[derive(Clone, Copy)]
pub(crate) struct Arena {
    window: Window<u64>,
    world: Team,
}

impl Arena {
    /// Returns the arena, if loads and stores reach all ranks. Otherwise reports a fault.
    #[inline(always)]
    pub(crate) fn new(comm: &Comm, window: &Window<u64>) -> Option<Self> {
        let world = comm.world();
        if comm.lsa().size() == world.size() {
            return Some(Self { window: *window, world });
        }
        if Block.elect() && block_in_grid() == 0 {
            comm.report_code(u64::from(comm.lsa().size()));
        }
        None
    }

    /// Returns the address of this rank's part.
    #[inline(always)]
    pub(crate) fn here(&self) -> u64 {
        self.window.local_ptr().addr() as u64
    }

    /// Returns the address of a rank's part.
    #[inline(always)]
    pub(crate) fn there(&self, rank: u32) -> u64 {
        // Safety: callers pass ranks of the group, which are all ranks of the communicator.
        let rank = unsafe { Rank::new_unchecked(rank) };
        // Loads and stores reach all of them.
        self.window.peer_ptr(rank).map_or(0, |part| part.addr() as u64)
    }

    #[inline(always)]
    pub(crate) fn rank(&self) -> u32 {
        self.world.rank()
    }

    #[inline(always)]
    pub(crate) fn word(&self, offset: u64) -> GlobalWord {
        // Safety: a word of the arena; all accesses to words of state are atomic.
        unsafe { GlobalWord::new(self.here() + offset) }
    }

    #[inline(always)]
    pub(crate) fn word_at(&self, rank: u32, offset: u64) -> GlobalWord {
        // Safety: as above.
        unsafe { GlobalWord::new(self.there(rank) + offset) }
    }
}

/// Sends the rows of `tokens`, if `phases` has [`SEND`], and waits for those of all ranks, if it has [`RECEIVE`]. All
/// threads of the grid call.
///
/// Afterwards, in the order of the stream, [`Received`](crate::Received) has the rows. The launch has dynamic shared
/// memory of 4 bytes for each 32 tokens of the group's most and each rank and one more.
///
/// Errors are reported to the lane's status, and the communicator goes on:
///
/// | code | what happens |
/// | --- | --- |
/// | [`Code::UnknownExpert`] | the token goes nowhere |
/// | [`Code::TooManyTokens`] | the tokens past the limit go nowhere |
/// | [`Code::Silent`] | the rank counts as one without tokens, in this dispatch and later ones |
///
/// # Safety
/// - The host made communicator, arena and lane for each other. The addresses of `tokens` are valid, for as many tokens
///   as it says.
/// - The lane's dispatches and combines follow each other on one stream, or by events, with the same phases on all
///   ranks.
#[inline(always)]
pub unsafe fn dispatch(comm: &Comm, arena: &Window<u64>, lane: &Lane, tokens: &Tokens, phases: u32) {
    let Some(arena) = Arena::new(comm, arena) else { return };
    let before = arena.word(lane.word(EPOCH)).load_relaxed_gpu();
    let mut is_receiver = block_in_grid() == 0;
    let mut epoch = before;
    if phases & SEND != 0 {
        epoch = before.wrapping_add(1);
        // Safety: the caller's promise.
        is_receiver = unsafe { send(&arena, lane, tokens, epoch) };
    }
    if phases & RECEIVE != 0 && is_receiver && Block.rank() < WARP_SIZE {
        receive(comm, &arena, lane, epoch);
    }
}

/// Sends. Returns, in the first warp, whether the block was the last one.
///
/// # Safety
/// - As [`dispatch`].
#[inline(always)]
unsafe fn send(arena: &Arena, lane: &Lane, tokens: &Tokens, epoch: u64) -> bool {
    let (sizes, slot, blocks) = (&lane.sizes, epoch & 1, grid_dim().count() as u64);
    let launch = |slot: u64| Launch::<Global>::new(arena.word(lane.word(DISPATCH + 3 * slot)));
    if Block.elect() {
        launch(slot).start();
    }
    let routes = Routes::new(arena.here(), lane, tokens);
    let (me, pairs) = (arena.rank(), sizes.row_bytes / 16);
    let units = pairs.div_ceil(UNIT);
    let (warp, warps) = (Block.rank() / WARP_SIZE, Block.size() / WARP_SIZE);
    let mut unit = warp * blocks as u32 + block_in_grid();
    while unit < routes.tokens * units {
        let (token, part) = (unit / units, unit % units);
        let pair = part * UNIT + lane_index();
        let row = tokens.rows + u64::from(token) * u64::from(sizes.row_bytes);
        // Safety: the caller's promise.
        let data = unsafe { load_unit(row, pair, pairs) };
        let mut first = 0;
        while first < sizes.ranks {
            // Each lane counts for one rank.
            let mine = first + lane_index();
            let is_mine = mine < sizes.ranks;
            let place = if is_mine { routes.before(token, mine) } else { 0 };
            let mut goes = Warp.ballot(is_mine && routes.goes(token, mine));
            while goes != 0 {
                let index = goes.trailing_zeros();
                goes &= goes - 1;
                let (to, place) = (first + index, Warp.shuffle(place, index));
                let there = arena.there(to);
                let row = there + lane.rows(slot, me) + u64::from(place) * u64::from(sizes.row_bytes);
                // Safety: the place is in this rank's region, which has room for all tokens.
                unsafe { store_unit(row, pair, pairs, &data) };
                if part == 0 {
                    let meta = there + lane.meta(slot, me) + u64::from(place) * u64::from(sizes.meta_bytes());
                    // Safety: as above.
                    unsafe { describe(lane, tokens, token, to, meta) };
                }
            }
            first += WARP_SIZE;
        }
        unit += warps * blocks as u32;
    }
    Block.sync();
    let mut is_last = false;
    if warp == 0 {
        is_last = Warp.any(Block.elect() && launch(slot).finish(blocks).is_last);
        if is_last {
            let mut to = lane_index();
            while to < sizes.ranks {
                let count = routes.before(routes.tokens, to);
                arena.word_at(to, lane.count(slot, me)).store_relaxed_sys(count.into());
                raise::<Global>(arena.word_at(to, lane.sent_flag(me)), epoch);
                to += WARP_SIZE;
            }
            if Block.elect() {
                // Nobody uses these words before the next launch on the lane.
                launch(slot ^ 1).clear();
                Launch::<Global>::new(arena.word(lane.word(COMBINE))).clear();
                arena.word(lane.word(EPOCH)).store_relaxed_gpu(epoch);
            }
        }
    }
    is_last
}

/// Stores the description of a row.
///
/// # Safety
/// - `meta` is the place of the description.
#[inline(always)]
unsafe fn describe(lane: &Lane, tokens: &Tokens, token: u32, to: u32, meta: u64) {
    let (topk, local, k) = (lane.sizes.topk, lane.sizes.local(), lane_index());
    // Safety: the caller's promise.
    let store =
        |word: u32, value: u32| unsafe { store_weak_u32((meta + 4 * u64::from(word)) as usize as *mut u32, value) };
    if k == 0 {
        store(0, token);
    }
    if k < topk {
        let index = (token * topk + k) as usize;
        let id = tokens.id(index);
        let is_there = id >= 0 && id as u32 / local == to;
        store(1 + k, if is_there { id as u32 % local } else { u32::MAX });
        store(1 + topk + k, if is_there { tokens.weight(index).to_bits() } else { 0 });
    }
}

/// Waits for the rows of all ranks, by one warp.
#[inline(always)]
fn receive(comm: &Comm, arena: &Arena, lane: &Lane, epoch: u64) {
    let slot = epoch & 1;
    let masked = arena.word(lane.word(MASKED));
    let silent = masked.load_relaxed_gpu();
    let mut source = lane_index();
    while source < lane.sizes.ranks {
        let flag = arena.word(lane.sent_flag(source));
        let mut count = 0;
        if silent >> source & 1 == 0 && arrives(comm, arena, lane, flag, epoch, source) {
            Global::fence_acquire_sys();
            count = arena.word(lane.count(slot, source)).load_relaxed_sys();
        } else {
            masked.red_or_relaxed_gpu(1 << source);
        }
        arena.word(lane.got(slot, source)).store_relaxed_gpu(count);
        source += WARP_SIZE;
    }
}

/// Waits for a flag. Reports why it did not come.
#[inline(always)]
pub(crate) fn arrives(comm: &Comm, arena: &Arena, lane: &Lane, flag: GlobalWord, epoch: u64, source: u32) -> bool {
    let mut seen = 0;
    let waited = status::of(comm).poll(lane.deadline, || {
        seen = flag.load_relaxed_sys();
        reached(seen, epoch)
    });
    let code = match waited {
        Ok(()) => return true,
        Err(WaitError::Deadline) => Code::Silent,
        Err(_) => Code::Stopped,
    };
    status::report(arena.here(), lane, code, source, 0, seen, epoch);
    false
}

/// Returns the number of the thread in its warp.
#[inline(always)]
pub(crate) fn lane_index() -> u32 {
    gin_device::coop::lane()
}
