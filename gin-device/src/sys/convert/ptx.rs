// SPDX-License-Identifier: MIT OR Apache-2.0
//! The conversions as PTX.

use core::arch::asm;

#[cfg(not(target_feature = "sm_90"))]
pub(crate) use super::soft::{e4m3_pair_from_f32, e5m2_pair_from_f32, f16_pair_from_e4m3};
pub(crate) use super::soft::{f32_from_ue8m0, ue8m0_from_f32};

macro_rules! narrow_pair {
    ($name:ident $code:ident $class:ident $ty:ident) => {
        #[inline(always)]
        pub(crate) fn $name(high: f32, low: f32) -> $ty {
            let pair: $ty;
            // Safety: this computes with registers.
            unsafe {
                asm!(
                    statement!($name),
                    $code = out($class) pair, n = in(reg32) high, w = in(reg32) low,
                    options(pure, nomem, nostack, preserves_flags),
                );
            }
            pair
        }
    };
}

narrow_pair! { f16_pair_from_f32 s reg32 u32 }
narrow_pair! { bf16_pair_from_f32 s reg32 u32 }
#[cfg(target_feature = "sm_90")]
narrow_pair! { e4m3_pair_from_f32 k reg16 u16 }
#[cfg(target_feature = "sm_90")]
narrow_pair! { e5m2_pair_from_f32 k reg16 u16 }

#[inline(always)]
pub(crate) fn f32_from_f16(code: u16) -> f32 {
    let value: f32;
    // Safety: this computes with registers.
    unsafe {
        asm!(
            statement!(f32_from_f16),
            s = out(reg32) value, j = in(reg16) code, options(pure, nomem, nostack, preserves_flags),
        );
    }
    value
}

#[cfg(target_feature = "sm_90")]
#[inline(always)]
pub(crate) fn f16_pair_from_e4m3(codes: u16) -> u32 {
    let pair: u32;
    // Safety: this computes with registers.
    unsafe {
        asm!(
            statement!(f16_pair_from_e4m3),
            s = out(reg32) pair, j = in(reg16) codes, options(pure, nomem, nostack, preserves_flags),
        );
    }
    pair
}
