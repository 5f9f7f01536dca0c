// SPDX-License-Identifier: MIT OR Apache-2.0
//! The devices of the ranks of a job.

use crate::{Device, GpuError};
use std::sync::Arc;

/// Makes the device of a world rank; the arguments are the rank and the number of ranks.
type MakeDevice = Arc<dyn Fn(u32, u32) -> Result<Arc<dyn Device>, GpuError> + Send + Sync>;

/// A factory of the devices of ranks.
///
/// ```
/// use gin_gpu::{Device, Devices};
/// use gin_gpu::virt::VirtualDevice;
/// use std::sync::Arc;
///
/// let devices = Devices::new("virtual GPUs", |rank, _| {
///     let device: Arc<dyn Device> = VirtualDevice::memory_only(rank);
///     Ok(device)
/// });
/// assert_eq!(devices.device(3, 4)?.name(), "virtual GPU 3");
/// # Ok::<(), gin_gpu::GpuError>(())
/// ```
#[derive(Clone, derive_more::Debug)]
pub struct Devices {
    name: Arc<str>,
    #[debug(skip)]
    make: MakeDevice,
}

impl Devices {
    /// Makes a factory. `make` gets the world rank and the number of ranks; `name` is for people.
    pub fn new(
        name: &str,
        make: impl Fn(u32, u32) -> Result<Arc<dyn Device>, GpuError> + Send + Sync + 'static,
    ) -> Self {
        Self { name: name.into(), make: Arc::new(make) }
    }

    /// Returns the name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Makes a new device object for the device that a world rank of `ranks` uses.
    ///
    /// # Errors
    /// An error of the device.
    pub fn device(&self, rank: u32, ranks: u32) -> Result<Arc<dyn Device>, GpuError> {
        (self.make)(rank, ranks)
    }
}
