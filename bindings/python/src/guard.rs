// SPDX-License-Identifier: MIT OR Apache-2.0
//! Refusal after a fork, values that end without the interpreter lock, and waits that a signal interrupts.

use crate::error::{OrRaise, StateError};
use gin_gpu::GpuError;
use pyo3::prelude::*;
use std::mem::ManuallyDrop;
use std::ops::Deref;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::time::{Duration, Instant};

/// The process that uses gin; 0 before the first use.
static PROCESS: AtomicU32 = AtomicU32::new(0);

/// The interval at which a waiting thread looks for signals of the process, such as that of Ctrl-C.
pub(crate) const LOOK: Duration = Duration::from_millis(50);

/// Returns the process that used gin before this one was forked from it.
fn forked_from() -> Option<u32> {
    let own = std::process::id();
    match PROCESS.compare_exchange(0, own, Ordering::Relaxed, Ordering::Relaxed) {
        Err(first) if first != own => Some(first),
        _ => None,
    }
}

/// Checks that this process is the one that uses gin. A fork has neither its threads nor its GPUs.
pub(crate) fn check_process() -> PyResult<()> {
    match forked_from() {
        None => Ok(()),
        Some(first) => Err(StateError::new_err(format!(
            "process {} is a fork of process {first}, which has used gin: a fork has none of gin's threads and cannot use \
             it; start processes by \"spawn\" or \"forkserver\", or fork before the first use",
            std::process::id()
        ))),
    }
}

/// A value of gin behind a Python object. It is dropped without the interpreter lock, because its end may wait for
/// threads that take the lock, and never in a fork, which lacks these threads.
#[derive(Debug)]
pub(crate) struct Guarded<T: Send + Sync>(ManuallyDrop<Arc<T>>);

impl<T: Send + Sync> Guarded<T> {
    pub(crate) fn new(value: Arc<T>) -> Self {
        Self(ManuallyDrop::new(value))
    }

    /// Returns the value for the caller to end, if nobody else has it.
    pub(crate) fn into_last(mut self) -> Result<T, Self> {
        // Safety: `self` is forgotten below, so nothing uses it after this.
        let value = unsafe { ManuallyDrop::take(&mut self.0) };
        std::mem::forget(self);
        Arc::try_unwrap(value).map_err(Self::new)
    }

    /// Returns the value, unless this process is a fork.
    pub(crate) fn get(&self) -> PyResult<&Arc<T>> {
        check_process().map(|()| &*self.0)
    }
}

impl<T: Send + Sync> Deref for Guarded<T> {
    type Target = Arc<T>;

    fn deref(&self) -> &Arc<T> {
        &self.0
    }
}

impl<T: Send + Sync> Drop for Guarded<T> {
    fn drop(&mut self) {
        if forked_from().is_some() {
            return;
        }
        // Safety: nothing uses it after this.
        let value = unsafe { ManuallyDrop::take(&mut self.0) };
        without_lock(|| drop(value));
    }
}

/// Runs `work` without the interpreter lock, whether the caller has it or not.
pub(crate) fn without_lock(work: impl FnOnce() + Send) {
    let mut work = Some(work);
    let _ = Python::try_attach(|py| {
        if let Some(work) = work.take() {
            py.detach(work);
        }
    });
    // There is no interpreter any more.
    if let Some(work) = work {
        work();
    }
}

/// Runs `work`, which may wait, on another thread, without the interpreter lock. When a signal handler of the program
/// raises an exception, returns that exception at once; `work` goes on, and nobody gets its result.
pub(crate) fn abandonable<T: Send + 'static>(py: Python<'_>, work: impl FnOnce() -> T + Send + 'static) -> PyResult<T> {
    let (to, mut from) = sync_channel(1);
    let worker = std::thread::spawn(move || {
        let _ = to.send(work());
    });
    loop {
        let from = &mut from;
        match py.detach(move || from.recv_timeout(LOOK)) {
            Ok(value) => return Ok(value),
            Err(RecvTimeoutError::Timeout) => py.check_signals()?,
            Err(RecvTimeoutError::Disconnected) => match worker.join() {
                Err(panic) => std::panic::resume_unwind(panic),
                Ok(()) => return Err(StateError::new_err("the call has brought no result")),
            },
        }
    }
}

/// Runs `work`, which may wait, on another thread and without the interpreter lock. When a signal handler of the
/// program raises an exception, as Ctrl-C does, calls `end`, which must end the wait, and raises that exception.
pub(crate) fn interruptible<T: Send>(
    py: Python<'_>,
    end: impl Fn() + Send + Sync,
    work: impl FnOnce() -> T + Send,
) -> PyResult<T> {
    std::thread::scope(|scope| {
        let (to, mut from) = sync_channel(1);
        let worker = scope.spawn(move || {
            let _ = to.send(work());
        });
        let mut interrupted = None;
        loop {
            let from = &mut from;
            match py.detach(move || from.recv_timeout(LOOK)) {
                Ok(value) => return interrupted.map_or(Ok(value), Err),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => match py.detach(|| worker.join()) {
                    Err(panic) => std::panic::resume_unwind(panic),
                    Ok(()) => return Err(StateError::new_err("the call has brought no result")),
                },
            }
            if interrupted.is_none()
                && let Err(error) = py.check_signals()
            {
                py.detach(&end);
                interrupted = Some(error);
            }
        }
    })
}

/// Waits until `is_done`. Returns whether it was so before the limit. A signal handler that raises ends the wait.
pub(crate) fn wait_until(
    py: Python<'_>,
    limit: Option<Duration>,
    is_done: impl Fn() -> Result<bool, GpuError> + Send + Sync,
) -> PyResult<bool> {
    let start = Instant::now();
    loop {
        let done = py.detach(|| {
            let look = Instant::now();
            let mut outcome = Ok(true);
            gin_boot::rt::wait_until(|| {
                outcome = is_done();
                let over = limit.is_some_and(|limit| start.elapsed() >= limit);
                outcome != Ok(false) || over || look.elapsed() >= LOOK
            });
            outcome
        });
        if done.or_raise(py)? {
            return Ok(true);
        }
        py.check_signals()?;
        if limit.is_some_and(|limit| start.elapsed() >= limit) {
            return Ok(false);
        }
    }
}
