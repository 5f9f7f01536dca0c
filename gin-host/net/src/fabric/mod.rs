// SPDX-License-Identifier: MIT OR Apache-2.0
//! Any network that libfabric has a provider for, such as TCP. The library is opened at run time.
//!
//! | module | holds |
//! | --- | --- |
//! | `config` | the configuration, and the environment variables that set it |
//! | `provider` | providers, and what they offer |
//! | `open` | the choice of one offer |
//! | `objects` | RAII wrappers: endpoint, registered memory, slots |
//! | `connection` | the requests and messages of a context with a peer, in their order |
//! | `live` | an endpoint in use: operations that the provider holds, completions, peers |
//! | `windows` | the table of windows |
//! | `key` | what ranks send each other |
//!
//! # How requests travel
//! Each rank has one endpoint (`FI_EP_RDM`). A put is a write, a get is a read, and a value is a write from the
//! endpoint's own memory. A signal is a message of 56 bytes, and the receiver's proxy raises the word. Messages of a
//! context to a peer have numbers, by which the receiver takes them in the order of sending, so the provider need not
//! keep it. All signals are strong. A request with a signal completes after all earlier writes, and fails if one of
//! them has failed.
//!
//! A write completes when its data is at the peer (`FI_DELIVERY_COMPLETE`). How a signal follows the data depends on
//! the [offer](Offer) of the provider:
//!
//! | [`in_order`](Offer::in_order) | providers | a signal's message is sent |
//! | --- | --- | --- |
//! | yes | `tcp`, `net`, `verbs;ofi_rxm` | behind the data: both travel over one stream or connection |
//! | no | all others | once all earlier writes of the context to the peer are complete |
//!
//! Other differences of providers are data too: how memory is registered (`mr_mode`), whether the provider chooses
//! keys, their length, whether peers use addresses or offsets, the numbers of outstanding operations and the length of
//! messages.
//!
//! # Memory of GPUs
//! Windows in a GPU are registered as its memory (`FI_HMEM_CUDA`) if the provider reaches it without calls of CUDA
//! (`FI_OPT_CUDA_API_PERMITTED`, libfabric 1.18). Such a call could wait for the very kernel that waits for the data.
//! Signals then wait for delivery. Before the proxy raises a signal or completes a get, the endpoint reads a byte of
//! the GPU's memory over itself: `Live::make_visible` has the argument. With other providers memory of GPUs is
//! [staged](super::staged).
//!
//! # When something fails
//! If the provider reports that a connection ended or that a peer cannot be reached, the peer is lost. It is also lost
//! if no outstanding request to it completes for [`lost_after`](FabricConfig::lost_after): TCP itself waits for
//! minutes. The first other request that fails makes all later signals of the same context and peer fail. A lost peer
//! stays lost. If the provider still holds operations to it when a window is deregistered, the whole endpoint ends, so
//! that nothing writes to the window's memory later.
//!
//! # Limits
//! - Memory of GPUs is staged with `tcp` and `shm`, which copy by CUDA. **No provider has reached memory of a GPU
//!   yet.** Models of providers have, with virtual GPUs.
//! - `shm` spins in the provider if a peer dies or stops while it holds a lock of the shared memory.
//! - Run: `tcp` and `shm` of libfabric 1.17. **`efa`, `cxi`, `opx` and `verbs;ofi_rxm` have never run.**
//! - Data is not encrypted. Addresses, keys and tokens travel over gin's own links, which are. Keys of memory and
//!   tokens are random, so a stranger's write or message is refused, unless it has seen the traffic.

mod config;
mod connection;
mod key;
mod live;
mod objects;
mod open;
mod provider;
mod windows;

pub use config::{DEFAULT_PROVIDER, FabricConfig, VARIABLES};
pub use provider::{Fabric, NoFabric, Offer, probe};

use self::connection::{BYTES, Connection};
use self::key::{Hello, PublishedPart};
use self::live::{Live, Peer, ReadBack, Use};
use self::objects::{DATA, EndpointHandle, Posted};
use self::windows::Windows;
use super::staged::{Staged, Staging};
use super::{
    Capabilities, Endpoint, Event, Key, KeyError, LocalSignals, LocalWindow, NetError, Network, Raises, Request,
};
use gin_gpu::registry::random;
use std::fmt;
use std::sync::Arc;
use std::time::Instant;

/// Requests that a connection accepts while others are posted, so that other connections can proceed.
const BACKLOG: usize = 1024;
/// Maximum number of posted buffers for arriving messages.
const RECEIVES: usize = 256;
/// The endpoint of one rank.
pub struct FabricNetwork {
    fabric: Arc<Fabric>,
    rank: u32,
    ranks: u32,
    /// The rank has a GPU, and so have its peers.
    has_gpu: bool,
    /// `None` until signals are registered.
    live: Option<Live>,
    windows: Windows,
    events: Vec<Event>,
}

impl fmt::Debug for FabricNetwork {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FabricNetwork").field("rank", &self.rank).field("offer", &self.fabric.offer).finish()
    }
}

impl FabricNetwork {
    /// Creates the endpoint of `endpoint.rank`.
    pub fn new(fabric: &Arc<Fabric>, endpoint: &Endpoint) -> Self {
        Self {
            fabric: fabric.clone(),
            rank: endpoint.rank,
            ranks: endpoint.ranks,
            has_gpu: endpoint.gpu.is_some() || fabric.config.virtual_gpus,
            live: None,
            windows: Windows::new(endpoint.rank),
            events: Vec::new(),
        }
    }

    /// Creates the endpoint of `endpoint.rank` like [`new`](Self::new). Memory of GPUs that the provider does not reach
    /// goes through host memory.
    pub fn staged(fabric: &Arc<Fabric>, endpoint: &Endpoint) -> Staged<Self> {
        let (network, probed) = (Self::new(fabric, endpoint), fabric.clone());
        let staging = match network.has_gpu {
            true => Staging::Unless(Arc::new(move |device| probed.reach(device))),
            false => Staging::Never,
        };
        Staged::new(network, endpoint.rank, staging)
    }

    /// Lets busy connections post.
    fn work(&mut self) {
        let Some(live) = &mut self.live else { return };
        let mut busy = std::mem::take(&mut live.busy);
        busy.retain(|&connection| {
            live.work(connection, &mut self.windows, &mut self.events);
            live.connections[connection].listed = !live.connections[connection].backlog.is_empty();
            live.connections[connection].listed
        });
        live.busy.append(&mut busy);
    }
}

impl Drop for FabricNetwork {
    fn drop(&mut self) {
        // Before the memory of windows.
        if let Some(live) = self.live.take() {
            self.windows.unbind(&live.endpoint);
            live.endpoint.end();
        }
    }
}

impl Network for FabricNetwork {
    fn capabilities(&self) -> Capabilities {
        Capabilities {
            name: "fabric",
            strong_signals: true,
            va_signals: true,
            max_message: self.fabric.config.max_message.min(self.fabric.offer.max_message).max(8),
            completion_is_arrival: true,
            raises: Raises::Receiver,
            // Also if the own memory is staged: the provider of a peer may reach that one's GPU.
            needs_make_visible: self.has_gpu,
            mailbox: false,
        }
    }

    fn register_signals(&mut self, signals: &LocalSignals) -> Result<Key, NetError> {
        let offer = &self.fabric.offer;
        let sends = self.fabric.config.depth.min(offer.sends).max(4);
        let receives = RECEIVES.min(offer.receives).max(1);
        let mut endpoint = EndpointHandle::new(&self.fabric, sends + receives + 1, self.ranks)?;
        let mut uses = vec![Use::Free; sends];
        uses.resize(sends + receives, Use::Receive);
        uses.push(Use::ReadBack);
        let mut unposted = Vec::new();
        for slot in sends..sends + receives {
            if endpoint.receive(slot) != Posted::Yes {
                unposted.push(slot);
            }
        }
        let [token, _] = bytemuck::cast::<_, [u64; 2]>(random());
        let own = Hello {
            per_context: signals.per_context,
            contexts: signals.contexts,
            provider: offer.provider.clone(),
            protocol: offer.protocol,
            address: endpoint.address()?,
            token,
        };
        let key = own.to_key(self.rank, self.ranks);
        let connections = (0..signals.contexts)
            .flat_map(|context| (0..self.ranks).map(move |peer| Connection { context, peer, ..Connection::default() }));
        self.live = Some(Live {
            endpoint,
            own,
            uses,
            free: (0..sends).rev().collect(),
            unposted,
            connections: connections.collect(),
            busy: Vec::new(),
            peers: Vec::new(),
            per_peer: (sends / 2).clamp(2, 128),
            ended: Vec::new(),
            looked: Instant::now(),
            read_back: ReadBack::Idle,
        });
        Ok(key)
    }

    fn connect_signals(&mut self, keys: &[Key]) -> Result<(), NetError> {
        let Some(live) = &mut self.live else {
            let what = "connecting before signals are registered";
            return Err(NetError::Local { what, reason: "there is no endpoint".to_owned() });
        };
        let hellos = keys.iter().zip(0..).map(|(key, rank)| Hello::from_key(rank, self.ranks, &live.own, key));
        let hellos = hellos.collect::<Result<Vec<_>, _>>()?;
        if hellos.len() != self.ranks as usize {
            return Err(KeyError { rank: hellos.len() as u32, reason: "there is none".to_owned() }.into());
        }
        let peers = hellos.iter().zip(0..).map(|(hello, rank)| {
            let refuse = || KeyError { rank, reason: "the provider cannot read its address".to_owned() };
            let address = live.endpoint.insert(&hello.address).ok_or_else(refuse)?;
            let token = hello.token;
            Ok(Peer { address, token, outstanding: 0, since: None, is_full: false, lost: None })
        });
        live.peers = peers.collect::<Result<_, KeyError>>()?;
        self.windows.signals = hellos.iter().map(|hello| hello.per_context).collect();
        Ok(())
    }

    fn register(&mut self, window: &LocalWindow) -> Result<Key, NetError> {
        let Some(live) = &self.live else {
            return Err(NetError::Local { what: "registering memory", reason: "register signals first".to_owned() });
        };
        self.windows.register(&live.endpoint, window)
    }

    fn connect(&mut self, window: u32, keys: &[Key]) -> Result<(), NetError> {
        self.windows.connect(window, keys, PublishedPart::from_key)
    }

    fn deregister(&mut self, window: u32) -> bool {
        if let Some(live) = self.live.as_mut().filter(|live| live.holds(window)) {
            live.shut(&mut self.windows, &mut self.events);
        }
        self.windows.close(window)
    }

    fn post(&mut self, requests: &[Request]) -> usize {
        let mut taken = 0;
        for request in requests {
            let index = request.context as usize * self.ranks as usize + request.peer as usize;
            let exists =
                |live: &&mut Live| (request.peer as usize) < live.peers.len() && index < live.connections.len();
            match self.live.as_mut().filter(exists) {
                Some(live) if live.connections[index].backlog.len() < BACKLOG => {
                    live.connections[index].backlog.push_back(*request);
                    live.list(index);
                }
                Some(_) => break,
                None => {
                    let (context, peer) = ("a request without a connection", request.peer);
                    let outcome = Err(NetError::Failed { context, peer, status: 0 });
                    self.events.push(Event::Completion { id: request.id, outcome });
                }
            }
            taken += 1;
        }
        self.work();
        taken
    }

    fn poll(&mut self, events: &mut Vec<Event>) {
        if let Some(live) = self.live.as_mut().filter(|live| !live.peers.is_empty()) {
            live.take(&mut self.windows, &mut self.events);
            live.look(&mut self.events);
        }
        self.work();
        events.append(&mut self.events);
    }

    fn make_visible(&mut self) -> Result<(), NetError> {
        self.live.as_mut().map_or(Ok(()), |live| live.make_visible(&mut self.windows, &mut self.events))
    }

    fn describe(&self) -> String {
        let Offer { provider, domain, in_order, .. } = &self.fabric.offer;
        let order = if *in_order { "behind their data" } else { "once their data is delivered" };
        let direct = if self.windows.in_gpu().is_some() { ", memory of the device direct" } else { "" };
        format!("fabric over {provider} ({domain}), signals raised by the proxy, sent {order}{direct}")
    }

    fn carries_notices(&self) -> bool {
        true
    }

    fn is_quiet(&self) -> bool {
        let is_done = |used: &Use| !matches!(used, Use::Operation(operation) if !operation.is_over);
        self.events.is_empty()
            && self.live.as_ref().is_none_or(|live| live.busy.is_empty() && live.uses.iter().all(is_done))
    }
}

const _: () = assert!(BYTES <= DATA, "a message fits into a slot");
