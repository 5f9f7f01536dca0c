// SPDX-License-Identifier: MIT OR Apache-2.0
//! Any RDMA NIC, through libibverbs, which is opened at run time.
//!
//! | module | holds |
//! | --- | --- |
//! | `device` | devices: what there are, ports, addresses |
//! | `config` | what can be chosen |
//! | `objects` | what is made with a device: queue pairs, completion queues, registered memory |
//! | `line` | one connection |
//! | `ledger` | what is in a send queue, and what becomes of it |
//! | `credits` | how many signals may be on their way |
//! | `windows` | the table of windows |
//! | `key`, `message` | what ranks tell each other |
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
//! # When something fails
//! The first request that fails breaks its connection: whatever comes behind it on the same context and peer fails too.
//! A peer whose NIC does not answer for [`lost_after`](VerbsConfig::lost_after) is lost. A rank that posts nothing to a
//! peer does not learn that it is gone.
//!
//! # Limits
//! - Memory of a GPU must be registered with the NIC, as a DMA-BUF file or by its address; it does not go through host
//!   memory instead.
//! - What a NIC wrote into a GPU is made visible by reading there over a loop-back connection. **This was never run with a
//!   GPU, nor any of this with a NIC that is hardware**: it runs on Soft-RoCE.

mod config;
mod credits;
mod device;
mod ffi;
mod flush;
mod key;
mod ledger;
mod line;
mod message;
mod objects;
mod status;
mod windows;

pub use config::VerbsConfig;
pub use device::{Device, DeviceInfo, Gid, GidKind, NoDevice, PortInfo, probe};
#[doc(hidden)]
pub use ffi::{FOREIGN_FIELDS, FOREIGN_NUMBERS, FOREIGN_SIZES};

use self::flush::Flush;
use self::key::Hello;
use self::ledger::{Ended, Outcome};
use self::line::{Buffers, Line, Tools, slot_bytes};
use self::objects::{Buffer, Chain, Completions, Depths, Domain, Queue, Reach};
use self::windows::Windows;
use super::{
    Capabilities, Endpoint, Event, Key, LocalSignals, LocalWindow, NetError, Network, NetworkFactory, Raises, Request,
    SignalArrival,
};
use std::hash::{BuildHasher, Hasher, RandomState};
use std::sync::Arc;

/// Most completions that are taken from a queue at a time.
const TAKE: usize = 32;

/// Times that a queue is asked in one poll, so that the proxy gets to its other work.
const ROUNDS: usize = 4;

/// The endpoint of one rank.
#[derive(Debug)]
pub struct Verbs {
    device: Arc<Device>,
    rank: u32,
    ranks: u32,
    // Before what its entries use.
    links: Option<Links>,
    flush: Option<Flush>,
    windows: Windows,
    events: Vec<Event>,
    chain: Chain,
    ended: Ended,
}

/// The connections, and what they need. Dropped in this order.
#[derive(Debug)]
struct Links {
    /// By context, then by rank.
    lines: Vec<Line>,
    /// Indices of those that have something to do.
    busy: Vec<usize>,
    /// By context.
    completions: Vec<(Completions, Completions)>,
    buffers: Buffers,
    domain: Arc<Domain>,
}

impl Verbs {
    /// The endpoint of `endpoint.rank` on a port.
    pub fn new(device: &Arc<Device>, endpoint: &Endpoint) -> Self {
        let Endpoint { rank, ranks, .. } = *endpoint;
        Self {
            device: device.clone(),
            rank,
            ranks,
            links: None,
            flush: None,
            windows: Windows::new(rank),
            events: Vec::new(),
            chain: Chain::default(),
            ended: Ended::default(),
        }
    }

    /// Makes the endpoints of all ranks of this process: rank `n` uses the `n`th of these devices, from the beginning again
    /// after the last.
    ///
    /// # Panics
    /// If there are no devices.
    pub fn factory(devices: &[Arc<Device>]) -> NetworkFactory {
        assert!(!devices.is_empty(), "no RDMA devices were given");
        let devices = devices.to_vec();
        Arc::new(move |endpoint| {
            let device = &devices[endpoint.rank as usize % devices.len()];
            Box::new(Self::new(device, endpoint))
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

    /// As many entries as asked for, or as a device has room for.
    fn depths(&self) -> Result<Depths, NetError> {
        let (info, config) = (&self.device.info, &self.device.config);
        let most = info.max_entries.min(info.max_completions / self.ranks.max(1));
        let depths = Depths { send: config.send_depth.min(most), receive: config.signal_depth.min(most) };
        if depths.send < 4 || depths.receive < 2 {
            let (what, entries) = ("making completion queues", info.max_completions);
            let reason = format!("{} has {entries} entries, too few for {} ranks", info.name, self.ranks);
            return Err(NetError::Local { what, reason });
        }
        Ok(depths)
    }

    /// Posts what connections have to post, and books what has ended.
    fn work(&mut self) {
        let Some(links) = &mut self.links else { return };
        let config = &self.device.config;
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

impl Links {
    fn list(&mut self, index: usize) {
        if let Some(line) = self.lines.get_mut(index)
            && !line.listed
        {
            line.listed = true;
            self.busy.push(index);
        }
    }

    /// Takes completions of what was posted.
    fn sent(&mut self, ended: &mut Ended) -> Result<(), NetError> {
        let mut room = [ffi::WorkCompletion::default(); TAKE];
        for (sends, _) in &self.completions {
            for _ in 0..ROUNDS {
                let taken = sends.poll(&mut room)?;
                for completion in taken {
                    if let Some(line) = self.lines.get_mut((completion.wr_id >> 32) as usize) {
                        line.complete(completion.wr_id as u32, status::outcome(line.peer, completion), ended);
                    }
                }
                if taken.len() < TAKE {
                    break;
                }
            }
        }
        Ok(())
    }

    /// Takes signals that have arrived.
    fn received(&mut self, events: &mut Vec<Event>) -> Result<(), NetError> {
        let mut room = [ffi::WorkCompletion::default(); TAKE];
        for context in 0..self.completions.len() {
            for _ in 0..ROUNDS {
                let taken = self.completions[context].1.poll(&mut room)?;
                for completion in taken {
                    let index = (completion.wr_id >> 32) as usize;
                    let Some(line) = self.lines.get_mut(index) else { continue };
                    match status::outcome(line.peer, completion) {
                        Outcome::Done => {}
                        Outcome::Failed(error) | Outcome::Flushed(error) => {
                            line.seen_in_error(error);
                            continue;
                        }
                    }
                    let arrived = line.arrive(completion.wr_id as u32, completion.byte_len, &self.buffers);
                    match arrived {
                        Some((target, amount)) => {
                            let (context, from) = (line.context, line.peer);
                            events.push(Event::Signal(SignalArrival { context, from, target, amount }));
                        }
                        None => {
                            let (context, peer) = ("a message that is no signal", line.peer);
                            line.fail(NetError::Failed { context, peer, status: 0 });
                        }
                    }
                    if line.is_busy() {
                        self.list(index);
                    }
                }
                if taken.len() < TAKE {
                    break;
                }
            }
        }
        Ok(())
    }
}

impl Network for Verbs {
    fn capabilities(&self) -> Capabilities {
        Capabilities {
            name: "verbs",
            strong_signals: true,
            va_signals: true,
            max_message: self.device.config.max_message.min(self.device.port.max_message.max(8)),
            completion_is_arrival: true,
            raises: Raises::Receiver,
            needs_make_visible: true,
        }
    }

    fn register_signals(&mut self, signals: &LocalSignals) -> Result<Key, NetError> {
        let depths = self.depths()?;
        let domain = Domain::new(&self.device)?;
        let (contexts, ranks) = (signals.contexts as usize, self.ranks as usize);
        let count = contexts * ranks;
        let mut buffers = Buffers {
            credits: Buffer::new(&domain, 8 * count, Reach::Peers)?,
            slots: Buffer::new(&domain, slot_bytes(depths) * count, Reach::Own)?,
        };
        for line in 0..count {
            buffers.credits.write(8 * line, &credits::word(0).to_le_bytes());
        }
        let queue = |entries: u32| Completions::new(&domain, entries.saturating_mul(self.ranks));
        let completions = (0..contexts).map(|_| Ok((queue(depths.send)?, queue(depths.receive)?)));
        let completions = completions.collect::<Result<Vec<_>, NetError>>()?;
        // A late packet of a queue pair that had the same number is told by it.
        let random = RandomState::new();
        let mut lines = Vec::with_capacity(count);
        for (context, queues) in (0..signals.contexts).zip(&completions) {
            for peer in 0..self.ranks {
                let index = lines.len();
                let mut first_packet = random.build_hasher();
                first_packet.write_usize(index);
                let first_packet = first_packet.finish() as u32 & 0xff_ffff;
                let queue = Queue::new(&domain, (&queues.0, &queues.1), depths, first_packet)?;
                lines.push(Line::new(queue, index, depths, (context, peer)));
            }
        }
        let hello = Hello {
            per_context: signals.per_context,
            signal_depth: depths.receive,
            link: self.device.port.link,
            mtu: self.device.mtu,
            reads: self.device.info.reads_answered.min(self.device.config.reads).max(1),
            lid: self.device.port.lid,
            gid: self.device.gid.bytes,
            credits: buffers.credits.address(0),
            credits_key: buffers.credits.region().remote_key,
            ends: lines.iter().map(Line::end).collect(),
        };
        self.links = Some(Links { lines, busy: Vec::new(), completions, buffers, domain });
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
            if hello.link != self.device.port.link {
                let reason = format!("its port is on {}, this rank's on {}", hello.link, self.device.port.link);
                return Err(NetError::Key { rank, reason });
            }
            let own = line.context as usize * self.ranks as usize + self.rank as usize;
            line.connect(hello, own, &links.buffers)?;
        }
        self.windows.set_signals(hellos.iter().map(|hello| hello.per_context).collect());
        Ok(())
    }

    fn register(&mut self, window: &LocalWindow) -> Result<Key, NetError> {
        let Some(links) = &self.links else {
            let (what, reason) = ("registering memory", "signals come first".to_owned());
            return Err(NetError::Local { what, reason });
        };
        let read_back = self.device.config.always_read_back || objects::is_in_gpu(&window.memory);
        if read_back && self.flush.is_none() {
            self.flush = Some(Flush::new(&links.domain)?);
        }
        self.windows.register(&links.domain, window)
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
            if !links.lines[line].has_room(&self.device.config) {
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
            // What was posted first: a queue pair in error has told why there.
            let polled = links.sent(&mut self.ended).and_then(|()| links.received(&mut self.events));
            if let Err(error) = polled {
                self.fail_all(&error);
            }
        }
        self.book();
        self.work();
        events.append(&mut self.events);
    }

    fn make_visible(&mut self) -> Result<(), NetError> {
        match &mut self.flush {
            None => Ok(()),
            Some(flush) => flush.read(self.windows.behind_pcie(self.device.config.always_read_back), self.rank),
        }
    }

    fn is_quiet(&self) -> bool {
        self.events.is_empty() && self.links.as_ref().is_none_or(|links| links.lines.iter().all(Line::is_quiet))
    }
}
