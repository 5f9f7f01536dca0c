// SPDX-License-Identifier: MIT OR Apache-2.0
//! The words behind a signal or a counter.
//!
//! A signal has one word for each kind of engine that can raise it (GPUs, the context's NIC, CPU threads), and only
//! that engine writes it, because their atomics on one word are not atomic to each other. Its value is
//! `(sum of words - baseline) & mask`. Reset moves the baseline to the sum; no word is ever stored to.
//!
//! # Why a sum of words is right
//! Each word only grows (modulo 2^64), so a sum that is read word by word lies between the true sums at its first and
//! its last load, and "at least n", once seen, stays met. That needs what the docs of `Gin::wait_signal` ask for:
//! raises are increments, fewer than 2^(bits - 1) of them between baseline and wait, and no reset while raises are in
//! flight.
//!
//! The waiter polls relaxed and fences acquire once after success. The raiser's add is a release after the payload, so
//! the payload is visible then: each word that contributed was read before the fence, and a word's later adds carry on
//! the release sequence of the earlier ones.
//!
//! At the word in host memory one thread looks for all, see [`host_word`](crate::host_word). What a wait takes for its
//! value may be older than at its first load then, but no older than at the end of any wait before (but see the next
//! section).
//!
//! # Signals that GPUs raise
//! Where there are words in GPU memory too, mostly these are raised, and a look at the word in host memory each time
//! would take longer than the rest of the wait. So a wait begins with what that word held when some wait before ended,
//! which is no more than it holds now, and "at least n" is met if it is met by that. It looks at the word itself after
//! a while, and often only if that has ever been raised. What is so old can be taken for something ahead only if half
//! the circle was raised since, so this is for values of [`WIDE`] bits and more.

use crate::host_word::{HostWord, LAST, Look, SPARE};
use crate::status::{Status, WaitError};
use crate::sys::{Memory, Word};
use gin_abi::{Deadline, mask, rolling_le};

/// The words of one signal or counter, and its baseline.
#[derive(Clone, Copy, Debug)]
pub struct Words<M: Memory> {
    /// Raised by GPUs.
    pub gpu: Option<M::Word>,
    /// Raised by the NIC of the context.
    pub nic: Option<M::Word>,
    /// Raised by CPU threads.
    pub cpu: Option<M::Word>,
    /// [`host_word::WORDS`](crate::host_word::WORDS) words in GPU memory: those beside `cpu`, at [`SPARE`] the
    /// baseline, the sum of the words at the last reset, and at [`LAST`] what `cpu` held once, which at first is what
    /// it began with.
    pub near: M::Word,
}

/// Raises one word of a signal or counter by `by`. Only the engine that the word belongs to may call this.
///
/// Ordering: release, at system scope. Earlier writes are visible to a thread that waited for the raise.
#[inline(always)]
pub fn raise<W: Word>(word: W, by: u64) {
    word.add_release_sys(by);
}

/// Looks at the words in GPU memory between two looks at the word in host memory, when there are both and the latter
/// has been raised before.
const GPU_LOOKS: u32 = 8;
/// From this number of bits on, values never lie so far apart that they change places on the circle: it would take 2^47
/// raises between two looks.
pub const WIDE: u32 = 48;

impl<M: Memory> Words<M> {
    /// The same, when it has not been raised. Few enough that a deadline of 0 does not pass before the first one.
    const LOOKS_ALONE: u32 = M::POLLS_PER_CHECK.div_ceil(2);

    /// Sum of the words that lie in GPU memory.
    #[inline(always)]
    fn own(&self) -> u64 {
        let gpu = self.gpu.map_or(0, |word| word.load_relaxed_sys());
        let nic = self.nic.map_or(0, |word| word.load_relaxed_sys());
        gpu.wrapping_add(nic)
    }

    #[inline(always)]
    fn host(&self) -> u64 {
        self.cpu.map_or(0, |word| word.load_relaxed_sys())
    }

    /// The baseline.
    #[inline(always)]
    pub fn base(&self) -> M::Word {
        self.near.at(SPARE)
    }

    /// The value now, relaxed.
    #[inline(always)]
    pub fn value(&self, bits: u32) -> u64 {
        self.own().wrapping_add(self.host()).wrapping_sub(self.base().load_relaxed_gpu()) & mask(bits)
    }

    /// The value now. Ordering: acquire, at system scope.
    #[inline(always)]
    pub fn read(&self, bits: u32) -> u64 {
        let value = self.value(bits);
        M::fence_acquire_sys();
        value
    }

    /// Waits until the value is at or past `least` on the circle of 2^`bits` values; gives the value. Calls `attend`
    /// each time that it has found it short of that for a while.
    ///
    /// Ordering: acquire, at system scope.
    ///
    /// # Errors
    /// [`WaitError`] if the wait ended early, and the value then.
    #[inline(always)]
    pub fn wait(
        &self,
        status: &Status<M>,
        least: u64,
        bits: u32,
        deadline: Deadline,
        attend: impl FnMut(),
    ) -> Result<u64, (WaitError, u64)> {
        let value = self.wait_relaxed(status, least, bits, deadline, attend)?;
        M::fence_acquire_sys();
        Ok(value)
    }

    /// As [`wait`](Self::wait), but what the raises cover may be seen only after an acquire fence of the caller's.
    ///
    /// # Errors
    /// As [`wait`](Self::wait).
    #[inline(always)]
    pub fn wait_relaxed(
        &self,
        status: &Status<M>,
        least: u64,
        bits: u32,
        deadline: Deadline,
        mut attend: impl FnMut(),
    ) -> Result<u64, (WaitError, u64)> {
        let base = self.base().load_relaxed_gpu();
        // The parts for another word than `cpu` are not used.
        let mut look: Look<M> = Look::new(HostWord { word: self.cpu.unwrap_or(self.near), near: self.near });
        let near = self.gpu.is_some() || self.nic.is_some();
        let remembers = self.cpu.is_some() && near && bits >= WIDE;
        let last = if remembers { self.near.at(LAST).load_relaxed_gpu() } else { 0 };
        let mut host = if self.cpu.is_none() || remembers { Some(last) } else { None };
        let mut until = match (remembers, last) {
            (false, _) => 0,
            (true, 0) => Self::LOOKS_ALONE,
            (true, _) => 1,
        };
        let mut looks = 0;
        let outcome = status.poll(deadline, || {
            if looks == M::POLLS_PER_ATTEND {
                looks = 0;
                attend();
            }
            looks += 1;
            if until == 0 {
                if self.cpu.is_some() {
                    host = look.now(None).or(host);
                }
                until = match (near, host) {
                    (false, _) => 1,
                    (true, Some(0)) => Self::LOOKS_ALONE,
                    (true, _) => GPU_LOOKS,
                };
            }
            until -= 1;
            let value = self.own().wrapping_add(host?).wrapping_sub(base) & mask(bits);
            rolling_le(least, value, bits).then_some(value)
        });
        look.end();
        if let (true, Some(now)) = (remembers && outcome.is_ok(), host)
            && now != last
        {
            // A thread that takes the value sees the writes that these raises cover, as this thread would.
            M::fence_acquire_sys();
            self.near.at(LAST).store_release_gpu(now);
        }
        outcome.map_err(|stop| (stop, self.value(bits)))
    }

    /// Makes the value 0. No raise may be in flight.
    ///
    /// Ordering: relaxed; threads that use the signal afterwards must be synchronised with this one.
    #[inline(always)]
    pub fn reset(&self) {
        self.base().store_relaxed_gpu(self.own().wrapping_add(self.host()));
    }
}
