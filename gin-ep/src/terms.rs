// SPDX-License-Identifier: MIT OR Apache-2.0
//! The memory of a call: tokens of a dispatch, rows and sums of a combine.

use crate::{Element, EpError, Group, Permuted, Scales};
use gin_ep_kernels as kernels;
use gin_ep_kernels::{EXPONENTS, POWERS, Sizes, WIDE_IDS};
use gin_gpu::MemorySlice;

/// The ids of tokens' experts: `topk` for each token, in memory of the device. An id is none if it is negative,
/// whichever negative number it is.
#[derive(Clone, Copy, Debug)]
pub enum Ids<'a> {
    /// Of 32 bits.
    I32(&'a MemorySlice),
    /// Of 64 bits.
    I64(&'a MemorySlice),
}

/// The number of tokens of a dispatch.
#[derive(Clone, Copy, Debug)]
pub enum Number<'a> {
    /// This many. The group has room for as many.
    Is(u32),
    /// As many as this word in memory of the device, a `u32`, says when the kernel runs. A word past `i32::MAX`, which
    /// is negative as an `i32`, counts as 0. That, and more tokens than the group has room for, is reported as
    /// [`Code::TooManyTokens`](crate::Code::TooManyTokens).
    At(&'a MemorySlice),
}

impl From<u32> for Number<'_> {
    fn from(count: u32) -> Self {
        Self::Is(count)
    }
}

/// The routing of tokens, counted once for several dispatches of the same ids: [`Slot::plan`](crate::Slot::plan).
#[derive(Debug)]
pub struct Plan {
    pub(crate) memory: MemorySlice,
    pub(crate) sizes: Sizes,
    /// The most tokens that it can have.
    pub(crate) most: u32,
}

/// The tokens of a rank's dispatch, in memory of the device.
#[derive(Clone, Copy, Debug)]
pub struct Tokens<'a> {
    rows: &'a MemorySlice,
    scales: Option<&'a MemorySlice>,
    ids: Ids<'a>,
    weights: Option<&'a MemorySlice>,
    count: Number<'a>,
    plan: Option<&'a Plan>,
}

impl<'a> Tokens<'a> {
    /// Makes them of rows, ids and their number. All weights are 1.
    pub fn new(rows: &'a MemorySlice, ids: Ids<'a>, count: impl Into<Number<'a>>) -> Self {
        Self { rows, scales: None, ids, weights: None, count: count.into(), plan: None }
    }

    /// Sets the number of tokens.
    #[must_use]
    pub fn count(mut self, count: impl Into<Number<'a>>) -> Self {
        self.count = count.into();
        self
    }

    /// Sets the weights: an `f32` for each id. The receiving ranks get them with the rows.
    #[must_use]
    pub fn weights(mut self, weights: &'a MemorySlice) -> Self {
        self.weights = Some(weights);
        self
    }

    /// Sets the scales of rows of [`Element::Opaque`](crate::Element::Opaque). The receiving ranks get them with the
    /// rows.
    #[must_use]
    pub fn scales(mut self, scales: &'a MemorySlice) -> Self {
        self.scales = Some(scales);
        self
    }

    /// Sets a plan, which was made of the same ids. Its number of tokens holds.
    #[must_use]
    pub fn planned(mut self, plan: &'a Plan) -> Self {
        self.plan = Some(plan);
        self
    }

    /// Returns the parameter of kernels, and the memory that they use.
    pub(crate) fn check(
        &self,
        sizes: &Sizes,
        element: Element,
    ) -> Result<(kernels::TokenParams, Vec<&'a MemorySlice>), EpError> {
        // With a number on the device, memory for the most is needed.
        let most: u64 = match (self.plan, self.count) {
            (Some(plan), _) => plan.most.into(),
            (None, Number::Is(count)) if count > sizes.tokens => {
                let limit =
                    format!("at most {}, for which the group has room; configure more by `tokens`", sizes.tokens);
                return Err(EpError::Limit { what: "the number of tokens of a batch", given: count.into(), limit });
            }
            (None, Number::Is(count)) => count.into(),
            (None, Number::At(_)) => sizes.tokens.into(),
        };
        let ids = most * u64::from(sizes.topk);
        let makes_scales = matches!(element, Element::E4m3(_));
        let source = u64::from(sizes.row_bytes) * if makes_scales { 2 } else { 1 };
        let mut params = kernels::TokenParams {
            rows: address("the memory of rows", self.rows, most * source, 16)?,
            scales: 0,
            ids: 0,
            weights: 0,
            count_at: 0,
            plan: 0,
            count: 0,
            flags: match element {
                Element::E4m3(Scales::F32Powers) => POWERS,
                Element::E4m3(Scales::Ue8m0) => POWERS | EXPONENTS,
                _ => 0,
            },
        };
        let memory = match self.ids {
            Ids::I32(memory) => {
                params.ids = address("the memory of ids", memory, 4 * ids, 4)?;
                memory
            }
            Ids::I64(memory) => {
                params.ids = address("the memory of ids", memory, 8 * ids, 8)?;
                params.flags |= WIDE_IDS;
                memory
            }
        };
        let mut used = vec![self.rows, memory];
        if let Some(weights) = self.weights {
            params.weights = address("the memory of weights", weights, 4 * ids, 4)?;
            used.push(weights);
        }
        match (self.scales, sizes.scale_bytes != 0 && !makes_scales) {
            (Some(scales), true) => {
                params.scales = address("the memory of scales", scales, most * u64::from(sizes.scale_bytes), 1)?;
                used.push(scales);
            }
            (None, false) => {}
            (Some(_), false) => {
                let remedy = "only `Element::Opaque` with `scale_bytes` takes them";
                return Err(EpError::Unsuited { what: "tokens with scales", remedy });
            }
            (None, true) => {
                let remedy = "pass them by `Tokens::scales`";
                return Err(EpError::Unsuited { what: "tokens without scales, which the group's rows have", remedy });
            }
        }
        match (self.plan, self.count) {
            (Some(Plan { memory, sizes: of, most }), _) => {
                if of != sizes {
                    let remedy = "make one by a slot of this group";
                    return Err(EpError::Unsuited { what: "a plan of a group with other sizes", remedy });
                }
                (params.plan, params.count) = (memory.address(), *most);
                used.push(memory);
            }
            (None, Number::Is(count)) => params.count = count,
            (None, Number::At(memory)) => {
                params.count_at = address("the memory of the number of tokens", memory, 4, 4)?;
                used.push(memory);
            }
        }
        Ok((params, used))
    }
}

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
    /// Rows in the places of those of permuted rows.
    PermutedAt(&'a Permuted, &'a MemorySlice),
    /// Rows that [`Received::multiply`](crate::Received::multiply) has sent to their sources.
    Returned,
}

impl<'a> Rows<'a> {
    /// Returns the expert-major rows that has these rows, their address, and the memory that kernels use.
    pub(crate) fn of_experts(&self, group: &Group<'_>) -> Result<(&'a Permuted, u64, Vec<&'a MemorySlice>), EpError> {
        let (what, sizes, each) = ("a sum of experts' rows", &group.sizes(), group.sum_bytes);
        let (to, memory) = match *self {
            Rows::Permuted(to) if each == sizes.row_bytes => (to, to.rows()),
            Rows::PermutedAt(to, memory) => (to, Some(memory)),
            Rows::Permuted(_) => {
                let what = "a sum of the permuted rows, where other rows come back";
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
            let what = "sums in place of the received rows, in a group where other rows come back";
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
    pub const fn bias(mut self, bias: &'a MemorySlice) -> Self {
        self.bias = Some(bias);
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
        group: &Group<'_>,
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
        let most = if tokens.count_at == 0 { tokens.count.min(sizes.tokens) } else { sizes.tokens };
        let (bytes, most, sum_bytes) = (u64::from(sizes.combine_bytes), u64::from(most), u64::from(group.sum_bytes));
        let mut sums = kernels::Sums {
            rows: 0,
            output: address("the memory of the output", self.output, most * sum_bytes, 16)?,
            bias: 0,
            weights: 0,
            row_map: 0,
            capacity: 0,
            flags: if self.accumulate { kernels::ACCUMULATE } else { 0 },
        };
        let mut used = vec![self.output];
        match rows {
            Rows::InPlace if combine_at_source || !sizes.is_shared() && sizes.combine_bytes != sizes.row_bytes => {
                let what = "a combine of the received rows, in a group where other rows come back";
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
                    let what = "a combine of a layout that has not the rows that come back";
                    let remedy = "use an expert-major layout with `combine_at_source`, and a flat one without";
                    return Err(EpError::Unsuited { what, remedy });
                }
                let memory = match (rows, to.rows()) {
                    (Rows::PermutedAt(_, memory), _) => memory,
                    (_, Some(memory)) if sizes.combine_bytes == sizes.row_bytes => memory,
                    _ => {
                        let what = "a combine of the permuted rows, where other rows come back";
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
            sums.bias = address("the memory of the bias", bias, most * sum_bytes, 16)?;
        }
        if let Some(Some(weights)) = self.terms.weights {
            used.push(weights);
            let needed = 4 * most * u64::from(sizes.topk);
            sums.weights = address("the memory of the combine's weights", weights, needed, 4)?;
        }
        Ok((sums, used))
    }
}

/// Returns the address of memory after a check of length and alignment.
pub(crate) fn address(what: &'static str, memory: &MemorySlice, needed: u64, align: u64) -> Result<u64, EpError> {
    let (address, given) = (memory.address(), memory.bytes());
    if given < needed {
        return Err(EpError::Short { what, given, needed });
    }
    if !address.is_multiple_of(align) {
        return Err(EpError::Misaligned { what, address, align });
    }
    Ok(address)
}
