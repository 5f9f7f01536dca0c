// SPDX-License-Identifier: MIT OR Apache-2.0
//! The NICs of the ranks of a job.

use crate::comm::NicChoice;
use gin_boot::lock;
use gin_gpu::Device;
use gin_nic::NicConfig;
use gin_nic::hca::HcaError;
use gin_soft_nic::Options;
use gin_soft_nic_host::{SoftConfig, SoftEngine, SoftFabric, SoftHca};
use gin_virtual::{ServiceHandle, ServiceStep, World};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

/// Makes the configuration of the software NIC of a rank.
type MakeNic = Arc<dyn Fn(u32) -> SoftConfig + Send + Sync>;

/// Software NICs of the ranks of a job, on one network.
///
/// Clones share NICs and network. A world steps the NICs as long as it runs. A second world on the same NICs finds them
/// as the first left them, so a repeatable run needs new NICs.
///
/// ```
/// use gin_host::comm::{CommError, Requirements};
/// use gin_host::world::{SoftNics, WorldConfig, launch};
/// use gin_soft_nic_host::Options;
///
/// let nics = SoftNics::new(Options::default());
/// let named = launch(WorldConfig::seeded(2, 7).soft_nics(&nics), |rank| -> Result<bool, CommError> {
///     let comm = rank.communicator(&Requirements::default())?;
///     let driven = comm.nic()?.is_some();
///     comm.destroy()?;
///     Ok(driven)
/// });
/// assert_eq!(named.unwrap(), [true, true]);
/// ```
#[derive(Clone, derive_more::Debug)]
pub struct SoftNics {
    fabric: SoftFabric,
    #[debug(skip)]
    hcas: Arc<Mutex<BTreeMap<u32, SoftHca>>>,
    #[debug(skip)]
    make: MakeNic,
    config: NicConfig,
}

impl SoftNics {
    /// Makes NICs with one Ethernet port each.
    pub fn new(options: Options) -> Self {
        Self::with(options, NicConfig::default(), |rank| SoftConfig::ethernet(rank as u16))
    }

    /// Makes NICs with the configuration that `make` returns for each world rank. `config`: the configuration for
    /// opening them.
    pub fn with(options: Options, config: NicConfig, make: impl Fn(u32) -> SoftConfig + Send + Sync + 'static) -> Self {
        Self { fabric: SoftFabric::new(options), hcas: Arc::default(), make: Arc::new(make), config }
    }

    /// Makes NICs with one Ethernet port each, whose engine serves `device` and all devices that it reaches. The engine
    /// has `device` to itself: no other work runs there. For [`SoftEngine::Kernel`], the kernel `soft_hca` of
    /// `gin-soft-nic` is among the device's linked kernels.
    ///
    /// # Errors
    /// As [`SoftFabric::place`].
    pub fn placed(options: Options, engine: SoftEngine, device: &Arc<dyn Device>) -> Result<Self, HcaError> {
        let nics = Self::new(options);
        nics.fabric.place(engine, device).map(|()| nics)
    }

    /// Returns the network of the NICs, which injects faults and records violations.
    pub fn fabric(&self) -> &SoftFabric {
        &self.fabric
    }

    /// Returns the NIC of a rank.
    pub fn hca(&self, rank: u32) -> SoftHca {
        let mut hcas = lock(&self.hcas);
        hcas.entry(rank).or_insert_with(|| self.fabric.add((self.make)(rank))).clone()
    }

    /// Returns the NIC for communicators of a rank.
    pub fn of(&self, rank: u32) -> NicChoice {
        NicChoice::Hca(Arc::new(self.hca(rank)), self.config.clone())
    }

    /// Steps the NICs as long as the world runs. [`launch`](super::launch) calls it; a program that makes its ranks by
    /// [`Rank::outside`](super::Rank::outside) does so, and stops the service when the ranks have ended.
    pub fn serve(&self, world: &World) -> ServiceHandle {
        let fabric = self.fabric.clone();
        world.spawn_service("gin-soft-nic", move || match fabric.step() {
            gin_soft_nic::Progress::Idle => ServiceStep::Idle,
            // A delayed answer needs steps.
            gin_soft_nic::Progress::Moved | gin_soft_nic::Progress::Waiting => ServiceStep::Busy,
        })
    }
}
