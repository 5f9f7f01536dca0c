// SPDX-License-Identifier: MIT OR Apache-2.0
//! Products of the experts' rows.

use crate::group::GroupState;
use crate::matmul::scale_tables;
use crate::multiplier::{Instructions, Multiplier};
use crate::tokens::address;
use crate::{Element, EpError, Group, Permuted, Scales};
use gin_ep_kernels as kernels;
use gin_ep_kernels::matmul::{Grouped, ScaleTables};
use gin_ep_kernels::permute::EXPERT_MAJOR_PACKED;
use gin_ep_kernels::{SCALED, Sizes};
use gin_gpu::MemorySlice;

/// The kernel of products of the experts' rows, and its shape, for a group.
///
/// The experts of a rank multiply rows of `depth` elements, and one row comes back for each id: the group has
/// [`combine_at_source`](crate::GroupConfig::combine_at_source), and the returned rows are BF16.
#[derive(Debug)]
pub struct GroupedMatmul {
    pub(crate) multiplier: Multiplier,
    sizes: Sizes,
    depth: u32,
    is_e4m3: bool,
    /// Received rows have FP32 scales, as [`Experts::scales`] may use them.
    has_scales: bool,
}

impl GroupedMatmul {
    /// Prepares products with `depth` inner elements, by at most `blocks` blocks, or as many as the GPU runs at the
    /// same time.
    ///
    /// # Errors
    /// [`EpError::Limit`], [`EpError::Unsuited`], or an error of the device.
    pub fn new(group: &Group, depth: u32, blocks: Option<u32>) -> Result<Self, EpError> {
        Self::by(Instructions::Warpgroups, group, depth, blocks)
    }

    /// Prepares products of rows and weights of FP8 (E4M3) with [scales](Experts::scales), on an H100, an H200 or a
    /// virtual GPU. `depth` is a multiple of 128.
    ///
    /// # Errors
    /// As [`new`](Self::new); [`EpError::Unsuited`] on another GPU.
    pub fn e4m3(group: &Group, depth: u32, blocks: Option<u32>) -> Result<Self, EpError> {
        Self::make((Instructions::Warpgroups, true), group, depth, blocks)
    }

    /// Prepares products by these instructions, for tests.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    #[doc(hidden)]
    pub fn by(instructions: Instructions, group: &Group, depth: u32, blocks: Option<u32>) -> Result<Self, EpError> {
        Self::make((instructions, false), group, depth, blocks)
    }

    fn make(
        (instructions, is_e4m3): (Instructions, bool),
        group: &Group,
        depth: u32,
        blocks: Option<u32>,
    ) -> Result<Self, EpError> {
        let unit = if is_e4m3 { SCALED } else { 8 };
        if depth == 0 || !depth.is_multiple_of(unit) {
            let limit = format!("a multiple of {unit}, at least {unit}");
            return Err(EpError::Limit { what: "the number of inner elements", given: depth.into(), limit });
        }
        let group = &*group.state;
        check(group)?;
        // No block waits, so ranks that share a GPU need not share its SMs. Each slot has separate maps.
        let launches = group.slots.len() as u64;
        let name = if is_e4m3 { "ep_grouped_matmul_e4m3" } else { "ep_grouped_matmul" };
        let multiplier = Multiplier::new(group.comm.gpu(), name, instructions, (blocks, 1, launches))?;
        let has_scales = matches!(group.element, Element::E4m3(Scales::F32 | Scales::F32Powers));
        Ok(Self { multiplier, sizes: group.sizes(), depth, is_e4m3, has_scales })
    }
}

/// Checks that products can return to the ranks of their tokens.
pub(crate) fn check(group: &GroupState) -> Result<(), EpError> {
    if !group.combine_at_source || matches!(group.element, Element::F16 | Element::F32) {
        let what = "products of experts in a group that does not return BF16 for each id";
        return Err(EpError::Unsuited { what, remedy: "configure `combine_at_source`, and an element with BF16 back" });
    }
    if group.signals.is_some() {
        let what = "products of experts in a group with ranks that loads and stores do not reach";
        return Err(EpError::Unsuited { what, remedy: "multiply by kernels of your own, and pass `Rows::At`" });
    }
    Ok(())
}

/// The factors of the experts' products.
#[derive(Clone, Copy, Debug)]
pub struct Experts<'a> {
    permuted: &'a Permuted,
    rows: &'a MemorySlice,
    weights: &'a MemorySlice,
    scales: Option<(Option<&'a MemorySlice>, &'a MemorySlice)>,
}

impl<'a> Experts<'a> {
    /// Makes them of rows in the places of expert-major permuted rows, packed or as indices, and of weights. Each
    /// expert of this rank has a row of weights for each element of a product, like a linear layer.
    /// Both are BF16, or both are [E4M3](GroupedMatmul::e4m3).
    #[must_use]
    pub const fn new(permuted: &'a Permuted, rows: &'a MemorySlice, weights: &'a MemorySlice) -> Self {
        Self { permuted, rows, weights, scales: None }
    }

    /// Sets the FP32 scales of rows and weights of E4M3. `weights` has for each expert, for each 128 columns and the
    /// rest, a row of `depth / 128` scales: a scale for each 128 times 128 elements. `rows` has such a row for each
    /// place. Without `rows`, each row has the scales that it had when it was received, as the rows of a [`Permuted`]
    /// that the dispatch has made FP8.
    #[must_use]
    pub fn scales(mut self, rows: impl Into<Option<&'a MemorySlice>>, weights: &'a MemorySlice) -> Self {
        self.scales = Some((rows.into(), weights));
        self
    }

    /// Returns the parameters of the kernel for a slot, and the memory that it uses.
    pub(crate) fn check(
        &self,
        (grouped, slot): (&'a GroupedMatmul, u32),
        (received, of): (kernels::ReceivedRows, &Sizes),
        products: Products<'a>,
    ) -> Result<(kernels::PermutedRows, Grouped, Vec<&'a MemorySlice>), EpError> {
        let (to, sizes) = (self.permuted, &grouped.sizes);
        if to.sizes != *sizes || of != sizes {
            let remedy = "make `Permuted` and products for the group that received the rows";
            return Err(EpError::Unsuited { what: "products of rows of another group", remedy });
        }
        let layout = to.view(received, None);
        if layout.kind() != EXPERT_MAJOR_PACKED {
            let what = "products of experts in a layout that is not packed, expert-major";
            return Err(EpError::Unsuited {
                what,
                remedy: "use `Layout::ExpertMajorPacked` or `Layout::ExpertMajorIndices`",
            });
        }
        let (capacity, columns) = (u64::from(to.capacity), sizes.combine_bytes / 2);
        let depth_bytes = u64::from(grouped.depth) * if grouped.is_e4m3 { 1 } else { 2 };
        let all = u64::from(sizes.local()) * u64::from(columns) * depth_bytes;
        let mut params = Grouped {
            rows: address("the memory of the experts' rows", self.rows, capacity * depth_bytes, 16)?,
            weights: address("the memory of the experts' weights", self.weights, all, 16)?,
            output: 0,
            maps: grouped.multiplier.maps(slot),
            scales: self.scale_tables(grouped, columns)?,
            depth: grouped.depth,
            columns,
        };
        let mut used = to.used();
        used.extend([self.rows, self.weights].into_iter().chain(grouped.multiplier.used()));
        used.extend(self.scales.into_iter().flat_map(|(rows, weights)| rows.into_iter().chain([weights])));
        if let Products::At(memory) = products {
            let needed = capacity * u64::from(sizes.combine_bytes);
            params.output = address("the memory of the products", memory, needed, 16)?;
            used.push(memory);
        }
        Ok((layout, params, used))
    }

    /// Returns the addresses of the scales. The address for rows is 0 if the rows were received with their scales.
    fn scale_tables(&self, grouped: &GroupedMatmul, columns: u32) -> Result<ScaleTables, EpError> {
        let capacity = u64::from(self.permuted.capacity);
        let blocks = u64::from(grouped.sizes.local()) * u64::from(columns.div_ceil(SCALED));
        let scales = self.scales.map(|(rows, weights)| (rows.map(|rows| (rows, capacity)), (weights, blocks)));
        let tables = scale_tables(grouped.is_e4m3, scales, grouped.depth)?;
        if grouped.is_e4m3 && tables.rows == 0 && (!grouped.has_scales || grouped.depth != grouped.sizes.row_bytes) {
            let what = "products with the scales of received rows, which are no FP32 scales of these inner elements";
            let remedy = "pass scales of the rows, or configure rows of E4M3 with FP32 scales";
            return Err(EpError::Unsuited { what, remedy });
        }
        Ok(tables)
    }
}

/// The destination of the experts' products.
#[derive(Clone, Copy, Debug)]
pub enum Products<'a> {
    /// To the ranks of their tokens. A combine of [`Rows::Returned`](crate::Rows::Returned) adds them up.
    Return,
    /// Into memory of this rank, in the places of the permuted rows.
    At(&'a MemorySlice),
}
