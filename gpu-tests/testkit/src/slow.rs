// SPDX-License-Identifier: MIT OR Apache-2.0
//! A network with one slow peer.

use gin_gpu::rt;
use gin_net::{Capabilities, Event, Network, Request, pass_on};
use std::collections::VecDeque;
use std::time::Duration;

/// A network that delays requests to one peer by a fixed time, in order.
#[derive(Debug)]
pub struct SlowPeer<N> {
    inner: N,
    peer: u32,
    late_ns: u64,
    held: VecDeque<(u64, Request)>,
}

impl<N: Network> SlowPeer<N> {
    /// Delays requests to `peer` by `late`.
    pub fn new(inner: N, peer: u32, late: Duration) -> Self {
        Self { inner, peer, late_ns: u64::try_from(late.as_nanos()).unwrap_or(u64::MAX), held: VecDeque::new() }
    }
}

impl<N: Network> Network for SlowPeer<N> {
    pass_on!();

    fn capabilities(&self) -> Capabilities {
        self.inner.capabilities()
    }

    fn post(&mut self, requests: &[Request]) -> usize {
        let due = rt::clock_ns().saturating_add(self.late_ns);
        for (taken, request) in requests.iter().enumerate() {
            if request.peer == self.peer {
                self.held.push_back((due, *request));
            } else if self.inner.post(std::slice::from_ref(request)) == 0 {
                return taken;
            }
        }
        requests.len()
    }

    fn poll(&mut self, events: &mut Vec<Event>) {
        let now = rt::clock_ns();
        while let Some((due, request)) = self.held.front()
            && *due <= now
            && self.inner.post(std::slice::from_ref(request)) == 1
        {
            self.held.pop_front();
        }
        self.inner.poll(events);
    }

    fn is_quiet(&self) -> bool {
        self.held.is_empty() && self.inner.is_quiet()
    }
}
