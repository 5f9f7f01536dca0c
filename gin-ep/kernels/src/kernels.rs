// SPDX-License-Identifier: MIT OR Apache-2.0
//! The kernels, one for each format and each type of elements. Kernels of one call begin by `let_dependents_start`, so
//! that the next one is on the SMs when they end.

use crate::{
    Bytes, Network, Quantized, SlotParams, Sums, TokenParams, Wide, combine, combine_over, dispatch, dispatch_into,
    dispatch_over, dispatch_shared, plan, reduce, reserve, send_metadata, send_rows,
};
use crate::{MetadataParams, PermutedRows, metadata, permute};
use gin_device::prelude::*;
use gin_device::sys::let_dependents_start;

/// Runs [`plan`].
///
/// # Safety
/// - As [`plan`].
#[kernel(launch_bounds(512))]
pub unsafe fn ep_plan(arena: Window<u64>, slot: SlotParams, tokens: TokenParams, to: u64) {
    let_dependents_start();
    // Safety: the caller's promise.
    unsafe { plan(&arena, &slot, &tokens, to) }
}

/// Runs [`reserve`].
///
/// # Safety
/// - As [`reserve`].
#[kernel(launch_bounds(512))]
pub unsafe fn ep_reserve(comm: Comm, arena: Window<u64>, slot: SlotParams, plan: u64) {
    let_dependents_start();
    // Safety: the caller's promise.
    unsafe { reserve(&comm, &arena, &slot, plan) }
}

macro_rules! dispatches {
    ($($name:ident $format:ident;)*) => { $(
        #[doc = concat!("Runs [`dispatch`] of rows as [`", stringify!($format), "`].")]
        ///
        /// # Safety
        /// - As [`dispatch`].
        #[kernel(launch_bounds(512))]
        pub unsafe fn $name(comm: Comm, arena: Window<u64>, slot: SlotParams, tokens: TokenParams, phases: u32) {
            let_dependents_start();
            // Safety: the caller's promise.
            unsafe { dispatch::<$format>(&comm, &arena, &slot, &tokens, phases) }
        }
    )* };
}

dispatches! {
    ep_dispatch Bytes;
    ep_dispatch_e4m3 Quantized;
}

macro_rules! shared_dispatches {
    ($($name:ident $format:ident;)*) => { $(
        #[doc = concat!("Runs [`dispatch_shared`] of rows as [`", stringify!($format), "`].")]
        ///
        /// # Safety
        /// - As [`dispatch_shared`].
        #[kernel(launch_bounds(256))]
        pub unsafe fn $name(comm: Comm, arena: Window<u64>, slot: SlotParams, tokens: TokenParams, phases: u32) {
            let_dependents_start();
            // Safety: the caller's promise.
            unsafe { dispatch_shared::<$format>(&comm, &arena, &slot, &tokens, phases) }
        }
    )* };
}

shared_dispatches! {
    ep_dispatch_shared Bytes;
    ep_dispatch_shared_e4m3 Quantized;
}

macro_rules! dispatches_into {
    ($($name:ident $format:ident;)*) => { $(
        #[doc = concat!("Runs [`dispatch_into`] of rows as [`", stringify!($format), "`].")]
        ///
        /// # Safety
        /// - As [`dispatch_into`].
        #[kernel(launch_bounds(256))]
        pub unsafe fn $name(comm: Comm, arena: Window<u64>, tokens: TokenParams, to: PermutedRows) {
            let_dependents_start();
            // Safety: the caller's promise.
            unsafe { dispatch_into::<$format>(&comm, &arena, &tokens, &to) }
        }
    )* };
}

dispatches_into! {
    ep_dispatch_into Bytes;
    ep_dispatch_into_e4m3 Quantized;
}

/// Runs [`send_metadata`].
///
/// # Safety
/// - As [`send_metadata`].
#[kernel(launch_bounds(512))]
pub unsafe fn ep_send_metadata(comm: Comm, arena: Window<u64>, slot: SlotParams, tokens: TokenParams) {
    let_dependents_start();
    // Safety: the caller's promise.
    unsafe { send_metadata(&comm, &arena, &slot, &tokens) }
}

macro_rules! sends {
    ($($name:ident $format:ident;)*) => { $(
        #[doc = concat!("Runs [`send_rows`] of rows as [`", stringify!($format), "`].")]
        ///
        /// # Safety
        /// - As [`send_rows`].
        #[kernel(launch_bounds(256))]
        pub unsafe fn $name(comm: Comm, arena: Window<u64>, slot: SlotParams, tokens: TokenParams) {
            let_dependents_start();
            // Safety: the caller's promise.
            unsafe { send_rows::<$format>(&comm, &arena, &slot, &tokens) }
        }
    )* };
}

sends! {
    ep_send_rows Bytes;
    ep_send_rows_e4m3 Quantized;
}

macro_rules! combines {
    ($($name:ident $element:ident;)*) => { $(
        #[doc = concat!("Runs [`combine`] of [`", stringify!($element), "`].")]
        ///
        /// # Safety
        /// - As [`combine`].
        #[kernel(launch_bounds(512))]
        pub unsafe fn $name(comm: Comm, arena: Window<u64>, slot: SlotParams, tokens: TokenParams, sums: Sums) {
            // Safety: the caller's promise.
            unsafe { combine::<$element>(&comm, &arena, &slot, &tokens, &sums) }
        }
    )* };
}

combines! {
    ep_combine_bf16 Bf16;
    ep_combine_f16 F16;
    ep_combine_f32 f32;
    ep_combine_wide Wide;
}

macro_rules! network_dispatches {
    ($($name:ident $format:ident $backend:ident;)*) => { $(
        #[doc = concat!("Runs [`dispatch_over`] of rows as [`", stringify!($format), "`], with [`", stringify!($backend), "`].")]
        ///
        /// # Safety
        /// - As [`dispatch_over`].
        #[kernel(launch_bounds(256))]
        pub unsafe fn $name(
            comm: Comm,
            arena: Window<u64>,
            slot: SlotParams,
            tokens: TokenParams,
            phases: u32,
            signals: Window<u64>,
            network: Network,
        ) {
            // Safety: the caller's promise.
            unsafe { dispatch_over::<$format, $backend>(&comm, &arena, &slot, &tokens, phases, (&signals, &network)) }
        }
    )* };
}

network_dispatches! {
    ep_dispatch_proxy Bytes Proxy;
    ep_dispatch_gdaki Bytes Gdaki;
    ep_dispatch_e4m3_proxy Quantized Proxy;
    ep_dispatch_e4m3_gdaki Quantized Gdaki;
}

macro_rules! network_combines {
    ($($name:ident $element:ident $backend:ident;)*) => { $(
        #[doc = concat!("Runs [`combine_over`] of [`", stringify!($element), "`], with [`", stringify!($backend), "`].")]
        ///
        /// # Safety
        /// - As [`combine_over`].
        #[kernel(launch_bounds(256))]
        pub unsafe fn $name(
            comm: Comm,
            arena: Window<u64>,
            slot: SlotParams,
            tokens: TokenParams,
            sums: Sums,
            signals: Window<u64>,
            network: Network,
        ) {
            // Safety: the caller's promise.
            unsafe { combine_over::<$element, $backend>(&comm, &arena, &slot, &tokens, &sums, (&signals, &network)) }
        }
    )* };
}

network_combines! {
    ep_combine_bf16_proxy Bf16 Proxy;
    ep_combine_bf16_gdaki Bf16 Gdaki;
    ep_combine_f16_proxy F16 Proxy;
    ep_combine_f16_gdaki F16 Gdaki;
    ep_combine_f32_proxy f32 Proxy;
    ep_combine_f32_gdaki f32 Gdaki;
    ep_combine_wide_proxy Wide Proxy;
    ep_combine_wide_gdaki Wide Gdaki;
}

macro_rules! permutes {
    ($($name:ident $function:ident;)*) => { $(
        #[doc = concat!("Runs [`permute::", stringify!($function), "`].")]
        ///
        /// # Safety
        /// - As that.
        #[kernel(launch_bounds(512))]
        pub unsafe fn $name(to: PermutedRows) {
            let_dependents_start();
            // Safety: the caller's promise.
            unsafe { permute::$function(&to) }
        }
    )* };
}

permutes! {
    ep_permute_count count;
    ep_permute_assign assign;
    ep_permute_copy copy;
    ep_permute_details details;
}

/// Runs [`metadata`].
///
/// # Safety
/// - As that.
#[kernel(launch_bounds(512))]
pub unsafe fn ep_permute_metadata(to: PermutedRows, into: MetadataParams) {
    let_dependents_start();
    // Safety: the caller's promise.
    unsafe { metadata(&to, &into) }
}

/// Runs [`permute::copy_arriving`].
///
/// # Safety
/// - As that.
#[kernel(launch_bounds(256))]
pub unsafe fn ep_permute_arriving(comm: Comm, arena: Window<u64>, to: PermutedRows) {
    // Safety: the caller's promise.
    unsafe { permute::copy_arriving(&comm, &arena, &to) }
}

macro_rules! reduces {
    ($($name:ident $element:ident;)*) => { $(
        #[doc = concat!("Runs [`reduce`] of [`", stringify!($element), "`].")]
        ///
        /// # Safety
        /// - As [`reduce`].
        #[kernel(launch_bounds(512))]
        pub unsafe fn $name(to: PermutedRows, rows: u64) {
            // Safety: the caller's promise.
            unsafe { reduce::<$element>(&to, rows) }
        }
    )* };
}

reduces! {
    ep_reduce_bf16 Bf16;
    ep_reduce_f16 F16;
    ep_reduce_f32 f32;
    ep_reduce_wide Wide;
}
