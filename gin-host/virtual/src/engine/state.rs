// SPDX-License-Identifier: MIT OR Apache-2.0
//! An engine's record of its coroutines, grids and blocks.

use std::any::Any;
use std::cell::{RefCell, RefMut};
use std::ops::Range;
use std::panic::Location;
use std::rc::Rc;
use std::sync::Arc;

use corosensei::Yielder;
use gin_abi::{Fault, Operation};
use gin_device::exec::Position;

use super::TaskKey;
use super::block::{Block, Exchange};
use super::ready::{Ready, ReadyTask};
use super::timers::{Alarm, Timers};
use crate::actor::Actor;
use crate::config::LogMode;
use crate::error::{LaunchError, NotStarted, WaitKind, WaitReport, Waiter, WorldError};
use crate::grid::GridRun;
use crate::hooks::SuspendReason;
use crate::inbox::DeviceCore;
use crate::log::{Code, Event, EventLog};
use crate::races::Races;
use crate::stack::Stack;

#[derive(Clone)]
pub(super) enum TaskKind {
    Free,
    Host { rank: u32 },
    Service { name: Arc<str> },
    Thread { block: u32, thread: u32 },
}

/// The waits that a device thread is in.
pub(super) struct Waits {
    /// Number of waits, one in another.
    pub(super) depth: u32,
    /// The timeout that the outermost known one would report.
    pub(super) timeout: Option<Fault>,
}

impl Waits {
    const NONE: Waits = Waits { depth: 0, timeout: None };

    /// Adds a wait. Returns true if it is the outermost one.
    pub(super) fn begin(&mut self, timeout: Option<Fault>) -> bool {
        self.depth += 1;
        self.timeout = self.timeout.or(timeout);
        self.depth == 1
    }

    /// Removes the innermost wait. Returns true if it was the outermost one, too.
    pub(super) fn end(&mut self) -> bool {
        self.depth -= 1;
        let is_outermost = self.depth == 0;
        if is_outermost {
            *self = Waits::NONE;
        }
        is_outermost
    }
}

pub(super) struct Task {
    pub(super) generation: u32,
    pub(super) kind: TaskKind,
    pub(super) code: Code,
    /// 0 for hosts and services, else unique to the warp.
    pub(super) warp: u64,
    pub(super) wait: WaitKind,
    pub(super) site: Option<&'static Location<'static>>,
    pub(super) waits: Waits,
    /// The value that it saw last in its outermost wait; the running task's is in [`Current`](crate::hooks::Current).
    pub(super) seen: Option<u64>,
    /// The time at which it wakes from a nap.
    pub(super) wakes: u64,
    /// Number of switches since the last pause.
    pub(super) switches: u32,
    /// It has waited for the grid before its own.
    pub(super) waited: bool,
    /// Result that the waker leaves for the task.
    pub(super) result: u32,
    pub(super) yielder: *const Yielder<(), SuspendReason>,
    /// Addresses of the guard page of its stack.
    pub(super) guard: Range<usize>,
    /// Size of its stack in bytes.
    pub(super) stack_bytes: usize,
    pub(super) position: Position,
}

impl Task {
    /// Returns the reason why it waits, with the device call that polls, if one does.
    fn described_wait(&self) -> WaitKind {
        match (&self.wait, &self.waits.timeout) {
            (WaitKind::Pause, Some(timeout)) => {
                let seen = self.seen.unwrap_or(timeout.seen());
                let values = match timeout.operation() {
                    Operation::WaitSignal | Operation::WaitCounter => {
                        format!(": it is {seen} and should reach {}", timeout.expected())
                    }
                    _ => String::new(),
                };
                WaitKind::Poll { call: format!("{}{values}", timeout.call()) }
            }
            (wait, _) => wait.clone(),
        }
    }
}

pub(super) struct ActiveGrid {
    pub(super) run: Arc<GridRun>,
    pub(super) device: Arc<DeviceCore>,
    pub(super) next_block: u64,
    /// Indices of the resident blocks.
    pub(super) resident: Vec<u32>,
    /// It starts, if it can, before the grid before it on the stream has ended.
    pub(super) early: bool,
    /// Number of resident blocks that let dependents start.
    pub(super) triggered: usize,
    /// Threads of the next grid that wait for the end of this one.
    pub(super) waiters: Vec<TaskKey>,
    /// Start on the engine's clock.
    pub(super) started_ns: Option<u64>,
}

impl ActiveGrid {
    /// Returns true if a dependent grid may start.
    pub(super) fn lets_dependents_start(&self) -> bool {
        self.next_block == self.run.grid.blocks() && self.triggered == self.resident.len()
    }
}

#[derive(Default)]
pub(super) struct DeviceState {
    pub(super) limit: u64,
    pub(super) resident: u64,
    /// Indices of the device's grids in launch order.
    pub(super) order: Vec<usize>,
}

/// The cause that ends a run.
pub(crate) enum Failure {
    HostPanic { rank: u32, payload: Box<dyn Any + Send> },
    World(WorldError),
}

/// The detector of races of an engine.
pub(super) type SharedRaces = Rc<RefCell<Races>>;

pub(super) struct EngineState {
    pub(super) tasks: Vec<Task>,
    pub(super) free_tasks: Vec<u32>,
    pub(super) blocks: Vec<Option<Box<Block>>>,
    pub(super) free_blocks: Vec<u32>,
    pub(super) grids: Vec<Option<ActiveGrid>>,
    pub(super) devices: Vec<DeviceState>,
    pub(super) ready: Ready,
    pub(super) timers: Timers,
    #[expect(clippy::vec_box, reason = "taken out and put back for each exchange, which moves the box only")]
    pub(super) spare: Vec<Box<Exchange>>,
    /// Grids to end, by index.
    pub(super) doomed: Vec<(usize, LaunchError)>,
    pub(super) failure: Option<Failure>,
    pub(super) log: EventLog,
    pub(super) log_mode: LogMode,
    pub(super) steps: u64,
    pub(super) progress_step: u64,
    /// Number of barriers and exchanges that have completed, and of turns of coroutines that do not poll.
    pub(super) activity: u64,
    /// Number of waits that began or ended, of pauses outside of waits, and of sleepers that woke.
    pub(super) events: u64,
    /// Activity and events at the last look, and the clock then: the world is quiet since.
    pub(super) quiet: (u64, u64),
    /// The naps that are longer than the tasks asked for, and when they would have ended.
    pub(super) stretched: Vec<(TaskKey, u64)>,
    pub(super) serial: u64,
    pub(super) hosts: u32,
    pub(super) services: u32,
    /// True if a block may be able to begin.
    pub(super) can_start: bool,
    /// True if something has ended or failed since the last check.
    pub(super) may_be_over: bool,
    pub(super) races: Option<SharedRaces>,
}

impl EngineState {
    pub(super) fn new(ready: Ready, log: EventLog, log_mode: LogMode) -> Self {
        EngineState {
            tasks: Vec::new(),
            free_tasks: Vec::new(),
            blocks: Vec::new(),
            free_blocks: Vec::new(),
            grids: Vec::new(),
            devices: Vec::new(),
            ready,
            timers: Timers::default(),
            spare: Vec::new(),
            doomed: Vec::new(),
            failure: None,
            log,
            log_mode,
            steps: 0,
            progress_step: 0,
            activity: 0,
            events: 0,
            quiet: (0, 0),
            stretched: Vec::new(),
            serial: 0,
            hosts: 0,
            services: 0,
            can_start: false,
            may_be_over: true,
            races: None,
        }
    }

    /// Returns the detector of races, if there is one. The caller runs no code of users meanwhile.
    pub(super) fn races(&self) -> Option<RefMut<'_, Races>> {
        self.races.as_ref().map(|races| races.borrow_mut())
    }

    pub(super) fn record(&mut self, event: Event, code: Code, now: u64, detail: u64) {
        self.log.push(self.log_mode, event, code, now, detail);
    }

    pub(super) fn progress(&mut self) {
        self.progress_step = self.steps;
    }

    /// Returns a number that changes if there was progress, also within a grid.
    pub(super) fn activity(&self) -> u64 {
        self.progress_step.wrapping_add(self.activity)
    }

    /// Returns for how many nanoseconds of the clock nothing has happened. If something has, ends stretched naps.
    pub(super) fn quiet_ns(&mut self, now: u64) -> u64 {
        let events = self.activity().wrapping_add(self.events);
        if self.quiet.0 != events {
            self.quiet = (events, now);
            for (key, at) in std::mem::take(&mut self.stretched) {
                if self.alive(key) && self.tasks[key.id as usize].wakes != u64::MAX {
                    self.nap_until(key, at.max(now));
                }
            }
        }
        now.saturating_sub(self.quiet.1)
    }

    /// Lets a task nap until the clock shows `at`, and no longer if it naps already.
    pub(super) fn nap_until(&mut self, key: TaskKey, at: u64) {
        self.tasks[key.id as usize].wakes = at;
        self.timers.add(at, Alarm::Task(key));
    }

    pub(super) fn alive(&self, key: TaskKey) -> bool {
        self.tasks.get(key.id as usize).is_some_and(|task| task.generation == key.generation)
    }

    pub(super) fn add_task(&mut self, kind: TaskKind, code: Code, warp: u64, position: Position) -> TaskKey {
        let generation = match self.free_tasks.last() {
            Some(id) => self.tasks[*id as usize].generation,
            None => 1,
        };
        let task = Task {
            generation,
            kind,
            code,
            warp,
            wait: WaitKind::Ready,
            site: None,
            waits: Waits::NONE,
            seen: None,
            wakes: u64::MAX,
            switches: 0,
            waited: false,
            result: 0,
            yielder: std::ptr::null(),
            guard: 0..0,
            stack_bytes: 0,
            position,
        };
        let id = match self.free_tasks.pop() {
            Some(id) => {
                self.tasks[id as usize] = task;
                id
            }
            None => {
                self.tasks.push(task);
                self.tasks.len() as u32 - 1
            }
        };
        TaskKey { id, generation }
    }

    /// Records the stack on which a task runs.
    pub(super) fn set_stack(&mut self, key: TaskKey, stack: &Stack) {
        let task = &mut self.tasks[key.id as usize];
        (task.guard, task.stack_bytes) = (stack.guard(), stack.bytes());
    }

    pub(super) fn free_task(&mut self, key: TaskKey) {
        if let Some(mut races) = self.races() {
            let block = match self.tasks[key.id as usize].kind {
                TaskKind::Thread { block, .. } => self.blocks.get(block as usize).and_then(Option::as_ref),
                _ => None,
            };
            let grid = block.and_then(|block| self.grids[block.grid].as_ref());
            races.task_ends(key.id, grid.map(|grid| &*grid.run));
        }
        let task = &mut self.tasks[key.id as usize];
        task.generation = task.generation.wrapping_add(1).max(1);
        task.kind = TaskKind::Free;
        self.free_tasks.push(key.id);
    }

    pub(super) fn wake(&mut self, key: TaskKey, now: u64) {
        self.tasks[key.id as usize].wait = WaitKind::Ready;
        self.make_ready(key, now);
    }

    /// Makes a task ready as `wake` does, but keeps the record of its wait.
    pub(super) fn make_ready(&mut self, key: TaskKey, now: u64) {
        let warp = self.tasks[key.id as usize].warp;
        self.ready.push(ReadyTask { key, warp }, now);
    }

    pub(super) fn block(&mut self, index: u32) -> &mut Block {
        match self.blocks.get_mut(index as usize) {
            Some(Some(block)) => block,
            _ => unreachable!("a thread outlived its block"),
        }
    }

    /// Returns the block of a device thread, and its number in it.
    pub(super) fn block_and_thread(&self, key: TaskKey) -> (u32, u32) {
        match self.tasks[key.id as usize].kind {
            TaskKind::Thread { block, thread } => (block, thread),
            _ => unreachable!("only device threads use blocks"),
        }
    }

    pub(super) fn actor(&self, key: TaskKey) -> Actor {
        self.actor_of(&self.tasks[key.id as usize].kind)
    }

    fn actor_of(&self, kind: &TaskKind) -> Actor {
        match kind {
            TaskKind::Free => Actor::Service { name: "unknown".into() },
            TaskKind::Host { rank } => Actor::Host { rank: *rank },
            TaskKind::Service { name } => Actor::Service { name: name.clone() },
            TaskKind::Thread { block, thread } => {
                let block = self.blocks.get(*block as usize).and_then(Option::as_ref);
                let run = block.and_then(|block| self.grids[block.grid].as_ref()).map(|grid| &grid.run);
                match (block, run) {
                    (Some(block), Some(run)) => Actor::Thread {
                        rank: run.device,
                        grid: run.grid.name.clone(),
                        launch: run.launch,
                        block: block.index,
                        thread: *thread,
                    },
                    _ => unreachable!("a thread outlived its block"),
                }
            }
        }
    }

    /// Returns a report of all waiters, or of the threads of one block.
    pub(super) fn report(&self, only_block: Option<u32>) -> WaitReport {
        let mut report = WaitReport::default();
        for task in &self.tasks {
            let wanted = match (&task.kind, only_block) {
                (TaskKind::Free, _) => false,
                (TaskKind::Thread { block, .. }, Some(only)) => *block == only,
                (_, only) => only.is_none(),
            };
            if wanted {
                report.waiters.push(Waiter {
                    actor: self.actor_of(&task.kind),
                    wait: task.described_wait(),
                    site: task.site,
                });
            }
        }
        if only_block.is_none() {
            for device in &self.devices {
                self.report_not_started(device, &mut report);
            }
        }
        report.sort();
        report
    }

    fn report_not_started(&self, device: &DeviceState, report: &mut WaitReport) {
        for (at, grid_index) in device.order.iter().enumerate() {
            let Some(grid) = &self.grids[*grid_index] else { continue };
            let (run, blocks) = (&grid.run, grid.run.grid.blocks());
            if grid.next_block == blocks {
                continue;
            }
            let mut earlier = device.order[..at].iter().filter_map(|index| self.grids[*index].as_ref());
            let before = earlier.rfind(|other| other.run.stream == run.stream);
            let reason = match before {
                Some(other) => {
                    format!("it follows grid `{}` (launch {}) on its stream", other.run.grid.name, other.run.launch)
                }
                None => format!("residency limit {}, {} blocks are resident", device.limit, device.resident),
            };
            report.not_started.push(NotStarted {
                rank: run.device,
                grid: run.grid.name.clone(),
                first_block: grid.next_block,
                blocks,
                reason,
            });
        }
    }

    /// Marks the grid of a block as failed. The engine ends it once it has left the running coroutine.
    pub(super) fn doom(&mut self, block: u32, error: LaunchError) {
        let grid = self.block(block).grid;
        self.doomed.push((grid, error));
    }

    pub(super) fn misuse(&mut self, key: TaskKey, message: String) {
        let (block, _) = self.block_and_thread(key);
        let error = LaunchError::Misuse { actor: self.actor(key), message, report: self.report(Some(block)) };
        self.doom(block, error);
    }

    /// Ends the grid if all threads of the block wait for each other.
    pub(super) fn check_stuck(&mut self, block: u32) -> bool {
        if !self.block(block).is_stuck() {
            return false;
        }
        let (index, grid) = (self.block(block).index, self.block(block).grid);
        let Some(grid) = &self.grids[grid] else { return false };
        let (rank, name) = (grid.run.device, grid.run.grid.name.clone());
        let error = LaunchError::Stuck { rank, grid: name, block: index, report: self.report(Some(block)) };
        self.doom(block, error);
        true
    }
}
