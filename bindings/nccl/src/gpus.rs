// SPDX-License-Identifier: MIT OR Apache-2.0
//! The GPUs of the process: CUDA, or the virtual ones that a test passes in.

use crate::abi::SYSTEM_ERROR;
use crate::failure::Failure;
use gin_gpu::lane::{Lane, Mark};
use gin_gpu::{Device, GpuError, Memory, MemoryKind, lock};
use std::any::Any;
use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, OnceLock};

/// The place of memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Place {
    /// The GPU with this number.
    Gpu(usize),
    /// The host, in memory that GPUs can reach.
    Host,
    /// Memory of the host that only the CPU reaches.
    Cpu,
    /// Memory of a rank in another process, which the GPUs of that rank reach.
    Elsewhere,
}

/// The GPUs of a process, by number.
pub trait Gpus: Send + Sync + fmt::Debug {
    /// Returns the GPU that the calling thread has chosen.
    ///
    /// # Errors
    /// An error of the driver.
    fn current(&self) -> Result<Option<usize>, GpuError>;

    /// Returns the place of an address.
    ///
    /// # Errors
    /// An error of the driver.
    fn place(&self, address: u64) -> Result<Place, GpuError>;

    /// Lets a GPU read and write memory of NCCL or of the program.
    ///
    /// # Safety
    /// - The memory exists.
    ///
    /// # Errors
    /// [`GpuError::Foreign`] with the reason.
    unsafe fn reach(&self, gpu: usize, address: u64, bytes: u64) -> Result<(), GpuError>;

    /// Exports memory of NCCL or of the program, so that other processes can map it: each allocation that has some of
    /// the bytes as a file, in the order of addresses.
    ///
    /// # Safety
    /// - The memory exists as long as the results, and this GPU reaches it.
    ///
    /// # Errors
    /// [`GpuError::Foreign`] with the reason.
    unsafe fn files(&self, gpu: usize, address: u64, bytes: u64) -> Result<Vec<Arc<Memory>>, GpuError>;

    /// Returns the GPU, to share memory with other processes.
    ///
    /// # Errors
    /// An error of the driver.
    fn device(&self, gpu: usize) -> Result<Arc<dyn Device>, GpuError>;

    /// Returns whether `from` copies to memory of `to` directly.
    ///
    /// # Errors
    /// An error of the driver.
    fn copies_reach(&self, from: usize, to: usize) -> Result<bool, GpuError>;

    /// Allocates memory of a GPU, or of the host by a GPU, that all of them reach.
    ///
    /// # Errors
    /// An error of the driver.
    fn memory(&self, gpu: usize, kind: MemoryKind, bytes: u64) -> Result<Arc<Memory>, GpuError>;

    /// Makes a lane of a GPU.
    ///
    /// # Errors
    /// An error of the driver.
    fn lane(&self, gpu: usize) -> Result<Box<dyn Lane>, GpuError>;

    /// Frees memory that was dropped, if it is not free yet.
    fn free_dropped(&self);

    /// Returns a value that, dropped, gives the calling thread the GPU back that it has now.
    ///
    /// # Errors
    /// An error of the driver.
    fn keep_current(&self) -> Result<Box<dyn Any>, GpuError>;
}

/// The lane of a GPU for signals from all ranks that follow nothing.
#[derive(Debug)]
pub(crate) struct Desk {
    pub(crate) lane: Mutex<Box<dyn Lane>>,
    pub(crate) mark: Arc<Mark>,
}

/// The GPUs, and the objects of each that all communicators share.
#[derive(Debug)]
pub(crate) struct Machine {
    pub(crate) gpus: Box<dyn Gpus>,
    desks: Mutex<BTreeMap<usize, Arc<Desk>>>,
    scratch: Mutex<BTreeMap<usize, Arc<Memory>>>,
}

static MACHINE: OnceLock<Machine> = OnceLock::new();

/// Uses these GPUs from now on. Returns whether no call has chosen others before.
pub fn use_gpus(gpus: Box<dyn Gpus>) -> bool {
    MACHINE.set(Machine::new(gpus)).is_ok()
}

impl Machine {
    fn new(gpus: Box<dyn Gpus>) -> Self {
        Self { gpus, desks: Mutex::default(), scratch: Mutex::default() }
    }

    /// Returns the GPUs: CUDA, unless a test has passed in others.
    pub(crate) fn get() -> Result<&'static Self, Failure> {
        if let Some(machine) = MACHINE.get() {
            return Ok(machine);
        }
        let gpus = cuda().map_err(|reason| Failure::new(SYSTEM_ERROR, reason))?;
        Ok(MACHINE.get_or_init(|| Self::new(gpus)))
    }

    /// Returns the lane of a GPU for signals that follow nothing.
    pub(crate) fn desk(&self, gpu: usize) -> Result<Arc<Desk>, GpuError> {
        let mut desks = lock(&self.desks);
        if let Some(desk) = desks.get(&gpu) {
            return Ok(desk.clone());
        }
        let lane = self.gpus.lane(gpu)?;
        let desk = Arc::new(Desk { mark: lane.mark().clone(), lane: Mutex::new(lane) });
        desks.insert(gpu, desk.clone());
        Ok(desk)
    }

    /// Returns a few bytes of a GPU for the first use of lanes.
    pub(crate) fn scratch(&self, gpu: usize) -> Result<Arc<Memory>, GpuError> {
        let mut scratch = lock(&self.scratch);
        if let Some(memory) = scratch.get(&gpu) {
            return Ok(memory.clone());
        }
        let memory = self.gpus.memory(gpu, MemoryKind::Device, 256)?;
        scratch.insert(gpu, memory.clone());
        Ok(memory)
    }
}

#[cfg(not(feature = "cuda"))]
fn cuda() -> Result<Box<dyn Gpus>, String> {
    Err("this plugin was built without the feature `cuda`, so it supports no GPUs".to_owned())
}

#[cfg(feature = "cuda")]
fn cuda() -> Result<Box<dyn Gpus>, String> {
    gin_gpu::cuda::device_count().map_err(|error| error.to_string())?;
    Ok(Box::new(cuda_gpus::Cuda::default()))
}

#[cfg(feature = "cuda")]
mod cuda_gpus {
    use super::{Gpus, Place};
    use gin_gpu::cuda::CudaDevice;
    use gin_gpu::cuda::mapped::{Holder, KeepContext, copies_reach, current_gpu, free_dropped};
    use gin_gpu::lane::Lane;
    use gin_gpu::{Device, GpuError, Memory, MemoryKind, lock};
    use std::any::Any;
    use std::collections::BTreeMap;
    use std::sync::{Arc, Mutex};

    /// The GPUs of CUDA that were used, by number.
    #[derive(Debug, Default)]
    pub(super) struct Cuda(Mutex<BTreeMap<usize, Arc<CudaDevice>>>);

    impl Cuda {
        fn of(&self, gpu: usize) -> Result<Arc<CudaDevice>, GpuError> {
            let mut devices = lock(&self.0);
            if let Some(device) = devices.get(&gpu) {
                return Ok(device.clone());
            }
            let device = CudaDevice::new(gpu, &[])?;
            devices.insert(gpu, device.clone());
            Ok(device)
        }
    }

    impl Gpus for Cuda {
        fn current(&self) -> Result<Option<usize>, GpuError> {
            current_gpu()
        }

        fn place(&self, address: u64) -> Result<Place, GpuError> {
            Ok(match Holder::of(address)? {
                Holder::Gpu(gpu) => Place::Gpu(gpu),
                Holder::Host => Place::Host,
                Holder::Unknown => Place::Cpu,
            })
        }

        unsafe fn reach(&self, gpu: usize, address: u64, bytes: u64) -> Result<(), GpuError> {
            // Safety: the caller's promise.
            unsafe { self.of(gpu)?.reach(address, bytes) }
        }

        unsafe fn files(&self, gpu: usize, address: u64, bytes: u64) -> Result<Vec<Arc<Memory>>, GpuError> {
            // Safety: the caller's promise.
            unsafe { self.of(gpu)?.files(address, bytes) }
        }

        fn device(&self, gpu: usize) -> Result<Arc<dyn Device>, GpuError> {
            Ok(self.of(gpu)?)
        }

        fn copies_reach(&self, from: usize, to: usize) -> Result<bool, GpuError> {
            copies_reach(from, to)
        }

        fn memory(&self, gpu: usize, kind: MemoryKind, bytes: u64) -> Result<Arc<Memory>, GpuError> {
            Memory::new(&self.device(gpu)?, kind, bytes)
        }

        fn lane(&self, gpu: usize) -> Result<Box<dyn Lane>, GpuError> {
            self.of(gpu)?.lane()
        }

        fn free_dropped(&self) {
            free_dropped();
        }

        fn keep_current(&self) -> Result<Box<dyn Any>, GpuError> {
            Ok(Box::new(KeepContext::new()?))
        }
    }
}
