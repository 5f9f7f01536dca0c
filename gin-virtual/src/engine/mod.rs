// SPDX-License-Identifier: MIT OR Apache-2.0
//! The scheduler of one OS thread: coroutines, the clock, and the loop that chooses among them.
//!
//! A seeded world has one engine for everything; in the threads mode each device has one for its grids. The coroutine
//! that runs reaches its engine through thread-local words (`hooks`), changes the state in short borrows, and never
//! holds one across a switch.

mod block;
mod collective;
mod grids;
mod ready;
mod state;
mod timers;

use std::any::Any;
use std::cell::{Cell, RefCell};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use corosensei::{Coroutine, CoroutineResult};
use gin_device::exec::Position;
use oorandom::Rand32;

use self::grids::refuse;
use self::ready::Ready;
pub(crate) use self::state::Failure;
use self::state::{Kind, State};
use self::timers::Alarm;
use crate::config::{LogMode, Policy};
use crate::error::{WaitKind, WorldError};
use crate::hooks::{Current, Why, current};
use crate::host::real_clock_ns;
use crate::inbox::{HostSpec, Inbox, Mail, ServiceSpec};
use crate::log::{Code, Event, EventLog};
use crate::stack::{Stack, give_stack, take_stack};
use crate::watchdog::Beat;

/// Names a coroutine of an engine.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Key {
    pub(crate) id: u32,
    pub(crate) generation: u32,
}

impl Key {
    pub(crate) const NONE: Key = Key { id: u32::MAX, generation: 0 };
}

/// How a coroutine ended.
enum Outcome {
    Done,
    Panic(Box<dyn Any + Send>),
}

/// Switches after a pause for which a coroutine still counts as polling.
const POLL_SWITCHES: u32 = 16;

type Co = Coroutine<(), Why, Outcome, Stack>;

/// Settings of an engine.
pub(crate) struct Settings {
    pub(crate) seed: u64,
    pub(crate) policy: Policy,
    pub(crate) quantum: Option<u32>,
    /// The virtual clock's start and what an access takes; `None` for the real clock.
    pub(crate) virtual_clock: Option<(u64, u64)>,
    pub(crate) log: EventLog,
    pub(crate) log_mode: LogMode,
    pub(crate) max_steps: u64,
    pub(crate) stall_steps: u64,
    /// On the engine's clock, from now.
    pub(crate) max_ns: u64,
    /// On the engine's clock, for each grid.
    pub(crate) grid_limit_ns: Option<u64>,
    pub(crate) host_stack_bytes: usize,
}

/// What the loop finds to do.
enum Turn {
    Resume(Key),
    /// Nobody can run before the clock shows this.
    IdleUntil(u64),
    /// Nobody will ever run.
    Dead,
}

pub(crate) struct Engine {
    settings: Settings,
    now: Cell<u64>,
    start: u64,
    state: RefCell<State>,
    /// By task id.
    coroutines: RefCell<Vec<Option<Co>>>,
    inbox: Arc<Inbox>,
    beat: Arc<Beat>,
}

impl Engine {
    pub(crate) fn new(mut settings: Settings, inbox: Arc<Inbox>, beat: Arc<Beat>) -> Self {
        let rng = Rand32::new(settings.seed);
        let log = std::mem::take(&mut settings.log);
        let state = State::new(Ready::new(settings.policy, rng, settings.quantum), log, settings.log_mode);
        let now = settings.virtual_clock.map_or_else(real_clock_ns, |(start, _)| start);
        Engine {
            settings,
            now: Cell::new(now),
            start: now,
            state: RefCell::new(state),
            coroutines: RefCell::new(Vec::new()),
            inbox,
            beat,
        }
    }

    pub(crate) fn is_virtual(&self) -> bool {
        self.settings.virtual_clock.is_some()
    }

    /// The clock between two turns.
    pub(crate) fn clock(&self) -> u64 {
        self.now.get()
    }

    /// The clock, the switch points that the running coroutine has passed included.
    pub(crate) fn now(&self) -> u64 {
        match self.settings.virtual_clock {
            Some((_, step)) => {
                let passed = current(|current| current.slice.get() - current.budget.get());
                self.now.get() + u64::from(passed) * step
            }
            None => real_clock_ns(),
        }
    }

    pub(crate) fn note_progress(&self) {
        self.state.borrow_mut().progress();
    }

    pub(crate) fn take_log(&self) -> EventLog {
        std::mem::take(&mut self.state.borrow_mut().log)
    }

    /// Runs hosts, services and grids until all hosts and grids have ended, or something fails.
    pub(crate) fn run_world(&self) -> Result<(), Failure> {
        let outcome = loop {
            self.read_mail();
            self.start_blocks();
            if std::mem::take(&mut self.state.borrow_mut().may_be_over) {
                let mut state = self.state.borrow_mut();
                if let Some(failure) = state.failure.take() {
                    break Err(failure);
                }
                if state.hosts == 0 && state.grids.iter().all(Option::is_none) {
                    break Ok(());
                }
            }
            match self.turn() {
                Turn::Resume(key) => self.resume(key),
                Turn::IdleUntil(at) => self.jump(at),
                Turn::Dead => break Err(self.no_progress("nobody can ever run again".into())),
            }
            if let Some(reason) = self.limit_reached() {
                break Err(self.no_progress(reason));
            }
        };
        self.end_everything(&outcome);
        outcome
    }

    /// Runs the grids of a device until the inbox is closed, on the real clock.
    pub(crate) fn serve(&self) {
        let mut idle_turns = 0_u32;
        let mut idle_progress = 0;
        loop {
            if self.inbox.is_closed() {
                break;
            }
            self.now.set(real_clock_ns());
            self.read_mail();
            self.start_blocks();
            match self.turn() {
                Turn::Resume(key) => self.resume(key),
                Turn::IdleUntil(at) => {
                    // Nobody got further since the last time that all napped: others need the processor more.
                    let progress = self.state.borrow().progress_step;
                    idle_turns = if progress == idle_progress { idle_turns + 1 } else { 0 };
                    idle_progress = progress;
                    self.inbox.nap(at.saturating_sub(self.now.get()), idle_turns);
                }
                Turn::Dead => self.inbox.wait(),
            }
            self.check_grid_limits();
        }
        self.end_everything(&Ok(()));
    }

    fn no_progress(&self, reason: String) -> Failure {
        Failure::World(WorldError::NoProgress { reason, report: self.state.borrow().report(None) })
    }

    fn limit_reached(&self) -> Option<String> {
        let state = self.state.borrow();
        if !state.steps.is_multiple_of(64) && self.now.get() - self.start < self.settings.max_ns {
            return None;
        }
        let Settings { max_steps, stall_steps, max_ns, .. } = self.settings;
        if state.steps >= max_steps {
            return Some(format!("the limit of {max_steps} choices was reached"));
        }
        if state.steps - state.progress_step >= stall_steps {
            return Some(format!("{stall_steps} choices passed and nobody got any further"));
        }
        (self.now.get() - self.start >= max_ns).then(|| format!("the limit of {max_ns} ns of virtual time was reached"))
    }

    fn turn(&self) -> Turn {
        let now = self.now.get();
        let mut state = self.state.borrow_mut();
        let state = &mut *state;
        while let Some(alarm) = state.timers.due(now) {
            match alarm {
                // What it waited for stays noted: it has not yet looked again.
                Alarm::Task(key) if state.alive(key) => state.make_ready(key, now),
                Alarm::Task(_) => {}
                Alarm::Gathering { block, block_serial, warp, serial } => {
                    collective::release(state, block, block_serial, warp, serial, now);
                }
            }
        }
        loop {
            let next = state.timers.next();
            match state.ready.pop(now, next) {
                Some(entry) if state.alive(entry.key) => {
                    state.steps += 1;
                    return Turn::Resume(entry.key);
                }
                Some(_) => {}
                None => return next.map_or(Turn::Dead, Turn::IdleUntil),
            }
        }
    }

    fn jump(&self, at: u64) {
        self.now.set(at.max(self.now.get()));
        let mut state = self.state.borrow_mut();
        state.steps += 1;
        state.record(Event::Jump, Code::default(), at, 0);
    }

    fn resume(&self, key: Key) {
        let at = key.id as usize;
        let now = self.now.get();
        let (slice, code) = {
            let mut state = self.state.borrow_mut();
            let state = &mut *state;
            let slice = state.ready.slice();
            let task = &state.tasks[at];
            let code = task.code;
            current(|current| {
                current.yielder.set(task.yielder);
                current.position.set(task.position);
                current.device.set(matches!(task.kind, Kind::Thread { .. }));
            });
            state.record(Event::Resume, code, now, u64::from(slice));
            (slice, code)
        };
        let result = {
            // Hooks use the state, never the list of coroutines, so the borrow may last while this one runs.
            let mut coroutines = self.coroutines.borrow_mut();
            let Some(coroutine) = &mut coroutines[at] else { return };
            self.beat.enter(code);
            let result = {
                let _entered = Entered::new(self, key, slice, false);
                coroutine.resume(())
            };
            self.beat.leave();
            if coroutine.done()
                && let Some(coroutine) = coroutines[at].take()
            {
                give_stack(coroutine.into_stack());
            }
            result
        };
        let passed = current(|current| slice - current.budget.replace(0));
        if let Some((_, step)) = self.settings.virtual_clock {
            self.now.set(now + (u64::from(passed) + 1) * step);
        }
        match result {
            CoroutineResult::Yield(why) => self.yielded(key, why),
            CoroutineResult::Return(outcome) => self.ended(key, outcome),
        }
        self.end_doomed();
    }

    fn yielded(&self, key: Key, why: Why) {
        let now = self.now.get();
        let mut state = self.state.borrow_mut();
        let state = &mut *state;
        let task = &mut state.tasks[key.id as usize];
        task.yielder = current(|current| current.yielder.get());
        let until = match why {
            Why::Switch => {
                // A polling loop is cut at its loads too.
                task.switches = task.switches.saturating_add(1);
                if task.switches > POLL_SWITCHES {
                    task.wait = WaitKind::Ready;
                }
                state.make_ready(key, now);
                return;
            }
            Why::Parked => return,
            Why::Pause(ns) => {
                task.wait = WaitKind::Pause;
                task.switches = 0;
                now + state.ready.nap(ns)
            }
            Why::BlockOn(ns, site) => {
                task.wait = WaitKind::BlockOn;
                task.site = Some(site);
                now + state.ready.nap(ns)
            }
            Why::SleepUntil(at) => {
                task.wait = WaitKind::Sleep;
                at.max(now + 1)
            }
        };
        state.timers.add(until, Alarm::Task(key));
    }

    fn ended(&self, key: Key, outcome: Outcome) {
        let now = self.now.get();
        let kind = {
            let mut state = self.state.borrow_mut();
            state.progress();
            state.may_be_over = true;
            state.tasks[key.id as usize].kind.clone()
        };
        match kind {
            Kind::Thread { block, thread } => self.thread_ended(key, block, thread, outcome),
            Kind::Host { rank } => {
                let mut state = self.state.borrow_mut();
                state.hosts -= 1;
                state.record(Event::HostEnd, Code::host(rank), now, 0);
                state.free_task(key);
                if let Outcome::Panic(payload) = outcome {
                    state.failure.get_or_insert(Failure::HostPanic { rank, payload });
                }
            }
            Kind::Service { name } => {
                let mut state = self.state.borrow_mut();
                state.services -= 1;
                let code = state.tasks[key.id as usize].code;
                state.record(Event::ServiceEnd, code, now, 0);
                state.free_task(key);
                if let Outcome::Panic(payload) = outcome {
                    let message = text_of(&*payload);
                    state.failure.get_or_insert(Failure::World(WorldError::ServicePanicked { name, message }));
                }
            }
            Kind::Free => {}
        }
    }

    fn read_mail(&self) {
        for mail in self.inbox.take() {
            match mail {
                Mail::Launch(run, device) => self.add_grid(run, device),
                Mail::Host(spec) => self.add_host(spec),
                Mail::Service(spec) => self.add_service(spec),
                Mail::EndGrids(reason) => self.end_grids(&reason),
            }
        }
    }

    fn add_host(&self, HostSpec { rank, body }: HostSpec) {
        self.add_root(Kind::Host { rank }, Code::host(rank), body);
        self.state.borrow_mut().hosts += 1;
    }

    fn add_service(&self, ServiceSpec { index, name, body }: ServiceSpec) {
        self.add_root(Kind::Service { name }, Code::service(index), body);
        self.state.borrow_mut().services += 1;
    }

    /// Adds a coroutine that is no device thread.
    fn add_root(&self, kind: Kind, code: Code, body: Box<dyn FnOnce() + Send>) {
        let mut state = self.state.borrow_mut();
        if let Kind::Service { name } = &kind {
            self.beat.name(code, name.clone());
        }
        let key = state.add_task(kind, code, 0, Position::ALONE);
        match take_stack(self.settings.host_stack_bytes) {
            Ok(stack) => {
                self.put_coroutine(key, new_coroutine(stack, body));
                state.wake(key, self.now.get());
            }
            Err(cause) => {
                let error = WorldError::NoResources { who: state.who(key), cause: cause.to_string() };
                state.failure.get_or_insert(Failure::World(error));
                state.may_be_over = true;
            }
        }
    }

    fn put_coroutine(&self, key: Key, coroutine: Co) {
        let mut coroutines = self.coroutines.borrow_mut();
        let at = key.id as usize;
        if coroutines.len() <= at {
            coroutines.resize_with(at + 1, || None);
        }
        coroutines[at] = Some(coroutine);
    }

    /// Unwinds a coroutine and forgets it.
    fn kill(&self, key: Key) {
        let at = key.id as usize;
        let coroutine = self.coroutines.borrow_mut().get_mut(at).and_then(Option::take);
        self.state.borrow_mut().may_be_over = true;
        if let Some(mut coroutine) = coroutine {
            let state = self.state.borrow();
            let (yielder, position) = (state.tasks[at].yielder, state.tasks[at].position);
            drop(state);
            let _entered = Entered::new(self, key, 0, true);
            current(|current| {
                current.yielder.set(yielder);
                current.position.set(position);
            });
            // A destructor that panics has printed its message; there is nobody else to tell.
            if catch_unwind(AssertUnwindSafe(|| coroutine.force_unwind())).is_ok() && coroutine.done() {
                give_stack(coroutine.into_stack());
            }
        }
        self.state.borrow_mut().free_task(key);
    }

    /// Ends all that is left, in the order hosts, grids, services: the reverse of who serves whom.
    fn end_everything(&self, outcome: &Result<(), Failure>) {
        let reason = match outcome {
            Ok(()) => "the world is over".to_owned(),
            Err(Failure::HostPanic { rank, .. }) => format!("the host of rank {rank} panicked"),
            Err(Failure::World(error)) => error.to_string().lines().next().unwrap_or_default().to_owned(),
        };
        self.kill_roots(|kind| matches!(kind, Kind::Host { .. }));
        self.end_grids(&reason);
        self.kill_roots(|kind| matches!(kind, Kind::Service { .. }));
        for mail in self.inbox.take() {
            if let Mail::Launch(run, device) = mail {
                refuse(&run, &device, &reason);
            }
        }
        let mut state = self.state.borrow_mut();
        (state.hosts, state.services) = (0, 0);
    }

    fn kill_roots(&self, which: impl Fn(&Kind) -> bool) {
        let count = self.state.borrow().tasks.len();
        for id in 0..count {
            let key = {
                let state = self.state.borrow();
                let task = &state.tasks[id];
                which(&task.kind).then_some(Key { id: id as u32, generation: task.generation })
            };
            if let Some(key) = key {
                self.kill(key);
            }
        }
    }
}

/// Text of a panic's payload.
pub(crate) fn text_of(payload: &(dyn Any + Send)) -> String {
    let text = payload.downcast_ref::<&str>().copied();
    text.or_else(|| payload.downcast_ref::<String>().map(String::as_str)).unwrap_or("a payload that is no text").into()
}

fn new_coroutine(stack: Stack, body: Box<dyn FnOnce() + Send>) -> Co {
    Coroutine::with_stack(stack, move |yielder, ()| {
        current(|current| current.yielder.set(yielder));
        match catch_unwind(AssertUnwindSafe(body)) {
            Ok(()) => Outcome::Done,
            Err(payload) => Outcome::Panic(payload),
        }
    })
}

/// While it lives, this OS thread runs a coroutine of the engine.
struct Entered {
    before: (*const Engine, Key, bool),
}

impl Entered {
    fn new(engine: &Engine, key: Key, slice: u32, dying: bool) -> Self {
        current(|current: &Current| {
            let before = (current.engine.replace(engine), current.key.replace(key), current.dying.replace(dying));
            current.slice.set(slice);
            current.budget.set(slice);
            Entered { before }
        })
    }
}

impl Drop for Entered {
    fn drop(&mut self) {
        let (engine, key, dying) = self.before;
        current(|current| {
            current.engine.set(engine);
            current.key.set(key);
            current.dying.set(dying);
            current.device.set(false);
            current.position.set(Position::ALONE);
        });
    }
}
