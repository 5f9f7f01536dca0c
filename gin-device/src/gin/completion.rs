// SPDX-License-Identifier: MIT OR Apache-2.0
//! Flush, tokens and counters.

use super::{Core, Gin, Order};
use crate::backend::Backend;
use crate::coop::{Coop, lead};
use crate::fault::{self, Fault, Unmet};
use crate::host_word;
use crate::signal::CounterView;
use crate::signal_words::Words;
use crate::status::{NOW_AND_THEN, WaitError};
use crate::sys::{self, Global, GlobalWord};
use crate::team::Rank;
use gin_abi::handle::{ENGINE_CPU, ENGINE_GPU, ENGINE_NIC};
use gin_abi::{COUNTER_BITS, Deadline, FaultKind, FaultSubject, Operation};

/// A position among a context's posts to one peer, from [`Gin::flush_async`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FlushToken {
    position: u64,
    peer: Rank,
}

impl FlushToken {
    /// Makes the token again of its position and peer, for the functions of C.
    #[doc(hidden)]
    #[inline(always)]
    #[must_use]
    pub const fn from_parts(position: u64, peer: Rank) -> Self {
        Self { position, peer }
    }

    /// Returns the position among the posts to its peer.
    #[doc(hidden)]
    #[inline(always)]
    #[must_use]
    pub const fn position(&self) -> u64 {
        self.position
    }
}

impl<B: Backend> Gin<B> {
    /// Waits until all earlier operations of this context are complete: sources of puts may be reused, and the data of
    /// gets is visible. It does not report that puts have arrived at their peers.
    ///
    /// All threads of `coop` call. Operations of other threads count if they happen before. The cost does not grow with
    /// the number of peers.
    ///
    /// Ordering: acquire, at system scope, unless [`ordered`](Self::ordered) says otherwise.
    ///
    /// # Errors
    /// [`FaultKind::Timeout`] if they are not complete in time; the fault of a failed operation; the fault or abort
    /// that ended the wait.
    #[inline(always)]
    #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
    pub fn flush(&self, coop: &impl Coop, deadline: Deadline) -> Result<(), Fault> {
        lead!(coop, self.flush_here(deadline))
    }

    #[inline(always)]
    #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
    pub(crate) fn flush_here(&self, deadline: Deadline) -> Result<(), Fault> {
        self.core().check(Operation::Flush)?;
        let position = B::position(self.core(), None);
        waits!(Some(self.core().fault(FaultKind::Timeout, Operation::Flush).with_values(
            FaultSubject::None,
            position,
            0
        )));
        let flushed = B::wait(self.core(), None, position, deadline);
        flushed.map_err(|stop| ended(self.core(), stop, Operation::Flush, FaultSubject::None, deadline, (position, 0)))
    }

    /// Returns a token for the operations posted to `peer` until now. Does not wait.
    ///
    /// # Errors
    /// [`FaultKind::UnknownContext`].
    #[inline(always)]
    #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
    pub fn flush_async(&self, peer: Rank) -> Result<FlushToken, Fault> {
        self.core().check(Operation::Flush)?;
        Ok(FlushToken { position: B::position(self.core(), Some(peer.world())), peer })
    }

    /// Waits until the token's operations are complete, as [`flush`](Self::flush) does. Operations to other peers do
    /// not delay it.
    ///
    /// All threads of `coop` call. Their tokens may differ: the token of rank 0 counts.
    ///
    /// # Errors
    /// As [`flush`](Self::flush).
    #[inline(always)]
    #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
    pub fn wait(&self, coop: &impl Coop, token: FlushToken, deadline: Deadline) -> Result<(), Fault> {
        lead!(coop, self.token_here(token, deadline))
    }

    #[inline(always)]
    #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
    fn token_here(&self, token: FlushToken, deadline: Deadline) -> Result<(), Fault> {
        self.core().check(Operation::Flush)?;
        let peer = token.peer.world();
        waits!(Some(self.core().fault(FaultKind::Timeout, Operation::Flush).with_values(
            FaultSubject::None,
            token.position,
            0
        )));
        let flushed = B::wait(self.core(), Some(peer), token.position, deadline);
        flushed.map_err(|stop| {
            let timeout = self.core().fault(FaultKind::Timeout, Operation::Flush).with_peer(peer);
            self.core().status().explain(stop, timeout, FaultSubject::None, deadline, token.position, 0)
        })
    }

    #[inline(always)]
    #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
    fn check_counter(&self, counter: CounterView, operation: Operation) -> Result<(), Fault> {
        let counters = self.core().comm().counters();
        fault::check!(self.core().fault(FaultKind::BadDescriptor, operation), |judge| {
            self.core().judge(&mut judge);
            let unmet = |kind| Unmet::new(kind).of(FaultSubject::Counter(counter.id));
            judge.condition(counter.id < counters, || {
                unmet(FaultKind::UnknownCounter).values(counters as u64, counter.id as u64)
            });
            judge.condition(counter.bits != 0 && counter.bits <= COUNTER_BITS, || {
                unmet(FaultKind::BadWidth).values(COUNTER_BITS as u64, counter.bits as u64)
            });
        })
    }

    /// Returns the value of a counter now, modulo 2^bits. Every thread reads for itself.
    ///
    /// Ordering: acquire, at system scope, unless [`ordered`](Self::ordered) says otherwise.
    ///
    /// # Errors
    /// [`FaultKind::UnknownContext`], [`FaultKind::UnknownCounter`], [`FaultKind::BadWidth`].
    #[inline(always)]
    #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
    pub fn read_counter(&self, counter: impl Into<CounterView>) -> Result<u64, Fault> {
        let counter = counter.into();
        self.check_counter(counter, Operation::WaitCounter)?;
        let words = counter_words(self.core(), counter.id);
        B::attend(self.core());
        Ok(read(self.core(), &words, counter.bits))
    }

    /// Waits until a counter is at or past `least`, on a circle of 2^bits values.
    ///
    /// All threads of `coop` call; one polls. Condition: there are fewer than 2^(bits - 1) increments between the last
    /// reset, or any earlier wait, and the awaited value.
    ///
    /// Ordering: acquire, at system scope, unless [`ordered`](Self::ordered) says otherwise.
    ///
    /// # Errors
    /// [`FaultKind::Timeout`] with the values expected and seen; the fault or abort that ended the wait; the fault of a
    /// wrong argument.
    #[inline(always)]
    #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
    pub fn wait_counter(
        &self,
        coop: &impl Coop,
        counter: impl Into<CounterView>,
        least: u64,
        deadline: Deadline,
    ) -> Result<(), Fault> {
        let counter = counter.into();
        lead!(coop, self.wait_counter_here(counter, least, deadline))
    }

    #[inline(always)]
    #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
    fn wait_counter_here(&self, counter: CounterView, least: u64, deadline: Deadline) -> Result<(), Fault> {
        self.check_counter(counter, Operation::WaitCounter)?;
        let words = counter_words(self.core(), counter.id);
        waits!(Some(self.core().fault(FaultKind::Timeout, Operation::WaitCounter).with_values(
            FaultSubject::Counter(counter.id),
            least,
            0
        )));
        match wait::<B>(self.core(), &words, least, counter.bits, deadline, false) {
            Ok(_) => Ok(()),
            Err((stop, seen)) => {
                let subject = FaultSubject::Counter(counter.id);
                Err(ended(self.core(), stop, Operation::WaitCounter, subject, deadline, (least, seen)))
            }
        }
    }

    /// Sets a counter to 0, in every calling thread. No operation that raises it may be under way.
    ///
    /// Threads that use the counter afterwards must be synchronised with this one.
    ///
    /// # Errors
    /// [`FaultKind::UnknownContext`], [`FaultKind::UnknownCounter`].
    #[inline(always)]
    #[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
    pub fn reset_counter(&self, counter: impl Into<CounterView>) -> Result<(), Fault> {
        let counter = counter.into();
        self.check_counter(counter, Operation::Reset)?;
        counter_words(self.core(), counter.id).reset();
        Ok(())
    }
}

/// Returns the words of a counter that was checked.
#[inline(always)]
fn counter_words(core: &Core, id: u32) -> Words<Global> {
    // Safety: the context and the id were checked; the host keeps the tables valid.
    unsafe {
        let (counters, near) = sys::read_pair(&raw const (*core.data()).counters);
        let offset = id as u64 * 8;
        let engines = core.comm().engines();
        // GPUs raise the counters of a NIC's operations.
        let gpus = engines & (ENGINE_GPU | ENGINE_NIC) != 0;
        Words {
            gpu: gpus.then(|| GlobalWord::new(sys::read_word(&raw const (*core.data()).counters_gpu) + offset)),
            nic: None,
            cpu: (engines & ENGINE_CPU != 0).then(|| GlobalWord::new(counters + offset)),
            near: GlobalWord::new(near + host_word::WORDS * offset),
            mailbox: None,
        }
    }
}

/// Returns the value of a signal or counter now, in the core's order.
#[inline(always)]
pub(super) fn read(core: &Core, words: &Words<Global>, bits: u32) -> u64 {
    match core.order() {
        Order::Acquire => words.read(bits),
        Order::Relaxed => words.value(bits),
    }
}

/// Waits for a signal or counter, in the core's order. Looks at the host's status afterwards if that is `due`, else
/// rarely.
#[inline(always)]
pub(super) fn wait<B: Backend>(
    core: &Core,
    words: &Words<Global>,
    least: u64,
    bits: u32,
    deadline: Deadline,
    due: bool,
) -> Result<u64, (WaitError, u64)> {
    let value = match core.order() {
        Order::Acquire => words.wait(&core.status(), least, bits, deadline, || B::attend(core)),
        Order::Relaxed => words.wait_relaxed(&core.status(), least, bits, deadline, || B::attend(core)),
    }?;
    match look_around::<B>(core, due) {
        Ok(()) => Ok(value),
        Err(stop) => Err((stop, value)),
    }
}

/// Checks the status after about one in 64 successful waits, and if that is `due`.
///
/// After an abort nothing arrives over the network, so a wait there lasts until it checks the status. Loads and stores
/// continue after an abort, so a wait for their signals might never last long enough to check. A check after each wait
/// would take a trip to the host.
///
/// # Errors
/// [`WaitError::Fault`].
#[inline(always)]
pub(crate) fn look_around<B: Backend>(core: &Core, due: bool) -> Result<(), WaitError> {
    if B::LSA && core.comm().lsa_reach() != 0 && (due || is_time_to_look()) {
        return core.status().check();
    }
    Ok(())
}

/// Returns whether a wait that has succeeded should look at the host's status now: rarely.
#[inline(always)]
pub(crate) fn is_time_to_look() -> bool {
    sys::cycles() & NOW_AND_THEN == 0
}

/// Returns the fault of a wait that ended early, with the deadline and the values expected and seen.
#[inline(always)]
pub(super) fn ended(
    core: &Core,
    stop: WaitError,
    operation: Operation,
    subject: FaultSubject,
    deadline: Deadline,
    (expected, seen): (u64, u64),
) -> Fault {
    core.status().explain(stop, core.fault(FaultKind::Timeout, operation), subject, deadline, expected, seen)
}
