// SPDX-License-Identifier: MIT OR Apache-2.0
//! How processes become the ranks of a job: over TCP, with a secret.
//!
//! One rank listens ([`Rendezvous`]) and hands out its [`UniqueId`]; the others join with it ([`TcpBootstrap::join`]):
//!
//! ```
//! use gin_boot::{Bootstrap, Rendezvous, TcpBootstrap, TcpConfig};
//!
//! let config = TcpConfig::default().address(Some([127, 0, 0, 1].into()));
//! let rendezvous = Rendezvous::new(config.clone())?;
//! let id = rendezvous.id().to_string(); // for the other processes, by a way that nobody else reads
//!
//! let other = std::thread::spawn(move || {
//!     let rank = TcpBootstrap::join(&id.parse().unwrap(), 1, 2, config)?;
//!     rank.all_gather(b"one")
//! });
//! let rank = rendezvous.join(2)?;
//! assert_eq!(rank.all_gather(b"zero")?, [&b"zero"[..], b"one"]);
//! assert_eq!(other.join().unwrap()?, [&b"zero"[..], b"one"]);
//! # Ok::<(), gin_boot::BootstrapError>(())
//! ```
//!
//! # Connections and traffic
//!
//! Ranks are the nodes of a binary tree, and each has at most three connections. On each connection both sides prove
//! that they know the secret (Noise, `NNpsk0_25519_ChaChaPoly_BLAKE2s`), and all bytes are encrypted. In a collective
//! the bytes of each subtree go up the tree, and the bytes of all ranks come down. So a collective of n ranks that
//! give b bytes each puts n·b bytes on each edge downwards, and upwards b bytes for each rank below. A barrier is one
//! message up and one down on each edge. Rank 0 has no more work than other ranks. To join, each rank speaks with rank
//! 0 for a moment (about 300 bytes).
//!
//! # Ends of a collective
//!
//! | event | collectives end with | boards of communicators get |
//! | --- | --- | --- |
//! | [`abort`](Bootstrap::abort) of a rank | `Aborted`, on all ranks | nothing |
//! | a rank drops its last handle | `Lost`, on ranks below it, and if its subtree has not given all bytes | nothing |
//! | a process ends, or its connection breaks | the same | [`PeerLost`](gin_abi::FaultKind::PeerLost) with the rank as peer |
//! | a rank is silent for [`silence`](TcpConfig::silence) | the same | the same |
//!
//! A fault that a rank posts on its [`Board`] is on the boards of all ranks a few milliseconds later.
//!
//! A process that does not know the secret costs the ranks only the time of a refusal. At most 128 such connections are
//! open at a time, each for at most 5 s. After 1 s they make room for others.

mod address;
mod beat;
pub mod board;
mod collective;
mod config;
mod door;
mod error;
mod greet;
mod id;
mod in_process;
mod io;
mod job;
mod link;
mod message;
mod node;
mod regroup;
pub mod rt;
mod seat;
mod simulate;
mod slurm;
mod tcp;
mod tree;
#[doc(hidden)]
pub mod wire;

#[doc(hidden)]
pub use error::on_host;
pub use error::{BootstrapError, LossCause};
#[doc(hidden)]
pub use id::random;
pub use id::{IdError, UniqueId};
pub use in_process::InProcess;
pub use job::{Job, JobError, Launcher};
#[doc(hidden)]
pub use simulate::{Simulated, Step, simulate};
pub use tcp::{Rendezvous, TcpBootstrap, TcpConfig};

use board::Board;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// The number of the job's own channel. Communicators count from 1.
const JOB: u64 = 0;

/// A connection of one rank to all ranks of the job, for setup. All ranks make the same calls in the same order.
///
/// ```
/// use gin_boot::{Bootstrap, InProcess};
///
/// let ranks = InProcess::job(2)?;
/// std::thread::scope(|scope| {
///     for rank in &ranks {
///         scope.spawn(move || assert_eq!(rank.all_gather(&[rank.rank() as u8]), Ok(vec![vec![0], vec![1]])));
///     }
/// });
/// # Ok::<(), gin_boot::BootstrapError>(())
/// ```
pub trait Bootstrap: Send + Sync + fmt::Debug {
    /// Returns the world rank.
    fn rank(&self) -> u32;

    /// Returns the number of ranks.
    fn ranks(&self) -> u32;

    /// Returns whether each rank is a process. Memory that such ranks share must be in files.
    fn is_across_processes(&self) -> bool {
        false
    }

    /// Returns the name that a rank's host has in its system; empty if the job has no such rank.
    fn host(&self, rank: u32) -> String {
        if rank < self.ranks() { host_name() } else { String::new() }
    }

    /// Gives every rank the bytes of all ranks, by rank. Waits for all ranks.
    ///
    /// # Errors
    /// [`BootstrapError`]. After an error no collective of the job succeeds.
    fn all_gather(&self, bytes: &[u8]) -> Result<Vec<Vec<u8>>, BootstrapError>;

    /// Waits for all ranks.
    ///
    /// # Errors
    /// As [`all_gather`](Self::all_gather).
    fn barrier(&self) -> Result<(), BootstrapError> {
        self.all_gather(&[]).map(drop)
    }

    /// Opens the channel of the communicator with this number. Each rank opens it once.
    fn channel(&self, communicator: u64) -> Arc<dyn Channel>;

    /// Ends every collective of this job, on all ranks, with an error.
    fn abort(&self);

    /// Returns the ranks that this rank knows to be lost, in order.
    fn lost(&self) -> Vec<u32> {
        Vec::new()
    }

    /// Returns the id with which processes can join this job while it runs, in a call of [`grow`](Self::grow): see
    /// [`TcpBootstrap::id`]. `None` where the ranks are threads of one process.
    fn id(&self) -> Option<UniqueId> {
        None
    }

    /// Makes a job of the ranks that remain without `lost`; all remaining ranks call this: see
    /// [`TcpBootstrap::without`].
    ///
    /// # Errors
    /// As there; [`BootstrapError::System`] where the ranks are threads of one process, because they end together.
    fn without(&self, _lost: &[u32], _joining: Duration) -> Result<Arc<dyn Bootstrap>, BootstrapError> {
        Err(error::system("go on without some ranks")("the ranks are threads of one process, which end together"))
    }

    /// Makes a job with processes that join, as new ranks or in the place of lost ones; all other ranks call this: see
    /// [`TcpBootstrap::grow`].
    ///
    /// # Errors
    /// As there; [`BootstrapError::System`] where the ranks are threads of one process, which no other process joins.
    fn grow(&self, _joining: &[u32], _within: Duration) -> Result<Arc<dyn Bootstrap>, BootstrapError> {
        Err(error::system("add ranks")("the ranks are threads of one process, which no other process joins"))
    }
}

/// The collectives and the fault board of one communicator.
pub trait Channel: Send + Sync + fmt::Debug {
    /// Returns the board on which the ranks report faults.
    fn board(&self) -> &Arc<Board>;

    /// Does the same as [`Bootstrap::all_gather`], in the order of the calls on this channel. A fault on the board ends
    /// it.
    ///
    /// # Errors
    /// [`BootstrapError::Ended`] after a fault; else as [`Bootstrap::all_gather`].
    fn all_gather(&self, bytes: &[u8]) -> Result<Vec<Vec<u8>>, BootstrapError>;
}

/// Returns the name that this host has in its system.
#[doc(hidden)]
pub fn host_name() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}

/// Locks a mutex, also after a thread has panicked with it. Every holder leaves the value valid between two statements.
#[doc(hidden)]
pub fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns whole milliseconds; the largest number for a longer time.
fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}
