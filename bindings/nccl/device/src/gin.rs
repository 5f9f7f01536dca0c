// SPDX-License-Identifier: MIT OR Apache-2.0
//! Contexts: reads, waits, flush and reset. `post` has put and signal.

use crate::comm::Comm;
use crate::shims::{self, Backend};
use core::marker::PhantomData;
use gin_device::backend::Any;
use gin_device::coop::Coop;
use gin_device::gin::{Order, Sharing};
use gin_device::signal::{ContextId, CounterView, SignalView};
use gin_device::sys::{Global, Memory};
use gin_device::{Deadline, Fault, FaultKind, FaultSubject, Operation};

/// Width of signals and counters, in bits.
const SIGNAL_BITS: u32 = 64;
const COUNTER_BITS: u32 = 56;

/// Evaluates an expression in the elected thread of a coop and gives its result to all threads. Syncs before and after.
macro_rules! lead {
    ($coop:expr, $act:expr) => {{
        let coop = $coop;
        coop.sync();
        let mine = if coop.elect() { $act } else { Ok(()) };
        coop.agree_led(mine)
    }};
}
pub(crate) use lead;

/// One context of a communicator of NCCL.
///
/// `B` is the back end of NCCL. [`Any`] finds it at run time; a named back end is compiled in alone.
#[derive(Clone, Copy, Debug)]
pub struct Gin<'a, B: Backend = Any> {
    comm: &'a Comm,
    context: u32,
    sharing: Sharing,
    order: Order,
    backend: PhantomData<B>,
}

impl<'a> Gin<'a, Any> {
    /// Returns the context with this number, for any thread of the GPU. Its operations find the back end at run time.
    ///
    /// If the communicator has no context of this number, every operation returns [`FaultKind::UnknownContext`].
    #[inline(always)]
    #[must_use]
    pub fn new(comm: &'a Comm, context: ContextId) -> Self {
        Self::with_backend(comm, context)
    }
}

impl<'a, B: Backend> Gin<'a, B> {
    /// Returns the context with this number for a named back end: `Gin::<Proxy>::with_backend(..)`.
    ///
    /// On a communicator with another back end its operations return [`FaultKind::NoBackend`].
    #[inline(always)]
    #[must_use]
    pub fn with_backend(comm: &'a Comm, context: ContextId) -> Self {
        Self { comm, context: context.id(), sharing: Sharing::Gpu, order: Order::Acquire, backend: PhantomData }
    }

    /// Returns the same context for fewer threads. The caller promises that only these use it at the same time.
    #[inline(always)]
    #[must_use]
    pub fn shared_by(mut self, sharing: Sharing) -> Self {
        self.sharing = sharing;
        self
    }

    /// Returns the same context, whose waits, reads and flushes have this order. The default is [`Order::Acquire`].
    #[inline(always)]
    #[must_use]
    pub fn ordered(mut self, order: Order) -> Self {
        self.order = order;
        self
    }

    /// Returns the communicator.
    #[inline(always)]
    #[must_use]
    pub fn comm(&self) -> &'a Comm {
        self.comm
    }

    /// Returns the number of the context.
    #[inline(always)]
    #[must_use]
    pub fn context(&self) -> ContextId {
        ContextId::new(self.context)
    }

    #[inline(always)]
    pub(crate) fn sharing(&self) -> u32 {
        shims::sharing(self.sharing)
    }

    /// Returns a fault of this context.
    #[inline(always)]
    pub(crate) fn fault(&self, kind: FaultKind, operation: Operation) -> Fault {
        Fault::new(kind, operation).with_context(self.context)
    }

    /// Checks that the context exists and that the kernel has the code of its back end.
    #[inline(always)]
    pub(crate) fn check(&self, operation: Operation) -> Result<(), Fault> {
        let handle = self.comm.handle();
        if self.context >= handle.contexts {
            let fault = self.fault(FaultKind::UnknownContext, operation);
            return Err(fault.with_values(FaultSubject::None, handle.contexts as u64, self.context as u64));
        }
        if handle.backend & B::MASK == 0 {
            let fault = self.fault(FaultKind::NoBackend, operation);
            return Err(fault.with_values(FaultSubject::None, B::MASK as u64, handle.backend as u64));
        }
        Ok(())
    }

    #[inline(always)]
    fn check_id(&self, operation: Operation, kind: FaultKind, subject: FaultSubject, id: u32) -> Result<(), Fault> {
        let handle = self.comm.handle();
        let count = if matches!(kind, FaultKind::UnknownSignal) { handle.signals } else { handle.counters };
        if id < count {
            return Ok(());
        }
        Err(self.fault(kind, operation).with_values(subject, count as u64, id as u64))
    }

    /// Checks a signal of the caller's, and returns its id and bits.
    #[inline(always)]
    fn signal_of(&self, view: SignalView, operation: Operation) -> Result<(u32, u32), Fault> {
        self.check(operation)?;
        let (id, bits) = view.parts();
        let Some(id) = id else { return Err(self.fault(FaultKind::NoVaSignals, operation)) };
        self.check_id(operation, FaultKind::UnknownSignal, FaultSubject::Signal(id), id)?;
        self.check_width(operation, FaultSubject::Signal(id), bits, SIGNAL_BITS)?;
        Ok((id, bits))
    }

    #[inline(always)]
    fn counter_of(&self, counter: CounterView, operation: Operation) -> Result<(u32, u32), Fault> {
        self.check(operation)?;
        let (id, bits) = counter.parts();
        self.check_id(operation, FaultKind::UnknownCounter, FaultSubject::Counter(id), id)?;
        self.check_width(operation, FaultSubject::Counter(id), bits, COUNTER_BITS)?;
        Ok((id, bits))
    }

    #[inline(always)]
    fn check_width(&self, operation: Operation, subject: FaultSubject, bits: u32, limit: u32) -> Result<(), Fault> {
        if bits != 0 && bits <= limit {
            return Ok(());
        }
        Err(self.fault(FaultKind::BadWidth, operation).with_values(subject, limit as u64, bits as u64))
    }

    /// Returns the value of a signal now, modulo 2^bits. Every thread reads for itself.
    ///
    /// Ordering: acquire, at system scope, unless [`ordered`](Self::ordered) says otherwise.
    ///
    /// # Errors
    /// [`FaultKind::UnknownContext`], [`FaultKind::UnknownSignal`], [`FaultKind::BadWidth`].
    #[inline(always)]
    pub fn read_signal(&self, signal: impl Into<SignalView>) -> Result<u64, Fault> {
        let (id, bits) = self.signal_of(signal.into(), Operation::WaitSignal)?;
        Ok(self.signal_value(id, bits, self.order))
    }

    #[inline(always)]
    pub(crate) fn signal_value(&self, id: u32, bits: u32, order: Order) -> u64 {
        let comm = self.comm.dev_comm();
        // Safety: the host made the communicator; context and id were checked, and the back end is compiled in.
        unsafe { shims::gin_nccl_read_signal(comm, self.context, B::MASK, id, bits, shims::order(order)) }
    }

    /// Waits until a signal is at or past `least`, on a circle of 2^bits values.
    ///
    /// All threads of `coop` call; one polls. Conditions: fewer than 2^(bits - 1) is raised between the last reset, or
    /// any earlier wait, and the awaited value; no reset while raises are in flight.
    ///
    /// Ordering: acquire, at system scope, unless [`ordered`](Self::ordered) says otherwise: the puts that the signal
    /// covers are visible.
    ///
    /// # Errors
    /// [`FaultKind::Timeout`] with the values expected and seen; the fault or abort that ended the wait; the fault of a
    /// wrong argument.
    #[inline(always)]
    pub fn wait_signal(
        &self,
        coop: &impl Coop,
        signal: impl Into<SignalView>,
        least: u64,
        deadline: Deadline,
    ) -> Result<(), Fault> {
        let view = signal.into();
        lead!(coop, self.wait_signal_here(view, least, deadline))
    }

    #[inline(always)]
    fn wait_signal_here(&self, view: SignalView, least: u64, deadline: Deadline) -> Result<(), Fault> {
        let (id, bits) = self.signal_of(view, Operation::WaitSignal)?;
        let value = || self.signal_value(id, bits, Order::Relaxed);
        self.wait(value, least, bits, deadline, self.order, Operation::WaitSignal, FaultSubject::Signal(id))
    }

    /// Polls `value` until it is at or past `least`.
    #[inline(always)]
    #[expect(clippy::too_many_arguments, reason = "they are the words of a fault, which would be on the stack")]
    pub(crate) fn wait(
        &self,
        value: impl Fn() -> u64,
        least: u64,
        bits: u32,
        deadline: Deadline,
        order: Order,
        operation: Operation,
        subject: FaultSubject,
    ) -> Result<(), Fault> {
        let mut seen = 0;
        let status = self.comm.status();
        let met = status.poll(deadline, || {
            seen = value();
            // Past, on a circle: the distance is in the lower half.
            let distance = seen.wrapping_sub(least) << (64 - bits);
            distance >> 63 == 0
        });
        match met {
            Ok(()) => {
                if matches!(order, Order::Acquire) {
                    Global::fence_acquire_sys();
                }
                Ok(())
            }
            Err(stop) => {
                let timeout = self.fault(FaultKind::Timeout, operation);
                Err(status.explain(stop, timeout, subject, deadline, least, seen))
            }
        }
    }

    /// Returns the value of a counter now, modulo 2^bits. Every thread reads for itself.
    ///
    /// Ordering: acquire, at system scope, unless [`ordered`](Self::ordered) says otherwise.
    ///
    /// # Errors
    /// [`FaultKind::UnknownContext`], [`FaultKind::UnknownCounter`], [`FaultKind::BadWidth`].
    #[inline(always)]
    pub fn read_counter(&self, counter: impl Into<CounterView>) -> Result<u64, Fault> {
        let (id, bits) = self.counter_of(counter.into(), Operation::WaitCounter)?;
        Ok(self.counter_value(id, bits, self.order))
    }

    #[inline(always)]
    fn counter_value(&self, id: u32, bits: u32, order: Order) -> u64 {
        let comm = self.comm.dev_comm();
        // Safety: as in `signal_value`.
        unsafe { shims::gin_nccl_read_counter(comm, self.context, B::MASK, id, bits, shims::order(order)) }
    }

    /// Waits until a counter is at or past `least`, on a circle of 2^bits values. All threads of `coop` call; one
    /// polls.
    ///
    /// Ordering: acquire, at system scope, unless [`ordered`](Self::ordered) says otherwise.
    ///
    /// # Errors
    /// As [`wait_signal`](Self::wait_signal).
    #[inline(always)]
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
    fn wait_counter_here(&self, counter: CounterView, least: u64, deadline: Deadline) -> Result<(), Fault> {
        let (id, bits) = self.counter_of(counter, Operation::WaitCounter)?;
        let value = || self.counter_value(id, bits, Order::Relaxed);
        self.wait(value, least, bits, deadline, self.order, Operation::WaitCounter, FaultSubject::Counter(id))
    }

    /// Waits until all earlier operations of this context are complete: sources of puts may be reused. It does not
    /// report that puts have arrived at their peers.
    ///
    /// All threads of `coop` call. NCCL's function has no deadline: the call ends when the operations are complete, or
    /// when the host aborts the communicator.
    ///
    /// Ordering: acquire, at system scope, unless [`ordered`](Self::ordered) says otherwise.
    ///
    /// # Errors
    /// The abort or fault that ended the wait; [`FaultKind::UnknownContext`], [`FaultKind::NoBackend`].
    #[inline(always)]
    pub fn flush(&self, coop: &impl Coop) -> Result<(), Fault> {
        lead!(coop, self.flush_here())
    }

    #[inline(always)]
    pub(crate) fn flush_here(&self) -> Result<(), Fault> {
        self.check(Operation::Flush)?;
        // Safety: as in `signal_value`.
        unsafe { shims::gin_nccl_flush(self.comm.dev_comm(), self.context, B::MASK, shims::order(self.order)) };
        match self.comm.fault() {
            None => Ok(()),
            Some(fault) => Err(fault),
        }
    }

    /// Sets a signal to 0, in every calling thread. No operation that raises it may be under way.
    ///
    /// # Errors
    /// [`FaultKind::UnknownContext`], [`FaultKind::UnknownSignal`].
    #[inline(always)]
    pub fn reset_signal(&self, signal: impl Into<SignalView>) -> Result<(), Fault> {
        let (id, _) = self.signal_of(signal.into(), Operation::Reset)?;
        // Safety: as in `signal_value`.
        unsafe { shims::gin_nccl_reset_signal(self.comm.dev_comm(), self.context, B::MASK, id) };
        Ok(())
    }

    /// Sets a counter to 0, in every calling thread. No operation that raises it may be under way.
    ///
    /// # Errors
    /// [`FaultKind::UnknownContext`], [`FaultKind::UnknownCounter`].
    #[inline(always)]
    pub fn reset_counter(&self, counter: impl Into<CounterView>) -> Result<(), Fault> {
        let (id, _) = self.counter_of(counter.into(), Operation::Reset)?;
        // Safety: as in `signal_value`.
        unsafe { shims::gin_nccl_reset_counter(self.comm.dev_comm(), self.context, B::MASK, id) };
        Ok(())
    }

    /// Returns NCCL's shadow of a signal.
    #[inline(always)]
    pub(crate) fn shadow(&self, id: u32) -> *mut u64 {
        // Safety: as in `signal_value`.
        unsafe { shims::gin_nccl_signal_shadow(self.comm.dev_comm(), self.context, B::MASK, id) }
    }
}
