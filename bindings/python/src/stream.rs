// SPDX-License-Identifier: MIT OR Apache-2.0
//! Streams, and launches on them.

use crate::argument::{Arguments, Held};
use crate::error::{Error, OrRaise};
use crate::guard::{Guarded, LOOK, check_process};
use crate::kernel::{Kernel, find};
use crate::process::seconds;
use gin_boot::lock;
use gin_device::exec::Dim3;
use gin_gpu::{DeviceKind, Event, GpuError, LaunchConfig};
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::PyTuple;
use std::collections::VecDeque;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// The number of values for the use of kernels at which a launch marks the stream.
const MARK_AT: usize = 16;

/// The values that kernels use which have not been seen to end.
#[derive(Debug, Default)]
struct KeepAlive {
    /// Each with the number of the last launch that uses it.
    held: Vec<(u64, Held)>,
    launches: u64,
    /// Events after a launch and all before, oldest first.
    marks: VecDeque<(u64, Box<dyn Event>)>,
    /// The number of values that were added since the last mark.
    unmarked: usize,
}

impl KeepAlive {
    /// Removes and returns what no launch after this one uses.
    fn take(&mut self, launch: u64) -> Vec<Held> {
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
    keep_alive: Mutex<KeepAlive>,
    /// The program's object of a stream of its own.
    _owner: Option<Py<PyAny>>,
}

impl Work {
    pub(crate) fn new(stream: Arc<dyn gin_gpu::Stream>, owner: Option<Py<PyAny>>) -> Arc<Self> {
        Arc::new(Self { stream, keep_alive: Mutex::default(), _owner: owner })
    }

    /// Adds what a kernel uses that the caller launches next, while it has the interpreter lock. Returns what is not
    /// used any more.
    fn hold(&self, held: Vec<Held>) -> Result<Vec<Held>, GpuError> {
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

/// The streams of kernels that use memory which is a tensor on the CPU: that of a virtual GPU. The consumer of such a
/// tensor has no stream, and reads at once.
#[derive(Debug, Default)]
pub(crate) struct Users(Mutex<Vec<Arc<dyn gin_gpu::Stream>>>);

impl Users {
    /// Adds the stream of a kernel that the caller launches next.
    pub(crate) fn add(&self, stream: &Arc<dyn gin_gpu::Stream>) {
        let mut streams = lock(&self.0);
        if stream.device().kind() == DeviceKind::Virtual && !streams.iter().any(|known| Arc::ptr_eq(known, stream)) {
            streams.retain(|known| !matches!(known.is_idle(), Ok(true)));
            streams.push(stream.clone());
        }
    }

    /// Waits for the kernels that were launched until now on these streams. Kernels of a graph are none of them.
    pub(crate) fn wait(&self, py: Python<'_>) -> PyResult<()> {
        let streams = lock(&self.0).clone();
        for stream in streams {
            let idle = |stream: &dyn gin_gpu::Stream| Ok::<_, GpuError>(stream.is_capturing()? || stream.is_idle()?);
            if idle(&*stream).or_raise(py)? {
                continue;
            }
            let mark = stream.record().or_raise(py)?;
            wait_until(py, None, || mark.is_done())?;
        }
        Ok(())
    }
}

/// Waits until `is_done`. Returns whether it was so before the limit. A signal handler that raises ends the wait.
fn wait_until(
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

/// Kernels of one rank in order. `Rank.stream` makes it.
#[pyclass(frozen, module = "gincomm")]
#[derive(Debug)]
pub(crate) struct Stream(Guarded<Work>);

impl Stream {
    pub(crate) fn new(work: Arc<Work>) -> Self {
        Self(Guarded::new(work))
    }

    pub(crate) fn work(&self) -> PyResult<&Arc<Work>> {
        self.0.get()
    }
}

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
