// SPDX-License-Identifier: MIT OR Apache-2.0
//! An endpoint in use: the requests that the provider holds, and the peers.

use super::connection::{Connection, Envelope};
use super::key::Hello;
use super::objects::{DATA, Ended, EndpointHandle, Posted};
use super::provider::explain;
use super::windows::Windows;
use crate::message::{self, Message};
use crate::{Event, NetError, NoticeArrival, Request, SignalArrival};
use gin_abi::Transfer;
use std::ffi::c_int;
use std::time::{Duration, Instant};

/// Maximum number of reads of the completion queue in one poll, so that the proxy returns to its other work.
const READS: usize = 16;
/// Time after which a read by the own endpoint, which takes microseconds, is given up.
const READ_BACK: Duration = Duration::from_secs(1);
/// Interval in which lost peers are looked for.
const LOOK_EVERY: Duration = Duration::from_millis(50);

/// A peer.
#[derive(Debug)]
pub(super) struct Peer {
    /// Number that stands for its address.
    pub(super) address: u64,
    pub(super) token: u64,
    /// Outstanding operations.
    pub(super) outstanding: usize,
    /// When it last completed an operation, or since when it has had work. `None` without work.
    pub(super) since: Option<Instant>,
    /// The provider had no room for it, so it gets nothing before the next completions are read.
    pub(super) is_full: bool,
    pub(super) lost: Option<NetError>,
}

/// The use of a slot.
#[derive(Clone, Copy, Debug)]
pub(super) enum Use {
    Free,
    /// A posted buffer.
    Receive,
    /// A read of this rank's own memory.
    ReadBack,
    Operation(Operation),
}

/// An outstanding operation.
#[derive(Clone, Copy, Debug)]
pub(super) struct Operation {
    connection: usize,
    /// The request.
    id: u64,
    /// Its number in the connection.
    number: u64,
    /// The request's message follows, which reports the outcome.
    has_message: bool,
    kind: Kind,
    /// The window of this rank that it uses.
    window: Option<u32>,
    /// Its request has been reported as failed, because the peer is lost.
    pub(super) is_over: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Kind {
    Write,
    Read,
    Message,
}

/// An endpoint in use.
pub(super) struct Live {
    pub(super) endpoint: EndpointHandle,
    pub(super) own: Hello,
    pub(super) uses: Vec<Use>,
    pub(super) free: Vec<usize>,
    /// Slots for arriving messages that are not posted.
    pub(super) unposted: Vec<usize>,
    /// By context, then by rank.
    pub(super) connections: Vec<Connection>,
    /// Indices of connections with requests.
    pub(super) busy: Vec<usize>,
    /// By rank; empty until connected.
    pub(super) peers: Vec<Peer>,
    /// Maximum number of outstanding operations of a peer, so that one cannot take all slots.
    pub(super) per_peer: usize,
    pub(super) ended: Vec<Ended>,
    pub(super) looked: Instant,
    pub(super) read_back: ReadBack,
}

/// The read of this rank's own memory.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum ReadBack {
    Idle,
    Outstanding,
    Failed(c_int),
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
            let text = explain(&fabric.library, error);
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
            if operation.is_over || self.connections[operation.connection].peer != peer {
                continue;
            }
            operation.is_over = true;
            if !operation.has_message {
                events.push(failed(operation.id, error));
            }
        }
        for connection in 0..self.connections.len() {
            if self.connections[connection].peer == peer {
                events.extend(self.connections[connection].order.lose().map(|id| failed(id, error)));
                if !self.connections[connection].backlog.is_empty() {
                    self.list(connection);
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

    /// Enters a connection into the list of busy ones.
    pub(super) fn list(&mut self, connection: usize) {
        if !self.connections[connection].listed {
            self.connections[connection].listed = true;
            self.busy.push(connection);
        }
    }

    /// Posts requests of a connection, as far as there is room.
    pub(super) fn work(&mut self, index: usize, windows: &mut Windows, events: &mut Vec<Event>) {
        let peer = self.connections[index].peer;
        while let Some(&request) = self.connections[index].backlog.front() {
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
                    let kind = if self.connections[index].moved { Kind::Message } else { kind(&request) };
                    let error = self.error(peer, kind, (error, 0));
                    self.fail(index, &request, error, events);
                }
            }
        }
    }

    /// Takes the first request out of the backlog of a connection.
    fn next(&mut self, connection: usize) {
        self.connections[connection].backlog.pop_front();
        self.connections[connection].moved = false;
    }

    /// Fails the first request of a connection. If its peer is lost, that fails the others too.
    fn fail(&mut self, index: usize, request: &Request, error: NetError, events: &mut Vec<Event>) {
        self.next(index);
        let order = &mut self.connections[index].order;
        let number = order.post(false);
        order.fail(number);
        let error = order.error(request.id).unwrap_or(error);
        events.push(failed(request.id, &error));
        if let NetError::PeerLost { peer, .. } = error {
            self.lose(peer, &error, events);
        }
    }

    /// Posts the next operation of the first request of a connection, in this slot.
    fn step(
        &mut self,
        index: usize,
        slot: usize,
        request: &Request,
        windows: &mut Windows,
        events: &mut Vec<Event>,
    ) -> Posted {
        let (peer, has_message) = (request.peer, request.signal.is_some() || request.notice.is_some());
        if self.connections[index].order.is_broken() && request.is_strong() {
            self.fail(index, request, NetError::behind(peer), events);
            return Posted::Yes;
        }
        if request.is_quiet() {
            return self.quiet(index, slot, request, windows, events);
        }
        if !self.connections[index].moved {
            if let Some(signal) = &request.signal
                && let Err(error) = windows.check_signal(peer, signal)
            {
                self.fail(index, request, error, events);
                return Posted::Yes;
            }
            if request.transfer.bytes() > 0 {
                return match self.transfer(slot, request, windows) {
                    Ok((Posted::Yes, window)) => {
                        if let Transfer::Put { destination, .. } | Transfer::PutValue { destination, .. } =
                            request.transfer
                            && windows.remote_in_gpu(destination.window, peer).is_some()
                        {
                            self.connections[index].put_to = Some(destination.window);
                        }
                        self.started(slot, index, request.id, (kind(request), has_message), window);
                        if let Some(window) = window {
                            windows.enter(window);
                        }
                        if has_message {
                            self.connections[index].moved = true;
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
        if !behind && self.connections[index].order.is_moving() {
            return Posted::Behind;
        }
        // A transfer that was just awaited has failed.
        if self.connections[index].order.is_broken() && self.connections[index].moved {
            self.fail(index, request, NetError::behind(peer), events);
            return Posted::Yes;
        }
        let (connection, state) = (&self.connections[index], &self.peers[peer as usize]);
        let (context, from) = (connection.context, windows.rank);
        let envelope =
            Envelope { context, from, number: connection.sent, token: state.token, message: message::of(request) };
        let posted = self.endpoint.send(slot, state.address, &envelope.to_bytes());
        if posted == Posted::Yes {
            self.started(slot, index, request.id, (Kind::Message, false), None);
            self.connections[index].sent += 1;
            self.next(index);
        }
        posted
    }

    /// Posts a quiet. Puts that have completed are at the peer's NIC and, in host memory, visible. In a GPU they may
    /// still be on the bus: the read of a byte there is ordered behind them, so its answer confirms that they have
    /// arrived (see [`make_visible`](Self::make_visible)).
    fn quiet(
        &mut self,
        index: usize,
        slot: usize,
        request: &Request,
        windows: &Windows,
        events: &mut Vec<Event>,
    ) -> Posted {
        let peer = request.peer;
        if self.connections[index].order.is_broken() {
            self.fail(index, request, NetError::behind(peer), events);
            return Posted::Yes;
        }
        // Nobody uses a window any more that ranks have deregistered.
        let put_to = self.connections[index].put_to;
        let Some(from) = put_to.and_then(|window| windows.remote_in_gpu(window, peer)) else {
            self.next(index);
            events.push(Event::Completion { id: request.id, outcome: Ok(()) });
            return Posted::Yes;
        };
        let posted = self.endpoint.read_byte(slot, self.peers[peer as usize].address, from);
        if posted == Posted::Yes {
            self.started(slot, index, request.id, (Kind::Read, false), None);
            self.next(index);
        }
        posted
    }

    /// Makes visible to this rank's GPU what its NIC has written there.
    ///
    /// The provider's completions do not promise it: fi_cq(3) defines visibility only within one memory domain, and
    /// completions and messages are in host memory. It leaves flushes of GPUs to applications. So this reads a byte of
    /// the GPU's memory by the own NIC, as the network `verbs` does and NCCL's plugin for libfabric: the read's answer
    /// comes behind the writes that the NIC has posted over PCIe before.
    pub(super) fn make_visible(&mut self, windows: &mut Windows, events: &mut Vec<Event>) -> Result<(), NetError> {
        let Some(from) = windows.in_gpu() else { return Ok(()) };
        let fail = |reason: String| NetError::Local { what: "reading back memory of the GPU", reason };
        let (slot, begin) = (self.uses.len() - 1, Instant::now());
        let own = self.peers.get(windows.rank as usize).map(|own| own.address);
        let Some(own) = own.filter(|_| !self.endpoint.is_shut()) else {
            return Err(fail("the endpoint is not connected".to_owned()));
        };
        let mut is_posted = false;
        loop {
            match &self.read_back {
                ReadBack::Failed(error) => {
                    let text = explain(&self.endpoint.domain.fabric.library, *error);
                    return Err(fail(format!("{text} (error {error})")));
                }
                ReadBack::Idle if is_posted => return Ok(()),
                ReadBack::Idle => match self.endpoint.read_byte(slot, own, from) {
                    Posted::Yes => (self.read_back, is_posted) = (ReadBack::Outstanding, true),
                    Posted::No(error) => self.read_back = ReadBack::Failed(error),
                    Posted::Later | Posted::Behind => {}
                },
                // A read that was given up is still outstanding. Its answer would be taken for the next read's.
                ReadBack::Outstanding if !is_posted => return Err(fail("an earlier read has no answer".to_owned())),
                ReadBack::Outstanding => {}
            }
            if begin.elapsed() > READ_BACK {
                return Err(fail(format!("no answer within {READ_BACK:?}")));
            }
            self.take(windows, events);
        }
    }

    /// Records an operation that was posted in the last free slot.
    fn started(
        &mut self,
        slot: usize,
        connection: usize,
        id: u64,
        (kind, has_message): (Kind, bool),
        window: Option<u32>,
    ) {
        let number = self.connections[connection].order.post(kind != Kind::Message);
        self.free.pop();
        self.uses[slot] =
            Use::Operation(Operation { connection, id, number, has_message, kind, window, is_over: false });
        self.peers[self.connections[connection].peer as usize].outstanding += 1;
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
                let (region, address) = windows.local(source.window, source.offset, bytes)?;
                let at = windows.remote(destination.window, peer, destination.offset, bytes)?;
                // Safety: in range; the caller counts the use of the window, which stays registered until it ends.
                (unsafe { self.endpoint.write(slot, to, (region, address, bytes), at) }, Some(source.window))
            }
            Transfer::Get { source, destination, bytes } => {
                let at = windows.remote(source.window, peer, source.offset, bytes)?;
                let (region, address) = windows.local(destination.window, destination.offset, bytes)?;
                // Safety: as above.
                (unsafe { self.endpoint.read(slot, to, (region, address, bytes), at) }, Some(destination.window))
            }
            Transfer::PutValue { value, width_log2, destination } => {
                let bytes = 1usize << width_log2.min(3);
                let at = windows.remote(destination.window, peer, destination.offset, bytes as u64)?;
                (self.endpoint.write_value(slot, to, &value.to_le_bytes()[..bytes], at), None)
            }
        })
    }

    /// Handles the completions since the last call.
    pub(super) fn take(&mut self, windows: &mut Windows, events: &mut Vec<Event>) {
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
                Use::ReadBack => {
                    self.read_back = ended.error.map_or(ReadBack::Idle, |(error, _)| ReadBack::Failed(error));
                }
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
        let connection = &mut self.connections[operation.connection];
        let peer = connection.peer;
        let state = &mut self.peers[peer as usize];
        state.outstanding = state.outstanding.saturating_sub(1);
        state.since = if state.outstanding == 0 && connection.backlog.is_empty() { None } else { now };
        let Operation { id, number, has_message, kind, .. } = operation;
        let outcome = ended.error.map_or(Ok(()), |error| Err(self.error(peer, kind, error)));
        let order = &mut self.connections[operation.connection].order;
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
        let Some(connection) = self.connections.get_mut(index).filter(|_| known) else { return };
        if !Message::from_bytes(&message).is_some_and(|message| connection.arrivals.add(number, message)) {
            let error = NetError::Failed { context: "an invalid message", peer: from, status: 0 };
            self.lose(from, &error, events);
            return;
        }
        while let Some(message) = connection.arrivals.next() {
            events.push(match message {
                Message::Signal(target, amount) => Event::Signal(SignalArrival { context, from, target, amount }),
                Message::Notice(notice) => Event::Notice(NoticeArrival { context, from, notice }),
            });
        }
    }

    /// Loses peers that complete nothing.
    pub(super) fn look(&mut self, events: &mut Vec<Event>) {
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
    pub(super) fn shut(&mut self, windows: &mut Windows, events: &mut Vec<Event>) {
        windows.unbind(&self.endpoint);
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
    pub(super) fn holds(&self, id: u32) -> bool {
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
