// SPDX-License-Identifier: MIT OR Apache-2.0
//! Services, such as proxies: functions that run beside the ranks and never wait.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::hooks::{self, SuspendReason, suspend};
use crate::host::{block_on, sleep_ns};

/// A service, with its OS thread if it has one.
pub(crate) type Service = (Arc<ServiceState>, Option<JoinHandle<()>>);

/// The nap of an idle thread. With the system's delay, it looks again within 50 us on an idle machine.
const REAL_NAP: Duration = Duration::from_micros(20);
/// The time without work after which a thread naps: several times as long as a round trip through proxies, so that no
/// kernel waits for a sleeping thread while it exchanges messages.
const REAL_IDLE: Duration = Duration::from_micros(100);
/// The idle steps after which a thread yields: a yield is a system call, and takes as long as several such steps.
const REAL_STEPS: usize = 16;
/// Longest nap of an idle service, in nanoseconds of the virtual clock.
const VIRTUAL_NAP_NS: u64 = 20_000;

/// The result of one step of a service.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ServiceStep {
    /// The service did work and runs again soon.
    Busy,
    /// The service found no work. After 100 us without work it naps between steps, within 50 us; on a virtual clock
    /// at once, a little longer after each idle step, at most 20 us.
    Idle,
    /// The service found no work and sleeps for this many nanoseconds of [`clock_ns`](crate::clock_ns).
    IdleFor(u64),
    /// The service is finished.
    Stop,
}

pub(crate) struct ServiceState {
    name: Arc<str>,
    stop: AtomicBool,
    finished: AtomicBool,
}

impl ServiceState {
    pub(crate) fn new(name: Arc<str>) -> Self {
        ServiceState { name, stop: AtomicBool::new(false), finished: AtomicBool::new(false) }
    }

    pub(crate) fn stop(&self) {
        self.stop.store(true, Ordering::Release);
    }

    pub(crate) fn is_finished(&self) -> bool {
        self.finished.load(Ordering::Acquire)
    }
}

/// A spawned service. Dropping the handle does not stop it.
///
/// ```
/// use gin_virtual::{SeededConfig, ServiceStep, World, sleep_ns};
///
/// let world = World::seeded(SeededConfig::new(1));
/// let service = world.spawn_service("ticker", || ServiceStep::Idle);
/// let host = || {
///     sleep_ns(1_000);
///     service.stop_and_wait();
///     service.is_finished()
/// };
/// assert_eq!(world.run(vec![host])?, [true]);
/// # Ok::<(), gin_virtual::WorldError>(())
/// ```
#[derive(Clone)]
pub struct ServiceHandle(pub(crate) Arc<ServiceState>);

impl ServiceHandle {
    /// Returns the service's name.
    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// Asks the service to end before its next step. Does not wait.
    pub fn stop(&self) {
        self.0.stop();
    }

    /// Returns true if the service has ended and its function has been dropped.
    pub fn is_finished(&self) -> bool {
        self.0.is_finished()
    }

    /// Asks the service to end and waits until it has.
    #[track_caller]
    pub fn stop_and_wait(&self) {
        self.stop();
        block_on(|| self.is_finished());
    }
}

impl std::fmt::Debug for ServiceHandle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ServiceHandle").field("name", &self.name()).field("finished", &self.is_finished()).finish()
    }
}

/// Marks the service as finished once its function has been dropped, whatever ended it.
struct Running<F> {
    step: Option<F>,
    state: Arc<ServiceState>,
}

impl<F> Drop for Running<F> {
    fn drop(&mut self) {
        drop(self.step.take());
        self.state.finished.store(true, Ordering::Release);
    }
}

pub(crate) fn service_body<F>(state: Arc<ServiceState>, step: F) -> Box<dyn FnOnce() + Send>
where
    F: FnMut() -> ServiceStep + Send + 'static,
{
    let mut running = Running { step: Some(step), state };
    Box::new(move || {
        // The closure must own all of `running`, so that `finished` is set after the function is dropped.
        let running = &mut running;
        let Some(step) = &mut running.step else { return };
        let (mut idle, mut pace) = (0_u32, Pace::default());
        while !running.state.stop.load(Ordering::Acquire) && crate::host::check_world() {
            match step() {
                ServiceStep::Busy => {
                    idle = 0;
                    pace.worked();
                    busy();
                }
                ServiceStep::Idle => {
                    match hooks::engine() {
                        Some(_) => nap(idle),
                        None => pace.idle(1),
                    }
                    idle = idle.saturating_add(1);
                }
                ServiceStep::IdleFor(ns) => sleep_ns(ns),
                ServiceStep::Stop => break,
            }
        }
    })
}

fn busy() {
    if let Some(engine) = hooks::engine() {
        engine.note_progress();
        suspend(SuspendReason::Switch);
    }
}

/// Gives up the CPU of a virtual world.
fn nap(idle: u32) {
    suspend(SuspendReason::Pause((250_u64 << idle.min(10)).min(VIRTUAL_NAP_NS)));
}

/// The pace of an OS thread that looks for work: without work it spins, then yields, then naps.
///
/// ```
/// let mut pace = gin_virtual::Pace::default();
/// let mut looks = 0;
/// while looks < 100 {
///     looks += 1;
///     if looks == 40 { pace.worked() } else { pace.idle(1) }
/// }
/// ```
#[derive(Clone, Copy, Debug, Default)]
pub struct Pace {
    /// The idle steps since the last yield.
    steps: usize,
    /// The time of the first yield without work since.
    idle_since: Option<Instant>,
}

impl Pace {
    /// Notes that there was work.
    pub fn worked(&mut self) {
        *self = Self::default();
    }

    /// Pauses after `steps` steps that found no work.
    pub fn idle(&mut self, steps: usize) {
        if self.steps < REAL_STEPS {
            self.steps += steps.max(1);
            std::hint::spin_loop();
        } else if self.idle_since.get_or_insert_with(Instant::now).elapsed() < REAL_IDLE {
            self.steps = 0;
            std::thread::yield_now();
        } else {
            std::thread::sleep(REAL_NAP);
        }
    }
}
