// SPDX-License-Identifier: MIT OR Apache-2.0
//! The values that lanes of a warp exchange.

mod sealed {
    pub trait Sealed {}
}

/// A value that shuffles and matches take: `u32`, `i32`, `f32`, `u64`, `i64`, `f64`.
///
/// On a GPU a shuffle of 32 bits is one instruction, and one of 64 bits is two.
pub trait LaneValue: Copy + sealed::Sealed {
    /// True for 64 bits.
    #[doc(hidden)]
    const WIDE: bool;

    #[doc(hidden)]
    fn to_lane_bits(self) -> u64;

    #[doc(hidden)]
    fn from_lane_bits(bits: u64) -> Self;
}

/// An integer that a warp reduces in one instruction: `u32` or `i32`.
pub trait LaneInteger: LaneValue {
    #[doc(hidden)]
    const SIGNED: bool;
}

impl LaneInteger for u32 {
    const SIGNED: bool = false;
}

impl LaneInteger for i32 {
    const SIGNED: bool = true;
}

macro_rules! lane_value {
    ($ty:ident $wide:literal |$value:ident| $to:expr, |$bits:ident| $from:expr) => {
        impl sealed::Sealed for $ty {}

        impl LaneValue for $ty {
            const WIDE: bool = $wide;

            #[inline(always)]
            fn to_lane_bits(self) -> u64 {
                let $value = self;
                $to
            }

            #[inline(always)]
            fn from_lane_bits($bits: u64) -> Self {
                $from
            }
        }
    };
}

lane_value! { u32 false |value| value as u64, |bits| bits as u32 }
lane_value! { i32 false |value| value as u32 as u64, |bits| bits as i32 }
lane_value! { f32 false |value| value.to_bits() as u64, |bits| f32::from_bits(bits as u32) }
lane_value! { u64 true |value| value, |bits| bits }
lane_value! { i64 true |value| value as u64, |bits| bits as i64 }
lane_value! { f64 true |value| value.to_bits(), |bits| f64::from_bits(bits) }

/// The lane that a shuffle reads, as PTX's `shfl.sync` has it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Source {
    /// The lane with a number.
    Lane,
    /// That many lanes below.
    Up,
    /// That many lanes above.
    Down,
    /// The lane whose number differs in these bits.
    Xor,
}

/// An operation of a reduction.
#[doc(hidden)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Fold {
    /// The sum modulo 2^32.
    Add,
    /// The least.
    Min,
    /// The greatest.
    Max,
    /// The bits that are 1 in all.
    And,
    /// The bits that are 1 in any.
    Or,
    /// The bits that are 1 in an odd number.
    Xor,
}
