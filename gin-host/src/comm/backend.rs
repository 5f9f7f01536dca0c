// SPDX-License-Identifier: MIT OR Apache-2.0
//! Which back end a communicator uses, and which NIC.

use super::CommError;
use gin_abi::BackendKind;
use gin_gpu::{Device, DeviceKind, MemoryKind};
use gin_nic::mlx5::Libraries;
use gin_nic::{Found, Hca, Nic, NicConfig, probe};
use std::sync::Arc;

/// Which back end a communicator uses.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Backend {
    /// The best that can be had: GDAKI on all ranks if every rank's GPU can drive a NIC, else the proxy. A software NIC
    /// is not looked for.
    #[default]
    Auto,
    /// A CPU thread posts what kernels ask for.
    Proxy,
    /// The GPU writes the NIC's work-queue entries itself.
    Gdaki,
}

/// The NIC that kernels drive where the back end is GDAKI.
#[derive(Clone, Debug)]
pub enum NicChoice {
    /// The first of this host's NICs that can serve the device.
    Probe(NicConfig),
    /// This one; each communicator opens it for itself, with a protection domain of its own.
    Hca(Arc<dyn Hca>, NicConfig),
    /// This one, which is open: communicators share its protection domain.
    Given(Arc<Nic>),
}

impl Default for NicChoice {
    fn default() -> Self {
        Self::Probe(NicConfig::default())
    }
}

/// A back end, and whether it can be had.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct BackendProbe {
    /// The back end.
    pub backend: BackendKind,
    /// Why it cannot be had; `None` if it can.
    pub refusal: Option<String>,
    /// The findings about each NIC, in words.
    pub nics: Vec<String>,
}

/// Looks which back ends can be had on this machine, the best first. Software NICs are not looked for.
pub fn probe_backends() -> Vec<BackendProbe> {
    let (nics, refusal) = match probe(&Libraries::default(), &NicConfig::default()) {
        Ok(found) => (found.iter().map(Found::to_string).collect(), none_serves(&found)),
        Err(absent) => (Vec::new(), Some(absent.to_string())),
    };
    vec![
        BackendProbe { backend: BackendKind::Gdaki, refusal, nics },
        BackendProbe { backend: BackendKind::Proxy, refusal: None, nics: Vec::new() },
    ]
}

/// Why none of these NICs will do, if so.
fn none_serves(found: &[Found]) -> Option<String> {
    let all = || found.iter().map(Found::to_string).collect::<Vec<_>>().join("; ");
    (!found.iter().any(|found| found.nic.is_ok())).then(all)
}

/// The back end of a communicator.
#[derive(Clone, Debug)]
pub enum ChosenBackend {
    /// A CPU thread and a network.
    Proxy,
    /// Its kernels themselves, by this NIC.
    Gdaki(Arc<Nic>),
}

impl ChosenBackend {
    /// Which back end that is.
    pub fn kind(&self) -> BackendKind {
        match self {
            Self::Proxy => BackendKind::Proxy,
            Self::Gdaki(_) => BackendKind::Gdaki,
        }
    }
}

impl Backend {
    /// Returns the back end of a communicator on `device`.
    ///
    /// # Errors
    /// [`CommError::Backend`] or [`CommError::Nic`] with the reason why what was asked for cannot be had.
    pub fn choose(self, device: &dyn Device, nic: &NicChoice) -> Result<ChosenBackend, CommError> {
        match self {
            Self::Proxy => Ok(ChosenBackend::Proxy),
            Self::Gdaki => nic.open(device).map(ChosenBackend::Gdaki),
            // Kernels of a virtual GPU reach a real NIC's doorbells, but nothing is gained.
            Self::Auto if device.kind() == DeviceKind::Virtual => Ok(ChosenBackend::Proxy),
            Self::Auto => Ok(nic.open(device).map_or(ChosenBackend::Proxy, ChosenBackend::Gdaki)),
        }
    }
}

impl NicChoice {
    /// The NIC, open, if it can serve the device.
    fn open(&self, device: &dyn Device) -> Result<Arc<Nic>, CommError> {
        let nic = match self {
            Self::Given(nic) => nic.clone(),
            Self::Hca(hca, config) => Nic::open(hca.clone(), config.clone())?,
            Self::Probe(config) => first(config, device)?,
        };
        nic.check_reach(device, MemoryKind::Device)?;
        Ok(nic)
    }
}

fn first(config: &NicConfig, device: &dyn Device) -> Result<Arc<Nic>, CommError> {
    let refuse = |reason| CommError::Backend { backend: BackendKind::Gdaki, reason };
    let found = probe(&Libraries::default(), config).map_err(|absent| refuse(absent.to_string()))?;
    let reason = none_serves(&found);
    let reaches = |nic: &Arc<Nic>| nic.check_reach(device, MemoryKind::Device).is_ok();
    let nic = found.into_iter().filter_map(|found| found.nic.ok()).find(reaches);
    nic.ok_or_else(|| refuse(reason.unwrap_or_else(|| format!("no NIC reaches memory of {}", device.name()))))
}
