// SPDX-License-Identifier: MIT OR Apache-2.0
//! The connections of a rank, and the resources that they use.

use super::connection::{Buffers, Connection};
use super::message::Message;
use super::objects::{CompletionQueue, Domain};
use super::region::{Reach, Region};
use super::send_queue::{Ended, Outcome};
use super::status;
use crate::{Event, NetError, NoticeArrival, SignalArrival};
use gin_gpu::MemorySlice;
use gin_verbs::verbs::WorkCompletion;
use std::sync::Arc;

/// Maximum number of completions taken from a queue at a time.
const TAKE: usize = 32;

/// How often one poll asks a queue, so that the proxy returns to its other work.
const ROUNDS: usize = 4;

/// The connections, and the resources that they use. Dropped in this order.
#[derive(Debug)]
pub(super) struct Links {
    /// By context, then by rank.
    pub(super) connections: Vec<Connection>,
    /// Indices of connections that have work.
    pub(super) busy: Vec<usize>,
    /// Connections whose receive queue was seen in error; the cause is in a completion of the send queue.
    pub(super) in_error: Vec<(usize, NetError)>,
    /// Completion queues for sends and receives, by context.
    pub(super) completions: Vec<(CompletionQueue, CompletionQueue)>,
    /// Present if the NIC raises signals.
    pub(super) words: Option<Words>,
    pub(super) buffers: Buffers,
    pub(super) ports: Vec<PortState>,
    pub(super) domains: Vec<Arc<Domain>>,
}

/// Signal words that the NIC raises.
#[derive(Debug)]
pub(super) struct Words {
    /// By port. Before the memory: dropped in this order.
    pub(super) regions: Vec<Region>,
    pub(super) memory: MemorySlice,
}

impl Words {
    pub(super) fn new(domains: &[Arc<Domain>], memory: MemorySlice) -> Result<Self, NetError> {
        // Safety: the result keeps the memory beside the regions, and drops it after them.
        let region = |domain| unsafe { Region::of_slice(domain, &memory, Reach::PeersAdd) };
        let regions = domains.iter().map(region).collect::<Result<_, _>>()?;
        Ok(Self { regions, memory })
    }
}

/// State of a port that this rank uses.
#[derive(Debug, Default)]
pub(super) struct PortState {
    /// The NIC may have written through the port since memory was last made visible.
    pub(super) has_written: bool,
}

impl Links {
    /// Lists a connection as busy.
    pub(super) fn list(&mut self, index: usize) {
        if let Some(connection) = self.connections.get_mut(index)
            && !connection.listed
        {
            connection.listed = true;
            self.busy.push(index);
        }
    }

    /// Takes completions of send requests.
    pub(super) fn sent(&mut self, ended: &mut Ended) -> Result<(), NetError> {
        let mut room = [WorkCompletion::default(); TAKE];
        for (context, (sends, _)) in self.completions.iter().enumerate() {
            for _ in 0..ROUNDS {
                let taken = sends.poll(&mut room)?;
                let port = context % self.ports.len();
                // A completed get has written memory of this rank.
                self.ports[port].has_written |= !taken.is_empty();
                for completion in taken {
                    if let Some(connection) = self.connections.get_mut((completion.wr_id >> 32) as usize) {
                        connection.complete(
                            completion.wr_id as u32,
                            status::outcome(connection.peer, completion),
                            ended,
                        );
                    }
                }
                if taken.len() < TAKE {
                    break;
                }
            }
        }
        Ok(())
    }

    /// Takes messages that have arrived.
    pub(super) fn received(&mut self, events: &mut Vec<Event>) -> Result<(), NetError> {
        let mut room = [WorkCompletion::default(); TAKE];
        for context in 0..self.completions.len() {
            for _ in 0..ROUNDS {
                let taken = self.completions[context].1.poll(&mut room)?;
                let port = context % self.ports.len();
                self.ports[port].has_written |= !taken.is_empty();
                for completion in taken {
                    let index = (completion.wr_id >> 32) as usize;
                    let Some(connection) = self.connections.get_mut(index) else { continue };
                    match status::outcome(connection.peer, completion) {
                        Outcome::Done => {}
                        Outcome::Failed(error) | Outcome::Flushed(error) => {
                            self.in_error.push((index, error));
                            continue;
                        }
                    }
                    let arrived = connection.arrive(completion.wr_id as u32, completion.byte_len, &self.buffers);
                    match arrived {
                        Some(Message::Signal(target, amount)) => {
                            let (context, from) = (connection.context, connection.peer);
                            events.push(Event::Signal(SignalArrival { context, from, target, amount }));
                        }
                        Some(Message::Notice(notice)) => {
                            let (context, from) = (connection.context, connection.peer);
                            events.push(Event::Notice(NoticeArrival { context, from, notice }));
                        }
                        None => {
                            let (context, peer) = ("an invalid message", connection.peer);
                            connection.fail(NetError::Failed { context, peer, status: 0 });
                        }
                    }
                    if connection.is_busy() {
                        self.list(index);
                    }
                }
                if taken.len() < TAKE {
                    break;
                }
            }
        }
        Ok(())
    }
}
