// SPDX-License-Identifier: MIT OR Apache-2.0
//! The ports that ranks of this process use, and which rank uses which.

use super::config::VerbsConfig;
use super::device::RdmaDevice;
use super::info::NoDevice;
use super::topology::{Candidate, Distance, PciPlace, choose};
use super::{Endpoint, NetworkFactory, Verbs};
use gin_verbs::Link;
use std::fmt;
use std::sync::Arc;

/// Ports that are open. Each rank uses those that are nearest to its GPU.
///
/// ```no_run
/// use gin_net::NetworkFactory;
/// use gin_net::verbs::{NoDevice, Ports, VerbsConfig};
///
/// fn over_rdma() -> Result<NetworkFactory, NoDevice> {
///     Ok(Ports::open(&VerbsConfig::default())?.factory())
/// }
/// ```
#[derive(Clone, Debug)]
pub struct Ports {
    all: Vec<Arc<RdmaDevice>>,
    most: usize,
}

/// The ports of a rank, at least one.
#[derive(Clone, Debug)]
pub struct Chosen {
    /// The ports: its first context uses the first, the next context the next one, from the beginning again after the last.
    pub ports: Vec<Arc<RdmaDevice>>,
    /// How near they are to its GPU, if that is known.
    pub distance: Option<Distance>,
}

impl fmt::Display for Chosen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names: Vec<String> = self.ports.iter().map(|port| port.name().to_string()).collect();
        write!(f, "{}", names.join(", "))?;
        self.distance.map_or(Ok(()), |distance| write!(f, " ({distance})"))
    }
}

impl Ports {
    /// Opens the ports that [`VerbsConfig::ports`] names. Otherwise all that are up and have an address, of InfiniBand or of
    /// Ethernet, whichever has more of them, since the two do not reach each other.
    ///
    /// # Errors
    /// [`NoDevice`]: there are none, or one that was named cannot be used.
    pub fn open(config: &VerbsConfig) -> Result<Self, NoDevice> {
        let mut all = RdmaDevice::find(config, &config.ports, None, false)?;
        if config.ports.is_empty() {
            let of = |link| all.iter().filter(|port| port.port().link == link).count();
            let kept = if of(Link::Ethernet) > of(Link::InfiniBand) { Link::Ethernet } else { Link::InfiniBand };
            all.retain(|port| port.port().link == kept);
        }
        Ok(Self { all, most: config.most_ports })
    }

    /// All of them.
    pub fn all(&self) -> &[Arc<RdmaDevice>] {
        &self.all
    }

    /// Those that `rank` uses, whose GPU has this address on the PCI bus: the nearest, of these the fastest, at most
    /// [`VerbsConfig::most_ports`]. Without an address, or where the system does not say what is near, all are as near.
    /// Ranks begin with different ones of those that serve as well.
    pub fn choose(&self, gpu: Option<&str>, rank: u32) -> Chosen {
        let gpu = gpu.and_then(PciPlace::of_pci);
        let merits = |port: &Arc<RdmaDevice>| Candidate { place: port.info().place.clone(), rate: port.port().rate };
        let candidates: Vec<Candidate> = self.all.iter().map(merits).collect();
        let (chosen, distance) = choose(gpu.as_ref(), &candidates, rank, self.most);
        Chosen { ports: chosen.into_iter().map(|port| self.all[port].clone()).collect(), distance }
    }

    /// Makes the endpoints of all ranks of this process, each with the ports that [`choose`](Self::choose) gives it.
    pub fn factory(&self) -> NetworkFactory {
        let ports = self.clone();
        Arc::new(move |endpoint: &Endpoint| {
            let chosen = ports.choose(endpoint.gpu.as_deref(), endpoint.rank);
            Box::new(Verbs::staged(&chosen.ports, endpoint))
        })
    }
}
