// SPDX-License-Identifier: MIT OR Apache-2.0
//! The choice of a network between hosts.

use crate::NetworkFactory;
use crate::fabric::{Fabric, FabricConfig, Offer};
use crate::verbs::{NoRdmaDevice, Ports, VerbsConfig};
use std::sync::Arc;

/// A network between hosts.
#[derive(derive_more::Debug)]
pub struct BetweenHosts {
    /// Makes the endpoints of ranks.
    #[debug(skip)]
    pub factory: NetworkFactory,
    /// For people, if no RDMA device was found: the reason and the network that is used instead.
    pub note: Option<String>,
}

/// Returns the network of a job on several hosts: [`verbs`](crate::verbs) if this host has RDMA devices, else
/// [`fabric`](crate::fabric). If `GIN_FABRIC_PROVIDER` names a provider, the user has chosen `fabric`. An RDMA device
/// that cannot be used is an error, because another network would be slower by far.
///
/// # Errors
/// The reasons why there is no such network.
pub fn between_hosts() -> Result<BetweenHosts, String> {
    let chosen = std::env::var_os("GIN_FABRIC_PROVIDER").is_some_and(|provider| !provider.is_empty());
    let ports = || VerbsConfig::from_env().map(|config| Ports::open(&config)).map_err(|error| error.to_string());
    choose(if chosen { None } else { Some(ports()?) }, || {
        Fabric::open(&FabricConfig::from_env()).map_err(|error| error.to_string())
    })
}

fn choose(
    ports: Option<Result<Ports, NoRdmaDevice>>,
    fabric: impl FnOnce() -> Result<Arc<Fabric>, String>,
) -> Result<BetweenHosts, String> {
    let none = match ports {
        None => None,
        Some(Ok(ports)) => return Ok(BetweenHosts { factory: ports.factory(), note: None }),
        Some(Err(none @ (NoRdmaDevice::Library(_) | NoRdmaDevice::Kernel { .. } | NoRdmaDevice::None))) => Some(none),
        Some(Err(error)) => return Err(error.to_string()),
    };
    match (fabric(), none) {
        (Ok(fabric), none) => {
            let note = none.map(|none| {
                let Offer { provider, domain, .. } = &fabric.offer;
                let note = format!(
                    "{none}; ranks of different hosts exchange data over libfabric's provider {provider} ({domain}), \
                     which does not encrypt it"
                );
                tracing::info!("{note}");
                note
            });
            Ok(BetweenHosts { factory: fabric.factory(), note })
        }
        (Err(error), None) => Err(error),
        (Err(error), Some(none)) => Err(format!("{none}; {error}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::ErrorKind;

    #[test]
    fn without_both_libraries_both_reasons_are_named_and_a_broken_device_is_no_reason_for_another_network() {
        let fabric = || Err("libfabric.so.1 cannot be opened".to_owned());
        let error = choose(Some(Err(NoRdmaDevice::None)), fabric).unwrap_err();
        assert_eq!(error, "no RDMA device: the kernel has none; libfabric.so.1 cannot be opened");
        assert_eq!(choose(None, fabric).unwrap_err(), "libfabric.so.1 cannot be opened");
        let errno = std::io::Error::from(ErrorKind::PermissionDenied).raw_os_error().unwrap_or(13);
        let broken = NoRdmaDevice::Failed { name: "mlx5_0".to_owned(), call: "ibv_open_device", errno };
        let error = choose(Some(Err(broken)), || panic!("another network was tried")).unwrap_err();
        assert!(error.contains("mlx5_0"), "{error}");
    }
}
