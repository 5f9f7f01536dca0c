// SPDX-License-Identifier: MIT OR Apache-2.0
//! Agreement of ranks on the outcome of a collective call.

use super::CommError;
use gin_boot::BootstrapError;
use gin_boot::wire::{decode, encode};
use gin_net::{KeyError, NetError};
use serde::Serialize;
use serde::de::DeserializeOwned;

/// Exchanges the outcome of each rank's own part of the collective call `call`. All ranks succeed or all fail. Returns
/// the messages of all ranks.
///
/// # Errors
/// This rank's own error, else the error of the first rank that failed, or an error of the bootstrap. If the own error
/// concerns a rank that is lost, the loss is its cause and replaces it.
pub(super) fn agree<T: DeserializeOwned>(
    gather: impl FnOnce(&[u8]) -> Result<Vec<Vec<u8>>, BootstrapError>,
    call: &'static str,
    own: Result<impl Serialize, &CommError>,
) -> Result<Vec<T>, CommError> {
    let said = own.as_ref().map(encode).map_err(|error| error.to_string());
    let all = gather(&encode(&(call, said)));
    match (&own, &all) {
        (Err(own), Err(BootstrapError::Lost { rank, .. })) if concerned(own) == Some(*rank) => {}
        (Err(own), Err(BootstrapError::Ended)) if concerned(own).is_some() => {}
        _ => drop(own.map_err(CommError::clone)?),
    }
    let all = all?;
    let mut results = Vec::with_capacity(all.len());
    for (rank, message) in (0..).zip(&all) {
        let Some((theirs, said)) = decode::<(&str, Result<&[u8], &str>)>(message) else {
            return Err(garbled(rank));
        };
        if theirs != call {
            return Err(CommError::OutOfStep { rank, theirs: theirs.to_owned(), own: call });
        }
        let bytes = said.map_err(|reason| CommError::OtherRank { rank, reason: reason.to_owned() })?;
        results.push(decode(bytes).ok_or_else(|| garbled(rank))?);
    }
    Ok(results)
}

/// Returns the rank whose memory could not be connected or mapped.
pub(super) fn concerned(error: &CommError) -> Option<u32> {
    match error {
        CommError::Net(NetError::Key(KeyError { rank, .. })) | CommError::OtherRank { rank, .. } => Some(*rank),
        _ => None,
    }
}

/// Checks that a number of `rank` is the same as this rank's.
pub(super) fn same(what: &'static str, rank: u32, theirs: u64, own: u64) -> Result<(), CommError> {
    if theirs == own { Ok(()) } else { Err(CommError::Disagreement { what, rank, theirs, own }) }
}

/// Returns the error of a malformed message.
pub(super) fn garbled(rank: u32) -> CommError {
    CommError::OtherRank { rank, reason: "its message is malformed".to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use gin_boot::LossCause;

    #[test]
    fn a_lost_ranks_missing_part_is_reported_as_its_loss_and_nothing_else_is() {
        let lost = || BootstrapError::Lost { rank: 2, host: "there".to_owned(), cause: LossCause::Silent { ms: 100 } };
        let of = |rank| CommError::Net(KeyError { rank, reason: "no answer".to_owned() }.into());
        let ended =
            |own: CommError, how: BootstrapError| agree::<()>(|_| Err(how), "test", Err::<(), _>(&own)).unwrap_err();
        assert_eq!(ended(of(2), lost()), lost().into());
        let unmapped = |rank| CommError::OtherRank { rank, reason: "no answer".to_owned() };
        assert_eq!(ended(unmapped(2), lost()), lost().into());
        assert_eq!(ended(unmapped(1), lost()), unmapped(1), "another rank's");
        assert_eq!(ended(of(2), BootstrapError::Ended), BootstrapError::Ended.into());
        assert_eq!(ended(of(1), lost()), of(1), "another rank's");
        assert_eq!(ended(CommError::ProxyGone, lost()), CommError::ProxyGone, "this rank's own");
        assert_eq!(ended(of(2), BootstrapError::Aborted { rank: 0 }), of(2), "nobody is known to be lost");
    }
}
