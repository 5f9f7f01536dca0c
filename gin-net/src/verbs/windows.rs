// SPDX-License-Identifier: MIT OR Apache-2.0
//! The table of windows: own parts, which are registered with the NIC, and what other ranks say of theirs.

use super::key::Part;
use super::objects::Domain;
use super::region::{Reach, Region, is_in_gpu};
use crate::{Key, LocalWindow, NetError};
use gin_abi::{RemoteSignal, SignalTarget};
use std::sync::Arc;

/// Windows by id.
#[derive(Debug, Default)]
pub(super) struct Windows {
    rank: u32,
    /// By rank.
    peers: Vec<Peer>,
    table: Vec<Option<Window>>,
}

/// What is known of a rank.
#[derive(Clone, Copy, Debug)]
pub(super) struct Peer {
    /// Its signals of one context.
    pub(super) signals: u32,
    /// Ports that it uses.
    pub(super) ports: usize,
}

/// Memory of another rank.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct There {
    pub(super) address: u64,
    pub(super) key: u32,
    pub(super) in_gpu: bool,
    /// The NIC may raise signals there.
    pub(super) nic: bool,
}

#[derive(Debug)]
struct Window {
    /// By port; none if it has no bytes.
    // Before the memory: dropped in this order.
    regions: Vec<Region>,
    memory: LocalWindow,
    /// Entries under way that use it.
    uses: u64,
    is_closed: bool,
    /// By rank; empty until connected.
    parts: Vec<Part>,
}

impl Windows {
    pub(super) fn new(rank: u32) -> Self {
        Self { rank, ..Self::default() }
    }

    /// Takes what is known of the ranks.
    pub(super) fn set_peers(&mut self, peers: Vec<Peer>) {
        self.peers = peers;
    }

    /// Registers an own part with all ports. `nic`: the NIC is to raise signals there, if it can.
    pub(super) fn register(
        &mut self,
        domains: &[Arc<Domain>],
        window: &LocalWindow,
        nic: bool,
    ) -> Result<Key, NetError> {
        let (address, bytes) = (window.memory.address(), window.memory.bytes());
        let used = if bytes == 0 { &[] } else { domains };
        let register = |reach| {
            // Safety: the memory is kept beside the regions, and dropped after them.
            let region = |domain| unsafe { Region::of_slice(domain, &window.memory, reach) };
            used.iter().map(region).collect::<Result<Vec<_>, _>>()
        };
        let added_to = if nic { register(Reach::PeersAdd).ok() } else { None };
        let nic = added_to.is_some();
        let regions = added_to.map_or_else(|| register(Reach::Peers), Ok)?;
        let mut keys: Vec<u32> = regions.iter().map(|region| region.remote_key).collect();
        keys.resize(domains.len(), 0);
        let index = window.id as usize;
        if self.table.len() <= index {
            self.table.resize_with(index + 1, || None);
        }
        let entry = Window { regions, memory: window.clone(), uses: 0, is_closed: false, parts: Vec::new() };
        self.table[index] = Some(entry);
        let (signals, in_gpu) = (window.plane.is_some(), is_in_gpu(&window.memory));
        Ok(Part { address, bytes, keys, signals, nic, in_gpu }.to_key())
    }

    /// Takes the keys of all ranks.
    pub(super) fn connect(&mut self, window: u32, keys: &[Key]) -> Result<(), NetError> {
        let ranks = keys.iter().zip(&self.peers).zip(0..);
        let parts = ranks.map(|((key, peer), rank)| Part::from_key(rank, peer.ports, key)).collect::<Result<_, _>>()?;
        match self.table.get_mut(window as usize).and_then(Option::as_mut) {
            Some(entry) => entry.parts = parts,
            None => return Err(NetError::UnknownWindow { window, rank: self.rank }),
        }
        Ok(())
    }

    /// Refuses requests of this rank that use it; those of others too, from when none of this rank is under way. Then it is
    /// gone, and the result is true.
    pub(super) fn close(&mut self, window: u32) -> bool {
        let Some(entry) = self.table.get_mut(window as usize) else { return true };
        let Some(open) = entry else { return true };
        open.is_closed = true;
        if open.uses == 0 {
            *entry = None;
        }
        entry.is_none()
    }

    /// An entry uses the own part.
    pub(super) fn enter(&mut self, window: u32) {
        if let Some(Some(entry)) = self.table.get_mut(window as usize) {
            entry.uses += 1;
        }
    }

    /// It has ended.
    pub(super) fn leave(&mut self, window: u32) {
        if let Some(Some(entry)) = self.table.get_mut(window as usize) {
            entry.uses = entry.uses.saturating_sub(1);
        }
    }

    /// Address and key, for a port, of some memory of this rank that lies in its GPU; or of any.
    pub(super) fn behind_pcie(&self, any: bool, rail: usize) -> Option<(u64, u32)> {
        self.table.iter().flatten().find_map(|window| {
            let (region, memory) = (window.regions.get(rail)?, &window.memory.memory);
            (any || is_in_gpu(memory)).then(|| (memory.address(), region.remote_key))
        })
    }

    fn open(&self, window: u32, rank: u32) -> Result<&Window, NetError> {
        let entry = self.table.get(window as usize).and_then(Option::as_ref);
        entry.filter(|entry| !entry.is_closed).ok_or(NetError::UnknownWindow { window, rank })
    }

    /// Address and key of a range of the own part, for a request over one of this rank's ports.
    pub(super) fn own(&self, window: u32, offset: u64, bytes: u64, rail: usize) -> Result<(u64, u32), NetError> {
        let rank = self.rank;
        let entry = self.open(window, rank)?;
        let (end, length) = (offset.saturating_add(bytes), entry.memory.memory.bytes());
        if end > length {
            return Err(NetError::OutOfRange { window, rank, end, length });
        }
        let key = entry.regions.get(rail).map_or(0, |region| region.local_key);
        Ok((entry.memory.memory.address() + offset, key))
    }

    /// A range of another rank's part, for a request that arrives over one of its ports.
    pub(super) fn of(&self, window: u32, rank: u32, offset: u64, bytes: u64, rail: usize) -> Result<There, NetError> {
        let part = self.open(window, rank)?.parts.get(rank as usize);
        let part = part.ok_or(NetError::UnknownWindow { window, rank })?;
        let (end, length) = (offset.saturating_add(bytes), part.bytes);
        if end > length {
            return Err(NetError::OutOfRange { window, rank, end, length });
        }
        let key = part.keys.get(rail).copied().unwrap_or(0);
        Ok(There { address: part.address + offset, key, in_gpu: part.in_gpu, nic: part.nic })
    }

    /// Whether the rank has such a signal.
    pub(super) fn check_signal(&self, rank: u32, signal: &RemoteSignal) -> Result<(), NetError> {
        let unknown = NetError::UnknownSignal { rank, signal: signal.target };
        match signal.target {
            SignalTarget::Id(id) => {
                let count = self.peers.get(rank as usize).map_or(0, |peer| peer.signals);
                if id < count { Ok(()) } else { Err(unknown) }
            }
            SignalTarget::Address { window, offset } => {
                self.of(window, rank, offset, 8, 0)?;
                let part = self.open(window, rank)?.parts.get(rank as usize);
                let takes = part.is_some_and(|part| part.signals) && offset.is_multiple_of(8);
                if takes { Ok(()) } else { Err(unknown) }
            }
        }
    }
}
