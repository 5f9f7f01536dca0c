// SPDX-License-Identifier: MIT OR Apache-2.0
//! Mailboxes: values that CPU threads hand to a rank's kernels, which store them to GPU memory themselves.
//!
//! A CPU thread cannot store to GPU memory. A copy by the driver takes about 9 us until the CPU knows that it is
//! complete; a kernel that waits reads pinned memory in about 1 us. So a sender's CPU thread posts a small value with
//! its signal to the mailbox of the receiver, a ring in pinned memory. A kernel thread of the receiver that waits for a
//! signal drains the mailbox: it stores the value, then raises the signal. (H200, 2026-11-24: round trip of 8 bytes
//! with a release before each post, through CPU threads without any other work: 21.8 us by copies, 13.6 us by stream
//! memory operations, 6.2 us by a mailbox.)
//!
//! # Words
//! | word | memory | written by | meaning |
//! | --- | --- | --- | --- |
//! | `CLAIMED` | pinned | senders | the next entry's index |
//! | `HOST` | pinned | senders | 0 until a sender wants the mailbox open, then 2; 3 while one takes entries back |
//! | `KERNEL` | pinned | the thread with the turn | twice the number of entries taken, plus 1 while the mailbox is open |
//! | slots | pinned | senders | entries of 4 words, each with its phase, as in [`queue`](crate::queue) |
//! | `TURN` | GPU memory | kernels | 1 while a thread has the turn to drain |
//! | `TAKEN` | GPU memory | the thread with the turn | the number of entries taken |
//! | `WANTED` | GPU memory | kernels | 1 once a kernel thread has seen that a sender wants the mailbox open |
//! | `MAIL` of a signal | GPU memory | the thread with the turn | the sum of the raises that kernels took |
//!
//! The mailbox is open while a kernel thread drains it. A sender posts to an open mailbox only. If it closes before the
//! entry is taken, the sender takes the entry back and copies by the driver. So a value never waits for a kernel that
//! waits for nothing. Opening and closing take about 3 us, so kernels begin to only once a sender has found the mailbox
//! closed.
//!
//! A GPU's reads of one 32-byte sector of host memory are served one after the other, a microsecond each. So an entry
//! is two pairs of words in different places, which are read at the same time.
//!
//! # Why it is right
//! *An entry has one effect.* A kernel thread opens the mailbox, then reads `HOST`; a sender marks `HOST`, then reads
//! `KERNEL`; each has a sequentially consistent fence between. So at least one sees the other. A kernel thread that
//! sees the sender's mark closes again; a sender that sees the mailbox open gives up. So no thread drains while a
//! sender takes entries back. The sender makes them void before it unmarks `HOST` with release. The next kernel thread
//! acquires that, and skips void entries.
//!
//! *A signal covers its value and all puts before it.* The sender posts a strong signal only after the copies before it
//! are complete, and releases before it stores the entry. The kernel thread acquires after it read all words, stores
//! the value, releases, and raises the signal's word in GPU memory, which only the thread with the turn raises. So that
//! thread need not read the word again to know its value.
//!
//! *A sender that finds its entry taken may go on.* `KERNEL` moves after the release that precedes the raise. So a
//! sender that sees it move, and acquires, finds the value stored.
//!
//! *No slot is overwritten before it was read.* A sender stores into a slot after a branch on `KERNEL`, which moves
//! after a branch on the words of the slot, as in [`queue`](crate::queue).
//!
//! *A thread that gets the turn knows how many entries were taken*, because the turn is given back by a release, and an
//! acquire fence follows when it is taken. An old number would be dangerous: a thread that finds one sender taking back
//! closes with it, and another sender whose entry was taken would take the entry back.

use crate::near_words;
use crate::queue::phase;
use crate::sys::{Memory, Word};

/// Words of an entry.
const WORDS: u64 = 4;

/// Places of the words in pinned memory. Those of different writers are on different cache lines.
const CLAIMED: u64 = 0;
const HOST: u64 = 16;
const KERNEL: u64 = 32;
const SLOTS: u64 = 48;
/// Returns the number of words in pinned memory, all 0 at first.
#[must_use]
pub const fn pinned_words<M: Memory>() -> u64 {
    SLOTS + (WORDS << M::MAILBOX_LOG2)
}

/// Places of the words in GPU memory, all 0 at first except the address.
const TURN: u64 = 0;
const TAKEN: u64 = 1;
/// Place of the address of the words in pinned memory.
pub const PINNED: u64 = 2;
/// Place of `WANTED`.
pub const WANTED: u64 = 3;
/// Place of the first signal's near words, behind those of the mailbox, so that no kernel looks up their address.
pub const SIGNALS: u64 = 16;

/// Bits of `HOST`: a sender wants the mailbox open; a sender takes entries back.
const DESIRED: u64 = 2;
const TAKING_BACK: u64 = 1;

/// Bit of `KERNEL`: the mailbox is open.
const OPENED: u64 = 1;

/// Bits of a waiting thread's state: it has the turn, and the mailbox is open.
pub(crate) const OPEN: u32 = 1 << 8;
/// It has taken an entry and not told the senders yet.
const UNTOLD: u32 = 1 << 9;

/// The content of an entry.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Entry {
    /// The value to store.
    pub value: Option<Value>,
    /// The index of a signal among all signals of the communicator, less than 2^32, and the amount to add.
    pub signal: Option<(u64, u64)>,
}

/// A value and its place.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Value {
    /// The address in the receiver's GPU memory, less than 2^62, a multiple of the width.
    pub address: u64,
    /// The value, in the low bits.
    pub value: u64,
    /// log2 of its width in bytes, 0 to 3.
    pub width_log2: u32,
}

/// Bits of the last word of an entry, beside the signal's index.
const HAS_VALUE: u64 = 1 << 60;
const HAS_SIGNAL: u64 = 1 << 59;
const WIDTH: u32 = 61;
const TOP: u64 = 1 << 63;

impl Entry {
    /// An entry without effect.
    const VOID: Self = Self { value: None, signal: None };

    /// Returns the words of the entry. Bit 0 of each is free for the phase.
    const fn words(&self) -> [u64; WORDS as usize] {
        let (mut words, mut last) = ([0; WORDS as usize], 0);
        if let Some(Value { address, value, width_log2 }) = self.value {
            words[0] = value << 1;
            words[1] = address << 1 | value & TOP;
            last |= HAS_VALUE | (width_log2 as u64) << WIDTH;
        }
        if let Some((index, amount)) = self.signal {
            words[2] = amount << 1;
            last |= HAS_SIGNAL | index << 1 | amount & TOP;
        }
        words[3] = last;
        words
    }

    #[inline(always)]
    fn read(words: [u64; WORDS as usize]) -> Self {
        let [low, place, amount, last] = words;
        let value = Value {
            address: (place & !TOP) >> 1,
            value: low >> 1 | place & TOP,
            width_log2: (last >> WIDTH) as u32 & 3,
        };
        Self {
            value: (last & HAS_VALUE != 0).then_some(value),
            signal: (last & HAS_SIGNAL != 0).then_some(((last >> 1) as u32 as u64, amount >> 1 | last & TOP)),
        }
    }
}

/// Returns the two pairs of words of an entry.
#[inline(always)]
fn pairs<M: Memory>(pinned: M::Word, index: u64) -> [M::Word; 2] {
    let slot = index & ((1 << M::MAILBOX_LOG2) - 1);
    let first = pinned.at(SLOTS + 2 * slot);
    [first, first.at(2 << M::MAILBOX_LOG2)]
}

/// The senders' end of a mailbox. Any number of CPU threads, also of several processes, have one each.
#[derive(Clone, Copy, Debug)]
pub struct Sender<M: Memory> {
    /// The first of [`pinned_words`] words.
    pub pinned: M::Word,
}

impl<M: Memory> Sender<M> {
    fn store(&self, index: u64, entry: &Entry) {
        let ([first, second], [a, b, c, d]) = (pairs::<M>(self.pinned, index), entry.words());
        let phase = phase(index, M::MAILBOX_LOG2);
        first.store_pair_relaxed_sys(a | phase, b | phase);
        second.store_pair_relaxed_sys(c | phase, d | phase);
    }

    /// Tells kernels that the mailbox should be open.
    pub fn want(&self) {
        let host = self.pinned.at(HOST);
        if host.load_relaxed_sys() == 0 {
            host.cas_relaxed_sys(0, DESIRED);
        }
    }

    /// Posts an entry if the mailbox is open and has room. Returns its index.
    ///
    /// Ordering: release, at system scope.
    pub fn post(&self, entry: &Entry) -> Option<u64> {
        let (claimed, kernel) = (self.pinned.at(CLAIMED), self.pinned.at(KERNEL).load_relaxed_sys());
        if kernel & OPENED == 0 {
            return None;
        }
        let index = loop {
            let next = claimed.load_relaxed_sys();
            if next.wrapping_sub(kernel >> 1) >> M::MAILBOX_LOG2 != 0 {
                return None;
            }
            if claimed.cas_relaxed_sys(next, next + 1) == next {
                break next;
            }
        };
        M::fence_release_sys();
        self.store(index, entry);
        Some(index)
    }

    /// Returns whether the entry was taken: its value is stored. If not, returns whether the mailbox is open.
    ///
    /// Ordering: acquire, at system scope.
    #[must_use]
    pub fn is_taken(&self, index: u64) -> (bool, bool) {
        let kernel = self.pinned.at(KERNEL).load_acquire_sys();
        (kernel >> 1 > index, kernel & OPENED != 0)
    }

    /// Takes back those of this sender's entries that were not taken, if the mailbox is closed. Returns the number of
    /// entries that were taken; those with a smaller index have had their effect, the others will have none.
    pub fn take_back(&self, own: impl Iterator<Item = u64>) -> Option<u64> {
        let host = self.pinned.at(HOST);
        let before = host.load_relaxed_sys();
        if before & TAKING_BACK != 0 || host.cas_relaxed_sys(before, before | TAKING_BACK) != before {
            return None;
        }
        M::fence_sc_sys();
        let kernel = self.pinned.at(KERNEL).load_relaxed_sys();
        let closed = kernel & OPENED == 0;
        if closed {
            own.filter(|&index| index >= kernel >> 1).for_each(|index| self.store(index, &Entry::VOID));
        }
        host.store_release_sys(before);
        closed.then_some(kernel >> 1)
    }
}

/// The kernels' end of a mailbox, found by its words in GPU memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Reader<M: Memory> {
    near: M::Word,
    pinned: M::Word,
}

impl<M: Memory> Reader<M> {
    #[inline(always)]
    pub(crate) fn new(near: M::Word) -> Self {
        // Safety: the host stored the address, which is valid as long as the near words.
        Self { near, pinned: unsafe { M::word(near.at(PINNED).load_relaxed_gpu()) } }
    }

    /// Returns whether kernels know that a sender wants the mailbox open.
    #[inline(always)]
    pub(crate) fn is_wanted(&self) -> bool {
        self.near.at(WANTED).load_relaxed_gpu() != 0
    }

    /// Returns a number that is not 0 if a sender wants the mailbox open. Reads host memory.
    #[inline(always)]
    pub(crate) fn host(&self) -> u64 {
        self.pinned.at(HOST).load_relaxed_sys()
    }

    #[inline(always)]
    fn tell(&self, taken: u64, open: u64) {
        self.pinned.at(KERNEL).store_relaxed_sys(taken << 1 | open);
    }

    /// Takes the turn and opens the mailbox, if no thread has the turn and no sender takes entries back. Returns the
    /// new state.
    #[inline(always)]
    pub(crate) fn open(&self, state: u32) -> u32 {
        let turn = self.near.at(TURN);
        if turn.load_relaxed_gpu() != 0 || turn.cas_relaxed_gpu(0, 1) != 0 {
            return state;
        }
        M::fence_acquire_gpu();
        let taken = self.near.at(TAKEN).load_relaxed_gpu();
        self.tell(taken, OPENED);
        M::fence_sc_sys();
        let host = self.host();
        M::fence_acquire_sys();
        if host & TAKING_BACK != 0 {
            return self.close(state, taken);
        }
        self.near.at(WANTED).store_relaxed_gpu(1);
        state | OPEN
    }

    /// Closes the mailbox, of which that many entries were taken, and gives the turn back. Returns the new state.
    #[inline(always)]
    pub(crate) fn close(&self, state: u32, taken: u64) -> u32 {
        // The release before the last raise covers everything that this thread stored for entries.
        self.tell(taken, 0);
        self.near.at(TURN).store_release_gpu(0);
        state & !(OPEN | UNTOLD)
    }

    /// Closes the mailbox and gives the turn back.
    #[inline(always)]
    pub(crate) fn leave(&self) {
        self.close(0, self.near.at(TAKEN).load_relaxed_gpu());
    }

    /// Loads the words of the next entry, whole or not, for [`drain`](Self::drain). Only with the turn.
    #[inline(always)]
    pub(crate) fn load(&self) -> (u64, [u64; WORDS as usize]) {
        let taken = self.near.at(TAKEN).load_relaxed_gpu();
        let [first, second] = pairs::<M>(self.pinned, taken).map(M::Word::load_pair_relaxed_sys);
        (taken, [first.0, first.1, second.0, second.1])
    }

    /// Carries out the entry that was loaded, if it is whole. Returns the number of entries taken now, by how much it
    /// raised the signal with the near words `own`, and the new state.
    #[inline(always)]
    pub(crate) fn drain(
        &self,
        state: u32,
        (taken, words): (u64, [u64; WORDS as usize]),
        own: M::Word,
    ) -> (u64, u64, u32) {
        let phase = phase(taken, M::MAILBOX_LOG2);
        let [a, b, c, d] = words;
        if ((a ^ phase) | (b ^ phase) | (c ^ phase) | (d ^ phase)) & 1 != 0 {
            if state & UNTOLD != 0 {
                self.tell(taken, OPENED);
            }
            return (taken, 0, state & !UNTOLD);
        }
        M::fence_acquire_sys();
        let Entry { value, signal } = Entry::read(words);
        if let Some(Value { address, value, width_log2 }) = value {
            // Safety: the sender checked the range, and its window stays registered until the entry is taken.
            unsafe { M::store_value(address, value, width_log2) };
        }
        M::fence_release_sys();
        let mut raised = 0;
        if let Some((index, amount)) = signal {
            // The sender checked the signal.
            let signal = self.near.at(SIGNALS + index * near_words::WORDS);
            signal.at(near_words::MAIL).red_add_relaxed_gpu(amount);
            raised = if signal == own { amount } else { 0 };
        }
        self.near.at(TAKEN).store_relaxed_gpu(taken + 1);
        (taken + 1, raised, state | UNTOLD)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_entry_survives_its_words_with_either_phase() {
        let numbers = [0, 1, 1 << 31, u32::MAX.into(), 1 << 62, 1 << 63, u64::MAX, 0x0123_4567_89ab_cdef];
        let values = numbers.iter().flat_map(|&value| {
            let value =
                move |width_log2, address| Some(Value { address: address & ((1 << 62) - 1), value, width_log2 });
            numbers.iter().zip([0, 1, 2, 3].into_iter().cycle()).map(move |(&address, width)| value(width, address))
        });
        let signals = || numbers.iter().map(|&number| Some((number >> 32, number)));
        for value in values.chain([None]) {
            for signal in signals().chain([None]) {
                let entry = Entry { value, signal };
                for phase in 0..2 {
                    assert_eq!(Entry::read(entry.words().map(|word| word | phase)), entry);
                }
            }
        }
    }
}
