// SPDX-License-Identifier: MIT OR Apache-2.0
//! Errors of communicators and windows.

use super::{CommState, FaultReport};
use gin_abi::{BackendKind, Fault};
use gin_boot::BootstrapError;
use gin_gpu::GpuError;
use gin_gpu::quarantine::Quarantined;
use gin_gpu::registry::KeyError;
use gin_net::NetError;
use gin_nic::NicError;

/// An error of a communicator or a window.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CommError {
    /// A call that the communicator cannot take in its state.
    #[error("cannot {call}: the communicator is {state}")]
    State {
        /// The refused call.
        call: &'static str,
        /// The state.
        state: CommState,
    },
    /// Another thread is in a call on the same communicator.
    #[error("cannot {call}: another call on this communicator is under way")]
    Busy {
        /// The refused call.
        call: &'static str,
    },
    /// The communicator was aborted, or has a fault.
    #[error("cannot {call}: the communicator has ended: {report}")]
    Ended {
        /// The refused call.
        call: &'static str,
        /// The rank that found the fault, or called abort.
        rank: u32,
        /// The fault of that rank.
        fault: Fault,
        /// The same, with hosts, back end and cause.
        report: Box<FaultReport>,
    },
    /// A number past its limit.
    #[error("{asked} {what} were asked for; there can be {least} to {limit}")]
    Limit {
        /// Of what.
        what: &'static str,
        /// The requested number.
        asked: u64,
        /// The fewest there can be.
        least: u64,
        /// The most there can be.
        limit: u64,
    },
    /// A number that must be a power of two.
    #[error("{what} must be a power of two; {asked} was asked for")]
    NotPowerOfTwo {
        /// Which number.
        what: &'static str,
        /// The requested number.
        asked: u64,
    },
    /// The size of the LSA team does not divide the number of ranks.
    #[error("LSA teams of {lsa_size} cannot divide {ranks} ranks")]
    LsaSize {
        /// The requested size.
        lsa_size: u32,
        /// Number of ranks.
        ranks: u32,
    },
    /// Ranks of one LSA team do not reach each other's memory.
    #[error("LSA teams of {lsa_size} cannot be: rank {rank} does not reach the memory of rank {other}, with atomics")]
    LsaReach {
        /// The requested size.
        lsa_size: u32,
        /// The rank.
        rank: u32,
        /// The one that it does not reach.
        other: u32,
    },
    /// Ranks ask for different values.
    #[error("rank {rank} asked for {what} = {theirs}, this rank for {own}")]
    Disagreement {
        /// Which number.
        what: &'static str,
        /// The other rank.
        rank: u32,
        /// The other rank's value.
        theirs: u64,
        /// This rank's value.
        own: u64,
    },
    /// Barriers over ranks that, with what connections were asked for, cannot all be reached.
    #[error(
        "{what} barriers were asked for: they meet {needed} ranks, and with connections along rails kernels reach \
         {reached} of them"
    )]
    NotConnected {
        /// Which barriers.
        what: &'static str,
        /// Ranks that they meet.
        needed: u32,
        /// How many of them kernels reach, over the network or otherwise.
        reached: u32,
    },
    /// The back end cannot be had.
    #[error("back end {backend:?} cannot be had: {reason}")]
    Backend {
        /// The back end.
        backend: BackendKind,
        /// Why.
        reason: String,
    },
    /// The network cannot do what is required.
    #[error("network `{network}` has no {what}, which the communicator requires")]
    Capability {
        /// The network.
        network: &'static str,
        /// The missing feature.
        what: &'static str,
    },
    /// Another rank could not do its part of a collective call.
    #[error("rank {rank} failed: {reason}")]
    OtherRank {
        /// The rank.
        rank: u32,
        /// The other rank's error.
        reason: String,
    },
    /// Ranks are in different collective calls.
    #[error("rank {rank} is in another call ({theirs}) than this one ({own})")]
    OutOfStep {
        /// The other rank.
        rank: u32,
        /// The call that it is in.
        theirs: String,
        /// The call that this rank is in.
        own: &'static str,
    },
    /// Memory that is not aligned for its elements.
    #[error("window memory at {address:#x} is not aligned to {align}")]
    Misaligned {
        /// Address.
        address: u64,
        /// The required alignment.
        align: u64,
    },
    /// Memory that is, in part or whole, in a window already.
    #[error("bytes {address:#x} to {end:#x} are already registered, in window {window}")]
    AlreadyRegistered {
        /// First byte.
        address: u64,
        /// Byte after the last one.
        end: u64,
        /// The window that has them.
        window: u32,
    },
    /// No part of the addresses is free on all ranks of the LSA team that is long enough for a window.
    #[error(
        "a window of {bytes} bytes finds no place: of the {stride} bytes of addresses that each rank has, at most {longest} \
         in a row are free on all ranks of its LSA team"
    )]
    NoPlace {
        /// Bytes of the longest part.
        bytes: u64,
        /// Most bytes in a row that are free on all ranks.
        longest: u64,
        /// Bytes of addresses that each rank has.
        stride: u64,
    },
    /// Memory of a kind, or of a device, that cannot be a window.
    #[error("this memory cannot be a window: {reason}")]
    NotRegistrable {
        /// Why.
        reason: &'static str,
    },
    /// Memory that a process which is not in the job any more may still write to.
    #[error("this memory cannot be a window yet: {reason}")]
    Quarantined {
        /// The process that may write, and the remedy.
        reason: String,
    },
    /// A window that was deregistered, or belongs to another communicator.
    #[error("window {window} is not registered with this communicator")]
    WindowGone {
        /// Its id.
        window: u32,
    },
    /// Requests are under way.
    #[error("cannot {call}: {requests} requests of rank {rank} are still under way after {waited_ms} ms")]
    InFlight {
        /// The refused call.
        call: &'static str,
        /// The rank.
        rank: u32,
        /// How many.
        requests: u64,
        /// How long it was waited for them.
        waited_ms: u64,
    },
    /// Kernels run on the device of a rank.
    #[error("cannot {call}: {kernels} kernels are running on the device of rank {rank}")]
    KernelsRunning {
        /// The refused call.
        call: &'static str,
        /// The rank.
        rank: u32,
        /// How many.
        kernels: u64,
    },
    /// A range past the end of a window.
    #[error("elements {start} to {end} are not in a window of {length}")]
    OutOfRange {
        /// First element.
        start: u64,
        /// Element after the last one.
        end: u64,
        /// Elements that the window has.
        length: u64,
    },
    /// Memory cannot be shared with other processes of the host.
    #[error("ranks are processes, and this one cannot share memory with others: {0}")]
    Share(String),
    /// The communicator's proxy is gone.
    #[error("the proxy of this rank is gone")]
    ProxyGone,
    /// The ranks could not meet.
    #[error(transparent)]
    Bootstrap(#[from] BootstrapError),
    /// The device reports an error.
    #[error(transparent)]
    Gpu(#[from] GpuError),
    /// The network reports an error.
    #[error(transparent)]
    Net(#[from] NetError),
    /// The NIC that kernels drive cannot be had, or reports an error.
    #[error(transparent)]
    Nic(Box<NicError>),
}

impl From<Quarantined> for CommError {
    fn from(Quarantined { reason }: Quarantined) -> Self {
        Self::Quarantined { reason }
    }
}

impl From<KeyError> for CommError {
    fn from(error: KeyError) -> Self {
        Self::Net(error.into())
    }
}

impl From<NicError> for CommError {
    fn from(error: NicError) -> Self {
        Self::Nic(Box::new(error))
    }
}
