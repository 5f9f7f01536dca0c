// SPDX-License-Identifier: MIT OR Apache-2.0
//! The operations on a CPU, by the executor.

use super::Sums;
use crate::exec::{ProductCall, executor};
use crate::sys::shared::Address;
use core::panic::Location;

/// Adds the product of 64 inner elements to the sums, or replaces the sums by it if not `adds`. The whole warpgroup
/// calls.
///
/// # Safety
/// - The block has 8 KB of shared memory at `left` and 32 KB at `right`, multiples of 1024, for which the
///   [module](super#order) states the order.
#[track_caller]
pub unsafe fn multiply_add(sums: &mut Sums, left: Address, right: Address, adds: bool) {
    match executor() {
        Some(executor) => {
            let call = ProductCall { left: left.bits(), right: right.bits(), adds };
            (executor.product)(call, sums, Location::caller());
        }
        None => panic!("a product of a warpgroup needs an executor: launch the kernel on the virtual GPU"),
    }
}

/// Adds the product of 64 inner elements to a thread's sums, or replaces them by it. `left` and `right` return words of
/// the factors by their numbers; `thread` is the number in the warpgroup.
#[doc(hidden)]
pub fn multiply(sums: &mut Sums, thread: u32, adds: bool, left: impl Fn(usize) -> u64, right: impl Fn(usize) -> u64) {
    let (warp, lane) = (thread / 32, thread % 32);
    let lefts = [0, 8].map(|further| elements(&left, 16 * warp + lane / 4 + further));
    for column in 0..64 {
        let right = elements(&right, column / 2 * 8 + lane % 4 * 2 + column % 2);
        for (half, left) in lefts.iter().enumerate() {
            let sum = &mut sums[(4 * (column / 2) + column % 2) as usize + 2 * half];
            let first = if adds { *sum } else { 0.0 };
            *sum = left.iter().zip(&right).fold(first, |sum, (left, right)| sum + left * right);
        }
    }
}

/// Returns the elements of a row of a factor.
fn elements(factor: impl Fn(usize) -> u64, row: u32) -> [f32; 64] {
    let mut elements = [0.0; 64];
    for (number, four) in (0..).zip(elements.chunks_exact_mut(4)) {
        let word = factor((16 * row + (number ^ (2 * (row % 8)))) as usize);
        for (at, element) in four.iter_mut().enumerate() {
            *element = f32::from_bits(((word >> (16 * at)) as u32) << 16);
        }
    }
    elements
}
