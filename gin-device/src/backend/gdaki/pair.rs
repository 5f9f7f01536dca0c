// SPDX-License-Identifier: MIT OR Apache-2.0
//! The protocol by which threads of a GPU share a queue pair: they post to it, ring its doorbell and take its
//! completions.
//!
//! It is generic over the [`Memory`], so that a model checker can run it against a NIC.
//!
//! # Posting
//! The claims word holds the producer index, the number of entries that are claimed and not published, and a bit that a
//! thread sets while it rings the doorbell ([`claimed`](gin_abi::gdaki::claimed)).
//!
//! 1. A thread *claims* indices by one add, for itself or for all lanes of its warp that post to the same queue pair.
//! 2. It waits until the slots are free and writes the entries.
//! 3. It *publishes* them: it subtracts their number. The thread that finds no other unpublished entry and no thread
//!    that rings, sets the bit and rings: it writes record and doorbell once for all entries.
//! 4. The thread that rings clears the bit. If others have published all their entries meanwhile, it rings again.
//!
//! A thread that claimed while no entry was unpublished and no thread rang *leads*: it rings before it publishes. Its
//! unpublished entries take the place of the bit, and step 4 is its publishing.
//!
//! So a slow thread delays only the doorbell, never the others' posts. The doorbell lags while posts overlap, but by
//! less than a queue: a thread that waits for room rings for the entries before its own once these are all published.
//!
//! A poster may hold entries back ("more to come"). It publishes them and does not ring, provided that all entries
//! before them are announced or held back too: `rung` or `held` is their first index. Otherwise some thread may have
//! left the doorbell to this one. The next poster rings for held-back entries, and so does every wait
//! ([`attend`](QueuePair::attend)).
//!
//! # Completions
//! Entry i asks for a completion if i + 1 is a multiple of the interval, so a full queue always has one to come. If no
//! completion covers the entries that a thread waits for, it posts a NOP that asks for one, or a DUMP if reads must
//! come into view. One thread does this for all. One thread at a time *takes* completions for all: it raises the
//! counters of the complete entries, then moves `completion_index`. A completion with an error becomes the
//! communicator's fault.
//!
//! # Why it is right
//! *A slot is not overwritten too early.* A thread writes a slot only after it read a `completion_index` past the
//! slot's previous entry. A NIC writes that entry's completion after it has read the entry. The thread's stores depend
//! on the branch that its read decides, as in [`queue`](crate::queue).
//!
//! *Announced entries are whole.* Publishing is a release after the entries, and all changes of the claims word are
//! read-modify-writes. So the thread that rings acquires all entries that it finds published. Then it stores the
//! record, releases to the system and rings. A thread that leads releases its entries by that release. It acquires the
//! entries before them, which were published when it claimed, even if they are announced already, because its
//! doorbell may replace the one that announced them before the NIC has seen that one. The memory model requires the
//! release to the system, because a NIC is no thread of this GPU. If the host reports that the NIC reads entries and
//! payload through this GPU's L2 cache ([`releases_to_gpu`](QueuePair::releases_to_gpu)), a release to the GPU is
//! enough.
//!
//! *A thread that waits for room announces no hole.* It finds as many entries published as there are before its own,
//! then no room for its own. The threads that published had room, and all room ends before the end of its own entries.
//! So the published entries are the ones before its own.
//!
//! *Doorbell and record never go backwards.* The thread that rings stores them before it clears the bit, or before it
//! publishes if it leads, with a release between. The next one stores later, because its stores depend on the exchange
//! that set the bit, or on the claim by which it leads. While a thread leads, its entries are unpublished, so no other
//! thread leads or sets the bit. (A thread that waits for room sets it only if all entries before its own are
//! published. Its own follow those of the thread that leads.)
//!
//! *Nothing is held back for ever.* A publisher that does not ring has found unpublished entries, or a thread that
//! rings. The thread that rings finds the former published when it clears the bit or publishes, or finds others
//! unpublished. Of unpublished entries one is published last. If that publisher cannot set the bit, a thread has
//! claimed in between, behind entries that are neither announced nor held back; so that thread does not hold its own
//! back, and the argument applies to it. Entries that are held back are announced by the next wait.
//!
//! *A flush misses no queue pair.* Two bits mark a queue pair. The first means that entries may be under way. The
//! second means that a poster has set both bits since a thread last began to clear the first. A poster sets both after
//! its claim, with a release between. [`rest`](QueuePair::rest) clears the second, acquires, finds all claimed entries
//! complete, and clears the first, with a release, only if the second is still clear. A poster that marked before the
//! clear is seen by its claim, a poster that marked between by the second bit, and a later poster sets the first bit
//! again. One thread at a time rests, because two would clear each other's second bit.

mod alone;

use crate::order::{self, Order, Sharing};
use crate::status::{Status, WaitError};
use crate::sys::{self, Memory, NAP_NS, Word};
use gin_abi::Deadline;
use gin_abi::gdaki::{CLAIM_SHIFT, RINGING, claimed};
use gin_abi::mlx5::be::Be32;
use gin_abi::mlx5::cqe::{SYNDROME_WORD, TAIL_WORD, Tail, opcode};
use gin_abi::mlx5::doorbell::{Doorbell, Record};
use gin_abi::mlx5::wqe::{Flags, MAX_DATA_BYTES, Post, QueueNumber, Segment, nop};

/// Number of words of a slot, and of a completion.
const SLOT_WORDS: u64 = 8;
/// Largest number of completions that a thread takes before it lets others take them.
const TAKE: u32 = 32;

/// Number of bits by which an index is shifted in a tag word.
pub const TAG_SHIFT: u32 = 24;

/// The bits of the claims word below the producer index.
const BELOW: u64 = (1 << CLAIM_SHIFT) - 1;

/// Indices of the words behind the first cache line of [`QueuePairData`](gin_abi::gdaki::QueuePairData).
mod word {
    use core::mem::offset_of;
    use gin_abi::gdaki::QueuePairData as Data;

    pub(super) const CLAIMS: u64 = offset_of!(Data, claims) as u64 / 8;
    pub(super) const COMPLETION_INDEX: u64 = offset_of!(Data, completion_index) as u64 / 8;
    pub(super) const CQ_CONSUMER_INDEX: u64 = offset_of!(Data, cq_consumer_index) as u64 / 8;
    pub(super) const TAKING: u64 = offset_of!(Data, taking) as u64 / 8;
    pub(super) const RUNG: u64 = offset_of!(Data, rung) as u64 / 8;
    pub(super) const GOT: u64 = offset_of!(Data, got) as u64 / 8;
    pub(super) const DUMPED: u64 = offset_of!(Data, dumped) as u64 / 8;
    pub(super) const COVERED: u64 = offset_of!(Data, covered) as u64 / 8;
    pub(super) const COVERING: u64 = offset_of!(Data, covering) as u64 / 8;
    pub(super) const TAGGED: u64 = offset_of!(Data, tagged) as u64 / 8;
    pub(super) const HELD: u64 = offset_of!(Data, held) as u64 / 8;
}

/// A queue pair. `Copy`: every thread has its own.
#[derive(Clone, Copy, Debug)]
pub struct QueuePair<M: Memory> {
    /// First word of its [`QueuePairData`](gin_abi::gdaki::QueuePairData). The words that change are behind its first
    /// cache line.
    pub words: M::Word,
    /// First word of the send queue.
    pub ring: M::Word,
    /// First tag word.
    pub tags: M::Word,
    /// First word of the completion queue.
    pub completions: M::Word,
    /// The doorbell record.
    pub record: M::Word,
    /// The doorbell.
    pub doorbell: M::Word,
    /// The word with the two bits that mark the queue pair: see the module's docs.
    pub busy: M::Word,
    /// These two bits; the second is in the upper half.
    pub marks: u64,
    /// First counter word.
    pub counters: M::Word,
    /// The queue pair exists. If false, only [`words`](Self::words) may be used.
    pub connected: bool,
    /// Its number.
    pub number: QueueNumber,
    /// log2 of the number of slots.
    pub depth_log2: u32,
    /// log2 of the distance between entries that ask for a completion.
    pub interval_log2: u32,
    /// Before the doorbell, entries and payload are released to the GPU only.
    pub releases_to_gpu: bool,
    /// The aborts and faults that end waits.
    pub status: Status<M>,
}

/// The target of a wait for entries, and whether a completion covers it.
#[derive(Clone, Copy, Debug)]
struct Covered {
    /// All entries below must be complete: the awaited ones, and the DUMP that brings reads among them into view.
    target: u64,
    /// A completion of the target has arrived or will arrive. The waiter posts nothing.
    sure: bool,
    /// Reads need a DUMP to come into view. The target does not include it yet.
    reads: bool,
}

/// The parameters of a thread's post.
#[derive(Clone, Copy, Debug)]
pub struct Posting {
    /// Number of entries, 1 or 2.
    pub count: u64,
    /// The other users of the queue pair.
    pub sharing: Sharing,
    /// The doorbell may wait for the next post.
    pub more: bool,
    /// The limit of the wait for room.
    pub deadline: Deadline,
}

/// Entries of one thread that wait for room.
#[derive(Clone, Copy, Debug)]
pub struct Entries {
    /// The first.
    pub index: u64,
    /// Their number; 0 if the thread has claimed none.
    pub count: u64,
}

impl Entries {
    const NONE: Self = Self { index: 0, count: 0 };
}

/// Entries that are written.
#[derive(Clone, Copy, Debug)]
struct Published {
    /// The first.
    index: u64,
    /// Their number. They need not follow each other.
    count: u64,
    /// They are all entries of a claim that was made while no entry was unpublished and no thread rang.
    leads: bool,
    /// Index past the last entry announced, read before the claim.
    rung: u64,
    /// A completion index, read before the claim.
    completion_index: u64,
}

/// The right to ring, which one thread at a time has.
#[derive(Clone, Copy, Debug)]
pub struct Turn {
    /// The thread must ring for all entries below.
    end: u64,
    /// The part of the claims word that keeps others from ringing: [`RINGING`], or the thread's unpublished entries.
    held: u64,
}

/// The threads that post to a queue pair together: one thread, or lanes of a warp.
///
/// They stay together, because one may wait for a slot whose entry another has yet to write. Each calls
/// [`written`](Self::written) and [`any`](Self::any) as often as the others.
pub trait Posters {
    /// Claims slots for each thread of the group at once. Returns the claims word at the caller's first slot, or `None`
    /// if each thread claims for itself once it finds room.
    fn claim(&self) -> Option<u64>;

    /// Gathers the entries that threads of the group have just written. `filled`: the caller has.
    ///
    /// In one of the threads that claimed together and have written entries, the first of them, returns the number of
    /// these entries, and whether these threads claimed no others. Orders memory among them.
    fn written(&self, filled: bool) -> Option<(u64, bool)>;

    /// Returns whether any thread of the group brings `true`.
    fn any(&self, bit: bool) -> bool;
}

/// Ends a wait for queue pairs: acquires as requested, and checks whether a finished request failed.
///
/// # Errors
/// The error of the wait, or [`WaitError::Fault`] if the communicator has a fault.
#[inline(always)]
pub fn finish<M: Memory>(waited: Result<(), WaitError>, status: &Status<M>, order: Order) -> Result<(), WaitError> {
    if order == Order::Acquire {
        M::fence_acquire_sys();
    }
    waited.and_then(|()| status.check_near())
}

impl<M: Memory> QueuePair<M> {
    #[inline(always)]
    fn mask(&self) -> u64 {
        (1 << self.depth_log2) - 1
    }

    /// Returns whether each entry below `end` has a slot of its own, given that all entries below `completion_index`
    /// are complete.
    #[inline(always)]
    fn fits(&self, end: u64, completion_index: u64) -> bool {
        end.wrapping_sub(completion_index) as i64 <= 1 << self.depth_log2
    }

    #[inline(always)]
    fn claims(&self) -> M::Word {
        self.words.at(word::CLAIMS)
    }

    #[inline(always)]
    fn rung(&self) -> u64 {
        self.words.at(word::RUNG).load_relaxed_gpu()
    }

    /// Returns the index of the next claim.
    #[inline(always)]
    pub fn position(&self) -> u64 {
        claimed(self.claims().load_relaxed_gpu(), self.completion_index())
    }

    /// Returns the index below which all entries are complete.
    #[inline(always)]
    pub fn completion_index(&self) -> u64 {
        self.words.at(word::COMPLETION_INDEX).load_relaxed_gpu()
    }

    /// Returns the head of entry `index`. It asks for a completion if the interval or `flags` requires it.
    #[inline(always)]
    pub fn head(&self, index: u64, flags: Flags) -> Post {
        let turn = (index + 1) & ((1 << self.interval_log2) - 1) == 0;
        let asks = if turn { Flags::COMPLETION } else { Flags::NONE };
        Post { index, queue: self.number, flags: flags.and(asks) }
    }

    /// Stores the first `N` segments of an entry.
    #[inline(always)]
    pub fn store<const N: usize>(&self, index: u64, segments: [Segment; N]) {
        let slot = self.ring.at((index & self.mask()) * SLOT_WORDS);
        let mut number = 0;
        while number < N {
            let [low, high] = segments[number].words;
            slot.at(2 * number as u64).store_pair_relaxed_sys(low, high);
            number += 1;
        }
    }

    /// Returns whether entry `index`, which has three segments, has inline data.
    #[inline(always)]
    pub fn is_inline(&self, index: u64) -> bool {
        let slot = self.ring.at((index & self.mask()) * SLOT_WORDS);
        Be32::from_memory(slot.at(4).load_relaxed_sys() as u32).get() > MAX_DATA_BYTES
    }

    /// Notes that entry `index` raises a counter once it is complete. The entry is claimed and not published.
    #[inline(always)]
    pub fn tag(&self, index: u64, counter: u32) {
        let word = (index + 1) << TAG_SHIFT | counter as u64;
        self.tags.at(index & self.mask()).store_relaxed_gpu(word);
        self.words.at(word::TAGGED).red_max_relaxed_gpu(index + 1);
    }

    /// Notes that entry `index` is a READ. The entry is claimed and not published.
    #[inline(always)]
    pub fn note_read(&self, index: u64) {
        self.words.at(word::GOT).red_max_relaxed_gpu(index + 1);
    }

    /// Notes that entry `index` is a DUMP, which brings the data of earlier READs into view. The entry is claimed and
    /// not published.
    #[inline(always)]
    pub fn note_dump(&self, index: u64) {
        self.words.at(word::DUMPED).red_max_relaxed_gpu(index + 1);
    }

    /// Claims `count` indices if `elected`, with or without room, and returns the claims word before.
    #[inline(always)]
    pub fn claim(&self, elected: bool, count: u64, sharing: Sharing) -> u64 {
        order::claim(self.claims(), elected, count << CLAIM_SHIFT | count, sharing)
    }

    /// Claims `count` indices if there is room, and returns the claims word before.
    #[inline(always)]
    fn claim_room(&self, count: u64, completion_index: u64) -> Option<u64> {
        loop {
            let claims = self.claims().load_relaxed_gpu();
            if !self.fits(claimed(claims, completion_index) + count, completion_index) {
                return None;
            }
            // A claim that changes of other threads precede is tried again. A claim that succeeds certainly has room.
            let raised = claims.wrapping_add(count << CLAIM_SHIFT | count);
            if self.claims().cas_relaxed_gpu(claims, raised) == claims {
                return Some(claims);
            }
        }
    }

    /// Writes entries by `fill`, which takes their first index, and publishes them. All threads of `posters` call.
    ///
    /// If the slots are claimed already, waits until they are free. Otherwise waits for room and claims last, so that a
    /// timeout leaves the queue as it was. `help` does what brings room to its argument, [`help`](Self::help) and
    /// [`take`](Self::take). It returns why a post that began at its second argument must give up, if it must, and this
    /// queue pair, read again, so that no register keeps it meanwhile.
    ///
    /// A queue pair that does not exist never has room, so the wait finds the missing connection. A post that finds
    /// room does not check.
    ///
    /// # Errors
    /// | error | cause |
    /// | --- | --- |
    /// | [`WaitError::Deadline`] | there was no room in time; nothing was posted |
    /// | [`WaitError::Fault`] | the communicator is aborted or has a fault |
    /// | [`WaitError::NotConnected`] | there is no connection to the peer |
    #[inline(always)]
    pub fn post(
        &self,
        posting: Posting,
        posters: &impl Posters,
        fill: impl Fn(&Self, u64),
        help: impl Fn(Entries, u64) -> (Option<WaitError>, Self),
    ) -> Result<(), WaitError> {
        let Posting { count, more, deadline, .. } = posting;
        let start = if deadline.is_none() { 0 } else { M::clock_ns() };
        let mut pair = *self;
        // Read before the claim, so that the trips to L2 overlap.
        let (rung, mut completion_index) = (pair.rung(), pair.completion_index());
        let claims = posters.claim();
        let (claims_later, mut has) = (claims.is_none(), claims.is_some());
        let mut claims = claims.unwrap_or(0);
        let (mut waiting, mut stop, mut ended) = (true, None, None);
        loop {
            if claims_later
                && waiting
                && !has
                && let Some(found) = pair.claim_room(count, completion_index)
            {
                (has, claims) = (true, found);
            }
            let index = claimed(claims, completion_index);
            let filling = waiting & has & pair.fits(index + count, completion_index);
            if filling {
                fill(&pair, index);
            }
            waiting &= !filling;
            if let Some((count, whole)) = posters.written(filling) {
                let leads = whole & (claims & BELOW == 0);
                if let Some(turn) = pair.publish(Published { index, count, leads, rung, completion_index }, more) {
                    pair.carry(turn);
                }
            }
            // A stop counts only if the room found together with it was not enough.
            if waiting & stop.is_some() {
                (waiting, ended) = (false, stop);
            }
            if !posters.any(waiting) {
                break;
            }
            // All threads do the rest, so that they stay together. A claimed slot has room, or gets it from the NIC
            // alone, so no deadline ends the wait for it.
            (stop, pair) = help(Entries { index, count: if waiting & has { count } else { 0 } }, start);
            stop = stop.filter(|&end| !has || end != WaitError::Deadline);
            completion_index = pair.completion_index();
        }
        match ended {
            None => Ok(()),
            Some(stop) => Err(stop),
        }
    }

    /// Does what brings a post room: [rings](Self::pick_up) for the entries before its own. The caller then
    /// [takes](Self::take) completions. Returns false if there is no connection.
    #[inline(always)]
    pub fn help(&self, own: Entries) -> bool {
        if self.connected {
            M::pause(NAP_NS);
            if let Some(turn) = self.pick_up(own) {
                self.carry(turn);
            }
        }
        self.connected
    }

    /// Publishes entries, unless this thread leads. If this thread must ring, returns its turn.
    #[inline(always)]
    fn publish(&self, entries: Published, hold: bool) -> Option<Turn> {
        let Published { index, count, leads, rung, completion_index } = entries;
        let (claims, end) = (self.claims(), index + count);
        let turn = if leads && !hold {
            Turn { end, held: count }
        } else {
            let hold = hold && (rung == index || self.words.at(word::HELD).load_relaxed_gpu() == index);
            if hold {
                self.words.at(word::HELD).store_relaxed_gpu(end);
            }
            // Releases the entries and their payload. The release of the thread that rings hands them on to the NIC.
            M::fence_release_gpu();
            self.busy.red_or_relaxed_gpu(self.marks);
            let none = claims.add_relaxed_gpu(count.wrapping_neg()) - count;
            let all = claimed(none, completion_index);
            if none & BELOW != 0 || hold && all == end || claims.cas_relaxed_gpu(none, none | RINGING) != none {
                return None;
            }
            Turn { end: all, held: RINGING }
        };
        // Acquires the entries of the others, those too that another thread has announced: the NIC may find this
        // doorbell in the place of that one.
        M::fence_acquire_gpu();
        Some(turn)
    }

    /// Rings in this thread's turn, then for entries that others publish meanwhile.
    #[inline(always)]
    fn carry(&self, turn: Turn) {
        let (claims, Turn { mut end, mut held }) = (self.claims(), turn);
        loop {
            self.ring(end);
            // The next thread rings after this. A mark comes after its claim.
            M::fence_release_gpu();
            self.busy.red_or_relaxed_gpu(self.marks);
            let none = claims.add_relaxed_gpu(held.wrapping_neg()) - held;
            let all = claimed(none, end);
            if none & BELOW != 0 || all == end || claims.cas_relaxed_gpu(none, none | RINGING) != none {
                return;
            }
            M::fence_acquire_gpu();
            // A constant would make the compiler write the loop's first round out.
            (end, held) = (all, sys::stay(RINGING as u32) as u64);
        }
    }

    /// Announces all entries below `end`. No other thread rings.
    #[inline(always)]
    fn ring(&self, end: u64) {
        self.words.at(word::RUNG).store_relaxed_gpu(end);
        let record = (Record::send(end).memory() as u64) << 32 | Be32::new(0).memory() as u64;
        self.record.store_relaxed_sys(record);
        if self.releases_to_gpu {
            M::fence_release_gpu();
        } else {
            M::fence_release_sys();
        }
        self.doorbell.store_mmio(Doorbell::word(end, self.number));
    }

    /// Returns this thread's turn, if it must ring. A thread whose `own` entries have no room rings for the entries
    /// before them, once all of these are published. Another thread rings for entries that are held back, once all are
    /// published.
    #[inline(always)]
    fn pick_up(&self, own: Entries) -> Option<Turn> {
        let claims = self.claims().load_relaxed_gpu();
        let all = claimed(claims, self.completion_index());
        let end = if own.count == 0 { all } else { own.index };
        // False while a thread rings, because its bit is worth more than a queue.
        if all.wrapping_sub(end) != claims & BELOW || self.rung() == end {
            return None;
        }
        // Acquires the entries, and the completion indices that their posters have seen.
        M::fence_acquire_gpu();
        let fits = own.count != 0 && self.fits(end + own.count, self.completion_index());
        let rings = !fits && self.claims().cas_relaxed_gpu(claims, claims | RINGING) == claims;
        rings.then_some(Turn { end, held: RINGING })
    }

    /// Rings for held-back entries and takes completions. Every wait calls this now and then for each queue pair that
    /// may have entries under way.
    #[inline(always)]
    pub fn attend(&self, take: impl Fn()) {
        if let Some(turn) = self.pick_up(Entries::NONE) {
            self.carry(turn);
        }
        take();
    }

    /// Takes completions, unless another thread does. Returns false if an entry has [failed](Self::failure).
    #[inline(always)]
    pub fn take(&self) -> bool {
        if !self.begin_taking() {
            return true;
        }
        let (mut consumed, completion_index) =
            (self.words.at(word::CQ_CONSUMER_INDEX).load_relaxed_gpu(), self.completion_index());
        let (mut end, mut left) = (completion_index, TAKE);
        let mut succeeds = true;
        while left > 0 {
            let tail = Tail(self.completion(consumed).at(TAIL_WORD as u64).load_relaxed_sys());
            if !tail.is_in_place(consumed, self.depth_log2) {
                break;
            }
            if tail.opcode() != opcode::REQUEST {
                succeeds = false;
                break;
            }
            // 16 bits are enough, because fewer than 2^16 entries are under way.
            end += 1 + tail.index().wrapping_sub(end as u16) as u64;
            consumed += 1;
            left -= 1;
        }
        if end != completion_index {
            // Acquires the NIC's writes before these completions.
            M::fence_acquire_sys();
            self.raise_counters(completion_index, end);
            self.words.at(word::CQ_CONSUMER_INDEX).store_relaxed_gpu(consumed);
            self.words.at(word::COMPLETION_INDEX).store_release_gpu(end);
        }
        self.end_taking();
        succeeds
    }

    /// Returns the completion of the failed entry: its tail, and the word with the syndromes. Nobody takes it.
    #[inline(always)]
    pub fn failure(&self) -> (Tail, u64) {
        let at = self.completion(self.words.at(word::CQ_CONSUMER_INDEX).load_relaxed_gpu());
        let tail = Tail(at.at(TAIL_WORD as u64).load_relaxed_sys());
        M::fence_acquire_sys();
        (tail, at.at(SYNDROME_WORD as u64).load_relaxed_sys())
    }

    #[inline(always)]
    fn completion(&self, index: u64) -> M::Word {
        self.completions.at((index & self.mask()) * SLOT_WORDS)
    }

    /// Tries to become the one thread that takes completions and clears marks. Returns false if another thread is that
    /// one.
    #[inline(always)]
    fn begin_taking(&self) -> bool {
        let taking = self.words.at(word::TAKING);
        if taking.load_relaxed_gpu() != 0 || taking.cas_relaxed_gpu(0, 1) != 0 {
            return false;
        }
        // Acquires the stores of the previous such thread.
        M::fence_acquire_gpu();
        true
    }

    #[inline(always)]
    fn end_taking(&self) {
        self.words.at(word::TAKING).store_release_gpu(0);
    }

    /// Raises the counters of entries that are complete.
    #[inline(always)]
    fn raise_counters(&self, first: u64, end: u64) {
        let tagged = self.words.at(word::TAGGED).load_relaxed_gpu();
        if tagged <= first {
            return;
        }
        // Releases the data of the entries first.
        M::fence_release_gpu();
        let mut index = first;
        while index < end {
            let tag = self.tags.at(index & self.mask()).load_relaxed_gpu();
            if tag >> TAG_SHIFT == (index + 1) & (u64::MAX >> TAG_SHIFT) {
                self.counters.at(tag & ((1 << TAG_SHIFT) - 1)).red_add_relaxed_gpu(1);
            }
            index += 1;
        }
    }

    /// Ensures that a completion will cover a wait for the entries below `position`. Never waits.
    ///
    /// Returns the wait's target, the index below which all entries must be complete, if a completion will cover it. If
    /// none will, posts the missing NOP or DUMP, provided that there is room and no other thread does so. `dump` writes
    /// the DUMP. Also returns this thread's turn, if it must ring then.
    #[inline(always)]
    fn cover(&self, position: u64, dump: &impl Fn(u64, Flags)) -> (Option<u64>, Option<Turn>) {
        let covering = self.words.at(word::COVERING);
        let covered = self.covered(position);
        if covered.sure {
            return (Some(covered.target), None);
        }
        if covering.load_relaxed_gpu() != 0 || covering.cas_relaxed_gpu(0, 1) != 0 {
            return (None, None);
        }
        // Acquires the stores of the previous thread that posted such an entry.
        M::fence_acquire_gpu();
        let Covered { mut target, mut sure, reads } = self.covered(position);
        let (mut turn, rung, completion_index) = (None, self.rung(), self.completion_index());
        if !sure && let Some(claims) = self.claim_room(1, completion_index) {
            let at = claimed(claims, completion_index);
            if reads {
                dump(at, Flags::COMPLETION.and(Flags::FENCE));
                self.note_dump(at);
                target = at + 1;
            } else {
                // The NOP follows the target, because a noted DUMP has been claimed.
                self.store(at, nop(self.head(at, Flags::COMPLETION)));
            }
            self.words.at(word::COVERED).red_max_relaxed_gpu(at + 1);
            let leads = claims & BELOW == 0;
            turn = self.publish(Published { index: at, count: 1, leads, rung, completion_index }, false);
            sure = true;
        }
        // Releases the words that the next such thread reads.
        covering.store_release_gpu(0);
        (sure.then_some(target), turn)
    }

    /// Finds the target of a wait for the entries below `position`, and whether a completion covers it.
    #[inline(always)]
    fn covered(&self, position: u64) -> Covered {
        let word = |index| self.words.at(index).load_relaxed_gpu();
        let (got, dumped, covered) = (word(word::GOT), word(word::DUMPED), word(word::COVERED));
        let reads = got > dumped;
        let target = position.max(dumped);
        let interval = 1u64 << self.interval_log2;
        let turn = (target + interval - 1) & !(interval - 1);
        let comes = (covered >= target) | (self.completion_index() >= target) | (self.position() >= turn);
        Covered { target, sure: comes & !reads, reads }
    }

    /// Waits until all entries below `position` are complete and the data of READs among them is in view. Relaxed:
    /// [`finish`] follows.
    ///
    /// # Errors
    /// [`WaitError`] if the wait ended early.
    #[inline(always)]
    pub fn wait(
        &self,
        position: u64,
        deadline: Deadline,
        dump: impl Fn(u64, Flags),
        take: impl Fn(),
    ) -> Result<(), WaitError> {
        let mut target = None;
        self.status.poll_host_word(deadline, || {
            let mut turn = None;
            if target.is_none() {
                (target, turn) = self.cover(position, &dump);
            }
            if turn.is_none() {
                turn = self.pick_up(Entries::NONE);
            }
            if let Some(turn) = turn {
                self.carry(turn);
            }
            take();
            target.is_some_and(|target| self.completion_index() >= target)
        })
    }

    /// Posts the entry that a [`wait`](Self::wait) for the entries below `position` will need, if that is possible at
    /// once.
    #[inline(always)]
    pub fn prepare(&self, position: u64, dump: impl Fn(u64, Flags)) {
        if let (_, Some(turn)) = self.cover(position, &dump) {
            self.carry(turn);
        }
    }

    /// Clears the mark of entries under way if there are none. The mark may also stay: then the next flush checks the
    /// queue pair and finds nothing to wait for.
    #[inline(always)]
    pub fn rest(&self) {
        if self.position() != self.completion_index() || !self.begin_taking() {
            return;
        }
        let fresh = self.marks >> 32 << 32;
        let rest = self.busy.and_relaxed_gpu(!fresh) & !fresh;
        // Acquires the claims of threads that have marked the queue pair before.
        M::fence_acquire_gpu();
        if self.position() == self.completion_index() {
            // A flush that finds no mark waits for nothing, and comes after all that these entries did.
            M::fence_release_gpu();
            // The exchange fails if a thread has marked the queue pair since.
            self.busy.cas_relaxed_gpu(rest, rest & !self.marks);
        }
        self.end_taking();
    }
}
