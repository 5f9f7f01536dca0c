// SPDX-License-Identifier: MIT OR Apache-2.0
//! Tiles of a product of matrices of BF16, or of E4M3 with scales, by warpgroups, with `wgmma`, on Hopper GPUs.
//!
//! A block multiplies tile after tile. Its warps have different work:
//!
//! | warps | work |
//! | --- | --- |
//! | 0 | takes tiles, and starts the copies of their factors |
//! | 1 to 3 | send or count for the kernel; or warp 1 prepares the places of rows |
//! | 4 to 7, 8 to 11 | two warpgroups; each multiplies 64 rows of a tile and stores them |
//!
//! ```text
//!   global memory --copies of boxes--> stage of shared memory --wgmma--> sums in registers
//!                                      128 + 256 rows of 128 bytes       64 x 256 for a warpgroup
//! ```
//!
//! Four stages are a ring: a stage is full when its copies are complete, and empty when eight warps have read it. The
//! entries of two tiles are another ring, so that the copies of a tile run while the tile before is stored.

/// Repeats a block with a constant, so that arrays that it indexes stay in registers.
macro_rules! each {
    ($name:ident in [$($value:literal)*] $body:block) => { $({ const $name: usize = $value; $body })* };
}

mod factor;
mod gathered;

use factor::divide_registers;
pub(crate) use factor::{Factor, Kept, Scaled};
pub(crate) use gathered::{GatheredTile, Gathers, multiply_gathered};

use super::tile::{COLUMNS, ROWS, steps};
use gin_device::internal::stay;
use gin_device::prelude::*;
use gin_device::shared::dynamic_array;
use gin_device::sys::bulk::Mbarrier;
use gin_device::sys::data::store_weak_pair;
use gin_device::sys::shared::{Address, load_weak_pair, store_weak_u32};
use gin_device::sys::tensor::{BOX_ELEMENTS, MAP_BYTES, Matrices, ROW_BYTES, TensorMap, copy_box_to_shared};
use gin_device::sys::warpgroup::{self, Sums};

/// Threads of a block.
pub const THREADS: u32 = WARP_SIZE * (OTHERS + MULTIPLIERS);
/// Bytes of dynamic shared memory of a block.
pub const SHARED_BYTES: u32 = ALIGN + STAGES * STAGE_BYTES + MULTIPLIERS * STORED_BYTES;
/// Bytes of global memory for the maps of a block. Their address is a multiple of 128.
pub const MAPS_BYTES: u32 = MAPS * MAP_BYTES;

/// Maps of a block.
const MAPS: u32 = 3;
/// Warps that do not multiply.
const OTHERS: u32 = 4;
/// Warps that multiply.
const MULTIPLIERS: u32 = 8;
const STAGES: u32 = 4;
const STAGE_BYTES: u32 = (ROWS + COLUMNS) * ROW_BYTES;
/// The alignment of a stage.
const ALIGN: u32 = 1024;
/// Bytes of shared memory in which a warp turns its sums into rows: 16 rows of 64 elements.
const STORED_BYTES: u32 = 16 * ROW_BYTES;

/// Number of tiles in their ring.
const TILES: u32 = 2;
/// Words of a tile's entry: whether there is one, and its [`Output`].
const ENTRY: u32 = 7;

// The mbarriers: of stages, and of tiles.
const FULL: u32 = 0;
const EMPTY: u32 = FULL + STAGES;
const ANNOUNCED: u32 = EMPTY + STAGES;
const STORED: u32 = ANNOUNCED + TILES;
const FREE: u32 = STORED + TILES;
const PREPARED: u32 = FREE + TILES;
const PHASES_NUMBER: usize = (PREPARED + TILES) as usize;

shared! {
    static PHASES: [u64; PHASES_NUMBER];
}

shared! {
    /// The entries of tiles.
    static ENTRIES: [u32; (TILES * ENTRY) as usize];
}

shared! {
    /// The places of the rows of tiles.
    static PLACES: [u64; (TILES * ROWS) as usize];
}

/// A tile of a product.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Tile {
    /// The tile's box of the left factor: its map, first row and matrix.
    pub(crate) a: (TensorMap, u32, u32),
    /// The same of the right factor.
    pub(crate) b: (TensorMap, u32, u32),
    /// The tile's part of the result.
    pub(crate) output: Output,
}

/// A tile's part of the result, for the warps that store it.
#[derive(Clone, Copy, Default, Debug)]
pub(crate) struct Output {
    /// The address of its first element, or what [`Work::place`] makes of it.
    pub(crate) to: u64,
    /// Number of rows, from the first one on; a tile has at most [`ROWS`].
    pub(crate) rows: u32,
    /// Number of columns, from the first one on; a tile has at most [`COLUMNS`].
    pub(crate) columns: u32,
    /// Numbers for the kernel's own warps and [`Work::place`].
    pub(crate) numbers: [u32; 2],
}

/// A place in the rings: the number of stages, or of tiles, before it. One number takes fewer registers than place and
/// parity.
#[derive(Clone, Copy, Debug)]
struct Place(u32);

impl Place {
    /// Returns the place in a ring of `of` places, a power of 2.
    #[inline(always)]
    const fn index(self, of: u32) -> u32 {
        self.0 % of
    }

    /// Returns the parity of the phase in which the place is filled.
    #[inline(always)]
    const fn parity(self, of: u32) -> u32 {
        (self.0 / of) & 1
    }

    #[inline(always)]
    fn advance(&mut self) {
        self.0 = self.0.wrapping_add(1);
    }

    /// Returns the place this many places before.
    #[inline(always)]
    const fn before(self, places: u32) -> Self {
        Self(self.0.wrapping_sub(places))
    }
}

#[inline(always)]
fn phase(which: u32) -> Mbarrier {
    Mbarrier::at(&PHASES.array(), which as usize)
}

/// Returns matrices of `rows` rows of `columns` pairs of bytes each, which follow each other without gaps.
#[inline(always)]
#[must_use]
pub(crate) const fn rows_of(address: u64, columns: u32, rows: u32, number: u32, box_rows: u32) -> Matrices {
    let row_bytes = 2 * columns as u64;
    Matrices { address, columns, rows, number, row_bytes, matrix_bytes: rows as u64 * row_bytes, box_rows }
}

/// The dynamic shared memory of the block: stages, and for each warp that multiplies memory for its sums.
#[derive(Clone, Copy)]
struct Stages(Address);

impl Stages {
    #[inline(always)]
    fn of_block() -> Self {
        Self(dynamic_array::<u64>(0, SHARED_BYTES as usize / 8).address().next_multiple_of(ALIGN))
    }

    #[inline(always)]
    fn at(self, place: Place) -> Address {
        self.0.at(place.index(STAGES) * STAGE_BYTES)
    }

    /// Returns the address of the memory for a warp's sums.
    #[inline(always)]
    fn sums(self, warp: u32) -> Address {
        self.0.at(STAGES * STAGE_BYTES + warp * STORED_BYTES)
    }
}

/// Returns the number of the first word of a tile's entry.
#[inline(always)]
fn entry_at(place: Place) -> usize {
    (place.index(TILES) * ENTRY) as usize
}

/// The warps that find the places of a tile's rows in the result.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Finder {
    /// The warps that store them.
    Stores,
    /// Warp 1, earlier, because places are loaded from global memory.
    Warp1,
    /// The warps that load the tile.
    Loads,
}

/// The results of a kernel's tiles.
pub(crate) trait Outputs {
    /// The elements of the factors.
    type Factor: Factor;
    /// A warp of the kernel's own frees the entry of a tile, after the tile was [stored](Entries::await_stored).
    const FREES: bool;
    /// The warps that call [`place`](Self::place).
    const FINDER: Finder;
    /// A warp of the kernel's own [prepares](Entries::prepare) each tile. No warp stores a tile before.
    const PREPARES: bool = Self::FINDER as u8 == Finder::Warp1 as u8;
    /// Registers of the threads whose warps do not multiply.
    const KEPT: Kept = <Self::Factor as Factor>::KEPT;

    /// Returns the address of the first column of the tile in a row of it, or 0 if the row goes nowhere.
    fn place(&self, output: &Output, row: u32) -> u64;

    /// Returns what is stored in four rows of the tile instead of eight BF16 of the product: by default the product.
    /// `to` has their places, or 0 for rows that go nowhere. The warps that store call.
    ///
    /// # Safety
    /// - The places are valid. If the kernel [prepares](Self::PREPARES) tiles, this one is prepared.
    #[inline(always)]
    unsafe fn add(&self, _: &Output, _: [u64; 4], products: [(u64, u64); 4]) -> [(u64, u64); 4] {
        products
    }

    /// Returns the address of the scales of a row of the tile, if the factors have scales.
    #[inline(always)]
    fn row_scales(&self, _: &Output, _: u32) -> u64 {
        0
    }

    /// Returns the address of the scales of 128 columns of the tile, if the factors have scales: the first or second
    /// ones.
    #[inline(always)]
    fn column_scales(&self, _: &Output, _: u32) -> u64 {
        0
    }
}

/// The work of a kernel on its tiles.
pub(crate) trait Work: Outputs {
    /// The state of the loading warp.
    type Loading;

    /// Begins to load. `make` makes the maps of the factors, at most three: of matrices with boxes of [`ROWS`] and
    /// [`COLUMNS`] rows. The loading warp calls.
    fn begin(&self, make: impl FnMut(Matrices) -> TensorMap) -> Self::Loading;

    /// Takes the next tile, if there is one. The loading warp calls.
    fn next(&self, loading: &mut Self::Loading) -> Option<Tile>;

    /// Does other work, in warps 1 to 3, each alone.
    fn aside(&self, warp: u32);
}

/// Multiplies the tiles of `work`, over `depth` [pairs](Factor::pairs) of bytes of inner elements. All threads of the
/// block, [`THREADS`] of them, call, once in a launch. They have met when it returns.
///
/// # Safety
/// - `maps` is the address of [`MAPS_BYTES`] for each block of the grid, a multiple of 128. The matrices are as
///   [`TensorMap::make`] requires. No thread writes the factors of a tile after it was taken; the loading warp has
///   acquired other blocks' writes, and fenced them for the async proxy.
/// - The addresses of places are valid for the columns that there are, a multiple of 8; they are multiples of 16.
/// - The block has [`SHARED_BYTES`] of dynamic shared memory, for nothing else.
#[inline(always)]
pub(crate) unsafe fn multiply<W: Work>(depth: u32, maps: u64, work: &W) {
    begin::<W>(1);
    let stages = Stages::of_block();
    let warp = Block.rank() / WARP_SIZE;
    // Safety: the caller's promise.
    unsafe {
        if warp >= OTHERS {
            divide_registers::<W>(true);
            multiply_tiles(depth, stages, work, warp - OTHERS);
        } else {
            divide_registers::<W>(false);
            if warp == 0 {
                load_tiles(steps(depth), stages, maps, work);
            } else if W::FINDER != Finder::Warp1 {
                work.aside(warp);
            } else if warp == 1 {
                prepare_places(work);
            }
        }
    }
    Block.sync();
}

/// Makes the mbarriers; a stage is full after `arrivals` arrivals. All threads call.
#[inline(always)]
fn begin<W: Outputs>(arrivals: u32) {
    if Block.elect() {
        let init = |first: u32, number: u32, arrivals: u32| {
            for index in 0..number {
                // Safety: no thread uses them yet, or a product before this one has ended.
                unsafe { phase(first + index).init(arrivals) };
            }
        };
        init(FULL, STAGES, arrivals);
        init(EMPTY, STAGES, MULTIPLIERS);
        init(ANNOUNCED, TILES, 1);
        init(STORED, TILES, MULTIPLIERS);
        init(FREE, TILES, if W::FREES { 1 } else { MULTIPLIERS });
        init(PREPARED, TILES, 1);
    }
    Block.sync();
}

/// Writes the entry of a tile, or of none, by one thread, and announces it.
#[inline(always)]
fn announce(entry: Place, output: Option<Output>) {
    let write = |index, value| ENTRIES.array().write(entry_at(entry) + index, value);
    write(0, output.is_some().into());
    if let Some(Output { to, rows, columns, numbers: [first, second] }) = output {
        write(1, to as u32);
        write(2, (to >> 32) as u32);
        write(3, rows);
        write(4, columns);
        write(5, first);
        write(6, second);
    }
    // Safety: one arrival for each tile.
    unsafe { phase(ANNOUNCED + entry.index(TILES)).arrive() };
}

/// Starts the copies of all tiles. The loading warp calls.
///
/// # Safety
/// - As [`multiply`].
#[inline(always)]
unsafe fn load_tiles<W: Work>(steps: u32, stages: Stages, maps: u64, work: &W) {
    let mut map = maps + u64::from(block_in_grid() * MAPS_BYTES);
    let mut loading = work.begin(|matrices| {
        let to = map;
        map += u64::from(MAP_BYTES);
        // No warp stores sums before this one has announced a tile.
        // Safety: the caller's promise.
        unsafe { TensorMap::make(to, stages.sums(0), &matrices) }
    });
    let (mut stage, mut entry) = (Place(0), Place(0));
    loop {
        let tile = work.next(&mut loading);
        if lane() == 0 {
            phase(FREE + entry.index(TILES)).wait(entry.parity(TILES) ^ 1);
            announce(entry, tile.map(|tile| tile.output));
        }
        entry.advance();
        let Some(Tile { a, b, .. }) = tile else { return };
        if lane() == 0 {
            for step in 0..steps {
                let (full, to) = (phase(FULL + stage.index(STAGES)), stages.at(stage));
                phase(EMPTY + stage.index(STAGES)).wait(stage.parity(STAGES) ^ 1);
                // Safety: the caller's promise; all warps have read the stage.
                unsafe {
                    full.arrive_expect_tx((ROWS + W::Factor::COLUMNS) * ROW_BYTES);
                    copy_box_to_shared(to, a.0, (step * BOX_ELEMENTS, a.1, a.2), full);
                    copy_box_to_shared(to.at(ROWS * ROW_BYTES), b.0, (step * BOX_ELEMENTS, b.1, b.2), full);
                }
                stage.advance();
            }
        }
    }
}

/// Stores the places of the rows of all tiles in shared memory. Warp 1 calls.
#[inline(always)]
fn prepare_places(work: &impl Outputs) {
    let mut entries = Entries::new();
    while let Some(output) = entries.await_announced() {
        let first = entries.0.index(TILES) * ROWS;
        for row in (lane()..ROWS).step_by(WARP_SIZE as usize) {
            let place = if row < output.rows { work.place(&output, row) } else { 0 };
            PLACES.array().write((first + row) as usize, place);
        }
        Warp.sync();
        if lane() == 0 {
            entries.prepare();
        }
        entries.advance();
    }
}

/// The tiles as warps that do not load them see them.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Entries(Place);

impl Entries {
    /// Begins at the first tile.
    #[inline(always)]
    #[must_use]
    pub(crate) const fn new() -> Self {
        Self(Place(0))
    }

    /// Returns the tile's part of the result, if there is a tile.
    #[inline(always)]
    fn output(&self) -> Option<Output> {
        // The addresses of the words would take registers until the next call, too.
        let first = stay(self.0.index(TILES) * ENTRY) as usize;
        let read = |index: usize| ENTRIES.array().read(first + index);
        // All are read in any case: those of the tile before would take registers otherwise.
        let output = Output {
            to: u64::from(read(2)) << 32 | u64::from(read(1)),
            rows: read(3),
            columns: read(4),
            numbers: [read(5), read(6)],
        };
        (read(0) != 0).then_some(output)
    }

    /// Waits until a tile is announced. Returns its part of the result, or `None` after the last one.
    #[inline(always)]
    pub(crate) fn await_announced(&self) -> Option<Output> {
        phase(ANNOUNCED + self.0.index(TILES)).wait(self.0.parity(TILES));
        self.output()
    }

    /// Waits until a tile is announced and stored. Returns its part of the result, or `None` after the last one.
    ///
    /// Ordering: acquire, at block scope: the thread sees the stores of all warps.
    #[inline(always)]
    pub(crate) fn await_stored(&self) -> Option<Output> {
        phase(STORED + self.0.index(TILES)).wait(self.0.parity(TILES));
        self.output()
    }

    /// Lets the warps that multiply store the tile, by one thread.
    ///
    /// Ordering: release, at block scope.
    #[inline(always)]
    pub(crate) fn prepare(&self) {
        // Safety: one arrival for each tile.
        unsafe { phase(PREPARED + self.0.index(TILES)).arrive() };
    }

    /// Frees the tile's entry, by one thread, and goes on to the next tile.
    #[inline(always)]
    pub(crate) fn free(&mut self) {
        // Safety: one arrival of each that frees a tile.
        unsafe { phase(FREE + self.0.index(TILES)).arrive() };
        self.advance();
    }

    /// Goes on to the next tile.
    #[inline(always)]
    pub(crate) fn advance(&mut self) {
        self.0.advance();
    }
}

/// Multiplies all tiles and stores them. The two warpgroups call, with the number of the warp among them.
///
/// # Safety
/// - As [`multiply`].
#[inline(always)]
unsafe fn multiply_tiles<W: Outputs>(depth: u32, stages: Stages, work: &W, warp: u32) {
    let (mut stage, mut entries) = (Place(0), Entries::new());
    while let Some(output) = entries.await_announced() {
        // Sums that were stored take no registers. `[0.0; 128]` would be a loop over memory, which no register can
        // hold.
        let (mut sums, mut partial): (Sums, <W::Factor as Factor>::Partial) = Zeroable::zeroed();
        let has_rows = output.rows > warp / 4 * warpgroup::ROWS;
        let mut scales = W::Factor::begin(work, || entries.output().unwrap_or_default(), stay(warp));
        // The number of steps is computed for each tile, because registers are scarce.
        for step in 0..steps(stay(depth)) {
            // Safety: the caller's promise.
            let scale = unsafe { W::Factor::scale(&mut scales) };
            phase(FULL + stage.index(STAGES)).wait(stage.parity(STAGES));
            let from = stages.at(stage);
            if has_rows {
                let left = stay(warp) / 4 * warpgroup::ROWS * ROW_BYTES;
                let factors = (from.at(left), from.at(ROWS * ROW_BYTES));
                // Safety: the stage is full.
                unsafe { W::Factor::multiply_add((&mut sums, &mut partial), factors, step > 0, &scale) };
            }
            // All lanes have seen the stage full: its phases may go on.
            Warp.sync();
            if lane() == 0 {
                // Safety: one arrival of each warp.
                unsafe { phase(EMPTY + stage.index(STAGES)).arrive() };
            }
            stage.advance();
        }
        if has_rows {
            // It is read once more, for the same reason.
            let output = entries.output().unwrap_or_default();
            let warp = stay(warp);
            let first = entries.0.index(TILES) * ROWS + warp * 16;
            if W::PREPARES {
                phase(PREPARED + entries.0.index(TILES)).wait(entries.0.parity(TILES));
            }
            if W::FINDER == Finder::Stores && lane() < 16 {
                let row = warp * 16 + lane();
                let place = if row < output.rows { work.place(&output, row) } else { 0 };
                PLACES.array().write((first + lane()) as usize, place);
            }
            // Safety: the warp's own memory; the caller's promise.
            unsafe { store(work, &output, &sums, stages.sums(warp), first) };
        }
        // The lanes have met after their last stores, or after the last step.
        if lane() == 0 {
            // Safety: one arrival of each warp.
            unsafe { phase(STORED + entries.0.index(TILES)).arrive() };
            if !W::FREES {
                // Safety: as above.
                unsafe { phase(FREE + entries.0.index(TILES)).arrive() };
            }
        }
        entries.advance();
    }
    if lane() == 0 {
        // A warp that waits for stored tiles sees that there is none.
        // Safety: one arrival of each warp.
        unsafe { phase(STORED + entries.0.index(TILES)).arrive() };
    }
}

/// Stores the sums of a warp, as 16 rows of BF16. `first` is the number of the first one's place.
///
/// # Safety
/// - The warp has [`STORED_BYTES`] of shared memory at `own`. Places are valid, as [`multiply`] requires.
#[inline(always)]
unsafe fn store<W: Outputs>(work: &W, output: &Output, sums: &Sums, own: Address, first: u32) {
    // Addresses of the rows are not computed before the loop over tiles.
    let lane = stay(lane());
    let (row, pair, chunk) = (lane / 4, lane % 4, lane % 8);
    each!(PART in [0 1 2 3] {
        if 64 * PART as u32 >= W::Factor::COLUMNS {
            return;
        }
        each!(J in [0 1 2 3 4 5 6 7] {
            const AT: usize = 4 * (8 * PART + J);
            let to = own.at(row * ROW_BYTES + ((J as u32 ^ row) << 4) + 4 * pair);
            // Safety: the warp's own memory.
            unsafe {
                store_weak_u32(to, Bf16::pack([sums[AT], sums[AT + 1]]));
                store_weak_u32(to.at(8 * ROW_BYTES), Bf16::pack([sums[AT + 2], sums[AT + 3]]));
            }
        });
        Warp.sync();
        let column = 64 * PART as u32 + 8 * chunk;
        let row = |index: u32| 4 * index + lane / 8;
        let place = |index: u32| {
            let place = PLACES.array().read((first + row(index)) as usize);
            if place != 0 && column < output.columns { place + 2 * u64::from(column) } else { 0 }
        };
        // Safety: the warp's own memory.
        let load = |index: u32| unsafe {
            load_weak_pair(own.at(row(index) * ROW_BYTES + ((chunk ^ (row(index) % 8)) << 4)))
        };
        let to = [place(0), place(1), place(2), place(3)];
        // Safety: rows and columns that are there.
        let stored = unsafe { work.add(output, to, [load(0), load(1), load(2), load(3)]) };
        each!(I in [0 1 2 3] {
            if to[I] != 0 {
                // Safety: as above.
                unsafe { store_weak_pair(to[I] as usize as *mut u64, stored[I].0, stored[I].1) };
            }
        });
        Warp.sync();
    });
}
