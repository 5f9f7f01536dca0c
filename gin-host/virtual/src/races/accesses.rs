// SPDX-License-Identifier: MIT OR Apache-2.0
//! Accesses to watched memory, and the reports of races.

use super::clock::{CHUNK, NOBODY, Stamp};
use super::shadow::{Access, Kind};
use super::{Owner, POSTED, POSTS, Place, Poster, Races};
use crate::actor::Actor;
use crate::race::{Race, RaceAccess, RaceOperation};

impl Races {
    /// Records an access if its memory is watched.
    pub(super) fn access(
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
            Owner::Hosts | Owner::Service(_) | Owner::Arrivals { .. } => None,
        };
        // The rank that puts or gets, over the network or by stores.
        let puts = match place {
            Place { operation: RaceOperation::PutWrite | RaceOperation::GetWrite, poster: Some(poster), .. } => {
                rank_of(poster.slot)
            }
            Place { operation: RaceOperation::Write | RaceOperation::PutWrite, .. } => {
                let actor = self.actors.get(task as usize).and_then(Option::as_ref);
                actor.filter(|actor| actor.calls > 0).and_then(|actor| rank_of(actor.slot))
            }
            _ => None,
        };
        let Races { actors, hosts, regions, host_ranks, .. } = self;
        let waited;
        let actor = match host_ranks.get(task as usize).is_some_and(Option::is_some) {
            true => {
                let mut host = hosts.clone()?;
                host.known.stored.join(&self.seen_by_hosts);
                waited = host;
                &waited
            }
            false => {
                let actor = actors.get_mut(task as usize).and_then(Option::as_mut)?;
                if let (Some((.., arrival)), RaceOperation::PutWrite, None) =
                    (actor.stores, place.operation, place.poster)
                {
                    actor.known.stored.raise(arrival, actor.epoch);
                }
                &*actor
            }
        };
        let region = &mut regions[at];
        let bytes = bytes.min(region.address + region.bytes - address);
        let mut new = Access::new(actor, kind, number, puts);
        match (place.operation, place.poster, actor.stores) {
            (RaceOperation::AtomicWrite, ..) => new.epoch = actor.released_epoch().unwrap_or(new.epoch),
            (RaceOperation::PutWrite, Some(Poster { arrival, epoch, .. }), _) if arrival != NOBODY => {
                (new.slot, new.epoch) = (arrival, epoch);
                self.arrived.raise(arrival, epoch);
            }
            (RaceOperation::PutWrite, None, Some((.., arrival))) => new.slot = arrival,
            _ => {}
        }
        let (earlier, found) = region.shadow.access(actor, order, address, bytes, new)?;
        let (offset, memory, own) = (found - region.address, region.memory.clone(), (new.slot, new.epoch));
        self.over = true;
        let first = self.describe((earlier.slot, earlier.epoch), self.place_of(&earlier, place));
        let second = self.describe(own, place);
        Some(Box::new(Race { memory, offset, first, second }))
    }

    pub(super) fn place(&mut self, place: Place) -> u32 {
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
    pub(super) fn place_of(&self, access: &Access, like: Place) -> Place {
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

    pub(super) fn describe(&self, (slot, epoch): (u32, u32), place: Place) -> RaceAccess {
        let Place { operation, site, host, poster, .. } = place;
        match poster {
            None => RaceAccess { operation, actor: self.name(slot, epoch, host), site: site.0, by: None },
            Some(poster) => {
                let actor = self.name(poster.slot, poster.epoch, host);
                RaceAccess { operation, actor, site: poster.site.0, by: Some(self.name(place.by, epoch, host)) }
            }
        }
    }

    pub(super) fn name(&self, slot: u32, epoch: u32, host: u32) -> Actor {
        let range = &self.ranges[self.range_of(slot)];
        match &range.owner {
            Owner::Hosts => Actor::Host { rank: host },
            Owner::Service(name) => Actor::Service { name: name.clone() },
            Owner::Arrivals { posters } => self.name(posters * CHUNK + slot % CHUNK, epoch, host),
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
