// SPDX-License-Identifier: MIT OR Apache-2.0
//! Agreement of ranks on the outcome of a collective call.

use super::CommError;
use gin_boot::BootstrapError;
use gin_boot::wire::{decode, encode};
use gin_net::{KeyError, NetError};
use serde::Serialize;
use serde::de::DeserializeOwned;

/// A rank's message about its own part of a collective call: the call, and the part or the error, with the rank whose
/// memory could not be connected or mapped.
type Said<'a> = (&'a str, Result<&'a [u8], (&'a str, Option<u32>)>);

/// Exchanges the outcome of each rank's own part of the collective call `call`. All ranks succeed or all fail. Returns
/// the messages of all ranks.
///
/// A rank may be lost after it has sent its message, and before others have mapped its memory. Therefore, if memory of
/// a rank cannot be mapped, the ranks meet once more: either that rank is alive, or `gather` reports its loss.
///
/// # Errors
/// This rank's own error, else the error of the first rank that failed, or an error of the bootstrap. If the own error
/// concerns memory of a rank, and a rank is lost, the loss is its cause and replaces it.
pub(super) fn agree<T: DeserializeOwned>(
    gather: impl Fn(&[u8]) -> Result<Vec<Vec<u8>>, BootstrapError>,
    call: &'static str,
    own: Result<impl Serialize, &CommError>,
) -> Result<Vec<T>, CommError> {
    let bytes = own.as_ref().map(encode);
    let text = own.as_ref().err().map(ToString::to_string).unwrap_or_default();
    let said: Said<'_> = (call, bytes.as_deref().map_err(|error| (text.as_str(), concerned(error))));
    let mut all = gather(&encode(&said));
    if all.as_ref().is_ok_and(|all| someone_is_unmapped(call, all)) {
        all = gather(&[]).and(all);
    }
    match (&own, &all) {
        // A rank that has learned of the loss of another one frees its memory, which cannot be mapped from then on.
        (Err(own), Err(BootstrapError::Lost { .. } | BootstrapError::Ended)) if concerned(own).is_some() => {}
        _ => drop(own.map_err(CommError::clone)?),
    }
    let all = all?;
    let mut results = Vec::with_capacity(all.len());
    for (rank, message) in (0..).zip(&all) {
        let Some((theirs, said)) = decode::<Said<'_>>(message) else {
            return Err(garbled(rank));
        };
        if theirs != call {
            return Err(CommError::OutOfStep { rank, theirs: theirs.to_owned(), own: call });
        }
        let bytes = said.map_err(|(reason, _)| CommError::OtherRank { rank, reason: reason.to_owned() })?;
        results.push(decode(bytes).ok_or_else(|| garbled(rank))?);
    }
    Ok(results)
}

/// Returns whether all ranks are in `call`, and one of them could not map memory of another. All ranks have the same
/// messages, so all return the same.
fn someone_is_unmapped(call: &str, all: &[Vec<u8>]) -> bool {
    let said: Option<Vec<Said<'_>>> = all.iter().map(|message| decode(message)).collect();
    said.is_some_and(|said| {
        said.iter().all(|(theirs, _)| *theirs == call) && said.iter().any(|(_, said)| matches!(said, Err((_, Some(_)))))
    })
}

/// Returns the rank whose memory could not be connected or mapped.
fn concerned(error: &CommError) -> Option<u32> {
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
        let ended = |own: CommError, how: BootstrapError| {
            agree::<()>(|_| Err(how.clone()), "test", Err::<(), _>(&own)).unwrap_err()
        };
        assert_eq!(ended(of(2), lost()), lost().into());
        let unmapped = |rank| CommError::OtherRank { rank, reason: "no answer".to_owned() };
        assert_eq!(ended(unmapped(2), lost()), lost().into());
        assert_eq!(ended(unmapped(1), lost()), lost().into(), "rank 1 learned of the loss, and freed its memory");
        assert_eq!(ended(of(2), BootstrapError::Ended), BootstrapError::Ended.into());
        assert_eq!(ended(CommError::ProxyGone, lost()), CommError::ProxyGone, "this rank's own");
        assert_eq!(ended(of(2), BootstrapError::Aborted { rank: 0 }), of(2), "nobody is known to be lost");
    }

    #[test]
    fn a_rank_that_is_lost_after_it_sent_its_part_is_reported_as_lost() {
        let lost = BootstrapError::Lost { rank: 2, host: "there".to_owned(), cause: LossCause::Closed };
        let unmapped = CommError::OtherRank { rank: 2, reason: "no answer".to_owned() };
        let part = |said: Result<&[u8], (&str, Option<u32>)>| encode(&("test", said));
        let all = vec![part(Err(("no answer", Some(2)))), part(Ok(&encode(&()))), part(Ok(&encode(&())))];
        let outcome = |own: Result<(), &CommError>, second: Result<Vec<Vec<u8>>, BootstrapError>| {
            let gather = |bytes: &[u8]| if bytes.is_empty() { second.clone() } else { Ok(all.clone()) };
            agree::<()>(gather, "test", own).unwrap_err()
        };
        // Rank 0 cannot map memory of rank 2, and rank 1 learns that.
        assert_eq!(outcome(Err(&unmapped), Err(lost.clone())), lost.clone().into());
        assert_eq!(outcome(Ok(()), Err(lost.clone())), lost.into());
        assert_eq!(outcome(Err(&unmapped), Ok(vec![Vec::new(); 3])), unmapped, "rank 2 is alive");
        let other = CommError::OtherRank { rank: 0, reason: "no answer".to_owned() };
        assert_eq!(outcome(Ok(()), Ok(vec![Vec::new(); 3])), other);
    }
}
