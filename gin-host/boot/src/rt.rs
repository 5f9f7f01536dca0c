// SPDX-License-Identifier: MIT OR Apache-2.0
//! Waits and time, for ranks that are threads and for ranks that are coroutines of a virtual world.
//!
//! This crate does not depend on the virtual GPU. The crate that has one installs a [`VirtualWorld`] when it makes the
//! first virtual device. A thread outside a virtual world waits in real time, before and after that.

use rustix::time::{ClockId, clock_gettime};
use std::cell::RefCell;
use std::panic::Location;
use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;

/// The aim of a wait, for reports of waiters.
#[derive(Clone, Copy, Debug)]
pub enum Waited {
    /// A condition of the code at this place.
    At(&'static Location<'static>),
    /// The words behind "waiting for".
    For(&'static str),
}

/// The functions by which threads of a virtual world wait and read the time.
#[derive(Clone, Copy, Debug)]
pub struct VirtualWorld {
    /// Returns whether the caller is a coroutine or a thread of a virtual world.
    pub is_inside: fn() -> bool,
    /// Waits until the condition holds, while other threads of the world run. Reports name what the caller waits for.
    pub block_on: fn(Waited, &mut dyn FnMut() -> bool),
    /// Returns the time in nanoseconds: virtual in a seeded world, else that of `CLOCK_MONOTONIC`.
    pub clock_ns: fn() -> u64,
}

static VIRTUAL: OnceLock<VirtualWorld> = OnceLock::new();

/// The longest sleep of a plain thread between two looks at a condition, in nanoseconds. A thread without work of
/// [`do_meanwhile`] begins with the first number. After 50 ms it sleeps for a thousandth of the time that it has
/// waited, at most for the second number.
const NAP_LIMIT_NS: (u64, u64) = (50_000, 2_000_000);

/// Work of which a waiting thread does what is ready.
pub trait Meanwhile: Send + Sync {
    /// Does the work that is ready. Returns whether there was any. Never waits.
    fn step(&self) -> bool;
}

thread_local! {
    /// The work that this thread does while it waits.
    static MEANWHILE: RefCell<Vec<Weak<dyn Meanwhile>>> = const { RefCell::new(Vec::new()) };
}

/// Makes the calling thread do this work in all its waits here, until the work is dropped. Adds no work twice.
pub fn do_meanwhile(work: Weak<dyn Meanwhile>) {
    // A thread that ends waits without the work.
    let _ = MEANWHILE.try_with(|all| {
        let mut all = all.borrow_mut();
        all.retain(|known| known.strong_count() > 0);
        if !all.iter().any(|known| known.ptr_eq(&work)) {
            all.push(work);
        }
    });
}

/// Does the work that is ready. Returns whether there was any; `None` if this thread has no work.
fn meanwhile() -> Option<bool> {
    // The work may add some, so nothing is borrowed while it is done.
    let all: Vec<Arc<dyn Meanwhile>> =
        MEANWHILE.try_with(|all| all.borrow().iter().filter_map(Weak::upgrade).collect()).unwrap_or_default();
    if all.is_empty() { None } else { Some(all.iter().filter(|work| work.step()).count() > 0) }
}

/// Makes threads of virtual worlds wait by these functions. Only the first call has an effect.
pub fn install(world: VirtualWorld) {
    let _ = VIRTUAL.set(world);
}

fn inside() -> Option<&'static VirtualWorld> {
    VIRTUAL.get().filter(|world| (world.is_inside)())
}

/// Waits until `condition` holds.
///
/// In a virtual world other threads of the world run meanwhile. A plain thread spins, then yields, then sleeps. Both do
/// the work of [`do_meanwhile`].
///
/// Returns before `condition` holds only in a destructor, while a world ends. The caller holds no lock that `condition`
/// or another rank needs.
///
/// ```
/// let start = gin_boot::rt::clock_ns();
/// gin_boot::rt::wait_until(|| gin_boot::rt::clock_ns() > start + 1000);
/// assert!(gin_boot::rt::clock_ns() > start + 1000);
/// ```
#[track_caller]
pub fn wait_until(condition: impl FnMut() -> bool) {
    wait(Waited::At(Location::caller()), condition);
}

/// Does the same for code of gin that programs call: a report of waiters says "waiting for" and `what`, in place of a
/// line of gin.
pub fn wait_until_named(what: &'static str, condition: impl FnMut() -> bool) {
    wait(Waited::For(what), condition);
}

fn wait(waited: Waited, mut condition: impl FnMut() -> bool) {
    if let Some(world) = inside() {
        return (world.block_on)(waited, &mut || condition() || (meanwhile() == Some(true) && condition()));
    }
    let mut turns = 0_u32;
    let mut begun = None;
    while !condition() {
        let work = meanwhile();
        if work == Some(true) {
            (turns, begun) = (0, None);
            continue;
        }
        match turns {
            0..16 => std::hint::spin_loop(),
            16..64 => std::thread::yield_now(),
            _ => {
                let now = clock_ns();
                let waited = now.saturating_sub(*begun.get_or_insert(now));
                let longest = if work.is_none() { NAP_LIMIT_NS.1 } else { NAP_LIMIT_NS.0 };
                let limit = (waited / 1000).clamp(NAP_LIMIT_NS.0, longest);
                std::thread::sleep(Duration::from_nanos((1_000_u64 << (turns - 64).min(11)).min(limit)));
            }
        }
        turns = turns.saturating_add(1);
    }
}

/// Waits until `look` finds something, as [`wait_until_named`] waits. Returns `None` only in a destructor, while a
/// world ends.
pub fn wait_for<T>(what: &'static str, mut look: impl FnMut() -> Option<T>) -> Option<T> {
    let mut found = None;
    wait_until_named(what, || {
        found = look();
        found.is_some()
    });
    found
}

/// Returns the time in nanoseconds on the clock of deadlines: virtual in a seeded world, else `CLOCK_MONOTONIC`.
pub fn clock_ns() -> u64 {
    match inside() {
        Some(world) => (world.clock_ns)(),
        None => {
            let now = clock_gettime(ClockId::Monotonic);
            // 2^64 ns are 584 years, and the clock is 0 when the system starts.
            (now.tv_sec as u64).wrapping_mul(1_000_000_000).wrapping_add(now.tv_nsec as u64)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicU64, Ordering};

    #[test]
    fn a_plain_thread_waits_in_real_time() {
        let before = clock_ns();
        let start = std::time::Instant::now();
        wait_until(|| start.elapsed() >= Duration::from_millis(3));
        assert!(clock_ns() - before >= 3_000_000);
    }

    #[test]
    fn a_long_wait_looks_rarely() {
        let (begun, mut looks) = (std::time::Instant::now(), 0);
        wait_until(|| {
            looks += 1;
            begun.elapsed() >= Duration::from_secs(2)
        });
        // With naps of 50 us it would be more than 10,000. A busy machine looks less often.
        assert!(looks < 7_000, "{looks} looks in 2 s");
    }

    #[test]
    fn a_thread_does_its_work_while_it_waits_until_that_is_dropped() {
        struct Count(AtomicU64);
        impl Meanwhile for Count {
            fn step(&self) -> bool {
                self.0.fetch_add(1, Ordering::Relaxed) < 100
            }
        }
        let work = Arc::new(Count(AtomicU64::new(0)));
        for _ in 0..2 {
            do_meanwhile(Arc::downgrade(&work) as Weak<dyn Meanwhile>);
        }
        assert_eq!(MEANWHILE.with_borrow(Vec::len), 1);
        // Other threads do not do it.
        std::thread::scope(|scope| {
            scope.spawn(|| wait_until(|| work.0.load(Ordering::Relaxed) >= 100));
            wait_until(|| work.0.load(Ordering::Relaxed) >= 100);
        });
        drop(work);
        assert_eq!(meanwhile(), None);
    }
}
