// SPDX-License-Identifier: MIT OR Apache-2.0
//! Grids, their limits, and tickets for launched ones.

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use gin_device::exec::Dim3;

use crate::error::LaunchError;
use crate::host::block_on;

/// Shared memory that a block can have, static and dynamic together, in bytes (CUDA C++ programming guide, compute
/// capability 9.0).
pub const SHARED_LIMIT: usize = 227 << 10;
/// Threads that a block can have.
pub const BLOCK_THREADS_LIMIT: u64 = 1024;
const BLOCK_LIMITS: [u32; 3] = [1024, 1024, 64];
const GRID_LIMITS: [u32; 3] = [0x7fff_ffff, 65_535, 65_535];

/// A queue of grids of one device: they run one after the other. Grids of different streams run concurrently.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct StreamId(pub u32);

/// A grid of threads to be launched.
#[derive(Clone)]
pub struct Grid {
    /// Name in reports: the kernel's.
    pub name: Arc<str>,
    /// Blocks.
    pub grid_dim: Dim3,
    /// Threads a block.
    pub block_dim: Dim3,
    /// Dynamic shared memory a block, in bytes. It is aligned to 128 bytes and filled with `0xcd`.
    pub dynamic_shared: usize,
    /// Whether all blocks must be resident together; the launch is refused if they cannot be.
    pub cooperative: bool,
    /// What each thread does, called once in each.
    pub body: Arc<dyn Fn() + Send + Sync>,
}

impl Grid {
    /// A grid of `blocks` blocks of `threads` threads in one dimension, without dynamic shared memory.
    pub fn new(name: &str, blocks: u32, threads: u32, body: impl Fn() + Send + Sync + 'static) -> Self {
        Grid {
            name: name.into(),
            grid_dim: Dim3 { x: blocks, y: 1, z: 1 },
            block_dim: Dim3 { x: threads, y: 1, z: 1 },
            dynamic_shared: 0,
            cooperative: false,
            body: Arc::new(body),
        }
    }

    /// The same with so many bytes of dynamic shared memory a block.
    pub fn dynamic_shared(self, bytes: usize) -> Self {
        Grid { dynamic_shared: bytes, ..self }
    }

    /// The same as a cooperative grid.
    pub fn cooperative(self) -> Self {
        Grid { cooperative: true, ..self }
    }

    /// Blocks of the grid.
    pub fn blocks(&self) -> u64 {
        volume(self.grid_dim)
    }

    /// Threads of a block.
    pub fn threads(&self) -> u64 {
        volume(self.block_dim)
    }

    /// Checks the limits of a launch as a GPU does.
    ///
    /// # Errors
    /// An extent that is zero or too large, too many threads a block, too much dynamic shared memory.
    pub fn check(&self) -> Result<(), LaunchError> {
        let sides = [("grid", self.grid_dim, GRID_LIMITS), ("block", self.block_dim, BLOCK_LIMITS)];
        for (what, dim, limits) in sides {
            let extents = [dim.x, dim.y, dim.z];
            if extents.contains(&0) {
                return Err(LaunchError::ZeroExtent { what, dim });
            }
            for ((asked, limit), axis) in extents.into_iter().zip(limits).zip(['x', 'y', 'z']) {
                if asked > limit {
                    return Err(LaunchError::Extent { what, axis, asked, limit });
                }
            }
        }
        if self.threads() > BLOCK_THREADS_LIMIT {
            return Err(LaunchError::BlockTooLarge { threads: self.threads(), limit: BLOCK_THREADS_LIMIT });
        }
        if self.dynamic_shared > SHARED_LIMIT {
            return Err(LaunchError::DynamicShared { asked: self.dynamic_shared, limit: SHARED_LIMIT });
        }
        Ok(())
    }
}

impl fmt::Debug for Grid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Grid")
            .field("name", &self.name)
            .field("grid_dim", &self.grid_dim)
            .field("block_dim", &self.block_dim)
            .field("dynamic_shared", &self.dynamic_shared)
            .field("cooperative", &self.cooperative)
            .finish_non_exhaustive()
    }
}

pub(crate) fn volume(dim: Dim3) -> u64 {
    // The limits of `Grid::check` keep this below 2^63; before the check it must not overflow either.
    u64::from(dim.x).saturating_mul(u64::from(dim.y)).saturating_mul(u64::from(dim.z))
}

pub(crate) fn unflatten(linear: u64, dim: Dim3) -> Dim3 {
    let (x, y) = (u64::from(dim.x), u64::from(dim.y));
    // Each index is below an extent, which has 32 bits.
    Dim3 { x: (linear % x) as u32, y: (linear / x % y) as u32, z: (linear / x / y) as u32 }
}

/// A launched grid, shared by the ticket and the engine that runs it.
pub(crate) struct GridRun {
    pub(crate) grid: Grid,
    pub(crate) device: u32,
    pub(crate) stream: StreamId,
    /// Number on its device, from 1.
    pub(crate) launch: u32,
    pub(crate) stack_bytes: usize,
    outcome: Mutex<Option<Result<(), LaunchError>>>,
    done: AtomicBool,
    seen: AtomicBool,
}

impl GridRun {
    pub(crate) fn new(grid: Grid, device: u32, stream: StreamId, launch: u32, stack_bytes: usize) -> Self {
        GridRun {
            grid,
            device,
            stream,
            launch,
            stack_bytes,
            outcome: Mutex::new(None),
            done: AtomicBool::new(false),
            seen: AtomicBool::new(false),
        }
    }

    pub(crate) fn finish(&self, outcome: Result<(), LaunchError>) {
        let mut slot = self.outcome.lock().unwrap_or_else(PoisonError::into_inner);
        slot.get_or_insert(outcome);
        self.done.store(true, Ordering::Release);
    }

    /// Whether nobody needs to hear of it any more.
    pub(crate) fn is_settled(&self) -> bool {
        self.done.load(Ordering::Acquire) && self.unseen_failure().is_none()
    }

    pub(crate) fn unseen_failure(&self) -> Option<LaunchError> {
        if self.seen.load(Ordering::Acquire) {
            return None;
        }
        self.outcome.lock().unwrap_or_else(PoisonError::into_inner).clone()?.err()
    }
}

/// A launched grid, to wait for.
///
/// Dropping it does not end the grid; a failure that no ticket was asked about ends `World::run` with
/// [`WorldError::UnseenFailure`](crate::WorldError::UnseenFailure).
#[derive(Clone)]
pub struct LaunchTicket(pub(crate) Arc<GridRun>);

impl LaunchTicket {
    /// Whether the grid has ended, well or badly.
    pub fn is_done(&self) -> bool {
        self.0.done.load(Ordering::Acquire)
    }

    /// How the grid ended; `None` while it runs.
    pub fn result(&self) -> Option<Result<(), LaunchError>> {
        if !self.is_done() {
            return None;
        }
        self.0.seen.store(true, Ordering::Release);
        self.0.outcome.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Waits until the grid has ended, as [`block_on`] does.
    ///
    /// # Errors
    /// Why the grid ended badly.
    #[track_caller]
    pub fn wait(&self) -> Result<(), LaunchError> {
        block_on(|| self.is_done());
        self.result().unwrap_or_else(|| {
            // Only while this coroutine is being unwound does `block_on` return early.
            Err(LaunchError::WorldEnded {
                grid: self.0.grid.name.clone(),
                reason: "the waiting function was ended".into(),
            })
        })
    }

    /// Name of the grid.
    pub fn name(&self) -> &str {
        &self.0.grid.name
    }
}

impl fmt::Debug for LaunchTicket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LaunchTicket").field("grid", &self.0.grid).field("done", &self.is_done()).finish()
    }
}
