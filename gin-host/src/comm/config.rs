// SPDX-License-Identifier: MIT OR Apache-2.0
//! The configuration of a communicator.

use super::{Backend, NicChoice};
use crate::proxy::progress::{OwnThreads, Progress};
use gin_net::NetworkFactory;
use gin_net::peer::PeerNetwork;
use gin_nic::{DoorbellRelease, Doorbells};
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

/// The routes of operations in a kernel that does not name its back end.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Hash)]
pub enum Routes {
    /// Loads and stores to peers of the LSA team, the network to all other ranks.
    #[default]
    Automatic,
    /// The network to all ranks. Kernels that ask for loads and stores are refused. Signals have no words that GPUs
    /// raise.
    Network,
}

/// The way a communicator works. Its size is set by [`Requirements`](super::Requirements).
///
/// ```
/// use gin_host::comm::{Backend, CommConfig};
///
/// let config = CommConfig::default().backend(Backend::Proxy).lsa_size(Some(2));
/// assert_eq!(config.lsa_size, Some(2));
/// ```
#[derive(Clone)]
#[non_exhaustive]
pub struct CommConfig {
    /// The back end.
    pub backend: Backend,
    /// The device-driven NIC. Used by the back end GDAKI only.
    pub nic: NicChoice,
    /// The requested engine that rings the NIC's doorbells.
    pub doorbells: Doorbells,
    /// The scope of the release fence that kernels issue before they ring.
    pub release: DoorbellRelease,
    /// Time limit of a rank to bring its queue pairs up.
    pub connecting: Duration,
    /// Number of ranks in an LSA team: consecutive ranks that reach each other by loads and stores. The default is the
    /// largest number for which the devices of all such ranks reach each other, with atomics.
    pub lsa_size: Option<u32>,
    /// The routes that operations may take.
    pub routes: Routes,
    /// Creates the network of each proxy.
    pub network: NetworkFactory,
    /// The engine that steps the proxy.
    pub progress: Arc<dyn Progress>,
    /// Seed for networks that make random choices.
    pub seed: u64,
    /// Time limit of deregistration and destruction to wait for unfinished requests.
    pub drain: Duration,
    /// Stops a kernel at once when it reports a fault. For debugging.
    pub trap_on_fault: bool,
    /// Makes the proxy store 0 to the words of signals that a kernel resets. This is a deliberate mistake, for tests.
    #[cfg(feature = "reset-by-store")]
    pub resets_by_store: bool,
}

impl CommConfig {
    gin_boot::setters! {
        backend: Backend,
        nic: NicChoice,
        doorbells: Doorbells,
        release: DoorbellRelease,
        connecting: Duration,
        lsa_size: Option<u32>,
        routes: Routes,
        progress: Arc<dyn Progress>,
        seed: u64,
        drain: Duration,
        trap_on_fault: bool,
        network: NetworkFactory,
    }
}

impl Default for CommConfig {
    /// Probes the host for the back end. Uses one progress thread, and copies within the host as the network.
    fn default() -> Self {
        Self {
            backend: Backend::Auto,
            nic: NicChoice::default(),
            doorbells: Doorbells::Automatic,
            release: DoorbellRelease::System,
            connecting: Duration::from_secs(30),
            lsa_size: None,
            routes: Routes::Automatic,
            network: Arc::new(|endpoint| Box::new(PeerNetwork::new(endpoint))),
            progress: Arc::new(OwnThreads),
            seed: 0,
            drain: Duration::from_secs(10),
            trap_on_fault: false,
            #[cfg(feature = "reset-by-store")]
            resets_by_store: false,
        }
    }
}

impl fmt::Debug for CommConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { backend, lsa_size, .. } = self;
        f.debug_struct("CommConfig").field("backend", backend).field("lsa_size", lsa_size).finish_non_exhaustive()
    }
}
