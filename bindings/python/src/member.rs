// SPDX-License-Identifier: MIT OR Apache-2.0
//! The communicators of this process, as their windows, launches and groups use them.

use crate::error::{OrRaise, StateError};
use crate::guard::interruptible;
use gin_boot::lock;
use gin_gpu::Keep;
use gin_host::comm::{CommError, CommState, Communicator, Requirements, Window};
use pyo3::prelude::*;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, RwLock, RwLockReadGuard, RwLockWriteGuard, Weak};

/// The communicators of this process.
static MEMBERS: Mutex<Vec<Weak<Member>>> = Mutex::new(Vec::new());

/// Aborts and destroys all communicators of this process. One whose kernels run stays as it is.
pub(crate) fn end_all() {
    let members = std::mem::take(&mut *lock(&MEMBERS));
    for member in members.iter().filter_map(Weak::upgrade) {
        member.comm.abort_handle().abort();
        let _ = member.comm.destroy();
    }
}

/// One rank's member of a communicator.
#[derive(Debug)]
pub(crate) struct Member {
    pub(crate) comm: Communicator,
    /// Shared by launches, exclusive for calls that end what kernels use.
    gate: RwLock<()>,
    /// The tensors in memory of gin that are windows, by the window's number. Their memory keeps no tensor.
    pub(crate) tensors: Mutex<HashMap<u32, Keep>>,
}

impl Member {
    pub(crate) fn new(comm: Communicator) -> Self {
        Self { comm, gate: RwLock::new(()), tensors: Mutex::default() }
    }

    /// Brings the communicator up. Collective.
    pub(crate) fn initialise(self: &Arc<Self>, py: Python<'_>, requirements: &Requirements) -> PyResult<()> {
        let bootstrap = self.comm.bootstrap().clone();
        interruptible(py, || bootstrap.abort(), || self.comm.initialise(requirements))?.or_raise(py)?;
        let mut members = lock(&MEMBERS);
        members.retain(|member| member.strong_count() > 0);
        members.push(Arc::downgrade(self));
        Ok(())
    }

    /// Lets nobody end the communicator or a window while the guard lives.
    pub(crate) fn launching(&self) -> PyResult<RwLockReadGuard<'_, ()>> {
        let busy = "cannot launch: a window or the communicator is just being ended by another thread";
        self.gate.try_read().map_err(|_| StateError::new_err(busy))
    }

    /// Lets nobody launch while the guard lives.
    pub(crate) fn ending(&self) -> PyResult<RwLockWriteGuard<'_, ()>> {
        let busy = "cannot end it: another thread is launching a kernel with this communicator, or is ending it";
        self.gate.try_write().map_err(|_| StateError::new_err(busy))
    }

    /// Deregisters a window. Collective.
    pub(crate) fn deregister(&self, py: Python<'_>, window: &Window<u8>) -> PyResult<()> {
        let _ending = self.ending()?;
        self.wait(py, || self.comm.deregister(window))?;
        let tensor = lock(&self.tensors).remove(&window.id());
        drop(tensor);
        Ok(())
    }

    /// Refuses a call that uses the communicator, if that is destroyed.
    pub(crate) fn check_usable(&self, call: &str) -> PyResult<()> {
        match self.comm.state() {
            CommState::Destroyed => Err(StateError::new_err(format!("cannot {call}: the communicator is destroyed"))),
            _ => Ok(()),
        }
    }

    /// Waits for other ranks in a collective call, which a signal ends by an abort.
    pub(crate) fn wait<T: Send>(
        &self,
        py: Python<'_>,
        work: impl FnOnce() -> Result<T, CommError> + Send,
    ) -> PyResult<T> {
        let handle = self.comm.abort_handle();
        interruptible(py, || handle.abort(), work)?.or_raise(py)
    }
}
