// SPDX-License-Identifier: MIT OR Apache-2.0
//! The options of a post.

use crate::order::Scope;
use crate::signal::{CounterId, SignalAction};
use gin_abi::Deadline;

/// The options of all posts besides the transfer.
#[derive(Clone, Copy, Debug)]
pub(super) struct Options {
    pub(super) signal: Option<SignalAction>,
    pub(super) counter: Option<CounterId>,
    pub(super) given: Scope,
    pub(super) required: Scope,
    pub(super) more: bool,
    /// A barrier's: its signals have ids past those of the user, and it has looked at what the network can.
    pub(super) internal: bool,
    /// Covers puts of both routes.
    pub(super) all_routes: bool,
    pub(super) deadline: Deadline,
}

impl Options {
    /// A function, because a constant would lie in memory.
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
