// SPDX-License-Identifier: MIT OR Apache-2.0
//! Communicators: groups of ranks that share windows, signals and counters.
//!
//! | module or type | holds |
//! | --- | --- |
//! | [`Bootstrap`] | the exchange of messages between ranks that have no communicator yet |
//! | [`Requirements`] | the size of a communicator, checked against the limits |
//! | [`CommConfig`] | the way a communicator works |
//! | [`Communicator`] | the life cycle: uninitialised, initialising, active, aborted, destroyed |
//! | [`DeviceComm`], [`Window`] | the arguments that kernels get |
//! | [`board`](gin_boot::board) | the place where ranks report faults to each other |
//!
//! A *collective* call is one that all ranks make together. If it fails on one rank, it fails on all ranks, and the
//! error names that rank.

mod backend;
mod bring_up;
mod config;
mod end;
mod error;
mod footprint;
mod gdaki;
mod live;
pub(crate) mod print;
mod reach;
mod report;
mod requirements;
mod resources;
mod state;
mod stats;
mod symmetric;
mod window;
mod windows;
mod wire;

pub use crate::proxy::progress::ManualProgress;
pub use crate::proxy::{PeerStats, Stats};
pub use backend::{Backend, BackendProbe, NicChoice, probe_backends};
pub use config::{CommConfig, Routes};
pub use error::CommError;
pub use footprint::Footprint;
pub use gin_abi::{Deadline, Fault, FaultKind, FaultSubject};
pub use print::PrintTo;
pub use report::FaultReport;
pub use requirements::{ConnectionType, MAX_MESSAGE, MAX_OUTSTANDING, MAX_PRINT_LINES, MAX_QUEUE_DEPTH, Requirements};
pub use state::{AbortHandle, CommState};
pub use window::{Window, WindowFlags};

use end::Life;
use gin_abi::{BackendKind, CommHandle};
use gin_boot::Bootstrap;
use gin_boot::board::Notice;
use gin_device::Comm;
use gin_device::kernel::LaunchArg;
use gin_gpu::{Argument, Device, KernelArg};
use gin_nic::{DoorbellSource, Nic};
use live::Live;
use state::Shared;
use std::sync::{Arc, MutexGuard, TryLockError};

/// The argument that passes a communicator to a kernel, where it is a `gin_device::Comm`.
///
/// ```
/// use gin_host::comm::{CommError, Requirements};
/// use gin_host::world::{WorldConfig, launch};
///
/// let ranks = launch(WorldConfig::seeded(2, 7), |rank| -> Result<u32, CommError> {
///     let comm = rank.communicator(&Requirements::default())?;
///     let argument = comm.device()?; // pass `&argument` to `launch`
///     comm.destroy()?;
///     Ok(argument.handle().rank)
/// });
/// assert_eq!(ranks.unwrap(), [0, 1]);
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DeviceComm(CommHandle);

impl DeviceComm {
    /// Returns the handle in the layout that kernels read.
    pub fn handle(&self) -> CommHandle {
        self.0
    }
}

impl KernelArg for DeviceComm {
    fn argument(&self) -> Argument {
        Argument::of::<Comm>(self.0)
    }
}

impl LaunchArg<Comm> for &DeviceComm {
    unsafe fn into_param(self) -> Comm {
        // Safety: the communicator made the handle, and the caller's promise.
        unsafe { Comm::from_handle(self.0) }
    }
}

/// One rank's member of a group of ranks that share windows, signals and counters.
///
/// Each rank of the job creates one. The collective calls are [`initialise`](Self::initialise),
/// [`register`](Self::register), [`alloc_window`](Self::alloc_window), [`deregister`](Self::deregister), and
/// [`destroy`](Self::destroy) of an active communicator.
///
/// Clones share the communicator: a library that works with its windows keeps one. When the last clone of an active
/// communicator is dropped, the communicator is aborted.
///
/// ```
/// use gin_boot::InProcess;
/// use gin_gpu::virt::VirtualDevice;
/// use gin_host::comm::{Backend, CommConfig, CommState, Communicator, Requirements, WindowFlags};
/// use std::sync::Arc;
///
/// // A job of one rank.
/// let rank = InProcess::job(1)?.remove(0);
/// let config = CommConfig::default().backend(Backend::Proxy);
/// let comm = Communicator::new(Arc::new(rank), VirtualDevice::memory_only(0), config);
/// comm.initialise(&Requirements::default())?;
/// let window = comm.alloc_window::<u32>(8, WindowFlags::NONE)?;
/// assert_eq!((comm.state(), window.len()), (CommState::Active, 8));
/// comm.destroy()?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug)]
pub struct Communicator {
    shared: Arc<Shared>,
    bootstrap: Arc<dyn Bootstrap>,
    device: Arc<dyn Device>,
    config: Arc<CommConfig>,
    life: Arc<Life>,
}

const _: () = {
    const fn usable_from_any_thread<T: Send + Sync>() {}
    usable_from_any_thread::<Communicator>();
};

impl Communicator {
    /// Creates a communicator that is not initialised. Does not wait for other ranks.
    pub fn new(bootstrap: Arc<dyn Bootstrap>, device: Arc<dyn Device>, config: CommConfig) -> Self {
        let (shared, config) = (Shared::new(bootstrap.rank()), Arc::new(config));
        let life = Arc::new(Life::new(&shared, &device, &config));
        Self { shared, bootstrap, device, config, life }
    }

    /// Returns the world rank of this rank.
    pub fn rank(&self) -> u32 {
        self.bootstrap.rank()
    }

    /// Returns the number of ranks.
    pub fn ranks(&self) -> u32 {
        self.bootstrap.ranks()
    }

    /// Returns the rank's device.
    pub fn gpu(&self) -> &Arc<dyn Device> {
        &self.device
    }

    /// Returns the bootstrap, which exchanges messages with the other ranks.
    pub fn bootstrap(&self) -> &Arc<dyn Bootstrap> {
        &self.bootstrap
    }

    /// Returns whether each rank is a separate process.
    fn is_across(&self) -> bool {
        self.bootstrap.is_across_processes()
    }

    /// Returns the communicator's place in its life cycle.
    pub fn state(&self) -> CommState {
        self.shared.state()
    }

    /// Returns the error of a call that the present state refuses.
    fn wrong_state(&self, call: &'static str) -> CommError {
        CommError::State { call, state: self.state() }
    }

    /// Takes the lock for a call. Never waits for the lock, because its holder may be waiting for other ranks.
    fn enter(&self, call: &'static str) -> Result<MutexGuard<'_, Option<Live>>, CommError> {
        if let Some(caller) = self.config.progress.manual() {
            caller.step_in_waits();
        }
        match self.life.live.try_lock() {
            Ok(live) => Ok(live),
            // A call that panicked leaves, at worst, a communicator that can only be destroyed.
            Err(TryLockError::Poisoned(poisoned)) => Ok(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => Err(CommError::Busy { call }),
        }
    }

    /// Refuses a call unless the communicator is active.
    fn active(&self, call: &'static str) -> Result<(), CommError> {
        match self.state() {
            CommState::Active => Ok(()),
            CommState::Aborted => self.check(call).and(Err(CommError::State { call, state: CommState::Aborted })),
            state => Err(CommError::State { call, state }),
        }
    }

    /// Returns the error of a call after a fault has ended the communicator.
    fn ended(&self, call: &'static str, notice: Notice) -> CommError {
        CommError::Ended { call, rank: notice.rank, fault: notice.fault, report: Box::new(self.report(notice)) }
    }

    /// Checks that no fault has ended the communicator. Programs call this after a kernel has run. The error text says
    /// that the program cannot `call`. Also prints the lines of these kernels.
    ///
    /// # Errors
    /// [`CommError::Ended`].
    pub fn check(&self, call: &'static str) -> Result<(), CommError> {
        self.shared.print_lines();
        self.shared.fault().map_or(Ok(()), |notice| Err(self.ended(call, notice)))
    }

    /// Runs `work` on a communicator that is active.
    fn with_live<T>(
        &self,
        call: &'static str,
        work: impl FnOnce(&mut Live) -> Result<T, CommError>,
    ) -> Result<T, CommError> {
        let mut live = self.enter(call)?;
        self.active(call)?;
        live.as_mut().ok_or_else(|| self.wrong_state(call)).and_then(work)
    }

    /// Runs `work` on a communicator that is active or has ended by a fault.
    fn with_up<T>(&self, call: &'static str, work: impl FnOnce(&Live) -> T) -> Result<T, CommError> {
        self.enter(call)?.as_ref().map(work).ok_or_else(|| self.wrong_state(call))
    }

    /// Runs a collective call inside a span, and emits an event with its outcome.
    ///
    /// No request passes through here. The span is not entered: ranks that take turns on one thread would leave each
    /// other's spans.
    fn traced<T>(&self, call: &'static str, work: impl FnOnce() -> Result<T, CommError>) -> Result<T, CommError> {
        let span = tracing::debug_span!("collective", call, rank = self.rank(), ranks = self.ranks());
        let outcome = work();
        match &outcome {
            Ok(_) => tracing::debug!(parent: &span, call, rank = self.rank(), "done"),
            Err(error) => tracing::debug!(parent: &span, call, rank = self.rank(), %error, "failed"),
        }
        outcome
    }

    /// Brings the communicator up. Collective. All ranks pass the same requirements.
    ///
    /// # Errors
    /// The communicator stays uninitialised after an error.
    /// - [`CommError::State`] if the communicator is initialised already.
    /// - [`CommError::Limit`], [`CommError::NotPowerOfTwo`] or [`CommError::LsaSize`] if a value is past its limit.
    /// - [`CommError::Backend`] or [`CommError::Nic`] if the back end is unavailable or does not come up.
    /// - [`CommError::Capability`] if the network lacks a required feature.
    /// - [`CommError::Disagreement`] if ranks pass different values.
    pub fn initialise(&self, requirements: &Requirements) -> Result<(), CommError> {
        const CALL: &str = "initialise";
        let mut live = self.enter(CALL)?;
        if self.state() != CommState::Uninitialised {
            return Err(self.wrong_state(CALL));
        }
        self.shared.set(CommState::Initialising);
        let outcome = self.traced(CALL, || self.bring_up(requirements));
        self.shared.set(if outcome.is_ok() { CommState::Active } else { CommState::Uninitialised });
        *live = Some(outcome?);
        Ok(())
    }

    /// Returns the argument that passes the communicator to kernels. A kernel that is launched after the communicator
    /// has ended gets the fault at its first wait.
    ///
    /// # Errors
    /// [`CommError::State`] if the communicator is not initialised or is destroyed.
    pub fn device(&self) -> Result<DeviceComm, CommError> {
        self.with_up("pass it to a kernel", |live| DeviceComm(live.handle))
    }

    /// Returns the back end in use.
    ///
    /// # Errors
    /// As [`device`](Self::device).
    pub fn backend(&self) -> Result<BackendKind, CommError> {
        self.with_up("name the back end", |live| live.backend)
    }

    /// Returns the features of the network.
    ///
    /// # Errors
    /// As [`device`](Self::device).
    pub fn network(&self) -> Result<gin_net::Capabilities, CommError> {
        self.with_up("name the network", |live| live.capabilities)
    }

    /// Returns the device-driven NIC. `None` if the back end is the proxy.
    ///
    /// # Errors
    /// As [`device`](Self::device).
    pub fn nic(&self) -> Result<Option<Arc<Nic>>, CommError> {
        self.with_up("name the NIC", |live| live.gdaki.as_ref().map(|gdaki| gdaki.nic.clone()))
    }

    /// Returns the engine that rings the doorbells of the device-driven NIC. `None` if the back end is the proxy.
    ///
    /// # Errors
    /// As [`device`](Self::device).
    pub fn doorbell_source(&self) -> Result<Option<DoorbellSource>, CommError> {
        self.with_up("name the engine that rings doorbells", |live| {
            live.gdaki.as_ref().map(|gdaki| gdaki.queues.doorbell_source())
        })
    }

    /// Ends every wait of the communicator on every rank. A rank notices when its proxy next looks, within the proxy's
    /// sleep (50 us). A second call has no effect.
    ///
    /// # Errors
    /// [`CommError::State`] if the communicator is not initialised or is destroyed.
    pub fn abort(&self) -> Result<(), CommError> {
        if !matches!(self.state(), CommState::Active | CommState::Aborted) {
            return Err(self.wrong_state("abort"));
        }
        self.shared.abort("");
        Ok(())
    }

    /// Carries out the requests of kernels that are ready, if the communicator has no progress threads
    /// ([`ManualProgress`]). Returns whether there was anything to do. Never waits for
    /// other ranks. With progress threads there is nothing to do.
    ///
    /// # Errors
    /// [`CommError::State`] if the communicator is not initialised or is destroyed.
    pub fn progress(&self) -> Result<bool, CommError> {
        if !matches!(self.state(), CommState::Active | CommState::Aborted) {
            return Err(self.wrong_state("carry out requests"));
        }
        let caller = self.config.progress.manual();
        Ok(caller.is_some_and(|caller| {
            caller.step_in_waits();
            caller.step()
        }))
    }

    /// Returns a handle that aborts the communicator from another thread.
    pub fn abort_handle(&self) -> AbortHandle {
        AbortHandle(self.shared.clone())
    }

    /// Returns the fault that ended the communicator, with the rank that found it. `None` if no fault is known.
    ///
    /// Faults that a kernel of this rank has reported are known when the kernel has ended. Faults of other ranks are
    /// known after their proxies have looked (50 us).
    pub fn fault(&self) -> Option<Notice> {
        self.shared.fault()
    }
}
