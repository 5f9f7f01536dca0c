// SPDX-License-Identifier: MIT OR Apache-2.0
//! Networks with fewer features.

use gin_net::{Capabilities, Event, Network, Request, pass_on};

/// A network that reports no strong signals, no signals at window addresses, or neither.
#[derive(Debug)]
pub struct WeakOnly<N> {
    inner: N,
    strong: bool,
    va: bool,
}

impl<N: Network> WeakOnly<N> {
    /// Reports the features of `inner`, without strong signals unless `strong`, and without signals at window addresses
    /// unless `va`.
    pub fn new(inner: N, strong: bool, va: bool) -> Self {
        Self { inner, strong, va }
    }
}

impl<N: Network> Network for WeakOnly<N> {
    pass_on!();

    fn capabilities(&self) -> Capabilities {
        let inner = self.inner.capabilities();
        Capabilities {
            strong_signals: inner.strong_signals && self.strong,
            va_signals: inner.va_signals && self.va,
            ..inner
        }
    }

    fn post(&mut self, requests: &[Request]) -> usize {
        self.inner.post(requests)
    }

    fn poll(&mut self, events: &mut Vec<Event>) {
        self.inner.poll(events)
    }

    fn is_quiet(&self) -> bool {
        self.inner.is_quiet()
    }
}
