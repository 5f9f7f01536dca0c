// SPDX-License-Identifier: MIT OR Apache-2.0
//! Mistakes on purpose, to prove that tests notice them.

use gin_abi::{RemoteSignal, Transfer};
use gin_host::launch::WorldConfig;
use gin_net::{Capabilities, Event, Network, Request, pass_on};
use std::collections::HashSet;

/// A mistake that the ranks of a job make.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash, Default)]
pub enum Sabotage {
    /// None.
    #[default]
    None,
    /// The signal of a put goes out before its payload.
    SignalBeforePayload,
    /// Every third put loses its payload; its signal is raised.
    LosePut,
    /// Every third signal is raised twice.
    RaiseTwice,
    /// A request is complete as soon as the network has it: flushes, tokens and counters say so too early.
    CompleteEarly,
    /// Arrived bytes are never made visible.
    DropMakeVisible,
}

impl Sabotage {
    /// All mistakes.
    pub const ALL: [Self; 5] =
        [Self::SignalBeforePayload, Self::LosePut, Self::RaiseTwice, Self::CompleteEarly, Self::DropMakeVisible];

    /// Returns `config` with ranks that make this mistake. Its network is set already.
    #[must_use]
    pub fn apply(self, config: WorldConfig) -> WorldConfig {
        match self {
            Self::None => config,
            mistake => {
                let make = config.comm.network.clone();
                config.network(move |endpoint| Box::new(Saboteur::new(make(endpoint), mistake)))
            }
        }
    }
}

/// Bit of the ids under which signals go ahead of their payload. The ids of requests that a saboteur posts count from
/// 0.
const AHEAD: u64 = 1 << 63;

/// A network that makes a mistake.
#[derive(Debug)]
struct Saboteur<N> {
    inner: N,
    mistake: Sabotage,
    /// Requests so far of the kind that the mistake counts.
    count: u64,
    /// Requests whose signal went ahead, and that the inner network has not taken yet.
    ahead: HashSet<u64>,
    /// Completions that are reported before the inner network has them.
    early: Vec<Event>,
    /// Ids for the inner network, whose completions come later than the reported ones.
    next: u64,
}

impl<N: Network> Saboteur<N> {
    fn new(inner: N, mistake: Sabotage) -> Self {
        Self { inner, mistake, count: 0, ahead: HashSet::new(), early: Vec::new(), next: 0 }
    }

    fn is_third(&self) -> bool {
        (self.count + 1).is_multiple_of(3)
    }

    /// Posts one request. Returns whether the inner network has taken it.
    fn post_one(&mut self, request: &Request) -> bool {
        let mut posted = *request;
        let mut counts = false;
        match self.mistake {
            Sabotage::LosePut => {
                counts = matches!(request.transfer, Transfer::Put { .. } | Transfer::PutValue { .. });
                if counts && self.is_third() {
                    posted.transfer = Transfer::Nothing;
                }
            }
            Sabotage::RaiseTwice => {
                counts = request.signal.is_some();
                if let Some(signal) = posted.signal.as_mut().filter(|_| self.is_third()) {
                    signal.amount = signal.amount.wrapping_mul(2);
                }
            }
            Sabotage::SignalBeforePayload if request.transfer != Transfer::Nothing => {
                if let Some(signal) = posted.signal.take()
                    && !self.ahead.contains(&request.id)
                {
                    let signal = Some(RemoteSignal { strong: false, ..signal });
                    let alone = Request { id: request.id | AHEAD, transfer: Transfer::Nothing, signal, ..*request };
                    if self.inner.post(&[alone]) == 0 {
                        return false;
                    }
                    self.ahead.insert(request.id);
                }
            }
            Sabotage::CompleteEarly => posted.id = self.next,
            _ => {}
        }
        if self.inner.post(&[posted]) == 0 {
            return false;
        }
        self.count += u64::from(counts);
        self.ahead.remove(&request.id);
        if self.mistake == Sabotage::CompleteEarly {
            self.next += 1;
            self.early.push(Event::Completion { id: request.id, outcome: Ok(()) });
        }
        true
    }
}

impl<N: Network> Network for Saboteur<N> {
    pass_on!(but make_visible);

    fn capabilities(&self) -> Capabilities {
        self.inner.capabilities()
    }

    fn post(&mut self, requests: &[Request]) -> usize {
        requests.iter().take_while(|request| self.post_one(request)).count()
    }

    fn poll(&mut self, events: &mut Vec<Event>) {
        let before = events.len();
        self.inner.poll(events);
        let mut index = before;
        events.retain(|event| {
            let is_old = index < before;
            index += 1;
            let Event::Completion { id, .. } = event else { return true };
            is_old || (self.mistake != Sabotage::CompleteEarly && id & AHEAD == 0)
        });
        events.append(&mut self.early);
    }

    fn make_visible(&mut self) -> Result<(), gin_net::NetError> {
        if self.mistake == Sabotage::DropMakeVisible { Ok(()) } else { self.inner.make_visible() }
    }

    fn is_quiet(&self) -> bool {
        self.inner.is_quiet()
    }
}
