// SPDX-License-Identifier: MIT OR Apache-2.0
//! The table of windows: this rank's parts, which are registered with the provider, and the parts that peers published.

use super::key::PublishedPart;
use super::objects::{EndpointHandle, Region};
use crate::{Key, LocalWindow, NetError};
use gin_abi::{RemoteSignal, SignalTarget};
use std::collections::BTreeMap;

/// Windows by id.
#[derive(Default)]
pub(super) struct Windows {
    pub(super) rank: u32,
    /// Number of signals per context, by rank.
    pub(super) signals: Vec<u32>,
    table: BTreeMap<u32, RegisteredWindow>,
}

struct RegisteredWindow {
    /// `None` if it has no bytes.
    // Before the memory: dropped in this order.
    region: Option<Region>,
    memory: LocalWindow,
    /// Number of outstanding operations that use it.
    uses: u64,
    is_closed: bool,
    /// By rank; empty until connected.
    parts: Vec<PublishedPart>,
}

impl Windows {
    pub(super) fn new(rank: u32) -> Self {
        Self { rank, ..Self::default() }
    }

    /// Registers this rank's part.
    pub(super) fn register(&mut self, endpoint: &EndpointHandle, window: &LocalWindow) -> Result<Key, NetError> {
        let (address, bytes) = (window.memory.address(), window.memory.bytes());
        // Safety: the table keeps the memory beside the region, and drops it after the region.
        let region = (bytes > 0).then(|| unsafe { endpoint.register_window(address, bytes) }).transpose()?;
        let (base, key) = region.as_ref().map_or((0, 0), |region| (region.base(address), region.key));
        let part = PublishedPart { base, bytes, key, signals: window.plane.is_some() };
        let entry = RegisteredWindow { region, memory: window.clone(), uses: 0, is_closed: false, parts: Vec::new() };
        self.table.insert(window.id, entry);
        Ok(part.to_key())
    }

    /// Stores the parts that all ranks published.
    pub(super) fn connect(&mut self, window: u32, keys: &[Key]) -> Result<(), NetError> {
        let parts = keys.iter().zip(0..).map(|(key, rank)| PublishedPart::from_key(rank, key));
        let parts = parts.collect::<Result<_, _>>()?;
        let unknown = NetError::UnknownWindow { window, rank: self.rank };
        self.table.get_mut(&window).ok_or(unknown)?.parts = parts;
        Ok(())
    }

    /// Refuses further requests of this rank for the window. Once no operation of this rank uses it, removes the
    /// window, so that the provider refuses peers too, and returns true.
    pub(super) fn close(&mut self, window: u32) -> bool {
        let Some(entry) = self.table.get_mut(&window) else { return true };
        entry.is_closed = true;
        let unused = entry.uses == 0;
        if unused {
            self.table.remove(&window);
        }
        unused
    }

    /// Counts an operation that uses this rank's part.
    pub(super) fn enter(&mut self, window: u32) {
        if let Some(entry) = self.table.get_mut(&window) {
            entry.uses += 1;
        }
    }

    /// Ends the use of an operation.
    pub(super) fn leave(&mut self, window: u32) {
        if let Some(entry) = self.table.get_mut(&window) {
            entry.uses = entry.uses.saturating_sub(1);
        }
    }

    fn open(&self, window: u32, rank: u32) -> Result<&RegisteredWindow, NetError> {
        let entry = self.table.get(&window);
        entry.filter(|entry| !entry.is_closed).ok_or(NetError::UnknownWindow { window, rank })
    }

    /// Returns the region and the address of a range of this rank's part, which has bytes.
    pub(super) fn own(&self, window: u32, offset: u64, bytes: u64) -> Result<(&Region, u64), NetError> {
        let rank = self.rank;
        let entry = self.open(window, rank)?;
        NetError::check_range(window, rank, offset, bytes, entry.memory.memory.bytes())?;
        let region = entry.region.as_ref().ok_or(NetError::UnknownWindow { window, rank })?;
        Ok((region, entry.memory.memory.address() + offset))
    }

    /// Returns place and key of a range of a peer's part.
    pub(super) fn of(&self, window: u32, rank: u32, offset: u64, bytes: u64) -> Result<(u64, u64), NetError> {
        let part = self.open(window, rank)?.parts.get(rank as usize);
        let part = part.ok_or(NetError::UnknownWindow { window, rank })?;
        NetError::check_range(window, rank, offset, bytes, part.bytes)?;
        Ok((part.base + offset, part.key))
    }

    /// Checks that the rank has this signal.
    pub(super) fn check_signal(&self, rank: u32, signal: &RemoteSignal) -> Result<(), NetError> {
        let has = match signal.target {
            SignalTarget::Id(id) => self.signals.get(rank as usize).is_some_and(|count| id < *count),
            SignalTarget::Address { window, offset } => {
                self.of(window, rank, offset, 8)?;
                let part = self.open(window, rank)?.parts.get(rank as usize);
                part.is_some_and(|part| part.signals) && offset.is_multiple_of(8)
            }
        };
        if has { Ok(()) } else { Err(NetError::UnknownSignal { rank, signal: signal.target }) }
    }
}
