// SPDX-License-Identifier: MIT OR Apache-2.0
//! Copies to peers by bulk copies: one thread of each block starts them, and shared memory holds the bytes on their
//! way.

use crate::{END, Marks, START, Transfers};
use gin_device::prelude::*;
use gin_device::sys::bulk::{self, Mbarrier};
use gin_device::sys::{Global, Memory};

/// Number of stages of shared memory that a block fills and empties in turns.
pub const STAGES: usize = 8;
/// Number of loads that are started before the store of the first. The stores of as many stages may still be reading.
const AHEAD: u64 = STAGES as u64 / 2;

shared! { static FULL: [u64; STAGES]; }

/// Copies words to the next rank by bulk copies. The block's dynamic shared memory is divided into [`STAGES`] stages,
/// each of which holds a chunk; blocks take chunks in turns.
///
/// # Safety
/// - Both windows have the words of the transfers, with no other users meanwhile. `out` has [`MARKS`](crate::MARKS)
///   words for each block. `flags` has [`FLAG_WORDS`](crate::FLAG_WORDS); if the kernels begin together, all blocks are
///   resident. Dynamic shared memory has at least 128 bytes.
#[kernel(launch_bounds(32))]
pub unsafe fn bench_bulk_copy(
    comm: Comm,
    to: Window<u64>,
    from: Window<u64>,
    flags: Window<u64>,
    transfers: Transfers,
    out: *mut u64,
) {
    // Safety: guaranteed by the kernel's caller.
    unsafe { stream::<false>(&comm, to, from, flags, transfers, Marks::new(out)) };
}

/// Does the same as [`bench_bulk_copy`], and stores each chunk also behind the first half of the caller's part of `to`.
///
/// # Safety
/// - The same as for [`bench_bulk_copy`], with `to` of twice as many words.
#[kernel(launch_bounds(32))]
pub unsafe fn bench_bulk_fan(
    comm: Comm,
    to: Window<u64>,
    from: Window<u64>,
    flags: Window<u64>,
    transfers: Transfers,
    out: *mut u64,
) {
    // Safety: guaranteed by the kernel's caller.
    unsafe { stream::<true>(&comm, to, from, flags, transfers, Marks::new(out)) };
}

/// The chunks of a block, in the order of their loads or stores, again for each transfer.
struct Chunks {
    at: u64,
    first: u64,
    step: u64,
    bytes: u64,
}

impl Chunks {
    /// Returns the next chunk's first byte.
    #[inline(always)]
    fn next(&mut self) -> u64 {
        let at = self.at;
        self.at = if at + self.step < self.bytes { at + self.step } else { self.first };
        at
    }
}

/// # Safety
/// - The same as for the kernels.
#[inline(always)]
unsafe fn stream<const FAN: bool>(
    comm: &Comm,
    to: Window<u64>,
    from: Window<u64>,
    flags: Window<u64>,
    transfers: Transfers,
    marks: Marks,
) {
    if !bulk::SUPPORTED {
        return comm.report_code(90);
    }
    let there = match to.peer_ptr(comm.world().right()) {
        Ok(there) => there.addr() as u64,
        Err(fault) => return comm.report(fault),
    };
    let (full, all) = (FULL.array(), 8 * transfers.len);
    let here = to.local_ptr().addr() as u64 + all;
    let from = from.local_ptr().addr() as u64;
    let chunk = (shared::dynamic_bytes() / STAGES) as u64 & !15;
    let stages = shared::dynamic_array::<u128>(0, shared::dynamic_bytes() / 16);
    let stage = |number: u64| stages.address().at((number % STAGES as u64 * chunk) as u32);
    let barrier = |number: u64| Mbarrier::at(&full, (number % STAGES as u64) as usize);
    if !transfers.begin(comm, flags, marks) || !Block.elect() {
        return;
    }
    for number in 0..STAGES as u64 {
        // Safety: only this thread uses the words.
        unsafe { barrier(number).init(1) };
    }
    marks.now(START);
    let (first, step) = (chunk * block_in_grid() as u64, chunk * grid_dim().count() as u64);
    let own = if first < all { (all - first).div_ceil(step) } else { 0 };
    let total = own * transfers.times;
    let chunks = || Chunks { at: first, first, step, bytes: all };
    let (mut to_load, mut to_store) = (chunks(), chunks());
    let (mut loaded, mut stored) = (0, 0);
    let deadline = Deadline::after_ns(transfers.limit_ns);
    let length = |at: u64| (if all - at < chunk { all - at } else { chunk }) as u32;
    while stored < total {
        while loaded < total && loaded < stored + AHEAD {
            let at = to_load.next();
            // Safety: the last store of the stage, of number `loaded - STAGES`, is not among the last `AHEAD`, so it
            // has read the stage.
            unsafe {
                barrier(loaded).arrive_expect_tx(length(at));
                bulk::copy_to_shared(stage(loaded), from + at, length(at), barrier(loaded));
            }
            loaded += 1;
        }
        let parity = (stored / STAGES as u64 % 2) as u32;
        if let Err(fault) = comm.wait_mbarrier(barrier(stored), parity, deadline) {
            bulk::wait_group::<0>();
            return comm.report(fault);
        }
        let at = to_store.next();
        // Safety: the words are in the windows.
        unsafe {
            bulk::copy_to_global(there + at, stage(stored), length(at));
            if FAN {
                bulk::copy_to_global(here + at, stage(stored), length(at));
            }
        }
        bulk::commit_group();
        bulk::wait_group_read::<{ AHEAD as u32 }>();
        stored += 1;
    }
    // All data has arrived before the end time is taken.
    bulk::wait_group::<0>();
    Global::fence_release_sys();
    marks.now(END);
}
