// SPDX-License-Identifier: MIT OR Apache-2.0
//! The choice of a communicator's back end and NIC.

use super::CommError;
use gin_abi::BackendKind;
use gin_gpu::{Device, DeviceKind, MemoryKind};
use gin_nic::mlx5::{Libraries, Mlx5};
use gin_nic::{Found, Hca, Nic, NicConfig, probe};
use std::sync::Arc;

/// The choice of a communicator's back end.
///
/// ```
/// use gin_host::comm::{Backend, probe_backends};
///
/// for probe in probe_backends() {
///     println!("{:?}: {}", probe.backend, probe.refusal.as_deref().unwrap_or("available"));
/// }
/// assert_eq!(Backend::default(), Backend::Auto);
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Backend {
    /// GDAKI on all ranks if every rank's GPU can drive a NIC, else the proxy. Does not consider software NICs.
    #[default]
    Auto,
    /// A CPU thread posts the requests of kernels.
    Proxy,
    /// The GPU writes the NIC's work-queue entries itself.
    Gdaki,
}

/// The device-driven NIC of the back end GDAKI.
#[derive(Clone, Debug)]
pub enum NicChoice {
    /// The first NIC of this host that can serve the device.
    Probe(NicConfig),
    /// The ConnectX NIC with this name, as [`Found::name`] has it, if it can serve the device.
    Named(String, NicConfig),
    /// This NIC. Each communicator opens it with a separate protection domain.
    Hca(Arc<dyn Hca>, NicConfig),
    /// This open NIC. Communicators share its protection domain.
    Given(Arc<Nic>),
}

impl Default for NicChoice {
    fn default() -> Self {
        Self::Probe(NicConfig::default())
    }
}

/// A back end, and whether it is available.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct BackendProbe {
    /// The back end.
    pub backend: BackendKind,
    /// The reason why it is not available; `None` if it is.
    pub refusal: Option<String>,
    /// The findings about each NIC, in words.
    pub nics: Vec<String>,
}

/// Returns the back ends with their availability on this machine, the preferred one first. Does not look for software
/// NICs.
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

/// Returns the reasons if none of these NICs is usable.
fn none_serves(found: &[Found]) -> Option<String> {
    let all = || found.iter().map(Found::to_string).collect::<Vec<_>>().join("; ");
    (!found.iter().any(|found| found.nic.is_ok())).then(all)
}

impl Backend {
    /// Returns the NIC that kernels of a communicator on `device` drive, or `None` for the proxy.
    ///
    /// # Errors
    /// [`CommError::Backend`] or [`CommError::Nic`] with the reason why the requested back end is not available.
    pub fn choose(self, device: &dyn Device, nic: &NicChoice) -> Result<Option<Arc<Nic>>, CommError> {
        match self {
            Self::Proxy => Ok(None),
            Self::Gdaki => nic.open(device).map(Some),
            // Kernels of a virtual GPU could drive a real NIC, but that has no advantage.
            Self::Auto if device.kind() == DeviceKind::Virtual => Ok(None),
            Self::Auto => Ok(nic.open(device).ok()),
        }
    }
}

impl NicChoice {
    /// Opens the NIC if it can serve the device.
    fn open(&self, device: &dyn Device) -> Result<Arc<Nic>, CommError> {
        let nic = match self {
            Self::Given(nic) => nic.clone(),
            Self::Hca(hca, config) => Nic::open(hca.clone(), config.clone())?,
            Self::Probe(config) => first(config, device)?,
            Self::Named(name, config) => named(name, config)?,
        };
        nic.check_reach(device, MemoryKind::Device)?;
        Ok(nic)
    }
}

fn refuse(reason: String) -> CommError {
    CommError::Backend { backend: BackendKind::Gdaki, reason }
}

fn named(name: &str, config: &NicConfig) -> Result<Arc<Nic>, CommError> {
    let hca = Mlx5::open(&Libraries::default(), name).map_err(|absent| refuse(format!("NIC {name}: {absent}")))?;
    Ok(Nic::open(hca, config.clone())?)
}

fn first(config: &NicConfig, device: &dyn Device) -> Result<Arc<Nic>, CommError> {
    let found = probe(&Libraries::default(), config).map_err(|absent| refuse(absent.to_string()))?;
    let reason = none_serves(&found);
    let reaches = |nic: &Arc<Nic>| nic.check_reach(device, MemoryKind::Device).is_ok();
    let nic = found.into_iter().filter_map(|found| found.nic.ok()).find(reaches);
    nic.ok_or_else(|| refuse(reason.unwrap_or_else(|| format!("no NIC reaches memory of {}", device.name()))))
}
