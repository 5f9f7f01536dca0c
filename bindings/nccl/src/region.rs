// SPDX-License-Identifier: MIT OR Apache-2.0
//! Registered memory, and the counts behind signals.
//!
//! All ranks register in the same order, so the n-th region of a rank belongs to the n-th of every other one. A rank's
//! handle names the region of each rank.

use crate::failure::Failure;
use crate::gpus::{Desk, Place};
use crate::page::Gone;
use gin_gpu::copier::Ticket;
use gin_gpu::lane::{Lane, Mark, Value};
use gin_gpu::{GpuError, Memory, lock};
use std::sync::{Arc, Mutex, OnceLock};

/// Bytes of a region that have consecutive addresses in this process.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Segment {
    pub(crate) address: u64,
    pub(crate) bytes: u64,
}

/// Memory that a rank has registered.
#[derive(Debug)]
pub(crate) struct Region {
    pub(crate) rank: usize,
    pub(crate) bytes: u64,
    pub(crate) place: Place,
    /// All bytes, in order: one segment for memory of this process, one for each allocation of another process.
    pub(crate) segments: Box<[Segment]>,
    /// The counts of a table of signals that only the plugin writes.
    pub(crate) words: Option<Words>,
    pub(crate) gone: Gone,
    /// The files of memory of this process, or the mappings of memory of another one.
    pub(crate) memory: Vec<Arc<Memory>>,
}

impl Region {
    /// Checks that bytes are in the region. `what` names them in an error.
    pub(crate) fn check(&self, what: &str, offset: u64, bytes: u64) -> Result<(), Failure> {
        if self.gone.is_set() {
            return Err(Failure::argument(format!("rank {} has deregistered the memory of the {what}", self.rank)));
        }
        match offset.checked_add(bytes) {
            Some(end) if end <= self.bytes => Ok(()),
            _ => Err(Failure::argument(format!(
                "the {what}, {bytes} bytes at offset {offset}, is not in the {} bytes that rank {} has registered",
                self.bytes, self.rank
            ))),
        }
    }

    /// Returns the bytes from an offset on. `what` names them in an error.
    pub(crate) fn span(&self, what: &str, offset: u64, bytes: u64) -> Result<Span<'_>, Failure> {
        self.check(what, offset, bytes)?;
        if self.segments.is_empty() {
            let text = format!(
                "the {what} is in memory of rank {}, in another process, that no other process can map; allocate it by \
                 ncclMemAlloc",
                self.rank
            );
            return Err(Failure::argument(text));
        }
        Ok(Span { segments: &self.segments, offset })
    }
}

/// Bytes of a region from an offset on.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Span<'a> {
    pub(crate) segments: &'a [Segment],
    pub(crate) offset: u64,
}

impl Span<'_> {
    pub(crate) const NONE: Self = Self { segments: &[], offset: 0 };

    /// Returns the address of byte `at`, and the number of bytes that follow at consecutive addresses.
    pub(crate) fn at(&self, at: u64) -> (u64, u64) {
        let mut offset = self.offset + at;
        for segment in self.segments {
            if offset < segment.bytes {
                return (segment.address + offset, segment.bytes - offset);
            }
            offset -= segment.bytes;
        }
        (0, 0)
    }
}

/// The handle of a registration, which NCCL passes back.
#[derive(Debug)]
pub(crate) struct Handle {
    /// The number of the registration on its rank.
    pub(crate) number: usize,
    pub(crate) own: Arc<Region>,
    /// The regions of the ranks, as they were found.
    ranks: Box<[OnceLock<Arc<Region>>]>,
}

impl Handle {
    pub(crate) fn new(number: usize, own: Arc<Region>, ranks: usize) -> Self {
        let all: Box<[OnceLock<Arc<Region>>]> = (0..ranks).map(|_| OnceLock::new()).collect();
        // The place is new.
        let _ = all[own.rank].set(own.clone());
        Self { number, own, ranks: all }
    }

    /// Returns the region of a rank, which `find` finds the first time.
    pub(crate) fn of(
        &self,
        rank: usize,
        find: impl FnOnce() -> Result<Arc<Region>, Failure>,
    ) -> Result<&Region, Failure> {
        let known = &self.ranks[rank];
        if let Some(region) = known.get() {
            return Ok(region);
        }
        let found = find()?;
        Ok(known.get_or_init(|| found))
    }
}

/// The words of a table of signals. Each word of GPU memory holds the sum of all additions, or will hold it once lanes
/// have written.
///
/// Claim: a word takes the sums in their order. Because:
/// 1. The mutex is held from the addition until the write has its place in a lane. So additions and places of writes
///    have one order.
/// 2. Writes of one lane have the lane's order. A write of another lane is behind a wait for the end of the last one.
///
/// A lane waits only for ends that have their places already, so waits form no circle, also where the GPU serves two
/// streams in the order of their work.
#[derive(Debug)]
pub(crate) struct Words(Mutex<Box<[Word]>>);

/// A word.
#[derive(Clone, Debug, Default)]
struct Word {
    sum: u64,
    /// The end behind the last write.
    last: Option<(Arc<Mark>, Ticket)>,
}

impl Word {
    /// Returns the end of a write that is in flight on a lane with another mark.
    fn in_flight(&self, mark: &Arc<Mark>) -> Option<&(Arc<Mark>, Ticket)> {
        self.last.as_ref().filter(|(other, ticket)| !Arc::ptr_eq(other, mark) && !other.has_reached(*ticket))
    }

    fn wrote(&mut self, mark: &Arc<Mark>, ticket: Ticket) {
        match &mut self.last {
            Some((last, number)) if Arc::ptr_eq(last, mark) => *number = ticket,
            last => *last = Some((mark.clone(), ticket)),
        }
    }
}

/// An addition to a word of a table.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Addition<'a> {
    pub(crate) words: &'a Words,
    pub(crate) index: usize,
    pub(crate) to: u64,
    pub(crate) amount: u64,
}

impl Words {
    pub(crate) fn new(count: usize) -> Self {
        Self(Mutex::new(vec![Word::default(); count].into()))
    }
}

impl Addition<'_> {
    /// Adds by a write of a lane, behind all work of the lane and behind `values`.
    ///
    /// # Safety
    /// - As [`Lane::finish`], for the word and the values.
    pub(crate) unsafe fn by(&self, lane: &mut dyn Lane, values: &mut Values) -> Result<Ticket, GpuError> {
        let mut words = lock(&self.words.0);
        let word = &mut words[self.index];
        if let Some((mark, ticket)) = word.in_flight(lane.mark()) {
            lane.wait(mark, *ticket)?;
        }
        // Safety: the caller's promise.
        unsafe { self.write(word, lane, values) }
    }

    /// Adds by a write of the receiver's own lane, for a sender without work in flight. Returns `None` if a write of
    /// another lane is in flight: the lane serves all senders, so it does not wait.
    ///
    /// # Safety
    /// - As [`Lane::finish`], for the word and the values.
    pub(crate) unsafe fn at_once(&self, desk: &Desk, values: &mut Values) -> Result<Option<Ticket>, GpuError> {
        let mut words = lock(&self.words.0);
        let word = &mut words[self.index];
        if word.in_flight(&desk.mark).is_some() {
            return Ok(None);
        }
        // Safety: the caller's promise.
        unsafe { self.write(word, &mut **lock(&desk.lane), values) }.map(Some)
    }

    /// # Safety
    /// - As [`Lane::finish`], for the word and the values.
    unsafe fn write(&self, word: &mut Word, lane: &mut dyn Lane, values: &mut Values) -> Result<Ticket, GpuError> {
        let sum = word.sum.wrapping_add(self.amount);
        values.push(Value::Word { to: self.to, value: sum });
        // Safety: the caller's promise.
        let ticket = unsafe { lane.finish(values.get())? };
        word.sum = sum;
        word.wrote(lane.mark(), ticket);
        Ok(ticket)
    }
}

/// A few values that a lane writes at one end.
#[derive(Debug)]
pub(crate) struct Values {
    all: [Value; gin_gpu::lane::MAX_VALUES],
    count: usize,
}

impl Values {
    pub(crate) fn none() -> Self {
        Self { all: [Value::Small { to: 0, value: 0 }; gin_gpu::lane::MAX_VALUES], count: 0 }
    }

    /// Returns the writes of a value of 4 or 8 bytes whose address they fit; `None` for other values.
    pub(crate) fn of(to: u64, bytes: &[u8]) -> Option<Self> {
        let mut values = Self::none();
        if let (Ok(word), true) = (bytes.try_into(), to.is_multiple_of(8)) {
            values.push(Value::Word { to, value: u64::from_le_bytes(word) });
        } else if bytes.len().is_multiple_of(4) && to.is_multiple_of(4) {
            for (part, to) in bytes.chunks_exact(4).zip((to..).step_by(4)) {
                let value = part.iter().rev().fold(0, |value, &byte| value << 8 | u32::from(byte));
                values.push(Value::Small { to, value });
            }
        } else {
            return None;
        }
        Some(values)
    }

    /// Adds a value. There is room: two parts of a value, and a signal.
    pub(crate) fn push(&mut self, value: Value) {
        self.all[self.count] = value;
        self.count += 1;
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.count == 0
    }

    pub(crate) fn get(&self) -> &[Value] {
        &self.all[..self.count]
    }
}
