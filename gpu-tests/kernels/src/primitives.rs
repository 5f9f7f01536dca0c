// SPDX-License-Identifier: MIT OR Apache-2.0
//! Kernels that check warp operations, shared memory and conversions against plain code.

use bytemuck::{Pod, Zeroable};
use gin_device::prelude::*;
use gin_device::sys::{GlobalWord, Word};

/// The checks of [`hardware_lanes`]; bit `i` of a thread's result is set if check `i` failed.
pub const LANE_CHECKS: [&str; 15] = [
    "ballot",
    "any",
    "all",
    "shuffle",
    "shuffle of 64 bits",
    "shuffle_xor",
    "shuffle_up",
    "shuffle_down",
    "match_any",
    "match_all",
    "reduce_add",
    "reduce_min and reduce_max",
    "the same of i32",
    "reduce_and and reduce_or",
    "reduce_xor",
];

/// Returns the value of a lane: a few lanes share one.
#[inline(always)]
fn value(lane: u32) -> u32 {
    (lane % 5 + 1).wrapping_mul(0x9e37_79b9) ^ (lane % 3) << 30
}

/// Returns the value of 64 bits of a lane; some differ in the upper half only.
#[inline(always)]
fn wide(lane: u32) -> u64 {
    (lane as u64 % 4) << 40 | (lane as u64 % 2)
}

/// Checks the operations of a group. `members` are its lanes, and `missing` the lanes of the warp that the block lacks.
#[inline(always)]
fn check(group: &impl LaneCoop, members: u32, missing: u32) -> u32 {
    let own = lane();
    let size = members.count_ones();
    let rank = (members & ((1 << own) - 1)).count_ones();
    // The lane with a rank, found without the group.
    let lane_of = |rank: u32| {
        let mut rest = members;
        for _ in 0..rank {
            rest &= rest.wrapping_sub(1);
        }
        rest.trailing_zeros()
    };
    // A shuffle that reads the rank of a missing thread may give any value.
    let of_rank = |found: u32, from: u32| {
        if from < size {
            found == value(lane_of(from))
        } else {
            found == value(own) || missing >> (from & 31) & 1 != 0 && from < WARP_SIZE
        }
    };
    let fold = |start: u32, with: &dyn Fn(u32, u32) -> u32| {
        let mut all = start;
        for lane in 0..WARP_SIZE {
            if members >> lane & 1 != 0 {
                all = with(all, value(lane));
            }
        }
        all
    };
    let lanes_where = |holds: &dyn Fn(u32) -> bool| {
        let mut lanes = 0;
        for lane in 0..WARP_SIZE {
            lanes |= ((members >> lane & 1 != 0 && holds(lane)) as u32) << lane;
        }
        lanes
    };
    let mut failed = 0;
    let mut check = |index: u32, right: bool| failed |= ((!right) as u32) << index;

    check(0, group.ballot(own % 3 == 1) == lanes_where(&|lane| lane % 3 == 1));
    let last = lane_of(size - 1);
    check(1, group.any(own == last) && !group.any(own == WARP_SIZE));
    check(2, group.all(own != WARP_SIZE) && !group.all(own != last));
    for from in [0, 1, 5, 9, 31, 32, 77] {
        // Another lane for each thread, and one for all.
        let each = (from + rank) % 40;
        check(3, of_rank(group.shuffle(value(own), from), from) && of_rank(group.shuffle(value(own), each), each));
        let next = if rank + 1 == size { 0 } else { rank + 1 };
        check(4, group.shuffle(wide(own), next) == wide(lane_of(next)));
        check(4, group.shuffle(own as f64, next) == lane_of(next) as f64);
        check(6, of_rank(group.shuffle_up(value(own), from), if from <= rank { rank - from } else { rank }));
        check(7, of_rank(group.shuffle_down(value(own), from), rank + from));
        check(5, of_rank(group.shuffle_xor(value(own), from), rank ^ from));
    }
    check(8, group.match_any(value(own)) == lanes_where(&|lane| value(lane) == value(own)));
    check(8, group.match_any(wide(own)) == lanes_where(&|lane| wide(lane) == wide(own)));
    check(9, group.match_all(7u32) && group.match_all(7u64 << 40));
    let alone = size == 1;
    check(9, group.match_all((own == last) as u32) == alone);
    check(9, group.match_all(((own == last) as u64) << 32) == alone);
    check(10, group.reduce_add(value(own)) == fold(0, &|a, b| a.wrapping_add(b)));
    check(11, group.reduce_min(value(own)) == fold(u32::MAX, &|a, b| if a < b { a } else { b }));
    check(11, group.reduce_max(value(own)) == fold(0, &|a, b| if a > b { a } else { b }));
    let least = fold(i32::MAX as u32, &|a, b| if (a as i32) < b as i32 { a } else { b });
    let max = fold(i32::MIN as u32, &|a, b| if a as i32 > b as i32 { a } else { b });
    check(12, group.reduce_min(value(own) as i32) == least as i32);
    check(12, group.reduce_max(value(own) as i32) == max as i32);
    check(13, group.reduce_and(value(own)) == fold(u32::MAX, &|a, b| a & b));
    check(13, group.reduce_or(value(own)) == fold(0, &|a, b| a | b));
    check(14, group.reduce_xor(value(own)) == fold(0, &|a, b| a ^ b));
    failed
}

/// Checks the operations of warps, also with missing threads, of tiles and of sets of lanes.
///
/// # Safety
/// - A block has a multiple of 8 threads. `out` has a word for each thread of the block.
#[kernel]
pub unsafe fn hardware_lanes(out: *mut u32) {
    let (thread, own) = (Block.rank(), lane());
    let left = Block.size() - (thread - own);
    let exist = if left >= WARP_SIZE { u32::MAX } else { (1 << left) - 1 };
    let mut failed = check(&Warp, exist, !exist);
    failed |= check(&Tile::<8>, 0xff << (own & !7), 0);
    if exist == u32::MAX {
        failed |= check(&Tile::<32>, u32::MAX, 0);
    }
    if own % 4 == 1 {
        let mask = 0x2222_2222 & exist;
        // Safety: exactly these lanes are here.
        let lanes = unsafe { Lanes::new(mask) };
        failed |= check(&lanes, mask, 0);
    }
    failed |= check(&Thread, 1 << own, 0);
    // Safety: the kernel's promise.
    unsafe { out.add(thread as usize).write(failed) };
}

shared! { static NARROW: [u32; 7]; }
shared! { static SIGNED: [i32; 7]; }
shared! { static WIDE: [u64; 7]; }
shared! { static WIDE_SIGNED: [i64; 7]; }

/// The words of the result of [`hardware_shared`]: seven for each of four types, and the number of wrong elements.
pub const SHARED_RESULTS: usize = 29;

macro_rules! atomics {
    ($array:expr, $ty:ident, $thread:expr, $out:expr) => {{
        let (array, own) = ($array, $thread as $ty);
        // 0 for all except the least and the bits that are cleared.
        if Block.elect() {
            for (index, start) in [0, $ty::MAX, $ty::MIN, 0, !0, 0, 0].into_iter().enumerate() {
                array.write(index, start);
            }
        }
        Block.sync();
        array.min(1, own.wrapping_sub(3));
        array.max(2, own.wrapping_sub(3));
        array.or(3, 1 << (own % 20));
        array.and(4, !(1 << (own % 20)));
        // Together with the last value, all that threads bring are taken out once.
        array.add(0, array.exchange(5, own + 1));
        // Each thread adds 1, by compare-exchanges.
        let mut seen = array.read(6);
        loop {
            let before = array.compare_exchange(6, seen, seen + 1);
            if before == seen {
                break;
            }
            seen = before;
        }
        Block.sync();
        if Block.elect() {
            for index in 0..7 {
                // Safety: the kernel's promise.
                unsafe { $out.add(index).write(array.read(index) as i64 as u64) };
            }
        }
    }};
}

/// Does every atomic on shared memory by all threads, and passes elements of each size to the next thread through
/// dynamic shared memory.
///
/// # Safety
/// - One block of at most 256 threads with 31 bytes of dynamic shared memory for each; `out` has [`SHARED_RESULTS`]
///   words, all 0.
#[kernel]
pub unsafe fn hardware_shared(out: *mut u64) {
    let (thread, threads) = (Block.rank() as usize, Block.size() as usize);
    // Safety: the kernel's promise, here and below.
    let part = |index: usize| unsafe { out.add(7 * index) };
    atomics!(NARROW.array(), u32, thread, part(0));
    atomics!(SIGNED.array(), i32, thread, part(1));
    atomics!(WIDE.array(), u64, thread, part(2));
    atomics!(WIDE_SIGNED.array(), i64, thread, part(3));

    let next = (thread + 1) % threads;
    let quads = shared::dynamic_array::<u128>(0, threads);
    let longs = shared::dynamic_array::<u64>(16 * threads, threads);
    let words = shared::dynamic_array::<f32>(24 * threads, threads);
    let halves = shared::dynamic_array::<F16>(28 * threads, threads);
    let bytes = shared::dynamic_array::<u8>(30 * threads, threads);
    let quad = |thread: usize| (thread as u128) << 100 | !(thread as u64) as u128;
    quads.write(thread, quad(thread));
    longs.write(thread, !(thread as u64));
    words.write(thread, thread as f32);
    halves.write(thread, F16::from_f32(thread as f32));
    bytes.write(thread, thread as u8);
    Block.sync();
    let right = quads.read(next) == quad(next)
        && longs.read(next) == !(next as u64)
        && words.read(next) == next as f32
        && halves.read(next) == F16::from_f32(next as f32)
        && bytes.read(next) == next as u8;
    if !right {
        // Safety: as above.
        unsafe { GlobalWord::new(part(4) as usize as u64) }.red_add_relaxed_gpu(1);
    }
}

/// The conversions of [`converted`].
pub const CONVERSIONS: [&str; 10] = [
    "f32 to F16",
    "f32 to Bf16",
    "f32 to E4m3",
    "f32 to E5m2",
    "f32 to Ue8m0",
    "F16 to f32",
    "Bf16 to f32",
    "E4m3 to f32",
    "E5m2 to f32",
    "Ue8m0 to f32",
];

/// The first conversion of [`CONVERSIONS`] to `f32`.
pub const FIRST_TO_F32: u32 = 5;

/// Inputs of a chunk.
pub const CHUNK: u32 = 1 << 16;

/// The result if a single and a packed conversion differ.
pub const DIFFERENT: u64 = 0xbad0_bad0_bad0_bad0;

/// Returns the result of one of [`CONVERSIONS`] of the number with these bits, and beside it that of another number:
/// each by itself, and both packed.
#[inline(always)]
#[must_use]
pub fn converted(conversion: u32, bits: u32) -> u64 {
    macro_rules! narrow {
        ($name:ident, $width:literal) => {{
            // Signs and exponents of the other number are different.
            let (one, other) = (f32::from_bits(bits), f32::from_bits(bits.rotate_right(9) ^ 0x5555_5555));
            let pair = $name::pack([one, other]) as u64;
            let each = $name::from_f32(one).to_bits() as u64 | ($name::from_f32(other).to_bits() as u64) << $width;
            if pair == each { pair } else { DIFFERENT }
        }};
    }
    macro_rules! widen {
        ($name:ident, $bits:ident, $pair:ident, $width:literal) => {{
            let (one, other) = (bits as $bits, (bits ^ bits >> 3) as $bits);
            let pair = $name::unpack(one as $pair | (other as $pair) << $width).map(f32::to_bits);
            let each = [one, other].map(|bits| $name::from_bits(bits).to_f32().to_bits());
            if pair == each { pair[0] as u64 | (pair[1] as u64) << 32 } else { DIFFERENT }
        }};
    }
    match conversion {
        0 => narrow!(F16, 16),
        1 => narrow!(Bf16, 16),
        2 => narrow!(E4m3, 8),
        3 => narrow!(E5m2, 8),
        4 => {
            let value = f32::from_bits(bits);
            Ue8m0::from_f32_down(value).to_bits() as u64 | (Ue8m0::from_f32_up(value).to_bits() as u64) << 8
        }
        5 => widen!(F16, u16, u32, 16),
        6 => widen!(Bf16, u16, u32, 16),
        7 => widen!(E4m3, u8, u16, 8),
        8 => widen!(E5m2, u8, u16, 8),
        _ => Ue8m0::from_bits(bits as u8).to_f32().to_bits() as u64,
    }
}

/// Returns an input's part of its chunk's hash, which is the sum of the parts.
#[inline(always)]
#[must_use]
pub const fn mixed(bits: u32, result: u64) -> u64 {
    let mut hash = (bits as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ result;
    hash = (hash ^ hash >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    hash = (hash ^ hash >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    hash ^ hash >> 31
}

/// Returns what [`converted`] returns, without a copy of the function in each caller, which may not be optimised.
#[inline(never)]
#[must_use]
pub fn converted_here(conversion: u32, bits: u32) -> u64 {
    converted(conversion, bits)
}

/// Returns the hash of a chunk, on the CPU. `convert` is [`converted_here`], except in tests.
#[must_use]
pub fn chunk_hash(chunk: u32, convert: &dyn Fn(u32) -> u64) -> u64 {
    (0..CHUNK).map(|index| chunk * CHUNK + index).map(|bits| mixed(bits, convert(bits))).fold(0, u64::wrapping_add)
}

/// Argument of [`hardware_convert`].
#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable, Debug)]
pub struct Convert {
    /// Index in [`CONVERSIONS`].
    pub conversion: u32,
    /// First chunk.
    pub first: u32,
    /// Number of chunks.
    pub chunks: u32,
    /// 1 to store each result of the first chunk instead of hashes.
    pub each: u32,
    /// Address of a word for each chunk, 0 at first; or, if `each` is 1, for each input of a chunk.
    pub out: u64,
}

/// Converts the inputs of chunks, and adds up their hashes or stores their results.
///
/// # Safety
/// - `out` is as [`Convert`] describes.
#[kernel]
pub unsafe fn hardware_convert(plan: Convert) {
    let mut chunk = block_in_grid();
    while chunk < plan.chunks {
        let mut sum = 0u64;
        for index in Block.stripe(CHUNK as usize) {
            let bits = (plan.first + chunk) * CHUNK + index as u32;
            let result = converted(plan.conversion, bits);
            if plan.each != 0 {
                // Safety: the kernel's promise, here and below.
                unsafe { (plan.out as usize as *mut u64).add(index).write(result) };
            }
            sum = sum.wrapping_add(mixed(bits, result));
        }
        if plan.each == 0 {
            // Safety: as above.
            unsafe { GlobalWord::new(plan.out + 8 * chunk as u64) }.red_add_relaxed_gpu(sum);
        }
        chunk += grid_dim().count();
    }
}
