// SPDX-License-Identifier: MIT OR Apache-2.0
//! The start of a job: this process as one rank, or ranks that are threads of it.

use crate::deadline::seconds;
use crate::error::{BODY, Error, First, OrRaise, Raised, StateError};
use crate::guard::{LOOK, abandonable, check_process};
use crate::kernel::TABLES;
use crate::network::Nics;
use crate::rank::{Rank, add, open_rank};
use gin_boot::{Bootstrap, IdError, InProcess, Job, Rendezvous, TcpBootstrap, TcpConfig, UniqueId, lock};
use gin_gpu::placement::Placement;
use gin_gpu::virt::VirtualDevice;
use gin_gpu::{Device, EmbeddedModules, available};
use gin_host::comm::CommConfig;
use gin_virtual::{DeviceConfig, ThreadsConfig, World};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use std::collections::BTreeMap;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::sync::{Arc, Mutex};
use std::thread::Builder;
use std::time::{Duration, Instant};

/// The sockets at which this process listens as rank 0, until it joins.
static LISTENING: Mutex<Vec<Rendezvous>> = Mutex::new(Vec::new());

/// The stack of a rank's thread. Python's own threads have as much.
const STACK: usize = 8 << 20;

/// The devices of a job's ranks.
#[derive(Clone, PartialEq, Eq, Debug)]
enum Choice {
    Virtual,
    /// The GPUs of this process, one after another.
    Gpus(usize),
    Gpu(usize),
}

impl Choice {
    /// Reads a program's choice: "virtual", "cuda", "cuda:0", or a torch.device. Without one, GPUs if there are any.
    fn of(py: Python<'_>, device: Option<&Bound<'_, PyAny>>) -> PyResult<Self> {
        let text = device.map(|device| device.str().map(|text| text.to_string())).transpose()?;
        if text.as_deref() == Some("virtual") {
            return Ok(Self::Virtual);
        }
        let tables: Vec<EmbeddedModules> = TABLES.iter().map(|(_, table)| *table).collect();
        let found = py.detach(|| available(&tables)).or_raise(py)?;
        match text.as_deref() {
            None if found.names.is_empty() => Ok(Self::Virtual),
            None => Ok(Self::Gpus(found.names.len())),
            Some(text) => {
                let (kind, number) = text.split_once(':').map_or((text, None), |(kind, number)| (kind, Some(number)));
                let number = number.map(str::parse::<usize>).transpose().ok();
                match (kind, number) {
                    ("cuda", _) if found.names.is_empty() => {
                        Err(Error::new_err(format!("device \"{text}\": {}", found.text)))
                    }
                    ("cuda", Some(None)) => Ok(Self::Gpus(found.names.len())),
                    ("cuda", Some(Some(number))) => Ok(Self::Gpu(number)),
                    _ => {
                        let text =
                            format!("device \"{text}\": there are \"virtual\", \"cuda\" and \"cuda:0\" and so on");
                        Err(PyValueError::new_err(text))
                    }
                }
            }
        }
    }

    /// Makes the device of rank `index` of the `count` ranks that share these devices.
    fn device(&self, world: &World, index: u32, count: u32) -> PyResult<Arc<dyn Device>> {
        let ordinal = match self {
            Self::Virtual => return Ok(VirtualDevice::new(world.device(DeviceConfig::default()))),
            Self::Gpu(ordinal) => *ordinal,
            Self::Gpus(gpus) => (index as usize * gpus / count.max(1) as usize).min(gpus - 1),
        };
        gpu(ordinal)
    }
}

#[cfg(feature = "cuda")]
fn gpu(ordinal: usize) -> PyResult<Arc<dyn Device>> {
    use gin_gpu::{ModuleSource, cuda::CudaDevice};

    let tables: Vec<EmbeddedModules> = TABLES.iter().map(|(_, table)| *table).collect();
    Python::attach(|py| {
        let device = py.detach(|| {
            let device = CudaDevice::new(ordinal, &tables)?;
            // Now, because the driver compiles for seconds, and kernels of other ranks would wait meanwhile.
            device.load(ModuleSource::Linked)?;
            Ok::<_, gin_gpu::GpuError>(device)
        });
        Ok(device.or_raise(py)? as Arc<dyn Device>)
    })
}

#[cfg(not(feature = "cuda"))]
fn gpu(ordinal: usize) -> PyResult<Arc<dyn Device>> {
    Err(Error::new_err(format!("GPU {ordinal}: gin was built without the feature `cuda`")))
}

fn member(
    py: Python<'_>,
    bootstrap: Arc<dyn Bootstrap>,
    device: Arc<dyn Device>,
    config: CommConfig,
) -> PyResult<Rank> {
    let rank = gin_host::world::Rank::outside(bootstrap, device, config, &Placement::Automatic);
    Ok(Rank::new(rank.or_raise(py)?, Arc::default()))
}

/// Makes the id of a job, which this process will join as rank 0.
///
/// Give the id to the other ranks only: every process that has it can join.
#[pyfunction]
#[pyo3(signature = (address=None))]
pub(crate) fn unique_id(py: Python<'_>, address: Option<&str>) -> PyResult<String> {
    check_process()?;
    let refuse = |error| PyValueError::new_err(format!("address = \"{}\": {error}", address.unwrap_or_default()));
    let address = address.map(str::parse).transpose().map_err(refuse)?;
    let rendezvous = Rendezvous::new(TcpConfig::default().address(address)).or_raise(py)?;
    let id = rendezvous.id().to_string();
    lock(&LISTENING).push(rendezvous);
    Ok(id)
}

/// Joins by hand.
fn join_by_hand(
    py: Python<'_>,
    (rank, ranks, id): (Option<u32>, Option<u32>, Option<&str>),
    config: TcpConfig,
    join: bool,
) -> PyResult<TcpBootstrap> {
    let (Some(rank), Some(ranks), Some(id)) = (rank, ranks, id) else {
        return Err(PyValueError::new_err(
            "pass all of rank, ranks and id, or none of them if a launcher has started this",
        ));
    };
    let id: UniqueId = id.parse().map_err(|error: IdError| PyValueError::new_err(error.to_string()))?;
    if join {
        return abandonable(py, move || TcpBootstrap::join_running(&id, rank, ranks, config))?.or_raise(py);
    }
    if rank != 0 {
        return abandonable(py, move || TcpBootstrap::join(&id, rank, ranks, config))?.or_raise(py);
    }
    let mut listening = lock(&LISTENING);
    let Some(place) = listening.iter().position(|rendezvous| *rendezvous.id() == id) else {
        let text = "rank 0 is the process in which gincomm.unique_id() made the id, and joins once";
        return Err(StateError::new_err(text));
    };
    let rendezvous = listening.swap_remove(place);
    drop(listening);
    abandonable(py, move || rendezvous.join(ranks))?.or_raise(py)
}

/// Makes this process one rank of a job: as its launcher says, or by hand with rank, ranks and id. Waits for all ranks.
/// With `join` the job runs already: its ranks call `grow` with the number of this rank.
#[pyfunction]
#[pyo3(signature = (rank=None, ranks=None, id=None, *, device=None, timeout=300.0, collective_timeout=None, join=false))]
#[expect(clippy::too_many_arguments, reason = "they have names in Python")]
pub(crate) fn init(
    py: Python<'_>,
    rank: Option<u32>,
    ranks: Option<u32>,
    id: Option<&str>,
    device: Option<&Bound<'_, PyAny>>,
    timeout: f64,
    collective_timeout: Option<f64>,
    join: bool,
) -> PyResult<Py<Rank>> {
    check_process()?;
    if let Some(known) = open_rank() {
        let text =
            format!("gincomm.init() was called before: this process is {known}; call `close()` of that rank first");
        return Err(StateError::new_err(text));
    }
    let choice = Choice::of(py, device)?;
    let limit = collective_timeout.map(|limit| seconds("collective_timeout", limit)).transpose()?;
    let config = TcpConfig::default().joining(seconds("timeout", timeout)?).collective_timeout(limit);
    let bootstrap = match (rank, ranks, id) {
        (None, None, None) => {
            let Some(job) = Job::from_env().or_raise(py)? else {
                let text = "no launcher has started this process: start it by torchrun, srun, mpirun or `gin launch`, \
                            pass rank, ranks and id (gincomm.unique_id), or run ranks as threads by gincomm.launch";
                return Err(StateError::new_err(text));
            };
            let join = move || if join { job.join_running(config) } else { job.bootstrap(config) };
            abandonable(py, join)?.or_raise(py)?
        }
        by_hand => join_by_hand(py, by_hand, config, join)?,
    };
    let (index, count) = (bootstrap.local_rank(), bootstrap.local_ranks());
    if let Choice::Gpus(gpus) = choice
        && (count as usize) > gpus
    {
        let text = format!("{count} ranks of this host need a GPU each, and this process sees {gpus}; pass device=");
        return Err(Error::new_err(text));
    }
    let bootstrap: Arc<dyn Bootstrap> = Arc::new(bootstrap);
    let choice = match choice {
        // Each process has one of the GPUs, which all processes see.
        Choice::Gpus(_) => Choice::Gpu(index as usize),
        other => other,
    };
    let device = choice.device(&World::threads(ThreadsConfig::default()), 0, 1)?;
    add(py, member(py, bootstrap, device, CommConfig::default())?)
}

/// Returns the names of the GPUs that gin can use here; empty if there is none.
#[pyfunction]
pub(crate) fn gpus(py: Python<'_>) -> PyResult<Vec<String>> {
    check_process()?;
    let tables: Vec<EmbeddedModules> = TABLES.iter().map(|(_, table)| *table).collect();
    Ok(py.detach(|| available(&tables)).or_raise(py)?.names)
}

/// State that the threads of one `gincomm.launch` share.
#[derive(Debug, Default)]
struct Launched {
    first: Arc<First>,
    /// Python's numbers of the threads whose bodies run, by rank.
    bodies: Mutex<BTreeMap<u32, i64>>,
}

impl Launched {
    /// Names the ranks whose bodies run.
    fn waits_for(&self) -> String {
        let ranks: Vec<String> = lock(&self.bodies).keys().map(u32::to_string).collect();
        ranks.join(", ")
    }

    /// Raises KeyboardInterrupt in the bodies that run, at their next step in Python.
    fn interrupt(&self, py: Python<'_>) {
        let kind = py.get_type::<pyo3::exceptions::PyKeyboardInterrupt>();
        for thread in lock(&self.bodies).values() {
            // Safety: the interpreter lock is held, and the call ignores threads that have ended.
            unsafe { pyo3::ffi::PyThreadState_SetAsyncExc(*thread, kind.as_ptr()) };
        }
    }
}

/// The time after which a launch that was interrupted says for what it waits, and for which it still waits for bodies
/// that it has given up on.
const PATIENCE: Duration = Duration::from_secs(1);

/// Runs `body(rank)` on a thread for each rank of a job in this process. Returns the results by rank.
///
/// When one of them raises an exception, the others are aborted, and the exception is raised here. After Ctrl-C the
/// launch aborts all ranks and waits for their bodies; a second Ctrl-C gives up on these. `nics="soft"` gives each a
/// software NIC, which kernels drive.
#[pyfunction]
#[pyo3(signature = (ranks, body, *, device=None, nics=None))]
pub(crate) fn launch(
    py: Python<'_>,
    ranks: u32,
    body: &Bound<'_, PyAny>,
    device: Option<&Bound<'_, PyAny>>,
    nics: Option<&str>,
) -> PyResult<Vec<Py<PyAny>>> {
    check_process()?;
    let choice = Choice::of(py, device)?;
    let world = World::threads(ThreadsConfig::default());
    let nics = Nics::named(&world, nics)?;
    let mut members = Vec::new();
    for (index, bootstrap) in (0..).zip(InProcess::job(ranks).or_raise(py)?) {
        let device = choice.device(&world, index, ranks)?;
        let config = nics.as_ref().map(|nics| nics.config(index, &*device)).transpose()?;
        members.push(Py::new(py, member(py, Arc::new(bootstrap), device, config.unwrap_or_default())?)?);
    }
    let (to, mut from) = channel();
    let launched = Arc::new(Launched::default());
    for (index, member) in (0..).zip(&members) {
        let (to, launched_here) = (to.clone(), launched.clone());
        let (member, body) = (member.clone_ref(py), body.clone().unbind());
        let run = move || {
            BODY.set(Some((index, launched_here.first.clone())));
            let value = Python::attach(|py| {
                let outcome = run_body(py, &launched_here, index, &member, &body);
                if let Err(error) = &outcome {
                    lock(&launched_here.first).get_or_insert_with(|| (Some(index), error.clone_ref(py)));
                    py.detach(|| member.get().end());
                }
                let closed = member.get().close();
                drop((member, body));
                outcome.and_then(|value| closed.map(|()| value)).ok()
            });
            let _ = to.send((index, value));
        };
        if let Err(error) = Builder::new().name(format!("rank {index}")).stack_size(STACK).spawn(run) {
            members.iter().for_each(|member| member.get().end());
            lock(&launched.first).get_or_insert_with(|| (None, error.raised(py)));
        }
    }
    drop(to);
    let mut values: Vec<Option<Py<PyAny>>> = members.iter().map(|_| None).collect();
    // The time of the last Ctrl-C, and whether the launch has not yet said for what it waits.
    let (mut interrupted, mut untold) = (None::<Instant>, true);
    let mut given_up = false;
    loop {
        let from = &mut from;
        match py.detach(move || from.recv_timeout(LOOK)) {
            Ok((index, value)) => values[index as usize] = value,
            Err(RecvTimeoutError::Disconnected) => break,
            Err(RecvTimeoutError::Timeout) => {
                if let Err(error) = py.check_signals() {
                    lock(&launched.first).get_or_insert_with(|| (None, error));
                    py.detach(|| members.iter().for_each(|member| member.get().end()));
                    if interrupted.is_some() {
                        launched.interrupt(py);
                        given_up = true;
                    }
                    interrupted = Some(Instant::now());
                }
                if interrupted.is_none_or(|since| since.elapsed() < PATIENCE) {
                    continue;
                }
                if given_up {
                    break;
                }
                if std::mem::take(&mut untold) {
                    let ranks = launched.waits_for();
                    eprintln!(
                        "gincomm.launch was interrupted and waits for the bodies of these ranks, which run code outside \
                         of gin: {ranks}; press Ctrl-C again to leave without them"
                    );
                }
            }
        }
    }
    if let Some((_, error)) = lock(&launched.first).take() {
        return Err(error);
    }
    Ok(values.into_iter().flatten().collect())
}

/// Calls the body of a rank.
fn run_body(
    py: Python<'_>,
    launched: &Launched,
    index: u32,
    member: &Py<Rank>,
    body: &Py<PyAny>,
) -> PyResult<Py<PyAny>> {
    // Not `threading`, which takes the thread that imports it first for the main thread.
    let thread: i64 = py.import("_thread")?.call_method0("get_ident")?.extract()?;
    lock(&launched.bodies).insert(index, thread);
    let outcome = body.call1(py, (member.clone_ref(py),));
    lock(&launched.bodies).remove(&index);
    outcome
}
