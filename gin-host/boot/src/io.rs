// SPDX-License-Identifier: MIT OR Apache-2.0
//! The sockets of a rank, served by tasks on one thread. The thread of [`beat`](crate::beat) serves the sockets of
//! edges.
//!
//! Each rank except rank 0 connects to rank 0 and registers its address. Then its parent connects to it. The address of
//! a child travels down the tree to the parent. So rank 0 holds no more connections than other ranks, however many
//! ranks there are.

use crate::address::default_address;
use crate::beat::{AHEAD, Beats, Event, Late, Watch, read};
use crate::error::{show_wait, system, usual_cause, warn};
use crate::greet::{GREETING, PAUSES, accept, limited};
use crate::id::Secret;
use crate::link::{Link, LinkError, Outbound, connect};
use crate::message::{Answer, CHUNK, FRAME, Hello, Message, Registration, VERSION};
use crate::node::{Node, Outgoing};
use crate::seat::Seat;
use crate::tree::PARENT;
use crate::{BootstrapError, LossCause, TcpConfig, millis};
use rustix::io::Errno;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc::{self, UnboundedReceiver, WeakSender};
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

/// The time for which connecting fails before the failure is reported.
const PATIENCE: Duration = Duration::from_secs(3);

/// The time for which rank 0 still answers questions about missing ranks after it gave up.
const ANSWERING: Duration = Duration::from_secs(3);

/// The time for which a rank that leaves waits until its neighbours have taken all bytes.
pub(super) const LINGERING: Duration = Duration::from_secs(5);

/// The way in which a rank begins.
#[derive(Debug)]
pub(super) enum Start {
    /// As rank 0, which listens at this socket.
    Listen(std::net::TcpListener),
    /// As another rank.
    Connect {
        /// The addresses at one of which rank 0 listens.
        addresses: Vec<SocketAddr>,
        /// The end of the error if this rank reaches rank 0 at none of them.
        remedy: String,
    },
}

/// The state that a rank's tasks share.
#[derive(Debug)]
pub(super) struct Io {
    node: Arc<Node>,
    secret: Secret,
    config: TcpConfig,
    beats: Beats,
    begun: Instant,
    /// Each edge holds a strong reference while it is served.
    alive: WeakSender<()>,
}

/// Serves a rank until it has left.
pub(super) async fn run(
    node: Arc<Node>,
    mut connects: UnboundedReceiver<(usize, Registration)>,
    secret: Secret,
    config: TcpConfig,
    start: Start,
    beats: Beats,
) {
    let (alive, mut ended) = mpsc::channel::<()>(1);
    let (begun, held) = (Instant::now(), alive.downgrade());
    let io = Arc::new(Io { node: node.clone(), secret, config, beats, begun, alive: held });
    let mut tasks = JoinSet::new();
    match start {
        Start::Listen(listener) => {
            if let Ok(own) = listener.local_addr() {
                let ip = if own.ip().is_unspecified() { default_address() } else { own.ip() };
                let _ = node.ip.set(io.config.address.unwrap_or(ip));
            }
            match listener.set_nonblocking(true).and_then(|()| TcpListener::from_std(listener)) {
                Ok(listener) => drop(tasks.spawn(io.clone().accept(listener))),
                Err(error) => node.fail(system("listen")(error)),
            }
            tasks.spawn(io.clone().watch(Vec::new()));
        }
        Start::Connect { addresses, remedy } => drop(tasks.spawn(io.clone().enter(addresses, remedy))),
    }
    loop {
        tokio::select! {
            () = node.posted.notified() => {
                node.publish();
                if node.leaving.load(Ordering::Acquire) {
                    break;
                }
            }
            Some((edge, child)) = connects.recv() => drop(tasks.spawn(io.clone().connect_child(edge, child))),
        }
    }
    node.leave();
    drop(alive);
    // Edges that are not up are not waited for.
    let _ = timeout(LINGERING, ended.recv()).await;
    if node.rank == 0 && !node.joined.load(Ordering::Acquire) {
        sleep(ANSWERING).await;
    }
}

/// Returns what usually makes this system refuse to connect, with the remedy, for the end of an error.
pub(super) fn cause_of(error: &LinkError, address: SocketAddr) -> &'static str {
    let LinkError::Io(error) = error else { return "" };
    match Errno::from_io_error(error) {
        Some(Errno::NETUNREACH | Errno::ADDRNOTAVAIL) if address.ip().is_loopback() => {
            " (is the loopback interface of this network namespace up? `ip link set lo up`)"
        }
        Some(Errno::NETUNREACH) => " (this host has no route to that address: `ip route`)",
        _ => usual_cause(error),
    }
}

/// Returns whether later attempts will fail too: another program has the port, or this system refuses to connect.
fn is_hopeless(error: &LinkError, address: SocketAddr) -> bool {
    match error {
        LinkError::NotGin(_) => true,
        LinkError::Io(error) => match Errno::from_io_error(error) {
            Some(Errno::ACCESS | Errno::PERM | Errno::AFNOSUPPORT) => true,
            // Another network may come up later.
            Some(Errno::NETUNREACH | Errno::ADDRNOTAVAIL) => address.ip().is_loopback(),
            _ => false,
        },
        _ => false,
    }
}

impl Io {
    fn deadline(&self) -> Instant {
        // A wait without a deadline ends after a year.
        const YEAR: Duration = Duration::from_secs(365 * 24 * 3600);
        self.begun + self.config.joining.min(YEAR)
    }

    /// Returns whether this rank still tries to join.
    fn joining(&self) -> bool {
        !self.node.joined.load(Ordering::Acquire) && self.node.failed().is_none() && Instant::now() < self.deadline()
    }

    /// Connects, sends a [`Hello`] and receives the answer.
    async fn call(&self, address: SocketAddr, hello: &Hello) -> Result<(Link, Answer), LinkError> {
        let mut link = Link::connect(connect(address).await?, &self.secret, &self.node.traffic).await?;
        let answer = link.ask(hello).await?;
        Ok((link, answer))
    }

    /// Registers with rank 0, then serves this rank's listener.
    async fn enter(self: Arc<Self>, addresses: Vec<SocketAddr>, remedy: String) {
        match self.register(&addresses, &remedy).await {
            Ok(listener) => drop(tokio::join!(self.clone().accept(listener), self.watch(addresses))),
            Err(error) => self.node.fail(error),
        }
    }

    /// Accepts connections of this job.
    async fn accept(self: Arc<Self>, listener: TcpListener) {
        let rank = self.node.rank;
        accept(listener, rank, move |stream| {
            let io = self.clone();
            async move { io.greet(stream).await }
        })
        .await;
    }

    async fn register(&self, addresses: &[SocketAddr], remedy: &str) -> Result<TcpListener, BootstrapError> {
        let mut listener = None;
        let mut pause = PAUSES.0;
        let (begun, mut reported, mut hopeless_since) = (Instant::now(), Duration::ZERO, None);
        loop {
            let (mut errors, mut hopeless) = (Vec::new(), true);
            for &address in addresses {
                if !errors.is_empty() && !self.joining() {
                    break;
                }
                let error = match self.try_register(address, &mut listener).await {
                    Ok(Answer::Welcome) => {
                        let Some(listener) = listener.take() else { continue };
                        if let Ok(own) = listener.local_addr() {
                            let _ = self.node.ip.set(own.ip());
                        }
                        return Ok(listener);
                    }
                    Ok(Answer::Duplicate) => return Err(BootstrapError::Duplicate { rank: self.node.rank }),
                    Ok(Answer::Ranks(theirs)) => {
                        return Err(BootstrapError::RanksDiffer { own: self.node.ranks, theirs });
                    }
                    Ok(_) => "it is not rank 0".to_owned(),
                    Err(LinkError::Key) => return Err(BootstrapError::Secret),
                    Err(LinkError::Version(theirs)) => {
                        return Err(BootstrapError::Version { own: VERSION.into(), theirs: theirs.into() });
                    }
                    Err(error) => {
                        hopeless &= is_hopeless(&error, address);
                        format!("{error}{}", cause_of(&error, address))
                    }
                };
                errors.push(format!("at {address}: {error}"));
            }
            let reason = format!("rank {} cannot reach rank 0 {}; {remedy}", self.node.rank, errors.join("; "));
            let since = if hopeless { *hopeless_since.get_or_insert_with(Instant::now) } else { Instant::now() };
            if !self.joining() || since.elapsed() > PATIENCE {
                return Err(BootstrapError::Unreachable { reason });
            }
            if !hopeless {
                hopeless_since = None;
            }
            if begun.elapsed() - reported >= self.config.progress {
                reported = begun.elapsed();
                warn(&format!("{reason}; it has tried for {} s and tries on", reported.as_secs()));
            }
            sleep(self.jitter(pause)).await;
            pause = (pause * 2).min(PAUSES.1);
        }
    }

    /// Returns a time between half a pause and a whole one, so that ranks do not all connect at the same time.
    fn jitter(&self, pause: Duration) -> Duration {
        let part = u32::from(self.node.instance[0]) ^ (Instant::now() - self.begun).subsec_nanos() & 0xff;
        pause / 2 + pause * part / 512
    }

    async fn try_register(&self, address: SocketAddr, listener: &mut Option<TcpListener>) -> Result<Answer, LinkError> {
        let stream = connect(address).await?;
        let own = match listener {
            Some(listener) => listener.local_addr()?,
            None => {
                // Other ranks reach this rank at the address from which it reaches rank 0, unless the configuration
                // names another one.
                let ip = self.config.address.map_or_else(|| stream.local_addr().map(|own| own.ip()), Ok)?;
                let bound = TcpListener::bind((ip, 0)).await.map_err(|error| {
                    std::io::Error::new(error.kind(), format!("this rank cannot listen at {ip}: {error}"))
                })?;
                listener.insert(bound).local_addr()?
            }
        };
        let mut link = Link::connect(stream, &self.secret, &self.node.traffic).await?;
        let Node { rank, ranks, instance, .. } = *self.node;
        link.ask(&Hello::Register(Registration { rank, ranks, instance, address: own })).await
    }

    async fn greet(&self, stream: TcpStream) -> Result<(), LinkError> {
        limited(GREETING, async {
            let mut link = Link::accept(stream, &self.secret, &self.node.traffic).await?;
            let node = &self.node;
            match link.receive().await? {
                Hello::Register(registration) => {
                    let answer = node.register(&registration).err().unwrap_or(Answer::Welcome);
                    link.send(&answer).await
                }
                Hello::Edge { from, to, ranks, instance, seat } => {
                    let own = (node.place.parent, node.rank, node.ranks, node.instance);
                    let up = if (Some(from), to, ranks, instance) == own { node.edge_up(PARENT) } else { None };
                    let Some(outgoing) = up else { return link.send(&Answer::Unexpected).await };
                    let sent = link.send(&Answer::Edge(self.beats.seat)).await;
                    self.serve(PARENT, link, outgoing, seat);
                    sent
                }
                Hello::Status { trouble, .. } => {
                    node.add_trouble(&trouble);
                    let (missing, count) = node.unregistered();
                    let failed = node.failed().is_some();
                    link.send(&Answer::Status { missing, count, failed, trouble: node.trouble() }).await
                }
                // A job that has no door yet still joins.
                Hello::Knock(knock) => {
                    link.send(&node.door.get().map_or(Answer::NotNow, |door| door.answer(&knock))).await
                }
            }
        })
        .await
    }

    /// Connects to a child that has registered.
    async fn connect_child(self: Arc<Self>, edge: usize, child: Registration) {
        let Node { rank: from, ranks, .. } = *self.node;
        let seat = self.beats.seat;
        let hello = Hello::Edge { from, to: child.rank, ranks, instance: child.instance, seat };
        let (begun, mut reported, mut pause) = (Instant::now(), None, PAUSES.0);
        while self.joining() {
            let error = match self.call(child.address, &hello).await {
                Ok((link, Answer::Edge(seat))) => {
                    if let Some(outgoing) = self.node.edge_up(edge) {
                        self.serve(edge, link, outgoing, seat);
                    }
                    return;
                }
                Ok(_) => "it does not expect this rank".to_owned(),
                Err(error) => error.to_string(),
            };
            if begun.elapsed() > PATIENCE {
                let trouble = format!("rank {from} cannot reach rank {} at {}: {error}", child.rank, child.address);
                if reported.is_none_or(|reported: Instant| reported.elapsed() >= self.config.progress) {
                    reported = Some(Instant::now());
                    warn(&trouble);
                }
                self.node.add_trouble(&trouble);
            }
            sleep(self.jitter(pause)).await;
            pause = (pause * 2).min(PAUSES.1);
        }
    }

    /// Reports which ranks are missing while joining takes long, and gives up at the deadline.
    async fn watch(self: Arc<Self>, rank_0: Vec<SocketAddr>) {
        let node = &self.node;
        // With many ranks each one asks less often.
        let every = self.config.progress + Duration::from_millis(5) * node.ranks;
        loop {
            let left = self.deadline().saturating_duration_since(Instant::now());
            sleep(self.jitter(every).min(left)).await;
            if node.joined.load(Ordering::Acquire) || node.failed().is_some() {
                return;
            }
            let mut over = false;
            let mut answered = true;
            if node.rank != 0 {
                match self.ask(&rank_0).await {
                    Ok(failed) => over = failed,
                    Err(error) => {
                        answered = false;
                        warn(&format!("rank {} waits for other ranks, but rank 0 does not answer: {error}", node.rank));
                    }
                }
            } else {
                let (missing, count) = node.unregistered();
                node.set_missing(missing, count, "");
            }
            if over || Instant::now() >= self.deadline() {
                return node.give_up_joining(self.begun.elapsed());
            }
            let (rank, ranks, waited) = (node.rank, node.ranks, self.begun.elapsed());
            match node.reported_missing() {
                _ if !answered => {}
                (missing, count @ 1..) => {
                    tracing::info!("{}", show_wait(rank, ranks, waited, &missing, count as usize));
                }
                // Another rank has warned of the cause, if it is known.
                (_, 0) => {
                    let waited = waited.as_secs();
                    tracing::info!("rank {rank} has waited {waited} s for connections between the {ranks} ranks");
                }
            }
        }
    }

    /// Asks rank 0 which ranks are missing. Returns whether rank 0 has given up.
    async fn ask(&self, rank_0: &[SocketAddr]) -> Result<bool, String> {
        let mut errors = Vec::new();
        let hello = Hello::Status { rank: self.node.rank, trouble: self.node.trouble() };
        for &address in rank_0 {
            match self.call(address, &hello).await {
                Ok((_, Answer::Status { missing, count, failed, trouble })) => {
                    self.node.set_missing(missing, count, &trouble);
                    return Ok(failed);
                }
                Ok(_) => errors.push(format!("at {address}: it is not rank 0")),
                Err(error) => errors.push(format!("at {address}: {error}")),
            }
        }
        Err(errors.join("; "))
    }

    /// Serves an edge until it ends.
    fn serve(&self, edge: usize, link: Link, outgoing: Outgoing, neighbour: Seat) {
        let (node, silence, alive) = (self.node.clone(), self.config.silence, self.alive.upgrade());
        let Beats { runtime, seat } = &self.beats;
        let watch = Watch::new(silence, seat, neighbour, link.is_local());
        let link = match link.onto(runtime) {
            Ok(link) => link,
            Err(error) => {
                node.edge_lost(edge, LossCause::Failed { reason: error.to_string() });
                return;
            }
        };
        let (to, events) = mpsc::channel(AHEAD);
        let reader = runtime.spawn(read(link.inbound, watch, to));
        let mut writer = runtime.spawn(write(node.clone(), edge, link.outbound, outgoing, silence / 4));
        tokio::spawn(async move {
            let Some(cause) = deal(&node, edge, events).await else {
                return node.fail(system("serve connections")("the thread has ended"));
            };
            reader.abort();
            let lost = node.edge_lost(edge, cause.clone());
            if let (true, Some(peer)) = (lost, node.neighbour(edge)) {
                let (loss, rank) = (node.loss(peer, cause), node.rank);
                tracing::warn!("{loss} (found by rank {rank}); the output of rank {peer} may have the reason");
            }
            // Sends the remaining messages. The wait is limited, as the peer may take nothing.
            let limit = if lost { GREETING.min(silence) } else { LINGERING };
            if timeout(limit, &mut writer).await.is_err() {
                writer.abort();
            }
            drop(alive);
        });
    }
}

/// Sends the messages of an edge, and a ping when there was no message for a while.
async fn write(
    node: Arc<Node>,
    edge: usize,
    mut link: Outbound,
    mut outgoing: Outgoing,
    beat: Duration,
) -> Result<(), LinkError> {
    let mut frame = Vec::new();
    loop {
        let mut next = match timeout(beat, outgoing.recv()).await {
            Ok(None) => return link.finish().await,
            Ok(message) => message,
            Err(_) => Some(Message::Ping),
        };
        frame.clear();
        let mut messages = 0;
        while let Some(message) = next {
            message.write(&mut frame);
            messages += u64::from(message != Message::Ping);
            // A chunk has a head of at most 40 bytes, and no message is longer than a chunk.
            next = if frame.len() + CHUNK + 40 <= FRAME { outgoing.try_recv().ok() } else { None };
        }
        link.frame(&frame).await?;
        node.note_sent(edge, messages);
    }
}

/// Handles the events of an edge until it ends. Returns the cause; `None` if the thread that sends the events has
/// ended.
async fn deal(node: &Node, edge: usize, mut events: mpsc::Receiver<Event>) -> Option<LossCause> {
    let rank = node.rank;
    while let Some(event) = events.recv().await {
        let frame = match event {
            Event::Frame(frame) => frame,
            Event::Late(Late::Own(time)) => {
                let ms = millis(time);
                tracing::warn!("rank {rank} did not run for {ms} ms; it does not count that time as silence of others");
                continue;
            }
            Event::Late(Late::Neighbour) => {
                let peer = node.neighbour(edge).unwrap_or_default();
                tracing::warn!("rank {peer} is silent because it waits for a CPU: it is not lost");
                continue;
            }
            Event::Ended(cause) => return Some(cause),
        };
        let mut rest = &frame[..];
        while !rest.is_empty() {
            let message = Message::read(&mut rest).ok_or("it sends a message that cannot be decoded");
            if let Err(reason) = message.and_then(|message| node.receive(edge, message)) {
                return Some(LossCause::Failed { reason: reason.to_owned() });
            }
        }
    }
    None
}
