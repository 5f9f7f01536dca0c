// SPDX-License-Identifier: MIT OR Apache-2.0
//! gin in a job of NCCL: the ranks of an `ncclComm_t` become the ranks of a job of gin, and memory that NCCL allocated
//! becomes windows.
//!
//! NCCL's library is opened at run time. A process that has loaded it, such as one with torch, gets that one.
//!
//! gin maps NCCL's memory by itself, from the file of the allocation, at addresses of gin's choice. So it needs no
//! layout of NCCL, and its kernels use loads and stores, barriers and the network as with other windows. Memory is that
//! of `ncclMemAlloc`. In a process it has two addresses then, NCCL's and gin's: one kernel must not use both for the
//! same bytes of a peer. Kernels in the order of a stream may.
//!
//! ```no_run
//! use gin_host::boot::TcpConfig;
//! use gin_host::comm::{CommConfig, Communicator, Requirements, WindowFlags};
//! use gin_host::device::Device;
//! use gin_host::nccl::NcclComm;
//! use std::ffi::c_void;
//! use std::sync::Arc;
//!
//! /// # Safety
//! /// - `comm` is an `ncclComm_t`, and `window` one of its windows, with `bytes` bytes.
//! unsafe fn join(
//!     comm: *mut c_void,
//!     window: *mut c_void,
//!     bytes: u64,
//!     device: Arc<dyn Device>,
//! ) -> Result<Communicator, Box<dyn std::error::Error>> {
//!     // Safety: the caller's promise.
//!     let nccl = unsafe { NcclComm::new(comm) }?;
//!     let job = nccl.join(&device, TcpConfig::default())?;
//!     let gin = Communicator::new(Arc::new(job), device.clone(), CommConfig::default());
//!     gin.initialise(&Requirements::default())?;
//!     // Safety: as above.
//!     let memory = unsafe { nccl.window_memory(window, bytes, &device) }?;
//!     gin.register::<f32>(&memory, WindowFlags::NONE)?;
//!     Ok(gin)
//! }
//! ```

use gin_boot::{BootstrapError, IdError, Rendezvous, TcpBootstrap, TcpConfig, UniqueId, lock};
use gin_gpu::virt::VirtualDevice;
use gin_gpu::{Device, DeviceKind, GpuError, Memory, MemoryKind, MemorySlice, Stream};
use gin_verbs::LoadError;
use gin_verbs::nccl::{LIBRARY, NCCL_IN_PROGRESS, NCCL_SUCCESS, NCCL_UINT8, Nccl, version_text};
use std::ffi::{CStr, c_int, c_void};
use std::ptr;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// The oldest version of NCCL whose windows gin takes: 2.29.
const OLDEST: c_int = 22900;
/// The bytes of an id, with zeros at its end.
const ID_BYTES: usize = 1024;
/// The interval at which a rank looks for the end of a broadcast.
const LOOK_EVERY: Duration = Duration::from_micros(100);

/// Why gin cannot use a communicator of NCCL.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum NcclError {
    /// The library cannot be opened.
    #[error("{library} cannot be opened ({reason}); install NCCL 2.29 or later (PyPI: nvidia-nccl-cu13)")]
    NoLibrary {
        /// Name or path of the library.
        library: String,
        /// The loader's reason.
        reason: String,
    },
    /// The library lacks a function or is too old.
    #[error("{library} is NCCL {version}; gin needs 2.29 or later (PyPI: nvidia-nccl-cu13)")]
    TooOld {
        /// Name or path of the library.
        library: String,
        /// Its version.
        version: String,
    },
    /// The communicator is null.
    #[error("the communicator is null; pass an ncclComm_t that ncclCommInitRank has returned")]
    Null,
    /// A call of NCCL failed.
    #[error("{call} failed: {reason}")]
    Call {
        /// The function.
        call: &'static str,
        /// NCCL's text.
        reason: String,
    },
    /// The communicator belongs to another GPU.
    #[error("the communicator is of GPU {nccl} and the device is {device}; pass the device of the communicator's GPU")]
    OtherGpu {
        /// CUDA's number of the communicator's GPU.
        nccl: i32,
        /// The device.
        device: String,
    },
    /// Rank 0 has sent no id.
    #[error("rank 0 could not listen; its error has the reason")]
    NoId,
    /// Not all ranks took part in time.
    #[error("a broadcast of NCCL has not ended after {after:?}; all ranks of the communicator must join")]
    Silent {
        /// The time that ranks had.
        after: Duration,
    },
    /// The id of the job is garbled.
    #[error("the id that rank 0 sent is garbled: {0}")]
    Id(#[from] IdError),
    /// Ranks could not meet.
    #[error(transparent)]
    Bootstrap(#[from] BootstrapError),
    /// An error of the device.
    #[error(transparent)]
    Gpu(#[from] GpuError),
}

/// A communicator of NCCL, which the program made and keeps.
#[derive(derive_more::Debug)]
pub struct NcclComm {
    #[debug(skip)]
    nccl: Nccl,
    comm: *mut c_void,
    rank: u32,
    ranks: u32,
    gpu: i32,
    /// Held during calls that use the communicator.
    in_use: Mutex<()>,
}

// Safety: NCCL binds a communicator to no thread, and one thread at a time uses it.
unsafe impl Send for NcclComm {}
// Safety: as above.
unsafe impl Sync for NcclComm {}

impl NcclComm {
    /// Uses a communicator, by the library with the usual name (`libnccl.so.2`).
    ///
    /// # Safety
    /// - `comm` is an `ncclComm_t` of that library. It stays valid as long as the result, and the program does not use
    ///   it during a call of the result.
    ///
    /// # Errors
    /// [`NcclError`]: the library is absent or too old, or refuses the communicator.
    pub unsafe fn new(comm: *mut c_void) -> Result<Self, NcclError> {
        // Safety: the caller's promise.
        unsafe { Self::with_library(comm, LIBRARY) }
    }

    /// Does the same with the library of this path, or of this name for the loader.
    ///
    /// # Safety
    /// - As for [`new`](Self::new).
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub unsafe fn with_library(comm: *mut c_void, library: &str) -> Result<Self, NcclError> {
        let nccl = open(library)?;
        if comm.is_null() {
            return Err(NcclError::Null);
        }
        let mut made = Self { nccl, comm, rank: 0, ranks: 0, gpu: 0, in_use: Mutex::new(()) };
        let (nccl, mut numbers) = (&made.nccl, [0; 3]);
        let [rank, ranks, gpu] = &mut numbers;
        // Safety: the communicator is valid; each call writes one integer.
        unsafe {
            made.check("ncclCommUserRank", (nccl.ncclCommUserRank)(comm, rank))?;
            made.check("ncclCommCount", (nccl.ncclCommCount)(comm, ranks))?;
            made.check("ncclCommCuDevice", (nccl.ncclCommCuDevice)(comm, gpu))?;
        }
        let [rank, ranks, gpu] = numbers;
        (made.rank, made.ranks, made.gpu) = (rank.unsigned_abs(), ranks.unsigned_abs(), gpu);
        Ok(made)
    }

    /// Returns the rank of this process or thread.
    pub fn rank(&self) -> u32 {
        self.rank
    }

    /// Returns the number of ranks.
    pub fn ranks(&self) -> u32 {
        self.ranks
    }

    /// Joins a job of gin with the same ranks. Collective: every rank of the communicator calls it, on the device whose
    /// GPU the communicator has. One broadcast of NCCL carries the id of the job. Its secret is as safe as NCCL's
    /// traffic, which is not encrypted.
    ///
    /// # Errors
    /// [`NcclError`]. A rank that waited longer than [`joining`](TcpConfig::joining) for the broadcast leaves 1 KiB of
    /// device memory to NCCL. With a blocking communicator, which is NCCL's default, a rank waits inside NCCL for ranks
    /// that do not call this, as in every first collective.
    pub fn join(&self, device: &Arc<dyn Device>, config: TcpConfig) -> Result<TcpBootstrap, NcclError> {
        let _in_use = lock(&self.in_use);
        self.check_device(device)?;
        // Ranks that wait for an id learn of a failure here by its absence.
        let made = (self.rank == 0).then(|| Rendezvous::new(config.clone()));
        let mut id = vec![0; ID_BYTES];
        if let Some(Ok(rendezvous)) = &made {
            let text = rendezvous.id().to_string();
            let room = id.get_mut(..text.len()).ok_or(NcclError::NoId)?;
            room.copy_from_slice(text.as_bytes());
        }
        self.broadcast(device, &mut id, config.joining)?;
        if let Some(rendezvous) = made {
            return Ok(rendezvous?.join(self.ranks)?);
        }
        let text = String::from_utf8_lossy(&id);
        let text = text.trim_end_matches('\0');
        if text.is_empty() {
            return Err(NcclError::NoId);
        }
        let id: UniqueId = text.parse()?;
        Ok(TcpBootstrap::join(&id, self.rank, self.ranks, config)?)
    }

    /// Returns the memory of a window that NCCL registered (`ncclCommWindowRegister`), for
    /// [`Communicator::register`](crate::comm::Communicator::register). `bytes`: the number of registered bytes.
    ///
    /// # Safety
    /// - `window` is a window of this communicator with at least `bytes` bytes on this rank.
    /// - It stays registered, and its memory allocated, until the result, the windows of gin in which it is, and
    ///   communicators that have had such windows are gone on all ranks, and no kernel runs that uses them. So call
    ///   `ncclCommWindowDeregister` and `ncclMemFree` after gin's `destroy`.
    ///
    /// # Errors
    /// [`NcclError::Gpu`] with [`GpuError::Foreign`] if the memory is not that of one `ncclMemAlloc`; [`NcclError`]
    /// of NCCL.
    pub unsafe fn window_memory(
        &self,
        window: *mut c_void,
        bytes: u64,
        device: &Arc<dyn Device>,
    ) -> Result<MemorySlice, NcclError> {
        const CALL: &str = "ncclWinGetUserPtr";
        let _in_use = lock(&self.in_use);
        self.check_device(device)?;
        let absent = || NcclError::Call { call: CALL, reason: "the library has no such function".to_owned() };
        let ask = self.nccl.ncclWinGetUserPtr.ok_or_else(absent)?;
        let mut address = ptr::null_mut();
        // Safety: the caller's promise; writes one pointer.
        self.check(CALL, unsafe { ask(self.comm, window, &raw mut address) })?;
        // Safety: the caller's promise.
        unsafe { memory(device, address.expose_provenance() as u64, bytes) }.map_err(NcclError::Gpu)
    }

    /// Returns the error of a call of NCCL, if it failed.
    fn check(&self, call: &'static str, result: c_int) -> Result<(), NcclError> {
        if result == NCCL_SUCCESS {
            return Ok(());
        }
        // Safety: both return strings of the library, or null.
        let [kind, last] = unsafe {
            [(self.nccl.ncclGetErrorString)(result), (self.nccl.ncclGetLastError)(self.comm)].map(|text| {
                if text.is_null() { String::new() } else { CStr::from_ptr(text).to_string_lossy().trim().to_owned() }
            })
        };
        let reason = if last.is_empty() { kind } else { format!("{kind}: {last}") };
        Err(NcclError::Call { call, reason })
    }

    fn check_device(&self, device: &Arc<dyn Device>) -> Result<(), NcclError> {
        if device.kind() == DeviceKind::Virtual {
            return Ok(());
        }
        let entered = device.nic_access().map_or(Ok(None), |access| access.enter_cuda())?;
        let other = || NcclError::OtherGpu { nccl: self.gpu, device: device.name() };
        entered.filter(|number| *number == self.gpu).map(drop).ok_or_else(other)
    }

    /// Replaces the bytes by rank 0's. Collective.
    fn broadcast(&self, device: &Arc<dyn Device>, bytes: &mut [u8], limit: Duration) -> Result<(), NcclError> {
        const CALL: &str = "ncclBroadcast";
        let memory = Memory::new(device, MemoryKind::Device, bytes.len() as u64)?;
        memory.write(0, bytes)?;
        let stream = stream(device)?;
        let raw = stream.as_ref().map_or(ptr::null_mut(), |(_, raw)| *raw);
        let (buffer, until) = (memory.address() as usize as *mut c_void, Instant::now() + limit);
        let start = self.nccl.ncclBroadcast;
        // Safety: the memory has these bytes, and stays until the stream has done the work.
        let started = unsafe { start(buffer, buffer, bytes.len(), NCCL_UINT8, 0, self.comm, raw) };
        let ended = self.wait(CALL, started, stream.as_ref().map(|(stream, _)| &**stream), until, limit);
        if ended.is_err() {
            // NCCL may still write there.
            std::mem::forget((memory, stream));
            return ended;
        }
        Ok(memory.read(0, bytes)?)
    }

    /// Waits until NCCL has started a call and the stream has done it.
    fn wait(
        &self,
        call: &'static str,
        started: c_int,
        stream: Option<&dyn Stream>,
        until: Instant,
        limit: Duration,
    ) -> Result<(), NcclError> {
        if started != NCCL_IN_PROGRESS {
            self.check(call, started)?;
        }
        loop {
            let mut state = NCCL_SUCCESS;
            // Safety: the communicator is valid; writes one integer.
            let asked = unsafe { (self.nccl.ncclCommGetAsyncError)(self.comm, &raw mut state) };
            self.check("ncclCommGetAsyncError", asked)?;
            if state != NCCL_IN_PROGRESS {
                self.check(call, state)?;
                if stream.map_or(Ok(true), Stream::is_idle)? {
                    return Ok(());
                }
            }
            if Instant::now() > until {
                return Err(NcclError::Silent { after: limit });
            }
            std::thread::sleep(LOOK_EVERY);
        }
    }
}

/// Opens the library, and checks its version.
fn open(library: &str) -> Result<Nccl, NcclError> {
    let file = || library.to_owned();
    let nccl = Nccl::open(library).map_err(|error| match error {
        LoadError::NoLibrary { library, reason } => NcclError::NoLibrary { library, reason },
        error => NcclError::TooOld { library: file(), version: format!("of an unknown version ({error})") },
    })?;
    let mut version = 0;
    // Safety: writes one integer.
    let asked = unsafe { (nccl.ncclGetVersion)(&raw mut version) };
    if asked != NCCL_SUCCESS || version < OLDEST {
        return Err(NcclError::TooOld { library: file(), version: version_text(version) });
    }
    Ok(nccl)
}

/// A stream of the device with its handle; virtual GPUs have none that NCCL could use.
type RawStream = Option<(Arc<dyn Stream>, *mut c_void)>;

fn stream(device: &Arc<dyn Device>) -> Result<RawStream, GpuError> {
    if device.kind() == DeviceKind::Virtual {
        return Ok(None);
    }
    let stream = device.stream()?;
    #[cfg(feature = "gpu")]
    if let Some(raw) = gin_gpu::cuda::CudaStream::of(&*stream).map(gin_gpu::cuda::CudaStream::raw) {
        return Ok(Some((stream, raw)));
    }
    drop(stream);
    Err(GpuError::Unsupported { device: device.name(), what: "give NCCL a stream" })
}

/// Returns memory of the program that ranks in other processes can map.
///
/// # Safety
/// - As for [`NcclComm::window_memory`].
unsafe fn memory(device: &Arc<dyn Device>, address: u64, bytes: u64) -> Result<MemorySlice, GpuError> {
    if let Some(device) = device.downcast::<VirtualDevice>() {
        // Safety: the caller's promise.
        return Ok(unsafe { device.import_memory(address, bytes)? }.whole());
    }
    #[cfg(feature = "gpu")]
    if let Some(device) = gin_gpu::cuda::CudaDevice::of(&**device) {
        // Safety: the caller's promise.
        return unsafe { device.import_shared(address, bytes, None) };
    }
    Err(GpuError::Unsupported { device: device.name(), what: "use memory of NCCL" })
}
