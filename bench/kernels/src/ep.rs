// SPDX-License-Identifier: MIT OR Apache-2.0
//! The least work of a dispatch or a combine: the same bytes to the same ranks, whose places are known before.

use gin_device::prelude::*;
use gin_device::sys::data::{load_weak_pair, store_weak_pair};
use gin_device::sys::{Global, GlobalWord, Memory, Word};

/// Words of state of [`bare_exchange`] in the window of each rank, before the rows: the epoch, the number of blocks
/// that are done, and the flag of each rank. Rows then begin at a multiple of 128 bytes; elsewhere copies over NVLink
/// take up to 7 percent longer.
pub const EXCHANGE_WORDS: usize = (2usize + 64).next_multiple_of(16);

/// A row to copy.
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[bytemuck(crate = "gin_device::bytemuck")]
pub struct Job {
    /// The row in the caller's memory.
    pub from: u32,
    /// The rank that gets it.
    pub rank: u32,
    /// The row in its window.
    pub to: u32,
    /// Must be 0.
    pub reserved: u32,
}

/// Copies `jobs` rows of `pairs` times 16 bytes, then raises a flag at every rank and waits for the flags of all.
///
/// # Safety
/// - `rows` and `jobs` are valid. The window has [`EXCHANGE_WORDS`] words, which were 0 at first, and the rows that the
///   jobs name. All ranks launch it, and its blocks are resident.
#[kernel(launch_bounds(1024))]
pub unsafe fn bare_exchange(
    comm: Comm,
    window: Window<u64>,
    rows: *const u64,
    jobs: *const Job,
    number: u32,
    pairs: u32,
    limit: Deadline,
) {
    const UNIT: u32 = 128;
    let (blocks, world) = (grid_dim().count() as u32, comm.world());
    let part = |rank: u32| {
        // Safety: a rank of the communicator.
        window.peer_ptr(unsafe { Rank::new_unchecked(rank) }).map_or(0, |part| part.addr() as u64)
    };
    // Safety: words of the window.
    let word = |part: u64, index: u64| unsafe { GlobalWord::new(part + 8 * index) };
    let here = part(world.rank());
    let (units, warps) = (pairs.div_ceil(UNIT), Block.size() / WARP_SIZE);
    let mut unit = Block.rank() / WARP_SIZE * blocks + block_in_grid();
    while unit < number * units {
        let (index, pair) = (unit / units, unit % units * UNIT + gin_device::coop::lane());
        // Safety: the caller's promise.
        unsafe {
            let job = &*jobs.add(index as usize);
            let from = rows.addr() as u64 + 16 * u64::from(job.from) * u64::from(pairs);
            let to = part(job.rank) + 8 * EXCHANGE_WORDS as u64 + 16 * u64::from(job.to) * u64::from(pairs);
            let load = |ahead: u32| {
                let pair = pair + 32 * ahead;
                if pair < pairs { load_weak_pair((from + 16 * u64::from(pair)) as usize as *const u64) } else { (0, 0) }
            };
            let store = |ahead: u32, value: (u64, u64)| {
                let pair = pair + 32 * ahead;
                if pair < pairs {
                    store_weak_pair((to + 16 * u64::from(pair)) as usize as *mut u64, value.0, value.1);
                }
            };
            let (first, second, third, fourth) = (load(0), load(1), load(2), load(3));
            store(0, first);
            store(1, second);
            store(2, third);
            store(3, fourth);
        }
        unit += warps * blocks;
    }
    Block.sync();
    if Block.rank() != 0 {
        return;
    }
    Global::fence_release_sys();
    if word(here, 1).add_relaxed_gpu(1) != u64::from(blocks) - 1 {
        return;
    }
    word(here, 1).store_relaxed_gpu(0);
    let epoch = word(here, 0).load_relaxed_gpu() + 1;
    word(here, 0).store_relaxed_gpu(epoch);
    Global::fence_acquire_gpu();
    Global::fence_release_sys();
    for rank in 0..world.size() {
        word(part(rank), 2 + u64::from(world.rank())).store_relaxed_sys(epoch);
    }
    let start = Global::clock_ns();
    for rank in 0..world.size() {
        while word(here, 2 + u64::from(rank)).load_relaxed_sys() < epoch {
            if limit.is_over(Global::clock_ns().wrapping_sub(start)) {
                comm.report_code(epoch);
                return;
            }
        }
    }
    Global::fence_acquire_sys();
}
