// SPDX-License-Identifier: MIT OR Apache-2.0
//! Streams, and the values that their kernels use.

use crate::guard::Guarded;
use crate::tensor::Tensor;
use gin_boot::lock;
use gin_gpu::{Device, Event, GpuError, MemorySlice};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use std::collections::VecDeque;
use std::sync::{Arc, Mutex};

/// A value that lives until a kernel has ended.
#[derive(Debug)]
pub(crate) enum Held {
    /// A communicator, a window, or the owner of a parameter.
    Object(Py<PyAny>),
    /// A tensor whose address the kernel has.
    #[expect(dead_code, reason = "it lives as long as this")]
    Tensor(Tensor),
    /// Memory behind received rows.
    #[expect(dead_code, reason = "it lives as long as this")]
    Memory(Vec<MemorySlice>),
}

/// The number of values for the use of kernels at which a launch marks the stream.
const MARK_AT: usize = 16;

/// The values that kernels use which have not been seen to end.
#[derive(Debug, Default)]
pub(crate) struct KeepAlive {
    /// Each with the number of the last launch that uses it.
    held: Vec<(u64, Held)>,
    pub(crate) launches: u64,
    /// Events after a launch and all before, oldest first.
    marks: VecDeque<(u64, Box<dyn Event>)>,
    /// The number of values that were added since the last mark.
    unmarked: usize,
}

impl KeepAlive {
    /// Removes and returns what no launch after this one uses.
    pub(crate) fn take(&mut self, launch: u64) -> Vec<Held> {
        let (gone, held) = std::mem::take(&mut self.held).into_iter().partition(|(last, _)| *last <= launch);
        self.held = held;
        self.marks.retain(|(number, _)| *number > launch);
        gone.into_iter().map(|(_, value)| value).collect()
    }
}

/// A stream, and what its kernels use.
#[derive(Debug)]
pub(crate) struct Work {
    pub(crate) stream: Arc<dyn gin_gpu::Stream>,
    pub(crate) keep_alive: Mutex<KeepAlive>,
    /// The program's object of a stream of its own.
    _owner: Option<Py<PyAny>>,
}

impl Work {
    pub(crate) fn new(stream: Arc<dyn gin_gpu::Stream>, owner: Option<Py<PyAny>>) -> Arc<Self> {
        Arc::new(Self { stream, keep_alive: Mutex::default(), _owner: owner })
    }

    /// Adds what a kernel uses that the caller launches next, while it has the interpreter lock. Returns what is not
    /// used any more.
    pub(crate) fn hold(&self, held: Vec<Held>) -> Result<Vec<Held>, GpuError> {
        let mut keep_alive = lock(&self.keep_alive);
        let mut gone = Vec::new();
        let marks = keep_alive.unmarked >= MARK_AT || !keep_alive.marks.is_empty();
        // A stream that is captured must not be asked, and its kernels run later.
        if marks && !self.stream.is_capturing()? {
            if keep_alive.unmarked >= MARK_AT {
                let mark = (keep_alive.launches, self.stream.record()?);
                keep_alive.marks.push_back(mark);
                keep_alive.unmarked = 0;
            }
            while let Some((launch, mark)) = keep_alive.marks.front() {
                if !mark.is_done()? {
                    break;
                }
                let ended = *launch;
                gone.extend(keep_alive.take(ended));
            }
        }
        keep_alive.launches += 1;
        let launch = keep_alive.launches;
        for value in held {
            let known = |(_, other): &&mut (u64, Held)| match (other, &value) {
                (Held::Object(other), Held::Object(value)) => other.is(value),
                _ => false,
            };
            match keep_alive.held.iter_mut().find(known) {
                Some((last, _)) => *last = launch,
                None => {
                    keep_alive.held.push((launch, value));
                    keep_alive.unmarked += 1;
                }
            }
        }
        Ok(gone)
    }
}

impl Drop for Work {
    fn drop(&mut self) {
        // A kernel that still runs may use them. Nothing tells when it ends.
        if !matches!(self.stream.is_capturing(), Ok(false)) || !matches!(self.stream.is_idle(), Ok(true)) {
            std::mem::forget(std::mem::take(&mut lock(&self.keep_alive).held));
        }
    }
}

/// Kernels of one rank in order. `Rank.stream` makes it.
#[pyclass(frozen, module = "gincomm")]
#[derive(Debug)]
pub(crate) struct Stream(pub(crate) Guarded<Work>);

impl Stream {
    pub(crate) fn new(work: Arc<Work>) -> Self {
        Self(Guarded::new(work))
    }

    pub(crate) fn work(&self) -> PyResult<&Arc<Work>> {
        self.0.get()
    }
}

/// Checks that a value and a stream belong to the same rank.
pub(crate) fn check_device(what: impl std::fmt::Display, own: &dyn Device, stream: &dyn Device) -> PyResult<()> {
    // Ranks that share a GPU have device objects of their own.
    if std::ptr::addr_eq(own, stream) {
        return Ok(());
    }
    let (own, other) = (own.name(), stream.name());
    Err(PyValueError::new_err(format!(
        "{what} belongs to a rank on {own}, and the stream to another rank, on {other}: pass both of one rank"
    )))
}
