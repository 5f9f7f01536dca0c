// SPDX-License-Identifier: MIT OR Apache-2.0
//! Writes that have completed but are not visible yet.
//!
//! Bytes that a NIC wrote may still be on their way to memory when its completion is visible. The engine copies them to
//! a staging area, as their source may change, and puts them into place when something pushes them, oldest first.

use crate::memory::Memory;

/// The reason why bytes are held back.
#[repr(C, u32)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Reason {
    /// Data of a READ of this queue pair.
    Read(u32),
    /// Data of a WRITE that this queue pair received.
    Write(u32),
}

/// A range held back, or a free slot for one.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Item {
    reason: Reason,
    to: u64,
    at: u64,
    bytes: u64,
}

impl Item {
    /// A free slot.
    pub const ROOM: Self = Self { reason: Reason::Read(0), to: 0, at: 0, bytes: 0 };
}

/// The amount held back.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Usage {
    bytes: u64,
    ranges: u64,
}

impl Usage {
    /// Returns the number of ranges held back.
    pub const fn ranges(&self) -> u64 {
        self.ranges
    }
}

/// The ranges held back, in the order of their arrival.
#[derive(Debug)]
pub struct Held<'a> {
    items: &'a mut [Item],
    usage: &'a mut Usage,
    stage: u64,
    stage_bytes: u64,
}

impl<'a> Held<'a> {
    /// Creates a store for at most `items.len()` ranges of at most `stage_bytes` bytes in total, copied to `stage`.
    /// `usage` is the amount held back already.
    pub const fn new(items: &'a mut [Item], usage: &'a mut Usage, stage: u64, stage_bytes: u64) -> Self {
        Self { items, usage, stage, stage_bytes }
    }

    /// Holds back `bytes` bytes for `to`. If there is no room, everything held back becomes visible first. A range that
    /// is too long becomes visible at once.
    pub(crate) fn hold(&mut self, memory: &mut impl Memory, reason: Reason, to: u64, from: Source, bytes: u64) {
        let rooms = self.items.len() as u64;
        if self.usage.ranges == rooms || bytes > self.stage_bytes - self.usage.bytes {
            self.release(memory, |_| true);
        }
        if self.usage.ranges == rooms || bytes > self.stage_bytes {
            return from.copy(memory, to, bytes);
        }
        let at = self.stage + self.usage.bytes;
        from.copy(memory, at, bytes);
        self.usage.bytes += bytes;
        if let Some(item) = self.items.get_mut(self.usage.ranges as usize) {
            *item = Item { reason, to, at, bytes };
            self.usage.ranges += 1;
        }
    }

    /// Puts the ranges that `chosen` selects into place, oldest first.
    pub(crate) fn release(&mut self, memory: &mut impl Memory, mut chosen: impl FnMut(&Item) -> bool) {
        let mut kept = 0;
        for index in 0..self.usage.ranges as usize {
            let Some(&item) = self.items.get(index) else { break };
            if chosen(&item) {
                memory.copy(item.to, item.at, item.bytes);
            } else if let Some(place) = self.items.get_mut(kept) {
                *place = item;
                kept += 1;
            }
        }
        self.usage.ranges = kept as u64;
        if kept == 0 {
            self.usage.bytes = 0;
        }
    }

    /// Puts the ranges held for this reason into place.
    pub(crate) fn release_of(&mut self, memory: &mut impl Memory, reason: Reason) {
        self.release(memory, |item| item.reason == reason);
    }

    /// Puts the ranges that overlap this range into place, and all earlier ones: a read pushes earlier writes.
    pub(crate) fn release_range(&mut self, memory: &mut impl Memory, first: u64, bytes: u64) {
        let overlaps =
            |item: &Item| item.to < first.saturating_add(bytes) && first < item.to.saturating_add(item.bytes);
        let held = self.items.iter().take(self.usage.ranges as usize);
        let last = held.filter(|item| overlaps(item)).map(|item| item.at).max();
        if let Some(last) = last {
            self.release(memory, |item| item.at <= last);
        }
    }

    /// Puts the ranges that overlap this range of memory into place, before the memory is freed.
    pub fn settle(&mut self, memory: &mut impl Memory, first: u64, bytes: u64) {
        self.release_range(memory, first, bytes);
    }
}

/// The source of bytes.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Source {
    /// Memory at this address.
    Memory(u64),
    /// The words of an entry.
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
