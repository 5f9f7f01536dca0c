// SPDX-License-Identifier: MIT OR Apache-2.0
//! The executor's functions, and the thread-local words through which they find the coroutine that runs.

use std::cell::{Cell, RefCell};
use std::panic::{Location, PanicHookInfo};
use std::sync::Once;

use corosensei::Yielder;
use gin_device::exec::{self, BarrierCall, ExchangeCall, Executor, Position, Reduction, SharedKey};

use crate::engine::{Engine, Key};
use crate::host::real_clock_ns;
use crate::shared::Pieces;

/// Why a coroutine gives up the processor.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Why {
    /// It could go on.
    Switch,
    /// It polls; it wants to be woken after so many nanoseconds.
    Pause(u64),
    /// It waits for a condition, and wants to look again after so many nanoseconds.
    BlockOn(u64, &'static Location<'static>),
    /// It sleeps until the clock shows this.
    SleepUntil(u64),
    /// Somebody else will wake it, and knows that already.
    Parked,
}

/// How a device thread trapped; the payload of its unwinding.
pub(crate) struct TrapPayload(pub(crate) String);

/// What the hooks of this OS thread need; filled in whenever a coroutine is resumed.
pub(crate) struct Current {
    /// Switch points that the coroutine may still pass.
    pub(crate) budget: Cell<u32>,
    /// The budget that it began with.
    pub(crate) slice: Cell<u32>,
    /// The engine while a coroutine runs, else null.
    pub(crate) engine: Cell<*const Engine>,
    pub(crate) yielder: Cell<*const Yielder<(), Why>>,
    pub(crate) key: Cell<Key>,
    /// Whether the coroutine is a device thread.
    pub(crate) device: Cell<bool>,
    /// Whether the coroutine is being unwound from outside.
    pub(crate) dying: Cell<bool>,
    pub(crate) position: Cell<Position>,
}

thread_local! {
    static CURRENT: Current = const {
        Current {
            budget: Cell::new(0),
            slice: Cell::new(0),
            engine: Cell::new(std::ptr::null()),
            yielder: Cell::new(std::ptr::null()),
            key: Cell::new(Key::NONE),
            device: Cell::new(false),
            dying: Cell::new(false),
            position: Cell::new(Position::ALONE),
        }
    };
    /// Shared memory of an OS thread that is no coroutine.
    static ALONE: RefCell<Pieces> = RefCell::new(Pieces::default());
    /// Message of the last panic in a device thread of this OS thread.
    static PANIC: RefCell<Option<String>> = const { RefCell::new(None) };
}

/// A coroutine never leaves the OS thread that its engine runs on, so the reference stays right across a switch.
#[inline(always)]
pub(crate) fn current<R>(use_it: impl FnOnce(&Current) -> R) -> R {
    CURRENT.with(use_it)
}

/// The engine whose coroutine calls, if one does.
#[inline]
pub(crate) fn engine() -> Option<&'static Engine> {
    // Safety: the pointer is set only while the engine resumes a coroutine, which is the caller, and the engine
    // outlives that. The lifetime is not handed outside of the hooks.
    unsafe { current(|current| current.engine.get()).as_ref() }
}

/// Gives up the processor. Returns false at once, without a switch, in a destructor that runs because the coroutine
/// is being unwound: nothing can be waited for then.
pub(crate) fn suspend(why: Why) -> bool {
    let (yielder, dying) = current(|current| (current.yielder.get(), current.dying.get()));
    if dying && std::thread::panicking() {
        return false;
    }
    // Safety: the yielder lives on the stack of the running coroutine, which is the caller. If the coroutine is dying
    // but not unwinding, it has swallowed the unwinding, and suspending begins it anew.
    unsafe { (*yielder).suspend(why) };
    true
}

#[cold]
#[inline(never)]
fn switch_slow() {
    if engine().is_some() {
        suspend(Why::Switch);
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
        suspend(if ns == 0 { Why::Switch } else { Why::Pause(u64::from(ns)) });
    } else if ns < 200 {
        std::hint::spin_loop();
    } else {
        // Whoever is waited for may need this processor.
        std::thread::yield_now();
    }
}

pub(crate) fn clock_ns() -> u64 {
    match engine() {
        // A loop that only looks at the clock must not keep it from going on.
        Some(engine) => {
            switch_point();
            engine.now()
        }
        None => real_clock_ns(),
    }
}

fn cycles() -> u64 {
    clock_ns().wrapping_mul(2)
}

/// The engine, if the caller is a device thread.
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

fn shared(key: SharedKey) -> *mut u8 {
    match device() {
        Some(engine) => engine.shared(current(|current| current.key.get()), key),
        None => match ALONE.with_borrow_mut(|pieces| pieces.get(key)) {
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

fn trap(text: &'static str) -> ! {
    match device() {
        Some(_) => trap_with(text.into()),
        None => panic!("{text}"),
    }
}

pub(crate) fn trap_with(message: String) -> ! {
    std::panic::resume_unwind(Box::new(TrapPayload(message)))
}

static EXECUTOR: Executor = Executor {
    switch_point,
    pause,
    clock_ns,
    cycles,
    position,
    barrier,
    exchange,
    active_mask,
    shared,
    dynamic_shared,
    trap,
};

/// The functions that `gin-device` calls once a world was made, for code that wants to call them itself.
///
/// Called outside of a coroutine they behave as if there were no executor: a block of one thread, the real clock.
pub fn executor() -> &'static Executor {
    &EXECUTOR
}

/// Makes the virtual GPU the executor of this process, as every world does when it is made.
///
/// # Panics
/// If another executor was installed before.
pub fn install() {
    static ONCE: Once = Once::new();
    assert!(exec::install(&EXECUTOR), "another executor is installed in this process");
    ONCE.call_once(|| {
        let previous = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            // The panic of a device thread becomes the error of its grid, and its stack is small for printing.
            if device().is_some() {
                PANIC.set(Some(describe(info)));
            } else {
                previous(info);
            }
        }));
    });
}

fn describe(info: &PanicHookInfo<'_>) -> String {
    let text = info.payload_as_str().unwrap_or("a payload that is no text");
    match info.location() {
        Some(place) => format!("{text}, at {place}"),
        None => text.into(),
    }
}

pub(crate) fn take_panic_message() -> Option<String> {
    PANIC.take()
}
