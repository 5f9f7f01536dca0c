// SPDX-License-Identifier: MIT OR Apache-2.0
//! The life of a request in the proxy: taken from the queue, checked, split into messages, posted, complete, published.
//!
//! [`Consumer::finish`] defines the order in which the outcome of a request is published: fault, counter, oldest
//! incomplete request of the peer, completion index.

use super::check::{Limits, operation};
use super::lists::{Lists, Slot};
use super::{ContextPart, Parts, stats, trace};
use gin_abi::descriptor::{WORDS, without_time};
use gin_abi::{Descriptor, DescriptorError, Fault, FaultKind, FaultSubject, Operation};
use gin_abi::{RemoteSignal, Transfer, WindowOffset};
use gin_device::internal::queue::{Consumer, Finished};
use gin_device::internal::status::Status;
use gin_device::sys::{Global, GlobalWord, Word};
use gin_net::{NetError, Request};
use std::collections::VecDeque;

/// The maximum number of requests in one batch.
const BATCH: usize = 256;

/// The maximum number of consecutive messages of one long put, so that other requests get their turn.
const ROW: usize = 8;

/// An unfinished request.
#[derive(Debug)]
struct Op {
    context: u32,
    index: u64,
    operation: Operation,
    request: Descriptor,
    /// The next part to post.
    rest: Rest,
    /// The number of bytes posted so far.
    moved: u64,
    /// The number of messages posted so far. Part of the messages' ids.
    messages: u32,
    /// The number of posted messages that are not complete.
    outstanding: u32,
    failure: Option<Fault>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Rest {
    /// The payload from byte `moved` on. The last message carries the signal.
    Payload,
    /// A weak signal, to post once all messages have arrived.
    LateSignal,
    /// A question whether puts have arrived, to post once all requests before it are complete.
    Question,
    Nothing,
}

/// Returns the slot in the table of requests that a message's id contains.
fn slot(id: u64) -> Slot {
    (id >> 32) as Slot
}

/// Returns the part of a transfer that starts at byte `from` and is `length` bytes long.
fn part(transfer: Transfer, from: u64, length: u64) -> Transfer {
    let at = |start: WindowOffset| WindowOffset { offset: start.offset + from, ..start };
    match transfer {
        Transfer::Put { source, destination, .. } => {
            Transfer::Put { source: at(source), destination: at(destination), bytes: length }
        }
        Transfer::Get { source, destination, .. } => {
            Transfer::Get { source: at(source), destination: at(destination), bytes: length }
        }
        whole @ (Transfer::PutValue { .. } | Transfer::Nothing) => whole,
    }
}

impl Op {
    /// Cancels the messages that are not posted yet.
    fn cancel(&mut self) {
        self.rest = Rest::Nothing;
    }

    /// Returns whether the request is finished.
    fn is_over(&self) -> bool {
        self.rest == Rest::Nothing && self.outstanding == 0
    }

    /// Returns whether the request has a message to post now.
    fn has_message(&self) -> bool {
        self.rest == Rest::Payload
    }

    /// Returns the next message. `strong`: the network has strong signals.
    fn next(&mut self, slot: Slot, max_message: u64, strong: bool) -> Request {
        let total = self.request.transfer.bytes();
        let (transfer, signal) = match self.rest {
            Rest::Question => {
                self.rest = Rest::Nothing;
                (Transfer::Nothing, None)
            }
            Rest::LateSignal | Rest::Nothing => {
                self.rest = Rest::Nothing;
                (Transfer::Nothing, self.request.signal)
            }
            Rest::Payload => {
                let whole = matches!(self.request.transfer, Transfer::PutValue { .. } | Transfer::Nothing);
                let bytes = if whole { total } else { max_message.min(total - self.moved) };
                let transfer = part(self.request.transfer, self.moved, bytes);
                let first = self.moved == 0;
                self.moved += bytes;
                let last = self.moved == total;
                if last {
                    self.rest = Rest::Nothing;
                }
                match self.request.signal {
                    // A weak signal covers all messages of its put. A strong signal does so, too.
                    Some(signal) if last && (first || signal.strong || strong) => {
                        (transfer, Some(RemoteSignal { strong: signal.strong || !first, ..signal }))
                    }
                    // On a network without strong signals, it waits until the messages have arrived.
                    Some(_) if last => {
                        self.rest = Rest::LateSignal;
                        (transfer, None)
                    }
                    _ => (transfer, None),
                }
            }
        };
        let id = u64::from(slot) << 32 | u64::from(self.messages);
        self.messages = self.messages.wrapping_add(1);
        self.outstanding += 1;
        let more = self.request.more || self.rest == Rest::Payload;
        Request { id, context: self.context, peer: self.request.peer, transfer, signal, notice: None, more }
    }
}

#[derive(Debug)]
struct Context {
    consumer: Consumer<Global, WORDS>,
    lists: Lists,
    part: ContextPart,
    /// The request at the head of the queue has been counted as a stall.
    stalled: bool,
}

/// A request that did not pass the check.
pub(super) struct Refused {
    pub(super) fault: Fault,
    context: u32,
    index: u64,
    peer: Option<u32>,
}

/// The requests of a proxy that are not published yet.
#[derive(Debug)]
pub(super) struct Requests {
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
    /// The fault that ended the communicator.
    over: Option<Fault>,
    rank: u32,
    max_outstanding: usize,
    max_message: u64,
    strong: bool,
    /// Completion means arrival, so no peer is asked whether puts have arrived.
    completes_on_arrival: bool,
    status: Status<Global>,
}

impl Requests {
    /// Takes the contexts of the parts.
    ///
    /// # Safety
    /// - As for the proxy of these parts.
    pub(super) unsafe fn new(parts: &mut Parts) -> Self {
        let Limits { rank, ranks, capabilities, .. } = parts.limits;
        let first = parts.first_index;
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
            over: None,
            rank,
            max_outstanding: parts.max_outstanding,
            max_message: parts.max_message,
            strong: capabilities.strong_signals,
            completes_on_arrival: capabilities.completes_on_arrival(),
            status: parts.status,
        }
    }

    pub(super) fn contexts(&self) -> usize {
        self.contexts.len()
    }

    /// Returns the fault that ended the communicator.
    pub(super) fn over(&self) -> Option<Fault> {
        self.over
    }

    /// Returns the signal words of a context that CPU threads raise.
    pub(super) fn signals(&self, context: u32) -> Option<GlobalWord> {
        self.contexts.get(context as usize)?.part.signals
    }

    /// Returns the number of requests below these indices, one for each context, that are not below its completion
    /// index.
    pub(super) fn left(&self, heads: &[u64]) -> u64 {
        let each = self.contexts.iter().zip(heads);
        each.map(|(context, &head)| head.saturating_sub(context.lists.completion_index)).sum()
    }

    /// Returns whether a message is one of a get.
    pub(super) fn is_get(&self, id: u64) -> bool {
        let op = self.ops.get(slot(id) as usize).and_then(Option::as_ref);
        op.is_some_and(|op| op.operation == Operation::Get)
    }

    /// Takes the next request from a queue. Returns false if the queue has none, or if the request must wait because
    /// `max_outstanding` requests to its peer are unfinished.
    ///
    /// # Errors
    /// The request did not pass the check. It is published by [`refuse`](Self::refuse), once all ranks know the fault.
    pub(super) fn take(&mut self, context: usize, limits: &Limits) -> Result<bool, Refused> {
        let part = &mut self.contexts[context];
        let Some(words) = part.consumer.peek() else { return Ok(false) };
        let timed = part.part.timed;
        let (words, posted) = if timed { without_time(words) } else { (words, 0) };
        let request = Descriptor::decode(&words).map_err(|error| {
            let fault = Fault::new(FaultKind::BadDescriptor, Operation::None).with_context(context as u32);
            fault.with_values(FaultSubject::None, bad_word(error), words[0])
        });
        let checked = request.and_then(|request| limits.check(context as u32, &request).map(|()| request));
        let peer = request.ok().map(|request| request.peer).filter(|&peer| peer < limits.ranks);
        if let Some(peer) = peer
            && part.lists.unfinished(peer) >= self.max_outstanding
        {
            if !part.stalled {
                part.stalled = true;
                stats::add(&part.part.stats.of(Some(peer)).stalls, 1);
            }
            return Ok(false);
        }
        part.stalled = false;
        let index = part.consumer.take(peer.filter(|&peer| part.lists.unfinished(peer) == 0));
        part.lists.add(index, peer);
        let stats = &part.part.stats;
        stats::add(&stats.of(peer).accepted, 1);
        if let Some(peer) = peer {
            stats.depth(peer, part.lists.unfinished(peer) as u64, part.lists.depth() as u64);
        }
        let context = context as u32;
        let request = checked.map_err(|fault| Refused { fault, context, index, peer })?;
        trace::accepted(self.rank, context, index, &request, timed.then_some(posted));
        self.accept(context, index, request);
        Ok(true)
    }

    /// Accepts a request that passed the check.
    fn accept(&mut self, context: u32, index: u64, mut request: Descriptor) {
        if let Some(fault) = self.over {
            self.publish(context, index, Some(request.peer), Some(fault), None);
            return;
        }
        let operation = operation(&request);
        let figures = self.contexts[context as usize].part.stats.of(Some(request.peer));
        let bytes = request.transfer.bytes();
        let counted = match operation {
            Operation::Get => Some((&figures.gets, &figures.get_bytes)),
            Operation::Put => Some((&figures.puts, &figures.put_bytes)),
            Operation::PutValue => Some((&figures.values, &figures.put_bytes)),
            _ => None,
        };
        if let Some((requests, moved)) = counted {
            stats::add(requests, 1);
            stats::add(moved, bytes);
        }
        stats::add(&figures.signals, u64::from(request.signal.is_some()));
        let quiet = request.is_quiet();
        // All earlier requests are complete. If completion means arrival, their data has arrived.
        let asks = quiet && !self.completes_on_arrival;
        if bytes == 0 && !asks {
            if request.signal.is_none() {
                self.publish(context, index, Some(request.peer), None, request.counter);
                return;
            }
            request.transfer = Transfer::Nothing;
        }
        let op = Op {
            context,
            index,
            operation,
            request,
            rest: if asks { Rest::Question } else { Rest::Payload },
            moved: 0,
            messages: 0,
            outstanding: 0,
            failure: None,
        };
        let slot = self.free.pop().unwrap_or_else(|| {
            self.ops.push(None);
            (self.ops.len() - 1) as Slot
        });
        self.ops[slot as usize] = Some(op);
        if asks {
            self.contexts[context as usize].lists.hold(request.peer, index, slot);
            return self.ask(context, request.peer);
        }
        let list = self.contexts[context as usize].lists.unposted(request.peer);
        list.push_back(slot);
        if list.len() == 1 {
            self.turns.push_back((context, request.peer));
        }
    }

    /// Publishes a request that did not pass the check.
    pub(super) fn refuse(&mut self, refused: Refused) {
        let Refused { fault, context, index, peer } = refused;
        self.publish(context, index, peer, Some(fault), None);
    }

    /// Posts the question of the oldest unfinished request to `peer`, if that request asks one.
    fn ask(&mut self, context: u32, peer: u32) {
        let slot = self.contexts[context as usize].lists.release(peer);
        // A fault has canceled the question.
        self.late.extend(slot.filter(|_| self.over.is_none()));
    }

    /// Fills the batch, and returns it. Peers take turns.
    pub(super) fn fill(&mut self) -> &[Request] {
        while self.batch.len() < BATCH {
            if let Some(slot) = self.late.pop_front() {
                if let Some(op) = &mut self.ops[slot as usize] {
                    self.batch.push(op.next(slot, self.max_message, self.strong));
                    let stats = &self.contexts[op.context as usize].part.stats;
                    stats::add(&stats.of(Some(op.request.peer)).posted, 1);
                }
                continue;
            }
            let Some((context, peer)) = self.turns.pop_front() else { break };
            let part = &mut self.contexts[context as usize];
            let list = part.lists.unposted(peer);
            let Some(&slot) = list.front() else { continue };
            let Some(op) = &mut self.ops[slot as usize] else { continue };
            let mut row = 0;
            while op.has_message() && row < ROW {
                self.batch.push(op.next(slot, self.max_message, self.strong));
                row += 1;
            }
            if !op.has_message() {
                list.pop_front();
            }
            if !list.is_empty() {
                self.turns.push_back((context, peer));
            }
            stats::add(&part.part.stats.of(Some(peer)).posted, row as u64);
        }
        &self.batch
    }

    /// Notes that the network has the first `count` messages of the batch, which was not empty.
    pub(super) fn posted(&mut self, count: usize) {
        if count > 0 {
            self.batch.drain(..count);
            self.refused = false;
        }
        match self.batch.first() {
            Some(request) if !self.refused => {
                let stats = &self.contexts[request.context as usize].part.stats;
                stats::add(&stats.of(Some(request.peer)).retries, 1);
                self.refused = true;
            }
            _ => {}
        }
    }

    /// Handles the completion of a message.
    ///
    /// # Errors
    /// The fault of a message that failed. Its request is published by [`settle`](Self::settle), once all ranks know
    /// the fault.
    pub(super) fn complete(&mut self, id: u64, outcome: &Result<(), NetError>) -> Result<(), Fault> {
        let slot = slot(id);
        let Some(op) = self.ops.get_mut(slot as usize).and_then(Option::as_mut) else { return Ok(()) };
        op.outstanding -= 1;
        let stats = &self.contexts[op.context as usize].part.stats;
        stats::add(&stats.of(Some(op.request.peer)).completions, 1);
        if let Err(error) = outcome {
            let fault = Fault::new(FaultKind::Network, op.operation);
            let fault = error.apply(fault.with_context(op.context).with_peer(op.request.peer));
            op.cancel();
            op.failure = Some(fault);
            return Err(fault);
        }
        if op.outstanding == 0 && op.rest == Rest::LateSignal {
            self.late.push_back(slot);
        }
        self.settle(id);
        Ok(())
    }

    /// Finishes the request of a message, if it has no other messages.
    pub(super) fn settle(&mut self, id: u64) {
        let slot = slot(id);
        if self.ops.get(slot as usize).and_then(Option::as_ref).is_some_and(Op::is_over) {
            self.finish(slot);
        }
    }

    /// Posts no further message, and publishes the requests of which the network has none.
    pub(super) fn end(&mut self, fault: Fault) {
        self.over = Some(fault);
        self.ops.iter_mut().flatten().for_each(Op::cancel);
        self.refused = false;
        for request in std::mem::take(&mut self.batch) {
            if let Some(op) = &mut self.ops[slot(request.id) as usize] {
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

    /// Finishes a request.
    fn finish(&mut self, slot: Slot) {
        let Some(op) = self.ops[slot as usize].take() else { return };
        self.free.push(slot);
        // A fault has canceled all requests that were unfinished.
        let fault = op.failure.or(self.over);
        let counter = op.request.counter.filter(|_| fault.is_none());
        self.publish(op.context, op.index, Some(op.request.peer), fault, counter);
    }

    /// Publishes the end of a request.
    fn publish(&mut self, context: u32, index: u64, peer: Option<u32>, fault: Option<Fault>, counter: Option<u32>) {
        trace::finished(self.rank, context, index, fault.is_some());
        let part = &mut self.contexts[context as usize];
        part.lists.finish(index, peer);
        let stats = part.part.stats.of(peer);
        stats::add(&stats.finished, 1);
        stats::add(&stats.failed, u64::from(fault.is_some()));
        // A request without a peer is in no list, so the lists stay as they are.
        let listed = peer.unwrap_or(self.rank);
        part.consumer.finish(Finished {
            fault: fault.map(|fault| (&self.status, fault)),
            counter: counter.map(|id| part.part.counters.at(u64::from(id))),
            peer: listed,
            oldest_incomplete: part.lists.oldest_incomplete(listed),
            completion_index: part.lists.completion_index,
        });
        if let Some(peer) = peer {
            self.ask(context, peer);
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

#[cfg(test)]
mod tests {
    use super::*;
    use gin_abi::SignalTarget;
    use proptest::prelude::*;

    fn op(bytes: u64, strong: Option<bool>) -> Op {
        let transfer = Transfer::Put {
            source: WindowOffset { window: 1, offset: 100 },
            destination: WindowOffset { window: 2, offset: 7 },
            bytes,
        };
        let signal = strong.map(|strong| RemoteSignal { target: SignalTarget::Id(3), amount: 5, strong });
        Op {
            context: 4,
            index: 9,
            operation: Operation::Put,
            request: Descriptor { peer: 6, transfer, signal, counter: None, more: false },
            rest: Rest::Payload,
            moved: 0,
            messages: 0,
            outstanding: 0,
            failure: None,
        }
    }

    proptest! {
        #[test]
        fn messages_cover_a_put_without_gap_and_the_signal_covers_all_of_them(
            bytes in 1u64..2000, max_message in 1u64..300, signal in proptest::option::of(any::<bool>()),
            network_is_strong in any::<bool>(),
        ) {
            // A strong signal is posted only on a network that has them.
            prop_assume!(network_is_strong || signal != Some(true));
            let mut op = op(bytes, signal);
            let mut requests = Vec::new();
            while op.has_message() {
                requests.push(op.next(11, max_message, network_is_strong));
            }
            let (mut at, count) = (0, requests.len());
            for (number, request) in requests.iter().enumerate() {
                prop_assert_eq!((request.context, request.peer, slot(request.id)), (4, 6, 11));
                let Transfer::Put { source, destination, bytes: length } = request.transfer else {
                    panic!("{request:?}")
                };
                prop_assert_eq!((source.offset, destination.offset), (100 + at, 7 + at));
                prop_assert!(length > 0 && length <= max_message);
                at += length;
                prop_assert!(request.signal.is_none() || number + 1 == count);
            }
            prop_assert_eq!(at, bytes);
            prop_assert_eq!(op.outstanding as usize, count);
            let last = requests[count - 1].signal;
            match signal {
                None => prop_assert!(last.is_none() && op.rest == Rest::Nothing),
                Some(_) if count == 1 || network_is_strong => {
                    // Of one message: as requested. Of several: strong, so that it covers the messages before the last.
                    prop_assert_eq!(last.map(|signal| signal.strong), Some(signal == Some(true) || count > 1));
                    prop_assert_eq!(op.rest, Rest::Nothing);
                }
                Some(_) => {
                    prop_assert!(last.is_none() && op.rest == Rest::LateSignal && !op.is_over());
                    let late = op.next(11, max_message, false);
                    prop_assert_eq!(late.transfer, Transfer::Nothing);
                    prop_assert_eq!(late.signal.map(|signal| signal.amount), Some(5));
                }
            }
            let mut names: Vec<u64> = requests.iter().map(|request| request.id).collect();
            names.dedup();
            prop_assert_eq!(names.len(), count);
        }
    }
}
