// SPDX-License-Identifier: MIT OR Apache-2.0
//! Grids on a device: the start of blocks, and the end of threads, blocks and grids.

use std::panic::Location;
use std::sync::Arc;

use gin_device::exec::Position;

use super::block::{Block, LANES};
use super::state::{ActiveGrid, DeviceState, EngineState, TaskKind};
use super::{Engine, Outcome, TaskKey, new_coroutine, panic_text};
use crate::error::{LaunchError, WaitKind};
use crate::grid::{GridRun, StreamId, unflatten};
use crate::hooks::{SuspendReason, TrapPayload, suspend, switch_point, take_panic_message};
use crate::inbox::DeviceCore;
use crate::log::{Code, Event};
use crate::stack::take_stacks;

impl Engine {
    pub(super) fn add_grid(&self, run: Arc<GridRun>, device: Arc<DeviceCore>) {
        let now = self.now.get();
        let code = Code::thread(run.device, run.launch, 0, 0);
        self.beat.name(code.grid(), run.grid.name.clone());
        let mut state = self.state.borrow_mut();
        state.progress();
        state.record(Event::GridStart, code, now, run.grid.blocks());
        if let Some(mut races) = state.races() {
            races.grid_launched(&run);
        }
        let at = run.device as usize;
        while state.devices.len() <= at {
            state.devices.push(DeviceState::default());
        }
        state.devices[at].limit = u64::from(device.config.resident_blocks.max(1));
        // On a GPU it may start as late as any other grid.
        let early = run.grid.dependent && state.ready.rng().rand_range(0..4) != 0;
        let grid = ActiveGrid {
            run,
            device,
            next_block: 0,
            resident: Vec::new(),
            early,
            triggered: 0,
            waiters: Vec::new(),
            started_ns: None,
        };
        let index = match state.grids.iter().position(Option::is_none) {
            Some(free) => {
                state.grids[free] = Some(grid);
                free
            }
            None => {
                state.grids.push(Some(grid));
                state.grids.len() - 1
            }
        };
        state.devices[at].order.push(index);
        state.can_start = true;
    }

    /// Starts all blocks that there is room for: grids in launch order, and the blocks of each in order.
    pub(super) fn start_blocks(&self) {
        if !std::mem::take(&mut self.state.borrow_mut().can_start) {
            return;
        }
        loop {
            let next = next_block(&mut self.state.borrow_mut(), self.now.get());
            let Some((index, block)) = next else { return };
            self.start_block(index, block);
            self.end_doomed();
        }
    }

    fn start_block(&self, index: usize, block: u64) {
        let now = self.now.get();
        let mut state = self.state.borrow_mut();
        let state = &mut *state;
        let beside = state.predecessor(index).is_some();
        let Some(grid) = &mut state.grids[index] else { return };
        let run = grid.run.clone();
        // `Grid::check` keeps this below 1025.
        let threads = run.grid.threads() as u32;
        let stacks = match take_stacks(run.stack_bytes, threads as usize) {
            Ok(stacks) => stacks,
            Err(cause) => {
                let (grid, cause) = (run.grid.name.clone(), cause.to_string());
                state.devices[run.device as usize].resident -= 1;
                state.doomed.push((index, LaunchError::OutOfStacks { grid, block, threads, cause }));
                return;
            }
        };
        state.serial += 1;
        let serial = state.serial;
        let fresh = Box::new(Block::new(index, block, serial, threads, run.grid.dynamic_shared));
        let slot = match state.free_blocks.pop() {
            Some(slot) => {
                state.blocks[slot as usize] = Some(fresh);
                slot
            }
            None => {
                state.blocks.push(Some(fresh));
                state.blocks.len() as u32 - 1
            }
        };
        if let Some(grid) = &mut state.grids[index] {
            grid.resident.push(slot);
        }
        let code = Code::thread(run.device, run.launch, block, 0);
        state.record(Event::BlockStart, code, now, block);
        state.progress();
        let (block_dim, grid_dim) = (run.grid.block_dim, run.grid.grid_dim);
        for (thread, stack) in (0..threads).zip(stacks) {
            let position = Position {
                thread: unflatten(u64::from(thread), block_dim),
                block_dim,
                block: unflatten(block, grid_dim),
                grid_dim,
            };
            let code = Code::thread(run.device, run.launch, block, thread);
            // Blocks have 1 to 32 warps.
            let warp = serial << 5 | u64::from(thread / LANES);
            let key = state.add_task(TaskKind::Thread { block: slot, thread }, code, warp, position);
            state.block(slot).tasks.push(key);
            state.set_stack(key, &stack);
            let thread_run = run.clone();
            self.put_coroutine(key, new_coroutine(stack, move || (thread_run.grid.body)()));
            state.wake(key, now);
        }
        if let (Some(mut races), Some(Some(fresh))) = (state.races(), state.blocks.get(slot as usize)) {
            races.block_begins(&run, beside, block, fresh.tasks.iter().map(|key| key.id));
        }
    }

    pub(super) fn thread_ended(&self, key: TaskKey, block: u32, thread: u32, outcome: Outcome) {
        let now = self.now.get();
        let mut state = self.state.borrow_mut();
        let state = &mut *state;
        if let Outcome::Panic(payload) = outcome {
            let actor = state.actor(key);
            let error = match payload.downcast::<TrapPayload>() {
                Ok(trap) => LaunchError::Trapped { actor, message: trap.0 },
                Err(payload) => {
                    let message = take_panic_message().unwrap_or_else(|| panic_text(&*payload));
                    LaunchError::Panicked { actor, message }
                }
            };
            state.doom(block, error);
            return;
        }
        let index = state.block(block).grid;
        let is_dependent = state.grids[index].as_ref().is_some_and(|grid| grid.run.grid.dependent);
        if is_dependent && !state.tasks[key.id as usize].waited {
            // The end of this grid would not imply that of the one before it.
            let message = "it ended without a call of `wait_for_predecessor`, and its grid was launched as dependent";
            state.misuse(key, message.to_owned());
            return;
        }
        let code = state.tasks[key.id as usize].code;
        state.record(Event::ThreadEnd, code, now, 0);
        if let Some(message) = state.block(block).exit(thread) {
            state.misuse(key, message);
            return;
        }
        state.free_task(key);
        if state.check_stuck(block) || state.block(block).live > 0 {
            return;
        }
        let grid = state.block(block).grid;
        if let Some(device) = state.release_block(block) {
            device.resident -= 1;
        }
        state.can_start = true;
        let done = state.grids[grid]
            .as_ref()
            .is_some_and(|grid| grid.resident.is_empty() && grid.next_block == grid.run.grid.blocks());
        if done && let Some(code) = state.finish_grid(grid, Ok(()), now) {
            self.beat.forget(code);
        }
    }

    /// Waits until the grid before the caller's on its stream has ended.
    pub(crate) fn wait_for_predecessor(&self, key: TaskKey, site: &'static Location<'static>) {
        switch_point();
        let parked = self.state.borrow_mut().waits_for_predecessor(key, site);
        if parked {
            suspend(SuspendReason::Parked);
        }
        let mut state = self.state.borrow_mut();
        let grid = state.grid_of(key);
        state.tasks[key.id as usize].waited = true;
        if let (Some(mut races), Some(grid)) = (state.races(), &state.grids[grid]) {
            races.predecessor_ended(key.id, &grid.run);
        }
    }

    /// Lets the next grid of the stream start, as far as the caller's block decides that.
    pub(crate) fn let_dependents_start(&self, key: TaskKey) {
        switch_point();
        let mut state = self.state.borrow_mut();
        let (block, _) = state.block_and_thread(key);
        let grid = state.grid_of(key);
        if !std::mem::replace(&mut state.block(block).triggered, true)
            && let Some(grid) = &mut state.grids[grid]
        {
            grid.triggered += 1;
            state.can_start = true;
        }
    }

    /// Ends the grids that failed while the last coroutine ran.
    pub(super) fn end_doomed(&self) {
        loop {
            let Some((grid, error)) = self.state.borrow_mut().doomed.pop() else { return };
            self.end_grid(grid, error);
        }
    }

    fn end_grid(&self, index: usize, error: LaunchError) {
        let blocks = match &self.state.borrow().grids[index] {
            Some(grid) => grid.resident.clone(),
            None => return,
        };
        for slot in blocks {
            let tasks = std::mem::take(&mut self.state.borrow_mut().block(slot).tasks);
            for key in tasks {
                if self.state.borrow().alive(key) {
                    self.kill(key);
                }
            }
            let mut state = self.state.borrow_mut();
            if let Some(device) = state.release_block(slot) {
                device.resident -= 1;
            }
        }
        let mut state = self.state.borrow_mut();
        state.can_start = true;
        state.progress();
        state.doomed.retain(|(grid, _)| *grid != index);
        if let Some(code) = state.finish_grid(index, Err(error), self.now.get()) {
            self.beat.forget(code);
        }
    }

    /// Ends all grids with their world.
    pub(super) fn end_grids(&self, reason: &str) {
        let count = self.state.borrow().grids.len();
        for index in 0..count {
            let name = self.state.borrow().grids[index].as_ref().map(|grid| grid.run.grid.name.clone());
            if let Some(grid) = name {
                self.end_grid(index, LaunchError::WorldEnded { grid, reason: reason.into() });
            }
        }
    }

    /// Ends grids that have run for too long. Used in the threads mode.
    pub(super) fn check_grid_limits(&self) {
        let Some(limit) = self.settings.grid_limit_ns else { return };
        let now = self.now.get();
        let over = {
            let state = self.state.borrow();
            if !state.steps.is_multiple_of(256) {
                return;
            }
            state.grids.iter().position(|grid| {
                grid.as_ref()
                    .and_then(|grid| grid.started_ns)
                    .is_some_and(|started| now.saturating_sub(started) > limit)
            })
        };
        if let Some(index) = over {
            let error = {
                let state = self.state.borrow();
                let Some(grid) = &state.grids[index] else { return };
                let (rank, name) = (grid.run.device, grid.run.grid.name.clone());
                LaunchError::NoProgress { rank, grid: name, limit_ns: limit, report: state.report(None) }
            };
            self.end_grid(index, error);
        }
    }
}

impl EngineState {
    /// Returns the index of the grid of a device thread.
    fn grid_of(&mut self, key: TaskKey) -> usize {
        let (block, _) = self.block_and_thread(key);
        self.block(block).grid
    }

    /// Returns the index of the grid that runs before this one on its stream.
    fn predecessor(&self, index: usize) -> Option<usize> {
        let run = &self.grids[index].as_ref()?.run;
        let of_stream = |other: &usize| self.grids[*other].as_ref().is_some_and(|other| other.run.stream == run.stream);
        self.devices[run.device as usize].order.iter().copied().find(of_stream).filter(|first| *first != index)
    }

    /// Registers a thread as a waiter for the grid before its own on the stream. Returns false if that has ended.
    fn waits_for_predecessor(&mut self, key: TaskKey, site: &'static Location<'static>) -> bool {
        let index = self.grid_of(key);
        let before = self.predecessor(index).and_then(|before| self.grids[before].as_mut());
        let Some(before) = before else { return false };
        before.waiters.push(key);
        let task = &mut self.tasks[key.id as usize];
        (task.wait, task.site) = (WaitKind::Predecessor, Some(site));
        true
    }

    /// Frees a block. Returns its device, if that is known.
    fn release_block(&mut self, slot: u32) -> Option<&mut DeviceState> {
        let mut block = self.blocks[slot as usize].take()?;
        block.copies.end();
        if let Some(mut races) = self.races() {
            races.block_ends(slot);
        }
        self.free_blocks.push(slot);
        let grid = self.grids[block.grid].as_mut()?;
        grid.resident.retain(|other| *other != slot);
        grid.triggered -= usize::from(block.triggered);
        self.devices.get_mut(grid.run.device as usize)
    }

    /// Ends a grid. Returns its name in the watchdog, which the caller removes.
    fn finish_grid(&mut self, index: usize, outcome: Result<(), LaunchError>, now: u64) -> Option<Code> {
        let grid = self.grids[index].take()?;
        let run = grid.run;
        for waiter in grid.waiters {
            if self.alive(waiter) {
                self.wake(waiter, now);
            }
        }
        if let Some(mut races) = self.races() {
            races.grid_ends(&run);
        }
        let code = Code::thread(run.device, run.launch, 0, 0);
        self.record(Event::GridEnd, code, now, u64::from(outcome.is_err()));
        self.devices[run.device as usize].order.retain(|other| *other != index);
        self.can_start = true;
        grid.device.finished(&run);
        run.finish(outcome);
        Some(code.grid())
    }
}

/// Ends a grid that never reached its device.
pub(super) fn refuse(run: &Arc<GridRun>, device: &DeviceCore, reason: &str) {
    device.finished(run);
    run.finish(Err(LaunchError::WorldEnded { grid: run.grid.name.clone(), reason: reason.into() }));
}

/// Returns the next block for which there is room.
fn next_block(state: &mut EngineState, now: u64) -> Option<(usize, u64)> {
    let EngineState { devices, grids, .. } = state;
    for device in devices {
        // For each stream whether a dependent grid may start.
        let mut streams: Vec<(StreamId, bool)> = Vec::new();
        for index in &device.order {
            let Some(grid) = &mut grids[*index] else { continue };
            match streams.iter_mut().find(|(stream, _)| *stream == grid.run.stream) {
                // Nothing starts beside two grids.
                Some((_, may_start)) => {
                    if !std::mem::take(may_start) || !grid.early {
                        continue;
                    }
                }
                None => streams.push((grid.run.stream, grid.lets_dependents_start())),
            }
            let run = &grid.run;
            let left = run.grid.blocks() - grid.next_block;
            if left == 0 {
                continue;
            }
            let free = device.limit - device.resident;
            let needed = if run.grid.cooperative && grid.next_block == 0 { left } else { 1 };
            if free < needed {
                // A later grid does not overtake one that waits for room.
                break;
            }
            let block = grid.next_block;
            grid.next_block += 1;
            grid.started_ns.get_or_insert(now);
            device.resident += 1;
            return Some((*index, block));
        }
    }
    None
}
