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
//! Lanes that claimed together publish together, by one of them, if all of them find room at once. Otherwise each lane
//! waits and publishes by itself: no wait gathers lanes, because one lane may wait for an entry of another.
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
//! complete and all reads in view, and clears the first, with a release, only if the second is still clear. A poster
//! that marked before the clear is seen by its claim, a poster that marked between by the second bit, and a later
//! poster sets the first bit again. One thread at a time rests, because two would clear each other's second bit.

mod alone;
mod completions;

use crate::order::{self, Order, Sharing};
use crate::status::{Status, WaitError};
use crate::sys::{self, Memory, NAP_NS, Word};
use gin_abi::Deadline;
use gin_abi::gdaki::{CLAIM_SHIFT, RINGING, claimed};
use gin_abi::mlx5::be::Be32;
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

/// Returns the lower 32 bits of the producer index of a claims word.
#[inline(always)]
pub fn place(claims: u64) -> u32 {
    (claims >> CLAIM_SHIFT) as u32
}

/// Returns the index with these lower 32 bits that is less than 2^31 away from `other`.
#[inline(always)]
fn near(index: u32, other: u64) -> u64 {
    other.wrapping_add(index.wrapping_sub(other as u32) as i32 as u64)
}

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
    /// log2 of the distance between entries that ask for a completion. Only the lower five bits count.
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

/// Claimed entries of one thread that wait for room.
#[derive(Clone, Copy, Debug)]
pub struct Entries {
    /// The lower 32 bits of the first index.
    pub index: u32,
    /// Their number; 0 if the thread has claimed none.
    pub count: u32,
}

impl Entries {
    const NONE: Self = Self { index: 0, count: 0 };
}

/// Parts of the protocol that are rare. A kernel has them once and calls them.
pub trait Rare {
    /// Does [`QueuePair::take`].
    fn take(&self) -> bool;

    /// Does [`QueuePair::ring_on`].
    fn ring_on(&self, claims: u64, end: u32);

    /// Does [`Status::end`] for a wait that must end at the time `deadline`.
    fn end(&self, deadline: Deadline) -> Option<WaitError>;
}

/// Why a wait ended early; `None` if an entry has [failed](QueuePair::failure), which the caller must report.
pub type Ended = Option<WaitError>;

/// The threads that post to a queue pair together: one thread, or lanes of a warp.
///
/// Each method but [`group`](Self::group) gathers them, and a post calls each at most once. No loop does.
pub trait Posters {
    /// The threads of the group that publish together.
    type Group;

    /// Claims slots for all threads of the group.
    fn claim(&self) -> Claim;

    /// Returns whether all threads of the group bring `true`.
    fn all(&self, bit: bool) -> bool;

    /// Returns all threads of the group if they publish `together`, else the calling thread. Gathers none.
    fn group(&self, together: bool) -> Self::Group;

    /// Gathers the entries that threads that publish together have just written, and orders memory among them. `more`:
    /// the doorbell may wait for the caller's next post. In the thread that publishes the entries, returns them.
    fn written(&self, more: bool) -> Option<Written>;

    /// Gathers these threads once their entries are published, and orders memory among them.
    fn published(&self);
}

/// Entries of several threads.
#[derive(Clone, Copy, Debug)]
pub struct Written {
    /// The lower 32 bits of the first index.
    pub first: u32,
    /// Their number.
    pub count: u32,
    /// The doorbell may wait for the next post of all these threads.
    pub more: bool,
}

/// The slots of a thread's post, which it must fill and [publish](QueuePair::publish).
#[derive(Clone, Copy, Debug)]
pub struct Slots<G> {
    /// The lower 32 bits of the first index.
    pub index: u32,
    /// The threads that publish together: all of the group if they found room at once.
    pub group: G,
    /// The claim was made while no entry was unpublished and no thread rang: in the thread that publishes the entries
    /// of the group.
    pub leads: bool,
}

/// A thread's part of a claim.
#[derive(Clone, Copy, Debug)]
pub struct Claim {
    /// The lower 32 bits of the thread's first index.
    pub index: u32,
    /// The claims word before, in the thread that publishes the entries of all.
    pub claims: u64,
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
    fn mask(&self) -> u32 {
        (1 << self.depth_log2) - 1
    }

    /// Returns the slot of entry `index`.
    #[inline(always)]
    fn slot(&self, index: u32) -> M::Word {
        self.ring.at((index & self.mask()) as u64 * SLOT_WORDS)
    }

    /// Returns whether each entry below `end`, of which the lower 32 bits are given, has a slot of its own, if all
    /// entries below `completion_index` are complete.
    #[inline(always)]
    fn fits(&self, end: u32, completion_index: u64) -> bool {
        end.wrapping_sub(completion_index as u32) as i32 <= 1 << self.depth_log2
    }

    #[inline(always)]
    fn claims(&self) -> M::Word {
        self.words.at(word::CLAIMS)
    }

    /// Returns the lower 32 bits of the index past the last entry announced. Fewer entries are not announced.
    #[inline(always)]
    fn rung(&self) -> u32 {
        self.words.at(word::RUNG).load_relaxed_gpu() as u32
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

    /// Returns the index of an entry that is not complete, or was not long ago, of its lower 32 bits.
    #[inline(always)]
    fn far(&self, index: u32) -> u64 {
        near(index, self.completion_index())
    }

    /// Returns the lower 32 bits of such an index of its lower `bits` bits.
    #[inline(always)]
    pub fn whole(&self, index: u32, bits: u32) -> u32 {
        let other = self.completion_index() as u32;
        let shift = 32 - bits;
        other.wrapping_add(((index.wrapping_sub(other) << shift) as i32 >> shift) as u32)
    }

    /// Returns the head of entry `index`, of which the lower 32 bits are given, here and below. The entry asks for a
    /// completion if the interval or `flags` requires it.
    #[inline(always)]
    pub fn head(&self, index: u32, flags: Flags) -> Post {
        let turn = index.wrapping_add(1) & (1u32.wrapping_shl(self.interval_log2) - 1) == 0;
        let asks = if turn { Flags::COMPLETION } else { Flags::NONE };
        Post { index: index as u64, queue: self.number, flags: flags.and(asks) }
    }

    /// Stores the first `N` segments of an entry.
    #[inline(always)]
    pub fn store<const N: usize>(&self, index: u32, segments: [Segment; N]) {
        let slot = self.slot(index);
        let mut number = 0;
        while number < N {
            let [low, high] = segments[number].words;
            slot.at(2 * number as u64).store_pair_relaxed_sys(low, high);
            number += 1;
        }
    }

    /// Returns whether entry `index`, which has three segments, has inline data.
    #[inline(always)]
    pub fn is_inline(&self, index: u32) -> bool {
        Be32::from_memory(self.slot(index).at(4).load_relaxed_sys() as u32).get() > MAX_DATA_BYTES
    }

    /// Notes that entry `index` raises a counter once it is complete. The entry is claimed and not published.
    #[inline(always)]
    pub fn tag(&self, index: u32, counter: u32) {
        let end = self.far(index) + 1;
        self.tags.at((index & self.mask()) as u64).store_relaxed_gpu(end << TAG_SHIFT | counter as u64);
        self.words.at(word::TAGGED).red_max_relaxed_gpu(end);
    }

    /// Notes that entry `index` is a READ. The entry is claimed and not published.
    #[inline(always)]
    pub fn note_read(&self, index: u32) {
        self.words.at(word::GOT).red_max_relaxed_gpu(self.far(index) + 1);
    }

    /// Notes that entry `index` is a DUMP, which brings the data of earlier READs into view. The entry is claimed and
    /// not published.
    #[inline(always)]
    pub fn note_dump(&self, index: u32) {
        self.words.at(word::DUMPED).red_max_relaxed_gpu(self.far(index) + 1);
    }

    /// Claims `count` indices if `elected`, with or without room, and returns the claims word before.
    #[inline(always)]
    pub fn claim(&self, elected: bool, count: u32, sharing: Sharing) -> u64 {
        order::claim(self.claims(), elected, (count as u64) << CLAIM_SHIFT | count as u64, sharing)
    }

    /// Claims `count` indices if there is room, and returns the claims word before.
    #[inline(always)]
    fn claim_room(&self, count: u32, completion_index: u64) -> Option<u64> {
        loop {
            let claims = self.claims().load_relaxed_gpu();
            if !self.fits(place(claims).wrapping_add(count), completion_index) {
                return None;
            }
            // A claim that changes of other threads precede is tried again. A claim that succeeds certainly has room.
            let raised = claims.wrapping_add((count as u64) << CLAIM_SHIFT | count as u64);
            if self.claims().cas_relaxed_gpu(claims, raised) == claims {
                return Some(claims);
            }
        }
    }

    /// Claims slots for `count` entries of each thread of `posters`. All call this.
    ///
    /// If not all threads of the group find room at once, each goes on by itself. `wait` then does
    /// [`wait_for_room`](Self::wait_for_room) for its argument, and returns this queue pair, read again, so that no
    /// register keeps it meanwhile.
    ///
    /// A queue pair that does not exist never has room, so the wait finds the missing connection. A post that finds
    /// room does not check.
    ///
    /// Calls `then` with this queue pair and the slots.
    ///
    /// # Errors
    /// The error of the wait.
    // It returns no slots, because LLVM would put a `Result` of them on the stack.
    #[inline(always)]
    pub fn claim_slots<P: Posters>(
        &self,
        count: u32,
        posters: &P,
        wait: impl FnOnce(Entries) -> (Result<(), Ended>, Self),
        then: impl FnOnce(&Self, Slots<P::Group>),
    ) -> Result<(), Ended> {
        let mut pair = *self;
        // Read before the claim, so that the trips to L2 overlap.
        let completion_index = self.completion_index();
        let Claim { index, claims } = posters.claim();
        let fits = self.fits(index.wrapping_add(count), completion_index);
        let together = posters.all(fits);
        let mut slots = Slots { index, group: posters.group(together), leads: together & (claims & BELOW == 0) };
        if !fits {
            let waited;
            (waited, pair) = wait(Entries { index, count });
            waited?;
            // As they are already. Said again, no register keeps them during the wait.
            (slots.group, slots.leads) = (posters.group(false), false);
        }
        then(&pair, slots);
        Ok(())
    }

    /// Publishes the entries of threads that publish together. All call this. `leads` is that of the [`Slots`].
    #[inline(always)]
    pub fn publish(&self, leads: bool, posters: &impl Posters, more: bool, rare: &impl Rare) {
        if let Some(written) = posters.written(more) {
            self.announce(written, leads, rare);
        }
        // One thread has marked the queue pair for all. A flush of each must find the mark.
        posters.published();
    }

    /// Waits until the thread's `own` entries have slots of their own. If it has claimed none, waits for room for
    /// `wanted` entries and claims them last, so that a timeout leaves the queue as it was. Then it returns the claims
    /// word before. Meanwhile it rings for the entries before its own and takes completions.
    ///
    /// # Errors
    /// | error | cause |
    /// | --- | --- |
    /// | [`WaitError::Deadline`] | there was no room in time |
    /// | [`WaitError::Fault`] | the communicator is aborted or has a fault |
    /// | [`WaitError::NotConnected`] | there is no connection to the peer; own entries are no longer claimed |
    /// | `None` | an entry has failed |
    #[inline(always)]
    pub fn wait_for_room(&self, own: Entries, wanted: u32, deadline: Deadline, rare: &impl Rare) -> Result<u64, Ended> {
        waits!(None);
        // The deadline as a time, so that `end` has few arguments.
        let end =
            if deadline.is_none() { deadline } else { Deadline::after_ns(M::clock_ns().saturating_add(deadline.ns())) };
        let mut stop = None;
        loop {
            let completion_index = self.completion_index();
            if own.count != 0 {
                if self.fits(own.index.wrapping_add(own.count), completion_index) {
                    return Ok(0);
                }
            } else if let Some(claims) = self.claim_room(wanted, completion_index) {
                return Ok(claims);
            }
            // A stop counts only if the room found together with it was not enough.
            if stop.is_some() {
                return Err(stop);
            }
            if !self.connected {
                // So that the index never seems to have room.
                let own = own.count as u64;
                self.claims().red_add_relaxed_gpu((own << CLAIM_SHIFT | own).wrapping_neg());
                return Err(Some(WaitError::NotConnected));
            }
            self.pick_up(own, rare);
            if !rare.take() {
                return Err(None);
            }
            stop = rare.end(end);
            M::pause(NAP_NS);
        }
    }

    /// Publishes entries, and rings for them if the thread `leads` or no other thread will. Holds them back instead if
    /// that is wanted and allowed.
    #[inline(always)]
    fn announce(&self, written: Written, leads: bool, rare: &impl Rare) {
        let Written { first, count, more } = written;
        let (end, held) = (first.wrapping_add(count), self.words.at(word::HELD));
        let hold = more && (self.rung() == first || held.load_relaxed_gpu() == self.far(first));
        if hold {
            held.store_relaxed_gpu(self.far(end));
        } else if leads {
            self.ring_for_all(end);
        }
        let announced = if hold | leads { end } else { first };
        if let Some(claims) = self.give_back(count as u64, announced) {
            rare.ring_on(claims, place(claims));
        }
    }

    /// Gives back the thread's share of the lower part of the claims word, [`RINGING`] or its unpublished entries. If
    /// entries from `announced` on are all published then, and no thread rings, returns the claims word:
    /// [`ring_on`](Self::ring_on) must follow.
    #[inline(always)]
    fn give_back(&self, held: u64, announced: u32) -> Option<u64> {
        // Releases the entries and their payload: the thread that rings for them hands them on to the NIC. And the next
        // thread rings after this. A mark comes after its claim.
        M::fence_release_gpu();
        self.busy.red_or_relaxed_gpu(self.marks);
        let claims = self.claims().add_relaxed_gpu(held.wrapping_neg()) - held;
        (claims & BELOW == 0 && place(claims) != announced).then_some(claims)
    }

    /// Rings for entries below `end`, which other threads have published, if no other thread will. `claims` is the
    /// claims word. Rings on while others have published more meanwhile.
    #[inline(always)]
    pub fn ring_on(&self, claims: u64, end: u32) {
        let mut left = Some((claims, end));
        while let Some((claims, end)) = left {
            sys::rolled();
            if self.claims().cas_relaxed_gpu(claims, claims | RINGING) != claims {
                return;
            }
            self.ring_for_all(end);
            left = self.give_back(RINGING, end).map(|claims| (claims, place(claims)));
        }
    }

    /// Announces all entries below `end`, those of other threads too. No other thread rings.
    #[inline(always)]
    fn ring_for_all(&self, end: u32) {
        // Acquires the entries of the others, those too that another thread has announced: the NIC may find this
        // doorbell in the place of that one.
        M::fence_acquire_gpu();
        self.ring(end);
    }

    /// Announces all entries below `end`, which this thread has written or acquired. No other thread rings.
    #[inline(always)]
    fn ring(&self, end: u32) {
        self.words.at(word::RUNG).store_relaxed_gpu(end as u64);
        let record = (Record::send(end as u64).memory() as u64) << 32 | Be32::new(0).memory() as u64;
        self.record.store_relaxed_sys(record);
        if self.releases_to_gpu {
            M::fence_release_gpu();
        } else {
            M::fence_release_sys();
        }
        self.doorbell.store_mmio(Doorbell::word(end as u64, self.number));
    }

    /// Rings if this thread must. A thread whose `own` entries have no room rings for the entries before them, once all
    /// of these are published. Another thread rings for entries that are held back, once all are published.
    #[inline(always)]
    fn pick_up(&self, own: Entries, rare: &impl Rare) {
        let claims = self.claims().load_relaxed_gpu();
        let all = place(claims);
        let end = if own.count == 0 { all } else { own.index };
        // False while a thread rings, because its bit is worth more than a queue.
        if all.wrapping_sub(end) as u64 != claims & BELOW || self.rung() == end {
            return;
        }
        // Acquires the entries, and the completion indices that their posters have seen.
        M::fence_acquire_gpu();
        let fits = own.count != 0 && self.fits(end.wrapping_add(own.count), self.completion_index());
        if !fits {
            rare.ring_on(claims, end);
        }
    }

    /// Rings for held-back entries and [takes](Self::take) completions, and returns its result. Every wait calls this
    /// now and then for each queue pair that may have entries under way.
    #[inline(always)]
    pub fn attend(&self, rare: &impl Rare) -> bool {
        self.pick_up(Entries::NONE, rare);
        rare.take()
    }

    /// Ensures that a completion will cover a wait for the entries below `position`. Never waits.
    ///
    /// Returns the wait's target, the index below which all entries must be complete, if a completion will cover it. If
    /// none will, posts the missing NOP or DUMP, provided that there is room and no other thread does so. `dump` writes
    /// the DUMP.
    #[inline(always)]
    pub fn cover(&self, position: u64, dump: &impl Fn(u32, Flags), rare: &impl Rare) -> Option<u64> {
        let covering = self.words.at(word::COVERING);
        let covered = self.covered(position);
        if covered.sure {
            return Some(covered.target);
        }
        if covering.load_relaxed_gpu() != 0 || covering.cas_relaxed_gpu(0, 1) != 0 {
            return None;
        }
        // Acquires the stores of the previous thread that posted such an entry.
        M::fence_acquire_gpu();
        let Covered { mut target, mut sure, reads } = self.covered(position);
        let completion_index = self.completion_index();
        if !sure && let Some(claims) = self.claim_room(1, completion_index) {
            let at = place(claims);
            let end = near(at, completion_index) + 1;
            if reads {
                dump(at, Flags::COMPLETION.and(Flags::FENCE));
                self.note_dump(at);
                target = end;
            } else {
                // The NOP follows the target, because a noted DUMP has been claimed.
                self.store(at, nop(self.head(at, Flags::COMPLETION)));
            }
            self.words.at(word::COVERED).red_max_relaxed_gpu(end);
            self.announce(Written { first: at, count: 1, more: false }, claims & BELOW == 0, rare);
            sure = true;
        }
        // Releases the words that the next such thread reads.
        covering.store_release_gpu(0);
        sure.then_some(target)
    }

    /// Returns the index past the last DUMP, and whether READs need a DUMP behind it to come into view.
    #[inline(always)]
    fn reads(&self) -> (u64, bool) {
        let word = |index| self.words.at(index).load_relaxed_gpu();
        let (got, dumped) = (word(word::GOT), word(word::DUMPED));
        (dumped, got > dumped)
    }

    /// Finds the target of a wait for the entries below `position`, and whether a completion covers it.
    #[inline(always)]
    fn covered(&self, position: u64) -> Covered {
        let covered = self.words.at(word::COVERED).load_relaxed_gpu();
        let (dumped, reads) = self.reads();
        let target = position.max(dumped);
        let interval = u64::from(1u32.wrapping_shl(self.interval_log2));
        let turn = (target + interval - 1) & !(interval - 1);
        let comes = (covered >= target) | (self.completion_index() >= target) | (self.position() >= turn);
        Covered { target, sure: comes & !reads, reads }
    }

    /// Waits until all entries below `position` are complete and the data of READs among them is in view. Relaxed:
    /// [`finish`] follows.
    ///
    /// # Errors
    /// [`Ended`] if the wait ended early.
    #[inline(always)]
    pub fn wait(
        &self,
        position: u64,
        deadline: Deadline,
        dump: impl Fn(u32, Flags),
        rare: &impl Rare,
    ) -> Result<(), Ended> {
        let (mut target, mut succeeds) = (None, true);
        let waited = self.status.poll_host_word(deadline, |_| {
            if target.is_none() {
                target = self.cover(position, &dump, rare);
            }
            succeeds = self.attend(rare);
            !succeeds | target.is_some_and(|target| self.completion_index() >= target)
        });
        if succeeds { waited.map_err(Some) } else { Err(None) }
    }

    /// Clears the mark of entries under way if there are none and all reads are in view. The mark may also stay: then
    /// the next flush checks the queue pair and finds nothing to wait for.
    #[inline(always)]
    pub fn rest(&self) {
        if self.position() != self.completion_index() || !self.begin_taking() {
            return;
        }
        let fresh = self.marks >> 32 << 32;
        let rest = self.busy.and_relaxed_gpu(!fresh) & !fresh;
        // Acquires the claims and reads of threads that have marked the queue pair before.
        M::fence_acquire_gpu();
        if self.position() == self.completion_index() && !self.reads().1 {
            // A flush that finds no mark waits for nothing, and comes after all that these entries did.
            M::fence_release_gpu();
            // The exchange fails if a thread has marked the queue pair since.
            self.busy.cas_relaxed_gpu(rest, rest & !self.marks);
        }
        self.end_taking();
    }
}
