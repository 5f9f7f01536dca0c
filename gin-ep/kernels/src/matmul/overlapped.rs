// SPDX-License-Identifier: MIT OR Apache-2.0
//! Products of received rows, which begin before the rows of all sources are there.
//!
//! Blocks list the rows of a source by expert when they have come, and gather a tile's rows from where they were
//! received. While sources are missing, blocks multiply full tiles of this rank's own rows. From then on they take the
//! rest, expert by expert. `docs/matmul.md` has the argument.

use super::ScaleTables;
use super::grouped::{Back, Search};
use super::tile::{COPIED_ROWS, Factors, Left, ROWS, THREADS, multiply};
use super::tile_scheduler::{self, Lists, TileScheduler, look};
use super::warpgroups::{Factor, Finder, GatheredTile, Gathers, Output, Outputs, Scaled, multiply_gathered, rows_of};
use crate::arena::{Arena, is_silent};
use crate::layout::prefix_sum;
use crate::params::{EPOCH, MASKED, Sizes, load};
use crate::protocol::{self, wait};
use crate::status;
use crate::{ReceivedRows, SCALED};
use core::marker::PhantomData;
use gin_device::prelude::*;
use gin_device::shared::SharedArray;
use gin_device::sys::data::store_weak_u32;
use gin_device::sys::{Global, GlobalWord, Word};

/// The products of the received rows: a parameter of [`overlapped_matmul`].
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug, Pod, Zeroable)]
#[bytemuck(crate = "gin_device::bytemuck")]
pub struct Overlapped {
    /// The address of the experts' weights: for each expert a row of `depth` elements for each column; a multiple of
    /// 16.
    pub weights: u64,
    /// The address of [`state_bytes`](Self::state_bytes) bytes, which were 0 at first: a multiple of 16. Launches with
    /// it follow each other.
    pub state: u64,
    /// The address of the lists in it: [`lists_at`](Self::lists_at) bytes further.
    pub lists: u64,
    /// The address of [`MAPS_BYTES`](super::warpgroups::MAPS_BYTES) for each block of a kernel by warpgroups: a
    /// multiple of 128. Other kernels do not use it.
    pub maps: u64,
    /// The address of FP32 scales of weights of E4M3, a multiple of 4: for each expert and each 128 columns a row of
    /// scales, one for each 128 inner elements. The received rows have scales, too.
    pub weight_scales: u64,
    /// Number of inner elements of a received row: of BF16 a multiple of 8, of E4M3 of [`SCALED`].
    pub depth: u32,
    /// Number of columns: the elements of a returned row, a multiple of 8.
    pub columns: u32,
}

impl Overlapped {
    /// Returns the bytes of state: words; for each source and expert the number of rows and where their list begins;
    /// lists of the rows from each source.
    #[must_use]
    pub const fn state_bytes(sizes: &Sizes) -> u64 {
        let ids = sizes.ranks as u64 * sizes.tokens as u64 * sizes.topk as u64;
        (Self::lists_at(sizes) + 4 * ids).next_multiple_of(16)
    }

    /// Returns the offset of the lists in the state.
    #[must_use]
    pub const fn lists_at(sizes: &Sizes) -> u64 {
        ZONES + 8 * sizes.ranks as u64 * sizes.local() as u64
    }

    /// The offset in the state of a word of 32 bits: the number of tiles that were taken before all rows were there.
    pub const TAKEN_AT: u64 = 8 * (tile_scheduler::WORDS + tile_scheduler::ALL_READY);
}

/// The offset in the state of the zones: behind words for the maximum number of ranks.
const ZONES: u64 = 8 * (tile_scheduler::WORDS + Lists::<Global>::words(64));

shared! {
    /// The address of each row of the tile.
    static ADDRESSES: [u64; ROWS as usize];
}

shared! {
    /// Its source, received row and position of the id.
    static SOURCE_INFO: [u32; ROWS as usize];
}

shared! {
    /// State that each thread keeps here while it multiplies, because registers are scarce then.
    static KEPT: [u32; KEPT_WORDS * THREADS as usize];
}

const KEPT_WORDS: usize = 10;

/// Waits for the rows of all ranks, and multiplies those of each expert by its weights as they arrive. All threads of
/// the grid call; blocks have [`THREADS`] threads.
///
/// It is a receive, too: afterwards [`ReceivedRows`] has the rows. The product of a row goes to where a combine of one
/// row for each id would put it: to the rank of its token. A combine with [`RETURNED`](crate::RETURNED) follows on the
/// stream. The result has the bits of [`grouped_matmul`](super::grouped_matmul) after a receive.
///
/// A rank that does not come in time is reported to the slot's status as by a [`dispatch`](crate::dispatch()), and
/// counts as one without tokens.
///
/// # Safety
/// - In the order of the stream, after a dispatch that has sent and not received, in place of the receive. The host
///   made communicator, arena and slot for each other; the group has one row for each id, and rows of `depth` BF16. The
///   addresses of `early` are valid.
#[inline(always)]
pub unsafe fn overlapped_matmul(comm: &Comm, arena: &Window<u64>, received: &ReceivedRows, early: &Overlapped) {
    let Some(arena) = Arena::new(comm, arena) else { return };
    let work = Launch::<Bf16>::new(comm, &arena, received, early);
    // Safety: the caller's promise.
    unsafe { work.run() };
    work.leave();
}

/// Multiplies as [`overlapped_matmul`], by [warpgroups](super::warpgroups). Blocks have
/// [`THREADS`](super::warpgroups::THREADS) threads. Four warps list and gather rows while the others multiply.
///
/// The result has the bits of [`grouped_matmul_by_warpgroups`](super::grouped_matmul_by_warpgroups) after a receive.
///
/// # Safety
/// - As [`overlapped_matmul`], with memory for the maps.
#[inline(always)]
pub unsafe fn overlapped_matmul_by_warpgroups(
    comm: &Comm,
    arena: &Window<u64>,
    received: &ReceivedRows,
    early: &Overlapped,
) {
    // Safety: the caller's promise.
    unsafe { by_warpgroups::<Bf16>(comm, arena, received, early) };
}

/// Multiplies as [`overlapped_matmul_by_warpgroups`] rows and weights of E4M3 with FP32 scales.
///
/// # Safety
/// - As [`overlapped_matmul_by_warpgroups`], of a group with rows of E4M3 and FP32 scales.
#[inline(always)]
pub unsafe fn overlapped_matmul_e4m3_by_warpgroups(
    comm: &Comm,
    arena: &Window<u64>,
    received: &ReceivedRows,
    early: &Overlapped,
) {
    // Safety: the caller's promise.
    unsafe { by_warpgroups::<Scaled<1>>(comm, arena, received, early) };
}

/// # Safety
/// - As [`overlapped_matmul_by_warpgroups`].
#[inline(always)]
unsafe fn by_warpgroups<F: Factor>(comm: &Comm, arena: &Window<u64>, received: &ReceivedRows, early: &Overlapped) {
    let Some(arena) = Arena::new(comm, arena) else { return };
    let work = Launch::<F>::new(comm, &arena, received, early);
    let right = rows_of(early.weights, F::pairs(early.depth), early.columns, received.slot().sizes.local(), F::COLUMNS);
    // Safety: the caller's promise.
    unsafe { multiply_gathered(F::pairs(early.depth), early.maps, &right, &work) };
    work.leave();
}

/// A launch.
struct Launch<'a, F> {
    comm: &'a Comm,
    arena: &'a Arena,
    received: &'a ReceivedRows,
    early: &'a Overlapped,
    factor: PhantomData<F>,
}

/// The state of a block.
#[derive(Clone, Copy)]
struct State {
    /// The sources, by their distance, whose units were all taken, as bits.
    listed: u64,
    /// The first tile of own rows that was not taken before all rows were there: its expert, and its number there.
    /// `None` as long as rows may be missing.
    taken: Option<(u32, u32)>,
}

impl State {
    /// Keeps it and a search in shared memory.
    #[inline(always)]
    fn keep(&self, search: &Search) {
        let [group, before, first, rows, end] = search.state();
        let (expert, index) = self.taken.unwrap_or((0, 0));
        let store =
            |word: usize, value: u32| KEPT.array().write(word * THREADS as usize + Block.rank() as usize, value);
        store(0, group);
        store(1, before);
        store(2, first);
        store(3, rows);
        store(4, end);
        store(5, self.listed as u32);
        store(6, (self.listed >> 32) as u32);
        store(7, self.taken.is_some().into());
        store(8, expert);
        store(9, index);
    }

    /// Returns what was kept.
    #[inline(always)]
    fn kept(experts: u32) -> (Self, Search) {
        let load = |word: usize| KEPT.array().read(word * THREADS as usize + Block.rank() as usize);
        let listed = u64::from(load(6)) << 32 | u64::from(load(5));
        let taken = if load(7) != 0 { Some((load(8), load(9))) } else { None };
        (Self { listed, taken }, Search::of(experts, [load(0), load(1), load(2), load(3), load(4)]))
    }
}

/// Rows at these addresses.
#[derive(Clone, Copy)]
struct Gathered(SharedArray<u64>);

impl Left for Gathered {
    /// The number of the first row, and the offset in it. The addresses stay in shared memory, as registers are scarce.
    type Rows = (u32, u32);

    #[inline(always)]
    fn rows(&self, first: u32, at: u32, _: u64) -> (u32, u32) {
        (first, at)
    }

    #[inline(always)]
    fn address(&self, &(first, at): &(u32, u32), index: usize, along: u32, _: u64) -> u64 {
        self.0.read(first as usize + index * COPIED_ROWS as usize) + u64::from(at + along)
    }
}

/// Returns source, received row and position of the id of a word of a list.
#[inline(always)]
const fn unpacked(word: u32) -> (u32, u32, u32) {
    (word >> 21, word >> 5 & 0xffff, word & 31)
}

/// Returns how many of an expert's `early` tiles of own rows were taken before all rows were there. `first` is the
/// expert of the first one that was not, and its number there.
#[inline(always)]
fn taken_of(first: (u32, u32), expert: u32, early: u32) -> u32 {
    match first {
        (at, _) if expert < at => early,
        (at, index) if expert == at => index,
        _ => 0,
    }
}

impl<'a, F: Factor> Launch<'a, F> {
    #[inline(always)]
    const fn new(comm: &'a Comm, arena: &'a Arena, received: &'a ReceivedRows, early: &'a Overlapped) -> Self {
        Self { comm, arena, received, early, factor: PhantomData }
    }

    /// Works until all tiles are taken. All threads of the block call.
    ///
    /// # Safety
    /// - As [`overlapped_matmul`].
    #[inline(always)]
    unsafe fn run(&self) {
        let Some((mut state, mut search)) = self.start(Block) else { return };
        while let Some(tile) = self.take(Block, &mut state, &mut search) {
            state.keep(&search);
            // Safety: the caller's promise.
            unsafe { self.multiply(&tile) };
            (state, search) = State::kept(self.sizes().local());
        }
    }

    /// Ends a block's part of the launch. All its threads call.
    #[inline(always)]
    fn leave(&self) {
        Block.sync();
        if Block.elect() {
            let blocks = grid_dim().count().into();
            self.scheduler().leave(blocks, self.launch(), || self.lists().clear(self.received.ranks()));
        }
    }

    /// Lists this rank's rows, and waits until all are listed. Returns whether the launch goes on: the state of the
    /// group, whose threads all call.
    #[inline(always)]
    fn start(&self, group: impl Coop) -> Option<(State, Search)> {
        if group.elect() && self.lists().hears() {
            self.hear();
        }
        let mut state = State { listed: 0, taken: None };
        if !self.list(group, &mut state, 1) {
            return None;
        }
        self.awaits(group, self.lists().own_ready)?;
        Some((state, Search::new(self.sizes().local(), self.tiles(None))))
    }

    /// Takes the next tile, if there is one. All threads of the group call.
    #[inline(always)]
    fn take(&self, group: impl Coop, state: &mut State, search: &mut Search) -> Option<Taken> {
        let (experts, column_tiles) = (self.sizes().local(), self.early.columns.div_ceil(F::COLUMNS));
        let mut tile = None;
        if state.taken.is_none() {
            if !self.list(group, state, 1) {
                return None;
            }
            // Sources are missing.
            if state.listed.count_ones() < self.sizes().ranks {
                let part = if group.elect() { self.scheduler().take_open_part() } else { None };
                let part = group.broadcast(part.map_or(u64::MAX, u64::from), 0);
                tile = if part == u64::MAX { None } else { search.find(part as u32, self.tiles(None)) };
            }
            if tile.is_none() {
                if !self.list(group, state, self.sizes().ranks) {
                    return None;
                }
                let number = self.awaits(group, self.lists().all_ready)?;
                let first = search.find(number, self.tiles(None));
                state.taken = Some(first.map_or((experts, 0), |tile| (tile.expert, tile.index)));
                *search = Search::new(experts, self.tiles(state.taken));
            }
        }
        if state.taken.is_some() {
            let number = if group.elect() { self.scheduler().take_tile() } else { 0 };
            tile = search.find(group.broadcast(number, 0) as u32, self.tiles(state.taken));
        }
        let tile = tile?;
        let (own, all) = (tile.first / ROWS, tile.rows.div_ceil(ROWS));
        let before = state.taken.map_or(0, |taken| taken_of(taken, tile.expert, own * column_tiles));
        // The tiles of a column follow each other, so that they share the weights.
        let (first, height, index) = if state.taken.is_none() {
            (0, own, tile.index)
        } else if before == 0 {
            (0, all, tile.index)
        } else if tile.index + before < own * column_tiles {
            (0, own, tile.index + before)
        } else {
            (own, all - own, tile.index + before - own * column_tiles)
        };
        let (row, column) = ((first + index % height) * ROWS, index / height * F::COLUMNS);
        Some(Taken { expert: tile.expert, rows: tile.rows, row, column })
    }

    /// Returns a function that returns the number of an expert's own rows, of all, and of the tiles that are left: full
    /// ones of own rows alone; or, when all rows are there, all that were not taken before.
    #[inline(always)]
    fn tiles(&self, taken: Option<(u32, u32)>) -> impl Fn(u32) -> (u32, u32, u32) + Copy + '_ {
        move |expert: u32| {
            let column_tiles = self.early.columns.div_ceil(F::COLUMNS);
            let own = self.zone(self.arena.rank(), expert, 0);
            let early = own / ROWS * column_tiles;
            let Some(taken) = taken else { return (own, own, early) };
            let rows = (0..self.sizes().ranks).map(|source| self.zone(source, expert, 0)).sum::<u32>();
            (own, rows, rows.div_ceil(ROWS) * column_tiles - taken_of(taken, expert, early))
        }
    }

    /// Returns the number of rows of a source and an expert, or the place of the first one in the list of the source.
    #[inline(always)]
    fn zone(&self, source: u32, expert: u32, which: u64) -> u32 {
        let zone = u64::from(source * self.sizes().local() + expert);
        // Safety: a word of the state.
        unsafe { load(self.early.state + ZONES + 8 * zone + 4 * which) }
    }

    /// Returns the source and the place in its list of a row of an expert. Own rows come first, then those of the next
    /// ranks in turn.
    #[inline(always)]
    fn find(&self, expert: u32, mut row: u32) -> (u32, u32) {
        let mut source = self.arena.rank();
        loop {
            let rows = self.zone(source, expert, 0);
            if row < rows {
                return (source, self.zone(source, expert, 1) + row);
            }
            row -= rows;
            source = if source + 1 == self.sizes().ranks { 0 } else { source + 1 };
        }
    }

    #[inline(always)]
    fn word(&self, index: u64) -> GlobalWord {
        // Safety: a word of the state.
        unsafe { GlobalWord::new(self.early.state + 8 * index) }
    }

    #[inline(always)]
    fn scheduler(&self) -> TileScheduler<Global> {
        TileScheduler::new(self.word(0))
    }

    #[inline(always)]
    fn lists(&self) -> Lists<Global> {
        Lists::new(self.word(tile_scheduler::WORDS))
    }

    /// Returns the number of the launch.
    #[inline(always)]
    fn launch(&self) -> u64 {
        self.scheduler().ended().wrapping_add(1)
    }

    #[inline(always)]
    fn sizes(&self) -> &Sizes {
        &self.received.slot().sizes
    }

    /// Waits for the rows of all sources, by one thread of one block, and tells the others of each. One thread looks
    /// at all flags, because lanes of a warp would wait for each other.
    #[inline(always)]
    fn hear(&self) {
        let (arena, slot) = (self.arena, self.received.slot());
        let epoch = arena.word(slot.word(EPOCH)).load_relaxed_gpu();
        let masked = arena.word(slot.word(MASKED)).load_relaxed_gpu();
        let launch = self.launch();
        let tell = |source: u32, rows: u32| {
            arena.word(slot.got(source)).store_relaxed_gpu(rows.into());
            protocol::raise::<Global>(self.lists().heard(source), launch, 0);
        };
        let mut missing = u64::MAX >> (64 - slot.sizes.ranks);
        let waited = status::of(self.comm).poll(slot.deadline, || {
            let mut rest = missing;
            while rest != 0 {
                let source = rest.trailing_zeros();
                rest &= rest - 1;
                let rows = if masked >> source & 1 != 0 {
                    Some(0)
                } else {
                    look::<Global>(arena.word(slot.sent_flag(source)), epoch)
                };
                if let Some(rows) = rows {
                    tell(source, rows.min(slot.sizes.tokens));
                    missing &= !(1 << source);
                }
            }
            missing == 0
        });
        if let Err(stop) = waited {
            while missing != 0 {
                let source = missing.trailing_zeros();
                missing &= missing - 1;
                let seen = arena.word(slot.sent_flag(source)).load_relaxed_sys() >> 32;
                is_silent(arena, slot, source, epoch, (stop, seen));
                tell(source, 0);
            }
        }
    }

    /// Waits for a flag of this launch, which blocks that run raise. Returns its number, unless the communicator was
    /// stopped. All threads of the group call.
    #[inline(always)]
    fn awaits(&self, group: impl Coop, flag: GlobalWord) -> Option<u32> {
        let mut seen = u64::MAX;
        if group.elect()
            && let Ok(number) = wait::<Global>(&status::of(self.comm), Deadline::NONE, flag, self.launch())
        {
            seen = number.into();
        }
        let seen = group.broadcast(seen, 0);
        if seen == u64::MAX { None } else { Some(seen as u32) }
    }

    /// Lists rows of the sources that have come, by expert, until all units of these are taken. Waits for the first
    /// `max`, by their distance. Returns whether it could. All threads of the group call.
    #[inline(always)]
    fn list(&self, group: impl Coop, state: &mut State, max: u32) -> bool {
        let (ranks, experts, me) = (self.sizes().ranks, self.sizes().local(), self.arena.rank());
        let source_at = |distance: u32| (me + distance) % ranks;
        // Each thread looks at one flag, so that nothing else is done if there is nothing to do.
        let mine = group.rank();
        let is_missing = mine < ranks && state.listed >> mine & 1 == 0;
        let came = |distance: u32| look::<Global>(self.lists().heard(source_at(distance)), self.launch()).is_some();
        if !group.sync_or(is_missing && (mine < max || came(mine))) {
            return true;
        }
        for distance in 0..ranks {
            if state.listed >> distance & 1 != 0 {
                continue;
            }
            let source = source_at(distance);
            if distance < max {
                if self.awaits(group, self.lists().heard(source)).is_none() {
                    return false;
                }
            } else if !group.sync_or(group.elect() && came(distance)) {
                continue;
            }
            loop {
                let unit = if group.elect() { self.lists().take(source) } else { 0 };
                let unit = group.broadcast(unit, 0);
                if unit >= u64::from(experts) {
                    break;
                }
                self.list_one(group, source, unit as u32);
                if group.elect() {
                    self.lists().finish(source == me, experts.into(), ranks.into(), &self.scheduler(), self.launch());
                }
            }
            state.listed |= 1 << distance;
        }
        true
    }

    /// Lists the rows of a source and an expert. All threads of the group call, and have met at its end.
    #[inline(always)]
    fn list_one(&self, group: impl Coop, source: u32, expert: u32) {
        let (sizes, count) = (self.sizes(), self.received.count(source));
        let meta = self.arena.here() + self.received.meta_at(source, 0) + 4;
        // Returns the ids of a row that name the expert, as bits.
        let ids = |row: u32| {
            let (mut ids, at) = (0, meta + u64::from(row) * u64::from(sizes.meta_bytes));
            for k in 0..if row < count { sizes.topk } else { 0 } {
                // Safety: the ids of a received row.
                ids |= u32::from(unsafe { load(at + 4 * u64::from(k)) } == expert) << k;
            }
            ids
        };
        let mut mine = 0;
        for row in group.stripe(count as usize) {
            mine += ids(row as u32).count_ones();
        }
        let rows = prefix_sum(group, mine).1;
        let first = if group.elect() { self.lists().reserve(source, rows) } else { 0 };
        let first = group.broadcast(first, 0) as u32;
        // Safety: words of the state, here and below.
        let store = |address: u64, value: u32| unsafe { store_weak_u32(address as usize as *mut u32, value) };
        let (list, mut row, mut listed) = (self.list_at(source) + 4 * u64::from(first), 0, 0);
        // A rank may store other ids meanwhile, but nothing is written past the places.
        while row < count && listed < rows {
            let at = row + group.rank();
            let mut ids = ids(at);
            let (earlier, all) = prefix_sum(group, ids.count_ones());
            let mut place = listed + earlier;
            while ids != 0 && place < rows {
                store(list + 4 * u64::from(place), source << 21 | at << 5 | ids.trailing_zeros());
                ids &= ids - 1;
                place += 1;
            }
            listed += all;
            row += group.size();
        }
        if group.elect() {
            let zone = self.early.state + ZONES + 8 * u64::from(source * sizes.local() + expert);
            store(zone, rows);
            store(zone + 4, first);
        }
        group.sync();
    }

    /// Returns the address of the list of a source's rows.
    #[inline(always)]
    fn list_at(&self, source: u32) -> u64 {
        let sizes = self.sizes();
        self.early.lists + 4 * u64::from(source) * u64::from(sizes.tokens) * u64::from(sizes.topk)
    }

    /// Returns source, received row and position of the id of a row of an expert, as a word of a list.
    #[inline(always)]
    fn listed(&self, expert: u32, row: u32) -> u32 {
        let (source, at) = self.find(expert, row);
        // Safety: a word of the state.
        unsafe { load(self.list_at(source) + 4 * u64::from(at)) }
    }

    /// Multiplies a tile. All threads of the block call.
    ///
    /// # Safety
    /// - As [`overlapped_matmul`].
    #[inline(always)]
    unsafe fn multiply(&self, tile: &Taken) {
        let (early, &Taken { expert, rows, row, column }) = (self.early, tile);
        let (addresses, source_info) = (ADDRESSES.array(), SOURCE_INFO.array());
        // The threads have read those of the last tile, and meet before they read these.
        if Block.rank() < ROWS {
            // Nothing is read of rows past the last one.
            let (mut address, mut word) = (0, 0);
            if row + Block.rank() < rows {
                word = self.listed(expert, row + Block.rank());
                let (source, row, _) = unpacked(word);
                address = self.received.row(source, row).addr() as u64;
            }
            addresses.write(Block.rank() as usize, address);
            source_info.write(Block.rank() as usize, word);
        }
        let weights = u64::from(expert) * u64::from(early.columns) + u64::from(column);
        let factors = Factors {
            a: Gathered(addresses),
            b: early.weights + weights * 2 * u64::from(early.depth),
            rows: rows - row,
            columns: early.columns - column,
            depth: early.depth,
        };
        let back = Back::new(self.arena, self.received);
        let place = |at: u32| {
            let (source, row, k) = unpacked(source_info.read(at as usize));
            back.place(source, row, k) + 2 * u64::from(column)
        };
        // Safety: the caller's promise; the flags of these rows were acquired.
        unsafe { multiply(&factors, &(), place) };
    }
}

/// A tile of an expert with `rows` rows: its first row and column.
#[derive(Clone, Copy)]
struct Taken {
    expert: u32,
    rows: u32,
    row: u32,
    column: u32,
}

impl<F: Factor> Outputs for Launch<'_, F> {
    type Factor = F;
    const FREES: bool = false;
    const FINDER: Finder = Finder::Loads;

    /// Returns nothing: the loading warps find the places with the rows.
    #[inline(always)]
    fn place(&self, _: &Output, _: u32) -> u64 {
        0
    }

    #[inline(always)]
    fn row_scales(&self, &Output { numbers: [expert, first], .. }: &Output, row: u32) -> u64 {
        let (source, row, _) = unpacked(self.listed(expert, first + row));
        self.received.scales(source, row).addr() as u64
    }

    #[inline(always)]
    fn column_scales(&self, &Output { to, numbers: [expert, _], .. }: &Output, _: u32) -> u64 {
        let Overlapped { weight_scales, columns, depth, .. } = *self.early;
        // A tile has 128 columns.
        let first = u64::from(expert) * u64::from(columns.div_ceil(SCALED)) + to / u64::from(2 * SCALED);
        ScaleTables { rows: 0, weights: weight_scales }.of_columns(depth, first)
    }
}

impl<F: Factor> Gathers for Launch<'_, F> {
    type Loading = (State, Search);

    #[inline(always)]
    fn begin(&self, group: WarpSpan) -> Option<Self::Loading> {
        self.start(group)
    }

    #[inline(always)]
    fn next(&self, group: WarpSpan, (state, search): &mut Self::Loading) -> Option<GatheredTile> {
        let Taken { expert, rows, row, column } = self.take(group, state, search)?;
        let (rows, columns) = (rows - row, self.early.columns - column);
        let output = Output { to: 2 * u64::from(column), rows, columns, numbers: [expert, row] };
        Some(GatheredTile { b: (column, expert), output })
    }

    #[inline(always)]
    fn row(&self, tile: &GatheredTile, row: u32) -> (u64, u64) {
        let Output { to, numbers: [expert, first], .. } = tile.output;
        let (source, row, k) = unpacked(self.listed(expert, first + row));
        let place = Back::new(self.arena, self.received).place(source, row, k);
        (self.received.row(source, row).addr() as u64, place + to)
    }
}
