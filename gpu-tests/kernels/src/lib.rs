// SPDX-License-Identifier: MIT OR Apache-2.0
//! Kernels of the tests that need GPUs: what these show, a virtual GPU cannot. They run there too, so that their own
//! mistakes are found without a GPU.
//!
//! | kernel | does |
//! | --- | --- |
//! | `hardware_exchange` | puts values to neighbours again and again, and checks each that arrives |
//! | `hardware_stale` | reads lines by plain loads, has them overwritten by a peer, and reads them again elsewhere |
//! | `hardware_flood` | posts from every thread of every block at once, while every block polls |
//! | `hardware_pass` | passes values on to a neighbour by one put and one get, on whichever route there is |
//! | `hardware_spin` | takes processors until the host says otherwise |
#![no_std]
#![cfg_attr(target_arch = "nvptx64", feature(abi_ptx, asm_experimental_arch))]
#![warn(unreachable_pub)]

use bytemuck::{Pod, Zeroable};
use gin_device::coop::{block_in_grid, grid_dim};
use gin_device::grid::GridBarrier;
use gin_device::prelude::*;
use gin_device::sys::{self, GlobalWord, Word};

/// What `from` sends to `to` as element `index` in round `round` (from 1).
#[inline(always)]
#[must_use]
pub const fn value(from: u32, to: u32, round: u64, index: u64) -> u64 {
    (round << 32) ^ ((from as u64) << 24) ^ ((to as u64) << 16) ^ index.wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

#[inline(always)]
fn route(lsa: u64) -> Route {
    if lsa != 0 { Route::Auto } else { Route::Network }
}

/// What [`hardware_exchange`] does.
#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable, Debug)]
pub struct Exchange {
    /// Its context.
    pub context: u32,
    /// How many neighbours on the right it sends to: 1 is a ring, one less than there are ranks all to all.
    pub neighbours: u32,
    /// Values for each neighbour.
    pub elements: u64,
    /// First element of its part of both windows.
    pub start: u64,
    /// Rounds.
    pub rounds: u64,
    /// Address of a word in device memory: rounds done by earlier launches on this context, 0 at first.
    pub done: u64,
    /// Address of four words in device memory: values that were wrong so far; of the first of them the round, the
    /// sender and the value. 0 at first.
    pub wrong: u64,
    /// Nanoseconds that it waits for at its start, before anything that has a deadline.
    pub pause: u64,
    /// Whether loads and stores are the route to LSA peers: 1, or 0 for the network.
    pub lsa: u64,
}

/// Buffers for arrivals.
const BUFFERS: u64 = 2;

/// Elements that [`Exchange`]'s part of either window has.
#[must_use]
pub const fn exchange_len(neighbours: u32, elements: u64) -> u64 {
    BUFFERS * neighbours as u64 * elements
}

/// Exchanges values with neighbours; each that arrives is checked.
///
/// Signals: `d` counts blocks from the `d`-th neighbour on the left, `neighbours + d` what the `d`-th on the right has
/// checked. Counter `d` counts what has left for that one.
///
/// # Safety
/// - One block, on every rank, with the same numbers; windows, tables, signals and counter are as [`Exchange`] says,
///   and nobody else uses them.
#[kernel]
pub unsafe fn hardware_exchange(
    comm: Comm,
    inbox: Window<u64>,
    outbox: Window<u64>,
    plan: Exchange,
    deadline: Deadline,
) {
    pause(plan.pause);
    // Safety: as the kernel's own.
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
    // Safety: the kernel's promise.
    let (done, wrong) = unsafe { (GlobalWord::new(plan.done), GlobalWord::new(plan.wrong)) };
    let before = done.load_relaxed_gpu();
    // Everybody has read it before it changes.
    Block.sync();
    // Each distance has its place, in windows of both sides.
    let place = |round: u64, distance: u32| {
        let block = (round % BUFFERS) * neighbours as u64 + distance as u64;
        (plan.start + block * plan.elements) as usize
    };
    for round in before + 1..=before + plan.rounds {
        for distance in 0..neighbours {
            let peer = world.after(distance + 1);
            let at = place(round, distance);
            // A count says nothing of which ones have left, so all have to.
            gin.wait_counter(&Block, CounterId::new(distance), round - 1, deadline)?;
            for i in Block.stripe(elements) {
                outbox.write(at + i, value(me, peer.world(), round, i as u64));
            }
            // The peer has checked what is overwritten.
            let checked = SignalId::new(neighbours + distance);
            gin.wait_signal(&Block, checked, (round - 1).saturating_sub(BUFFERS - 1), deadline)?;
            gin.put(peer, inbox.range(at, elements), outbox.range(at, elements))
                .signal(SignalId::new(distance).inc())
                .counter(CounterId::new(distance))
                .issue(&Block)?;
        }
        for distance in 0..neighbours {
            // The rank that I am at this distance from.
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
    // A later launch begins where all has left.
    for distance in 0..neighbours {
        gin.wait_counter(&Block, CounterId::new(distance), before + plan.rounds, deadline)?;
    }
    if Block.elect() {
        done.store_relaxed_gpu(before + plan.rounds);
    }
    Ok(())
}

/// Counts a value that is wrong, and keeps the first.
#[inline(always)]
fn note(wrong: GlobalWord, round: u64, from: u32, seen: u64) {
    if wrong.add_relaxed_gpu(1) == 0 {
        wrong.at(1).store_relaxed_gpu(round);
        wrong.at(2).store_relaxed_gpu(from as u64);
        wrong.at(3).store_relaxed_gpu(seen);
    }
}

/// What [`hardware_stale`] does.
#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable, Debug)]
pub struct Stale {
    /// Elements.
    pub elements: u64,
    /// Rounds.
    pub rounds: u64,
    /// Address of a word for the blocks to meet at, 0 at first.
    pub barrier: u64,
    /// Address of four words, as those of [`Exchange::wrong`].
    pub wrong: u64,
    /// Whether this rank gets from its right neighbour, instead of waiting for what its left one puts.
    pub get: u64,
    /// As [`Exchange::lsa`].
    pub lsa: u64,
}

/// Reads `data` with plain loads in all threads of all blocks, has it overwritten, and reads it again with plain loads.
///
/// Only block 0 posts and waits; a barrier over the grid passes on what it saw. Needs two signals in context 0.
///
/// # Safety
/// - The grid is resident as a whole, on every rank; tables are as [`Stale`] says; both windows have `elements`
///   elements.
#[kernel]
pub unsafe fn hardware_stale(comm: Comm, data: Window<u64>, source: Window<u64>, plan: Stale, deadline: Deadline) {
    // Safety: the kernel's promise.
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
        // Each block reads all of it: the lines are in the cache of every processor now.
        for i in Block.stripe(elements) {
            let expected = if round == 1 { 0 } else { value(from.world(), 0, round - 1, i as u64) };
            let seen = data.read(i);
            if seen != expected {
                note(wrong, round, from.world(), seen);
            }
        }
        barrier.sync(deadline)?;
        if block_in_grid() == 0 {
            // All blocks have read what the last round left: it may be overwritten. And whoever took the last round's
            // source has it.
            gin.signal(from, checked.inc()).issue(&Block)?;
            gin.wait_signal(&Block, checked, round, deadline)?;
            for i in Block.stripe(elements) {
                source.write(i, value(me, 0, round, i as u64));
            }
            if plan.get != 0 {
                // The left neighbour may take it now.
                gin.signal(world.left(), arrived.inc()).issue(&Block)?;
                gin.wait_signal(&Block, arrived, round, deadline)?;
                gin.get(world.right(), data.range(0, elements), source.range(0, elements)).issue(&Block)?;
                gin.flush(&Block, deadline)?;
            } else {
                gin.put(world.right(), data.range(0, elements), source.range(0, elements))
                    .signal(arrived.inc())
                    .issue(&Block)?;
                gin.wait_signal(&Block, arrived, round, deadline)?;
                // The source is written again next round.
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

/// What [`hardware_flood`] does.
#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable, Debug)]
pub struct Flood {
    /// Blocks that post, the first ones.
    pub posters: u32,
    /// Posts of each of their threads.
    pub each: u32,
}

/// Every thread of the first blocks puts values to the right neighbour, one by one, each with a signal; every block
/// polls until all of its context have come from the left one.
///
/// Block `b` uses context `b % contexts`. Element `(block * threads + thread) * each + i` of `data` is what that
/// thread's left counterpart put in its `i`-th post: `value(left, me, 1, index)`. Needs a signal.
///
/// # Safety
/// - The grid is resident as a whole, on every rank; all ranks launch the same shape.
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
    // One that failed takes its block along.
    Block.agree(outcome)?;
    // Posting blocks of this context.
    let sharing = posters / contexts + (context < posters % contexts) as u32;
    gin.wait_signal(&Block, arrived, sharing as u64 * threads as u64 * plan.each as u64, deadline)
}

/// Elements of `data` that [`hardware_pass`] needs for so many of `source`.
#[must_use]
pub const fn pass_len(elements: u64) -> u64 {
    2 * elements
}

/// Fills `source` with values for the right neighbour in round `round` (from 1, one more with each launch), puts them
/// into the first half of its `data`, and gets the left neighbour's `source` into the second half of the own: the
/// halves are equal then. Operations take the automatic route. Needs a signal in context 0.
///
/// # Safety
/// - One block, on every rank; `source` has `elements` elements, `data` twice as many, and nobody else uses them; no
///   rank launches the next round before all have ended this one.
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
    // Its put comes after all that it wrote.
    gin.wait_signal(&Block, SignalId::new(0), round, deadline)?;
    gin.get(left, data.range(elements, elements), source.range(0, elements)).issue(&Block)?;
    gin.flush(&Block, deadline)
}

/// Takes processors until the word at `stop` is not 0, or for `limit_ns` nanoseconds. Each block adds 1 to the word at
/// `started` when it begins.
///
/// # Safety
/// - Both are words in memory that this device reaches.
#[kernel]
pub unsafe fn hardware_spin(stop: *mut u64, started: *mut u64, limit_ns: u64) {
    // Safety: the kernel's promise.
    let (stop, started) = unsafe { (GlobalWord::new(stop as usize as u64), GlobalWord::new(started as usize as u64)) };
    if Block.elect() {
        started.add_release_sys(1);
    }
    let start = sys::clock_ns();
    while stop.load_relaxed_sys() == 0 && sys::clock_ns().wrapping_sub(start) < limit_ns {
        sys::pause(200);
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
