// SPDX-License-Identifier: MIT OR Apache-2.0
//! The scheduler of one OS thread: coroutines, the clock, and the loop that chooses the next coroutine.
//!
//! A seeded world has one engine for everything. In the threads mode each device has one for its grids. The running
//! coroutine reaches its engine through thread-local words (`hooks`). It changes the state in short borrows and never
//! holds one across a switch.
//!
//! # Where coroutines switch
//!
//! A coroutine gives up its turn at switch points only: accesses to shared words, pauses, and waits, that is naps,
//! barriers, exchanges of threads, and calls of the host that block. Between two switch points nothing else of the
//! engine runs, so the engine is sequentially consistent, and a run is a sequence of choices that the seed repeats. A
//! turn lasts a number of switch points, the quantum, which the schedule draws.
//!
//! # Why every schedule ends
//!
//! Claim: a seeded run ends if the program would end under fair scheduling, and otherwise ends with an error that names
//! the waiters. Because:
//!
//! 1. *A thread that can run does run.* Round robin takes each in turn. `Random` draws from all with equal chance.
//!    `Starve` passes over one thread, and `WarpAhead` prefers one warp, for at most `EPOCH_CHOICES` choices or
//!    `EPOCH_NS` of the clock; then an epoch with another one begins.
//! 2. *A poller lets the clock advance.* A loop that polls naps, so when all wait the clock jumps to the next alarm,
//!    and a deadline comes after finitely many choices. While nothing happens, naps grow with the quiet time, up to a
//!    second, so a long deadline costs few choices.
//! 3. *A deadlock is noticed.* If no coroutine can run and no alarm is set, the run ends at once (`Turn::Dead`).
//! 4. *A livelock is noticed.* `stall_steps` choices without progress, `max_steps` choices, and `max_ns` of the virtual
//!    clock end the run. A coroutine that passes no switch point cannot be interrupted; the watchdog ends the process.
//!
//! In the threads mode the clock is the real one, and the limits are those of each grid.

mod block;
mod bulk;
mod collective;
mod copies;
mod grids;
mod ready;
mod state;
mod timers;

use std::any::Any;
use std::cell::{Cell, RefCell};
use std::panic::{AssertUnwindSafe, Location, catch_unwind};
use std::rc::Rc;
use std::sync::Arc;

use corosensei::{Coroutine, CoroutineResult};
use gin_abi::Fault;
use gin_device::exec::{Position, watch};
use oorandom::Rand32;

use self::grids::refuse;
use self::ready::Ready;
pub(crate) use self::state::Failure;
use self::state::{EngineState, SharedRaces, Task, TaskKind};
use self::timers::Alarm;
use crate::actor::Actor;
use crate::config::{LogMode, Schedule};
use crate::error::{WaitKind, WorldError};
use crate::hooks::real_clock_ns;
use crate::hooks::{Current, SuspendReason, current};
use crate::inbox::{HostSpec, Inbox, Mail, ServiceSpec};
use crate::log::{Code, Event, EventLog};
use crate::overflow::{Explained, SignalStack};
use crate::races::Races;
use crate::stack::{Stack, give_stack, take_stack};
use crate::watchdog::Heartbeat;

/// Name of a coroutine of an engine.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct TaskKey {
    pub(crate) id: u32,
    pub(crate) generation: u32,
}

impl TaskKey {
    pub(crate) const NONE: TaskKey = TaskKey { id: u32::MAX, generation: 0 };
}

/// The end of a coroutine.
enum Outcome {
    Done,
    Panic(Box<dyn Any + Send>),
}

/// Time without activity after which a virtual world stretches naps, in nanoseconds of its clock.
const QUIET_NS: u64 = 1_000_000;
/// The part of the quiet time so far that a stretched nap lasts. So a deadline is noticed at most 1.6 % too late.
const STRETCH: u64 = 64;
/// Longest nap that is stretched, in nanoseconds of the virtual clock.
const MAX_NAP_NS: u64 = 1_000_000_000;

/// Number of switches after a pause for which a coroutine still counts as polling.
const POLL_SWITCHES: u32 = 16;

type TaskCoroutine = Coroutine<(), SuspendReason, Outcome, Stack>;

/// Settings of an engine.
pub(crate) struct Settings {
    pub(crate) seed: u64,
    pub(crate) schedule: Schedule,
    pub(crate) quantum: Option<u32>,
    /// Start of the virtual clock and the duration of an access; `None` for the real clock.
    pub(crate) virtual_clock: Option<(u64, u64)>,
    pub(crate) log: EventLog,
    pub(crate) log_mode: LogMode,
    pub(crate) max_steps: u64,
    pub(crate) stall_steps: u64,
    /// Time limit of a run on the engine's clock, counted from its start.
    pub(crate) max_ns: u64,
    /// Time limit of each grid on the engine's clock.
    pub(crate) grid_limit_ns: Option<u64>,
    pub(crate) host_stack_bytes: usize,
    /// Look for data races.
    pub(crate) races: bool,
}

/// The next action of the loop.
enum Turn {
    Resume(TaskKey),
    /// No coroutine can run before the clock shows this time.
    IdleUntil(u64),
    /// No coroutine will ever run.
    Dead,
}

pub(crate) struct Engine {
    settings: Settings,
    now: Cell<u64>,
    start: u64,
    state: RefCell<EngineState>,
    races: Option<SharedRaces>,
    /// Indexed by task id.
    coroutines: RefCell<Vec<Option<TaskCoroutine>>>,
    inbox: Arc<Inbox>,
    beat: Arc<Heartbeat>,
    /// The last progress before a stall that was printed.
    printed_stall: Cell<Option<u64>>,
}

impl Engine {
    pub(crate) fn new(mut settings: Settings, inbox: Arc<Inbox>, beat: Arc<Heartbeat>) -> Self {
        let rng = Rand32::new(settings.seed);
        let log = std::mem::take(&mut settings.log);
        let mut state = EngineState::new(Ready::new(settings.schedule, rng, settings.quantum), log, settings.log_mode);
        let races = settings.races.then(|| {
            watch::turn_on();
            Rc::new(RefCell::new(Races::new()))
        });
        state.races = races.clone();
        let now = settings.virtual_clock.map_or_else(real_clock_ns, |(start, _)| start);
        Engine {
            settings,
            now: Cell::new(now),
            start: now,
            state: RefCell::new(state),
            races,
            coroutines: RefCell::new(Vec::new()),
            inbox,
            beat,
            printed_stall: Cell::new(None),
        }
    }

    pub(crate) fn is_virtual(&self) -> bool {
        self.settings.virtual_clock.is_some()
    }

    /// Returns the clock between two turns.
    pub(crate) fn clock(&self) -> u64 {
        self.now.get()
    }

    /// Returns the clock, including the switch points that the running coroutine has passed.
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
        if let Some(races) = &self.races {
            races.borrow_mut().host_waited(current(|current| current.key.get()).id);
        }
    }

    /// Hands an event of a coroutine to the detector of races, if there is one. A race ends the run.
    pub(crate) fn watch(&self, key: TaskKey, event: watch::Event, site: &'static Location<'static>) {
        let Some(races) = &self.races else { return };
        // A destructor may run while the detector drops what it no longer needs.
        let Ok(mut races) = races.try_borrow_mut() else { return };
        if let Some(race) = races.watch(key.id, event, site) {
            let mut state = self.state.borrow_mut();
            state.failure.get_or_insert(Failure::World(WorldError::Race(race)));
            state.may_be_over = true;
        }
    }

    /// Gives a window a name in reports of races.
    pub(crate) fn name_window(&self, address: u64, name: &str, element: u64) {
        if let Some(races) = &self.races {
            races.borrow_mut().name_window(address, name, element);
        }
    }

    pub(crate) fn take_log(&self) -> EventLog {
        std::mem::take(&mut self.state.borrow_mut().log)
    }

    /// Runs hosts, services and grids until all hosts and grids have ended, or something fails.
    pub(crate) fn run_world(&self) -> Result<(), Failure> {
        let _signals = SignalStack::new();
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
                Turn::Dead => break Err(self.no_progress("no coroutine can ever run again".into())),
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
        let _signals = SignalStack::new();
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
                    // No coroutine has made progress since all of them last napped: other OS threads need the CPU
                    // more.
                    let progress = self.state.borrow().progress_step;
                    idle_turns = if progress == idle_progress { idle_turns + 1 } else { 0 };
                    idle_progress = progress;
                    self.inbox.nap(at.saturating_sub(self.now.get()), idle_turns);
                }
                Turn::Dead => self.inbox.wait(),
            }
            self.beat.note_progress(self.state.borrow().activity());
            self.check_grid_limits();
        }
        self.end_everything(&Ok(()));
    }

    /// Returns the running device thread if `address` is in the page of null pointers, or the running coroutine and its
    /// stack if it is in its guard page. For a signal handler.
    pub(crate) fn fault_at(&self, address: usize) -> Option<Explained> {
        let key = current(|current| current.key.get());
        // Safety: the coroutine was interrupted on this OS thread, perhaps while a hook borrows the state to change it.
        // Hooks change neither the lists of tasks, blocks and grids nor what is read of their elements here, and
        // nothing runs after this.
        let state = unsafe { &*self.state.as_ptr() };
        let task = state.tasks.get(key.id as usize)?;
        let (actor, seed) = (state.actor(key), self.beat.seed());
        if task.guard.contains(&address) {
            return Some(Explained::Overflow { actor, bytes: task.stack_bytes, seed });
        }
        let is_null = address < 4096 && matches!(actor, Actor::Thread { .. });
        is_null.then_some(Explained::Null { actor, address, seed })
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
        let stalled = state.steps - state.progress_step;
        if stalled >= stall_steps {
            return Some(format!("{stall_steps} choices passed without progress"));
        }
        // The end may be a minute away, so the waiters are named before.
        let last = Some(state.progress_step);
        if stalled >= stall_steps / 10 && self.printed_stall.replace(last) != last {
            let (seed, report) = (self.settings.seed, state.report(None));
            eprintln!(
                "gin-virtual: {stalled} choices passed without progress, and after {stall_steps} the run ends \
                 (`SeededConfig::stall_steps`, seed {seed}){report}"
            );
        }
        (self.now.get() - self.start >= max_ns).then(|| {
            let quiet = self.now.get().saturating_sub(state.quiet.1) / 1_000_000_000;
            let quiet = if quiet == 0 { String::new() } else { format!(", the last {quiet} s of it without activity") };
            format!("the limit of {max_ns} ns of virtual time was reached{quiet}")
        })
    }

    fn turn(&self) -> Turn {
        let now = self.now.get();
        let mut state = self.state.borrow_mut();
        let state = &mut *state;
        if self.is_virtual() {
            state.quiet_ns(now);
        }
        while let Some((at, alarm)) = state.timers.due(now) {
            match alarm {
                // The task keeps the record of its wait, because it has not yet looked again. A nap that was stretched
                // and then cut short has two alarms.
                Alarm::Task(key) if state.alive(key) && state.tasks[key.id as usize].wakes == at => {
                    let task = &mut state.tasks[key.id as usize];
                    task.wakes = u64::MAX;
                    if let WaitKind::Sleep = task.wait {
                        state.events += 1;
                    }
                    state.stretched.retain(|(other, _)| *other != key);
                    state.make_ready(key, now);
                }
                Alarm::Task(_) => {}
                Alarm::Gathering { block, block_serial, warp, serial } => {
                    collective::release(state, block, block_serial, warp, serial, now);
                }
                Alarm::Bulk { block, block_serial, serial } => bulk::step(state, block, block_serial, serial, now),
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

    fn resume(&self, key: TaskKey) {
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
                current.seen.set(task.seen);
                current.device.set(matches!(task.kind, TaskKind::Thread { .. }));
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
            CoroutineResult::Yield(reason) => self.yielded(key, reason),
            CoroutineResult::Return(outcome) => self.ended(key, outcome),
        }
        self.end_doomed();
    }

    fn yielded(&self, key: TaskKey, reason: SuspendReason) {
        let now = self.now.get();
        let mut state = self.state.borrow_mut();
        let state = &mut *state;
        let task = &mut state.tasks[key.id as usize];
        (task.yielder, task.seen) = current(|current| (current.yielder.get(), current.seen.get()));
        let until = match reason {
            SuspendReason::Switch => {
                // The schedule interrupts a polling loop at its loads too.
                task.switches = task.switches.saturating_add(1);
                // Services announce their work.
                let polls = task.waits.depth > 0 || matches!(task.kind, TaskKind::Service { .. });
                if task.switches > POLL_SWITCHES && !polls {
                    task.wait = WaitKind::Ready;
                    state.activity += 1;
                }
                state.make_ready(key, now);
                return;
            }
            SuspendReason::Parked => return,
            SuspendReason::Pause(ns) => {
                task.wait = WaitKind::Pause;
                task.switches = 0;
                // A loop that no wait encloses could end unnoticed. Services announce their work.
                if task.waits.depth == 0 && matches!(task.kind, TaskKind::Thread { .. }) {
                    state.events += 1;
                }
                self.nap(state, key, ns)
            }
            SuspendReason::BlockOn(ns, what, site) => {
                task.wait = WaitKind::BlockOn { what };
                task.switches = 0;
                task.site = site;
                self.nap(state, key, ns)
            }
            SuspendReason::SleepUntil(at) => {
                task.wait = WaitKind::Sleep;
                at.max(now + 1)
            }
        };
        state.nap_until(key, until);
    }

    /// Returns the end of a nap for which a task asked for `ns`. If a virtual world is quiet, only time can end the
    /// waits of its threads, so the naps last the longer the longer it is quiet. As soon as something happens, they end
    /// as they would have. A world whose threads do not wait may have hosts that wait for other OS threads or for
    /// processes, in real time.
    fn nap(&self, state: &mut EngineState, key: TaskKey, ns: u64) -> u64 {
        let now = self.now.get();
        let until = now + state.ready.nap(ns);
        let quiet = if self.is_virtual() { state.quiet_ns(now) } else { 0 };
        let stretched = now + (quiet / STRETCH).min(MAX_NAP_NS);
        let waits = |task: &Task| task.waits.depth > 0 && matches!(task.kind, TaskKind::Thread { .. });
        if quiet < QUIET_NS || stretched <= until || !state.tasks.iter().any(waits) {
            return until;
        }
        state.stretched.push((key, until));
        stretched
    }

    /// Notes that a device thread begins a wait. Returns true if it is the outermost one.
    pub(crate) fn wait_begins(&self, key: TaskKey, timeout: Option<Fault>) -> bool {
        let mut state = self.state.borrow_mut();
        let is_outermost = state.tasks[key.id as usize].waits.begin(timeout);
        // A thread that begins a wait, or ends one, goes on.
        state.events += u64::from(is_outermost);
        is_outermost
    }

    /// Notes that a device thread ends its innermost wait.
    pub(crate) fn wait_ends(&self, key: TaskKey) {
        let mut state = self.state.borrow_mut();
        state.events += u64::from(state.tasks[key.id as usize].waits.end());
    }

    fn ended(&self, key: TaskKey, outcome: Outcome) {
        let now = self.now.get();
        let kind = {
            let mut state = self.state.borrow_mut();
            state.progress();
            state.may_be_over = true;
            state.tasks[key.id as usize].kind.clone()
        };
        match kind {
            TaskKind::Thread { block, thread } => self.thread_ended(key, block, thread, outcome),
            TaskKind::Host { rank } => {
                let mut state = self.state.borrow_mut();
                state.hosts -= 1;
                state.record(Event::HostEnd, Code::host(rank), now, 0);
                state.free_task(key);
                if let Outcome::Panic(payload) = outcome {
                    state.failure.get_or_insert(Failure::HostPanic { rank, payload });
                }
            }
            TaskKind::Service { name } => {
                let mut state = self.state.borrow_mut();
                state.services -= 1;
                let code = state.tasks[key.id as usize].code;
                state.record(Event::ServiceEnd, code, now, 0);
                state.free_task(key);
                if let Outcome::Panic(payload) = outcome {
                    let message = panic_text(&*payload);
                    state.failure.get_or_insert(Failure::World(WorldError::ServicePanicked { name, message }));
                }
            }
            TaskKind::Free => {}
        }
    }

    fn read_mail(&self) {
        for mail in self.inbox.take() {
            match mail {
                Mail::Launch(run, device) => self.add_grid(run, device),
                Mail::Host(spec) => self.add_host(spec),
                Mail::Service(spec) => self.add_service(spec),
                Mail::EndGrids(reason) => self.end_grids(&reason),
                // The watchdog may have given up waiting for it.
                Mail::Report(to) => drop(to.send(self.state.borrow().report(None))),
            }
        }
    }

    fn add_host(&self, HostSpec { rank, body }: HostSpec) {
        self.add_root(TaskKind::Host { rank }, Code::host(rank), body);
        self.state.borrow_mut().hosts += 1;
    }

    fn add_service(&self, ServiceSpec { index, name, body }: ServiceSpec) {
        self.add_root(TaskKind::Service { name }, Code::service(index), body);
        self.state.borrow_mut().services += 1;
    }

    /// Adds a coroutine that is not a device thread.
    fn add_root(&self, kind: TaskKind, code: Code, body: Box<dyn FnOnce() + Send>) {
        let mut state = self.state.borrow_mut();
        if let TaskKind::Service { name } = &kind {
            self.beat.name(code, name.clone());
        }
        let key = state.add_task(kind.clone(), code, 0, Position::ALONE);
        if let Some(mut races) = state.races() {
            match &kind {
                TaskKind::Host { rank } => races.host_begins(key.id, *rank),
                TaskKind::Service { name } => races.service_begins(key.id, name),
                TaskKind::Thread { .. } | TaskKind::Free => {}
            }
        }
        match take_stack(self.settings.host_stack_bytes) {
            Ok(stack) => {
                state.set_stack(key, &stack);
                self.put_coroutine(key, new_coroutine(stack, body));
                state.wake(key, self.now.get());
            }
            Err(cause) => {
                let error = WorldError::NoResources { actor: state.actor(key), cause: cause.to_string() };
                state.failure.get_or_insert(Failure::World(error));
                state.may_be_over = true;
            }
        }
    }

    fn put_coroutine(&self, key: TaskKey, coroutine: TaskCoroutine) {
        let mut coroutines = self.coroutines.borrow_mut();
        let at = key.id as usize;
        if coroutines.len() <= at {
            coroutines.resize_with(at + 1, || None);
        }
        coroutines[at] = Some(coroutine);
    }

    /// Unwinds a coroutine and removes it.
    fn kill(&self, key: TaskKey) {
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
            // A destructor that panics has printed its message. There is nobody else to report it to.
            if catch_unwind(AssertUnwindSafe(|| coroutine.force_unwind())).is_ok() && coroutine.done() {
                give_stack(coroutine.into_stack());
            }
        }
        self.state.borrow_mut().free_task(key);
    }

    /// Ends all remaining hosts, then grids, then services: each before its servers.
    fn end_everything(&self, outcome: &Result<(), Failure>) {
        let reason = match outcome {
            Ok(()) => "the world is over".to_owned(),
            Err(Failure::HostPanic { rank, .. }) => format!("the host of rank {rank} panicked"),
            Err(Failure::World(error)) => error.to_string().lines().next().unwrap_or_default().to_owned(),
        };
        self.kill_roots(|kind| matches!(kind, TaskKind::Host { .. }));
        self.end_grids(&reason);
        self.kill_roots(|kind| matches!(kind, TaskKind::Service { .. }));
        for mail in self.inbox.take() {
            if let Mail::Launch(run, device) = mail {
                refuse(&run, &device, &reason);
            }
        }
        let mut state = self.state.borrow_mut();
        (state.hosts, state.services) = (0, 0);
    }

    fn kill_roots(&self, which: impl Fn(&TaskKind) -> bool) {
        let count = self.state.borrow().tasks.len();
        for id in 0..count {
            let key = {
                let state = self.state.borrow();
                let task = &state.tasks[id];
                which(&task.kind).then_some(TaskKey { id: id as u32, generation: task.generation })
            };
            if let Some(key) = key {
                self.kill(key);
            }
        }
    }
}

/// Returns the text of a panic's payload.
pub(crate) fn panic_text(payload: &(dyn Any + Send)) -> String {
    let text = payload.downcast_ref::<&str>().copied();
    text.or_else(|| payload.downcast_ref::<String>().map(String::as_str)).unwrap_or("a payload that is not text").into()
}

/// Creates a coroutine that runs `body` and catches its panic.
fn new_coroutine(stack: Stack, body: impl FnOnce() + 'static) -> TaskCoroutine {
    Coroutine::with_stack(stack, move |yielder, ()| {
        current(|current| current.yielder.set(yielder));
        match catch_unwind(AssertUnwindSafe(body)) {
            Ok(()) => Outcome::Done,
            Err(payload) => Outcome::Panic(payload),
        }
    })
}

/// Marks this OS thread as running a coroutine of the engine, until dropped.
struct Entered {
    before: (*const Engine, TaskKey, bool),
}

impl Entered {
    fn new(engine: &Engine, key: TaskKey, slice: u32, dying: bool) -> Self {
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
