// SPDX-License-Identifier: MIT OR Apache-2.0
//! How the bytes of a row get onto their way: copied, or as FP8 that the dispatch makes.

use crate::element::fma;
use crate::params::{Divisor, EXPONENTS, POWERS, Sizes, SlotParams};
use core::marker::PhantomData;
use gin_device::prelude::*;
use gin_device::sys::data::{load_weak_pair, store_weak_pair, store_weak_u8, store_weak_u32};

/// Four pairs of words of a row, for one lane of a warp.
pub(crate) type Pairs = ((u64, u64), (u64, u64), (u64, u64), (u64, u64));

/// Elements that share a scale.
pub const SCALED: u32 = 128;

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

/// A way to send rows. All lanes of a warp call.
pub trait Format {
    /// The share of a lane in a warp's unit of a row, as it is loaded.
    #[doc(hidden)]
    type Loaded: Copy;

    /// The same on its way.
    #[doc(hidden)]
    type Unit: Copy;

    /// Pairs of a row on its way that a warp sends at a time.
    #[doc(hidden)]
    const UNIT: u32;

    /// Bytes of a row of the caller for each byte on its way.
    #[doc(hidden)]
    const SOURCE: u32;

    /// The dispatch makes the scales.
    #[doc(hidden)]
    const MAKES_SCALES: bool;

    /// Metadata goes with the rows, and one flag follows all of them. Otherwise metadata was sent before, and a
    /// flag follows each section of the tokens.
    #[doc(hidden)]
    const HAS_METADATA: bool = true;

    /// Returns the number of units of a row.
    #[doc(hidden)]
    #[inline(always)]
    fn units(sizes: &Sizes) -> Divisor {
        sizes.units
    }

    /// Returns the offset of the flag that `source` raises after all it sends.
    #[doc(hidden)]
    #[inline(always)]
    fn flag(slot: &SlotParams, source: u32) -> u64 {
        slot.sent_flag(source)
    }

    /// Loads from the caller's row, of which `pairs` pairs are there.
    #[doc(hidden)]
    unsafe fn load(row: u64, pair: u32, pairs: u32) -> Self::Loaded;

    /// Lets the threads of a block meet before the block counts as one that has sent.
    #[doc(hidden)]
    #[inline(always)]
    fn meet() {
        Block.sync();
    }

    /// Makes what goes on its way.
    #[doc(hidden)]
    fn convert(loaded: &Self::Loaded, flags: u32) -> Self::Unit;

    /// Stores to a row on its way, and the scales that the dispatch makes.
    #[doc(hidden)]
    unsafe fn store(unit: &Self::Unit, row: u64, scales: u64, pair: u32, pairs: u32, flags: u32);
}

/// No rows: their metadata, and scales that the dispatch does not make.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Metadata;

impl Format for Metadata {
    type Loaded = ();
    type Unit = ();
    const UNIT: u32 = 0;
    const SOURCE: u32 = 0;
    const MAKES_SCALES: bool = false;

    #[inline(always)]
    fn units(_: &Sizes) -> Divisor {
        const { Divisor::new(1) }
    }

    // Not the flag of rows, so that a rank which expects these reports a silent rank, and takes no rows that are not
    // there.
    #[inline(always)]
    fn flag(slot: &SlotParams, source: u32) -> u64 {
        slot.metadata_flag(source)
    }

    #[inline(always)]
    unsafe fn load(_: u64, _: u32, _: u32) {}

    #[inline(always)]
    fn convert((): &(), _: u32) {}

    #[inline(always)]
    unsafe fn store((): &(), _: u64, _: u64, _: u32, _: u32, _: u32) {}
}

/// Rows of a format whose metadata was sent before.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RowsAlone<F>(PhantomData<F>);

impl<F: Format> Format for RowsAlone<F> {
    type Loaded = F::Loaded;
    type Unit = F::Unit;
    const UNIT: u32 = F::UNIT;
    const SOURCE: u32 = F::SOURCE;
    const MAKES_SCALES: bool = F::MAKES_SCALES;
    const HAS_METADATA: bool = false;

    #[inline(always)]
    unsafe fn load(row: u64, pair: u32, pairs: u32) -> F::Loaded {
        // Safety: the caller's promise, here and below.
        unsafe { F::load(row, pair, pairs) }
    }

    #[inline(always)]
    fn convert(loaded: &F::Loaded, flags: u32) -> F::Unit {
        F::convert(loaded, flags)
    }

    #[inline(always)]
    unsafe fn store(unit: &F::Unit, row: u64, scales: u64, pair: u32, pairs: u32, flags: u32) {
        unsafe { F::store(unit, row, scales, pair, pairs, flags) };
    }
}

/// Rows of any bytes, which are copied. So are their scales.
#[derive(Clone, Copy, Debug)]
pub struct Bytes;

impl Format for Bytes {
    type Loaded = Pairs;
    type Unit = Pairs;
    const UNIT: u32 = crate::UNIT;
    const SOURCE: u32 = 1;
    const MAKES_SCALES: bool = false;

    #[inline(always)]
    unsafe fn load(row: u64, pair: u32, pairs: u32) -> Pairs {
        // Safety: the caller's promise.
        unsafe { load_unit(row, pair, pairs) }
    }

    #[inline(always)]
    fn convert(loaded: &Pairs, _: u32) -> Pairs {
        *loaded
    }

    #[inline(always)]
    unsafe fn store(unit: &Pairs, row: u64, _: u64, pair: u32, pairs: u32, _: u32) {
        // Safety: the caller's promise.
        unsafe { store_unit(row, pair, pairs, unit) };
    }
}

/// Rows of [`Bf16`], which become [`E4m3`] with a scale for each [`SCALED`] elements.
///
/// The scale is the greatest magnitude of the elements, at least 1e-4, divided by 448; with [`POWERS`] it is rounded up
/// to a power of two. The elements are multiplied by 1 divided by it, or, without `POWERS`, by 448 divided by the
/// magnitude. A receiver multiplies by the scale.
#[derive(Clone, Copy, Debug)]
pub struct Quantized;

/// The share of a lane: 32 elements, 16 of each of two blocks, and their scales.
type Scaled = ([(u64, u64); 2], [f32; 2]);

/// Returns the scale of a block whose greatest magnitude is `max`, and the factor of its elements.
///
/// They have the bits of divisions. Divisions would call functions for rare numbers, and take registers. `max` is one
/// of [`Bf16`] and at least 1e-4, so a test compares all.
#[inline(always)]
#[must_use]
pub fn scale_and_factor(max: f32, flags: u32) -> (f32, f32) {
    let is_infinite = max == f32::INFINITY;
    // The quotient, and once what is left of the number divided by the divisor.
    let refined = |number: f32, divisor: f32, inverse: f32| {
        let quotient = number * inverse;
        fma(fma(-divisor, quotient, number), inverse, quotient)
    };
    let mut scale = if is_infinite { max } else { refined(max, 448.0, 1.0 / 448.0) };
    if flags & POWERS != 0 {
        scale = Ue8m0::from_f32_up(scale).to_f32();
        let of_infinite = 1.0 / Ue8m0::from_f32_up(f32::INFINITY).to_f32();
        // The exponent of a power of two, negated.
        let factor = f32::from_bits(0x7f00_0000_u32.wrapping_sub(scale.to_bits()));
        return (scale, if is_infinite { of_infinite } else { factor });
    }
    // Both are smaller by 2^64, so that the inverse of a great one is no denormal. The difference of bits is the
    // inverse but for an eighth of it, and each step squares what is missing. Two are enough for all magnitudes.
    let small = f32::from_bits(0x1f80_0000);
    let divisor = max * small;
    let mut inverse = f32::from_bits(0x7ef3_11c3_u32.wrapping_sub(divisor.to_bits()));
    for _ in 0..2 {
        inverse = fma(fma(-divisor, inverse, 1.0), inverse, inverse);
    }
    (scale, if is_infinite { 0.0 } else { refined(448.0 * small, divisor, inverse) })
}

/// Makes 16 elements of a block of eight lanes, and its scale.
#[inline(always)]
fn quantize((first, second): ((u64, u64), (u64, u64)), flags: u32) -> ((u64, u64), f32) {
    let two = |word: u64, half: u32| Bf16::unpack((word >> (32 * half)) as u32);
    let max_of = |word: u64| {
        let ([a, b], [c, d]) = (two(word, 0), two(word, 1));
        a.abs().max(b.abs()).max(c.abs().max(d.abs()))
    };
    let mut max = max_of(first.0).max(max_of(first.1)).max(max_of(second.0).max(max_of(second.1)));
    max = max.max(Warp.shuffle_xor(max, 1));
    max = max.max(Warp.shuffle_xor(max, 2));
    max = max.max(Warp.shuffle_xor(max, 4)).max(1e-4);
    let (scale, factor) = scale_and_factor(max, flags);
    let four = |word: u64| {
        let ([a, b], [c, d]) = (two(word, 0), two(word, 1));
        let pack = |a: f32, b: f32| u64::from(E4m3::pack([a * factor, b * factor]));
        pack(a, b) | pack(c, d) << 16
    };
    let eight = |pair: (u64, u64)| four(pair.0) | four(pair.1) << 32;
    ((eight(first), eight(second)), scale)
}

impl Format for Quantized {
    type Loaded = [((u64, u64), (u64, u64)); 2];
    type Unit = Scaled;
    // More would need more registers than there are.
    const UNIT: u32 = crate::UNIT / 2;
    const SOURCE: u32 = 2;
    const MAKES_SCALES: bool = true;

    #[inline(always)]
    unsafe fn load(row: u64, pair: u32, pairs: u32) -> Self::Loaded {
        // Safety: the caller's promise; past the end nothing is loaded.
        let load = |ahead: u32| unsafe {
            let pair = pair + 32 * ahead;
            let at = row + 32 * u64::from(pair);
            if pair < pairs {
                (load_weak_pair(at as usize as *const u64), load_weak_pair((at + 16) as usize as *const u64))
            } else {
                ((0, 0), (0, 0))
            }
        };
        [load(0), load(1)]
    }

    #[inline(always)]
    fn convert(&[first, second]: &Self::Loaded, flags: u32) -> Scaled {
        let (a, b) = (quantize(first, flags), quantize(second, flags));
        ([a.0, b.0], [a.1, b.1])
    }

    #[inline(always)]
    unsafe fn store((data, scale): &Scaled, row: u64, scales: u64, pair: u32, pairs: u32, flags: u32) {
        let store = |ahead: u32, data: (u64, u64), scale: f32| {
            let pair = pair + 32 * ahead;
            if pair >= pairs {
                return;
            }
            // Safety: a pair of the row, and its scale; the lanes of a block have the same.
            unsafe {
                store_weak_pair((row + 16 * u64::from(pair)) as usize as *mut u64, data.0, data.1);
                let block = u64::from(pair / 8);
                match (pair % 8, flags & EXPONENTS) {
                    (0, 0) => store_weak_u32((scales + 4 * block) as usize as *mut u32, scale.to_bits()),
                    // The exponent of a power of two.
                    (0, _) => store_weak_u8((scales + block) as usize as *mut u8, (scale.to_bits() >> 23) as u8),
                    _ => {}
                }
            }
        };
        store(0, data[0], scale[0]);
        store(1, data[1], scale[1]);
    }
}
