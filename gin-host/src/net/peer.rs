// SPDX-License-Identifier: MIT OR Apache-2.0
//! Copies between windows that this process can reach.
//!
//! A key names a region in a table of this process; whoever connects it holds the region, and with it the memory, from
//! then on. So nothing is looked up, locked or shared when bytes move, and memory that a late request still writes to is
//! never freed under it.
//!
//! Where the CPU reaches all memory, every request is carried out whole when it is posted: the bytes are copied, then the
//! sender adds to the receiver's signal word with release. Where it does not, the device's
//! [copier](crate::gpu::copier::Copier) copies, and the rest follows, in the order of posting, once its copy is done. So
//! signals are strong, and a completed put has arrived.

mod late;

use self::late::Later;
use super::registry::Registry;
use super::{Capabilities, Endpoint, Event, Key, LocalSignals, LocalWindow, NetError, Network, Raises, Request};
use crate::copy::copy_shared;
use crate::gpu::{GpuError, Memory, MemorySlice};
use gin_abi::{RemoteSignal, SignalTarget, Transfer};
use gin_device::signal_words::raise;
use gin_device::sys::GlobalWord;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

/// Most bytes of one request.
pub const MAX_MESSAGE: u64 = 1 << 20;

/// Most bytes that one call of `post` copies, so that the proxy gets to its other work; the request that crosses it is
/// still done.
const POST_BYTES: u64 = 4 << 20;

/// Memory of a rank that others reach.
#[derive(Debug)]
struct Region {
    memory: MemorySlice,
    /// Signal words: those of the window, or the memory itself is such words (`plane` is `None` then).
    plane: Option<Arc<Memory>>,
    per_context: u64,
    open: AtomicBool,
    users: AtomicUsize,
}

impl Region {
    /// Uses the region until the result is dropped, unless it is closed; `close` waits for it.
    fn enter(self: &Arc<Self>) -> Option<Use> {
        // As in `with`.
        self.users.fetch_add(1, Ordering::SeqCst);
        let used = Use(self.clone());
        self.open.load(Ordering::SeqCst).then_some(used)
    }

    /// Runs `work` unless the region is closed; `close` waits for it.
    fn with<T>(&self, work: impl FnOnce() -> T) -> Option<T> {
        // Both sides store first and look then, so at least one of them sees the other.
        self.users.fetch_add(1, Ordering::SeqCst);
        let result = self.open.load(Ordering::SeqCst).then(work);
        self.users.fetch_sub(1, Ordering::SeqCst);
        result
    }

    fn close(&self) -> bool {
        self.open.store(false, Ordering::SeqCst);
        self.users.load(Ordering::SeqCst) == 0
    }
}

/// A region in use.
#[derive(Debug)]
struct Use(Arc<Region>);

impl Drop for Use {
    fn drop(&mut self) {
        self.0.users.fetch_sub(1, Ordering::SeqCst);
    }
}

static REGIONS: Registry<Region> = Registry::new();

/// The endpoint of one rank.
#[derive(Debug)]
pub struct Peer {
    rank: u32,
    windows: Vec<Option<Window>>,
    signals: Option<Arc<Region>>,
    all_signals: Vec<Arc<Region>>,
    done: Vec<Event>,
    /// Contexts and peers of requests that failed.
    broken: Vec<(u32, u32)>,
    /// What follows copies, where the CPU does not copy.
    later: Option<Later>,
}

#[derive(Debug)]
struct Window {
    own: Arc<Region>,
    /// By world rank; empty until connected.
    all: Vec<Arc<Region>>,
}

impl Peer {
    /// The endpoint of `endpoint.rank`.
    pub fn new(endpoint: &Endpoint) -> Self {
        Self {
            rank: endpoint.rank,
            windows: Vec::new(),
            signals: None,
            all_signals: Vec::new(),
            done: Vec::new(),
            broken: Vec::new(),
            later: None,
        }
    }

    /// Window `window` of rank `rank`, if the range is in it; and the address of its first byte.
    fn range(&self, window: u32, rank: u32, offset: u64, bytes: u64) -> Result<(&Arc<Region>, u64), NetError> {
        let all = self.windows.get(window as usize).and_then(Option::as_ref).map(|window| &window.all);
        let Some(region) = all.and_then(|all| all.get(rank as usize)) else {
            return Err(NetError::UnknownWindow { window, rank });
        };
        let (end, length) = (offset.saturating_add(bytes), region.memory.bytes());
        if end > length {
            return Err(NetError::OutOfRange { window, rank, end, length });
        }
        Ok((region, region.memory.address() + offset))
    }

    /// The word of a signal, and the region that keeps it alive.
    fn word(&self, request: &Request, signal: &RemoteSignal) -> Result<(&Arc<Region>, GlobalWord), NetError> {
        let unknown = NetError::UnknownSignal { rank: request.peer, signal: signal.target };
        let (region, address) = match signal.target {
            SignalTarget::Id(id) => {
                let Some(region) = self.all_signals.get(request.peer as usize) else { return Err(unknown) };
                let index = u64::from(request.context) * region.per_context + u64::from(id);
                if u64::from(id) >= region.per_context || (index + 1) * 8 > region.memory.bytes() {
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
        // Safety: in range of memory that the region keeps alive, aligned, and used as atomic words only.
        Ok((region, unsafe { GlobalWord::new(address) }))
    }

    /// Copies between two ranges.
    fn transfer(&self, from: (u32, u32, u64), to: (u32, u32, u64), bytes: u64) -> Result<(), NetError> {
        let (source, source_address) = self.range(from.0, from.1, from.2, bytes)?;
        let (destination, destination_address) = self.range(to.0, to.1, to.2, bytes)?;
        let copied = source.with(|| {
            // Safety: both ranges are in memory that their regions keep alive.
            destination.with(|| unsafe { copy_shared(destination_address, source_address, bytes) })
        });
        match copied {
            Some(Some(())) => Ok(()),
            Some(None) => Err(NetError::UnknownWindow { window: to.0, rank: to.1 }),
            None => Err(NetError::UnknownWindow { window: from.0, rank: from.1 }),
        }
    }

    fn carry_out(&self, request: &Request) -> Result<(), NetError> {
        // Found before anything is moved: a request that fails leaves no trace.
        let word = request.signal.as_ref().map(|signal| self.word(request, signal)).transpose()?;
        match request.transfer {
            Transfer::Nothing => {}
            Transfer::Put { source_window, source_offset, destination_window, destination_offset, bytes } => self
                .transfer(
                    (source_window, self.rank, source_offset),
                    (destination_window, request.peer, destination_offset),
                    bytes,
                )?,
            Transfer::Get { source_window, source_offset, destination_window, destination_offset, bytes } => self
                .transfer(
                    (source_window, request.peer, source_offset),
                    (destination_window, self.rank, destination_offset),
                    bytes,
                )?,
            Transfer::PutValue { value, width_log2, destination_window, destination_offset } => {
                let (value, bytes) = (value.to_le_bytes(), 1 << width_log2);
                let (region, address) = self.range(destination_window, request.peer, destination_offset, bytes)?;
                // Safety: the range is in memory that the region keeps alive; the source is a local value.
                let copied = region.with(|| unsafe { copy_shared(address, value.as_ptr().addr() as u64, bytes) });
                if copied.is_none() {
                    return Err(NetError::UnknownWindow { window: destination_window, rank: request.peer });
                }
            }
        }
        if let (Some((region, word)), Some(signal)) = (word, &request.signal) {
            let raised = region.with(|| raise(word, signal.amount));
            if raised.is_none() {
                return Err(NetError::UnknownSignal { rank: request.peer, signal: signal.target });
            }
        }
        Ok(())
    }
}

fn bytes_of(transfer: &Transfer) -> u64 {
    match *transfer {
        Transfer::Put { bytes, .. } | Transfer::Get { bytes, .. } => bytes,
        Transfer::PutValue { width_log2, .. } => 1 << width_log2,
        Transfer::Nothing => 0,
    }
}

impl Network for Peer {
    fn capabilities(&self) -> Capabilities {
        Capabilities {
            name: "peer",
            strong_signals: true,
            va_signals: true,
            max_message: MAX_MESSAGE,
            completion_is_arrival: true,
            raises: Raises::Sender,
            needs_make_visible: false,
        }
    }

    fn register_signals(&mut self, signals: &LocalSignals) -> Result<Key, NetError> {
        let device = signals.memory.device();
        let unusable = |error: GpuError| NetError::Key { rank: self.rank, reason: error.to_string() };
        self.later = device.copier().map_err(unusable)?.map(Later::new);
        let region = Arc::new(Region {
            memory: signals.memory.whole(),
            plane: None,
            per_context: u64::from(signals.per_context),
            open: AtomicBool::new(true),
            users: AtomicUsize::new(0),
        });
        let key = REGIONS.publish(&region);
        self.signals = Some(region);
        Ok(key)
    }

    fn connect_signals(&mut self, keys: &[Key]) -> Result<(), NetError> {
        self.all_signals = keys.iter().zip(0..).map(|(key, rank)| REGIONS.find(rank, key)).collect::<Result<_, _>>()?;
        Ok(())
    }

    fn register(&mut self, window: &LocalWindow) -> Result<Key, NetError> {
        let own = Arc::new(Region {
            memory: window.memory.clone(),
            plane: window.plane.clone(),
            per_context: 0,
            open: AtomicBool::new(true),
            users: AtomicUsize::new(0),
        });
        let (key, index) = (REGIONS.publish(&own), window.id as usize);
        if self.windows.len() <= index {
            self.windows.resize_with(index + 1, || None);
        }
        self.windows[index] = Some(Window { own, all: Vec::new() });
        Ok(key)
    }

    fn connect(&mut self, window: u32, keys: &[Key]) -> Result<(), NetError> {
        let all = keys.iter().zip(0..).map(|(key, rank)| REGIONS.find(rank, key)).collect::<Result<_, _>>()?;
        match self.windows.get_mut(window as usize).and_then(Option::as_mut) {
            Some(entry) => entry.all = all,
            None => return Err(NetError::UnknownWindow { window, rank: self.rank }),
        }
        Ok(())
    }

    fn deregister(&mut self, window: u32) -> bool {
        let Some(entry) = self.windows.get_mut(window as usize) else { return true };
        let closed = entry.as_ref().is_none_or(|entry| entry.own.close());
        if closed {
            *entry = None;
        }
        closed
    }

    fn post(&mut self, requests: &[Request]) -> usize {
        let mut bytes = 0;
        for (taken, request) in requests.iter().enumerate() {
            if bytes >= POST_BYTES || self.later.as_ref().is_some_and(Later::is_full) {
                return taken;
            }
            bytes += bytes_of(&request.transfer);
            if self.later.is_some() {
                self.begin(request);
                continue;
            }
            let line = (request.context, request.peer);
            let strong = request.signal.is_some_and(|signal| signal.strong);
            let outcome = if strong && self.broken.contains(&line) {
                Err(NetError::behind(request.peer))
            } else {
                self.carry_out(request)
            };
            if outcome.is_err() && !self.broken.contains(&line) {
                self.broken.push(line);
            }
            self.done.push(Event::Completion { id: request.id, outcome });
        }
        requests.len()
    }

    fn poll(&mut self, events: &mut Vec<Event>) {
        self.follow();
        events.append(&mut self.done);
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        for window in self.windows.iter().flatten() {
            window.own.close();
        }
        if let Some(signals) = &self.signals {
            signals.close();
        }
    }
}
