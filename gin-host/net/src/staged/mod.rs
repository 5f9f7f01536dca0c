// SPDX-License-Identifier: MIT OR Apache-2.0
//! Staging through host memory, for GPU memory that the NIC does not reach.
//!
//! A window in such memory is staged: the network registers pinned host memory instead, twice as long as the window.
//! For a put, the sender copies its source to host memory first. The receiver copies arrived bytes into the window when
//! the sender's [`Notice`] announces them, before it raises any later signal. For a get, the requester asks the owner,
//! the owner copies the bytes to host memory and answers, and then the requester reads them. So bytes go through host
//! memory once on each staged side, and the other side needs no copy.
//!
//! | | a staged rank | a rank with a staged peer |
//! | --- | --- | --- |
//! | put | copies out of its window, then puts from host memory | puts, announces the bytes, waits for the answer |
//! | get | gets, then copies into its window | asks for the bytes, waits for the answer, then gets |
//! | signal | its proxy raises the signal after the copies of all earlier arrivals | no change |
//!
//! Each rank chooses whether its memory is staged ([`Staging`]). The endpoints of all ranks are of this kind. If no
//! rank is staged, requests pass unchanged. A put is complete once it is in the peer's window.

mod mover;
mod steps;
mod window;

use self::mover::{ByCpu, Mover};
use self::window::{StagedMemory, StagedPart, StagedWindow};
use super::{Capabilities, Event, Key, LocalSignals, LocalWindow, NetError, Network, Notice, Request};
use gin_abi::Transfer;
use gin_gpu::copier::Ticket;
use gin_gpu::{Device, MemoryKind};
use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::sync::Arc;

/// The maximum number of bytes of one request, so that the next request is copied while one is on its way.
pub const MAX_MESSAGE: u64 = 4 << 20;

/// The maximum number of requests that wait for a copy, or behind such a request.
const MAX: usize = 1024;

/// The time without an answer after which a request checks that the peer's NIC is alive.
const ASK_AFTER_NS: u64 = 1_000_000_000;

/// The bit in the ids of this network's own requests. The ids of a proxy's requests do not have it.
const OWN: u64 = 1 << 63;

/// A function that checks whether the inner network reaches memory of a device, or returns the reason why not.
pub type Probe = Arc<dyn Fn(&Arc<dyn Device>) -> Result<(), String> + Send + Sync>;

/// The choice whether a rank's device memory is staged through host memory.
#[derive(Clone, derive_more::Debug)]
pub enum Staging {
    /// Never.
    Never,
    /// Always, for this reason.
    Always(&'static str),
    /// If the inner network does not reach the memory.
    Unless(#[debug(skip)] Probe),
}

/// A context and a peer.
type Order = (u32, u32);

/// A network with staging through host memory. See the [module docs](self).
#[derive(Debug)]
pub struct Staged<N> {
    inner: N,
    rank: u32,
    staging: Staging,
    /// The reason why this rank's memory is staged; `None` if it is not.
    reason: Option<String>,
    /// A part of a window is staged, here or at a peer.
    is_used: bool,
    mover: Mover,
    windows: BTreeMap<u32, StagedWindow>,
    /// Requests that wait for a copy, and requests posted behind them.
    lines: BTreeMap<Order, VecDeque<Item>>,
    /// Requests without order that wait for room in the inner network.
    outbox: VecDeque<(Request, Step)>,
    /// The purpose of each request of the inner network.
    steps: HashMap<u64, Step>,
    /// The incomplete requests that do not pass unchanged.
    open: HashMap<u64, Open>,
    /// The expected answers, by tag.
    wanted: BTreeMap<u64, Wanted>,
    /// The copies in order, with the actions that follow them.
    late: VecDeque<Late>,
    events: Vec<Event>,
    /// The contexts and peers of requests that failed.
    broken: BTreeSet<Order>,
    /// The error of a copy into a window. After it no data becomes visible any more.
    failure: Option<NetError>,
    next: u64,
}

/// A request for the inner network, to post once its copy is done.
#[derive(Debug)]
struct Item {
    request: Request,
    step: Step,
    copy: Option<Started>,
}

/// A copy that has started. It keeps the memory of the window alive.
#[derive(Debug)]
struct Started {
    ticket: Ticket,
    _own: Arc<StagedMemory>,
}

/// The purpose of a request of the inner network, with the id of the proxy's request.
#[derive(Clone, Copy, Debug)]
enum Step {
    /// It is a part of the proxy's request.
    Send(u64),
    /// It is a notice that the peer will answer.
    Tell(u64, u64),
    /// It is a read, which this copy follows.
    Read(u64, Option<Landing>),
    /// It is an answer to a peer.
    Answer,
    /// It checks that a peer is alive.
    Ask(Order),
}

/// A range of an own window that is staged.
#[derive(Clone, Copy, Debug)]
struct Landing {
    window: u32,
    offset: u64,
    bytes: u64,
}

/// An incomplete request.
#[derive(Debug)]
struct Open {
    line: Order,
    /// The number of incomplete steps.
    left: u32,
    outcome: Result<(), NetError>,
}

/// A request that waits for an answer of its peer.
#[derive(Debug)]
struct Wanted {
    line: Order,
    request: u64,
    /// The read that follows, and the copy that follows the read.
    read: Option<(Transfer, Option<Landing>)>,
    since_ns: u64,
}

/// A copy, and the action that follows when it and all earlier copies are done.
#[derive(Debug)]
struct Late {
    copy: Option<Started>,
    then: Then,
}

#[derive(Debug)]
enum Then {
    /// Answers a peer whose bytes are in the window.
    Arrived(Order, u64),
    /// Completes a step of a request whose result is in place.
    Got(u64),
    /// Answers a peer that can read its bytes now.
    Answer(Order, u64),
    /// Reports an event that had to wait.
    Tell(Event),
}

impl<N: Network> Staged<N> {
    /// Makes the endpoint of `rank` over `inner`, a network without [`fetch`](Network::fetch).
    pub fn new(inner: N, rank: u32, staging: Staging) -> Self {
        Self {
            inner,
            rank,
            staging,
            reason: None,
            is_used: false,
            mover: Mover::Cpu(ByCpu::default()),
            windows: BTreeMap::new(),
            lines: BTreeMap::new(),
            outbox: VecDeque::new(),
            steps: HashMap::new(),
            open: HashMap::new(),
            wanted: BTreeMap::new(),
            late: VecDeque::new(),
            events: Vec::new(),
            broken: BTreeSet::new(),
            failure: None,
            next: 0,
        }
    }

    /// Returns the inner network.
    pub fn inner(&mut self) -> &mut N {
        &mut self.inner
    }

    fn own(&self, window: u32) -> Option<&Arc<StagedMemory>> {
        self.windows.get(&window)?.own.as_ref()
    }

    fn half(&self, window: u32, rank: u32) -> Option<u64> {
        self.windows.get(&window)?.parts.get(rank as usize)?.half
    }

    /// Returns whether a request goes through host memory here or at its peer.
    fn is_staged(&self, request: &Request) -> bool {
        let peer = request.peer;
        match request.transfer {
            // A put to a staged part is complete once it is in the window.
            Transfer::Nothing => false,
            Transfer::Put { source, destination, .. } => {
                self.own(source.window).is_some() || self.half(destination.window, peer).is_some()
            }
            Transfer::PutValue { destination, .. } => self.half(destination.window, peer).is_some(),
            Transfer::Get { source, destination, .. } => {
                self.half(source.window, peer).is_some() || self.own(destination.window).is_some()
            }
        }
    }

    /// Returns whether the request passes unchanged.
    fn is_plain(&self, request: &Request) -> bool {
        if !self.is_used {
            return true;
        }
        let line = (request.context, request.peer);
        let is_behind = self.lines.contains_key(&line) || request.is_strong() && self.broken.contains(&line);
        !is_behind && !self.is_staged(request)
    }

    fn name(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    /// Returns a request for the inner network.
    fn request(&mut self, line: Order, transfer: Transfer, notice: Option<Notice>) -> Request {
        let id = self.name() | OWN;
        Request { id, context: line.0, peer: line.1, transfer, signal: None, notice, more: false }
    }
}

impl<N: Network> Network for Staged<N> {
    fn capabilities(&self) -> Capabilities {
        let inner = self.inner.capabilities();
        match self.staging {
            Staging::Never => inner,
            _ => Capabilities { max_message: inner.max_message.min(MAX_MESSAGE), ..inner },
        }
    }

    fn register_signals(&mut self, signals: &LocalSignals) -> Result<Key, NetError> {
        let device = signals.memory.device();
        self.reason = match &self.staging {
            Staging::Never => None,
            Staging::Always(reason) => Some((*reason).to_owned()),
            Staging::Unless(probe) => probe(device).err(),
        };
        if let Some(reason) = &self.reason {
            if !self.inner.carries_notices() {
                let what = "going through host memory, which this network does not provide for,";
                return Err(NetError::Local { what, reason: reason.clone() });
            }
            tracing::info!(rank = self.rank, reason, "memory of the device goes through host memory");
            self.mover = Mover::of(&**device)?;
            // A NIC would raise signals before the data that they cover is in the device.
            return self.inner.register_signals(&LocalSignals { nic: None, ..signals.clone() });
        }
        self.inner.register_signals(signals)
    }

    fn connect_signals(&mut self, keys: &[Key]) -> Result<(), NetError> {
        self.inner.connect_signals(keys)
    }

    fn register(&mut self, window: &LocalWindow) -> Result<Key, NetError> {
        let bytes = window.memory.bytes();
        let is_staged = self.reason.is_some() && bytes > 0 && window.memory.memory().kind() == MemoryKind::Device;
        let own = if is_staged { Some(Arc::new(StagedMemory::new(window)?)) } else { None };
        let below = match &own {
            None => self.inner.register(window)?,
            Some(own) => {
                self.inner.register(&LocalWindow { memory: own.stage.whole(), nic: false, ..window.clone() })?
            }
        };
        let part = StagedPart { bytes, half: own.as_ref().map(|own| own.half) };
        self.is_used |= is_staged;
        self.windows.insert(window.id, StagedWindow { own, is_closed: false, parts: Vec::new() });
        Ok(part.to_key(&below))
    }

    fn connect(&mut self, window: u32, keys: &[Key]) -> Result<(), NetError> {
        let parts = keys.iter().zip(0..).map(|(key, rank)| StagedPart::from_key(rank, key));
        let (parts, below): (Vec<_>, Vec<_>) = parts.collect::<Result<Vec<_>, _>>()?.into_iter().unzip();
        let Some(entry) = self.windows.get_mut(&window) else {
            return Err(NetError::UnknownWindow { window, rank: self.rank });
        };
        self.is_used |= parts.iter().any(|part| part.half.is_some());
        entry.parts = parts;
        self.inner.connect(window, &below)
    }

    fn deregister(&mut self, window: u32) -> bool {
        if let Some(entry) = self.windows.get_mut(&window) {
            entry.is_closed = true;
            // Work that waits for a copy, and copies, use the window, too.
            if entry.own.as_ref().is_some_and(|own| Arc::strong_count(own) > 1) {
                return false;
            }
        }
        let closed = self.inner.deregister(window);
        if closed {
            self.windows.remove(&window);
        }
        closed
    }

    fn post(&mut self, requests: &[Request]) -> usize {
        let mut taken = 0;
        while let Some(request) = requests.get(taken) {
            let run = requests[taken..].iter().take_while(|request| self.is_plain(request)).count();
            if run > 0 {
                let posted = self.inner.post(&requests[taken..taken + run]);
                taken += posted;
                if posted < run {
                    break;
                }
                continue;
            }
            if self.lines.values().map(VecDeque::len).sum::<usize>() >= MAX {
                break;
            }
            self.begin(request);
            taken += 1;
        }
        if self.is_used {
            self.pump();
        }
        taken
    }

    fn poll(&mut self, events: &mut Vec<Event>) {
        if !self.is_used {
            return self.inner.poll(events);
        }
        let mut below = Vec::new();
        self.inner.poll(&mut below);
        if below.iter().any(|event| self.brings(event))
            && self.inner.capabilities().needs_make_visible
            && let Err(error) = self.inner.make_visible()
        {
            self.failure.get_or_insert(error);
        }
        for event in below {
            match event {
                Event::Notice(arrival) => self.notice(arrival),
                Event::Completion { id, outcome } if id & OWN != 0 => {
                    if let Some(step) = self.steps.remove(&id) {
                        self.over(step, outcome);
                    }
                }
                Event::Signal(_) if !self.late.is_empty() => {
                    self.late.push_back(Late { copy: None, then: Then::Tell(event) });
                }
                event => self.events.push(event),
            }
        }
        self.mover.work();
        self.follow();
        self.ask();
        self.pump();
        events.append(&mut self.events);
    }

    fn make_visible(&mut self) -> Result<(), NetError> {
        self.inner.make_visible()?;
        self.failure.clone().map_or(Ok(()), Err)
    }

    fn describe(&self) -> String {
        let below = self.inner.describe();
        match &self.reason {
            Some(reason) => format!("{below}, memory of the device through host memory ({reason})"),
            None => below,
        }
    }

    fn carries_notices(&self) -> bool {
        false
    }

    fn is_quiet(&self) -> bool {
        self.open.is_empty() && self.late.is_empty() && self.outbox.is_empty() && self.inner.is_quiet()
    }
}
