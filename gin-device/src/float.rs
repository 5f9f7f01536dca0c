// SPDX-License-Identifier: MIT OR Apache-2.0
//! Numbers of 8 and 16 bits: storage formats, which kernels convert from and to `f32`.
//!
//! | type | sign, exponent, mantissa bits | bias | largest | infinities | NaNs |
//! | --- | --- | --- | --- | --- | --- |
//! | [`F16`] | 1, 5, 10 | 15 | 65504 | yes | exponent 31, mantissa not 0 |
//! | [`Bf16`] | 1, 8, 7 | 127 | 3.3895e38 | yes | exponent 255, mantissa not 0 |
//! | [`E4m3`] | 1, 4, 3 | 7 | 448 | no | 0x7f, 0xff |
//! | [`E5m2`] | 1, 5, 2 | 15 | 57344 | yes | exponent 31, mantissa not 0 |
//! | [`Ue8m0`] | 0, 8, 0 | 127 | 2^127 | no | 0xff |
//!
//! All except [`Ue8m0`] are IEEE formats or follow them: they have subnormal numbers and two zeros.
//!
//! # Conversions from `f32`
//!
//! They do what PTX's `cvt` does, bit for bit, on GPUs and CPUs.
//!
//! | to | rounding | past the largest, and infinities | NaN |
//! | --- | --- | --- | --- |
//! | `F16`, `Bf16` | to nearest, ties to even | infinity of the same sign | 0x7fff |
//! | `E4m3`, `E5m2` | to nearest, ties to even | largest number of the same sign (`.satfinite`) | 0x7f |
//! | `Ue8m0` | of the magnitude: up or down to a power of two | 0xfe, which is 2^127 | 0xff |
//!
//! Subnormal inputs and results are kept. Signs of zeros and of results that round to zero are kept; signs and payloads
//! of NaNs are not.
//!
//! # Conversions to `f32`
//!
//! They are exact, with the same sign and infinities. A NaN becomes 0x7fffffff, with two exceptions. One of `Bf16`
//! keeps its sign and its payload, because its conversion is a shift. That of `Ue8m0` becomes 0x7fff0000, the NaN of
//! `Bf16`.
//!
//! # Cost
//!
//! | conversion | PTX | instructions on sm_90 |
//! | --- | --- | --- |
//! | `F16::from_f32`, `F16::pack` | `cvt.rn.f16x2.f32` | 1 |
//! | `F16::to_f32` | `cvt.f32.f16` | 1 |
//! | `Bf16::from_f32`, `Bf16::pack` | `cvt.rn.bf16x2.f32` | 1 |
//! | `Bf16::to_f32` | | 1: a shift |
//! | `E4m3::from_f32`, `E4m3::pack` | `cvt.rn.satfinite.e4m3x2.f32` | 1 |
//! | `E4m3::to_f32`, `E4m3::unpack` | `cvt.rn.f16x2.e4m3x2`, `cvt.f32.f16` | 2, 3 |
//! | `E5m2::from_f32`, `E5m2::pack` | `cvt.rn.satfinite.e5m2x2.f32` | 1 |
//! | `E5m2::to_f32` | `cvt.f32.f16` | 2: an `E5m2` is the upper half of an `F16` |
//! | `Ue8m0` | | about 8 from `f32`, 4 to `f32`, all of integers |
//!
//! Before sm_90 the conversions from and to `E4m3`, and to `E5m2`, are about 40 instructions of integers for each
//! number.
//!
//! A *packed* conversion has two numbers; the first is in the lower half of the integer, as the first of two
//! neighbouring elements in memory is.
//!
//! ```
//! use gin_device::prelude::*;
//!
//! assert_eq!(F16::from_f32(1.0).to_bits(), 0x3c00);
//! assert_eq!(E4m3::from_f32(1e9).to_f32(), 448.0);
//! assert_eq!(E4m3::pack([1.0, -2.0]), 0xc038);
//! assert_eq!(Bf16::unpack(Bf16::pack([0.5, 3.0])), [0.5, 3.0]);
//! // A scale that is not less than 5.
//! assert_eq!(Ue8m0::from_f32_up(5.0).to_f32(), 8.0);
//! ```

use crate::sys::convert;
use bytemuck::{Pod, Zeroable};

macro_rules! number {
    (
        $(#[$doc:meta])* $name:ident($bits:ident), packed $pair:ident by $narrow:ident,
        |$one:ident| $widen:expr, |$two:ident| $widen_pair:expr
    ) => {
        number! { $(#[$doc])* $name($bits) }

        impl $name {
            /// Converts from `f32`; the [module](self) has the rules.
            #[inline(always)]
            #[must_use]
            pub fn from_f32(value: f32) -> Self {
                Self(convert::$narrow(0.0, value) as $bits)
            }

            /// Converts two numbers. The first is in the lower half of the result.
            #[inline(always)]
            #[must_use]
            pub fn pack([low, high]: [f32; 2]) -> $pair {
                convert::$narrow(high, low)
            }

            /// Converts to `f32`; exact.
            #[inline(always)]
            #[must_use]
            pub fn to_f32(self) -> f32 {
                let $one = self.0;
                $widen
            }

            /// Converts two numbers to `f32`. The lower half is the first.
            #[inline(always)]
            #[must_use]
            pub fn unpack($two: $pair) -> [f32; 2] {
                $widen_pair
            }
        }
    };
    ($(#[$doc:meta])* $name:ident($bits:ident)) => {
        $(#[$doc])*
        ///
        /// Comparisons are of bits: a NaN equals itself, and 0 differs from -0.
        #[repr(transparent)]
        #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Pod, Zeroable)]
        pub struct $name($bits);

        impl $name {
            /// Returns the number with these bits.
            #[inline(always)]
            #[must_use]
            pub const fn from_bits(bits: $bits) -> Self {
                Self(bits)
            }

            /// Returns the bits.
            #[inline(always)]
            #[must_use]
            pub const fn to_bits(self) -> $bits {
                self.0
            }
        }
    };
}

number! {
    /// IEEE's binary16.
    F16(u16), packed u32 by f16_pair_from_f32,
    |bits| convert::f32_from_f16(bits),
    |pair| [convert::f32_from_f16(pair as u16), convert::f32_from_f16((pair >> 16) as u16)]
}

number! {
    /// The upper half of an `f32`.
    Bf16(u16), packed u32 by bf16_pair_from_f32,
    |bits| f32::from_bits((bits as u32) << 16),
    |pair| [f32::from_bits(pair << 16), f32::from_bits(pair & 0xffff_0000)]
}

number! {
    /// OCP's E4M3, which has a NaN of each sign and no infinity.
    E4m3(u8), packed u16 by e4m3_pair_from_f32,
    |bits| Self::unpack(bits as u16)[0],
    |pair| F16::unpack(convert::f16_pair_from_e4m3(pair))
}

number! {
    /// OCP's E5M2: the upper half of an [`F16`].
    E5m2(u8), packed u16 by e5m2_pair_from_f32,
    |bits| F16((bits as u16) << 8).to_f32(),
    |pair| [F16(pair << 8).to_f32(), F16(pair & 0xff00).to_f32()]
}

number! {
    /// A power of two, 2^-127 to 2^127: the exponent, biased by 127. The scale of OCP's microscaling formats.
    ///
    /// It has neither a sign nor a zero: conversions ignore the sign, and 0 and all that is less than 2^-127 become
    /// 2^-127.
    Ue8m0(u8)
}

impl Ue8m0 {
    /// Converts to the least power of two that is not less than the number's magnitude (`.rp`).
    #[inline(always)]
    #[must_use]
    pub fn from_f32_up(value: f32) -> Self {
        Self(convert::ue8m0_from_f32(value, true))
    }

    /// Converts to the greatest power of two that is not greater than the number's magnitude (`.rz`).
    #[inline(always)]
    #[must_use]
    pub fn from_f32_down(value: f32) -> Self {
        Self(convert::ue8m0_from_f32(value, false))
    }

    /// Converts to `f32`; exact.
    #[inline(always)]
    #[must_use]
    pub fn to_f32(self) -> f32 {
        convert::f32_from_ue8m0(self.0)
    }
}
