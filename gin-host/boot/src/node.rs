// SPDX-License-Identifier: MIT OR Apache-2.0
//! The state of a rank in the job, and its reaction to each message. This module has no sockets and does not wait.
//!
//! A rank that receives a chunk of a collective forwards it along every edge of the tree, except the edge along which
//! it arrived. It forwards faults, losses and aborts in the same way. So each edge carries each of them once, and ranks
//! with as many neighbours have as much work. Messages of one rank arrive in the order in which it sent them.

use crate::board::Board;
use crate::error::CHECK;
use crate::link::Traffic;
use crate::message::{Answer, CHUNK, CollectiveId, LISTED, Message, Registration};
use crate::tcp::JOINING;
use crate::tree::{Behind, EDGES, PARENT, TreePlace};
use crate::{BootstrapError, LossCause, lock, millis};
use gin_abi::{Fault, FaultKind, FaultSubject, Operation};
use std::collections::{BTreeMap, HashMap, HashSet};
use std::net::IpAddr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use std::time::Duration;
use tokio::sync::Notify;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

/// The maximum number of bytes that one rank gives to one collective.
pub(super) const MAX_BYTES: usize = 1 << 30;

/// The maximum number of channels that other ranks may use before this rank opens them.
const MAX_AHEAD: usize = 1 << 16;

/// The reason for which a neighbour must not send a message.
pub(super) type Violation = &'static str;

/// The bytes of a rank for a collective that have arrived.
#[derive(Debug, Default)]
struct Given {
    bytes: Vec<u8>,
    whole: bool,
}

#[derive(Debug, Default)]
struct Collective {
    given: BTreeMap<u32, Given>,
    /// The number of ranks whose bytes are whole.
    whole: u32,
}

/// The board of a channel, and the notices of other ranks.
#[derive(Debug, Default)]
struct Notices {
    /// Present from the time when this rank opens the channel until no other code has the board.
    board: Option<Arc<Board>>,
    /// Notices that arrived before the channel was opened.
    early: Vec<(u32, Fault, String)>,
    /// The notices of this rank were sent to all ranks.
    published: bool,
}

/// The connection to a neighbour.
#[derive(Debug, Default)]
struct Edge {
    /// `None` if there is no neighbour, or the connection has ended.
    to: Option<UnboundedSender<Message>>,
    /// The messages that wait for the connection; `None` after it is open.
    waiting: Option<UnboundedReceiver<Message>>,
}

/// A rank that has left or was lost.
#[derive(Debug)]
struct Gone {
    rank: u32,
    cause: LossCause,
    behind: Behind,
}

/// The state of a rank that messages change.
#[derive(Debug, Default)]
pub(super) struct NodeState {
    edges: [Edge; EDGES],
    collectives: HashMap<CollectiveId, Collective>,
    notices: HashMap<u64, Notices>,
    /// Channels that this rank has dropped: it takes part in none of their collectives.
    closed: HashSet<u64>,
    gone: Vec<Gone>,
    aborted: Option<u32>,
    /// The reason for which this rank cannot be in the job.
    failed: Option<BootstrapError>,
    /// The missing ranks that rank 0 named last, and the number of all.
    missing: (Vec<u32>, u32),
    /// The trouble of this rank, or of one that reported it.
    trouble: String,
    /// At rank 0: the instances of the registered ranks.
    registered: BTreeMap<u32, [u8; 16]>,
    /// The number of messages queued along each edge so far.
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
    pub(super) place: TreePlace,
    /// The name of each rank's host, once all ranks have joined.
    pub(super) hosts: OnceLock<Vec<String>>,
    /// The address at which other hosts reach this rank, once it has joined.
    pub(super) ip: OnceLock<IpAddr>,
    /// All ranks have joined.
    pub(super) joined: AtomicBool,
    /// The owner wants this rank to leave.
    pub(super) leaving: AtomicBool,
    state: Mutex<NodeState>,
    /// Notified when the state changes in a way for which a thread may wait.
    pub(super) changed: Notify,
    /// Notified when a fault is posted on a board, and when this rank leaves.
    pub(super) posted: Arc<Notify>,
    /// The number of messages that the system has taken, for each edge.
    sent: [AtomicU64; EDGES],
    /// The traffic of its connections.
    pub(super) traffic: Arc<Traffic>,
    /// The children that have registered, for the task that connects to them.
    connects: UnboundedSender<(usize, Registration)>,
}

/// The messages for the neighbour at the other end of an edge.
pub(super) type Outgoing = UnboundedReceiver<Message>;

impl Node {
    /// Makes a rank without connections. Also returns the stream of children to connect to.
    pub(super) fn new(
        rank: u32,
        ranks: u32,
        instance: [u8; 16],
    ) -> (Arc<Self>, UnboundedReceiver<(usize, Registration)>) {
        let place = TreePlace::of(rank, ranks);
        let waiting = |_| {
            let (to, waiting) = unbounded_channel();
            Edge { to: Some(to), waiting: Some(waiting) }
        };
        let edges = place.neighbours().map(|neighbour| neighbour.map_or_else(Edge::default, waiting));
        let state = NodeState { edges, registered: [(0, instance)].into(), ..NodeState::default() };
        let (connects, to_connect) = unbounded_channel();
        let node = Self {
            rank,
            ranks,
            instance,
            place,
            hosts: OnceLock::new(),
            ip: OnceLock::new(),
            joined: AtomicBool::new(false),
            leaving: AtomicBool::new(false),
            state: Mutex::new(state),
            changed: Notify::new(),
            posted: Arc::new(Notify::new()),
            sent: Default::default(),
            traffic: Arc::default(),
            connects,
        };
        (Arc::new(node), to_connect)
    }

    // Held for a few operations and never during a wait.
    pub(super) fn state(&self) -> MutexGuard<'_, NodeState> {
        lock(&self.state)
    }

    /// Changes the state and wakes the threads that wait for a change.
    fn change(&self, work: impl FnOnce(&mut NodeState)) {
        work(&mut self.state());
        self.changed.notify_waiters();
    }

    /// Returns the rank at the other end of an edge.
    pub(super) fn neighbour(&self, edge: usize) -> Option<u32> {
        self.place.neighbours()[edge]
    }

    /// Gives this rank's bytes to a collective. A rank that receives them has received this rank's earlier posts on
    /// boards.
    pub(super) fn give(&self, id: CollectiveId, bytes: &[u8]) {
        self.publish();
        self.change(|state| {
            let mut rest = bytes;
            loop {
                let chunk;
                (chunk, rest) = rest.split_at(rest.len().min(CHUNK));
                let last = rest.is_empty();
                state.forward(&Message::Part { id, rank: self.rank, last, bytes: chunk.into() }, None);
                if last {
                    break;
                }
            }
            let collective = state.collectives.entry(id).or_default();
            collective.given.insert(self.rank, Given { bytes: bytes.to_vec(), whole: true });
            collective.whole += 1;
        });
    }

    /// Returns the result of a collective to which this rank gave, if it has one. The caller then does not ask again.
    pub(super) fn result(&self, id: CollectiveId) -> Option<Result<Vec<Vec<u8>>, BootstrapError>> {
        let mut state = self.state();
        let collective = state.collectives.get(&id)?;
        if collective.whole == self.ranks {
            let collective = state.collectives.remove(&id)?;
            return Some(Ok(collective.given.into_values().map(|given| given.bytes).collect()));
        }
        let lost = || {
            // Usually no rank is gone, so the missing ranks need not be listed.
            state.gone.first()?;
            let missing = collective.missing(self.ranks);
            let cut_off = |gone: &&Gone| missing.iter().any(|&rank| gone.behind.contains(rank));
            state.gone.iter().find(cut_off).map(|gone| self.loss(gone.rank, gone.cause.clone()))
        };
        let aborted = || state.aborted.map(|rank| BootstrapError::Aborted { rank });
        let error = state.failed.clone().or_else(aborted).or_else(lost)?;
        state.collectives.remove(&id);
        Some(Err(error))
    }

    /// Returns the error for a rank that is gone.
    pub(super) fn loss(&self, rank: u32, cause: LossCause) -> BootstrapError {
        BootstrapError::Lost { rank, host: self.host(rank), cause }
    }

    /// Returns the name of a rank's host; empty until it is known.
    pub(super) fn host(&self, rank: u32) -> String {
        self.hosts.get().and_then(|hosts| hosts.get(rank as usize)).cloned().unwrap_or_default()
    }

    /// Returns the error of this rank after the others went on without it.
    pub(super) fn left_out(&self) -> BootstrapError {
        let state = self.state();
        let known = state.gone.iter().find(|gone| gone.rank == self.rank).map(|gone| gone.cause.clone());
        let cause = known.unwrap_or(LossCause::Failed { reason: "the others go on without it".to_owned() });
        self.loss(self.rank, cause)
    }

    /// Returns the error of this rank after its thread has ended.
    pub(super) fn unserved(&self) -> BootstrapError {
        self.loss(self.rank, LossCause::Failed { reason: "its thread has ended".to_owned() })
    }

    /// Returns the number of messages queued so far.
    pub(super) fn queued(&self) -> Sent {
        self.state().queued
    }

    /// Returns whether the system has taken `queued` messages. Messages of an edge that has ended do not count.
    pub(super) fn has_sent(&self, queued: &Sent) -> bool {
        let sent = |edge: usize| self.sent[edge].load(Ordering::Acquire) >= queued[edge];
        (0..EDGES).all(sent) || {
            let state = self.state();
            (0..EDGES).all(|edge| sent(edge) || state.edges[edge].to.is_none())
        }
    }

    /// Notes that the system has taken more messages of an edge.
    pub(super) fn note_sent(&self, edge: usize, messages: u64) {
        self.sent[edge].fetch_add(messages, Ordering::Release);
    }

    /// Gives up a collective. Returns an error with the missing ranks.
    pub(super) fn give_up(&self, id: CollectiveId, waited: Duration) -> BootstrapError {
        let mut state = self.state();
        let missing = state.missing(id, self.ranks);
        state.collectives.remove(&id);
        BootstrapError::Timeout { missing, waited_ms: millis(waited) }
    }

    /// Returns the ranks that have not given to a collective that is under way.
    pub(super) fn missing(&self, id: CollectiveId) -> Vec<u32> {
        self.state().missing(id, self.ranks)
    }

    /// Opens a channel. Returns its board, with all posts so far.
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
        notices.published = board.of(self.rank).is_some();
        notices.board = Some(board.clone());
        board
    }

    /// Closes a channel: this rank takes part in none of its collectives any more. The board lives as long as other
    /// code has it.
    pub(super) fn close(&self, channel: u64) {
        let mut state = self.state();
        state.closed.insert(channel);
        state.collectives.retain(|id, _| id.channel != channel);
        drop(state);
        self.posted.notify_one();
    }

    /// Sends all ranks what this rank has posted on boards since the last call.
    pub(super) fn publish(&self) {
        let mut guard = self.state();
        let state = &mut *guard;
        let mut news = Vec::new();
        state.notices.retain(|&channel, notices| {
            let Some(board) = &notices.board else { return true };
            if let (false, Some(notice)) = (notices.published, board.of(self.rank)) {
                notices.published = true;
                let cause = board.cause(self.rank).unwrap_or_default().to_owned();
                news.push(Message::Fault { channel, rank: self.rank, fault: notice.fault.to_words(), cause });
            }
            !(state.closed.contains(&channel) && Arc::strong_count(board) == 1)
        });
        for message in news {
            state.forward(&message, None);
        }
    }

    /// Ends all collectives, on all ranks.
    pub(super) fn abort(&self) {
        self.change(|state| state.abort(self.rank, None));
    }

    /// Notes that this rank cannot be in the job.
    pub(super) fn fail(&self, error: BootstrapError) {
        self.change(|state| {
            state.failed.get_or_insert(error);
        });
    }

    /// Returns the reason for which this rank cannot be in the job.
    pub(super) fn failed(&self) -> Option<BootstrapError> {
        self.state().failed.clone()
    }

    /// Sends all ranks that this rank leaves. Nothing is sent after that.
    pub(super) fn leave(&self) {
        let mut state = self.state();
        state.forward(&Message::Gone { rank: self.rank, by: self.rank, cause: LossCause::Left }, None);
        for edge in state.edges.iter_mut().filter(|edge| edge.waiting.is_none()) {
            edge.to = None;
        }
    }

    /// Gives up joining because some ranks are missing, and sends that to all ranks: without this rank they need not
    /// wait either.
    pub(super) fn give_up_joining(&self, waited: Duration) {
        self.change(|state| {
            let (mut ranks, mut count) = state.missing.clone();
            if count == 0 {
                // Rank 0 missed no rank in its last report, or has never reported.
                ranks = state.missing(JOINING, self.ranks);
                count = ranks.len() as u32;
            }
            let trouble = state.trouble.clone();
            state.failed.get_or_insert(join_timeout(&ranks, &trouble, waited));
            state.forward(&Message::Missing { ranks, count, trouble }, None);
        });
    }

    /// Notes that an edge is open. Returns the messages to send along it; `None` if it was open already.
    pub(super) fn edge_up(&self, edge: usize) -> Option<Outgoing> {
        self.state().edges[edge].waiting.take()
    }

    /// Returns the ranks that were lost, in order, without the ranks that left in an orderly way.
    pub(super) fn lost(&self) -> Vec<u32> {
        let state = self.state();
        let lost = state.gone.iter().filter(|gone| gone.cause != LossCause::Left).map(|gone| gone.rank);
        let mut lost: Vec<u32> = lost.collect();
        lost.sort_unstable();
        lost
    }

    /// Notes that an edge has ended. Unless its end was expected, its neighbour is lost. Returns whether that is a new
    /// loss.
    pub(super) fn edge_lost(&self, edge: usize, cause: LossCause) -> bool {
        let Some(rank) = self.neighbour(edge) else { return false };
        let mut state = self.state();
        if state.edges[edge].to.is_none() {
            return false;
        }
        let news = state.gone(self, rank, &cause);
        if news {
            // Also to the lost rank, which may only have been silent.
            state.forward(&Message::Gone { rank, by: self.rank, cause }, None);
        }
        state.edges[edge] = Edge::default();
        drop(state);
        self.changed.notify_waiters();
        news
    }

    /// Registers a process as a rank of the job.
    ///
    /// # Errors
    /// The answer with the reason for the refusal.
    pub(super) fn register(&self, registration: &Registration) -> Result<(), Answer> {
        if self.rank != 0 {
            return Err(Answer::Unexpected);
        }
        if registration.ranks != self.ranks || registration.rank >= self.ranks {
            return Err(Answer::Ranks(self.ranks));
        }
        let mut state = self.state();
        match state.registered.get(&registration.rank) {
            // The process registers again because its answer was lost.
            Some(instance) if *instance == registration.instance => return Ok(()),
            Some(_) => return Err(Answer::Duplicate),
            None => {}
        }
        state.registered.insert(registration.rank, registration.instance);
        self.route(&mut state, registration.clone());
        Ok(())
    }

    /// Returns, at rank 0, the first ranks that have not registered, and the number of all that have not.
    pub(super) fn unregistered(&self) -> (Vec<u32>, u32) {
        let state = self.state();
        let missing = (0..self.ranks).filter(|rank| !state.registered.contains_key(rank)).take(LISTED).collect();
        (missing, self.ranks - state.registered.len() as u32)
    }

    /// Sends a registration towards the rank's parent, or passes it to the task that connects to the rank.
    fn route(&self, state: &mut NodeState, registration: Registration) {
        let Some(edge) = self.place.towards(registration.rank) else { return };
        if self.neighbour(edge) == Some(registration.rank) {
            // The task has ended only if this rank leaves.
            let _ = self.connects.send((edge, registration));
        } else {
            state.send(edge, Message::Registered(registration));
        }
    }

    /// Notes the missing ranks that rank 0 named.
    pub(super) fn set_missing(&self, missing: Vec<u32>, count: u32, trouble: &str) {
        let mut state = self.state();
        state.missing = (missing, count);
        state.add_trouble(trouble);
    }

    /// Returns the missing ranks that rank 0 named last, and the number of all.
    pub(super) fn reported_missing(&self) -> (Vec<u32>, u32) {
        self.state().missing.clone()
    }

    /// Notes a trouble of this rank or of another one. Only the first is kept.
    pub(super) fn add_trouble(&self, trouble: &str) {
        self.state().add_trouble(trouble);
    }

    /// Returns the first trouble; empty if there is none.
    pub(super) fn trouble(&self) -> String {
        self.state().trouble.clone()
    }

    /// Handles a message that arrived along an edge.
    ///
    /// # Errors
    /// [`Violation`]: the neighbour must not send this message.
    pub(super) fn receive(&self, edge: usize, message: Message) -> Result<(), Violation> {
        let mut guard = self.state();
        let state = &mut *guard;
        // A message about a rank arrives along the edge that leads to that rank.
        let from = |rank: u32| {
            let there = rank < self.ranks && self.place.towards(rank) == Some(edge);
            there.then_some(()).ok_or("it speaks for a rank that is not behind it")
        };
        match message {
            Message::Ping => return Ok(()),
            Message::Part { id, rank, last, ref bytes } => {
                from(rank)?;
                state.take_part(id, rank, last, bytes)?;
                state.forward(&message, Some(edge));
            }
            Message::Fault { channel, rank, fault, ref cause } => {
                from(rank)?;
                let fault = Fault::read(fault);
                state.forward(&message, Some(edge));
                if state.closed.contains(&channel) && !state.notices.contains_key(&channel) {
                    return Ok(());
                }
                if !state.notices.contains_key(&channel) && state.notices.len() >= MAX_AHEAD {
                    return Err("it uses too many channels");
                }
                let notices = state.notices.entry(channel).or_default();
                match &notices.board {
                    Some(board) => board.post_because(rank, fault, cause),
                    None if notices.early.iter().any(|(early, ..)| *early == rank) => {}
                    None => notices.early.push((rank, fault, cause.clone())),
                }
            }
            Message::Gone { rank, by, ref cause } => {
                // The rank that noticed is alive. A rank that only was silent receives the news of its own loss in this
                // way.
                from(by)?;
                if rank >= self.ranks {
                    return Err("it speaks of a rank that the job does not have");
                }
                if state.gone(self, rank, cause) {
                    state.forward(&message, Some(edge));
                }
                if self.neighbour(edge) == Some(rank) {
                    state.edges[edge] = Edge::default();
                }
            }
            Message::Abort { rank } => {
                from(rank)?;
                state.abort(rank, Some(edge));
            }
            Message::Registered(ref registration) => {
                if edge != PARENT || !self.place.subtree.contains(&registration.rank) || registration.rank == self.rank
                {
                    return Err("it registers a rank that is not below this rank");
                }
                self.route(state, registration.clone());
            }
            Message::Missing { ref ranks, count, ref trouble } => {
                if state.failed.is_some() {
                    return Ok(());
                }
                state.forward(&message, Some(edge));
                state.missing = (ranks.clone(), count);
                state.add_trouble(trouble);
                state.failed.get_or_insert(join_timeout(ranks, trouble, Duration::ZERO));
            }
        }
        // A chunk that completes no collective does not concern a waiting thread.
        let whole = |id| state.collectives.get(id).is_some_and(|collective| collective.whole == self.ranks);
        let news = !matches!(&message, Message::Part { id, .. } if !whole(id));
        drop(guard);
        if news {
            self.changed.notify_waiters();
        }
        Ok(())
    }
}

/// Returns the error with which joining ends at the deadline.
fn join_timeout(missing: &[u32], trouble: &str, waited: Duration) -> BootstrapError {
    if missing.is_empty() && !trouble.is_empty() {
        return BootstrapError::Unreachable { reason: format!("{trouble}; {CHECK}") };
    }
    BootstrapError::Timeout { missing: missing.to_vec(), waited_ms: millis(waited) }
}

impl LossCause {
    /// Posts on a board of rank `own` that `rank` was lost.
    fn post(&self, board: &Board, own: u32, rank: u32) {
        let limit = if let Self::Silent { ms } = self { *ms } else { 0 };
        let fault = Fault::new(FaultKind::PeerLost, Operation::None).with_peer(rank);
        let fault = fault.with_values(FaultSubject::None, limit, self.code());
        board.post_because(own, fault, &self.to_string());
    }
}

impl Collective {
    fn missing(&self, ranks: u32) -> Vec<u32> {
        (0..ranks).filter(|rank| !self.given.get(rank).is_some_and(|given| given.whole)).collect()
    }
}

impl NodeState {
    fn send(&mut self, edge: usize, message: Message) {
        if let Some(to) = &self.edges[edge].to {
            self.queued[edge] += 1;
            // The other end is gone only shortly before the edge is taken down.
            let _ = to.send(message);
        }
    }

    /// Sends a message along all edges but one.
    fn forward(&mut self, message: &Message, except: Option<usize>) {
        for edge in (0..EDGES).filter(|&edge| Some(edge) != except) {
            self.send(edge, message.clone());
        }
    }

    /// Ends all collectives because of `rank`, unless they have ended. Sends that along all edges but one.
    fn abort(&mut self, rank: u32, except: Option<usize>) {
        if self.aborted.is_none() {
            self.aborted = Some(rank);
            self.forward(&Message::Abort { rank }, except);
        }
    }

    /// Returns the ranks whose bytes a collective lacks; none for an unknown collective.
    fn missing(&self, id: CollectiveId, ranks: u32) -> Vec<u32> {
        self.collectives.get(&id).map(|collective| collective.missing(ranks)).unwrap_or_default()
    }

    /// Adds a chunk of a rank's bytes.
    fn take_part(&mut self, id: CollectiveId, rank: u32, last: bool, bytes: &[u8]) -> Result<(), Violation> {
        if self.closed.contains(&id.channel) {
            return Ok(());
        }
        let collective = self.collectives.entry(id).or_default();
        let given = collective.given.entry(rank).or_default();
        if given.whole {
            return Err("it gives twice to one collective");
        }
        if given.bytes.len() + bytes.len() > MAX_BYTES {
            return Err("it gives more to a collective than it may");
        }
        given.bytes.extend_from_slice(bytes);
        given.whole = last;
        collective.whole += u32::from(last);
        Ok(())
    }

    /// Notes that a rank is gone. Returns false if that is known already.
    fn gone(&mut self, node: &Node, rank: u32, cause: &LossCause) -> bool {
        if self.gone.iter().any(|gone| gone.rank == rank) {
            return false;
        }
        self.gone.push(Gone { rank, cause: cause.clone(), behind: Behind::new(rank, node.rank, node.ranks) });
        if *cause != LossCause::Left {
            for notices in self.notices.values_mut() {
                if let Some(board) = &notices.board {
                    // All ranks receive the loss itself, so this notice is not sent. Earlier posts of this rank are
                    // sent.
                    notices.published |= board.of(node.rank).is_none();
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
