// SPDX-License-Identifier: MIT OR Apache-2.0
//! One rank of a job, and the ranks of this process.

use crate::comm::{Communicator, extent};
use crate::deadline::seconds;
use crate::error::{OrRaise, StateError};
use crate::guard::{Guarded, abandonable, check_process, interruptible, without_lock};
use crate::kernel::{Kernel, Module, find, load, names};
use crate::member::{Member, end_all};
use crate::memory::note;
use crate::network::configure;
use crate::region::{Region, View};
use crate::stream::raw_handle;
use crate::work::{Stream, Work};
use gin_boot::lock;
use gin_gpu::placement::Placement;
use gin_gpu::{Device, GpuError, Memory, MemoryKind};
use gin_host::comm::{CommConfig, Requirements, Routes};
use gin_host::proxy::progress::ManualProgress;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, Weak};

/// The ranks of this process that may be open: of a job, and of the jobs that follow it.
static RANKS: Mutex<Vec<Py<Rank>>> = Mutex::new(Vec::new());

/// A rank while it is open.
#[derive(Debug)]
pub(crate) struct Open {
    rank: gin_host::world::Rank,
    streams: Streams,
    members: Mutex<Vec<Weak<Member>>>,
}

/// The program's own streams, by handle. Launches are counted by stream, so each has one object, also for the ranks
/// that follow each other.
pub(crate) type Streams = Arc<Mutex<HashMap<usize, Arc<Work>>>>;

/// One rank of a job. `gincomm.init` and `gincomm.launch` make it.
#[pyclass(frozen, module = "gincomm")]
#[derive(Debug)]
pub(crate) struct Rank {
    number: u32,
    ranks: u32,
    open: Mutex<Option<Guarded<Open>>>,
}

impl Rank {
    pub(crate) fn new(rank: gin_host::world::Rank, streams: Streams) -> Self {
        let (number, ranks) = (rank.rank(), rank.ranks());
        let open = Arc::new(Open { rank, streams, members: Mutex::default() });
        Self { number, ranks, open: Mutex::new(Some(Guarded::new(open))) }
    }

    fn open(&self) -> PyResult<Arc<Open>> {
        check_process()?;
        let closed = || StateError::new_err(format!("rank {} is closed", self.number));
        lock(&self.open).as_ref().map(|open| (**open).clone()).ok_or_else(closed)
    }

    fn device_if_open(&self) -> Option<Arc<dyn Device>> {
        self.open().ok().map(|open| open.rank.device().clone())
    }

    /// Returns its name for errors.
    fn name(&self) -> String {
        format!("rank {} of {}", self.number, self.ranks)
    }

    pub(crate) fn is_closed(&self) -> bool {
        lock(&self.open).is_none()
    }

    /// Ends the collective calls of all ranks, and all communicators of this rank.
    pub(crate) fn end(&self) {
        if let Ok(open) = self.open() {
            open.rank.bootstrap().abort();
            for member in lock(&open.members).iter().filter_map(Weak::upgrade) {
                member.comm.abort_handle().abort();
            }
        }
    }
}

/// Makes an object of a stream of the program.
fn foreign(device: &Arc<dyn Device>, handle: usize) -> Result<Arc<dyn gin_gpu::Stream>, GpuError> {
    #[cfg(feature = "cuda")]
    if let Some(gpu) = gin_gpu::cuda::CudaDevice::of(&**device) {
        // Safety: the program keeps the stream alive, as the docs require.
        return unsafe { gpu.stream_from_raw(std::ptr::with_exposed_provenance_mut(handle)) };
    }
    let _ = handle;
    Err(GpuError::Unsupported { device: device.name(), what: "use a CUDA stream of the program: it has none" })
}

#[pymethods]
impl Rank {
    /// Returns the world rank.
    #[getter]
    fn rank(&self) -> u32 {
        self.number
    }

    /// Returns the number of ranks.
    #[getter]
    fn ranks(&self) -> u32 {
        self.ranks
    }

    /// Returns the name of its device.
    #[getter]
    fn device(&self) -> PyResult<String> {
        Ok(self.open()?.rank.device().name())
    }

    /// Returns the DLPack device of tensors that its kernels reach: type and number.
    #[getter]
    fn dlpack_device(&self) -> PyResult<(i32, i32)> {
        Ok(crate::dlpack::dlpack_device(&**self.open()?.rank.device()))
    }

    /// Creates a communicator of all ranks. Collective. All ranks pass the same values.
    #[pyo3(signature = (
        *, contexts=None, signals=None, counters=None, queue_depth=None, world_barriers=None, rail_barriers=None,
        lsa_barriers=None, max_outstanding_per_peer=None, max_message=None, windows=None, print_lines=None,
        strong_signals=false, va_signals=false, lsa_size=None, routes="automatic", backend=None, nic=None,
        network="auto", progress="threads", survive_losses=false
    ))]
    #[expect(clippy::too_many_arguments, reason = "they have names in Python")]
    fn communicator(
        &self,
        py: Python<'_>,
        contexts: Option<u32>,
        signals: Option<u32>,
        counters: Option<u32>,
        queue_depth: Option<u32>,
        world_barriers: Option<u32>,
        rail_barriers: Option<u32>,
        lsa_barriers: Option<u32>,
        max_outstanding_per_peer: Option<u32>,
        max_message: Option<u64>,
        windows: Option<u32>,
        print_lines: Option<u32>,
        strong_signals: bool,
        va_signals: bool,
        lsa_size: Option<u32>,
        routes: &str,
        backend: Option<&str>,
        nic: Option<&str>,
        network: &str,
        progress: &str,
        survive_losses: bool,
    ) -> PyResult<Communicator> {
        let open = self.open()?;
        let mut needs = Requirements::default().strong_signals(strong_signals).va_signals(va_signals);
        macro_rules! set {
            ($($name:ident),*) => { $( if let Some(value) = $name { needs = needs.$name(value); } )* };
        }
        set!(contexts, signals, counters, queue_depth, world_barriers, rail_barriers, lsa_barriers);
        set!(max_outstanding_per_peer, max_message, windows, print_lines);
        let routes = match routes {
            "automatic" => Routes::Automatic,
            "network" => Routes::Network,
            other => {
                let text = format!("routes are \"automatic\" or \"network\", not \"{other}\"");
                return Err(PyValueError::new_err(text));
            }
        };
        let rank = &open.rank;
        let config = rank.comm_config().clone().routes(routes).survive_losses(survive_losses);
        let config = match progress {
            "threads" => config,
            "manual" => config.progress(Arc::new(ManualProgress::default())),
            other => {
                let text = format!("progress is made by \"threads\" or \"manual\", not \"{other}\"");
                return Err(PyValueError::new_err(text));
            }
        };
        let mut config = configure(py, config, rank.bootstrap(), backend, nic, network)?;
        config.lsa_size = lsa_size.or(config.lsa_size);
        let comm = gin_host::comm::Communicator::new(rank.bootstrap().clone(), rank.device().clone(), config);
        let (comm, member) = Communicator::new(py, comm, &needs)?;
        end_with_process(py)?;
        let mut members = lock(&open.members);
        members.retain(|member| member.strong_count() > 0);
        members.push(Arc::downgrade(&member));
        Ok(comm)
    }

    /// Allocates memory, zeroed, that can be this rank's part of windows: a tensor by DLPack. Not collective.
    fn alloc(&self, py: Python<'_>, shape: &Bound<'_, PyAny>, dtype: &Bound<'_, PyAny>) -> PyResult<View> {
        let open = self.open()?;
        let (dtype, shape, bytes) = extent(shape, dtype)?;
        let is_across = open.rank.bootstrap().is_across_processes();
        let allocate = || Memory::for_ranks(open.rank.device(), MemoryKind::Device, bytes as u64, is_across);
        let memory = py.detach(allocate).or_raise(py)?;
        note(&memory);
        Ok(View::new(Region::new(memory.clone(), &memory.whole(), dtype, shape), &Arc::default()))
    }

    /// Makes a stream, or uses one of the program: a handle of the driver, or torch's `torch.cuda.current_stream()`.
    #[pyo3(signature = (stream=None))]
    fn stream(&self, py: Python<'_>, stream: Option<&Bound<'_, PyAny>>) -> PyResult<Stream> {
        let open = self.open()?;
        let device = open.rank.device();
        let Some(given) = stream else {
            return Ok(Stream::new(Work::new(py.detach(|| device.stream()).or_raise(py)?, None)));
        };
        let handle = raw_handle(given)?;
        if let Some(known) = lock(&open.streams).get(&handle) {
            return Ok(Stream::new(known.clone()));
        }
        let made = py.detach(|| foreign(device, handle)).or_raise(py)?;
        let work = Work::new(made, Some(given.clone().unbind()));
        Ok(Stream::new(lock(&open.streams).entry(handle).or_insert(work).clone()))
    }

    /// Returns the linked kernel of this name, which the name of its crate and `::` may precede.
    fn kernel(&self, py: Python<'_>, name: &str) -> PyResult<Kernel> {
        Ok(Kernel(find(py, self.open()?.rank.device(), name)?))
    }

    /// Returns the names and parameters of all linked kernels.
    fn kernels(&self, py: Python<'_>) -> PyResult<Vec<String>> {
        names(py, self.open()?.rank.device())
    }

    /// Loads kernels from PTX or a cubin: its text, its bytes, or its path. On GPUs only.
    fn load(&self, source: &Bound<'_, PyAny>) -> PyResult<Module> {
        load(self.open()?.rank.device(), source)
    }

    /// Returns the id with which processes can join this job while it runs; None for a rank of `gincomm.launch`. A
    /// process that has it can join.
    #[getter]
    fn id(&self) -> PyResult<Option<String>> {
        Ok(self.open()?.rank.bootstrap().id().map(|id| id.to_string()))
    }

    /// Returns the ranks that are known to be lost.
    #[getter]
    fn lost(&self) -> PyResult<Vec<u32>> {
        Ok(self.open()?.rank.bootstrap().lost())
    }

    /// Makes a job with processes that join as the ranks `joining`: in the place of lost ranks, or as new ones, whose
    /// numbers follow. All other ranks call it, and the new processes `gincomm.init(..., join=True)`. Returns this rank
    /// in the new job, with the same number and device. This job goes on until the rank is closed.
    #[pyo3(signature = (joining, *, timeout=300.0))]
    fn grow(&self, py: Python<'_>, joining: Vec<u32>, timeout: f64) -> PyResult<Py<Self>> {
        let (open, within) = (self.open()?, seconds("timeout", timeout)?);
        let bootstrap = open.rank.bootstrap().clone();
        let next = abandonable(py, move || bootstrap.grow(&joining, within))?.or_raise(py)?;
        let (device, config) = (open.rank.device().clone(), CommConfig::default());
        let rank = gin_host::world::Rank::outside(next, device, config, &Placement::Automatic).or_raise(py)?;
        add(py, Self::new(rank, open.streams.clone()))
    }

    /// Waits for all ranks. Collective.
    fn barrier(&self, py: Python<'_>) -> PyResult<()> {
        let open = self.open()?;
        let bootstrap = open.rank.bootstrap();
        interruptible(py, || bootstrap.abort(), || bootstrap.barrier())?.or_raise(py)
    }

    /// Gives every rank the bytes of all ranks, by rank. Collective.
    fn all_gather<'py>(&self, py: Python<'py>, data: Vec<u8>) -> PyResult<Vec<Bound<'py, PyBytes>>> {
        let open = self.open()?;
        let bootstrap = open.rank.bootstrap();
        let all = interruptible(py, || bootstrap.abort(), || bootstrap.all_gather(&data))?.or_raise(py)?;
        Ok(all.iter().map(|bytes| PyBytes::new(py, bytes)).collect())
    }

    /// Ends the collective calls of all ranks, and every wait of this rank's communicators on every rank.
    fn abort(&self, py: Python<'_>) -> PyResult<()> {
        self.open()?;
        py.detach(|| self.end());
        Ok(())
    }

    /// Leaves the job. Communicators that exist stay usable; destroy them first. A second call has no effect.
    pub(crate) fn close(&self) -> PyResult<()> {
        check_process()?;
        let open = lock(&self.open).take();
        without_lock(|| drop(open));
        Ok(())
    }

    fn __enter__(this: Py<Self>) -> Py<Self> {
        this
    }

    /// Closes the rank; after an exception, aborts it first.
    fn __exit__(
        &self,
        py: Python<'_>,
        kind: &Bound<'_, PyAny>,
        _value: &Bound<'_, PyAny>,
        _traceback: &Bound<'_, PyAny>,
    ) -> PyResult<bool> {
        if !kind.is_none() && !self.is_closed() {
            self.abort(py)?;
        }
        self.close()?;
        Ok(false)
    }

    fn __repr__(&self) -> String {
        let end = if self.is_closed() { ", closed" } else { "" };
        format!("<gincomm.Rank: {} of {}{end}>", self.number, self.ranks)
    }
}

/// Makes this rank the one that [`rank`] returns.
pub(crate) fn add(py: Python<'_>, rank: Rank) -> PyResult<Py<Rank>> {
    let made = Py::new(py, rank)?;
    end_with_process(py)?;
    let mut ranks = lock(&RANKS);
    ranks.retain(|rank| !rank.get().is_closed());
    ranks.push(made.clone_ref(py));
    Ok(made)
}

/// Returns the name of a rank of this process that is open, for errors.
pub(crate) fn open_rank() -> Option<String> {
    lock(&RANKS).iter().map(Py::get).find(|rank| !rank.is_closed()).map(Rank::name)
}

/// Ends all that is left when the interpreter ends, while it still serves the threads that drop tensors.
#[pyfunction]
fn at_exit(py: Python<'_>) {
    if check_process().is_err() {
        return;
    }
    py.detach(end_all);
    let ranks = std::mem::take(&mut *lock(&RANKS));
    // A process that leaves in order does not count as lost.
    for rank in ranks {
        let _ = rank.get().close();
    }
}

/// Makes the interpreter call [`at_exit`].
fn end_with_process(py: Python<'_>) -> PyResult<()> {
    static ASKED: AtomicBool = AtomicBool::new(false);
    if !ASKED.swap(true, Ordering::Relaxed) {
        py.import("atexit")?.call_method1("register", (wrap_pyfunction!(at_exit, py)?,))?;
    }
    Ok(())
}

/// Returns the device of the rank that [`rank`] returns, if it is open.
pub(crate) fn device() -> Option<Arc<dyn Device>> {
    lock(&RANKS).iter().find_map(|rank| rank.get().device_if_open())
}

/// Returns the rank that `gincomm.init`, or the last `Rank.grow`, has made in this process.
#[pyfunction]
pub(crate) fn rank(py: Python<'_>) -> PyResult<Py<Rank>> {
    check_process()?;
    let ranks = lock(&RANKS);
    match ranks.iter().rfind(|rank| !rank.get().is_closed()).or(ranks.last()) {
        Some(rank) if !rank.get().is_closed() => Ok(rank.clone_ref(py)),
        Some(_) => Err(StateError::new_err("the rank of this process is closed")),
        None => Err(StateError::new_err("gincomm.init() has not been called in this process")),
    }
}
