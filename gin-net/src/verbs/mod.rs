// SPDX-License-Identifier: MIT OR Apache-2.0
//! Any RDMA NIC, through libibverbs, which is opened at run time.
//!
//! | module | holds |
//! | --- | --- |
//! | `device`, `info` | devices: what there are, ports, addresses |
//! | `ports`, `topology` | which ports a rank uses: those near its GPU |
//! | `config`, `variables` | what can be chosen, and how environment variables choose it |
//! | `objects`, `region` | what is made with a device: queue pairs, completion queues; registered memory |
//! | `links`, `line` | the connections, and one of them |
//! | `ledger` | what is in a send queue, and what becomes of it |
//! | `credits` | how many signals may be on their way |
//! | `windows` | the table of windows |
//! | `key`, `message` | what ranks tell each other |
//!
//! # Ports
//! A rank uses one or several ports, and registers its memory with each. Context `c` uses the port of index `c` modulo
//! their number, at each end, so both know what joins which: ranks with as many ports meet at ports of the same index. What
//! arrives for a context arrives over one port.
//!
//! # How requests travel
//! Each context has a reliable connection with each rank, also its own. A put is an RDMA write, a get an RDMA read, a value a
//! write whose entry holds it. A signal is a message of 32 bytes behind the data: the connection carries everything out in
//! order, so when it arrives everything before it has, and the receiver's proxy raises the word. So all signals are
//! strong, and no word is raised by two kinds of engine.
//!
//! A request is complete when the peer's NIC has acknowledged it. Entries are posted in batches, each with one doorbell; one
//! in [`completion_every`](VerbsConfig::completion_every) and the last of a batch ask for a completion, which stands for
//! those before it too.
//!
//! # Memory of GPUs
//! It is registered as a DMA-BUF file, else by its address, where the GPU's driver has a peer-memory module. Where a probe
//! finds neither, [`factory`](Verbs::factory) has it go through pinned host memory ([`staged`](super::staged)).
//!
//! # When something fails
//! The first request that fails breaks its connection: whatever comes behind it on the same context and peer fails too.
//! A peer whose NIC does not answer for [`lost_after`](VerbsConfig::lost_after) is lost. A rank that posts nothing to a
//! peer does not learn that it is gone.
//!
//! # Limits
//! - What a NIC wrote into a GPU is made visible by reading there over a loop-back connection. **This was never run with a
//!   GPU, nor any of this with a NIC that is hardware**: it runs on Soft-RoCE.

mod config;
mod credits;
mod device;
mod flush;
mod info;
mod key;
mod ledger;
mod line;
mod links;
mod message;
mod objects;
mod ports;
mod region;
mod status;
mod topology;
mod variables;
mod windows;

pub use config::{GpuMemory, NotAPort, PortName, SignalsBy, VerbsConfig};
pub use device::{Device, probe};
#[doc(hidden)]
pub use gin_verbs::verbs::{FOREIGN_FIELDS, FOREIGN_NUMBERS, FOREIGN_SIZES};
pub use info::{DeviceInfo, Gid, GidKind, NoDevice, PortInfo};
pub use ports::{Chosen, Ports};
pub use region::Way;
pub use topology::{Distance, Place};
pub use variables::{VARIABLES, Variable, WrongVariable};

use self::flush::Flush;
use self::key::Hello;
use self::ledger::Ended;
use self::line::{Buffers, Line, Tools, slot_bytes};
use self::links::{Links, Rail, Words};
use self::objects::{Chain, Completions, Depths, Domain, Queue};
use self::region::{Buffer, Reach, is_in_gpu};
use self::windows::{Peer, Windows};
use super::staged::{Staged, Staging};
use super::{
    Capabilities, Endpoint, Event, Key, LocalSignals, LocalWindow, NetError, Network, NetworkFactory, Raises, Request,
};
use gin_gpu::registry::first_packet;
use gin_gpu::{Memory, MemoryKind};
use std::sync::Arc;

/// The endpoint of one rank.
#[derive(Debug)]
pub struct Verbs {
    devices: Vec<Arc<Device>>,
    config: VerbsConfig,
    rank: u32,
    ranks: u32,
    // Before what its entries use.
    links: Option<Links>,
    /// By port, if there is memory to be read back.
    flushes: Vec<Flush>,
    windows: Windows,
    events: Vec<Event>,
    chain: Chain,
    ended: Ended,
    /// NICs are to raise signals.
    by_nic: bool,
    /// Why this rank's does not, though it was to.
    refusal: Option<String>,
}

impl Verbs {
    /// The endpoint of `endpoint.rank` on these ports: its contexts use them in turn. What the configurations say of
    /// connections is taken from the first.
    ///
    /// # Panics
    /// If there are no ports.
    pub fn new(ports: &[Arc<Device>], endpoint: &Endpoint) -> Self {
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
            windows: Windows::new(rank),
            events: Vec::new(),
            chain: Chain::default(),
            ended: Ended::default(),
            by_nic,
            refusal: None,
        }
    }

    /// Registers the words that the NIC is to raise, if it is to and can.
    fn words(&mut self, domains: &[Arc<Domain>], signals: &LocalSignals) -> Result<Option<Words>, NetError> {
        if self.config.signals == SignalsBy::Nic && signals.nic.is_none() {
            let reason = "memory of the device goes through host memory".to_owned();
            return Err(NetError::Local { what: "having the NIC raise signals", reason });
        }
        let Some(memory) = signals.nic.as_ref().filter(|memory| self.by_nic && memory.bytes() > 0) else {
            return Ok(None);
        };
        let without = self.devices.iter().find(|device| !device.info.has_atomics);
        let words = match without {
            Some(device) => {
                let reason = format!("{} has no atomics", device.info.name);
                Err(NetError::Local { what: "having the NIC raise signals", reason })
            }
            None => Words::new(domains, memory.whole()),
        };
        match words {
            Err(error) if self.config.signals == SignalsBy::Nic => Err(error),
            Err(error) => {
                self.refusal = Some(error.to_string());
                Ok(None)
            }
            Ok(words) => Ok(Some(words)),
        }
    }

    /// The endpoint of `endpoint.rank` on these ports, as [`new`](Self::new) makes it; memory of a GPU goes through host memory
    /// where [`VerbsConfig::gpu_memory`] says so, or a probe when it comes up.
    ///
    /// # Panics
    /// If there are no ports.
    pub fn staged(ports: &[Arc<Device>], endpoint: &Endpoint) -> Staged<Self> {
        let network = Self::new(ports, endpoint);
        let staging = match network.config.gpu_memory {
            GpuMemory::Host => Staging::Always("so it was chosen"),
            GpuMemory::Automatic if endpoint.gpu.is_some() => {
                let ports = ports.to_vec();
                Staging::Unless(Arc::new(move |device| reach_all(&ports, device)))
            }
            // The CPU's own memory is registered by its address.
            GpuMemory::Automatic | GpuMemory::Nic => Staging::Never,
        };
        Staged::new(network, endpoint.rank, staging)
    }

    /// Makes the endpoints of all ranks of this process: all ranks use all these ports, rank `n` beginning with the `n`th,
    /// wherever its GPU is. [`Ports::factory`] chooses by that.
    ///
    /// # Panics
    /// If there are no ports.
    pub fn factory(ports: &[Arc<Device>]) -> NetworkFactory {
        assert!(!ports.is_empty(), "no ports of RDMA devices were given");
        let ports = ports.to_vec();
        Arc::new(move |endpoint| {
            let mut ports = ports.clone();
            let first = endpoint.rank as usize % ports.len();
            ports.rotate_left(first);
            Box::new(Self::staged(&ports, endpoint))
        })
    }

    /// Puts the connection of a context with a peer into error, as a NIC may at any time; for tests.
    #[doc(hidden)]
    pub fn force_error(&mut self, context: u32, peer: u32) {
        let lines = self.links.iter_mut().flat_map(|links| &mut links.lines);
        for line in lines.filter(|line| (line.context, line.peer) == (context, peer)) {
            line.force_error();
        }
    }

    /// As many entries as asked for, or as all devices have room for.
    fn depths(&self) -> Result<Depths, NetError> {
        let mut depths = Depths { send: self.config.send_depth, receive: self.config.signal_depth };
        for device in &self.devices {
            let info = &device.info;
            let most = info.max_entries.min(info.max_completions / self.ranks.max(1));
            depths = Depths { send: depths.send.min(most), receive: depths.receive.min(most) };
            if depths.send < 4 || depths.receive < 2 {
                let (what, entries) = ("making completion queues", info.max_completions);
                let reason = format!("{} has {entries} entries, too few for {} ranks", info.name, self.ranks);
                return Err(NetError::Local { what, reason });
            }
        }
        Ok(depths)
    }

    /// Posts what connections have to post, and books what has ended.
    fn work(&mut self) {
        let Some(links) = &mut self.links else { return };
        let config = &self.config;
        let mut tools = Tools {
            buffers: &mut links.buffers,
            windows: &mut self.windows,
            chain: &mut self.chain,
            ended: &mut self.ended,
            config,
        };
        let lines = &mut links.lines;
        links.busy.retain(|&index| {
            let Some(line) = lines.get_mut(index) else { return false };
            line.work(&mut tools);
            line.listed = line.is_busy();
            line.listed
        });
        self.book();
    }

    fn book(&mut self) {
        for window in self.ended.windows.drain(..) {
            self.windows.leave(window);
        }
        let complete = |(id, outcome)| Event::Completion { id, outcome };
        self.events.extend(self.ended.requests.drain(..).map(complete));
    }

    /// A queue could not be asked: nothing that waits for it would ever end.
    fn fail_all(&mut self, error: &NetError) {
        let Some(links) = &mut self.links else { return };
        for line in &mut links.lines {
            line.fail(error.clone());
        }
    }
}

/// Whether all ports reach memory of a device, or why one does not.
fn reach_all(ports: &[Arc<Device>], device: &Arc<dyn gin_gpu::Device>) -> Result<(), String> {
    // A granule of a GPU's memory.
    const BYTES: u64 = 2 << 20;
    let memory = Memory::new(device, MemoryKind::Device, BYTES).map_err(|error| error.to_string())?;
    for port in ports {
        port.reach(&memory.whole()).map_err(|error| format!("{}: {error}", port.name()))?;
    }
    Ok(())
}

impl Network for Verbs {
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
        }
    }

    fn register_signals(&mut self, signals: &LocalSignals) -> Result<Key, NetError> {
        let depths = self.depths()?;
        let (contexts, ranks) = (signals.contexts as usize, self.ranks as usize);
        // More ports than contexts would not be used.
        self.devices.truncate(contexts.max(1));
        let domains = self.devices.iter().map(Domain::new).collect::<Result<Vec<_>, _>>()?;
        let count = contexts * ranks;
        let mut buffers = Buffers {
            credits: Buffer::new(&domains, 8 * count, Reach::Peers)?,
            slots: Buffer::new(&domains, slot_bytes(depths) * count, Reach::Own)?,
        };
        for line in 0..count {
            buffers.credits.write(8 * line, &credits::word(0).to_le_bytes());
        }
        let words = self.words(&domains, signals)?;
        let rail = |context: usize| context % domains.len();
        let completions = (0..contexts).map(|context| {
            let queue = |entries: u32| Completions::new(&domains[rail(context)], entries.saturating_mul(self.ranks));
            Ok((queue(depths.send)?, queue(depths.receive)?))
        });
        let completions = completions.collect::<Result<Vec<_>, NetError>>()?;
        let mut lines = Vec::with_capacity(count);
        for (context, queues) in (0..signals.contexts).zip(&completions) {
            for peer in 0..self.ranks {
                let index = lines.len();
                let rail = rail(context as usize);
                let queue = Queue::new(&domains[rail], (&queues.0, &queues.1), depths, first_packet())?;
                lines.push(Line::new(queue, (index, rail), depths, (context, peer)));
            }
        }
        let ports = domains.iter().enumerate().zip(buffers.credits.remote_keys()).map(|((rail, domain), key)| {
            let words_key = words.as_ref().map_or(0, |words| words.regions[rail].remote_key);
            domain.port(key, words_key)
        });
        let hello = Hello {
            per_context: signals.per_context,
            signal_depth: depths.receive,
            credits: buffers.credits.address(0),
            words: words.as_ref().map_or(0, |words| words.memory.address()),
            words_in_gpu: words.as_ref().is_some_and(|words| is_in_gpu(&words.memory)),
            ports: ports.collect(),
            ends: lines.iter().map(Line::end).collect(),
        };
        let rails = domains.iter().map(|_| Rail::default()).collect();
        self.links =
            Some(Links { lines, busy: Vec::new(), in_error: Vec::new(), completions, words, buffers, rails, domains });
        Ok(hello.to_key(self.rank, self.ranks))
    }

    fn connect_signals(&mut self, keys: &[Key]) -> Result<(), NetError> {
        let what = "connecting before signals are registered";
        let Some(links) = &mut self.links else {
            return Err(NetError::Local { what, reason: "there are no queue pairs".to_owned() });
        };
        let count = links.lines.len();
        let hellos = keys.iter().zip(0..).map(|(key, rank)| Hello::from_key(rank, self.ranks, count, key));
        let hellos = hellos.collect::<Result<Vec<_>, _>>()?;
        for line in &mut links.lines {
            let rank = line.peer;
            let Some(hello) = hellos.get(rank as usize) else {
                return Err(NetError::Key { rank, reason: "there is none".to_owned() });
            };
            let own = &self.devices[line.context as usize % self.devices.len()];
            if let Some(port) = hello.ports.get(hello.rail(line.context))
                && port.link != own.port.link
            {
                let reason = format!("its port is on {}, this rank's {} on {}", port.link, own.name(), own.port.link);
                return Err(NetError::Key { rank, reason });
            }
            let own = line.context as usize * self.ranks as usize + self.rank as usize;
            line.connect(hello, own, self.by_nic, &links.buffers)?;
        }
        let peer = |hello: &Hello| Peer { signals: hello.per_context, ports: hello.ports.len() };
        self.windows.set_peers(hellos.iter().map(peer).collect());
        Ok(())
    }

    fn register(&mut self, window: &LocalWindow) -> Result<Key, NetError> {
        let Some(links) = &self.links else {
            let (what, reason) = ("registering memory", "signals come first".to_owned());
            return Err(NetError::Local { what, reason });
        };
        let read_back = self.config.always_read_back || is_in_gpu(&window.memory);
        if read_back && self.flushes.is_empty() {
            self.flushes = links.domains.iter().map(Flush::new).collect::<Result<_, _>>()?;
        }
        // Words of a window are raised from every context: by one NIC only if there is one.
        let nic = window.nic && links.words.is_some() && links.domains.len() == 1;
        self.windows.register(&links.domains, window, nic)
    }

    fn connect(&mut self, window: u32, keys: &[Key]) -> Result<(), NetError> {
        self.windows.connect(window, keys)
    }

    fn deregister(&mut self, window: u32) -> bool {
        self.windows.close(window)
    }

    fn post(&mut self, requests: &[Request]) -> usize {
        let mut taken = 0;
        for request in requests {
            let index = u64::from(request.context) * u64::from(self.ranks) + u64::from(request.peer);
            let line = self.links.as_mut().filter(|_| request.peer < self.ranks);
            let Some((line, links)) = line.and_then(|links| {
                let index = usize::try_from(index).ok()?;
                (index < links.lines.len()).then_some((index, links))
            }) else {
                let outcome =
                    Err(NetError::Failed { context: "a request without a connection", peer: request.peer, status: 0 });
                self.events.push(Event::Completion { id: request.id, outcome });
                taken += 1;
                continue;
            };
            if !links.lines[line].has_room(&self.config) {
                break;
            }
            links.lines[line].take(*request);
            links.list(line);
            taken += 1;
        }
        self.work();
        taken
    }

    fn poll(&mut self, events: &mut Vec<Event>) {
        if let Some(links) = &mut self.links {
            let polled = links.sent(&mut self.ended).and_then(|()| links.received(&mut self.events));
            // Why a queue pair is in error was told where things are posted, before its buffers were given back; perhaps since
            // that was asked.
            let asked_again = if links.in_error.is_empty() { Ok(()) } else { links.sent(&mut self.ended) };
            for (index, error) in links.in_error.drain(..) {
                if let Some(line) = links.lines.get_mut(index) {
                    line.seen_in_error(error);
                }
            }
            let polled = polled.and(asked_again);
            if let Err(error) = polled {
                self.fail_all(&error);
            }
        }
        self.book();
        self.work();
        events.append(&mut self.events);
    }

    fn make_visible(&mut self) -> Result<(), NetError> {
        let Some(links) = &mut self.links else { return Ok(()) };
        // All at once; then each is waited for, also if another one failed.
        let mut outcome = Ok(());
        let mut begun = Vec::with_capacity(self.flushes.len());
        for (index, (rail, flush)) in links.rails.iter_mut().zip(&mut self.flushes).enumerate() {
            let place = self.windows.behind_pcie(self.config.always_read_back, index).filter(|_| rail.has_written);
            if let Some(place) = place {
                match flush.begin(place) {
                    Ok(()) => begun.push((rail, flush)),
                    Err(error) => outcome = Err(error),
                }
            }
        }
        for (rail, flush) in begun {
            match flush.end(self.rank) {
                Ok(()) => rail.has_written = false,
                Err(error) => outcome = Err(error),
            }
        }
        outcome
    }

    fn describe(&self) -> String {
        let ports: Vec<String> = self.devices.iter().map(|device| device.name().to_string()).collect();
        let by = match (&self.links, &self.refusal) {
            (Some(Links { words: Some(_), .. }), _) => "signals raised by the NIC".to_owned(),
            (_, Some(reason)) => format!("signals raised by the proxy ({reason})"),
            (_, None) => "signals raised by the proxy".to_owned(),
        };
        format!("verbs over {}, {by}", ports.join(", "))
    }

    fn carries_notices(&self) -> bool {
        true
    }

    fn is_quiet(&self) -> bool {
        self.events.is_empty() && self.links.as_ref().is_none_or(|links| links.lines.iter().all(Line::is_quiet))
    }
}
