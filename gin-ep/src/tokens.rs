// SPDX-License-Identifier: MIT OR Apache-2.0
//! Tokens of a dispatch, their plan, and checks of memory.

use crate::{Element, EpError, Scales};
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

impl<'a> Ids<'a> {
    /// Makes them of memory with ids of 64 bits if `is_wide`, of 32 bits otherwise.
    #[must_use]
    pub const fn new(memory: &'a MemorySlice, is_wide: bool) -> Self {
        if is_wide { Self::I64(memory) } else { Self::I32(memory) }
    }
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
    /// The maximum number of tokens that it can have.
    pub(crate) max: u32,
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
    pub fn weights(mut self, weights: impl Into<Option<&'a MemorySlice>>) -> Self {
        self.weights = weights.into();
        self
    }

    /// Sets the scales of rows of [`Element::Opaque`](crate::Element::Opaque). The receiving ranks get them with the
    /// rows.
    #[must_use]
    pub fn scales(mut self, scales: impl Into<Option<&'a MemorySlice>>) -> Self {
        self.scales = scales.into();
        self
    }

    /// Sets a plan, which was made of the same ids. Its number of tokens holds.
    #[must_use]
    pub fn planned(mut self, plan: impl Into<Option<&'a Plan>>) -> Self {
        self.plan = plan.into();
        self
    }

    /// Returns the parameter of kernels, and the memory that they use.
    pub(crate) fn check(
        &self,
        sizes: &Sizes,
        element: Element,
    ) -> Result<(kernels::TokenParams, Vec<&'a MemorySlice>), EpError> {
        // With a number on the device, memory for the maximum is needed.
        let max: u64 = match (self.plan, self.count) {
            (Some(plan), _) => plan.max.into(),
            (None, Number::Is(count)) if count > sizes.tokens => {
                let limit =
                    format!("at most {}, for which the group has room; configure more by `tokens`", sizes.tokens);
                return Err(EpError::Limit { what: "the number of tokens of a batch", given: count.into(), limit });
            }
            (None, Number::Is(count)) => count.into(),
            (None, Number::At(_)) => sizes.tokens.into(),
        };
        let ids = max * u64::from(sizes.topk);
        let makes_scales = matches!(element, Element::E4m3(_));
        let source = u64::from(sizes.row_bytes) * if makes_scales { 2 } else { 1 };
        let mut params = kernels::TokenParams {
            rows: address("the memory of rows", self.rows, max * source, 16)?,
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
                params.scales = address("the memory of scales", scales, max * u64::from(sizes.scale_bytes), 1)?;
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
            (Some(Plan { memory, sizes: of, max }), _) => {
                if of != sizes {
                    let remedy = "make one by a slot of this group";
                    return Err(EpError::Unsuited { what: "a plan of a group with other sizes", remedy });
                }
                (params.plan, params.count) = (memory.address(), *max);
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
