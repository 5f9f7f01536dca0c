// SPDX-License-Identifier: MIT OR Apache-2.0
//! Probes of shared memory, warp operations and conversions, to inspect the compiled code.

use gin_device::prelude::*;

shared! { static BYTES: [u8; 1024]; }
shared! { static HALVES: [u16; 1024]; }
shared! { static WORDS: [u32; 1024]; }
shared! { static LONGS: [u64; 512]; }
shared! { static QUADS: [u128; 128]; }

/// Loads and stores elements of each size in static shared memory, and of 4 bytes in dynamic shared memory.
///
/// # Safety
/// - A block has at most 128 threads, and 512 bytes of dynamic shared memory. `out` has a word for each.
#[kernel]
pub unsafe fn probe_shared_access(out: *mut u64) {
    let own = Block.rank() as usize;
    let next = (own + 1) % 128;
    let dynamic = shared::dynamic_array::<u32>(0, 128);
    BYTES.array().write(own, own as u8);
    HALVES.array().write(own, own as u16);
    WORDS.array().write(own, own as u32);
    LONGS.array().write(own, own as u64);
    QUADS.array().write(own, own as u128);
    dynamic.write(own, own as u32);
    Block.sync();
    let quad = QUADS.array().read(next);
    let small = BYTES.array().read(next) as u32 + HALVES.array().read(next) as u32 + WORDS.array().read(next);
    let all = LONGS.array().read(next) + (quad >> 64) as u64 + quad as u64 + (small + dynamic.read(next)) as u64;
    // Safety: the kernel's promise.
    unsafe { out.add(own).write(all) };
}

/// Does each read-modify-write of 32 and of 64 bits, signed and unsigned, in shared memory.
///
/// # Safety
/// - A block has at most 128 threads. `out` has a word for each.
#[kernel]
pub unsafe fn probe_shared_atomics(out: *mut u64, value: u64) {
    let own = Block.rank() as usize;
    let (words, longs, small) = (WORDS.array(), LONGS.array(), value as u32);
    let at = own % 64;
    let mut sum = words.add(at, small) ^ words.min(at, small) ^ words.max(at, small) ^ words.or(at, small);
    sum ^= words.and(at, small) ^ words.exchange(at, small) ^ words.compare_exchange(at, small, small + 1);
    let mut wide = longs.add(at, value) ^ longs.min(at, value) ^ longs.max(at, value) ^ longs.or(at, value);
    wide ^= longs.and(at, value) ^ longs.exchange(at, value) ^ longs.compare_exchange(at, value, value + 1);
    // Safety: the same memory as signed integers, whose atomics have the same sizes.
    let (signed, signed_wide) =
        unsafe { (SharedArray::<i32>::new(words.address(), 64), SharedArray::<i64>::new(longs.address(), 64)) };
    sum ^= (signed.min(at, small as i32) ^ signed.max(at, small as i32)) as u32;
    wide ^= (signed_wide.min(at, value as i64) ^ signed_wide.max(at, value as i64)) as u64;
    // Safety: the kernel's promise.
    unsafe { out.add(own).write(wide ^ sum as u64) };
}

/// Passes constants from the first warp to the second one, which waits for them.
///
/// # Safety
/// - A block has 64 threads. `from` has 16 bytes, aligned to 16, and a word for each lane of a warp, and nobody writes
///   them. `out` has a word for each lane.
#[kernel]
pub unsafe fn probe_arrivals(from: *const u64, out: *mut u32) {
    let (lane, slots) = (lane() as usize, WORDS.array());
    // Safety: both warps come once.
    let Some(full) = (unsafe { Arrivals::new(1, 2) }) else { return };
    if Block.rank() < WARP_SIZE {
        // Safety: the kernel's promise, here and below.
        let (word, pair) = unsafe {
            let word = gin_device::sys::data::load_constant_u32(from.add(2).cast::<u32>().add(lane));
            (word, gin_device::sys::data::load_constant_pair(from))
        };
        let both = pair.0 ^ pair.1;
        slots.write(lane, word ^ both as u32 ^ (both >> 32) as u32);
        full.arrive();
    } else {
        full.wait();
        unsafe { out.add(lane).write(slots.read(lane)) };
    }
}

/// Does each warp operation of 32 bits once.
///
/// # Safety
/// - A block has whole warps. `values` and `out` have a word for each thread.
#[kernel]
pub unsafe fn probe_warp(values: *const u32, out: *mut u32, by: u32) {
    let own = Block.rank() as usize;
    // Safety: the kernel's promise, here and below.
    let value = unsafe { values.add(own).read() };
    let mut all = Warp.shuffle(value, by & 31) ^ Warp.shuffle_up(value, 1) ^ Warp.shuffle_down(value, 2);
    all ^= Warp.shuffle_xor(value, 4) ^ Warp.ballot(value == 7) ^ Warp.match_any(value);
    all ^= Warp.any(value == 8) as u32 ^ (Warp.all(value == 9) as u32) << 1 ^ (Warp.match_all(value) as u32) << 2;
    all ^= Warp.reduce_add(value) ^ Warp.reduce_min(value) ^ Warp.reduce_max(value);
    all ^= Warp.reduce_and(value) ^ Warp.reduce_or(value) ^ Warp.reduce_xor(value);
    all ^= (Warp.reduce_min(value as i32) ^ Warp.reduce_max(value as i32)) as u32;
    unsafe { out.add(own).write(all) };
}

/// Does the warp operations that take 64 bits.
///
/// # Safety
/// - A block has whole warps. `values` and `out` have a word for each thread.
#[kernel]
pub unsafe fn probe_warp_wide(values: *const u64, out: *mut u64) {
    let own = Block.rank() as usize;
    // Safety: the kernel's promise, here and below.
    let value = unsafe { values.add(own).read() };
    let all = Warp.shuffle_xor(value, 1) ^ Warp.match_any(value) as u64 ^ Warp.match_all(value) as u64;
    unsafe { out.add(own).write(all) };
}

/// Converts four numbers to each format and back.
///
/// # Safety
/// - `values` has four words for each thread, and `out` ten.
#[kernel]
pub unsafe fn probe_convert(values: *const f32, out: *mut u32) {
    let own = Block.rank() as usize;
    // Safety: the kernel's promise, here and below.
    let [a, b, c, d]: [f32; 4] = core::array::from_fn(|i| unsafe { values.add(4 * own + i).read() });
    let results = [
        F16::pack([a, b]),
        Bf16::pack([a, b]),
        E4m3::pack([a, b]) as u32 | (E4m3::pack([c, d]) as u32) << 16,
        E5m2::pack([a, b]) as u32 | (E5m2::pack([c, d]) as u32) << 16,
        F16::from_f32(c).to_bits() as u32 | (Bf16::from_f32(c).to_bits() as u32) << 16,
        Ue8m0::from_f32_up(a).to_bits() as u32 | (Ue8m0::from_f32_down(b).to_bits() as u32) << 8,
        F16::from_bits(c.to_bits() as u16).to_f32().to_bits(),
        Bf16::from_bits(d.to_bits() as u16).to_f32().to_bits(),
        E4m3::from_bits(c.to_bits() as u8).to_f32().to_bits(),
        E5m2::from_bits(d.to_bits() as u8).to_f32().to_bits(),
    ];
    for (i, result) in results.into_iter().enumerate() {
        unsafe { out.add(10 * own + i).write(result) };
    }
}
