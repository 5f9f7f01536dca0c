// SPDX-License-Identifier: MIT OR Apache-2.0
//! NVIDIA GPUs, through the CUDA driver (feature `cuda`).
//!
//! The driver is loaded when the first device is made. That fails with [`GpuError::NoDriver`],
//! [`GpuError::DriverTooOld`] or [`GpuError::NoDevice`] if there is no driver, it is too old, or it shows no GPU. Ranks
//! are threads of one process, and several ranks may share a GPU: each has its own [`CudaDevice`] over the GPU's
//! primary context.
//!
//! Streams, memory and modules of a program that calls the driver itself, or through `cust` or C++, can be used too,
//! and the program can use gin's: [`raw`].
//!
//! # Kernels that wait
//! While a kernel waits for others, some driver calls do not return. The others may wait for the thread that made such
//! a call. So:
//! - All functions of a module are loaded when the module is.
//! - Memory, streams, events, modules and doorbell pages that are dropped are freed later, by an allocation or a
//!   [`synchronize`](Stream::synchronize) while no kernel of this process runs on any of its GPUs. Failures are kept:
//!   [`take_failures`].
//! - [Resident kernels](crate::resident::Resident) are asked to park before memory is freed, before a module is loaded,
//!   and before a launch that needs more local memory than any launch before it.
//! - Launches of all ranks on a GPU are added up. A cooperative launch that does not fit beside the running kernels is
//!   refused. The sum assumes the worst placement of blocks, so some launches that would fit are refused. Of a stream
//!   it counts the largest kernel since the stream was seen idle.
//! - Memory is zeroed and copied through pinned buffers, by copy engines. These work even while every SM is
//!   taken. A [`Stream::copy`] between addresses of one GPU does not use them: it needs a free SM.
//! - Kernels that are part of CUDA graphs are not counted here: see [`CudaStream`].
//! - No thread waits inside the driver: streams and events are queried repeatedly.

mod context;
mod copies;
mod copy_stream;
mod deferred;
mod driver;
mod embedded;
mod import;
mod info;
mod lane;
mod launches;
pub mod mapped;
mod memory;
mod module;
mod nic;
mod pages;
mod pinned;
pub mod raw;
mod resident;
mod shape;
mod shared;
mod stream;

pub use deferred::take_failures;
pub use info::{GpuInfo, device_count, gpus, kernel_module_version};
pub use stream::CudaStream;

use self::context::Context;
use self::copies::Copies;
use self::copy_stream::CopyStream;
use self::driver::BesideCaptures;
use self::launches::Stays;
use self::module::{Handle, Image, Images};
use self::pinned::is_pinned;
use self::resident::Hold;
use super::copier::Copier;
use super::lane::Lane;
use super::{
    Allocation, Device, DeviceKind, Function, GpuError, LaunchConfig, Limits, MemoryKind, MemorySharing, Module,
    ModuleSource, NicAccess, Stream,
};
use crate::copy::copy_shared;
use crate::resident::Resident;
use crate::{Devices, EmbeddedModules};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

/// Returns the newest CUDA version that the driver supports, such as `13.0`.
///
/// # Errors
/// As [`device_count`].
pub fn driver_version() -> Result<String, GpuError> {
    driver::start().map(driver::version_text)
}

/// A GPU as one rank uses it.
///
/// ```
/// use gin_gpu::Device;
/// use gin_gpu::cuda::CudaDevice;
///
/// match CudaDevice::new(0, &[]) {
///     Ok(device) => println!("{}: {}", device.pci_address().unwrap_or_default(), device.name()),
///     Err(error) => println!("no GPU: {error}"),
/// }
/// ```
#[derive(Debug)]
pub struct CudaDevice {
    context: Arc<Context>,
    /// Unique in this process. Launches are counted by it.
    id: u64,
    kernels: Vec<EmbeddedModules>,
    limit: Option<Duration>,
    this: Weak<Self>,
}

impl CudaDevice {
    /// Opens GPU number `ordinal` of the driver's GPUs, with the kernels of [`ModuleSource::Linked`].
    ///
    /// # Errors
    /// As [`device_count`]; [`GpuError::NoSuchDevice`]; [`GpuError::Unsupported`] for a GPU that lacks a required
    /// feature; or an error of the driver.
    pub fn new(ordinal: usize, kernels: &[EmbeddedModules]) -> Result<Arc<Self>, GpuError> {
        Self::with_limit(ordinal, kernels, None)
    }

    /// Does the same as [`new`](Self::new). A wait for a stream ends with an error after `limit`.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn with_limit(
        ordinal: usize,
        kernels: &[EmbeddedModules],
        limit: Option<Duration>,
    ) -> Result<Arc<Self>, GpuError> {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let context = Context::get(ordinal)?;
        // It makes clocks and pauses work on the host.
        crate::virt::install();
        let (id, kernels) = (NEXT.fetch_add(1, Ordering::Relaxed), kernels.to_vec());
        context.users.fetch_add(1, Ordering::Relaxed);
        Ok(Arc::new_cyclic(|this| Self { context, id, kernels, limit, this: this.clone() }))
    }

    /// Returns its number.
    pub fn ordinal(&self) -> usize {
        self.context.ordinal
    }

    /// Returns the compute capability times 10: 90 for sm_90.
    pub fn capability(&self) -> u32 {
        self.context.capability
    }

    /// Returns the number of its SMs.
    pub fn sms(&self) -> u32 {
        self.context.sms
    }
}

impl Drop for CudaDevice {
    fn drop(&mut self) {
        self.context.users.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Device for CudaDevice {
    fn name(&self) -> String {
        self.context.full_name()
    }

    fn kind(&self) -> DeviceKind {
        DeviceKind::Cuda
    }

    fn limits(&self) -> Limits {
        self.context.limits
    }

    fn allocate(&self, kind: MemoryKind, bytes: u64) -> Result<Allocation, GpuError> {
        memory::allocate(&self.context, kind, bytes)
    }

    fn sharing(&self) -> Option<&dyn MemorySharing> {
        Some(self)
    }

    fn nic_access(&self) -> Option<&dyn NicAccess> {
        Some(self)
    }

    unsafe fn copy_in(&self, destination: u64, source: &[u8]) -> Result<(), GpuError> {
        let bytes = source.len() as u64;
        if is_pinned(destination, bytes) {
            // Safety: the caller's promise.
            unsafe { copy_shared(destination, source.as_ptr().expose_provenance() as u64, bytes) };
            return Ok(());
        }
        // Safety: the caller's promise.
        CopyStream::with(&self.context, |copies| unsafe { copies.write(destination, source) })
    }

    unsafe fn copy_out(&self, destination: &mut [u8], source: u64) -> Result<(), GpuError> {
        let bytes = destination.len() as u64;
        if is_pinned(source, bytes) {
            // Safety: the caller's promise.
            unsafe { copy_shared(destination.as_mut_ptr().expose_provenance() as u64, source, bytes) };
            return Ok(());
        }
        // Safety: the caller's promise.
        CopyStream::with(&self.context, |copies| unsafe { copies.read(destination, source) })
    }

    fn load(&self, source: ModuleSource<'_>) -> Result<Box<dyn Module>, GpuError> {
        // Every typed launch comes here, and must not park resident kernels for modules that are loaded already.
        if source == ModuleSource::Linked {
            let loaded = |&embedded: &EmbeddedModules| Image::loaded(&self.context, embedded);
            if let Some(images) = self.kernels.iter().map(loaded).collect() {
                return Ok(Box::new(Images(images)));
            }
        }
        // The driver waits for running kernels before it loads a module.
        let (_hold, _beside) = (Hold::new(), BesideCaptures::begin());
        let images = match source {
            ModuleSource::Linked => {
                let image = |&embedded: &EmbeddedModules| Image::embedded(&self.context, embedded);
                self.kernels.iter().map(image).collect::<Result<_, _>>()?
            }
            ModuleSource::Ptx(text) => vec![Arc::new(Image::ptx(&self.context, text.as_bytes())?)],
            ModuleSource::Cubin(image) => vec![Arc::new(Image::load(&self.context, image)?)],
        };
        Ok(Box::new(Images(images)))
    }

    fn stream(&self) -> Result<Arc<dyn Stream>, GpuError> {
        self.stream_with_priority(0)
    }

    fn stream_with_priority(&self, priority: i32) -> Result<Arc<dyn Stream>, GpuError> {
        Ok(Arc::new(CudaStream::new(self.shared()?, priority)?))
    }

    fn reaches(&self, other: &dyn Device) -> bool {
        other.downcast::<Self>().is_some_and(|other| self.context.reaches(&other.context))
    }

    fn resident_blocks(&self, function: &Function, config: &LaunchConfig) -> Result<u64, GpuError> {
        let Some(handle) = function.handle.downcast_ref::<Handle>() else {
            return Err(self.context.unsupported("run a kernel that was loaded for another kind of device"));
        };
        let fit = handle.fit(config)?;
        Ok(launches::free_blocks(&self.context, fit))
    }

    fn allows_dependent(&self, function: &Function) -> bool {
        function.handle.downcast_ref::<Handle>().is_some_and(|handle| handle.check_dependent(&function.name).is_ok())
    }

    fn running(&self) -> usize {
        launches::running(self.context.ordinal, self.id)
    }

    fn keep_resident(&self, kernel: Weak<dyn Resident>) {
        let stays = Stays { owner: self.id, resident: kernel, room: None };
        launches::with(self.context.ordinal, |state| state.residents.push(stays));
    }

    fn copier(&self) -> Result<Option<Box<dyn Copier>>, GpuError> {
        let _beside = BesideCaptures::begin();
        Ok(Some(Box::new(Copies::new(&self.context)?)))
    }

    fn lane(&self) -> Result<Box<dyn Lane>, GpuError> {
        let _beside = BesideCaptures::begin();
        self.new_lane()
    }

    fn pci_address(&self) -> Option<String> {
        // Without an answer of the driver the address is not known.
        info::pci_address(self.ordinal()).ok()
    }
}

/// Makes the devices of the ranks of a job from `gpus`. If there are more ranks than GPUs, neighbouring ranks share
/// one. A wait for a stream ends with an error after `limit`.
///
/// # Errors
/// As [`CudaDevice::new`]; [`GpuError::NoSuchDevice`] if `gpus` is empty.
pub fn devices(gpus: &[usize], kernels: &[EmbeddedModules], limit: Option<Duration>) -> Result<Devices, GpuError> {
    let there = device_count()?;
    if gpus.is_empty() {
        return Err(GpuError::NoSuchDevice { ordinal: there, there });
    }
    for &ordinal in gpus {
        // Opened before any kernel runs, because a GPU that is opened later waits for running kernels.
        Context::get(ordinal)?;
    }
    let (gpus, kernels) = (gpus.to_vec(), kernels.to_vec());
    let name = format!("GPUs {gpus:?}");
    Ok(Devices::new(&name, move |rank, ranks| {
        let index = u64::from(rank) * gpus.len() as u64 / u64::from(ranks.max(1));
        let ordinal = gpus[(index as usize).min(gpus.len() - 1)];
        let device: Arc<dyn Device> = CudaDevice::with_limit(ordinal, &kernels, limit)?;
        Ok(device)
    }))
}
