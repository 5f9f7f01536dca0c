// SPDX-License-Identifier: MIT OR Apache-2.0
//! The proxy back end: a post writes a descriptor into the context's queue.

use super::Backend;
use crate::comm::Comm;
use crate::context::Core;
use crate::coop;
use crate::order::Sharing;
use crate::queue::{Producer, Queue};
use crate::status::WaitError;
use crate::sys::{self, Global, GlobalWord};
use gin_abi::descriptor::{WORDS, with_time};
use gin_abi::handle::QUEUE_NEAR;
use gin_abi::{Deadline, Descriptor, FaultKind, FaultSubject, Operation};

/// The back end in which a CPU thread takes descriptors from the context's queue and posts them to a network.
#[derive(Clone, Copy, Debug)]
pub struct Proxy;

#[inline(always)]
fn producer(core: &Core) -> Producer<Global, WORDS> {
    let data = core.data();
    // Safety: the front end checked that the context exists. The host keeps its data and words valid; the data has the
    // layout of `ContextData`.
    unsafe {
        let (producer_index, consumer_index) = sys::read_pair(&raw const (*data).producer_index);
        let (slots, depth) = sys::read_pair(&raw const (*data).slots);
        let (oldest_incomplete, completion_index) = sys::read_pair(&raw const (*data).oldest_incomplete);
        let (depth_log2, depth_mask) = (sys::narrow(depth as u16 as u32), sys::narrow((depth >> 32) as u32));
        core::hint::assert_unchecked(depth_log2 < 32);
        Producer {
            queue: Queue {
                slots: GlobalWord::new(slots),
                producer_index: GlobalWord::new(producer_index),
                near: GlobalWord::new(producer_index + QUEUE_NEAR),
                consumer_index: GlobalWord::new(consumer_index),
                completion_index: GlobalWord::new(completion_index),
                oldest_incomplete: GlobalWord::new(oldest_incomplete),
                depth_log2,
                depth_mask,
            },
            status: core.status(),
        }
    }
}

/// Returns whether posts note their time, for a trace.
#[inline(always)]
fn is_timed(core: &Core) -> bool {
    // Safety: as in `producer`, which reads the same two words.
    unsafe { sys::read_pair(&raw const (*core.data()).slots).1 >> 16 & 0xffff != 0 }
}

/// Lanes of a warp that are here together and post to the same queue.
struct Group {
    mask: u32,
    /// The lanes of the group up to the calling lane.
    until: u32,
}

impl Group {
    /// Gathers the lanes of `here`, each of which posts to the queue of the context with the data at `data`.
    #[inline(always)]
    fn of(here: u32, data: u64) -> Self {
        let mask = coop::alike(here, data);
        Self { mask, until: mask & coop::lanes_until() }
    }

    /// Claims a slot for each lane by one add. Returns the first index in the lane that leads, the highest lane.
    #[inline(always)]
    fn claim(&self, producer: &Producer<Global, WORDS>, sharing: Sharing) -> u64 {
        // Counts `until` and not `mask`, though both have the same count in the lane that leads. `mask` is the same in
        // all lanes. The assembler does not know that one lane is left, so it would add a uniform value for "all" lanes
        // together once more.
        producer.claim(self.until == self.mask, self.until.count_ones() as u64, sharing)
    }

    /// Returns the value of the lane that leads.
    #[inline(always)]
    fn lead(&self, value: u64) -> u64 {
        coop::leader_shuffle(self.mask, value, 31 - self.mask.leading_zeros())
    }
}

/// A thread's way to its slot.
enum Claimer {
    /// It claims a slot by itself.
    Alone,
    /// It claims a slot by itself if there is room behind the claims of this number of lanes.
    IfRoom(u32),
    /// The lanes of the group claim together.
    Together(Group),
}

impl Claimer {
    /// Gathers lanes that claim together: lanes without a deadline that are here together and post to the same queue. A
    /// lane with a deadline claims by itself, because a claim that another makes for it would not wait for room.
    ///
    /// The lanes of a queue are found by the address of its context's data, so that this overlaps with the trip for the
    /// data.
    #[inline(always)]
    fn of(core: &Core, deadline: Deadline) -> Self {
        match (deadline.is_none(), core.sharing() == Sharing::Thread) {
            (true, true) => Self::Alone,
            (true, false) => Self::Together(Group::of(coop::active_mask::<0>(), core.data() as usize as u64)),
            (false, true) => Self::IfRoom(0),
            (false, false) => Self::IfRoom((coop::active_mask::<1>() & coop::lanes_below()).count_ones()),
        }
    }

    /// Claims a slot for the calling thread and returns its index, given that `consumer_index` slots have been emptied.
    #[inline(always)]
    fn claim(&self, producer: &Producer<Global, WORDS>, consumer_index: u64, sharing: Sharing) -> Option<u64> {
        match self {
            Self::Alone => Some(producer.claim(true, 1, sharing)),
            Self::IfRoom(ahead) => producer.claim_if_room(*ahead as u64, consumer_index, sharing),
            Self::Together(group) => {
                let first = group.claim(producer, sharing);
                Some(group.lead(first).wrapping_add((group.until.count_ones() - 1) as u64))
            }
        }
    }
}

// On a CPU `post` and `wait` are functions, as those of `Gdaki`.
impl Backend for Proxy {
    const LSA: bool = false;
    type Ended = WaitError;

    #[inline(always)]
    fn serves(comm: &Comm, context: u32) -> bool {
        context < comm.proxy_contexts()
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn post(core: &Core, request: &Descriptor, operation: Operation, deadline: Deadline) -> Result<(), WaitError> {
        let (producer, claimer) = (producer(core), Claimer::of(core, deadline));
        let claim = |consumer_index| claimer.claim(&producer, consumer_index, core.sharing());
        let words = request.encode();
        let words = with_time(words, if is_timed(core) { sys::peek_clock_ns() as u32 } else { 0 });
        match producer.post(words, claim, deadline) {
            Ok(_) => Ok(()),
            Err((stop, None)) => Err(stop),
            Err((stop @ (WaitError::Fault | WaitError::NotConnected), Some(_))) => Err(stop),
            Err((WaitError::Deadline, Some(index))) => {
                // The slot is claimed and stays empty, so every later request would wait for ever.
                let fault = core.fault(FaultKind::QueueBroken, operation).with_peer(request.peer);
                producer.status.report(fault.with_values(FaultSubject::None, index, producer.queue.depth()));
                producer.status.await_stop();
                Err(WaitError::Fault)
            }
        }
    }

    #[inline(always)]
    fn position(core: &Core, _: Option<u32>) -> u64 {
        producer(core).position()
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn wait(core: &Core, peer: Option<u32>, position: u64, deadline: Deadline) -> Result<(), WaitError> {
        let producer = producer(core);
        match peer {
            Some(peer) => producer.wait_peer(peer, position, deadline, core.order()),
            None => producer.wait_all(position, deadline, core.order()),
        }
    }
}
