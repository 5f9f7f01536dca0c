// SPDX-License-Identifier: MIT OR Apache-2.0
//! Any network that libfabric has a provider for, such as TCP. The library is opened at run time.
//!
//! | module | holds |
//! | --- | --- |
//! | `config` | the configuration, and the environment variables that set it |
//! | `provider` | what providers offer, and the choice of one offer |
//! | `objects` | RAII wrappers: endpoint, registered memory, slots |
//! | `line` | the requests and messages of a context with a peer |
//! | `windows` | the table of windows |
//! | `key` | what ranks send each other |
//!
//! # How requests travel
//! Each rank has one endpoint (`FI_EP_RDM`). A put is a write, a get is a read, and a value is a write from the
//! endpoint's own memory. A signal is a message of 56 bytes, and the receiver's proxy raises the word. Messages of a
//! context to a peer have numbers, by which the receiver takes them in the order of sending, so the provider need not
//! keep it. All signals are strong. A request with a signal completes after all earlier writes, and fails if one of
//! them has failed.
//!
//! A write completes when its data is at the peer (`FI_DELIVERY_COMPLETE`). How a signal follows the data depends on
//! the [offer](Offer) of the provider:
//!
//! | [`in_order`](Offer::in_order) | providers | a signal's message is sent |
//! | --- | --- | --- |
//! | yes | `tcp`, `net`, `verbs;ofi_rxm` | behind the data: both travel over one stream or connection |
//! | no | all others | once all earlier writes of the context to the peer are complete |
//!
//! Other differences of providers are data too: how memory is registered (`mr_mode`), who chooses keys and how long
//! they are, whether peers use addresses or offsets, the numbers of outstanding operations and the length of messages.
//!
//! # When something fails
//! If the provider reports that a connection ended or that a peer cannot be reached, the peer is lost. It is also lost
//! if no outstanding request to it completes for [`lost_after`](FabricConfig::lost_after): TCP itself waits for
//! minutes. The first other request that fails makes all later signals of the same context and peer fail. A lost peer
//! stays lost. If the provider still holds operations to it when a window is deregistered, the whole endpoint ends, so
//! that nothing writes to the window's memory later.
//!
//! # Limits
//! - gin registers host memory only (no `FI_HMEM`): memory of GPUs is [staged](super::staged).
//! - Run: `tcp` and `shm` of libfabric 1.17. **`efa`, `cxi`, `opx` and `verbs;ofi_rxm` have never run.**
//! - Data is not encrypted. Addresses, keys and tokens travel over gin's own links, which are. Keys of memory and
//!   tokens are random, so a stranger's write or message is refused, unless it has seen the traffic.

mod config;
mod key;
mod line;
mod objects;
mod provider;
mod windows;

pub use config::{DEFAULT_PROVIDER, FabricConfig, VARIABLES};
pub use provider::{Fabric, NoFabric, Offer, probe};

use self::key::Hello;
use self::line::{BYTES, Envelope, Line};
use self::objects::{DATA, Ended, EndpointHandle, Posted};
use self::windows::Windows;
use super::{
    Capabilities, Endpoint, Event, Key, KeyError, LocalSignals, LocalWindow, NetError, Network, NoticeArrival, Raises,
    Request, SignalArrival,
};
use crate::message::{self, Message};
use gin_abi::Transfer;
use gin_gpu::registry::random;
use std::ffi::c_int;
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Requests that a line accepts while others are posted, so that other lines can proceed.
const BACKLOG: usize = 1024;
/// Maximum number of posted buffers for arriving messages.
const RECEIVES: usize = 256;
/// Maximum number of reads of the completion queue in one poll, so that the proxy returns to its other work.
const READS: usize = 16;
/// Interval in which lost peers are looked for.
const LOOK_EVERY: Duration = Duration::from_millis(50);

/// The endpoint of one rank.
pub struct FabricNetwork {
    fabric: Arc<Fabric>,
    rank: u32,
    ranks: u32,
    /// `None` until signals are registered. Before the windows: it ends before their memory.
    live: Option<Live>,
    windows: Windows,
    events: Vec<Event>,
}

impl fmt::Debug for FabricNetwork {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FabricNetwork").field("rank", &self.rank).field("offer", &self.fabric.offer).finish()
    }
}

/// A peer.
#[derive(Debug)]
struct Peer {
    /// Number that stands for its address.
    address: u64,
    token: u64,
    /// Outstanding operations.
    outstanding: usize,
    /// When it last completed an operation, or since when it has had work. `None` without work.
    since: Option<Instant>,
    /// The provider had no room for it, so it gets nothing before the next completions are read.
    is_full: bool,
    lost: Option<NetError>,
}

/// The use of a slot.
#[derive(Clone, Copy, Debug)]
enum Use {
    Free,
    /// A posted buffer.
    Receive,
    Operation(Operation),
}

/// An outstanding operation.
#[derive(Clone, Copy, Debug)]
struct Operation {
    line: usize,
    /// The request.
    id: u64,
    /// Its number in the line.
    number: u64,
    /// The request's message follows, which reports the outcome.
    has_message: bool,
    kind: Kind,
    /// The window of this rank that it uses.
    window: Option<u32>,
    /// Its request has been reported as failed, because the peer is lost.
    is_over: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Kind {
    Write,
    Read,
    Message,
}

/// An endpoint in use.
struct Live {
    endpoint: EndpointHandle,
    own: Hello,
    uses: Vec<Use>,
    free: Vec<usize>,
    /// Slots for arriving messages that are not posted.
    unposted: Vec<usize>,
    /// By context, then by rank.
    lines: Vec<Line>,
    /// Indices of lines with requests.
    busy: Vec<usize>,
    /// By rank; empty until connected.
    peers: Vec<Peer>,
    /// Maximum number of outstanding operations of a peer, so that one cannot take all slots.
    per_peer: usize,
    ended: Vec<Ended>,
    looked: Instant,
}

impl FabricNetwork {
    /// Creates the endpoint of `endpoint.rank`.
    pub fn new(fabric: &Arc<Fabric>, endpoint: &Endpoint) -> Self {
        Self {
            fabric: fabric.clone(),
            rank: endpoint.rank,
            ranks: endpoint.ranks,
            live: None,
            windows: Windows::new(endpoint.rank),
            events: Vec::new(),
        }
    }

    /// Lets busy lines post.
    fn work(&mut self) {
        let Some(live) = &mut self.live else { return };
        let mut busy = std::mem::take(&mut live.busy);
        busy.retain(|&line| {
            live.work(line, &mut self.windows, &mut self.events);
            live.lines[line].listed = !live.lines[line].backlog.is_empty();
            live.lines[line].listed
        });
        live.busy.append(&mut busy);
    }
}

/// Returns whether an error number says that a peer cannot be reached any more.
fn is_loss(error: c_int) -> bool {
    use rustix::io::Errno;
    // FI_EOTHER and above are the library's own numbers.
    const LOST: [Errno; 14] = [
        Errno::IO,
        Errno::NXIO,
        Errno::PIPE,
        Errno::HOSTDOWN,
        Errno::CONNREFUSED,
        Errno::CONNRESET,
        Errno::CONNABORTED,
        Errno::NOTCONN,
        Errno::SHUTDOWN,
        Errno::TIMEDOUT,
        Errno::HOSTUNREACH,
        Errno::NETUNREACH,
        Errno::NETDOWN,
        Errno::CANCELED,
    ];
    LOST.iter().any(|errno| errno.raw_os_error() == error)
}

impl Live {
    /// Returns the error of an operation that failed with these error numbers.
    fn error(&self, peer: u32, kind: Kind, (error, by_provider): (c_int, c_int)) -> NetError {
        let fabric = &self.endpoint.domain.fabric;
        let context = match kind {
            Kind::Write => "a write",
            Kind::Read => "a read",
            Kind::Message => "a message",
        };
        if is_loss(error) {
            let text = provider::explain(&fabric.library, error);
            let reason = format!("{context} failed: {text} (error {error}, provider's number {by_provider})");
            return NetError::PeerLost { peer, reason };
        }
        NetError::Failed { context, peer, status: u64::from(error.unsigned_abs()) }
    }

    /// Records the loss of a peer, and fails all requests to it.
    fn lose(&mut self, peer: u32, error: &NetError, events: &mut Vec<Event>) {
        let Some(state) = self.peers.get_mut(peer as usize).filter(|state| state.lost.is_none()) else { return };
        state.lost = Some(error.clone());
        (state.outstanding, state.since) = (0, None);
        for used in &mut self.uses {
            let Use::Operation(operation) = used else { continue };
            if operation.is_over || self.lines[operation.line].peer != peer {
                continue;
            }
            operation.is_over = true;
            if !operation.has_message {
                events.push(failed(operation.id, error));
            }
        }
        for line in 0..self.lines.len() {
            if self.lines[line].peer == peer {
                events.extend(self.lines[line].order.lose().map(|id| failed(id, error)));
                if !self.lines[line].backlog.is_empty() {
                    self.list(line);
                }
            }
        }
    }

    /// Loses all peers: this rank's endpoint does not work any more.
    fn lose_all(&mut self, error: &NetError, events: &mut Vec<Event>) {
        for peer in 0..self.peers.len() as u32 {
            self.lose(peer, error, events);
        }
    }

    /// Enters a line into the list of busy ones.
    fn list(&mut self, line: usize) {
        if !self.lines[line].listed {
            self.lines[line].listed = true;
            self.busy.push(line);
        }
    }

    /// Posts requests of a line, as far as there is room.
    fn work(&mut self, index: usize, windows: &mut Windows, events: &mut Vec<Event>) {
        let peer = self.lines[index].peer;
        while let Some(&request) = self.lines[index].backlog.front() {
            let Some(state) = self.peers.get_mut(peer as usize) else { return };
            if let Some(error) = state.lost.clone() {
                self.next(index);
                events.push(failed(request.id, &error));
                continue;
            }
            if state.is_full || state.outstanding >= self.per_peer {
                return;
            }
            let Some(&slot) = self.free.last() else {
                if state.outstanding == 0 {
                    // This rank is busy with other peers, which is no silence of this one.
                    state.since = None;
                }
                return;
            };
            state.since.get_or_insert_with(Instant::now);
            match self.step(index, slot, &request, windows, events) {
                Posted::Yes => {}
                Posted::Behind => return,
                Posted::Later => {
                    self.peers[peer as usize].is_full = true;
                    return;
                }
                Posted::No(error) => {
                    let kind = if self.lines[index].moved { Kind::Message } else { kind(&request) };
                    let error = self.error(peer, kind, (error, 0));
                    self.fail(index, &request, error, events);
                }
            }
        }
    }

    /// Takes the first request out of the backlog of a line.
    fn next(&mut self, line: usize) {
        self.lines[line].backlog.pop_front();
        self.lines[line].moved = false;
    }

    /// Fails the first request of a line. If its peer is lost, that fails the others too.
    fn fail(&mut self, index: usize, request: &Request, error: NetError, events: &mut Vec<Event>) {
        self.next(index);
        let order = &mut self.lines[index].order;
        let number = order.post(false);
        order.fail(number);
        let error = order.error(request.id).unwrap_or(error);
        events.push(failed(request.id, &error));
        if let NetError::PeerLost { peer, .. } = error {
            self.lose(peer, &error, events);
        }
    }

    /// Posts the next operation of the first request of a line, in this slot.
    fn step(
        &mut self,
        index: usize,
        slot: usize,
        request: &Request,
        windows: &mut Windows,
        events: &mut Vec<Event>,
    ) -> Posted {
        let (peer, has_message) = (request.peer, request.signal.is_some() || request.notice.is_some());
        if self.lines[index].order.is_broken() && request.is_strong() {
            self.fail(index, request, NetError::behind(peer), events);
            return Posted::Yes;
        }
        if !self.lines[index].moved {
            if let Some(signal) = &request.signal
                && let Err(error) = windows.check_signal(peer, signal)
            {
                self.fail(index, request, error, events);
                return Posted::Yes;
            }
            if request.transfer.bytes() > 0 {
                return match self.transfer(slot, request, windows) {
                    Ok((Posted::Yes, window)) => {
                        self.started(slot, index, request.id, (kind(request), has_message), window);
                        if let Some(window) = window {
                            windows.enter(window);
                        }
                        if has_message {
                            self.lines[index].moved = true;
                        } else {
                            self.next(index);
                        }
                        Posted::Yes
                    }
                    Ok((posted, _)) => posted,
                    Err(error) => {
                        self.fail(index, request, error, events);
                        Posted::Yes
                    }
                };
            }
        }
        if !has_message {
            self.next(index);
            events.push(Event::Completion { id: request.id, outcome: Ok(()) });
            return Posted::Yes;
        }
        let behind = self.endpoint.domain.fabric.offer.in_order && kind(request) != Kind::Read;
        if !behind && self.lines[index].order.is_moving() {
            return Posted::Behind;
        }
        // A transfer that was just awaited has failed.
        if self.lines[index].order.is_broken() && self.lines[index].moved {
            self.fail(index, request, NetError::behind(peer), events);
            return Posted::Yes;
        }
        let (line, state) = (&self.lines[index], &self.peers[peer as usize]);
        let (context, from) = (line.context, windows.rank);
        let envelope = Envelope { context, from, number: line.sent, token: state.token, message: message::of(request) };
        let posted = self.endpoint.send(slot, state.address, &envelope.to_bytes());
        if posted == Posted::Yes {
            self.started(slot, index, request.id, (Kind::Message, false), None);
            self.lines[index].sent += 1;
            self.next(index);
        }
        posted
    }

    /// Records an operation that was posted in the last free slot.
    fn started(&mut self, slot: usize, line: usize, id: u64, (kind, has_message): (Kind, bool), window: Option<u32>) {
        let number = self.lines[line].order.post(kind != Kind::Message);
        self.free.pop();
        self.uses[slot] = Use::Operation(Operation { line, id, number, has_message, kind, window, is_over: false });
        self.peers[self.lines[line].peer as usize].outstanding += 1;
    }

    /// Posts the transfer of a request. Returns the window of this rank that it uses, too.
    fn transfer(
        &mut self,
        slot: usize,
        request: &Request,
        windows: &Windows,
    ) -> Result<(Posted, Option<u32>), NetError> {
        let (peer, to) = (request.peer, self.peers[request.peer as usize].address);
        Ok(match request.transfer {
            Transfer::Nothing => (Posted::Yes, None),
            Transfer::Put { source, destination, bytes } => {
                let (region, address) = windows.own(source.window, source.offset, bytes)?;
                let at = windows.of(destination.window, peer, destination.offset, bytes)?;
                // Safety: in range; the caller counts the use of the window, which stays registered until it ends.
                (unsafe { self.endpoint.write(slot, to, (region, address, bytes), at) }, Some(source.window))
            }
            Transfer::Get { source, destination, bytes } => {
                let at = windows.of(source.window, peer, source.offset, bytes)?;
                let (region, address) = windows.own(destination.window, destination.offset, bytes)?;
                // Safety: as above.
                (unsafe { self.endpoint.read(slot, to, (region, address, bytes), at) }, Some(destination.window))
            }
            Transfer::PutValue { value, width_log2, destination } => {
                let bytes = 1usize << width_log2.min(3);
                let at = windows.of(destination.window, peer, destination.offset, bytes as u64)?;
                (self.endpoint.write_value(slot, to, &value.to_le_bytes()[..bytes], at), None)
            }
        })
    }

    /// Handles the completions since the last call.
    fn take(&mut self, windows: &mut Windows, events: &mut Vec<Event>) {
        let mut ended = std::mem::take(&mut self.ended);
        for _ in 0..READS {
            match self.endpoint.take(&mut ended) {
                Ok(false) => {}
                Ok(true) => break,
                Err(error) => {
                    self.lose_all(&error, events);
                    break;
                }
            }
        }
        let now = (!ended.is_empty()).then(Instant::now);
        for ended in ended.drain(..) {
            match self.uses[ended.slot] {
                Use::Free => {}
                Use::Receive => self.received(ended, events),
                Use::Operation(operation) => self.completed(ended, operation, now, windows, events),
            }
        }
        self.ended = ended;
        self.peers.iter_mut().for_each(|peer| peer.is_full = false);
        while let Some(&slot) = self.unposted.last() {
            if self.endpoint.receive(slot) != Posted::Yes {
                break;
            }
            self.unposted.pop();
        }
    }

    fn completed(
        &mut self,
        ended: Ended,
        operation: Operation,
        now: Option<Instant>,
        windows: &mut Windows,
        events: &mut Vec<Event>,
    ) {
        self.uses[ended.slot] = Use::Free;
        self.free.push(ended.slot);
        if let Some(window) = operation.window {
            windows.leave(window);
        }
        if operation.is_over {
            return;
        }
        let line = &mut self.lines[operation.line];
        let peer = line.peer;
        let state = &mut self.peers[peer as usize];
        state.outstanding = state.outstanding.saturating_sub(1);
        state.since = if state.outstanding == 0 && line.backlog.is_empty() { None } else { now };
        let Operation { id, number, has_message, kind, .. } = operation;
        let outcome = ended.error.map_or(Ok(()), |error| Err(self.error(peer, kind, error)));
        let order = &mut self.lines[operation.line].order;
        if kind != Kind::Message {
            order.transferred(number);
        }
        if outcome.is_err() {
            order.fail(number);
        }
        match (&outcome, kind, has_message) {
            (Ok(()), Kind::Message, _) => order.take(number, id),
            (Err(error), Kind::Message, _) => events.push(failed(id, error)),
            (Ok(()), _, true) => {}
            (Err(error), _, true) => order.keep(id, error.clone()),
            (outcome, _, false) => events.push(Event::Completion { id, outcome: (*outcome).clone() }),
        }
        order.release(peer, |id, outcome| events.push(Event::Completion { id, outcome }));
        if let Err(error @ NetError::PeerLost { .. }) = outcome {
            self.lose(peer, &error, events);
        }
    }

    /// Takes a message that has arrived.
    fn received(&mut self, Ended { slot, bytes, error }: Ended, events: &mut Vec<Event>) {
        self.unposted.push(slot);
        if error.is_some() {
            return;
        }
        let data = self.endpoint.slots.read(slot);
        let envelope = Envelope::from_bytes(&data[..bytes.min(DATA)]);
        // A message without the token comes from a stranger, or from an earlier job at the same address.
        let Some(envelope) = envelope.filter(|envelope| envelope.token == self.own.token) else {
            tracing::warn!(bytes, "a message of a stranger was ignored");
            return;
        };
        let Envelope { context, from, number, message, .. } = envelope;
        let index = context as usize * self.peers.len() + from as usize;
        let known = context < self.own.contexts && (from as usize) < self.peers.len();
        let Some(line) = self.lines.get_mut(index).filter(|_| known) else { return };
        if !Message::from_bytes(&message).is_some_and(|message| line.arrivals.add(number, message)) {
            let error = NetError::Failed { context: "an invalid message", peer: from, status: 0 };
            self.lose(from, &error, events);
            return;
        }
        while let Some(message) = line.arrivals.next() {
            events.push(match message {
                Message::Signal(target, amount) => Event::Signal(SignalArrival { context, from, target, amount }),
                Message::Notice(notice) => Event::Notice(NoticeArrival { context, from, notice }),
            });
        }
    }

    /// Loses peers that complete nothing.
    fn look(&mut self, events: &mut Vec<Event>) {
        let after = self.endpoint.domain.fabric.config.lost_after;
        if self.looked.elapsed() < LOOK_EVERY {
            return;
        }
        self.looked = Instant::now();
        for peer in 0..self.peers.len() as u32 {
            let since = self.peers[peer as usize].since;
            if since.is_some_and(|since| since.elapsed() >= after) {
                let reason = format!("none of the requests to it has completed for {after:?}");
                self.lose(peer, &NetError::PeerLost { peer, reason }, events);
            }
        }
    }

    /// Ends the endpoint, and with it all operations that the provider still holds.
    fn shut(&mut self, windows: &mut Windows, events: &mut Vec<Event>) {
        self.endpoint.shut();
        let reason = "the endpoint of this rank was ended after the loss of a peer".to_owned();
        self.lose_all(&NetError::Local { what: "reaching a peer", reason }, events);
        for slot in 0..self.uses.len() {
            if let Use::Operation(Operation { window: Some(window), .. }) = self.uses[slot] {
                windows.leave(window);
            }
            self.uses[slot] = Use::Free;
        }
    }

    /// Returns whether the provider still holds an operation of a lost peer that uses the window.
    fn holds(&self, id: u32) -> bool {
        let held = |used: &Use| matches!(used, Use::Operation(Operation { is_over: true, window: Some(window), .. }) if *window == id);
        !self.endpoint.is_shut() && self.uses.iter().any(held)
    }
}

fn failed(id: u64, error: &NetError) -> Event {
    Event::Completion { id, outcome: Err(error.clone()) }
}

/// Returns the kind of a request's transfer.
fn kind(request: &Request) -> Kind {
    match request.transfer {
        Transfer::Get { .. } => Kind::Read,
        Transfer::Put { .. } | Transfer::PutValue { .. } => Kind::Write,
        Transfer::Nothing => Kind::Message,
    }
}

impl Network for FabricNetwork {
    fn capabilities(&self) -> Capabilities {
        Capabilities {
            name: "fabric",
            strong_signals: true,
            va_signals: true,
            max_message: self.fabric.config.max_message.min(self.fabric.offer.max_message).max(8),
            completion_is_arrival: true,
            raises: Raises::Receiver,
            needs_make_visible: false,
            mailbox: false,
        }
    }

    fn register_signals(&mut self, signals: &LocalSignals) -> Result<Key, NetError> {
        let offer = &self.fabric.offer;
        let sends = self.fabric.config.depth.min(offer.sends).max(4);
        let receives = RECEIVES.min(offer.receives).max(1);
        let mut endpoint = EndpointHandle::new(&self.fabric, sends + receives, self.ranks)?;
        let mut uses = vec![Use::Free; sends];
        uses.resize(sends + receives, Use::Receive);
        let mut unposted = Vec::new();
        for slot in sends..sends + receives {
            if endpoint.receive(slot) != Posted::Yes {
                unposted.push(slot);
            }
        }
        let [token, _] = bytemuck::cast::<_, [u64; 2]>(random());
        let own = Hello {
            per_context: signals.per_context,
            contexts: signals.contexts,
            provider: offer.provider.clone(),
            protocol: offer.protocol,
            address: endpoint.address()?,
            token,
        };
        let key = own.to_key(self.rank, self.ranks);
        let lines = (0..signals.contexts)
            .flat_map(|context| (0..self.ranks).map(move |peer| Line { context, peer, ..Line::default() }));
        self.live = Some(Live {
            endpoint,
            own,
            uses,
            free: (0..sends).rev().collect(),
            unposted,
            lines: lines.collect(),
            busy: Vec::new(),
            peers: Vec::new(),
            per_peer: (sends / 2).clamp(2, 128),
            ended: Vec::new(),
            looked: Instant::now(),
        });
        Ok(key)
    }

    fn connect_signals(&mut self, keys: &[Key]) -> Result<(), NetError> {
        let Some(live) = &mut self.live else {
            let what = "connecting before signals are registered";
            return Err(NetError::Local { what, reason: "there is no endpoint".to_owned() });
        };
        let hellos = keys.iter().zip(0..).map(|(key, rank)| Hello::from_key(rank, self.ranks, &live.own, key));
        let hellos = hellos.collect::<Result<Vec<_>, _>>()?;
        if hellos.len() != self.ranks as usize {
            return Err(KeyError { rank: hellos.len() as u32, reason: "there is none".to_owned() }.into());
        }
        let peers = hellos.iter().zip(0..).map(|(hello, rank)| {
            let refuse = || KeyError { rank, reason: "the provider cannot read its address".to_owned() };
            let address = live.endpoint.insert(&hello.address).ok_or_else(refuse)?;
            let token = hello.token;
            Ok(Peer { address, token, outstanding: 0, since: None, is_full: false, lost: None })
        });
        live.peers = peers.collect::<Result<_, KeyError>>()?;
        self.windows.signals = hellos.iter().map(|hello| hello.per_context).collect();
        Ok(())
    }

    fn register(&mut self, window: &LocalWindow) -> Result<Key, NetError> {
        let Some(live) = &self.live else {
            return Err(NetError::Local { what: "registering memory", reason: "register signals first".to_owned() });
        };
        self.windows.register(&live.endpoint, window)
    }

    fn connect(&mut self, window: u32, keys: &[Key]) -> Result<(), NetError> {
        self.windows.connect(window, keys)
    }

    fn deregister(&mut self, window: u32) -> bool {
        if let Some(live) = self.live.as_mut().filter(|live| live.holds(window)) {
            live.shut(&mut self.windows, &mut self.events);
        }
        self.windows.close(window)
    }

    fn post(&mut self, requests: &[Request]) -> usize {
        let mut taken = 0;
        for request in requests {
            let index = request.context as usize * self.ranks as usize + request.peer as usize;
            let exists = |live: &&mut Live| (request.peer as usize) < live.peers.len() && index < live.lines.len();
            match self.live.as_mut().filter(exists) {
                Some(live) if live.lines[index].backlog.len() < BACKLOG => {
                    live.lines[index].backlog.push_back(*request);
                    live.list(index);
                }
                Some(_) => break,
                None => {
                    let (context, peer) = ("a request without a connection", request.peer);
                    let outcome = Err(NetError::Failed { context, peer, status: 0 });
                    self.events.push(Event::Completion { id: request.id, outcome });
                }
            }
            taken += 1;
        }
        self.work();
        taken
    }

    fn poll(&mut self, events: &mut Vec<Event>) {
        if let Some(live) = self.live.as_mut().filter(|live| !live.peers.is_empty()) {
            live.take(&mut self.windows, &mut self.events);
            live.look(&mut self.events);
        }
        self.work();
        events.append(&mut self.events);
    }

    fn describe(&self) -> String {
        let Offer { provider, domain, in_order, .. } = &self.fabric.offer;
        let order = if *in_order { "behind their data" } else { "once their data is delivered" };
        format!("fabric over {provider} ({domain}), signals raised by the proxy, sent {order}")
    }

    fn carries_notices(&self) -> bool {
        true
    }

    fn is_quiet(&self) -> bool {
        let is_done = |used: &Use| !matches!(used, Use::Operation(operation) if !operation.is_over);
        self.events.is_empty()
            && self.live.as_ref().is_none_or(|live| live.busy.is_empty() && live.uses.iter().all(is_done))
    }
}

const _: () = assert!(BYTES <= DATA, "a message fits into a slot");
