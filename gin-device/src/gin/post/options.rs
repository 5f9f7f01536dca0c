// SPDX-License-Identifier: MIT OR Apache-2.0
//! The options of a post.

use crate::order::Scope;
use crate::signal::{CounterId, SignalAction};
use gin_abi::Deadline;

/// The options that every kind of request takes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Options {
    /// The signal to raise at the peer.
    pub(super) signal: Option<SignalAction>,
    /// The counter to raise at the caller.
    pub(super) counter: Option<CounterId>,
    /// The scope to which the caller has released the payload.
    pub(super) given: Scope,
    /// The scope that the payload must be released to.
    pub(super) required: Scope,
    /// The doorbell may wait for the next post.
    pub(super) more: bool,
    /// The post is a barrier's: its signals have ids past the user's, and it has checked the network's capabilities.
    pub(super) internal: bool,
    /// The signal covers puts of both routes.
    pub(super) all_routes: bool,
    /// The limit of the wait for room.
    pub(super) deadline: Deadline,
}

impl Options {
    /// Returns the defaults. A function, because a constant would be stored in memory.
    #[inline(always)]
    pub(super) fn new() -> Self {
        Self {
            signal: None,
            counter: None,
            given: Scope::Thread,
            required: Scope::System,
            more: false,
            internal: false,
            all_routes: false,
            deadline: Deadline::NONE,
        }
    }
}
