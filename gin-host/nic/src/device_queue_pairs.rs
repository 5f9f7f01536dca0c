// SPDX-License-Identifier: MIT OR Apache-2.0
//! Device-driven queue pairs: for each context one to every rank that kernels reach, and the words beside them.
//!
//! Everything that kernels access is in memory of their device. Rings, doorbell records and completions are in one slab
//! for each context. Tags and the table of [`QueuePairData`] are in another allocation. A queue pair cannot be
//! connected to itself, so the queue pair of a rank to itself is connected to one without a send queue.

use super::address::Address;
use super::device::RegisteredSlice;
use super::doorbells::{Bells, DoorbellRelease, DoorbellSource, Doorbells};
use super::drain::{self, DrainError, IdleQueue};
use super::error::{DeviceQueueError, NicError, NicPeer};
use super::hca::Access;
use super::layout::{Layout, QueueSpec, Role};
use super::open::Nic;
use super::queues::{DeviceQueues, Expired, QueueInfo};
use super::relay::{DoorbellRelay, RelayLine};
use bytemuck::Zeroable;
use gin_abi::gdaki::{BUSY_RANKS, QueuePairData, busy_marks};
use gin_abi::mlx5::be::Be32;
use gin_abi::mlx5::cqe;
use gin_abi::mlx5::wqe::{QueueNumber, SLOT_BYTES};
use gin_gpu::{Device, GpuError, Memory, MemoryKind, MemorySlice};
use std::sync::Arc;

/// The distance of words that different threads write, so that they are on different cache lines.
const LINE: u64 = 128;
/// log2 of the maximum number of entries from one that requests a completion to the next.
const MAX_INTERVAL_LOG2: u32 = 4;

/// The number and the length of queue pairs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Shape {
    /// The number of contexts.
    pub contexts: u32,
    /// The number of ranks, including the own one.
    pub ranks: u32,
    /// The own rank.
    pub rank: u32,
    /// The distance of connected ranks, at least 1. A rank has queue pairs to itself and to all ranks whose number
    /// differs from its own by a multiple of this.
    pub step: u32,
    /// The slots of each send queue: a power of two, with log2 from
    /// [`MIN_DEPTH_LOG2`](gin_abi::gdaki::MIN_DEPTH_LOG2) to [`MAX_DEPTH_LOG2`](gin_abi::gdaki::MAX_DEPTH_LOG2).
    pub depth: u32,
    /// The scope to which kernels release before they ring.
    pub release: DoorbellRelease,
}

impl Shape {
    /// Returns the ranks to which each context has a queue pair.
    pub fn peers(&self) -> impl Iterator<Item = u32> + use<> {
        (self.rank % self.step..self.ranks).step_by(self.step as usize)
    }

    /// Returns the number of these ranks.
    pub fn count(&self) -> u32 {
        self.ranks.saturating_sub(self.rank % self.step).div_ceil(self.step)
    }

    /// Returns the index of a rank among these ranks; `None` for another rank.
    pub fn place(&self, peer: u32) -> Option<u32> {
        (peer < self.ranks && peer % self.step == self.rank % self.step).then_some(peer / self.step)
    }

    /// Returns the bytes that the queue pairs of all contexts and their words take.
    ///
    /// # Errors
    /// [`NicError::NotPowerOfTwo`], [`NicError::Limit`]: a depth that no queue pair has.
    pub fn bytes(&self) -> Result<u64, NicError> {
        let slabs = u64::from(self.contexts) * Layout::of(&self.specs())?.allocation();
        Ok(Places::of(self).end + home_bytes() + slabs)
    }

    /// Returns the queue pairs of one context: one for each of these ranks, then the responder.
    fn specs(&self) -> Vec<QueueSpec> {
        let depth = self.depth;
        let sender = QueueSpec { role: Role::Sender, depth, completions: depth, collapsed: false };
        let mut specs = vec![sender; self.count() as usize];
        specs.push(QueueSpec { role: Role::Responder, ..sender });
        specs
    }

    fn queues(&self) -> u64 {
        u64::from(self.contexts) * u64::from(self.count())
    }

    /// Returns the number of entries of the table that kernels read.
    fn entries(&self) -> u64 {
        u64::from(self.contexts) * u64::from(self.ranks)
    }

    /// Returns the index of the table entry of a rank.
    fn entry(&self, context: u32, peer: u32) -> u64 {
        u64::from(context) * u64::from(self.ranks) + u64::from(peer)
    }

    /// Returns the index of the queue pair to a rank among all queue pairs.
    fn index(&self, context: u32, peer: u32) -> u64 {
        u64::from(context) * u64::from(self.count()) + u64::from(peer / self.step)
    }
}

/// Returns the bytes of the allocation that receives the old values of atomics, which is a page that it must begin.
fn home_bytes() -> u64 {
    rustix::param::page_size() as u64 + 8
}

/// The layout of the words in their allocation.
#[derive(Debug)]
struct Places {
    tags: u64,
    busy: u64,
    /// The bytes of one context.
    busy_bytes: u64,
    end: u64,
}

impl Places {
    /// Lays the words out, the table first.
    fn of(shape: &Shape) -> Self {
        let table = shape.entries() * size_of::<QueuePairData>() as u64;
        let ring_words = shape.queues() * u64::from(shape.depth) * 8;
        let busy_bytes = (u64::from(shape.ranks.div_ceil(BUSY_RANKS)) * 8).next_multiple_of(LINE);
        let tags = table.next_multiple_of(LINE);
        let busy = (tags + ring_words).next_multiple_of(LINE);
        Self { tags, busy, busy_bytes, end: busy + u64::from(shape.contexts) * busy_bytes }
    }
}

/// The data of a queue pair that kernels need beside its rings.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Target {
    /// The key of the peer's signal words; 0 if it has none.
    pub signal_key: u32,
    /// The address of the context's first signal word in the region of that key.
    pub signals: u64,
    /// The maximum number of bytes of one entry.
    pub max_bytes: u32,
}

/// A queue pair: its context, its peer, the set that it belongs to, and its data.
type Pair<'a> = (u32, u32, &'a DeviceQueues, &'a QueueInfo);

/// The device-driven queue pairs of all contexts.
#[derive(Debug)]
pub struct DeviceQueuePairs {
    /// The sets by context. Each has a queue pair for each of the shape's peers, then the responder.
    sets: Vec<DeviceQueues>,
    /// The memory that receives the old values of atomics.
    sink: RegisteredSlice,
    words: Arc<Memory>,
    // Dropped after the queue pairs: mapped pages keep the NIC's pages.
    bells: Bells,
    /// By context.
    counters: Vec<Option<MemorySlice>>,
    places: Places,
    shape: Shape,
}

impl DeviceQueuePairs {
    /// Creates the queue pairs and moves them to the state init. `counters`: the counter words of each context, in
    /// memory of the device. `doorbells`: the requested engine; [`doorbell_source`](Self::doorbell_source) returns the
    /// actual one.
    ///
    /// # Errors
    /// [`DeviceQueueError`]. Then no object remains.
    pub fn new(
        nic: &Arc<Nic>,
        device: &Arc<dyn Device>,
        shape: Shape,
        counters: Vec<Option<MemorySlice>>,
        doorbells: Doorbells,
        expired: Expired<'_>,
    ) -> Result<Self, DeviceQueueError> {
        let Shape { contexts, release, .. } = shape;
        release.check(nic, nic.owner.hca.ring_memory())?;
        let specs = shape.specs();
        let places = Places::of(&shape);
        let words = Memory::new(device, MemoryKind::Device, places.end)?;
        // It has address 0 in its region, so it must begin a page.
        let page = rustix::param::page_size() as u64;
        let home = Memory::new(device, nic.owner.hca.ring_memory(), home_bytes())?;
        let first = home.address().next_multiple_of(page) - home.address();
        let sink = RegisteredSlice::new(nic, home.slice(first..first + 8)?, Access::RINGS)?;
        let set = |_| DeviceQueues::new(nic, device, &specs, expired);
        let sets = (0..contexts).map(set).collect::<Result<Vec<_>, _>>()?;
        let bells = Bells::new(nic, device, (sets.iter().flat_map(|set| &set.pages), shape.queues()), doorbells)?;
        Ok(Self { sets, sink, words, bells, counters, places, shape })
    }

    /// Returns the bytes of all memory that these queue pairs and their words have. [`Shape::bytes`] returns the same
    /// number before they exist.
    pub fn allocated_bytes(&self) -> u64 {
        let slabs = self.sets.iter().map(|set| set.slab.memory().bytes());
        self.words.bytes() + self.sink.slice.memory().bytes() + slabs.sum::<u64>()
    }

    /// Returns the address of the queue pair of a context to rank `peer`, for that rank; `None` if there is no such
    /// queue pair.
    pub fn address(&self, context: u32, peer: u32) -> Option<Address> {
        self.sets.get(context as usize)?.address(self.shape.place(peer)? as usize)
    }

    /// Connects the queue pair of a context to that of a peer. Ignores the address if the peer is the own rank.
    ///
    /// # Errors
    /// [`NicError`] with the peer.
    ///
    /// # Panics
    /// If there is no such context, or no queue pair to the peer.
    pub fn connect(
        &self,
        context: u32,
        peer: &NicPeer,
        address: &Address,
        expired: Expired<'_>,
    ) -> Result<(), NicError> {
        let set = &self.sets[context as usize];
        let place = |rank| self.shape.place(rank).expect("a rank that there is a queue pair to") as usize;
        let (own, responder) = (place(self.shape.rank), self.shape.count() as usize);
        if peer.rank != self.shape.rank {
            return set.connect(place(peer.rank), peer, address, expired);
        }
        let ends = set.address(own).zip(set.address(responder));
        let (sender, answerer) = ends.expect("each set has one of each");
        set.connect(responder, peer, &sender, expired)?;
        set.connect(own, peer, &answerer, expired)
    }

    /// Fills the tables that kernels read. `comm`: the address of the copy of the communicator's handle. `target`
    /// returns the data of a context at a connected peer.
    ///
    /// # Errors
    /// An error of the device.
    pub fn fill(&self, comm: u64, target: impl Fn(u32, u32) -> Target) -> Result<(), GpuError> {
        // An error of a post without a connection has these numbers, too.
        let all = (0..self.shape.contexts).flat_map(|context| (0..self.shape.ranks).map(move |peer| (context, peer)));
        let mut table: Vec<_> =
            all.map(|(context, peer)| QueuePairData { comm, context, peer, ..QueuePairData::unconnected() }).collect();
        for pair @ (context, peer, ..) in self.pairs() {
            let data = self.data(pair, target(context, peer));
            table[self.shape.entry(context, peer) as usize] = QueuePairData { comm, ..data };
        }
        self.words.write(0, &table)
    }

    /// Returns all queue pairs but the responders.
    fn pairs(&self) -> impl Iterator<Item = Pair<'_>> {
        (0..).zip(&self.sets).flat_map(|(context, set)| {
            self.shape.peers().zip(set.infos()).map(move |(peer, info)| (context, peer, set, info))
        })
    }

    /// Reads the table that kernels write.
    fn read_table(&self) -> Result<Vec<QueuePairData>, GpuError> {
        let mut table = vec![QueuePairData::zeroed(); self.shape.entries() as usize];
        self.words.read(0, &mut table)?;
        Ok(table)
    }

    fn data(&self, (context, peer, set, info): Pair<'_>, target: Target) -> QueuePairData {
        let (words, slab) = (self.words.address(), set.slab.address());
        let place = info.place.expect("a sender has rings");
        let counters = self.counters.get(context as usize).and_then(Option::as_ref);
        QueuePairData {
            ring: slab + place.ring,
            tags: words + self.tags(context, peer),
            completions: slab + place.completions,
            record: slab + place.record,
            doorbell: self.bells.address(self.shape.index(context, peer), info.doorbell),
            number: bytemuck::cast(QueueNumber::new(info.queue)),
            depth_log2: info.log_depth,
            interval_log2: MAX_INTERVAL_LOG2.min(info.log_depth - 1) as u16,
            doorbell_scope: self.shape.release as u16,
            max_bytes: target.max_bytes,
            signal_key: Be32::new(target.signal_key).memory(),
            sink_key: Be32::new(self.sink.local_key).memory(),
            signals: target.signals,
            busy: self.busy(context) + u64::from(peer / BUSY_RANKS) * 8,
            marks: busy_marks(peer),
            counters: counters.map_or(0, MemorySlice::address),
            counter_count: counters.map_or(0, |counters| counters.bytes() / 8),
            context,
            peer,
            ..QueuePairData::zeroed()
        }
    }

    /// Returns the offset of the tags of a queue pair, one for each slot.
    fn tags(&self, context: u32, peer: u32) -> u64 {
        self.places.tags + self.shape.index(context, peer) * u64::from(self.shape.depth) * 8
    }

    /// Returns the engine that rings the doorbells.
    pub fn doorbell_source(&self) -> DoorbellSource {
        self.bells.doorbell_source()
    }

    /// Returns the address of the table, for [`CommHandle::queue_pairs`](gin_abi::CommHandle::queue_pairs).
    pub fn table(&self) -> u64 {
        self.words.address()
    }

    /// Returns the address of a context's words that mark peers with unfinished entries.
    pub fn busy(&self, context: u32) -> u64 {
        self.words.address() + self.places.busy + u64::from(context) * self.places.busy_bytes
    }

    /// Returns the relay that rings doorbells, if kernels do not ring them. A thread must step it until the queue pairs
    /// are destroyed, and no longer.
    pub fn relay(&self) -> Option<DoorbellRelay> {
        let Bells::Relayed(words, _) = &self.bells else { return None };
        let lines = self.pairs().map(|(context, peer, _, info)| {
            let from = words.address() + 8 * self.shape.index(context, peer);
            RelayLine { from, to: info.doorbell }
        });
        // Safety: the words and the pages exist as long as `self`. Only kernels of one device store to them, and the
        // host while no kernel runs.
        self.sets.first().map(|set| unsafe { DoorbellRelay::new(&set.nic, lines) })
    }

    /// Returns the progress of the queue pairs that requests were posted to: context, peer, number of claimed entries,
    /// and number of entries known to be complete. Kernels may run meanwhile; each number was right at some moment.
    ///
    /// # Errors
    /// An error of the device.
    pub fn progress(&self) -> Result<Vec<(u32, u32, u64, u64)>, GpuError> {
        let table = self.read_table()?;
        let all = self.pairs().map(|(context, peer, ..)| {
            let data = &table[self.shape.entry(context, peer) as usize];
            (context, peer, data.producer_index(), data.completion_index.min(data.producer_index()))
        });
        Ok(all.filter(|&(_, _, claimed, _)| claimed > 0).collect())
    }

    /// Waits until all posted entries are complete; no kernel may run. Returns the number of incomplete entries once
    /// `expired` returns true.
    ///
    /// # Errors
    /// [`DrainError`].
    pub fn drain(&self, expired: Expired<'_>) -> Result<u64, DrainError> {
        drain::drain(self.idle()?, expired)
    }

    /// Returns the queue pairs with entries that are not known to be complete.
    fn idle(&self) -> Result<Vec<IdleQueue>, GpuError> {
        let table = self.read_table()?;
        let all = self.pairs().map(|pair| {
            let (context, peer, ..) = pair;
            let data = table[self.shape.entry(context, peer) as usize];
            (data.producer_index() != data.completion_index).then(|| self.idle_queue(pair, data)).transpose()
        });
        all.filter_map(Result::transpose).collect()
    }

    fn idle_queue(&self, (context, peer, set, info): Pair<'_>, data: QueuePairData) -> Result<IdleQueue, GpuError> {
        let (place, slab) = (info.place.expect("a sender has rings"), &set.slab);
        let depth = u64::from(self.shape.depth);
        let part = |memory: &Arc<Memory>, start: u64, bytes: u64| memory.slice(start..start + bytes);
        let of_slab = |offset: u64, bytes| part(slab.memory(), slab.offset() + offset, bytes);
        let bytes = size_of::<QueuePairData>() as u64;
        Ok(IdleQueue {
            context,
            peer,
            data,
            home: part(&self.words, self.shape.entry(context, peer) * bytes, bytes)?,
            ring: of_slab(place.ring, depth * SLOT_BYTES)?,
            completions: of_slab(place.completions, depth * cqe::BYTES)?,
            record: of_slab(place.record, 8)?,
            doorbell: self.bells.host(self.shape.index(context, peer), info.doorbell),
            tags: part(&self.words, self.tags(context, peer), depth * 8)?,
            nic: set.nic.clone(),
            counters: self.counters.get(context as usize).cloned().flatten(),
            closed: false,
        })
    }

    /// Returns the queue pair of a context to a peer, in any state.
    #[doc(hidden)]
    pub fn one(&self, context: u32, peer: u32) -> IdleQueue {
        let pair = self.pairs().find(|pair| (pair.0, pair.1) == (context, peer)).unwrap();
        self.idle_queue(pair, self.read_table().unwrap()[self.shape.entry(context, peer) as usize]).unwrap()
    }
}
