// SPDX-License-Identifier: MIT OR Apache-2.0
//! Errors, and the report of all waiters at the time of an error.

use std::fmt;
use std::panic::Location;
use std::sync::Arc;

use gin_device::exec::Dim3;
use thiserror::Error;

use crate::actor::Actor;
use crate::race::Race;

/// The reason why an actor waits.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum WaitKind {
    /// It does not wait: it could run, or was running.
    Ready,
    /// It is in a polling loop, between two polls.
    Pause,
    /// It is in a device call that waits, between two polls.
    Poll {
        /// The operation and what it concerns; of a signal or counter, the value last seen and the expected one.
        call: String,
    },
    /// It waits at a barrier of its block.
    Barrier {
        /// Barrier number, 0 to 15.
        id: u32,
        /// Number of threads that the barrier needs; `None` for the whole block.
        threads: Option<u32>,
    },
    /// It waits in an exchange among lanes: a shuffle, a vote or a warp barrier.
    Exchange {
        /// The lanes that must arrive.
        mask: u32,
    },
    /// It waits for the end of the grid before its own on the stream.
    Predecessor,
    /// It waits for the set of lanes that run together, which is about to be decided.
    ActiveMask,
    /// A host function or a service waits.
    BlockOn {
        /// The words behind "waiting for".
        what: &'static str,
    },
    /// It sleeps.
    Sleep,
}

impl fmt::Display for WaitKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            WaitKind::Ready => f.write_str("ready to run"),
            WaitKind::Pause => f.write_str("pausing in a polling loop"),
            WaitKind::Poll { call } => write!(f, "waiting in {call}"),
            WaitKind::Barrier { id, threads: Some(threads) } => {
                write!(f, "waiting at barrier {id} for {threads} threads")
            }
            WaitKind::Barrier { id, threads: None } => write!(f, "waiting at barrier {id} for the whole block"),
            WaitKind::Exchange { mask } => write!(f, "waiting in an exchange of lanes {mask:#010x}"),
            WaitKind::Predecessor => f.write_str("waiting for the grid before it on its stream"),
            WaitKind::ActiveMask => f.write_str("asking for the active mask"),
            WaitKind::BlockOn { what } => write!(f, "waiting for {what}"),
            WaitKind::Sleep => f.write_str("asleep"),
        }
    }
}

/// One entry of a [`WaitReport`].
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Waiter {
    /// The actor that waits.
    pub actor: Actor,
    /// The reason.
    pub wait: WaitKind,
    /// Source location of the wait; for a pause, the last location known before it, if any.
    pub site: Option<&'static Location<'static>>,
}

/// Blocks of a grid that have not begun.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct NotStarted {
    /// Device of the grid.
    pub rank: u32,
    /// Name of the grid.
    pub grid: Arc<str>,
    /// The first block that has not begun; no later block has begun either.
    pub first_block: u64,
    /// Number of blocks of the grid.
    pub blocks: u64,
    /// The reason, with the figures.
    pub reason: String,
}

/// Every waiter and its location, in the order hosts, services, threads.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct WaitReport {
    /// All actors that have not ended.
    pub waiters: Vec<Waiter>,
    /// Blocks that wait for room.
    pub not_started: Vec<NotStarted>,
}

impl WaitReport {
    pub(crate) fn sort(&mut self) {
        self.waiters.sort_by(|a, b| a.actor.cmp(&b.actor));
    }
}

/// Threads of a grid with equal waits.
struct Group<'a> {
    first: &'a Waiter,
    /// Block, first thread and last thread of each set of consecutive threads.
    runs: Vec<(u64, u32, u32)>,
}

impl<'a> Group<'a> {
    /// Returns true if `other` is a thread of the same grid with the same wait.
    fn takes(&self, other: &Waiter) -> bool {
        let Waiter { actor, wait, site } = self.first;
        let grid = |actor: &Actor| match actor {
            Actor::Thread { rank, launch, .. } => Some((*rank, *launch)),
            Actor::Host { .. } | Actor::Service { .. } => None,
        };
        grid(actor).is_some() && grid(actor) == grid(&other.actor) && (wait, site) == (&other.wait, &other.site)
    }

    fn add(&mut self, block: u64, thread: u32) {
        match self.runs.last_mut() {
            Some((last_block, _, last)) if *last_block == block && *last + 1 == thread => *last = thread,
            _ => self.runs.push((block, thread, thread)),
        }
    }

    /// Returns the groups of waiters that are sorted by actor, each at the place of its first one.
    fn all(waiters: &'a [Waiter]) -> Vec<Self> {
        let mut groups: Vec<Group<'a>> = Vec::new();
        for waiter in waiters {
            let at = groups.iter().rposition(|group| group.takes(waiter)).unwrap_or_else(|| {
                groups.push(Group { first: waiter, runs: Vec::new() });
                groups.len() - 1
            });
            if let Actor::Thread { block, thread, .. } = waiter.actor {
                groups[at].add(block, thread);
            }
        }
        groups
    }
}

impl fmt::Display for Group<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Waiter { actor, wait, site } = self.first;
        match (actor, &self.runs[..]) {
            (Actor::Thread { rank, grid, launch, .. }, [(first, from, to), .., (last, ..)]) => {
                write!(f, "rank {rank}, grid `{grid}` (launch {launch}), ")?;
                let alike = self.runs.windows(2).all(|pair| {
                    let ((block, from, to), next) = (pair[0], pair[1]);
                    (block + 1, from, to) == next
                });
                let threads: u32 = self.runs.iter().map(|(_, from, to)| to - from + 1).sum();
                match (alike, from == to) {
                    (true, true) => write!(f, "blocks {first} to {last}, thread {from}")?,
                    (true, false) => write!(f, "blocks {first} to {last}, thread {from} to {to}")?,
                    (false, _) if first == last => write!(f, "block {first}, {threads} threads from {from} on")?,
                    (false, _) => {
                        write!(
                            f,
                            "{threads} threads of blocks {first} to {last}, the first is block {first}, thread {from}"
                        )?;
                    }
                }
            }
            (_, [(_, from, to)]) if from != to => write!(f, "{actor} to {to}")?,
            _ => write!(f, "{actor}")?,
        }
        write!(f, ": {wait}")?;
        match (site, wait) {
            (Some(site), WaitKind::Pause | WaitKind::Poll { .. } | WaitKind::Ready) => {
                write!(f, " (last seen at {site})")
            }
            (Some(site), _) => write!(f, " at {site}"),
            (None, _) => Ok(()),
        }
    }
}

/// Prints threads of a grid with equal waits as one line.
impl fmt::Display for WaitReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for group in Group::all(&self.waiters) {
            write!(f, "\n  {group}")?;
        }
        for NotStarted { rank, grid, first_block, blocks, reason } in &self.not_started {
            let last = blocks - 1;
            write!(f, "\n  rank {rank}, grid `{grid}`: ")?;
            if last > *first_block {
                write!(f, "blocks {first_block} to {last} of {blocks} not started: {reason}")?;
            } else {
                write!(f, "block {first_block} of {blocks} not started: {reason}")?;
            }
        }
        Ok(())
    }
}

/// The reason why a grid was refused or failed.
#[derive(Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum LaunchError {
    /// An extent of the grid or of the block is zero.
    #[error("{what} of {}x{}x{} has an extent of zero", dim.x, dim.y, dim.z)]
    ZeroExtent {
        /// "grid" or "block".
        what: &'static str,
        /// The extents.
        dim: Dim3,
    },
    /// A block has too many threads.
    #[error("block of {threads} threads exceeds the limit of {limit}")]
    BlockTooLarge {
        /// Number requested.
        threads: u64,
        /// Largest number allowed.
        limit: u64,
    },
    /// One extent of the grid or of the block is too large.
    #[error("{what} extent {axis} is {asked}, the limit is {limit}")]
    Extent {
        /// "grid" or "block".
        what: &'static str,
        /// 'x', 'y' or 'z'.
        axis: char,
        /// Extent requested.
        asked: u32,
        /// Largest extent allowed.
        limit: u32,
    },
    /// A block has too much dynamic shared memory.
    #[error("{asked} bytes of dynamic shared memory per block, the limit is {limit}")]
    DynamicShared {
        /// Bytes requested.
        asked: usize,
        /// Largest number of bytes allowed.
        limit: usize,
    },
    /// A cooperative grid cannot be wholly resident.
    #[error(
        "cooperative grid `{grid}` of {blocks} blocks cannot be resident: {free} of {limit} blocks are free on rank {rank}"
    )]
    NotResident {
        /// Name of the grid.
        grid: Arc<str>,
        /// Device that refused the launch.
        rank: u32,
        /// Number of blocks of the grid.
        blocks: u64,
        /// Number of blocks that other grids of the device leave free.
        free: u64,
        /// Number of blocks that can be resident on the device at a time.
        limit: u64,
    },
    /// The machine has no memory, or no mappings, for the stacks of a block.
    #[error("no stacks for block {block} of grid `{grid}` ({threads} threads): {cause}; lower `resident_blocks`")]
    OutOfStacks {
        /// Name of the grid.
        grid: Arc<str>,
        /// Linear index of the block.
        block: u64,
        /// Number of threads of the block.
        threads: u32,
        /// The operating system's error.
        cause: String,
    },
    /// A thread panicked.
    #[error("{actor} panicked: {message}")]
    Panicked {
        /// The thread.
        actor: Actor,
        /// Message and location of the panic.
        message: String,
    },
    /// A thread trapped.
    #[error("{actor} trapped: {message}")]
    Trapped {
        /// The thread.
        actor: Actor,
        /// The text of the trap.
        message: String,
    },
    /// A kernel used a barrier, an exchange or shared memory in a way that a GPU does not define.
    #[error("{actor}: {message}{report}")]
    Misuse {
        /// The thread whose call revealed it.
        actor: Actor,
        /// Description of the misuse.
        message: String,
        /// The waiters of that block.
        report: WaitReport,
    },
    /// All remaining threads of a block wait for each other.
    #[error("rank {rank}, grid `{grid}`, block {block}: no thread can ever run again{report}")]
    Stuck {
        /// Device of the grid.
        rank: u32,
        /// Name of the grid.
        grid: Arc<str>,
        /// Linear index of the block.
        block: u64,
        /// The waiters of that block.
        report: WaitReport,
    },
    /// The grid did not end within the limit of its world (threads mode).
    #[error("rank {rank}, grid `{grid}`: has not ended after {limit_ns} ns{report}")]
    NoProgress {
        /// Device of the grid.
        rank: u32,
        /// Name of the grid.
        grid: Arc<str>,
        /// The limit, in nanoseconds.
        limit_ns: u64,
        /// The waiters of that device.
        report: WaitReport,
    },
    /// The world ended before the grid did.
    #[error("grid `{grid}` was ended with its world: {reason}")]
    WorldEnded {
        /// Name of the grid.
        grid: Arc<str>,
        /// The reason why the world ended.
        reason: String,
    },
}

/// The reason why a world failed.
#[derive(Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum WorldError {
    /// No coroutine can run, or none has made progress for too long.
    #[error("no progress: {reason}{report}")]
    NoProgress {
        /// The limit that was reached.
        reason: String,
        /// The waiters.
        report: WaitReport,
    },
    /// A service panicked.
    #[error("service `{name}` panicked: {message}")]
    ServicePanicked {
        /// Name of the service.
        name: Arc<str>,
        /// Message of the panic.
        message: String,
    },
    /// A grid failed and no ticket read its result.
    #[error("a grid failed and no ticket read its result: {0}")]
    UnseenFailure(LaunchError),
    /// The operating system provided no stack for a host function or a service, or no thread.
    #[error("cannot start {actor}: {cause}")]
    NoResources {
        /// The host function or service.
        actor: Actor,
        /// The operating system's error.
        cause: String,
    },
    /// Nothing orders two accesses to the same bytes; see [`SeededConfig::races`](crate::SeededConfig::races).
    #[error("{0}")]
    Race(Box<Race>),
    /// `World::run` was called inside a world, or twice at a time.
    #[error("World::run was called inside a world, or while this world runs")]
    Nested,
}

gin_abi::debug_as_display!(LaunchError, WorldError);
