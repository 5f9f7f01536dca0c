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
//! | signal | FETCH_ADD, behind the put that it is bound to |
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

pub(crate) mod pair;

use super::Backend;
use crate::comm::Comm;
use crate::context::Core;
use crate::coop;
use crate::fault::Fault;
use crate::order::{Scope, Sharing};
use crate::status::{Status, WaitError};
use crate::sys::{self, Global, GlobalWord, Word};
use gin_abi::gdaki::{BUSY_RANKS, CLAIM_SHIFT, DOORBELL_GPU, QueuePairData};
use gin_abi::mlx5::be::Be32;
use gin_abi::mlx5::cqe::Syndrome;
use gin_abi::mlx5::wqe::{self, Flags, Local, QueueNumber, Remote, Segment, opcode};
use gin_abi::{Deadline, Descriptor, FaultKind, Operation, RemoteSignal, SignalTarget, Subject, Transfer};
use pair::{Entries, Posters, Posting, QueuePair};

/// The back end in which kernels drive the NIC.
#[derive(Clone, Copy, Debug)]
pub struct Gdaki;

/// A queue pair, and the places of the other values that its entries need.
#[derive(Clone, Copy)]
struct Link {
    pair: QueuePair<Global>,
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
        let (interval_log2, scope) = (limits & 0xffff, limits >> 16);
        core::hint::assert_unchecked(depth_log2 < 16 && interval_log2 < 16);
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
            interval_log2,
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

/// Reports the fault of the failed entry.
///
/// # Safety
/// - `data` is valid, and an entry has failed.
#[inline(always)]
unsafe fn report(data: *const QueuePairData) {
    // Safety: the caller's promise. Context and peer are the halves of an aligned word.
    let (pair, comm, place) = unsafe {
        let comm = comm(data);
        (queue_pair(data, comm.status()), comm, sys::read_word((&raw const (*data).context).cast()))
    };
    let (tail, syndromes) = pair.failure();
    let operation = match tail.operation() {
        // The entry is still in its slot.
        opcode::WRITE if pair.is_inline(tail.index() as u64) => Operation::PutValue,
        opcode::WRITE => Operation::Put,
        opcode::READ => Operation::Get,
        opcode::FETCH_ADD => Operation::Signal,
        _ => Operation::Flush,
    };
    let syndrome = syndromes >> 56;
    let gone = syndrome == Syndrome::RetryExceeded.code() as u64;
    let kind = if gone { FaultKind::PeerLost } else { FaultKind::Network };
    let fault = Fault::new(kind, operation).with_context(place as u32).with_peer((place >> 32) as u32);
    comm.status().report(fault.with_values(Subject::None, tail.index() as u64, syndrome));
}

/// Code that a kernel has once and calls. Arguments are words, because a structure would be passed on the stack. Each
/// function reads the queue pair again, so that a call keeps few registers of its caller.
mod outlined {
    use super::pair::Entries;
    use super::{comm, queue_pair};
    use crate::status::WaitError;
    use gin_abi::Deadline;
    use gin_abi::gdaki::QueuePairData;

    /// Does [`report`](super::report).
    #[cold]
    #[cfg_attr(target_arch = "nvptx64", inline(never))]
    fn report(data: *const QueuePairData) {
        // Safety: the address is a `Link`'s, and an entry has failed.
        unsafe { super::report(data) }
    }

    /// Does [`QueuePair::take`](super::QueuePair::take). Reports the fault of a failed entry.
    #[cfg_attr(target_arch = "nvptx64", inline(never))]
    pub(super) fn take(data: *const QueuePairData) {
        // Safety: the address is a `Link`'s.
        let pair = unsafe { queue_pair(data, comm(data).status()) };
        if !pair.take() {
            // Now, when `pair` needs no registers any more.
            report(data);
        }
    }

    /// Does [`QueuePair::wait_for_room`](super::QueuePair::wait_for_room).
    #[cfg_attr(target_arch = "nvptx64", inline(never))]
    pub(super) fn wait_for_room(data: *const QueuePairData, end: u64, deadline: Deadline) -> Option<WaitError> {
        // Safety: the address is a `Link`'s.
        let pair = unsafe { queue_pair(data, comm(data).status()) };
        pair.wait_for_room(end, deadline, |own, start| help(data, own.index, own.count, start, deadline))
    }

    /// Does what brings a post room, and [`QueuePair::take`](super::QueuePair::take). Returns why the post, which began
    /// at `start`, must give up, if it must.
    #[cfg_attr(target_arch = "nvptx64", inline(never))]
    pub(super) fn help(
        data: *const QueuePairData,
        index: u64,
        count: u64,
        start: u64,
        deadline: Deadline,
    ) -> Option<WaitError> {
        // Safety: the address is a `Link`'s.
        unsafe {
            if !queue_pair(data, comm(data).status()).help(Entries { index, count }) {
                return Some(WaitError::NotConnected);
            }
            take(data);
            comm(data).status().end(start, deadline)
        }
    }
}

impl Link {
    #[inline(always)]
    fn of(core: &Core, peer: u32) -> Self {
        let handle = core.comm().handle();
        let index = sys::narrow(core.context()).wrapping_mul(sys::narrow(handle.ranks)).wrapping_add(peer);
        let data = (handle.queue_pairs as usize as *const QueuePairData).wrapping_add(index as usize);
        // Safety: the front end checked the context, and `peer` is a rank; the host keeps the table valid.
        Self { pair: unsafe { queue_pair(data, core.status()) }, data, core: *core, peer }
    }

    /// Returns the largest number of bytes of one entry.
    #[inline(always)]
    fn most_bytes(&self) -> u64 {
        // Safety: as in `of`. The limit is the upper half of an aligned word.
        let limits = unsafe { sys::read_word((&raw const (*self.data).interval_log2).cast()) };
        limits >> 32
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
        let index = window as usize * (handle.ranks as usize + 1) + rank as usize;
        let word = (handle.window_keys as usize as *const u64).wrapping_add(index);
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
    fn dump(&self, pair: &QueuePair<Global>, index: u64, flags: Flags) {
        let (_, sink) = self.keys();
        pair.store(index, wqe::dump(pair.head(index, flags), sink));
    }

    /// Takes completions.
    #[inline(always)]
    fn take(&self) {
        outlined::take(self.data);
    }

    /// Posts one entry, and a signal or a DUMP behind it, together with all lanes of the warp that post to this queue
    /// pair now.
    #[inline(always)]
    fn post(
        &self,
        first: impl Fn(wqe::Post) -> [Segment; 3],
        then: Then<'_>,
        request: &Descriptor,
        deadline: Deadline,
    ) -> Result<(), WaitError> {
        let (pair, sharing) = (&self.pair, self.core.sharing());
        let counts = Counts { first: !matches!(then, Then::SignalAlone(_)), second: !matches!(then, Then::Nothing) };
        let fill = |pair: &QueuePair<Global>, index: u64| {
            if counts.first {
                let flags = match (counts.second, request.counter) {
                    (false, Some(_)) => Flags::COMPLETION,
                    _ => Flags::NONE,
                };
                pair.store(index, first(pair.head(index, flags)));
            }
            let last = index + counts.all() - 1;
            let flags = if request.counter.is_some() { Flags::COMPLETION } else { Flags::NONE };
            match then {
                Then::Nothing => {}
                Then::Signal(signal) | Then::SignalAlone(signal) => {
                    let add =
                        wqe::fetch_add(pair.head(last, flags), self.signal_word(signal), signal.amount, self.keys().1);
                    pair.store(last, add);
                }
                Then::Dump => {
                    self.dump(pair, last, flags.and(Flags::FENCE));
                    pair.note_dump(last);
                }
            }
            if let Transfer::Get { .. } = request.transfer {
                pair.note_read(index);
            }
            if let Some(counter) = request.counter {
                pair.tag(last, counter);
            }
        };
        let mut posting = Posting { count: counts.all(), sharing, more: request.more, deadline };
        let help = |own: Entries, start| {
            let stop = outlined::help(self.data, own.index, own.count, start, deadline);
            // Safety: as in `of`.
            (stop, unsafe { queue_pair(self.data, comm(self.data).status()) })
        };
        if sharing == Sharing::Thread {
            let wait = |end| {
                let stop = outlined::wait_for_room(self.data, end, deadline);
                // Safety: as in `of`.
                (stop, unsafe { queue_pair(self.data, comm(self.data).status()) })
            };
            return pair.post_alone(posting, fill, wait);
        }
        // Lanes with and without a deadline are gathered apart: the latter claim at once, all together.
        let here = if deadline.is_none() { coop::active_mask::<2>() } else { coop::active_mask::<3>() };
        let group = Group::of(here, pair, counts);
        // One lane without `more` sends the entries of all.
        posting.more = coop::ballot_here(here, !request.more) & group.mask == 0;
        pair.post(posting, &Callers { pair, posting, group, here }, fill, help)
    }
}

/// The entry behind the first entry of a post.
#[derive(Clone, Copy)]
enum Then<'a> {
    Nothing,
    Signal(&'a RemoteSignal),
    /// There is no first entry.
    SignalAlone(&'a RemoteSignal),
    Dump,
}

/// The entries of a post.
#[derive(Clone, Copy)]
struct Counts {
    first: bool,
    second: bool,
}

impl Counts {
    #[inline(always)]
    fn all(self) -> u64 {
        self.first as u64 + self.second as u64
    }
}

/// Lanes of a warp that are here together and post to the same queue pair.
#[derive(Clone, Copy)]
struct Group {
    mask: u32,
    /// Number of entries of the lanes before the calling lane.
    before: u64,
}

impl Group {
    #[inline(always)]
    fn of(here: u32, pair: &QueuePair<Global>, counts: Counts) -> Self {
        let mask = coop::alike(here, pair.words.address());
        let below = mask & coop::lanes_below();
        // Each lane has one entry or two.
        let two = coop::ballot_here(here, counts.all() == 2) & below;
        Self { mask, before: (below.count_ones() + two.count_ones()) as u64 }
    }

    /// Returns the lane that claims for all. It knows their number of entries: those before it and its own.
    #[inline(always)]
    fn last(&self) -> u32 {
        31 - self.mask.leading_zeros()
    }

    #[inline(always)]
    fn leads(&self) -> bool {
        // No lane of the group is above the caller's.
        self.mask >> 1 <= coop::lanes_below()
    }
}

/// Lanes that call a post together. Those of one [`Group`] post to the same queue pair.
struct Callers<'a> {
    pair: &'a QueuePair<Global>,
    posting: Posting,
    group: Group,
    /// All lanes that are here together.
    here: u32,
}

impl Posters for Callers<'_> {
    #[inline(always)]
    fn claim(&self) -> Option<u64> {
        self.posting.deadline.is_none().then(|| {
            let Group { before, .. } = self.group;
            let claims = self.pair.claim(self.group.leads(), before + self.posting.count, self.posting.sharing);
            coop::leader_shuffle(self.here, claims, self.group.last()) + (before << CLAIM_SHIFT)
        })
    }

    #[inline(always)]
    fn written(&self, filled: bool) -> Option<(u64, bool)> {
        if !self.posting.deadline.is_none() {
            return filled.then_some((self.posting.count, true));
        }
        // The first lane releases the stores of all.
        coop::sync_here(self.here);
        let all = coop::ballot_here(self.here, filled) & self.group.mask;
        // Each lane has one entry or two.
        let two = coop::ballot_here(self.here, self.posting.count == 2) & all;
        let first = filled & (all & coop::lanes_below() == 0);
        first.then_some(((all.count_ones() + two.count_ones()) as u64, all == self.group.mask))
    }

    #[inline(always)]
    fn any(&self, bit: bool) -> bool {
        coop::any_here(self.here, bit)
    }
}

// On a CPU, where a call is cheap, these are functions: inlined at each use they take minutes to compile.
impl Backend for Gdaki {
    const LSA: bool = false;

    #[inline(always)]
    fn serves(comm: &Comm, context: u32) -> bool {
        context < comm.gdaki_contexts()
    }

    #[inline(always)]
    fn release(_: &Core, _: Scope, _: Scope) {
        // Publishing releases the poster's stores to the GPU. Ringing releases the published entries to the system.
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn post(core: &Core, request: &Descriptor, _: Operation, deadline: Deadline) -> Result<(), WaitError> {
        let link = Link::of(core, request.peer);
        let (there, here, bytes) = match request.transfer {
            Transfer::Nothing => (Remote::default(), Local::default(), 0),
            Transfer::PutValue { width_log2, destination: to, .. } => {
                (link.there(to.window, to.offset), Local::default(), 1 << width_log2)
            }
            Transfer::Put { source: from, destination: to, bytes } => {
                (link.there(to.window, to.offset), link.here(from.window, from.offset, 0), bytes)
            }
            Transfer::Get { source: from, destination: to, bytes } => {
                (link.there(from.window, from.offset), link.here(to.window, to.offset, 0), bytes)
            }
        };
        let then = match (&request.signal, request.transfer) {
            (Some(signal), Transfer::Nothing) => Then::SignalAlone(signal),
            (Some(signal), _) => Then::Signal(signal),
            (None, Transfer::Nothing) => return Ok(()),
            // A counter reports that the data is in view.
            (None, Transfer::Get { .. }) if request.counter.is_some() => Then::Dump,
            (None, _) => Then::Nothing,
        };
        link.post_chunks(bytes, there, here, then, request, deadline)
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
            Some(peer) => Link::of(core, peer).wait(position, deadline),
            None => wait_all(core, deadline),
        };
        pair::finish(waited, &core.status(), core.order())
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn attend(core: &Core) {
        each_busy(core, |link| {
            link.pair.attend(|| link.take());
            Ok(())
        })
        .unwrap_or(());
    }
}

impl Link {
    /// Posts a request, a transfer in chunks of the largest number of bytes of one entry. `there` and `here` are the
    /// beginnings of the transfer.
    #[inline(always)]
    fn post_chunks(
        &self,
        bytes: u64,
        there: Remote,
        here: Local,
        then: Then<'_>,
        request: &Descriptor,
        deadline: Deadline,
    ) -> Result<(), WaitError> {
        let moves = matches!(request.transfer, Transfer::Put { .. } | Transfer::Get { .. });
        let most = if moves { self.most_bytes() } else { u64::MAX };
        let (mut there, mut here, mut left, mut deadline) = (there, here, bytes, deadline);
        // A loop with one post in it, because the code of a post is long.
        loop {
            let last = left <= most;
            let chunk = if last { left } else { most };
            here.bytes = chunk as u32;
            let write = |head| {
                let segments = match request.transfer {
                    Transfer::Nothing => [Segment::default(); 3],
                    Transfer::PutValue { value, .. } => wqe::write_value(head, there, value, chunk as u32),
                    Transfer::Put { .. } => wqe::write(head, there, here),
                    Transfer::Get { .. } => wqe::read(head, there, here),
                };
                // In an entry, a length of 0 means 2 GiB.
                if chunk == 0 { [wqe::nop(head)[0], segments[1], segments[2]] } else { segments }
            };
            let (then, request) =
                if last { (then, *request) } else { (Then::Nothing, Descriptor { counter: None, ..*request }) };
            self.post(write, then, &request, deadline)?;
            if last {
                return Ok(());
            }
            there.address += chunk;
            here.address += chunk;
            left -= chunk;
            // A post that has begun must be finished.
            deadline = Deadline::NONE;
        }
    }

    /// Returns the position of the next post. If a wait for it will need a completion, posts the entry for that now, so
    /// that it precedes later posts.
    #[inline(always)]
    fn position(&self) -> u64 {
        // Nothing is under way to a peer without a connection.
        if !self.pair.connected {
            return 0;
        }
        let position = self.pair.position();
        self.pair.prepare(position, |index, flags| self.dump(&self.pair, index, flags));
        position
    }

    #[inline(always)]
    fn wait(&self, position: u64, deadline: Deadline) -> Result<(), WaitError> {
        if !self.pair.connected {
            return Ok(());
        }
        let dump = |index, flags| self.dump(&self.pair, index, flags);
        let waited = self.pair.wait(position, deadline, dump, || self.take());
        waited.map(|()| self.pair.rest())
    }
}

/// Waits for all earlier posts to all peers.
#[inline(always)]
fn wait_all(core: &Core, deadline: Deadline) -> Result<(), WaitError> {
    let deadline = crate::status::Shared::start::<Global>(deadline);
    each_busy(core, |link| {
        link.pair.prepare(link.pair.position(), |index, flags| link.dump(&link.pair, index, flags));
        Ok(())
    })?;
    each_busy(core, |link| link.wait(link.pair.position(), deadline.left::<Global>()))
}

/// Calls `body` for each peer that may have entries under way.
#[inline(always)]
fn each_busy(core: &Core, mut body: impl FnMut(Link) -> Result<(), WaitError>) -> Result<(), WaitError> {
    // Safety: the front end checked the context; the host keeps its data valid.
    let busy = unsafe { GlobalWord::new(sys::read_word(&raw const (*core.data()).busy)) };
    let ranks = sys::narrow(core.comm().handle().ranks);
    let mut first = 0;
    while first < ranks {
        let mut bits = busy.at((first / BUSY_RANKS) as u64).load_relaxed_gpu() as u32;
        while bits != 0 {
            body(Link::of(core, first + bits.trailing_zeros()))?;
            bits &= bits - 1;
        }
        first += BUSY_RANKS;
    }
    Ok(())
}
