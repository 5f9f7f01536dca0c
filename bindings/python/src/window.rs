// SPDX-License-Identifier: MIT OR Apache-2.0
//! Windows.

use crate::dlpack::is_ordered;
use crate::dtype::DType;
use crate::error::StateError;
use crate::guard::Guarded;
use crate::member::Member;
use crate::memory::note;
use crate::region::{Region, Users};
use gin_host::comm::CommState;
use pyo3::prelude::*;
use pyo3::types::PyTuple;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// This rank's part of a window.
#[derive(Debug)]
pub(crate) struct Part {
    pub(crate) window: gin_host::comm::Window<u8>,
    pub(crate) member: Arc<Member>,
    pub(crate) region: Region,
    pub(crate) users: Arc<Users>,
    /// It is deregistered.
    gone: AtomicBool,
}

impl Part {
    pub(crate) fn new(
        window: gin_host::comm::Window<u8>,
        member: Arc<Member>,
        dtype: DType,
        shape: Vec<i64>,
    ) -> Arc<Self> {
        note(window.memory().memory());
        let region = Region::new(Arc::new(window.clone()), window.memory(), dtype, shape);
        Arc::new(Self { window, member, region, users: Arc::default(), gone: AtomicBool::new(false) })
    }
}

/// A window: one part on each rank, which kernels of all ranks reach. This rank's part is a tensor by DLPack.
#[pyclass(frozen, module = "gincomm")]
#[derive(Debug)]
pub(crate) struct Window(Guarded<Part>);

impl Window {
    pub(crate) fn new(part: Arc<Part>) -> Self {
        Self(Guarded::new(part))
    }

    /// Returns the part of a window that is registered.
    pub(crate) fn part(&self) -> PyResult<&Arc<Part>> {
        let part = self.0.get()?;
        let refuse = |reason| Err(StateError::new_err(format!("window {} cannot be used: {reason}", part.window.id())));
        if part.gone.load(Ordering::Acquire) {
            return refuse("it is deregistered");
        }
        if part.member.comm.state() == CommState::Destroyed {
            return refuse("its communicator is destroyed");
        }
        Ok(part)
    }
}

#[pymethods]
impl Window {
    /// Returns the number, which is the same on all ranks.
    #[getter]
    fn id(&self) -> PyResult<u32> {
        Ok(self.0.get()?.window.id())
    }

    /// Returns the address of the window's entry in the GPU's memory: a window of `gincomm.triton`.
    #[getter]
    fn handle(&self) -> PyResult<u64> {
        Ok(self.part()?.window.handle().data)
    }

    /// Returns the name, which reports of faults print.
    #[getter]
    fn name(&self) -> PyResult<Option<String>> {
        Ok(self.0.get()?.window.name())
    }

    /// Returns the type of the elements, as NumPy and torch name it.
    #[getter]
    fn dtype(&self) -> PyResult<&'static str> {
        Ok(self.0.get()?.region.dtype.name())
    }

    /// Returns the shape of this rank's part.
    #[getter]
    fn shape<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, &self.0.get()?.region.shape)
    }

    /// Returns the bytes of this rank's part.
    #[getter]
    fn nbytes(&self) -> PyResult<usize> {
        Ok(self.0.get()?.window.len())
    }

    /// Returns the bytes of a rank's part.
    fn nbytes_on(&self, rank: u32) -> PyResult<usize> {
        let part = self.0.get()?;
        let refuse = || StateError::new_err(format!("there is no rank {rank} in {} ranks", part.member.comm.ranks()));
        part.window.len_on(rank).ok_or_else(refuse)
    }

    /// Ends the window. Collective. Tensors of it keep its memory.
    fn deregister(&self, py: Python<'_>) -> PyResult<()> {
        let part = self.part()?;
        part.member.deregister(py, &part.window)?;
        part.gone.store(true, Ordering::Release);
        Ok(())
    }

    /// Returns a DLPack capsule of this rank's part. NumPy and torch call it in `from_dlpack`. On a virtual GPU it
    /// waits for the kernels that were launched with this window, because tensors of CPUs have no streams.
    #[pyo3(signature = (*, stream=None, max_version=None, dl_device=None, copy=None))]
    fn __dlpack__<'py>(
        &self,
        py: Python<'py>,
        stream: Option<Bound<'py, PyAny>>,
        max_version: Option<(u32, u32)>,
        dl_device: Option<(i32, i32)>,
        copy: Option<bool>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let part = self.part()?;
        // On GPUs the program orders kernels and tensors.
        if is_ordered(stream.as_ref()) {
            part.users.wait(py)?;
        }
        part.region.hand_out(py, max_version, dl_device, copy)
    }

    /// Returns the DLPack device: its type and its number.
    fn __dlpack_device__(&self) -> PyResult<(i32, i32)> {
        Ok(self.0.get()?.region.place())
    }

    fn __repr__(&self) -> PyResult<String> {
        let Part { window, region: Region { dtype, shape, .. }, gone, .. } = &**self.0.get()?;
        let end = if gone.load(Ordering::Acquire) { ", deregistered" } else { "" };
        Ok(format!("<gincomm.Window {}: {shape:?} of {}{end}>", window.id(), dtype.name()))
    }
}
