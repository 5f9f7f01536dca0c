// SPDX-License-Identifier: MIT OR Apache-2.0
//! The conversions in integers. Pairs have the same order as those of the instructions: the second argument is the
//! lower half.

/// The layout of a format: a sign, an exponent, a mantissa.
struct Format {
    /// Bits of the mantissa.
    mantissa: u32,
    /// Bias of the exponent.
    bias: u32,
    /// The largest result without its sign: infinity, or the largest number if results saturate.
    max: u32,
    /// The result for a NaN.
    nan: u32,
}

const F16: Format = Format { mantissa: 10, bias: 15, max: 0x7c00, nan: 0x7fff };
const BF16: Format = Format { mantissa: 7, bias: 127, max: 0x7f80, nan: 0x7fff };
const E4M3: Format = Format { mantissa: 3, bias: 7, max: 0x7e, nan: 0x7f };
const E5M2: Format = Format { mantissa: 2, bias: 15, max: 0x7b, nan: 0x7f };

/// The NaN of an instruction whose result is an `f32`.
pub(crate) const NAN: u32 = 0x7fff_ffff;

const INFINITY: u32 = 0x7f80_0000;
/// Bits of the mantissa of an `f32`.
const MANTISSA: u32 = 23;
const BIAS: u32 = 127;

/// Returns `value / 2^shift`, rounded to the nearest integer, ties to the even one. `shift` is 1 to 31, and `value`
/// less than 2^31.
#[inline(always)]
const fn shift_right_to_even(value: u32, shift: u32) -> u32 {
    let odd = value >> shift & 1;
    (value + ((1 << (shift - 1)) - 1) + odd) >> shift
}

/// Converts the bits of an `f32`. `width` is the format's size in bits.
#[inline(always)]
const fn narrow(format: &Format, width: u32, bits: u32) -> u32 {
    let magnitude = bits & !(1 << 31);
    if magnitude > INFINITY {
        return format.nan;
    }
    let dropped = MANTISSA - format.mantissa;
    // The exponent field of the format's least normal number.
    let least = BIAS + 1 - format.bias;
    let exponent = magnitude >> MANTISSA;
    let rounded = if exponent >= least {
        // A carry out of the mantissa raises the exponent, as it must.
        shift_right_to_even(magnitude - ((BIAS - format.bias) << MANTISSA), dropped)
    } else {
        // A subnormal result: an integer multiple of the least one. Subnormal inputs have the exponent 1.
        let significand = magnitude & ((1 << MANTISSA) - 1) | ((exponent != 0) as u32) << MANTISSA;
        let shift = dropped + least - if exponent == 0 { 1 } else { exponent };
        // Past 24 the number is less than half of the least subnormal, because it is less than 2^24 units.
        if shift > MANTISSA + 1 { 0 } else { shift_right_to_even(significand, shift) }
    };
    let sign = bits >> 31 << (width - 1);
    sign | if rounded > format.max { format.max } else { rounded }
}

/// Converts to the bits of an `f32`. The caller has excluded infinities and NaNs.
#[inline(always)]
const fn widen(format: &Format, width: u32, code: u32) -> u32 {
    let sign = code >> (width - 1) << 31;
    let magnitude = code & ((1 << (width - 1)) - 1);
    let dropped = MANTISSA - format.mantissa;
    let rebias = BIAS - format.bias;
    if magnitude >> format.mantissa != 0 {
        return sign | ((magnitude << dropped) + (rebias << MANTISSA));
    }
    if magnitude == 0 {
        return sign;
    }
    // A subnormal number is normal as an `f32`: its first 1 becomes the hidden bit.
    let first = 31 - magnitude.leading_zeros();
    let exponent = rebias + 1 + first - format.mantissa;
    sign | ((exponent << MANTISSA) + ((magnitude << (MANTISSA - first)) & ((1 << MANTISSA) - 1)))
}

macro_rules! narrow {
    ($name:ident $format:ident $ty:ident) => {
        #[inline(always)]
        pub(crate) const fn $name(value: f32) -> $ty {
            narrow(&$format, $ty::BITS, value.to_bits()) as $ty
        }
    };
}

narrow! { f16_from_f32 F16 u16 }
narrow! { bf16_from_f32 BF16 u16 }
narrow! { e4m3_from_f32 E4M3 u8 }
narrow! { e5m2_from_f32 E5M2 u8 }

macro_rules! narrow_pair {
    ($name:ident $one:ident $part:ident $ty:ident) => {
        #[inline(always)]
        pub(crate) const fn $name(high: f32, low: f32) -> $ty {
            ($one(high) as $ty) << $part::BITS | $one(low) as $ty
        }
    };
}

narrow_pair! { f16_pair_from_f32 f16_from_f32 u16 u32 }
narrow_pair! { bf16_pair_from_f32 bf16_from_f32 u16 u32 }
narrow_pair! { e4m3_pair_from_f32 e4m3_from_f32 u8 u16 }
narrow_pair! { e5m2_pair_from_f32 e5m2_from_f32 u8 u16 }

#[inline(always)]
pub(crate) const fn f32_from_f16(code: u16) -> f32 {
    let magnitude = code as u32 & 0x7fff;
    f32::from_bits(if magnitude > F16.max {
        NAN
    } else if magnitude == F16.max {
        (code as u32) >> 15 << 31 | INFINITY
    } else {
        widen(&F16, u16::BITS, code as u32)
    })
}

/// Converts an E4M3 number; exact.
#[inline(always)]
const fn f16_from_e4m3(code: u8) -> u16 {
    if code & 0x7f == E4M3.nan as u8 {
        return F16.nan as u16;
    }
    f16_from_f32(f32::from_bits(widen(&E4M3, u8::BITS, code as u32)))
}

#[inline(always)]
pub(crate) const fn f16_pair_from_e4m3(codes: u16) -> u32 {
    (f16_from_e4m3((codes >> 8) as u8) as u32) << 16 | f16_from_e4m3(codes as u8) as u32
}

/// Converts a number to the exponent of a power of two, biased by 127: the next power towards zero, or away from it if
/// `up`. See [`Ue8m0`](crate::float::Ue8m0).
#[inline(always)]
pub(crate) const fn ue8m0_from_f32(value: f32, up: bool) -> u8 {
    let magnitude = value.to_bits() & !(1 << 31);
    // 2^-127 is subnormal: half of the mantissa's range.
    let code = if !up {
        magnitude >> MANTISSA
    } else if magnitude <= 1 << (MANTISSA - 1) {
        0
    } else {
        (magnitude + ((1 << MANTISSA) - 1)) >> MANTISSA
    };
    if magnitude > INFINITY {
        0xff
    } else if code > 0xfe {
        0xfe
    } else {
        code as u8
    }
}

#[inline(always)]
pub(crate) const fn f32_from_ue8m0(code: u8) -> f32 {
    f32::from_bits(match code {
        0 => 1 << (MANTISSA - 1),
        // PTX converts by way of bf16, whose NaN this is.
        0xff => BF16.nan << 16,
        _ => (code as u32) << MANTISSA,
    })
}
