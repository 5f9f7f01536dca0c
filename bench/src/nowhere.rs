// SPDX-License-Identifier: MIT OR Apache-2.0
//! A network without a peer: it accepts requests, checks them, and reports them as complete.

use gin_abi::Transfer;
use gin_bench_kernels::post::BYTES;
use gin_net::{Capabilities, Endpoint, Event, Key, LocalSignals, LocalWindow, NetError, Network, Raises, Request};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// The state that all endpoints of this network share.
#[derive(Debug, Default)]
pub(super) struct Gate {
    /// The network accepts requests. While the gate is closed, all requests but a few stay in the queue.
    open: AtomicBool,
    /// Number of accepted requests that are puts as the kernels post them.
    right: AtomicU64,
    /// Number of other accepted requests.
    wrong: AtomicU64,
}

impl Gate {
    /// Opens or closes the gate.
    pub(super) fn set(&self, open: bool) {
        self.open.store(open, Ordering::Release);
    }

    /// Returns the numbers of requests accepted so far: right ones, and others.
    pub(super) fn accepted(&self) -> (u64, u64) {
        (self.right.load(Ordering::Acquire), self.wrong.load(Ordering::Acquire))
    }
}

/// The endpoint of a rank.
#[derive(Debug)]
pub(super) struct Nowhere {
    gate: Arc<Gate>,
    ranks: u32,
    done: Vec<Event>,
}

impl Nowhere {
    pub(super) fn new(endpoint: &Endpoint, gate: &Arc<Gate>) -> Self {
        Self { gate: gate.clone(), ranks: endpoint.ranks, done: Vec::new() }
    }

    fn is_right(&self, request: &Request) -> bool {
        let whole = matches!(request.transfer, Transfer::Put { bytes, source, destination }
            if bytes == BYTES as u64 && source.offset == destination.offset);
        let raises = request.signal.is_some_and(|signal| signal.amount == 1 && signal.strong);
        whole && raises && request.peer < self.ranks
    }
}

impl Network for Nowhere {
    fn capabilities(&self) -> Capabilities {
        Capabilities {
            name: "nowhere",
            strong_signals: true,
            va_signals: false,
            max_message: 1 << 20,
            completion_is_arrival: true,
            raises: Raises::Sender,
            needs_make_visible: false,
            mailbox: false,
        }
    }

    fn register_signals(&mut self, _: &LocalSignals) -> Result<Key, NetError> {
        Ok(Key::default())
    }

    fn connect_signals(&mut self, _: &[Key]) -> Result<(), NetError> {
        Ok(())
    }

    fn register(&mut self, _: &LocalWindow) -> Result<Key, NetError> {
        Ok(Key::default())
    }

    fn connect(&mut self, _: u32, _: &[Key]) -> Result<(), NetError> {
        Ok(())
    }

    fn deregister(&mut self, _: u32) -> bool {
        true
    }

    fn post(&mut self, requests: &[Request]) -> usize {
        if !self.gate.open.load(Ordering::Acquire) {
            return 0;
        }
        let right = requests.iter().filter(|request| self.is_right(request)).count() as u64;
        self.gate.right.fetch_add(right, Ordering::AcqRel);
        self.gate.wrong.fetch_add(requests.len() as u64 - right, Ordering::AcqRel);
        self.done.extend(requests.iter().map(|request| Event::Completion { id: request.id, outcome: Ok(()) }));
        requests.len()
    }

    fn poll(&mut self, events: &mut Vec<Event>) {
        events.append(&mut self.done);
    }
}
