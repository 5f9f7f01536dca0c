// SPDX-License-Identifier: MIT OR Apache-2.0
//! The network of the proxies.

use crate::cli::{Mode, Refused};
use gin_host::comm::Backend;
use gin_net::fabric::{Fabric, FabricConfig};
use gin_net::verbs::{Ports, VerbsConfig};
use gin_net::{BetweenHosts, NetworkFactory, between_hosts};

/// A network of the proxies.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Over {
    /// Copies within a host.
    Copies,
    /// RDMA NICs.
    Verbs,
    /// libfabric.
    Fabric,
    /// RDMA NICs if this host has some, else libfabric.
    Hosts,
}

impl Over {
    /// Returns the option that asks for it.
    fn option(self) -> &'static str {
        match self {
            Self::Copies => "--network peer",
            Self::Verbs => "--network verbs",
            Self::Fabric => "--network fabric",
            Self::Hosts => "--network auto (the default) in a job on several hosts",
        }
    }

    /// Opens the network. Returns a note for people, too; no network stands for copies.
    ///
    /// # Errors
    /// Refuses a host without such a network, and options that it does not support.
    pub(super) fn open(
        self,
        mode: Mode,
        backend: Backend,
    ) -> Result<(Option<NetworkFactory>, Option<String>), Refused> {
        let found = |factory| BetweenHosts { factory, note: None };
        let found = match self {
            Self::Copies => return Ok((None, None)),
            Self::Verbs => self.open_by(mode, backend, || ports().map(found)),
            Self::Fabric => self.open_by(mode, backend, || {
                let fabric = Fabric::open(&FabricConfig::from_env()).map_err(|error| error.to_string())?;
                Ok(found(fabric.factory()))
            }),
            Self::Hosts => self.open_by(mode, backend, between_hosts),
        };
        found.map(|BetweenHosts { factory, note }| (Some(factory), note))
    }

    fn open_by(
        self,
        mode: Mode,
        backend: Backend,
        open: impl FnOnce() -> Result<BetweenHosts, String>,
    ) -> Result<BetweenHosts, Refused> {
        let option = self.option();
        if mode == Mode::Seeded {
            let text = format!("--mode seeded: no network runs in virtual time; leave the option out with {option}");
            return Err(Refused(text));
        }
        if backend == Backend::Gdaki {
            let text =
                format!("{option}: with --backend gdaki the kernels drive NICs themselves; leave one of the two out");
            return Err(Refused(text));
        }
        open().map_err(|error| {
            Refused(format!(
                "{option}: {error}; `gin info` lists RDMA devices and providers of libfabric; without either, run all \
                 ranks on one host with --network peer"
            ))
        })
    }
}

/// Returns the RDMA ports that this process may use.
///
/// # Errors
/// Returns the reason if it finds none.
fn ports() -> Result<NetworkFactory, String> {
    let config = VerbsConfig::from_env().map_err(|error| error.to_string())?;
    Ports::open(&config).map(|ports| ports.factory()).map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;
    use gin_net::verbs::NoRdmaDevice;

    fn refusal(over: Over, mode: Mode, backend: Backend) -> String {
        match over.open_by(mode, backend, || Err(NoRdmaDevice::None.to_string())) {
            Err(Refused(text)) => text,
            Ok(_) => panic!("a network without ports"),
        }
    }

    #[test]
    fn without_a_network_the_reason_and_the_remedy_are_named() {
        for (over, option) in
            [(Over::Verbs, "--network verbs"), (Over::Fabric, "--network fabric"), (Over::Hosts, "--network auto")]
        {
            let text = refusal(over, Mode::Threads, Backend::Auto);
            for part in [option, "no RDMA device", "gin info", "--network peer"] {
                assert!(text.contains(part), "{part}: {text}");
            }
        }
    }

    #[test]
    fn options_that_networks_do_not_support_are_refused() {
        assert!(refusal(Over::Verbs, Mode::Seeded, Backend::Auto).starts_with("--mode seeded"));
        assert!(refusal(Over::Fabric, Mode::Threads, Backend::Gdaki).contains("--backend gdaki"));
    }
}
