// SPDX-License-Identifier: MIT OR Apache-2.0
//! The threads mode: ranks, services and devices as OS threads, in real time.

use std::any::Any;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex};
use std::thread::{Builder, JoinHandle, Scope};

use crate::actor::Actor;
use crate::config::{LogMode, ThreadsConfig};
use crate::end::WorldEnd;
use crate::engine::{Engine, Failure, Settings, panic_text};
use crate::error::WorldError;
use crate::host::{WorldOver, work_for};
use crate::inbox::{DeviceCore, Mail};
use crate::lock::lock;
use crate::log::EventLog;
use crate::refusal::explain_refusal;
use crate::service::Service;
use crate::watchdog::Heartbeat;

/// Size in bytes of the stack of a device's OS thread, on which no kernel runs.
pub(crate) const DEVICE_STACK: usize = 2 << 20;

/// Starts the OS thread that runs the grids of a device.
pub(crate) fn start_device(
    device: &Arc<DeviceCore>,
    config: &ThreadsConfig,
    world: &Arc<WorldEnd>,
) -> io::Result<JoinHandle<()>> {
    let settings = Settings {
        seed: config.seed ^ u64::from(device.index) << 32,
        schedule: config.schedule,
        quantum: Some(config.quantum.max(1) - 1),
        virtual_clock: None,
        log: EventLog::default(),
        log_mode: LogMode::Off,
        max_steps: u64::MAX,
        stall_steps: u64::MAX,
        max_ns: u64::MAX,
        grid_limit_ns: config.grid_limit.map(|limit| u64::try_from(limit.as_nanos()).unwrap_or(u64::MAX)),
        host_stack_bytes: config.host_stack_bytes,
        races: false,
    };
    let inbox = device.inbox.clone();
    let beat = Heartbeat::new(config.watchdog, config.stall_report, config.seed, world, &inbox);
    Builder::new()
        .name(format!("virtual GPU {}", device.index))
        .stack_size(DEVICE_STACK)
        // The engine is created on the thread that it runs on, because its coroutines cannot move.
        .spawn(move || Engine::new(settings, inbox, beat).serve())
}

/// Returns the failure that an OS thread's panic means for its world; none if the world itself ended the thread.
fn failure_of(payload: Box<dyn Any + Send>, make: impl FnOnce(Box<dyn Any + Send>) -> Failure) -> Option<Failure> {
    if payload.is::<WorldOver>() { None } else { Some(make(payload)) }
}

pub(crate) fn start_service(
    name: &str,
    stack_bytes: usize,
    ended: &Arc<WorldEnd>,
    body: Box<dyn FnOnce() + Send>,
) -> Result<JoinHandle<()>, WorldError> {
    let (ended, service): (_, Arc<str>) = (ended.clone(), name.into());
    let run = move || {
        work_for(ended.clone(), Actor::Service { name: service.clone() });
        if let Err(payload) = catch_unwind(AssertUnwindSafe(body)) {
            let failure = failure_of(payload, |payload| {
                Failure::World(WorldError::ServicePanicked { name: service, message: panic_text(&*payload) })
            });
            ended.end(failure);
        }
    };
    let spawned = Builder::new().name(name.into()).stack_size(stack_bytes).spawn(run);
    spawned.map_err(|cause| WorldError::NoResources {
        actor: Actor::Service { name: name.into() },
        cause: explain_refusal(&cause, stack_bytes as u64),
    })
}

fn start_host<'scope>(
    scope: &'scope Scope<'scope, '_>,
    rank: u32,
    stack_bytes: usize,
    ended: &Arc<WorldEnd>,
    body: Box<dyn FnOnce() + Send + 'scope>,
) {
    let shared = ended.clone();
    let run = move || {
        work_for(shared.clone(), Actor::Host { rank });
        if let Err(payload) = catch_unwind(AssertUnwindSafe(body)) {
            shared.end(failure_of(payload, |payload| Failure::HostPanic { rank, payload }));
        }
    };
    if let Err(cause) = Builder::new().name(format!("rank {rank}")).stack_size(stack_bytes).spawn_scoped(scope, run) {
        let error =
            WorldError::NoResources { actor: Actor::Host { rank }, cause: explain_refusal(&cause, stack_bytes as u64) };
        ended.end(Some(Failure::World(error)));
    }
}

/// Runs host functions on OS threads until they have returned and all grids have ended, then ends the services.
pub(crate) fn run(
    (devices, services): (&Mutex<Vec<Arc<DeviceCore>>>, &Mutex<Vec<Service>>),
    ended: &Arc<WorldEnd>,
    config: &ThreadsConfig,
    bodies: Vec<Box<dyn FnOnce() + Send + '_>>,
) -> Result<(), Failure> {
    std::thread::scope(|scope| {
        for (rank, body) in (0_u32..).zip(bodies) {
            start_host(scope, rank, config.host_stack_bytes, ended, body);
        }
    });
    let devices = lock(devices).clone();
    crate::host::block_on(|| ended.is_ended() || devices.iter().all(|device| device.is_idle()));
    if ended.is_ended() {
        for device in &devices {
            device.inbox.post(Mail::EndGrids("the world is over".into()));
        }
        crate::host::block_on(|| devices.iter().all(|device| device.is_idle()));
    }
    let services = std::mem::take(&mut *lock(services));
    for (state, _) in &services {
        state.stop();
    }
    for (_, thread) in services {
        // The thread has caught its own panic.
        thread.map(JoinHandle::join);
    }
    match ended.reset() {
        Some(failure) => Err(failure),
        None => Ok(()),
    }
}
