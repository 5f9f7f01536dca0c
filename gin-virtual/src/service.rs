// SPDX-License-Identifier: MIT OR Apache-2.0
//! Services: what runs beside the ranks and never waits, such as proxies.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crate::hooks::{self, Why, suspend};
use crate::host::{block_on, sleep_ns};

/// Longest nap of an idle service, in real nanoseconds.
const REAL_NAP_US: u64 = 50;
/// Longest nap of an idle service, in nanoseconds of the virtual clock.
const VIRTUAL_NAP_NS: u64 = 20_000;

/// What a service did in one step.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ServiceStep {
    /// Something: it is called again soon.
    Busy,
    /// Nothing: it naps, a little longer after each idle step, at most 50 us (20 us of a virtual clock).
    Idle,
    /// Nothing, and it has nothing to do for so many nanoseconds of [`clock_ns`](crate::clock_ns).
    IdleFor(u64),
    /// It is finished.
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

/// A service that was spawned. Dropping the handle does not stop it.
#[derive(Clone)]
pub struct ServiceHandle(pub(crate) Arc<ServiceState>);

impl ServiceHandle {
    /// Its name.
    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// Asks it to end before its next step. Does not wait.
    pub fn stop(&self) {
        self.0.stop();
    }

    /// Whether it has ended and its function has been dropped.
    pub fn is_finished(&self) -> bool {
        self.0.is_finished()
    }

    /// Asks it to end and waits until it has.
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

/// Marks the service as finished when its function has been dropped, however it ended.
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
        // The closure must own all of it, so that `finished` is set after the function is dropped.
        let running = &mut running;
        let Some(step) = &mut running.step else { return };
        let mut idle = 0_u32;
        while !running.state.stop.load(Ordering::Acquire) && crate::host::check_world() {
            match step() {
                ServiceStep::Busy => {
                    idle = 0;
                    busy();
                }
                ServiceStep::Idle => {
                    nap(idle);
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
        suspend(Why::Switch);
    }
}

fn nap(idle: u32) {
    if hooks::engine().is_some() {
        suspend(Why::Pause((250_u64 << idle.min(10)).min(VIRTUAL_NAP_NS)));
    } else if idle < 64 {
        std::thread::yield_now();
    } else {
        std::thread::sleep(Duration::from_micros(u64::from(idle - 63).min(REAL_NAP_US)));
    }
}
