// SPDX-License-Identifier: MIT OR Apache-2.0
//! Messages and keys, as ranks write and read them.

/// Appends to a message.
#[derive(Debug, Default)]
pub struct Writer(pub Vec<u8>);

impl Writer {
    pub fn word(&mut self, value: u64) -> &mut Self {
        self.0.extend_from_slice(&value.to_le_bytes());
        self
    }

    pub fn bytes(&mut self, bytes: &[u8]) -> &mut Self {
        self.word(bytes.len() as u64);
        self.0.extend_from_slice(bytes);
        self
    }
}

/// Reads a message; every read past its end gives `None`.
#[derive(Debug)]
pub struct Reader<'a>(pub &'a [u8]);

impl<'a> Reader<'a> {
    pub fn word(&mut self) -> Option<u64> {
        let (word, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(u64::from_le_bytes(*word))
    }

    pub fn bytes(&mut self) -> Option<&'a [u8]> {
        let length = usize::try_from(self.word()?).ok()?;
        let (bytes, rest) = self.0.split_at_checked(length)?;
        self.0 = rest;
        Some(bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_that_is_cut_short_reads_as_nothing() {
        let mut message = Writer::default();
        message.word(7).bytes(b"abc");
        let whole = message.0;
        for length in 0..whole.len() {
            let mut reader = Reader(&whole[..length]);
            assert!(reader.word().and_then(|_| reader.bytes()).is_none(), "{length} bytes");
        }
        let mut reader = Reader(&whole);
        assert_eq!((reader.word(), reader.bytes()), (Some(7), Some(&b"abc"[..])));
        let mut huge = Reader(&[0xff; 16]);
        assert_eq!(huge.bytes(), None);
    }
}
