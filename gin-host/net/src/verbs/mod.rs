// SPDX-License-Identifier: MIT OR Apache-2.0
//! Any RDMA NIC, through libibverbs, which is opened at run time.
//!
//! | module | holds |
//! | --- | --- |
//! | `device`, `info` | RDMA devices with their ports and addresses |
//! | `ports`, `topology` | which ports a rank uses: those near its GPU |
//! | `config`, `variables` | the configuration, and the environment variables that set it |
//! | `objects`, `region` | RAII wrappers: queue pairs, completion queues; memory regions |
//! | `links`, `connection` | all connections of a rank, and one of them |
//! | `send_queue` | outstanding entries of a send queue, and their outcomes |
//! | `credits` | how many signals may be outstanding |
//! | `windows` | the table of windows |
//! | `key`, `message` | what ranks send each other |
//!
//! # Ports
//! A rank uses one or several ports, and registers its memory with each. At each end, context `c` uses the port of
//! index `c` modulo the number of ports, so both ends know which ports a connection joins. Ranks with equally many
//! ports connect ports of the same index. Everything that arrives for a context arrives over one port.
//!
//! # How requests travel
//! Each context has a reliable connection with each rank, including its own. A put is an RDMA write, a get is an RDMA
//! read, and a value is a write whose entry holds it. A signal is a message of 32 bytes behind the data. The connection
//! carries out everything in order, so when the message arrives, everything before it has arrived, and the receiver's
//! proxy raises the word. So all signals are strong, and no word is raised by two kinds of engine.
//!
//! If the NIC raises signals ([`SignalsBy`]), a signal is a fetch-and-add behind the data instead, as long as the NIC
//! keeps the two in order. It raises a word in device memory.
//!
//! A request is complete when the peer's NIC has acknowledged it. The network posts entries in batches, each with one
//! doorbell. One entry in [`completion_every`](VerbsConfig::completion_every) and the last of a batch ask for a
//! completion, which also covers the entries before it.
//!
//! # Memory of GPUs
//! GPU memory is registered as a DMA-BUF file, or else by its address if the GPU driver has a peer-memory module. Where
//! a probe finds neither, [`factory`](VerbsNetwork::factory) sends GPU memory through pinned host memory
//! ([`staged`](super::staged)).
//!
//! # When something fails
//! The first request that fails breaks its connection: every later request of the same context and peer fails too. A
//! peer is lost if its NIC does not answer for [`lost_after`](VerbsConfig::lost_after). A rank that posts nothing to a
//! peer does not detect its loss.
//!
//! # Limits
//! - A read over a loop-back connection makes visible what a NIC wrote into a GPU. **This has never run with a GPU, nor
//!   any of this module with a hardware NIC**: it runs on Soft-RoCE.

mod config;
mod connection;
mod credits;
mod device;
mod flush;
mod info;
mod key;
mod links;

mod objects;
mod ports;
mod region;
mod send_queue;
mod status;
mod topology;
mod variables;
mod windows;

pub use config::{GpuMemory, NotAPort, PortName, SignalsBy, VerbsConfig};
pub use device::{RdmaDevice, probe};
pub use gin_verbs::{Link, LoadError};
pub use info::{DeviceInfo, Gid, GidKind, NoRdmaDevice, PortInfo};
pub use ports::{ChosenPorts, Ports};
pub use region::Way;
pub use topology::{Distance, PciPlace};
pub use variables::{VARIABLES, Variable, WrongVariable};

use self::connection::{Buffers, Connection, Tools, slot_bytes};
use self::flush::Flush;
use self::key::{Hello, PublishedPart};
use self::links::{Links, Words};
use self::objects::{Chain, CompletionQueue, Depths, Domain, QueuePair, local};
use self::region::{Buffer, is_in_gpu};
use self::send_queue::Ended;
use self::windows::Windows;
use super::staged::{Staged, Staging};
use super::{
    Capabilities, Endpoint, Event, Key, KeyError, LocalSignals, LocalWindow, NetError, Network, NetworkFactory, Raises,
    Request,
};
use gin_gpu::registry::initial_psn;
use gin_gpu::{Memory, MemoryKind};
use gin_verbs::Access;
use std::sync::Arc;

/// The endpoint of one rank.
#[derive(Debug)]
pub struct VerbsNetwork {
    devices: Vec<Arc<RdmaDevice>>,
    config: VerbsConfig,
    rank: u32,
    ranks: u32,
    // Before what its entries use.
    links: Option<Links>,
    /// By port; empty unless memory has to be read back.
    flushes: Vec<Flush>,
    events: Vec<Event>,
    /// NICs should raise signals.
    by_nic: bool,
    /// Why this rank's NIC does not raise signals, though it should.
    refusal: Option<String>,
}

impl VerbsNetwork {
    /// Creates the endpoint of `endpoint.rank` on these ports: its contexts use them in turn. The first port's
    /// configuration applies to all connections.
    ///
    /// # Panics
    /// If there are no ports.
    pub fn new(ports: &[Arc<RdmaDevice>], endpoint: &Endpoint) -> Self {
        let Endpoint { rank, ranks, .. } = *endpoint;
        let [first, ..] = ports else { panic!("no ports of RDMA devices were given") };
        let by_nic = match first.config.signals {
            SignalsBy::Automatic => endpoint.gpu.is_some() && ports.iter().all(|port| port.info.has_atomics),
            SignalsBy::Proxy => false,
            SignalsBy::Nic => true,
        };
        Self {
            devices: ports.to_vec(),
            config: first.config.clone(),
            rank,
            ranks,
            links: None,
            flushes: Vec::new(),
            events: Vec::new(),
            by_nic,
            refusal: None,
        }
    }

    /// Registers the words that the NIC raises, if it should and can.
    fn words(&mut self, domains: &[Arc<Domain>], signals: &LocalSignals) -> Result<Option<Words>, NetError> {
        const WHAT: &str = "having the NIC raise signals";
        if self.config.signals == SignalsBy::Nic && signals.nic.is_none() {
            return Err(local(WHAT, "memory of the device goes through host memory"));
        }
        let Some(memory) = signals.nic.as_ref().filter(|memory| self.by_nic && memory.bytes() > 0) else {
            return Ok(None);
        };
        let without = self.devices.iter().find(|device| !device.info.has_atomics);
        let words = match without {
            Some(device) => Err(local(WHAT, format_args!("{} has no atomics", device.info.name))),
            None => Words::new(domains, memory.whole()),
        };
        if self.config.signals == SignalsBy::Nic {
            return words.map(Some);
        }
        self.refusal = words.as_ref().err().map(ToString::to_string);
        Ok(words.ok())
    }

    /// Creates the endpoint of `endpoint.rank` on these ports like [`new`](Self::new). Sends GPU memory through host
    /// memory if [`VerbsConfig::gpu_memory`] or the probe at start-up requires it.
    ///
    /// # Panics
    /// If there are no ports.
    pub fn staged(ports: &[Arc<RdmaDevice>], endpoint: &Endpoint) -> Staged<Self> {
        let network = Self::new(ports, endpoint);
        let staging = match network.config.gpu_memory {
            GpuMemory::Host => Staging::Always("so it was chosen"),
            GpuMemory::Automatic if endpoint.gpu.is_some() => {
                let ports = ports.to_vec();
                Staging::Unless(Arc::new(move |device| reach_all(&ports, device)))
            }
            // Host memory is registered by its address.
            GpuMemory::Automatic | GpuMemory::Nic => Staging::Never,
        };
        Staged::new(network, endpoint.rank, staging)
    }

    /// Returns a factory for the endpoints of all ranks of this process. Every rank uses all these ports, wherever its
    /// GPU is; rank `n` starts with the `n`th. [`Ports::factory`] chooses ports by the GPU.
    ///
    /// # Panics
    /// If there are no ports.
    pub fn factory(ports: &[Arc<RdmaDevice>]) -> NetworkFactory {
        assert!(!ports.is_empty(), "no ports of RDMA devices were given");
        let ports = ports.to_vec();
        Arc::new(move |endpoint| {
            let mut ports = ports.clone();
            let first = endpoint.rank as usize % ports.len();
            ports.rotate_left(first);
            Box::new(Self::staged(&ports, endpoint))
        })
    }

    /// Puts the connection of a context with a peer into error, as a NIC can at any time. For tests.
    #[doc(hidden)]
    pub fn force_error(&mut self, context: u32, peer: u32) {
        let connections = self.links.iter_mut().flat_map(|links| &mut links.connections);
        for connection in connections.filter(|connection| (connection.context, connection.peer) == (context, peer)) {
            connection.force_error();
        }
    }

    /// Returns the configured depths, reduced to what all devices have room for.
    fn depths(&self) -> Result<Depths, NetError> {
        let mut depths = Depths { send: self.config.send_depth, receive: self.config.signal_depth };
        for device in &self.devices {
            let info = &device.info;
            let max = info.max_entries.min(info.max_completions / self.ranks.max(1));
            depths = Depths { send: depths.send.min(max), receive: depths.receive.min(max) };
            if depths.send < 4 || depths.receive < 2 {
                let entries = info.max_completions;
                let reason = format!("{} has {entries} entries, too few for {} ranks", info.name, self.ranks);
                return Err(local("making completion queues", reason));
            }
        }
        Ok(depths)
    }

    /// Lets busy connections post, and reports what has ended.
    fn work(&mut self) {
        let Some(links) = &mut self.links else { return };
        links.work();
        let Tools { windows, ended, .. } = &mut links.tools;
        for window in ended.windows.drain(..) {
            windows.leave(window);
        }
        let complete = |(id, outcome)| Event::Completion { id, outcome };
        self.events.extend(ended.requests.drain(..).map(complete));
    }
}

/// Checks that all ports reach memory of a device; the error says why one does not.
fn reach_all(ports: &[Arc<RdmaDevice>], device: &Arc<dyn gin_gpu::Device>) -> Result<(), String> {
    // Granularity of GPU memory.
    const BYTES: u64 = 2 << 20;
    let memory = Memory::new(device, MemoryKind::Device, BYTES).map_err(|error| error.to_string())?;
    for port in ports {
        port.reach(&memory.whole()).map_err(|error| format!("{}: {error}", port.name()))?;
    }
    Ok(())
}

impl Network for VerbsNetwork {
    fn capabilities(&self) -> Capabilities {
        Capabilities {
            name: "verbs",
            strong_signals: true,
            va_signals: true,
            max_message: self
                .devices
                .iter()
                .map(|device| device.port.max_message.max(8))
                .fold(self.config.max_message, u64::min),
            completion_is_arrival: true,
            raises: if self.by_nic { Raises::Nic } else { Raises::Receiver },
            needs_make_visible: true,
            mailbox: false,
        }
    }

    fn register_signals(&mut self, signals: &LocalSignals) -> Result<Key, NetError> {
        let depths = self.depths()?;
        let (contexts, ranks) = (signals.contexts as usize, self.ranks as usize);
        // Contexts would not use further ports.
        self.devices.truncate(contexts.max(1));
        let domains = self.devices.iter().map(Domain::new).collect::<Result<Vec<_>, _>>()?;
        let count = contexts * ranks;
        let mut buffers = Buffers {
            credits: Buffer::new(&domains, 8 * count, Access::PEERS)?,
            slots: Buffer::new(&domains, slot_bytes(depths) * count, Access::LOCAL_WRITE)?,
        };
        for index in 0..count {
            buffers.credits.write(8 * index, &credits::word(0).to_le_bytes());
        }
        let words = self.words(&domains, signals)?;
        let port = |context: usize| context % domains.len();
        let completions = (0..contexts).map(|context| {
            let queue =
                |entries: u32| CompletionQueue::new(&domains[port(context)], entries.saturating_mul(self.ranks));
            Ok((queue(depths.send)?, queue(depths.receive)?))
        });
        let completions = completions.collect::<Result<Vec<_>, NetError>>()?;
        let mut connections = Vec::with_capacity(count);
        for (context, queues) in (0..signals.contexts).zip(&completions) {
            for peer in 0..self.ranks {
                let (index, port) = (connections.len(), port(context as usize));
                let queue_pair = QueuePair::new(&domains[port], (&queues.0, &queues.1), depths, initial_psn())?;
                connections.push(Connection::new(queue_pair, (index, port), depths, (context, peer)));
            }
        }
        let ports = domains.iter().enumerate().zip(buffers.credits.remote_keys()).map(|((port, domain), key)| {
            let words_key = words.as_ref().map_or(0, |words| words.regions[port].remote_key);
            domain.port(key, words_key)
        });
        let hello = Hello {
            per_context: signals.per_context,
            signal_depth: depths.receive,
            credits: buffers.credits.address(0),
            words: words.as_ref().map_or(0, |words| words.memory.address()),
            words_in_gpu: words.as_ref().is_some_and(|words| is_in_gpu(&words.memory)),
            ports: ports.collect(),
            ends: connections.iter().map(|connection| connection.queue_pair.end()).collect(),
        };
        let (busy, in_error, peer_ports) = (Vec::new(), Vec::new(), Vec::new());
        let has_written = vec![false; domains.len()];
        let (windows, config) = (Windows::new(self.rank), self.config.clone());
        let tools = Tools { buffers, windows, chain: Chain::default(), ended: Ended::default(), config };
        self.links =
            Some(Links { connections, busy, in_error, completions, words, tools, has_written, domains, peer_ports });
        Ok(hello.to_key(self.rank, self.ranks))
    }

    fn connect_signals(&mut self, keys: &[Key]) -> Result<(), NetError> {
        let Some(links) = &mut self.links else {
            return Err(local("connecting before signals are registered", "there are no queue pairs"));
        };
        let count = links.connections.len();
        let hellos = keys.iter().zip(0..).map(|(key, rank)| Hello::from_key(rank, self.ranks, count, key));
        let hellos = hellos.collect::<Result<Vec<_>, _>>()?;
        for connection in &mut links.connections {
            let rank = connection.peer;
            let Some(hello) = hellos.get(rank as usize) else {
                return Err(KeyError { rank, reason: "there is none".to_owned() }.into());
            };
            let own = &self.devices[connection.context as usize % self.devices.len()];
            if let Some(port) = hello.ports.get(hello.port_index(connection.context))
                && port.link != own.port.link
            {
                let reason = format!("its port is on {}, this rank's {} on {}", port.link, own.name(), own.port.link);
                return Err(KeyError { rank, reason }.into());
            }
            let own = connection.context as usize * self.ranks as usize + self.rank as usize;
            connection.connect(hello, own, self.by_nic, &links.tools.buffers)?;
        }
        links.tools.windows.signals = hellos.iter().map(|hello| hello.per_context).collect();
        links.peer_ports = hellos.iter().map(|hello| hello.ports.len()).collect();
        Ok(())
    }

    fn register(&mut self, window: &LocalWindow) -> Result<Key, NetError> {
        let Some(links) = &mut self.links else {
            return Err(local("registering memory", "register signals first"));
        };
        let read_back = self.config.always_read_back || is_in_gpu(&window.memory);
        if read_back && self.flushes.is_empty() {
            self.flushes = links.domains.iter().map(Flush::new).collect::<Result<_, _>>()?;
        }
        // Every context raises words of a window, so one NIC raises them all only if the rank uses one port.
        let nic = window.nic && links.words.is_some() && links.domains.len() == 1;
        links.tools.windows.register(&links.domains, window, nic)
    }

    fn connect(&mut self, window: u32, keys: &[Key]) -> Result<(), NetError> {
        let unknown = NetError::UnknownWindow { window, rank: self.rank };
        let Links { tools, peer_ports, .. } = self.links.as_mut().ok_or(unknown)?;
        let ports = |rank: u32| peer_ports.get(rank as usize).copied().unwrap_or(0);
        tools.windows.connect(window, keys, |rank, key| PublishedPart::from_key(rank, ports(rank), key))
    }

    fn deregister(&mut self, window: u32) -> bool {
        self.links.as_mut().is_none_or(|links| links.tools.windows.close(window))
    }

    fn post(&mut self, requests: &[Request]) -> usize {
        let mut taken = 0;
        for request in requests {
            let index = request.context as usize * self.ranks as usize + request.peer as usize;
            let exists = |links: &&mut Links| request.peer < self.ranks && index < links.connections.len();
            match self.links.as_mut().filter(exists) {
                Some(links) if links.connections[index].backlog.len() < self.config.backlog => {
                    let connection = &mut links.connections[index];
                    connection.backlog.push_back(*request);
                    connection.list(&mut links.busy);
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
        if let Some(links) = &mut self.links {
            let polled = links.sent().and_then(|()| links.received(&mut self.events));
            // The send queue's completion carries the cause, and precedes those of the flushed receive buffers. It may
            // have arrived since the send queues were polled, so polls them again.
            let asked_again = if links.in_error.is_empty() { Ok(()) } else { links.sent() };
            for (index, error) in links.in_error.drain(..) {
                if let Some(connection) = links.connections.get_mut(index) {
                    connection.send_queue.end(error);
                }
            }
            if let Err(error) = polled.and(asked_again) {
                // A completion queue cannot be polled, so nothing that waits for it would ever end.
                links.connections.iter_mut().for_each(|connection| connection.fail(error.clone()));
            }
        }
        self.work();
        events.append(&mut self.events);
    }

    fn make_visible(&mut self) -> Result<(), NetError> {
        let Some(links) = &mut self.links else { return Ok(()) };
        // Starts all reads, then waits for each, also if another one failed.
        let mut outcome = Ok(());
        let mut begun = Vec::with_capacity(self.flushes.len());
        for (index, (has_written, flush)) in links.has_written.iter_mut().zip(&mut self.flushes).enumerate() {
            let source = links.tools.windows.behind_pcie(self.config.always_read_back, index);
            if let Some(source) = source.filter(|_| *has_written) {
                match flush.begin(source) {
                    Ok(()) => begun.push((has_written, flush)),
                    Err(error) => outcome = Err(error),
                }
            }
        }
        for (has_written, flush) in begun {
            match flush.end(self.rank) {
                Ok(()) => *has_written = false,
                Err(error) => outcome = Err(error),
            }
        }
        outcome
    }

    fn describe(&self) -> String {
        let by = match (&self.links, &self.refusal) {
            (Some(Links { words: Some(_), .. }), _) => "signals raised by the NIC".to_owned(),
            (_, Some(reason)) => format!("signals raised by the proxy ({reason})"),
            (_, None) => "signals raised by the proxy".to_owned(),
        };
        format!("verbs over {}, {by}", ports::names(&self.devices))
    }

    fn carries_notices(&self) -> bool {
        true
    }

    fn is_quiet(&self) -> bool {
        self.events.is_empty()
            && self.links.as_ref().is_none_or(|links| links.connections.iter().all(Connection::is_quiet))
    }
}
