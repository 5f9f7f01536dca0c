// SPDX-License-Identifier: MIT OR Apache-2.0
//! What a completion with an error means (`enum ibv_wc_status`).

use super::ledger::Outcome;
use crate::NetError;
use gin_verbs::verbs::{COMPLETED, WorkCompletion};

const NAMES: [&str; 22] = [
    "nothing",
    "a message of a length that this NIC does not take",
    "a request that this queue pair does not take",
    "a request of a context that there is not",
    "access to this rank's memory",
    "a queue pair in error",
    "binding a memory window",
    "an answer that is none",
    "writing what has arrived",
    "a request that the peer's NIC does not take",
    "access to the peer's memory",
    "an operation of the peer's NIC",
    "sending again and again without an answer",
    "sending again and again to a peer that is not ready",
    "a request of another domain",
    "a datagram that is none",
    "a request that the peer ended",
    "a request of a context that is none",
    "a context in a wrong state",
    "the NIC",
    "waiting for an answer",
    "the transport",
];

/// The number that a [`NetError::Failed`] has for it: status, and above 32 bits the NIC's own number.
fn number(completion: &WorkCompletion) -> u64 {
    u64::from(completion.vendor_err) << 32 | u64::from(completion.status)
}

/// What came of a request to `peer`.
pub(super) fn outcome(peer: u32, completion: &WorkCompletion) -> Outcome {
    let [success, flushed, retries, not_ready, silent] = COMPLETED;
    let status = completion.status;
    if status == success {
        return Outcome::Done;
    }
    let context = NAMES.get(status as usize).copied().unwrap_or("a request");
    let failed = NetError::Failed { context, peer, status: number(completion) };
    if status == flushed {
        return Outcome::Flushed(failed);
    }
    if [retries, not_ready, silent].contains(&status) {
        let reason = format!("{context} (completion status {status}, NIC's number {:#x})", completion.vendor_err);
        return Outcome::Failed(NetError::PeerLost { peer, reason });
    }
    Outcome::Failed(failed)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn completion(status: u32) -> WorkCompletion {
        let mut completion = WorkCompletion::default();
        (completion.status, completion.vendor_err) = (status, 0x81);
        completion
    }

    #[test]
    fn a_peer_that_does_not_answer_is_lost_and_others_say_what_failed() {
        assert_eq!(outcome(4, &completion(0)), Outcome::Done);
        for status in [12, 13, 20] {
            let Outcome::Failed(error) = outcome(4, &completion(status)) else { panic!("{status}") };
            assert!(matches!(error, NetError::PeerLost { peer: 4, .. }), "{error}");
            assert!(error.to_string().contains("0x81"), "{error}");
        }
        let refused = NetError::Failed { context: "access to the peer's memory", peer: 4, status: 0x81_0000_000a };
        assert_eq!(outcome(4, &completion(10)), Outcome::Failed(refused));
        assert!(matches!(outcome(4, &completion(5)), Outcome::Flushed(_)));
        assert!(matches!(outcome(4, &completion(77)), Outcome::Failed(_)));
    }
}
