// SPDX-License-Identifier: MIT OR Apache-2.0
//! The connections of a rank, and the resources that they use.

use super::connection::{Connection, Tools};
use super::objects::{CompletionQueue, Domain};
use super::region::Region;
use super::send_queue::Outcome;
use super::status;
use crate::message::Message;
use crate::{Event, NetError, NoticeArrival, SignalArrival};
use gin_gpu::MemorySlice;
use gin_verbs::Access;
use std::sync::Arc;

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
    pub(super) tools: Tools,
    /// By port: the NIC may have written through the port since memory was last made visible.
    pub(super) has_written: Vec<bool>,
    pub(super) domains: Vec<Arc<Domain>>,
    /// Number of ports, by rank; empty until connected.
    pub(super) peer_ports: Vec<usize>,
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
        let region = |domain| unsafe { Region::of_slice(domain, &memory, Access::SIGNALS) };
        let regions = domains.iter().map(region).collect::<Result<_, _>>()?;
        Ok(Self { regions, memory })
    }
}

impl Links {
    /// Takes completions of send requests.
    pub(super) fn sent(&mut self) -> Result<(), NetError> {
        let ports = self.has_written.len();
        for (context, (sends, _)) in self.completions.iter().enumerate() {
            sends.take(|completion| {
                // A completed get has written memory of this rank.
                self.has_written[context % ports] = true;
                if let Some(connection) = self.connections.get_mut((completion.wr_id >> 32) as usize) {
                    let outcome = status::outcome(connection.peer, completion);
                    connection.send_queue.complete(completion.wr_id as u32, outcome, &mut self.tools.ended);
                }
            })?;
        }
        Ok(())
    }

    /// Takes messages that have arrived.
    pub(super) fn received(&mut self, events: &mut Vec<Event>) -> Result<(), NetError> {
        let ports = self.has_written.len();
        for (context, (_, receives)) in self.completions.iter().enumerate() {
            receives.take(|completion| {
                self.has_written[context % ports] = true;
                let index = (completion.wr_id >> 32) as usize;
                let Some(connection) = self.connections.get_mut(index) else { return };
                let (context, from) = (connection.context, connection.peer);
                if let Outcome::Failed(error) | Outcome::Flushed(error) = status::outcome(from, completion) {
                    self.in_error.push((index, error));
                    return;
                }
                let buffers = &self.tools.buffers;
                match connection.arrive(completion.wr_id as u32, completion.byte_len, buffers) {
                    Some(Message::Signal(target, amount)) => {
                        events.push(Event::Signal(SignalArrival { context, from, target, amount }));
                    }
                    Some(Message::Notice(notice)) => {
                        events.push(Event::Notice(NoticeArrival { context, from, notice }));
                    }
                    None => {
                        let context = "an invalid message";
                        connection.fail(NetError::Failed { context, peer: from, status: 0 });
                    }
                }
                if connection.is_busy() {
                    connection.list(&mut self.busy);
                }
            })?;
        }
        Ok(())
    }

    /// Lets busy connections post.
    pub(super) fn work(&mut self) {
        self.busy.retain(|&index| {
            let Some(connection) = self.connections.get_mut(index) else { return false };
            connection.work(&mut self.tools);
            connection.listed = connection.is_busy();
            connection.listed
        });
    }
}
