// SPDX-License-Identifier: MIT OR Apache-2.0
//! The devices on which trials run, and the launches of their kernels.

use gin_gpu::{Devices, KernelArg, LaunchConfig};
use gin_host::comm::{CommError, Communicator};
use gin_host::world::{Rank, SoftNics, WorldConfig, launch};
use gin_soft_nic::Options;
use gin_soft_nic_host::SoftEngine;
use std::error::Error;
use std::time::Duration;

/// Deadline of waits in these kernels.
pub(crate) const DEADLINE: gin_abi::Deadline = gin_abi::Deadline::after_ms(6000);

/// Longest wait of ranks for each other. It is longer than a kernel may take.
const COLLECTIVE: Duration = Duration::from_secs(20);

/// Environment variable for the rounds of the long trials.
pub const ITERATIONS: &str = "GIN_GPU_ITERATIONS";

/// Rounds of the long trials, unless [`ITERATIONS`] sets another number.
const USUAL_ITERATIONS: u64 = 2000;

/// The devices on which trials run.
#[derive(Clone, Debug)]
pub struct Testbed {
    /// Real GPUs; `None` for the virtual GPU.
    pub devices: Option<Devices>,
    /// Number of devices.
    pub gpus: u32,
    /// Largest number of blocks of a grid, so that a slow device ends in time.
    pub max_blocks: u32,
    /// Rounds of long trials.
    pub iterations: u64,
    /// Set if ranks form one LSA team as far as their GPUs allow, and kernels use loads and stores.
    pub(crate) lsa: bool,
    /// Engine of the NICs, if kernels drive software NICs.
    engine: Option<SoftEngine>,
}

impl Testbed {
    /// Returns a testbed of real GPUs.
    pub fn real(devices: Devices, gpus: usize) -> Self {
        let asked = std::env::var(ITERATIONS).ok().and_then(|text| text.parse().ok());
        let (gpus, iterations) = (gpus as u32, asked.unwrap_or(USUAL_ITERATIONS));
        Self { devices: Some(devices), gpus, max_blocks: u32::MAX, iterations, lsa: false, engine: None }
    }

    /// Returns a testbed of virtual GPUs.
    pub fn simulated() -> Self {
        Self { devices: None, gpus: 2, max_blocks: 6, iterations: 300, lsa: false, engine: None }
    }

    /// Returns this testbed with loads and stores.
    pub(crate) fn lsa(&self) -> Self {
        Self { lsa: true, ..self.clone() }
    }

    /// Returns this testbed with kernels that drive software NICs.
    pub fn driving(self, engine: SoftEngine) -> Self {
        // A copy by a CPU thread takes ten times as long as a kernel's.
        let slower = if engine == SoftEngine::Thread { 10 } else { 1 };
        Self { engine: Some(engine), iterations: self.iterations / slower, ..self }
    }

    /// Returns the number of ranks: one on each GPU, and at least two.
    pub(crate) fn ranks(&self) -> u32 {
        self.gpus.max(2)
    }

    /// Returns the number of ranks that share one GPU.
    pub(crate) fn sharing(&self) -> u32 {
        self.ranks().div_ceil(self.gpus)
    }

    /// Returns the number by which work of a rank is divided, because software NICs have one engine for all ranks.
    pub(crate) fn division(&self) -> u32 {
        self.engine.map_or(1, |_| self.ranks() / 2)
    }

    /// Creates software NICs, if kernels drive them.
    pub(crate) fn nics(&self) -> Result<Option<SoftNics>, String> {
        let Some(engine) = self.engine else { return Ok(None) };
        let made = || -> Result<SoftNics, Box<dyn Error>> {
            match &self.devices {
                None => Ok(SoftNics::new(Options::default())),
                Some(devices) => Ok(SoftNics::placed(Options::default(), engine, &devices.device(0, self.ranks())?)?),
            }
        };
        made().map(Some).map_err(|error| error.to_string())
    }

    /// Returns the configuration of a job on these devices.
    pub(crate) fn config(&self) -> WorldConfig {
        let mut config = WorldConfig::threads(self.ranks());
        config.devices = self.devices.clone();
        config.collective_timeout = Some(COLLECTIVE);
        if self.gpus > 1 && !self.lsa {
            config.comm.lsa_size = Some(1);
        }
        config
    }

    pub(crate) fn run<T: Send>(&self, body: impl Fn(&Rank) -> Result<T, CommError> + Sync) -> Result<Vec<T>, String> {
        self.run_with(self.nics()?.as_ref(), body)
    }

    /// Runs `body` on each rank, with these NICs.
    pub(crate) fn run_with<T: Send>(
        &self,
        nics: Option<&SoftNics>,
        body: impl Fn(&Rank) -> Result<T, CommError> + Sync,
    ) -> Result<Vec<T>, String> {
        let config = self.config();
        let Some(nics) = nics else {
            return launch(config, |rank| body(&rank)).map_err(|error| error.to_string());
        };
        let results = launch(config.soft_nics(nics), |rank| body(&rank));
        if let Some(failure) = nics.fabric().failure() {
            return Err(format!("the NIC's engine failed: {failure}"));
        }
        let results = results.map_err(|error| error.to_string())?;
        match nics.fabric().violations() {
            (None, _) => Ok(results),
            (Some(first), count) => Err(format!("the NIC was used wrongly {count} times, first: {first:?}")),
        }
    }

    /// Runs `body` on each rank, and returns an error if a rank reports a failure.
    pub(crate) fn expect(&self, body: impl Fn(&Rank) -> Result<Vec<String>, CommError> + Sync) -> Result<(), String> {
        let wrong: Vec<String> = self.run(body)?.into_iter().flatten().collect();
        if wrong.is_empty() { Ok(()) } else { Err(wrong.join("\n")) }
    }

    /// Returns the largest number of blocks for this rank if all ranks on its GPU fill the GPU together.
    pub(crate) fn share(&self, rank: &Rank, kernel: &str, threads: u32) -> Result<u32, CommError> {
        let shape = LaunchConfig::new(1, threads).cooperative();
        let room = rank.device().resident_blocks(&rank.kernel(kernel)?, &shape)?;
        // Every rank has read the number before one launches.
        rank.barrier()?;
        let share = u32::try_from(room / u64::from(self.sharing())).unwrap_or(u32::MAX).min(self.max_blocks);
        // Ranks launch the same shape.
        let all = rank.bootstrap().all_gather(&share.to_le_bytes())?;
        let least = all.iter().filter_map(|bytes| Some(u32::from_le_bytes(bytes.as_slice().try_into().ok()?))).min();
        Ok(least.unwrap_or(1).max(1))
    }
}

/// A trial: the sentence that it proves, and its function.
pub type Trial = (&'static str, fn(&Testbed) -> Result<(), String>);

/// Launches a kernel once all ranks are here, and waits for it and the ranks.
pub(crate) fn run(
    rank: &Rank,
    kernel: &str,
    shape: LaunchConfig,
    arguments: &[&dyn KernelArg],
) -> Result<(), CommError> {
    let (function, stream) = (rank.kernel(kernel)?, rank.stream()?);
    rank.barrier()?;
    // Safety: the trials pass the arguments that the kernels require, and keep them until the kernels have ended.
    unsafe { stream.launch(&function, shape.cooperative(), arguments)? };
    stream.synchronize()?;
    rank.barrier()
}

/// Describes the communicator's fault, if it has one.
pub(crate) fn fault(rank: &Rank, comm: &Communicator) -> Option<String> {
    let notice = comm.fault()?;
    Some(format!("rank {}: fault of rank {}: {}", rank.rank(), notice.rank, notice.fault))
}
