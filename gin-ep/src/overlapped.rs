// SPDX-License-Identifier: MIT OR Apache-2.0
//! Products of received rows, which begin before the rows of all sources are there.

use crate::grouped::check;
use crate::multiplier::{Instructions, Multiplier};
use crate::tokens::address;
use crate::{Element, EpError, Group};
use gin_ep_kernels::Sizes;
use gin_ep_kernels::matmul::Overlapped;
use gin_gpu::{Memory, MemoryKind, MemorySlice};

/// The kernel that multiplies received rows as they arrive, for a group:
/// [`Sent::multiply`](crate::Sent::multiply) launches it.
///
/// The experts of a rank multiply the rows themselves, of BF16, and one row comes back for each id, so the group has
/// [`combine_at_source`](crate::GroupConfig::combine_at_source). Each slot has separate state, so slots may use it on
/// several streams.
#[derive(Debug)]
pub struct OverlappedMatmul {
    pub(crate) multiplier: Multiplier,
    /// The number of the group.
    group: u64,
    sizes: Sizes,
    /// For each slot [`Overlapped::state_bytes`].
    state: MemorySlice,
}

impl OverlappedMatmul {
    /// Prepares products by at most `blocks` blocks, or as many as the GPU runs at the same time. Slots, and ranks
    /// that share a GPU, divide that number, because blocks wait for rows.
    ///
    /// # Errors
    /// [`EpError::Unsuited`], or an error of the device.
    pub fn new(group: &Group, blocks: Option<u32>) -> Result<Self, EpError> {
        Self::by(Instructions::Warpgroups, group, blocks)
    }

    /// Prepares products by these instructions, for tests.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    #[doc(hidden)]
    pub fn by(instructions: Instructions, group: &Group, blocks: Option<u32>) -> Result<Self, EpError> {
        let group = &*group.state;
        check(group)?;
        if group.element != Element::Bf16 {
            let what = "products of received rows that are not BF16";
            return Err(EpError::Unsuited { what, remedy: "make BF16 of them, and use `GroupedMatmul`" });
        }
        let (gpu, sizes) = (group.comm.gpu(), group.sizes());
        let slots = group.slots.len() as u64;
        let multiplier = Multiplier::new(gpu, "ep_overlapped_matmul", instructions, (blocks, group.shares, slots))?;
        let bytes = Overlapped::state_bytes(&sizes) * slots;
        let state = Memory::new(gpu, MemoryKind::Device, bytes)?.whole();
        Ok(Self { multiplier, group: group.number, sizes, state })
    }

    /// Sets the number of blocks, also to more than can run at the same time, for tests.
    ///
    /// # Errors
    /// An error of the device.
    #[doc(hidden)]
    pub fn grid(mut self, blocks: u32) -> Result<Self, EpError> {
        self.multiplier = self.multiplier.grid(blocks)?;
        Ok(self)
    }

    /// Returns the number of blocks of a launch.
    pub fn blocks(&self) -> u64 {
        self.multiplier.shape.blocks()
    }

    /// Returns the number of tiles that blocks took before all rows were there, in the last launch on a slot, for tests
    /// and tools: also tiles that did not exist, one of each block at most. The stream is done.
    ///
    /// # Errors
    /// [`EpError::Slot`], or an error of the device.
    #[doc(hidden)]
    pub fn overlapped_tiles(&self, slot: u32) -> Result<u32, EpError> {
        let (bytes, mut word) = (Overlapped::state_bytes(&self.sizes), [0u32]);
        if u64::from(slot) >= self.state.bytes() / bytes {
            return Err(EpError::Slot { slot, reason: "not there".to_owned() });
        }
        self.state.read(u64::from(slot) * bytes + Overlapped::TAKEN_AT, &mut word)?;
        Ok(word[0])
    }

    /// Returns the parameter of the kernel, and the memory that it uses, for a slot of a group.
    pub(crate) fn params<'a>(
        &'a self,
        (group, slot): (u64, u32),
        weights: &'a MemorySlice,
    ) -> Result<(Overlapped, Vec<&'a MemorySlice>), EpError> {
        if group != self.group {
            let remedy = "make one for the group of the slot";
            return Err(EpError::Unsuited { what: "products of rows of another group", remedy });
        }
        let (sizes, depth, columns) = (&self.sizes, self.sizes.row_bytes / 2, self.sizes.combine_bytes / 2);
        let all = 2 * u64::from(sizes.local()) * u64::from(columns) * u64::from(depth);
        let weights_at = address("the memory of the experts' weights", weights, all, 16)?;
        let state = self.state.address() + u64::from(slot) * Overlapped::state_bytes(sizes);
        let lists = state + Overlapped::lists_at(sizes);
        let maps = self.multiplier.maps(slot);
        let mut used = vec![weights, &self.state];
        used.extend(self.multiplier.used());
        Ok((Overlapped { weights: weights_at, state, lists, maps, depth, columns }, used))
    }
}
