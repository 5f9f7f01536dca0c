// SPDX-License-Identifier: MIT OR Apache-2.0
//! A kernel that moves data by bulk copies alone, except for the changes that threads make on the way.

use bytemuck::{Pod, Zeroable};
use gin_device::prelude::*;
use gin_device::sys::bulk::{self, Mbarrier};
use gin_device::sys::data::load_relaxed_sys_u64;
use gin_device::sys::{Global, GlobalWord, Memory, Word};

shared! { static FULL: [u64; 2]; }

/// Argument of [`hardware_bulk`].
#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable, Debug)]
pub struct Bulk {
    /// Units of 16 bytes of a chunk.
    pub units: u32,
    /// Chunks of a block.
    pub chunks: u32,
    /// Rounds.
    pub rounds: u32,
    /// 0, or a mistake: [`NO_PROXY_FENCE`] or [`LATE_WAIT`].
    pub mistake: u32,
    /// Address of two words in device memory: the number of wrong words, and 1 if the kernel has bulk copies. 0 at
    /// first.
    pub out: u64,
}

/// [`Bulk::mistake`]: no thread fences between its stores to shared memory and the copy of them.
pub const NO_PROXY_FENCE: u32 = 1;
/// [`Bulk::mistake`]: threads change a stage first, and then wait for its load.
pub const LATE_WAIT: u32 = 2;

impl Bulk {
    /// Returns the number of words that a block sends.
    #[inline(always)]
    #[must_use]
    pub const fn words(&self) -> u64 {
        2 * self.units as u64 * self.chunks as u64
    }
}

/// Returns word `index` of the source of rank `rank`.
#[inline(always)]
#[must_use]
pub const fn sent(rank: u32, index: u64) -> u64 {
    (index + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ (rank as u64) << 56
}

/// Returns the bits that threads change in each word in a round.
#[inline(always)]
#[must_use]
pub const fn change(round: u64) -> u64 {
    round.wrapping_mul(0xbf58_476d_1ce4_e5b9)
}

/// Sends each block's part of `from` to all ranks of the LSA team, again and again: loads a chunk by a bulk copy,
/// changes it in shared memory, and stores it to each rank by a bulk copy. Then raises a flag at each rank, waits for
/// the flags of all, and checks what has arrived: by loads, and by bulk copies of what arrived.
///
/// # Safety
/// - All ranks of the team launch it with the same numbers, and its blocks are resident. A block has 32 * `units` bytes
///   of dynamic shared memory. `from` has [`Bulk::words`] words for each block, `to` as many for each rank and block in
///   turn, `flags` a word for each rank and block, 0 at first. The communicator has a barrier of the LSA team for each
///   block.
#[kernel]
pub unsafe fn hardware_bulk(
    comm: Comm,
    to: Window<u64>,
    from: Window<u64>,
    flags: Window<u64>,
    plan: Bulk,
    deadline: Deadline,
) {
    if !bulk::SUPPORTED {
        return;
    }
    if Block.elect() {
        // Safety: the kernel's promise.
        unsafe { GlobalWord::new(plan.out + 8) }.store_relaxed_gpu(1);
    }
    // Safety: the kernel's promise.
    if let Err(fault) = unsafe { exchange(&comm, to, from, flags, &plan, deadline) } {
        comm.report(fault);
    }
}

/// Two stages in shared memory that loads fill in turns.
struct Stages {
    full: SharedArray<u64>,
    units: SharedArray<u128>,
    len: u32,
    /// Number of loads so far.
    loads: u32,
    /// Number of loads waited for so far.
    waited: u32,
}

impl Stages {
    /// Starts a load into the next stage, by one thread.
    ///
    /// # Safety
    /// - The stage is free, and `from` has the bytes.
    #[inline(always)]
    unsafe fn load(&mut self, from: u64) {
        let stage = self.loads % 2;
        let (barrier, bytes) = (Mbarrier::at(&self.full, stage as usize), 16 * self.len);
        // Safety: the caller's promise.
        unsafe {
            barrier.arrive_expect_tx(bytes);
            bulk::copy_to_shared(self.units.address_of((stage * self.len) as usize), from, bytes, barrier);
        }
        self.loads += 1;
    }

    /// Waits for the next load, by each thread. Returns the index of its first unit.
    #[inline(always)]
    fn wait(&mut self, comm: &Comm, deadline: Deadline) -> Result<usize, Fault> {
        let (stage, parity) = (self.waited % 2, self.waited / 2 % 2);
        let waited = comm.wait_mbarrier(Mbarrier::at(&self.full, stage as usize), parity, deadline);
        self.waited += 1;
        // All leave if one does.
        match (waited, Block.sync_or(waited.is_err())) {
            (Err(fault), _) => Err(fault),
            (Ok(()), true) => Err(comm.fault().unwrap_or(Fault::new(FaultKind::Reported, Operation::Barrier))),
            (Ok(()), false) => Ok((stage * self.len) as usize),
        }
    }

    /// Returns the index of the first unit of the load that [`wait`](Self::wait) waits for next.
    #[inline(always)]
    const fn next(&self) -> usize {
        (self.waited % 2 * self.len) as usize
    }
}

#[inline(always)]
unsafe fn exchange(
    comm: &Comm,
    to: Window<u64>,
    from: Window<u64>,
    flags: Window<u64>,
    plan: &Bulk,
    deadline: Deadline,
) -> Result<(), Fault> {
    let gin = Gin::new(comm, ContextId::new(0));
    let (team, block, blocks) = (comm.lsa(), block_in_grid(), grid_dim().count());
    let (chunk_bytes, words) = (16 * plan.units as u64, plan.words());
    let mut checked = BarrierSession::new(&gin, BarrierTeam::Lsa, block)?;
    let mut stages = Stages {
        full: FULL.array(),
        units: shared::dynamic_array(0, 2 * plan.units as usize),
        len: plan.units,
        loads: 0,
        waited: 0,
    };
    if Block.elect() {
        for stage in 0..2 {
            // Safety: no thread uses the words yet.
            unsafe { Mbarrier::at(&stages.full, stage).init(1) };
        }
    }
    Block.sync();
    let part = |source: u32| 8 * words * (source * blocks + block) as u64;
    let peer = |window: &Window<u64>, rank: u32| -> Result<u64, Fault> {
        Ok(window.peer_ptr(team.member(rank)?)?.addr() as u64)
    };
    let source = from.local_ptr().addr() as u64 + 8 * words * block as u64;
    let mut wrong = 0;
    for round in 1..=u64::from(plan.rounds) {
        if Block.elect() {
            // Safety: both stages are free, because all copies of the round before are complete.
            unsafe { stages.load(source) };
        } else {
            stages.loads += 1;
        }
        for chunk in 0..plan.chunks {
            if chunk + 1 < plan.chunks {
                if Block.elect() {
                    // The copies from that stage have read it.
                    bulk::wait_group_read::<0>();
                    // Safety: as above; its threads have fenced.
                    unsafe { stages.load(source + chunk_bytes * (chunk + 1) as u64) };
                } else {
                    stages.loads += 1;
                }
            }
            let stage = if plan.mistake == LATE_WAIT { stages.next() } else { stages.wait(comm, deadline)? };
            for unit in Block.stripe(plan.units as usize) {
                let both = change(round) as u128 * ((1 << 64) + 1);
                stages.units.write(stage + unit, stages.units.read(stage + unit) ^ both);
            }
            if plan.mistake == LATE_WAIT {
                stages.wait(comm, deadline)?;
            }
            if plan.mistake != NO_PROXY_FENCE {
                bulk::fence_proxy_async_shared();
            }
            Block.sync();
            if Block.elect() {
                for rank in 0..team.size() {
                    let there = peer(&to, rank)? + part(team.rank()) + chunk_bytes * chunk as u64;
                    // Safety: the peer's window has the chunk, and all ranks have checked the round before.
                    unsafe { bulk::copy_to_global(there, stages.units.address_of(stage), 16 * plan.units) };
                }
                bulk::commit_group();
            }
        }
        if Block.elect() {
            bulk::wait_group::<0>();
            Global::fence_release_sys();
            for rank in 0..team.size() {
                let word = peer(&flags, rank)? + 8 * (team.rank() * blocks + block) as u64;
                // Safety: a word of the peer's window.
                unsafe { GlobalWord::new(word) }.store_relaxed_sys(round);
            }
        }
        for rank in 0..team.size() {
            let own = to.local_ptr().addr() as u64 + part(rank);
            let mut late = false;
            if Block.elect() {
                // Safety: a word of this rank's window.
                let flag = unsafe { GlobalWord::new(flags.local_ptr().addr() as u64) };
                let (flag, start) = (flag.at((rank * blocks + block) as u64), Global::clock_ns());
                while !late && flag.load_relaxed_sys() < round {
                    late = deadline.is_over(Global::clock_ns().wrapping_sub(start));
                    Global::pause(100);
                }
                Global::fence_acquire_sys();
                bulk::fence_proxy_async_global();
            }
            if Block.sync_or(late) {
                return Err(Fault::new(FaultKind::Timeout, Operation::Barrier));
            }
            for chunk in 0..plan.chunks {
                let start = own + chunk_bytes * chunk as u64;
                if Block.elect() {
                    // Safety: all have fenced after their accesses to both stages.
                    unsafe { stages.load(start) };
                } else {
                    stages.loads += 1;
                }
                let stage = stages.wait(comm, deadline)?;
                for unit in Block.stripe(plan.units as usize) {
                    let copied = stages.units.read(stage + unit);
                    for half in 0..2 {
                        let at = 2 * unit as u64 + half;
                        // Safety: the flag covers the words.
                        let loaded = unsafe { load_relaxed_sys_u64((start + 8 * at) as usize as *const u64) };
                        let index = words * block as u64 + 2 * (chunk * plan.units) as u64 + at;
                        let expected = sent(team.member(rank)?.world(), index) ^ change(round);
                        let both = [loaded, (copied >> (64 * half)) as u64];
                        wrong += both.into_iter().filter(|found| *found != expected).count() as u64;
                    }
                }
                bulk::fence_proxy_async_shared();
                Block.sync();
            }
        }
        // Nobody overwrites what a rank still checks.
        checked.sync(&Block, Fence::None, deadline)?;
    }
    if wrong != 0 {
        // Safety: the kernel's promise.
        unsafe { GlobalWord::new(plan.out) }.red_add_relaxed_gpu(wrong);
    }
    Ok(())
}
