// SPDX-License-Identifier: MIT OR Apache-2.0
//! Sizes in bytes as people write them: `4096`, `64KiB`, `1MiB`.

/// Parses a number of bytes: a whole number, optionally followed by `B`, by `KiB`, `MiB` or `GiB` (powers of 1024), or
/// by `kB`, `MB` or `GB` (powers of 1000).
///
/// # Errors
/// Returns a text that names the value and the accepted forms.
pub fn parse(text: &str) -> Result<u64, String> {
    let trimmed = text.trim();
    if trimmed.starts_with('-') {
        return Err(format!("{text:?}: a size is not negative"));
    }
    let digits = trimmed.find(|c: char| !c.is_ascii_digit()).unwrap_or(trimmed.len());
    let (number, unit) = trimmed.split_at(digits);
    let factor: u64 = match unit.trim() {
        "" | "B" => 1,
        "KiB" | "K" | "k" => 1 << 10,
        "MiB" | "M" => 1 << 20,
        "GiB" | "G" => 1 << 30,
        "kB" | "KB" => 1_000,
        "MB" => 1_000_000,
        "GB" => 1_000_000_000,
        other => return Err(format!("unknown unit {other:?}: use B, KiB, MiB, GiB, kB, MB or GB")),
    };
    let number: u64 = number
        .parse()
        .map_err(|_| format!("{text:?} is not a size: a whole number with an optional unit, like 64KiB"))?;
    number.checked_mul(factor).ok_or_else(|| format!("{text:?} is more than 2^64 bytes"))
}

/// Formats a number of bytes in the largest unit that divides it.
pub fn show(bytes: u64) -> String {
    for (unit, shift) in [("GiB", 30), ("MiB", 20), ("KiB", 10)] {
        if bytes != 0 && bytes.is_multiple_of(1 << shift) {
            return format!("{}{unit}", bytes >> shift);
        }
    }
    format!("{bytes}B")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_as_people_write_them() {
        assert_eq!(parse("1"), Ok(1));
        assert_eq!(parse("64KiB"), Ok(65536));
        assert_eq!(parse(" 1 MiB "), Ok(1 << 20));
        assert_eq!(parse("3kB"), Ok(3000));
        assert_eq!(parse("2G"), Ok(2 << 30));
    }

    #[test]
    fn what_is_no_size_is_refused_with_the_reason() {
        assert!(parse("").unwrap_err().contains("whole number"));
        assert!(parse("-1").unwrap_err().contains("negative"));
        assert!(parse("1.5KiB").unwrap_err().contains("unit"));
        assert!(parse("12 parsecs").unwrap_err().contains("parsecs"));
        assert!(parse("99999999999GiB").unwrap_err().contains("2^64"));
        assert!(parse("999999999999999999999999").unwrap_err().contains("whole number"));
    }

    #[test]
    fn sizes_are_shown_in_the_largest_unit_that_divides_them() {
        for bytes in [0, 1, 1023, 1024, 1 << 20, 3 << 29, 5000] {
            assert_eq!(parse(&show(bytes)), Ok(bytes));
        }
        assert_eq!(show(3 << 20), "3MiB");
    }
}
