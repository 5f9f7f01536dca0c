// SPDX-License-Identifier: MIT OR Apache-2.0
//! Products of matrices of BF16.

use crate::number::{SCALED, e4m3, widen_e4m3};
use crate::{narrow, widen};

/// Returns an element of a factor: a whole number from -8 to 8. So products of up to 2^18 inner elements are exact in
/// FP32, in any order.
#[must_use]
pub fn factor(key: u64, row: usize, at: usize) -> u16 {
    // Steele, Lea, Flood 2014.
    let word = (key << 48 ^ (row as u64) << 24 ^ at as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let word = (word ^ word >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    narrow(((word >> 33) % 17) as f32 - 8.0)
}

/// Returns an element of a product, of a row of each factor: the sum in FP32, rounded once.
#[must_use]
pub fn product(left: &[u16], right: &[u16]) -> u16 {
    narrow(left.iter().zip(right).fold(0.0, |sum, (&left, &right)| sum + widen(left) * widen(right)))
}

/// Returns the sum of products of ranks, in their order: in FP32, rounded once.
#[must_use]
pub fn sum(parts: impl IntoIterator<Item = u16>) -> u16 {
    narrow(parts.into_iter().fold(0.0, |sum, part| sum + widen(part)))
}

/// Elements of E4M3, and the scale of each [`SCALED`] of them.
pub type Scaled = (Vec<u8>, Vec<f32>);

/// Returns a row of a factor as E4M3, with scales that are powers of two; `sharing` rows have the same.
#[must_use]
pub fn scaled_factor(key: u64, row: usize, depth: usize, sharing: usize) -> Scaled {
    let scale = |block: usize| f32::exp2(((key as usize + 3 * (row / sharing) + block) % 5) as f32 - 2.0);
    let elements = (0..depth).map(|at| e4m3(widen(factor(key, row, at)))).collect();
    (elements, (0..depth / SCALED).map(scale).collect())
}

/// Returns an element of a product, of a scaled row of each factor: the exact sum of each [`SCALED`] products times
/// both scales, added up in FP32 with one rounding each.
#[must_use]
pub fn scaled_product(left: &Scaled, right: &Scaled) -> u16 {
    let blocks = left.0.chunks(SCALED).zip(right.0.chunks(SCALED)).zip(left.1.iter().zip(&right.1));
    narrow(blocks.fold(0.0, |sum, ((left, right), (left_scale, right_scale))| {
        let exact = left.iter().zip(right).map(|(&left, &right)| widen_e4m3(left) * widen_e4m3(right)).sum::<f32>();
        exact.mul_add(left_scale * right_scale, sum)
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_product_is_rounded_once() {
        let row = |values: &[f32]| values.iter().map(|&value| narrow(value)).collect::<Vec<_>>();
        assert_eq!(widen(product(&row(&[3.0, -8.0]), &row(&[5.0, 2.0]))), -1.0);
        // 256 + 1 is no BF16; the sum with the last term is.
        assert_eq!(widen(product(&row(&[16.0, 1.0, 1.0]), &row(&[16.0, 1.0, 1.0]))), 258.0);
        assert_eq!(widen(sum(row(&[256.0, 1.0, 1.0]))), 258.0);
        assert!((0..1000).all(|at| widen(factor(3, 5, at)).abs() <= 8.0));
    }

    #[test]
    fn each_block_of_a_scaled_product_has_its_scales() {
        let row = |scales: [f32; 2]| ([0x38u8; 2 * SCALED].to_vec(), scales.to_vec());
        assert_eq!(widen(scaled_product(&row([1.0, 4.0]), &row([0.5, 2.0]))), 128.0 * (0.5 + 8.0));
        assert_eq!(scaled_factor(1, 129, 256, 128).1, scaled_factor(1, 255, 256, 128).1);
        assert_ne!(scaled_factor(1, 127, 256, 128).1, scaled_factor(1, 128, 256, 128).1);
    }
}
