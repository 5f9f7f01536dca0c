// SPDX-License-Identifier: MIT OR Apache-2.0
//! The operations on a CPU, by exchanges among the lanes.

use crate::exec::{ExchangeCall, executor};
use crate::sys::data::load_relaxed_sys_pair;
use crate::sys::shared::{Address, load_weak_u32, store_weak_pair};
use core::panic::Location;

/// Starts a copy of 16 bytes into shared memory; of none if `bytes` is 0, which stores zeros.
///
/// # Safety
/// - Both addresses are multiples of 16; the block has shared memory at `to`. If `bytes` is 16, `from` is valid for
///   reading, in global memory, and no thread writes it meanwhile. `bytes` is 0 or 16.
#[inline(always)]
#[track_caller]
pub unsafe fn copy_async(to: Address, from: u64, bytes: u32) {
    // Safety: the caller's promise.
    unsafe {
        let (low, high) = if bytes == 0 { (0, 0) } else { load_relaxed_sys_pair(from as usize as *const u64) };
        store_weak_pair(to, low, high);
    }
}

/// Ends a group of copies of the calling thread.
#[inline(always)]
pub fn commit_copies() {}

/// Waits until at most the last `LEFT` groups of copies of the calling thread are incomplete.
#[inline(always)]
pub fn await_copies<const LEFT: u32>() {}

/// Returns the values of all lanes.
#[track_caller]
fn exchange(value: u64) -> [u64; 32] {
    let mut values = [0; 32];
    match executor() {
        Some(executor) => {
            (executor.exchange)(
                ExchangeCall { mask: u32::MAX, value, orders: false, site: Location::caller() },
                &mut values,
            );
        }
        None => panic!("a product of a warp needs an executor: launch the kernel on the virtual GPU"),
    }
    values
}

/// Loads four matrices of 8 x 8 elements. Lanes `8 * i` to `8 * i + 7` name the rows of matrix `i`. The whole warp
/// calls.
///
/// # Safety
/// - The block has 16 bytes of shared memory there, and the address is a multiple of 16.
#[track_caller]
pub unsafe fn load_matrices(row: Address) -> [u32; 4] {
    let (rows, lane) = (exchange(row.bits()), crate::coop::lane() as usize);
    // Safety: the caller's promise, for the lane that named the row.
    core::array::from_fn(|matrix| unsafe {
        load_weak_u32(Address::from_bits(rows[8 * matrix + lane / 4]).at(4 * (lane as u32 % 4)))
    })
}

/// Returns one of the two numbers of a register.
fn number(register: u32, high: usize) -> f32 {
    f32::from_bits(if high == 0 { register << 16 } else { register & 0xffff_0000 })
}

/// Adds the product of two matrices of BF16 to a sum. The whole warp calls.
#[track_caller]
pub fn multiply_add(sum: &mut [f32; 4], left: [u32; 4], right: [u32; 2]) {
    let pair = |low: u32, high: u32| u64::from(high) << 32 | u64::from(low);
    // By half of the inner index: upper and lower rows of the left factor.
    let lefts = [exchange(pair(left[0], left[1])), exchange(pair(left[2], left[3]))];
    let rights = exchange(pair(right[0], right[1]));
    let lane = crate::coop::lane() as usize;
    for (index, sum) in sum.iter_mut().enumerate() {
        let (lower, column) = (index / 2, lane % 4 * 2 + index % 2);
        for inner in 0..16 {
            let (half, at, high) = (inner / 8, inner % 8 / 2, inner % 2);
            let left = number((lefts[half][lane / 4 * 4 + at] >> (32 * lower)) as u32, high);
            let right = number((rights[column * 4 + at] >> (32 * half)) as u32, high);
            *sum += left * right;
        }
    }
}
