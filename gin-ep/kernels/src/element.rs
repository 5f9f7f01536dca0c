// SPDX-License-Identifier: MIT OR Apache-2.0
//! Elements of the returned rows, and their sums.

use gin_device::prelude::*;

/// Returns `a * b + c`, rounded once.
#[inline(always)]
#[must_use]
pub fn fma(a: f32, b: f32, c: f32) -> f32 {
    #[cfg(target_arch = "nvptx64")]
    {
        core::f32::math::mul_add(a, b, c)
    }
    #[cfg(not(target_arch = "nvptx64"))]
    {
        a.mul_add(b, c)
    }
}

/// A type of elements of the rows that a combine adds up, in FP32. The rows of experts and of sums, the *local* ones,
/// have the same elements, or others.
pub trait Element {
    /// The sums of the elements of a pair of words of a returned row. Not an array in a loop, which LLVM would
    /// put on the stack.
    #[doc(hidden)]
    type Sums: Copy + Default;

    /// Bytes of a local row for each 16 bytes of a returned row: 16 or 8.
    #[doc(hidden)]
    const LOCAL: u32 = 16;

    /// Lets the threads of a block meet before the block counts as one that has returned its rows.
    #[doc(hidden)]
    #[inline(always)]
    fn meet() {
        Block.sync();
    }

    /// Adds the elements of a pair, each times `weight`, with one rounding.
    #[doc(hidden)]
    fn add(sums: &mut Self::Sums, weight: f32, pair: (u64, u64));

    /// Rounds the sums to elements.
    #[doc(hidden)]
    fn round(sums: &Self::Sums) -> (u64, u64);

    /// Adds local elements, as [`add`](Self::add): those of one word if `LOCAL` is 8.
    #[doc(hidden)]
    #[inline(always)]
    fn add_local(sums: &mut Self::Sums, weight: f32, pair: (u64, u64)) {
        Self::add(sums, weight, pair);
    }

    /// Rounds the sums to local elements: to one word if `LOCAL` is 8.
    #[doc(hidden)]
    #[inline(always)]
    fn round_local(sums: &Self::Sums) -> (u64, u64) {
        Self::round(sums)
    }
}

macro_rules! halves {
    ($name:ident) => {
        impl Element for $name {
            type Sums = [f32; 8];

            #[inline(always)]
            fn add(sums: &mut [f32; 8], weight: f32, (low, high): (u64, u64)) {
                let ([a, b], [c, d]) = ($name::unpack(low as u32), $name::unpack((low >> 32) as u32));
                let ([e, f], [g, h]) = ($name::unpack(high as u32), $name::unpack((high >> 32) as u32));
                sums[0] = fma(weight, a, sums[0]);
                sums[1] = fma(weight, b, sums[1]);
                sums[2] = fma(weight, c, sums[2]);
                sums[3] = fma(weight, d, sums[3]);
                sums[4] = fma(weight, e, sums[4]);
                sums[5] = fma(weight, f, sums[5]);
                sums[6] = fma(weight, g, sums[6]);
                sums[7] = fma(weight, h, sums[7]);
            }

            #[inline(always)]
            fn round(sums: &[f32; 8]) -> (u64, u64) {
                let word = |a, b, c, d| u64::from($name::pack([a, b])) | u64::from($name::pack([c, d])) << 32;
                (word(sums[0], sums[1], sums[2], sums[3]), word(sums[4], sums[5], sums[6], sums[7]))
            }
        }
    };
}

halves! { Bf16 }
halves! { F16 }

impl Element for f32 {
    type Sums = [f32; 4];

    #[inline(always)]
    fn add(sums: &mut [f32; 4], weight: f32, (low, high): (u64, u64)) {
        let value = |word: u64, half: u32| f32::from_bits((word >> (32 * half)) as u32);
        sums[0] = fma(weight, value(low, 0), sums[0]);
        sums[1] = fma(weight, value(low, 1), sums[1]);
        sums[2] = fma(weight, value(high, 0), sums[2]);
        sums[3] = fma(weight, value(high, 1), sums[3]);
    }

    #[inline(always)]
    fn round(sums: &[f32; 4]) -> (u64, u64) {
        let word = |low: f32, high: f32| u64::from(low.to_bits()) | u64::from(high.to_bits()) << 32;
        (word(sums[0], sums[1]), word(sums[2], sums[3]))
    }
}

/// [`Bf16`], of which sums of a rank come back as FP32.
#[derive(Clone, Copy, Debug)]
pub struct Wide;

impl Element for Wide {
    type Sums = [f32; 4];
    const LOCAL: u32 = 8;

    #[inline(always)]
    fn add(sums: &mut [f32; 4], weight: f32, pair: (u64, u64)) {
        <f32 as Element>::add(sums, weight, pair);
    }

    #[inline(always)]
    fn round(sums: &[f32; 4]) -> (u64, u64) {
        <f32 as Element>::round(sums)
    }

    #[inline(always)]
    fn add_local(sums: &mut [f32; 4], weight: f32, (word, _): (u64, u64)) {
        let ([a, b], [c, d]) = (Bf16::unpack(word as u32), Bf16::unpack((word >> 32) as u32));
        sums[0] = fma(weight, a, sums[0]);
        sums[1] = fma(weight, b, sums[1]);
        sums[2] = fma(weight, c, sums[2]);
        sums[3] = fma(weight, d, sums[3]);
    }

    #[inline(always)]
    fn round_local(sums: &[f32; 4]) -> (u64, u64) {
        (u64::from(Bf16::pack([sums[0], sums[1]])) | u64::from(Bf16::pack([sums[2], sums[3]])) << 32, 0)
    }
}
