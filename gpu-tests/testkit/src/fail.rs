// SPDX-License-Identifier: MIT OR Apache-2.0
//! A network that fails on demand.

use gin_net::{Capabilities, Event, NetError, Network, Request, pass_on};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The failure of a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Failure {
    /// The network reports this status.
    Status(u64),
    /// The peer is lost.
    PeerLost,
    /// The request never completes.
    Silence,
}

#[derive(Debug, Default)]
struct Plan {
    /// The number of requests before the failing one, and its failure.
    nth: Option<(u64, Failure)>,
    /// The peers to which all requests fail, and the failure.
    peers: Vec<(u32, Failure)>,
}

/// Selects the requests that fail. Clones share the selection.
#[derive(Clone, Debug, Default)]
pub struct FailSwitch(Arc<Mutex<Plan>>);

impl FailSwitch {
    /// Makes a switch that selects no request.
    pub fn new() -> Self {
        Self::default()
    }

    fn plan(&self) -> MutexGuard<'_, Plan> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Passes `before` requests, then fails one.
    pub fn fail_after(&self, before: u64, failure: Failure) {
        self.plan().nth = Some((before, failure));
    }

    /// Fails every request to `peer` from now on.
    pub fn fail_peer(&self, peer: u32, failure: Failure) {
        self.plan().peers.push((peer, failure));
    }

    /// Selects no request from now on.
    pub fn clear(&self) {
        *self.plan() = Plan::default();
    }

    fn verdict(&self, peer: u32) -> Option<Failure> {
        let mut plan = self.plan();
        match &mut plan.nth {
            Some((0, failure)) => {
                let failure = *failure;
                plan.nth = None;
                return Some(failure);
            }
            Some((before, _)) => *before -= 1,
            None => {}
        }
        plan.peers.iter().find(|(other, _)| *other == peer).map(|(_, failure)| *failure)
    }
}

/// A network that fails the requests that its [`FailSwitch`] selects, and all later requests of the same context and
/// peer. They do not reach the inner network.
#[derive(Debug)]
pub struct FailOnDemand<N> {
    inner: N,
    switch: FailSwitch,
    failed: Vec<Event>,
    silent: bool,
    /// The contexts and peers of requests that failed.
    broken: Vec<(u32, u32)>,
    /// The next request has passed the switch, but the inner network had no room for it.
    passed: bool,
}

impl<N: Network> FailOnDemand<N> {
    /// Passes the requests to `inner` that `switch` does not select.
    pub fn new(inner: N, switch: FailSwitch) -> Self {
        Self { inner, switch, failed: Vec::new(), silent: false, broken: Vec::new(), passed: false }
    }
}

impl<N: Network> Network for FailOnDemand<N> {
    pass_on!();

    fn capabilities(&self) -> Capabilities {
        self.inner.capabilities()
    }

    fn post(&mut self, requests: &[Request]) -> usize {
        for (taken, request) in requests.iter().enumerate() {
            // The switch judges each request once, also if it is offered several times.
            let verdict = if self.passed { None } else { self.switch.verdict(request.peer) };
            let line = (request.context, request.peer);
            let error = match verdict {
                None if self.broken.contains(&line) => NetError::behind(request.peer),
                None => {
                    self.passed = self.inner.post(std::slice::from_ref(request)) == 0;
                    if self.passed {
                        return taken;
                    }
                    continue;
                }
                Some(Failure::Silence) => {
                    self.silent = true;
                    continue;
                }
                Some(Failure::Status(status)) => NetError::Failed { context: "request", peer: request.peer, status },
                Some(Failure::PeerLost) => {
                    NetError::PeerLost { peer: request.peer, reason: "a test requested it".to_owned() }
                }
            };
            self.broken.push(line);
            self.failed.push(Event::Completion { id: request.id, outcome: Err(error) });
        }
        requests.len()
    }

    fn poll(&mut self, events: &mut Vec<Event>) {
        self.inner.poll(events);
        events.append(&mut self.failed);
    }

    fn is_quiet(&self) -> bool {
        !self.silent && self.inner.is_quiet()
    }
}
