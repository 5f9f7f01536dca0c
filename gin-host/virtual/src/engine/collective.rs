// SPDX-License-Identifier: MIT OR Apache-2.0
//! Operations that threads of a block do together: barriers, exchanges, the active mask, shared memory.

use std::panic::Location;

use gin_device::exec::{BarrierCall, ExchangeCall, SharedKey};

use super::block::{Arrival, Exchange, Gathering, LANES};
use super::state::EngineState;
use super::timers::Alarm;
use super::{Engine, TaskKey};
use crate::error::WaitKind;
use crate::hooks::{SuspendReason, suspend, switch_point, trap_with};
use crate::log::Event;
use crate::race::RaceMemory;

/// Longest time that a lane waits for others at the same `active_mask`, in nanoseconds.
const GATHERING_NS: u32 = 2_000;

/// The caller's next step.
enum Then<T> {
    Go(T),
    Park,
    /// The engine ends the caller's grid, and the caller with it.
    End,
}

impl Engine {
    fn park<T>(&self, then: Then<T>, woken: impl FnOnce() -> T) -> T {
        match then {
            Then::Go(result) => result,
            Then::Park => {
                suspend(SuspendReason::Parked);
                woken()
            }
            Then::End => loop {
                // The engine unwinds this coroutine before it could be resumed.
                suspend(SuspendReason::Parked);
            },
        }
    }

    fn result(&self, key: TaskKey) -> u32 {
        self.state.borrow().tasks[key.id as usize].result
    }

    /// Arrives at a barrier of the caller's block and returns the reduction.
    pub(crate) fn barrier(&self, key: TaskKey, call: BarrierCall) -> u32 {
        switch_point();
        let then = barrier(&mut self.state.borrow_mut(), key, &call, self.now());
        self.park(then, || self.result(key))
    }

    /// Exchanges the caller's value with the other lanes of the mask.
    pub(crate) fn exchange(&self, key: TaskKey, call: ExchangeCall, out: &mut [u64; 32]) {
        switch_point();
        let then = exchange(&mut self.state.borrow_mut(), key, &call, out, self.now());
        self.park(then, || ());
    }

    /// Returns a set of lanes that are at `site` together.
    pub(crate) fn active_mask(&self, key: TaskKey, site: &'static Location<'static>) -> u32 {
        switch_point();
        let then = gather(&mut self.state.borrow_mut(), key, site, self.now());
        self.park(then, || self.result(key))
    }

    /// Records the place of a call that the caller makes alone.
    pub(crate) fn note_place(&self, key: TaskKey, site: &'static Location<'static>) {
        self.state.borrow_mut().tasks[key.id as usize].site = Some(site);
    }

    /// Returns static shared memory of the caller's block.
    pub(crate) fn shared(&self, key: TaskKey, segment: SharedKey) -> *mut u8 {
        let found = {
            let mut state = self.state.borrow_mut();
            let (block, _) = state.block_and_thread(key);
            let found = state.block(block).shared.get(segment);
            if let Ok(pointer) = found {
                state.watch_shared(block, false, (pointer, segment.bytes));
            }
            found
        };
        found.unwrap_or_else(|message| trap_with(message))
    }

    /// Returns dynamic shared memory of the caller's block.
    pub(crate) fn dynamic_shared(&self, key: TaskKey) -> (*mut u8, usize) {
        let mut state = self.state.borrow_mut();
        let (block, _) = state.block_and_thread(key);
        let dynamic = state.block(block).shared.dynamic();
        state.watch_shared(block, true, dynamic);
        dynamic
    }
}

impl EngineState {
    /// Makes accesses to shared memory of a block known to the detector of races.
    fn watch_shared(&self, block: u32, dynamic: bool, (first, bytes): (*mut u8, usize)) {
        let (Some(mut races), Some(Some(here))) = (self.races(), self.blocks.get(block as usize)) else { return };
        if let Some(grid) = &self.grids[here.grid] {
            let memory = RaceMemory::Shared { rank: grid.run.device, block: here.index, dynamic };
            races.shared(block, memory, first.addr() as u64, bytes as u64);
        }
    }
}

fn note(state: &mut EngineState, key: TaskKey, wait: WaitKind, site: &'static Location<'static>) {
    let task = &mut state.tasks[key.id as usize];
    task.wait = wait;
    task.site = Some(site);
}

fn barrier(state: &mut EngineState, key: TaskKey, call: &BarrierCall, now: u64) -> Then<u32> {
    let (block, thread) = state.block_and_thread(key);
    let threads = (call.threads != 0).then_some(call.threads);
    note(state, key, WaitKind::Barrier { id: call.id, threads }, call.site);
    match state.block(block).arrive(thread, call) {
        Arrival::Complete(result) => {
            let at = call.id as usize;
            let mut waiters = std::mem::take(&mut state.block(block).barriers[at].waiters);
            if let Some(mut races) = state.races() {
                if !call.waits {
                    races.arrive(key.id, (block, call.id));
                }
                let caller = call.waits.then_some(&key);
                races.meet_at((block, call.id), waiters.iter().chain(caller).map(|key| key.id));
            }
            for waiter in waiters.drain(..) {
                state.tasks[waiter.id as usize].result = result;
                state.block(block).parked -= 1;
                state.wake(waiter, now);
            }
            // The list keeps its memory for the next round.
            state.block(block).barriers[at].waiters = waiters;
            state.tasks[key.id as usize].wait = WaitKind::Ready;
            let code = state.tasks[key.id as usize].code;
            state.activity += 1;
            state.record(Event::Barrier, code, now, u64::from(call.id) << 32 | u64::from(call.site.line()));
            Then::Go(result)
        }
        Arrival::Pass => {
            if let Some(mut races) = state.races() {
                races.arrive(key.id, (block, call.id));
            }
            state.tasks[key.id as usize].wait = WaitKind::Ready;
            Then::Go(0)
        }
        Arrival::Wait => {
            let block_state = state.block(block);
            block_state.barriers[call.id as usize].waiters.push(key);
            block_state.parked += 1;
            if state.check_stuck(block) { Then::End } else { Then::Park }
        }
        Arrival::Misuse(message) => {
            state.misuse(key, message);
            Then::End
        }
    }
}

fn exchange(state: &mut EngineState, key: TaskKey, call: &ExchangeCall, out: &mut [u64; 32], now: u64) -> Then<()> {
    let (block, thread) = state.block_and_thread(key);
    let (warp, lane) = ((thread / LANES) as usize, thread % LANES);
    let me = 1_u32 << lane;
    note(state, key, WaitKind::Exchange { mask: call.mask }, call.site);
    let warp_state = &state.block(block).warps[warp];
    let gone = call.mask & warp_state.exited;
    let wrong = if call.mask & me == 0 {
        Some(format!("lane {lane} calls an exchange of lanes {:#010x}, which do not include it", call.mask))
    } else if gone != 0 {
        Some(format!("an exchange of lanes {:#010x} needs lanes {gone:#010x}, which have exited", call.mask))
    } else {
        None
    };
    if let Some(message) = wrong {
        state.misuse(key, message);
        return Then::End;
    }

    // A mask may name lanes that the last warp lacks, as on a GPU. They take no part.
    let needed = call.mask & warp_state.exists;
    if needed == me {
        out[lane as usize] = call.value;
        state.tasks[key.id as usize].wait = WaitKind::Ready;
        return Then::Go(());
    }
    let at = match warp_state.exchanges.iter().position(|exchange| exchange.mask == call.mask) {
        Some(at) => at,
        None => {
            let mut fresh = state.spare.pop().unwrap_or_else(|| Box::new(Exchange::new(0)));
            (fresh.mask, fresh.arrived) = (call.mask, 0);
            let exchanges = &mut state.block(block).warps[warp].exchanges;
            exchanges.push(fresh);
            exchanges.len() - 1
        }
    };
    let joined = &mut state.block(block).warps[warp].exchanges[at];
    joined.arrived |= me;
    joined.values[lane as usize] = call.value;
    joined.outs[lane as usize] = out;
    if joined.arrived != needed {
        state.block(block).parked += 1;
        if let Some(other) = state.block(block).warps[warp].waits_in_a_circle(at) {
            let message = format!(
                "lane {lane} calls an exchange of lanes {:#010x}; it waits for one of lanes {other:#010x}, which waits for it",
                call.mask
            );
            state.misuse(key, message);
            return Then::End;
        }
        return if state.check_stuck(block) { Then::End } else { Then::Park };
    }
    let joined = state.block(block).warps[warp].exchanges.swap_remove(at);
    for lane in lanes(needed) {
        // Safety: each lane gave a reference to memory of its own stack, and waits until it is woken below. The
        // exception is the caller, whose `out` is not used otherwise from here on.
        let out = unsafe { &mut *joined.outs[lane as usize] };
        for from in lanes(needed) {
            out[from as usize] = joined.values[from as usize];
        }
    }
    if call.orders
        && let (Some(races), Some(Some(block_state))) = (state.races.clone(), state.blocks.get(block as usize))
    {
        let task = |lane| block_state.tasks[warp * LANES as usize + lane as usize].id;
        races.borrow_mut().meet(lanes(needed).map(task));
    }
    for other in lanes(needed & !me) {
        let block_state = state.block(block);
        block_state.parked -= 1;
        let other = block_state.tasks[warp * LANES as usize + other as usize];
        state.wake(other, now);
    }
    state.spare.push(joined);
    let task = &mut state.tasks[key.id as usize];
    task.wait = WaitKind::Ready;
    let code = task.code;
    state.activity += 1;
    state.record(Event::Exchange, code, now, u64::from(call.mask) << 20 | u64::from(call.site.line() & 0xf_ffff));
    Then::Go(())
}

fn lanes(mut mask: u32) -> impl Iterator<Item = u32> + Clone {
    std::iter::from_fn(move || {
        (mask != 0).then(|| {
            let lane = mask.trailing_zeros();
            mask &= mask - 1;
            lane
        })
    })
}

fn gather(state: &mut EngineState, key: TaskKey, site: &'static Location<'static>, now: u64) -> Then<u32> {
    let (block, thread) = state.block_and_thread(key);
    let (warp, me) = (thread / LANES, 1_u32 << (thread % LANES));
    let block_state = state.block(block);
    let block_serial = block_state.serial;
    let warp_state = &mut block_state.warps[warp as usize];
    let live = warp_state.exists & !warp_state.exited;
    if live == me {
        return Then::Go(me);
    }
    if let Some(gathering) = warp_state.gatherings.iter_mut().find(|gathering| gathering.site == site) {
        gathering.lanes |= me;
        let (all_here, serial) = (gathering.lanes == live, gathering.serial);
        note(state, key, WaitKind::ActiveMask, site);
        if all_here {
            // The caller is woken like the others. It is parked before the engine looks.
            release(state, block, block_serial, warp, serial, now);
        }
        return Then::Park;
    }
    // Now and then a lane continues alone although others are near.
    if state.ready.rng().rand_range(0..8) == 0 {
        return Then::Go(me);
    }
    note(state, key, WaitKind::ActiveMask, site);
    state.serial += 1;
    let serial = state.serial;
    let wait = state.ready.rng().rand_range(1..GATHERING_NS + 1);
    state.block(block).warps[warp as usize].gatherings.push(Gathering { site, lanes: me, serial });
    state.timers.add(now + u64::from(wait), Alarm::Gathering { block, block_serial, warp, serial });
    Then::Park
}

/// Releases a random part of the lanes of a gathering together. The rest waits on, for a bounded time.
pub(super) fn release(state: &mut EngineState, block: u32, block_serial: u64, warp: u32, serial: u64, now: u64) {
    let Some(Some(block_state)) = state.blocks.get_mut(block as usize) else { return };
    if block_state.serial != block_serial {
        return;
    }
    let warp_state = &mut block_state.warps[warp as usize];
    let Some(at) = warp_state.gatherings.iter().position(|gathering| gathering.serial == serial) else { return };
    let all = warp_state.gatherings[at].lanes;
    let rng = state.ready.rng();
    let part = match rng.rand_range(0..4) {
        0 => all & rng.rand_u32(),
        1 => all & (rng.rand_u32() | rng.rand_u32()),
        _ => all,
    };
    let part = if part == 0 { all } else { part };
    let rest = all & !part;
    if rest == 0 {
        warp_state.gatherings.swap_remove(at);
    } else {
        let wait = rng.rand_range(1..GATHERING_NS + 1);
        state.serial += 1;
        let serial = state.serial;
        let gathering = &mut warp_state.gatherings[at];
        (gathering.lanes, gathering.serial) = (rest, serial);
        state.timers.add(now + u64::from(wait), Alarm::Gathering { block, block_serial, warp, serial });
    }
    let first = (warp * LANES + part.trailing_zeros()) as usize;
    let first = state.block(block).tasks[first];
    let code = state.tasks[first.id as usize].code;
    state.record(Event::ActiveMask, code, now, u64::from(part));
    for lane in lanes(part) {
        let key = state.block(block).tasks[(warp * LANES + lane) as usize];
        state.tasks[key.id as usize].result = part;
        state.wake(key, now);
    }
}
