// SPDX-License-Identifier: MIT OR Apache-2.0
//! Numbers of 8, 16 and 32 bits, and FP8 with scales.

/// Elements that share a scale.
pub const SCALED: usize = 128;

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

/// A type of elements that come back.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    /// BF16.
    Bf16,
    /// IEEE's binary16.
    F16,
    /// FP32.
    F32,
}

impl Kind {
    /// Appends the bytes of the element nearest to a value of at most 65,000, ties to even.
    pub fn push(self, value: f32, to: &mut Vec<u8>) {
        match self {
            Self::Bf16 => to.extend(narrow(value).to_le_bytes()),
            Self::F16 => to.extend(half(value).to_le_bytes()),
            Self::F32 => to.extend(value.to_le_bytes()),
        }
    }

    /// Returns the bytes of BF16 as elements of this type.
    pub fn bytes(self, elements: &[u16]) -> Vec<u8> {
        let mut bytes = Vec::new();
        elements.iter().for_each(|&bits| self.push(widen(bits), &mut bytes));
        bytes
    }

    /// Returns the bytes of rows of `hidden` elements with these values: of row, column.
    pub fn rows(self, rows: usize, hidden: usize, value: &dyn Fn(usize, usize) -> f32) -> Vec<u8> {
        let mut bytes = Vec::new();
        for row in 0..rows {
            (0..hidden).for_each(|column| self.push(value(row, column), &mut bytes));
        }
        bytes
    }
}

/// Returns a value rounded to a multiple of `unit`, a power of two, ties to even.
fn rounded(value: f32, unit: f64) -> f64 {
    // The quotient is exact.
    (f64::from(value) / unit).round_ties_even() * unit
}

/// Returns the nearest binary16 of a value of at most 65,000, as bits.
fn half(value: f32) -> u16 {
    let sign = ((value.to_bits() >> 16) & 0x8000) as u16;
    let exponent = (value.abs().max(f32::MIN_POSITIVE).to_bits() >> 23) as i32 - 127;
    // Subnormal numbers have the unit of the least normal ones.
    let unit = f64::from(exponent.max(-14) - 10).exp2();
    let magnitude = rounded(value.abs(), unit);
    let exponent = if magnitude < (-14f64).exp2() { -15 } else { magnitude.log2().floor() as i32 };
    let fraction = magnitude / f64::from(exponent.max(-14) - 10).exp2();
    sign | ((exponent + 15) as u16) << 10 | (fraction as u16 & 0x3ff)
}

/// Returns the value of an E4M3 that is a number.
pub(crate) fn widen_e4m3(bits: u8) -> f32 {
    let (sign, exponent, fraction) = (bits >> 7, i32::from(bits >> 3 & 15), f32::from(bits & 7));
    let magnitude =
        if exponent == 0 { fraction / 8.0 } else { 1.0 + fraction / 8.0 } * ((exponent.max(1) - 7) as f32).exp2();
    if sign == 0 { magnitude } else { -magnitude }
}

/// Returns the E4M3 nearest to a value, ties to even, at most 448, as bits.
pub(crate) fn e4m3(value: f32) -> u8 {
    let sign = ((value.to_bits() >> 24) & 0x80) as u8;
    let exponent = (value.abs().max(f32::MIN_POSITIVE).to_bits() >> 23) as i32 - 127;
    let magnitude = rounded(value.abs(), f64::from(exponent.max(-6) - 3).exp2()).min(448.0);
    let exponent = if magnitude < (-6f64).exp2() { -7 } else { magnitude.log2().floor() as i32 };
    let fraction = magnitude / f64::from(exponent.max(-6) - 3).exp2();
    sign | ((exponent + 7) as u8) << 3 | (fraction as u8 & 7)
}

/// Returns a row of BF16 as E4M3, and the scale of each [`SCALED`] elements; with `powers`, powers of two.
pub fn quantized(row: &[u16], powers: bool) -> (Vec<u8>, Vec<f32>) {
    let (mut elements, mut scales) = (Vec::new(), Vec::new());
    for block in row.chunks(SCALED) {
        let max = block.iter().map(|&bits| widen(bits).abs()).fold(1e-4, f32::max);
        let mut scale = max / 448.0;
        let mut factor = 448.0 / max;
        if powers {
            let bits = scale.to_bits();
            scale = f32::from_bits((bits + 0x7f_ffff) & 0x7f80_0000);
            factor = 1.0 / scale;
        }
        scales.push(scale);
        elements.extend(block.iter().map(|&bits| e4m3(widen(bits) * factor)));
    }
    (elements, scales)
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

    #[test]
    fn every_e4m3_is_nearest_to_its_value() {
        assert_eq!([0x00, 0x01, 0x38, 0xc0, 0x7e].map(widen_e4m3), [0.0, 1.0 / 512.0, 1.0, -2.0, 448.0]);
        assert!((0..=u8::MAX).filter(|bits| bits & 0x7f != 0x7f).all(|bits| e4m3(widen_e4m3(bits)) == bits));
    }

    #[test]
    fn numbers_of_8_and_16_bits_are_the_nearest_ones() {
        // binary16: 1, its neighbour, ties, the largest, the least, half of the least.
        for (value, bits) in [
            (1.0, 0x3c00),
            (-1.000_976_6, 0xbc01),
            (1.000_488_3, 0x3c00),
            (1.001_464_8, 0x3c02),
            (65_504.0, 0x7bff),
            (5.960_464_5e-8, 1),
            (2.980_232_2e-8, 0),
            (0.0, 0),
            (2047.5, 0x6800),
        ] {
            assert_eq!(half(value), bits, "{value}");
        }
        // E4M3: 1, the largest and past it, ties, the least normal, the least, half of it.
        for (value, bits) in [
            (1.0, 0x38),
            (-448.0, 0xfe),
            (1e9, 0x7e),
            (1.0625, 0x38),
            (1.1875, 0x3a),
            (0.015_625, 0x08),
            (0.001_953_125, 1),
            (0.000_976_562_5, 0),
            (15.9, 0x58),
        ] {
            assert_eq!(e4m3(value), bits, "{value}");
        }
    }

    #[test]
    fn a_scale_makes_the_greatest_magnitude_the_largest_number() {
        let row: Vec<u16> = (0..256).map(|index| narrow((index % 100) as f32 - 40.0)).collect();
        let (elements, scales) = quantized(&row, false);
        assert_eq!((elements.len(), scales.len()), (256, 2));
        assert_eq!((elements[99], scales[0]), (0x7e, 59.0 / 448.0));
        let (elements, scales) = quantized(&row, true);
        assert_eq!((elements[99], scales[0]), (e4m3(59.0 * 4.0), 0.25));
        assert_eq!(quantized(&[0; 128], false).1, [1e-4 / 448.0]);
    }

    #[test]
    fn a_power_of_two_is_the_least_with_which_nothing_overflows() {
        // 448, its neighbours among BF16, and magnitudes that are powers of two or half way between.
        for max in [448.0, 446.0, 450.0, 1.0, 1.5, 1e-4, 3e38, 0.0] {
            let max = widen(narrow(max));
            let mut row = [0u16; SCALED];
            row[7] = narrow(-max);
            let (elements, scales) = quantized(&row, true);
            let (scale, max) = (f64::from(scales[0]), f64::from(max.max(1e-4)));
            assert_eq!(scale.log2().fract(), 0.0, "{max}: {scale}");
            assert!(max <= 448.0 * scale && max > 448.0 * scale / 2.0, "{max}: {scale}");
            let exact = -f64::from(widen(narrow(max as f32))) / scale;
            assert_eq!(elements[7], if row[7] & 0x7fff == 0 { 0x80 } else { e4m3(exact as f32) }, "{max}");
        }
    }
}
