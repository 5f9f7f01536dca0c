// SPDX-License-Identifier: MIT OR Apache-2.0
//! The ends of waits: aborts, faults and deadlines.
//!
//! Two status blocks say whether a communicator still runs. The *host's* is written by CPU threads (abort, network
//! errors, faults of other ranks) and lies in pinned host memory. The *kernel's* is written by the rank's own kernels,
//! once: a copy in GPU memory that they poll, and one in pinned host memory for the host. Writer and reader of each
//! agree on one rule: the record first, then the word with release; the word relaxed, then an acquire fence, then the
//! record.

use crate::sys::{Memory, NAP_NS, Word};
use gin_abi::{Deadline, Fault, FaultKind};

/// Word index of the record in a status block.
const RECORD: u64 = 2;

/// `word` of the kernel's copy while its record is being written.
const WRITING: u64 = 1;
/// `word` of the kernel's copy once its record is valid.
const WRITTEN: u64 = 2;

/// Word index, in the copy in GPU memory, of what kernels know of the host's block: [`POSTED`], or the time of the last
/// look at it, in nanoseconds, which is even.
const HOST: u64 = 1;
/// The host's block has a record.
const POSTED: u64 = 1;

/// A deadline that several waits share, one after the other: what is left of it counts from one start.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shared {
    deadline: Deadline,
    start: u64,
}

impl Shared {
    /// Starts now. Reads the clock only if there is a deadline.
    #[inline(always)]
    pub(crate) fn start<M: Memory>(deadline: Deadline) -> Self {
        Self { deadline, start: if deadline.is_none() { 0 } else { M::clock_ns() } }
    }

    /// Returns the time that is left now, at least 0.
    #[inline(always)]
    pub(crate) fn left<M: Memory>(&self) -> Deadline {
        if self.deadline.is_none() {
            return self.deadline;
        }
        Deadline::after_ns(self.deadline.ns().saturating_sub(M::clock_ns().wrapping_sub(self.start)))
    }
}

/// The status blocks of one communicator on one rank.
#[derive(Clone, Copy, Debug)]
pub struct Status<M: Memory> {
    /// First word of the host's block.
    pub host: M::Word,
    /// First word of the kernel's block in pinned host memory.
    pub kernel: M::Word,
    /// First word of the copy of the kernel's block in GPU memory.
    pub copy: M::Word,
}

/// Why a wait ended without what it waited for.
///
/// A fault is comm-wide and stays, so it is not carried along: [`Status::cause`] reads it where it is reported.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum WaitError {
    /// Its deadline passed.
    Deadline,
    /// The communicator was aborted or has a fault.
    Fault,
    /// There is no connection to the peer: nothing was waited for.
    NotConnected,
}

impl<M: Memory> Status<M> {
    /// Returns whether the communicator was aborted or has a fault, as far as kernels know. A fault of a kernel counts
    /// once its record is whole.
    #[inline(always)]
    pub(crate) fn is_stopped_near(&self) -> bool {
        let (copy, host) = (self.copy.load_relaxed_gpu(), self.copy.at(HOST).load_relaxed_gpu());
        (copy == WRITTEN) | (host == POSTED)
    }

    /// The same, with a look at the host's block once in [`Memory::LOOK_NS`] nanoseconds by one of all threads that
    /// ask: see [`host_word`](crate::host_word) for why not by each.
    #[inline(always)]
    pub(crate) fn is_stopped(&self) -> bool {
        if M::LOOK_NS == 0 {
            return self.is_stopped_now();
        }
        let (copy, host) = (self.copy.load_relaxed_gpu(), self.copy.at(HOST).load_relaxed_gpu());
        let now = M::clock_ns() & !POSTED;
        let due = host != POSTED && now.wrapping_sub(host) >= M::LOOK_NS;
        if due && self.copy.at(HOST).cas_relaxed_gpu(host, now) == host && self.look() {
            return true;
        }
        (copy == WRITTEN) | (host == POSTED)
    }

    /// Looks at the host's block, and tells the other threads if there is a record. Says whether there is.
    #[inline(always)]
    pub fn look(&self) -> bool {
        if self.host.load_relaxed_sys() == 0 {
            return false;
        }
        M::fence_acquire_sys();
        self.copy.at(HOST).store_release_gpu(POSTED);
        true
    }

    /// Returns whether the communicator was aborted or has a fault now.
    #[inline(always)]
    pub(crate) fn is_stopped_now(&self) -> bool {
        let (host, copy) = (self.host.load_relaxed_sys(), self.copy.load_relaxed_gpu());
        // Their values fit into 32 bits.
        (host as u32 != 0) | (copy as u32 == WRITTEN as u32)
    }

    /// The abort or fault that ended a wait with [`WaitError::Fault`].
    ///
    /// Ordering: whatever the writer did before it posted the fault is visible afterwards.
    #[inline(always)]
    pub fn cause(&self) -> Fault {
        // Another thread may have seen it in the host's block.
        M::fence_acquire_gpu();
        let block = if self.host.load_relaxed_sys() as u32 != 0 { self.host } else { self.copy };
        M::fence_acquire_sys();
        record::<M>(block)
    }

    /// The abort or fault of this communicator, if there is one; ordering as [`cause`](Self::cause).
    #[inline(always)]
    pub fn fault(&self) -> Option<Fault> {
        if self.is_stopped_now() { Some(self.cause()) } else { None }
    }

    /// Waits until [`cause`](Self::cause) is readable. The caller has reported a fault: another report may come first
    /// and not be whole yet.
    #[inline(always)]
    pub(crate) fn await_stop(&self) {
        while !self.is_stopped() {
            M::pause(NAP_NS);
        }
    }

    /// [`WaitError::Fault`] if the communicator was aborted or has a fault.
    ///
    /// # Errors
    /// That.
    #[inline(always)]
    pub fn check(&self) -> Result<(), WaitError> {
        if self.is_stopped_now() { Err(WaitError::Fault) } else { Ok(()) }
    }

    /// The same, as far as kernels know: a fault of the host's once a thread has [looked](Self::look).
    ///
    /// # Errors
    /// As [`check`](Self::check).
    #[inline(always)]
    pub fn check_near(&self) -> Result<(), WaitError> {
        if self.is_stopped_near() { Err(WaitError::Fault) } else { Ok(()) }
    }

    /// The fault to return from an operation that was stopped; a deadline becomes `timeout`, which says where it was.
    #[inline(always)]
    pub fn explain(&self, stop: WaitError, timeout: Fault) -> Fault {
        match stop {
            WaitError::Deadline => timeout,
            WaitError::Fault => self.cause(),
            WaitError::NotConnected => Fault { kind: FaultKind::NotConnected, ..timeout },
        }
    }

    /// Posts a fault from a kernel: the first one stays, later ones are dropped. Ends every wait of this communicator.
    ///
    /// Ordering: release, at system scope.
    #[inline(always)]
    pub fn report(&self, fault: Fault) {
        if self.copy.cas_relaxed_gpu(0, WRITING) != 0 {
            return;
        }
        let words = fault.to_words();
        // One by one: an array to loop over would lie on the stack.
        self.copy.at(RECORD).store_pair_relaxed_sys(words[0], words[1]);
        self.copy.at(RECORD + 2).store_pair_relaxed_sys(words[2], words[3]);
        self.kernel.at(RECORD).store_pair_relaxed_sys(words[0], words[1]);
        self.kernel.at(RECORD + 2).store_pair_relaxed_sys(words[2], words[3]);
        self.copy.store_release_gpu(WRITTEN);
        self.kernel.store_release_sys(1);
    }

    /// Posts a fault from the host; the first one stays. Only one thread may call this at a time.
    ///
    /// Ordering: release, at system scope.
    pub fn post(&self, fault: Fault) {
        if self.host.load_relaxed_sys() != 0 {
            return;
        }
        for (index, word) in fault.to_words().into_iter().enumerate() {
            self.host.at(RECORD + index as u64).store_relaxed_sys(word);
        }
        self.host.store_release_sys(1);
    }

    /// The fault that the host posted, if it did. For the host.
    pub fn host_fault(&self) -> Option<Fault> {
        (self.host.load_relaxed_sys() != 0).then(|| {
            M::fence_acquire_sys();
            record::<M>(self.host)
        })
    }

    /// The fault that a kernel reported, if one did. For the host, which cannot read the copy in GPU memory.
    pub fn reported(&self) -> Option<Fault> {
        (self.kernel.load_relaxed_sys() != 0).then(|| {
            M::fence_acquire_sys();
            record::<M>(self.kernel)
        })
    }

    /// Polls `test` until it gives a value, or until abort, a fault or the deadline ends it.
    ///
    /// The value counts even when a fault is posted meanwhile. Status words and clock are looked at every
    /// [`Memory::POLLS_PER_CHECK`] polls, so a deadline of 0 polls that often. `test` must be relaxed; the caller
    /// fences afterwards.
    ///
    /// # Errors
    /// [`Stop`] says what ended the wait.
    #[inline(always)]
    pub fn poll<T>(&self, deadline: Deadline, mut test: impl FnMut() -> Option<T>) -> Result<T, WaitError> {
        let start = if deadline.is_none() { 0 } else { M::clock_ns() };
        let mut left = M::POLLS_PER_CHECK;
        // In this order, with the test last, so that LLVM does not copy the test before the loop.
        loop {
            if left == 0 {
                if self.is_stopped() {
                    return Err(WaitError::Fault);
                }
                if !deadline.is_none() && M::clock_ns().wrapping_sub(start) >= deadline.ns() {
                    return Err(WaitError::Deadline);
                }
                M::pause(NAP_NS);
                left = M::POLLS_PER_CHECK;
            }
            left -= 1;
            if let Some(value) = test() {
                return Ok(value);
            }
        }
    }

    /// As [`poll`](Self::poll), for a word in host memory, when a first look has found it wanting. The status words are
    /// looked at each time.
    ///
    /// # Errors
    /// As [`poll`](Self::poll).
    #[inline(always)]
    pub fn poll_host_word(&self, deadline: Deadline, mut test: impl FnMut() -> bool) -> Result<(), WaitError> {
        let start = if deadline.is_none() { 0 } else { M::clock_ns() };
        // One block of code with one exit, which is short and which LLVM leaves as it is.
        loop {
            M::pause_at_host_word();
            let stopped = self.is_stopped();
            let met = test();
            let over = !deadline.is_none() && M::clock_ns().wrapping_sub(start) >= deadline.ns();
            if met | stopped | over {
                return match (met, over & !stopped) {
                    (true, _) => Ok(()),
                    (false, true) => Err(WaitError::Deadline),
                    (false, false) => Err(WaitError::Fault),
                };
            }
        }
    }
}

#[inline(always)]
fn record<M: Memory>(block: M::Word) -> Fault {
    let word = |index| block.at(RECORD + index).load_relaxed_sys();
    Fault::read([word(0), word(1), word(2), word(3)])
}
