// SPDX-License-Identifier: MIT OR Apache-2.0
//! The configuration of a communicator.

use super::print::{PrintTo, to_stdout};
use super::{Backend, NicChoice};
use crate::proxy::progress::{OwnThreads, Progress};
use gin_net::NetworkFactory;
use gin_net::peer::PeerNetwork;
use gin_nic::{DoorbellRelease, Doorbells};
use std::sync::Arc;
use std::time::Duration;

/// The routes of operations in a kernel that does not name its back end.
///
/// ```
/// use gin_host::comm::Routes;
/// use gin_host::world::WorldConfig;
///
/// let config = WorldConfig::seeded(2, 7).routes(Routes::Network);
/// assert_eq!((config.comm.routes, Routes::default()), (Routes::Network, Routes::Automatic));
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Hash)]
pub enum Routes {
    /// Loads and stores to peers of the LSA team, the network to all other ranks.
    #[default]
    Automatic,
    /// The network to all ranks. Kernels that ask for loads and stores are refused. Signals have no words that GPUs
    /// raise.
    Network,
}

gin_gpu::config! {
    /// The way a communicator works. Its size is set by [`Requirements`](super::Requirements).
    ///
    /// By default, the host is probed for the back end, one thread steps the proxy, and the network is copies within
    /// the host.
    ///
    /// ```
    /// use gin_host::comm::{Backend, CommConfig};
    ///
    /// let config = CommConfig::default().backend(Backend::Proxy).lsa_size(Some(2));
    /// assert_eq!(config.lsa_size, Some(2));
    /// ```
    #[derive(Clone, derive_more::Debug)]
    #[debug("CommConfig {{ backend: {backend:?}, lsa_size: {lsa_size:?}, .. }}")]
    pub struct CommConfig {
        /// The back end.
        pub backend: Backend = Backend::Auto,
        /// The device-driven NIC. Used by the back end GDAKI only.
        pub nic: NicChoice = NicChoice::default(),
        /// The requested engine that rings the NIC's doorbells.
        pub doorbells: Doorbells = Doorbells::Automatic,
        /// The scope of the release fence that kernels issue before they ring.
        pub release: DoorbellRelease = DoorbellRelease::System,
        /// Time limit of a rank to bring its queue pairs up.
        pub connecting: Duration = Duration::from_secs(30),
        /// Number of ranks in an LSA team: consecutive ranks that reach each other by loads and stores. The default is
        /// the largest number for which the devices of all such ranks reach each other, with atomics.
        pub lsa_size: Option<u32> = None,
        /// The routes that operations may take.
        pub routes: Routes = Routes::Automatic,
        /// Creates the network of each proxy.
        pub network: NetworkFactory = Arc::new(|endpoint| Box::new(PeerNetwork::new(endpoint))),
        /// The engine that steps the proxy. With [`ManualProgress`](crate::proxy::progress::ManualProgress), the
        /// program does.
        pub progress: Arc<dyn Progress> = Arc::new(OwnThreads),
        /// Seed for networks that make random choices.
        pub seed: u64 = 0,
        /// Time limit of deregistration and destruction to wait for unfinished requests.
        pub drain: Duration = Duration::from_secs(10),
        /// Goes on if ranks are lost. A kernel's wait for a lost rank then ends at its deadline, and a put to a lost
        /// rank on this host changes nothing. Collective calls fail, but each remaining rank can destroy its member. A
        /// request that the network fails still ends the communicator, as most do that concern a lost rank on another
        /// host. By default the loss of a rank ends all waits.
        pub survive_losses: bool = false,
        /// Stops a kernel at once when it reports a fault. For debugging.
        pub trap_on_fault: bool = false,
        /// Takes the lines that kernels print with `gin_println!`, on the proxy's thread or in a call of the program.
        /// By default they go to standard output.
        pub print_to: PrintTo = to_stdout(),
    }
}
