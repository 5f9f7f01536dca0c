// SPDX-License-Identifier: MIT OR Apache-2.0
//! What can go wrong, and who was waiting where when it did.

use std::fmt;
use std::panic::Location;
use std::sync::Arc;

use gin_device::exec::Dim3;
use thiserror::Error;

/// Someone who runs in a world.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Who {
    /// The host function of a rank.
    Host {
        /// Index of the function in the list given to `World::run`.
        rank: u32,
    },
    /// A service.
    Service {
        /// Its name.
        name: Arc<str>,
    },
    /// A thread of a grid.
    Thread {
        /// Device that runs the grid.
        rank: u32,
        /// Name of the grid.
        grid: Arc<str>,
        /// Number of the grid on its device, in the order of the launches, from 1.
        launch: u32,
        /// Linear index of the block, x fastest.
        block: u64,
        /// Linear index of the thread in its block, x fastest.
        thread: u32,
    },
}

impl fmt::Display for Who {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Who::Host { rank } => write!(f, "host of rank {rank}"),
            Who::Service { name } => write!(f, "service `{name}`"),
            Who::Thread { rank, grid, launch, block, thread } => {
                write!(f, "rank {rank}, grid `{grid}` (launch {launch}), block {block}, thread {thread}")
            }
        }
    }
}

/// What somebody waits for.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum WaitKind {
    /// Nothing: it could run, or was running.
    Ready,
    /// It sits in a polling loop, between two polls.
    Pause,
    /// A barrier of its block.
    Barrier {
        /// Barrier number, 0 to 15.
        id: u32,
        /// Threads that the barrier needs; `None` for the whole block.
        threads: Option<u32>,
    },
    /// An exchange among lanes: a shuffle, a vote or a warp barrier.
    Exchange {
        /// The lanes that must come.
        mask: u32,
    },
    /// The set of lanes that run together, which is about to be decided.
    ActiveMask,
    /// A condition of `block_on`.
    BlockOn,
    /// A sleep.
    Sleep,
}

impl fmt::Display for WaitKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            WaitKind::Ready => f.write_str("ready to run"),
            WaitKind::Pause => f.write_str("pausing in a polling loop"),
            WaitKind::Barrier { id, threads: Some(threads) } => {
                write!(f, "waiting at barrier {id} for {threads} threads")
            }
            WaitKind::Barrier { id, threads: None } => write!(f, "waiting at barrier {id} for the whole block"),
            WaitKind::Exchange { mask } => write!(f, "waiting in an exchange of lanes {mask:#010x}"),
            WaitKind::ActiveMask => f.write_str("asking for the active mask"),
            WaitKind::BlockOn => f.write_str("blocked on a condition"),
            WaitKind::Sleep => f.write_str("asleep"),
        }
    }
}

/// One entry of a [`WaitReport`].
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Waiter {
    /// Who.
    pub who: Who,
    /// For what.
    pub wait: WaitKind,
    /// Where in the source the wait stands; for a pause, the last place known before it, if any.
    pub site: Option<&'static Location<'static>>,
}

/// Blocks of a grid that have not begun.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct NotStarted {
    /// Device.
    pub rank: u32,
    /// Name of the grid.
    pub grid: Arc<str>,
    /// The first block that has not begun; all after it have not either.
    pub first_block: u64,
    /// Blocks of the grid.
    pub blocks: u64,
    /// Why, with the figures.
    pub reason: String,
}

/// Who waits where, in the order hosts, services, threads.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct WaitReport {
    /// Everyone who has not ended.
    pub waiters: Vec<Waiter>,
    /// Blocks that wait for room.
    pub not_started: Vec<NotStarted>,
}

impl WaitReport {
    pub(crate) fn sort(&mut self) {
        self.waiters.sort_by(|a, b| a.who.cmp(&b.who));
    }
}

/// Prints runs of threads that wait alike as one line.
impl fmt::Display for WaitReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut at = 0;
        while let Some(first) = self.waiters.get(at) {
            let mut end = at + 1;
            if let Who::Thread { block, thread, launch, rank, .. } = &first.who {
                while let Some(next) = self.waiters.get(end) {
                    let Who::Thread { block: b, thread: t, launch: l, rank: r, .. } = &next.who else { break };
                    let follows = (r, l, b) == (rank, launch, block) && *t as usize == *thread as usize + (end - at);
                    if !follows || next.wait != first.wait || next.site != first.site {
                        break;
                    }
                    end += 1;
                }
            }
            write!(f, "\n  {}", first.who)?;
            if let (true, Some(Waiter { who: Who::Thread { thread, .. }, .. })) =
                (end - at > 1, self.waiters.get(end - 1))
            {
                write!(f, " to {thread}")?;
            }
            write!(f, ": {}", first.wait)?;
            match (&first.site, &first.wait) {
                (Some(site), WaitKind::Pause | WaitKind::Ready) => write!(f, " (last seen at {site})")?,
                (Some(site), _) => write!(f, " at {site}")?,
                (None, _) => {}
            }
            at = end;
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

/// Why a grid was refused or ended badly.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
#[non_exhaustive]
pub enum LaunchError {
    /// An extent of the grid or of the block is zero.
    #[error("{what} of {}x{}x{} has an extent of zero", dim.x, dim.y, dim.z)]
    ZeroExtent {
        /// "grid" or "block".
        what: &'static str,
        /// Its extents.
        dim: Dim3,
    },
    /// Too many threads a block.
    #[error("{threads} threads a block, the limit is {limit}")]
    BlockTooLarge {
        /// What was asked.
        threads: u64,
        /// What there is.
        limit: u64,
    },
    /// One extent of the grid or of the block is too large.
    #[error("{what} extent {axis} is {asked}, the limit is {limit}")]
    Extent {
        /// "grid" or "block".
        what: &'static str,
        /// 'x', 'y' or 'z'.
        axis: char,
        /// What was asked.
        asked: u32,
        /// What there is.
        limit: u32,
    },
    /// Too much dynamic shared memory.
    #[error("{asked} bytes of dynamic shared memory a block, the limit is {limit}")]
    DynamicShared {
        /// What was asked, in bytes.
        asked: usize,
        /// What there is, in bytes.
        limit: usize,
    },
    /// A cooperative grid cannot be wholly resident.
    #[error(
        "cooperative grid `{grid}` of {blocks} blocks cannot be resident: {free} of {limit} blocks are free on rank {rank}"
    )]
    NotResident {
        /// Name of the grid.
        grid: Arc<str>,
        /// Device.
        rank: u32,
        /// Blocks of the grid.
        blocks: u64,
        /// Blocks that other grids of the device leave.
        free: u64,
        /// Blocks that can be resident on the device at a time.
        limit: u64,
    },
    /// The machine has no memory, or no mappings, for the stacks of a block.
    #[error(
        "no stacks for block {block} of grid `{grid}` ({threads} threads): {cause}; fewer resident blocks need fewer"
    )]
    OutOfStacks {
        /// Name of the grid.
        grid: Arc<str>,
        /// Linear index of the block.
        block: u64,
        /// Threads of the block.
        threads: u32,
        /// What the operating system said.
        cause: String,
    },
    /// A thread panicked.
    #[error("{who} panicked: {message}")]
    Panicked {
        /// The thread.
        who: Who,
        /// Message and place of the panic.
        message: String,
    },
    /// A thread trapped.
    #[error("{who} trapped: {message}")]
    Trapped {
        /// The thread.
        who: Who,
        /// The text of the trap.
        message: String,
    },
    /// A barrier, an exchange or shared memory was used in a way that a GPU does not define.
    #[error("{who}: {message}{report}")]
    Misuse {
        /// The thread that was seen doing it.
        who: Who,
        /// What is wrong.
        message: String,
        /// Who waits where in that block.
        report: WaitReport,
    },
    /// All threads left in a block wait for each other.
    #[error("rank {rank}, grid `{grid}`, block {block}: no thread can ever run again{report}")]
    Stuck {
        /// Device.
        rank: u32,
        /// Name of the grid.
        grid: Arc<str>,
        /// Linear index of the block.
        block: u64,
        /// Who waits where in that block.
        report: WaitReport,
    },
    /// The grid did not end within the limit of its world (threads mode).
    #[error("rank {rank}, grid `{grid}`: has not ended after {limit_ns} ns{report}")]
    NoProgress {
        /// Device.
        rank: u32,
        /// Name of the grid.
        grid: Arc<str>,
        /// The limit, in nanoseconds.
        limit_ns: u64,
        /// Who waits where on that device.
        report: WaitReport,
    },
    /// The world ended before the grid did.
    #[error("grid `{grid}` was ended with its world: {reason}")]
    WorldEnded {
        /// Name of the grid.
        grid: Arc<str>,
        /// Why the world ended.
        reason: String,
    },
}

/// Why a world ended badly.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
#[non_exhaustive]
pub enum WorldError {
    /// Nobody can run, or nobody got any further for too long.
    #[error("no progress: {reason}{report}")]
    NoProgress {
        /// Which limit was reached.
        reason: String,
        /// Who waits where.
        report: WaitReport,
    },
    /// A service panicked.
    #[error("service `{name}` panicked: {message}")]
    ServicePanicked {
        /// Its name.
        name: Arc<str>,
        /// Message of the panic.
        message: String,
    },
    /// A grid failed and nobody looked at its ticket.
    #[error("a grid failed and nobody asked for its result: {0}")]
    UnseenFailure(LaunchError),
    /// The operating system gave no stack for a host function or a service, or no thread.
    #[error("cannot start {who}: {cause}")]
    NoResources {
        /// For whom.
        who: Who,
        /// What the operating system said.
        cause: String,
    },
    /// `World::run` was called inside a world, or twice at a time.
    #[error("World::run was called while a world was running here")]
    Nested,
}
