// SPDX-License-Identifier: MIT OR Apache-2.0
//! The GDAKI back end: the kernel writes an mlx5 NIC's work-queue entries, rings its doorbell and reads its
//! completions.
//!
//! Each context has a queue pair to each peer. The entries of the front end's operations:
//!
//! | operation | entries |
//! | --- | --- |
//! | put | WRITE, one for each chunk that the queue pair may move at once; NOP if the put is empty |
//! | put_value | WRITE with inline data |
//! | get | READ. A DUMP brings its data into view: a flush posts it, or the get itself if it has a counter |
//! | signal | FETCH_ADD, behind the put that it is bound to; behind each chunk but the last, one that adds nothing |
//! | quiet | FETCH_ADD of 0 to the peer's first signal word |
//!
//! The peer's NIC reads that word behind the earlier writes, so its answer confirms that they have arrived.
//!
//! A NIC carries out the entries of one queue pair in order, so every signal is strong. The thread that takes the
//! completion of an operation's last entry raises its counter. Waits for counters take completions, so counters need no
//! companion queue pair, no WAIT entry and no NIC that reaches itself. The back end does not use BlueFlame, which sends
//! an entry along with the doorbell.
//!
//! A communicator may have connections along rails only. A post to another peer is then refused
//! ([`FaultKind::NotConnected`]), and a flush of that peer has nothing to wait for.
//!
//! `pair` has the protocol among the threads of a GPU.

mod group;
pub(crate) mod pair;
mod wait;

use super::Backend;
use crate::comm::Comm;
use crate::context::Core;
use crate::coop;
use crate::fault::Fault;
use crate::order::{Scope, Sharing};
use crate::status::{Status, WaitError};
use crate::sys::{self, Global, GlobalWord};
use gin_abi::gdaki::{DOORBELL_GPU, QueuePairData};
use gin_abi::mlx5::be::Be32;
use gin_abi::mlx5::cqe::Syndrome;
use gin_abi::mlx5::wqe::{self, Flags, Local, QueueNumber, Remote, Segment, opcode};
use gin_abi::{Deadline, Descriptor, FaultKind, FaultSubject, Operation, RemoteSignal, SignalTarget, Transfer};
use group::{Callers, Group};
use pair::{Ended, Entries, QueuePair, Rare, Slots};
use wait::{each_busy, wait_all};

/// The back end in which kernels drive the NIC.
#[derive(Clone, Copy, Debug)]
pub struct Gdaki;

/// The place of a queue pair, and of the other values that its entries need.
#[derive(Clone, Copy)]
struct Link {
    data: *const QueuePairData,
    core: Core,
    peer: u32,
}

/// Reads the constants of a queue pair.
///
/// # Safety
/// - `data` is valid.
#[inline(always)]
unsafe fn queue_pair(data: *const QueuePairData, status: Status<Global>) -> QueuePair<Global> {
    // Safety: the caller's promise.
    unsafe {
        let (ring, _) = sys::read_pair(&raw const (*data).ring);
        let (tags, completions) = sys::read_pair(&raw const (*data).tags);
        let (record, doorbell) = sys::read_pair(&raw const (*data).record);
        let (numbers, limits) = sys::read_pair((&raw const (*data).number).cast());
        let (busy, marks) = sys::read_pair(&raw const (*data).busy);
        let (depth_log2, limits) = (sys::narrow((numbers >> 32) as u32), sys::narrow(limits as u32));
        let scope = limits >> 16;
        core::hint::assert_unchecked(depth_log2 < 16);
        QueuePair {
            words: GlobalWord::new(data as usize as u64),
            ring: GlobalWord::new(ring),
            tags: GlobalWord::new(tags),
            completions: GlobalWord::new(completions),
            record: GlobalWord::new(record),
            doorbell: GlobalWord::new(doorbell),
            busy: GlobalWord::new(busy),
            marks,
            counters: GlobalWord::new(sys::read_word(&raw const (*data).counters)),
            connected: ring != 0,
            number: QueueNumber::from_memory(numbers as u32),
            depth_log2,
            interval_log2: limits,
            releases_to_gpu: scope == DOORBELL_GPU as u32,
            status,
        }
    }
}

/// Returns the communicator of a queue pair.
///
/// # Safety
/// - `data` is valid.
#[inline(always)]
unsafe fn comm(data: *const QueuePairData) -> Comm {
    // Safety: the caller's promise.
    unsafe { Comm::copied(sys::read_word(&raw const (*data).comm)) }
}

/// Returns a fault with context and peer of a queue pair.
///
/// # Safety
/// - `data` is valid.
#[inline(always)]
unsafe fn fault(data: *const QueuePairData, kind: FaultKind, operation: Operation) -> Fault {
    // Safety: the caller's promise. Context and peer are the halves of an aligned word.
    let place = unsafe { sys::read_word((&raw const (*data).context).cast()) };
    Fault::new(kind, operation).with_context(place as u32).with_peer((place >> 32) as u32)
}

/// Reports the fault of the failed entry, and waits until the communicator has a fault.
///
/// # Safety
/// - `data` is valid, and an entry has failed.
#[inline(always)]
unsafe fn report(data: *const QueuePairData) {
    // Safety: the caller's promise.
    let (pair, comm) = unsafe {
        let comm = comm(data);
        (queue_pair(data, comm.status()), comm)
    };
    let (tail, syndromes) = pair.failure();
    let operation = match tail.operation() {
        // The entry is still in its slot.
        opcode::WRITE if pair.is_inline(tail.index() as u32) => Operation::PutValue,
        opcode::WRITE => Operation::Put,
        opcode::READ => Operation::Get,
        opcode::FETCH_ADD => Operation::Signal,
        _ => Operation::Flush,
    };
    let syndrome = syndromes >> 56;
    let gone = syndrome == Syndrome::RetryExceeded.code() as u64;
    let kind = if gone { FaultKind::PeerLost } else { FaultKind::Network };
    // Safety: the caller's promise.
    let fault = unsafe { fault(data, kind, operation) };
    comm.status().report(fault.with_values(FaultSubject::None, tail.index() as u64, syndrome));
    comm.status().await_stop();
}

/// Code that a kernel has once and calls. Arguments are words, because a structure would be passed on the stack. Each
/// function reads the queue pair again, so that a call keeps few registers of its caller. The caller reports a failed
/// entry that a function finds, because the report needs registers too.
mod outlined {
    use super::pair::{Ended, Entries};
    use super::{Called, EndedPost, comm, fault, queue_pair};
    use crate::fault::Fault;
    use crate::status::WaitError;
    use gin_abi::gdaki::QueuePairData;
    use gin_abi::{Deadline, FaultKind, FaultSubject, Operation};

    /// Does [`report`](super::report).
    #[cold]
    #[cfg_attr(target_arch = "nvptx64", inline(never))]
    pub(super) fn report(data: *const QueuePairData) {
        // Safety: the address is a `Link`'s, and an entry has failed.
        unsafe { super::report(data) }
    }

    /// Returns the fault of a post that ended early. Reports the fault of a failed entry.
    #[cold]
    #[cfg_attr(target_arch = "nvptx64", inline(never))]
    pub(super) fn explain(data: *const QueuePairData, stop: Ended, operation: Operation, deadline: Deadline) -> Fault {
        // Safety: the address is a `Link`'s.
        let (status, timeout) = unsafe { (comm(data).status(), fault(data, FaultKind::Timeout, operation)) };
        status.explain(EndedPost(data, stop).into(), timeout, FaultSubject::None, deadline, 0, 0)
    }

    /// Does [`QueuePair::take`](super::QueuePair::take).
    #[cfg_attr(target_arch = "nvptx64", inline(never))]
    pub(super) fn take(data: *const QueuePairData) -> bool {
        // Safety: the address is a `Link`'s.
        unsafe { queue_pair(data, comm(data).status()) }.take()
    }

    /// Does [`QueuePair::ring_on`](super::QueuePair::ring_on).
    #[cold]
    #[cfg_attr(target_arch = "nvptx64", inline(never))]
    pub(super) fn ring_on(data: *const QueuePairData, claims: u64, end: u32) {
        // Safety: the address is a `Link`'s.
        unsafe { queue_pair(data, comm(data).status()) }.ring_on(claims, end);
    }

    /// Does [`Status::end`](super::Status::end) for a wait that must end at the time `deadline`.
    #[cold]
    #[cfg_attr(target_arch = "nvptx64", inline(never))]
    pub(super) fn end(data: *const QueuePairData, deadline: Deadline) -> Option<WaitError> {
        // Safety: the address is a `Link`'s.
        unsafe { comm(data).status() }.end(0, deadline)
    }

    /// Waits until `count` claimed entries from `index` on have slots of their own, as
    /// [`QueuePair::wait_for_room`](super::QueuePair::wait_for_room).
    #[cold]
    #[cfg_attr(target_arch = "nvptx64", inline(never))]
    pub(super) fn wait_for_room(data: *const QueuePairData, index: u32, count: u32) -> Result<(), Ended> {
        // Safety: the address is a `Link`'s.
        let pair = unsafe { queue_pair(data, comm(data).status()) };
        pair.wait_for_room(Entries { index, count }, count, Deadline::NONE, &Called(data)).map(|_| ())
    }

    /// Waits for room for `count` entries and claims them, as
    /// [`QueuePair::wait_for_room`](super::QueuePair::wait_for_room). [`claimed`] is its result.
    #[cold]
    #[cfg_attr(target_arch = "nvptx64", inline(never))]
    pub(super) fn claim_room(data: *const QueuePairData, count: u32, deadline: Deadline) -> u64 {
        // Safety: the address is a `Link`'s.
        let pair = unsafe { queue_pair(data, comm(data).status()) };
        match pair.wait_for_room(Entries { index: 0, count: 0 }, count, deadline, &Called(data)) {
            Ok(claims) => claims,
            Err(Some(WaitError::Deadline)) => ENDED,
            Err(Some(WaitError::Fault)) => ENDED - 1,
            Err(Some(WaitError::NotConnected)) => ENDED - 2,
            Err(None) => ENDED - 3,
        }
    }

    /// No claims word is this or a little less, because its lower bits would count more entries than a queue has.
    const ENDED: u64 = u64::MAX;

    /// Returns the result of a [`claim_room`].
    #[inline(always)]
    pub(super) fn claimed(word: u64) -> Result<u64, Ended> {
        match ENDED - word {
            0 => Err(Some(WaitError::Deadline)),
            1 => Err(Some(WaitError::Fault)),
            2 => Err(Some(WaitError::NotConnected)),
            3 => Err(None),
            _ => Ok(word),
        }
    }
}

/// The rare parts of the protocol, for the queue pair at this address.
struct Called(*const QueuePairData);

impl Rare for Called {
    #[inline(always)]
    fn take(&self) -> bool {
        outlined::take(self.0)
    }

    #[inline(always)]
    fn ring_on(&self, claims: u64, end: u32) {
        outlined::ring_on(self.0, claims, end);
    }

    #[inline(always)]
    fn end(&self, deadline: Deadline) -> Option<WaitError> {
        outlined::end(self.0, deadline)
    }
}

/// A post that ended early: its queue pair, and why.
#[doc(hidden)]
#[derive(Clone, Copy, Debug)]
pub struct EndedPost(*const QueuePairData, Ended);

impl From<EndedPost> for WaitError {
    /// Reports the fault of a failed entry.
    #[inline(always)]
    fn from(EndedPost(data, stop): EndedPost) -> Self {
        stop.unwrap_or_else(|| {
            outlined::report(data);
            Self::Fault
        })
    }
}

impl Link {
    #[inline(always)]
    fn of(core: &Core, peer: u32) -> Self {
        let handle = core.comm().handle();
        let index = sys::narrow(core.context()).wrapping_mul(sys::narrow(handle.ranks)).wrapping_add(peer);
        // For all lanes alike, the assembler would keep the address elsewhere and copy it at each use.
        let index = sys::of_lane(index as u64) as usize;
        let data = (handle.queue_pairs as usize as *const QueuePairData).wrapping_add(index);
        Self { data, core: *core, peer }
    }

    #[inline(always)]
    fn pair(&self) -> QueuePair<Global> {
        // Safety: the front end checked the context, and `peer` is a rank; the host keeps the table valid.
        unsafe { queue_pair(self.data, self.core.status()) }
    }

    /// Returns the error of a call that ended early. Reports the fault of a failed entry.
    #[inline(always)]
    fn stopped(&self, stop: Ended) -> WaitError {
        EndedPost(self.data, stop).into()
    }

    /// Returns the largest number of bytes of one entry.
    #[inline(always)]
    fn max_bytes(&self) -> u32 {
        // Safety: as in `pair`. The limit is the upper half of an aligned word.
        let limits = unsafe { sys::read_word((&raw const (*self.data).interval_log2).cast()) };
        (limits >> 32) as u32
    }

    /// Returns the keys of the peer's signal words and of the sink.
    #[inline(always)]
    fn keys(&self) -> (Be32, Local) {
        // Safety: as in `of`.
        let (keys, _) = unsafe { sys::read_pair((&raw const (*self.data).signal_key).cast()) };
        let sink = Local { address: 0, key: Be32::from_memory((keys >> 32) as u32), bytes: 8 };
        (Be32::from_memory(keys as u32), sink)
    }

    /// Returns the address of byte `offset` of a window and its key, in the part of `rank`. The number of ranks as
    /// `rank` stands for the caller's own part with its local key.
    #[inline(always)]
    fn in_window(&self, window: u32, rank: u32, offset: u64) -> (u64, Be32) {
        let handle = self.core.comm().handle();
        let index = window.wrapping_mul(sys::narrow(handle.ranks).wrapping_add(1)).wrapping_add(rank);
        let word = (handle.window_keys as usize as *const u64).wrapping_add(index as usize);
        // Safety: the id comes from a handle of the host's, which keeps the table valid.
        let word = unsafe { sys::read_word(word) };
        (offset + (word >> 32), Be32::from_memory(word as u32))
    }

    #[inline(always)]
    fn there(&self, window: u32, offset: u64) -> Remote {
        let (address, key) = self.in_window(window, self.peer, offset);
        Remote { address, key }
    }

    #[inline(always)]
    fn here(&self, window: u32, offset: u64, bytes: u32) -> Local {
        let (address, key) = self.in_window(window, self.core.comm().handle().ranks, offset);
        Local { address, key, bytes }
    }

    /// Returns the word that a signal raises.
    #[inline(always)]
    fn signal_word(&self, signal: &RemoteSignal) -> Remote {
        match signal.target {
            SignalTarget::Id(id) => {
                // Safety: as in `of`.
                let first = unsafe { sys::read_word(&raw const (*self.data).signals) };
                Remote { address: first + 8 * id as u64, key: self.keys().0 }
            }
            SignalTarget::Address { window, offset } => self.there(window, offset),
        }
    }

    /// Writes the DUMP that brings the data of earlier READs into view.
    #[inline(always)]
    fn dump(&self, pair: &QueuePair<Global>, index: u32, flags: Flags) {
        let (_, sink) = self.keys();
        pair.store(index, wqe::dump(pair.head(index, flags), sink));
    }

    /// Claims slots for `count` entries, together with all lanes of the warp that post as many to this queue pair now.
    /// Calls `then` with the queue pair and the slots.
    ///
    /// # Errors
    /// The error of a wait for room.
    #[inline(always)]
    fn claim(
        &self,
        count: u32,
        deadline: Deadline,
        then: impl FnOnce(&QueuePair<Global>, Slots<Group>),
    ) -> Result<(), Ended> {
        let claim = || outlined::claimed(outlined::claim_room(self.data, count, deadline));
        let sharing = self.core.sharing();
        if sharing == Sharing::Thread {
            let wait = || (claim(), self.pair());
            let slots = |index| Slots { index, group: Group::NONE, leads: false };
            return self.pair().claim_alone(count, wait, |pair, index| then(pair, slots(index)));
        }
        // Lanes without a deadline claim at once, all together. A lane with a deadline must find room first, so it
        // posts alone.
        let (here, claims) = if deadline.is_none() {
            (coop::active_mask::<2>(), None)
        } else {
            let claims = claim()?;
            (coop::own_lane(), Some(claims))
        };
        // The address is a multiple of 128.
        let key = sys::stay_word(self.data as usize as u64) + count as u64;
        let group = Group::of(coop::alike(here, key), count);
        let pair = self.pair();
        let callers = Callers { pair: &pair, sharing, group, here, claims, index: 0 };
        let wait = |own: Entries| (outlined::wait_for_room(self.data, own.index, own.count), self.pair());
        pair.claim_slots(count, &callers, wait, then)
    }

    /// Publishes the `count` entries in claimed slots.
    #[inline(always)]
    fn publish(&self, pair: &QueuePair<Global>, slots: Slots<Group>, count: u32, more: bool) {
        let (sharing, Slots { index, group, leads }) = (self.core.sharing(), slots);
        if sharing == Sharing::Thread {
            pair.publish_alone(index, count, more);
        } else {
            let callers = Callers { pair, sharing, group, here: group.mask, claims: None, index };
            pair.publish(leads, &callers, more, &Called(self.data));
        }
    }
}

/// The addresses and keys of a transfer, and its length.
#[derive(Clone, Copy, Default)]
struct Places {
    there: Remote,
    here: Local,
    bytes: u64,
    /// Largest number of bytes of one entry, if one entry may not move all.
    max: Option<u32>,
}

impl Places {
    /// Returns chunk `chunk`. A chunk has the largest number of bytes of one entry, the last one fewer.
    #[inline(always)]
    fn chunk(&self, chunk: u32) -> Chunk {
        let Self { there, here, bytes, max } = *self;
        let Some(max) = max else { return Chunk { there, here, bytes: bytes as u32, last: true } };
        let before = chunk as u64 * max as u64;
        let left = bytes - before;
        let last = left <= max as u64;
        let bytes = if last { left as u32 } else { max };
        let there = Remote { address: there.address + before, ..there };
        Chunk { there, here: Local { address: here.address + before, bytes, ..here }, bytes, last }
    }
}

/// A part of a transfer that one entry moves.
#[derive(Clone, Copy)]
struct Chunk {
    there: Remote,
    here: Local,
    bytes: u32,
    /// None follows.
    last: bool,
}

/// Slots that lanes have claimed, in one word for a call, or why there are none.
///
/// | bits | hold |
/// | --- | --- |
/// | 0 to 7 | the state |
/// | 8 to 31 | the lower bits of the first index |
/// | 32 to 63 | the lanes that publish together |
#[derive(Clone, Copy)]
pub(super) struct Claimed(pub(super) u64);

impl Claimed {
    const LEADS: u64 = 1;
    /// And more: the error.
    const STOPPED: u64 = 4;

    #[inline(always)]
    fn of(slots: Slots<Group>) -> Self {
        let state = slots.leads as u64 * Self::LEADS;
        Self(state | ((slots.index << 8) as u64) | (slots.group.mask as u64) << 32)
    }

    #[inline(always)]
    fn stopped(stop: WaitError) -> Self {
        Self(Self::STOPPED + stop as u64)
    }

    /// Returns why there are no slots, if there are none.
    #[inline(always)]
    pub(super) fn stop(self) -> Option<WaitError> {
        match self.0 as u32 as u8 as u64 {
            state if state < Self::STOPPED => None,
            4 => Some(WaitError::Deadline),
            5 => Some(WaitError::Fault),
            _ => Some(WaitError::NotConnected),
        }
    }

    #[inline(always)]
    fn slots(self, pair: &QueuePair<Global>, count: u32) -> Slots<Group> {
        let (low, mask) = (self.0 as u32, (self.0 >> 32) as u32);
        let leads = low as u64 & Self::LEADS != 0;
        Slots { index: pair.whole(low >> 8, 24), group: Group::of(mask, count), leads }
    }
}

/// Returns the number of entries of a request, or of each chunk of it.
#[inline(always)]
pub(super) fn entries(request: &Descriptor) -> u32 {
    Counts::of(request).all()
}

/// Claims slots for one chunk of a request. [`fill`] must follow.
#[inline(always)]
pub(super) fn claim(core: &Core, peer: u32, count: u32, deadline: Deadline) -> Claimed {
    let link = Link::of(core, peer);
    let mut claimed = Claimed(0);
    match link.claim(count, deadline, |_, slots| claimed = Claimed::of(slots)) {
        Ok(()) => claimed,
        Err(stop) => Claimed::stopped(link.stopped(stop)),
    }
}

/// Writes the entries of a chunk into claimed slots and publishes them. Returns whether it is the last.
#[inline(always)]
pub(super) fn fill(core: &Core, claimed: Claimed, chunk: u32, request: &Descriptor) -> bool {
    let link = Link::of(core, request.peer);
    let (pair, count) = (link.pair(), entries(request));
    let slots = claimed.slots(&pair, count);
    let transfer = link.places(request).chunk(chunk);
    link.fill(&pair, slots.index, request, &transfer);
    // Read again, so that no register keeps words for the doorbell meanwhile.
    link.publish(&link.pair(), slots, count, request.more);
    transfer.last
}

/// The entries of a post.
#[derive(Clone, Copy)]
struct Counts {
    /// There is a transfer.
    first: bool,
    /// There is a signal, or a DUMP, behind it.
    second: bool,
}

impl Counts {
    #[inline(always)]
    fn of(request: &Descriptor) -> Self {
        let first = !matches!(request.transfer, Transfer::Nothing);
        // A counter reports that the data is in view.
        let dumps = matches!(request.transfer, Transfer::Get { .. }) && request.counter.is_some();
        Self { first, second: request.signal.is_some() || dumps }
    }

    #[inline(always)]
    fn all(self) -> u32 {
        self.first as u32 + self.second as u32
    }
}

// On a CPU, where a call is cheap, these are functions: inlined at each use they take minutes to compile.
impl Backend for Gdaki {
    const LSA: bool = false;
    type Ended = EndedPost;

    #[inline(always)]
    fn serves(comm: &Comm, context: u32) -> bool {
        context < comm.gdaki_contexts()
    }

    #[inline(always)]
    fn release(_: &Core, _: Scope, _: Scope) {
        // Publishing releases the poster's stores to the GPU. Ringing releases the published entries to the system.
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn post(core: &Core, request: &Descriptor, _: Operation, deadline: Deadline) -> Result<(), Self::Ended> {
        let (link, count) = (Link::of(core, request.peer), Counts::of(request).all());
        if count == 0 {
            return Ok(());
        }
        link.post(request, count, deadline).map_err(|stop| EndedPost(link.data, stop))
    }

    #[inline(always)]
    fn explain(_: &Core, _: u32, EndedPost(data, stop): EndedPost, operation: Operation, deadline: Deadline) -> Fault {
        outlined::explain(data, stop, operation, deadline)
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn position(core: &Core, peer: Option<u32>) -> u64 {
        match peer {
            Some(peer) => Link::of(core, peer).position(),
            // Each queue pair has a position of its own.
            None => 0,
        }
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn wait(core: &Core, peer: Option<u32>, position: u64, deadline: Deadline) -> Result<(), WaitError> {
        let waited = match peer {
            Some(peer) => {
                let link = Link::of(core, peer);
                link.wait(position, deadline).map_err(|stop| link.stopped(stop))
            }
            None => wait_all(core, deadline),
        };
        pair::finish(waited, &core.status(), core.order())
    }

    #[inline(always)]
    fn confirmation(_: &Core, peer: u32) -> Descriptor {
        // It raises nothing. The host keeps a word even where there are no signals.
        let signal = RemoteSignal { target: SignalTarget::Id(0), amount: 0, strong: true };
        Descriptor { peer, transfer: Transfer::Nothing, signal: Some(signal), counter: None, more: false }
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn attend(core: &Core) {
        let attended =
            each_busy(core, |link| if link.pair().attend(&Called(link.data)) { Ok(()) } else { Err(link.data) });
        if let Err(data) = attended {
            outlined::report(data);
        }
    }
}

impl Link {
    #[inline(always)]
    fn post(&self, request: &Descriptor, count: u32, deadline: Deadline) -> Result<(), Ended> {
        let (mut chunk, mut deadline) = (0, deadline);
        loop {
            // Read before the claim, so that the trips to L2 overlap.
            let (places, mut last) = (self.places(request), true);
            self.claim(count, deadline, |pair, slots| {
                let transfer = places.chunk(chunk);
                self.fill(pair, slots.index, request, &transfer);
                self.publish(pair, slots, count, request.more);
                last = transfer.last;
            })?;
            if last {
                return Ok(());
            }
            // A post that has begun must be finished.
            (chunk, deadline) = (chunk + 1, Deadline::NONE);
        }
    }

    /// Returns the addresses and keys of a request's transfer.
    #[inline(always)]
    fn places(&self, request: &Descriptor) -> Places {
        let (there, here, bytes) = match request.transfer {
            Transfer::Nothing => return Places::default(),
            Transfer::PutValue { width_log2, destination: to, .. } => {
                let there = self.there(to.window, to.offset);
                return Places { there, bytes: 1 << width_log2, ..Places::default() };
            }
            Transfer::Put { source: from, destination: to, bytes } => {
                (self.there(to.window, to.offset), self.here(from.window, from.offset, 0), bytes)
            }
            Transfer::Get { source: from, destination: to, bytes } => {
                (self.there(from.window, from.offset), self.here(to.window, to.offset, 0), bytes)
            }
        };
        Places { there, here, bytes, max: Some(self.max_bytes()) }
    }

    /// Writes the entries of a chunk. If it is not the last, its signal adds nothing.
    #[inline(always)]
    fn fill(&self, pair: &QueuePair<Global>, index: u32, request: &Descriptor, chunk: &Chunk) {
        let (counts, Chunk { there, here, bytes, last }) = (Counts::of(request), *chunk);
        let counter = if last { request.counter } else { None };
        let flags = if counter.is_some() { Flags::COMPLETION } else { Flags::NONE };
        if counts.first {
            let head = pair.head(index, if counts.second { Flags::NONE } else { flags });
            let segments = match request.transfer {
                Transfer::Nothing => [Segment::default(); 3],
                Transfer::PutValue { value, .. } => wqe::write_value(head, there, value, bytes),
                Transfer::Put { .. } => wqe::write(head, there, here),
                Transfer::Get { .. } => wqe::read(head, there, here),
            };
            // In an entry, a length of 0 means 2 GiB.
            pair.store(index, if bytes == 0 { [wqe::nop(head)[0], segments[1], segments[2]] } else { segments });
        }
        let end = index.wrapping_add(counts.all() - 1);
        if let Some(signal) = &request.signal {
            let amount = if last { signal.amount } else { 0 };
            pair.store(end, wqe::fetch_add(pair.head(end, flags), self.signal_word(signal), amount, self.keys().1));
        } else if counts.second {
            self.dump(pair, end, flags.and(Flags::FENCE));
            pair.note_dump(end);
        }
        if let Transfer::Get { .. } = request.transfer {
            pair.note_read(index);
        }
        if let Some(counter) = counter {
            pair.tag(end, counter);
        }
    }
}
