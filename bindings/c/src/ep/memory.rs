// SPDX-License-Identifier: MIT OR Apache-2.0
//! Tokens and sums of a call, checked.

use super::state::{Core, Permuted, Plan};
use super::types::{gin_ep_combine_t, gin_ep_tokens_t};
use crate::status::{Failure, check_size, input};
use crate::table;
use gin_ep::{Combine, Ids, Number, Rows};
use gin_gpu::MemorySlice;
use std::sync::Arc;

/// The number of tokens of a dispatch.
enum Count {
    Is(u32),
    At(MemorySlice),
}

/// The memory of tokens.
pub(crate) struct Given {
    rows: MemorySlice,
    ids: MemorySlice,
    is_wide: bool,
    count: Count,
    weights: Option<MemorySlice>,
    scales: Option<MemorySlice>,
    plan: Option<Arc<Plan>>,
}

impl Given {
    /// Takes the tokens of a dispatch.
    pub(crate) fn take(core: &Arc<Core>, tokens: *const gin_ep_tokens_t) -> Result<Self, Failure> {
        let tokens = input(tokens, "tokens")?;
        check_size::<gin_ep_tokens_t>(tokens.size, "tokens", "GIN_EP_TOKENS_INIT")?;
        let is_wide = match tokens.id_bits {
            32 => false,
            64 => true,
            other => return Err(Failure::argument(format!("tokens.id_bits is {other}: ids have 32 or 64 bits"))),
        };
        let plan = if tokens.plan.id == 0 { None } else { Some(table::get::<Plan>(tokens.plan.id)?) };
        if let Some(plan) = &plan {
            core.check_own(&plan.core, "plan", tokens.plan.id)?;
        }
        let count_at = core.optional(&tokens.count_at, "tokens.count_at")?;
        if tokens.count != 0 && (plan.is_some() || count_at.is_some()) {
            let text =
                format!("tokens.count is {}, and `count_at` or `plan` has the number: leave one out", tokens.count);
            return Err(Failure::argument(text));
        }
        if plan.is_some() && count_at.is_some() {
            return Err(Failure::argument("tokens.count_at and tokens.plan both have the number: leave one out"));
        }
        Ok(Self {
            rows: core.memory(&tokens.rows, "tokens.rows")?,
            ids: core.memory(&tokens.ids, "tokens.ids")?,
            is_wide,
            count: count_at.map_or(Count::Is(tokens.count), Count::At),
            weights: core.optional(&tokens.weights, "tokens.weights")?,
            scales: core.optional(&tokens.scales, "tokens.scales")?,
            plan,
        })
    }

    /// Returns the tokens.
    pub(crate) fn tokens(&self) -> gin_ep::Tokens<'_> {
        let count = match &self.count {
            Count::Is(count) => Number::Is(*count),
            Count::At(memory) => Number::At(memory),
        };
        gin_ep::Tokens::new(&self.rows, Ids::new(&self.ids, self.is_wide), count)
            .weights(&self.weights)
            .scales(&self.scales)
            .planned(self.plan.as_ref().map(|plan| &plan.inner))
    }
}

/// The memory of a combine.
pub(crate) struct Sums {
    combine_at_source: bool,
    output: MemorySlice,
    weights: Option<MemorySlice>,
    bias: Option<MemorySlice>,
    accumulate: bool,
    returned: bool,
    rows: Option<MemorySlice>,
    permuted: Option<Arc<Permuted>>,
}

impl Sums {
    /// Takes the rows and sums of a combine.
    pub(crate) fn take(core: &Arc<Core>, combine: *const gin_ep_combine_t) -> Result<Self, Failure> {
        let combine = input(combine, "combine")?;
        check_size::<gin_ep_combine_t>(combine.size, "combine", "GIN_EP_COMBINE_INIT")?;
        let returned = combine.returned != 0;
        Ok(Self {
            combine_at_source: core.combine_at_source,
            output: core.memory(&combine.output, "combine.output")?,
            weights: core.optional(&combine.weights, "combine.weights")?,
            bias: core.optional(&combine.bias, "combine.bias")?,
            accumulate: combine.accumulate != 0,
            returned,
            rows: core.optional(&combine.rows, "combine.rows")?,
            permuted: if combine.permuted.id == 0 { None } else { Some(core.layout(combine.permuted)?) },
        })
    }

    /// Refuses rows of two places.
    pub(crate) fn check(&self) -> Result<(), Failure> {
        if self.returned && (self.rows.is_some() || self.permuted.is_some()) {
            let text = "combine.returned is 1, and `rows` or `permuted` has the rows: leave one out";
            return Err(Failure::argument(text));
        }
        Ok(())
    }

    /// Returns the returned rows.
    pub(crate) fn rows(&self) -> Rows<'_> {
        match (&self.permuted, &self.rows) {
            (None, None) if self.returned => Rows::Returned,
            (None, None) => Rows::InPlace,
            (None, Some(rows)) => Rows::At(rows),
            (Some(permuted), None) => Rows::Permuted(&permuted.inner),
            (Some(permuted), Some(rows)) => Rows::PermutedAt(&permuted.inner, rows),
        }
    }

    /// Returns the sums.
    pub(crate) fn combine(&self) -> Combine<'_> {
        let terms = match &self.weights {
            Some(weights) => Combine::weighted(weights),
            None if self.combine_at_source => Combine::plain(),
            None => Combine::reduced(),
        };
        let combine = terms.into(&self.output).bias(&self.bias);
        if self.accumulate { combine.accumulate() } else { combine }
    }
}
