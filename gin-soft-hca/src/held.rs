// SPDX-License-Identifier: MIT OR Apache-2.0
//! What has been written but is not in view yet.
//!
//! Bytes that a NIC wrote may sit in its way to memory, behind its completion. They are copied to a staging area, as their
//! source may change, and put into place when something pushes them there, oldest first.

use crate::memory::Memory;

/// Why bytes are held.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Reason {
    /// Data of a READ of this queue pair.
    Read(u32),
    /// Data of a WRITE that this queue pair received.
    Write(u32),
}

/// A range that is held.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Item {
    reason: Reason,
    to: u64,
    at: u64,
    bytes: u64,
}

/// Room for ranges that are held: a slice, or something that owns one.
pub trait Items {
    /// The room.
    fn items(&mut self) -> &mut [Option<Item>];
}

impl<T: AsMut<[Option<Item>]>> Items for T {
    fn items(&mut self) -> &mut [Option<Item>] {
        self.as_mut()
    }
}

/// What is held, in the order in which it came.
#[derive(Debug)]
pub struct Held<I> {
    items: I,
    stage: u64,
    stage_bytes: u64,
    used: u64,
    count: usize,
}

impl<I: Items> Held<I> {
    /// At most as many ranges as `items` has, of at most `stage_bytes` bytes together, copied to `stage`.
    pub fn new(mut items: I, stage: u64, stage_bytes: u64) -> Self {
        items.items().fill(None);
        Self { items, stage, stage_bytes, used: 0, count: 0 }
    }

    /// Holds back `bytes` bytes for `to`. Without room everything that is held comes into view first, and what is too
    /// long to hold at once.
    pub(crate) fn hold(&mut self, memory: &mut impl Memory, reason: Reason, to: u64, from: Source, bytes: u64) {
        if self.count == self.items.items().len() || bytes > self.stage_bytes - self.used {
            self.release(memory, |_| true);
        }
        if self.count == self.items.items().len() || bytes > self.stage_bytes {
            return from.copy(memory, to, bytes);
        }
        let at = self.stage + self.used;
        from.copy(memory, at, bytes);
        self.used += bytes;
        if let Some(item) = self.items.items().get_mut(self.count) {
            *item = Some(Item { reason, to, at, bytes });
            self.count += 1;
        }
    }

    /// Puts into place what `chosen` says, oldest first.
    pub(crate) fn release(&mut self, memory: &mut impl Memory, mut chosen: impl FnMut(&Item) -> bool) {
        let mut kept = 0;
        for index in 0..self.count {
            let Some(item) = self.items.items().get_mut(index).and_then(Option::take) else { continue };
            if chosen(&item) {
                memory.copy(item.to, item.at, item.bytes);
            } else if let Some(place) = self.items.items().get_mut(kept) {
                *place = Some(item);
                kept += 1;
            }
        }
        self.count = kept;
        if kept == 0 {
            self.used = 0;
        }
    }

    /// Puts into place what is held for this reason.
    pub(crate) fn release_of(&mut self, memory: &mut impl Memory, reason: Reason) {
        self.release(memory, |item| item.reason == reason);
    }

    /// Puts into place what is held for this range, and all that came before: a read pushes what was written.
    pub(crate) fn release_range(&mut self, memory: &mut impl Memory, first: u64, bytes: u64) {
        let overlaps =
            |item: &Item| item.to < first.saturating_add(bytes) && first < item.to.saturating_add(item.bytes);
        let last = self
            .items
            .items()
            .iter()
            .take(self.count)
            .flatten()
            .filter(|item| overlaps(item))
            .map(|item| item.at)
            .max();
        if let Some(last) = last {
            self.release(memory, |item| item.at <= last);
        }
    }

    /// Puts into place what is held for this range of memory, before that memory goes.
    pub fn settle(&mut self, memory: &mut impl Memory, first: u64, bytes: u64) {
        self.release_range(memory, first, bytes);
    }

    /// Ranges that are held.
    pub fn count(&self) -> usize {
        self.count
    }
}

/// Where bytes come from.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Source {
    /// Memory.
    Memory(u64),
    /// An entry.
    Inline([u32; 7]),
}

impl Source {
    pub(crate) fn copy(self, memory: &mut impl Memory, to: u64, bytes: u64) {
        match self {
            Self::Memory(from) => memory.copy(to, from, bytes),
            Self::Inline(words) => memory.store_words(to, words, bytes as u32),
        }
    }
}
