// SPDX-License-Identifier: MIT OR Apache-2.0
//! The functions that the device API needs of an executor of its threads on a CPU.
//!
//! On a GPU the hardware schedules threads; on a CPU an *executor* does, and this module is the whole seam between the
//! two: a table of functions, installed once for the process by [`install`]. `gin-virtual` is the executor that ships.
//! Without one, every OS thread is a grid of one block of one thread: enough for host code and single-thread tests.
//!
//! An executor decides for itself whether the calling code is one of its threads; code that is not (a proxy on an OS
//! thread of its own, say) must get the behaviour of no executor.

use core::panic::Location;
use core::sync::atomic::{AtomicPtr, Ordering};

/// Three extents or indices, as CUDA counts them.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Dim3 {
    /// Fastest.
    pub x: u32,
    /// Middle.
    pub y: u32,
    /// Slowest.
    pub z: u32,
}

/// Where a thread is in its grid.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Position {
    /// Index of the thread in its block.
    pub thread: Dim3,
    /// Threads per block.
    pub block_dim: Dim3,
    /// Index of the block in the grid.
    pub block: Dim3,
    /// Blocks per grid.
    pub grid_dim: Dim3,
}

impl Position {
    /// The only thread of the only block.
    pub const ALONE: Position = {
        let (zero, one) = (Dim3 { x: 0, y: 0, z: 0 }, Dim3 { x: 1, y: 1, z: 1 });
        Position { thread: zero, block_dim: one, block: zero, grid_dim: one }
    };
}

/// The result of a block barrier.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Reduction {
    /// Nothing (0).
    None,
    /// 1 if any thread's predicate is set.
    Or,
    /// 1 if every thread's predicate is set.
    And,
    /// The number of threads whose predicate is set.
    Count,
}

/// One arrival at a barrier of a block.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct BarrierCall {
    /// Barrier number in the block, 0 to 15.
    pub id: u32,
    /// Number of threads that take part, or 0 for the whole block.
    pub threads: u32,
    /// The reduction of the predicates.
    pub reduction: Reduction,
    /// This thread's predicate.
    pub predicate: bool,
    /// Where the call stands, for reports of barriers that cannot complete.
    pub site: &'static Location<'static>,
}

/// One lane's part in an exchange among lanes of a warp.
///
/// All lanes of `mask` must call with the same mask; each then sees the values of all. Shuffles, votes and the warp
/// barrier are made of this.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ExchangeCall {
    /// The lanes that take part; the caller's own among them.
    pub mask: u32,
    /// The value of this lane.
    pub value: u64,
    /// Where the call stands.
    pub site: &'static Location<'static>,
}

/// A piece of static shared memory: one per block and key.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SharedKey {
    /// Unique to the declaration: the address of a static.
    pub key: usize,
    /// Size in bytes.
    pub bytes: usize,
    /// Alignment in bytes.
    pub align: usize,
}

/// The functions of an executor.
#[derive(Clone, Copy, Debug)]
pub struct Executor {
    /// Called at every access to shared words: a place where another thread may be scheduled.
    pub switch_point: fn(),
    /// Called in every polling loop: this thread has nothing to do for about `ns` nanoseconds.
    pub pause: fn(ns: u32),
    /// Nanoseconds on the clock that deadlines are measured with.
    pub clock_ns: fn() -> u64,
    /// Cycles on a clock for measuring short times.
    pub cycles: fn() -> u64,
    /// Where the calling thread is.
    pub position: fn() -> Position,
    /// Barrier of the block.
    pub barrier: fn(BarrierCall) -> u32,
    /// Exchange among lanes; fills `out[lane]` for each lane of the mask, leaves the others.
    pub exchange: fn(ExchangeCall, out: &mut [u64; 32]),
    /// A set of lanes of the warp that are here together, the caller's among them.
    pub active_mask: fn(site: &'static Location<'static>) -> u32,
    /// Static shared memory of the block, zeroed at first use.
    pub shared: fn(SharedKey) -> *mut u8,
    /// Dynamic shared memory of the block and its size in bytes.
    pub dynamic_shared: fn() -> (*mut u8, usize),
    /// Ends the grid with an error that carries this text.
    pub trap: fn(&'static str) -> !,
}

static EXECUTOR: AtomicPtr<Executor> = AtomicPtr::new(core::ptr::null_mut());

/// Makes `executor` the one of this process. The first call wins; later ones must bring the same executor.
///
/// Returns whether it is now, or was already, in place.
pub fn install(executor: &'static Executor) -> bool {
    let new = core::ptr::from_ref(executor).cast_mut();
    match EXECUTOR.compare_exchange(core::ptr::null_mut(), new, Ordering::AcqRel, Ordering::Acquire) {
        Ok(_) => true,
        Err(present) => core::ptr::eq(present, new),
    }
}

#[inline(always)]
pub(crate) fn executor() -> Option<&'static Executor> {
    // Safety: the pointer is null or came from a `&'static Executor` in `install`.
    unsafe { EXECUTOR.load(Ordering::Acquire).as_ref() }
}

/// A place where another thread may be scheduled: every access to a shared word passes here.
#[inline(always)]
pub fn switch_point() {
    if let Some(executor) = executor() {
        (executor.switch_point)();
    }
}
