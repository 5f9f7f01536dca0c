// SPDX-License-Identifier: MIT OR Apache-2.0
//! Values of arguments: numbers within their limits.

use std::net::{Ipv4Addr, SocketAddr};
use std::ops::RangeInclusive;

/// Longest time limit, in milliseconds: an hour.
pub const MAX_MS: u64 = 3_600_000;

/// Returns a parser of whole numbers in `range`. Its error names the number and the range.
pub fn within<T: TryFrom<u64>>(
    range: RangeInclusive<u64>,
) -> impl Fn(&str) -> Result<T, String> + Clone + Send + Sync + 'static {
    move |text| {
        let number = text.strip_prefix('-').unwrap_or(text);
        if number.is_empty() || !number.bytes().all(|byte| byte.is_ascii_digit()) {
            return Err(format!("it is not a whole number in {}..={}", range.start(), range.end()));
        }
        let inside = text.parse().ok().filter(|number| range.contains(number));
        inside
            .and_then(|number| T::try_from(number).ok())
            .ok_or_else(|| format!("{text} is not in {}..={}", range.start(), range.end()))
    }
}

/// Returns the first word among the arguments that looks like a negative number.
pub(super) fn negative(words: impl IntoIterator<Item = String>) -> Option<String> {
    words
        .into_iter()
        .find(|word| word.strip_prefix('-').is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_digit())))
}

/// Parses the address of the endpoint: a port of the loopback interface, or an address with a port.
///
/// # Errors
/// Returns a text with the accepted forms.
pub(crate) fn parse_address(text: &str) -> Result<SocketAddr, String> {
    let port = text.parse().map(|port: u16| SocketAddr::from((Ipv4Addr::LOCALHOST, port)));
    port.or_else(|_| text.parse())
        .map_err(|_| "it is neither a port, as 9464, nor an address with a port, as 0.0.0.0:9464".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_outside_its_range_is_refused_with_the_range_and_negative_and_huge_ones_too() {
        let parse = within::<u32>(1..=1024);
        assert_eq!((parse("1"), parse("1024")), (Ok(1), Ok(1024)));
        for text in ["0", "1025", "-1", "-99999999999999999999999", "99999999999999999999999"] {
            assert_eq!(parse(text), Err(format!("{text} is not in 1..=1024")));
        }
        for text in ["", "-", "one", "1.5", "--1", "+1", "1 "] {
            assert!(parse(text).unwrap_err().contains("not a whole number in 1..=1024"), "{text}");
        }
        // The range may exceed the type.
        assert_eq!(within::<u8>(0..=999)("256"), Err("256 is not in 0..=999".to_owned()));
        assert_eq!(within::<u64>(0..=u64::MAX)("18446744073709551615"), Ok(u64::MAX));
    }

    #[test]
    fn words_that_begin_like_negative_numbers_are_found() {
        let found = |words: &[&str]| negative(words.iter().map(|word| (*word).to_owned()));
        assert_eq!(found(&["run", "-b", "--bytes", "-1KiB"]).as_deref(), Some("-1KiB"));
        assert_eq!(found(&["run", "-v", "-", "4", "--4"]), None);
    }
}
