// SPDX-License-Identifier: MIT OR Apache-2.0
//! The configuration of a group.

use crate::EpError;
use gin_abi::Deadline;
use gin_abi::handle::{BackendKind, NEAR_WORDS};
use gin_ep_kernels::{
    Bytes, COUNT_IN_DISPATCH, Divisor, Format, LARGE_UNIT, MAX_NETWORK_THREADS, MAX_THREADS, Network, Quantized,
    SCALED, Sizes, UNIT,
};
use std::fmt;

/// The maximum number of bytes of a row.
const MAX_ROW_BYTES: u64 = 64 << 10;
/// The maximum number of ranks: bits of a word.
const MAX_RANKS: u64 = 64;
/// The maximum number of ids of a token: lanes of a warp.
const MAX_TOPK: u64 = 32;
/// The maximum number of experts.
const MAX_EXPERTS: u64 = 65_536;
/// Bytes of a signal: its words in the window, for GPUs and for CPU threads, and its near words.
const SIGNAL_BYTES: u64 = 8 * (3 + NEAR_WORDS);
/// The number of threads of a block for few tokens: each of its warps counts 32 of them.
const FEW_THREADS: u32 = 256;
const FEW_TOKENS: u32 = 256;
/// Units of rows for a block: as many as the warps of 256 threads. More blocks would make a small dispatch slower.
const UNITS: u64 = 8;

/// The elements of rows.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Element {
    /// BF16, there and back.
    Bf16,
    /// IEEE's binary16, there and back.
    F16,
    /// FP32, there and back.
    F32,
    /// BF16, which the dispatch makes FP8 (E4M3) with scales of 128 elements. The returned rows are BF16.
    E4m3(Scales),
    /// Any bytes, which are copied, with scales of any bytes: MXFP8, NVFP4 and others. The returned rows are BF16.
    Opaque {
        /// Bytes of a row.
        row_bytes: u32,
        /// Bytes of its scales; 0 if there are none.
        scale_bytes: u32,
    },
}

/// The type of scales that a dispatch makes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Scales {
    /// FP32: the greatest magnitude, at least 1e-4, divided by 448.
    F32,
    /// FP32: that, rounded up to a power of two.
    F32Powers,
    /// UE8M0: the same power of two. One byte, its exponent.
    Ue8m0,
}

/// Sizes of a [`Group`](crate::Group). All ranks pass the same.
///
/// ```
/// use gin_ep::GroupConfig;
///
/// let config = GroupConfig::new(256, 7168, 8).tokens(128).slots(1);
/// // Two buffers with 128 rows of each rank, there and back, of 14,336 bytes; 80 bytes for each row there; 4 bytes for
/// // each id; and flags.
/// assert_eq!(config.footprint(2)?, 14_725_504);
/// assert!(config.tokens(200_000).footprint(8).is_err());
/// # Ok::<(), gin_ep::EpError>(())
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct GroupConfig {
    pub(crate) experts: u32,
    pub(crate) hidden: u32,
    pub(crate) topk: u32,
    pub(crate) tokens: u32,
    pub(crate) slots: u32,
    pub(crate) element: Element,
    pub(crate) combine_at_source: bool,
    pub(crate) combine_f32: bool,
    pub(crate) max_rows: Option<u32>,
    pub(crate) first_epoch: u64,
    pub(crate) blocks: Option<u32>,
    pub(crate) grid: Option<u32>,
    pub(crate) groups: Option<u32>,
    pub(crate) threads: Option<u32>,
    pub(crate) deadline: Deadline,
}

impl fmt::Display for GroupConfig {
    /// Writes all values, by the names of the calls that set them.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let values: Vec<String> = self.values().iter().map(|(name, value)| format!("{name} {value}")).collect();
        f.write_str(&values.join(", "))
    }
}

impl GroupConfig {
    /// Makes the configuration of a model with `experts` experts on all ranks together, rows of `hidden` elements, and
    /// `topk` experts for each token. Elements are BF16, and one row comes back for each rank of a token. A rank has
    /// room for 128 tokens and one slot, and waits for 1 s.
    pub const fn new(experts: u32, hidden: u32, topk: u32) -> Self {
        Self {
            experts,
            hidden,
            topk,
            tokens: 128,
            slots: 1,
            element: Element::Bf16,
            combine_at_source: false,
            combine_f32: false,
            max_rows: None,
            first_epoch: 0,
            blocks: None,
            grid: None,
            groups: None,
            threads: None,
            deadline: Deadline::after_ms(1000),
        }
    }

    /// Sets the maximum number of tokens of a rank's dispatch.
    #[must_use]
    pub const fn tokens(mut self, tokens: u32) -> Self {
        self.tokens = tokens;
        self
    }

    /// Sets the number of slots. Each has separate memory, and its kernels take at most its part of the GPU.
    #[must_use]
    pub const fn slots(mut self, slots: u32) -> Self {
        self.slots = slots;
        self
    }

    /// Sets the type of elements.
    #[must_use]
    pub const fn element(mut self, element: Element) -> Self {
        self.element = element;
        self
    }

    /// Makes the combine take one row for each id of a token, in place of one for each rank. The source multiplies them
    /// by weights and adds them up. It takes `topk` times the memory.
    #[must_use]
    pub const fn combine_at_source(mut self) -> Self {
        self.combine_at_source = true;
        self
    }

    /// Makes the returned row for each rank have FP32 elements, in place of BF16. So the rank does not round the
    /// sum of its experts, and the row takes twice the bytes. [`Element`] is one with BF16 back, and sums and bias are
    /// of BF16.
    ///
    /// ```
    /// use gin_ep::GroupConfig;
    ///
    /// let config = GroupConfig::new(256, 7168, 8);
    /// assert_eq!(config.footprint(2)?, 14_725_504);
    /// assert_eq!(config.combine_f32().footprint(2)?, 14_725_504 + 2 * 2 * 128 * 2 * 7168);
    /// # Ok::<(), gin_ep::EpError>(())
    /// ```
    #[must_use]
    pub const fn combine_f32(mut self) -> Self {
        self.combine_f32 = true;
        self
    }

    /// Makes all sources share one region of a receiver, which has room for this many rows, in place of a region for
    /// each source and buffer: for large batches. Rows lie there by source and token, without gaps, so a flat layout
    /// needs no copy. Before a dispatch the ranks tell each other the numbers of their rows, which takes a kernel and
    /// two flags.
    ///
    /// If a rank receives more rows, the first ones have places, and the status of this rank and of their sources
    /// reports [`Code::Full`](crate::Code::Full). Loads and stores reach all ranks, and one row comes back for each
    /// rank. The longer one of a row there and a row back counts for the memory.
    ///
    /// ```
    /// use gin_ep::GroupConfig;
    ///
    /// // Each of 8 ranks receives no more rows than it has tokens.
    /// let config = GroupConfig::new(256, 7168, 8).tokens(4096);
    /// assert_eq!(config.footprint(8)?, 1_884_427_168);
    /// assert_eq!(config.max_rows(4096).footprint(8)?, 59_184_160);
    /// # Ok::<(), gin_ep::EpError>(())
    /// ```
    #[must_use]
    pub const fn max_rows(mut self, rows: u32) -> Self {
        self.max_rows = Some(rows);
        self
    }

    /// Sets the number of dispatches that the slots have made already, for tests of large numbers.
    #[doc(hidden)]
    #[must_use]
    pub const fn first_epoch(mut self, epoch: u64) -> Self {
        self.first_epoch = epoch;
        self
    }

    /// Sets the number of groups of 32 tokens whose routing a block has at a time, for tests of several rounds.
    #[doc(hidden)]
    #[must_use]
    pub const fn groups(mut self, groups: u32) -> Self {
        self.groups = Some(groups);
        self
    }

    /// Sets the maximum number of SMs that a kernel takes: it has at most as many blocks. The default is all.
    #[must_use]
    pub const fn sms(mut self, sms: u32) -> Self {
        self.blocks = Some(sms);
        self
    }

    /// Sets the number of blocks of a kernel, also if not all can be resident. One resident block suffices, so this
    /// changes nothing but the time.
    #[must_use]
    pub const fn grid(mut self, blocks: u32) -> Self {
        self.grid = Some(blocks);
        self
    }

    /// Sets the number of threads of a block: a multiple of 32, at most 512, or at most 256 if loads and stores do not
    /// reach all ranks. The default is 512. It is 256 if they do not, or if a rank has room for at most 256 tokens and
    /// kernels take all SMs, because a small dispatch is faster with fewer warps.
    #[must_use]
    pub const fn threads(mut self, threads: u32) -> Self {
        self.threads = Some(threads);
        self
    }

    /// Sets how long a rank waits for another before it goes on without it. With [`max_rows`](Self::max_rows) it waits
    /// as long for the number of rows, and three times as long for rows.
    #[must_use]
    pub const fn deadline(mut self, deadline: Deadline) -> Self {
        self.deadline = deadline;
        self
    }

    /// Returns the bytes that a group takes on each of `ranks` ranks. Allocates nothing.
    ///
    /// # Errors
    /// [`EpError::Limit`].
    pub fn footprint(&self, ranks: u32) -> Result<u64, EpError> {
        let sizes = self.sizes(ranks)?;
        let plan = if self.has_plan() { sizes.plan_bytes() } else { 0 };
        Ok((sizes.slot_bytes() + plan) * u64::from(self.slots))
    }

    /// Returns the bytes that a group takes on each of `ranks` ranks, if loads and stores reach the `near` ranks of its
    /// LSA team, and a network the others. Allocates nothing.
    ///
    /// # Errors
    /// [`EpError::Limit`], if `near` is not between 1 and the number of ranks, or blocks have too many threads.
    pub fn network_footprint(&self, ranks: u32, near: u32) -> Result<u64, EpError> {
        let (given, sizes) = (near.into(), self.sizes(ranks)?);
        if near == 0 || near > ranks {
            let limit = format!("from 1 to {ranks}, the number of ranks");
            return Err(EpError::Limit { what: "the number of ranks of an LSA team", given, limit });
        }
        if near == ranks {
            return self.footprint(ranks);
        }
        self.is_near_only()?;
        self.block_over(true)?;
        let more = Network::slot_bytes(&sizes, near) + SIGNAL_BYTES * Network::signals(&sizes);
        Ok(self.footprint(ranks)? + more * u64::from(self.slots))
    }

    /// Returns the values that all ranks pass alike, by the names of the calls that set them.
    pub(crate) fn values(&self) -> Vec<(&'static str, String)> {
        let given = |value: Option<u32>| value.map_or_else(|| "not set".to_owned(), |value| value.to_string());
        let element = match self.element {
            Element::Opaque { row_bytes, scale_bytes } => format!("Opaque({row_bytes}, {scale_bytes})"),
            other => format!("{other:?}"),
        };
        vec![
            ("experts", self.experts.to_string()),
            ("hidden", self.hidden.to_string()),
            ("topk", self.topk.to_string()),
            ("tokens", self.tokens.to_string()),
            ("slots", self.slots.to_string()),
            ("element", element),
            ("combine_at_source", self.combine_at_source.to_string()),
            ("combine_f32", self.combine_f32.to_string()),
            ("max_rows", given(self.max_rows)),
            ("sms", given(self.blocks)),
            ("grid", given(self.grid)),
            ("threads", given(self.threads)),
            ("deadline", self.deadline.to_string()),
            ("first_epoch", self.first_epoch.to_string()),
            ("groups", given(self.groups)),
        ]
    }

    /// Returns an error if rows cannot reach ranks over a network.
    pub(crate) fn is_near_only(&self) -> Result<(), EpError> {
        if self.max_rows.is_none() {
            return Ok(());
        }
        let what = "a group with `max_rows` and ranks that loads and stores do not reach";
        Err(EpError::Unsuited { what, remedy: "leave `max_rows` out, which takes memory for each source" })
    }

    /// Returns whether each dispatch makes a plan first.
    pub(crate) fn has_plan(&self) -> bool {
        self.tokens > COUNT_IN_DISPATCH || self.max_rows.is_some()
    }

    /// Returns the number of threads of a block, of kernels that post to a network if `is_remote`.
    ///
    /// # Errors
    /// [`EpError::Limit`] if such kernels have fewer threads than were asked for.
    pub(crate) fn block_over(&self, is_remote: bool) -> Result<u32, EpError> {
        let max = if is_remote { MAX_NETWORK_THREADS } else { MAX_THREADS };
        if let Some(given) = self.threads
            && given > max
        {
            let limit = format!("at most {max} if loads and stores do not reach all ranks");
            return Err(EpError::Limit { what: "the number of threads of a block", given: given.into(), limit });
        }
        Ok(self.block().min(max))
    }

    /// Returns the number of threads of a block.
    fn block(&self) -> u32 {
        let is_small = self.tokens <= FEW_TOKENS && self.blocks.is_none();
        self.threads.unwrap_or(if is_small { FEW_THREADS } else { MAX_THREADS })
    }

    /// Returns the number of blocks that have work, if all tokens are there.
    pub(crate) fn useful_blocks(&self, sizes: &Sizes) -> u64 {
        let units = u64::from(sizes.combine_bytes.max(sizes.row_bytes)).div_ceil(16 * u64::from(UNIT));
        (u64::from(sizes.tokens) * u64::from(sizes.combine_rows) * units).div_ceil(UNITS)
    }

    /// Returns the sizes for kernels, if they are within the limits.
    pub(crate) fn sizes(&self, ranks: u32) -> Result<Sizes, EpError> {
        let limit = |what, given: u64, least: u64, max: u64| {
            if given < least {
                Err(EpError::Limit { what, given, limit: format!("at least {least}") })
            } else if given > max {
                Err(EpError::Limit { what, given, limit: format!("at most {max}") })
            } else {
                Ok(())
            }
        };
        let hidden = u64::from(self.hidden);
        self.check_hidden()?;
        let (row_bytes, combine_bytes, scale_bytes) = match self.element {
            Element::Bf16 | Element::F16 => (2 * hidden, 2 * hidden, 0),
            Element::F32 => (4 * hidden, 4 * hidden, 0),
            Element::E4m3(Scales::F32 | Scales::F32Powers) => (hidden, 2 * hidden, 4 * hidden / u64::from(SCALED)),
            Element::E4m3(Scales::Ue8m0) => (hidden, 2 * hidden, hidden / u64::from(SCALED)),
            Element::Opaque { row_bytes, scale_bytes } => (row_bytes.into(), 2 * hidden, scale_bytes.into()),
        };
        let combine_bytes = if self.combine_f32 { 4 * hidden } else { combine_bytes };
        limit("the number of ranks", ranks.into(), 1, MAX_RANKS)?;
        limit("the number of experts", self.experts.into(), 1, MAX_EXPERTS)?;
        limit("the number of experts of a token", self.topk.into(), 1, MAX_TOPK)?;
        limit("the number of bytes of a row", row_bytes, 16, MAX_ROW_BYTES)?;
        limit("the number of bytes of the scales of a row", scale_bytes, 0, MAX_ROW_BYTES)?;
        limit("the number of slots", self.slots.into(), 1, 64)?;
        limit("the number of tokens", self.tokens.into(), 1, 65_536)?;
        if let Some(rows) = self.max_rows {
            let (given, max) = (u64::from(rows), u64::from(ranks) * u64::from(self.tokens));
            if given == 0 || given > max {
                let limit = format!("1 to {max}, which is all that {ranks} ranks with {} tokens send", self.tokens);
                return Err(EpError::Limit { what: "`max_rows`", given, limit });
            }
            if self.combine_at_source {
                let what = "a group with `max_rows` to which a row for each id comes back";
                return Err(EpError::Unsuited { what, remedy: "leave out `combine_at_source`, or `max_rows`" });
            }
        }
        if self.combine_f32 {
            if matches!(self.element, Element::F16 | Element::F32) {
                let what = "FP32 in place of BF16 in returned rows, in a group whose returned rows are not BF16";
                return Err(EpError::Unsuited { what, remedy: "leave out `combine_f32`" });
            }
            if self.combine_at_source {
                let what = "FP32 in place of BF16 in returned rows for each id";
                return Err(EpError::Unsuited { what, remedy: "leave out `combine_at_source`, or `combine_f32`" });
            }
        }
        for (what, blocks) in [("the number of SMs", self.blocks), ("the number of blocks", self.grid)] {
            limit(what, blocks.unwrap_or(1).into(), 1, 65_535)?;
        }
        limit("the number of threads of a block", self.block().into(), 32, MAX_THREADS.into())?;
        for (what, given, unit) in [
            ("the number of bytes of a row", row_bytes, 16),
            ("the number of threads of a block", self.block().into(), 32),
        ] {
            if !u64::is_multiple_of(given, unit) {
                return Err(EpError::Limit { what, given, limit: format!("a multiple of {unit}") });
            }
        }
        let Self { experts, topk, tokens, .. } = *self;
        let unit = if matches!(self.element, Element::E4m3(_)) { Quantized::UNIT } else { Bytes::UNIT };
        Ok(Sizes {
            row_bytes: row_bytes as u32,
            combine_bytes: combine_bytes as u32,
            combine_rows: if self.combine_at_source { topk } else { 1 },
            scale_bytes: scale_bytes as u32,
            tokens,
            topk,
            experts,
            ranks,
            owner: Divisor::new(experts.div_ceil(ranks)),
            units: Divisor::new((row_bytes as u32 / 16).div_ceil(unit)),
            sums: [UNIT, LARGE_UNIT].map(|unit| Divisor::new((combine_bytes as u32 / 16).div_ceil(unit))),
            groups: self.groups.unwrap_or(Sizes::groups_of(tokens, ranks)),
            meta_bytes: Sizes::meta_bytes_of(topk, scale_bytes as u32),
            max_rows: self.max_rows.unwrap_or(u32::MAX),
            pitch: (if self.max_rows.is_some() { row_bytes.max(combine_bytes) } else { row_bytes }) as u32,
        })
    }

    /// Checks the number of elements of a row, which has a multiple of 16 bytes there and back.
    fn check_hidden(&self) -> Result<(), EpError> {
        let back: u64 = if self.combine_f32 || self.element == Element::F32 { 4 } else { 2 };
        let (there, unit) = match self.element {
            Element::E4m3(_) => (2, SCALED.into()),
            Element::Bf16 | Element::F16 => (2, 8),
            Element::F32 => (4, 4),
            Element::Opaque { .. } => (back, 16 / back),
        };
        let (given, max) = (u64::from(self.hidden), MAX_ROW_BYTES / back.max(there));
        if given != 0 && given <= max && given.is_multiple_of(unit) {
            return Ok(());
        }
        let mut limit = format!("a multiple of {unit}, at most {max}");
        if given != 0 && given < max {
            limit = format!("{limit}: pad rows with zeros to {} elements", given.next_multiple_of(unit));
        }
        Err(EpError::Limit { what: "`hidden`, the number of elements of a row,", given, limit })
    }

    /// Returns the names of the kernels for dispatch and combine, which post to this network, if they do, and of the
    /// kernel for sums of a rank.
    pub(crate) fn kernels(&self, network: Option<BackendKind>) -> [String; 6] {
        let suffix = match network {
            None => "",
            Some(BackendKind::Proxy) => "_proxy",
            Some(BackendKind::Gdaki) => "_gdaki",
        };
        let (dispatch, mut back) = match self.element {
            Element::Bf16 | Element::Opaque { .. } => ("ep_dispatch", "bf16"),
            Element::F16 => ("ep_dispatch", "f16"),
            Element::F32 => ("ep_dispatch", "f32"),
            Element::E4m3(_) => ("ep_dispatch_e4m3", "bf16"),
        };
        if self.combine_f32 {
            back = "wide";
        }
        let send = dispatch.replace("dispatch", "send_rows");
        let of = |kind: &str| dispatch.replace("dispatch", kind);
        let (into, shared) = (of("dispatch_into"), of("dispatch_shared"));
        [
            format!("{dispatch}{suffix}"),
            into,
            shared,
            send,
            format!("ep_combine_{back}{suffix}"),
            format!("ep_reduce_{back}"),
        ]
    }
}
