// SPDX-License-Identifier: MIT OR Apache-2.0
//! Worlds: devices, host functions and services that run together, on one OS thread by a seed or on many in real time.

use std::any::Any;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

use crate::config::{DeviceConfig, SeededConfig, ThreadsConfig};
use crate::end::WorldEnd;
use crate::engine::{Engine, Failure, Settings};
use crate::error::{LaunchError, WorldError};
use crate::grid::{Grid, GridRun, LaunchTicket, StreamId};
use crate::hooks;
use crate::inbox::{DeviceCore, HostSpec, Inbox, Mail, ServiceSpec};
use crate::lock::lock;
use crate::log::EventLog;
use crate::refusal::explain_refusal;
use crate::service::{Service, ServiceHandle, ServiceState, ServiceStep, service_body};
use crate::watchdog::Heartbeat;

pub(crate) enum WorldMode {
    Seeded(SeededConfig),
    Threads(ThreadsConfig),
}

pub(crate) struct WorldInner {
    pub(crate) mode: WorldMode,
    /// Inbox of the one engine of a seeded world.
    inbox: Arc<Inbox>,
    pub(crate) devices: Mutex<Vec<Arc<DeviceCore>>>,
    pub(crate) ended: Arc<WorldEnd>,
    pub(crate) services: Mutex<Vec<Service>>,
    device_threads: Mutex<Vec<JoinHandle<()>>>,
    service_count: AtomicU32,
    running: AtomicBool,
    runs: AtomicU64,
    clock: AtomicU64,
    log: Mutex<EventLog>,
    /// Grids whose failure must have been read by the end of a run.
    launched: Mutex<Vec<Arc<GridRun>>>,
}

/// A set of virtual GPUs, host functions and services that run together.
///
/// Cloning gives another handle to the same world.
#[derive(Clone)]
pub struct World {
    pub(crate) inner: Arc<WorldInner>,
}

impl World {
    /// Creates a world that one OS thread steps. The seed determines every decision.
    pub fn seeded(config: SeededConfig) -> Self {
        Self::new(WorldMode::Seeded(config))
    }

    /// Creates a world whose ranks, services and devices are OS threads, in real time.
    pub fn threads(config: ThreadsConfig) -> Self {
        Self::new(WorldMode::Threads(config))
    }

    fn new(mode: WorldMode) -> Self {
        hooks::install();
        World {
            inner: Arc::new(WorldInner {
                mode,
                inbox: Arc::default(),
                devices: Mutex::default(),
                ended: Arc::default(),
                services: Mutex::default(),
                device_threads: Mutex::default(),
                service_count: AtomicU32::new(0),
                running: AtomicBool::new(false),
                runs: AtomicU64::new(0),
                clock: AtomicU64::new(0),
                log: Mutex::default(),
                launched: Mutex::default(),
            }),
        }
    }

    /// Returns true for a seeded world.
    pub fn is_seeded(&self) -> bool {
        matches!(self.inner.mode, WorldMode::Seeded(_))
    }

    /// Returns the seed of the world's decisions.
    pub fn seed(&self) -> u64 {
        match &self.inner.mode {
            WorldMode::Seeded(config) => config.seed,
            WorldMode::Threads(config) => config.seed,
        }
    }

    /// Adds a virtual GPU. GPUs are numbered from 0 in the order of these calls. Reports call that number the rank.
    pub fn device(&self, config: DeviceConfig) -> VirtualGpu {
        let inner = &self.inner;
        let mut devices = lock(&inner.devices);
        let index = devices.len() as u32;
        let inbox = if self.is_seeded() { inner.inbox.clone() } else { Arc::default() };
        let device = Arc::new(DeviceCore::new(index, config, inbox));
        if let WorldMode::Threads(config) = &inner.mode {
            match crate::threads::start_device(&device, config, &inner.ended) {
                Ok(thread) => lock(&inner.device_threads).push(thread),
                // Every launch then fails with this reason.
                Err(cause) => {
                    device.refusal.get_or_init(|| explain_refusal(&cause, crate::threads::DEVICE_STACK as u64));
                    device.inbox.close();
                }
            }
        }
        devices.push(device.clone());
        VirtualGpu { inner: inner.clone(), device }
    }

    /// Returns the devices added so far, in order.
    pub fn devices(&self) -> Vec<VirtualGpu> {
        let devices = lock(&self.inner.devices);
        devices.iter().map(|device| VirtualGpu { inner: self.inner.clone(), device: device.clone() }).collect()
    }

    /// Adds a service: `step` is called repeatedly until it returns [`ServiceStep::Stop`], its handle stops it, or the
    /// run that it takes part in ends.
    ///
    /// In a seeded world the service is a coroutine, which begins with the next run if none is in progress. In the
    /// threads mode it is an OS thread, which begins at once.
    pub fn spawn_service(&self, name: &str, step: impl FnMut() -> ServiceStep + Send + 'static) -> ServiceHandle {
        let state = Arc::new(ServiceState::new(name.into()));
        let body = service_body(state.clone(), step);
        let thread = match &self.inner.mode {
            WorldMode::Seeded(_) => {
                let index = self.inner.service_count.fetch_add(1, Ordering::Relaxed);
                self.inner.inbox.post(Mail::Service(ServiceSpec { index, name: name.into(), body }));
                None
            }
            WorldMode::Threads(config) => {
                match crate::threads::start_service(name, config.host_stack_bytes, &self.inner.ended, body) {
                    Ok(thread) => Some(thread),
                    Err(error) => {
                        self.inner.ended.end(Some(Failure::World(error)));
                        None
                    }
                }
            }
        };
        let mut services = lock(&self.inner.services);
        services.retain(|(state, _)| !state.is_finished());
        services.push((state.clone(), thread));
        ServiceHandle(state)
    }

    /// Runs one host function for each rank, with the services and all grids they launch. The run lasts until all
    /// functions have returned and all grids have ended; then the services are ended. Returns the results in the order
    /// of the functions.
    ///
    /// A seeded world runs on the calling thread, and only during this call.
    ///
    /// # Errors
    /// Fails if the world makes no progress, if a service panics, if a grid fails and no ticket reads its result, or if
    /// the call is nested.
    ///
    /// # Panics
    /// Panics with the panic of the first host function that panicked, after all others were ended.
    pub fn run<'env, T, F>(&self, hosts: Vec<F>) -> Result<Vec<T>, WorldError>
    where
        T: Send + 'env,
        F: FnOnce() -> T + Send + 'env,
    {
        if hooks::engine().is_some() || self.inner.running.swap(true, Ordering::AcqRel) {
            return Err(WorldError::Nested);
        }
        let count = hosts.len();
        let results: Mutex<Vec<Option<T>>> = Mutex::new((0..count).map(|_| None).collect());
        let bodies = (0_u32..).zip(hosts).map(|(rank, host)| {
            let results = &results;
            let body: Box<dyn FnOnce() + Send + '_> = Box::new(move || {
                let result = host();
                lock(results)[rank as usize] = Some(result);
            });
            body
        });
        let outcome = match &self.inner.mode {
            WorldMode::Seeded(config) => self.run_seeded(config, bodies.collect()),
            WorldMode::Threads(config) => {
                let WorldInner { devices, services, ended, .. } = &*self.inner;
                crate::threads::run((devices, services), ended, config, bodies.collect())
            }
        };
        lock(&self.inner.services).clear();
        self.inner.running.store(false, Ordering::Release);
        let launched = std::mem::take(&mut *lock(&self.inner.launched));
        match outcome {
            Ok(()) => {}
            Err(Failure::World(error)) => {
                self.print_seed();
                return Err(error);
            }
            Err(Failure::HostPanic { rank, payload }) => {
                eprintln!("gin-virtual: the host of rank {rank} panicked");
                self.print_seed();
                std::panic::resume_unwind(payload);
            }
        }
        if let Some(error) = launched.iter().find_map(|run| run.unseen_failure()) {
            self.print_seed();
            return Err(WorldError::UnseenFailure(error));
        }
        Ok(results.into_inner().unwrap_or_else(PoisonError::into_inner).into_iter().flatten().collect())
    }

    fn print_seed(&self) {
        if let WorldMode::Seeded(SeededConfig { seed, schedule, print_seed: true, .. }) = &self.inner.mode {
            eprintln!("gin-virtual: seed {seed}, schedule {schedule:?}");
        }
    }

    fn run_seeded(&self, config: &SeededConfig, bodies: Vec<Box<dyn FnOnce() + Send + '_>>) -> Result<(), Failure> {
        let inner = &self.inner;
        // Empties the inbox at the end: of mail posted while the world was being ended and, if the engine itself fails,
        // of a host that has not begun.
        let _cleared = Cleared(&inner.inbox);
        for (rank, body) in (0_u32..).zip(bodies) {
            // Safety: `run_world` ends every host coroutine before it returns. If it unwinds, the engine ends them when
            // it is dropped, and `Cleared` drops coroutines that have not begun. So nothing borrowed for '_ is used
            // after this function.
            let body = unsafe { std::mem::transmute::<Box<dyn FnOnce() + Send + '_>, Box<dyn FnOnce() + Send>>(body) };
            inner.inbox.post(Mail::Host(HostSpec { rank, body }));
        }
        let run = inner.runs.fetch_add(1, Ordering::Relaxed);
        let engine = Engine::new(
            Settings {
                // The multiplier of splitmix64 gives each run of one world different decisions.
                seed: config.seed ^ run.wrapping_mul(0x9e37_79b9_7f4a_7c15),
                schedule: config.schedule,
                quantum: None,
                virtual_clock: Some((inner.clock.load(Ordering::Relaxed), config.step_ns)),
                log: std::mem::take(&mut *lock(&inner.log)),
                log_mode: config.log,
                max_steps: config.max_steps,
                stall_steps: config.stall_steps,
                max_ns: config.max_virtual_ns,
                grid_limit_ns: None,
                host_stack_bytes: config.host_stack_bytes,
                races: config.races,
            },
            inner.inbox.clone(),
            Heartbeat::new(config.watchdog, None, config.seed, &inner.ended, &inner.inbox),
        );
        let outcome = engine.run_world();
        inner.clock.store(engine.clock(), Ordering::Relaxed);
        *lock(&inner.log) = engine.take_log();
        outcome
    }

    /// Returns the events of the runs so far; empty in the threads mode.
    ///
    /// ```
    /// use gin_virtual::{LogMode, SeededConfig, World, yield_now};
    ///
    /// let run = |seed| {
    ///     let world = World::seeded(SeededConfig::new(seed).log(LogMode::Full));
    ///     let hosts = (0..4).map(|_| || (0..10).for_each(|_| yield_now())).collect();
    ///     world.run(hosts).map(|_| world.event_log())
    /// };
    /// assert_eq!(run(7)?.to_bytes(), run(7)?.to_bytes());
    /// assert_ne!(run(7)?.hash(), run(8)?.hash());
    /// # Ok::<(), gin_virtual::WorldError>(())
    /// ```
    pub fn event_log(&self) -> EventLog {
        lock(&self.inner.log).clone()
    }
}

struct Cleared<'a>(&'a Inbox);

impl Drop for Cleared<'_> {
    fn drop(&mut self) {
        drop(self.0.take());
    }
}

impl std::fmt::Debug for World {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("World").field("seeded", &self.is_seeded()).field("seed", &self.seed()).finish_non_exhaustive()
    }
}

impl Drop for WorldInner {
    fn drop(&mut self) {
        self.ended.end(None);
        for (state, _) in lock(&self.services).iter() {
            state.stop();
        }
        for device in lock(&self.devices).iter() {
            device.inbox.close();
        }
        let me = std::thread::current().id();
        let services = std::mem::take(&mut *lock(&self.services)).into_iter().filter_map(|(_, thread)| thread);
        for thread in services.chain(std::mem::take(&mut *lock(&self.device_threads))) {
            // A grid or a service may have dropped the last handle.
            if thread.thread().id() != me {
                let _: Result<(), Box<dyn Any + Send>> = thread.join();
            }
        }
    }
}

/// A device of a world that runs grids.
///
/// Cloning gives another handle to the same device.
#[derive(Clone)]
pub struct VirtualGpu {
    inner: Arc<WorldInner>,
    device: Arc<DeviceCore>,
}

impl VirtualGpu {
    /// Returns the device's number in the world, from 0. Reports call it the rank.
    pub fn index(&self) -> u32 {
        self.device.index
    }

    /// Returns the device's settings.
    pub fn config(&self) -> &DeviceConfig {
        &self.device.config
    }

    /// Returns the world that the device belongs to.
    pub fn world(&self) -> World {
        World { inner: self.inner.clone() }
    }

    /// Launches a grid. It begins once all earlier grids of `stream` have ended and there is room for its blocks. Never
    /// waits.
    ///
    /// In a seeded world grids run only during [`World::run`].
    ///
    /// # Errors
    /// Fails if the grid exceeds a limit of launches, or if a cooperative grid cannot be wholly resident beside the
    /// running grids of the other streams.
    pub fn launch(&self, stream: StreamId, grid: Grid) -> Result<LaunchTicket, LaunchError> {
        let run = self.device.launch(stream, grid)?;
        if self.inner.running.load(Ordering::Acquire) {
            let mut launched = lock(&self.inner.launched);
            launched.retain(|run| !run.is_settled());
            launched.push(run.clone());
        }
        Ok(LaunchTicket(run))
    }

    /// Returns true if all grids launched so far have ended.
    pub fn is_idle(&self) -> bool {
        self.device.is_idle()
    }

    /// Waits until all grids launched so far have ended. Their tickets hold the results.
    #[track_caller]
    pub fn synchronize(&self) {
        crate::host::block_on(|| self.is_idle());
    }
}

impl std::fmt::Debug for VirtualGpu {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("VirtualGpu")
            .field("index", &self.index())
            .field("config", self.config())
            .finish_non_exhaustive()
    }
}
