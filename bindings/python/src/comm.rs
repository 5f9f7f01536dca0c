// SPDX-License-Identifier: MIT OR Apache-2.0
//! Communicators.

use crate::dlpack::elements;
use crate::dtype::DType;
use crate::error::{OrRaise, fault};
use crate::guard::Guarded;
use crate::member::Member;
use crate::memory::given;
use crate::tensor::Tensor;
use crate::window::{Part, Window};
use gin_boot::lock;
use gin_gpu::{Device, Memory, MemorySlice};
use gin_host::comm::{CommError, CommState, Requirements, WindowFlags};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};
use std::sync::Arc;

/// One rank's member of a group of ranks that share windows, signals and counters. `Rank.communicator` makes it.
#[pyclass(frozen, module = "gincomm")]
#[derive(Debug)]
pub(crate) struct Communicator(Guarded<Member>);

impl Communicator {
    /// Makes a communicator and brings it up. Collective.
    pub(crate) fn new(
        py: Python<'_>,
        comm: gin_host::comm::Communicator,
        requirements: &Requirements,
    ) -> PyResult<(Self, Arc<Member>)> {
        let member = Arc::new(Member::new(comm));
        let guarded = Guarded::new(member.clone());
        member.initialise(py, requirements)?;
        Ok((Self(guarded), member))
    }

    pub(crate) fn member(&self) -> PyResult<&Arc<Member>> {
        self.0.get()
    }

    fn window(
        &self,
        window: gin_host::comm::Window<u8>,
        dtype: DType,
        shape: Vec<i64>,
        name: Option<String>,
    ) -> PyResult<Window> {
        let window = match name {
            Some(name) => window.named(name),
            None => window,
        };
        Ok(Window::new(Part::new(window, self.0.get()?.clone(), dtype, shape)))
    }
}

/// Reads the elements of memory for windows. Also returns the bytes.
pub(crate) fn extent(shape: &Bound<'_, PyAny>, dtype: &Bound<'_, PyAny>) -> PyResult<(DType, Vec<i64>, usize)> {
    let dtype = DType::named(dtype)?;
    let shape: Vec<i64> = shape.extract().or_else(|_| shape.extract().map(|length| vec![length]))?;
    let bytes = elements(&shape).and_then(|count| usize::try_from(count.checked_mul(dtype.bytes())?).ok());
    let bytes = bytes.ok_or_else(|| PyValueError::new_err(format!("a window cannot have the shape {shape:?}")))?;
    Ok((dtype, shape, bytes))
}

fn flags(signals: bool) -> WindowFlags {
    if signals { WindowFlags::SIGNALS } else { WindowFlags::NONE }
}

/// Makes memory of a tensor, which the memory keeps alive.
pub(crate) fn memory(device: &Arc<dyn Device>, tensor: Tensor) -> Result<Arc<Memory>, CommError> {
    let (address, bytes) = (tensor.address, tensor.bytes);
    if bytes == 0 {
        return Ok(Memory::new(device, gin_gpu::MemoryKind::Device, 0)?);
    }
    let keep = Arc::new(tensor);
    #[cfg(feature = "cuda")]
    if let Some(gpu) = gin_gpu::cuda::CudaDevice::of(&**device) {
        // Safety: the tensor owns the memory, and docs/python.md says how the program may use it.
        return Ok(unsafe { gpu.import_kept(address, bytes, keep)? });
    }
    // Safety: as above.
    Ok(unsafe { virtual_gpu(device)?.import_kept(address, bytes, keep)? })
}

/// Makes memory of a tensor for a window. Ranks in other processes map it, if they can.
fn memory_of_window(comm: &gin_host::comm::Communicator, tensor: Tensor) -> Result<MemorySlice, CommError> {
    #[cfg(feature = "cuda")]
    if let Some(gpu) = gin_gpu::cuda::CudaDevice::of(&**comm.gpu()).filter(|_| tensor.bytes > 0) {
        let (address, bytes, across) = (tensor.address, tensor.bytes, comm.bootstrap().is_across_processes());
        // Safety: as above.
        return Ok(unsafe { gpu.import_for_ranks(address, bytes, Some(Arc::new(tensor)), across)? });
    }
    Ok(memory(comm.gpu(), tensor)?.whole())
}

impl Tensor {
    /// Makes memory of a tensor that has elements. The program keeps the tensor.
    pub(crate) fn lent_to(&self, device: &Arc<dyn Device>) -> Result<Arc<Memory>, CommError> {
        let (address, bytes) = (self.address, self.bytes);
        #[cfg(feature = "cuda")]
        if let Some(gpu) = gin_gpu::cuda::CudaDevice::of(&**device) {
            // Safety: the tensor's library says where it is; docs/python.md says how long the program keeps it.
            let lent = unsafe {
                match self.is_of_torch() {
                    true => gpu.assume_memory(address, bytes)?,
                    false => gpu.import_memory(address, bytes)?,
                }
            };
            return Ok(lent);
        }
        // Safety: as above.
        Ok(unsafe { virtual_gpu(device)?.import_memory(address, bytes)? })
    }
}

fn virtual_gpu(device: &Arc<dyn Device>) -> Result<&gin_gpu::virt::VirtualDevice, CommError> {
    let gpu = device.downcast::<gin_gpu::virt::VirtualDevice>();
    gpu.ok_or(CommError::NotRegistrable { reason: "the device takes no memory of the program" })
}

#[pymethods]
impl Communicator {
    /// Returns the world rank.
    #[getter]
    fn rank(&self) -> PyResult<u32> {
        Ok(self.0.get()?.comm.rank())
    }

    /// Returns the number of ranks.
    #[getter]
    fn ranks(&self) -> PyResult<u32> {
        Ok(self.0.get()?.comm.ranks())
    }

    /// Returns the address of the communicator's handle in the GPU's memory: the argument `comm` of `gincomm.triton`.
    #[getter]
    fn handle(&self, py: Python<'_>) -> PyResult<u64> {
        Ok(self.0.get()?.comm.device().or_raise(py)?.handle().copy)
    }

    /// Returns the state: "active", "aborted" or "destroyed".
    #[getter]
    fn state(&self) -> PyResult<String> {
        Ok(self.0.get()?.comm.state().to_string())
    }

    /// Returns the back end in use: "Proxy" or "Gdaki".
    #[getter]
    fn backend(&self, py: Python<'_>) -> PyResult<String> {
        Ok(format!("{:?}", self.0.get()?.comm.backend().or_raise(py)?))
    }

    /// Allocates this rank's part of a new window, zeroed, and registers it. Collective; shapes may differ by rank.
    #[pyo3(signature = (shape, dtype, *, signals=false, name=None))]
    fn alloc_window(
        &self,
        shape: &Bound<'_, PyAny>,
        dtype: &Bound<'_, PyAny>,
        signals: bool,
        name: Option<String>,
    ) -> PyResult<Window> {
        let (py, member) = (shape.py(), self.0.get()?);
        let (dtype, shape, bytes) = extent(shape, dtype)?;
        let window = member.wait(py, || member.comm.alloc_window::<u8>(bytes, flags(signals)))?;
        self.window(window, dtype, shape, name)
    }

    /// Registers a tensor's memory as this rank's part of a window, without a copy. Collective.
    /// Memory of a window can be in windows of other communicators, also of later jobs.
    ///
    /// The window keeps the memory alive. While kernels run, the program uses it as it may use memory of a window.
    #[pyo3(signature = (tensor, *, signals=false, name=None))]
    fn register(&self, tensor: &Bound<'_, PyAny>, signals: bool, name: Option<String>) -> PyResult<Window> {
        let (py, member) = (tensor.py(), self.0.get()?);
        let taken = Tensor::take(tensor, &**member.comm.gpu(), "the tensor to register", &[])?;
        let (dtype, shape) = (taken.dtype, taken.shape.clone());
        let given = given(member.comm.gpu(), taken.address, taken.bytes).filter(|part| part.bytes() > 0);
        let window = match given {
            Some(part) => {
                let window = member.wait(py, || member.comm.register::<u8>(&part, flags(signals)))?;
                lock(&member.tensors).insert(window.id(), Arc::new(taken));
                window
            }
            None => member
                .wait(py, || member.comm.register::<u8>(&memory_of_window(&member.comm, taken)?, flags(signals)))?,
        };
        self.window(window, dtype, shape, name)
    }

    /// Raises FaultError if a fault has ended the communicator. Programs call this after a kernel has run.
    fn check(&self, py: Python<'_>) -> PyResult<()> {
        let member = self.0.get()?;
        py.detach(|| member.comm.check("go on")).or_raise(py)
    }

    /// Returns the fault that has ended the communicator, as an exception that is not raised; None if there is none.
    #[getter]
    fn fault(&self, py: Python<'_>) -> PyResult<Option<Py<PyAny>>> {
        let report = self.0.get()?.comm.fault_report();
        Ok(report.map(|report| fault(py, report.to_string(), &report).into_value(py).into_any()))
    }

    /// Ends every wait of the communicator on every rank.
    fn abort(&self, py: Python<'_>) -> PyResult<()> {
        let member = self.0.get()?;
        py.detach(|| member.comm.abort()).or_raise(py)
    }

    /// Carries out the requests of kernels that are ready, if the communicator was made with `progress="manual"`.
    /// Returns whether there was anything to do.
    fn progress(&self, py: Python<'_>) -> PyResult<bool> {
        let member = self.0.get()?;
        py.detach(|| member.comm.progress()).or_raise(py)
    }

    /// Returns the statistics of each context, as a list of dictionaries.
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        let all = self.0.get()?.comm.stats().or_raise(py)?;
        let list = PyList::empty(py);
        for stats in all {
            let row = PyDict::new(py);
            stats.named().into_iter().try_for_each(|(name, value)| row.set_item(name, value))?;
            list.append(row)?;
        }
        Ok(list)
    }

    /// Ends the communicator and frees its resources. Collective if it is active.
    fn destroy(&self, py: Python<'_>) -> PyResult<()> {
        let member = self.0.get()?;
        let _ending = member.ending()?;
        member.wait(py, || member.comm.destroy())?;
        let tensors = std::mem::take(&mut *lock(&member.tensors));
        drop(tensors);
        Ok(())
    }

    fn __enter__(this: Py<Self>) -> Py<Self> {
        this
    }

    /// Destroys the communicator; after an exception, aborts it instead.
    fn __exit__(
        &self,
        py: Python<'_>,
        kind: &Bound<'_, PyAny>,
        _value: &Bound<'_, PyAny>,
        _traceback: &Bound<'_, PyAny>,
    ) -> PyResult<bool> {
        let state = self.0.get()?.comm.state();
        match (kind.is_none(), state) {
            (_, CommState::Destroyed) => {}
            (true, _) => self.destroy(py)?,
            (false, CommState::Active) => self.abort(py)?,
            (false, _) => {}
        }
        Ok(false)
    }

    fn __repr__(&self) -> PyResult<String> {
        let comm = &self.0.get()?.comm;
        Ok(format!("<gincomm.Communicator: rank {} of {}, {}>", comm.rank(), comm.ranks(), comm.state()))
    }
}
