// SPDX-License-Identifier: MIT OR Apache-2.0
//! Kernels of the tests that need GPUs: they show effects that a virtual GPU cannot. They also run on virtual GPUs, so
//! that their own mistakes are found without a GPU.
//!
//! | kernel | does |
//! | --- | --- |
//! | `hardware_exchange` | puts values to neighbours again and again, and checks each arrival |
//! | `hardware_stale` | reads lines by plain loads, lets a peer overwrite them, and reads them again |
//! | `hardware_flood` | posts from every thread of every block at once, while every block polls |
//! | `hardware_sparse` | posts from some lanes of a warp while the others go on to a vote of all |
//! | `hardware_pass` | passes values on to a neighbour by one put and one get, on the automatic route |
//! | `hardware_link` | waits for the kernel before it on the stream, and lets the next one start |
//! | `hardware_chunks` | puts a range in chunks that blocks take in turns |
//! | `hardware_print` | prints lines |
//! | `hardware_spin` | occupies SMs until the host ends it |
//! | `hardware_bulk` | streams data through shared memory to all ranks by bulk copies |
//! | `hardware_experts` | does what experts do between dispatch and combine |
//! | `hardware_late` | dispatches and combines with late warps, also without a barrier before a flag |
//! | `hardware_lanes`, `hardware_shared`, `hardware_convert` | check operations of warps, shared memory, and conversions |
#![no_std]
#![cfg_attr(target_arch = "nvptx64", feature(abi_ptx, asm_experimental_arch))]
#![warn(unreachable_pub)]

pub mod bulk;
pub mod experts;
pub mod primitives;

use bytemuck::{Pod, Zeroable};
pub use gin_device::coop::WARP_SIZE;
pub use gin_device::grid::CHUNK_BYTES;
use gin_device::prelude::*;
use gin_device::sys::{self, GlobalWord, Word};

/// Returns element `index` that `from` sends to `to` in round `round` (from 1).
#[inline(always)]
#[must_use]
pub const fn value(from: u32, to: u32, round: u64, index: u64) -> u64 {
    (round << 32) ^ ((from as u64) << 24) ^ ((to as u64) << 16) ^ index.wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

/// Fills memory with the bytes that a rank sends in a round, from byte `first` of them, on the CPU.
pub fn fill(to: &mut [u8], rank: u32, round: u64, first: usize) {
    for (index, byte) in to.iter_mut().enumerate() {
        *byte = (value(rank, 0, round, (first + index) as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8;
    }
}

#[inline(always)]
fn route(lsa: u64) -> Route {
    if lsa != 0 { Route::Auto } else { Route::Network }
}

/// Argument of [`hardware_exchange`].
#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable, Debug)]
pub struct Exchange {
    /// Context of the exchange.
    pub context: u32,
    /// Number of right neighbours to which it sends: 1 for a ring, one less than the number of ranks for all to all.
    pub neighbours: u32,
    /// Values for each neighbour.
    pub elements: u64,
    /// First element of the exchange's part of both windows.
    pub start: u64,
    /// Rounds.
    pub rounds: u64,
    /// Address of a word in device memory: rounds that earlier launches on this context completed, 0 at first.
    pub done: u64,
    /// Address of four words in device memory: the number of wrong values so far, and the round, sender and value of
    /// the first. 0 at first.
    pub wrong: u64,
    /// Pause at the start in nanoseconds, before any operation with a deadline.
    pub pause: u64,
    /// 1 to reach LSA peers by loads and stores, 0 to use the network.
    pub lsa: u64,
}

/// Buffers for arrivals.
const BUFFERS: u64 = 2;

/// Returns the number of elements of [`Exchange`]'s part of either window.
#[must_use]
pub const fn exchange_len(neighbours: u32, elements: u64) -> u64 {
    BUFFERS * neighbours as u64 * elements
}

/// Exchanges values with neighbours, and checks each arrival.
///
/// Signal `d` counts blocks from the `d`-th neighbour on the left. Signal `neighbours + d` counts the blocks that the
/// `d`-th neighbour on the right has checked. Counter `d` counts the puts to that neighbour whose source is free.
///
/// # Safety
/// - One block runs on every rank, with the same numbers. Windows, tables, signals and counter are as [`Exchange`]
///   describes, and no other code uses them.
#[kernel]
pub unsafe fn hardware_exchange(
    comm: Comm,
    inbox: Window<u64>,
    outbox: Window<u64>,
    plan: Exchange,
    deadline: Deadline,
) {
    pause(plan.pause);
    // Safety: the caller keeps the kernel's conditions.
    if let Err(fault) = unsafe { exchange(&comm, inbox, outbox, &plan, deadline) } {
        comm.report(fault);
    }
}

#[inline(always)]
unsafe fn exchange(
    comm: &Comm,
    inbox: Window<u64>,
    outbox: Window<u64>,
    plan: &Exchange,
    deadline: Deadline,
) -> Result<(), Fault> {
    let gin = Gin::new(comm, ContextId::new(plan.context)).route(route(plan.lsa));
    let world = comm.world();
    let (me, elements, neighbours) = (world.rank(), plan.elements as usize, plan.neighbours);
    // Safety: the caller keeps the kernel's conditions.
    let (done, wrong) = unsafe { (GlobalWord::new(plan.done), GlobalWord::new(plan.wrong)) };
    let before = done.load_relaxed_gpu();
    // Every thread has read the word before it changes.
    Block.sync();
    // Each distance has its own position in the windows of both sides.
    let place = |round: u64, distance: u32| {
        let block = (round % BUFFERS) * neighbours as u64 + distance as u64;
        (plan.start + block * plan.elements) as usize
    };
    for round in before + 1..=before + plan.rounds {
        for distance in 0..neighbours {
            let peer = world.after(distance + 1);
            let at = place(round, distance);
            // The counter does not say which puts have left, so all of them must have.
            gin.wait_counter(&Block, CounterId::new(distance), round - 1, deadline)?;
            for i in Block.stripe(elements) {
                outbox.write(at + i, value(me, peer.world(), round, i as u64));
            }
            // The peer has checked the buffer that this put overwrites.
            let checked = SignalId::new(neighbours + distance);
            gin.wait_signal(&Block, checked, (round - 1).saturating_sub(BUFFERS - 1), deadline)?;
            gin.put(peer, inbox.range(at, elements), outbox.range(at, elements))
                .signal(SignalId::new(distance).inc())
                .counter(CounterId::new(distance))
                .issue(&Block)?;
        }
        for distance in 0..neighbours {
            // The rank whose neighbour at this distance is the caller.
            let peer = world.after(world.size() - (distance + 1) % world.size());
            let at = place(round, distance);
            gin.wait_signal(&Block, SignalId::new(distance), round, deadline)?;
            for i in Block.stripe(elements) {
                let seen = inbox.read(at + i);
                if seen != value(peer.world(), me, round, i as u64) {
                    note(wrong, round, peer.world(), seen);
                }
            }
            gin.signal(peer, SignalId::new(neighbours + distance).inc()).issue(&Block)?;
        }
    }
    // A later launch begins when every put has left.
    for distance in 0..neighbours {
        gin.wait_counter(&Block, CounterId::new(distance), before + plan.rounds, deadline)?;
    }
    if Block.elect() {
        done.store_relaxed_gpu(before + plan.rounds);
    }
    Ok(())
}

/// Counts a wrong value, and keeps the first.
#[inline(always)]
fn note(wrong: GlobalWord, round: u64, from: u32, seen: u64) {
    if wrong.add_relaxed_gpu(1) == 0 {
        wrong.at(1).store_relaxed_gpu(round);
        wrong.at(2).store_relaxed_gpu(from as u64);
        wrong.at(3).store_relaxed_gpu(seen);
    }
}

/// Argument of [`hardware_stale`].
#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable, Debug)]
pub struct Stale {
    /// Elements.
    pub elements: u64,
    /// Rounds.
    pub rounds: u64,
    /// Address of a word for the barrier of the blocks, 0 at first.
    pub barrier: u64,
    /// Address of four words, as [`Exchange::wrong`].
    pub wrong: u64,
    /// 1 to get from the right neighbour, 0 to wait for the left neighbour's puts.
    pub get: u64,
    /// As [`Exchange::lsa`].
    pub lsa: u64,
}

/// Reads `data` with plain loads in all threads of all blocks, lets a peer overwrite it, and reads it again with plain
/// loads.
///
/// Only block 0 posts and waits. A barrier over the grid passes its observations on. Needs two signals in context 0.
///
/// # Safety
/// - The whole grid is resident, on every rank. Tables are as [`Stale`] describes. Both windows have `elements`
///   elements.
#[kernel]
pub unsafe fn hardware_stale(comm: Comm, data: Window<u64>, source: Window<u64>, plan: Stale, deadline: Deadline) {
    // Safety: the caller keeps the kernel's conditions.
    let (barrier, wrong) =
        unsafe { (GridBarrier::new(&comm, plan.barrier as usize as *mut u64), GlobalWord::new(plan.wrong)) };
    if let Err(fault) = stale(&comm, data, source, &plan, barrier, wrong, deadline) {
        comm.report(fault);
    }
}

#[inline(always)]
fn stale(
    comm: &Comm,
    data: Window<u64>,
    source: Window<u64>,
    plan: &Stale,
    mut barrier: GridBarrier<'_>,
    wrong: GlobalWord,
    deadline: Deadline,
) -> Result<(), Fault> {
    let gin = Gin::new(comm, ContextId::new(0)).route(route(plan.lsa));
    let world = comm.world();
    let (me, from) = (world.rank(), if plan.get != 0 { world.right() } else { world.left() });
    let (arrived, checked) = (SignalId::new(0), SignalId::new(1));
    let elements = plan.elements as usize;
    for round in 1..=plan.rounds {
        // Each block reads all elements, so the lines are now in the cache of every SM.
        for i in Block.stripe(elements) {
            let expected = if round == 1 { 0 } else { value(from.world(), 0, round - 1, i as u64) };
            let seen = data.read(i);
            if seen != expected {
                note(wrong, round, from.world(), seen);
            }
        }
        barrier.sync(deadline)?;
        if block_in_grid() == 0 {
            // All blocks have read the last round's data, which may now be overwritten. The neighbour that got the last
            // round's source has it.
            gin.signal(from, checked.inc()).issue(&Block)?;
            gin.wait_signal(&Block, checked, round, deadline)?;
            for i in Block.stripe(elements) {
                source.write(i, value(me, 0, round, i as u64));
            }
            if plan.get != 0 {
                // The left neighbour may get it now.
                gin.signal(world.left(), arrived.inc()).issue(&Block)?;
                gin.wait_signal(&Block, arrived, round, deadline)?;
                gin.get(world.right(), data.range(0, elements), source.range(0, elements)).issue(&Block)?;
                gin.flush(&Block, deadline)?;
            } else {
                gin.put(world.right(), data.range(0, elements), source.range(0, elements))
                    .signal(arrived.inc())
                    .issue(&Block)?;
                gin.wait_signal(&Block, arrived, round, deadline)?;
                // The source is written again in the next round.
                gin.flush(&Block, deadline)?;
            }
        }
        barrier.sync(deadline)?;
        for i in Block.stripe(elements) {
            let seen = data.read(i);
            if seen != value(from.world(), 0, round, i as u64) {
                note(wrong, round, from.world(), seen);
            }
        }
    }
    Ok(())
}

/// Argument of [`hardware_flood`].
#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable, Debug)]
pub struct Flood {
    /// Number of posting blocks, which are the first ones.
    pub posters: u32,
    /// Posts of each of their threads.
    pub each: u32,
}

/// Every thread of the first blocks puts values to the right neighbour, one by one, each with a signal. Every block
/// polls until all values of its context have arrived from the left neighbour.
///
/// Block `b` uses context `b % contexts`. Element `(block * threads + thread) * each + i` of `data` is the `i`-th put
/// of the same thread of the left neighbour: `value(left, me, 1, index)`. Needs a signal.
///
/// # Safety
/// - The whole grid is resident, on every rank. All ranks launch the same shape.
#[kernel]
pub unsafe fn hardware_flood(comm: Comm, data: Window<u64>, plan: Flood, deadline: Deadline) {
    if let Err(fault) = flood(&comm, data, &plan, deadline) {
        comm.report(fault);
    }
}

#[inline(always)]
fn flood(comm: &Comm, data: Window<u64>, plan: &Flood, deadline: Deadline) -> Result<(), Fault> {
    let (block, blocks, threads) = (block_in_grid(), grid_dim().count(), Block.size());
    let (contexts, world, arrived) = (comm.contexts(), comm.world(), SignalId::new(0));
    let posters = if plan.posters < blocks { plan.posters } else { blocks };
    let context = block % contexts;
    let gin = Gin::new(comm, ContextId::new(context)).route(Route::Network);
    let mut outcome = Ok(());
    if block < posters {
        let first = (block as u64 * threads as u64 + Block.rank() as u64) * plan.each as u64;
        for index in first..first + plan.each as u64 {
            let value = value(world.rank(), world.right().world(), 1, index);
            let to = data.at(index as usize);
            outcome = gin.put_value(world.right(), to, value).signal(arrived.inc()).deadline(deadline).issue(&Thread);
            if outcome.is_err() {
                break;
            }
        }
    }
    // A thread that failed ends its whole block.
    Block.agree(outcome)?;
    // Posting blocks of this context.
    let sharing = posters / contexts + (context < posters % contexts) as u32;
    gin.wait_signal(&Block, arrived, sharing as u64 * threads as u64 * plan.each as u64, deadline)
}

/// Returns whether a lane posts in a round of [`hardware_sparse`].
#[inline(always)]
#[must_use]
pub const fn posts(lane: u32, round: u32) -> bool {
    let mixed = (round * WARP_SIZE + lane).wrapping_mul(0x9e37_79b9);
    (mixed ^ mixed >> 15).wrapping_mul(0x85eb_ca6b) >> 30 != 0
}

/// Rounds of [`hardware_sparse`] between two votes.
pub const ROUNDS_OF_A_VOTE: u32 = 4;

/// The same post as a function, which many lanes may call.
mod outlined {
    use super::*;

    /// # Safety
    /// - `comm` and `data` are addresses of the parameters of a kernel, in memory of the GPU.
    #[inline(never)]
    pub(super) unsafe fn post(comm: u64, data: u64, index: u64, value: u64, deadline: Deadline) -> bool {
        // Safety: the caller's promise.
        let (comm, data) = unsafe { (*(comm as usize as *const Comm), *(data as usize as *const Window<u64>)) };
        super::post(&comm, data, index, value, deadline)
    }
}

#[inline(always)]
fn post(comm: &Comm, data: Window<u64>, index: u64, value: u64, deadline: Deadline) -> bool {
    let gin = Gin::new(comm, ContextId::new(0)).route(Route::Network);
    let (to, arrived) = (data.at(index as usize), SignalId::new(0));
    gin.put_value(comm.world().right(), to, value).signal(arrived.inc()).deadline(deadline).issue(&Thread).is_ok()
}

/// Some lanes of a warp put values to the right neighbour, each for itself and with a deadline, and the others go on to
/// the next round. All of them vote after [`ROUNDS_OF_A_VOTE`] rounds. At the end the warp waits for as many values.
///
/// Element `round * 32 + lane` of `data` is the value of a lane of the left neighbour. If `copies` are not 0, they
/// are addresses of copies of `comm` and `data` in memory of the GPU, and lanes call a function. Needs a signal.
///
/// # Safety
/// - One warp runs on every rank. All ranks launch the same numbers. `copies` are as above.
#[kernel]
pub unsafe fn hardware_sparse(comm: Comm, data: Window<u64>, rounds: u32, copies: [u64; 2], deadline: Deadline) {
    let (lane, world, calls) = (Block.rank(), comm.world(), copies[0] != 0);
    let (mut round, mut posted, mut failed) = (0, 0, false);
    while round < rounds {
        let end = round + ROUNDS_OF_A_VOTE;
        while round < end {
            if posts(lane, round) {
                let index = u64::from(round * WARP_SIZE + lane);
                let value = value(world.rank(), world.right().world(), 1, index);
                failed |= !if calls {
                    // Safety: guaranteed by the kernel's caller.
                    unsafe { outlined::post(copies[0], copies[1], index, value, deadline) }
                } else {
                    post(&comm, data, index, value, deadline)
                };
                posted += 1;
            }
            round += 1;
        }
        if Warp.any(failed) {
            return;
        }
    }
    let mut by = 1;
    while by < WARP_SIZE {
        posted += Warp.shuffle_xor(posted, by);
        by *= 2;
    }
    let gin = Gin::new(&comm, ContextId::new(0)).route(Route::Network);
    if let Err(fault) = gin.wait_signal(&Warp, SignalId::new(0), posted, deadline) {
        comm.report(fault);
    }
}

/// Returns the number of elements of `data` that [`hardware_pass`] needs for `elements` elements of `source`.
#[must_use]
pub const fn pass_len(elements: u64) -> u64 {
    2 * elements
}

/// Fills `source` with values for the right neighbour in round `round` (from 1, one more with each launch). Puts them
/// into the first half of the neighbour's `data`, and gets the left neighbour's `source` into the second half of its
/// own `data`. The halves are then equal. Operations use the automatic route. Needs a signal in context 0.
///
/// # Safety
/// - One block runs on every rank. `source` has `elements` elements and `data` twice as many, and no other code uses
///   them. No rank launches the next round before all have ended this one.
#[kernel]
pub unsafe fn hardware_pass(
    comm: Comm,
    data: Window<u64>,
    source: Window<u64>,
    elements: u64,
    round: u64,
    deadline: Deadline,
) {
    if let Err(fault) = pass(&comm, data, source, elements, round, deadline) {
        comm.report(fault);
    }
}

#[inline(always)]
fn pass(
    comm: &Comm,
    data: Window<u64>,
    source: Window<u64>,
    elements: u64,
    round: u64,
    deadline: Deadline,
) -> Result<(), Fault> {
    let gin = Gin::new(comm, ContextId::new(0));
    let (world, elements) = (comm.world(), elements as usize);
    let (me, right, left) = (world.rank(), world.right(), world.left());
    for i in Block.stripe(elements) {
        source.write(i, value(me, right.world(), round, i as u64));
    }
    gin.put(right, data.range(0, elements), source.range(0, elements)).signal(SignalId::new(0).inc()).issue(&Block)?;
    // The put's signal covers all earlier writes of the left neighbour.
    gin.wait_signal(&Block, SignalId::new(0), round, deadline)?;
    gin.get(left, data.range(elements, elements), source.range(0, elements)).issue(&Block)?;
    gin.flush(&Block, deadline)
}

/// Bytes that all blocks of a grid put together.
#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable, Debug)]
pub struct Chunked {
    /// Index of the first byte at the neighbour.
    pub to: u64,
    /// Index of the first byte to send.
    pub from: u64,
    /// Number of bytes.
    pub len: u64,
    /// Value of the signal after earlier launches.
    pub before: u64,
}

/// Puts bytes of `source` into the right neighbour's `data`, in chunks that the blocks take in turns. Each block raises
/// signal 0 of context 0 once, and waits until all blocks of the left neighbour have.
///
/// # Safety
/// - The whole grid is resident, on every rank. All ranks launch the same shape and the same plan.
#[kernel]
pub unsafe fn hardware_chunks(comm: Comm, data: Window<u8>, source: Window<u8>, plan: Chunked, deadline: Deadline) {
    if let Err(fault) = put_chunks(&comm, data, source, &plan, deadline) {
        comm.report(fault);
    }
}

#[inline(always)]
fn put_chunks(
    comm: &Comm,
    data: Window<u8>,
    source: Window<u8>,
    plan: &Chunked,
    deadline: Deadline,
) -> Result<(), Fault> {
    let (gin, right, arrived) = (Gin::new(comm, ContextId::new(0)), comm.world().right(), SignalId::new(0));
    let (to, from) = (plan.to as usize, plan.from as usize);
    for (start, len) in Block.chunks::<u8>(plan.len as usize) {
        gin.put(right, data.range(to + start, len), source.range(from + start, len)).issue(&Block)?;
    }
    gin.signal(right, arrived.inc()).issue(&Block)?;
    gin.wait_signal(&Block, arrived, plan.before + grid_dim().count() as u64, deadline)
}

/// Occupies SMs until the word at `stop` is not 0, or for `limit_ns` nanoseconds. Each block adds 1 to the word
/// at `started` when it begins.
///
/// # Safety
/// - Both are words in memory that this device reaches.
#[kernel]
pub unsafe fn hardware_spin(stop: *mut u64, started: *mut u64, limit_ns: u64) {
    // Safety: the caller keeps the kernel's conditions.
    let (stop, started) = unsafe { (GlobalWord::new(stop as usize as u64), GlobalWord::new(started as usize as u64)) };
    if Block.elect() {
        started.add_release_sys(1);
    }
    let start = sys::clock_ns();
    while stop.load_relaxed_sys() == 0 && sys::clock_ns().wrapping_sub(start) < limit_ns {
        sys::pause(200);
    }
}

/// Argument of [`hardware_link`].
#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable, Debug)]
pub struct Link {
    /// Address of a value for each thread of the grid: the number of kernels before, 0 at first.
    pub values: u64,
    /// Address of three words, 0 at first: the number of blocks that have ended; of blocks that began before all blocks
    /// of earlier kernels had ended; of threads that found a wrong value.
    pub words: u64,
    /// Pause of each block after it has let the next kernel start, in nanoseconds.
    pub pause: u64,
}

/// Waits for the kernel before it on the stream, lets the next one start, and adds 1 to the value of each thread at its
/// end. `number` kernels of the same shape were launched before.
///
/// # Safety
/// - The table is as [`Link`] describes. Kernels of one stream use it, one after another or as dependents.
#[kernel]
pub unsafe fn hardware_link(link: Link, number: u64) {
    let thread = block_in_grid() * Block.size() + Block.rank();
    let value = (link.values as usize as *mut u64).wrapping_add(thread as usize);
    // Safety: the caller keeps the kernel's conditions.
    let word = |index: u64| unsafe { GlobalWord::new(link.words + 8 * index) };
    let [ended, early, wrong] = [word(0), word(1), word(2)];
    if Block.elect() && ended.load_relaxed_gpu() < number * grid_dim().count() as u64 {
        early.red_add_relaxed_gpu(1);
    }
    sys::wait_for_predecessor();
    // Safety: as above. The kernel before has ended.
    let found = unsafe { value.read() };
    sys::let_dependents_start();
    pause(link.pause);
    if found != number {
        wrong.red_add_relaxed_gpu(1);
    }
    // Safety: as above. The next kernel waits until this one has ended.
    unsafe { value.write(number + 1) };
    Block.sync();
    if Block.elect() {
        ended.red_add_relaxed_gpu(1);
    }
}

/// Longest nap, in nanoseconds.
const NAP: u64 = 20_000;

#[inline(always)]
fn pause(ns: u64) {
    let start = sys::clock_ns();
    while sys::clock_ns().wrapping_sub(start) < ns {
        sys::pause(if ns < NAP { ns as u32 } else { NAP as u32 });
    }
}

/// Prints `lines` lines from each thread.
///
/// # Safety
/// - Any grid.
#[kernel]
pub unsafe fn hardware_print(comm: Comm, lines: u32) {
    for line in 0..lines {
        gin_println!(comm, "line {line} {:.3} {:#x} {}", line as f32 / 8.0, line, "done");
    }
}
