// SPDX-License-Identifier: MIT OR Apache-2.0
//! The state of a resident block: its threads, warps, barriers and shared memory.

use std::panic::Location;

use gin_device::exec::{BarrierCall, Reduction};

use super::TaskKey;
use super::copies::Copies;
use crate::shared::SharedSegments;

/// Number of barriers of a block, as on every NVIDIA GPU (PTX ISA, `barrier`).
pub(super) const BARRIERS: u32 = 16;
/// Number of lanes of a warp.
pub(super) const LANES: u32 = 32;

/// One of the sixteen barriers.
pub(super) struct Barrier {
    /// Number of arrivals that complete the barrier; 0 while no thread waits.
    expected: u32,
    whole: bool,
    arrived: u32,
    /// Number of arrived lanes of the last warp, if that is partial.
    tail: u32,
    reduction: Reduction,
    any: bool,
    all: bool,
    count: u32,
    pub(super) waiters: Vec<TaskKey>,
    /// Threads that have arrived without waiting.
    gone: Vec<u32>,
    /// Number of them that have exited since, and those of the last warp among them.
    left: u32,
    left_of_last: u32,
}

impl Barrier {
    fn new() -> Self {
        Barrier {
            expected: 0,
            whole: false,
            arrived: 0,
            tail: 0,
            reduction: Reduction::None,
            any: false,
            all: true,
            count: 0,
            waiters: Vec::new(),
            gone: Vec::new(),
            left: 0,
            left_of_last: 0,
        }
    }
}

/// An exchange of values among lanes.
pub(super) struct Exchange {
    pub(super) mask: u32,
    pub(super) arrived: u32,
    pub(super) values: [u64; 32],
    /// Destination of the values for each waiting lane, on the stack of its parked coroutine.
    pub(super) outs: [*mut [u64; 32]; 32],
}

impl Exchange {
    pub(super) fn new(mask: u32) -> Self {
        Exchange { mask, arrived: 0, values: [0; 32], outs: [std::ptr::null_mut(); 32] }
    }
}

/// Lanes that asked for the active mask at one place.
pub(super) struct Gathering {
    pub(super) site: &'static Location<'static>,
    pub(super) lanes: u32,
    /// Identifies this gathering in timers.
    pub(super) serial: u64,
}

pub(super) struct Warp {
    /// Lanes that the block has.
    pub(super) exists: u32,
    pub(super) exited: u32,
    #[expect(clippy::vec_box, reason = "taken out and put back for each exchange, which moves the box only")]
    pub(super) exchanges: Vec<Box<Exchange>>,
    pub(super) gatherings: Vec<Gathering>,
}

impl Warp {
    /// Looks for a circle of waits. Returns the mask of the first exchange that `start` waits for, if a lane in that
    /// exchange waits, over any number of others, for `start`. Exchanges with different masks may be in progress
    /// together as long as one of them can complete.
    pub(super) fn waits_in_a_circle(&self, start: usize) -> Option<u32> {
        // The mask identifies an exchange: there is one at a time for each.
        let missing = |exchange: &Exchange| exchange.mask & self.exists & !exchange.arrived;
        let waited_for = |lanes: u32| self.exchanges.iter().filter(move |exchange| exchange.arrived & lanes != 0);
        let target = &self.exchanges[start];
        waited_for(missing(target)).map(|exchange| exchange.mask).find(|first| {
            let (mut reached, mut lanes) = (0, 0);
            if let Some(exchange) = self.exchanges.iter().find(|exchange| exchange.mask == *first) {
                lanes = missing(exchange);
            }
            while lanes != reached {
                reached = lanes;
                lanes = waited_for(reached).fold(reached, |lanes, exchange| lanes | missing(exchange));
            }
            reached & target.arrived != 0
        })
    }
}

/// The result of an arrival at a barrier.
pub(super) enum Arrival {
    /// The barrier is complete with this result; the caller wakes the waiters.
    Complete(u32),
    Wait,
    /// The caller goes on, as it wanted.
    Pass,
    Misuse(String),
}

pub(super) struct Block {
    /// Index of the grid in the engine.
    pub(super) grid: usize,
    /// Linear index in the grid.
    pub(super) index: u64,
    /// Unique during the engine's life.
    pub(super) serial: u64,
    pub(super) tasks: Vec<TaskKey>,
    pub(super) threads: u32,
    pub(super) live: u32,
    /// Number of threads that wait at a barrier or in an exchange.
    pub(super) parked: u32,
    /// One of its threads has let dependents start.
    pub(super) triggered: bool,
    pub(super) barriers: Vec<Barrier>,
    pub(super) warps: Vec<Warp>,
    pub(super) shared: SharedSegments,
    pub(super) copies: Copies,
}

impl Block {
    pub(super) fn new(grid: usize, index: u64, serial: u64, threads: u32, dynamic_shared: usize) -> Self {
        let warps = (0..threads.div_ceil(LANES)).map(|warp| {
            let lanes = (threads - warp * LANES).min(LANES);
            let exists = u32::MAX >> (LANES - lanes);
            Warp { exists, exited: 0, exchanges: Vec::new(), gatherings: Vec::new() }
        });
        Block {
            grid,
            index,
            serial,
            tasks: Vec::with_capacity(threads as usize),
            threads,
            live: threads,
            parked: 0,
            triggered: false,
            barriers: (0..BARRIERS).map(|_| Barrier::new()).collect(),
            warps: warps.collect(),
            shared: SharedSegments::with_dynamic(dynamic_shared),
            copies: Copies::default(),
        }
    }

    /// Returns the number of threads, including the lanes that the last warp lacks: the hardware counts whole warps.
    fn padded(&self) -> u32 {
        self.threads.next_multiple_of(LANES)
    }

    fn pad(&self) -> u32 {
        self.padded() - self.threads
    }

    /// Returns the number of arrivals that can still meet.
    fn reachable(&self) -> u32 {
        let tail_whole = self.warps.last().is_some_and(|warp| warp.exited == 0);
        self.live + if tail_whole { self.pad() } else { 0 }
    }

    fn unreachable(&self, id: u32) -> Option<String> {
        let barrier = &self.barriers[id as usize];
        // The lanes that the last warp lacks come with it, also if lanes of it have come and are gone.
        let exited_of_last = self.warps.last().map_or(0, |warp| warp.exited.count_ones());
        let pad = if exited_of_last != 0 && exited_of_last == barrier.left_of_last { self.pad() } else { 0 };
        let (expected, reachable) = (barrier.expected, self.reachable() + barrier.left + pad);
        if expected <= reachable {
            return None;
        }
        let exited = self.threads - self.live;
        Some(if !barrier.gone.is_empty() {
            format!(
                "barrier {id} needs {expected} threads, {} have come, {} of them without waiting; of the block's {} \
                 threads {exited} have exited",
                barrier.arrived,
                barrier.gone.len(),
                self.threads
            )
        } else if barrier.whole {
            format!("barrier {id} needs the whole block of {} threads, {exited} of them have exited", self.threads)
        } else if exited > 0 {
            format!(
                "barrier {id} needs {expected} threads, the block has {}, {exited} of them have exited",
                self.threads
            )
        } else {
            format!("barrier {id} needs {expected} threads, the block has {}", self.threads)
        })
    }

    /// Records the arrival of one thread. On `Wait` the caller adds it to the waiters.
    pub(super) fn arrive(&mut self, thread: u32, call: &BarrierCall) -> Arrival {
        let BarrierCall { id, threads, reduction, predicate, waits, .. } = *call;
        if id >= BARRIERS {
            return Arrival::Misuse(format!("barrier {id} does not exist; a block has {BARRIERS}"));
        }
        if !threads.is_multiple_of(LANES) {
            return Arrival::Misuse(format!("barrier {id} for {threads} threads, not a multiple of {LANES}"));
        }
        let (padded, pad) = (self.padded(), self.pad());
        let expected = if threads == 0 { padded } else { threads };
        let barrier = &mut self.barriers[id as usize];
        if barrier.expected == 0 {
            (barrier.expected, barrier.whole, barrier.reduction) = (expected, threads == 0, reduction);
        } else if barrier.expected != expected {
            let had = barrier.expected;
            return Arrival::Misuse(format!("barrier {id} for {expected} threads, others wait there for {had}"));
        } else if barrier.reduction != reduction {
            let had = barrier.reduction;
            return Arrival::Misuse(format!(
                "barrier {id} with reduction {reduction:?}, others wait there with {had:?}"
            ));
        }
        if barrier.gone.contains(&thread) {
            return Arrival::Misuse(format!(
                "barrier {id} for {expected} threads, where this thread has arrived already without waiting; it may come \
                 again when the barrier was complete"
            ));
        }
        if !waits {
            barrier.gone.push(thread);
        }
        barrier.arrived += 1;
        if pad > 0 && thread / LANES == padded / LANES - 1 {
            barrier.tail += 1;
            if barrier.tail == LANES - pad {
                barrier.arrived += pad;
            }
        }
        barrier.any |= predicate;
        barrier.all &= predicate;
        barrier.count += u32::from(predicate);
        if barrier.arrived > expected {
            let arrived = barrier.arrived;
            return Arrival::Misuse(format!(
                "barrier {id} for {expected} threads, {arrived} arrived, counted in warps"
            ));
        }
        if barrier.arrived == expected {
            let result = match reduction {
                Reduction::None => 0,
                Reduction::Or => u32::from(barrier.any),
                Reduction::And => u32::from(barrier.all),
                Reduction::Count => barrier.count,
            };
            let waiters = std::mem::take(&mut barrier.waiters);
            *barrier = Barrier { waiters, ..Barrier::new() };
            return Arrival::Complete(result);
        }
        match self.unreachable(id) {
            Some(message) => Arrival::Misuse(message),
            None if waits => Arrival::Wait,
            None => Arrival::Pass,
        }
    }

    /// Records the exit of one thread. Returns the misuse if other threads wait for it.
    pub(super) fn exit(&mut self, thread: u32) -> Option<String> {
        self.live -= 1;
        let (warp, lane) = (thread / LANES, thread % LANES);
        let warp = &mut self.warps[warp as usize];
        warp.exited |= 1 << lane;
        for barrier in self.barriers.iter_mut().filter(|barrier| barrier.gone.contains(&thread)) {
            barrier.left += 1;
            barrier.left_of_last += u32::from(thread >= self.threads.next_multiple_of(LANES) - LANES);
        }
        if let Some(exchange) = warp.exchanges.iter().find(|exchange| exchange.mask >> lane & 1 != 0) {
            return Some(format!("lane {lane} exited, an exchange of lanes {:#010x} waits for it", exchange.mask));
        }
        (0..BARRIERS).filter(|id| self.barriers[*id as usize].expected != 0).find_map(|id| self.unreachable(id))
    }

    /// Returns true if all remaining threads wait for each other.
    pub(super) fn is_stuck(&self) -> bool {
        self.live > 0 && self.parked == self.live
    }
}
