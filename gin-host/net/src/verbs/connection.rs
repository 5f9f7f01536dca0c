// SPDX-License-Identifier: MIT OR Apache-2.0
//! The connection of a context with a peer.

use super::config::VerbsConfig;
use super::credits::{Credits, Returns};
use super::key::Hello;
use super::objects::{Chain, Depths, QueuePair};
use super::region::Buffer;
use super::send_queue::{Ended, Entry, SendQueue};
use super::windows::{RemoteRange, Windows};
use crate::message::{self, Message};
use crate::{KeyError, NetError, Request};
use gin_abi::{SignalTarget, Transfer};
use gin_verbs::verbs::{
    IBV_SEND_FENCE, IBV_SEND_SIGNALED, IBV_WR_RDMA_READ, IBV_WR_RDMA_WRITE, ScatterGatherEntry, SendWorkRequest,
};
use std::collections::VecDeque;
use std::time::Instant;

/// Bytes of a slot, for data outside any window: a signal, a value or a number of credits.
const SLOT: usize = message::BYTES;

/// Source and destination of a request's data.
#[derive(Clone, Copy, Debug)]
pub(super) struct Move {
    pub(super) reads: bool,
    pub(super) local: u64,
    pub(super) local_key: u32,
    pub(super) remote: RemoteRange,
    pub(super) bytes: u32,
    pub(super) window: Option<u32>,
    /// Replaces the memory of a window.
    pub(super) value: Option<u64>,
}

/// How a signal is raised.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Raise {
    /// The peer's NIC adds to a word.
    Nic { address: u64, key: u32 },
    /// The peer's proxy adds to the word when the message arrives.
    Message,
}

impl Move {
    /// Records what memory of the peer it writes: a host's (0) or a GPU's (1).
    fn book(&self, has_put: &mut [bool; 2]) {
        has_put[usize::from(self.remote.in_gpu)] |= !self.reads;
    }
}

/// Returns whether the NIC raises a word, in a GPU or in a host, after every earlier put. `has_put`: some puts went to
/// host memory, some to GPU memory.
fn is_ordered(has_put: [bool; 2], in_gpu: bool) -> bool {
    !has_put[usize::from(!in_gpu)]
}

/// The peer's end.
#[derive(Clone, Copy, Debug)]
struct Connected {
    /// Address of the peer's word for credits.
    credits: u64,
    credits_key: u32,
    /// Index of the peer's port.
    port: usize,
    /// Signal words of the context, if the peer's NIC raises them.
    words: Option<RemoteRange>,
}

/// Memory that all connections share.
#[derive(Debug)]
pub(super) struct Buffers {
    /// A word for each connection, which peers write.
    pub(super) credits: Buffer,
    /// For each connection: buffers for arriving messages, then slots for data to send.
    pub(super) slots: Buffer,
}

/// Returns the bytes of slots for one connection.
pub(super) fn slot_bytes(depths: Depths) -> usize {
    (depths.send_slots() + depths.receive) as usize * SLOT
}

/// A connection.
#[derive(Debug)]
pub(super) struct Connection {
    pub(super) queue_pair: QueuePair,
    index: usize,
    /// Index of this rank's port.
    port: usize,
    depths: Depths,
    pub(super) context: u32,
    pub(super) peer: u32,
    pub(super) send_queue: SendQueue,
    credits: Credits,
    returns: Returns,
    connected: Option<Connected>,
    /// Requests that wait for room in the send queue.
    pub(super) backlog: VecDeque<Request>,
    /// A request was refused, so no later signal may cover it.
    refused: bool,
    /// Some puts went to host memory (0), some to GPU memory (1).
    has_put: [bool; 2],
    /// The windows that the last of these puts went to.
    put_to: [Option<u32>; 2],
    /// Signals are sent as messages from now on.
    by_message: bool,
    /// Entries since the last one that asked for a completion.
    unsignalled: u32,
    /// Since when it has waited for the peer with no outstanding entry.
    waiting: Option<Instant>,
    /// It is in the list of busy connections.
    pub(super) listed: bool,
}

/// State that all connections share, lent to one while it works.
#[derive(Debug)]
pub(super) struct Tools {
    pub(super) buffers: Buffers,
    pub(super) windows: Windows,
    pub(super) chain: Chain,
    pub(super) ended: Ended,
    pub(super) config: VerbsConfig,
}

impl Connection {
    /// Wraps a queue pair. `index`: of the connection; `port`: of this rank's port.
    pub(super) fn new(
        queue_pair: QueuePair,
        (index, port): (usize, usize),
        depths: Depths,
        (context, peer): (u32, u32),
    ) -> Self {
        Self {
            queue_pair,
            index,
            port,
            depths,
            context,
            peer,
            send_queue: SendQueue::new(peer, depths.send),
            // No credit until the peer publishes its depth.
            credits: Credits::new(0),
            returns: Returns::new(depths.receive),
            connected: None,
            backlog: VecDeque::new(),
            refused: false,
            has_put: [false; 2],
            put_to: [None; 2],
            by_message: false,
            unsignalled: 0,
            waiting: None,
            listed: false,
        }
    }

    /// Posts the receive buffers and connects. `own`: index of this rank's end among those of the peer. `adds`: this
    /// end may have the peer's NIC raise signals.
    pub(super) fn connect(&mut self, peer: &Hello, own: usize, adds: bool, buffers: &Buffers) -> Result<(), NetError> {
        let port_index = peer.port_index(self.context);
        let (Some(&end), Some(port)) = (peer.ends.get(own), peer.ports.get(port_index)) else {
            return Err(KeyError { rank: self.peer, reason: "it has no such queue pair".to_owned() }.into());
        };
        self.queue_pair.begin()?;
        for slot in 0..self.depths.receive {
            self.receive(slot, buffers)?;
        }
        self.queue_pair.connect(port, end)?;
        self.credits = Credits::new(peer.signal_depth);
        let credits = peer.credits + 8 * own as u64;
        let words = (adds && peer.words != 0).then(|| RemoteRange {
            address: peer.words + 8 * u64::from(self.context) * u64::from(peer.per_context),
            key: port.words_key,
            in_gpu: peer.words_in_gpu,
            nic: true,
        });
        self.connected = Some(Connected { credits, credits_key: port.credits_key, port: port_index, words });
        Ok(())
    }

    fn receive_slot(&self, slot: u32) -> usize {
        self.index * slot_bytes(self.depths) + slot as usize * SLOT
    }

    /// Returns the offset of the next entry's slot.
    fn send_slot(&self) -> usize {
        self.receive_slot(self.depths.receive + self.depths.send_slot(self.send_queue.next()))
    }

    /// Posts a receive buffer.
    fn receive(&self, slot: u32, buffers: &Buffers) -> Result<(), NetError> {
        let id = (self.index as u64) << 32 | u64::from(slot);
        // Safety: the owner of this connection keeps the buffers longer.
        unsafe { self.queue_pair.receive(id, buffers.slots.sge(self.receive_slot(slot), SLOT, self.port)) }
    }

    /// Returns whether no request is waiting or outstanding.
    pub(super) fn is_quiet(&self) -> bool {
        self.backlog.is_empty() && self.send_queue.entries.is_empty()
    }

    /// Returns whether there is work that no completion will announce.
    pub(super) fn is_busy(&self) -> bool {
        !self.backlog.is_empty() || (self.returns.is_due() && self.send_queue.broken().is_none())
    }

    /// Enters itself into the list of busy connections.
    pub(super) fn list(&mut self, busy: &mut Vec<usize>) {
        if !self.listed {
            self.listed = true;
            busy.push(self.index);
        }
    }

    /// Reads the message that has arrived in a buffer and posts the buffer again. `None` if it is not a valid message.
    pub(super) fn arrive(&mut self, slot: u32, bytes: u32, buffers: &Buffers) -> Option<Message> {
        let message = buffers.slots.read(self.receive_slot(slot % self.depths.receive));
        match self.receive(slot % self.depths.receive, buffers) {
            Ok(()) => self.returns.receive(),
            Err(error) => self.fail(error),
        }
        if bytes as usize == SLOT { Message::from_bytes(&message) } else { None }
    }

    /// Ends the connection: this end is in error, or the peer broke the protocol.
    pub(super) fn fail(&mut self, error: NetError) {
        self.send_queue.end(error);
        self.force_error();
    }

    /// Puts the queue pair into error; its completions report it.
    pub(super) fn force_error(&self) {
        // Fails only if the queue pair is in error already, or the device is gone.
        let _ = self.queue_pair.fail();
    }

    /// Posts requests of the backlog, as far as there is room.
    pub(super) fn work(&mut self, tools: &mut Tools) {
        if self.send_queue.broken().is_some() {
            for request in self.backlog.drain(..) {
                let outcome = self.send_queue.refusal().map_or(Ok(()), Err);
                tools.ended.requests.push((request.id, outcome));
            }
            return;
        }
        let Some(connected) = self.connected else { return };
        tools.chain.clear();
        if self.returns.is_due() {
            self.return_credits(connected, tools);
        }
        self.credits.look(tools.buffers.credits.word(8 * self.index));
        while let Some(request) = self.backlog.front() {
            // Checks for room first, so that a refused request fails in the order of posting.
            if !self.send_queue.has_room(2) {
                break;
            }
            if request.is_quiet() {
                let id = request.id;
                self.backlog.pop_front();
                self.read_behind_puts(id, connected, tools);
                continue;
            }
            let planned = self.plan(request, connected, &tools.windows);
            if matches!(planned, Ok((_, Some(Raise::Message)))) && !self.credits.is_there() {
                break;
            }
            let Some(request) = self.backlog.pop_front() else { break };
            match planned {
                Ok((plan, raise)) => self.put_in(&request, plan, raise, tools),
                Err(error) => {
                    self.refused = true;
                    tools.ended.requests.push((request.id, Err(error)));
                }
            }
        }
        self.ask(connected, tools);
        tools.chain.signal_last();
        if tools.chain.len() > 0 {
            self.unsignalled = 0;
        }
        // Safety: windows stay registered while entries use them, which `enter` and `leave` count; a slot is reused
        // only after its entry has ended.
        if let Err((posted, error)) = unsafe { self.queue_pair.post(&mut tools.chain) } {
            self.send_queue.abandon(tools.chain.len().saturating_sub(posted), &error, &mut tools.ended);
            self.fail(error);
        }
    }

    /// Returns what a request moves, and how its signal is raised.
    fn plan(
        &self,
        request: &Request,
        connected: Connected,
        windows: &Windows,
    ) -> Result<(Option<Move>, Option<Raise>), NetError> {
        if self.refused && request.is_strong() {
            return Err(NetError::behind(self.peer));
        }
        if let Some(signal) = &request.signal {
            windows.check_signal(self.peer, signal)?;
        }
        let plan = |reads, (local, local_key), remote, bytes, window, value| -> Result<_, NetError> {
            let (context, peer) = ("a message that is too long", self.peer);
            let length = u32::try_from(bytes).map_err(|_| NetError::Failed { context, peer, status: bytes })?;
            Ok(Some(Move { reads, local, local_key, remote, bytes: length, window, value }))
        };
        let of = |window, offset, bytes| windows.remote(window, self.peer, offset, bytes, connected.port);
        let moved = match request.transfer {
            Transfer::Nothing => Ok(None),
            Transfer::Put { source, destination, bytes } => {
                let own = windows.local(source.window, source.offset, bytes, self.port)?;
                let remote = of(destination.window, destination.offset, bytes)?;
                plan(false, own, remote, bytes, Some(source.window), None)
            }
            Transfer::Get { source, destination, bytes } => {
                let remote = of(source.window, source.offset, bytes)?;
                let own = windows.local(destination.window, destination.offset, bytes, self.port)?;
                plan(true, own, remote, bytes, Some(destination.window), None)
            }
            Transfer::PutValue { value, width_log2, destination } => {
                let bytes = 1 << width_log2.min(3);
                plan(false, (0, 0), of(destination.window, destination.offset, bytes)?, bytes, None, Some(value))
            }
        };
        let moved = moved?.filter(|moved| moved.bytes > 0);
        let raise = request.signal.map(|signal| {
            let word = match signal.target {
                SignalTarget::Id(id) => {
                    connected.words.map(|words| RemoteRange { address: words.address + 8 * u64::from(id), ..words })
                }
                SignalTarget::Address { window, offset } => {
                    let word = of(window, offset, 8).ok();
                    word.filter(|word| word.nic && connected.words.is_some())
                }
            };
            self.raise(moved.as_ref(), word)
        });
        Ok((moved, raise.or(request.notice.map(|_| Raise::Message))))
    }

    /// Returns how a signal behind a transfer is raised. `word`: the word that the peer's NIC may raise.
    ///
    /// The NIC carries out the requests of a connection in order, and its writes to one memory arrive there in order.
    /// So the word is raised after every earlier put, if all of them went to the memory of the word: the GPU or the
    /// host. Between the two nothing is ordered. Once one signal is sent as a message all are, because a signal that
    /// the NIC raises may overtake a message.
    fn raise(&self, plan: Option<&Move>, word: Option<RemoteRange>) -> Raise {
        let mut has_put = self.has_put;
        if let Some(plan) = plan {
            plan.book(&mut has_put);
        }
        match word {
            Some(RemoteRange { address, key, in_gpu, .. }) if !self.by_message && is_ordered(has_put, in_gpu) => {
                Raise::Nic { address, key }
            }
            _ => Raise::Message,
        }
    }

    /// Adds the entries of a request.
    fn put_in(&mut self, request: &Request, plan: Option<Move>, raise: Option<Raise>, tools: &mut Tools) {
        let last = Entry { request: Some(request.id), ..Entry::default() };
        if let Some(plan) = plan {
            plan.book(&mut self.has_put);
            if let Transfer::Put { destination, .. } | Transfer::PutValue { destination, .. } = request.transfer {
                self.put_to[usize::from(plan.remote.in_gpu)] = Some(destination.window);
            }
            let opcode = if plan.reads { IBV_WR_RDMA_READ } else { IBV_WR_RDMA_WRITE };
            let work = SendWorkRequest::rdma(opcode, plan.remote.address, plan.remote.key);
            let first = if raise.is_some() { Entry { part: true, ..Entry::default() } } else { last };
            match plan.value {
                Some(value) => self.add_bytes(work, &value.to_le_bytes()[..plan.bytes as usize], first, tools),
                None => {
                    if let Some(window) = plan.window {
                        tools.windows.enter(window);
                    }
                    let sge = ScatterGatherEntry { addr: plan.local, length: plan.bytes, lkey: plan.local_key };
                    self.add(work, sge, Entry { window: plan.window, ..first }, tools);
                }
            }
        }
        // A signal behind a read waits until the data has landed.
        let fence = if plan.is_some_and(|plan| plan.reads) { IBV_SEND_FENCE } else { 0 };
        match raise {
            Some(Raise::Message) => {
                self.by_message = true;
                self.credits.take();
                let mut work = SendWorkRequest::send();
                work.send_flags |= fence;
                self.add_bytes(work, &message::of(request), last, tools);
            }
            Some(Raise::Nic { address, key }) => {
                let amount = request.signal.map_or(0, |signal| signal.amount);
                let mut work = SendWorkRequest::fetch_and_add(address, key, amount);
                work.send_flags |= fence;
                // The NIC stores the word's previous value in the slot; nothing reads it.
                let sge = tools.buffers.slots.sge(self.send_slot(), 8, self.port);
                self.add(work, sge, last, tools);
            }
            None if plan.is_none() => tools.ended.requests.push((request.id, Ok(()))),
            None => {}
        }
    }

    /// Adds the entries of a quiet: for each memory of the peer that puts went to, the host and the GPU, the read of a
    /// byte there.
    ///
    /// The peer's NIC carries out the reads after the earlier writes of this connection. It posts writes over PCIe, and
    /// a read of the same memory does not overtake them. So the answer to the read confirms that the writes have
    /// arrived. [`Flush`](super::flush) relies on the same rule for this rank's NIC.
    fn read_behind_puts(&mut self, request: u64, connected: Connected, tools: &mut Tools) {
        if self.refused {
            tools.ended.requests.push((request, Err(NetError::behind(self.peer))));
            return;
        }
        // Nobody uses a window any more that ranks have deregistered.
        let first = |window: u32| tools.windows.remote(window, self.peer, 0, 1, connected.port).ok();
        let [host, gpu] = self.put_to.map(|window| window.and_then(first));
        let (other, last) = if gpu.is_some() { (host, gpu) } else { (None, host) };
        let Some(last) = last else {
            tools.ended.requests.push((request, Ok(())));
            return;
        };
        let end = Entry { request: Some(request), ..Entry::default() };
        let part = Entry { part: true, ..Entry::default() };
        for (from, entry) in other.map(|other| (other, part)).into_iter().chain([(last, end)]) {
            let work = SendWorkRequest::rdma(IBV_WR_RDMA_READ, from.address, from.key);
            // Nothing uses the byte.
            let sge = tools.buffers.slots.sge(self.send_slot(), 1, self.port);
            self.add(work, sge, entry, tools);
        }
    }

    /// Adds an entry that sends bytes from its slot.
    fn add_bytes(&mut self, mut work: SendWorkRequest, bytes: &[u8], entry: Entry, tools: &mut Tools) {
        let slot = self.send_slot();
        tools.buffers.slots.write(slot, bytes);
        work.send_flags |= self.queue_pair.inline(bytes.len());
        let sge = tools.buffers.slots.sge(slot, bytes.len(), self.port);
        self.add(work, sge, entry, tools);
    }

    fn add(&mut self, mut work: SendWorkRequest, sge: ScatterGatherEntry, entry: Entry, tools: &mut Tools) {
        work.wr_id = (self.index as u64) << 32 | u64::from(self.send_queue.next());
        self.unsignalled += 1;
        if self.unsignalled >= tools.config.completion_every {
            self.unsignalled = 0;
            work.send_flags |= IBV_SEND_SIGNALED;
        }
        self.send_queue.entries.push_back(entry);
        tools.chain.push(work, sge);
    }

    /// Writes to the peer how many of its signals this rank has handled, if there is room.
    fn return_credits(&mut self, connected: Connected, tools: &mut Tools) {
        if !self.send_queue.has_room(1) {
            return;
        }
        let work = SendWorkRequest::rdma(IBV_WR_RDMA_WRITE, connected.credits, connected.credits_key);
        let word = self.returns.publish();
        self.add_bytes(work, &word.to_le_bytes(), Entry::default(), tools);
    }

    /// Checks that the peer's NIC answers, if its proxy has been waited for long: writes credits, which changes
    /// nothing.
    fn ask(&mut self, connected: Connected, tools: &mut Tools) {
        if self.backlog.is_empty() || !self.send_queue.entries.is_empty() {
            self.waiting = None;
            return;
        }
        let since = *self.waiting.get_or_insert_with(Instant::now);
        if since.elapsed() >= tools.config.ask_after {
            self.waiting = None;
            self.return_credits(connected, tools);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn outstanding_entries_have_distinct_slots_also_where_their_numbers_wrap() {
        for send in [4, 5, 48, 128, (1 << 15) - 1] {
            let depths = Depths { send, receive: 2 };
            let first = 0u32.wrapping_sub(send / 2);
            let slots: BTreeSet<_> = (0..send).map(|entry| depths.send_slot(first.wrapping_add(entry))).collect();
            assert_eq!(slots.len(), send as usize, "depth {send}");
            let end = slots.last().map_or(0, |slot| (depths.receive + slot + 1) as usize * SLOT);
            assert!(end <= slot_bytes(depths), "depth {send}");
        }
    }

    #[test]
    fn a_word_is_ordered_behind_puts_to_memory_of_its_kind_only() {
        let transfer = |reads, in_gpu| {
            let remote = RemoteRange { address: 0, key: 0, in_gpu, nic: true };
            Move { reads, local: 0, local_key: 0, remote, bytes: 8, window: None, value: None }
        };
        let mut has_put = [false; 2];
        assert!(is_ordered(has_put, false) && is_ordered(has_put, true), "nothing was put");
        // A read writes nothing at the peer.
        transfer(true, false).book(&mut has_put);
        transfer(false, true).book(&mut has_put);
        assert!(is_ordered(has_put, true) && !is_ordered(has_put, false));
        transfer(false, false).book(&mut has_put);
        assert!(!is_ordered(has_put, true) && !is_ordered(has_put, false), "both");
    }
}
