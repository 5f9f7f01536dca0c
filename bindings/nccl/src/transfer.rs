// SPDX-License-Identifier: MIT OR Apache-2.0
//! Puts, gets and signals.

use crate::failure::Failure;
use crate::gpus::Place;
use crate::group::Coll;
use crate::inbox::{LANES, Message};
use crate::pair::{EMPTY, Kind, Pair, Signal, Transfer};
use crate::process::Remote;
use crate::region::{Handle, Region};
use gin_gpu::copier::Ticket;
use gin_gpu::lock;

/// The bits of a request for the number of its end.
const TICKET_BITS: u32 = 48;

/// A request: the number of a lane plus 1, and the number of an end. So `test` needs no table of requests, and there is
/// room for any number of them.
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
        let word = signal.map(|((handle, offset), amount)| {
            let region = self.of(peer, (handle, offset))?.0;
            let to = to.map_or((0, 0), |(to, offset)| (to.number as u64, offset));
            let (region_number, counts) = (handle.number as u64, [0; LANES]);
            Ok((region, Message { region: region_number, offset, amount, counts, to, bytes: 0, value: [0; 8] }))
        });
        let word = word.transpose()?;
        self.start(peer, || {
            let transfer = parts.map_or(Ok(EMPTY), |(to, from)| transfer(to, from, bytes))?;
            let signal = word.map(|(region, message)| Signal::new(region, message)).transpose()?;
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
        Ok((self.region(handle, peer)?, offset))
    }

    /// Checks ranges by `check`, and starts the transfer and its signal.
    fn start<'a>(
        &self,
        peer: usize,
        check: impl FnOnce() -> Result<(Transfer<'a>, Option<Signal<'a>>), Failure>,
    ) -> Result<Request, Failure> {
        self.remotes[peer].as_ref().map_or(Ok(()), Remote::check_known)?;
        let mut pair = lock(&self.pairs[peer]);
        let (transfer, signal) = check()?;
        // Safety: the regions were open while the pair was locked. A rank of this process that closes one then locks
        // the pair, and waits for all that it has started. Mappings of memory of other processes stay as long as the
        // handle, and this rank waits in the same way before it frees that.
        let started = unsafe { pair.start(&transfer, signal, &self.has_backlog) };
        let (mark, ticket) = started.map_err(Failure::cuda)?;
        Ok(Request::new(peer, mark, ticket))
    }
}

/// Checks ranges and places of a transfer.
fn transfer<'a>(to: (&'a Region, u64), from: (&'a Region, u64), bytes: u64) -> Result<Transfer<'a>, Failure> {
    to.0.check("destination", to.1, bytes)?;
    from.0.check("source", from.1, bytes)?;
    let kind = match (to.0.place, from.0.place) {
        _ if bytes == 0 => return Ok(EMPTY),
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
    let (to, from) = (to.0.span("destination", to.1, bytes)?, from.0.span("source", from.1, bytes)?);
    if kind == Kind::Inline && to.at(0).1 < bytes {
        return Err(Failure::argument(format!("a value of {bytes} bytes, in two allocations")));
    }
    Ok(Transfer { to, from, bytes, kind })
}
