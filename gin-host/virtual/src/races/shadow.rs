// SPDX-License-Identifier: MIT OR Apache-2.0
//! The record of accesses to memory that is watched.
//!
//! Each 8 bytes have room for four accesses, which is enough to find most races. If there are more, some are forgotten.

use super::clock::{Actor, Stamp};

/// Bytes of a cell.
const CELL: u64 = 8;
/// Cells of a page. A page takes memory once one of its bytes is accessed.
const PAGE: usize = 256;

/// The kind of an access.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[repr(u8)]
pub(super) enum Kind {
    /// There is no access.
    #[default]
    None,
    Read,
    Write,
    AtomicRead,
    AtomicWrite,
}

impl Kind {
    pub(super) fn writes(self) -> bool {
        matches!(self, Kind::Write | Kind::AtomicWrite)
    }

    fn is_atomic(self) -> bool {
        matches!(self, Kind::AtomicRead | Kind::AtomicWrite)
    }

    fn conflicts(self, other: Kind) -> bool {
        (self.writes() || other.writes()) && !(self.is_atomic() && other.is_atomic())
    }
}

/// An access to some bytes of a cell.
#[derive(Clone, Copy, Default)]
pub(super) struct Access {
    pub(super) slot: u32,
    pub(super) epoch: u32,
    /// Index of the operation and its place.
    pub(super) place: u32,
    pub(super) kind: Kind,
    /// The bytes, one bit each.
    mask: u8,
    /// One more than the rank whose put or get writes; 0 for other accesses.
    puts: u16,
}

impl Access {
    pub(super) fn new(actor: &Actor, kind: Kind, place: u32, puts: Option<u32>) -> Self {
        let puts = puts.map_or(0, |rank| rank as u16 + 1);
        Access { slot: actor.slot, epoch: actor.epoch, place, kind, mask: 0, puts }
    }
}

type Cell = [Access; 4];

/// The accesses to one range of memory.
pub(super) struct Shadow {
    /// Address of the first cell.
    start: u64,
    pages: Vec<Option<Box<[Cell; PAGE]>>>,
}

impl Shadow {
    pub(super) fn new(address: u64, bytes: u64) -> Self {
        let start = address & !(CELL - 1);
        let cells = (address + bytes - start).div_ceil(CELL) as usize;
        Shadow { start, pages: (0..cells.div_ceil(PAGE)).map(|_| None).collect() }
    }

    /// Records an access of `bytes` bytes, which are in the range. Returns an earlier access that is not ordered with
    /// it, and the address of the first byte of both. With an `order`, that is the clock of the request which the actor
    /// carries out: the request is ordered with other requests of the same actor only if its poster knew them.
    pub(super) fn access(
        &mut self,
        actor: &Actor,
        order: Option<&Stamp>,
        address: u64,
        bytes: u64,
        new: Access,
    ) -> Option<(Access, u64)> {
        let (mut at, end) = (address, address + bytes);
        let mut found = None;
        while at < end {
            let cell = at & !(CELL - 1);
            let next = (cell + CELL).min(end);
            let mask = (0xff_u32 << (at - cell) & 0xff >> (cell + CELL - next)) as u8;
            let index = ((cell - self.start) / CELL) as usize;
            let page = self.pages[index / PAGE].get_or_insert_with(|| Box::new([Cell::default(); PAGE]));
            let new = Access { mask, ..new };
            if let Some(earlier) = record(&mut page[index % PAGE], new, actor, order) {
                found = found.or(Some((earlier, cell + u64::from((earlier.mask & mask).trailing_zeros()))));
            }
            at = next;
        }
        found
    }
}

/// Adds an access to a cell. Returns an earlier one that is not ordered with it.
fn record(cell: &mut Cell, new: Access, actor: &Actor, order: Option<&Stamp>) -> Option<Access> {
    let mut room = None;
    for (at, old) in cell.iter().enumerate() {
        if old.kind == Kind::None {
            room = room.or(Some(at));
            continue;
        }
        let same = old.slot == new.slot;
        let again = same && old.epoch == new.epoch && old.kind == new.kind;
        if again && old.mask & new.mask == new.mask && (order.is_none() || old.place == new.place) {
            return None;
        }
        let before = |order: &Stamp| order.covers(old.slot, old.epoch) || old.place == new.place;
        // Puts of one rank to one place, and its gets, often have the same bytes. Nothing tells them from others.
        let alike = new.puts != 0 && new.puts == old.puts;
        let known = alike || (same || actor.knows(old.slot, old.epoch)) && order.is_none_or(before);
        if !known {
            if old.mask & new.mask != 0 && old.kind.conflicts(new.kind) {
                return Some(*old);
            }
        } else if old.mask & !new.mask == 0 && (new.kind == old.kind || new.kind == Kind::Write) {
            // A later access that races with the old one races with the new one too.
            room = Some(at);
        }
    }
    // Reads are forgotten before writes.
    let victim = || {
        let turn = (new.slot.wrapping_add(new.epoch)) as usize;
        let order = (0..cell.len()).map(|step| (turn + step) % cell.len());
        order.clone().find(|at| !cell[*at].kind.writes()).or_else(|| order.clone().next())
    };
    if let Some(at) = room.or_else(victim) {
        cell[at] = new;
    }
    None
}

#[cfg(test)]
mod tests {
    use super::super::clock::Known;
    use super::*;

    fn actor(slot: u32) -> Actor {
        Actor::new(slot, 1, Known::default())
    }

    fn access(
        shadow: &mut Shadow,
        actor: &Actor,
        order: Option<&Stamp>,
        (address, bytes): (u64, u64),
        place: u32,
        kind: Kind,
    ) -> Option<(Access, u64)> {
        shadow.access(actor, order, address, bytes, Access::new(actor, kind, place, None))
    }

    #[test]
    fn accesses_conflict_if_one_writes_common_bytes_and_one_is_no_atomic() {
        let conflict = |first: (u64, u64, Kind), second: (u64, u64, Kind)| {
            let mut shadow = Shadow::new(100, 40);
            assert!(access(&mut shadow, &actor(1), None, (first.0, first.1), 0, first.2).is_none());
            access(&mut shadow, &actor(2), None, (second.0, second.1), 0, second.2).map(|(_, address)| address)
        };
        assert_eq!(conflict((104, 8, Kind::Write), (108, 1, Kind::Read)), Some(108));
        assert_eq!(conflict((100, 40, Kind::Read), (130, 4, Kind::Write)), Some(130));
        assert_eq!(conflict((101, 2, Kind::Write), (103, 1, Kind::Write)), None);
        assert_eq!(conflict((104, 8, Kind::Read), (104, 8, Kind::Read)), None);
        assert_eq!(conflict((104, 8, Kind::AtomicWrite), (104, 8, Kind::AtomicWrite)), None);
        assert_eq!(conflict((104, 8, Kind::AtomicWrite), (104, 4, Kind::Read)), Some(104));
        assert_eq!(conflict((104, 8, Kind::AtomicRead), (104, 8, Kind::Write)), Some(104));
    }

    #[test]
    fn an_access_that_is_known_does_not_conflict() {
        let mut shadow = Shadow::new(0, 8);
        assert!(access(&mut shadow, &actor(1), None, (0, 8), 0, Kind::Write).is_none());
        let mut later = actor(2);
        later.known.clock.raise(1, 1);
        assert!(access(&mut shadow, &later, None, (0, 8), 0, Kind::Write).is_none());
        assert!(
            access(&mut shadow, &actor(1), None, (0, 8), 0, Kind::Read).is_some_and(|(access, _)| access.slot == 2)
        );
    }

    #[test]
    fn a_write_is_not_forgotten_for_many_readers() {
        let mut shadow = Shadow::new(0, 8);
        assert!(access(&mut shadow, &actor(1), None, (0, 8), 0, Kind::Write).is_none());
        for slot in 2..20 {
            let mut reader = actor(slot);
            reader.known.clock.raise(1, 1);
            assert!(access(&mut shadow, &reader, None, (0, 8), 0, Kind::Read).is_none());
        }
        assert!(
            access(&mut shadow, &actor(99), None, (0, 8), 0, Kind::Read).is_some_and(|(access, _)| access.slot == 1)
        );
    }

    #[test]
    fn a_request_is_not_ordered_with_another_one_of_the_same_actor_that_its_poster_did_not_know() {
        let mut shadow = Shadow::new(0, 8);
        let mut proxy = actor(1);
        let stamp = |slot| Stamp { known: Known::default(), slot, epoch: 1 };
        assert!(access(&mut shadow, &proxy, Some(&stamp(7)), (0, 8), 0, Kind::Write).is_none());
        assert!(access(&mut shadow, &proxy, Some(&stamp(7)), (0, 8), 0, Kind::Write).is_none(), "the same request");
        assert!(access(&mut shadow, &proxy, Some(&stamp(8)), (0, 8), 1, Kind::Write).is_some());
        let mut knows = stamp(8);
        knows.known.join(&proxy.publish().whole());
        assert!(access(&mut shadow, &proxy, Some(&knows), (0, 8), 1, Kind::Write).is_none());
    }
}
