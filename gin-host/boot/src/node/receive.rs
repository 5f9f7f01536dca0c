// SPDX-License-Identifier: MIT OR Apache-2.0
//! The reaction of a rank to each message.

use super::joining::join_timeout;
use super::{Edge, Node};
use crate::collective::Collective;
use crate::message::{Message, Violation};
use crate::tree::PARENT;
use gin_abi::Fault;
use std::time::Duration;

/// The maximum number of channels that other ranks may use before this rank opens them.
const MAX_AHEAD: usize = 1 << 16;

impl Node {
    /// Handles a message that arrived along an edge.
    ///
    /// # Errors
    /// [`Violation`]: the neighbour must not send this message.
    pub(crate) fn receive(&self, edge: usize, message: Message) -> Result<(), Violation> {
        let mut guard = self.state();
        let state = &mut *guard;
        // A message about a rank arrives along the edge that leads to that rank.
        let from = |rank: u32| {
            let there = rank < self.ranks && self.place.towards(rank) == Some(edge);
            there.then_some(()).ok_or("it speaks for a rank that is not behind it")
        };
        match message {
            Message::Ping => return Ok(()),
            Message::Up { id, last, ref bytes } => {
                if edge == PARENT {
                    return Err("it gives the bytes of ranks that are not below this rank");
                }
                if state.takes(id) {
                    let next = state.collectives.entry(id).or_default().take_up(edge, last, bytes, &self.place)?;
                    state.carry_out(id, next);
                }
            }
            Message::Down { id, last, ref bytes } => {
                if edge != PARENT {
                    return Err("it gives the bytes of all ranks, and is not above this rank");
                }
                state.forward(&message, Some(PARENT));
                // Without an entry this rank's call has ended with an error.
                if let Some(collective) = state.collectives.get_mut(&id) {
                    collective.take_down(last, bytes, self.ranks)?;
                    if last && collective.abandoned {
                        state.collectives.remove(&id);
                    }
                }
            }
            Message::Waits { id, rank } => {
                from(rank)?;
                if state.takes(id) {
                    state.collectives.entry(id).or_default().waiting.insert(rank);
                }
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
            Message::Gone { rank, by, ref cause, ref given } => {
                // The rank that noticed is alive. A rank that only was silent receives the news of its own loss in this
                // way.
                from(by)?;
                if rank >= self.ranks {
                    return Err("it speaks of a rank that the job does not have");
                }
                if state.gone(self, rank, cause, given) {
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
        // Bytes that complete no collective do not concern a waiting thread.
        let news = match message {
            Message::Up { id, .. } | Message::Down { id, .. } => {
                state.collectives.get(&id).is_some_and(Collective::is_whole)
            }
            Message::Waits { .. } => false,
            _ => true,
        };
        drop(guard);
        if news {
            self.changed.notify_waiters();
        }
        Ok(())
    }
}
