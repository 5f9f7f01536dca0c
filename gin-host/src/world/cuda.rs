// SPDX-License-Identifier: MIT OR Apache-2.0
//! Jobs on NVIDIA GPUs.

use super::WorldConfig;
use gin_gpu::cuda::devices;
use gin_gpu::{EmbeddedModules, GpuError};

impl WorldConfig {
    /// Makes a job of `ranks` ranks that are threads on these GPUs, with the kernels that they may launch. Ranks share
    /// GPUs if there are fewer GPUs than ranks.
    ///
    /// Ranks whose GPUs reach each other with atomics form LSA teams: all ranks on one GPU, or on GPUs that NVLink
    /// connects.
    ///
    /// # Errors
    /// As [`devices`].
    pub fn cuda(gpus: &[usize], ranks: u32, kernels: &[EmbeddedModules]) -> Result<Self, GpuError> {
        let mut config = Self::threads(ranks);
        config.devices = Some(devices(gpus, kernels, None)?);
        Ok(config)
    }
}
