// SPDX-License-Identifier: MIT OR Apache-2.0
//! Agreement of ranks on how setting something up went.

use super::{BootstrapError, CommError};
pub(super) use crate::wire::{Reader, Writer};

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
