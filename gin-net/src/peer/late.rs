// SPDX-License-Identifier: MIT OR Apache-2.0
//! Requests whose bytes a device's copier moves.
//!
//! Copies start when requests are posted, and end in that order. The rest of a request follows when its copy has ended
//! and all requests before it are complete.

use super::{PeerNetwork, Plan, Work};
use crate::{NetError, Request};
use gin_gpu::copier::{Copier, Ticket};
use gin_gpu::{GpuError, Memory, MemoryKind};
use std::collections::VecDeque;

/// The most incomplete requests.
const MOST: usize = 1024;

/// Requests in the order of posting, and the copier.
#[derive(Debug)]
pub(super) struct Later {
    copier: Box<dyn Copier>,
    requests: VecDeque<Late>,
}

impl Later {
    pub(super) fn new(copier: Box<dyn Copier>) -> Self {
        Self { copier, requests: VecDeque::new() }
    }

    /// Returns whether there is no room for another request.
    pub(super) fn is_full(&self) -> bool {
        self.requests.len() >= MOST
    }
}

/// An incomplete request.
#[derive(Debug)]
struct Late {
    id: u64,
    /// The context and the peer.
    order: (u32, u32),
    strong: bool,
    /// The request, and its copy if the copier moves the bytes.
    started: Result<(Plan, Option<Ticket>), NetError>,
}

/// Starts the copy of a request, unless the CPU reaches both sides.
fn start(plan: &Plan, copier: &mut dyn Copier) -> Result<Option<Ticket>, GpuError> {
    let is_pinned = |memory: &Memory| memory.kind() == MemoryKind::Pinned;
    match &plan.work {
        Work::Copy { bytes: 0, .. } | Work::Nothing => Ok(None),
        Work::Copy { to, from, .. } if is_pinned(&to.0) && is_pinned(&from.0) => Ok(None),
        Work::Store { to, .. } if is_pinned(&to.0) => Ok(None),
        // Safety of both: the ranges were checked, and the plan keeps the regions and their memory alive.
        Work::Copy { to, from, bytes } => unsafe { copier.copy((&to.0, to.1), (&from.0, from.1), *bytes) }.map(Some),
        Work::Store { to, value, bytes } => unsafe { copier.store((&to.0, to.1), *value, *bytes) }.map(Some),
    }
}

impl PeerNetwork {
    /// Starts a request.
    pub(super) fn begin(&mut self, request: &Request) {
        let plan = self.resolve(request);
        let Some(later) = &mut self.later else { return };
        let lost = |error: GpuError| NetError::PeerLost { peer: request.peer, reason: error.to_string() };
        let started = plan.and_then(|plan| {
            let copy = start(&plan, &mut *later.copier).map_err(lost)?;
            Ok((plan, copy))
        });
        let order = (request.context, request.peer);
        later.requests.push_back(Late { id: request.id, order, strong: request.is_strong(), started });
    }

    /// Completes the requests whose copies have ended.
    pub(super) fn follow(&mut self) {
        while let Some(later) = &mut self.later {
            let Some(late) = later.requests.front() else { return };
            let copied = match &late.started {
                Ok((_, Some(ticket))) => later.copier.is_done(*ticket),
                _ => Ok(true),
            };
            if copied == Ok(false) {
                return;
            }
            let Some(Late { id, order, strong, started }) = later.requests.pop_front() else { return };
            let lost = |error: GpuError| NetError::PeerLost { peer: order.1, reason: error.to_string() };
            let outcome = match (started, copied) {
                (Err(error), _) => Err(error),
                (_, Err(error)) => Err(lost(error)),
                (Ok(_), _) if strong && self.broken.contains(&order) => Err(NetError::behind(order.1)),
                (Ok((plan, ticket)), _) => {
                    // Releases the regions before the completion is reported, so that a caller that then closes one
                    // finds it without users.
                    if ticket.is_none() {
                        plan.carry_out()
                    } else {
                        plan.raise()
                    }
                    Ok(())
                }
            };
            self.complete(id, order, outcome);
        }
    }
}
