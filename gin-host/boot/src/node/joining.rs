// SPDX-License-Identifier: MIT OR Apache-2.0
//! The state of a job before all ranks have joined: registrations, missing ranks, and their trouble.

use super::{JOINING, Node, NodeState};
use crate::error::CHECK;
use crate::message::{Answer, LISTED, Message, Registration};
use crate::{BootstrapError, millis};
use std::time::Duration;

impl Node {
    /// Registers a process as a rank of the job.
    ///
    /// # Errors
    /// The answer with the reason for the refusal.
    pub(crate) fn register(&self, registration: &Registration) -> Result<(), Answer> {
        if self.rank != 0 {
            return Err(Answer::Unexpected);
        }
        if registration.ranks != self.ranks || registration.rank >= self.ranks {
            return Err(Answer::Ranks(self.ranks));
        }
        let mut state = self.state();
        match state.registered.get(&registration.rank) {
            // The process registers again because its answer was lost.
            Some(instance) if *instance == registration.instance => return Ok(()),
            Some(_) => return Err(Answer::Duplicate),
            None => {}
        }
        state.registered.insert(registration.rank, registration.instance);
        self.route(&mut state, registration.clone());
        Ok(())
    }

    /// Returns, at rank 0, the first ranks that have not registered, and the number of all that have not.
    pub(crate) fn unregistered(&self) -> (Vec<u32>, u32) {
        let state = self.state();
        let missing = (0..self.ranks).filter(|rank| !state.registered.contains_key(rank)).take(LISTED).collect();
        (missing, self.ranks - state.registered.len() as u32)
    }

    /// Sends a registration towards the rank's parent, or passes it to the task that connects to the rank.
    pub(super) fn route(&self, state: &mut NodeState, registration: Registration) {
        let Some(edge) = self.place.towards(registration.rank) else { return };
        if self.neighbour(edge) == Some(registration.rank) {
            // The task has ended only if this rank leaves.
            let _ = self.connects.send((edge, registration));
        } else {
            state.send(edge, Message::Registered(registration));
        }
    }

    /// Notes the missing ranks that rank 0 named.
    pub(crate) fn set_missing(&self, missing: Vec<u32>, count: u32, trouble: &str) {
        let mut state = self.state();
        state.missing = (missing, count);
        state.add_trouble(trouble);
    }

    /// Returns the missing ranks that rank 0 named last, and the number of all.
    pub(crate) fn reported_missing(&self) -> (Vec<u32>, u32) {
        self.state().missing.clone()
    }

    /// Notes a trouble of this rank or of another one. Only the first is kept.
    pub(crate) fn add_trouble(&self, trouble: &str) {
        self.state().add_trouble(trouble);
    }

    /// Returns the first trouble; empty if there is none.
    pub(crate) fn trouble(&self) -> String {
        self.state().trouble.clone()
    }

    /// Gives up joining because some ranks are missing, and sends that to all ranks: without this rank they need not
    /// wait either.
    pub(crate) fn give_up_joining(&self, waited: Duration) {
        self.change(|state| {
            let (mut ranks, mut count) = state.missing.clone();
            if count == 0 {
                // Rank 0 missed no rank in its last report, or has never reported.
                ranks = state.missing(JOINING, self);
                count = ranks.len() as u32;
            }
            let trouble = state.trouble.clone();
            state.failed.get_or_insert(join_timeout(&ranks, &trouble, waited));
            state.forward(&Message::Missing { ranks, count, trouble }, None);
        });
    }
}

/// Returns the error with which joining ends at the deadline.
pub(super) fn join_timeout(missing: &[u32], trouble: &str, waited: Duration) -> BootstrapError {
    if missing.is_empty() && !trouble.is_empty() {
        return BootstrapError::Unreachable { reason: format!("{trouble}; {CHECK}") };
    }
    BootstrapError::Timeout { missing: missing.to_vec(), waited_ms: millis(waited) }
}
