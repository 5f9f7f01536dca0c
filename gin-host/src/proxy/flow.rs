// SPDX-License-Identifier: MIT OR Apache-2.0
//! The way of one request through the proxy: accepted, split into messages, posted, complete, published.

use super::check::operation;
use super::lists::Slot;
use super::{BATCH, Proxy, ROW, stats};
use gin_abi::{Descriptor, Fault, FaultKind, Operation, RemoteSignal, Transfer, WindowOffset};
use gin_net::{NetError, Request};

/// An unfinished request.
#[derive(Debug)]
pub(super) struct Op {
    pub(super) context: u32,
    pub(super) index: u64,
    pub(super) operation: Operation,
    request: Descriptor,
    /// The next part to post.
    rest: Rest,
    /// The number of bytes posted so far.
    moved: u64,
    /// The number of messages posted so far. Part of the messages' ids.
    messages: u32,
    /// The number of posted messages that are not complete.
    pub(super) outstanding: u32,
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
pub(super) fn slot(id: u64) -> Slot {
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
    pub(super) fn cancel(&mut self) {
        self.rest = Rest::Nothing;
    }

    /// Returns whether the request is finished.
    pub(super) fn is_over(&self) -> bool {
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

impl Proxy {
    pub(super) fn op(&self, id: u64) -> Option<&Op> {
        self.ops.get(slot(id) as usize).and_then(Option::as_ref)
    }

    /// Accepts a request that passed the check.
    pub(super) fn accept(&mut self, context: u32, index: u64, mut request: Descriptor) {
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
        // All earlier requests are complete. If completion means arrival, their data has arrived, and no peer is asked.
        let asks = quiet && !self.parts.limits.capabilities.completes_on_arrival();
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

    /// Posts the question of the oldest unfinished request to `peer`, if that request asks one.
    pub(super) fn ask(&mut self, context: u32, peer: u32) {
        let slot = self.contexts[context as usize].lists.release(peer);
        // A fault has canceled the question.
        self.late.extend(slot.filter(|_| self.over.is_none()));
    }

    /// Posts one batch to the network.
    pub(super) fn post(&mut self) -> bool {
        self.fill();
        if self.batch.is_empty() {
            return false;
        }
        let taken = self.parts.network.post(&self.batch);
        if taken > 0 {
            self.batch.drain(..taken);
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
        taken > 0
    }

    /// Fills the batch. Peers take turns.
    fn fill(&mut self) {
        let strong = self.parts.limits.capabilities.strong_signals;
        while self.batch.len() < BATCH {
            if let Some(slot) = self.late.pop_front() {
                if let Some(op) = &mut self.ops[slot as usize] {
                    self.batch.push(op.next(slot, self.parts.max_message, strong));
                    let stats = &self.contexts[op.context as usize].part.stats;
                    stats::add(&stats.of(Some(op.request.peer)).posted, 1);
                }
                continue;
            }
            let Some((context, peer)) = self.turns.pop_front() else { return };
            let part = &mut self.contexts[context as usize];
            let list = part.lists.unposted(peer);
            let Some(&slot) = list.front() else { continue };
            let Some(op) = &mut self.ops[slot as usize] else { continue };
            let mut row = 0;
            while op.has_message() && row < ROW {
                self.batch.push(op.next(slot, self.parts.max_message, strong));
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
    }

    /// Handles the completion of a message.
    pub(super) fn complete(&mut self, id: u64, outcome: Result<(), NetError>) {
        let slot = slot(id);
        let Some(op) = self.ops.get_mut(slot as usize).and_then(Option::as_mut) else { return };
        op.outstanding -= 1;
        let stats = &self.contexts[op.context as usize].part.stats;
        stats::add(&stats.of(Some(op.request.peer)).completions, 1);
        if let Err(error) = outcome {
            let fault = Fault::new(FaultKind::Network, op.operation);
            let fault = fault.with_context(op.context).with_peer(op.request.peer);
            let fault = error.apply(fault);
            op.cancel();
            op.failure = Some(fault);
            self.found(fault, &error.to_string());
        } else if op.outstanding == 0 && op.rest == Rest::LateSignal {
            self.late.push_back(slot);
        }
        if self.ops[slot as usize].as_ref().is_some_and(Op::is_over) {
            self.finish(slot);
        }
    }

    /// Finishes a request.
    pub(super) fn finish(&mut self, slot: Slot) {
        let Some(op) = self.ops[slot as usize].take() else { return };
        self.free.push(slot);
        // A fault has canceled all requests that were unfinished.
        let fault = op.failure.or(self.over);
        let counter = op.request.counter.filter(|_| fault.is_none());
        self.publish(op.context, op.index, Some(op.request.peer), fault, counter);
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
