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

mod clock;
mod shadow;

use std::collections::{HashMap, HashSet};
use std::hash::{BuildHasherDefault, Hash, Hasher};
use std::panic::Location;
use std::rc::Rc;
use std::sync::Arc;

use gin_abi::Transfer;
use gin_device::exec::watch::Event;

use self::clock::{Actor as Clocked, CHUNK, Clock, Stamp};
use self::shadow::{Access, Kind, Shadow};
use crate::error::Actor;
use crate::grid::GridRun;
use crate::race::{Race, RaceAccess, RaceMemory, RaceOperation};

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
    shadow: Shadow,
}

/// Knowledge of a grid.
#[derive(Default)]
struct GridClock {
    start: Clock,
    end: Clock,
}

/// Knowledge of a stream.
#[derive(Default)]
struct StreamClock {
    /// The end of its last grid that has ended.
    last: Clock,
    /// The end of the grid before that.
    earlier: Clock,
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
    arrivals: HashMap<(u32, u32), Clock>,
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
    /// The places from which gets read.
    sources_of_gets: HashSet<There>,
    /// Number of posts so far.
    posted: u64,
    /// Bytes outside of windows that hold bytes of a request on their way, by address.
    on_the_way: HashMap<u64, Rc<Posted>>,
    /// A race was reported; nothing more is looked at.
    over: bool,
}

/// Number of posts, and of stages, after which all are forgotten. They serve to name lines only.
const POSTS: usize = 1 << 16;
/// Marks the number of a place with a poster.
const POSTED: u32 = 1 << 31;
/// Number of launches whose names are kept for each stream.
const LAUNCHES: usize = 64;

impl Races {
    pub(crate) fn new() -> Self {
        let mut races = Races::default();
        let slots = races.add_range(Owner::Hosts, 1);
        races.hosts = Some(Clocked::new(slots, 1, Clock::default()));
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
    fn hosts_publish(&mut self) -> Clock {
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
        self.grids.insert((run.device, run.launch), GridClock { start, end: Clock::default() });
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
        let mut clock = self.grids.get(&(run.device, run.launch)).map(|grid| grid.start.clone()).unwrap_or_default();
        clock.join(known);
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
            self.put_actor(task, Clocked::new(slot, epoch, clock.clone()));
        }
    }

    /// Notes that a thread has waited for the grid before its own.
    pub(crate) fn predecessor_ended(&mut self, task: u32, run: &GridRun) {
        let actor = self.actors.get_mut(task as usize).and_then(Option::as_mut);
        if let (Some(actor), Some(stream)) = (actor, self.streams.get(&(run.device, run.stream.0))) {
            actor.clock.join(&stream.last);
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
            grid.end.join(&actor.clock);
            grid.end.raise(actor.slot, actor.epoch);
        }
    }

    pub(crate) fn block_ends(&mut self, block: u32) {
        self.regions.retain(|region| region.block != Some(block));
        self.arrivals.retain(|&(other, _), _| other != block);
    }

    pub(crate) fn grid_ends(&mut self, run: &GridRun) {
        let Some(grid) = self.grids.remove(&(run.device, run.launch)) else { return };
        if let Some(hosts) = &mut self.hosts {
            hosts.clock.join(&grid.end);
        }
        let stream = self.streams.entry((run.device, run.stream.0)).or_default();
        stream.earlier = std::mem::replace(&mut stream.last, grid.end);
    }

    /// Joins the clocks of threads that meet.
    pub(crate) fn meet(&mut self, tasks: impl Iterator<Item = u32> + Clone) {
        let mut met = tasks.clone().filter_map(|task| self.actors.get(task as usize)?.as_ref());
        let Some(first) = met.next() else { return };
        let mut joined = first.clock.clone();
        met.for_each(|actor| joined.join(&actor.clock));
        for actor in tasks.clone().filter_map(|task| self.actors.get(task as usize)?.as_ref()) {
            joined.raise(actor.slot, actor.epoch);
        }
        for task in tasks {
            if let Some(Some(actor)) = self.actors.get_mut(task as usize) {
                actor.clock = joined.clone();
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
                    actor.clock.join(&known);
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
                hosts.clock.join(&actor.publish().whole());
            }
        }
    }

    /// Registers shared memory of a block.
    pub(crate) fn shared(&mut self, block: u32, memory: RaceMemory, address: u64, bytes: u64) {
        let known = self.region(address).is_some_and(|at| self.regions[at].block == Some(block));
        if !known && bytes > 0 {
            self.add_region(address, bytes, memory, Some(block));
        }
    }

    fn add_region(&mut self, address: u64, bytes: u64, memory: RaceMemory, block: Option<u32>) {
        self.forget(address, bytes);
        let at = self.regions.partition_point(|region| region.address < address);
        self.regions.insert(at, Region { address, bytes, memory, block, shadow: Shadow::new(address, bytes) });
    }

    fn forget(&mut self, address: u64, bytes: u64) {
        let end = address.saturating_add(bytes);
        self.regions.retain(|region| region.address >= end || region.address + region.bytes <= address);
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
        let site = Site(actor.call.unwrap_or(site));
        let place = |operation, poster| Place { operation, site, host: host.unwrap_or(0), poster };
        match event {
            Event::Enter { alike } => {
                actor.calls += 1;
                actor.call = Some(site.0);
                actor.alike |= alike;
            }
            Event::Leave => {
                actor.calls = actor.calls.saturating_sub(1);
                if actor.calls == 0 {
                    (actor.call, actor.alike) = (None, false);
                }
            }
            Event::Acquire => actor.acquire(),
            Event::Release => actor.release(),
            Event::Word { address, reads, writes, continues, acquire, release } => {
                let before = self.words.get(&address).cloned();
                if reads {
                    actor.reads(&before, acquire);
                }
                if writes {
                    match actor.writes(before.as_ref().filter(|_| continues), release) {
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
            Event::Post { own, peer, transfer } => {
                let (slot, epoch, number) = (actor.slot, actor.epoch, self.posted);
                self.posted += 1;
                let stamp = actor.publish();
                let end = own.saturating_add(transfer.bytes());
                let poster = Poster { slot, epoch, site, get: false, end, number };
                self.post(own, peer, transfer, poster, stamp);
            }
            Event::Copy { to, from, bytes } => return self.copy(task, to, from, bytes, place),
            Event::Store { to, value, bytes } => {
                let value = value & u64::MAX >> (64 - 8 * bytes.clamp(1, 8));
                let posted = self.posts.get(&(value, self.there(to))).cloned();
                let poster = posted.as_ref().map(|posted| posted.poster);
                if let (None, Some(posted)) = (self.region(to), posted) {
                    self.keep(to, posted);
                }
                let place = place(RaceOperation::PutWrite, poster);
                return self.access(task, (to, bytes), Kind::Write, place, None);
            }
            Event::Window { address, bytes, window, rank } if bytes > 0 => {
                self.add_region(address, bytes, RaceMemory::Window { window, rank }, None);
            }
            Event::Window { .. } => {}
            Event::Forget { address, bytes } => self.forget(address, bytes),
        }
        None
    }

    fn post(&mut self, own: u64, peer: u32, transfer: Transfer, mut poster: Poster, stamp: Rc<Stamp>) {
        let (own, at, stamp) = match transfer {
            Transfer::Nothing => return,
            Transfer::Put { destination, .. } => (own, destination, Some(stamp)),
            // Two ranks may put the same value to the same place.
            Transfer::PutValue { destination, width_log2, .. } => {
                (own & u64::MAX >> (64 - (8 << width_log2.min(3))), destination, None)
            }
            Transfer::Get { source, .. } => {
                poster.get = true;
                if self.sources_of_gets.len() >= POSTS {
                    self.sources_of_gets.clear();
                }
                self.sources_of_gets.insert((source.window, peer, source.offset));
                (own, source, Some(stamp))
            }
        };
        if self.posts.len() >= POSTS {
            self.posts.clear();
        }
        let posted = Rc::new(Posted { poster, stamp });
        self.posts.insert((own, Some((at.window, peer, at.offset))), posted.clone());
        // For a party that moves the bytes by way of other memory.
        self.posts.insert((own, None), posted);
    }

    /// Remembers that memory outside of windows has bytes of a request.
    fn keep(&mut self, at: u64, posted: Rc<Posted>) {
        if self.on_the_way.len() >= POSTS {
            self.on_the_way.clear();
        }
        self.on_the_way.insert(at, posted);
    }

    fn there(&self, address: u64) -> Option<There> {
        let region = &self.regions[self.region(address)?];
        match region.memory {
            RaceMemory::Window { window, rank } => Some((window, rank, address - region.address)),
            RaceMemory::Shared { .. } => None,
        }
    }

    fn copy(
        &mut self,
        task: u32,
        to: u64,
        from: u64,
        bytes: u64,
        place: impl Fn(RaceOperation, Option<Poster>) -> Place,
    ) -> Option<Box<Race>> {
        let (there, here) = (self.there(to), self.there(from));
        let put = self.posts.get(&(from, there)).filter(|posted| !posted.poster.get && here.is_some());
        let get = self.posts.get(&(to, here)).filter(|posted| posted.poster.get && there.is_some());
        // If a put and a get have the same ranges, the later one knows more. Bytes that leave a window for other memory
        // may be those of a put, or of a peer's get from there. Nothing tells which, so only the carrier's knowledge
        // counts.
        let is_ambiguous = there.is_none() && here.is_some_and(|place| self.sources_of_gets.contains(&place));
        let posted = [put, get].into_iter().flatten().max_by_key(|posted| posted.poster.number);
        let posted = posted.or_else(|| self.on_the_way.get(&from)).cloned();
        if there.is_none() {
            match &posted {
                Some(posted) => self.keep(to, posted.clone()),
                None => drop(self.on_the_way.remove(&to)),
            }
        }
        if let Some(posted) = &posted {
            // The next part of the same request. A later request that begins there counts more.
            let next = |at: Option<There>| at.map(|(window, rank, offset)| (window, rank, offset + bytes));
            let next = if posted.poster.get { (to + bytes, next(here)) } else { (from + bytes, next(there)) };
            let later = |other: &Rc<Posted>| other.poster.number > posted.poster.number;
            let has_more = next.0 < posted.poster.end;
            if has_more && !self.posts.get(&next).is_some_and(later) {
                self.posts.insert(next, posted.clone());
            }
        }
        let poster = posted.as_ref().map(|posted| posted.poster);
        let order = posted.filter(|_| !is_ambiguous).and_then(|it| it.stamp.clone());
        let (read, write) = match poster {
            None => (RaceOperation::CopyRead, RaceOperation::CopyWrite),
            Some(Poster { get: false, .. }) => (RaceOperation::PutRead, RaceOperation::PutWrite),
            Some(Poster { get: true, .. }) => (RaceOperation::GetRead, RaceOperation::GetWrite),
        };
        let race = self.access(task, (from, bytes), Kind::Read, place(read, poster), order.as_deref());
        race.or_else(|| self.access(task, (to, bytes), Kind::Write, place(write, poster), order.as_deref()))
    }

    /// Records an access if its memory is watched.
    fn access(
        &mut self,
        task: u32,
        (address, bytes): (u64, u64),
        kind: Kind,
        place: Place,
        order: Option<&Stamp>,
    ) -> Option<Box<Race>> {
        let at = self.region(address)?;
        let number = self.place(place);
        let rank_of = |slot: u32| match &self.ranges[self.range_of(slot)].owner {
            Owner::Block { rank, .. } => Some(*rank),
            Owner::Hosts | Owner::Service(_) => None,
        };
        // The rank that puts or gets, over the network or by stores.
        let puts = match place {
            Place { operation: RaceOperation::PutWrite | RaceOperation::GetWrite, poster: Some(poster), .. } => {
                rank_of(poster.slot)
            }
            Place { operation: RaceOperation::Write, .. } => {
                let actor = self.actors.get(task as usize).and_then(Option::as_ref);
                actor.filter(|actor| actor.calls > 0).and_then(|actor| rank_of(actor.slot))
            }
            _ => None,
        };
        let Races { actors, hosts, regions, host_ranks, .. } = self;
        let actor = match host_ranks.get(task as usize).is_some_and(Option::is_some) {
            true => hosts.as_ref(),
            false => actors.get(task as usize).and_then(Option::as_ref),
        };
        let actor = actor?;
        let region = &mut regions[at];
        let bytes = bytes.min(region.address + region.bytes - address);
        let mut new = Access::new(actor, kind, number, puts);
        if place.operation == RaceOperation::AtomicWrite {
            new.epoch = actor.released_epoch().unwrap_or(new.epoch);
        }
        let (earlier, found) = region.shadow.access(actor, order, address, bytes, new)?;
        let (offset, memory, own) = (found - region.address, region.memory.clone(), (actor.slot, actor.epoch));
        self.over = true;
        let first = self.describe((earlier.slot, earlier.epoch), self.place_of(&earlier, place));
        let second = self.describe(own, place);
        Some(Box::new(Race { memory, offset, first, second }))
    }

    fn place(&mut self, place: Place) -> u32 {
        let recent = place.operation as usize % self.recent.len();
        if let Some((last, number)) = self.recent[recent]
            && last == place
        {
            return number;
        }
        let number = if place.poster.is_some() {
            let number = POSTED | self.posted_count;
            let at = self.posted_count as usize % POSTS;
            self.posted_count = (self.posted_count + 1) & !POSTED;
            match self.posted_places.get_mut(at) {
                Some(entry) => *entry = (number, place),
                None => self.posted_places.push((number, place)),
            }
            number
        } else {
            let next = self.places.len() as u32;
            let number = *self.place_numbers.entry(place).or_insert(next);
            if number == next {
                self.places.push(place);
            }
            number
        };
        self.recent[recent] = Some((place, number));
        number
    }

    /// Returns the place of an access. A post that is too long ago to be remembered has that of `like`.
    fn place_of(&self, access: &Access, like: Place) -> Place {
        if access.place & POSTED == 0 {
            return self.places[access.place as usize];
        }
        let entry = self.posted_places.get((access.place & !POSTED) as usize % POSTS);
        entry.filter(|(number, _)| *number == access.place).map_or(
            Place {
                operation: if access.kind.writes() { RaceOperation::CopyWrite } else { RaceOperation::CopyRead },
                poster: None,
                ..like
            },
            |(_, place)| *place,
        )
    }

    fn describe(&self, (slot, epoch): (u32, u32), place: Place) -> RaceAccess {
        let Place { operation, site, host, poster } = place;
        let own = self.name(slot, epoch, host);
        match poster {
            None => RaceAccess { operation, actor: own, site: site.0, by: None },
            Some(poster) => {
                let actor = self.name(poster.slot, poster.epoch, host);
                RaceAccess { operation, actor, site: poster.site.0, by: Some(own) }
            }
        }
    }

    fn name(&self, slot: u32, epoch: u32, host: u32) -> Actor {
        let range = &self.ranges[self.range_of(slot)];
        match &range.owner {
            Owner::Hosts => Actor::Host { rank: host },
            Owner::Service(name) => Actor::Service { name: name.clone() },
            Owner::Block { rank, block, launches } => {
                let at = launches.partition_point(|(first, ..)| *first <= epoch).saturating_sub(1);
                let (launch, grid) = match launches.get(at) {
                    Some((_, launch, name)) => (*launch, name.clone()),
                    None => (0, "?".into()),
                };
                Actor::Thread { rank: *rank, grid, launch, block: *block, thread: slot - range.first }
            }
        }
    }
}
