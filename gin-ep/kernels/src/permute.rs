// SPDX-License-Identifier: MIT OR Apache-2.0
//! Received rows in other layouts: flat, and expert-major. Three kernels in a row.
//!
//! The first counts the rows of each expert, the second gives each row its places, the third copies, also while rows
//! arrive whose metadata has arrived. A place is the number of earlier rows, by source, token and position of the id,
//! so it is the same in every grid.

use crate::dispatch::{Arena, is_silent};
use crate::expert_major::assign as expert_major;
pub use crate::expert_major::count;
use crate::format::{load_unit, store_unit};
use crate::params::{DISPATCH, load};
use crate::protocol::{Launch, wait_for};
use crate::received::Source;
use crate::status::{self, Code};
use crate::{ReceivedRows, UNIT};
use gin_device::prelude::*;
use gin_device::sys::Global;
use gin_device::sys::data::store_weak_u32;

/// [`LayoutMemory::kind`]: one row for each received one, without gaps.
pub const FLAT: u32 = 0;
/// [`LayoutMemory::kind`]: `[expert][source][token]`, one row for each id. A zone of an expert and a source has room
/// for as many rows as a rank may have tokens.
pub const EXPERT_MAJOR_PADDED: u32 = 1;
/// [`LayoutMemory::kind`]: zones of experts, one row for each id. Their lengths are multiples of
/// [`LayoutMemory::align`]; zeros fill them up.
pub const EXPERT_MAJOR_PACKED: u32 = 2;

/// The place of no row.
pub(crate) const NONE: u32 = u32::MAX;

/// More tokens than a rank has.
const LOST: u32 = u32::MAX;

shared! { static TOTALS: [u32; 16]; }

/// The memory of a layout of received rows.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LayoutMemory {
    /// The address of the rows: a multiple of 16; 0 if the layout has indices alone.
    pub rows: u64,
    /// The address of a word for each row: its source, received row and position of the id.
    pub source_info: u64,
    /// The address of a word for each received row, and each id if the layout is expert-major: its place.
    pub row_map: u64,
    /// The address of words: the number of rows with gaps; for each expert the number of its rows, from each source if
    /// the layout is padded; and, if it is packed, for each expert its first row.
    pub counts: u64,
    /// The maximum number of rows.
    pub capacity: u32,
    /// Number of rows of which the length of a zone is a multiple.
    pub align: u32,
    /// [`FLAT`], [`EXPERT_MAJOR_PADDED`] or [`EXPERT_MAJOR_PACKED`].
    pub kind: u32,
    /// Number of experts of this rank that the layout has.
    pub experts: u32,
}

/// Received rows in another layout: a parameter of kernels. As for [`ReceivedRows`], only the host makes it:
///
/// ```compile_fail,E0277
/// let permuted: gin_ep_kernels::PermutedRows = gin_device::bytemuck::Zeroable::zeroed();
/// ```
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PermutedRows {
    pub(crate) received: ReceivedRows,
    pub(crate) rows: u64,
    pub(crate) source_info: u64,
    pub(crate) row_map: u64,
    pub(crate) counts: u64,
    pub(crate) capacity: u32,
    pub(crate) align: u32,
    pub(crate) kind: u32,
    pub(crate) experts: u32,
}

impl PermutedRows {
    /// Makes it of received rows and the memory of their layout.
    ///
    /// # Safety
    /// - The memory is that of permuted rows of the group whose rows these are.
    #[must_use]
    pub const unsafe fn new(received: ReceivedRows, layout: LayoutMemory) -> Self {
        let LayoutMemory { rows, source_info, row_map, counts, capacity, align, kind, experts } = layout;
        Self { received, rows, source_info, row_map, counts, capacity, align, kind, experts }
    }

    /// Returns the received rows.
    #[inline(always)]
    #[must_use]
    pub const fn received(&self) -> &ReceivedRows {
        &self.received
    }

    /// Returns the maximum number of rows.
    #[inline(always)]
    #[must_use]
    pub const fn capacity(&self) -> u32 {
        self.capacity
    }

    /// Returns [`FLAT`], [`EXPERT_MAJOR_PADDED`] or [`EXPERT_MAJOR_PACKED`].
    #[inline(always)]
    #[must_use]
    pub const fn kind(&self) -> u32 {
        self.kind
    }

    #[inline(always)]
    pub(crate) fn word(&self, index: u32) -> u64 {
        self.counts + 4 * u64::from(index)
    }

    /// Returns the number of rows with gaps, also if there are more than [`capacity`](Self::capacity).
    #[inline(always)]
    #[must_use]
    pub fn total(&self) -> u32 {
        // Safety: the words of a layout, here and below.
        unsafe { load(self.word(0)) }
    }

    /// Returns the number of rows of an expert of this rank, in a packed layout; 0 if there is no such expert.
    #[inline(always)]
    #[must_use]
    pub fn count(&self, expert: u32) -> u32 {
        if self.kind != EXPERT_MAJOR_PACKED || expert >= self.experts {
            0
        } else {
            unsafe { load(self.word(1 + expert)) }
        }
    }

    /// Returns the number of rows of an expert from a source, in a padded layout; 0 if there is no such expert.
    #[inline(always)]
    #[must_use]
    pub fn count_from(&self, expert: u32, source: u32) -> u32 {
        let ranks = self.received.ranks();
        if self.kind != EXPERT_MAJOR_PADDED || expert >= self.experts || source >= ranks {
            return 0;
        }
        unsafe { load(self.word(1 + expert * ranks + source)) }
    }

    /// Returns the first row of an expert, in a packed layout. The expert after the last one has the total.
    #[inline(always)]
    #[must_use]
    pub fn offset(&self, expert: u32) -> u32 {
        if self.kind != EXPERT_MAJOR_PACKED || expert >= self.experts {
            return self.total();
        }
        unsafe { load(self.word(1 + self.experts + expert)) }
    }

    /// Returns whether the layout has rows. With indices alone nothing is copied.
    #[inline(always)]
    #[must_use]
    pub const fn has_rows(&self) -> bool {
        self.rows != 0
    }

    /// Returns the address of a row: aligned to 16 bytes.
    #[inline(always)]
    #[must_use]
    pub fn row(&self, row: u32) -> *mut u8 {
        let sizes = &self.received.slot().sizes;
        let bytes = if self.is_in_place() { sizes.pitch } else { sizes.row_bytes };
        (self.rows + u64::from(row) * u64::from(bytes)) as usize as *mut u8
    }

    /// Returns whether the rows are the received ones, which lie in this layout.
    #[inline(always)]
    const fn is_in_place(&self) -> bool {
        self.kind == FLAT && self.received.slot().sizes.is_shared()
    }

    /// Returns source, received row and position of the id of a row; `None` if it is a gap. In a padded layout only
    /// rows below [`count_from`](Self::count_from) have them.
    #[inline(always)]
    #[must_use]
    pub fn source_info(&self, row: u32) -> Option<(u32, u32, u32)> {
        if row >= self.capacity {
            return None;
        }
        let word = unsafe { load(self.source_info + 4 * u64::from(row)) };
        if word == NONE { None } else { Some((word >> 21, word >> 5 & 0xffff, word & 31)) }
    }

    /// Returns the number of places of a received row.
    #[inline(always)]
    fn each(&self) -> u32 {
        if self.kind == FLAT { 1 } else { self.received.topk() }
    }

    #[inline(always)]
    pub(crate) fn store(&self, address: u64, value: u32) {
        // Safety: the promise of the kernels' caller: a word of the layout.
        unsafe { store_weak_u32(address as usize as *mut u32, value) };
    }

    /// Gives a received row, or one of its ids, a place. `index` is the number of the source's first row among all.
    #[inline(always)]
    pub(crate) fn put(&self, index: u32, (source, row, k): (u32, u32, u32), place: u32) {
        self.store(self.row_map_of(index + row) + 4 * u64::from(k), place);
        if place < self.capacity {
            self.store(self.source_info + 4 * u64::from(place), source << 21 | row << 5 | k);
        }
    }

    /// Returns the address of the first place of a received row, of which `index` is the number among all.
    #[inline(always)]
    pub(crate) fn row_map_of(&self, index: u32) -> u64 {
        self.row_map + 4 * u64::from(index) * u64::from(self.each())
    }
}

/// Returns the exclusive prefix sum of the threads' values, and the sum of all. All threads of the group call. It has
/// whole warps, and no other group of the block calls.
#[inline(always)]
pub(crate) fn prefix_sum(group: impl Coop, value: u32) -> (u32, u32) {
    let (lane, warp, totals) = (gin_device::coop::lane(), group.rank() / WARP_SIZE, TOTALS.array());
    let mut sum = value;
    let mut by = 1;
    while by < WARP_SIZE {
        let below = Warp.shuffle_up(sum, by);
        sum += if lane >= by { below } else { 0 };
        by *= 2;
    }
    // The threads have read the totals before.
    group.sync();
    if lane == WARP_SIZE - 1 {
        totals.write(warp as usize, sum);
    }
    group.sync();
    let (mut earlier, mut all) = (0, 0);
    for other in 0..group.size() / WARP_SIZE {
        let total = totals.read(other as usize);
        earlier += if other < warp { total } else { 0 };
        all += total;
    }
    (earlier + sum - value, all)
}

/// Gives rows their places, and reports if there are too few. As [`count`], after it.
///
/// # Safety
/// - As [`count`].
#[inline(always)]
pub unsafe fn assign(to: &PermutedRows) {
    let sizes = to.received.slot().sizes;
    if to.kind == FLAT {
        let buffer = to.received.buffer();
        let (mut end, step) = (0, grid_dim().count() as u32 * Block.size());
        let thread = block_in_grid() * Block.size() + Block.rank();
        for source in 0..sizes.ranks {
            let Source { count, index, .. } = to.received.source(buffer, source);
            let first = if to.is_in_place() && count > 0 { index } else { end };
            // Places that are kept for a silent rank have no rows.
            let mut gap = end + thread;
            while gap < first.min(to.capacity) {
                to.store(to.source_info + 4 * u64::from(gap), NONE);
                gap += step;
            }
            let mut row = thread;
            while row < count {
                to.put(index, (source, row, 0), first + row);
                row += step;
            }
            end = first + count;
        }
        return total(to, end);
    }
    // Safety: the caller's promise.
    unsafe { expert_major(to) };
    if to.kind == EXPERT_MAJOR_PADDED {
        total(to, to.experts * sizes.ranks * sizes.tokens);
    }
}

/// Stores the number of rows, by the first block.
#[inline(always)]
fn total(to: &PermutedRows, rows: u32) {
    if block_in_grid() == 0 {
        total_of(to, rows);
    }
}

/// Stores the number of rows, by the calling block.
#[inline(always)]
pub(crate) fn total_of(to: &PermutedRows, rows: u32) {
    if Block.elect() {
        to.store(to.word(0), rows);
        if rows > to.capacity {
            let (received, limit) = (&to.received, to.capacity.into());
            status::report(received.arena(), received.slot(), Code::TooManyRows, 0, 0, rows.into(), limit);
        }
    }
}

/// Copies rows to their places. As [`count`], after [`assign`].
///
/// # Safety
/// - As [`count`].
#[inline(always)]
pub unsafe fn copy(to: &PermutedRows) {
    let step = Block.size() / WARP_SIZE * grid_dim().count() as u32;
    let mut unit = (Block.rank() / WARP_SIZE * grid_dim().count() as u32 + block_in_grid()).wrapping_sub(step);
    let next = || {
        unit = unit.wrapping_add(step);
        unit
    };
    // Safety: the caller's promise.
    unsafe { copy_when(to, next, |_, _| true) };
}

/// Copies rows to their places as they arrive, section by section. Rows of a rank whose sections do not come are zeros,
/// and the rank is reported to the slot's status as by a [`dispatch`](crate::dispatch()).
///
/// # Safety
/// - As [`count`]. The kernel before on the stream was [`send_rows`](crate::send_rows); this one may depend on it. The
///   host made communicator, arena and layout for each other.
#[inline(always)]
pub unsafe fn copy_arriving(comm: &Comm, arena: &Window<u64>, to: &PermutedRows) {
    if let Some(arena) = Arena::new(comm, arena) {
        let (slot, epoch, mine) = (to.received.slot(), to.received.epoch(), gin_device::coop::lane());
        // For the sources of this lane's number and 32 further the number of tokens that have come; `LOST` if their
        // rank is silent.
        let mut covered = (0, 0);
        let is_there = |source: u32, token: u32| {
            let known = Warp.shuffle(if source < WARP_SIZE { covered.0 } else { covered.1 }, source % WARP_SIZE);
            if token < known {
                return known != LOST;
            }
            let mut seen = 0;
            if mine == source % WARP_SIZE {
                let flag = arena.word(slot.section_flag(source));
                let waited = wait_for::<Global>(&status::of(comm), slot.patience(), flag, epoch, token + 1);
                seen = match waited {
                    Ok(tokens) => tokens.max(token + 1),
                    Err(error) => {
                        is_silent(&arena, slot, source, epoch, error);
                        LOST
                    }
                };
                covered = if source < WARP_SIZE { (seen, covered.1) } else { (covered.0, seen) };
            }
            // The other lanes read what this one has acquired: the flag covers all rows of the source up to its number,
            // and the lanes meet after the acquire. The vote would order no memory.
            Warp.sync();
            Warp.all(seen != LOST)
        };
        // Warps take some units at a time, because blocks on the SMs of senders may start late. Copying blocks wait,
        // and hold up no sender: they start when all sending blocks of their rank have started, and those never wait.
        let launch = Launch::<Global>::new(arena.word(slot.word(DISPATCH + 3 * to.received.buffer())));
        let warps = grid_dim().count() as u32 * (Block.size() / WARP_SIZE);
        let mine = (slot.sizes.tokens * slot.sizes.ranks / warps).clamp(1, 8);
        let mut unit = mine - 1;
        let next = || {
            unit += 1;
            if unit.is_multiple_of(mine) {
                unit = mine * Warp.broadcast(if Warp.elect() { launch.take() } else { 0 }, 0) as u32;
            }
            unit
        };
        // Safety: the caller's promise.
        unsafe { copy_when(to, next, is_there) };
    }
    gin_device::sys::wait_for_predecessor();
}

/// Copies rows to their places. Sources take turns. `next` returns the warp's next unit. `is_there` waits for a row of
/// a source, whose token it gets; without the row its places get zeros. All lanes of a warp call them.
///
/// # Safety
/// - As [`count`].
#[inline(always)]
unsafe fn copy_when(to: &PermutedRows, mut next: impl FnMut() -> u32, mut is_there: impl FnMut(u32, u32) -> bool) {
    let (received, sizes) = (&to.received, to.received.slot().sizes);
    let is_copied = to.rows != 0 && !to.is_in_place();
    let (pairs, each) = if is_copied { (sizes.row_bytes / 16, to.each()) } else { (0, 0) };
    let units = pairs.div_ceil(UNIT).max(1);
    let (buffer, slot) = (received.buffer(), received.slot());
    let max = (0..sizes.ranks).map(|source| received.source(buffer, source).count).max().unwrap_or(0);
    loop {
        let unit = next();
        if unit >= max * sizes.ranks * units {
            break;
        }
        let (at, pair) = (unit / units, unit % units * UNIT + gin_device::coop::lane());
        let (row, number) = (at / sizes.ranks, at % sizes.ranks);
        let source = received.source(buffer, number);
        if row >= source.count {
            continue;
        }
        let (meta, places) = (source.meta(slot, row), to.row_map_of(source.index + row));
        // Safety: a received row, its metadata, and rows of the layout.
        unsafe {
            let data = if is_there(number, load(meta)) {
                load_unit(source.row(slot, row), pair, pairs)
            } else {
                ((0, 0), (0, 0), (0, 0), (0, 0))
            };
            for k in 0..each {
                if to.kind != FLAT && (load(meta + 4 + 4 * u64::from(k)) as i32) < 0 {
                    continue;
                }
                let place = load(places + 4 * u64::from(k));
                if place < to.capacity {
                    store_unit(to.row(place).addr() as u64, pair, pairs, &data);
                }
            }
        }
    }
}
