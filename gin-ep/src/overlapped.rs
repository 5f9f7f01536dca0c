// SPDX-License-Identifier: MIT OR Apache-2.0
//! Products of received rows, which begin before the rows of all sources are there.

use crate::grouped::check;
use crate::matmul::scale_tables;
use crate::multiplier::{Instructions, Multiplier};
use crate::tokens::address;
use crate::{Element, EpError, Group, Scales};
use gin_ep_kernels::matmul::Overlapped;
use gin_ep_kernels::{SCALED, Sizes};
use gin_gpu::{Memory, MemoryKind, MemorySlice};

/// The kernel that multiplies received rows as they arrive, for a group:
/// [`Sent::multiply`](crate::Sent::multiply) launches it.
///
/// The experts of a rank multiply the received rows, which are BF16, or E4M3 with FP32 scales. Each id returns one row,
/// so the group has [`combine_at_source`](crate::GroupConfig::combine_at_source). Rows of E4M3 are multiplied
/// on an H100, an H200 or a virtual GPU. Each slot has separate state, so slots may use it on
/// several streams.
#[derive(Debug)]
pub struct OverlappedMatmul {
    pub(crate) multiplier: Multiplier,
    /// The number of the group.
    group: u64,
    sizes: Sizes,
    is_e4m3: bool,
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
        let (name, is_e4m3) = match group.element {
            Element::Bf16 => ("ep_overlapped_matmul", false),
            Element::E4m3(Scales::F32 | Scales::F32Powers) => ("ep_overlapped_matmul_e4m3", true),
            _ => {
                let what = "products of received rows that are not BF16, or E4M3 with FP32 scales";
                return Err(EpError::Unsuited { what, remedy: "make BF16 of them, and use `GroupedMatmul`" });
            }
        };
        let (gpu, sizes) = (group.comm.gpu(), group.sizes());
        let slots = group.slots.len() as u64;
        let multiplier = Multiplier::new(gpu, name, instructions, (blocks, group.shares, slots))?;
        let bytes = Overlapped::state_bytes(&sizes) * slots;
        let state = Memory::new(gpu, MemoryKind::Device, bytes)?.whole();
        Ok(Self { multiplier, group: group.number, sizes, is_e4m3, state })
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
        Weights { elements: weights, scales }: Weights<'a>,
    ) -> Result<(Overlapped, Vec<&'a MemorySlice>), EpError> {
        if group != self.group {
            let remedy = "make one for the group of the slot";
            return Err(EpError::Unsuited { what: "products of rows of another group", remedy });
        }
        let (sizes, columns) = (&self.sizes, self.sizes.combine_bytes / 2);
        let depth = sizes.row_bytes / if self.is_e4m3 { 1 } else { 2 };
        let all = u64::from(sizes.local()) * u64::from(columns) * u64::from(sizes.row_bytes);
        let blocks = u64::from(sizes.local()) * u64::from(columns.div_ceil(SCALED));
        let tables = scale_tables(self.is_e4m3, scales.map(|scales| (None, (scales, blocks))), depth)?;
        let weights_at = address("the memory of the experts' weights", weights, all, 16)?;
        let state = self.state.address() + u64::from(slot) * Overlapped::state_bytes(sizes);
        let lists = state + Overlapped::lists_at(sizes);
        let maps = self.multiplier.maps(slot);
        let mut used = vec![weights, &self.state];
        used.extend(self.multiplier.used().into_iter().chain(scales));
        let weight_scales = tables.weights;
        Ok((Overlapped { weights: weights_at, state, lists, maps, weight_scales, depth, columns }, used))
    }
}

/// The weights of the experts of a rank, for [`Sent::multiply`](crate::Sent::multiply): as in
/// [`Experts::new`](crate::Experts::new). Memory without scales becomes weights of BF16.
#[derive(Clone, Copy, Debug)]
pub struct Weights<'a> {
    elements: &'a MemorySlice,
    scales: Option<&'a MemorySlice>,
}

impl<'a> Weights<'a> {
    /// Makes weights of E4M3 with FP32 scales, which are as in [`Experts::scales`](crate::Experts::scales).
    #[must_use]
    pub const fn e4m3(elements: &'a MemorySlice, scales: &'a MemorySlice) -> Self {
        Self { elements, scales: Some(scales) }
    }
}

impl<'a> From<&'a MemorySlice> for Weights<'a> {
    fn from(elements: &'a MemorySlice) -> Self {
        Self { elements, scales: None }
    }
}
