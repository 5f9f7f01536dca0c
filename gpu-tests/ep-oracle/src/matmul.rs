// SPDX-License-Identifier: MIT OR Apache-2.0
//! Products of matrices of BF16.

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
}
