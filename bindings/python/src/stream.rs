// SPDX-License-Identifier: MIT OR Apache-2.0
//! The methods of streams: launches and waits.

use crate::argument::Arguments;
use crate::deadline::seconds;
use crate::error::{Error, OrRaise};
use crate::guard::{check_process, wait_until};
use crate::kernel::{Kernel, find};
use crate::work::Stream;
use gin_boot::lock;
use gin_device::exec::Dim3;
use gin_gpu::LaunchConfig;
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::PyTuple;
use std::time::Instant;

/// Reads an extent in one, two or three directions.
fn extent(value: &Bound<'_, PyAny>) -> PyResult<Dim3> {
    let extents: Vec<u32> = value.extract().or_else(|_| value.extract().map(|x| vec![x]))?;
    match extents[..] {
        [x] => Ok(Dim3 { x, y: 1, z: 1 }),
        [x, y] => Ok(Dim3 { x, y, z: 1 }),
        [x, y, z] => Ok(Dim3 { x, y, z }),
        _ => Err(PyTypeError::new_err(format!("an extent has 1 to 3 directions, not {}", extents.len()))),
    }
}

#[pymethods]
impl Stream {
    /// Launches a kernel: a `gincomm.Kernel`, or the name of a linked one. Does not wait for it.
    ///
    /// The conditions in the kernel's own `# Safety` section bind the caller.
    #[pyo3(signature = (kernel, *args, grid=None, block=None, shared=0, cooperative=true, cluster=None))]
    #[expect(clippy::too_many_arguments, reason = "they have names in Python")]
    fn launch(
        &self,
        py: Python<'_>,
        kernel: &Bound<'_, PyAny>,
        args: &Bound<'_, PyTuple>,
        grid: Option<&Bound<'_, PyAny>>,
        block: Option<&Bound<'_, PyAny>>,
        shared: u32,
        cooperative: bool,
        cluster: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let work = self.0.get()?;
        let device = work.stream.device();
        let function = match kernel.cast::<Kernel>() {
            Ok(kernel) => kernel.get().0.clone(),
            Err(_) => find(py, &device, &kernel.extract::<String>()?)?,
        };
        let one = |value: Option<&Bound<'_, PyAny>>, default: u32| match value {
            Some(value) => extent(value),
            None => Ok(Dim3 { x: default, y: 1, z: 1 }),
        };
        let mut config = LaunchConfig::new(1, 1).dynamic_shared(shared);
        (config.grid, config.block, config.cluster) = (one(grid, 1)?, one(block, 64)?, one(cluster, 1)?);
        config.cooperative = cooperative;
        let Arguments { values, held, members, users } = Arguments::new(&function, args, &device)?;
        let launching = members.iter().map(|member| member.launching()).collect::<PyResult<Vec<_>>>()?;
        let arguments: Vec<&dyn gin_gpu::KernelArg> = values.iter().map(|value| value as _).collect();
        // Held before the launch, and for nothing if that fails.
        let gone = work.hold(held).or_raise(py)?;
        users.iter().for_each(|users| users.add(&work.stream));
        // Safety: sizes and types are checked by the call; communicators, windows and tensors are alive and held until
        // the kernel has ended. The rest is the caller's promise.
        let outcome = unsafe { work.stream.launch(&function, config, &arguments) };
        drop((launching, gone));
        outcome.or_raise(py)
    }

    /// Waits until all work is done, and raises the error of a kernel. Raises TimeoutError after `timeout` seconds.
    #[pyo3(signature = (timeout=None))]
    fn synchronize(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<()> {
        let work = self.0.get()?;
        let limit = timeout.map(|limit| seconds("timeout", limit)).transpose()?;
        // Other threads may launch meanwhile.
        let launches = lock(&work.keep_alive).launches;
        let start = Instant::now();
        if !wait_until(py, limit, || work.stream.is_idle())? {
            let text = format!("the stream's work has not ended after {:.1?}", start.elapsed());
            return Err(pyo3::exceptions::PyTimeoutError::new_err(text));
        }
        // It frees what was dropped meanwhile.
        py.detach(|| work.stream.synchronize()).or_raise(py)?;
        let gone = lock(&work.keep_alive).take(launches);
        drop(gone);
        Ok(())
    }

    /// Returns whether all work is done, and raises the error of a kernel.
    fn is_idle(&self, py: Python<'_>) -> PyResult<bool> {
        let work = self.0.get()?;
        py.detach(|| work.stream.is_idle()).or_raise(py)
    }

    /// Delays later work of this stream until all present work of the other one is done.
    fn wait_for(&self, py: Python<'_>, other: &Self) -> PyResult<()> {
        let (work, other) = (self.0.get()?, other.0.get()?);
        py.detach(|| work.stream.wait_for(&*other.stream.record()?)).or_raise(py)
    }

    /// Returns the driver's handle of the stream, as an integer; None on a virtual GPU.
    #[getter]
    fn handle(&self) -> PyResult<Option<usize>> {
        let work = self.0.get()?;
        #[cfg(feature = "cuda")]
        if let Some(stream) = gin_gpu::cuda::CudaStream::of(&*work.stream) {
            return Ok(Some(stream.raw().addr()));
        }
        let _ = work;
        Ok(None)
    }
}

/// Returns the driver's handle of a stream of the program: an integer, or an object with `cuda_stream` as torch has, or
/// with `__cuda_stream__`.
pub(crate) fn raw_handle(value: &Bound<'_, PyAny>) -> PyResult<usize> {
    check_process()?;
    if let Ok(handle) = value.extract::<usize>() {
        return Ok(handle);
    }
    if let Ok(handle) = value.getattr("cuda_stream") {
        return handle.extract();
    }
    if let Ok(protocol) = value.call_method0("__cuda_stream__") {
        let (version, handle): (u32, usize) = protocol.extract()?;
        if version != 0 {
            return Err(Error::new_err(format!("version {version} of `__cuda_stream__` is not known to gin")));
        }
        return Ok(handle);
    }
    let kind = value.get_type().name()?;
    Err(PyTypeError::new_err(format!("a `{kind}` is no CUDA stream: pass a handle, or an object with `cuda_stream`")))
}
