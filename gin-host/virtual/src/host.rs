// SPDX-License-Identifier: MIT OR Apache-2.0
//! Waiting and time for host code. The functions work in a coroutine of a world and on a plain OS thread.

use std::cell::RefCell;
use std::panic::Location;
use std::sync::Arc;
use std::time::Duration;

use crate::actor::Actor;
use crate::end::WorldEnd;
use crate::error::{WaitKind, Waiter};
use crate::hooks::{SuspendReason, engine, suspend, switch_point};

/// Longest nap between two looks at a condition, in nanoseconds of the virtual clock.
const VIRTUAL_NAP_NS: u64 = 10_000;
/// Longest nap between two looks at a condition on an OS thread, in real nanoseconds.
const REAL_NAP_NS: u64 = 50_000;

/// Number of looks at a condition without a nap.
const LONG_TURNS: u32 = 64;

thread_local! {
    /// The world that this OS thread works for, in the threads mode.
    static WORLD: RefCell<Option<(Arc<WorldEnd>, Actor)>> = const { RefCell::new(None) };
}

/// Payload that unwinds an OS thread whose world has ended.
pub(crate) struct WorldOver;

/// Makes this OS thread work for a world, as `actor`.
pub(crate) fn work_for(world: Arc<WorldEnd>, actor: Actor) {
    WORLD.set(Some((world, actor)));
}

/// Calls `use_it` with the world that this OS thread works for, if it does. A thread that has destroyed its
/// thread-local values works for none. It may still destroy static objects of a C++ program.
fn world<T>(use_it: impl FnOnce(&(Arc<WorldEnd>, Actor)) -> T) -> Option<T> {
    WORLD.try_with(|world| world.borrow().as_ref().map(use_it)).ok().flatten()
}

/// A wait of this OS thread that its world's reports name, until dropped.
struct LongWait(Arc<WorldEnd>, Actor);

impl LongWait {
    fn begin(what: &'static str, site: Option<&'static Location<'static>>) -> Option<Self> {
        let (world, actor) = world(Clone::clone)?;
        world.wait_begins(Waiter { actor: actor.clone(), wait: WaitKind::BlockOn { what }, site });
        Some(LongWait(world, actor))
    }
}

impl Drop for LongWait {
    fn drop(&mut self) {
        self.0.wait_ends(&self.1);
    }
}

/// Unwinds this OS thread if its world has ended. Returns false if the world has ended but the thread already unwinds.
pub(crate) fn check_world() -> bool {
    // The engine ends coroutines.
    if engine().is_some() || !world(|(world, _)| world.is_ended()).unwrap_or(false) {
        return true;
    }
    if std::thread::panicking() {
        return false;
    }
    std::panic::resume_unwind(Box::new(WorldOver))
}

/// Waits until `condition` holds.
///
/// In a coroutine of a world, other coroutines run meanwhile. A plain OS thread spins, then naps. The condition is
/// evaluated repeatedly, so it should be cheap. The caller may hold no lock across the call: in a seeded world the
/// coroutine that needs it runs on the same OS thread.
///
/// Returns true when the condition held. If the world ends first, the call does not return but unwinds the caller.
/// Called in a destructor during that unwinding, it returns false at once.
#[track_caller]
pub fn block_on(condition: impl FnMut() -> bool) -> bool {
    block_on_at(Location::caller(), condition)
}

/// Waits as [`block_on`] does. Reports name `site` as the place of the wait.
pub fn block_on_at(site: &'static Location<'static>, condition: impl FnMut() -> bool) -> bool {
    wait("a condition", Some(site), condition)
}

/// Waits as [`block_on`] does. Reports of waiters say "waiting for", and `what`, in place of the line of the call,
/// which is none of the program's.
pub fn block_on_for(what: &'static str, condition: impl FnMut() -> bool) -> bool {
    wait(what, None, condition)
}

fn wait(what: &'static str, site: Option<&'static Location<'static>>, mut condition: impl FnMut() -> bool) -> bool {
    let mut turns = 0_u32;
    // Dropped when the wait ends, also by unwinding.
    let mut _long = None;
    loop {
        if condition() {
            if let Some(engine) = engine() {
                engine.note_progress();
            }
            return true;
        }
        if engine().is_some() {
            let nap = (200_u64 << turns.min(10)).min(VIRTUAL_NAP_NS);
            if !suspend(SuspendReason::BlockOn(nap, what, site)) {
                return false;
            }
        } else {
            if !check_world() {
                return false;
            }
            if turns == LONG_TURNS {
                _long = LongWait::begin(what, site);
            }
            match turns {
                0..16 => std::hint::spin_loop(),
                16..LONG_TURNS => std::thread::yield_now(),
                _ => std::thread::sleep(Duration::from_nanos(
                    (1_000_u64 << (turns - LONG_TURNS).min(10)).min(REAL_NAP_NS),
                )),
            }
        }
        turns = turns.saturating_add(1);
    }
}

/// Returns the nanoseconds on the clock that deadlines use: virtual in a coroutine of a seeded world, else real.
///
/// Its zero is arbitrary. Neither clock goes back.
///
/// ```
/// use gin_virtual::{SeededConfig, World, clock_ns, sleep_ns};
///
/// let host = || {
///     let start = clock_ns();
///     sleep_ns(3_600_000_000); // an hour takes no real time
///     clock_ns() - start >= 3_600_000_000
/// };
/// assert_eq!(World::seeded(SeededConfig::new(1)).run(vec![host])?, [true]);
/// # Ok::<(), gin_virtual::WorldError>(())
/// ```
pub fn clock_ns() -> u64 {
    crate::hooks::clock_ns()
}

/// Returns true if the caller is a coroutine of a world, or an OS thread that works for one.
pub fn in_world() -> bool {
    engine().is_some() || world(|_| ()).is_some()
}

/// Gives the window that begins at `address` in a seeded world a name for reports of data races. `element` is the size
/// of an element in bytes. Elsewhere it does nothing.
pub fn name_window(address: u64, name: &str, element: u64) {
    if let Some(engine) = engine() {
        engine.name_window(address, name, element);
    }
}

/// Sleeps for this many nanoseconds of [`clock_ns`]. Returns early in a destructor during the unwinding of a world.
pub fn sleep_ns(ns: u64) {
    match engine() {
        Some(engine) => {
            suspend(SuspendReason::SleepUntil(engine.now().saturating_add(ns)));
        }
        None => {
            check_world();
            std::thread::sleep(Duration::from_nanos(ns));
        }
    }
}

/// Lets other coroutines or OS threads run: a switch point that is always taken.
pub fn yield_now() {
    if engine().is_some() {
        suspend(SuspendReason::Switch);
    } else {
        std::thread::yield_now();
    }
}

/// Marks a place where a seeded world may switch, for host code whose races should be explored.
pub fn maybe_switch() {
    switch_point();
}

/// Returns true if the caller is a coroutine of a seeded world, and so shares its OS thread with the whole world.
pub fn is_simulated() -> bool {
    engine().is_some_and(|engine| engine.is_virtual())
}
