// SPDX-License-Identifier: MIT OR Apache-2.0
//! The connections of a rank, and what they need.

use super::ledger::{Ended, Outcome};
use super::line::{Buffers, Line};
use super::message::Message;
use super::objects::{Completions, Domain};
use super::region::{Reach, Region};
use super::status;
use crate::{Event, NetError, NoticeArrival, SignalArrival};
use gin_gpu::MemorySlice;
use gin_verbs::verbs as ffi;
use std::sync::Arc;

/// Most completions that are taken from a queue at a time.
const TAKE: usize = 32;

/// Times that a queue is asked in one poll, so that the proxy gets to its other work.
const ROUNDS: usize = 4;

/// The connections, and what they need. Dropped in this order.
#[derive(Debug)]
pub(super) struct Links {
    /// By context, then by rank.
    pub(super) lines: Vec<Line>,
    /// Indices of those that have something to do.
    pub(super) busy: Vec<usize>,
    /// Those whose receive queue was seen in error, which does not say why.
    pub(super) in_error: Vec<(usize, NetError)>,
    /// By context.
    pub(super) completions: Vec<(Completions, Completions)>,
    /// There if the NIC raises signals.
    pub(super) words: Option<Words>,
    pub(super) buffers: Buffers,
    pub(super) rails: Vec<Rail>,
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
        // Safety: the memory is kept beside the regions, and dropped after them.
        let region = |domain| unsafe { Region::of_slice(domain, &memory, Reach::PeersAdd) };
        let regions = domains.iter().map(region).collect::<Result<_, _>>()?;
        Ok(Self { regions, memory })
    }
}

/// One of the ports that are used.
#[derive(Debug, Default)]
pub(super) struct Rail {
    /// Something may have been written over it that was not made visible.
    pub(super) has_written: bool,
}

impl Links {
    pub(super) fn list(&mut self, index: usize) {
        if let Some(line) = self.lines.get_mut(index)
            && !line.listed
        {
            line.listed = true;
            self.busy.push(index);
        }
    }

    /// Takes completions of what was posted.
    pub(super) fn sent(&mut self, ended: &mut Ended) -> Result<(), NetError> {
        let mut room = [ffi::WorkCompletion::default(); TAKE];
        for (context, (sends, _)) in self.completions.iter().enumerate() {
            for _ in 0..ROUNDS {
                let taken = sends.poll(&mut room)?;
                let rail = context % self.rails.len();
                // It may be that of a get.
                self.rails[rail].has_written |= !taken.is_empty();
                for completion in taken {
                    if let Some(line) = self.lines.get_mut((completion.wr_id >> 32) as usize) {
                        line.complete(completion.wr_id as u32, status::outcome(line.peer, completion), ended);
                    }
                }
                if taken.len() < TAKE {
                    break;
                }
            }
        }
        Ok(())
    }

    /// Takes signals that have arrived.
    pub(super) fn received(&mut self, events: &mut Vec<Event>) -> Result<(), NetError> {
        let mut room = [ffi::WorkCompletion::default(); TAKE];
        for context in 0..self.completions.len() {
            for _ in 0..ROUNDS {
                let taken = self.completions[context].1.poll(&mut room)?;
                let rail = context % self.rails.len();
                self.rails[rail].has_written |= !taken.is_empty();
                for completion in taken {
                    let index = (completion.wr_id >> 32) as usize;
                    let Some(line) = self.lines.get_mut(index) else { continue };
                    match status::outcome(line.peer, completion) {
                        Outcome::Done => {}
                        Outcome::Failed(error) | Outcome::Flushed(error) => {
                            self.in_error.push((index, error));
                            continue;
                        }
                    }
                    let arrived = line.arrive(completion.wr_id as u32, completion.byte_len, &self.buffers);
                    match arrived {
                        Some(Message::Signal(target, amount)) => {
                            let (context, from) = (line.context, line.peer);
                            events.push(Event::Signal(SignalArrival { context, from, target, amount }));
                        }
                        Some(Message::Notice(notice)) => {
                            let (context, from) = (line.context, line.peer);
                            events.push(Event::Notice(NoticeArrival { context, from, notice }));
                        }
                        None => {
                            let (context, peer) = ("a message that is none", line.peer);
                            line.fail(NetError::Failed { context, peer, status: 0 });
                        }
                    }
                    if line.is_busy() {
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
