// SPDX-License-Identifier: MIT OR Apache-2.0
//! Words in host memory that many threads wait for: one thread polls the word for all.
//!
//! A GPU reads a word in host memory about once a microsecond, with any number of reading threads, because reads of one
//! address are served one after the other. All other traffic over PCIe, the proxy's copies included, waits behind the
//! reads already issued. (An H100 with driver 580, 2026-11-21: 1.02 million reads a second of one word, by 32 warps or
//! by 2112; a copy of 8 bytes to the GPU took 5.6 us beside none of them, 118 us beside 32 and 1.9 ms beside 1056.)
//!
//! A word that many threads may wait for therefore has a few *near words* in GPU memory. Through them the threads take
//! turns to poll the word:
//!
//! | near word | value |
//! | --- | --- |
//! | [`SEEN`] | the last value read, while `TURN` is 2 |
//! | [`TURN`] | 0: no thread polls the word itself; 1: a thread does; 2: that thread has stored to `SEEN` |
//! | [`WANTED`] | 1 once a thread had to wait for its turn |
//!
//! A thread that finds `TURN` at 0 and sets it to 1 polls the word itself until its wait ends. If `WANTED` is set, it
//! stores each value to `SEEN`. The other threads poll `SEEN` and try to take the turn.
//!
//! A thread that waits for room in a queue takes the turn for one read only, and keeps the value in [`SPARE`], where
//! all such threads find it. A flush that has the turn keeps its values there, too.
//!
//! A lane whose wait has ended stays behind its loop until all lanes leave that entered the loop together with it. So
//! the read that ends the wait gives the turn back: a function that each round of the loop calls. Otherwise lanes that
//! wait for a larger value would wait for ever.
//!
//! # Why it is right
//! *The writes that the word covers are visible.* A thread that takes the value from `SEEN` makes an acquire fence when
//! its wait has ended, as after the word itself. The store to `SEEN` is a release, and follows an acquire fence that
//! follows the read of the word. So everything before the raise happens before the end of the wait.
//!
//! *No thread waits in vain.* Once `WANTED` is set, the thread with the turn stores after every read, also the same
//! value again, or gives its turn back after one read. When the turn is free, a waiting thread takes it.
//!
//! *No store of an earlier turn arrives late.* A thread that stored to `SEEN` gives its turn back by a release, and
//! each thread with a turn makes an acquire fence before it stores to `SEEN`. A thread that stored nothing gives its
//! turn back by a plain store. That store depends on the branch on having taken the turn, so it follows the release
//! before it, as in [`queue`](crate::queue).
//!
//! *A seen value is not older than the value that ended an earlier wait.* `SEEN` counts only while a turn lasts, and
//! only after the first store of that turn, which the 2 in `TURN` releases. An earlier wait had that turn or an earlier
//! one, or saw the value in `SEEN`. (The reads of a turn come after the turn was taken, because they depend on that
//! branch, and GPUs do not load speculatively.) So values may be compared on a circle, and a word may go back between
//! waits.

use crate::mailbox;
use crate::status::Status;
use crate::sys::{Memory, NAP_NS, Word};

pub use crate::near_words::{LAST, MAIL, SEEN, SPARE, TURN, WANTED, WORDS};

/// Values of [`TURN`].
const FREE: u64 = 0;
const POLLING: u64 = 1;
const SHOWN: u64 = 2;

/// A word in host memory.
#[derive(Clone, Copy, Debug)]
pub struct HostWord<M: Memory> {
    /// The word itself.
    pub word: M::Word,
    /// The first of [`WORDS`] near words in GPU memory, all 0 at first.
    pub near: M::Word,
}

impl<M: Memory> HostWord<M> {
    /// Reads the word in a turn of one read. If another thread has the turn, returns the value in [`SPARE`], which may
    /// be an older one. Relaxed.
    #[inline(always)]
    pub(crate) fn glance(&self) -> u64 {
        let turn = self.near.at(TURN);
        if turn.cas_relaxed_gpu(FREE, POLLING) != FREE {
            M::pause(NAP_NS);
            return self.near.at(SPARE).load_relaxed_gpu();
        }
        let now = self.word.load_relaxed_sys();
        self.near.at(SPARE).store_relaxed_gpu(now);
        // Ordered as in `give_back`.
        turn.store_relaxed_sys(FREE);
        now
    }
}

/// The reads of a host word by one wait.
#[derive(Debug)]
#[must_use]
pub struct Look<M: Memory> {
    host: HostWord<M>,
    state: u32,
}

/// Bit of a [`Look`]'s state: it has the turn.
const MINE: u32 = 1;
/// With the turn: has stored a value to [`SEEN`]. Without: has asked for values by [`WANTED`].
const ANNOUNCED: u32 = 2;
/// The last read returned a value.
const VALID: u32 = 4;
/// Reads add the raises that kernels took from the mailbox.
const ADDS: u32 = 8;
/// One of the reads by a thread with the turn, which the bits from here on count.
const READ: u32 = 1 << 16;
/// From this number of reads on, a thread pauses before each read by [`NAP_NS`] for each read before it, but not longer
/// than for [`MAX_NAPS`] of them: about a thirtieth of the time that it has waited.
///
/// Copy engines share PCIe with these reads. Copies of 1 MiB between two H100s, 64 in a batch, moved 262 GB/s beside 1
/// thread of each GPU that polled a word of its own in host memory without a pause, 251 beside 4, 55 beside 16, 21
/// beside 64 and 10.5 beside 128 (driver 580.159.04, 2026-11-27); polls of GPU memory changed nothing. A wait of a
/// few microseconds has ended before.
const PAUSES_FROM: u32 = 12;
const MAX_NAPS: u32 = 64;
/// The count of reads modulo 8. At each second of eight reads the thread also reads the word by which senders ask for
/// the mailbox: not at the first, with which many waits end.
const READS: u32 = 7 * READ;
const ASKS: u32 = 2 * READ;

impl<M: Memory> Look<M> {
    /// Returns the reads of a wait that has made none yet.
    #[inline(always)]
    pub fn new(host: HostWord<M>) -> Self {
        Self { host, state: 0 }
    }

    /// Returns whether the word is `position` or more, as this thread or another one read it. Relaxed: an acquire fence
    /// may follow. If it is, or if the wait `ends`, gives the turn back: this is the last read.
    ///
    /// A fault that the host posted before the word got its value is announced too: a thread that got the value from
    /// another thread and has fenced finds the fault in GPU memory. The value is kept in [`SPARE`] for
    /// [`glance`](HostWord::glance).
    #[inline(always)]
    pub fn is_past(&mut self, status: &Status<M>, position: u64, ends: bool) -> bool {
        let (HostWord { word, near }, Status { host, copy, .. }) = (self.host, *status);
        self.state = outlined::look_past::<M>(word, near, self.state, position, ends, host, copy);
        self.state & VALID != 0
    }

    /// Returns how far the word is past `enough`, as this thread or another one read it. Returns `None` if another
    /// thread has the turn and has not stored yet. Relaxed: an acquire fence may follow.
    ///
    /// Gives the turn back if the word is at or past `enough`, because then the wait is likely to end. When it ends for
    /// another reason, [`end`](Self::end) must be called.
    #[inline(always)]
    pub fn now(&mut self, enough: u64) -> Option<u64> {
        let HostWord { word, near } = self.host;
        let over;
        (over, self.state) = outlined::look::<M>(word, near, self.state, enough);
        (self.state & VALID != 0).then_some(over)
    }

    /// Returns the same reads. If `adds`, [`now_and_drain`](Self::now_and_drain) adds [`MAIL`] to the word.
    #[inline(always)]
    pub(crate) fn with_mail(mut self, adds: bool) -> Self {
        self.state = if adds { ADDS } else { 0 };
        self
    }

    /// Does the same as [`now`](Self::now), and drains the [mailbox](crate::mailbox) whose words in GPU memory these
    /// are: opens it if a sender wants that and no other thread has it open, or carries out its next entry. Closes it
    /// where it gives the turn back. [`leave`](Self::leave) must be called before [`end`](Self::end).
    #[inline(always)]
    pub(crate) fn now_and_drain(&mut self, mailbox: M::Word, enough: u64) -> Option<u64> {
        let HostWord { word, near } = self.host;
        let over;
        (over, self.state) = outlined::look_and_drain::<M>(word, near, self.state, mailbox, enough);
        (self.state & VALID != 0).then_some(over)
    }

    /// Returns whether this thread has the mailbox open.
    #[inline(always)]
    pub(crate) fn drains(&self) -> bool {
        self.state & mailbox::OPEN != 0
    }

    /// Closes the mailbox if this thread has it open.
    #[inline(always)]
    pub(crate) fn leave(&self, mailbox: M::Word) {
        if self.drains() {
            outlined::close::<M>(mailbox);
        }
    }

    /// Returns whether this thread has the turn, or had it in its last read: it has read the word itself.
    #[inline(always)]
    pub fn is_mine(&self) -> bool {
        self.state & MINE != 0
    }

    /// Gives the turn back if this thread has it.
    #[inline(always)]
    pub fn end(self) {
        if self.is_mine() {
            outlined::give_back::<M>(self.host.near, self.state);
        }
    }
}

/// Gives the turn back if the thread has it.
#[inline(always)]
fn give_back<M: Memory>(near: M::Word, state: u32) {
    let turn = near.at(TURN);
    if state & (MINE | ANNOUNCED) == MINE | ANNOUNCED {
        turn.store_release_gpu(FREE);
    } else if state & MINE != 0 {
        // Ordered by the branch on having the turn. An atomic would express that in the memory model too, and cost
        // 0.2 us a wait.
        turn.store_relaxed_sys(FREE);
    }
}

/// Gives the turn back if the thread has it and the wait is likely to end. Returns the new state.
#[inline(always)]
fn give_back_if<M: Memory>(ends: bool, near: M::Word, state: u32) -> u32 {
    if ends && state & MINE != 0 {
        give_back::<M>(near, state);
        return state & !(MINE | ANNOUNCED);
    }
    state
}

/// Reads the word in the given state of a [`Look`]; `announce` runs before another thread is shown a value. Returns
/// the value, if it is [`VALID`], and the new state.
#[inline(always)]
fn look<M: Memory>(word: M::Word, near: M::Word, mut state: u32, announce: impl FnOnce()) -> (u64, u32) {
    let (seen, turn, wanted) = (near.at(SEEN), near.at(TURN), near.at(WANTED));
    state &= !VALID;
    if state & MINE == 0 {
        let turn_now = turn.load_relaxed_gpu();
        if turn_now == FREE && turn.cas_relaxed_gpu(FREE, POLLING) == FREE {
            state = MINE;
        } else {
            if state & ANNOUNCED == 0 {
                wanted.store_relaxed_gpu(1);
                state |= ANNOUNCED;
            }
            M::pause(NAP_NS);
            if turn_now != SHOWN {
                return (0, state);
            }
            M::fence_acquire_gpu();
            return (seen.load_relaxed_gpu(), state | VALID);
        }
    }
    // A virtual GPU has no PCIe, and finds more mistakes the more often it looks.
    if cfg!(target_arch = "nvptx64") && state >> READ.ilog2() >= PAUSES_FROM {
        M::pause(NAP_NS * (state >> READ.ilog2()).min(MAX_NAPS));
    }
    // The trip to the host first: other loads overlap with it.
    let now = word.load_relaxed_sys();
    state = state.wrapping_add(READ);
    let wanted = wanted.load_relaxed_gpu() != 0;
    if wanted {
        M::fence_acquire_sys();
        announce();
        seen.store_release_gpu(now);
        if state & ANNOUNCED == 0 {
            turn.store_release_gpu(SHOWN);
            state |= ANNOUNCED;
        }
    }
    (now, state | VALID)
}

/// Code of reads of host memory, which a kernel has once and calls.
mod outlined {
    use super::{ADDS, ASKS, MAIL, MINE, READS, SPARE, VALID, give_back_if};
    use crate::mailbox::{OPEN, Reader};
    use crate::status;
    use crate::sys::{Memory, Word};

    #[cfg_attr(target_arch = "nvptx64", inline(never))]
    pub(super) fn look<M: Memory>(word: M::Word, near: M::Word, state: u32, enough: u64) -> (u64, u32) {
        let (now, state) = super::look::<M>(word, near, state, || {});
        let over = now.wrapping_sub(enough);
        (over, give_back_if::<M>(over as i64 >= 0, near, state))
    }

    #[cfg_attr(target_arch = "nvptx64", inline(never))]
    pub(super) fn look_and_drain<M: Memory>(
        word: M::Word,
        near: M::Word,
        state: u32,
        mailbox: M::Word,
        enough: u64,
    ) -> (u64, u32) {
        let (reader, open, adds) = (Reader::<M>::new(mailbox), state & OPEN != 0, state & ADDS);
        // Loads first, so that these trips overlap with that of the word, but nothing that waits for one of them.
        // Nobody else raises `MAIL` while this thread has the mailbox open.
        let mail = if adds != 0 { near.at(MAIL).load_relaxed_gpu() } else { 0 };
        let entry = if open { reader.load() } else { (0, [0; 4]) };
        let (now, mut state) = super::look::<M>(word, near, state, || {});
        let mut over = now.wrapping_sub(enough.wrapping_sub(mail));
        state |= adds;
        if open {
            let (taken, raised);
            (taken, raised, state) = reader.drain(state, entry, near);
            over = over.wrapping_add(if adds != 0 { raised } else { 0 });
            // Here, because more trips to GPU memory would come between the last raise and the end of the wait.
            if over as i64 >= 0 {
                state = reader.close(state, taken);
            }
        } else if (over as i64) < 0 && state & MINE != 0 {
            // Of all threads that wait for the word, only the one that reads it, and not each time: in a communicator
            // whose senders want no mailbox, each read would be one more trip to the host.
            if reader.is_wanted() || state & READS == ASKS && reader.host() != 0 {
                state = reader.open(state);
            }
        }
        (over, give_back_if::<M>(over as i64 >= 0, near, state))
    }

    #[cfg_attr(target_arch = "nvptx64", inline(never))]
    pub(super) fn close<M: Memory>(mailbox: M::Word) {
        Reader::<M>::new(mailbox).leave();
    }

    #[cfg_attr(target_arch = "nvptx64", inline(never))]
    pub(super) fn give_back<M: Memory>(near: M::Word, state: u32) {
        super::give_back::<M>(near, state);
    }

    #[cfg_attr(target_arch = "nvptx64", inline(never))]
    pub(super) fn look_past<M: Memory>(
        word: M::Word,
        near: M::Word,
        state: u32,
        position: u64,
        ends: bool,
        host: M::Word,
        copy: M::Word,
    ) -> u32 {
        let (now, mut state) = super::look::<M>(word, near, state, || {
            status::look::<M>(host, copy);
        });
        if state & MINE != 0 {
            near.at(SPARE).store_relaxed_gpu(now);
        }
        if now < position {
            state &= !VALID;
        }
        if ends | (state & VALID != 0) {
            // The state keeps the turn's bit, which tells the caller that this thread has read the word.
            super::give_back::<M>(near, state);
        }
        state
    }
}
