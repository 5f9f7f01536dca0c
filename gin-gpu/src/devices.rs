// SPDX-License-Identifier: MIT OR Apache-2.0
//! The devices of the ranks of a job.

use crate::{Device, GpuError};
use std::fmt;
use std::sync::Arc;

/// Makes the device of a world rank; the arguments are the rank and the number of ranks.
type MakeDevice = Arc<dyn Fn(u32, u32) -> Result<Arc<dyn Device>, GpuError> + Send + Sync>;

/// A factory of the devices of ranks.
#[derive(Clone)]
pub struct Devices {
    name: Arc<str>,
    make: MakeDevice,
}

impl Devices {
    /// Devices that `make` makes for each world rank, given also the number of ranks; `name` is for people.
    pub fn new(
        name: &str,
        make: impl Fn(u32, u32) -> Result<Arc<dyn Device>, GpuError> + Send + Sync + 'static,
    ) -> Self {
        Self { name: name.into(), make: Arc::new(make) }
    }

    /// Their name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Makes a device object of its own for the device that a world rank of `ranks` would use.
    ///
    /// # Errors
    /// An error of the device.
    pub fn device(&self, rank: u32, ranks: u32) -> Result<Arc<dyn Device>, GpuError> {
        (self.make)(rank, ranks)
    }
}

impl fmt::Debug for Devices {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Devices").field("name", &self.name).finish_non_exhaustive()
    }
}
