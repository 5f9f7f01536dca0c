// SPDX-License-Identifier: MIT OR Apache-2.0
//! The state of a rank in the job, and its reaction to each message. This module has no sockets and does not wait.
//!
//! A rank forwards faults, losses and aborts along every edge of the tree, except the edge along which they arrived. So
//! each edge carries each of them once. Bytes of [collectives](crate::collective) go up the tree and come down again.
//! Messages of one rank arrive in the order in which it sent them.
//!
//! # Losses during a collective
//!
//! A collective at rank x fails because of a lost rank g in two cases. If x reaches rank 0 only through g, x does not
//! receive the bytes of all any more. Otherwise the collective fails unless the subtree of g had given its bytes: only
//! the rank that noticed the loss knows that, and the news of the loss lists these collectives. News and bytes have one
//! order on each edge. So when the news arrive at x, x already has the bytes of every collective that completed before.

mod joining;
#[cfg(test)]
mod loss_tests;
mod receive;

use crate::board::Board;
use crate::collective::{Collective, Gathered, Next, chunks};
use crate::door::Door;
use crate::link::Traffic;
use crate::message::{CollectiveId, LISTED, Message, Registration};
use crate::tree::{EDGES, PARENT, TreePlace};
use crate::{BootstrapError, LossCause, lock, millis};
use gin_abi::{Fault, FaultKind, FaultSubject, Operation};
use std::collections::{BTreeMap, HashMap, HashSet};
use std::net::IpAddr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use std::time::Duration;
use tokio::sync::Notify;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

/// The collective that ends when all ranks have joined.
pub(crate) const JOINING: CollectiveId = CollectiveId { channel: u64::MAX, number: 0 };

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
    /// This rank reaches rank 0 only through that rank, or is that rank.
    above: bool,
    /// The collectives under way for which the subtree of that rank had given its bytes.
    given: Vec<CollectiveId>,
}

impl Gone {
    /// Returns whether a collective that is not complete cannot be completed without that rank.
    fn ends(&self, id: CollectiveId) -> bool {
        self.above || !self.given.contains(&id)
    }
}

/// The state of a rank that messages change.
#[derive(Debug, Default)]
pub(super) struct NodeState {
    edges: [Edge; EDGES],
    collectives: HashMap<CollectiveId, Collective>,
    /// By channel: the number after the last collective to which this rank gave.
    given: HashMap<u64, u64>,
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
    /// The door of this process, once all ranks have joined.
    pub(super) door: OnceLock<Arc<Door>>,
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
            door: OnceLock::new(),
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
            state.given.insert(id.channel, id.number.saturating_add(1));
            let next = state.collectives.entry(id).or_default().give(bytes, &self.place);
            state.carry_out(id, next);
        });
    }

    /// Tells the other ranks, once, that this rank has given to a collective and waits: so they do not count this rank
    /// among the missing ranks.
    pub(super) fn announce(&self, id: CollectiveId) {
        let mut state = self.state();
        let Some(collective) = state.collectives.get_mut(&id) else { return };
        if collective.has_given() && !collective.is_whole() && !std::mem::replace(&mut collective.announced, true) {
            state.forward(&Message::Waits { id, rank: self.rank }, None);
        }
    }

    /// Returns the result of a collective to which this rank gave, if it has one. The caller then does not ask again.
    pub(super) fn result(&self, id: CollectiveId) -> Option<Result<Gathered, BootstrapError>> {
        let mut state = self.state();
        if state.collectives.get(&id)?.is_whole() {
            return Some(Ok(state.collectives.remove(&id)?.into_gathered(self.ranks)));
        }
        let lost = || {
            let gone = state.gone.iter().find(|gone| gone.ends(id))?;
            Some(self.loss(gone.rank, gone.cause.clone()))
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
        let missing = state.missing(id, self);
        // Other ranks may still need this rank as a relay.
        if let Some(collective) = state.collectives.get_mut(&id) {
            collective.abandoned = true;
        }
        BootstrapError::Timeout { missing, waited_ms: millis(waited) }
    }

    /// Returns the ranks that have not given to a collective that is under way.
    pub(super) fn missing(&self, id: CollectiveId) -> Vec<u32> {
        self.state().missing(id, self)
    }

    /// Opens a channel. Returns its board, with all posts so far.
    pub(super) fn open(&self, channel: u64) -> Arc<Board> {
        let posted = self.posted.clone();
        let board = Arc::new(Board::watched(self.ranks, move || posted.notify_one()));
        let mut state = self.state();
        state.closed.remove(&channel);
        state.given.remove(&channel);
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
        // Other ranks may still need this rank as a relay of a collective to which it gave.
        state.collectives.retain(|id, collective| id.channel != channel || collective.has_given());
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
        let given = state.given(Collective::waits_for_others);
        state.forward(&Message::Gone { rank: self.rank, by: self.rank, cause: LossCause::Left, given }, None);
        for edge in state.edges.iter_mut().filter(|edge| edge.waiting.is_none()) {
            edge.to = None;
        }
    }

    /// Notes that an edge is open. Returns the messages to send along it; `None` if it was open already.
    pub(super) fn edge_up(&self, edge: usize) -> Option<Outgoing> {
        self.state().edges[edge].waiting.take()
    }

    /// Returns the ranks that have left or were lost.
    pub(super) fn gone(&self) -> Vec<u32> {
        self.state().gone.iter().map(|gone| gone.rank).collect()
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
        let given = state.given(|collective| collective.has_subtree(edge));
        let news = state.gone(self, rank, &cause, &given);
        if news {
            // Also to the lost rank, which may only have been silent.
            state.forward(&Message::Gone { rank, by: self.rank, cause, given }, None);
        }
        state.edges[edge] = Edge::default();
        drop(state);
        self.changed.notify_waiters();
        news
    }
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
    fn missing(&self, id: CollectiveId, node: &Node) -> Vec<u32> {
        let missing = |collective: &Collective| collective.missing(&node.place, node.ranks);
        self.collectives.get(&id).map(missing).unwrap_or_default()
    }

    /// Returns whether messages of a collective concern this rank: it relays the collective already, or may still give
    /// its bytes.
    fn takes(&self, id: CollectiveId) -> bool {
        let ahead = self.given.get(&id.channel).is_none_or(|&next| id.number >= next);
        self.collectives.contains_key(&id) || ahead && !self.closed.contains(&id.channel)
    }

    /// Takes the step after the subtree of this rank has given its bytes to a collective.
    fn carry_out(&mut self, id: CollectiveId, next: Option<Next>) {
        match next {
            None => {}
            Some(Next::Up(stream)) => {
                for (last, bytes) in chunks(&stream) {
                    self.send(PARENT, Message::Up { id, last, bytes });
                }
            }
            Some(Next::Down(stream)) => {
                for (last, bytes) in chunks(&stream) {
                    self.forward(&Message::Down { id, last, bytes }, Some(PARENT));
                }
                if self.collectives.get(&id).is_some_and(|collective| collective.abandoned) {
                    self.collectives.remove(&id);
                }
            }
        }
    }

    /// Returns the collectives with this property, as a message may list them.
    fn given(&self, has: impl Fn(&Collective) -> bool) -> Vec<CollectiveId> {
        self.collectives.iter().filter(|(_, collective)| has(collective)).map(|(&id, _)| id).take(LISTED).collect()
    }

    /// Notes that a rank is gone. Returns false if that is known already.
    fn gone(&mut self, node: &Node, rank: u32, cause: &LossCause, given: &[CollectiveId]) -> bool {
        if self.gone.iter().any(|gone| gone.rank == rank) {
            return false;
        }
        let above = TreePlace::of(rank, node.ranks).subtree.contains(&node.rank);
        self.gone.push(Gone { rank, cause: cause.clone(), above, given: given.to_vec() });
        if *cause != LossCause::Left {
            for notices in self.notices.values_mut() {
                if let Some(board) = notices.board.as_ref().filter(|board| !board.survives_loss()) {
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
