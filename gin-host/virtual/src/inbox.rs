// SPDX-License-Identifier: MIT OR Apache-2.0
//! Delivery of work to an engine, from its own coroutines and, in the threads mode, from other OS threads.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use crate::config::DeviceConfig;
use crate::error::{LaunchError, WaitReport};
use crate::grid::{Grid, GridRun, StreamId};
use crate::lock::lock;

/// Longest nap of a device whose threads all poll in vain, so that it does not miss a host's answer for long.
const IDLE_NAP_NS: u64 = 50_000;
/// Rounds of vain polling during which the device only yields.
const EAGER_TURNS: u32 = 16;

pub(crate) struct HostSpec {
    pub(crate) rank: u32,
    pub(crate) body: Box<dyn FnOnce() + Send>,
}

pub(crate) struct ServiceSpec {
    pub(crate) index: u32,
    pub(crate) name: Arc<str>,
    pub(crate) body: Box<dyn FnOnce() + Send>,
}

pub(crate) enum Mail {
    Launch(Arc<GridRun>, Arc<DeviceCore>),
    Host(HostSpec),
    Service(ServiceSpec),
    /// Ends all grids, for this reason.
    EndGrids(String),
    /// Asks for a report of all waiters.
    Report(Sender<WaitReport>),
}

#[derive(Default)]
pub(crate) struct Inbox {
    mail: Mutex<Vec<Mail>>,
    /// True if there may be mail; read without the lock at every turn.
    any: AtomicBool,
    closed: AtomicBool,
    arrived: Condvar,
}

impl Inbox {
    fn lock(&self) -> MutexGuard<'_, Vec<Mail>> {
        lock(&self.mail)
    }

    pub(crate) fn post(&self, mail: Mail) {
        let mut list = self.lock();
        list.push(mail);
        self.any.store(true, Ordering::Release);
        self.arrived.notify_all();
    }

    pub(crate) fn take(&self) -> Vec<Mail> {
        if !self.any.load(Ordering::Acquire) {
            return Vec::new();
        }
        let mut list = self.lock();
        self.any.store(false, Ordering::Release);
        std::mem::take(&mut *list)
    }

    pub(crate) fn close(&self) {
        let _list = self.lock();
        self.closed.store(true, Ordering::Release);
        self.arrived.notify_all();
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }

    /// Waits until mail arrives or the inbox is closed.
    pub(crate) fn wait(&self) {
        let mut list = self.lock();
        while list.is_empty() && !self.is_closed() {
            list = self.arrived.wait(list).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Lets other OS threads run for about `ns`, longer after many idle turns, at most until mail arrives.
    pub(crate) fn nap(&self, ns: u64, idle_turns: u32) {
        if idle_turns < EAGER_TURNS && ns < IDLE_NAP_NS {
            std::thread::yield_now();
            return;
        }
        let list = self.lock();
        if list.is_empty() && !self.is_closed() {
            let ns = ns.max((u64::from(idle_turns) * 1000).min(IDLE_NAP_NS));
            // The caller does not depend on the length of the nap.
            let _ = self.arrived.wait_timeout(list, Duration::from_nanos(ns));
        }
    }
}

/// Grids of a device that have not ended.
#[derive(Default)]
struct DeviceGrids {
    launches: u32,
    running: Vec<Arc<GridRun>>,
}

/// A device, shared by its world, its handles and its engine.
pub(crate) struct DeviceCore {
    pub(crate) index: u32,
    pub(crate) config: DeviceConfig,
    pub(crate) inbox: Arc<Inbox>,
    /// The reason for which the device has no OS thread, if it should have one.
    pub(crate) refusal: OnceLock<String>,
    grids: Mutex<DeviceGrids>,
}

impl DeviceCore {
    pub(crate) fn new(index: u32, config: DeviceConfig, inbox: Arc<Inbox>) -> Self {
        DeviceCore { index, config, inbox, refusal: OnceLock::new(), grids: Mutex::default() }
    }

    fn grids(&self) -> MutexGuard<'_, DeviceGrids> {
        lock(&self.grids)
    }

    pub(crate) fn launch(self: &Arc<Self>, stream: StreamId, grid: Grid) -> Result<Arc<GridRun>, LaunchError> {
        grid.check()?;
        let run = {
            let mut grids = self.grids();
            if grid.cooperative {
                self.check_resident(&grids, stream, &grid)?;
            }
            grids.launches += 1;
            let run = Arc::new(GridRun::new(grid, self.index, stream, grids.launches, self.config.stack_bytes));
            grids.running.push(run.clone());
            run
        };
        if self.inbox.is_closed() {
            let reason = match self.refusal.get() {
                Some(cause) => format!("the device has no thread to run it: {cause}"),
                None => "the device has been shut down".to_owned(),
            };
            run.finish(Err(LaunchError::WorldEnded { grid: run.grid.name.clone(), reason }));
            self.finished(&run);
        } else {
            self.inbox.post(Mail::Launch(run.clone(), self.clone()));
        }
        Ok(run)
    }

    /// Fails if a cooperative grid cannot be wholly resident. Grids of its stream end before it begins; grids of all
    /// other streams may run as long as it does.
    fn check_resident(&self, grids: &DeviceGrids, stream: StreamId, grid: &Grid) -> Result<(), LaunchError> {
        let limit = u64::from(self.config.resident_blocks.max(1));
        let others = grids.running.iter().filter(|run| run.stream != stream);
        let used: u64 = others.map(|run| run.grid.blocks().min(limit)).fold(0, u64::saturating_add);
        let (blocks, free) = (grid.blocks(), limit.saturating_sub(used));
        if blocks <= free {
            return Ok(());
        }
        Err(LaunchError::NotResident { grid: grid.name.clone(), rank: self.index, blocks, free, limit })
    }

    /// Removes a grid that the engine has ended.
    pub(crate) fn finished(&self, run: &Arc<GridRun>) {
        self.grids().running.retain(|other| !Arc::ptr_eq(other, run));
    }

    pub(crate) fn is_idle(&self) -> bool {
        self.grids().running.is_empty()
    }
}
