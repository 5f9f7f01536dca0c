// SPDX-License-Identifier: MIT OR Apache-2.0
//! The ports that ranks of this process use, and the choice of each rank.

use super::config::VerbsConfig;
use super::device::RdmaDevice;
use super::info::NoRdmaDevice;
use super::topology::{Candidate, Distance, PciPlace, choose};
use super::{Endpoint, NetworkFactory, VerbsNetwork};
use gin_verbs::Link;
use std::sync::Arc;

/// Open ports. Each rank uses those nearest to its GPU.
///
/// ```no_run
/// use gin_net::NetworkFactory;
/// use gin_net::verbs::{NoRdmaDevice, Ports, VerbsConfig};
///
/// fn over_rdma() -> Result<NetworkFactory, NoRdmaDevice> {
///     Ok(Ports::open(&VerbsConfig::default())?.factory())
/// }
/// ```
#[derive(Clone, Debug)]
pub struct Ports {
    all: Vec<Arc<RdmaDevice>>,
    max: usize,
}

/// The ports that a rank uses.
#[derive(Clone, Debug, derive_more::Display)]
#[display("{}{}", names(ports), distance.map_or_else(String::new, |distance| format!(" ({distance})")))]
pub struct ChosenPorts {
    /// Ports, at least one. Contexts use them in turn.
    pub ports: Vec<Arc<RdmaDevice>>,
    /// Distance to the rank's GPU, if known.
    pub distance: Option<Distance>,
}

/// Returns the names of ports, for people.
pub(super) fn names(ports: &[Arc<RdmaDevice>]) -> String {
    let names: Vec<String> = ports.iter().map(|port| port.name().to_string()).collect();
    names.join(", ")
}

impl Ports {
    /// Opens the ports that [`VerbsConfig::ports`] names. If it is empty, opens all ports that are up and have a GID,
    /// of the link layer that has more of them: InfiniBand and Ethernet do not reach each other.
    ///
    /// # Errors
    /// [`NoRdmaDevice`]: no port can be used, or one of the named ports cannot.
    pub fn open(config: &VerbsConfig) -> Result<Self, NoRdmaDevice> {
        let mut all = RdmaDevice::find(config, &config.ports, None, false)?;
        if config.ports.is_empty() {
            let of = |link| all.iter().filter(|port| port.port.link == link).count();
            let kept = if of(Link::Ethernet) > of(Link::InfiniBand) { Link::Ethernet } else { Link::InfiniBand };
            all.retain(|port| port.port.link == kept);
        }
        Ok(Self { all, max: config.max_ports })
    }

    /// Returns all open ports.
    pub fn all(&self) -> &[Arc<RdmaDevice>] {
        &self.all
    }

    /// Chooses the ports of `rank`, whose GPU has this address on the PCI bus: the nearest, of these the fastest, at
    /// most [`VerbsConfig::max_ports`]. Without an address, or if the system reports no locations, all ports are
    /// equally near. Among equally good ports, ranks start with different ones.
    pub fn choose(&self, gpu: Option<&str>, rank: u32) -> ChosenPorts {
        let gpu = gpu.and_then(PciPlace::of_pci);
        let merits = |port: &Arc<RdmaDevice>| Candidate { place: port.info.place.clone(), rate: port.port.rate };
        let candidates: Vec<Candidate> = self.all.iter().map(merits).collect();
        let (chosen, distance) = choose(gpu.as_ref(), &candidates, rank, self.max);
        ChosenPorts { ports: chosen.into_iter().map(|port| self.all[port].clone()).collect(), distance }
    }

    /// Returns a factory for the endpoints of all ranks of this process, each with the ports that
    /// [`choose`](Self::choose) returns.
    pub fn factory(&self) -> NetworkFactory {
        let ports = self.clone();
        Arc::new(move |endpoint: &Endpoint| {
            let chosen = ports.choose(endpoint.gpu.as_deref(), endpoint.rank);
            Box::new(VerbsNetwork::staged(&chosen.ports, endpoint))
        })
    }
}
