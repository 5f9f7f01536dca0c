// SPDX-License-Identifier: MIT OR Apache-2.0
//! Vector clocks that share their parts.
//!
//! A clock has one entry for each slot, in chunks that clocks share until one of them changes. The threads of a block
//! have the slots of the same chunks, so a join after a barrier copies these chunks only.

use std::rc::Rc;

/// Number of slots of a chunk.
pub(super) const CHUNK: u32 = 64;
/// The slot of a stamp that has no publisher of its own.
pub(super) const NOBODY: u32 = u32::MAX;

type Chunk = [u32; CHUNK as usize];

/// The newest epoch of each slot that an actor knows; 0 for none.
#[derive(Clone, Default)]
pub(super) struct Clock(Rc<Vec<Option<Rc<Chunk>>>>);

impl Clock {
    pub(super) fn get(&self, slot: u32) -> u32 {
        let chunk = self.0.get((slot / CHUNK) as usize).and_then(Option::as_ref);
        chunk.map_or(0, |chunk| chunk[(slot % CHUNK) as usize])
    }

    /// Raises the entry of a slot to `epoch`.
    pub(super) fn raise(&mut self, slot: u32, epoch: u32) {
        if self.get(slot) >= epoch {
            return;
        }
        let (at, chunks) = ((slot / CHUNK) as usize, Rc::make_mut(&mut self.0));
        if chunks.len() <= at {
            chunks.resize(at + 1, None);
        }
        let chunk = chunks[at].get_or_insert_with(|| Rc::new([0; CHUNK as usize]));
        Rc::make_mut(chunk)[(slot % CHUNK) as usize] = epoch;
    }

    /// Returns the chunk with this number.
    pub(super) fn chunk(&self, at: u32) -> Option<&Rc<Chunk>> {
        self.0.get(at as usize)?.as_ref()
    }

    /// Raises the entries of chunk `at` to `theirs`.
    pub(super) fn join_chunk(&mut self, at: u32, theirs: &Rc<Chunk>) {
        let at = at as usize;
        let joined = match self.0.get(at).and_then(Option::as_ref) {
            None => theirs.clone(),
            Some(mine) if Rc::ptr_eq(mine, theirs) || covers(mine, theirs) => return,
            Some(mine) if covers(theirs, mine) => theirs.clone(),
            Some(mine) => Rc::new(std::array::from_fn(|slot| mine[slot].max(theirs[slot]))),
        };
        let chunks = Rc::make_mut(&mut self.0);
        if chunks.len() <= at {
            chunks.resize(at + 1, None);
        }
        chunks[at] = Some(joined);
    }

    /// Returns true if no entry of `other` is higher.
    fn covers(&self, other: &Clock) -> bool {
        let chunk = |(at, theirs): (usize, &Option<Rc<Chunk>>)| match (self.0.get(at), theirs) {
            (_, None) => true,
            (Some(Some(mine)), Some(theirs)) => Rc::ptr_eq(mine, theirs) || covers(mine, theirs),
            (_, Some(_)) => false,
        };
        Rc::ptr_eq(&self.0, &other.0) || other.0.iter().enumerate().all(chunk)
    }

    /// Raises every entry to that of `other`.
    pub(super) fn join(&mut self, other: &Clock) {
        if Rc::ptr_eq(&self.0, &other.0) {
            return;
        }
        for (at, theirs) in (0..).zip(other.0.iter()) {
            if let Some(theirs) = theirs {
                self.join_chunk(at, theirs);
            }
        }
    }
}

/// The knowledge of an actor.
#[derive(Clone, Default)]
pub(super) struct Known {
    pub(super) clock: Clock,
    /// The puts by loads and stores whose bytes are stored. The order of the machine passes this on, but no signal: a
    /// signal covers what the contract says, and no more.
    pub(super) stored: Clock,
}

impl Known {
    pub(super) fn join(&mut self, other: &Known) {
        self.clock.join(&other.clock);
        self.stored.join(&other.stored);
    }

    /// Returns true if the access by `slot` in `epoch` is known.
    #[inline]
    pub(super) fn has(&self, slot: u32, epoch: u32) -> bool {
        self.clock.get(slot) >= epoch || self.stored.get(slot) >= epoch
    }
}

fn covers(one: &Chunk, other: &Chunk) -> bool {
    one.iter().zip(other).all(|(one, other)| one >= other)
}

/// The clock that an actor published.
#[derive(Clone, Default)]
pub(super) struct Stamp {
    /// Without the publisher's own epoch.
    pub(super) known: Known,
    /// The publisher, or [`NOBODY`] if the clock is a join.
    pub(super) slot: u32,
    pub(super) epoch: u32,
}

impl Stamp {
    /// Returns true if an access by `slot` in `epoch` came before the stamp.
    pub(super) fn covers(&self, slot: u32, epoch: u32) -> bool {
        slot == self.slot && epoch <= self.epoch || self.known.has(slot, epoch)
    }

    /// Returns the knowledge that covers this stamp.
    pub(super) fn whole(&self) -> Known {
        let mut known = self.known.clone();
        if self.slot != NOBODY {
            known.clock.raise(self.slot, self.epoch);
        }
        known
    }
}

/// A thread, a service, or all hosts together.
#[derive(Clone)]
pub(super) struct Actor {
    pub(super) slot: u32,
    /// Publishing ends an epoch. So an actor that knows the epoch of an access knows all that its actor knew then.
    pub(super) epoch: u32,
    pub(super) known: Known,
    /// The knowledge at the last release fence.
    released: Option<Rc<Stamp>>,
    /// The stamps of words read since the last acquire.
    read: Vec<Rc<Stamp>>,
    /// The place that called the device API, and how many of its calls are under way.
    pub(super) call: Option<&'static std::panic::Location<'static>>,
    pub(super) calls: u32,
    /// Stores of the call are alike those of other threads.
    pub(super) alike: bool,
    /// The put by loads and stores that the call carries out: the first and last address, and the slot of its arrival.
    pub(super) stores: Option<(u64, u64, u32)>,
    /// The signal that the actor raises next by loads and stores: its word, and the puts that it covers.
    pub(super) raises: Option<(u64, super::Covers)>,
    /// The arrivals of puts that the call waits for.
    pub(super) quiet: Clock,
}

/// Number of stamps read after which the oldest counts as acquired.
const READ: usize = 64;

impl Actor {
    pub(super) fn new(slot: u32, epoch: u32, known: Known) -> Self {
        let (released, read, call) = (None, Vec::new(), None);
        let (stores, raises, quiet) = (None, None, Clock::default());
        Actor { slot, epoch, known, released, read, call, calls: 0, alike: false, stores, raises, quiet }
    }

    /// Returns true if an access by `slot` in `epoch` comes before everything that the actor does from now on.
    #[inline]
    pub(super) fn knows(&self, slot: u32, epoch: u32) -> bool {
        slot == self.slot || self.known.has(slot, epoch)
    }

    /// Returns the clock so far and begins a new epoch.
    pub(super) fn publish(&mut self) -> Rc<Stamp> {
        let stamp = Stamp { known: self.known.clone(), slot: self.slot, epoch: self.epoch };
        self.epoch += 1;
        Rc::new(stamp)
    }

    fn covers(&self, stamp: &Stamp) -> bool {
        // A signal passes on what its raiser knows, except `stored`.
        let knows =
            |stamp: &Stamp| self.knows(stamp.slot, stamp.epoch) && self.known.stored.covers(&stamp.known.stored);
        stamp.slot != NOBODY && knows(stamp)
    }

    fn learn(&mut self, stamp: &Stamp) {
        if !self.covers(stamp) {
            self.known.join(&stamp.known);
            if stamp.slot != NOBODY {
                self.known.clock.raise(stamp.slot, stamp.epoch);
            }
        }
    }

    /// Makes a release fence.
    pub(super) fn release(&mut self) {
        self.released = Some(self.publish());
    }

    /// Returns the epoch of the last release fence. An actor that acquires it knows the store or raise after it, too.
    pub(super) fn released_epoch(&self) -> Option<u32> {
        self.released.as_ref().map(|stamp| stamp.epoch)
    }

    /// Makes an acquire fence.
    pub(super) fn acquire(&mut self) {
        for stamp in std::mem::take(&mut self.read) {
            self.learn(&stamp);
        }
    }

    /// Reads a word with this stamp.
    pub(super) fn reads(&mut self, word: &Option<Rc<Stamp>>, acquires: bool) {
        let Some(stamp) = word else { return };
        if acquires {
            self.learn(stamp);
        } else if !self.covers(stamp) && !self.read.iter().any(|read| Rc::ptr_eq(read, stamp)) {
            if self.read.len() == READ {
                let oldest = self.read.remove(0);
                self.learn(&oldest);
            }
            self.read.push(stamp.clone());
        }
    }

    /// Returns the stamp of a word after this actor has changed it. `before` is the stamp before if the change reads
    /// the word, and so continues the releases before it.
    pub(super) fn writes(&mut self, before: Option<&Rc<Stamp>>, releases: bool) -> Option<Rc<Stamp>> {
        if releases {
            self.release();
        }
        let (before, mine) = match (before, &self.released) {
            (None, mine) => return mine.clone(),
            (Some(before), None) => return Some(before.clone()),
            (Some(before), Some(mine)) => (before, mine),
        };
        if Rc::ptr_eq(before, mine) || before.slot == mine.slot {
            return Some(mine.clone());
        }
        let is_known = mine.known.clock.get(before.slot) >= before.epoch;
        if before.slot != NOBODY && is_known && mine.known.stored.covers(&before.known.stored) {
            return Some(mine.clone());
        }
        let mut known = before.whole();
        known.join(&mine.whole());
        Some(Rc::new(Stamp { known, slot: NOBODY, epoch: 0 }))
    }

    /// Returns the stamp of a word by which this actor has raised a signal. The signal covers `covered`, and passes on
    /// the clock of the actor's last release. `before` is the stamp before.
    pub(super) fn raises(&self, before: Option<&Rc<Stamp>>, covered: Clock) -> Rc<Stamp> {
        let mut known = before.map(|before| before.whole()).unwrap_or_default();
        known.clock.join(&covered);
        if let Some(mine) = &self.released {
            known.clock.join(&mine.whole().clock);
        }
        Rc::new(Stamp { known, slot: NOBODY, epoch: 0 })
    }

    /// Returns the clock at the last release fence.
    pub(super) fn released(&self) -> Clock {
        self.released.as_ref().map(|stamp| stamp.whole().clock).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_clock_keeps_the_newest_epoch_of_each_slot() {
        let mut one = Clock::default();
        one.raise(3, 5);
        one.raise(3, 4);
        one.raise(200, 7);
        let mut other = Clock::default();
        other.raise(3, 6);
        other.raise(70, 1);
        other.join(&one);
        let seen = [3, 70, 200, 4, 100_000].map(|slot| other.get(slot));
        assert_eq!(seen, [6, 1, 7, 0, 0]);
        assert_eq!((one.get(3), one.get(70)), (5, 0));
    }

    #[test]
    fn a_relaxed_raise_continues_the_releases_before_it() {
        let mut actors = [1, 2, 3].map(|slot| Actor::new(slot, 1, Known::default()));
        let first = actors[0].writes(None, true);
        let second = actors[1].writes(first.as_ref(), true);
        actors[2].reads(&second, false);
        assert!(!actors[2].knows(1, 1) && !actors[2].knows(2, 1));
        actors[2].acquire();
        assert!(actors[2].knows(1, 1) && actors[2].knows(2, 1));
        assert!(!actors[2].knows(1, 2), "what comes after the release is not covered");
    }

    #[test]
    fn a_relaxed_store_publishes_the_last_release_fence_only() {
        let (mut sender, mut receiver) = (Actor::new(1, 1, Known::default()), Actor::new(2, 1, Known::default()));
        let nothing = sender.writes(None, false);
        assert!(nothing.is_none());
        sender.release();
        let word = sender.writes(None, false);
        receiver.reads(&word, true);
        assert!(receiver.knows(1, 1) && !receiver.knows(1, 2));
    }
}
