// SPDX-License-Identifier: MIT OR Apache-2.0
//! The proxy: consumes the requests that kernels post, checks them, posts them to the network, and publishes the
//! outcome.
//!
//! One proxy serves one rank of one communicator, with a queue for each context and one endpoint of a network. A
//! progress thread ([`progress`]) or a scheduler calls [`Proxy::step`], which never waits: not for the network, not for
//! a lock, not for a peer.
//!
//! A step consumes descriptors, posts one batch, and finishes the requests that the network has completed.
//! [`Consumer::finish`](gin_device::internal::queue::Consumer::finish) defines the order in which the outcome of a
//! request is published: fault, counter, oldest, done.
//!
//! A fault of any origin ends the whole communicator. The proxy posts the fault to its rank's kernels, announces it to
//! the other ranks through the [board](gin_boot::board), posts no further request, and completes the remaining requests
//! with that fault.

mod check;
mod command;
mod flow;
mod lists;
pub mod progress;
mod stats;
pub mod trace;

pub(crate) use check::{Limits, WindowInfo};
pub(crate) use command::{Command, Waiting};
pub(crate) use stats::Counters;
pub use stats::{PeerStats, Stats};

use crate::comm::print::Printer;
use flow::Op;
use gin_abi::descriptor::{WORDS, without_time};
use gin_abi::{Descriptor, DescriptorError, Fault, FaultKind, FaultSubject, Operation, SignalTarget};
use gin_boot::board::Board;
use gin_device::internal::queue::{Consumer, Finished, Queue};
use gin_device::internal::signal_words::raise;
use gin_device::internal::status::Status;
use gin_device::sys::{Global, GlobalWord, Word};
use gin_net::{Event, Network, Request, SignalArrival};
use lists::{Lists, Slot};
use std::any::Any;
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::mpsc::Receiver;

/// The maximum number of descriptors consumed from one queue in one step.
const TAKE: usize = 64;

/// The maximum number of requests in one batch.
const BATCH: usize = 256;

/// The maximum number of consecutive messages of one long put, so that other requests get their turn.
const ROW: usize = 8;

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

#[derive(Debug)]
struct Context {
    consumer: Consumer<Global, WORDS>,
    lists: Lists,
    part: ContextPart,
    /// The request at the head of the queue has been counted as a stall.
    stalled: bool,
}

/// The proxy of one rank of one communicator.
#[derive(Debug)]
pub struct Proxy {
    contexts: Vec<Context>,
    ops: Vec<Option<Op>>,
    free: Vec<Slot>,
    /// The pairs of context and peer that have messages to post, in the order of their turns.
    turns: VecDeque<(u32, u32)>,
    /// The requests whose weak signal or question follows, because the puts before it are complete.
    late: VecDeque<Slot>,
    batch: Vec<Request>,
    /// The network had no room for the first message of the batch, and that has been counted.
    refused: bool,
    events: Vec<Event>,
    /// The fault that ended the communicator.
    over: Option<Fault>,
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
        let first = parts.first_index;
        let ranks = parts.limits.ranks;
        let contexts = std::mem::take(&mut parts.contexts).into_iter().map(|part| {
            // Safety: the caller's promise.
            let consumer = unsafe { Consumer::new(part.queue, first) };
            Context { consumer, lists: Lists::new(first, ranks), part, stalled: false }
        });
        Self {
            contexts: contexts.collect(),
            ops: Vec::new(),
            free: Vec::new(),
            turns: VecDeque::new(),
            late: VecDeque::new(),
            batch: Vec::new(),
            refused: false,
            events: Vec::new(),
            over: None,
            waiting: Vec::new(),
            finished: false,
            parts,
        }
    }

    /// Does all work that is ready. Never waits.
    pub fn step(&mut self) -> Turn {
        if self.finished {
            return Turn::Finished;
        }
        let mut worked = self.command();
        worked |= self.listen();
        for context in 0..self.contexts.len() {
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
        if self.over.is_some() {
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
        if self.over.is_none() {
            // Both before a request is completed because of the fault. The host knows the fault when a kernel does.
            self.parts.board.post_because(self.parts.limits.rank, fault, cause);
            self.parts.status.post(fault);
            self.end(fault);
        }
    }

    /// Posts no further request, and completes the requests that the network does not have.
    fn end(&mut self, fault: Fault) {
        self.over = Some(fault);
        let (rank, kind, operation) = (self.parts.limits.rank, fault.kind(), fault.operation());
        let named = |number| (number != gin_abi::fault::NONE).then_some(number);
        let (peer, context) = (named(fault.peer()), named(fault.context()));
        match kind {
            FaultKind::Aborted | FaultKind::Elsewhere => {
                tracing::debug!(rank, ?kind, peer, "the communicator is ended from elsewhere");
            }
            _ => tracing::warn!(rank, ?kind, ?operation, context, peer, "a fault ends the communicator"),
        }
        self.ops.iter_mut().flatten().for_each(Op::cancel);
        self.refused = false;
        for request in std::mem::take(&mut self.batch) {
            if let Some(op) = &mut self.ops[flow::slot(request.id) as usize] {
                op.outstanding -= 1;
            }
        }
        self.turns.clear();
        self.late.clear();
        for slot in 0..self.ops.len() as Slot {
            if self.ops[slot as usize].as_ref().is_some_and(Op::is_over) {
                self.finish(slot);
            }
        }
    }

    /// Consumes descriptors from one queue.
    fn take(&mut self, context: usize) -> bool {
        for taken in 0..TAKE {
            let Some(words) = self.contexts[context].consumer.peek() else { return taken > 0 };
            let timed = self.contexts[context].part.timed;
            let (words, posted) = if timed { without_time(words) } else { (words, 0) };
            let request = Descriptor::decode(&words).map_err(|error| {
                let fault = Fault::new(FaultKind::BadDescriptor, Operation::None).with_context(context as u32);
                fault.with_values(FaultSubject::None, bad_word(error), words[0])
            });
            let limits = &self.parts.limits;
            let checked = request.and_then(|request| limits.check(context as u32, &request).map(|()| request));
            let peer = request.ok().map(|request| request.peer).filter(|&peer| peer < limits.ranks);
            let part = &mut self.contexts[context];
            if let Some(peer) = peer
                && part.lists.unfinished(peer) >= self.parts.max_outstanding
            {
                if !part.stalled {
                    part.stalled = true;
                    stats::add(&part.part.stats.of(Some(peer)).stalls, 1);
                }
                return taken > 0;
            }
            part.stalled = false;
            let index = part.consumer.take(peer.filter(|&peer| part.lists.unfinished(peer) == 0));
            part.lists.add(index, peer);
            let stats = &part.part.stats;
            stats::add(&stats.of(peer).accepted, 1);
            if let Some(peer) = peer {
                stats.depth(peer, part.lists.unfinished(peer) as u64, part.lists.depth() as u64);
            }
            match checked {
                Ok(request) => {
                    trace::accepted(limits.rank, context as u32, index, &request, timed.then_some(posted));
                    self.accept(context as u32, index, request);
                }
                Err(fault) => {
                    self.found(fault, "");
                    self.publish(context as u32, index, peer, Some(fault), None);
                }
            }
        }
        true
    }

    /// Publishes the end of a request.
    fn publish(&mut self, context: u32, index: u64, peer: Option<u32>, fault: Option<Fault>, counter: Option<u32>) {
        trace::finished(self.parts.limits.rank, context, index, fault.is_some());
        let part = &mut self.contexts[context as usize];
        part.lists.finish(index, peer);
        let stats = part.part.stats.of(peer);
        stats::add(&stats.finished, 1);
        stats::add(&stats.failed, u64::from(fault.is_some()));
        // A request without a peer is in no list, so the lists stay as they are.
        let listed = peer.unwrap_or(self.parts.limits.rank);
        part.consumer.finish(Finished {
            fault: fault.map(|fault| (&self.parts.status, fault)),
            counter: counter.map(|id| part.part.counters.at(u64::from(id))),
            peer: listed,
            oldest_incomplete: part.lists.oldest_incomplete(listed),
            completion_index: part.lists.completion_index,
        });
        if let Some(peer) = peer {
            self.ask(context, peer);
        }
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
            Event::Completion { id, .. } => self.op(*id).is_some_and(|op| op.operation == Operation::Get),
        });
        if brought && self.parts.limits.capabilities.needs_make_visible {
            visible = self.parts.network.make_visible();
        }
        if let Err(error) = &visible {
            self.found(error.apply(Fault::new(FaultKind::Network, Operation::None)), &error.to_string());
        }
        for event in events.drain(..) {
            match event {
                Event::Completion { id, outcome } => self.complete(id, outcome.and_then(|()| visible.clone())),
                Event::Signal(arrival) if visible.is_ok() => self.raise(&arrival),
                // Notices are for networks, which keep their own.
                Event::Signal(_) | Event::Notice(_) => {}
            }
        }
        self.events = events;
        true
    }

    /// Raises a signal of this rank.
    fn raise(&mut self, arrival: &SignalArrival) {
        let word = match arrival.target {
            SignalTarget::Id(id) => {
                let context = self.contexts.get(arrival.context as usize);
                let signals =
                    context.filter(|_| id < self.parts.limits.signals).and_then(|context| context.part.signals);
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

/// Returns the number that names the invalid word of a descriptor; 8 if several words disagree.
fn bad_word(error: DescriptorError) -> u64 {
    match error {
        DescriptorError::Operation(_) | DescriptorError::Signal(_) => 0,
        DescriptorError::Reserved(word) => word as u64,
        DescriptorError::Combination => WORDS as u64,
    }
}
