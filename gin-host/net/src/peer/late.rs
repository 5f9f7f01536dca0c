// SPDX-License-Identifier: MIT OR Apache-2.0
//! Requests whose bytes a device's copier moves, or kernels of the receiver.
//!
//! Copies start when requests are posted. The rest of a request follows when its copy has ended and all requests before
//! it to the same peer are complete.
//!
//! A value that follows no copy goes to the receiver's mailbox, if that is open, together with its signal. The request
//! is complete once a kernel has taken the entry. If the mailbox closes before, the copier moves the value.

use super::{PeerNetwork, Plan, Work};
use crate::{NetError, Request};
use gin_gpu::GpuError;
use gin_gpu::copier::{Copier, Ticket};
use std::collections::VecDeque;

/// The maximum number of incomplete requests.
const MAX: usize = 1024;

/// Incomplete requests by peer, and the copier.
#[derive(Debug)]
pub(super) struct Later {
    copier: Box<dyn Copier>,
    peers: Vec<Peer>,
    /// The number of requests.
    count: usize,
}

/// The incomplete requests to one peer.
#[derive(Debug, Default)]
struct Peer {
    /// In the order of posting.
    requests: VecDeque<Late>,
    /// The number of those whose work is not a kernel's.
    others: usize,
}

impl Later {
    pub(super) fn new(copier: Box<dyn Copier>) -> Self {
        Self { copier, peers: Vec::new(), count: 0 }
    }

    /// Returns whether there is no room for another request.
    pub(super) fn is_full(&self) -> bool {
        self.count >= MAX
    }
}

/// An incomplete request.
#[derive(Debug)]
struct Late {
    id: u64,
    context: u32,
    strong: bool,
    /// The request, and the engine that does its work.
    started: Result<(Plan, Engine), NetError>,
}

impl Late {
    /// Returns the index of its entry in the mailbox, if it has one.
    fn entry(&self) -> Option<u64> {
        match self.started {
            Ok((_, Engine::Kernel(entry))) => Some(entry),
            _ => None,
        }
    }
}

/// The engine that does the work of a request.
#[derive(Debug)]
enum Engine {
    /// The CPU, once all requests before it are complete.
    Cpu,
    /// The copier, by a copy with this ticket.
    Copier(Ticket),
    /// A kernel of the receiver, by an entry of its mailbox with this index.
    Kernel(u64),
}

impl Engine {
    /// Starts the copy of a request, unless the CPU reaches both sides.
    fn start(plan: &Plan, copier: &mut dyn Copier) -> Result<Self, GpuError> {
        // Safety of both: the ranges were checked, and the plan keeps the regions and their memory alive.
        let ticket = match &plan.work {
            Work::Copy { bytes: 0, .. } | Work::Nothing => return Ok(Self::Cpu),
            Work::Copy { to, from, bytes } if to.is_device() || from.is_device() => unsafe {
                copier.copy(to.place(), from.place(), *bytes)
            },
            Work::Store { to, value, width_log2, .. } if to.is_device() => unsafe {
                copier.store(to.place(), *value, 1 << *width_log2)
            },
            Work::Copy { .. } | Work::Store { .. } => return Ok(Self::Cpu),
        };
        ticket.map(Self::Copier)
    }
}

impl PeerNetwork {
    /// Posts a request to the receiver's mailbox, if a kernel there may do it now. Returns the entry's index.
    fn hand_over(&self, request: &Request, plan: &Plan) -> Option<u64> {
        let before = self.later.as_ref()?.peers.get(request.peer as usize);
        let (behind, others) = before.map_or((false, 0), |peer| (!peer.requests.is_empty(), peer.others));
        let wanted = match &plan.work {
            Work::Store { to, .. } => to.is_device(),
            // The CPU raises a signal by itself, unless that must follow an entry.
            Work::Nothing => behind,
            Work::Copy { .. } => false,
        };
        let broken = request.is_strong() && self.broken.contains(&(request.context, request.peer));
        if !self.mailbox || !wanted || others != 0 || broken {
            return None;
        }
        let (mailbox, entry) = (self.mailbox(request.peer)?, self.entry(request, plan)?);
        let index = mailbox.post(&entry);
        if index.is_none() {
            mailbox.want();
        }
        index
    }

    /// Starts a request.
    pub(super) fn begin(&mut self, request: &Request) {
        let plan = self.resolve(request).map(|plan| (self.hand_over(request, &plan), plan));
        let Some(later) = &mut self.later else { return };
        let started = plan.and_then(|(entry, plan)| {
            let engine = match entry {
                Some(entry) => Ok(Engine::Kernel(entry)),
                None => Engine::start(&plan, &mut *later.copier),
            };
            Ok((plan, engine.map_err(|error| lost(request.peer, &error))?))
        });
        let late = Late { id: request.id, context: request.context, strong: request.is_strong(), started };
        let peer = request.peer as usize;
        if later.peers.len() <= peer {
            later.peers.resize_with(peer + 1, Peer::default);
        }
        later.peers[peer].others += usize::from(late.entry().is_none());
        later.peers[peer].requests.push_back(late);
        later.count += 1;
    }

    /// Completes the requests whose work is done.
    pub(super) fn follow(&mut self) {
        let peers = self.later.as_ref().filter(|later| later.count > 0).map_or(0, |later| later.peers.len());
        for peer in 0..peers {
            while self.follow_peer(peer as u32) {}
        }
    }

    /// Completes the oldest request to `peer` if its work is done. Returns whether it did.
    fn follow_peer(&mut self, peer: u32) -> bool {
        let mailbox = self.mailbox(peer);
        let Some(later) = &mut self.later else { return false };
        let Peer { requests, others } = &mut later.peers[peer as usize];
        let Some(oldest) = requests.front() else { return false };
        let done = match (&oldest.started, mailbox) {
            (Ok((_, Engine::Copier(ticket))), _) => later.copier.is_done(*ticket),
            (Ok((_, Engine::Kernel(entry))), Some(mailbox)) => {
                let (taken, open) = mailbox.is_taken(*entry);
                if !taken && !open {
                    let taken = mailbox.take_back(requests.iter().filter_map(Late::entry)).unwrap_or(u64::MAX);
                    for late in requests.iter_mut().filter(|late| late.entry().is_some_and(|entry| entry >= taken)) {
                        late.again(peer, &mut *later.copier);
                        *others += 1;
                    }
                }
                Ok(taken)
            }
            _ => Ok(true),
        };
        if done == Ok(false) {
            return false;
        }
        let Some(late) = requests.pop_front() else { return false };
        *others -= usize::from(late.entry().is_none());
        later.count -= 1;
        let Late { id, context, strong, started } = late;
        let order = (context, peer);
        let outcome = match (started, done) {
            (Err(error), _) => Err(error),
            (_, Err(error)) => Err(lost(peer, &error)),
            (Ok((_, Engine::Kernel(_))), _) => Ok(()),
            (Ok(_), _) if strong && self.broken.contains(&order) => Err(NetError::behind(peer)),
            (Ok((plan, engine)), _) => {
                // Releases the regions before the completion is reported, so that a caller that then closes one finds
                // it without users.
                match engine {
                    Engine::Cpu => plan.carry_out(),
                    _ => plan.raise(),
                }
                Ok(())
            }
        };
        self.complete(id, order, outcome);
        true
    }
}

impl Late {
    /// Starts again the work of a request whose entry was taken back.
    fn again(&mut self, peer: u32, copier: &mut dyn Copier) {
        if let Ok((plan, engine)) = &mut self.started {
            match Engine::start(plan, copier) {
                Ok(other) => *engine = other,
                Err(error) => self.started = Err(lost(peer, &error)),
            }
        }
    }
}

fn lost(peer: u32, error: &GpuError) -> NetError {
    NetError::PeerLost { peer, reason: error.to_string() }
}
