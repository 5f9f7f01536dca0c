// SPDX-License-Identifier: MIT OR Apache-2.0
//! Names of contexts, signals and counters, and the operations on them.

use crate::team::Rank;
use crate::window::{Window, reaches};
use bytemuck::Pod;
use gin_abi::descriptor::{RemoteSignal, SignalTarget};
use gin_abi::{COUNTER_BITS, FaultSubject, SIGNAL_BITS, WindowHandle};

/// A context: a queue with signals and counters of its own. Nothing orders two contexts.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ContextId(pub(crate) u32);

impl ContextId {
    /// Returns the context with this number, from 0. Operations check it.
    #[inline(always)]
    #[must_use]
    pub const fn new(id: u32) -> Self {
        Self(id)
    }

    /// Returns the number, for back ends of other crates.
    #[doc(hidden)]
    #[inline(always)]
    #[must_use]
    pub const fn id(self) -> u32 {
        self.0
    }
}

/// A signal of a context: a 64-bit word that peers raise.
///
/// ```
/// # use gin_device::prelude::*;
/// let signal = SignalId::new(3);
/// assert_eq!(signal.inc(), signal.add(1));
/// assert_ne!(signal.inc(), signal.inc().weak());
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SignalId(u32);

impl SignalId {
    /// Returns the signal with this number, from 0. Operations check it.
    #[inline(always)]
    #[must_use]
    pub const fn new(id: u32) -> Self {
        Self(id)
    }

    /// Returns the action that raises it by one; strong.
    #[inline(always)]
    #[must_use]
    pub const fn inc(self) -> SignalAction {
        self.add(1)
    }

    /// Returns the action that raises it by `amount`; strong. Not for subtraction: a waiter may miss a value that goes
    /// back.
    #[inline(always)]
    #[must_use]
    pub const fn add(self, amount: u64) -> SignalAction {
        SignalAction { signal: Signal::Id(self.0), amount, strong: true }
    }

    /// Returns the same signal with only its low `bits` bits (1 to 64).
    #[inline(always)]
    #[must_use]
    pub const fn bits(self, bits: u32) -> SignalView {
        SignalView { signal: Signal::Id(self.0), bits }
    }
}

/// A signal at an 8-byte word of a window, from [`Window::signal`].
///
/// The window must be registered with the flag `signals`. The word then belongs to the signal: only operations on
/// signals may read or reset it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct VaSignal {
    pub(crate) window: WindowHandle,
    pub(crate) offset: u64,
}

impl<T: Pod> Window<T> {
    /// Returns the 8-byte word at byte `offset` as a signal. The window needs the flag `signals`.
    #[inline(always)]
    #[must_use]
    pub fn signal(&self, offset: u64) -> VaSignal {
        VaSignal { window: *self.handle(), offset }
    }
}

impl VaSignal {
    /// Returns the offset of the first byte past the word; `u64::MAX` if that overflows.
    #[inline(always)]
    pub(crate) const fn end(&self) -> u64 {
        self.offset.saturating_add(8)
    }

    /// Returns what a fault of the signal concerns.
    #[inline(always)]
    pub(crate) const fn subject(&self) -> FaultSubject {
        FaultSubject::Window { id: self.window.id, offset: self.offset }
    }

    /// Returns whether the word is in `rank`'s part of the window.
    #[inline(always)]
    pub(crate) fn fits_on(&self, rank: Rank) -> bool {
        reaches(&self.window, rank, self.end())
    }

    /// Returns the action that raises it by one; strong.
    #[inline(always)]
    #[must_use]
    pub const fn inc(self) -> SignalAction {
        self.add(1)
    }

    /// Returns the action that raises it by `amount`; strong. Not for subtraction.
    #[inline(always)]
    #[must_use]
    pub const fn add(self, amount: u64) -> SignalAction {
        SignalAction { signal: Signal::Va(self), amount, strong: true }
    }

    /// Returns the same signal with only its low `bits` bits (1 to 64).
    #[inline(always)]
    #[must_use]
    pub const fn bits(self, bits: u32) -> SignalView {
        SignalView { signal: Signal::Va(self), bits }
    }
}

/// The word of a signal.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Signal {
    Id(u32),
    Va(VaSignal),
}

/// The effect of an operation on a signal of its peer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SignalAction {
    pub(crate) signal: Signal,
    pub(crate) amount: u64,
    pub(crate) strong: bool,
}

impl SignalAction {
    /// Returns the same action with a weak signal, which covers only the put that it is bound to, not earlier puts.
    #[inline(always)]
    #[must_use]
    pub const fn weak(mut self) -> Self {
        self.strong = false;
        self
    }

    /// Returns id and amount of a signal with an id, for back ends of other crates.
    #[doc(hidden)]
    #[inline(always)]
    #[must_use]
    pub const fn id_and_amount(&self) -> Option<(u32, u64)> {
        match self.signal {
            Signal::Id(id) => Some((id, self.amount)),
            Signal::Va(_) => None,
        }
    }

    #[inline(always)]
    pub(crate) const fn remote(&self) -> RemoteSignal {
        let target = match self.signal {
            Signal::Id(id) => SignalTarget::Id(id),
            Signal::Va(va) => SignalTarget::Address { window: va.window.id, offset: va.offset },
        };
        RemoteSignal { target, amount: self.amount, strong: self.strong }
    }
}

/// A signal to read, wait for or reset, and the number of its bits that count.
///
/// Comparison is on a circle of 2^bits values: a value up to half the circle ahead counts as later.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SignalView {
    pub(crate) signal: Signal,
    pub(crate) bits: u32,
}

impl SignalView {
    /// Returns the id, if the signal has one, and the number of bits, for back ends of other crates.
    #[doc(hidden)]
    #[inline(always)]
    #[must_use]
    pub const fn parts(&self) -> (Option<u32>, u32) {
        match self.signal {
            Signal::Id(id) => (Some(id), self.bits),
            Signal::Va(_) => (None, self.bits),
        }
    }

    /// Returns what a fault of the signal concerns.
    #[inline(always)]
    pub(crate) const fn subject(&self) -> FaultSubject {
        match self.signal {
            Signal::Id(id) => FaultSubject::Signal(id),
            Signal::Va(va) => va.subject(),
        }
    }
}

impl From<SignalId> for SignalView {
    #[inline(always)]
    fn from(id: SignalId) -> Self {
        id.bits(SIGNAL_BITS)
    }
}

impl From<VaSignal> for SignalView {
    #[inline(always)]
    fn from(va: VaSignal) -> Self {
        va.bits(SIGNAL_BITS)
    }
}

/// A counter of a context: the number of operations whose source may be reused, modulo 2^56.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CounterId(pub(crate) u32);

impl CounterId {
    /// Returns the counter with this number, from 0. Operations check it.
    #[inline(always)]
    #[must_use]
    pub const fn new(id: u32) -> Self {
        Self(id)
    }

    /// Returns the number, for back ends of other crates.
    #[doc(hidden)]
    #[inline(always)]
    #[must_use]
    pub const fn id(self) -> u32 {
        self.0
    }

    /// Returns the same counter with only its low `bits` bits (1 to 56).
    #[inline(always)]
    #[must_use]
    pub const fn bits(self, bits: u32) -> CounterView {
        CounterView { id: self.0, bits }
    }
}

/// A counter to read or wait for, and the number of its bits that count.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CounterView {
    pub(crate) id: u32,
    pub(crate) bits: u32,
}

impl CounterView {
    /// Returns the number of the counter and the number of bits, for back ends of other crates.
    #[doc(hidden)]
    #[inline(always)]
    #[must_use]
    pub const fn parts(&self) -> (u32, u32) {
        (self.id, self.bits)
    }
}

impl From<CounterId> for CounterView {
    #[inline(always)]
    fn from(id: CounterId) -> Self {
        id.bits(COUNTER_BITS)
    }
}
