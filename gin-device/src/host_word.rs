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
//! # Why it is right
//! *The writes that the word covers are visible.* A thread that takes the value from `SEEN` makes an acquire fence when
//! its wait has ended, as after the word itself. The store to `SEEN` is a release, and follows an acquire fence that
//! follows the read of the word. So everything before the raise happens before the end of the wait.
//!
//! *No thread waits in vain.* Once `WANTED` is set, the thread with the turn stores after every read, also the same
//! value again. When the turn is free, a waiting thread takes it.
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

use crate::status::Status;
use crate::sys::{Memory, NAP_NS, Word};

/// Index of the near word with the last value read.
pub const SEEN: u64 = 0;
/// Index of the near word with the state of the turn.
pub const TURN: u64 = 1;
/// Index of a near word for other use: the baseline of a signal or counter, the guess at a queue's consumer index.
pub const SPARE: u64 = 2;
/// Index of the near word that is 1 once a thread wants values in [`SEEN`].
pub const WANTED: u64 = 3;
/// Index of the near word with the value of the host word when some wait for a signal or counter ended, or at the
/// beginning.
pub const LAST: u64 = 4;
/// Number of near words of a word in host memory.
pub const WORDS: u64 = gin_abi::handle::NEAR_WORDS;

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

/// The reads of a host word by one wait. [`end`](Self::end) must be called: it gives the turn back.
#[derive(Debug)]
#[must_use]
pub struct Look<M: Memory> {
    host: HostWord<M>,
    mine: bool,
    /// With the turn: has stored a value to [`SEEN`]. Without: has asked for values by [`WANTED`].
    announced: bool,
}

impl<M: Memory> Look<M> {
    /// Returns the reads of a wait that has made none yet.
    #[inline(always)]
    pub fn new(host: HostWord<M>) -> Self {
        Self { host, mine: false, announced: false }
    }

    /// Returns the value of the word, read by this thread or by another. Returns `None` if another thread has the turn
    /// and has not stored yet. Relaxed: an acquire fence may follow.
    ///
    /// With a status, a fault that the host posted before the word got its value is announced too: a thread that got
    /// the value from another thread and has fenced finds the fault in GPU memory.
    #[inline(always)]
    pub fn now(&mut self, status: Option<&Status<M>>) -> Option<u64> {
        let (seen, turn) = (self.host.near.at(SEEN), self.host.near.at(TURN));
        let wanted = self.host.near.at(WANTED);
        if !self.mine {
            let state = turn.load_relaxed_gpu();
            if state == FREE && turn.cas_relaxed_gpu(FREE, POLLING) == FREE {
                (self.mine, self.announced) = (true, false);
            } else {
                if !self.announced {
                    wanted.store_relaxed_gpu(1);
                    self.announced = true;
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
            if !self.announced {
                turn.store_release_gpu(SHOWN);
                self.announced = true;
            }
        }
        Some(now)
    }

    /// Returns whether this thread has the turn: it reads the word itself.
    #[inline(always)]
    pub fn is_mine(&self) -> bool {
        self.mine
    }

    /// Ends the reads and gives the turn back.
    #[inline(always)]
    pub fn end(self) {
        let turn = self.host.near.at(TURN);
        if self.mine && self.announced {
            turn.store_release_gpu(FREE);
        } else if self.mine {
            // Ordered by the branch on having the turn. An atomic would express that in the memory model too, and cost
            // 0.2 us a wait.
            turn.store_relaxed_sys(FREE);
        }
    }
}
