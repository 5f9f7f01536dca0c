// SPDX-License-Identifier: MIT OR Apache-2.0
//! The metadata of rows in a layout, in memory of the program.

use crate::tokens::address;
use crate::{EpError, Layout, Permuted, Received};
use gin_ep_kernels::{MetadataParams, Sizes};
use gin_gpu::{KernelArg, LaunchConfig, MemorySlice, Plain, Stream};
use std::sync::Arc;

/// Memory of a program for the metadata of rows in a [`Layout`]. `None` stores nothing. Words have 32 bits, and each
/// memory begins at a multiple of 4 bytes. The rows of a layout are its [`capacity`](Permuted::capacity).
#[derive(Clone, Copy, Default, Debug)]
pub struct MetadataMemory<'a> {
    /// `[row][topk]` of a rank-major layout: the numbers of the row's experts, -1 for an expert of another rank.
    pub experts: Option<&'a MemorySlice>,
    /// The FP32 weights of the row: `[row][topk]` of a rank-major layout, with 0 where the expert is -1; `[row]` of an
    /// expert-major one.
    pub weights: Option<&'a MemorySlice>,
    /// `[row][scale]`. The bytes of a row's scales must be a multiple of 4.
    pub scales: Option<&'a MemorySlice>,
    /// `[row]`: the number of the row's token at its source.
    pub tokens: Option<&'a MemorySlice>,
    /// The number of rows from each source in a rank-major layout, of each expert of this rank in an expert-major one.
    pub counts: Option<&'a MemorySlice>,
    /// The number of the first row of each expert's zone, in a packed or fixed layout.
    pub offsets: Option<&'a MemorySlice>,
    /// The number of rows of each expert's zone with gaps, in a packed or fixed layout.
    pub zones: Option<&'a MemorySlice>,
    /// The number of rows with gaps: one word.
    pub total: Option<&'a MemorySlice>,
    /// The number of this rank's first expert in `experts`.
    pub first_expert: u32,
    /// The words of `experts` have 64 bits. Their memory begins at a multiple of 8 bytes.
    pub is_wide: bool,
}

impl MetadataMemory<'_> {
    /// Checks the memory, and returns the parameter of the kernel.
    fn check(&self, of: &Permuted, sizes: &Sizes) -> Result<MetadataParams, EpError> {
        of.check(sizes)?;
        let is_expert_major = of.is_expert_major();
        let unsuited = |what, remedy| Err(EpError::Unsuited { what, remedy });
        if of.layout() == Layout::ExpertMajorIndices {
            return unsuited("the metadata of a layout without rows", "use another layout");
        }
        if self.experts.is_some() && is_expert_major {
            return unsuited("memory for the experts of an expert-major layout's rows", "leave it out");
        }
        let has_zones = matches!(of.layout(), Layout::ExpertMajorPacked { .. } | Layout::ExpertMajorFixed);
        if (self.offsets.is_some() || self.zones.is_some()) && !has_zones {
            let remedy = "leave it out, or use a packed or fixed layout";
            return unsuited("memory for the zones of experts of a layout that has none", remedy);
        }
        if self.scales.is_some() && sizes.scale_bytes == 0 {
            let remedy = "leave it out, or configure an `Element` with scales";
            return unsuited("memory for scales in a group whose rows have none", remedy);
        }
        if self.scales.is_some() && !sizes.scale_bytes.is_multiple_of(4) {
            let (what, given) = ("the number of bytes of the scales of a row", u64::from(sizes.scale_bytes));
            let limit = "a multiple of 4 where they are stored with other metadata".to_owned();
            return Err(EpError::Limit { what, given, limit });
        }
        let rows = u64::from(of.capacity());
        let (each, numbers) = if is_expert_major { (1, sizes.local()) } else { (sizes.topk, sizes.ranks) };
        let place =
            |what, memory: Option<&MemorySlice>, bytes| memory.map_or(Ok(0), |memory| address(what, memory, bytes, 4));
        let (id, experts) = (if self.is_wide { 8 } else { 4 }, "the memory of the experts of rows");
        let experts = self.experts.map_or(Ok(0), |memory| address(experts, memory, id * rows * u64::from(each), id))?;
        Ok(MetadataParams {
            experts,
            weights: place("the memory of the weights of rows", self.weights, 4 * rows * u64::from(each))?,
            scales: place("the memory of the scales of rows", self.scales, rows * u64::from(sizes.scale_bytes))?,
            tokens: place("the memory of the tokens of rows", self.tokens, 4 * rows)?,
            counts: place("the memory of the counts of rows", self.counts, 4 * u64::from(numbers))?,
            offsets: place("the memory of the first rows of zones", self.offsets, 4 * u64::from(numbers))?,
            zones: place("the memory of the numbers of rows of zones", self.zones, 4 * u64::from(numbers))?,
            total: place("the memory of the number of rows", self.total, 4)?,
            first_expert: self.first_expert,
            is_wide: self.is_wide.into(),
        })
    }

    fn used(&self) -> impl Iterator<Item = &MemorySlice> {
        let of_rows = [self.experts, self.weights, self.scales, self.tokens];
        let of_zones = [self.counts, self.offsets, self.zones, self.total];
        of_rows.into_iter().chain(of_zones).flatten()
    }
}

impl Received<'_> {
    /// Stores the metadata of rows in memory of the program, at their places in the layout, in the order of the stream.
    /// The rows were put into the layout before, by [`permute`](Self::permute) or
    /// [`exchange_into`](crate::Slot::exchange_into). Places without a row keep their bytes.
    ///
    /// # Errors
    /// [`EpError::Short`] or [`EpError::Misaligned`] for memory, [`EpError::Unsuited`] for a layout of another group or
    /// memory that it does not use, [`EpError::Limit`] for scales whose bytes are no multiple of 4; an error of the
    /// device.
    pub fn store_metadata(
        &mut self,
        stream: &Arc<dyn Stream>,
        of: &Permuted,
        into: &MetadataMemory<'_>,
    ) -> Result<(), EpError> {
        let view = self.slot.permuted(of)?;
        let (slot, group) = (&self.slot, &self.slot.group);
        let params = into.check(of, &slot.group.sizes())?;
        let mut used = of.used();
        used.extend(into.used());
        slot.extend(stream, &used)?;
        let shape = LaunchConfig::new(group.shape.blocks() as u32, group.shape.threads() as u32);
        let arguments: [&dyn KernelArg; 2] = [&crate::View(view), &Plain(params)];
        // Safety: the rows were received and have places, and the memory was checked and is kept.
        unsafe { stream.launch(&group.metadata, group.following(shape), &arguments)? };
        Ok(())
    }
}
