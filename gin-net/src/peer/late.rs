// SPDX-License-Identifier: MIT OR Apache-2.0
//! Requests whose bytes a device's copier moves.
//!
//! Their copies are started when they are posted and end in that order. What is left of a request, and it may be all of
//! it, is done when its copy is done and all requests before it are complete.

use super::{Peer, Use};
use crate::{Event, NetError, Request};
use gin_abi::Transfer;
use gin_device::signal_words::raise;
use gin_device::sys::GlobalWord;
use gin_gpu::copier::{Copier, Ticket};
use gin_gpu::copy::copy_shared;
use gin_gpu::{GpuError, MemoryKind};
use std::collections::VecDeque;

/// Most requests that are not complete.
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

    /// Whether it takes no more requests for now.
    pub(super) fn is_full(&self) -> bool {
        self.requests.len() >= MOST
    }
}

/// What the CPU does itself: both sides are host memory.
#[derive(Clone, Copy, Debug)]
enum ByCpu {
    Copy { to: u64, from: u64, bytes: u64 },
    Store { to: u64, value: u64, bytes: u64 },
}

/// A request that is not complete.
#[derive(Debug)]
struct Late {
    id: u64,
    line: (u32, u32),
    strong: bool,
    outcome: Result<(), NetError>,
    copy: Option<Ticket>,
    by_cpu: Option<ByCpu>,
    raise: Option<(GlobalWord, u64)>,
    /// Regions that it uses.
    uses: Vec<Use>,
}

/// The failure of a copy.
fn failed(peer: u32, error: &GpuError) -> NetError {
    NetError::PeerLost { peer, reason: error.to_string() }
}

impl Peer {
    /// Starts a request.
    pub(super) fn begin(&mut self, request: &Request) {
        let mut late = Late {
            id: request.id,
            line: (request.context, request.peer),
            strong: request.is_strong(),
            outcome: Ok(()),
            copy: None,
            by_cpu: None,
            raise: None,
            uses: Vec::new(),
        };
        let Some(mut later) = self.later.take() else { return };
        late.outcome = self.start(request, &mut late, &mut *later.copier);
        later.requests.push_back(late);
        self.later = Some(later);
    }

    /// Looks up what a request names and starts its copy. On an error nothing was started.
    fn start(&self, request: &Request, late: &mut Late, copier: &mut dyn Copier) -> Result<(), NetError> {
        let peer = request.peer;
        if let Some(signal) = &request.signal {
            let (region, word) = self.word(request, signal)?;
            let unknown = NetError::UnknownSignal { rank: peer, signal: signal.target };
            late.uses.push(region.enter().ok_or(unknown)?);
            late.raise = Some((word, signal.amount));
        }
        let ((from_window, from_rank, from_offset), (to_window, to_rank, to_offset), bytes) = match request.transfer {
            Transfer::Nothing => return Ok(()),
            Transfer::Put { source_window, source_offset, destination_window, destination_offset, bytes } => {
                ((source_window, self.rank, source_offset), (destination_window, peer, destination_offset), bytes)
            }
            Transfer::Get { source_window, source_offset, destination_window, destination_offset, bytes } => {
                ((source_window, peer, source_offset), (destination_window, self.rank, destination_offset), bytes)
            }
            Transfer::PutValue { value, width_log2, destination_window, destination_offset } => {
                let bytes = 1 << width_log2;
                let (region, to) = self.range(destination_window, peer, destination_offset, bytes)?;
                let gone = NetError::UnknownWindow { window: destination_window, rank: peer };
                late.uses.push(region.enter().ok_or(gone)?);
                let memory = region.memory.memory();
                if memory.kind() == MemoryKind::Pinned {
                    late.by_cpu = Some(ByCpu::Store { to, value, bytes });
                } else {
                    // Safety: the range was checked, and `uses` keeps the region and its memory.
                    let ticket = unsafe { copier.store((memory, to), value, bytes) };
                    late.copy = Some(ticket.map_err(|error| failed(peer, &error))?);
                }
                return Ok(());
            }
        };
        let (source, from) = self.range(from_window, from_rank, from_offset, bytes)?;
        let (destination, to) = self.range(to_window, to_rank, to_offset, bytes)?;
        let gone = |window, rank| NetError::UnknownWindow { window, rank };
        late.uses.push(source.enter().ok_or(gone(from_window, from_rank))?);
        late.uses.push(destination.enter().ok_or(gone(to_window, to_rank))?);
        let (source, destination) = (source.memory.memory(), destination.memory.memory());
        if bytes == 0 {
            return Ok(());
        }
        if source.kind() == MemoryKind::Pinned && destination.kind() == MemoryKind::Pinned {
            late.by_cpu = Some(ByCpu::Copy { to, from, bytes });
        } else {
            // Safety: the ranges were checked, and `uses` keeps the regions and their memory.
            let ticket = unsafe { copier.copy((destination, to), (source, from), bytes) };
            late.copy = Some(ticket.map_err(|error| failed(peer, &error))?);
        }
        Ok(())
    }

    /// Completes the requests whose copies are done.
    pub(super) fn follow(&mut self) {
        let Some(later) = &mut self.later else { return };
        while let Some(late) = later.requests.front() {
            let copied = match late.copy {
                None => Ok(true),
                Some(ticket) => later.copier.is_done(ticket).map_err(|error| failed(late.line.1, &error)),
            };
            if copied == Ok(false) {
                return;
            }
            let Some(late) = later.requests.pop_front() else { return };
            let Late { id, line, strong, mut outcome, by_cpu, raise: word, uses, .. } = late;
            if let Err(error) = copied {
                outcome = Err(error);
            }
            if outcome.is_ok() && strong && self.broken.contains(&line) {
                outcome = Err(NetError::behind(line.1));
            }
            if outcome.is_ok() {
                // Safety: the ranges were checked, and `uses` keeps their memory; a value is a local of this block.
                match by_cpu {
                    Some(ByCpu::Copy { to, from, bytes }) => unsafe { copy_shared(to, from, bytes) },
                    Some(ByCpu::Store { to, value, bytes }) => {
                        let value = value.to_le_bytes();
                        // Safety: as above.
                        unsafe { copy_shared(to, value.as_ptr().expose_provenance() as u64, bytes) };
                    }
                    None => {}
                }
                if let Some((word, amount)) = word {
                    raise(word, amount);
                }
            } else if !self.broken.contains(&line) {
                self.broken.push(line);
            }
            // Before anybody is told: whoever closes a region then finds it unused.
            drop(uses);
            self.done.push(Event::Completion { id, outcome });
        }
    }
}
