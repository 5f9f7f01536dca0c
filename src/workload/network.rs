// SPDX-License-Identifier: MIT OR Apache-2.0
//! The network that `--network` chooses.

use crate::cli::{Backend, Mode, Network, Options, Refused};
use gin_net::NetworkFactory;
use gin_net::verbs::{Ports, VerbsConfig};

/// The network that was chosen; `None` for what a world has by itself, which are copies between ranks of one host.
///
/// # Errors
/// RDMA NICs where there are none, or with what they do not go together with.
pub(super) fn choose(options: &Options) -> Result<Option<NetworkFactory>, Refused> {
    decide(options, ports)
}

/// The RDMA ports that this process may use, or why there are none.
fn ports() -> Result<NetworkFactory, String> {
    let config = VerbsConfig::from_env().map_err(|error| error.to_string())?;
    Ports::open(&config).map(|ports| ports.factory()).map_err(|error| error.to_string())
}

fn decide(
    options: &Options,
    ports: impl FnOnce() -> Result<NetworkFactory, String>,
) -> Result<Option<NetworkFactory>, Refused> {
    match options.network {
        // Ranks that are threads are on one host; where they are processes it has been decided.
        Network::Peer | Network::Auto => return Ok(None),
        Network::Verbs => {}
    }
    if options.mode() == Mode::Seeded {
        return Err(Refused(
            "--mode seeded: RDMA NICs keep no virtual time; leave it out with --network verbs".to_owned(),
        ));
    }
    if options.backend == Backend::Gdaki {
        let text = "--network verbs: kernels drive NICs themselves with --backend gdaki; leave one of the two out";
        return Err(Refused(text.to_owned()));
    }
    match ports() {
        Ok(factory) => Ok(Some(factory)),
        Err(error) => Err(Refused(format!(
            "--network verbs, which a job of several hosts takes by itself: {error}; `ibv_devices` and `rdma link` list \
             what this host has, and without a NIC all ranks must be on one host, with --network peer"
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::default_options;
    use gin_net::verbs::NoDevice;

    fn chosen(options: &Options) -> Result<bool, String> {
        decide(options, || Err(NoDevice::None.to_string()))
            .map(|factory| factory.is_some())
            .map_err(|Refused(text)| text)
    }

    #[test]
    fn without_rdma_devices_the_reason_and_the_remedy_are_named() {
        let verbs = Options { network: Network::Verbs, ..default_options() };
        let text = chosen(&verbs).unwrap_err();
        for part in ["--network verbs", "no RDMA device", "rdma link", "--network peer"] {
            assert!(text.contains(part), "{part}: {text}");
        }
        for network in [Network::Auto, Network::Peer] {
            assert_eq!(chosen(&Options { network, ..default_options() }), Ok(false), "{network:?}");
        }
    }

    #[test]
    fn what_nics_do_not_go_together_with_is_refused() {
        let verbs = Options { network: Network::Verbs, ..default_options() };
        assert_eq!(verbs.mode(), Mode::Threads);
        let seeded = Options { mode: Some(Mode::Seeded), ..verbs.clone() };
        assert!(chosen(&seeded).unwrap_err().starts_with("--mode seeded"));
        let gdaki = Options { backend: Backend::Gdaki, ..verbs };
        assert!(chosen(&gdaki).unwrap_err().contains("--backend gdaki"));
    }
}
