// SPDX-License-Identifier: MIT OR Apache-2.0
//! The detector of data races in a seeded world.
//!
//! Each device thread and each service is an actor with a vector clock; all hosts together are one. Two accesses are
//! ordered if the actor of the later one knows the epoch of the earlier one. What passes on knowledge:
//!
//! | from | to |
//! | --- | --- |
//! | a release fence, then a store or raise of a word, or one that releases | a load of that word, then an acquire fence, or one that acquires |
//! | threads that arrive at a barrier of the block or of lanes; no vote, shuffle or match | the same threads when they leave |
//! | the hosts | grids launched from then on, services started from then on |
//! | a grid that has ended | the hosts, and the next grid of its stream; if that is dependent, its threads that wait |
//! | services | a host that waited for something |
//!
//! The last two rows and the single clock of hosts pass on more than they must, so that no order which the hosts make
//! among themselves is taken for a race.
//!
//! # Puts and signals
//! A machine often orders more than the contract promises: a proxy carries out requests one after the other, and a
//! raise by loads and stores releases all that its thread has stored. So the write of a put's destination has an actor
//! of its own, its *arrival*: for each [`Way`] and thread that posts, one slot, whose epoch is that of the post. Nobody
//! knows an arrival by the order of the machine. A signal covers arrivals:
//!
//! | signal | arrivals |
//! | --- | --- |
//! | strong | of the puts of its way that its poster knows, by the epochs of their posts |
//! | weak, of a put | of that put. Puts with a weak signal to one range have slots of their own |
//! | weak, alone | none |
//!
//! A wait for arrival (`quiet`) teaches its thread the arrivals of the puts that it knew when the wait began.
//!
//! A word that an engine raises for the network is matched with the oldest post of a signal for this word with this
//! amount that was not raised yet. Nobody can tell such raises apart, so any of them may come first.
//!
//! The bytes of a put by loads and stores are stored when it returns. So its thread knows the arrival, and passes it on
//! by barriers, fences and words, but by no signal ([`Known::stored`]).

mod accesses;
mod clock;
mod puts;
mod shadow;

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::hash::{BuildHasherDefault, Hash, Hasher};
use std::panic::Location;
use std::rc::Rc;
use std::sync::Arc;

use gin_abi::SignalTarget;
use gin_device::exec::watch::{Event, Signals, Way as Posting};

use self::clock::{Actor as Clocked, CHUNK, Clock, Known, NOBODY, Stamp};
use self::shadow::{Kind, Shadow};
use crate::grid::GridRun;
use crate::race::{Race, RaceMemory, RaceOperation};

/// The owner of the slots of one or more chunks.
enum Owner {
    Hosts,
    Service(Arc<str>),
    Block {
        rank: u32,
        block: u64,
        /// The launches that used the slots, each with its first epoch.
        launches: Vec<(u32, u32, Arc<str>)>,
    },
    /// The arrivals of puts by the threads that have the slots of this chunk.
    Arrivals {
        posters: u32,
    },
}

struct Range {
    owner: Owner,
    first: u32,
    slots: u32,
    /// The epoch from which on the slots are free.
    epoch: u32,
}

/// A place in the source, equal if it is the same static.
#[derive(Clone, Copy)]
struct Site(&'static Location<'static>);

impl PartialEq for Site {
    fn eq(&self, other: &Self) -> bool {
        std::ptr::eq(self.0, other.0)
    }
}

impl Eq for Site {}

impl Hash for Site {
    fn hash<H: Hasher>(&self, state: &mut H) {
        std::ptr::hash(self.0, state);
    }
}

/// A hasher of addresses, which many accesses need.
#[derive(Default)]
struct AddressHasher(u64);

impl Hasher for AddressHasher {
    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|byte| self.write_u64((*byte).into()));
    }

    fn write_u64(&mut self, value: u64) {
        // The multiplier of splitmix64.
        self.0 = (self.0 ^ value).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29);
    }

    fn finish(&self) -> u64 {
        self.0
    }
}

/// The thread that posted a request, and the place.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct Poster {
    slot: u32,
    epoch: u32,
    site: Site,
    get: bool,
    /// The end of the poster's own range: behind it the bytes are those of other requests.
    end: u64,
    /// The number of the request, in the order of posting.
    number: u64,
    /// The slot of the put's arrival; [`NOBODY`] if its communicator is unknown.
    arrival: u32,
}

/// The way of puts and signals: a strong signal covers the earlier puts of its way.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct Way {
    communicator: u64,
    rank: u32,
    context: u32,
    peer: u32,
    /// By loads and stores.
    near: bool,
}

/// The puts with a weak signal to one range: their way, the window and offset, or 0 and the address, and the length.
type Weak = (Way, u32, u64, u64);

/// A signal at a rank: communicator, rank, context (0 for a signal at an address), kind of its name, name, amount.
type SignalKey = (u64, u32, u32, (u32, u64), u64);

/// A chunk of posters' slots, and the chunk of the slots of their arrivals.
type Chunks = Vec<(u32, u32)>;

/// A put to a place: its own start or value, its length, and the request.
type Put = (u64, u64, Rc<Posted>);

/// A signal that is on its way.
struct Flying {
    number: u64,
    /// The knowledge of its poster.
    known: Clock,
    covers: Covers,
}

/// The puts that a signal covers.
#[derive(Clone, Copy)]
enum Covers {
    /// A put with a weak signal.
    Put(Weak),
    /// The earlier puts of the ways.
    Ways(Way, Option<Way>),
    Nothing,
}

/// Returns the name of a signal as a part of a key.
fn named(target: SignalTarget) -> (u32, u64) {
    match target {
        SignalTarget::Id(id) => (u32::MAX, id.into()),
        SignalTarget::Address { window, offset } => (window, offset),
    }
}

/// A request on its way.
struct Posted {
    poster: Poster,
    /// The knowledge of the poster, for a request whose bytes identify it.
    stamp: Option<Rc<Stamp>>,
}

/// An operation and its place.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct Place {
    operation: RaceOperation,
    site: Site,
    /// The rank, if a host made the access.
    host: u32,
    poster: Option<Poster>,
    /// The slot of the service that carries out the poster's request.
    by: u32,
}

/// A request, as the party that carries it out knows it: its own range or value, and the other range.
type Request = (u64, Option<There>);

/// A place in a window: number of the window, rank, offset.
type There = (u32, u32, u64);

struct Region {
    address: u64,
    bytes: u64,
    memory: RaceMemory,
    /// Number of the resident block that owns the shared memory.
    block: Option<u32>,
    /// Number of the communicator of a window; 0 if it is unknown.
    communicator: u64,
    shadow: Shadow,
}

/// Knowledge of a grid.
#[derive(Default)]
struct GridClock {
    start: Known,
    end: Known,
}

/// Knowledge of a stream.
#[derive(Default)]
struct StreamClock {
    /// The end of its last grid that has ended.
    last: Known,
    /// The end of the grid before that.
    earlier: Known,
    /// The last launch that has begun.
    launch: u32,
    /// The slots that this launch uses: a dependent one uses others than the launch before it.
    odd: bool,
}

#[derive(Default)]
pub(crate) struct Races {
    /// By task.
    actors: Vec<Option<Clocked>>,
    hosts: Option<Clocked>,
    ranges: Vec<Range>,
    /// The range of each chunk of slots.
    chunks: Vec<u32>,
    /// The ranges of blocks, by device, stream, block, and oddness of the launch.
    blocks: HashMap<(u32, u32, u64, bool), u32>,
    grids: HashMap<(u32, u32), GridClock>,
    streams: HashMap<(u32, u32), StreamClock>,
    /// The clocks of threads that have arrived at a barrier without waiting, by block and number of the barrier.
    arrivals: HashMap<(u32, u32), Known>,
    /// By the address of a rank's table of contexts: the number of the communicator.
    communicators: BTreeMap<u64, u64>,
    /// Sorted by address; each with the number of its communicator.
    signals: Vec<(Signals, u64)>,
    ways: HashMap<Way, Chunks>,
    weak: HashMap<Weak, Chunks>,
    /// The signals that are posted to the network and not raised, in the order of posting.
    flying: HashMap<SignalKey, VecDeque<Flying>>,
    /// By slot: the last signal of this poster.
    last_signal: HashMap<u32, (SignalKey, u64)>,
    /// All puts that the network has carried out.
    arrived: Clock,
    /// Those of them that hosts know, because they have waited. Kernels that they launch do not.
    seen_by_hosts: Clock,
    words: HashMap<u64, Rc<Stamp>, BuildHasherDefault<AddressHasher>>,
    /// Sorted by address.
    regions: Vec<Region>,
    places: Vec<Place>,
    place_numbers: HashMap<Place, u32>,
    /// The newest places with a poster, each at its number modulo the capacity.
    posted_places: Vec<(u32, Place)>,
    /// Number of places with a poster so far.
    posted_count: u32,
    /// The place that was numbered last for each operation.
    recent: [Option<(Place, u32)>; 16],
    /// The rank of each task that is a host.
    host_ranks: Vec<Option<u32>>,
    posts: HashMap<Request, Rc<Posted>>,
    /// By the start of their destination.
    puts: BTreeMap<There, Vec<Put>>,
    /// The places from which gets read.
    sources_of_gets: HashSet<There>,
    /// Number of posts so far.
    posted: u64,
    /// Bytes outside of windows that hold bytes of a request on their way, by address: the request, and the address of
    /// the bytes in the poster's own part, or the value.
    on_the_way: HashMap<u64, (Rc<Posted>, u64)>,
    /// A race was reported; nothing more is looked at.
    over: bool,
}

/// Number of posts, and of stages, after which all are forgotten. They serve to name lines only.
const POSTS: usize = 1 << 16;
/// Number of starts of puts at which the put of a part is looked for.
const STARTS: usize = 64;
/// Number of puts from different places to one start that are remembered.
const PUTS: usize = 64;
/// Marks the number of a place with a poster.
const POSTED: u32 = 1 << 31;
/// Number of launches whose names are kept for each stream.
const LAUNCHES: usize = 64;

impl Races {
    pub(crate) fn new() -> Self {
        let mut races = Races::default();
        let slots = races.add_range(Owner::Hosts, 1);
        races.hosts = Some(Clocked::new(slots, 1, Known::default()));
        races
    }

    /// Returns the first slot of a new range.
    fn add_range(&mut self, owner: Owner, slots: u32) -> u32 {
        let (first, number) = (self.chunks.len() as u32 * CHUNK, self.ranges.len() as u32);
        self.chunks.extend((0..slots.div_ceil(CHUNK)).map(|_| number));
        self.ranges.push(Range { owner, first, slots, epoch: 1 });
        first
    }

    fn range_of(&self, slot: u32) -> usize {
        self.chunks[(slot / CHUNK) as usize] as usize
    }

    fn put_actor(&mut self, task: u32, actor: Clocked) {
        let at = task as usize;
        if self.actors.len() <= at {
            self.actors.resize_with(at + 1, || None);
        }
        self.actors[at] = Some(actor);
    }

    /// Returns what the hosts know, and begins a new epoch of theirs.
    fn hosts_publish(&mut self) -> Known {
        self.hosts.as_mut().map(|hosts| hosts.publish().whole()).unwrap_or_default()
    }

    pub(crate) fn host_begins(&mut self, task: u32, rank: u32) {
        let at = task as usize;
        if self.host_ranks.len() <= at {
            self.host_ranks.resize(at + 1, None);
        }
        self.host_ranks[at] = Some(rank);
    }

    pub(crate) fn service_begins(&mut self, task: u32, name: &Arc<str>) {
        let slot = self.add_range(Owner::Service(name.clone()), 1);
        let clock = self.hosts_publish();
        self.put_actor(task, Clocked::new(slot, 1, clock));
    }

    pub(crate) fn grid_launched(&mut self, run: &GridRun) {
        let start = self.hosts_publish();
        self.grids.insert((run.device, run.launch), GridClock { start, end: Known::default() });
    }

    /// Notes the start of a block; `beside`: the grid before its own on the stream has not ended.
    pub(crate) fn block_begins(
        &mut self,
        run: &GridRun,
        beside: bool,
        block: u64,
        tasks: impl ExactSizeIterator<Item = u32>,
    ) {
        let threads = tasks.len() as u32;
        let stream = self.streams.entry((run.device, run.stream.0)).or_default();
        if stream.launch != run.launch {
            (stream.launch, stream.odd) = (run.launch, run.grid.dependent && !stream.odd);
        }
        // A dependent grid may not rely on the end of the grid before it, also if it began late.
        let known = if run.grid.dependent && !beside { &stream.earlier } else { &stream.last };
        let mut start = self.grids.get(&(run.device, run.launch)).map(|grid| grid.start.clone()).unwrap_or_default();
        start.join(known);
        let key = (run.device, run.stream.0, block, stream.odd);
        let range = match self.blocks.get(&key) {
            Some(range) if self.ranges[*range as usize].slots >= threads => *range,
            _ => {
                let owner = Owner::Block { rank: run.device, block, launches: Vec::new() };
                self.add_range(owner, threads);
                self.ranges.len() as u32 - 1
            }
        };
        self.blocks.insert(key, range);
        let Range { owner, first, epoch, .. } = &mut self.ranges[range as usize];
        let (first, epoch) = (*first, *epoch);
        if let Owner::Block { launches, .. } = owner {
            if launches.len() == LAUNCHES {
                launches.remove(0);
            }
            launches.push((epoch, run.launch, run.grid.name.clone()));
        }
        for (slot, task) in (first..).zip(tasks) {
            self.put_actor(task, Clocked::new(slot, epoch, start.clone()));
        }
    }

    /// Notes that a thread has waited for the grid before its own.
    pub(crate) fn predecessor_ended(&mut self, task: u32, run: &GridRun) {
        let actor = self.actors.get_mut(task as usize).and_then(Option::as_mut);
        if let (Some(actor), Some(stream)) = (actor, self.streams.get(&(run.device, run.stream.0))) {
            actor.known.join(&stream.last);
        }
    }

    /// Forgets a task. Its grid knows what it knew.
    pub(crate) fn task_ends(&mut self, task: u32, grid: Option<&GridRun>) {
        if let Some(host) = self.host_ranks.get_mut(task as usize) {
            *host = None;
        }
        let Some(actor) = self.actors.get_mut(task as usize).and_then(Option::take) else { return };
        let range = self.range_of(actor.slot);
        let range = &mut self.ranges[range];
        range.epoch = range.epoch.max(actor.epoch + 1);
        if let Some(grid) = grid.and_then(|run| self.grids.get_mut(&(run.device, run.launch))) {
            grid.end.join(&actor.known);
            grid.end.clock.raise(actor.slot, actor.epoch);
        }
    }

    pub(crate) fn block_ends(&mut self, block: u32) {
        self.regions.retain(|region| region.block != Some(block));
        self.arrivals.retain(|&(other, _), _| other != block);
    }

    pub(crate) fn grid_ends(&mut self, run: &GridRun) {
        let Some(grid) = self.grids.remove(&(run.device, run.launch)) else { return };
        if let Some(hosts) = &mut self.hosts {
            hosts.known.join(&grid.end);
        }
        let stream = self.streams.entry((run.device, run.stream.0)).or_default();
        stream.earlier = std::mem::replace(&mut stream.last, grid.end);
    }

    /// Joins the clocks of threads that meet.
    pub(crate) fn meet(&mut self, tasks: impl Iterator<Item = u32> + Clone) {
        let mut met = tasks.clone().filter_map(|task| self.actors.get(task as usize)?.as_ref());
        let Some(first) = met.next() else { return };
        let mut joined = first.known.clone();
        met.for_each(|actor| joined.join(&actor.known));
        for actor in tasks.clone().filter_map(|task| self.actors.get(task as usize)?.as_ref()) {
            joined.clock.raise(actor.slot, actor.epoch);
        }
        for task in tasks {
            if let Some(Some(actor)) = self.actors.get_mut(task as usize) {
                actor.known = joined.clone();
                actor.epoch += 1;
            }
        }
    }

    /// Keeps the clock of a thread that arrives at a barrier without waiting.
    pub(crate) fn arrive(&mut self, task: u32, barrier: (u32, u32)) {
        if let Some(Some(actor)) = self.actors.get_mut(task as usize) {
            let known = actor.publish().whole();
            self.arrivals.entry(barrier).or_default().join(&known);
        }
    }

    /// Joins the clocks of threads that meet at a barrier with the clocks of the threads that arrived there.
    pub(crate) fn meet_at(&mut self, barrier: (u32, u32), tasks: impl Iterator<Item = u32> + Clone) {
        if let Some(known) = self.arrivals.remove(&barrier) {
            for task in tasks.clone() {
                if let Some(Some(actor)) = self.actors.get_mut(task as usize) {
                    actor.known.join(&known);
                }
            }
        }
        self.meet(tasks);
    }

    /// Notes that the wait of a host has ended. It may have waited for any service.
    pub(crate) fn host_waited(&mut self, task: u32) {
        let (Some(Some(_)), Some(hosts)) = (self.host_ranks.get(task as usize), &mut self.hosts) else { return };
        for actor in self.actors.iter_mut().flatten() {
            let range = self.chunks[(actor.slot / CHUNK) as usize] as usize;
            if matches!(self.ranges[range].owner, Owner::Service(_)) {
                hosts.known.clock.join(&actor.publish().whole().clock);
            }
        }
        self.seen_by_hosts.join(&self.arrived);
    }

    /// Registers shared memory of a block.
    pub(crate) fn shared(&mut self, block: u32, memory: RaceMemory, address: u64, bytes: u64) {
        let known = self.region(address).is_some_and(|at| self.regions[at].block == Some(block));
        if !known && bytes > 0 {
            self.add_region(address, bytes, memory, Some(block), 0);
        }
    }

    fn add_region(&mut self, address: u64, bytes: u64, memory: RaceMemory, block: Option<u32>, communicator: u64) {
        self.forget(address, bytes);
        let at = self.regions.partition_point(|region| region.address < address);
        let shadow = Shadow::new(address, bytes);
        self.regions.insert(at, Region { address, bytes, memory, block, communicator, shadow });
    }

    /// Gives the window that begins at `address` a name for reports. `element` is the size of an element in bytes.
    pub(crate) fn name_window(&mut self, address: u64, name: &str, element: u64) {
        if let Some(at) = self.region(address)
            && let RaceMemory::Window { name: named, .. } = &mut self.regions[at].memory
        {
            *named = Some((name.into(), element.max(1)));
        }
    }

    fn forget(&mut self, address: u64, bytes: u64) {
        let end = address.saturating_add(bytes);
        self.regions.retain(|region| region.address >= end || region.address + region.bytes <= address);
        let outside = |words: &Signals| words.address >= end || words.address + words.stride * words.count <= address;
        self.signals.retain(|(words, _)| outside(words));
        if self.communicators.range(address..end).next().is_some() {
            self.communicators.retain(|table, _| !(address..end).contains(table));
        }
    }

    /// Returns the index of the region that contains this address.
    fn region(&self, address: u64) -> Option<usize> {
        let at = self.regions.partition_point(|region| region.address <= address).checked_sub(1)?;
        (address - self.regions[at].address < self.regions[at].bytes).then_some(at)
    }

    /// Handles an event of a task. Returns a race that it completes.
    pub(crate) fn watch(&mut self, task: u32, event: Event, site: &'static Location<'static>) -> Option<Box<Race>> {
        if self.over {
            return None;
        }
        let host = self.host_ranks.get(task as usize).copied().flatten();
        let actor = match host {
            Some(_) => self.hosts.as_mut(),
            None => self.actors.get_mut(task as usize).and_then(Option::as_mut),
        };
        let actor = actor?;
        let (site, carrier) = (Site(actor.call.unwrap_or(site)), actor.slot);
        let place = |operation, poster: Option<Poster>| {
            let by = if poster.is_some() { carrier } else { 0 };
            Place { operation, site, host: host.unwrap_or(0), poster, by }
        };
        match event {
            Event::Enter { alike } => {
                actor.calls += 1;
                actor.call = Some(site.0);
                actor.alike |= alike;
            }
            Event::Leave => {
                actor.calls = actor.calls.saturating_sub(1);
                if actor.calls == 0 {
                    (actor.call, actor.alike, actor.stores, actor.raises) = (None, false, None, None);
                }
            }
            Event::Acquire => actor.acquire(),
            Event::Release => actor.release(),
            Event::Word { address, reads, writes, continues, operand, acquire, release } => {
                let before = self.words.get(&address).cloned();
                if reads {
                    actor.reads(&before, acquire);
                }
                if writes {
                    let stamp = actor.writes(before.as_ref().filter(|_| continues), release);
                    // The arrivals of puts do not come with the raise of a signal, except of the puts that it covers.
                    let stamp = match self.covered(task, address, operand) {
                        Some(covered) => {
                            let actor = self.actors.get(task as usize).and_then(Option::as_ref);
                            actor.map(|actor| actor.raises(before.as_ref(), covered))
                        }
                        None => stamp,
                    };
                    match stamp {
                        Some(stamp) => self.words.insert(address, stamp),
                        None => self.words.remove(&address),
                    };
                }
                let (kind, operation) = match writes {
                    true => (Kind::AtomicWrite, RaceOperation::AtomicWrite),
                    false => (Kind::AtomicRead, RaceOperation::AtomicRead),
                };
                return self.access(task, (address, 8), kind, place(operation, None), None);
            }
            Event::Data { address, bytes, writes } => {
                let (kind, operation) = match (writes, actor.alike) {
                    (true, _) if actor.stores.is_some_and(|(first, end, _)| (first..end).contains(&address)) => {
                        (Kind::Write, RaceOperation::PutWrite)
                    }
                    (true, true) => (Kind::AtomicWrite, RaceOperation::Write),
                    (true, false) => (Kind::Write, RaceOperation::Write),
                    (false, _) => (Kind::Read, RaceOperation::Read),
                };
                return self.access(task, (address, bytes), kind, place(operation, None), None);
            }
            Event::Reduction { address, bytes } => {
                let place = place(RaceOperation::AtomicWrite, None);
                return self.access(task, (address, bytes), Kind::AtomicWrite, place, None);
            }
            Event::Post { own, way, transfer, signal, all_routes } => {
                let (slot, epoch, number) = (actor.slot, actor.epoch, self.posted);
                self.posted += 1;
                let stamp = actor.publish();
                let end = own.saturating_add(transfer.bytes());
                let known = self.way(way, slot, false);
                let weak = known.and_then(|way| Self::weak_put(way, transfer, signal));
                let arrival = known.map_or(NOBODY, |way| self.arrival(way, weak, slot));
                let poster = Poster { slot, epoch, site, get: false, end, number, arrival };
                if let (Some(way), Some(signal)) = (known, signal) {
                    let covers = match weak {
                        Some(put) => Covers::Put(put),
                        None if signal.strong => Covers::Ways(way, all_routes.then_some(Way { near: true, ..way })),
                        None => Covers::Nothing,
                    };
                    let context = if let SignalTarget::Id(_) = signal.target { way.context } else { 0 };
                    let key = (way.communicator, way.peer, context, named(signal.target), signal.amount);
                    let line = self.flying.entry(key).or_default();
                    if line.len() < POSTS {
                        line.push_back(Flying { number, known: stamp.whole().clock, covers });
                    }
                    self.last_signal.insert(slot, (key, number));
                } else {
                    self.last_signal.remove(&slot);
                }
                self.post(own, way.peer, transfer, poster, stamp);
            }
            Event::Refused => {
                if let Some((key, number)) = self.last_signal.remove(&actor.slot)
                    && let Some(line) = self.flying.get_mut(&key)
                {
                    line.retain(|signal| signal.number != number);
                }
            }
            Event::Quiet { done: true, .. } => {
                let arrived = std::mem::take(&mut actor.quiet);
                actor.known.clock.join(&arrived);
            }
            Event::Quiet { table, context, others, peers, done: false } => {
                let (slot, known) = (actor.slot, actor.publish().whole().clock);
                let arrived = self.arrivals_of(slot, &known, table, |way| {
                    (way.context == context) != others && (peers.0..peers.1).contains(&way.peer)
                });
                if let Some(Some(actor)) = self.actors.get_mut(task as usize) {
                    actor.quiet = arrived;
                }
            }
            Event::Stores { way, address, bytes, weak } => {
                let slot = actor.slot;
                let stores = self.way(way, slot, true).map(|way| {
                    let weak = weak.then_some((way, 0, address, bytes));
                    (address, address.saturating_add(bytes), self.arrival(way, weak, slot))
                });
                if let Some(Some(actor)) = self.actors.get_mut(task as usize) {
                    actor.stores = stores;
                }
            }
            Event::Raise { way, word, strong, put: (address, bytes) } => {
                let slot = actor.slot;
                let covers = |way: Way| match (strong, bytes) {
                    (true, _) => Covers::Ways(way, None),
                    (false, 0) => Covers::Nothing,
                    (false, _) => Covers::Put((way, 0, address, bytes)),
                };
                let raises = self.way(way, slot, true).map(|way| (word, covers(way)));
                if let Some(Some(actor)) = self.actors.get_mut(task as usize) {
                    actor.raises = raises;
                }
            }
            Event::Communicator { table, number } => drop(self.communicators.insert(table, number)),
            Event::Signals(words) => {
                let at = self.signals.partition_point(|(other, _)| other.address < words.address);
                let number = self.communicators.get(&words.table).copied().unwrap_or_default();
                self.signals.insert(at, (words, number));
            }
            Event::Copy { to, from, bytes } => return self.copy(task, to, from, bytes, place),
            Event::Store { to, value, bytes } => {
                let value = value & u64::MAX >> (64 - 8 * bytes.clamp(1, 8));
                let posted = self.posts.get(&(value, self.there(to))).cloned();
                let poster = posted.as_ref().map(|posted| posted.poster);
                if let (None, Some(posted)) = (self.region(to), posted) {
                    self.keep(to, posted, value);
                }
                let place = place(RaceOperation::PutWrite, poster);
                return self.access(task, (to, bytes), Kind::Write, place, None);
            }
            Event::Window { address, bytes, window, rank, table } if bytes > 0 => {
                let communicator = self.communicators.get(&table).copied().unwrap_or_default();
                let memory = RaceMemory::Window { window, rank, name: None };
                self.add_region(address, bytes, memory, None, communicator);
            }
            Event::Window { .. } => {}
            Event::Forget { address, bytes } => self.forget(address, bytes),
        }
        None
    }
}

/// Returns `clock` with the arrivals whose posts `known` has. `chunks` are the chunks of posters and of arrivals.
fn cover(known: &Clock, mut clock: Clock, chunks: &[(u32, u32)]) -> Clock {
    for (posters, arrivals) in chunks {
        if let Some(chunk) = known.chunk(*posters) {
            clock.join_chunk(*arrivals, chunk);
        }
    }
    clock
}
