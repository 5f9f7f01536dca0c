// SPDX-License-Identifier: MIT OR Apache-2.0
//! Errors of bootstraps, and causes of losses.

use rustix::io::Errno;
use serde::{Deserialize, Serialize};
use std::fmt::Write as _;
use std::io;
use std::time::Duration;

/// An error of a bootstrap.
///
/// ```
/// let error = gin_boot::InProcess::job(0).unwrap_err();
/// assert!(error.to_string().ends_with("ranks, not 0"));
/// ```
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum BootstrapError {
    /// A rank called `abort`.
    #[error("rank {rank} aborted the job")]
    Aborted {
        /// The rank.
        rank: u32,
    },
    /// A rank has ended without taking part.
    #[error("rank {rank}{} {cause}", on_host(host))]
    Lost {
        /// The rank.
        rank: u32,
        /// The name of its host; empty until it is known.
        host: String,
        /// The cause.
        cause: LossCause,
    },
    /// Some ranks did not take part in time.
    #[error("{} did not come within {waited_ms} ms", missing_text(missing))]
    Timeout {
        /// The missing ranks.
        missing: Vec<u32>,
        /// The time that this rank waited, in milliseconds.
        waited_ms: u64,
    },
    /// The communicator of this channel has a fault, or was aborted.
    #[error("the communicator has ended")]
    Ended,
    /// The number of ranks is 0, or more than communicators can have.
    #[error("a job has 1 to {limit} ranks, not {ranks}")]
    Ranks {
        /// The requested number.
        ranks: u32,
        /// The largest number.
        limit: u32,
    },
    /// A rank that the job does not have.
    #[error("there is no rank {rank} in a job of {ranks} ranks: they count from 0")]
    NoSuchRank {
        /// The rank.
        rank: u32,
        /// The number of ranks.
        ranks: u32,
    },
    /// This rank could not reach another rank over the network in time.
    #[error("{reason}")]
    Unreachable {
        /// The rank, the address that it cannot reach, the reason and the remedy.
        reason: String,
    },
    /// This process and rank 0 have different secrets.
    #[error("rank 0 has another secret than this rank: give all ranks the id, or the secret, of one job")]
    Secret,
    /// The processes were built with different versions of gin.
    #[error(
        "rank 0 speaks version {theirs} of the bootstrap, this rank version {own}: start one version of gin everywhere"
    )]
    Version {
        /// The version of this rank.
        own: u32,
        /// The version of rank 0.
        theirs: u32,
    },
    /// Another process has this rank.
    #[error(
        "another process of the job is rank {rank} already: give each its own rank, and each job its own id or port"
    )]
    Duplicate {
        /// The rank.
        rank: u32,
    },
    /// The processes have different numbers of ranks.
    #[error("this rank has a job of {own} ranks, rank 0 one of {theirs}; give all processes the same number")]
    RanksDiffer {
        /// The number of this rank.
        own: u32,
        /// The number of rank 0.
        theirs: u32,
    },
    /// The job runs, and its ranks did not call for this rank in time.
    #[error(
        "the job did not admit rank {rank} of {ranks} ranks within {waited_ms} ms: its ranks must call `grow` with this \
         number"
    )]
    NotAdmitted {
        /// The rank with which this process would join.
        rank: u32,
        /// The number of ranks with which it would join.
        ranks: u32,
        /// The time that it waited, in milliseconds.
        waited_ms: u64,
    },
    /// A rank gives more bytes to one collective than it may.
    #[error("{bytes} bytes are too many for one collective; a rank gives at most {limit}")]
    TooLong {
        /// The bytes of this rank.
        bytes: u64,
        /// The largest number of bytes.
        limit: u64,
    },
    /// The system refused an operation.
    #[error("cannot {what}: {reason}")]
    System {
        /// The operation.
        what: &'static str,
        /// The system's reason.
        reason: String,
    },
}

gin_abi::debug_as_display!(BootstrapError, crate::id::IdError);

/// The remedies where a rank cannot reach another one.
pub(crate) const CHECK: &str =
    "check that the address is right, that the job runs there, and that no firewall is between";

/// Reports a trouble while the ranks join. A program without a subscriber of `tracing` prints it on standard error,
/// because nothing else says why the program does not start.
pub(crate) fn warn(trouble: &str) {
    if tracing::dispatcher::has_been_set() {
        tracing::warn!("{trouble}");
    } else {
        eprintln!("gin: {trouble}");
    }
}

/// Returns a function that makes the error of an operation that failed, from the reason.
pub(crate) fn system<E: ToString>(what: &'static str) -> impl FnOnce(E) -> BootstrapError {
    move |reason| BootstrapError::System { what, reason: reason.to_string() }
}

/// Returns a function that makes the error of an operation that the system refused. It names what usually causes it.
pub(crate) fn refused<E: Into<io::Error>>(what: &'static str) -> impl FnOnce(E) -> BootstrapError {
    move |error| {
        let error = error.into();
        system(what)(format!("{error}{}", usual_cause(&error)))
    }
}

/// Returns what usually makes the system refuse a call about sockets or threads, for the end of an error.
pub(crate) fn usual_cause(error: &io::Error) -> &'static str {
    match Errno::from_io_error(error) {
        Some(Errno::ACCESS | Errno::PERM) => {
            ": a firewall of this host, or a seccomp filter or security module of its container, usually forbids it; only \
             root may listen at ports below 1024"
        }
        Some(Errno::MFILE) => ": the process has as many open files as it may; raise it with `ulimit -n`",
        Some(Errno::AGAIN) => ": the user (`ulimit -u`) or the container (`pids.max`) has as many threads as it may",
        _ => "",
    }
}

/// The cause of the loss of a rank, as the rank that noticed it knows it.
///
/// ```
/// let cause = gin_boot::LossCause::Silent { ms: 300 };
/// assert_eq!((cause.code(), cause.to_string()), (2, "is lost: nothing was heard of it for 300 ms".to_owned()));
/// ```
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error, Serialize, Deserialize)]
#[non_exhaustive]
pub enum LossCause {
    /// The rank left in an orderly way.
    #[error("has left the job")]
    Left,
    /// The other end closed the connection.
    #[error("is lost: its connection was closed, as when a process ends")]
    Closed,
    /// The rank was silent for too long.
    #[error("is lost: nothing was heard of it for {ms} ms")]
    Silent {
        /// The time, in milliseconds.
        ms: u64,
    },
    /// Another cause.
    #[error("is lost: {reason}")]
    Failed {
        /// The reason.
        #[serde(with = "crate::message::text")]
        reason: String,
    },
}

impl LossCause {
    /// Returns the number of the cause. 0: left, 1: closed, 2: silent, 3: another cause.
    ///
    /// Kernels see it as [`Fault::seen`](gin_abi::Fault) of [`PeerLost`](gin_abi::FaultKind::PeerLost). For 2,
    /// `expected` is the limit in milliseconds.
    pub fn code(&self) -> u64 {
        match self {
            Self::Left => 0,
            Self::Closed => 1,
            Self::Silent { .. } => 2,
            Self::Failed { .. } => 3,
        }
    }
}

/// Returns the host in words for an error; nothing if it is not known.
#[doc(hidden)]
pub fn on_host(host: &str) -> String {
    if host.is_empty() { String::new() } else { format!(" on host {host}") }
}

/// Returns the missing ranks in words.
fn missing_text(missing: &[u32]) -> String {
    match missing {
        [] => "all ranks are there, but their connections".to_owned(),
        [rank] => format!("rank {rank}"),
        ranks => format!("ranks {}", show_ranks(ranks)),
    }
}

/// Returns a report of a rank that waits for `missing`, of which `count` is the whole number, in words.
pub(crate) fn show_wait(rank: u32, ranks: u32, waited: Duration, missing: &[u32], count: usize) -> String {
    let plural = if count == 1 { "" } else { "s" };
    let list = show_ranks(missing);
    format!("rank {rank} has waited {} s for {count} of {ranks} ranks: rank{plural} {list}", waited.as_secs())
}

/// Returns ascending ranks as people write them, at most 20 groups: `3, 5-9 and 20 more`.
pub(crate) fn show_ranks(ranks: &[u32]) -> String {
    let mut text = String::new();
    let (mut at, mut groups) = (0, 0);
    while at < ranks.len() {
        if groups == 20 {
            let _ = write!(text, " and {} more", ranks.len() - at);
            break;
        }
        let run = (at..ranks.len()).take_while(|&next| ranks[next] - ranks[at] == (next - at) as u32).count();
        let comma = if groups == 0 { "" } else { ", " };
        let (first, last) = (ranks[at], ranks[at + run - 1]);
        let _ = match run {
            1 => write!(text, "{comma}{first}"),
            2 => write!(text, "{comma}{first}, {last}"),
            _ => write!(text, "{comma}{first}-{last}"),
        };
        (at, groups) = (at + run, groups + 1);
    }
    text
}
