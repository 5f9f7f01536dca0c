// SPDX-License-Identifier: MIT OR Apache-2.0
//! Experts of tests of expert parallelism.

use gin_device::prelude::*;
use gin_device::sys::{Global, Memory};
use gin_ep_kernels::permute::{EXPERT_MAJOR_FIXED, EXPERT_MAJOR_PADDED, FLAT};
use gin_ep_kernels::{
    Bytes, Element, Format, PermutedRows, RECEIVE, ReceivedRows, SEND, SlotParams, Sums, TokenParams, combine,
    dispatch, send_metadata,
};

/// Replaces each received row by the weighted sum of what its experts on this rank make of it. Expert `e` of all makes
/// `x * (1 + (e % 5) / 8) + e % 29` of an element `x`.
///
/// All numbers are exact for elements of at most 8 bits and weights of at most 7, so it does not matter whether a
/// multiplication and an addition round once or twice.
///
/// # Safety
/// - It runs between the receive and the combine of a slot. `local` is the number of experts of a rank.
#[kernel]
pub unsafe fn hardware_experts(received: ReceivedRows, rank: u32, local: u32, hidden: u32) {
    // Safety: the caller's promise.
    unsafe { replace(&received, rank, local, hidden) };
}

/// Runs the experts.
///
/// # Safety
/// - As [`hardware_experts`].
#[inline(always)]
unsafe fn replace(received: &ReceivedRows, rank: u32, local: u32, hidden: u32) {
    for source in 0..received.ranks() {
        let mut row = block_in_grid();
        while row < received.count(source) {
            let elements = received.row(source, row).cast::<u16>();
            for column in Block.stripe(hidden as usize) {
                // Safety: an element of the row, which this thread has for itself.
                let element = unsafe { elements.add(column) };
                // Safety: as above.
                let value = Bf16::from_bits(unsafe { element.read() }).to_f32();
                let sum = sum_of(received, source, row, rank * local, value);
                // Safety: as above.
                unsafe { element.write(Bf16::from_f32(sum).to_bits()) };
            }
            row += grid_dim().count() as u32;
        }
    }
}

/// Returns the weighted sum of what the experts of a row make of an element. `first` is the first expert of this rank.
#[inline(always)]
fn sum_of(received: &ReceivedRows, source: u32, row: u32, first: u32, value: f32) -> f32 {
    let mut sum = 0.0f32;
    for k in 0..received.topk() {
        let expert = received.expert(source, row, k);
        if expert >= 0 {
            let expert = first + expert as u32;
            let made = value * (1.0 + (expert % 5) as f32 / 8.0) + (expert % 29) as f32;
            sum += received.weight(source, row, k) * Bf16::from_f32(made).to_f32();
        }
    }
    sum
}

/// Stores the sums of [`hardware_experts`] as FP32, in `rows`, in the places of the received rows. Each source has room
/// for `max` rows there; 0 if all sources share the room.
///
/// # Safety
/// - As [`hardware_experts`], and `rows` has the memory.
#[kernel]
pub unsafe fn hardware_experts_f32(
    received: ReceivedRows,
    rank: u32,
    local: u32,
    hidden: u32,
    rows: *mut f32,
    max: u32,
) {
    for source in 0..received.ranks() {
        let first = source * max + received.offset(source);
        let mut row = block_in_grid();
        while row < received.count(source) {
            let elements = received.row(source, row).cast::<u16>();
            let to = rows.wrapping_add((first + row) as usize * hidden as usize);
            for column in Block.stripe(hidden as usize) {
                // Safety: an element of the row, and its place.
                unsafe {
                    let value = Bf16::from_bits(elements.add(column).read()).to_f32();
                    to.add(column).write(sum_of(&received, source, row, rank * local, value));
                }
            }
            row += grid_dim().count() as u32;
        }
    }
}

/// Stores what each expert on this rank makes of a received row, for each id whose expert is here: in the place of the
/// row, of which `rows` has one for each id. `max` is the number of tokens that a rank has room for.
///
/// # Safety
/// - As [`hardware_experts`], and `rows` has the memory.
#[kernel]
pub unsafe fn hardware_experts_each(
    received: ReceivedRows,
    rank: u32,
    local: u32,
    hidden: u32,
    rows: *mut u16,
    max: u32,
) {
    for source in 0..received.ranks() {
        let mut row = block_in_grid();
        while row < received.count(source) {
            let elements = received.row(source, row).cast::<u16>();
            for k in 0..received.topk() {
                let expert = received.expert(source, row, k);
                if expert >= 0 {
                    let expert = rank * local + expert as u32;
                    let place = (u64::from(source) * u64::from(max) + u64::from(row)) * u64::from(received.topk());
                    let first = (place + u64::from(k)) as usize * hidden as usize;
                    for column in Block.stripe(hidden as usize) {
                        // Safety: an element of the row, and its place.
                        unsafe {
                            let value = Bf16::from_bits(elements.add(column).read()).to_f32();
                            let made = value * (1.0 + (expert % 5) as f32 / 8.0) + (expert % 29) as f32;
                            rows.add(first + column).write(Bf16::from_f32(made).to_bits());
                        }
                    }
                }
            }
            row += grid_dim().count() as u32;
        }
    }
}

/// Replaces each row of a layout by what its expert makes of it, or, if the layout is flat, by the weighted sum as
/// [`hardware_experts`] does. `max` is the number of tokens that a rank has room for.
///
/// # Safety
/// - As [`hardware_experts`], after the kernels of the layout.
#[kernel]
pub unsafe fn hardware_experts_permuted(to: PermutedRows, rank: u32, local: u32, hidden: u32, max: u32) {
    let received = to.received();
    let mut place = block_in_grid();
    while place < to.total().min(to.capacity()) {
        let mine = place;
        place += grid_dim().count() as u32;
        let zone = mine / max;
        let (expert, source) = (zone / received.ranks(), zone % received.ranks());
        if to.kind() == EXPERT_MAJOR_PADDED && mine % max >= to.count_from(expert, source) {
            continue;
        }
        let room = to.capacity() / local;
        if to.kind() == EXPERT_MAJOR_FIXED && mine % room >= to.count(mine / room) {
            continue;
        }
        if to.kind() == FLAT && to.zone() != 0 && mine % to.zone() >= received.count(mine / to.zone()) {
            continue;
        }
        let Some((source, row, only)) = to.source_info(mine) else { continue };
        let elements = to.row(mine).cast::<u16>();
        for column in Block.stripe(hidden as usize) {
            // Safety: an element of the row, which this thread has for itself.
            let element = unsafe { elements.add(column) };
            // Safety: as above.
            let value = Bf16::from_bits(unsafe { element.read() }).to_f32();
            let mut sum = 0.0f32;
            for k in 0..received.topk() {
                let expert = received.expert(source, row, k);
                if expert >= 0 && (to.kind() == FLAT || k == only) {
                    let expert = rank * local + expert as u32;
                    let made = value * (1.0 + (expert % 5) as f32 / 8.0) + (expert % 29) as f32;
                    let made = Bf16::from_f32(made).to_f32();
                    sum += if to.kind() == FLAT { received.weight(source, row, k) * made } else { made };
                }
            }
            // Safety: as above.
            unsafe { element.write(Bf16::from_f32(sum).to_bits()) };
        }
    }
}

/// Stores for each source the numbers of rows that arrived and that it had, and the number of the first one, by one
/// thread.
///
/// # Safety
/// - As [`hardware_experts`], and `to` has three words for each source.
#[kernel]
pub unsafe fn hardware_counts(received: ReceivedRows, to: *mut u32) {
    if block_in_grid() == 0 && Block.elect() {
        for source in 0..received.ranks() {
            let words = [received.count(source), received.offered(source), received.offset(source)];
            // Safety: the words of the source.
            unsafe { to.add(3 * source as usize).cast::<[u32; 3]>().write(words) };
        }
    }
}

/// Dispatches, runs the experts of [`hardware_experts`] and combines, in one kernel of one block.
///
/// # Safety
/// - One block. The host made the parameters by `gin_ep::Slot::fuse`.
#[kernel(launch_bounds(512))]
pub unsafe fn hardware_fused(
    comm: Comm,
    arena: Window<u64>,
    slot: SlotParams,
    tokens: TokenParams,
    sums: Sums,
    local: u32,
    hidden: u32,
) {
    // Safety: the caller's promise, here and below.
    unsafe { dispatch::<Bytes>(&comm, &arena, &slot, &tokens, SEND | RECEIVE) };
    // One warp has received.
    Block.sync();
    let received = unsafe { ReceivedRows::new(slot, arena.local_ptr().addr() as u64) };
    // Safety: as in `hardware_experts`, which is a function of all threads, too.
    unsafe { replace(&received, comm.world().rank(), local, hidden) };
    Block.sync();
    unsafe { combine::<Bf16>(&comm, &arena, &slot, &tokens, &sums) };
}

/// Sends the metadata of rows and never the rows.
///
/// # Safety
/// - As [`hardware_fused`].
#[kernel(launch_bounds(512))]
pub unsafe fn hardware_send_metadata(comm: Comm, arena: Window<u64>, slot: SlotParams, tokens: TokenParams) {
    // Safety: the caller's promise.
    unsafe { send_metadata(&comm, &arena, &slot, &tokens) };
}

/// [`hardware_late`], and in it also [`TokenParams::flags`]: all warps but the first are late.
pub const LATE: u32 = 1 << 16;
/// [`hardware_late`]: the dispatch has no barrier before its flag.
pub const UNMET_DISPATCH: u32 = 1;
/// [`hardware_late`]: the combine has no barrier before its flag.
pub const UNMET_COMBINE: u32 = 2;

/// Nanoseconds by which warps are late. A virtual GPU on a busy machine takes long to reach the rows.
const LATE_NS: u64 = if cfg!(target_arch = "nvptx64") { 2_000_000 } else { 20_000_000 };

fn wait_ns(limit: u64) {
    let start = Global::clock_ns();
    while Global::clock_ns().wrapping_sub(start) < limit {
        Global::pause(1000);
    }
}

/// Rows as [`Bytes`], which all warps but the first store late, if the tokens have [`LATE`]. Without `MEETS` the
/// barrier is missing.
struct Late<const MEETS: bool>;

impl<const MEETS: bool> Format for Late<MEETS> {
    type Loaded = <Bytes as Format>::Loaded;
    type Unit = <Bytes as Format>::Unit;
    const UNIT: u32 = Bytes::UNIT;
    const SOURCE: u32 = Bytes::SOURCE;
    const MAKES_SCALES: bool = Bytes::MAKES_SCALES;

    #[inline(always)]
    unsafe fn load(row: u64, pair: u32, pairs: u32) -> Self::Loaded {
        // Safety: the caller's promise.
        unsafe { Bytes::load(row, pair, pairs) }
    }

    #[inline(always)]
    fn meet() {
        if MEETS {
            Block.sync();
        }
    }

    #[inline(always)]
    fn convert(loaded: &Self::Loaded, flags: u32) -> Self::Unit {
        Bytes::convert(loaded, flags)
    }

    #[inline(always)]
    unsafe fn store(unit: &Self::Unit, row: u64, scales: u64, pair: u32, pairs: u32, flags: u32) {
        if flags & LATE != 0 && Block.rank() >= WARP_SIZE {
            wait_ns(LATE_NS);
        }
        // Safety: the caller's promise.
        unsafe { Bytes::store(unit, row, scales, pair, pairs, flags) }
    }
}

/// [`Bf16`], without the barrier.
struct Unmet;

impl Element for Unmet {
    type Sums = <Bf16 as Element>::Sums;

    #[inline(always)]
    fn meet() {}

    #[inline(always)]
    fn add(sums: &mut Self::Sums, weight: f32, pair: (u64, u64)) {
        Bf16::add(sums, weight, pair);
    }

    #[inline(always)]
    fn round(sums: &Self::Sums) -> (u64, u64) {
        Bf16::round(sums)
    }
}

/// Does what [`hardware_fused`] does, but stores the rows to their sources. `how` has bits: with [`LATE`] all warps but
/// the first of this rank store late in the dispatch and begin late with the combine; with [`UNMET_DISPATCH`] or
/// [`UNMET_COMBINE`] that barrier is missing.
///
/// # Safety
/// - As [`hardware_fused`].
#[kernel(launch_bounds(128))]
pub unsafe fn hardware_late(
    comm: Comm,
    arena: Window<u64>,
    slot: SlotParams,
    mut tokens: TokenParams,
    mut sums: Sums,
    hidden: u32,
    how: u32,
) {
    tokens.flags |= how & LATE;
    // Safety: the caller's promise, here and below.
    unsafe {
        if how & UNMET_DISPATCH != 0 {
            dispatch::<Late<false>>(&comm, &arena, &slot, &tokens, SEND | RECEIVE);
        } else {
            dispatch::<Late<true>>(&comm, &arena, &slot, &tokens, SEND | RECEIVE);
        }
        Block.sync();
        let received = ReceivedRows::new(slot, arena.local_ptr().addr() as u64);
        replace(&received, comm.world().rank(), slot.sizes.local(), hidden);
        Block.sync();
        sums.rows = received.row(0, 0).addr() as u64;
        if how & LATE != 0 && Block.rank() >= WARP_SIZE {
            wait_ns(LATE_NS);
        }
        if how & UNMET_COMBINE != 0 {
            combine::<Unmet>(&comm, &arena, &slot, &tokens, &sums);
        } else {
            combine::<Bf16>(&comm, &arena, &slot, &tokens, &sums);
        }
    }
}
