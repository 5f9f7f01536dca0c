// SPDX-License-Identifier: MIT OR Apache-2.0
//! Windows that are staged through host memory, here or at a peer.

use crate::{Key, KeyError, LocalWindow, NetError};
use gin_gpu::wire::{decode, encode};
use gin_gpu::{Memory, MemoryKind, MemorySlice};
use std::sync::Arc;

/// A window of this rank.
#[derive(Debug)]
pub(super) struct StagedWindow {
    /// The own part if it is staged.
    pub(super) own: Option<Arc<StagedMemory>>,
    pub(super) is_closed: bool,
    /// The parts by world rank; empty until connected.
    pub(super) parts: Vec<StagedPart>,
}

/// The own part of a window, and its host memory: first the area for arriving bytes, then the area for bytes to send,
/// each as long as the part. So bytes to send never overwrite bytes that have arrived.
#[derive(Debug)]
pub(super) struct StagedMemory {
    pub(super) memory: MemorySlice,
    pub(super) stage: Arc<Memory>,
    /// The offset of the area for bytes to send.
    pub(super) half: u64,
}

impl StagedMemory {
    pub(super) fn new(window: &LocalWindow) -> Result<Self, NetError> {
        // Both areas have the same alignment.
        const ALIGN: u64 = 256;
        let half = window.memory.bytes().next_multiple_of(ALIGN);
        let bytes = half.saturating_mul(2);
        let stage = Memory::new(window.memory.memory().device(), MemoryKind::Pinned, bytes).map_err(|error| {
            let reason = format!("{error}; a window in a GPU needs twice its length there");
            NetError::Local { what: "allocating host memory in place of a GPU's", reason }
        })?;
        Ok(Self { memory: window.memory.clone(), stage, half })
    }

    /// Returns the place of a byte, which is in the part: in the window, in the area for arriving bytes, and in the
    /// area for bytes to send. A place is an allocation and an address in it.
    pub(super) fn places(&self, offset: u64) -> [(&Memory, u64); 3] {
        let (window, arrival) = (self.memory.address() + offset, self.stage.address() + offset);
        [(self.memory.memory(), window), (&self.stage, arrival), (&self.stage, arrival + self.half)]
    }
}

/// A rank's part of a window.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct StagedPart {
    pub(super) bytes: u64,
    /// The offset of the area for bytes to send in the memory that peers reach; `None` if the part is not staged.
    pub(super) half: Option<u64>,
}

impl StagedPart {
    /// Returns the key of a part, given the key of the inner network.
    pub(super) fn to_key(self, below: &Key) -> Key {
        Key(encode(&(self.half, self.bytes, &below.0)))
    }

    /// Returns the part of a rank, and the key for the inner network.
    pub(super) fn from_key(rank: u32, key: &Key) -> Result<(Self, Key), NetError> {
        let garbled = || KeyError { rank, reason: "it is garbled".to_owned() };
        let (half, bytes, below): (_, _, &[u8]) = decode(&key.0).ok_or_else(garbled)?;
        Ok((Self { bytes, half }, Key(below.to_vec())))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn a_key_is_read_as_it_was_written_and_no_other(
            bytes: u64, half in proptest::option::of(any::<u64>()), below: Vec<u8>, cut: prop::sample::Index,
        ) {
            let part = StagedPart { bytes, half };
            let key = part.to_key(&Key(below.clone()));
            prop_assert_eq!(StagedPart::from_key(3, &key), Ok((part, Key(below))));
            let cut = Key(key.0[..cut.index(key.0.len())].to_vec());
            prop_assert!(StagedPart::from_key(3, &cut).is_err());
            let mut long = key;
            long.0.push(0);
            prop_assert!(StagedPart::from_key(3, &long).is_err());
        }
    }
}
