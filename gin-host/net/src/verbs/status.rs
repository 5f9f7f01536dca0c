// SPDX-License-Identifier: MIT OR Apache-2.0
//! Outcome of a completion, by its status (`enum ibv_wc_status`).

use super::send_queue::Outcome;
use crate::NetError;
use gin_verbs::verbs::{
    IBV_WC_RESP_TIMEOUT_ERR, IBV_WC_RETRY_EXC_ERR, IBV_WC_RNR_RETRY_EXC_ERR, IBV_WC_SUCCESS, IBV_WC_WR_FLUSH_ERR,
    WorkCompletion,
};

/// Names of failed operations, by status.
const NAMES: [&str; 22] = [
    "nothing",
    "a message of a length that this NIC refuses",
    "a request that this queue pair refuses",
    "a request of an end-to-end context that does not exist",
    "access to this rank's memory",
    "a request on a queue pair in error",
    "binding a memory window",
    "an invalid response",
    "writing received data",
    "a request that the peer's NIC refuses",
    "access to the peer's memory",
    "an operation of the peer's NIC",
    "repeated sending without an acknowledgement",
    "repeated sending to a peer without receive buffers",
    "a request of another reliable-datagram domain",
    "an invalid reliable-datagram request",
    "a request that the peer aborted",
    "a request with an invalid end-to-end context",
    "an end-to-end context in a wrong state",
    "the NIC",
    "waiting for a response",
    "the transport",
];

/// Returns the outcome of a request to `peer`. The number of a [`NetError::Failed`] is the status, and above 32 bits
/// the vendor's error number.
pub(super) fn outcome(peer: u32, completion: &WorkCompletion) -> Outcome {
    let WorkCompletion { status, vendor_err, .. } = *completion;
    let context = NAMES.get(status as usize).copied().unwrap_or("a request");
    let failed = NetError::Failed { context, peer, status: u64::from(vendor_err) << 32 | u64::from(status) };
    match status {
        IBV_WC_SUCCESS => Outcome::Done,
        IBV_WC_WR_FLUSH_ERR => Outcome::Flushed(failed),
        IBV_WC_RETRY_EXC_ERR | IBV_WC_RNR_RETRY_EXC_ERR | IBV_WC_RESP_TIMEOUT_ERR => {
            let reason = format!("{context} (completion status {status}, NIC's number {vendor_err:#x})");
            Outcome::Failed(NetError::PeerLost { peer, reason })
        }
        _ => Outcome::Failed(failed),
    }
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
    fn a_peer_that_does_not_answer_is_lost_and_other_errors_name_what_failed() {
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
