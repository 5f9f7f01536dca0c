// SPDX-License-Identifier: MIT OR Apache-2.0
//! The `tracing` events of a communicator: its collective calls, and its end.
//!
//! Nothing here is on the way of a request. Spans are not entered: ranks that take turns on one thread would leave each
//! other's.

use super::{CommError, Communicator};

impl Communicator {
    /// A collective call: a span that lasts as long, and an event with what came of it.
    pub(super) fn seen<T>(
        &self,
        call: &'static str,
        work: impl FnOnce() -> Result<T, CommError>,
    ) -> Result<T, CommError> {
        let span = tracing::debug_span!("collective", call, rank = self.rank(), ranks = self.ranks());
        let outcome = work();
        match &outcome {
            Ok(_) => tracing::debug!(parent: &span, call, rank = self.rank(), "done"),
            Err(error) => tracing::debug!(parent: &span, call, rank = self.rank(), %error, "failed"),
        }
        outcome
    }
}
