// SPDX-License-Identifier: MIT OR Apache-2.0
//! A rank's knowledge of the job, and its reaction to each message: no sockets and no waiting here.
//!
//! The bytes of a rank for a collective operation go along every edge of the tree but the one they came by, chunk by
//! chunk. So do faults, losses and aborts. Each edge carries each of them once, and no rank has more to do than another
//! of as many neighbours. Messages of one rank arrive in the order in which it sent them.

use super::JOINING;
use super::link::Traffic;
use super::message::{CHUNK, LISTED, Message, Registration, Round};
use super::tree::{Behind, EDGES, PARENT, Place};
use crate::board::Board;
use crate::{BootstrapError, LossCause};
use gin_abi::{Fault, FaultKind, Operation};
use std::collections::{BTreeMap, HashMap, HashSet};
use std::net::IpAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;
use tokio::sync::Notify;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

/// Most bytes that one rank gives to one collective operation.
pub(super) const MAX_BYTES: usize = 1 << 30;

/// Most channels that other ranks may use before this rank knows of them.
const MAX_AHEAD: usize = 1 << 16;

/// A message that a neighbour must not send.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Violation(pub(super) &'static str);

/// The bytes of a rank for a collective operation, as far as they have arrived.
#[derive(Debug, Default)]
struct Given {
    bytes: Vec<u8>,
    whole: bool,
}

#[derive(Debug, Default)]
struct Collective {
    given: BTreeMap<u32, Given>,
    /// How many are whole.
    whole: u32,
}

/// The board of a channel, as far as other ranks are concerned.
#[derive(Debug, Default)]
struct Notices {
    /// From when this rank asks for the channel to when nobody else has the board.
    board: Option<Arc<Board>>,
    /// Notices that came before that.
    early: Vec<(u32, Fault, String)>,
    /// The notices of this rank went to all.
    told: bool,
    /// Nobody meets on the channel any more.
    closed: bool,
}

/// A way to a neighbour.
#[derive(Debug)]
enum Edge {
    /// There is none, or no longer.
    Down,
    /// Not yet: the messages that will be sent then.
    Waiting(UnboundedReceiver<Message>, UnboundedSender<Message>),
    Up(UnboundedSender<Message>),
}

#[derive(Debug)]
struct Gone {
    rank: u32,
    cause: LossCause,
    behind: Behind,
}

#[derive(Debug)]
pub(super) struct State {
    edges: [Edge; EDGES],
    collectives: HashMap<Round, Collective>,
    notices: HashMap<u64, Notices>,
    /// Channels whose collective operations this rank takes no part in any more.
    closed: HashSet<u64>,
    gone: Vec<Gone>,
    aborted: Option<u32>,
    /// Why this rank cannot be in the job.
    failed: Option<BootstrapError>,
    /// The missing ranks, as rank 0 last named them, and the number of all.
    missing: Option<(Vec<u32>, u32)>,
    /// The trouble of this rank, or of one that reported it.
    trouble: String,
    /// At rank 0: the registered ranks.
    registered: BTreeMap<u32, [u8; 16]>,
    /// Number of messages queued along each edge so far.
    queued: Sent,
}

/// A number of messages for each edge.
pub(super) type Sent = [u64; EDGES];

/// One rank.
#[derive(Debug)]
pub(super) struct Node {
    pub(super) rank: u32,
    pub(super) ranks: u32,
    pub(super) instance: [u8; 16],
    pub(super) place: Place,
    /// Name of the host of each rank, once all have joined.
    pub(super) hosts: OnceLock<Vec<String>>,
    /// Where other hosts reach this rank, once it has joined.
    pub(super) ip: OnceLock<IpAddr>,
    state: Mutex<State>,
    /// Notified whenever the state changed in a way that a thread may wait for.
    pub(super) changed: Notify,
    /// Notified when a fault was posted on a board, and when this rank leaves.
    pub(super) posted: Arc<Notify>,
    /// How many messages the system has taken, for each edge.
    sent: [AtomicU64; EDGES],
    /// The traffic of its connections.
    pub(super) traffic: Arc<Traffic>,
    /// Children that are there, to be connected to.
    connects: UnboundedSender<(usize, Registration)>,
}

/// The messages for the neighbour at the other end of an edge.
pub(super) type Outgoing = UnboundedReceiver<Message>;

impl Node {
    /// A rank that knows nobody yet, and the stream of addresses of children to connect to.
    pub(super) fn new(
        rank: u32,
        ranks: u32,
        instance: [u8; 16],
    ) -> (Arc<Self>, UnboundedReceiver<(usize, Registration)>) {
        let place = Place::of(rank, ranks);
        let edge = |there: Option<u32>| {
            there.map_or(Edge::Down, |_| {
                let (to, from) = unbounded_channel();
                Edge::Waiting(from, to)
            })
        };
        let state = State {
            edges: place.neighbours().map(edge),
            collectives: HashMap::new(),
            notices: HashMap::new(),
            closed: HashSet::new(),
            gone: Vec::new(),
            aborted: None,
            failed: None,
            missing: None,
            trouble: String::new(),
            registered: BTreeMap::from([(0, instance)]),
            queued: [0; EDGES],
        };
        let (connects, to_connect) = unbounded_channel();
        let node = Self {
            rank,
            ranks,
            instance,
            place,
            hosts: OnceLock::new(),
            ip: OnceLock::new(),
            state: Mutex::new(state),
            changed: Notify::new(),
            posted: Arc::new(Notify::new()),
            sent: Default::default(),
            traffic: Arc::default(),
            connects,
        };
        (Arc::new(node), to_connect)
    }

    // Held for a few operations and never while waiting.
    pub(super) fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The rank at the other end of an edge.
    pub(super) fn neighbour(&self, edge: usize) -> Option<u32> {
        self.place.neighbours()[edge]
    }

    /// Gives this rank's bytes to a collective operation. A rank that receives them has received this rank's earlier
    /// posts on boards.
    pub(super) fn give(&self, round: Round, bytes: &[u8]) {
        self.tell();
        let mut state = self.state();
        let mut rest = bytes;
        loop {
            let (chunk, after) = rest.split_at(rest.len().min(CHUNK));
            rest = after;
            let last = rest.is_empty();
            state.forward(&Message::Part { round, rank: self.rank, last, bytes: chunk.into() }, None);
            if last {
                break;
            }
        }
        let collective = state.collectives.entry(round).or_default();
        collective.given.insert(self.rank, Given { bytes: bytes.to_vec(), whole: true });
        collective.whole += 1;
        drop(state);
        self.changed.notify_waiters();
    }

    /// Returns the result of a collective operation that this rank gave to, if it has one. The caller then does not ask
    /// again.
    pub(super) fn look(&self, round: Round) -> Option<Result<Vec<Vec<u8>>, BootstrapError>> {
        let mut state = self.state();
        let collective = state.collectives.get(&round)?;
        if collective.whole == self.ranks {
            let collective = state.collectives.remove(&round)?;
            return Some(Ok(collective.given.into_values().map(|given| given.bytes).collect()));
        }
        let error = if let Some(error) = &state.failed {
            Some(error.clone())
        } else if let Some(rank) = state.aborted {
            Some(BootstrapError::Aborted { rank })
        } else if state.gone.is_empty() {
            None
        } else {
            let missing = collective.missing(self.ranks);
            let cut_off = |gone: &&Gone| missing.iter().any(|&rank| gone.behind.contains(rank));
            state.gone.iter().find(cut_off).map(|gone| self.loss(gone.rank, gone.cause.clone()))
        };
        if error.is_some() {
            state.collectives.remove(&round);
        }
        error.map(Err)
    }

    /// The error of a rank that is gone.
    fn loss(&self, rank: u32, cause: LossCause) -> BootstrapError {
        let host = self.hosts.get().and_then(|hosts| hosts.get(rank as usize)).cloned().unwrap_or_default();
        BootstrapError::Lost { rank, host, cause }
    }

    /// The error of this rank, which the others do without.
    pub(super) fn left_out(&self) -> BootstrapError {
        let state = self.state();
        let told = state.gone.iter().find(|gone| gone.rank == self.rank).map(|gone| gone.cause.clone());
        let cause = told.unwrap_or(LossCause::Failed { reason: "the others go on without it".to_owned() });
        self.loss(self.rank, cause)
    }

    /// The error of this rank when its own thread is gone.
    pub(super) fn unserved(&self) -> BootstrapError {
        self.loss(self.rank, LossCause::Failed { reason: "its thread has ended".to_owned() })
    }

    /// Returns the number of messages queued so far.
    pub(super) fn queued(&self) -> Sent {
        self.state().queued
    }

    /// Returns whether the system has taken `queued` messages; messages of an edge that has ended do not count.
    pub(super) fn has_sent(&self, queued: &Sent) -> bool {
        let sent = |edge: usize| self.sent[edge].load(Ordering::Acquire) >= queued[edge];
        (0..EDGES).all(sent) || {
            let state = self.state();
            (0..EDGES).all(|edge| sent(edge) || matches!(state.edges[edge], Edge::Down))
        }
    }

    /// The system has taken this many more.
    pub(super) fn note_sent(&self, edge: usize, messages: u64) {
        self.sent[edge].fetch_add(messages, Ordering::Release);
    }

    /// Gives a collective operation up. Returns the missing ranks.
    pub(super) fn give_up(&self, round: Round, waited: Duration) -> BootstrapError {
        let missing = self.state().collectives.remove(&round).map(|collective| collective.missing(self.ranks));
        timeout(missing.unwrap_or_default(), waited)
    }

    /// Returns the ranks that have not come to a collective operation that goes on.
    pub(super) fn missing(&self, round: Round) -> Vec<u32> {
        self.state().collectives.get(&round).map(|collective| collective.missing(self.ranks)).unwrap_or_default()
    }

    /// The board of a channel, with what was posted on it so far.
    pub(super) fn open(&self, channel: u64) -> Arc<Board> {
        let posted = self.posted.clone();
        let board = Arc::new(Board::watched(self.ranks, move || posted.notify_one()));
        let mut state = self.state();
        state.closed.remove(&channel);
        for gone in state.gone.iter().filter(|gone| gone.cause != LossCause::Left) {
            gone.cause.post(&board, self.rank, gone.rank);
        }
        let notices = state.notices.entry(channel).or_default();
        for (rank, fault, cause) in notices.early.drain(..) {
            board.post_because(rank, fault, &cause);
        }
        notices.told = board.of(self.rank).is_some();
        notices.board = Some(board.clone());
        notices.closed = false;
        board
    }

    /// This rank meets nobody on the channel any more; its board lasts as long as somebody has it.
    pub(super) fn close(&self, channel: u64) {
        let mut state = self.state();
        state.closed.insert(channel);
        state.collectives.retain(|round, _| round.channel != channel);
        if let Some(notices) = state.notices.get_mut(&channel) {
            notices.closed = true;
        }
        drop(state);
        self.posted.notify_one();
    }

    /// Tells all of what this rank has posted on boards since the last time.
    pub(super) fn tell(&self) {
        let mut guard = self.state();
        let state = &mut *guard;
        let mut news = Vec::new();
        state.notices.retain(|&channel, notices| {
            let Some(board) = &notices.board else { return true };
            if let (false, Some(notice)) = (notices.told, board.of(self.rank)) {
                notices.told = true;
                let cause = board.cause(self.rank).unwrap_or_default().to_owned();
                news.push(Message::Fault { channel, rank: self.rank, fault: notice.fault, cause });
            }
            !(notices.closed && Arc::strong_count(board) == 1)
        });
        for message in news {
            state.forward(&message, None);
        }
    }

    /// Ends all collective operations, on all ranks.
    pub(super) fn abort(&self) {
        let mut state = self.state();
        if state.aborted.is_none() {
            state.aborted = Some(self.rank);
            state.forward(&Message::Abort { rank: self.rank }, None);
        }
        drop(state);
        self.changed.notify_waiters();
    }

    /// This rank cannot be in the job.
    pub(super) fn fail(&self, error: BootstrapError) {
        self.state().failed.get_or_insert(error);
        self.changed.notify_waiters();
    }

    /// Why it cannot.
    pub(super) fn failed(&self) -> Option<BootstrapError> {
        self.state().failed.clone()
    }

    /// Tells all that this rank leaves, and sends nothing after that.
    pub(super) fn leave(&self) {
        let mut state = self.state();
        state.forward(&Message::Gone { rank: self.rank, by: self.rank, cause: LossCause::Left }, None);
        for edge in &mut state.edges {
            if matches!(edge, Edge::Up(_)) {
                *edge = Edge::Down;
            }
        }
    }

    /// Gives joining up, as some did not come, and tells all: without this rank the others need not wait either.
    pub(super) fn give_up_joining(&self, waited: Duration) {
        let mut state = self.state();
        let (mut ranks, mut count) = state.missing.clone().unwrap_or_default();
        if count == 0 {
            // All were there when rank 0 was last heard, or it never was.
            ranks =
                state.collectives.get(&JOINING).map(|collective| collective.missing(self.ranks)).unwrap_or_default();
            count = ranks.len() as u32;
        }
        let trouble = state.trouble.clone();
        state.failed.get_or_insert(join_timeout(&ranks, &trouble, waited));
        state.forward(&Message::Missing { ranks, count, trouble }, None);
        drop(state);
        self.changed.notify_waiters();
    }

    /// An edge is open. Returns the messages to send along it; `None` if it was open already.
    pub(super) fn edge_up(&self, edge: usize) -> Option<Outgoing> {
        let mut state = self.state();
        match std::mem::replace(&mut state.edges[edge], Edge::Down) {
            Edge::Waiting(from, to) => {
                state.edges[edge] = Edge::Up(to);
                Some(from)
            }
            other => {
                state.edges[edge] = other;
                None
            }
        }
    }

    /// Returns the ranks that were lost, without those in orderly departure.
    pub(super) fn lost(&self) -> Vec<u32> {
        let state = self.state();
        let lost = state.gone.iter().filter(|gone| gone.cause != LossCause::Left).map(|gone| gone.rank);
        let mut lost: Vec<u32> = lost.collect();
        lost.sort_unstable();
        lost
    }

    /// An edge is no more: unless it was to end, its neighbour is lost.
    pub(super) fn edge_lost(&self, edge: usize, cause: LossCause) -> bool {
        let Some(rank) = self.neighbour(edge) else { return false };
        let mut state = self.state();
        if matches!(state.edges[edge], Edge::Down) {
            return false;
        }
        let news = state.gone(self, rank, &cause);
        if news {
            // To the lost rank too, should it only have been silent.
            state.forward(&Message::Gone { rank, by: self.rank, cause }, None);
        }
        state.edges[edge] = Edge::Down;
        drop(state);
        self.changed.notify_waiters();
        news
    }

    /// A process says that it is a rank of the job.
    ///
    /// # Errors
    /// Why it is not; the answer for it.
    pub(super) fn register(&self, registration: &Registration) -> Result<(), super::message::Answer> {
        use super::message::Answer;
        if self.rank != 0 {
            return Err(Answer::Unexpected);
        }
        if registration.ranks != self.ranks || registration.rank >= self.ranks {
            return Err(Answer::Ranks(self.ranks));
        }
        let mut state = self.state();
        match state.registered.get(&registration.rank) {
            // Its answer got lost.
            Some(instance) if *instance == registration.instance => return Ok(()),
            Some(_) => return Err(Answer::Duplicate),
            None => {}
        }
        state.registered.insert(registration.rank, registration.instance);
        self.route(&mut state, registration.clone());
        Ok(())
    }

    /// At rank 0: the first of the ranks that are not registered, and how many they are.
    pub(super) fn unregistered(&self) -> (Vec<u32>, u32) {
        let state = self.state();
        let missing = (0..self.ranks).filter(|rank| !state.registered.contains_key(rank)).take(LISTED).collect();
        (missing, self.ranks - state.registered.len() as u32)
    }

    /// Passes it on towards the rank's parent, or has it connected to.
    fn route(&self, state: &mut State, registration: Registration) {
        let Some(edge) = self.place.towards(registration.rank) else { return };
        if self.neighbour(edge) == Some(registration.rank) {
            // Nobody listens any more only when this rank leaves.
            let _ = self.connects.send((edge, registration));
        } else {
            state.send(edge, Message::Registered(registration));
        }
    }

    /// Notes the missing ranks that rank 0 named.
    pub(super) fn set_missing(&self, missing: Vec<u32>, count: u32, trouble: &str) {
        let mut state = self.state();
        state.missing = Some((missing, count));
        state.add_trouble(trouble);
    }

    /// Returns the missing ranks that rank 0 named, and the number of all.
    pub(super) fn told_missing(&self) -> Option<(Vec<u32>, u32)> {
        self.state().missing.clone()
    }

    /// Notes that this rank, or another, has trouble. The first trouble is reported.
    pub(super) fn add_trouble(&self, trouble: &str) {
        self.state().add_trouble(trouble);
    }

    /// Returns the first trouble; empty if there is none.
    pub(super) fn trouble(&self) -> String {
        self.state().trouble.clone()
    }

    /// Deals with what came along an edge.
    ///
    /// # Errors
    /// [`Violation`]: the neighbour must not send that.
    pub(super) fn receive(&self, edge: usize, message: Message) -> Result<(), Violation> {
        let mut guard = self.state();
        let state = &mut *guard;
        // A message about a rank comes from the edge of that rank.
        let from = |rank: u32| {
            let there = rank < self.ranks && self.place.towards(rank) == Some(edge);
            if there { Ok(()) } else { Err(Violation("it speaks for a rank that is not behind it")) }
        };
        match message {
            Message::Ping => return Ok(()),
            Message::Part { round, rank, last, ref bytes } => {
                from(rank)?;
                state.take_part(round, rank, last, bytes)?;
                state.forward(&message, Some(edge));
            }
            Message::Fault { channel, rank, fault, ref cause } => {
                from(rank)?;
                state.forward(&message, Some(edge));
                if state.closed.contains(&channel) && !state.notices.contains_key(&channel) {
                    return Ok(());
                }
                if !state.notices.contains_key(&channel) && state.notices.len() >= MAX_AHEAD {
                    return Err(Violation("it uses too many channels"));
                }
                let notices = state.notices.entry(channel).or_default();
                match &notices.board {
                    Some(board) => board.post_because(rank, fault, cause),
                    None if notices.early.iter().any(|(early, ..)| *early == rank) => {}
                    None => notices.early.push((rank, fault, cause.clone())),
                }
            }
            Message::Gone { rank, by, ref cause } => {
                // The rank that noticed is alive. A rank that is here but was silent hears so itself.
                from(by)?;
                if rank >= self.ranks {
                    return Err(Violation("it speaks of a rank that there is not"));
                }
                if state.gone(self, rank, cause) {
                    state.forward(&message, Some(edge));
                }
                if self.neighbour(edge) == Some(rank) {
                    state.edges[edge] = Edge::Down;
                }
            }
            Message::Abort { rank } => {
                from(rank)?;
                if state.aborted.is_none() {
                    state.aborted = Some(rank);
                    state.forward(&message, Some(edge));
                }
            }
            Message::Registered(ref registration) => {
                if edge != PARENT || !self.place.subtree.contains(&registration.rank) || registration.rank == self.rank
                {
                    return Err(Violation("it registers a rank where it does not belong"));
                }
                self.route(state, registration.clone());
            }
            Message::Missing { ref ranks, count, ref trouble } => {
                if state.failed.is_some() {
                    return Ok(());
                }
                state.forward(&message, Some(edge));
                state.missing = Some((ranks.clone(), count));
                state.add_trouble(trouble);
                state.failed.get_or_insert(join_timeout(ranks, trouble, Duration::ZERO));
            }
        }
        // A part that ends no collective operation is no news to a waiting thread.
        let news = match message {
            Message::Part { round, .. } => {
                state.collectives.get(&round).is_some_and(|collective| collective.whole == self.ranks)
            }
            _ => true,
        };
        drop(guard);
        if news {
            self.changed.notify_waiters();
        }
        Ok(())
    }
}

/// How joining ends when the time is over.
fn join_timeout(missing: &[u32], trouble: &str, waited: Duration) -> BootstrapError {
    if missing.is_empty() && !trouble.is_empty() {
        return BootstrapError::Unreachable { reason: trouble.to_owned() };
    }
    timeout(missing.to_vec(), waited)
}

fn timeout(missing: Vec<u32>, waited: Duration) -> BootstrapError {
    BootstrapError::Timeout { missing, waited_ms: u64::try_from(waited.as_millis()).unwrap_or(u64::MAX) }
}

impl LossCause {
    /// Posts on a board of rank `own` that `rank` was lost.
    fn post(&self, board: &Board, own: u32, rank: u32) {
        let limit = if let Self::Silent { ms } = self { *ms } else { 0 };
        let fault = Fault::new(FaultKind::PeerLost, Operation::None).peer(rank).values(limit, self.code());
        board.post_because(own, fault, &self.to_string());
    }
}

impl Collective {
    fn missing(&self, ranks: u32) -> Vec<u32> {
        (0..ranks).filter(|rank| !self.given.get(rank).is_some_and(|given| given.whole)).collect()
    }
}

impl State {
    fn send(&mut self, edge: usize, message: Message) {
        match &self.edges[edge] {
            Edge::Down => {}
            // The other end is gone only when the edge is about to be taken down.
            Edge::Waiting(_, to) | Edge::Up(to) => {
                self.queued[edge] += 1;
                let _ = to.send(message);
            }
        }
    }

    /// Sends it along all edges but one.
    fn forward(&mut self, message: &Message, except: Option<usize>) {
        for edge in (0..EDGES).filter(|&edge| Some(edge) != except) {
            self.send(edge, message.clone());
        }
    }

    fn take_part(&mut self, round: Round, rank: u32, last: bool, bytes: &[u8]) -> Result<(), Violation> {
        if self.closed.contains(&round.channel) {
            return Ok(());
        }
        let collective = self.collectives.entry(round).or_default();
        let given = collective.given.entry(rank).or_default();
        if given.whole {
            return Err(Violation("it gives twice to one collective"));
        }
        if given.bytes.len() + bytes.len() > MAX_BYTES {
            return Err(Violation("it gives more to a collective than it may"));
        }
        given.bytes.extend_from_slice(bytes);
        given.whole = last;
        collective.whole += u32::from(last);
        Ok(())
    }

    /// Notes that a rank is gone; false if that is known.
    fn gone(&mut self, node: &Node, rank: u32, cause: &LossCause) -> bool {
        if self.gone.iter().any(|gone| gone.rank == rank) {
            return false;
        }
        self.gone.push(Gone { rank, cause: cause.clone(), behind: Behind::new(rank, node.rank, node.ranks) });
        if *cause != LossCause::Left {
            for notices in self.notices.values_mut() {
                if let Some(board) = &notices.board {
                    // All ranks hear of the loss as such, so this notice is not sent. Earlier posts are.
                    notices.told |= board.of(node.rank).is_none();
                    cause.post(board, node.rank, rank);
                }
            }
        }
        true
    }

    fn add_trouble(&mut self, trouble: &str) {
        if self.trouble.is_empty() {
            trouble.clone_into(&mut self.trouble);
        }
    }
}
