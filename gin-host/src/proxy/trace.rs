// SPDX-License-Identifier: MIT OR Apache-2.0
//! Events of single requests and steps, for traces. `docs/observing.md` lists them.
//!
//! Without a subscriber that asks for them, each is a load of one word and a branch: it reads no clock, formats nothing
//! and allocates nothing. The subscriber takes the time.

use super::check::operation;
use gin_abi::{Descriptor, Operation};

/// The target of the events.
pub const TARGET: &str = "gin_host::trace";

/// Returns whether a subscriber asks for the events. Posts of communicators created meanwhile note their time.
pub(crate) fn is_recorded() -> bool {
    tracing::enabled!(target: TARGET, tracing::Level::TRACE)
}

fn name(request: &Descriptor) -> &'static str {
    match operation(request) {
        Operation::Put => "put",
        Operation::PutValue => "put_value",
        Operation::Get => "get",
        Operation::Quiet => "quiet",
        _ => "signal",
    }
}

/// Reports that the proxy has accepted a request from the queue of a context.
///
/// `posted` is the time of the post, as the descriptor had it: by the clock of the device.
pub(super) fn accepted(rank: u32, context: u32, index: u64, request: &Descriptor, posted: Option<u64>) {
    // The values are computed only if a subscriber asks for the event.
    tracing::trace!(
        name: "accepted",
        target: TARGET,
        rank,
        context,
        index,
        peer = request.peer,
        operation = name(request),
        bytes = request.transfer.bytes(),
        signal = request.signal.is_some(),
        posted,
    );
}

/// Reports that a request has finished: its completion is published.
pub(super) fn finished(rank: u32, context: u32, index: u64, failed: bool) {
    tracing::trace!(name: "finished", target: TARGET, rank, context, index, failed);
}

/// Reports the begin of a step.
pub(super) fn step_begins(rank: u32) {
    tracing::trace!(name: "step begins", target: TARGET, rank);
}

/// Reports the end of a step that did some work, or none.
pub(super) fn step_ends(rank: u32, worked: bool) {
    tracing::trace!(name: "step ends", target: TARGET, rank, worked);
}
