// SPDX-License-Identifier: MIT OR Apache-2.0
//! The lanes by which a rank reaches a peer: copies, values and signals in order.

use crate::failure::Failure;
use crate::gpus::{Desk, Machine, Place};
use crate::inbox::{LANES, Message, Post};
use crate::process::{BUFFER_BYTES, MAX_SENDERS, Remote, SCRATCH_BYTES};
use crate::region::{Addition, Region, Segment, Span, Values};
use gin_gpu::copier::Ticket;
use gin_gpu::lane::{Lane, Mark};
use gin_gpu::{GpuError, Memory, MemoryKind, lock};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// The bytes from which on a transfer is large.
const LARGE: u64 = 256 << 10;

/// The maximum number of bytes of one copy. Longer transfers are split.
const MAX_COPY: u64 = 1 << 30;

/// The bytes of a lane's buffer for copies within a GPU.
const BUFFER: u64 = (BUFFER_BYTES - SCRATCH_BYTES) / LANES as u64;

/// The maximum number of ranks: a request has 16 bits for the lane.
pub(crate) const MAX_RANKS: usize = u16::MAX as usize / Pair::MARKS - 1;

/// The lanes by which a rank reaches a peer.
#[derive(Debug)]
pub(crate) struct Pair {
    lanes: [Box<dyn Lane>; LANES],
    /// The lane of the next large transfer.
    turn: usize,
    /// The last end of each lane, and of the desk for this pair.
    ends: [Ticket; Self::MARKS],
    receiver: Receiver,
    /// Memory of another GPU, or of the host if there is none, for copies within this GPU, which would need a free SM
    /// if they were direct: [`BUFFER`] bytes for each lane. `None` for another peer.
    buffer: Option<Arc<Memory>>,
}

/// The way of a signal that no lane of the pair can write itself, or that follows nothing.
#[derive(Debug)]
enum Receiver {
    /// The receiver's lane for signals, in this process.
    Desk(Arc<Desk>),
    /// The receiver's inbox, in another process.
    Post(Post),
}

/// A transfer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Transfer<'a> {
    pub(crate) to: Span<'a>,
    pub(crate) from: Span<'a>,
    pub(crate) bytes: u64,
    pub(crate) kind: Kind,
}

pub(crate) const EMPTY: Transfer<'static> = Transfer { to: Span::NONE, from: Span::NONE, bytes: 0, kind: Kind::Empty };

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Kind {
    /// No bytes.
    Empty,
    /// Between GPUs, or between a GPU and memory of the host.
    Between,
    /// Within a GPU.
    Within,
    /// At most 8 bytes of ordinary memory of the host, which may change when the call has returned.
    Inline,
}

/// A signal.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Signal<'a> {
    /// A word of a table.
    Table(Addition<'a>),
    /// Another word.
    Word { to: u64, amount: u64 },
    /// A word of a rank in another process.
    Message(Message),
}

impl Pair {
    /// The marks of a pair: one for each lane, and one for the desk.
    pub(crate) const MARKS: usize = LANES + 1;

    const DESK: usize = LANES;

    /// Makes the lanes from a GPU to another one, or to itself, and uses each way once. A GPU copies to itself through
    /// memory of GPU `other` of this process. Without one it copies through memory of rank `next` of another process.
    pub(crate) fn new(
        machine: &Machine,
        own: usize,
        peer: usize,
        other: Option<usize>,
        next: Option<&Remote>,
    ) -> Result<Self, GpuError> {
        let buffer = (own == peer).then(|| match (other, next) {
            (Some(other), _) => machine.gpus.memory(other, MemoryKind::Device, BUFFER_BYTES),
            (None, Some(next)) => Ok(next.buffer.clone()),
            (None, None) => machine.gpus.memory(own, MemoryKind::Pinned, BUFFER_BYTES),
        });
        let lane = |gpu| machine.gpus.lane(gpu);
        let lanes = [lane(own)?, lane(peer)?, lane(own)?, lane(peer)?];
        let receiver = Receiver::Desk(machine.desk(peer)?);
        let to = machine.scratch(peer)?.address() + 64;
        let kind = if own == peer { Kind::Within } else { Kind::Between };
        Self::with(machine, own, lanes, receiver, buffer.transpose()?, to, kind)
    }

    /// Does the same for a rank of another process.
    pub(crate) fn to_process(machine: &Machine, own: usize, rank: usize, peer: &Remote) -> Result<Self, GpuError> {
        let lane = || machine.gpus.lane(own);
        let lanes = [lane()?, lane()?, lane()?, lane()?];
        let place = BUFFER_BYTES - SCRATCH_BYTES + (rank % MAX_SENDERS) as u64 * 128;
        let (receiver, to) = (Receiver::Post(Post::new(peer.ring(rank))), peer.buffer.address() + place);
        Self::with(machine, own, lanes, receiver, None, to, Kind::Between)
    }

    fn with(
        machine: &Machine,
        own: usize,
        lanes: [Box<dyn Lane>; LANES],
        receiver: Receiver,
        buffer: Option<Arc<Memory>>,
        to: u64,
        kind: Kind,
    ) -> Result<Self, GpuError> {
        let mut pair = Self { lanes, turn: 0, ends: [0; Self::MARKS], receiver, buffer };
        let segment = |address| [Segment { address, bytes: 64 }];
        let (from, target) = (segment(machine.scratch(own)?.address()), segment(to));
        let (from, target) = (Span { segments: &from, offset: 0 }, Span { segments: &target, offset: 0 });
        let values = Values::of(to, &[0; 8]).unwrap_or_else(Values::none);
        for (lane, end) in pair.lanes.iter_mut().zip(&mut pair.ends) {
            let buffer = pair.buffer.as_ref().map(|memory| memory.address());
            // Safety: both GPUs' memory exists as long as the pair, and has 64 bytes there.
            unsafe {
                copy(&mut **lane, &Transfer { to: target, from, bytes: 64, kind }, buffer)?;
                lane.store(to, &[0; 4])?;
                lane.add(to, 0)?;
                *end = lane.finish(values.get())?;
            }
        }
        if let Receiver::Desk(desk) = &pair.receiver {
            // Safety: as above.
            pair.ends[Self::DESK] = unsafe { lock(&desk.lane).finish(values.get())? };
        }
        Ok(pair)
    }

    pub(crate) fn marks(&self) -> [Arc<Mark>; Self::MARKS] {
        std::array::from_fn(|index| self.mark(index).clone())
    }

    fn mark(&self, index: usize) -> &Arc<Mark> {
        match (self.lanes.get(index), &self.receiver) {
            (None, Receiver::Desk(desk)) => &desk.mark,
            // A pair without a desk has no ends of one.
            (lane, _) => lane.unwrap_or(&self.lanes[0]).mark(),
        }
    }

    fn is_in_flight(&self, index: usize) -> bool {
        !self.mark(index).has_reached(self.ends[index])
    }

    /// Returns the ends of all work in flight.
    pub(crate) fn in_flight(&self) -> Vec<(Arc<Mark>, Ticket)> {
        let indices = (0..Self::MARKS).filter(|&index| self.is_in_flight(index));
        indices.map(|index| (self.mark(index).clone(), self.ends[index])).collect()
    }

    /// Checks that no work in flight has failed.
    pub(crate) fn check(&self) -> Result<(), GpuError> {
        if let Receiver::Desk(desk) = &self.receiver
            && self.is_in_flight(Self::DESK)
        {
            lock(&desk.lane).check()?;
        }
        (0..LANES).filter(|&index| self.is_in_flight(index)).try_for_each(|index| self.lanes[index].check())
    }

    /// Sends messages that have waited for room in the inbox. Returns whether some still wait.
    pub(crate) fn drain(&mut self) -> bool {
        match &mut self.receiver {
            Receiver::Desk(_) => false,
            Receiver::Post(post) => post.drain(),
        }
    }

    /// Starts a transfer and its signal. Returns the mark and the number of its end. `backlog` is set if a message has
    /// to wait for room.
    ///
    /// # Safety
    /// - The memory exists until the end is reached, and all GPUs of the group reach it.
    pub(crate) unsafe fn start(
        &mut self,
        transfer: &Transfer<'_>,
        signal: Option<Signal<'_>>,
        backlog: &AtomicBool,
    ) -> Result<(usize, Ticket), GpuError> {
        // Safety of all: the caller's promise.
        let value = unsafe { transfer.value() };
        let mut values = match transfer.kind {
            Kind::Inline => Values::of(transfer.to.at(0).0, &value[..transfer.bytes as usize]),
            _ => Some(Values::none()),
        };
        // The desk's own work has an order. A signal that went to another lane would wait for it there, which took four
        // times as long with signals of 16 blocks.
        if matches!(transfer.kind, Kind::Empty | Kind::Inline)
            && let Some(values) = &mut values
            && !(0..LANES).any(|index| self.is_in_flight(index))
            && let Some(end) = unsafe { self.at_once(transfer, &value, values, &signal, backlog)? }
        {
            return Ok(end);
        }
        let index = if transfer.bytes < LARGE { 0 } else { self.turn };
        if transfer.bytes >= LARGE {
            self.turn = (self.turn + 1) % LANES;
        }
        if signal.is_some() {
            self.count_others(index)?;
        }
        self.ends[index] = unsafe { self.on_lane(index, transfer, &value, values, &signal)? };
        if let (Receiver::Post(post), Some(Signal::Message(message))) = (&mut self.receiver, signal) {
            post.counted(index, self.ends[index]);
            if post.send(message) {
                backlog.store(true, Ordering::Relaxed);
            }
        }
        Ok((index, self.ends[index]))
    }

    /// Has the other lanes count up for a signal on lane `index`, if they have work in flight behind their last counts.
    fn count_others(&mut self, index: usize) -> Result<(), GpuError> {
        for other in (0..LANES).filter(|&other| other != index) {
            let is_in_flight = self.is_in_flight(other);
            if let Receiver::Post(post) = &mut self.receiver
                && is_in_flight
                && post.is_behind(other, self.ends[other])
            {
                // Safety: the inbox exists as long as the pair.
                self.ends[other] = unsafe { self.lanes[other].finish(&[post.count(other)])? };
                post.counted(other, self.ends[other]);
            }
        }
        Ok(())
    }

    /// Writes values, and raises a signal, that follow nothing. Returns `None` if only a lane of the pair can do it.
    ///
    /// # Safety
    /// - As [`start`](Self::start).
    unsafe fn at_once(
        &mut self,
        transfer: &Transfer<'_>,
        value: &[u8; 8],
        values: &mut Values,
        signal: &Option<Signal<'_>>,
        backlog: &AtomicBool,
    ) -> Result<Option<(usize, Ticket)>, GpuError> {
        // Safety of all: the caller's promise.
        let ticket = match (&mut self.receiver, signal) {
            (_, None) if values.is_empty() => return Ok(Some((0, self.ends[0]))),
            (Receiver::Post(post), Some(Signal::Message(message))) => {
                if post.send(Message { bytes: transfer.bytes as usize, value: *value, ..*message }) {
                    backlog.store(true, Ordering::Relaxed);
                }
                return Ok(Some((0, self.ends[0])));
            }
            (Receiver::Desk(desk), None) => Some(unsafe { lock(&desk.lane).finish(values.get())? }),
            (Receiver::Desk(desk), Some(Signal::Table(addition))) => unsafe { addition.at_once(desk, values)? },
            _ => None,
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
        transfer: &Transfer<'_>,
        value: &[u8; 8],
        values: Option<Values>,
        signal: &Option<Signal<'_>>,
    ) -> Result<Ticket, GpuError> {
        let others: [Option<(Arc<Mark>, Ticket)>; Self::MARKS] = std::array::from_fn(|other| {
            // The receiver waits for the counts of all lanes.
            let waits = signal.is_some() && matches!(self.receiver, Receiver::Desk(_));
            let waits = waits && other != index && self.is_in_flight(other);
            waits.then(|| (self.mark(other).clone(), self.ends[other]))
        });
        let buffer = self.buffer.as_ref().map(|memory| memory.address() + index as u64 * BUFFER);
        let lane = &mut *self.lanes[index];
        // Safety of all: the caller's promise. The lane has a part of the buffer for itself.
        unsafe { copy(lane, transfer, buffer)? };
        if values.is_none() {
            unsafe { lane.store(transfer.to.at(0).0, &value[..transfer.bytes as usize])? };
        }
        let mut values = values.unwrap_or_else(Values::none);
        // A signal follows all earlier work of the pair.
        for (mark, ticket) in others.iter().flatten() {
            lane.wait(mark, *ticket)?;
        }
        if let (Receiver::Post(post), Some(_)) = (&self.receiver, signal) {
            values.push(post.count(index));
        }
        match signal {
            None | Some(Signal::Message(_)) => unsafe { lane.finish(values.get()) },
            Some(signal) => unsafe { signal.raise(lane, &mut values) },
        }
    }
}

/// Starts the copies of a transfer. `buffer`: [`BUFFER`] bytes outside the GPU, which only this lane uses, for a copy
/// within the GPU.
///
/// # Safety
/// - The memory exists until an end behind the copies is reached, and the lane's GPU reaches it.
unsafe fn copy(lane: &mut dyn Lane, transfer: &Transfer<'_>, buffer: Option<u64>) -> Result<(), GpuError> {
    let Transfer { bytes, kind, .. } = *transfer;
    let buffer = buffer.filter(|_| kind == Kind::Within);
    if matches!(kind, Kind::Empty | Kind::Inline) {
        return Ok(());
    }
    let chunk = if buffer.is_some() { BUFFER } else { MAX_COPY };
    let mut at = 0;
    while at < bytes {
        let ((to, to_bytes), (from, from_bytes)) = (transfer.to.at(at), transfer.from.at(at));
        let bytes = chunk.min(bytes - at).min(to_bytes).min(from_bytes);
        at += bytes;
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

impl Transfer<'_> {
    /// Reads the value of an inline transfer.
    ///
    /// # Safety
    /// - The source exists.
    unsafe fn value(&self) -> [u8; 8] {
        let mut value = [0; 8];
        if self.kind == Kind::Inline {
            let from: *const u8 = std::ptr::with_exposed_provenance(self.from.at(0).0 as usize);
            // Safety: the caller's promise; an inline transfer has at most 8 bytes.
            unsafe { std::ptr::copy_nonoverlapping(from, value.as_mut_ptr(), self.bytes as usize) };
        }
        value
    }
}

impl<'a> Signal<'a> {
    pub(crate) fn new(region: &'a Region, message: Message) -> Result<Self, Failure> {
        let Message { offset, amount, .. } = message;
        region.check("signal", offset, 8)?;
        let address = region.segments.first().map_or(0, |segment| segment.address);
        if !(address + offset).is_multiple_of(8) || region.place == Place::Cpu {
            let text = format!("no signal can be at offset {offset}, {:#x} at rank {}", address + offset, region.rank);
            return Err(Failure::argument(text));
        }
        if region.place == Place::Elsewhere {
            return Ok(Self::Message(message));
        }
        let to = region.span("signal", offset, 8)?.at(0).0;
        Ok(match &region.words {
            Some(words) => Self::Table(Addition { words, index: (offset / 8) as usize, to, amount }),
            None => Self::Word { to, amount },
        })
    }

    /// Raises a signal by a lane, behind `values`.
    ///
    /// # Safety
    /// - As [`Lane::finish`], for the word and the values.
    unsafe fn raise(&self, lane: &mut dyn Lane, values: &mut Values) -> Result<Ticket, GpuError> {
        // Safety of all: the caller's promise.
        match *self {
            Self::Table(addition) => unsafe { addition.by(lane, values) },
            Self::Word { to, amount } => unsafe {
                if !values.is_empty() {
                    lane.finish(values.get())?;
                }
                lane.add(to, amount)?;
                lane.finish(&[])
            },
            // The receiver raises it.
            Self::Message(_) => unsafe { lane.finish(values.get()) },
        }
    }
}

/// Writes the value of a message of another process to region `to`, and raises its signal in `region`.
pub(crate) fn raise(
    lane: &mut dyn Lane,
    region: &Region,
    to: Option<&Region>,
    message: Message,
) -> Result<Ticket, Failure> {
    let signal = Signal::new(region, message)?;
    let mut values = Values::none();
    // Safety of all: the regions were open while the inbox was locked. A rank that closes one then locks the inbox, and
    // waits for the end.
    if let Some(to) = to {
        let (bytes, to) = (&message.value[..message.bytes], to.span("value", message.to.1, message.bytes as u64)?);
        match Values::of(to.at(0).0, bytes) {
            Some(whole) => values = whole,
            None => unsafe { lane.store(to.at(0).0, bytes) }.map_err(Failure::cuda)?,
        }
    }
    unsafe { signal.raise(lane, &mut values) }.map_err(Failure::cuda)
}

/// Uses a lane once as `raise` does, because the driver may allocate at the first use.
pub(crate) fn use_once(machine: &Machine, gpu: usize, lane: &mut dyn Lane) -> Result<Ticket, GpuError> {
    let word = machine.scratch(gpu)?.address() + 128;
    let values = Values::of(word, &[0; 8]).unwrap_or_else(Values::none);
    // Safety: the scratch memory has 256 bytes, and exists as long as the process.
    unsafe {
        lane.add(word, 0)?;
        lane.finish(values.get())
    }
}
