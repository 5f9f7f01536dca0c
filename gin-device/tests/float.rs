// SPDX-License-Identifier: MIT OR Apache-2.0
//! The conversions between number formats, on a CPU, against what the formats are by definition.
//!
//! Between two neighbouring numbers of a format there is one place where the rounded result changes: the midpoint. So
//! the midpoints, and the inputs beside them, decide about all inputs, if the conversion is monotonic. The ignored
//! tests convert all 2^32 inputs: `cargo test --release -p gin-device --test float -- --ignored`.

use gin_device::float::{Bf16, E4m3, E5m2, F16, Ue8m0};

/// A format: its functions, with results as integers of 32 bits, and its definition.
struct Format {
    name: &'static str,
    from: fn(f32) -> u32,
    to: fn(u32) -> f32,
    pack: fn([f32; 2]) -> u32,
    unpack: fn(u32) -> [f32; 2],
    width: u32,
    mantissa: u32,
    bias: i32,
    /// The largest number.
    largest: u32,
    /// The result for numbers that round past the largest.
    past: u32,
    infinity: Option<u32>,
    /// The result for a NaN.
    nan: u32,
    /// The `f32` for the NaN with these bits.
    wide_nan: fn(u32) -> u32,
}

const FORMATS: [Format; 4] = [
    Format {
        name: "F16",
        from: |value| F16::from_f32(value).to_bits().into(),
        to: |bits| F16::from_bits(bits as u16).to_f32(),
        pack: F16::pack,
        unpack: F16::unpack,
        width: 16,
        mantissa: 10,
        bias: 15,
        largest: 0x7bff,
        past: 0x7c00,
        infinity: Some(0x7c00),
        nan: 0x7fff,
        wide_nan: |_| 0x7fff_ffff,
    },
    Format {
        name: "Bf16",
        from: |value| Bf16::from_f32(value).to_bits().into(),
        to: |bits| Bf16::from_bits(bits as u16).to_f32(),
        pack: Bf16::pack,
        unpack: Bf16::unpack,
        width: 16,
        mantissa: 7,
        bias: 127,
        largest: 0x7f7f,
        past: 0x7f80,
        infinity: Some(0x7f80),
        nan: 0x7fff,
        wide_nan: |bits| bits << 16,
    },
    Format {
        name: "E4m3",
        from: |value| E4m3::from_f32(value).to_bits().into(),
        to: |bits| E4m3::from_bits(bits as u8).to_f32(),
        pack: |pair| E4m3::pack(pair).into(),
        unpack: |pair| E4m3::unpack(pair as u16),
        width: 8,
        mantissa: 3,
        bias: 7,
        largest: 0x7e,
        past: 0x7e,
        infinity: None,
        nan: 0x7f,
        wide_nan: |_| 0x7fff_ffff,
    },
    Format {
        name: "E5m2",
        from: |value| E5m2::from_f32(value).to_bits().into(),
        to: |bits| E5m2::from_bits(bits as u8).to_f32(),
        pack: |pair| E5m2::pack(pair).into(),
        unpack: |pair| E5m2::unpack(pair as u16),
        width: 8,
        mantissa: 2,
        bias: 15,
        largest: 0x7b,
        past: 0x7b,
        infinity: Some(0x7c),
        nan: 0x7f,
        wide_nan: |_| 0x7fff_ffff,
    },
];

impl Format {
    fn sign(&self) -> u32 {
        1 << (self.width - 1)
    }

    /// Returns the number with these bits, which have no sign, by definition. Past the largest, the number that would
    /// follow if the exponent had no end.
    fn value(&self, bits: u32) -> f64 {
        let (exponent, fraction) = ((bits >> self.mantissa) as i32, bits & ((1 << self.mantissa) - 1));
        let unit = 2f64.powi(exponent.max(1) - self.bias - self.mantissa as i32);
        let hidden = if exponent == 0 { 0 } else { 1 << self.mantissa };
        f64::from(fraction + hidden) * unit
    }

    /// Returns the middle between the number with these bits and the next one.
    fn midpoint(&self, bits: u32) -> f32 {
        let middle = (self.value(bits) + self.value(bits + 1)) / 2.0;
        assert_eq!(f64::from(middle as f32), middle, "{}: the middle is an f32", self.name);
        middle as f32
    }

    /// Returns the number that follows `bits` as the result of a conversion.
    fn after(&self, bits: u32) -> u32 {
        if bits == self.largest { self.past } else { bits + 1 }
    }

    /// Checks a conversion of both signs.
    fn expect(&self, value: f32, bits: u32) {
        for (value, bits) in [(value, bits), (-value, bits | self.sign())] {
            let found = (self.from)(value);
            assert_eq!(found, bits, "{}: {value:e} ({:#010x}) became {found:#x}", self.name, value.to_bits());
        }
    }
}

const NANS: [u32; 7] = [0x7fc0_0000, 0xffc0_0000, 0x7f80_0001, 0xff80_0001, 0x7fff_ffff, 0xffff_ffff, 0x7fa5_5a5a];

#[test]
fn every_number_of_every_format_becomes_the_f32_that_it_is_by_definition() {
    for format in &FORMATS {
        for bits in 0..1 << format.width {
            let (magnitude, negative) = (bits & !format.sign(), bits & format.sign() != 0);
            let found = (format.to)(bits).to_bits();
            let expected = if Some(magnitude) == format.infinity {
                if negative { f32::NEG_INFINITY } else { f32::INFINITY }.to_bits()
            } else if magnitude > format.largest {
                (format.wide_nan)(bits)
            } else {
                let value = format.value(magnitude);
                (if negative { -value } else { value } as f32).to_bits()
            };
            assert_eq!(found, expected, "{} {bits:#x}: {found:#010x} for {expected:#010x}", format.name);
        }
    }
}

#[test]
fn every_number_becomes_itself_again() {
    for format in &FORMATS {
        for bits in 0..=format.largest {
            format.expect((format.to)(bits), bits);
        }
    }
}

#[test]
fn inputs_beside_every_midpoint_round_to_the_nearest_and_midpoints_to_the_even_number() {
    for format in &FORMATS {
        for bits in 0..=format.largest {
            let (middle, next) = (format.midpoint(bits), format.after(bits));
            format.expect(middle.next_down(), bits);
            format.expect(middle, if bits % 2 == 0 { bits } else { next });
            format.expect(middle.next_up(), next);
            // Beside the numbers themselves.
            let value = format.value(bits) as f32;
            format.expect(value.next_up(), bits);
            if bits != 0 {
                format.expect(value.next_down(), bits);
            }
        }
    }
}

#[test]
fn numbers_past_the_largest_and_infinities_become_infinity_or_the_largest() {
    for format in &FORMATS {
        let mut value = format.midpoint(format.largest).next_up();
        while value.is_finite() {
            format.expect(value, format.past);
            value *= 1.03;
        }
        format.expect(f32::MAX, format.past);
        format.expect(f32::INFINITY, format.past);
    }
    // The largest numbers, as the documentation has them.
    assert_eq!(
        FORMATS.each_ref().map(|format| format.value(format.largest) as f32),
        [65504.0, 3.3895314e38, 448.0, 57344.0]
    );
}

#[test]
fn the_least_subnormal_inputs_become_zeros_of_their_sign() {
    for format in &FORMATS {
        for bits in [0, 1, 2, 0x3fff] {
            format.expect(f32::from_bits(bits), 0);
        }
    }
}

#[test]
fn nans_lose_sign_and_payload() {
    for format in &FORMATS {
        for bits in NANS {
            assert_eq!((format.from)(f32::from_bits(bits)), format.nan, "{} of {bits:#010x}", format.name);
        }
    }
}

#[test]
fn packed_conversions_are_two_conversions_with_the_first_number_in_the_lower_half() {
    let inputs = [0.0f32, -0.0, 1.0, -1.5, 3.3, 1e-6, 447.0, 1e30, f32::NAN, f32::NEG_INFINITY];
    for format in &FORMATS {
        for low in inputs {
            for high in inputs {
                let pair = (format.pack)([low, high]);
                let expected = (format.from)(low) | (format.from)(high) << format.width;
                assert_eq!(pair, expected, "{} of {low} and {high}", format.name);
                let each =
                    [pair & (2 * format.sign() - 1), pair >> format.width].map(|bits| (format.to)(bits).to_bits());
                assert_eq!((format.unpack)(pair).map(f32::to_bits), each, "{} of {pair:#x}", format.name);
            }
        }
    }
}

#[test]
fn half_numbers_agree_with_another_implementation() {
    for bits in 0..=u16::MAX {
        let (own, other) = (F16::from_bits(bits).to_f32(), half::f16::from_bits(bits).to_f32());
        assert!(own == other || own.is_nan() && other.is_nan(), "F16 {bits:#x}: {own} and {other}");
    }
    // A step that meets every exponent and no pattern of the mantissa twice in a row.
    for bits in (0..=u32::MAX).step_by(9973) {
        let value = f32::from_bits(bits);
        if !value.is_nan() {
            assert_eq!(F16::from_f32(value).to_bits(), half::f16::from_f32(value).to_bits(), "F16 of {bits:#010x}");
            assert_eq!(Bf16::from_f32(value).to_bits(), half::bf16::from_f32(value).to_bits(), "Bf16 of {bits:#010x}");
        }
    }
}

/// Returns the power of two with these bits.
fn power(bits: u8) -> f64 {
    2f64.powi(i32::from(bits) - 127)
}

#[test]
fn powers_of_two_are_those_of_their_exponents_and_round_as_asked() {
    for bits in 0..=0xfeu8 {
        let value = Ue8m0::from_bits(bits).to_f32();
        assert_eq!(f64::from(value), power(bits));
        let both = |value: f32| (Ue8m0::from_f32_down(value).to_bits(), Ue8m0::from_f32_up(value).to_bits());
        for value in [value, -value] {
            assert_eq!(both(value), (bits, bits), "{value:e}");
            let (above, below) = (bits.min(0xfd) + 1, bits.saturating_sub(1));
            // `next_up` of a negative number is nearer to 0.
            let away = f32::from_bits(value.to_bits() + 1);
            assert_eq!(both(away), (bits, above), "{away:e}");
            let near = f32::from_bits(value.to_bits() - 1);
            assert_eq!(both(near), (below, bits), "{near:e}");
        }
    }
    for value in [0.0f32, -0.0, 1e-45, -1e-45] {
        assert_eq!((Ue8m0::from_f32_down(value).to_bits(), Ue8m0::from_f32_up(value).to_bits()), (0, 0), "{value:e}");
    }
    for value in [f32::MAX, f32::MIN, f32::INFINITY, f32::NEG_INFINITY] {
        assert_eq!((Ue8m0::from_f32_down(value).to_bits(), Ue8m0::from_f32_up(value).to_bits()), (0xfe, 0xfe));
    }
    for bits in NANS {
        let value = f32::from_bits(bits);
        assert_eq!((Ue8m0::from_f32_down(value).to_bits(), Ue8m0::from_f32_up(value).to_bits()), (0xff, 0xff));
    }
    assert_eq!(Ue8m0::from_bits(0xff).to_f32().to_bits(), 0x7fff_0000);
}

/// Calls `check` on inputs without a sign, in ascending order in each of several threads. They are every 251st, or all
/// 2^31 if `GIN_ALL_INPUTS` is set, which takes minutes. `start` prepares a thread that begins with an input.
fn inputs<S>(start: impl Fn(u32) -> S + Sync, check: impl Fn(&mut S, u32) + Sync) {
    let step = if std::env::var_os("GIN_ALL_INPUTS").is_some() { 1 } else { 251 };
    let threads = std::thread::available_parallelism().map_or(1, usize::from) as u32;
    let share = (1u32 << 31).div_ceil(threads);
    std::thread::scope(|scope| {
        for thread in 0..threads {
            let (start, check) = (&start, &check);
            scope.spawn(move || {
                let first = thread * share;
                let mut state = start(first);
                for bits in (first..first.saturating_add(share).min(1 << 31)).step_by(step) {
                    check(&mut state, bits);
                }
            });
        }
    });
}

#[test]
fn inputs_of_all_sizes_round_to_the_nearest_number() {
    for format in &FORMATS {
        // The ends of the inputs that become each number: the midpoint after it belongs to the even one of the two.
        let ends: Vec<(u32, bool)> =
            (0..=format.largest).map(|bits| (format.midpoint(bits).to_bits(), bits % 2 == 0)).collect();
        let ends_before = |input: u32, (end, inclusive): (u32, bool)| input > end || input == end && !inclusive;
        let start = |first: u32| ends.partition_point(|end| ends_before(first, *end));
        inputs(start, |next, bits| {
            let expected = if bits > 0x7f80_0000 {
                format.nan
            } else {
                while ends.get(*next).is_some_and(|end| ends_before(bits, *end)) {
                    *next += 1;
                }
                if *next == ends.len() { format.past } else { *next as u32 }
            };
            let signed = if bits > 0x7f80_0000 { expected } else { expected | format.sign() };
            let found = ((format.from)(f32::from_bits(bits)), (format.from)(f32::from_bits(bits | 1 << 31)));
            assert_eq!(found, (expected, signed), "{} of {bits:#010x} and its negative", format.name);
        });
    }
}

#[test]
fn inputs_of_all_sizes_round_to_the_next_power_of_two_up_and_down() {
    inputs(
        |_| (),
        |(), bits| {
            let value = f64::from(f32::from_bits(bits));
            for bits in [bits, bits | 1 << 31] {
                let input = f32::from_bits(bits);
                let (down, up) = (Ue8m0::from_f32_down(input).to_bits(), Ue8m0::from_f32_up(input).to_bits());
                let right = if value.is_nan() {
                    (down, up) == (0xff, 0xff)
                } else if value > power(0xfe) {
                    (down, up) == (0xfe, 0xfe)
                } else if value < power(0) {
                    (down, up) == (0, 0)
                } else {
                    power(down) <= value && value < 2.0 * power(down) && value <= power(up) && power(up) < 2.0 * value
                };
                assert!(right, "{bits:#010x} became {down:#x} and {up:#x}");
            }
        },
    );
}
