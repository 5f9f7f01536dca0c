// SPDX-License-Identifier: MIT OR Apache-2.0
//! The engine as a kernel: one block that executes entries until the host asks it to park.
//!
//! The tables have a home in pinned host memory. The block copies them to device memory when it begins and back before
//! it ends. So the host can change them while no engine runs, and no word that the engine reads often is behind PCIe.
//! The tables hold the engine's whole state: a kernel that is launched again continues from there.
//!
//! One thread runs the engine; the first warp does nothing else. The other warps wait for orders and share copies that
//! are too long for one thread. Orders use words in device memory instead of a barrier, because the thread that gives
//! them is in the middle of an operation. In a block of one warp that thread makes all copies.

use crate::Progress;
use crate::engine::{Engine, Tables};
use crate::faults::Switch;
use crate::held::{Held, Item, Usage};
use crate::memory::Memory;
use crate::tables::{CompletionQueue, QueuePair, Region};
use bytemuck::{Pod, Zeroable};
use core::mem::size_of;
use core::slice::from_raw_parts_mut;
use gin_device::coop::{WARP_SIZE, WarpSpan, block_dim, thread_in_block};
use gin_device::internal::orders::{Order, Orders};
use gin_device::lsa;
use gin_device::prelude::*;
use gin_device::sys::data::{load_relaxed_sys_u32, store_weak_u8, store_weak_u32};
use gin_device::sys::{Global, GlobalWord, Memory as _, Word};

/// Largest number of threads of the block, and a good choice.
pub const THREADS: u32 = 256;

/// Longest copy, in bytes, that one thread makes alone. The others need about two trips to L2 to begin.
const SINGLE_THREAD_BYTES: u64 = 256;
/// Largest number of actions between two looks at the doorbells.
const STEPS: u32 = 16;
/// Nanoseconds between two looks at the host's word, each of which takes about one microsecond.
const PARK_POLL_NS: u64 = 20_000;
/// Number of doorbells loaded together.
const DOORBELL_BATCH: u64 = 8;

/// A table: its home at the host, and the kernel's copy.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Pod, Zeroable)]
pub struct Table {
    /// Address in pinned host memory.
    pub home: u64,
    /// Address in memory of the device.
    pub here: u64,
    /// Number of elements in use.
    pub count: u64,
}

/// Addresses of everything that the kernel works on.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Pod, Zeroable)]
pub struct Residence {
    /// Table of [`QueuePair`].
    pub queues: Table,
    /// Table of words: [`Tables::busy`].
    pub busy: Table,
    /// Table of [`CompletionQueue`].
    pub completions: Table,
    /// Table of [`Region`].
    pub regions: Table,
    /// Table of [`Switch`].
    pub faults: Table,
    /// Table of [`Item`]; `count` includes unused ones.
    pub items: Table,
    /// Table of one [`KernelState`].
    pub state: Table,
    /// Table of words: the NIC of each doorbell.
    pub owners: Table,
    /// Address of the doorbells, in device memory: one word for each of `owners`, rounded up to a multiple of 8.
    pub doorbells: u64,
    /// Address of as many words in device memory, which only the kernel uses: the last doorbells seen.
    pub seen: u64,
    /// Address of the staging area for held ranges, in device memory.
    pub stage: u64,
    /// Length of the staging area in bytes.
    pub stage_bytes: u64,
    /// Address of [`orders::WORDS`](gin_device::internal::orders::WORDS) words in device memory, which only the kernel
    /// uses; all 0 at each launch.
    pub order: u64,
    /// Address of a word in pinned host memory: not 0 to park the kernel.
    pub park: u64,
}

/// The engine's state beside the tables.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct KernelState {
    /// The engine.
    pub engine: Engine,
    /// The amount held back.
    pub usage: Usage,
}

/// Executes entries until the host asks it to park. Runs as one block of whole warps, at most [`THREADS`] threads.
///
/// # Safety
/// - All addresses are as [`Residence`] documents, the tables hold valid elements, and nothing else uses them until the
///   kernel has ended.
/// - This device can reach all memory that the tables name, and that memory stays valid while the kernel runs.
#[kernel(launch_bounds(256, 1))]
pub unsafe fn soft_hca(residence: Residence) {
    // Safety: guaranteed by the caller.
    unsafe { copy_tables(&residence, |table| (table.here, table.home)) };
    Block.sync();
    if thread_in_block() == 0 {
        // Safety: guaranteed by the caller; one thread, and the tables are copied.
        unsafe { lead(&residence) };
    } else if thread_in_block() >= WARP_SIZE {
        // Safety: guaranteed by the caller; whole warps.
        unsafe { help(&residence) };
    }
    Warp.sync();
    Block.sync();
    // Safety: guaranteed by the caller.
    unsafe { copy_tables(&residence, |table| (table.home, table.here)) };
}

/// Copies all tables, by the whole block.
///
/// # Safety
/// - The same as for [`soft_hca`].
unsafe fn copy_tables(residence: &Residence, ends: impl Fn(Table) -> (u64, u64)) {
    let copy = |table: Table, size: usize| {
        let (to, from) = ends(table);
        // Safety: guaranteed by the caller.
        unsafe { lsa::copy::<false>(&Block, to, from, table.count * size as u64) };
    };
    copy(residence.queues, size_of::<QueuePair>());
    copy(residence.busy, size_of::<u64>());
    copy(residence.completions, size_of::<CompletionQueue>());
    copy(residence.regions, size_of::<Region>());
    copy(residence.faults, size_of::<Switch>());
    copy(residence.items, size_of::<Item>());
    copy(residence.state, size_of::<KernelState>());
    copy(residence.owners, size_of::<u64>());
}

/// Returns the elements of a table.
///
/// # Safety
/// - They are copied to the device, and nothing else uses them as long as the slice lives.
unsafe fn elements<'a, T>(table: Table) -> &'a mut [T] {
    // Safety: guaranteed by the caller.
    unsafe { from_raw_parts_mut(table.here as usize as *mut T, table.count as usize) }
}

/// Runs the engine.
///
/// # Safety
/// - The same as for [`soft_hca`], with the tables copied; one thread.
unsafe fn lead(residence: &Residence) {
    // Safety: guaranteed by the caller, for this block and the following ones.
    let ([state], park) =
        (unsafe { elements::<KernelState>(residence.state) }, unsafe { GlobalWord::new(residence.park) })
    else {
        return;
    };
    let mut tables = unsafe {
        Tables {
            queues: elements(residence.queues),
            busy: elements(residence.busy),
            completions: elements(residence.completions),
            regions: elements(residence.regions),
            faults: elements(residence.faults),
        }
    };
    let items = unsafe { elements::<Item>(residence.items) };
    let mut held = Held::new(items, &mut state.usage, residence.stage, residence.stage_bytes);
    let helpers = u64::from(block_dim().count() / WARP_SIZE - 1);
    let mut memory = unsafe { DeviceMemory { orders: orders(residence), helpers, given: 0 } };
    let mut looked = Global::clock_ns();
    loop {
        let now = Global::clock_ns();
        state.engine.set_time(now);
        unsafe { poll_doorbells(residence, &mut state.engine, &mut tables, &mut memory) };
        for _ in 0..STEPS {
            if state.engine.step(&mut tables, &mut held, &mut memory) != Progress::Moved {
                break;
            }
        }
        if now.wrapping_sub(looked) >= PARK_POLL_NS {
            if park.load_relaxed_sys() != 0 {
                // Doorbells that rang before a command refer to the objects that existed then.
                unsafe { poll_doorbells(residence, &mut state.engine, &mut tables, &mut memory) };
                break;
            }
            looked = now;
        }
    }
    memory.dismiss();
}

/// Passes new doorbells to the engine.
///
/// # Safety
/// - The same as for [`lead`].
unsafe fn poll_doorbells(
    residence: &Residence,
    engine: &mut Engine,
    tables: &mut Tables<'_>,
    memory: &mut DeviceMemory,
) {
    // Safety: guaranteed by the caller.
    let (doorbells, owners) = unsafe { (GlobalWord::new(residence.doorbells), elements::<u64>(residence.owners)) };
    let seen = residence.seen as usize as *mut u64;
    let mut first = 0;
    while first < residence.owners.count {
        // All loads are issued before the first result is used.
        let words: [u64; DOORBELL_BATCH as usize] =
            core::array::from_fn(|index| doorbells.at(first + index as u64).load_relaxed_sys());
        for (index, word) in (first..).zip(words) {
            let last = seen.wrapping_add(index as usize);
            // Safety: there are as many words as doorbells.
            if word == unsafe { last.read() } {
                continue;
            }
            // Safety: as above.
            unsafe { last.write(word) };
            if let (Some(&owner), true) = (owners.get(index as usize), word != 0) {
                engine.ring(tables, memory, owner as u32, word);
            }
        }
        first += DOORBELL_BATCH;
    }
}

/// Returns the words that carry orders.
///
/// # Safety
/// - The same as for [`soft_hca`].
unsafe fn orders(residence: &Residence) -> Orders<Global> {
    // Safety: guaranteed by the caller.
    Orders::new(unsafe { GlobalWord::new(residence.order) })
}

/// Executes orders until dismissed.
///
/// # Safety
/// - The same as for [`soft_hca`]; all warps of the block except the first.
unsafe fn help(residence: &Residence) {
    // Safety: guaranteed by the caller.
    let orders = unsafe { orders(residence) };
    // Safety: no thread waits at its barrier.
    let Some(crew) = (unsafe { WarpSpan::new(1, block_dim().count() / WARP_SIZE - 1, 1) }) else { return };
    for number in 0.. {
        while !Warp.sync_or(Warp.elect() && orders.is_given(number)) {
            Global::pause(0);
        }
        let order = orders.read();
        // Safety: an order names memory that the engine may access.
        unsafe { lsa::copy::<false>(&crew, order.to, order.from, order.bytes) };
        Warp.sync();
        if Warp.elect() {
            orders.carried_out();
        }
        if order.bytes == 0 {
            break;
        }
    }
}

/// Memory of the device, and all that it can reach.
struct DeviceMemory {
    orders: Orders<Global>,
    helpers: u64,
    /// Number of orders given.
    given: u64,
}

impl DeviceMemory {
    fn order(&mut self, order: Order) {
        self.given += 1;
        self.orders.give(self.given, order);
        self.orders.wait(self.given, self.helpers);
    }

    /// Dismisses the helpers.
    fn dismiss(&mut self) {
        if self.helpers > 0 {
            self.order(Order { to: 0, from: 0, bytes: 0 });
        }
        self.orders.clear();
    }

    fn word(&self, address: u64) -> GlobalWord {
        // Safety: the engine passes only addresses of ranges that the tables name, and the kernel's caller guaranteed
        // that they are valid.
        unsafe { GlobalWord::new(address) }
    }
}

impl Memory for DeviceMemory {
    fn load_u32(&mut self, address: u64) -> u32 {
        // Safety: as above.
        unsafe { load_relaxed_sys_u32(address as usize as *const u32) }
    }

    fn load_u64(&mut self, address: u64) -> u64 {
        self.word(address).load_relaxed_sys()
    }

    fn store_u64(&mut self, address: u64, value: u64) {
        self.word(address).store_relaxed_sys(value);
    }

    fn fence_acquire(&mut self) {
        Global::fence_acquire_sys();
    }

    fn fence_release(&mut self) {
        Global::fence_release_sys();
    }

    fn copy(&mut self, to: u64, from: u64, bytes: u64) {
        if bytes <= SINGLE_THREAD_BYTES || self.helpers == 0 {
            // Safety: as above.
            unsafe { lsa::copy::<false>(&Thread, to, from, bytes) };
        } else {
            self.order(Order { to, from, bytes });
        }
    }

    fn store_words(&mut self, to: u64, words: [u32; 7], bytes: u32) {
        let whole = if to.is_multiple_of(4) { bytes / 4 } else { 0 };
        for (index, word) in (0..).zip(words) {
            let at = to + 4 * index;
            if index < u64::from(whole) {
                // Safety: as above.
                unsafe { store_weak_u32(at as usize as *mut u32, word) };
                continue;
            }
            for (byte, value) in (4 * index..).zip(word.to_le_bytes()) {
                if byte < u64::from(bytes) {
                    // Safety: as above.
                    unsafe { store_weak_u8((to + byte) as usize as *mut u8, value) };
                }
            }
        }
    }

    fn fetch_add(&mut self, address: u64, amount: u64) -> u64 {
        self.word(address).add_relaxed_sys(amount)
    }
}
