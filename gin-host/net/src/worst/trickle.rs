// SPDX-License-Identifier: MIT OR Apache-2.0
//! A network with little room.

use crate::{Capabilities, Event, Network, Request};

/// A network that accepts few requests at a time.
#[derive(Debug)]
pub struct Trickle<N> {
    inner: N,
    max: usize,
    turn: bool,
}

impl<N: Network> Trickle<N> {
    /// Accepts at most `max` requests, and only at every second call.
    pub fn new(inner: N, max: usize) -> Self {
        Self { inner, max: max.max(1), turn: false }
    }
}

impl<N: Network> Network for Trickle<N> {
    pass_on!();

    fn capabilities(&self) -> Capabilities {
        self.inner.capabilities()
    }

    fn post(&mut self, requests: &[Request]) -> usize {
        self.turn = !self.turn;
        if self.turn { self.inner.post(&requests[..requests.len().min(self.max)]) } else { 0 }
    }

    fn poll(&mut self, events: &mut Vec<Event>) {
        self.inner.poll(events)
    }

    fn is_quiet(&self) -> bool {
        self.inner.is_quiet()
    }
}
