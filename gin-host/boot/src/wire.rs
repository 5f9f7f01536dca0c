// SPDX-License-Identifier: MIT OR Apache-2.0
//! Encodes values for ranks of the same version: what one rank encodes, another rank decodes.

use serde::{Deserialize, Serialize};

/// Encodes a value.
pub fn encode(value: &impl Serialize) -> Vec<u8> {
    append(value, Vec::new())
}

/// Appends an encoded value.
pub(crate) fn append(value: &impl Serialize, bytes: Vec<u8>) -> Vec<u8> {
    // Only a serializer with a limit returns an error, and a vector has none.
    postcard::to_extend(value, bytes).expect("a vector takes any value")
}

/// Decodes a value; `None` unless the bytes are one value and nothing else.
///
/// ```
/// use gin_boot::wire::{decode, encode};
/// assert_eq!(decode(&encode(&(7u64, "abc"))), Some((7u64, "abc")));
/// assert_eq!(decode::<u64>(b""), None);
/// ```
pub fn decode<'a, T: Deserialize<'a>>(bytes: &'a [u8]) -> Option<T> {
    let (value, rest) = postcard::take_from_bytes(bytes).ok()?;
    rest.is_empty().then_some(value)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_that_is_cut_short_or_too_long_is_no_value() {
        let whole = encode(&(7u64, &b"abc"[..]));
        for length in 0..whole.len() {
            assert_eq!(decode::<(u64, &[u8])>(&whole[..length]), None, "{length} bytes");
        }
        assert_eq!(decode(&whole), Some((7u64, &b"abc"[..])));
        assert_eq!(decode::<(u64, &[u8])>(&[&whole[..], &[0]].concat()), None);
        assert_eq!(decode::<&[u8]>(&[0xff; 16]), None);
    }
}
