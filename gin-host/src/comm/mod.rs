// SPDX-License-Identifier: MIT OR Apache-2.0
//! Communicators: how ranks meet, what they share, and how it ends.
//!
//! | module or type | holds |
//! | --- | --- |
//! | [`Bootstrap`], [`InProcess`] | how ranks meet before they have a communicator |
//! | [`Requirements`] | what a communicator is to have, checked against the limits |
//! | [`Communicator`] | its life: uninitialised, initialising, active, aborted, destroyed |
//! | [`DeviceComm`], [`Window`] | what kernels get |
//! | [`board`] | where ranks tell each other of faults |
//!
//! Calls that all ranks make together are called *collective*. If such a call fails on one rank, it fails on all ranks,
//! and the error names that rank.

mod backend;
mod error;
mod figures;
mod gdaki;
mod life;
mod reach;
mod report;
mod requirements;
mod resources;
mod seen;
mod symmetric;
mod window;
mod windows;
mod wire;

pub use crate::proxy::{PeerStats, Stats};
pub use backend::{Backend, BackendProbe, Chosen, NicChoice, probe_backends};
pub use error::CommError;
use gin_boot::{Bootstrap, board};
use gin_nic::{DoorbellRelease, Doorbells, Ringer};
pub use report::FaultReport;
pub use requirements::{Connections, MAX_MESSAGE, MAX_OUTSTANDING, MAX_QUEUE_DEPTH, Requirements};
pub use window::{Window, WindowFlags};

use crate::proxy::progress::{OwnThreads, Progress};
use board::{Board, Notice};
use gin_abi::{BackendKind, CommHandle, Fault, FaultKind, Operation};
use gin_gpu::{Argument, Device, KernelArg};
use gin_net::NetworkFactory;
use gin_net::peer::Peer;
use gin_nic::Nic;
use life::Live;
use resources::Resources;
use std::fmt;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, TryLockError, Weak};
use std::time::Duration;

/// Where a communicator is in its life.
#[repr(u8)]
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub enum State {
    /// Made, and nothing more.
    Uninitialised = 0,
    /// In `initialise`.
    Initialising = 1,
    /// In use.
    Active = 2,
    /// Aborted, here or by another rank, or ended by a fault. It can only be destroyed.
    Aborted = 3,
    /// Gone.
    Destroyed = 4,
}

impl State {
    const ALL: [Self; 5] = [Self::Uninitialised, Self::Initialising, Self::Active, Self::Aborted, Self::Destroyed];
}

impl fmt::Display for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Uninitialised => "not initialised",
            Self::Initialising => "being initialised",
            Self::Active => "active",
            Self::Aborted => "aborted",
            Self::Destroyed => "destroyed",
        })
    }
}

/// Which ways the operations of a kernel can take that does not name its back end.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Hash)]
pub enum Routes {
    /// Loads and stores to peers of the LSA team, the network to others.
    #[default]
    Automatic,
    /// The network to all. Kernels that ask for loads and stores are refused, and signals have no words for GPUs.
    Network,
}

/// How a communicator works; what it has is in [`Requirements`].
#[derive(Clone)]
#[non_exhaustive]
pub struct CommConfig {
    /// The back end.
    pub backend: Backend,
    /// The NIC that kernels drive, where the back end is GDAKI.
    pub nic: NicChoice,
    /// The requested engine for its doorbells.
    pub doorbells: Doorbells,
    /// How far its kernels release before they ring.
    pub release: DoorbellRelease,
    /// How long a rank may take to bring its queue pairs up.
    pub connecting: Duration,
    /// Ranks that reach each other by loads and stores: neighbours in the order of ranks, this many; by default the
    /// largest number for which the devices of all such neighbours reach each other, with atomics.
    pub lsa_size: Option<u32>,
    /// Which ways operations can take.
    pub routes: Routes,
    /// The factory of the proxies' network.
    pub network: NetworkFactory,
    /// The engine that steps the proxy.
    pub progress: Arc<dyn Progress>,
    /// Seed for networks that choose.
    pub seed: u64,
    /// How long deregistration and destruction wait for requests under way.
    pub drain: Duration,
    /// A reported fault stops the kernel at once, for debugging.
    pub trap_on_fault: bool,
    /// The proxy stores 0 to the words of signals that a kernel resets: a mistake, for tests.
    #[cfg(feature = "reset-by-store")]
    pub resets_by_store: bool,
}

impl CommConfig {
    gin_boot::setters! {
        backend: Backend,
        nic: NicChoice,
        doorbells: Doorbells,
        release: DoorbellRelease,
        connecting: Duration,
        lsa_size: Option<u32>,
        routes: Routes,
        progress: Arc<dyn Progress>,
        seed: u64,
        drain: Duration,
        trap_on_fault: bool,
        network: NetworkFactory,
    }
}

impl Default for CommConfig {
    /// The back end that the host probes, one progress thread, and copies within the host as the network.
    fn default() -> Self {
        Self {
            backend: Backend::Auto,
            nic: NicChoice::default(),
            doorbells: Doorbells::Automatic,
            release: DoorbellRelease::System,
            connecting: Duration::from_secs(30),
            lsa_size: None,
            routes: Routes::Automatic,
            network: Arc::new(|endpoint| Box::new(Peer::new(endpoint))),
            progress: Arc::new(OwnThreads),
            seed: 0,
            drain: Duration::from_secs(10),
            trap_on_fault: false,
            #[cfg(feature = "reset-by-store")]
            resets_by_store: false,
        }
    }
}

impl fmt::Debug for CommConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CommConfig")
            .field("backend", &self.backend)
            .field("lsa_size", &self.lsa_size)
            .finish_non_exhaustive()
    }
}

/// A communicator as kernels get it: `gin_device::Comm`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DeviceComm(CommHandle);

impl DeviceComm {
    /// The handle behind it.
    pub fn handle(&self) -> CommHandle {
        self.0
    }
}

impl KernelArg for DeviceComm {
    fn argument(&self) -> Argument {
        Argument::plain(self.0, "DeviceComm")
    }
}

/// The state that outlives calls: enough to abort and to ask.
#[derive(Debug)]
struct Shared {
    rank: u32,
    state: AtomicU8,
    board: OnceLock<Arc<Board>>,
    /// The back end, once the communicator is active.
    place: OnceLock<report::Place>,
    /// Where kernels of this rank report.
    resources: OnceLock<Weak<Resources>>,
}

impl Shared {
    fn state(&self) -> State {
        let state = State::ALL[usize::from(self.state.load(Ordering::Acquire))];
        if state == State::Active && self.fault().is_some() { State::Aborted } else { state }
    }

    fn set(&self, state: State) {
        self.state.store(state as u8, Ordering::Release);
    }

    fn fault(&self) -> Option<Notice> {
        let board = self.board.get()?;
        if board.count() == 0
            && let Some(resources) = self.resources.get().and_then(Weak::upgrade)
            && let Some(fault) = resources.status().reported()
        {
            // The proxy will find it too; a program that asks after a kernel has ended need not wait for that.
            board.post(self.rank, fault);
        }
        board.first()
    }

    fn abort(&self) {
        if let Some(board) = self.board.get() {
            board.post(self.rank, Fault::new(FaultKind::Aborted, Operation::None));
        }
    }
}

/// Ends a communicator from any thread.
#[derive(Clone, Debug)]
pub struct AbortHandle(Arc<Shared>);

impl AbortHandle {
    /// Ends every wait of the communicator on every rank, within the time that a proxy sleeps. Does nothing to one that
    /// is not active.
    pub fn abort(&self) {
        self.0.abort();
    }
}

/// Ranks that share windows, signals and counters, seen from one of them.
///
/// All ranks of the job have one each. Collective calls: [`initialise`](Self::initialise),
/// [`register`](Self::register), [`alloc_window`](Self::alloc_window), [`deregister`](Self::deregister),
/// [`destroy`](Self::destroy) of one that is active.
///
/// Dropping one that is active aborts it.
#[derive(Debug)]
pub struct Communicator {
    shared: Arc<Shared>,
    bootstrap: Arc<dyn Bootstrap>,
    device: Arc<dyn Device>,
    config: CommConfig,
    live: Mutex<Option<Live>>,
}

const _: () = {
    const fn usable_from_any_thread<T: Send + Sync>() {}
    usable_from_any_thread::<Communicator>();
};

impl Communicator {
    /// A communicator that is not initialised. Does not wait for anybody.
    pub fn new(bootstrap: Arc<dyn Bootstrap>, device: Arc<dyn Device>, config: CommConfig) -> Self {
        let shared = Shared {
            rank: bootstrap.rank(),
            state: AtomicU8::new(State::Uninitialised as u8),
            board: OnceLock::new(),
            place: OnceLock::new(),
            resources: OnceLock::new(),
        };
        Self { shared: Arc::new(shared), bootstrap, device, config, live: Mutex::new(None) }
    }

    /// World rank.
    pub fn rank(&self) -> u32 {
        self.bootstrap.rank()
    }

    /// Number of ranks.
    pub fn ranks(&self) -> u32 {
        self.bootstrap.ranks()
    }

    /// The device.
    pub fn gpu(&self) -> &Arc<dyn Device> {
        &self.device
    }

    /// The way to the other ranks.
    pub fn bootstrap(&self) -> &Arc<dyn Bootstrap> {
        &self.bootstrap
    }

    /// Returns whether the ranks are processes of their own.
    fn is_across(&self) -> bool {
        self.bootstrap.is_across_processes()
    }

    /// Where it is in its life.
    pub fn state(&self) -> State {
        self.shared.state()
    }

    /// Takes the lock for a call; never waits for it, because the holder may be waiting for other ranks.
    fn enter(&self, call: &'static str) -> Result<MutexGuard<'_, Option<Live>>, CommError> {
        match self.live.try_lock() {
            Ok(live) => Ok(live),
            // A panic in there left at most a communicator that can only be destroyed.
            Err(TryLockError::Poisoned(poisoned)) => Ok(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => Err(CommError::Busy { call }),
        }
    }

    /// Refuses a call unless the communicator is active.
    fn active(&self, call: &'static str) -> Result<(), CommError> {
        match self.shared.state() {
            State::Active => Ok(()),
            State::Aborted => match self.shared.fault() {
                Some(notice) => Err(self.ended(call, notice)),
                None => Err(CommError::State { call, state: State::Aborted }),
            },
            state => Err(CommError::State { call, state }),
        }
    }

    /// Returns the error of a call once a fault has ended the communicator.
    fn ended(&self, call: &'static str, notice: Notice) -> CommError {
        CommError::Ended { call, rank: notice.rank, fault: notice.fault, report: Box::new(self.report(notice)) }
    }

    /// Checks that no fault has ended the communicator. Programs call it when a kernel has run; `call` is what the
    /// error says could not be done.
    ///
    /// # Errors
    /// [`CommError::Ended`].
    pub fn check(&self, call: &'static str) -> Result<(), CommError> {
        self.shared.fault().map_or(Ok(()), |notice| Err(self.ended(call, notice)))
    }

    fn with_live<T>(
        &self,
        call: &'static str,
        work: impl FnOnce(&mut Live) -> Result<T, CommError>,
    ) -> Result<T, CommError> {
        let mut live = self.enter(call)?;
        self.active(call)?;
        match live.as_mut() {
            Some(live) => work(live),
            None => Err(CommError::State { call, state: self.state() }),
        }
    }

    /// Brings the communicator up. Collective; all ranks ask for the same.
    ///
    /// # Errors
    /// [`CommError::State`] unless it is not initialised; a value past its limit; [`CommError::Backend`] or
    /// [`CommError::Nic`] if the back end cannot be had or does not come up; [`CommError::Capability`];
    /// [`CommError::Disagreement`] if ranks ask for different values. The communicator is not initialised then.
    pub fn initialise(&self, requirements: &Requirements) -> Result<(), CommError> {
        const CALL: &str = "initialise";
        let mut live = self.enter(CALL)?;
        match self.shared.state() {
            State::Uninitialised => {}
            state => return Err(CommError::State { call: CALL, state }),
        }
        self.shared.set(State::Initialising);
        match self.seen(CALL, || self.bring_up(requirements)) {
            Ok(new) => {
                *live = Some(new);
                self.shared.set(State::Active);
                Ok(())
            }
            Err(error) => {
                self.shared.set(State::Uninitialised);
                Err(error)
            }
        }
    }

    /// For calls that are as good on a communicator that has ended.
    fn with_up<T>(&self, call: &'static str, work: impl FnOnce(&Live) -> T) -> Result<T, CommError> {
        match self.enter(call)?.as_ref() {
            Some(live) => Ok(work(live)),
            None => Err(CommError::State { call, state: self.state() }),
        }
    }

    /// Returns the communicator for kernels. A kernel that is launched after the communicator has ended gets the fault
    /// at its first wait.
    ///
    /// # Errors
    /// [`CommError::State`] if it is not initialised, or is destroyed.
    pub fn device(&self) -> Result<DeviceComm, CommError> {
        self.with_up("pass it to a kernel", |live| DeviceComm(live.handle))
    }

    /// The back end in use.
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

    /// The NIC that its kernels drive; `None` if the back end is the proxy.
    ///
    /// # Errors
    /// As [`device`](Self::device).
    pub fn nic(&self) -> Result<Option<Arc<Nic>>, CommError> {
        self.with_up("name the NIC", |live| live.gdaki.as_ref().map(|gdaki| gdaki.nic().clone()))
    }

    /// Returns the engine that rings the doorbells of the device-driven NIC; `None` if the back end is the proxy.
    ///
    /// # Errors
    /// As [`device`](Self::device).
    pub fn ringer(&self) -> Result<Option<Ringer>, CommError> {
        self.with_up("name the engine that rings doorbells", |live| live.gdaki.as_ref().map(|gdaki| gdaki.ringer()))
    }

    /// Ends every wait of the communicator on every rank, within the time that a proxy sleeps (50 us).
    ///
    /// # Errors
    /// [`CommError::State`] if it is not initialised, or is destroyed. To abort it twice is no error.
    pub fn abort(&self) -> Result<(), CommError> {
        match self.shared.state() {
            State::Active | State::Aborted => {
                self.shared.abort();
                Ok(())
            }
            state => Err(CommError::State { call: "abort", state }),
        }
    }

    /// Something to abort it with from another thread.
    pub fn abort_handle(&self) -> AbortHandle {
        AbortHandle(self.shared.clone())
    }

    /// The fault that ended the communicator, with the rank that found it; `None` while all is well.
    ///
    /// It includes faults that a kernel of this rank reported before it ended. Faults of other ranks appear when their
    /// proxies have looked (50 us).
    pub fn fault(&self) -> Option<Notice> {
        self.shared.fault()
    }
}
