// SPDX-License-Identifier: MIT OR Apache-2.0
//! The requests for the inner network, and the actions that follow from its events.

use super::window::{StagedMemory, StagedWindow};
use super::{ASK_AFTER_NS, Item, Landing, Late, OWN, Open, Order, Staged, Started, Step, Then, Wanted};
use crate::{Event, NetError, Network, Notice, NoticeArrival, Request};
use gin_abi::{RemoteSignal, Transfer, WindowOffset};
use gin_gpu::rt;
use std::collections::VecDeque;
use std::sync::Arc;

impl<N: Network> Staged<N> {
    /// Checks a range of a peer's part, which may be shorter than its host memory.
    fn check(&self, window: u32, rank: u32, offset: u64, bytes: u64) -> Result<(), NetError> {
        let part = self.open_window(window).and_then(|entry| entry.parts.get(rank as usize));
        let length = part.ok_or(NetError::UnknownWindow { window, rank })?.bytes;
        NetError::check_range(window, rank, offset, bytes, length)
    }

    fn open_window(&self, window: u32) -> Option<&StagedWindow> {
        self.windows.get(&window).filter(|entry| !entry.is_closed)
    }

    /// Returns the own part, which has this range.
    fn range(&self, landing: Landing) -> Result<Arc<StagedMemory>, NetError> {
        let (rank, Landing { window, offset, bytes }) = (self.rank, landing);
        let own = self.open_window(window).and_then(|entry| entry.own.clone());
        let own = own.ok_or(NetError::UnknownWindow { window, rank })?;
        NetError::check_range(window, rank, offset, bytes, own.memory.bytes())?;
        Ok(own)
    }

    /// Starts the copy of arrived bytes into the window.
    fn copy_in(&mut self, range: Landing) -> Result<Started, NetError> {
        let own = self.range(range)?;
        let [window, arrival, _] = own.places(range.offset);
        // Safety: the ranges are in both allocations, which the work that waits for the copy keeps alive.
        let ticket = unsafe { self.mover.copy(window, arrival, range.bytes) }?;
        Ok(Started { ticket, _own: own })
    }

    /// Starts the copy of bytes to send out of the window.
    fn copy_out(&mut self, range: Landing) -> Result<Started, NetError> {
        let own = self.range(range)?;
        let [window, _, departure] = own.places(range.offset);
        // Safety: as above.
        let ticket = unsafe { self.mover.copy(departure, window, range.bytes) }?;
        Ok(Started { ticket, _own: own })
    }

    /// Accepts a request that does not pass unchanged.
    pub(super) fn begin(&mut self, request: &Request) {
        let line = (request.context, request.peer);
        let items = if request.is_strong() && self.broken.contains(&line) {
            Err(NetError::behind(request.peer))
        } else {
            self.plan(request)
        };
        match items {
            Ok(items) => {
                // A notice is complete once it is sent and answered.
                let answers = items.iter().filter(|item| matches!(item.step, Step::Tell(..))).count();
                let left = (items.len() + answers) as u32;
                self.open.insert(request.id, Open { line, left, outcome: Ok(()) });
                self.lines.entry(line).or_default().extend(items);
            }
            Err(error) => {
                self.broken.insert(line);
                self.events.push(Event::Completion { id: request.id, outcome: Err(error) });
            }
        }
    }

    /// Returns the requests for the inner network, in order.
    fn plan(&mut self, request: &Request) -> Result<Vec<Item>, NetError> {
        let (id, peer, line) = (request.id, request.peer, (request.context, request.peer));
        if !self.is_staged(request) {
            let request = Request { id: self.name() | OWN, ..*request };
            return Ok(vec![Item { request, step: Step::Send(id), copy: None }]);
        }
        match request.transfer {
            Transfer::Get { source, destination, bytes } => {
                self.check(source.window, peer, source.offset, bytes)?;
                let landing = Landing { window: destination.window, offset: destination.offset, bytes };
                let landing = self.own(destination.window).map(|_| landing);
                landing.map(|landing| self.range(landing)).transpose()?;
                let Some(half) = self.half(source.window, peer) else {
                    let request = Request { id: self.name() | OWN, ..*request };
                    return Ok(vec![Item { request, step: Step::Read(id, landing), copy: None }]);
                };
                let read = Transfer::Get {
                    source: WindowOffset { window: source.window, offset: half + source.offset },
                    destination,
                    bytes,
                };
                let tag = self.want(line, id, Some((read, landing)));
                let notice = Notice::Wanted { window: source.window, offset: source.offset, bytes, tag };
                let request = self.request(line, Transfer::Nothing, Some(notice));
                Ok(vec![Item { request, step: Step::Tell(id, tag), copy: None }])
            }
            transfer => self.plan_put(request, transfer),
        }
    }

    /// Does the same for a put, or a put of a value.
    fn plan_put(&mut self, request: &Request, mut transfer: Transfer) -> Result<Vec<Item>, NetError> {
        let (id, peer, line) = (request.id, request.peer, (request.context, request.peer));
        let (window, offset, bytes) = match transfer {
            Transfer::PutValue { width_log2, destination, .. } => {
                (destination.window, destination.offset, 1 << width_log2.min(3))
            }
            Transfer::Put { destination, bytes, .. } => (destination.window, destination.offset, bytes),
            Transfer::Get { .. } | Transfer::Nothing => return Err(NetError::behind(peer)),
        };
        self.check(window, peer, offset, bytes)?;
        let mut copy = None;
        if let Transfer::Put { source, .. } = &mut transfer
            && let Some(half) = self.own(source.window).map(|own| own.half)
        {
            let range = Landing { window: source.window, offset: source.offset, bytes };
            copy = Some(self.copy_out(range)?);
            source.offset += half;
        }
        if self.half(window, peer).is_none() {
            let below = Request { signal: request.signal, more: request.more, ..self.request(line, transfer, None) };
            return Ok(vec![Item { request: below, step: Step::Send(id), copy }]);
        }
        let tag = self.want(line, id, None);
        let notice = Some(Notice::Arrived { window, offset, bytes, tag });
        let below = Request { more: request.more, ..self.request(line, transfer, notice) };
        let mut items = vec![Item { request: below, step: Step::Tell(id, tag), copy }];
        if let Some(signal) = request.signal {
            // After the notice, in whose order the signal is raised.
            let signal = Some(RemoteSignal { strong: true, ..signal });
            let raise = Request { signal, ..self.request(line, Transfer::Nothing, None) };
            items.push(Item { request: raise, step: Step::Send(id), copy: None });
        }
        Ok(items)
    }

    /// Adds a request that waits for an answer of its peer. Returns the tag.
    fn want(&mut self, line: Order, request: u64, read: Option<(Transfer, Option<Landing>)>) -> u64 {
        let tag = self.name();
        self.wanted.insert(tag, Wanted { line, request, read, since_ns: rt::clock_ns() });
        tag
    }

    /// Ends a step of a request.
    fn finish(&mut self, request: u64, outcome: Result<(), NetError>) {
        let Some(open) = self.open.get_mut(&request) else { return };
        open.left = open.left.saturating_sub(1);
        if let Err(error) = outcome {
            self.broken.insert(open.line);
            if open.outcome.is_ok() {
                open.outcome = Err(error);
            }
        }
        if open.left == 0
            && let Some(open) = self.open.remove(&request)
        {
            self.events.push(Event::Completion { id: request, outcome: open.outcome });
        }
    }

    /// Fails a request whose peer will not answer.
    fn give_up(&mut self, tag: u64, error: &NetError) {
        if let Some(wanted) = self.wanted.remove(&tag) {
            self.finish(wanted.request, Err(error.clone()));
        }
    }

    /// Posts the requests that are ready to the inner network.
    pub(super) fn pump(&mut self) {
        while let Some((request, step)) = self.outbox.front() {
            if self.inner.post(std::slice::from_ref(request)) == 0 {
                break;
            }
            self.steps.insert(request.id, *step);
            self.outbox.pop_front();
        }
        let lines: Vec<Order> = self.lines.keys().copied().collect();
        for line in lines {
            while let Some(item) = self.lines.get(&line).and_then(VecDeque::front) {
                let copied = self.mover.is_done(&item.copy);
                let refusal = match copied {
                    Ok(false) => break,
                    Ok(true) if item.request.is_strong() && self.broken.contains(&line) => {
                        Some(NetError::behind(line.1))
                    }
                    Ok(true) => None,
                    Err(error) => Some(error),
                };
                if refusal.is_none() && self.inner.post(std::slice::from_ref(&item.request)) == 0 {
                    break;
                }
                let (id, step) = (item.request.id, item.step);
                self.lines.get_mut(&line).map(VecDeque::pop_front);
                match refusal {
                    None => drop(self.steps.insert(id, step)),
                    Some(error) => self.over(step, Err(error)),
                }
            }
            if self.lines.get(&line).is_some_and(VecDeque::is_empty) {
                self.lines.remove(&line);
            }
        }
    }

    /// Ends a request of the inner network, which is complete or was refused.
    pub(super) fn over(&mut self, step: Step, outcome: Result<(), NetError>) {
        match (step, outcome) {
            (Step::Send(request), outcome) => self.finish(request, outcome),
            (Step::Tell(request, tag), outcome) => {
                if let Err(error) = &outcome {
                    self.give_up(tag, error);
                }
                self.finish(request, outcome);
            }
            (Step::Read(request, Some(landing)), Ok(())) => match self.copy_in(landing) {
                Ok(copy) => self.late(copy, Then::Got(request)),
                Err(error) => self.finish(request, Err(error)),
            },
            (Step::Read(request, _), outcome) => self.finish(request, outcome),
            // The peer checks by itself if an answer cannot be sent.
            (Step::Answer, _) | (Step::Ask(_), Ok(())) => {}
            (Step::Ask(line), Err(error)) => {
                let tags = self.wanted.iter().filter(|(_, wanted)| wanted.line == line);
                for tag in tags.map(|(tag, _)| *tag).collect::<Vec<_>>() {
                    self.give_up(tag, &error);
                }
            }
        }
    }

    /// Adds the action that follows a copy.
    fn late(&mut self, copy: Started, then: Then) {
        self.late.push_back(Late { copy: Some(copy), then });
    }

    pub(super) fn notice(&mut self, arrival: NoticeArrival) {
        let NoticeArrival { context, from, notice } = arrival;
        let line = (context, from);
        match notice {
            Notice::Alive => {}
            Notice::Arrived { window, offset, bytes, tag } => match self.copy_in(Landing { window, offset, bytes }) {
                Ok(copy) => self.late(copy, Then::Arrived(line, tag)),
                Err(error) => self.refuse(line, tag, error),
            },
            Notice::Wanted { window, offset, bytes, tag } => match self.copy_out(Landing { window, offset, bytes }) {
                Ok(copy) => self.late(copy, Then::Answer(line, tag)),
                Err(_) => self.answer(line, tag, false),
            },
            Notice::Ready { tag, found } => {
                if self.wanted.get(&tag).is_none_or(|wanted| wanted.line != line) {
                    return;
                }
                let Some(Wanted { request, read, .. }) = self.wanted.remove(&tag) else { return };
                match (found, read) {
                    (true, None) => self.finish(request, Ok(())),
                    (true, Some((read, landing))) => {
                        let below = self.request(line, read, None);
                        self.outbox.push_back((below, Step::Read(request, landing)));
                    }
                    (false, read) => {
                        let context = match read {
                            Some(_) => "a get of what the peer could not give",
                            None => "a put of what the peer could not take",
                        };
                        self.finish(request, Err(NetError::Failed { context, peer: from, status: 0 }));
                    }
                }
            }
        }
    }

    /// Records the error of a copy into a window. After it no data becomes visible any more.
    fn refuse(&mut self, line: Order, tag: u64, error: NetError) {
        self.failure.get_or_insert(error);
        self.answer(line, tag, false);
    }

    fn answer(&mut self, line: Order, tag: u64, found: bool) {
        let below = self.request(line, Transfer::Nothing, Some(Notice::Ready { tag, found }));
        self.outbox.push_back((below, Step::Answer));
    }

    /// Carries out the actions that follow completed copies.
    pub(super) fn follow(&mut self) {
        while let Some(late) = self.late.front() {
            let copied = self.mover.is_done(&late.copy);
            if copied == Ok(false) {
                return;
            }
            let Some(late) = self.late.pop_front() else { return };
            match (late.then, copied) {
                (Then::Tell(event), _) => self.events.push(event),
                (Then::Arrived(line, tag), Err(error)) => self.refuse(line, tag, error),
                (Then::Got(request), copied) => self.finish(request, copied.map(drop)),
                (Then::Arrived(line, tag) | Then::Answer(line, tag), copied) => self.answer(line, tag, copied.is_ok()),
            }
        }
    }

    /// Checks the NICs of peers that have not answered for a long time.
    pub(super) fn ask(&mut self) {
        if self.wanted.is_empty() {
            return;
        }
        let now = rt::clock_ns();
        let mut lines: Vec<Order> = Vec::new();
        for wanted in self.wanted.values_mut() {
            if now.saturating_sub(wanted.since_ns) >= ASK_AFTER_NS {
                wanted.since_ns = now;
                lines.push(wanted.line);
            }
        }
        lines.dedup();
        for line in lines {
            let below = self.request(line, Transfer::Nothing, Some(Notice::Alive));
            self.outbox.push_back((below, Step::Ask(line)));
        }
    }

    /// Returns whether host memory contains bytes to copy into a window after this event.
    pub(super) fn brings(&self, event: &Event) -> bool {
        match event {
            Event::Notice(NoticeArrival { notice: Notice::Arrived { .. }, .. }) => true,
            Event::Completion { id, .. } => matches!(self.steps.get(id), Some(Step::Read(_, Some(_)))),
            _ => false,
        }
    }
}
