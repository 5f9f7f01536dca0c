// SPDX-License-Identifier: MIT OR Apache-2.0
//! BF16 as bits.

/// Returns the nearest BF16, ties to even. A NaN stays one, and is quiet.
pub fn narrow(value: f32) -> u16 {
    let bits = value.to_bits();
    if value.is_nan() {
        return (bits >> 16) as u16 | 0x40;
    }
    let tie = (bits >> 16) & 1;
    // An overflow carries into the exponent, up to infinity.
    ((bits + 0x7fff + tie) >> 16) as u16
}

/// Returns the value, which is exact.
pub fn widen(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounding_is_to_nearest_even() {
        for (value, bits) in [
            (0.0, 0),
            (-0.0, 0x8000),
            (1.0, 0x3f80),
            // Half way between two: to the even one.
            (1.003_906_2, 0x3f80),
            (1.011_718_8, 0x3f82),
            (1.003_906_4, 0x3f81),
            (f32::MAX, 0x7f80),
            (f32::INFINITY, 0x7f80),
            (-1e-40, 0x8001),
        ] {
            assert_eq!(narrow(value), bits, "{value}");
        }
        assert!(widen(narrow(f32::NAN)).is_nan());
        assert!((0..=u16::MAX).filter(|&bits| !widen(bits).is_nan()).all(|bits| narrow(widen(bits)) == bits));
    }
}
