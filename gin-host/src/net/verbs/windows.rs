// SPDX-License-Identifier: MIT OR Apache-2.0
//! The table of windows: own parts, which are registered with the NIC, and what other ranks say of theirs.

use super::key::Part;
use super::objects::{Domain, Region, is_in_gpu};
use crate::net::{Key, LocalWindow, NetError};
use gin_abi::{RemoteSignal, SignalTarget};
use std::sync::Arc;

/// Windows by id.
#[derive(Debug, Default)]
pub(super) struct Windows {
    rank: u32,
    /// Signals of one context, by rank.
    signals: Vec<u32>,
    table: Vec<Option<Window>>,
}

#[derive(Debug)]
struct Window {
    // Before the memory: dropped in this order.
    region: Option<Region>,
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

    /// Takes how many signals each rank has in a context.
    pub(super) fn set_signals(&mut self, signals: Vec<u32>) {
        self.signals = signals;
    }

    /// Registers an own part.
    pub(super) fn register(&mut self, domain: &Arc<Domain>, window: &LocalWindow) -> Result<Key, NetError> {
        let (address, bytes) = (window.memory.address(), window.memory.bytes());
        let region = if bytes == 0 {
            None
        } else {
            // Safety: the memory is kept beside the region, and dropped after it.
            Some(unsafe { Region::of_slice(domain, &window.memory) }?)
        };
        let key = region.as_ref().map_or(0, |region| region.remote_key);
        let index = window.id as usize;
        if self.table.len() <= index {
            self.table.resize_with(index + 1, || None);
        }
        let entry = Window { region, memory: window.clone(), uses: 0, is_closed: false, parts: Vec::new() };
        self.table[index] = Some(entry);
        Ok(Part { address, bytes, key, signals: window.plane.is_some() }.to_key())
    }

    /// Takes the keys of all ranks.
    pub(super) fn connect(&mut self, window: u32, keys: &[Key]) -> Result<(), NetError> {
        let parts = keys.iter().zip(0..).map(|(key, rank)| Part::from_key(rank, key)).collect::<Result<_, _>>()?;
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

    /// Address and key of some memory of this rank that lies in its GPU; or of any.
    pub(super) fn behind_pcie(&self, any: bool) -> Option<(u64, u32)> {
        self.table.iter().flatten().find_map(|window| {
            let (region, memory) = (window.region.as_ref()?, &window.memory.memory);
            (any || is_in_gpu(memory)).then(|| (memory.address(), region.remote_key))
        })
    }

    fn open(&self, window: u32, rank: u32) -> Result<&Window, NetError> {
        let entry = self.table.get(window as usize).and_then(Option::as_ref);
        entry.filter(|entry| !entry.is_closed).ok_or(NetError::UnknownWindow { window, rank })
    }

    /// Address and key of a range of the own part.
    pub(super) fn own(&self, window: u32, offset: u64, bytes: u64) -> Result<(u64, u32), NetError> {
        let rank = self.rank;
        let entry = self.open(window, rank)?;
        let (end, length) = (offset.saturating_add(bytes), entry.memory.memory.bytes());
        if end > length {
            return Err(NetError::OutOfRange { window, rank, end, length });
        }
        let key = entry.region.as_ref().map_or(0, |region| region.local_key);
        Ok((entry.memory.memory.address() + offset, key))
    }

    /// Address and key of a range of another rank's part.
    pub(super) fn of(&self, window: u32, rank: u32, offset: u64, bytes: u64) -> Result<(u64, u32), NetError> {
        let part = self.open(window, rank)?.parts.get(rank as usize);
        let part = part.ok_or(NetError::UnknownWindow { window, rank })?;
        let (end, length) = (offset.saturating_add(bytes), part.bytes);
        if end > length {
            return Err(NetError::OutOfRange { window, rank, end, length });
        }
        Ok((part.address + offset, part.key))
    }

    /// Whether the rank has such a signal.
    pub(super) fn check_signal(&self, rank: u32, signal: &RemoteSignal) -> Result<(), NetError> {
        let unknown = NetError::UnknownSignal { rank, signal: signal.target };
        match signal.target {
            SignalTarget::Id(id) => {
                let count = self.signals.get(rank as usize).copied().unwrap_or(0);
                if id < count { Ok(()) } else { Err(unknown) }
            }
            SignalTarget::Address { window, offset } => {
                self.of(window, rank, offset, 8)?;
                let part = self.open(window, rank)?.parts.get(rank as usize);
                let takes = part.is_some_and(|part| part.signals) && offset.is_multiple_of(8);
                if takes { Ok(()) } else { Err(unknown) }
            }
        }
    }
}
