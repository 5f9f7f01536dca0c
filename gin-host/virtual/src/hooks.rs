// SPDX-License-Identifier: MIT OR Apache-2.0
//! The executor's functions, and the thread-local words that lead them to the running coroutine.

use std::cell::{Cell, RefCell};
use std::panic::{Location, PanicHookInfo};
use std::sync::Once;

use corosensei::Yielder;
use gin_abi::Fault;
use gin_device::exec::{
    self, BarrierCall, BulkCall, ExchangeCall, Executor, Position, ProductCall, Reduction, SharedKey, watch,
};

use rustix::time::{ClockId, clock_gettime};

use crate::engine::{Engine, TaskKey};
use crate::shared::SharedSegments;

/// The reason why a coroutine gives up the CPU.
#[derive(Clone, Copy, Debug)]
pub(crate) enum SuspendReason {
    /// It could continue.
    Switch,
    /// It polls, and continues after this many nanoseconds.
    Pause(u64),
    /// It waits for a condition, and evaluates it again after this many nanoseconds.
    BlockOn(u64, &'static str, Option<&'static Location<'static>>),
    /// It sleeps until the clock shows this time.
    SleepUntil(u64),
    /// Another coroutine or a timer wakes it, and is registered to do so.
    Parked,
}

/// Text of a device thread's trap, the payload of its unwinding.
pub(crate) struct TrapPayload(pub(crate) String);

/// State that the hooks of this OS thread need; set whenever a coroutine is resumed.
pub(crate) struct Current {
    /// Switch points that the coroutine may still pass.
    pub(crate) budget: Cell<u32>,
    /// The budget at the start of the turn.
    pub(crate) slice: Cell<u32>,
    /// The engine while a coroutine runs, else null.
    pub(crate) engine: Cell<*const Engine>,
    pub(crate) yielder: Cell<*const Yielder<(), SuspendReason>>,
    pub(crate) key: Cell<TaskKey>,
    /// True if the coroutine is a device thread.
    pub(crate) device: Cell<bool>,
    /// True while the engine unwinds the coroutine.
    pub(crate) dying: Cell<bool>,
    pub(crate) position: Cell<Position>,
    /// The value that the device thread has seen last in its outermost wait.
    pub(crate) seen: Cell<Option<u64>>,
}

thread_local! {
    static CURRENT: Current = const {
        Current {
            budget: Cell::new(0),
            slice: Cell::new(0),
            engine: Cell::new(std::ptr::null()),
            yielder: Cell::new(std::ptr::null()),
            key: Cell::new(TaskKey::NONE),
            device: Cell::new(false),
            dying: Cell::new(false),
            position: Cell::new(Position::ALONE),
            seen: Cell::new(None),
        }
    };
    /// Shared memory of an OS thread that is not a coroutine.
    static ALONE: RefCell<SharedSegments> = RefCell::new(SharedSegments::default());
    /// Message of the last panic in a device thread of this OS thread.
    static PANIC: RefCell<Option<String>> = const { RefCell::new(None) };
}

/// Calls `use_it` with the state of this OS thread. A coroutine never leaves the OS thread of its engine, so the
/// reference stays valid across a switch.
#[inline(always)]
pub(crate) fn current<R>(use_it: impl FnOnce(&Current) -> R) -> R {
    CURRENT.with(use_it)
}

/// Returns the engine if the caller is one of its coroutines.
#[inline]
pub(crate) fn engine() -> Option<&'static Engine> {
    // Safety: the pointer is set only while the engine resumes a coroutine, which is the caller, and the engine
    // outlives that. The lifetime does not leave the hooks.
    unsafe { current(|current| current.engine.get()).as_ref() }
}

/// Gives up the CPU. Returns false at once, without a switch, in a destructor that runs because the coroutine is
/// being unwound: it cannot wait then.
pub(crate) fn suspend(reason: SuspendReason) -> bool {
    let (yielder, dying) = current(|current| (current.yielder.get(), current.dying.get()));
    if dying && std::thread::panicking() {
        return false;
    }
    // Safety: the yielder is on the stack of the running coroutine, which is the caller. If the coroutine is dying but
    // not unwinding, it has swallowed the unwinding, and suspending starts it again.
    unsafe { (*yielder).suspend(reason) };
    true
}

#[cold]
#[inline(never)]
fn switch_slow() {
    if engine().is_some() {
        suspend(SuspendReason::Switch);
    }
}

pub(crate) fn switch_point() {
    let left = current(|current| {
        let left = current.budget.get();
        current.budget.set(left.saturating_sub(1));
        left
    });
    if left == 0 {
        switch_slow();
    }
}

fn pause(ns: u32) {
    if engine().is_some() {
        suspend(if ns == 0 { SuspendReason::Switch } else { SuspendReason::Pause(u64::from(ns)) });
    } else if ns < 200 {
        std::hint::spin_loop();
    } else {
        // The awaited thread may need this CPU.
        std::thread::yield_now();
    }
}

/// Returns the engine and the calling device thread, unless the engine unwinds it.
fn living() -> Option<(&'static Engine, TaskKey)> {
    let (key, dying) = current(|current| (current.key.get(), current.dying.get()));
    device().filter(|_| !dying).map(|engine| (engine, key))
}

fn wait_begins(timeout: Option<Fault>) {
    if let Some((engine, key)) = living()
        && engine.wait_begins(key, timeout)
    {
        current(|current| current.seen.set(None));
    }
}

fn wait_ends() {
    if let Some((engine, key)) = living() {
        engine.wait_ends(key);
    }
}

/// Notes the value that the running coroutine has seen. It only stores, because every poll calls it.
fn sees(value: u64) {
    current(|current| current.seen.set(Some(value)));
}

pub(crate) fn clock_ns() -> u64 {
    match engine() {
        // A loop that only reads the clock must not stop it.
        Some(engine) => {
            switch_point();
            engine.now()
        }
        None => real_clock_ns(),
    }
}

/// Returns the same nanoseconds as [`clock_ns`](crate::clock_ns), without giving other coroutines a turn: a trace that
/// reads the clock leaves the schedule as it is. A loop must not wait by it.
///
/// ```
/// let start = gin_virtual::clock_ns();
/// assert!(gin_virtual::peek_clock_ns() >= start);
/// ```
pub fn peek_clock_ns() -> u64 {
    engine().map_or_else(real_clock_ns, |engine| engine.now())
}

/// Returns the nanoseconds of `CLOCK_MONOTONIC`, so that code which knows no virtual GPU reads the same clock.
pub(crate) fn real_clock_ns() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    // 2^64 ns are 584 years.
    (now.tv_sec as u64).wrapping_mul(1_000_000_000).wrapping_add(now.tv_nsec as u64)
}

fn cycles() -> u64 {
    clock_ns().wrapping_mul(2)
}

/// Returns the engine if the caller is a device thread.
fn device() -> Option<&'static Engine> {
    if current(|current| current.device.get()) { engine() } else { None }
}

fn position() -> Position {
    current(|current| current.position.get())
}

fn barrier(call: BarrierCall) -> u32 {
    match device() {
        Some(engine) => engine.barrier(current(|current| current.key.get()), call),
        None => match call.reduction {
            Reduction::None => 0,
            Reduction::Or | Reduction::And | Reduction::Count => u32::from(call.predicate),
        },
    }
}

fn exchange(call: ExchangeCall, out: &mut [u64; 32]) {
    match device() {
        Some(engine) => engine.exchange(current(|current| current.key.get()), call, out),
        None => out[0] = call.value,
    }
}

fn active_mask(site: &'static Location<'static>) -> u32 {
    device().map_or(1, |engine| engine.active_mask(current(|current| current.key.get()), site))
}

fn note_place(site: &'static Location<'static>) {
    if let Some(engine) = device() {
        engine.note_place(current(|current| current.key.get()), site);
    }
}

fn shared(key: SharedKey) -> *mut u8 {
    match device() {
        Some(engine) => engine.shared(current(|current| current.key.get()), key),
        None => match ALONE.with_borrow_mut(|segments| segments.get(key)) {
            Ok(pointer) => pointer,
            Err(message) => panic!("{message}"),
        },
    }
}

fn dynamic_shared() -> (*mut u8, usize) {
    match device() {
        Some(engine) => engine.dynamic_shared(current(|current| current.key.get())),
        None => (std::ptr::NonNull::<u128>::dangling().as_ptr().cast(), 0),
    }
}

fn wait_for_predecessor(site: &'static Location<'static>) {
    if let Some(engine) = device() {
        engine.wait_for_predecessor(current(|current| current.key.get()), site);
    }
}

fn let_dependents_start() {
    if let Some(engine) = device() {
        engine.let_dependents_start(current(|current| current.key.get()));
    }
}

fn bulk(step: BulkCall, site: &'static Location<'static>) {
    match device() {
        Some(engine) => engine.bulk(current(|current| current.key.get()), step, site),
        None => gin_device::sys::bulk::carry_out(step),
    }
}

fn product(call: ProductCall, sums: &mut [f32], site: &'static Location<'static>) {
    match device() {
        Some(engine) => engine.product(current(|current| current.key.get()), call, sums, site),
        None => panic!("a product of a warpgroup needs a thread of a kernel"),
    }
}

fn trap(text: &'static str) -> ! {
    match device() {
        Some(_) => trap_with(text.into()),
        None => panic!("{text}"),
    }
}

fn watch(event: watch::Event, site: &'static Location<'static>) {
    // Coroutines that are being ended skip waits, so their accesses are in no order.
    let (key, dying) = current(|current| (current.key.get(), current.dying.get()));
    if let Some(engine) = engine()
        && (!dying || matches!(event, watch::Event::Forget { .. }))
    {
        engine.watch(key, event, site);
    }
}

pub(crate) fn trap_with(message: String) -> ! {
    std::panic::resume_unwind(Box::new(TrapPayload(message)))
}

static EXECUTOR: Executor = Executor {
    switch_point,
    pause,
    wait_begins,
    wait_ends,
    sees,
    clock_ns,
    peek_clock_ns,
    cycles,
    position,
    barrier,
    exchange,
    active_mask,
    note_place,
    shared,
    dynamic_shared,
    wait_for_predecessor,
    let_dependents_start,
    bulk,
    product,
    trap,
    watch,
};

/// Returns the functions that `gin-device` calls once a world exists, for code that calls them directly.
///
/// Called outside of a coroutine they behave as without an executor: a block of one thread, the real clock.
pub fn executor() -> &'static Executor {
    &EXECUTOR
}

/// Makes the virtual GPU the executor of this process. Creating a world does so too.
///
/// # Panics
/// Panics if another executor was installed before.
pub fn install() {
    static ONCE: Once = Once::new();
    assert!(exec::install(&EXECUTOR), "another executor is installed in this process");
    ONCE.call_once(|| {
        let previous = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            // The panic of a device thread becomes the error of its grid. Its stack is too small for printing.
            if device().is_some() {
                PANIC.set(Some(describe(info)));
            } else {
                previous(info);
            }
        }));
    });
}

fn describe(info: &PanicHookInfo<'_>) -> String {
    let text = info.payload_as_str().unwrap_or("a payload that is not text");
    match info.location() {
        Some(place) => format!("{text}, at {place}"),
        None => text.into(),
    }
}

pub(crate) fn take_panic_message() -> Option<String> {
    PANIC.take()
}
