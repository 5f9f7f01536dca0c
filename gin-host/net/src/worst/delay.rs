// SPDX-License-Identifier: MIT OR Apache-2.0
//! A slow network.

use crate::{Capabilities, Endpoint, Event, Network, Request};
use gin_gpu::rt;
use oorandom::Rand64;
use std::collections::{HashMap, VecDeque};
use std::time::Duration;

/// A network that delays each request by a random time. The requests of one context to one peer stay in order.
#[derive(Debug)]
pub struct Delay<N> {
    inner: N,
    random: Rand64,
    max_ns: u64,
    /// By context and peer: the time and the request.
    held: HashMap<(u32, u32), VecDeque<(u64, Request)>>,
    batch: Vec<Request>,
}

impl<N: Network> Delay<N> {
    /// Delays the requests to `inner` by up to `max`.
    pub fn new(inner: N, endpoint: &Endpoint, max: Duration) -> Self {
        let random = Rand64::new(u128::from(endpoint.seed ^ u64::from(endpoint.rank) << 48 ^ 0x0de1_a700));
        let max_ns = u64::try_from(max.as_nanos()).unwrap_or(u64::MAX - 1);
        Self { inner, random, max_ns, held: HashMap::new(), batch: Vec::new() }
    }
}

impl<N: Network> Network for Delay<N> {
    pass_on!();

    fn capabilities(&self) -> Capabilities {
        self.inner.capabilities()
    }

    fn post(&mut self, requests: &[Request]) -> usize {
        let now = rt::clock_ns();
        for request in requests {
            let due = now.saturating_add(self.random.rand_range(0..self.max_ns + 1));
            let line = self.held.entry((request.context, request.peer)).or_default();
            line.push_back((due, *request));
        }
        requests.len()
    }

    fn poll(&mut self, events: &mut Vec<Event>) {
        let now = rt::clock_ns();
        let mut lines: Vec<_> = self.held.iter_mut().filter(|(_, line)| !line.is_empty()).collect();
        // The order of a map differs from run to run.
        lines.sort_unstable_by_key(|(name, _)| **name);
        for (_, line) in lines {
            while let Some((due, request)) = line.front()
                && *due <= now
            {
                self.batch.push(*request);
                line.pop_front();
            }
        }
        if !self.batch.is_empty() {
            let taken = self.inner.post(&self.batch);
            self.batch.drain(..taken);
        }
        self.inner.poll(events);
    }

    fn is_quiet(&self) -> bool {
        self.batch.is_empty() && self.held.values().all(VecDeque::is_empty) && self.inner.is_quiet()
    }
}
