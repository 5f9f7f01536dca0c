// SPDX-License-Identifier: MIT OR Apache-2.0
//! Conversions between number formats, the base of [`float`](crate::float), which has their rules.
//!
//! | name | PTX | SASS on sm_90 |
//! | --- | --- | --- |
//! | `f16_pair_from_f32` | `cvt.rn.f16x2.f32` | `F2FP.F16.F32.PACK_AB` |
//! | `f32_from_f16` | `cvt.f32.f16` | `HADD2.F32` |
//! | `bf16_pair_from_f32` | `cvt.rn.bf16x2.f32` | `F2FP.BF16.F32.PACK_AB` |
//! | `e4m3_pair_from_f32` | `cvt.rn.satfinite.e4m3x2.f32` | `F2FP.SATFINITE.E4M3.F32.PACK_AB_MERGE_C` |
//! | `e5m2_pair_from_f32` | `cvt.rn.satfinite.e5m2x2.f32` | `F2FP.SATFINITE.E5M2.F32.PACK_AB_MERGE_C` |
//! | `f16_pair_from_e4m3` | `cvt.rn.f16x2.e4m3x2` | `F2FP.F16.E4M3.UNPACK_B` |
//!
//! The column SASS has the work of `ptxas` 13.0 for each line alone; a test compares them. Those with `e4m3` and `e5m2`
//! need sm_90. Elsewhere the functions of `soft` replace them, as all are replaced on a CPU. Their results have the
//! same bits; a test on a GPU compares all of them.
//!
//! A pair has its first number in the lower half. A single number is converted as a pair with 0: `ptxas` would make
//! `F2F` of `cvt.rn.f16.f32`, which has a lower rate.

/// Returns the statement of a conversion for `asm!`. `{w}`, `{n}` and `{s}` are registers of 32 bits, `{j}` and `{k}`
/// of 16.
macro_rules! statement {
    (f16_pair_from_f32) => {
        "cvt.rn.f16x2.f32 {s}, {n}, {w};"
    };
    (f32_from_f16) => {
        "cvt.f32.f16 {s}, {j};"
    };
    (bf16_pair_from_f32) => {
        "cvt.rn.bf16x2.f32 {s}, {n}, {w};"
    };
    (e4m3_pair_from_f32) => {
        "cvt.rn.satfinite.e4m3x2.f32 {k}, {n}, {w};"
    };
    (e5m2_pair_from_f32) => {
        "cvt.rn.satfinite.e5m2x2.f32 {k}, {n}, {w};"
    };
    (f16_pair_from_e4m3) => {
        "cvt.rn.f16x2.e4m3x2 {s}, {j};"
    };
}

#[cfg(target_arch = "nvptx64")]
mod ptx;
#[cfg_attr(target_feature = "sm_90", allow(dead_code, reason = "other GPUs need the rest"))]
pub(crate) mod soft;

#[cfg(target_arch = "nvptx64")]
pub(crate) use ptx::*;
#[cfg(not(target_arch = "nvptx64"))]
pub(crate) use soft::*;

/// A conversion, for the tests that assemble each line alone.
#[cfg(not(target_arch = "nvptx64"))]
#[doc(hidden)]
#[derive(Clone, Copy, Debug)]
pub struct Conversion {
    /// The line.
    pub row: super::OperationRow,
    /// True if GPUs before sm_90 have it, too.
    pub everywhere: bool,
}

#[cfg(not(target_arch = "nvptx64"))]
macro_rules! conversions {
    ($($name:ident $ptx:literal $everywhere:literal)*) => {
        /// Every conversion of this module.
        #[doc(hidden)]
        pub const CONVERSIONS: &[Conversion] = &[
            $(Conversion {
                row: super::table::row(stringify!($name), $ptx, statement!($name)),
                everywhere: $everywhere,
            },)*
        ];
    };
}

#[cfg(not(target_arch = "nvptx64"))]
conversions! {
    f16_pair_from_f32 "cvt.rn.f16x2.f32" true
    f32_from_f16 "cvt.f32.f16" true
    bf16_pair_from_f32 "cvt.rn.bf16x2.f32" true
    e4m3_pair_from_f32 "cvt.rn.satfinite.e4m3x2.f32" false
    e5m2_pair_from_f32 "cvt.rn.satfinite.e5m2x2.f32" false
    f16_pair_from_e4m3 "cvt.rn.f16x2.e4m3x2" false
}
