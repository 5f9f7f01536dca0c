// SPDX-License-Identifier: MIT OR Apache-2.0
//! Windows: this rank's parts are registered with the NIC.

use super::key::PublishedPart;
use super::objects::Domain;
use super::region::{Region, is_in_gpu};
use crate::windows::{Part, WindowTable};
use crate::{Key, LocalWindow, NetError};
use gin_verbs::Access;
use std::sync::Arc;

/// The regions of a part by port; none if it has no bytes.
pub(super) type Windows = WindowTable<Vec<Region>, PublishedPart>;

/// Memory of a peer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct RemoteRange {
    pub(super) address: u64,
    pub(super) key: u32,
    pub(super) in_gpu: bool,
    /// The NIC may raise signals there.
    pub(super) nic: bool,
}

impl Part for PublishedPart {
    fn bytes(&self) -> u64 {
        self.bytes
    }

    fn has_signals(&self) -> bool {
        self.signals
    }
}

impl Windows {
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
        self.insert(window, regions);
        let (signals, in_gpu) = (window.plane.is_some(), is_in_gpu(&window.memory));
        Ok(PublishedPart { address, bytes, keys, signals, nic, in_gpu }.to_key())
    }

    /// Returns address and remote key, for a port, of some registered memory in this rank's GPU, or of `any` memory.
    pub(super) fn behind_pcie(&self, any: bool, port: usize) -> Option<(u64, u32)> {
        self.registrations().find_map(|(regions, window)| {
            let region = regions.get(port)?;
            (any || is_in_gpu(&window.memory)).then(|| (window.memory.address(), region.remote_key))
        })
    }

    /// Returns address and local key of a range of this rank's part, for a request over one of its ports.
    pub(super) fn local(&self, window: u32, offset: u64, bytes: u64, port: usize) -> Result<(u64, u32), NetError> {
        let (regions, address) = self.own(window, offset, bytes)?;
        Ok((address, regions.get(port).map_or(0, |region| region.local_key)))
    }

    /// Returns a range of a peer's part, for a request that arrives over one of the peer's ports.
    pub(super) fn remote(
        &self,
        window: u32,
        rank: u32,
        offset: u64,
        bytes: u64,
        port: usize,
    ) -> Result<RemoteRange, NetError> {
        let part = self.of(window, rank, offset, bytes)?;
        let key = part.keys.get(port).copied().unwrap_or(0);
        Ok(RemoteRange { address: part.address + offset, key, in_gpu: part.in_gpu, nic: part.nic })
    }
}
