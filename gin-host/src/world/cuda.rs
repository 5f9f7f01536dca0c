// SPDX-License-Identifier: MIT OR Apache-2.0
//! Jobs on NVIDIA GPUs.

use super::WorldConfig;
use gin_gpu::GpuError;
use gin_gpu::cuda::{Embedded, devices};

impl WorldConfig {
    /// `ranks` ranks as threads on these GPUs, shared if there are fewer, with the kernels that they may launch.
    ///
    /// Ranks form LSA teams as far as their GPUs reach each other, with atomics: all of them on one GPU, or on GPUs
    /// that NVLink connects.
    ///
    /// # Errors
    /// As [`devices`].
    pub fn cuda(gpus: &[usize], ranks: u32, kernels: &[Embedded]) -> Result<Self, GpuError> {
        let mut config = Self::threads(ranks);
        config.devices = Some(devices(gpus, kernels, None)?);
        Ok(config)
    }
}
