// SPDX-License-Identifier: MIT OR Apache-2.0
//! The engines that step proxies: progress threads, a scheduler, or the program.

use super::{Proxy, Turn, trace};
use gin_boot::{lock, rt};
use gin_virtual::Pace;
use std::cell::Cell;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, TryRecvError, channel};
use std::sync::{Arc, Mutex, MutexGuard, TryLockError, Weak};
use std::thread::JoinHandle;

/// Work that an engine steps until it is finished.
pub trait Step: Send {
    /// Does all work that is ready. Never waits.
    fn step(&mut self) -> Turn;

    /// Ends the work after a step panicked. The engine calls no further step.
    fn broke(&mut self);
}

/// A proxy, and work that the same thread steps beside it and that ends with it.
pub(crate) struct Together {
    proxy: Proxy,
    beside: Vec<Work>,
}

impl Together {
    pub(crate) fn new(proxy: Proxy, beside: Vec<Work>) -> Self {
        Self { proxy, beside }
    }
}

impl Step for Together {
    fn step(&mut self) -> Turn {
        let rank = self.proxy.parts.limits.rank;
        trace::step_begins(rank);
        let mut worked = false;
        for work in &mut self.beside {
            worked |= work.step() == Turn::Worked;
        }
        let turn = match self.proxy.step() {
            Turn::Idle if worked => Turn::Worked,
            turn => turn,
        };
        trace::step_ends(rank, turn == Turn::Worked);
        turn
    }

    fn broke(&mut self) {
        self.proxy.fail();
    }
}

/// Work to step.
pub type Work = Box<dyn Step>;

/// An engine that steps work of proxies.
pub trait Progress: Send + Sync + fmt::Debug {
    /// Steps `work` from now on until it is finished, then drops it.
    ///
    /// # Errors
    /// The system's error when no thread can be started.
    fn start(&self, name: &str, work: Work) -> std::io::Result<Running>;

    /// Returns the engine if the program steps it.
    fn manual(&self) -> Option<&ManualProgress> {
        None
    }
}

/// Work that an engine steps.
#[derive(derive_more::Debug)]
#[debug("Running {{ finished: {}, .. }}", self.is_finished())]
pub struct Running {
    finished: Box<dyn Fn() -> bool + Send + Sync>,
    thread: Option<JoinHandle<()>>,
}

impl Running {
    /// Makes the handle of work; `finished` returns whether the work is finished and dropped.
    pub fn new(finished: impl Fn() -> bool + Send + Sync + 'static) -> Self {
        Self { finished: Box::new(finished), thread: None }
    }

    /// Returns whether the work is finished and dropped.
    pub fn is_finished(&self) -> bool {
        (self.finished)()
    }

    /// Waits for the work's thread, if it has its own and the work is finished.
    pub fn join(mut self) {
        if let Some(thread) = self.thread.take() {
            // A panic of the work was caught and reported to the ranks.
            let _ = thread.join();
        }
    }
}

/// Sets its flag when dropped.
#[derive(Debug)]
struct Finishing(Arc<AtomicBool>);

impl Finishing {
    fn new() -> (Self, impl Fn() -> bool + Send + Sync + use<>) {
        let finished = Arc::new(AtomicBool::new(false));
        let look = finished.clone();
        (Self(finished), move || look.load(Ordering::Acquire))
    }
}

impl Drop for Finishing {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
    }
}

/// Takes one step. A panic in it ends the communicator, so that no thread waits for ever.
fn step(work: &mut dyn Step) -> Turn {
    catch_unwind(AssertUnwindSafe(|| work.step())).unwrap_or_else(|_| {
        work.broke();
        Turn::Finished
    })
}

/// An engine with one thread for each proxy: the default.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct OwnThreads;

impl Progress for OwnThreads {
    fn start(&self, name: &str, work: Work) -> std::io::Result<Running> {
        let (finishing, finished) = Finishing::new();
        // With no sender, the thread ends with this work.
        let (_, none) = channel();
        let thread = std::thread::Builder::new().name(name.to_owned());
        let thread = thread.spawn(move || step_all(vec![(work, finishing)], &none))?;
        Ok(Running { thread: Some(thread), ..Running::new(finished) })
    }
}

/// An engine with a fixed number of threads for all its proxies.
#[derive(Debug)]
pub struct Pool {
    threads: Vec<Sender<(Work, Finishing)>>,
    next: AtomicUsize,
}

impl Pool {
    /// Starts `threads` threads, at least one. They end after the pool and all work are dropped.
    ///
    /// # Errors
    /// The system's error when no thread can be started.
    pub fn new(threads: usize) -> std::io::Result<Self> {
        let start = |index| {
            let (sender, receiver) = channel();
            let thread = std::thread::Builder::new().name(format!("gin-pool-{index}"));
            thread.spawn(move || step_all(Vec::new(), &receiver))?;
            Ok(sender)
        };
        Ok(Self { threads: (0..threads.max(1)).map(start).collect::<std::io::Result<_>>()?, next: AtomicUsize::new(0) })
    }
}

impl Progress for Pool {
    fn start(&self, _name: &str, work: Work) -> std::io::Result<Running> {
        let (finishing, finished) = Finishing::new();
        let thread = &self.threads[self.next.fetch_add(1, Ordering::Relaxed) % self.threads.len()];
        let gone = |_| std::io::Error::other("a thread of the pool has ended");
        thread.send((work, finishing)).map_err(gone)?;
        Ok(Running::new(finished))
    }
}

/// Steps all work once, and drops what is finished, each work before its flag. Returns whether there was any to do.
fn step_once(all: &mut Vec<(Work, Finishing)>) -> bool {
    let mut worked = false;
    all.retain_mut(|(work, _)| {
        let turn = step(&mut **work);
        worked |= turn != Turn::Idle;
        turn != Turn::Finished
    });
    worked
}

thread_local! {
    /// This thread steps the work of a [`ManualProgress`].
    static STEPPING: Cell<bool> = const { Cell::new(false) };
}

/// An engine without threads: the program carries out requests of kernels, by
/// [`Communicator::progress`](crate::comm::Communicator::progress).
///
/// Each thread that has called a communicator with this engine also does so in all its waits for gin: in collective
/// calls, while it waits for a stream, and for the answers of its own proxy. While no thread does, requests of this
/// rank's kernels, signals to it, and faults of other ranks stay where they are, and kernels wait until their
/// deadlines. An abort steps the work once, so it still reaches them.
///
/// On GPUs, the calling thread's current context is then that of the communicator's device. Not for seeded worlds.
///
/// ```
/// use gin_boot::InProcess;
/// use gin_gpu::virt::VirtualDevice;
/// use gin_host::comm::{CommConfig, Communicator, Requirements};
/// use gin_host::proxy::progress::ManualProgress;
/// use std::sync::Arc;
///
/// let rank = InProcess::job(1)?.remove(0);
/// let config = CommConfig::default().progress(Arc::new(ManualProgress::default()));
/// let comm = Communicator::new(Arc::new(rank), VirtualDevice::memory_only(0), config);
/// comm.initialise(&Requirements::default())?;
/// assert!(!comm.progress()?); // no kernel has posted a request
/// comm.destroy()?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Default, derive_more::Debug)]
#[debug("ManualProgress")]
pub struct ManualProgress(Arc<Stepped>);

#[derive(Default)]
struct Stepped(Mutex<Vec<(Work, Finishing)>>);

impl ManualProgress {
    /// Does all work that is ready. Returns whether there was any. Waits for no other rank; if another thread steps the
    /// same work, waits until that has ended its step.
    pub fn step(&self) -> bool {
        within_step(|| Some(lock(&self.0.0)))
    }

    /// Makes the calling thread step the work in its waits.
    pub(crate) fn step_in_waits(&self) {
        let work: Weak<Stepped> = Arc::downgrade(&self.0);
        rt::do_meanwhile(work);
    }
}

impl rt::Meanwhile for Stepped {
    fn step(&self) -> bool {
        // A thread that waits may hold a lock that another thread's step needs, so it does not wait for that.
        within_step(|| match self.0.try_lock() {
            Ok(all) => Some(all),
            Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        })
    }
}

/// Steps the work that `take` returns, unless this thread is in a step already: a function that takes lines of kernels
/// may call gin. Returns whether there was any to do.
fn within_step<'a>(take: impl FnOnce() -> Option<MutexGuard<'a, Vec<(Work, Finishing)>>>) -> bool {
    if STEPPING.replace(true) {
        return false;
    }
    let worked = take().is_some_and(|mut all| step_once(&mut all));
    STEPPING.set(false);
    worked
}

impl Progress for ManualProgress {
    fn start(&self, _name: &str, work: Work) -> std::io::Result<Running> {
        let (finishing, finished) = Finishing::new();
        lock(&self.0.0).push((work, finishing));
        Ok(Running::new(finished))
    }

    fn manual(&self) -> Option<&ManualProgress> {
        Some(self)
    }
}

/// Steps work, also new work, until all is finished and no more can come.
fn step_all(mut all: Vec<(Work, Finishing)>, incoming: &Receiver<(Work, Finishing)>) {
    let mut pace = Pace::default();
    loop {
        loop {
            match incoming.try_recv() {
                Ok(new) => all.push(new),
                Err(TryRecvError::Empty) => break,
                Err(TryRecvError::Disconnected) if all.is_empty() => return,
                Err(TryRecvError::Disconnected) => break,
            }
        }
        if step_once(&mut all) {
            pace.worked();
        } else {
            pace.idle(all.len());
        }
    }
}
