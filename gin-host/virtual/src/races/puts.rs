// SPDX-License-Identifier: MIT OR Apache-2.0
//! Posts of puts and signals, and what a signal covers.

use super::clock::{CHUNK, Clock, NOBODY, Stamp};
use super::shadow::Kind;
use super::{
    Chunks, Covers, Flying, Owner, POSTS, PUTS, Place, Posted, Poster, Posting, Races, STARTS, SignalKey, There, Way,
    Weak, cover,
};
use crate::race::{Race, RaceMemory, RaceOperation};
use gin_abi::{RemoteSignal, SignalTarget, Transfer};
use std::collections::VecDeque;
use std::rc::Rc;

impl Races {
    /// Returns the way of a post by the thread with this slot, if its communicator is known.
    pub(super) fn way(&self, way: Posting, slot: u32, near: bool) -> Option<Way> {
        let Owner::Block { rank, .. } = &self.ranges[self.range_of(slot)].owner else { return None };
        let communicator = *self.communicators.get(&way.table)?;
        Some(Way { communicator, rank: *rank, context: way.context, peer: way.peer, near })
    }

    /// Returns the put that a weak signal follows.
    pub(super) fn weak_put(way: Way, transfer: Transfer, signal: Option<RemoteSignal>) -> Option<Weak> {
        let destination = match transfer {
            Transfer::Put { destination, .. } | Transfer::PutValue { destination, .. } => destination,
            Transfer::Get { .. } | Transfer::Nothing => return None,
        };
        let is_weak = signal.is_some_and(|signal| !signal.strong);
        is_weak.then(|| (way, destination.window, destination.offset, transfer.bytes()))
    }

    /// Returns the slot of the arrivals of puts on this way by the thread with this slot.
    pub(super) fn arrival(&mut self, way: Way, weak: Option<Weak>, slot: u32) -> u32 {
        let posters = slot / CHUNK;
        let line = match weak {
            Some(weak) => self.weak.entry(weak).or_default(),
            None => self.ways.entry(way).or_default(),
        };
        let found = line.iter().find(|(other, _)| *other == posters).map(|(_, chunk)| *chunk);
        let chunk = found.unwrap_or_else(|| {
            let chunk = self.add_range(Owner::Arrivals { posters }, CHUNK) / CHUNK;
            self.ways.entry(way).or_default().push((posters, chunk));
            if let Some(weak) = weak {
                self.weak.entry(weak).or_default().push((posters, chunk));
            }
            chunk
        });
        chunk * CHUNK + slot % CHUNK
    }

    /// Returns what the raise of a signal's word covers; `None` if the word is no signal's.
    pub(super) fn covered(&mut self, task: u32, address: u64, amount: u64) -> Option<Clock> {
        let actor = self.actors.get_mut(task as usize)?.as_mut()?;
        if let Some((_, covers)) = actor.raises.take_if(|(word, _)| *word == address) {
            let known = actor.released();
            return Some(cover(&known, Clock::default(), &self.chunks(&covers)));
        }
        let key = self.signal_at(task, address, amount)?;
        let signal = self.flying.get_mut(&key).and_then(VecDeque::pop_front);
        let Some(Flying { known, covers, .. }) = signal else {
            // A raise that no post explains: it covers all.
            return Some(self.arrived.clone());
        };
        Some(cover(&known, known.clone(), &self.chunks(&covers)))
    }

    /// Returns the chunks of the arrivals that a signal covers, as far as its poster knows the posts.
    pub(super) fn chunks(&self, covers: &Covers) -> Chunks {
        let of = |way: &Way| self.ways.get(way).map_or(&[][..], Vec::as_slice);
        match covers {
            Covers::Put(put) => self.weak.get(put).cloned().unwrap_or_default(),
            Covers::Ways(way, other) => [of(way), other.as_ref().map_or(&[][..], of)].concat(),
            Covers::Nothing => Chunks::new(),
        }
    }

    /// Returns the arrivals, on ways of a communicator that meet a condition, of the puts in `known` that the rank of
    /// the thread with this slot has posted.
    pub(super) fn arrivals_of(&self, slot: u32, known: &Clock, table: u64, is_one: impl Fn(&Way) -> bool) -> Clock {
        let Owner::Block { rank, .. } = &self.ranges[self.range_of(slot)].owner else { return Clock::default() };
        let Some(communicator) = self.communicators.get(&table) else { return Clock::default() };
        let own = |way: &Way| (way.communicator, way.rank) == (*communicator, *rank);
        let ways = self.ways.iter().filter(|(way, _)| own(way) && is_one(way));
        let chunks: Chunks = ways.flat_map(|(_, chunks)| chunks.iter().copied()).collect();
        cover(known, Clock::default(), &chunks)
    }

    /// Returns the newest put that has bytes from `own` on to this place.
    pub(super) fn put_to(&self, (window, rank, offset): There, own: u64, bytes: u64) -> Option<Rc<Posted>> {
        let starts = self.puts.range(..=(window, rank, offset)).rev().take(STARTS);
        let here = starts.take_while(|((other, peer, _), _)| (*other, *peer) == (window, rank));
        let all = here.flat_map(|((.., start), puts)| puts.iter().map(|put| (offset - *start, put)));
        let whole =
            all.filter(|(past, (first, length, _))| past + bytes <= *length && first.wrapping_add(*past) == own);
        whole.map(|(_, (.., posted))| posted).max_by_key(|posted| posted.poster.number).cloned()
    }

    /// Returns the signal of the word at this address that the network raises by this amount.
    pub(super) fn signal_at(&self, task: u32, address: u64, amount: u64) -> Option<SignalKey> {
        let at = self.signals.partition_point(|(words, _)| words.address <= address);
        if let Some((words, number)) = at.checked_sub(1).and_then(|at| self.signals.get(at)) {
            let (index, rest) = ((address - words.address) / words.stride, (address - words.address) % words.stride);
            if *number != 0 && index < words.count && rest == 0 {
                let (context, name) = match words.first {
                    SignalTarget::Id(id) => (words.context, (u32::MAX, u64::from(id) + index)),
                    SignalTarget::Address { window, offset } => (0, (window, offset + 8 * index)),
                };
                return Some((*number, words.rank, context, name, amount));
            }
        }
        // With GDAKI the NIC raises a signal at an address in the window itself.
        let actor = self.actors.get(task as usize)?.as_ref()?;
        let region = &self.regions[self.region(address)?];
        match (&region.memory, &self.ranges[self.range_of(actor.slot)].owner) {
            (RaceMemory::Window { window, rank, .. }, Owner::Service(_)) if region.communicator != 0 => {
                Some((region.communicator, *rank, 0, (*window, address - region.address), amount))
            }
            _ => None,
        }
    }

    pub(super) fn post(&mut self, own: u64, peer: u32, transfer: Transfer, mut poster: Poster, stamp: Rc<Stamp>) {
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
        if !poster.get {
            if self.puts.len() >= POSTS {
                self.puts.clear();
            }
            let puts = self.puts.entry((at.window, peer, at.offset)).or_default();
            puts.retain(|(other, length, _)| (*other, *length) != (own, transfer.bytes()));
            if puts.len() == PUTS {
                puts.remove(0);
            }
            puts.push((own, transfer.bytes(), posted.clone()));
        }
        self.posts.insert((own, Some((at.window, peer, at.offset))), posted.clone());
        // For a party that moves the bytes by way of other memory.
        self.posts.insert((own, None), posted);
    }

    /// Remembers that memory outside of windows has bytes of a request.
    pub(super) fn keep(&mut self, at: u64, posted: Rc<Posted>, own: u64) {
        if self.on_the_way.len() >= POSTS {
            self.on_the_way.clear();
        }
        self.on_the_way.insert(at, (posted, own));
    }

    pub(super) fn there(&self, address: u64) -> Option<There> {
        let region = &self.regions[self.region(address)?];
        match region.memory {
            RaceMemory::Window { window, rank, .. } => Some((window, rank, address - region.address)),
            RaceMemory::Shared { .. } => None,
        }
    }

    pub(super) fn copy(
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
        let (mut posted, own) = match (posted, self.on_the_way.get(&from)) {
            (Some(posted), _) => (Some(posted.clone()), from),
            (None, Some((posted, own))) => (Some(posted.clone()), *own),
            (None, None) => (None, from),
        };
        // A party that moves parts, or by way of other memory, may bring a part of any put from there.
        if let (Some(there), false) = (there, posted.as_ref().is_some_and(|posted| posted.poster.get)) {
            // If none is found for bytes from other memory, the request is right but for its peer: its arrival comes
            // with the order of its carrier.
            let unsure = |posted: Rc<Posted>| {
                let poster = Poster { arrival: NOBODY, ..posted.poster };
                Rc::new(Posted { poster, stamp: posted.stamp.clone() })
            };
            let other = posted.map(|posted| if here.is_some() { posted } else { unsure(posted) });
            posted = self.put_to(there, own, bytes).or(other);
        }
        if there.is_none() {
            match &posted {
                Some(posted) => self.keep(to, posted.clone(), own),
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
}
