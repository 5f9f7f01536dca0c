// SPDX-License-Identifier: MIT OR Apache-2.0
//! The engine that carries out bulk copies between global and shared memory, and products of warpgroups.
//!
//! A copy reads its source and writes its destination at two moments that are drawn when it starts and when it has
//! read. From shared memory it reads what the last fence showed it, which the [segments](crate::shared) keep. So a
//! missing wait or fence leaves wrong bytes. Products read what it has been shown, too.

use std::panic::Location;

use gin_device::exec::{BulkCall, ProductCall, watch};
use gin_device::sys::tensor::{ROW_BYTES, copy_box};
use gin_device::sys::{bulk, warpgroup};
use oorandom::Rand32;

use super::copies::{Copy, Source};
use super::state::EngineState;
use super::timers::Alarm;
use super::{Engine, TaskKey};
use crate::hooks::{SuspendReason, suspend, trap_with};
use crate::shared::SharedSegments;

/// log2 of the longest time until a copy reads, and from then until it writes, in nanoseconds.
const DELAY_LOG2: u32 = 14;
/// Threads of a warpgroup.
const WARPGROUP: u32 = 128;
/// Nanoseconds between two looks of a thread that waits for its copies.
const LOOK_NS: u64 = 100;

/// Draws a time: often short, now and then long.
fn delay(rng: &mut Rand32) -> u64 {
    let log2 = rng.rand_range(0..DELAY_LOG2 + 1);
    u64::from(rng.rand_range(0..1 << log2))
}

impl Engine {
    /// Does a step of bulk copies of the calling thread.
    pub(crate) fn bulk(&self, key: TaskKey, call: BulkCall, site: &'static Location<'static>) {
        let (block, thread) = self.state.borrow().block_and_thread(key);
        match call {
            BulkCall::ToShared { to, from, bytes, barrier } => {
                let from = Source::Bytes(from);
                self.start(block, Copy { serial: 0, thread, group: None, to, from, bytes, barrier, data: None }, to);
            }
            BulkCall::BoxToShared { to, from, barrier } => {
                let (from, bytes) = (Source::Box(from), ROW_BYTES * from.rows);
                self.start(block, Copy { serial: 0, thread, group: None, to, from, bytes, barrier, data: None }, to);
            }
            BulkCall::ToGlobal { to, from, bytes } => {
                let group = Some(*self.state.borrow_mut().block(block).copies.ended_groups(thread));
                let source = Source::Bytes(from);
                let copy = Copy { serial: 0, thread, group, to, from: source, bytes, barrier: 0, data: None };
                self.start(block, copy, from);
            }
            BulkCall::Commit => *self.state.borrow_mut().block(block).copies.ended_groups(thread) += 1,
            BulkCall::Wait { left, sources } => {
                while !self.state.borrow_mut().block(block).copies.are_complete(thread, left, sources) {
                    if !suspend(SuspendReason::BlockOn(LOOK_NS, "bulk copies", Some(site))) {
                        return;
                    }
                }
            }
            BulkCall::Fence => self.state.borrow_mut().block(block).shared.show(),
        }
    }

    /// Multiplies for the calling thread, after others had their turn now and then.
    pub(crate) fn product(&self, key: TaskKey, call: ProductCall, sums: &mut [f32], site: &'static Location<'static>) {
        let (block, thread) = self.state.borrow().block_and_thread(key);
        let wait = delay(self.state.borrow_mut().ready.rng()) / 8;
        if wait > 0 && !suspend(SuspendReason::BlockOn(wait, "a product of a warpgroup", Some(site))) {
            return;
        }
        let columns = if call.is_e4m3 { warpgroup::E4M3_COLUMNS } else { warpgroup::COLUMNS };
        let factors = [(call.left, warpgroup::ROWS), (call.right, columns)];
        let thread = thread % WARPGROUP;
        let words = factors.map(|(address, rows)| {
            let bytes = ROW_BYTES * rows;
            let mut state = self.state.borrow_mut();
            let shared = &mut state.block(block).shared;
            if !address.is_multiple_of(1024) || !shared.contains(address, bytes) {
                trap_with(format!(
                    "a factor of a product at {address:#x}: it must be a multiple of 1024, with {bytes} bytes of the \
                     block's shared memory"
                ));
            }
            std::ptr::with_exposed_provenance::<u64>(shared.shown(address) as usize)
        });
        for (address, rows) in factors {
            // The threads of the warpgroup read all of it together.
            let bytes = u64::from(ROW_BYTES * rows / WARPGROUP);
            self.watch(
                key,
                watch::Event::Data { address: address + bytes * u64::from(thread), bytes, writes: false },
                site,
            );
        }
        let [left, right] = words;
        // Safety: the shared memory has the words of both factors.
        warpgroup::multiply(
            sums,
            thread,
            call.is_e4m3,
            |at| unsafe { left.add(at).read() },
            |at| unsafe { right.add(at).read() },
        );
    }

    fn start(&self, block: u32, mut copy: Copy, shared: u64) {
        let now = self.now();
        let mut state = self.state.borrow_mut();
        let state = &mut *state;
        if !state.block(block).shared.contains(shared, copy.bytes) {
            let bytes = copy.bytes;
            trap_with(format!("the block has no {bytes} bytes of shared memory at {shared:#x} for a bulk copy"));
        }
        state.serial += 1;
        copy.serial = state.serial;
        let at = now + delay(state.ready.rng());
        let block_serial = state.block(block).serial;
        state.timers.add(at, Alarm::Bulk { block, block_serial, serial: copy.serial });
        state.block(block).copies.pending.push(copy);
    }
}

/// Lets a copy read its source, or write its destination.
pub(super) fn step(state: &mut EngineState, block: u32, block_serial: u64, serial: u64, now: u64) {
    let EngineState { blocks, timers, ready, activity, tasks: all_tasks, .. } = state;
    let Some(Some(here)) = blocks.get_mut(block as usize) else { return };
    if here.serial != block_serial {
        return;
    }
    let Some(at) = here.copies.pending.iter().position(|copy| copy.serial == serial) else { return };
    let copy = &mut here.copies.pending[at];
    if copy.data.is_none() {
        copy.data = Some(read(copy, &mut here.shared));
        timers.add(now + delay(ready.rng()), Alarm::Bulk { block, block_serial, serial });
        return;
    }
    let copy = here.copies.pending.swap_remove(at);
    let thread = copy.thread;
    let late = ready.rng().rand_range(0..2) == 0;
    let outcome = write(copy, &mut here.shared, late);
    *activity += 1;
    if let Err(message) = outcome {
        // The thread that started the copy, or another one if it has ended.
        let tasks = &here.tasks;
        let own = tasks
            .get(thread as usize)
            .into_iter()
            .chain(tasks)
            .copied()
            .find(|key| all_tasks.get(key.id as usize).is_some_and(|task| task.generation == key.generation));
        if let Some(key) = own {
            state.misuse(key, format!("a bulk copy is complete, but {message}"));
        }
    }
}

fn read(copy: &Copy, shared: &mut SharedSegments) -> Vec<u128> {
    let mut data = vec![0_u128; copy.bytes as usize / 16];
    let to = data.as_mut_ptr().expose_provenance() as u64;
    // Safety: `data` has the bytes. For global memory guaranteed by the kernel that started the copy; that shared
    // memory has the bytes was checked when it started.
    unsafe {
        match (copy.from, copy.group) {
            (Source::Bytes(from), Some(_)) => bulk::copy(to, shared.shown(from), copy.bytes),
            (Source::Bytes(from), None) => bulk::copy(to, from, copy.bytes),
            (Source::Box(from), _) => copy_box(to, &from),
        }
    }
    data
}

/// Writes the bytes. If `late`, stores of threads to the destination that no fence has shown arrive after them.
fn write(copy: Copy, shared: &mut SharedSegments, late: bool) -> Result<(), &'static str> {
    let Some(data) = copy.data else { return Ok(()) };
    let from = data.as_ptr().expose_provenance() as u64;
    if copy.group.is_some() {
        // Safety: guaranteed by the kernel that started the copy.
        unsafe { bulk::copy(copy.to, from, copy.bytes) };
        return Ok(());
    }
    let shown = shared.shown(copy.to);
    let units = data.len() as u64 * 2;
    for at in (0..units).map(|unit| 8 * unit) {
        // Safety: as for `read`.
        unsafe {
            let [own, seen] = [copy.to + at, shown + at].map(|address| {
                let pointer: *const u64 = std::ptr::with_exposed_provenance(address as usize);
                pointer.read()
            });
            let is_new = std::ptr::with_exposed_provenance::<u64>((from + at) as usize).read();
            std::ptr::with_exposed_provenance_mut::<u64>((shown + at) as usize).write(is_new);
            if own == seen || !late {
                std::ptr::with_exposed_provenance_mut::<u64>((copy.to + at) as usize).write(is_new);
            }
        }
    }
    // Safety: `Mbarrier` has the address of a word of shared memory.
    unsafe { bulk::complete(copy.barrier, copy.bytes) }
}
