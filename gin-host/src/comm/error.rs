// SPDX-License-Identifier: MIT OR Apache-2.0
//! Errors of communicators and windows.

use super::{CommState, FaultReport};
use gin_abi::{BackendKind, Fault};
use gin_boot::BootstrapError;
use gin_gpu::GpuError;
use gin_gpu::quarantine::Quarantined;
use gin_net::NetError;
use gin_nic::NicError;

/// An error of a communicator or a window.
///
/// ```
/// use gin_host::comm::{CommError, Requirements};
/// use gin_host::world::{LaunchError, WorldConfig, launch};
///
/// let outcome = launch(WorldConfig::seeded(1, 7), |rank| -> Result<(), CommError> {
///     rank.communicator(&Requirements::default().queue_depth(100)).map(drop)
/// });
/// let Err(LaunchError::Rank { error, .. }) = outcome else { panic!("100 is no power of two") };
/// assert_eq!(error.to_string(), "queue_depth must be a power of two; 100 was asked for");
/// ```
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CommError {
    /// The present state of the communicator does not allow the call.
    #[error("cannot {call}: the communicator is {state}")]
    State {
        /// The refused call.
        call: &'static str,
        /// The present state.
        state: CommState,
    },
    /// Another thread is calling the same communicator.
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
        /// The same fault with hosts, back end and cause.
        report: Box<FaultReport>,
    },
    /// A number is past its limit.
    #[error("{asked} {what} were asked for; there can be {least} to {limit}{}", remedy(what, *limit))]
    Limit {
        /// The name of the number.
        what: &'static str,
        /// The requested number.
        asked: u64,
        /// The least possible value.
        least: u64,
        /// The largest possible value.
        limit: u64,
    },
    /// A number must be a power of two.
    #[error("{what} must be a power of two; {asked} was asked for")]
    NotPowerOfTwo {
        /// The name of the number.
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
        /// The rank whose memory it does not reach.
        other: u32,
    },
    /// Ranks request different values.
    #[error("rank {rank} asked for {what} = {theirs}, this rank for {own}")]
    Disagreement {
        /// The name of the number.
        what: &'static str,
        /// The other rank.
        rank: u32,
        /// The other rank's value.
        theirs: u64,
        /// This rank's value.
        own: u64,
    },
    /// Kernels cannot reach all ranks of the requested barriers over the requested connections.
    #[error(
        "{what} barriers were asked for: they meet {needed} ranks, and with connections along rails kernels reach \
         {reached} of them"
    )]
    NotConnected {
        /// The kind of barrier.
        what: &'static str,
        /// The number of ranks of the barrier's team.
        needed: u32,
        /// The number of these ranks that kernels reach, over the network or by loads and stores.
        reached: u32,
    },
    /// The back end is not available.
    #[error("back end {backend:?} is not available: {reason}")]
    Backend {
        /// The back end.
        backend: BackendKind,
        /// The reason.
        reason: String,
    },
    /// The network lacks a required feature.
    #[error("network `{network}` has no {what}, which the communicator requires")]
    Capability {
        /// The network.
        network: &'static str,
        /// The missing feature.
        what: &'static str,
    },
    /// Another rank failed in a collective call.
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
        /// Its call.
        theirs: String,
        /// The call of this rank.
        own: &'static str,
    },
    /// The memory is not aligned for its elements.
    #[error("window memory begins {} bytes past a multiple of {align}; it must begin at such a multiple", address % align)]
    Misaligned {
        /// Address.
        address: u64,
        /// The required alignment.
        align: u64,
    },
    /// The memory, or part of it, is in a window already.
    #[error("{} bytes of the memory are already registered, in window {window}: deregister that first", end - address)]
    AlreadyRegistered {
        /// The first byte.
        address: u64,
        /// The byte after the last one.
        end: u64,
        /// The window that contains them.
        window: u32,
    },
    /// No range of addresses that is free on all ranks of the LSA team is long enough for the window.
    #[error(
        "a window of {bytes} bytes finds no place: of the {stride} bytes of addresses that each rank has, at most {longest} \
         in a row are free on all ranks of its LSA team"
    )]
    NoPlace {
        /// The bytes of the longest part of the window.
        bytes: u64,
        /// The bytes of the longest range that is free on all ranks.
        longest: u64,
        /// The bytes of addresses that each rank has.
        stride: u64,
    },
    /// The memory is of a kind, or of a device, that cannot be a window.
    #[error("this memory cannot be a window: {reason}")]
    NotRegistrable {
        /// The reason.
        reason: &'static str,
    },
    /// A process that has left the job may still write to the memory.
    #[error("this memory cannot be a window yet: {reason}")]
    Quarantined {
        /// The process that may write, and the remedy.
        reason: String,
    },
    /// The window was deregistered, or belongs to another communicator.
    #[error("window {window} is not registered with this communicator")]
    WindowGone {
        /// Its id.
        window: u32,
    },
    /// Requests are unfinished.
    #[error("cannot {call}: {requests} requests of rank {rank} are still unfinished after {waited_ms} ms")]
    InFlight {
        /// The refused call.
        call: &'static str,
        /// The rank.
        rank: u32,
        /// The number of unfinished requests.
        requests: u64,
        /// The time that the rank waited for them.
        waited_ms: u64,
    },
    /// Kernels run on the device of a rank.
    #[error("cannot {call}: kernels are running on {streams} streams of rank {rank}")]
    KernelsRunning {
        /// The refused call.
        call: &'static str,
        /// The rank.
        rank: u32,
        /// The number of kernels.
        streams: u64,
    },
    /// A range ends past the end of the window.
    #[error("elements {start} to {end} are not in a window of {length}")]
    OutOfRange {
        /// The first element.
        start: u64,
        /// The element after the last one.
        end: u64,
        /// The number of elements of the window.
        length: u64,
    },
    /// This process cannot share memory with other processes of the host.
    #[error("ranks are processes, and this one cannot share memory with others: {0}")]
    Share(String),
    /// The communicator's proxy has ended.
    #[error("the proxy of this rank has ended")]
    ProxyGone,
    /// The bootstrap failed.
    #[error(transparent)]
    Bootstrap(#[from] BootstrapError),
    /// An error of the device.
    #[error(transparent)]
    Gpu(#[from] GpuError),
    /// An error of the network.
    #[error(transparent)]
    Net(#[from] NetError),
    /// The device-driven NIC is not available, or reports an error.
    #[error(transparent)]
    Nic(Box<NicError>),
}

gin_abi::debug_as_display!(CommError);

/// Returns the remedy for a number that is past its limit, for the end of the error.
fn remedy(what: &str, limit: u64) -> &'static str {
    // Windows past the largest limit are refused before any is registered.
    if what != "windows" || limit == gin_abi::MAX_WINDOWS.into() {
        return "";
    }
    ": a window that the program drops stays registered, because that is collective; deregister it on all ranks, or \
     request more `windows`"
}

impl From<Quarantined> for CommError {
    fn from(Quarantined { reason }: Quarantined) -> Self {
        Self::Quarantined { reason }
    }
}

impl From<NicError> for CommError {
    fn from(error: NicError) -> Self {
        Self::Nic(Box::new(error))
    }
}
