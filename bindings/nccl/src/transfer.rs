// SPDX-License-Identifier: MIT OR Apache-2.0
//! Puts, gets and signals.

use crate::gpus::{Desk, Machine, Place};
use crate::group::Coll;
use crate::region::{Addition, Handle, Region, Values};
use crate::table::Failure;
use gin_gpu::copier::Ticket;
use gin_gpu::lane::{Lane, Mark};
use gin_gpu::{GpuError, Memory, MemoryKind, lock};
use std::sync::Arc;

/// The lanes of a pair: one of the rank's own GPU, and one of the peer's. Large transfers take turns, so that one copy
/// engine copies while the other one is between two copies.
const LANES: usize = 2;

/// The bytes from which on a transfer is large.
const LARGE: u64 = 256 << 10;

/// The maximum number of bytes of one copy. Longer transfers are split.
const MAX_COPY: u64 = 1 << 30;

/// The bytes of a lane's buffer for copies within a GPU.
const BUFFER: u64 = 1 << 20;

/// The maximum number of ranks: a request has 16 bits for the lane.
pub(crate) const MAX_RANKS: usize = u16::MAX as usize / Pair::MARKS - 1;

/// The bits of a request for the number of its end.
const TICKET_BITS: u32 = 48;

/// A request: the number of a lane plus 1, and the number of an end, so that the question whether it is done needs no
/// table of requests, and there is room for any number of them.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Request(pub(crate) u64);

impl Request {
    fn new(peer: usize, mark: usize, ticket: Ticket) -> Self {
        let lane = (peer * Pair::MARKS + mark + 1) as u64;
        Self(lane << TICKET_BITS | ticket & ((1 << TICKET_BITS) - 1))
    }

    /// Returns whether the request is done.
    pub(crate) fn is_done(self, coll: &Coll) -> Result<bool, Failure> {
        let lane = (self.0 >> TICKET_BITS) as usize;
        let mark = lane.checked_sub(1).and_then(|lane| {
            let marks = coll.marks.get(lane / Pair::MARKS)?;
            Some(&marks[lane % Pair::MARKS])
        });
        let Some(mark) = mark else {
            return Err(Failure::argument(format!("{:#x} is no request of rank {}", self.0, coll.rank)));
        };
        Ok(mark.has_reached(self.0 & ((1 << TICKET_BITS) - 1)))
    }
}

/// Bytes of a registration: the handle, and the offset.
pub(crate) type Part<'a> = (&'a Handle, u64);

/// The lanes by which a rank reaches a peer.
#[derive(Debug)]
pub(crate) struct Pair {
    lanes: [Box<dyn Lane>; LANES],
    /// The lane of the next large transfer.
    turn: usize,
    /// The last end of each lane, and of the desk for this pair.
    ends: [Ticket; Self::MARKS],
    desk: Arc<Desk>,
    /// Memory of another GPU, or of the host if there is none, for copies within this GPU, which would need a free SM
    /// if they were direct: [`BUFFER`] bytes for each lane. `None` for another peer.
    buffer: Option<Arc<Memory>>,
}

/// A transfer with addresses.
#[derive(Clone, Copy, Debug)]
struct Transfer {
    to: u64,
    from: u64,
    bytes: u64,
    kind: Kind,
}

const EMPTY: Transfer = Transfer { to: 0, from: 0, bytes: 0, kind: Kind::Empty };

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Kind {
    /// No bytes.
    Empty,
    /// Between GPUs, or between a GPU and memory of the host.
    Between,
    /// Within a GPU.
    Within,
    /// At most 8 bytes of ordinary memory of the host, which may change when the call has returned.
    Inline,
}

/// A signal with the word's address.
#[derive(Clone, Copy, Debug)]
struct Signal<'a> {
    to: u64,
    amount: u64,
    table: Option<Addition<'a>>,
}

impl Pair {
    /// The marks of a pair: those of its lanes, and that of the desk.
    pub(crate) const MARKS: usize = LANES + 1;

    const DESK: usize = LANES;

    /// Makes the lanes from a GPU to one of `gpus`, and uses each way once.
    pub(crate) fn new(machine: &Machine, gpus: &[usize], own: usize, peer: usize) -> Result<Self, GpuError> {
        let buffer = (own == peer).then(|| {
            let other = gpus.iter().find(|&&gpu| gpu != own);
            let kind = if other.is_some() { MemoryKind::Device } else { MemoryKind::Pinned };
            machine.gpus.memory(*other.unwrap_or(&own), kind, BUFFER * LANES as u64)
        });
        let mut pair = Self {
            buffer: buffer.transpose()?,
            lanes: [machine.gpus.lane(own)?, machine.gpus.lane(peer)?],
            turn: 0,
            ends: [0; Self::MARKS],
            desk: machine.desk(peer)?,
        };
        let (from, to) = (machine.scratch(own)?.address(), machine.scratch(peer)?.address() + 64);
        let values = Values::of(to, &[0; 8]).unwrap_or_else(Values::none);
        for (lane, end) in pair.lanes.iter_mut().zip(&mut pair.ends) {
            let kind = if own == peer { Kind::Within } else { Kind::Between };
            let buffer = pair.buffer.as_ref().map(|memory| memory.address());
            // Safety: both GPUs' scratch memory exists as long as the process, and has 256 bytes.
            unsafe {
                copy(&mut **lane, &Transfer { to, from, bytes: 64, kind }, buffer)?;
                lane.store(to, &[0; 4])?;
                lane.add(to, 0)?;
                *end = lane.finish(values.get())?;
            }
        }
        // Safety: as above.
        pair.ends[Self::DESK] = unsafe { lock(&pair.desk.lane).finish(values.get())? };
        Ok(pair)
    }

    pub(crate) fn marks(&self) -> [Arc<Mark>; Self::MARKS] {
        std::array::from_fn(|index| self.mark(index).clone())
    }

    fn mark(&self, index: usize) -> &Arc<Mark> {
        self.lanes.get(index).map_or(&self.desk.mark, |lane| lane.mark())
    }

    fn is_under_way(&self, index: usize) -> bool {
        !self.mark(index).has_reached(self.ends[index])
    }

    /// Returns the ends of all that is under way.
    pub(crate) fn under_way(&self) -> Vec<(Arc<Mark>, Ticket)> {
        let indices = (0..Self::MARKS).filter(|&index| self.is_under_way(index));
        indices.map(|index| (self.mark(index).clone(), self.ends[index])).collect()
    }

    /// Checks that nothing under way has failed.
    pub(crate) fn check(&self) -> Result<(), GpuError> {
        if self.is_under_way(Self::DESK) {
            lock(&self.desk.lane).check()?;
        }
        (0..LANES).filter(|&index| self.is_under_way(index)).try_for_each(|index| self.lanes[index].check())
    }

    /// Starts a transfer and its signal. Returns the mark and the number of its end.
    ///
    /// # Safety
    /// - The memory exists until the end is reached, and all GPUs of the group reach it.
    unsafe fn start(&mut self, transfer: &Transfer, signal: Option<Signal<'_>>) -> Result<(usize, Ticket), GpuError> {
        // Safety of all: the caller's promise.
        let value = unsafe { transfer.value() };
        let mut values = match transfer.kind {
            Kind::Inline => Values::of(transfer.to, &value[..transfer.bytes as usize]),
            _ => Some(Values::none()),
        };
        if matches!(transfer.kind, Kind::Empty | Kind::Inline)
            && let Some(values) = &mut values
            && !(0..Self::MARKS).any(|index| self.is_under_way(index))
            && let Some(end) = unsafe { self.at_desk(values, &signal)? }
        {
            return Ok(end);
        }
        let index = if transfer.bytes < LARGE { 0 } else { self.turn };
        if transfer.bytes >= LARGE {
            self.turn = (self.turn + 1) % LANES;
        }
        self.ends[index] = unsafe { self.on_lane(index, transfer, &value, values, &signal)? };
        Ok((index, self.ends[index]))
    }

    /// Writes values, and raises a signal, that follow nothing. Returns `None` for a signal that only a lane can raise.
    ///
    /// # Safety
    /// - As [`start`](Self::start).
    unsafe fn at_desk(
        &mut self,
        values: &mut Values,
        signal: &Option<Signal<'_>>,
    ) -> Result<Option<(usize, Ticket)>, GpuError> {
        // Safety of all: the caller's promise.
        let ticket = match signal {
            None if values.is_empty() => return Ok(Some((0, self.ends[0]))),
            None => Some(unsafe { lock(&self.desk.lane).finish(values.get())? }),
            Some(Signal { table: Some(addition), .. }) => unsafe { addition.at_once(&self.desk, values)? },
            Some(Signal { table: None, .. }) => None,
        };
        Ok(ticket.map(|ticket| {
            self.ends[Self::DESK] = ticket;
            (Self::DESK, ticket)
        }))
    }

    /// Starts a transfer and its signal on a lane. `values` are the writes of a value; `None` if it needs a copy.
    ///
    /// # Safety
    /// - As [`start`](Self::start).
    unsafe fn on_lane(
        &mut self,
        index: usize,
        transfer: &Transfer,
        value: &[u8; 8],
        values: Option<Values>,
        signal: &Option<Signal<'_>>,
    ) -> Result<Ticket, GpuError> {
        let others: [Option<(Arc<Mark>, Ticket)>; Self::MARKS] = std::array::from_fn(|other| {
            let waits = signal.is_some() && other != index && self.is_under_way(other);
            waits.then(|| (self.mark(other).clone(), self.ends[other]))
        });
        let buffer = self.buffer.as_ref().map(|memory| memory.address() + index as u64 * BUFFER);
        let lane = &mut *self.lanes[index];
        // Safety of all: the caller's promise. The lane has a part of the buffer for itself.
        unsafe { copy(lane, transfer, buffer)? };
        if values.is_none() {
            unsafe { lane.store(transfer.to, &value[..transfer.bytes as usize])? };
        }
        let mut values = values.unwrap_or_else(Values::none);
        // A signal follows all earlier work of the pair.
        for (mark, ticket) in others.iter().flatten() {
            lane.wait(mark, *ticket)?;
        }
        match signal {
            None => unsafe { lane.finish(values.get()) },
            Some(Signal { table: Some(addition), .. }) => unsafe { addition.by(lane, &mut values) },
            Some(Signal { to, amount, table: None }) => unsafe {
                if !values.is_empty() {
                    lane.finish(values.get())?;
                }
                lane.add(*to, *amount)?;
                lane.finish(&[])
            },
        }
    }
}

/// Starts the copies of a transfer. `buffer`: [`BUFFER`] bytes outside the GPU, which only this lane uses, for a copy
/// within the GPU.
///
/// # Safety
/// - The memory exists until an end behind the copies is reached, and the lane's GPU reaches it.
unsafe fn copy(lane: &mut dyn Lane, transfer: &Transfer, buffer: Option<u64>) -> Result<(), GpuError> {
    let Transfer { to, from, bytes, kind } = *transfer;
    let buffer = buffer.filter(|_| kind == Kind::Within);
    if matches!(kind, Kind::Empty | Kind::Inline) {
        return Ok(());
    }
    let chunk = if buffer.is_some() { BUFFER } else { MAX_COPY };
    for at in (0..bytes).step_by(chunk as usize) {
        let (to, from, bytes) = (to + at, from + at, chunk.min(bytes - at));
        // Safety of all: the caller's promise. Copies of a lane follow each other, so one buffer is enough.
        unsafe {
            if let Some(buffer) = buffer {
                lane.copy(buffer, from, bytes)?;
                lane.copy(to, buffer, bytes)?;
            } else {
                lane.copy(to, from, bytes)?;
            }
        }
    }
    Ok(())
}

impl Transfer {
    /// Reads the value of an inline transfer.
    ///
    /// # Safety
    /// - The source exists.
    unsafe fn value(&self) -> [u8; 8] {
        let mut value = [0; 8];
        if self.kind == Kind::Inline {
            let from: *const u8 = std::ptr::with_exposed_provenance(self.from as usize);
            // Safety: the caller's promise; an inline transfer has at most 8 bytes.
            unsafe { std::ptr::copy_nonoverlapping(from, value.as_mut_ptr(), self.bytes as usize) };
        }
        value
    }
}

impl Coll {
    /// Starts a put to a peer, if it has bytes, and then a signal there, if there is one: part and amount.
    pub(crate) fn put(
        &self,
        peer: u32,
        bytes: u64,
        to: Option<Part<'_>>,
        from: Option<Part<'_>>,
        signal: Option<(Part<'_>, u64)>,
    ) -> Result<Request, Failure> {
        let peer = self.peer(peer)?;
        // A region may have to be waited for, so it is found before the pair is locked.
        let parts = match (bytes, to, from) {
            (0, ..) => None,
            (_, Some(to), Some((from, offset))) => Some((self.of(peer, to)?, (&*from.own, offset))),
            _ => return Err(Failure::argument("a put with bytes, but without a handle of both windows")),
        };
        let word = signal.map(|(part, amount)| Ok((self.of(peer, part)?, amount))).transpose()?;
        self.start(peer, || {
            let transfer = parts.map_or(Ok(EMPTY), |(to, from)| transfer(to, from, bytes))?;
            let signal = word.map(|((region, offset), amount)| Signal::new(region, offset, amount)).transpose()?;
            Ok((transfer, signal))
        })
    }

    /// Starts a get from a peer.
    pub(crate) fn get(&self, peer: u32, bytes: u64, from: Part<'_>, to: Part<'_>) -> Result<Request, Failure> {
        let peer = self.peer(peer)?;
        let from = self.of(peer, from)?;
        self.start(peer, || Ok((transfer((&to.0.own, to.1), from, bytes)?, None)))
    }

    fn peer(&self, peer: u32) -> Result<usize, Failure> {
        let known = self.pairs.len();
        let peer = Some(peer as usize).filter(|&peer| peer < known);
        peer.ok_or_else(|| Failure::argument(format!("the communicator has {known} ranks")))
    }

    /// Returns the region of a peer that belongs to a part, and the offset in it.
    fn of<'a>(&self, peer: usize, (handle, offset): Part<'a>) -> Result<(&'a Region, u64), Failure> {
        Ok((handle.of(peer, &self.group)?, offset))
    }

    /// Checks ranges by `check`, and starts the transfer and its signal.
    fn start<'a>(
        &self,
        peer: usize,
        check: impl FnOnce() -> Result<(Transfer, Option<Signal<'a>>), Failure>,
    ) -> Result<Request, Failure> {
        let mut pair = lock(&self.pairs[peer]);
        let (transfer, signal) = check()?;
        // Safety: the regions were open while the pair was locked. A rank that closes one then locks the pair, and
        // waits for all that it has started.
        let started = unsafe { pair.start(&transfer, signal) };
        let (mark, ticket) = started.map_err(Failure::cuda)?;
        Ok(Request::new(peer, mark, ticket))
    }
}

impl<'a> Signal<'a> {
    fn new(region: &'a Region, offset: u64, amount: u64) -> Result<Self, Failure> {
        let to = region.at("signal", offset, 8)?;
        if !to.is_multiple_of(8) || region.place == Place::Cpu {
            let text = format!("no signal can be at offset {offset}, {to:#x} at rank {}", region.rank);
            return Err(Failure::argument(text));
        }
        let words = region.words.as_ref();
        let table = words.map(|words| Addition { words, index: (offset / 8) as usize, to, amount });
        Ok(Self { to, amount, table })
    }
}

/// Checks ranges and places of a transfer.
fn transfer(to: (&Region, u64), from: (&Region, u64), bytes: u64) -> Result<Transfer, Failure> {
    let addresses = (to.0.at("destination", to.1, bytes)?, from.0.at("source", from.1, bytes)?);
    let kind = match (to.0.place, from.0.place) {
        _ if bytes == 0 => Kind::Empty,
        (Place::Cpu, _) => {
            let text = format!("rank {} has registered memory that GPUs do not reach as a destination", to.0.rank);
            return Err(Failure::argument(text));
        }
        (_, Place::Cpu) if bytes <= 8 => Kind::Inline,
        (_, Place::Cpu) => {
            let text = format!("{bytes} bytes of memory that GPUs do not reach; the limit is 8 bytes");
            return Err(Failure::argument(text));
        }
        (Place::Gpu(to), Place::Gpu(from)) if to == from => Kind::Within,
        _ => Kind::Between,
    };
    Ok(Transfer { to: addresses.0, from: addresses.1, bytes, kind })
}
