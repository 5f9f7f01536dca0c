// SPDX-License-Identifier: MIT OR Apache-2.0
//! Back ends and networks by name.

use crate::error::Error;
use gin_boot::Bootstrap;
use gin_gpu::{Device, DeviceKind};
use gin_host::comm::{Backend, CommConfig, NicChoice};
use gin_host::world::SoftNics;
use gin_net::between_hosts;
use gin_net::fabric::{Fabric, FabricConfig};
use gin_net::verbs::{Ports, VerbsConfig};
use gin_nic::NicConfig;
use gin_soft_nic_host::Options;
use gin_virtual::{ServiceHandle, World};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use std::sync::Arc;

/// Sets the back end and the network of a communicator.
pub(crate) fn configure(
    py: Python<'_>,
    config: CommConfig,
    bootstrap: &Arc<dyn Bootstrap>,
    backend: Option<&str>,
    nic: Option<&str>,
    network: &str,
) -> PyResult<CommConfig> {
    let config = match backend {
        None => config,
        Some("auto") => config.backend(Backend::Auto),
        Some("proxy") => config.backend(Backend::Proxy),
        Some("gdaki") => config.backend(Backend::Gdaki),
        Some(other) => {
            let text = format!("back ends are \"auto\", \"proxy\" and \"gdaki\", not \"{other}\"");
            return Err(PyValueError::new_err(text));
        }
    };
    let config = match nic {
        None => config,
        Some(_) if config.backend == Backend::Proxy => {
            let text = "`nic` names the NIC that kernels drive: leave it out with the back end \"proxy\"";
            return Err(PyValueError::new_err(text));
        }
        Some(name) => config.nic(NicChoice::Named(name.to_owned(), NicConfig::default())),
    };
    let first = bootstrap.host(0);
    let several = (1..bootstrap.ranks()).any(|rank| bootstrap.host(rank) != first);
    let gdaki = config.backend == Backend::Gdaki;
    match (network, several) {
        ("peer", true) => {
            let text =
                "network \"peer\" connects ranks of one host, and the job has several: use \"verbs\" or \"fabric\"";
            Err(PyValueError::new_err(text))
        }
        ("verbs" | "fabric", _) if gdaki => {
            let text = format!(
                "with the back end \"gdaki\" kernels drive NICs themselves: leave the network \"{network}\" out"
            );
            Err(PyValueError::new_err(text))
        }
        ("verbs" | "fabric", _) | ("auto", true) if !gdaki => {
            let open = || match network {
                "verbs" => {
                    let found = VerbsConfig::from_env().map_err(|error| error.to_string())?;
                    Ports::open(&found).map(|ports| ports.factory()).map_err(|error| error.to_string())
                }
                "fabric" => {
                    let fabric = Fabric::open(&FabricConfig::from_env()).map_err(|error| error.to_string())?;
                    Ok(fabric.factory())
                }
                _ => between_hosts().map(|found| found.factory),
            };
            let refuse = |error| Error::new_err(format!("network \"{network}\": {error}"));
            Ok(config.network(py.detach(open).map_err(refuse)?))
        }
        ("auto" | "peer", _) => Ok(config),
        (other, _) => {
            let text = format!("networks are \"auto\", \"peer\", \"verbs\" and \"fabric\", not \"{other}\"");
            Err(PyValueError::new_err(text))
        }
    }
}

/// Software NICs of ranks that are threads, while this exists.
pub(crate) struct Nics {
    nics: SoftNics,
    service: ServiceHandle,
}

impl Nics {
    /// Makes them, if the program asks for them.
    pub(crate) fn named(world: &World, name: Option<&str>) -> PyResult<Option<Self>> {
        match name {
            None => Ok(None),
            Some("soft") => {
                let nics = SoftNics::new(Options::default());
                let service = nics.serve(world);
                Ok(Some(Self { nics, service }))
            }
            Some(other) => Err(PyValueError::new_err(format!("nics is \"soft\", or left out, not \"{other}\""))),
        }
    }

    /// Returns the configuration of a rank's communicators.
    pub(crate) fn config(&self, rank: u32, device: &dyn Device) -> PyResult<CommConfig> {
        if device.kind() != DeviceKind::Virtual {
            let text = "nics=\"soft\": from Python, software NICs serve virtual GPUs only; pass device=\"virtual\"";
            return Err(PyValueError::new_err(text));
        }
        Ok(CommConfig::default().backend(Backend::Gdaki).nic(self.nics.of(rank)))
    }
}

impl Drop for Nics {
    fn drop(&mut self) {
        self.service.stop();
    }
}
