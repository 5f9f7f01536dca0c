// SPDX-License-Identifier: MIT OR Apache-2.0
//! One of many kernels in a row, each of which uses what the one before it wrote.

use gin_device::prelude::*;
use gin_device::sys;
use gin_device::sys::data::{load_weak_pair, store_weak_pair};

/// Copies `pairs` times 16 bytes and adds 1 to each word, after a pause.
///
/// # Safety
/// - Both ranges are valid. Only kernels of the same stream use them.
#[kernel(launch_bounds(512))]
pub unsafe fn bench_step(from: *const u64, to: *mut u64, pairs: u32, pause_ns: u64) {
    if pause_ns > 0 {
        let start = sys::clock_ns();
        while sys::clock_ns().wrapping_sub(start) < pause_ns {
            sys::pause(1000);
        }
    }
    sys::wait_for_predecessor();
    sys::let_dependents_start();
    let stride = grid_dim().count() as u32 * Block.size();
    let mut pair = block_in_grid() * Block.size() + Block.rank();
    while pair < pairs {
        let at = 2 * pair as usize;
        // Safety: the caller's promise.
        unsafe {
            let (low, high) = load_weak_pair(from.wrapping_add(at));
            store_weak_pair(to.wrapping_add(at), low + 1, high + 1);
        }
        pair += stride;
    }
}
