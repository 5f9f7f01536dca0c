// SPDX-License-Identifier: MIT OR Apache-2.0
//! What ranks send each other when they set something up, and agreement on how it went.

use super::{BootstrapError, CommError};

/// Appends to a message.
#[derive(Debug, Default)]
pub(super) struct Writer(pub(super) Vec<u8>);

impl Writer {
    pub(super) fn word(&mut self, value: u64) -> &mut Self {
        self.0.extend_from_slice(&value.to_le_bytes());
        self
    }

    pub(super) fn bytes(&mut self, bytes: &[u8]) -> &mut Self {
        self.word(bytes.len() as u64);
        self.0.extend_from_slice(bytes);
        self
    }
}

/// Reads a message; every read past its end gives `None`.
#[derive(Debug)]
pub(super) struct Reader<'a>(pub(super) &'a [u8]);

impl<'a> Reader<'a> {
    pub(super) fn word(&mut self) -> Option<u64> {
        let (word, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(u64::from_le_bytes(*word))
    }

    pub(super) fn bytes(&mut self) -> Option<&'a [u8]> {
        let length = usize::try_from(self.word()?).ok()?;
        let (bytes, rest) = self.0.split_at_checked(length)?;
        self.0 = rest;
        Some(bytes)
    }
}

/// Exchanges the outcome of each rank's own part of the collective call `call`; all ranks succeed or all fail.
///
/// # Errors
/// This rank's own error; else that of the first rank that failed; or the ranks could not meet.
pub(super) fn agree(
    gather: impl FnOnce(&[u8]) -> Result<Vec<Vec<u8>>, BootstrapError>,
    call: &'static str,
    own: Result<Vec<u8>, CommError>,
) -> Result<Vec<Vec<u8>>, CommError> {
    let mut message = Writer::default();
    message.bytes(call.as_bytes());
    match &own {
        Ok(bytes) => message.word(1).bytes(bytes),
        Err(error) => message.word(0).bytes(error.to_string().as_bytes()),
    };
    let all = gather(&message.0);
    own?;
    let all = all?;
    let mut results = Vec::with_capacity(all.len());
    for (rank, message) in (0..).zip(&all) {
        let mut reader = Reader(message);
        let parts = (|| Some((reader.bytes()?, reader.word()?, reader.bytes()?)))();
        let Some((theirs, worked, bytes)) = parts else {
            return Err(garbled(rank));
        };
        if theirs != call.as_bytes() {
            return Err(CommError::OutOfStep { rank, theirs: String::from_utf8_lossy(theirs).into_owned(), own: call });
        }
        if worked == 0 {
            return Err(CommError::OtherRank { rank, reason: String::from_utf8_lossy(bytes).into_owned() });
        }
        results.push(bytes.to_vec());
    }
    Ok(results)
}

/// A message that does not have the form it should.
pub(super) fn garbled(rank: u32) -> CommError {
    CommError::OtherRank { rank, reason: "its message is garbled".to_owned() }
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
