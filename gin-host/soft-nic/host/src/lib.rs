// SPDX-License-Identifier: MIT OR Apache-2.0
//! A software NIC: the command side, over the engine of [`gin_soft_nic`].
//!
//! A [`SoftFabric`] joins the NICs of the ranks of one process. Each [`SoftHca`] parses the mailboxes that a real NIC's
//! firmware parses, refuses commands that firmware would refuse, with status and syndrome ([`reason`] describes a
//! syndrome), and owns its objects. [`SoftFabric::step`] executes entries; a scheduler calls it, or a thread
//! ([`SoftFabric::serve`]).
//!
//! # Beside the commands
//! - Doorbells are words of the pages that [`Hca::allocate_uar`] returns. A step looks at all of them. A page has one
//!   doorbell, so queue pairs do not share pages ([`Hca::shares_doorbells`]).
//! - No command registers memory for rings ([`Hca::register_umem`]) or allocates a doorbell page: the Linux driver
//!   sends these commands itself.
//! - Commands with reserved bits that are not zero are refused. Firmware may accept them.
//! - Packets have no sequence numbers. Only the initial numbers are compared: a queue pair that expects another number
//!   than its peer's acknowledges nothing.
#![warn(unreachable_pub)]

mod config;
mod device;
mod firmware;
mod kernel;
mod memory;
mod objects;
mod place;
mod reason;
mod table;

pub use config::{SoftConfig, SoftGid, SoftPort};
pub use device::SoftHca;
pub use gin_soft_nic::{Fault, FaultKind, Options, Progress, Violation, ViolationKind};
pub use kernel::Parked;
pub use place::SoftEngine;
pub use reason::reason;

use self::objects::HcaState;
use gin_gpu::Device;
#[cfg(doc)]
use gin_nic::hca::Hca;
use gin_nic::hca::HcaError;
use gin_soft_nic::tables::{CompletionQueue, QueuePair};
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::Duration;

/// The time that a thread that serves a fabric sleeps without work, because a doorbell cannot wake it.
const NAP: Duration = Duration::from_micros(20);

/// The network of software NICs of this process, with their common engine.
///
/// ```
/// use gin_nic::hca::Hca;
/// use gin_soft_nic_host::{Options, SoftConfig, SoftFabric};
///
/// let fabric = SoftFabric::new(Options::default());
/// let nic = fabric.add(SoftConfig::ethernet(0));
/// assert!(nic.port(1).unwrap().active && fabric.objects() == 0);
/// ```
#[derive(Clone, derive_more::Debug)]
#[debug("SoftFabric {{ objects: {}, .. }}", self.objects())]
pub struct SoftFabric {
    state: Arc<Mutex<HcaState>>,
}

impl Default for SoftFabric {
    fn default() -> Self {
        Self::new(Options::default())
    }
}

impl SoftFabric {
    /// Makes a network without NICs.
    pub fn new(options: Options) -> Self {
        Self { state: Arc::new(Mutex::new(HcaState::new(options))) }
    }

    /// Moves the engine to `engine`, for `device` and all devices that it reaches. No NIC may have an
    /// object yet.
    ///
    /// # Errors
    /// [`HcaError::Engine`] with an error of the device, or if there are objects already, or if the kernel `soft_hca`
    /// is not among the device's linked kernels ([`SoftEngine::Kernel`]).
    pub fn place(&self, engine: SoftEngine, device: &Arc<dyn Device>) -> Result<(), HcaError> {
        self.lock().place(engine, device)
    }

    /// Parks the engine, if it is a kernel, until the result is dropped.
    pub fn park(&self) -> Parked {
        // In this order the engine cannot be launched in between, because a launch needs the lock.
        let state = self.lock();
        Parked::new(state.kernel.as_ref())
    }

    /// Returns the reason why the engine has stopped; `None` while it works. The engine goes on meanwhile, so a wait
    /// may ask repeatedly.
    pub fn failure(&self) -> Option<String> {
        let mut state = self.lock_as_it_is();
        if let Some(kernel) = &mut state.kernel {
            kernel.look();
        }
        state.broken()
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
        // Without the lock, because other ranks may run while a simulated clock is read.
        let now_ns = gin_gpu::rt::clock_ns();
        let mut state = self.lock_as_it_is();
        if state.kernel.is_some() {
            state.tend(now_ns);
            return Progress::Idle;
        }
        state.step(now_ns)
    }

    /// Steps until no work is left. Returns at once if the engine is a kernel, which works by itself.
    pub fn settle(&self) {
        while self.step() != Progress::Idle {}
    }

    /// Makes all completed writes visible. Hardware does so by itself after some time.
    pub fn deliver(&self) {
        self.lock().settle(0, u64::MAX);
    }

    /// Starts a thread that steps until the result is dropped.
    ///
    /// # Errors
    /// An error of the operating system if it refuses a thread.
    pub fn serve(&self) -> Result<Server, std::io::Error> {
        let stop = Arc::new(AtomicBool::new(false));
        let (fabric, stopped) = (self.clone(), Arc::clone(&stop));
        let thread = std::thread::Builder::new().name("gin-soft-nic".to_owned()).spawn(move || {
            while !stopped.load(Ordering::Relaxed) {
                if fabric.step() == Progress::Idle {
                    std::thread::sleep(NAP);
                }
            }
        })?;
        Ok(Server { stop, thread: Some(thread) })
    }

    /// Injects a fault once.
    ///
    /// # Errors
    /// [`HcaError::Engine`] if the engine has no room for another pending fault.
    pub fn inject(&self, fault: Fault) -> Result<(), HcaError> {
        self.lock().inject(fault).map_err(|_| no_engine("there is no room for one more fault"))
    }

    /// Returns the first violation by a user of the NICs, and the number of violations.
    pub fn violations(&self) -> (Option<Violation>, u64) {
        self.lock().core[0].engine.violations()
    }

    /// Returns the number of objects of all NICs.
    pub fn objects(&self) -> usize {
        self.lock().objects.len()
    }

    /// Changes the properties of a NIC, such as the state of a port or a limit. Existing objects do not change.
    ///
    /// # Panics
    /// If `hca` belongs to another fabric.
    pub fn change(&self, hca: &SoftHca, change: impl FnOnce(&mut SoftConfig)) {
        assert!(Arc::ptr_eq(&self.state, &hca.fabric.state), "a NIC of another fabric");
        change(&mut self.lock().devices[hca.device as usize]);
    }

    /// Returns the state of a queue pair, by its number.
    pub fn queue(&self, number: u32) -> Option<QueuePair> {
        self.lock().queues.get(number as usize).copied().filter(|queue| queue.live)
    }

    /// Returns the state of a completion queue, by its number.
    pub fn completion_queue(&self, number: u32) -> Option<CompletionQueue> {
        self.lock().completions.get(number as usize).copied().filter(|queue| queue.live)
    }

    /// Locks the state, and parks the engine if it is a kernel.
    fn lock(&self) -> MutexGuard<'_, HcaState> {
        let mut state = self.lock_as_it_is();
        if let Some(kernel) = &mut state.kernel {
            kernel.park();
        }
        state
    }

    fn lock_as_it_is(&self) -> MutexGuard<'_, HcaState> {
        // Ignores the poison: the first panic says more than a second one.
        gin_gpu::lock(&self.state)
    }
}

/// Returns the error of an engine that is not available, or has stopped.
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
            // A panic of the engine has been printed already.
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests;
