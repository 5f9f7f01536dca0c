// SPDX-License-Identifier: MIT OR Apache-2.0
//! Looking at a word in host memory, by one thread for all.
//!
//! A GPU reads a word in host memory about once in a microsecond, however many threads ask: reads of one address follow
//! each other. Whatever else crosses PCIe meanwhile, the copies of the proxy among them, waits behind all that were
//! asked for. (An H100 with driver 580, 2026-11-21: 1.02 million reads a second of one word, by 32 warps or by 2112; a
//! copy of 8 bytes to the GPU took 5.6 us beside none of them, 118 us beside 32 and 1.9 ms beside 1056.)
//!
//! So a word that many threads may wait for has a few words in GPU memory beside it, of which the threads take turns:
//!
//! | word | says |
//! | --- | --- |
//! | [`SEEN`] | what the word held, while `TURN` is 2 |
//! | [`TURN`] | 0: nobody looks at the word itself; 1: a thread does; 2: and it has stored to `SEEN` |
//! | [`WANTED`] | 1 once a thread had to wait for its turn |
//!
//! A thread that finds `TURN` at 0 and sets it to 1 looks at the word itself until its wait ends. If `WANTED` is set it
//! stores each value to `SEEN`. The others look at `SEEN`, and try for the turn again.
//!
//! # Why it is right
//! *The writes that the word covers are visible.* A thread that takes the value from `SEEN` fences acquire when its
//! wait has ended, as it would after the word itself. The store to `SEEN` is a release, after an acquire fence that
//! follows the look. So everything before the raise happens before the end of the wait.
//!
//! *No thread waits in vain.* The thread that has the turn stores each time that it looks, also the same value again.
//! When the turn is free, a waiting thread takes it.
//!
//! *No store of an earlier turn comes late.* A turn that stored to `SEEN` is given back by a release, and each turn
//! fences acquire before it stores to `SEEN`. A turn that stored nothing is given back by a plain store, which depends
//! on the branch on having taken the turn; so it comes after the release before it, as in [`queue`](crate::queue).
//!
//! *A seen value is not older than the value that ended an earlier wait.* `SEEN` counts only while a turn lasts, and
//! only after the first store of that turn, which the 2 in `TURN` is a release for. An earlier wait had that turn or an
//! earlier one, or saw the value in `SEEN`. (The look of a turn comes after the turn was taken, because it depends on
//! that branch, and GPUs do not load speculatively.) So values may be compared on a circle, and a word may go back
//! between waits.

use crate::status::Status;
use crate::sys::{Memory, NAP_NS, Word};

/// Index of the word that holds what was seen.
pub const SEEN: u64 = 0;
/// Index of the word that says whether somebody looks.
pub const TURN: u64 = 1;
/// Index of a word that is free for other use: the baseline of a signal or counter, a guess at a queue's consumer
/// index.
pub const SPARE: u64 = 2;
/// Index of the word that says whether somebody wants to know.
pub const WANTED: u64 = 3;
/// Index of the word that holds what the word in host memory held when some wait for a signal or counter ended, or at
/// first.
pub const LAST: u64 = 4;
/// Words beside a word in host memory.
pub const WORDS: u64 = gin_abi::handle::NEAR_WORDS;

/// Values of [`TURN`].
const FREE: u64 = 0;
const TAKEN: u64 = 1;
const SHOWN: u64 = 2;

/// A word in host memory.
#[derive(Clone, Copy, Debug)]
pub struct HostWord<M: Memory> {
    /// The word itself.
    pub word: M::Word,
    /// The first of [`WORDS`] words in GPU memory, all 0 at first.
    pub near: M::Word,
}

/// The looks of one wait. [`end`](Self::end) must be called: it gives the turn back.
#[derive(Debug)]
#[must_use]
pub struct Look<M: Memory> {
    host: HostWord<M>,
    mine: bool,
    /// Has asked for values, if it is not its turn; has shown one, if it is.
    told: bool,
}

impl<M: Memory> Look<M> {
    /// No look yet.
    #[inline(always)]
    pub fn new(host: HostWord<M>) -> Self {
        Self { host, mine: false, told: false }
    }

    /// Returns the value of the word, by an own look at it or by another thread's; `None` if another thread has the
    /// turn and has not stored yet. Relaxed: an acquire fence may follow.
    ///
    /// With a status: a thread that got the value from another thread and has fenced finds a fault of the host's in GPU
    /// memory, if there was one before the word got that value.
    #[inline(always)]
    pub fn now(&mut self, status: Option<&Status<M>>) -> Option<u64> {
        let (seen, turn) = (self.host.near.at(SEEN), self.host.near.at(TURN));
        let wanted = self.host.near.at(WANTED);
        if !self.mine {
            let state = turn.load_relaxed_gpu();
            if state == FREE && turn.cas_relaxed_gpu(FREE, TAKEN) == FREE {
                (self.mine, self.told) = (true, false);
            } else {
                if !self.told {
                    wanted.store_relaxed_gpu(1);
                    self.told = true;
                }
                M::pause(NAP_NS);
                if state != SHOWN {
                    return None;
                }
                M::fence_acquire_gpu();
                return Some(seen.load_relaxed_gpu());
            }
        }
        let wanted = wanted.load_relaxed_gpu() != 0;
        let now = self.host.word.load_relaxed_sys();
        if wanted {
            M::fence_acquire_sys();
            if let Some(status) = status {
                status.look();
            }
            seen.store_release_gpu(now);
            if !self.told {
                turn.store_release_gpu(SHOWN);
                self.told = true;
            }
        }
        Some(now)
    }

    /// Returns whether this thread looks at the word itself.
    #[inline(always)]
    pub fn is_mine(&self) -> bool {
        self.mine
    }

    /// Ends the looks.
    #[inline(always)]
    pub fn end(self) {
        let turn = self.host.near.at(TURN);
        if self.mine && self.told {
            turn.store_release_gpu(FREE);
        } else if self.mine {
            // After the branch on having the turn. An atomic would say so to the memory model too, and cost 0.2 us a
            // wait.
            turn.store_relaxed_sys(FREE);
        }
    }
}
