// SPDX-License-Identifier: MIT OR Apache-2.0
//! A software NIC: the command side, over the engine of [`gin_soft_hca`].
//!
//! A [`SoftFabric`] joins the NICs of the ranks of one process. Each [`SoftHca`] parses the mailboxes that a real NIC's
//! firmware would, refuses what that would refuse, with status and syndrome ([`reason`] says in words what a syndrome
//! stands for), and owns its objects. Entries are executed when somebody calls [`SoftFabric::step`]: a scheduler, or a
//! thread ([`SoftFabric::serve`]).
//!
//! # Beside the commands
//! - Doorbells are words of the pages that [`Hca::allocate_uar`] gives; a step looks at all of them. A page holds one
//!   word, so queue pairs do not share pages ([`Hca::shares_doorbells`]).
//! - Reserved bits of a command that are not zero are refused, which firmware may not do.
//! - Packets have no numbers. Only the first ones are compared: where a queue pair expects another than its peer begins
//!   with, nothing is acknowledged.
#![warn(unreachable_pub)]

mod config;
mod device;
mod firmware;
mod memory;
mod objects;
mod place;
mod table;

pub use config::{SoftConfig, SoftGid, SoftPort};
pub use device::SoftHca;
pub use firmware::reason;
pub use gin_soft_hca::{Fault, FaultKind, Options, Violation, ViolationKind};
pub use place::{Parked, SoftEngine};

use self::objects::State;
use gin_gpu::Device;
#[cfg(doc)]
use gin_nic::hca::Hca;
use gin_nic::hca::HcaError;
use gin_soft_hca::Progress;
use gin_soft_hca::tables::{CompletionQueue, QueuePair};
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

/// How long a thread that serves a fabric naps when nothing is to do: a doorbell cannot wake it.
const NAP: Duration = Duration::from_micros(20);

/// The network that software NICs of this process are part of, and the engine of them all.
#[derive(Clone)]
pub struct SoftFabric {
    state: Arc<Mutex<State>>,
}

impl fmt::Debug for SoftFabric {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SoftFabric").field("objects", &self.objects()).finish_non_exhaustive()
    }
}

impl Default for SoftFabric {
    fn default() -> Self {
        Self::new(Options::default())
    }
}

impl SoftFabric {
    /// With no NIC yet.
    pub fn new(options: Options) -> Self {
        Self { state: Arc::new(Mutex::new(State::new(options))) }
    }

    /// Has the engine run as `engine` says, with and for `device` and all devices that it reaches. No NIC has an
    /// object yet.
    ///
    /// # Errors
    /// [`HcaError::Engine`]: what the device reports; for [`SoftEngine::Kernel`] also if its linked kernels have no
    /// `soft_hca`; if there are objects already.
    pub fn place(&self, engine: SoftEngine, device: &Arc<dyn Device>) -> Result<(), HcaError> {
        self.lock().place(engine, device)
    }

    /// Keeps the engine parked, where it is a kernel, until what is returned is dropped.
    pub fn park(&self) -> Parked {
        // In this order nothing launches it in between, because a launch needs the lock.
        let state = self.lock();
        Parked::new(state.kernel.as_ref())
    }

    /// Why the engine does nothing any more, if so.
    pub fn failure(&self) -> Option<String> {
        self.lock().broken()
    }

    /// Adds a NIC.
    pub fn add(&self, config: SoftConfig) -> SoftHca {
        let mut state = self.lock();
        state.devices.push(config);
        SoftHca { fabric: self.clone(), device: state.devices.len() as u32 - 1 }
    }

    /// Looks at the doorbells and takes one step. If the engine is a kernel, makes sure that it runs, unless a command
    /// was sent just now.
    pub fn step(&self) -> Progress {
        // Others may run while a simulated clock is read, so not with the lock held.
        let now_ns = gin_gpu::rt::clock_ns();
        let mut state = self.lock_as_it_is();
        if state.kernel.is_some() {
            state.tend();
            return Progress::Idle;
        }
        state.step(now_ns)
    }

    /// Steps until nothing is to do. Where the engine is a kernel it goes on by itself.
    pub fn settle(&self) {
        while self.step() != Progress::Idle {}
    }

    /// Puts into view whatever was written and may be out of it still. In hardware that happens by itself, soon.
    pub fn deliver(&self) {
        self.lock().settle(0, u64::MAX);
    }

    /// Steps on a thread of its own, until what is returned is dropped.
    ///
    /// # Errors
    /// The operating system's error if there can be no thread.
    pub fn serve(&self) -> Result<Server, std::io::Error> {
        let stop = Arc::new(AtomicBool::new(false));
        let (fabric, stopped) = (self.clone(), Arc::clone(&stop));
        let thread = std::thread::Builder::new().name("gin-soft-hca".to_owned()).spawn(move || {
            while !stopped.load(Ordering::Relaxed) {
                if fabric.step() == Progress::Idle {
                    std::thread::sleep(NAP);
                }
            }
        })?;
        Ok(Server { stop, thread: Some(thread) })
    }

    /// Makes something go wrong once.
    ///
    /// # Errors
    /// [`HcaError::Engine`] if more is to go wrong at a time than the engine has room for.
    pub fn inject(&self, fault: Fault) -> Result<(), HcaError> {
        self.lock().inject(fault).map_err(|_| no_engine("there is no room for one more fault"))
    }

    /// Returns the first violation by a user of the NICs, and the number of all.
    pub fn violations(&self) -> (Option<Violation>, u64) {
        self.lock().core[0].engine.violations()
    }

    /// Number of objects of all NICs.
    pub fn objects(&self) -> usize {
        self.lock().objects.len()
    }

    /// Changes a NIC: a port goes down, a limit falls. What was made before stays as it is.
    ///
    /// # Panics
    /// If `hca` is of another fabric.
    pub fn change(&self, hca: &SoftHca, change: impl FnOnce(&mut SoftConfig)) {
        assert!(Arc::ptr_eq(&self.state, &hca.fabric.state), "a NIC of another fabric");
        change(&mut self.lock().devices[hca.device as usize]);
    }

    /// A queue pair as it is now, by its number.
    pub fn queue(&self, number: u32) -> Option<QueuePair> {
        self.lock().queues.get(number as usize).copied().filter(|queue| queue.live)
    }

    /// A completion queue as it is now, by its number.
    pub fn completion_queue(&self, number: u32) -> Option<CompletionQueue> {
        self.lock().completions.get(number as usize).copied().filter(|queue| queue.live)
    }

    /// The state, parked if the engine is a kernel.
    fn lock(&self) -> MutexGuard<'_, State> {
        let mut state = self.lock_as_it_is();
        state.park();
        state
    }

    fn lock_as_it_is(&self) -> MutexGuard<'_, State> {
        // A test that failed with the lock held says more than a second panic.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// That the engine cannot be had, or not any more.
fn no_engine(reason: impl fmt::Display) -> HcaError {
    HcaError::Engine { reason: reason.to_string() }
}

/// Steps a [`SoftFabric`] until it is dropped.
#[derive(Debug)]
pub struct Server {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            // A panic of the engine was printed when it happened.
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests;
