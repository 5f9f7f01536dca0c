// SPDX-License-Identifier: MIT OR Apache-2.0
//! Grids, their limits, and tickets of launched grids.

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use gin_device::exec::Dim3;

use crate::error::LaunchError;
use crate::host::block_on;
use crate::lock::lock;
use crate::shared::SHARED_LIMIT;

/// Largest number of threads of a block.
pub const BLOCK_THREADS_LIMIT: u64 = 1024;
const BLOCK_LIMITS: [u32; 3] = [1024, 1024, 64];
const GRID_LIMITS: [u32; 3] = [0x7fff_ffff, 65_535, 65_535];

/// A stream of a device. Its grids run one after the other; grids of different streams run concurrently.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct StreamId(pub u32);

/// A grid of threads to launch.
///
/// ```
/// use gin_virtual::Grid;
///
/// let grid = Grid::new("kernel", 2, 64, || ()).dynamic_shared(1 << 10);
/// assert_eq!((grid.blocks(), grid.threads()), (2, 64));
/// assert!(grid.check().is_ok());
/// let wide = Grid::new("kernel", 1, 2048, || ()).check().unwrap_err();
/// assert_eq!(wide.to_string(), "block extent x is 2048, the limit is 1024");
/// ```
#[derive(Clone)]
pub struct Grid {
    /// Name of the kernel, used in reports.
    pub name: Arc<str>,
    /// Number of blocks in each dimension.
    pub grid_dim: Dim3,
    /// Number of threads per block in each dimension.
    pub block_dim: Dim3,
    /// Dynamic shared memory per block in bytes. It is aligned to 128 bytes and filled with `0xcd`.
    pub dynamic_shared: usize,
    /// True if all blocks must be resident together. The launch fails if they cannot be.
    pub cooperative: bool,
    /// True if the grid may start as soon as each block of the grid before it on its stream has ended or called
    /// `let_dependents_start`. Each of its threads must then call `wait_for_predecessor` before it ends.
    pub dependent: bool,
    /// Body of the kernel, called once in each thread.
    pub body: Arc<dyn Fn() + Send + Sync>,
}

impl Grid {
    /// Creates a one-dimensional grid of `blocks` blocks of `threads` threads, without dynamic shared memory.
    pub fn new(name: &str, blocks: u32, threads: u32, body: impl Fn() + Send + Sync + 'static) -> Self {
        Grid {
            name: name.into(),
            grid_dim: Dim3 { x: blocks, y: 1, z: 1 },
            block_dim: Dim3 { x: threads, y: 1, z: 1 },
            dynamic_shared: 0,
            cooperative: false,
            dependent: false,
            body: Arc::new(body),
        }
    }

    /// Sets the bytes of dynamic shared memory per block.
    pub fn dynamic_shared(self, bytes: usize) -> Self {
        Grid { dynamic_shared: bytes, ..self }
    }

    /// Makes the grid cooperative.
    pub fn cooperative(self) -> Self {
        Grid { cooperative: true, ..self }
    }

    /// Makes the grid dependent.
    pub fn dependent(self) -> Self {
        Grid { dependent: true, ..self }
    }

    /// Returns the number of blocks of the grid.
    pub fn blocks(&self) -> u64 {
        volume(self.grid_dim)
    }

    /// Returns the number of threads of a block.
    pub fn threads(&self) -> u64 {
        volume(self.block_dim)
    }

    /// Checks the limits of a launch as a GPU does.
    ///
    /// # Errors
    /// Fails if an extent is zero or too large, or if a block has too many threads or too much dynamic shared memory.
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
            .field("dependent", &self.dependent)
            .finish_non_exhaustive()
    }
}

pub(crate) fn volume(dim: Dim3) -> u64 {
    // The limits of `Grid::check` keep this below 2^63. Before the check it must not overflow either.
    u64::from(dim.x).saturating_mul(u64::from(dim.y)).saturating_mul(u64::from(dim.z))
}

pub(crate) fn unflatten(linear: u64, dim: Dim3) -> Dim3 {
    let (x, y) = (u64::from(dim.x), u64::from(dim.y));
    // Each index is below an extent, which has 32 bits.
    Dim3 { x: (linear % x) as u32, y: (linear / x % y) as u32, z: (linear / x / y) as u32 }
}

/// A launched grid, shared by its ticket and the engine that runs it.
pub(crate) struct GridRun {
    pub(crate) grid: Grid,
    pub(crate) device: u32,
    pub(crate) stream: StreamId,
    /// Number of the launch on its device, from 1.
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
        let mut slot = lock(&self.outcome);
        slot.get_or_insert(outcome);
        self.done.store(true, Ordering::Release);
    }

    /// Returns true once the grid has ended and any failure has been read.
    pub(crate) fn is_settled(&self) -> bool {
        self.done.load(Ordering::Acquire) && self.unseen_failure().is_none()
    }

    pub(crate) fn unseen_failure(&self) -> Option<LaunchError> {
        if self.seen.load(Ordering::Acquire) {
            return None;
        }
        lock(&self.outcome).clone()?.err()
    }
}

/// A launched grid to wait for.
///
/// Dropping the ticket does not end the grid. A failure that no ticket has read ends `World::run` with
/// [`WorldError::UnseenFailure`](crate::WorldError::UnseenFailure).
///
/// ```
/// use gin_virtual::{DeviceConfig, Grid, LaunchError, SeededConfig, StreamId, World};
///
/// let world = World::seeded(SeededConfig::new(1));
/// let gpu = world.device(DeviceConfig::default());
/// let host = || gpu.launch(StreamId(0), Grid::new("bad", 1, 1, || panic!("no")))?.wait();
/// let results = world.run(vec![host])?;
/// assert!(matches!(results[..], [Err(LaunchError::Panicked { .. })]));
/// # Ok::<(), gin_virtual::WorldError>(())
/// ```
#[derive(Clone)]
pub struct LaunchTicket(pub(crate) Arc<GridRun>);

impl LaunchTicket {
    /// Returns true once the grid has ended, with success or failure.
    pub fn is_done(&self) -> bool {
        self.0.done.load(Ordering::Acquire)
    }

    /// Returns the grid's result; `None` while it runs.
    pub fn result(&self) -> Option<Result<(), LaunchError>> {
        if !self.is_done() {
            return None;
        }
        self.0.seen.store(true, Ordering::Release);
        lock(&self.0.outcome).clone()
    }

    /// Waits until the grid has ended, as [`block_on`] does.
    ///
    /// # Errors
    /// Fails with the error that ended the grid.
    #[track_caller]
    pub fn wait(&self) -> Result<(), LaunchError> {
        block_on(|| self.is_done());
        self.result().unwrap_or_else(|| {
            // `block_on` returns early only while this coroutine is being unwound.
            Err(LaunchError::WorldEnded {
                grid: self.0.grid.name.clone(),
                reason: "the waiting function was ended".into(),
            })
        })
    }

    /// Returns the name of the grid.
    pub fn name(&self) -> &str {
        &self.0.grid.name
    }
}

impl fmt::Debug for LaunchTicket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LaunchTicket").field("grid", &self.0.grid).field("done", &self.is_done()).finish()
    }
}
