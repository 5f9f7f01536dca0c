// SPDX-License-Identifier: MIT OR Apache-2.0
//! Copies between windows that this process can reach.
//!
//! A key names a region in a table of this process, or memory of another process that is mapped here. A rank that
//! connects a key keeps the region, and its memory, alive from then on. So a request needs no lookup and no lock when
//! bytes move, and memory is never freed while a late request writes to it.
//!
//! If the CPU reaches all memory, `post` carries each request out completely: it copies the bytes, then adds to the
//! receiver's signal word with release. Otherwise the device's [copier](gin_gpu::copier::Copier) copies, and the rest
//! of a request follows, in the order of posting to its peer, once its copy is done. A small value instead goes to the
//! receiver's [mailbox], if a kernel drains it. So signals are strong, and a completed put has arrived.

mod late;

use self::late::Later;
use super::{
    Capabilities, Endpoint, Event, Fetch, Key, KeyError, LocalSignals, LocalWindow, NetError, Network, Raises, Request,
};
use gin_abi::{RemoteSignal, SignalTarget, Transfer, WindowOffset};
use gin_device::exec::watch::{self, Event as Watched};
use gin_device::internal::mailbox::{self, Entry, Sender, Value};
use gin_device::internal::signal_words::raise;
use gin_device::sys::{Global, GlobalWord};
use gin_gpu::copier::Copier;
use gin_gpu::copy::copy_shared;
use gin_gpu::registry::{KEY_BYTES, Missing, Registry};
use gin_gpu::share;
use gin_gpu::wire::{decode, encode};
use gin_gpu::{Device, GpuError, Memory, MemoryKind, MemorySlice};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// The maximum number of bytes of one request.
pub const MAX_MESSAGE: u64 = 1 << 20;

/// The maximum number of bytes that one call of `post` copies, so that the proxy returns to its other work. The request
/// that crosses the limit is still carried out.
const POST_BYTES: u64 = 4 << 20;

/// The bytes of a mailbox.
const MAILBOX_BYTES: u64 = mailbox::pinned_words::<Global>() * 8;

/// Memory of a rank that other ranks reach.
#[derive(Debug)]
struct SharedRegion {
    memory: MemorySlice,
    /// The address in the rank's own process.
    home: u64,
    /// The offset of the rank's mailbox, if the memory consists of signal words and has one behind them.
    mailbox: Option<u64>,
    /// The signal words of the window. `None` if the memory itself consists of signal words.
    plane: Option<Arc<Memory>>,
    per_context: u64,
    gate: Gate,
}

impl SharedRegion {
    /// Uses the region until the result is dropped; `None` if the region is closed. Its gate counts users.
    fn enter(self: &Arc<Self>) -> Option<Use> {
        self.gate.enter().then(|| Use(self.clone()))
    }

    /// Returns the key for other ranks.
    fn key(self: &Arc<Self>) -> Key {
        let mut key = REGIONS.publish(self);
        if let Gate::Shared(words) = &self.gate {
            let plane = self.plane.as_ref().map(share::offer).unwrap_or_default();
            let (memory, range) = (share::offer(self.memory.memory()), (self.memory.offset(), self.memory.bytes()));
            let of_signals = (self.per_context, self.mailbox);
            key.0.extend(encode(&(of_signals, self.home, memory.0, range, plane.0, share::offer(words).0)));
        }
        key
    }

    /// Returns the region of a key of `rank`. Maps a region of another process so that `device` reaches it, which may
    /// wait for that process.
    fn fetch(rank: u32, key: &Key, device: &Arc<dyn Device>) -> Result<Arc<Self>, NetError> {
        Self::with_memory(rank, key, |key| Ok(share::take(rank, key, device, |_| Ok(None))?))
    }

    /// Does the same without a wait, if all of the region is mapped already.
    fn find(rank: u32, key: &Key) -> Result<Arc<Self>, NetError> {
        Self::with_memory(rank, key, |key| Ok(share::find(rank, key)?))
    }

    fn with_memory(
        rank: u32,
        key: &Key,
        take: impl Fn(&[u8]) -> Result<Arc<Memory>, NetError>,
    ) -> Result<Arc<Self>, NetError> {
        let refuse = |missing: Missing| KeyError { rank, reason: missing.to_string() };
        match REGIONS.look(&key.0) {
            Ok(region) => return Ok(region),
            Err(Missing::Elsewhere) if key.0.len() > KEY_BYTES => {}
            Err(missing) => return Err(refuse(missing).into()),
        }
        let garbled = || refuse(Missing::Garbled);
        type Parts<'a> = ((u64, Option<u64>), u64, &'a [u8], (u64, u64), &'a [u8], &'a [u8]);
        let parts = decode::<Parts<'_>>(&key.0[KEY_BYTES..]).ok_or_else(garbled)?;
        let ((per_context, mailbox), home, memory, (offset, bytes), plane, gate) = parts;
        let end = offset.checked_add(bytes).ok_or_else(garbled)?;
        let memory = take(memory)?.slice(offset..end).map_err(|_| garbled())?;
        let plane = if plane.is_empty() { None } else { Some(take(plane)?) };
        let gate = take(gate)?;
        let fits = |start: u64| start.is_multiple_of(8) && start.saturating_add(MAILBOX_BYTES) <= bytes;
        if gate.bytes() < Gate::BYTES
            || plane.as_ref().is_some_and(|plane| plane.bytes() < bytes)
            || !mailbox.is_none_or(fits)
        {
            return Err(garbled().into());
        }
        Ok(Arc::new(Self { memory, home, mailbox, plane, per_context, gate: Gate::Shared(gate) }))
    }
}

/// The state of a region: open or closed, and its number of users.
#[derive(Debug)]
enum Gate {
    /// For users in this process.
    Own { open: AtomicU64, users: AtomicU64 },
    /// The same two words in memory that other processes map, too.
    Shared(Arc<Memory>),
}

impl Gate {
    /// The bytes of the two words.
    const BYTES: u64 = 16;

    /// Makes an open state. It is in memory that other processes map if the region's memory is in a file.
    fn new(memory: &Memory) -> Result<Self, GpuError> {
        if memory.file().is_none() {
            return Ok(Self::Own { open: AtomicU64::new(1), users: AtomicU64::new(0) });
        }
        let words = Memory::shared(memory.device(), MemoryKind::Pinned, Self::BYTES)?;
        words.write(0, &[1u64, 0])?;
        Ok(Self::Shared(words))
    }

    fn words(&self) -> (&AtomicU64, &AtomicU64) {
        match self {
            Self::Own { open, users } => (open, users),
            // Safety: two aligned words of pinned memory, which the CPU reaches and `self` keeps alive. All accesses
            // are atomic.
            Self::Shared(memory) => unsafe {
                let word = |at: u64| AtomicU64::from_ptr(std::ptr::with_exposed_provenance_mut(at as usize));
                (word(memory.address()), word(memory.address() + 8))
            },
        }
    }

    /// Enters the region if it is open. The caller calls `leave` afterwards.
    fn enter(&self) -> bool {
        let (open, users) = self.words();
        // Both sides store first and load then, so at least one of them sees the other.
        users.fetch_add(1, Ordering::SeqCst);
        let entered = open.load(Ordering::SeqCst) != 0;
        if !entered {
            self.leave();
        }
        entered
    }

    fn leave(&self) {
        self.words().1.fetch_sub(1, Ordering::SeqCst);
    }

    /// Closes the region. Returns whether it has no users any more.
    fn close(&self) -> bool {
        let (open, users) = self.words();
        open.store(0, Ordering::SeqCst);
        users.load(Ordering::SeqCst) == 0
    }
}

/// A region of this rank. A drop closes it.
#[derive(Debug)]
struct OwnRegion(Arc<SharedRegion>);

impl OwnRegion {
    /// Makes a region of memory of `rank`, whose signal words, if it has some, are as `signals` says. Returns its key,
    /// too.
    fn publish(
        rank: u32,
        memory: MemorySlice,
        plane: Option<Arc<Memory>>,
        signals: Option<&LocalSignals>,
    ) -> Result<(Self, Key), NetError> {
        let unusable = |error: GpuError| KeyError { rank, reason: error.to_string() };
        let gate = Gate::new(memory.memory()).map_err(unusable)?;
        let (home, mailbox) = (memory.address(), signals.and_then(|signals| signals.mailbox));
        let per_context = signals.map_or(0, |signals| signals.per_context.into());
        let region = Arc::new(SharedRegion { memory, home, mailbox, plane, per_context, gate });
        let key = region.key();
        Ok((Self(region), key))
    }
}

impl Drop for OwnRegion {
    fn drop(&mut self) {
        self.0.gate.close();
    }
}

/// A region in use.
#[derive(Debug)]
struct Use(Arc<SharedRegion>);

impl Drop for Use {
    fn drop(&mut self) {
        self.0.gate.leave();
    }
}

static REGIONS: Registry<SharedRegion> = Registry::new();

/// The endpoint of one rank.
#[derive(Debug, Default)]
pub struct PeerNetwork {
    rank: u32,
    windows: BTreeMap<u32, PeerWindow>,
    signals: Option<OwnRegion>,
    all_signals: Vec<Arc<SharedRegion>>,
    done: Vec<Event>,
    /// The contexts and peers of requests that failed.
    broken: BTreeSet<(u32, u32)>,
    /// Small values go to mailboxes that kernels drain.
    mailbox: bool,
    /// The requests whose copies a copier carries out; `None` if the CPU copies.
    later: Option<Later>,
}

#[derive(Debug)]
struct PeerWindow {
    own: OwnRegion,
    /// The regions by world rank; empty until connected.
    all: Vec<Arc<SharedRegion>>,
}

impl PeerNetwork {
    /// Makes the endpoint of `endpoint.rank`.
    pub fn new(endpoint: &Endpoint) -> Self {
        Self { rank: endpoint.rank, mailbox: endpoint.gpu.is_some(), ..Self::default() }
    }

    /// Makes the endpoint of `endpoint.rank`. It takes the CPU not to reach device memory: `copier` copies, and small
    /// values go to mailboxes. For tests on virtual devices.
    #[doc(hidden)]
    pub fn with_copier(endpoint: &Endpoint, copier: Box<dyn Copier>) -> Self {
        Self { rank: endpoint.rank, mailbox: true, later: Some(Later::new(copier)), ..Self::default() }
    }

    /// Returns window `window` of rank `rank` and the address of the range's first byte, if the range is in the window.
    fn range(&self, window: u32, rank: u32, offset: u64, bytes: u64) -> Result<(&Arc<SharedRegion>, u64), NetError> {
        let region = self.windows.get(&window).and_then(|entry| entry.all.get(rank as usize));
        let region = region.ok_or(NetError::UnknownWindow { window, rank })?;
        NetError::check_range(window, rank, offset, bytes, region.memory.bytes())?;
        Ok((region, region.memory.address() + offset))
    }

    /// Returns the word of a signal, and the region that keeps it alive.
    fn word(&self, request: &Request, signal: &RemoteSignal) -> Result<(&Arc<SharedRegion>, GlobalWord), NetError> {
        let unknown = NetError::UnknownSignal { rank: request.peer, signal: signal.target };
        let (region, address) = match signal.target {
            SignalTarget::Id(id) => {
                let Some(region) = self.all_signals.get(request.peer as usize) else { return Err(unknown) };
                let index = u64::from(request.context) * region.per_context + u64::from(id);
                let bytes = region.mailbox.unwrap_or(region.memory.bytes());
                if u64::from(id) >= region.per_context || (index + 1) * 8 > bytes {
                    return Err(unknown);
                }
                (region, region.memory.address() + index * 8)
            }
            SignalTarget::Address { window, offset } => {
                let (region, _) = self.range(window, request.peer, offset, 8)?;
                let Some(plane) = region.plane.as_ref().filter(|_| offset.is_multiple_of(8)) else {
                    return Err(unknown);
                };
                (region, plane.address() + offset)
            }
        };
        // Safety: in range of memory that the region keeps alive, and aligned. All accesses are atomic.
        Ok((region, unsafe { GlobalWord::new(address) }))
    }

    /// Reports a request of this context and peer as complete. After a failure, later strong requests fail.
    fn complete(&mut self, id: u64, order: (u32, u32), outcome: Result<(), NetError>) {
        if outcome.is_err() {
            self.broken.insert(order);
        }
        self.done.push(Event::Completion { id, outcome });
    }

    /// Returns the plan of a request, with the regions that it uses. A request that fails here has no effect.
    ///
    /// # Errors
    /// [`NetError::UnknownSignal`], [`NetError::UnknownWindow`], [`NetError::OutOfRange`].
    fn resolve(&self, request: &Request) -> Result<Plan, NetError> {
        let peer = request.peer;
        let raise = match &request.signal {
            None => None,
            Some(signal) => {
                let (region, word) = self.word(request, signal)?;
                let unknown = NetError::UnknownSignal { rank: peer, signal: signal.target };
                Some((region.enter().ok_or(unknown)?, word, signal.amount))
            }
        };
        let part = |at: WindowOffset, rank, bytes| {
            let (region, address) = self.range(at.window, rank, at.offset, bytes)?;
            let gone = NetError::UnknownWindow { window: at.window, rank };
            Ok::<_, NetError>(At { region: region.enter().ok_or(gone)?, address })
        };
        let work = match request.transfer {
            Transfer::Nothing => Work::Nothing,
            Transfer::Put { source, destination, bytes } => {
                Work::Copy { to: part(destination, peer, bytes)?, from: part(source, self.rank, bytes)?, bytes }
            }
            Transfer::Get { source, destination, bytes } => {
                Work::Copy { to: part(destination, self.rank, bytes)?, from: part(source, peer, bytes)?, bytes }
            }
            Transfer::PutValue { value, width_log2, destination } => {
                let to = part(destination, peer, 1 << width_log2)?;
                let home = to.region.0.home + destination.offset;
                Work::Store { to, home, value, width_log2 }
            }
        };
        Ok(Plan { work, raise })
    }
}

/// An address in a region in use.
#[derive(Debug)]
struct At {
    region: Use,
    address: u64,
}

impl At {
    /// Returns the memory, and the address in it, as copiers take it.
    fn place(&self) -> (&Memory, u64) {
        (self.region.0.memory.memory(), self.address)
    }

    fn is_device(&self) -> bool {
        self.place().0.kind() == MemoryKind::Device
    }
}

/// The work of a request before its signal is raised.
#[derive(Debug)]
enum Work {
    Nothing,
    Copy {
        to: At,
        from: At,
        bytes: u64,
    },
    /// `home` is the address in the receiver's process.
    Store {
        to: At,
        home: u64,
        value: u64,
        width_log2: u32,
    },
}

/// A request, resolved to addresses.
#[derive(Debug)]
struct Plan {
    work: Work,
    /// The region of the signal's word, the word, and the amount to add.
    raise: Option<(Use, GlobalWord, u64)>,
}

impl Plan {
    /// Carries out the request by the CPU, and raises its signal.
    fn carry_out(&self) {
        // Safety: the ranges were checked, and the plan keeps their memory alive. A store's source is a local value.
        match &self.work {
            Work::Nothing => {}
            Work::Copy { to, from, bytes } => {
                watch::event(Watched::Copy { to: to.address, from: from.address, bytes: *bytes });
                unsafe { copy_shared(to.address, from.address, *bytes) }
            }
            Work::Store { to, value, width_log2, .. } => {
                watch::event(Watched::Store { to: to.address, value: *value, bytes: 1 << width_log2 });
                let value = value.to_le_bytes();
                unsafe { copy_shared(to.address, value.as_ptr().expose_provenance() as u64, 1 << width_log2) };
            }
        }
        self.raise();
    }

    fn raise(&self) {
        if let Some((_, word, amount)) = &self.raise {
            raise(*word, *amount);
        }
    }
}

impl PeerNetwork {
    /// Returns the senders' end of the mailbox of `peer`, if it has one.
    fn mailbox(&self, peer: u32) -> Option<Sender<Global>> {
        let region = self.all_signals.get(peer as usize)?;
        // Safety: in range of memory that the region keeps alive, and aligned. All accesses are atomic.
        let pinned = unsafe { GlobalWord::new(region.memory.address() + region.mailbox?) };
        Some(Sender { pinned })
    }

    /// Returns the entry by which the receiver's kernels do the work of a request; `None` if they cannot.
    fn entry(&self, request: &Request, plan: &Plan) -> Option<Entry> {
        let signal = match &request.signal {
            None => None,
            Some(RemoteSignal { target: SignalTarget::Id(id), amount, .. }) => {
                let per_context = self.all_signals.get(request.peer as usize)?.per_context;
                Some((u64::from(request.context) * per_context + u64::from(*id), *amount))
            }
            Some(_) => return None,
        };
        let value = match plan.work {
            Work::Nothing => None,
            Work::Store { home, value, width_log2, .. } => Some(Value { address: home, value, width_log2 }),
            Work::Copy { .. } => return None,
        };
        Some(Entry { value, signal })
    }
}

impl Network for PeerNetwork {
    fn capabilities(&self) -> Capabilities {
        Capabilities {
            name: "peer",
            strong_signals: true,
            va_signals: true,
            max_message: MAX_MESSAGE,
            completion_is_arrival: true,
            raises: Raises::Sender,
            needs_make_visible: false,
            mailbox: self.mailbox,
        }
    }

    fn register_signals(&mut self, signals: &LocalSignals) -> Result<Key, NetError> {
        let device = signals.memory.device();
        let unusable = |error: GpuError| KeyError { rank: self.rank, reason: error.to_string() };
        if self.later.is_none() {
            self.later = device.copier().map_err(unusable)?.map(Later::new);
        }
        let (own, key) = OwnRegion::publish(self.rank, signals.memory.whole(), None, Some(signals))?;
        self.signals = Some(own);
        Ok(key)
    }

    fn connect_signals(&mut self, keys: &[Key]) -> Result<(), NetError> {
        let Some(own) = &self.signals else { return Ok(()) };
        let device = own.0.memory.memory().device();
        // No proxy runs yet, so the thread that initialises the communicator may wait.
        let found = keys.iter().zip(0..).map(|(key, rank)| SharedRegion::fetch(rank, key, device));
        self.all_signals = found.collect::<Result<_, _>>()?;
        Ok(())
    }

    fn register(&mut self, window: &LocalWindow) -> Result<Key, NetError> {
        let (own, key) = OwnRegion::publish(self.rank, window.memory.clone(), window.plane.clone(), None)?;
        self.windows.insert(window.id, PeerWindow { own, all: Vec::new() });
        Ok(key)
    }

    fn fetch(&self) -> Option<Fetch> {
        Some(|rank, key, device| Ok(SharedRegion::fetch(rank, key, device)?))
    }

    fn connect(&mut self, window: u32, keys: &[Key]) -> Result<(), NetError> {
        let Some(entry) = self.windows.get_mut(&window) else {
            return Err(NetError::UnknownWindow { window, rank: self.rank });
        };
        let found = keys.iter().zip(0..).map(|(key, rank)| SharedRegion::find(rank, key));
        entry.all = found.collect::<Result<_, _>>()?;
        Ok(())
    }

    fn deregister(&mut self, window: u32) -> bool {
        let closed = self.windows.get(&window).is_none_or(|entry| entry.own.0.gate.close());
        if closed {
            self.windows.remove(&window);
        }
        closed
    }

    fn post(&mut self, requests: &[Request]) -> usize {
        let mut bytes = 0;
        for (taken, request) in requests.iter().enumerate() {
            if bytes >= POST_BYTES || self.later.as_ref().is_some_and(Later::is_full) {
                return taken;
            }
            bytes += request.transfer.bytes();
            if self.later.is_some() {
                self.begin(request);
                continue;
            }
            let order = (request.context, request.peer);
            let outcome = if request.is_strong() && self.broken.contains(&order) {
                Err(NetError::behind(request.peer))
            } else {
                self.resolve(request).map(|plan| plan.carry_out())
            };
            self.complete(request.id, order, outcome);
        }
        requests.len()
    }

    fn poll(&mut self, events: &mut Vec<Event>) {
        self.follow();
        events.append(&mut self.done);
    }
}
