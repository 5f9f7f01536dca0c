// SPDX-License-Identifier: MIT OR Apache-2.0
//! One connection: that of a context with a peer.

use super::config::VerbsConfig;
use super::credits::{Credits, Returns};
use super::key::{End, Hello};
use super::ledger::{Ended, Entry, Ledger, Outcome};
use super::message::{self, Message};
use super::objects::{Chain, Depths, Queue};
use super::region::Buffer;
use super::windows::{There, Windows};
use crate::{NetError, Request};
use gin_abi::{SignalTarget, Transfer};
use gin_verbs::verbs::{FLAG, OPCODE, SendRequest};
use std::collections::VecDeque;
use std::time::Instant;

/// Bytes of what an entry can send that is in no window: a signal, a value or a number of credits.
const SLOT: usize = message::BYTES;

/// Where the data of a request goes from and to.
#[derive(Clone, Copy, Debug)]
pub(super) struct Move {
    pub(super) reads: bool,
    pub(super) local: u64,
    pub(super) local_key: u32,
    pub(super) remote: u64,
    pub(super) remote_key: u32,
    pub(super) bytes: u32,
    pub(super) window: Option<u32>,
    /// In place of memory of a window.
    pub(super) value: Option<u64>,
    /// The peer's memory lies in a GPU.
    pub(super) in_gpu: bool,
}

/// How a signal is raised.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Raise {
    /// The peer's NIC adds to a word.
    Nic { address: u64, key: u32 },
    /// The peer's proxy does it, when the message comes.
    Message,
}

impl Move {
    fn new(
        reads: bool,
        (local, local_key): (u64, u32),
        there: There,
        bytes: u32,
        window: Option<u32>,
        value: Option<u64>,
    ) -> Self {
        let There { address: remote, key: remote_key, in_gpu, .. } = there;
        Self { reads, local, local_key, remote, remote_key, bytes, window, value, in_gpu }
    }

    /// Notes what memory it writes at the peer: a host's, a GPU's.
    fn book(&self, has_put: &mut [bool; 2]) {
        has_put[usize::from(self.in_gpu)] |= !self.reads;
    }
}

/// Whether a word in a GPU, or in a host, is raised after all that was put: some of it to hosts, some to GPUs.
fn is_ordered(has_put: [bool; 2], in_gpu: bool) -> bool {
    !has_put[usize::from(!in_gpu)]
}

/// Where a peer's credits are written, and its end.
#[derive(Clone, Copy, Debug)]
struct Connected {
    credits: u64,
    credits_key: u32,
    /// Index of the peer's port.
    rail: usize,
    /// Words of the context that the peer's NIC raises, if it does.
    words: Option<There>,
}

/// Memory that all connections share.
#[derive(Debug)]
pub(super) struct Buffers {
    /// A word for each connection, which peers write.
    pub(super) credits: Buffer,
    /// For each connection, buffers for signals that arrive and slots for what is sent.
    pub(super) slots: Buffer,
}

/// Bytes of slots for one connection.
pub(super) fn slot_bytes(depths: Depths) -> usize {
    (depths.send_slots() + depths.receive) as usize * SLOT
}

/// A connection.
#[derive(Debug)]
pub(super) struct Line {
    queue: Queue,
    index: usize,
    /// Index of the own port.
    rail: usize,
    depths: Depths,
    pub(super) context: u32,
    pub(super) peer: u32,
    ledger: Ledger,
    credits: Credits,
    returns: Returns,
    connected: Option<Connected>,
    backlog: VecDeque<Request>,
    /// A request was refused, so that nothing that covers it may be signalled.
    refused: bool,
    /// Of what was put: some went to memory of a host, some to that of a GPU.
    has_put: [bool; 2],
    /// Signals go as messages from now on.
    by_message: bool,
    /// Entries since the last that asked for a completion.
    unsignalled: u32,
    /// Since when it has had nothing under way and waits for the peer.
    waiting: Option<Instant>,
    /// It is in the list of those that have something to do.
    pub(super) listed: bool,
}

/// What a connection works with while it is looked after.
pub(super) struct Tools<'a> {
    pub(super) buffers: &'a mut Buffers,
    pub(super) windows: &'a mut Windows,
    pub(super) chain: &'a mut Chain,
    pub(super) ended: &'a mut Ended,
    pub(super) config: &'a VerbsConfig,
}

impl Line {
    pub(super) fn new(
        queue: Queue,
        (index, rail): (usize, usize),
        depths: Depths,
        (context, peer): (u32, u32),
    ) -> Self {
        Self {
            queue,
            index,
            rail,
            depths,
            context,
            peer,
            ledger: Ledger::new(peer, depths.send),
            // No credit until the peer says how much.
            credits: Credits::new(0),
            returns: Returns::new(depths.receive),
            connected: None,
            backlog: VecDeque::new(),
            refused: false,
            has_put: [false; 2],
            by_message: false,
            unsignalled: 0,
            waiting: None,
            listed: false,
        }
    }

    pub(super) fn end(&self) -> End {
        self.queue.end()
    }

    /// Posts its buffers and connects it. `own`: index of this rank's end among those of the peer. `adds`: this end may have
    /// the peer's NIC raise signals.
    pub(super) fn connect(&mut self, peer: &Hello, own: usize, adds: bool, buffers: &Buffers) -> Result<(), NetError> {
        let rail = peer.rail(self.context);
        let (Some(&end), Some(port)) = (peer.ends.get(own), peer.ports.get(rail)) else {
            return Err(NetError::Key { rank: self.peer, reason: "it has no such queue pair".to_owned() });
        };
        self.queue.begin()?;
        for slot in 0..self.depths.receive {
            self.receive(slot, buffers)?;
        }
        self.queue.connect(port, end)?;
        self.credits = Credits::new(peer.signal_depth);
        let credits = peer.credits + 8 * own as u64;
        let words = (adds && peer.words != 0).then(|| There {
            address: peer.words + 8 * u64::from(self.context) * u64::from(peer.per_context),
            key: port.words_key,
            in_gpu: peer.words_in_gpu,
            nic: true,
        });
        self.connected = Some(Connected { credits, credits_key: port.credits_key, rail, words });
        Ok(())
    }

    fn receive_slot(&self, slot: u32) -> usize {
        self.index * slot_bytes(self.depths) + slot as usize * SLOT
    }

    fn send_slot(&self, number: u32) -> usize {
        self.receive_slot(self.depths.receive + self.depths.send_slot(number))
    }

    /// Has the NIC use a buffer.
    fn receive(&self, slot: u32, buffers: &Buffers) -> Result<(), NetError> {
        let id = (self.index as u64) << 32 | u64::from(slot);
        // Safety: the owner of this line keeps the buffers longer.
        unsafe { self.queue.receive(id, buffers.slots.piece(self.receive_slot(slot), SLOT, self.rail)) }
    }

    /// Whether it takes one more request.
    pub(super) fn has_room(&self, config: &VerbsConfig) -> bool {
        self.backlog.len() < config.backlog
    }

    /// Takes a request.
    pub(super) fn take(&mut self, request: Request) {
        self.backlog.push_back(request);
    }

    /// Whether nothing of it is under way.
    pub(super) fn is_quiet(&self) -> bool {
        self.backlog.is_empty() && self.ledger.is_empty()
    }

    /// Whether it has something to do that no completion will tell.
    pub(super) fn is_busy(&self) -> bool {
        !self.backlog.is_empty() || (self.returns.is_due() && self.ledger.broken().is_none())
    }

    /// A completion of the send queue.
    pub(super) fn complete(&mut self, number: u32, outcome: Outcome, ended: &mut Ended) {
        self.ledger.complete(number, outcome, ended);
    }

    /// What has arrived in a buffer, which is given back to the NIC. `None` if it is no message.
    pub(super) fn arrive(&mut self, slot: u32, bytes: u32, buffers: &Buffers) -> Option<Message> {
        let message = buffers.slots.read(self.receive_slot(slot % self.depths.receive));
        match self.receive(slot % self.depths.receive, buffers) {
            Ok(()) => self.returns.receive(),
            Err(error) => self.fail(error),
        }
        if bytes as usize == SLOT { Message::from_bytes(&message) } else { None }
    }

    /// The peer does what cannot be, or this end is in error: nothing more comes of it.
    pub(super) fn fail(&mut self, error: NetError) {
        self.ledger.end(error);
        // If it cannot be put into error it is in error already, or gone.
        let _ = self.queue.fail();
    }

    /// Puts the queue pair into error, and leaves it to completions to tell.
    pub(super) fn force_error(&self) {
        let _ = self.queue.fail();
    }

    /// This end was seen in error; why is told elsewhere.
    pub(super) fn seen_in_error(&mut self, error: NetError) {
        self.ledger.end(error);
    }

    /// Posts what there is room for.
    pub(super) fn work(&mut self, tools: &mut Tools<'_>) {
        if self.ledger.broken().is_some() {
            for request in self.backlog.drain(..) {
                let outcome = self.ledger.refusal().map_or(Ok(()), Err);
                tools.ended.requests.push((request.id, outcome));
            }
            return;
        }
        let Some(connected) = self.connected else { return };
        tools.chain.clear();
        if self.returns.is_due() {
            self.tell(connected, tools);
        }
        self.credits.look(tools.buffers.credits.word(8 * self.index));
        while let Some(request) = self.backlog.front() {
            // Room first: then a request that is refused is so in the order of posting.
            if !self.ledger.has_room(2) {
                break;
            }
            let planned = self.plan(request, connected, tools.windows);
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
        // Safety: windows stay registered while entries use them, which the ledger tells; slots are used again only once
        // their entry has ended.
        if let Err((posted, error)) = unsafe { self.queue.post(tools.chain) } {
            self.ledger.abandon(tools.chain.len().saturating_sub(posted), &error, tools.ended);
            self.fail(error);
        }
    }

    /// What a request moves, and how its signal is raised.
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
        let moved = |bytes| {
            u32::try_from(bytes).map_err(|_| NetError::Failed {
                context: "a message that is too long",
                peer: self.peer,
                status: bytes,
            })
        };
        let rail = connected.rail;
        let plan = match request.transfer {
            Transfer::Nothing => None,
            Transfer::Put { source, destination, bytes } => {
                let own = windows.own(source.window, source.offset, bytes, self.rail)?;
                let there = windows.of(destination.window, self.peer, destination.offset, bytes, rail)?;
                Some(Move::new(false, own, there, moved(bytes)?, Some(source.window), None))
            }
            Transfer::Get { source, destination, bytes } => {
                let there = windows.of(source.window, self.peer, source.offset, bytes, rail)?;
                let own = windows.own(destination.window, destination.offset, bytes, self.rail)?;
                Some(Move::new(true, own, there, moved(bytes)?, Some(destination.window), None))
            }
            Transfer::PutValue { value, width_log2, destination } => {
                let bytes = 1 << width_log2.min(3);
                let there = windows.of(destination.window, self.peer, destination.offset, bytes, rail)?;
                Some(Move::new(false, (0, 0), there, moved(bytes)?, None, Some(value)))
            }
        };
        let plan = plan.filter(|plan| plan.bytes > 0);
        let raise = request.signal.map(|signal| {
            let word = match signal.target {
                SignalTarget::Id(id) => {
                    connected.words.map(|words| There { address: words.address + 8 * u64::from(id), ..words })
                }
                SignalTarget::Address { window, offset } => {
                    let there = windows.of(window, self.peer, offset, 8, rail).ok();
                    there.filter(|there| there.nic && connected.words.is_some())
                }
            };
            self.raise(plan.as_ref(), word)
        });
        Ok((plan, raise.or(request.notice.map(|_| Raise::Message))))
    }

    /// How a signal behind a transfer is raised, for which the peer's NIC may raise this word.
    ///
    /// The NIC carries out what comes over a connection in order, and what it writes to one memory comes there in order. So
    /// the word is raised after all that was put, if all of it went to where the word is, a GPU or the host; between the two
    /// nothing is ordered. Once a signal goes as a message all do, since one that the NIC raises may overtake it.
    fn raise(&self, plan: Option<&Move>, word: Option<There>) -> Raise {
        let mut has_put = self.has_put;
        if let Some(plan) = plan {
            plan.book(&mut has_put);
        }
        match word {
            Some(There { address, key, in_gpu, .. }) if !self.by_message && is_ordered(has_put, in_gpu) => {
                Raise::Nic { address, key }
            }
            _ => Raise::Message,
        }
    }

    /// Adds the entries of a request.
    fn put_in(&mut self, request: &Request, plan: Option<Move>, raise: Option<Raise>, tools: &mut Tools<'_>) {
        let last = |signal: bool| Entry { request: (!signal).then_some(request.id), part: signal, window: None };
        if let Some(plan) = plan {
            let [write, _, read, _] = OPCODE;
            plan.book(&mut self.has_put);
            let mut entry = SendRequest::new(if plan.reads { read } else { write });
            (entry.remote_addr, entry.rkey) = (plan.remote, plan.remote_key);
            let piece = match plan.value {
                Some(value) => {
                    let slot = self.send_slot(self.ledger.next());
                    tools.buffers.slots.write(slot, &value.to_le_bytes());
                    entry.send_flags |= self.queue.inline(plan.bytes as usize);
                    tools.buffers.slots.piece(slot, plan.bytes as usize, self.rail)
                }
                None => gin_verbs::verbs::Piece { addr: plan.local, length: plan.bytes, lkey: plan.local_key },
            };
            if let Some(window) = plan.window {
                tools.windows.enter(window);
            }
            let booked = Entry { window: plan.window, ..last(raise.is_some()) };
            self.add(entry, Some(piece), booked, tools);
        }
        if let Some(raise) = raise {
            // Not before what is read has landed.
            let fence = if plan.is_some_and(|plan| plan.reads) { FLAG[0] } else { 0 };
            match raise {
                Raise::Message => {
                    self.by_message = true;
                    self.credits.take();
                    let mut entry = SendRequest::new(OPCODE[1]);
                    entry.send_flags |= fence;
                    self.add_slot(entry, &message::of(request), last(false), tools);
                }
                Raise::Nic { address, key } => {
                    let amount = request.signal.map_or(0, |signal| signal.amount);
                    let mut entry = SendRequest::add(address, key, amount);
                    entry.send_flags |= fence;
                    // What the word held before comes here, and is not looked at.
                    let slot = self.send_slot(self.ledger.next());
                    let piece = tools.buffers.slots.piece(slot, 8, self.rail);
                    self.add(entry, Some(piece), last(false), tools);
                }
            }
        } else if plan.is_none() {
            tools.ended.requests.push((request.id, Ok(())));
        }
    }

    /// Adds an entry that sends bytes of its own.
    fn add_slot(&mut self, mut entry: SendRequest, bytes: &[u8], booked: Entry, tools: &mut Tools<'_>) {
        let slot = self.send_slot(self.ledger.next());
        tools.buffers.slots.write(slot, bytes);
        entry.send_flags |= self.queue.inline(bytes.len());
        let piece = tools.buffers.slots.piece(slot, bytes.len(), self.rail);
        self.add(entry, Some(piece), booked, tools);
    }

    fn add(
        &mut self,
        mut entry: SendRequest,
        piece: Option<gin_verbs::verbs::Piece>,
        booked: Entry,
        tools: &mut Tools<'_>,
    ) {
        entry.wr_id = (self.index as u64) << 32 | u64::from(self.ledger.next());
        self.unsignalled += 1;
        if self.unsignalled >= tools.config.completion_every {
            self.unsignalled = 0;
            entry.send_flags |= FLAG[1];
        }
        self.ledger.push(booked);
        tools.chain.push(entry, piece);
    }

    /// Tells the peer how many of its signals were dealt with, if there is room.
    fn tell(&mut self, connected: Connected, tools: &mut Tools<'_>) {
        if !self.ledger.has_room(1) {
            return;
        }
        let mut entry = SendRequest::new(OPCODE[0]);
        (entry.remote_addr, entry.rkey) = (connected.credits, connected.credits_key);
        let word = self.returns.tell();
        self.add_slot(entry, &word.to_le_bytes(), Entry::default(), tools);
    }

    /// If the peer's proxy has been waited for long, asks its NIC whether it is there: what is written changes nothing.
    fn ask(&mut self, connected: Connected, tools: &mut Tools<'_>) {
        if self.backlog.is_empty() || !self.ledger.is_empty() {
            self.waiting = None;
            return;
        }
        let since = *self.waiting.get_or_insert_with(Instant::now);
        if since.elapsed() >= tools.config.ask_after {
            self.waiting = None;
            self.tell(connected, tools);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn entries_under_way_have_slots_of_their_own_also_where_their_numbers_wrap() {
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
    fn a_word_is_in_order_behind_what_was_put_to_memory_of_its_kind_only() {
        let there = |in_gpu| There { address: 0, key: 0, in_gpu, nic: true };
        let transfer = |reads, in_gpu| Move::new(reads, (0, 0), there(in_gpu), 8, None, None);
        let mut has_put = [false; 2];
        assert!(is_ordered(has_put, false) && is_ordered(has_put, true), "nothing was put");
        // What is read writes nothing at the peer.
        transfer(true, false).book(&mut has_put);
        transfer(false, true).book(&mut has_put);
        assert!(is_ordered(has_put, true) && !is_ordered(has_put, false));
        transfer(false, false).book(&mut has_put);
        assert!(!is_ordered(has_put, true) && !is_ordered(has_put, false), "both");
    }
}
