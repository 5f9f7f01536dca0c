// SPDX-License-Identifier: MIT OR Apache-2.0
//! The table of windows: this rank's parts, which are registered with the NIC, and the parts that peers published.

use super::key::PublishedPart;
use super::objects::Domain;
use super::region::{Region, is_in_gpu};
use crate::{Key, LocalWindow, NetError};
use gin_abi::{RemoteSignal, SignalTarget};
use gin_verbs::Access;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Windows by id.
#[derive(Debug, Default)]
pub(super) struct Windows {
    rank: u32,
    /// By rank.
    pub(super) peers: Vec<PeerLimits>,
    table: BTreeMap<u32, RegisteredWindow>,
}

/// A peer's attributes, from its first key.
#[derive(Clone, Copy, Debug)]
pub(super) struct PeerLimits {
    /// Number of its signals per context.
    pub(super) signals: u32,
    /// Number of its ports.
    pub(super) ports: usize,
}

/// Memory of a peer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct RemoteRange {
    pub(super) address: u64,
    pub(super) key: u32,
    pub(super) in_gpu: bool,
    /// The NIC may raise signals there.
    pub(super) nic: bool,
}

#[derive(Debug)]
struct RegisteredWindow {
    /// By port; none if it has no bytes.
    // Before the memory: dropped in this order.
    regions: Vec<Region>,
    memory: LocalWindow,
    /// Number of outstanding entries that use it.
    uses: u64,
    is_closed: bool,
    /// By rank; empty until connected.
    parts: Vec<PublishedPart>,
}

impl Windows {
    pub(super) fn new(rank: u32) -> Self {
        Self { rank, ..Self::default() }
    }

    /// Registers this rank's part with all ports. `nic`: lets the NIC raise signals there, if it can.
    pub(super) fn register(
        &mut self,
        domains: &[Arc<Domain>],
        window: &LocalWindow,
        nic: bool,
    ) -> Result<Key, NetError> {
        let (address, bytes) = (window.memory.address(), window.memory.bytes());
        let used = if bytes == 0 { &[] } else { domains };
        let register = |reach| {
            // Safety: the table keeps the memory beside the regions, and drops it after them.
            let region = |domain| unsafe { Region::of_slice(domain, &window.memory, reach) };
            used.iter().map(region).collect::<Result<Vec<_>, _>>()
        };
        let added_to = if nic { register(Access::SIGNALS).ok() } else { None };
        let nic = added_to.is_some();
        let regions = added_to.map_or_else(|| register(Access::PEERS), Ok)?;
        let mut keys: Vec<u32> = regions.iter().map(|region| region.remote_key).collect();
        keys.resize(domains.len(), 0);
        let entry = RegisteredWindow { regions, memory: window.clone(), uses: 0, is_closed: false, parts: Vec::new() };
        self.table.insert(window.id, entry);
        let (signals, in_gpu) = (window.plane.is_some(), is_in_gpu(&window.memory));
        Ok(PublishedPart { address, bytes, keys, signals, nic, in_gpu }.to_key())
    }

    /// Stores the parts that all ranks published.
    pub(super) fn connect(&mut self, window: u32, keys: &[Key]) -> Result<(), NetError> {
        let ranks = keys.iter().zip(&self.peers).zip(0..);
        let parts = ranks
            .map(|((key, peer), rank)| PublishedPart::from_key(rank, peer.ports, key))
            .collect::<Result<_, _>>()?;
        let unknown = NetError::UnknownWindow { window, rank: self.rank };
        self.table.get_mut(&window).ok_or(unknown)?.parts = parts;
        Ok(())
    }

    /// Refuses further requests of this rank for the window. Once none of this rank's entries uses it, removes the
    /// window, so that the NIC refuses peers too, and returns true.
    pub(super) fn close(&mut self, window: u32) -> bool {
        let Some(entry) = self.table.get_mut(&window) else { return true };
        entry.is_closed = true;
        let unused = entry.uses == 0;
        if unused {
            self.table.remove(&window);
        }
        unused
    }

    /// Counts an entry that uses this rank's part.
    pub(super) fn enter(&mut self, window: u32) {
        if let Some(entry) = self.table.get_mut(&window) {
            entry.uses += 1;
        }
    }

    /// Ends the use of an entry.
    pub(super) fn leave(&mut self, window: u32) {
        if let Some(entry) = self.table.get_mut(&window) {
            entry.uses = entry.uses.saturating_sub(1);
        }
    }

    /// Returns address and remote key, for a port, of some registered memory in this rank's GPU, or of `any` memory.
    pub(super) fn behind_pcie(&self, any: bool, port: usize) -> Option<(u64, u32)> {
        self.table.values().find_map(|window| {
            let (region, memory) = (window.regions.get(port)?, &window.memory.memory);
            (any || is_in_gpu(memory)).then(|| (memory.address(), region.remote_key))
        })
    }

    fn open(&self, window: u32, rank: u32) -> Result<&RegisteredWindow, NetError> {
        let entry = self.table.get(&window);
        entry.filter(|entry| !entry.is_closed).ok_or(NetError::UnknownWindow { window, rank })
    }

    /// Returns address and local key of a range of this rank's part, for a request over one of its ports.
    pub(super) fn own(&self, window: u32, offset: u64, bytes: u64, port: usize) -> Result<(u64, u32), NetError> {
        let rank = self.rank;
        let entry = self.open(window, rank)?;
        NetError::check_range(window, rank, offset, bytes, entry.memory.memory.bytes())?;
        let key = entry.regions.get(port).map_or(0, |region| region.local_key);
        Ok((entry.memory.memory.address() + offset, key))
    }

    /// Returns a range of a peer's part, for a request that arrives over one of the peer's ports.
    pub(super) fn of(
        &self,
        window: u32,
        rank: u32,
        offset: u64,
        bytes: u64,
        port: usize,
    ) -> Result<RemoteRange, NetError> {
        let part = self.open(window, rank)?.parts.get(rank as usize);
        let part = part.ok_or(NetError::UnknownWindow { window, rank })?;
        NetError::check_range(window, rank, offset, bytes, part.bytes)?;
        let key = part.keys.get(port).copied().unwrap_or(0);
        Ok(RemoteRange { address: part.address + offset, key, in_gpu: part.in_gpu, nic: part.nic })
    }

    /// Checks that the rank has this signal.
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
