// SPDX-License-Identifier: MIT OR Apache-2.0
//! A network that keeps only the order that the contract requires.

use crate::{Capabilities, Endpoint, Event, Network, Request};
use gin_abi::Transfer;
use oorandom::Rand64;
use std::collections::HashMap;

/// A network that reorders puts, gets and weak signals at random. A request may complete before its signal is raised.
///
/// It sends a payload and its signal separately. A weak signal follows the arrival of its payload; a strong signal
/// follows the arrival of all earlier requests of its context and peer. So it reorders only over an inner network whose
/// completed puts have arrived.
#[derive(Debug)]
pub struct Reorder<N> {
    inner: N,
    random: Rand64,
    /// In the order of posting.
    parts: Vec<Part>,
    next: u64,
    chosen: Vec<Request>,
}

/// A payload or a signal that has not arrived.
#[derive(Debug)]
struct Part {
    /// Its id in the inner network.
    id: u64,
    request: Request,
    /// The payload that it must follow.
    after: Option<u64>,
    strong: bool,
    /// Its arrival completes the request.
    completes: bool,
    posted: bool,
}

impl<N: Network> Reorder<N> {
    /// Reorders the requests to `inner`.
    pub fn new(inner: N, endpoint: &Endpoint) -> Self {
        let random = Rand64::new(u128::from(endpoint.seed ^ u64::from(endpoint.rank) << 48 ^ 0x5e0_4de4));
        Self { inner, random, parts: Vec::new(), next: 0, chosen: Vec::new() }
    }

    fn part(&mut self, request: Request, after: Option<u64>, completes: bool) -> u64 {
        let (id, strong) = (self.next, request.is_strong());
        self.next += 1;
        self.parts.push(Part { id, request, after, strong, completes, posted: false });
        id
    }

    /// Posts about half of the requests that may go now, in random order.
    fn choose(&mut self) {
        let mut ready = Vec::new();
        // The contexts and peers of which an earlier request has not arrived.
        let mut behind: HashMap<(u32, u32), ()> = HashMap::new();
        for (index, part) in self.parts.iter().enumerate() {
            let line = (part.request.context, part.request.peer);
            let held = part.strong && behind.contains_key(&line)
                || part.after.is_some_and(|payload| self.parts.iter().any(|other| other.id == payload));
            if !part.posted && !held {
                ready.push(index);
            }
            behind.insert(line, ());
        }
        while !ready.is_empty() {
            let index = ready.swap_remove(self.random.rand_range(0..ready.len() as u64) as usize);
            if self.random.rand_u64() & 1 == 0 {
                let part = &mut self.parts[index];
                part.posted = true;
                self.chosen.push(Request { id: part.id, ..part.request });
            }
        }
    }
}

impl<N: Network> Network for Reorder<N> {
    pass_on!();

    fn capabilities(&self) -> Capabilities {
        self.inner.capabilities()
    }

    fn post(&mut self, requests: &[Request]) -> usize {
        if !self.inner.capabilities().completion_is_arrival {
            return self.inner.post(requests);
        }
        for request in requests {
            let nothing = request.transfer == Transfer::Nothing;
            match request.signal {
                Some(_) if !nothing => {
                    let payload = self.part(Request { signal: None, ..*request }, None, true);
                    self.part(Request { transfer: Transfer::Nothing, ..*request }, Some(payload), false);
                }
                _ => {
                    self.part(*request, None, true);
                }
            }
        }
        requests.len()
    }

    fn poll(&mut self, events: &mut Vec<Event>) {
        if !self.inner.capabilities().completion_is_arrival {
            return self.inner.poll(events);
        }
        self.choose();
        if !self.chosen.is_empty() {
            let taken = self.inner.post(&self.chosen);
            self.chosen.drain(..taken);
        }
        let from = events.len();
        self.inner.poll(events);
        let mut index = from;
        while let Some(event) = events.get_mut(index) {
            index += 1;
            let Event::Completion { id, outcome } = event else { continue };
            let Some(place) = self.parts.iter().position(|part| part.id == *id) else { continue };
            let part = self.parts.remove(place);
            if outcome.is_err() {
                // A failed request raises no signal.
                self.parts.retain(|other| other.after != Some(part.id));
            }
            if part.completes {
                *id = part.request.id;
            } else {
                index -= 1;
                events.remove(index);
            }
        }
    }

    fn is_quiet(&self) -> bool {
        self.parts.is_empty() && self.inner.is_quiet()
    }
}
