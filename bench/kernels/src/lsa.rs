// SPDX-License-Identifier: MIT OR Apache-2.0
//! Operations by loads and stores.

use crate::{
    END, LATE, Limit, Marks, PAYLOAD, PAYLOAD_WORDS, Plan, SOURCE, START, Transfers, WRONG, data, payload, succeeded,
    word,
};
use gin_device::prelude::*;
use gin_device::sys::data::{load_relaxed_sys_u64, store_weak_u64};
use gin_device::sys::{Global, Memory, Word};

/// Puts 64 bytes with a signal and waits for the answer, repeatedly, by one thread; ranks 0 and 1, a block of one warp
/// each.
///
/// `window` has [`PING_WORDS`](crate::PING_WORDS) words. With `plan.verify` every payload is new and checked.
///
/// # Safety
/// - Both ranks launch it with the same numbers, and their blocks are resident. `out` has [`MARKS`](crate::MARKS)
///   words.
#[kernel]
pub unsafe fn bench_lsa_ping_thread(comm: Comm, window: Window<u64>, plan: Plan, out: *mut u64) {
    if Block.rank() == 0 {
        // Safety: guaranteed by the kernel's caller.
        unsafe { ping(&Thread, &comm, window, plan, Marks::new(out)) };
    }
}

/// Does the same as [`bench_lsa_ping_thread`] by the threads of a warp together.
///
/// # Safety
/// - The same as for [`bench_lsa_ping_thread`].
#[kernel]
pub unsafe fn bench_lsa_ping_warp(comm: Comm, window: Window<u64>, plan: Plan, out: *mut u64) {
    // Safety: guaranteed by the kernel's caller.
    unsafe { ping(&Warp, &comm, window, plan, Marks::new(out)) };
}

/// Does the same as [`bench_lsa_ping_thread`] with a prepared put and a prepared wait.
///
/// # Safety
/// - The same as for [`bench_lsa_ping_thread`].
#[kernel]
pub unsafe fn bench_lsa_ping_prepared_thread(comm: Comm, window: Window<u64>, plan: Plan, out: *mut u64) {
    if Block.rank() == 0 {
        // Safety: guaranteed by the kernel's caller.
        unsafe { ping_prepared(&Thread, &comm, window, plan, Marks::new(out)) };
    }
}

/// Does the same as [`bench_lsa_ping_prepared_thread`] by the threads of a warp together.
///
/// # Safety
/// - The same as for [`bench_lsa_ping_thread`].
#[kernel]
pub unsafe fn bench_lsa_ping_prepared_warp(comm: Comm, window: Window<u64>, plan: Plan, out: *mut u64) {
    // Safety: guaranteed by the kernel's caller.
    unsafe { ping_prepared(&Warp, &comm, window, plan, Marks::new(out)) };
}

/// Does the same as [`bench_lsa_ping_warp`] with messages, whose flag is in the data. `mail` has the words of an inbox.
///
/// # Safety
/// - The same as for [`bench_lsa_ping_thread`].
#[kernel]
pub unsafe fn bench_lsa_ping_inbox(comm: Comm, window: Window<u64>, mail: Window<u64>, plan: Plan, out: *mut u64) {
    let peer = comm.world().right();
    let play = || -> Result<(), Fault> {
        let message = |start: usize| window.range_as::<[u64; PAYLOAD_WORDS]>(8 * start as u64, 1);
        let (from, to) = (message(SOURCE)?, message(PAYLOAD)?);
        let (mut outbox, mut inbox) = (Outbox::new(&comm, mail, peer)?, Inbox::new(&comm, mail, peer)?);
        let send = || outbox.send(&Warp, from, plan.deadline());
        let receive = |_| inbox.receive(&Warp, to, plan.deadline());
        // Safety: guaranteed by the kernel's caller.
        unsafe { self::play(&Warp, &comm, window, plan, Marks::new(out), send, receive) };
        Ok(())
    };
    if let Err(fault) = play() {
        comm.report(fault);
    }
}

/// # Safety
/// - The same as for the kernels.
#[inline(always)]
unsafe fn ping(coop: &impl Coop, comm: &Comm, window: Window<u64>, plan: Plan, marks: Marks) {
    let gin = Gin::new(comm, ContextId::new(0));
    let (peer, signal) = (comm.world().right(), SignalId::new(0));
    let put = || {
        let put = gin.put(peer, window.range(PAYLOAD, PAYLOAD_WORDS), window.range(SOURCE, PAYLOAD_WORDS));
        put.signal(signal.inc()).issue(coop)
    };
    let wait = |round| gin.wait_signal(coop, signal, round, plan.deadline());
    // Safety: the caller's promise.
    unsafe { play(coop, comm, window, plan, marks, put, wait) };
}

/// # Safety
/// - The same as for the kernels.
#[inline(always)]
unsafe fn ping_prepared(coop: &impl Coop, comm: &Comm, window: Window<u64>, plan: Plan, marks: Marks) {
    let gin = Gin::new(comm, ContextId::new(0));
    let (peer, signal) = (comm.world().right(), SignalId::new(0));
    let put = gin.put(peer, window.range(PAYLOAD, PAYLOAD_WORDS), window.range(SOURCE, PAYLOAD_WORDS));
    let (put, wait) = match (put.signal(signal.inc()).prepare(), gin.prepare_wait(signal)) {
        (Ok(put), Ok(wait)) => (put, wait),
        (Err(fault), _) | (_, Err(fault)) => return comm.report(fault),
    };
    let wait = |round| wait.wait(coop, round, plan.deadline());
    // Safety: the caller's promise.
    unsafe { play(coop, comm, window, plan, marks, || put.issue(coop), wait) };
}

/// # Safety
/// - The same as for the kernels.
#[inline(always)]
unsafe fn play(
    coop: &impl Coop,
    comm: &Comm,
    window: Window<u64>,
    plan: Plan,
    marks: Marks,
    mut put: impl FnMut() -> Result<(), Fault>,
    mut wait: impl FnMut(u64) -> Result<(), Fault>,
) {
    let (first, own) = (comm.world().rank() == 0, window.local_ptr());
    plan.play(
        first,
        coop.elect(),
        marks,
        |round| {
            if plan.verifies() {
                for index in coop.stripe(PAYLOAD_WORDS) {
                    // Safety: within the window; the put that used the overwritten words has been answered.
                    unsafe { store_weak_u64(own.wrapping_add(SOURCE + index), payload(round, index as u64)) };
                }
            }
            succeeded(comm, put())
        },
        |round| {
            if !succeeded(comm, wait(round)) {
                return false;
            }
            if plan.verifies() {
                let mut wrong = 0;
                for index in coop.stripe(PAYLOAD_WORDS) {
                    // Safety: within the window; the signal covers it.
                    let found = unsafe { load_relaxed_sys_u64(own.wrapping_add(PAYLOAD + index)) };
                    wrong += u64::from(found != payload(round, index as u64));
                }
                marks.count(WRONG, wrong);
            }
            true
        },
    );
}

/// Puts `len` words with a signal and waits for the answer, repeatedly, by all threads of a block; ranks 0 and 1. With
/// `plan.verify` every payload is new and checked.
///
/// # Safety
/// - Both ranks launch it with the same numbers, one block each, resident. `to` and `from` have `len` words, with no
///   other users meanwhile. `out` has [`MARKS`](crate::MARKS) words.
#[kernel]
pub unsafe fn bench_lsa_ping_block(
    comm: Comm,
    to: Window<u64>,
    from: Window<u64>,
    len: usize,
    plan: Plan,
    out: *mut u64,
) {
    // Safety: guaranteed by the kernel's caller.
    let marks = unsafe { Marks::new(out) };
    let gin = Gin::new(&comm, ContextId::new(0)).route(Route::Lsa);
    let (peer, first) = (comm.world().right(), comm.world().rank() == 0);
    let signal = SignalId::new(0);
    plan.play(
        first,
        Block.elect(),
        marks,
        |round| {
            if plan.verifies() {
                // Safety: guaranteed by the kernel's caller; the put that used the words has been answered.
                unsafe { data::write(from.local_ptr(), len, round) };
            }
            let put = gin.put(peer, to.range(0, len), from.range(0, len));
            succeeded(&comm, put.signal(signal.inc()).issue(&Block))
        },
        |round| {
            if !succeeded(&comm, gin.wait_signal(&Block, signal, round, plan.deadline())) {
                return false;
            }
            if plan.verifies() {
                // Safety: guaranteed by the kernel's caller; the signal covers the words.
                marks.count(WRONG, unsafe { data::differing(to.local_ptr(), len, round) });
                Block.sync();
            }
            true
        },
    );
}

/// Puts each block's part of the words to the next rank, each time with a signal, or by a prepared put, with one signal
/// after the last.
///
/// # Safety
/// - Both windows have the words of the transfers, with no other users meanwhile. `out` has [`MARKS`](crate::MARKS)
///   words for each block. `flags` has [`FLAG_WORDS`](crate::FLAG_WORDS); if the kernels begin
///   together, all blocks are resident.
#[kernel(launch_bounds(512))]
pub unsafe fn bench_lsa_put(
    comm: Comm,
    to: Window<u64>,
    from: Window<u64>,
    flags: Window<u64>,
    transfers: Transfers,
    out: *mut u64,
) {
    let (times, each) = (transfers.times, transfers.each != 0);
    let gin = Gin::new(&comm, ContextId::new(0)).route(Route::Lsa);
    let (peer, raise) = (comm.world().right(), SignalId::new(0).inc());
    // Safety: guaranteed by the kernel's caller.
    let marks = unsafe { Marks::new(out) };
    // Whole units of 16 bytes; the host ensures that `len` is even.
    let (block, blocks, pairs) = (block_in_grid() as usize, grid_dim().count() as usize, transfers.len as usize / 2);
    let start = 2 * (pairs * block / blocks);
    let part = 2 * (pairs * (block + 1) / blocks) - start;
    if !transfers.begin(&comm, flags, marks) {
        return;
    }
    Block.sync();
    if Block.elect() {
        marks.now(START);
    }
    let put = gin.put(peer, to.range(start, part), from.range(start, part));
    let mut time = 0;
    if each {
        while time < times {
            if !succeeded(&comm, put.signal(raise).issue(&Block)) {
                return;
            }
            time += 1;
        }
    } else {
        let put = match put.prepare() {
            Ok(put) => put,
            Err(fault) => return comm.report(fault),
        };
        while time < times {
            if !succeeded(&comm, put.issue(&Block)) {
                return;
            }
            time += 1;
        }
        if !succeeded(&comm, gin.signal(peer, raise).issue(&Block)) {
            return;
        }
    }
    if Block.elect() {
        marks.now(END);
    }
}

/// Puts the same words to the next rank repeatedly, in [chunks](gin_device::grid::Chunks) that the blocks take in
/// turns. Each block raises a signal after its last chunk of a transfer.
///
/// # Safety
/// - The same as for [`bench_lsa_put`].
#[kernel(launch_bounds(512))]
pub unsafe fn bench_lsa_put_turns(
    comm: Comm,
    to: Window<u64>,
    from: Window<u64>,
    flags: Window<u64>,
    transfers: Transfers,
    out: *mut u64,
) {
    let gin = Gin::new(&comm, ContextId::new(0)).route(Route::Lsa);
    let (peer, raise) = (comm.world().right(), SignalId::new(0).inc());
    // Safety: guaranteed by the kernel's caller.
    let marks = unsafe { Marks::new(out) };
    let chunks = Block.chunks::<u64>(transfers.len as usize);
    if !transfers.begin(&comm, flags, marks) {
        return;
    }
    Block.sync();
    if Block.elect() {
        marks.now(START);
    }
    let mut time = 0;
    while time < transfers.times {
        for (start, part) in chunks {
            if !succeeded(&comm, gin.put(peer, to.range(start, part), from.range(start, part)).issue(&Block)) {
                return;
            }
        }
        if !succeeded(&comm, gin.signal(peer, raise).issue(&Block)) {
            return;
        }
        time += 1;
    }
    if Block.elect() {
        marks.now(END);
    }
}

/// Passes barriers of the LSA team one after the other, by one warp. With `plan.verify` each rank sends its round to
/// every other before each barrier, and checks the received rounds after it.
///
/// `window` has two words for each rank.
///
/// # Safety
/// - All ranks of the team launch it with the same numbers, and their blocks are resident. `out` has
///   [`MARKS`](crate::MARKS) words.
#[kernel]
pub unsafe fn bench_lsa_barrier(comm: Comm, window: Window<u64>, plan: Plan, out: *mut u64) {
    // Safety: guaranteed by the kernel's caller.
    barriers::<false>(&comm, window, plan, unsafe { Marks::new(out) });
}

/// Does the same as [`bench_lsa_barrier`] for a caller that has released to the system before each barrier.
///
/// # Safety
/// - The same as for [`bench_lsa_barrier`].
#[kernel]
pub unsafe fn bench_lsa_barrier_released(comm: Comm, window: Window<u64>, plan: Plan, out: *mut u64) {
    // Safety: guaranteed by the kernel's caller.
    barriers::<true>(&comm, window, plan, unsafe { Marks::new(out) });
}

/// Passes the barriers of [`bench_lsa_barrier`]. With `RELEASED` the caller has released to the system before each.
#[inline(always)]
fn barriers<const RELEASED: bool>(comm: &Comm, window: Window<u64>, plan: Plan, marks: Marks) {
    let given = if RELEASED { Scope::System } else { Scope::Thread };
    let gin = Gin::new(comm, ContextId::new(0));
    let team = comm.lsa();
    let (ranks, me) = (team.size() as usize, team.rank() as usize);
    let mut barrier = match BarrierSession::new(&gin, BarrierTeam::Lsa, 0) {
        Ok(barrier) => barrier.released(given),
        Err(fault) => return comm.report(fault),
    };
    plan.each(Warp.elect(), marks, |round| {
        // Two sets of words: ranks may still read those of one round when the next one begins.
        let set = || ranks * (round % 2) as usize;
        if plan.verifies() {
            for other in Warp.stripe(ranks) {
                let there = team.member(other as u32).and_then(|peer| window.peer_ptr(peer));
                match there {
                    // Safety: a word of the peer's window.
                    Ok(there) => unsafe { store_weak_u64(there.wrapping_add(set() + me), round) },
                    Err(fault) => comm.report(fault),
                }
            }
            if given == Scope::System {
                Global::fence_release_sys();
            }
            Warp.sync();
        }
        if !succeeded(comm, barrier.sync(&Warp, Fence::None, plan.deadline())) {
            return false;
        }
        if plan.verifies() {
            let mut wrong = 0;
            for other in Warp.stripe(ranks) {
                // Safety: a word of this rank's window.
                let received = unsafe { load_relaxed_sys_u64(window.local_ptr().wrapping_add(set() + other)) };
                wrong += u64::from(received != round);
            }
            marks.count(WRONG, wrong);
            Warp.sync();
        }
        true
    });
}

/// Passes barriers without gin: each lane stores its round to one peer and polls for the round that this peer stores.
/// As in NCCL 2.28.9 the store releases and each poll acquires. If `late` is not 0, a fence releases and the polls are
/// relaxed, with one acquire fence after them. Otherwise the same as [`bench_lsa_barrier`], with one word of `window`
/// for each rank.
///
/// # Safety
/// - The same as for [`bench_lsa_barrier`]. `window` is 0 at first, and the team has at most 33 ranks.
#[kernel]
pub unsafe fn bare_barrier(comm: Comm, window: Window<u64>, late: u32, plan: Plan, out: *mut u64) {
    // Safety: guaranteed by the kernel's caller.
    let marks = unsafe { Marks::new(out) };
    let limit = Limit::new(plan.limit_ns);
    let team = comm.lsa();
    let (lane, others, me) = (Tile::<32>.rank(), team.size() - 1, team.rank());
    // A lane without a peer has the words of the first peer, and does not access them.
    let peer = (me + 1 + if lane < others { lane } else { 0 }) % team.size();
    let there = match team.member(peer).and_then(|peer| window.peer_ptr(peer)) {
        // Safety: words of the windows, used only here.
        Ok(there) => unsafe { word(there.wrapping_add(me as usize)) },
        Err(fault) => return comm.report(fault),
    };
    // Safety: as above.
    let here = unsafe { word(window.local_ptr().wrapping_add(peer as usize)) };
    plan.each(lane == 0, marks, |round| {
        Tile::<32>.sync();
        let mut missed = false;
        if lane < others && late == 0 {
            there.store_release_sys(round);
            missed = !limit.wait(|| here.load_acquire_sys() >= round);
        } else if lane < others {
            Global::fence_release_sys();
            there.store_relaxed_sys(round);
            missed = !limit.reached(here, round);
            Global::fence_acquire_sys();
        }
        let missed = Tile::<32>.sync_or(missed);
        if missed && lane == 0 {
            marks.count(LATE, 1);
        }
        !missed
    });
}
