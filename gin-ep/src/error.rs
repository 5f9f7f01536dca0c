// SPDX-License-Identifier: MIT OR Apache-2.0
//! Errors of calls, and errors of kernels as values.

use gin_ep_kernels::Code;
use gin_gpu::GpuError;
use gin_host::comm::CommError;
use std::fmt;

/// The error of a call. Nothing was launched then; only [`Group::destroy`](crate::Group::destroy) has done its work.
#[derive(Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum EpError {
    /// A size is outside the limits.
    #[error("{what} is {given}; the limit is {limit}")]
    Limit {
        /// The size.
        what: &'static str,
        /// Its value.
        given: u64,
        /// The minimum or the maximum, and why.
        limit: String,
    },
    /// The ranks were given different configurations.
    #[error(
        "rank {rank} has another configuration than this rank: `{what}` is {theirs} there and {ours} here; all ranks \
         pass the same"
    )]
    Differs {
        /// The first such rank.
        rank: u32,
        /// The first value that differs, by the name of the call that sets it.
        what: String,
        /// That rank's value.
        theirs: String,
        /// This rank's value.
        ours: String,
    },
    /// Loads and stores do not reach all ranks, and the call has no route over a network.
    #[error("loads and stores reach {reached} of {ranks} ranks, and this call has no route over a network")]
    NotReachable {
        /// The number of ranks that they reach.
        reached: u32,
        /// The number of ranks.
        ranks: u32,
    },
    /// There is no such slot, or it is in use.
    #[error("slot {slot} is {reason}")]
    Slot {
        /// Its number.
        slot: u32,
        /// The cause.
        reason: String,
    },
    /// Memory is too short.
    #[error("{what} has {given} bytes, {needed} are needed")]
    Short {
        /// The purpose of the memory.
        what: &'static str,
        /// Its bytes.
        given: u64,
        /// The bytes that it needs.
        needed: u64,
    },
    /// Memory is not aligned.
    #[error("{what} begins {} bytes past a multiple of {align}; it must begin at such a multiple", address % align)]
    Misaligned {
        /// The purpose of the memory.
        what: &'static str,
        /// Its address.
        address: u64,
        /// The alignment in bytes.
        align: u64,
    },
    /// The group was not configured for a call.
    #[error("{what}: {remedy}")]
    Unsuited {
        /// The call, and what the group has.
        what: &'static str,
        /// The remedy.
        remedy: &'static str,
    },
    /// The last dispatch of the slot was not received, so other ranks may still use the memory for the next one.
    #[error("the last dispatch of slot {slot} was not received; call `receive` on the value that `dispatch` returns")]
    NotReceived {
        /// The slot's number.
        slot: u32,
    },
    /// A detached dispatch of the slot was received, and neither combined nor released.
    #[error("slot {slot} still has received rows: call `combine` or `release` first")]
    NotEnded {
        /// The slot's number.
        slot: u32,
    },
    /// A detached dispatch takes no such call any more, or is not one of the slot.
    #[error("slot {slot} has no such dispatch: it was received, combined or released before, or another slot made it")]
    Ended {
        /// The slot's number.
        slot: u32,
    },
    /// Kernels of earlier calls have reported an error, and nobody has called [`Group::status`](crate::Group::status)
    /// since. If the kernel still runs, the figures of the report may be missing; the code is right.
    #[error("an earlier call has left a report that nobody has read by `Group::status`: {0}")]
    Unread(Report),
    /// An error of the communicator.
    #[error(transparent)]
    Comm(#[from] CommError),
    /// An error of the device.
    #[error(transparent)]
    Gpu(#[from] GpuError),
}

impl fmt::Debug for EpError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// An error of a group's kernels, from [`Group::status`](crate::Group::status). Group and communicator go on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Report {
    /// The slot.
    pub slot: u32,
    /// The cause.
    pub code: Code,
    /// The rank that it concerns, if the code is [`Code::Silent`], [`Code::Unsent`] or [`Code::Full`].
    pub rank: u32,
    /// The id of an expert that does not exist, or the expert of a zone that is full.
    pub expert: u64,
    /// The value that the kernel saw.
    pub seen: u64,
    /// The value that it expected, or the limit.
    pub limit: u64,
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let &Self { slot, code, rank, expert, seen, limit } = self;
        write!(f, "slot {slot}: ")?;
        match code {
            Code::Silent => write!(
                f,
                "rank {rank} did not come to dispatch {limit} in time, its last one was {seen} (modulo 2^32); the group \
                 goes on without it"
            ),
            Code::UnknownExpert => {
                write!(f, "token {seen} has the expert id {expert}, there are {limit} experts; the token was dropped")
            }
            Code::TooManyTokens if seen > i32::MAX as u64 => {
                write!(f, "the number of tokens of a batch is {} on the device; it has none", seen as u32 as i32)
            }
            Code::TooManyTokens => {
                write!(f, "a batch has {seen} tokens, the group has room for {limit}; the others were dropped")
            }
            Code::TooManyRows => {
                write!(f, "a layout has {seen} rows, its memory has room for {limit}; the others were left out")
            }
            Code::Unsent => write!(
                f,
                "rows of dispatch {seen} for rank {rank} could not be posted to the network: it is not connected, or \
                 the queue had no room in time; the group goes on without it"
            ),
            Code::Full => write!(
                f,
                "rank {rank} is sent {seen} rows or more, its memory has room for {limit}; the others were left out; \
                 configure more by `max_rows`"
            ),
            Code::Stopped => write!(f, "the communicator was aborted, or has a fault"),
        }
    }
}

impl std::error::Error for Report {}
