// SPDX-License-Identifier: MIT OR Apache-2.0
//! The operations on a CPU, by the executor.

use super::{PartialSums, Sums};
use crate::exec::{ProductCall, executor};
use crate::float::{Bf16, E4m3};
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
    if !adds {
        sums.fill(0.0);
    }
    call(ProductCall { left: left.bits(), right: right.bits(), is_e4m3: false }, sums, Location::caller());
}

/// Replaces the sums by the product of 128 inner elements of E4M3. The whole warpgroup calls.
///
/// # Safety
/// - The block has 8 KB of shared memory at `left` and 16 KB at `right`, multiples of 1024, for which the
///   [module](super#order) states the order.
#[track_caller]
pub unsafe fn multiply_e4m3(sums: &mut PartialSums, left: Address, right: Address) {
    sums.fill(0.0);
    call(ProductCall { left: left.bits(), right: right.bits(), is_e4m3: true }, sums, Location::caller());
}

fn call(call: ProductCall, sums: &mut [f32], site: &'static Location<'static>) {
    match executor() {
        Some(executor) => (executor.product)(call, sums, site),
        None => panic!("a product of a warpgroup needs an executor: launch the kernel on the virtual GPU"),
    }
}

/// Does nothing: a thread has as many registers as it needs.
///
/// # Safety
/// - `REGISTERS` is a multiple of 8, 24 to 256, and not less than the threads have. Other warpgroups of the block
///   [release](decrease_registers) as many, or have done so.
pub const unsafe fn increase_registers<const REGISTERS: u32>() {}

/// Does nothing: a thread has as many registers as it needs.
///
/// # Safety
/// - `REGISTERS` is a multiple of 8, 24 to 256, and not more than the threads have.
pub const unsafe fn decrease_registers<const REGISTERS: u32>() {}

/// Adds the product of the bytes of a row, 64 inner elements of BF16 or 128 of E4M3, to a thread's sums. `left` and
/// `right` return words of the factors by their numbers; `thread` is the number in the warpgroup.
#[doc(hidden)]
pub fn multiply(
    sums: &mut [f32],
    thread: u32,
    is_e4m3: bool,
    left: impl Fn(usize) -> u64,
    right: impl Fn(usize) -> u64,
) {
    let elements = |factor: &dyn Fn(usize) -> u64, row: u32| elements(factor, row, is_e4m3);
    let inner = if is_e4m3 { 128 } else { 64 };
    let (warp, lane) = (thread / 32, thread % 32);
    let lefts = [0, 8].map(|further| elements(&left, 16 * warp + lane / 4 + further));
    for column in 0..sums.len() as u32 / 2 {
        let right = elements(&right, column / 2 * 8 + lane % 4 * 2 + column % 2);
        for (half, left) in lefts.iter().enumerate() {
            let sum = &mut sums[(4 * (column / 2) + column % 2) as usize + 2 * half];
            *sum = left.iter().zip(&right).take(inner).fold(*sum, |sum, (left, right)| sum + left * right);
        }
    }
}

/// Returns the elements of a row of a factor: 64 of BF16, or 128 of E4M3. Unused ones are 0.
fn elements(factor: &dyn Fn(usize) -> u64, row: u32, is_e4m3: bool) -> [f32; 128] {
    let mut elements = [0.0; 128];
    for number in 0..16 {
        let bytes = factor((16 * row + (number ^ (2 * (row % 8)))) as usize).to_le_bytes();
        let at = number as usize;
        if is_e4m3 {
            for (element, &bits) in elements[8 * at..].iter_mut().zip(&bytes) {
                *element = E4m3::from_bits(bits).to_f32();
            }
        } else {
            for (element, two) in elements[4 * at..].iter_mut().zip(bytes.chunks_exact(2)) {
                *element = Bf16::from_bits(u16::from_le_bytes([two[0], two[1]])).to_f32();
            }
        }
    }
    elements
}
