// SPDX-License-Identifier: MIT OR Apache-2.0
//! The kernels.

use crate::{Lane, Tokens, combine, dispatch};
use gin_device::prelude::*;

/// Runs [`dispatch`].
///
/// # Safety
/// - As [`dispatch`].
#[kernel(launch_bounds(512))]
pub unsafe fn ep_dispatch(comm: Comm, arena: Window<u64>, lane: Lane, tokens: Tokens, phases: u32) {
    // Safety: the caller's promise.
    unsafe { dispatch(&comm, &arena, &lane, &tokens, phases) }
}

/// Runs [`combine`].
///
/// # Safety
/// - As [`combine`].
#[kernel(launch_bounds(512))]
pub unsafe fn ep_combine(comm: Comm, arena: Window<u64>, lane: Lane, tokens: Tokens, rows: u64, output: u64) {
    // Safety: the caller's promise.
    unsafe { combine(&comm, &arena, &lane, &tokens, rows, output) }
}
