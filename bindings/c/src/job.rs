// SPDX-License-Identifier: MIT OR Apache-2.0
//! Jobs: how ranks meet, and their devices.

use crate::status::{Failure, call, check_abi, check_size, fill, input, inputs, output, outputs, text};
use crate::table;
use crate::types::gin_status_t::{GIN_ERROR_BOOTSTRAP, GIN_ERROR_MEMORY, GIN_ERROR_NETWORK, GIN_ERROR_NO_JOB};
use crate::types::{
    GIN_FOREVER, GIN_PROGRESS_MANUAL, GIN_UNIQUE_ID_BYTES, gin_all_gather_t, gin_backend_t, gin_config_t,
    gin_device_kind_t, gin_job_t, gin_network_t, gin_status_t, gin_unique_id_t,
};
use gin_boot::{Bootstrap, InProcess, Rendezvous, TcpBootstrap, TcpConfig, UniqueId, lock};
use gin_gpu::Device;
use gin_gpu::placement::{Placement, started_on};
use gin_gpu::virt::VirtualDevice;
use gin_host::comm::{Backend, CommConfig, NicChoice, Routes};
use gin_host::proxy::progress::{ManualProgress, OwnThreads, Pool, Progress, Running, Work};
use gin_host::world::SoftNics;
use gin_net::NetworkFactory;
use gin_net::fabric::{Fabric, FabricConfig};
use gin_net::verbs::{Ports, VerbsConfig};
use gin_nic::NicConfig;
use gin_soft_nic_host::Options;
use gin_virtual::{DeviceConfig, ServiceHandle, ThreadsConfig, World};
use std::collections::HashMap;
use std::ffi::{c_char, c_void};
use std::io::Write;
use std::sync::{Arc, LazyLock, Mutex, Once};
use std::time::Duration;

/// One rank of a job.
pub(crate) struct Job {
    pub(crate) bootstrap: Arc<dyn Bootstrap>,
    pub(crate) device: Arc<dyn Device>,
    pub(crate) config: CommConfig,
    pub(crate) nics: Option<Arc<Nics>>,
}

impl Job {
    /// Makes the handle of this rank in the job that follows.
    fn next(&self, bootstrap: Arc<dyn Bootstrap>) -> Result<gin_job_t, Failure> {
        let (device, config, nics) = (self.device.clone(), self.config.clone(), self.nics.clone());
        Ok(gin_job_t { id: table::insert(Arc::new(Self { bootstrap, device, config, nics }))? })
    }
}

impl table::Handled for Job {
    const KIND: table::Kind = table::Kind::Job;
}

/// Software NICs of ranks that are threads, while this exists.
pub(crate) struct Nics {
    nics: SoftNics,
    service: ServiceHandle,
}

impl Nics {
    fn new(world: &World) -> Arc<Self> {
        let nics = SoftNics::new(Options::default());
        let service = nics.serve(world);
        Arc::new(Self { nics, service })
    }
}

impl Drop for Nics {
    fn drop(&mut self) {
        self.service.stop();
    }
}

/// Rank 0 of jobs whose id this process made.
static MADE: LazyLock<Mutex<HashMap<String, Rendezvous>>> = LazyLock::new(Mutex::default);

/// Starts progress threads on the CPUs near a device.
#[derive(Debug)]
struct Near(Option<Vec<usize>>);

impl Progress for Near {
    fn start(&self, name: &str, work: Work) -> std::io::Result<Running> {
        started_on(self.0.as_deref(), || OwnThreads.start(name, work))?
    }
}

/// A configuration that was checked.
struct Config {
    device: gin_device_kind_t,
    gpu: Option<usize>,
    tcp: TcpConfig,
    comm: CommConfig,
    soft_nics: bool,
    threads: Threads,
}

/// The threads that carry out requests of kernels.
enum Threads {
    /// One for each communicator.
    Own,
    /// These, for all communicators.
    Shared(Arc<Pool>),
    /// Those of the program.
    Callers,
}

fn limit(ms: u32) -> Option<Duration> {
    (ms != GIN_FOREVER).then(|| Duration::from_millis(ms.into()))
}

/// The largest `progress_threads`.
const MAX_PROGRESS_THREADS: u32 = 256;

/// Opens a network; the default of communicators needs none.
fn factory(network: gin_network_t) -> Result<Option<NetworkFactory>, String> {
    Ok(match network {
        gin_network_t::GIN_NETWORK_PEER => None,
        gin_network_t::GIN_NETWORK_VERBS => {
            let found = VerbsConfig::from_env().map_err(|error| error.to_string())?;
            Some(Ports::open(&found).map_err(|error| error.to_string())?.factory())
        }
        gin_network_t::GIN_NETWORK_FABRIC => {
            Some(Fabric::open(&FabricConfig::from_env()).map_err(|error| error.to_string())?.factory())
        }
    })
}

impl Config {
    fn read(config: *const gin_config_t) -> Result<Self, Failure> {
        let config = input(config, "config")?;
        check_abi(config.abi)?;
        check_size::<gin_config_t>(config.size, "config", "GIN_CONFIG_INIT")?;
        let device = match config.device {
            0 => gin_device_kind_t::GIN_DEVICE_AUTO,
            1 => gin_device_kind_t::GIN_DEVICE_VIRTUAL,
            2 => gin_device_kind_t::GIN_DEVICE_CUDA,
            other => return Err(Failure::argument(format!("config.device is {other}: there are 0 to 2"))),
        };
        let network = match config.network {
            0 => gin_network_t::GIN_NETWORK_PEER,
            n if n == gin_network_t::GIN_NETWORK_VERBS as u32 => gin_network_t::GIN_NETWORK_VERBS,
            n if n == gin_network_t::GIN_NETWORK_FABRIC as u32 => gin_network_t::GIN_NETWORK_FABRIC,
            other => return Err(Failure::argument(format!("config.network is {other}: there are 0 to 2"))),
        };
        let (backend, soft_nics) = match config.backend {
            0 => (Backend::Auto, false),
            n if n == gin_backend_t::GIN_BACKEND_PROXY as u32 => (Backend::Proxy, false),
            n if n == gin_backend_t::GIN_BACKEND_GDAKI as u32 => (Backend::Gdaki, false),
            n if n == gin_backend_t::GIN_BACKEND_GDAKI_SOFT as u32 => (Backend::Gdaki, true),
            other => return Err(Failure::argument(format!("config.backend is {other}: there are 0 to 3"))),
        };
        if network != gin_network_t::GIN_NETWORK_PEER && backend == Backend::Gdaki {
            let text = format!("config.network: with GDAKI, kernels drive NICs themselves: leave {network:?} out");
            return Err(Failure::argument(text));
        }
        let gpu = match config.gpu {
            -1 => None,
            gpu => Some(usize::try_from(gpu).map_err(|_| Failure::argument(format!("config.gpu is {gpu}: use -1")))?),
        };
        let mut tcp = TcpConfig::default().collective_timeout(limit(config.collective_ms));
        if let Some(joining) = limit(config.joining_ms) {
            tcp = tcp.joining(joining);
        }
        if !config.address.is_null() {
            let address = text(config.address, "config.address")?;
            let parsed = address
                .parse()
                .map_err(|_| Failure::argument(format!("config.address: `{address}` is no IP address")))?;
            tcp = tcp.address(Some(parsed));
        }
        let mut comm = CommConfig::default().lsa_size((config.lsa_size != 0).then_some(config.lsa_size));
        comm = comm.backend(backend).survive_losses(config.survive_losses != 0);
        if config.network_only != 0 {
            comm = comm.routes(Routes::Network);
        }
        if !config.nic.is_null() {
            if soft_nics || backend == Backend::Proxy {
                let text = "config.nic names the NIC that kernels drive: leave it null, or use GIN_BACKEND_GDAKI";
                return Err(Failure::argument(text));
            }
            let name = text(config.nic, "config.nic")?.to_owned();
            comm = comm.nic(NicChoice::Named(name, NicConfig::default()));
        }
        let threads = match config.progress_threads {
            0 => Threads::Own,
            GIN_PROGRESS_MANUAL => Threads::Callers,
            threads @ 1..=MAX_PROGRESS_THREADS => {
                let failed = |error| Failure::new(GIN_ERROR_MEMORY, format!("{threads} progress threads: {error}"));
                Threads::Shared(Arc::new(Pool::new(threads as usize).map_err(failed)?))
            }
            other => {
                let text = format!(
                    "config.progress_threads is {other}: there are 0 to {MAX_PROGRESS_THREADS}, and \
                                    GIN_PROGRESS_MANUAL"
                );
                return Err(Failure::argument(text));
            }
        };
        if let Some(factory) = factory(network).map_err(|error| Failure::new(GIN_ERROR_NETWORK, error))? {
            comm = comm.network(factory);
        }
        Ok(Self { device, gpu, tcp, comm, soft_nics, threads })
    }

    /// Returns whether the job runs on NVIDIA GPUs.
    fn is_cuda(&self) -> Result<bool, Failure> {
        Ok(match self.device {
            gin_device_kind_t::GIN_DEVICE_AUTO => !gin_gpu::available(&[])?.names.is_empty(),
            kind => kind == gin_device_kind_t::GIN_DEVICE_CUDA,
        })
    }

    /// Makes the rank's device. `place` is its number among the ranks of its host.
    fn device(&self, world: &World, place: u32) -> Result<Arc<dyn Device>, Failure> {
        if !self.is_cuda()? {
            say_that_races_are_not_sought();
            return Ok(VirtualDevice::new(world.device(DeviceConfig::default())));
        }
        cuda(self.gpu, place)
    }

    /// Makes the rank with this bootstrap.
    fn rank(&self, bootstrap: Arc<dyn Bootstrap>, world: &World, place: u32) -> Result<Job, Failure> {
        let device = self.device(world, place)?;
        let near = || Ok::<_, Failure>(Arc::new(Near(Placement::Automatic.choose(&device.locality())?.cpus)));
        let progress: Arc<dyn Progress> = match &self.threads {
            Threads::Own => near()?,
            Threads::Shared(pool) => pool.clone(),
            Threads::Callers => Arc::new(ManualProgress::default()),
        };
        let config = self.comm.clone().progress(progress);
        Ok(Job { bootstrap, device, config, nics: None })
    }

    /// Refuses software NICs.
    fn without_soft_nics(self) -> Result<Self, Failure> {
        if self.soft_nics {
            let text = "config.backend: GIN_BACKEND_GDAKI_SOFT serves the ranks of gin_job_local on virtual GPUs";
            return Err(Failure::argument(text));
        }
        Ok(self)
    }

    /// Makes the rank of a process.
    fn process(&self, bootstrap: TcpBootstrap) -> Result<gin_job_t, Failure> {
        let (world, place) = (World::threads(ThreadsConfig::default()), bootstrap.local_rank());
        let job = self.rank(Arc::new(bootstrap), &world, place)?;
        Ok(gin_job_t { id: table::insert(Arc::new(job))? })
    }
}

/// Says once, on standard error, that the variable `GIN_RACES` has no effect here, if it is set: the detector works in
/// seeded worlds, and programs in C and C++ have none.
fn say_that_races_are_not_sought() {
    static SAID: Once = Once::new();
    if std::env::var_os("GIN_RACES").is_some_and(|value| value == "1") {
        SAID.call_once(|| {
            // Without standard error there is nobody to tell.
            let _ = writeln!(
                std::io::stderr(),
                "gin: GIN_RACES=1 has no effect: a program in C or C++ runs without seeds; look for data races in a \
                 test in Rust"
            );
        });
    }
}

#[cfg(feature = "cuda")]
fn cuda(gpu: Option<usize>, place: u32) -> Result<Arc<dyn Device>, Failure> {
    let count = gin_gpu::cuda::device_count()?;
    let gpu = gpu.unwrap_or(place as usize % count.max(1));
    Ok(gin_gpu::cuda::devices(&[gpu], &[gin_ep::PTX], None)?.device(0, 1)?)
}

#[cfg(not(feature = "cuda"))]
fn cuda(_: Option<usize>, _: u32) -> Result<Arc<dyn Device>, Failure> {
    let text = "this library was built without the feature `cuda`: it supports virtual GPUs only";
    Err(Failure::new(gin_status_t::GIN_ERROR_DEVICE, text))
}

/// Makes the id of a new job, and listens for its ranks. The same process then joins as rank 0.
///
/// Give the id to the other ranks by a way that keeps it secret: a process that knows it can join. Not collective.
///
/// # Safety
/// - As the crate's docs say.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gin_unique_id_create(config: *const gin_config_t, id: *mut gin_unique_id_t) -> gin_status_t {
    call("gin_unique_id_create", || {
        let (config, out) = (Config::read(config)?, output(id, "id")?);
        let rendezvous = Rendezvous::new(config.tcp)?;
        let mut id = gin_unique_id_t { text: [0; GIN_UNIQUE_ID_BYTES] };
        let name = rendezvous.id().to_string();
        if name.len() >= GIN_UNIQUE_ID_BYTES {
            return Err(Failure::new(GIN_ERROR_MEMORY, format!("the id has {} bytes", name.len())));
        }
        fill(&mut id.text, &name);
        lock(&MADE).insert(name, rendezvous);
        out.write(id);
        Ok(())
    })
}

fn join(config: &Config, id: &str, rank: u32, ranks: u32) -> Result<gin_job_t, Failure> {
    let own = if rank == 0 { lock(&MADE).remove(id) } else { None };
    let bootstrap = match own {
        Some(rendezvous) => rendezvous.join(ranks)?,
        None if rank == 0 => {
            let text = "rank 0 is the process that called gin_unique_id_create, and it joins once";
            return Err(Failure::argument(text));
        }
        None => {
            let id: UniqueId = id.parse().map_err(|error| Failure::argument(format!("id: {error}")))?;
            TcpBootstrap::join(&id, rank, ranks, config.tcp.clone())?
        }
    };
    config.process(bootstrap)
}

/// Joins a job by its id, as one rank of `ranks`, each of which is a process. Waits for all ranks.
///
/// The caller owns the handle, and closes it with `gin_job_close`.
///
/// # Safety
/// - As the crate's docs say.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gin_job_join(
    config: *const gin_config_t,
    id: *const gin_unique_id_t,
    rank: u32,
    ranks: u32,
    job: *mut gin_job_t,
) -> gin_status_t {
    call("gin_job_join", || {
        let config = Config::read(config)?.without_soft_nics()?;
        let (id, job) = (id_text(id)?, output(job, "job")?);
        job.write(join(&config, id, rank, ranks)?);
        Ok(())
    })
}

/// Returns the text of an id.
fn id_text<'a>(id: *const gin_unique_id_t) -> Result<&'a str, Failure> {
    let id = input(id, "id")?;
    if !id.text.contains(&0) {
        return Err(Failure::argument("`id` has no end: it was not made by gin_unique_id_create or gin_job_id"));
    }
    text(id.text.as_ptr(), "id")
}

/// Joins a running job as one of the ranks that its ranks name in `gin_job_grow`; `ranks` is the number after that.
/// Waits for that call and for all ranks. `id` is that of `gin_job_id`, or of the first job as long as its rank 0 is a
/// rank. A process with variables of a launcher joins by `gin_job_from_env` with `GIN_JOIN=1`.
///
/// The caller owns the handle, and closes it with `gin_job_close`.
///
/// # Safety
/// - As the crate's docs say.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gin_job_join_running(
    config: *const gin_config_t,
    id: *const gin_unique_id_t,
    rank: u32,
    ranks: u32,
    job: *mut gin_job_t,
) -> gin_status_t {
    call("gin_job_join_running", || {
        let config = Config::read(config)?.without_soft_nics()?;
        let (id, job) = (id_text(id)?, output(job, "job")?);
        let id: UniqueId = id.parse().map_err(|error| Failure::argument(format!("id: {error}")))?;
        job.write(config.process(TcpBootstrap::join_running(&id, rank, ranks, config.tcp.clone())?)?);
        Ok(())
    })
}

/// Joins the job for which a launcher started this process: `gin launch`, torchrun, Open MPI or Slurm. Waits for all
/// ranks. Without a launcher it is `GIN_ERROR_NO_JOB`.
///
/// The caller owns the handle, and closes it with `gin_job_close`.
///
/// # Safety
/// - As the crate's docs say.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gin_job_from_env(config: *const gin_config_t, job: *mut gin_job_t) -> gin_status_t {
    call("gin_job_from_env", || {
        let (config, job) = (Config::read(config)?.without_soft_nics()?, output(job, "job")?);
        let Some(found) = gin_boot::Job::from_env()? else {
            let text = "no launcher started this process: start it with `gin launch`, torchrun, mpirun or srun, or use \
                        gin_job_join or gin_job_local";
            return Err(Failure::new(GIN_ERROR_NO_JOB, text));
        };
        job.write(config.process(found.bootstrap(config.tcp.clone())?)?);
        Ok(())
    })
}

/// Makes a job over the caller's own exchange of messages, such as MPI's all-gather or a store of torch. Waits for all
/// ranks.
///
/// gin calls `all_gather` once, on the calling thread, to hand out the id that rank 0 makes; all further messages take
/// gin's own encrypted connections. So gin finds lost ranks as in any other job.
///
/// The caller owns the handle, and closes it with `gin_job_close`.
///
/// # Safety
/// - As the crate's docs say; `all_gather` does as its type says, and does not unwind.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gin_job_over(
    config: *const gin_config_t,
    rank: u32,
    ranks: u32,
    all_gather: gin_all_gather_t,
    user: *mut c_void,
    job: *mut gin_job_t,
) -> gin_status_t {
    call("gin_job_over", || {
        let (config, job) = (Config::read(config)?.without_soft_nics()?, output(job, "job")?);
        let all_gather = all_gather.ok_or_else(|| Failure::argument("`all_gather` is null"))?;
        if rank >= ranks || ranks > gin_abi::MAX_RANKS {
            return Err(Failure::argument(format!("there is no rank {rank} of {ranks}")));
        }
        let mut own = [0 as c_char; GIN_UNIQUE_ID_BYTES];
        // Ranks that wait for an id learn of a failure here by its absence.
        let made = (rank == 0).then(|| Rendezvous::new(config.tcp.clone()));
        if let Some(Ok(rendezvous)) = &made {
            fill(&mut own, &rendezvous.id().to_string());
        }
        let mut all = vec![0 as c_char; GIN_UNIQUE_ID_BYTES * ranks as usize];
        // Safety: the caller's promise; the buffers have these lengths.
        let code = unsafe { all_gather(user, own.as_ptr().cast(), own.len(), all.as_mut_ptr().cast()) };
        let made = made.transpose()?;
        if code != 0 {
            return Err(Failure::new(GIN_ERROR_BOOTSTRAP, format!("all_gather of the program returned {code}")));
        }
        all[GIN_UNIQUE_ID_BYTES - 1] = 0;
        let id = text(all.as_ptr(), "the id of rank 0")?;
        if id.is_empty() {
            return Err(Failure::new(GIN_ERROR_BOOTSTRAP, "rank 0 could not listen: see its error"));
        }
        let bootstrap = match made {
            Some(rendezvous) => rendezvous.join(ranks)?,
            None => {
                let id: UniqueId = id.parse().map_err(|error| Failure::argument(format!("id: {error}")))?;
                TcpBootstrap::join(&id, rank, ranks, config.tcp.clone())?
            }
        };
        job.write(config.process(bootstrap)?);
        Ok(())
    })
}

/// Makes a job of `ranks` ranks that are threads of this process, and writes one handle for each to `jobs`. Each thread
/// then uses its own: collective calls wait for the other threads.
///
/// The caller owns the handles, and closes each with `gin_job_close`.
///
/// # Safety
/// - As the crate's docs say; `jobs` has space for `ranks` handles.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gin_job_local(config: *const gin_config_t, ranks: u32, jobs: *mut gin_job_t) -> gin_status_t {
    call("gin_job_local", || {
        let mut config = Config::read(config)?;
        if config.soft_nics && config.is_cuda()? {
            config = config.without_soft_nics()?;
        }
        let members = InProcess::job(ranks)?;
        let out = outputs(jobs, members.len(), "jobs")?;
        let world = World::threads(ThreadsConfig::default());
        let nics = config.soft_nics.then(|| Nics::new(&world));
        let mut made = Vec::new();
        for (place, member) in (0..).zip(members) {
            let member = match config.tcp.collective_timeout {
                Some(limit) => member.with_timeout(limit),
                None => member,
            };
            let mut job = config.rank(Arc::new(member), &world, place)?;
            if let Some(nics) = &nics {
                job.config = job.config.nic(nics.nics.of(place));
                job.nics = Some(nics.clone());
            }
            made.push(Arc::new(job));
        }
        for (out, job) in out.iter_mut().zip(made) {
            *out = gin_job_t { id: table::insert(job)? };
        }
        Ok(())
    })
}

/// Returns the rank, and the number of ranks. Either output may be null.
///
/// # Safety
/// - As the crate's docs say.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gin_job_rank(job: gin_job_t, rank: *mut u32, ranks: *mut u32) -> gin_status_t {
    call("gin_job_rank", || {
        let job = table::get::<Job>(job.id)?;
        for (out, value) in [(rank, job.bootstrap.rank()), (ranks, job.bootstrap.ranks())] {
            if !out.is_null() {
                output(out, "rank or ranks")?.write(value);
            }
        }
        Ok(())
    })
}

/// Returns the kind of the rank's device: `GIN_DEVICE_VIRTUAL` or `GIN_DEVICE_CUDA`.
///
/// # Safety
/// - As the crate's docs say.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gin_job_device(job: gin_job_t, kind: *mut u32) -> gin_status_t {
    call("gin_job_device", || {
        let (job, kind) = (table::get::<Job>(job.id)?, output(kind, "kind")?);
        kind.write(match job.device.kind() {
            gin_gpu::DeviceKind::Virtual => gin_device_kind_t::GIN_DEVICE_VIRTUAL as u32,
            gin_gpu::DeviceKind::Cuda => gin_device_kind_t::GIN_DEVICE_CUDA as u32,
        });
        Ok(())
    })
}

/// Waits for all ranks of the job. Collective.
#[unsafe(no_mangle)]
pub extern "C" fn gin_job_barrier(job: gin_job_t) -> gin_status_t {
    call("gin_job_barrier", || Ok(table::get::<Job>(job.id)?.bootstrap.barrier()?))
}

/// Gathers `bytes` bytes of each rank, by rank, into `all`. All ranks pass the same length. Collective.
///
/// # Safety
/// - As the crate's docs say; `own` has `bytes` bytes, and `all` has that many for each rank.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gin_job_all_gather(
    job: gin_job_t,
    own: *const c_void,
    bytes: usize,
    all: *mut c_void,
) -> gin_status_t {
    call("gin_job_all_gather", || {
        let job = table::get::<Job>(job.id)?;
        // A copy, because the caller may gather in place.
        let own = inputs(own.cast::<u8>(), bytes, "own")?.to_vec();
        let total = bytes.checked_mul(job.bootstrap.ranks() as usize);
        let total = total.ok_or_else(|| Failure::argument(format!("{bytes} bytes are too many")))?;
        let all = outputs(all.cast::<u8>(), total, "all")?;
        let parts = job.bootstrap.all_gather(&own)?;
        for (rank, part) in parts.iter().enumerate() {
            if part.len() != bytes {
                let text = format!("rank {rank} passed {} bytes, this rank {bytes}", part.len());
                return Err(Failure::argument(text));
            }
            all[rank * bytes..][..bytes].copy_from_slice(part);
        }
        Ok(())
    })
}

/// Ends every collective call of the job, on all ranks, with an error. Does not wait.
#[unsafe(no_mangle)]
pub extern "C" fn gin_job_abort(job: gin_job_t) -> gin_status_t {
    call("gin_job_abort", || {
        table::get::<Job>(job.id)?.bootstrap.abort();
        Ok(())
    })
}

/// Writes the first `capacity` ranks that are known to be lost to `ranks`, and their number to `count`.
///
/// # Safety
/// - As the crate's docs say; `ranks` has space for `capacity` numbers, and may be null if that is 0.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gin_job_lost(
    job: gin_job_t,
    ranks: *mut u32,
    capacity: usize,
    count: *mut usize,
) -> gin_status_t {
    call("gin_job_lost", || {
        let (job, count) = (table::get::<Job>(job.id)?, output(count, "count")?);
        let lost = job.bootstrap.lost();
        for (out, rank) in outputs(ranks, capacity.min(lost.len()), "ranks")?.iter_mut().zip(&lost) {
            *out = *rank;
        }
        count.write(lost.len());
        Ok(())
    })
}

/// Makes a job of the ranks that remain without the `count` lost ranks, in the same order; the new ranks count from 0.
/// All remaining ranks call it with the same ranks, which each of them learned from `gin_job_lost` and agreed on, or
/// knows from elsewhere. Waits for them, at most `joining_ms` milliseconds.
///
/// The new job has communicators and windows of its own: release the old ones, and close the old job. Where the ranks
/// are threads of one process, it is `GIN_ERROR_BOOTSTRAP`: they end together.
///
/// The caller owns the handle, and closes it with `gin_job_close`.
///
/// # Safety
/// - As the crate's docs say; `lost` has `count` numbers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gin_job_without(
    job: gin_job_t,
    lost: *const u32,
    count: usize,
    joining_ms: u32,
    remaining: *mut gin_job_t,
) -> gin_status_t {
    call("gin_job_without", || {
        let (job, out) = (table::get::<Job>(job.id)?, output(remaining, "remaining")?);
        let lost = inputs(lost, count, "lost")?.to_vec();
        out.write(job.next(job.bootstrap.without(&lost, Duration::from_millis(joining_ms.into()))?)?);
        Ok(())
    })
}

/// Makes a job with processes that join as the `count` ranks `joining`: in the place of lost ranks, or as new ranks,
/// whose numbers follow. All other ranks call it with the same numbers, at a point of their choosing, and the new
/// processes `gin_job_join_running`. Waits for all of them, at most `joining_ms` milliseconds. The ranks of this job
/// keep their numbers.
///
/// This job goes on until it is closed, also after an error. Memory of the program can be registered with communicators
/// of the new job; after a loss, release the old communicator first. Where the ranks are threads of one process, it is
/// `GIN_ERROR_BOOTSTRAP`.
///
/// The caller owns the handle, and closes it with `gin_job_close`.
///
/// # Safety
/// - As the crate's docs say; `joining` has `count` numbers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gin_job_grow(
    job: gin_job_t,
    joining: *const u32,
    count: usize,
    joining_ms: u32,
    next: *mut gin_job_t,
) -> gin_status_t {
    call("gin_job_grow", || {
        let (job, out) = (table::get::<Job>(job.id)?, output(next, "next")?);
        let joining = inputs(joining, count, "joining")?.to_vec();
        out.write(job.next(job.bootstrap.grow(&joining, Duration::from_millis(joining_ms.into()))?)?);
        Ok(())
    })
}

/// Writes the id with which processes can join the job while it runs. Not collective.
///
/// # Safety
/// - As the crate's docs say.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gin_job_id(job: gin_job_t, id: *mut gin_unique_id_t) -> gin_status_t {
    call("gin_job_id", || {
        let (job, out) = (table::get::<Job>(job.id)?, output(id, "id")?);
        let text = "the ranks are threads of one process, which no other process joins";
        let found = job.bootstrap.id().ok_or_else(|| Failure::new(GIN_ERROR_BOOTSTRAP, text))?;
        // As many addresses as fit.
        let texts = (1..=found.addresses().len()).rev().filter_map(|count| {
            let id = found.with_addresses(&found.addresses()[..count]).ok()?.to_string();
            (id.len() < GIN_UNIQUE_ID_BYTES).then_some(id)
        });
        let name = texts.into_iter().next().ok_or_else(|| Failure::new(GIN_ERROR_MEMORY, "the id is too long"))?;
        let mut id = gin_unique_id_t { text: [0; GIN_UNIQUE_ID_BYTES] };
        fill(&mut id.text, &name);
        out.write(id);
        Ok(())
    })
}

/// Closes the handle. Communicators of the job stay usable; the rank leaves the job when the last of them is closed
/// too.
#[unsafe(no_mangle)]
pub extern "C" fn gin_job_close(job: gin_job_t) -> gin_status_t {
    call("gin_job_close", || table::remove::<Job>(job.id).map(drop))
}
