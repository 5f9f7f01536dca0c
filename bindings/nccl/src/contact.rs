// SPDX-License-Identifier: MIT OR Apache-2.0
//! The handle of a rank, which NCCL passes to all ranks.

use crate::abi::HANDLE_BYTES;
use crate::failure::Failure;
use gin_gpu::registry::process;
use std::time::Duration;

/// The time that ranks have for collective steps, and copies to end.
pub(crate) const PATIENCE: Duration = Duration::from_secs(10);

/// The first bytes of a handle of this version of the plugin.
const MAGIC: [u8; 8] = *b"gin-rma2";

/// The bytes of a handle before the identity of the GPU and its length.
pub(crate) const FIXED: usize = 65;

/// The content of the handle of a rank, which all ranks get.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Contact {
    pub(crate) process: [u8; 16],
    /// Its number, which no other has in its process.
    pub(crate) number: u64,
    /// The number of its GPU in its process.
    pub(crate) gpu: u64,
    /// The key of its board.
    pub(crate) key: Option<[u8; 24]>,
    /// The bytes by which other processes recognise its GPU.
    pub(crate) identity: Vec<u8>,
}

impl Contact {
    pub(crate) fn to_bytes(&self) -> [u8; HANDLE_BYTES] {
        let mut bytes = [0; HANDLE_BYTES];
        bytes[..8].copy_from_slice(&MAGIC);
        bytes[8..24].copy_from_slice(&self.process);
        bytes[24..32].copy_from_slice(&self.number.to_le_bytes());
        bytes[32..40].copy_from_slice(&self.gpu.to_le_bytes());
        bytes[40..64].copy_from_slice(&self.key.unwrap_or_default());
        bytes[64] = self.identity.len() as u8;
        bytes[FIXED..][..self.identity.len()].copy_from_slice(&self.identity);
        bytes
    }

    pub(crate) fn read(rank: usize, bytes: &[u8; HANDLE_BYTES]) -> Result<Self, Failure> {
        let part = |first: usize| -> [u8; 8] { std::array::from_fn(|index| bytes[first + index]) };
        if part(0) != MAGIC {
            return Err(Failure::argument(format!(
                "rank {rank} has another RMA plugin, or another version of this one; set the same NCCL_RMA_PLUGIN \
                 for all ranks"
            )));
        }
        let key: [u8; 24] = std::array::from_fn(|index| bytes[40 + index]);
        let identity = bytes[FIXED..].iter().take(bytes[64].into()).copied().collect();
        Ok(Self {
            process: std::array::from_fn(|index| bytes[8 + index]),
            number: u64::from_le_bytes(part(24)),
            gpu: u64::from_le_bytes(part(32)),
            key: Some(key).filter(|key| *key != [0; 24]),
            identity,
        })
    }

    /// Returns its GPU if it is in this process.
    pub(crate) fn gpu_here(&self) -> Option<usize> {
        (self.process == process()).then_some(self.gpu as usize)
    }
}
