// SPDX-License-Identifier: MIT OR Apache-2.0
//! The protocol by which threads of a GPU share a queue pair: they post to it, ring its doorbell and take its
//! completions.
//!
//! It is generic over the [`Memory`], so that a model checker can run it against a NIC.
//!
//! # Posting
//! 1. A thread *claims* indices by one add, for itself or for all lanes of its warp that post to the same queue pair.
//! 2. It waits until the slots are free and writes the entries.
//! 3. It *publishes* them: it writes their number to the token word of its first slot.
//! 4. The thread that has the *token* announces entries to the NIC. The token is at the first index that is not
//!    announced. A thread that publishes there takes the token and carries it past all entries published behind it. It
//!    writes record and doorbell once for all of them. Then it lays the token down at the next index that is not
//!    published.
//!
//! So a slow thread delays only the doorbell, never the others' posts. A thread that finds no token is finished,
//! because the thread that brings the token rings for all.
//!
//! | token word of index i | meaning |
//! | --- | --- |
//! | less than `i << 10` | a value of an earlier round: nothing is published yet |
//! | `i << 10` | the token was here; a thread took it away to ring for entries held back |
//! | `(i << 10) + 1` | the token; all entries below i are announced |
//! | `(i << 10) + 2` | the token; entries below i are held back |
//! | `(i << 10) + 2 + n` | n entries are published from here on |
//!
//! The value of a word only grows, by atomic maxima, so publisher and carrier both learn which of them came first.
//!
//! A poster that holds entries back ("more to come") publishes them and lays the token down behind them without a
//! doorbell. The next poster rings for them, and so does every wait ([`attend`](QueuePair::attend)).
//!
//! Lanes that post together publish in *runs*. All lanes of the group inside a run have written their entries. Each
//! lane finds room by its own load, so a lane may find none though the lanes on both sides do.
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
//! *Announced entries are whole.* Publishing is a release after the entries. The carrier acquires the entries that it
//! finds published and the entries that it finds held back. Then it stores the record, releases to the system and
//! rings. A thread that holds entries back behind other held-back entries acquires and releases again before it lays
//! the token down, and so hands on their writes. The memory model requires the release to the system, because a NIC is
//! no thread of this GPU. If the host reports that the NIC reads entries and payload through this GPU's L2 cache
//! ([`releases_to_gpu`](QueuePair::releases_to_gpu)), a release to the GPU is enough.
//!
//! *Doorbell and record never go backwards.* The holder of the token stores them before it lays the token down, with a
//! release between. The next holder stores later, because its stores depend on the exchange that took the token.
//!
//! *Nothing is held back for ever.* A publisher that finds no token has stored before the carrier's maximum at that
//! word, so the carrier finds its entries. Entries that are held back have the token behind them, and every wait checks
//! that place.
//!
//! *A flush misses no queue pair.* Two bits mark a queue pair. The first means that entries may be under way. The
//! second means that a poster has set both bits since a thread last began to clear the first. A poster sets both after
//! its claim, with a release between. [`rest`](QueuePair::rest) clears the second, acquires, finds all claimed entries
//! complete, and clears the first only if the second is still clear. A poster that marked before the clear is seen by
//! its claim, a poster that marked between by the second bit, and a later poster sets the first bit again. One thread
//! at a time rests, because two would clear each other's second bit.

use crate::fault::Fault;
use crate::order::{self, Order, Sharing};
use crate::status::{Status, WaitError};
use crate::sys::{Memory, NAP_NS, Word};
use gin_abi::Deadline;
use gin_abi::mlx5::be::Be32;
use gin_abi::mlx5::cqe::{SYNDROME_WORD, TAIL_WORD, Tail, opcode};
use gin_abi::mlx5::doorbell::{Doorbell, Record};
use gin_abi::mlx5::wqe::{Flags, MAX_DATA_BYTES, Post, QueueNumber, Segment, nop};

/// Number of words of a slot, and of a completion.
const SLOT_WORDS: u64 = 8;
/// Largest number of completions that a thread takes before it lets others take them.
const TAKE: u32 = 32;

/// Number of bits by which an index is shifted in a token word.
pub const TOKEN_SHIFT: u32 = 10;
/// Largest number of entries published at once.
pub const MOST_PUBLISHED: u64 = (1 << TOKEN_SHIFT) - 3;
/// Number of bits by which an index is shifted in a tag word.
pub const TAG_SHIFT: u32 = 24;

/// Returns the token word of `index` after a thread took the token away.
const fn away(index: u64) -> u64 {
    index << TOKEN_SHIFT
}

/// Returns the token at `index`, behind entries that are announced.
const fn token(index: u64) -> u64 {
    index << TOKEN_SHIFT | 1
}

/// Returns the token at `index`, behind entries that are held back.
const fn held(index: u64) -> u64 {
    index << TOKEN_SHIFT | 2
}

/// Returns the token word of `index` with `count` published entries, at least one.
const fn published(index: u64, count: u64) -> u64 {
    held(index) + count
}

/// Indices of the words behind the first cache line of [`QueuePairData`](gin_abi::gdaki::QueuePairData).
mod word {
    use core::mem::offset_of;
    use gin_abi::gdaki::QueuePairData as Data;

    pub(super) const PRODUCER_INDEX: u64 = offset_of!(Data, producer_index) as u64 / 8;
    pub(super) const COMPLETION_INDEX: u64 = offset_of!(Data, completion_index) as u64 / 8;
    pub(super) const CQ_CONSUMER_INDEX: u64 = offset_of!(Data, cq_consumer_index) as u64 / 8;
    pub(super) const TAKING: u64 = offset_of!(Data, taking) as u64 / 8;
    pub(super) const RUNG: u64 = offset_of!(Data, rung) as u64 / 8;
    pub(super) const GOT: u64 = offset_of!(Data, got) as u64 / 8;
    pub(super) const DUMPED: u64 = offset_of!(Data, dumped) as u64 / 8;
    pub(super) const COVERED: u64 = offset_of!(Data, covered) as u64 / 8;
    pub(super) const COVERING: u64 = offset_of!(Data, covering) as u64 / 8;
    pub(super) const TAGGED: u64 = offset_of!(Data, tagged) as u64 / 8;
}

/// A queue pair. `Copy`: every thread has its own.
#[derive(Clone, Copy, Debug)]
pub struct QueuePair<M: Memory> {
    /// First word of its [`QueuePairData`](gin_abi::gdaki::QueuePairData). The words that change are behind its first
    /// cache line.
    pub words: M::Word,
    /// First word of the send queue.
    pub ring: M::Word,
    /// First token word.
    pub tokens: M::Word,
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

/// The token while a thread carries it.
#[derive(Clone, Copy, Debug)]
struct Carried {
    /// All entries below are published.
    end: u64,
    /// The doorbell waits for the next post.
    hold: bool,
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

/// The threads that post to a queue pair together: one thread, or lanes of a warp.
///
/// They stay together, because one may wait for a slot whose entry another has yet to write. Each calls
/// [`written`](Self::written) and [`any`](Self::any) as often as the others.
pub trait Posters {
    /// Claims slots for each thread of the group at once and returns the caller's first index. Returns `None` if each
    /// thread claims for itself once it finds room.
    fn claim(&self) -> Option<u64>;

    /// Gathers the entries that threads of the group have just written. `filled`: the caller has; `index`: its first.
    ///
    /// In one of the threads that claimed together, returns the first index and the number of entries that they have
    /// written since the last call. Orders memory among them.
    fn written(&self, filled: bool, index: u64) -> Option<(u64, u64)>;

    /// Returns whether any thread of the group brings `true`.
    fn any(&self, bit: bool) -> bool;
}

/// A thread that posts alone.
#[derive(Clone, Copy, Debug)]
pub struct OneThread<'a, M: Memory> {
    /// The queue pair.
    pub pair: &'a QueuePair<M>,
    /// Its post.
    pub posting: Posting,
}

impl<M: Memory> Posters for OneThread<'_, M> {
    #[inline(always)]
    fn claim(&self) -> Option<u64> {
        let Posting { count, sharing, deadline, .. } = self.posting;
        deadline.is_none().then(|| self.pair.claim(true, count, sharing))
    }

    #[inline(always)]
    fn written(&self, filled: bool, index: u64) -> Option<(u64, u64)> {
        filled.then_some((index, self.posting.count))
    }

    #[inline(always)]
    fn any(&self, bit: bool) -> bool {
        bit
    }
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

/// A completion of a failed entry: its tail, and the word with the syndromes.
pub type Failure = (Tail, u64);

/// Finds the run of a lane: neighbouring lanes of a group that have written entries. Returns whether the run begins
/// with the lane, and the run's last lane, which is at least the lane itself.
///
/// | argument | lanes |
/// | --- | --- |
/// | `group` | the lanes that claimed together |
/// | `filled` | the lanes of `group` that have written entries |
/// | `below` | the lanes below the calling lane |
#[inline(always)]
pub fn run(group: u32, filled: u32, below: u32) -> (bool, u32) {
    let own = below.wrapping_add(1);
    let (missing, before) = (group & !filled & below, filled & below);
    let gaps = group & !filled & !below;
    // The lanes before the first gap, or all.
    let run = filled & !below & (gaps & gaps.wrapping_neg()).wrapping_sub(1);
    (filled & own != 0 && missing >= before, 31 - (run | own).leading_zeros())
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
    fn token_word(&self, index: u64) -> M::Word {
        self.tokens.at(index & self.mask())
    }

    /// Returns the index of the next claim.
    #[inline(always)]
    pub fn position(&self) -> u64 {
        self.words.at(word::PRODUCER_INDEX).load_relaxed_gpu()
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

    /// Claims `count` indices if `leads`, with or without room, and returns the first.
    #[inline(always)]
    pub fn claim(&self, leads: bool, count: u64, sharing: Sharing) -> u64 {
        order::claim(self.words.at(word::PRODUCER_INDEX), leads, count, sharing)
    }

    /// Claims `count` indices if the next index is still `at`. Returns whether it has.
    #[inline(always)]
    fn claim_at(&self, at: u64, count: u64) -> bool {
        self.words.at(word::PRODUCER_INDEX).cas_relaxed_gpu(at, at + count) == at
    }

    /// Writes entries by `fill`, which takes their first index, and publishes them. All threads of `posters` call.
    ///
    /// If the slots are claimed already, waits until they are free. Otherwise waits for room and claims last, so that a
    /// timeout leaves the queue as it was. `help` calls [`help`](Self::help) with its arguments, place and start.
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
        fill: impl Fn(u64),
        help: impl Fn(u64, u64) -> Option<WaitError>,
    ) -> Result<(), WaitError> {
        let Posting { count, sharing, more, deadline } = posting;
        let start = if deadline.is_none() { 0 } else { M::clock_ns() };
        // Read before the claim, so that the two trips to L2 overlap.
        let mut completion_index = self.completion_index();
        let claimed = posters.claim();
        let (mut has, mut index) = (claimed.is_some(), claimed.unwrap_or(0));
        let (mut waiting, mut stop, mut ended) = (true, None, None);
        loop {
            if claimed.is_none() {
                let at = self.position();
                // A claim that another thread's claim precedes is tried again. A claim that succeeds certainly has
                // room.
                if waiting & !has & self.fits(at + count, completion_index) && self.claim_at(at, count) {
                    (has, index) = (true, at);
                }
            }
            let filling = waiting & has & self.fits(index + count, completion_index);
            if filling {
                fill(index);
            }
            waiting &= !filling;
            if let Some((first, count)) = posters.written(filling, index)
                && let Some(token) = self.publish(first, count, more, sharing)
            {
                self.carry(token);
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
            stop = help(if has { index } else { self.position() }, start)
                .filter(|&end| !has || end != WaitError::Deadline);
            completion_index = self.completion_index();
        }
        match ended {
            None => Ok(()),
            Some(stop) => Err(stop),
        }
    }

    /// Does what brings a post room: rings for entries held back if the token is at `at`, and
    /// [takes](Self::take) completions. Returns why a post that began at `start` must give up, if it must.
    #[inline(always)]
    pub fn help(
        &self,
        at: u64,
        start: u64,
        deadline: Deadline,
        failed: impl Fn(Failure) -> Fault,
    ) -> Option<WaitError> {
        if !self.connected {
            return Some(WaitError::NotConnected);
        }
        M::pause(NAP_NS);
        if let Some(token) = self.pick_up(at) {
            self.carry(token);
        }
        self.take(failed);
        self.status.end(start, deadline)
    }

    /// Publishes `count` entries from `first` on, 1 to [`MOST_PUBLISHED`]. Returns the token if it was there.
    #[inline(always)]
    fn publish(&self, first: u64, count: u64, hold: bool, sharing: Sharing) -> Option<Carried> {
        let end = first + count;
        if sharing == Sharing::Thread && !hold {
            // No other thread publishes, so the token is here and stays here. The doorbell's release covers the
            // entries.
            self.busy.red_or_relaxed_gpu(self.marks);
            self.ring(end);
            self.token_word(end).store_relaxed_gpu(token(end));
            return None;
        }
        // Releases the entries and their payload. The carrier's release hands them on to the NIC.
        M::fence_release_gpu();
        self.busy.red_or_relaxed_gpu(self.marks);
        let found = self.token_word(first).max_relaxed_gpu(published(first, count));
        if found == held(first) {
            // This thread announces the entries held back before its own, or hands them on together with its own.
            M::fence_acquire_gpu();
            if hold {
                M::fence_release_gpu();
            }
        }
        (found == token(first) || found == held(first)).then_some(Carried { end, hold })
    }

    /// Carries the token past all entries published behind it, and rings.
    #[inline(always)]
    fn carry(&self, token: Carried) {
        let Carried { mut end, mut hold } = token;
        loop {
            if !hold {
                self.ring(end);
                // The thread that takes the token up rings after this.
                M::fence_release_gpu();
            }
            let lies_at = if hold { held(end) } else { self::token(end) };
            let found = self.token_word(end).max_relaxed_gpu(lies_at);
            if found < lies_at {
                return;
            }
            let (first, mut count) = (end, found - held(end));
            // At most a full queue: the NIC has not seen these entries yet.
            while count <= MOST_PUBLISHED && end - first <= self.mask() {
                end += count;
                let next = self.token_word(end).load_relaxed_gpu();
                if next <= held(end) {
                    break;
                }
                count = next - held(end);
            }
            M::fence_acquire_gpu();
            hold = false;
        }
    }

    /// Announces all entries below `end`. The caller has the token.
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

    /// Takes the token up if it is at `end` and entries before it are held back.
    #[inline(always)]
    fn pick_up(&self, end: u64) -> Option<Carried> {
        let word = self.token_word(end);
        let taken = word.load_relaxed_gpu() == held(end) && word.cas_relaxed_gpu(held(end), away(end)) == held(end);
        if taken {
            // Acquires the entries that are held back.
            M::fence_acquire_gpu();
        }
        taken.then_some(Carried { end, hold: false })
    }

    /// Rings for held-back entries and takes completions. Every wait calls this now and then for each queue pair that
    /// may have entries under way.
    #[inline(always)]
    pub fn attend(&self, take: impl Fn()) {
        if let Some(token) = self.pick_up(self.position()) {
            self.carry(token);
        }
        take();
    }

    /// Takes completions, unless another thread does. Reports the fault of a failed entry, which `failed` makes.
    #[inline(always)]
    pub fn take(&self, failed: impl Fn(Failure) -> Fault) {
        if !self.begin_taking() {
            return;
        }
        let (mut consumed, completion_index) =
            (self.words.at(word::CQ_CONSUMER_INDEX).load_relaxed_gpu(), self.completion_index());
        let (mut end, mut left) = (completion_index, TAKE);
        let mut failure = None;
        while left > 0 {
            let at = self.completions.at((consumed & self.mask()) * SLOT_WORDS);
            let tail = Tail(at.at(TAIL_WORD as u64).load_relaxed_sys());
            if !tail.is_in_place(consumed, self.depth_log2) {
                break;
            }
            if tail.opcode() != opcode::REQUEST {
                failure = Some((tail, at));
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
        if let Some((tail, at)) = failure {
            M::fence_acquire_sys();
            self.status.report(failed((tail, at.at(SYNDROME_WORD as u64).load_relaxed_sys())));
        }
        self.end_taking();
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
    /// the DUMP. Also returns the token if it was at that entry.
    #[inline(always)]
    fn cover(&self, position: u64, dump: &impl Fn(u64, Flags)) -> (Option<u64>, Option<Carried>) {
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
        let (mut token, at) = (None, self.position());
        if !sure && self.fits(at + 1, self.completion_index()) && self.claim_at(at, 1) {
            if reads {
                dump(at, Flags::COMPLETION.and(Flags::FENCE));
                self.note_dump(at);
                target = at + 1;
            } else {
                // The NOP follows the target, because a noted DUMP has been claimed.
                self.store(at, nop(self.head(at, Flags::COMPLETION)));
            }
            self.words.at(word::COVERED).red_max_relaxed_gpu(at + 1);
            token = self.publish(at, 1, false, Sharing::Gpu);
            sure = true;
        }
        // Publishing has released the words that the next such thread reads.
        covering.store_relaxed_gpu(0);
        (sure.then_some(target), token)
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
            let mut token = None;
            if target.is_none() {
                (target, token) = self.cover(position, &dump);
            }
            if token.is_none() {
                token = self.pick_up(self.position());
            }
            if let Some(token) = token {
                self.carry(token);
            }
            take();
            target.is_some_and(|target| self.completion_index() >= target)
        })
    }

    /// Posts the entry that a [`wait`](Self::wait) for the entries below `position` will need, if that is possible at
    /// once.
    #[inline(always)]
    pub fn prepare(&self, position: u64, dump: impl Fn(u64, Flags)) {
        if let (_, Some(token)) = self.cover(position, &dump) {
            self.carry(token);
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
            // The exchange fails if a thread has marked the queue pair since.
            self.busy.cas_relaxed_gpu(rest, rest & !self.marks);
        }
        self.end_taking();
    }
}
