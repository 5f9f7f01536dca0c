// SPDX-License-Identifier: MIT OR Apache-2.0
//! The network of RDMA NICs.

use crate::cli::{Mode, Refused};
use gin_host::comm::Backend;
use gin_net::NetworkFactory;
use gin_net::verbs::{Ports, VerbsConfig};

/// Returns the network over the RDMA ports of this host.
///
/// # Errors
/// Refuses a host without RDMA NICs, and options that they do not support.
pub(super) fn open(mode: Mode, backend: Backend) -> Result<NetworkFactory, Refused> {
    open_by(mode, backend, ports)
}

/// Returns the RDMA ports that this process may use.
///
/// # Errors
/// Returns the reason if it finds none.
fn ports() -> Result<NetworkFactory, String> {
    let config = VerbsConfig::from_env().map_err(|error| error.to_string())?;
    Ports::open(&config).map(|ports| ports.factory()).map_err(|error| error.to_string())
}

fn open_by(
    mode: Mode,
    backend: Backend,
    ports: impl FnOnce() -> Result<NetworkFactory, String>,
) -> Result<NetworkFactory, Refused> {
    if mode == Mode::Seeded {
        return Err(Refused(
            "--mode seeded: RDMA NICs do not run in virtual time; leave the option out with --network verbs".to_owned(),
        ));
    }
    if backend == Backend::Gdaki {
        let text =
            "--network verbs: with --backend gdaki the kernels drive NICs themselves; leave one of the two options out";
        return Err(Refused(text.to_owned()));
    }
    ports().map_err(|error| {
        Refused(format!(
            "--network verbs (the default of a job on several hosts): {error}; `ibv_devices` and `rdma link` list the \
             RDMA devices of this host; without one, run all ranks on one host with --network peer"
        ))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use gin_net::verbs::NoRdmaDevice;

    fn refusal(mode: Mode, backend: Backend) -> String {
        match open_by(mode, backend, || Err(NoRdmaDevice::None.to_string())) {
            Err(Refused(text)) => text,
            Ok(_) => panic!("a network without ports"),
        }
    }

    #[test]
    fn without_rdma_devices_the_reason_and_the_remedy_are_named() {
        let text = refusal(Mode::Threads, Backend::Auto);
        for part in ["--network verbs", "no RDMA device", "rdma link", "--network peer"] {
            assert!(text.contains(part), "{part}: {text}");
        }
    }

    #[test]
    fn options_that_nics_do_not_support_are_refused() {
        assert!(refusal(Mode::Seeded, Backend::Auto).starts_with("--mode seeded"));
        assert!(refusal(Mode::Threads, Backend::Gdaki).contains("--backend gdaki"));
    }
}
