// SPDX-License-Identifier: MIT OR Apache-2.0
//! Windows: this rank's parts are registered with the provider.

use super::key::PublishedPart;
use super::objects::{EndpointHandle, Region};
use crate::windows::{Part, WindowTable};
use crate::{Key, LocalWindow, NetError};

/// The region of a part is `None` if it has no bytes.
pub(super) type Windows = WindowTable<Option<Region>, PublishedPart>;

impl Part for PublishedPart {
    fn bytes(&self) -> u64 {
        self.bytes
    }

    fn has_signals(&self) -> bool {
        self.signals
    }
}

impl Windows {
    /// Registers this rank's part.
    pub(super) fn register(&mut self, endpoint: &EndpointHandle, window: &LocalWindow) -> Result<Key, NetError> {
        let (address, bytes) = (window.memory.address(), window.memory.bytes());
        // Safety: the table keeps the memory beside the region, and drops it after the region.
        let region = (bytes > 0).then(|| unsafe { endpoint.register_window(&window.memory) }).transpose()?;
        let (base, key) = region.as_ref().map_or((0, 0), |region| (region.base(address), region.key));
        let in_gpu = region.as_ref().is_some_and(|region| region.in_gpu);
        self.insert(window, region);
        Ok(PublishedPart { base, bytes, in_gpu, key, signals: window.plane.is_some() }.to_key())
    }

    /// Returns place and key of some registered memory in this rank's GPU.
    pub(super) fn in_gpu(&self) -> Option<(u64, u64)> {
        self.registrations().find_map(|(region, window)| {
            let region = region.as_ref().filter(|region| region.in_gpu)?;
            Some((region.base(window.memory.address()), region.key))
        })
    }

    /// Gives back the regions of all windows, before the endpoint ends to which they are bound.
    pub(super) fn unbind(&mut self, endpoint: &EndpointHandle) {
        if endpoint.binds_memory() {
            self.registrations_mut().for_each(|region| *region = None);
        }
    }

    /// Returns the region and the address of a range of this rank's part, which has bytes.
    pub(super) fn local(&self, window: u32, offset: u64, bytes: u64) -> Result<(&Region, u64), NetError> {
        let (region, address) = self.own(window, offset, bytes)?;
        let region = region.as_ref().ok_or(NetError::UnknownWindow { window, rank: self.rank })?;
        Ok((region, address))
    }

    /// Returns place and key of a range of a peer's part.
    pub(super) fn remote(&self, window: u32, rank: u32, offset: u64, bytes: u64) -> Result<(u64, u64), NetError> {
        let part = self.of(window, rank, offset, bytes)?;
        Ok((part.base + offset, part.key))
    }

    /// Returns place and key of a peer's part in a GPU; `None` if the window is closed or the part is elsewhere.
    pub(super) fn remote_in_gpu(&self, window: u32, rank: u32) -> Option<(u64, u64)> {
        let part = self.of(window, rank, 0, 1).ok()?;
        part.in_gpu.then_some((part.base, part.key))
    }
}
