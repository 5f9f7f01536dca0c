// SPDX-License-Identifier: MIT OR Apache-2.0
//! Rows and sums of a combine.

use crate::group::GroupState;
use crate::tokens::address;
use crate::{EpError, Permuted};
use gin_ep_kernels as kernels;
use gin_gpu::MemorySlice;

/// The rows that a combine returns.
#[derive(Clone, Copy, Debug)]
pub enum Rows<'a> {
    /// The received rows, which the experts have replaced. Their sources load them from there, which is faster than the
    /// other ways: these store the rows to their sources first.
    InPlace,
    /// Rows in the places of the received ones: for each rank as many as the group has tokens. With
    /// [`combine_at_source`](crate::GroupConfig::combine_at_source), one for each id in the place of each row. With
    /// [`max_rows`](crate::GroupConfig::max_rows), as many as that: the combine copies them to where the received rows
    /// are, from where their sources load them.
    At(&'a MemorySlice),
    /// Permuted rows, which the experts have replaced.
    Permuted(&'a Permuted),
    /// Other memory, with a row in the place of each permuted row.
    PermutedAt(&'a Permuted, &'a MemorySlice),
    /// Rows that [`Received::multiply`](crate::Received::multiply) has sent to their sources.
    Returned,
}

impl<'a> Rows<'a> {
    /// Returns the expert-major rows that has these rows, their address, and the memory that kernels use.
    pub(crate) fn of_experts(&self, group: &GroupState) -> Result<(&'a Permuted, u64, Vec<&'a MemorySlice>), EpError> {
        let (what, sizes, each) = ("a sum of experts' rows", &group.sizes(), group.sum_bytes);
        let (to, memory) = match *self {
            Rows::Permuted(to) if each == sizes.row_bytes => (to, to.rows()),
            Rows::PermutedAt(to, memory) => (to, Some(memory)),
            Rows::Permuted(_) => {
                let what = "a sum of the permuted rows, where other rows are returned";
                return Err(EpError::Unsuited { what, remedy: "pass them by `Rows::PermutedAt`" });
            }
            _ => return Err(EpError::Unsuited { what, remedy: "pass `Rows::Permuted` or `Rows::PermutedAt`" }),
        };
        if group.combine_at_source {
            let what = "a sum of experts' rows, in a group to which a row for each id comes back";
            return Err(EpError::Unsuited { what, remedy: "leave out `combine_at_source`, or call `combine`" });
        }
        if to.sizes != *sizes {
            let remedy = "make one for this group";
            return Err(EpError::Unsuited { what: "permuted rows of a group with other sizes", remedy });
        }
        let Some(memory) = memory.filter(|_| to.is_expert_major()) else {
            let what = "a sum of permuted rows of a layout that has no rows of experts";
            return Err(EpError::Unsuited {
                what,
                remedy: "use `Layout::ExpertMajorPacked` or `Layout::ExpertMajorPadded`, or other memory",
            });
        };
        if !sizes.is_shared() && sizes.combine_bytes != sizes.row_bytes {
            let what = "sums in place of the received rows, in a group where other rows are returned";
            return Err(EpError::Unsuited { what, remedy: "configure `max_rows`, or add up by a kernel of yours" });
        }
        let needed = u64::from(to.capacity) * u64::from(each);
        let rows = address("the memory of experts' rows", memory, needed, 16)?;
        let mut used = to.used();
        used.push(memory);
        Ok((to, rows, used))
    }
}

/// The terms of a combine's sums.
#[derive(Clone, Copy, Debug)]
pub struct Terms<'a> {
    weights: Option<Option<&'a MemorySlice>>,
}

impl<'a> Terms<'a> {
    /// Sets the memory of the sums: a row for each token.
    pub fn into(self, output: &'a MemorySlice) -> Combine<'a> {
        Combine { terms: self, output, bias: None, accumulate: false }
    }
}

/// The sums of a combine, in FP32, rounded once.
#[derive(Clone, Copy, Debug)]
pub struct Combine<'a> {
    terms: Terms<'a>,
    output: &'a MemorySlice,
    bias: Option<&'a MemorySlice>,
    accumulate: bool,
}

impl<'a> Combine<'a> {
    /// Adds up the rows of a token's ranks, in the order in which its ids name them first. The receiving ranks have
    /// multiplied by weights.
    #[must_use]
    pub const fn reduced() -> Terms<'a> {
        Terms { weights: None }
    }

    /// Adds up the rows of a token's ids in their order, each multiplied by its weight, an `f32`: by `fma`, in a group
    /// with [`combine_at_source`](crate::GroupConfig::combine_at_source).
    #[must_use]
    pub const fn weighted(weights: &'a MemorySlice) -> Terms<'a> {
        Terms { weights: Some(Some(weights)) }
    }

    /// Adds up the rows of a token's ids in their order, in a group with
    /// [`combine_at_source`](crate::GroupConfig::combine_at_source).
    #[must_use]
    pub const fn plain() -> Terms<'a> {
        Terms { weights: Some(None) }
    }

    /// Starts each sum from a row of the output's elements: one for each token.
    #[must_use]
    pub fn bias(mut self, bias: impl Into<Option<&'a MemorySlice>>) -> Self {
        self.bias = bias.into();
        self
    }

    /// Adds what is in the output before, after the bias.
    #[must_use]
    pub const fn accumulate(mut self) -> Self {
        self.accumulate = true;
        self
    }

    /// Returns the parameter of kernels, and the memory that they use.
    pub(crate) fn check(
        &self,
        group: &GroupState,
        tokens: &kernels::TokenParams,
        rows: Rows<'a>,
    ) -> Result<(kernels::Sums, Vec<&'a MemorySlice>), EpError> {
        let (sizes, combine_at_source) = (&group.sizes(), group.combine_at_source);
        match (self.terms.weights, combine_at_source) {
            (Some(_), false) => {
                let what = "a combine of one row for each id, in a group with one for each rank";
                return Err(EpError::Unsuited {
                    what,
                    remedy: "configure `combine_at_source`, or use `Combine::reduced`",
                });
            }
            (None, true) => {
                let what = "a combine of one row for each rank, in a group with one for each id";
                return Err(EpError::Unsuited { what, remedy: "use `Combine::weighted` or `Combine::plain`" });
            }
            _ => {}
        }
        let max = if tokens.count_at == 0 { tokens.count.min(sizes.tokens) } else { sizes.tokens };
        let (bytes, max, sum_bytes) = (u64::from(sizes.combine_bytes), u64::from(max), u64::from(group.sum_bytes));
        let mut sums = kernels::Sums {
            rows: 0,
            output: address("the memory of the output", self.output, max * sum_bytes, 16)?,
            bias: 0,
            weights: 0,
            row_map: 0,
            capacity: 0,
            flags: if self.accumulate { kernels::ACCUMULATE } else { 0 },
        };
        let mut used = vec![self.output];
        match rows {
            Rows::InPlace if combine_at_source || !sizes.is_shared() && sizes.combine_bytes != sizes.row_bytes => {
                let what = "a combine of the received rows, in a group where other rows are returned";
                return Err(EpError::Unsuited { what, remedy: "pass them by `Rows::At`" });
            }
            Rows::InPlace => {}
            // They are the received ones.
            Rows::Permuted(to) if to.is_received() && to.sizes == *sizes => used.extend(to.used()),
            Rows::Returned if !combine_at_source => {
                let what = "a combine of products of ids, in a group with one row for each rank";
                return Err(EpError::Unsuited { what, remedy: "configure `combine_at_source`" });
            }
            Rows::Returned => sums.flags |= kernels::RETURNED,
            Rows::At(memory) => {
                used.push(memory);
                sums.rows = address("the memory of returned rows", memory, sizes.combine_room() * bytes, 16)?;
            }
            Rows::Permuted(to) | Rows::PermutedAt(to, _) => {
                if to.sizes != *sizes {
                    let remedy = "make one for this group";
                    return Err(EpError::Unsuited { what: "permuted rows of a group with other sizes", remedy });
                }
                if to.is_expert_major() != combine_at_source {
                    let what = "a combine of a layout that has not the returned rows";
                    let remedy = "use an expert-major layout with `combine_at_source`, and a flat one without";
                    return Err(EpError::Unsuited { what, remedy });
                }
                let memory = match (rows, to.rows()) {
                    (Rows::PermutedAt(_, memory), _) => memory,
                    (_, Some(memory)) if sizes.combine_bytes == sizes.row_bytes => memory,
                    _ => {
                        let what = "a combine of the permuted rows, where other rows are returned";
                        return Err(EpError::Unsuited { what, remedy: "pass them by `Rows::PermutedAt`" });
                    }
                };
                let needed = u64::from(to.capacity) * bytes;
                sums.rows = address("the memory of returned rows", memory, needed, 16)?;
                (sums.row_map, sums.capacity) = (to.row_map(), to.capacity);
                used.push(memory);
                used.extend(to.used());
            }
        }
        if let Some(bias) = self.bias {
            used.push(bias);
            sums.bias = address("the memory of the bias", bias, max * sum_bytes, 16)?;
        }
        if let Some(Some(weights)) = self.terms.weights {
            used.push(weights);
            let needed = 4 * max * u64::from(sizes.topk);
            sums.weights = address("the memory of the combine's weights", weights, needed, 4)?;
        }
        Ok((sums, used))
    }
}
