// SPDX-License-Identifier: MIT OR Apache-2.0
//! A network whose payload stays invisible until it is made visible.

use crate::{
    Capabilities, Event, Key, KeyError, LocalSignals, LocalWindow, NetError, Network, NoticeArrival, Raises, Request,
    SignalArrival,
};
use gin_abi::{RemoteSignal, Transfer, WindowOffset};
use gin_device::exec::watch;
use gin_gpu::copy::copy_shared;
use gin_gpu::registry::{KEY_BYTES, Registry};
use gin_gpu::{DeviceKind, Memory, MemorySlice};
use std::collections::{HashMap, VecDeque};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError};

/// Letters to the endpoint of a rank.
type Inbox = Mutex<VecDeque<Letter>>;

static INBOXES: Registry<Inbox> = Registry::new();

/// Part of a window.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Part {
    window: u32,
    offset: u64,
    bytes: u64,
}

/// A request to announce to the peer: its id, true if it is complete, and the letter.
type Told = (u64, bool, Letter);

/// A letter of one endpoint to another.
#[derive(Clone, Debug)]
enum Letter {
    /// A request has arrived.
    Arrival(Arrival),
    /// The sender asks for an answer once all that arrived before is visible.
    Question { from: u32, id: u64 },
    /// The answer to the question with this id.
    Answer { id: u64, outcome: Result<(), NetError> },
}

/// The announcement of a request.
#[derive(Clone, Copy, Debug)]
struct Arrival {
    part: Option<Part>,
    signal: Option<SignalArrival>,
    notice: Option<NoticeArrival>,
}

/// A network that keeps payload in memory beside each window, and copies it into the window when it is made visible. A
/// NIC behaves so if its writes wait on their way into a GPU. The receiver's proxy raises signals.
///
/// The inner network gets two windows for each window: the window itself to read from, and the memory beside it to
/// write to. Ranks announce arrivals to each other within this process.
#[derive(Debug)]
pub struct Withhold<N> {
    inner: N,
    rank: u32,
    inbox: Arc<Inbox>,
    inboxes: Vec<Arc<Inbox>>,
    windows: Vec<Option<(MemorySlice, Arc<Memory>)>>,
    /// The unfinished requests of the inner network, by id; for a get with its destination.
    gets: HashMap<u64, Part>,
    /// By context and peer, in order: the announcements to the peer. Each follows the completion of its request and of
    /// all requests before it.
    lines: HashMap<(u32, u32), VecDeque<Told>>,
    /// The requests without a transfer, which complete at once.
    events: Vec<Event>,
    unseen: Vec<Part>,
    /// The contexts and peers of requests that failed.
    broken: Vec<(u32, u32)>,
}

/// Puts a letter into an inbox.
fn send(inbox: &Arc<Inbox>, letter: Letter) {
    inbox.lock().unwrap_or_else(PoisonError::into_inner).push_back(letter);
    // The list orders the two proxies as a word would.
    watch::word(Arc::as_ptr(inbox), watch::Access::Change(0), Ordering::Release);
}

/// Returns the number of the inner window to read from.
fn as_it_is(window: u32) -> u32 {
    window * 2
}

/// Returns the number of the inner window to write to.
fn beside(window: u32) -> u32 {
    window * 2 + 1
}

impl<N: Network> Withhold<N> {
    /// Withholds the bytes that `inner` brings to `rank`. The other ranks' networks withhold theirs.
    pub fn new(inner: N, rank: u32) -> Self {
        Self {
            inner,
            rank,
            inbox: Arc::default(),
            inboxes: Vec::new(),
            windows: Vec::new(),
            gets: HashMap::new(),
            lines: HashMap::new(),
            events: Vec::new(),
            unseen: Vec::new(),
            broken: Vec::new(),
        }
    }

    /// Announces completed requests to peers, in the order of posting.
    fn tell(&mut self, line: (u32, u32)) {
        let Some(queue) = self.lines.get_mut(&line) else { return };
        while let Some((_, _, letter)) = queue.pop_front_if(|(_, complete, _)| *complete) {
            if let Some(inbox) = self.inboxes.get(line.1 as usize) {
                send(inbox, letter);
            }
        }
    }

    /// Makes visible what has arrived, and answers the peer that asked for it.
    fn answer(&mut self, from: u32, id: u64) {
        let outcome = self.make_visible();
        if let Some(inbox) = self.inboxes.get(from as usize) {
            send(inbox, Letter::Answer { id, outcome });
        }
    }

    fn arrival(&self, request: &Request, part: Option<Part>) -> Arrival {
        let raise = |signal: RemoteSignal| SignalArrival {
            context: request.context,
            from: self.rank,
            target: signal.target,
            amount: signal.amount,
        };
        let tell = |notice| NoticeArrival { context: request.context, from: self.rank, notice };
        Arrival { part, signal: request.signal.map(raise), notice: request.notice.map(tell) }
    }

    /// Returns the request for the inner network, the announcement to the peer, and the destination of a get.
    fn translate(&self, request: &Request) -> (Transfer, Option<Arrival>, Option<Part>) {
        let real = |at: WindowOffset| WindowOffset { window: as_it_is(at.window), ..at };
        let view = |at: WindowOffset| WindowOffset { window: beside(at.window), ..at };
        match request.transfer {
            Transfer::Nothing => (Transfer::Nothing, Some(self.arrival(request, None)), None),
            Transfer::Put { source, destination, bytes } => {
                let part = Part { window: destination.window, offset: destination.offset, bytes };
                let (source, destination) = (real(source), view(destination));
                (Transfer::Put { source, destination, bytes }, Some(self.arrival(request, Some(part))), None)
            }
            Transfer::PutValue { value, width_log2, destination } => {
                let part = Part { window: destination.window, offset: destination.offset, bytes: 1 << width_log2 };
                let transfer = Transfer::PutValue { value, width_log2, destination: view(destination) };
                (transfer, Some(self.arrival(request, Some(part))), None)
            }
            Transfer::Get { source, destination, bytes } => {
                let part = Part { window: destination.window, offset: destination.offset, bytes };
                (Transfer::Get { source: real(source), destination: view(destination), bytes }, None, Some(part))
            }
        }
    }
}

impl<N: Network> Network for Withhold<N> {
    fn capabilities(&self) -> Capabilities {
        Capabilities {
            strong_signals: true,
            va_signals: true,
            raises: Raises::Receiver,
            needs_make_visible: true,
            ..self.inner.capabilities()
        }
    }

    fn register_signals(&mut self, signals: &LocalSignals) -> Result<Key, NetError> {
        let mut key = INBOXES.publish(&self.inbox);
        key.0.extend(self.inner.register_signals(signals)?.0);
        Ok(key)
    }

    fn connect_signals(&mut self, keys: &[Key]) -> Result<(), NetError> {
        let mut below = Vec::new();
        for (key, rank) in keys.iter().zip(0..) {
            let (inbox, rest) = split(rank, key, KEY_BYTES)?;
            self.inboxes.push(INBOXES.find(rank, &inbox)?);
            below.push(rest);
        }
        self.inner.connect_signals(&below)
    }

    fn register(&mut self, window: &LocalWindow) -> Result<Key, NetError> {
        let own = window.memory.memory();
        let memory = Memory::new(own.device(), own.kind(), window.memory.bytes())
            .map_err(|error| KeyError { rank: self.rank, reason: error.to_string() })?;
        let read = LocalWindow { id: as_it_is(window.id), memory: window.memory.clone(), plane: None, nic: false };
        let write = LocalWindow { id: beside(window.id), memory: memory.whole(), plane: None, nic: false };
        let (read, write) = (self.inner.register(&read)?, self.inner.register(&write)?);
        let index = window.id as usize;
        if self.windows.len() <= index {
            self.windows.resize_with(index + 1, || None);
        }
        self.windows[index] = Some((window.memory.clone(), memory));
        let mut key = (read.0.len() as u64).to_le_bytes().to_vec();
        key.extend(read.0);
        key.extend(write.0);
        Ok(Key(key))
    }

    fn connect(&mut self, window: u32, keys: &[Key]) -> Result<(), NetError> {
        let (mut read, mut write) = (Vec::new(), Vec::new());
        for (key, rank) in keys.iter().zip(0..) {
            let (length, rest) = split(rank, key, 8)?;
            let length = length.0.iter().rev().fold(0, |value, byte| value << 8 | usize::from(*byte));
            let (first, second) = split(rank, &rest, length)?;
            read.push(first);
            write.push(second);
        }
        self.inner.connect(as_it_is(window), &read)?;
        self.inner.connect(beside(window), &write)
    }

    fn deregister(&mut self, window: u32) -> bool {
        // Arrived bytes stay in the window, as with a NIC.
        let seen = self.make_visible();
        if let Some(entry) = self.windows.get_mut(window as usize) {
            *entry = None;
        }
        let (read, write) = (self.inner.deregister(as_it_is(window)), self.inner.deregister(beside(window)));
        seen.is_ok() && read && write
    }

    fn post(&mut self, requests: &[Request]) -> usize {
        for (taken, request) in requests.iter().enumerate() {
            let line = (request.context, request.peer);
            if self.broken.contains(&line) {
                let outcome = Err(NetError::behind(request.peer));
                self.events.push(Event::Completion { id: request.id, outcome });
                continue;
            }
            if request.is_quiet() {
                let question = Letter::Question { from: self.rank, id: request.id };
                self.lines.entry(line).or_default().push_back((request.id, true, question));
                self.tell(line);
                continue;
            }
            let (transfer, arrival, get) = self.translate(request);
            let nothing = transfer == Transfer::Nothing;
            if !nothing && self.inner.post(&[Request { transfer, signal: None, notice: None, ..*request }]) == 0 {
                return taken;
            }
            if let Some(part) = get {
                self.gets.insert(request.id, part);
            }
            if let Some(arrival) = arrival {
                let told = (request.id, nothing, Letter::Arrival(arrival));
                self.lines.entry(line).or_default().push_back(told);
            }
            if nothing {
                self.events.push(Event::Completion { id: request.id, outcome: Ok(()) });
                self.tell(line);
            }
        }
        requests.len()
    }

    fn poll(&mut self, events: &mut Vec<Event>) {
        let from = events.len();
        self.inner.poll(events);
        let mut lines = Vec::new();
        for event in &events[from..] {
            let Event::Completion { id, outcome } = event else { continue };
            if let Some(part) = self.gets.remove(id) {
                if outcome.is_ok() {
                    self.unseen.push(part);
                }
                continue;
            }
            for (&line, queue) in &mut self.lines {
                // The id of a request that was complete at once may be that of a later request already.
                let under_way = |(other, complete, _): &Told| other == id && !complete;
                let Some(place) = queue.iter().position(under_way) else { continue };
                if outcome.is_ok() {
                    queue[place].1 = true;
                } else {
                    // The peer gets no announcement of later requests, and answers no later question.
                    for (id, _, letter) in queue.drain(place..) {
                        if let Letter::Question { .. } = letter {
                            self.events.push(Event::Completion { id, outcome: Err(NetError::behind(line.1)) });
                        }
                    }
                    self.broken.push(line);
                }
                lines.push(line);
            }
        }
        // In the order of completion, because the order of a map is random.
        for line in lines {
            self.tell(line);
        }
        events.append(&mut self.events);
        let arrived = std::mem::take(&mut *self.inbox.lock().unwrap_or_else(PoisonError::into_inner));
        watch::word(Arc::as_ptr(&self.inbox), watch::Access::Load, Ordering::Acquire);
        for letter in arrived {
            match letter {
                Letter::Arrival(arrival) => {
                    self.unseen.extend(arrival.part);
                    events.extend(arrival.signal.map(Event::Signal));
                    events.extend(arrival.notice.map(Event::Notice));
                }
                Letter::Question { from, id } => self.answer(from, id),
                Letter::Answer { id, outcome } => events.push(Event::Completion { id, outcome }),
            }
        }
    }

    fn make_visible(&mut self) -> Result<(), NetError> {
        self.inner.make_visible()?;
        for part in std::mem::take(&mut self.unseen) {
            let Some(Some((memory, beside))) = self.windows.get(part.window as usize) else { continue };
            let (destination, source) = (memory.address() + part.offset, beside.address() + part.offset);
            let device = beside.device();
            if device.kind() == DeviceKind::Virtual {
                watch::event(watch::Event::Copy { to: destination, from: source, bytes: part.bytes });
                // Safety: the inner network checked the range against the memory beside the window, which is as long as
                // the window. Both are alive.
                unsafe { copy_shared(destination, source, part.bytes) };
                continue;
            }
            let mut bytes = vec![0u8; part.bytes as usize];
            // Safety: as above.
            let copied =
                unsafe { device.copy_out(&mut bytes, source).and_then(|()| device.copy_in(destination, &bytes)) };
            copied.map_err(|_| NetError::Failed { context: "making visible", peer: self.rank, status: 0 })?;
        }
        Ok(())
    }

    fn carries_notices(&self) -> bool {
        true
    }

    fn is_quiet(&self) -> bool {
        self.lines.values().all(VecDeque::is_empty)
            && self.inbox.lock().unwrap_or_else(PoisonError::into_inner).is_empty()
            && self.inner.is_quiet()
    }
}

/// Returns the first `length` bytes of a key, and the rest.
fn split(rank: u32, key: &Key, length: usize) -> Result<(Key, Key), NetError> {
    match key.0.split_at_checked(length) {
        Some((first, rest)) => Ok((Key(first.to_vec()), Key(rest.to_vec()))),
        None => Err(KeyError { rank, reason: "it has the wrong length".to_owned() }.into()),
    }
}
