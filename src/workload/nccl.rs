// SPDX-License-Identifier: MIT OR Apache-2.0
//! The same collectives by NCCL, to compare with: its library is opened at run time.

use super::{Plan, RunDevice, Watched};
use crate::cli::{Refused, Workload};
use gin_gpu::cuda::CudaStream;
use gin_gpu::{GpuError, Memory, MemoryKind, Stream};
use gin_host::comm::CommError;
use gin_host::world::Rank;
use gin_verbs::LoadError;
use gin_verbs::nccl::{
    Collectives, Comm, LIBRARY, LIBRARY_VARIABLE, NCCL_FLOAT32, NCCL_SUM, NCCL_UINT8, UniqueId, version_text,
};
use std::collections::BTreeMap;
use std::ffi::{CStr, c_int, c_void};
use std::ptr::null_mut;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

/// NCCL's library. It stays open, and its communicators are kept for later runs: their end would free memory of a GPU,
/// and the driver waits until all kernels of the GPU have ended, also a kernel that waits for another GPU.
pub(super) struct Nccl {
    functions: Collectives,
    version: String,
    /// By number of ranks and rank.
    comms: Mutex<BTreeMap<(u32, u32), KeptComm>>,
}

/// A communicator, which any one thread may use.
struct KeptComm(Comm);

// Safety: NCCL lets any thread use a communicator, one at a time.
unsafe impl Send for KeptComm {}

impl Nccl {
    /// Opens the library for a run.
    ///
    /// # Errors
    /// Refuses runs that NCCL has no collective for, or not enough GPUs, and a library that is not there.
    pub(super) fn open(plan: &Plan) -> Result<&'static Self, Refused> {
        static OPENED: OnceLock<Result<Nccl, String>> = OnceLock::new();
        let refuse = |reason: String| Err(Refused(format!("--beside nccl: {reason}")));
        if !matches!(plan.workload, Workload::Ring | Workload::Alltoall) {
            return refuse("NCCL has collectives like ring and alltoall; run one of these".to_owned());
        }
        match &plan.device {
            RunDevice::Virtual => return refuse("NCCL needs GPUs; leave it out on virtual ones".to_owned()),
            RunDevice::Cuda(gpus) if gpus.max_on_one(plan.ranks) > 1 => {
                return refuse(format!("NCCL needs a GPU for each rank; use fewer than {} ranks", plan.ranks));
            }
            RunDevice::Cuda(_) => {}
        }
        let opened = OPENED.get_or_init(Self::load);
        opened.as_ref().or_else(|error| {
            refuse(format!(
                "{error}; install NCCL, or set {LIBRARY_VARIABLE} to the library's path (of PyTorch: \
                 site-packages/nvidia/nccl/lib/{LIBRARY})"
            ))
        })
    }

    fn load() -> Result<Self, String> {
        let library = std::env::var(LIBRARY_VARIABLE).unwrap_or_else(|_| LIBRARY.to_owned());
        let functions = Collectives::open(&library).map_err(|error| match error {
            LoadError::NoLibrary { library, reason } => format!("{library} cannot be opened ({reason})"),
            error => error.to_string(),
        })?;
        let mut version = 0;
        // Safety: writes one number.
        unsafe { (functions.ncclGetVersion)(&raw mut version) };
        Ok(Self { functions, version: version_text(version), comms: Mutex::default() })
    }

    /// Returns the version of the library, as in `2.28.9`.
    pub(super) fn version(&self) -> &str {
        &self.version
    }

    /// Makes the communicator of a rank, and keeps it.
    fn connect(&self, rank: &Rank, (ranks, me): (u32, u32)) -> Result<Comm, CommError> {
        let mut id = UniqueId([0; 128]);
        if me == 0 {
            // Safety: writes the id.
            self.check("ncclGetUniqueId", unsafe { (self.functions.ncclGetUniqueId)(&raw mut id) })?;
        }
        let ids = rank.bootstrap().all_gather(&id.0)?;
        if let Ok(first) = <[u8; 128]>::try_from(ids[0].as_slice()) {
            id = UniqueId(first);
        }
        let mut comm = null_mut();
        // Safety: writes the communicator.
        let code = unsafe { (self.functions.ncclCommInitRank)(&raw mut comm, ranks as c_int, id, me as c_int) };
        self.check("ncclCommInitRank", code)?;
        lock(&self.comms).insert((ranks, me), KeptComm(comm));
        Ok(comm)
    }

    /// Returns the error of a call of NCCL.
    fn check(&self, call: &'static str, code: c_int) -> Result<(), CommError> {
        if code == 0 {
            return Ok(());
        }
        // Safety: returns a constant text for each number.
        let reason =
            unsafe { CStr::from_ptr((self.functions.ncclGetErrorString)(code)) }.to_string_lossy().into_owned();
        Err(GpuError::Driver { context: call, reason }.into())
    }
}

/// NCCL's communicator of a rank, with memory for the collective of a run.
pub(super) struct Rival<'a> {
    nccl: &'a Nccl,
    plan: &'a Plan,
    comm: Comm,
    source: Arc<Memory>,
    result: Arc<Memory>,
}

impl<'a> Rival<'a> {
    /// Returns the communicator of a rank, a new one in the first run; all ranks call.
    pub(super) fn new(nccl: &'a Nccl, plan: &'a Plan, rank: &Rank) -> Result<Self, CommError> {
        let bytes = plan.sizes.bytes * if plan.workload == Workload::Alltoall { plan.ranks.into() } else { 1 };
        let memory = || Memory::new(rank.device(), MemoryKind::Device, bytes);
        // These calls make the GPU's context current, in which NCCL works.
        let (source, result) = (memory()?, memory()?);
        let place = (plan.ranks, rank.rank());
        let kept = lock(&nccl.comms).get(&place).map(|kept| kept.0);
        let comm = match kept {
            Some(comm) => comm,
            None => nccl.connect(rank, place)?,
        };
        Ok(Self { nccl, plan, comm, source, result })
    }

    /// Runs the collective as often as the workload, and returns its time.
    pub(super) fn time(&self, rank: &Rank, comm: &Watched<'_>) -> Result<Duration, CommError> {
        let stream = rank.stream()?;
        // From here on no rank allocates memory. An allocation frees what is due on all GPUs, for which the driver
        // waits until NCCL's kernels have ended, and these wait for the kernel of the rank that would allocate.
        rank.barrier()?;
        for _ in 0..self.plan.sizes.warmup {
            self.enqueue(&*stream)?;
        }
        stream.synchronize()?;
        self.plan.timed(rank, comm, &stream, || (0..self.plan.sizes.iters).try_for_each(|_| self.enqueue(&*stream)))
    }

    fn enqueue(&self, stream: &dyn Stream) -> Result<(), CommError> {
        let nccl = &self.nccl.functions;
        let raw = CudaStream::of(stream).map_or(null_mut(), CudaStream::raw);
        let at = |memory: &Memory, offset: u64| {
            std::ptr::with_exposed_provenance_mut::<c_void>((memory.address() + offset) as usize)
        };
        let bytes = self.plan.sizes.bytes;
        if self.plan.workload == Workload::Ring {
            let (from, to) = (at(&self.source, 0), at(&self.result, 0));
            // Safety: both memories have the elements and outlive the stream's work, which the caller waits for.
            let code =
                unsafe { (nccl.ncclAllReduce)(from, to, bytes as usize / 4, NCCL_FLOAT32, NCCL_SUM, self.comm, raw) };
            return self.nccl.check("ncclAllReduce", code);
        }
        // Safety: as above.
        unsafe {
            self.nccl.check("ncclGroupStart", (nccl.ncclGroupStart)())?;
            for peer in 0..self.plan.ranks {
                let place = u64::from(peer) * bytes;
                let (from, to) = (at(&self.source, place), at(&self.result, place));
                let sent = (nccl.ncclSend)(from, bytes as usize, NCCL_UINT8, peer as c_int, self.comm, raw);
                self.nccl.check("ncclSend", sent)?;
                let received = (nccl.ncclRecv)(to, bytes as usize, NCCL_UINT8, peer as c_int, self.comm, raw);
                self.nccl.check("ncclRecv", received)?;
            }
            self.nccl.check("ncclGroupEnd", (nccl.ncclGroupEnd)())
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
