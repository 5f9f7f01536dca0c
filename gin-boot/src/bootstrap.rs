// SPDX-License-Identifier: MIT OR Apache-2.0
//! How ranks meet before they have a communicator.

use crate::board::Board;
use crate::host_name;
use crate::rt;
use serde::{Deserialize, Serialize};
use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

/// An error of a bootstrap.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
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
        /// Name of its host; empty while that is not known.
        host: String,
        /// Why it is not there any more.
        cause: LossCause,
    },
    /// The ranks did not all come in time.
    #[error("{} did not come within {waited_ms} ms", missing_text(missing))]
    Timeout {
        /// The missing ranks.
        missing: Vec<u32>,
        /// How long this rank waited.
        waited_ms: u64,
    },
    /// The communicator whose channel this is has a fault, or was aborted.
    #[error("the communicator has ended")]
    Ended,
    /// There must be at least one rank, and no more than communicators can have.
    #[error("a job has 1 to {limit} ranks, not {ranks}")]
    Ranks {
        /// The requested number.
        ranks: u32,
        /// The most there can be.
        limit: u32,
    },
    /// A rank that the job does not have.
    #[error("there is no rank {rank} in a job of {ranks} ranks: they count from 0")]
    NoSuchRank {
        /// The rank.
        rank: u32,
        /// Number of ranks.
        ranks: u32,
    },
    /// A rank was not to be reached over the network in time.
    #[error("{reason}; check that the address is right, that the job runs there, and that no firewall is between")]
    Unreachable {
        /// The rank, the address that it cannot reach, and the reason.
        reason: String,
    },
    /// This process and rank 0 were not given the same secret.
    #[error("rank 0 has another secret than this rank: give all ranks the id, or the secret, of one job")]
    Secret,
    /// The processes were built with different versions of gin.
    #[error(
        "rank 0 speaks version {theirs} of the bootstrap, this rank version {own}: start one version of gin everywhere"
    )]
    Version {
        /// This rank's.
        own: u32,
        /// Rank 0's.
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
    /// More than a rank can give to one collective operation.
    #[error("{bytes} bytes are too many for one collective operation; a rank gives at most {limit}")]
    TooLong {
        /// The bytes of this rank.
        bytes: u64,
        /// The most that can be.
        limit: u64,
    },
    /// The system refused something.
    #[error("cannot {what}: {reason}")]
    System {
        /// The refused operation.
        what: &'static str,
        /// The system's reason.
        reason: String,
    },
}

/// Why a rank is not there any more, as seen by the one that noticed.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error, Serialize, Deserialize)]
#[non_exhaustive]
pub enum LossCause {
    /// It left in an orderly way.
    #[error("has left the job")]
    Left,
    /// Its connection was closed at its end.
    #[error("is lost: its connection was closed, as when a process ends")]
    Closed,
    /// It was silent for too long.
    #[error("is lost: nothing was heard of it for {ms} ms")]
    Silent {
        /// For how long.
        ms: u64,
    },
    /// Something else.
    #[error("is lost: {reason}")]
    Failed {
        /// The reason.
        #[serde(with = "crate::message::text")]
        reason: String,
    },
}

impl LossCause {
    /// Its number: what kernels see of it, as [`Fault::seen`](gin_abi::Fault) of
    /// [`PeerLost`](gin_abi::FaultKind::PeerLost), with the limit in milliseconds as `expected` if it is 2. 0: left,
    /// 1: closed, 2: silent, 3: something else.
    pub fn code(&self) -> u64 {
        match self {
            Self::Left => 0,
            Self::Closed => 1,
            Self::Silent { .. } => 2,
            Self::Failed { .. } => 3,
        }
    }
}

/// The host in an error, if it is known.
#[doc(hidden)]
pub fn on_host(host: &str) -> String {
    if host.is_empty() { String::new() } else { format!(" on host {host}") }
}

/// Returns the missing ranks, in words.
fn missing_text(missing: &[u32]) -> String {
    match missing {
        [] => "all ranks are there, but their connections".to_owned(),
        [rank] => format!("rank {rank}"),
        ranks => format!("ranks {}", crate::show_ranks(ranks)),
    }
}

/// One rank's way to all ranks of the job, for setting up. All ranks make the same calls in the same order.
pub trait Bootstrap: Send + Sync + fmt::Debug {
    /// World rank.
    fn rank(&self) -> u32;

    /// Number of ranks.
    fn ranks(&self) -> u32;

    /// Returns whether ranks are processes of their own, so that shared memory has to lie in files.
    fn is_across_processes(&self) -> bool {
        false
    }

    /// Name of the host of a rank, as its system has it; empty if there is no such rank.
    fn host(&self, rank: u32) -> String {
        if rank < self.ranks() { host_name() } else { String::new() }
    }

    /// Gives every rank the bytes of all, by rank. Waits for all ranks.
    ///
    /// # Errors
    /// [`BootstrapError`] if that cannot be; the job cannot meet again then.
    fn all_gather(&self, bytes: &[u8]) -> Result<Vec<Vec<u8>>, BootstrapError>;

    /// Waits for all ranks.
    ///
    /// # Errors
    /// As [`all_gather`](Self::all_gather).
    fn barrier(&self) -> Result<(), BootstrapError> {
        self.all_gather(&[]).map(drop)
    }

    /// The channel of the communicator with this number. Each rank asks for it once.
    fn channel(&self, communicator: u64) -> Arc<dyn Channel>;

    /// Ends every collective operation of this job, on all ranks, with an error.
    fn abort(&self);

    /// Ranks that this one knows to be lost, in order.
    fn lost(&self) -> Vec<u32> {
        Vec::new()
    }

    /// A job of the ranks that are left without `lost`, which all of them ask for: see
    /// [`TcpBootstrap::without`](crate::TcpBootstrap::without).
    ///
    /// # Errors
    /// As there; [`BootstrapError::System`] where ranks are of one process, and end together.
    fn without(&self, _lost: &[u32], _joining: Duration) -> Result<Arc<dyn Bootstrap>, BootstrapError> {
        let reason = "the ranks are threads of one process, which end together".to_owned();
        Err(BootstrapError::System { what: "go on without some ranks", reason })
    }
}

/// How the ranks of one communicator meet while it lasts.
pub trait Channel: Send + Sync + fmt::Debug {
    /// Where they tell each other of faults.
    fn board(&self) -> &Arc<Board>;

    /// As [`Bootstrap::all_gather`], among the calls on this channel; a fault on the board ends it.
    ///
    /// # Errors
    /// [`BootstrapError::Ended`] after a fault; else as [`Bootstrap::all_gather`].
    fn all_gather(&self, bytes: &[u8]) -> Result<Vec<Vec<u8>>, BootstrapError>;
}

/// The error of a rank of this process that is gone.
fn left(rank: u32) -> BootstrapError {
    BootstrapError::Lost { rank, host: host_name(), cause: LossCause::Left }
}

/// The number of the job's own channel; communicators count from 1.
const JOB: u64 = 0;

#[derive(Debug, Default)]
struct Hub {
    /// By channel and number.
    rounds: HashMap<(u64, u64), Round>,
    gone: Vec<bool>,
    aborted: Option<u32>,
    boards: HashMap<u64, Weak<Board>>,
}

#[derive(Debug)]
struct Round {
    parts: Vec<Option<Vec<u8>>>,
    taken: u32,
}

/// One rank's part of one channel.
#[derive(Debug)]
struct Line {
    rank: u32,
    ranks: u32,
    channel: u64,
    round: AtomicU64,
    timeout_ns: Option<u64>,
    hub: Arc<Mutex<Hub>>,
}

impl Line {
    // Held for a few operations and never while waiting or looking at the clock: with ranks as coroutines of one thread
    // nobody else runs then.
    fn hub(&self) -> MutexGuard<'_, Hub> {
        self.hub.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn all_gather(&self, bytes: &[u8], ended: impl Fn() -> bool) -> Result<Vec<Vec<u8>>, BootstrapError> {
        let key = (self.channel, self.round.fetch_add(1, Ordering::Relaxed));
        let ranks = self.ranks as usize;
        let empty = || Round { parts: vec![None; ranks], taken: 0 };
        self.hub().rounds.entry(key).or_insert_with(empty).parts[self.rank as usize] = Some(bytes.to_vec());
        let start = rt::clock_ns();
        let mut outcome = None;
        rt::wait_until(|| {
            let waited = rt::clock_ns().wrapping_sub(start);
            // That a communicator has ended says more than that a rank left after it.
            outcome = match self.look(key, waited) {
                Some(Ok(parts)) => Some(Ok(parts)),
                other => {
                    if ended() {
                        Some(Err(BootstrapError::Ended))
                    } else {
                        other
                    }
                }
            };
            outcome.is_some()
        });
        outcome.unwrap_or_else(|| Err(left(self.rank)))
    }

    /// Returns the result of a round, if it has one.
    fn look(&self, key: (u64, u64), waited: u64) -> Option<Result<Vec<Vec<u8>>, BootstrapError>> {
        let mut hub = self.hub();
        let round = hub.rounds.get_mut(&key)?;
        let missing: Vec<u32> =
            (0..).zip(&round.parts).filter(|(_, part)| part.is_none()).map(|(rank, _)| rank).collect();
        if missing.is_empty() {
            round.taken += 1;
            let last = round.taken == self.ranks;
            let parts = if last { hub.rounds.remove(&key).map(|round| round.parts) } else { Some(round.parts.clone()) };
            return Some(Ok(parts.into_iter().flatten().flatten().collect()));
        }
        if let Some(rank) = hub.aborted {
            return Some(Err(BootstrapError::Aborted { rank }));
        }
        if let Some(&rank) = missing.iter().find(|&&rank| hub.gone[rank as usize]) {
            return Some(Err(left(rank)));
        }
        let late = self.timeout_ns.is_some_and(|timeout| waited >= timeout);
        late.then_some(Err(BootstrapError::Timeout { missing, waited_ms: waited / 1_000_000 }))
    }
}

/// Ranks that are threads, or coroutines, of this process.
#[derive(Debug)]
pub struct InProcess {
    line: Line,
}

impl InProcess {
    /// A job of `ranks` ranks: one value for each.
    ///
    /// # Errors
    /// [`BootstrapError::Ranks`].
    pub fn job(ranks: u32) -> Result<Vec<Self>, BootstrapError> {
        let limit = gin_abi::MAX_RANKS;
        if ranks == 0 || ranks > limit {
            return Err(BootstrapError::Ranks { ranks, limit });
        }
        let hub = Hub { gone: vec![false; ranks as usize], ..Hub::default() };
        let hub = Arc::new(Mutex::new(hub));
        let line =
            |rank| Line { rank, ranks, channel: JOB, round: AtomicU64::new(0), timeout_ns: None, hub: hub.clone() };
        Ok((0..ranks).map(|rank| Self { line: line(rank) }).collect())
    }

    /// The same, with a limit to how long a collective operation waits for the others.
    #[must_use]
    pub fn with_timeout(mut self, timeout: std::time::Duration) -> Self {
        self.line.timeout_ns = Some(u64::try_from(timeout.as_nanos()).unwrap_or(u64::MAX));
        self
    }
}

impl Bootstrap for InProcess {
    fn rank(&self) -> u32 {
        self.line.rank
    }

    fn ranks(&self) -> u32 {
        self.line.ranks
    }

    fn all_gather(&self, bytes: &[u8]) -> Result<Vec<Vec<u8>>, BootstrapError> {
        self.line.all_gather(bytes, || false)
    }

    fn channel(&self, communicator: u64) -> Arc<dyn Channel> {
        let Line { rank, ranks, timeout_ns, .. } = self.line;
        let mut hub = self.line.hub();
        hub.boards.retain(|_, board| board.strong_count() > 0);
        let known = hub.boards.get(&communicator).and_then(Weak::upgrade);
        let board = known.unwrap_or_else(|| Arc::new(Board::new(ranks)));
        hub.boards.insert(communicator, Arc::downgrade(&board));
        let hub = self.line.hub.clone();
        let line = Line { rank, ranks, channel: communicator, round: AtomicU64::new(0), timeout_ns, hub };
        Arc::new(InProcessChannel { line, board })
    }

    fn abort(&self) {
        self.line.hub().aborted.get_or_insert(self.line.rank);
    }
}

impl Drop for InProcess {
    fn drop(&mut self) {
        self.line.hub().gone[self.line.rank as usize] = true;
    }
}

#[derive(Debug)]
struct InProcessChannel {
    line: Line,
    board: Arc<Board>,
}

impl Channel for InProcessChannel {
    fn board(&self) -> &Arc<Board> {
        &self.board
    }

    fn all_gather(&self, bytes: &[u8]) -> Result<Vec<Vec<u8>>, BootstrapError> {
        self.line.all_gather(bytes, || self.board.count() != 0)
    }
}

impl Drop for InProcessChannel {
    fn drop(&mut self) {
        // Rounds that nobody completed any more.
        if Arc::strong_count(&self.board) == 1 {
            self.line.hub().rounds.retain(|(channel, _), _| *channel != self.line.channel);
        }
    }
}
