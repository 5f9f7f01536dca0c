// SPDX-License-Identifier: MIT OR Apache-2.0
//! The proxy: consumes the requests that kernels post, checks them, posts them to the network, and publishes the
//! outcome.
//!
//! One proxy serves one rank of one communicator, with a queue for each context and one endpoint of a network. A
//! progress thread ([`progress`]) or a scheduler calls [`Proxy::step`], which never waits: not for the network, not for
//! a lock, not for a peer.
//!
//! A step takes requests from the queues, posts one batch, and publishes the requests that the network has completed.
//! `requests.rs` has the life of a request; the order of steps, and what ends all requests, is here.
//!
//! A fault of any origin ends the whole communicator. The proxy posts the fault to its rank's kernels, announces it to
//! the other ranks through the [board](gin_boot::board), posts no further request, and completes the remaining requests
//! with that fault.

mod check;
mod command;
mod lists;
pub mod progress;
mod requests;
mod stats;
pub mod trace;

pub(crate) use check::{Limits, WindowInfo};
pub(crate) use command::{Command, Waiting};
pub(crate) use stats::Counters;
pub use stats::{PeerStats, Stats};

use crate::comm::print::Printer;
use gin_abi::descriptor::WORDS;
use gin_abi::{Fault, FaultKind, FaultSubject, Operation, SignalTarget};
use gin_boot::board::Board;
use gin_device::internal::queue::Queue;
use gin_device::internal::signal_words::raise;
use gin_device::internal::status::Status;
use gin_device::sys::{Global, GlobalWord, Word};
use gin_net::{Event, NetError, Network, SignalArrival};
use requests::Requests;
use std::any::Any;
use std::sync::Arc;
use std::sync::mpsc::Receiver;

/// The maximum number of descriptors consumed from one queue in one step.
const TAKE: usize = 64;

/// The words of one context that the proxy needs.
#[derive(Debug)]
pub(crate) struct ContextPart {
    pub(crate) queue: Queue<Global, WORDS>,
    /// Descriptors have the time of their post.
    pub(crate) timed: bool,
    /// The counters that kernels read. The proxy raises one when the source of a request may be reused.
    pub(crate) counters: GlobalWord,
    /// The signal words that CPU threads raise; `None` if they raise none.
    pub(crate) signals: Option<GlobalWord>,
    pub(crate) stats: Arc<Counters>,
}

/// The parts of a proxy.
#[derive(Debug)]
pub(crate) struct Parts {
    pub(crate) limits: Limits,
    /// The proxy takes them.
    pub(crate) contexts: Vec<ContextPart>,
    pub(crate) first_index: u64,
    pub(crate) max_outstanding: usize,
    pub(crate) max_message: u64,
    pub(crate) status: Status<Global>,
    pub(crate) board: Arc<Board>,
    pub(crate) network: Box<dyn Network>,
    pub(crate) commands: Receiver<Command>,
    /// The lines of this rank's kernels.
    pub(crate) printer: Option<Arc<Printer>>,
    /// Keeps the memory of all words above alive.
    pub(crate) _memory: Arc<dyn Any + Send + Sync>,
}

/// The proxy of one rank of one communicator.
#[derive(Debug)]
pub struct Proxy {
    requests: Requests,
    events: Vec<Event>,
    waiting: Vec<Waiting>,
    finished: bool,
    // Last: the memory of all words is dropped after their users.
    parts: Parts,
}

/// The result of a step.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Turn {
    /// The step did some work.
    Worked,
    /// The step found no work.
    Idle,
    /// The communicator has ended and needs no further step.
    Finished,
}

impl Proxy {
    /// # Safety
    /// - All words are valid as long as `parts._memory` lives.
    /// - The queues were initialised for `parts.first_index`.
    /// - No other code consumes from the queues or posts to the host's status block.
    pub(crate) unsafe fn new(mut parts: Parts) -> Self {
        // Safety: the caller's promise.
        let requests = unsafe { Requests::new(&mut parts) };
        Self { requests, events: Vec::new(), waiting: Vec::new(), finished: false, parts }
    }

    /// Does all work that is ready. Never waits.
    pub fn step(&mut self) -> Turn {
        if self.finished {
            return Turn::Finished;
        }
        let mut worked = self.command();
        worked |= self.listen();
        for context in 0..self.requests.contexts() {
            worked |= self.take(context);
        }
        worked |= self.post();
        worked |= self.poll();
        worked |= self.answer();
        worked |= self.parts.printer.as_ref().is_some_and(|printer| printer.drain());
        if self.finished {
            Turn::Finished
        } else if worked {
            Turn::Worked
        } else {
            Turn::Idle
        }
    }

    /// Posts the fault of a proxy that panicked, so that no thread waits for the proxy.
    pub(crate) fn fail(&mut self) {
        let fault = Fault::new(FaultKind::Network, Operation::None);
        self.parts.board.post_because(self.parts.limits.rank, fault, "the proxy of this rank broke down");
        self.parts.status.post(fault);
        tracing::error!(rank = self.parts.limits.rank, "the proxy broke down; this is a defect of gin");
        self.finished = true;
    }

    /// Looks for faults from this rank's kernels, other ranks and the host.
    fn listen(&mut self) -> bool {
        if self.requests.over().is_some() {
            return false;
        }
        if let Some(notice) = self.parts.board.first() {
            let fault = notice.for_rank(self.parts.limits.rank);
            self.parts.status.post(fault);
            self.end(fault);
            return true;
        }
        if let Some(fault) = self.parts.status.reported() {
            self.parts.board.post(self.parts.limits.rank, fault);
            self.end(fault);
            return true;
        }
        false
    }

    /// Ends the communicator on all ranks with the fault of a request, and the cause if it is known.
    fn found(&mut self, fault: Fault, cause: &str) {
        if self.requests.over().is_none() {
            // Both before a request is completed because of the fault. The host knows the fault when a kernel does.
            self.parts.board.post_because(self.parts.limits.rank, fault, cause);
            self.parts.status.post(fault);
            self.end(fault);
        }
    }

    fn end(&mut self, fault: Fault) {
        let (rank, kind, operation) = (self.parts.limits.rank, fault.kind(), fault.operation());
        let named = |number| (number != gin_abi::fault::NONE).then_some(number);
        let (peer, context) = (named(fault.peer()), named(fault.context()));
        match kind {
            FaultKind::Aborted | FaultKind::Elsewhere => {
                tracing::debug!(rank, ?kind, peer, "the communicator is ended from elsewhere");
            }
            _ => tracing::warn!(rank, ?kind, ?operation, context, peer, "a fault ends the communicator"),
        }
        self.requests.end(fault);
    }

    /// Takes requests from one queue.
    fn take(&mut self, context: usize) -> bool {
        for taken in 0..TAKE {
            match self.requests.take(context, &self.parts.limits) {
                Ok(true) => {}
                Ok(false) => return taken > 0,
                Err(refused) => {
                    self.found(refused.fault, "");
                    self.requests.refuse(refused);
                }
            }
        }
        true
    }

    /// Posts one batch to the network.
    fn post(&mut self) -> bool {
        let batch = self.requests.fill();
        if batch.is_empty() {
            return false;
        }
        let taken = self.parts.network.post(batch);
        self.requests.posted(taken);
        taken > 0
    }

    /// Handles the events of the network.
    fn poll(&mut self) -> bool {
        let mut events = std::mem::take(&mut self.events);
        self.parts.network.poll(&mut events);
        if events.is_empty() {
            self.events = events;
            return false;
        }
        // First makes the data visible that kernels may read after a signal or a finished get, once for all events.
        let mut visible = Ok(());
        let brought = events.iter().any(|event| match event {
            Event::Signal(_) => true,
            Event::Notice(_) => false,
            Event::Completion { id, .. } => self.requests.is_get(*id),
        });
        if brought && self.parts.limits.capabilities.needs_make_visible {
            visible = self.parts.network.make_visible();
        }
        if let Err(error) = &visible {
            self.found(error.apply(Fault::new(FaultKind::Network, Operation::None)), &error.to_string());
        }
        for event in events.drain(..) {
            match event {
                Event::Completion { id, outcome } => self.complete(id, &outcome.and_then(|()| visible.clone())),
                Event::Signal(arrival) if visible.is_ok() => self.raise(&arrival),
                // Notices are for networks, which keep their own.
                Event::Signal(_) | Event::Notice(_) => {}
            }
        }
        self.events = events;
        true
    }

    /// Handles the completion of a message.
    fn complete(&mut self, id: u64, outcome: &Result<(), NetError>) {
        if let (Err(fault), Err(error)) = (self.requests.complete(id, outcome), outcome) {
            self.found(fault, &error.to_string());
            self.requests.settle(id);
        }
    }

    /// Raises a signal of this rank.
    fn raise(&mut self, arrival: &SignalArrival) {
        let word = match arrival.target {
            SignalTarget::Id(id) => {
                let signals = self.requests.signals(arrival.context).filter(|_| id < self.parts.limits.signals);
                signals.map(|words| words.at(u64::from(id)))
            }
            SignalTarget::Address { window, offset } => {
                let info = self.parts.limits.windows.get(window as usize).and_then(Option::as_ref);
                let length = info.map_or(0, |info| info.lengths[self.parts.limits.rank as usize]);
                let inside = offset.is_multiple_of(8) && offset.saturating_add(8) <= length;
                let plane = info.and_then(|info| info.plane.as_ref()).filter(|_| inside);
                // Safety: the word is in range and aligned, the table keeps the plane alive, and all code uses its
                // words by atomic accesses.
                plane.map(|plane| unsafe { GlobalWord::new(plane.address() + offset) })
            }
        };
        match word {
            Some(word) => raise(word, arrival.amount),
            None => {
                let fault = Fault::new(FaultKind::UnknownSignal, Operation::Signal).with_context(arrival.context);
                let (subject, seen) = match arrival.target {
                    SignalTarget::Id(id) => (FaultSubject::Signal(id), u64::from(id)),
                    SignalTarget::Address { window, offset } => (FaultSubject::Window { id: window, offset }, offset),
                };
                let signals = u64::from(self.parts.limits.signals);
                self.found(fault.with_peer(arrival.from).with_values(subject, signals, seen), "");
            }
        }
    }
}
