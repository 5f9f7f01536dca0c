// SPDX-License-Identifier: MIT OR Apache-2.0
//! Elements of the rows that come back, and their sums.

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

/// A type of elements of the rows that a combine adds up, in FP32.
pub trait Element {
    /// The sums of the elements of a pair of words. Not an array in a loop, which LLVM would put on the stack.
    #[doc(hidden)]
    type Sums: Copy + Default;

    /// Adds the elements of a pair, each times `weight`, with one rounding.
    #[doc(hidden)]
    fn add(sums: &mut Self::Sums, weight: f32, pair: (u64, u64));

    /// Rounds the sums to elements.
    #[doc(hidden)]
    fn round(sums: &Self::Sums) -> (u64, u64);
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
