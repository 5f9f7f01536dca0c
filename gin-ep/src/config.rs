// SPDX-License-Identifier: MIT OR Apache-2.0
//! The configuration of a group.

use crate::EpError;
use gin_abi::Deadline;
use gin_ep_kernels::{MOST_THREADS, Sizes};

/// The most bytes of a row.
const MOST_ROW_BYTES: u64 = 64 << 10;
/// The most ranks: bits of a word.
const MOST_RANKS: u64 = 64;
/// The most ids of a token: lanes of a warp.
const MOST_TOPK: u64 = 32;
/// The most experts.
const MOST_EXPERTS: u64 = 65_536;
/// The most shared memory that a block counts tokens in, in bytes.
const MOST_SHARED: u64 = 48 << 10;

/// Sizes of a [`Group`](crate::Group). All ranks pass the same.
///
/// ```
/// use gin_ep::GroupConfig;
///
/// let config = GroupConfig::new(256, 7168, 8).tokens(128).lanes(1);
/// // Two slots with 128 rows of each rank, there and back, of 14,336 bytes; 80 bytes for each row there; and flags.
/// assert_eq!(config.footprint(2)?, 14_721_280);
/// assert!(config.tokens(200_000).footprint(8).is_err());
/// # Ok::<(), gin_ep::EpError>(())
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct GroupConfig {
    pub(crate) experts: u32,
    pub(crate) hidden: u32,
    pub(crate) topk: u32,
    pub(crate) tokens: u32,
    pub(crate) lanes: u32,
    pub(crate) blocks: Option<u32>,
    pub(crate) grid: Option<u32>,
    pub(crate) threads: u32,
    pub(crate) deadline: Deadline,
}

impl GroupConfig {
    /// Makes the configuration of a model with `experts` experts on all ranks together, rows of `hidden` elements, and
    /// `topk` experts for each token. A rank has room for 128 tokens and one lane, and waits for 1 s.
    pub const fn new(experts: u32, hidden: u32, topk: u32) -> Self {
        Self {
            experts,
            hidden,
            topk,
            tokens: 128,
            lanes: 1,
            blocks: None,
            grid: None,
            threads: MOST_THREADS,
            deadline: Deadline::after_ms(1000),
        }
    }

    /// Sets the most tokens of a rank's dispatch.
    #[must_use]
    pub const fn tokens(mut self, tokens: u32) -> Self {
        self.tokens = tokens;
        self
    }

    /// Sets the number of lanes. Each has memory of its own.
    #[must_use]
    pub const fn lanes(mut self, lanes: u32) -> Self {
        self.lanes = lanes;
        self
    }

    /// Sets the most processors (SMs) that a kernel takes: it has at most as many blocks. The default is all.
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

    /// Sets the number of threads of a block: a multiple of 32, at most 512.
    #[must_use]
    pub const fn threads(mut self, threads: u32) -> Self {
        self.threads = threads;
        self
    }

    /// Sets how long a rank waits for another before it goes on without it.
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
        Ok(self.sizes(ranks)?.lane_bytes() * u64::from(self.lanes))
    }

    /// Returns the sizes for kernels, if they are within the limits.
    pub(crate) fn sizes(&self, ranks: u32) -> Result<Sizes, EpError> {
        let limit = |what, given: u64, least: u64, most: u64| {
            if given < least {
                Err(EpError::Limit { what, given, limit: format!("at least {least}") })
            } else if given > most {
                Err(EpError::Limit { what, given, limit: format!("at most {most}") })
            } else {
                Ok(())
            }
        };
        let row_bytes = 2 * u64::from(self.hidden);
        limit("the number of ranks", ranks.into(), 1, MOST_RANKS)?;
        limit("the number of experts", self.experts.into(), 1, MOST_EXPERTS)?;
        limit("the number of experts of a token", self.topk.into(), 1, MOST_TOPK)?;
        limit("the number of bytes of a row", row_bytes, 16, MOST_ROW_BYTES)?;
        limit("the number of lanes", self.lanes.into(), 1, 64)?;
        limit("the number of tokens", self.tokens.into(), 1, 65_536)?;
        for (what, blocks) in [("the number of SMs", self.blocks), ("the number of blocks", self.grid)] {
            limit(what, blocks.unwrap_or(1).into(), 1, 65_535)?;
        }
        limit("the number of threads of a block", self.threads.into(), 32, MOST_THREADS.into())?;
        for (what, given, unit) in [
            ("the number of bytes of a row", row_bytes, 16),
            ("the number of threads of a block", self.threads.into(), 32),
        ] {
            if !u64::is_multiple_of(given, unit) {
                return Err(EpError::Limit { what, given, limit: format!("a multiple of {unit}") });
            }
        }
        let shared = self.shared_bytes(ranks);
        if shared > MOST_SHARED {
            // One word for each 32 tokens and each rank and one more.
            let limit = format!("at most {} with {ranks} ranks", MOST_SHARED / 4 / (u64::from(ranks) + 1) * 32);
            return Err(EpError::Limit { what: "the number of tokens", given: self.tokens.into(), limit });
        }
        let Self { experts, topk, tokens, .. } = *self;
        Ok(Sizes { row_bytes: row_bytes as u32, tokens, topk, experts, ranks, reserved: 0 })
    }

    /// Returns the bytes of shared memory of a block.
    pub(crate) fn shared_bytes(&self, ranks: u32) -> u64 {
        4 * u64::from(self.tokens.div_ceil(32)) * (u64::from(ranks) + 1)
    }
}
