// SPDX-License-Identifier: MIT OR Apache-2.0
//! The interface between the device API and an executor of its threads on a CPU.
//!
//! On a GPU the hardware schedules threads; on a CPU an *executor* does. The interface is a table of functions,
//! [`Executor`], which [`install`] sets once for the process. `gin-virtual` is the executor that ships. Without an
//! executor, every OS thread is a grid of one block of one thread, which is enough for host code and single-thread
//! tests.
//!
//! An executor finds out whether the caller is one of its threads. Other code, such as a proxy on an OS thread of its
//! own, must get the behaviour without an executor.

pub mod watch;

use crate::fault::Fault;
use crate::sys::tensor::TensorBox;
use core::panic::Location;
use core::sync::atomic::{AtomicBool, AtomicPtr, Ordering};

/// Three extents or indices, in CUDA's order.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Dim3 {
    /// The dimension that varies fastest.
    pub x: u32,
    /// The middle dimension.
    pub y: u32,
    /// The dimension that varies slowest.
    pub z: u32,
}

/// The position of a thread in its grid.
///
/// ```
/// use gin_device::exec::{Dim3, Position};
///
/// assert_eq!(Position::ALONE.thread, Dim3::default());
/// assert_eq!(Position::ALONE.grid_dim, Dim3 { x: 1, y: 1, z: 1 });
/// ```
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
    /// The thread waits until the barrier is complete. Otherwise it only arrives, without a reduction.
    pub waits: bool,
    /// The call's place in the source, for reports of barriers that cannot complete.
    pub site: &'static Location<'static>,
}

/// One lane's part in an exchange among lanes of a warp.
///
/// All lanes of `mask` must call with the same mask; each then gets the values of all. Shuffles, votes and the warp
/// barrier are built on exchanges.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ExchangeCall {
    /// The lanes that take part, the caller's among them.
    pub mask: u32,
    /// The value of this lane.
    pub value: u64,
    /// The call orders memory among the lanes, as `bar.warp.sync` does. Votes, shuffles, matches and reductions of PTX
    /// do not.
    pub orders: bool,
    /// The call's place in the source.
    pub site: &'static Location<'static>,
}

/// A declaration of static shared memory, which has one copy per block.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SharedKey {
    /// Unique to the declaration: the address of a static.
    pub key: usize,
    /// Size in bytes.
    pub bytes: usize,
    /// Alignment in bytes.
    pub align: usize,
}

/// A step of bulk copies of the calling thread ([`sys::bulk`](crate::sys::bulk)). Addresses and sizes are multiples of
/// 16.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum BulkCall {
    /// Starts a copy from global to shared memory.
    ToShared {
        /// Address of the destination.
        to: u64,
        /// Address of the source.
        from: u64,
        /// Number of bytes.
        bytes: u32,
        /// Address of the mbarrier that expects the bytes.
        barrier: u64,
    },
    /// Starts a copy of a box of a matrix from global to shared memory.
    BoxToShared {
        /// Address of the destination.
        to: u64,
        /// The box.
        from: TensorBox,
        /// Address of the mbarrier that expects the bytes.
        barrier: u64,
    },
    /// Starts a copy from shared to global memory.
    ToGlobal {
        /// Address of the destination.
        to: u64,
        /// Address of the source.
        from: u64,
        /// Number of bytes.
        bytes: u32,
    },
    /// Ends the open group of copies to global memory.
    Commit,
    /// Waits until at most the last `left` groups are incomplete.
    Wait {
        /// Number of groups.
        left: u32,
        /// Waits only until the sources have been read.
        sources: bool,
    },
    /// Makes the thread's stores to shared memory visible to the engine.
    Fence,
}

/// A product of the calling thread's warpgroup over 128 bytes of inner elements
/// ([`sys::warpgroup`](crate::sys::warpgroup)).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ProductCall {
    /// Address of the left factor in shared memory.
    pub left: u64,
    /// Address of the right factor in shared memory.
    pub right: u64,
    /// The factors are E4M3, and the right one has half as many rows. Otherwise they are BF16.
    pub is_e4m3: bool,
}

/// The functions of an executor.
#[derive(Clone, Copy, Debug)]
pub struct Executor {
    /// Called at every access to shared words; the executor may schedule another thread.
    pub switch_point: fn(),
    /// Called in every polling loop: the thread is idle for about `ns` nanoseconds.
    pub pause: fn(ns: u32),
    /// Called when a wait of the calling thread begins, with the timeout that it would report now, if that is known.
    /// Waits may be nested. A loop that pauses outside of waits is none: the executor cannot tell when it ends.
    pub wait_begins: fn(Option<Fault>),
    /// Called when the calling thread's innermost wait ends.
    pub wait_ends: fn(),
    /// Called at each poll of a wait for a signal or counter, with the value seen.
    pub sees: fn(u64),
    /// Returns nanoseconds on the clock of deadlines.
    pub clock_ns: fn() -> u64,
    /// Returns the same as `clock_ns`, and gives no other thread a turn.
    pub peek_clock_ns: fn() -> u64,
    /// Returns cycles on a clock for short times.
    pub cycles: fn() -> u64,
    /// Returns the calling thread's position.
    pub position: fn() -> Position,
    /// Waits at a barrier of the block and returns its reduction.
    pub barrier: fn(BarrierCall) -> u32,
    /// Exchanges values among lanes. Fills `out[lane]` for each lane of the mask and leaves the others.
    pub exchange: fn(ExchangeCall, out: &mut [u64; 32]),
    /// Returns lanes of the warp that have reached this call together, the caller's among them.
    pub active_mask: fn(site: &'static Location<'static>) -> u32,
    /// Records the place of a call by one thread alone, for reports of its wait.
    pub note_place: fn(site: &'static Location<'static>),
    /// Returns static shared memory of the block, zeroed at its first use.
    pub shared: fn(SharedKey) -> *mut u8,
    /// Returns the block's dynamic shared memory and its size in bytes.
    pub dynamic_shared: fn() -> (*mut u8, usize),
    /// Waits until the grid before the caller's on its stream has ended.
    pub wait_for_predecessor: fn(site: &'static Location<'static>),
    /// Lets the next grid of the stream start, as far as the caller's block decides that.
    pub let_dependents_start: fn(),
    /// Does a step of bulk copies.
    pub bulk: fn(BulkCall, &'static Location<'static>),
    /// Multiplies, and adds to the calling thread's part of the sums.
    pub product: fn(ProductCall, &mut [f32], &'static Location<'static>),
    /// Ends the grid with an error that carries this text.
    pub trap: fn(&'static str) -> !,
    /// Called with accesses, fences and posts once [`watch::turn_on`] was called. The location is that of the access.
    pub watch: fn(watch::Event, &'static Location<'static>),
}

/// The executor watches accesses.
static WATCHED: AtomicBool = AtomicBool::new(false);

static EXECUTOR: AtomicPtr<Executor> = AtomicPtr::new(core::ptr::null_mut());

/// Makes `executor` the executor of this process, unless the process has one.
///
/// Returns whether `executor` is in place, by this call or an earlier one.
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

/// A wait of the calling thread, until dropped.
#[derive(Debug)]
pub(crate) struct Waits(());

impl Waits {
    /// Announces a wait to the executor. `timeout` is the fault that it would report, if the caller knows it.
    #[inline(always)]
    pub(crate) fn begin(timeout: Option<Fault>) -> Self {
        if let Some(executor) = executor() {
            (executor.wait_begins)(timeout);
        }
        Self(())
    }
}

impl Drop for Waits {
    #[inline(always)]
    fn drop(&mut self) {
        if let Some(executor) = executor() {
            (executor.wait_ends)();
        }
    }
}

/// Tells the executor the value that the calling thread has seen in its wait.
#[inline(always)]
pub(crate) fn sees(value: u64) {
    if let Some(executor) = executor() {
        (executor.sees)(value);
    }
}

/// Lets the executor schedule another thread. Every access to a shared word calls this.
#[inline(always)]
pub fn switch_point() {
    if let Some(executor) = executor() {
        (executor.switch_point)();
    }
}
