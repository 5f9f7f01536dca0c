// SPDX-License-Identifier: MIT OR Apache-2.0
//! The choice of an offer, which ends with an endpoint: a provider may refuse that although its attributes allow it.

use super::FabricNetwork;
use super::config::FabricConfig;
use super::objects::EndpointHandle;
use super::provider::{Fabric, NoFabric, load};
use crate::NetworkFactory;
use gin_gpu::{Device, Memory, MemoryKind};
use gin_verbs::fabric::{Libfabric, VERSION_FOR_GPUS};
use std::sync::Arc;

impl Fabric {
    /// Opens the library, and chooses an offer of the provider: one that reaches memory of GPUs, if it does so without
    /// calls of CUDA.
    ///
    /// # Errors
    /// [`NoFabric`]: the library cannot be opened, or has no such provider.
    pub fn open(config: &FabricConfig) -> Result<Arc<Self>, NoFabric> {
        let library = load(&config.library)?;
        let staged = match Self::open_for_gpus(&library, config) {
            Ok(fabric) => return Ok(fabric),
            Err(reason) => reason,
        };
        tracing::debug!(staged, "memory of GPUs would go through host memory");
        let none = NoFabric::NoProvider { provider: config.provider.clone(), domain: config.domain.clone() };
        let mut fabric = Self::find(&library, config, false)?.ok_or(none)?;
        fabric.staged = Some(staged);
        Ok(Arc::new(fabric))
    }

    /// Chooses an offer that reaches memory of GPUs. The error says why there is none.
    fn open_for_gpus(library: &Arc<Libfabric>, config: &FabricConfig) -> Result<Arc<Self>, String> {
        // Safety: has no condition.
        let version = unsafe { (library.fi_version)() };
        if version < VERSION_FOR_GPUS {
            let [major, minor] = [version >> 16, version & 0xffff];
            return Err(format!("libfabric {major}.{minor} may call CUDA while kernels wait; 1.18 and later need not"));
        }
        let found = Self::find(library, config, true).map_err(|error| error.to_string())?;
        let provider = &config.provider;
        let fabric = Arc::new(found.ok_or_else(|| format!("the provider {provider} does not reach it (no FI_HMEM)"))?);
        // Refused if the provider copies by CUDA: such a copy may wait for a kernel that waits for the copy.
        let endpoint = EndpointHandle::new(&fabric, 1, 1);
        endpoint.map_err(|error| format!("the provider {provider} cannot reach it: {error}"))?.end();
        Ok(fabric)
    }

    /// Checks that the provider reaches memory of a device; the error says why it does not.
    pub(super) fn reach(self: &Arc<Self>, device: &Arc<dyn Device>) -> Result<(), String> {
        // Granularity of GPU memory.
        const BYTES: u64 = 2 << 20;
        if let Some(reason) = &self.staged {
            return Err(reason.clone());
        }
        let memory = Memory::new(device, MemoryKind::Device, BYTES).map_err(|error| error.to_string())?;
        let endpoint = EndpointHandle::new(self, 1, 1).map_err(|error| error.to_string())?;
        // Safety: the region ends before the memory.
        let region = unsafe { endpoint.register_window(&memory.whole()) };
        let reached = region.map(drop).map_err(|error| error.to_string());
        endpoint.end();
        reached
    }

    /// Returns a factory for the endpoints of all ranks of this process. Memory of GPUs that the provider does not
    /// reach goes through host memory.
    pub fn factory(self: &Arc<Self>) -> NetworkFactory {
        let fabric = self.clone();
        Arc::new(move |endpoint| Box::new(FabricNetwork::staged(&fabric, endpoint)))
    }
}
