// SPDX-License-Identifier: MIT OR Apache-2.0
//! The kernels, one for each format and each type of elements.

use crate::{Arranged, arrange};
use crate::{Bytes, Lane, Quantized, Sums, Tokens, combine, dispatch, plan};
use gin_device::prelude::*;

/// Runs [`plan`].
///
/// # Safety
/// - As [`plan`].
#[kernel(launch_bounds(512))]
pub unsafe fn ep_plan(arena: Window<u64>, lane: Lane, tokens: Tokens, to: u64) {
    // Safety: the caller's promise.
    unsafe { plan(&arena, &lane, &tokens, to) }
}

macro_rules! dispatches {
    ($($name:ident $format:ident;)*) => { $(
        #[doc = concat!("Runs [`dispatch`] of rows as [`", stringify!($format), "`].")]
        ///
        /// # Safety
        /// - As [`dispatch`].
        #[kernel(launch_bounds(512))]
        pub unsafe fn $name(comm: Comm, arena: Window<u64>, lane: Lane, tokens: Tokens, phases: u32) {
            // Safety: the caller's promise.
            unsafe { dispatch::<$format>(&comm, &arena, &lane, &tokens, phases) }
        }
    )* };
}

dispatches! {
    ep_dispatch Bytes;
    ep_dispatch_e4m3 Quantized;
}

macro_rules! combines {
    ($($name:ident $element:ident;)*) => { $(
        #[doc = concat!("Runs [`combine`] of [`", stringify!($element), "`].")]
        ///
        /// # Safety
        /// - As [`combine`].
        #[kernel(launch_bounds(512))]
        pub unsafe fn $name(comm: Comm, arena: Window<u64>, lane: Lane, tokens: Tokens, sums: Sums) {
            // Safety: the caller's promise.
            unsafe { combine::<$element>(&comm, &arena, &lane, &tokens, &sums) }
        }
    )* };
}

combines! {
    ep_combine_bf16 Bf16;
    ep_combine_f16 F16;
    ep_combine_f32 f32;
}

macro_rules! arranges {
    ($($name:ident $function:ident;)*) => { $(
        #[doc = concat!("Runs [`arrange::", stringify!($function), "`].")]
        ///
        /// # Safety
        /// - As that.
        #[kernel(launch_bounds(512))]
        pub unsafe fn $name(to: Arranged) {
            // Safety: the caller's promise.
            unsafe { arrange::$function(&to) }
        }
    )* };
}

arranges! {
    ep_arrange_count count;
    ep_arrange_place place;
    ep_arrange_copy copy;
}
