// SPDX-License-Identifier: MIT OR Apache-2.0
//! The ends of waits: aborts, faults and deadlines.
//!
//! Two status blocks hold the faults of a communicator.
//!
//! | block | written by | memory |
//! | --- | --- | --- |
//! | host's | CPU threads: aborts, network errors, faults of other ranks | pinned host memory |
//! | kernel's | the rank's own kernels, once | a copy in GPU memory that kernels poll, and one in pinned host memory for the host |
//!
//! Both follow one rule. The writer stores the record, then the word with release. The reader loads the word relaxed,
//! makes an acquire fence and loads the record.

use crate::sys::{Memory, NAP_NS, Word};
use gin_abi::{Deadline, Fault, FaultKind};

/// Word index of the record in a status block.
const RECORD: u64 = 2;

/// First word of the kernel's copy while its record is being written.
const WRITING: u64 = 1;
/// First word of the kernel's copy once its record is valid.
const WRITTEN: u64 = 2;

/// Index of the word, in the copy in GPU memory, with the kernels' knowledge of the host's block: [`POSTED`], or the
/// time of the last look at that block, in nanoseconds, which is even.
const HOST: u64 = 1;
/// The host's block has a record.
const POSTED: u64 = 1;

/// A deadline that several waits share, one after the other. The time counts from one start.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shared {
    deadline: Deadline,
    start: u64,
}

impl Shared {
    /// Starts the time now. Reads the clock only if there is a deadline.
    #[inline(always)]
    pub(crate) fn start<M: Memory>(deadline: Deadline) -> Self {
        Self { deadline, start: if deadline.is_none() { 0 } else { M::clock_ns() } }
    }

    /// Returns the remaining time, at least 0.
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

/// The reason why a wait ended early.
///
/// A fault is the communicator's and stays, so the error does not contain it: [`Status::cause`] reads it when it is
/// reported.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum WaitError {
    /// The deadline passed.
    Deadline,
    /// The communicator was aborted or has a fault.
    Fault,
    /// There is no connection to the peer, so there was no wait.
    NotConnected,
}

impl<M: Memory> Status<M> {
    /// Returns whether the communicator was aborted or has a fault, from GPU memory alone. A fault of a kernel counts
    /// once its record is whole.
    #[inline(always)]
    pub(crate) fn is_stopped_near(&self) -> bool {
        let (copy, host) = (self.copy.load_relaxed_gpu(), self.copy.at(HOST).load_relaxed_gpu());
        (copy == WRITTEN) | (host == POSTED)
    }

    /// Returns whether the communicator was aborted or has a fault. Every [`Memory::LOOK_NS`] nanoseconds one of all
    /// calling threads reads the host's block. [`host_word`](crate::host_word) explains why not each thread does.
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

    /// Reads the host's block and announces a record there to the other threads. Returns whether there is one.
    #[inline(always)]
    pub fn look(&self) -> bool {
        if self.host.load_relaxed_sys() == 0 {
            return false;
        }
        M::fence_acquire_sys();
        self.copy.at(HOST).store_release_gpu(POSTED);
        true
    }

    /// Returns whether the communicator was aborted or has a fault now. Reads host memory.
    #[inline(always)]
    pub(crate) fn is_stopped_now(&self) -> bool {
        let (host, copy) = (self.host.load_relaxed_sys(), self.copy.load_relaxed_gpu());
        // Their values fit into 32 bits.
        (host as u32 != 0) | (copy as u32 == WRITTEN as u32)
    }

    /// Returns the abort or fault that ended a wait with [`WaitError::Fault`].
    ///
    /// Ordering: all writes that precede the post of the fault are visible afterwards.
    #[inline(always)]
    pub fn cause(&self) -> Fault {
        // Another thread may have read it in the host's block.
        M::fence_acquire_gpu();
        let block = if self.host.load_relaxed_sys() as u32 != 0 { self.host } else { self.copy };
        M::fence_acquire_sys();
        record::<M>(block)
    }

    /// Returns the abort or fault of this communicator, if there is one. Ordering as [`cause`](Self::cause).
    #[inline(always)]
    pub fn fault(&self) -> Option<Fault> {
        if self.is_stopped_now() { Some(self.cause()) } else { None }
    }

    /// Waits until [`cause`](Self::cause) is readable. The caller has reported a fault, but another report may have
    /// come first and not be whole yet.
    #[inline(always)]
    pub(crate) fn await_stop(&self) {
        while !self.is_stopped() {
            M::pause(NAP_NS);
        }
    }

    /// Checks that the communicator runs. Reads host memory.
    ///
    /// # Errors
    /// [`WaitError::Fault`] if the communicator was aborted or has a fault.
    #[inline(always)]
    pub fn check(&self) -> Result<(), WaitError> {
        if self.is_stopped_now() { Err(WaitError::Fault) } else { Ok(()) }
    }

    /// Checks that the communicator runs, from GPU memory alone. It finds a fault of the host's once a thread has
    /// [looked](Self::look).
    ///
    /// # Errors
    /// As [`check`](Self::check).
    #[inline(always)]
    pub fn check_near(&self) -> Result<(), WaitError> {
        if self.is_stopped_near() { Err(WaitError::Fault) } else { Ok(()) }
    }

    /// Returns the fault of an operation whose wait ended early. A deadline becomes `timeout`, which names the
    /// operation.
    #[inline(always)]
    pub fn explain(&self, stop: WaitError, timeout: Fault) -> Fault {
        match stop {
            WaitError::Deadline => timeout,
            WaitError::Fault => self.cause(),
            WaitError::NotConnected => Fault { kind: FaultKind::NotConnected, ..timeout },
        }
    }

    /// Posts a fault from a kernel and ends every wait of this communicator. The first fault stays; later ones are
    /// dropped.
    ///
    /// Ordering: release, at system scope.
    #[inline(always)]
    pub fn report(&self, fault: Fault) {
        if self.copy.cas_relaxed_gpu(0, WRITING) != 0 {
            return;
        }
        let words = fault.to_words();
        // One by one: a loop would put the array on the stack.
        self.copy.at(RECORD).store_pair_relaxed_sys(words[0], words[1]);
        self.copy.at(RECORD + 2).store_pair_relaxed_sys(words[2], words[3]);
        self.kernel.at(RECORD).store_pair_relaxed_sys(words[0], words[1]);
        self.kernel.at(RECORD + 2).store_pair_relaxed_sys(words[2], words[3]);
        self.copy.store_release_gpu(WRITTEN);
        self.kernel.store_release_sys(1);
    }

    /// Posts a fault from the host. The first fault stays. Only one thread may call this at a time.
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

    /// Returns the fault that the host posted, if it did. For the host.
    pub fn host_fault(&self) -> Option<Fault> {
        (self.host.load_relaxed_sys() != 0).then(|| {
            M::fence_acquire_sys();
            record::<M>(self.host)
        })
    }

    /// Returns the fault that a kernel reported, if one did. For the host, which cannot read the copy in GPU memory.
    pub fn reported(&self) -> Option<Fault> {
        (self.kernel.load_relaxed_sys() != 0).then(|| {
            M::fence_acquire_sys();
            record::<M>(self.kernel)
        })
    }

    /// Polls `test` until it returns a value, or until an abort, a fault or the deadline ends the wait.
    ///
    /// A value counts even if a fault is posted meanwhile. The wait checks status words and clock every
    /// [`Memory::POLLS_PER_CHECK`] polls, so it also polls that often with a deadline of 0. `test` must be relaxed; the
    /// caller fences afterwards.
    ///
    /// # Errors
    /// The reason why the wait ended.
    #[inline(always)]
    pub fn poll<T>(&self, deadline: Deadline, mut test: impl FnMut() -> Option<T>) -> Result<T, WaitError> {
        let start = if deadline.is_none() { 0 } else { M::clock_ns() };
        let mut left = M::POLLS_PER_CHECK;
        // The test comes last, so that LLVM does not copy it to before the loop.
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

    /// Waits as [`poll`](Self::poll), for a word in host memory, and pauses before the first test. It checks the status
    /// words at every poll.
    ///
    /// # Errors
    /// As [`poll`](Self::poll).
    #[inline(always)]
    pub fn poll_host_word(&self, deadline: Deadline, mut test: impl FnMut() -> bool) -> Result<(), WaitError> {
        let start = if deadline.is_none() { 0 } else { M::clock_ns() };
        // One short block of code with one exit, which LLVM leaves as it is.
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
