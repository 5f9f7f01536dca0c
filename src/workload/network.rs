// SPDX-License-Identifier: MIT OR Apache-2.0
//! The choice of a network by `--network`.

use crate::cli::{Backend, Mode, Network, Options, Refused};
use gin_net::NetworkFactory;
use gin_net::verbs::{Ports, VerbsConfig};

/// Returns the chosen network, or `None` for the default of a world: copies between ranks of one host.
///
/// # Errors
/// Refuses RDMA NICs on a host without any, and together with options that they do not support.
pub(super) fn choose(options: &Options) -> Result<Option<NetworkFactory>, Refused> {
    decide(options, ports)
}

/// Returns the RDMA ports that this process may use.
///
/// # Errors
/// Returns the reason if it finds none.
fn ports() -> Result<NetworkFactory, String> {
    let config = VerbsConfig::from_env().map_err(|error| error.to_string())?;
    Ports::open(&config).map(|ports| ports.factory()).map_err(|error| error.to_string())
}

fn decide(
    options: &Options,
    ports: impl FnOnce() -> Result<NetworkFactory, String>,
) -> Result<Option<NetworkFactory>, Refused> {
    match options.network {
        // `Auto` arrives here only if the ranks are threads, and so on one host: for processes, `cli::job` has resolved
        // it.
        Network::Peer | Network::Auto => return Ok(None),
        Network::Verbs => {}
    }
    if options.mode() == Mode::Seeded {
        return Err(Refused(
            "--mode seeded: RDMA NICs do not run in virtual time; leave the option out with --network verbs".to_owned(),
        ));
    }
    if options.backend == Backend::Gdaki {
        let text =
            "--network verbs: with --backend gdaki the kernels drive NICs themselves; leave one of the two options out";
        return Err(Refused(text.to_owned()));
    }
    match ports() {
        Ok(factory) => Ok(Some(factory)),
        Err(error) => Err(Refused(format!(
            "--network verbs (the default of a job on several hosts): {error}; `ibv_devices` and `rdma link` list the \
             RDMA devices of this host; without one, run all ranks on one host with --network peer"
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
