// SPDX-License-Identifier: MIT OR Apache-2.0
//! The words behind a signal or a counter.
//!
//! A signal has one word for each kind of engine that can raise it: GPUs, the context's NIC, CPU threads. Only that
//! engine writes the word, because atomics of different engines on one word are not atomic to each other. The signal's
//! value is `(sum of words - baseline) & mask`. A reset moves the baseline to the sum and stores to no word.
//!
//! # Why a sum of words is right
//! Each word only grows (modulo 2^64). So a sum that is read word by word is between the true sums at its first and its
//! last load, and "at least n", once seen, stays met. This needs the conditions of `Gin::wait_signal`: raises are
//! increments, there are fewer than 2^(bits - 1) of them between baseline and wait, and no reset happens while raises
//! are in flight.
//!
//! The waiter polls relaxed and makes one acquire fence after success. The raiser's add is a release after the payload.
//! The payload is then visible, because the waiter read each contributing word before the fence, and because later adds
//! to a word continue the release sequence of earlier adds.
//!
//! One thread polls the word in host memory for all; see [`host_word`](crate::host_word). So a wait may use a value of
//! that word from before the wait's first load, but no older than the value at the end of any earlier wait (except as
//! in the next section).
//!
//! # Signals that GPUs raise
//! If a signal has words in GPU memory too, mostly these are raised, and a read of the word in host memory would take
//! longer than the rest of the wait. So a wait begins with the value of that word at the end of some earlier wait. That
//! value is no more than the present one, so if it meets "at least n", the present one does too. After a while the wait
//! reads the word itself; it does so often only if the word has ever been raised. An old value could be taken for a
//! later one only if half the circle was raised since. So this is for values of [`WIDE`] bits and more.
//!
//! `bindings/c/include/gin_inline.cuh` has [`Words::read`] and the beginning of [`Words::wait_relaxed`] in C++: change
//! both.
//!
//! # Signals from a mailbox
//! A CPU thread may hand a raise to kernels of the receiver ([`mailbox`](crate::mailbox)). They add it to [`MAIL`], a
//! near word in GPU memory that only they write: one more engine.

use crate::host_word::{HostWord, LAST, Look, MAIL, SPARE};
use crate::order::Order;
use crate::status::{Status, WaitError};
use crate::sys::{Memory, Word};
use gin_abi::{Deadline, mask, rolling_le};

/// The words of one signal or counter, and its baseline.
#[derive(Clone, Copy, Debug)]
pub struct Words<M: Memory> {
    /// The word that GPUs raise.
    pub gpu: Option<M::Word>,
    /// The word that the context's NIC raises.
    pub nic: Option<M::Word>,
    /// The word that CPU threads raise.
    pub cpu: Option<M::Word>,
    /// The near words of `cpu`, [`host_word::WORDS`](crate::host_word::WORDS) words in GPU memory. [`SPARE`] has the
    /// baseline: the sum of the words at the last reset. [`LAST`] has an earlier value of `cpu`, at first its initial
    /// value.
    pub near: M::Word,
    /// The words in GPU memory of the rank's mailbox, if CPU threads hand signals to kernels.
    pub mailbox: Option<M::Word>,
}

/// Raises one word of a signal or counter by `by`. Only the word's engine may call this.
///
/// Ordering: release, at system scope. Earlier writes are visible to a thread that waited for the raise.
#[inline(always)]
pub fn raise<W: Word>(word: W, by: u64) {
    word.add_release_sys(by);
}

/// Number of polls of the words in GPU memory between two reads of the word in host memory, if there are both and the
/// latter has been raised before.
const GPU_LOOKS: u32 = 8;
/// Number of bits from which on an old value is never taken for a later one: that would take 2^47 raises between two
/// reads.
pub const WIDE: u32 = 48;

impl<M: Memory> Words<M> {
    /// The same number if the word in host memory has not been raised. It is small enough that a wait with a deadline
    /// of 0 reads that word once.
    pub const LOOKS_ALONE: u32 = M::POLLS_PER_CHECK.div_ceil(2);

    /// Returns the sum of the words in GPU memory.
    #[inline(always)]
    fn own(&self) -> u64 {
        let gpu = self.gpu.map_or(0, |word| word.load_relaxed_sys());
        let nic = self.nic.map_or(0, |word| word.load_relaxed_sys());
        gpu.wrapping_add(nic).wrapping_add(self.mail())
    }

    /// Returns the sum of the raises that kernels of this rank took from the mailbox.
    #[inline(always)]
    fn mail(&self) -> u64 {
        self.mailbox.map_or(0, |_| self.near.at(MAIL).load_relaxed_gpu())
    }

    #[inline(always)]
    fn host(&self) -> u64 {
        self.cpu.map_or(0, |word| word.load_relaxed_sys())
    }

    /// Reads the word in host memory, and drains the mailbox if there is one. Returns how far the value is past
    /// `target`.
    #[inline(always)]
    fn look(&self, look: &mut Look<M>, target: u64) -> Option<u64> {
        match self.mailbox {
            Some(mailbox) => look.now_and_drain(mailbox, target),
            None => look.now(target),
        }
    }

    /// Returns the word with the baseline.
    #[inline(always)]
    pub fn base(&self) -> M::Word {
        self.near.at(SPARE)
    }

    /// Returns the value now, relaxed.
    #[inline(always)]
    pub fn value(&self, bits: u32) -> u64 {
        self.own().wrapping_add(self.host()).wrapping_sub(self.base().load_relaxed_gpu()) & mask(bits)
    }

    /// Returns the value now. Ordering: acquire, at system scope.
    #[inline(always)]
    pub fn read(&self, bits: u32) -> u64 {
        let value = self.value(bits);
        M::fence_acquire_sys();
        value
    }

    /// Waits until the value is at or past `least` on the circle of 2^`bits` values, and returns it. Calls `attend`
    /// every [`Memory::POLLS_PER_ATTEND`] polls.
    ///
    /// Ordering: acquire, at system scope.
    ///
    /// # Errors
    /// [`WaitError`] if the wait ended early, and the value at that time.
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

    /// Waits as [`wait`](Self::wait), but relaxed: writes that the raises cover are visible only after an acquire fence
    /// of the caller's.
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
        let target = least.wrapping_add(self.base().load_relaxed_gpu());
        let near = self.gpu.is_some() || self.nic.is_some();
        // Without `cpu` this is not used. Without other words to poll, each poll is a look, which also tells of raises
        // from the mailbox.
        let host = HostWord { word: self.cpu.unwrap_or(self.near), near: self.near };
        let mut look: Look<M> = Look::new(host).with_mail(!near);
        let remembers = self.cpu.is_some() && near && bits >= WIDE;
        // Without a mailbox, `MAIL` stays 0.
        let (last, mail) = if remembers { self.near.at(LAST).load_pair_relaxed_sys() } else { (0, 0) };
        let alone = if last | mail == 0 { Self::LOOKS_ALONE } else { GPU_LOOKS };
        // All sums from here on count from `target`. Not an `Option`: a register without a value would stay live round
        // the loops of a kernel.
        let (first, mut known) = (last.wrapping_sub(target), self.cpu.is_none() || remembers);
        let mut until = match (remembers, last | mail) {
            (false, _) => 0,
            (true, 0) => Self::LOOKS_ALONE,
            (true, _) => 1,
        };
        let (mut host, mut looks, mut over) = (first, 0, 0);
        let outcome = status.poll(deadline, || {
            if looks == M::POLLS_PER_ATTEND {
                looks = 0;
                attend();
            }
            looks += 1;
            if until == 0 {
                if self.cpu.is_some()
                    && let Some(now) = self.look(&mut look, target)
                {
                    (host, known) = (now, true);
                }
                until = match (near && !look.drains(), host == first) {
                    (false, _) => 1,
                    (true, true) => alone,
                    (true, false) => GPU_LOOKS,
                };
            }
            until -= 1;
            over = host.wrapping_add(if near { self.own() } else { 0 });
            #[cfg(not(target_arch = "nvptx64"))]
            if known {
                crate::exec::sees(least.wrapping_add(over) & mask(bits));
            }
            known && rolling_le(0, over, bits)
        });
        if let Some(mailbox) = self.mailbox {
            look.leave(mailbox);
        }
        look.end();
        if remembers && outcome.is_ok() && host != first {
            // A thread that takes the value must see the writes that these raises cover, as this thread does.
            M::fence_acquire_sys();
            self.near.at(LAST).store_release_gpu(host.wrapping_add(target));
        }
        match outcome {
            Ok(()) => Ok(least.wrapping_add(over) & mask(bits)),
            Err(stop) => Err((stop, self.value(bits))),
        }
    }

    /// Returns whether a value of `bits` bits is at or past `least` [soon](Self::meets_soon). Polls nothing if the wait
    /// is `due` to look at the host's status, or if the word that GPUs raise does not decide it.
    #[inline(always)]
    pub(crate) fn come_soon(&self, order: Order, bits: u32, least: u64, due: bool) -> bool {
        let Some(word) = self.gpu else { return false };
        if due | self.nic.is_some() | (bits != u64::BITS) {
            return false;
        }
        match order {
            Order::Acquire => self.meets_soon(word, least),
            Order::Relaxed => self.meets_soon_relaxed(word, least),
        }
    }

    /// Polls `word`, the word that GPUs raise, a short time, if no CPU thread has raised the signal before the
    /// end of an earlier wait. Returns whether the value is at or past `least`.
    ///
    /// The word in host memory counts as 0, an earlier value of it, so the present value is no less than the one that
    /// is compared. A raise by a CPU thread ends no such poll; the wait that follows finds it. Each poll loads one
    /// word. With two words, loaded one after the other, it would take twice as long.
    ///
    /// Ordering: acquire, at system scope, if it is.
    #[inline(always)]
    pub fn meets_soon(&self, word: M::Word, least: u64) -> bool {
        let meets = self.meets_soon_relaxed(word, least);
        if meets {
            M::fence_acquire_sys();
        }
        meets
    }

    /// Polls as [`meets_soon`](Self::meets_soon), but relaxed.
    #[inline(always)]
    fn meets_soon_relaxed(&self, word: M::Word, least: u64) -> bool {
        let base = self.base().load_relaxed_gpu();
        // Without a mailbox, `MAIL` stays 0.
        let (last, mail) = self.near.at(LAST).load_pair_relaxed_sys();
        // One trip for all three.
        let (first, least) = (word.load_relaxed_sys(), least.wrapping_add(base));
        last | mail == 0 && word.spin(first, least, M::POLLS_PER_CHECK) as i64 >= 0
    }

    /// Sets the value to 0. No raise may be in flight.
    ///
    /// Ordering: relaxed; threads that use the signal afterwards must be synchronised with this one.
    #[inline(always)]
    pub fn reset(&self) {
        self.base().store_relaxed_gpu(self.own().wrapping_add(self.host()));
    }
}
