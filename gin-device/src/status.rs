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

use crate::fault::Fault;
use crate::sys::{Memory, NAP_NS, Word};
use gin_abi::fault::WORDS;
use gin_abi::{Deadline, FaultSubject};

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

/// The bits of the cycle counter that are 0 for 256 cycles of every 16,384. A wait that succeeds looks for a fault of
/// the host then, and at no other time.
pub const NOW_AND_THEN: u64 = 63 << 8;

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

    /// Returns the deadline, counted from the start.
    #[inline(always)]
    pub(crate) fn whole(&self) -> Deadline {
        self.deadline
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
// A whole register, which needs no mask.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u32)]
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
        self.end(0, Deadline::NONE).is_some()
    }

    /// Returns why a wait that began at `start` must end now, if it must; checks as [`is_stopped`](Self::is_stopped).
    #[inline(always)]
    pub fn end(&self, start: u64, deadline: Deadline) -> Option<WaitError> {
        outlined::end::<M>(self.host, self.copy, start, deadline)
    }

    /// Reads the host's block and announces a record there to the other threads. Returns whether there is one.
    #[inline(always)]
    pub fn look(&self) -> bool {
        look::<M>(self.host, self.copy)
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
        outlined::cause::<M>(self.host, self.copy)
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
    /// operation, with these values and itself.
    #[inline(always)]
    pub fn explain(
        &self,
        stop: WaitError,
        timeout: Fault,
        subject: FaultSubject,
        deadline: Deadline,
        expected: u64,
        seen: u64,
    ) -> Fault {
        let [subject, rest] = subject.to_words_within(deadline);
        outlined::explain::<M>(self.host, self.copy, stop, timeout, subject, rest, expected, seen)
    }

    /// Posts a fault from a kernel and ends every wait of this communicator. The first fault stays; later ones are
    /// dropped.
    ///
    /// Ordering: release, at system scope.
    #[inline(always)]
    pub fn report(&self, fault: Fault) {
        outlined::report::<M>(self.copy, self.kernel, fault);
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
            Fault::read(record::<M>(self.host))
        })
    }

    /// Returns the fault that a kernel reported, if one did. For the host, which cannot read the copy in GPU memory.
    pub fn reported(&self) -> Option<Fault> {
        (self.kernel.load_relaxed_sys() != 0).then(|| {
            M::fence_acquire_sys();
            place::read::<M>(self.kernel, Fault::read(record::<M>(self.kernel)))
        })
    }

    /// Polls `test` until it returns true, or until an abort, a fault or the deadline ends the wait.
    ///
    /// It counts even if a fault is posted meanwhile. The wait checks status words and clock every
    /// [`Memory::POLLS_PER_CHECK`] polls, so it also polls that often with a deadline of 0. `test` must be relaxed; the
    /// caller fences afterwards.
    ///
    /// # Errors
    /// The reason why the wait ended.
    #[inline(always)]
    pub fn poll(&self, deadline: Deadline, mut test: impl FnMut() -> bool) -> Result<(), WaitError> {
        waits!(None);
        let start = if deadline.is_none() { 0 } else { M::clock_ns() };
        let mut left = M::POLLS_PER_CHECK;
        // The test comes last, so that LLVM does not copy it to before the loop.
        loop {
            if left == 0 {
                if let Some(end) = self.end(start, deadline) {
                    return Err(end);
                }
                M::pause(NAP_NS);
                left = M::POLLS_PER_CHECK;
            }
            left -= 1;
            if test() {
                return Ok(());
            }
        }
    }

    /// Waits as [`poll`](Self::poll), for a word in host memory, and pauses before the first test. It checks the status
    /// words at every poll. `test` learns whether the wait ends, even if it returns false.
    ///
    /// # Errors
    /// As [`poll`](Self::poll).
    #[inline(always)]
    pub fn poll_host_word(&self, deadline: Deadline, mut test: impl FnMut(bool) -> bool) -> Result<(), WaitError> {
        waits!(None);
        let start = if deadline.is_none() { 0 } else { M::clock_ns() };
        // One short block of code with one exit, which LLVM leaves as it is.
        loop {
            M::pause_at_host_word();
            let end = self.end(start, deadline);
            let met = test(end.is_some());
            if met | end.is_some() {
                return match end {
                    Some(end) if !met => Err(end),
                    _ => Ok(()),
                };
            }
        }
    }
}

/// Does [`Status::look`].
#[inline(always)]
pub(crate) fn look<M: Memory>(host: M::Word, copy: M::Word) -> bool {
    if host.load_relaxed_sys() == 0 {
        return false;
    }
    M::fence_acquire_sys();
    copy.at(HOST).store_release_gpu(POSTED);
    true
}

#[inline(always)]
fn record<M: Memory>(block: M::Word) -> [u64; WORDS] {
    let word = |index| block.at(RECORD + index).load_relaxed_sys();
    [word(0), word(1), word(2), word(3), word(4), word(5)]
}

/// The place of a fault in the source. On a CPU the second word of the kernel's block in host memory has the address of
/// the place, for the host of the same process. A GPU knows no places, and the word stays 0.
mod place {
    use crate::fault::Fault;
    use crate::sys::Memory;
    #[cfg(not(target_arch = "nvptx64"))]
    use crate::sys::Word;
    #[cfg(not(target_arch = "nvptx64"))]
    use core::panic::Location;

    /// Index of the word in the block.
    #[cfg(not(target_arch = "nvptx64"))]
    const PLACE: u64 = 1;

    /// Stores the place, before the word that announces the record.
    #[inline(always)]
    pub(super) fn store<M: Memory>(_kernel: M::Word, _fault: Fault) {
        #[cfg(not(target_arch = "nvptx64"))]
        if let Some(place) = _fault.place() {
            _kernel.at(PLACE).store_relaxed_sys(core::ptr::from_ref(place).expose_provenance() as u64);
        }
    }

    /// Returns the fault of the block with its place, if that is known.
    #[inline(always)]
    pub(super) fn read<M: Memory>(_kernel: M::Word, fault: Fault) -> Fault {
        #[cfg(not(target_arch = "nvptx64"))]
        {
            let address = _kernel.at(PLACE).load_relaxed_sys() as usize;
            let place = core::ptr::with_exposed_provenance::<Location<'static>>(address);
            // Safety: the word is 0, or a kernel on a CPU of this process stored the address of a `'static` place.
            if let Some(place) = unsafe { place.as_ref() } {
                return fault.with_place(place);
            }
        }
        fault
    }
}

/// Code of rare ends, which a kernel has once and calls. Arguments are words, because a structure would be passed on
/// the stack.
mod outlined {
    use super::{HOST, POSTED, RECORD, WRITING, WRITTEN, WaitError, look, record};
    use crate::fault::Fault;
    use crate::sys::{Memory, Word};
    use gin_abi::{Deadline, FaultKind};

    /// Does [`Status::end`](super::Status::end).
    #[cold]
    #[cfg_attr(target_arch = "nvptx64", inline(never))]
    pub(super) fn end<M: Memory>(host: M::Word, copy: M::Word, start: u64, deadline: Deadline) -> Option<WaitError> {
        let (reported, known) = (copy.load_relaxed_gpu(), copy.at(HOST).load_relaxed_gpu());
        let now = M::clock_ns();
        let stopped = if M::LOOK_NS == 0 {
            // Their values fit into 32 bits.
            (host.load_relaxed_sys() as u32 != 0) | (reported as u32 == WRITTEN as u32)
        } else {
            let looked = now & !POSTED;
            let due = known != POSTED && looked.wrapping_sub(known) >= M::LOOK_NS;
            let found = due && copy.at(HOST).cas_relaxed_gpu(known, looked) == known && look::<M>(host, copy);
            found | (reported == WRITTEN) | (known == POSTED)
        };
        if stopped {
            Some(WaitError::Fault)
        } else if deadline.is_over(now.wrapping_sub(start)) {
            Some(WaitError::Deadline)
        } else {
            None
        }
    }

    /// Does [`Status::cause`](super::Status::cause).
    #[cold]
    #[cfg_attr(target_arch = "nvptx64", inline(never))]
    pub(super) fn cause<M: Memory>(host: M::Word, copy: M::Word) -> Fault {
        // Another thread may have read it in the host's block.
        M::fence_acquire_gpu();
        let block = if host.load_relaxed_sys() as u32 != 0 { host } else { copy };
        M::fence_acquire_sys();
        Fault::read(record::<M>(block))
    }

    /// Does [`Status::explain`](super::Status::explain).
    #[cold]
    #[cfg_attr(target_arch = "nvptx64", inline(never))]
    #[expect(clippy::too_many_arguments, reason = "see above")]
    pub(super) fn explain<M: Memory>(
        host: M::Word,
        copy: M::Word,
        stop: WaitError,
        timeout: Fault,
        subject: u64,
        rest: u64,
        expected: u64,
        seen: u64,
    ) -> Fault {
        match stop {
            WaitError::Fault => cause::<M>(host, copy),
            WaitError::Deadline => timeout.with_words([subject, rest, expected, seen]),
            WaitError::NotConnected => timeout.with_kind(FaultKind::NotConnected),
        }
    }

    /// Does [`Status::report`](super::Status::report).
    #[cold]
    #[cfg_attr(target_arch = "nvptx64", inline(never))]
    pub(super) fn report<M: Memory>(copy: M::Word, kernel: M::Word, fault: Fault) {
        if copy.cas_relaxed_gpu(0, WRITING) != 0 {
            return;
        }
        let words = fault.to_words();
        // One by one: a loop would put the array on the stack.
        copy.at(RECORD).store_pair_relaxed_sys(words[0], words[1]);
        copy.at(RECORD + 2).store_pair_relaxed_sys(words[2], words[3]);
        copy.at(RECORD + 4).store_pair_relaxed_sys(words[4], words[5]);
        kernel.at(RECORD).store_pair_relaxed_sys(words[0], words[1]);
        kernel.at(RECORD + 2).store_pair_relaxed_sys(words[2], words[3]);
        kernel.at(RECORD + 4).store_pair_relaxed_sys(words[4], words[5]);
        super::place::store::<M>(kernel, fault);
        copy.store_release_gpu(WRITTEN);
        kernel.store_release_sys(1);
    }
}
